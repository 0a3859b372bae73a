//! A program: a graph with the values of its leaves, what it is differentiated for, and its
//! text.

use std::collections::HashMap;
use std::fmt;

use graph::{DType, Graph, Invalid, NodeId, Op, Result, Shape};

use super::table;
use crate::ops::compute;
use crate::{Leaves, Mode, Value};

/// A leaf's bytes, and the value they decode to.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Data {
    pub bytes: Vec<u8>,
    pub value: Value,
}

impl Data {
    /// The data of a leaf with these bytes.
    pub(super) fn new(
        dtype: DType,
        shape: Shape,
        bytes: Vec<u8>,
    ) -> std::result::Result<Data, Invalid> {
        let value = Value::decode(dtype, shape, &bytes)?;
        Ok(Data { bytes, value })
    }
}

/// A graph, its leaves, the nodes that carry cotangents, and what it is differentiated for.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    pub graph: Graph,
    pub leaves: HashMap<NodeId, Data>,
    /// Nodes and the nodes that hold their cotangents.
    pub cotangents: Vec<(NodeId, NodeId)>,
    pub wrt: Vec<NodeId>,
}

/// How far values of a graph are moved: an addend for some nodes.
pub(super) type Moves<'a> = HashMap<NodeId, &'a [f64]>;

/// The outputs of a program at a point, and the sides of all kinks there.
pub(super) struct Point {
    pub outputs: Vec<Value>,
    pub sides: Vec<i32>,
}

impl Program {
    /// The values of the leaves.
    pub(super) fn values(&self) -> Leaves {
        self.leaves.iter().map(|(id, data)| (*id, data.value.clone())).collect()
    }

    /// All values of the graph, those of `moves` moved by `by` times their direction.
    pub(super) fn compute(&self, moves: &Moves<'_>, by: f64) -> Result<(Vec<Value>, Vec<i32>)> {
        let mut values: Vec<Value> = Vec::with_capacity(self.graph.len());
        let mut sides = Vec::new();
        for id in self.graph.ids() {
            let mut value = compute_node(&self.graph, &self.leaves, &values, id, &mut sides)?;
            if let Some(direction) = moves.get(&id)
                && let Some(x) = value.as_floats_mut()
            {
                x.iter_mut().zip(*direction).for_each(|(x, d)| *x += by * d);
            }
            values.push(value);
        }
        Ok((values, sides))
    }

    /// The outputs at a moved point.
    pub(super) fn point(&self, moves: &Moves<'_>, by: f64) -> Result<Point> {
        let (values, sides) = self.compute(moves, by)?;
        let outputs = self.cotangents.iter().map(|(y, _)| values[y.index()].clone()).collect();
        Ok(Point { outputs, sides })
    }

    /// What differentiating it must give, from the table alone: `None` for a gradient.
    pub(super) fn predicted(&self) -> Option<Blocked> {
        let graph = &self.graph;
        let index = |id: NodeId| graph.node(id).dtype == DType::I32;
        // Indices made from floats end a path: what they choose has a gradient, they have none.
        let smooth = self.reading(|id, a| !index(id) || index(a));
        let shown = |reads: &[Vec<bool>], x: NodeId| {
            self.cotangents.iter().any(|(y, _)| reads[y.index()][x.index()])
        };
        if let Some(&x) = self.wrt.iter().find(|&&x| !shown(&smooth, x)) {
            let all = self.reading(|_, _| true);
            for id in graph.ids().filter(|&id| index(id) && shown(&all, id)) {
                let args = &graph.node(id).args;
                if args.iter().all(|&a| index(a)) {
                    continue;
                }
                if let Some(i) = args.iter().position(|a| all[a.index()][x.index()]) {
                    return Some(Blocked { node: id, operand: Some(i) });
                }
            }
            return Some(Blocked { node: x, operand: None });
        }
        for id in graph.ids().filter(|&id| shown(&smooth, id)) {
            for (i, &a) in graph.node(id).args.iter().enumerate() {
                let wanted = self.wrt.iter().any(|x| smooth[a.index()][x.index()]);
                if wanted && (!index(id) || index(a)) && table::blocks(graph, id, i) {
                    return Some(Blocked { node: id, operand: Some(i) });
                }
            }
        }
        None
    }

