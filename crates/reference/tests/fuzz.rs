//! No graph that the builder accepts makes the interpreter panic, whatever its leaves hold; and
//! it computes, as a device, what it computes from the graph.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use graph::*;
use reference::check::{Wild, wild};
use reference::{Mode, Reference, eval};

#[test]
fn no_accepted_graph_panics() {
    let (mut accepted, mut computed, mut gradients) = (0, 0, 0);
    for number in 0..20_000 {
        let Some(Wild { built, outputs, .. }) = wild(1, number) else { continue };
        let graph = &built.graph;
        accepted += 1;
        let expected = eval(graph, &built.leaves, &outputs, Mode::Exact);
        let _ = eval(graph, &built.leaves, &outputs, Mode::Smooth);

        let plan = plan(graph, &outputs, &Reference).unwrap();
        let mut arena = Reference.arena(plan.arena_bytes).unwrap();
        let bound: Vec<_> = plan
            .leaves
            .iter()
            .map(|slot| {
                let input = built.inputs.iter().find(|input| input.node == slot.node).unwrap();
                let (dtype, shape, bytes) = (slot.dtype, slot.shape, input.bytes.as_slice());
                let resident = graph.node(slot.node).resident;
                let load = || Reference.load(&HostTensor { dtype, shape, bytes }).unwrap();
                (bytes, resident.then(load))
            })
            .collect();
        let host: Vec<Leaf<'_>> = bound
            .iter()
            .map(|(bytes, loaded)| match loaded {
                Some(weight) => Leaf::Resident(&**weight),
                None => Leaf::Host(bytes),
            })
            .collect();
        let ran = Reference.run(&plan, &host, &mut *arena, Segment::default(), &());
        match (expected, ran) {
            (Ok(expected), Ok(_)) => {
                computed += 1;
                gradients += usize::from(outputs.len() > 1);
                for (slot, expected) in plan.outputs.iter().zip(expected) {
                    let mut bytes = vec![0; slot.range.len()];
                    arena.read(slot.range.clone(), &mut bytes).unwrap();
                    if slot.dtype.element_bytes().is_some() {
                        assert_eq!(expected.encode(slot.dtype).unwrap(), bytes, "{graph:?}");
                    }
                }
            }
            (Err(a), Err(b)) => assert_eq!(a, b.into()),
            (a, b) => panic!("{a:?} as a graph, {b:?} as a plan: {graph:?}"),
        }
    }
    // The fuzzer must not have drifted into making nothing.
    let made = (accepted, computed, gradients);
    assert!(accepted > 12_000 && computed > 9_000 && gradients > 2_000, "{made:?}");
    println!("{made:?}");
}
