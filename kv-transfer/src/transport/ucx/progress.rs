//! The one thread of a worker: it takes commands, lets UCX get on, and sleeps on the worker's
//! event descriptor in between.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use baton_ucx_sys::Ucp;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::inbound::Inbound;
use super::notice;
use super::outbound::Outbound;
use super::ucp::{Event, Payload, UcpError, Worker};
use super::{Choice, Command, Counters};
use crate::memory::Mapping;

/// Between two looks at what has waited too long, while anything is there to wait.
const TICK: Duration = Duration::from_millis(100);
/// An operation that outlives its endpoint so long never ends: its worker is given up.
const ORPHAN: Duration = Duration::from_secs(5);

/// The way to the thread; clones share it.
#[derive(Clone, Debug)]
pub(super) struct Commands {
    sender: Sender<Command>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    is_asleep: AtomicBool,
    counters: Counters,
}

impl Commands {
    pub(super) fn new() -> std::io::Result<(Self, Receiver<Command>)> {
        let (sender, receiver) = channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let is_asleep = AtomicBool::new(false);
        let shared = Arc::new(Shared { wake, is_asleep, counters: Counters::default() });
        Ok((Self { sender, shared }, receiver))
    }

    /// Whether the thread is there to take it.
    pub(super) fn send(&self, command: Command) -> bool {
        let is_taken = self.sender.send(command).is_ok();
        if self.shared.is_asleep.swap(false, Ordering::SeqCst) {
            // It fails only where the counter is full, and then the thread is woken anyway.
            let _full = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        }
        is_taken
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }
}

/// Runs until the handle is dropped.
pub(super) struct Progress {
    ucp: &'static Ucp,
    choice: Choice,
    spin: Duration,
    memory: Option<Arc<Mapping>>,
    worker: Worker,
    inbound: Inbound,
    outbound: Outbound,
    commands: Commands,
    receiver: Receiver<Command>,
    next_tick: Instant,
}

impl Progress {
    pub(super) fn new(
        ucp: &'static Ucp,
        choice: Choice,
        spin: Duration,
        memory: Option<Arc<Mapping>>,
        (commands, receiver): (Commands, Receiver<Command>),
    ) -> Result<Self, UcpError> {
        let worker = new_worker(ucp, &choice, memory.as_ref())?;
        let outbound = Outbound::new(choice.operation);
        let (inbound, next_tick) = (Inbound::default(), Instant::now());
        Ok(Self {
            ucp,
            choice,
            spin,
            memory,
            worker,
            inbound,
            outbound,
            commands,
            receiver,
            next_tick,
        })
    }

    /// # Errors
    /// Where UCX fails as a whole.
    pub(super) fn run(mut self) -> Result<(), UcpError> {
        let mut active = Instant::now();
        loop {
            let mut was_active = self.worker.progress();
            // Before its events: a command may say where a message goes that has just come.
            if !self.obey() {
                self.end("this node stops");
                return Ok(());
            }
            was_active |= self.take_events();
            self.inbound.send_releases(&mut self.worker);
            self.outbound.pump(&mut self.worker, self.commands.counters());
            self.tick()?;
            let now = Instant::now();
            if was_active {
                active = now;
            } else if now - active >= self.spin {
                self.sleep()?;
            } else {
                // Where processors are few, who fills or empties frames goes first.
                std::thread::yield_now();
            }
        }
    }

