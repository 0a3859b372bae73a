//! Dropout of what adapters read: drawn anew in each step, from the seed and from nothing else.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Recompute};
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::Random;
use train::{
    Advance, Event, Example, Goal, Gradients, GraphConfig, Masks, Measured, Optimizer, Outcome,
    Parameters, Schedule, Snapshot, Start, TrainConfig, Trainer, Walks, Window, select_targets,
};

const P: f32 = 0.2;

fn toy(arch: &'static str, ty: TensorType, threads: usize) -> Model {
    let device = Arc::new(cpu::Cpu::new(threads, None).unwrap());
    let bytes = Toy::new(arch, ty, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

/// An adapter that already does something.
fn adapted(model: &Model) -> Parameters {
    let targets = select_targets(model, &["all".into()]).unwrap();
    let targets = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = Adapter::fresh(model, targets, 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.05 * random.normal());
    }
    Parameters { adapter: Some(adapter), ..Parameters::default() }
}

fn examples(lengths: &[usize]) -> Vec<Example> {
    let mut random = Random::new(5);
    let example = |&n: &usize| Example {
        tokens: (0..n).map(|_| random.below(320) as u32).collect(),
        weights: (0..n).map(|i| if i < n / 3 { 0.0 } else { 1.0 }).collect(),
    };
    lengths.iter().map(example).collect()
}

const LENGTHS: [usize; 8] = [9, 31, 17, 33, 5, 22, 30, 12];

fn graph(rows: usize, dropout: f32) -> GraphConfig {
    GraphConfig { rows, cache: DType::F32, dropout: dropout.into(), ..GraphConfig::default() }
}

fn config(model: &Model, dropout: f32) -> TrainConfig {
    TrainConfig {
        targets: select_targets(model, &["all".into()]).unwrap(),
        rank: 4,
        alpha: 12.0,
        lr: 3e-3,
        schedule: Schedule::Cosine,
        epochs: 2,
        accumulate: 2,
        clip: 1.0,
        seed: 11,
        graph: graph(32, dropout),
        ..TrainConfig::default()
    }
}

fn trainer<'m>(model: &'m Model, config: &TrainConfig) -> Trainer<&'m Model> {
    let mut trainer = Trainer::new(model, config.clone()).unwrap();
    trainer.load(examples(&LENGTHS), examples(&[20, 9])).unwrap();
    trainer.checkpoint_every(1);
    trainer
}

/// Runs to the end: losses of steps, evaluations, checkpoints, outcome.
fn run(mut trainer: Trainer<&Model>) -> (Vec<f64>, Vec<f64>, Vec<Snapshot>, Outcome) {
    let (mut steps, mut evaluations, mut snapshots) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        match trainer.advance(&()).unwrap() {
            Advance::Event(Event::Checkpoint(snapshot)) => snapshots.push(*snapshot),
            Advance::Event(Event::Step { loss, .. }) => steps.push(loss),
            Advance::Event(Event::Epoch { held_out, .. }) => evaluations.extend(held_out),
            Advance::Event(_) | Advance::Stopped => {}
            Advance::Done => return (steps, evaluations, snapshots, trainer.finish().unwrap()),
        }
    }
}

