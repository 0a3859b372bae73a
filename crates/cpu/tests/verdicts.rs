//! The verdicts of `testdata/verdicts/ops.txt`: for every op, the dtypes of its operands and the
//! operand it is differentiated for, whether a graph trains on each device or with which code it
//! is refused. What trained once is not refused later.
//!
//! `UPDATE_VERDICTS=1` writes the file anew.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use cpu::Cpu;
use graph::{DType, Device, Error, Graph, NodeId, Op, plan, vjp};
use reference::Reference;
use reference::check::{Expected, cases, op_names};

type Verdicts = BTreeMap<String, String>;

/// The first node of an op's name, and whether a node depends on another.
fn find(graph: &Graph, op: &str) -> Option<NodeId> {
    graph.ids().find(|&id| graph.node(id).op.name() == op && !matches!(graph.node(id).op, Op::Leaf))
}

fn depends(graph: &Graph, id: NodeId, on: NodeId) -> bool {
    id == on || graph.node(id).args.iter().any(|&a| depends(graph, a, on))
}

fn verdict(graph: &Graph, output: NodeId, wrt: NodeId, device: &dyn Device) -> String {
    let mut graph = graph.clone();
    let shape = graph.node(output).shape;
    let dy = graph.leaf("cotangent of the verdict", shape, DType::F32).unwrap();
    let made = vjp(&graph, &[(output, dy)], &[wrt]).and_then(|back| {
        let mut outputs = vec![output];
        outputs.extend(&back.grads);
        plan(&back.graph, &outputs, device)
    });
    match made {
        Ok(_) => "trains".into(),
        Err(Error::Refusal(r)) => format!("{} at {}", r.code.as_str(), r.op),
        Err(e) => panic!("neither trained nor refused: {e}"),
    }
}

fn verdicts() -> Verdicts {
    let cpu = Cpu::new(1, None).unwrap();
    let devices: [&dyn Device; 2] = [&Reference, &cpu];
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for op in op_names() {
        for case in cases(op).iter().filter(|case| case.fault.is_none()) {
            let (built, output) = case.build(1).unwrap();
            let graph = &built.graph;
            let node = find(graph, op);
            let args = node.map_or(&[][..], |id| graph.node(id).args.as_slice());
            // Slots and parts repeat: a kind once is enough.
            let mut dtypes: Vec<String> =
                args.iter().map(|a| graph.node(*a).dtype.to_string()).collect();
            if dtypes.len() > 8 {
                dtypes.truncate(8);
                dtypes.push("..".into());
            }
            for input in built.inputs.iter().filter(|i| i.expected != Expected::Nothing) {
                let operand = args.iter().position(|&a| depends(graph, a, input.node));
                let Some(operand) = operand.filter(|o| *o < 8) else { continue };
                let of = graph.node(input.node).dtype;
                let key = format!("{op}({}) operand {operand} from {of}", dtypes.join(", "));
                for device in devices {
                    let verdict = verdict(graph, output, input.node, device);
                    let key = format!("{key} on {}", device.name());
                    found.entry(key).or_default().insert(verdict);
                }
            }
        }
    }
    let join = |all: BTreeSet<String>| all.into_iter().collect::<Vec<_>>().join(" or ");
    found.into_iter().map(|(key, all)| (key, join(all))).collect()
}

#[test]
fn what_trained_once_trains() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/verdicts/ops.txt");
    let now = verdicts();
    assert!(now.len() > 300, "{} verdicts", now.len());
    if std::env::var_os("UPDATE_VERDICTS").is_some() {
        let lines: Vec<String> = now.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
        std::fs::write(&path, lines.concat()).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let kept: Verdicts = text
        .lines()
        .map(|line| line.rsplit_once(": ").unwrap())
        .map(|(key, verdict)| (key.to_string(), verdict.to_string()))
        .collect();
    let mut lost = Vec::new();
    for (key, before) in kept.iter().filter(|(_, v)| *v == "trains") {
        match now.get(key) {
            Some(after) if after == before => {}
            Some(after) => lost.push(format!("{key} trained before and is now {after}")),
            None => lost.push(format!("{key} trained before and has no case now")),
        }
    }
    assert!(lost.is_empty(), "{}", lost.join("\n"));
    let other: Vec<&String> =
        now.iter().filter(|(k, v)| kept.get(*k) != Some(v)).map(|x| x.0).collect();
    let gone: Vec<&String> = kept.keys().filter(|k| !now.contains_key(*k)).collect();
    assert!(
        other.is_empty() && gone.is_empty(),
        "other verdicts than in testdata/verdicts/ops.txt (UPDATE_VERDICTS=1 writes them): {other:?}, \
         none any more: {gone:?}"
    );
}
