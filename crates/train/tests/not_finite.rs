//! A number that is not finite ends a run by name: the step, the op and the node that gave it first.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf::TensorType;
use graph::Stop;
use model::Model;
use model::toy::Toy;
use train::{
    Advance, Event, Example, GraphConfig, Method, Optimizer, Start, TrainConfig, Trainer, Walks,
};

fn toy(arch: &'static str) -> Model {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let bytes = Toy::new(arch, TensorType::F32, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn examples() -> Vec<Example> {
    let tokens: Vec<u32> = (0..40).map(|i| 20 + i * 7 % 250).collect();
    vec![Example { weights: vec![1.0; tokens.len()], tokens }]
}

/// Stops at every edge, and counts them.
struct Edges(AtomicUsize);

impl Stop for Edges {
    fn should_stop(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// What a run says whose adapter on one target is far too strong: in its first step, or, where some
/// is `held_out`, in its evaluation before.
fn said(
    model: &Model,
    target: &str,
    walks: Option<Walks>,
    held_out: bool,
    stop: &dyn Stop,
) -> (String, usize) {
    let config = TrainConfig {
        targets: train::select_targets(model, &["all".into()]).unwrap(),
        rank: 2,
        lr: 1e-3,
        walks,
        graph: GraphConfig {
            rows: if walks.is_some() { 16 } else { 64 },
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    };
    let mut fresh = Trainer::new(model, config.clone()).unwrap();
    let mut adapter = fresh.parameters().unwrap().adapter.clone().unwrap();
    let pair = adapter.tensors.get_mut(target).unwrap();
    pair.a.iter_mut().for_each(|a| *a *= 1e6);
    pair.b.fill(3e38);
    let start = Start { from: Some((adapter, Optimizer::default())), fallback: None };
    let mut trainer = Trainer::start(model, config, start).unwrap();
    if held_out {
        trainer.measure_first();
    }
    trainer.load(examples(), if held_out { examples() } else { Vec::new() }).unwrap();
    trainer.reserve().unwrap();
    let before = trainer.parameters().unwrap().clone();
    let mut stops = 0;
    loop {
        match trainer.advance(stop) {
            Ok(Advance::Stopped) => stops += 1,
            Ok(other) => assert!(matches!(other, Advance::Stopped), "{other:?}"),
            Err(e) => {
                assert!(trainer.parameters().unwrap() == &before, "something has moved");
                return (e.to_string(), stops);
            }
        }
    }
}

#[test]
fn the_first_op_that_is_not_finite_is_named() {
    for (arch, target) in [
        ("llama", "blk.1.ffn_up.weight"),
        ("qwen35moe", "blk.0.attn_qkv.weight"),
        ("qwen3moe", "blk.1.ffn_down_exps.weight"),
    ] {
        let model = toy(arch);
        let (whole, _) = said(&model, target, None, false, &());
        assert!(whole.starts_with("step 1: "), "{whole}");
        let named = format!("Lora at `{target}`");
        let experts = format!("LoraExperts at `{target}`");
        assert!(whole.contains(&named) || whole.contains(&experts), "{arch}: {whole}");
        // Wherever it is stopped, it says the same, and it can be stopped often.
        let (stopped, stops) = said(&model, target, None, false, &Edges(AtomicUsize::new(0)));
        assert_eq!(stopped, whole);
        assert!(stops > 100, "{arch}: {stops} edges");
        let walks = Walks { window: 64, horizon: 0, host_budget: 0 };
        let (walked, _) = said(&model, target, Some(walks), false, &());
        assert!(walked.starts_with("step 1: ") && walked.contains(" at `"), "{arch}: {walked}");
        let (evaluated, _) = said(&model, target, None, true, &());
        assert!(evaluated.starts_with("after step 0, of what is held out the loss"), "{evaluated}");
        assert!(evaluated.contains(&named) || evaluated.contains(&experts), "{arch}: {evaluated}");
        let edges = Edges(AtomicUsize::new(0));
        assert_eq!(said(&model, target, None, true, &edges).0, evaluated);
        let (walked, _) = said(&model, target, Some(walks), true, &());
        let start = "after step 0, of what is held out the loss is ";
        assert!(walked.starts_with(start) && walked.contains(" at `"), "{arch}: {walked}");
        let edges = Edges(AtomicUsize::new(0));
        assert_eq!(said(&model, target, Some(walks), true, &edges).0, walked);
    }
}

/// A run that takes one step far too long; the events it reports, and how it fails.
fn blown_up(walks: Option<Walks>, stop: &dyn Stop) -> (Trainer<&'static Model>, usize, String) {
    let model: &'static Model = Box::leak(Box::new(toy("llama")));
    let config = TrainConfig {
        targets: train::select_targets(model, &["all".into()]).unwrap(),
        rank: 2,
        method: Method::Sgd { momentum: 0.0 },
        lr: 1.0,
        alpha: 1e14,
        walks,
        graph: GraphConfig {
            rows: if walks.is_some() { 16 } else { 64 },
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(model, config).unwrap();
    trainer.load(examples(), Vec::new()).unwrap();
    trainer.reserve().unwrap();
    let planned = (trainer.planned_bytes(), trainer.gradients().arena().0);
    let mut steps = 0;
    loop {
        match trainer.advance(stop) {
            Ok(Advance::Event(Event::Step { .. })) => steps += 1,
            Ok(news) => assert!(!matches!(news, Advance::Done)),
            Err(e) => {
                // The pass that tells is in the plan.
                let now = (trainer.planned_bytes(), trainer.gradients().arena().0);
                assert_eq!((now, trainer.steps()), (planned, 1));
                assert_eq!(e.exit_code(), 3);
                return (trainer, steps, e.to_string());
            }
        }
    }
}

/// No step sees what the last one came to, nor does an evaluation where nothing is held out.
#[test]
fn a_run_whose_last_step_blows_up_fails_and_keeps_nothing() {
    for walks in [None, Some(Walks { window: 64, horizon: 0, host_budget: 0 })] {
        let (mut trainer, steps, why) = blown_up(walks, &());
        assert_eq!(steps, 1);
        let start = "after step 1, of the last window the loss is ";
        assert!(why.starts_with(start) && why.contains(" at `"), "{why}");
        assert!(trainer.last_good(None, true).unwrap().is_none());
        // Wherever it is stopped, it says the same.
        let edges = Edges(AtomicUsize::new(0));
        assert_eq!(blown_up(walks, &edges).2, why);
    }
}

#[test]
fn a_run_that_ends_before_its_time_is_looked_at_too() {
    for held_out in [Vec::new(), examples()] {
        let model = toy("llama");
        let config = TrainConfig {
            targets: train::select_targets(&model, &["all".into()]).unwrap(),
            rank: 2,
            method: Method::Sgd { momentum: 0.0 },
            lr: 1.0,
            alpha: 1e14,
            epochs: 3,
            graph: GraphConfig { rows: 64, ..GraphConfig::default() },
            ..TrainConfig::default()
        };
        let mut trainer = Trainer::new(&model, config).unwrap();
        trainer.load(examples(), held_out).unwrap();
        while !matches!(trainer.advance(&()).unwrap(), Advance::Event(Event::Step { .. })) {}
        let why = trainer.finish().unwrap_err().to_string();
        assert!(why.starts_with("after step 1, of ") && why.contains("the loss is "), "{why}");
    }
}

/// What an update leaves out of range is told by name, at once.
#[test]
fn a_moment_that_is_not_finite_any_more_ends_the_run_by_name() {
    let model = toy("llama");
    let target = "blk.1.attn_q.weight";
    let config = TrainConfig {
        targets: vec![target.into()],
        rank: 2,
        lr: 1e-3,
        alpha: 1e26,
        graph: GraphConfig { rows: 64, ..GraphConfig::default() },
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(&model, config).unwrap();
    trainer.load(examples(), Vec::new()).unwrap();
    let why = loop {
        match trainer.advance(&()) {
            Ok(news) => assert!(matches!(news, Advance::Stopped), "{news:?}"),
            Err(e) => break e.to_string(),
        }
    };
    let said = "step 1: its update leaves a moment of `0:blk.1.attn_q.weight.lora_b` that is not";
    assert!(why.starts_with(said), "{why}");
    assert!(trainer.last_good(None, true).unwrap().is_none());
}
