//! Losses.

use super::{Operands, Out};

/// `ln(sum of e^x)`
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

pub(super) fn cross_entropy(operands: Operands<'_>) -> Out {
    let (logits, labels) = (operands.floats(0)?, operands.ints(1)?);
    let mut out = operands.zeros(labels.shape)?;
    for (t, &label) in labels.data.iter().enumerate() {
        if label >= 0 {
            let label = operands.index(label, logits.dim(1), "label")?;
            out[t] = log_sum_exp(logits.row(t)) - logits.row(t)[label];
        }
    }
    operands.made(labels.shape, out)
}

pub(super) fn cross_entropy_back(operands: Operands<'_>) -> Out {
    let (logits, labels, dy) = (operands.floats(0)?, operands.ints(1)?, operands.floats(2)?);
    let mut out = operands.zeros(logits.shape)?;
    let cols = logits.shape.cols();
    for (t, &label) in labels.data.iter().enumerate() {
        if label < 0 {
            continue;
        }
        let label = operands.index(label, cols, "label")?;
        if dy.data[t] == 0.0 {
            continue;
        }
        let lse = log_sum_exp(logits.row(t));
        for (c, logit) in logits.row(t).iter().enumerate() {
            let target = if c == label { 1.0 } else { 0.0 };
            out[t * cols + c] = dy.data[t] * ((logit - lse).exp() - target);
        }
    }
    operands.made(logits.shape, out)
}
