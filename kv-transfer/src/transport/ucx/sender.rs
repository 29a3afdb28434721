//! The prefill node's side: links to receivers, and streams whose frames take them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use baton_proto::internal::{AttachRequest, AttachResponse};
use baton_types::{Incarnation, NodeId};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;
use tonic::Code;

use super::{Attached, Command, LinkState, Ucx, sealed};
use crate::TransferError;
use crate::message::{Body, FEATURE_UCX, KvMessage};
use crate::transport::grpc::{GrpcTransport, PEERS_MAX};
use crate::transport::{Carried, STREAM_MESSAGES_MAX, Transport, TransportStream};

/// After two links in a row that never worked, a peer is offered another after so long; until then
/// frames take gRPC.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// As after a failure, where the peer has no UCX: it would have to be started anew.
const AFTER_REFUSAL: Duration = Duration::from_secs(60);
/// A peer that does not answer costs so long, and then the stream over gRPC that is tried.
const ATTACH_WITHIN: Duration = Duration::from_millis(1_500);
const UNAVAILABLE: &str = "unavailable";

/// Whether frames may take gRPC where UCX cannot be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    #[default]
    Allowed,
    /// The transfer fails instead.
    Forbidden,
}

/// Frames over UCX where both ends have it, the rest over gRPC.
#[derive(Debug)]
pub struct UcxTransport {
    grpc: GrpcTransport,
    ucx: Ucx,
    node: NodeId,
    incarnation: Incarnation,
    fallback: Fallback,
    /// Each has a lock of its own: one that does not answer keeps nobody from the others.
    peers: Mutex<HashMap<String, Arc<tokio::sync::Mutex<Kept>>>>,
    fallbacks: Mutex<HashMap<&'static str, Arc<AtomicU64>>>,
}

/// What is kept of a peer.
#[derive(Debug, Default)]
struct Kept {
    peer: Option<Peer>,
    /// The log says that there is no link; until one works it says so once.
    is_told: bool,
}

#[derive(Debug)]
enum Peer {
    Linked {
        token: u64,
        state: Arc<LinkState>,
        /// The one before never worked.
        is_second: bool,
    },
    Without {
        until: Instant,
        why: Why,
    },
}

/// Why there is no link.
#[derive(Clone, Debug)]
struct Why {
    /// For metrics.
    label: &'static str,
    text: String,
}

impl UcxTransport {
    pub fn new(
        grpc: GrpcTransport,
        ucx: Ucx,
        node: NodeId,
        incarnation: Incarnation,
        fallback: Fallback,
    ) -> Self {
        Self {
            grpc,
            ucx,
            node,
            incarnation,
            fallback,
            peers: Mutex::default(),
            fallbacks: Mutex::default(),
        }
    }

    /// Transfers that took gRPC though UCX is wanted, by reason.
    pub fn fallbacks(&self) -> Vec<(&'static str, u64)> {
        let fallbacks = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        fallbacks.iter().map(|(&why, count)| (why, count.load(Ordering::Relaxed))).collect()
    }

    fn count_fallback(&self, label: &'static str) -> Arc<AtomicU64> {
        let mut fallbacks = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        fallbacks.entry(label).or_default().clone()
    }

