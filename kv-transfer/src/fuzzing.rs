//! Both receivers, driven by bytes of a peer that may be anything: what the fuzz targets call.
//!
//! A receiver has accepted an `Open`; what comes then is the input. Whatever it is: no panic, no
//! frame outside the grant, none twice, and memory for no more than came.

use std::collections::BTreeSet;
use std::sync::Arc;

use baton_types::{
    Epoch, Incarnation, KvDtype, ModelFingerprint, NodeId, NumericsVersion, RequestId, TransferId,
};
use bytes::Bytes;
use futures::StreamExt;
use futures::executor::block_on;
use http_body::Frame as BodyFrame;
use http_body_util::StreamBody;

use crate::checksum::{crc32c, crc32c_of};
use crate::frame::{HEADER_BYTES, TAG_FRAME, WireLayout};
use crate::grant::{Grant, GrantMinter};
use crate::memory::FrameMemory;
use crate::message::{Body, CHECKSUM_CRC32C, Context, KvMessage, Open, VERSION_MAX, VERSION_MIN};
use crate::receiver::{Receiver, ReceiverAction, ReceiverConfig};
use crate::transport::grpc::body::Messages;
use crate::transport::ucx::notice::{self, Slot};
use crate::transport::ucx::slots::Slots;

#[cfg(test)]
mod tests;

/// Small, so that inputs are: 2 layers, 2 heads of 4 dimensions, 8 tokens.
pub const LAYOUT: WireLayout =
    WireLayout { layers: 2, kv_heads: 2, head_dim: 4, dtype: KvDtype::Int8 };
pub const TOKENS: u32 = 8;
/// Whose messages are the transfer's own.
pub const CONTEXT: Context = Context { transfer_id: TransferId([7; 16]), epoch: Epoch(1) };

const SLOTS: u16 = 4;
const SLOT_BYTES: u32 = 512;
const DEADLINE_MS: u64 = 60_000;

/// What comes over gRPC. The first byte says how: even, the rest is the call's body, cut into
/// pieces; odd, it is messages behind their lengths (u16, little-endian), whose checksums are made
/// to fit, so that what lies behind the checksum is reached as well.
pub fn grpc(input: &[u8]) {
    let Some((&how, rest)) = input.split_first() else { return };
    let mut machine = Machine::open();
    if how % 2 == 1 {
        for message in messages(rest) {
            machine.take(KvMessage::decode(mend(message).into()).ok());
        }
        return machine.end();
    }
    let pieces = rest.chunks(usize::from(how / 2) + 1).map(Bytes::copy_from_slice);
    let frames = pieces.map(|piece| Ok::<_, std::convert::Infallible>(BodyFrame::data(piece)));
    let body = StreamBody::new(futures::stream::iter(frames));
    let mut read = Messages::new(body, FrameMemory::heap());
    while let Some(message) = block_on(read.next()) {
        machine.take(message.ok());
    }
    machine.end();
}

/// What comes over UCX: messages behind their lengths, each a notice of one byte for its length,
/// the notice, and what the peer has put into the slots that it names.
pub fn ucx(input: &[u8]) {
    let mut machine = Machine::open();
    let mut slots = Slots::new(SLOTS, SLOT_BYTES);
    let mut memory = vec![0; usize::from(SLOTS) * SLOT_BYTES as usize];
    for message in messages(input) {
        let Some((&len, rest)) = message.split_first() else { continue };
        let (header, put) = rest.split_at(usize::from(len).min(rest.len()));
        let Ok((_, named)) = notice::decode(header.to_vec()) else { continue };
        for slot in named {
            if !slots.may_fill(slot) {
                // The attachment ends.
                return machine.end();
            }
            slots.take(slot.slot);
            let Slot { slot, len } = slot;
            let at = usize::from(slot) * SLOT_BYTES as usize;
            let place = &mut memory[at..at + len as usize];
            let filled = put.len().min(place.len());
            place[..filled].copy_from_slice(&put[..filled]);
            let frame = KvMessage::decode(mend(place).into());
            machine.take(frame.ok().filter(|frame| matches!(frame.body, Body::Frame(_))));
            slots.give(slot);
        }
    }
    machine.end();
}

/// Pieces behind their lengths; the last may be shorter.
fn messages(mut input: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (len, rest) = input.split_at_checked(2)?;
        let len = usize::from(u16::from_le_bytes([len[0], len[1]]));
        let (message, rest) = rest.split_at(len.min(rest.len()));
        input = rest;
        Some(message)
    })
}

