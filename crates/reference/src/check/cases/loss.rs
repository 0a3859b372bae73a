//! Cases of losses.

use graph::{CrossEntropyAttrs, DType, Op};

use super::TILES;
use super::softmax::FAR_BELOW;
use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// Labels with rows that do not count, runs of them, and none of them.
const LABELS: [(usize, &[i32]); 6] = [
    (6, &[0, 5, 3, 2]),
    (6, &[-1, 2, -1, 5, 0]),
    (17, &[16, -100, 3]),
    (2, &[0, 1, -1, 1]),
    (300, &[299, 0, 7, -1, 150]),
    (33, &[8]),
];

/// Scales, caps and whether rows are weighted.
fn ways() -> Vec<(String, CrossEntropyAttrs)> {
    let mut all = Vec::new();
    for (scale, cap) in
        [(1.0, None), (0.0625, None), (-1.5, None), (1.0, Some(30.0)), (2.0, Some(1.5))]
    {
        for weighted in [false, true] {
            let softcap = cap.map(Into::into);
            let attrs = CrossEntropyAttrs { scale: f32::into(scale), softcap, weighted };
            let name = format!("scale {scale}, cap {cap:?}, weights {weighted}");
            if attrs != CrossEntropyAttrs::PLAIN {
                all.push((name, attrs));
            }
        }
    }
    all
}

/// A leaf of weights, one of which is 0 where there are several.
fn weights(g: &mut CaseGraph, rows: usize) -> Made {
    let data: Vec<f32> = (0..rows).map(|t| [1.7, 0.25, 0.0, -0.8, 1.0][t % 5]).collect();
    let weights = g.given("weights", &[rows], &data)?;
    let refused = g.refused();
    g.expect(weights, refused);
    Ok(weights)
}

/// Logits of which the rows that do not count (their weight is 0) are not finite.
fn wild(g: &mut CaseGraph, rows: usize, vocab: usize, dead: &[usize]) -> Made {
    let mut data: Vec<f32> = (0..rows * vocab).map(|_| g.rng.between(-2.0, 2.0) as f32).collect();
    for row in dead {
        for (i, x) in data.iter_mut().skip(row * vocab).take(vocab).enumerate() {
            *x = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, 3e38][i % 4];
        }
    }
    let logits = g.given("logits", &[rows, vocab], &data)?;
    // Differences of such numbers are none; see the cases of the gradient.
    g.expect(logits, Expected::Nothing);
    Ok(logits)
}

fn one_way(g: &mut CaseGraph, attrs: CrossEntropyAttrs, vocab: usize, labels: &[i32]) -> Made {
    let rows = labels.len();
    let logits = g.float("logits", &[rows, vocab], Fill::Between(-2.0, 2.0))?;
    let mut args = vec![logits, g.ints("labels", &[rows], labels)?];
    if attrs.weighted {
        args.push(weights(g, rows)?);
    }
    g.graph.push(Op::CrossEntropy(attrs), &args, "y")
}

/// Rows through a head, and their loss.
fn headed(g: &mut CaseGraph, head: DType, rows: usize) -> Made {
    let (k, vocab) = (32, 24);
    let x = g.float("x", &[rows, k], Fill::Signed)?;
    let labels: Vec<i32> =
        (0..rows as i32).map(|t| if t % 7 == 3 { -1 } else { t * 5 % 24 }).collect();
    let labels = g.ints("labels", &[rows], &labels)?;
    let weights = weights(g, rows)?;
    // Near 1 / sqrt(k), so that logits are of size 1.
    let w = match head {
        DType::Block(_) => {
            let w = g.weight("head", &[vocab, k], head)?;
            let refused =
                Expected::Refusal { code: graph::Code::OpNotDifferentiable, op: "MatMul" };
            g.expect(w, refused);
            w
        }
        _ => g.float_of("head", &[vocab, k], head, Fill::Between(-0.3, 0.3))?,
    };
    let logits = g.graph.project(x, w)?;
    let attrs =
        CrossEntropyAttrs { weighted: true, softcap: Some(4.0.into()), ..CrossEntropyAttrs::PLAIN };
    g.graph.push(Op::CrossEntropy(attrs), &[logits, labels, weights], "y")
}

