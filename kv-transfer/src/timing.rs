//! How long the protocol waits for what. All clocks are the local monotonic one, in ms.

/// A driver that is woken so much later than it asked for has not had a processor.
const LATE_MS: u64 = 5;
/// What it is given besides, to hear what has come meanwhile.
const TO_HEAR_MS: u64 = 100;

/// How much of its peer's silence a driver has to answer for itself, where it asked to be woken at
/// `due_ms`. Whoever brings it the peer's messages had to wait as well.
pub(crate) fn own_silence_ms(due_ms: u64, now_ms: u64) -> u64 {
    match now_ms.saturating_sub(due_ms) {
        0..=LATE_MS => 0,
        late_ms => late_ms + TO_HEAR_MS,
    }
}

/// Intervals and limits of a transfer; both ends should use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Between two heartbeats of the sender.
    pub heartbeat_ms: u64,
    /// Silence after which a peer counts as gone.
    pub peer_silent_ms: u64,
    /// How long an end that gave up waits for the other's acknowledgement before it closes.
    pub abort_linger_ms: u64,
    /// After a commit and this much silence the receiver asks for frames that are missing.
    pub gap_grace_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self { heartbeat_ms: 333, peer_silent_ms: 1000, abort_linger_ms: 500, gap_grace_ms: 150 }
    }
}
