//! `q8-rows [M, K] x blocks [N, K]^T -> f32 [M, N]`.
//!
//! Every output is one chain over the weight's groups, ascending:
//!
//! > `acc = fma(sum over the group of code * x_code, w_scale * x_scale, acc)`
//!
//! with an exact integer sum of `code` (the format's, zero subtracted), and for formats with
//! minimums right after it
//!
//! > `acc = fma(-w_min, x_scale * sum over the group of x_code, acc)`
//!
//! Groups are 32 elements, or 16 where the format's scales are per 16. Activations have a scale
//! per 32 for every format: K-quants, too, where ggml has one per 256; it is finer and the same
//! for all. Nothing of this depends on the number of rows, on blocking or on tiles.

use std::ops::Range;

use super::blocks;
use super::codes::{Bytes, Codes, Planes, Quads, Table};
use super::unpack::{ExpandScales, expand_quads};
use crate::dot::{Dot, Driver, Kernel, MIDDLE, NARROW, WIDE, offset};
use crate::pack::{Geometry, PANEL, Panels, UNIT};
use crate::simd::LANES;

/// From this many rows on, a panel's codes are expanded to bytes once for all of them.
const EXPAND_FROM: usize = 5;

/// How far ahead of a stream of codes its lines are asked for, in bytes.
const PREFETCH: usize = 4096;

/// Rows x panels of one tile.
pub(crate) struct Forward<'a> {
    pub(crate) weight: Panels<'a>,
    /// Quantized rows, one after another.
    pub(crate) x: *const u8,
    pub(crate) rows: Range<usize>,
    pub(crate) panels: Range<usize>,
    /// `[M, N]`.
    pub(crate) out: *mut f32,
    /// Elements between rows of `out`.
    pub(crate) out_step: usize,
    /// At least [`scratch`] bytes, aligned to 64.
    pub(crate) scratch: *mut u8,
}

/// Parts of the scratch memory, in bytes from its start.
struct Scratch {
    scales: usize,
    neg_mins: usize,
    bytes: usize,
    end: usize,
}

/// For `rows` rows and blocks of `panels` panels.
fn layout(g: &Geometry, rows: usize, panels: usize) -> Scratch {
    let units = g.k / UNIT;
    let groups = g.k / g.group;
    let line = |bytes: usize| bytes.next_multiple_of(64);
    let scales = line(rows * (units + groups) * 4);
    let neg_mins = scales + panels * groups * LANES * 4;
    let bytes = neg_mins + if g.has_min { panels * groups * LANES * 4 } else { 0 };
    let end = bytes + panels * units * 512;
    Scratch { scales, neg_mins, bytes, end }
}

/// Scratch bytes of a tile of this many rows, for any family.
pub(crate) fn scratch(g: &Geometry, rows: usize) -> usize {
    layout(g, rows, 2).end
}

