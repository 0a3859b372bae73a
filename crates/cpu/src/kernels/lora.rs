//! Low-rank adapters on rows that choose their own, and on experts that rows choose.
//!
//! What is adapted is a pair: a row of [`Op::Lora`], or a row and one of the experts it chose of
//! [`Op::LoraExperts`], which has a pair of matrices for each. Each pair stands alone. `A x` takes
//! 16 lanes over `K` and one tree per rank, since rows of `A` lie along `K`; what goes through `B`
//! is a chain over ranks with lanes over outputs, and `B^T dy` a chain over outputs with lanes over
//! ranks. Gradients of `A` and `B` are chains over pairs, ascending.

use std::ops::Range;

use graph::{Call, DType, LoraOperand, Op, Shape};

use super::{Support, Tiles, arg, column_tiles, dense, dense_last, needs, rows};
use crate::job::{Input, Job, Scratch, padded};
use crate::simd::{LANES, Simd, Task};

#[cfg(test)]
mod tests;

/// Pairs of a tile, and pairs whose projections are computed at once.
const BLOCK: usize = 64;

/// Pairs or ranks that one pass accumulates in registers.
const GROUP: usize = 4;

/// Vectors of columns that one pass accumulates in registers.
const WIDE: usize = 4;

/// Columns of `B` transposed that a pass over pairs reads.
const STRIP: usize = 256;

/// Multiplications of a tile that should not be exceeded: about a millisecond.
const TILE_WORK: usize = 1 << 24;

/// Below so many pairs, tiles split the outputs instead of the pairs.
const FEW: usize = 16;

/// Outputs of a tile when there are few pairs.
const FEW_OUTPUTS: usize = 512;

/// Where a slot's operands are, those of one expert.
#[derive(Copy, Clone)]
struct Slot {
    /// `[r, K]`
    a: *const f32,
    /// `[N, r]`
    b: *const f32,
    scale: f32,
    rank: usize,
}

/// `x` and `base` as rows; the rest dense.
pub(super) fn supports_forward(call: &Call<'_>) -> Support {
    let first = at(call.op).first;
    for i in 0..2 {
        pairs_of(call, i)?;
    }
    for i in 2..first {
        dense(call, i, DType::I32)?;
    }
    supports_slots(call, first)
}

pub(super) fn supports_back(call: &Call<'_>, wrt: LoraOperand) -> Support {
    let At { rows, first, .. } = at(call.op);
    for i in 0..rows {
        pairs_of(call, i)?;
    }
    for i in rows..first {
        dense(call, i, DType::I32)?;
    }
    if wrt == LoraOperand::X {
        return supports_slots(call, first);
    }
    if matches!(call.op, Op::LoraExpertsBack { .. }) {
        dense(call, first, DType::F32)?;
        dense(call, first + 1, DType::F32)?;
    }
    // What lies between A and B for a block; and for B, sums with lanes over outputs.
    let (left, right) = matrix(call.out.shape);
    let rank = if wrt == LoraOperand::A { left } else { right };
    let columns = sum_tiles(call.op, left, arg(call, 0)?.shape.dim(0), rank);
    let sums = if wrt == LoraOperand::B { columns.per_tile * rank } else { 0 };
    Ok(needs(&[BLOCK * padded(rank), sums]))
}

/// Operand `i` as the vectors of pairs.
fn pairs_of(call: &Call<'_>, i: usize) -> Result<(), graph::Unsupported> {
    match call.op {
        Op::LoraExperts { .. } | Op::LoraExpertsBack { .. } => dense_last(call, i)?,
        _ => rows(call, i)?,
    };
    Ok(())
}

/// Scratch: the projections of a block of pairs, and a strip of `B` transposed.
fn supports_slots(call: &Call<'_>, first: usize) -> Support {
    let mut rank = 0;
    for i in first..call.args.len() {
        let arg = dense(call, i, DType::F32)?;
        if (i - first).is_multiple_of(3) {
            rank = rank.max(matrix(arg.shape).0);
        }
    }
    Ok(needs(&[BLOCK * padded(rank), padded(rank) * STRIP]))
}

/// The last two dimensions.
fn matrix(shape: Shape) -> (usize, usize) {
    (shape.dim(shape.rank().saturating_sub(2)), shape.cols())
}

