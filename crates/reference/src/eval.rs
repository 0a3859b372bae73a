//! Evaluation of graphs in f64.

use std::borrow::Cow;
use std::collections::HashMap;

use graph::{Code, DType, Fault, Graph, Invalid, NodeId, Op, Result};

use crate::Value;
use crate::ops::compute;

/// What the leaves of a graph hold.
pub type Leaves = HashMap<NodeId, Value>;

/// What ops with a straight-through gradient compute.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// `Round`, `Cast`, `QuantizeRows` and `RopeTable` round as their definitions say, after
    /// rounding their f64 operand to f32. What a device computes, but for its own rounding.
    Exact,
    /// They are the identity (`RopeTable` does not round): every function is smooth, so finite
    /// differences give the derivative that the gradient rules claim.
    Smooth,
}

/// The values of `wanted`, in that order. Only what they depend on is computed.
///
/// # Errors
/// `Fault` naming the node: a leaf that has no value or one of another shape or kind, an index
/// outside of its tensor, no memory. `Invalid` when a node is not of this graph.
pub fn eval(graph: &Graph, leaves: &Leaves, wanted: &[NodeId], mode: Mode) -> Result<Vec<Value>> {
    eval_with(graph, leaves, wanted, mode, &|_| {})
}

/// As [`eval`] in [`Mode::Exact`], with the result of every node rounded to f32.
pub(crate) fn eval_stored(graph: &Graph, leaves: &Leaves, wanted: &[NodeId]) -> Result<Vec<Value>> {
    eval_with(graph, leaves, wanted, Mode::Exact, &|value| {
        if let Some(data) = value.as_floats_mut() {
            data.iter_mut().for_each(|x| *x = f64::from(*x as f32));
        }
    })
}

fn eval_with(
    graph: &Graph,
    leaves: &Leaves,
    wanted: &[NodeId],
    mode: Mode,
    made: &dyn Fn(&mut Value),
) -> Result<Vec<Value>> {
    let mut live = vec![false; graph.len()];
    for id in wanted {
        match live.get_mut(id.index()) {
            Some(flag) => *flag = true,
            None => return Err(Invalid::new("a wanted node is not of this graph").into()),
        }
    }
    for id in graph.ids().rev() {
        if live[id.index()] {
            graph.node(id).args.iter().for_each(|a| live[a.index()] = true);
        }
    }
    let mut values: Vec<Option<Cow<'_, Value>>> = vec![None; graph.len()];
    for id in graph.ids().filter(|id| live[id.index()]) {
        let node = graph.node(id);
        let value = if matches!(node.op, Op::Leaf) {
            Cow::Borrowed(bound(graph, leaves, id)?)
        } else {
            let mut args = Vec::with_capacity(node.args.len());
            for a in &node.args {
                args.push(computed(&values, *a, &node.name)?);
            }
            let dtypes: Vec<DType> = node.args.iter().map(|&a| graph.node(a).dtype).collect();
            let out = (node.dtype, node.shape);
            let mut value = compute(&node.op, &args, &dtypes, out, &node.name, mode)?;
            made(&mut value);
            Cow::Owned(value)
        };
        values[id.index()] = Some(value);
    }
    wanted.iter().map(|id| Ok(computed(&values, *id, "")?.clone())).collect()
}

fn computed<'v>(
    values: &'v [Option<Cow<'_, Value>>],
    id: NodeId,
    reader: &str,
) -> std::result::Result<&'v Value, Fault> {
    let value = values.get(id.index()).and_then(|v| v.as_deref());
    value.ok_or_else(|| Fault::new(Code::Internal, reader, "an operand was not computed"))
}

fn bound<'l>(
    graph: &Graph,
    leaves: &'l Leaves,
    id: NodeId,
) -> std::result::Result<&'l Value, Fault> {
    let node = graph.node(id);
    let value = leaves
        .get(&id)
        .ok_or_else(|| Fault::binding(&node.name, "no value is bound to this leaf"))?;
    if value.shape() != node.shape {
        let message = format!("the leaf is {}, its value is {}", node.shape, value.shape());
        return Err(Fault::binding(&node.name, message));
    }
    if value.as_ints().is_some() != (node.dtype == DType::I32) {
        let message = format!("the leaf is {}, its value is not", node.dtype);
        return Err(Fault::binding(&node.name, message));
    }
    Ok(value)
}
