//! Cases of losses.

use graph::Op;

use crate::check::{CaseGraph, Cases, Fill, Made, View};

/// Labels with rows that do not count, runs of them, and none of them.
const LABELS: [(usize, &[i32]); 6] = [
    (6, &[0, 5, 3, 2]),
    (6, &[-1, 2, -1, 5, 0]),
    (17, &[16, -100, 3]),
    (2, &[0, 1, -1, 1]),
    (300, &[299, 0, 7, -1, 150]),
    (33, &[8]),
];

pub fn cross_entropy(c: &mut Cases) {
    for (vocab, labels) in LABELS {
        c.add(format!("labels {labels:?} of {vocab}"), move |g| {
            let rows = labels.len();
            let logits = g.float("logits", &[rows, vocab], Fill::Between(-2.0, 2.0))?;
            let labels = g.ints("labels", &[rows], labels)?;
            g.graph.push(Op::CrossEntropy, &[logits, labels], "y")
        });
    }
    for label in [6, i32::MAX] {
        c.add_outside(format!("label {label} of 6"), move |g| {
            let logits = g.float("logits", &[3, 6], Fill::Signed)?;
            let labels = g.ints("labels", &[3], &[-1, 0, label])?;
            g.graph.push(Op::CrossEntropy, &[logits, labels], "y")
        });
    }
    c.add("no row counts", |g| {
        let logits = g.float("logits", &[3, 6], Fill::Signed)?;
        let labels = g.ints("labels", &[3], &[-1, -1, -1])?;
        g.graph.push(Op::CrossEntropy, &[logits, labels], "y")
    });
    c.add("a weighted mean", |g| {
        let logits = g.float("logits", &[4, 9], Fill::Between(-2.0, 2.0))?;
        let labels = g.ints("labels", &[4], &[1, -1, 8, 0])?;
        let weights = g.float("weights", &[4], Fill::POSITIVE)?;
        let losses = g.graph.push(Op::CrossEntropy, &[logits, labels], "losses")?;
        let weighted = g.graph.mul(losses, weights)?;
        let total = g.graph.sum(weighted, &[0])?;
        let weight = g.graph.sum(weights, &[0])?;
        g.graph.div(total, weight)
    });
    for view in View::STRIDED.into_iter().filter(|view| *view != View::RepeatedColumns) {
        c.add(format!("{view:?}"), move |g| {
            let logits = g.viewed("logits", &[4, 9], view, Fill::Between(-2.0, 2.0))?;
            let labels = g.ints("labels", &[4], &[1, -1, 8, 0])?;
            g.graph.push(Op::CrossEntropy, &[logits, labels], "y")
        });
    }
}

fn back(g: &mut CaseGraph, vocab: usize, labels: &[i32], zero: Option<usize>) -> Made {
    let rows = labels.len();
    let logits = g.float("logits", &[rows, vocab], Fill::Between(-2.0, 2.0))?;
    let labels = g.ints("labels", &[rows], labels)?;
    let dy = match zero {
        None => g.float("dy", &[rows], Fill::Signed)?,
        Some(zero) => {
            let dy: Vec<f32> = (0..rows).map(|t| if t == zero { 0.0 } else { 0.7 }).collect();
            g.given("dy", &[rows], &dy)?
        }
    };
    let refused = g.refused();
    g.expect_all(refused);
    g.graph.push(Op::CrossEntropyBack, &[logits, labels, dy], "y")
}

pub fn cross_entropy_back(c: &mut Cases) {
    for (vocab, labels) in LABELS {
        c.add(format!("labels {labels:?} of {vocab}"), move |g| back(g, vocab, labels, None));
    }
    for label in [6, i32::MAX] {
        c.add_outside(format!("label {label} of 6"), move |g| back(g, 6, &[0, label, 3], None));
    }
    c.add("a cotangent of 0", |g| back(g, 6, &[0, 5, 3, 2], Some(2)));
}
