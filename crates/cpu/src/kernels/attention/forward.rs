//! Attention and its statistics: softmax over tiles of keys, rescaled as the maximum grows.

use super::tile::{
    CHUNK, Coefficients, KEYS, Logits, RowPointers, add_weighted, transpose_tile, write_dots,
};
use super::{Buffers, Operands, Sequence};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// With `VALUES` the weighted values, otherwise the log-sum-exp of the logits.
pub(super) struct Forward<'a, const VALUES: bool> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
}

impl<const VALUES: bool> Forward<'_, VALUES> {
    /// Where a row's result is.
    #[inline(always)]
    fn out(&self, row: usize, head: usize) -> *mut f32 {
        let width = if VALUES { self.o.value_width } else { 1 };
        self.job.out::<f32>().wrapping_add((row * self.o.heads + head) * width)
    }
}

impl<const VALUES: bool> Task for Forward<'_, VALUES> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let o = self.o;
        let (rows, key_head, heads) = o.blocks.tile(self.tile);
        let width = if VALUES { o.value_width } else { 1 };
        for row in rows.clone() {
            let to = self.out(row, heads.start);
            // SAFETY: these heads of this row of the result are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, heads.len() * width) }.fill(0.0);
        }
        for seq in o.sequences(rows.clone()) {
            let first = rows.start.max(seq.first);
            let end = rows.end.min(seq.first + seq.rows);
            let count = (end - first) * heads.len();
            // A sink is a logit that every row begins with.
            self.buffers.maxima[..count].fill(f32::NEG_INFINITY);
            self.buffers.sums[..count].fill(0.0);
            if let Some(sinks) = o.sinks {
                for i in 0..count {
                    let sink = sinks[heads.start + i % heads.len()];
                    self.buffers.maxima[i] = sink;
                    self.buffers.sums[i] = if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 };
                }
            }
            let (lowest, last) = (o.first_seen(seq.position(first)), seq.position(end - 1));
            for base in (lowest / KEYS * KEYS..=last).step_by(KEYS) {
                let range = lowest.max(base) - base..(last + 1 - base).min(KEYS);
                let at = (base, range.clone());
                // SAFETY: positions up to `last` are cached or the sequence's own rows, whose
                // numbers have been checked.
                let values = unsafe {
                    let keys = o.keys(s, &seq, key_head, at.clone(), self.buffers.cached_keys);
                    transpose_tile(s, &keys, range, o.width, self.buffers.keys);
                    if VALUES {
                        o.values(s, &seq, key_head, at, self.buffers.cached_values)
                    } else {
                        [std::ptr::null(); KEYS]
                    }
                };
                // Rows before the tile's first key do not see it, nor do those whose window has
                // passed its last.
                let seen = first.max(first + base.saturating_sub(seq.position(first)));
                let past = o.last_seeing(base + KEYS - 1).saturating_sub(seq.position(first));
                let past = end.min(first.saturating_add(past));
                let from = (seen - first) * heads.len();
                let to = (past.max(seen) - first) * heads.len();
                for chunk in (from..to).step_by(CHUNK) {
                    let rows = chunk..to.min(chunk + CHUNK);
                    // SAFETY: as above.
                    unsafe {
                        self.chunk(s, &seq, first, heads.start, heads.len(), rows, base, &values)
                    };
                }
            }
            for i in 0..count {
                let (row, head) = (first + i / heads.len(), heads.start + i % heads.len());
                let (max, sum) = (self.buffers.maxima[i], self.buffers.sums[i]);
                let to = self.out(row, head);
                // SAFETY: this head of this row of the result is the tile's.
                unsafe {
                    if VALUES {
                        let inverse = s.splat(1.0 / sum);
                        for w in (0..width).step_by(LANES) {
                            let v = s.mul(s.load_first(to.add(w), width - w), inverse);
                            s.store_first(to.add(w), v, width - w);
                        }
                    } else {
                        let log = s.add(s.splat(max), s.log(s.splat(sum)));
                        s.store_first(to, log, 1);
                    }
                }
            }
        }
    }
}