    fn kept(&self, peer: &str) -> Arc<tokio::sync::Mutex<Kept>> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= PEERS_MAX && !peers.contains_key(peer) {
            peers.retain(|_, kept| Arc::strong_count(kept) > 1);
        }
        peers.entry(peer.to_owned()).or_default().clone()
    }

    /// The link to a peer, made where there is none.
    async fn link(&self, peer: &str) -> Result<(u64, Arc<LinkState>), Why> {
        self.ucx.ready().await.map_err(|text| Why { label: UNAVAILABLE, text })?;
        let kept = self.kept(peer);
        // Two streams that begin at once share one link; making it takes milliseconds.
        let mut kept = kept.lock().await;
        let mut is_second = false;
        match &kept.peer {
            Some(Peer::Linked { token, state, .. }) if !state.has_failed() => {
                let link = (*token, state.clone());
                kept.is_told &= !link.1.has_worked();
                return Ok(link);
            }
            Some(Peer::Linked { state, is_second: was_second, .. })
                if !state.was_detached() && !state.has_worked() =>
            {
                if *was_second {
                    let text = "its last two links have never worked".to_owned();
                    return Err(kept.has_none(peer, Why { label: "failed", text }, AFTER_FAILURE));
                }
                // It may have died with a peer that has been started anew.
                is_second = true;
            }
            Some(Peer::Without { until, why }) if *until > Instant::now() => {
                return Err(why.clone());
            }
            // A receiver that took its region back is attached again at once, and one whose link
            // worked until it failed: it may have been started anew.
            Some(Peer::Linked { .. } | Peer::Without { .. }) | None => {}
        }
        match self.attach(peer).await {
            Ok((token, state)) => {
                kept.peer = Some(Peer::Linked { token, state: state.clone(), is_second });
                Ok((token, state))
            }
            Err((why, wait)) => Err(kept.has_none(peer, why, wait)),
        }
    }

    async fn attach(&self, peer: &str) -> Result<(u64, Arc<LinkState>), (Why, Duration)> {
        let broken = |text: String| (Why { label: "failed", text }, AFTER_FAILURE);
        let address = self.ucx.address().await.map_err(broken)?;
        let request = AttachRequest {
            node_id: self.node.to_string(),
            incarnation: self.incarnation.0,
            worker_address: sealed::seal(&address),
            ucx_version: self.ucx.version().unwrap_or_default(),
        };
        let mut client = self.grpc.staging(peer).map_err(|error| broken(error.to_string()))?;
        let answer =
            tokio::time::timeout(ATTACH_WITHIN, client.attach(request)).await.map_err(|_| {
                self.grpc.disconnect(peer);
                broken(format!("no answer within {} ms", ATTACH_WITHIN.as_millis()))
            })?;
        let answer = match answer {
            Ok(answer) => answer.into_inner(),
            Err(status) => {
                let text = status.message().to_owned();
                return Err(match status.code() {
                    Code::FailedPrecondition | Code::Unimplemented => {
                        (Why { label: "peer", text }, AFTER_REFUSAL)
                    }
                    _ => broken(text),
                });
            }
        };
        let (address, attached) = read_answer(answer).map_err(|text| broken(text.to_owned()))?;
        let pace = self.grpc.pace(peer).map_err(|error| broken(error.to_string()))?;
        let (token, state) = (attached.token, Arc::new(LinkState::new(peer.to_owned(), pace)));
        let link_state = state.clone();
        let connect = |reply| Command::Connect { address, attached, state: link_state, reply };
        self.ucx.ask(connect).await.and_then(|result| result).map_err(broken)?;
        Ok((token, state))
    }

    async fn over_grpc(&self, peer: &str, why: Why) -> Result<TransportStream, TransferError> {
        if why.label == UNAVAILABLE && self.fallback == Fallback::Allowed {
            // Nothing to fall back from: this node has no UCX, as its start has said.
            return self.grpc.connect(peer).await;
        }
        self.count_fallback(why.label).fetch_add(1, Ordering::Relaxed);
        if self.fallback == Fallback::Forbidden {
            let reason = format!("no UCX to it, and gRPC is forbidden for KV: {}", why.text);
            return Err(TransferError::Connect { peer: peer.to_owned(), reason });
        }
        let stream = self.grpc.connect(peer).await?;
        stream.carried.set_fallback(why.text);
        Ok(stream)
    }
}

impl Kept {
    /// Notes that for so long there is no link to `peer`, and why.
    fn has_none(&mut self, peer: &str, why: Why, wait: Duration) -> Why {
        if !std::mem::replace(&mut self.is_told, true) {
            let (label, reason) = (why.label, &why.text);
            tracing::warn!(peer, label, reason, "no UCX to this peer");
        }
        self.peer = Some(Peer::Without { until: Instant::now() + wait, why: why.clone() });
        why
    }
}

/// What a receiver answered, checked.
fn read_answer(answer: AttachResponse) -> Result<(Bytes, Attached), &'static str> {
    let slots = u16::try_from(answer.slots).map_err(|_| "the peer's answer has too many slots")?;
    if slots == 0 || answer.slot_bytes == 0 {
        return Err("the peer's answer has no slots");
    }
    let address = sealed::open(answer.worker_address).ok_or("the peer's address is damaged")?;
    let rkey = sealed::open(answer.rkey).ok_or("the peer's key is damaged")?;
    let attached = Attached {
        token: answer.token,
        rkey: rkey.into(),
        base: answer.base,
        slots,
        slot_bytes: answer.slot_bytes,
    };
    Ok((address, attached))
}

