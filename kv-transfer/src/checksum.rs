//! CRC-32C (Castagnoli), with the machine's own instructions for it where it has them.

use crc_fast::{CrcAlgorithm, Digest};

/// Of one piece.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Of pieces that lie apart.
pub(crate) fn crc32c_of(pieces: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    pieces.iter().for_each(|piece| digest.update(piece));
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of the algorithm, and a table-free definition of it.
    #[test]
    fn it_is_the_castagnoli_polynomial() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let by_bits = |bytes: &[u8]| {
            !bytes.iter().fold(!0u32, |crc, &byte| {
                (0..8).fold(crc ^ u32::from(byte), |crc, _| {
                    if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 }
                })
            })
        };
        let bytes: Vec<u8> = (0..3000u32).map(|at| ((at * at) >> 3) as u8).collect();
        for len in [0, 1, 7, 63, 64, 65, 255, 256, 1000, 3000] {
            let want = by_bits(&bytes[..len]);
            assert_eq!(crc32c(&bytes[..len]), want, "{len} bytes");
            let (left, right) = bytes[..len].split_at(len / 3);
            assert_eq!(crc32c_of(&[left, right]), want, "{len} bytes in two");
        }
    }
}
