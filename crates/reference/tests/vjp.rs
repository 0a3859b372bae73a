//! What the cases of single ops do not show about differentiation: several outputs, gradients
//! of values inside a graph, rows that do not count.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::{BTreeSet, HashSet};

use graph::*;
use reference::check::{Rng, cases, op_names};
use reference::{Leaves, Mode, Value, eval};

struct Program {
    graph: Graph,
    leaves: Leaves,
    rng: Rng,
}

impl Program {
    fn new() -> Program {
        Program { graph: Graph::new(), leaves: Leaves::new(), rng: Rng::new(1, "vjp") }
    }

    fn float(&mut self, name: &str, dims: &[usize]) -> NodeId {
        let shape = Shape::new(dims).unwrap();
        let data: Vec<f32> =
            (0..shape.elements()).map(|_| self.rng.between(-1.0, 1.0) as f32).collect();
        let id = self.graph.leaf(name, shape, DType::F32).unwrap();
        self.leaves.insert(id, Value::from_f32(shape, &data).unwrap());
        id
    }

    fn ints(&mut self, name: &str, data: &[i32]) -> NodeId {
        let shape = Shape::new(&[data.len()]).unwrap();
        let id = self.graph.leaf(name, shape, DType::I32).unwrap();
        self.leaves.insert(id, Value::ints(shape, data.to_vec()).unwrap());
        id
    }

    fn gradients(&self, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]) -> Vec<Value> {
        let back = vjp(&self.graph, cotangents, wrt).unwrap();
        eval(&back.graph, &self.leaves, &back.grads, Mode::Exact).unwrap()
    }
}

#[track_caller]
fn close(got: &Value, expected: &Value) {
    assert_eq!(got.shape(), expected.shape());
    for (a, b) in got.as_floats().unwrap().iter().zip(expected.as_floats().unwrap()) {
        assert!((a - b).abs() <= 1e-12 * (a.abs() + b.abs()), "{a} is not {b}");
    }
}

#[test]
fn several_outputs_add_their_gradients() {
    let mut p = Program::new();
    let (x, w) = (p.float("x", &[3, 4]), p.float("w", &[5, 4]));
    let y = p.graph.project(x, w).unwrap();
    let z = p.graph.unary(Unary::Tanh, x).unwrap();
    let (dy, dz) = (p.float("dy", &[3, 5]), p.float("dz", &[3, 4]));
    let both = p.gradients(&[(y, dy), (z, dz)], &[x, w]);
    let (first, second) = (p.gradients(&[(y, dy)], &[x, w]), p.gradients(&[(z, dz)], &[x]));
    let sum = |a: &Value, b: &Value| {
        let (a_data, b_data) = (a.as_floats().unwrap(), b.as_floats().unwrap());
        let data = a_data.iter().zip(b_data).map(|(a, b)| a + b).collect();
        Value::floats(a.shape(), data).unwrap()
    };
    close(&both[0], &sum(&first[0], &second[0]));
    close(&both[1], &first[1]);
    // The same output twice counts twice.
    let twice = p.gradients(&[(z, dz), (z, dz)], &[x]);
    close(&twice[0], &sum(&second[0], &second[0]));
}

/// A value inside a graph has the gradient that it would have as a leaf.
#[test]
fn values_inside_a_graph_have_gradients() {
    let mut p = Program::new();
    let (x, w) = (p.float("x", &[3, 4]), p.float("w", &[4]));
    let h = p.graph.rms_norm(x, w, 1e-5).unwrap();
    let y = p.graph.unary(Unary::Silu, h).unwrap();
    let y = p.graph.mul(y, h).unwrap();
    let dy = p.float("dy", &[3, 4]);
    let inside = p.gradients(&[(y, dy)], &[h, x]);

    let value = eval(&p.graph, &p.leaves, &[h], Mode::Exact).unwrap().remove(0);
    let mut cut = Program::new();
    let h = cut.graph.leaf("h", value.shape(), DType::F32).unwrap();
    cut.leaves.insert(h, value);
    let y = cut.graph.unary(Unary::Silu, h).unwrap();
    let y = cut.graph.mul(y, h).unwrap();
    let cut_dy = cut.graph.leaf("dy", Shape::new(&[3, 4]).unwrap(), DType::F32).unwrap();
    cut.leaves.insert(cut_dy, p.leaves[&dy].clone());
    close(&inside[0], &cut.gradients(&[(y, cut_dy)], &[h])[0]);
    // An output's own gradient is its cotangent.
    let mut p = Program::new();
    let (y, dy) = (p.float("y", &[2]), p.float("dy", &[2]));
    assert_eq!(p.gradients(&[(y, dy)], &[y]), [p.leaves[&dy].clone()]);
}

