//! What can be wrong with a model file: each variant names the file and the key or tensor.

use std::path::PathBuf;

/// A model file that Baton cannot read or serve.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    #[error(
        "cannot open {path}: {source}; give a .gguf file, or a folder with config.json, \
         tokenizer.json and *.safetensors"
    )]
    Open { path: PathBuf, source: std::io::Error },
    #[error(
        "{path} is not a model: it is no GGUF file (magic {found:?}); give a .gguf file or a \
         folder with config.json and *.safetensors"
    )]
    UnknownFormat { path: PathBuf, found: String },
    #[error(
        "{file}: GGUF version {version} is not supported, only 2 and 3 (little-endian) are; \
         convert the model again with a current converter"
    )]
    Version { file: String, version: u32 },
    #[error(
        "{file}: ends inside {what} ({need_bytes} bytes needed, {have_bytes} left); \
         download it again"
    )]
    Truncated { file: String, what: String, need_bytes: u64, have_bytes: u64 },
    #[error("{file}: {what} claims {count}, but at most {most} are possible; the file is damaged")]
    Count { file: String, what: String, count: u64, most: u64 },
    #[error("{file}: {what} is not UTF-8; the file is damaged")]
    Text { file: String, what: String },
    #[error("{file}: the name of {what} is empty; the file is damaged")]
    EmptyName { file: String, what: String },
    #[error("{file}: key {key} appears twice")]
    DuplicateKey { file: String, key: String },
    #[error("{file}: key {key} is missing; convert the model again with a current converter")]
    MissingKey { file: String, key: String },
    #[error("{file}: key {key} holds {got} where {want} is needed")]
    KeyType { file: String, key: String, want: &'static str, got: String },
    #[error("{file}: key {key}: {problem}")]
    KeyValue { file: String, key: String, problem: String },
    #[error("{file}: architecture {found:?} is not supported; supported: {supported}")]
    Architecture { file: String, found: String, supported: &'static str },
    #[error("{file}: tensor {tensor} appears twice")]
    DuplicateTensor { file: String, tensor: String },
    #[error("{file}: tensor {tensor} is missing")]
    MissingTensor { file: String, tensor: String },
    #[error(
        "{file}: tensor {tensor} is not part of this family as Baton computes it; serving the \
         model without it would change its answers"
    )]
    UnknownTensor { file: String, tensor: String },
    #[error(
        "{file}: tensor {tensor} has type {found}, which is not supported; supported: Q2_K, \
         Q3_K, Q4_K, Q5_K, Q6_K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, F16, BF16, F32 (requantise \
         with llama-quantize)"
    )]
    TensorType { file: String, tensor: String, found: String },
    #[error("{file}: tensor {tensor} has shape {got:?} [rows, columns] where {want:?} is needed")]
    TensorShape { file: String, tensor: String, want: Vec<u64>, got: Vec<u64> },
    #[error("{file}: tensor {tensor}: {problem}; the file is damaged or incomplete")]
    TensorRange { file: String, tensor: String, problem: String },
    #[error("{file}: {problem}")]
    Json { file: String, problem: String },
    #[error("{file}: {problem}")]
    Safetensors { file: String, problem: String },
}
