//! What both APIs do with a request once it is parsed: validate, queue, dispatch.

use std::iter::once;
use std::sync::Arc;
use std::time::Instant;

use baton_runtime::random;
use baton_tokenizer::{ChatMessage, ChatOptions, Tokenizer};
use tokio::sync::Semaphore;
use tracing::Instrument;

use baton_types::{
    Error, ErrorCode, GenerateRequest, RequestId, SamplingParams, StopParams, StreamingAttention,
    TokenId, context_most,
};

use crate::admit::Admission;
use crate::answer::AnswerStream;
use crate::catalog::{Catalog, Model};
use crate::cluster::Cluster;
use crate::config::RouterConfig;
use crate::dispatch::Dispatcher;
use crate::metrics::RouterMetrics;

/// Prompts that are encoded at once.
pub const ENCODERS: usize = 2;

/// Of a long prompt so much is encoded to see whether it is far too long, for each token that it
/// may have: some four times what languages need.
const LOOK_BYTES_PER_TOKEN: usize = 16;

const MESSAGES_MAX: usize = 4_096;
const STOPS_MAX: usize = 16;
const STOP_MAX_BYTES: usize = 1_024;

/// The router behind its APIs. Clones share everything.
#[derive(Clone, Debug)]
pub struct Gateway {
    pub catalog: Catalog,
    pub cluster: Cluster,
    pub admission: Admission,
    pub dispatcher: Dispatcher,
    pub config: Arc<RouterConfig>,
    /// [`ENCODERS`] places.
    pub encoders: Arc<Semaphore>,
    pub metrics: RouterMetrics,
}

/// How a caller wants its answers, in the words of either API; absent fields take defaults.
#[derive(Clone, Debug, Default)]
pub struct Wishes {
    pub sampling: SamplingWishes,
    pub max_tokens: Option<u32>,
    pub min_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<TokenId>,
    pub ignore_eos: bool,
    pub n: Option<u32>,
    pub logprobs: Option<u32>,
    pub prompt_logprobs: Option<u32>,
    pub deadline_ms: Option<u64>,
    pub streaming_attention: Option<StreamingAttention>,
}

#[derive(Clone, Debug, Default)]
pub struct SamplingWishes {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(TokenId, f32)>,
    pub seed: Option<u64>,
}

impl Wishes {
    /// Tokens of prompt and answer at most.
    pub fn tokens_most(&self, model: &Model) -> usize {
        context_most(model.limits.context_tokens, self.streaming_attention)
    }
}

/// A request that is valid and has not been queued.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub model: Arc<Model>,
    pub request: GenerateRequest,
    pub stops: Vec<String>,
    pub arrived: Instant,
}

impl Gateway {
    /// The model of that name; an empty name means the only one.
    ///
    /// # Errors
    /// See [`Catalog::find`].
    pub fn model(&self, name: &str) -> Result<Arc<Model>, Error> {
        self.catalog.find(name, &self.cluster.live_models())
    }

    /// Models that can be asked for now.
    pub fn models(&self) -> Vec<Arc<Model>> {
        self.catalog.all(&self.cluster.live_models())
    }

    /// Encodes prompts of at most about so many tokens away from the threads that serve: a long
    /// one takes seconds, and few at once, so that many do not take every core.
    ///
    /// # Errors
    /// `InvalidArgument` for a text that is far too long; `Internal` where that was interrupted.
    pub async fn encode(
        &self,
        model: &Arc<Model>,
        texts: Vec<String>,
        most: usize,
    ) -> Result<Vec<Vec<TokenId>>, Error> {
        let model = model.clone();
        let encode = move || {
            let one = |text: &String| {
                refuse_far_too_long(&model.tokenizer, "prompt", || once(text.as_str()), most)?;
                Ok(model.tokenizer.encode_prompt(text))
            };
            texts.iter().map(one).collect()
        };
        self.encoding(encode).await?
    }

