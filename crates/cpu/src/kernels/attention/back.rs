//! Gradients of attention, from the forward pass' log-sum-exps: with `p = exp(logit - lse)`,
//! `ds = p (dout . v - delta)` times the logit's slope.

use std::ops::Range;

use super::tile::{
    BATCH, CHUNK, Coefficients, KEYS, Logits, add_weighted, transpose_tile, write_dots,
};
use super::{Buffers, Heads, Operands, Sequence};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// The operands that only gradients have.
struct Back {
    logits: Logits,
    lse: *const f32,
    delta: *const f32,
    dout: Heads,
    heads: usize,
}

impl Back {
    fn new(job: &Job<'_>, o: &Operands<'_>) -> Back {
        Back {
            logits: Logits::new(o),
            lse: job.input(4).ptr(),
            delta: job.input(5).ptr(),
            dout: Heads::new(&job.input(6)),
            heads: o.heads,
        }
    }

    /// Turns the dot products of a row, which is at `position`, and a head with keys from
    /// position `key` on into `p`, or with `dp`, the dot products of its cotangent with the
    /// values, into `ds`; 0 where the row does not see the key.
    ///
    /// # Safety
    /// Row and head must be in range; `dots` and `dp` must hold 32 floats.
    #[inline(always)]
    unsafe fn weights<S: Simd>(
        &self,
        s: S,
        (row, head): (usize, usize),
        (position, key): (usize, usize),
        seen: &Range<usize>,
        dots: *mut f32,
        dp: Option<*const f32>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let at = row * self.heads + head;
            let (lse, delta) = (s.splat(*self.lse.add(at)), s.splat(*self.delta.add(at)));
            let slope = self.logits.bias(head);
            for half in [0, LANES] {
                let (start, end) = (seen.start.saturating_sub(half), seen.end.saturating_sub(half));
                let logit = self.logits.value(s, s.load(dots.add(half)));
                let biased = self.logits.biased(s, logit, slope, position, key + half);
                let mut v = s.exp(s.sub(biased, lse));
                if let Some(dp) = dp {
                    let dp = s.load(dp.add(half));
                    v = s.mul(s.mul(v, s.sub(dp, delta)), self.logits.slope(s, logit));
                }
                s.store(dots.add(half), s.select(s.between(start, end), v, s.zero()));
            }
        }
    }
}

/// `dq = sum over keys of ds k`, keys ascending.
pub(super) struct BackQ<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
}

impl Task for BackQ<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (o, buffers) = (self.o, self.buffers);
        let back = Back::new(self.job, o);
        let (rows, key_head, heads) = o.blocks.tile(self.tile);
        let out = |row: usize, head: usize| {
            self.job.out::<f32>().wrapping_add((row * o.heads + head) * o.width)
        };
        for row in rows.clone() {
            let to = out(row, heads.start);
            // SAFETY: these heads of this row of the result are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, heads.len() * o.width) }.fill(0.0);
        }
        for seq in o.sequences(rows.clone()) {
            let first = rows.start.max(seq.first);
            let end = rows.end.min(seq.first + seq.rows);
            let (lowest, last) = (o.first_seen(seq.position(first)), seq.position(end - 1));
            for base in (lowest / KEYS * KEYS..=last).step_by(KEYS) {
                let range = lowest.max(base) - base..(last + 1 - base).min(KEYS);
                let at = (base, range.clone());
                // SAFETY: positions up to `last` are cached or the sequence's own rows, whose
                // numbers have been checked.
                let keys = unsafe {
                    let keys = o.keys(s, &seq, key_head, at.clone(), buffers.cached_keys);
                    let values = o.values(s, &seq, key_head, at, buffers.cached_values);
                    transpose_tile(s, &keys, range.clone(), o.width, buffers.keys);
                    transpose_tile(s, &values, range, o.value_width, buffers.values);
                    keys
                };
                let seen = first.max(first + base.saturating_sub(seq.position(first)));
                let past = o.last_seeing(base + KEYS - 1).saturating_sub(seq.position(first));
                let past = end.min(first.saturating_add(past));
                let from = (seen - first) * heads.len();
                let to = (past.max(seen) - first) * heads.len();
                for chunk in (from..to).step_by(CHUNK) {
                    let n = (to - chunk).min(CHUNK);
                    let mut q = [std::ptr::null(); CHUNK];
                    let mut dout = [std::ptr::null(); CHUNK];
                    let mut result = [std::ptr::null_mut(); CHUNK];
                    let mut ranges: [_; CHUNK] = std::array::from_fn(|_| 0..0);
                    let mut index = [(0, 0); CHUNK];
                    for r in 0..n {
                        let (row, head) = split(chunk + r, first, heads.start, heads.len());
                        let position = seq.position(row);
                        let start = o.first_seen(position).max(base) - base;
                        ranges[r] = start..(position + 1 - base).min(KEYS);
                        (q[r], dout[r]) = (o.q.at(row, head), back.dout.at(row, head));
                        result[r] = out(row, head);
                        index[r] = (row, head);
                    }
                    let (ds, dp) = buffers.coefficients.split_at_mut(CHUNK * KEYS);
                    // SAFETY: the rows have the operands' widths; the results are the tile's.
                    unsafe {
                        write_dots(s, &q[..n], buffers.keys, o.width, ds);
                        write_dots(s, &dout[..n], buffers.values, o.value_width, dp);
                        for r in 0..n {
                            let dots = ds[r * KEYS..][..KEYS].as_mut_ptr();
                            let dp = dp[r * KEYS..][..KEYS].as_ptr();
                            let at = (seq.position(index[r].0), base);
                            back.weights(s, index[r], at, &ranges[r], dots, Some(dp));
                        }
                        let c = Coefficients { ptr: ds.as_ptr(), result: KEYS, source: 1 };
                        add_weighted(s, &result[..n], c, &keys, &ranges[..n], o.width);
                    }
                }
            }
        }
    }
}

