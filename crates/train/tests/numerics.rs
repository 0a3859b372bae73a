//! The bits that runs come to are those of one version of the arithmetic: where they change,
//! [`graph::NUMERICS`] does too, so that no checkpoint is gone on from in other bits.
//!
//! `UPDATE_NUMERICS=1` notes the bits of a new version, and of families that are not noted yet.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use cpu::{Cpu, Family};
use gguf::TensorType;
use graph::{DType, GradPrecision, Real};
use model::Model;
use model::toy::Toy;
use serde_json::{Value, json};
use testkit::Random;
use train::{Example, GraphConfig, Schedule, TrainConfig, Trainer, select_targets};

/// The bits of a run of a few steps: of its losses and its adapter.
fn bits(arch: &str, format: TensorType, precision: GradPrecision, family: Family) -> String {
    let device = Arc::new(Cpu::new(2, Some(family)).unwrap());
    let bytes = Toy::new(arch, format, 3).gguf().unwrap();
    let file = gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap();
    let model = Model::from_gguf(file, device).unwrap();
    let mut random = Random::new(5);
    let mut example = |n: usize| Example {
        tokens: (0..n).map(|_| random.below(320) as u32).collect(),
        weights: (0..n).map(|i| if i < n / 3 { 0.0 } else { 0.5 }).collect(),
    };
    let examples: Vec<Example> =
        [9, 31, 17, 60, 5, 100, 90].into_iter().map(&mut example).collect();
    let config = TrainConfig {
        targets: select_targets(&model, &["all".into()]).unwrap(),
        rank: 4,
        lr: 3e-3,
        schedule: Schedule::Linear,
        weight_decay: 0.01,
        epochs: 2,
        accumulate: 2,
        clip: 1.0,
        seed: 11,
        graph: GraphConfig {
            rows: 100,
            cache: DType::F16,
            grad_precision: precision,
            dropout: Real::from(0.1),
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    };
    let mut hash = model::Fnv::default();
    let trainer = Trainer::new(&model, config).unwrap();
    let outcome = trainer
        .run(&examples, &mut |event| {
            if let train::Event::Step { loss, .. } = event {
                hash.add(&loss.to_bits().to_le_bytes());
            }
            true
        })
        .unwrap();
    for x in outcome.adapter.tensors.values().flat_map(|pair| pair.a.iter().chain(&pair.b)) {
        hash.add(&x.to_le_bytes());
    }
    format!("{:016x}", hash.finish())
}

#[test]
fn bits_change_with_the_version_of_the_arithmetic_alone() {
    let mut now = BTreeMap::new();
    for family in Family::ALL.into_iter().filter(|f| f.is_available()) {
        for (arch, format, precision) in [
            ("llama", TensorType::Q4_0, GradPrecision::F32),
            ("llama", TensorType::Q4K, GradPrecision::Bf16),
            ("llama", TensorType::Q8_0, GradPrecision::Int16),
            ("gemma3", TensorType::Q6K, GradPrecision::Int16),
            ("qwen3moe", TensorType::Q5_0, GradPrecision::Int16),
            ("qwen35moe", TensorType::F16, GradPrecision::F32),
        ] {
            let (of, precision_name) = (family.name(), precision.name());
            let name = format!("{of} {arch} {} {precision_name}", format.name());
            now.insert(name, bits(arch, format, precision, family));
        }
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/train/numerics.json");
    let noted: Value = match std::fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap(),
        Err(_) => json!({}),
    };
    let is_same = noted["numerics"] == json!(graph::NUMERICS);
    let mut known: BTreeMap<String, String> = match is_same {
        true => serde_json::from_value(noted["bits"].clone()).unwrap(),
        false => BTreeMap::new(),
    };
    let other = |name: &&String| known.get(*name).is_some_and(|bits| *bits != now[*name]);
    let changed: Vec<&String> = now.keys().filter(other).collect();
    assert!(
        changed.is_empty(),
        "other bits than version {} gave: {changed:?}; if that is meant, raise `graph::NUMERICS`, \
         then set UPDATE_NUMERICS=1",
        graph::NUMERICS
    );
    let either = |name: &str| now.get(name).or_else(|| known.get(name));
    for (name, bits) in known.iter().chain(&now) {
        // VNNI gives the same bits sooner, whether this processor has it or not.
        if let Some(rest) = name.strip_prefix("avx512 ") {
            assert_eq!(either(&format!("avx512-vnni {rest}")), Some(bits), "{rest}");
        }
    }
    if std::env::var_os("UPDATE_NUMERICS").is_some() {
        known.extend(now);
        let all = json!({ "numerics": graph::NUMERICS, "bits": known });
        std::fs::write(&path, serde_json::to_string_pretty(&all).unwrap() + "\n").unwrap();
        return;
    }
    assert!(is_same, "`graph::NUMERICS` is another than noted: set UPDATE_NUMERICS=1");
    // A family that is not noted has never been run.
    assert!(now.keys().any(|name| known.contains_key(name)), "nothing of this machine is noted");
}
