//! `baton status`: nodes, load, KV use.

use std::time::Duration;

use baton_client::{ClusterStatus, KvWay, Node};
use serde_json::{Value, json};

use super::EndpointFlags;
use crate::print;

/// Home, and clear what is below.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Shows the nodes that a router knows, their load and their KV use.
///
/// Example: baton status --watch
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    #[command(flatten)]
    endpoint: EndpointFlags,
    /// Show it again every second until Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// Print one JSON object (with --watch, one on each line).
    #[arg(long)]
    json: bool,
}

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    let client = flags.endpoint.connect()?;
    if !flags.watch {
        let status = client.status().await?;
        return match flags.json {
            true => print::json(&to_json(&status)),
            false => print::piece(&to_table(&status)),
        };
    }
    loop {
        // A router that is away for a while is what one watches for.
        match (client.status().await, flags.json) {
            (Ok(status), true) => print::json(&to_json(&status))?,
            (Err(error), true) => print::json(&json!({ "error": error.to_string() }))?,
            (Ok(status), false) => print::piece(&format!("{CLEAR}{}", to_table(&status)))?,
            (Err(error), false) => print::piece(&format!("{CLEAR}{error}\n"))?,
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            _ = tokio::signal::ctrl_c() => return Ok(()),
        }
    }
}

fn to_json(status: &ClusterStatus) -> Value {
    let way = |way: &KvWay| json!({ "name": way.name, "ready": way.ready, "detail": way.detail });
    let node = |node: &Node| {
        json!({
            "id": node.id, "role": node.role, "address": node.address, "model": node.model,
            "state": node.state, "running": node.running, "waiting": node.waiting,
            "waiting_tokens": node.waiting_tokens, "kv_blocks_used": node.kv_blocks_used,
            "kv_blocks_total": node.kv_blocks_total, "incarnation": node.incarnation,
            "report_age_ms": node.report_age_ms,
            "kv_ways": node.kv_ways.iter().map(way).collect::<Vec<_>>(),
        })
    };
    json!({
        "nodes": status.nodes.iter().map(node).collect::<Vec<_>>(),
        "queued_requests": status.queued_requests,
        "running_requests": status.running_requests,
        "membership_stale": status.membership_stale,
    })
}

fn to_table(status: &ClusterStatus) -> String {
    let mut table = format!(
        "{:<8} {:<12} {:>8} {:>8} {:>8} {:>7}  {:<10} {}\n",
        "ROLE", "STATE", "RUNNING", "WAITING", "KV USED", "SEEN", "KV OVER", "NODE"
    );
    for node in &status.nodes {
        let used = f64::from(node.kv_blocks_used) / f64::from(node.kv_blocks_total.max(1));
        let seen = match node.report_age_ms {
            u64::MAX => "never".into(),
            ms => format!("{:.1}s", ms as f64 / 1e3),
        };
        table.push_str(&format!(
            "{:<8} {:<12} {:>8} {:>8} {:>7.1}% {:>7}  {:<10} {}\n",
            node.role,
            node.state,
            node.running,
            node.waiting,
            used * 100.0,
            seen,
            ways(node),
            node.id
        ));
    }
    for node in &status.nodes {
        for way in node.kv_ways.iter().filter(|way| !way.ready) {
            table.push_str(&format!("{}: no {}: {}\n", node.id, way.name, way.detail));
        }
    }
    let stale = if status.membership_stale { "; membership is STALE" } else { "" };
    table.push_str(&format!(
        "{} requests run, {} wait{stale}\n",
        status.running_requests, status.queued_requests
    ));
    table
}

/// The ways that KV can take to or from a node.
fn ways(node: &Node) -> String {
    let ready = node.kv_ways.iter().filter(|way| way.ready).map(|way| way.name.as_str());
    ready.collect::<Vec<_>>().join(" ")
}
