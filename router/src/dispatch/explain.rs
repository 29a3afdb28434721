//! What a request can say about itself: where it went, why, and what each phase cost.

use std::time::Instant;

use baton_proto::internal::{Finished, HandedOff};
use baton_types::{Error, GenerateRequest, NodeId, Usage};
use serde::Serialize;

use super::sequencer::Sequencer;
use crate::plan::{Plan, Reason};

/// A request's own account (see docs/explain.md). Times are microseconds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Explain {
    pub request_id: String,
    pub model: String,
    pub seed: u64,
    pub decode_node: String,
    /// `None`: the prompt was computed at the decode node.
    pub prefill_node: Option<String>,
    /// Why it was prefilled there.
    pub reason: &'static str,
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens whose KV was reused, at whichever node computed the prompt.
    pub cached_tokens: u32,
    /// Prompt tokens that needed no transfer, since the decode node held them.
    pub cached_at_decode_tokens: u32,
    /// Prompt tokens that the prefill node pulled from another node's cache, and from which.
    pub pulled_tokens: u32,
    pub pulled_from: Option<String>,
    pub transferred_bytes: u64,
    /// How it travelled; empty where nothing did.
    pub transport: String,
    /// As "bf16 to int8" where the two nodes hold KV in different precisions; then the answer may
    /// be another than that of equal nodes. Else empty.
    pub kv_converted: String,
    pub preemptions: u32,
    pub phases_us: Phases,
    /// Failures on the way, and what was done about them.
    pub events: Vec<TrailEvent>,
}

/// Where the time went. From arrival to first token: `router_queue`, `reserve`, `prefill_queue`,
/// `prefill`, and what is left is network and scheduling.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Phases {
    /// From arrival until a place was sought.
    pub router_queue: u64,
    /// Until a decode node had reserved.
    pub reserve: u64,
    /// At the prefill node, to pull what another node held of the prompt.
    pub prefix_pull: u64,
    /// At the node that prefills, before its first step.
    pub prefill_queue: u64,
    pub prefill: u64,
    /// From the end of prefill until the decode node had everything: what hides behind nothing.
    pub transfer_unhidden: u64,
    /// From arrival to the first token at the router.
    pub first_token: u64,
    /// From the first token to the last.
    pub decode: u64,
    pub total: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct TrailEvent {
    /// Since arrival.
    pub at_us: u64,
    pub what: String,
}

impl Explain {
    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

/// Gathers the account on the way.
pub(super) struct Trail {
    arrived: Instant,
    placing_since: Instant,
    first_token: Option<Instant>,
    /// Whom the prefill node was told to pull from.
    pulls_from: Option<String>,
    explain: Explain,
}

impl Trail {
    pub fn new(arrived: Instant, request: &GenerateRequest, model: &str) -> Self {
        let now = Instant::now();
        let router_queue = micros(arrived, now);
        Self {
            arrived,
            placing_since: now,
            first_token: None,
            pulls_from: None,
            explain: Explain {
                request_id: request.id.to_string(),
                model: model.to_string(),
                seed: request.sampling.seed,
                prompt_tokens: request.prompt.len() as u32,
                phases_us: Phases { router_queue, ..Phases::default() },
                ..Explain::default()
            },
        }
    }

    pub fn placing(&mut self) {
        self.placing_since = Instant::now();
    }

    pub fn placed(&mut self, plan: &Plan, cached_tokens: u32) {
        let explain = &mut self.explain;
        explain.decode_node = plan.decode.node.member().id.to_string();
        explain.prefill_node =
            plan.prefill.as_ref().map(|prefill| prefill.node.member().id.to_string());
        explain.reason = plan.reason.as_str();
        explain.cached_at_decode_tokens = cached_tokens;
        explain.phases_us.reserve += micros(self.placing_since, Instant::now());
    }

    /// The prefill node is told to pull from that node, or from none.
    pub fn pulls(&mut self, from: Option<&str>) {
        self.pulls_from = from.map(str::to_owned);
    }

    pub fn token(&mut self) {
        self.first_token.get_or_insert_with(Instant::now);
    }

    /// Whom the prefill node was told to pull from, if anybody.
    pub fn pulls_from(&self) -> Option<NodeId> {
        self.pulls_from.as_deref().map(NodeId::new)
    }

    pub fn handed_off(&mut self, handed_off: &HandedOff) {
        let phases = &mut self.explain.phases_us;
        phases.prefill_queue = handed_off.queued_us;
        phases.prefix_pull = handed_off.pulled_us;
        let before = handed_off.queued_us + handed_off.pulled_us;
        phases.prefill = handed_off.computed_us.saturating_sub(before);
        phases.transfer_unhidden = handed_off.committed_us.saturating_sub(handed_off.computed_us);
        self.explain.cached_tokens = handed_off.cached_tokens;
        self.explain.transferred_bytes += handed_off.bytes_sent;
        self.explain.transport = handed_off.transport.clone();
        let from = self.pulls_from.take();
        if !handed_off.pull_error.is_empty() {
            let from = from.unwrap_or_default();
            let why = &handed_off.pull_error;
            self.note(format!("what {from} holds was not pulled: {why}"));
        } else if handed_off.pulled_tokens > 0 {
            self.explain.pulled_tokens = handed_off.pulled_tokens;
            self.explain.pulled_from = from;
        }
        self.explain.kv_converted = handed_off.converted.clone();
        // Where nothing had to travel there is no transport.
        if !handed_off.fallback.is_empty() && !handed_off.transport.is_empty() {
            self.note(format!("KV took gRPC: {}", handed_off.fallback));
        }
    }

    pub fn decoded(&mut self, finished: &Finished) {
        self.explain.preemptions += finished.preemptions;
        if self.explain.prefill_node.is_none() {
            let phases = &mut self.explain.phases_us;
            phases.prefill_queue = finished.queued_us;
            phases.prefill = finished.first_token_us.saturating_sub(finished.queued_us);
            self.explain.cached_tokens = finished.cached_tokens;
        }
    }

    pub fn prefill_failed(&mut self, next: Option<&str>, error: &Error) {
        let instead = next.unwrap_or("the decode node");
        self.note(format!("prefill failed ({error}); {instead} prefills"));
    }

    /// After a failed prefill; `None`: the decode node.
    pub fn prefills_at(&mut self, node: Option<String>) {
        if node.is_none() {
            self.explain.reason = Reason::NoPrefillNode.as_str();
        }
        self.explain.prefill_node = node;
    }

    pub fn recovered(&mut self, error: &Error) {
        let node = &self.explain.decode_node;
        self.note(format!("decode node {node} was lost ({error})"));
    }

    pub fn note(&mut self, what: String) {
        let at_us = micros(self.arrived, Instant::now());
        self.explain.events.push(TrailEvent { at_us, what });
    }

    pub fn finish(&mut self, sequencer: &Sequencer) -> Explain {
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        let phases = &mut self.explain.phases_us;
        phases.first_token = micros(self.arrived, first);
        phases.decode = micros(first, now);
        phases.total = micros(self.arrived, now);
        self.explain.completion_tokens = sequencer.tokens() as u32;
        std::mem::take(&mut self.explain)
    }
}

fn micros(from: Instant, to: Instant) -> u64 {
    to.saturating_duration_since(from).as_micros() as u64
}
