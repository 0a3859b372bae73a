//! Matrix products and adapters.

use graph::{Dropout, Fault, LoraOperand, Shape, philox4x32};

use super::{Floats, Ints, Operands, Out};
use crate::value::indices;

/// Where the matrix of a broadcast operand starts that belongs to an element of the result.
fn matrix_start(x: Shape, out: Shape, index: &[usize]) -> usize {
    let (own, all) = (x.rank() - 2, out.rank() - 2);
    let matrix = (0..own).fold(0, |at, d| {
        let i = if x.dim(d) == 1 { 0 } else { index[d + all - own] };
        at * x.dim(d) + i
    });
    matrix * x.dim(own) * x.dim(own + 1)
}

pub(super) fn mat_mul(operands: Operands<'_>, ta: bool, tb: bool, shape: Shape) -> Out {
    let (a, b) = (operands.floats(0)?, operands.floats(1)?);
    let matrix = operands.matrix(1)?;
    let (a_cols, b_cols) = (a.shape.cols(), b.shape.cols());
    let inner = if ta { a.dim(a.shape.rank() - 2) } else { a_cols };
    let mut out = operands.zeros(shape)?;
    for (out, index) in out.iter_mut().zip(indices(shape)) {
        let (i, j) = (index[shape.rank() - 2], index[shape.rank() - 1]);
        let a_start = matrix_start(a.shape, shape, &index);
        let b_start = matrix_start(b.shape, shape, &index);
        for k in 0..inner {
            let a_at = if ta { k * a_cols + i } else { i * a_cols + k };
            let b_at = if tb { j * b_cols + k } else { k * b_cols + j };
            *out += a.data[a_start + a_at] * matrix[b_start + b_at];
        }
    }
    operands.made(shape, out)
}

pub(super) fn dropout(operands: Operands<'_>, dropout: Dropout) -> Out {
    let (x, rows, key) = (operands.floats(0)?, operands.ints(1)?, operands.ints(2)?);
    let mut out = operands.zeros(x.shape)?;
    let width = x.shape.cols();
    let vectors = x.shape.rows() / x.dim(0).max(1);
    let key = [key.data[0] as u32, key.data[1] as u32];
    let scale = 1.0 / (1.0 - f64::from(dropout.p.get()));
    for t in 0..x.dim(0) {
        let row = [rows.row(t)[0] as u32, rows.row(t)[1] as u32];
        for u in 0..vectors {
            for k in 0..width {
                let place = u * width.div_ceil(64) * 16 + k / 64 * 16 + k % 16;
                let counter = [place as u32, dropout.site, row[0], row[1]];
                let word = philox4x32(counter, key)[k / 16 % 4];
                let at = (t * vectors + u) * width + k;
                if word >= dropout.threshold() {
                    out[at] = scale * x.data[at];
                }
            }
        }
    }
    operands.made(x.shape, out)
}

/// The row of `[T, 1 or U, ..]` that belongs to choice `u` of row `t`.
fn choice<'a>(x: Floats<'a>, t: usize, u: usize) -> &'a [f64] {
    let own = x.dim(1);
    x.row(t * own + if own == 1 { 0 } else { u })
}

pub(super) fn mat_mul_experts(operands: Operands<'_>, tb: bool, shape: Shape) -> Out {
    let (x, w, ids) = (operands.floats(0)?, operands.floats(1)?, operands.ints(2)?);
    let matrices = operands.matrix(1)?;
    let mut out = operands.zeros(shape)?;
    let (used, n, k) = (shape.dim(1), shape.dim(2), x.dim(2));
    for (pair, &id) in ids.data.iter().enumerate() {
        let expert = operands.index(id, w.dim(0), "expert")?;
        let x = choice(x, pair / used, pair % used);
        for j in 0..n {
            for (i, x) in x.iter().enumerate() {
                let at = if tb { j * k + i } else { i * n + j };
                out[pair * n + j] += x * matrices[expert * n * k + at];
            }
        }
    }
    operands.made(shape, out)
}

