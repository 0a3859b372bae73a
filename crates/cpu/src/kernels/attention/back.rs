//! Gradients of attention. Those of the queries take the softmax as the forward pass does, and leave
//! its log-sum-exps to the others: with `p = exp(logit - lse)`, `ds = p (dout . v - delta)` times
//! the logit's slope.

use std::ops::Range;

use graph::{AttentionOperand, Op};

use super::tile::{
    BATCH, CHUNK, Coefficients, KEYS, Logits, Running, add_weighted, transpose_tile, write_dots,
};
use super::{Buffers, Heads, Operands, SEQS, Sequence};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// The operands that only gradients have.
struct Back {
    logits: Logits,
    /// Not read by the gradient of the queries, which has none.
    lse: *const f32,
    delta: *const f32,
    dout: Heads,
    heads: usize,
}

impl Back {
    fn new(job: &Job<'_>, o: &Operands<'_>) -> Back {
        let delta = SEQS + if matches!(job.op, Op::AttentionQueryBack(_)) { 1 } else { 2 };
        Back {
            logits: Logits::new(o),
            lse: job.input(SEQS + 1).ptr(),
            delta: job.input(delta).ptr(),
            dout: Heads::new(&job.input(delta + 1)),
            heads: o.heads,
        }
    }

    /// Turns the dot products `p` of a row, which is at `position`, and a head with keys from
    /// position `key` on into `exp(logit - lse)`, and `ds`, the dot products of its cotangent with
    /// the values, into the cotangents of those of `p`. For keys that the row does not see it is
    /// anything.
    ///
    /// # Safety
    /// Row and head must be in range; `p` and, if there, `ds` must hold 32 floats.
    #[inline(always)]
    unsafe fn weights<S: Simd>(
        &self,
        s: S,
        (row, head): (usize, usize),
        (position, key): (usize, usize),
        p: *mut f32,
        ds: Option<*mut f32>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let at = row * self.heads + head;
            let (lse, delta) = (s.splat(*self.lse.add(at)), s.splat(*self.delta.add(at)));
            let slope = self.logits.bias(head);
            for half in [0, LANES] {
                let logit = self.logits.value(s, s.load(p.add(half)));
                let biased = self.logits.biased(s, logit, slope, position, key + half);
                let v = s.exp(s.sub(biased, lse));
                s.store(p.add(half), v);
                if let Some(ds) = ds {
                    let ds = ds.add(half);
                    let v = s.mul(s.mul(v, s.sub(s.load(ds), delta)), self.logits.slope(s, logit));
                    s.store(ds, v);
                }
            }
        }
    }
}

