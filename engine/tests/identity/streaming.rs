//! Attention to sinks and a window: the same bits along every way, from no more than is seen.

use baton_engine::backend::BackendError;

use super::*;

/// With windows and sinks that lie within a chunk of keys, and that cross its border.
const SEEN: [(u32, u32); 7] =
    [(4, 60), (0, 64), (4, 252), (1, 300), (300, 50), (256, 256), (20, 1)];

fn seen(streaming: Option<(u32, u32)>) -> Option<StreamingAttention> {
    streaming.map(|(sinks, window)| StreamingAttention { sinks, window })
}

fn long(context: usize) -> ModelFile {
    let shape = Shape { head_dim: 32, heads: 8, kv_heads: 1, context, ..TINY };
    let bytes = Gguf::tiny(shape, Dtype::Q8_0, 8).to_bytes();
    ModelFile::from_gguf_bytes(bytes, "long.gguf").unwrap()
}

#[test]
fn windows_are_the_same_along_every_way() {
    let model = long(1024);
    let prompt = prompt(&model, 700, 43);
    let vocab = model.spec().vocab;
    for kv_dtype in KV_DTYPES {
        let whole = logits(&model, &prompt, Way { kv_dtype, ..PLAIN });
        for streaming in SEEN {
            let of = |way| Way { kv_dtype, streaming: seen(Some(streaming)), ..way };
            let want = logits(&model, &prompt, of(PLAIN));
            assert!(want.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            // Until the first token leaves, it is attention to all.
            let same = (streaming.0 + streaming.1) as usize * vocab;
            assert!(want[..same] == whole[..same], "{kv_dtype} {streaming:?}");
            let row = |at: usize| &want[at * vocab..][..vocab];
            assert!((same / vocab..700).all(|at| *row(at) != whole[at * vocab..][..vocab]));
            let scalar = Way { isa: Some(Isa::Scalar), chunk: 90, threads: 2, ..PLAIN };
            let few = ways().into_iter().filter(|way| way.others < 4);
            for way in few.chain([scalar]) {
                let got = logits(&model, &prompt, of(way));
                assert!(got == want, "{kv_dtype} {streaming:?} {way:?}");
            }
        }
    }
}

/// Beside each other, and beside sequences that see everything.
#[test]
fn a_step_mixes_what_sequences_see() {
    let model = long(1024);
    let prompt = prompt(&model, 400, 44);
    let vocab = model.spec().vocab;
    let all = [None, Some((4, 60)), Some((0, 300)), Some((20, 1))].map(seen);
    let want = all.map(|streaming| logits(&model, &prompt, Way { streaming, ..PLAIN }));
    for threads in [1, 2] {
        let mut backend = backend(&model, Way { threads, ..PLAIN });
        let blocks: Vec<Vec<BlockId>> = (0..4).map(|part| scattered(26, part)).collect();
        for first in (0..400).step_by(50) {
            let span = |at: usize| Span {
                tokens: &prompt[first..first + 50],
                first_position: first,
                blocks: &blocks[at],
                logits: LogitRows::All,
                streaming: all[at],
            };
            let rows = backend.step(&[0, 1, 2, 3].map(span), &mut NoSink).unwrap();
            for (at, rows) in rows.chunks_exact(50 * vocab).enumerate() {
                let got: Vec<u32> = rows.iter().map(|x| x.to_bits()).collect();
                assert!(got == want[at][first * vocab..(first + 50) * vocab], "{at} {first}");
            }
        }
    }
}

/// The model's context bounds what is seen at once, not the sequence.
#[test]
fn positions_go_past_the_context() {
    let prompt = prompt(&long(1024), 700, 45);
    let way = Way { streaming: seen(Some((4, 124))), ..PLAIN };
    let want = logits(&long(1024), &prompt, way);
    for way in [way, Way { chunk: 1, threads: 2, ..way }, Way { chunk: 100, others: 1, ..way }] {
        // The others see everything, and so end before the context does.
        let tokens = if way.others > 0 { &prompt[..128] } else { &prompt[..] };
        let got = logits(&long(128), tokens, way);
        assert!(got == want[..got.len()], "{way:?}");
    }
}

/// K and V of sinks and window are all that another node needs.
#[test]
fn a_handoff_of_what_is_seen_is_enough() {
    let model = long(1024);
    let prompt = prompt(&model, 700, 46);
    let vocab = model.spec().vocab;
    for kv_dtype in KV_DTYPES {
        let streaming = StreamingAttention { sinks: 20, window: 100 };
        let plain = Way { kv_dtype, streaming: Some(streaming), ..PLAIN };
        let want = logits(&model, &prompt, plain);
        let prefilled = 650;
        let unseen = streaming.unseen(prefilled);
        assert_eq!(unseen, 20..551);
        let mut from = backend(&model, plain);
        let from_blocks: Vec<BlockId> = (0..44).map(BlockId).collect();
        let span = Span {
            tokens: &prompt[..prefilled],
            first_position: 0,
            blocks: &from_blocks,
            logits: LogitRows::None,
            streaming: Some(streaming),
        };
        from.step(&[span], &mut NoSink).unwrap();
        let mut to = backend(&model, Way { block_tokens: 32, threads: 2, ..plain });
        // Blocks 1 to 16 of 32 tokens lie within what is not seen.
        let held = |at: u32| if (1..17).contains(&at) { BlockId::NONE } else { BlockId(at + 40) };
        let to_blocks: Vec<BlockId> = (0..22).map(held).collect();
        for layer in 0..model.spec().layers {
            for tokens in [0..unseen.start, unseen.end..prefilled] {
                let mut payload = Vec::new();
                let span = |blocks| KvSpan {
                    layer,
                    blocks,
                    token_first: tokens.start,
                    token_count: tokens.len(),
                    heads: Heads::All,
                };
                from.kv().read_kv(&span(&from_blocks), &mut payload);
                to.write_kv(&span(&to_blocks), &payload).unwrap();
            }
            let gone = KvSpan {
                layer,
                blocks: &to_blocks,
                token_first: 30,
                token_count: 4,
                heads: Heads::All,
            };
            let refused = to.write_kv(&gone, &[]);
            assert!(matches!(refused, Err(BackendError::SpanOutside { .. })));
        }
        let rest = Span {
            tokens: &prompt[prefilled..],
            first_position: prefilled,
            blocks: &to_blocks,
            logits: LogitRows::All,
            streaming: Some(streaming),
        };
        let got = to.step(&[rest], &mut NoSink).unwrap();
        let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
        assert!(got == want[prefilled * vocab..], "{kv_dtype}");
    }
}