pub(super) fn expert_outer(operands: Operands<'_>, shape: Shape) -> Out {
    let (a, b, ids) = (operands.floats(0)?, operands.floats(1)?, operands.ints(2)?);
    let mut out = operands.zeros(shape)?;
    let (p, q, used) = (shape.dim(1), shape.dim(2), ids.dim(1));
    for (pair, &id) in ids.data.iter().enumerate() {
        let expert = operands.index(id, shape.dim(0), "expert")?;
        let (a, b) = (choice(a, pair / used, pair % used), choice(b, pair / used, pair % used));
        for i in 0..p {
            for j in 0..q {
                out[(expert * p + i) * q + j] += a[i] * b[j];
            }
        }
    }
    operands.made(shape, out)
}

/// The adapter slot of each row; `None` for rows without one.
fn slots_of(
    operands: Operands<'_>,
    rows: Ints<'_>,
    slots: usize,
) -> Result<Vec<Option<usize>>, Fault> {
    let slot = |&s: &i32| match s {
        ..0 => Ok(None),
        _ => operands.index(s, slots, "adapter slot").map(Some),
    };
    rows.data.iter().map(slot).collect()
}

/// `A`, `B` and the scale of a slot, whose operands begin at `first`.
fn adapter(
    operands: Operands<'_>,
    first: usize,
    slot: usize,
) -> Result<(Floats<'_>, Floats<'_>, f64), Fault> {
    let at = first + 3 * slot;
    let scale = operands.floats(at + 2)?.data[0];
    Ok((operands.floats(at)?, operands.floats(at + 1)?, scale))
}

/// `m x`
fn times(m: Floats<'_>, x: &[f64]) -> Vec<f64> {
    (0..m.dim(0)).map(|r| m.row(r).iter().zip(x).map(|(m, x)| m * x).sum()).collect()
}

/// `m^T x`
fn transposed_times(m: Floats<'_>, x: &[f64]) -> Vec<f64> {
    (0..m.dim(1)).map(|c| x.iter().enumerate().map(|(r, x)| m.row(r)[c] * x).sum()).collect()
}

pub(super) fn lora(operands: Operands<'_>, slots: usize) -> Out {
    let (x, base, rows) = (operands.floats(0)?, operands.floats(1)?, operands.ints(2)?);
    let mut out = operands.zeros(base.shape)?;
    out.copy_from_slice(base.data);
    let n = base.dim(1);
    for (t, slot) in slots_of(operands, rows, slots)?.into_iter().enumerate() {
        let Some(slot) = slot else { continue };
        let (a, b, scale) = adapter(operands, 3, slot)?;
        for (i, delta) in times(b, &times(a, x.row(t))).into_iter().enumerate() {
            out[t * n + i] += scale * delta;
        }
    }
    operands.made(base.shape, out)
}

pub(super) fn lora_back(
    operands: Operands<'_>,
    slots: usize,
    wrt: LoraOperand,
    slot: usize,
    shape: Shape,
) -> Out {
    let mut out = operands.zeros(shape)?;
    let cols = shape.cols();
    if wrt == LoraOperand::X {
        let (dy, rows) = (operands.floats(0)?, operands.ints(1)?);
        for (t, slot) in slots_of(operands, rows, slots)?.into_iter().enumerate() {
            let Some(slot) = slot else { continue };
            let (a, b, scale) = adapter(operands, 2, slot)?;
            let dx = transposed_times(a, &transposed_times(b, dy.row(t)));
            for (i, dx) in dx.into_iter().enumerate() {
                out[t * cols + i] = scale * dx;
            }
        }
        return operands.made(shape, out);
    }
    let (x, dy, rows) = (operands.floats(0)?, operands.floats(1)?, operands.ints(2)?);
    for (t, of) in slots_of(operands, rows, slots)?.into_iter().enumerate() {
        if of != Some(slot) {
            continue;
        }
        for (i, dy) in dy.row(t).iter().enumerate() {
            for (j, x) in x.row(t).iter().enumerate() {
                out[i * cols + j] += dy * x;
            }
        }
    }
    operands.made(shape, out)
}

