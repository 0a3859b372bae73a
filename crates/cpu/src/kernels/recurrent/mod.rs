//! Recurrences over packed sequences: short convolution, selective scan, gated delta rule.
//!
//! A sequence's tokens are taken in order by one tile, which holds the part of the state that it
//! advances in scratch memory: 16 columns of it for the delta rule, 16 channels for the scan.
//! Backward tiles go through the tokens twice: once forward, keeping the state at every `C`th
//! token, `C` about the square root of the number of rows; then segment by segment from the
//! last, recomputing the states of one segment and descending through it. A recomputed state has
//! the bits of the forward pass, and no decay is ever divided by. Rows of no sequence have a
//! tile of their own, the last, which writes their zeros.
//!
//! A tile of a backward pass cannot end before its sequence does. It is short because the gradient
//! rules give one op few columns or channels, and because what several tiles add to comes in
//! parts.

mod conv;
mod delta;
mod delta_back;
#[cfg(test)]
mod pieces;
mod scan;
mod scan_back;
#[cfg(test)]
mod tests;

use std::ops::Range;

use graph::{Call, Op};

use super::Support;
use crate::job::{Input, Job, Scratch};
use crate::simd::{LANES, Simd};

/// Elements of a state times tokens that a forward tile advances before it is worth another
/// tile: some tens of microseconds.
const TILE_WORK: usize = 1 << 15;

pub(super) fn supports(call: &Call<'_>) -> Support {
    match call.op {
        Op::SsmScan | Op::SsmScanBack { .. } => scan::supports(call),
        Op::GatedDeltaRule(_) | Op::GatedDeltaRuleBack(_) => delta::supports(call),
        _ => conv::supports(call),
    }
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    match job.op {
        Op::SsmScan => scan::tiles(job),
        Op::SsmScanBack { parts } => scan_back::tiles(job, *parts),
        Op::GatedDeltaRule(_) => delta::tiles(job),
        Op::GatedDeltaRuleBack(_) => delta_back::tiles(job),
        _ => conv::tiles(job),
    }
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, scratch: Scratch<'_>) {
    match job.op {
        Op::SsmScan => scan::run_tile(job, tile, scratch),
        Op::SsmScanBack { parts } => scan_back::run_tile(job, *parts, tile, scratch),
        Op::GatedDeltaRule(attrs) => delta::run_tile(job, attrs, tile, scratch),
        Op::GatedDeltaRuleBack(attrs) => delta_back::run_tile(job, attrs, tile, scratch),
        _ => conv::run_tile(job, tile, scratch),
    }
}

/// Sequences must lie in the rows without overlapping.
pub(super) fn check(job: &Job<'_>) -> Result<(), String> {
    let at = match job.op {
        Op::SsmConvState | Op::SsmConvStateBack { .. } => 2,
        Op::SsmConv | Op::SsmConvBack { .. } => 3,
        _ => 6,
    };
    let (total, mut end, mut ascending) = (job.input(0).arg.shape.dim(0), 0, true);
    let seqs = job.input(at).ints();
    for (i, s) in seqs.chunks_exact(3).enumerate() {
        let [Ok(first), Ok(rows)] = [s[0], s[1]].map(usize::try_from) else {
            return Err(format!("sequence {i} is {s:?}: neither its rows may be negative"));
        };
        if rows == 0 {
            continue;
        }
        if first + rows > total {
            return Err(format!(
                "sequence {i} has rows {first}..{}, there are {total}",
                first + rows
            ));
        }
        ascending &= first >= end;
        end = first + rows;
    }
    if ascending {
        return Ok(());
    }
    let mut all: Vec<Sequence> = sequences(seqs).filter(|s| s.rows > 0).collect();
    all.sort_by_key(|s| s.first);
    for (a, b) in all.iter().zip(all.iter().skip(1)) {
        if a.first + a.rows > b.first {
            return Err(format!("row {} is of sequences {} and {}", b.first, a.index, b.index));
        }
    }
    Ok(())
}

/// Rows `first .. first + rows` of the operands.
#[derive(Copy, Clone)]
struct Sequence {
    /// Its row in `seqs` and in the states.
    index: usize,
    first: usize,
    rows: usize,
}

impl Sequence {
    fn range(&self) -> Range<usize> {
        self.first..self.first + self.rows
    }
}

