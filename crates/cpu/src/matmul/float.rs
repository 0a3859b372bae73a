//! Products with f32 accumulation: any operand that is not quantized activations.
//!
//! Every output is one chain over the reduced dimension, ascending, from 0:
//! `acc = fma(a, b, acc)`. SIMD lanes run over the outputs' columns. Blocking along the reduced
//! dimension stores the accumulator and loads it again, which changes no bit.

use std::ops::Range;

use half::{bf16, f16};

use super::blocks;
use super::codes::Quads;
use super::unpack::{Ahead, ExpandScales, Transpose, expand_quads};
use crate::dot::{Dot, Driver, Kernel};
use crate::pack::{Elements, Geometry, PANEL, Panels, UNIT};
use crate::simd::{LANES, Simd};

/// Steps along the reduced dimension between two stores of the accumulators: three panels of
/// so many f32 stay in the first-level cache. A multiple of [`PANEL`].
pub(crate) const CHUNK: usize = 192;

/// Panels of a tile whose right operand is packed into scratch memory.
pub(crate) const TILE_PANELS: usize = 12;

/// A matrix of f32 anywhere in memory.
#[derive(Copy, Clone)]
pub(crate) struct Strided<T> {
    pub(crate) start: *const T,
    /// Elements between rows.
    pub(crate) row: usize,
    /// Elements between columns.
    pub(crate) col: usize,
}

/// The right operand, `[K, N]` as the product sees it: `K` is reduced, lanes run over `N`.
#[derive(Copy, Clone)]
pub(crate) enum Right<'a> {
    /// Rows are `K`, columns are `N`.
    F32(Strided<f32>),
    /// As `F32`, of f16.
    F16(Strided<u16>),
    /// As `F32`, of bf16.
    BF16(Strided<u16>),
    /// A packed `[N, K]` of floats.
    Packed(Panels<'a>),
    /// A packed `[K, N]` of floats or blocks.
    Transposed(Panels<'a>),
}

/// Rows x panels of one tile, or a part of their sums.
#[derive(Clone)]
pub(crate) struct Float<'a> {
    /// Rows are `M`, columns are `K`.
    pub(crate) a: Strided<f32>,
    pub(crate) b: Right<'a>,
    /// The part of the reduced dimension that is added up; it begins at a multiple of [`CHUNK`].
    pub(crate) k: Range<usize>,
    pub(crate) n: usize,
    pub(crate) rows: Range<usize>,
    /// Panels of 16 columns.
    pub(crate) panels: Range<usize>,
    /// `[M, N]`.
    pub(crate) out: *mut f32,
    /// Elements between rows of `out`.
    pub(crate) out_step: usize,
    /// Whether the chains go on from what `out` holds.
    pub(crate) more: bool,
    /// Whether dense rows of `a` are copied to lie side by side before they are multiplied, where
    /// the right operand is not packed as it is read: far apart they share lines of the caches, and
    /// each is read again for every few panels.
    pub(crate) near: bool,
    /// At least [`scratch`] elements, aligned to 64 bytes.
    pub(crate) scratch: *mut f32,
}

/// Where the parts of the scratch memory begin, in floats.
struct Parts {
    scales: usize,
    neg_mins: usize,
    bytes: usize,
    end: usize,
}

fn parts(panels: usize) -> Parts {
    let lanes = panels * PANEL;
    // Groups of 16, or 32: at most `lanes / 16` per panel of rows.
    let groups = lanes / 16 * LANES;
    let scales = panels * CHUNK * LANES;
    let neg_mins = scales + groups;
    let bytes = neg_mins + groups;
    Parts { scales, neg_mins, bytes, end: bytes + lanes.div_ceil(UNIT) * 512 / 4 }
}

/// Floats of scratch of a tile of so many panels whose right operand is not packed as it is read.
pub(crate) fn scratch_floats(panels: usize) -> usize {
    parts(panels).end.next_multiple_of(LANES)
}

/// Floats of scratch of a tile of so many rows and panels; `near` as in [`Float`].
pub(crate) fn scratch(rows: usize, panels: usize, near: bool) -> usize {
    scratch_floats(panels) + if near { rows * CHUNK } else { 0 }
}

