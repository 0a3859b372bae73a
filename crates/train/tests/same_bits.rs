//! P6: the same job gives the same adapter file, byte for byte. And P4: a run uses exactly the
//! memory its plan says.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Recompute};
use model::Model;
use model::toy::Toy;
use testkit::Random;
use train::{Example, GraphConfig, Method, Schedule, TrainConfig, Trainer, Window, select_targets};

fn toy(arch: &'static str, ty: TensorType, threads: usize) -> Model {
    let device = Arc::new(cpu::Cpu::new(threads, None).unwrap());
    let bytes = Toy::new(arch, ty, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn examples() -> Vec<Example> {
    let mut random = Random::new(5);
    let mut example = |n: usize| Example {
        tokens: (0..n).map(|_| random.below(320) as u32).collect(),
        weights: (0..n).map(|i| if i < n / 3 { 0.0 } else { 1.0 }).collect(),
    };
    [9, 31, 17, 40, 5, 22, 64, 12].into_iter().map(&mut example).collect()
}

fn config(model: &Model, recompute: Recompute) -> TrainConfig {
    TrainConfig {
        targets: select_targets(model, &["all".into()]).unwrap(),
        weights: Vec::new(),
        rank: 4,
        alpha: 12.0,
        lr: 3e-3,
        schedule: Schedule::Cosine,
        warmup: 2,
        weight_decay: 0.01,
        epochs: 4,
        accumulate: 2,
        clip: 1.0,
        seed: 11,
        graph: GraphConfig {
            rows: 64,
            cache: DType::F16,
            recompute,
            grad_precision: model.device().grad_precision(),
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    }
}

/// Trains and returns the adapter's file and the losses.
fn run(model: &Model, recompute: Recompute, name: &str) -> (Vec<u8>, Vec<f64>) {
    let trainer = Trainer::new(model, config(model, recompute)).unwrap();
    let mut losses = Vec::new();
    let outcome = trainer
        .run(&examples(), &mut |event| {
            if let train::Event::Step { loss, .. } = event {
                losses.push(loss);
            }
            true
        })
        .unwrap();
    let all = select_targets(model, &["all".into()]).unwrap().len();
    assert_eq!(outcome.moved, (all, all));
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = dir.join(format!("{name}.gguf"));
    outcome.adapter.write(&path, model).unwrap();
    (std::fs::read(&path).unwrap(), losses)
}

#[test]
fn one_and_two_threads_and_recomputation_give_the_same_file() {
    for (arch, ty) in [
        ("llama", TensorType::Q4_1),
        ("gemma3", TensorType::Q4K),
        ("qwen2", TensorType::F32),
        ("qwen35", TensorType::Q5K),
        ("qwen3moe", TensorType::Q5_0),
        ("qwen35moe", TensorType::Q5K),
    ] {
        let (one, two) = (toy(arch, ty, 1), toy(arch, ty, 2));
        let (file, losses) = run(&one, Recompute::None, &format!("{arch}-1"));
        assert!(losses.last() < losses.first(), "{arch}: {losses:?}");
        let (again, _) = run(&two, Recompute::None, &format!("{arch}-2"));
        assert!(file == again, "{arch}: 1 and 2 threads differ");
        let (again, _) = run(&two, Recompute::PerLayer, &format!("{arch}-r"));
        assert!(file == again, "{arch}: recomputation changes the file");
    }
}

#[test]
fn recomputation_takes_a_smaller_plan_and_runs_fill_their_plan_exactly() {
    let model = toy("llama", TensorType::Q4_1, 2);
    let mut sizes = Vec::new();
    for recompute in [Recompute::None, Recompute::PerLayer] {
        let mut trainer = Trainer::new(&model, config(&model, recompute)).unwrap();
        let all: Vec<Example> = examples();
        let full = all.iter().map(|e| Example { weights: vec![1.0; e.tokens.len()], ..e.clone() });
        // 64 loss rows: the window of 65 tokens.
        let window = Window::from(full.filter(|e| e.tokens.len() == 64).collect::<Vec<_>>());
        trainer.step(&[window], 1e-3).unwrap();
        let (bytes, high) = trainer.gradients().arena();
        assert_eq!(bytes, high, "{recompute:?}: the arena is not filled to its plan");
        sizes.push(bytes);
    }
    assert!(sizes[1] < sizes[0], "{sizes:?}");
}

#[test]
fn how_a_step_is_split_does_not_change_its_gradient() {
    let model = toy("llama", TensorType::F32, 2);
    let examples = examples();
    let total: f64 = examples.iter().map(Example::weight).sum();
    let targets = select_targets(&model, &["all".into()]).unwrap();
    let of_rank = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = model::Adapter::fresh(&model, of_rank, 12.0, 1).unwrap();
    let mut random = Random::new(9);
    adapter
        .tensors
        .values_mut()
        .for_each(|t| t.b.iter_mut().for_each(|b| *b = 0.05 * random.normal()));
    let parameters = train::Parameters { adapter: Some(adapter), ..Default::default() };
    let sum = |rows: usize, split: &[&[usize]]| {
        let config = GraphConfig {
            rows,
            cache: DType::F32,
            recompute: Recompute::None,
            ..GraphConfig::default()
        };
        let mut gradients = train::Gradients::new(&model, config).unwrap();
        let mut loss = 0.0;
        let mut grads: Vec<f64> = Vec::new();
        for indices in split {
            let window = Window::of(&examples, indices);
            let part = gradients.of(&window, total, &parameters, &()).unwrap();
            loss += part.loss;
            let flat: Vec<f64> = part.grads.values().flatten().map(|&g| f64::from(g)).collect();
            grads = if grads.is_empty() {
                flat
            } else {
                grads.iter().zip(&flat).map(|(a, b)| a + b).collect()
            };
        }
        (loss, grads)
    };
    let (loss, whole) = sum(256, &[&[0, 1, 2, 3, 4, 5, 6, 7]]);
    let splits: [&[&[usize]]; 2] =
        [&[&[0, 1, 2, 3], &[4, 5, 6, 7]], &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7]]];
    for split in splits {
        let (other_loss, other) = sum(128, split);
        assert!((other_loss / loss - 1.0).abs() < 1e-7, "{other_loss} and {loss}");
        let norm = whole.iter().map(|g| g * g).sum::<f64>().sqrt();
        let off: f64 = whole.iter().zip(&other).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 0.0 && off / norm < 1e-6, "{}", off / norm);
    }
}

