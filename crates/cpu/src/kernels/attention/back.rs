//! Gradients of attention. Those of the queries take the softmax as the forward pass does, and leave
//! its log-sum-exps to the others: with `p = exp(logit - lse)`, `ds = p (dout . v - delta)` times
//! the logit's slope.

use std::ops::Range;

use graph::{AttentionOperand, Op};

use super::product::{Coefficients, Panels, add_weighted, multiply};
use super::queries::{CHUNK, Chunk, Queries};
use super::rows::{pack, transpose};
use super::softmax::{Cotangents, Logits, Take, scale, weight};
use super::{Buffers, Heads, KEYS, Operands, SEQS, Sequence};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// Queries whose coefficients the gradients of keys and values hold at once.
pub(super) const BATCH: usize = 48;

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
}

/// `dq = sum over keys of ds k`, keys ascending, under the highest logit so far and divided by the
/// sum in the end; then the log-sum-exps.
pub(super) struct BackQ<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) o: &'a Operands<'a>,
    pub(super) tile: usize,
    pub(super) buffers: Buffers<'a>,
}

/// The keys and values of a tile.
struct Loaded {
    base: usize,
    keys: Panels,
    keys_by_width: Panels,
    values_by_width: Panels,
}

impl Task for BackQ<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let o = self.o;
        let back = Back::new(self.job, o);
        let (round, rows, key_head, heads) = o.blocks.tile(self.tile);
        for row in rows.clone().filter(|_| round == 0) {
            // SAFETY: these heads of this row of the results are the tile's.
            unsafe {
                let (dq, lse) = (self.out(row, heads.start), self.lse(row, heads.start));
                std::slice::from_raw_parts_mut(dq, heads.len() * o.width).fill(0.0);
                std::slice::from_raw_parts_mut(lse, heads.len()).fill(0.0);
            }
        }
        for seq in o.sequences(rows.clone()) {
            let queries = Queries::new(o, seq, &rows, &heads);
            // SAFETY: `supports` asks for what is kept of all queries.
            unsafe { self.buffers.running.start(&queries, o, round, self.job.kept()) };
            for base in queries.bases(round) {
                let range = queries.keys(base);
                let at = (base, range.clone());
                let b = &mut self.buffers;
                // SAFETY: positions up to the last are cached or the sequence's own rows, whose
                // numbers have been checked.
                let loaded = unsafe {
                    let keys = o.keys(s, &seq, key_head, at.clone(), b.cached_keys);
                    let values = o.values(s, &seq, key_head, at, b.cached_values);
                    Loaded {
                        base,
                        keys: pack(s, &keys, range.clone(), o.width, b.packed_keys),
                        keys_by_width: transpose(s, &keys, range.clone(), o.width, b.keys),
                        values_by_width: transpose(s, &values, range, o.value_width, b.values),
                    }
                };
                let all = queries.seeing(base);
                for start in all.clone().step_by(CHUNK) {
                    let chunk = queries.chunk(start, all.end, base);
                    // SAFETY: as above.
                    unsafe { self.chunk(s, &back, &chunk, &loaded) };
                }
            }
            // SAFETY: as above; the queries are the tile's.
            if unsafe { self.buffers.running.leave(&queries, o, round, self.job.kept()) } {
                continue;
            }
            for i in 0..queries.count() {
                let (row, head) = queries.at(i);
                let (maximum, sum) = self.buffers.running.end(s, i);
                // SAFETY: this head of this row of the results is the tile's.
                unsafe {
                    scale(s, 1.0 / sum, self.out(row, head), o.width);
                    let lse = s.add(s.splat(maximum), s.log(s.splat(sum)));
                    s.store_first(self.lse(row, head), lse, 1);
                }
            }
        }
    }
}

