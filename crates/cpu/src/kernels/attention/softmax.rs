//! Logits, and their softmax as the keys come in.

use super::queries::{CHUNK, Chunk, Queries};
use super::{KEYS, Operands};
use crate::simd::{LANES, Simd, Task};

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

/// The softmax of queries as their keys come in: of each its highest logit so far, and in 16 lanes
/// the sum of the exponentials under it.
pub(super) struct Running<'a> {
    pub(super) maxima: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
}

impl Running<'_> {
    /// Floats of a query between two rounds: its maximum and its sums.
    pub(super) const KEPT: usize = 1 + LANES;

    /// Begins with queries, or goes on where [`Running::leave`] has left them.
    ///
    /// # Safety
    /// Where there are several rounds, `kept` must have [`Running::KEPT`] floats for each head of each
    /// row, which `leave` has set in the round before.
    #[inline(always)]
    pub(super) unsafe fn start(
        &mut self,
        queries: &Queries<'_>,
        o: &Operands<'_>,
        round: usize,
        kept: *const f32,
    ) {
        if round == 0 {
            return self.begin(queries, o.sinks);
        }
        for i in 0..queries.count() {
            // SAFETY: the caller's.
            unsafe {
                let from = kept.add(queries.number(i) * Running::KEPT);
                self.maxima[i] = *from;
                let sums = self.sums[i * LANES..][..LANES].as_mut_ptr();
                std::ptr::copy_nonoverlapping(from.add(1), sums, LANES);
            }
        }
    }

    /// Leaves queries to the next round; false after the last.
    ///
    /// # Safety
    /// As [`Running::start`]; what is kept of the queries must be the tile's.
    #[inline(always)]
    pub(super) unsafe fn leave(
        &self,
        queries: &Queries<'_>,
        o: &Operands<'_>,
        round: usize,
        kept: *mut f32,
    ) -> bool {
        if round + 1 == o.blocks.rounds {
            return false;
        }
        for i in 0..queries.count() {
            // SAFETY: the caller's.
            unsafe {
                let to = kept.add(queries.number(i) * Running::KEPT);
                *to = self.maxima[i];
                let sums = self.sums[i * LANES..][..LANES].as_ptr();
                std::ptr::copy_nonoverlapping(sums, to.add(1), LANES);
            }
        }
        true
    }

    /// Begins with so many queries. A sink is a logit that every query of its head begins with.
    #[inline(always)]
    fn begin(&mut self, queries: &Queries<'_>, sinks: Option<&[f32]>) {
        let n = queries.count();
        self.maxima[..n].fill(f32::NEG_INFINITY);
        self.sums[..n * LANES].fill(0.0);
        let Some(sinks) = sinks else { return };
        for i in 0..n {
            let sink = sinks[queries.at(i).1];
            self.maxima[i] = sink;
            self.sums[i * LANES] = if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 };
        }
    }

    /// The highest logit of a query and the sum.
    #[inline(always)]
    pub(super) fn end<S: Simd>(&self, s: S, i: usize) -> (f32, f32) {
        let sum = &self.sums[i * LANES..][..LANES];
        // SAFETY: 16 floats.
        (self.maxima[i], s.reduce_sum(unsafe { s.load(sum.as_ptr()) }))
    }
}

/// The least `x` whose weight [`weight`] is not 0: `e^x` beside a weight of 1 is far below what f32
/// shows.
const LEAST: f32 = -64.0;

/// The weight `e^x`, or 0 where that is next to nothing: its products with small numbers would be
/// subnormal, each of which takes a processor as long as a hundred others.
#[inline(always)]
pub(super) fn weight<S: Simd>(s: S, x: S::F32) -> S::F32 {
    s.select(s.lt(x, s.splat(LEAST)), s.zero(), s.exp(x))
}

/// What becomes cotangents of dot products.
pub(super) struct Cotangents<'a> {
    /// Dot products of each query's cotangent with the values, [`KEYS`] each; they become what its
    /// weights are multiplied with.
    pub(super) products: &'a mut [f32],
    /// What a query subtracts of them.
    pub(super) delta: [f32; CHUNK],
}

/// Takes a tile's keys into the softmax of some queries: their dot products become exponentials
/// under the new maximum, or cotangents if there are some, and what has been added up under the
/// old one is to be multiplied with `factors`. Keys that a query does not see get anything.
pub(super) struct Take<'a, 'b> {
    pub(super) logits: Logits,
    pub(super) chunk: &'a Chunk,
    /// The position of the tile's first key.
    pub(super) base: usize,
    /// [`KEYS`] for each query.
    pub(super) dots: &'a mut [f32],
    pub(super) cotangents: Option<Cotangents<'a>>,
    pub(super) running: &'a mut Running<'b>,
    pub(super) factors: &'a mut [f32; CHUNK],
}

impl Task for Take<'_, '_> {
    type Out = ();