impl Driver for Float<'_> {
    type Out = ();

    fn run<S: Dot>(self, s: S) {
        // SAFETY: the tile's rows and panels exist, and the operands' elements with them; packed
        // operands have the product's sizes.
        unsafe {
            match self.b {
                Right::Packed(w) => {
                    let first = w.panel(self.panels.start).as_ptr();
                    let step = w.geometry().panel_bytes;
                    // Rows that share a panel find it in the first-level cache; alone they read
                    // it once.
                    let all = self.k.end - self.k.start;
                    let chunk = if self.rows.len() > S::FLOAT_BLOCK.0 { CHUNK } else { all };
                    match w.geometry().elements {
                        Elements::F16 => self.multiply(s, first.cast::<F16>(), step / 2, chunk),
                        Elements::BF16 => self.multiply(s, first.cast::<BF16>(), step / 2, chunk),
                        _ => self.multiply(s, first.cast::<f32>(), step / 4, chunk),
                    }
                }
                Right::Transposed(w) => {
                    let (panels, scratch) = (self.panels.clone(), self.scratch);
                    let fill = |k: usize, count: usize| {
                        transpose(s, w, panels.clone(), k..k + count, scratch)
                    };
                    self.chunked(s, fill);
                }
                Right::F32(b) => {
                    let fill = |k: usize, count: usize| gather::<S, f32>(s, &self, b, k, count);
                    self.chunked(s, fill);
                }
                Right::F16(b) => {
                    let b = Strided { start: b.start.cast::<F16>(), row: b.row, col: b.col };
                    self.chunked(s, |k, count| gather::<S, F16>(s, &self, b, k, count));
                }
                Right::BF16(b) => {
                    let b = Strided { start: b.start.cast::<BF16>(), row: b.row, col: b.col };
                    self.chunked(s, |k, count| gather::<S, BF16>(s, &self, b, k, count));
                }
            }
        }
    }
}

impl Float<'_> {
    /// Multiplies with panels `[K][16]` that lie `step` elements apart, chunk by chunk.
    ///
    /// # Safety
    /// The tile's rows and panels must exist, and `b` be the first of all panels.
    unsafe fn multiply<S: Dot, E: Element>(&self, s: S, b: *const E, step: usize, chunk: usize) {
        let mut k = self.k.start;
        loop {
            let count = chunk.min(self.k.end - k);
            // SAFETY: the caller's.
            unsafe { self.panels(s, b.add(k * PANEL), step, k, count) };
            k += count;
            if k >= self.k.end {
                break;
            }
        }
    }

    /// As `multiply`, where `fill(k, count)` writes rows `k .. k + count` of the tile's panels to
    /// scratch memory, as f32.
    ///
    /// # Safety
    /// As `multiply`; the tile must have the scratch of [`scratch_floats`].
    unsafe fn chunked<S: Dot>(&self, s: S, fill: impl Fn(usize, usize)) {
        let near = self.scratch.wrapping_add(scratch_floats(self.panels.len()));
        let b = self.scratch.cast_const();
        let mut k = self.k.start;
        loop {
            let count = CHUNK.min(self.k.end - k);
            fill(k, count);
            // SAFETY: the caller's; scratch has room for the rows where they are copied.
            unsafe {
                if self.near && self.a.col == 1 {
                    for (i, row) in self.rows.clone().enumerate() {
                        let from = self.a.start.add(row * self.a.row + k);
                        std::ptr::copy_nonoverlapping(from, near.add(i * CHUNK), count);
                    }
                    let start = near.cast_const().wrapping_sub(self.rows.start * CHUNK + k);
                    let a = Strided { start, row: CHUNK, col: 1 };
                    let part = Float { a, ..self.clone() };
                    part.panels(s, b, CHUNK * PANEL, k, count);
                } else {
                    self.panels(s, b, CHUNK * PANEL, k, count);
                }
            }
            k += count;
            if k >= self.k.end {
                break;
            }
        }
    }

    /// Adds the products of `count` elements from `k` on to the tile's outputs, or starts them.
    ///
    /// # Safety
    /// The tile's rows and panels must exist, and `b` hold the panels' elements.
    pub(super) unsafe fn panels<S: Dot, E: Element>(
        &self,
        s: S,
        b: *const E,
        step: usize,
        k: usize,
        count: usize,
    ) {
        let mut done = 0;
        let total = self.panels.len();
        while done < total {
            let wide = match total - done {
                // Two pairs rather than three and one, which alone is short of work.
                4 => 2,
                left => left,
            }
            .min(S::FLOAT_BLOCK.1);
            let column = (self.panels.start + done) * PANEL;
            for (first, size) in blocks(self.rows.len(), S::FLOAT_BLOCK.0) {
                let row = self.rows.start + first;
                // SAFETY: the caller's.
                let block = unsafe {
                    Block {
                        a: self.a.start.add(row * self.a.row + k * self.a.col),
                        a_row: self.a.row,
                        a_col: self.a.col,
                        b: b.add(done * step),
                        b_step: step,
                        count,
                        out: self.out.wrapping_add(row * self.out_step + column),
                        out_row: self.out_step,
                        last: (self.n - column - (wide - 1) * PANEL).min(PANEL),
                        add: k > self.k.start || self.more,
                    }
                };
                if const { S::FLOAT_BLOCK.1 == 3 } && wide > 1 {
                    match wide {
                        3 => rows::<S, E, 3>(s, block, size),
                        _ => rows::<S, E, 2>(s, block, size),
                    }
                } else {
                    rows::<S, E, 1>(s, block, size);
                }
            }
            done += wide;
        }
    }
}

