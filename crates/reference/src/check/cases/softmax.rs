//! Cases of softmax and log-softmax.

use graph::{Op, SoftmaxAttrs};

use super::TILES;
use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// Logits whose exponentials are zero in f32, unless the largest is taken off before.
pub(super) const FAR_BELOW: Fill = Fill::Between(-122.0, -119.0);

/// Attributes, and the shapes of a mask that goes with them.
fn variants() -> Vec<(&'static str, SoftmaxAttrs, &'static [usize])> {
    let scale = 0.7.into();
    let plain = SoftmaxAttrs { scale, ..SoftmaxAttrs::PLAIN };
    let masked = SoftmaxAttrs { mask: true, ..plain };
    let alibi = SoftmaxAttrs { max_bias: 8.0.into(), ..masked };
    vec![
        ("scaled", plain, &[]),
        ("masked per row", masked, &[5, 7]),
        ("masked per column", masked, &[7]),
        ("masked for all", masked, &[2, 3, 5, 7]),
        ("with ALiBi", alibi, &[5, 7]),
        ("with sinks", SoftmaxAttrs { sinks: true, ..plain }, &[]),
        ("masked, with sinks", SoftmaxAttrs { sinks: true, ..masked }, &[5, 7]),
        ("with ALiBi and sinks", SoftmaxAttrs { sinks: true, ..alibi }, &[2, 1, 5, 7]),
    ]
}

/// The operands of a softmax of `[2, 3, 5, 7]`.
fn operands(
    g: &mut CaseGraph,
    x: graph::NodeId,
    attrs: SoftmaxAttrs,
    mask: &[usize],
) -> Result<Vec<graph::NodeId>, graph::Invalid> {
    let mut args = vec![x];
    if attrs.mask {
        let mask = g.float("mask", mask, Fill::Between(-2.0, 0.0))?;
        let refused = g.refused();
        g.expect(mask, refused);
        args.push(mask);
    }
    if attrs.sinks {
        args.push(g.float("sinks", &[3], Fill::Signed)?);
    }
    Ok(args)
}

/// The operands of a softmax of `[2, 3, 5, 7]` with sinks, all but `x` laid out by `view`, the
/// sinks as a column.
fn sunk(
    g: &mut CaseGraph,
    x: graph::NodeId,
    masked: bool,
    view: View,
) -> Result<Vec<graph::NodeId>, graph::Invalid> {
    let mut args = vec![x];
    if masked {
        let mask = g.viewed("mask", &[5, 7], view, Fill::Between(-2.0, 0.0))?;
        let leaf = g.graph.find_leaf("mask").unwrap_or(mask);
        g.expect(leaf, g.refused());
        args.push(mask);
    }
    let sinks = g.float("sinks", &[3, 2], Fill::Signed)?;
    let sinks = g.graph.slice(sinks, 1, 1, 1)?;
    args.push(g.graph.reshape(sinks, &[3])?);
    Ok(args)
}

/// Without the one whose rows are equal logits: the gradient of what they repeat is a sum that
/// is zero.
fn views() -> impl Iterator<Item = View> {
    View::STRIDED.into_iter().filter(|view| *view != View::RepeatedColumns)
}

pub fn softmax(c: &mut Cases) {
    for dims in [&[1][..], &[33], &[2, 16], &[7, 5], &[4, 33], &[2, 3, 40], &[2, 2, 3, 17], TILES] {
        c.add(format!("{dims:?}"), move |g| {
            let x = g.float("x", dims, Fill::Between(-2.0, 2.0))?;
            g.graph.softmax(x, "y")
        });
    }
    c.add("rows far below zero", |g| {
        let x = g.float("x", &[3, 37], FAR_BELOW)?;
        g.graph.softmax(x, "y")
    });
    for (name, attrs, mask) in variants() {
        c.add(name, move |g| {
            // All of one sign would cancel in the sinks' gradient less than mixed signs do.
            let x = g.float("x", &[2, 3, 5, 7], Fill::Between(-2.0, 2.0))?;
            let args = operands(g, x, attrs, mask)?;
            g.graph.push(Op::Softmax(attrs), &args, "y")
        });
    }
    for view in views() {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, Fill::Between(-2.0, 2.0))?;
            g.cotangent_viewed(&[4, 6], view)?;
            g.graph.softmax(x, "y")
        });
    }
    c.add("masked, more batches than heads", |g| {
        let x = g.float("x", &[4, 2, 3, 5], Fill::Between(-2.0, 2.0))?;
        let mask = g.float("mask", &[4, 2, 3, 5], Fill::Between(-2.0, 0.0))?;
        g.expect(mask, g.refused());
        let attrs = SoftmaxAttrs { mask: true, ..SoftmaxAttrs::PLAIN };
        g.graph.push(Op::Softmax(attrs), &[x, mask], "y")
    });
    for (masked, view) in [false, true].into_iter().flat_map(|m| views().map(move |v| (m, v))) {
        let name = if masked { "masked, " } else { "" };
        c.add(format!("{name}mask and sinks {view:?}"), move |g| {
            let x = g.float("x", &[2, 3, 5, 7], Fill::Between(-2.0, 2.0))?;
            let args = sunk(g, x, masked, view)?;
            let attrs = SoftmaxAttrs { mask: masked, sinks: true, ..SoftmaxAttrs::PLAIN };
            g.graph.push(Op::Softmax(attrs), &args, "y")
        });
    }
    c.add("masked, rows that end within a vector", |g| {
        let x = g.float("x", &[3, 37], Fill::Between(-2.0, 2.0))?;
        let mask = g.float("mask", &[3, 37], Fill::Between(-2.0, 0.0))?;
        g.expect(mask, g.refused());
        let attrs = SoftmaxAttrs { mask: true, ..SoftmaxAttrs::PLAIN };
        g.graph.push(Op::Softmax(attrs), &[x, mask], "y")
    });
    c.add("a row of which most is masked away", |g| {
        let x = g.float("x", &[2, 6], Fill::Between(-2.0, 2.0))?;
        let inf = f32::NEG_INFINITY;
        let mask = [0.0, inf, inf, 0.0, inf, 0.0, inf, 0.0, 0.0, inf, 0.0, inf];
        let mask = g.given("mask", &[2, 6], &mask)?;
        g.expect(mask, Expected::Nothing);
        let attrs = SoftmaxAttrs { mask: true, ..SoftmaxAttrs::PLAIN };
        g.graph.push(Op::Softmax(attrs), &[x, mask], "y")
    });
    c.add("a row that is masked away gives zeros", |g| {
        let x = g.float("x", &[4, 8], Fill::Between(-2.0, 2.0))?;
        let mut mask: Vec<f32> = (0..32).map(|i| if i % 3 == 1 { -1.0 } else { 0.0 }).collect();
        mask[16..24].fill(f32::NEG_INFINITY);
        let mask = g.given("mask", &[4, 8], &mask)?;
        g.expect(mask, Expected::Nothing);
        let attrs = SoftmaxAttrs { mask: true, ..SoftmaxAttrs::PLAIN };
        g.graph.push(Op::Softmax(attrs), &[x, mask], "y")
    });
}

