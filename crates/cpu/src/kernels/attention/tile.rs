//! What all attention kernels are made of: rows of keys wherever they are stored, dot products
//! with lanes over keys, and weighted sums of rows.

use std::ops::Range;

use gguf::TensorType;
use graph::DType;

use super::super::quantize::load_q8_0;
use super::{Heads, Operands, Prefix, Sequence};
use crate::job::Input;
use crate::simd::{LANES, Simd, Task};

/// Keys of a tile: two vectors.
pub(super) const KEYS: usize = 32;

/// The most rows whose dot products are accumulated in registers at once.
pub(super) const CHUNK: usize = 8;

/// Query rows whose coefficients the gradients of keys and values hold at once.
pub(super) const BATCH: usize = 32;

/// How cached rows are stored.
#[derive(Copy, Clone, PartialEq, Eq)]
pub(super) enum Storage {
    F32,
    F16,
    BF16,
    Q8_0,
}

impl Storage {
    pub(super) fn of(dtype: DType) -> Option<Storage> {
        match dtype {
            DType::F32 => Some(Storage::F32),
            DType::F16 => Some(Storage::F16),
            DType::BF16 => Some(Storage::BF16),
            DType::Block(TensorType::Q8_0) => Some(Storage::Q8_0),
            _ => None,
        }
    }
}

/// `[count, page, heads, width]`, dense.
#[derive(Copy, Clone)]
pub(super) struct Pages {
    base: *const u8,
    storage: Storage,
    /// Pages.
    pub(super) count: usize,
    /// Positions of a page.
    pub(super) page: usize,
    heads: usize,
    row_bytes: usize,
}

impl Pages {
    pub(super) fn new(input: &Input<'_>) -> Option<Pages> {
        let (dtype, shape) = (input.arg.dtype, input.arg.shape);
        let offset = input.arg.layout.offset * dtype.element_bytes().unwrap_or(0);
        Some(Pages {
            base: input.bytes().wrapping_add(offset),
            storage: Storage::of(dtype)?,
            count: shape.dim(0),
            page: shape.dim(1),
            heads: shape.dim(2),
            row_bytes: dtype.row_bytes(shape.dim(3))?,
        })
    }

    /// The bytes of a head's row in a slot of a page of a sequence.
    #[inline(always)]
    fn at(&self, prefix: &Prefix<'_>, seq: usize, at: (usize, usize), head: usize) -> *const u8 {
        let (column, slot) = at;
        let id = prefix.table[seq * prefix.columns + column] as usize;
        let row = (id * self.page + slot) * self.heads + head;
        self.base.wrapping_add(row * self.row_bytes)
    }
}

/// The rows of a tile, by key; those outside of the loaded range are null.
pub(super) type RowPointers = [*const f32; KEYS];

/// Finds keys (or values) `range` of the tile at position `base` of a sequence, as f32. Cached
/// rows of another type are converted into `converted`.
struct FindRows<'a> {
    own: Heads,
    pages: Option<(&'a Prefix<'a>, &'a Pages)>,
    seq: &'a Sequence,
    head: usize,
    base: usize,
    range: Range<usize>,
    width: usize,
    converted: &'a mut [f32],
}

impl Task for FindRows<'_> {
    type Out = RowPointers;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> RowPointers {
        let mut rows = [std::ptr::null(); KEYS];
        let (first, cached) = (self.base + self.range.start, self.seq.cached);
        let mut own = self.range.start;
        if let Some((prefix, pages)) = self.pages {
            own = cached.saturating_sub(self.base).min(self.range.end).max(own);
            let (mut column, mut slot) = (first / pages.page, first % pages.page);
            for i in self.range.start..own {
                let bytes = pages.at(prefix, self.seq.index, (column, slot), self.head);
                let to = self.converted[i * self.width..][..self.width].as_mut_ptr();
                // SAFETY: `Operands` promise that the position is cached in these pages, whose
                // rows have this width.
                rows[i] = unsafe { convert(s, pages.storage, bytes, to, self.width) };
                slot += 1;
                if slot == pages.page {
                    (column, slot) = (column + 1, 0);
                }
            }
        }
        for i in own..self.range.end {
            rows[i] = self.own.at(self.seq.first + self.base + i - cached, self.head);
        }
        rows
    }
}

