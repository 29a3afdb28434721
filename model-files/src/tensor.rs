//! Tensors by the part they play, with their stored type and order.

/// How a tensor's elements are stored. Blocks are those of the GGUF format (ggml's `ggml_type`);
/// `d`, `m` and `dmin` are f16. The order of a block's fields is with the code that reads them, in
/// the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorDtype {
    /// Blocks of 32: f16 scale `d`, 16 bytes of nibbles `q`; the value is `d * (q - 8)`.
    Q4_0,
    /// Blocks of 32: f16 scale `d`, f16 minimum `m`, 16 bytes of nibbles; `d * q + m`.
    Q4_1,
    /// Blocks of 32: five bits `q`, four and one apart; `d * (q - 16)`.
    Q5_0,
    /// Blocks of 32: five bits `q`, four and one apart; `d * q + m`.
    Q5_1,
    /// Blocks of 32: f16 scale `d`, 32 signed bytes; `d * q`.
    Q8_0,
    /// Blocks of 32: `d` times one of sixteen fixed values that a nibble names (`IQ4_NL`).
    Iq4Nl,
    /// Blocks of 256 in parts of 16 with 4-bit `sc` and `m` each: two bits; `d*sc * q - dmin*m`.
    Q2K,
    /// Blocks of 256 in parts of 16 with a 6-bit `sc` each: three bits; `d*(sc-32) * (q - 4)`.
    Q3K,
    /// Blocks of 256 in parts of 32 with 6-bit `sc` and `m` each: four bits; `d*sc * q - dmin*m`.
    Q4K,
    /// As `Q4K` with five bits.
    Q5K,
    /// Blocks of 256 in parts of 16 with a signed byte `sc` each: six bits; `d*sc * (q - 32)`.
    Q6K,
    F16,
    Bf16,
    F32,
}

impl TensorDtype {
    /// Elements that share a block (1 where there are no blocks).
    pub fn block_len(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Iq4Nl => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
            Self::F16 | Self::Bf16 | Self::F32 => 1,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Bytes of a row of `cols` elements, a multiple of `block_len`.
    pub fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_len() * self.block_bytes()
    }

    /// Whether it is stored in blocks of small integers with scales.
    pub fn is_quantized(self) -> bool {
        self.block_len() > 1
    }
}

/// The tensors of one transformer layer; the model's features say which of them it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerTensor {
    AttnNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    /// `[1, head_dim]`
    QNorm,
    /// `[1, head_dim]`
    KNorm,
    AttnOut,
    PostAttnNorm,
    FfnNorm,
    /// `[experts, hidden]`
    Router,
    Gate,
    Up,
    Down,
    PostFfnNorm,
}

/// The tensors of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExpertTensor {
    Gate,
    Up,
    Down,
}

/// The part that a tensor plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorRole {
    /// `[vocab, hidden]`
    Embedding,
    /// `[vocab, hidden]`; the embedding where the two are tied.
    Output,
    /// `[1, hidden]`
    FinalNorm,
    Layer(usize, LayerTensor),
    /// Layer, expert.
    Expert(usize, usize, ExpertTensor),
}

/// In which order a matrix's output rows are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    Plain,
    /// GGUF's order of Q and K: within each head, dimension `i` of the first half is followed by
    /// dimension `i` of the second, so that a rotation takes neighbours.
    InterleavedHeads {
        heads: usize,
    },
}

/// A matrix `[rows, cols]` as it lies in the file, row by row.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub dtype: TensorDtype,
    pub rows: usize,
    pub cols: usize,
    pub row_order: RowOrder,
    /// `rows * dtype.row_bytes(cols)` bytes, little-endian, of any alignment.
    pub bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Bytes of output row `row`, counted in plain order.
    ///
    /// # Panics
    /// When `row >= rows`.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let stored = self.stored_row(row);
        let row_bytes = self.dtype.row_bytes(self.cols);
        &self.bytes[stored * row_bytes..][..row_bytes]
    }

    /// Where the file keeps output row `row`.
    fn stored_row(&self, row: usize) -> usize {
        match self.row_order {
            RowOrder::Plain => row,
            RowOrder::InterleavedHeads { heads } => {
                let head_dim = self.rows / heads;
                let half = head_dim / 2;
                let (head, dim) = (row / head_dim, row % head_dim);
                head * head_dim + 2 * (dim % half) + dim / half
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_come_back_in_halves() {
        // Two heads of four dimensions; each stored byte names the plain row it holds.
        let bytes = [0, 2, 1, 3, 4, 6, 5, 7];
        let bytes: Vec<u8> = bytes.iter().flat_map(|&b| [b, 0]).collect();
        let view = TensorView {
            dtype: TensorDtype::F16,
            rows: 8,
            cols: 1,
            row_order: RowOrder::InterleavedHeads { heads: 2 },
            bytes: &bytes,
        };
        for row in 0..8 {
            assert_eq!(view.row(row), [row as u8, 0]);
        }
    }
}