/// A row without a label, or whose weight is 0, gives exactly zero, even where its logits are
/// not finite.
#[test]
fn rows_that_do_not_count_give_zero() {
    let mut p = Program::new();
    let logits = p.float("logits", &[3, 4]);
    for (i, x) in p.leaves.get_mut(&logits).unwrap().as_floats_mut().unwrap().iter_mut().enumerate()
    {
        match i {
            0..4 => *x = f64::NAN,
            4..8 => *x = f64::INFINITY,
            _ => {}
        }
    }
    let labels = p.ints("labels", &[-1, 2, 3]);
    let weights = p.float("weights", &[3]);
    p.leaves.get_mut(&weights).unwrap().as_floats_mut().unwrap()[1] = 0.0;
    let losses = p
        .graph
        .push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits, labels], "losses")
        .unwrap();
    let grads = p.gradients(&[(losses, weights)], &[logits]);
    let grads = grads[0].as_floats().unwrap();
    assert_eq!(grads[..8], [0.0; 8]);
    assert!(grads[8..].iter().all(|g| g.is_finite() && *g != 0.0));
}

/// Of equals the first has the gradient, all of it: so a clipped ratio at the bound of PPO, where
/// both branches are equal, still moves.
#[test]
fn of_equals_the_first_has_the_gradient() {
    for kind in [Binary::Min, Binary::Max] {
        let mut p = Program::new();
        let (a, b) = (p.float("a", &[4]), p.float("b", &[4]));
        p.leaves.insert(b, p.leaves[&a].clone());
        let dy = p.float("dy", &[4]);
        let y = p.graph.push(Op::Binary(kind), &[a, b], "y").unwrap();
        let grads = p.gradients(&[(y, dy)], &[a, b]);
        assert_eq!(grads[0], p.leaves[&dy]);
        assert_eq!(grads[1].as_floats().unwrap(), [0.0; 4]);
    }
}

/// What differentiating a node for one of its operands gives: the gradient's graph and node, or the
/// refusal.
fn differentiated(graph: &Graph, y: NodeId, wrt: NodeId) -> Result<(Graph, NodeId)> {
    let mut graph = graph.clone();
    let shape = graph.node(y).shape;
    let dy = graph.leaf("cotangent of the test", shape, DType::F32)?;
    let back = vjp(&graph, &[(y, dy)], &[wrt])?;
    assert_eq!(back.grads.len(), 1);
    Ok((back.graph, back.grads[0]))
}

/// FIELD-REPORTS F14: a fused softmax cut the gradient off without a word. A parameter before any op
/// there is, in every case of it, gets a gradient of its own shape, which depends on the cotangent,
/// or is refused by op, node and reason.
#[test]
fn f14_a_parameter_before_any_op_has_a_gradient_or_a_refusal() {
    let (mut trained, mut refused, mut flat) = (0, 0, BTreeSet::new());
    for op in op_names() {
        for case in cases(op).iter() {
            let (built, y) = case.build(1).unwrap();
            for input in &built.inputs {
                if built.graph.node(input.node).dtype != DType::F32 {
                    continue;
                }
                let what = format!("{op}/{} for {}", case.name, input.name);
                match differentiated(&built.graph, y, input.node) {
                    Ok((back, grad)) => {
                        let (grad_node, wrt) = (back.node(grad), built.graph.node(input.node));
                        assert_eq!(
                            (grad_node.shape, grad_node.dtype),
                            (wrt.shape, DType::F32),
                            "{what}"
                        );
                        if !reads(&back, grad, "cotangent of the test") {
                            flat.insert(op);
                        }
                        trained += 1;
                    }
                    Err(Error::Refusal(refusal)) => {
                        let words = [&refusal.op, &refusal.node, &refusal.reason];
                        assert!(words.iter().all(|word| !word.is_empty()), "{what}: {refusal:?}");
                        refused += 1;
                    }
                    Err(e) => panic!("{what}: {e}"),
                }
            }
        }
    }
    assert!(trained > 200 && refused > 20, "{trained} trained, {refused} refused");
    // What is flat wherever it has a gradient.
    assert_eq!(flat.into_iter().collect::<Vec<_>>(), ["Sign", "Step"]);
}

fn reads(graph: &Graph, from: NodeId, leaf: &str) -> bool {
    let (mut seen, mut left) = (HashSet::new(), vec![from]);
    while let Some(id) = left.pop() {
        if seen.insert(id) {
            if &*graph.node(id).name == leaf {
                return true;
            }
            left.extend(graph.node(id).args.iter());
        }
    }
    false
}

/// FIELD-REPORTS F10: crashes were patched by passing over what had no gradient. Of every operand of
/// every node, whatever its dtype, there is a gradient or a reason why there is none: an index, a
/// label, a weight in blocks.
#[test]
fn f10_no_operand_is_passed_over() {
    let mut reasons = BTreeSet::new();
    for op in op_names() {
        for case in cases(op).iter() {
            let (built, _) = case.build(1).unwrap();
            let graph = &built.graph;
            let nodes = graph.ids().filter(|&id| graph.node(id).dtype == DType::F32);
            for y in nodes.filter(|&id| graph.node(id).op.name() == op) {
                for &operand in graph.node(y).args.iter() {
                    match differentiated(graph, y, operand) {
                        Ok((back, grad)) => {
                            assert_eq!(back.node(grad).shape, graph.node(operand).shape, "{op}");
                        }
                        Err(Error::Refusal(refusal)) => {
                            assert!(!refusal.reason.is_empty(), "{op}/{}: {refusal:?}", case.name);
                            reasons.insert(refusal.reason);
                        }
                        Err(e) => panic!("{op}/{}: {e}", case.name),
                    }
                }
            }
        }
    }
    assert!(reasons.len() >= 5, "{reasons:?}");
}
