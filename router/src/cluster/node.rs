//! One node, as the router sees it.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::internal::NodeStatus;
use baton_registry::{Member, Role};
use baton_runtime::grpc::BadAddress;
use baton_types::{
    BlockHash, HASH_UNIT_TOKENS, Incarnation, ModelFingerprint, NodeId, NumericsVersion,
};
use tokio::sync::watch;
use tonic::transport::Channel;

use super::failures::Failures;

/// After a failed dispatch nothing is sent to a node for so long; doubled with each failure in a
/// row, up to sixteen times.
const EJECTED_FIRST: Duration = Duration::from_millis(250);

/// After a failed pull none is tried between the same two nodes for so long.
const PULL_AGAIN_FIRST: Duration = Duration::from_secs(10);

/// After a handoff that failed on the way none is tried between the same two nodes for so long:
/// until then the decode node is either heard again or given up.
const HAND_OVER_AGAIN_FIRST: Duration = Duration::from_secs(2);

/// Whether requests may go to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    Ready,
    /// Its status has never been heard, or not for too long.
    Unreachable,
    /// It takes no new requests.
    Draining,
    /// It has failed just now.
    Ejected,
    /// It has left the registry.
    Departed,
}

impl NodeState {
    pub fn as_str(self) -> &'static str {
        match self {
            NodeState::Ready => "ready",
            NodeState::Unreachable => "unreachable",
            NodeState::Draining => "draining",
            NodeState::Ejected => "ejected",
            NodeState::Departed => "departed",
        }
    }
}

/// A node: its membership, its connection, and what it last said.
#[derive(Debug)]
pub struct Node {
    member: Member,
    channel: Channel,
    heard: Mutex<Heard>,
    /// Requests that this router has there.
    in_flight: AtomicUsize,
    /// Prompt tokens that this router has sent there to be prefilled.
    in_flight_tokens: AtomicUsize,
    /// Its freed blocks are kept for one request of this router.
    kept: Arc<AtomicBool>,
    /// Goes to true when the node is given up: whoever waits for it must go elsewhere.
    lost: watch::Sender<bool>,
}

#[derive(Debug)]
struct Heard {
    status: NodeStatus,
    at: Option<Instant>,
    fingerprint: Option<ModelFingerprint>,
    hashes: HashSet<BlockHash>,
    failures: u32,
    ejected_until: Option<Instant>,
    departed: bool,
    /// Of a prefill node: pulls that failed, by the node that they were to come from.
    failed_pulls: Failures<NodeId>,
    /// Of a prefill node: handoffs that failed on the way, by decode node and start of it.
    failed_handoffs: Failures<(NodeId, Incarnation)>,
}

impl Default for Heard {
    fn default() -> Self {
        Self {
            status: NodeStatus::default(),
            at: None,
            fingerprint: None,
            hashes: HashSet::new(),
            failures: 0,
            ejected_until: None,
            departed: false,
            failed_pulls: Failures::new(PULL_AGAIN_FIRST),
            failed_handoffs: Failures::new(HAND_OVER_AGAIN_FIRST),
        }
    }
}

/// A node at one moment, for the plan.
#[derive(Clone, Debug)]
pub struct NodeView {
    pub node: Arc<Node>,
    pub role: Role,
    pub fingerprint: Option<ModelFingerprint>,
    pub numerics: NumericsVersion,
    pub incarnation: Incarnation,
    pub state: NodeState,
    /// Its freed blocks are kept for a request that has waited long.
    pub is_kept: bool,
    /// Leading prompt tokens that its prefix cache holds.
    pub cached_tokens: usize,
    /// The larger of what it said and what this router knows.
    pub busy_requests: usize,
    pub waiting_tokens: usize,
    pub free_tokens: usize,
    pub total_tokens: usize,
    /// 0 where nothing has run there yet.
    pub prefill_tokens_per_s: f64,
    pub decode_step_ms: f64,
    /// Of its transfers to others; 0 where it has measured none.
    pub kv_bytes_per_s: f64,
}

/// Keeps what a node frees for one request while it lives.
#[derive(Debug)]
pub struct Kept {
    node: NodeId,
    kept: Arc<AtomicBool>,
}

impl Kept {
    pub fn node(&self) -> &NodeId {
        &self.node
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.kept.store(false, Ordering::Release);
    }
}

/// Counts a request on a node while it lives.
#[derive(Debug)]
pub struct InFlight {
    node: Arc<Node>,
    tokens: usize,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.node.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.node.in_flight_tokens.fetch_sub(self.tokens, Ordering::AcqRel);
    }
}

impl Node {
    pub(super) fn new(member: Member) -> Result<Self, BadAddress> {
        Ok(Self {
            channel: baton_runtime::grpc::channel(&member.address)?,
            member,
            heard: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            in_flight_tokens: AtomicUsize::new(0),
            kept: Arc::default(),
            lost: watch::Sender::new(false),
        })
    }

    /// A node that nobody dials, for tests of the plan.
    #[cfg(test)]
    pub(crate) fn for_plan(member: Member) -> Self {
        Self::new(member).expect("the test's address is one")
    }

