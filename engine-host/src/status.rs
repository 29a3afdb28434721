//! Load and block events, gathered from the engine and fanned out to routers and metrics.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_engine::core::EngineStatus;
use baton_engine::thread::StepSpeed;
use baton_kv_cache::BlockEvent;
use baton_types::{BlockHash, ErrorCode};
use tokio::sync::broadcast;

use crate::{EngineHost, EngineMetrics};

/// Between two looks at the engine.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// While the engine does not answer, its last look is told again so often.
const ALIVE_EVERY: Duration = Duration::from_millis(300);

/// Looks that a slow watcher may lie behind before it is sent the whole index again.
const LAG_MAX: usize = 64;

/// One look at the engine.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeLoad {
    pub status: EngineStatus,
    pub speed: StepSpeed,
}

/// What has changed since the look before.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tick {
    pub load: NodeLoad,
    pub reset: bool,
    pub stored: Vec<BlockHash>,
    pub removed: Vec<BlockHash>,
}

/// The latest look, and a feed of those to come. Clones share it.
#[derive(Clone, Debug)]
pub struct StatusFeed(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    held: Mutex<Held>,
    ticks: broadcast::Sender<Arc<Tick>>,
}

#[derive(Debug, Default)]
struct Held {
    load: NodeLoad,
    stored: HashSet<BlockHash>,
}

impl StatusFeed {
    /// Looks at the engine until it stops.
    pub fn start(host: EngineHost, metrics: EngineMetrics) -> Self {
        let feed = Self(Arc::new(Shared {
            held: Mutex::default(),
            ticks: broadcast::Sender::new(LAG_MAX),
        }));
        let publisher = feed.clone();
        tokio::spawn(async move {
            let mut every = tokio::time::interval(LOOK_EVERY);
            every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                every.tick().await;
                let look = host.ask(|thread| {
                    let load = NodeLoad { status: thread.engine.status(), speed: thread.speed };
                    (load, thread.engine.drain_block_events())
                });
                tokio::pin!(look);
                let seen = loop {
                    tokio::select! {
                        seen = &mut look => break seen,
                        // The engine is amid a long step; the node lives all the same.
                        () = tokio::time::sleep(ALIVE_EVERY) => {
                            publisher.publish(publisher.load(), Vec::new());
                        }
                    }
                };
                match seen {
                    Ok((load, events)) => {
                        metrics.observe(&load);
                        publisher.publish(load, events);
                    }
                    Err(error) if error.code == ErrorCode::ResourceExhausted => {}
                    Err(_) => return,
                }
            }
        });
        feed
    }

    /// The latest look.
    pub fn load(&self) -> NodeLoad {
        self.held().load
    }

    /// The whole index as one tick, and the ticks after it.
    pub(crate) fn subscribe(&self) -> (Tick, broadcast::Receiver<Arc<Tick>>) {
        let held = self.held();
        let whole = Tick {
            load: held.load,
            reset: true,
            stored: held.stored.iter().copied().collect(),
            removed: Vec::new(),
        };
        (whole, self.0.ticks.subscribe())
    }

    fn publish(&self, load: NodeLoad, events: Vec<BlockEvent>) {
        let mut held = self.held();
        let mut tick = Tick { load, ..Tick::default() };
        for event in events {
            match event {
                BlockEvent::Reset => {
                    held.stored.clear();
                    tick = Tick { load, reset: true, ..Tick::default() };
                }
                BlockEvent::Stored { hash, .. } => {
                    held.stored.insert(hash);
                    tick.stored.push(hash);
                }
                BlockEvent::Removed { hash } => {
                    held.stored.remove(&hash);
                    // Stored and dropped within one look: no watcher needs to hear of it.
                    match tick.stored.iter().position(|stored| *stored == hash) {
                        Some(at) => drop(tick.stored.swap_remove(at)),
                        None => tick.removed.push(hash),
                    }
                }
            }
        }
        held.load = load;
        // Nobody may be watching.
        let _unheard = self.0.ticks.send(Arc::new(tick));
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