impl BackQ<'_> {
    /// Where a query's gradient is.
    #[inline(always)]
    fn out(&self, row: usize, head: usize) -> *mut f32 {
        self.job.out::<f32>().wrapping_add((row * self.o.heads + head) * self.o.width)
    }

    /// Where its log-sum-exp is.
    #[inline(always)]
    fn lse(&self, row: usize, head: usize) -> *mut f32 {
        self.out(self.o.rows, 0).wrapping_add(row * self.o.heads + head)
    }

    /// Takes the keys of a tile into some queries.
    ///
    /// # Safety
    /// The keys and values that the queries see must be there.
    #[inline(always)]
    unsafe fn chunk<S: Simd>(&mut self, s: S, back: &Back, chunk: &Chunk, loaded: &Loaded) {
        let o = self.o;
        let n = chunk.n;
        let (dots, products) = self.buffers.coefficients.split_at_mut(CHUNK * KEYS);
        let mut q = [std::ptr::null(); CHUNK];
        let mut dout = [std::ptr::null(); CHUNK];
        let mut to_dots = [std::ptr::null_mut(); CHUNK];
        let mut to_products = [std::ptr::null_mut(); CHUNK];
        let skipped = chunk.vectors.start * LANES;
        let first_dot = dots.as_mut_ptr().wrapping_add(skipped);
        let first_product = products.as_mut_ptr().wrapping_add(skipped);
        let mut to = [std::ptr::null_mut(); CHUNK];
        let mut delta = [0.0; CHUNK];
        for r in 0..n {
            let (row, head) = chunk.queries[r];
            (q[r], dout[r]) = (o.q.at(row, head), back.dout.at(row, head));
            to_dots[r] = first_dot.wrapping_add(r * KEYS);
            to_products[r] = first_product.wrapping_add(r * KEYS);
            let query = row * o.heads + head;
            to[r] = self.job.out::<f32>().wrapping_add(query * o.width);
            // SAFETY: statistics are dense and have the query.
            delta[r] = unsafe { *back.delta.add(query) };
        }
        let vectors = chunk.vectors.len();
        let keys = loaded.keys_by_width.skip(chunk.vectors.start);
        let values = loaded.values_by_width.skip(chunk.vectors.start);
        // SAFETY: the rows have the operands' widths; there is room for a tile's keys each.
        unsafe {
            multiply(s, &to_dots[..n], &q[..n], keys, o.width, vectors);
            multiply(s, &to_products[..n], &dout[..n], values, o.value_width, vectors);
        }
        let (mut factors, running) = ([1.0; CHUNK], &mut self.buffers.running);
        let (logits, base, factors) = (back.logits, loaded.base, &mut factors);
        let cotangents = Some(Cotangents { products, delta });
        s.call(Take { logits, chunk, base, dots: &mut *dots, cotangents, running, factors });
        let dots = dots.as_ptr();
        let ds: [_; CHUNK] = std::array::from_fn(|r| dots.wrapping_add(r * KEYS));
        let c = Coefficients { rows: &ds[..n], step: 1 };
        let (seen, factors) = (&chunk.seen[..n], Some(&factors[..n]));
        // SAFETY: the caller's; the results are the tile's.
        unsafe { add_weighted(s, &to[..n], c, loaded.keys, seen, factors, o.width) };
    }
}

