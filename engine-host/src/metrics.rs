//! The engine's metrics: `baton_*`, and the names of vLLM that existing dashboards read.

use std::sync::{Arc, Mutex, PoisonError};

use baton_engine::core::EngineCounters;
use prometheus::{GaugeVec, IntCounterVec, Opts, Registry};

use crate::{ModelInfo, NodeLoad};

/// Metrics of one engine, in one registry.
#[derive(Clone, Debug)]
pub struct EngineMetrics {
    labels: [String; 2],
    gauges: Arc<Gauges>,
    counters: Arc<Counters>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug)]
struct Gauges {
    running: Twin<GaugeVec>,
    waiting: Twin<GaugeVec>,
    kv_usage: Twin<GaugeVec>,
    kv_blocks: GaugeVec,
    reserved: GaugeVec,
    prefill_speed: GaugeVec,
    decode_step: GaugeVec,
}

#[derive(Debug)]
struct Counters {
    preemptions: Twin<IntCounterVec>,
    prefix_queries: Twin<IntCounterVec>,
    prefix_hits: Twin<IntCounterVec>,
    prefill_tokens: IntCounterVec,
    decode_tokens: IntCounterVec,
    steps: IntCounterVec,
    nan_logits: IntCounterVec,
    evictions: IntCounterVec,
}

/// The same figure under our name and under vLLM's.
#[derive(Debug)]
struct Twin<T> {
    own: T,
    alias: T,
}

/// What the counters have been told already.
#[derive(Debug, Default)]
struct Seen {
    counters: EngineCounters,
    query_tokens: u64,
    hit_tokens: u64,
    evicted_blocks: u64,
}

const LABELS: [&str; 2] = ["model_name", "engine"];

impl EngineMetrics {
    /// Registers the metrics of the engine `node`.
    ///
    /// # Errors
    /// Where the registry has them already.
    pub fn new(
        registry: &Registry,
        model: &ModelInfo,
        node: &str,
    ) -> Result<Self, prometheus::Error> {
        let labels = [model.spec.name.clone(), node.to_string()];
        let info = gauge(
            registry,
            "vllm:cache_config_info",
            "Shape of the KV pool.",
            &["model_name", "engine", "block_size", "num_gpu_blocks"],
        )?;
        let (size, blocks) = (model.layout.block_tokens.to_string(), model.kv_blocks.to_string());
        info.with_label_values(&[&labels[0], &labels[1], &size, &blocks]).set(1.0);
        Ok(Self {
            labels,
            gauges: Arc::new(Gauges::new(registry)?),
            counters: Arc::new(Counters::new(registry)?),
            seen: Arc::default(),
        })
    }

    /// Takes one look at the engine over.
    pub fn observe(&self, load: &NodeLoad) {
        let labels = [self.labels[0].as_str(), self.labels[1].as_str()];
        let (status, pool) = (&load.status, &load.status.pool);
        let set = |gauge: &GaugeVec, value: f64| gauge.with_label_values(&labels).set(value);
        let both = |twin: &Twin<GaugeVec>, value: f64| {
            set(&twin.own, value);
            set(&twin.alias, value);
        };
        let gauges = &*self.gauges;
        both(&gauges.running, status.running as f64);
        both(&gauges.waiting, status.waiting as f64);
        let capacity = pool.capacity_blocks.max(1) as f64;
        both(&gauges.kv_usage, pool.used_blocks as f64 / capacity);
        set(&gauges.reserved, status.reserved as f64);
        set(&gauges.prefill_speed, load.speed.prefill_tokens_per_s);
        set(&gauges.decode_step, load.speed.decode_step_ms / 1e3);
        for (state, blocks) in
            [("used", pool.used_blocks), ("cached", pool.cached_blocks), ("free", pool.free_blocks)]
        {
            let labels = [labels[0], labels[1], state];
            gauges.kv_blocks.with_label_values(&labels).set(blocks as f64);
        }
        self.count(load, &labels);
    }

