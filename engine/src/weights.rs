//! A model's weights in the form that the kernels read.
//!
//! A matrix `w[N,K]` is packed as panels of 32 output rows. A quantised panel is a sequence of
//! blocks of 32 columns: quants, 32 scales, and 32 minima where the format has them, f16 as in the
//! file and exactly as many bytes.
//!
//! A quant of B bits takes B groups of 64 bytes for each half of 16 rows, the lower half first. A
//! group goes lane after lane, a lane holding four bytes for `i % 4 = 0..4` of its row:
//! - 4 bits, then what is left: group `g` of four holds column `4g + i` low, `4g + i + 16` high;
//! - 2 bits: group `g` of two holds columns `16g + 4j + i` in bits `2j`, for j in 0..4;
//! - 1 bit: one group holds columns `4j + i` in bit `j`, for j in 0..8;
//! - 8 bits: group `g` of eight holds column `4g + i`; Q8_0 is stored plus 128.
//!
//! So 5 bits are 4 and 1, 6 are 4 and 2, 3 are 2 and 1, the low bits first.
//!
//! K-quants: a super-block of 256 columns is 32 `d` and, with minima, 32 `dmin` (f16), then eight
//! blocks of 32 columns: quants, a byte for each row and scale (one for the block, or one for each
//! half of it), and as many for minima. The file's numbers stay as they are, so that Q4_K takes
//! 4.625 bits a weight (4.5 in the file), Q5_K 5.625, Q6_K 6.5625, Q3_K 3.5625, Q2_K 3.125 (2.625
//! in the file).
//!
//! A floating-point panel is `[k][32 rows]`. Rows past N are zero.

mod matrix;
mod packed;
mod rows;
mod stored;

use std::io;

use baton_model_files::{ExpertTensor, LayerTensor, ModelFile, TensorRole, TensorView};
use baton_types::{Activation, ModelSpec};

pub(crate) use baton_model_files::TensorDtype as WeightFormat;
pub(crate) use matrix::PackedMatrix;
pub(crate) use packed::PANEL_ROWS;
pub(crate) use rows::widen_row;
pub(crate) use stored::IQ4_NL_VALUES;

use crate::cpu::CpuError;
use crate::kernels::matmul::Epilogue;

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

/// Gate and up of a feed-forward block, `[ffn, hidden]` each.
pub(crate) enum GateUp {
    /// Panels of 16 gate rows and the 16 up rows that go with them.
    Paired(PackedMatrix),
    /// Of different types.
    Apart { gate: PackedMatrix, up: PackedMatrix },
}

impl GateUp {
    /// # Errors
    /// When there is no memory.
    fn pack(gate: &TensorView<'_>, up: &TensorView<'_>, threads: usize) -> io::Result<Self> {
        if gate.dtype == up.dtype {
            return PackedMatrix::pack_paired(gate, up, threads).map(Self::Paired);
        }
        let gate = PackedMatrix::pack(&[*gate], threads)?;
        Ok(Self::Apart { gate, up: PackedMatrix::pack(&[*up], threads)? })
    }

    /// The products that leave `activation(x · gateᵀ) * (x · upᵀ)` in one place, in their order.
    pub(crate) fn products(
        &self,
        activation: Activation,
    ) -> impl Iterator<Item = (&PackedMatrix, Epilogue)> {
        let (first, second) = match self {
            Self::Paired(matrix) => ((matrix, Epilogue::Gate(activation)), None),
            Self::Apart { gate, up } => {
                ((gate, Epilogue::Store), Some((up, Epilogue::GateOnto(activation))))
            }
        };
        std::iter::once(first).chain(second)
    }
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
    pub(crate) gate_up: GateUp,
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
    /// When there is no memory.
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
        return Ok(FeedForward::Dense(load_mlp(parts, threads)?));
    };
    let experts = (0..experts.count).map(|expert| {
        let parts = [ExpertTensor::Gate, ExpertTensor::Up, ExpertTensor::Down];
        let parts = parts.map(|part| model.tensor(TensorRole::Expert(layer, expert, part)));
        load_mlp(parts, threads)
    });
    Ok(FeedForward::Experts {
        experts: experts.collect::<Result<_, _>>()?,
        router: pack(own(LayerTensor::Router), threads)?,
    })
}

fn load_mlp([gate, up, down]: [TensorView<'_>; 3], threads: usize) -> Result<Mlp, CpuError> {
    let gate_up = GateUp::pack(&gate, &up, threads).map_err(CpuError::Memory)?;
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

/// One matrix for each run of neighbours of one type.
fn load_qkv(
    spec: &ModelSpec,
    parts: [TensorView<'_>; 3],
    threads: usize,
) -> io::Result<(Vec<Projection>, QkvColumns)> {
    let widths = [spec.heads, spec.kv_heads, spec.kv_heads].map(|heads| heads * spec.head_dim);
    let mut projections = Vec::new();
    let mut columns = [0; 3];
    let (mut column, mut part) = (0, 0);
    for run in parts.chunk_by(|a, b| a.dtype == b.dtype) {
        let matrix = PackedMatrix::pack(run, threads)?;
        let mut inside = column;
        for _ in run {
            columns[part] = inside;
            inside += widths[part];
            part += 1;
        }
        let width = matrix.panels() * PANEL_ROWS;
        projections.push(Projection { matrix, column });
        column += width;
    }
    let [_, k, v] = columns;
    Ok((projections, QkvColumns { k, v, stride: column }))
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
