//! Rows by index.

use gguf::TensorType;
use std::cmp::Ordering;

use graph::{Call, DType, Needs, Order, Unsupported};

use super::{Support, TILE_ELEMENTS, Tiles, arg, dense, row_tiles, rows};
use crate::job::{Job, Scratch};
use crate::simd::{LANES, Simd, Task};

/// A packed table, a dense one of any type, or f32 rows.
pub(super) fn supports_gather(call: &Call<'_>) -> Support {
    let table = arg(call, 0)?;
    let dense_table = table.is_contiguous() && table.layout.offset == 0;
    if !table.resident && table.dtype != DType::F32 && !dense_table {
        return Err(Unsupported::Layout(0));
    }
    if !table.resident && table.dtype == DType::F32 {
        rows(call, 0)?;
    }
    dense(call, 1, DType::I32)?;
    Ok(Needs::default())
}

pub(super) fn supports_scatter(call: &Call<'_>) -> Support {
    dense(call, 0, DType::I32)?;
    rows(call, 1)?;
    Ok(Needs::default())
}

/// Says which of some row numbers is not below `rows`.
fn check(ids: &[i32], rows: usize) -> Result<(), String> {
    for (i, &id) in ids.iter().enumerate() {
        if usize::try_from(id).is_ok_and(|id| id < rows) {
            continue;
        }
        return Err(format!("row number {id} (entry {i}) is not in 0..{rows}"));
    }
    Ok(())
}

pub(super) fn check_gather(job: &Job<'_>) -> Result<(), String> {
    let table = job.input(0).arg.shape;
    check(job.input(1).ints(), table.dim(table.rank().saturating_sub(2)))
}

pub(super) fn check_scatter(job: &Job<'_>, rows: usize) -> Result<(), String> {
    check(job.input(0).ints(), rows)
}

/// The block type whose `dequantize` reads rows of this type.
fn block_type(dtype: DType) -> Option<TensorType> {
    match dtype {
        DType::F32 => Some(TensorType::F32),
        DType::F16 => Some(TensorType::F16),
        DType::BF16 => Some(TensorType::BF16),
        DType::Block(ty) => Some(ty),
        DType::I32 | DType::Q8Rows | DType::Int16Rows => None,
    }
}

pub(super) fn gather_tile(job: &Job<'_>, tile: usize) {
    let table = job.input(0);
    let cols = job.out.shape.cols();
    let ids = job.input(1).ints();
    let shape = table.arg.shape;
    // With leading dimensions, ids of each last dimension have a table of their own.
    let (rows, own) = match shape.rank() {
        0..=2 => (0, 1),
        rank => (shape.dim(rank - 2), job.input(1).arg.shape.cols().max(1)),
    };
    for i in row_tiles(job).range(tile) {
        let id = i / own * rows + ids[i] as usize;
        // SAFETY: row `i` of the result is this tile's.
        let to = unsafe { std::slice::from_raw_parts_mut(job.out_row::<f32>(i), cols) };
        if let Some(matrix) = table.matrix() {
            matrix.row(id, to);
        } else if table.arg.dtype == DType::F32 {
            // SAFETY: `check_gather` found the id to be a row of the table.
            let row = unsafe { std::slice::from_raw_parts(table.rows().row(id), cols) };
            to.copy_from_slice(row);
        } else if let Some(ty) = block_type(table.arg.dtype) {
            let size = ty.row_bytes(cols).unwrap_or(0);
            // SAFETY: as above; the table is dense.
            let row =
                unsafe { std::slice::from_raw_parts(table.bytes().wrapping_add(id * size), size) };
            // The lengths fit by construction, and the type is no integer.
            let _ = gguf::blocks::dequantize(ty, row, to);
        }
    }
}

fn scatter_grid(job: &Job<'_>) -> Tiles {
    let shape = job.out.shape;
    let rows = TILE_ELEMENTS / shape.cols().max(1);
    Tiles::new(shape.rows(), rows.max(shape.rows().div_ceil(64)))
}

