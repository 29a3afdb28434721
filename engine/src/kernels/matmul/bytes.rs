//! Formats whose blocks have 32 columns: exact integer dots of 32.

use super::tiles::{Format, Scheme, Unpacked};
use super::{half_floats, unpack};
use crate::simd::Lanes;

/// Names a format: a block of 32 rows and 32 columns is quants, 32 scales (f16), and maybe 32
/// minima (f16).
macro_rules! format {
    ($name:ident, $bytes:literal, zero $zero:literal, minima $minima:literal, $unpack:ident) => {
        pub(super) struct $name;

        impl Scheme for $name {
            const PARTS: usize = 1;
            const HAS_MINIMA: bool = $minima;
            const ZERO: i32 = $zero;
        }

        impl Format for $name {
            const BLOCKS: usize = 1;
            const BYTES: usize = $bytes + if $minima { 128 } else { 64 };
            type Head<L: Lanes> = ();

            #[inline(always)]
            fn head<L: Lanes>(_l: L, _bytes: &[u8], _half: usize) {}

            #[inline(always)]
            fn unpack<L: Lanes>(
                l: L,
                _head: &(),
                bytes: &[u8],
                half: usize,
                _block: usize,
            ) -> Unpacked<L> {
                let (quants, numbers) = bytes.split_at($bytes);
                let none = l.splat(0.0);
                let minimum =
                    if $minima { l.load_f16(half_floats(&numbers[64..], half)) } else { none };
                Unpacked {
                    groups: unpack::$unpack(l, &quants[half * ($bytes / 2)..][..$bytes / 2]),
                    scales: [l.load_f16(half_floats(numbers, half)), none],
                    minima: [minimum, none],
                }
            }
        }
    };
}

format!(Q4_0, 512, zero -8, minima false, nibbles);
format!(Q4_1, 512, zero 0, minima true, nibbles);
format!(Q5_0, 640, zero -16, minima false, five_bits);
format!(Q5_1, 640, zero 0, minima true, five_bits);
format!(Q8_0, 1024, zero -128, minima false, bytes);
format!(Iq4Nl, 512, zero -128, minima false, iq4_nl);
