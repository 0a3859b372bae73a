//! Recomputation: the same values in less memory, each layer again when its turn comes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use std::collections::HashMap;

use common::check::check;
use common::toy::{Built, Toy};
use common::*;
use gradus_graph::*;

const TOY: Toy = Toy { layers: 4, rows: 24, width: 32, heads: 2, vocab: 96 };

/// Nodes of a graph without what only its own numbering says.
fn nodes(graph: &Graph) -> Vec<Node> {
    graph.ids().map(|id| graph.node(id).clone()).collect()
}

/// Checks a graph and its rewrite against one another.
fn same_but_again(old: &Graph, outs: &[NodeId], new: &Graph, new_outs: &[NodeId]) {
    assert_eq!(outs.len(), new_outs.len());
    // The symbols of the outputs are made of every op and operand below them.
    assert!(symbolic::evaluate(old, outs) == symbolic::evaluate(new, new_outs));
    for (&a, &b) in outs.iter().zip(new_outs) {
        let (a, b) = (old.node(a), new.node(b));
        assert_eq!((&a.op, a.shape, a.dtype, &a.name), (&b.op, b.shape, b.dtype, &b.name));
        assert_eq!((a.layer, a.pass), (b.layer, b.pass));
    }
    // Without the clones, the nodes are those of the old graph in the old order.
    let plain: Vec<Node> = nodes(new).into_iter().filter(|n| n.pass != Pass::Again).collect();
    assert_eq!(plain.len(), old.len());
    for (a, b) in nodes(old).iter().zip(&plain) {
        assert_eq!((&a.op, &a.name, a.layer, a.pass), (&b.op, &b.name, b.layer, b.pass));
        assert_eq!((a.shape, a.dtype, a.resident), (b.shape, b.dtype, b.resident));
    }
    for id in new.ids() {
        let node = new.node(id);
        for &a in &node.args {
            let arg = new.node(a);
            // Clones serve gradients alone.
            assert!(arg.pass != Pass::Again || node.pass != Pass::Forward);
            if node.pass == Pass::Forward || arg.pass != Pass::Forward {
                continue;
            }
            // What gradients still read of the forward pass crosses layers or is an output.
            let crosses = new.ids().any(|r| {
                let r = new.node(r);
                r.pass == Pass::Forward && r.layer != arg.layer && r.args.contains(&a)
            });
            let is_leaf = matches!(arg.op, Op::Leaf);
            assert!(
                is_leaf || arg.layer.is_none() || crosses || new_outs.contains(&a),
                "{} `{}` is kept for the backward pass",
                arg.op.name(),
                arg.name
            );
        }
    }
}

#[test]
fn a_toy_model_needs_half_the_memory_and_gives_the_same_values() {
    let (graph, outputs) = TOY.train();
    let (again, new) = recompute(&graph, &outputs, Recompute::PerLayer).unwrap();
    same_but_again(&graph, &outputs, &again, &new);
    let clones = nodes(&again).iter().filter(|n| n.pass == Pass::Again).count();
    assert!(clones > 40, "{clones}");
    for device in [&any_layout() as &dyn Device, &dense_only()] {
        let before = plan(&graph, &outputs, device).unwrap();
        let after = plan(&again, &new, device).unwrap();
        check(&graph, &outputs, &before);
        check(&again, &new, &after);
        let ratio = after.arena_bytes as f64 / before.arena_bytes as f64;
        println!("arena {} -> {} ({ratio:.2})", before.arena_bytes, after.arena_bytes);
        assert!(ratio < 0.5, "{ratio}");
    }
}

#[test]
fn with_more_layers_only_what_crosses_them_grows() {
    let arena = |layers| {
        // Only the first layer's adapter, so that gradients take no part in it.
        let Built { mut graph, loss, adapters } = Toy { layers, ..TOY }.build();
        let weights = graph.leaf("weights", shape(&[TOY.rows]), DType::F32).unwrap();
        let back = vjp(&graph, &[(loss, weights)], &adapters[..2]).unwrap();
        let (graph, outputs) = recompute(&back.graph, &back.grads, Recompute::PerLayer).unwrap();
        plan(&graph, &outputs, &any_layout()).unwrap().arena_bytes
    };
    let crossing = TOY.rows * TOY.width * 4;
    let grown = arena(12) - arena(4);
    println!("{:.2} values of [rows, width] per layer", grown as f64 / 8.0 / crossing as f64);
    assert!(grown >= 8 * crossing && grown <= 8 * crossing * 11 / 10, "{grown}");
}

#[test]
fn a_layer_runs_again_only_after_the_next_is_differentiated() {
    let (graph, outputs) = TOY.train();
    let (graph, outputs) = recompute(&graph, &outputs, Recompute::PerLayer).unwrap();
    let plan = plan(&graph, &outputs, &any_layout()).unwrap();
    let mut last_backward: HashMap<u32, usize> = HashMap::new();
    let mut first_again: HashMap<u32, usize> = HashMap::new();
    for (t, step) in plan.steps.iter().enumerate() {
        let node = graph.node(step.node);
        match (node.layer, node.pass) {
            (Some(l), Pass::Backward) => *last_backward.entry(l).or_default() = t,
            (Some(l), Pass::Again) => {
                first_again.entry(l).or_insert(t);
            }
            (_, Pass::Again) => panic!("`{}` of no layer runs again", node.name),
            _ => {}
        }
    }
    assert_eq!(first_again.len(), 4);
    for l in 0..3 {
        assert!(first_again[&l] > last_backward[&(l + 1)], "layer {l} runs again too early");
    }
}

