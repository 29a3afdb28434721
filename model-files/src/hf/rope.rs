//! Rotation from `config.json`.

use baton_types::{RopeScaling, RopeSpec};
use serde_json::{Map, Value};

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
        let parameters = Fields::new(file, "rope_parameters", parameters)?;
        let older = Fields::new(file, "rope_scaling", self.rope_scaling.as_ref())?;
        let (theta, scaling) = match layers {
            Layers::Full if parameters.kind().is_none() => (self.rope_theta, older),
            Layers::Full => (self.rope_theta, parameters),
            Layers::Sliding => (self.rope_local_base_freq, parameters),
        };
        let theta = match theta {
            Some(theta) => Some(theta),
            None => parameters.number("rope_theta")?,
        };
        let partial = match self.partial_rotary_factor {
            Some(partial) => Some(partial),
            None => parameters.number("partial_rotary_factor")?,
        };
        let dim = (head_dim as f64 * partial.unwrap_or(1.0)) as usize;
        let theta = theta.unwrap_or(self.default_theta(layers));
        Ok(RopeSpec { dim, theta, scaling: scaling_of(file, scaling)? })
    }
}

/// One of the two objects that speak of rotation.
#[derive(Clone, Copy)]
struct Fields<'a> {
    file: &'a str,
    name: &'static str,
    value: Option<&'a Map<String, Value>>,
}

impl<'a> Fields<'a> {
    fn new(
        file: &'a str,
        name: &'static str,
        value: Option<&'a Value>,
    ) -> Result<Self, ModelFileError> {
        let value = match value {
            None | Some(Value::Null) => None,
            Some(Value::Object(object)) => Some(object),
            Some(other) => return Err(wrong_type(file, name.into(), "an object", other)),
        };
        Ok(Self { file, name, value })
    }

    fn kind(self) -> Option<&'a Value> {
        let object = self.value?;
        object.get("rope_type").or_else(|| object.get("type")).filter(|kind| !kind.is_null())
    }

    fn number(self, key: &str) -> Result<Option<f64>, ModelFileError> {
        match self.value.and_then(|object| object.get(key)).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| {
                wrong_type(self.file, format!("{}.{key}", self.name), "a number", value)
            }),
        }
    }
}

fn wrong_type(file: &str, key: String, want: &'static str, got: &Value) -> ModelFileError {
    ModelFileError::KeyType { file: file.to_owned(), key, want, got: got.to_string() }
}

fn scaling_of(file: &str, fields: Fields<'_>) -> Result<RopeScaling, ModelFileError> {
    let missing = |key: &str| ModelFileError::MissingKey {
        file: file.to_owned(),
        key: format!("{}.{key}", fields.name),
    };
    let need = |key: &str| fields.number(key)?.ok_or_else(|| missing(key));
    let kind = match fields.kind() {
        // Scaled by nobody knows what.
        None if fields.number("factor")?.is_some() => return Err(missing("rope_type")),
        None => Some("default"),
        Some(kind) => kind.as_str(),
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
            key: format!("{}.rope_type", fields.name),
            problem: format!(
                "{} is not supported; supported: default, linear, llama3",
                other.unwrap_or("no text")
            ),
        }),
    }
}
