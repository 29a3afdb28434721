//! The decode node's side: attaches senders, and merges what comes over UCX into their streams.

use std::sync::{Arc, Mutex, PoisonError};

use baton_proto::internal::{AttachRequest, AttachResponse};
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::mpsc;
use tonic::Status;

use super::{Command, Frames, Ucx, UcxState, sealed};
use crate::TransferError;
use crate::message::{Body, Context, FEATURE_UCX, KvMessage};
use crate::transport::Carried;

/// Most bytes of a worker's address.
const ADDRESS_MAX_BYTES: usize = 16 << 10;
const NODE_MAX_BYTES: usize = 512;

type Incoming = BoxStream<'static, Result<KvMessage, TransferError>>;

/// UCX as a listener offers it.
#[derive(Clone, Debug)]
pub(in crate::transport) struct Attaching(Ucx);

impl Attaching {
    pub(in crate::transport) fn new(ucx: Ucx) -> Self {
        Self(ucx)
    }

    /// Gives a sender its staging region.
    pub(in crate::transport) async fn attach(
        &self,
        request: AttachRequest,
    ) -> Result<AttachResponse, Status> {
        let AttachRequest { node_id, incarnation, worker_address, ucx_version } = request;
        if node_id.len() > NODE_MAX_BYTES {
            return Err(Status::invalid_argument("node_id is too long"));
        }
        let len = worker_address.len();
        let address = sealed::open(worker_address).filter(|_| len <= ADDRESS_MAX_BYTES);
        let Some(address) = address else {
            return Err(Status::invalid_argument(
                "worker_address is no address of a UCX worker as Baton sends it",
            ));
        };
        let no_ucx = |why| Status::failed_precondition(format!("the receiver has no UCX: {why}"));
        if let UcxState::Unavailable { reason } = self.0.state() {
            return Err(no_ucx(reason));
        }
        self.0.ready().await.map_err(no_ucx)?;
        // Before UCX sees anything of the other's.
        let here = self.0.version().unwrap_or_default();
        if wire_version(&here) != wire_version(&ucx_version) {
            let why = format!(
                "the receiver has UCX {here}, the sender {ucx_version:?}: they do not understand \
                 one another"
            );
            return Err(Status::failed_precondition(why));
        }
        let own = self.0.address().await.map_err(Status::unavailable)?;
        let attach = |reply| Command::Attach { node: node_id, incarnation, address, reply };
        let attached = self.0.ask(attach).await.and_then(|result| result);
        let attached = attached.map_err(Status::resource_exhausted)?;
        Ok(AttachResponse {
            token: attached.token,
            worker_address: sealed::seal(&own),
            rkey: sealed::seal(&attached.rkey),
            base: attached.base,
            slots: attached.slots.into(),
            slot_bytes: attached.slot_bytes,
        })
    }

    /// A stream begins whose sender names a region. Whether the region is there; then
    /// [`merge`](Self::merge) the two.
    pub(in crate::transport) async fn begin(&self, token: u64) -> bool {
        self.0.ask(|reply| Command::Begin { token, reply }).await.unwrap_or(false)
    }

    /// Makes one stream of a sender's gRPC stream and the frames that come over UCX.
    pub(in crate::transport) fn merge(
        &self,
        token: u64,
        messages: mpsc::Receiver<KvMessage>,
        incoming: Incoming,
        carried: Arc<Carried>,
    ) -> (BoxStream<'static, Bytes>, Incoming, u32) {
        let (frames, arrived) = mpsc::unbounded_channel();
        let watched = Watched {
            ucx: self.0.clone(),
            token,
            frames,
            carried,
            seen: Mutex::new(Seen { context: None, committed: false }),
        };
        let watched = Arc::new(watched);
        let speaks = watched.clone();
        let chunks = tokio_stream::wrappers::ReceiverStream::new(messages).map(move |message| {
            speaks.watch(&message);
            message.encode()
        });
        let both = futures::stream::unfold((incoming, arrived, watched), next);
        (chunks.boxed(), both.boxed(), FEATURE_UCX)
    }
}

/// What must be equal at both ends.
fn wire_version(version: &str) -> Option<(&str, &str)> {
    let (major, rest) = version.split_once('.')?;
    Some((major, rest.split_once('.').map_or(rest, |(minor, _)| minor)))
}

/// One stream, until both of its directions are dropped.
struct Watched {
    ucx: Ucx,
    token: u64,
    frames: Frames,
    carried: Arc<Carried>,
    seen: Mutex<Seen>,
}

struct Seen {
    context: Option<Context>,
    committed: bool,
}

impl Watched {
    /// Before the sender hears that frames may come over UCX, they have somewhere to go.
    fn watch(&self, message: &KvMessage) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match &message.body {
            Body::OpenAccepted(accepted)
                if accepted.features & FEATURE_UCX != 0 && seen.context.is_none() =>
            {
                let (token, context) = (self.token, message.context);
                seen.context = Some(context);
                let frames = self.frames.clone();
                self.ucx.commands.send(Command::Route { token, context, frames });
            }
            Body::Committed => seen.committed = true,
            _ => {}
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let seen = self.seen.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Seen { context, committed } = *seen;
        self.ucx.commands.send(Command::End { token: self.token, context, committed });
    }
}

type Arrived = mpsc::UnboundedReceiver<Result<KvMessage, TransferError>>;
type Ends = (Incoming, Arrived, Arc<Watched>);

/// The next message of either; ends with the gRPC stream.
async fn next(
    (mut incoming, mut arrived, watched): Ends,
) -> Option<(Result<KvMessage, TransferError>, Ends)> {
    let message = tokio::select! {
        biased;
        Some(message) = arrived.recv() => {
            if let Ok(KvMessage { body: Body::Frame(frame), .. }) = &message {
                watched.carried.count_ucx(frame.payload().len());
            }
            message
        }
        message = incoming.next() => message?,
    };
    Some((message, (incoming, arrived, watched)))
}
