//! The requests on a decode node, from `Reserve` to the end of `Run`.
//!
//! A session joins three parties: the router (which reserves and then reads the tokens), the
//! engine (which holds the blocks), and the prefill node (which pushes KV under a grant). It ends
//! when the router's stream ends, or when nobody runs it in time.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_engine::core::Delivered;
use baton_engine_host::{Events, Grants, NodeConfig, NodeService, Taken, events};
use baton_kv_transfer::TransferError;
use baton_kv_transfer::clock::Clock;
use baton_kv_transfer::frame::WireLayout;
use baton_kv_transfer::grant::{Grant, GrantMinter};
use baton_kv_transfer::receive::ReceiverOutcome;
use baton_kv_transfer::receiver::{Receiver, ReceiverConfig};
use baton_runtime::random;
use baton_types::{Epoch, Error, ErrorCode, GenerateRequest, Incarnation, RequestId, TransferId};
use tokio::sync::oneshot;

use crate::cancelled::Cancelled;
use crate::placer::EnginePlacer;

/// How long a new grant waits for the older transfer to let go of the blocks.
const FENCE_WAIT: Duration = Duration::from_secs(3);

/// All requests of one node.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub node: NodeService,
    pub clock: Clock,
    minter: Arc<GrantMinter>,
    receiver_config: ReceiverConfig,
    grant_expiry_ms: u64,
    kv_address: String,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    sessions: HashMap<RequestId, Session>,
    transfers: HashMap<TransferId, RequestId>,
    /// New requests that the engine is asked to reserve.
    reserving: HashSet<RequestId>,
    cancelled: Cancelled,
}

#[derive(Debug)]
struct Session {
    attempt: u32,
    cached_tokens: usize,
    deadline_ms: u64,
    /// Until `Run` takes it.
    events: Option<Events>,
    transfer: Transfer,
}

/// Where the receiving machine of a session is.
#[derive(Debug)]
enum Transfer {
    /// The prompt is computed here, or its transfer is committed.
    None,
    /// Nobody pushes: granted, or failed and open for another grant.
    Resting(Box<Receiver>),
    /// A stream has it; `fence` ends that, and `rested` comes when the machine is back.
    Driven { fence: Option<oneshot::Sender<TransferError>>, rested: Option<oneshot::Receiver<()>> },
}

/// What of a request a grant is for.
struct Wanted {
    tokens: u32,
    unseen: Range<u32>,
    choices: u16,
}

/// What the router asks to be reserved.
pub(crate) struct Reservation {
    pub request: GenerateRequest,
    pub attempt: u32,
    pub delivered: Vec<Delivered>,
    /// `None`: the prompt is computed here.
    pub sender: Option<Incarnation>,
}

/// What it gets.
pub(crate) struct Reserved {
    pub grant: bytes::Bytes,
    pub cached_tokens: usize,
}

/// What a stream needs to give its machine back.
pub(crate) struct Ticket {
    request_id: RequestId,
    rested: oneshot::Sender<()>,
}

/// A reservation that has no session yet. The engine makes it whether or not somebody still waits
/// for it; dropped, it is taken back.
struct Unclaimed<'a> {
    sessions: &'a Sessions,
    id: RequestId,
    claimed: bool,
}

impl Drop for Unclaimed<'_> {
    fn drop(&mut self) {
        self.sessions.table().reserving.remove(&self.id);
        if !self.claimed {
            self.sessions.node.host.cancel(self.id);
        }
    }
}

impl Sessions {
    pub fn new(node: NodeService, config: &NodeConfig, clock: Clock, kv_address: String) -> Self {
        let (timing, kv_conversion) = (config.timing(), config.kv_conversion);
        Self {
            node,
            clock,
            minter: Arc::new(GrantMinter::new(random::bytes())),
            receiver_config: ReceiverConfig { timing, kv_conversion, ..ReceiverConfig::default() },
            grant_expiry_ms: config.grant_expiry_ms,
            kv_address,
            table: Mutex::default(),
        }
    }

    /// Where senders find this node.
    pub fn kv_address(&self) -> &str {
        &self.kv_address
    }

    pub fn grant_expiry_ms(&self) -> u64 {
        self.grant_expiry_ms
    }

