//! Low-rank adapters of matrices, and of stacks of experts.

use super::{Operand, Rule, choices, f32s, fit, i32s, is, operands, want};
use crate::*;

type Checked<T> = std::result::Result<T, String>;

/// The shape of `x`, whose rows have two numbers each, as the key has.
pub(super) fn dropout(args: &[Operand], Dropout { p, .. }: Dropout) -> Rule {
    f32s(args, &[0])?;
    i32s(args, &[1, 2])?;
    let [x, rows, key] = operands(args)?;
    let p = p.get();
    want((0.0..1.0).contains(&p), || format!("p must be at least 0 and below 1, is {p}"))?;
    want(x.1.rank() >= 2, || format!("x must be [T, .., K], is {}", x.1))?;
    is(rows.1, &[x.1.dim(0), 2], "rows")?;
    is(key.1, &[2], "key")?;
    Ok((DType::F32, x.1))
}

/// So many operands, then three per slot.
fn count(args: &[Operand], head: usize, slots: usize) -> Checked<()> {
    let expected = slots.checked_mul(3).and_then(|n| n.checked_add(head));
    want(Some(args.len()) == expected && slots > 0, || {
        format!("{slots} slots take {head} + 3 x slots operands, was given {}", args.len())
    })
}

/// `A [r, k]`, `B [n, r]` and the scale of each slot, or those of stacks with `A [E, r, k]` and
/// `B [E, n, r]`; the first is operand `first`.
fn matrices(rest: &[Operand], first: usize, stacks: bool, k: usize, n: usize) -> Checked<()> {
    for (i, (dtype, _)) in rest.iter().enumerate() {
        want(*dtype == DType::F32, || format!("operand {} must be f32, is {dtype}", first + i))?;
    }
    let experts = match rest.first() {
        Some((_, a)) if stacks => Some(if a.rank() == 0 { 0 } else { a.dim(0) }),
        _ => None,
    };
    let lead = experts.map_or(String::new(), |e| format!("{e}, "));
    let of = |rows: usize, cols: usize| -> Vec<usize> {
        experts.into_iter().chain([rows, cols]).collect()
    };
    for (slot, chunk) in rest.chunks(3).enumerate() {
        let [a, b, scale] = operands(chunk)?;
        let rank = a.1.rank().checked_sub(2).map_or(0, |d| a.1.dim(d));
        want(a.1.dims() == of(rank, k) && rank > 0, || {
            format!("A of slot {slot} must be [{lead}r, {k}], is {}", a.1)
        })?;
        want(b.1.dims() == of(n, rank), || {
            format!("B of slot {slot} must be [{lead}{n}, {rank}], is {}", b.1)
        })?;
        is(scale.1, &[1], "scale")?;
    }
    Ok(())
}

/// `x` and `base` or `dy`, as [`Op::Lora`] has them: the widths of both.
fn rows_of(x: Operand, y: Operand, rows: Operand, what: &str) -> Checked<(usize, usize)> {
    want(x.1.rank() == 2 && y.1.rank() == 2 && x.1.dim(0) == y.1.dim(0), || {
        format!("x {} and {what} {} do not match", x.1, y.1)
    })?;
    is(rows.1, &[x.1.dim(0)], "rows")?;
    Ok((x.1.dim(1), y.1.dim(1)))
}

/// `x` and `base` or `dy`, as [`Op::LoraExperts`] has them: the widths of both.
fn pairs_of(
    x: Operand,
    y: Operand,
    rows: Operand,
    ids: Operand,
    what: &str,
) -> Checked<(usize, usize)> {
    let used = choices(x.1, ids.1, "x")?;
    want(y.1.rank() == 3 && y.1.dim(0) == x.1.dim(0) && y.1.dim(1) == used, || {
        format!("{what} {} and ids {} must be [T, U, N] and [T, U]", y.1, ids.1)
    })?;
    is(rows.1, &[x.1.dim(0)], "rows")?;
    Ok((x.1.dim(2), y.1.dim(2)))
}

