//! Gradient rules against central differences of the f64 interpreter.

use std::collections::BTreeSet;

use graph::{Backward, Error, Graph, NodeId, Result};

use super::case::{CaseGraph, Expected};
use super::measure::Measure;
use super::{RULE_BOUND, Rng};
use crate::{Leaves, Mode, Value, eval};

/// The signature of [`graph::vjp`]; the checker's own tests put broken ones in its place.
pub type Differentiate = dyn Fn(&Graph, &[(NodeId, NodeId)], &[NodeId]) -> Result<Backward>;

/// Inputs of up to this many elements are differenced element by element.
const ALL_ELEMENTS: usize = 64;

/// Of longer inputs this many elements, and as many random directions.
const SOME_ELEMENTS: usize = 40;
const DIRECTIONS: usize = 4;

/// Of inputs longer than this fewer: they are there for the tiles of devices.
const LONG: usize = 4096;
const OF_LONG: (usize, usize) = (4, 1);

/// How far an input of size 1 moves, and twice as far: f64 rounding divided by the step, and the
/// fourth power of the step, are both far below the bound.
const STEP: f64 = 1e-4;

/// What checking one input of a case gave.
pub enum Checked {
    /// Its gradient was compared; here it is.
    Gradient(Measure, Value),
    /// It was refused, as expected.
    Refused,
    /// Why it fails.
    Failed(String),
}

/// A way to move an input.
enum Way {
    Element(usize),
    Direction(Vec<f64>),
}

/// Checks the gradient of `sum(cotangent * output)` with respect to one leaf.
pub fn check(
    case: &CaseGraph,
    output: NodeId,
    cotangent: NodeId,
    leaf: NodeId,
    expected: Expected,
    differentiate: &Differentiate,
    rng: &mut Rng,
) -> Checked {
    let graph = &case.graph;
    let made = differentiate(graph, &[(output, cotangent)], &[leaf]);
    match (expected, made) {
        (Expected::Nothing, _) => Checked::Failed("nothing is asked of this input".into()),
        (Expected::Gradient, Ok(back)) => gradient(case, output, cotangent, leaf, &back, rng)
            .map_or_else(|e| Checked::Failed(e.to_string()), |(m, g)| Checked::Gradient(m, g)),
        (Expected::Gradient, Err(e)) => Checked::Failed(format!("refused: {e}")),
        (Expected::Refusal { .. }, Ok(_)) => {
            Checked::Failed("differentiated, where a refusal was expected".into())
        }
        (Expected::Refusal { code, op }, Err(Error::Refusal(refusal))) => {
            let named = code == graph::Code::NoGradientPath || refusal.operand.is_some();
            let message = refusal.to_string();
            if refusal.code != code || refusal.op != op {
                let got = refusal.code.as_str();
                let want = code.as_str();
                Checked::Failed(format!("{want} at {op} was expected, got {got}: {message}"))
            } else if refusal.node.is_empty() || !named || message.contains('\n') {
                Checked::Failed(format!("the refusal names too little: {message}"))
            } else {
                Checked::Refused
            }
        }
        (Expected::Refusal { .. }, Err(e)) => Checked::Failed(format!("no refusal: {e}")),
    }
}

