//! Recurrences over packed sequences.

use super::{Operand, Rule, f32s, fit, i32s, is, operands, want};
use crate::*;

type Checked<T> = std::result::Result<T, String>;

fn rank(operand: Operand, n: usize, what: &str) -> Checked<Shape> {
    want(operand.1.rank() == n, || format!("{what}, is {}", operand.1))?;
    Ok(operand.1)
}

fn seqs(operand: Operand) -> Checked<usize> {
    let (dtype, shape) = operand;
    want(dtype == DType::I32 && shape.rank() == 2 && shape.dim(1) == 3, || {
        format!("seqs must be i32 [S, 3], is {dtype} {shape}")
    })?;
    Ok(shape.dim(0))
}

/// The length of a flat tensor of so many copies of shapes.
fn flat(parts: &[(Shape, usize)]) -> Checked<Shape> {
    let mut total = 0usize;
    for (shape, times) in parts {
        let size = shape.elements().checked_mul(*times);
        total = size.and_then(|n| n.checked_add(total)).ok_or("the result is too large")?;
    }
    fit(&[total])
}

/// `x [T, C], state [S, W-1, C], seqs`, and `w [C, W]` where there is one.
fn convolution(x: Operand, w: Option<Operand>, state: Operand, s: Operand) -> Checked<()> {
    let x = rank(x, 2, "x must be [T, C]")?;
    let sequences = seqs(s)?;
    let Some(w) = w else {
        let state = rank(state, 3, "the state must be [S, W-1, C]")?;
        return is(state, &[sequences, state.dim(1), x.dim(1)], "the state");
    };
    let w = rank(w, 2, "w must be [C, W]")?;
    want(w.dim(0) == x.dim(1) && w.dim(1) > 0, || format!("x {x} and w {w} do not match"))?;
    is(state.1, &[sequences, w.dim(1) - 1, x.dim(1)], "the state")
}

/// What [`Op::SsmScan`] gives.
fn scan(args: &[Operand; 7]) -> Checked<Shape> {
    let [x, dt, a, b, c, state, s] = *args;
    let x = rank(x, 3, "x must be [T, H, D]")?;
    let sequences = seqs(s)?;
    let (t, h) = (x.dim(0), x.dim(1));
    is(dt.1, &[t, h], "dt")?;
    let b = rank(b, 3, "b must be [T, G, N]")?;
    let (groups, n) = (b.dim(1), b.dim(2));
    want(b.dim(0) == t, || format!("x {x} and b {b} do not match"))?;
    want(groups > 0 && h.is_multiple_of(groups), || {
        format!("{h} heads are not a multiple of {groups} groups")
    })?;
    is(c.1, b.dims(), "c")?;
    want(a.1.dims() == [h, n] || a.1.dims() == [h, 1], || {
        format!("a must be [{h}, {n}] or [{h}, 1], is {}", a.1)
    })?;
    is(state.1, &[sequences, h, x.dim(2), n], "the state")?;
    flat(&[(x, 1), (state.1, 1)])
}

/// What [`Op::GatedDeltaRule`] gives.
fn delta(args: &[Operand; 7], attrs: &GatedDeltaAttrs) -> Checked<Shape> {
    let [q, k, v, g, beta, state, s] = *args;
    want(attrs.scale.get().is_finite(), || "scale must be finite".into())?;
    let q = rank(q, 3, "q must be [T, Hk, Dk]")?;
    let v = rank(v, 3, "v must be [T, Hv, Dv]")?;
    let sequences = seqs(s)?;
    let (t, heads, width) = (v.dim(0), v.dim(1), q.dim(2));
    is(k.1, q.dims(), "k")?;
    want(q.dim(0) == t, || format!("q {q} and v {v} do not match"))?;
    want(q.dim(1) > 0 && heads.is_multiple_of(q.dim(1)), || {
        format!("{heads} value heads are not a multiple of {} key heads", q.dim(1))
    })?;
    want(g.1.dims() == [t, heads] || g.1.dims() == [t, heads, width], || {
        format!("g must be [{t}, {heads}] or [{t}, {heads}, {width}], is {}", g.1)
    })?;
    is(beta.1, &[t, heads], "beta")?;
    is(state.1, &[sequences, heads, width, v.dim(2)], "the state")?;
    flat(&[(v, 1), (state.1, 1)])
}

