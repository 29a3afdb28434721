//! Cuts a span of a layer's KV into frames.

use baton_types::{Epoch, TransferId};
use bytes::{BufMut, Bytes, BytesMut};

use crate::frame::{Frame, FrameHeader, FrameKey, KIND_CANONICAL, WireLayout};

/// KV of consecutive tokens of one layer, all heads, as the engine hands it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpan {
    pub layer: u16,
    pub token_first: u32,
    pub token_count: u32,
    /// K, then V, each `[kv_heads][token_count][head_dim]` in the granted dtype, little-endian.
    pub payload: Bytes,
}

/// Frames that hold tokens `token_first..` of a span, each of at most `frame_max_bytes`
/// (or of one token and one head, where even that is more).
pub(crate) fn split_span(
    span: &KvSpan,
    token_first: u32,
    layout: &WireLayout,
    transfer_id: TransferId,
    epoch: Epoch,
    frame_max_bytes: usize,
) -> Vec<Frame> {
    let token_end = span.token_first + span.token_count;
    let per_head_token = layout.head_token_bytes();
    let heads_per_frame = (frame_max_bytes / per_head_token).clamp(1, usize::from(layout.kv_heads));
    let tokens_per_frame =
        (frame_max_bytes / (per_head_token * heads_per_frame)).clamp(1, u32::MAX as usize);
    let mut frames = Vec::new();
    for first in (token_first..token_end).step_by(tokens_per_frame) {
        let token_count = (token_end - first).min(tokens_per_frame as u32);
        for head_first in (0..layout.kv_heads).step_by(heads_per_frame) {
            let head_count = (layout.kv_heads - head_first).min(heads_per_frame as u16);
            let layer = span.layer;
            let key = FrameKey { layer, token_first: first, token_count, head_first, head_count };
            let header = FrameHeader {
                transfer_id,
                epoch,
                key,
                dtype: layout.dtype,
                kind: KIND_CANONICAL,
                payload_len: key.payload_bytes(layout) as u32,
                crc32c: 0,
            };
            frames.push(Frame::build(header, |out| gather(out, span, &key, layout)));
        }
    }
    frames
}

/// `out[K|V][head_count][token_count][dim] ⊂ span[K|V][kv_heads][span.token_count][dim]`
fn gather(out: &mut BytesMut, span: &KvSpan, key: &FrameKey, layout: &WireLayout) {
    let row = layout.half_bytes();
    let span_tokens = span.token_count as usize;
    let (heads, first) = (usize::from(layout.kv_heads), usize::from(key.head_first));
    let skipped = (key.token_first - span.token_first) as usize;
    let run = key.token_count as usize * row;
    for half in 0..2 {
        for head in first..first + usize::from(key.head_count) {
            let at = ((half * heads + head) * span_tokens + skipped) * row;
            out.put_slice(&span.payload[at..at + run]);
        }
    }
}
