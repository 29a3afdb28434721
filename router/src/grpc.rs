//! The public gRPC API, `baton.v1`.

use std::pin::Pin;
use std::time::Instant;

use baton_proto::error::to_status;
use baton_proto::internal;
use baton_proto::v1::baton_server::Baton;
use baton_proto::v1::generate_event::Event;
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::{
    ChatRequest, ClusterStatus, DetokenizeRequest, DetokenizeResponse, Done, Finished,
    GenerateEvent, GenerateRequest, GetClusterStatusRequest, KvWay, ListModelsRequest,
    ListModelsResponse, Logprobs, Model as WireModel, Node as WireNode, Output, PromptLogprobs,
    Sampling, Stop, StreamingAttention as WireStreaming, Token, TokenLogprob, TokenizeRequest,
    TokenizeResponse,
};
use baton_tokenizer::{ChatMessage, ChatOptions, Tokenizer};
use baton_types::{Error, StreamingAttention, TokenId, TokenLogprobs, TokenOutput};
use futures::Stream;
use std::sync::Arc;
use tonic::{Request, Response, Status};

use crate::answer::AnswerEvent;
use crate::catalog::Model;
use crate::cluster::Node;
use crate::gateway::{Gateway, Prepared, SamplingWishes, Wishes};

/// Serves `baton.v1`.
#[derive(Clone, Debug)]
pub struct GrpcApi {
    gateway: Gateway,
}

type EventStream = Pin<Box<dyn Stream<Item = Result<GenerateEvent, Status>> + Send>>;

impl GrpcApi {
    pub fn new(gateway: Gateway) -> Self {
        Self { gateway }
    }

    async fn run(&self, prepared: Prepared, explain: bool) -> Result<EventStream, Error> {
        let model = prepared.model.clone();
        let answer = self.gateway.run(prepared).await?;
        let writer = EventWriter { model, explain };
        let stream = futures::stream::unfold(Some((answer, writer)), |state| async {
            let (mut answer, writer) = state?;
            let event = answer.next().await?;
            match writer.to_wire(event) {
                Ok((event, last)) => Some((Ok(event), (!last).then_some((answer, writer)))),
                Err(error) => Some((Err(to_status(&error)), None)),
            }
        });
        Ok(Box::pin(stream))
    }

    async fn try_generate(&self, wire: GenerateRequest) -> Result<EventStream, Error> {
        let arrived = Instant::now();
        let model = self.gateway.model(&wire.model)?;
        let output = wire.output.unwrap_or_default();
        let wishes = Wishes {
            streaming_attention: wire.streaming_attention.map(streaming),
            ..wishes(wire.sampling, wire.stop, &output, wire.deadline_ms)
        };
        let prompt = match wire.prompt {
            Some(Prompt::Text(text)) => {
                let most = wishes.tokens_most(&model);
                self.gateway.encode(&model, vec![text], most).await?.remove(0)
            }
            Some(Prompt::TokenIds(ids)) => ids.ids,
            None => return Err(Error::invalid("prompt", "give a prompt: text or token_ids")),
        };
        let prepared = self.gateway.prepare(model, prompt, wishes, arrived)?;
        self.run(prepared, output.explain).await
    }

    async fn try_chat(&self, wire: ChatRequest) -> Result<EventStream, Error> {
        let arrived = Instant::now();
        let model = self.gateway.model(&wire.model)?;
        let messages: Vec<ChatMessage> = wire
            .messages
            .into_iter()
            .map(|message| ChatMessage { role: message.role, content: message.content, name: None })
            .collect();
        let output = wire.output.unwrap_or_default();
        let wishes = Wishes {
            streaming_attention: wire.streaming_attention.map(streaming),
            ..wishes(wire.sampling, wire.stop, &output, wire.deadline_ms)
        };
        let options = ChatOptions::default();
        let prepared = self.gateway.prepare_chat(model, messages, options, wishes, arrived).await?;
        self.run(prepared, output.explain).await
    }
}

fn streaming(wire: WireStreaming) -> StreamingAttention {
    StreamingAttention { sinks: wire.sinks, window: wire.window }
}

fn wishes(
    sampling: Option<Sampling>,
    stop: Option<Stop>,
    output: &Output,
    deadline_ms: Option<u64>,
) -> Wishes {
    let (sampling, stop) = (sampling.unwrap_or_default(), stop.unwrap_or_default());
    let mut logit_bias: Vec<(TokenId, f32)> = sampling.logit_bias.into_iter().collect();
    logit_bias.sort_unstable_by_key(|&(id, _)| id);
    Wishes {
        sampling: SamplingWishes {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            logit_bias,
            seed: sampling.seed,
        },
        max_tokens: stop.max_tokens,
        min_tokens: stop.min_tokens,
        stop: stop.stop,
        stop_token_ids: stop.stop_token_ids,
        ignore_eos: stop.ignore_eos,
        n: output.n,
        logprobs: output.logprobs,
        prompt_logprobs: output.prompt_logprobs,
        deadline_ms,
        streaming_attention: None,
    }
}

struct EventWriter {
    model: Arc<Model>,
    explain: bool,
}

