//! One opened model, whatever its format.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use baton_types::{ModelArtifacts, ModelFingerprint, ModelSpec};

use crate::map::FileBytes;
use crate::roles::all_roles;
use crate::tensor::{RowOrder, TensorRole, TensorView};
use crate::{ModelFileError, TensorDtype, gguf, hf};

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    /// Index into the model's files.
    pub(crate) file: usize,
    pub(crate) dtype: TensorDtype,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_order: RowOrder,
    pub(crate) bytes: Range<usize>,
}

/// An opened and checked model. Clones share the mapping.
#[derive(Clone)]
pub struct ModelFile {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) files: Vec<FileBytes>,
    pub(crate) tensors: HashMap<TensorRole, Placed>,
    pub(crate) spec: ModelSpec,
    pub(crate) artifacts: ModelArtifacts,
    pub(crate) fingerprint: OnceLock<ModelFingerprint>,
}

impl ModelFile {
    /// Opens a `.gguf` file, or a folder with `config.json` and safetensors.
    ///
    /// # Errors
    /// When the model cannot be read, is damaged, or is of a kind that Baton does not serve.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelFileError> {
        let path = path.as_ref();
        if path.is_dir() {
            return hf::open_folder(path).map(Self::from_inner);
        }
        Self::from_gguf(FileBytes::map(path)?, &path.display().to_string())
    }

    /// Reads a GGUF file that lies in memory; `name` names it in errors and the spec.
    ///
    /// # Errors
    /// As [`ModelFile::open`].
    pub fn from_gguf_bytes(bytes: Vec<u8>, name: &str) -> Result<Self, ModelFileError> {
        Self::from_gguf(FileBytes::Owned(bytes), name)
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.inner.spec
    }

    pub fn artifacts(&self) -> &ModelArtifacts {
        &self.inner.artifacts
    }

    /// The parts that this model's tensors play, the embedding's twice where it is also the output.
    pub fn roles(&self) -> impl Iterator<Item = TensorRole> {
        let tied = self.inner.spec.tied_embeddings.then_some(TensorRole::Output);
        all_roles(&self.inner.spec).chain(tied)
    }

    /// Hash over weights, tokenizer and shape, but not over the model's name. Computed once, at
    /// several gigabytes a second.
    pub fn fingerprint(&self) -> ModelFingerprint {
        *self.inner.fingerprint.get_or_init(|| {
            let spec = ModelSpec { name: String::new(), ..self.inner.spec.clone() };
            let mut hasher = blake3::Hasher::new_derive_key("baton 2026 model fingerprint v1");
            for file in &self.inner.files {
                hasher.update(&(file.as_slice().len() as u64).to_le_bytes());
                hasher.update(file.as_slice());
            }
            for part in [serde_json::to_vec(&spec), serde_json::to_vec(&self.inner.artifacts)] {
                let part = part.expect("plain structs of strings and numbers serialise");
                hasher.update(&(part.len() as u64).to_le_bytes());
                hasher.update(&part);
            }
            ModelFingerprint(hasher.finalize().into())
        })
    }

    /// The tensor that plays `role`; `Output` is the embedding where the two are tied.
    ///
    /// # Panics
    /// For a part that the model does not have.
    pub fn tensor(&self, role: TensorRole) -> TensorView<'_> {
        let tied = role == TensorRole::Output && self.inner.spec.tied_embeddings;
        let role = if tied { TensorRole::Embedding } else { role };
        let placed = &self.inner.tensors[&role];
        TensorView {
            dtype: placed.dtype,
            rows: placed.rows,
            cols: placed.cols,
            row_order: placed.row_order,
            bytes: &self.inner.files[placed.file].as_slice()[placed.bytes.clone()],
        }
    }

    /// Once the weights are packed the file is hardly read any more: its pages need not stay in
    /// this process's memory.
    pub fn forget_pages(&self) {
        self.inner.files.iter().for_each(FileBytes::forget_pages);
    }

    fn from_gguf(bytes: FileBytes, name: &str) -> Result<Self, ModelFileError> {
        let parsed = gguf::Gguf::parse(bytes.as_slice(), name)?;
        let spec = gguf::read_spec(&parsed, &served_name(name))?;
        let tensors = gguf::find_tensors(&parsed, &spec)?;
        let artifacts = gguf::artifacts(&parsed, &spec)?;
        drop(parsed);
        let fingerprint = OnceLock::new();
        let files = vec![bytes];
        Ok(Self::from_inner(Inner { files, tensors, spec, artifacts, fingerprint }))
    }

    fn from_inner(inner: Inner) -> Self {
        Self { inner: Arc::new(inner) }
    }
}

impl fmt::Debug for ModelFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelFile").field("spec", &self.inner.spec).finish_non_exhaustive()
    }
}

/// `models/SmolLM2-135M-Instruct.Q4_1.gguf` is served as `SmolLM2-135M-Instruct`: a model's name
/// does not depend on how its weights are stored.
fn served_name(path: &str) -> String {
    let file = Path::new(path)
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let stem = file.strip_suffix(".gguf").unwrap_or(&file);
    match stem.rsplit_once(['.', '-']) {
        Some((name, suffix)) if !name.is_empty() && is_dtype_name(suffix) => name.to_owned(),
        _ => stem.to_owned(),
    }
}

fn is_dtype_name(suffix: &str) -> bool {
    let suffix = suffix.to_ascii_uppercase();
    let quantized = suffix.strip_prefix('I').unwrap_or(&suffix).strip_prefix('Q');
    matches!(suffix.as_str(), "F32" | "F16" | "BF16" | "FP16")
        || quantized.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::served_name;

    #[test]
    fn name_without_storage_type() {
        assert_eq!(served_name("m/SmolLM2-135M-Instruct.Q4_1.gguf"), "SmolLM2-135M-Instruct");
        assert_eq!(served_name("Llama-3.2-1B-Instruct-bf16.gguf"), "Llama-3.2-1B-Instruct");
        assert_eq!(served_name("Llama-3.2-1B-Instruct-Q4_K_M.gguf"), "Llama-3.2-1B-Instruct");
        assert_eq!(served_name("Llama-3.2-1B-Instruct-IQ4_NL.gguf"), "Llama-3.2-1B-Instruct");
        assert_eq!(served_name("tiny.gguf"), "tiny");
        assert_eq!(served_name("Q4_1"), "Q4_1");
    }
}
