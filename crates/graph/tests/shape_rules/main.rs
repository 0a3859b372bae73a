//! Which operands every op takes, what comes of them, and the words in which others are
//! refused.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

#[path = "../common/mod.rs"]
mod common;
mod fuzz;
mod heads;
mod rows;
mod table;

use std::collections::BTreeSet;

use common::shape;
use gguf::TensorType;
use gradus_graph::*;
use table::{Case, Q8, table};

fn dtype(name: &str) -> DType {
    let blocks = [TensorType::Q8_0, TensorType::Q4_0, TensorType::Q4K].map(DType::Block);
    let plain = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::Q8Rows, DType::Int16Rows];
    let all = plain.into_iter().chain(blocks);
    all.into_iter().find(|d| d.name() == name).unwrap_or_else(|| panic!("no dtype {name}"))
}

/// Parses `f32 [2, 3]`.
fn parse(text: &str) -> (DType, Shape) {
    let (name, dims) = text.split_once(' ').unwrap();
    let dims = dims.strip_prefix('[').unwrap().strip_suffix(']').unwrap();
    let dims: Vec<usize> = dims
        .split(',')
        .filter(|d| !d.trim().is_empty())
        .map(|d| d.trim().parse().unwrap())
        .collect();
    (dtype(name), shape(&dims))
}

/// What becomes of an op on operands written as `f32 [2, 3]; i32 [2]`.
fn push(op: &Op, operands: &str) -> std::result::Result<String, String> {
    let mut g = Graph::new();
    let mut args = Vec::new();
    for (i, text) in operands.split(';').map(str::trim).filter(|t| !t.is_empty()).enumerate() {
        let (dtype, shape) = parse(text);
        args.push(g.leaf(&format!("x{i}"), shape, dtype).unwrap());
    }
    let before = g.len();
    match g.push(op.clone(), &args, "n") {
        Ok(id) => {
            let node = g.node(id);
            assert_eq!((&node.op, &node.args, &*node.name, g.len()), (op, &args, "n", before + 1));
            Ok(format!("{} {}", node.dtype, node.shape))
        }
        Err(e) => {
            assert_eq!(g.len(), before, "a refused op leaves the graph as it was");
            let operands = operands.replace(';', ",");
            let head = format!("{} at node `n` ({}): ", op.name(), operands.trim());
            match e.message.strip_prefix(&head) {
                Some(why) => Err(why.to_string()),
                None => panic!("`{}` does not begin with `{head}`", e.message),
            }
        }
    }
}

/// Every op once, by number; a new op does not compile until it has one, and fails below until
/// it has cases.
fn number(op: &Op) -> usize {
    match op {
        Op::Leaf => 0,
        Op::Binary(_) => 1,
        Op::Unary(_) => 2,
        Op::Affine { .. } => 3,
        Op::Glu(_) => 4,
        Op::GluBack { .. } => 5,
        Op::Sum { .. } => 6,
        Op::Broadcast { .. } => 7,
        Op::Reshape { .. } => 8,
        Op::Permute { .. } => 9,
        Op::Slice { .. } => 10,
        Op::Pad { .. } => 11,
        Op::Concat { .. } => 12,
        Op::Copy => 13,
        Op::Cast { .. } => 14,
        Op::Round { .. } => 15,
        Op::QuantizeRows => 16,
        Op::Gather => 17,
        Op::ScatterAdd { .. } => 18,
        Op::RmsNorm { .. } => 19,
        Op::RmsNormBack { .. } => 20,
        Op::RopeTable(_) => 21,
        Op::Rope { .. } => 22,
        Op::MatMul { .. } => 23,
        Op::Lora { .. } => 24,
        Op::LoraBack { .. } => 25,
        Op::Attention(_) => 26,
        Op::AttentionQueryBack(_) => 27,
        Op::AttentionBack { .. } => 28,
        Op::CrossEntropy(_) => 29,
        Op::CrossEntropyBack(_) => 30,
        Op::Clamp { .. } => 31,
        Op::ClampBack { .. } => 32,
        Op::Fill { .. } => 33,
        Op::CumSum { .. } => 34,
        Op::TopK { .. } => 35,
        Op::Softmax(_) => 36,
        Op::SoftmaxBack { .. } => 37,
        Op::SoftmaxSinkBack(_) => 38,
        Op::LogSoftmax => 39,
        Op::Norm { .. } => 40,
        Op::NormBack { .. } => 41,
        Op::SsmConv => 42,
        Op::SsmConvBack { .. } => 43,
        Op::SsmConvState => 44,
        Op::SsmConvStateBack { .. } => 45,
        Op::SsmScan => 46,
        Op::SsmScanBack { .. } => 47,
        Op::GatedDeltaRule(_) => 48,
        Op::GatedDeltaRuleBack(_) => 49,
        Op::MatMulExperts { .. } => 50,
        Op::ExpertOuter { .. } => 51,
        Op::LoraExperts { .. } => 52,
        Op::LoraExpertsBack { .. } => 53,
        Op::Dropout(_) => 54,
    }
}

