//! Addresses and keys of UCX as they travel: it reads them without looking, so what is not whole
//! must not reach it.

use bytes::{BufMut, Bytes};

use crate::checksum::crc32c;

const MAGIC: &[u8; 4] = b"BUCX";
const HEAD_BYTES: usize = 8;

/// Magic, CRC-32C of the bytes (little-endian), the bytes.
pub(super) fn seal(bytes: &[u8]) -> Bytes {
    let mut out = Vec::with_capacity(HEAD_BYTES + bytes.len());
    out.put_slice(MAGIC);
    out.put_u32_le(crc32c(bytes));
    out.put_slice(bytes);
    out.into()
}

/// `None` where they are not what [`seal`] made.
pub(super) fn open(mut sealed: Bytes) -> Option<Bytes> {
    if sealed.len() <= HEAD_BYTES {
        return None;
    }
    let bytes = sealed.split_off(HEAD_BYTES);
    let (magic, crc) = sealed.split_at(MAGIC.len());
    (magic == MAGIC && crc == crc32c(&bytes).to_le_bytes()).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sealed_opens() {
        let sealed = seal(b"address");
        assert_eq!(open(sealed.clone()).as_deref(), Some(&b"address"[..]));
        for at in 0..sealed.len() {
            let mut changed = sealed.to_vec();
            changed[at] ^= 1;
            assert_eq!(open(changed.into()), None);
            assert_eq!(open(sealed.slice(..at)), None);
        }
        assert_eq!(open(seal(b"")), None);
    }
}
