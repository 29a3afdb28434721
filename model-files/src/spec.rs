//! What both formats ask of a model's shape, and the shapes that follow from it.

use baton_types::{ModelSpec, RopeScaling};

use crate::ModelFileError;
use crate::tensor::{LayerTensor, TensorRole};

const MAX_LAYERS: usize = 4096;
const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_CONTEXT: usize = 1 << 24;
const MAX_HEAD_DIM: usize = 1024;
/// Kernels work on panels of 32 rows and blocks of 32 columns.
const WIDTH_MULTIPLE: usize = 32;
const HEAD_DIM_MULTIPLE: usize = 16;

/// Checks every hyperparameter; `key_of` gives the name under which `file` keeps a field.
///
/// # Errors
/// `KeyValue` for the first field that no model of the family can have.
pub(crate) fn check_spec(
    spec: &ModelSpec,
    file: &str,
    key_of: impl Fn(&str) -> &'static str,
) -> Result<(), ModelFileError> {
    let fail = |field: &str, problem: String| {
        Err(ModelFileError::KeyValue {
            file: file.to_owned(),
            key: key_of(field).to_owned(),
            problem,
        })
    };
    let sizes = [
        ("layers", spec.layers, MAX_LAYERS, 1),
        ("hidden", spec.hidden, MAX_WIDTH, WIDTH_MULTIPLE),
        ("heads", spec.heads, MAX_WIDTH / 16, 1),
        ("kv_heads", spec.kv_heads, MAX_WIDTH / 16, 1),
        ("head_dim", spec.head_dim, MAX_HEAD_DIM, HEAD_DIM_MULTIPLE),
        ("ffn", spec.ffn, MAX_WIDTH, WIDTH_MULTIPLE),
        ("vocab", spec.vocab, MAX_VOCAB, 1),
        ("context_tokens", spec.context_tokens, MAX_CONTEXT, 1),
    ];
    for (field, value, most, multiple) in sizes {
        if value == 0 || value > most || value % multiple != 0 {
            return fail(field, format!("{value} is no multiple of {multiple} in 1..={most}"));
        }
    }
    if !spec.heads.is_multiple_of(spec.kv_heads) {
        let (kv_heads, heads) = (spec.kv_heads, spec.heads);
        return fail("kv_heads", format!("{heads} query heads do not divide into {kv_heads}"));
    }
    let query_width = spec.heads * spec.head_dim;
    if !query_width.is_multiple_of(WIDTH_MULTIPLE) || query_width > MAX_WIDTH {
        return fail("heads", format!("heads times head size, {query_width}, is not supported"));
    }
    if !(spec.norm_eps > 0.0 && spec.norm_eps < 1.0) {
        return fail("norm_eps", format!("{} is not between 0 and 1", spec.norm_eps));
    }
    if !(spec.rope.theta >= 1.0 && spec.rope.theta < 1e12) {
        return fail("rope.theta", format!("{} is not between 1 and 1e12", spec.rope.theta));
    }
    if spec.rope.dim == 0 || !spec.rope.dim.is_multiple_of(2) || spec.rope.dim > spec.head_dim {
        let (dim, head_dim) = (spec.rope.dim, spec.head_dim);
        return fail("rope.dim", format!("{dim} is not an even number up to {head_dim}"));
    }
    match check_scaling(&spec.rope.scaling) {
        Ok(()) => Ok(()),
        Err(problem) => fail("rope.scaling", problem),
    }
}

fn check_scaling(scaling: &RopeScaling) -> Result<(), String> {
    let factor_ok = |factor: f64| (1.0..1e6).contains(&factor);
    match *scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor } if factor_ok(factor) => Ok(()),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. }
            if factor_ok(factor)
                && low_freq_factor > 0.0
                && high_freq_factor > low_freq_factor
                && high_freq_factor < 1e6 =>
        {
            Ok(())
        }
        ref absurd => Err(format!("{absurd:?} is absurd")),
    }
}

/// By how much Llama 3's scaling divides the frequency of dimension pair `pair`.
///
/// Source: `_compute_llama3_parameters` in Hugging Face's transformers.
pub fn llama3_factor(
    pair: usize,
    dim: usize,
    theta: f64,
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_context_tokens: usize,
) -> f64 {
    let wavelength = std::f64::consts::TAU * libm::pow(theta, 2.0 * pair as f64 / dim as f64);
    let turns = original_context_tokens as f64 / wavelength;
    if turns > high_freq_factor {
        1.0
    } else if turns < low_freq_factor {
        factor
    } else {
        let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}

/// All tensors that a model of this shape has.
pub(crate) fn all_roles(spec: &ModelSpec) -> impl Iterator<Item = TensorRole> {
    let output = (!spec.tied_embeddings).then_some(TensorRole::Output);
    let layers = (0..spec.layers)
        .flat_map(|layer| LayerTensor::ALL.map(|tensor| TensorRole::Layer(layer, tensor)));
    [TensorRole::Embedding, TensorRole::FinalNorm].into_iter().chain(output).chain(layers)
}

/// `(rows, cols)` of a tensor; a vector is one row.
pub(crate) fn role_shape(role: TensorRole, spec: &ModelSpec) -> (usize, usize) {
    let (query_width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    match role {
        TensorRole::Embedding | TensorRole::Output => (spec.vocab, spec.hidden),
        TensorRole::FinalNorm => (1, spec.hidden),
        TensorRole::Layer(_, tensor) => match tensor {
            LayerTensor::AttnNorm | LayerTensor::FfnNorm => (1, spec.hidden),
            LayerTensor::Q => (query_width, spec.hidden),
            LayerTensor::K | LayerTensor::V => (kv_width, spec.hidden),
            LayerTensor::AttnOut => (spec.hidden, query_width),
            LayerTensor::Gate | LayerTensor::Up => (spec.ffn, spec.hidden),
            LayerTensor::Down => (spec.hidden, spec.ffn),
        },
    }
}