/// `m x` for expert `e` of a stack of matrices.
fn stack_times(m: Floats<'_>, e: usize, x: &[f64]) -> Vec<f64> {
    let rows = m.dim(1);
    (0..rows).map(|r| m.row(e * rows + r).iter().zip(x).map(|(m, x)| m * x).sum()).collect()
}

/// `m^T x` for expert `e` of a stack of matrices.
fn stack_transposed_times(m: Floats<'_>, e: usize, x: &[f64]) -> Vec<f64> {
    let (rows, cols) = (m.dim(1), m.dim(2));
    let term = |c: usize, r: usize| m.row(e * rows + r)[c] * x[r];
    (0..cols).map(|c| (0..rows).map(|r| term(c, r)).sum()).collect()
}

pub(super) fn lora_experts(operands: Operands<'_>, slots: usize) -> Out {
    let (x, base) = (operands.floats(0)?, operands.floats(1)?);
    let (rows, ids) = (operands.ints(2)?, operands.ints(3)?);
    let mut out = operands.zeros(base.shape)?;
    out.copy_from_slice(base.data);
    let (used, n, slots) = (base.dim(1), base.dim(2), slots_of(operands, rows, slots)?);
    let experts = operands.floats(4)?.dim(0);
    for (pair, &id) in ids.data.iter().enumerate() {
        let expert = operands.index(id, experts, "expert")?;
        let Some(slot) = slots[pair / used] else { continue };
        let (a, b, scale) = adapter(operands, 4, slot)?;
        let hidden = stack_times(a, expert, choice(x, pair / used, pair % used));
        for (i, delta) in stack_times(b, expert, &hidden).into_iter().enumerate() {
            out[pair * n + i] += scale * delta;
        }
    }
    operands.made(base.shape, out)
}

pub(super) fn lora_experts_back(
    operands: Operands<'_>,
    slots: usize,
    wrt: LoraOperand,
    slot: usize,
    shape: Shape,
) -> Out {
    let mut out = operands.zeros(shape)?;
    let cols = shape.cols();
    if wrt == LoraOperand::X {
        let (dy, rows, ids) = (operands.floats(0)?, operands.ints(1)?, operands.ints(2)?);
        let (used, slots) = (dy.dim(1), slots_of(operands, rows, slots)?);
        let experts = operands.floats(3)?.dim(0);
        for (pair, &id) in ids.data.iter().enumerate() {
            let expert = operands.index(id, experts, "expert")?;
            let Some(slot) = slots[pair / used] else { continue };
            let (a, b, scale) = adapter(operands, 3, slot)?;
            let hidden = stack_transposed_times(b, expert, dy.row(pair));
            let dx = stack_transposed_times(a, expert, &hidden);
            for (i, dx) in dx.into_iter().enumerate() {
                out[pair * cols + i] = scale * dx;
            }
        }
        return operands.made(shape, out);
    }
    let (x, dy) = (operands.floats(0)?, operands.floats(1)?);
    let (rows, ids) = (operands.ints(2)?, operands.ints(3)?);
    let (other, scale) = (operands.floats(4)?, operands.floats(5)?.data[0]);
    let (used, slots) = (dy.dim(1), slots_of(operands, rows, slots)?);
    for (pair, &id) in ids.data.iter().enumerate() {
        let expert = operands.index(id, shape.dim(0), "expert")?;
        if slots[pair / used] != Some(slot) {
            continue;
        }
        let (x, dy) = (choice(x, pair / used, pair % used), dy.row(pair));
        // The gradient of this place is the outer product left x right.
        let (left, right) = if wrt == LoraOperand::A {
            (stack_transposed_times(other, expert, dy), x.to_vec())
        } else {
            (dy.to_vec(), stack_times(other, expert, x))
        };
        for (i, l) in left.iter().enumerate() {
            for (j, r) in right.iter().enumerate() {
                out[(expert * shape.dim(1) + i) * cols + j] += scale * l * r;
            }
        }
    }
    operands.made(shape, out)
}
