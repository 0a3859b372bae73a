//! Logits of the oracle's models, on every device.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use graph::{DType, Device};
use model::{Adapter, Engine, EngineConfig, Model, Rows, WantLogits};
use testkit::{Golden, fixture, relative_l2};

const ARCHITECTURES: [&str; 8] =
    ["gemma3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"];

fn families() -> impl Iterator<Item = cpu::Family> {
    cpu::Family::ALL.into_iter().filter(|f| f.is_available())
}

/// The worst relative error of any sequence's logits.
fn worst(arch: &str, device: Arc<dyn Device>, with_adapter: bool) -> f64 {
    let model = Arc::new(Model::load(&fixture(arch, "model.gguf"), device).unwrap());
    let golden = Golden::read(&fixture(arch, "golden.safetensors")).unwrap();
    let config = EngineConfig { cache: DType::F32, positions: 256, batch: 64, states: 2 };
    let mut engine = Engine::new(model.clone(), config).unwrap();
    let adapter = with_adapter.then(|| {
        let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
        engine.attach(Arc::new(adapter))
    });
    let mut worst = 0.0f64;
    for i in 0..2 {
        let tokens = golden.get(&format!("tokens.{i}")).unwrap();
        let tokens: Vec<u32> = tokens.iter().map(|&t| t as u32).collect();
        let seq = engine.cache().open();
        let rows = Rows { seq, tokens: &tokens, adapter, want: WantLogits::All };
        let logits = engine.forward(&[rows]).unwrap();
        engine.cache().close(seq);
        let name = if with_adapter { format!("lora.logits.{i}") } else { format!("logits.{i}") };
        worst = worst.max(relative_l2(&logits[0], &golden.get(&name).unwrap()));
    }
    worst
}

/// The reference computes in f64; the golden logits are stored as f32.
#[test]
fn the_reference_gives_the_golden_logits() {
    for arch in ARCHITECTURES {
        for with_adapter in [false, true] {
            let error = worst(arch, Arc::new(reference::Reference), with_adapter);
            assert!(error < 1e-6, "{arch}, adapter {with_adapter}: {error:e}");
        }
    }
}

#[test]
fn every_cpu_family_gives_the_golden_logits() {
    for family in families() {
        for arch in ARCHITECTURES {
            for with_adapter in [false, true] {
                let device = Arc::new(cpu::Cpu::new(2, Some(family)).unwrap());
                let error = worst(arch, device, with_adapter);
                assert!(error < 1e-5, "{family:?}, {arch}, adapter {with_adapter}: {error:e}");
            }
        }
    }
}
