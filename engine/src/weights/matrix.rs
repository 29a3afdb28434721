//! One packed matrix, and how it is made.

#[cfg(test)]
use std::io;
use std::ops::{Deref, Range};
use std::sync::Arc;

use baton_model_files::{TensorDtype, TensorView};

use super::packed::{HALF, PANEL_ROWS, pack_row, panel_bytes};
use crate::memory::{Buffer, FileMap, Parts};
use crate::pool::share;

/// Size and type of a packed matrix, from which its bytes follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixShape {
    pub(crate) format: TensorDtype,
    /// Columns.
    pub(crate) k: usize,
    pub(crate) panels: usize,
}

impl MatrixShape {
    /// Bytes of all panels.
    pub(crate) fn bytes(&self) -> usize {
        self.panels * panel_bytes(self.format, self.k)
    }
}

/// Which of a model's tensors make a packed matrix, and in which order of rows.
#[derive(Clone, Debug)]
pub(crate) struct Recipe<'a> {
    parts: Vec<TensorView<'a>>,
    shape: MatrixShape,
    /// Each panel holds 16 rows of the first part and the same 16 rows of the second.
    is_paired: bool,
}

impl<'a> Recipe<'a> {
    /// Matrices below one another.
    ///
    /// # Panics
    /// When types or widths differ.
    pub(crate) fn stacked(parts: &[TensorView<'a>]) -> Self {
        let rows = parts.iter().map(|part| part.rows).sum::<usize>();
        Self::new(parts.to_vec(), rows.div_ceil(PANEL_ROWS), false)
    }

    /// Two matrices of one shape so that each panel holds 16 rows of `upper` and the same 16 rows
    /// of `lower`.
    ///
    /// # Panics
    /// When shapes or types differ.
    pub(crate) fn paired(upper: TensorView<'a>, lower: TensorView<'a>) -> Self {
        assert_eq!(upper.rows, lower.rows);
        Self::new(vec![upper, lower], upper.rows.div_ceil(HALF), true)
    }

    fn new(parts: Vec<TensorView<'a>>, panels: usize, is_paired: bool) -> Self {
        let (format, k) = (parts[0].dtype, parts[0].cols);
        assert!(parts.iter().all(|part| part.dtype == format && part.cols == k));
        Self { parts, shape: MatrixShape { format, k, panels }, is_paired }
    }

    pub(crate) fn shape(&self) -> MatrixShape {
        self.shape
    }

    /// Packs into `out`, which holds as many zeros as the shape says, on `threads` threads.
    ///
    /// # Panics
    /// When `out` has another length.
    pub(crate) fn pack(&self, out: &mut [u8], threads: usize) {
        assert_eq!(out.len(), self.shape.bytes());
        let out = Parts::new(out);
        let pack = |thread: usize| {
            for panel in share(self.shape.panels, threads, thread) {
                self.pack_panel(panel, out);
            }
        };
        std::thread::scope(|scope| {
            for thread in 1..threads {
                scope.spawn(move || pack(thread));
            }
            pack(0);
        });
    }

    fn pack_panel(&self, panel: usize, out: Parts<'_, u8>) {
        let panel_bytes = panel_bytes(self.shape.format, self.shape.k);
        let range = panel * panel_bytes..(panel + 1) * panel_bytes;
        // SAFETY: each panel belongs to one thread.
        let out = unsafe { out.of_mut(range) };
        for lane in 0..PANEL_ROWS {
            if let Some((part, row)) = self.source(panel, lane) {
                pack_row(self.shape.format, self.parts[part].row(row), lane, out);
            }
        }
    }

    /// Which part a packed row comes from, and which of its rows it is.
    fn source(&self, panel: usize, lane: usize) -> Option<(usize, usize)> {
        if self.is_paired {
            let row = panel * HALF + lane % HALF;
            return (row < self.parts[0].rows).then_some((lane / HALF, row));
        }
        let mut row = panel * PANEL_ROWS + lane;
        for (index, part) in self.parts.iter().enumerate() {
            if row < part.rows {
                return Some((index, row));
            }
            row -= part.rows;
        }
        None
    }
}

/// A matrix in panels (see the module above).
pub(crate) struct PackedMatrix {
    bytes: Option<Arc<Bytes>>,
    range: Range<usize>,
    shape: MatrixShape,
    panel_bytes: usize,
}

/// Memory that holds packed matrices.
pub(crate) enum Bytes {
    Owned(Buffer<u8>),
    Mapped(FileMap),
}

impl Deref for Bytes {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Mapped(bytes) => bytes,
        }
    }
}

impl PackedMatrix {
    /// The matrix that lies in `bytes` from `start` on.
    ///
    /// # Panics
    /// When `bytes` end before it does, or `start` is no multiple of 64.
    pub(crate) fn within(bytes: Arc<Bytes>, start: usize, shape: MatrixShape) -> Self {
        let range = start..start + shape.bytes();
        assert!(range.end <= bytes.len() && start.is_multiple_of(64));
        let panel_bytes = panel_bytes(shape.format, shape.k);
        Self { bytes: Some(bytes), range, shape, panel_bytes }
    }

    /// No panels: stands for a matrix while matrices are only listed.
    pub(crate) fn absent(shape: MatrixShape) -> Self {
        Self { bytes: None, range: 0..0, shape, panel_bytes: 0 }
    }

    #[cfg(test)]
    pub(crate) fn pack(parts: &[TensorView<'_>], threads: usize) -> io::Result<Self> {
        Self::alone(&Recipe::stacked(parts), threads)
    }

    #[cfg(test)]
    pub(crate) fn pack_paired(
        upper: &TensorView<'_>,
        lower: &TensorView<'_>,
        threads: usize,
    ) -> io::Result<Self> {
        Self::alone(&Recipe::paired(*upper, *lower), threads)
    }

    #[cfg(test)]
    fn alone(recipe: &Recipe<'_>, threads: usize) -> io::Result<Self> {
        let mut bytes = Buffer::zeroed(recipe.shape.bytes())?;
        recipe.pack(&mut bytes, threads);
        Ok(Self::within(Arc::new(Bytes::Owned(bytes)), 0, recipe.shape))
    }

    pub(crate) fn format(&self) -> TensorDtype {
        self.shape.format
    }

    pub(crate) fn k(&self) -> usize {
        self.shape.k
    }

    pub(crate) fn panels(&self) -> usize {
        self.shape.panels
    }

    /// Bytes of all panels.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// All panels.
    #[inline(always)]
    pub(crate) fn as_slice(&self) -> &[u8] {
        self.bytes.as_ref().map_or(&[], |bytes| &bytes[self.range.clone()])
    }

    /// Bytes of one panel, aligned to 64.
    #[inline(always)]
    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.as_slice()[panel * self.panel_bytes..][..self.panel_bytes]
    }

    /// The panel after `panel`, if there is one.
    #[inline(always)]
    pub(crate) fn panel_after(&self, panel: usize) -> Option<&[u8]> {
        (panel + 1 < self.shape.panels).then(|| self.panel(panel + 1))
    }
}
