//! How often greedy decoding over quantised KV takes the token that it takes over bfloat16 KV.
//!
//! `cargo run --release -p baton-cli --example kv_agreement -- MODEL TEXT int8 [PROMPTS]`: prompts
//! of 64 tokens, spread over the text, are answered with 64 tokens over bfloat16 KV. Printed is the
//! part of these tokens that KV of the other precision picks as well, given the same tokens before;
//! and the part that it still picks when left alone, where the first difference changes all that
//! follows.

use anyhow::{Context, ensure};
use baton_engine::backend::{Backend, LogitRows, NoSink, Span};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_model_files::ModelFile;
use baton_tokenizer::Tokenizer;
use baton_types::{BlockId, KvDtype, TokenId};

const PROMPT_TOKENS: usize = 64;
const ANSWER_TOKENS: usize = 64;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let file = ModelFile::open(arguments.next().context("the path of a model is missing")?)?;
    let text = std::fs::read_to_string(arguments.next().context("the path of a text is missing")?)?;
    let other =
        arguments.next().context("the precision of KV is missing: int8 or int4")?.parse()?;
    let prompts = arguments.next().map_or(Ok(20), |prompts| prompts.parse::<usize>())?;
    let tokens = Tokenizer::from_artifacts(file.artifacts())?.encode(&text);
    ensure!(prompts > 0 && tokens.len() >= prompts + PROMPT_TOKENS, "the text is too short");
    let mut backends = [KvDtype::Bf16, other].map(|kv_dtype| {
        CpuBackend::new(&file, CpuConfig { kv_dtype, kv_blocks: 16, ..CpuConfig::default() })
    });
    let [Ok(bf16), Ok(other)] = &mut backends else { anyhow::bail!("{backends:?}") };
    let (mut forced, mut free) = (0, 0);
    for prompt in 0..prompts {
        let start = prompt * (tokens.len() - PROMPT_TOKENS) / prompts;
        let prompt = &tokens[start..start + PROMPT_TOKENS];
        let answer = answer(bf16, prompt, None)?;
        let equal = |given: Vec<TokenId>| given.iter().zip(&answer).filter(|(a, b)| a == b).count();
        forced += equal(self::answer(other, prompt, Some(&answer))?);
        free += equal(self::answer(other, prompt, None)?);
    }
    let percent = |count: usize| 100.0 * count as f64 / (prompts * ANSWER_TOKENS) as f64;
    println!(
        "{} tokens: {:.2} % equal after the same tokens, {:.2} % when left alone",
        prompts * ANSWER_TOKENS,
        percent(forced),
        percent(free)
    );
    Ok(())
}

/// The likeliest token at each position after `prompt`; the answer goes on with these, or with
/// `given`.
fn answer(
    backend: &mut CpuBackend,
    prompt: &[TokenId],
    given: Option<&[TokenId]>,
) -> anyhow::Result<Vec<TokenId>> {
    let blocks: Vec<BlockId> = (0..backend.kv_blocks() as u32).map(BlockId).collect();
    let mut answer = Vec::with_capacity(ANSWER_TOKENS);
    let mut tokens = prompt.to_vec();
    let mut first_position = 0;
    while answer.len() < ANSWER_TOKENS {
        let logits = LogitRows::Last;
        let span =
            Span { tokens: &tokens, first_position, blocks: &blocks, logits, streaming: None };
        let row = backend.step(&[span], &mut NoSink)?;
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let best = best.context("a model has tokens")?.0 as TokenId;
        first_position += tokens.len();
        tokens = vec![given.map_or(best, |given| given[answer.len()])];
        answer.push(best);
    }
    Ok(answer)
}
