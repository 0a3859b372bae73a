//! The graph: a list of nodes in SSA form. The only file that indexes them.

use std::collections::HashMap;
use std::sync::Arc;

use crate::shape_rule::infer;
use crate::{DType, Invalid, Op, Shape};

/// A node of one particular graph.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(u32);

impl NodeId {
    /// The node's place in its graph, counted from 0.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a node is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Pass {
    /// Leaves and the model itself.
    Forward,
    /// Gradient nodes, made by [`vjp`](crate::vjp).
    Backward,
    /// Copies of forward nodes, made by [`recompute`](crate::recompute()).
    Again,
}

/// One value of a graph and how it is computed.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// The op.
    pub op: Op,
    /// Operands; all earlier in the graph.
    pub args: Vec<NodeId>,
    /// Shape of the value.
    pub shape: Shape,
    /// Element type of the value.
    pub dtype: DType,
    /// The name refusals and faults print; a gradient node carries its forward node's.
    pub name: Arc<str>,
    /// The layer (block) it belongs to, if any; recomputation keeps what crosses layers.
    pub layer: Option<u32>,
    /// What it is for.
    pub pass: Pass,
    /// True for leaves that are bound to what [`Device::load`](crate::Device::load) returned.
    pub resident: bool,
    /// True for forward values that are not kept for the backward pass, whatever the policy of
    /// [`recompute`](crate::recompute()).
    pub transient: bool,
}

/// A list of nodes; each reads only earlier ones. Equal ops on equal operands are one node.
#[derive(Clone, Default, Debug)]
pub struct Graph {
    nodes: Vec<Node>,
    known: HashMap<(Op, Vec<NodeId>), NodeId>,
    leaves: HashMap<Arc<str>, NodeId>,
    layer: Option<u32>,
    transient: bool,
    /// The name gradient nodes are given while a node is differentiated.
    origin: Option<Arc<str>>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Graph {
        Graph::default()
    }

    /// Sets the layer that nodes pushed from now on belong to.
    pub fn set_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// While set, nodes pushed are transient: what the backward pass reads of them is computed
    /// again, whatever the policy of [`recompute`](crate::recompute()). Returns what was set.
    pub fn set_transient(&mut self, transient: bool) -> bool {
        std::mem::replace(&mut self.transient, transient)
    }

    /// A leaf bound to host memory when the graph runs, or the existing one of that name.
    ///
    /// # Errors
    /// `Invalid` when the name is taken by another kind of leaf, or when a row of that shape is
    /// not a whole number of the dtype's blocks.
    pub fn leaf(&mut self, name: &str, shape: Shape, dtype: DType) -> Result<NodeId, Invalid> {
        self.new_leaf(name, shape, dtype, false)
    }

    /// A leaf bound to a weight that the device has loaded and packed; what `MatMul` and
    /// `Gather` take as their matrix. Every block-format matrix is one.
    ///
    /// # Errors
    /// As [`Graph::leaf`].
    pub fn weight(&mut self, name: &str, shape: Shape, dtype: DType) -> Result<NodeId, Invalid> {
        self.new_leaf(name, shape, dtype, true)
    }

    pub(crate) fn leaf_like(&mut self, node: &Node) -> Result<NodeId, Invalid> {
        self.new_leaf(&node.name, node.shape, node.dtype, node.resident)
    }

    fn new_leaf(
        &mut self,
        name: &str,
        shape: Shape,
        dtype: DType,
        resident: bool,
    ) -> Result<NodeId, Invalid> {
        if let Some(&id) = self.leaves.get(name) {
            let node = self.node(id);
            if node.shape == shape && node.dtype == dtype && node.resident == resident {
                return Ok(id);
            }
            let kind = |resident| if resident { "weight" } else { "leaf" };
            return Err(Invalid::new(format!(
                "leaf `{name}` exists as {} {} {} and was asked for as {} {dtype} {shape}",
                kind(node.resident),
                node.dtype,
                node.shape,
                kind(resident)
            )));
        }
        if shape.bytes(dtype).is_none() {
            return Err(Invalid::new(format!(
                "leaf `{name}`: rows of {} elements are not whole blocks of {dtype}",
                shape.cols()
            )));
        }
        let name: Arc<str> = name.into();
        let id = self.append(Node {
            op: Op::Leaf,
            args: Vec::new(),
            shape,
            dtype,
            name: name.clone(),
            layer: None,
            pass: Pass::Forward,
            resident,
            transient: false,
        })?;
        self.leaves.insert(name, id);
        Ok(id)
    }

