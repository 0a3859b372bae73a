//! Products of rows with the experts they chose, and the gradient of the experts.
//!
//! Rows that chose the same expert are gathered, multiplied by the kernels of all other products
//! and put back, so a row's value is what it would be alone. An expert that no row chose is never
//! read. Where rows are few, and hardly two of them share an expert, a tile is one row instead. Of
//! an expert that very many rows chose, each round takes some.

use std::collections::HashMap;
use std::ops::Range;

use graph::{Arg, Call, DType, Needs, Op, Unsupported};

use super::float::{self, Float, Right, Strided};
use super::{FREE_ROWS, Kind, LEAST, bf16, int16, kind, quantized};
use crate::dot::drive;
use crate::job::{Input, Job, MILLISECOND, Scratch, scratch_bytes};
use crate::pack::{Geometry, PANEL, UNIT};

/// Rows that are gathered at a time.
const ROWS: usize = 48;

/// Rows that an outer product adds up between two stores.
const PAIRS: usize = 64;

/// Rows of the block of an outer product that is a tile; its columns are
/// [`float::TILE_PANELS`].
const OUTER_ROWS: usize = 192;

/// Multiplications of a tile with the rows of a round. In unit tests so few that a hundred rows take
/// several rounds.
const ROUND: usize = if cfg!(test) { 1 << 20 } else { MILLISECOND / 2 };

/// The sizes of a product with experts.
struct Grid {
    kind: Kind,
    experts: usize,
    /// Rows times the experts each chose.
    pairs: usize,
    used: usize,
    /// Outputs, and what is reduced.
    n: usize,
    k: usize,
    /// Whether a tile is one row, not one expert.
    alone: bool,
    panels: usize,
    panel_tiles: usize,
}

fn grid(args: &[Arg], out: &Arg, tb: bool) -> Result<Grid, Unsupported> {
    let [x, w, ids] = args else {
        return Err(Unsupported::Kernel("experts without rows or choices".into()));
    };
    let kind = kind(x, w, tb, 3)?;
    let (experts, used) = (w.shape.dim(0), ids.shape.dim(1));
    let (pairs, n, k) = (ids.shape.elements(), out.shape.cols(), x.shape.cols());
    let alone = pairs < 2 * experts;
    let expected = if alone { 1 } else { (2 * pairs).div_ceil(experts.max(1)).min(pairs) };
    let all = n.div_ceil(PANEL).max(1);
    let goal = if alone { LEAST } else { 8 * LEAST };
    let panels = (goal / (k * PANEL).max(1) / expected.clamp(FREE_ROWS, ROWS)).clamp(1, all);
    // Pairs of panels make whole units where a block format is unpacked.
    let panels = match kind {
        Kind::Transposed | Kind::Bf16 | Kind::Int16 | Kind::Memory => {
            panels.min(float::TILE_PANELS).next_multiple_of(2)
        }
        Kind::Quantized | Kind::Packed => panels,
    };
    let panel_tiles = all.div_ceil(panels);
    Ok(Grid { kind, experts, pairs, used, n, k, alone, panels, panel_tiles })
}

impl Grid {
    /// Rows of an expert that a round takes.
    fn in_round(&self) -> usize {
        let of_row = self.panels.saturating_mul(PANEL).saturating_mul(self.k);
        (ROUND / of_row.max(1) / ROWS * ROWS).max(ROWS)
    }
}

/// Floats of the parts of a tile's scratch memory: gathered rows, results, the kernel's own.
fn parts(grid: &Grid, w: &Arg) -> [usize; 3] {
    let rows = if grid.alone { 1 } else { ROWS.min(grid.pairs) };
    let own = match grid.kind {
        Kind::Packed => 0,
        Kind::Quantized => match Geometry::new(w.dtype, w.shape.dim(1), w.shape.dim(2)) {
            Some(g) => quantized::scratch(&g, rows).div_ceil(4),
            None => 0,
        },
        Kind::Transposed | Kind::Memory => float::scratch_floats(grid.panels),
        Kind::Bf16 => bf16::scratch(rows, grid.panels),
        Kind::Int16 => int16::scratch(grid.panels),
    };
    [rows * row_bytes(grid).div_ceil(4), rows * grid.panels * PANEL, own]
}

/// Bytes of a row of `x`.
fn row_bytes(grid: &Grid) -> usize {
    match grid.kind {
        Kind::Quantized => grid.k + grid.k / UNIT * 8,
        Kind::Bf16 => grid.k * 2,
        Kind::Int16 => int16::row_bytes(grid.k),
        _ => grid.k * 4,
    }
}

