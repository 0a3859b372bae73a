//! Attention: softmax over tiles of keys, rescaled as the maximum grows.

use super::product::{Coefficients, Panels, add_weighted, multiply};
use super::queries::{CHUNK, Chunk, Queries};
use super::rows::{pack, transpose};
use super::softmax::{Logits, Take, scale};
use super::{Buffers, KEYS, Operands};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// The weighted values.
pub(super) struct Forward<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let o = self.o;
        let (round, rows, key_head, heads) = o.blocks.tile(self.tile);
        for row in rows.clone().filter(|_| round == 0) {
            let to = self.out(row, heads.start);
            // SAFETY: these heads of this row of the result are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, heads.len() * o.value_width) }.fill(0.0);
        }
        for seq in o.sequences(rows.clone()) {
            let queries = Queries::new(o, seq, &rows, &heads);
            // SAFETY: `supports` asks for what is kept of all queries.
            unsafe { self.buffers.running.start(&queries, o, round, self.job.kept()) };
            for base in queries.bases(round) {
                let range = queries.keys(base);
                let at = (base, range.clone());
                // SAFETY: positions up to the last are cached or the sequence's own rows, whose
                // numbers have been checked.
                let (keys, values) = unsafe {
                    let keys = o.keys(s, &seq, key_head, at.clone(), self.buffers.cached_keys);
                    let keys = transpose(s, &keys, range.clone(), o.width, self.buffers.keys);
                    let values = o.values(s, &seq, key_head, at, self.buffers.cached_values);
                    (keys, pack(s, &values, range, o.value_width, self.buffers.packed_values))
                };
                let all = queries.seeing(base);
                for start in all.clone().step_by(CHUNK) {
                    let chunk = queries.chunk(start, all.end, base);
                    // SAFETY: as above.
                    unsafe { self.chunk(s, &chunk, base, keys, values) };
                }
            }
            // SAFETY: as above; the queries are the tile's.
            if unsafe { self.buffers.running.leave(&queries, o, round, self.job.kept()) } {
                continue;
            }
            for i in 0..queries.count() {
                let (row, head) = queries.at(i);
                let to = self.out(row, head);
                let (_, sum) = self.buffers.running.end(s, i);
                // SAFETY: this head of this row of the result is the tile's.
                unsafe { scale(s, 1.0 / sum, to, o.value_width) };
            }
        }
    }
}

impl Forward<'_> {
    /// Where a row's result is.
    #[inline(always)]
    fn out(&self, row: usize, head: usize) -> *mut f32 {
        self.job.out::<f32>().wrapping_add((row * self.o.heads + head) * self.o.value_width)
    }

    /// Takes the keys of a tile into some queries.
    ///
    /// # Safety
    /// The keys and values that the queries see must be there.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(
        &mut self,
        s: S,
        chunk: &Chunk,
        base: usize,
        keys: Panels,
        values: Panels,
    ) {
        let o = self.o;
        let n = chunk.n;
        let dots = &mut self.buffers.coefficients[..CHUNK * KEYS];
        let mut q = [std::ptr::null(); CHUNK];
        let mut to_dots = [std::ptr::null_mut(); CHUNK];
        let first = dots.as_mut_ptr().wrapping_add(chunk.vectors.start * LANES);
        let mut to = [std::ptr::null_mut(); CHUNK];
        for r in 0..n {
            let (row, head) = chunk.queries[r];
            let out = self.job.out::<f32>();
            q[r] = o.q.at(row, head);
            to_dots[r] = first.wrapping_add(r * KEYS);
            to[r] = out.wrapping_add((row * o.heads + head) * o.value_width);
        }
        let (keys, vectors) = (keys.skip(chunk.vectors.start), chunk.vectors.len());
        // SAFETY: queries and keys have this width; there is room for a tile's keys each.
        unsafe { multiply(s, &to_dots[..n], &q[..n], keys, o.width, vectors) };
        let (mut factors, running) = ([1.0; CHUNK], &mut self.buffers.running);
        let (logits, factors) = (Logits::new(o), &mut factors);
        let taken = &mut *dots;
        s.call(Take { logits, chunk, base, dots: taken, cotangents: None, running, factors });
        let dots = dots.as_ptr();
        let weights: [_; CHUNK] = std::array::from_fn(|r| dots.wrapping_add(r * KEYS));
        let c = Coefficients { rows: &weights[..n], step: 1 };
        let (seen, factors) = (&chunk.seen[..n], Some(&factors[..n]));
        // SAFETY: the caller's; the results are the tile's.
        unsafe { add_weighted(s, &to[..n], c, values, seen, factors, o.value_width) };
    }
}
