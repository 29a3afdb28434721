//! `baton-prefill`: a prefill node.

use std::process::ExitCode;
use std::time::Duration;

use baton_engine_host::{NodeConfig, NodeFlags};
use baton_prefill_node::PrefillNode;
use baton_runtime::{exit, logs, shutdown::Shutdown};
use clap::Parser;

/// A prefill node: computes prompts and hands their KV to decode nodes.
///
/// Example: baton-prefill --model models/SmolLM2-135M-Instruct.Q4_1.gguf --grpc 127.0.0.1:50061 \
///   --http 127.0.0.1:9061 --etcd http://127.0.0.1:2379
#[derive(Debug, Parser)]
#[command(name = "baton-prefill", version, verbatim_doc_comment)]
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
    let config = Flags::parse().node.load(&NodeConfig::on_ports(50061, 9061, 0))?;
    tracing::info!(config = %serde_json::to_string(&config)?, "effective configuration");
    let shutdown = Shutdown::new();
    shutdown.on_signals(Duration::from_millis(config.drain_grace_ms))?;
    let node = PrefillNode::build(config, None).await?;
    node.serve(shutdown).await?;
    Ok(())
}
