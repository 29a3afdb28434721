//! Gives what this node's prefix cache holds to other nodes (`KvSource.SendPrefix`).

use std::ops::Range;
use std::time::Instant;

use baton_engine::core::{ExportedSpan, Prefix};
use baton_kv_transfer::KvSpan;
use baton_kv_transfer::grant::Grant;
use baton_kv_transfer::message::CommitInfo;
use baton_kv_transfer::send::Outgoing;
use baton_proto::error::to_status;
use baton_proto::internal::kv_source_server::{KvSource, KvSourceServer};
use baton_proto::internal::{SendPrefixRequest, SendPrefixResponse};
use baton_runtime::random;
use baton_types::{Error, ErrorCode, TransferId};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{Destination, Outbound};
use crate::{EngineHost, NodeService};

/// KV that the engine reads between two of its steps at most: a few milliseconds.
const READ_BYTES: usize = 8 << 20;
/// Prefixes that are read at once; more wait, each at most as long as its asker does.
const SENDS_MAX: usize = 8;
/// Reads that wait for the transfer.
const READS_AHEAD: usize = 2;

/// The service.
#[derive(Debug)]
pub struct PrefixHolder {
    node: NodeService,
    outbound: Outbound,
    turns: Semaphore,
}

/// A prefix that the engine keeps while it is read; dropped, it is let go.
struct Held {
    host: EngineHost,
    id: TransferId,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.host.drop_prefix(self.id);
    }
}

impl PrefixHolder {
    pub fn new(node: NodeService, outbound: Outbound) -> Self {
        Self { node, outbound, turns: Semaphore::new(SENDS_MAX) }
    }

    pub fn into_server(self) -> KvSourceServer<Self> {
        KvSourceServer::new(self)
    }

    async fn send(&self, wire: SendPrefixRequest) -> Result<SendPrefixResponse, Error> {
        self.node.check_admission()?;
        self.node.check_model(&wire.fingerprint, &wire.numerics)?;
        let grant =
            Grant::read(&wire.grant).map_err(|error| Error::invalid("grant", error.to_string()))?;
        let (tokens, context) = (wire.tokens.len(), self.node.host.model().spec.context_tokens);
        if tokens > context {
            let what = format!("{tokens} tokens, the model's context has {context}");
            return Err(Error::invalid("tokens", what));
        }
        let wanted = grant.tokens as usize;
        if wanted > tokens || grant.choices != 0 || !grant.unseen.is_empty() {
            let what = format!("the grant is not for a prefix of these {tokens} tokens");
            return Err(Error::new(ErrorCode::FailedPrecondition, what));
        }
        let to = Destination::new("kv_address", &wire.kv_address)?;
        let turn = self.turns.acquire().await;
        let _turn = turn.map_err(|_closed| Error::unavailable("this node sends nothing more"))?;
        // A prefix is published at the other end: it goes as it is, or not at all.
        let sender = self.outbound.open(wire.grant, wire.deadline_ms, false)?;
        // The hold's own name, so that nobody else can end it.
        let (host, id) = (&self.node.host, TransferId(random::bytes()));
        let prefix = Prefix { tokens: wire.tokens, tenant_salt: wire.tenant_salt.to_vec() };
        // Before it is asked for: the engine holds it whether or not somebody still waits.
        let held_prefix = Held { host: host.clone(), id };
        let holding = host.ask(move |thread| thread.engine.hold_prefix(id, prefix));
        let held = holding.await??;
        if held < wanted {
            let what = format!("the prefix cache holds {held} of these {wanted} tokens");
            return Err(Error::new(ErrorCode::NotFound, what));
        }
        let began = Instant::now();
        let (spans_in, spans) = mpsc::channel(READS_AHEAD);
        let cancel = CancellationToken::new();
        let _cancel_with_this = cancel.clone().drop_guard();
        let missing = grant.cached_tokens as usize..wanted;
        let reading = async {
            let read = read_all(host, id, missing, spans_in).await;
            drop(held_prefix);
            read
        };
        let sending = self.outbound.send(sender, to, spans, cancel);
        // One side's failure ends the other at once.
        let ((), sent) = tokio::try_join!(reading, sending)?;
        self.node.send_speed.observe(sent.report.bytes, began.elapsed());
        let (bytes_sent, transport) = (sent.report.bytes, sent.way().to_owned());
        tracing::debug!(transfer_id = %id, tokens = wanted, bytes_sent, "a prefix was sent");
        Ok(SendPrefixResponse { bytes_sent, transport })
    }
}

/// Reads layer by layer, and ends with the commit.
async fn read_all(
    host: &EngineHost,
    id: TransferId,
    tokens: Range<usize>,
    spans: mpsc::Sender<Outgoing>,
) -> Result<(), Error> {
    let layout = host.model().layout;
    let at_once = (READ_BYTES / layout.token_layer_bytes()).max(1);
    let parts: Vec<(usize, Range<usize>)> = (0..usize::from(layout.layers))
        .flat_map(|layer| {
            let firsts = tokens.clone().step_by(at_once);
            firsts.map(move |first| (layer, first..first + at_once))
        })
        .map(|(layer, part)| (layer, part.start..part.end.min(tokens.end)))
        .collect();
    let most = parts.iter().map(|(_, part)| part.len()).max().unwrap_or(1);
    for group in parts.chunks((at_once / most).max(1)) {
        let group = group.to_vec();
        let read = host.ask(move |thread| {
            let read = |(layer, part)| thread.engine.read_prefix(id, layer, part);
            group.into_iter().map(read).collect::<Result<Vec<ExportedSpan>, Error>>()
        });
        for span in read.await?? {
            // Where the transfer has ended, its error is the one that counts.
            let _ended = spans.send(Outgoing::Span(to_kv_span(span))).await;
        }
    }
    let commit = CommitInfo {
        first_tokens: Vec::new(),
        sampler_digest: [0; 32],
        prompt_logprobs: Vec::new(),
        cached_tokens: tokens.end as u32,
    };
    let _ended = spans.send(Outgoing::Finish(Box::new(commit))).await;
    Ok(())
}

/// A span as transfers know it.
pub fn to_kv_span(span: ExportedSpan) -> KvSpan {
    let ExportedSpan { layer, token_first, token_count, payload } = span;
    KvSpan { layer, token_first, token_count, payload: payload.into() }
}

#[tonic::async_trait]
impl KvSource for PrefixHolder {
    async fn send_prefix(
        &self,
        request: Request<SendPrefixRequest>,
    ) -> Result<Response<SendPrefixResponse>, Status> {
        let sent = self.send(request.into_inner()).await;
        sent.map(Response::new).map_err(|error| to_status(&error))
    }
}
