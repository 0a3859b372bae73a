//! The losses of twenty steps of every architecture in formats of every kind, which are kept in
//! `testdata/train/curves.txt`: what learned once learns as well.
//!
//! `UPDATE_CURVES=1` writes the file anew.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use model::Model;
use model::toy::Toy;
use testkit::{Random, TOYS};
use train::{Event, Example, GraphConfig, Schedule, TrainConfig, Trainer, select_targets};

/// Floats, and blocks with and without minimums, of 32 and of 256 elements.
const FORMATS: [TensorType; 5] =
    [TensorType::F32, TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0, TensorType::Q4K];

const STEPS: usize = 20;

fn curve((arch, experts): (&str, usize), ty: TensorType) -> Vec<f64> {
    let toy = Toy { experts, ffn: 256, ..Toy::new(arch, ty, 3) };
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let model = Model::from_gguf(file, Arc::new(cpu::Cpu::new(2, None).unwrap())).unwrap();
    let config = TrainConfig {
        targets: select_targets(&model, &["all".into()]).unwrap(),
        rank: 4,
        alpha: 12.0,
        lr: 2e-3,
        schedule: Schedule::Cosine,
        warmup: 3,
        weight_decay: 0.01,
        clip: 1.0,
        epochs: STEPS as u64 / 4,
        seed: 27,
        graph: GraphConfig { rows: 32, ..GraphConfig::default() },
        ..TrainConfig::default()
    };
    let mut random = Random::new(27);
    // Two fill a window.
    let example = |_| Example {
        tokens: (0..17).map(|_| random.below(320) as u32).collect(),
        weights: (0..17).map(|i| f32::from(i > 4)).collect(),
    };
    let examples: Vec<Example> = (0..8).map(example).collect();
    let mut losses = Vec::new();
    let outcome = Trainer::new(&model, config).unwrap().run(&examples, &mut |event| {
        if let Event::Step { loss, .. } = event {
            losses.push(loss);
        }
        true
    });
    assert_eq!(outcome.unwrap().steps, STEPS as u64);
    losses
}

/// How far a loss may be from the kept one. Families of kernels differ in the last bits of sums, of
/// which 20 steps make up to 7e-5 in floats. Where weights are blocks, rows are rounded to eight
/// bits before they meet them, and a last bit may decide how: 1.9e-3. So it may decide which expert
/// a row takes: 1.9e-2.
fn bound((_, experts): (&str, usize), ty: TensorType) -> f64 {
    match (ty, experts) {
        (TensorType::F32, _) => 2e-4,
        (_, 0) => 4e-3,
        _ => 4e-2,
    }
}

/// FIELD-REPORTS F27: after a change of a kernel, losses were NaN.
#[test]
fn f27_losses_of_twenty_steps_are_golden() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/train/curves.txt");
    let name = |(arch, experts): (&str, usize), ty| match experts {
        0 => format!("{arch}, {ty}"),
        n => format!("{arch} of {n} experts, {ty}"),
    };
    let kinds = || TOYS.into_iter().flat_map(|toy| FORMATS.map(|ty| (toy, ty)));
    let now: BTreeMap<String, Vec<f64>> =
        kinds().map(|(toy, ty)| (name(toy, ty), curve(toy, ty))).collect();
    if std::env::var_os("UPDATE_CURVES").is_some() {
        let line = |(name, curve): (&String, &Vec<f64>)| {
            let losses: Vec<String> = curve.iter().map(|loss| format!("{loss:.6}")).collect();
            format!("{name}: {}\n", losses.join(" "))
        };
        std::fs::write(&path, now.iter().map(line).collect::<String>()).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    let kept: BTreeMap<&str, Vec<f64>> = text
        .lines()
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, losses)| (name, losses.split(' ').map(|l| l.parse().unwrap()).collect()))
        .collect();
    assert_eq!(kept.len(), now.len(), "UPDATE_CURVES=1 writes testdata/train/curves.txt");
    for (toy, ty) in kinds() {
        let name = name(toy, ty);
        let (curve, golden) = (&now[&name], &kept[name.as_str()]);
        assert_eq!(golden.len(), STEPS, "{name}");
        assert!(curve[STEPS - 1] < 0.9 * curve[0], "{name} learns nothing: {curve:?}");
        for (step, (loss, golden)) in curve.iter().zip(golden).enumerate() {
            let off = (loss / golden - 1.0).abs();
            // So that NaN fails.
            assert!(off <= bound(toy, ty), "{name}, step {}: {loss}, not {golden}", step + 1);
        }
    }
}