/// `dk = sum over query rows of ds q` and `dv = sum of p dout`, of the rows' own keys and values
/// or of `Pages`: rows ascending, the heads that share the key within a row ascending. Some rows are
/// taken in each round; within it a slot of a page takes the sequences that read it in their order.
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
        // The rows that the keys of a head read are near when the next keys read them.
        let (keys, blocks) = (o.gradient_keys(), o.key_blocks(self.wrt));
        let (round, tile) =
            (self.tile / (blocks * o.key_heads), self.tile % (blocks * o.key_heads));
        let (key_head, block) = (tile / blocks, tile % blocks);
        let rows = round * o.gradient_rows()..((round + 1) * o.gradient_rows()).min(o.rows);
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
            Rows { base, count: counts[i], width, stride: o.key_heads * width }
        });
        let clear = |slots: Range<usize>| {
            for result in results.into_iter().filter(|_| round == 0) {
                // SAFETY: this head of these rows of the results is the tile's.
                unsafe { result.clear(slots.clone()) };
            }
        };
        let mut add = |seq: Sequence, base: usize, count: usize, first: usize| {
            let [keys, values] = results.map(|r| r.pointers(first));
            let (back, rows, buffers) = (&back, rows.clone(), &mut buffers);
            let seq = &seq;
            s.call(AddKeys { o, back, seq, rows, key_head, base, count, keys, values, buffers });
        };
        let Some(prefix) = prefix else {
            let own = block * keys..((block + 1) * keys).min(o.rows);
            clear(own.clone());
            for seq in o.sequences(own.clone()) {
                let first = own.start.max(seq.first);
                let count = own.end.min(seq.first + seq.rows) - first;
                add(seq, seq.position(first), count, first);
            }
            return;
        };
        let page = prefix.keys.page;
        let (id, block) = (block / page.div_ceil(keys), block % page.div_ceil(keys));
        let slots = block * keys..((block + 1) * keys).min(page);
        clear(id * page + slots.start..id * page + slots.end);
        for seq in o.sequences(rows.clone()) {
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

/// Adds what some rows of a sequence give to the gradients of up to [`KEYS`] keys from position `base`
/// on, and of their values.
struct AddKeys<'a, 'b> {
    o: &'a Operands<'a>,
    back: &'a Back,
    seq: &'a Sequence,
    rows: Range<usize>,
    key_head: usize,
    base: usize,
    count: usize,
    keys: [*mut f32; KEYS],
    values: [*mut f32; KEYS],
    buffers: &'a mut Buffers<'b>,
}

impl Task for AddKeys<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let AddKeys { o, back, seq, rows, key_head, base, count, keys, values, buffers: b } = self;
        let (group, heads) = (o.blocks.group, key_head * o.blocks.group);
        // Query `i` is of row `first + i / group`, from the first that sees a key to the last.
        let first = (seq.first + base.saturating_sub(seq.cached)).max(rows.start);
        let start = seq.position(first);
        let past = |position: usize| o.last_seeing(position).saturating_sub(start);
        let last = rows.end.min(seq.first + seq.rows);
        let end = last.saturating_sub(first).min(past(base + count - 1));
        if end == 0 {
            return;
        }
        // SAFETY: the keys are cached or the sequence's own rows, whose numbers have been checked.
        let (keys_by_width, values_by_width) = unsafe {
            let at = (base, 0..count);
            let rows = o.keys(s, seq, key_head, at.clone(), b.cached_keys);
            let by_width = transpose(s, &rows, 0..count, o.width, b.keys);
            let rows = o.values(s, seq, key_head, at, b.cached_values);
            (by_width, transpose(s, &rows, 0..count, o.value_width, b.values))
        };
        let (mut row, mut head) = (first, heads);
        for batch in (0..end * group).step_by(BATCH) {
            let n = (end * group - batch).min(BATCH);
            let mut queries = [(0, 0); BATCH];
            let mut q = [std::ptr::null(); BATCH];
            let mut dout = [std::ptr::null(); BATCH];
            let (mut to_p, mut to_ds) =
                ([std::ptr::null_mut(); BATCH], [std::ptr::null_mut(); BATCH]);
            let (p, ds) = b.coefficients.split_at_mut(BATCH * KEYS);
            let (p, ds) = (p.as_mut_ptr(), ds.as_mut_ptr());
            for i in 0..n {
                queries[i] = (row, head);
                (q[i], dout[i]) = (o.q.at(row, head), back.dout.at(row, head));
                to_p[i] = p.wrapping_add(i * KEYS);
                to_ds[i] = ds.wrapping_add(i * KEYS);
                head += 1;
                if head == heads + group {
                    (row, head) = (row + 1, heads);
                }
            }
            // SAFETY: the rows have the operands' widths.
            let (packed_q, packed_dout) = unsafe {
                let packed_q = pack(s, &q, 0..n, o.width, b.packed_keys);
                (packed_q, pack(s, &dout, 0..n, o.value_width, b.packed_values))
            };
            // Keys up to the last that one of these rows sees.
            let seen = seq.position(queries[n - 1].0) + 1 - base;
            let vectors = seen.min(count).div_ceil(LANES);
            // SAFETY: the rows have the operands' widths; there is room for the keys of each.
            unsafe {
                multiply(s, &to_p[..n], &q[..n], keys_by_width, o.width, vectors);
                multiply(s, &to_ds[..n], &dout[..n], values_by_width, o.value_width, vectors);
            }
            let queries = &queries[..n];
            s.call(KeyCotangents { back, seq, base, vectors, queries, p, ds });
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
                [(keys, packed_q, ds, o.width), (values, packed_dout, p, o.value_width)]
            {
                let weights = weights.cast_const();
                let rows: [_; KEYS] = std::array::from_fn(|j| weights.wrapping_add(j));
                let c = Coefficients { rows: &rows, step: KEYS };
                // SAFETY: the results are the tile's; sources of the batch are set.
                unsafe { add_weighted(s, &to[..count], c, from, ranges, None, width) };
            }
        }
    }
}

/// Turns the dot products of some queries with keys, `p`, into `exp(logit - lse)`, and those of
/// their cotangents with the values, `ds`, into the cotangents of those of `p`. For keys that a row
/// does not see it is anything.
struct KeyCotangents<'a> {
    back: &'a Back,
    seq: &'a Sequence,
    base: usize,
    vectors: usize,
    /// A row and a head each.
    queries: &'a [(usize, usize)],
    p: *mut f32,
    ds: *mut f32,
}

impl Task for KeyCotangents<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let back = self.back;
        for (i, &(row, head)) in self.queries.iter().enumerate() {
            // SAFETY: there is room for a tile's keys for each query; statistics have it.
            unsafe {
                let at = row * back.heads + head;
                let (lse, delta) = (s.splat(*back.lse.add(at)), s.splat(*back.delta.add(at)));
                let (bias, position) = (back.logits.bias(head), self.seq.position(row));
                for v in 0..self.vectors {
                    let offset = i * KEYS + v * LANES;
                    let (p, ds) = (self.p.add(offset), self.ds.add(offset));
                    let key = self.base + v * LANES;
                    let logit = back.logits.value(s, s.load(p));
                    let biased = back.logits.biased(s, logit, bias, position, key);
                    let weight = weight(s, s.sub(biased, lse));
                    s.store(p, weight);
                    let v = s.mul(weight, s.sub(s.load(ds), delta));
                    s.store(ds, s.mul(v, back.logits.slope(s, logit)));
                }
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