/// Rows with a dense last dimension, chosen by dense ids.
fn chosen(x: &Arg, i: usize, ids: &Arg) -> Result<(), Unsupported> {
    let last = x.layout.strides.get(x.shape.rank().wrapping_sub(1));
    if x.shape.cols() > 1 && last != Some(&1) {
        return Err(Unsupported::Layout(i));
    }
    if !ids.is_contiguous() {
        return Err(Unsupported::Layout(2));
    }
    Ok(())
}

pub(crate) fn supports(call: &Call<'_>) -> Result<Needs, Unsupported> {
    match (call.op, call.args) {
        (Op::MatMulExperts { tb }, [x, w, ids]) => {
            let grid = grid(call.args, &call.out, *tb)?;
            chosen(x, 0, ids)?;
            Ok(Needs { scratch: scratch_bytes(&parts(&grid, w)), kept: 0 })
        }
        (Op::ExpertOuter { .. }, [a, b, ids]) => {
            for (i, x) in [a, b].into_iter().enumerate() {
                if x.resident || x.dtype != DType::F32 {
                    return Err(Unsupported::Kernel(format!("a {} operand {i}", x.dtype)));
                }
                chosen(x, i, ids)?;
            }
            Ok(Needs { scratch: scratch_bytes(&outer_parts()), kept: 0 })
        }
        _ => Err(Unsupported::Kernel(format!("{} with experts", call.op.name()))),
    }
}

/// Says which choice is not an expert.
pub(crate) fn check(job: &Job<'_>) -> Result<(), String> {
    let experts = match job.op {
        Op::MatMulExperts { .. } => job.input(1).arg.shape.dim(0),
        _ => job.out.shape.dim(0),
    };
    for (i, &id) in job.input(2).ints().iter().enumerate() {
        if usize::try_from(id).is_ok_and(|id| id < experts) {
            continue;
        }
        return Err(format!("expert {id} (entry {i}) is not in 0..{experts}"));
    }
    Ok(())
}

pub(crate) fn tiles(job: &Job<'_>) -> usize {
    match job.op {
        Op::MatMulExperts { tb } => match grid(&args(job), &job.out, *tb) {
            Ok(g) => g.panel_tiles * if g.alone { g.pairs } else { g.experts },
            Err(_) => 0,
        },
        _ => {
            let (rows, columns) = outer_tiles(job);
            job.out.shape.dim(0) * rows * columns
        }
    }
}

/// As many rounds as the expert that most rows chose needs. What was chosen stays as it is while a
/// job is stopped.
pub(crate) fn rounds(job: &Job<'_>) -> usize {
    let in_round = match job.op {
        Op::MatMulExperts { tb } => match grid(&args(job), &job.out, *tb) {
            Ok(grid) if !grid.alone => grid.in_round(),
            _ => return 1,
        },
        _ => outer_in_round(job),
    };
    let ids = job.input(2).ints();
    // No expert was chosen more often than all of them.
    if ids.len() <= in_round {
        return 1;
    }
    let mut chosen: HashMap<i32, usize> = HashMap::new();
    ids.iter().for_each(|&id| *chosen.entry(id).or_default() += 1);
    chosen.into_values().max().unwrap_or(0).div_ceil(in_round)
}

fn args(job: &Job<'_>) -> Vec<Arg> {
    job.inputs.iter().map(|input| input.arg).collect()
}

pub(crate) fn run_tile(job: &Job<'_>, tile: usize, scratch: Scratch<'_>) {
    match job.op {
        Op::MatMulExperts { tb } => product_tile(job, *tb, tile, scratch),
        _ => outer_tile(job, tile, scratch),
    }
}

/// The bytes of pair `i`'s row of `x`, which has a row for each of a token's choices or one for
/// all.
fn row_of(x: &Input<'_>, used: usize, i: usize) -> *const u8 {
    let (t, u) = (i / used, i % used);
    let own = x.arg.shape.dim(1);
    let u = if own == 1 { 0 } else { u };
    match x.arg.dtype.row_bytes(x.arg.shape.cols()) {
        // Quantized rows are dense.
        Some(bytes) if matches!(x.arg.dtype, DType::Q8Rows | DType::Int16Rows) => {
            x.bytes().wrapping_add((t * own + u) * bytes)
        }
        _ if x.arg.dtype == DType::BF16 => {
            x.ptr::<u16>().wrapping_add(t * x.stride(0) + u * x.stride(1)).cast()
        }
        _ => x.ptr::<f32>().wrapping_add(t * x.stride(0) + u * x.stride(1)).cast(),
    }
}

