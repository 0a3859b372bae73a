//! Kernels read and write through pointers. Here every case of every op and of its gradients runs
//! where what is out of bounds shows: nothing is behind a leaf, an arena or scratch memory, and
//! a step may change nothing of an arena but its result.

use graph::vjp;
use reference::check::{Expected, cases, op_names};

use crate::testing::{Case, Random, devices};

#[test]
fn every_op_stays_inside_of_its_memory() {
    let ops = std::env::var("GRADUS_OPS").unwrap_or_default().to_lowercase();
    let devices: Vec<_> = devices().into_iter().step_by(2).collect();
    let mut ran = 0;
    for op in op_names().filter(|op| ops.split(',').any(|o| op.to_lowercase().contains(o))) {
        for made in cases(op).iter().filter(|case| case.fault.is_none()) {
            let (built, output) = made.build(1).unwrap();
            let inputs = built.inputs.iter();
            let wrt: Vec<_> =
                inputs.filter(|i| i.expected == Expected::Gradient).map(|i| i.node).collect();
            let mut case = Case::new();
            case.graph = built.graph.clone();
            built.inputs.iter().for_each(|input| case.bind(input.node, &input.bytes));
            let dims = built.graph.node(output).shape;
            let mut outputs = vec![output];
            if !wrt.is_empty() {
                let dy = case.random("another cotangent", dims.dims(), &mut Random(1));
                let back = vjp(&case.graph, &[(output, dy)], &wrt).unwrap();
                case.graph = back.graph;
                outputs.extend(back.grads);
            }
            for cpu in &devices {
                case.run(cpu, &outputs).unwrap_or_else(|e| panic!("{op}, {}: {e}", made.name));
                ran += 1;
            }
        }
    }
    assert!(ran > 0);
}
