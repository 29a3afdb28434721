//! The architecture that a file names, and access to its keys.

use baton_types::ModelFamily;

use super::header::Gguf;
use crate::ModelFileError;

const KNOWN: [(&str, ModelFamily); 6] = [
    ("llama", ModelFamily::Llama),
    ("qwen2", ModelFamily::Qwen2),
    ("qwen3", ModelFamily::Qwen3),
    ("qwen3moe", ModelFamily::Qwen3Moe),
    ("gemma3", ModelFamily::Gemma3),
    ("phi3", ModelFamily::Phi3),
];
const SUPPORTED: &str = "llama (Llama, SmolLM2, Mistral, Mixtral), qwen2, qwen3, qwen3moe, gemma3, \
                         phi3";

/// A file's metadata under the prefix of its architecture.
#[derive(Clone, Copy)]
pub(super) struct Arch<'a> {
    pub(super) gguf: &'a Gguf<'a>,
    pub(super) family: ModelFamily,
    name: &'static str,
}

impl<'a> Arch<'a> {
    /// # Errors
    /// For an architecture that is missing or not known.
    pub(super) fn of(gguf: &'a Gguf<'a>) -> Result<Self, ModelFileError> {
        let key = "general.architecture";
        let found = gguf.text(key)?.ok_or_else(|| gguf.missing(key))?;
        let Some(&(name, family)) = KNOWN.iter().find(|(name, _)| *name == found) else {
            let (file, found) = (gguf.file.to_owned(), found.to_owned());
            return Err(ModelFileError::Architecture { file, found, supported: SUPPORTED });
        };
        let mut arch = Self { gguf, family, name };
        // Mixtral goes by the name of Llama.
        if family == ModelFamily::Llama && arch.size("expert_count")?.is_some_and(|n| n > 0) {
            arch.family = ModelFamily::Mixtral;
        }
        Ok(arch)
    }

    /// The whole key, e.g. `llama.block_count`.
    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.name)
    }

    pub(super) fn size(&self, name: &str) -> Result<Option<usize>, ModelFileError> {
        self.gguf.size(&self.key(name))
    }

    pub(super) fn need_size(&self, name: &str) -> Result<usize, ModelFileError> {
        self.gguf.need_size(&self.key(name))
    }

    pub(super) fn float(&self, name: &str) -> Result<Option<f64>, ModelFileError> {
        self.gguf.float(&self.key(name))
    }

    pub(super) fn need_float(&self, name: &str) -> Result<f64, ModelFileError> {
        self.float(name)?.ok_or_else(|| self.gguf.missing(&self.key(name)))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ModelFileError> {
        self.gguf.flag(&self.key(name))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ModelFileError> {
        self.gguf.text(&self.key(name))
    }

    pub(super) fn bad_value(&self, name: &str, problem: String) -> ModelFileError {
        self.gguf.bad_value(&self.key(name), problem)
    }
}
