//! Matrix products: which kernel a product takes, and its grid of tiles.
//!
//! A tile is a block of rows times a block of panels of 16 columns. Where many elements are reduced,
//! such as those of a head's gradient, tiles are run in rounds: each adds up a part, and goes on
//! from the sums of the one before. The grid follows from shapes alone; no bit of the result
//! follows from the grid.

mod bf16;
mod codes;
pub(crate) mod experts;
mod float;
pub(crate) mod int16;
mod quantized;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod unpack;

use graph::{Arg, Call, DType, INT16_GROUP, Needs, Op, Unsupported};

use crate::dot::drive;
use crate::job::{Input, Job, Scratch, scratch_bytes};
use crate::pack::{Geometry, PANEL, UNIT};
use crate::simd::{Family, Isa};
use float::{Float, Right, Strided};

/// The sizes of the blocks that `rows` rows are cut into: as many as possible of `largest`,
/// then 4, 2 and 1. Pairs of first row and number of rows.
fn blocks(rows: usize, largest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let size = match rows - at {
            0 => return None,
            n if n >= largest => largest,
            n if n >= 4 && largest > 4 => 4,
            n if n >= 2 => 2,
            _ => 1,
        };
        at += size;
        Some((at - size, size))
    })
}

/// How a product is cut.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
struct Grid {
    /// Products that share the grid: the leading dimensions.
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    rows: usize,
    panels: usize,
    /// Elements of the reduced dimension that a round adds up.
    depth: usize,
}

impl Grid {
    fn row_tiles(&self) -> usize {
        self.m.div_ceil(self.rows)
    }

    fn panel_tiles(&self) -> usize {
        self.n.div_ceil(PANEL).div_ceil(self.panels)
    }

    /// Whether rows of the left operand are far apart.
    fn near(&self, ta: bool) -> bool {
        !ta && self.rounds() > 1
    }

    /// The tiles of a round.
    fn tiles(&self) -> usize {
        self.batch * self.row_tiles() * self.panel_tiles()
    }

    /// Rounds, each of which adds to what the one before gave.
    fn rounds(&self) -> usize {
        self.k.div_ceil(self.depth).max(1)
    }
}

/// What kind of product a call is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Kind {
    /// Quantized rows times a packed weight of a block format.
    Quantized,
    /// f32 times a packed `[N, K]` of floats.
    Packed,
    /// f32 times a packed `[K, N]`.
    Transposed,
    /// bf16 times a packed `[K, N]` of a block format.
    Bf16,
    /// Rows in block floating point times a packed `[K, N]` of a block format.
    Int16,
    /// f32 times floats in memory.
    Memory,
}

/// Multiplications that a thread does in about half a millisecond, at most: what a tile has
/// where its columns are not too long.
const MOST: usize = 32 << 20;

/// As many as make claiming a tile worth while: some microseconds.
const LEAST: usize = 1 << 19;

/// Multiplications that AMX does in about a millisecond, at most: what a tile of bf16 has.
const MOST_BF16: usize = 300 << 20;

/// Multiplications of integers of 16 bits that a thread does in about half a millisecond.
const MOST_INT16: usize = 2 * MOST;

/// Rows that take as long to multiply as unpacking the weight for them does.
const UNPACK_INT16: usize = 64;

/// Panels of a tile of such integers: as many of these as leave enough tiles.
const PANELS_INT16: [usize; 4] = [12, 6, 4, 2];

/// Columns of a tile of bf16 on AMX: as many of these as leave enough tiles.
const COLUMNS: [usize; 3] = [4, 2, 1];

/// Rows of a tile of bf16 on AMX, or of int16: a weight is unpacked for so many.
const ROWS_UNPACKED: usize = 512;

/// Rows of a tile for which unpacking its panels is little work.
const BUSY_ROWS: usize = 96;

/// Elements that a round reduces: its part of the left operand stays in the caches while the tiles
/// read it.
const DEPTH: usize = 10 * float::CHUNK;

/// Tiles that a round has at least, where its size permits.
const ROUND_TILES: usize = 6;