pub(super) fn scatter_tiles(job: &Job<'_>) -> usize {
    scatter_grid(job).count
}

pub(super) fn scatter_tile(job: &Job<'_>, tile: usize) {
    job.isa.run(Scatter { job, range: scatter_grid(job).range(tile) });
}

/// Each tile owns rows of the result and looks for them in all ids, so that what falls on one
/// row is added in order.
struct Scatter<'a> {
    job: &'a Job<'a>,
    range: std::ops::Range<usize>,
}

impl Task for Scatter<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let cols = self.job.out.shape.cols();
        let start = self.job.out_row::<f32>(self.range.start);
        // SAFETY: the range's rows of the result are this tile's.
        unsafe { std::slice::from_raw_parts_mut(start, self.range.len() * cols) }.fill(0.0);
        let x = self.job.input(1).rows::<f32>();
        let shape = self.job.out.shape;
        let rows = shape.dim(shape.rank().saturating_sub(2));
        let per_table = self.job.input(0).arg.shape.cols().max(1);
        for (i, &id) in self.job.input(0).ints().iter().enumerate() {
            let id = i / per_table * rows + id as usize;
            if !self.range.contains(&id) {
                continue;
            }
            let (to, from) = (self.job.out_row::<f32>(id), x.row(i));
            let mut j = 0;
            while j < cols {
                let n = cols - j;
                // SAFETY: row `id` of the result is this tile's, row `i` of x has as many
                // columns.
                unsafe {
                    let v = s.load_first(from.add(j), n);
                    s.store_first(to.add(j), s.add(s.load_first(to.add(j), n), v), n);
                }
                j += LANES;
            }
        }
    }
}

/// Rows of floats; scratch for a row of indices.
pub(super) fn supports_top_k(call: &Call<'_>) -> Support {
    rows(call, 0)?;
    Ok(super::needs(&[call.args[0].shape.cols()]))
}

fn top_k_grid(job: &Job<'_>) -> Tiles {
    let shape = job.input(0).arg.shape;
    Tiles::new(job.out.shape.rows(), TILE_ELEMENTS / 8 / shape.cols().max(1))
}

pub(super) fn top_k_tiles(job: &Job<'_>) -> usize {
    top_k_grid(job).count
}

pub(super) fn top_k_tile(
    job: &Job<'_>,
    k: usize,
    order: Order,
    tile: usize,
    mut scratch: Scratch<'_>,
) {
    let n = job.input(0).arg.shape.cols();
    if k == 0 {
        return;
    }
    let memory = scratch.take(n);
    // SAFETY: u32 has the size and alignment of f32, and no invalid bits.
    let (_, places, _) = unsafe { memory.align_to_mut::<u32>() };
    let x = job.input(0).rows::<f32>();
    for row in top_k_grid(job).range(tile) {
        // SAFETY: rows of x have `n` elements.
        let x = unsafe { std::slice::from_raw_parts(x.row(row), n) };
        // One order of all elements, so that no way of sorting shows.
        let before = |&a: &u32, &b: &u32| {
            let (p, q) = (x[a as usize], x[b as usize]);
            let by_value = match (p.is_nan(), q.is_nan()) {
                (true, true) => Ordering::Equal,
                (true, false) => Ordering::Greater,
                (false, true) => Ordering::Less,
                (false, false) => {
                    let ascending = p.partial_cmp(&q).unwrap_or(Ordering::Equal);
                    if order == Order::Ascending { ascending } else { ascending.reverse() }
                }
            };
            by_value.then(a.cmp(&b))
        };
        for (i, place) in places.iter_mut().enumerate() {
            *place = i as u32;
        }
        places.select_nth_unstable_by(k - 1, before);
        let first = &mut places[..k];
        first.sort_unstable_by(before);
        // SAFETY: row `row` of the result, of `k` elements, is this tile's.
        let to = unsafe { std::slice::from_raw_parts_mut(job.out_row::<i32>(row), k) };
        for (to, &place) in to.iter_mut().zip(&*first) {
            *to = place as i32;
        }
    }
}
