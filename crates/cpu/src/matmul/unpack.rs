//! Panels of block formats taken apart for the kernels: scales as f32, codes as bytes, and
//! values as f32 with lanes along `K`.

use super::codes::{Bytes, Codes, Planes, Quads, Table};
use crate::dot::{Dot, Kernel, NARROW, WIDE};
use crate::pack::{Geometry, PANEL, Scales, UNIT};
use crate::simd::LANES;

/// Writes the scales of a panel's groups, `[groups][16]` f32, and, where the format has them,
/// their minimums, negated, at `neg_mins`.
pub(crate) struct ExpandScales<'a> {
    pub(crate) geometry: &'a Geometry,
    /// The whole panel.
    pub(crate) panel: *const u8,
    /// First group.
    pub(crate) first: usize,
    /// Number of groups.
    pub(crate) count: usize,
    pub(crate) scales: *mut f32,
    pub(crate) neg_mins: *mut f32,
}

impl<S: Dot> Kernel<S> for ExpandScales<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let g = self.geometry;
        // SAFETY: groups `first .. first + count` exist in the panel, at the geometry's offsets;
        // `scales` and `neg_mins` (if used) are valid for `count * 16` elements.
        unsafe {
            let half = |at: usize, row: usize| {
                s.load_f16(self.panel.add(at + row * PANEL * 2).cast::<u16>())
            };
            let byte =
                |at: usize, row: usize| s.load_i8(self.panel.add(at + row * PANEL).cast::<i8>());
            for i in 0..self.count {
                let group = self.first + i;
                let at = i * LANES;
                match g.scales {
                    Scales::None => {}
                    Scales::Half => {
                        s.store(self.scales.add(at), half(g.scales_at, group));
                        if g.has_min {
                            s.store(self.neg_mins.add(at), s.neg(half(g.mins_at, group)));
                        }
                    }
                    Scales::Exponent => {
                        // As `gguf::blocks` has it: 2^(e - 128), and below 2 subnormal.
                        let e = s.i32_and(byte(g.scales_at, group), s.i32_splat(0xff));
                        let normal = s.i32_shl::<23>(s.i32_sub(e, s.i32_splat(1)));
                        let one = s.i32_gt(e, s.i32_splat(0));
                        let tiny =
                            s.i32_select(one, s.i32_splat(0x0040_0000), s.i32_splat(0x0020_0000));
                        let bits = s.i32_select(s.i32_gt(e, s.i32_splat(1)), normal, tiny);
                        s.store(self.scales.add(at), s.from_bits(bits));
                    }
                    Scales::Super => {
                        let block = group * g.group / Geometry::SUPER;
                        let sub = s.to_f32(byte(g.sub_scales_at, group));
                        s.store(self.scales.add(at), s.mul(half(g.scales_at, block), sub));
                        if g.has_min {
                            let sub = s.to_f32(byte(g.sub_mins_at, group));
                            let min = s.mul(half(g.mins_at, block), sub);
                            s.store(self.neg_mins.add(at), s.neg(min));
                        }
                    }
                }
            }
        }
    }
}

/// Writes the quads of consecutive units as bytes: `[units][8]` vectors.
struct ExpandQuads<'a, C> {
    quads: &'a Quads,
    units: *const u8,
    count: usize,
    to: *mut u8,
    codes: C,
}

impl<S: Dot, C: Codes> Kernel<S> for ExpandQuads<'_, C> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let _ = self.codes;
        // SAFETY: `units` is valid for `count` units of `C`, `to` for `count` of 512 bytes; the
        // table has 64 bytes.
        unsafe {
            let table = s.load_quad(self.quads.table.as_ptr().cast());
            for u in 0..self.count {
                let unit = self.units.add(u * C::BYTES);
                let to = self.to.add(u * 512);
                // A closure might be compiled by itself, without the family's instructions.
                macro_rules! put {
                    ($($q:literal)*) => {
                        $(s.store_quad(to.add($q * 64), C::quad(s, unit, table, $q));)*
                    };
                }
                put!(0 1 2 3 4 5 6 7);
            }
        }
    }
}

