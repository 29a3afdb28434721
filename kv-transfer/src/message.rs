//! What the two ends of a transfer say to each other, and how it is written.
//!
//! A message is one tag byte, then the transfer's id and epoch, then fields in order, then the
//! CRC-32C of all that, little-endian; a frame is its tag, then the frame (whose header begins
//! with id and epoch and holds the checksum).

use baton_types::{
    Epoch, ErrorCode, Incarnation, ModelFingerprint, NodeId, NumericsVersion, TokenLogprobs,
    TokenOutput, TransferId,
};
use bytes::{BufMut, Bytes, BytesMut};

use crate::checksum::crc32c;
use crate::codec::{DecodeError, Reader, put_bytes};
use crate::frame::{Frame, FrameError, FrameKey, TAG_FRAME, WireLayout};
use crate::grant::{GRANT_MAX_BYTES, NAME_MAX_BYTES, get_layout, put_layout};

mod commit;
#[cfg(test)]
mod tests;

/// Protocol versions that this build speaks.
pub const VERSION_MIN: u16 = 1;
/// See [`VERSION_MIN`].
pub const VERSION_MAX: u16 = 1;
/// Most bytes of any message: a commit with log-probabilities of a long prompt.
pub const MESSAGE_MAX_BYTES: usize = 32 << 20;
/// Frames may come over UCX: see [`transport::ucx`](crate::transport::ucx).
pub const FEATURE_UCX: u32 = 1 << 0;
/// The one checksum so far.
pub const CHECKSUM_CRC32C: u8 = 1;

const TEXT_MAX_BYTES: usize = 4096;

/// Which attempt of which transfer a message belongs to; any other is counted and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    pub transfer_id: TransferId,
    pub epoch: Epoch,
}

/// A message of either side.
#[derive(Clone, Debug, PartialEq)]
pub struct KvMessage {
    pub context: Context,
    pub body: Body,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// Sender, first: wants to use a grant.
    Open(Box<Open>),
    /// Receiver: go on.
    OpenAccepted(OpenAccepted),
    /// Sender: KV.
    Frame(Frame),
    /// Receiver: more may come.
    Credit(Credit),
    /// Receiver: send again every frame that touches this range; once is all.
    Resend(FrameKey),
    /// Sender: that was all. May be repeated.
    Commit(Box<Commit>),
    /// Receiver: everything is in place and decoding may start. May be repeated.
    Committed,
    /// Either side gives up, or acknowledges that the other did: it writes nothing any more.
    Abort { code: ErrorCode, message: String },
    /// Sender, three in a second.
    Heartbeat { sequence: u32 },
    /// Receiver, to each heartbeat; repeats what else might be lost.
    HeartbeatAck(HeartbeatAck),
}

/// A sender's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    /// As it was minted.
    pub grant: Bytes,
    pub sender: NodeId,
    pub sender_incarnation: Incarnation,
    pub version_min: u16,
    pub version_max: u16,
    /// Bits of optional features on offer: [`FEATURE_UCX`].
    pub features: u32,
    pub checksum: u8,
    pub layout: WireLayout,
    pub fingerprint: ModelFingerprint,
    pub numerics: NumericsVersion,
}

/// The receiver's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenAccepted {
    pub version: u16,
    pub features: u32,
    /// As in [`Credit::granted_bytes`].
    pub granted_bytes: u64,
}

/// Room at the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Payload bytes that may be sent since the start, in all: repetition and reordering do no
    /// harm. Frames sent again at the receiver's wish do not count.
    pub granted_bytes: u64,
    /// This frame is verified and in place; the sender need not keep it.
    pub placed: FrameKey,
}

/// Where the receiver stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatAck {
    /// Of the heartbeat that is answered.
    pub sequence: u32,
    pub granted_bytes: u64,
    /// The commit has arrived.
    pub has_commit: bool,
    /// As [`Body::Committed`].
    pub committed: bool,
}

