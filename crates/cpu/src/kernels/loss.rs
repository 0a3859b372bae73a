//! Cross-entropy against sparse labels, and its gradient.

use std::ops::Range;

use graph::{Call, DType, Needs, Op};

use super::{Support, TILE_ELEMENTS, Tiles, dense, rows};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

/// Rows of logits; dense labels and cotangents.
pub(super) fn supports(call: &Call<'_>) -> Support {
    rows(call, 0)?;
    dense(call, 1, DType::I32)?;
    if call.args.len() > 2 {
        dense(call, 2, DType::F32)?;
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
    if matches!(job.op, Op::CrossEntropy) {
        job.isa.run(Forward { job, rows });
    } else {
        job.isa.run(Back { job, rows });
    }
}

/// The largest of `n` logits, and the logarithm of the sum of their exponentials relative to
/// it: 16 lanes, then one tree.
///
/// # Safety
/// `x` must be valid for `n > 0` reads.
#[inline(always)]
pub(super) unsafe fn log_sum_exp<S: Simd>(s: S, x: *const f32, n: usize) -> (f32, f32) {
    // SAFETY: the caller's.
    unsafe {
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut largest = lowest;
        for i in (0..n).step_by(LANES) {
            let v = s.select(s.first(n - i), s.load_first(x.add(i), n - i), lowest);
            largest = s.max(largest, v);
        }
        let max = s.reduce_max(largest);
        let mut sum = s.zero();
        for i in (0..n).step_by(LANES) {
            let e = s.exp(s.sub(s.load_first(x.add(i), n - i), s.splat(max)));
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
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let logits = self.job.input(0).rows::<f32>();
        let n = self.job.input(0).arg.shape.cols();
        let labels = self.job.input(1).ints();
        for row in self.rows {
            // SAFETY: the row has `n` logits, and `check` found the label to be one of them;
            // element `row` of the result is this tile's.
            unsafe {
                *self.job.out::<f32>().add(row) = match usize::try_from(labels[row]) {
                    Ok(label) => {
                        let x = logits.row(row);
                        let (max, log) = log_sum_exp(s, x, n);
                        // In this order, because both terms are at least 0.
                        log + (max - *x.add(label))
                    }
                    Err(_) => 0.0,
                };
            }
        }
    }
}

struct Back<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Task for Back<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let logits = self.job.input(0).rows::<f32>();
        let n = self.job.input(0).arg.shape.cols();
        let labels = self.job.input(1).ints();
        // SAFETY: `supports` asked for a dense f32 operand.
        let dy = unsafe { self.job.input(2).slice::<f32>() };
        for row in self.rows {
            let (x, to, dy) = (logits.row(row), self.job.out_row::<f32>(row), dy[row]);
            // SAFETY: row `row` of the result is this tile's and has `n` elements, as x's.
            unsafe {
                let label = match usize::try_from(labels[row]) {
                    Ok(label) if dy != 0.0 => label,
                    _ => {
                        std::slice::from_raw_parts_mut(to, n).fill(0.0);
                        continue;
                    }
                };
                let (max, log) = log_sum_exp(s, x, n);
                let (max, log, scale) = (s.splat(max), s.splat(log), s.splat(dy));
                for i in (0..n).step_by(LANES) {
                    let v = s.sub(s.load_first(x.add(i), n - i), max);
                    let p = s.exp(s.sub(v, log));
                    s.store_first(to.add(i), s.mul(scale, p), n - i);
                }
                // The label's own probability, by the same arithmetic.
                let v = s.sub(s.splat(*x.add(label)), max);
                let p = s.sub(s.exp(s.sub(v, log)), s.splat(1.0));
                s.store_first(to.add(label), s.mul(scale, p), 1);
            }
        }
    }
}
