//! The sliding window of `config.json`, and which layers have it.

use baton_types::{ModelFamily, RopeSpec, SlidingWindow};

use super::config::Config;
use super::rope::Layers;
use crate::ModelFileError;
use crate::spec::MAX_LAYERS;

/// What transformers takes where a configuration of a kind that has a window does not say.
const WINDOW_TOKENS: usize = 4096;
const QWEN_FIRST_LAYER: usize = 28;
/// Gemma 3: each sixth layer sees everything.
const GEMMA3_PATTERN: usize = 6;

impl Config {
    /// # Errors
    /// For kinds of attention that are not supported, and for keys that contradict one another.
    pub(super) fn window(
        &self,
        file: &str,
        family: ModelFamily,
        rope: &RopeSpec,
    ) -> Result<Option<SlidingWindow>, ModelFileError> {
        let layers = self.sliding_layers(file, family)?;
        let Some(tokens) = self.window_tokens(file, family)? else { return Ok(None) };
        if family == ModelFamily::Gemma3 {
            let rope = self.rope(file, rope.dim, Layers::Sliding)?;
            return Ok(Some(SlidingWindow { tokens, layers, rope }));
        }
        // A window that the context never fills changes nothing.
        let is_used = tokens < self.max_position_embeddings && layers.contains(&true);
        Ok(is_used.then(|| SlidingWindow { tokens, layers, rope: rope.clone() }))
    }

    /// The family's window, as transformers reads it: Llama has none whatever the key says.
    fn window_tokens(
        &self,
        file: &str,
        family: ModelFamily,
    ) -> Result<Option<usize>, ModelFileError> {
        let stated = self.sliding_window;
        match family {
            ModelFamily::Llama if self.is_a("MistralForCausalLM") => {
                Ok(stated.unwrap_or(Some(WINDOW_TOKENS)))
            }
            ModelFamily::Llama => Ok(None),
            ModelFamily::Mixtral | ModelFamily::Phi3 => Ok(stated.flatten()),
            ModelFamily::Qwen2 | ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => {
                let is_on = self.use_sliding_window.unwrap_or(false);
                Ok(stated.unwrap_or(Some(WINDOW_TOKENS)).filter(|_| is_on))
            }
            ModelFamily::Gemma3 => {
                let (file, key) = (file.to_owned(), "sliding_window".to_owned());
                let missing = || ModelFileError::MissingKey { file, key };
                stated.flatten().ok_or_else(missing).map(Some)
            }
        }
    }

    fn sliding_layers(&self, file: &str, family: ModelFamily) -> Result<Vec<bool>, ModelFileError> {
        let refuse = |problem| {
            let (file, key) = (file.to_owned(), "layer_types".to_owned());
            ModelFileError::KeyValue { file, key, problem }
        };
        // More layers are refused afterwards.
        let count = self.num_hidden_layers.min(MAX_LAYERS);
        if let Some(types) = &self.layer_types {
            if types.len() < count {
                return Err(refuse(format!("{} entries for {count} layers", types.len())));
            }
            let slides = types[..count].iter().map(|kind| match kind.as_str() {
                "sliding_attention" => Ok(true),
                "full_attention" => Ok(false),
                other => Err(refuse(format!(
                    "{other} is not supported; supported: full_attention, sliding_attention"
                ))),
            });
            return slides.collect();
        }
        Ok(match family {
            ModelFamily::Gemma3 => {
                let older = ("_sliding_window_pattern", self.older_window_pattern);
                let period = ("sliding_window_pattern", self.sliding_window_pattern);
                let period = Self::agreed(file, period, older)?.unwrap_or(GEMMA3_PATTERN).max(1);
                (0..count).map(|layer| (layer + 1) % period != 0).collect()
            }
            ModelFamily::Qwen2 | ModelFamily::Qwen3 => {
                let first = self.max_window_layers.unwrap_or(QWEN_FIRST_LAYER);
                (0..count).map(|layer| layer >= first).collect()
            }
            _ => vec![true; count],
        })
    }
}
