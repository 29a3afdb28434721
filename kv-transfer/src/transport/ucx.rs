//! Frames over UCX, everything else over gRPC.
//!
//! A sender attaches once to each receiver, over gRPC: it gets a staging region of the receiver's,
//! divided into slots, and a token that names it. From then on frames go into slots by one-sided
//! put, or the receiver fetches them, whichever this version of UCX is fast at; every other message
//! stays on the gRPC stream. The state machines see one stream, whose frames may come out of order,
//! as they always might.
//!
//! UCX is loaded at run time. Where it is missing, or fails, frames travel over gRPC: that is
//! counted and said, and can be forbidden.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use baton_ucx_sys::{LoadError, Ucp, Version};
use bytes::Bytes;
use tokio::sync::{oneshot, watch};

use crate::memory::FrameMemory;
use crate::message::Context;

mod inbound;
mod listener;
pub(crate) mod notice;
mod outbound;
mod progress;
pub mod raw_get;
mod sealed;
mod self_test;
mod sender;
pub(crate) mod slots;
mod ucp;

use inbound::Frames;
use outbound::{GivenBack, LinkState};
use progress::{Commands, Progress};

pub(super) use listener::Attaching;
pub use sender::{Fallback, UcxTransport};

/// Most of [`UcxConfig::spin`], in microseconds: a second.
pub const SPIN_MAX_US: u64 = 1_000_000;

/// How UCX is used on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UcxConfig {
    /// Path of libucp; `None`: where the system has it.
    pub library: Option<String>,
    /// UCX's transports, as `UCX_TLS` names them; `None`: as UCX finds them.
    pub tls: Option<String>,
    /// Network devices, as `UCX_NET_DEVICES` names them; `None`: all.
    pub devices: Option<String>,
    /// How long the progress thread polls after its last event before it sleeps.
    pub spin: Duration,
}

/// How frames go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// The sender writes into the receiver's slot.
    Put,
    /// The receiver reads from the sender's memory.
    Fetch,
}

impl Operation {
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Put => "put",
            Operation::Fetch => "fetch",
        }
    }
}

/// What the self-test chose, and what a worker needs for it.
#[derive(Clone, Debug)]
struct Choice {
    operation: Operation,
    settings: Vec<(&'static str, String)>,
}

/// Whether UCX can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UcxState {
    /// The self-test runs.
    Starting,
    Ready {
        version: String,
        operation: Operation,
    },
    Unavailable {
        reason: String,
    },
}

/// What has happened, over all peers.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes of frames that were sent.
    pub sent_bytes: AtomicU64,
    /// Bytes of frames that came.
    pub received_bytes: AtomicU64,
    /// Frames of a transfer that has ended.
    pub stale: AtomicU64,
    /// Messages that cannot be read, or name a place that is not the peer's.
    pub refused: AtomicU64,
    /// Links that failed while they were in use.
    pub failed_links: AtomicU64,
    /// Workers that were replaced since UCX left operations undone.
    pub retired_workers: AtomicU64,
    /// Staging memory that peers may write to now.
    pub registered_bytes: AtomicU64,
}

/// What a receiver gives to a sender.
#[derive(Clone, Debug)]
struct Attached {
    token: u64,
    rkey: Vec<u8>,
    base: u64,
    slots: u16,
    slot_bytes: u32,
}

/// What the progress thread is asked to do.
#[derive(Debug)]
enum Command {
    Address {
        reply: oneshot::Sender<Result<Vec<u8>, String>>,
    },
    Attach {
        node: String,
        incarnation: u64,
        address: Bytes,
        reply: oneshot::Sender<Result<Attached, String>>,
    },
    Begin {
        token: u64,
        reply: oneshot::Sender<bool>,
    },
    Route {
        token: u64,
        context: Context,
        frames: Frames,
    },
    End {
        token: u64,
        context: Option<Context>,
        committed: bool,
    },
    Release {
        token: u64,
        slot: u16,
    },
    Connect {
        address: Bytes,
        attached: Attached,
        state: Arc<LinkState>,
        reply: oneshot::Sender<Result<(), String>>,
    },
    Send {
        token: u64,
        frame: Bytes,
        stream: GivenBack,
    },
    Stop,
}

/// UCX on this node: one worker with its thread. Clones share it; the thread ends with the last,
/// which waits for it.
#[derive(Clone, Debug)]
pub struct Ucx {
    commands: Commands,
    state: watch::Receiver<UcxState>,
    _stop: Arc<Stop>,
}

/// Says the thread's end even where it panics.
struct Ended(watch::Sender<UcxState>);

impl Drop for Ended {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reason = "its thread has ended by itself: a bug".to_owned();
            self.0.send_replace(UcxState::Unavailable { reason });
        }
    }
}

