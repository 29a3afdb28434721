//! What is written is what is read, to the bit, whatever the pages look like.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::backend::Heads;
use crate::convert::KvConversion;
use crate::kernels::hadamard;
use crate::kernels::numerics::{bf16_widen, f16_widen};

const LAYERS: u16 = 2;
const HEADS: u16 = 3;
const DIM: u16 = 48;

fn pages(dtype: KvDtype, block_tokens: u16) -> Pages {
    let layout = KvLayout { layers: LAYERS, kv_heads: HEADS, head_dim: DIM, block_tokens, dtype };
    Pages::new(layout, 8).unwrap()
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut x = seed;
    let next = |_| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as u8
    };
    (0..count).map(next).collect()
}

/// The rows of these heads of a payload of all.
fn of_heads(payload: &[u8], heads: Range<usize>, tokens: usize, dtype: KvDtype) -> Vec<u8> {
    let layout = KvLayout { layers: 1, kv_heads: HEADS, head_dim: DIM, block_tokens: 16, dtype };
    part(payload, &layout, tokens, heads, 0..tokens)
}

/// What of a payload of `tokens` tokens a frame of these heads and tokens holds.
fn part(
    payload: &[u8],
    layout: &KvLayout,
    tokens: usize,
    heads: Range<usize>,
    of: Range<usize>,
) -> Vec<u8> {
    let elements = layout.dtype.elements_bytes(usize::from(layout.head_dim));
    let scale = layout.dtype.scale_bytes();
    let mut rest = payload;
    let mut out = Vec::new();
    for row in [elements, elements, scale, scale] {
        let (rows, after) = rest.split_at(usize::from(layout.kv_heads) * tokens * row);
        for head in heads.clone() {
            let at = head * tokens;
            out.extend_from_slice(&rows[(at + of.start) * row..(at + of.end) * row]);
        }
        rest = after;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Whatever pages a sender has, and however it cuts heads and tokens into frames: a receiver
    /// with pages of another size holds the same bytes.
    #[test]
    fn frames_of_any_cut_fill_pages_of_any_size(
        dtype in prop::sample::select(&KvDtype::STORED),
        (source_tiles, target_tiles) in (1..=4_u16, 1..=4_u16),
        heads in 1..=6_u16,
        head_dim in prop::sample::select(vec![16_u16, 32, 48, 64, 128]),
        first in 0..50_usize,
        tokens in 1..80_usize,
        cuts in prop::collection::vec(any::<bool>(), 6),
        step in 1..80_usize,
        seed in any::<u64>(),
    ) {
        let layout = |tiles| KvLayout {
            layers: 1,
            kv_heads: heads,
            head_dim,
            block_tokens: tiles * 16,
            dtype,
        };
        let blocks: Vec<_> = (0..9).rev().map(BlockId).collect();
        let all = KvSpan {
            layer: 0,
            blocks: &blocks,
            token_first: first,
            token_count: tokens,
            heads: Heads::All,
        };
        let mut source = Pages::new(layout(source_tiles), 9).unwrap();
        let mut target = Pages::new(layout(target_tiles), 9).unwrap();
        let sent = bytes(tokens * source.layout().token_layer_bytes(), seed);
        source.write(&all, &sent).unwrap();
        let mut payload = Vec::new();
        source.read_kv(&all, &mut payload);
        let mut head = 0;
        while head < usize::from(heads) {
            let end = (head + 1..usize::from(heads)).find(|&at| cuts[at]);
            let end = end.unwrap_or(usize::from(heads));
            for token in (0..tokens).step_by(step) {
                let of = token..(token + step).min(tokens);
                let frame = KvSpan {
                    token_first: first + of.start,
                    token_count: of.len(),
                    heads: Heads::Some { first: head, count: end - head },
                    ..all
                };
                let bytes = part(&payload, source.layout(), tokens, head..end, of);
                target.write(&frame, &bytes).unwrap();
            }
            head = end;
        }
        let mut got = Vec::new();
        target.read_kv(&all, &mut got);
        prop_assert!(got == sent);
    }
}

#[test]
fn heads_may_come_one_by_one() {
    let blocks = [5, 0, 7].map(BlockId);
    for dtype in KvDtype::STORED {
        for (first, count) in [(0, 1), (1, 2), (2, 1), (0, 3)] {
            let mut pages = pages(dtype, 16);
            let (token_first, token_count) = (9, 30);
            let span =
                |heads| KvSpan { layer: 1, blocks: &blocks, token_first, token_count, heads };
            let all = span(Heads::All);
            let bytes_of_all = token_count * pages.layout().token_layer_bytes();
            let (old, new) = (bytes(bytes_of_all, 1), bytes(bytes_of_all, 2));
            pages.write(&all, &old).unwrap();
            let some = span(Heads::Some { first, count });
            let part = of_heads(&new, first..first + count, token_count, dtype);
            pages.write(&some, &part).unwrap();
            let (mut read, mut whole) = (Vec::new(), Vec::new());
            pages.read_kv(&some, &mut read);
            assert!(read == part, "{dtype} {first}+{count}");
            pages.read_kv(&all, &mut whole);
            for head in 0..usize::from(HEADS) {
                let from = if (first..first + count).contains(&head) { &new } else { &old };
                let want = of_heads(from, head..head + 1, token_count, dtype);
                assert!(of_heads(&whole, head..head + 1, token_count, dtype) == want);
            }
        }
        let beyond = KvSpan {
            layer: 0,
            blocks: &blocks,
            token_first: 0,
            token_count: 1,
            heads: Heads::Some { first: 2, count: 2 },
        };
        let error = pages(dtype, 16).write(&beyond, &[0; 8]).unwrap_err();
        assert!(matches!(error, BackendError::SpanOutside { .. }));
    }
}

#[test]
fn a_payload_survives_pages_of_any_size() {
    let blocks = [5, 0, 7, 2].map(BlockId);
    for dtype in KvDtype::STORED {
        for block_tokens in [16, 32, 48] {
            let mut pages = pages(dtype, block_tokens);
            let token_bytes = pages.layout().token_layer_bytes();
            let most = 4 * usize::from(block_tokens);
            let mut all = Vec::new();
            for layer in 0..usize::from(LAYERS) {
                let payload = bytes(most * token_bytes, layer as u64);
                let span = KvSpan {
                    layer,
                    blocks: &blocks,
                    token_first: 0,
                    token_count: most,
                    heads: Heads::All,
                };
                pages.write(&span, &payload).unwrap();
                all.push((span, payload));
            }
            for (span, payload) in &all {
                let mut read = Vec::new();
                pages.read_kv(span, &mut read);
                assert!(read == *payload, "{dtype} {block_tokens}");
            }
            // A part of a layer, written and read again, leaves its neighbours alone.
            for (token_first, token_count) in [(0, 1), (3, 14), (15, 18), (most - 1, 1)] {
                let span = KvSpan {
                    layer: 1,
                    blocks: &blocks,
                    token_first,
                    token_count,
                    heads: Heads::All,
                };
                let (mut before, mut after) = (Vec::new(), Vec::new());
                pages.read_kv(&span, &mut before);
                let payload = bytes(token_count * token_bytes, 99);
                pages.write(&span, &payload).unwrap();
                pages.read_kv(&span, &mut after);
                assert_eq!(after, payload);
                pages.write(&span, &before).unwrap();
                let mut whole = Vec::new();
                pages.read_kv(&all[1].0, &mut whole);
                assert!(whole == all[1].1, "{dtype} {block_tokens} {token_first}");
            }
        }
    }
}

#[test]
fn a_copied_block_reads_the_same() {
    for dtype in KvDtype::STORED {
        let mut pages = pages(dtype, 32);
        let token_bytes = pages.layout().token_layer_bytes();
        let span = |blocks, token_count| KvSpan {
            layer: 1,
            blocks,
            token_first: 0,
            token_count,
            heads: Heads::All,
        };
        pages.write(&span(&[BlockId(3)], 32), &bytes(32 * token_bytes, 1)).unwrap();
        pages.write(&span(&[BlockId(6)], 32), &bytes(32 * token_bytes, 2)).unwrap();
        let beyond = KvSpan {
            layer: 1,
            blocks: &[BlockId(6)],
            token_first: 21,
            token_count: 11,
            heads: Heads::All,
        };
        let (mut from, mut to, mut rest) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        pages.read_kv(&beyond, &mut rest[0]);
        pages.copy_block(BlockId(3), BlockId(6), 21);
        pages.read_kv(&span(&[BlockId(3)], 21), &mut from);
        pages.read_kv(&span(&[BlockId(6)], 21), &mut to);
        assert_eq!(from, to, "{dtype}");
        pages.read_kv(&beyond, &mut rest[1]);
        assert_eq!(rest[0], rest[1], "{dtype}");
    }
}

/// K (or V) of one token, three heads, and what `store` makes of it.
fn stored(dtype: KvDtype, x: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut pages = pages(dtype, 16);
    let dim = usize::from(DIM);
    for head in 0..usize::from(HEADS) {
        let (k, v) = (&x[head * dim..][..dim], &x[(2 - head) * dim..][..dim]);
        // SAFETY: there is one thread.
        unsafe { pages.shared().store(1, &[BlockId(4)], head, 9, k, v) };
    }
    let mut payload = Vec::new();
    let span = KvSpan {
        layer: 1,
        blocks: &[BlockId(4)],
        token_first: 9,
        token_count: 1,
        heads: Heads::All,
    };
    pages.read_kv(&span, &mut payload);
    let numbers = match dtype {
        KvDtype::Int8 | KvDtype::Int4 => {
            let row = dtype.elements_bytes(dim);
            let (quants, scales) = payload.split_at(2 * usize::from(HEADS) * row);
            let scales =
                scales.as_chunks::<2>().0.iter().map(|s| f16_widen(u16::from_le_bytes(*s)));
            let number = |row: &[u8], d: usize| match dtype {
                KvDtype::Int8 => f32::from(row[d] as i8),
                _ => f32::from(row[d / 2] >> (d % 2 * 4) & 15) - 8.0,
            };
            let rows = quants.chunks_exact(row).zip(scales);
            rows.flat_map(|(row, scale)| (0..dim).map(move |d| number(row, d) * scale)).collect()
        }
        _ => {
            let words = payload.as_chunks::<2>().0.iter();
            words.map(|b| bf16_widen(u16::from_le_bytes(*b))).collect()
        }
    };
    (payload, numbers)
}

#[test]
fn stored_numbers_are_near() {
    let dim = usize::from(DIM);
    let x: Vec<f32> = bytes(3 * dim, 7)
        .iter()
        .enumerate()
        .map(|(i, byte)| (f32::from(*byte) - 128.0) * [1e-6, 0.02, 70.0][i / dim])
        .collect();
    // Of four bits the side that is not farthest from zero ends at 7/8.
    let nears = [1.0 / 256.0, 1.0 / 253.0, 1.0 / 7.9];
    for (dtype, near) in KvDtype::STORED.into_iter().zip(nears) {
        let (_, got) = stored(dtype, &x);
        for head in 0..3 {
            let want = &x[head * dim..][..dim];
            let most = want.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            // K of this head, and V of the head opposite.
            for start in [head * dim, (3 + 2 - head) * dim] {
                for (got, want) in got[start..start + dim].iter().zip(want) {
                    // The smallest scale is subnormal in half precision, and coarse.
                    let slack = if head == 0 { 0.02 * most } else { 0.0 };
                    assert!((got - want).abs() <= most * near + slack, "{dtype} {got} {want}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// A sender that converts sends the bytes that this node would have stored itself.
    #[test]
    fn converted_is_what_would_have_been_stored(
        dtype in prop::sample::select(&KvDtype::STORED),
        size in prop::sample::select(vec![1e-6_f32, 0.02, 70.0]),
        seed in any::<u64>(),
    ) {
        let count = usize::from(HEADS * DIM);
        let x: Vec<f32> =
            bytes(count, seed).iter().map(|byte| (f32::from(*byte) - 128.0) * size).collect();
        // `stored` has K of the heads in order, and V of them in reverse.
        let heads = || x.chunks_exact(usize::from(DIM));
        let wire = heads().chain(heads().rev()).flatten();
        let exact: Vec<u8> = wire.flat_map(|x| x.to_le_bytes()).collect();
        let conversion = KvConversion::new(KvDtype::F32, dtype, HEADS, DIM).unwrap();
        let mut converted = Vec::new();
        conversion.convert(&exact, 1, &mut converted).unwrap();
        // The forward pass stores what it has rotated.
        let mut rotated = x;
        if dtype == KvDtype::Int4 {
            rotated.chunks_exact_mut(usize::from(DIM)).for_each(hadamard::rotate);
        }
        prop_assert!(converted == stored(dtype, &rotated).0, "{dtype}");
    }
}

#[test]
fn what_is_not_finite_shows_and_zero_is_zero() {
    let dim = usize::from(DIM);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1.0; 3 * dim];
        x[dim + 5] = bad;
        for dtype in [KvDtype::Int8, KvDtype::Int4] {
            let (_, got) = stored(dtype, &x);
            assert!(got[dim..2 * dim].iter().all(|x| !x.is_finite()), "{dtype} {bad}");
            assert!(got[..dim].iter().all(|x| (x - 1.0).abs() < 1e-3), "{dtype}");
        }
    }
    for small in [0.0, 1e-9] {
        let (_, got) = stored(KvDtype::Int4, &vec![small; 3 * dim]);
        assert!(got.iter().all(|x| *x == 0.0), "a scale that underflows is zero");
    }
    let (payload, _) = stored(KvDtype::Int8, &vec![0.0; 3 * dim]);
    assert!(payload.iter().all(|byte| *byte == 0));
    // A scale that underflows is zero, and so are its bytes.
    let (payload, _) = stored(KvDtype::Int8, &vec![1e-9; 3 * dim]);
    assert!(payload.iter().all(|byte| *byte == 0));
}
