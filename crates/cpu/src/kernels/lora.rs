//! Low-rank adapters on rows that choose their own.
//!
//! Each row stands alone. `A x` takes 16 lanes over `K` and one tree per rank, since rows of `A`
//! lie along `K`; what goes through `B` is a chain over ranks with lanes over outputs, and
//! `B^T dy` a chain over outputs with lanes over ranks. Gradients of `A` and `B` are chains over
//! rows, ascending.

use std::ops::Range;

use graph::{Call, DType, LoraOperand, Op};

use super::{Support, Tiles, column_tiles, dense, needs, rows};
use crate::job::{Job, Rows, Scratch, padded};
use crate::simd::{LANES, Simd, Task};

/// Rows of a tile, and rows whose projections are computed at once.
const BLOCK: usize = 64;

/// Rows or ranks that one pass accumulates in registers.
const GROUP: usize = 4;

/// Vectors of columns that one pass accumulates in registers.
const WIDE: usize = 4;

/// Columns of `B` transposed that a pass over rows reads.
const STRIP: usize = 256;

/// Below so many rows, tiles split the outputs instead of the rows.
const FEW: usize = 16;

/// Outputs of a tile when there are few rows.
const FEW_OUTPUTS: usize = 512;

/// Where a slot's operands are.
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
    rows(call, 0)?;
    rows(call, 1)?;
    dense(call, 2, DType::I32)?;
    supports_slots(call, 3)
}

pub(super) fn supports_back(call: &Call<'_>, wrt: LoraOperand) -> Support {
    rows(call, 0)?;
    if wrt == LoraOperand::X {
        dense(call, 1, DType::I32)?;
        return supports_slots(call, 2);
    }
    rows(call, 1)?;
    dense(call, 2, DType::I32)?;
    dense(call, 3, DType::F32)?;
    dense(call, 4, DType::F32)?;
    // A: B^T dy of a block. B: A x of a block, and sums with lanes over outputs.
    let rank = if wrt == LoraOperand::A { call.out.shape.dim(0) } else { call.out.shape.cols() };
    let sums = match wrt {
        LoraOperand::B => column_tiles(call.out.shape.dim(0)).per_tile * rank,
        _ => 0,
    };
    Ok(needs(&[BLOCK * padded(rank), sums]))
}

/// Scratch: the projections of a block of rows, and a strip of `B` transposed.
fn supports_slots(call: &Call<'_>, first: usize) -> Support {
    let mut rank = 0;
    for i in first..call.args.len() {
        let arg = dense(call, i, DType::F32)?;
        if (i - first).is_multiple_of(3) {
            rank = rank.max(arg.shape.dim(0));
        }
    }
    Ok(needs(&[BLOCK * padded(rank), padded(rank) * STRIP]))
}

/// Faults where a row's slot is none of the operands'.
pub(super) fn check(rows: &[i32], slots: usize) -> Result<(), String> {
    for (row, &slot) in rows.iter().enumerate() {
        if usize::try_from(slot).is_ok_and(|slot| slot >= slots) {
            return Err(format!("adapter slot {slot} of row {row} is not below {slots}"));
        }
    }
    Ok(())
}

/// Tiles of rows and of outputs.
struct Grid {
    rows: Tiles,
    columns: Tiles,
}

fn grid(job: &Job<'_>) -> Grid {
    let shape = job.out.shape;
    if let Op::LoraBack { wrt: wrt @ (LoraOperand::A | LoraOperand::B), .. } = job.op {
        // All rows in each tile: A `[r, K]` splits K, B `[N, r]` splits N.
        let across = if *wrt == LoraOperand::A { shape.cols() } else { shape.dim(0) };
        return Grid { rows: Tiles::new(1, 1), columns: column_tiles(across) };
    }
    let (rows, columns) = (shape.dim(0), shape.cols());
    let width = if rows <= FEW { FEW_OUTPUTS } else { columns };
    Grid { rows: Tiles::new(rows, BLOCK), columns: Tiles::new(columns, width) }
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    let grid = grid(job);
    grid.rows.count * grid.columns.count
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, scratch: Scratch<'_>) {
    let grid = grid(job);
    let columns = grid.columns.range(tile % grid.columns.count);
    match *job.op {
        Op::Lora { .. } => {
            let rows = grid.rows.range(tile / grid.columns.count);
            job.isa.run(Forward { job, rows, columns, scratch });
        }
        Op::LoraBack { wrt: LoraOperand::X, .. } => {
            let rows = grid.rows.range(tile / grid.columns.count);
            job.isa.run(BackX { job, rows, columns, scratch });
        }
        Op::LoraBack { wrt: LoraOperand::A, slot, .. } => {
            job.isa.run(BackA { job, slot, columns, scratch });
        }
        Op::LoraBack { wrt: LoraOperand::B, slot, .. } => {
            job.isa.run(BackB { job, slot, columns, scratch });
        }
        _ => {}
    }
}

