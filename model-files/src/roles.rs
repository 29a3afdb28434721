//! Which tensors a model has, their shapes, and where a file keeps them.

use std::ops::Range;

use baton_types::{ModelFamily, ModelFeatures, ModelSpec};

use crate::TensorDtype;
use crate::tensor::{ExpertTensor, LayerTensor, TensorRole};

/// The stored tensor that holds a part: all of it, or some of its rows where a file keeps several
/// parts as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) tensor: String,
    /// Of the stored tensor.
    pub(crate) first_row: usize,
    /// Rows of the stored tensor.
    pub(crate) stored_rows: usize,
}

impl Source {
    /// The part's bytes, `rows` rows of `cols`, where the stored tensor begins at `start`.
    pub(crate) fn bytes(
        &self,
        start: usize,
        dtype: TensorDtype,
        (rows, cols): (usize, usize),
    ) -> Range<usize> {
        let row_bytes = dtype.row_bytes(cols);
        let first = start + self.first_row * row_bytes;
        first..first + rows * row_bytes
    }
}

/// All tensors that a model of this shape has.
pub(crate) fn all_roles(spec: &ModelSpec) -> impl Iterator<Item = TensorRole> {
    let output = (!spec.tied_embeddings).then_some(TensorRole::Output);
    let tensors = layer_tensors(&spec.features);
    let experts = spec.features.experts.map_or(0, |experts| experts.count);
    let layers = (0..spec.layers).flat_map(move |layer| {
        let own = tensors.clone().into_iter().map(move |tensor| TensorRole::Layer(layer, tensor));
        own.chain((0..experts).flat_map(move |expert| {
            [ExpertTensor::Gate, ExpertTensor::Up, ExpertTensor::Down]
                .map(|tensor| TensorRole::Expert(layer, expert, tensor))
        }))
    });
    [TensorRole::Embedding, TensorRole::FinalNorm].into_iter().chain(output).chain(layers)
}

fn layer_tensors(features: &ModelFeatures) -> Vec<LayerTensor> {
    use LayerTensor as T;
    let mut tensors = vec![T::AttnNorm, T::Q, T::K, T::V, T::AttnOut, T::FfnNorm];
    if features.qkv_bias {
        tensors.extend([T::QBias, T::KBias, T::VBias]);
    }
    if features.qk_norm {
        tensors.extend([T::QNorm, T::KNorm]);
    }
    if features.post_norms {
        tensors.extend([T::PostAttnNorm, T::PostFfnNorm]);
    }
    if features.experts.is_some() {
        tensors.push(T::Router);
    } else {
        tensors.extend([T::Gate, T::Up, T::Down]);
    }
    tensors
}

/// `(rows, cols)` of a tensor; a vector is one row.
pub(crate) fn role_shape(role: TensorRole, spec: &ModelSpec) -> (usize, usize) {
    let (query_width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    match role {
        TensorRole::Embedding | TensorRole::Output => (spec.vocab, spec.hidden),
        TensorRole::FinalNorm => (1, spec.hidden),
        TensorRole::Layer(_, tensor) => match tensor {
            LayerTensor::AttnNorm
            | LayerTensor::PostAttnNorm
            | LayerTensor::FfnNorm
            | LayerTensor::PostFfnNorm => (1, spec.hidden),
            LayerTensor::Q => (query_width, spec.hidden),
            LayerTensor::K | LayerTensor::V => (kv_width, spec.hidden),
            LayerTensor::QBias => (1, query_width),
            LayerTensor::KBias | LayerTensor::VBias => (1, kv_width),
            LayerTensor::QNorm | LayerTensor::KNorm => (1, spec.head_dim),
            LayerTensor::AttnOut => (spec.hidden, query_width),
            LayerTensor::Router => {
                (spec.features.experts.map_or(0, |experts| experts.count), spec.hidden)
            }
            LayerTensor::Gate | LayerTensor::Up => (spec.ffn, spec.hidden),
            LayerTensor::Down => (spec.hidden, spec.ffn),
        },
        TensorRole::Expert(_, _, tensor) => match tensor {
            ExpertTensor::Gate | ExpertTensor::Up => (spec.ffn, spec.hidden),
            ExpertTensor::Down => (spec.hidden, spec.ffn),
        },
    }
}

/// The first row of a part and the rows of the tensor that holds it, where a family keeps Q, K
/// and V as one tensor, and gate and up as another.
pub(crate) fn fused_rows(role: TensorRole, spec: &ModelSpec) -> Option<(usize, usize)> {
    let (query_width, kv_width) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let qkv_rows = query_width + 2 * kv_width;
    match (spec.family, role) {
        (ModelFamily::Phi3, TensorRole::Layer(_, tensor)) => match tensor {
            LayerTensor::Q => Some((0, qkv_rows)),
            LayerTensor::K => Some((query_width, qkv_rows)),
            LayerTensor::V => Some((query_width + kv_width, qkv_rows)),
            LayerTensor::Gate => Some((0, 2 * spec.ffn)),
            LayerTensor::Up => Some((spec.ffn, 2 * spec.ffn)),
            _ => None,
        },
        _ => None,
    }
}
