//! `baton bench transfer`: how fast KV travels between two processes of this machine.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use baton_kv_transfer::bench::{self, Level, Plan, Window};
use baton_kv_transfer::frame::WireLayout;
use baton_kv_transfer::memory::FrameMemory;
use baton_kv_transfer::transport::Transport;
use baton_kv_transfer::transport::grpc::GrpcTransport;
use baton_kv_transfer::transport::ucx::{
    Fallback, SPIN_MAX_US, Ucx, UcxConfig, UcxState, UcxTransport,
};
use baton_runtime::logs;
use baton_runtime::own_runtime::OwnRuntime;
use baton_types::{Incarnation, KvDtype, NodeId};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::Child;

use crate::print;

mod get;

/// What is sent before the clock runs, at most: connections are made and memory is touched.
const WARM_BYTES: u64 = 512 << 20;
const FRAME_ROOM: usize = 4096;

/// GB per second, and CPU seconds per GB, of KV between a sender and a receiver that this command
/// starts beside it. GB are 10^9 bytes.
///
/// Example: baton bench transfer --way grpc --level wire --message 1048576 --streams 1
/// Example: baton bench transfer --way ucx --level handoff --shape llama70b --ucx-tls tcp --json
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Flags {
    /// tcp is plain framed TCP, the baseline.
    #[arg(long, value_enum, default_value_t = Way::Grpc)]
    way: Way,
    /// wire: frames as they are. checked: with checksums. placed: copied to their destination too.
    /// handoff: the whole protocol, of prompts of --shape.
    #[arg(long, value_name = "LEVEL", default_value = "wire", value_parser = level)]
    level: Level,
    /// Payload bytes of a message.
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    message: u64,
    /// Streams at once.
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=64))]
    streams: u16,
    /// Bytes in all; rounded up to whole messages, or prompts, of each stream.
    #[arg(long, value_name = "BYTES", default_value_t = 4_000_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    total: u64,
    /// Whose KV, for handoffs.
    #[arg(long, value_enum, default_value_t = Shape::Smollm2)]
    shape: Shape,
    /// Path of libucp; without it, where the system has it.
    #[arg(long, value_name = "FILE")]
    ucx_library: Option<String>,
    /// As UCX_TLS.
    #[arg(long, value_name = "LIST")]
    ucx_tls: Option<String>,
    /// How long UCX's thread polls after its last event before it sleeps.
    #[arg(long, value_name = "MICROS", default_value_t = 20)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=SPIN_MAX_US))]
    ucx_spin_us: u64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Be the receiver: what this command starts by itself.
    #[arg(long, hide = true)]
    serve: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Way {
    Tcp,
    Grpc,
    Ucx,
    /// One-sided gets by the receiver, without a protocol: what UCX itself can do.
    UcxGet,
}

impl Way {
    fn as_str(self) -> &'static str {
        match self {
            Way::Tcp => "tcp",
            Way::Grpc => "grpc",
            Way::Ucx => "ucx",
            Way::UcxGet => "ucx-get",
        }
    }
}

/// A model's KV: prompts of 512 tokens.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Shape {
    /// 30 layers, 12 KiB for 16 tokens.
    Smollm2,
    /// 80 layers, 64 KiB for 16 tokens.
    Llama70b,
}

impl Shape {
    fn layout(self) -> WireLayout {
        let (layers, kv_heads, head_dim) = match self {
            Shape::Smollm2 => (30, 3, 64),
            Shape::Llama70b => (80, 8, 128),
        };
        WireLayout { layers, kv_heads, head_dim, dtype: KvDtype::Bf16 }
    }
}

fn level(text: &str) -> Result<Level, String> {
    let known = Level::ALL.iter().find(|level| level.as_str() == text).copied();
    known.ok_or_else(|| "one of wire, checked, placed and handoff is wanted".into())
}

pub async fn run(flags: Flags) -> anyhow::Result<()> {
    logs::init_at("warn");
    let has_level = match flags.way {
        Way::Tcp => matches!(flags.level, Level::Wire | Level::Checked),
        Way::UcxGet => flags.level == Level::Wire,
        Way::Grpc | Way::Ucx => true,
    };
    if !has_level {
        anyhow::bail!("--level {}: {} has no such level", flags.level.as_str(), flags.way.as_str());
    }
    if flags.way == Way::UcxGet {
        return shown(&flags, &get::run(&flags).await?);
    }
    let own = OwnRuntime::start("kv").context("no thread for transfers")?;
    if flags.serve {
        return serve(&flags, &own).await;
    }
    shown(&flags, &measure(&flags, &own).await?)
}

fn shown(flags: &Flags, report: &Value) -> anyhow::Result<()> {
    if flags.json {
        return print::json(report);
    }
    let figure = |key: &str| report[key].as_f64().unwrap_or_default();
    print::line(&format!(
        "{:.2} GB/s, CPU {:.3} s/GB at the sender and {:.3} at the receiver",
        figure("gb_per_s"),
        figure("cpu_sender_s_per_gb"),
        figure("cpu_receiver_s_per_gb"),
    ))
}

impl Flags {
    fn plan(&self, total_bytes: u64) -> Plan {
        Plan {
            level: self.level,
            message_bytes: self.message as usize,
            streams: usize::from(self.streams),
            total_bytes,
            layout: self.shape.layout(),
            tokens: 512,
        }
    }

    /// More than the caches hold, so that each frame is read from and written to DRAM.
    fn memory(&self) -> anyhow::Result<FrameMemory> {
        let frame_bytes = (self.message as usize).min(1 << 20) + FRAME_ROOM;
        let pieces = (bench::ARENA_BYTES / frame_bytes).max(usize::from(self.streams));
        Ok(FrameMemory::new(pieces, frame_bytes)?)
    }