/// Where the operands of an op are.
struct At {
    /// The slot of each row.
    rows: usize,
    /// The experts each row chose.
    ids: Option<usize>,
    /// The first of the slots' operands, or of the one slot that a gradient is of.
    first: usize,
}

fn at(op: &Op) -> At {
    let (rows, experts) = match op {
        Op::LoraBack { wrt: LoraOperand::X, .. } => (1, false),
        Op::LoraExpertsBack { wrt: LoraOperand::X, .. } => (1, true),
        Op::LoraExperts { .. } | Op::LoraExpertsBack { .. } => (2, true),
        _ => (2, false),
    };
    At { rows, ids: experts.then_some(rows + 1), first: rows + 1 + usize::from(experts) }
}

/// Which matrices each pair uses.
#[derive(Copy, Clone)]
struct Chosen<'a> {
    /// The slot of each row; negative where it has none.
    slots: &'a [i32],
    /// The expert of each pair.
    ids: Option<&'a [i32]>,
    /// Pairs of a row.
    used: usize,
}

impl<'a> Chosen<'a> {
    fn new(job: &Job<'a>) -> Chosen<'a> {
        let At { rows, ids, .. } = at(job.op);
        let ids = ids.map(|i| job.input(i));
        let used = ids.map_or(1, |ids| ids.arg.shape.cols());
        Chosen { slots: job.input(rows).ints(), ids: ids.map(|ids| ids.ints()), used }
    }

    fn pairs(self) -> usize {
        self.slots.len() * self.used
    }

    #[inline(always)]
    fn slot(self, pair: usize) -> Option<usize> {
        let row = if self.used == 1 { pair } else { pair / self.used };
        usize::try_from(self.slots[row]).ok()
    }

    #[inline(always)]
    fn expert(self, pair: usize) -> usize {
        self.ids.map_or(0, |ids| ids[pair] as usize)
    }
}

/// Faults where a row's slot is none of the operands', or an expert is none of the slots'.
pub(super) fn check(job: &Job<'_>, slots: usize) -> Result<(), String> {
    let At { rows, ids, first } = at(job.op);
    for (row, &slot) in job.input(rows).ints().iter().enumerate() {
        if usize::try_from(slot).is_ok_and(|slot| slot >= slots) {
            return Err(format!("adapter slot {slot} of row {row} is not below {slots}"));
        }
    }
    let Some(ids) = ids else { return Ok(()) };
    let experts = job.input(first).arg.shape.dim(0);
    for (i, &id) in job.input(ids).ints().iter().enumerate() {
        if usize::try_from(id).is_ok_and(|id| id < experts) {
            continue;
        }
        return Err(format!("expert {id} (entry {i}) is not in 0..{experts}"));
    }
    Ok(())
}

/// Tiles of pairs, or of experts, and of outputs.
struct Grid {
    /// Of pairs; of experts where every tile takes the pairs of one.
    outer: Tiles,
    by_expert: bool,
    columns: Tiles,
}

fn grid(job: &Job<'_>) -> Grid {
    let shape = job.out.shape;
    let experts = |i: usize| job.input(i).arg.shape.dim(0);
    let At { ids, first, .. } = at(job.op);
    if let Op::LoraBack { wrt: wrt @ (LoraOperand::A | LoraOperand::B), .. }
    | Op::LoraExpertsBack { wrt: wrt @ (LoraOperand::A | LoraOperand::B), .. } = job.op
    {
        // All pairs of an expert in each tile: A `[r, K]` splits K, B `[N, r]` splits N.
        let (left, right) = matrix(shape);
        let (rank, across) = if *wrt == LoraOperand::A { (left, right) } else { (right, left) };
        let count = if ids.is_some() { shape.dim(0) } else { 1 };
        let outer = Tiles::new(count, 1);
        let columns = sum_tiles(job.op, across, job.input(0).arg.shape.dim(0), rank);
        return Grid { outer, by_expert: ids.is_some(), columns };
    }
    let (pairs, columns) = (shape.rows(), shape.cols());
    // Where pairs are few, hardly two of them share an expert.
    if ids.is_some() && pairs >= 2 * experts(first) {
        let inner = matrix(job.input(0).arg.shape).1;
        let columns = Tiles::new(columns, FEW_OUTPUTS.max(inner));
        return Grid { outer: Tiles::new(experts(first), 1), by_expert: true, columns };
    }
    let width = if pairs <= FEW { FEW_OUTPUTS } else { columns };
    // Both products of a pair.
    let both = columns.saturating_add(job.input(0).arg.shape.cols());
    let work = highest_rank(job, first).saturating_mul(both);
    let block = (TILE_WORK / work.max(1) / GROUP * GROUP).clamp(2 * GROUP, BLOCK);
    let outer = Tiles::new(pairs, block);
    Grid { outer, by_expert: false, columns: Tiles::new(columns, width) }
}

/// Columns or outputs of a tile that sums over the pairs of so many rows. Those of [`Op::Lora`]
/// are all of one matrix, so their number bounds the columns.
fn sum_tiles(op: &Op, across: usize, rows: usize, rank: usize) -> Tiles {
    const PASS: usize = WIDE * LANES;
    let Op::LoraBack { .. } = op else { return column_tiles(across) };
    let most = TILE_WORK / rows.saturating_mul(rank).max(1) / PASS * PASS;
    let half = across.div_ceil(2).next_multiple_of(PASS);
    Tiles::new(across, most.min(half).clamp(PASS, 8 * PASS))
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    let grid = grid(job);
    grid.outer.count * grid.columns.count
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, scratch: Scratch<'_>) {
    let grid = grid(job);
    let columns = grid.columns.range(tile % grid.columns.count);
    let (outer, chosen) = (tile / grid.columns.count, Chosen::new(job));
    let walk = |slot| match grid.by_expert {
        true => Walk { range: 0..chosen.pairs(), slot, expert: Some(outer) },
        false if slot.is_some() => Walk { range: 0..chosen.pairs(), slot, expert: None },
        false => Walk { range: grid.outer.range(outer), slot, expert: None },
    };
    match *job.op {
        Op::Lora { .. } | Op::LoraExperts { .. } => {
            job.isa.run(Forward { job, chosen, walk: walk(None), columns, scratch });
        }
        Op::LoraBack { wrt, slot, .. } | Op::LoraExpertsBack { wrt, slot, .. } => match wrt {
            LoraOperand::X => {
                job.isa.run(BackX { job, chosen, walk: walk(None), columns, scratch });
            }
            LoraOperand::A => {
                let walk = walk(Some(slot));
                job.isa.run(BackA { job, chosen, walk, expert: outer, columns, scratch });
            }
            LoraOperand::B => {
                let walk = walk(Some(slot));
                job.isa.run(BackB { job, chosen, walk, expert: outer, columns, scratch });
            }
        },
        _ => {}
    }
}

/// The pairs of a tile, a block of them at a time, ascending.
struct Walk {
    /// What is left.
    range: Range<usize>,
    /// Only those of a slot.
    slot: Option<usize>,
    /// Only those of an expert.
    expert: Option<usize>,
}

impl Walk {
    /// How many pairs come next, and which; none at the end.
    #[inline(always)]
    fn next(&mut self, chosen: Chosen<'_>) -> (usize, [usize; BLOCK]) {
        let (mut count, mut list) = (0, [0; BLOCK]);
        while count < BLOCK && self.range.start < self.range.end {
            let pair = self.range.start;
            self.range.start += 1;
            let of_slot = self.slot.is_none() || self.slot == chosen.slot(pair);
            if of_slot && self.expert.is_none_or(|expert| expert == chosen.expert(pair)) {
                list[count] = pair;
                count += 1;
            }
        }
        (count, list)
    }
}

/// Takes the pairs that use the matrices of the first of a list, which are then no more in it.
#[inline(always)]
fn take_group(
    chosen: Chosen<'_>,
    list: &mut [usize; BLOCK],
    count: &mut usize,
) -> (Option<usize>, usize, usize, [usize; BLOCK]) {
    let (slot, expert) = (chosen.slot(list[0]), chosen.expert(list[0]));
    let (mut taken, mut group, mut kept) = (0, [0; BLOCK], 0);
    for i in 0..*count {
        let pair = list[i];
        if chosen.slot(pair) == slot && chosen.expert(pair) == expert {
            group[taken] = pair;
            taken += 1;
        } else {
            list[kept] = pair;
            kept += 1;
        }
    }
    *count = kept;
    (slot, expert, taken, group)
}

/// The vectors of pairs: rows, or each row's own for its choices, or one for all of them.
#[derive(Copy, Clone)]
struct Pairs {
    ptr: *const f32,
    row: usize,
    choice: usize,
    used: usize,
}

impl Pairs {
    fn new(input: Input<'_>, used: usize) -> Pairs {
        let (arg, ptr) = (input.arg, input.ptr());
        if arg.shape.rank() == 2 {
            return Pairs { ptr, row: arg.row_stride().unwrap_or(0), choice: 0, used };
        }
        let choice = if arg.shape.dim(1) == 1 { 0 } else { input.stride(1) };
        Pairs { ptr, row: input.stride(0), choice, used }
    }