impl Driver for Forward<'_> {
    type Out = ();

    fn run<S: Dot>(self, s: S) {
        let g = self.weight.geometry();
        let quads = Quads::of(g);
        let (units, groups) = (g.k / UNIT, g.k / g.group);
        let rows = self.rows.len();
        let x_bytes = g.k + units * 8;
        let parts = layout(g, rows, S::INT_BLOCK.1);
        let per_row = units + groups;
        // SAFETY: the tile's rows and panels exist; scratch is as large as `scratch` says.
        unsafe {
            let x = self.x.add(self.rows.start * x_bytes);
            let terms = self.scratch.cast::<u32>();
            let scales = self.scratch.add(parts.scales).cast::<f32>();
            let neg_mins = self.scratch.add(parts.neg_mins).cast::<f32>();
            let bytes = self.scratch.add(parts.bytes);
            for (first, count) in blocks(rows, S::INT_BLOCK.0) {
                s.enter(Terms {
                    geometry: g,
                    offset: offset::<S>(quads.class, quads.zero),
                    x: x.add(first * x_bytes),
                    rows: count,
                    to: terms.add(first * per_row),
                });
            }
            let expand = quads.bits < 8 && (rows >= EXPAND_FROM || !S::PLANES);
            // Only blocks of rows that reuse a pair of panels gain from it.
            let wide = if rows >= EXPAND_FROM { S::INT_BLOCK.1 } else { 1 };
            let mut p = self.panels.start;
            while p < self.panels.end {
                let count = if self.panels.end - p >= wide { wide } else { 1 };
                for i in 0..count {
                    let panel = self.weight.panel(p + i).as_ptr();
                    s.enter(ExpandScales {
                        geometry: g,
                        panel,
                        first: 0,
                        count: groups,
                        scales: scales.add(i * groups * LANES),
                        neg_mins: neg_mins.wrapping_add(i * groups * LANES),
                    });
                    if expand {
                        expand_quads(s, &quads, panel, units, bytes.add(i * units * 512));
                    }
                }
                let panel = self.weight.panel(p).as_ptr();
                if rows <= 2 {
                    // The next panel's scales: they lie behind its codes, whose stream has not
                    // come near when they are expanded.
                    let next = panel.wrapping_add(g.panel_bytes);
                    for at in (g.scales_at..g.panel_bytes).step_by(64) {
                        s.prefetch(next.wrapping_add(at));
                    }
                }
                for (first, size) in blocks(rows, S::INT_BLOCK.0) {
                    let row = self.rows.start + first;
                    let block = Block {
                        quads: &quads,
                        codes: if expand { bytes } else { panel },
                        code_step: if expand { units * 512 } else { g.panel_bytes },
                        scales,
                        neg_mins,
                        units,
                        scale_step: groups * LANES,
                        x: x.add(first * x_bytes),
                        x_step: x_bytes,
                        terms: terms.add(first * per_row),
                        out: self.out.wrapping_add(row * self.out_step + p * PANEL),
                        out_step: self.out_step,
                        last: (g.n - (p + count - 1) * PANEL).min(PANEL),
                    };
                    if expand {
                        expanded(s, g, block, size, count);
                    } else {
                        packed(s, g, block, size, count);
                    }
                }
                p += count;
            }
        }
    }
}

/// What rows contribute besides their codes, in the order [`Product`] reads it: per unit, each
/// row's scale; then per group of the unit, each row's `-offset * sum` (i32) or, for formats
/// with minimums, `scale * sum` (f32).
struct Terms<'a> {
    geometry: &'a Geometry,
    offset: i32,
    x: *const u8,
    rows: usize,
    to: *mut u32,
}

impl<S: Dot> Kernel<S> for Terms<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self, _: S) {
        let g = self.geometry;
        let units = g.k / UNIT;
        let per_unit = UNIT / g.group;
        // SAFETY: `x` is `rows` quantized rows, `to` has `rows * (units + groups)` elements.
        unsafe {
            for r in 0..self.rows {
                let row = self.x.add(r * (g.k + units * 8));
                let scales = row.add(g.k).cast::<f32>();
                let sums = scales.add(units).cast::<i32>();
                let mut to = self.to.add(r);
                for u in 0..units {
                    let scale = scales.add(u).read_unaligned();
                    let all = sums.add(u).read_unaligned();
                    let mut put = |value: u32| {
                        *to = value;
                        to = to.wrapping_add(self.rows);
                    };
                    let term = |sum: i32| {
                        if g.has_min {
                            (scale * sum as f32).to_bits()
                        } else {
                            (-self.offset * sum).cast_unsigned()
                        }
                    };
                    put(scale.to_bits());
                    if per_unit == 1 {
                        put(term(all));
                    } else {
                        let codes = row.add(u * UNIT).cast::<[i8; 16]>().read();
                        let half: i32 = codes.iter().map(|&x| i32::from(x)).sum();
                        put(term(half));
                        put(term(all - half));
                    }
                }
            }
        }
    }
}

/// A block of rows times a block of panels.
#[derive(Copy, Clone)]
struct Block<'a> {
    quads: &'a Quads,
    codes: *const u8,
    /// Bytes between panels.
    code_step: usize,
    scales: *const f32,
    neg_mins: *const f32,
    units: usize,
    /// Elements of `scales` and `neg_mins` between panels.
    scale_step: usize,
    x: *const u8,
    /// Bytes between rows.
    x_step: usize,
    terms: *const u32,
    out: *mut f32,
    /// Elements between rows.
    out_step: usize,
    /// Outputs of the last panel.
    last: usize,
}

