//! `baton-router`: the router.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use baton_router::{RouterApp, RouterConfig};
use baton_runtime::{config, exit, logs, shutdown::Shutdown};
use clap::Parser;
use serde_json::{Map, Value};

/// The router: serves the OpenAI API and the gRPC API, and sends requests to prefill and decode
/// nodes.
///
/// Example: baton-router --etcd http://127.0.0.1:2379 --grpc 127.0.0.1:50051 --http 127.0.0.1:8080
#[derive(Debug, Parser)]
#[command(name = "baton-router", version, verbatim_doc_comment)]
struct Flags {
    /// TOML file; its keys are those of `RouterConfig` (see docs/configuration.md).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Members of the etcd cluster, as http://host:port.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    etcd: Option<Vec<String>>,
    /// The gRPC API listens here.
    #[arg(long, value_name = "ADDR")]
    grpc: Option<SocketAddr>,
    /// The OpenAI API, health and metrics listen here.
    #[arg(long, value_name = "ADDR")]
    http: Option<SocketAddr>,
}

#[tokio::main]
async fn main() -> ExitCode {
    logs::init();
    exit::code(run().await)
}

async fn run() -> anyhow::Result<()> {
    let flags = Flags::parse();
    let given = [
        ("etcd", flags.etcd.map(Value::from)),
        ("grpc", flags.grpc.map(|address| address.to_string().into())),
        ("http", flags.http.map(|address| address.to_string().into())),
    ];
    let given: Map<String, Value> =
        given.into_iter().filter_map(|(key, value)| Some((key.to_string(), value?))).collect();
    let config: RouterConfig =
        config::load(&RouterConfig::default(), flags.config.as_deref(), given)?;
    tracing::info!(config = %serde_json::to_string(&config)?, "effective configuration");
    let shutdown = Shutdown::new();
    shutdown.on_signals(Duration::from_millis(config.drain_grace_ms))?;
    let app = RouterApp::build(config, None, &shutdown).await?;
    app.serve(shutdown).await?;
    Ok(())
}
