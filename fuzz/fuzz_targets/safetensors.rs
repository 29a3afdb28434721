//! `config.json`, a zero byte, `model.safetensors`: an error or a model, never a panic.
#![no_main]

use std::cell::LazyCell;
use std::fs;

use baton_model_files::ModelFile;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

thread_local! {
    static FOLDER: LazyCell<TempDir> = LazyCell::new(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("tokenizer.json"), "{}").expect("a file in it");
        folder
    });
}

fuzz_target!(|bytes: &[u8]| {
    let zero = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let (config, weights) = bytes.split_at(zero);
    FOLDER.with(|folder| {
        let folder = folder.path();
        fs::write(folder.join("config.json"), config).expect("a file in the folder");
        fs::write(folder.join("model.safetensors"), weights.get(1..).unwrap_or_default())
            .expect("a file in the folder");
        if let Ok(model) = ModelFile::open(folder) {
            model.fingerprint();
        }
    });
});