/// Stops wherever it is asked `n` times, so that another run stops elsewhere.
struct Often(std::sync::atomic::AtomicUsize, usize);

impl graph::Stop for Often {
    fn should_stop(&self) -> bool {
        let asked = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        asked % self.1 == self.1 - 1
    }
}

#[test]
fn where_a_run_is_stopped_and_what_is_held_out_does_not_change_the_file() {
    let model = std::sync::Arc::new(toy("llama", TensorType::Q4_1, 2));
    let (file, losses) = run(&model, Recompute::None, "unstopped");
    let held_out = examples().split_off(3);
    for every in [2, 7] {
        let mut trainer = Trainer::new(model.clone(), config(&model, Recompute::None)).unwrap();
        let start = trainer.load(examples(), held_out.clone()).unwrap();
        trainer.reserve().unwrap();
        let stop = Often(Default::default(), every);
        let (mut stops, mut found, mut epochs) = (0, Vec::new(), Vec::new());
        loop {
            match trainer.advance(&stop).unwrap() {
                train::Advance::Stopped => stops += 1,
                train::Advance::Done => break,
                train::Advance::Event(train::Event::Step { loss, .. }) => found.push(loss),
                train::Advance::Event(train::Event::Epoch { loss, held_out, .. }) => {
                    epochs.push((loss, held_out.unwrap()));
                }
                train::Advance::Event(event) => panic!("{event:?}"),
            }
        }
        assert_eq!(found, losses);
        assert!(stops > 1_000 / every, "{stops} stops");
        assert!(matches!(start, train::Event::Start { steps, .. } if steps == losses.len() as u64));
        // The means of each epoch's steps fall, and so does the loss of what is held out, which
        // here was learned too.
        assert_eq!(epochs.len(), 4);
        assert!(epochs[3].0 < epochs[0].0 && epochs[3].1 < epochs[0].1, "{epochs:?}");
        let mean = |range: std::ops::Range<usize>| losses[range].iter().sum::<f64>();
        assert!(epochs[0].0 > mean(losses.len() - 2..losses.len()) / 2.0);
        let outcome = trainer.finish().unwrap();
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("stopped.gguf");
        outcome.adapter.write(&path, &model).unwrap();
        assert!(std::fs::read(&path).unwrap() == file, "stopping every {every} changes the file");
    }
}

/// An adapter and its optimizer go on where they were: two runs of half the epochs each, at a
/// constant rate, are one.
#[test]
fn a_run_goes_on_from_an_adapter_and_its_optimizer() {
    let model = toy("llama", TensorType::Q4_1, 2);
    let settings = |epochs| TrainConfig {
        schedule: Schedule::Constant,
        warmup: 0,
        epochs,
        ..config(&model, Recompute::None)
    };
    // One example, so that the order of the data does not matter.
    let examples = examples().split_off(7);
    let once = Trainer::new(&model, settings(4)).unwrap().run(&examples, &mut |_| true).unwrap();
    let half = Trainer::new(&model, settings(2)).unwrap().run(&examples, &mut |_| true).unwrap();
    let from = Some((half.adapter.clone(), half.optimizer.clone()));
    let start = train::Start { from, ..Default::default() };
    let whole = Trainer::start(&model, settings(2), start).unwrap();
    let whole = whole.run(&examples, &mut |_| true).unwrap();
    assert_eq!((half.steps, whole.steps), (2, 2));
    assert!(half.adapter != once.adapter);
    assert!(whole.adapter == once.adapter && whole.optimizer == once.optimizer);
    // Another optimizer cannot; both are named as settings name them.
    let config = TrainConfig { method: Method::Sgd { momentum: 0.5 }, ..settings(2) };
    let start = train::Start { from: Some((half.adapter, half.optimizer)), ..Default::default() };
    let refused = Trainer::start(&model, config, start).err().unwrap().to_string();
    assert!(refused.contains("go on with is adamw, `beta1` 0.9,"), "{refused}");
    assert!(refused.contains("settings say sgd, `momentum` 0.5, `weight_decay`"), "{refused}");
}