    /// Renders a chat as [`encode`](Self::encode) encodes: templates are code.
    ///
    /// # Errors
    /// `InvalidArgument` for no messages, too many, or what the template refuses; `Unsupported`
    /// where the model has no template.
    async fn encode_chat(
        &self,
        model: &Arc<Model>,
        messages: Vec<ChatMessage>,
        options: ChatOptions,
        most: usize,
    ) -> Result<Vec<TokenId>, Error> {
        if messages.is_empty() || messages.len() > MESSAGES_MAX {
            let count = messages.len();
            let message = format!("{count} messages are out of bounds: 1 to {MESSAGES_MAX}");
            return Err(Error::invalid("messages", message));
        }
        if !model.tokenizer.has_chat_template() {
            let message =
                format!("model {} has no chat template; ask for a completion", model.spec.name);
            let error = Error::new(ErrorCode::Unsupported, message);
            return Err(Error { field: Some("model".into()), ..error });
        }
        let model = model.clone();
        let render = move || {
            let texts = || messages.iter().map(|message| message.content.as_str());
            refuse_far_too_long(&model.tokenizer, "messages", texts, most)?;
            Ok(model.tokenizer.encode_chat(&messages, &options)?)
        };
        self.encoding(render).await?
    }

    /// Renders, completes and validates a chat. What is wrong with its prompt is wrong with its
    /// messages.
    ///
    /// # Errors
    /// As [`encode_chat`](Self::encode_chat) and [`prepare`](Self::prepare).
    pub async fn prepare_chat(
        &self,
        model: Arc<Model>,
        messages: Vec<ChatMessage>,
        options: ChatOptions,
        wishes: Wishes,
        arrived: Instant,
    ) -> Result<Prepared, Error> {
        let most = wishes.tokens_most(&model);
        let prompt = self.encode_chat(&model, messages, options, most).await?;
        self.prepare(model, prompt, wishes, arrived).map_err(|mut error| {
            if error.field.as_deref() == Some("prompt") {
                error.field = Some("messages".into());
            }
            error
        })
    }

