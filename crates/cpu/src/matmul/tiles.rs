//! Products by AMX: of int8, bit for bit those of any other way, and of bf16 ([`super::bf16`]).

use std::arch::x86_64::*;

use super::bf16::Bf16;
use super::blocks;
use super::codes::{Bytes, Codes, Planes, Quads, Table};
use super::quantized::{Forward, Terms};
use super::unpack::ExpandScales;
use crate::amx::{Amx, Config, Tiles};
use crate::dot::{Dot, Kernel, NARROW, WIDE};
use crate::pack::{Geometry, PANEL, Panels, UNIT};
use crate::simd::{Avx512, LANES, Simd};

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

/// Floats of scratch of a bf16 product of so many rows: the unpacked weight, and for each row the
/// last step where the rows have no whole number of them.
pub(super) fn bf16_scratch(rows: usize) -> usize {
    (UNITS * STEPS * UNIT_STEP + rows * 64) / 4
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
                unpack.run(amx.vectors());
                for (u, b) in (0..count).map(|u| (u, unpacked.add(u * STEPS * UNIT_STEP))) {
                    let column = (t.panels.start + (unit + u) * 2) * PANEL;
                    let part = Part { t, column, b, first: step == 0, rows };
                    if direct > 0 {
                        let a = t.x.add(t.rows.start * t.x_step + step * STEP).cast();
                        part.multiply(&tiles, a, t.x_step * 2, (0, direct));
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
    unsafe fn run(self, s: Avx512) {
        // SAFETY: the caller's. `Amx`, without which nobody comes here, is the proof of the
        // bf16 conversions.
        unsafe {
            match (self.quads.bits, self.quads.has_table) {
                (2, _) => self.with::<Planes<2>>(s),
                (3, _) => self.with::<Planes<3>>(s),
                (4, false) => self.with::<Planes<4>>(s),
                (4, true) => self.with::<Table<NARROW>>(s),
                (5, _) => self.with::<Planes<5>>(s),
                (6, _) => self.with::<Planes<6>>(s),
                _ => self.with::<Bytes<WIDE>>(s),
            }
        }
    }

    #[target_feature(
        enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"
    )]
    unsafe fn with<C: Codes>(self, s: Avx512) {
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
                    let ahead = bytes.as_ptr().wrapping_add(8 * bytes.len());
                    let at = self.unit * C::BYTES;
                    for line in (0..self.units * C::BYTES).step_by(64) {
                        s.prefetch(ahead.wrapping_add(at + line));
                    }
                    s.prefetch(
                        ahead.wrapping_add(self.weight.geometry().scales_at + self.unit * 32),
                    );
                    self.panel::<C>(s, bytes.as_ptr(), to);
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
    unsafe fn panel<C: Codes>(self, s: Avx512, panel: *const u8, to: *mut u8) {
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
            Kernel::<Avx512>::run(expand, s);
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
                            let both = _mm512_cvtne2ps_pbh(high, low);
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

/// From so many rows on AMX does an int8 product faster.
pub(super) const INT8_ROWS: usize = 8;

/// Groups between two stores of an int8 product's sums.
const GROUPS: usize = 8;

/// Bytes of scratch of an int8 product for the integer sums of two panels.
pub(super) const INT8_SUMS: usize = GROUPS * 2 * ROWS * LANES * 4;

/// Tiles of int8 products for blocks of `rows` rows and groups of `group` elements.
fn int8_config(rows: u8, group: usize) -> Config {
    let (c, a, b) = ((rows, 64), (rows, group as u16), (group as u8 / 4, 64));
    Config::new([c, c, c, c, a, a, b, b])
}

/// The parts of the scratch memory of an int8 tile.
pub(super) struct Int8Scratch {
    pub(super) terms: *mut u32,
    pub(super) scales: *mut f32,
    pub(super) neg_mins: *mut f32,
    pub(super) bytes: *mut u8,
    pub(super) sums: *mut i32,
}

/// A tile of a quantized product.
pub(super) fn int8(amx: Amx, t: &Forward<'_>, scratch: &Int8Scratch) {
    let (g, s) = (t.weight.geometry(), amx.vectors());
    let quads = Quads::of(g);
    let (units, groups) = (g.k / UNIT, g.k / g.group);
    let (rows, x_bytes) = (t.rows.len(), g.k + units * 8);
    // SAFETY: the tile's rows and panels exist, with their elements; scratch is for such a tile.
    unsafe {
        let x = t.x.add(t.rows.start * x_bytes);
        for first in (0..rows).step_by(ROWS) {
            s.enter(Terms {
                geometry: g,
                offset: 0,
                x: x.add(first * x_bytes),
                rows: ROWS.min(rows - first),
                to: scratch.terms.add(first * (units + groups)),
            });
        }
        let tiles = amx.configure(&int8_config(ROWS as u8, g.group));
        for panel in t.panels.clone().step_by(2) {
            let count = 2.min(t.panels.end - panel);
            for i in 0..count {
                let panel = t.weight.panel(panel + i).as_ptr();
                s.enter(ExpandScales {
                    geometry: g,
                    panel,
                    first: 0,
                    count: groups,
                    scales: scratch.scales.add(i * groups * LANES),
                    neg_mins: scratch.neg_mins.wrapping_add(i * groups * LANES),
                });
                expand_signed(s, &quads, panel, units, scratch.bytes.add(i * units * 512));
            }
            // A panel alone is multiplied twice.
            let b = [scratch.bytes, scratch.bytes.add((count - 1) * units * 512)];
            for first in (0..rows).step_by(ROWS) {
                let size = ROWS.min(rows - first);
                if size < ROWS {
                    tiles.reconfigure(&int8_config(size as u8, g.group));
                }
                for group in (0..groups).step_by(GROUPS) {
                    let some = GROUPS.min(groups - group);
                    let from = group * g.group;
                    tiles.int8_groups(
                        scratch.sums,
                        x.add(first * x_bytes + from),
                        x_bytes,
                        b.map(|b| b.add(from * PANEL).cast_const()),
                        g.group,
                        some,
                    );
                    for i in 0..count {
                        let row = t.rows.start + first;
                        let column = (panel + i) * PANEL;
                        let scales = (i * groups + group) * LANES;
                        let combine = Combine {
                            sums: scratch.sums.add(i * ROWS * LANES),
                            groups: some,
                            group,
                            rows: size,
                            scales: scratch.scales.add(scales),
                            neg_mins: scratch.neg_mins.wrapping_add(scales),
                            terms: scratch.terms.add(first * (units + groups)),
                            out: t.out.add(row * t.out_step + column),
                            out_step: t.out_step,
                            lanes: (g.n - column).min(PANEL),
                        };
                        combine.run(s, g);
                    }
                }
                if size < ROWS {
                    tiles.reconfigure(&int8_config(ROWS as u8, g.group));
                }
            }
        }
    }
}

/// Writes the quads of consecutive units as signed bytes, the zero subtracted: `[units][8]`
/// vectors.
struct ExpandSigned<'a, C> {
    quads: &'a Quads,
    units: *const u8,
    count: usize,
    to: *mut u8,
    codes: C,
}

impl<C: Codes> Kernel<Avx512> for ExpandSigned<'_, C> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: Avx512) {
        let _ = self.codes;
        // SAFETY: `units` is valid for `count` units of `C`, `to` for `count` of 512 bytes; the
        // table has 64 bytes.
        unsafe {
            let table = s.load_quad(self.quads.table.as_ptr().cast());
            let zero = _mm512_set1_epi8(self.quads.zero.cast_signed());
            for u in 0..self.count {
                let unit = self.units.add(u * C::BYTES);
                let to = self.to.add(u * 512);
                macro_rules! put {
                    ($($q:expr)*) => {
                        $(
                            let quad = _mm512_sub_epi8(C::quad(s, unit, table, $q), zero);
                            s.store_quad(to.add($q * 64), quad);
                        )*
                    };
                }
                put!(0 1 2 3 4 5 6 7);
            }
        }
    }
}