    /// The first element of a pair's vector.
    #[inline(always)]
    fn row(self, pair: usize) -> *const f32 {
        let (row, choice) = match self.used {
            1 => (pair, 0),
            used => (pair / used, pair % used),
        };
        self.ptr.wrapping_add(row * self.row + choice * self.choice)
    }
}

/// The operands of slot `slot`, of which there are three from input `first` on.
#[inline(always)]
fn slot_of(job: &Job<'_>, first: usize, slot: usize, expert: usize) -> Slot {
    let (a, b) = (job.input(first + 3 * slot), job.input(first + 3 * slot + 1));
    let scale = job.input(first + 3 * slot + 2).ptr::<f32>();
    // SAFETY: the scale is a dense f32 operand of one element.
    let scale = unsafe { *scale };
    let ((rank, k), (n, _)) = (matrix(a.arg.shape), matrix(b.arg.shape));
    let a = a.ptr::<f32>().wrapping_add(expert * rank * k);
    let b = b.ptr::<f32>().wrapping_add(expert * n * rank);
    Slot { a, b, scale, rank }
}

/// `to[i][j] = scale * a_j . x_i` for some rows, `padded(rank)` apart.
///
/// # Safety
/// Rows of x and of `a` must have `k` elements, `to` room for all rows.
#[inline(always)]
unsafe fn project<S: Simd>(
    s: S,
    (x, rows): (Pairs, &[usize]),
    (a, k, rank): (*const f32, usize, usize),
    scale: f32,
    to: &mut [f32],
) {
    for (group, to) in rows.chunks(GROUP).zip(to.chunks_mut(GROUP * padded(rank))) {
        for j in (0..rank).step_by(GROUP) {
            let n = GROUP.min(rank - j);
            // SAFETY: the caller's; beyond the last rank, its row is read again.
            unsafe {
                let a: [_; GROUP] = std::array::from_fn(|i| a.add((j + i.min(n - 1)) * k));
                let mut sums = [[s.zero(); GROUP]; GROUP];
                if group.len() == 1 {
                    let x = [x.row(group[0])];
                    let mut one = [[s.zero(); GROUP]; 1];
                    dots(s, x, a, k, &mut one);
                    sums[0] = one[0];
                } else {
                    let x = std::array::from_fn(|i| x.row(group[i.min(group.len() - 1)]));
                    dots(s, x, a, k, &mut sums);
                }
                for (i, sums) in sums.iter().enumerate().take(group.len()) {
                    for (l, &sum) in sums.iter().enumerate().take(n) {
                        to[i * padded(rank) + j + l] = scale * s.reduce_sum(sum);
                    }
                }
            }
        }
    }
}

/// Adds up products of rows of `x` and of `a`, element `i` in lane `i % 16`.
///
/// # Safety
/// All rows must have `k` elements.
#[inline(always)]
unsafe fn dots<S: Simd, const X: usize>(
    s: S,
    x: [*const f32; X],
    a: [*const f32; GROUP],
    k: usize,
    sums: &mut [[S::F32; GROUP]; X],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut i = 0;
        while i + LANES <= k {
            let a = [
                s.load(a[0].add(i)),
                s.load(a[1].add(i)),
                s.load(a[2].add(i)),
                s.load(a[3].add(i)),
            ];
            for (x, sums) in x.iter().zip(sums.iter_mut()) {
                let x = s.load(x.add(i));
                for (sum, &a) in sums.iter_mut().zip(&a) {
                    *sum = s.fma(a, x, *sum);
                }
            }
            i += LANES;
        }
        if i < k {
            for (x, sums) in x.iter().zip(sums.iter_mut()) {
                let x = s.load_first(x.add(i), k - i);
                for (sum, a) in sums.iter_mut().zip(&a) {
                    *sum = s.fma(s.load_first(a.add(i), k - i), x, *sum);
                }
            }
        }
    }
}

