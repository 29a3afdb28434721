//! The file that keeps packed weights from one start to the next.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `BATONPKW` |
//! | 8..16 | version of this form, version of the packing (`weights/packed.rs`): u32 each |
//! | 16..48 | hash of the model's bytes |
//! | 48..80 | stamp of the model's files, zeros if unknown |
//! | 80..88 | matrices `m`, checksums `c`: u32 each |
//! | 88..104 | where the first matrix begins, length of the file: u64 each |
//! | 104..108 | CRC-32C of all before the first matrix, with zeros in place of itself |
//! | 128.. | `m` × (format, columns, panels, start: u64 each) |
//! | then | `c` × CRC-32C of 2 MiB of the file each, of which the head does not count |
//! | then | the matrices, each from a border of 4096 bytes on, zeros between and behind them |
//!
//! All little-endian. The model alone says what the file must be: which matrices, of which sizes,
//! at which places. So a reader compares and never follows what it reads, and bytes that it takes
//! are of the right length whatever they are.

mod head;
mod plan;
mod writer;

pub use head::PackedHead;
pub use plan::PackedPlan;
pub(crate) use writer::PackedWriter;

/// Of the form, not of the packing: see `PACKING_VERSION` for that.
const FILE_VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"BATONPKW";
/// Bytes of the file that share a checksum: one huge page.
const CHUNK_BYTES: usize = crate::memory::HUGE_PAGE_BYTES;
/// Matrices begin at multiples of it.
const PAGE_BYTES: usize = 4096;

/// Why a file is not taken for the packed weights of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackedFileError {
    #[error("it ends after {have_bytes} of {need_bytes} bytes")]
    Truncated { have_bytes: u64, need_bytes: u64 },
    #[error("it is {have_bytes} bytes long instead of {need_bytes}")]
    TooLong { have_bytes: u64, need_bytes: u64 },
    #[error("it holds no packed weights")]
    Magic,
    #[error("it has version {found} of the file's form; this build reads {want}")]
    FileVersion { found: u32, want: u32 },
    #[error("it was packed by version {found}; this build packs by {want}")]
    PackingVersion { found: u32, want: u32 },
    #[error("its head is damaged (checksum)")]
    Head,
    #[error("its matrices are not this model's")]
    OtherMatrices,
    #[error("it was packed from other weights")]
    OtherModel,
    #[error("bytes {from} to {to} are damaged (checksum)")]
    Damaged { from: u64, to: u64 },
}

#[cfg(test)]
mod tests;