/// A stored row as f32: where it is, or in `to`.
///
/// # Safety
/// `bytes` must be a row of `width` elements, `to` have room for it.
#[inline(always)]
unsafe fn convert<S: Simd>(
    s: S,
    storage: Storage,
    bytes: *const u8,
    to: *mut f32,
    width: usize,
) -> *const f32 {
    // SAFETY: the caller's. Rows of Q8_0 are whole blocks of 32 elements in 34 bytes.
    unsafe {
        match storage {
            Storage::F32 => return bytes.cast(),
            Storage::F16 => {
                for i in (0..width).step_by(LANES) {
                    let v = s.load_f16_first(bytes.cast::<u16>().add(i), width - i);
                    s.store_first(to.add(i), v, width - i);
                }
            }
            Storage::BF16 => {
                for i in (0..width).step_by(LANES) {
                    let v = s.load_bf16_first(bytes.cast::<u16>().add(i), width - i);
                    s.store_first(to.add(i), v, width - i);
                }
            }
            Storage::Q8_0 => {
                for block in 0..width / 32 {
                    load_q8_0(s, bytes.add(block * 34), to.add(block * 32));
                }
            }
        }
    }
    to
}

impl Operands<'_> {
    /// The keys of a tile.
    ///
    /// # Safety
    /// The positions must be those of rows of the sequence or of its cached prefix; `converted`
    /// must have room for a tile of rows.
    #[inline(always)]
    pub(super) unsafe fn keys<S: Simd>(
        &self,
        s: S,
        seq: &Sequence,
        head: usize,
        (base, range): (usize, Range<usize>),
        converted: &mut [f32],
    ) -> RowPointers {
        let pages = self.prefix.as_ref().map(|p| (p, &p.keys));
        let (own, width) = (self.k, self.width);
        s.call(FindRows { own, pages, seq, head, base, range, width, converted })
    }

    /// The values of a tile.
    ///
    /// # Safety
    /// As [`Operands::keys`].
    #[inline(always)]
    pub(super) unsafe fn values<S: Simd>(
        &self,
        s: S,
        seq: &Sequence,
        head: usize,
        (base, range): (usize, Range<usize>),
        converted: &mut [f32],
    ) -> RowPointers {
        let pages = self.prefix.as_ref().map(|p| (p, &p.values));
        let (own, width) = (self.v, self.value_width);
        s.call(FindRows { own, pages, seq, head, base, range, width, converted })
    }
}

/// Element `d` of every row of a tile becomes two vectors at `32 d`; zero for rows outside of
/// `range`, which are not read.
///
/// # Safety
/// Rows of the range must have `width` elements, `to` room for `32 padded(width)` floats.
#[inline(always)]
pub(super) unsafe fn transpose_tile<S: Simd>(
    s: S,
    rows: &RowPointers,
    range: Range<usize>,
    width: usize,
    to: &mut [f32],
) {
    s.call(Transpose { rows, range, width, to });
}

/// See [`transpose_tile`].
struct Transpose<'a> {
    rows: &'a RowPointers,
    range: Range<usize>,
    width: usize,
    to: &'a mut [f32],
}

impl Task for Transpose<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for at in (0..self.width.next_multiple_of(LANES) * 2).step_by(LANES) {
            // Halves of the tile for each 16 elements of the width.
            let (d, half) = (at / (2 * LANES) * LANES, at % (2 * LANES));
            let mut block = [s.zero(); LANES];
            let rows = &self.rows[half..half + LANES];
            let Range { start, end } = self.range;
            if start <= half && end >= half + LANES && self.width - d >= LANES {
                for i in 0..LANES {
                    // SAFETY: `transpose_tile`'s caller's; all 16 rows are in the range.
                    block[i] = unsafe { s.load(rows[i].wrapping_add(d)) };
                }
            } else {
                for i in 0..LANES {
                    if self.range.contains(&(half + i)) {
                        let row = rows[i].wrapping_add(d);
                        // SAFETY: `transpose_tile`'s caller's.
                        block[i] = unsafe { s.load_first(row, self.width - d) };
                    }
                }
            }
            s.transpose(&mut block);
            let to = &mut self.to[d * KEYS..][..LANES * KEYS];
            for (row, &values) in to.chunks_exact_mut(KEYS).zip(&block) {
                // SAFETY: 16 elements of the row's 32.
                unsafe { s.store(row[half..half + LANES].as_mut_ptr(), values) };
            }
        }
    }
}

