//! What is dropped follows from counters: [`graph::Dropout`] says how.

use std::ops::Range;

use graph::{Call, DType, Dropout, Needs};

use super::{Support, dense, row_tiles, rows};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};

#[cfg(test)]
mod tests;

/// Columns whose words one round of the generator gives: four for each lane.
const GROUP: usize = 4 * LANES;

/// `x` as rows; the counters dense.
pub(super) fn supports(call: &Call<'_>) -> Support {
    rows(call, 0)?;
    dense(call, 1, DType::I32)?;
    dense(call, 2, DType::I32)?;
    Ok(Needs::default())
}

pub(super) fn run_tile(job: &Job<'_>, dropout: Dropout, tile: usize) {
    job.isa.run(Masked { job, dropout, range: row_tiles(job).range(tile) });
}

/// Some vectors of the result.
struct Masked<'a> {
    job: &'a Job<'a>,
    dropout: Dropout,
    range: Range<usize>,
}

impl Task for Masked<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Masked { job, dropout, range } = self;
        let shape = job.out.shape;
        let (x, cols) = (job.input(0).rows::<f32>(), shape.cols());
        let (rows, key) = (job.input(1).ints(), job.input(2).ints());
        let key = [key[0] as u32, key[1] as u32];
        let vectors = shape.rows() / shape.dim(0).max(1);
        let scale = s.splat(dropout.scale());
        let threshold = dropout.threshold();
        for i in range {
            let (t, u) = (i / vectors, i % vectors);
            let row = [rows[2 * t] as u32, rows[2 * t + 1] as u32];
            let (from, to) = (x.row(i), job.out_row::<f32>(i));
            let first = u * cols.div_ceil(GROUP);
            for (group, at) in (0..cols).step_by(GROUP).enumerate() {
                let place = ((first + group) * LANES) as u32;
                let words = words(place, [dropout.site, row[0], row[1]], key);
                for (w, words) in words.iter().enumerate() {
                    let at = at + w * LANES;
                    if at >= cols {
                        break;
                    }
                    let mut kept = [0i32; LANES];
                    for (kept, &word) in kept.iter_mut().zip(words) {
                        *kept = i32::from(word >= threshold);
                    }
                    let n = cols - at;
                    // SAFETY: vector `i` of the result is this tile's, and x has as many columns;
                    // the array has 16 elements, and an i32 the size and alignment of an f32.
                    unsafe {
                        let kept = s.bits(s.load(kept.as_ptr().cast()));
                        let kept = s.i32_gt(kept, s.i32_splat(0));
                        let v = s.mul(s.load_first(from.add(at), n), scale);
                        s.store_first(to.add(at), s.select(kept, v, s.zero()), n);
                    }
                }
            }
        }
    }
}

/// Philox4x32-10 of 16 counters whose first words follow each other: word by word.
///
/// Plain arrays, which the compiler makes vectors of with the instructions of whoever calls.
#[inline(always)]
fn words(place: u32, rest: [u32; 3], key: [u32; 2]) -> [[u32; LANES]; 4] {
    let mut a: [u32; LANES] = std::array::from_fn(|lane| place.wrapping_add(lane as u32));
    let [mut b, mut c, mut d] = rest.map(|word| [word; LANES]);
    let [mut k, mut l] = key;
    for _ in 0..10 {
        for lane in 0..LANES {
            let p = u64::from(a[lane]) * 0xd251_1f53;
            let q = u64::from(c[lane]) * 0xcd9e_8d57;
            a[lane] = (q >> 32) as u32 ^ b[lane] ^ k;
            b[lane] = q as u32;
            c[lane] = (p >> 32) as u32 ^ d[lane] ^ l;
            d[lane] = p as u32;
        }
        k = k.wrapping_add(0x9e37_79b9);
        l = l.wrapping_add(0xbb67_ae85);
    }
    [a, b, c, d]
}
