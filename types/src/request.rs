//! The one request type. Wire forms convert into it and are validated on the way.

use std::fmt::Display;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorCode, ModelSpec, RequestId, StreamingAttention, TokenId, context_most};

/// A day: a longer deadline is a mistake, and no clock overflows.
pub const DEADLINE_MAX_MS: u64 = 86_400_000;

/// How the next token is drawn. Neutral values switch a rule off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep the k likeliest; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set with at least this share of the probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the likeliest one's probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 is
    /// off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token that the answer has.
    pub presence_penalty: f32,
    /// Subtracted for each time that the answer has the token.
    pub frequency_penalty: f32,
    /// Added to logits.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Key of the random generator; the router draws one where the caller gave none.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// When an answer ends. Stop strings are the router's own business and do not travel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StopParams {
    pub max_tokens: u32,
    /// End-of-answer tokens and stop ids are not drawn before so many tokens.
    pub min_tokens: u32,
    pub stop_token_ids: Vec<TokenId>,
    /// Goes on past the model's own end-of-answer tokens.
    pub ignore_eos: bool,
}

/// One generation: a prompt in ids, `choices` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    pub id: RequestId,
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub stop: StopParams,
    /// How many answers (`n`); they share the prompt's blocks.
    pub choices: u16,
    /// Log-probabilities with so many likeliest alternatives; `None` for none at all.
    pub logprobs: Option<u16>,
    /// The same for the prompt's own tokens (echo).
    pub prompt_logprobs: Option<u16>,
    /// Sees its first tokens and a window of the last ones only; `None` sees all.
    pub streaming_attention: Option<StreamingAttention>,
    /// Separates the prefix caches of tenants.
    pub tenant_salt: Vec<u8>,
    /// Time left for the whole request, from its arrival at whoever reads this.
    pub deadline_ms: u64,
}

/// Bounds that a request must keep, from the model and the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub vocab: usize,
    pub context_tokens: usize,
    /// Whether layers of the model have a sliding window of their own.
    pub has_own_window: bool,
    pub choices_max: u16,
    pub logprobs_max: u16,
    pub stop_ids_max: usize,
    pub logit_bias_max: usize,
}

impl Limits {
    pub fn for_model(spec: &ModelSpec) -> Self {
        Self {
            vocab: spec.vocab,
            context_tokens: spec.context_tokens,
            has_own_window: spec.features.window.is_some(),
            choices_max: 16,
            logprobs_max: 20,
            stop_ids_max: 64,
            logit_bias_max: 300,
        }
    }
}

impl GenerateRequest {
    /// Checks every bound.
    ///
    /// # Errors
    /// `InvalidArgument` with the field that is out of bounds, by the name it has in the API.
    pub fn validate(&self, limits: &Limits) -> Result<(), Error> {
        let length = self.prompt.len();
        if length == 0 {
            return Err(Error::invalid("prompt", "the prompt has no tokens; send at least one"));
        }
        let most = self.context_tokens(limits.context_tokens);
        if length >= most {
            let whose = match self.streaming_attention {
                None => "the model's context holds",
                Some(_) => "prompt and answer with streaming_attention have at most",
            };
            return Err(Error::invalid(
                "prompt",
                format!(
                    "the prompt has {length} tokens, but {whose} {most} with at least one for the \
                     answer; shorten the prompt"
                ),
            ));
        }
        if let Some(id) = self.prompt.iter().find(|&&id| id as usize >= limits.vocab) {
            return Err(Error::invalid("prompt", unknown_id(*id, limits.vocab)));
        }
        self.validate_streaming(limits)?;
        self.validate_stop(limits)?;
        self.validate_sampling(limits)?;
        bounded("n", usize::from(self.choices), 1, limits.choices_max.into())?;
        bounded("deadline_ms", self.deadline_ms, 1, DEADLINE_MAX_MS)?;
        for (field, count) in
            [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)]
        {
            bounded(field, count.unwrap_or(0), 0, limits.logprobs_max)?;
        }
        Ok(())
    }

    /// Prompt and answer together at most, where the model's context holds `model_tokens`.
    pub fn context_tokens(&self, model_tokens: usize) -> usize {
        context_most(model_tokens, self.streaming_attention)
    }

    /// So many first tokens have the K and V of full attention, which alone are cached under a
    /// prefix's hash.
    pub fn cacheable_tokens(&self) -> usize {
        self.streaming_attention.map_or(usize::MAX, |streaming| streaming.cache_tokens())
    }

    /// Tokens of the prompt that no answer's token sees; `0..0` where there are none.
    pub fn unseen_prompt(&self) -> Range<usize> {
        let unseen = self.streaming_attention.map(|streaming| streaming.unseen(self.prompt.len()));
        unseen.filter(|tokens| !tokens.is_empty()).unwrap_or(0..0)
    }

    fn validate_streaming(&self, limits: &Limits) -> Result<(), Error> {
        const FIELD: &str = "streaming_attention";
        let Some(streaming) = self.streaming_attention else { return Ok(()) };
        if limits.has_own_window {
            let message = "layers of this model have a sliding window of their own, with which \
                           streaming_attention does not go together; leave it out";
            let error = Error::new(ErrorCode::Unsupported, message);
            return Err(Error { field: Some(FIELD.into()), ..error });
        }
        let StreamingAttention { sinks, window } = streaming;
        if window == 0 {
            let field = format!("{FIELD}.window");
            return Err(Error::invalid(field, "0 is out of bounds: the window is 1 or more"));
        }
        if streaming.cache_tokens() > limits.context_tokens {
            return Err(Error::invalid(
                FIELD,
                format!(
                    "{sinks} sinks and a window of {window} are more than the {} tokens of the \
                     model's context; ask for fewer",
                    limits.context_tokens
                ),
            ));
        }
        Ok(())
    }

    fn validate_stop(&self, limits: &Limits) -> Result<(), Error> {
        let stop = &self.stop;
        if stop.max_tokens == 0 {
            return Err(Error::invalid(
                "max_tokens",
                "0 is out of bounds: max_tokens is 1 or more",
            ));
        }
        if stop.min_tokens > stop.max_tokens {
            return Err(Error::invalid(
                "min_tokens",
                format!("{} is more than max_tokens ({})", stop.min_tokens, stop.max_tokens),
            ));
        }
        bounded_count("stop_token_ids", stop.stop_token_ids.len(), limits.stop_ids_max)?;
        match stop.stop_token_ids.iter().find(|&&id| id as usize >= limits.vocab) {
            Some(id) => Err(Error::invalid("stop_token_ids", unknown_id(*id, limits.vocab))),
            None => Ok(()),
        }
    }

    fn validate_sampling(&self, limits: &Limits) -> Result<(), Error> {
        let s = &self.sampling;
        bounded("temperature", s.temperature, 0.0, 2.0)?;
        if !(s.top_p > 0.0 && s.top_p <= 1.0) {
            let message = format!("{} is out of bounds: top_p is more than 0 to 1", s.top_p);
            return Err(Error::invalid("top_p", message));
        }
        bounded("min_p", s.min_p, 0.0, 1.0)?;
        bounded("repetition_penalty", s.repetition_penalty, 0.01, 10.0)?;
        bounded("presence_penalty", s.presence_penalty, -2.0, 2.0)?;
        bounded("frequency_penalty", s.frequency_penalty, -2.0, 2.0)?;
        bounded_count("logit_bias", s.logit_bias.len(), limits.logit_bias_max)?;
        for &(id, bias) in &s.logit_bias {
            if id as usize >= limits.vocab {
                return Err(Error::invalid("logit_bias", unknown_id(id, limits.vocab)));
            }
            bounded("logit_bias", bias, -100.0, 100.0)?;
        }
        Ok(())
    }
}