/// Dot products of rows with every key of a transposed tile: a chain over the width.
///
/// # Safety
/// The rows must have `width` elements, `keys` be what [`transpose_tile`] wrote.
#[inline(always)]
unsafe fn dots<S: Simd, const R: usize>(
    s: S,
    rows: [*const f32; R],
    keys: *const f32,
    width: usize,
) -> [[S::F32; 2]; R] {
    let mut sums = [[s.zero(); 2]; R];
    for d in 0..width {
        // SAFETY: the caller's.
        unsafe {
            let (a, b) = (s.load(keys.add(d * KEYS)), s.load(keys.add(d * KEYS + LANES)));
            for r in 0..R {
                let x = s.splat(*rows[r].add(d));
                sums[r] = [s.fma(x, a, sums[r][0]), s.fma(x, b, sums[r][1])];
            }
        }
    }
    sums
}

/// Writes the dot products of up to [`CHUNK`] rows with the keys of a tile, 32 per row.
///
/// # Safety
/// The rows must have `width` elements, `keys` be what [`transpose_tile`] wrote.
#[inline(always)]
pub(super) unsafe fn write_dots<S: Simd>(
    s: S,
    rows: &[*const f32],
    keys: &[f32],
    width: usize,
    to: &mut [f32],
) {
    s.call(WriteDots { rows, keys, width, to });
}

/// See [`write_dots`].
struct WriteDots<'a> {
    rows: &'a [*const f32],
    keys: &'a [f32],
    width: usize,
    to: &'a mut [f32],
}

impl Task for WriteDots<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut r = 0;
        while r < self.rows.len() {
            let left = self.rows.len() - r;
            r += if S::ROWS >= 8 && left >= 8 {
                self.take::<S, 8>(s, r)
            } else if S::ROWS >= 4 && left >= 4 {
                self.take::<S, 4>(s, r)
            } else if S::ROWS >= 4 && left == 3 {
                self.take::<S, 3>(s, r)
            } else if S::ROWS >= 2 && left >= 2 {
                self.take::<S, 2>(s, r)
            } else {
                self.take::<S, 1>(s, r)
            };
        }
    }
}

impl WriteDots<'_> {
    /// Takes `R` rows from row `r` on.
    #[inline(always)]
    fn take<S: Simd, const R: usize>(&mut self, s: S, r: usize) -> usize {
        let mut rows = [std::ptr::null(); R];
        rows.copy_from_slice(&self.rows[r..r + R]);
        // SAFETY: `write_dots`' caller's.
        let sums = unsafe { dots::<S, R>(s, rows, self.keys.as_ptr(), self.width) };
        for (i, sums) in sums.iter().enumerate() {
            let to = &mut self.to[(r + i) * KEYS..][..KEYS];
            // SAFETY: a slice of 32 elements.
            unsafe {
                s.store(to.as_mut_ptr(), sums[0]);
                s.store(to.as_mut_ptr().add(LANES), sums[1]);
            }
        }
        R
    }
}

/// The coefficient of result `r` and source `i` is at `r * result + i * source`.
#[derive(Copy, Clone)]
pub(super) struct Coefficients {
    pub(super) ptr: *const f32,
    pub(super) result: usize,
    pub(super) source: usize,
}

impl Coefficients {
    #[inline(always)]
    unsafe fn at(&self, r: usize, i: usize) -> f32 {
        // SAFETY: the caller's.
        unsafe { *self.ptr.add(r * self.result + i * self.source) }
    }

    #[inline(always)]
    fn skip(self, results: usize) -> Coefficients {
        Coefficients { ptr: self.ptr.wrapping_add(results * self.result), ..self }
    }
}

/// `to_r += sum over i in range of c(r, i) from_i`: lanes over the width, a chain over `i`.
///
/// # Safety
/// All rows must have `width` elements; the coefficients must exist.
#[inline(always)]
unsafe fn add_rows<S: Simd, const R: usize>(
    s: S,
    to: [*mut f32; R],
    c: Coefficients,
    from: &[*const f32],
    range: Range<usize>,
    width: usize,
) {
    if range.is_empty() {
        return;
    }
    let mut w = 0;
    // SAFETY: the caller's.
    unsafe {
        while w + 2 * LANES <= width {
            let mut sums = [[s.zero(); 2]; R];
            for r in 0..R {
                sums[r] = [s.load(to[r].add(w)), s.load(to[r].add(w + LANES))];
            }
            for i in range.clone() {
                let from = from[i].add(w);
                let (a, b) = (s.load(from), s.load(from.add(LANES)));
                for r in 0..R {
                    let x = s.splat(c.at(r, i));
                    sums[r] = [s.fma(x, a, sums[r][0]), s.fma(x, b, sums[r][1])];
                }
            }
            for r in 0..R {
                s.store(to[r].add(w), sums[r][0]);
                s.store(to[r].add(w + LANES), sums[r][1]);
            }
            w += 2 * LANES;
        }
        while w < width {
            let n = width - w;
            let mut sums = [s.zero(); R];
            for r in 0..R {
                sums[r] = s.load_first(to[r].add(w), n);
            }
            for i in range.clone() {
                let from = s.load_first(from[i].add(w), n);
                for r in 0..R {
                    sums[r] = s.fma(s.splat(c.at(r, i)), from, sums[r]);
                }
            }
            for r in 0..R {
                s.store_first(to[r].add(w), sums[r], n);
            }
            w += LANES;
        }
    }
}

