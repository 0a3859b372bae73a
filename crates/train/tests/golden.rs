//! Losses and gradients of the oracle's models, on every device.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use graph::{DType, Device, Recompute};
use model::{Adapter, Model};
use testkit::{Golden, fixture, relative_l2};
use train::{Example, Gradients, GraphConfig, Measured, Parameters, Window};

/// Each with the relative errors that the reference and the CPU are allowed. `qwen3_5*` are
/// ill-conditioned: rounding a model's constants to f32 moves all gradients by up to 3e-6 and
/// 1.4e-5, f32 arithmetic by 4e-5 and 7e-5 (transformers' own f32 logits are as far from its f64
/// ones).
const ARCHITECTURES: [(&str, f64, f64); 8] = [
    ("gemma3", 1e-6, 2e-5),
    ("llama", 1e-6, 2e-5),
    ("mixtral", 1e-6, 2e-5),
    ("qwen2", 1e-6, 2e-5),
    ("qwen3", 1e-6, 2e-5),
    ("qwen3_5", 1e-5, 1e-4),
    ("qwen3_5_moe", 2e-5, 1e-4),
    ("qwen3_moe", 1e-6, 2e-5),
];

fn families() -> impl Iterator<Item = cpu::Family> {
    cpu::Family::ALL.into_iter().filter(|f| f.is_available())
}

fn window(golden: &Golden) -> Window {
    let examples = (0..2).map(|i| {
        let tokens = golden.get(&format!("tokens.{i}")).unwrap();
        let labels = golden.get(&format!("labels.{i}")).unwrap();
        let weights = labels.iter().map(|&l| if l < 0.0 { 0.0 } else { 1.0 }).collect();
        Example { tokens: tokens.iter().map(|&t| t as u32).collect(), weights }
    });
    Window::from(examples.collect::<Vec<_>>())
}

fn measure(
    model: &Model,
    golden: &Golden,
    parameters: &Parameters,
    recompute: Recompute,
) -> Measured {
    let config = GraphConfig { rows: 64, cache: DType::F32, recompute, ..GraphConfig::default() };
    let window = window(golden);
    let total = window.examples.iter().map(Example::weight).sum();
    Gradients::new(model, config).unwrap().of(&window, total, parameters, &()).unwrap()
}

fn load(arch: &str, device: Arc<dyn Device>) -> (Model, Golden) {
    let golden = Golden::read(&fixture(arch, "golden.safetensors")).unwrap();
    (Model::load(&fixture(arch, "model.gguf"), device).unwrap(), golden)
}

/// The worst relative error of the loss and of every adapter gradient.
fn adapter_error(arch: &str, device: Arc<dyn Device>, recompute: Recompute) -> f64 {
    let (model, golden) = load(arch, device);
    let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
    let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
    let measured = measure(&model, &golden, &parameters, recompute);
    let loss = golden.get("lora.loss").unwrap()[0];
    let mut worst = ((measured.loss - loss) / loss).abs();
    let mut compared = 0;
    for name in golden.names().iter().filter(|n| n.starts_with("lora.grad.")) {
        let rest = name.trim_start_matches("lora.grad.");
        let (target, part) = rest.rsplit_once('.').unwrap();
        let ours = &measured.grads[&format!("0:{target}.lora_{part}")];
        worst = worst.max(relative_l2(ours, &golden.get(name).unwrap()));
        compared += 1;
    }
    assert_eq!(compared, measured.grads.len(), "{arch}: every gradient has a golden one");
    worst
}

/// The worst relative error of the loss and of every base gradient.
fn base_error(arch: &str, device: Arc<dyn Device>) -> f64 {
    let (model, golden) = load(arch, device);
    let mut parameters = Parameters::default();
    let names: Vec<String> =
        golden.names().into_iter().filter(|n| n.starts_with("grad.")).collect();
    assert!(names.len() > 10, "{arch}: {} base gradients", names.len());
    for name in &names {
        let tensor = name.trim_start_matches("grad.");
        parameters.weights.insert(tensor.to_string(), model.read_f32(tensor).unwrap());
    }
    let measured = measure(&model, &golden, &parameters, Recompute::None);
    let loss = golden.get("loss").unwrap()[0];
    let mut worst = ((measured.loss - loss) / loss).abs();
    for name in &names {
        let ours = &measured.grads[name.trim_start_matches("grad.")];
        worst = worst.max(relative_l2(ours, &golden.get(name).unwrap()));
    }
    worst
}

/// Golden values are f64 or f32; the reference gives its results as f32.
#[test]
fn the_reference_gives_the_golden_gradients() {
    for (arch, bound, _) in ARCHITECTURES {
        let device = || Arc::new(reference::Reference);
        let error = adapter_error(arch, device(), Recompute::None);
        assert!(error < bound, "{arch}, adapter: {error:e}");
        let error = base_error(arch, device());
        assert!(error < bound, "{arch}, base: {error:e}");
    }
}

#[test]
fn every_cpu_family_gives_the_golden_gradients() {
    for family in families() {
        for (arch, _, bound) in ARCHITECTURES {
            let device = || Arc::new(cpu::Cpu::new(2, Some(family)).unwrap());
            for recompute in [Recompute::None, Recompute::PerLayer] {
                let error = adapter_error(arch, device(), recompute);
                assert!(error < bound, "{family:?}, {arch}, adapter, {recompute:?}: {error:e}");
            }
            let error = base_error(arch, device());
            assert!(error < bound, "{family:?}, {arch}, base: {error:e}");
        }
    }
}
