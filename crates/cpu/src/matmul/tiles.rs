//! Products of bf16 by AMX ([`super::bf16`]).
//!
//! Products of int8 do not gain from it here: groups of 32 elements have scales of their own, so
//! every product of two tiles is stored and loaded again before it goes on as f32, which takes as
//! long as VNNI takes for all of it (measured: 0.95 to 1.1 times as fast).

use std::arch::x86_64::*;

use super::bf16::Bf16;
use super::codes::{Bytes, Codes, Planes, Quads, Table};
use super::unpack::ExpandScales;
use crate::amx::{Amx, Config, Tiles};
use crate::dot::{Dot, Kernel, NARROW, WIDE};
use crate::pack::{PANEL, Panels, UNIT};
use crate::simd::{LANES, Vnni};

/// Rows of a tile.
const ROWS: usize = 16;

/// Elements of the reduced dimension per step of a bf16 product.
const STEP: usize = 32;

/// Steps between two stores of a bf16 product's sums: the unpacked weight stays in the
/// first-level cache.
const STEPS: usize = 8;

/// Columns whose weights are unpacked at a time, in units of 32.
const UNITS: usize = 2;

/// Bytes of an unpacked step of a unit.
const UNIT_STEP: usize = 2048;

/// Bytes of a row's steps between two stores.
const ROW_STEPS: usize = STEPS * 64;

/// Rows of more steps are copied to be side by side before they are multiplied: far apart they
/// share lines of the caches, and no line is read twice.
const WIDE_STEPS: usize = 256;

/// Floats of scratch of a bf16 product of so many rows: the unpacked weight, and for each row the
/// last step where the rows have no whole number of them, and copied ones.
pub(super) fn bf16_scratch(rows: usize) -> usize {
    (UNITS * STEPS * UNIT_STEP + rows * (64 + ROW_STEPS)) / 4
}

/// Tiles of bf16 products for blocks of `rows` rows.
fn bf16_config(rows: u8) -> Config {
    let (c, b) = ((rows, 64), (16, 64));
    Config::new([c, c, c, c, c, c, b, b])
}

/// A tile of a bf16 product.
pub(super) fn bf16(amx: Amx, t: &Bf16<'_>) {
    let g = t.weight.geometry();
    let (whole, rest) = (g.n / STEP, g.n % STEP);
    let total = g.n.div_ceil(STEP);
    let quads = Quads::of(g);
    let unpacked = t.scratch.cast::<u8>();
    let last = unpacked.wrapping_add(UNITS * STEPS * UNIT_STEP);
    let rows = t.rows.len();
    let copied = last.wrapping_add(rows * 64);
    if total == 0 {
        // An empty sum.
        for row in t.rows.clone() {
            let to = t.out.wrapping_add(row * t.out_step + t.panels.start * PANEL);
            // SAFETY: these columns of the row are this tile's.
            unsafe { std::ptr::write_bytes(to, 0, t.panels.len() * PANEL) };
        }
        return;
    }
    // SAFETY: the tile's rows exist, with `n` elements each; scratch has a line for each.
    unsafe {
        for (i, row) in t.rows.clone().enumerate().filter(|_| rest > 0) {
            let from = t.x.add(row * t.x_step + whole * STEP).cast::<u8>();
            let line = last.add(i * 64);
            std::ptr::write_bytes(line, 0, 64);
            std::ptr::copy_nonoverlapping(from, line, rest * 2);
        }
    }
    let tiles = amx.configure(&bf16_config(ROWS as u8));
    let (first_unit, units) = (t.panels.start / 2, t.panels.len() / 2);
    for unit in (0..units).step_by(UNITS) {
        let count = UNITS.min(units - unit);
        for step in (0..total).step_by(STEPS) {
            let steps = STEPS.min(total - step);
            let unpack = Unpack {
                weight: t.weight,
                quads: &quads,
                first: step,
                steps,
                unit: first_unit + unit,
                units: count,
                to: unpacked,
            };
            // The last step, if it is not whole, has rows of its own.
            let direct = steps.min(whole.saturating_sub(step));
            // SAFETY: as above; the units exist; tiles and strides are those of the configuration.
            unsafe {
                let mut a = t.x.add(t.rows.start * t.x_step + step * STEP).cast::<u8>();
                let mut stride = t.x_step * 2;
                if whole > WIDE_STEPS {
                    for row in 0..rows {
                        let to = copied.add(row * ROW_STEPS);
                        std::ptr::copy_nonoverlapping(a.add(row * stride), to, direct * 64);
                    }
                    (a, stride) = (copied, ROW_STEPS);
                }
                unpack.run(amx);
                for (u, b) in (0..count).map(|u| (u, unpacked.add(u * STEPS * UNIT_STEP))) {
                    let column = (t.panels.start + (unit + u) * 2) * PANEL;
                    let part = Part { t, column, b, first: step == 0, rows };
                    if direct > 0 {
                        part.multiply(&tiles, a, stride, (0, direct));
                    }
                    if direct < steps {
                        part.multiply(&tiles, last, 64, (direct, 1));
                    }
                }
            }
        }
    }
}

