//! Requests, made field by field; what is left out takes the server's default.

use baton_proto::v1;
use baton_types::TokenId;

/// What generation from a prompt and from a chat have in common.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub model: String,
    pub sampling: v1::Sampling,
    pub stop: v1::Stop,
    pub output: v1::Output,
    pub deadline_ms: Option<u64>,
    pub streaming_attention: Option<v1::StreamingAttention>,
}

/// A raw prompt.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    pub prompt: v1::generate_request::Prompt,
    pub options: Options,
}

/// Messages, rendered by the model's chat template.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    pub messages: Vec<v1::ChatMessage>,
    pub options: Options,
}

impl GenerateRequest {
    /// From text, which is never parsed into control tokens.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            prompt: v1::generate_request::Prompt::Text(text.into()),
            options: Options::default(),
        }
    }

    /// From ids, taken as they are.
    pub fn token_ids(ids: Vec<TokenId>) -> Self {
        Self {
            prompt: v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids }),
            options: Options::default(),
        }
    }

    pub(crate) fn into_wire(self) -> v1::GenerateRequest {
        let Options { model, sampling, stop, output, deadline_ms, streaming_attention } =
            self.options;
        v1::GenerateRequest {
            model,
            prompt: Some(self.prompt),
            sampling: Some(sampling),
            stop: Some(stop),
            output: Some(output),
            deadline_ms,
            streaming_attention,
        }
    }
}

impl ChatRequest {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a message.
    pub fn message(mut self, role: impl Into<String>, content: impl Into<String>) -> Self {
        self.messages.push(v1::ChatMessage { role: role.into(), content: content.into() });
        self
    }

    pub(crate) fn into_wire(self) -> v1::ChatRequest {
        let Options { model, sampling, stop, output, deadline_ms, streaming_attention } =
            self.options;
        v1::ChatRequest {
            model,
            messages: self.messages,
            sampling: Some(sampling),
            stop: Some(stop),
            output: Some(output),
            deadline_ms,
            streaming_attention,
        }
    }
}

macro_rules! setters {
    ($request:ident) => {
        impl $request {
            /// Needed only where more than one model is served.
            pub fn model(mut self, model: impl Into<String>) -> Self {
                self.options.model = model.into();
                self
            }

            pub fn max_tokens(mut self, tokens: u32) -> Self {
                self.options.stop.max_tokens = Some(tokens);
                self
            }

            /// 0 takes the likeliest token.
            pub fn temperature(mut self, temperature: f32) -> Self {
                self.options.sampling.temperature = Some(temperature);
                self
            }

            pub fn seed(mut self, seed: u64) -> Self {
                self.options.sampling.seed = Some(seed);
                self
            }

            /// Number of answers.
            pub fn choices(mut self, n: u32) -> Self {
                self.options.output.n = Some(n);
                self
            }

            /// Adds a text that ends the answer.
            pub fn stop(mut self, stop: impl Into<String>) -> Self {
                self.options.stop.stop.push(stop.into());
                self
            }

            /// Goes on past the model's own end.
            pub fn ignore_eos(mut self, ignore: bool) -> Self {
                self.options.stop.ignore_eos = ignore;
                self
            }

            /// Asks for the route and the time of each phase.
            pub fn explain(mut self, explain: bool) -> Self {
                self.options.output.explain = explain;
                self
            }

            /// Attention to the first `sinks` tokens and a window of the last ones, in tokens;
            /// what is between is forgotten. Prompt and answer may then be longer than the
            /// model's context.
            pub fn streaming_attention(mut self, sinks: u32, window: u32) -> Self {
                let streaming = v1::StreamingAttention { sinks, window };
                self.options.streaming_attention = Some(streaming);
                self
            }

            /// Time for the whole request.
            pub fn deadline_ms(mut self, ms: u64) -> Self {
                self.options.deadline_ms = Some(ms);
                self
            }
        }
    };
}

setters!(GenerateRequest);
setters!(ChatRequest);
