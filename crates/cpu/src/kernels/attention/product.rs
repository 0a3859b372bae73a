//! What every product of attention is: results that are sums of rows, `to_r += sum over i of
//! c(r, i) from_i`, with lanes along the rows and a chain over `i`. Results come in blocks whose
//! sums stay in registers, which changes no bit of them.

use std::ops::Range;

use crate::simd::{LANES, Simd, Task};

/// The most results of a block.
const RESULTS: usize = 8;

/// Rows cut into panels of 16 columns, each of which has its vectors of all rows side by side; the
/// last may reach beyond the rows.
#[derive(Copy, Clone)]
pub(super) struct Panels {
    pub(super) start: *const f32,
    /// Floats of a panel.
    pub(super) step: usize,
}

impl Panels {
    /// The panels from one of them on.
    #[inline(always)]
    pub(super) fn skip(self, panels: usize) -> Panels {
        Panels { start: self.start.wrapping_add(panels * self.step), ..self }
    }
}

/// Coefficients `c(r, i)`: `i * step` floats behind the pointer of result `r`.
#[derive(Copy, Clone)]
pub(super) struct Coefficients<'a> {
    pub(super) rows: &'a [*const f32],
    pub(super) step: usize,
}

/// Writes `to_r = sum over i < count of c_r[i] from_i` for so many whole vectors, from 0.
///
/// # Safety
/// All rows must have that many vectors, those of coefficients `count` floats.
#[inline(always)]
pub(super) unsafe fn multiply<S: Simd>(
    s: S,
    to: &[*mut f32],
    rows: &[*const f32],
    from: Panels,
    count: usize,
    vectors: usize,
) {
    let c = Coefficients { rows, step: 1 };
    let width = vectors * LANES;
    s.call(Product::<false> { to, c, from, seen: Seen::All(count), factors: None, width });
}

/// `to_r = f_r to_r + sum over i in ranges_r of c(r, i) from_i`, each row of `width` floats. Without
/// factors they are 1.
///
/// # Safety
/// The rows of all ranges, the results and the coefficients must be there.
#[inline(always)]
pub(super) unsafe fn add_weighted<S: Simd>(
    s: S,
    to: &[*mut f32],
    c: Coefficients<'_>,
    from: Panels,
    ranges: &[Range<usize>],
    factors: Option<&[f32]>,
    width: usize,
) {
    s.call(Product::<true> { to, c, from, seen: Seen::Ranges(ranges), factors, width });
}

/// The sources of the results.
#[derive(Copy, Clone)]
enum Seen<'a> {
    /// The first of them, for all results.
    All(usize),
    /// A range for each result.
    Ranges(&'a [Range<usize>]),
}

/// See [`multiply`] and, of `ADD`, [`add_weighted`].
struct Product<'a, const ADD: bool> {
    to: &'a [*mut f32],
    c: Coefficients<'a>,
    from: Panels,
    seen: Seen<'a>,
    factors: Option<&'a [f32]>,
    width: usize,
}

impl<const ADD: bool> Task for Product<'_, ADD> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = self.width / LANES;
        // As few vectors side by side as make no more passes.
        let mut passes = whole.div_ceil(S::BLOCK.1);
        let mut v = 0;
        while v < whole {
            let wide = (whole - v).div_ceil(passes);
            passes -= 1;
            match wide {
                4 if const { S::BLOCK.1 >= 4 } => self.pass::<S, 4, false>(s, v),
                3 if const { S::BLOCK.1 >= 4 } => self.pass::<S, 3, false>(s, v),
                2 if const { S::BLOCK.1 >= 4 } => self.pass::<S, 2, false>(s, v),
                _ => self.pass::<S, 1, false>(s, v),
            }
            v += wide;
        }
        if self.width > whole * LANES {
            self.pass::<S, 1, true>(s, whole);
        }
    }
}

