//! Messages of `Push` as gRPC writes them, without the copies that generated code makes: a payload
//! goes out as it lies, and comes in with one copy, straight from the connection's buffers into the
//! memory that it is verified and placed from.
//!
//! On the wire it is any gRPC stream of `KvChunk { bytes data = 1 }`.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame};
use tonic::Status;

use crate::TransferError;
use crate::codec::DecodeError;
use crate::memory::{FrameBuffer, FrameMemory};
use crate::message::{KvMessage, MESSAGE_MAX_BYTES, MessageError};

/// gRPC's compression flag and length.
const PREFIX_BYTES: usize = 5;
/// Protobuf's tag of field 1 with a length: the only field of `KvChunk`.
const FIELD_TAG: u8 = 0x0a;
/// A tag and a length of 32 bits.
const FIELD_HEAD_MAX_BYTES: usize = 6;
/// Messages up to so many bytes are copied behind their head, to save a frame.
const SMALL_BYTES: usize = 1024;
/// Payloads from so many bytes on lie in frame memory.
const LARGE_BYTES: usize = 32 << 10;

/// An outgoing body.
pub(super) struct Chunks {
    messages: BoxStream<'static, Bytes>,
    /// The payload whose head is out.
    payload: Option<Bytes>,
    /// A server says at the end how the call ended.
    trailers: bool,
}

impl Chunks {
    pub(super) fn request(messages: BoxStream<'static, Bytes>) -> Self {
        Self { messages, payload: None, trailers: false }
    }

    pub(super) fn response(messages: BoxStream<'static, Bytes>) -> Self {
        Self { messages, payload: None, trailers: true }
    }
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(payload) = self.payload.take() {
            return Poll::Ready(Some(Ok(Frame::data(payload))));
        }
        let Some(message) = ready!(self.messages.poll_next_unpin(cx)) else {
            let ends = std::mem::take(&mut self.trailers);
            return Poll::Ready(ends.then(|| {
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                Ok(Frame::trailers(trailers))
            }));
        };
        let mut head = BytesMut::with_capacity(PREFIX_BYTES + FIELD_HEAD_MAX_BYTES + SMALL_BYTES);
        head.put_bytes(0, PREFIX_BYTES);
        head.put_u8(FIELD_TAG);
        let mut len = message.len();
        while len >= 0x80 {
            head.put_u8(len as u8 | 0x80);
            len >>= 7;
        }
        head.put_u8(len as u8);
        let chunk_len = (head.len() - PREFIX_BYTES + message.len()) as u32;
        head[1..PREFIX_BYTES].copy_from_slice(&chunk_len.to_be_bytes());
        if message.len() <= SMALL_BYTES {
            head.put_slice(&message);
        } else {
            self.payload = Some(message);
        }
        Poll::Ready(Some(Ok(Frame::data(head.freeze()))))
    }
}

/// Messages of an incoming body, in order.
pub(crate) struct Messages<B> {
    body: B,
    memory: FrameMemory,
    /// The data frame that is being read.
    data: Bytes,
    reading: Reading,
}

/// Where in a message the reader is.
enum Reading {
    Prefix(Vec<u8>),
    /// Of `left` bytes, the field's head comes first.
    Field {
        head: Vec<u8>,
        left: usize,
    },
    Payload {
        buffer: FrameBuffer,
        left: usize,
    },
    /// What is no `KvChunk` is passed over.
    Skipped {
        left: usize,
    },
    Ended,
}

impl<B> Messages<B> {
    pub(crate) fn new(body: B, memory: FrameMemory) -> Self {
        Self { body, memory, data: Bytes::new(), reading: Reading::Prefix(Vec::new()) }
    }

