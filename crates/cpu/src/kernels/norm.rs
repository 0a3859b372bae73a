//! Normalization of rows, and its gradients.

use std::ops::Range;

use graph::{Call, DType, Needs, NormKind, NormOperand, Op};

use super::{Support, column_tiles, dense, row_tiles, rows};
use crate::job::{Job, Rows};
use crate::simd::{LANES, Simd, Task};

/// `x`, and `dy` of the gradients, as rows; a dense weight.
pub(super) fn supports(call: &Call<'_>) -> Support {
    rows(call, 0)?;
    match call.op {
        Op::Norm { .. } => return Ok(Needs::default()),
        Op::NormBack { .. } => return rows(call, 1).map(|_| Needs::default()),
        _ => {}
    }
    dense(call, 1, DType::F32)?;
    if call.args.len() > 2 {
        rows(call, 2)?;
    }
    Ok(Needs::default())
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize) {
    match job.op {
        Op::RmsNorm { eps } => {
            let rows = row_tiles(job).range(tile);
            job.isa.run(Forward { job, eps: eps.get(), rows });
        }
        Op::RmsNormBack { eps, wrt: NormOperand::X } => {
            let rows = row_tiles(job).range(tile);
            job.isa.run(BackX { job, eps: eps.get(), rows });
        }
        Op::RmsNormBack { eps, wrt: NormOperand::Weight } => {
            let columns = column_tiles(job.out.shape.cols()).range(tile);
            job.isa.run(BackWeight { job, eps: eps.get(), columns });
        }
        Op::Norm { kind, eps } => {
            let rows = row_tiles(job).range(tile);
            job.isa.run(Norm { job, kind: *kind, eps: eps.get(), rows });
        }
        Op::NormBack { kind, eps } => {
            let rows = row_tiles(job).range(tile);
            job.isa.run(NormBack { job, kind: *kind, eps: eps.get(), rows });
        }
        _ => {}
    }
}

/// What [`NormKind`] takes off a row and divides it by, and whether the divisor is a constant.
///
/// # Safety
/// `x` must be valid for `n` reads.
#[inline(always)]
unsafe fn moments<S: Simd>(
    s: S,
    x: *const f32,
    n: usize,
    kind: NormKind,
    eps: f32,
) -> (f32, f32, bool) {
    let mut mean = 0.0;
    if kind == NormKind::Layer {
        let mut sum = s.zero();
        for i in (0..n).step_by(LANES) {
            // SAFETY: the caller's.
            sum = s.add(sum, unsafe { s.load_first(x.add(i), n - i) });
        }
        mean = s.reduce_sum(sum) / n as f32;
    }
    let mut squares = s.zero();
    for i in (0..n).step_by(LANES) {
        // SAFETY: the caller's.
        let v = s.sub(unsafe { s.load_first(x.add(i), n - i) }, s.splat(mean));
        let v = s.select(s.first(n - i), v, s.zero());
        squares = s.fma(v, v, squares);
    }
    let squares = s.reduce_sum(squares);
    match kind {
        NormKind::Layer => (mean, (squares / n as f32 + eps).sqrt(), false),
        NormKind::L2Clamp if squares.sqrt() > eps => (mean, squares.sqrt(), false),
        NormKind::L2Clamp => (mean, eps, true),
        NormKind::L2Add => (mean, (squares + eps).sqrt(), false),
    }
}

struct Norm<'a> {
    job: &'a Job<'a>,
    kind: NormKind,
    eps: f32,
    rows: Range<usize>,
}

impl Task for Norm<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        let x = self.job.input(0).rows::<f32>();
        for row in self.rows {
            let (x, to) = (x.row(row), self.job.out_row::<f32>(row));
            // SAFETY: row `row` of the result is this tile's; x's row is as long.
            unsafe {
                let (mean, divisor, _) = moments(s, x, n, self.kind, self.eps);
                let (mean, inverse) = (s.splat(mean), s.splat(1.0 / divisor));
                for i in (0..n).step_by(LANES) {
                    let v = s.sub(s.load_first(x.add(i), n - i), mean);
                    s.store_first(to.add(i), s.mul(v, inverse), n - i);
                }
            }
        }
    }
}

struct NormBack<'a> {
    job: &'a Job<'a>,
    kind: NormKind,
    eps: f32,
    rows: Range<usize>,
}