/// Tiles that a product is cut into where its size permits: of many rows, and of few, where a
/// tile is short and does little that other tiles do again.
const TILES: usize = 16;
const SMALL_TILES: usize = 64;

/// Rows that take as long as unpacking the right operand for them does.
const UNPACK_ROWS: usize = 16;

/// Rows that take as long as one: its time is the weight's way from memory.
const FREE_ROWS: usize = 6;

/// Bytes of rows that stay in the second-level cache beside a few panels.
const ROW_BYTES: usize = 512 << 10;

/// Rows that make what is done once per panel cheap; more would only make what is done once per
/// row less so.
const ROWS: usize = 192;

/// Dimensions of the product: leading dimensions, rows, columns, reduced. A packed right operand
/// is shared by all rows, so that leading dimensions are rows where the left one's layout says so.
fn sizes(a: &Arg, b: &Arg, out: &Arg, ta: bool) -> (usize, usize, usize, usize) {
    let rank = out.shape.rank();
    let (m, n) = (out.shape.dim(rank.wrapping_sub(2)), out.shape.cols());
    let k = if ta { a.shape.dim(a.shape.rank().wrapping_sub(2)) } else { a.shape.cols() };
    let batch = out.shape.dims().iter().rev().skip(2).product();
    let one_matrix = b.shape.dims().iter().rev().skip(2).all(|&d| d == 1);
    let same = a.shape.rows() == out.shape.rows();
    if !ta && one_matrix && same && a.row_stride().is_some() {
        return (1, batch * m, n, k);
    }
    (batch, m, n, k)
}

fn grid(kind: Kind, a: &Arg, b: &Arg, out: &Arg, ta: bool) -> Grid {
    let (batch, m, n, k) = sizes(a, b, out, ta);
    let all = n.div_ceil(PANEL).max(1);
    let depth = (k * PANEL).max(1);
    let total = [m.max(FREE_ROWS), all, depth].into_iter().fold(batch, usize::saturating_mul);
    let tiles = if m <= 4 * FREE_ROWS { SMALL_TILES } else { TILES };
    let goal = (total / tiles).clamp(LEAST, MOST);
    let (rows, panels) = match kind {
        Kind::Quantized | Kind::Packed => {
            let bytes = if kind == Kind::Quantized { k + k / UNIT * 8 } else { k * 4 };
            let cached = (ROW_BYTES / bytes.max(1)).next_multiple_of(24).clamp(48, ROWS);
            let rows = m.div_ceil(m.div_ceil(cached).max(1)).next_multiple_of(24).min(m);
            let panels = (goal / depth / rows.max(FREE_ROWS)).clamp(1, all);
            (rows, if panels > 3 { panels / 3 * 3 } else { panels })
        }
        Kind::Int16 => return int16_grid(a, b, out),
        Kind::Transposed | Kind::Bf16 | Kind::Memory => {
            // What is unpacked for a tile is worth it for many rows only, and pairs of panels
            // make whole units.
            let units = (goal / depth).max(1);
            if goal == MOST && units < 6 * BUSY_ROWS {
                return in_rounds(batch, m, n, k);
            }
            let panels = [12, 6, 2].into_iter().find(|p| units / p >= BUSY_ROWS).unwrap_or(2);
            let rows = (units / panels).max(24).next_multiple_of(24);
            let rows = m.div_ceil(m.div_ceil(rows).max(1)).next_multiple_of(24).min(m);
            let busy = rows.max(UNPACK_ROWS);
            let panels = (units / busy).clamp(panels, float::TILE_PANELS) / 2 * 2;
            (rows, panels)
        }
    };
    Grid { batch, m, n, k, rows: rows.max(1), panels: panels.max(1), depth: k.max(1) }
}

