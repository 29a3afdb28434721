//! GGUF, versions 2 and 3, little-endian.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. All counts are checked
//! against the file's size before anything is reserved, all arithmetic is checked.

mod arch;
mod cursor;
mod features;
mod header;
mod metadata;
mod rope;
mod shape;
mod tensors;
mod value;
mod vocab;

pub(crate) use header::Gguf;
pub(crate) use shape::read_spec;
pub(crate) use tensors::find_tensors;
pub(crate) use vocab::artifacts;
