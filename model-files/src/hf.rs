//! Folders in Hugging Face's form: `config.json`, `*.safetensors`, `tokenizer.json`.

mod artifacts;
mod config;
mod features;
mod json;
mod names;
mod rope;
mod shards;
mod tokenizer;
mod window;

use std::path::Path;

use crate::ModelFileError;
use crate::model_file::Inner;

/// Opens and checks a folder.
///
/// # Errors
/// When a file is missing, damaged or of a kind that Baton does not serve.
pub(crate) fn open_folder(folder: &Path) -> Result<Inner, ModelFileError> {
    let config = config::Config::read(folder)?;
    let (files, found) = shards::open(folder)?;
    let tied = config.is_tied(|name| found.contains_key(name));
    let spec = config.spec(folder, tied)?;
    let tensors = shards::find_tensors(folder, &found, &spec)?;
    let artifacts = artifacts::read(folder, &spec)?;
    let spec = baton_types::ModelSpec {
        bos_id: artifacts.bos_id,
        eos_ids: artifacts.eos_ids.clone(),
        ..spec
    };
    Ok(Inner::new(Some(folder.to_owned()), files, tensors, spec, artifacts))
}