#[test]
fn one_and_two_threads_recomputation_and_any_checkpoint_give_the_same_bits() {
    for (arch, ty) in [("llama", TensorType::Q4_1), ("qwen35moe", TensorType::Q8_0)] {
        let (one, two) = (toy(arch, ty, 1), toy(arch, ty, 2));
        let (losses, evaluations, snapshots, whole) = run(trainer(&one, &config(&one, P)));
        let (again, ..) = run(trainer(&two, &config(&two, P)));
        assert!(again == losses, "{arch}: 1 and 2 threads differ");
        let mut layers = config(&two, P);
        layers.graph.recompute = Recompute::PerLayer;
        let (again, other, _, outcome) = run(trainer(&two, &layers));
        assert!(again == losses && other == evaluations, "{arch}: recomputation changes losses");
        assert!(outcome == whole, "{arch}: recomputation changes the adapter");
        for snapshot in snapshots {
            let step = snapshot.steps();
            let mut resumed = trainer(&two, &config(&two, P));
            resumed.restore(snapshot, false).unwrap();
            let (_, _, _, outcome) = run(resumed);
            assert!(outcome == whole, "{arch}: going on from step {step} ends elsewhere");
        }
        // And it is another run than one without, from where B is no longer zero.
        let (plain, ..) = run(trainer(&one, &config(&one, 0.0)));
        assert_eq!(plain[0].to_bits(), losses[0].to_bits(), "{arch}");
        let later = plain.iter().zip(&losses).skip(1);
        assert!(later.clone().count() > 2 && later.into_iter().all(|(a, b)| a != b), "{arch}");
        assert!(whole.adapter.dropout == P);
    }
}

#[test]
fn a_checkpoint_of_another_dropout_is_refused_by_name() {
    let model = toy("llama", TensorType::Q8_0, 2);
    let snapshot = trainer(&model, &config(&model, P)).snapshot().unwrap();
    for (other, said) in [(0.0, "unset"), (0.5, "0.5")] {
        let mut trainer = trainer(&model, &config(&model, other));
        let e = trainer.restore(snapshot.clone(), false).unwrap_err().to_string();
        let line = format!("a run with `dropout` 0.2, this one has {said}");
        assert!(e.contains(&line), "{e}");
    }
}

#[test]
fn what_is_no_share_is_refused_by_field() {
    let model = toy("llama", TensorType::Q8_0, 1);
    for p in [1.0, 1.5, -0.1, f32::NAN, f32::INFINITY] {
        let line = format!("`dropout` is {p}; expected a number from 0 to below 1");
        let e = Trainer::new(&model, config(&model, p)).err().unwrap().to_string();
        assert!(e.contains(&line), "{e}");
        let e = Gradients::new(&model, graph(8, p)).err().unwrap().to_string();
        assert!(e.contains(&line), "{e}");
    }
    let own = TrainConfig {
        targets: Vec::new(),
        weights: train::select_weights(&model, &["norm".into()]).unwrap(),
        ..config(&model, P)
    };
    let e = Trainer::new(&model, own).err().unwrap().to_string();
    assert!(e.contains("`dropout` is 0.2") && e.contains("no adapter"), "{e}");
}

fn measure(
    gradients: &mut Gradients<&Model>,
    parameters: &Parameters,
    window: &Window,
    masks: Masks,
) -> Measured {
    let total = window.examples.iter().map(Example::weight).sum();
    gradients.measure(window, total, Goal::Gradient(masks), parameters, &()).unwrap()
}

/// An evaluation drops nothing: its loss is that of a graph without dropout, bit for bit.
#[test]
fn evaluation_drops_nothing() {
    let model = toy("llama", TensorType::Q4_1, 2);
    let parameters = adapted(&model);
    let window = Window::from(examples(&[20, 9]));
    let of = |rows: usize, dropout: f32, goal: Goal| {
        let walks = Walks { window: 64, horizon: 0, host_budget: 0 };
        let gradients = Gradients::new(&model, graph(rows, dropout)).unwrap();
        let mut gradients = gradients.with_walks(walks).unwrap();
        gradients.measure(&window, 1.0, goal, &parameters, &()).unwrap().loss
    };
    let plain = of(64, 0.0, Goal::Gradient(Masks::of(0, 0)));
    assert_eq!(of(64, 0.0, Goal::Loss), plain);
    assert_eq!(of(64, P, Goal::Loss), plain);
    assert_ne!(of(64, P, Goal::Gradient(Masks::of(0, 0))), plain);
    // Walked too.
    let long = Window::from(examples(&[60]));
    let walked = |dropout: f32| {
        let walks = Walks { window: 64, horizon: 0, host_budget: 0 };
        let gradients = Gradients::new(&model, graph(16, dropout)).unwrap();
        let mut gradients = gradients.with_walks(walks).unwrap();
        gradients.measure(&long, 1.0, Goal::Loss, &parameters, &()).unwrap().loss
    };
    assert_eq!(walked(P), walked(0.0));
}

