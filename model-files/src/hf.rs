//! Folders in Hugging Face's form: `config.json`, `*.safetensors`, `tokenizer.json`.

mod artifacts;
mod config;
mod features;
mod names;
mod rope;
mod shards;

use std::path::Path;

use serde::de::DeserializeOwned;

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

/// The text of a file of the folder; `None` when there is no such file.
fn read_text(folder: &Path, name: &str) -> Result<Option<String>, ModelFileError> {
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelFileError::Open { path, source }),
    }
}

/// A JSON file of the folder; `None` when there is no such file.
fn read_json<T: DeserializeOwned>(folder: &Path, name: &str) -> Result<Option<T>, ModelFileError> {
    let Some(text) = read_text(folder, name)? else { return Ok(None) };
    let broken =
        |problem| ModelFileError::Json { file: folder.join(name).display().to_string(), problem };
    let mut reader = serde_json::Deserializer::from_str(&text);
    // Its errors begin with the key.
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| broken(e.to_string()))?;
    reader.end().map_err(|error| broken(error.to_string()))?;
    Ok(Some(value))
}
