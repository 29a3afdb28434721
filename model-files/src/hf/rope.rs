//! Rotation from `config.json`.

use baton_types::{RopeScaling, RopeSpec};
use serde_json::Value;

use super::config::Config;
use crate::ModelFileError;

/// Which of a configuration's rotations is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layers {
    Full,
    Sliding,
}

impl Config {
    /// transformers 5 keeps everything in `rope_parameters`, Gemma's under the kind of layer;
    /// before, the base was a field of its own and the scaling was `rope_scaling`.
    ///
    /// # Errors
    /// For scalings that are not supported, and for fields that are missing.
    pub(super) fn rope(
        &self,
        file: &str,
        head_dim: usize,
        layers: Layers,
    ) -> Result<RopeSpec, ModelFileError> {
        let kind = match layers {
            Layers::Full => "full_attention",
            Layers::Sliding => "sliding_attention",
        };
        let parameters = self.rope_parameters.as_ref().map(|all| all.get(kind).unwrap_or(all));
        let new_theta = parameters.and_then(|p| p.get("rope_theta")?.as_f64());
        let (theta, scaling) = match layers {
            Layers::Full => (self.rope_theta, parameters.or(self.rope_scaling.as_ref())),
            Layers::Sliding => (self.rope_local_base_freq, parameters),
        };
        let default_theta = self.default_theta(layers);
        let partial = self
            .partial_rotary_factor
            .or_else(|| parameters.and_then(|p| p.get("partial_rotary_factor")?.as_f64()));
        let dim = (head_dim as f64 * partial.unwrap_or(1.0)) as usize;
        let theta = theta.or(new_theta).unwrap_or(default_theta);
        Ok(RopeSpec { dim, theta, scaling: scaling_of(file, scaling)? })
    }
}

fn scaling_of(file: &str, parameters: Option<&Value>) -> Result<RopeScaling, ModelFileError> {
    let number = |key: &str| parameters?.get(key)?.as_f64();
    let kind = parameters
        .and_then(|p| p.get("rope_type").or_else(|| p.get("type")))
        .map_or(Some("default"), Value::as_str);
    let need = |key: &str| {
        number(key).ok_or_else(|| ModelFileError::MissingKey {
            file: file.to_owned(),
            key: format!("rope_scaling.{key}"),
        })
    };
    match kind {
        Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: need("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_context_tokens: need("original_max_position_embeddings")? as usize,
        }),
        other => Err(ModelFileError::KeyValue {
            file: file.to_owned(),
            key: "rope_scaling.rope_type".into(),
            problem: format!(
                "{} is not supported; supported: default, linear, llama3",
                other.unwrap_or("no text")
            ),
        }),
    }
}
