//! What has arrived under one epoch, and what of it is missing.

use std::collections::BTreeSet;

use super::{Link, RESENDS_MAX, ReceiverAction};
use crate::TransferError;
use crate::coverage::{Coverage, Place};
use crate::digest::FrameDigest;
use crate::frame::{Frame, FrameKey};
use crate::grant::Grant;
use crate::message::{Body, Commit, Credit};

/// What has arrived under one epoch.
#[derive(Debug)]
pub(super) struct Arrived {
    coverage: Coverage,
    digest: FrameDigest,
    accepted_bytes: u64,
    last_frame_ms: u64,
    resends: BTreeSet<FrameKey>,
    has_asked_for_gaps: bool,
    pub(super) commit: Option<Box<Commit>>,
}

impl Arrived {
    pub(super) fn new(grant: &Grant, now_ms: u64) -> Self {
        Self {
            coverage: Coverage::new(
                &grant.layout,
                grant.cached_tokens..grant.tokens,
                grant.unseen.clone(),
            ),
            digest: FrameDigest::default(),
            accepted_bytes: 0,
            last_frame_ms: now_ms,
            resends: BTreeSet::new(),
            has_asked_for_gaps: false,
            commit: None,
        }
    }

    /// Checks one frame, headers first, and orders it to be placed.
    ///
    /// # Errors
    /// Where the transfer cannot go on.
    pub(super) fn take(
        &mut self,
        frame: Frame,
        now_ms: u64,
        link: &mut Link,
    ) -> Result<(), TransferError> {
        let (header, key) = (*frame.header(), frame.key());
        let layout = &link.grant.layout;
        let bytes = u64::from(header.payload_len);
        let has_shape = header.dtype == layout.dtype && bytes == key.payload_bytes(layout) as u64;
        match self.coverage.place_of(&key) {
            Place::Whole if has_shape => link.counters.duplicate += 1,
            Place::New if has_shape && !frame.is_intact() => {
                link.counters.corrupt += 1;
                return self.ask_again(key, link);
            }
            Place::New if has_shape => {
                self.accepted_bytes += bytes;
                if self.accepted_bytes > link.granted_bytes {
                    let bytes = self.accepted_bytes - link.granted_bytes;
                    return Err(TransferError::CreditExceeded { bytes });
                }
                self.last_frame_ms = now_ms;
                self.coverage.mark(&key);
                self.digest.add(&header);
                link.counters.frames += 1;
                link.counters.bytes += bytes;
                link.placing.insert(key);
                link.actions.push_back(ReceiverAction::Place(frame));
            }
            _ => link.counters.outside += 1,
        }
        Ok(())
    }

    fn ask_again(&mut self, key: FrameKey, link: &mut Link) -> Result<(), TransferError> {
        if self.resends.len() >= RESENDS_MAX || !self.resends.insert(key) {
            return Err(TransferError::Corrupt(key));
        }
        link.counters.resends += 1;
        link.send(Body::Resend(key));
        Ok(())
    }

    /// Whether the commit is there, everything it speaks of is in place, and both agree.
    ///
    /// # Errors
    /// `Digest` and `FirstTokens` where they do not.
    pub(super) fn is_ready(&self, link: &Link) -> Result<bool, TransferError> {
        let Some(commit) = &self.commit else { return Ok(false) };
        if !self.coverage.is_complete() || !link.placing.is_empty() {
            return Ok(false);
        }
        let (frames, committed) = (self.digest.frames(), commit.frame_count);
        if frames != committed || self.digest.to_bytes() != commit.digest {
            return Err(TransferError::Digest { frames, committed });
        }
        let (firsts, choices) = (&commit.info.first_tokens, link.grant.choices);
        let fits = firsts.len() == usize::from(choices)
            && (0..choices)
                .zip(firsts)
                .all(|(choice, token)| token.choice == choice && token.index == 0);
        if fits { Ok(true) } else { Err(TransferError::FirstTokens { got: firsts.len(), choices }) }
    }

    /// Some frames seem to be lost: once, the ranges that are missing are asked for.
    pub(super) fn ask_for_gaps(&mut self, link: &mut Link) {
        self.has_asked_for_gaps = true;
        for gap in self.coverage.gaps(RESENDS_MAX) {
            link.counters.resends += 1;
            link.send(Body::Resend(gap));
        }
    }

    pub(super) fn gaps_due_ms(&self, link: &Link) -> u64 {
        let waits = self.commit.is_some()
            && !self.has_asked_for_gaps
            && link.placing.is_empty()
            && !self.coverage.is_complete();
        let grace_ms = link.config.timing.gap_grace_ms;
        if waits { self.last_frame_ms + grace_ms } else { u64::MAX }
    }

    pub(super) fn placed(&self, placed: FrameKey, link: &mut Link) {
        let granted_bytes = link.granted_bytes;
        link.send(Body::Credit(Credit { granted_bytes, placed }));
    }
}
