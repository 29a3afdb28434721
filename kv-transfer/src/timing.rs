//! How long the protocol waits for what. All clocks are the local monotonic one, in ms.

/// A driver that is woken so much later than it asked for has not had a processor.
const LATE_MS: u64 = 5;
/// What it is given besides before it judges a silence, once for each: whoever brings it the peer's
/// messages had to wait as well.
const TO_HEAR_MS: u64 = 100;

/// When the peer was heard last, less the silence that was this end's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heard {
    pub(crate) at_ms: u64,
    has_listened: bool,
}

impl Heard {
    pub(crate) fn now(now_ms: u64) -> Self {
        Self { at_ms: now_ms, has_listened: false }
    }

    /// A driver that asked to be woken at `due_ms` is woken now.
    pub(crate) fn woken(&mut self, due_ms: u64, now_ms: u64, peer_silent_ms: u64) {
        let late_ms = now_ms.saturating_sub(due_ms);
        if late_ms <= LATE_MS {
            return;
        }
        self.at_ms = now_ms.min(self.at_ms + late_ms);
        if now_ms >= self.at_ms + peer_silent_ms && !self.has_listened {
            self.has_listened = true;
            self.at_ms = now_ms.min(self.at_ms + TO_HEAR_MS);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that is dead is found however late each look at it is.
    #[test]
    fn lateness_is_excused_and_death_is_found() {
        for late_ms in [0, 5, 6, 50, 200, 5_000] {
            let (mut heard, mut now_ms, mut woken) = (Heard::now(0), 0, 0);
            while now_ms < heard.at_ms + 1_000 {
                let due_ms = (heard.at_ms + 1_000).min(now_ms + 333);
                now_ms = due_ms + late_ms;
                heard.woken(due_ms, now_ms, 1_000);
                woken += 1;
            }
            assert!(woken <= 6, "{late_ms} ms late: {woken} looks, {now_ms} ms");
            assert!(now_ms >= 1_000);
        }
    }
}