/// `to[i][j] = scale * sum over n of b[n][j] dy_i[n]` for some rows, `padded(rank)` apart.
///
/// # Safety
/// Rows of dy must have `n` elements, `b` must be `[n, rank]`, `to` must have room.
#[inline(always)]
unsafe fn project_back<S: Simd>(
    s: S,
    (dy, rows): (Pairs, &[usize]),
    (b, n, rank): (*const f32, usize, usize),
    scale: f32,
    to: &mut [f32],
) {
    const ROWS: usize = 8;
    let scale = s.splat(scale);
    for (group, to) in rows.chunks(ROWS).zip(to.chunks_mut(ROWS * padded(rank))) {
        let dy: [_; ROWS] = std::array::from_fn(|i| dy.row(group[i.min(group.len() - 1)]));
        for j in (0..rank).step_by(LANES) {
            let mut sums = [s.zero(); ROWS];
            for i in 0..n {
                // SAFETY: the caller's.
                unsafe {
                    let b = s.load_first(b.add(i * rank + j), rank - j);
                    for (sum, dy) in sums.iter_mut().zip(&dy) {
                        *sum = s.fma(b, s.splat(*dy.add(i)), *sum);
                    }
                }
            }
            for (i, &sum) in sums.iter().enumerate().take(group.len()) {
                let to = &mut to[i * padded(rank) + j..][..LANES];
                // SAFETY: a slice of 16 elements.
                unsafe { s.store(to.as_mut_ptr(), s.mul(scale, sum)) };
            }
        }
    }
}

