//! Kernels read and write through pointers. Here every case of every op and of its gradients runs
//! where what is out of bounds shows: nothing is behind a leaf, an arena or scratch memory, and
//! a step may change nothing of an arena but its result. One thread takes a step's tiles from the
//! last on, two take them from the first: both give the same bits.

use graph::vjp;
use reference::check::{Expected, cases, op_names};

use crate::job::parts::most_tiles;
use crate::testing::{Case, Random, devices};

#[test]
fn every_op_stays_inside_of_its_memory_and_has_one_result() {
    let ops = std::env::var("GRADUS_OPS").unwrap_or_default().to_lowercase();
    let devices = devices();
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
            for cpus in devices.chunks(2) {
                let ran_on = |cpu| {
                    let ran = case.run(cpu, &outputs);
                    ran.unwrap_or_else(|e| panic!("{op}, {}, {cpu:?}: {e}", made.name))
                };
                let [one, two] = cpus else { panic!("one thread and two") };
                assert!(ran_on(one) == ran_on(two), "{op}, {}: not the bits of {two:?}", made.name);
                ran += 1;
            }
        }
    }
    assert!(ran > 0);
    let most = most_tiles();
    let single: Vec<_> = most.iter().filter(|(_, most)| most.tiles < 2).map(|(op, _)| op).collect();
    assert!(
        single.is_empty() || !ops.is_empty(),
        "ops whose cases have no more than a tile: {single:?}"
    );
    let once = |op: &&str| most.get(op).is_none_or(|most| most.rounds < 2);
    let once: Vec<_> = IN_ROUNDS.into_iter().filter(once).collect();
    assert!(once.is_empty() || !ops.is_empty(), "ops whose cases have one round: {once:?}");
}

/// Ops whose tiles come in rounds, beside products, whose rounds take too many columns for a case.
const IN_ROUNDS: [&str; 7] = [
    "Attention",
    "AttentionQueryBack",
    "AttentionBack",
    "SsmScan",
    "SsmScanBack",
    "GatedDeltaRule",
    "GatedDeltaRuleBack",
];

/// Where rounds are short, their sums are still those of f64.
#[test]
fn ops_in_many_rounds_conform() {
    for cpu in devices() {
        for op in ["Attention", "SsmScan", "GatedDelta"] {
            if let Err(e) = reference::check::conformance(&cpu, 1, Some(op)) {
                panic!("{cpu:?}: {e}");
            }
        }
    }
}