#[async_trait]
impl Transport for UcxTransport {
    async fn connect(&self, peer: &str) -> Result<TransportStream, TransferError> {
        let (token, state) = match self.link(peer).await {
            Ok(link) => link,
            Err(why) => return self.over_grpc(peer, why).await,
        };
        let (outgoing, messages) = mpsc::channel(STREAM_MESSAGES_MAX);
        let (give_back, given_back) = mpsc::unbounded_channel();
        let lane = Arc::new(Lane {
            token,
            state,
            ucx: self.ucx.clone(),
            is_accepted: AtomicBool::new(false),
            carried: Arc::default(),
            fallback: self.fallback,
            fallbacks: self.count_fallback("failed"),
        });
        let carried = lane.carried.clone();
        let chunks = outgoing_chunks(lane.clone(), messages, give_back, given_back);
        let incoming = self.grpc.open(peer, Some(token), chunks).await?;
        let listens = incoming.map(move |message| {
            if let Ok(KvMessage { body: Body::OpenAccepted(accepted), .. }) = &message {
                let takes = accepted.features & FEATURE_UCX != 0;
                lane.is_accepted.store(takes, Ordering::Release);
            }
            message
        });
        let (incoming, pace) = (listens.boxed(), self.grpc.pace(peer)?);
        Ok(TransportStream { outgoing, incoming, features: FEATURE_UCX, carried, pace })
    }

    fn disconnect(&self, peer: &str) {
        self.grpc.disconnect(peer);
    }
}

/// One stream's way over a link.
struct Lane {
    token: u64,
    state: Arc<LinkState>,
    ucx: Ucx,
    /// The receiver has said that frames may come that way.
    is_accepted: AtomicBool,
    carried: Arc<Carried>,
    fallback: Fallback,
    fallbacks: Arc<AtomicU64>,
}

impl Lane {
    fn is_open(&self) -> bool {
        self.is_accepted.load(Ordering::Acquire) && !self.state.has_failed()
    }

    /// A frame could not take the link. Whether it may take gRPC.
    fn falls_back(&self, why: &str) -> bool {
        if self.carried.set_fallback(why.to_owned()) {
            self.fallbacks.fetch_add(1, Ordering::Relaxed);
        }
        self.fallback == Fallback::Allowed
    }
}

/// What goes over gRPC: all but frames, and frames that the link gave back. Ends with `messages`,
/// or where a frame may not take gRPC.
fn outgoing_chunks(
    lane: Arc<Lane>,
    messages: mpsc::Receiver<KvMessage>,
    give_back: mpsc::UnboundedSender<Bytes>,
    given_back: mpsc::UnboundedReceiver<Bytes>,
) -> BoxStream<'static, Bytes> {
    let ends = (lane, messages, give_back, given_back);
    let next = |(lane, mut messages, give_back, mut given_back): (
        Arc<Lane>,
        mpsc::Receiver<KvMessage>,
        mpsc::UnboundedSender<Bytes>,
        mpsc::UnboundedReceiver<Bytes>,
    )| async move {
        loop {
            let chunk = tokio::select! {
                biased;
                Some(frame) = given_back.recv() => {
                    if !lane.falls_back("the UCX link failed during the transfer") {
                        return None;
                    }
                    lane.carried.count_grpc(frame.len());
                    frame
                }
                message = messages.recv() => {
                    let message = message?;
                    let chunk = message.encode();
                    if !matches!(message.body, Body::Frame(_)) {
                        return Some((chunk, (lane, messages, give_back, given_back)));
                    }
                    if lane.is_open() {
                        let (token, stream) = (lane.token, give_back.clone());
                        let frame = chunk.clone();
                        if lane.ucx.commands.send(Command::Send { token, frame, stream }) {
                            lane.carried.count_ucx(chunk.len());
                            continue;
                        }
                    }
                    if !lane.falls_back("no UCX for this transfer, or its link failed") {
                        return None;
                    }
                    lane.carried.count_grpc(chunk.len());
                    chunk
                }
            };
            return Some((chunk, (lane, messages, give_back, given_back)));
        }
    };
    futures::stream::unfold(ends, next).boxed()
}
