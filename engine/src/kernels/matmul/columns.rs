//! Activations as the byte kernels read them.

use super::Matmul;
use crate::kernels::quantize::BLOCK;
use crate::memory::Parts;
use crate::simd::LANES;

/// The 16 half-precision numbers of one half, as bits.
#[inline(always)]
pub(super) fn half_floats(bytes: &[u8], half: usize) -> &[u16; LANES] {
    let bytes = &bytes.as_chunks::<32>().0[half];
    // SAFETY: 32 bytes are 16 numbers; panels are aligned to 64 bytes and blocks are a multiple
    // of 64 long, so that they are aligned as well. Every bit pattern is a number.
    unsafe { &*bytes.as_ptr().cast::<[u16; LANES]>() }
}

/// Activations of `M` tokens.
pub(super) struct Columns<const M: usize> {
    quants: *const i8,
    scales: *const f32,
    sums: *const f32,
    starts: Option<*const i32>,
    half_starts: *const [i32; 2],
    k: usize,
    blocks: usize,
}

/// One token's activations in one block.
pub(super) struct Column<'a> {
    pub(super) quants: &'a [i32; BLOCK / 4],
    pub(super) scale: f32,
    pub(super) sum: f32,
    /// Of the chosen starts; 0 where there are none.
    pub(super) start: i32,
    pub(super) half_starts: [i32; 2],
}

impl<const M: usize> Columns<M> {
    /// Rows from `row` on, with those of `starts` where the format wants some.
    #[inline(always)]
    pub(super) fn new(job: &Matmul<'_>, starts: Option<Parts<'_, i32>>, row: usize) -> Self {
        let (x, k) = (&job.input.quants, job.input.quants.k);
        let blocks = k / BLOCK;
        let starts = starts.map(|starts| starts.as_ptr().wrapping_add(row * blocks).cast_const());
        Self {
            quants: x.quants.as_ptr().wrapping_add(row * k),
            scales: x.scales.as_ptr().wrapping_add(row * blocks),
            sums: x.sums.as_ptr().wrapping_add(row * blocks),
            starts,
            half_starts: x.half_starts.as_ptr().wrapping_add(row * blocks),
            k,
            blocks,
        }
    }

    /// # Safety
    /// Row `m` of these columns and block `b` exist, and nobody writes them.
    #[inline(always)]
    pub(super) unsafe fn at(&self, m: usize, b: usize) -> Column<'_> {
        let at = m * self.blocks + b;
        // SAFETY: in bounds by the caller's promise; rows start at multiples of 32 in a buffer
        // that is aligned to a page, so that four bytes form an aligned integer.
        unsafe {
            Column {
                quants: &*self.quants.add(m * self.k + b * BLOCK).cast(),
                scale: *self.scales.add(at),
                sum: *self.sums.add(at),
                start: self.starts.map_or(0, |starts| *starts.add(at)),
                half_starts: *self.half_starts.add(at),
            }
        }
    }
}
