//! The generator must make every op, and the check must be able to fail.

use graph::{Backward, Graph, NodeId, Op, Result, Unary, vjp};

use super::families::weight;
use super::table::Family;
use super::*;
use crate::check::op_names;

#[test]
fn every_op_is_made_often() {
    let mut ops: BTreeMap<&str, usize> = BTreeMap::new();
    for number in 0..3000 {
        let program = maker::program(7, number);
        for id in program.graph.ids() {
            *ops.entry(program.graph.node(id).op.name()).or_default() += 1;
        }
        let n = program.ops();
        assert!((1..=43).contains(&n), "{n} ops");
    }
    for op in op_names() {
        let n = ops.get(op).copied().unwrap_or(0);
        assert!(n >= 8, "{op} was made {n} times");
    }
    assert!(Family::ALL.iter().all(|f| weight(*f) > 0));
}

#[test]
fn the_same_number_is_the_same_program() {
    for number in 0..20 {
        let (a, b) = (maker::program(1, number), maker::program(1, number));
        assert_eq!(a.to_string(), b.to_string());
        assert_ne!(a.to_string(), maker::program(2, number).to_string());
    }
}

/// `vjp`, with the gradients scaled where an output depends on a `Tanh`.
fn scaled(graph: &Graph, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]) -> Result<Backward> {
    let mut back = vjp(graph, cotangents, wrt)?;
    let program =
        Program { graph: graph.clone(), cotangents: cotangents.to_vec(), ..Program::default() };
    let shown = program.shown();
    let tanh = |id: &NodeId| matches!(graph.node(*id).op, Op::Unary(Unary::Tanh));
    if graph.ids().filter(tanh).any(|id| shown[id.index()]) {
        for grad in &mut back.grads {
            *grad = back.graph.affine(*grad, 1.00001, 0.0)?;
        }
    }
    Ok(back)
}

#[test]
fn a_wrong_gradient_is_found_and_shortened() {
    let found = check_some(None, 3, 0..3000, &scaled);
    assert!(found.failures.len() > 5, "{found}");
    let ops = |failure: &str| {
        failure.lines().filter(|l| l.contains(" = ") && !l.contains("= Leaf")).count()
    };
    assert!(found.failures.iter().all(|f| f.contains("Unary(Tanh)")), "{found}");
    let short = found.failures.iter().filter(|f| ops(f) == 1).count();
    assert!(4 * short > found.failures.len(), "{short} of {found}");
    assert!(!found.passed());
}

#[test]
fn a_refusal_of_the_wrong_node_is_found() {
    let wrong = |graph: &Graph, cotangents: &[(NodeId, NodeId)], wrt: &[NodeId]| {
        vjp(graph, cotangents, wrt).map_err(|e| match e {
            graph::Error::Refusal(mut refusal) => {
                refusal.node = "another".into();
                graph::Error::Refusal(refusal)
            }
            e => e,
        })
    };
    let found = check_some(None, 3, 0..300, &wrong);
    assert!(!found.failures.is_empty() && found.refused.is_empty(), "{found}");
}

#[test]
fn a_refusal_of_what_has_a_gradient_is_found() {
    let never = |graph: &Graph, _: &[(NodeId, NodeId)], wrt: &[NodeId]| vjp(graph, &[], wrt);
    let found = check_some(None, 3, 0..50, &never);
    assert!(found.failures.len() > 30, "{found}");
}
