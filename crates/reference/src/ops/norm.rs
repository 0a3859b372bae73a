//! Normalization and rotary position embedding.

use graph::{NormOperand, RopeAngles, RopeStyle, Shape};

use super::{Operands, Out};
use crate::Mode;

/// `1 / sqrt(mean(x^2) + eps)`
fn inverse_rms(x: &[f64], eps: f32) -> f64 {
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    1.0 / (mean_square + f64::from(eps)).sqrt()
}

pub(super) fn rms_norm(operands: Operands<'_>, eps: f32) -> Out {
    let (x, w) = (operands.floats(0)?, operands.floats(1)?);
    let mut out = operands.zeros(x.shape)?;
    let n = x.shape.cols();
    for row in 0..x.shape.rows() {
        let r = inverse_rms(x.row(row), eps);
        for i in 0..n {
            out[row * n + i] = x.row(row)[i] * r * w.data[i];
        }
    }
    operands.made(x.shape, out)
}

pub(super) fn rms_norm_back(operands: Operands<'_>, eps: f32, wrt: NormOperand) -> Out {
    let (x, w, dy) = (operands.floats(0)?, operands.floats(1)?, operands.floats(2)?);
    let shape = match wrt {
        NormOperand::X => x.shape,
        NormOperand::Weight => w.shape,
    };
    let mut out = operands.zeros(shape)?;
    let n = x.shape.cols();
    for row in 0..x.shape.rows() {
        let (x, dy) = (x.row(row), dy.row(row));
        let r = inverse_rms(x, eps);
        let mean = (0..n).map(|i| w.data[i] * dy[i] * x[i]).sum::<f64>() / n as f64;
        for i in 0..n {
            match wrt {
                NormOperand::X => {
                    out[row * n + i] = r * (w.data[i] * dy[i] - x[i] * r * r * mean);
                }
                NormOperand::Weight => out[i] += dy[i] * x[i] * r,
            }
        }
    }
    operands.made(shape, out)
}

pub(super) fn rope_table(
    operands: Operands<'_>,
    angles: &RopeAngles,
    shape: Shape,
    mode: Mode,
) -> Out {
    let pos = operands.ints(0)?;
    let half = angles.dims / 2;
    let mut out = operands.zeros(shape)?;
    let rounded = |x: f64| match mode {
        Mode::Exact => f64::from(x as f32),
        Mode::Smooth => x,
    };
    for (t, &pos) in pos.data.iter().enumerate() {
        for i in 0..half {
            let factor = if angles.factors { operands.floats(1)?.data[i] } else { 1.0 };
            let exponent = -2.0 * i as f64 / angles.dims as f64;
            let frequency = f64::from(angles.base.get()).powf(exponent) / factor;
            let theta = f64::from(pos) * f64::from(angles.freq_scale.get()) * frequency;
            out[t * angles.dims + i] = rounded(theta.cos());
            out[t * angles.dims + half + i] = rounded(theta.sin());
        }
    }
    operands.made(shape, out)
}

pub(super) fn rope(operands: Operands<'_>, style: RopeStyle, inverse: bool) -> Out {
    let (x, table) = (operands.floats(0)?, operands.floats(1)?);
    let mut out = operands.zeros(x.shape)?;
    out.copy_from_slice(x.data);
    let (heads, width, half) = (x.dim(1), x.dim(2), table.dim(1) / 2);
    for t in 0..x.dim(0) {
        for h in 0..heads {
            let head = (t * heads + h) * width;
            for i in 0..half {
                let (a, b) = match style {
                    RopeStyle::Interleaved => (head + 2 * i, head + 2 * i + 1),
                    RopeStyle::Halves => (head + i, head + i + half),
                };
                let (cos, sin) = (table.row(t)[i], table.row(t)[half + i]);
                let sin = if inverse { -sin } else { sin };
                out[a] = x.data[a] * cos - x.data[b] * sin;
                out[b] = x.data[a] * sin + x.data[b] * cos;
            }
        }
    }
    operands.made(x.shape, out)
}
