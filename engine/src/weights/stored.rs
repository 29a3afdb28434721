//! Blocks of GGUF's quantised types as the file stores them, taken apart into small integers.
//!
//! Source of all layouts: the block structs of the GGUF format (ggml's `ggml-common.h`) and the
//! reference in Python that the format's authors publish (`gguf.quants` on PyPI), against which
//! `rows/tests.rs` holds what comes out.

use baton_model_files::TensorDtype;

/// Columns of a small block.
pub(super) const SMALL: usize = 32;
/// Columns of a super-block.
pub(super) const SUPER: usize = 256;

/// What IQ4_NL's sixteen nibbles stand for.
pub(crate) const IQ4_NL_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// How a quantised type is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scheme {
    /// Bits of a quant.
    pub(super) bits: usize,
    /// What a quant of zero stands for; IQ4_NL's stand for table entries instead.
    pub(super) zero: i32,
    pub(super) has_minima: bool,
    /// Parts of each 32 columns that have a scale of their own, in super-blocks only.
    pub(super) parts: Option<usize>,
}

impl Scheme {
    /// `None` for floating-point types.
    pub(super) fn of(dtype: TensorDtype) -> Option<Self> {
        let (bits, zero, has_minima, parts) = match dtype {
            TensorDtype::Q4_0 => (4, -8, false, None),
            TensorDtype::Q4_1 => (4, 0, true, None),
            TensorDtype::Q5_0 => (5, -16, false, None),
            TensorDtype::Q5_1 => (5, 0, true, None),
            TensorDtype::Q8_0 => (8, -128, false, None),
            TensorDtype::Iq4Nl => (4, 0, false, None),
            TensorDtype::Q2K => (2, 0, true, Some(2)),
            TensorDtype::Q3K => (3, -4, false, Some(2)),
            TensorDtype::Q4K => (4, 0, true, Some(1)),
            TensorDtype::Q5K => (5, 0, true, Some(1)),
            TensorDtype::Q6K => (6, -32, false, Some(2)),
            TensorDtype::F16 | TensorDtype::Bf16 | TensorDtype::F32 => return None,
        };
        Some(Self { bits, zero, has_minima, parts })
    }
}

/// 32 columns of one row: `scale * (q + zero) + minimum`.
#[derive(Debug)]
pub(super) struct SmallBlock {
    /// Unsigned; those of Q8_0 are 128 above what the file says.
    pub(super) quants: [u8; SMALL],
    /// f16
    pub(super) scale: [u8; 2],
    /// f16; zero where the type has none.
    pub(super) minimum: [u8; 2],
}

impl SmallBlock {
    /// Takes apart one stored block of `dtype`, which has no super-blocks.
    pub(super) fn read(dtype: TensorDtype, block: &[u8]) -> Self {
        let two = |at: usize| [block[at], block[at + 1]];
        let (quants, minimum) = match dtype {
            TensorDtype::Q4_0 | TensorDtype::Iq4Nl => (nibbles(&block[2..]), [0; 2]),
            TensorDtype::Q4_1 => (nibbles(&block[4..]), two(2)),
            TensorDtype::Q5_0 => (five_bits(&block[2..]), [0; 2]),
            TensorDtype::Q5_1 => (five_bits(&block[4..]), two(2)),
            TensorDtype::Q8_0 => (std::array::from_fn(|i| block[2 + i] ^ 0x80), [0; 2]),
            _ => unreachable!("{dtype:?} has no blocks of 32"),
        };
        Self { quants, scale: two(0), minimum }
    }
}

/// Byte `i` holds column `i` low and column `i + 16` high.
fn nibbles(bytes: &[u8]) -> [u8; SMALL] {
    std::array::from_fn(|i| (bytes[i % 16] >> (i / 16 * 4)) & 15)
}

/// The fifth bits of 32 columns in 32 bits, then the nibbles.
fn five_bits(bytes: &[u8]) -> [u8; SMALL] {
    let mut quants = nibbles(&bytes[4..]);
    for (i, quant) in quants.iter_mut().enumerate() {
        *quant |= ((bytes[i / 8] >> (i % 8)) & 1) << 4;
    }
    quants
}

/// 256 columns of one row: `d * scale * (q + zero) - dmin * minimum`.
#[derive(Debug)]
pub(super) struct SuperBlock {
    pub(super) quants: [u8; SUPER],
    /// Of each part; the first 8 count where parts have 32 columns.
    pub(super) scales: [i8; 16],
    /// Likewise; zero where the type has none.
    pub(super) minima: [i8; 16],
    /// f16
    pub(super) d: [u8; 2],
    /// f16; zero where the type has none.
    pub(super) dmin: [u8; 2],
}