/// The kernel: `R` rows, `P` panels, codes as `C` reads them, `GROUPS` groups per unit.
struct Product<'a, C, const R: usize, const P: usize, const GROUPS: usize, const MIN: bool> {
    block: Block<'a>,
    codes: C,
}

impl<S: Dot, C: Codes, const R: usize, const P: usize, const GROUPS: usize, const MIN: bool>
    Kernel<S> for Product<'_, C, R, P, GROUPS, MIN>
{
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let _ = self.codes;
        let b = self.block;
        let mut acc = [[s.zero(); P]; R];
        // SAFETY: the block's panels have `units` units and their groups' scales, its rows as
        // many, its terms `R` of each; outputs exist for `R` rows and `P` panels less the lanes
        // that the last one does not have.
        unsafe {
            let table = s.load_quad(b.quads.table.as_ptr().cast());
            let mut terms = b.terms;
            for u in 0..b.units {
                let unit = b.codes.add(u * C::BYTES);
                let x = b.x.add(u * UNIT);
                if R <= 2 {
                    // A stream that is read once: some lines ahead of the processor's own.
                    for line in 0..C::BYTES / 64 {
                        s.prefetch(unit.wrapping_add(PREFETCH + line * 64));
                    }
                }
                let x_scale = terms.cast::<f32>();
                for group in 0..GROUPS {
                    let term = terms.add((1 + group) * R);
                    let mut sums = [[s.i32_splat(0); P]; R];
                    if !MIN {
                        for (r, sums) in sums.iter_mut().enumerate() {
                            *sums = [s.i32_splat(term.add(r).cast::<i32>().read()); P];
                        }
                    }
                    macro_rules! pair {
                        ($q:expr) => {
                            let mut quads = [[s.i32_splat(0); 2]; P];
                            for (p, quads) in quads.iter_mut().enumerate() {
                                let unit = unit.add(p * b.code_step);
                                *quads =
                                    [C::quad(s, unit, table, $q), C::quad(s, unit, table, $q + 1)];
                            }
                            for (r, sums) in sums.iter_mut().enumerate() {
                                let x = x.add(r * b.x_step + $q * 4).cast::<i32>();
                                let (x, y) = (x.read_unaligned(), x.add(1).read_unaligned());
                                for (sum, quads) in sums.iter_mut().zip(&quads) {
                                    *sum = s.dot2(C::CLASS, *sum, quads[0], x, quads[1], y);
                                }
                            }
                        };
                    }
                    if C::BYTES == 512 {
                        let each = 8 / GROUPS;
                        for q in (group * each..(group + 1) * each).step_by(2) {
                            pair!(q);
                        }
                    } else {
                        // Shifts differ, and must be known.
                        if GROUPS == 1 || group == 0 {
                            pair!(0);
                            pair!(2);
                        }
                        if GROUPS == 1 || group == 1 {
                            pair!(4);
                            pair!(6);
                        }
                    }
                    for (p, at) in (0..P).map(|p| (p, (u * GROUPS + group) * LANES)) {
                        let scale = s.load(b.scales.add(p * b.scale_step + at));
                        for (r, (acc, sums)) in acc.iter_mut().zip(&sums).enumerate() {
                            let scale = s.mul(scale, s.splat(x_scale.add(r).read()));
                            acc[p] = s.fma(s.to_f32(sums[p]), scale, acc[p]);
                        }
                        if MIN {
                            let min = s.load(b.neg_mins.add(p * b.scale_step + at));
                            for (r, acc) in acc.iter_mut().enumerate() {
                                let sum = s.splat(term.cast::<f32>().add(r).read());
                                acc[p] = s.fma(min, sum, acc[p]);
                            }
                        }
                    }
                }
                terms = terms.add((1 + GROUPS) * R);
            }
            for (r, acc) in acc.into_iter().enumerate() {
                for (p, acc) in acc.into_iter().enumerate() {
                    let to = b.out.add(r * b.out_step + p * PANEL);
                    if p + 1 == P && b.last < LANES {
                        s.store_first(to, acc, b.last);
                    } else {
                        s.store(to, acc);
                    }
                }
            }
        }
    }
}

