//! One opened model, whatever its format.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use baton_types::{ModelArtifacts, ModelFingerprint, ModelSpec};

use crate::map::{Facts, FileBytes};
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

/// A hash of all bytes of a model's weight files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentHash(pub [u8; 32]);

/// A hash of what the system knows of a model's weight files: sizes, inodes, and times of their
/// last change. Files of the same stamp have the same bytes, unless somebody has set the system's
/// clock back; files of another stamp may have them too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelStamp(pub [u8; 32]);

/// Bytes that are hashed between two reports of progress.
const HASH_PIECE_BYTES: usize = 16 << 20;

pub(crate) struct Inner {
    /// `None` for bytes in memory.
    pub(crate) path: Option<PathBuf>,
    pub(crate) files: Vec<FileBytes>,
    pub(crate) tensors: HashMap<TensorRole, Placed>,
    pub(crate) spec: ModelSpec,
    pub(crate) artifacts: ModelArtifacts,
    pub(crate) content: OnceLock<ContentHash>,
    pub(crate) fingerprint: OnceLock<ModelFingerprint>,
}

impl Inner {
    pub(crate) fn new(
        path: Option<PathBuf>,
        files: Vec<FileBytes>,
        tensors: HashMap<TensorRole, Placed>,
        spec: ModelSpec,
        artifacts: ModelArtifacts,
    ) -> Self {
        let (content, fingerprint) = (OnceLock::new(), OnceLock::new());
        Self { path, files, tensors, spec, artifacts, content, fingerprint }
    }
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
        let name = path.display().to_string();
        Self::from_gguf(Some(path.to_owned()), FileBytes::map(path)?, &name)
    }

    /// Reads a GGUF file that lies in memory; `name` names it in errors and the spec.
    ///
    /// # Errors
    /// As [`ModelFile::open`].
    pub fn from_gguf_bytes(bytes: Vec<u8>, name: &str) -> Result<Self, ModelFileError> {
        Self::from_gguf(None, FileBytes::Owned(bytes), name)
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

    /// The file or folder that was opened; `None` for bytes in memory.
    pub fn path(&self) -> Option<&Path> {
        self.inner.path.as_deref()
    }

    /// Bytes of all weight files.
    pub fn file_bytes(&self) -> u64 {
        self.inner.files.iter().map(|file| file.as_slice().len() as u64).sum()
    }

    /// `None` where bytes are in memory, or a file was changed within the second before it was
    /// opened.
    pub fn stamp(&self) -> Option<ModelStamp> {
        let mut hasher = blake3::Hasher::new_derive_key("baton 2026 model stamp v1");
        for file in &self.inner.files {
            for number in file.facts()?.stamp? {
                hasher.update(&number.to_le_bytes());
            }
        }
        Some(ModelStamp(hasher.finalize().into()))
    }

    /// Whether all weight files are what they were when they were opened. Who reads them for some
    /// time asks afterwards: a file that is changed in place shows under the map.
    pub fn is_unchanged(&self) -> bool {
        self.facts().flatten().all(Facts::still_hold)
    }

    /// Whether all weight files are files, and `user` owns them.
    pub fn is_owned_by(&self, user: u32) -> bool {
        self.facts().all(|facts| facts.is_some_and(|facts| facts.owner == user))
    }

    /// Whether every user of this machine may read all weight files.
    pub fn is_public(&self) -> bool {
        self.facts().all(|facts| facts.is_some_and(|facts| facts.is_public))
    }

    fn facts(&self) -> impl Iterator<Item = Option<&Facts>> {
        self.inner.files.iter().map(FileBytes::facts)
    }

    /// Hash over all bytes of the weight files, at several gigabytes a second; computed once.
    pub fn content(&self) -> ContentHash {
        self.content_with(&mut |_| {})
    }

    /// As [`content`](Self::content); `on_bytes` hears how many bytes have been hashed.
    pub fn content_with(&self, on_bytes: &mut dyn FnMut(u64)) -> ContentHash {
        *self.inner.content.get_or_init(|| {
            let mut hasher = blake3::Hasher::new_derive_key("baton 2026 model content v1");
            let mut done = 0;
            for file in &self.inner.files {
                hasher.update(&(file.as_slice().len() as u64).to_le_bytes());
                for piece in file.as_slice().chunks(HASH_PIECE_BYTES) {
                    hasher.update(piece);
                    done += piece.len() as u64;
                    on_bytes(done);
                }
            }
            ContentHash(hasher.finalize().into())
        })
    }

    /// Spares [`content`](Self::content) its work: for who has hashed files of the same
    /// [`stamp`](Self::stamp) before. Without effect once it was computed.
    pub fn trust_content(&self, content: ContentHash) {
        self.inner.content.get_or_init(|| content);
    }

    /// Hash over weights, tokenizer and shape, but not over the model's name. Computed once; takes
    /// as long as [`content`](Self::content).
    pub fn fingerprint(&self) -> ModelFingerprint {
        *self.inner.fingerprint.get_or_init(|| {
            let spec = ModelSpec { name: String::new(), ..self.inner.spec.clone() };
            let mut hasher = blake3::Hasher::new_derive_key("baton 2026 model fingerprint v2");
            hasher.update(&self.content().0);
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

    fn from_gguf(
        path: Option<PathBuf>,
        bytes: FileBytes,
        name: &str,
    ) -> Result<Self, ModelFileError> {
        let parsed = gguf::Gguf::parse(bytes.as_slice(), name)?;
        let spec = gguf::read_spec(&parsed, &served_name(name))?;
        let tensors = gguf::find_tensors(&parsed, &spec)?;
        let artifacts = gguf::artifacts(&parsed, &spec)?;
        drop(parsed);
        Ok(Self::from_inner(Inner::new(path, vec![bytes], tensors, spec, artifacts)))
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
