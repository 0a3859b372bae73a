//! Losses.

use graph::CrossEntropyAttrs;

use super::{Operands, Out};

/// `ln(sum of e^x)`
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
    max + x.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// A scaled and capped logit, and its derivative by the logit.
fn scaled(attrs: &CrossEntropyAttrs, logit: f64) -> (f64, f64) {
    let scale = f64::from(attrs.scale.get());
    match attrs.softcap {
        None => (scale * logit, scale),
        Some(cap) => {
            let cap = f64::from(cap.get());
            let t = (scale * logit / cap).tanh();
            (cap * t, scale * (1.0 - t * t))
        }
    }
}

/// The weight of a row, from operand `at` if there is one.
fn weight(operands: Operands<'_>, attrs: &CrossEntropyAttrs, at: usize, row: usize) -> WeightOf {
    match attrs.weighted {
        true => Ok(operands.floats(at)?.data[row]),
        false => Ok(1.0),
    }
}

type WeightOf = Result<f64, graph::Fault>;

pub(super) fn cross_entropy(operands: Operands<'_>, attrs: &CrossEntropyAttrs) -> Out {
    let (logits, labels) = (operands.floats(0)?, operands.ints(1)?);
    let mut out = operands.zeros(labels.shape)?;
    for (t, &label) in labels.data.iter().enumerate() {
        if label < 0 {
            continue;
        }
        let label = operands.index(label, logits.dim(1), "label")?;
        let weight = weight(operands, attrs, 2, t)?;
        if weight != 0.0 {
            let z: Vec<f64> = logits.row(t).iter().map(|&x| scaled(attrs, x).0).collect();
            out[t] = weight * (log_sum_exp(&z) - z[label]);
        }
    }
    operands.made(labels.shape, out)
}

pub(super) fn cross_entropy_back(operands: Operands<'_>, attrs: &CrossEntropyAttrs) -> Out {
    let (logits, labels, dy) = (operands.floats(0)?, operands.ints(1)?, operands.floats(2)?);
    let mut out = operands.zeros(logits.shape)?;
    let cols = logits.shape.cols();
    for (t, &label) in labels.data.iter().enumerate() {
        if label < 0 {
            continue;
        }
        let label = operands.index(label, cols, "label")?;
        let weight = weight(operands, attrs, 3, t)?;
        if dy.data[t] == 0.0 || weight == 0.0 {
            continue;
        }
        let z: Vec<f64> = logits.row(t).iter().map(|&x| scaled(attrs, x).0).collect();
        let lse = log_sum_exp(&z);
        for (c, &logit) in logits.row(t).iter().enumerate() {
            let target = if c == label { 1.0 } else { 0.0 };
            let (z, slope) = scaled(attrs, logit);
            out[t * cols + c] = dy.data[t] * weight * ((z - lse).exp() - target) * slope;
        }
    }
    operands.made(logits.shape, out)
}
