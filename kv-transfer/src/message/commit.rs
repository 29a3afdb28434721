//! How a commit is written.

use baton_types::{TokenLogprobs, TokenOutput};
use bytes::{BufMut, BytesMut};

use super::{Commit, CommitInfo};
use crate::codec::{DecodeError, Reader};

const LOGPROBS_MIN_BYTES: usize = 8;
const OUTPUT_MIN_BYTES: usize = 11;
const ALTERNATIVE_BYTES: usize = 8;

impl Commit {
    pub(super) fn put(&self, out: &mut BytesMut) {
        let CommitInfo { first_tokens, sampler_digest, prompt_logprobs, cached_tokens } =
            &self.info;
        out.put_u32_le(self.frame_count);
        out.put_slice(&self.digest);
        out.put_slice(sampler_digest);
        out.put_u32_le(*cached_tokens);
        put_count(out, first_tokens.len());
        for token in first_tokens {
            out.put_u16_le(token.choice);
            out.put_u32_le(token.index);
            out.put_u32_le(token.id);
            out.put_u8(token.logprobs.is_some().into());
            if let Some(logprobs) = &token.logprobs {
                put_logprobs(out, logprobs);
            }
        }
        put_count(out, prompt_logprobs.len());
        prompt_logprobs.iter().for_each(|logprobs| put_logprobs(out, logprobs));
    }

    pub(super) fn get(reader: &mut Reader) -> Result<Self, DecodeError> {
        let frame_count = reader.u32("frame_count")?;
        let digest = reader.array("digest")?;
        let sampler_digest = reader.array("sampler_digest")?;
        let cached_tokens = reader.u32("cached_tokens")?;
        let count = reader.count("first_tokens", OUTPUT_MIN_BYTES)?;
        let first_tokens = (0..count).map(|_| get_output(reader)).collect::<Result<_, _>>()?;
        let count = reader.count("prompt_logprobs", LOGPROBS_MIN_BYTES)?;
        let prompt_logprobs = (0..count).map(|_| get_logprobs(reader)).collect::<Result<_, _>>()?;
        let info = CommitInfo { first_tokens, sampler_digest, prompt_logprobs, cached_tokens };
        Ok(Self { info, frame_count, digest })
    }
}

fn get_output(reader: &mut Reader) -> Result<TokenOutput, DecodeError> {
    let choice = reader.u16("choice")?;
    let index = reader.u32("index")?;
    let id = reader.u32("id")?;
    let logprobs = match reader.u8("has_logprobs")? {
        0 => None,
        1 => Some(get_logprobs(reader)?),
        value => {
            return Err(DecodeError::Value { field: "has_logprobs", value: value.into() });
        }
    };
    Ok(TokenOutput { choice, index, id, logprobs })
}

fn put_logprobs(out: &mut BytesMut, logprobs: &TokenLogprobs) {
    out.put_f32_le(logprobs.logprob);
    put_count(out, logprobs.top.len());
    for &(id, logprob) in &logprobs.top {
        out.put_u32_le(id);
        out.put_f32_le(logprob);
    }
}

fn get_logprobs(reader: &mut Reader) -> Result<TokenLogprobs, DecodeError> {
    let logprob = reader.f32("logprob")?;
    let count = reader.count("top", ALTERNATIVE_BYTES)?;
    let top = (0..count)
        .map(|_| Ok((reader.u32("top id")?, reader.f32("top logprob")?)))
        .collect::<Result<_, DecodeError>>()?;
    Ok(TokenLogprobs { logprob, top })
}

fn put_count(out: &mut BytesMut, count: usize) {
    out.put_u32_le(u32::try_from(count).expect("lists are far shorter than 2^32"));
}
