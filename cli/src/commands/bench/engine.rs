//! `baton bench engine`: how fast an engine is on this machine.

use baton_engine::bench::{BenchPlan, BenchReport, DECODED_TOKENS, Work, measure};
use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::limits::MachineLimits;
use baton_engine::load::WeightsCache;
use baton_model_files::ModelFile;
use baton_runtime::logs;
use baton_types::KvDtype;

use crate::load_bar::{self, LoadBar};
use crate::{model_source, print};

/// Tokens per second of prefill and decode, without sampling, scheduler or network, and how near
/// that comes to what the machine can do at most, measured in the same run.
///
/// Example: baton bench engine --model models/SmolLM2-135M-Instruct.Q4_1.gguf --threads 2 \
///   --prefill 512,2048 --batch 1,8,32 --context 128 --json
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    /// A GGUF file, a model folder, or hf:org/name.
    #[arg(long, value_name = "PATH|hf:org/name")]
    model: String,
    /// Threads that compute; 0: one for each core.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Precision of KV: bf16, int8 or int4.
    #[arg(long, value_name = "DTYPE", default_value_t = KvDtype::Bf16)]
    kv_dtype: KvDtype,
    /// Where packed weights are kept for the next start: beside (the model), off, or a folder.
    #[arg(long, value_name = "PLACE", default_value_t = WeightsCache::Beside)]
    weights_cache: WeightsCache,
    /// Lengths of prompts.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "512,2048")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    prefill: Vec<u32>,
    /// Sequences that decode together.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8,32")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    batch: Vec<u16>,
    /// Tokens that each has before it decodes.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Measurements of each case; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// Print {"prefill": […], "decode": […]}.
    #[arg(long)]
    json: bool,
}

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    let model = model_source::find(&flags.model).await?;
    let json = flags.json;
    let report = tokio::task::spawn_blocking(move || run_blocking(&flags, &model)).await??;
    if json {
        return print::json(&report);
    }
    for case in &report.prefill {
        let name = format!("prefill {:>5} tokens", case.tokens);
        print::line(&line(&name, case.tokens_per_s, case.work, &report.limits))?;
    }
    for case in &report.decode {
        let name = format!("decode  batch {:>3} at {:>5}", case.batch, case.context);
        print::line(&line(&name, case.tokens_per_s, case.work, &report.limits))?;
    }
    Ok(())
}

/// One case beside the machine's limits.
fn line(name: &str, tokens_per_s: f64, work: Work, limits: &MachineLimits) -> String {
    let read = 100.0 * work.bytes_per_s / limits.read_bytes_per_s;
    let arithmetic = work
        .arithmetic_share(limits)
        .map_or_else(String::new, |share| format!(", {:.0} % of its arithmetic", 100.0 * share));
    format!("{name:<24} {tokens_per_s:>9.1} t/s  {read:.0} % of the machine's reads{arithmetic}")
}

fn run_blocking(flags: &Flags, model: &std::path::Path) -> anyhow::Result<BenchReport> {
    logs::init_at(load_bar::LOG_LEVEL);
    let progress = LoadBar::new();
    let file = ModelFile::open(model)?;
    let plan = BenchPlan {
        prefill_tokens: flags.prefill.iter().map(|tokens| *tokens as usize).collect(),
        batches: flags.batch.iter().map(|batch| usize::from(*batch)).collect(),
        context_tokens: flags.context as usize,
        repeats: usize::from(flags.repeats),
    };
    check_lengths(&plan, file.spec().context_tokens)?;
    let defaults = CpuConfig::default();
    let kv_tokens = plan.kv_tokens(defaults.block_tokens)?;
    let config = CpuConfig {
        kv_dtype: flags.kv_dtype,
        weights_cache: flags.weights_cache.clone(),
        threads: if flags.threads == 0 { defaults.threads } else { flags.threads },
        kv_blocks: kv_tokens.div_ceil(defaults.block_tokens) + 1,
        max_logit_rows: defaults
            .max_logit_rows
            .max(plan.batches.iter().copied().max().unwrap_or(1)),
        ..defaults
    };
    let mut backend = CpuBackend::load(&file, config, &progress)?;
    progress.begin("measuring");
    let threads = backend.threads();
    let report = measure(&mut backend, &plan, threads)?;
    progress.finish();
    Ok(report)
}

/// Whether all lengths fit the model, which takes `most` tokens.
fn check_lengths(plan: &BenchPlan, most: usize) -> anyhow::Result<()> {
    if let Some(tokens) = plan.prefill_tokens.iter().find(|tokens| **tokens > most) {
        anyhow::bail!("--prefill {tokens}: the model takes at most {most} tokens");
    }
    let context = plan.context_tokens;
    if context + DECODED_TOKENS > most {
        anyhow::bail!(
            "--context {context}: {DECODED_TOKENS} tokens are decoded after it, and the model \
             takes at most {most}"
        );
    }
    Ok(())
}
