//! Where a model's packed file may lie.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use baton_model_files::ModelFile;

use crate::load::WeightsCache;

pub(super) const EXTENSION: &str = "baton-packed";

/// In order of preference; none for a model that is no file, or without a cache.
pub(super) fn of(cache: &WeightsCache, model: &ModelFile) -> Vec<PathBuf> {
    let Some(path) = model.path() else { return Vec::new() };
    match cache {
        WeightsCache::Off => Vec::new(),
        WeightsCache::Beside => {
            let own = user_folder().map(|folder| folder.join(distinct_name(path)));
            [beside(path)].into_iter().chain(own).collect()
        }
        WeightsCache::Folder(folder) => vec![folder.join(distinct_name(path))],
    }
}

/// `models/m.gguf` has `models/m.gguf.baton-packed`, and the folder `models/m` has
/// `models/m/weights.baton-packed`.
fn beside(model: &Path) -> PathBuf {
    if model.is_dir() {
        return model.join("weights").with_extension(EXTENSION);
    }
    let mut name = model.as_os_str().to_owned();
    name.push(".");
    name.push(EXTENSION);
    name.into()
}

/// For a folder that holds those of many models: two of one name differ in their paths.
fn distinct_name(model: &Path) -> OsString {
    let whole = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    let hash = blake3::hash(whole.as_os_str().as_encoded_bytes()).to_hex();
    let mut name = whole.file_name().map_or_else(|| OsString::from("model"), OsString::from);
    name.push(format!(".{}.{EXTENSION}", &hash[..16]));
    name
}

/// The XDG base directory specification's, with our name.
fn user_folder() -> Option<PathBuf> {
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    // Users of services have homes that do not exist, and shall not.
    let home = || Some(absolute("HOME").filter(|home| home.is_dir())?.join(".cache"));
    Some(absolute("XDG_CACHE_HOME").or_else(home)?.join("baton"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_models_apart() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(beside(Path::new("m/a.gguf")), Path::new("m/a.gguf.baton-packed"));
        assert_eq!(beside(folder.path()), folder.path().join("weights.baton-packed"));
        let name = |path: &str| distinct_name(Path::new(path)).into_string().unwrap();
        assert_ne!(name("/x/a.gguf"), name("/y/a.gguf"));
        assert!(name("/x/a.gguf").starts_with("a.gguf.") && name("/x/a.gguf").len() < 50);
    }
}
