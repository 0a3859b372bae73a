//! Models with recurrent layers: sequences packed into one window give the losses and gradients of
//! each alone. (`walks.rs` cuts one into chunks.)
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Device};
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::{Random, fixture, relative_l2};
use train::{Example, Gradients, GraphConfig, Measured, Parameters, Window};

/// The oracle's models, and toys under their names in GGUF.
const FIXTURES: [&str; 2] = ["qwen3_5", "qwen3_5_moe"];
const TOYS: [&str; 2] = ["qwen35", "qwen35moe"];

fn cpu() -> Arc<dyn Device> {
    Arc::new(cpu::Cpu::new(2, None).unwrap())
}

fn load(arch: &str) -> (Model, Parameters) {
    let model = Model::load(&fixture(arch, "model.gguf"), cpu()).unwrap();
    let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
    (model, Parameters { adapter: Some(adapter), ..Parameters::default() })
}

/// A toy, which is not ill-conditioned as the oracle's model is.
fn toy(arch: &'static str, ty: TensorType) -> (Model, Parameters) {
    let file = Toy::new(arch, ty, 7).gguf().unwrap();
    let model = Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", file).unwrap(), cpu()).unwrap();
    let targets = train::select_targets(&model, &["all".to_string()]).unwrap();
    let mut adapter =
        Adapter::fresh(&model, targets.iter().map(|t| (t.as_str(), 4)), 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    (model, Parameters { adapter: Some(adapter), ..Parameters::default() })
}

/// A random sequence whose later half carries loss.
fn example(seed: u64, n: usize) -> Example {
    let mut random = Random::new(seed);
    let tokens = (0..n).map(|_| random.below(320) as u32).collect();
    Example { tokens, weights: (0..n).map(|i| f32::from(2 * i >= n)).collect() }
}

fn measure(model: &Model, parameters: &Parameters, examples: &[&Example], rows: usize) -> Measured {
    let config = GraphConfig { rows, cache: DType::F32, ..GraphConfig::default() };
    let window = Window::from(examples.iter().map(|&e| e.clone()).collect::<Vec<_>>());
    Gradients::new(model, config).unwrap().of(&window, 50.0, parameters, &()).unwrap()
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// FIELD-REPORTS F38: packed samples leaked recurrent state and the window of the convolution.
#[test]
fn f38_packed_sequences_are_as_alone() {
    let fixtures = FIXTURES.map(|arch| (arch, load(arch)));
    let toys = TOYS.map(|arch| (arch, toy(arch, TensorType::Q4_0)));
    for (arch, (model, parameters)) in fixtures.into_iter().chain(toys) {
        // One is shorter than the convolution's window.
        let all = [example(1, 23), example(2, 4), example(3, 37)];
        let silent = |e: &Example| Example { weights: vec![0.0; e.tokens.len()], ..e.clone() };
        let quiet: Vec<Example> = all.iter().map(silent).collect();
        let alone: Vec<Measured> =
            all.iter().map(|e| measure(&model, &parameters, &[e], 64)).collect();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            // Beside others that carry no loss, bit for bit the same loss.
            for (loud, alone) in alone.iter().enumerate() {
                let window = order.map(|i| if i == loud { &all[i] } else { &quiet[i] });
                let packed = measure(&model, &parameters, &window, 64);
                assert_eq!(packed.loss.to_bits(), alone.loss.to_bits(), "{arch}, {order:?}");
                compare(&packed.grads, &alone.grads, &format!("{arch}, {order:?}, {loud}"));
            }
            let packed = measure(&model, &parameters, &order.map(|i| &all[i]), 64);
            let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
            for (name, grad) in order.iter().flat_map(|&i| &alone[i].grads) {
                let sum = sums.entry(name.clone()).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(a, b)| *a += b);
            }
            compare(&packed.grads, &sums, &format!("{arch}, {order:?}"));
        }
    }
}

fn compare(ours: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>, what: &str) {
    assert_eq!(ours.len(), other.len());
    let errors = ours.iter().map(|(name, grad)| (relative_l2(grad, &as_f64(&other[name])), name));
    let worst = errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
    assert!(worst.0 < 1e-6, "{what}: {worst:?}");
}
