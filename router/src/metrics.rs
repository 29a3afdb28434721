//! The router's metrics. Time to first token is counted from the request's arrival at the router
//! to the first token at its API, once, under two names.

use std::time::Duration;

use baton_types::ErrorCode;
use prometheus::{
    Gauge, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
};

use crate::dispatch::Phases;

/// Seconds, from one step of a small model to a long prompt on a slow machine.
const BUCKETS: [f64; 16] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
];

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub enum Outcome {
    Done(Phases),
    Failed(ErrorCode),
    Cancelled,
}

#[derive(Clone, Debug)]
pub struct RouterMetrics {
    requests: IntCounterVec,
    success: IntCounterVec,
    prompt_tokens: IntCounterVec,
    prompt_tokens_alias: IntCounterVec,
    generated_tokens: IntCounterVec,
    generated_tokens_alias: IntCounterVec,
    time_to_first_token: [HistogramVec; 2],
    inter_token: [HistogramVec; 2],
    end_to_end: [HistogramVec; 2],
    queue: [HistogramVec; 2],
    prefill: [HistogramVec; 2],
    decode: [HistogramVec; 2],
    transfer: HistogramVec,
    recoveries: IntCounter,
    prefills_replaced: IntCounter,
    pub running: IntGauge,
    pub waiting: IntGauge,
    pub membership_stale: Gauge,
}

impl RouterMetrics {
    /// Registers the metrics.
    ///
    /// # Errors
    /// Where the registry has them already.
    pub fn new(r: &Registry) -> Result<Self, prometheus::Error> {
        let twins = |own: &str, alias: &str, help: &str| -> Result<_, prometheus::Error> {
            Ok([histogram(r, own, help)?, histogram(r, alias, help)?])
        };
        let membership_stale = Gauge::new(
            "baton_membership_stale",
            "1 while the registry cannot be reached and the last known members serve on.",
        )?;
        r.register(Box::new(membership_stale.clone()))?;
        Ok(Self {
            requests: counters(
                r,
                "baton_requests_total",
                "Requests by how they ended: ok, cancelled, or an error code.",
                &["model_name", "outcome"],
            )?,
            success: counters(
                r,
                "vllm:request_success_total",
                "Requests that ended well.",
                &["model_name"],
            )?,
            prompt_tokens: tokens(r, "baton_prompt_tokens_total", "Tokens of prompts.")?,
            prompt_tokens_alias: tokens(r, "vllm:prompt_tokens_total", "Tokens of prompts.")?,
            generated_tokens: tokens(r, "baton_generated_tokens_total", "Tokens of answers.")?,
            generated_tokens_alias: tokens(
                r,
                "vllm:generation_tokens_total",
                "Tokens of answers.",
            )?,
            time_to_first_token: twins(
                "baton_time_to_first_token_seconds",
                "vllm:time_to_first_token_seconds",
                "From arrival at the router to the first token at its API.",
            )?,
            inter_token: twins(
                "baton_inter_token_latency_seconds",
                "vllm:inter_token_latency_seconds",
                "Between two tokens of a request.",
            )?,
            end_to_end: twins(
                "baton_request_latency_seconds",
                "vllm:e2e_request_latency_seconds",
                "From arrival at the router to the end.",
            )?,
            queue: twins(
                "baton_request_queue_seconds",
                "vllm:request_queue_time_seconds",
                "In the queues of router and prefill.",
            )?,
            prefill: twins(
                "baton_request_prefill_seconds",
                "vllm:request_prefill_time_seconds",
                "Computing the prompt.",
            )?,
            decode: twins(
                "baton_request_decode_seconds",
                "vllm:request_decode_time_seconds",
                "From the first token to the last.",
            )?,
            transfer: histogram(
                r,
                "baton_request_transfer_unhidden_seconds",
                "Handing KV over, as far as it did not hide behind prefill.",
            )?,
            recoveries: counter(
                r,
                "baton_recoveries_total",
                "Answers that went on at another decode node after theirs was lost.",
            )?,
            prefills_replaced: counter(
                r,
                "baton_prefills_replaced_total",
                "Prompts that were computed elsewhere after a prefill failed.",
            )?,
            running: gauge(r, "baton_router_requests_running", "Requests that have a place.")?,
            waiting: gauge(r, "baton_router_requests_waiting", "Requests that wait for one.")?,
            membership_stale,
        })
    }

    pub fn first_token(&self, model: &str, after: Duration) {
        observe(&self.time_to_first_token, model, after.as_secs_f64());
    }

    pub fn next_token(&self, model: &str, after: Duration) {
        observe(&self.inter_token, model, after.as_secs_f64());
    }

    pub fn recovered(&self) {
        self.recoveries.inc();
    }

    pub fn prefill_replaced(&self) {
        self.prefills_replaced.inc();
    }

    /// Counts a request that has ended.
    pub fn request(
        &self,
        model: &str,
        outcome: &Outcome,
        took: Duration,
        prompt_tokens: usize,
        completion_tokens: usize,
    ) {
        let name = match outcome {
            Outcome::Done(_) => "ok",
            Outcome::Failed(code) => code.as_str(),
            Outcome::Cancelled => "cancelled",
        };
        self.requests.with_label_values(&[model, name]).inc();
        for counter in [&self.prompt_tokens, &self.prompt_tokens_alias] {
            counter.with_label_values(&[model]).inc_by(prompt_tokens as u64);
        }
        for counter in [&self.generated_tokens, &self.generated_tokens_alias] {
            counter.with_label_values(&[model]).inc_by(completion_tokens as u64);
        }
        observe(&self.end_to_end, model, took.as_secs_f64());
        if let Outcome::Done(phases) = outcome {
            self.success.with_label_values(&[model]).inc();
            let seconds = |us: u64| us as f64 / 1e6;
            let queued = phases.router_queue + phases.reserve + phases.prefill_queue;
            observe(&self.queue, model, seconds(queued));
            observe(&self.prefill, model, seconds(phases.prefill));
            observe(&self.decode, model, seconds(phases.decode));
            let transfer = self.transfer.with_label_values(&[model]);
            transfer.observe(seconds(phases.transfer_unhidden));
        }
    }
}

fn observe(twins: &[HistogramVec; 2], model: &str, seconds: f64) {
    twins.iter().for_each(|twin| twin.with_label_values(&[model]).observe(seconds));
}

fn histogram(r: &Registry, name: &str, help: &str) -> Result<HistogramVec, prometheus::Error> {
    let options = HistogramOpts::new(name, help).buckets(BUCKETS.to_vec());
    let histogram = HistogramVec::new(options, &["model_name"])?;
    r.register(Box::new(histogram.clone()))?;
    Ok(histogram)
}

fn counters(
    r: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let counters = IntCounterVec::new(Opts::new(name, help), labels)?;
    r.register(Box::new(counters.clone()))?;
    Ok(counters)
}

fn tokens(r: &Registry, name: &str, help: &str) -> Result<IntCounterVec, prometheus::Error> {
    counters(r, name, help, &["model_name"])
}

fn counter(r: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let counter = IntCounter::new(name, help)?;
    r.register(Box::new(counter.clone()))?;
    Ok(counter)
}

fn gauge(r: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let gauge = IntGauge::new(name, help)?;
    r.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}
