//! Where binaries and the model are.

use std::path::{Path, PathBuf};

const MODEL: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

/// The model file that nodes load.
///
/// # Panics
/// Where it is missing.
pub fn model() -> PathBuf {
    let path =
        std::env::var_os("BATON_TEST_MODEL").map_or_else(|| workspace().join(MODEL), PathBuf::from);
    assert!(path.exists(), "{} is missing: run scripts/fetch-model.sh", path.display());
    path
}

/// One of our binaries, beside the test's own executable.
///
/// # Panics
/// Where it has not been built.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own file");
    let folder = test.ancestors().nth(2).expect("tests lie in target/PROFILE/deps");
    let path = folder.join(name);
    assert!(
        path.exists(),
        "{} is missing: run cargo build --release --workspace --bins",
        path.display()
    );
    path
}

fn workspace() -> &'static Path {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).expect("this crate lies in tests/e2e")
}
