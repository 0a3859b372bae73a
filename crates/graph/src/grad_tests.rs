//! What becomes of a gradient rule that breaks its contract. The rules themselves are right,
//! so a rule is broken on purpose, in tests only.

use std::cell::RefCell;

use crate::*;

type Made = std::result::Result<NodeId, Invalid>;
type Breaker = fn(&mut Graph, NodeId) -> Made;

thread_local! {
    /// The op whose rules are broken, and what is made of their results.
    static BROKEN: RefCell<Option<(&'static str, Breaker)>> = const { RefCell::new(None) };
}

/// Called by `vjp` on every result of a rule.
pub(super) fn broken(g: &mut Graph, op: &Op, made: Made) -> Made {
    match BROKEN.with_borrow(|b| *b) {
        Some((name, breaker)) if name == op.name() => breaker(g, made?),
        _ => made,
    }
}

fn breaking<T>(op: &'static str, breaker: Breaker, run: impl FnOnce() -> T) -> T {
    BROKEN.set(Some((op, breaker)));
    let result = run();
    BROKEN.set(None);
    result
}

/// `tanh(x . w^T)`, its cotangent, and `x`, `w`.
fn graph() -> (Graph, [(NodeId, NodeId); 1], [NodeId; 2]) {
    let mut g = Graph::new();
    let leaf = |g: &mut Graph, name, dims: &[usize]| {
        g.leaf(name, Shape::new(dims).unwrap(), DType::F32).unwrap()
    };
    let (x, w, dy) =
        (leaf(&mut g, "x", &[2, 3]), leaf(&mut g, "blk.0.w", &[4, 3]), leaf(&mut g, "dy", &[2, 4]));
    let y = g.project(x, w).unwrap();
    let y = g.unary(Unary::Tanh, y).unwrap();
    (g, [(y, dy)], [x, w])
}

fn refused(op: &'static str, breaker: Breaker) -> Refusal {
    let (g, cotangents, wrt) = graph();
    match breaking(op, breaker, || vjp(&g, &cotangents, &wrt)) {
        Err(Error::Refusal(r)) => *r,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_rule_of_the_wrong_shape_is_refused() {
    let r = refused("MatMul", |g, dx| {
        let elements = g.node(dx).shape.elements();
        g.reshape(dx, &[1, elements])
    });
    assert_eq!((r.code, r.operand.as_deref()), (Code::BrokenRule, Some("0 (`x`, f32)")));
    assert_eq!(
        r.to_string(),
        "MatMul at node `blk.0.w`, operand 0 (`x`, f32): the gradient rule gave f32 [1, 6] for \
         an operand of shape [2, 3]; this is a bug in Gradus"
    );
}

#[test]
fn a_rule_of_the_wrong_dtype_is_refused() {
    let r = refused("Tanh", |g, dx| g.cast(dx, DType::BF16));
    assert_eq!(r.code.as_str(), "broken_gradient_rule");
    assert_eq!(
        r.to_string(),
        "Tanh at node `blk.0.w`, operand 0 (`blk.0.w`, f32): the gradient rule gave bf16 [2, 4] \
         for an operand of shape [2, 4]; this is a bug in Gradus"
    );
}

#[test]
fn a_rule_that_cannot_be_built_is_refused() {
    let r = refused("MatMul", |g, dx| g.slice(dx, 0, 9, 9));
    assert_eq!((r.code, r.op.as_str(), r.node.as_str()), (Code::BrokenRule, "MatMul", "blk.0.w"));
    assert_eq!(
        r.reason,
        "the gradient rule does not fit together (Slice at node `blk.0.w` (f32 [2, 3]): 9 \
         entries from 9 are outside of dimension 0 of size 2); this is a bug in Gradus"
    );
}

#[test]
fn the_first_broken_rule_on_the_way_back_is_named_and_others_are_not_asked() {
    let r = refused("Tanh", |g, dx| g.reshape(dx, &[8]));
    assert_eq!(r.op, "Tanh");
    // A rule that is not on the way is no one's concern.
    let (g, cotangents, wrt) = graph();
    let back = breaking("Exp", |g, dx| g.reshape(dx, &[8]), || vjp(&g, &cotangents, &wrt));
    assert_eq!(back.unwrap().grads.len(), 2);
    // Nor is anything left behind: the same graph differentiates once its rules are whole.
    assert!(vjp(&g, &cotangents, &wrt).is_ok());
}
