//! The precision that gradients pass through quantized weights with, applied as a rewrite of the
//! graph.

use std::collections::HashMap;

use crate::*;

/// The precision of the operands of a product that takes a gradient through a quantized weight.
/// Results are f32 in each, and gradients through float weights are computed in f32 throughout.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum GradPrecision {
    /// f32, and f32 sums.
    F32,
    /// bf16: the cotangent passes `Cast`, and the product rounds the weight's elements. Rounding
    /// to nearest even, a relative error of at most 2^-9 in either. Sums are f32.
    Bf16,
    /// Block floating point: the cotangent passes `Cast` to [`Int16Rows`](DType::Int16Rows), and
    /// the product rounds the weight's elements in the same way, in groups of 64 along the reduced
    /// dimension. An error of at most 2^-14 of a group's largest magnitude in a cotangent, and of
    /// 2^-11 in a weight. Sums within a group are i32, of which none is rounded, and those of groups
    /// are added up in f32.
    Int16,
}

impl GradPrecision {
    /// All of them.
    pub const ALL: [GradPrecision; 3] =
        [GradPrecision::F32, GradPrecision::Bf16, GradPrecision::Int16];

    /// The name settings and checkpoints carry.
    pub fn name(self) -> &'static str {
        match self {
            GradPrecision::F32 => "f32",
            GradPrecision::Bf16 => "bf16",
            GradPrecision::Int16 => "int16",
        }
    }

    /// The type that the cotangents of products are brought to.
    pub fn dtype(self) -> DType {
        match self {
            GradPrecision::F32 => DType::F32,
            GradPrecision::Bf16 => DType::BF16,
            GradPrecision::Int16 => DType::Int16Rows,
        }
    }
}

/// The graph with its gradient products in a precision, and the same outputs in it. Forward
/// nodes stay as they are.
///
/// # Errors
/// `Invalid` when an output is not of this graph.
pub fn grad_precision(
    graph: Graph,
    outputs: Vec<NodeId>,
    precision: GradPrecision,
) -> Result<(Graph, Vec<NodeId>)> {
    if precision == GradPrecision::F32 {
        return Ok((graph, outputs));
    }
    let mut to = Graph::new();
    let mut moved: HashMap<NodeId, NodeId> = HashMap::new();
    let mut narrow: HashMap<NodeId, NodeId> = HashMap::new();
    for id in graph.ids() {
        let node = graph.node(id);
        if matches!(node.op, Op::Leaf) {
            moved.insert(id, to.leaf_like(node)?);
            continue;
        }
        let mut args = Vec::with_capacity(node.args.len());
        for a in &node.args {
            args.push(place(&moved, *a)?);
        }
        to.set_layer(node.layer);
        to.set_transient(node.transient);
        if let (true, Some(first)) = (is_gradient_product(&graph, node), args.first_mut()) {
            if !narrow.contains_key(first) {
                let cast = Op::Cast { dtype: precision.dtype() };
                let cast = to.push_fresh(cast, &[*first], &node.name)?;
                to.set_pass(cast, node.pass);
                narrow.insert(*first, cast);
            }
            *first = place(&narrow, *first)?;
        }
        let new = to.push_fresh(node.op.clone(), &args, &node.name)?;
        to.set_pass(new, node.pass);
        moved.insert(id, new);
    }
    to.set_layer(None);
    to.set_transient(false);
    let outputs = outputs.into_iter().map(|out| place(&moved, out)).collect::<Result<_>>()?;
    Ok((to, outputs))
}

/// A cotangent of f32 times a weight of blocks.
fn is_gradient_product(graph: &Graph, node: &Node) -> bool {
    let product = matches!(node.op, Op::MatMul { .. } | Op::MatMulExperts { .. });
    let dtype = |i: usize| node.args.get(i).map(|&a| graph.node(a).dtype);
    product
        && node.pass == Pass::Backward
        && dtype(0) == Some(DType::F32)
        && matches!(dtype(1), Some(DType::Block(_)))
}

fn place(moved: &HashMap<NodeId, NodeId>, id: NodeId) -> Result<NodeId> {
    let unknown = || Invalid::new(format!("node {} is not of this graph", id.index()));
    Ok(moved.get(&id).copied().ok_or_else(unknown)?)
}