    /// Reserves a new request, or grants a known one again under the next epoch.
    ///
    /// # Errors
    /// `ResourceExhausted`, `FailedPrecondition` for an old attempt or one that decodes already,
    /// `InvalidArgument`.
    pub async fn reserve(self: &Arc<Self>, wanted: Reservation) -> Result<Reserved, Error> {
        let id = wanted.request.id;
        let Some(mut unclaimed) = self.begin_reserving(id)? else {
            return self.regrant(id, wanted.attempt, wanted.sender).await;
        };
        let Reservation { request, attempt, delivered, sender } = wanted;
        let (outbox, events) = events();
        let deadline_ms = request.deadline_ms;
        let wanted = Wanted {
            tokens: request.prompt.len() as u32,
            unseen: unseen(&request),
            choices: request.choices,
        };
        let here = sender.is_none();
        let reserving = self.node.host.ask(move |thread| {
            let engine = &mut thread.engine;
            let cached = engine.reserve(request, &delivered, outbox, Instant::now())?;
            // What was delivered may have been the whole answer.
            if here && engine.contains(id) {
                return engine.start(id);
            }
            Ok::<_, Error>(cached)
        });
        let reserved = reserving.await;
        let cached_tokens = reserved??;
        let deadline_ms = self.clock.now_ms() + deadline_ms;
        let mut session = Session {
            attempt,
            cached_tokens,
            deadline_ms,
            events: Some(events),
            transfer: Transfer::None,
        };
        let mut granted = bytes::Bytes::new();
        let mut table = self.table();
        if table.cancelled.contains(id) {
            drop(table);
            return Err(Error::new(ErrorCode::Cancelled, "it was cancelled before it came"));
        }
        if let Some(incarnation) = sender {
            let grant = self.new_grant(id, wanted, cached_tokens, incarnation);
            let transfer_id = grant.transfer_id;
            let (receiver, bytes) = Receiver::grant(
                self.receiver_config,
                self.minter.clone(),
                grant,
                self.clock.now_ms(),
                deadline_ms,
            );
            table.transfers.insert(transfer_id, id);
            session.transfer = Transfer::Resting(Box::new(receiver));
            granted = bytes;
        }
        table.sessions.insert(id, session);
        drop(table);
        unclaimed.claimed = true;
        tracing::debug!(request_id = %id, attempt, cached_tokens, "reserved");
        self.end_unless_run(id);
        Ok(Reserved { grant: granted, cached_tokens })
    }