    // In passes over the queries, none of which waits for what the one before found of a query.
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let n = self.chunk.n;
        let mut highest = [f32::NEG_INFINITY; CHUNK];
        for r in 0..n {
            highest[r] = match self.vectors(r) {
                4 => self.logits::<S, 4>(s, r),
                3 => self.logits::<S, 3>(s, r),
                2 => self.logits::<S, 2>(s, r),
                _ => self.logits::<S, 1>(s, r),
            };
        }
        let maxima = &mut self.running.maxima[self.chunk.first..][..n];
        for r in (0..n).step_by(LANES) {
            let at = maxima[r..].as_mut_ptr();
            // SAFETY: `n - r` floats.
            unsafe {
                let old = s.load_first(at, n - r);
                let new = s.max(old, s.load_first(highest[r..].as_ptr(), n - r));
                // Nothing changes under an equal maximum, minus infinity too.
                let same = s.eq(old, new);
                let factor = s.select(same, s.splat(1.0), weight(s, s.sub(old, new)));
                s.store_first(at, new, n - r);
                s.store_first(self.factors[r..].as_mut_ptr(), factor, n - r);
            }
        }
        for r in 0..n {
            match self.vectors(r) {
                4 => self.weights::<S, 4>(s, r),
                3 => self.weights::<S, 3>(s, r),
                2 => self.weights::<S, 2>(s, r),
                _ => self.weights::<S, 1>(s, r),
            }
        }
    }
}

impl Take<'_, '_> {
    /// Vectors of keys up to the last that a query sees.
    #[inline(always)]
    fn vectors(&self, r: usize) -> usize {
        self.chunk.seen[r].end.div_ceil(LANES)
    }

    /// Makes logits of the dot products of a query, minus infinity of those it does not see, and
    /// gives the highest.
    #[inline(always)]
    fn logits<S: Simd, const V: usize>(&mut self, s: S, r: usize) -> f32 {
        let (chunk, logits) = (self.chunk, self.logits);
        let seen = &chunk.seen[r];
        let all = seen.start == 0 && seen.end == V * LANES;
        let bias = logits.bias(chunk.queries[r].1);
        let row = self.dots[r * KEYS..][..V * LANES].as_mut_ptr();
        let hidden = s.splat(f32::NEG_INFINITY);
        let mut highest = hidden;
        for v in 0..V {
            // SAFETY: the row has as many vectors.
            unsafe {
                let at = row.add(v * LANES);
                let logit = logits.value(s, s.load(at));
                if let Some(c) = &mut self.cotangents {
                    let product = c.products[r * KEYS + v * LANES..][..LANES].as_mut_ptr();
                    let less = s.sub(s.load(product), s.splat(c.delta[r]));
                    s.store(product, s.mul(less, logits.slope(s, logit)));
                }
                let key = self.base + v * LANES;
                let mut logit = logits.biased(s, logit, bias, chunk.positions[r], key);
                if !all {
                    let (from, to) = (seen.start, seen.end);
                    let [from, to] = [from, to].map(|x| x.saturating_sub(v * LANES));
                    logit = s.select(s.between(from, to), logit, hidden);
                }
                s.store(at, logit);
                highest = s.max(logit, highest);
            }
        }
        s.reduce_max(highest)
    }

    /// Makes weights of the logits of a query, and adds them to its sum.
    #[inline(always)]
    fn weights<S: Simd, const V: usize>(&mut self, s: S, r: usize) {
        let i = self.chunk.first + r;
        let row = self.dots[r * KEYS..][..V * LANES].as_mut_ptr();
        let max = s.splat(self.running.maxima[i]);
        let running = self.running.sums[i * LANES..][..LANES].as_mut_ptr();
        let mut sum = s.zero();
        // SAFETY: the row has as many vectors, the sum 16 floats.
        unsafe {
            for v in 0..V {
                let at = row.add(v * LANES);
                // 0 of what is hidden, unless there is nothing to see that is finite.
                let mut weight = weight(s, s.sub(s.load(at), max));
                sum = s.add(sum, weight);
                if let Some(c) = &self.cotangents {
                    let factor = c.products[r * KEYS + v * LANES..][..LANES].as_ptr();
                    weight = s.mul(weight, s.load(factor));
                }
                s.store(at, weight);
            }
            let factor = s.splat(self.factors[r]);
            s.store(running, s.fma(s.load(running), factor, sum));
        }
    }
}

/// Multiplies a row.
///
/// # Safety
/// `to` must have room for `width` floats.
#[inline(always)]
pub(super) unsafe fn scale<S: Simd>(s: S, factor: f32, to: *mut f32, width: usize) {
    let factor = s.splat(factor);
    for w in (0..width).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe {
            let v = s.mul(s.load_first(to.add(w), width - w), factor);
            s.store_first(to.add(w), v, width - w);
        }
    }
}
