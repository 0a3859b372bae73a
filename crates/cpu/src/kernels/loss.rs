//! Cross-entropy against sparse labels, and its gradient.

use std::ops::Range;

use graph::{Call, CrossEntropyAttrs, DType, Needs, Op};

use super::{Support, TILE_ELEMENTS, Tiles, dense, rows};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

#[cfg(test)]
#[path = "loss_tests.rs"]
mod tests;

/// Rows of logits; dense labels, cotangents and weights.
pub(super) fn supports(call: &Call<'_>) -> Support {
    rows(call, 0)?;
    dense(call, 1, DType::I32)?;
    for i in 2..call.args.len() {
        dense(call, i, DType::F32)?;
    }
    Ok(Needs::default())
}

pub(super) fn check(job: &Job<'_>) -> Result<(), String> {
    let vocabulary = job.input(0).arg.shape.cols();
    for (row, &label) in job.input(1).ints().iter().enumerate() {
        if usize::try_from(label).is_ok_and(|label| label >= vocabulary) {
            return Err(format!("label {label} of row {row} is not in 0..{vocabulary}"));
        }
    }
    Ok(())
}

fn grid(job: &Job<'_>) -> Tiles {
    let logits = job.input(0).arg.shape;
    Tiles::new(logits.rows(), TILE_ELEMENTS / logits.cols().max(1))
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    grid(job).count
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize) {
    let rows = grid(job).range(tile);
    // SAFETY: `supports` asked for dense f32 operands.
    let floats = |i: usize| unsafe { job.input(i).slice::<f32>() };
    match job.op {
        Op::CrossEntropy(attrs) => {
            let weights = attrs.weighted.then(|| floats(2));
            job.isa.run(Forward { job, rows, logits: Logits::new(attrs), weights });
        }
        Op::CrossEntropyBack(attrs) => {
            let (dy, weights) = (floats(2), attrs.weighted.then(|| floats(3)));
            job.isa.run(Back { job, rows, logits: Logits::new(attrs), dy, weights });
        }
        _ => {}
    }
}

/// Logits as the softmax takes them.
#[derive(Copy, Clone)]
struct Logits {
    scale: f32,
    softcap: Option<f32>,
}

impl Logits {
    fn new(attrs: &CrossEntropyAttrs) -> Logits {
        Logits { scale: attrs.scale.get(), softcap: attrs.softcap.map(|c| c.get()) }
    }

    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F32) -> S::F32 {
        let u = s.mul(x, s.splat(self.scale));
        match self.softcap {
            None => u,
            Some(cap) => {
                let cap = s.splat(cap);
                s.mul(cap, s.tanh(s.div(u, cap)))
            }
        }
    }

    /// The derivative of a value by its logit.
    #[inline(always)]
    fn slope<S: Simd>(self, s: S, value: S::F32) -> S::F32 {
        let scale = s.splat(self.scale);
        match self.softcap {
            None => scale,
            Some(cap) => {
                let t = s.div(value, s.splat(cap));
                s.mul(scale, s.fnma(t, t, s.splat(1.0)))
            }
        }
    }
}

/// [`log_sum_exp_of`] logits that are neither scaled nor capped.
///
/// # Safety
/// `x` must be valid for `n > 0` reads.
#[inline(always)]
pub(super) unsafe fn log_sum_exp<S: Simd>(s: S, x: *const f32, n: usize) -> (f32, f32) {
    // SAFETY: the caller's.
    unsafe { log_sum_exp_of(s, Logits { scale: 1.0, softcap: None }, x, n) }
}

/// The largest of `n` values, and the logarithm of the sum of their exponentials relative to
/// it: 16 lanes, then one tree.
///
/// # Safety
/// `x` must be valid for `n > 0` reads.
#[inline(always)]
unsafe fn log_sum_exp_of<S: Simd>(s: S, logits: Logits, x: *const f32, n: usize) -> (f32, f32) {
    // SAFETY: the caller's.
    unsafe {
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut largest = lowest;
        for i in (0..n).step_by(LANES) {
            let v = logits.value(s, s.load_first(x.add(i), n - i));
            largest = s.max(largest, s.select(s.first(n - i), v, lowest));
        }
        let max = s.reduce_max(largest);
        let mut sum = s.zero();
        for i in (0..n).step_by(LANES) {
            let v = logits.value(s, s.load_first(x.add(i), n - i));
            let e = s.exp(s.sub(v, s.splat(max)));
            sum = s.add(sum, s.select(s.first(n - i), e, s.zero()));
        }
        let mut log = [0.0; LANES];
        s.store(log.as_mut_ptr(), s.log(s.splat(s.reduce_sum(sum))));
        (max, log[0])
    }
}

struct Forward<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
    logits: Logits,
    weights: Option<&'a [f32]>,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let logits = self.job.input(0).rows::<f32>();
        let n = self.job.input(0).arg.shape.cols();
        let labels = self.job.input(1).ints();
        for row in self.rows {
            let weight = self.weights.map_or(1.0, |w| w[row]);
            // SAFETY: the row has `n` logits, and `check` found the label to be one of them;
            // element `row` of the result is this tile's.
            unsafe {
                *self.job.out::<f32>().add(row) = match usize::try_from(labels[row]) {
                    Ok(label) if weight != 0.0 => {
                        let x = logits.row(row);
                        let (max, log) = log_sum_exp_of(s, self.logits, x, n);
                        let mut own = [0.0; LANES];
                        s.store(own.as_mut_ptr(), self.logits.value(s, s.splat(*x.add(label))));
                        // In this order, because both terms are at least 0.
                        weight * (log + (max - own[0]))
                    }
                    _ => 0.0,
                };
            }
        }
    }
}

struct Back<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
    logits: Logits,
    dy: &'a [f32],
    weights: Option<&'a [f32]>,
}

impl Task for Back<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let logits = self.job.input(0).rows::<f32>();
        let n = self.job.input(0).arg.shape.cols();
        let labels = self.job.input(1).ints();
        for row in self.rows {
            let (x, to) = (logits.row(row), self.job.out_row::<f32>(row));
            let (dy, weight) = (self.dy[row], self.weights.map_or(1.0, |w| w[row]));
            // SAFETY: row `row` of the result is this tile's and has `n` elements, as x's.
            unsafe {
                let label = match usize::try_from(labels[row]) {
                    Ok(label) if dy != 0.0 && weight != 0.0 => label,
                    _ => {
                        std::slice::from_raw_parts_mut(to, n).fill(0.0);
                        continue;
                    }
                };
                let (max, log) = log_sum_exp_of(s, self.logits, x, n);
                let (max, log, scale) = (s.splat(max), s.splat(log), s.splat(dy * weight));
                for i in (0..n).step_by(LANES) {
                    let z = self.logits.value(s, s.load_first(x.add(i), n - i));
                    let p = s.exp(s.sub(s.sub(z, max), log));
                    let d = s.mul(s.mul(scale, p), self.logits.slope(s, z));
                    s.store_first(to.add(i), d, n - i);
                }
                // The label's own probability, by the same arithmetic.
                let z = self.logits.value(s, s.splat(*x.add(label)));
                let p = s.sub(s.exp(s.sub(s.sub(z, max), log)), s.splat(1.0));
                let d = s.mul(s.mul(scale, p), self.logits.slope(s, z));
                s.store_first(to.add(label), d, 1);
            }
        }
    }
}
