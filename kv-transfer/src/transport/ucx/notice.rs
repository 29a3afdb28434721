//! What the two ends say to each other over UCX: the headers of active messages. They name places
//! in the receiver's staging region by number, never by address; the receiver checks each.

use bytes::{BufMut, Bytes, BytesMut};

use crate::codec::{DecodeError, Reader};

/// Frames were put into slots.
pub(crate) const PUT: u32 = 0;
/// A frame that the receiver fetches into a slot: the message's payload.
pub(crate) const FETCH: u32 = 1;
/// Slots are free again.
pub(crate) const RELEASE: u32 = 2;
/// The receiver gives the staging region up, or the sender has stopped using it.
pub(crate) const DETACH: u32 = 3;
/// To the self-test's own worker.
pub(crate) const MESSAGE_IDS: u32 = 4;

/// Most slots in one message.
pub(crate) const SLOTS_MAX: usize = 256;

/// A frame's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub slot: u16,
    pub len: u32,
}

/// Token, then slots with their lengths; for [`PUT`], [`FETCH`] (one) and [`DETACH`] (none).
pub(crate) fn encode(token: u64, slots: &[Slot]) -> Bytes {
    let mut out = BytesMut::with_capacity(10 + 6 * slots.len());
    out.put_u64_le(token);
    out.put_u16_le(slots.len() as u16);
    for &Slot { slot, len } in slots {
        out.put_u16_le(slot);
        out.put_u32_le(len);
    }
    out.freeze()
}

/// # Errors
/// The field that cannot be.
pub(crate) fn decode(header: Vec<u8>) -> Result<(u64, Vec<Slot>), DecodeError> {
    let mut reader = Reader::new(header.into());
    let token = reader.u64("token")?;
    let len = usize::from(reader.u16("slots")?);
    if len > SLOTS_MAX {
        return Err(DecodeError::TooLong { field: "slots", len, max: SLOTS_MAX });
    }
    let slot = |_| Ok(Slot { slot: reader.u16("slot")?, len: reader.u32("len")? });
    let slots = (0..len).map(slot).collect::<Result<_, DecodeError>>()?;
    reader.finish()?;
    Ok((token, slots))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_rest_is_refused() {
        let slots: Vec<_> = (0..3).map(|slot| Slot { slot, len: 1 << slot }).collect();
        let bytes = encode(7, &slots).to_vec();
        assert_eq!(decode(bytes.clone()), Ok((7, slots)));
        assert_eq!(decode(encode(8, &[]).to_vec()), Ok((8, vec![])));
        for short in 0..bytes.len() {
            assert!(decode(bytes[..short].to_vec()).is_err());
        }
        assert!(decode([&bytes[..], &[0]].concat()).is_err());
        let many = vec![Slot { slot: 0, len: 0 }; SLOTS_MAX + 1];
        assert!(matches!(decode(encode(1, &many).to_vec()), Err(DecodeError::TooLong { .. })));
    }
}