pub(super) fn lora(args: &[Operand], slots: usize) -> Rule {
    count(args, 3, slots)?;
    f32s(args, &[0, 1])?;
    i32s(args, &[2])?;
    let [x, base, rows, rest @ ..] = args else {
        return Err("takes x, base and rows".into());
    };
    let (k, n) = rows_of(*x, *base, *rows, "base")?;
    matrices(rest, 3, false, k, n)?;
    Ok((DType::F32, base.1))
}

pub(super) fn lora_experts(args: &[Operand], slots: usize) -> Rule {
    count(args, 4, slots)?;
    f32s(args, &[0, 1])?;
    i32s(args, &[2, 3])?;
    let [x, base, rows, ids, rest @ ..] = args else {
        return Err("takes x, base, rows and ids".into());
    };
    let (k, n) = pairs_of(*x, *base, *rows, *ids, "base")?;
    matrices(rest, 4, true, k, n)?;
    Ok((DType::F32, base.1))
}

pub(super) fn lora_back(args: &[Operand], slots: usize, wrt: LoraOperand, slot: usize) -> Rule {
    if wrt == LoraOperand::X {
        count(args, 2, slots)?;
        f32s(args, &[0])?;
        i32s(args, &[1])?;
        let [dy, rows, rest @ ..] = args else {
            return Err("takes dy and rows".into());
        };
        want(dy.1.rank() == 2, || format!("dy must be [T, N], is {}", dy.1))?;
        is(rows.1, &[dy.1.dim(0)], "rows")?;
        let k = rest.first().map_or(0, |a| a.1.cols());
        matrices(rest, 2, false, k, dy.1.dim(1))?;
        return Ok((DType::F32, fit(&[dy.1.dim(0), k])?));
    }
    want(slot < slots, || format!("no slot {slot} of {slots}"))?;
    f32s(args, &[0, 1])?;
    i32s(args, &[2])?;
    let [x, dy, rows] = operands(args)?;
    let (right, left) = rows_of(x, dy, rows, "dy")?;
    Ok((DType::F32, fit(&[left, right])?))
}

pub(super) fn lora_experts_back(
    args: &[Operand],
    slots: usize,
    wrt: LoraOperand,
    slot: usize,
) -> Rule {
    if wrt == LoraOperand::X {
        count(args, 3, slots)?;
        f32s(args, &[0])?;
        i32s(args, &[1, 2])?;
        let [dy, rows, ids, rest @ ..] = args else {
            return Err("takes dy, rows and ids".into());
        };
        want(dy.1.rank() == 3 && ids.1.dims() == dy.1.dims().split_at(2).0, || {
            format!("dy {} and ids {} must be [T, U, N] and [T, U]", dy.1, ids.1)
        })?;
        is(rows.1, &[dy.1.dim(0)], "rows")?;
        let k = rest.first().map_or(0, |a| a.1.cols());
        matrices(rest, 3, true, k, dy.1.dim(2))?;
        return Ok((DType::F32, fit(&[dy.1.dim(0), dy.1.dim(1), k])?));
    }
    want(slot < slots, || format!("no slot {slot} of {slots}"))?;
    f32s(args, &[0, 1, 4, 5])?;
    i32s(args, &[2, 3])?;
    let [x, dy, rows, ids, other, scale] = operands(args)?;
    let (k, n) = pairs_of(x, dy, rows, ids, "dy")?;
    is(scale.1, &[1], "scale")?;
    want(other.1.rank() == 3, || format!("A or B must be a stack of matrices, is {}", other.1))?;
    let mut dims = vec![other.1.dim(0)];
    dims.extend(part(wrt, other.1, k, n)?);
    Ok((DType::F32, fit(&dims)?))
}

/// The last two dimensions of the gradient of `A` or `B`, given the other's shape.
fn part(wrt: LoraOperand, other: Shape, k: usize, n: usize) -> Checked<[usize; 2]> {
    let (rows, cols) = (other.dim(other.rank() - 2), other.cols());
    if wrt == LoraOperand::A {
        want(rows == n, || format!("B {other} does not give {n}"))?;
        Ok([cols, k])
    } else {
        want(cols == k, || format!("A {other} does not take {k}"))?;
        Ok([n, rows])
    }
}
