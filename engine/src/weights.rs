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
//!
//! Packed matrices lie in files too (`packed_file`): a change of any of this is a new
//! `PACKING_VERSION` (`packed.rs`), and nothing else.

mod cache;
mod matrix;
mod packed;
mod rows;
mod stored;

use baton_model_files::{ExpertTensor, LayerTensor, ModelFile, TensorRole, TensorView};
use baton_types::{Activation, ModelSpec};

pub(crate) use baton_model_files::TensorDtype as WeightFormat;
pub(crate) use cache::Loader;
pub(crate) use matrix::{MatrixShape, PackedMatrix, Recipe};
pub(crate) use packed::{PACKING_VERSION, PANEL_ROWS};
pub(crate) use rows::widen_row;
pub(crate) use stored::IQ4_NL_VALUES;

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
    fn make<'a, E>(
        gate: TensorView<'a>,
        up: TensorView<'a>,
        make: Make<'_, 'a, E>,
    ) -> Result<Self, E> {
        if gate.dtype == up.dtype {
            return make(Recipe::paired(gate, up)).map(Self::Paired);
        }
        Ok(Self::Apart { gate: make(Recipe::stacked(&[gate]))?, up: make(Recipe::stacked(&[up]))? })
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

/// Makes a matrix: packs it, or finds it where it was packed before.
pub(crate) type Make<'m, 'a, E> = &'m mut dyn FnMut(Recipe<'a>) -> Result<PackedMatrix, E>;

impl Weights {
    /// Calls `make` for each of `model`'s matrices, always in the same order.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn load<'a, E>(model: &'a ModelFile, make: Make<'_, 'a, E>) -> Result<Self, E> {
        let layers = (0..model.spec().layers)
            .map(|layer| load_layer(model, layer, make))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            layers,
            final_norm: norm(model, TensorRole::FinalNorm),
            output: make(Recipe::stacked(&[model.tensor(TensorRole::Output)]))?,
        })
    }

    /// Width of the widest row of Q, K and V.
    pub(crate) fn qkv_stride(&self) -> usize {
        self.layers.iter().map(|layer| layer.columns.stride).max().unwrap_or(0)
    }
}

fn load_layer<'a, E>(
    model: &'a ModelFile,
    layer: usize,
    make: Make<'_, 'a, E>,
) -> Result<LayerWeights, E> {
    let (spec, features) = (model.spec(), &model.spec().features);
    let tensor = |tensor| model.tensor(TensorRole::Layer(layer, tensor));
    let norm = |tensor| norm(model, TensorRole::Layer(layer, tensor));
    let qkv = [tensor(LayerTensor::Q), tensor(LayerTensor::K), tensor(LayerTensor::V)];
    let (qkv, columns) = load_qkv(spec, qkv, make)?;
    Ok(LayerWeights {
        attn_norm: norm(LayerTensor::AttnNorm),
        qkv,
        columns,
        qkv_bias: features.qkv_bias.then(|| load_bias(model, layer, columns)),
        q_norm: features.qk_norm.then(|| norm(LayerTensor::QNorm)),
        k_norm: features.qk_norm.then(|| norm(LayerTensor::KNorm)),
        attn_out: make(Recipe::stacked(&[tensor(LayerTensor::AttnOut)]))?,
        post_attn_norm: features.post_norms.then(|| norm(LayerTensor::PostAttnNorm)),
        ffn_norm: norm(LayerTensor::FfnNorm),
        ffn: load_feed_forward(model, layer, make)?,
        post_ffn_norm: features.post_norms.then(|| norm(LayerTensor::PostFfnNorm)),
    })
}

fn load_feed_forward<'a, E>(
    model: &'a ModelFile,
    layer: usize,
    make: Make<'_, 'a, E>,
) -> Result<FeedForward, E> {
    let own = |tensor| model.tensor(TensorRole::Layer(layer, tensor));
    let Some(experts) = model.spec().features.experts else {
        let parts = [own(LayerTensor::Gate), own(LayerTensor::Up), own(LayerTensor::Down)];
        return Ok(FeedForward::Dense(load_mlp(parts, make)?));
    };
    let experts = (0..experts.count).map(|expert| {
        let parts = [ExpertTensor::Gate, ExpertTensor::Up, ExpertTensor::Down];
        let parts = parts.map(|part| model.tensor(TensorRole::Expert(layer, expert, part)));
        load_mlp(parts, make)
    });
    Ok(FeedForward::Experts {
        experts: experts.collect::<Result<_, _>>()?,
        router: make(Recipe::stacked(&[own(LayerTensor::Router)]))?,
    })
}

fn load_mlp<'a, E>([gate, up, down]: [TensorView<'a>; 3], make: Make<'_, 'a, E>) -> Result<Mlp, E> {
    let gate_up = GateUp::make(gate, up, make)?;
    Ok(Mlp { gate_up, down: make(Recipe::stacked(&[down]))? })
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

/// One matrix for each run of neighbours of one type.
fn load_qkv<'a, E>(
    spec: &ModelSpec,
    parts: [TensorView<'a>; 3],
    make: Make<'_, 'a, E>,
) -> Result<(Vec<Projection>, QkvColumns), E> {
    let widths = [spec.heads, spec.kv_heads, spec.kv_heads].map(|heads| heads * spec.head_dim);
    let mut projections = Vec::new();
    let mut columns = [0; 3];
    let (mut column, mut part) = (0, 0);
    for run in parts.chunk_by(|a, b| a.dtype == b.dtype) {
        let matrix = make(Recipe::stacked(run))?;
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
