//! What sets an architecture's layers apart from Llama's.

use baton_types::{
    Activation, Experts, ModelFamily, ModelFeatures, RopeScaling, RopeSpec, SlidingWindow,
};

use super::arch::Arch;
use crate::ModelFileError;
use crate::spec::MAX_LAYERS;

/// Gemma 3: each sixth layer sees everything, and the others rotate by this base.
const GEMMA3_PATTERN: usize = 6;
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;
/// The one size of Gemma 3 (27B) whose scores are scaled by the width of the model; the files do
/// not say so, and llama.cpp tells it by its layers as well.
const GEMMA3_27B_LAYERS: usize = 62;
/// `expert_gating_func`: softmax over all experts.
const GATING_SOFTMAX: usize = 1;

/// # Errors
/// For keys of the wrong type, and for values that would need another computation.
pub(super) fn features(
    arch: Arch<'_>,
    rope: &RopeSpec,
    hidden: usize,
    heads: usize,
) -> Result<ModelFeatures, ModelFileError> {
    refuse_unsupported(arch)?;
    let plain = ModelFeatures {
        window: window(arch, rope)?,
        experts: experts(arch)?,
        ..ModelFeatures::default()
    };
    Ok(match arch.family {
        ModelFamily::Llama | ModelFamily::Mixtral | ModelFamily::Phi3 => plain,
        ModelFamily::Qwen2 => ModelFeatures { qkv_bias: true, ..plain },
        ModelFamily::Qwen3 | ModelFamily::Qwen3Moe => ModelFeatures { qk_norm: true, ..plain },
        ModelFamily::Gemma3 => {
            let by_width = arch.need_size("block_count")? == GEMMA3_27B_LAYERS;
            ModelFeatures {
                qk_norm: true,
                post_norms: true,
                activation: Activation::GeluTanh,
                embedding_scale: Some((hidden as f32).sqrt()),
                query_scalar: by_width.then(|| hidden.checked_div(heads).unwrap_or(0) as f32),
                ..plain
            }
        }
    })
}

/// Of one expert where there are several.
///
/// # Errors
/// When the key is missing or of the wrong type.
pub(super) fn feed_forward_width(arch: Arch<'_>) -> Result<usize, ModelFileError> {
    if matches!(arch.family, ModelFamily::Mixtral | ModelFamily::Qwen3Moe)
        && let Some(width) = arch.size("expert_feed_forward_length")?
    {
        return Ok(width);
    }
    arch.need_size("feed_forward_length")
}

/// Keys that would change the numbers, but for the values that do not.
fn refuse_unsupported(arch: Arch<'_>) -> Result<(), ModelFileError> {
    let neutral: [(&str, &[f64]); 8] = [
        ("attn_logit_softcapping", &[0.0]),
        ("final_logit_softcapping", &[0.0]),
        ("attention.scale", &[0.0]),
        ("attention.clamp_kqv", &[0.0]),
        ("logit_scale", &[0.0, 1.0]),
        ("residual_scale", &[0.0, 1.0]),
        ("embedding_scale", &[0.0, 1.0]),
        ("rope.scaling.attn_factor", &[1.0]),
    ];
    for (name, harmless) in neutral {
        if let Some(value) = arch.float(name)?
            && !harmless.contains(&value)
        {
            let problem = format!("{value} is not supported, only {} is", harmless[0]);
            return Err(arch.bad_value(name, problem));
        }
    }
    match arch.flag("attention.causal")? {
        Some(false) => {
            let problem = "false: a token sees only those before it".to_owned();
            Err(arch.bad_value("attention.causal", problem))
        }
        _ => Ok(()),
    }
}

fn window(arch: Arch<'_>, rope: &RopeSpec) -> Result<Option<SlidingWindow>, ModelFileError> {
    let key = "attention.sliding_window";
    // More are refused afterwards.
    let layers = arch.need_size("block_count")?.min(MAX_LAYERS);
    let context = arch.need_size("context_length")?;
    if arch.family == ModelFamily::Gemma3 {
        let theta = arch.float("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_THETA);
        let rope = RopeSpec { dim: rope.dim, theta, scaling: RopeScaling::None };
        let layers = local_layers(arch, layers)?;
        return Ok(Some(SlidingWindow { tokens: arch.need_size(key)?, layers, rope }));
    }
    // A window that the context never fills changes nothing.
    let tokens = arch.size(key)?.filter(|tokens| *tokens > 0 && *tokens < context);
    match tokens {
        None => Ok(None),
        Some(tokens) if has_window_everywhere(arch.family) => {
            Ok(Some(SlidingWindow { tokens, layers: vec![true; layers], rope: rope.clone() }))
        }
        Some(tokens) => {
            let problem = format!("{tokens}: which layers have the window is not known");
            Err(arch.bad_value(key, problem))
        }
    }
}

fn has_window_everywhere(family: ModelFamily) -> bool {
    matches!(family, ModelFamily::Llama | ModelFamily::Mixtral | ModelFamily::Phi3)
}

/// The pattern is a period, whose last layer sees everything.
fn local_layers(arch: Arch<'_>, layers: usize) -> Result<Vec<bool>, ModelFileError> {
    let key = "attention.sliding_window_pattern";
    let pattern = arch.size(key)?.unwrap_or(GEMMA3_PATTERN);
    if pattern == 0 {
        return Err(arch.bad_value(key, "0 is no period".into()));
    }
    Ok((0..layers).map(|layer| (layer + 1) % pattern != 0).collect())
}

fn experts(arch: Arch<'_>) -> Result<Option<Experts>, ModelFileError> {
    let count = match arch.family {
        ModelFamily::Qwen3Moe => arch.need_size("expert_count")?,
        _ => arch.size("expert_count")?.unwrap_or(0),
    };
    if count == 0 && arch.family != ModelFamily::Qwen3Moe {
        return Ok(None);
    }
    if !matches!(arch.family, ModelFamily::Mixtral | ModelFamily::Qwen3Moe) {
        let problem = format!("{count} experts of this architecture are not supported");
        return Err(arch.bad_value("expert_count", problem));
    }
    let gating = arch.size("expert_gating_func")?.unwrap_or(GATING_SOFTMAX);
    if gating != GATING_SOFTMAX {
        let problem = format!("{gating} is not supported, only {GATING_SOFTMAX} (softmax) is");
        return Err(arch.bad_value("expert_gating_func", problem));
    }
    let normalize_weights = arch.flag("expert_weights_norm")?.unwrap_or(true);
    Ok(Some(Experts { count, used: arch.need_size("expert_used_count")?, normalize_weights }))
}