/// `to_r += sum over i in ranges_r of c(r, i) from_i`, a chain over `i` each, whatever is
/// computed together.
///
/// # Safety
/// All rows must have `width` elements; the coefficients must exist.
#[inline(always)]
pub(super) unsafe fn add_weighted<S: Simd>(
    s: S,
    to: &[*mut f32],
    c: Coefficients,
    from: &[*const f32],
    ranges: &[Range<usize>],
    width: usize,
) {
    s.call(AddWeighted { to, c, from, ranges, width });
}

/// See [`add_weighted`].
struct AddWeighted<'a> {
    to: &'a [*mut f32],
    c: Coefficients,
    from: &'a [*const f32],
    ranges: &'a [Range<usize>],
    width: usize,
}

impl Task for AddWeighted<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut r = 0;
        while r < self.to.len() {
            let left = self.to.len() - r;
            r += if S::ROWS >= 8 && left >= 8 {
                self.take::<S, 8>(s, r)
            } else if S::ROWS >= 4 && left >= 4 {
                self.take::<S, 4>(s, r)
            } else if S::ROWS >= 4 && left == 3 {
                self.take::<S, 3>(s, r)
            } else if S::ROWS >= 2 && left >= 2 {
                self.take::<S, 2>(s, r)
            } else {
                self.take::<S, 1>(s, r)
            };
        }
    }
}

impl AddWeighted<'_> {
    /// Takes `R` results from result `r` on.
    #[inline(always)]
    fn take<S: Simd, const R: usize>(&self, s: S, r: usize) -> usize {
        let mut to = [std::ptr::null_mut(); R];
        to.copy_from_slice(&self.to[r..r + R]);
        let ranges = &self.ranges[r..r + R];
        let (mut start, mut end) = (0, usize::MAX);
        for range in ranges {
            start = range.start.max(start);
            end = range.end.min(end);
        }
        let end = end.max(start);
        let (c, from, width) = (self.c, self.from, self.width);
        // Each result takes what comes before the common range, the common range, and what comes
        // after it.
        for (l, range) in ranges.iter().enumerate() {
            let range = range.start..range.end.min(start);
            if !range.is_empty() {
                s.call(AddRow { to: to[l], c: c.skip(r + l), from, range, width });
            }
        }
        // SAFETY: `add_weighted`'s caller's.
        unsafe { add_rows::<S, R>(s, to, c.skip(r), from, start..end, width) };
        for (l, range) in ranges.iter().enumerate() {
            let range = range.start.max(end)..range.end;
            if !range.is_empty() {
                s.call(AddRow { to: to[l], c: c.skip(r + l), from, range, width });
            }
        }
        R
    }
}

/// [`add_rows`] for one result.
struct AddRow<'a> {
    to: *mut f32,
    c: Coefficients,
    from: &'a [*const f32],
    range: Range<usize>,
    width: usize,
}

impl Task for AddRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `add_weighted`'s caller's.
        unsafe { add_rows::<S, 1>(s, [self.to], self.c, self.from, self.range, self.width) }
    }
}

/// Logits from dot products, and what a logit's cotangent is multiplied with to become the dot
/// product's.
#[derive(Copy, Clone)]
pub(super) struct Logits {
    scale: f32,
    softcap: Option<f32>,
    /// ALiBi's largest bias, where it adds anything.
    alibi: Option<f32>,
    heads: usize,
}

/// 0, 1, 2 ...
const COUNT: [f32; LANES] = {
    let mut all = [0.0; LANES];
    let mut i = 0;
    while i < LANES {
        all[i] = i as f32;
        i += 1;
    }
    all
};

impl Logits {
    pub(super) fn new(o: &Operands<'_>) -> Logits {
        Logits {
            scale: o.attrs.scale.get(),
            softcap: o.attrs.softcap.map(|c| c.get()),
            alibi: o.attrs.alibi.map(|b| b.get()).filter(|b| *b > 0.0),
            heads: o.heads,
        }
    }