impl SuperBlock {
    /// Takes apart one stored super-block of `dtype`.
    pub(super) fn read(dtype: TensorDtype, block: &[u8]) -> Self {
        match dtype {
            TensorDtype::Q2K => q2_k(block),
            TensorDtype::Q3K => q3_k(block),
            TensorDtype::Q4K => q4_k(block),
            TensorDtype::Q5K => q5_k(block),
            TensorDtype::Q6K => q6_k(block),
            _ => unreachable!("{dtype:?} has no super-blocks"),
        }
    }
}

/// 16 bytes of scales (low) and minima (high), 64 of quants, `d`, `dmin`.
fn q2_k(block: &[u8]) -> SuperBlock {
    let (scales, quants) = (&block[..16], &block[16..80]);
    SuperBlock {
        quants: two_bits(quants),
        scales: std::array::from_fn(|i| (scales[i] & 15) as i8),
        minima: std::array::from_fn(|i| (scales[i] >> 4) as i8),
        d: [block[80], block[81]],
        dmin: [block[82], block[83]],
    }
}

/// 32 bytes of third bits, 64 of low two bits, 12 of scales, `d`.
///
/// Six bits make a scale plus 32: four in a nibble of the first eight bytes, two in the last four.
fn q3_k(block: &[u8]) -> SuperBlock {
    let (third, low, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let mut quants = two_bits(low);
    for (i, quant) in quants.iter_mut().enumerate() {
        *quant |= ((third[i % 32] >> (i / 32)) & 1) << 2;
    }
    let scale = |i: usize| {
        let low = (scales[i % 8] >> (i / 8 * 4)) & 15;
        let high = (scales[8 + i % 4] >> (i / 4 * 2)) & 3;
        (low | high << 4) as i8 - 32
    };
    SuperBlock {
        quants,
        scales: std::array::from_fn(scale),
        minima: [0; 16],
        d: [block[108], block[109]],
        dmin: [0; 2],
    }
}

/// Byte `32 * n + l` holds columns `128 * n + l + {0, 32, 64, 96}` from its lowest bits up.
fn two_bits(bytes: &[u8]) -> [u8; SUPER] {
    std::array::from_fn(|i| (bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3)
}

/// `d`, `dmin`, 12 bytes of scales and minima, 128 of nibbles.
fn q4_k(block: &[u8]) -> SuperBlock {
    let (scales, minima) = six_bit_pairs(&block[4..16]);
    let (d, dmin) = ([block[0], block[1]], [block[2], block[3]]);
    SuperBlock { quants: nibbles_by_64(&block[16..]), scales, minima, d, dmin }
}

/// `d`, `dmin`, 12 bytes of scales and minima, 32 of fifth bits, 128 of nibbles.
fn q5_k(block: &[u8]) -> SuperBlock {
    let fifth = &block[16..48];
    let mut quants = nibbles_by_64(&block[48..]);
    for (i, quant) in quants.iter_mut().enumerate() {
        *quant |= ((fifth[i % 32] >> (i / 32)) & 1) << 4;
    }
    let (scales, minima) = six_bit_pairs(&block[4..16]);
    SuperBlock { quants, scales, minima, d: [block[0], block[1]], dmin: [block[2], block[3]] }
}

/// Byte `32 * n + l` holds column `64 * n + l` low and column `64 * n + 32 + l` high.
fn nibbles_by_64(bytes: &[u8]) -> [u8; SUPER] {
    std::array::from_fn(|i| (bytes[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4)) & 15)
}

/// Eight scales and eight minima of six bits in 12 bytes: the first four of each are the low bits
/// of bytes 0..4 and 4..8, whose high two bits go on top of the nibbles of bytes 8..12, which are
/// the other four.
fn six_bit_pairs(bytes: &[u8]) -> ([i8; 16], [i8; 16]) {
    let (mut scales, mut minima) = ([0; 16], [0; 16]);
    for i in 0..4 {
        scales[i] = (bytes[i] & 63) as i8;
        minima[i] = (bytes[4 + i] & 63) as i8;
        scales[4 + i] = (bytes[8 + i] & 15 | bytes[i] >> 6 << 4) as i8;
        minima[4 + i] = (bytes[8 + i] >> 4 | bytes[4 + i] >> 6 << 4) as i8;
    }
    (scales, minima)
}

/// 128 bytes of low nibbles, 64 of high two bits, 16 signed scales, `d`.
///
/// Byte `64 * n + l` holds column `128 * n + l` low and column `128 * n + 64 + l` high.
fn q6_k(block: &[u8]) -> SuperBlock {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let mut quants = two_bits(high);
    for (i, quant) in quants.iter_mut().enumerate() {
        let nibble = (low[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15;
        *quant = nibble | *quant << 4;
    }
    SuperBlock {
        quants,
        scales: std::array::from_fn(|i| scales[i] as i8),
        minima: [0; 16],
        d: [block[208], block[209]],
        dmin: [0; 2],
    }
}