/// Expands `count` units to signed bytes.
///
/// # Safety
/// As for [`super::unpack::expand_quads`].
unsafe fn expand_signed(s: Avx512, quads: &Quads, units: *const u8, count: usize, to: *mut u8) {
    macro_rules! with {
        ($codes:expr) => {
            s.enter(ExpandSigned { quads, units, count, to, codes: $codes })
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

/// Goes on with the chains of a block of rows and one panel by the integer sums of some groups.
#[derive(Copy, Clone)]
struct Combine {
    /// `[groups][2][16 rows][16]`, this panel's.
    sums: *const i32,
    groups: usize,
    /// The first group.
    group: usize,
    rows: usize,
    /// Of the first group on.
    scales: *const f32,
    neg_mins: *const f32,
    /// Of all units, for these rows.
    terms: *const u32,
    out: *mut f32,
    out_step: usize,
    lanes: usize,
}

impl Combine {
    /// Picks the kernel.
    fn run(self, s: Avx512, g: &Geometry) {
        match (g.group, g.has_min) {
            (16, true) => self.with::<2, true>(s),
            (16, false) => self.with::<2, false>(s),
            (_, true) => self.with::<1, true>(s),
            (_, false) => self.with::<1, false>(s),
        }
    }

    fn with<const PER_UNIT: usize, const MIN: bool>(self, s: Avx512) {
        for (first, size) in blocks(self.rows, ROWS) {
            let of = (self, first);
            match size {
                ROWS => s.enter(Rows::<ROWS, PER_UNIT, MIN>(of)),
                4 => s.enter(Rows::<4, PER_UNIT, MIN>(of)),
                2 => s.enter(Rows::<2, PER_UNIT, MIN>(of)),
                _ => s.enter(Rows::<1, PER_UNIT, MIN>(of)),
            }
        }
    }
}

/// `R` rows of a block, from one on.
struct Rows<const R: usize, const PER_UNIT: usize, const MIN: bool>((Combine, usize));

impl<const R: usize, const PER_UNIT: usize, const MIN: bool> Kernel<Avx512>
    for Rows<R, PER_UNIT, MIN>
{
    type Out = ();

    #[inline(always)]
    fn run(self, s: Avx512) {
        let (c, first) = self.0;
        // SAFETY: sums, scales and terms are there for these groups and rows, and outputs for
        // the rows and the panel's lanes.
        unsafe {
            let out = |r: usize| c.out.add((first + r) * c.out_step);
            let mut acc = [s.zero(); R];
            if c.group > 0 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = s.load_first(out(r), c.lanes);
                }
            }
            for i in 0..c.groups {
                let (unit, in_unit) = ((c.group + i) / PER_UNIT, (c.group + i) % PER_UNIT);
                let of_unit = c.terms.add(unit * (1 + PER_UNIT) * c.rows + first);
                let x_scales = of_unit.cast::<f32>();
                let terms = of_unit.add((1 + in_unit) * c.rows).cast::<f32>();
                let scale = s.load(c.scales.add(i * LANES));
                let sums = c.sums.add(i * 2 * ROWS * LANES + first * LANES);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let sum = s.to_f32(s.load_quad(sums.add(r * LANES).cast()));
                    let scale = s.mul(scale, s.splat(x_scales.add(r).read()));
                    *acc = s.fma(sum, scale, *acc);
                }
                if MIN {
                    let min = s.load(c.neg_mins.add(i * LANES));
                    for (r, acc) in acc.iter_mut().enumerate() {
                        *acc = s.fma(min, s.splat(terms.add(r).read()), *acc);
                    }
                }
            }
            for (r, acc) in acc.into_iter().enumerate() {
                if c.lanes < LANES {
                    s.store_first(out(r), acc, c.lanes);
                } else {
                    s.store(out(r), acc);
                }
            }
        }
    }
}
