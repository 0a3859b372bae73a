//! Windows longer than a graph: walked in chunks they give the loss, bit for bit, and the gradient
//! of the whole.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Device};
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::{Random, fixture};
use train::{Example, Gradients, GraphConfig, Measured, Parameters, Walks, Window};

/// The oracle's models, and toys under their names in GGUF.
const FIXTURES: [&str; 8] =
    ["gemma3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"];
const TOYS: [&str; 7] = ["gemma3", "llama", "qwen2", "qwen3", "qwen3moe", "qwen35", "qwen35moe"];

fn cpu(threads: usize) -> Arc<dyn Device> {
    Arc::new(cpu::Cpu::new(threads, None).unwrap())
}

fn load(arch: &str) -> (Model, Parameters) {
    let model = Model::load(&fixture(arch, "model.gguf"), cpu(2)).unwrap();
    let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
    (model, Parameters { adapter: Some(adapter), ..Parameters::default() })
}

fn toy(arch: &'static str, ty: TensorType, threads: usize) -> (Model, Parameters) {
    let file = Toy::new(arch, ty, 7).gguf().unwrap();
    let file = gguf::Gguf::from_bytes("toy.gguf", file).unwrap();
    let model = Model::from_gguf(file, cpu(threads)).unwrap();
    let parameters = adapted(&model, &["all"]);
    (model, parameters)
}

/// An adapter that already does something.
fn adapted(model: &Model, targets: &[&str]) -> Parameters {
    let targets: Vec<String> = targets.iter().map(|t| (*t).to_string()).collect();
    let targets = train::select_targets(model, &targets).unwrap();
    let mut adapter =
        Adapter::fresh(model, targets.iter().map(|t| (t.as_str(), 4)), 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    Parameters { adapter: Some(adapter), ..Parameters::default() }
}

/// A random sequence of so many rows, of which those of `loud` carry loss.
fn example(seed: u64, rows: usize, loud: impl Fn(usize) -> bool) -> Example {
    let mut random = Random::new(seed);
    let tokens = (0..=rows).map(|_| random.below(320) as u32).collect();
    let weights = (0..=rows).map(|i| f32::from(i > 0 && loud(i - 1)) * (1.0 + (i % 3) as f32));
    Example { tokens, weights: weights.collect() }
}

const WHOLE: Walks = Walks { window: 4096, horizon: 0, host_budget: 0 };

fn gradients(model: &Model, rows: usize, cache: DType, walks: Walks) -> Gradients<&Model> {
    let config = GraphConfig { rows, cache, ..GraphConfig::default() };
    Gradients::new(model, config).unwrap().with_walks(walks).unwrap()
}

fn measure(
    model: &Model,
    parameters: &Parameters,
    example: &Example,
    rows: usize,
    cache: DType,
) -> Measured {
    let window = Window { examples: vec![example.clone()] };
    gradients(model, rows, cache, WHOLE).of(&window, example.weight(), parameters, &()).unwrap()
}

/// The relative error of the whole gradient, its cosine, and the worst relative error of a tensor.
fn compare(
    ours: &BTreeMap<String, Vec<f32>>,
    other: &BTreeMap<String, Vec<f32>>,
) -> (f64, f64, f64) {
    assert!(ours.keys().eq(other.keys()));
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    let (mut aa, mut ab, mut bb, mut off, mut worst) = (0.0, 0.0, 0.0, 0.0, 0.0f64);
    for (name, a) in ours {
        let b = &other[name];
        let (a_a, a_b, b_b) = (dot(a, a), dot(a, b), dot(b, b));
        let d: f64 = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
        (aa, ab, bb, off) = (aa + a_a, ab + a_b, bb + b_b, off + d);
        worst = worst.max(if d == 0.0 { 0.0 } else { (d / b_b).sqrt() });
    }
    assert!(bb > 0.0);
    ((off / bb).sqrt(), ab / (aa * bb).sqrt(), worst)
}

#[test]
fn a_window_in_two_four_or_eight_chunks_is_as_whole() {
    let late = example(1, 64, |i| i >= 32);
    let all = example(2, 64, |_| true);
    let spots = example(3, 61, |i| i == 3 || (40..44).contains(&i) || i == 60);
    let check = |model: &Model, parameters: &Parameters, cache: DType, what: &str| {
        for (which, example) in [&late, &all, &spots].into_iter().enumerate() {
            let whole = measure(model, parameters, example, 64, cache);
            for rows in [32, 16, 8, 7] {
                let walked = measure(model, parameters, example, rows, cache);
                let what = format!("{what}, {cache}, example {which}, chunks of {rows}");
                assert_eq!(walked.loss.to_bits(), whole.loss.to_bits(), "{what}");
                let (error, cosine, worst) = compare(&walked.grads, &whole.grads);
                println!("{what}: {error:.1e} {cosine} {worst:.1e}");
                assert!(error < 1e-5 && cosine > 0.99999, "{what}: {error:e}, {cosine}");
            }
        }
    };
    for arch in TOYS {
        for (ty, cache) in [(TensorType::F32, DType::F32), (TensorType::Q4_0, DType::F16)] {
            let (model, parameters) = toy(arch, ty, 2);
            check(&model, &parameters, cache, arch);
        }
    }
    for arch in FIXTURES {
        let (model, parameters) = load(arch);
        check(&model, &parameters, DType::F32, arch);
    }
}
