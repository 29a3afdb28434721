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

use baton_model_files::{LayerTensor, ModelFile, TensorRole, TensorView};
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
    pub(crate) attn_out: PackedMatrix,
    pub(crate) ffn_norm: Vec<f32>,
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
            final_norm: vector(&model.tensor(TensorRole::FinalNorm)),
            output: PackedMatrix::pack(&[output], threads).map_err(CpuError::Memory)?,
        })
    }

    /// Width of the widest row of Q, K and V.
    pub(crate) fn qkv_stride(&self) -> usize {
        self.layers.iter().map(|layer| layer.columns.stride).max().unwrap_or(0)
    }
}

fn load_layer(model: &ModelFile, layer: usize, threads: usize) -> Result<LayerWeights, CpuError> {
    let tensor = |tensor| model.tensor(TensorRole::Layer(layer, tensor));
    let pack =
        |tensor: TensorView<'_>| PackedMatrix::pack(&[tensor], threads).map_err(CpuError::Memory);
    let (gate, up) = (tensor(LayerTensor::Gate), tensor(LayerTensor::Up));
    if gate.dtype != up.dtype {
        return Err(CpuError::MixedTypes { layer, gate: gate.dtype, up: up.dtype });
    }
    let qkv = [tensor(LayerTensor::Q), tensor(LayerTensor::K), tensor(LayerTensor::V)];
    let (qkv, columns) = load_qkv(model.spec(), qkv, threads).map_err(CpuError::Memory)?;
    Ok(LayerWeights {
        attn_norm: vector(&tensor(LayerTensor::AttnNorm)),
        qkv,
        columns,
        attn_out: pack(tensor(LayerTensor::AttnOut))?,
        ffn_norm: vector(&tensor(LayerTensor::FfnNorm)),
        gate_up: PackedMatrix::pack_paired(&gate, &up, threads).map_err(CpuError::Memory)?,
        down: pack(tensor(LayerTensor::Down))?,
    })
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

/// A tensor of one row, widened.
fn vector(view: &TensorView<'_>) -> Vec<f32> {
    let mut out = vec![0.0; view.cols];
    widen_row(view, 0, &mut out);
    out
}
