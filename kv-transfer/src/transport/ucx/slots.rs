//! Whose each slot of a staging region is.

use super::notice::Slot;

/// All slots of one region; the peer's at first.
#[derive(Debug)]
pub(crate) struct Slots {
    /// Those that are being filled by us, or that somebody here reads.
    is_ours: Vec<bool>,
    slot_bytes: u32,
}

impl Slots {
    pub(crate) fn new(slots: u16, slot_bytes: u32) -> Self {
        Self { is_ours: vec![false; usize::from(slots)], slot_bytes }
    }

    /// Whether the peer may say that it has put so many bytes there.
    pub(crate) fn may_fill(&self, Slot { slot, len }: Slot) -> bool {
        (1..=self.slot_bytes).contains(&len) && self.is_ours.get(usize::from(slot)) == Some(&false)
    }

    pub(crate) fn take(&mut self, slot: u16) {
        self.is_ours[usize::from(slot)] = true;
    }

    pub(crate) fn give(&mut self, slot: u16) {
        self.is_ours[usize::from(slot)] = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_the_peers_may_be_filled() {
        let mut slots = Slots::new(2, 100);
        let may = |slots: &Slots, slot, len| slots.may_fill(Slot { slot, len });
        assert!(may(&slots, 0, 1) && may(&slots, 1, 100));
        assert!(!may(&slots, 0, 0) && !may(&slots, 0, 101) && !may(&slots, 2, 1));
        slots.take(1);
        assert!(!may(&slots, 1, 1) && may(&slots, 0, 1));
        slots.give(1);
        assert!(may(&slots, 1, 1));
    }
}
