//! `baton`: runs a cluster on one machine, talks to one anywhere, and measures engines.

mod commands;
mod load_bar;
mod model_source;
mod print;

use std::process::ExitCode;

use baton_runtime::exit;
use clap::{Parser, Subcommand};
use commands::{bench, chat, eval, generate, status, up};

/// Serves large language models with prefill and decode apart.
///
/// Example: baton up --model models/SmolLM2-135M-Instruct.Q4_1.gguf
#[derive(Debug, Parser)]
#[command(name = "baton", version, verbatim_doc_comment)]
struct Flags {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Flags),
    Chat(chat::Flags),
    Generate(generate::Flags),
    Status(status::Flags),
    #[command(subcommand)]
    Eval(eval::Command),
    #[command(subcommand)]
    Bench(bench::Command),
}

#[tokio::main]
async fn main() -> ExitCode {
    exit::code(run().await)
}

async fn run() -> anyhow::Result<()> {
    match Flags::parse().command {
        Command::Up(flags) => up::run(flags).await,
        Command::Chat(flags) => chat::run(flags).await,
        Command::Generate(flags) => generate::run(flags).await,
        Command::Status(flags) => status::run(flags).await,
        Command::Eval(eval::Command::Perplexity(flags)) => eval::run(flags).await,
        Command::Bench(command) => bench::run(command).await,
    }
}