/// `dq = sum over keys of ds k`, keys ascending, under the highest logit so far and divided by the
/// sum in the end; then the log-sum-exps.
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
        let (o, mut buffers) = (self.o, self.buffers);
        let back = Back::new(self.job, o);
        let (rows, key_head, heads) = o.blocks.tile(self.tile);
        let gradients = self.job.out::<f32>();
        let out =
            |row: usize, head: usize| gradients.wrapping_add((row * o.heads + head) * o.width);
        let lses = gradients.wrapping_add(o.rows * o.heads * o.width);
        for row in rows.clone() {
            let lse = lses.wrapping_add(row * o.heads + heads.start);
            // SAFETY: these heads of this row of the results are the tile's.
            unsafe {
                let dq = out(row, heads.start);
                std::slice::from_raw_parts_mut(dq, heads.len() * o.width).fill(0.0);
                std::slice::from_raw_parts_mut(lse, heads.len()).fill(0.0);
            }
        }
        for seq in o.sequences(rows.clone()) {
            let first = rows.start.max(seq.first);
            let end = rows.end.min(seq.first + seq.rows);
            let count = (end - first) * heads.len();
            buffers.begin(o, heads.clone(), count);
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
                            let ((row, head), to) = (index[r], (result[r], o.width));
                            let ds = ds[r * KEYS..][..KEYS].as_mut_ptr();
                            let dp = dp[r * KEYS..][..KEYS].as_ptr();
                            let delta = s.splat(*back.delta.add(row * o.heads + head));
                            let (position, slope) = (seq.position(row), back.logits.bias(head));
                            let logits =
                                [0, LANES].map(|half| back.logits.value(s, s.load(ds.add(half))));
                            let biased = [0, 1].map(|i| {
                                let key = base + i * LANES;
                                back.logits.biased(s, logits[i], slope, position, key)
                            });
                            let running = Running {
                                maximum: &mut buffers.maxima[chunk + r],
                                sum: &mut buffers.sums[chunk + r],
                            };
                            let p = running.take(s, biased, &ranges[r], to);
                            for i in [0, 1] {
                                let dp = s.sub(s.load(dp.add(i * LANES)), delta);
                                let slope = back.logits.slope(s, logits[i]);
                                let v = s.mul(s.mul(p[i], dp), slope);
                                s.store(ds.add(i * LANES), v);
                            }
                        }
                        let c = Coefficients { ptr: ds.as_ptr(), result: KEYS, source: 1 };
                        add_weighted(s, &result[..n], c, &keys, &ranges[..n], o.width);
                    }
                }
            }
            for i in 0..count {
                let (row, head) = split(i, first, heads.start, heads.len());
                // SAFETY: this head of this row of the results is the tile's.
                unsafe {
                    buffers.running(i).finish(s, (out(row, head), o.width));
                    let log = s.log(s.splat(buffers.sums[i]));
                    let lse = s.add(s.splat(buffers.maxima[i]), log);
                    s.store_first(lses.add(row * o.heads + head), lse, 1);
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

/// `dk = sum over query rows of ds q` and `dv = sum of p dout`, of the rows' own keys and values
/// or of `Pages`: rows ascending, the heads that share the key within a row ascending. A slot of a
/// page takes the sequences that read it in their order.
pub(super) struct BackKeys<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
    pub(super) wrt: AttentionOperand,
}

/// A head's rows of a result, if a tile is for them.
#[derive(Copy, Clone)]
struct Rows {
    base: *mut f32,
    /// How many there are.
    count: usize,
    /// Elements of a row, and those between two rows.
    width: usize,
    stride: usize,
}

impl Rows {
    /// # Safety
    /// Rows of this range that there are must be the tile's.
    unsafe fn clear(self, rows: Range<usize>) {
        for row in rows.start..rows.end.min(self.count) {
            // SAFETY: the caller's.
            unsafe { std::slice::from_raw_parts_mut(self.at(row), self.width) }.fill(0.0);
        }
    }

    #[inline(always)]
    fn at(self, row: usize) -> *mut f32 {
        self.base.wrapping_add(row * self.stride)
    }

    /// Rows from `first` on, be they there or not.
    #[inline(always)]
    fn pointers(self, first: usize) -> [*mut f32; KEYS] {
        std::array::from_fn(|j| self.at(first + j))
    }
}

impl Task for BackKeys<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (job, o) = (self.job, self.o);
        let mut buffers = self.buffers;
        let back = Back::new(job, o);
        let (tile, part) = (self.tile / o.key_parts(), self.tile % o.key_parts());
        let (block, key_head) = (tile / o.key_heads, tile % o.key_heads);
        let prefix = o.prefix.as_ref().filter(|_| self.wrt == AttentionOperand::Pages);
        // Rows of the results are slots of pages or rows of the operands.
        let counts = prefix.map_or([o.rows; 2], |p| {
            [p.keys.count, p.values.count].map(|count| count * p.keys.page)
        });
        let of_values = job.out::<f32>().wrapping_add(counts[0] * o.key_heads * o.width);
        let results = [(job.out(), o.width), (of_values, o.value_width)];
        let results: [_; 2] = std::array::from_fn(|i| {
            let (base, width) = results[i];
            let base = base.wrapping_add(key_head * width);
            let rows = Rows { base, count: counts[i], width, stride: o.key_heads * width };
            (o.key_parts() == 1 || part == i).then_some(rows)
        });
        let clear = |rows: Range<usize>| {
            for result in results.into_iter().flatten() {
                // SAFETY: this head of these rows of the results is the tile's.
                unsafe { result.clear(rows.clone()) };
            }
        };
        let mut add = |seq: Sequence, base: usize, count: usize, first: usize| {
            let [keys, values] = results.map(|r| Some(r?.pointers(first)));
            let (back, buffers) = (&back, &mut buffers);
            s.call(AddKeys { o, back, seq: &seq, key_head, base, count, keys, values, buffers });
        };
        let Some(prefix) = prefix else {
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

/// Adds a sequence's part to the gradients of up to 32 keys from position `base` on, and of their
/// values.
struct AddKeys<'a, 'b> {
    o: &'a Operands<'a>,
    back: &'a Back,
    seq: &'a Sequence,
    key_head: usize,
    base: usize,
    count: usize,
    keys: Option<[*mut f32; KEYS]>,
    values: Option<[*mut f32; KEYS]>,
    buffers: &'a mut Buffers<'b>,
}

impl Task for AddKeys<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AddKeys { o, back, seq, key_head, base, count, keys, values, buffers } = self;
        let (group, head) = (o.blocks.group, key_head * o.blocks.group);
        // SAFETY: the keys are cached or the sequence's own rows, whose numbers have been checked.
        unsafe {
            let at = (base, 0..count);
            let rows = o.keys(s, seq, key_head, at.clone(), buffers.cached_keys);
            transpose_tile(s, &rows, 0..count, o.width, buffers.keys);
            if keys.is_some() {
                let rows = o.values(s, seq, key_head, at, buffers.cached_values);
                transpose_tile(s, &rows, 0..count, o.value_width, buffers.values);
            }
        }
        // Query `i` is of row `first + i / group`, from the first that sees a key to the last.
        let first = seq.first + base.saturating_sub(seq.cached);
        let start = seq.position(first);
        let past = |position: usize| o.last_seeing(position).saturating_sub(start);
        let end = (seq.first + seq.rows - first).min(past(base + count - 1));
        for batch in (0..end * group).step_by(BATCH) {
            let n = (end * group - batch).min(BATCH);
            let mut queries = [std::ptr::null(); BATCH];
            let mut cotangents = [std::ptr::null(); BATCH];
            let (p, ds) = buffers.coefficients.split_at_mut(BATCH * KEYS);
            for chunk in (0..n).step_by(CHUNK) {
                let m = (n - chunk).min(CHUNK);
                for i in chunk..chunk + m {
                    let (row, head) = split(batch + i, first, head, group);
                    (queries[i], cotangents[i]) = (o.q.at(row, head), back.dout.at(row, head));
                }
                let p = &mut p[chunk * KEYS..][..CHUNK * KEYS];
                let ds = &mut ds[chunk * KEYS..][..CHUNK * KEYS];
                // SAFETY: the rows have the operands' widths; row and head are in range.
                unsafe {
                    write_dots(s, &queries[chunk..][..m], buffers.keys, o.width, p);
                    if keys.is_some() {
                        let rows = &cotangents[chunk..][..m];
                        write_dots(s, rows, buffers.values, o.value_width, ds);
                    }
                    for r in 0..m {
                        let (row, head) = split(batch + chunk + r, first, head, group);
                        let position = seq.position(row);
                        let p = p[r * KEYS..][..KEYS].as_mut_ptr();
                        let ds = ds[r * KEYS..][..KEYS].as_mut_ptr();
                        let at = (position, base);
                        back.weights(s, (row, head), at, p, keys.is_some().then_some(ds));
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
            let ranges = &ranges[..count];
            for (to, from, weights, width) in
                [(keys, &queries, ds, o.width), (values, &cotangents, p, o.value_width)]
            {
                let Some(to) = to else { continue };
                let c = Coefficients { ptr: weights.as_ptr(), result: 1, source: KEYS };
                // SAFETY: the results are the tile's; sources of the batch are set.
                unsafe { add_weighted(s, &to[..count], c, from, ranges, width) };
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
