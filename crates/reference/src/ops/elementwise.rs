//! Ops that work element by element.

use graph::{Binary, GluKind, GluOperand, Shape, Unary};

use super::{Operands, Out};
use crate::value::{indices, offset};

pub(super) fn binary(operands: Operands<'_>, kind: Binary, shape: Shape) -> Out {
    let (a, b) = (operands.floats(0)?, operands.floats(1)?);
    let mut out = operands.zeros(shape)?;
    for (out, index) in out.iter_mut().zip(indices(shape)) {
        let a = a.data[broadcast_offset(a.shape, shape, &index)];
        let b = b.data[broadcast_offset(b.shape, shape, &index)];
        *out = match kind {
            Binary::Add => a + b,
            Binary::Sub => a - b,
            Binary::Mul => a * b,
            Binary::Div => a / b,
            Binary::Min => {
                if b < a {
                    b
                } else {
                    a
                }
            }
            Binary::Max => {
                if b > a {
                    b
                } else {
                    a
                }
            }
        };
    }
    operands.made(shape, out)
}

/// Where a tensor of shape `from`, broadcast to `to`, has the element of an index of `to`.
pub(super) fn broadcast_offset(from: Shape, to: Shape, index: &[usize]) -> usize {
    let lead = to.rank() - from.rank();
    let mut own = [0; graph::MAX_RANK];
    for d in 0..from.rank() {
        own[d] = if from.dim(d) == 1 { 0 } else { index[d + lead] };
    }
    offset(from, &own)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The argument of GELU's tanh, and its derivative.
fn gelu_inner(x: f64) -> (f64, f64) {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    (c * (x + 0.044715 * x * x * x), c * (1.0 + 3.0 * 0.044715 * x * x))
}

fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + gelu_inner(x).0.tanh())
}

/// The f32 nearest to 1.702, which the gradient is built with: where the slope crosses zero, the
/// difference would show.
const QUICK: f64 = 1.702f32 as f64;

fn gelu_quick(x: f64) -> f64 {
    x * sigmoid(QUICK * x)
}

/// The distribution function of the normal: a series near 0 and a continued fraction in the
/// tails (Abramowitz and Stegun, 26.2.11 and 26.2.14).
fn normal_cdf(x: f64) -> f64 {
    if x.abs() < 3.0 {
        let (mut term, mut sum, mut n) = (x, x, 1.0);
        while term.abs() > 1e-18 {
            n += 2.0;
            term *= x * x / n;
            sum += term;
        }
        return 0.5 + sum * normal_density(x);
    }
    // Where the density is 0 as an f64, so is the tail.
    let mut fraction = x.abs();
    for k in (1..=200).rev() {
        fraction = x.abs() + f64::from(k) / fraction;
    }
    let tail = normal_density(x) / fraction;
    if x > 0.0 { 1.0 - tail } else { tail }
}

