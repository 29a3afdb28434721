//! Where a row's numbers lie in a panel (see the module above).

use baton_model_files::TensorDtype;

use super::stored::{SMALL, SUPER, Scheme, SmallBlock, SuperBlock};

/// Names everything about packed bytes: this module's places, the order of rows in a panel
/// (`matrix.rs`) and which tensors share a matrix (`weights.rs`). Packed files of another version
/// are packed again. **Add one with any change of those**; `packed_file::tests` fails until it is
/// done.
pub(crate) const PACKING_VERSION: u32 = 1;

/// Output rows of a panel.
pub(crate) const PANEL_ROWS: usize = 32;
/// Output rows of half a panel.
pub(super) const HALF: usize = 16;
/// Bytes of one number for each row of a panel.
const F16_ROWS: usize = 2 * PANEL_ROWS;
/// Bytes of four columns of half a panel.
const GROUP: usize = 4 * HALF;

/// Bytes that 32 rows of `k` columns take.
pub(super) fn panel_bytes(dtype: TensorDtype, k: usize) -> usize {
    match Scheme::of(dtype) {
        None => PANEL_ROWS * dtype.row_bytes(k),
        Some(scheme) => k / dtype.block_len() * block_bytes(&scheme),
    }
}

/// Bytes of a block or super-block of 32 rows.
fn block_bytes(scheme: &Scheme) -> usize {
    let numbers = if scheme.has_minima { 2 } else { 1 };
    match scheme.parts {
        None => quant_bytes(scheme) + numbers * F16_ROWS,
        Some(_) => numbers * F16_ROWS + SUPER / SMALL * part_bytes(scheme),
    }
}

/// Bytes of 32 columns in a super-block of 32 rows.
fn part_bytes(scheme: &Scheme) -> usize {
    let numbers = if scheme.has_minima { 2 } else { 1 };
    quant_bytes(scheme) + numbers * scheme.parts.unwrap_or(0) * PANEL_ROWS
}

/// Bytes of the quants of 32 rows and 32 columns.
fn quant_bytes(scheme: &Scheme) -> usize {
    PANEL_ROWS * SMALL * scheme.bits / 8
}

/// Places one stored row into lane `lane` of a panel.
pub(super) fn pack_row(dtype: TensorDtype, row: &[u8], lane: usize, panel: &mut [u8]) {
    let stored = dtype.block_bytes();
    let Some(scheme) = Scheme::of(dtype) else {
        for (column, element) in row.chunks_exact(stored).enumerate() {
            panel[(column * PANEL_ROWS + lane) * stored..][..stored].copy_from_slice(element);
        }
        return;
    };
    let blocks = panel.chunks_exact_mut(block_bytes(&scheme));
    for (out, block) in blocks.zip(row.chunks_exact(stored)) {
        if scheme.parts.is_some() {
            place_super(&scheme, &SuperBlock::read(dtype, block), lane, out);
        } else {
            place_small(&scheme, &SmallBlock::read(dtype, block), lane, out);
        }
    }
}

/// Quants, scales, minima.
fn place_small(scheme: &Scheme, block: &SmallBlock, lane: usize, out: &mut [u8]) {
    let (quants, numbers) = out.split_at_mut(quant_bytes(scheme));
    place_quants(scheme.bits, &block.quants, lane, quants);
    numbers[2 * lane..][..2].copy_from_slice(&block.scale);
    if scheme.has_minima {
        numbers[F16_ROWS + 2 * lane..][..2].copy_from_slice(&block.minimum);
    }
}

/// `d`, `dmin`, then for each 32 columns: quants, scales of their parts, minima of their parts.
fn place_super(scheme: &Scheme, block: &SuperBlock, lane: usize, out: &mut [u8]) {
    out[2 * lane..][..2].copy_from_slice(&block.d);
    let mut head = F16_ROWS;
    if scheme.has_minima {
        out[head + 2 * lane..][..2].copy_from_slice(&block.dmin);
        head += F16_ROWS;
    }
    let parts = scheme.parts.expect("super-blocks have parts");
    for (b, out) in out[head..].chunks_exact_mut(part_bytes(scheme)).enumerate() {
        let (quants, numbers) = out.split_at_mut(quant_bytes(scheme));
        place_quants(scheme.bits, &block.quants.as_chunks().0[b], lane, quants);
        for part in 0..parts {
            numbers[part * PANEL_ROWS + lane] = block.scales[b * parts + part] as u8;
            if scheme.has_minima {
                let minimum = block.minima[b * parts + part] as u8;
                numbers[(parts + part) * PANEL_ROWS + lane] = minimum;
            }
        }
    }
}

/// Places the quants of 32 columns, as many groups of 64 bytes a half as a quant has bits: eight
/// bits as they are; of fewer the low four, the two above them, the one above those, as the
/// module above says.
fn place_quants(bits: usize, quants: &[u8; SMALL], lane: usize, out: &mut [u8]) {
    let words: [u32; 8] = std::array::from_fn(|group| {
        let four = quants[4 * group..][..4].try_into().expect("four bytes");
        u32::from_le_bytes(four)
    });
    let mut groups = [0; 8];
    let mut done = 0;
    while done < bits {
        // A group of 64 bytes takes `width` bits of `8 / width` groups of columns; columns that
        // share a byte are 16 apart for nibbles, as in Q4_0, and 4 apart otherwise.
        let width = 1 << (bits - done).ilog2();
        let mask = (0xff >> (8 - width)) * 0x0101_0101u32;
        for out in 0..width {
            for slot in 0..8 / width {
                let group = if width == 4 { out + 4 * slot } else { out * (8 / width) + slot };
                groups[done + out] |= ((words[group] >> done) & mask) << (slot * width);
            }
        }
        done += width;
    }
    let half = &mut out[lane / HALF * (bits * GROUP)..][..bits * GROUP];
    for (bytes, group) in half.chunks_exact_mut(GROUP).zip(groups) {
        bytes[lane % HALF * 4..][..4].copy_from_slice(&group.to_le_bytes());
    }
}