/// The greatest rank of the slots whose operands begin at `first`.
#[inline(always)]
fn highest_rank(job: &Job<'_>, first: usize) -> usize {
    let slots = (job.inputs.len() - first) / 3;
    let mut rank = 0;
    for slot in 0..slots {
        rank = rank.max(matrix(job.input(first + 3 * slot).arg.shape).0);
    }
    rank
}

/// `base + B (scale A x)`
struct Forward<'a> {
    job: &'a Job<'a>,
    chosen: Chosen<'a>,
    walk: Walk,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (job, chosen, first) = (self.job, self.chosen, at(self.job.op).first);
        let x = Pairs::new(job.input(0), chosen.used);
        let base = Pairs::new(job.input(1), chosen.used);
        let k = job.input(0).arg.shape.cols();
        let columns = &self.columns;
        let rank = highest_rank(job, first);
        let projected = self.scratch.take(BLOCK * padded(rank));
        let transposed = self.scratch.take(padded(rank) * STRIP);
        loop {
            let (mut left, mut list) = self.walk.next(chosen);
            if left == 0 {
                break;
            }
            while left > 0 {
                let (slot, expert, taken, pairs) = take_group(chosen, &mut list, &mut left);
                let pairs = &pairs[..taken];
                let Some(slot) = slot else {
                    for &pair in pairs {
                        let to = job.out_row::<f32>(pair).wrapping_add(columns.start);
                        let from = base.row(pair).wrapping_add(columns.start);
                        // SAFETY: these columns of this pair are the tile's, base has the same.
                        unsafe { std::ptr::copy_nonoverlapping(from, to, columns.len()) };
                    }
                    continue;
                };
                let Slot { a, b, scale, rank } = slot_of(job, first, slot, expert);
                // SAFETY: the shapes of the operands, as the op's rule has them.
                unsafe { project(s, (x, pairs), (a, k, rank), scale, projected) };
                for start in columns.clone().step_by(STRIP) {
                    let width = (columns.end - start).min(STRIP);
                    for n in (0..width).step_by(LANES) {
                        let m = (width - n).min(LANES);
                        let from = b.wrapping_add((start + n) * rank);
                        // SAFETY: rows `start + n ..` of B exist, `m` of them.
                        unsafe { transpose_rows(s, from, m, rank, &mut transposed[n..]) };
                    }
                    for (&pair, h) in pairs.iter().zip(projected.chunks(padded(rank))) {
                        let from = base.row(pair).wrapping_add(start);
                        let to = job.out_row::<f32>(pair).wrapping_add(start);
                        let terms = Terms { c: h, rows: transposed.as_ptr(), stride: STRIP, rank };
                        // SAFETY: these columns of this pair are the tile's; base has the same;
                        // `transposed` holds `rank` rows of them.
                        unsafe { add_terms(s, Some(from), to, terms, width) };
                    }
                }
            }
        }
    }
}

