//! Attention: softmax over tiles of keys, rescaled as the maximum grows.

use super::tile::{
    CHUNK, Coefficients, KEYS, Logits, RowPointers, Running, add_weighted, transpose_tile,
    write_dots,
};
use super::{Buffers, Operands, Sequence};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// The weighted values.
pub(super) struct Forward<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
}

impl Forward<'_> {
    /// Where a row's result is.
    #[inline(always)]
    fn out(&self, row: usize, head: usize) -> *mut f32 {
        self.job.out::<f32>().wrapping_add((row * self.o.heads + head) * self.o.value_width)
    }
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let o = self.o;
        let (rows, key_head, heads) = o.blocks.tile(self.tile);
        let width = o.value_width;
        for row in rows.clone() {
            let to = self.out(row, heads.start);
            // SAFETY: these heads of this row of the result are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, heads.len() * width) }.fill(0.0);
        }
        for seq in o.sequences(rows.clone()) {
            let first = rows.start.max(seq.first);
            let end = rows.end.min(seq.first + seq.rows);
            let count = (end - first) * heads.len();
            self.buffers.begin(o, heads.clone(), count);
            let (lowest, last) = (o.first_seen(seq.position(first)), seq.position(end - 1));
            for base in (lowest / KEYS * KEYS..=last).step_by(KEYS) {
                let range = lowest.max(base) - base..(last + 1 - base).min(KEYS);
                let at = (base, range.clone());
                // SAFETY: positions up to `last` are cached or the sequence's own rows, whose
                // numbers have been checked.
                let values = unsafe {
                    let keys = o.keys(s, &seq, key_head, at.clone(), self.buffers.cached_keys);
                    transpose_tile(s, &keys, range, o.width, self.buffers.keys);
                    o.values(s, &seq, key_head, at, self.buffers.cached_values)
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
                let to = self.out(row, head);
                // SAFETY: this head of this row of the result is the tile's.
                unsafe { self.buffers.running(i).finish(s, (to, width)) };
            }
        }
    }
}

impl Forward<'_> {
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
            let (position, slope) = (queries[r].0, logits.bias(queries[r].1));
            let running =
                Running { maximum: &mut self.buffers.maxima[i], sum: &mut self.buffers.sums[i] };
            // SAFETY: a slice of 32 elements, and a row of the result.
            unsafe {
                let a = logits.value(s, s.load(weights));
                let a = logits.biased(s, a, slope, position, base);
                let b = logits.value(s, s.load(weights.add(LANES)));
                let b = logits.biased(s, b, slope, position, base + LANES);
                let [a, b] = running.take(s, [a, b], &ranges[r], (to[r], o.value_width));
                s.store(weights, a);
                s.store(weights.add(LANES), b);
            }
        }
        let c = Coefficients { ptr: weights.as_ptr(), result: KEYS, source: 1 };
        // SAFETY: the caller's.
        unsafe { add_weighted(s, &to[..n], c, values, &ranges[..n], o.value_width) };
    }
}
