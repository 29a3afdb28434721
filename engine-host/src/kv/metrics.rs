//! Metrics of transfers, as the receiving end counts them.

use baton_kv_transfer::receive::ReceiverOutcome;
use baton_kv_transfer::receiver::{FrameCounters, Receiver};
use baton_kv_transfer::transport::Carried;
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

#[derive(Clone, Debug)]
pub(super) struct TransferMetrics {
    bytes: IntCounterVec,
    frames: IntCounterVec,
    corrupt: IntCounterVec,
    resends: IntCounter,
    transfers: IntCounterVec,
}

impl TransferMetrics {
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = |name, help, label| -> Result<IntCounterVec, prometheus::Error> {
            let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
            registry.register(Box::new(counters.clone()))?;
            Ok(counters)
        };
        let resends = IntCounter::new(
            "baton_kv_transfer_resends_total",
            "Frames that were asked for again.",
        )?;
        registry.register(Box::new(resends.clone()))?;
        Ok(Self {
            bytes: counters(
                "baton_kv_transfer_received_bytes_total",
                "KV payload taken in, by transport.",
                "transport",
            )?,
            frames: counters(
                "baton_kv_transfer_frames_total",
                "Frames by what became of them: placed, or refused as duplicate, stale, foreign, \
                 outside or corrupt.",
                "result",
            )?,
            corrupt: counters(
                "baton_kv_transfer_corrupt_frames_total",
                "Frames whose checksum did not fit, by the node that sent them.",
                "sender",
            )?,
            resends,
            transfers: counters(
                "baton_kv_transfers_total",
                "Transfers by how they ended: committed, failed or refused.",
                "result",
            )?,
        })
    }

    /// Counts one stream's transfer, whose machine stood at `before` when it began.
    pub fn observe(
        &self,
        before: &FrameCounters,
        receiver: &Receiver,
        carried: &Carried,
        outcome: &ReceiverOutcome,
    ) {
        let now = receiver.counters();
        self.bytes.with_label_values(&["grpc"]).inc_by(carried.grpc_bytes());
        self.bytes.with_label_values(&["ucx"]).inc_by(carried.ucx_bytes());
        if let Some(sender) = receiver.sender() {
            let corrupt = self.corrupt.with_label_values(&[sender.as_str()]);
            corrupt.inc_by(now.corrupt - before.corrupt);
        }
        for (result, now, before) in [
            ("placed", now.frames, before.frames),
            ("duplicate", now.duplicate, before.duplicate),
            ("stale", now.stale, before.stale),
            ("foreign", now.foreign, before.foreign),
            ("outside", now.outside, before.outside),
            ("corrupt", now.corrupt, before.corrupt),
        ] {
            self.frames.with_label_values(&[result]).inc_by(now - before);
        }
        self.resends.inc_by(now.resends - before.resends);
        let result = match outcome {
            ReceiverOutcome::Committed => "committed",
            ReceiverOutcome::Failed(_) => "failed",
            ReceiverOutcome::Refused(_) => "refused",
        };
        self.transfers.with_label_values(&[result]).inc();
    }
}