    fn ucx_config(&self) -> UcxConfig {
        UcxConfig {
            library: self.ucx_library.clone(),
            tls: self.ucx_tls.clone(),
            devices: None,
            spin: Duration::from_micros(self.ucx_spin_us),
        }
    }

    /// UCX, where it is the way.
    async fn ucx(&self, memory: &FrameMemory) -> anyhow::Result<Option<Ucx>> {
        if self.way != Way::Ucx {
            return Ok(None);
        }
        let ucx = Ucx::start(self.ucx_config(), memory)?;
        ucx.ready().await.map_err(|why| anyhow::anyhow!("UCX cannot be used: {why}"))?;
        Ok(Some(ucx))
    }
}

/// The receiver: says where it listens, and ends with its standard input.
async fn serve(flags: &Flags, own: &OwnRuntime) -> anyhow::Result<()> {
    let ucx = flags.ucx(&FrameMemory::heap()).await?;
    let memory = flags.memory()?;
    let is_framed = flags.way == Way::Tcp;
    let places = matches!(flags.level, Level::Placed | Level::Handoff);
    let arenas = if places { usize::from(flags.streams) } else { 0 };
    let (said, address) = tokio::sync::oneshot::channel();
    let serving = own.handle().spawn(async move {
        let listening = TcpListener::bind("127.0.0.1:0").await?;
        // Who waits for it is this function.
        let _unheard = said.send(listening.local_addr()?);
        match is_framed {
            true => bench::serve_framed(listening).await,
            false => bench::serve(listening, memory, ucx, arenas).await,
        }
    });
    print::line(&address.await?.to_string())?;
    let (mut input, mut byte) = (tokio::io::stdin(), [0]);
    tokio::select! {
        served = serving => served??,
        _ = input.read(&mut byte) => {}
    }
    Ok(())
}

async fn measure(flags: &Flags, own: &OwnRuntime) -> anyhow::Result<Value> {
    let Other { pid, said: address, process: _process } = start_other().await?;
    let memory = flags.memory()?;
    let ucx = flags.ucx(&memory).await?;
    let meter = move || anyhow::Ok((own_cpu(), cpu_of(pid)?));
    let send =
        |total| send(own, flags.way, address.clone(), flags.plan(total), &memory, &ucx, meter);
    send(flags.total.min(WARM_BYTES)).await?;
    let Window { took, before, after, bytes } = send(flags.total).await?;
    let (before, after) = (before?, after?);
    let spent = (after.0 - before.0, after.1 - before.1);
    let version = ucx.map(|ucx| match ucx.state() {
        UcxState::Ready { version, operation } => {
            json!({"version": version, "operation": operation.as_str()})
        }
        _ => Value::Null,
    });
    Ok(report(flags, bytes, took.as_secs_f64(), spent, version.into()))
}

/// CPU seconds of sender and receiver, whichever of the two processes they were.
fn report(
    flags: &Flags,
    bytes: u64,
    seconds: f64,
    (sender, receiver): (f64, f64),
    ucx: Value,
) -> Value {
    let gb = bytes as f64 / 1e9;
    json!({
        "way": flags.way.as_str(), "level": flags.level.as_str(),
        "message": flags.message, "streams": flags.streams, "bytes": bytes,
        "seconds": seconds, "gb_per_s": gb / seconds, "cpu_sender_s_per_gb": sender / gb,
        "cpu_receiver_s_per_gb": receiver / gb, "ucx": ucx,
    })
}

/// The process at the other end.
struct Other {
    pid: u32,
    /// Its first line: where it is.
    said: String,
    /// Dropped, it is killed.
    process: Child,
}

async fn start_other() -> anyhow::Result<Other> {
    let mut process = tokio::process::Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("the other end does not start")?;
    let pid = process.id().context("the other end has ended")?;
    let output = process.stdout.take().context("the other end has no output")?;
    let mut lines = BufReader::new(output).lines();
    // UCX may warn on the same output: `[time] [host:process] …`.
    let said = loop {
        match lines.next_line().await? {
            Some(line) if line.starts_with('[') => tracing::warn!("{line}"),
            line => break line.unwrap_or_default(),
        }
    };
    anyhow::ensure!(!said.is_empty(), "the other end has ended; its reason stands above");
    Ok(Other { pid, said, process })
}

async fn send<T: Send + 'static>(
    own: &OwnRuntime,
    way: Way,
    address: String,
    plan: Plan,
    memory: &FrameMemory,
    ucx: &Option<Ucx>,
    meter: impl Fn() -> T + Send + 'static,
) -> anyhow::Result<Window<T>> {
    if way == Way::Tcp {
        let sending = async move { bench::send_framed(&address, plan, meter).await };
        return Ok(own.handle().spawn(sending).await??);
    }
    let (memory, ucx, peer) = (memory.clone(), ucx.clone(), format!("http://{address}"));
    let sending = own.handle().spawn(async move {
        let grpc = GrpcTransport::new();
        let transport: Arc<dyn Transport> = match ucx {
            None => Arc::new(grpc),
            Some(ucx) => {
                let (node, incarnation) = (NodeId::new("bench"), Incarnation(1));
                let fallback = Fallback::Forbidden;
                Arc::new(UcxTransport::new(grpc, ucx, node, incarnation, fallback))
            }
        };
        bench::send(transport, &peer, plan, memory, meter).await
    });
    Ok(sending.await??)
}

/// CPU seconds of this process.
fn own_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// CPU seconds of a process and what it runs; in hundredths.
fn cpu_of(pid: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .context("the other end has ended; its reason stands above")?;
    // User and system time are the 14th and 15th field; the second, in parentheses, may hold
    // blanks.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
