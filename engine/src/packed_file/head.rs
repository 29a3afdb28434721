//! What stands before the matrices.

use std::sync::atomic::{AtomicUsize, Ordering};

use baton_model_files::{ContentHash, ModelStamp};
use crc32c::crc32c;

use super::plan::format_code;
use super::{FILE_VERSION, MAGIC, PackedFileError, PackedPlan};
use crate::weights::PACKING_VERSION;

pub(super) const FIXED_BYTES: usize = 128;
pub(super) const ENTRY_BYTES: usize = 32;
const VERSIONS_AT: usize = 8;
const CONTENT_AT: usize = 16;
const STAMP_AT: usize = 48;
const COUNTS_AT: usize = 80;
const CRC_AT: usize = 104;

/// The head of a file that fits a plan, and that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedHead {
    /// Of the model that was packed.
    pub content: ContentHash,
    /// Of its files as they were then.
    pub stamp: Option<ModelStamp>,
    /// Of each chunk.
    pub(super) checksums: Vec<u32>,
}

impl PackedHead {
    /// Reads `file`, which may be any bytes.
    ///
    /// # Errors
    /// When it does not fit `plan`, is of another version, or its head is damaged. What follows
    /// the head is looked at by [`check_data`](Self::check_data).
    pub fn read(file: &[u8], plan: &PackedPlan) -> Result<Self, PackedFileError> {
        let (have_bytes, need_bytes) = (file.len() as u64, plan.file_bytes() as u64);
        let truncated = PackedFileError::Truncated { have_bytes, need_bytes };
        let fixed = file.first_chunk::<FIXED_BYTES>().ok_or(truncated.clone())?;
        if fixed[..MAGIC.len()] != MAGIC {
            return Err(PackedFileError::Magic);
        }
        let [found, packing] = [u32_at(fixed, VERSIONS_AT), u32_at(fixed, VERSIONS_AT + 4)];
        if found != FILE_VERSION {
            return Err(PackedFileError::FileVersion { found, want: FILE_VERSION });
        }
        if packing != PACKING_VERSION {
            let (found, want) = (packing, PACKING_VERSION);
            return Err(PackedFileError::PackingVersion { found, want });
        }
        let content = ContentHash(bytes_at(fixed, CONTENT_AT));
        let stamp = Some(bytes_at(fixed, STAMP_AT)).filter(|stamp| *stamp != [0; 32]);
        let head = Self { content, stamp: stamp.map(ModelStamp), checksums: Vec::new() };
        let want = head.encode(plan);
        // From the counts on all but checksums follows from the plan.
        if fixed[COUNTS_AT..CRC_AT] != want[COUNTS_AT..CRC_AT] {
            return Err(PackedFileError::OtherMatrices);
        }
        if have_bytes < need_bytes {
            return Err(truncated);
        }
        if have_bytes > need_bytes {
            return Err(PackedFileError::TooLong { have_bytes, need_bytes });
        }
        let bytes = &file[..plan.data_start()];
        if head_crc(bytes) != u32_at(fixed, CRC_AT) {
            return Err(PackedFileError::Head);
        }
        let table = FIXED_BYTES..FIXED_BYTES + plan.matrices().len() * ENTRY_BYTES;
        if bytes[table.clone()] != want[table.clone()] {
            return Err(PackedFileError::OtherMatrices);
        }
        let checksums = bytes[table.end..].chunks_exact(4).take(plan.chunks());
        let checksums = checksums.map(|bytes| u32_at(bytes, 0)).collect();
        Ok(Self { checksums, ..head })
    }

    /// Holds all that follows the head against its checksums, on `threads` threads. `on_bytes`
    /// hears now and then how many bytes are done.
    ///
    /// # Errors
    /// `Damaged` for one of the chunks that differ.
    ///
    /// # Panics
    /// When `file` is not the one that was read.
    pub fn check_data(
        &self,
        file: &[u8],
        plan: &PackedPlan,
        threads: usize,
        on_bytes: &mut dyn FnMut(u64),
    ) -> Result<(), PackedFileError> {
        assert!(file.len() == plan.file_bytes() && self.checksums.len() == plan.chunks());
        let next = AtomicUsize::new(0);
        let check = |on_bytes: &mut dyn FnMut(u64)| {
            loop {
                let chunk = next.fetch_add(1, Ordering::Relaxed);
                let Some(want) = self.checksums.get(chunk) else { return Ok(()) };
                let range = plan.chunk(chunk);
                if crc32c(&file[range.clone()]) != *want {
                    let (from, to) = (range.start as u64, range.end as u64);
                    return Err(PackedFileError::Damaged { from, to });
                }
                on_bytes(range.end as u64);
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| check(&mut |_| {}))).collect();
            let own = check(on_bytes);
            let results = others.into_iter().map(|other| other.join());
            results.fold(own, |all, one| all.and(one.expect("a checksum does not panic")))
        })
    }

    /// All bytes before the first matrix.
    pub(super) fn encode(&self, plan: &PackedPlan) -> Vec<u8> {
        let mut out = Vec::with_capacity(plan.data_start());
        out.extend(MAGIC);
        out.extend([FILE_VERSION, PACKING_VERSION].map(u32::to_le_bytes).as_flattened());
        out.extend(self.content.0);
        out.extend(self.stamp.map_or([0; 32], |stamp| stamp.0));
        let counts = [plan.matrices().len() as u32, plan.chunks() as u32];
        out.extend(counts.map(u32::to_le_bytes).as_flattened());
        let sizes = [plan.data_start() as u64, plan.file_bytes() as u64];
        out.extend(sizes.map(u64::to_le_bytes).as_flattened());
        out.resize(FIXED_BYTES, 0);
        for (matrix, start) in plan.matrices() {
            out.extend(u64::from(format_code(matrix.format)).to_le_bytes());
            let places = [matrix.k as u64, matrix.panels as u64, start as u64];
            out.extend(places.map(u64::to_le_bytes).as_flattened());
        }
        out.extend(self.checksums.iter().flat_map(|checksum| checksum.to_le_bytes()));
        out.resize(plan.data_start(), 0);
        let crc = head_crc(&out);
        out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        out
    }
}

/// Of the whole head but for the place of this number.
fn head_crc(head: &[u8]) -> u32 {
    let crc = crc32c::crc32c_append(crc32c(&head[..CRC_AT]), &[0; 4]);
    crc32c::crc32c_append(crc, &head[CRC_AT + 4..])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("as many bytes as asked for")
}