    /// Which nodes each node reads, directly or not, itself included, by way of the operands
    /// that `by` accepts.
    fn reading(&self, by: impl Fn(NodeId, NodeId) -> bool) -> Vec<Vec<bool>> {
        let n = self.graph.len();
        let mut reads: Vec<Vec<bool>> = Vec::with_capacity(n);
        for id in self.graph.ids() {
            let mut row = vec![false; n];
            for &a in self.graph.node(id).args.iter().filter(|&&a| by(id, a)) {
                row.iter_mut().zip(&reads[a.index()]).for_each(|(to, from)| *to |= from);
            }
            row[id.index()] = true;
            reads.push(row);
        }
        reads
    }

    /// Which nodes an output depends on.
    pub(super) fn shown(&self) -> Vec<bool> {
        let mut shown = vec![false; self.graph.len()];
        self.cotangents.iter().for_each(|(y, _)| shown[y.index()] = true);
        for id in self.graph.ids().rev() {
            if shown[id.index()] {
                self.graph.node(id).args.iter().for_each(|a| shown[a.index()] = true);
            }
        }
        shown
    }

    /// The number of ops.
    pub(super) fn ops(&self) -> usize {
        let graph = &self.graph;
        graph.ids().filter(|&id| !matches!(graph.node(id).op, Op::Leaf)).count()
    }
}

/// Where a gradient stops.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) struct Blocked {
    /// The node that is named.
    pub node: NodeId,
    /// The operand that blocks; `None` when no output depends on the node.
    pub operand: Option<usize>,
}

/// The value of one node, from those before it.
pub(super) fn compute_node(
    graph: &Graph,
    leaves: &HashMap<NodeId, Data>,
    values: &[Value],
    id: NodeId,
    sides: &mut Vec<i32>,
) -> Result<Value> {
    let node = graph.node(id);
    if matches!(node.op, Op::Leaf) {
        let data = leaves.get(&id).ok_or_else(|| Invalid::new("a leaf without a value"))?;
        return Ok(data.value.clone());
    }
    let args: Vec<&Value> = node.args.iter().map(|a| &values[a.index()]).collect();
    let dtypes: Vec<DType> = node.args.iter().map(|&a| graph.node(a).dtype).collect();
    let out = (node.dtype, node.shape);
    let value = compute(&node.op, &args, &dtypes, out, &node.name, Mode::Smooth)?;
    table::sides(&node.op, &args, &value, sides);
    Ok(value)
}

impl fmt::Display for Program {
    /// One line per node, then what is differentiated.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for id in self.graph.ids() {
            let node = self.graph.node(id);
            let args: Vec<String> = node.args.iter().map(|a| format!("%{}", a.index())).collect();
            write!(f, "  %{} = {:?}({}) ", id.index(), node.op, args.join(", "))?;
            write!(f, "{} {} `{}`", node.dtype, node.shape, node.name)?;
            if let Some(data) = self.leaves.get(&id)
                && node.shape.elements() <= 8
            {
                match (data.value.as_floats(), data.value.as_ints()) {
                    (Some(x), _) => write!(f, " = {x:?}")?,
                    (_, Some(x)) => write!(f, " = {x:?}")?,
                    _ => {}
                }
            }
            writeln!(f)?;
        }
        for (y, dy) in &self.cotangents {
            writeln!(f, "  cotangent of %{} is %{}", y.index(), dy.index())?;
        }
        let wrt: Vec<String> = self.wrt.iter().map(|x| format!("%{}", x.index())).collect();
        write!(f, "  with respect to {}", wrt.join(", "))
    }
}
