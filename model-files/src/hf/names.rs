//! The names of tensors in Hugging Face's checkpoints.

use baton_types::{ModelFamily, ModelSpec};

use crate::roles::{Source, fused_rows, role_shape};
use crate::tensor::{ExpertTensor, LayerTensor, TensorRole};

/// Where a part lies.
pub(super) fn source(role: TensorRole, spec: &ModelSpec) -> Source {
    let (rows, _) = role_shape(role, spec);
    let (first_row, stored_rows) = fused_rows(role, spec).unwrap_or((0, rows));
    let tensor = match role {
        TensorRole::Embedding => "model.embed_tokens.weight".into(),
        TensorRole::Output => "lm_head.weight".into(),
        TensorRole::FinalNorm => "model.norm.weight".into(),
        TensorRole::Layer(layer, tensor) => {
            format!("model.layers.{layer}.{}", layer_name(tensor, spec.family))
        }
        TensorRole::Expert(layer, expert, tensor) => {
            let (experts, name) = expert_name(tensor, spec.family);
            format!("model.layers.{layer}.{experts}.{expert}.{name}.weight")
        }
    };
    Source { tensor, first_row, stored_rows }
}

fn layer_name(tensor: LayerTensor, family: ModelFamily) -> &'static str {
    let is_fused = family == ModelFamily::Phi3;
    let is_gemma = family == ModelFamily::Gemma3;
    match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V if is_fused => "self_attn.qkv_proj.weight",
        LayerTensor::Gate | LayerTensor::Up if is_fused => "mlp.gate_up_proj.weight",
        // Elsewhere this name is what stands before the feed-forward layer.
        LayerTensor::FfnNorm if is_gemma => "pre_feedforward_layernorm.weight",
        LayerTensor::Router if family == ModelFamily::Mixtral => "block_sparse_moe.gate.weight",
        LayerTensor::AttnNorm => "input_layernorm.weight",
        LayerTensor::Q => "self_attn.q_proj.weight",
        LayerTensor::K => "self_attn.k_proj.weight",
        LayerTensor::V => "self_attn.v_proj.weight",
        LayerTensor::QBias => "self_attn.q_proj.bias",
        LayerTensor::KBias => "self_attn.k_proj.bias",
        LayerTensor::VBias => "self_attn.v_proj.bias",
        LayerTensor::QNorm => "self_attn.q_norm.weight",
        LayerTensor::KNorm => "self_attn.k_norm.weight",
        LayerTensor::AttnOut => "self_attn.o_proj.weight",
        LayerTensor::PostAttnNorm | LayerTensor::FfnNorm => "post_attention_layernorm.weight",
        LayerTensor::Router => "mlp.gate.weight",
        LayerTensor::Gate => "mlp.gate_proj.weight",
        LayerTensor::Up => "mlp.up_proj.weight",
        LayerTensor::Down => "mlp.down_proj.weight",
        LayerTensor::PostFfnNorm => "post_feedforward_layernorm.weight",
    }
}

/// The list of experts, and the part of one.
fn expert_name(tensor: ExpertTensor, family: ModelFamily) -> (&'static str, &'static str) {
    if family == ModelFamily::Mixtral {
        let name = match tensor {
            ExpertTensor::Gate => "w1",
            ExpertTensor::Up => "w3",
            ExpertTensor::Down => "w2",
        };
        return ("block_sparse_moe.experts", name);
    }
    let name = match tensor {
        ExpertTensor::Gate => "gate_proj",
        ExpertTensor::Up => "up_proj",
        ExpertTensor::Down => "down_proj",
    };
    ("mlp.experts", name)
}