    /// Reads on in the data that is there; `None` where it is used up.
    fn read(&mut self) -> Option<Result<KvMessage, TransferError>> {
        loop {
            self.reading = match std::mem::replace(&mut self.reading, Reading::Ended) {
                Reading::Prefix(mut prefix) => {
                    if !fill(&mut prefix, PREFIX_BYTES, &mut self.data) {
                        self.reading = Reading::Prefix(prefix);
                        return None;
                    }
                    let left = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
                    let left = left as usize;
                    if prefix[0] != 0 || left > MESSAGE_MAX_BYTES + FIELD_HEAD_MAX_BYTES {
                        // Where the next message begins cannot be known.
                        return Some(Err(TransferError::Closed));
                    }
                    Reading::Field { head: Vec::new(), left }
                }
                Reading::Field { left: 0, .. } => {
                    self.reading = Reading::Prefix(Vec::new());
                    return Some(Err(unreadable(DecodeError::Short("data"))));
                }
                Reading::Field { mut head, left } => {
                    let Some(&byte) = self.data.first() else {
                        self.reading = Reading::Field { head, left };
                        return None;
                    };
                    self.data.advance(1);
                    head.push(byte);
                    match field(&head, left - 1) {
                        Field::Incomplete => Reading::Field { head, left: left - 1 },
                        Field::Payload => {
                            let is_large = left > LARGE_BYTES;
                            let memory = is_large.then_some(&self.memory);
                            let buffer = memory.unwrap_or(&FrameMemory::heap()).take(left - 1);
                            Reading::Payload { buffer, left: left - 1 }
                        }
                        Field::Other => Reading::Skipped { left: left - 1 },
                    }
                }
                Reading::Payload { mut buffer, left } => {
                    let piece = self.data.split_to(left.min(self.data.len()));
                    buffer.put_slice(&piece);
                    if piece.len() < left {
                        self.reading = Reading::Payload { buffer, left: left - piece.len() };
                        return None;
                    }
                    self.reading = Reading::Prefix(Vec::new());
                    return Some(KvMessage::decode(buffer.freeze()).map_err(TransferError::from));
                }
                Reading::Skipped { left } => {
                    let passed = left.min(self.data.len());
                    self.data.advance(passed);
                    if passed < left {
                        self.reading = Reading::Skipped { left: left - passed };
                        return None;
                    }
                    self.reading = Reading::Prefix(Vec::new());
                    return Some(Err(unreadable(DecodeError::Utf8("chunk"))));
                }
                Reading::Ended => return None,
            };
        }
    }
}

fn unreadable(error: DecodeError) -> TransferError {
    MessageError::from(error).into()
}

/// Takes bytes until there are `wanted`; whether there are.
fn fill(out: &mut Vec<u8>, wanted: usize, data: &mut Bytes) -> bool {
    let missing = wanted - out.len();
    out.extend_from_slice(&data.split_to(missing.min(data.len())));
    out.len() == wanted
}

enum Field {
    Incomplete,
    /// Exactly the payload is left.
    Payload,
    Other,
}

/// What a field's head says, behind which `left` bytes of the message follow.
fn field(head: &[u8], left: usize) -> Field {
    let [tag, length @ ..] = head else { return Field::Incomplete };
    if *tag != FIELD_TAG || head.len() > FIELD_HEAD_MAX_BYTES {
        return Field::Other;
    }
    match length.last() {
        None => Field::Incomplete,
        Some(last) if last & 0x80 != 0 => {
            if left == 0 {
                Field::Other
            } else {
                Field::Incomplete
            }
        }
        Some(_) => {
            let digits = length.iter().rev();
            let said = digits.fold(0, |value, byte| value << 7 | usize::from(byte & 0x7f));
            if said == left { Field::Payload } else { Field::Other }
        }
    }
}

