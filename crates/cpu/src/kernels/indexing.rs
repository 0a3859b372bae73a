//! Rows by index.

use gguf::TensorType;
use graph::{Call, DType, Needs, Unsupported};

use super::{Support, TILE_ELEMENTS, Tiles, arg, dense, row_tiles, rows};
use crate::job::Job;
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
    check(job.input(1).ints(), job.input(0).arg.shape.dim(0))
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
        DType::I32 | DType::Q8Rows => None,
    }
}

pub(super) fn gather_tile(job: &Job<'_>, tile: usize) {
    let table = job.input(0);
    let cols = job.out.shape.cols();
    let ids = job.input(1).ints();
    for i in row_tiles(job).range(tile) {
        let id = ids[i] as usize;
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
        for (i, &id) in self.job.input(0).ints().iter().enumerate() {
            let id = id as usize;
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