#[test]
fn every_op_takes_and_refuses_what_the_table_says() {
    let (mut taken, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for Case { op, taken: good, refused: bad } in table() {
        for (operands, made) in good {
            assert_eq!(push(&op, operands).as_deref(), Ok(made), "{op:?} of {operands}");
            taken.insert(number(&op));
        }
        for (operands, why) in bad {
            assert_eq!(push(&op, operands), Err(why.to_string()), "{op:?} of {operands}");
            refused.insert(number(&op));
        }
    }
    // A leaf is made otherwise.
    assert_eq!(taken, (1..=54).collect());
    assert_eq!(refused, (0..=54).collect());
}

#[test]
fn results_are_whole_blocks() {
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[2, 33]), DType::F32).unwrap();
    let line = |e: std::result::Result<NodeId, Invalid>| e.unwrap_err().message;
    assert_eq!(
        line(g.push(Op::QuantizeRows, &[x], "n")),
        "QuantizeRows at node `n`: rows of 33 elements are not whole blocks of q8-rows"
    );
    assert_eq!(
        line(g.push(Op::Cast { dtype: Q8 }, &[x], "n")),
        "Cast at node `n`: rows of 33 elements are not whole blocks of Q8_0"
    );
    assert_eq!(
        line(g.weight("w", shape(&[2, 100]), dtype("Q4_K"))),
        "leaf `w`: rows of 100 elements are not whole blocks of Q4_K"
    );
    assert_eq!(
        line(g.leaf("s", shape(&[]), Q8)),
        "leaf `s`: rows of 1 elements are not whole blocks of Q8_0"
    );
    assert_eq!(g.len(), 1);
}

#[test]
fn a_leaf_of_a_name_is_one_leaf() {
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[2]), DType::F32).unwrap();
    assert_eq!(g.leaf("x", shape(&[2]), DType::F32), Ok(x));
    assert_eq!(g.find_leaf("x"), Some(x));
    assert_eq!(g.find_leaf("y"), None);
    let line = |e: std::result::Result<NodeId, Invalid>| e.unwrap_err().message;
    assert_eq!(
        line(g.leaf("x", shape(&[3]), DType::F16)),
        "leaf `x` exists as leaf f32 [2] and was asked for as leaf f16 [3]"
    );
    assert_eq!(
        line(g.weight("x", shape(&[2]), DType::F32)),
        "leaf `x` exists as leaf f32 [2] and was asked for as weight f32 [2]"
    );
}

#[test]
fn shapes_are_bounded() {
    let line = |dims: &[usize]| Shape::new(dims).unwrap_err().message;
    assert_eq!(
        line(&[1, 2, 3, 4, 5, 6, 7]),
        "a shape of 7 dimensions [1, 2, 3, 4, 5, 6, 7]: at most 6 are supported"
    );
    let large = "is too large: its sizes, 0 counted as 1, multiply to more than 2^46";
    for dims in
        [vec![1 << 46, 2], vec![0, usize::MAX], vec![usize::MAX, 0], vec![1 << 40, 0, 1 << 40]]
    {
        assert_eq!(line(&dims), format!("shape {dims:?} {large}"));
    }
    let most = shape(&[1 << 23, 0, 1 << 23]);
    assert_eq!((most.elements(), most.strides()[0]), (0, 0));
    assert_eq!(shape(&[1 << 46]).bytes(DType::F32), Some(1 << 48));
    assert_eq!(
        shape(&[2, 3]).with_dim(2, 1).unwrap_err().message,
        "shape [2, 3] has no dimension 2"
    );
    let scalar = shape(&[]);
    assert_eq!((scalar.rank(), scalar.rows(), scalar.cols(), scalar.elements()), (0, 1, 1, 1));
    assert_eq!(scalar.to_string(), "[]");
}

#[test]
fn nodes_of_another_graph_are_refused_everywhere() {
    let mut big = Graph::new();
    let mut id = big.leaf("x", shape(&[2, 2]), DType::F32).unwrap();
    for _ in 0..9 {
        id = big.unary(Unary::Tanh, id).unwrap();
    }
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[2, 2]), DType::F32).unwrap();
    let mut messages = BTreeSet::new();
    for made in [
        g.add(id, x),
        g.add(x, id),
        g.sub(id, x),
        g.mul(id, x),
        g.div(id, x),
        g.unary(Unary::Exp, id),
        g.affine(id, 1.0, 0.0),
        g.sum(id, &[0]),
        g.broadcast(id, shape(&[2, 2])),
        g.reshape(id, &[4]),
        g.permute(id, &[1, 0]),
        g.slice(id, 0, 0, 1),
        g.concat(&[id], 0),
        g.concat(&[x, id], 0),
        g.cast(id, DType::F16),
        g.round(id, DType::F32),
        g.round(id, DType::F16),
        g.gather(id, x, "n"),
        g.rms_norm(x, id, 1e-5),
        g.project(x, id),
        g.project(id, x),
        g.push(Op::Copy, &[id], "n"),
    ] {
        messages.insert(made.unwrap_err().message);
    }
    let expected = ["node `n` reads node 9 of another graph", "node 9 is not of this graph"];
    for message in &messages {
        assert!(
            message == expected[1] || message.ends_with("reads node 9 of another graph"),
            "{message}"
        );
    }
    assert!(messages.contains(expected[0]));
    assert_eq!(g.len(), 1);
    assert_eq!(g.concat(&[], 0).unwrap_err().message, "Concat of nothing");
}

#[test]
fn equal_ops_on_equal_operands_are_one_node() {
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[2, 2]), DType::F32).unwrap();
    let y = g.affine(x, 2.0, 0.0).unwrap();
    assert_eq!(g.affine(x, 2.0, 0.0), Ok(y));
    assert_eq!(g.push(Op::Affine { scale: 2.0.into(), bias: 0.0.into() }, &[x], "other"), Ok(y));
    // Attributes are compared by their bits, operands by their order.
    assert_ne!(g.affine(x, 2.0, -0.0), Ok(y));
    assert_ne!(g.sub(x, y), g.sub(y, x));
    assert_eq!((g.len(), g.node(y).name.as_ref()), (5, "x"));
    assert_eq!(g.reshape(x, &[2, 2]), Ok(x));
    assert_eq!(g.broadcast(x, shape(&[2, 2])), Ok(x));
    assert_eq!(g.cast(x, DType::F32), Ok(x));
    assert_eq!(g.round(x, DType::F32), Ok(x));
}