/// The grid of a large product that reduces many elements, such as that of a head's gradient: tiles
/// of many rows and panels, in rounds.
fn in_rounds(batch: usize, m: usize, n: usize, k: usize) -> Grid {
    let row_tiles = m.div_ceil(BUSY_ROWS).max(1);
    let rows = m.div_ceil(row_tiles).next_multiple_of(24).min(m).max(1);
    let all = n.div_ceil(PANEL);
    let enough = |p: &usize| batch * m.div_ceil(rows) * all.div_ceil(*p) >= ROUND_TILES;
    let panels = [float::TILE_PANELS, 6, 4].into_iter().find(enough).unwrap_or(2);
    let depth = k.div_ceil(k.div_ceil(DEPTH).max(1)).next_multiple_of(float::CHUNK);
    Grid { batch, m, n, k, rows, panels, depth }
}

/// As [`grid`], of a bf16 product on AMX, where a tile takes all rows and some units of 32
/// columns.
fn bf16_grid(a: &Arg, b: &Arg, out: &Arg) -> Grid {
    let (batch, m, n, k) = sizes(a, b, out, false);
    let most = (MOST_BF16 / (k * UNIT).max(1) / 32 * 32).clamp(64, ROWS_UNPACKED);
    let rows = m.div_ceil(m.div_ceil(most).max(1)).next_multiple_of(32).min(m).max(1);
    let row_tiles = batch * m.div_ceil(rows);
    let units = n.div_ceil(UNIT);
    let fits = |u: &&usize| {
        let work = [rows, k, **u * UNIT].into_iter().fold(1, usize::saturating_mul);
        work <= MOST_BF16 && row_tiles * units.div_ceil(**u) >= TILES
    };
    let wide = COLUMNS.iter().find(fits).copied().unwrap_or(1);
    // Little work, such as that of few rows, is not worth a claim.
    let least = (LEAST / (rows * k * UNIT).max(1)).clamp(1, (units / 4).max(1));
    Grid { batch, m, n, k, rows, panels: wide.max(least) * 2, depth: k.max(1) }
}

/// As [`grid`], of a product of int16-rows: unpacking a weight is dear beside multiplying with it,
/// so a tile takes many rows, and few elements at a time.
fn int16_grid(a: &Arg, b: &Arg, out: &Arg) -> Grid {
    let (batch, m, n, k) = sizes(a, b, out, false);
    let rows = m.div_ceil(m.div_ceil(ROWS_UNPACKED).max(1)).next_multiple_of(8).min(m).max(1);
    let row_tiles = batch * m.div_ceil(rows);
    let all = n.div_ceil(PANEL);
    let busy = rows.max(UNPACK_INT16);
    let work = |panels: usize| [busy, k, panels * PANEL].into_iter().fold(1, usize::saturating_mul);
    let fits = |p: &usize| {
        let tiles = row_tiles * all.div_ceil(*p);
        tiles >= TILES || (work(*p) >= MOST_INT16 && tiles >= ROUND_TILES)
    };
    let panels = PANELS_INT16.into_iter().find(fits).unwrap_or(2);
    // Little work, such as that of few rows, is not worth a claim.
    let least = LEAST.div_ceil(work(1).max(1)).next_multiple_of(2).min(all.next_multiple_of(2));
    let panels = panels.max(least);
    let depth = (MOST_INT16 / (busy * panels * PANEL)).next_multiple_of(INT16_GROUP);
    let depth = k.div_ceil(k.div_ceil(depth).max(1)).next_multiple_of(INT16_GROUP).max(1);
    Grid { batch, m, n, k, rows, panels, depth }
}

/// The grid of a kind of product in a family.
fn grid_of(isa: Isa, kind: Kind, a: &Arg, b: &Arg, out: &Arg, ta: bool) -> Grid {
    match (kind, isa.family()) {
        (Kind::Bf16, Family::Amx) => bf16_grid(a, b, out),
        _ => grid(kind, a, b, out, ta),
    }
}