    /// Runs `work` in one of the places for encoding.
    ///
    /// # Errors
    /// `Internal` where it was interrupted.
    async fn encoding<R: Send + 'static>(
        &self,
        work: impl FnOnce() -> R + Send + 'static,
    ) -> Result<R, Error> {
        let interrupted = || Error::internal("encoding was interrupted");
        let _place = self.encoders.acquire().await.map_err(|_| interrupted())?;
        tokio::task::spawn_blocking(work).await.map_err(|_| interrupted())
    }

    /// Completes and validates a request.
    ///
    /// # Errors
    /// `InvalidArgument` with the field; nothing was queued.
    pub fn prepare(
        &self,
        model: Arc<Model>,
        prompt: Vec<TokenId>,
        wishes: Wishes,
        arrived: Instant,
    ) -> Result<Prepared, Error> {
        check_stops(&wishes.stop)?;
        let default_max = self.default_max_tokens(&model, prompt.len(), &wishes);
        let s = wishes.sampling;
        let off = SamplingParams::default();
        let request = GenerateRequest {
            id: RequestId(random::bytes()),
            prompt,
            sampling: SamplingParams {
                temperature: s.temperature.unwrap_or(off.temperature),
                top_k: s.top_k.unwrap_or(off.top_k),
                top_p: s.top_p.unwrap_or(off.top_p),
                min_p: s.min_p.unwrap_or(off.min_p),
                repetition_penalty: s.repetition_penalty.unwrap_or(off.repetition_penalty),
                presence_penalty: s.presence_penalty.unwrap_or(off.presence_penalty),
                frequency_penalty: s.frequency_penalty.unwrap_or(off.frequency_penalty),
                logit_bias: s.logit_bias,
                seed: s.seed.unwrap_or_else(random::nonzero_u64),
            },
            stop: StopParams {
                // More than the context leaves ends with `length` all the same.
                max_tokens: wishes.max_tokens.unwrap_or(default_max),
                min_tokens: wishes.min_tokens.unwrap_or(0),
                stop_token_ids: wishes.stop_token_ids,
                ignore_eos: wishes.ignore_eos,
            },
            choices: count("n", wishes.n.unwrap_or(1))?,
            logprobs: wishes.logprobs.map(|top| count("logprobs", top)).transpose()?,
            prompt_logprobs: wishes
                .prompt_logprobs
                .map(|top| count("prompt_logprobs", top))
                .transpose()?,
            streaming_attention: wishes.streaming_attention,
            tenant_salt: Vec::new(),
            deadline_ms: wishes.deadline_ms.unwrap_or(self.config.default_deadline_ms),
        };
        request.validate(&model.limits)?;
        Ok(Prepared { model, request, stops: wishes.stop, arrived })
    }

    /// What the context leaves, where the configuration names nothing less; with streaming
    /// attention, which leaves much more, as many tokens as the model's context has.
    fn default_max_tokens(&self, model: &Model, prompt_tokens: usize, wishes: &Wishes) -> u32 {
        let context = model.limits.context_tokens;
        let room = match wishes.streaming_attention {
            None => context.saturating_sub(prompt_tokens).max(1),
            Some(_) => context,
        };
        match self.config.default_max_tokens {
            0 => room as u32,
            most => most.min(room as u32),
        }
    }

    /// Waits for a place and dispatches. Dropping the answer cancels.
    ///
    /// # Errors
    /// `ResourceExhausted` where there is no place.
    pub async fn run(&self, prepared: Prepared) -> Result<AnswerStream, Error> {
        let Prepared { model, request, stops, arrived } = prepared;
        let span = tracing::info_span!("admit", request_id = %request.id);
        let permit = self.admission.enter().instrument(span).await?;
        Ok(AnswerStream::start(&self.dispatcher, &model, request, stops, arrived, permit))
    }
}

/// Refuses texts that together make a prompt far too long, by their beginning alone: to
/// encode megabytes takes seconds and much memory, and for nothing.
fn refuse_far_too_long<'a, T: Iterator<Item = &'a str>>(
    tokenizer: &Tokenizer,
    field: &str,
    texts: impl Fn() -> T,
    most: usize,
) -> Result<(), Error> {
    let bytes: usize = texts().map(str::len).sum();
    let looked_at = most.saturating_mul(LOOK_BYTES_PER_TOKEN);
    if bytes <= looked_at {
        return Ok(());
    }
    let mut beginning = String::new();
    for text in texts() {
        let room = looked_at - beginning.len();
        beginning.push_str(&text[..text.floor_char_boundary(room)]);
        if text.len() >= room {
            break;
        }
    }
    // Where it was cut some tokens may be more than they would be.
    if tokenizer.encode(&beginning).len() <= 2 * most {
        return Ok(());
    }
    let message = format!(
        "{bytes} bytes are far more than the {most} tokens that prompt and answer may have; \
         shorten the prompt"
    );
    Err(Error::invalid(field, message))
}

fn check_stops(stops: &[String]) -> Result<(), Error> {
    if stops.len() > STOPS_MAX {
        let message = format!("{} stop strings are too many: at most {STOPS_MAX}", stops.len());
        return Err(Error::invalid("stop", message));
    }
    if let Some(at) = stops.iter().position(|stop| stop.is_empty() || stop.len() > STOP_MAX_BYTES) {
        let message = format!("stop[{at}] must have 1 to {STOP_MAX_BYTES} bytes");
        return Err(Error::invalid("stop", message));
    }
    Ok(())
}

fn count(field: &str, value: u32) -> Result<u16, Error> {
    u16::try_from(value).map_err(|_| {
        Error::invalid(field, format!("{value} is out of bounds: {field} is too large"))
    })
}