impl<const VALUES: bool> Forward<'_, VALUES> {
    /// Takes the keys of one tile into up to [`CHUNK`] rows, each of which sees some of them.
    ///
    /// # Safety
    /// The rows must be of the sequence, the tile's keys and values loaded.
    #[allow(clippy::too_many_arguments)] // what a loop's body sees
    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        &mut self,
        s: S,
        seq: &Sequence,
        first: usize,
        head: usize,
        heads: usize,
        rows: std::ops::Range<usize>,
        base: usize,
        values: &RowPointers,
    ) {
        let o = self.o;
        let n = rows.len();
        let mut q = [std::ptr::null(); CHUNK];
        let mut to = [std::ptr::null_mut(); CHUNK];
        let mut ranges: [_; CHUNK] = std::array::from_fn(|_| 0..0);
        let mut queries = [(0, 0); CHUNK];
        for (r, i) in rows.clone().enumerate() {
            let (row, head) = (first + i / heads, head + i % heads);
            q[r] = o.q.at(row, head);
            to[r] = self.out(row, head);
            let position = seq.position(row);
            let start = o.first_seen(position).max(base) - base;
            ranges[r] = start..(position + 1 - base).min(KEYS);
            queries[r] = (position, head);
        }
        let logits = Logits::new(o);
        let weights = &mut self.buffers.coefficients[..CHUNK * KEYS];
        // SAFETY: the caller's.
        unsafe { write_dots(s, &q[..n], self.buffers.keys, o.width, weights) };
        for (r, i) in rows.enumerate() {
            let weights = weights[r * KEYS..][..KEYS].as_mut_ptr();
            let (start, end) = (ranges[r].start, ranges[r].end);
            let (position, slope) = (queries[r].0, logits.bias(queries[r].1));
            // SAFETY: a slice of 32 elements.
            unsafe {
                let low = s.between(start, end);
                let high = s.between(start.saturating_sub(LANES), end.saturating_sub(LANES));
                let hidden = s.splat(f32::NEG_INFINITY);
                let a = logits.value(s, s.load(weights));
                let a = logits.biased(s, a, slope, position, base);
                let a = s.select(low, a, hidden);
                let b = logits.value(s, s.load(weights.add(LANES)));
                let b = logits.biased(s, b, slope, position, base + LANES);
                let b = s.select(high, b, hidden);
                let old = self.buffers.maxima[i];
                let tile_max = s.reduce_max(s.max(a, b));
                let max = if old > tile_max { old } else { tile_max };
                let a = s.select(low, s.exp(s.sub(a, s.splat(max))), s.zero());
                let b = s.select(high, s.exp(s.sub(b, s.splat(max))), s.zero());
                let mut sum = self.buffers.sums[i];
                // With an equal maximum the factor is exactly 1.
                if max != old {
                    let factor = s.exp(s.splat(old - max));
                    let mut first = [0.0; LANES];
                    s.store(first.as_mut_ptr(), factor);
                    sum *= first[0];
                    if VALUES {
                        for w in (0..o.value_width).step_by(LANES) {
                            let n = o.value_width - w;
                            let v = s.mul(s.load_first(to[r].add(w), n), factor);
                            s.store_first(to[r].add(w), v, n);
                        }
                    }
                }
                self.buffers.maxima[i] = max;
                self.buffers.sums[i] = sum + s.reduce_sum(s.add(a, b));
                s.store(weights, a);
                s.store(weights.add(LANES), b);
            }
        }
        if VALUES {
            let c = Coefficients { ptr: weights.as_ptr(), result: KEYS, source: 1 };
            // SAFETY: the caller's.
            unsafe { add_weighted(s, &to[..n], c, values, &ranges[..n], o.value_width) };
        }
    }
}