fn bounded<T: PartialOrd + Display>(field: &str, value: T, low: T, high: T) -> Result<(), Error> {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{value} is out of bounds: {field} is {low} to {high}")))
}

fn bounded_count(field: &str, count: usize, most: usize) -> Result<(), Error> {
    if count <= most {
        return Ok(());
    }
    Err(Error::invalid(field, format!("{count} entries are too many: at most {most}")))
}

fn unknown_id(id: TokenId, vocab: usize) -> String {
    format!("token id {id} is not in the model's vocabulary of {vocab}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::STREAMING_TOKENS_MAX;

    fn request(prompt: usize, streaming: Option<(u32, u32)>) -> GenerateRequest {
        GenerateRequest {
            id: RequestId([0; 16]),
            prompt: vec![1; prompt],
            sampling: SamplingParams::default(),
            stop: StopParams {
                max_tokens: 1,
                min_tokens: 0,
                stop_token_ids: Vec::new(),
                ignore_eos: false,
            },
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            streaming_attention: streaming
                .map(|(sinks, window)| StreamingAttention { sinks, window }),
            tenant_salt: Vec::new(),
            deadline_ms: 1,
        }
    }

    #[test]
    fn streaming_attention_has_bounds_of_its_own() {
        let limits = Limits {
            vocab: 10,
            context_tokens: 100,
            has_own_window: false,
            choices_max: 1,
            logprobs_max: 0,
            stop_ids_max: 0,
            logit_bias_max: 0,
        };
        let check = |prompt, streaming| {
            request(prompt, streaming).validate(&limits).map_err(|error| error.field.unwrap())
        };
        assert_eq!(check(99, None), Ok(()));
        assert_eq!(check(100, None), Err("prompt".into()));
        assert_eq!(check(100, Some((0, 1))), Ok(()));
        assert_eq!(check(5_000, Some((4, 96))), Ok(()));
        assert_eq!(check(STREAMING_TOKENS_MAX, Some((4, 96))), Err("prompt".into()));
        assert_eq!(check(5, Some((4, 97))), Err("streaming_attention".into()));
        assert_eq!(check(5, Some((u32::MAX, u32::MAX))), Err("streaming_attention".into()));
        assert_eq!(check(5, Some((4, 0))), Err("streaming_attention.window".into()));
        let windowed = Limits { has_own_window: true, ..limits.clone() };
        let error = request(5, Some((4, 9))).validate(&windowed).unwrap_err();
        assert_eq!(error.code, ErrorCode::Unsupported);
        assert_eq!(request(5, None).validate(&windowed), Ok(()));
    }
}
