//! `grad_precision`: which products of a gradient graph are rounded.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use gguf::TensorType;
use gradus_graph::*;

use common::{any_layout, shape};

/// Two projections, one of blocks and one of f16, and their gradient for `x`.
fn differentiated() -> (Graph, Vec<NodeId>) {
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[3, 32]), DType::F32).unwrap();
    let blocks = g.weight("blocks", shape(&[64, 32]), DType::Block(TensorType::Q4_0)).unwrap();
    let floats = g.weight("floats", shape(&[8, 64]), DType::F16).unwrap();
    let hidden = g.project(x, blocks).unwrap();
    let y = g.project(hidden, floats).unwrap();
    let dy = g.leaf("dy", shape(&[3, 8]), DType::F32).unwrap();
    let back = vjp(&g, &[(y, dy)], &[x]).unwrap();
    let outputs = [y].into_iter().chain(back.grads).collect();
    (back.graph, outputs)
}

#[test]
fn full_precision_changes_nothing() {
    let (graph, outputs) = differentiated();
    let ops = |g: &Graph| g.ids().map(|id| g.node(id).op.clone()).collect::<Vec<_>>();
    let before = ops(&graph);
    let (same, ids) = grad_precision(graph, outputs.clone(), GradPrecision::F32).unwrap();
    assert_eq!((ops(&same), ids), (before, outputs));
}

#[test]
fn gradients_through_blocks_alone_are_rounded() {
    rounded(GradPrecision::Bf16, DType::BF16);
    rounded(GradPrecision::Int16, DType::Int16Rows);
}

fn rounded(precision: GradPrecision, rounded: DType) {
    let (graph, outputs) = differentiated();
    let len = graph.len();
    let (graph, outputs) = grad_precision(graph, outputs, precision).unwrap();
    assert_eq!(graph.len(), len + 1, "one cast");
    let dtype = |id: NodeId| graph.node(id).dtype;
    let mut products = 0;
    for node in graph.ids().map(|id| graph.node(id)) {
        let (Op::MatMul { .. }, [a, b]) = (&node.op, &*node.args) else { continue };
        let gradient = node.pass == Pass::Backward;
        let block = matches!(dtype(*b), DType::Block(_));
        let expected = match (gradient, block) {
            (true, true) => rounded,
            (false, true) => DType::Q8Rows,
            (_, false) => DType::F32,
        };
        assert_eq!(dtype(*a), expected, "at `{}`", node.name);
        if gradient && block {
            let cast = graph.node(*a);
            assert_eq!(cast.op, Op::Cast { dtype: rounded });
            assert_eq!((cast.pass, &cast.name), (Pass::Backward, &node.name));
        }
        products += 1;
    }
    assert_eq!(products, 4);
    assert!(outputs.iter().all(|&out| dtype(out) == DType::F32));
}

#[test]
fn an_output_of_another_graph_is_invalid() {
    let (graph, mut outputs) = differentiated();
    let mut larger = graph.clone();
    outputs.push(larger.fill(1.0, shape(&[2])).unwrap());
    assert!(grad_precision(graph, outputs, GradPrecision::Bf16).is_err());
}

/// What a gradient costs is told by what it is multiplied in.
#[test]
fn costs_follow_the_precision() {
    for precision in GradPrecision::ALL {
        let (graph, outputs) = differentiated();
        let (graph, outputs) = grad_precision(graph, outputs, precision).unwrap();
        let cost = Cost::of(&plan(&graph, &outputs, &any_layout()).unwrap());
        let [blocks, floats] = [3 * 64 * 32, 3 * 64 * 8].map(f64::from);
        let of = |which| if precision == which { blocks } else { 0.0 };
        assert_eq!((cost.block, cost.bf16), (blocks, of(GradPrecision::Bf16)), "{precision:?}");
        assert_eq!(cost.int16, of(GradPrecision::Int16), "{precision:?}");
        assert_eq!(cost.float, 2.0 * floats + of(GradPrecision::F32), "{precision:?}");
    }
}