    /// The slope of a query head's bias, if there is one.
    #[inline(always)]
    pub(super) fn bias(self, head: usize) -> Option<f32> {
        self.alibi.map(|bias| graph::alibi_slope(bias, head, self.heads))
    }

    /// Adds `-slope (position - key)` to the logits of 16 keys from position `key` on. Those
    /// after `position`, which no one sees, get something.
    #[inline(always)]
    pub(super) fn biased<S: Simd>(
        self,
        s: S,
        logit: S::F32,
        slope: Option<f32>,
        position: usize,
        key: usize,
    ) -> S::F32 {
        let Some(slope) = slope else { return logit };
        let nearest = position as i64 - key as i64;
        // SAFETY: 16 elements.
        let count = unsafe { s.load(COUNT.as_ptr()) };
        s.fnma(s.splat(slope), s.sub(s.splat(nearest as f32), count), logit)
    }

    /// The logit without its bias.
    #[inline(always)]
    pub(super) fn value<S: Simd>(self, s: S, dot: S::F32) -> S::F32 {
        let logit = s.mul(dot, s.splat(self.scale));
        match self.softcap {
            None => logit,
            Some(cap) => {
                let cap = s.splat(cap);
                s.mul(cap, s.tanh(s.div(logit, cap)))
            }
        }
    }

    /// `scale`, times `1 - (logit / cap)^2`, of a logit without its bias.
    #[inline(always)]
    pub(super) fn slope<S: Simd>(self, s: S, logit: S::F32) -> S::F32 {
        let scale = s.splat(self.scale);
        match self.softcap {
            None => scale,
            Some(cap) => {
                let t = s.div(logit, s.splat(cap));
                s.mul(scale, s.fnma(t, t, s.splat(1.0)))
            }
        }
    }
}

/// The softmax of a row as its keys come in: the highest logit so far, and the sum of the
/// exponentials under it.
pub(super) struct Running<'a> {
    pub(super) maximum: &'a mut f32,
    pub(super) sum: &'a mut f32,
}

impl Running<'_> {
    /// Takes the logits of a tile's keys, two vectors of which `seen` are its own, and gives their
    /// exponentials under the new maximum, 0 for others. The row's result so far, `width` floats
    /// at `to`, is brought under the new maximum too.
    ///
    /// # Safety
    /// `to` must have room for `width` floats.
    #[inline(always)]
    pub(super) unsafe fn take<S: Simd>(
        self,
        s: S,
        [a, b]: [S::F32; 2],
        seen: &Range<usize>,
        (to, width): (*mut f32, usize),
    ) -> [S::F32; 2] {
        let [low, high] = halves(s, seen);
        let hidden = s.splat(f32::NEG_INFINITY);
        let (a, b) = (s.select(low, a, hidden), s.select(high, b, hidden));
        let old = *self.maximum;
        let tile_max = s.reduce_max(s.max(a, b));
        let max = if old > tile_max { old } else { tile_max };
        let a = s.select(low, s.exp(s.sub(a, s.splat(max))), s.zero());
        let b = s.select(high, s.exp(s.sub(b, s.splat(max))), s.zero());
        // With an equal maximum the factor is exactly 1.
        if max != old {
            let factor = s.exp(s.splat(old - max));
            let mut first = [0.0; LANES];
            // SAFETY: the array has 16 elements; the row is the caller's.
            unsafe {
                s.store(first.as_mut_ptr(), factor);
                *self.sum *= first[0];
                for w in (0..width).step_by(LANES) {
                    let v = s.mul(s.load_first(to.add(w), width - w), factor);
                    s.store_first(to.add(w), v, width - w);
                }
            }
        }
        *self.maximum = max;
        *self.sum += s.reduce_sum(s.add(a, b));
        [a, b]
    }

    /// Divides the row's result by the sum.
    ///
    /// # Safety
    /// `to` must have room for `width` floats.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(self, s: S, (to, width): (*mut f32, usize)) {
        let inverse = s.splat(1.0 / *self.sum);
        for w in (0..width).step_by(LANES) {
            // SAFETY: the caller's.
            unsafe {
                let v = s.mul(s.load_first(to.add(w), width - w), inverse);
                s.store_first(to.add(w), v, width - w);
            }
        }
    }
}

/// The lanes of a tile's two vectors that are in a range of its keys.
#[inline(always)]
fn halves<S: Simd>(s: S, seen: &Range<usize>) -> [S::Mask; 2] {
    let (start, end) = (seen.start, seen.end);
    [s.between(start, end), s.between(start.saturating_sub(LANES), end.saturating_sub(LANES))]
}
