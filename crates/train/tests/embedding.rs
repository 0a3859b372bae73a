//! Adapters on the embedding and on the head are trained as all others are.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Recompute};
use model::toy::Toy;
use model::{Adapter, Engine, EngineConfig, Model, Rows, WantLogits};
use testkit::Random;
use train::{
    Example, Gradients, GraphConfig, Parameters, TrainConfig, Trainer, Walks, Window,
    select_targets,
};

fn toy(arch: &'static str, ty: TensorType, threads: usize) -> Arc<Model> {
    let device = Arc::new(cpu::Cpu::new(threads, None).unwrap());
    let file = Toy::new(arch, ty, 7).gguf().unwrap();
    let file = gguf::Gguf::from_bytes("toy.gguf", file).unwrap();
    Arc::new(Model::from_gguf(file, device).unwrap())
}

fn targets(model: &Model) -> Vec<String> {
    let targets = ["embed", "head", "attn"].map(String::from);
    let targets = select_targets(model, &targets).unwrap();
    assert!(["token_embd.weight", "output.weight"].iter().all(|&t| targets.iter().any(|x| x == t)));
    targets
}

/// An adapter that already does something.
fn adapted(model: &Model) -> Parameters {
    let targets = targets(model);
    let targets = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = Adapter::fresh(model, targets, 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.05 * random.normal());
    }
    Parameters { adapter: Some(adapter), ..Parameters::default() }
}

fn example(seed: u64, n: usize) -> Example {
    let mut random = Random::new(seed);
    let tokens = (0..n).map(|_| random.below(320) as u32).collect();
    Example { tokens, weights: (0..n).map(|i| if i < n / 3 { 0.0 } else { 1.0 }).collect() }
}

/// P5: the loss a job sees is what the engine that serves the adapter says, bit for bit.
#[test]
fn what_is_trained_is_what_is_served() {
    for (arch, ty) in [("qwen3moe", TensorType::Q4_0), ("qwen35moe", TensorType::Q4K)] {
        let (one, two) = (toy(arch, ty, 1), toy(arch, ty, 2));
        let parameters = adapted(&one);
        let tokens = example(5, 40).tokens;
        let config = EngineConfig { cache: DType::F16, positions: 64, batch: 64, states: 2 };
        let mut engine = Engine::new(one.clone(), config).unwrap();
        let id = engine.attach(Arc::new(parameters.adapter.clone().unwrap()));
        let seq = engine.cache().open();
        let mut nll = Vec::new();
        for (part, labels) in tokens[..39].chunks(7).zip(tokens[1..].chunks(7)) {
            let rows = Rows { seq, tokens: part, adapter: Some(id), want: WantLogits::All };
            let logits = engine.forward(&[rows]).unwrap().pop().unwrap();
            nll.extend(engine.log_probs(&logits, labels).unwrap().into_iter().map(|x| -x));
        }
        let graph = GraphConfig { rows: 64, cache: DType::F16, ..GraphConfig::default() };
        let mut gradients = Gradients::new(two.as_ref(), graph).unwrap();
        for at in [1, 2, 9, 39] {
            let mut weights = vec![0.0; 40];
            weights[at] = 1.0;
            let other = Example { weights: vec![0.0; 3], ..example(6, 3) };
            let window = Window::from(vec![other, Example { tokens: tokens.clone(), weights }]);
            let trained = gradients.of(&window, 1.0, &parameters, &()).unwrap().loss;
            assert_eq!(f64::from(nll[at - 1]).to_bits(), trained.to_bits(), "{arch}, {at}");
        }
    }
}

