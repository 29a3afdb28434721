//! One packed matrix.

use std::io;

use baton_model_files::{TensorDtype, TensorView};

use super::packed::{HALF, PANEL_ROWS, pack_row, panel_bytes};
use crate::memory::{Buffer, Parts};
use crate::pool::share;

/// A matrix in panels (see the module above).
pub(crate) struct PackedMatrix {
    bytes: Buffer<u8>,
    format: TensorDtype,
    k: usize,
    panels: usize,
    panel_bytes: usize,
}

impl PackedMatrix {
    /// Packs matrices of one type and width below one another.
    ///
    /// # Errors
    /// When there is no memory.
    ///
    /// # Panics
    /// When types or widths differ.
    pub(crate) fn pack(parts: &[TensorView<'_>], threads: usize) -> io::Result<Self> {
        let rows = parts.iter().map(|part| part.rows).sum::<usize>();
        Self::pack_rows(parts, rows.div_ceil(PANEL_ROWS), threads, |mut row| {
            for (index, part) in parts.iter().enumerate() {
                if row < part.rows {
                    return Some((index, row));
                }
                row -= part.rows;
            }
            None
        })
    }

    /// Packs two matrices of one shape so that each panel holds 16 rows of `upper` and the same
    /// 16 rows of `lower`.
    ///
    /// # Errors
    /// When there is no memory.
    ///
    /// # Panics
    /// When shapes or types differ.
    pub(crate) fn pack_paired(
        upper: &TensorView<'_>,
        lower: &TensorView<'_>,
        threads: usize,
    ) -> io::Result<Self> {
        assert_eq!(upper.rows, lower.rows);
        let panels = upper.rows.div_ceil(HALF);
        Self::pack_rows(&[*upper, *lower], panels, threads, |row| {
            let (panel, lane) = (row / PANEL_ROWS, row % PANEL_ROWS);
            let source = panel * HALF + lane % HALF;
            (source < upper.rows).then_some((lane / HALF, source))
        })
    }

    pub(crate) fn format(&self) -> TensorDtype {
        self.format
    }

    pub(crate) fn k(&self) -> usize {
        self.k
    }

    pub(crate) fn panels(&self) -> usize {
        self.panels
    }

    /// Bytes of all panels.
    pub(crate) fn bytes(&self) -> usize {
        self.panels * self.panel_bytes
    }

    /// Bytes of one panel, aligned to 64.
    #[inline(always)]
    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.bytes[panel * self.panel_bytes..][..self.panel_bytes]
    }

    /// The panel after `panel`, if there is one.
    #[inline(always)]
    pub(crate) fn panel_after(&self, panel: usize) -> Option<&[u8]> {
        (panel + 1 < self.panels).then(|| self.panel(panel + 1))
    }

    /// `source` says which part and which of its rows a packed row comes from.
    fn pack_rows(
        parts: &[TensorView<'_>],
        panels: usize,
        threads: usize,
        source: impl Fn(usize) -> Option<(usize, usize)> + Sync,
    ) -> io::Result<Self> {
        let (format, k) = (parts[0].dtype, parts[0].cols);
        assert!(parts.iter().all(|part| part.dtype == format && part.cols == k));
        let panel_bytes = panel_bytes(format, k);
        let mut bytes = Buffer::zeroed(panels * panel_bytes)?;
        let out = bytes.parts();
        let pack = |thread: usize, out: Parts<'_, u8>| {
            for panel in share(panels, threads, thread) {
                let range = panel * panel_bytes..(panel + 1) * panel_bytes;
                // SAFETY: each panel belongs to one thread.
                let out = unsafe { out.of_mut(range) };
                for lane in 0..PANEL_ROWS {
                    if let Some((part, row)) = source(panel * PANEL_ROWS + lane) {
                        pack_row(format, parts[part].row(row), lane, out);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for thread in 1..threads {
                scope.spawn(move || pack(thread, out));
            }
            pack(0, out);
        });
        Ok(Self { bytes, format, k, panels, panel_bytes })
    }
}
