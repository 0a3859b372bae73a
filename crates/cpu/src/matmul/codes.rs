//! The quads of a unit, out of their bit planes.

use crate::dot::{Dot, MIDDLE, NARROW, WIDE, WIDE_ZERO};
use crate::pack::Geometry;
use crate::simd::Simd;

/// How a unit's eight quads are read. All quads are unsigned.
pub(crate) trait Codes {
    /// The class of the quads ([`Dot::dot2`]).
    const CLASS: u32;
    /// Bytes of a unit.
    const BYTES: usize;

    /// Quad `q` of the unit at `unit`; `table` is that of the weight, if it has one.
    ///
    /// # Safety
    /// `unit` must be valid for reads of `BYTES` bytes.
    unsafe fn quad<S: Dot>(s: S, unit: *const u8, table: S::I32, q: usize) -> S::I32;
}

/// Eight vectors.
pub(crate) struct Bytes<const CLASS: u32>;

impl<const CLASS: u32> Codes for Bytes<CLASS> {
    const CLASS: u32 = CLASS;
    const BYTES: usize = 512;

    #[inline(always)]
    unsafe fn quad<S: Dot>(s: S, unit: *const u8, _: S::I32, q: usize) -> S::I32 {
        // SAFETY: the caller's.
        unsafe { s.load_quad(unit.add(q * 64)) }
    }
}

/// `a` shifted left, or right when `by` is negative, across bytes; at most 7 places. `by` must
/// be known when this is inlined.
#[inline(always)]
fn shift<S: Simd>(s: S, a: S::I32, by: i32) -> S::I32 {
    match by {
        1 => s.i32_shl::<1>(a),
        2 => s.i32_shl::<2>(a),
        3 => s.i32_shl::<3>(a),
        4 => s.i32_shl::<4>(a),
        -1 => s.i32_shr::<1>(a),
        -2 => s.i32_shr::<2>(a),
        -3 => s.i32_shr::<3>(a),
        -4 => s.i32_shr::<4>(a),
        -5 => s.i32_shr::<5>(a),
        -6 => s.i32_shr::<6>(a),
        -7 => s.i32_shr::<7>(a),
        _ => a,
    }
}

/// Of each byte, the bits from `from`, as many as `mask` has, moved to where `mask` has them.
#[inline(always)]
fn field<S: Simd>(s: S, a: S::I32, from: usize, mask: u8) -> S::I32 {
    let to = mask.trailing_zeros() as i32;
    let mask = i32::from_ne_bytes([mask; 4]);
    s.i32_and(shift(s, a, to - from as i32), s.i32_splat(mask))
}

/// Bit planes of codes of `BITS` bits, 2 to 6.
pub(crate) struct Planes<const BITS: usize>;

impl<const BITS: usize> Codes for Planes<BITS> {
    const CLASS: u32 = if BITS <= 5 { NARROW } else { MIDDLE };
    const BYTES: usize = 64 * BITS;

    #[inline(always)]
    unsafe fn quad<S: Dot>(s: S, unit: *const u8, _: S::I32, q: usize) -> S::I32 {
        // SAFETY: every vector is one of the unit's `BITS`; the caller's otherwise.
        unsafe {
            let vector = |i: usize| s.load_quad(unit.add(i * 64));
            let low = if BITS < 4 {
                field(s, vector(q / 4), 2 * (q % 4), 0b11)
            } else {
                field(s, vector(q / 2), 4 * (q % 2), 0b1111)
            };
            match BITS {
                3 => s.i32_or(low, field(s, vector(2), q, 0b100)),
                5 => s.i32_or(low, field(s, vector(4), q, 0b1_0000)),
                6 => s.i32_or(low, field(s, vector(4 + q / 4), 2 * (q % 4), 0b11_0000)),
                _ => low,
            }
        }
    }
}

/// 4-bit codes with a table of bytes.
pub(crate) struct Table<const CLASS: u32>;

impl<const CLASS: u32> Codes for Table<CLASS> {
    const CLASS: u32 = CLASS;
    const BYTES: usize = 256;

    #[inline(always)]
    unsafe fn quad<S: Dot>(s: S, unit: *const u8, table: S::I32, q: usize) -> S::I32 {
        // SAFETY: the caller's.
        s.lookup(table, unsafe { Planes::<4>::quad(s, unit, table, q) })
    }
}

/// What the quads of a weight are.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(crate) struct Quads {
    /// Bits of a stored code.
    pub(crate) bits: u32,
    /// The class of its quads.
    pub(crate) class: u32,
    /// The byte of a quad that stands for 0.
    pub(crate) zero: u8,
    /// The bytes that stored codes stand for, four times over; where there is no table, zeros.
    pub(crate) table: [[u8; 16]; 4],
    /// Whether there is a table.
    pub(crate) has_table: bool,
}

impl Quads {
    /// Those of a weight of a block format.
    pub(crate) fn of(g: &Geometry) -> Quads {
        let bits = g.bits();
        let class = match bits {
            0..=5 => NARROW,
            6 => MIDDLE,
            _ => WIDE,
        };
        let Some(values) = g.table else {
            return Quads { bits, class, zero: g.zero, table: [[0; 16]; 4], has_table: false };
        };
        let (class, zero) = if values.iter().all(|v| (-16..16).contains(v)) {
            (NARROW, 16)
        } else {
            (WIDE, WIDE_ZERO)
        };
        let bytes = values.map(|v| v.cast_unsigned().wrapping_add(zero));
        Quads { bits, class, zero, table: [bytes; 4], has_table: true }
    }
}
