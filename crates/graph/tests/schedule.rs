//! The order of steps: what is differentiated early, and what that saves.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use common::check::check;
use common::*;
use gradus_graph::*;

const ROWS: usize = 64;
const WIDTH: usize = 16;
const VOCAB: usize = 4096;
const CHUNKS: usize = 4;
/// Bytes of one chunk of logits.
const CHUNK: usize = ROWS / CHUNKS * VOCAB * 4;

struct Head {
    graph: Graph,
    x: NodeId,
    a: NodeId,
    b: NodeId,
    w: NodeId,
    labels: NodeId,
    losses: Vec<NodeId>,
}

const RANK: usize = 4;

/// A head whose logits are made and judged `CHUNKS` slices of rows at a time, maybe with an
/// adapter on it.
fn head(adapter: bool) -> Head {
    let mut g = Graph::new();
    let n = ROWS / CHUNKS;
    let x = g.leaf("x", shape(&[ROWS, WIDTH]), DType::F32).unwrap();
    let x = g.unary(Unary::Tanh, x).unwrap();
    let w = g.leaf("output.weight", shape(&[VOCAB, WIDTH]), DType::F32).unwrap();
    let rows = g.leaf("rows", shape(&[n]), DType::I32).unwrap();
    let a = g.leaf("a", shape(&[RANK, WIDTH]), DType::F32).unwrap();
    let b = g.leaf("b", shape(&[VOCAB, RANK]), DType::F32).unwrap();
    let scale = g.leaf("scale", shape(&[1]), DType::F32).unwrap();
    let labels = g.leaf("labels", shape(&[ROWS]), DType::I32).unwrap();
    let losses = (0..CHUNKS)
        .map(|c| {
            let x = g.slice(x, 0, c * n, n).unwrap();
            let mut logits = g.project(x, w).unwrap();
            if adapter {
                let args = [x, logits, rows, a, b, scale];
                logits = g.push(Op::Lora { slots: 1 }, &args, "output").unwrap();
            }
            let labels = g.slice(labels, 0, c * n, n).unwrap();
            g.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "loss").unwrap()
        })
        .collect();
    Head { graph: g, x, a, b, w, labels, losses }
}

fn planned(graph: &Graph, outputs: &[NodeId]) -> Plan {
    let plan = plan(graph, outputs, &any_layout()).unwrap();
    check(graph, outputs, &plan);
    for _ in 0..3 {
        assert_eq!(plan, gradus_graph::plan(graph, outputs, &any_layout()).unwrap());
    }
    println!("{:.2} chunks of logits", plan.arena_bytes as f64 / CHUNK as f64);
    plan
}

/// Where the nodes of an op stand among the steps.
fn at(plan: &Plan, name: &str) -> Vec<usize> {
    plan.steps.iter().enumerate().filter(|(_, s)| s.op.name() == name).map(|(i, _)| i).collect()
}

fn alternates(plan: &Plan) {
    let (forward, backward) = (at(plan, "CrossEntropy"), at(plan, "CrossEntropyBack"));
    assert_eq!((forward.len(), backward.len()), (CHUNKS, CHUNKS));
    for c in 0..CHUNKS - 1 {
        assert!(backward[c] < forward[c + 1], "chunk {c} waits: {forward:?} {backward:?}");
    }
}

#[test]
fn a_chunk_of_logits_is_differentiated_before_the_next_is_made() {
    let Head { mut graph, x, losses, .. } = head(false);
    let weights = graph.leaf("weights", shape(&[ROWS]), DType::F32).unwrap();
    let n = ROWS / CHUNKS;
    let cotangents: Vec<_> = losses
        .iter()
        .enumerate()
        .map(|(c, &y)| (y, graph.slice(weights, 0, c * n, n).unwrap()))
        .collect();
    let back = vjp(&graph, &cotangents, &[x]).unwrap();
    let outputs = [&back.grads[..], &losses].concat();
    let plan = planned(&back.graph, &outputs);
    alternates(&plan);
    assert!(plan.arena_bytes > 2 * CHUNK && plan.arena_bytes < CHUNK * 22 / 10);
}

#[test]
fn so_it_is_when_the_cotangents_come_from_one_mean_loss() {
    let Head { mut graph, x, losses, .. } = head(false);
    let weights = graph.leaf("weights", shape(&[ROWS]), DType::F32).unwrap();
    let loss = graph.concat(&losses, 0).unwrap();
    let loss = graph.mul(loss, weights).unwrap();
    let (loss, total) = (graph.sum(loss, &[0]).unwrap(), graph.sum(weights, &[0]).unwrap());
    let loss = graph.div(loss, total).unwrap();
    let one = graph.leaf("one", shape(&[1]), DType::F32).unwrap();
    let back = vjp(&graph, &[(loss, one)], &[x]).unwrap();
    let plan = planned(&back.graph, &[back.grads[0], loss]);
    alternates(&plan);
    assert!(plan.arena_bytes < CHUNK * 22 / 10);
}

#[test]
fn so_it_is_when_the_head_has_an_adapter() {
    let Head { mut graph, x, a, b, losses, .. } = head(true);
    let weights = graph.leaf("weights", shape(&[ROWS / CHUNKS]), DType::F32).unwrap();
    let cotangents: Vec<_> = losses.iter().map(|&y| (y, weights)).collect();
    let back = vjp(&graph, &cotangents, &[x, a, b]).unwrap();
    let plan = planned(&back.graph, &[&back.grads[..], &losses].concat());
    alternates(&plan);
    // Each chunk leaves a contribution to B's gradient, a quarter of a chunk here;
    // they are added up in a fixed order, when the last is there.
    assert!(plan.arena_bytes < 2 * CHUNK + CHUNKS * VOCAB * RANK * 4 + CHUNK / 10);
}

#[test]
fn a_head_whose_loss_needs_all_logits_at_once_still_plans() {
    let Head { mut graph, x, w, labels, .. } = head(false);
    let logits = graph.project(x, w).unwrap();
    let loss =
        graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "loss").unwrap();
    // The cotangent follows from the loss itself.
    let weight = graph.unary(Unary::Exp, loss).unwrap();
    let back = vjp(&graph, &[(loss, weight)], &[x]).unwrap();
    let plan = planned(&back.graph, &[back.grads[0]]);
    assert!(plan.arena_bytes > 2 * CHUNKS * CHUNK);
}
