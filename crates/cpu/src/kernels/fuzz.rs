//! Graphs of one op and its gradients, of any shapes, views and leaves, run where what is out of
//! bounds ends the process or shows, as in [`super::fences`]: each gives an error by name or
//! values, the same with one thread and two.
//!
//! `GRADUS_FUZZ=N` runs N graphs in each family instead of 10,000, `GRADUS_SEED=S` others than those
//! of seed 1. When the process ends, `--nocapture` shows which graph it ran last.

use graph::{Code, DType, Error, plan};
use reference::check::{Wild, wild};
use reference::{Mode, eval};

use crate::Cpu;
use crate::testing::{Case, families, to_floats};

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

/// What became of the graphs of one family.
#[derive(Default, Debug)]
struct Found {
    refused: usize,
    faults: usize,
    computed: usize,
    gradients: usize,
    /// Elements that are finite in f64 and had to be.
    finite: usize,
}

#[test]
fn no_accepted_graph_panics_or_leaves_its_memory() {
    let (count, seed) = (number("GRADUS_FUZZ", 10_000), number("GRADUS_SEED", 1));
    for (i, family) in families().enumerate() {
        let cpus = [1, 2].map(|threads| Cpu::new(threads, Some(family)).unwrap());
        let mut found = Found::default();
        let first = count * i as u64;
        for number in first..first + count {
            if let Some(graph) = wild(seed, number) {
                println!("{}: seed {seed}, graph {number}", family.key());
                fuzz(&cpus, &graph, &format!("{family:?}, graph {number}"), &mut found);
            }
        }
        println!("{}: {found:?}", family.name());
        // The fuzzer must not have drifted into making nothing.
        let count = count as usize;
        assert!(found.computed > count / 3 && found.gradients > count / 20, "{found:?}");
        assert!(found.refused < count / 20 && found.finite > count, "{found:?}");
    }
}

fn fuzz(cpus: &[Cpu; 2], made: &Wild, name: &str, found: &mut Found) {
    let Wild { built, outputs, tame } = made;
    let mut case = Case::new();
    case.graph = built.graph.clone();
    built.inputs.iter().for_each(|input| case.bind(input.node, &input.bytes));
    let of = || {
        let graph = &built.graph;
        let nodes = graph.ids().map(|id| graph.node(id));
        let lines: Vec<String> =
            nodes.map(|n| format!("{:?} {} {} of {:?}", n.op, n.dtype, n.shape, n.args)).collect();
        format!("{name}:\n{}", lines.join("\n"))
    };
    let slots = match plan(&built.graph, outputs, &cpus[0]) {
        Ok(plan) => plan.outputs,
        Err(Error::Refusal(refusal)) => {
            assert_eq!(refusal.code, Code::NoKernel, "{refusal}: {}", of());
            println!("{refusal}");
            found.refused += 1;
            return;
        }
        Err(e) => panic!("{e}: {}", of()),
    };
    let [one, two] = cpus.each_ref().map(|cpu| case.run(cpu, outputs));
    assert!(one == two, "not the bits of two threads: {}", of());
    match (eval(&built.graph, &built.leaves, outputs, Mode::Exact), one) {
        (Ok(truth), Ok(values)) => {
            found.computed += 1;
            found.gradients += usize::from(outputs.len() > 1);
            for ((slot, bytes), truth) in slots.iter().zip(&values).zip(&truth) {
                let Some(truth) = truth.as_floats().filter(|_| *tame) else { continue };
                if slot.dtype != DType::F32 {
                    continue;
                }
                for (i, (a, b)) in to_floats(bytes).iter().zip(truth).enumerate() {
                    // What is nearly infinite may be so where it is rounded.
                    if b.abs() < 1e30 {
                        found.finite += 1;
                        assert!(a.is_finite(), "element {i} is {a}, in f64 {b}: {}", of());
                    }
                }
            }
        }
        (Err(truth), Err(fault)) => {
            found.faults += 1;
            assert_eq!(truth.code(), fault.code, "{fault}, in f64 {truth}: {}", of());
            assert!(!fault.node.is_empty() && fault.code != Code::Internal, "{fault}: {}", of());
        }
        (truth, got) => {
            let (truth, got) = (truth.map(|_| ()), got.map(|_| ()));
            panic!("{got:?}, in f64 {truth:?}: {}", of());
        }
    }
}
