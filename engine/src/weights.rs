//! A model's weights in the form that the kernels read.
//!
//! A matrix `w[N,K]` is packed as panels of 32 output rows. A quantised panel is a sequence of
//! blocks of 32 columns: quants, 32 scales, and 32 minima where the format has them, exactly as
//! many bytes as in the file. Its quants are two halves of 16 rows; each half is groups of 64
//! bytes, lane after lane, a lane holding four consecutive columns of its row:
//! - Q4: byte `(group i / 4, lane, i % 4)` holds column `i` low and column `i + 16` high;
//! - Q8: byte `(group i / 4, lane, i % 4)` holds column `i`, plus 128.
//!
//! A floating-point panel is `[k][32 rows]`. Rows past N are zero.

mod matrix;
mod rows;

use std::io;

use baton_model_files::{ExpertTensor, LayerTensor, ModelFile, TensorRole, TensorView};
use baton_types::ModelSpec;

pub(crate) use baton_model_files::TensorDtype as WeightFormat;
pub(crate) use matrix::{PANEL_ROWS, PackedMatrix};
pub(crate) use rows::widen_row;

use crate::cpu::CpuError;

/// A part of the fused product of Q, K and V.
pub(crate) struct Projection {
    pub(crate) matrix: PackedMatrix,
    /// Where its outputs go in the row.
    pub(crate) column: usize,
}

/// Where Q, K and V of a token lie in a row of the fused product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QkvColumns {
    pub(crate) k: usize,
    pub(crate) v: usize,
    /// Width of a row.
    pub(crate) stride: usize,
}

pub(crate) struct LayerWeights {
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) qkv: Vec<Projection>,
    pub(crate) columns: QkvColumns,
    /// As wide as a row of Q, K and V.
    pub(crate) qkv_bias: Option<Vec<f32>>,
    pub(crate) q_norm: Option<Vec<f32>>,
    pub(crate) k_norm: Option<Vec<f32>>,
    pub(crate) attn_out: PackedMatrix,
    pub(crate) post_attn_norm: Option<Vec<f32>>,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: FeedForward,
    pub(crate) post_ffn_norm: Option<Vec<f32>>,
}

/// What follows attention in a layer.
pub(crate) enum FeedForward {
    Dense(Mlp),
    Experts { router: PackedMatrix, experts: Vec<Mlp> },
}

/// `(activation(x · gateᵀ) * (x · upᵀ)) · downᵀ`
pub(crate) struct Mlp {
    /// Panels of 16 gate rows and the 16 up rows that go with them.
    pub(crate) gate_up: PackedMatrix,
    pub(crate) down: PackedMatrix,
}

pub(crate) struct Weights {
    pub(crate) layers: Vec<LayerWeights>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) output: PackedMatrix,
}

impl Weights {
    /// Packs all of `model`'s matrices on `threads` threads.
    ///
    /// # Errors
    /// When there is no memory, or a layer mixes types where one product needs one.
    pub(crate) fn load(model: &ModelFile, threads: usize) -> Result<Self, CpuError> {
        let layers = (0..model.spec().layers)
            .map(|layer| load_layer(model, layer, threads))
            .collect::<Result<_, _>>()?;
        let output = model.tensor(TensorRole::Output);
        Ok(Self {
            layers,
            final_norm: norm(model, TensorRole::FinalNorm),
            output: PackedMatrix::pack(&[output], threads).map_err(CpuError::Memory)?,
        })
    }

    /// Width of the widest row of Q, K and V.
    pub(crate) fn qkv_stride(&self) -> usize {
        self.layers.iter().map(|layer| layer.columns.stride).max().unwrap_or(0)
    }
}

fn load_layer(model: &ModelFile, layer: usize, threads: usize) -> Result<LayerWeights, CpuError> {
    let (spec, features) = (model.spec(), &model.spec().features);
    let tensor = |tensor| model.tensor(TensorRole::Layer(layer, tensor));
    let norm = |tensor| norm(model, TensorRole::Layer(layer, tensor));
    let qkv = [tensor(LayerTensor::Q), tensor(LayerTensor::K), tensor(LayerTensor::V)];
    let (qkv, columns) = load_qkv(spec, qkv, threads).map_err(CpuError::Memory)?;
    Ok(LayerWeights {
        attn_norm: norm(LayerTensor::AttnNorm),
        qkv,
        columns,
        qkv_bias: features.qkv_bias.then(|| load_bias(model, layer, columns)),
        q_norm: features.qk_norm.then(|| norm(LayerTensor::QNorm)),
        k_norm: features.qk_norm.then(|| norm(LayerTensor::KNorm)),
        attn_out: pack(tensor(LayerTensor::AttnOut), threads)?,
        post_attn_norm: features.post_norms.then(|| norm(LayerTensor::PostAttnNorm)),
        ffn_norm: norm(LayerTensor::FfnNorm),
        ffn: load_feed_forward(model, layer, threads)?,
        post_ffn_norm: features.post_norms.then(|| norm(LayerTensor::PostFfnNorm)),
    })
}