/// The row and head of query `i` of a tile.
#[inline(always)]
fn split(i: usize, first: usize, head: usize, heads: usize) -> (usize, usize) {
    (first + i / heads, head + i % heads)
}

/// `dk = sum over query rows of ds q` (`KEY`) or `dv = sum of p dout`, of the rows' own keys or
/// of `pages`: rows ascending, the heads that share the key within a row ascending. A slot of a
/// page takes the sequences that read it in their order.
pub(super) struct BackKey<'a, const KEY: bool> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
    pub(super) pages: bool,
}

impl<const KEY: bool> Task for BackKey<'_, KEY> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (job, o) = (self.job, self.o);
        let mut buffers = self.buffers;
        let back = Back::new(job, o);
        let (block, key_head) = (self.tile / o.key_heads, self.tile % o.key_heads);
        let width = if KEY { o.width } else { o.value_width };
        // Rows of the result are slots of pages or rows of the operands.
        let out =
            |row: usize| job.out::<f32>().wrapping_add((row * o.key_heads + key_head) * width);
        let clear = |rows: Range<usize>| {
            for row in rows {
                // SAFETY: this head of this row of the result is the tile's.
                unsafe { std::slice::from_raw_parts_mut(out(row), width) }.fill(0.0);
            }
        };
        let mut add = |seq: Sequence, base: usize, count: usize, first: usize| {
            let to = std::array::from_fn(|j| match j < count {
                true => out(first + j),
                false => std::ptr::null_mut(),
            });
            let (back, buffers) = (&back, &mut buffers);
            s.call(AddKeys::<KEY> { o, back, seq: &seq, key_head, base, count, to, buffers });
        };
        let Some(prefix) = o.prefix.as_ref().filter(|_| self.pages) else {
            let rows = block * KEYS..((block + 1) * KEYS).min(o.rows);
            clear(rows.clone());
            for seq in o.sequences(rows.clone()) {
                let first = rows.start.max(seq.first);
                let count = rows.end.min(seq.first + seq.rows) - first;
                add(seq, seq.position(first), count, first);
            }
            return;
        };
        let page = prefix.keys.page;
        let (id, block) = (block / page.div_ceil(KEYS), block % page.div_ceil(KEYS));
        let slots = block * KEYS..((block + 1) * KEYS).min(page);
        clear(id * page + slots.start..id * page + slots.end);
        for seq in o.sequences(0..o.rows) {
            let table = prefix.table[seq.index * prefix.columns..][..prefix.columns].iter();
            for (column, _) in table.enumerate().filter(|(_, entry)| **entry as usize == id) {
                let base = column * page + slots.start;
                if base < seq.cached {
                    let count = (seq.cached - base).min(slots.len());
                    add(seq, base, count, id * page + slots.start);
                }
            }
        }
    }
}

/// Adds a sequence's part to the gradients of up to 32 keys from position `base` on.
struct AddKeys<'a, 'b, const KEY: bool> {
    o: &'a Operands<'a>,
    back: &'a Back,
    seq: &'a Sequence,
    key_head: usize,
    base: usize,
    count: usize,
    to: [*mut f32; KEYS],
    buffers: &'a mut Buffers<'b>,
}

