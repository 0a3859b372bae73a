//! The loss through the output projection in pieces: what is built, what is refused, and what
//! the backward pass computes again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use common::*;
use gguf::TensorType;
use gradus_graph::*;

const ROWS: usize = 10;
const VOCAB: usize = 40;

struct Built {
    graph: Graph,
    x: NodeId,
    w: NodeId,
    losses: NodeId,
    dy: NodeId,
}

fn leaf(g: &mut Graph, name: &str, dims: &[usize], dtype: DType) -> NodeId {
    g.leaf(name, shape(dims), dtype).unwrap()
}

fn build(how: &Projected) -> Built {
    let mut g = Graph::new();
    let x = leaf(&mut g, "x", &[ROWS, 32], DType::F32);
    let w = g.weight("head", shape(&[VOCAB, 32]), DType::Block(TensorType::Q4_0)).unwrap();
    let labels = leaf(&mut g, "labels", &[ROWS], DType::I32);
    let weights = leaf(&mut g, "weights", &[ROWS], DType::F32);
    let dy = leaf(&mut g, "dy", &[ROWS], DType::F32);
    g.set_layer(Some(3));
    let h = g.unary(Unary::Tanh, x).unwrap();
    g.set_layer(None);
    let losses = g
        .projected_cross_entropy((h, labels, Some(weights)), VOCAB, how, |g, x| g.project(x, w))
        .unwrap();
    Built { graph: g, x, w, losses, dy }
}

fn count(g: &Graph, pass: Pass, op: &str) -> usize {
    let of = |id: &NodeId| g.node(*id).pass == pass && g.node(*id).op.name() == op;
    g.ids().filter(of).count()
}

#[test]
fn pieces_are_computed_again_whatever_the_policy_and_nothing_else_is() {
    let how = Projected { rows: Some(4), ..Projected::PLAIN };
    let built = build(&how);
    let g = &built.graph;
    assert_eq!(g.node(built.losses).shape, shape(&[ROWS]));
    assert_eq!(count(g, Pass::Forward, "MatMul"), 3);
    for id in g.ids() {
        let head = matches!(g.node(id).op, Op::MatMul { .. } | Op::QuantizeRows);
        assert_eq!(g.node(id).transient, head, "{:?}", g.node(id).op);
    }
    let back = vjp(g, &[(built.losses, built.dy)], &[built.x]).unwrap();
    assert!(back.graph.ids().skip(g.len()).all(|id| !back.graph.node(id).transient));
    let outputs = [built.losses, back.grads[0]];
    for (policy, tanh) in [(Recompute::None, 0), (Recompute::PerLayer, 0)] {
        let (again, outs) = recompute(&back.graph, &outputs, policy).unwrap();
        assert_eq!(count(&again, Pass::Again, "MatMul"), 3, "{policy:?}");
        assert_eq!(count(&again, Pass::Again, "QuantizeRows"), 3);
        // The layer's output crosses layers and is kept.
        assert_eq!(count(&again, Pass::Again, "Tanh"), tanh, "{policy:?}");
        assert!(
            symbolic::evaluate(&back.graph, &outputs) == symbolic::evaluate(&again, &outs),
            "another value"
        );
        // Every gradient of logits reads what was computed again.
        for id in again.ids() {
            if let Op::CrossEntropyBack(_) = again.node(id).op {
                assert_eq!(again.node(again.node(id).args[0]).pass, Pass::Again);
            }
        }
    }
    // Without, all is kept.
    let built = build(&Projected { again: false, ..how });
    let back = vjp(&built.graph, &[(built.losses, built.dy)], &[built.x]).unwrap();
    let (same, _) = recompute(&back.graph, &back.grads, Recompute::None).unwrap();
    assert_eq!(count(&same, Pass::Again, "MatMul"), 0);
}

#[test]
fn a_quantized_head_stays_refused_at_the_product() {
    let built = build(&Projected::PLAIN);
    match vjp(&built.graph, &[(built.losses, built.dy)], &[built.w]) {
        Err(Error::Refusal(r)) => {
            assert_eq!((r.op.as_str(), r.node.as_str()), ("MatMul", "head"));
            assert_eq!(r.operand.as_deref(), Some("1 (`head`, Q4_0)"));
        }
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn one_piece_is_the_product_and_then_the_loss() {
    let built = build(&Projected { rows: Some(64), ..Projected::PLAIN });
    assert!(matches!(built.graph.node(built.losses).op, Op::CrossEntropy(_)));
    assert_eq!(count(&built.graph, Pass::Forward, "Slice"), 0);
}

#[test]
fn rows_per_piece_follow_from_the_vocabulary() {
    for (vocabulary, rows) in [(1, 1 << 19), (4096, 128), (49_152, 32), (151_936, 32), (0, 1 << 19)]
    {
        assert_eq!(Projected::rows_for(vocabulary), rows);
    }
}

#[test]
fn what_does_not_fit_is_refused_with_both_shapes() {
    let mut g = Graph::new();
    let x = leaf(&mut g, "x", &[6, 32], DType::F32);
    let w = leaf(&mut g, "w", &[8, 32], DType::F32);
    let none = leaf(&mut g, "nothing", &[0, 32], DType::F32);
    let labels = leaf(&mut g, "labels", &[6], DType::I32);
    let no_labels = leaf(&mut g, "no labels", &[0], DType::I32);
    let few = leaf(&mut g, "few", &[5], DType::F32);
    let mut say = |x, labels, weights, vocabulary| {
        let how = Projected { rows: Some(4), ..Projected::PLAIN };
        let made = g.projected_cross_entropy((x, labels, weights), vocabulary, &how, |g, x| {
            g.project(x, w)
        });
        made.map(|id| g.node(id).shape.to_string()).map_err(|e| e.message)
    };
    let err = |message: &str| Err(message.to_string());
    assert_eq!(say(x, labels, None, 8), Ok("[6]".into()));
    assert_eq!(say(none, no_labels, None, 8), Ok("[0]".into()));
    assert_eq!(
        say(x, no_labels, None, 8),
        err("the loss at node `x`: labels [0] and rows [6, 32] do not match")
    );
    assert_eq!(
        say(x, labels, Some(few), 8),
        err("the loss at node `x`: weights [5] and rows [6, 32] do not match")
    );
    assert_eq!(
        say(labels, labels, None, 8),
        err("the loss at node `labels`: labels [6] and rows [6] do not match")
    );
    assert_eq!(
        say(x, labels, None, 9),
        err("the loss at node `x`: the head gives [4, 8] for 4 rows of a vocabulary of 9")
    );
}