impl<const ADD: bool> Product<'_, ADD> {
    /// All results, `V` vectors of them from vector `v` on, or the `PART` of one that is left.
    #[inline(always)]
    fn pass<S: Simd, const V: usize, const PART: bool>(&self, s: S, v: usize) {
        let most = const { if S::BLOCK.0 / V < RESULTS { S::BLOCK.0 / V } else { RESULTS } };
        let all = self.to.len();
        let mut blocks = all.div_ceil(most);
        let mut r = 0;
        while r < all {
            let size = (all - r).div_ceil(blocks);
            blocks -= 1;
            match size {
                8 if const { S::BLOCK.0 / V >= 8 } => self.block::<S, 8, V, PART>(s, r, v),
                7 if const { S::BLOCK.0 / V >= 7 } => self.block::<S, 7, V, PART>(s, r, v),
                6 if const { S::BLOCK.0 / V >= 6 } => self.block::<S, 6, V, PART>(s, r, v),
                5 if const { S::BLOCK.0 / V >= 5 } => self.block::<S, 5, V, PART>(s, r, v),
                4 if const { S::BLOCK.0 / V >= 4 } => self.block::<S, 4, V, PART>(s, r, v),
                3 if const { S::BLOCK.0 / V >= 3 } => self.block::<S, 3, V, PART>(s, r, v),
                2 => self.block::<S, 2, V, PART>(s, r, v),
                _ => self.block::<S, 1, V, PART>(s, r, v),
            }
            r += size;
        }
    }

    /// `R` results from result `r` on.
    #[inline(always)]
    fn block<S: Simd, const R: usize, const V: usize, const PART: bool>(
        &self,
        s: S,
        r: usize,
        v: usize,
    ) {
        let (mut to, mut c) = ([std::ptr::null_mut(); R], [std::ptr::null(); R]);
        for i in 0..R {
            to[i] = self.to[r + i].wrapping_add(v * LANES);
            c[i] = self.c.rows[r + i];
        }
        let ranges = match self.seen {
            Seen::All(count) => Ranges::All(0..count),
            Seen::Ranges(ranges) => Ranges::Each(&ranges[r..r + R]),
        };
        let (step, from) = (self.c.step, self.from.skip(v));
        let n = if PART { self.width - v * LANES } else { LANES };
        let factors = self.factors.map(|f| &f[r..r + R]);
        s.call(Block::<ADD, PART, R, V> { to, c, step, from, ranges, factors, n });
    }
}

/// As [`Seen`], of a block.
enum Ranges<'a> {
    All(Range<usize>),
    Each(&'a [Range<usize>]),
}

/// `R` results of `V` vectors; where they are a `PART`, of the first `n` floats of one.
struct Block<'a, const ADD: bool, const PART: bool, const R: usize, const V: usize> {
    to: [*mut f32; R],
    c: [*const f32; R],
    step: usize,
    from: Panels,
    ranges: Ranges<'a>,
    factors: Option<&'a [f32]>,
    n: usize,
}

impl<const ADD: bool, const PART: bool, const R: usize, const V: usize> Task
    for Block<'_, ADD, PART, R, V>
{
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = [[s.zero(); V]; R];
        // SAFETY: what `multiply` and `add_weighted` ask for.
        unsafe {
            if ADD {
                for r in 0..R {
                    for v in 0..V {
                        sums[r][v] = if PART {
                            s.load_first(self.to[r].add(v * LANES), self.n)
                        } else {
                            s.load(self.to[r].add(v * LANES))
                        };
                    }
                }
                if let Some(factors) = self.factors {
                    for r in 0..R {
                        for v in 0..V {
                            sums[r][v] = s.mul(sums[r][v], s.splat(factors[r]));
                        }
                    }
                }
            }
            match &self.ranges {
                Ranges::All(range) => sums = self.add::<S, false>(s, sums, range.clone(), &[]),
                Ranges::Each(ranges) => {
                    // What all results have in common, and what only some of them have before
                    // and after it.
                    let (mut low, mut high) = (usize::MAX, 0);
                    let (mut start, mut end) = (0, usize::MAX);
                    for range in *ranges {
                        low = range.start.min(low);
                        high = range.end.max(high);
                        start = range.start.max(start);
                        end = range.end.min(end);
                    }
                    let start = start.clamp(low, high.max(low));
                    let end = end.clamp(start, high.max(start));
                    sums = self.add::<S, true>(s, sums, low..start, ranges);
                    sums = self.add::<S, false>(s, sums, start..end, ranges);
                    sums = self.add::<S, true>(s, sums, end..high, ranges);
                }
            }
            for r in 0..R {
                for v in 0..V {
                    if PART {
                        s.store_first(self.to[r].add(v * LANES), sums[r][v], self.n);
                    } else {
                        s.store(self.to[r].add(v * LANES), sums[r][v]);
                    }
                }
            }
        }
    }
}

impl<const ADD: bool, const PART: bool, const R: usize, const V: usize> Block<'_, ADD, PART, R, V> {
    /// Adds the sources of a range; where `SOME`, each to the results alone whose range it is in.
    ///
    /// # Safety
    /// The sources and their coefficients must be there.
    #[inline(always)]
    unsafe fn add<S: Simd, const SOME: bool>(
        &self,
        s: S,
        mut sums: [[S::F32; V]; R],
        range: Range<usize>,
        ranges: &[Range<usize>],
    ) -> [[S::F32; V]; R] {
        let panel = self.from.step;
        // Known where it is one: registers are scarce.
        let step = if ADD { self.step } else { 1 };
        for i in range {
            // SAFETY: the caller's.
            unsafe {
                let from = self.from.start.wrapping_add(i * LANES);
                let mut row = [s.zero(); V];
                for v in 0..V {
                    row[v] = s.load(from.wrapping_add(v * panel));
                }
                for r in 0..R {
                    let x = s.splat(*self.c[r].wrapping_add(i * step));
                    let mask = s.first(if SOME && ranges[r].contains(&i) { LANES } else { 0 });
                    for v in 0..V {
                        let sum = s.fma(x, row[v], sums[r][v]);
                        sums[r][v] = if SOME { s.select(mask, sum, sums[r][v]) } else { sum };
                    }
                }
            }
        }
        sums
    }
}
