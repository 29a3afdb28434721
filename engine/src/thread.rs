//! The owner thread of an engine, and the handle through which others speak to it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::core::Engine;

/// Commands that may wait for the engine's thread.
pub const COMMANDS_MAX: usize = 4_096;

/// How long a reservation's deadline may be overlooked while the engine is idle.
const IDLE_TICK: Duration = Duration::from_millis(100);

/// Prefill chunks are cut so that a step takes about so long at most: between two steps the engine
/// answers, and whoever waits for an answer must not take it for dead.
const STEP_MOST_S: f64 = 0.5;

/// Before the first prefill has been measured.
const UNMEASURED_CHUNK_TOKENS: usize = 64;

type Command = Box<dyn FnOnce(&mut EngineThread) + Send>;

/// The engine cannot take the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    #[error("{COMMANDS_MAX} commands wait for the engine already")]
    Full,
    #[error("the engine has stopped")]
    Stopped,
}

/// How fast recent steps were.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepSpeed {
    /// Over steps that only prefilled; 0 before the first.
    pub prefill_tokens_per_s: f64,
    /// Over steps that only decoded; 0 before the first.
    pub decode_step_ms: f64,
}

/// What the owner thread works on.
#[derive(Debug)]
pub struct EngineThread {
    pub engine: Engine,
    pub speed: StepSpeed,
    stopping: bool,
}

/// Speaks to the engine's thread; clones speak to the same. The thread ends when told to, or
/// when every handle is gone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: SyncSender<Command>,
}

impl EngineHandle {
    /// Moves the engine to a thread of its own.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub fn spawn(mut engine: Engine, name: &str) -> std::io::Result<(Self, JoinHandle<()>)> {
        engine.bound_chunks(UNMEASURED_CHUNK_TOKENS);
        let (commands, receiver) = std::sync::mpsc::sync_channel(COMMANDS_MAX);
        let thread = EngineThread { engine, speed: StepSpeed::default(), stopping: false };
        let joined = std::thread::Builder::new()
            .name(name.to_string())
            .spawn(move || thread.run(&receiver))?;
        Ok((Self { commands }, joined))
    }

    /// Runs a closure on the engine's thread, between two steps. Does not wait for it.
    ///
    /// # Errors
    /// Where the queue is full, or the thread has ended.
    pub fn command(
        &self,
        command: impl FnOnce(&mut EngineThread) + Send + 'static,
    ) -> Result<(), CommandError> {
        self.commands.try_send(Box::new(command)).map_err(|error| match error {
            TrySendError::Full(_) => CommandError::Full,
            TrySendError::Disconnected(_) => CommandError::Stopped,
        })
    }

    /// Ends the thread after the commands before this one.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    pub fn stop(&self) -> Result<(), CommandError> {
        self.command(|thread| thread.stopping = true)
    }
}

impl EngineThread {
    fn run(mut self, commands: &Receiver<Command>) {
        while !self.stopping {
            let idle = !self.engine.has_work();
            if !self.take_commands(commands, idle) {
                return;
            }
            let began = Instant::now();
            let report = self.engine.step(began);
            let seconds = began.elapsed().as_secs_f64();
            match (report.prefill_tokens, report.decode_tokens) {
                (0, 0) if !idle => std::thread::sleep(Duration::from_millis(1)),
                (0, 0) => {}
                (0, _) => smooth(&mut self.speed.decode_step_ms, seconds * 1e3),
                (tokens, 0) => {
                    smooth(&mut self.speed.prefill_tokens_per_s, tokens as f64 / seconds);
                    let most = self.speed.prefill_tokens_per_s * STEP_MOST_S;
                    self.engine.bound_chunks(most as usize);
                }
                _ => {}
            }
        }
    }

    /// Runs what waits; where the engine is idle, waits for something. False when nobody can
    /// send any more.
    fn take_commands(&mut self, commands: &Receiver<Command>, idle: bool) -> bool {
        if idle {
            match commands.recv_timeout(IDLE_TICK) {
                Ok(command) => command(self),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => command(self),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }
}

fn smooth(average: &mut f64, sample: f64) {
    *average = if *average == 0.0 { sample } else { 0.8 * *average + 0.2 * sample };
}