/// All operands but the cotangents of outputs and exit states, which must be as given.
fn with_cotangents(args: &[Operand], outputs: usize) -> Checked<[Operand; 7]> {
    let [x0, x1, x2, x3, x4, x5, x6, dy, d_exit] = operands(args)?;
    let args = [x0, x1, x2, x3, x4, x5, x6];
    is(dy.1, args.get(outputs).map_or(&[], |y| y.1.dims()), "dy")?;
    is(d_exit.1, x5.1.dims(), "dexit")?;
    Ok(args)
}

/// The shape rule of the recurrences; `op` is one.
pub(super) fn infer(op: &Op, args: &[Operand]) -> Rule {
    let f = DType::F32;
    match op {
        Op::SsmConv => {
            f32s(args, &[0, 1, 2])?;
            i32s(args, &[3])?;
            let [x, w, state, s] = operands(args)?;
            convolution(x, Some(w), state, s)?;
            Ok((f, x.1))
        }
        Op::SsmConvBack { wrt } => {
            f32s(args, &[0, 1, 2, 4])?;
            i32s(args, &[3])?;
            let [x, w, state, s, dy] = operands(args)?;
            convolution(x, Some(w), state, s)?;
            is(dy.1, x.1.dims(), "dy")?;
            Ok(match wrt {
                SsmConvOperand::X => (f, x.1),
                SsmConvOperand::Weight => (f, w.1),
                SsmConvOperand::State => (f, state.1),
            })
        }
        Op::SsmConvState => {
            f32s(args, &[0, 1])?;
            i32s(args, &[2])?;
            let [x, state, s] = operands(args)?;
            convolution(x, None, state, s)?;
            Ok((f, state.1))
        }
        Op::SsmConvStateBack { wrt } => {
            f32s(args, &[0, 1, 3])?;
            i32s(args, &[2])?;
            let [x, state, s, dy] = operands(args)?;
            convolution(x, None, state, s)?;
            is(dy.1, state.1.dims(), "dy")?;
            Ok(match wrt {
                SsmConvStateOperand::X => (f, x.1),
                SsmConvStateOperand::State => (f, state.1),
            })
        }
        Op::SsmScan => {
            f32s(args, &[0, 1, 2, 3, 4, 5])?;
            i32s(args, &[6])?;
            Ok((f, scan(&operands(args)?)?))
        }
        Op::SsmScanBack { parts } => {
            f32s(args, &[0, 1, 2, 3, 4, 5, 7, 8])?;
            i32s(args, &[6])?;
            let args = with_cotangents(args, 0)?;
            scan(&args)?;
            let [x, dt, a, b, c, state, s] = args.map(|operand| operand.1);
            let heads = dt.dim(1) / b.dim(1).max(1);
            want((1..=heads.max(1)).contains(parts), || format!("{parts} parts of {heads} heads"))?;
            let sizes = [(x, 1), (dt, 1), (a, s.dim(0)), (b, *parts), (c, *parts), (state, 1)];
            Ok((f, flat(&sizes)?))
        }
        Op::GatedDeltaRule(attrs) => {
            f32s(args, &[0, 1, 2, 3, 4, 5])?;
            i32s(args, &[6])?;
            Ok((f, delta(&operands(args)?, attrs)?))
        }
        Op::GatedDeltaRuleBack(attrs) => {
            f32s(args, &[0, 1, 2, 3, 4, 5, 7, 8])?;
            i32s(args, &[6])?;
            let args = with_cotangents(args, 2)?;
            delta(&args, attrs)?;
            let [q, k, v, g, beta, state, _] = args.map(|operand| operand.1);
            let shared = v.dim(1) / q.dim(1).max(1);
            Ok((f, flat(&[(q, shared), (k, shared), (v, 1), (g, 1), (beta, 1), (state, 1)])?))
        }
        _ => Err("is no recurrence".into()),
    }
}
