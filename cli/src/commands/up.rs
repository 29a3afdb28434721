//! `baton up`: router, prefill node and decode node in one process, over real loopback gRPC.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use baton_decode_node::DecodeNode;
use baton_engine::load::WeightsCache;
use baton_engine_host::NodeConfig;
use baton_prefill_node::PrefillNode;
use baton_registry::{MemoryRegistry, Registry};
use baton_router::{RouterApp, RouterConfig};
use baton_runtime::logs;
use baton_runtime::shutdown::Shutdown;
use baton_types::KvDtype;
use indicatif::MultiProgress;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::load_bar::{self, LoadBar};
use crate::{model_source, print};

/// Starts a router, a prefill node and a decode node on this machine.
///
/// Example: baton up --model models/SmolLM2-135M-Instruct.Q4_1.gguf
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    /// A GGUF file, a model folder, or hf:org/name.
    #[arg(long, value_name = "PATH|hf:org/name", env = "MODEL")]
    model: String,
    /// The OpenAI API listens here.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    http: SocketAddr,
    /// The gRPC API listens here.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:50051")]
    grpc: SocketAddr,
    /// Threads that compute, shared out to the two nodes; 0: all cores.
    #[arg(long, value_name = "N", default_value_t = 0)]
    threads: usize,
    /// Memory for the KV pool of each node.
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    kv_pool_mib: usize,
    /// Precision of KV: bf16, int8 in half the memory, int4 in a quarter.
    #[arg(long, value_name = "DTYPE", default_value_t = KvDtype::Bf16)]
    kv_dtype: KvDtype,
    /// Where packed weights are kept for the next start: beside (the model), off, or a folder.
    #[arg(long, value_name = "PLACE", default_value_t = WeightsCache::Beside)]
    weights_cache: WeightsCache,
    /// Prompts up to so many tokens are prefilled at the decode node; 0: none, so that every
    /// prompt is handed over.
    #[arg(long, value_name = "N", default_value_t = local_prefill_default())]
    local_prefill_max_tokens: usize,
    /// Print the ready block as one JSON object.
    #[arg(long)]
    json: bool,
}

fn local_prefill_default() -> usize {
    RouterConfig::default().local_prefill_max_tokens
}

const READY_WITHIN: Duration = Duration::from_secs(60);

/// After Ctrl-C, how long running requests may go on.
const GRACE: Duration = Duration::from_secs(30);

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    // The ready block shall stand out.
    logs::init_at(load_bar::LOG_LEVEL);
    let shutdown = Shutdown::new();
    shutdown.on_signals(GRACE)?;
    let model = model_source::find(&flags.model).await?;
    let registry: Arc<dyn Registry> = Arc::new(MemoryRegistry::new([]));
    // The router first: a port that is taken shows before the model is loaded.
    let router_config = RouterConfig {
        http: flags.http,
        grpc: flags.grpc,
        local_prefill_max_tokens: flags.local_prefill_max_tokens,
        ..RouterConfig::default()
    };
    let router = RouterApp::build(router_config, Some(registry.clone()), &shutdown).await?;
    let (prefill_threads, decode_threads) = split(flags.threads);
    let config = |threads| node_config(&flags, &model, threads);
    let bars = MultiProgress::new();
    let bar = |name| Arc::new(LoadBar::among(&bars, name));
    let (prefill_bar, decode_bar) = (bar("prefill node:"), bar("decode node: "));
    let (member, place) = (Some(registry.clone()), Some(registry));
    let (prefill, decode) = tokio::try_join!(
        PrefillNode::build_observed(config(prefill_threads), member, prefill_bar.clone()),
        DecodeNode::build_observed(config(decode_threads), place, decode_bar.clone()),
    )
    .context("a node could not be started")?;
    prefill_bar.finish();
    decode_bar.finish();
    let ready = ReadyBlock {
        model: model.display().to_string(),
        http: router.http_address(),
        grpc: router.grpc_address(),
        prefill: prefill.grpc_address(),
        decode: decode.grpc_address(),
        prefill_http: prefill.http_address(),
        decode_http: decode.http_address(),
    };
    let health = router.health();
    let mut parts: JoinSet<anyhow::Result<()>> = JoinSet::new();
    let (router_end, prefill_end, decode_end) = (part(&shutdown), part(&shutdown), part(&shutdown));
    // The nodes serve until the router has drained: its running answers need them.
    let nodes = [prefill_end.drain.clone(), decode_end.drain.clone()];
    let drain_router = shutdown.drain.clone();
    let router_drain = router_end.drain.clone();
    tokio::spawn(async move {
        drain_router.cancelled().await;
        router_drain.cancel();
    });
    parts.spawn(async move {
        let served = router.serve(router_end).await;
        nodes.iter().for_each(CancellationToken::cancel);
        Ok(served?)
    });
    parts.spawn(async move { Ok(prefill.serve(prefill_end).await?) });
    parts.spawn(async move { Ok(decode.serve(decode_end).await?) });
    let is_ready = async {
        while !health.is_ready() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        ready_in_time = tokio::time::timeout(READY_WITHIN, is_ready) => {
            ready_in_time.context("the nodes did not become ready in time")?;
            ready.print(flags.json).await?;
        }
        () = shutdown.drain.cancelled() => {}
        Some(ended) = parts.join_next() => ended??,
    }
    while let Some(ended) = parts.join_next().await {
        // One part's end ends the others.
        shutdown.drain.cancel();
        ended??;
    }
    Ok(())
}

