//! Cuts a span of a layer's KV into frames.

use baton_types::{Epoch, TransferId};
use bytes::Bytes;

use crate::frame::{Frame, FrameHeader, FrameKey, KIND_CANONICAL, WireLayout};
use crate::memory::{FrameBuffer, FrameMemory};

/// KV of consecutive tokens of one layer, all heads, as the engine hands it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSpan {
    pub layer: u16,
    pub token_first: u32,
    pub token_count: u32,
    /// K, then V, each `[kv_heads][token_count][head_dim]` in the granted dtype, then the scales
    /// of K and of V, each `[kv_heads][token_count]`, where it has them; little-endian.
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
    memory: &FrameMemory,
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
            frames.push(Frame::build(header, memory, |out| gather(out, span, &key, layout)));
        }
    }
    frames
}

/// `out[part][head_count][token_count] ⊂ span[part][kv_heads][span.token_count]`, the parts and
/// their bytes being those of [`WireLayout::part_bytes`].
fn gather(out: &mut FrameBuffer, span: &KvSpan, key: &FrameKey, layout: &WireLayout) {
    let span_tokens = span.token_count as usize;
    let (heads, first) = (usize::from(layout.kv_heads), usize::from(key.head_first));
    let skipped = (key.token_first - span.token_first) as usize;
    let mut part = 0;
    for row in layout.part_bytes() {
        let run = key.token_count as usize * row;
        for head in first..first + usize::from(key.head_count) {
            let at = part + (head * span_tokens + skipped) * row;
            out.put_slice(&span.payload[at..at + run]);
        }
        part += heads * span_tokens * row;
    }
}

#[cfg(test)]
mod tests {
    use baton_types::KvDtype;

    use super::*;

    /// Each byte of a span says its part, head and token.
    #[test]
    fn frames_take_their_elements_and_scales() {
        let layout = WireLayout { layers: 1, kv_heads: 3, head_dim: 4, dtype: KvDtype::Int8 };
        let mut payload = Vec::new();
        for (part, bytes) in layout.part_bytes().into_iter().enumerate() {
            for (head, token) in (0..3).flat_map(|head| (0..5).map(move |token| (head, token))) {
                payload.extend(std::iter::repeat_n((part * 64 + head * 16 + token) as u8, bytes));
            }
        }
        assert_eq!(payload.len(), 5 * layout.token_layer_bytes());
        let span = KvSpan { layer: 0, token_first: 8, token_count: 5, payload: payload.into() };
        let heap = FrameMemory::heap();
        // Two heads and one token a frame.
        let frames = split_span(&span, 9, &layout, TransferId::default(), Epoch(1), 24, &heap);
        assert_eq!(frames.len(), 4 * 2);
        for frame in frames {
            let key = frame.key();
            assert_eq!(frame.header().dtype, KvDtype::Int8);
            assert_eq!(frame.payload().len(), key.payload_bytes(&layout));
            let mut want = Vec::new();
            for (part, bytes) in [4, 4, 2, 2].into_iter().enumerate() {
                for head in key.head_first..key.head_first + key.head_count {
                    let token = key.token_first as usize - 8;
                    let says = (part * 64 + usize::from(head) * 16 + token) as u8;
                    want.extend(std::iter::repeat_n(says, bytes));
                }
            }
            assert_eq!(frame.payload(), want, "{key}");
        }
    }
}
