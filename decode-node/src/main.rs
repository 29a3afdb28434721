//! `baton-decode`: a decode node.

use std::process::ExitCode;
use std::time::Duration;

use baton_decode_node::DecodeNode;
use baton_engine_host::{NodeConfig, NodeFlags};
use baton_runtime::{exit, logs, shutdown::Shutdown};
use clap::Parser;

/// A decode node: holds KV and generates tokens.
///
/// Example: baton-decode --model models/SmolLM2-135M-Instruct.Q4_1.gguf --grpc 127.0.0.1:50071 \
///   --http 127.0.0.1:9071 --etcd http://127.0.0.1:2379
#[derive(Debug, Parser)]
#[command(name = "baton-decode", version, verbatim_doc_comment)]
struct Flags {
    #[command(flatten)]
    node: NodeFlags,
}

#[tokio::main]
async fn main() -> ExitCode {
    logs::init();
    exit::code(run().await)
}

async fn run() -> anyhow::Result<()> {
    let config = Flags::parse().node.load(&NodeConfig::on_ports(50071, 9071, 0))?;
    tracing::info!(config = %serde_json::to_string(&config)?, "effective configuration");
    let shutdown = Shutdown::new();
    shutdown.on_signals(Duration::from_millis(config.drain_grace_ms))?;
    let node = DecodeNode::build(config, None).await?;
    node.serve(shutdown).await?;
    Ok(())
}