impl<const KEY: bool> Task for AddKeys<'_, '_, KEY> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AddKeys { o, back, seq, key_head, base, count, to, buffers } = self;
        let (group, head) = (o.blocks.group, key_head * o.blocks.group);
        let width = if KEY { o.width } else { o.value_width };
        // SAFETY: the keys are cached or the sequence's own rows, whose numbers have been checked.
        unsafe {
            let at = (base, 0..count);
            let keys = o.keys(s, seq, key_head, at.clone(), buffers.cached_keys);
            transpose_tile(s, &keys, 0..count, o.width, buffers.keys);
            if KEY {
                let values = o.values(s, seq, key_head, at, buffers.cached_values);
                transpose_tile(s, &values, 0..count, o.value_width, buffers.values);
            }
        }
        // Query `i` is of row `first + i / group`, from the first that sees a key to the last.
        let first = seq.first + base.saturating_sub(seq.cached);
        let start = seq.position(first);
        let past = |position: usize| o.last_seeing(position).saturating_sub(start);
        let end = (seq.first + seq.rows - first).min(past(base + count - 1));
        for batch in (0..end * group).step_by(BATCH) {
            let n = (end * group - batch).min(BATCH);
            let mut sources = [std::ptr::null(); BATCH];
            let weights = &mut buffers.coefficients[..BATCH * KEYS];
            for chunk in (0..n).step_by(CHUNK) {
                let m = (n - chunk).min(CHUNK);
                let mut q = [std::ptr::null(); CHUNK];
                let mut dout = [std::ptr::null(); CHUNK];
                for r in 0..m {
                    let (row, head) = split(batch + chunk + r, first, head, group);
                    (q[r], dout[r]) = (o.q.at(row, head), back.dout.at(row, head));
                    sources[chunk + r] = if KEY { q[r] } else { dout[r] };
                }
                let weights = &mut weights[chunk * KEYS..][..CHUNK * KEYS];
                let mut dp = [0.0; CHUNK * KEYS];
                // SAFETY: the rows have the operands' widths; row and head are in range.
                unsafe {
                    write_dots(s, &q[..m], buffers.keys, o.width, weights);
                    if KEY {
                        write_dots(s, &dout[..m], buffers.values, o.value_width, &mut dp);
                    }
                    for r in 0..m {
                        let (row, head) = split(batch + chunk + r, first, head, group);
                        let position = seq.position(row);
                        let lowest = o.first_seen(position).saturating_sub(base);
                        let seen = lowest..(position + 1 - base).min(count);
                        let dots = weights[r * KEYS..][..KEYS].as_mut_ptr();
                        let dp = dp[r * KEYS..][..KEYS].as_ptr();
                        let at = (position, base);
                        back.weights(s, (row, head), at, &seen, dots, KEY.then_some(dp));
                    }
                }
            }
            let mut ranges: [_; KEYS] = std::array::from_fn(|_| 0..0);
            for (j, range) in ranges.iter_mut().enumerate().take(count) {
                // Queries of the rows that see the key, within the batch.
                let from = (base + j).saturating_sub(start) * group;
                let from = from.clamp(batch, batch + n);
                let past = past(base + j).min(end) * group;
                *range = from - batch..past.clamp(from, batch + n) - batch;
            }
            let c = Coefficients { ptr: weights.as_ptr(), result: 1, source: KEYS };
            // SAFETY: the results are the tile's; sources of the batch are set.
            unsafe {
                add_weighted(s, &to[..count], c, &sources, &ranges[..count], width);
            }
        }
    }
}

/// `-sum over rows of exp(sink - lse) delta`: lanes over heads, a chain over the rows of one
/// sequence after the other.
pub(super) struct BackSinks<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
}

impl Task for BackSinks<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let o = self.o;
        let Some(sinks) = o.sinks else { return };
        let back = Back::new(self.job, o);
        let head = self.tile * LANES;
        let n = (o.heads - head).min(LANES);
        let mut sum = s.zero();
        for seq in o.sequences(0..o.rows) {
            for row in seq.first..seq.first + seq.rows {
                let at = row * o.heads + head;
                // SAFETY: statistics are dense and have `n` heads of this row from here on.
                unsafe {
                    let sink = s.load_first(sinks.as_ptr().add(head), n);
                    let p = s.exp(s.sub(sink, s.load_first(back.lse.add(at), n)));
                    sum = s.fnma(p, s.load_first(back.delta.add(at), n), sum);
                }
            }
        }
        // SAFETY: these heads of the result are the tile's.
        unsafe { s.store_first(self.job.out::<f32>().add(head), sum, n) };
    }
}