/// Runs the kernel for a block of so many rows, one of those that [`blocks`] gives for a family's
/// largest: with `S` and `R` the vectors and the rows of `$kernel`.
macro_rules! by_rows {
    ($S:ident, $s:expr, $size:expr, |$R:ident| $kernel:expr) => {{
        macro_rules! of {
            ($rows:expr) => {{
                const $R: usize = $rows;
                return $s.enter($kernel);
            }};
        }
        if const { $S::FLOAT_BLOCK.0 == 8 } && $size == 8 {
            of!(8)
        }
        if const { $S::FLOAT_BLOCK.0 == 6 } && $size == 6 {
            of!(6)
        }
        if const { $S::FLOAT_BLOCK.0 > 4 } && $size == 4 {
            of!(4)
        }
        if $size == 2 {
            of!(2)
        }
        of!(1)
    }};
}
pub(super) use by_rows;

/// Picks the kernel for a block of rows.
fn rows<S: Dot, E: Element, const P: usize>(s: S, block: Block<E>, size: usize) {
    by_rows!(S, s, size, |R| Multiply::<E, R, P>(block))
}

/// A float type that vectors of f32 are loaded from.
pub(crate) trait Element: Copy {
    /// 16 elements.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::F32;
    /// The first `n` elements; the rest is 0.
    ///
    /// # Safety
    /// They must be readable.
    unsafe fn load_first<S: Simd>(s: S, from: *const Self, n: usize) -> S::F32;
    /// One element.
    fn value(self) -> f32;
}

/// The bits of an f16.
#[derive(Copy, Clone)]
#[repr(transparent)]
pub(crate) struct F16(u16);

/// The bits of a bf16.
#[derive(Copy, Clone)]
#[repr(transparent)]
pub(crate) struct BF16(u16);

macro_rules! element {
    ($type:ty, $bits:ty, $load:ident, $first:ident, $value:expr) => {
        impl Element for $type {
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::F32 {
                // SAFETY: the caller's.
                unsafe { s.$load(from.cast::<$bits>()) }
            }
            #[inline(always)]
            unsafe fn load_first<S: Simd>(s: S, from: *const Self, n: usize) -> S::F32 {
                // SAFETY: the caller's.
                unsafe { s.$first(from.cast::<$bits>(), n) }
            }
            #[inline(always)]
            fn value(self) -> f32 {
                ($value)(self)
            }
        }
    };
}
element!(f32, f32, load, load_first, |x| x);
element!(F16, u16, load_f16, load_f16_first, |x: F16| f16::from_bits(x.0).to_f32());
element!(BF16, u16, load_bf16, load_bf16_first, |x: BF16| bf16::from_bits(x.0).to_f32());