fn normal_density(x: f64) -> f64 {
    (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

fn gelu_erf(x: f64) -> f64 {
    x * normal_cdf(x)
}

pub(super) fn clamp(operands: Operands<'_>, min: f32, max: f32) -> Out {
    let x = operands.floats(0)?;
    let (min, max) = (f64::from(min), f64::from(max));
    // Not `clamp`, which panics where the bounds are out of order.
    operands.made(
        x.shape,
        x.data
            .iter()
            .map(|&x| {
                if x < min {
                    min
                } else if x > max {
                    max
                } else {
                    x
                }
            })
            .collect(),
    )
}

pub(super) fn clamp_back(operands: Operands<'_>, min: f32, max: f32) -> Out {
    let (x, dy) = (operands.floats(0)?, operands.floats(1)?);
    let inside = |x: f64| f64::from(min) < x && x < f64::from(max);
    let pairs = x.data.iter().zip(dy.data);
    operands.made(x.shape, pairs.map(|(&x, &dy)| if inside(x) { dy } else { 0.0 }).collect())
}

pub(super) fn fill(operands: Operands<'_>, value: f32, shape: Shape) -> Out {
    let mut out = operands.zeros(shape)?;
    out.fill(f64::from(value));
    operands.made(shape, out)
}

pub(super) fn unary(operands: Operands<'_>, f: Unary) -> Out {
    let x = operands.floats(0)?;
    let f: fn(f64) -> f64 = match f {
        Unary::Tanh => f64::tanh,
        Unary::Sigmoid => sigmoid,
        Unary::Silu => silu,
        Unary::Gelu => gelu,
        Unary::Exp => f64::exp,
        Unary::Log => f64::ln,
        Unary::Neg => |x| -x,
        Unary::Abs => f64::abs,
        Unary::Sqr => |x| x * x,
        Unary::Sqrt => f64::sqrt,
        Unary::Rsqrt => |x| 1.0 / x.sqrt(),
        Unary::Expm1 => f64::exp_m1,
        Unary::Log1p => f64::ln_1p,
        Unary::Sin => f64::sin,
        Unary::Cos => f64::cos,
        Unary::Relu => |x| if x > 0.0 { x } else { 0.0 },
        Unary::GeluErf => gelu_erf,
        Unary::GeluQuick => gelu_quick,
        Unary::NormalCdf => normal_cdf,
        Unary::Softplus => |x| x.max(0.0) + (-x.abs()).exp().ln_1p(),
        Unary::Step => |x| if x > 0.0 { 1.0 } else { 0.0 },
        Unary::Sign => |x| {
            if x > 0.0 {
                1.0
            } else if x < 0.0 {
                -1.0
            } else {
                0.0
            }
        },
    };
    operands.made(x.shape, x.data.iter().map(|&x| f(x)).collect())
}

pub(super) fn affine(operands: Operands<'_>, scale: f32, bias: f32) -> Out {
    let x = operands.floats(0)?;
    let (scale, bias) = (f64::from(scale), f64::from(bias));
    operands.made(x.shape, x.data.iter().map(|&x| scale * x + bias).collect())
}

/// `p` and its derivative, of the activation of a gated linear unit.
fn activation(kind: GluKind, x: f64) -> (f64, f64) {
    match kind {
        GluKind::Swiglu => swish(1.0, x),
        GluKind::Geglu => {
            let (u, du) = gelu_inner(x);
            let t = u.tanh();
            (gelu(x), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du)
        }
        GluKind::GegluErf => (gelu_erf(x), normal_cdf(x) + x * normal_density(x)),
        GluKind::GegluQuick => swish(QUICK, x),
        GluKind::Reglu if x > 0.0 => (x, 1.0),
        GluKind::Reglu => (0.0, 0.0),
        GluKind::SwigluOai { alpha, limit } => {
            let limit = f64::from(limit.get());
            let (value, slope) = swish(f64::from(alpha.get()), x.min(limit));
            (value, if x < limit { slope } else { 0.0 })
        }
    }
}

/// `x sigmoid(c x)` and its derivative.
fn swish(c: f64, x: f64) -> (f64, f64) {
    let s = sigmoid(c * x);
    (x * s, s + c * x * s * (1.0 - s))
}

/// What the linear half multiplies by, and the derivative.
fn linear(kind: GluKind, up: f64) -> (f64, f64) {
    match kind {
        GluKind::SwigluOai { limit, .. } => {
            let limit = f64::from(limit.get());
            (up.min(limit).max(-limit) + 1.0, if up.abs() < limit { 1.0 } else { 0.0 })
        }
        _ => (up, 1.0),
    }
}

pub(super) fn glu(operands: Operands<'_>, kind: GluKind) -> Out {
    let (gate, up) = (operands.floats(0)?, operands.floats(1)?);
    let halves = gate.data.iter().zip(up.data);
    let out = halves.map(|(&g, &u)| activation(kind, g).0 * linear(kind, u).0).collect();
    operands.made(up.shape, out)
}

pub(super) fn glu_back(operands: Operands<'_>, kind: GluKind, wrt: GluOperand) -> Out {
    let (gate, up, dy) = (operands.floats(0)?, operands.floats(1)?, operands.floats(2)?);
    let mut out = operands.zeros(up.shape)?;
    for (i, out) in out.iter_mut().enumerate() {
        *out = match wrt {
            GluOperand::Up => {
                dy.data[i] * activation(kind, gate.data[i]).0 * linear(kind, up.data[i]).1
            }
            GluOperand::Gate => {
                dy.data[i] * linear(kind, up.data[i]).0 * activation(kind, gate.data[i]).1
            }
        };
    }
    operands.made(up.shape, out)
}
