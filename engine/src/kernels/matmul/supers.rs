//! K-quants: exact integer dots of 32 or 16 columns, and scales and minima that are exact products
//! of a super-block's f16 and a small integer.

use super::tiles::{Format, Scheme, Unpacked};
use super::{half_floats, unpack};
use crate::simd::{LANES, Lanes};

/// Blocks of 32 columns in a super-block.
const BLOCKS: usize = 8;
/// Rows of a panel: bytes of one small integer each.
const PANEL: usize = 2 * LANES;

/// What a super-block says about 16 rows.
pub(super) struct Head<L: Lanes> {
    d: L::F,
    /// Negative: a minimum is taken off.
    dmin: L::F,
}

/// Names a K-quant. A super-block of 32 rows and 256 columns is `d` (f16), maybe `dmin` (f16), and
/// eight blocks: quants, scales of each part, maybe minima of each part (`weights`).
macro_rules! format {
    ($name:ident, $bytes:literal, zero $zero:literal, parts $parts:literal,
        minima $minima:literal, $unpack:ident) => {
        pub(super) struct $name;

        impl Scheme for $name {
            const PARTS: usize = $parts;
            const HAS_MINIMA: bool = $minima;
            const ZERO: i32 = $zero;
        }

        impl $name {
            const NUMBERS: usize = if $minima { 2 } else { 1 };
            const HEAD_BYTES: usize = Self::NUMBERS * 2 * PANEL;
            const BLOCK_BYTES: usize = $bytes + Self::NUMBERS * $parts * PANEL;
        }

        impl Format for $name {
            const BLOCKS: usize = BLOCKS;
            const BYTES: usize = Self::HEAD_BYTES + BLOCKS * Self::BLOCK_BYTES;
            type Head<L: Lanes> = Head<L>;

            #[inline(always)]
            fn head<L: Lanes>(l: L, bytes: &[u8], half: usize) -> Head<L> {
                let mut dmin = l.splat(0.0);
                if $minima {
                    let stored = l.load_f16(half_floats(&bytes[2 * PANEL..], half));
                    dmin = l.mul(stored, l.splat(-1.0));
                }
                Head { d: l.load_f16(half_floats(bytes, half)), dmin }
            }

            #[inline(always)]
            fn unpack<L: Lanes>(
                l: L,
                head: &Head<L>,
                bytes: &[u8],
                half: usize,
                block: usize,
            ) -> Unpacked<L> {
                let bytes = &bytes[Self::HEAD_BYTES + block * Self::BLOCK_BYTES..];
                let (quants, numbers) = bytes[..Self::BLOCK_BYTES].split_at($bytes);
                let groups = unpack::$unpack(l, &quants[half * ($bytes / 2)..][..$bytes / 2]);
                let numbers = numbers.as_chunks::<LANES>().0;
                let (mut scales, mut minima) = ([l.splat(0.0); 2], [l.splat(0.0); 2]);
                for part in 0..$parts {
                    scales[part] = l.mul(head.d, small_integers(l, &numbers[2 * part + half]));
                    if $minima {
                        let integers = small_integers(l, &numbers[2 * ($parts + part) + half]);
                        minima[part] = l.mul(head.dmin, integers);
                    }
                }
                Unpacked { groups, scales, minima }
            }
        }
    };
}

format!(Q2K, 256, zero 0, parts 2, minima true, two_bits);
format!(Q3K, 384, zero -4, parts 2, minima false, three_bits);
format!(Q4K, 512, zero 0, parts 1, minima true, nibbles);
format!(Q5K, 640, zero 0, parts 1, minima true, five_bits);
format!(Q6K, 768, zero -32, parts 2, minima false, six_bits);

/// Sixteen signed bytes as numbers.
#[inline(always)]
fn small_integers<L: Lanes>(l: L, bytes: &[u8; LANES]) -> L::F {
    l.to_float(l.load_signed(bytes))
}