/// All sequences; their numbers have been checked.
fn sequences(seqs: &[i32]) -> impl Iterator<Item = Sequence> + '_ {
    let entries = seqs.chunks_exact(3).enumerate();
    entries.map(|(index, s)| Sequence { index, first: s[0] as usize, rows: s[1] as usize })
}

/// Sequence `index`.
fn sequence(seqs: &[i32], index: usize) -> Sequence {
    let entry = &seqs[3 * index..3 * index + 3];
    Sequence { index, first: entry[0] as usize, rows: entry[1] as usize }
}

/// Calls `zero` for every run of rows that are of no sequence. One without rows may begin anywhere,
/// also beyond the last.
fn rows_of_none(seqs: &[i32], total: usize, mut zero: impl FnMut(Range<usize>)) {
    let mut row = 0;
    while row < total {
        let holding = sequences(seqs).find(|s| s.range().contains(&row));
        match holding {
            Some(s) => row = s.first + s.rows,
            None => {
                let later = sequences(seqs).filter(|s| s.rows > 0 && s.first > row);
                let next = later.map(|s| s.first).min().unwrap_or(total);
                zero(row..next);
                row = next;
            }
        }
    }
}

/// `[rows, heads, width]` with dense elements, or `[rows, heads]` of any strides.
#[derive(Copy, Clone)]
struct Heads {
    ptr: *const f32,
    row: usize,
    head: usize,
}

impl Heads {
    fn new(input: &Input<'_>) -> Heads {
        Heads { ptr: input.ptr(), row: input.stride(0), head: input.stride(1) }
    }

    #[inline(always)]
    fn at(self, row: usize, head: usize) -> *const f32 {
        self.ptr.wrapping_add(row * self.row + head * self.head)
    }

    /// The one element of a row and a head.
    ///
    /// # Safety
    /// `row` and `head` must be of the operand.
    #[inline(always)]
    unsafe fn get(self, row: usize, head: usize) -> f32 {
        // SAFETY: the caller's.
        unsafe { *self.at(row, head) }
    }
}

/// States of sequences, `[S, H, .., ..]`, with dense elements.
#[derive(Copy, Clone)]
struct States {
    ptr: *const f32,
    strides: [usize; 3],
}

impl States {
    fn new(input: &Input<'_>) -> States {
        States { ptr: input.ptr(), strides: [0, 1, 2].map(|i| input.stride(i)) }
    }

    /// Row `row` of the state of a sequence and a head.
    #[inline(always)]
    fn at(self, sequence: usize, head: usize, row: usize) -> *const f32 {
        let [of_sequence, of_head, of_row] = self.strides;
        self.ptr.wrapping_add(sequence * of_sequence + head * of_head + row * of_row)
    }
}

/// The kept states of a backward pass over up to so many rows: how many tokens apart, and how
/// many; both at least 1.
fn segments(rows: usize) -> (usize, usize) {
    let root = rows.isqrt();
    let length = (root + usize::from(root * root < rows)).max(1);
    (length, rows.div_ceil(length).max(1))
}

/// Sets `n` floats to 0.
///
/// # Safety
/// `to` must be valid for so many writes.
unsafe fn zero(to: *mut f32, n: usize) {
    // SAFETY: the caller's; zero bytes are zeros.
    unsafe { std::ptr::write_bytes(to, 0, n) }
}

/// Adds the first `n` lanes to what is in memory.
///
/// # Safety
/// `to` must be valid for `n` reads and writes.
#[inline(always)]
unsafe fn add_first<S: Simd>(s: S, to: *mut f32, v: S::F32, n: usize) {
    // SAFETY: the caller's.
    unsafe { s.store_first(to, s.add(s.load_first(to, n), v), n) }
}

/// Lane `i` of the result is the sum of the lanes of row `i`, by the tree of
/// [`Simd::reduce_sum`].
#[inline(always)]
fn reduce_rows<S: Simd>(s: S, rows: &mut [S::F32; LANES]) -> S::F32 {
    s.transpose(rows);
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            rows[i] = s.add(rows[i], rows[i + width]);
        }
        width /= 2;
    }
    rows[0]
}

/// The sum of four chains.
#[inline(always)]
fn sum4<S: Simd>(s: S, v: [S::F32; 4]) -> S::F32 {
    s.add(s.add(v[0], v[1]), s.add(v[2], v[3]))
}
