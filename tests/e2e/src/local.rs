//! Router, prefill node and decode node inside the test's own process, over loopback gRPC, as
//! `baton up` hosts them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_client::Client;
use baton_decode_node::DecodeNode;
use baton_engine_host::NodeConfig;
use baton_kv_transfer::transport::Transport;
use baton_prefill_node::PrefillNode;
use baton_registry::{MemoryRegistry, Registry};
use baton_router::{RouterApp, RouterConfig};
use baton_runtime::shutdown::Shutdown;
use tokio::task::JoinSet;

use crate::cluster::{client, idle};
use crate::paths;
use crate::wait;

const READY_WITHIN: Duration = Duration::from_secs(60);
const END_WITHIN: Duration = Duration::from_secs(30);

/// Three roles in one process.
#[derive(Debug)]
pub struct Local {
    pub grpc: SocketAddr,
    pub http: SocketAddr,
    pub prefill_http: SocketAddr,
    pub decode_http: SocketAddr,
    pub prefill_grpc: SocketAddr,
    pub decode_grpc: SocketAddr,
    /// Where the decode node takes KV.
    pub decode_kv: SocketAddr,
    shutdown: Shutdown,
    parts: JoinSet<Result<(), String>>,
}

/// A node with one thread and a small pool, on ports that the system picks.
pub fn node_config() -> NodeConfig {
    NodeConfig {
        model: paths::model(),
        threads: 1,
        kv_pool_mib: 256,
        ..NodeConfig::on_ports(0, 0, 0)
    }
}

/// A router on ports that the system picks.
pub fn router_config() -> RouterConfig {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    RouterConfig { grpc: any, http: any, ..RouterConfig::default() }
}

impl Local {
    /// Starts the three and waits until the router is ready and sees both nodes.
    ///
    /// # Panics
    /// Where one of them cannot start.
    pub async fn start(router: RouterConfig, prefill: NodeConfig, decode: NodeConfig) -> Self {
        Self::start_over(router, prefill, decode, |configured| configured).await
    }

    /// As [`start`](Self::start), with KV over a transport that is made of the configured one.
    ///
    /// # Panics
    /// As [`start`](Self::start).
    pub async fn start_over(
        router: RouterConfig,
        prefill: NodeConfig,
        decode: NodeConfig,
        wrap: impl FnOnce(Arc<dyn Transport>) -> Arc<dyn Transport> + Send + 'static,
    ) -> Self {
        // `BATON_LOG=debug` shows more.
        baton_runtime::logs::init_at("error");
        let shutdown = Shutdown::new();
        let registry: Arc<dyn Registry> = Arc::new(MemoryRegistry::new([]));
        let router = RouterApp::build(router, Some(registry.clone()), &shutdown).await;
        let router = router.expect("the router starts");
        let prefill = PrefillNode::build(prefill, Some(registry.clone())).await;
        let prefill = prefill.expect("the prefill node starts").over(wrap);
        let decode = DecodeNode::build(decode, Some(registry)).await;
        let decode = decode.expect("the decode node starts");
        let mut local = Self {
            grpc: router.grpc_address(),
            http: router.http_address(),
            prefill_http: prefill.http_address(),
            decode_http: decode.http_address(),
            prefill_grpc: prefill.grpc_address(),
            decode_grpc: decode.grpc_address(),
            decode_kv: decode.kv_address(),
            shutdown: shutdown.clone(),
            parts: JoinSet::new(),
        };
        let (one, two, three) = (shutdown.clone(), shutdown.clone(), shutdown);
        local.parts.spawn(async { router.serve(one).await.map_err(|error| error.to_string()) });
        local.parts.spawn(async { prefill.serve(two).await.map_err(|error| error.to_string()) });
        local.parts.spawn(async { decode.serve(three).await.map_err(|error| error.to_string()) });
        let client = local.client();
        wait::until(READY_WITHIN, "both nodes", || async {
            let status = client.status().await.map_err(|error| error.to_string())?;
            let ready = status.nodes.iter().filter(|node| node.state == "ready").count();
            if ready == 2 { Ok(()) } else { Err(format!("{ready} are ready")) }
        })
        .await;
        local
    }

    pub fn client(&self) -> Client {
        client(self.grpc)
    }

    /// Waits until neither node holds a block, a grant or a request.
    ///
    /// # Panics
    /// Where something is still held after `within`.
    pub async fn idle(&self, within: Duration) {
        idle("prefill node", self.prefill_http, within).await;
        idle("decode node", self.decode_http, within).await;
    }

    /// Drains and ends all three.
    ///
    /// # Panics
    /// Where one fails or does not end in time.
    pub async fn end(mut self) {
        self.shutdown.drain.cancel();
        let ends = async {
            while let Some(ended) = self.parts.join_next().await {
                ended.expect("no part panics").expect("each part ends well");
            }
        };
        wait::in_time(END_WITHIN, "the end of all parts", ends).await;
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.shutdown.drain.cancel();
        self.shutdown.stop.cancel();
    }
}