/// A sum of `rank` rows, `stride` elements apart, with coefficients.
#[derive(Copy, Clone)]
struct Terms<'a> {
    c: &'a [f32],
    rows: *const f32,
    stride: usize,
    rank: usize,
}

/// `to = from + sum over j of c_j row_j`, ranks ascending; `from` is zeros when absent.
///
/// # Safety
/// All rows must have `width` elements.
#[inline(always)]
unsafe fn add_terms<S: Simd>(
    s: S,
    from: Option<*const f32>,
    to: *mut f32,
    terms: Terms<'_>,
    width: usize,
) {
    let mut w = 0;
    // SAFETY: the caller's.
    unsafe {
        while w + WIDE * LANES <= width {
            let mut sums = [s.zero(); WIDE];
            if let Some(from) = from {
                for i in 0..WIDE {
                    sums[i] = s.load(from.add(w + i * LANES));
                }
            }
            for j in 0..terms.rank {
                let c = s.splat(terms.c[j]);
                let row = terms.rows.add(j * terms.stride + w);
                for i in 0..WIDE {
                    sums[i] = s.fma(s.load(row.add(i * LANES)), c, sums[i]);
                }
            }
            for i in 0..WIDE {
                s.store(to.add(w + i * LANES), sums[i]);
            }
            w += WIDE * LANES;
        }
        while w < width {
            let n = width - w;
            let mut sum = match from {
                Some(from) => s.load_first(from.add(w), n),
                None => s.zero(),
            };
            for j in 0..terms.rank {
                let row = terms.rows.add(j * terms.stride + w);
                sum = s.fma(s.load_first(row, n), s.splat(terms.c[j]), sum);
            }
            s.store_first(to.add(w), sum, n);
            w += LANES;
        }
    }
}

/// Vector `j`, at `to[STRIP j ..]`, becomes element `j` of `m <= 16` rows of `width` elements.
///
/// # Safety
/// `from` must be valid for `m` rows.
#[inline(always)]
unsafe fn transpose_rows<S: Simd>(s: S, from: *const f32, m: usize, width: usize, to: &mut [f32]) {
    for j in (0..width).step_by(LANES) {
        let mut block = [s.zero(); LANES];
        for (i, v) in block.iter_mut().enumerate().take(m) {
            // SAFETY: the caller's.
            *v = unsafe { s.load_first(from.add(i * width + j), width - j) };
        }
        s.transpose(&mut block);
        for (i, v) in block.iter().enumerate().take(width - j) {
            let to = &mut to[(j + i) * STRIP..][..LANES];
            // SAFETY: a slice of 16 elements.
            unsafe { s.store(to.as_mut_ptr(), *v) };
        }
    }
}

/// `A^T (scale B^T dy)`
struct BackX<'a> {
    job: &'a Job<'a>,
    chosen: Chosen<'a>,
    walk: Walk,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for BackX<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (job, chosen, first) = (self.job, self.chosen, at(self.job.op).first);
        let dy = Pairs::new(job.input(0), chosen.used);
        let (n, k) = (job.input(0).arg.shape.cols(), job.out.shape.cols());
        let columns = &self.columns;
        let rank = highest_rank(job, first);
        let projected = self.scratch.take(BLOCK * padded(rank));
        loop {
            let (mut left, mut list) = self.walk.next(chosen);
            if left == 0 {
                break;
            }
            while left > 0 {
                let (slot, expert, taken, pairs) = take_group(chosen, &mut list, &mut left);
                let pairs = &pairs[..taken];
                let Some(slot) = slot else {
                    for &pair in pairs {
                        let to = job.out_row::<f32>(pair).wrapping_add(columns.start);
                        // SAFETY: these columns of this pair are the tile's.
                        unsafe { std::slice::from_raw_parts_mut(to, columns.len()) }.fill(0.0);
                    }
                    continue;
                };
                let Slot { a, b, scale, rank } = slot_of(job, first, slot, expert);
                // SAFETY: the shapes of the operands, as the op's rule has them.
                unsafe { project_back(s, (dy, pairs), (b, n, rank), scale, projected) };
                for (&pair, g) in pairs.iter().zip(projected.chunks(padded(rank))) {
                    let to = job.out_row::<f32>(pair).wrapping_add(columns.start);
                    let rows = a.wrapping_add(columns.start);
                    let terms = Terms { c: g, rows, stride: k, rank };
                    // SAFETY: A is `[rank, k]`; these columns of this pair are the tile's.
                    unsafe { add_terms(s, None, to, terms, columns.len()) };
                }
            }
        }
    }
}

