//! `baton bench`: how fast an engine or a link is on this machine.

mod engine;
mod transfer;

/// Measures speed.
#[derive(Debug, clap::Subcommand)]
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