    /// `None` where the request is known.
    ///
    /// # Errors
    /// `FailedPrecondition` where another call reserves the same request at this moment.
    fn begin_reserving(&self, id: RequestId) -> Result<Option<Unclaimed<'_>>, Error> {
        let mut table = self.table();
        if table.sessions.contains_key(&id) {
            return Ok(None);
        }
        if !table.reserving.insert(id) {
            return Err(Error::new(
                ErrorCode::FailedPrecondition,
                format!("another call reserves {id} at this moment"),
            ));
        }
        Ok(Some(Unclaimed { sessions: self, id, claimed: false }))
    }

    fn new_grant(
        &self,
        request_id: RequestId,
        wanted: Wanted,
        cached_tokens: usize,
        sender_incarnation: Incarnation,
    ) -> Grant {
        let model = self.node.host.model();
        Grant {
            transfer_id: TransferId(random::bytes()),
            request_id,
            epoch: Epoch(1),
            receiver: self.node.id.clone(),
            receiver_incarnation: self.node.incarnation.get(),
            sender_incarnation,
            tokens: wanted.tokens,
            cached_tokens: cached_tokens as u32,
            unseen: wanted.unseen,
            layout: WireLayout::from(&model.layout),
            fingerprint: model.fingerprint,
            numerics: model.numerics.clone(),
            choices: wanted.choices,
            expiry_ms: self.grant_expiry_ms,
        }
    }

    /// Fences the older attempt and grants the same blocks anew, or computes the prompt here.
    async fn regrant(
        &self,
        id: RequestId,
        attempt: u32,
        sender: Option<Incarnation>,
    ) -> Result<Reserved, Error> {
        self.fence_older(id, attempt).await?;
        let (cached_tokens, mut receiver) = {
            let mut table = self.table();
            let session = table.sessions.get_mut(&id).ok_or_else(|| gone(id))?;
            let transfer = std::mem::replace(&mut session.transfer, Transfer::None);
            let Transfer::Resting(receiver) = transfer else {
                session.transfer = transfer;
                return Err(Error::new(
                    ErrorCode::FailedPrecondition,
                    format!("request {id} has its KV already; read its tokens with Run"),
                ));
            };
            session.attempt = attempt;
            (session.cached_tokens, receiver)
        };
        let Some(incarnation) = sender else {
            let started = self.node.host.ask(move |thread| thread.engine.start(id)).await;
            let cached_tokens = match started.and_then(|result| result) {
                Ok(cached_tokens) => cached_tokens,
                Err(error) => {
                    self.rest(id, receiver);
                    return Err(error);
                }
            };
            return Ok(Reserved { grant: bytes::Bytes::new(), cached_tokens });
        };
        let mut table = self.table();
        let session = table.sessions.get_mut(&id).ok_or_else(|| gone(id))?;
        let granted = receiver.regrant(incarnation, self.clock.now_ms(), session.deadline_ms);
        session.transfer = Transfer::Resting(receiver);
        let grant = granted.ok_or_else(|| {
            Error::unavailable(format!("the older transfer of {id} is not fenced yet"))
        })?;
        Ok(Reserved { grant, cached_tokens })
    }

    /// Puts a machine back that could not be replaced.
    fn rest(&self, id: RequestId, receiver: Box<Receiver>) {
        if let Some(session) = self.table().sessions.get_mut(&id) {
            session.transfer = Transfer::Resting(receiver);
        }
    }

    /// Ends the stream of an older attempt and waits until no write can follow.
    async fn fence_older(&self, id: RequestId, attempt: u32) -> Result<(), Error> {
        let rested = {
            let mut table = self.table();
            let session = table.sessions.get_mut(&id).ok_or_else(|| gone(id))?;
            if attempt <= session.attempt {
                return Err(Error::new(
                    ErrorCode::FailedPrecondition,
                    format!("attempt {attempt} of {id} is not after {}", session.attempt),
                ));
            }
            match &mut session.transfer {
                Transfer::Driven { fence, rested } => {
                    if let Some(fence) = fence.take() {
                        // The stream may just have ended by itself.
                        let _ended = fence.send(TransferError::Superseded);
                    }
                    rested.take()
                }
                Transfer::None | Transfer::Resting(_) => None,
            }
        };
        if let Some(rested) = rested
            && tokio::time::timeout(FENCE_WAIT, rested).await.is_err()
        {
            return Err(Error::unavailable(format!("the older transfer of {id} does not end")));
        }
        Ok(())
    }

    /// Gives the router's stream its events; once.
    ///
    /// # Errors
    /// `NotFound`, or `FailedPrecondition` where another stream reads them.
    pub fn take_events(&self, id: RequestId) -> Result<Events, Error> {
        let mut table = self.table();
        let session = table.sessions.get_mut(&id).ok_or_else(|| gone(id))?;
        session.events.take().ok_or_else(|| {
            Error::new(
                ErrorCode::FailedPrecondition,
                format!("another stream reads the tokens of {id} already"),
            )
        })
    }

    /// Ends a session at its router's wish, or keeps it from beginning. Whether it was here.
    pub fn cancel(&self, id: RequestId) -> bool {
        let known = {
            let mut table = self.table();
            let known = table.sessions.contains_key(&id);
            if !known {
                table.cancelled.remember(id, Instant::now());
            }
            known
        };
        if known {
            self.end(id);
        }
        known
    }

    /// Ends a session, whatever phase it is in.
    pub fn end(&self, id: RequestId) {
        let session = {
            let mut table = self.table();
            table.transfers.retain(|_, request| *request != id);
            table.sessions.remove(&id)
        };
        let Some(session) = session else { return };
        tracing::debug!(request_id = %id, "the session ends");
        if let Transfer::Driven { fence: Some(fence), .. } = session.transfer {
            let _ended = fence.send(TransferError::Cancelled);
        }
        self.node.host.cancel(id);
    }

    /// A reservation that no router runs is an orphan.
    fn end_unless_run(self: &Arc<Self>, id: RequestId) {
        let sessions = Arc::downgrade(self);
        let wait = Duration::from_millis(self.grant_expiry_ms);
        tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let Some(sessions) = sessions.upgrade() else { return };
            let orphan =
                sessions.table().sessions.get(&id).is_some_and(|session| session.events.is_some());
            if orphan {
                tracing::info!(request_id = %id, "nobody runs this reservation; it ends");
                sessions.end(id);
            }
        });
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Grants for Sessions {
    type Placer = EnginePlacer;
    type Ticket = Ticket;

    fn take(&self, transfer: TransferId) -> Result<Taken<EnginePlacer, Ticket>, TransferError> {
        let mut table = self.table();
        let request_id = *table.transfers.get(&transfer).ok_or(TransferError::Superseded)?;
        let session = table.sessions.get_mut(&request_id).ok_or(TransferError::Superseded)?;
        match std::mem::replace(&mut session.transfer, Transfer::None) {
            Transfer::Resting(receiver) if receiver.is_granted() => {
                let (fencing, fence) = oneshot::channel();
                let (resting, rested) = oneshot::channel();
                session.transfer = Transfer::Driven { fence: Some(fencing), rested: Some(rested) };
                let placer = EnginePlacer { host: self.node.host.clone(), request_id };
                let ticket = Ticket { request_id, rested: resting };
                Ok(Taken { receiver, placer, fence, ticket })
            }
            other => {
                session.transfer = other;
                Err(TransferError::Superseded)
            }
        }
    }

    fn give_back(&self, receiver: Box<Receiver>, ticket: Ticket, outcome: ReceiverOutcome) {
        let mut table = self.table();
        if let Some(session) = table.sessions.get_mut(&ticket.request_id) {
            session.transfer = match outcome {
                ReceiverOutcome::Committed => Transfer::None,
                ReceiverOutcome::Failed(_) | ReceiverOutcome::Refused(_) => {
                    Transfer::Resting(receiver)
                }
            };
        }
        drop(table);
        // Nobody waits where no later attempt came.
        let _unheard = ticket.rested.send(());
    }
}

/// Prompt tokens whose KV need not come.
fn unseen(request: &GenerateRequest) -> Range<u32> {
    let unseen = request.unseen_prompt();
    unseen.start as u32..unseen.end as u32
}

fn gone(id: RequestId) -> Error {
    Error::new(ErrorCode::NotFound, format!("request {id} is not reserved here"))
}
