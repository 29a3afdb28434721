//! Readers of model files: GGUF, and folders in Hugging Face's form (`config.json`, safetensors,
//! `tokenizer.json`).
//!
//! It owns the trust boundary: what comes out has been checked for bounds, shapes and sane
//! hyperparameters, so that the engine indexes without asking again. It computes nothing and
//! never panics on a file's content.

mod error;
mod gguf;
mod hf;
mod map;
mod model_file;
mod roles;
mod spec;
mod tensor;

pub use error::ModelFileError;
pub use model_file::{ContentHash, ModelFile, ModelStamp};
pub use spec::llama3_factor;
pub use tensor::{ExpertTensor, LayerTensor, RowOrder, TensorDtype, TensorRole, TensorView};