/// A loss of the softmax's own form, so that its gradient ops are reached with real operands.
///
/// `dy` less its mean under `y` cancels somewhere, in about one element of a hundred: here and below
/// there are some hundred, since two of two dozen would be too many. Rows of `y` sum to less
/// than 1, as those of a softmax with a sink do: what is taken from so many `dy` is then small beside
/// them, and its rounding smaller.
fn back(g: &mut CaseGraph, x: View) -> Made {
    let y = g.viewed("y", &[12, 18], x, shares(18))?;
    let dy = g.viewed("dy", &[12, 18], x, Fill::Signed)?;
    g.expect_all(Expected::Nothing);
    let refused = g.refused();
    for name in ["y", "dy"] {
        if let Some(leaf) = g.graph.find_leaf(name) {
            g.expect(leaf, refused);
        }
    }
    g.graph.push(Op::SoftmaxBack { scale: 0.5.into() }, &[y, dy], "dx")
}

/// What a row of `n` is made of that sums to 0.5 .. 0.9.
fn shares(n: usize) -> Fill {
    Fill::Between(0.5 / n as f64, 0.9 / n as f64)
}

pub fn softmax_back(c: &mut Cases) {
    for view in [View::Plain].into_iter().chain(View::STRIDED) {
        c.add(format!("{view:?}"), move |g| back(g, view));
    }
    for dims in [&[165][..], &[5, 33], &[2, 3, 4, 5], TILES] {
        c.add(format!("{dims:?}"), move |g| {
            let y = g.float("y", dims, shares(dims.last().map_or(1, |n| *n)))?;
            let dy = g.float("dy", dims, Fill::Signed)?;
            g.expect_all(g.refused());
            g.graph.push(Op::SoftmaxBack { scale: 1.0.into() }, &[y, dy], "dx")
        });
    }
}

pub fn softmax_sink_back(c: &mut Cases) {
    softmax_sink_back_views(c);
    for (name, attrs, mask) in variants().into_iter().filter(|(_, attrs, _)| attrs.sinks) {
        c.add(name, move |g| {
            let x = g.float("x", &[2, 3, 5, 7], Fill::Between(-2.0, 2.0))?;
            let mut args = operands(g, x, attrs, mask)?;
            args.push(g.float("y", &[2, 3, 5, 7], Fill::POSITIVE)?);
            args.push(g.float("dy", &[2, 3, 5, 7], Fill::POSITIVE)?);
            g.expect_all(g.refused());
            g.graph.push(Op::SoftmaxSinkBack(attrs), &args, "dsinks")
        });
    }
}

fn softmax_sink_back_views(c: &mut Cases) {
    for (masked, view) in [false, true].into_iter().flat_map(|m| views().map(move |v| (m, v))) {
        let name = if masked { "masked, " } else { "" };
        c.add(format!("{name}all {view:?}"), move |g| {
            let x = g.viewed("x", &[2, 3, 5, 7], view, Fill::Between(-2.0, 2.0))?;
            let mut args = sunk(g, x, masked, view)?;
            args.push(g.viewed("y", &[2, 3, 5, 7], view, Fill::POSITIVE)?);
            args.push(g.viewed("dy", &[2, 3, 5, 7], view, Fill::POSITIVE)?);
            g.expect_all(g.refused());
            let attrs = SoftmaxAttrs { mask: masked, sinks: true, ..SoftmaxAttrs::PLAIN };
            g.graph.push(Op::SoftmaxSinkBack(attrs), &args, "dsinks")
        });
    }
}

pub fn log_softmax(c: &mut Cases) {
    for dims in [&[33][..], &[2, 16], &[7, 5], &[4, 33], &[2, 3, 40], &[2, 2, 3, 17], TILES] {
        c.add(format!("{dims:?}"), move |g| {
            let x = g.float("x", dims, Fill::Between(-2.0, 2.0))?;
            g.graph.push(Op::LogSoftmax, &[x], "y")
        });
    }
    c.add("rows far below zero", |g| {
        let x = g.float("x", &[3, 37], FAR_BELOW)?;
        g.graph.push(Op::LogSoftmax, &[x], "y")
    });
    for view in views() {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, Fill::Between(-2.0, 2.0))?;
            g.cotangent_viewed(&[4, 6], view)?;
            g.graph.push(Op::LogSoftmax, &[x], "y")
        });
    }
}
