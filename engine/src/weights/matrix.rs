//! One packed matrix, and how it is made.

use std::io;
use std::ops::Range;
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

    /// Packs on `threads` threads.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn pack(&self, threads: usize) -> io::Result<PackedMatrix> {
        let mut bytes = Buffer::zeroed(self.shape.bytes())?;
        let out = bytes.parts();
        let pack = |thread: usize, out: Parts<'_, u8>| {
            for panel in share(self.shape.panels, threads, thread) {
                self.pack_panel(panel, out);
            }
        };
        std::thread::scope(|scope| {
            for thread in 1..threads {
                scope.spawn(move || pack(thread, out));
            }
            pack(0, out);
        });
        Ok(PackedMatrix::new(Bytes::Owned(bytes), self.shape))
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
    bytes: Bytes,
    shape: MatrixShape,
    panel_bytes: usize,
}

enum Bytes {
    Owned(Buffer<u8>),
    Mapped { map: Arc<FileMap>, range: Range<usize> },
    Absent,
}

impl PackedMatrix {
    fn new(bytes: Bytes, shape: MatrixShape) -> Self {
        Self { bytes, shape, panel_bytes: panel_bytes(shape.format, shape.k) }
    }

    /// A matrix that lies in a file from `start` on.
    ///
    /// # Panics
    /// When the file is too short, or `start` is no multiple of 64.
    pub(crate) fn mapped(map: Arc<FileMap>, start: usize, shape: MatrixShape) -> Self {
        let range = start..start + shape.bytes();
        assert!(range.end <= map.len() && start.is_multiple_of(64));
        Self::new(Bytes::Mapped { map, range }, shape)
    }

    /// No panels: stands for a matrix while matrices are only listed.
    pub(crate) fn absent(shape: MatrixShape) -> Self {
        Self::new(Bytes::Absent, MatrixShape { panels: 0, ..shape })
    }

    #[cfg(test)]
    pub(crate) fn pack(parts: &[TensorView<'_>], threads: usize) -> io::Result<Self> {
        Recipe::stacked(parts).pack(threads)
    }

    #[cfg(test)]
    pub(crate) fn pack_paired(
        upper: &TensorView<'_>,
        lower: &TensorView<'_>,
        threads: usize,
    ) -> io::Result<Self> {
        Recipe::paired(*upper, *lower).pack(threads)
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
        match &self.bytes {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped { map, range } => &map[range.clone()],
            Bytes::Absent => &[],
        }
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
