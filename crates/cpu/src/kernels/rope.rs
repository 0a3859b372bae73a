//! Rotary position embedding.

use std::ops::Range;

use graph::{Call, DType, Needs, RopeAngles, RopeStyle, Yarn};

use super::{Support, TILE_ELEMENTS, Tiles, dense, dense_last, rows};
use crate::job::{Job, Scratch};
use crate::simd::{LANES, Simd, Task};

/// Positions of a tile of the table: each costs some sines.
const TABLE_ROWS: usize = 32;

pub(super) fn supports_table(call: &Call<'_>) -> Support {
    dense(call, 0, DType::I32)?;
    if call.args.len() > 1 {
        dense(call, 1, DType::F32)?;
    }
    // `dims / 2` frequencies in f64.
    Ok(super::needs(&[call.out.shape.cols()]))
}

/// Heads of any strides; rows of the table.
pub(super) fn supports(call: &Call<'_>) -> Support {
    dense_last(call, 0)?;
    rows(call, 1)?;
    Ok(Needs::default())
}

fn grid(job: &Job<'_>) -> Tiles {
    let shape = job.out.shape;
    match job.op {
        graph::Op::RopeTable(_) => Tiles::new(shape.dim(0), TABLE_ROWS),
        _ => Tiles::new(shape.dim(0), TILE_ELEMENTS / (shape.dim(1) * shape.dim(2)).max(1)),
    }
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    grid(job).count
}

/// Angles in f64, cosines and sines rounded once.
pub(super) fn table_tile(
    job: &Job<'_>,
    angles: &RopeAngles,
    tile: usize,
    mut scratch: Scratch<'_>,
) {
    let half = angles.dims / 2;
    let memory = scratch.take(2 * half);
    // SAFETY: f64 has no invalid bits, and the scratch is aligned to 64 bytes.
    let (_, frequencies, _) = unsafe { memory.align_to_mut::<f64>() };
    let factors = job.inputs.get(1).map(|f| {
        // SAFETY: `supports` asked for a dense f32 operand.
        unsafe { f.slice::<f32>() }
    });
    let base = f64::from(angles.base.get());
    for (i, f) in frequencies.iter_mut().enumerate() {
        *f = base.powf(-2.0 * i as f64 / angles.dims as f64);
        if let Some(factors) = factors {
            *f /= f64::from(factors[i]);
        }
    }
    let scale = f64::from(angles.freq_scale.get());
    let (ramp, size) = match &angles.yarn {
        Some(yarn) => (Some(Ramp::new(angles, yarn)), {
            f64::from(yarn.attn_factor.get()) * (1.0 - 0.1 * scale.ln())
        }),
        None => (None, 1.0),
    };
    for (i, f) in frequencies.iter_mut().enumerate() {
        let mix = ramp.as_ref().map_or(0.0, |ramp| ramp.at(i));
        *f *= scale * (1.0 - mix) + mix;
    }
    let positions = job.input(0).ints();
    for t in grid(job).range(tile) {
        // SAFETY: row `t` of the result, of `dims` elements, is this tile's.
        let row = unsafe { std::slice::from_raw_parts_mut(job.out_row::<f32>(t), 2 * half) };
        let (cosines, sines) = row.split_at_mut(half);
        let pairs = cosines.iter_mut().zip(sines).zip(&*frequencies);
        for (i, ((cos, sin), f)) in pairs.enumerate() {
            let position = match angles.sections {
                None => positions[t],
                Some(sections) => positions[4 * t + sections.of(i)],
            };
            let (s, c) = (f64::from(position) * f).sin_cos();
            (*cos, *sin) = ((c * size) as f32, (s * size) as f32);
        }
    }
}

/// How far each pair extrapolates: YaRN's ramp, from `ext_factor` down to 0.
struct Ramp {
    low: f64,
    width: f64,
    ext_factor: f64,
}