fn product_tile(job: &Job<'_>, tb: bool, tile: usize, mut scratch: Scratch<'_>) {
    let Ok(grid) = grid(&args(job), &job.out, tb) else { return };
    let (x, w, ids) = (job.input(0), job.input(1), job.input(2).ints());
    let of_round = grid.panel_tiles * if grid.alone { grid.pairs } else { grid.experts };
    let (round, tile) = (tile / of_round, tile % of_round);
    let (which, panel) = (tile / grid.panel_tiles, tile % grid.panel_tiles * grid.panels);
    let panels = panel..(panel + grid.panels).min(grid.n.div_ceil(PANEL));
    let [rows, results, own] = parts(&grid, &w.arg).map(|n| scratch.take(n).as_mut_ptr());
    let run = |expert: usize, list: &[usize]| {
        let size = row_bytes(&grid);
        for (i, &pair) in list.iter().enumerate() {
            let to = rows.cast::<u8>().wrapping_add(i * size);
            // SAFETY: the scratch memory holds `ROWS` rows, and a row of `x` has `size` bytes.
            unsafe { std::ptr::copy_nonoverlapping(row_of(&x, grid.used, pair), to, size) };
        }
        let step = panels.len() * PANEL;
        let out = results.wrapping_sub(panels.start * PANEL);
        let rows = Rows { x: rows.cast(), count: list.len(), out, step, scratch: own };
        multiply(job, &grid, &w, tb, expert, panels.clone(), rows);
        let column = panels.start * PANEL;
        let width = step.min(grid.n - column);
        for (i, &pair) in list.iter().enumerate() {
            let to = job.out::<f32>().wrapping_add(pair * grid.n + column);
            // SAFETY: these columns of the pair's row are this tile's.
            unsafe { std::ptr::copy_nonoverlapping(results.add(i * step), to, width) };
        }
    };
    if grid.alone {
        return run(ids[which] as usize, &[which]);
    }
    let in_round = grid.in_round();
    each_chunk::<ROWS>(ids, which, round * in_round, in_round, |list| run(which, list));
}

/// Calls `run` with the places at which `expert` was chosen, ascending, up to `N` at a time: with
/// `most` of them after the first `skip`.
fn each_chunk<const N: usize>(
    ids: &[i32],
    expert: usize,
    skip: usize,
    most: usize,
    mut run: impl FnMut(&[usize]),
) {
    // Counting is much quicker than choosing, and later rounds have none of most experts.
    if skip > 0 && ids.iter().filter(|&&id| id as usize == expert).count() <= skip {
        return;
    }
    let chosen = ids.iter().enumerate().filter(|(_, id)| **id as usize == expert);
    let (mut list, mut count) = ([0; N], 0);
    for (pair, _) in chosen.skip(skip).take(most) {
        list[count] = pair;
        count += 1;
        if count == N {
            run(&list);
            count = 0;
        }
    }
    if count > 0 {
        run(&list[..count]);
    }
}

/// Gathered rows and where their products go.
struct Rows {
    x: *const u8,
    count: usize,
    /// Where column 0 would be, with `step` elements between rows.
    out: *mut f32,
    step: usize,
    scratch: *mut f32,
}

fn multiply(
    job: &Job<'_>,
    grid: &Grid,
    w: &Input<'_>,
    tb: bool,
    expert: usize,
    panels: Range<usize>,
    rows: Rows,
) {
    let right = match (grid.kind, w.matrix()) {
        (Kind::Quantized, Some(matrix)) => {
            let tile = quantized::Forward {
                weight: matrix.expert(expert),
                x: rows.x,
                rows: 0..rows.count,
                panels,
                out: rows.out,
                out_step: rows.step,
                scratch: rows.scratch.cast(),
            };
            return drive(job.isa, tile);
        }
        (Kind::Bf16, Some(matrix)) => {
            let tile = bf16::Bf16 {
                weight: matrix.expert(expert),
                x: rows.x.cast(),
                x_step: grid.k,
                rows: 0..rows.count,
                k: 0..grid.k,
                panels,
                out: rows.out,
                out_step: rows.step,
                scratch: rows.scratch,
            };
            return tile.run(job.isa);
        }
        (Kind::Int16, Some(matrix)) => {
            let tile = int16::Int16 {
                weight: matrix.expert(expert),
                x: rows.x,
                x_step: row_bytes(grid),
                rows: 0..rows.count,
                k: 0..grid.k,
                panels,
                out: rows.out,
                out_step: rows.step,
                scratch: rows.scratch,
            };
            return drive(job.isa, tile);
        }
        (Kind::Packed, Some(matrix)) => Right::Packed(matrix.expert(expert)),
        (Kind::Transposed, Some(matrix)) => Right::Transposed(matrix.expert(expert)),
        _ => match w.arg.dtype {
            DType::F32 => Right::F32(expert_of(w, tb, expert)),
            DType::F16 => Right::F16(expert_of(w, tb, expert)),
            DType::BF16 => Right::BF16(expert_of(w, tb, expert)),
            _ => return,
        },
    };
    let a = Strided { start: rows.x.cast(), row: grid.k, col: 1 };
    let (k, n) = (0..grid.k, grid.n);
    drive(
        job.isa,
        Float {
            a,
            b: right,
            k,
            n,
            rows: 0..rows.count,
            panels,
            out: rows.out,
            out_step: rows.step,
            more: false,
            near: false,
            scratch: rows.scratch,
        },
    );
}