/// Along each tensor's gradient the loss changes by its squared norm; tokens that are not there
/// have none.
#[test]
fn gradients_are_differences() {
    let model = toy("qwen3moe", TensorType::F32, 2);
    let parameters = adapted(&model);
    let window = Window::from(vec![example(1, 20), example(2, 9)]);
    let graph = GraphConfig { rows: 32, cache: DType::F32, ..GraphConfig::default() };
    let mut gradients = Gradients::new(model.as_ref(), graph).unwrap();
    let here = gradients.of(&window, 25.0, &parameters, &()).unwrap();
    for target in ["token_embd.weight", "output.weight"] {
        for part in ["lora_a", "lora_b"] {
            let name = format!("0:{target}.{part}");
            let grad = &here.grads[&name];
            let squares: f64 = grad.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
            // For a step so small that no row chooses another expert.
            let ratios = [2e-3, 5e-4, 1e-4].map(|length| {
                let step = length / squares.sqrt();
                let mut loss = |sign: f64| {
                    let mut there = parameters.clone();
                    let values = there.value_mut(&name).unwrap();
                    for (v, &g) in values.iter_mut().zip(grad) {
                        *v += (sign * step * f64::from(g)) as f32;
                    }
                    gradients.of(&window, 25.0, &there, &()).unwrap().loss
                };
                (loss(1.0) - loss(-1.0)) / (2.0 * step * squares)
            });
            println!("{name}: {ratios:?}");
            assert!(ratios.iter().any(|ratio| (ratio - 1.0).abs() < 5e-3), "{name}: {ratios:?}");
        }
    }
    let read: Vec<u32> =
        window.examples.iter().flat_map(|e| e.tokens[..e.rows()].to_vec()).collect();
    let of_a = &here.grads["0:token_embd.weight.lora_a"];
    for (id, row) in of_a.chunks(4).enumerate() {
        assert_eq!(row.iter().any(|&g| g != 0.0), read.contains(&(id as u32)), "token {id}");
    }
}

/// Threads, recomputation and chunks change nothing, and both move.
#[test]
fn runs_give_the_same_bits_and_both_move() {
    let run = |threads: usize, recompute: Recompute| {
        let model = toy("qwen35moe", TensorType::Q8_0, threads);
        let config = TrainConfig {
            targets: targets(&model),
            rank: 4,
            lr: 3e-3,
            epochs: 2,
            graph: GraphConfig {
                rows: 32,
                recompute,
                dropout: 0.1.into(),
                ..GraphConfig::default()
            },
            ..TrainConfig::default()
        };
        let all = config.targets.len();
        let trainer = Trainer::new(model.as_ref(), config).unwrap();
        let examples: Vec<Example> = (0..4).map(|i| example(i, 20 + i as usize)).collect();
        let outcome = trainer.run(&examples, &mut |_| true).unwrap();
        assert_eq!(outcome.moved, (all, all));
        outcome
    };
    let one = run(1, Recompute::None);
    assert!(one == run(2, Recompute::PerLayer));

    let model = toy("qwen35moe", TensorType::Q8_0, 2);
    let parameters = adapted(&model);
    let window = Window::from(vec![example(3, 65)]);
    let of = |rows: usize| {
        let graph = GraphConfig { rows, cache: DType::F32, ..GraphConfig::default() };
        let walks = Walks { window: 64, horizon: 0, host_budget: 0 };
        let gradients = Gradients::new(model.as_ref(), graph).unwrap();
        let mut gradients = gradients.with_walks(walks).unwrap();
        gradients.of(&window, 40.0, &parameters, &()).unwrap()
    };
    let (whole, walked) = (of(64), of(16));
    assert_eq!(whole.loss.to_bits(), walked.loss.to_bits());
    for (name, a) in &walked.grads {
        let b = &whole.grads[name];
        let off: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a - b).powi(2)).sum();
        let all: f64 = b.iter().map(|&b| f64::from(b).powi(2)).sum();
        assert!((off / all).sqrt() < 1e-5, "{name}: {:e}", (off / all).sqrt());
    }
}

#[test]
fn a_tensor_that_is_both_is_refused_by_name() {
    let model = toy("llama", TensorType::Q8_0, 1);
    for (target, words) in [("embed", "the model's head as well"), ("head", "no tensor `output")] {
        let e = select_targets(&model, &[target.to_string()]).unwrap_err().to_string();
        assert!(e.contains(&format!("target `{target}`")) && e.contains(words), "{e}");
    }
}
