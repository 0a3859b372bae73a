//! What must hold of every plan.

use gradus_graph::*;

use super::symbolic;

/// The most bytes alive at once, each value rounded up to `align`: with 1, a lower bound of any
/// arena.
pub fn peak(plan: &Plan, align: usize) -> usize {
    let mut change = vec![0isize; plan.steps.len() + 2];
    for life in lives(plan) {
        let bytes = (life.end - life.start).next_multiple_of(align) as isize;
        change[life.from] += bytes;
        change[life.to + 1] -= bytes;
    }
    let (mut live, mut most) = (0, 0);
    for c in change {
        live += c;
        most = most.max(live);
    }
    most as usize
}

/// One value in the arena: its bytes, and the steps from its writer to its last reader.
pub struct Life {
    pub start: usize,
    pub end: usize,
    pub from: usize,
    pub to: usize,
}

/// The lives of all values; fails where a step reads something that is not there.
pub fn lives(plan: &Plan) -> Vec<Life> {
    let mut lives: Vec<Life> = Vec::new();
    // The step that last wrote each byte.
    let mut writer: Vec<Option<usize>> = vec![None; plan.arena_bytes];
    let written = |writer: &[Option<usize>], start: usize, end: usize, what: &str| {
        let w = writer.get(start).copied().flatten();
        let w = w.unwrap_or_else(|| panic!("{what} is read before it is written"));
        assert!(
            writer[start..end].iter().all(|&x| x == Some(w)),
            "{what} is overwritten before it is read"
        );
        w
    };
    for (t, step) in plan.steps.iter().enumerate() {
        for arg in &step.args {
            let Place::Arena { start, len } = arg.place else { continue };
            if len > 0 {
                let w = written(&writer, start, start + len, &format!("operand of {}", step.name));
                assert_eq!(plan.steps[w].out.place, arg.place, "{}: another value", step.name);
                lives[w].to = t;
            }
        }
        let Place::Arena { start, len } = step.out.place else { panic!("a result in a leaf") };
        assert_eq!(start % 64, 0, "{} is not aligned", step.name);
        writer[start..start + len].fill(Some(t));
        lives.push(Life { start, end: start + len, from: t, to: t });
    }
    for out in plan.outputs.iter().filter(|o| !o.range.is_empty()) {
        let w = written(&writer, out.range.start, out.range.end, "an output");
        assert_eq!(plan.steps[w].node, out.node, "an output of another node");
        lives[w].to = plan.steps.len();
    }
    lives
}

/// Checks a plan of a graph in every way that does not depend on the device.
pub fn check(graph: &Graph, outputs: &[NodeId], plan: &Plan) {
    let lives = lives(plan);
    for (i, a) in lives.iter().enumerate() {
        for b in &lives[i + 1..] {
            let apart = a.end <= b.start || b.end <= a.start;
            let never_together = a.to < b.from || b.to < a.from;
            assert!(
                apart || never_together || a.start == a.end || b.start == b.end,
                "steps {} and {} overlap",
                a.from,
                b.from
            );
        }
    }
    assert_eq!(plan.arena_bytes, lives.iter().map(|l| l.end).max().unwrap_or(0), "arena bytes");
    assert!(plan.arena_bytes >= peak(plan, 1), "an arena smaller than what lives in it");

    let mut seen = vec![false; graph.len()];
    let mut copies = 0;
    for step in &plan.steps {
        assert!(!std::mem::replace(&mut seen[step.node.index()], true), "a node runs twice");
        let node = graph.node(step.node);
        assert_eq!(step.name, node.name);
        let is_copy = node.op.is_view() || matches!(node.op, Op::Leaf);
        copies += usize::from(is_copy);
        assert_eq!(step.op, if is_copy { Op::Copy } else { node.op.clone() });
        assert_eq!(step.args.len(), node.args.len().max(1));
        for (arg, &a) in step.args.iter().zip(&node.args) {
            assert_eq!(arg.arg.dtype, graph.node(a).dtype);
            if !is_copy {
                assert_eq!(arg.arg.shape, graph.node(a).shape);
            }
            if let Place::Leaf(slot) = arg.place {
                let leaf = graph.node(plan.leaves[slot].node);
                assert_eq!(arg.arg.resident, leaf.resident);
            } else {
                assert!(!arg.arg.resident, "a value of the arena passes for a loaded weight");
            }
        }
    }
    assert_eq!(plan.copies, copies, "copies");
    for slot in &plan.leaves {
        let node = graph.node(slot.node);
        assert!(matches!(node.op, Op::Leaf));
        assert_eq!((&slot.name, slot.dtype, slot.shape), (&node.name, node.dtype, node.shape));
    }
    assert_eq!(plan.outputs.len(), outputs.len());
    for (slot, &out) in plan.outputs.iter().zip(outputs) {
        let node = graph.node(out);
        assert_eq!((slot.node, slot.dtype, slot.shape), (out, node.dtype, node.shape));
        assert_eq!(slot.range.len(), node.shape.bytes(node.dtype).unwrap());
    }

    let expected = symbolic::evaluate(graph, outputs);
    let found = symbolic::run(plan);
    for (i, (e, f)) in expected.iter().zip(&found).enumerate() {
        assert!(e == f, "output {i} has other values than the graph says");
    }
}
