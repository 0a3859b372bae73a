//! From a program that fails to the shortest that still does.

use std::collections::HashMap;

use graph::{DType, Graph, NodeId, Op};

use super::program::{Data, Moves, Program};
use crate::Value;

/// How a node of a shorter program comes about.
#[derive(Copy, Clone, PartialEq)]
enum Change {
    /// The node becomes a leaf that holds its value.
    Leaf(NodeId),
    /// Readers of the node read this one instead.
    Bypass(NodeId, NodeId),
    /// Nothing but what is not needed goes.
    None,
}

/// Makes a failing program shorter for as long as it fails.
pub(super) fn shrink(program: &Program, fails: &dyn Fn(&Program) -> bool) -> Program {
    let mut best = program.clone();
    if let Some(pruned) = rebuilt(&best, Change::None).filter(|p| fails(p)) {
        best = pruned;
    }
    loop {
        let candidates = candidates(&best);
        match candidates.into_iter().find(|p| size(p) < size(&best) && fails(p)) {
            Some(shorter) => best = shorter,
            None => return best,
        }
    }
}

/// What is made smaller: ops, then nodes, outputs and what is differentiated.
fn size(p: &Program) -> (usize, usize, usize) {
    (p.ops(), p.graph.len(), p.cotangents.len() + p.wrt.len())
}

fn candidates(p: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    let mut add = |p: &Program, change| all.extend(rebuilt(p, change));
    if p.cotangents.len() > 1 {
        for i in 0..p.cotangents.len() {
            let mut fewer = p.clone();
            fewer.cotangents.remove(i);
            add(&fewer, Change::None);
        }
    }
    if p.wrt.len() > 1 {
        for i in 0..p.wrt.len() {
            let mut fewer = p.clone();
            fewer.wrt.remove(i);
            add(&fewer, Change::None);
        }
    }
    // Of an op as output, its operands.
    for (i, (y, _)) in p.cotangents.iter().enumerate() {
        for &a in &p.graph.node(*y).args {
            let mut earlier = p.clone();
            if let Some(made) = moved(&mut earlier, i, a) {
                add(&made, Change::None);
            }
        }
    }
    for id in p.graph.ids().filter(|&id| !matches!(p.graph.node(id).op, Op::Leaf)) {
        add(p, Change::Leaf(id));
        for &a in &p.graph.node(id).args {
            let (from, to) = (p.graph.node(id), p.graph.node(a));
            if (from.shape, from.dtype) == (to.shape, to.dtype) {
                add(p, Change::Bypass(id, a));
            }
        }
    }
    all
}

/// The program with output `i` moved to another node, whose cotangent is all ones.
fn moved(p: &mut Program, i: usize, to: NodeId) -> Option<Program> {
    let node = p.graph.node(to);
    if !node.dtype.is_float() {
        return None;
    }
    let shape = node.shape;
    let name = format!("cotangent {}", p.graph.len());
    let ones = Value::floats(shape, vec![1.0; shape.elements()]).ok()?;
    let bytes = ones.encode(DType::F32).ok()?;
    let dy = p.graph.leaf(&name, shape, DType::F32).ok()?;
    p.leaves.insert(dy, Data { bytes, value: ones });
    *p.cotangents.get_mut(i)? = (to, dy);
    Some(p.clone())
}

/// A new graph of what a program needs, after one change.
fn rebuilt(p: &Program, change: Change) -> Option<Program> {
    let instead = |id: NodeId| match change {
        Change::Bypass(from, to) if from == id => to,
        _ => id,
    };
    let cut = |id: NodeId| change == Change::Leaf(id);
    let mut needed = vec![false; p.graph.len()];
    for &(y, dy) in &p.cotangents {
        needed[instead(y).index()] = true;
        needed[instead(dy).index()] = true;
    }
    for &x in &p.wrt {
        needed[instead(x).index()] = true;
    }
    for id in p.graph.ids().rev() {
        if needed[id.index()] && !cut(id) {
            p.graph.node(id).args.iter().for_each(|a| needed[instead(*a).index()] = true);
        }
    }
    let values = match change {
        Change::Leaf(_) => p.compute(&Moves::new(), 0.0).ok()?.0,
        _ => Vec::new(),
    };
    let mut made = Program { graph: Graph::new(), ..Program::default() };
    let mut new: HashMap<NodeId, NodeId> = HashMap::new();
    for id in p.graph.ids().filter(|id| needed[id.index()]) {
        let node = p.graph.node(id);
        let leaf = matches!(node.op, Op::Leaf);
        let made_id = if leaf || cut(id) {
            let data = match leaf {
                true => p.leaves.get(&id)?.clone(),
                false => {
                    let bytes = values.get(id.index())?.encode(node.dtype).ok()?;
                    Data::new(node.dtype, node.shape, bytes).ok()?
                }
            };
            let made_id = match node.resident {
                true => made.graph.weight(&node.name, node.shape, node.dtype),
                false => made.graph.leaf(&node.name, node.shape, node.dtype),
            };
            let made_id = made_id.ok()?;
            made.leaves.insert(made_id, data);
            made_id
        } else {
            let args: Option<Vec<NodeId>> =
                node.args.iter().map(|a| new.get(&instead(*a)).copied()).collect();
            made.graph.push(node.op.clone(), &args?, &node.name).ok()?
        };
        new.insert(id, made_id);
    }
    let of = |id: NodeId| new.get(&instead(id)).copied();
    for &(y, dy) in &p.cotangents {
        made.cotangents.push((of(y)?, of(dy)?));
    }
    for &x in &p.wrt {
        let x = of(x)?;
        if !made.wrt.contains(&x) {
            made.wrt.push(x);
        }
    }
    Some(made)
}