/// Expands `count` units to bytes.
///
/// # Safety
/// `units` must be valid for reads of `count` units of the weight that `quads` is of, `to` for
/// writes of `count * 512` bytes.
pub(crate) unsafe fn expand_quads<S: Dot>(
    s: S,
    quads: &Quads,
    units: *const u8,
    count: usize,
    to: *mut u8,
) {
    macro_rules! with {
        ($codes:expr) => {
            s.enter(ExpandQuads { quads, units, count, to, codes: $codes })
        };
    }
    match (quads.bits, quads.has_table) {
        (2, _) => with!(Planes::<2>),
        (3, _) => with!(Planes::<3>),
        (4, false) => with!(Planes::<4>),
        (4, true) => with!(Table::<NARROW>),
        (5, _) => with!(Planes::<5>),
        (6, _) => with!(Planes::<6>),
        _ => with!(Bytes::<WIDE>),
    }
}

/// The f32 values of 16 rows, transposed: for units of a panel, already as bytes, writes
/// `value[row][k]` for 32 `k` per unit to `to + (k / 16) * step + row * 16 + k % 16`.
pub(crate) struct Transpose<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) zero: u8,
    /// `[count][8]` vectors of bytes.
    pub(crate) units: *const u8,
    pub(crate) count: usize,
    /// From [`ExpandScales`], of the same units.
    pub(crate) scales: *const f32,
    pub(crate) neg_mins: *const f32,
    pub(crate) to: *mut f32,
    /// Elements between blocks of 16 `k`.
    pub(crate) step: usize,
}

impl<S: Dot> Kernel<S> for Transpose<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let per_unit = UNIT / self.geometry.group;
        // Beside 2^23 a byte is the low bits of the mantissa.
        let (byte, float) = (s.i32_splat(0xff), s.i32_splat(0x4b00_0000));
        let none = s.splat(8_388_608.0);
        let zero = s.splat(8_388_608.0 + f32::from(self.zero));
        // SAFETY: sources hold `count` units, `to` the blocks of 16 x 16 described above.
        unsafe {
            for half in 0..self.count * 2 {
                let group = half * per_unit / 2 * LANES;
                let scale = s.load(self.scales.add(group));
                let mut block = [s.zero(); LANES];
                for q in 0..4 {
                    let quad = s.load_quad(self.units.add((half * 4 + q) * 64));
                    let code = |a: S::I32| s.from_bits(s.i32_or(s.i32_and(a, byte), float));
                    block[q * 4] = code(quad);
                    block[q * 4 + 1] = code(s.i32_shr::<8>(quad));
                    block[q * 4 + 2] = code(s.i32_shr::<16>(quad));
                    block[q * 4 + 3] = code(s.i32_shr::<24>(quad));
                }
                if self.geometry.has_min {
                    let neg_min = s.load(self.neg_mins.add(group));
                    for v in &mut block {
                        *v = s.add(s.mul(scale, s.sub(*v, none)), neg_min);
                    }
                } else {
                    for v in &mut block {
                        *v = s.mul(scale, s.sub(*v, zero));
                    }
                }
                s.transpose(&mut block);
                let to = self.to.add(half * self.step);
                for (row, v) in block.into_iter().enumerate() {
                    s.store(to.add(row * LANES), v);
                }
            }
        }
    }
}

/// Asks for what [`ExpandScales`] and [`expand_quads`] read of a panel that comes next; no panel
/// need be there.
pub(crate) struct Ahead<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) panel: *const u8,
    /// First column, and how many: whole units.
    pub(crate) column: usize,
    pub(crate) columns: usize,
}

impl<S: Dot> Kernel<S> for Ahead<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let g = self.geometry;
        let unit = 64 * g.bits() as usize;
        let lines = |from: usize, bytes: usize| {
            for at in (from / 64 * 64..from + bytes).step_by(64) {
                s.prefetch(self.panel.wrapping_add(at));
            }
        };
        lines(self.column / UNIT * unit, self.columns / UNIT * unit);
        let (first, count) = (self.column / g.group * PANEL, self.columns / g.group * PANEL);
        match g.scales {
            Scales::None => {}
            Scales::Exponent => lines(g.scales_at + first, count),
            Scales::Half => {
                lines(g.scales_at + first * 2, count * 2);
                if g.has_min {
                    lines(g.mins_at + first * 2, count * 2);
                }
            }
            Scales::Super => {
                lines(g.scales_at + self.column / Geometry::SUPER * PANEL * 2, PANEL * 2);
                lines(g.sub_scales_at + first, count);
                if g.has_min {
                    lines(g.mins_at + self.column / Geometry::SUPER * PANEL * 2, PANEL * 2);
                    lines(g.sub_mins_at + first, count);
                }
            }
        }
    }
}
