//! Takes KV streams in: finds each one's grant, verifies, places, activates.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::backend::Heads;
use baton_kv_transfer::frame::Frame;
use baton_kv_transfer::message::Commit;
use baton_kv_transfer::receive::{self, Placer, ReceiverOutcome};
use baton_kv_transfer::transport::{Incoming, TransportStream};
use baton_types::{Error, RequestId};
use tracing::Instrument;

use crate::metrics::TransferMetrics;
use crate::sessions::Sessions;

/// A stream that does not say which grant it is for within so long is closed.
const OPEN_WITHIN: Duration = Duration::from_secs(2);

/// Serves streams until their source ends.
pub(crate) async fn serve_pushes(
    mut incoming: Incoming,
    sessions: Arc<Sessions>,
    metrics: TransferMetrics,
) {
    while let Some(stream) = incoming.recv().await {
        tokio::spawn(serve_push(stream, sessions.clone(), metrics.clone()));
    }
}

async fn serve_push(
    mut stream: TransportStream,
    sessions: Arc<Sessions>,
    metrics: TransferMetrics,
) {
    let (transfer_id, first) = match receive::read_open(&mut stream, OPEN_WITHIN).await {
        Ok(open) => open,
        Err(error) => return tracing::info!(%error, "a KV stream was refused"),
    };
    let mut driven = match sessions.take_receiver(transfer_id) {
        Ok(driven) => driven,
        Err(error) => {
            tracing::info!(%transfer_id, %error, "a KV stream was refused");
            return receive::refuse(&stream, &first, &error);
        }
    };
    let placer = EnginePlacer { sessions: sessions.clone(), request_id: driven.request_id };
    let (before, carried) = (*driven.receiver.counters(), stream.carried.clone());
    let fence = async {
        match (&mut driven.fence).await {
            Ok(error) => error,
            // The session has ended and took the fence with it.
            Err(_) => std::future::pending().await,
        }
    };
    let span = tracing::info_span!("transfer", request_id = %driven.request_id, %transfer_id);
    let receiver = &mut driven.receiver;
    let outcome = receive::drive(receiver, first, stream, &placer, sessions.clock, fence)
        .instrument(span)
        .await;
    metrics.observe(&before, &driven.receiver, &carried, &outcome);
    let committed = outcome == ReceiverOutcome::Committed;
    match &outcome {
        ReceiverOutcome::Committed => {
            tracing::debug!(request_id = %driven.request_id, %transfer_id, "transfer committed");
        }
        ReceiverOutcome::Failed(error) | ReceiverOutcome::Refused(error) => {
            let request_id = driven.request_id;
            tracing::info!(%request_id, %transfer_id, %error, "transfer failed");
        }
    }
    sessions.give_back(driven, committed);
}

struct EnginePlacer {
    sessions: Arc<Sessions>,
    request_id: RequestId,
}

impl Placer for EnginePlacer {
    async fn place(&self, frame: &Frame) -> Result<(), Error> {
        let (id, key) = (self.request_id, frame.key());
        let frame = frame.clone();
        let place = self.sessions.node.host.ask(move |thread| {
            let first = key.token_first as usize;
            let tokens = first..first + key.token_count as usize;
            let (first, count) = (key.head_first.into(), key.head_count.into());
            let (layer, heads) = (key.layer.into(), Heads::Some { first, count });
            thread.engine.place(id, layer, tokens, heads, frame.payload())
        });
        place.await?
    }

    async fn activate(&self, commit: Commit, is_converted: bool) -> Result<(), Error> {
        let id = self.request_id;
        let activate = self.sessions.node.host.ask(move |thread| {
            let info = &commit.info;
            let now = Instant::now();
            let (first_tokens, digest) = (&info.first_tokens, info.sampler_digest);
            thread.engine.activate(id, first_tokens, digest, is_converted, now)
        });
        activate.await?
    }
}
