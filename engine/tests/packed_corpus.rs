//! Replays what the fuzzer of packed files (`fuzz/`) has collected, on the stable toolchain.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use baton_engine::cpu::{CpuBackend, CpuConfig};
use baton_engine::load::WeightsCache;
use baton_engine::packed_file::{PackedFileError, PackedHead, PackedPlan};
use baton_model_files::ModelFile;

fn fuzz(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(path)
}

/// The model whose packed file the fuzzer varies.
fn model() -> PathBuf {
    fuzz("gguf/seed-Q4_0")
}

fn check(bytes: &[u8], plan: &PackedPlan) -> Result<(), PackedFileError> {
    let head = PackedHead::read(bytes, plan)?;
    assert_eq!(bytes.len(), plan.file_bytes());
    head.check_data(bytes, plan, 1, &mut |_| {})
}

#[test]
fn packed() {
    let plan = PackedPlan::of(&ModelFile::open(model()).unwrap());
    let inputs: Vec<PathBuf> =
        fs::read_dir(fuzz("packed")).unwrap().map(|entry| entry.unwrap().path()).collect();
    for path in &inputs {
        let result = check(&fs::read(path).unwrap(), &plan);
        let name = path.file_name().unwrap().to_str().unwrap();
        match name.strip_prefix("seed-") {
            // It may be of an older packing, until `seeds` makes it again.
            Some("whole") => assert!(
                matches!(result, Ok(()) | Err(PackedFileError::PackingVersion { .. })),
                "{result:?}"
            ),
            Some(_) => assert!(result.is_err(), "{name} was taken"),
            None => {}
        }
    }
    assert!(inputs.len() >= 8);
}

/// Writes the inputs that the fuzzer starts from: `cargo test -- --ignored seeds`.
#[test]
#[ignore = "writes into fuzz/corpus"]
fn seeds() {
    let folder = tempfile::tempdir().unwrap();
    let model = ModelFile::open(model()).unwrap();
    let weights_cache = WeightsCache::Folder(folder.path().into());
    CpuBackend::new(&model, CpuConfig { weights_cache, ..CpuConfig::default() }).unwrap();
    let packed = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let whole = fs::read(packed).unwrap();
    let with = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    fs::create_dir_all(fuzz("packed")).unwrap();
    for (name, bytes) in [
        ("whole", whole.clone()),
        ("other-magic", with(0)[..4096].to_vec()),
        ("other-form", with(8)[..128].to_vec()),
        ("other-packing", with(12)[..128].to_vec()),
        ("other-counts", with(80)[..4096].to_vec()),
        ("other-matrix", with(136)),
        ("damaged-data", with(whole.len() - 1)),
        ("cut", whole[..whole.len() - 1].to_vec()),
        ("empty", Vec::new()),
    ] {
        fs::write(fuzz("packed").join(format!("seed-{name}")), bytes).unwrap();
    }
}