/// Operands of [`Multiply`].
struct Block<E> {
    a: *const f32,
    a_row: usize,
    a_col: usize,
    b: *const E,
    /// Elements between panels.
    b_step: usize,
    /// Length of the chain.
    count: usize,
    out: *mut f32,
    out_row: usize,
    /// Columns of the last panel.
    last: usize,
    /// Whether the chains go on from what the outputs hold.
    add: bool,
}

/// The kernel: `R` rows times `P` panels.
struct Multiply<E, const R: usize, const P: usize>(Block<E>);

impl<S: Dot, E: Element, const R: usize, const P: usize> Kernel<S> for Multiply<E, R, P> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let t = self.0;
        let mut acc = [[s.zero(); P]; R];
        // SAFETY: `a` has `R` rows of `count` elements, `b` as many of 16 in each panel, the
        // result `R` rows of `P` panels less the columns that the last one does not have.
        unsafe {
            let lanes = |p: usize| if p + 1 == P { t.last } else { LANES };
            if t.add {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (p, acc) in acc.iter_mut().enumerate() {
                        let from = t.out.add(r * t.out_row + p * PANEL);
                        *acc = s.load_first(from, lanes(p));
                    }
                }
            }
            let (mut a, mut b) = (t.a, t.b);
            for _ in 0..t.count {
                let mut columns = [s.zero(); P];
                for (p, v) in columns.iter_mut().enumerate() {
                    *v = E::load(s, b.add(p * t.b_step));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = s.splat(a.add(r * t.a_row).read());
                    for (acc, &v) in acc.iter_mut().zip(&columns) {
                        *acc = s.fma(x, v, *acc);
                    }
                }
                a = a.wrapping_add(t.a_col);
                b = b.add(PANEL);
            }
            for (r, acc) in acc.into_iter().enumerate() {
                for (p, acc) in acc.into_iter().enumerate() {
                    let to = t.out.add(r * t.out_row + p * PANEL);
                    if p + 1 == P && t.last < LANES {
                        s.store_first(to, acc, t.last);
                    } else {
                        s.store(to, acc);
                    }
                }
            }
        }
    }
}

/// Packs `count` rows from `k` on of the tile's panels: `[panel][CHUNK][16]`.
///
/// # Safety
/// `b` must have those rows and the tile's columns, and the tile the scratch of [`scratch_floats`].
unsafe fn gather<S: Dot, E: Element>(s: S, t: &Float<'_>, b: Strided<E>, k: usize, count: usize) {
    for (i, panel) in t.panels.clone().enumerate() {
        let column = panel * PANEL;
        // SAFETY: the caller's.
        unsafe {
            s.enter(Gather {
                from: Strided { start: b.start.add(k * b.row + column * b.col), ..b },
                count,
                lanes: (t.n - column).min(PANEL),
                to: t.scratch.add(i * CHUNK * PANEL),
            });
        }
    }
}

struct Gather<E> {
    from: Strided<E>,
    count: usize,
    lanes: usize,
    to: *mut f32,
}

impl<S: Dot, E: Element> Kernel<S> for Gather<E> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let from = self.from;
        // SAFETY: `from` has `count` rows of `lanes` columns, `to` as many of 16.
        unsafe {
            if from.col == 1 {
                for k in 0..self.count {
                    let row = from.start.add(k * from.row);
                    s.store(self.to.add(k * LANES), E::load_first(s, row, self.lanes));
                }
                return;
            }
            let mut k = 0;
            if from.row == 1 {
                // Lanes are rows of memory: 16 x 16 at a time.
                while k < self.count {
                    let count = (self.count - k).min(LANES);
                    let mut block = [s.zero(); LANES];
                    for (lane, v) in block.iter_mut().enumerate().take(self.lanes) {
                        *v = E::load_first(s, from.start.add(lane * from.col + k), count);
                    }
                    s.transpose(&mut block);
                    for (i, v) in block.into_iter().enumerate().take(count) {
                        s.store(self.to.add((k + i) * LANES), v);
                    }
                    k += count;
                }
                return;
            }
            while k < self.count {
                let mut row = [0.0; LANES];
                for (lane, x) in row.iter_mut().enumerate().take(self.lanes) {
                    *x = from.start.add(k * from.row + lane * from.col).read().value();
                }
                s.store(self.to.add(k * LANES), s.load(row.as_ptr()));
                k += 1;
            }
        }
    }
}