fn load_feed_forward(
    model: &ModelFile,
    layer: usize,
    threads: usize,
) -> Result<FeedForward, CpuError> {
    let own = |tensor| model.tensor(TensorRole::Layer(layer, tensor));
    let Some(experts) = model.spec().features.experts else {
        let parts = [own(LayerTensor::Gate), own(LayerTensor::Up), own(LayerTensor::Down)];
        return Ok(FeedForward::Dense(load_mlp(layer, parts, threads)?));
    };
    let experts = (0..experts.count).map(|expert| {
        let parts = [ExpertTensor::Gate, ExpertTensor::Up, ExpertTensor::Down];
        let parts = parts.map(|part| model.tensor(TensorRole::Expert(layer, expert, part)));
        load_mlp(layer, parts, threads)
    });
    Ok(FeedForward::Experts {
        experts: experts.collect::<Result<_, _>>()?,
        router: pack(own(LayerTensor::Router), threads)?,
    })
}

fn load_mlp(
    layer: usize,
    [gate, up, down]: [TensorView<'_>; 3],
    threads: usize,
) -> Result<Mlp, CpuError> {
    if gate.dtype != up.dtype {
        return Err(CpuError::MixedTypes { layer, gate: gate.dtype, up: up.dtype });
    }
    let gate_up = PackedMatrix::pack_paired(&gate, &up, threads).map_err(CpuError::Memory)?;
    Ok(Mlp { gate_up, down: pack(down, threads)? })
}

fn load_bias(model: &ModelFile, layer: usize, columns: QkvColumns) -> Vec<f32> {
    let mut bias = vec![0.0; columns.stride];
    let parts =
        [(0, LayerTensor::QBias), (columns.k, LayerTensor::KBias), (columns.v, LayerTensor::VBias)];
    for (column, part) in parts {
        let view = model.tensor(TensorRole::Layer(layer, part));
        widen_row(&view, 0, &mut bias[column..column + view.cols]);
    }
    bias
}

fn pack(tensor: TensorView<'_>, threads: usize) -> Result<PackedMatrix, CpuError> {
    PackedMatrix::pack(&[tensor], threads).map_err(CpuError::Memory)
}

/// One matrix where the three have one type, otherwise one for each.
fn load_qkv(
    spec: &ModelSpec,
    parts: [TensorView<'_>; 3],
    threads: usize,
) -> io::Result<(Vec<Projection>, QkvColumns)> {
    let query_width = spec.heads * spec.head_dim;
    let kv_width = spec.kv_heads * spec.head_dim;
    if parts.iter().all(|part| part.dtype == parts[0].dtype) {
        let matrix = PackedMatrix::pack(&parts, threads)?;
        let columns = QkvColumns {
            k: query_width,
            v: query_width + kv_width,
            stride: matrix.panels() * PANEL_ROWS,
        };
        return Ok((vec![Projection { matrix, column: 0 }], columns));
    }
    let mut column = 0;
    let mut projections = Vec::new();
    for part in parts {
        let matrix = PackedMatrix::pack(&[part], threads)?;
        let width = matrix.panels() * PANEL_ROWS;
        projections.push(Projection { matrix, column });
        column += width;
    }
    let columns = QkvColumns { k: projections[1].column, v: projections[2].column, stride: column };
    Ok((projections, columns))
}

/// A norm's weights, widened, with what the family adds to them.
fn norm(model: &ModelFile, role: TensorRole) -> Vec<f32> {
    let view = model.tensor(role);
    let mut out = vec![0.0; view.cols];
    widen_row(&view, 0, &mut out);
    let offset = model.spec().features.norm_offset;
    if offset != 0.0 {
        out.iter_mut().for_each(|weight| *weight += offset);
    }
    out
}