/// One part's own end: it drains when told to, and stops at the latest when all do.
fn part(all: &Shutdown) -> Shutdown {
    Shutdown { drain: CancellationToken::new(), stop: all.stop.child_token() }
}

/// Threads for prefill and decode: the cores, halved, since both run at once.
fn split(threads: usize) -> (usize, usize) {
    let all = match threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        some => some,
    };
    let decode = (all / 2).max(1);
    ((all - all / 2).max(1), decode)
}

fn node_config(flags: &Flags, model: &Path, threads: usize) -> NodeConfig {
    NodeConfig {
        model: model.to_path_buf(),
        threads,
        kv_pool_mib: flags.kv_pool_mib,
        kv_dtype: flags.kv_dtype,
        weights_cache: flags.weights_cache.clone(),
        drain_grace_ms: GRACE.as_millis() as u64,
        ..NodeConfig::on_ports(0, 0, 0)
    }
}

struct ReadyBlock {
    model: String,
    http: SocketAddr,
    grpc: SocketAddr,
    prefill: SocketAddr,
    decode: SocketAddr,
    prefill_http: SocketAddr,
    decode_http: SocketAddr,
}

impl ReadyBlock {
    async fn print(&self, as_json: bool) -> anyhow::Result<()> {
        let Self { model, http, grpc, prefill, decode, prefill_http, decode_http } = self;
        let endpoint = baton_client::Client::connect(
            &format!("http://{grpc}"),
            baton_client::ClientOptions::default(),
        )?;
        let models = endpoint.list_models().await?;
        let name = models.first().map_or("", |model| model.id.as_str());
        if as_json {
            return print::json(&json!({
                "model": name, "file": model, "http": format!("http://{http}"),
                "grpc": format!("http://{grpc}"), "prefill": prefill.to_string(),
                "decode": decode.to_string(), "prefill_http": format!("http://{prefill_http}"),
                "decode_http": format!("http://{decode_http}"),
            }));
        }
        let body = json!({
            "model": name,
            "messages": [{"role": "user", "content": "What is gravity?"}],
            "max_tokens": 64,
            "temperature": 0,
        });
        print::line(&format!(
            "\nBaton is ready.\n\n  \
             model       {name} ({model})\n  \
             OpenAI API  http://{http}/v1\n  \
             gRPC API    http://{grpc}\n  \
             nodes       prefill {prefill}, decode {decode}\n  \
             metrics     /metrics at {http}, {prefill_http} (prefill), {decode_http} (decode)\n\
             \n\
             Try:\n\n  \
             curl http://{http}/v1/chat/completions \
             -H 'content-type: application/json' -d '{body}'\n\n\
             or `baton chat --endpoint http://{grpc}`. Ctrl-C drains and stops.\n"
        ))
    }
}