/// An expert's matrix in memory, `[K, N]` as a product sees it.
fn expert_of<T>(w: &Input<'_>, tb: bool, expert: usize) -> Strided<T> {
    let start = w.ptr::<T>().wrapping_add(expert * w.stride(0));
    let (rows, cols) = (w.stride(1), w.stride(2));
    if tb {
        Strided { start, row: cols, col: rows }
    } else {
        Strided { start, row: rows, col: cols }
    }
}

/// Floats of the parts of an outer tile's scratch memory.
fn outer_parts() -> [usize; 3] {
    let columns = float::TILE_PANELS * PANEL;
    [PAIRS * OUTER_ROWS, PAIRS * columns, float::scratch_floats(float::TILE_PANELS)]
}

fn outer_tiles(job: &Job<'_>) -> (usize, usize) {
    let shape = job.out.shape;
    (shape.dim(1).div_ceil(OUTER_ROWS), shape.dim(2).div_ceil(float::TILE_PANELS * PANEL))
}

/// Pairs of an expert that a round adds up.
fn outer_in_round(job: &Job<'_>) -> usize {
    let shape = job.out.shape;
    let width = (float::TILE_PANELS * PANEL).min(shape.dim(2));
    (ROUND / (OUTER_ROWS.min(shape.dim(1)) * width).max(1) / PAIRS * PAIRS).max(PAIRS)
}

/// `sum over the pairs of an expert of a b^T`, pairs ascending, for a block of rows and columns.
fn outer_tile(job: &Job<'_>, tile: usize, mut scratch: Scratch<'_>) {
    let (row_tiles, column_tiles) = outer_tiles(job);
    let of_round = job.out.shape.dim(0) * row_tiles * column_tiles;
    let (round, tile) = (tile / of_round, tile % of_round);
    let (expert, tile) = (tile / (row_tiles * column_tiles), tile % (row_tiles * column_tiles));
    let (p, q) = (job.out.shape.dim(1), job.out.shape.dim(2));
    let width = float::TILE_PANELS * PANEL;
    let (row, column) = (tile / column_tiles * OUTER_ROWS, tile % column_tiles * width);
    let (rows, columns) = (OUTER_ROWS.min(p - row), width.min(q - column));
    let (a, b, ids) = (job.input(0), job.input(1), job.input(2));
    let used = ids.arg.shape.dim(1).max(1);
    let [left, right, own] = outer_parts().map(|n| scratch.take(n).as_mut_ptr());
    let out = job.out::<f32>().wrapping_add((expert * p + row) * q + column);
    let add = |list: &[usize], first: bool| {
        for (i, &pair) in list.iter().enumerate() {
            let from = row_of(&a, used, pair).cast::<f32>().wrapping_add(row);
            let other = row_of(&b, used, pair).cast::<f32>().wrapping_add(column);
            // SAFETY: rows have these columns, and the scratch memory a place for each.
            unsafe {
                std::ptr::copy_nonoverlapping(from, left.add(i * rows), rows);
                std::ptr::copy_nonoverlapping(other, right.add(i * columns), columns);
            }
        }
        drive(
            job.isa,
            Float {
                a: Strided { start: left.cast_const(), row: 1, col: rows },
                b: Right::F32(Strided { start: right.cast_const(), row: columns, col: 1 }),
                k: 0..list.len(),
                n: columns,
                rows: 0..rows,
                panels: 0..columns.div_ceil(PANEL),
                out,
                out_step: q,
                more: !first,
                near: false,
                scratch: own,
            },
        );
    };
    let (mut first, in_round) = (round == 0, outer_in_round(job));
    each_chunk::<PAIRS>(ids.ints(), expert, round * in_round, in_round, |list| {
        add(list, first);
        first = false;
    });
    // An expert that no row chose has a gradient of zero, and it is written.
    if first {
        add(&[], true);
    }
}
