//! Moving elements: copies of strided values, padding, joining.

use graph::{Call, DType, Needs};

use super::elementwise::{Runs, range};
use super::{Support, dense, no_kernel};
use crate::job::Job;

/// Any strides, any type with elements.
pub(super) fn supports_copy(call: &Call<'_>) -> Support {
    let arg = super::arg(call, 0)?;
    if arg.resident {
        return no_kernel("a copy of a packed weight");
    }
    if arg.dtype.element_bytes().is_none() {
        return no_kernel(format!("a copy of {}", arg.dtype));
    }
    Ok(Needs::default())
}

/// Dense operands.
pub(super) fn supports_join(call: &Call<'_>) -> Support {
    for i in 0..call.args.len() {
        dense(call, i, DType::F32)?;
    }
    Ok(Needs::default())
}

pub(super) fn copy_tile(job: &Job<'_>, tile: usize) {
    match job.out.dtype.element_bytes() {
        Some(4) => copy::<u32>(job, tile),
        Some(2) => copy::<u16>(job, tile),
        _ => {}
    }
}

fn copy<T: Copy>(job: &Job<'_>, tile: usize) {
    let input = job.input(0);
    let runs = Runs::new(&job.out.shape, [(&input.arg.shape, &input.arg.layout.strides)]);
    let range = range(job, tile);
    let mut at = range.start;
    while at < range.end {
        let (run, from) = (at / runs.len, at % runs.len);
        let n = (runs.len - from).min(range.end - at);
        let ([start], [stride]) = (runs.offsets(run), runs.strides);
        let source = input.ptr::<T>().wrapping_add(start + from * stride);
        let to = job.out::<T>().wrapping_add(at);
        // SAFETY: elements `at .. at + n` of the result are this tile's, and those of the operand
        // are where its layout says.
        unsafe {
            if stride == 1 {
                std::ptr::copy_nonoverlapping(source, to, n);
            } else {
                for i in 0..n {
                    *to.add(i) = *source.add(i * stride);
                }
            }
        }
        at += n;
    }
}

/// The number of elements of one entry of dimension `dim`.
fn inner(job: &Job<'_>, dim: usize) -> usize {
    job.out.shape.dims().iter().skip(dim + 1).product()
}

pub(super) fn pad_tile(job: &Job<'_>, dim: usize, before: usize, tile: usize) {
    let inner = inner(job, dim);
    let row = job.out.shape.dim(dim) * inner;
    let (begin, len) = (before * inner, job.input(0).arg.shape.dim(dim) * inner);
    let source = job.input(0).ptr::<f32>();
    let range = range(job, tile);
    let mut at = range.start;
    while at < range.end {
        let (outer, from) = (at / row, at % row);
        let to = job.out::<f32>().wrapping_add(at);
        // SAFETY: elements of the result in the tile's range are this tile's; entry `from` of a
        // row is element `from - begin` of the operand's row while inside of it.
        at += unsafe {
            if from >= begin && from < begin + len {
                let n = (begin + len - from).min(range.end - at);
                let source = source.wrapping_add(outer * len + from - begin);
                std::ptr::copy_nonoverlapping(source, to, n);
                n
            } else {
                let edge = if from < begin { begin } else { row };
                let n = (edge - from).min(range.end - at);
                std::slice::from_raw_parts_mut(to, n).fill(0.0);
                n
            }
        };
    }
}

pub(super) fn concat_tile(job: &Job<'_>, dim: usize, tile: usize) {
    let inner = inner(job, dim);
    let row = job.out.shape.dim(dim) * inner;
    let range = range(job, tile);
    let mut at = range.start;
    while at < range.end {
        let (outer, mut from) = (at / row, at % row);
        let part = job.inputs.iter().find_map(|input| {
            let len = input.arg.shape.dim(dim) * inner;
            if from < len {
                return Some((input, len));
            }
            from -= len;
            None
        });
        // The operands fill the row.
        let Some((input, len)) = part else { return };
        let n = (len - from).min(range.end - at);
        let source = input.ptr::<f32>().wrapping_add(outer * len + from);
        // SAFETY: elements `at .. at + n` of the result are this tile's, and this part of its row
        // is the operand's row `outer`.
        unsafe { std::ptr::copy_nonoverlapping(source, job.out::<f32>().wrapping_add(at), n) };
        at += n;
    }
}
