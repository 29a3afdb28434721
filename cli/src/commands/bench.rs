//! `baton bench`: how fast an engine or a link is on this machine.

mod engine;
mod transfer;

/// Measures speed.
///
/// Example: baton bench engine --model models/SmolLM2-135M-Instruct.Q4_1.gguf --batch 1,8
/// Example: baton bench transfer --way grpc --level wire
#[derive(Debug, clap::Subcommand)]
#[command(verbatim_doc_comment)]
pub enum Command {
    Engine(engine::Flags),
    Transfer(transfer::Flags),
}

pub async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Engine(flags) => engine::run(flags).await,
        Command::Transfer(flags) => transfer::run(flags).await,
    }
}