/// What decode needs to go on as if it had done the prefill itself.
#[derive(Clone, Debug, PartialEq)]
pub struct CommitInfo {
    /// Index 0 of each choice, in order of choices.
    pub first_tokens: Vec<TokenOutput>,
    /// Of `SamplerState::replay(request, first tokens)`.
    pub sampler_digest: [u8; 32],
    /// Of prompt tokens 1.., where the request asked for them.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens that the sender's prefix cache held.
    pub cached_tokens: u32,
}

/// A sender's last message.
#[derive(Clone, Debug, PartialEq)]
pub struct Commit {
    pub info: CommitInfo,
    pub frame_count: u32,
    /// See [`FrameDigest`](crate::digest::FrameDigest).
    pub digest: [u8; 16],
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    #[error("message: {0}")]
    Decode(#[from] DecodeError),
    #[error("frame: {0}")]
    Frame(#[from] FrameError),
    #[error("the message's checksum does not fit")]
    Checksum,
    #[error("a message of {0} bytes is too long: at most {MESSAGE_MAX_BYTES}")]
    TooLong(usize),
}

impl KvMessage {
    /// A frame as a message; context and frame always agree.
    pub fn frame(frame: Frame) -> Self {
        let header = frame.header();
        let context = Context { transfer_id: header.transfer_id, epoch: header.epoch };
        Self { context, body: Body::Frame(frame) }
    }

    /// The bytes of one message on any transport. A frame's are not copied.
    pub fn encode(&self) -> Bytes {
        if let Body::Frame(frame) = &self.body {
            return frame.as_message().clone();
        }
        let mut out = BytesMut::new();
        out.put_u8(self.body.tag());
        out.put_slice(&self.context.transfer_id.0);
        out.put_u32_le(self.context.epoch.0);
        self.body.put(&mut out);
        let crc = crc32c(&out);
        out.put_u32_le(crc);
        out.freeze()
    }

    /// Reads one message. Payloads are slices of `bytes`; a frame's checksum is not looked at.
    ///
    /// # Errors
    /// Names the field that is out of bounds. Never panics, and reserves no more memory than a
    /// small multiple of what came.
    pub fn decode(mut bytes: Bytes) -> Result<Self, MessageError> {
        if bytes.len() > MESSAGE_MAX_BYTES {
            return Err(MessageError::TooLong(bytes.len()));
        }
        if bytes.first() == Some(&TAG_FRAME) {
            return Ok(Self::frame(Frame::decode_message(bytes)?));
        }
        let crc_at = bytes.len().checked_sub(4).ok_or(DecodeError::Short("crc32c"))?;
        let crc = bytes.split_off(crc_at);
        if crc32c(&bytes).to_le_bytes() != *crc {
            return Err(MessageError::Checksum);
        }
        let mut reader = Reader::new(bytes);
        let tag = reader.u8("tag")?;
        let transfer_id = TransferId(reader.array("transfer_id")?);
        let epoch = Epoch(reader.u32("epoch")?);
        let body = Body::get(tag, &mut reader)?;
        reader.finish()?;
        Ok(Self { context: Context { transfer_id, epoch }, body })
    }
}

impl Body {
    fn tag(&self) -> u8 {
        match self {
            Body::Frame(_) => TAG_FRAME,
            Body::Open(_) => 2,
            Body::OpenAccepted(_) => 3,
            Body::Credit(_) => 4,
            Body::Resend(_) => 5,
            Body::Commit(_) => 6,
            Body::Committed => 7,
            Body::Abort { .. } => 8,
            Body::Heartbeat { .. } => 9,
            Body::HeartbeatAck(_) => 10,
        }
    }

    fn put(&self, out: &mut BytesMut) {
        match self {
            Body::Frame(_) => unreachable!("a frame carries its own bytes"),
            Body::Open(open) => open.put(out),
            Body::OpenAccepted(accepted) => {
                out.put_u16_le(accepted.version);
                out.put_u32_le(accepted.features);
                out.put_u64_le(accepted.granted_bytes);
            }
            Body::Credit(credit) => {
                out.put_u64_le(credit.granted_bytes);
                credit.placed.put(out);
            }
            Body::Resend(key) => key.put(out),
            Body::Commit(commit) => commit.put(out),
            Body::Committed => {}
            Body::Abort { code, message } => {
                let code = ErrorCode::ALL.iter().position(|known| known == code);
                out.put_u8(code.expect("ALL lists every code") as u8);
                let end = message.floor_char_boundary(TEXT_MAX_BYTES);
                put_bytes(out, &message.as_bytes()[..end]);
            }
            Body::Heartbeat { sequence } => out.put_u32_le(*sequence),
            Body::HeartbeatAck(ack) => {
                out.put_u32_le(ack.sequence);
                out.put_u64_le(ack.granted_bytes);
                out.put_u8(u8::from(ack.has_commit) | u8::from(ack.committed) << 1);
            }
        }
    }

    fn get(tag: u8, reader: &mut Reader) -> Result<Self, DecodeError> {
        Ok(match tag {
            2 => Body::Open(Box::new(Open::get(reader)?)),
            3 => Body::OpenAccepted(OpenAccepted {
                version: reader.u16("version")?,
                features: reader.u32("features")?,
                granted_bytes: reader.u64("granted_bytes")?,
            }),
            4 => {
                let granted_bytes = reader.u64("granted_bytes")?;
                Body::Credit(Credit { granted_bytes, placed: get_key(reader)? })
            }
            5 => Body::Resend(get_key(reader)?),
            6 => Body::Commit(Box::new(Commit::get(reader)?)),
            7 => Body::Committed,
            8 => {
                let value = reader.u8("code")?;
                let code = ErrorCode::ALL.get(usize::from(value)).copied();
                let code = code.ok_or(DecodeError::Value { field: "code", value: value.into() })?;
                Body::Abort { code, message: reader.string("message", TEXT_MAX_BYTES)? }
            }
            9 => Body::Heartbeat { sequence: reader.u32("sequence")? },
            10 => {
                let sequence = reader.u32("sequence")?;
                let granted_bytes = reader.u64("granted_bytes")?;
                let flags = match reader.u8("flags")? {
                    flags @ 0..4 => flags,
                    value => {
                        return Err(DecodeError::Value { field: "flags", value: value.into() });
                    }
                };
                let (has_commit, committed) = (flags & 1 == 1, flags & 2 == 2);
                Body::HeartbeatAck(HeartbeatAck { sequence, granted_bytes, has_commit, committed })
            }
            value => return Err(DecodeError::Value { field: "tag", value: value.into() }),
        })
    }
}

impl Open {
    fn put(&self, out: &mut BytesMut) {
        put_bytes(out, &self.grant);
        put_bytes(out, self.sender.as_str().as_bytes());
        out.put_u64_le(self.sender_incarnation.0);
        out.put_u16_le(self.version_min);
        out.put_u16_le(self.version_max);
        out.put_u32_le(self.features);
        out.put_u8(self.checksum);
        put_layout(out, &self.layout);
        out.put_slice(&self.fingerprint.0);
        put_bytes(out, self.numerics.0.as_bytes());
    }

    fn get(reader: &mut Reader) -> Result<Self, DecodeError> {
        Ok(Self {
            grant: reader.bytes("grant", GRANT_MAX_BYTES)?,
            sender: NodeId::new(reader.string("sender", NAME_MAX_BYTES)?),
            sender_incarnation: Incarnation(reader.u64("sender_incarnation")?),
            version_min: reader.u16("version_min")?,
            version_max: reader.u16("version_max")?,
            features: reader.u32("features")?,
            checksum: reader.u8("checksum")?,
            layout: get_layout(reader)?,
            fingerprint: ModelFingerprint(reader.array("fingerprint")?),
            numerics: NumericsVersion(reader.string("numerics", NAME_MAX_BYTES)?),
        })
    }
}

fn get_key(reader: &mut Reader) -> Result<FrameKey, DecodeError> {
    let bytes: [u8; 14] = reader.array("frame key")?;
    Ok(FrameKey::get(&mut &bytes[..]))
}
