//! From tensor names to roles, with shapes checked.

use std::collections::HashMap;

use baton_types::ModelSpec;

use super::header::Gguf;
use crate::spec::{all_roles, role_shape};
use crate::tensor::{LayerTensor, RowOrder, TensorRole};
use crate::{ModelFileError, model_file::Placed};

/// Tensors that are no weights of a layer: read elsewhere.
const OTHER_TENSORS: [&str; 1] = ["rope_freqs.weight"];

/// Finds every tensor that `spec` calls for.
///
/// # Errors
/// For tensors that are missing, misshapen or unknown.
pub(crate) fn llama_tensors(
    gguf: &Gguf<'_>,
    spec: &ModelSpec,
) -> Result<HashMap<TensorRole, Placed>, ModelFileError> {
    let mut placed = HashMap::new();
    let mut used = 0;
    for role in all_roles(spec) {
        let name = tensor_name(role);
        let file = || gguf.file.to_owned();
        let Some(tensor) = gguf.tensors.get(name.as_str()) else {
            return Err(ModelFileError::MissingTensor { file: file(), tensor: name });
        };
        let (rows, cols) = role_shape(role, spec);
        if (tensor.rows, tensor.cols) != (rows as u64, cols as u64) {
            return Err(ModelFileError::TensorShape {
                file: file(),
                tensor: name,
                want: vec![rows as u64, cols as u64],
                got: vec![tensor.rows, tensor.cols],
            });
        }
        used += 1;
        let (dtype, row_order) = (tensor.dtype, row_order(role, spec));
        let bytes = tensor.bytes.clone();
        placed.insert(role, Placed { file: 0, dtype, rows, cols, row_order, bytes });
    }
    if used < gguf.tensors.len() {
        refuse_unknown(gguf, spec)?;
    }
    Ok(placed)
}

fn refuse_unknown(gguf: &Gguf<'_>, spec: &ModelSpec) -> Result<(), ModelFileError> {
    let known: Vec<String> = all_roles(spec).map(tensor_name).collect();
    for &name in gguf.tensors.keys() {
        if !OTHER_TENSORS.contains(&name) && !known.iter().any(|known| known == name) {
            let (file, tensor) = (gguf.file.to_owned(), name.to_owned());
            return Err(ModelFileError::UnknownTensor { file, tensor });
        }
    }
    Ok(())
}

fn row_order(role: TensorRole, spec: &ModelSpec) -> RowOrder {
    match role {
        TensorRole::Layer(_, LayerTensor::Q) => RowOrder::InterleavedHeads { heads: spec.heads },
        TensorRole::Layer(_, LayerTensor::K) => RowOrder::InterleavedHeads { heads: spec.kv_heads },
        _ => RowOrder::Plain,
    }
}

fn tensor_name(role: TensorRole) -> String {
    let (layer, tensor) = match role {
        TensorRole::Embedding => return "token_embd.weight".into(),
        TensorRole::Output => return "output.weight".into(),
        TensorRole::FinalNorm => return "output_norm.weight".into(),
        TensorRole::Layer(layer, tensor) => (layer, tensor),
    };
    let name = match tensor {
        LayerTensor::AttnNorm => "attn_norm",
        LayerTensor::Q => "attn_q",
        LayerTensor::K => "attn_k",
        LayerTensor::V => "attn_v",
        LayerTensor::AttnOut => "attn_output",
        LayerTensor::FfnNorm => "ffn_norm",
        LayerTensor::Gate => "ffn_gate",
        LayerTensor::Up => "ffn_up",
        LayerTensor::Down => "ffn_down",
    };
    format!("blk.{layer}.{name}.weight")
}
