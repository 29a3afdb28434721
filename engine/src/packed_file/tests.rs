//! Written and read again; damaged in every place; and the layout that the version names.

use std::io;

use baton_model_files::{ContentHash, ModelStamp, RowOrder, TensorDtype, TensorView};

use super::writer::Storage;
use super::*;
use crate::weights::{MatrixShape, PackedMatrix};

/// Xorshift.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 as u8
    }
}

const CONTENT: ContentHash = ContentHash([7; 32]);
const STAMP: Option<ModelStamp> = Some(ModelStamp([9; 32]));

impl Storage for &mut Vec<u8> {
    fn write_at(&mut self, bytes: &[u8], start: usize) -> io::Result<()> {
        self.resize(self.len().max(start + bytes.len()), 0);
        self[start..start + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Two small matrices; where `is_large`, one between them that is longer than a chunk. Miri
/// takes minutes for that.
fn plan(is_large: bool) -> PackedPlan {
    let (format, k) = (TensorDtype::Q4_1, 96);
    let mut matrices = vec![MatrixShape { format, k, panels: 2 }; 2];
    if is_large {
        let format = TensorDtype::F32;
        matrices.insert(1, MatrixShape { format, k: 1024, panels: 35 });
    }
    PackedPlan::new(matrices)
}

fn file(plan: &PackedPlan) -> Vec<u8> {
    let mut file = Vec::new();
    let mut writer = PackedWriter::new(&mut file, plan);
    let mut random = Random(3);
    for (matrix, _) in plan.matrices() {
        let bytes: Vec<u8> = (0..matrix.bytes()).map(|_| random.byte()).collect();
        writer.add(&bytes).unwrap();
    }
    writer.finish(CONTENT, STAMP).unwrap();
    file
}

fn read(file: &[u8], plan: &PackedPlan) -> Result<PackedHead, PackedFileError> {
    let head = PackedHead::read(file, plan)?;
    head.check_data(file, plan, 2, &mut |_| {})?;
    Ok(head)
}

#[test]
fn what_was_written_is_read() {
    for is_large in [false, true] {
        if is_large && cfg!(miri) {
            continue;
        }
        let plan = plan(is_large);
        let file = file(&plan);
        assert_eq!(file.len(), plan.file_bytes());
        let head = read(&file, &plan).unwrap();
        assert_eq!((head.content, head.stamp), (CONTENT, STAMP));
        let mut random = Random(3);
        for (matrix, start) in plan.matrices() {
            assert!(start.is_multiple_of(PAGE_BYTES));
            let bytes = &file[start..start + matrix.bytes()];
            assert!(bytes.iter().all(|byte| *byte == random.byte()));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn a_large_file_ends_with_a_whole_chunk() {
    let matrix = MatrixShape { format: TensorDtype::F32, k: 1024, panels: 150 };
    let plan = PackedPlan::new(vec![matrix]);
    assert!(plan.file_bytes().is_multiple_of(CHUNK_BYTES));
    let mut file = file(&plan);
    read(&file, &plan).unwrap();
    *file.last_mut().unwrap() = 1;
    assert!(read(&file, &plan).is_err(), "the padding is not checked");
}

#[test]
fn a_head_longer_than_a_chunk() {
    let matrix = MatrixShape { format: TensorDtype::F32, k: 1, panels: 1 };
    let plan = PackedPlan::new(vec![matrix; if cfg!(miri) { 100 } else { 70_000 }]);
    assert!(cfg!(miri) || plan.data_start() > CHUNK_BYTES);
    read(&file(&plan), &plan).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "takes minutes")]
fn every_flipped_byte_is_noticed() {
    let plan = plan(false);
    let mut file = file(&plan);
    for at in 0..file.len() {
        // Of the data, which one checksum counts, a part is enough for Miri.
        if cfg!(miri) && at > FIXED_BYTES_SEEN && !at.is_multiple_of(509) {
            continue;
        }
        file[at] ^= 0x10;
        assert!(read(&file, &plan).is_err(), "byte {at}");
        file[at] ^= 0x10;
    }
    read(&file, &plan).unwrap();
}

/// The head's fields and some of its table.
const FIXED_BYTES_SEEN: usize = 160;

#[test]
fn every_other_length_is_noticed() {
    let plan = plan(false);
    let mut file = file(&plan);
    for length in 0..file.len() {
        if cfg!(miri) && length > FIXED_BYTES_SEEN && !length.is_multiple_of(509) {
            continue;
        }
        let (have_bytes, need_bytes) = (length as u64, file.len() as u64);
        let want = PackedFileError::Truncated { have_bytes, need_bytes };
        assert_eq!(read(&file[..length], &plan), Err(want));
    }
    file.push(0);
    assert!(matches!(read(&file, &plan), Err(PackedFileError::TooLong { .. })));
}

#[test]
fn the_reason_is_told() {
    let plan = plan(false);
    let good = file(&plan);
    let with = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        read(&file, &plan).unwrap_err()
    };
    assert_eq!(with(0, b"GGUF"), PackedFileError::Magic);
    let old = 0u32.to_le_bytes();
    let want = FILE_VERSION;
    assert_eq!(with(8, &old), PackedFileError::FileVersion { found: 0, want });
    let want = crate::weights::PACKING_VERSION;
    assert_eq!(with(12, &old), PackedFileError::PackingVersion { found: 0, want });
    assert_eq!(with(20, &[1]), PackedFileError::Head);
    assert_eq!(with(80, &[9]), PackedFileError::OtherMatrices);
    assert_eq!(with(128, &[3]), PackedFileError::Head);
    let (from, to) = (plan.data_start() as u64, good.len() as u64);
    assert_eq!(
        with(good.len() - 1, &[!good[good.len() - 1]]),
        PackedFileError::Damaged { from, to }
    );
    // Of the same size, but of another type.
    let other = MatrixShape { format: TensorDtype::Q4_0, k: 96, panels: 2 };
    let (_, start) = plan.matrices().last().unwrap();
    let other = PackedPlan::new(vec![other, plan.matrices().next().unwrap().0]);
    assert_eq!(other.matrices().last().unwrap().1, start);
    assert_eq!(read(&file(&other), &plan).unwrap_err(), PackedFileError::OtherMatrices);
}

struct Full;

impl Storage for Full {
    fn write_at(&mut self, _bytes: &[u8], _start: usize) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }
}

#[test]
fn no_room_is_an_error() {
    let plan = plan(false);
    let mut writer = PackedWriter::new(Full, &plan);
    for (matrix, _) in plan.matrices() {
        writer.add(&vec![0; matrix.bytes()]).unwrap();
    }
    let error = writer.finish(CONTENT, STAMP).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
}

/// CRC-32C of what `PACKING_VERSION` 1 makes of the same stored bytes in each format: stacked,
/// then paired.
const PACKED: [(TensorDtype, [u32; 2]); 14] = [
    (TensorDtype::Q4_0, [3_974_974_083, 1_811_279_816]),
    (TensorDtype::Q4_1, [2_164_253_243, 311_209_501]),
    (TensorDtype::Q5_0, [2_485_790_542, 1_038_756_223]),
    (TensorDtype::Q5_1, [1_738_202_372, 2_277_592_345]),
    (TensorDtype::Q8_0, [3_895_284_766, 4_196_142_176]),
    (TensorDtype::Iq4Nl, [4_287_207_064, 2_440_125_621]),
    (TensorDtype::Q2K, [2_480_243_470, 4_131_541_747]),
    (TensorDtype::Q3K, [1_750_856_032, 3_110_918_255]),
    (TensorDtype::Q4K, [1_428_823_405, 2_188_025_388]),
    (TensorDtype::Q5K, [4_077_848_745, 197_455_817]),
    (TensorDtype::Q6K, [158_291_055, 1_790_739_605]),
    (TensorDtype::F16, [1_130_145_785, 1_647_013_339]),
    (TensorDtype::Bf16, [12_114_236, 3_562_834_935]),
    (TensorDtype::F32, [1_030_545_365, 110_709_626]),
];

#[test]
#[cfg_attr(miri, ignore = "maps memory with flags that Miri does not know")]
fn a_changed_layout_has_a_new_version() {
    let packed = PACKED.map(|(format, _)| {
        let (rows, cols) = (40, 512);
        let mut random = Random(1 + format as u64);
        let bytes: Vec<u8> =
            (0..2 * rows * format.row_bytes(cols)).map(|_| random.byte()).collect();
        let (a, b) = bytes.split_at(bytes.len() / 2);
        let view =
            |bytes| TensorView { dtype: format, rows, cols, row_order: RowOrder::Plain, bytes };
        let stacked = PackedMatrix::pack(&[view(a), view(b)], 2).unwrap();
        let paired = PackedMatrix::pack_paired(&view(a), &view(b), 2).unwrap();
        (format, [stacked, paired].map(|matrix| crc32c::crc32c(matrix.as_slice())))
    });
    assert_eq!(
        packed, PACKED,
        "packed bytes have changed: raise PACKING_VERSION in weights/packed.rs, so that files of \
         the old layout are packed again, and put these checksums into this test"
    );
    assert_eq!(crate::weights::PACKING_VERSION, 1, "the checksums above are of version 1");
}
