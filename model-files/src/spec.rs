//! What both formats ask of a model's shape.

use baton_types::{ModelSpec, RopeScaling, RopeSpec};

use crate::ModelFileError;

pub(crate) const MAX_LAYERS: usize = 4096;
const MAX_WIDTH: usize = 1 << 20;
const MAX_VOCAB: usize = 1 << 24;
const MAX_CONTEXT: usize = 1 << 24;
const MAX_HEAD_DIM: usize = 1024;
const MAX_EXPERTS: usize = 1024;
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
    key_of: impl Fn(&str) -> String,
) -> Result<(), ModelFileError> {
    let fail = |field: &str, problem: String| {
        Err(ModelFileError::KeyValue { file: file.to_owned(), key: key_of(field), problem })
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
            let step = if multiple > 1 { format!(", a multiple of {multiple}") } else { "".into() };
            return fail(field, format!("{value} is out of bounds: 1 to {most}{step}"));
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
    let windowed = spec.features.window.as_ref();
    for rope in [Some(&spec.rope), windowed.map(|window| &window.rope)].into_iter().flatten() {
        check_rope(rope, spec.head_dim).or_else(|(field, problem)| fail(field, problem))?;
    }
    if let Some(window) = windowed {
        assert_eq!(window.layers.len(), spec.layers);
        if window.tokens == 0 || window.tokens > MAX_CONTEXT {
            return fail("window", format!("{} is not in 1..={MAX_CONTEXT}", window.tokens));
        }
    }
    if let Some(experts) = &spec.features.experts {
        if experts.count == 0 || experts.count > MAX_EXPERTS {
            return fail("experts.count", format!("{} is not in 1..={MAX_EXPERTS}", experts.count));
        }
        if experts.used == 0 || experts.used > experts.count {
            let problem = format!("{} is not in 1..={}", experts.used, experts.count);
            return fail("experts.used", problem);
        }
    }
    match spec.features.query_scalar {
        Some(scalar) if !(scalar > 0.0 && scalar.is_finite()) => {
            fail("query_scalar", format!("{scalar} is not above 0"))
        }
        _ => Ok(()),
    }
}

/// The field that is wrong, and how.
fn check_rope(rope: &RopeSpec, head_dim: usize) -> Result<(), (&'static str, String)> {
    if !(rope.theta >= 1.0 && rope.theta < 1e12) {
        return Err(("rope.theta", format!("{} is not between 1 and 1e12", rope.theta)));
    }
    if rope.dim == 0 || !rope.dim.is_multiple_of(2) || rope.dim > head_dim {
        return Err(("rope.dim", format!("{} is not an even number up to {head_dim}", rope.dim)));
    }
    check_scaling(&rope.scaling).map_err(|problem| ("rope.scaling", problem))
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