/// The kind of a product with a right operand of this rank, or why there is none.
fn kind(a: &Arg, b: &Arg, tb: bool, rank: usize) -> Result<Kind, Unsupported> {
    let no = |what: String| Err(Unsupported::Kernel(what));
    if a.resident {
        return no("a packed left operand".into());
    }
    if !b.resident {
        return match (a.dtype, b.dtype) {
            (DType::F32, DType::F32 | DType::F16 | DType::BF16) => Ok(Kind::Memory),
            (DType::F32 | DType::Q8Rows, DType::Block(_)) => {
                no(format!("a {} matrix that was not loaded as a weight", b.dtype))
            }
            (a, b) => no(format!("a product of {a} and {b}")),
        };
    }
    let rows = b.shape.dim(rank.wrapping_sub(2));
    if b.shape.rank() != rank || Geometry::new(b.dtype, rows, b.shape.cols()).is_none() {
        return no(format!("a packed {} of shape {}", b.dtype, b.shape));
    }
    match (a.dtype, b.dtype, tb) {
        (DType::Q8Rows, DType::Block(_), true) if a.is_contiguous() => Ok(Kind::Quantized),
        (DType::Q8Rows, DType::Block(_), true) => Err(Unsupported::Layout(0)),
        (DType::F32, DType::F32 | DType::F16 | DType::BF16, true) => Ok(Kind::Packed),
        (DType::F32, _, false) => Ok(Kind::Transposed),
        (DType::BF16, DType::Block(_), false) if a.is_contiguous() => Ok(Kind::Bf16),
        (DType::BF16, DType::Block(_), false) => Err(Unsupported::Layout(0)),
        (DType::Int16Rows, DType::Block(_), false) if a.is_contiguous() => Ok(Kind::Int16),
        (DType::Int16Rows, DType::Block(_), false) => Err(Unsupported::Layout(0)),
        (a, b, _) => no(format!("a product of {a} and {b}")),
    }
}

/// What a product needs: any layout of floats is read in place, a block format must be packed.
pub(crate) fn supports(call: &Call<'_>) -> Result<Needs, Unsupported> {
    let (&Op::MatMul { ta, tb }, [a, b]) = (call.op, call.args) else {
        return Err(Unsupported::Kernel(format!("{} as a product", call.op.name())));
    };
    let kind = kind(a, b, tb, 2)?;
    let grid = grid(kind, a, b, &call.out, ta);
    let floats = match kind {
        Kind::Packed => 0,
        Kind::Quantized => match Geometry::new(b.dtype, b.shape.dim(0), b.shape.cols()) {
            Some(g) => quantized::scratch(&g, grid.rows) / 4,
            None => 0,
        },
        Kind::Transposed | Kind::Memory => float::scratch(grid.rows, grid.panels, grid.near(ta)),
        Kind::Bf16 => {
            let wide = bf16_grid(a, b, &call.out);
            let of = |g: Grid| bf16::scratch(g.rows, g.panels.min(float::TILE_PANELS));
            of(grid).max(of(wide))
        }
        Kind::Int16 => int16::scratch(grid.panels),
    };
    Ok(Needs { scratch: scratch_bytes(&[floats]), kept: 0 })
}

/// A job's product: its kind, grid, and whether the operands are transposed.
fn product(job: &Job<'_>) -> Option<(Kind, Grid, bool, bool)> {
    let &Op::MatMul { ta, tb } = job.op else { return None };
    let (a, b) = (job.inputs.first()?.arg, job.inputs.get(1)?.arg);
    let kind = kind(&a, &b, tb, 2).ok()?;
    Some((kind, grid_of(job.isa, kind, &a, &b, &job.out, ta), ta, tb))
}

/// The number of tiles of a round.
pub(crate) fn tiles(job: &Job<'_>) -> usize {
    product(job).map_or(0, |(_, grid, ..)| grid.tiles())
}

/// The number of rounds that the tiles are run in, one after the other.
pub(crate) fn rounds(job: &Job<'_>) -> usize {
    product(job).map_or(1, |(_, grid, ..)| grid.rounds())
}