/// Unpacks `rows` of a packed `[K, N]`, from a multiple of 16 on, into some panels of its columns:
/// `[panel][CHUNK][16]`.
///
/// # Safety
/// The weight must have those rows and panels, `scratch` the floats that [`scratch_floats`] counts
/// for as many panels.
pub(super) unsafe fn transpose<S: Dot>(
    s: S,
    w: Panels<'_>,
    panels: Range<usize>,
    rows: Range<usize>,
    scratch: *mut f32,
) {
    let g = w.geometry();
    let column = panels.start * PANEL;
    let columns = (panels.len() * PANEL).min(g.k - column);
    let parts = parts(panels.len());
    let quads = Quads::of(g);
    for row in (0..rows.len()).step_by(PANEL) {
        let panel = w.panel((rows.start + row) / PANEL).as_ptr();
        // SAFETY: the caller's; scratch holds the parts that `parts` describes.
        unsafe {
            let to = scratch.add(row * LANES);
            let step = CHUNK * PANEL;
            match g.elements {
                Elements::F32 => {
                    let from = panel.cast::<f32>().add(column * PANEL);
                    s.enter(TransposeFloats { from, columns, to, step });
                }
                Elements::F16 => {
                    let from = panel.cast::<F16>().add(column * PANEL);
                    s.enter(TransposeFloats { from, columns, to, step });
                }
                Elements::BF16 => {
                    let from = panel.cast::<BF16>().add(column * PANEL);
                    s.enter(TransposeFloats { from, columns, to, step });
                }
                Elements::Codes(_) => {
                    let next = w.panel((rows.start + row) / PANEL + 1).as_ptr();
                    s.enter(Ahead { geometry: g, panel: next, column, columns });
                    transpose_codes(s, g, &quads, panel, column, columns, &parts, scratch, to);
                }
            }
        }
    }
}

/// Unpacks the 16 rows of a panel of a block format. `column` is a multiple of 32, and so is
/// `columns`, as they are parts of rows of whole units.
///
/// # Safety
/// As [`transpose`], of which this is a part: `panel` has those columns, `to` room for as many.
#[allow(clippy::too_many_arguments)] // one caller
unsafe fn transpose_codes<S: Dot>(
    s: S,
    g: &Geometry,
    quads: &Quads,
    panel: *const u8,
    column: usize,
    columns: usize,
    parts: &Parts,
    scratch: *mut f32,
    to: *mut f32,
) {
    let count = columns / UNIT;
    // SAFETY: the caller's.
    unsafe {
        let (scales, neg_mins) = (scratch.add(parts.scales), scratch.add(parts.neg_mins));
        let bytes = scratch.add(parts.bytes).cast::<u8>();
        s.enter(ExpandScales {
            geometry: g,
            panel,
            first: column / g.group,
            count: columns / g.group,
            scales,
            neg_mins,
        });
        let mut units = panel.add(column / UNIT * 64 * g.bits() as usize);
        if quads.bits < 8 {
            expand_quads(s, quads, units, count, bytes);
            units = bytes;
        }
        s.enter(Transpose {
            geometry: g,
            zero: quads.zero,
            units,
            count,
            scales,
            neg_mins,
            to,
            step: CHUNK * PANEL,
        });
    }
}

/// Writes `[columns][16]` as blocks of `[16][16 columns]`, `step` apart.
struct TransposeFloats<E> {
    from: *const E,
    columns: usize,
    to: *mut f32,
    step: usize,
}

impl<S: Dot, E: Element> Kernel<S> for TransposeFloats<E> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let mut column = 0;
        while column < self.columns {
            let count = (self.columns - column).min(LANES);
            // SAFETY: `from` has `columns` vectors, `to` as many blocks as they fill.
            unsafe {
                let mut block = [s.zero(); LANES];
                for (i, v) in block.iter_mut().enumerate().take(count) {
                    *v = E::load(s, self.from.add((column + i) * LANES));
                }
                s.transpose(&mut block);
                let to = self.to.add(column / LANES * self.step);
                for (i, v) in block.into_iter().enumerate() {
                    s.store(to.add(i * LANES), v);
                }
            }
            column += count;
        }
    }
}
