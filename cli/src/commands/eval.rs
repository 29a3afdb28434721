//! `baton eval`: what a model file is worth on this engine.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::eval::{check_context, perplexity};
use baton_engine::load::WeightsCache;
use baton_model_files::ModelFile;
use baton_runtime::logs;
use baton_tokenizer::Tokenizer;
use baton_types::{KvDtype, context_most};
use serde_json::json;

use super::StreamingFlags;
use crate::load_bar::{self, LoadBar};
use crate::{model_source, print};

/// Of a text to score: weeks of work.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// Measures the quality of a model file.
///
/// Example: baton eval perplexity --model models/SmolLM2-135M-Instruct.Q4_1.gguf --text book.txt
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    Perplexity(Flags),
}

/// Perplexity of a model on a text: chunks of --context tokens, the second half of each scored.
///
/// Example: baton eval perplexity --model models/SmolLM2-135M-Instruct.Q4_1.gguf \
///   --text /usr/share/common-licenses/GPL-3 --context 512 --json
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    /// A GGUF file, a model folder, or hf:org/name.
    #[arg(long, value_name = "PATH|hf:org/name")]
    model: String,
    /// UTF-8 text.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens of one chunk; even.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    context: usize,
    /// Threads that compute; 0: one for each core.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Precision of KV: bf16, int8 or int4.
    #[arg(long, value_name = "DTYPE", default_value_t = KvDtype::Bf16)]
    kv_dtype: KvDtype,
    #[command(flatten)]
    streaming: StreamingFlags,
    /// Where packed weights are kept for the next start: beside (the model), off, or a folder.
    #[arg(long, value_name = "PLACE", default_value_t = WeightsCache::Beside)]
    weights_cache: WeightsCache,
    /// Print {"perplexity": …, "tokens": …}.
    #[arg(long)]
    json: bool,
}

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    let model = model_source::find(&flags.model).await?;
    tokio::task::spawn_blocking(move || run_blocking(&flags, &model)).await?
}

/// # Errors
/// Where it cannot be read, is not UTF-8, or is longer than anybody's text (`/dev/zero`).
fn read_text(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes))
        .with_context(|| format!("--text {name} cannot be read"))?;
    let mebibytes = MAX_TEXT_BYTES >> 20;
    ensure!(bytes.len() as u64 <= MAX_TEXT_BYTES, "--text {name}: more than {mebibytes} MiB");
    String::from_utf8(bytes).with_context(|| format!("--text {name} is not UTF-8 text"))
}

fn run_blocking(flags: &Flags, model: &Path) -> anyhow::Result<()> {
    logs::init_at(load_bar::LOG_LEVEL);
    let progress = LoadBar::new();
    let text = read_text(&flags.text)?;
    let file = ModelFile::open(model)?;
    let tokenizer = Tokenizer::from_artifacts(file.artifacts())
        .with_context(|| format!("the tokenizer of {} cannot be used", model.display()))?;
    let tokens = tokenizer.encode(&text);
    let defaults = CpuConfig::default();
    let streaming = flags.streaming.attention();
    check_context(flags.context, context_most(file.spec().context_tokens, streaming))?;
    let config = CpuConfig {
        kv_dtype: flags.kv_dtype,
        weights_cache: flags.weights_cache.clone(),
        threads: if flags.threads == 0 { defaults.threads } else { flags.threads },
        kv_blocks: flags.context.div_ceil(defaults.block_tokens) + 1,
        ..defaults
    };
    let mut backend = CpuBackend::load(&file, config, &progress)?;
    progress.begin(format!("scoring {} tokens", tokens.len()));
    let artifacts = file.artifacts();
    let bos = artifacts.bos_id.filter(|_| artifacts.add_bos);
    let score = perplexity(&mut backend, &tokens, flags.context, bos, streaming)?;
    progress.finish();
    if flags.json {
        return print::json(&json!({
            "perplexity": score.perplexity,
            "tokens": tokens.len(),
            "scored_tokens": score.scored_tokens,
        }));
    }
    print::line(&format!(
        "perplexity {:.4} over {} of {} tokens",
        score.perplexity,
        score.scored_tokens,
        tokens.len()
    ))
}