/// Runs one tile.
pub(crate) fn run_tile(job: &Job<'_>, tile: usize, mut scratch: Scratch<'_>) {
    let Some((kind, grid, ta, tb)) = product(job) else { return };
    let (a, b) = (job.input(0), job.input(1));
    let (row_tiles, panel_tiles) = (grid.row_tiles(), grid.panel_tiles());
    let (round, tile) = (tile / grid.tiles(), tile % grid.tiles());
    let k = round * grid.depth..((round + 1) * grid.depth).min(grid.k);
    // Panels inside of rows: neighbouring tiles share rows of `a`.
    let (batch, tile) = (tile / (row_tiles * panel_tiles), tile % (row_tiles * panel_tiles));
    let (row, panel) = (tile / panel_tiles * grid.rows, tile % panel_tiles * grid.panels);
    let rows = row..(row + grid.rows).min(grid.m);
    let panels = panel..(panel + grid.panels).min(grid.n.div_ceil(PANEL));
    let out = job.out::<f32>().wrapping_add(batch * grid.m * grid.n);
    let near = grid.near(ta);
    let unpacked = float::scratch(rows.len(), panels.len(), near);
    let (right, floats) = match (kind, b.matrix()) {
        (Kind::Quantized, Some(weight)) => {
            let bytes = quantized::scratch(weight.geometry(), rows.len());
            let scratch = scratch.take(bytes / 4).as_mut_ptr().cast();
            let x = a.bytes();
            let (weight, out_step) = (weight.panels(), grid.n);
            let tile = quantized::Forward { weight, x, rows, panels, out, out_step, scratch };
            return drive(job.isa, tile);
        }
        (Kind::Bf16, Some(weight)) => {
            let floats = bf16::scratch(rows.len(), panels.len().min(float::TILE_PANELS));
            let scratch = scratch.take(floats).as_mut_ptr();
            let (x, weight) = (a.ptr(), weight.panels());
            let (x_step, out_step) = (grid.k, grid.n);
            let tile = bf16::Bf16 { weight, x, x_step, rows, k, panels, out, out_step, scratch };
            return tile.run(job.isa);
        }
        (Kind::Int16, Some(weight)) => {
            let scratch = scratch.take(int16::scratch(panels.len())).as_mut_ptr();
            let (x, weight) = (a.bytes(), weight.panels());
            let (x_step, out_step) = (int16::row_bytes(grid.k), grid.n);
            let tile = int16::Int16 { weight, x, x_step, rows, k, panels, out, out_step, scratch };
            return drive(job.isa, tile);
        }
        (Kind::Packed, Some(weight)) => (Right::Packed(weight.panels()), 0),
        (Kind::Transposed, Some(weight)) => (Right::Transposed(weight.panels()), unpacked),
        _ => {
            let floats = unpacked;
            match b.arg.dtype {
                DType::F32 => (Right::F32(strided(&b, &job.out, batch, tb)), floats),
                DType::F16 => (Right::F16(strided(&b, &job.out, batch, tb)), floats),
                DType::BF16 => (Right::BF16(strided(&b, &job.out, batch, tb)), floats),
                _ => return,
            }
        }
    };
    let a = match a.arg.row_stride() {
        // Rows of all leading dimensions as one matrix.
        Some(stride) if grid.batch == 1 && !ta => Strided { start: a.ptr(), row: stride, col: 1 },
        _ => strided(&a, &job.out, batch, ta),
    };
    let scratch = scratch.take(floats).as_mut_ptr();
    let n = grid.n;
    let (out_step, more) = (n, round > 0);
    drive(job.isa, Float { a, b: right, k, n, rows, panels, out, out_step, more, near, scratch });
}

/// The matrix of an operand that belongs to matrix `batch` of the result. Dimensions of size 1
/// stretch.
fn strided<T>(x: &Input<'_>, out: &Arg, batch: usize, transposed: bool) -> Strided<T> {
    let rank = x.arg.shape.rank();
    let mut start = x.ptr::<T>();
    let mut rest = batch;
    for back in 2..out.shape.rank() {
        let size = out.shape.dim(out.shape.rank() - 1 - back);
        let index = rest % size.max(1);
        rest /= size.max(1);
        if let Some(dim) = rank.checked_sub(1 + back)
            && x.arg.shape.dim(dim) != 1
        {
            start = start.wrapping_add(index * x.stride(dim));
        }
    }
    let (row, col) = (x.stride(rank.wrapping_sub(2)), x.stride(rank.wrapping_sub(1)));
    if transposed { Strided { start, row: col, col: row } } else { Strided { start, row, col } }
}
