//! Gradients of attention, from the forward pass' log-sum-exps: with `p = exp(logit - lse)`,
//! `ds = p (dout . v - delta)` times the logit's slope.

use std::ops::Range;

use super::tile::{
    BATCH, CHUNK, Coefficients, KEYS, Logits, add_weighted, transpose_tile, write_dots,
};
use super::{Buffers, Heads, Operands};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// The operands that only gradients have.
struct Back {
    logits: Logits,
    lse: *const f32,
    delta: *const f32,
    dout: Heads,
}

impl Back {
    fn new(job: &Job<'_>, o: &Operands<'_>) -> Back {
        Back {
            logits: Logits::new(o),
            lse: job.input(4).ptr(),
            delta: job.input(5).ptr(),
            dout: Heads::new(&job.input(6)),
        }
    }

    /// Turns the dot products of a row with keys into `p`, or with `dp`, the dot products of its
    /// cotangent with the values, into `ds`; 0 where the row does not see the key.
    ///
    /// # Safety
    /// `at` must be the index of a row and head; `dots` and `dp` must hold 32 floats.
    #[inline(always)]
    unsafe fn weights<S: Simd>(
        &self,
        s: S,
        at: usize,
        seen: &Range<usize>,
        dots: *mut f32,
        dp: Option<*const f32>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let (lse, delta) = (s.splat(*self.lse.add(at)), s.splat(*self.delta.add(at)));
            for half in [0, LANES] {
                let (start, end) = (seen.start.saturating_sub(half), seen.end.saturating_sub(half));
                let logit = self.logits.value(s, s.load(dots.add(half)));
                let mut v = s.exp(s.sub(logit, lse));
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
                    let mut index = [0; CHUNK];
                    for r in 0..n {
                        let (row, head) = split(chunk + r, first, heads.start, heads.len());
                        let position = seq.position(row);
                        let start = o.first_seen(position).max(base) - base;
                        ranges[r] = start..(position + 1 - base).min(KEYS);
                        (q[r], dout[r]) = (o.q.at(row, head), back.dout.at(row, head));
                        result[r] = out(row, head);
                        index[r] = row * o.heads + head;
                    }
                    let (ds, dp) = buffers.coefficients.split_at_mut(CHUNK * KEYS);
                    // SAFETY: the rows have the operands' widths; the results are the tile's.
                    unsafe {
                        write_dots(s, &q[..n], buffers.keys, o.width, ds);
                        write_dots(s, &dout[..n], buffers.values, o.value_width, dp);
                        for r in 0..n {
                            let dots = ds[r * KEYS..][..KEYS].as_mut_ptr();
                            let dp = dp[r * KEYS..][..KEYS].as_ptr();
                            back.weights(s, index[r], &ranges[r], dots, Some(dp));
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

/// `dk = sum over query rows of ds q` (`KEY`) or `dv = sum of p dout`: rows ascending, the heads
/// that share the key within a row ascending.
pub(super) struct BackKey<'a, const KEY: bool> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
}

impl<const KEY: bool> Task for BackKey<'_, KEY> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (o, buffers) = (self.o, self.buffers);
        let back = Back::new(self.job, o);
        let (block, key_head) = (self.tile / o.key_heads, self.tile % o.key_heads);
        let rows = block * KEYS..((block + 1) * KEYS).min(o.rows);
        let width = if KEY { o.width } else { o.value_width };
        let out =
            |row: usize| self.job.out::<f32>().wrapping_add((row * o.key_heads + key_head) * width);
        for row in rows.clone() {
            // SAFETY: this head of this row of the result is the tile's.
            unsafe { std::slice::from_raw_parts_mut(out(row), width) }.fill(0.0);
        }
        let (group, head) = (o.blocks.group, key_head * o.blocks.group);
        for seq in o.sequences(rows.clone()) {
            let first = rows.start.max(seq.first);
            let count = rows.end.min(seq.first + seq.rows) - first;
            // Key `j` of the tile is row `first + j`; query `i` is of row `first + i / group`.
            let mut keys = [std::ptr::null(); KEYS];
            let mut values = [std::ptr::null(); KEYS];
            let mut to = [std::ptr::null_mut(); KEYS];
            for j in 0..count {
                keys[j] = o.k.at(first + j, key_head);
                values[j] = o.v.map_or(std::ptr::null(), |v| v.at(first + j, key_head));
                to[j] = out(first + j);
            }
            // SAFETY: rows of the operands, as wide as they say.
            unsafe {
                transpose_tile(s, &keys, 0..count, o.width, buffers.keys);
                if KEY {
                    transpose_tile(s, &values, 0..count, o.value_width, buffers.values);
                }
            }
            let window = o.last_seeing(0);
            let end = (seq.first + seq.rows - first).min((count - 1).saturating_add(window));
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
                            let i = row - first;
                            let seen = (i + 1).saturating_sub(window)..(i + 1).min(count);
                            let dots = weights[r * KEYS..][..KEYS].as_mut_ptr();
                            let dp = dp[r * KEYS..][..KEYS].as_ptr();
                            back.weights(s, row * o.heads + head, &seen, dots, KEY.then_some(dp));
                        }
                    }
                }
                let mut ranges: [_; KEYS] = std::array::from_fn(|_| 0..0);
                for (j, range) in ranges.iter_mut().enumerate().take(count) {
                    // Queries of rows `j .. j + window`, within the batch.
                    let start = (j * group).max(batch).min(batch + n);
                    let past = j.saturating_add(window).min(end) * group;
                    *range = start - batch..past.clamp(start, batch + n) - batch;
                }
                let c = Coefficients { ptr: weights.as_ptr(), result: 1, source: KEYS };
                // SAFETY: the results are the tile's; sources of the batch are set.
                unsafe {
                    add_weighted(s, &to[..count], c, &sources, &ranges[..count], width);
                }
            }
        }
    }
}