/// The rows of a bf16 tile times a unit.
struct Part<'a> {
    t: &'a Bf16<'a>,
    column: usize,
    b: *const u8,
    first: bool,
    rows: usize,
}

impl Part<'_> {
    /// Adds `count` steps from the unpacked step `from` on; `a` is the first row.
    ///
    /// # Safety
    /// `a` must have all rows, `stride` bytes apart, of `count` steps.
    unsafe fn multiply(
        &self,
        tiles: &Tiles,
        a: *const u8,
        stride: usize,
        (from, count): (usize, usize),
    ) {
        let t = self.t;
        let how = (count, self.first && from == 0);
        let c = |row: usize| t.out.wrapping_add((t.rows.start + row) * t.out_step + self.column);
        let a = |row: usize| a.wrapping_add(row * stride);
        let b = self.b.wrapping_add(from * UNIT_STEP);
        let c_stride = t.out_step * 4;
        let mut row = 0;
        // SAFETY: the caller's; the last block of rows is what the configuration says.
        unsafe {
            while self.rows - row >= 2 * ROWS {
                let next = row + ROWS;
                tiles.bf16_2x2([c(row), c(next)], c_stride, [a(row), a(next)], stride, b, how);
                row += 2 * ROWS;
            }
            while row < self.rows {
                let rows = ROWS.min(self.rows - row);
                if rows < ROWS {
                    tiles.reconfigure(&bf16_config(rows as u8));
                }
                tiles.bf16_1x2(c(row), c_stride, a(row), stride, b, how);
                if rows < ROWS {
                    tiles.reconfigure(&bf16_config(ROWS as u8));
                }
                row += rows;
            }
        }
    }
}

/// Writes parts of a weight as the right operands of bf16 steps: for each unit of 32 columns,
/// `STEPS` times `UNIT_STEP` bytes apart, `[steps][2 halves][16 pairs of rows][16 columns][2]`.
#[derive(Copy, Clone)]
struct Unpack<'a> {
    weight: Panels<'a>,
    quads: &'a Quads,
    /// The first step: two panels each.
    first: usize,
    steps: usize,
    /// The first unit.
    unit: usize,
    units: usize,
    to: *mut u8,
}

