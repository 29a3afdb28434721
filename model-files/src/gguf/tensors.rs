//! From tensor names to roles, with shapes checked.

use std::collections::{HashMap, HashSet};

use baton_types::{ModelFamily, ModelSpec};

use super::header::Gguf;
use crate::roles::{Source, all_roles, fused_rows, role_shape};
use crate::tensor::{ExpertTensor, LayerTensor, RowOrder, TensorRole};
use crate::{ModelFileError, model_file::Placed};

/// Tensors that are no weights of a layer: read elsewhere.
const OTHER_TENSORS: [&str; 1] = ["rope_freqs.weight"];

/// Finds every tensor that `spec` calls for.
///
/// # Errors
/// For tensors that are missing, misshapen or unknown.
pub(crate) fn find_tensors(
    gguf: &Gguf<'_>,
    spec: &ModelSpec,
) -> Result<HashMap<TensorRole, Placed>, ModelFileError> {
    let file = || gguf.file.to_owned();
    let mut placed = HashMap::new();
    let mut known: HashSet<String> = OTHER_TENSORS.map(str::to_owned).into();
    for role in all_roles(spec) {
        let source = source(role, spec);
        let Some(tensor) = gguf.tensors.get(source.tensor.as_str()) else {
            return Err(ModelFileError::MissingTensor { file: file(), tensor: source.tensor });
        };
        let (rows, cols) = role_shape(role, spec);
        let want = [source.stored_rows as u64, cols as u64];
        if [tensor.rows, tensor.cols] != want {
            let got = vec![tensor.rows, tensor.cols];
            let (tensor, want) = (source.tensor, want.to_vec());
            return Err(ModelFileError::TensorShape { file: file(), tensor, want, got });
        }
        let (dtype, row_order) = (tensor.dtype, row_order(role, spec));
        let bytes = source.bytes(tensor.bytes.start, dtype, (rows, cols));
        placed.insert(role, Placed { file: 0, dtype, rows, cols, row_order, bytes });
        known.insert(source.tensor);
    }
    match gguf.tensors.keys().find(|name| !known.contains(**name)) {
        None => Ok(placed),
        Some(&tensor) => {
            Err(ModelFileError::UnknownTensor { file: file(), tensor: tensor.to_owned() })
        }
    }
}

/// The converter reorders the rows of Q and K for the architecture `llama` alone.
fn row_order(role: TensorRole, spec: &ModelSpec) -> RowOrder {
    let is_reordered = matches!(spec.family, ModelFamily::Llama | ModelFamily::Mixtral);
    match role {
        TensorRole::Layer(_, LayerTensor::Q) if is_reordered => {
            RowOrder::InterleavedHeads { heads: spec.heads }
        }
        TensorRole::Layer(_, LayerTensor::K) if is_reordered => {
            RowOrder::InterleavedHeads { heads: spec.kv_heads }
        }
        _ => RowOrder::Plain,
    }
}

/// Names are llama.cpp's; the experts of a layer lie in one tensor, one below the other.
fn source(role: TensorRole, spec: &ModelSpec) -> Source {
    let (rows, _) = role_shape(role, spec);
    let (first_row, stored_rows) = fused_rows(role, spec).unwrap_or((0, rows));
    let whole = |tensor: String| Source { tensor, first_row, stored_rows };
    match role {
        TensorRole::Embedding => whole("token_embd.weight".into()),
        TensorRole::Output => whole("output.weight".into()),
        TensorRole::FinalNorm => whole("output_norm.weight".into()),
        TensorRole::Layer(layer, tensor) => {
            whole(format!("blk.{layer}.{}", layer_name(tensor, spec.family)))
        }
        TensorRole::Expert(layer, expert, tensor) => {
            let name = match tensor {
                ExpertTensor::Gate => "ffn_gate_exps",
                ExpertTensor::Up => "ffn_up_exps",
                ExpertTensor::Down => "ffn_down_exps",
            };
            let count = spec.features.experts.map_or(0, |experts| experts.count);
            let tensor = format!("blk.{layer}.{name}.weight");
            Source { tensor, first_row: expert * rows, stored_rows: count * rows }
        }
    }
}

fn layer_name(tensor: LayerTensor, family: ModelFamily) -> &'static str {
    let is_fused = family == ModelFamily::Phi3;
    match tensor {
        LayerTensor::Q | LayerTensor::K | LayerTensor::V if is_fused => "attn_qkv.weight",
        LayerTensor::Gate if is_fused => "ffn_up.weight",
        LayerTensor::AttnNorm => "attn_norm.weight",
        LayerTensor::Q => "attn_q.weight",
        LayerTensor::K => "attn_k.weight",
        LayerTensor::V => "attn_v.weight",
        LayerTensor::QBias => "attn_q.bias",
        LayerTensor::KBias => "attn_k.bias",
        LayerTensor::VBias => "attn_v.bias",
        LayerTensor::QNorm => "attn_q_norm.weight",
        LayerTensor::KNorm => "attn_k_norm.weight",
        LayerTensor::AttnOut => "attn_output.weight",
        LayerTensor::PostAttnNorm => "post_attention_norm.weight",
        LayerTensor::FfnNorm => "ffn_norm.weight",
        LayerTensor::Router => "ffn_gate_inp.weight",
        LayerTensor::Gate => "ffn_gate.weight",
        LayerTensor::Up => "ffn_up.weight",
        LayerTensor::Down => "ffn_down.weight",
        LayerTensor::PostFfnNorm => "post_ffw_norm.weight",
    }
}
