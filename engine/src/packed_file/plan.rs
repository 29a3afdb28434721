//! What a model's packed file must be.

use std::convert::Infallible;

use baton_model_files::{ModelFile, TensorDtype};

use super::head::{ENTRY_BYTES, FIXED_BYTES};
use super::{CHUNK_BYTES, PAGE_BYTES};
use crate::weights::{MatrixShape, PackedMatrix, Weights};

/// Files of so many chunks are padded to whole ones.
const LARGE_CHUNKS: usize = 8;

/// Matrices and their places, made from the model alone.
#[derive(Clone, Debug)]
pub struct PackedPlan {
    matrices: Vec<MatrixShape>,
    starts: Vec<usize>,
    data_start: usize,
    file_bytes: usize,
}

impl PackedPlan {
    pub fn of(model: &ModelFile) -> Self {
        let mut matrices = Vec::new();
        let Ok(_) = Weights::load(model, &mut |recipe| {
            matrices.push(recipe.shape());
            Ok::<_, Infallible>(PackedMatrix::absent(recipe.shape()))
        });
        Self::new(matrices)
    }

    /// # Panics
    /// When the sizes overflow, which those of an opened model do not.
    pub(super) fn new(matrices: Vec<MatrixShape>) -> Self {
        let mut plan =
            Self { starts: vec![0; matrices.len()], matrices, data_start: 0, file_bytes: 0 };
        // More bytes may need more checksums, which need more bytes; it ends after a few rounds.
        loop {
            let head = FIXED_BYTES + plan.matrices.len() * ENTRY_BYTES + 4 * plan.chunks();
            if plan.data_start == head.next_multiple_of(PAGE_BYTES) {
                return plan;
            }
            plan.place(head.next_multiple_of(PAGE_BYTES));
        }
    }

    fn place(&mut self, data_start: usize) {
        self.data_start = data_start;
        let mut end = data_start;
        for (start, matrix) in self.starts.iter_mut().zip(&self.matrices) {
            *start = end.next_multiple_of(PAGE_BYTES);
            end = start.checked_add(matrix.bytes()).expect("a model's size is a number");
        }
        // The end too shall lie in a huge page, where that is a small part of the whole.
        let is_large = end >= LARGE_CHUNKS * CHUNK_BYTES;
        self.file_bytes = if is_large { end.next_multiple_of(CHUNK_BYTES) } else { end };
    }

    /// Length of the file.
    pub fn file_bytes(&self) -> usize {
        self.file_bytes
    }

    /// Where the first matrix begins.
    pub(super) fn data_start(&self) -> usize {
        self.data_start
    }

    /// Number of checksums.
    pub(super) fn chunks(&self) -> usize {
        self.file_bytes.div_ceil(CHUNK_BYTES)
    }

    /// Bytes that the checksum `chunk` counts.
    pub(super) fn chunk(&self, chunk: usize) -> std::ops::Range<usize> {
        let border = |chunk: usize| (chunk * CHUNK_BYTES).max(self.data_start).min(self.file_bytes);
        border(chunk)..border(chunk + 1)
    }

    /// Each matrix and where it begins.
    pub(crate) fn matrices(&self) -> impl ExactSizeIterator<Item = (MatrixShape, usize)> {
        self.matrices.iter().copied().zip(self.starts.iter().copied())
    }
}

/// Names a format in files; never change a number.
pub(super) fn format_code(format: TensorDtype) -> u32 {
    match format {
        TensorDtype::Q4_0 => 1,
        TensorDtype::Q4_1 => 2,
        TensorDtype::Q5_0 => 3,
        TensorDtype::Q5_1 => 4,
        TensorDtype::Q8_0 => 5,
        TensorDtype::Iq4Nl => 6,
        TensorDtype::Q2K => 7,
        TensorDtype::Q3K => 8,
        TensorDtype::Q4K => 9,
        TensorDtype::Q5K => 10,
        TensorDtype::Q6K => 11,
        TensorDtype::F16 => 12,
        TensorDtype::Bf16 => 13,
        TensorDtype::F32 => 14,
    }
}