    pub fn member(&self) -> &Member {
        &self.member
    }

    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// Counts one request, with so many prompt tokens to prefill.
    pub fn begin(self: &Arc<Self>, tokens: usize) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        self.in_flight_tokens.fetch_add(tokens, Ordering::AcqRel);
        InFlight { node: self.clone(), tokens }
    }

    /// Keeps the node for one request: this router sends it no other new ones meanwhile. `None`
    /// where it is kept already.
    pub fn keep(&self) -> Option<Kept> {
        let was_kept = self.kept.swap(true, Ordering::AcqRel);
        let (node, kept) = (self.member.id.clone(), self.kept.clone());
        (!was_kept).then(|| Kept { node, kept })
    }

    /// Returns when the node is given up.
    pub async fn lost(&self) {
        let mut lost = self.lost.subscribe();
        // The sender lives as long as this node.
        let _gone = lost.wait_for(|lost| *lost).await;
    }

    /// A dispatch to it failed as if it were gone.
    pub fn failed(&self) {
        let mut heard = self.heard();
        let times = 1 << heard.failures.min(4);
        heard.failures += 1;
        heard.ejected_until = Some(Instant::now() + EJECTED_FIRST * times);
    }

    /// A dispatch to it went well.
    pub fn worked(&self) {
        let mut heard = self.heard();
        heard.failures = 0;
        heard.ejected_until = None;
    }

    /// How its pull from that node ended.
    pub fn pulled(&self, from: &NodeId, failed: bool) {
        self.heard().failed_pulls.note(from, failed, Instant::now());
    }

    /// Whether a pull from that node may be tried now.
    pub fn may_pull(&self, from: &NodeId) -> bool {
        self.heard().failed_pulls.may_try(from, Instant::now())
    }

    /// How a handoff to that decode node went on its way.
    pub fn handed_over(&self, to: &NodeView, failed: bool) {
        let to = (to.node.member.id.clone(), to.incarnation);
        self.heard().failed_handoffs.note(&to, failed, Instant::now());
    }

    /// Whether a handoff to that decode node may be tried now.
    pub fn may_hand_over(&self, to: &NodeView) -> bool {
        let to = (to.node.member.id.clone(), to.incarnation);
        self.heard().failed_handoffs.may_try(&to, Instant::now())
    }

    pub(super) fn set_departed(&self) {
        self.heard().departed = true;
    }

    pub(super) fn is_departed(&self) -> bool {
        self.heard().departed
    }

    /// Whether this router has requests there.
    pub(super) fn is_in_use(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) > 0
    }

    pub(super) fn set_lost(&self, lost: bool) {
        self.lost.send_if_modified(|was| std::mem::replace(was, lost) != lost);
        if lost {
            self.heard().at = None;
        }
    }

    pub(super) fn hear(&self, mut status: NodeStatus) {
        let mut heard = self.heard();
        if status.reset {
            heard.hashes.clear();
        }
        let parse = |bytes: &[u8]| BlockHash::try_from(bytes).ok();
        heard.hashes.extend(status.stored.drain(..).filter_map(|bytes| parse(&bytes)));
        for hash in status.removed.drain(..).filter_map(|bytes| parse(&bytes)) {
            heard.hashes.remove(&hash);
        }
        heard.fingerprint = ModelFingerprint::try_from(&status.fingerprint[..]).ok();
        heard.at = Some(Instant::now());
        heard.status = status;
        drop(heard);
        self.set_lost(false);
    }

    /// What it serves, as far as it has been heard.
    pub fn model(&self) -> Option<ModelFingerprint> {
        self.heard().fingerprint
    }

    /// Its numerics version, as far as it has been heard.
    pub fn numerics(&self) -> NumericsVersion {
        NumericsVersion(self.heard().status.numerics.clone())
    }

    pub fn state(&self) -> NodeState {
        Self::state_of(&self.heard())
    }

    fn state_of(heard: &Heard) -> NodeState {
        match heard {
            _ if heard.departed => NodeState::Departed,
            _ if heard.at.is_none() => NodeState::Unreachable,
            _ if heard.status.draining => NodeState::Draining,
            _ if heard.ejected_until.is_some_and(|until| until > Instant::now()) => {
                NodeState::Ejected
            }
            _ => NodeState::Ready,
        }
    }

    /// Age of the last report.
    pub fn report_age(&self) -> Option<Duration> {
        self.heard().at.map(|at| at.elapsed())
    }

    /// The last report, without block events.
    pub fn status(&self) -> NodeStatus {
        self.heard().status.clone()
    }

    /// What the plan needs to know, for a prompt with these unit hashes.
    pub fn view(self: &Arc<Self>, hashes: &[BlockHash]) -> NodeView {
        let heard = self.heard();
        let status = &heard.status;
        let block_tokens = (status.block_tokens as usize).max(HASH_UNIT_TOKENS);
        let units = block_tokens / HASH_UNIT_TOKENS;
        let cached_blocks = hashes
            .iter()
            .skip(units - 1)
            .step_by(units)
            .take_while(|hash| heard.hashes.contains(hash))
            .count();
        let own = self.in_flight.load(Ordering::Acquire);
        let own_tokens = self.in_flight_tokens.load(Ordering::Acquire);
        let free_blocks = status.kv_blocks_total.saturating_sub(status.kv_blocks_used) as usize;
        NodeView {
            node: self.clone(),
            role: self.member.role,
            fingerprint: heard.fingerprint,
            numerics: NumericsVersion(status.numerics.clone()),
            // What the node says itself is newer than the registry.
            incarnation: Incarnation(status.incarnation),
            state: Self::state_of(&heard),
            is_kept: self.kept.load(Ordering::Acquire),
            cached_tokens: cached_blocks * block_tokens,
            busy_requests: own.max((status.running + status.waiting + status.grants) as usize),
            waiting_tokens: own_tokens.max(status.waiting_tokens as usize),
            free_tokens: free_blocks * block_tokens,
            total_tokens: status.kv_blocks_total as usize * block_tokens,
            prefill_tokens_per_s: f64::from(status.prefill_tokens_per_s),
            decode_step_ms: f64::from(status.decode_step_ms),
            kv_bytes_per_s: f64::from(status.kv_bytes_per_s),
        }
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