    /// A node computing `op`, or the existing one that does.
    ///
    /// # Errors
    /// `Invalid` naming the node, the op and the shapes when they do not fit together.
    pub fn push(&mut self, op: Op, args: &[NodeId], name: &str) -> Result<NodeId, Invalid> {
        let key = (op, args.to_vec());
        if let Some(&id) = self.known.get(&key) {
            return Ok(id);
        }
        let id = self.push_fresh(key.0.clone(), args, name)?;
        self.known.insert(key, id);
        Ok(id)
    }

    /// A new node even where an equal one exists: for recomputation.
    pub(crate) fn push_fresh(
        &mut self,
        op: Op,
        args: &[NodeId],
        name: &str,
    ) -> Result<NodeId, Invalid> {
        let name: Arc<str> = match &self.origin {
            Some(origin) => origin.clone(),
            None => name.into(),
        };
        for &a in args {
            if a.index() >= self.nodes.len() {
                return Err(Invalid::new(format!(
                    "node `{name}` reads node {} of another graph",
                    a.index()
                )));
            }
        }
        let operands: Vec<(DType, Shape)> =
            args.iter().map(|&a| (self.node(a).dtype, self.node(a).shape)).collect();
        let (dtype, shape) = infer(&op, &operands).map_err(|why| {
            let shapes: Vec<String> = operands.iter().map(|(d, s)| format!("{d} {s}")).collect();
            Invalid::new(format!("{} at node `{name}` ({}): {why}", op.name(), shapes.join(", ")))
        })?;
        if shape.bytes(dtype).is_none() {
            return Err(Invalid::new(format!(
                "{} at node `{name}`: rows of {} elements are not whole blocks of {dtype}",
                op.name(),
                shape.cols()
            )));
        }
        self.append(Node {
            op,
            args: args.to_vec(),
            shape,
            dtype,
            name,
            layer: self.layer,
            pass: if self.origin.is_some() { Pass::Backward } else { Pass::Forward },
            resident: false,
            transient: self.transient && self.origin.is_none(),
        })
    }

    fn append(&mut self, node: Node) -> Result<NodeId, Invalid> {
        match u32::try_from(self.nodes.len()) {
            Ok(n) if n < u32::MAX => {
                self.nodes.push(node);
                Ok(NodeId(n))
            }
            _ => Err(Invalid::new("a graph has more than 2^32 nodes")),
        }
    }

    /// While set, nodes that are pushed are gradient nodes of this name and layer.
    pub(crate) fn set_origin(&mut self, origin: Option<(Arc<str>, Option<u32>)>) {
        match origin {
            Some((name, layer)) => {
                self.origin = Some(name);
                self.layer = layer;
            }
            None => {
                self.origin = None;
                self.layer = None;
            }
        }
    }

    /// The node of an id, if it is of this graph (or at least within its length).
    pub(crate) fn get(&self, id: NodeId) -> Result<&Node, Invalid> {
        let node = self.nodes.get(id.index());
        node.ok_or_else(|| Invalid::new(format!("node {} is not of this graph", id.index())))
    }

    /// The node of an id of this graph.
    #[allow(clippy::indexing_slicing)] // ids come from this graph's own `append` only
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Sets what a node is for: graph rewrites, and nodes that take part of a gradient, which are
    /// gradient nodes themselves.
    pub fn set_pass(&mut self, id: NodeId, pass: Pass) {
        if let Some(node) = self.nodes.get_mut(id.index()) {
            node.pass = pass;
        }
    }

    /// The leaf of this name.
    pub fn find_leaf(&self, name: &str) -> Option<NodeId> {
        self.leaves.get(name).copied()
    }

    /// Ids of all nodes, in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + ExactSizeIterator + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// How many nodes there are.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }
}
