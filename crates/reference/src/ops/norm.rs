//! Normalization and rotary position embedding.

use graph::{NormKind, NormOperand, RopeAngles, RopeStyle, Shape};

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

/// A row's result and its divisor.
fn normalized(x: &[f64], kind: NormKind, eps: f32) -> (Vec<f64>, f64) {
    let eps = f64::from(eps);
    let squares: f64 = x.iter().map(|x| x * x).sum();
    let (mean, divisor) = match kind {
        NormKind::Layer => {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let spread = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>();
            (mean, (spread / x.len() as f64 + eps).sqrt())
        }
        NormKind::L2Clamp => (0.0, squares.sqrt().max(eps)),
        NormKind::L2Add => (0.0, (squares + eps).sqrt()),
    };
    (x.iter().map(|x| (x - mean) / divisor).collect(), divisor)
}

pub(super) fn norm(operands: Operands<'_>, kind: NormKind, eps: f32) -> Out {
    let x = operands.floats(0)?;
    let rows = (0..x.shape.rows()).flat_map(|r| normalized(x.row(r), kind, eps).0);
    operands.made(x.shape, rows.collect())
}

pub(super) fn norm_back(operands: Operands<'_>, kind: NormKind, eps: f32) -> Out {
    let (x, dy) = (operands.floats(0)?, operands.floats(1)?);
    let mut out = operands.zeros(x.shape)?;
    let n = x.shape.cols();
    for row in 0..x.shape.rows() {
        let (y, divisor) = normalized(x.row(row), kind, eps);
        let dy = dy.row(row);
        let dot: f64 = y.iter().zip(dy).map(|(y, dy)| y * dy).sum();
        let (mean, along) = match kind {
            NormKind::Layer => (dy.iter().sum::<f64>() / n as f64, dot / n as f64),
            // The divisor is a constant there.
            NormKind::L2Clamp if divisor <= f64::from(eps) => (0.0, 0.0),
            NormKind::L2Clamp | NormKind::L2Add => (0.0, dot),
        };
        for i in 0..n {
            out[row * n + i] = (dy[i] - mean - y[i] * along) / divisor;
        }
    }
    operands.made(x.shape, out)
}

/// The limits of YaRN's ramp, in pairs.
fn yarn_limits(angles: &RopeAngles, yarn: &graph::Yarn) -> (f64, f64) {
    let dims = angles.dims as f64;
    let limit = |beta: f32| {
        let turns = f64::from(yarn.context) / (2.0 * std::f64::consts::PI * f64::from(beta));
        dims * turns.ln() / (2.0 * f64::from(angles.base.get()).ln())
    };
    let (low, high) = (limit(yarn.beta_fast.get()), limit(yarn.beta_slow.get()));
    let (low, high) = if yarn.round { (low.floor(), high.ceil()) } else { (low, high) };
    (low.max(0.0), high.min(dims - 1.0))
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
    for t in 0..shape.dim(0) {
        for i in 0..half {
            let pos = match angles.sections {
                None => pos.data[t],
                Some(sections) => pos.data[4 * t + sections.of(i)],
            };
            let factor = if angles.factors { operands.floats(1)?.data[i] } else { 1.0 };
            let exponent = -2.0 * i as f64 / angles.dims as f64;
            let frequency = f64::from(angles.base.get()).powf(exponent) / factor;
            let freq_scale = f64::from(angles.freq_scale.get());
            let whole = f64::from(pos) * frequency;
            let (mut theta, mut size) = (whole * freq_scale, 1.0);
            if let Some(yarn) = &angles.yarn {
                let (low, high) = yarn_limits(angles, yarn);
                let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                let mix = (1.0 - ramp) * f64::from(yarn.ext_factor.get());
                theta = theta * (1.0 - mix) + whole * mix;
                size = f64::from(yarn.attn_factor.get()) * (1.0 - 0.1 * freq_scale.ln());
            }
            out[t * angles.dims + i] = rounded(theta.cos() * size);
            out[t * angles.dims + half + i] = rounded(theta.sin() * size);
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
