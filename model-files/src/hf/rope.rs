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
        let parameters = self.parameters(file, layers)?;
        let older = Fields::new(file, "rope_scaling", self.rope_scaling.as_ref())?;
        let (theta_key, theta, older) = match layers {
            Layers::Full => ("rope_theta", self.rope_theta, older),
            Layers::Sliding => {
                ("rope_local_base_freq", self.rope_local_base_freq, Fields { value: None, ..older })
            }
        };
        let theta = parameters.agreed("rope_theta", (theta_key, theta))?;
        let dim = (head_dim as f64 * self.rotated_part(parameters)?) as usize;
        let theta = theta.unwrap_or(self.default_theta(layers));
        Ok(RopeSpec { dim, theta, scaling: one_scaling(parameters, older)? })
    }

    /// The part of `rope_parameters` that speaks of `layers`.
    fn parameters<'a>(
        &'a self,
        file: &'a str,
        layers: Layers,
    ) -> Result<Fields<'a>, ModelFileError> {
        let name = "rope_parameters";
        let all = Fields::new(file, name, self.rope_parameters.as_ref())?;
        let (kind, other) = match layers {
            Layers::Full => ("full_attention", "sliding_attention"),
            Layers::Sliding => ("sliding_attention", "full_attention"),
        };
        let Some(object) = all.value.filter(|object| !object.is_empty()) else { return Ok(all) };
        match object.get(kind) {
            Some(nested) => Fields::new(file, name, Some(nested)),
            None if object.contains_key(other) => Fields::new(file, name, None),
            None if self.is_a("Gemma3ForCausalLM") => Err(ModelFileError::MissingKey {
                file: file.to_owned(),
                key: format!("{name}.{kind}"),
            }),
            None => Ok(all),
        }
    }

    /// How much of each head is rotated.
    fn rotated_part(&self, parameters: Fields<'_>) -> Result<f64, ModelFileError> {
        let key = "partial_rotary_factor";
        let part = parameters.agreed(key, (key, self.partial_rotary_factor))?.unwrap_or(1.0);
        if part == 1.0 || self.is_a("Phi3ForCausalLM") {
            return Ok(part);
        }
        let key = match self.partial_rotary_factor {
            Some(_) => key.to_owned(),
            None => format!("{}.{key}", parameters.name),
        };
        let problem = format!("{part}: partial rotation is not supported here");
        Err(ModelFileError::KeyValue { file: parameters.file.to_owned(), key, problem })
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

    /// The number under `key`, or that of an older key of `config.json` itself.
    fn agreed(self, key: &str, older: (&str, Option<f64>)) -> Result<Option<f64>, ModelFileError> {
        let number = self.number(key)?;
        Config::agreed(self.file, (&format!("{}.{key}", self.name), number), older)
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

/// The scaling that one of the two objects states, or both alike.
fn one_scaling(parameters: Fields<'_>, older: Fields<'_>) -> Result<RopeScaling, ModelFileError> {
    let (new, old) = (scaling_of(parameters)?, scaling_of(older)?);
    match (parameters.kind(), older.kind()) {
        (Some(_), Some(_)) if new != old => Err(ModelFileError::KeyValue {
            file: older.file.to_owned(),
            key: older.name.to_owned(),
            problem: format!("differs from {}; leave the wrong one out", parameters.name),
        }),
        (Some(_), _) => Ok(new),
        (None, _) => Ok(old),
    }
}

fn scaling_of(fields: Fields<'_>) -> Result<RopeScaling, ModelFileError> {
    let file = fields.file;
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