pub fn cross_entropy(c: &mut Cases) {
    for (name, attrs) in ways() {
        for (vocab, labels) in LABELS {
            c.add(format!("{name}, labels {labels:?} of {vocab}"), move |g| {
                one_way(g, attrs, vocab, labels)
            });
        }
    }
    for head in [DType::F32, DType::F16, DType::BF16, DType::Block(gguf::TensorType::Q4_0)] {
        c.add(format!("9 rows through a {head} head"), move |g| headed(g, head, 9));
    }
    c.add("rows of weight 0 or no label whose logits are not finite", |g| {
        let logits = wild(g, 5, 9, &[1, 2])?;
        let labels = g.ints("labels", &[5], &[3, -1, 0, 8, 1])?;
        let weights = weights(g, 5)?;
        let attrs = CrossEntropyAttrs { weighted: true, ..CrossEntropyAttrs::PLAIN };
        g.graph.push(Op::CrossEntropy(attrs), &[logits, labels, weights], "y")
    });
    for (vocab, labels) in LABELS {
        c.add(format!("labels {labels:?} of {vocab}"), move |g| {
            let rows = labels.len();
            let logits = g.float("logits", &[rows, vocab], Fill::Between(-2.0, 2.0))?;
            let labels = g.ints("labels", &[rows], labels)?;
            g.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "y")
        });
    }
    c.add("rows far below zero", |g| {
        let logits = g.float("logits", &[3, 37], FAR_BELOW)?;
        let labels = g.ints("labels", &[3], &[36, 0, 7])?;
        g.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "y")
    });
    for label in [6, i32::MAX] {
        c.add_outside(format!("label {label} of 6"), move |g| {
            let logits = g.float("logits", &[3, 6], Fill::Signed)?;
            let labels = g.ints("labels", &[3], &[-1, 0, label])?;
            g.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "y")
        });
    }
    c.add("more rows than a tile holds", |g| {
        let logits = g.float("logits", TILES, Fill::Between(-2.0, 2.0))?;
        let labels = g.ints("labels", &[60], &many_labels())?;
        g.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "y")
    });
    c.add("no row counts", |g| {
        let logits = g.float("logits", &[3, 6], Fill::Signed)?;
        let labels = g.ints("labels", &[3], &[-1, -1, -1])?;
        g.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "y")
    });
    c.add("a weighted mean", |g| {
        let logits = g.float("logits", &[4, 9], Fill::Between(-2.0, 2.0))?;
        let labels = g.ints("labels", &[4], &[1, -1, 8, 0])?;
        let weights = g.float("weights", &[4], Fill::POSITIVE)?;
        let losses = g.graph.push(
            Op::CrossEntropy(CrossEntropyAttrs::PLAIN),
            &[logits, labels],
            "losses",
        )?;
        let weighted = g.graph.mul(losses, weights)?;
        let total = g.graph.sum(weighted, &[0])?;
        let weight = g.graph.sum(weights, &[0])?;
        g.graph.div(total, weight)
    });
    for view in View::STRIDED.into_iter().filter(|view| *view != View::RepeatedColumns) {
        c.add(format!("{view:?}"), move |g| {
            let logits = g.viewed("logits", &[4, 9], view, Fill::Between(-2.0, 2.0))?;
            let labels = g.ints("labels", &[4], &[1, -1, 8, 0])?;
            g.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "y")
        });
    }
}

/// Labels of 60 rows, some of none.
fn many_labels() -> [i32; 60] {
    std::array::from_fn(|i| if i % 7 == 3 { -1 } else { (i * 37 % 150) as i32 })
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
    g.graph.push(Op::CrossEntropyBack(CrossEntropyAttrs::PLAIN), &[logits, labels, dy], "y")
}

fn back_of(g: &mut CaseGraph, attrs: CrossEntropyAttrs, vocab: usize, labels: &[i32]) -> Made {
    let rows = labels.len();
    let logits = g.float("logits", &[rows, vocab], Fill::Between(-2.0, 2.0))?;
    let labels = g.ints("labels", &[rows], labels)?;
    let mut args = vec![logits, labels, g.float("dy", &[rows], Fill::Signed)?];
    if attrs.weighted {
        args.push(weights(g, rows)?);
    }
    let refused = g.refused();
    g.expect_all(refused);
    g.graph.push(Op::CrossEntropyBack(attrs), &args, "y")
}

pub fn cross_entropy_back(c: &mut Cases) {
    for (name, attrs) in ways() {
        for (vocab, labels) in LABELS {
            c.add(format!("{name}, labels {labels:?} of {vocab}"), move |g| {
                back_of(g, attrs, vocab, labels)
            });
        }
    }
    c.add("rows of weight 0, no label or no cotangent whose logits are not finite", |g| {
        let logits = wild(g, 5, 9, &[1, 2, 4])?;
        let labels = g.ints("labels", &[5], &[3, -1, 0, 8, 1])?;
        let dy = g.given("dy", &[5], &[1.0, f32::NAN, f32::INFINITY, 0.5, 0.0])?;
        let weights = weights(g, 5)?;
        let refused = g.refused();
        g.expect_all(refused);
        let attrs = CrossEntropyAttrs { weighted: true, ..CrossEntropyAttrs::PLAIN };
        g.graph.push(Op::CrossEntropyBack(attrs), &[logits, labels, dy, weights], "y")
    });
    for (vocab, labels) in LABELS {
        c.add(format!("labels {labels:?} of {vocab}"), move |g| back(g, vocab, labels, None));
    }
    for label in [6, i32::MAX] {
        c.add_outside(format!("label {label} of 6"), move |g| back(g, 6, &[0, label, 3], None));
    }
    c.add("more rows than a tile holds", |g| back(g, 150, &many_labels(), None));
    c.add("a cotangent of 0", |g| back(g, 6, &[0, 5, 3, 2], Some(2)));
}