/// Every step of a run and every seed drops something else, and the mean over steps is the loss
/// without, to first order.
#[test]
fn steps_and_seeds_drop_something_else() {
    let model = toy("llama", TensorType::Q4_1, 2);
    let parameters = adapted(&model);
    let window = Window::from(examples(&[20, 9]));
    let mut gradients = Gradients::new(&model, graph(32, P)).unwrap();
    let mut loss = |masks| measure(&mut gradients, &parameters, &window, masks).loss;
    let first = loss(Masks::of(0, 0));
    assert_eq!(loss(Masks::of(0, 0)).to_bits(), first.to_bits());
    let steps: Vec<f64> = (0..24).map(|step| loss(Masks::of(0, step))).collect();
    assert!((1..24).all(|step| steps[step] != steps[step - 1]));
    assert_ne!(loss(Masks::of(1, 0)), first);
}

/// The steps of a run do, though nothing moves between them here.
#[test]
fn a_run_draws_anew_in_every_step() {
    let model = toy("llama", TensorType::Q4_1, 2);
    let adapter = adapted(&model).adapter.unwrap();
    let window = Window::from(examples(&[20, 9]));
    let losses = |dropout: f32| {
        let from = Some((adapter.clone(), Optimizer::default()));
        let start = Start { from, fallback: None };
        let mut trainer = Trainer::start(&model, config(&model, dropout), start).unwrap();
        [0; 3].map(|_| trainer.step(std::slice::from_ref(&window), 0.0).unwrap().0)
    };
    let plain = losses(0.0);
    assert!(plain[0] == plain[1] && plain[1] == plain[2]);
    let dropped = losses(P);
    assert!(dropped[0] != dropped[1] && dropped[1] != dropped[2], "{dropped:?}");
    let mut gradients = Gradients::new(&model, graph(32, P)).unwrap();
    let parameters = Parameters { adapter: Some(adapter.clone()), ..Parameters::default() };
    let total: f64 = window.examples.iter().map(Example::weight).sum();
    let goal = Goal::Gradient(Masks::of(11, 2));
    let third = gradients.measure(&window, total, goal, &parameters, &()).unwrap().loss;
    assert_eq!(third, dropped[2]);
}

/// The gradient is that of the very function whose loss is given, with what is dropped held.
#[test]
fn the_gradient_is_that_of_what_was_dropped() {
    for arch in ["llama", "qwen3moe", "qwen35"] {
        let model = toy(arch, TensorType::F32, 2);
        let parameters = adapted(&model);
        let window = Window::from(examples(&[20, 9]));
        let mut gradients = Gradients::new(&model, graph(32, 0.4)).unwrap();
        let masks = Masks::of(3, 7);
        let here = measure(&mut gradients, &parameters, &window, masks);
        // Along the gradient, the loss changes by its squared norm: for a step so small that no row
        // chooses another expert, and so large that f32 has the change.
        let squares: f64 =
            here.grads.values().flatten().map(|&g| f64::from(g) * f64::from(g)).sum();
        let ratios = [2e-3, 5e-4, 1e-4].map(|length| {
            let step = length / squares.sqrt();
            let mut loss = |sign: f64| {
                let mut there = parameters.clone();
                for (name, grad) in &here.grads {
                    let values = there.value_mut(name).unwrap();
                    for (v, &g) in values.iter_mut().zip(grad) {
                        *v += (sign * step * f64::from(g)) as f32;
                    }
                }
                measure(&mut gradients, &there, &window, masks).loss
            };
            (loss(1.0) - loss(-1.0)) / (2.0 * step * squares)
        });
        println!("{arch}: {ratios:?}");
        assert!(ratios.iter().any(|ratio| (ratio - 1.0).abs() < 3e-3), "{arch}: {ratios:?}");
        // And not of what another step drops.
        let other = measure(&mut gradients, &parameters, &window, Masks::of(3, 8));
        let dot: f64 = here
            .grads
            .iter()
            .flat_map(|(name, g)| g.iter().zip(&other.grads[name]))
            .map(|(&a, &b)| f64::from(a) * f64::from(b))
            .sum();
        assert!((dot / squares - 1.0).abs() > 0.02, "{arch}: {}", dot / squares);
    }
}