impl Unpack<'_> {
    /// Unpacks.
    ///
    /// # Safety
    /// Units must exist, and `to` must have room for `units * STEPS * UNIT_STEP` bytes.
    unsafe fn run(self, amx: Amx) {
        // SAFETY: the caller's.
        unsafe {
            match (self.quads.bits, self.quads.has_table) {
                (2, _) => self.with::<Planes<2>>(amx),
                (3, _) => self.with::<Planes<3>>(amx),
                (4, false) => self.with::<Planes<4>>(amx),
                (4, true) => self.with::<Table<NARROW>>(amx),
                (5, _) => self.with::<Planes<5>>(amx),
                (6, _) => self.with::<Planes<6>>(amx),
                _ => self.with::<Bytes<WIDE>>(amx),
            }
        }
    }

    unsafe fn with<C: Codes>(self, amx: Amx) {
        let s = amx.vectors();
        // SAFETY: the caller's. `Amx` is the proof of the features, but for those of software.
        unsafe {
            #[cfg(test)]
            if amx.software {
                return self.each_in_software::<C>(s);
            }
            self.each_native::<C>(s);
        }
    }

    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"
    )]
    unsafe fn each_native<C: Codes>(self, s: Vnni) {
        let round = |high, low| _mm512_cvtne2ps_pbh(high, low);
        // SAFETY: the caller's.
        unsafe { self.each::<C>(s, round) }
    }

    #[cfg(test)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn each_in_software<C: Codes>(self, s: Vnni) {
        // SAFETY: as many bytes, of which every value is valid.
        let round = |high: __m512, low: __m512| unsafe {
            let floats = |x: __m512| std::mem::transmute::<__m512, [f32; 16]>(x);
            let bits = crate::amx::software::to_bf16(floats(high), floats(low));
            std::mem::transmute::<[u16; 32], __m512bh>(bits)
        };
        // SAFETY: the caller's.
        unsafe { self.each::<C>(s, round) }
    }

    /// All panels of the steps; `round` gives bf16 of two vectors, the lower half of the second.
    #[inline(always)]
    unsafe fn each<C: Codes>(self, s: Vnni, round: impl Fn(__m512, __m512) -> __m512bh + Copy) {
        // SAFETY: the caller's; panels of the weight have its units.
        unsafe {
            for step in 0..self.steps {
                for side in 0..2 {
                    let panel = (self.first + step) * 2 + side;
                    let to = self.to.add(step * UNIT_STEP + side * 512);
                    let bytes = self.weight.panel(panel);
                    if bytes.is_empty() {
                        self.nothing(to);
                        continue;
                    }
                    // What is read at one place of every panel is a stream that the processor
                    // does not see.
                    let ahead = bytes.as_ptr().wrapping_add(2 * STEPS * bytes.len());
                    let at = self.unit * C::BYTES;
                    for line in (0..self.units * C::BYTES).step_by(64) {
                        s.prefetch(ahead.wrapping_add(at + line));
                    }
                    let scales = self.weight.geometry().scales_at + self.unit * 32;
                    s.prefetch(ahead.wrapping_add(scales));
                    self.panel::<C>(s, bytes.as_ptr(), to, round);
                }
            }
        }
    }

    /// Zeros where there is no second panel.
    unsafe fn nothing(self, to: *mut u8) {
        for half in 0..self.units * 2 {
            let at = half / 2 * STEPS * UNIT_STEP + half % 2 * 1024;
            // SAFETY: the caller's.
            unsafe { std::ptr::write_bytes(to.add(at), 0, 512) };
        }
    }

    /// One panel's eight pairs of rows.
    #[inline(always)]
    unsafe fn panel<C: Codes>(
        self,
        s: Vnni,
        panel: *const u8,
        to: *mut u8,
        round: impl Fn(__m512, __m512) -> __m512bh,
    ) {
        let g = self.weight.geometry();
        let per_unit = UNIT / g.group;
        let mut scales = Line([0.0; 2 * UNITS * LANES]);
        let mut neg_mins = Line([0.0; 2 * UNITS * LANES]);
        let mut pairs = Line([0u8; 256]);
        // SAFETY: the caller's; the arrays have room for all groups of the units, and for four
        // vectors.
        unsafe {
            let expand = ExpandScales {
                geometry: g,
                panel,
                first: self.unit * per_unit,
                count: self.units * per_unit,
                scales: scales.0.as_mut_ptr(),
                neg_mins: neg_mins.0.as_mut_ptr(),
            };
            Kernel::<Vnni>::run(expand, s);
            let table = s.load_quad(self.quads.table.as_ptr().cast());
            let zero = _mm512_set1_epi8(self.quads.zero.cast_signed());
            for u in 0..self.units {
                let unit = panel.add((self.unit + u) * C::BYTES);
                let to = to.add(u * STEPS * UNIT_STEP);
                // Two floats over and over.
                macro_rules! two {
                    ($at:expr) => {
                        _mm512_castpd_ps(_mm512_set1_pd($at.cast::<f64>().read()))
                    };
                }
                // 16 bytes as floats. Volatile: loads that widen, no shuffles of what was stored.
                macro_rules! codes {
                    ($at:expr) => {{
                        let bytes = $at.cast::<__m128i>().read_volatile();
                        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
                    }};
                }
                macro_rules! half {
                    ($half:expr) => {{
                        // Of each lane 16 bytes: four quads.
                        let q0 = _mm512_sub_epi8(C::quad(s, unit, table, $half * 4), zero);
                        let q1 = _mm512_sub_epi8(C::quad(s, unit, table, $half * 4 + 1), zero);
                        let q2 = _mm512_sub_epi8(C::quad(s, unit, table, $half * 4 + 2), zero);
                        let q3 = _mm512_sub_epi8(C::quad(s, unit, table, $half * 4 + 3), zero);
                        let (a, b) = (_mm512_unpacklo_epi32(q0, q1), _mm512_unpackhi_epi32(q0, q1));
                        let (c, d) = (_mm512_unpacklo_epi32(q2, q3), _mm512_unpackhi_epi32(q2, q3));
                        // The bytes of lanes 4 i + j, for i = 0 to 3.
                        let (l0, l1) = (_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
                        let (l2, l3) = (_mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d));
                        // Those of two lanes in turn, of 8 columns each.
                        let at = pairs.0.as_mut_ptr().cast::<__m512i>();
                        at.write(_mm512_unpacklo_epi8(l0, l1));
                        at.add(1).write(_mm512_unpackhi_epi8(l0, l1));
                        at.add(2).write(_mm512_unpacklo_epi8(l2, l3));
                        at.add(3).write(_mm512_unpackhi_epi8(l2, l3));
                        let group = (u * per_unit + $half * per_unit / 2) * LANES;
                        for pair in 0..8 {
                            let from = pairs.0.as_ptr().add(pair % 2 * 128 + pair / 2 * 16);
                            let scale = two!(scales.0.as_ptr().add(group + pair * 2));
                            let (mut low, mut high) = (codes!(from), codes!(from.add(64)));
                            low = _mm512_mul_ps(scale, low);
                            high = _mm512_mul_ps(scale, high);
                            if g.has_min {
                                let neg_min = two!(neg_mins.0.as_ptr().add(group + pair * 2));
                                low = _mm512_add_ps(low, neg_min);
                                high = _mm512_add_ps(high, neg_min);
                            }
                            let both = round(high, low);
                            let to = to.add($half * 1024 + pair * 64);
                            to.cast::<__m512bh>().write_unaligned(both);
                        }
                    }};
                }
                half!(0);
                half!(1);
            }
        }
    }
}

/// Aligned to a cache line.
#[repr(align(64))]
struct Line<T>(T);