/// The message with a checksum that fits.
fn mend(message: &[u8]) -> Vec<u8> {
    let mut message = message.to_vec();
    if message.first() == Some(&TAG_FRAME) && message.len() > HEADER_BYTES {
        let crc_at = 1 + HEADER_BYTES - 4;
        let crc = crc32c_of(&[&message[1..crc_at], &[0; 4], &message[crc_at + 4..]]);
        message[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
    } else if let Some(crc_at) = message.len().checked_sub(4) {
        let crc = crc32c(&message[..crc_at]);
        message[crc_at..].copy_from_slice(&crc.to_le_bytes());
    }
    message
}

/// A receiver with its caller.
struct Machine {
    receiver: Receiver,
    now_ms: u64,
    placed: BTreeSet<(u16, u16, u32)>,
    is_closed: bool,
}

impl Machine {
    fn open() -> Self {
        let grant = grant();
        let minter = Arc::new(GrantMinter::new([1; 32]));
        let config = ReceiverConfig::default();
        let (receiver, bytes) = Receiver::grant(config, minter, grant, 0, DEADLINE_MS);
        let mut machine = Self { receiver, now_ms: 0, placed: BTreeSet::new(), is_closed: false };
        let open = Open {
            grant: bytes,
            sender: NodeId::new("p"),
            sender_incarnation: Incarnation(2),
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            features: u32::MAX,
            checksum: CHECKSUM_CRC32C,
            layout: LAYOUT,
            fingerprint: ModelFingerprint([3; 32]),
            numerics: NumericsVersion("n".into()),
        };
        machine.take(Some(KvMessage { context: CONTEXT, body: Body::Open(Box::new(open)) }));
        assert!(!machine.receiver.is_granted(), "an honest sender is let in");
        machine
    }

    /// `None`: it could not be read.
    fn take(&mut self, message: Option<KvMessage>) {
        if self.is_closed {
            return;
        }
        self.now_ms += 1;
        match message {
            Some(message) => self.receiver.on_message(message, self.now_ms),
            None => self.receiver.on_undecodable(),
        }
        self.obey();
    }

    fn obey(&mut self) {
        while let Some(action) = self.receiver.next_action() {
            match action {
                ReceiverAction::Place(frame) => {
                    let key = frame.key();
                    assert_eq!(frame.payload().len(), key.payload_bytes(&LAYOUT));
                    for head in key.head_first..key.head_first + key.head_count {
                        for token in key.token_first..key.token_first + key.token_count {
                            assert!(key.layer < LAYOUT.layers && head < LAYOUT.kv_heads);
                            assert!(token < TOKENS, "outside the grant: {key}");
                            assert!(self.placed.insert((key.layer, head, token)), "twice: {key}");
                        }
                    }
                    self.receiver.placed(key, Ok(()), self.now_ms);
                }
                ReceiverAction::Activate(_) => {
                    let all = usize::from(LAYOUT.layers * LAYOUT.kv_heads) * TOKENS as usize;
                    assert_eq!(self.placed.len(), all, "decoding starts with everything there");
                    self.receiver.activated(Ok(()), self.now_ms);
                }
                ReceiverAction::Close => {
                    self.is_closed = true;
                    self.receiver.on_closed();
                }
                ReceiverAction::Send(_) | ReceiverAction::Refused(_) | ReceiverAction::Free(_) => {}
            }
        }
    }

    /// Silence, and the end of the stream: then it is free.
    fn end(mut self) {
        for _ in 0..4 {
            self.now_ms = self.now_ms.max(self.receiver.next_tick_ms().min(2 * DEADLINE_MS));
            self.receiver.tick(self.now_ms);
            self.obey();
        }
        self.receiver.on_closed();
        self.obey();
        assert!(self.receiver.is_free(), "nothing holds it any more");
    }
}

fn grant() -> Grant {
    Grant {
        transfer_id: CONTEXT.transfer_id,
        request_id: RequestId([5; 16]),
        epoch: CONTEXT.epoch,
        receiver: NodeId::new("d"),
        receiver_incarnation: Incarnation(1),
        sender_incarnation: Incarnation(2),
        tokens: TOKENS,
        cached_tokens: 0,
        unseen: 0..0,
        layout: LAYOUT,
        fingerprint: ModelFingerprint([3; 32]),
        numerics: NumericsVersion("n".into()),
        choices: 1,
        expiry_ms: DEADLINE_MS,
    }
}
