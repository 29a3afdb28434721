//! GGUF, versions 2 and 3, little-endian.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. All counts are checked
//! against the file's size before anything is reserved, all arithmetic is checked.

mod cursor;
mod header;
mod llama;
mod metadata;
mod tensors;
mod value;
mod vocab;

pub(crate) use header::Gguf;
pub(crate) use llama::llama_spec;
pub(crate) use tensors::llama_tensors;
pub(crate) use vocab::artifacts;
