//! Recomputation: which forward values a training graph keeps for its backward pass, applied
//! as a rewrite of the graph.

use std::collections::HashMap;

use crate::*;

/// What a training graph keeps for its backward pass.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Recompute {
    /// Everything but what is transient, see [`Graph::set_transient`].
    None,
    /// Only what crosses layers; each layer runs again before it is differentiated.
    PerLayer,
}

impl Recompute {
    /// The name that settings and reports carry.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::PerLayer => "per-layer",
        }
    }
}

/// The graph under a policy, and the same outputs in it. The values, bit for bit, are the
/// same: a recomputed node is the same op on the same operands.
///
/// # Errors
/// `Invalid` when an output is not of this graph.
pub fn recompute(
    graph: &Graph,
    outputs: &[NodeId],
    policy: Recompute,
) -> Result<(Graph, Vec<NodeId>)> {
    for &out in outputs {
        graph.get(out)?;
    }
    let keeps_layers = policy == Recompute::None;
    if keeps_layers && graph.ids().all(|id| !graph.node(id).transient) {
        return Ok((graph.clone(), outputs.to_vec()));
    }
    // A forward value is kept when it belongs to no layer or another layer's forward pass
    // reads it, unless it is transient.
    let mut kept: Vec<bool> = graph
        .ids()
        .map(|id| graph.node(id))
        .map(|n| n.pass == Pass::Backward || !n.transient && (keeps_layers || n.layer.is_none()))
        .collect();
    for id in graph.ids() {
        let node = graph.node(id);
        for &a in node.args.iter().filter(|_| node.pass != Pass::Backward) {
            if graph.node(a).layer != node.layer
                && !graph.node(a).transient
                && let Some(k) = kept.get_mut(a.index())
            {
                *k = true;
            }
        }
    }
    for out in outputs {
        if let Some(k) = kept.get_mut(out.index()) {
            *k = true;
        }
    }
    let kept = |id: NodeId| kept.get(id.index()).copied().unwrap_or(true);

    let mut to = Graph::new();
    let mut moved: HashMap<NodeId, NodeId> = HashMap::new();
    let mut again: HashMap<NodeId, NodeId> = HashMap::new();
    for id in graph.ids() {
        let node = graph.node(id);
        if node.pass == Pass::Backward {
            // Clone the forward values it reads, operands first.
            let mut stack: Vec<NodeId> = node.args.iter().copied().filter(|&a| !kept(a)).collect();
            while let Some(&f) = stack.last() {
                if again.contains_key(&f) {
                    stack.pop();
                    continue;
                }
                let forward = graph.node(f);
                let missing: Vec<NodeId> = forward
                    .args
                    .iter()
                    .copied()
                    .filter(|a| !kept(*a) && !again.contains_key(a))
                    .collect();
                if !missing.is_empty() {
                    stack.extend(missing);
                    continue;
                }
                let args = rename(&forward.args, |a| if kept(a) { &moved } else { &again })?;
                to.set_layer(forward.layer);
                let copy = to.push_fresh(forward.op.clone(), &args, &forward.name)?;
                to.set_pass(copy, Pass::Again);
                again.insert(f, copy);
                stack.pop();
            }
        }
        let new = if matches!(node.op, Op::Leaf) {
            to.leaf_like(node)?
        } else {
            let args = rename(&node.args, |a| {
                if node.pass == Pass::Backward && !kept(a) { &again } else { &moved }
            })?;
            to.set_layer(node.layer);
            let new = to.push_fresh(node.op.clone(), &args, &node.name)?;
            to.set_pass(new, node.pass);
            new
        };
        moved.insert(id, new);
    }
    to.set_layer(None);
    let outputs = rename(outputs, |_| &moved)?;
    Ok((to, outputs))
}

fn rename<'m>(
    ids: &[NodeId],
    of: impl Fn(NodeId) -> &'m HashMap<NodeId, NodeId>,
) -> std::result::Result<Vec<NodeId>, Invalid> {
    ids.iter()
        .map(|&id| {
            let new = of(id).get(&id).copied();
            new.ok_or_else(|| Invalid::new(format!("node {} is not of this graph", id.index())))
        })
        .collect()
}