impl Ramp {
    fn new(angles: &RopeAngles, yarn: &Yarn) -> Ramp {
        let (dims, base) = (angles.dims as f64, f64::from(angles.base.get()));
        // The pair that makes so many turns within the original context.
        let pair = |turns: f32| {
            let context = f64::from(yarn.context);
            let circumference = std::f64::consts::TAU * f64::from(turns);
            dims * (context / circumference).ln() / (2.0 * base.ln())
        };
        let (mut low, mut high) = (pair(yarn.beta_fast.get()), pair(yarn.beta_slow.get()));
        if yarn.round {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dims - 1.0));
        let ext_factor = f64::from(yarn.ext_factor.get());
        Ramp { low, width: (high - low).max(0.001), ext_factor }
    }

    fn at(&self, pair: usize) -> f64 {
        let ramp = ((pair as f64 - self.low) / self.width).clamp(0.0, 1.0);
        (1.0 - ramp) * self.ext_factor
    }
}

pub(super) fn run_tile(job: &Job<'_>, style: RopeStyle, inverse: bool, tile: usize) {
    job.isa.run(Rotate { job, style, inverse, rows: grid(job).range(tile) });
}

struct Rotate<'a> {
    job: &'a Job<'a>,
    style: RopeStyle,
    inverse: bool,
    rows: Range<usize>,
}

impl Task for Rotate<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (x, table) = (self.job.input(0), self.job.input(1));
        let (heads, width) = (x.arg.shape.dim(1), x.arg.shape.dim(2));
        let half = table.arg.shape.dim(1) / 2;
        let sign = s.splat(if self.inverse { -1.0 } else { 1.0 });
        for t in self.rows {
            let cos = table.rows::<f32>().row(t);
            for h in 0..heads {
                let at = t * x.stride(0) + h * x.stride(1);
                let from = x.ptr::<f32>().wrapping_add(at);
                let to = self.job.out::<f32>().wrapping_add((t * heads + h) * width);
                let mut i = 0;
                while i < half {
                    let n = half - i;
                    // SAFETY: row `t` of the result is this tile's; the head has `width`
                    // elements, of which `2 half` rotate; the table's row has as many.
                    unsafe {
                        let c = s.load_first(cos.add(i), n);
                        let d = s.mul(sign, s.load_first(cos.add(half + i), n));
                        match self.style {
                            RopeStyle::Halves => {
                                let a = s.load_first(from.add(i), n);
                                let b = s.load_first(from.add(half + i), n);
                                let (a, b) = rotate(s, a, b, c, d);
                                s.store_first(to.add(i), a, n);
                                s.store_first(to.add(half + i), b, n);
                            }
                            RopeStyle::Interleaved => {
                                // Pairs `i ..` are elements `2 i ..`, in up to two vectors.
                                let (n, m) = (2 * n, (2 * n).saturating_sub(LANES));
                                let (from, to) = (from.add(2 * i), to.add(2 * i));
                                let a = s.load_first(from, n);
                                let b = s.load_first(from.wrapping_add(LANES), m);
                                let (a, b) = s.unzip(a, b);
                                let (a, b) = rotate(s, a, b, c, d);
                                let (a, b) = s.zip(a, b);
                                s.store_first(to, a, n);
                                s.store_first(to.wrapping_add(LANES), b, m);
                            }
                        }
                    }
                    i += LANES;
                }
                let rest = width - 2 * half;
                // SAFETY: as above: the elements that do not rotate.
                unsafe {
                    std::ptr::copy_nonoverlapping(from.add(2 * half), to.add(2 * half), rest)
                };
            }
        }
    }
}

/// `(a cos - b sin, a sin + b cos)`
#[inline(always)]
fn rotate<S: Simd>(s: S, a: S::F32, b: S::F32, cos: S::F32, sin: S::F32) -> (S::F32, S::F32) {
    (s.fnma(b, sin, s.mul(a, cos)), s.fma(b, cos, s.mul(a, sin)))
}