/// Runs a block whose codes are bit planes: few rows, one panel.
fn packed<S: Dot>(s: S, g: &Geometry, b: Block<'_>, size: usize, count: usize) {
    if b.quads.bits == 8 {
        return any::<S, _, 1, false>(s, b, Bytes::<WIDE>, size, count);
    }
    if const { !S::PLANES } {
        return;
    }
    match (b.quads.bits, g.has_min, b.quads.has_table) {
        (2, ..) => few::<S, _, 2, true>(s, b, Planes::<2>, size),
        (3, ..) => few::<S, _, 2, false>(s, b, Planes::<3>, size),
        (4, true, _) => few::<S, _, 1, true>(s, b, Planes::<4>, size),
        (4, false, false) => few::<S, _, 1, false>(s, b, Planes::<4>, size),
        (4, false, true) => match b.quads.class {
            NARROW if const { S::CLASSES } => few::<S, _, 1, false>(s, b, Table::<NARROW>, size),
            _ => few::<S, _, 1, false>(s, b, Table::<WIDE>, size),
        },
        (5, true, _) => few::<S, _, 1, true>(s, b, Planes::<5>, size),
        (5, false, _) => few::<S, _, 1, false>(s, b, Planes::<5>, size),
        _ => few::<S, _, 2, false>(s, b, Planes::<6>, size),
    }
}

/// Runs a block whose codes were expanded to bytes.
fn expanded<S: Dot>(s: S, g: &Geometry, b: Block<'_>, size: usize, count: usize) {
    let narrow = b.quads.class == NARROW;
    match (g.group, g.has_min) {
        (16, true) => any::<S, _, 2, true>(s, b, Bytes::<NARROW>, size, count),
        (16, false) => {
            if const { S::CLASSES } && narrow {
                return any::<S, _, 2, false>(s, b, Bytes::<NARROW>, size, count);
            }
            any::<S, _, 2, false>(s, b, Bytes::<MIDDLE>, size, count);
        }
        (_, true) => any::<S, _, 1, true>(s, b, Bytes::<NARROW>, size, count),
        (_, false) => {
            if const { S::CLASSES } && narrow {
                return any::<S, _, 1, false>(s, b, Bytes::<NARROW>, size, count);
            }
            any::<S, _, 1, false>(s, b, Bytes::<WIDE>, size, count);
        }
    }
}

/// One panel and up to four rows.
fn few<S: Dot, C: Codes, const GROUPS: usize, const MIN: bool>(
    s: S,
    block: Block<'_>,
    codes: C,
    size: usize,
) {
    if const { S::INT_BLOCK.0 > 4 } && size == 4 {
        return s.enter(Product::<_, 4, 1, GROUPS, MIN> { block, codes });
    }
    match size {
        2 => s.enter(Product::<_, 2, 1, GROUPS, MIN> { block, codes }),
        _ => s.enter(Product::<_, 1, 1, GROUPS, MIN> { block, codes }),
    }
}

/// One or two panels and as many rows as the family takes.
fn any<S: Dot, C: Codes, const GROUPS: usize, const MIN: bool>(
    s: S,
    block: Block<'_>,
    codes: C,
    size: usize,
    count: usize,
) {
    if const { S::INT_BLOCK.1 == 2 } && count == 2 {
        return match size {
            6 => s.enter(Product::<_, 6, 2, GROUPS, MIN> { block, codes }),
            4 => s.enter(Product::<_, 4, 2, GROUPS, MIN> { block, codes }),
            2 => s.enter(Product::<_, 2, 2, GROUPS, MIN> { block, codes }),
            _ => s.enter(Product::<_, 1, 2, GROUPS, MIN> { block, codes }),
        };
    }
    if const { S::INT_BLOCK.0 == 6 } && size == 6 {
        return s.enter(Product::<_, 6, 1, GROUPS, MIN> { block, codes });
    }
    few::<S, C, GROUPS, MIN>(s, block, codes, size);
}
