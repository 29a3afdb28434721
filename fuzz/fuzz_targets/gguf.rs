//! Whatever the bytes: an error or a model whose every tensor can be read, never a panic.
#![no_main]

use baton_model_files::ModelFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(model) = ModelFile::from_gguf_bytes(bytes.to_vec(), "fuzz.gguf") else { return };
    for role in model.roles() {
        let view = model.tensor(role);
        assert_eq!(view.row(view.rows - 1).len(), view.dtype.row_bytes(view.cols));
    }
    model.fingerprint();
});
