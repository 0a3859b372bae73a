//! Softmax and log-softmax.

use graph::{Shape, SoftmaxAttrs, alibi_slope};

use super::elementwise::broadcast_offset;
use super::loss::log_sum_exp;
use super::{Floats, Operands, Out};
use crate::value::indices;

/// The logits of every row, and the head each row belongs to.
struct Logits {
    rows: Vec<Vec<f64>>,
    heads: Vec<usize>,
}

impl Logits {
    fn new(
        operands: Operands<'_>,
        x: Floats<'_>,
        attrs: &SoftmaxAttrs,
    ) -> Result<Logits, graph::Fault> {
        let rank = x.shape.rank();
        let heads = if rank >= 3 { x.dim(rank - 3) } else { 1 };
        let per_head = if rank >= 3 { x.dim(rank - 2) } else { 1 };
        let head = |row: usize| row / per_head.max(1) % heads.max(1);
        let mut rows: Vec<Vec<f64>> = (0..x.shape.rows()).map(|r| x.row(r).to_vec()).collect();
        for row in rows.iter_mut().flatten() {
            *row *= f64::from(attrs.scale.get());
        }
        if attrs.mask {
            let mask = operands.floats(1)?;
            for (i, index) in indices(x.shape).enumerate() {
                let (row, col) = (i / x.shape.cols(), i % x.shape.cols());
                let slope = f64::from(alibi_slope(attrs.max_bias.get(), head(row), heads));
                rows[row][col] += slope * mask.data[broadcast_offset(mask.shape, x.shape, &index)];
            }
        }
        let heads = (0..rows.len()).map(head).collect();
        Ok(Logits { rows, heads })
    }

    /// The log-sum-exp of a row, its head's sink included; -inf when there is nothing.
    fn total(&self, row: usize, sinks: Option<Floats<'_>>) -> f64 {
        let mut all = self.rows[row].clone();
        all.extend(sinks.map(|s| s.data[self.heads[row]]));
        if all.iter().all(|&l| l == f64::NEG_INFINITY) {
            return f64::NEG_INFINITY;
        }
        log_sum_exp(&all)
    }
}

/// The sinks, which follow `x` and the mask.
fn sinks<'a>(
    operands: Operands<'a>,
    attrs: &SoftmaxAttrs,
) -> Result<Option<Floats<'a>>, graph::Fault> {
    if attrs.sinks { operands.floats(1 + usize::from(attrs.mask)).map(Some) } else { Ok(None) }
}

pub(super) fn softmax(operands: Operands<'_>, attrs: &SoftmaxAttrs) -> Out {
    let x = operands.floats(0)?;
    let logits = Logits::new(operands, x, attrs)?;
    let sinks = sinks(operands, attrs)?;
    let mut out = operands.zeros(x.shape)?;
    let n = x.shape.cols();
    for (r, row) in logits.rows.iter().enumerate() {
        let total = logits.total(r, sinks);
        if total == f64::NEG_INFINITY {
            continue;
        }
        for (out, l) in out[r * n..(r + 1) * n].iter_mut().zip(row) {
            *out = (l - total).exp();
        }
    }
    operands.made(x.shape, out)
}

pub(super) fn softmax_back(operands: Operands<'_>, scale: f32) -> Out {
    let (y, dy) = (operands.floats(0)?, operands.floats(1)?);
    let mut out = operands.zeros(y.shape)?;
    let n = y.shape.cols();
    for row in 0..y.shape.rows() {
        let dot: f64 = y.row(row).iter().zip(dy.row(row)).map(|(y, dy)| y * dy).sum();
        for i in 0..n {
            out[row * n + i] = f64::from(scale) * y.row(row)[i] * (dy.row(row)[i] - dot);
        }
    }
    operands.made(y.shape, out)
}

pub(super) fn softmax_sink_back(operands: Operands<'_>, attrs: &SoftmaxAttrs, shape: Shape) -> Out {
    let x = operands.floats(0)?;
    let logits = Logits::new(operands, x, attrs)?;
    let at = 1 + usize::from(attrs.mask);
    let (sinks, y, dy) = (operands.floats(at)?, operands.floats(at + 1)?, operands.floats(at + 2)?);
    let mut out = operands.zeros(shape)?;
    for row in 0..x.shape.rows() {
        let head = logits.heads[row];
        let dot: f64 = y.row(row).iter().zip(dy.row(row)).map(|(y, dy)| y * dy).sum();
        out[head] -= (sinks.data[head] - logits.total(row, Some(sinks))).exp() * dot;
    }
    operands.made(shape, out)
}

pub(super) fn log_softmax(operands: Operands<'_>) -> Out {
    let x = operands.floats(0)?;
    let mut out = operands.zeros(x.shape)?;
    let n = x.shape.cols();
    for row in 0..x.shape.rows() {
        let total = log_sum_exp(x.row(row));
        for i in 0..n {
            out[row * n + i] = x.row(row)[i] - total;
        }
    }
    operands.made(x.shape, out)
}