/// The relative error of a gradient.
fn error(ours: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>) -> f64 {
    assert!(ours.keys().eq(other.keys()));
    let (mut off, mut all) = (0.0, 0.0);
    for (name, a) in ours {
        for (&a, &b) in a.iter().zip(&other[name]) {
            off += (f64::from(a) - f64::from(b)).powi(2);
            all += f64::from(b).powi(2);
        }
    }
    (off / all).sqrt()
}

/// However examples are put into windows, each drops what is its own.
#[test]
fn packing_does_not_change_what_is_dropped() {
    let model = toy("qwen35", TensorType::Q8_0, 2);
    let parameters = adapted(&model);
    let examples = examples(&[9, 21, 5, 17]);
    let total: f64 = examples.iter().map(Example::weight).sum();
    let mut gradients = Gradients::new(&model, graph(64, P)).unwrap();
    let mut sum = |split: &[&[usize]]| {
        let (mut loss, mut grads) = (0.0, BTreeMap::<String, Vec<f32>>::new());
        for indices in split {
            let window = Window::of(&examples, indices);
            let goal = Goal::Gradient(Masks::of(4, 9));
            let part = gradients.measure(&window, total, goal, &parameters, &()).unwrap();
            loss += part.loss;
            for (name, grad) in part.grads {
                match grads.get_mut(&name) {
                    Some(sum) => sum.iter_mut().zip(&grad).for_each(|(a, b)| *a += b),
                    None => drop(grads.insert(name, grad)),
                }
            }
        }
        (loss, grads)
    };
    let (loss, grads) = sum(&[&[0, 1, 2, 3]]);
    for split in [&[&[0][..], &[1], &[2], &[3]][..], &[&[3, 0], &[2, 1]], &[&[2, 3, 1, 0]]] {
        let (other, others) = sum(split);
        assert!((other / loss - 1.0).abs() < 1e-12, "{split:?}: {other} and {loss}");
        let off = error(&others, &grads);
        assert!(off < 1e-6, "{split:?}: {off:e}");
    }
}

/// Positions go on from chunk to chunk, so a walk drops what the whole window does.
#[test]
fn a_walk_drops_what_the_whole_window_does() {
    for arch in ["llama", "qwen35moe"] {
        let model = toy(arch, TensorType::Q4_0, 2);
        let parameters = adapted(&model);
        let window = Window::from(examples(&[65]));
        let of = |rows: usize| {
            let walks = Walks { window: 64, horizon: 0, host_budget: 0 };
            let gradients = Gradients::new(&model, graph(rows, P)).unwrap();
            let mut gradients = gradients.with_walks(walks).unwrap();
            measure(&mut gradients, &parameters, &window, Masks::of(2, 5))
        };
        let whole = of(64);
        for rows in [32, 16, 8] {
            let walked = of(rows);
            assert_eq!(walked.loss.to_bits(), whole.loss.to_bits(), "{arch}, chunks of {rows}");
            let off = error(&walked.grads, &whole.grads);
            assert!(off < 1e-5, "{arch}, chunks of {rows}: {off:e}");
        }
    }
}
