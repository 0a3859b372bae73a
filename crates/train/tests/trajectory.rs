//! Forty optimizer steps beside PyTorch's: losses, gradient norms and the adapter they end in.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use graph::{DType, Device, Recompute};
use model::{Adapter, Model};
use testkit::{Golden, fixture, relative_l2};
use train::{AdamW, Example, GraphConfig, Schedule, Start, TrainConfig, Trainer, Window};

const ARCHITECTURES: [&str; 3] = ["llama", "qwen3_5", "qwen3_moe"];
const STEPS: usize = 40;

/// Worst relative errors of a trajectory.
#[derive(Debug, Default)]
struct Errors {
    loss: f64,
    norm: f64,
    /// Of the final A or B of any target.
    adapter: f64,
}

fn config() -> TrainConfig {
    TrainConfig {
        targets: Vec::new(),
        rank: 4,
        alpha: 12.0,
        lr: 1e-3,
        schedule: Schedule::Cosine,
        warmup: 4,
        weight_decay: 0.01,
        epochs: 1,
        accumulate: 2,
        clip: 1.0,
        seed: 0,
        graph: GraphConfig {
            rows: 64,
            cache: DType::F32,
            recompute: Recompute::None,
            ..GraphConfig::default()
        },
    }
}

/// The sequences of all steps. A label of -100 carries no loss.
fn examples(golden: &Golden) -> Vec<Example> {
    let (tokens, labels) = (golden.get("traj.tokens").unwrap(), golden.get("traj.labels").unwrap());
    let each = tokens.chunks(32).zip(labels.chunks(32));
    each.map(|(tokens, labels)| Example {
        tokens: tokens.iter().map(|&t| t as u32).collect(),
        weights: labels.iter().map(|&l| if l < 0.0 { 0.0 } else { 1.0 }).collect(),
    })
    .collect()
}

fn walk(arch: &str, device: Arc<dyn Device>) -> Errors {
    let golden = Golden::read(&fixture(arch, "golden.safetensors")).unwrap();
    let model = Model::load(&fixture(arch, "model.gguf"), device).unwrap();
    let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
    let from = Some((adapter, AdamW::new(config().weight_decay)));
    let start = Start { from, ..Start::default() };
    let mut trainer = Trainer::start(&model, config(), start).unwrap();
    let examples = examples(&golden);
    let list = |name: &str| golden.get(&format!("traj.{name}")).unwrap();
    let (losses, norms, lrs, order) = (list("loss"), list("grad_norm"), list("lr"), list("order"));
    let mut errors = Errors::default();
    let relative = |ours: f64, golden: f64| ((ours - golden) / golden).abs();
    for (step, order) in order.chunks(4).enumerate() {
        let order: Vec<usize> = order.iter().map(|&i| i as usize).collect();
        let windows: Vec<Window> = order.chunks(2).map(|w| Window::of(&examples, w)).collect();
        let (loss, norm) = trainer.step(&windows, lrs[step] as f32).unwrap();
        errors.loss = errors.loss.max(relative(loss, losses[step]));
        errors.norm = errors.norm.max(relative(norm, norms[step]));
    }
    assert_eq!(lrs.len(), STEPS);
    let trained = trainer.parameters().adapter.as_ref().unwrap();
    let mut compared = 0;
    for name in golden.names().iter().filter(|n| n.starts_with("traj.final.")) {
        let (target, part) = name.trim_start_matches("traj.final.").rsplit_once('.').unwrap();
        let pair = &trained.tensors[target];
        let ours = if part == "a" { &pair.a } else { &pair.b };
        errors.adapter = errors.adapter.max(relative_l2(ours, &golden.get(name).unwrap()));
        compared += 1;
    }
    assert_eq!(compared, 2 * trained.tensors.len(), "{arch}: every target has a golden end");
    errors
}

fn check(arch: &str, device: Arc<dyn Device>, what: &str) {
    let errors = walk(arch, device);
    println!("{arch}, {what}: {errors:?}");
    assert!(errors.loss < 1e-4 && errors.norm < 1e-4, "{arch}, {what}: {errors:?}");
    assert!(errors.adapter < 1e-3, "{arch}, {what}: {errors:?}");
}

#[test]
fn every_cpu_family_walks_as_pytorch_does() {
    let all = [cpu::Family::Portable, cpu::Family::Avx2, cpu::Family::Avx512];
    for family in all.into_iter().filter(|f| f.is_available()) {
        for arch in ARCHITECTURES {
            let device = Arc::new(cpu::Cpu::new(2, Some(family)).unwrap());
            check(arch, device, &format!("{family:?}"));
        }
    }
}
