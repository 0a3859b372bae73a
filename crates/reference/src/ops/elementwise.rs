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

pub(super) fn unary(operands: Operands<'_>, f: Unary) -> Out {
    let x = operands.floats(0)?;
    let f = match f {
        Unary::Tanh => f64::tanh,
        Unary::Sigmoid => sigmoid,
        Unary::Silu => silu,
        Unary::Gelu => gelu,
        Unary::Exp => f64::exp,
        Unary::Log => f64::ln,
    };
    operands.made(x.shape, x.data.iter().map(|&x| f(x)).collect())
}

pub(super) fn affine(operands: Operands<'_>, scale: f32, bias: f32) -> Out {
    let x = operands.floats(0)?;
    let (scale, bias) = (f64::from(scale), f64::from(bias));
    operands.made(x.shape, x.data.iter().map(|&x| scale * x + bias).collect())
}

/// The activation of a gated linear unit.
fn activation(kind: GluKind, x: f64) -> f64 {
    match kind {
        GluKind::Swiglu => silu(x),
        GluKind::Geglu => gelu(x),
    }
}

/// Its derivative.
fn slope(kind: GluKind, x: f64) -> f64 {
    match kind {
        GluKind::Swiglu => {
            let s = sigmoid(x);
            s + x * s * (1.0 - s)
        }
        GluKind::Geglu => {
            let (u, du) = gelu_inner(x);
            let t = u.tanh();
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du
        }
    }
}

pub(super) fn glu(operands: Operands<'_>, kind: GluKind) -> Out {
    let (gate, up) = (operands.floats(0)?, operands.floats(1)?);
    let out = gate.data.iter().zip(up.data).map(|(&g, &u)| activation(kind, g) * u).collect();
    operands.made(up.shape, out)
}

pub(super) fn glu_back(operands: Operands<'_>, kind: GluKind, wrt: GluOperand) -> Out {
    let (gate, up, dy) = (operands.floats(0)?, operands.floats(1)?, operands.floats(2)?);
    let mut out = operands.zeros(up.shape)?;
    for (i, out) in out.iter_mut().enumerate() {
        *out = match wrt {
            GluOperand::Up => dy.data[i] * activation(kind, gate.data[i]),
            GluOperand::Gate => dy.data[i] * up.data[i] * slope(kind, gate.data[i]),
        };
    }
    operands.made(up.shape, out)
}
