//! Sums over dimensions, and running sums.

use graph::{Call, DType, MAX_RANK, Needs, Shape};

use super::{Support, TILE_ELEMENTS, Tiles, dense};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

pub(super) fn supports(call: &Call<'_>) -> Support {
    dense(call, 0, DType::F32)?;
    Ok(Needs::default())
}

/// A dense operand's dimensions, runs of summed and of kept ones merged.
struct Plan {
    /// Sizes, strides and whether summed; outermost first.
    dims: [(usize, usize, bool); MAX_RANK],
    rank: usize,
}

impl Plan {
    fn new(shape: &Shape, summed: u8) -> Plan {
        let mut plan = Plan { dims: [(1, 1, false); MAX_RANK], rank: 0 };
        let strides = shape.strides();
        for i in 0..shape.rank() {
            let (size, sum) = (shape.dim(i), summed >> i & 1 == 1);
            if size == 1 {
                continue;
            }
            if plan.rank > 0 && plan.dims[plan.rank - 1].2 == sum {
                let last = &mut plan.dims[plan.rank - 1];
                *last = (last.0 * size, strides[i], sum);
            } else {
                plan.dims[plan.rank] = (size, strides[i], sum);
                plan.rank += 1;
            }
        }
        plan
    }

    /// The innermost dimension: its size and whether it is summed.
    fn inner(&self) -> (usize, bool) {
        match self.rank {
            0 => (1, false),
            rank => (self.dims[rank - 1].0, self.dims[rank - 1].2),
        }
    }

    /// How many combinations the dimensions outside of the innermost have, of one kind.
    fn outer(&self, summed: bool) -> usize {
        let outer = self.dims.iter().take(self.rank.saturating_sub(1));
        outer.filter(|d| d.2 == summed).map(|d| d.0).product()
    }

    /// The offset of combination `i`, row-major, of the outer dimensions of one kind.
    #[inline(always)]
    fn offset(&self, mut i: usize, summed: bool) -> usize {
        let mut at = 0;
        for d in (0..self.rank.saturating_sub(1)).rev() {
            let (size, stride, sum) = self.dims[d];
            if sum == summed {
                at += i % size * stride;
                i /= size;
            }
        }
        at
    }
}

/// Tiles of results: single ones where the last dimension is summed, vectors of them otherwise.
fn grid(plan: &Plan, outputs: usize) -> Tiles {
    let (inner, inner_summed) = plan.inner();
    let terms = plan.outer(true) * if inner_summed { inner } else { 1 };
    let per_tile = TILE_ELEMENTS / terms.max(1);
    if inner_summed {
        Tiles::new(outputs, per_tile)
    } else {
        Tiles::new(outputs, per_tile.next_multiple_of(4 * LANES))
    }
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    let graph::Op::Sum { dims } = job.op else { return 0 };
    let plan = Plan::new(&job.input(0).arg.shape, *dims);
    grid(&plan, job.out.shape.elements()).count
}

pub(super) fn run_tile(job: &Job<'_>, dims: u8, tile: usize) {
    let plan = Plan::new(&job.input(0).arg.shape, dims);
    let range = grid(&plan, job.out.shape.elements()).range(tile);
    job.isa.run(Sum { job, plan, range });
}

struct Sum<'a> {
    job: &'a Job<'a>,
    plan: Plan,
    range: std::ops::Range<usize>,
}

impl Task for Sum<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let x = self.job.input(0).ptr::<f32>();
        let out = self.job.out::<f32>();
        let (inner, inner_summed) = self.plan.inner();
        let terms = self.plan.outer(true);
        let mut at = self.range.start;
        while at < self.range.end {
            // SAFETY: results `at ..` below the range's end are this tile's; the plan's offsets
            // are those of elements of the dense operand.
            at += unsafe {
                if inner_summed {
                    let x = x.add(self.plan.offset(at, false));
                    let mut sum = s.zero();
                    for term in 0..terms {
                        sum = add_row(s, sum, x.add(self.plan.offset(term, true)), inner);
                    }
                    *out.add(at) = s.reduce_sum(sum);
                    1
                } else {
                    let (row, from) = (at / inner, at % inner);
                    let n = (inner - from).min(self.range.end - at).min(LANES);
                    let x = x.add(self.plan.offset(row, false) + from);
                    let mut sum = s.zero();
                    for term in 0..terms {
                        sum = s.add(sum, s.load_first(x.add(self.plan.offset(term, true)), n));
                    }
                    s.store_first(out.add(at), sum, n);
                    n
                }
            };
        }
    }
}

/// Adds a row to 16 running sums: element `i` to lane `i % 16`.
///
/// # Safety
/// `x` must be valid for `n` reads.
#[inline(always)]
unsafe fn add_row<S: Simd>(s: S, mut sum: S::F32, x: *const f32, n: usize) -> S::F32 {
    let mut i = 0;
    // SAFETY: the caller's.
    unsafe {
        while i + LANES <= n {
            sum = s.add(sum, s.load(x.add(i)));
            i += LANES;
        }
        if i < n {
            sum = s.add(sum, s.load_first(x.add(i), n - i));
        }
    }
    sum
}

/// A dense operand.
pub(super) fn supports_running(call: &Call<'_>) -> Support {
    dense(call, 0, DType::F32)?;
    Ok(Needs::default())
}

/// Chains: every combination of the other dimensions.
fn chains(job: &Job<'_>, dim: usize) -> (Tiles, usize, usize) {
    let shape = job.out.shape;
    let size = shape.dim(dim);
    let inner: usize = shape.dims().iter().skip(dim + 1).product();
    let outer: usize = shape.dims().iter().take(dim).product();
    (Tiles::new(outer * inner, TILE_ELEMENTS / size.max(1)), size, inner)
}

pub(super) fn running_tiles(job: &Job<'_>, dim: usize) -> usize {
    chains(job, dim).0.count
}

/// Chains of one tile, each added up in order.
pub(super) fn running_tile(job: &Job<'_>, dim: usize, reverse: bool, tile: usize) {
    let (grid, size, inner) = chains(job, dim);
    let (x, out) = (job.input(0).ptr::<f32>(), job.out::<f32>());
    for chain in grid.range(tile) {
        let start = chain / inner * size * inner + chain % inner;
        let mut sum = 0.0;
        for step in 0..size {
            let i = if reverse { size - 1 - step } else { step };
            let at = start + i * inner;
            // SAFETY: the chain's elements are inside of the dense operand and result, and this
            // tile's.
            unsafe {
                sum += *x.add(at);
                *out.add(at) = sum;
            }
        }
    }
}