    fn count(&self, load: &NodeLoad, labels: &[&str; 2]) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, pool) = (load.status.counters, &load.status.pool);
        let counters = &*self.counters;
        let add = |counter: &IntCounterVec, now: u64, before: u64| {
            counter.with_label_values(labels).inc_by(now.saturating_sub(before));
        };
        let both = |twin: &Twin<IntCounterVec>, now: u64, before: u64| {
            add(&twin.own, now, before);
            add(&twin.alias, now, before);
        };
        both(&counters.preemptions, now.preemptions, seen.counters.preemptions);
        both(&counters.prefix_queries, pool.query_tokens, seen.query_tokens);
        both(&counters.prefix_hits, pool.hit_tokens, seen.hit_tokens);
        add(&counters.prefill_tokens, now.prefill_tokens, seen.counters.prefill_tokens);
        add(&counters.decode_tokens, now.decode_tokens, seen.counters.decode_tokens);
        add(&counters.steps, now.steps, seen.counters.steps);
        add(&counters.nan_logits, now.nan_logits, seen.counters.nan_logits);
        add(&counters.evictions, pool.evicted_blocks, seen.evicted_blocks);
        *seen = Seen {
            counters: now,
            query_tokens: pool.query_tokens,
            hit_tokens: pool.hit_tokens,
            evicted_blocks: pool.evicted_blocks,
        };
    }
}

impl Gauges {
    fn new(r: &Registry) -> Result<Self, prometheus::Error> {
        let twin = |own: &str, alias: &str, help: &str| -> Result<_, prometheus::Error> {
            Ok(Twin { own: gauge(r, own, help, &LABELS)?, alias: gauge(r, alias, help, &LABELS)? })
        };
        Ok(Self {
            running: twin(
                "baton_engine_requests_running",
                "vllm:num_requests_running",
                "Requests whose prompt or answer is being computed.",
            )?,
            waiting: twin(
                "baton_engine_requests_waiting",
                "vllm:num_requests_waiting",
                "Requests that wait for a place in the batch.",
            )?,
            kv_usage: twin(
                "baton_kv_cache_usage_ratio",
                "vllm:kv_cache_usage_perc",
                "Share of KV blocks in use, 0 to 1; cached ones that can be evicted are not.",
            )?,
            kv_blocks: gauge(
                r,
                "baton_kv_blocks",
                "KV blocks by state.",
                &["model_name", "engine", "state"],
            )?,
            reserved: gauge(r, "baton_kv_grants", "Reservations that wait for their KV.", &LABELS)?,
            prefill_speed: gauge(
                r,
                "baton_engine_prefill_tokens_per_second",
                "Prompt tokens computed in a second, over recent steps.",
                &LABELS,
            )?,
            decode_step: gauge(
                r,
                "baton_engine_decode_step_seconds",
                "Time of one decode step, over recent steps.",
                &LABELS,
            )?,
        })
    }
}

impl Counters {
    fn new(r: &Registry) -> Result<Self, prometheus::Error> {
        let twin = |own: &str, alias: &str, help: &str| -> Result<_, prometheus::Error> {
            Ok(Twin { own: counter(r, own, help)?, alias: counter(r, alias, help)? })
        };
        Ok(Self {
            preemptions: twin(
                "baton_engine_preemptions_total",
                "vllm:num_preemptions_total",
                "Requests sent back to the queue for want of KV blocks.",
            )?,
            prefix_queries: twin(
                "baton_prefix_cache_queried_tokens_total",
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up in the prefix cache.",
            )?,
            prefix_hits: twin(
                "baton_prefix_cache_hit_tokens_total",
                "vllm:prefix_cache_hits_total",
                "Prompt tokens found in the prefix cache.",
            )?,
            prefill_tokens: counter(
                r,
                "baton_engine_prefill_tokens_total",
                "Tokens computed in prefill, recomputation included.",
            )?,
            decode_tokens: counter(
                r,
                "baton_engine_decode_tokens_total",
                "Tokens computed in decode.",
            )?,
            steps: counter(r, "baton_engine_steps_total", "Steps of the engine.")?,
            nan_logits: counter(
                r,
                "baton_engine_nan_logits_total",
                "Requests that failed because the model gave NaN.",
            )?,
            evictions: counter(
                r,
                "baton_prefix_cache_evicted_blocks_total",
                "Cached KV blocks that made room for others.",
            )?,
        })
    }
}

fn gauge(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<GaugeVec, prometheus::Error> {
    let gauge = GaugeVec::new(Opts::new(name, help), labels)?;
    registry.register(Box::new(gauge.clone()))?;
    Ok(gauge)
}

fn counter(
    registry: &Registry,
    name: &str,
    help: &str,
) -> Result<IntCounterVec, prometheus::Error> {
    let counter = IntCounterVec::new(Opts::new(name, help), &LABELS)?;
    registry.register(Box::new(counter.clone()))?;
    Ok(counter)
}
