//! How sequences are put into windows, and windows into steps, changes neither losses nor
//! gradients: for every architecture, the oracle's models and toys. (`walks.rs` cuts a sequence
//! into chunks.)
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Device};
use model::toy::Toy;
use model::{Adapter, Engine, EngineConfig, Model, Rows, WantLogits};
use testkit::{Random, TOYS, fixture, relative_l2};
use train::{
    Event, Example, Gradients, GraphConfig, Measured, Method, Optimizer, Parameters, Start,
    TrainConfig, Trainer, Window, loss_of, select_targets,
};

/// The oracle's models: dense ones, some of whose layers see a window alone (`gemma3`), mixtures
/// of experts, and hybrids of both kinds.
const FIXTURES: [&str; 8] =
    ["gemma3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"];

fn cpu() -> Arc<dyn Device> {
    Arc::new(cpu::Cpu::new(2, None).unwrap())
}

fn load(arch: &str) -> (Model, Adapter) {
    let model = Model::load(&fixture(arch, "model.gguf"), cpu()).unwrap();
    let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
    (model, adapter)
}

fn toy(arch: &str, experts: usize, ty: TensorType) -> (Model, Adapter) {
    let toy = Toy { experts, ffn: 256, ..Toy::new(arch, ty, 7) };
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let model = Model::from_gguf(file, cpu()).unwrap();
    let targets = select_targets(&model, &["all".to_string()]).unwrap();
    let targets = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = Adapter::fresh(&model, targets, 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    (model, adapter)
}

/// All of them, each with an adapter on every projection of which neither A nor B is zero.
fn all(ty: TensorType) -> impl Iterator<Item = (String, Model, Adapter)> {
    let fixtures = FIXTURES.into_iter().map(|arch| (arch.to_string(), load(arch)));
    // Larger, and not as ill-conditioned as the oracle's hybrids are.
    let toys = TOYS.into_iter().map(move |(arch, experts)| {
        (format!("toy {arch} of {experts} experts"), toy(arch, experts, ty))
    });
    fixtures.chain(toys).map(|(name, (model, adapter))| {
        assert!(adapter.tensors.values().all(|t| t.a.iter().chain(&t.b).any(|x| *x != 0.0)));
        (name, model, adapter)
    })
}

/// A random sequence whose later half carries loss.
fn example(seed: u64, n: usize) -> Example {
    let mut random = Random::new(seed);
    let tokens = (0..n).map(|_| random.below(320) as u32).collect();
    Example { tokens, weights: (0..n).map(|i| f32::from(2 * i >= n)).collect() }
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// The worst error of all gradients, each A and B by itself.
fn worst(ours: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>) -> (f64, String) {
    assert_eq!(ours.len(), other.len());
    let errors = ours.iter().map(|(name, grad)| {
        let other = &other[name];
        assert!(other.iter().any(|g| *g != 0.0), "{name}: nothing is compared");
        (relative_l2(grad, &as_f64(other)), name.clone())
    });
    errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

fn check(ours: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>, what: &str) {
    let worst = worst(ours, other);
    assert!(worst.0 < 1e-6, "{what}: {worst:?}");
}

/// FIELD-REPORTS F38: packed samples leaked recurrent state and the window of the convolution.
/// Beside others a sequence has, bit for bit, the loss that it has alone.
#[test]
fn f38_packed_sequences_are_as_alone() {
    for (name, model, adapter) in all(TensorType::Q4_0) {
        let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
        let config = GraphConfig { rows: 128, cache: DType::F32, ..GraphConfig::default() };
        let mut gradients = Gradients::new(&model, config).unwrap();
        let mut measure = |examples: &[&Example]| -> Measured {
            let window = Window::from(examples.iter().map(|&e| e.clone()).collect::<Vec<_>>());
            gradients.of(&window, 50.0, &parameters, &()).unwrap()
        };
        // One is shorter than a convolution's window, one longer than that of sliding attention.
        let all = [example(1, 23), example(2, 4), example(3, 67)];
        let silent = |e: &Example| Example { weights: vec![0.0; e.tokens.len()], ..e.clone() };
        let quiet: Vec<Example> = all.iter().map(silent).collect();
        let alone: Vec<Measured> = all.iter().map(|e| measure(&[e])).collect();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            // Beside others that carry no loss, bit for bit the same loss.
            for (loud, alone) in alone.iter().enumerate() {
                let window = order.map(|i| if i == loud { &all[i] } else { &quiet[i] });
                let packed = measure(&window);
                assert_eq!(packed.loss.to_bits(), alone.loss.to_bits(), "{name}, {order:?}");
                check(&packed.grads, &alone.grads, &format!("{name}, {order:?}, {loud}"));
            }
            let packed = measure(&order.map(|i| &all[i]));
            let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
            for (name, grad) in order.iter().flat_map(|&i| &alone[i].grads) {
                let sum = sums.entry(name.clone()).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(a, b)| *a += b);
            }
            check(&packed.grads, &sums, &format!("{name}, {order:?}"));
        }
    }
}

/// The four lengths of F31, all of whose tokens carry loss.
fn lengths() -> Vec<Example> {
    let whole = |(i, n)| Example { weights: vec![1.0; n], ..example(31 + i as u64, n) };
    [3, 61, 7, 29].into_iter().enumerate().map(whole).collect()
}

/// What a step over windows reports, and its gradients, which its first moments are.
fn step(
    model: &Model,
    adapter: &Adapter,
    windows: &[Window],
    file: &str,
) -> (f64, f64, BTreeMap<String, Vec<f32>>) {
    let method = Method::Sgd { momentum: 0.5 };
    let config = TrainConfig {
        targets: adapter.tensors.keys().cloned().collect(),
        method,
        graph: GraphConfig { rows: 128, cache: DType::F32, ..GraphConfig::default() },
        ..TrainConfig::default()
    };
    let from = Some((adapter.clone(), Optimizer::new(method, 0.0)));
    let start = Start { from, ..Start::default() };
    let mut trainer = Trainer::start(model, config, start).unwrap();
    let (loss, norm) = trainer.step(windows, 1e-3).unwrap();
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(file);
    trainer.snapshot().unwrap().write(&file).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let moments = tensors.tensors().into_iter().filter_map(|(name, view)| {
        let values = view.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        Some((name.strip_prefix("moment0/")?.to_string(), values.collect()))
    });
    (loss, norm, moments.collect())
}

const SPLITS: [&[&[usize]]; 3] = [&[&[0, 1, 2, 3]], &[&[0, 1], &[2, 3]], &[&[0], &[1], &[2], &[3]]];

/// FIELD-REPORTS F31: means of micro-batches were averaged. A step's gradient is over all its
/// tokens, however they are batched: lengths 3, 61, 7, 29 as 4x1, 2x2 and 1x4.
#[test]
fn f31_batches_of_any_shape_have_one_gradient() {
    let examples = lengths();
    for (name, model, adapter) in all(TensorType::F32) {
        let run = |split: &[&[usize]]| {
            let windows: Vec<Window> = split.iter().map(|w| Window::of(&examples, w)).collect();
            step(&model, &adapter, &windows, "f31.safetensors")
        };
        let (_, norm, whole) = run(SPLITS[0]);
        assert_eq!(whole.len(), 2 * adapter.tensors.len());
        for split in &SPLITS[1..] {
            let (_, n, other) = run(split);
            assert!((n / norm - 1.0).abs() < 1e-6, "{name}: {n} and {norm}");
            check(&other, &whole, &format!("{name}, {split:?}"));
        }
    }
}

/// FIELD-REPORTS F32: the loss that was reported grew with accumulation. And PRIOR-ART C14: that of
/// a window was divided twice. It is the mean over all tokens, as the served model has it.
#[test]
fn f32_the_reported_loss_is_the_mean_over_all_tokens() {
    let examples = lengths();
    for (arch, experts) in [("llama", 0), ("qwen35moe", 8)] {
        let (model, adapter) = toy(arch, experts, TensorType::Q4_0);
        let model = Arc::new(model);
        let config = EngineConfig { cache: DType::F32, positions: 128, batch: 64, states: 2 };
        let mut engine = Engine::new(model.clone(), config).unwrap();
        let id = engine.attach(Arc::new(adapter.clone()));
        let mean = loss_of(&mut engine, &examples, Some(id)).unwrap();
        for split in SPLITS {
            let windows: Vec<Window> = split.iter().map(|w| Window::of(&examples, w)).collect();
            let (loss, _, _) = step(&model, &adapter, &windows, "f32.safetensors");
            assert!((loss / mean - 1.0).abs() < 1e-7, "{arch}, {split:?}: {loss} and {mean}");
        }
    }
}

/// The same of what a run reports, per step, per epoch, and of what is held out.
#[test]
fn bug_14_losses_of_runs_are_means_over_all_tokens() {
    let examples = lengths();
    let (model, adapter) = toy("llama", 0, TensorType::F32);
    let model = Arc::new(model);
    let config = EngineConfig { cache: DType::F32, positions: 128, batch: 64, states: 2 };
    let mut engine = Engine::new(model.clone(), config).unwrap();
    let id = engine.attach(Arc::new(adapter.clone()));
    let mean = loss_of(&mut engine, &examples, Some(id)).unwrap();
    for (rows, accumulate) in [(128, 1), (64, 4), (64, 1)] {
        let config = TrainConfig {
            targets: adapter.tensors.keys().cloned().collect(),
            // Nothing moves far.
            lr: 1e-9,
            accumulate,
            graph: GraphConfig { rows, cache: DType::F32, ..GraphConfig::default() },
            ..TrainConfig::default()
        };
        let from = Some((adapter.clone(), Optimizer::new(config.method, 0.0)));
        let mut trainer =
            Trainer::start(&*model, config, Start { from, ..Start::default() }).unwrap();
        trainer.load(examples.clone(), examples.clone()).unwrap();
        let near = |loss: f64| assert!((loss / mean - 1.0).abs() < 1e-5, "{loss} and {mean}");
        let (mut steps, mut epochs) = (0, 0);
        loop {
            match trainer.advance(&()).unwrap() {
                train::Advance::Done => break,
                train::Advance::Event(Event::Epoch { loss, held_out, .. }) => {
                    near(loss);
                    near(held_out.unwrap());
                    epochs += 1;
                }
                train::Advance::Event(Event::Step { loss, .. }) => {
                    if accumulate > 1 || rows == 128 {
                        near(loss);
                    }
                    steps += 1;
                }
                train::Advance::Event(_) | train::Advance::Stopped => {}
            }
        }
        assert_eq!(epochs, 1);
        assert_eq!(steps > 1, rows == 64 && accumulate == 1);
    }
}

/// FIELD-REPORTS F44: with a fused kernel of the loss the mask was dropped. Here the logits are
/// never whole: the loss under a mask, in more than one piece of rows, is that of the logits that
/// the served model gives, by the definition in f64.
#[test]
fn f44_the_loss_under_a_mask_is_that_of_the_logits() {
    let (model, adapter) = toy("qwen3moe", 8, TensorType::F32);
    let model = Arc::new(model);
    let n = 700;
    let mut random = Random::new(44);
    // Weights of 0, 1 and between; 0 for every seventh and for the first hundred.
    let weight = |i: usize| match (i < 100 || i.is_multiple_of(7), i % 3) {
        (true, _) => 0.0,
        (false, 0) => 0.375,
        (false, _) => 1.0,
    };
    let tokens: Vec<u32> = (0..n).map(|_| random.below(320) as u32).collect();
    let example = Example { tokens: tokens.clone(), weights: (0..n).map(weight).collect() };
    assert!(example.labelled() > 512, "one piece of rows has them all");
    let config = EngineConfig { cache: DType::F32, positions: 704, batch: 704, states: 2 };
    let mut engine = Engine::new(model.clone(), config).unwrap();
    let id = engine.attach(Arc::new(adapter.clone()));
    let seq = engine.cache().open();
    let fed = &tokens[..n - 1];
    let rows = Rows { seq, tokens: fed, adapter: Some(id), want: WantLogits::All };
    let logits = engine.forward(&[rows]).unwrap().remove(0);
    let (mut sum, mut total) = (0.0, 0.0);
    for (i, row) in logits.chunks(320).enumerate() {
        let row = as_f64(row);
        let most = row.iter().copied().fold(f64::MIN, f64::max);
        let log_sum = row.iter().map(|x| (x - most).exp()).sum::<f64>().ln() + most;
        let weight = f64::from(example.weights[i + 1]);
        sum += weight * (log_sum - row[tokens[i + 1] as usize]);
        total += weight;
    }
    let graph = GraphConfig { rows: 704, cache: DType::F32, ..GraphConfig::default() };
    let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
    let window = Window::from(vec![example]);
    let mut gradients = Gradients::new(&*model, graph).unwrap();
    let loss = gradients.of(&window, total, &parameters, &()).unwrap().loss;
    assert!((loss / (sum / total) - 1.0).abs() < 1e-6, "{loss} and {}", sum / total);
}