#[derive(Debug)]
struct Stop {
    commands: Commands,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Stop {
    /// Waits for the thread: UCX's exit handlers must not meet a worker that runs.
    fn drop(&mut self) {
        self.commands.send(Command::Stop);
        let own = std::thread::current().id();
        let others = self.thread.take().filter(|thread| thread.thread().id() != own);
        // A panic has been told by `Ended`.
        let _ended = others.map(JoinHandle::join);
    }
}

impl Ucx {
    /// Loads UCX and tests it, on a thread of its own; see [`state`](Self::state). `memory` is
    /// what frames are sent from.
    ///
    /// # Errors
    /// Where the system gives no thread or no event descriptor.
    pub fn start(config: UcxConfig, memory: &FrameMemory) -> std::io::Result<Self> {
        let (commands, receiver) = Commands::new()?;
        let (sender, state) = watch::channel(UcxState::Starting);
        let memory = memory.mapping();
        let thread_commands = commands.clone();
        let run = move || {
            let ended = Ended(sender);
            let spin = config.spin;
            let prepared = prepare(&config).map_err(|reason| blame(reason, &config));
            let outcome = prepared.and_then(|(ucp, version, choice)| {
                let operation = choice.operation;
                let ends = (thread_commands, receiver);
                let progress = Progress::new(ucp, choice, spin, memory, ends)
                    .map_err(|error| blame(error.to_string(), &config))?;
                ended.0.send_replace(UcxState::Ready { version: version.to_string(), operation });
                progress.run().map_err(|error| error.to_string())
            });
            let reason = match outcome {
                Ok(()) => "this node stops".to_owned(),
                Err(reason) => {
                    tracing::warn!(reason, "UCX is not used");
                    reason
                }
            };
            ended.0.send_replace(UcxState::Unavailable { reason });
        };
        let thread = Some(std::thread::Builder::new().name("ucx".into()).spawn(run)?);
        let stop = Stop { commands: commands.clone(), thread };
        Ok(Self { _stop: Arc::new(stop), commands, state })
    }

    pub fn state(&self) -> UcxState {
        self.state.borrow().clone()
    }

    /// Its version, where it can be used.
    fn version(&self) -> Option<String> {
        match self.state() {
            UcxState::Ready { version, .. } => Some(version),
            UcxState::Starting | UcxState::Unavailable { .. } => None,
        }
    }

    pub fn counters(&self) -> &Counters {
        self.commands.counters()
    }

    /// Waits for the self-test.
    ///
    /// # Errors
    /// Why UCX cannot be used.
    pub async fn ready(&self) -> Result<(), String> {
        let mut state = self.state.clone();
        let settled = state.wait_for(|state| *state != UcxState::Starting).await;
        match settled.as_deref() {
            Ok(UcxState::Ready { .. }) => Ok(()),
            Ok(UcxState::Unavailable { reason }) => Err(reason.clone()),
            Ok(UcxState::Starting) | Err(_) => Err("the UCX thread has ended".to_owned()),
        }
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, String> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply));
        answer.await.map_err(|_| "the UCX thread has ended".to_owned())
    }

    async fn address(&self) -> Result<Vec<u8>, String> {
        self.ask(|reply| Command::Address { reply }).await?
    }
}

/// Names the settings that may be at fault.
fn blame(reason: String, config: &UcxConfig) -> String {
    let given = [("ucx_tls", &config.tls), ("ucx_devices", &config.devices)].into_iter();
    let given = given.filter_map(|(key, value)| Some((key.to_owned(), value.clone()?)));
    // UCX reads them by itself.
    let inherited = ["UCX_TLS", "UCX_NET_DEVICES"].into_iter();
    let inherited = inherited.filter_map(|key| Some((key.to_owned(), std::env::var(key).ok()?)));
    let settings: Vec<_> =
        given.chain(inherited).map(|(key, value)| format!("{key} = {value:?}")).collect();
    match settings.is_empty() {
        true => reason,
        false => format!("{reason} (with {})", settings.join(", ")),
    }
}

fn prepare(config: &UcxConfig) -> Result<(&'static Ucp, Version, Choice), String> {
    let ucp = Ucp::load(config.library.as_deref()).map_err(|error: LoadError| error.to_string())?;
    let version = ucp.version();
    let measured = self_test::run(ucp, config)?;
    let shown = |rate: &Result<f64, String>| match rate {
        Ok(rate) => format!("{:.1} GB/s", rate / 1e9),
        Err(reason) => reason.clone(),
    };
    tracing::info!(
        %version,
        operation = measured.choice.operation.as_str(),
        put = shown(&measured.put),
        fetch = shown(&measured.fetch),
        "UCX is ready"
    );
    Ok((ucp, version, measured.choice))
}