    /// Whether to go on.
    fn obey(&mut self) -> bool {
        loop {
            match self.receiver.try_recv() {
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Ok(command) => self.command(command),
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn command(&mut self, command: Command) {
        let counters = self.commands.counters();
        match command {
            Command::Address { reply } => {
                // Who asked may have gone.
                let _gone = reply.send(self.worker.address().map_err(|error| error.to_string()));
            }
            Command::Attach { node, incarnation, address, reply } => {
                let worker = &mut self.worker;
                let attached = self.inbound.attach(worker, node, incarnation, &address, counters);
                let _gone = reply.send(attached);
            }
            Command::Connect { address, attached, state, reply } => {
                let connected = self.outbound.connect(&mut self.worker, &address, &attached, state);
                let _gone = reply.send(connected.map_err(|error| error.to_string()));
            }
            Command::Begin { token, reply } => {
                let _gone = reply.send(self.inbound.begin(token));
            }
            Command::Route { token, context, frames } => self.inbound.route(token, context, frames),
            Command::End { token, context, committed } => {
                self.inbound.end(token, context, committed);
            }
            Command::Send { token, frame, stream } => self.outbound.send(token, frame, stream),
            Command::Release { token, slot } => self.inbound.release(token, slot),
            Command::Stop => {}
        }
    }

    fn take_events(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.worker.next_event() {
            any = true;
            self.event(event);
        }
        any
    }

    fn event(&mut self, event: Event) {
        let (worker, commands) = (&mut self.worker, &self.commands);
        let counters = commands.counters();
        match event {
            Event::Done { op, result } => {
                // What is neither's is a release or the end of an endpoint; where one fails, the
                // peer has gone, and that is told apart.
                let _known = self.outbound.on_done(worker, op, &result, counters)
                    || self.inbound.on_done(op, &result, commands);
            }
            Event::PeerLost { endpoint, reason } => {
                let _known = self.outbound.on_peer_lost(worker, endpoint, &reason, counters)
                    || self.inbound.on_peer_lost(worker, endpoint, &reason, counters);
            }
            Event::Message { id, header, payload } => {
                let Ok((token, slots)) = notice::decode(header) else {
                    counters.refused.fetch_add(1, Ordering::Relaxed);
                    if let Payload::Waits(waiting) = payload {
                        worker.refuse(waiting);
                    }
                    return;
                };
                match (id, payload) {
                    (notice::FETCH, payload) => {
                        self.inbound.on_fetch(worker, (token, slots), payload, commands);
                    }
                    (_, Payload::Waits(waiting)) => {
                        counters.refused.fetch_add(1, Ordering::Relaxed);
                        worker.refuse(waiting);
                    }
                    (notice::PUT, _) => self.inbound.on_put(worker, (token, slots), commands),
                    (notice::RELEASE, _) => self.outbound.on_release((token, slots)),
                    (_, _) => {
                        let _known = self.outbound.on_detach(token)
                            || self.inbound.on_detached(worker, token, counters);
                    }
                }
            }
        }
    }

    fn tick(&mut self) -> Result<(), UcpError> {
        let now = Instant::now();
        if now < self.next_tick {
            return Ok(());
        }
        self.next_tick = now + TICK;
        let counters = self.commands.counters();
        self.outbound.tick(&mut self.worker, counters);
        self.inbound.tick(&mut self.worker, counters);
        if self.worker.oldest_orphan().is_some_and(|since| now - since >= ORPHAN) {
            self.retire()?;
        }
        Ok(())
    }

    /// UCX has forgotten operations: another worker takes over, and their buffers are free when
    /// this one is gone.
    fn retire(&mut self) -> Result<(), UcpError> {
        tracing::warn!("UCX left operations of a closed endpoint undone; its worker is replaced");
        self.end("its worker is replaced");
        self.commands.counters().retired_workers.fetch_add(1, Ordering::Relaxed);
        self.worker = new_worker(self.ucp, &self.choice, self.memory.as_ref())?;
        Ok(())
    }

    fn end(&mut self, reason: &str) {
        let counters = self.commands.counters();
        self.outbound.clear(&mut self.worker, reason, counters);
        self.inbound.clear(&mut self.worker, counters);
    }

    /// Until UCX or a command has something to do.
    fn sleep(&mut self) -> Result<(), UcpError> {
        let shared = self.commands.shared.clone();
        shared.is_asleep.store(true, Ordering::SeqCst);
        match self.receiver.recv_timeout(Duration::ZERO) {
            Ok(Command::Stop) => {
                // Asked again at the top.
                self.commands.send(Command::Stop);
            }
            Ok(command) => self.command(command),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                if self.worker.arm()? {
                    self.poll(&shared)?;
                }
            }
        }
        shared.is_asleep.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn poll(&self, shared: &Shared) -> Result<(), UcpError> {
        let has_work = !self.inbound.is_idle() || !self.outbound.is_idle();
        let most = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        let events = self.worker.event_fd();
        let mut fds = [
            PollFd::new(&events, PollFlags::IN),
            PollFd::from_borrowed_fd(shared.wake.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, has_work.then_some(&most)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(UcpError { call: "poll", reason: error.to_string() }),
        }
        if !fds[1].revents().is_empty() {
            // Nothing there means that another wake-up has taken it.
            let _empty = rustix::io::read(&shared.wake, &mut [0; 8]);
        }
        Ok(())
    }
}

fn new_worker(
    ucp: &'static Ucp,
    choice: &Choice,
    memory: Option<&Arc<Mapping>>,
) -> Result<Worker, UcpError> {
    let mut worker = Worker::new(ucp, &choice.settings, notice::MESSAGE_IDS)?;
    if let Some(memory) = memory {
        worker.register(memory.clone())?;
    }
    Ok(worker)
}