impl Task for NormBack<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        let (x, dy) = (self.job.input(0).rows::<f32>(), self.job.input(1).rows::<f32>());
        for row in self.rows {
            let (x, dy, to) = (x.row(row), dy.row(row), self.job.out_row::<f32>(row));
            // SAFETY: row `row` of the result is this tile's; the operands' rows are as long.
            unsafe {
                let (mean, divisor, constant) = moments(s, x, n, self.kind, self.eps);
                let (mean, inverse) = (s.splat(mean), s.splat(1.0 / divisor));
                let (mut sum, mut dot) = (s.zero(), s.zero());
                for i in (0..n).step_by(LANES) {
                    let v = s.mul(s.sub(s.load_first(x.add(i), n - i), mean), inverse);
                    let dy = s.load_first(dy.add(i), n - i);
                    sum = s.add(sum, dy);
                    dot = s.fma(v, dy, dot);
                }
                let (sum, dot) = (s.reduce_sum(sum), s.reduce_sum(dot));
                let (shift, along) = match self.kind {
                    NormKind::Layer => (sum / n as f32, dot / n as f32),
                    _ if constant => (0.0, 0.0),
                    _ => (0.0, dot),
                };
                let (shift, along) = (s.splat(shift), s.splat(along));
                for i in (0..n).step_by(LANES) {
                    let v = s.mul(s.sub(s.load_first(x.add(i), n - i), mean), inverse);
                    let dy = s.sub(s.load_first(dy.add(i), n - i), shift);
                    s.store_first(to.add(i), s.mul(s.fnma(v, along, dy), inverse), n - i);
                }
            }
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`
///
/// # Safety
/// `x` must be valid for `n` reads.
#[inline(always)]
unsafe fn inverse_rms<S: Simd>(s: S, x: *const f32, n: usize, eps: f32) -> f32 {
    let mut sum = s.zero();
    let mut i = 0;
    // SAFETY: the caller's.
    unsafe {
        while i + LANES <= n {
            let v = s.load(x.add(i));
            sum = s.fma(v, v, sum);
            i += LANES;
        }
        if i < n {
            let v = s.load_first(x.add(i), n - i);
            sum = s.fma(v, v, sum);
        }
    }
    1.0 / (s.reduce_sum(sum) / n as f32 + eps).sqrt()
}

struct Forward<'a> {
    job: &'a Job<'a>,
    eps: f32,
    rows: Range<usize>,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        let x = self.job.input(0).rows::<f32>();
        let w = self.job.input(1).ptr::<f32>();
        for row in self.rows {
            let (x, to) = (x.row(row), self.job.out_row::<f32>(row));
            // SAFETY: row `row` of the result is this tile's; x's row and the weight are as long.
            unsafe {
                let r = s.splat(inverse_rms(s, x, n, self.eps));
                for i in (0..n).step_by(LANES) {
                    let v = s.mul(s.load_first(x.add(i), n - i), r);
                    s.store_first(to.add(i), s.mul(v, s.load_first(w.add(i), n - i)), n - i);
                }
            }
        }
    }
}

/// `r (w dy - x r^2 mean(w dy x))`
struct BackX<'a> {
    job: &'a Job<'a>,
    eps: f32,
    rows: Range<usize>,
}

impl Task for BackX<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        let x = self.job.input(0).rows::<f32>();
        let w = self.job.input(1).ptr::<f32>();
        let dy = self.job.input(2).rows::<f32>();
        for row in self.rows {
            let (x, dy, to) = (x.row(row), dy.row(row), self.job.out_row::<f32>(row));
            // SAFETY: row `row` of the result is this tile's; the operands' rows are as long.
            unsafe {
                let r = inverse_rms(s, x, n, self.eps);
                let mut dot = s.zero();
                for i in (0..n).step_by(LANES) {
                    let g = s.mul(s.load_first(w.add(i), n - i), s.load_first(dy.add(i), n - i));
                    dot = s.fma(g, s.load_first(x.add(i), n - i), dot);
                }
                let shrink = s.splat(r * r * (s.reduce_sum(dot) / n as f32));
                let r = s.splat(r);
                for i in (0..n).step_by(LANES) {
                    let g = s.mul(s.load_first(w.add(i), n - i), s.load_first(dy.add(i), n - i));
                    let v = s.fnma(s.load_first(x.add(i), n - i), shrink, g);
                    s.store_first(to.add(i), s.mul(r, v), n - i);
                }
            }
        }
    }
}

/// Rows whose factors are computed before columns are walked.
const BLOCK: usize = 64;

/// `sum over rows of dy x r`, rows ascending.
struct BackWeight<'a> {
    job: &'a Job<'a>,
    eps: f32,
    columns: Range<usize>,
}

impl Task for BackWeight<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.job.input(0).arg.shape;
        let (count, n) = (shape.rows(), shape.cols());
        let x: Rows<f32> = self.job.input(0).rows();
        let dy: Rows<f32> = self.job.input(2).rows();
        let to = self.job.out::<f32>();
        let mut block = 0;
        // One pass even without rows, for the zeros.
        loop {
            let end = (block + BLOCK).min(count);
            let mut r = [0.0; BLOCK];
            for (r, row) in r.iter_mut().zip(block..end) {
                // SAFETY: rows of x have `n` elements.
                *r = unsafe { inverse_rms(s, x.row(row), n, self.eps) };
            }
            for i in self.columns.clone().step_by(LANES) {
                let k = self.columns.end - i;
                // SAFETY: columns from `i` on, `k` of them, are this tile's, and rows of x and
                // dy have them.
                unsafe {
                    let mut sum = if block == 0 { s.zero() } else { s.load_first(to.add(i), k) };
                    for (r, row) in r.iter().zip(block..end) {
                        let v = s.mul(s.load_first(x.row(row).add(i), k), s.splat(*r));
                        sum = s.fma(s.load_first(dy.row(row).add(i), k), v, sum);
                    }
                    s.store_first(to.add(i), sum, k);
                }
            }
            block = end;
            if block >= count {
                break;
            }
        }
    }
}
