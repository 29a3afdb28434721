//! The fields that chat and completions share.

use std::collections::BTreeMap;

use baton_types::{Error, StreamingAttention, TokenId};
use serde::Deserialize;
use serde_json::{Number, Value};

use super::body::Fields;
use crate::gateway::{SamplingWishes, Wishes};

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    /// Padding against traffic analysis, which Baton never adds.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: bool,
}

/// An extension of Baton's; both fields are needed.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StreamingField {
    sinks: u32,
    window: u32,
}

/// How the answer travels.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delivery {
    pub stream: bool,
    pub include_usage: bool,
    pub return_token_ids: bool,
}

/// Takes everything that both endpoints know, but the prompt and `logprobs`.
pub(super) fn take(fields: &mut Fields) -> Result<(Wishes, Delivery), Error> {
    let wishes = Wishes {
        sampling: SamplingWishes {
            temperature: fields.take("temperature")?,
            top_k: take_top_k(fields)?,
            top_p: fields.take("top_p")?,
            min_p: fields.take("min_p")?,
            repetition_penalty: fields.take("repetition_penalty")?,
            presence_penalty: fields.take("presence_penalty")?,
            frequency_penalty: fields.take("frequency_penalty")?,
            logit_bias: take_bias(fields)?,
            seed: take_seed(fields)?,
        },
        max_tokens: fields.take("max_tokens")?,
        min_tokens: fields.take("min_tokens")?,
        stop: take_stops(fields)?,
        stop_token_ids: fields.take("stop_token_ids")?.unwrap_or_default(),
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        n: fields.take("n")?,
        logprobs: None,
        prompt_logprobs: None,
        deadline_ms: fields.take("deadline_ms")?,
        streaming_attention: take_streaming(fields)?,
    };
    let stream = fields.take("stream")?.unwrap_or(false);
    let options: Option<StreamOptions> = fields.take("stream_options")?;
    if options.is_some() && !stream {
        let message = "stream_options go with stream: true only";
        return Err(Error::invalid("stream_options", message));
    }
    let delivery = Delivery {
        stream,
        include_usage: options.unwrap_or_default().include_usage,
        return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
    };
    Ok((wishes, delivery))
}

/// An object of two numbers.
fn take_streaming(fields: &mut Fields) -> Result<Option<StreamingAttention>, Error> {
    let Some(value) = fields.take::<Value>("streaming_attention")? else { return Ok(None) };
    if !value.is_object() {
        let message = "streaming_attention must be an object of sinks and window";
        return Err(Error::invalid("streaming_attention", message));
    }
    let field = serde_json::from_value(value);
    field
        .map(|StreamingField { sinks, window }| Some(StreamingAttention { sinks, window }))
        .map_err(|error| Error::invalid("streaming_attention", error.to_string()))
}

/// A string, or a list of strings.
fn take_stops(fields: &mut Fields) -> Result<Vec<String>, Error> {
    let wrong = || Error::invalid("stop", "stop must be a string or a list of strings");
    match fields.take("stop")? {
        None => Ok(Vec::new()),
        Some(Value::String(stop)) => Ok(vec![stop]),
        Some(stops @ Value::Array(_)) => serde_json::from_value(stops).map_err(|_| wrong()),
        Some(_) => Err(wrong()),
    }
}

/// -1 is how some clients write "all".
fn take_top_k(fields: &mut Fields) -> Result<Option<u32>, Error> {
    match fields.take::<i64>("top_k")? {
        None | Some(-1) => Ok(None),
        Some(k) => u32::try_from(k).map(Some).map_err(|_| {
            let most = u32::MAX;
            Error::invalid(
                "top_k",
                format!("{k} is out of bounds: -1 or 0 keep all, else 1 to {most}"),
            )
        }),
    }
}

/// A signed number of 64 bits, as OpenAI's, or an unsigned one, as explanations print it; either
/// is its bits.
fn take_seed(fields: &mut Fields) -> Result<Option<u64>, Error> {
    let Some(seed) = fields.take::<Number>("seed")? else { return Ok(None) };
    let bits = seed.as_u64().or_else(|| seed.as_i64().map(|seed| seed as u64));
    let wrong = || format!("{seed} is out of bounds: seed is a whole number of 64 bits");
    bits.map(Some).ok_or_else(|| Error::invalid("seed", wrong()))
}

fn take_bias(fields: &mut Fields) -> Result<Vec<(TokenId, f32)>, Error> {
    let bias: BTreeMap<String, f32> = fields.take("logit_bias")?.unwrap_or_default();
    bias.into_iter()
        .map(|(key, bias)| match key.parse::<TokenId>() {
            // "05" would be a second name of 5.
            Ok(id) if id.to_string() == key => Ok((id, bias)),
            _ => Err(Error::invalid("logit_bias", format!("the key {key:?} is no token id"))),
        })
        .collect()
}
