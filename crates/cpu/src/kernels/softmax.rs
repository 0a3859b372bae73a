//! Softmax, log-softmax and their gradients: 16 lanes and one tree along a row.

use std::ops::Range;

use graph::{Call, DType, Needs, Op, SoftmaxAttrs, alibi_slope};

use super::loss::log_sum_exp;
use super::{Support, TILE_ELEMENTS, Tiles, dense, dense_last, row_tiles, rows};
use crate::job::{Input, Job, Scratch};
use crate::simd::{LANES, Simd, Task};

/// Rows; a mask of any strides outside of its dense last dimension; dense sinks.
pub(super) fn supports(call: &Call<'_>) -> Support {
    match call.op {
        Op::Softmax(attrs) | Op::SoftmaxSinkBack(attrs) => {
            rows(call, 0)?;
            if attrs.mask {
                dense_last(call, 1)?;
            }
            let sinks = 1 + usize::from(attrs.mask);
            if attrs.sinks {
                dense(call, sinks, DType::F32)?;
            }
            if matches!(call.op, Op::SoftmaxSinkBack(_)) {
                rows(call, sinks + 1)?;
                rows(call, sinks + 2)?;
                return Ok(super::needs(&[call.args[0].shape.cols()]));
            }
        }
        _ => {
            for i in 0..call.args.len() {
                rows(call, i)?;
            }
        }
    }
    Ok(Needs::default())
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    match job.op {
        // A head's rows are added up in order.
        Op::SoftmaxSinkBack(_) => job.out.shape.elements(),
        Op::SoftmaxBack { .. } => row_tiles(job).count,
        _ => grid(job).count,
    }
}

fn grid(job: &Job<'_>) -> Tiles {
    // An exponential takes as long as a few dozen simple operations.
    let shape = job.out.shape;
    Tiles::new(shape.rows(), TILE_ELEMENTS / 4 / shape.cols().max(1))
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, mut scratch: Scratch<'_>) {
    match job.op {
        Op::Softmax(attrs) => {
            let logits = Logits::new(job, attrs);
            job.isa.run(Forward { job, logits, rows: grid(job).range(tile) });
        }
        Op::SoftmaxBack { scale } => {
            let rows = row_tiles(job).range(tile);
            job.isa.run(Back { job, scale: scale.get(), rows });
        }
        Op::SoftmaxSinkBack(attrs) => {
            let logits = Logits::new(job, attrs);
            let memory = scratch.take(job.input(0).arg.shape.cols()).as_mut_ptr();
            job.isa.run(SinkBack { job, logits, head: tile, memory });
        }
        Op::LogSoftmax => job.isa.run(Log { job, rows: grid(job).range(tile) }),
        _ => {}
    }
}

/// The logits of a softmax: what is masked, scaled and has a sink.
struct Logits<'a> {
    x: Input<'a>,
    mask: Option<Input<'a>>,
    sinks: Option<Input<'a>>,
    attrs: SoftmaxAttrs,
    heads: usize,
    per_head: usize,
}

impl<'a> Logits<'a> {
    fn new(job: &'a Job<'a>, attrs: &SoftmaxAttrs) -> Logits<'a> {
        let x = job.input(0);
        let rank = x.arg.shape.rank();
        let (heads, per_head) = match rank {
            0..3 => (1, 1),
            _ => (x.arg.shape.dim(rank - 3), x.arg.shape.dim(rank - 2)),
        };
        let mask = attrs.mask.then(|| job.input(1));
        let sinks = attrs.sinks.then(|| job.input(1 + usize::from(attrs.mask)));
        let (heads, per_head) = (heads.max(1), per_head.max(1));
        Logits { x, mask, sinks, attrs: *attrs, heads, per_head }
    }

    fn head(&self, row: usize) -> usize {
        row / self.per_head % self.heads
    }

    /// The sink of a row; -inf where there is none.
    fn sink(&self, row: usize) -> f32 {
        self.sinks.map_or(f32::NEG_INFINITY, |sinks| {
            // SAFETY: `supports` asked for a dense f32 operand; it has an element per head.
            let sinks = unsafe { sinks.slice::<f32>() };
            sinks[self.head(row)]
        })
    }

    /// The mask's row for a row of `x`.
    fn mask_row(&self, mask: Input<'_>, row: usize) -> *const f32 {
        let (x, own) = (self.x.arg.shape, mask.arg.shape);
        let (mut rest, mut at) = (row, mask.ptr::<f32>());
        for back in 2..=x.rank() {
            let size = x.dim(x.rank() - back).max(1);
            let index = rest % size;
            rest /= size;
            if let Some(d) = own.rank().checked_sub(back)
                && own.dim(d) != 1
            {
                at = at.wrapping_add(index * mask.stride(d));
            }
        }
        at
    }

    /// Writes a row's logits and returns the greatest, the sink's included.
    ///
    /// # Safety
    /// `to` must be valid for writes of a row.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, s: S, row: usize, to: *mut f32) -> f32 {
        let n = self.x.arg.shape.cols();
        let x = self.x.rows::<f32>().row(row);
        let scale = s.splat(self.attrs.scale.get());
        let slope = alibi_slope(self.attrs.max_bias.get(), self.head(row), self.heads);
        let slope = s.splat(slope);
        let mask = self.mask.map(|mask| self.mask_row(mask, row));
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut largest = lowest;
        for i in (0..n).step_by(LANES) {
            // SAFETY: rows of x and the mask have `n` elements; the rest is the caller's.
            unsafe {
                let mut l = s.mul(scale, s.load_first(x.add(i), n - i));
                if let Some(mask) = mask {
                    l = s.fma(slope, s.load_first(mask.add(i), n - i), l);
                }
                s.store_first(to.add(i), l, n - i);
                largest = s.max(largest, s.select(s.first(n - i), l, lowest));
            }
        }
        s.reduce_max(largest).max(self.sink(row))
    }

    /// Replaces logits by `exp(l - max)` and returns their sum, the sink's term included.
    ///
    /// # Safety
    /// `at` must be valid for a row.
    #[inline(always)]
    unsafe fn exponentials<S: Simd>(&self, s: S, row: usize, at: *mut f32, max: f32) -> f32 {
        let n = self.x.arg.shape.cols();
        let mut sum = s.zero();
        for i in (0..n).step_by(LANES) {
            // SAFETY: the caller's.
            unsafe {
                let e = s.exp(s.sub(s.load_first(at.add(i), n - i), s.splat(max)));
                s.store_first(at.add(i), e, n - i);
                sum = s.add(sum, s.select(s.first(n - i), e, s.zero()));
            }
        }
        let sink = match self.sinks {
            Some(_) => lane(s, s.exp(s.splat(self.sink(row) - max))),
            None => 0.0,
        };
        s.reduce_sum(sum) + sink
    }
}