impl<B> Stream for Messages<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    type Item = Result<KvMessage, TransferError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(message) = self.read() {
                return Poll::Ready(Some(message));
            }
            if matches!(self.reading, Reading::Ended) {
                return Poll::Ready(None);
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                // Trailers come behind the last message.
                Some(Ok(frame)) => self.data = frame.into_data().unwrap_or_default(),
                Some(Err(_)) => {
                    self.reading = Reading::Ended;
                    return Poll::Ready(Some(Err(TransferError::Closed)));
                }
                None => self.reading = Reading::Ended,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{Epoch, TransferId};
    use futures::executor::block_on;
    use http_body_util::{BodyExt, StreamBody};
    use prost::Message;

    use super::*;
    use crate::message::{Body as Says, Context as Of};

    fn heartbeat(sequence: u32) -> KvMessage {
        let context = Of { transfer_id: TransferId([3; 16]), epoch: Epoch(1) };
        KvMessage { context, body: Says::Heartbeat { sequence } }
    }

    /// A body of these bytes, in pieces of `piece`.
    fn read(bytes: &[u8], piece: usize) -> Vec<Result<KvMessage, TransferError>> {
        let frames: Vec<_> = bytes
            .chunks(piece)
            .map(|piece| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(piece))))
            .collect();
        let body = StreamBody::new(futures::stream::iter(frames));
        let memory = FrameMemory::new(2, 1 << 20).unwrap();
        block_on(Messages::new(body, memory).take(20).collect())
    }

    fn written(messages: Vec<Bytes>) -> Vec<u8> {
        let body = Chunks::request(futures::stream::iter(messages).boxed());
        block_on(body.collect()).unwrap().to_bytes().to_vec()
    }

    /// As prost and tonic write a `KvChunk`.
    fn by_prost(data: Bytes) -> Vec<u8> {
        let chunk = baton_proto::internal::KvChunk { data }.encode_to_vec();
        [&[0][..], &(chunk.len() as u32).to_be_bytes(), &chunk].concat()
    }

    #[test]
    fn it_writes_what_prost_writes() {
        for len in [1, 127, 128, SMALL_BYTES, SMALL_BYTES + 1, 20_000, 3 << 20] {
            let data = Bytes::from(vec![9; len]);
            assert!(written(vec![data.clone()]) == by_prost(data), "{len} bytes");
        }
    }

    #[test]
    fn it_reads_what_prost_writes_however_it_is_cut() {
        let messages: Vec<_> = (0..4).map(heartbeat).collect();
        let bytes: Vec<u8> = messages.iter().flat_map(|one| by_prost(one.encode())).collect();
        for piece in [1, 2, 3, 7, 64, 1 << 20] {
            let read: Vec<_> = read(&bytes, piece).into_iter().map(Result::unwrap).collect();
            assert!(read == messages, "pieces of {piece}");
        }
    }

    #[test]
    fn what_is_no_chunk_is_passed_over_and_what_cannot_be_ends() {
        let good = by_prost(heartbeat(1).encode());
        let others: [&[u8]; 6] = [
            &[0, 0, 0, 0, 0],
            &[0, 0, 0, 0, 3, 0x0a, 2, 1],
            &[0, 0, 0, 0, 3, 0x12, 1, 1],
            &[0, 0, 0, 0, 3, 0x0a, 0x80, 0x80],
            &[0, 0, 0, 0, 8, 0x0a, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1],
            &[0, 0, 0, 0, 2, 0x0a, 0],
        ];
        for other in others {
            for piece in [1, 100] {
                let read = read(&[other, &good].concat(), piece);
                let [Err(TransferError::Message(_)), Ok(message)] = &read[..] else {
                    panic!("{other:?}: {read:?}")
                };
                assert_eq!(*message, heartbeat(1));
            }
        }
        for end in [&[1, 0, 0, 0, 2][..], &[0, 0xff, 0, 0, 0]] {
            let read = read(&[end, &good].concat(), 100);
            assert_eq!(read, [Err(TransferError::Closed)]);
        }
        // After an error nothing comes, not even the error again.
        let broken = [Ok(Frame::data(good.clone().into())), Err(Status::aborted("gone"))];
        let broken = StreamBody::new(
            futures::stream::iter(broken)
                .chain(futures::stream::repeat_with(|| Err(Status::aborted("gone still")))),
        );
        let messages = Messages::new(broken, FrameMemory::heap());
        let read: Vec<_> = block_on(messages.take(20).collect());
        assert_eq!(read, [Ok(heartbeat(1)), Err(TransferError::Closed)]);
        // Half a message is none.
        assert_eq!(self::read(&good[..good.len() - 1], 5), []);
    }
}