/// `B` (for the gradient of `A`) or `A` of an expert, and the scale.
#[inline(always)]
fn other_of(job: &Job<'_>, first: usize, expert: usize) -> (*const f32, f32) {
    let other = job.input(first);
    let (rows, cols) = matrix(other.arg.shape);
    // SAFETY: a dense f32 operand of one element.
    let scale = unsafe { *job.input(first + 1).ptr::<f32>() };
    (other.ptr::<f32>().wrapping_add(expert * rows * cols), scale)
}

/// Copies vectors of `width` elements, `padded(width)` apart: what lies between A and B is an
/// operand of the gradients of [`Op::Lora`], whose tiles would all compute it.
///
/// # Safety
/// The vectors must have so many elements.
#[inline(always)]
unsafe fn gather(x: Pairs, pairs: &[usize], width: usize, to: &mut [f32]) {
    for (to, &pair) in to.chunks_mut(padded(width)).zip(pairs) {
        // SAFETY: the caller's.
        to[..width].copy_from_slice(unsafe { std::slice::from_raw_parts(x.row(pair), width) });
    }
}

/// `sum over pairs of (scale B^T dy) x^T`, `[r, K]`
struct BackA<'a> {
    job: &'a Job<'a>,
    chosen: Chosen<'a>,
    walk: Walk,
    expert: usize,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for BackA<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (job, chosen) = (self.job, self.chosen);
        let x = Pairs::new(job.input(0), chosen.used);
        let dy = Pairs::new(job.input(1), chosen.used);
        let given = matches!(job.op, Op::LoraBack { .. });
        let (rank, n) = (matrix(job.out.shape).0, job.input(1).arg.shape.cols());
        let columns = &self.columns;
        // Row `j` of the expert's part of the result.
        let out_row = job.out_row::<f32>(self.expert * rank).wrapping_add(columns.start);
        let k = job.out.shape.cols();
        for j in 0..rank {
            let to = out_row.wrapping_add(j * k);
            // SAFETY: these columns of the result are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, columns.len()) }.fill(0.0);
        }
        let projected = self.scratch.take(BLOCK * padded(rank));
        loop {
            let (count, pairs) = self.walk.next(chosen);
            if count == 0 {
                break;
            }
            let pairs = &pairs[..count];
            if given {
                // SAFETY: dy is what lies between A and B, with `rank` elements.
                unsafe { gather(dy, pairs, rank, projected) };
            } else {
                let (b, scale) = other_of(job, at(job.op).first, self.expert);
                // SAFETY: the shapes of the operands, as the op's rule has them.
                unsafe { project_back(s, (dy, pairs), (b, n, rank), scale, projected) };
            }
            for j in (0..rank).step_by(GROUP) {
                let mut to = [std::ptr::null_mut(); GROUP];
                let ranks = GROUP.min(rank - j);
                for l in 0..ranks {
                    to[l] = out_row.wrapping_add((j + l) * k);
                }
                let g = (&*projected, padded(rank), j);
                // SAFETY: these columns of the result are the tile's; vectors of x have them.
                unsafe { outer(s, &to[..ranks], g, (x, pairs), columns.clone()) };
            }
        }
    }
}

