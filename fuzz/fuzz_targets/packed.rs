//! Whatever the bytes, as they are and with their checksums made right: an error or the packed
//! weights of the tiny model, never a panic.
#![no_main]

use std::sync::LazyLock;

use baton_engine::packed_file::{PackedHead, PackedPlan};
use baton_model_files::ModelFile;
use libfuzzer_sys::fuzz_target;

/// The head of the tiny model's file, and the places in it of the head's own checksum and of the
/// only one of data (`engine/src/packed_file.rs`).
const HEAD_BYTES: usize = 4096;
const HEAD_CRC_AT: usize = 104;
const DATA_CRC_AT: usize = 128 + 5 * 32;

static PLAN: LazyLock<PackedPlan> = LazyLock::new(|| {
    let bytes = include_bytes!("../corpus/gguf/seed-Q4_0").to_vec();
    PackedPlan::of(&ModelFile::from_gguf_bytes(bytes, "tiny.gguf").expect("a whole model"))
});

fn check(bytes: &[u8]) {
    let Ok(head) = PackedHead::read(bytes, &PLAN) else { return };
    assert_eq!(bytes.len(), PLAN.file_bytes());
    let _damaged = head.check_data(bytes, &PLAN, 1, &mut |_| {});
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if bytes.len() < HEAD_BYTES {
        return;
    }
    let mut bytes = bytes.to_vec();
    let (head, data) = bytes.split_at_mut(HEAD_BYTES);
    head[DATA_CRC_AT..][..4].copy_from_slice(&crc32c::crc32c(data).to_le_bytes());
    head[HEAD_CRC_AT..][..4].fill(0);
    let crc = crc32c::crc32c(head);
    head[HEAD_CRC_AT..][..4].copy_from_slice(&crc.to_le_bytes());
    check(&bytes);
});