#[test]
fn clones_are_their_originals_and_made_once() {
    let (graph, outputs) = TOY.train();
    let (again, _) = recompute(&graph, &outputs, Recompute::PerLayer).unwrap();
    let mut originals = HashMap::new();
    for node in nodes(&graph).into_iter().filter(|n| n.pass == Pass::Forward) {
        originals.insert((node.op.clone(), node.name.clone(), node.layer), node);
    }
    let mut seen = HashMap::new();
    for node in nodes(&again).into_iter().filter(|n| n.pass == Pass::Again) {
        let key = (node.op.clone(), node.name.clone(), node.layer);
        let original = &originals[&key];
        assert_eq!((original.shape, original.dtype), (node.shape, node.dtype));
        assert!(seen.insert((key, node.args.clone()), ()).is_none(), "`{}` twice", node.name);
    }
}

#[test]
fn a_graph_without_gradients_stays_as_it_is() {
    let built = TOY.build();
    let (graph, outputs) = recompute(&built.graph, &[built.loss], Recompute::PerLayer).unwrap();
    assert_eq!(outputs, [built.loss]);
    assert_eq!(nodes(&graph), nodes(&built.graph));
}

#[test]
fn the_policy_none_changes_nothing() {
    let (graph, outputs) = TOY.train();
    let (new, outs) = recompute(&graph, &outputs, Recompute::None).unwrap();
    assert_eq!(outs, outputs);
    assert_eq!(nodes(&new), nodes(&graph));
}

#[test]
fn an_output_of_another_graph_is_invalid() {
    let (graph, outputs) = TOY.train();
    let last = outputs.iter().copied().max().unwrap();
    let small = TOY.build().graph;
    let e = recompute(&small, &[last], Recompute::PerLayer).unwrap_err();
    assert_eq!(e.code(), Code::InvalidInput);
    assert_eq!(e.to_string(), format!("node {} is not of this graph", last.index()));
    let e = recompute(&small, &[last], Recompute::None).unwrap_err();
    assert_eq!(e.to_string(), format!("node {} is not of this graph", last.index()));
    assert!(recompute(&graph, &outputs, Recompute::PerLayer).is_ok());
}

#[test]
fn random_graphs_give_the_same_values() {
    let mut clones = 0;
    for seed in 1000..1250 {
        let (graph, outputs) = random::with_gradients(seed, 10 + (seed as usize * 3) % 30);
        let (again, new) = recompute(&graph, &outputs, Recompute::PerLayer).unwrap();
        same_but_again(&graph, &outputs, &again, &new);
        clones += nodes(&again).iter().filter(|n| n.pass == Pass::Again).count();
        check(&again, &new, &plan(&again, &new, &picky(seed)).unwrap());
    }
    println!("{clones} clones");
    assert!(clones > 250, "{clones}");
}

/// What is drawn again rather than kept (a mask of dropout) is computed again under every policy,
/// and nothing else is under the one that keeps all.
#[test]
fn what_is_transient_is_computed_again_whatever_the_policy() {
    let build = |transient: bool| {
        let mut g = Graph::new();
        let x = g.leaf("x", shape(&[4, 32]), DType::F32).unwrap();
        let b = g.leaf("b", shape(&[8, 32]), DType::F32).unwrap();
        let dy = g.leaf("dy", shape(&[4, 8]), DType::F32).unwrap();
        g.set_layer(Some(3));
        let kept = g.unary(Unary::Tanh, x).unwrap();
        assert!(!g.set_transient(transient));
        let again = g.unary(Unary::Silu, kept).unwrap();
        assert_eq!(g.set_transient(false), transient);
        let y = g.project(again, b).unwrap();
        g.set_layer(None);
        let y = g.unary(Unary::Abs, y).unwrap();
        let back = vjp(&g, &[(y, dy)], &[x, b]).unwrap();
        // Gradients are not, whatever they are of.
        assert!(back.graph.ids().skip(g.len()).all(|id| !back.graph.node(id).transient));
        (back.graph, [&[y][..], &back.grads].concat())
    };
    let again = |transient: bool, policy: Recompute| {
        let (graph, outputs) = build(transient);
        let (new, outs) = recompute(&graph, &outputs, policy).unwrap();
        assert!(symbolic::evaluate(&graph, &outputs) == symbolic::evaluate(&new, &outs));
        let again = nodes(&new).into_iter().filter(|n| n.pass == Pass::Again);
        again.map(|n| n.op.name()).collect::<Vec<_>>()
    };
    assert_eq!(again(true, Recompute::None), ["Silu"]);
    assert_eq!(again(false, Recompute::None), [""; 0]);
    assert_eq!(again(true, Recompute::PerLayer), ["Tanh", "Silu"]);
}
