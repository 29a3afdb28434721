//! One packed matrix.

use std::io;

use baton_model_files::{TensorDtype, TensorView};

use crate::memory::{Buffer, Parts};
use crate::pool::share;

/// Output rows of a panel.
pub(crate) const PANEL_ROWS: usize = 32;
/// Columns of a block.
const BLOCK: usize = 32;
/// Output rows of half a panel.
const HALF: usize = 16;

/// A matrix in panels (see the module above).
pub(crate) struct PackedMatrix {
    bytes: Buffer<u8>,
    format: TensorDtype,
    k: usize,
    panels: usize,
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

    /// Bytes of one panel, aligned to 64.
    #[inline(always)]
    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        let bytes = panel_bytes(self.format, self.k);
        &self.bytes[panel * bytes..][..bytes]
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
        Ok(Self { bytes, format, k, panels })
    }
}

/// Bytes that 32 rows of `k` columns take.
fn panel_bytes(format: TensorDtype, k: usize) -> usize {
    PANEL_ROWS * format.row_bytes(k)
}

/// Places one stored row into lane `lane` of a panel.
fn pack_row(format: TensorDtype, row: &[u8], lane: usize, panel: &mut [u8]) {
    let stored = format.block_bytes();
    match format {
        TensorDtype::Q4_0 | TensorDtype::Q4_1 | TensorDtype::Q8_0 => {
            let blocks = panel.chunks_exact_mut(PANEL_ROWS * stored);
            for (block, row) in blocks.zip(row.chunks_exact(stored)) {
                pack_block(format, row, lane, block);
            }
        }
        TensorDtype::F16 | TensorDtype::Bf16 | TensorDtype::F32 => {
            for (column, element) in row.chunks_exact(stored).enumerate() {
                panel[(column * PANEL_ROWS + lane) * stored..][..stored].copy_from_slice(element);
            }
        }
    }
}

fn pack_block(format: TensorDtype, row: &[u8], lane: usize, block: &mut [u8]) {
    let header = if format == TensorDtype::Q4_1 { 4 } else { 2 };
    let quants = &row[header..];
    let flip = if format == TensorDtype::Q8_0 { 0x80 } else { 0 };
    let half_start = lane / HALF * (HALF * quants.len());
    for (group, four) in quants.chunks_exact(4).enumerate() {
        let out = &mut block[half_start + group * 64 + lane % HALF * 4..][..4];
        for (out, q) in out.iter_mut().zip(four) {
            *out = q ^ flip;
        }
    }
    let scales = PANEL_ROWS * quants.len();
    block[scales + 2 * lane..][..2].copy_from_slice(&row[..2]);
    if format == TensorDtype::Q4_1 {
        block[scales + 2 * (BLOCK + lane)..][..2].copy_from_slice(&row[2..4]);
    }
}