impl EventWriter {
    /// The event, and whether it is the last.
    fn to_wire(&self, event: AnswerEvent) -> Result<(GenerateEvent, bool), Error> {
        let tokenizer = &self.model.tokenizer;
        let event = match event {
            AnswerEvent::Token { token, text } => {
                Event::Token(token_to_wire(tokenizer, token, text))
            }
            AnswerEvent::Finished { choice, reason, text } => Event::Finished(Finished {
                choice: choice.into(),
                reason: reason.as_str().into(),
                text,
            }),
            AnswerEvent::PromptLogprobs(all) => {
                let first = Logprobs::default();
                let rest = all.iter().map(|one| logprobs_to_wire(tokenizer, None, one));
                Event::PromptLogprobs(PromptLogprobs {
                    tokens: std::iter::once(first).chain(rest).collect(),
                })
            }
            AnswerEvent::Done(explain) => {
                let usage = explain.usage();
                let explain_json = match self.explain {
                    true => serde_json::to_string(&*explain)
                        .map_err(|error| Error::internal(error.to_string()))?,
                    false => String::new(),
                };
                let done = Done {
                    prompt_tokens: usage.prompt_tokens,
                    completion_tokens: usage.completion_tokens,
                    cached_tokens: usage.cached_tokens,
                    seed: explain.seed,
                    explain_json,
                };
                return Ok((GenerateEvent { event: Some(Event::Done(done)) }, true));
            }
            AnswerEvent::Failed(error) => return Err(error),
        };
        Ok((GenerateEvent { event: Some(event) }, false))
    }
}

fn token_to_wire(tokenizer: &Tokenizer, token: TokenOutput, text: String) -> Token {
    let logprobs =
        token.logprobs.as_ref().map(|one| logprobs_to_wire(tokenizer, Some(token.id), one));
    Token { choice: token.choice.into(), index: token.index, id: token.id, text, logprobs }
}

fn logprobs_to_wire(tokenizer: &Tokenizer, id: Option<TokenId>, all: &TokenLogprobs) -> Logprobs {
    let named = |id, logprob| TokenLogprob { id, text: tokenizer.token_text(id), logprob };
    let drawn = match id {
        Some(id) => named(id, all.logprob),
        None => TokenLogprob { logprob: all.logprob, ..TokenLogprob::default() },
    };
    Logprobs { drawn: Some(drawn), top: all.top.iter().map(|&(id, one)| named(id, one)).collect() }
}

#[tonic::async_trait]
impl Baton for GrpcApi {
    type GenerateStream = EventStream;
    type ChatStream = EventStream;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let stream = self.try_generate(request.into_inner()).await;
        stream.map(Response::new).map_err(|error| to_status(&error))
    }

    async fn chat(&self, request: Request<ChatRequest>) -> Result<Response<EventStream>, Status> {
        let stream = self.try_chat(request.into_inner()).await;
        stream.map(Response::new).map_err(|error| to_status(&error))
    }

    async fn list_models(
        &self,
        _request: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let models = self.gateway.models();
        let models = models.iter().map(|model| WireModel {
            id: model.spec.name.clone(),
            context_tokens: model.spec.context_tokens as u32,
            vocab: model.spec.vocab as u32,
            fingerprint: model.fingerprint.to_string(),
        });
        Ok(Response::new(ListModelsResponse { models: models.collect() }))
    }

    async fn tokenize(
        &self,
        request: Request<TokenizeRequest>,
    ) -> Result<Response<TokenizeResponse>, Status> {
        let request = request.into_inner();
        let model = self.gateway.model(&request.model).map_err(|error| to_status(&error))?;
        // No prompt: nothing bounds it but the size of a message.
        let encoded = self.gateway.encode(&model, vec![request.text], usize::MAX).await;
        let ids = encoded.map_err(|error| to_status(&error))?.remove(0);
        Ok(Response::new(TokenizeResponse { ids }))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeResponse>, Status> {
        let request = request.into_inner();
        let model = self.gateway.model(&request.model).map_err(|error| to_status(&error))?;
        let vocab = model.limits.vocab;
        if let Some(id) = request.ids.iter().find(|&&id| id as usize >= vocab) {
            let message = format!("token id {id} is not in the model's vocabulary of {vocab}");
            return Err(to_status(&Error::invalid("ids", message)));
        }
        let text = model.tokenizer.decode(&request.ids);
        Ok(Response::new(DetokenizeResponse { text }))
    }

    async fn get_cluster_status(
        &self,
        _request: Request<GetClusterStatusRequest>,
    ) -> Result<Response<ClusterStatus>, Status> {
        let gateway = &self.gateway;
        Ok(Response::new(ClusterStatus {
            nodes: gateway.cluster.nodes().iter().map(|node| node_to_wire(node)).collect(),
            queued_requests: gateway.admission.waiting() as u32,
            running_requests: gateway.admission.running() as u32,
            membership_stale: gateway.cluster.is_stale(),
        }))
    }
}

fn way_to_wire(way: internal::KvWay) -> KvWay {
    let internal::KvWay { name, ready, detail } = way;
    KvWay { name, ready, detail }
}

fn node_to_wire(node: &Node) -> WireNode {
    let (member, status) = (node.member(), node.status());
    let never = u64::MAX;
    WireNode {
        id: member.id.to_string(),
        role: member.role.as_str().into(),
        address: member.address.clone(),
        model: member.model.clone(),
        state: node.state().as_str().into(),
        running: status.running,
        waiting: status.waiting,
        kv_blocks_used: status.kv_blocks_used,
        kv_blocks_total: status.kv_blocks_total,
        incarnation: status.incarnation,
        report_age_ms: node.report_age().map_or(never, |age| age.as_millis() as u64),
        waiting_tokens: status.waiting_tokens,
        kv_ways: status.kv_ways.into_iter().map(way_to_wire).collect(),
    }
}