fn gradient(
    case: &CaseGraph,
    output: NodeId,
    cotangent: NodeId,
    leaf: NodeId,
    back: &Backward,
    rng: &mut Rng,
) -> Result<(Measure, Value)> {
    let invalid = |message: &str| graph::Invalid::new(message);
    let &[grad] = back.grads.as_slice() else {
        return Err(invalid("another number of gradients than asked for").into());
    };
    let (made, of) = (back.graph.node(grad), case.graph.node(leaf));
    if made.shape != of.shape || made.dtype != graph::DType::F32 {
        let message =
            format!("the gradient of a leaf {} is {} {}", of.shape, made.dtype, made.shape);
        return Err(invalid(&message).into());
    }
    let mut values = eval(&back.graph, &case.leaves, &[grad, cotangent], Mode::Smooth)?;
    let [Some(grad), Some(cotangent)] = [values.first(), values.get(1)].map(|v| v?.as_floats())
    else {
        return Err(invalid("a gradient that is no float tensor").into());
    };
    let n = grad.len();
    let mut leaves = case.leaves.clone();
    let mut derivative = |way: &Way| difference(case, output, cotangent, leaf, way, &mut leaves);
    let mut measure = Measure::default();
    let mut chosen: BTreeSet<usize> = (0..if n > ALL_ELEMENTS { 0 } else { n }).collect();
    let (some, directions) = if n > LONG { OF_LONG } else { (SOME_ELEMENTS, DIRECTIONS) };
    // None twice: one that cancels would be excused as often.
    while n > ALL_ELEMENTS && chosen.len() < some {
        chosen.insert(rng.below(n));
    }
    let mut expected = Vec::with_capacity(chosen.len());
    for &i in &chosen {
        expected.push(derivative(&Way::Element(i))?);
    }
    let got: Vec<f64> = chosen.iter().map(|&i| grad[i]).collect();
    measure.compare(&got, &expected, RULE_BOUND);
    if n > ALL_ELEMENTS {
        let (mut got, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..directions {
            let direction: Vec<f64> = (0..n).map(|_| rng.between(-1.0, 1.0)).collect();
            got.push(grad.iter().zip(&direction).map(|(g, d)| g * d).sum());
            expected.push(derivative(&Way::Direction(direction))?);
        }
        measure.compare(&got, &expected, RULE_BOUND);
    }
    Ok((measure, values.swap_remove(0)))
}

/// Checks that gradients asked for together are, bit for bit, those asked for `alone`, and that
/// differentiating twice gives the same nodes.
pub fn together(
    case: &CaseGraph,
    output: NodeId,
    cotangent: NodeId,
    alone: &[(NodeId, Value)],
    differentiate: &Differentiate,
) -> Result<()> {
    let wrt: Vec<NodeId> = alone.iter().map(|(leaf, _)| *leaf).collect();
    let back = differentiate(&case.graph, &[(output, cotangent)], &wrt)?;
    let again = differentiate(&case.graph, &[(output, cotangent)], &wrt)?;
    let nodes = |g: &Graph| g.ids().map(|id| g.node(id).clone()).collect::<Vec<_>>();
    if nodes(&back.graph) != nodes(&again.graph) || back.grads != again.grads {
        return Err(graph::Invalid::new("differentiating twice gives two graphs").into());
    }
    let values = eval(&back.graph, &case.leaves, &back.grads, Mode::Smooth)?;
    for (value, (leaf, alone)) in values.iter().zip(alone) {
        if value != alone {
            let name = &case.graph.node(*leaf).name;
            let message = format!("the gradient of `{name}` is another one when asked for alone");
            return Err(graph::Invalid::new(message).into());
        }
    }
    Ok(())
}

/// The central difference of `sum(cotangent * output)` when a leaf moves. Outputs are
/// subtracted before they are summed, so that those that do not change cancel exactly.
fn difference(
    case: &CaseGraph,
    output: NodeId,
    cotangent: &[f64],
    leaf: NodeId,
    way: &Way,
    leaves: &mut Leaves,
) -> Result<f64> {
    let lost = || graph::Invalid::new("a leaf that is no float tensor");
    let old: Vec<f64> = leaves.get(&leaf).and_then(Value::as_floats).ok_or_else(lost)?.to_vec();
    let mut at = |steps: f64| -> Result<(Vec<f64>, f64)> {
        let x = leaves.get_mut(&leaf).and_then(Value::as_floats_mut).ok_or_else(lost)?;
        x.copy_from_slice(&old);
        let step = match way {
            Way::Element(i) => {
                let h = steps * STEP * old[*i].abs().max(0.5);
                x[*i] = old[*i] + h;
                x[*i] - old[*i]
            }
            Way::Direction(direction) => {
                let h = steps * STEP;
                x.iter_mut().zip(direction).for_each(|(x, d)| *x += h * d);
                h
            }
        };
        let values = eval(&case.graph, leaves, &[output], Mode::Smooth)?;
        let y = values.first().and_then(Value::as_floats).ok_or_else(lost)?;
        Ok((y.to_vec(), step))
    };
    let mut central = |steps: f64| -> Result<f64> {
        let (above, up) = at(steps)?;
        let (below, down) = at(-steps)?;
        let changes = above.iter().zip(&below).zip(cotangent);
        Ok(changes.map(|((a, b), c)| c * (a - b)).sum::<f64>() / (up - down))
    };
    // Of both, the error that grows with the square of the step is four to one: what an element
    // that nearly cancels leaves is then still told from it.
    let (near, far) = (central(1.0)?, central(2.0)?);
    leaves.get_mut(&leaf).and_then(Value::as_floats_mut).ok_or_else(lost)?.copy_from_slice(&old);
    Ok((4.0 * near - far) / 3.0)
}
