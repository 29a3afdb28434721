//! Conversions between internal wire forms and crate `types`.

use baton_types::{
    Error, FinishReason, GenerateRequest, RequestId, SamplingParams, StopParams,
    StreamingAttention, TokenLogprobs, TokenOutput,
};

use crate::internal;

impl From<&GenerateRequest> for internal::Request {
    fn from(request: &GenerateRequest) -> Self {
        Self {
            id: request.id.0.to_vec().into(),
            prompt: request.prompt.clone(),
            sampling: Some((&request.sampling).into()),
            stop: Some((&request.stop).into()),
            choices: request.choices.into(),
            logprobs: request.logprobs.map(u32::from),
            prompt_logprobs: request.prompt_logprobs.map(u32::from),
            streaming_attention: request.streaming_attention.map(
                |StreamingAttention { sinks, window }| internal::StreamingAttention {
                    sinks,
                    window,
                },
            ),
            tenant_salt: request.tenant_salt.clone().into(),
            deadline_ms: request.deadline_ms,
        }
    }
}

impl TryFrom<internal::Request> for GenerateRequest {
    type Error = Error;

    fn try_from(wire: internal::Request) -> Result<Self, Error> {
        let sampling = wire.sampling.ok_or_else(|| missing("request.sampling"))?;
        let stop = wire.stop.ok_or_else(|| missing("request.stop"))?;
        Ok(Self {
            id: request_id(&wire.id)?,
            prompt: wire.prompt,
            sampling: sampling.into(),
            stop: stop.into(),
            choices: small("request.choices", wire.choices)?,
            logprobs: wire.logprobs.map(|n| small("request.logprobs", n)).transpose()?,
            prompt_logprobs: wire
                .prompt_logprobs
                .map(|n| small("request.prompt_logprobs", n))
                .transpose()?,
            streaming_attention: wire
                .streaming_attention
                .map(|wire| StreamingAttention { sinks: wire.sinks, window: wire.window }),
            tenant_salt: wire.tenant_salt.into(),
            deadline_ms: wire.deadline_ms,
        })
    }
}

impl From<&SamplingParams> for internal::SamplingParams {
    fn from(s: &SamplingParams) -> Self {
        Self {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            logit_bias: s
                .logit_bias
                .iter()
                .map(|&(id, bias)| internal::LogitBias { id, bias })
                .collect(),
            seed: s.seed,
        }
    }
}

impl From<internal::SamplingParams> for SamplingParams {
    fn from(s: internal::SamplingParams) -> Self {
        Self {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            logit_bias: s.logit_bias.iter().map(|entry| (entry.id, entry.bias)).collect(),
            seed: s.seed,
        }
    }
}

impl From<&StopParams> for internal::StopParams {
    fn from(stop: &StopParams) -> Self {
        Self {
            max_tokens: stop.max_tokens,
            min_tokens: stop.min_tokens,
            stop_token_ids: stop.stop_token_ids.clone(),
            ignore_eos: stop.ignore_eos,
        }
    }
}

impl From<internal::StopParams> for StopParams {
    fn from(stop: internal::StopParams) -> Self {
        Self {
            max_tokens: stop.max_tokens,
            min_tokens: stop.min_tokens,
            stop_token_ids: stop.stop_token_ids,
            ignore_eos: stop.ignore_eos,
        }
    }
}

impl From<&TokenOutput> for internal::TokenOutput {
    fn from(token: &TokenOutput) -> Self {
        Self {
            choice: token.choice.into(),
            index: token.index,
            id: token.id,
            logprobs: token.logprobs.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<internal::TokenOutput> for TokenOutput {
    type Error = Error;

    fn try_from(wire: internal::TokenOutput) -> Result<Self, Error> {
        Ok(Self {
            choice: small("token.choice", wire.choice)?,
            index: wire.index,
            id: wire.id,
            logprobs: wire.logprobs.map(Into::into),
        })
    }
}

impl From<&TokenLogprobs> for internal::TokenLogprobs {
    fn from(logprobs: &TokenLogprobs) -> Self {
        Self {
            logprob: logprobs.logprob,
            top_ids: logprobs.top.iter().map(|entry| entry.0).collect(),
            top_logprobs: logprobs.top.iter().map(|entry| entry.1).collect(),
        }
    }
}

impl From<internal::TokenLogprobs> for TokenLogprobs {
    fn from(wire: internal::TokenLogprobs) -> Self {
        Self {
            logprob: wire.logprob,
            top: wire.top_ids.into_iter().zip(wire.top_logprobs).collect(),
        }
    }
}

/// Reads 16 bytes.
///
/// # Errors
/// `InvalidArgument` for any other length.
pub fn request_id(bytes: &[u8]) -> Result<RequestId, Error> {
    RequestId::try_from(bytes).map_err(|_| {
        Error::invalid("request_id", format!("{} bytes, but a request id has 16", bytes.len()))
    })
}

/// Reads the name of a reason.
///
/// # Errors
/// `InvalidArgument` for a name that no version has.
pub fn finish_reason(name: &str) -> Result<FinishReason, Error> {
    [FinishReason::Stop, FinishReason::Length]
        .into_iter()
        .find(|reason| reason.as_str() == name)
        .ok_or_else(|| Error::invalid("reason", format!("unknown finish reason {name:?}")))
}

fn small(field: &str, value: u32) -> Result<u16, Error> {
    u16::try_from(value)
        .map_err(|_| Error::invalid(field, format!("{value} is out of bounds: at most 65535")))
}

fn missing(field: &str) -> Error {
    Error::invalid(field, format!("{field} is missing"))
}
