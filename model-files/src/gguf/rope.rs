//! Rotation from the metadata of an architecture.

use baton_types::{ModelFamily, RopeScaling, RopeSpec};

use super::arch::Arch;
use crate::spec::llama3_factor;
use crate::{ModelFileError, TensorDtype};

/// How far a file's frequency factors may lie from Llama 3's formula.
const FACTOR_TOLERANCE: f64 = 1e-3;

/// The rotation of layers without a sliding window.
///
/// # Errors
/// For keys of the wrong type, and for scalings that are not supported.
pub(super) fn rope(arch: Arch<'_>, head_dim: usize) -> Result<RopeSpec, ModelFileError> {
    let dim_key = "rope.dimension_count";
    let dim = arch.size(dim_key)?.unwrap_or(head_dim);
    let is_reordered = matches!(arch.family, ModelFamily::Llama | ModelFamily::Mixtral);
    if dim != head_dim && is_reordered {
        let problem = format!("{dim} of {head_dim} dimensions: partial rotation in GGUF's order");
        return Err(arch.bad_value(dim_key, format!("{problem} is not supported")));
    }
    let theta = arch.float("rope.freq_base")?.unwrap_or(10_000.0);
    Ok(RopeSpec { dim, theta, scaling: rope_scaling(arch, dim, theta)? })
}

fn rope_scaling(arch: Arch<'_>, dim: usize, theta: f64) -> Result<RopeScaling, ModelFileError> {
    refuse_longrope(arch)?;
    let named = named_scaling(arch)?;
    let Some(llama3) = llama3_scaling(arch, dim, theta)? else { return Ok(named) };
    match named {
        RopeScaling::None => Ok(llama3),
        other => {
            let problem = format!("{other:?} beside rope_freqs.weight is not supported");
            Err(arch.bad_value("rope.scaling.factor", problem))
        }
    }
}

/// The scaling that the keys state; like llama.cpp's, it is linear where they name no type.
fn named_scaling(arch: Arch<'_>) -> Result<RopeScaling, ModelFileError> {
    let key = "rope.scaling.type";
    // The second is the older name.
    let factor = match arch.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => arch.float("rope.scale_linear")?,
    };
    match arch.text(key)? {
        Some("none") => Ok(RopeScaling::None),
        None => {
            let factor = factor.filter(|factor| ![0.0, 1.0].contains(factor));
            Ok(factor.map_or(RopeScaling::None, |factor| RopeScaling::Linear { factor }))
        }
        Some("linear") => match factor {
            Some(factor) => Ok(RopeScaling::Linear { factor }),
            None => Err(arch.gguf.missing(&arch.key("rope.scaling.factor"))),
        },
        Some(other) => Err(arch.bad_value(
            key,
            format!("{other:?} is not supported; supported: none, linear, and Llama 3's"),
        )),
    }
}

/// Its frequencies depend on the length of the text, so that a token's keys would change when the
/// text grows past the trained context.
fn refuse_longrope(arch: Arch<'_>) -> Result<(), ModelFileError> {
    let name = "rope_factors_long.weight";
    if !arch.gguf.tensors.contains_key(name) {
        return Ok(());
    }
    let problem = format!(
        "longrope ({name}) is not supported; take a variant of the model with the shorter context"
    );
    Err(arch.bad_value("rope.scaling.original_context_length", problem))
}

/// GGUF carries Llama 3's scaling as divisors of the frequencies, `rope_freqs.weight[dim / 2]`;
/// its parameters are found again from them.
fn llama3_scaling(
    arch: Arch<'_>,
    dim: usize,
    theta: f64,
) -> Result<Option<RopeScaling>, ModelFileError> {
    let (gguf, name) = (arch.gguf, "rope_freqs.weight");
    let Some(tensor) = gguf.tensors.get(name) else { return Ok(None) };
    let (want, got) = (vec![1, dim as u64 / 2], vec![tensor.rows, tensor.cols]);
    if want != got {
        let (file, tensor) = (gguf.file.to_owned(), name.to_owned());
        return Err(ModelFileError::TensorShape { file, tensor, want, got });
    }
    if tensor.dtype != TensorDtype::F32 {
        let found = format!("{:?} (F32 is needed)", tensor.dtype);
        let (file, tensor) = (gguf.file.to_owned(), name.to_owned());
        return Err(ModelFileError::TensorType { file, tensor, found });
    }
    let factors: Vec<f64> = gguf.bytes[tensor.bytes.clone()]
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f64::from(f32::from_le_bytes(*bytes)))
        .collect();
    let factor = factors.iter().copied().fold(1.0, f64::max);
    let original = arch.size("rope.scaling.original_context_length")?;
    let original_context_tokens = original.unwrap_or(8192);
    let fits = factors.iter().enumerate().all(|(i, &found)| {
        let want = llama3_factor(i, dim, theta, factor, 1.0, 4.0, original_context_tokens);
        (found / want - 1.0).abs() < FACTOR_TOLERANCE
    });
    if !fits {
        return Err(ModelFileError::TensorRange {
            file: gguf.file.to_owned(),
            tensor: name.to_owned(),
            problem: "its factors are not those of Llama 3's scaling (1, 4, 8192), the only \
                      ones supported"
                .into(),
        });
    }
    Ok(Some(RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context_tokens,
    }))
}
