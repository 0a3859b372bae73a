//! Recurrences over packed sequences: short convolution, selective scan, gated delta rule.
//!
//! A sequence's tokens are taken in order by one tile, which holds the part of the state that it
//! advances in scratch memory: 16 columns of it for the delta rule, 16 channels for the scan. So that
//! a tile is short each round takes some tokens, and goes on from the states that the one before it
//! left. Backward passes go through the tokens twice: first forward, keeping the state at the start
//! of every segment; then segment by segment from the last, recomputing the states of one and
//! descending through it. A recomputed state has the bits of the forward pass, and no decay is ever
//! divided by. Rows of no sequence have a tile of their own, the last of the first round, which
//! writes their zeros.

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

/// As many as take a backward pass some 0.3 ms, and a forward pass a fifth of it.
const QUICK: usize = 1 << 17;

/// As many as a segment has; in unit tests so few that small cases have several segments, and several
/// rounds.
const SEGMENT: usize = if cfg!(test) { 1 << 9 } else { QUICK };

/// Segments that a round goes through forward, and backward.
const SEGMENTS: [usize; 2] = [8, 4];

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

/// How many rounds the tiles are run in: each takes some tokens of every sequence.
pub(super) fn rounds(job: &Job<'_>) -> usize {
    match job.op {
        Op::SsmScan => scan::walk(job).rounds_forward(),
        Op::SsmScanBack { .. } => scan::walk(job).rounds(),
        Op::GatedDeltaRule(attrs) => delta::walk(job, attrs).rounds_forward(),
        Op::GatedDeltaRuleBack(attrs) => delta::walk(job, attrs).rounds(),
        _ => 1,
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
    /// Those that an op gives, `[S, H, rows, columns]` without gaps.
    fn dense(ptr: *const f32, heads: usize, rows: usize, columns: usize) -> States {
        States { ptr, strides: [heads * rows * columns, rows * columns, columns] }
    }

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

/// How a recurrence goes through its tokens, in rounds of some segments of each sequence.
#[derive(Copy, Clone)]
struct Walk {
    /// Tokens of a segment; of a sequence, so that its bits are those it has alone.
    length: usize,
    /// Segments of all rows, were they one sequence; at least 1.
    count: usize,
}

impl Walk {
    /// Through so many rows, with so many elements of a state at once.
    fn new(rows: usize, elements: usize) -> Walk {
        Walk::in_segments(rows, elements, SEGMENT)
    }

    fn in_segments(rows: usize, elements: usize, segment: usize) -> Walk {
        let length = (segment / elements.max(1)).max(1);
        Walk { length, count: rows.div_ceil(length).max(1) }
    }

    /// The most tokens of a segment that there are.
    fn longest(self, rows: usize) -> usize {
        self.length.min(rows.max(1))
    }

    /// Rounds of a forward pass.
    fn rounds_forward(self) -> usize {
        self.count.div_ceil(SEGMENTS[0])
    }

    /// Rounds of a backward pass that find the states at which segments start: what comes before the
    /// last of them.
    fn rounds_before(self) -> usize {
        (self.count - 1).div_ceil(SEGMENTS[0])
    }

    /// Rounds of a backward pass.
    fn rounds(self) -> usize {
        self.rounds_before() + self.count.div_ceil(SEGMENTS[1])
    }

    /// The tokens of a sequence that a round of a forward pass takes.
    fn tokens(self, round: usize, sequence: Sequence) -> Range<usize> {
        let in_round = SEGMENTS[0] * self.length;
        let end = ((round + 1) * in_round).min(sequence.rows);
        (round * in_round).min(end)..end
    }

    /// The tokens after which, in a round of a backward pass before it descends, the next segment
    /// starts or goes on.
    fn tokens_before(self, round: usize, sequence: Sequence) -> Range<usize> {
        let all = self.tokens(round, sequence);
        let last = sequence.rows.div_ceil(self.length).saturating_sub(1) * self.length;
        all.start.min(last)..all.end.min(last)
    }

    /// The segments of a sequence that a round of a backward pass descends through, if it is the
    /// sequence's turn, and whether the last is the sequence's: one that has none passes its state on
    /// in the last round.
    fn segments(self, round: usize, sequence: Sequence) -> Option<(Range<usize>, bool)> {
        let (all, in_round) = (sequence.rows.div_ceil(self.length), SEGMENTS[1]);
        let start = (self.rounds() - 1 - round) * in_round;
        let end = (start + in_round).min(all);
        (start < end || all == 0 && start == 0).then_some((start..end, end == all))
    }

    /// States that a backward pass keeps: one for every segment but the first of a sequence.
    fn kept(self) -> usize {
        self.count - 1
    }

    /// Which of them is that of a sequence's segment: a segment and more lies between any two rows at
    /// which one starts that is not the first.
    fn slot(self, sequence: Sequence, segment: usize) -> usize {
        ((sequence.first + segment * self.length) / self.length).saturating_sub(1)
    }
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
