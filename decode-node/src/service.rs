//! The `Decode` service.

use std::pin::Pin;
use std::sync::Arc;

use baton_engine::core::{Delivered, EngineEvent};
use baton_engine_host::Events;
use baton_proto::convert::request_id;
use baton_proto::error::to_status;
use baton_proto::internal::decode_event::Event;
use baton_proto::internal::decode_server::Decode;
use baton_proto::internal::{
    CancelRequest, CancelResponse, ChoiceFinished, DecodeEvent, DecodeRunRequest, Finished,
    PromptLogprobs, ReserveRequest, ReserveResponse,
};
use baton_types::{Error, GenerateRequest, Incarnation, RequestId};
use futures::Stream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

use crate::sessions::{Reservation, Sessions};

pub(crate) struct DecodeService {
    sessions: Arc<Sessions>,
}

impl DecodeService {
    pub fn new(sessions: Arc<Sessions>) -> Self {
        Self { sessions }
    }

    async fn try_reserve(&self, wire: ReserveRequest) -> Result<ReserveResponse, Error> {
        let node = &self.sessions.node;
        node.check_admission()?;
        node.check_model(&wire.fingerprint, &wire.numerics)?;
        let request =
            wire.request.ok_or_else(|| Error::invalid("request", "request is missing"))?;
        let reserved = self
            .sessions
            .reserve(Reservation {
                request: GenerateRequest::try_from(request)?,
                attempt: wire.attempt,
                delivered: wire
                    .delivered
                    .into_iter()
                    .map(|before| Delivered { ids: before.ids, finished: before.finished })
                    .collect(),
                sender: Some(wire.prefill_incarnation).filter(|&some| some != 0).map(Incarnation),
            })
            .await?;
        Ok(ReserveResponse {
            grant: reserved.grant,
            cached_tokens: reserved.cached_tokens as u32,
            incarnation: node.incarnation.get().0,
            expires_ms: self.sessions.grant_expiry_ms(),
            kv_address: self.sessions.kv_address().to_owned(),
        })
    }
}

#[tonic::async_trait]
impl Decode for DecodeService {
    async fn reserve(
        &self,
        request: Request<ReserveRequest>,
    ) -> Result<Response<ReserveResponse>, Status> {
        let reserved = self.try_reserve(request.into_inner()).await;
        reserved.map(Response::new).map_err(|error| to_status(&error))
    }

    type RunStream = Pin<Box<dyn Stream<Item = Result<DecodeEvent, Status>> + Send>>;

    async fn run(
        &self,
        request: Request<DecodeRunRequest>,
    ) -> Result<Response<Self::RunStream>, Status> {
        let id = request_id(&request.get_ref().request_id).map_err(|error| to_status(&error))?;
        let events = self.sessions.take_events(id).map_err(|error| to_status(&error))?;
        let span = tracing::info_span!("decode", request_id = %id);
        let reader = Reader { sessions: self.sessions.clone(), id, events, span };
        let stream = futures::stream::unfold(Some(reader), |reader| async {
            let mut reader = reader?;
            let span = reader.span.clone();
            let event = reader.events.recv().instrument(span).await?;
            match to_wire(event) {
                Ok((event, last)) => {
                    let event = DecodeEvent { event: Some(event) };
                    Some((Ok(event), (!last).then_some(reader)))
                }
                Err(error) => Some((Err(to_status(&error)), None)),
            }
        });
        Ok(Response::new(Box::pin(stream)))
    }

    async fn cancel(
        &self,
        request: Request<CancelRequest>,
    ) -> Result<Response<CancelResponse>, Status> {
        let id = request_id(&request.get_ref().request_id).map_err(|error| to_status(&error))?;
        Ok(Response::new(CancelResponse { found: self.sessions.cancel(id) }))
    }
}

/// The router's stream. When it is dropped, at its end or before, the session ends.
struct Reader {
    sessions: Arc<Sessions>,
    id: RequestId,
    events: Events,
    span: tracing::Span,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.sessions.end(self.id);
    }
}

/// The event, and whether it is the last.
fn to_wire(event: EngineEvent) -> Result<(Event, bool), Error> {
    match event {
        EngineEvent::Token(token) => Ok((Event::Token((&token).into()), false)),
        EngineEvent::PromptLogprobs(all) => {
            let tokens = all.iter().map(Into::into).collect();
            Ok((Event::PromptLogprobs(PromptLogprobs { tokens }), false))
        }
        EngineEvent::ChoiceFinished { choice, reason } => {
            let reason = reason.as_str().to_string();
            Ok((Event::ChoiceFinished(ChoiceFinished { choice: choice.into(), reason }), false))
        }
        EngineEvent::Finished(stats) => {
            let finished = Finished {
                cached_tokens: stats.cached_tokens,
                computed_tokens: stats.computed_tokens,
                queued_us: stats.queued_us,
                first_token_us: stats.first_token_us,
                finished_us: stats.finished_us,
                preemptions: stats.preemptions,
            };
            Ok((Event::Finished(finished), true))
        }
        EngineEvent::Failed(error) => Err(error),
        EngineEvent::Prefilled(_) => Err(Error::internal("a decode node hands no prompt on")),
    }
}
