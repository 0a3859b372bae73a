//! The verdicts of `testdata/verdicts/models.txt`: for every architecture, format of its matrices,
//! dtype of its cache and device, whether an adapter, a matrix and a norm of it train, or with
//! which code they are refused. What trained once is not refused later.
//!
//! `UPDATE_VERDICTS=1` writes the file anew.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Device, Recompute};
use model::toy::Toy;
use model::{Adapter, Model};
use train::{Gradients, GraphConfig, Parameters, select_targets};

const ARCHITECTURES: [&str; 7] =
    ["gemma3", "llama", "qwen2", "qwen3", "qwen35", "qwen35moe", "qwen3moe"];

fn verdict(model: &Model, cache: DType, parameters: &Parameters) -> String {
    let config =
        GraphConfig { rows: 16, cache, recompute: Recompute::None, ..GraphConfig::default() };
    let made = Gradients::new(model, config).and_then(|mut g| g.plan(parameters).map(|_| ()));
    match made {
        Ok(()) => "trains".into(),
        Err(train::Error::Model(model::Error::Graph(graph::Error::Refusal(r)))) => {
            format!("{} at {} `{}`", r.code.as_str(), r.op, r.node)
        }
        Err(e) => panic!("neither trained nor refused: {e}"),
    }
}

fn verdicts() -> BTreeMap<String, String> {
    let cpu: Arc<dyn Device> = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let devices = [cpu, Arc::new(reference::Reference) as Arc<dyn Device>];
    let q8 = DType::Block(TensorType::Q8_0);
    let mut found = BTreeMap::new();
    for arch in ARCHITECTURES {
        for ty in TensorType::ALL.into_iter().filter(|ty| *ty != TensorType::I32) {
            let bytes = Toy::new(arch, ty, 3).gguf().unwrap();
            for device in &devices {
                let file = gguf::Gguf::from_bytes("toy.gguf", bytes.clone()).unwrap();
                let model = Model::from_gguf(file, device.clone()).unwrap();
                let targets = select_targets(&model, &["all".into()]).unwrap();
                let adapter =
                    Adapter::fresh(&model, targets.iter().map(|t| (t.as_str(), 2)), 4.0, 1)
                        .unwrap();
                // Nothing runs, so the values do not matter.
                let weight = |name: &str| {
                    let n = model.weights().get(name).unwrap().shape.elements();
                    let weights = [(name.to_string(), vec![0.0; n])];
                    Parameters { weights: weights.into_iter().collect(), ..Parameters::default() }
                };
                let routed = model.projections().contains_key("blk.0.ffn_gate_inp.weight");
                let matrix = if routed { "ffn_down_exps" } else { "ffn_down" };
                let mut all = vec![
                    ("adapter", Parameters { adapter: Some(adapter), ..Parameters::default() }),
                    ("matrix", weight(&format!("blk.0.{matrix}.weight"))),
                    ("norm", weight("blk.0.attn_norm.weight")),
                ];
                if routed {
                    all.push(("router", weight("blk.0.ffn_gate_inp.weight")));
                }
                for cache in [DType::F32, DType::F16, q8] {
                    for (what, parameters) in &all {
                        let name = device.name();
                        let key = format!("{arch}, {ty}, cache {cache}, {what} on {name}");
                        found.insert(key, verdict(&model, cache, parameters));
                    }
                }
            }
        }
    }
    found
}

#[test]
fn what_trained_once_trains() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/verdicts/models.txt");
    let now = verdicts();
    if std::env::var_os("UPDATE_VERDICTS").is_some() {
        let lines: Vec<String> = now.iter().map(|(k, v)| format!("{k}: {v}\n")).collect();
        std::fs::write(&path, lines.concat()).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let kept: BTreeMap<&str, &str> =
        text.lines().map(|line| line.split_once(": ").unwrap()).collect();
    assert!(kept.len() > 800, "{} verdicts", kept.len());
    for (key, before) in &kept {
        let after = now.get(*key).map_or("not tried", String::as_str);
        assert!(
            *before != "trains" || after == "trains",
            "{key}: trained before and is refused now: {after}"
        );
        assert_eq!(
            *before, after,
            "{key}: another verdict (UPDATE_VERDICTS=1 writes testdata/verdicts)"
        );
    }
    assert_eq!(now.len(), kept.len(), "verdicts that are not in the file (UPDATE_VERDICTS=1)");
}