/// One lane of a vector whose lanes are equal.
#[inline(always)]
fn lane<S: Simd>(s: S, v: S::F32) -> f32 {
    let mut lanes = [0.0; LANES];
    // SAFETY: the array has 16 elements.
    unsafe { s.store(lanes.as_mut_ptr(), v) };
    lanes[0]
}

struct Forward<'a> {
    job: &'a Job<'a>,
    logits: Logits<'a>,
    rows: Range<usize>,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        for row in self.rows {
            let to = self.job.out_row::<f32>(row);
            // SAFETY: row `row` of the result is this tile's.
            unsafe {
                let max = self.logits.write(s, row, to);
                // A row without a logit: its shares are 0, not 0/0.
                let inverse = if max == f32::NEG_INFINITY {
                    std::slice::from_raw_parts_mut(to, n).fill(0.0);
                    continue;
                } else {
                    s.splat(1.0 / self.logits.exponentials(s, row, to, max))
                };
                for i in (0..n).step_by(LANES) {
                    let v = s.mul(s.load_first(to.add(i), n - i), inverse);
                    s.store_first(to.add(i), v, n - i);
                }
            }
        }
    }
}

/// `sum(y dy)` of a row.
///
/// # Safety
/// Both must be valid for `n` reads.
#[inline(always)]
unsafe fn dot<S: Simd>(s: S, y: *const f32, dy: *const f32, n: usize) -> f32 {
    let mut sum = s.zero();
    for i in (0..n).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe {
            sum = s.fma(s.load_first(y.add(i), n - i), s.load_first(dy.add(i), n - i), sum);
        }
    }
    s.reduce_sum(sum)
}

struct Back<'a> {
    job: &'a Job<'a>,
    scale: f32,
    rows: Range<usize>,
}

impl Task for Back<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        let (y, dy) = (self.job.input(0).rows::<f32>(), self.job.input(1).rows::<f32>());
        let scale = s.splat(self.scale);
        for row in self.rows {
            let (y, dy, to) = (y.row(row), dy.row(row), self.job.out_row::<f32>(row));
            // SAFETY: row `row` of the result is this tile's; the operands' rows are as long.
            unsafe {
                let dot = s.splat(dot(s, y, dy, n));
                for i in (0..n).step_by(LANES) {
                    let rest = s.sub(s.load_first(dy.add(i), n - i), dot);
                    let y = s.mul(scale, s.load_first(y.add(i), n - i));
                    s.store_first(to.add(i), s.mul(y, rest), n - i);
                }
            }
        }
    }
}

/// One head's sink.
struct SinkBack<'a> {
    job: &'a Job<'a>,
    logits: Logits<'a>,
    head: usize,
    /// A row.
    memory: *mut f32,
}

impl Task for SinkBack<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.job.input(0).arg.shape;
        let (count, n) = (shape.rows(), shape.cols());
        let at = 2 + usize::from(self.logits.attrs.mask);
        let (y, dy) = (self.job.input(at).rows::<f32>(), self.job.input(at + 1).rows::<f32>());
        let mut sum = 0.0f32;
        for row in (0..count).filter(|&row| self.logits.head(row) == self.head) {
            // SAFETY: the scratch memory has a row, and so do the operands.
            unsafe {
                let max = self.logits.write(s, row, self.memory);
                let total = self.logits.exponentials(s, row, self.memory, max);
                let share = lane(s, s.exp(s.splat(self.logits.sink(row) - max))) / total;
                sum -= share * dot(s, y.row(row), dy.row(row), n);
            }
        }
        // SAFETY: the head's element of the result is this tile's.
        unsafe { *self.job.out::<f32>().add(self.head) = sum };
    }
}

struct Log<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Task for Log<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        if n == 0 {
            return;
        }
        let x = self.job.input(0).rows::<f32>();
        for row in self.rows {
            let (x, to) = (x.row(row), self.job.out_row::<f32>(row));
            // SAFETY: row `row` of the result is this tile's; x's row is as long.
            unsafe {
                let (max, log) = log_sum_exp(s, x, n);
                let (max, log) = (s.splat(max), s.splat(log));
                for i in (0..n).step_by(LANES) {
                    let v = s.sub(s.sub(s.load_first(x.add(i), n - i), max), log);
                    s.store_first(to.add(i), v, n - i);
                }
            }
        }
    }
}
