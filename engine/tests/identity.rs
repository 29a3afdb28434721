//! The founding identity: logits are the same to the bit whatever else is different.

// Helpers of tests, which clippy does not take for tests.
#![allow(clippy::unwrap_used)]

#[path = "../../model-files/tests/support/mod.rs"]
mod support;

#[path = "identity/streaming.rs"]
mod streaming;

use baton_engine::backend::{Backend, Heads, KvRead, KvSpan, LayerSink, LogitRows, NoSink, Span};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::{Isa, SpinPolicy};
use baton_model_files::ModelFile;
use baton_types::{BlockId, KvDtype, StreamingAttention, TokenId};
use support::families::{self, FAMILIES};
use support::{Dtype, Gguf, Meta, Random, Shape, TINY};

const SHIPPED: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/SmolLM2-135M-Instruct.Q4_1.gguf");

/// One way to compute a prompt.
#[derive(Clone, Copy, Debug)]
struct Way {
    isa: Option<Isa>,
    threads: usize,
    kv_dtype: KvDtype,
    block_tokens: usize,
    chunk: usize,
    /// Other sequences in every step, which see all before them.
    others: usize,
    streaming: Option<StreamingAttention>,
}

const PLAIN: Way = Way {
    isa: None,
    threads: 1,
    kv_dtype: KvDtype::Bf16,
    block_tokens: 16,
    chunk: 512,
    others: 0,
    streaming: None,
};

const KV_DTYPES: [KvDtype; 3] = KvDtype::STORED;

fn tiny(dtype: Dtype) -> ModelFile {
    let bytes = Gguf::tiny(Shape::tiny(dtype), dtype, 5).to_bytes();
    ModelFile::from_gguf_bytes(bytes, "tiny.gguf").unwrap()
}

fn backend(model: &ModelFile, way: Way) -> CpuBackend {
    let config = CpuConfig {
        threads: way.threads,
        isa: way.isa,
        spin: SpinPolicy::Auto,
        block_tokens: way.block_tokens,
        kv_dtype: way.kv_dtype,
        kv_blocks: 8192 / way.block_tokens,
        max_step_tokens: 1024,
        max_logit_rows: 1024,
        ..CpuConfig::default()
    };
    CpuBackend::new(model, config).unwrap()
}

fn prompt(model: &ModelFile, tokens: usize, seed: u64) -> Vec<TokenId> {
    let mut random = Random(seed);
    (0..tokens).map(|_| (random.bits() % model.spec().vocab as u64) as TokenId).collect()
}

/// Pages of one sequence, scattered over its part of the pool.
fn scattered(count: usize, part: usize) -> Vec<BlockId> {
    (0..count).map(|i| BlockId((part * count + (i * 7 + 3) % count) as u32)).collect()
}

/// A page count that 7 does not divide, so that `scattered` is a permutation.
fn page_count(tokens: usize, block_tokens: usize) -> usize {
    let count = tokens.div_ceil(block_tokens);
    if count.is_multiple_of(7) { count + 1 } else { count }
}

/// Bits of the logits of every position of `prompt`.
fn logits(model: &ModelFile, prompt: &[TokenId], way: Way) -> Vec<u32> {
    let mut backend = backend(model, way);
    run(&mut backend, prompt, way, &mut NoSink)
}

fn run(
    backend: &mut CpuBackend,
    tokens: &[TokenId],
    way: Way,
    sink: &mut dyn LayerSink,
) -> Vec<u32> {
    let pages = page_count(tokens.len(), way.block_tokens);
    let mut blocks: Vec<Vec<BlockId>> = (0..=way.others).map(|i| scattered(pages, i)).collect();
    let vocab = backend.spec().vocab;
    let mut out = Vec::new();
    let mut first = 0;
    while first < tokens.len() {
        let end = (first + way.chunk).min(tokens.len());
        // Pages that are never seen again are given back.
        let unseen = way.streaming.map_or(0..0, |streaming| streaming.unseen(first));
        let end_block = unseen.end / way.block_tokens;
        let first_block = unseen.start.div_ceil(way.block_tokens).min(end_block);
        blocks[0][first_block..end_block].fill(BlockId::NONE);
        let mut spans = vec![Span {
            tokens: &tokens[first..end],
            first_position: first,
            blocks: &blocks[0],
            logits: LogitRows::All,
            streaming: way.streaming,
        }];
        // The others are as far as the first, each with a few tokens and none of its logits;
        // they come first, so that rows lie elsewhere.
        for blocks in &blocks[1..] {
            let (tokens, logits) = (&tokens[first..end.min(first + 5)], LogitRows::None);
            let streaming = None;
            spans.insert(0, Span { tokens, first_position: first, blocks, logits, streaming });
        }
        let rows = backend.step(&spans, sink).unwrap();
        assert_eq!(rows.len(), (end - first) * vocab);
        out.extend(rows.iter().map(|x| x.to_bits()));
        first = end;
    }
    out
}

fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    for isa in [Isa::Avx2, Isa::Avx512] {
        ways.push(Way { isa: Some(isa), ..PLAIN });
        ways.push(Way { isa: Some(isa), threads: 2, chunk: 64, others: 3, ..PLAIN });
    }
    ways.push(Way { chunk: 1, ..PLAIN });
    ways.push(Way { chunk: 1, threads: 2, block_tokens: 32, ..PLAIN });
    ways.push(Way { chunk: 7, threads: 3, others: 2, ..PLAIN });
    ways.push(Way { chunk: 100, block_tokens: 48, ..PLAIN });
    ways.push(Way { chunk: 512, threads: 2, others: 16, block_tokens: 16, ..PLAIN });
    ways.retain(|way| way.isa.is_none_or(Isa::is_available));
    ways
}

#[test]
fn tiny_models_of_every_type() {
    for dtype in Dtype::ALL {
        let model = tiny(dtype);
        let prompt = prompt(&model, 150, 42);
        let want = logits(&model, &prompt, PLAIN);
        assert!(want.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        let scalar = Way { isa: Some(Isa::Scalar), chunk: 50, threads: 2, ..PLAIN };
        assert_eq!(logits(&model, &prompt, scalar), want, "{dtype:?} scalar");
        for way in ways() {
            assert_eq!(logits(&model, &prompt, way), want, "{dtype:?} {way:?}");
        }
    }
}

/// Types of the matrices of one layer in files as they are found, and in worse ones.
fn mixed(name: &str) -> Dtype {
    match name {
        "token_embd.weight" => Dtype::Q8_0,
        "blk.0.attn_q.weight" | "blk.0.attn_k.weight" => Dtype::Q4K,
        "blk.0.attn_v.weight" | "blk.0.ffn_down.weight" => Dtype::Q6K,
        "blk.0.ffn_gate.weight" => Dtype::Q5_0,
        "blk.0.ffn_up.weight" => Dtype::Iq4Nl,
        "blk.1.attn_q.weight" => Dtype::Bf16,
        "blk.1.attn_k.weight" => Dtype::Q5_1,
        "blk.1.ffn_gate.weight" => Dtype::F16,
        "blk.1.ffn_up.weight" => Dtype::Q3K,
        _ => Dtype::Q5K,
    }
}

#[test]
fn a_model_that_mixes_types() {
    // Heads whose keys do not fill a panel, so that V begins within one where types allow it.
    let shape = Shape { layers: 2, kv_heads: 1, ..Shape::tiny(Dtype::Q4K) };
    let bytes = Gguf::mixed(shape, 9, mixed).to_bytes();
    let model = ModelFile::from_gguf_bytes(bytes, "mixed.gguf").unwrap();
    let prompt = prompt(&model, 60, 47);
    let want = logits(&model, &prompt, PLAIN);
    assert!(want.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    let scalar = Way { isa: Some(Isa::Scalar), chunk: 50, threads: 2, ..PLAIN };
    assert_eq!(logits(&model, &prompt, scalar), want, "scalar");
    for way in ways() {
        assert_eq!(logits(&model, &prompt, way), want, "{way:?}");
    }
}

#[test]
fn long_prompts_cross_chunks_of_keys() {
    let shape = Shape { head_dim: 32, heads: 8, kv_heads: 1, ..TINY };
    let bytes = Gguf::tiny(shape, Dtype::Q8_0, 8).to_bytes();
    let model = ModelFile::from_gguf_bytes(bytes, "long.gguf").unwrap();
    let prompt = prompt(&model, 700, 43);
    for kv_dtype in KV_DTYPES {
        let want = logits(&model, &prompt, Way { kv_dtype, ..PLAIN });
        for way in ways().into_iter().filter(|way| way.others < 4) {
            assert!(logits(&model, &prompt, Way { kv_dtype, ..way }) == want, "{kv_dtype} {way:?}");
        }
    }
}

/// Of every family, and beside bfloat16 not the same.
#[test]
fn every_family_over_quantized_kv() {
    let shape = Shape { layers: 3, ..TINY };
    for family in FAMILIES {
        let bytes = families::family(family, shape, Dtype::Q8_0, 9).to_bytes();
        let model = ModelFile::from_gguf_bytes(bytes, "family.gguf").unwrap();
        let prompt = prompt(&model, 330, 47);
        for kv_dtype in [KvDtype::Int8, KvDtype::Int4] {
            let over = |way| Way { kv_dtype, ..way };
            let want = logits(&model, &prompt, over(PLAIN));
            assert!(want.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            assert!(logits(&model, &prompt, PLAIN) != want);
            let scalar = Way { isa: Some(Isa::Scalar), chunk: 90, threads: 2, ..PLAIN };
            for way in ways().into_iter().chain([scalar]) {
                assert!(logits(&model, &prompt, over(way)) == want, "{family} {kv_dtype} {way:?}");
            }
        }
    }
}

#[test]
fn numerics_name_the_precision_of_kv() {
    let model = tiny(Dtype::F32);
    for kv_dtype in KV_DTYPES {
        let backend = backend(&model, Way { kv_dtype, ..PLAIN });
        assert_eq!(backend.numerics().0, format!("x86-int8.1/kv-{kv_dtype}"));
        assert_eq!(backend.numerics().kv_dtype(), Some(kv_dtype));
        assert_eq!(backend.kv_layout().dtype, kv_dtype);
    }
    let config = CpuConfig { kv_dtype: KvDtype::F16, ..CpuConfig::default() };
    let error = CpuBackend::new(&model, config).unwrap_err().to_string();
    assert_eq!(error, "a KV pool of f16 is not supported: bf16, int8 or int4");
}

#[test]
fn every_family() {
    let shape = Shape { layers: 3, ..TINY };
    for family in FAMILIES {
        for dtype in [Dtype::Bf16, Dtype::Q4_1, Dtype::Q8_0] {
            let bytes = families::family(family, shape, dtype, 9).to_bytes();
            let model = ModelFile::from_gguf_bytes(bytes, "family.gguf").unwrap();
            let prompt = prompt(&model, 330, 47);
            let want = logits(&model, &prompt, PLAIN);
            assert!(want.iter().all(|bits| f32::from_bits(*bits).is_finite()));
            let scalar = Way { isa: Some(Isa::Scalar), chunk: 90, threads: 2, ..PLAIN };
            for way in ways().into_iter().chain([scalar]) {
                assert!(logits(&model, &prompt, way) == want, "{family} {dtype:?} {way:?}");
            }
        }
    }
}

/// A window that is longer than a chunk of keys.
#[test]
fn long_windows_cross_chunks_of_keys() {
    for (window, family) in [(256, "mistral"), (257, "mistral"), (300, "gemma3")] {
        let mut file = families::family(family, TINY, Dtype::Q8_0, 10);
        let arch = if family == "mistral" { "llama" } else { family };
        file.set(&format!("{arch}.attention.sliding_window"), Meta::U32(window));
        let model = ModelFile::from_gguf_bytes(file.to_bytes(), "window.gguf").unwrap();
        let prompt = prompt(&model, 900, 48);
        let want = logits(&model, &prompt, PLAIN);
        for way in ways().into_iter().filter(|way| way.others < 4) {
            assert!(logits(&model, &prompt, way) == want, "{family} {window} {way:?}");
        }
    }
}

fn the_window_hides(kv_dtype: KvDtype) {
    let plain = Way { kv_dtype, ..PLAIN };
    let bytes = families::family("mistral", TINY, Dtype::Bf16, 11).to_bytes();
    let model = ModelFile::from_gguf_bytes(bytes, "window.gguf").unwrap();
    let prompt = prompt(&model, 500, 49);
    let want = logits(&model, &prompt, plain);
    let vocab = model.spec().vocab;
    let token_bytes = backend(&model, plain).kv_layout().token_layer_bytes();
    for (first, chunk) in [(49, 1), (260, 9), (299, 30), (490, 10)] {
        let mut backend = backend(&model, plain);
        let blocks: Vec<BlockId> = (0..32).map(BlockId).collect();
        let span = |tokens, first_position, logits| Span {
            tokens,
            first_position,
            blocks: &blocks,
            logits,
            streaming: None,
        };
        backend.step(&[span(&prompt[..first], 0, LogitRows::None)], &mut NoSink).unwrap();
        // All that the first token of the next step does not see becomes NaN.
        let unseen = first + 1 - families::WINDOW;
        let poison = [0xff].repeat(unseen * token_bytes);
        for layer in 0..model.spec().layers {
            let span = KvSpan {
                layer,
                blocks: &blocks,
                token_first: 0,
                token_count: unseen,
                heads: Heads::All,
            };
            backend.write_kv(&span, &poison).unwrap();
        }
        let tokens = &prompt[first..first + chunk];
        let got = backend.step(&[span(tokens, first, LogitRows::All)], &mut NoSink).unwrap();
        let got: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
        assert!(got == want[first * vocab..(first + chunk) * vocab], "{first} {chunk}");
        // And that is all: the last token that it sees does count.
        let last = KvSpan {
            layer: 0,
            blocks: &blocks,
            token_first: unseen,
            token_count: 1,
            heads: Heads::All,
        };
        backend.write_kv(&last, &poison[..token_bytes]).unwrap();
        let again = span(&prompt[first..first + 1], first, LogitRows::Last);
        let got = backend.step(&[again], &mut NoSink).unwrap();
        assert!(got.iter().all(|x| x.is_nan()));
    }
}

/// Carries every layer's KV to another backend, as a handoff does.
struct Handoff<'a> {
    to: &'a mut CpuBackend,
    from_blocks: Vec<BlockId>,
    to_blocks: Vec<BlockId>,
    tokens: usize,
}

impl LayerSink for Handoff<'_> {
    fn layer_done(&mut self, layer: usize, kv: &dyn KvRead) {
        let (mut payload, tokens) = (Vec::new(), self.tokens);
        let span = |blocks| KvSpan {
            layer,
            blocks,
            token_first: 3,
            token_count: tokens - 3,
            heads: Heads::All,
        };
        kv.read_kv(&span(&self.from_blocks), &mut payload);
        self.to.write_kv(&span(&self.to_blocks), &payload).unwrap();
    }
}

fn hand_off(kv_dtype: KvDtype) {
    let plain = Way { kv_dtype, ..PLAIN };
    let model = tiny(Dtype::Q4_0);
    let prompt = prompt(&model, 300, 44);
    let want = logits(&model, &prompt, plain);
    let vocab = model.spec().vocab;
    let to_way = Way { block_tokens: 32, threads: 2, ..plain };
    let mut to = backend(&model, to_way);
    let to_blocks = scattered(page_count(300, 32), 1);
    let prefilled = 281;
    // The first three tokens are computed at home, the others come from the other side.
    let home = Span {
        tokens: &prompt[..3],
        first_position: 0,
        blocks: &to_blocks,
        logits: LogitRows::None,
        streaming: None,
    };
    to.step(&[home], &mut NoSink).unwrap();
    let from_blocks = scattered(page_count(prefilled, 16), 0);
    let mut sink =
        Handoff { to: &mut to, from_blocks, to_blocks: to_blocks.clone(), tokens: prefilled };
    run(&mut backend(&model, plain), &prompt[..prefilled], plain, &mut sink);
    let span = Span {
        tokens: &prompt[prefilled..],
        first_position: prefilled,
        blocks: &to_blocks,
        logits: LogitRows::All,
        streaming: None,
    };
    let rows = to.step(&[span], &mut NoSink).unwrap();
    let got: Vec<u32> = rows.iter().map(|x| x.to_bits()).collect();
    assert_eq!(got, want[prefilled * vocab..]);
}

fn copy_and_reuse(kv_dtype: KvDtype) {
    let plain = Way { kv_dtype, ..PLAIN };
    let model = tiny(Dtype::Bf16);
    let prompt = prompt(&model, 40, 45);
    let want = logits(&model, &prompt, plain);
    let vocab = model.spec().vocab;
    let mut backend = backend(&model, plain);
    // The past of every block is NaN.
    let poison = [0xff].repeat(16 * backend.kv_layout().token_layer_bytes());
    for layer in 0..model.spec().layers {
        for block in 0..8 {
            let blocks = [BlockId(block)];
            let span = KvSpan {
                layer,
                blocks: &blocks,
                token_first: 0,
                token_count: 16,
                heads: Heads::All,
            };
            backend.write_kv(&span, &poison).unwrap();
        }
    }
    let blocks = [BlockId(0), BlockId(1)];
    let span = |first: usize, end, blocks, logits| Span {
        tokens: &prompt[first..end],
        first_position: first,
        blocks,
        logits,
        streaming: None,
    };
    let first = span(0, 21, &blocks, LogitRows::None);
    backend.step(&[first], &mut NoSink).unwrap();
    backend.copy_block(BlockId(1), BlockId(5), 5);
    let blocks = [BlockId(0), BlockId(5), BlockId(6)];
    let rest = span(21, prompt.len(), &blocks, LogitRows::All);
    let got: Vec<u32> =
        backend.step(&[rest], &mut NoSink).unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(got, want[21 * vocab..]);
}

#[test]
fn what_lies_before_the_window_counts_for_nothing() {
    KV_DTYPES.into_iter().for_each(the_window_hides);
}

#[test]
fn a_handoff_to_other_pages_changes_nothing() {
    KV_DTYPES.into_iter().for_each(hand_off);
}

#[test]
fn a_copied_block_and_a_reused_one_change_nothing() {
    KV_DTYPES.into_iter().for_each(copy_and_reuse);
}

#[test]
fn wrong_payloads_are_refused_with_nothing_written() {
    let model = tiny(Dtype::F32);
    let mut backend = backend(&model, PLAIN);
    let blocks = [BlockId(0)];
    let span = |token_count, layer| KvSpan {
        layer,
        blocks: &blocks,
        token_first: 0,
        token_count,
        heads: Heads::All,
    };
    assert!(backend.write_kv(&span(4, 0), &[1; 7]).is_err());
    assert!(backend.write_kv(&span(17, 0), &[1; 17 * 128]).is_err());
    assert!(backend.write_kv(&span(4, 2), &[1; 4 * 128]).is_err());
    let mut payload = Vec::new();
    backend.kv().read_kv(&span(16, 0), &mut payload);
    assert!(payload.iter().all(|byte| *byte == 0));
}

#[test]
fn the_shipped_model() {
    if !std::path::Path::new(SHIPPED).exists() {
        eprintln!("skipped: no {SHIPPED}");
        return;
    }
    let model = ModelFile::open(SHIPPED).unwrap();
    let prompt = prompt(&model, 70, 46);
    let want = logits(&model, &prompt, PLAIN);
    let scalar = Way { isa: Some(Isa::Scalar), chunk: 9, threads: 2, ..PLAIN };
    assert_eq!(logits(&model, &prompt[..9], scalar), want[..9 * model.spec().vocab]);
    for way in [
        Way { isa: Some(Isa::Avx2), threads: 2, chunk: 64, ..PLAIN },
        Way { chunk: 1, threads: 2, others: 2, block_tokens: 32, ..PLAIN },
        Way { chunk: 7, threads: 2, others: 16, ..PLAIN },
    ] {
        if way.isa.is_none_or(Isa::is_available) {
            assert!(logits(&model, &prompt, way) == want, "{way:?}");
        }
    }
}
