//! How long the protocol waits for what. All clocks are the local monotonic one, in ms.

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