/// `to_l[i] += sum over rows of c[row][l] x_row[i]` for up to [`GROUP`] results and a range of
/// columns, rows ascending.
///
/// # Safety
/// Rows of x must have the columns, `to` as many as the range. `c` holds a value for each row,
/// `stride` apart, from `first` on.
#[inline(always)]
unsafe fn outer<S: Simd>(
    s: S,
    to: &[*mut f32],
    (c, stride, first): (&[f32], usize, usize),
    (x, rows): (Pairs, &[usize]),
    columns: Range<usize>,
) {
    let width = columns.len();
    let mut all = [to[0]; GROUP];
    all[..to.len()].copy_from_slice(to);
    let mut w = 0;
    // SAFETY: the caller's. Results beyond the last are computed and not stored.
    unsafe {
        while w + WIDE * LANES <= width {
            let mut sums = [[s.zero(); WIDE]; GROUP];
            for l in 0..GROUP {
                for i in 0..WIDE {
                    sums[l][i] = s.load(all[l].add(w + i * LANES));
                }
            }
            for (r, row) in rows.iter().enumerate() {
                let x = x.row(*row).add(columns.start + w);
                let c = &c[r * stride + first..][..GROUP];
                let mut v = [s.zero(); WIDE];
                for i in 0..WIDE {
                    v[i] = s.load(x.add(i * LANES));
                }
                for l in 0..GROUP {
                    let c = s.splat(c[l]);
                    for i in 0..WIDE {
                        sums[l][i] = s.fma(v[i], c, sums[l][i]);
                    }
                }
            }
            for l in 0..to.len() {
                for i in 0..WIDE {
                    s.store(all[l].add(w + i * LANES), sums[l][i]);
                }
            }
            w += WIDE * LANES;
        }
        while w < width {
            let n = width - w;
            for l in 0..to.len() {
                let mut sum = s.load_first(all[l].add(w), n);
                for (r, row) in rows.iter().enumerate() {
                    let v = s.load_first(x.row(*row).add(columns.start + w), n);
                    sum = s.fma(v, s.splat(c[r * stride + first + l]), sum);
                }
                s.store_first(all[l].add(w), sum, n);
            }
            w += LANES;
        }
    }
}

/// `sum over pairs of dy (scale A x)^T`, `[N, r]`
struct BackB<'a> {
    job: &'a Job<'a>,
    chosen: Chosen<'a>,
    walk: Walk,
    expert: usize,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for BackB<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (job, chosen) = (self.job, self.chosen);
        let x = Pairs::new(job.input(0), chosen.used);
        let dy = Pairs::new(job.input(1), chosen.used);
        let given = matches!(job.op, Op::LoraBack { .. });
        let (n, rank) = matrix(job.out.shape);
        let k = job.input(0).arg.shape.cols();
        let first_row = self.expert * n + self.columns.start;
        let projected = self.scratch.take(BLOCK * padded(rank));
        // Rank by rank, outputs in lanes; a multiple of 16 apart.
        let width = padded(self.columns.len());
        let sums = self.scratch.take(width * rank);
        sums.fill(0.0);
        loop {
            let (count, pairs) = self.walk.next(chosen);
            if count == 0 {
                break;
            }
            let pairs = &pairs[..count];
            if given {
                // SAFETY: x is what lies between A and B, with `rank` elements.
                unsafe { gather(x, pairs, rank, projected) };
            } else {
                let (a, scale) = other_of(job, at(job.op).first, self.expert);
                // SAFETY: the shapes of the operands, as the op's rule has them.
                unsafe { project(s, (x, pairs), (a, k, rank), scale, projected) };
            }
            for j in (0..rank).step_by(GROUP) {
                let mut to = [std::ptr::null_mut(); GROUP];
                let ranks = GROUP.min(rank - j);
                for l in 0..ranks {
                    to[l] = sums[(j + l) * width..][..width].as_mut_ptr();
                }
                let h = (&*projected, padded(rank), j);
                // SAFETY: vectors of dy have the tile's columns.
                unsafe { outer(s, &to[..ranks], h, (dy, pairs), self.columns.clone()) };
            }
        }
        for i in (0..self.columns.len()).step_by(LANES) {
            let m = (self.columns.len() - i).min(LANES);
            for j in (0..rank).step_by(LANES) {
                let ranks = (rank - j).min(LANES);
                let mut block = [s.zero(); LANES];
                for (l, v) in block.iter_mut().enumerate().take(ranks) {
                    // SAFETY: as above.
                    *v = unsafe { s.load(sums.as_ptr().add((j + l) * width + i)) };
                }
                s.transpose(&mut block);
                for (l, &v) in block.iter().enumerate().take(m) {
                    let to = job.out_row::<f32>(first_row + i + l).wrapping_add(j);
                    // SAFETY: row `first_row + i + l` of the result is the tile's.
                    unsafe { s.store_first(to, v, ranks) };
                }
            }
        }
    }
}