/// The operands of slot `slot`, of which there are three from input `first` on.
#[inline(always)]
fn slot_of(job: &Job<'_>, first: usize, slot: usize) -> Slot {
    let (a, b) = (job.input(first + 3 * slot), job.input(first + 3 * slot + 1));
    let scale = job.input(first + 3 * slot + 2).ptr::<f32>();
    // SAFETY: the scale is a dense f32 operand of one element.
    let scale = unsafe { *scale };
    Slot { a: a.ptr(), b: b.ptr(), scale, rank: a.arg.shape.dim(0) }
}

/// The rows of a range that use a slot: how many, and which.
#[inline(always)]
fn members(slots: &[i32], range: Range<usize>, slot: usize) -> (usize, [usize; BLOCK]) {
    let (mut count, mut rows) = (0, [0; BLOCK]);
    for row in range.take(BLOCK) {
        if usize::try_from(slots[row]) == Ok(slot) {
            rows[count] = row;
            count += 1;
        }
    }
    (count, rows)
}

/// `to[i][j] = scale * a_j . x_i` for some rows, `padded(rank)` apart.
///
/// # Safety
/// Rows of x and of `a` must have `k` elements, `to` room for all rows.
#[inline(always)]
unsafe fn project<S: Simd>(
    s: S,
    (x, rows): (Rows<f32>, &[usize]),
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
    (dy, rows): (Rows<f32>, &[usize]),
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

/// `base + B (scale A x)`
struct Forward<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let job = self.job;
        let Op::Lora { slots } = *job.op else { return };
        let (x, base) = (job.input(0).rows::<f32>(), job.input(1).rows::<f32>());
        let chosen = job.input(2).ints();
        let k = job.input(0).arg.shape.cols();
        let columns = &self.columns;
        for row in self.rows.clone().filter(|&row| chosen[row] < 0) {
            let to = job.out_row::<f32>(row).wrapping_add(columns.start);
            let from = base.row(row).wrapping_add(columns.start);
            // SAFETY: these columns of this row are the tile's, and base has the same.
            unsafe { std::ptr::copy_nonoverlapping(from, to, columns.len()) };
        }
        let mut rank = 0;
        for slot in 0..slots {
            rank = rank.max(slot_of(job, 3, slot).rank);
        }
        let projected = self.scratch.take(BLOCK * padded(rank));
        let transposed = self.scratch.take(padded(rank) * STRIP);
        for slot in 0..slots {
            let (count, rows) = members(chosen, self.rows.clone(), slot);
            let rows = &rows[..count];
            if rows.is_empty() {
                continue;
            }
            let Slot { a, b, scale, rank } = slot_of(job, 3, slot);
            // SAFETY: the shapes of the operands, as the op's rule has them.
            unsafe { project(s, (x, rows), (a, k, rank), scale, projected) };
            for start in columns.clone().step_by(STRIP) {
                let width = (columns.end - start).min(STRIP);
                for n in (0..width).step_by(LANES) {
                    let m = (width - n).min(LANES);
                    let from = b.wrapping_add((start + n) * rank);
                    // SAFETY: rows `start + n ..` of B exist, `m` of them.
                    unsafe { transpose_rows(s, from, m, rank, &mut transposed[n..]) };
                }
                for (row, h) in rows.iter().zip(projected.chunks(padded(rank))) {
                    let from = base.row(*row).wrapping_add(start);
                    let to = job.out_row::<f32>(*row).wrapping_add(start);
                    let terms = Terms { c: h, rows: transposed.as_ptr(), stride: STRIP, rank };
                    // SAFETY: these columns of this row are the tile's; base has the same;
                    // `transposed` holds `rank` rows of them.
                    unsafe { add_terms(s, Some(from), to, terms, width) };
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
    rows: Range<usize>,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for BackX<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let job = self.job;
        let Op::LoraBack { slots, .. } = *job.op else { return };
        let dy = job.input(0).rows::<f32>();
        let chosen = job.input(1).ints();
        let (n, k) = (job.input(0).arg.shape.cols(), job.out.shape.cols());
        let columns = &self.columns;
        for row in self.rows.clone().filter(|&row| chosen[row] < 0) {
            let to = job.out_row::<f32>(row).wrapping_add(columns.start);
            // SAFETY: these columns of this row are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, columns.len()) }.fill(0.0);
        }
        let mut rank = 0;
        for slot in 0..slots {
            rank = rank.max(slot_of(job, 2, slot).rank);
        }
        let projected = self.scratch.take(BLOCK * padded(rank));
        for slot in 0..slots {
            let (count, rows) = members(chosen, self.rows.clone(), slot);
            let rows = &rows[..count];
            if rows.is_empty() {
                continue;
            }
            let Slot { a, b, scale, rank } = slot_of(job, 2, slot);
            // SAFETY: the shapes of the operands, as the op's rule has them.
            unsafe { project_back(s, (dy, rows), (b, n, rank), scale, projected) };
            for (row, g) in rows.iter().zip(projected.chunks(padded(rank))) {
                let to = job.out_row::<f32>(*row).wrapping_add(columns.start);
                let rows = a.wrapping_add(columns.start);
                let terms = Terms { c: g, rows, stride: k, rank };
                // SAFETY: A is `[rank, k]`; these columns of this row are the tile's.
                unsafe { add_terms(s, None, to, terms, columns.len()) };
            }
        }
    }
}

/// `sum over rows of (scale B^T dy) x^T`, `[r, K]`
struct BackA<'a> {
    job: &'a Job<'a>,
    slot: usize,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for BackA<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let job = self.job;
        let (x, dy) = (job.input(0).rows::<f32>(), job.input(1).rows::<f32>());
        let chosen = job.input(2).ints();
        let b = job.input(3).ptr::<f32>();
        // SAFETY: a dense f32 operand of one element.
        let scale = unsafe { *job.input(4).ptr::<f32>() };
        let (rank, n) = (job.out.shape.dim(0), job.input(1).arg.shape.cols());
        let columns = &self.columns;
        for j in 0..rank {
            let to = job.out_row::<f32>(j).wrapping_add(columns.start);
            // SAFETY: these columns of the result are the tile's.
            unsafe { std::slice::from_raw_parts_mut(to, columns.len()) }.fill(0.0);
        }
        let projected = self.scratch.take(BLOCK * padded(rank));
        for block in (0..chosen.len()).step_by(BLOCK) {
            let end = (block + BLOCK).min(chosen.len());
            let (count, rows) = members(chosen, block..end, self.slot);
            let rows = &rows[..count];
            if rows.is_empty() {
                continue;
            }
            // SAFETY: the shapes of the operands, as the op's rule has them.
            unsafe { project_back(s, (dy, rows), (b, n, rank), scale, projected) };
            for j in (0..rank).step_by(GROUP) {
                let mut to = [std::ptr::null_mut(); GROUP];
                let ranks = GROUP.min(rank - j);
                for l in 0..ranks {
                    to[l] = job.out_row::<f32>(j + l).wrapping_add(columns.start);
                }
                let g = (&*projected, padded(rank), j);
                // SAFETY: these columns of the result are the tile's; rows of x have them.
                unsafe { outer(s, &to[..ranks], g, (x, rows), columns.clone()) };
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
    (x, rows): (Rows<f32>, &[usize]),
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

/// `sum over rows of dy (scale A x)^T`, `[N, r]`
struct BackB<'a> {
    job: &'a Job<'a>,
    slot: usize,
    columns: Range<usize>,
    scratch: Scratch<'a>,
}

impl Task for BackB<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let job = self.job;
        let (x, dy) = (job.input(0).rows::<f32>(), job.input(1).rows::<f32>());
        let chosen = job.input(2).ints();
        let a = job.input(3).ptr::<f32>();
        // SAFETY: a dense f32 operand of one element.
        let scale = unsafe { *job.input(4).ptr::<f32>() };
        let (rank, k) = (job.out.shape.cols(), job.input(0).arg.shape.cols());
        let projected = self.scratch.take(BLOCK * padded(rank));
        // Rank by rank, outputs in lanes; a multiple of 16 apart.
        let width = padded(self.columns.len());
        let sums = self.scratch.take(width * rank);
        sums.fill(0.0);
        for block in (0..chosen.len()).step_by(BLOCK) {
            let end = (block + BLOCK).min(chosen.len());
            let (count, rows) = members(chosen, block..end, self.slot);
            let rows = &rows[..count];
            if rows.is_empty() {
                continue;
            }
            // SAFETY: the shapes of the operands, as the op's rule has them.
            unsafe { project(s, (x, rows), (a, k, rank), scale, projected) };
            for j in (0..rank).step_by(GROUP) {
                let mut to = [std::ptr::null_mut(); GROUP];
                let ranks = GROUP.min(rank - j);
                for l in 0..ranks {
                    to[l] = sums[(j + l) * width..][..width].as_mut_ptr();
                }
                let h = (&*projected, padded(rank), j);
                // SAFETY: rows of dy have the tile's columns.
                unsafe { outer(s, &to[..ranks], h, (dy, rows), self.columns.clone()) };
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
                    let to = job.out_row::<f32>(self.columns.start + i + l).wrapping_add(j);
                    // SAFETY: row `columns.start + i + l` of the result is the tile's.
                    unsafe { s.store_first(to, v, ranks) };
                }
            }
        }
    }
}
