//! Runs of every kind of model begin, on graphs of their own, and learn.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use graph::{DType, Device};
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::{Random, relative_l2};
use train::{
    Event, Example, Gradients, GraphConfig, Optimizer, Outcome, Parameters, Start, TrainConfig,
    Trainer, Window, select_targets, select_weights,
};

/// A toy in a file, from which a run reads the tensors that it trains.
fn toy(name: &str, arch: &str, ty: TensorType, device: Arc<dyn Device>) -> Model {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = folder.join(format!("starts-{name}-{arch}.gguf"));
    Toy::new(arch, ty, 3).write(&path).unwrap();
    Model::load(&path, device).unwrap()
}

fn cpu() -> Arc<dyn Device> {
    Arc::new(cpu::Cpu::new(2, None).unwrap())
}

fn example(seed: u64, n: usize) -> Example {
    let mut random = Random::new(seed);
    let tokens = (0..n).map(|_| random.below(320) as u32).collect();
    Example { tokens, weights: (0..n).map(|i| f32::from(3 * i >= n)).collect() }
}

/// Some steps over the same examples; every target has moved then, and the loss has fallen.
fn learn(model: &Model, config: TrainConfig) -> Outcome {
    let config = TrainConfig { rank: 4, lr: 3e-3, epochs: 4, ..config };
    let targets = config.targets.len() + config.weights.len();
    let mut losses = Vec::new();
    let examples = [example(1, 30), example(2, 55)];
    let outcome = Trainer::new(model, config).unwrap().run(&examples, &mut |event| {
        if let Event::Step { loss, .. } = event {
            losses.push(loss);
        }
        true
    });
    let outcome = outcome.unwrap();
    assert_eq!(outcome.moved, (targets, targets));
    assert!(losses.len() >= 4 && losses.last() < losses.first(), "{losses:?}");
    outcome
}

/// FIELD-REPORTS F01: training took the graph that serves, whose writes into a cache have no
/// gradient. Ours has no cache to write to, whatever the dtype that keys and values pass through.
#[test]
fn f01_every_architecture_trains_through_flash_attention_and_quantized_caches() {
    for arch in ["llama", "qwen2", "qwen3", "gemma3", "qwen3moe", "qwen35", "qwen35moe"] {
        let model = toy("f01", arch, TensorType::Q4_0, cpu());
        for cache in [DType::F16, DType::Block(TensorType::Q8_0)] {
            let targets = select_targets(&model, &["all".into()]).unwrap();
            let graph = GraphConfig { rows: 64, cache, ..GraphConfig::default() };
            learn(&model, TrainConfig { targets, graph, ..TrainConfig::default() });
        }
    }
}

/// FIELD-REPORTS F02: so it was where the embedding is the head too. Adapters train, and so does
/// the tensor itself, whose gradient is that of both its uses.
#[test]
fn f02_models_with_tied_embeddings_train() {
    for arch in ["llama", "qwen2", "gemma3"] {
        let model = toy("f02", arch, TensorType::F32, cpu());
        assert!(model.weights().get("output.weight").is_none(), "{arch} is not tied");
        let graph = GraphConfig { rows: 64, ..GraphConfig::default() };
        let targets = select_targets(&model, &["all".into()]).unwrap();
        learn(&model, TrainConfig { targets, graph: graph.clone(), ..TrainConfig::default() });
        let weights = select_weights(&model, &["token_embd".into()]).unwrap();
        let outcome = learn(&model, TrainConfig { weights, graph, ..TrainConfig::default() });
        let (before, after) =
            (model.read_f32("token_embd.weight").unwrap(), &outcome.weights["token_embd.weight"]);
        // A token that was never read is a choice of the head alone.
        let unread: Vec<usize> = (0..320)
            .filter(|&t| {
                [(1, 30), (2, 55)].iter().all(|&(s, n)| !example(s, n).tokens.contains(&(t as u32)))
            })
            .collect();
        let width = after.len() / 320;
        let row = |t: usize| t * width..(t + 1) * width;
        assert!(unread.len() > 100 && unread.iter().all(|&t| before[row(t)] != after[row(t)]));
    }
}

/// FIELD-REPORTS F25: targets that matched nothing were left out without a word.
#[test]
fn f25_a_target_that_matches_nothing_is_refused_with_the_candidates() {
    for (arch, kinds) in [("llama", "ffn"), ("qwen35moe", "experts, router")] {
        let model = toy("f25", arch, TensorType::Q4_0, cpu());
        // Also beside one that matches.
        for patterns in [&["attn", "k_prj"][..], &["k_prj"]] {
            let patterns: Vec<String> = patterns.iter().map(|p| p.to_string()).collect();
            let e = select_targets(&model, &patterns).unwrap_err();
            assert_eq!(e.exit_code(), 1);
            let e = e.to_string();
            assert!(e.starts_with("target `k_prj` is no projection; candidates: "), "{e}");
            for part in ["all-linear", "attn", kinds, "attn_q", "attn_output"] {
                assert!(e.contains(part), "{e}");
            }
        }
    }
    let model = toy("f25", "llama", TensorType::Q4_0, cpu());
    let experts = select_targets(&model, &["experts".into()]).unwrap_err().to_string();
    assert!(experts.starts_with("target `experts` is no projection"), "{experts}");
    let e = select_weights(&model, &["norms".into()]).unwrap_err().to_string();
    assert!(e.starts_with("`norms` is part of no tensor's name"), "{e}");
    // What does match is counted in the plan.
    let targets = select_targets(&model, &["attn_q".into()]).unwrap();
    let graph = GraphConfig { rows: 64, ..GraphConfig::default() };
    let config = TrainConfig { targets, rank: 4, graph, ..TrainConfig::default() };
    let mut trainer = Trainer::new(&model, config).unwrap();
    let start = trainer.load(vec![example(1, 30)], Vec::new()).unwrap();
    // Two layers, A and B, 256 wide.
    assert!(matches!(start, Event::Start { parameters: 4096, .. }), "{start:?}");
}

/// FIELD-REPORTS F29: gradients of adapters were NaN, or zero, unless the embedding was asked for
/// too. What else is asked for changes no bit of them, and they are those of another device by
/// their numbers.
#[test]
fn f29_gradients_do_not_depend_on_what_else_is_asked_for() {
    for arch in ["llama", "gemma3", "qwen3moe", "qwen35moe"] {
        let gradients = |device: Arc<dyn Device>, beside: &[&str]| {
            let model = toy("f29", arch, TensorType::F32, device);
            let targets = select_targets(&model, &["attn_v".into(), "ffn".into()]).unwrap();
            let targets = targets.iter().map(|t| (t.as_str(), 4));
            let mut adapter = Adapter::fresh(&model, targets, 8.0, 1).unwrap();
            let mut random = Random::new(1);
            for pair in adapter.tensors.values_mut() {
                pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
            }
            let weights = beside.iter().map(|&n| (n.to_string(), model.read_f32(n).unwrap()));
            let parameters = Parameters { adapter: Some(adapter), weights: weights.collect() };
            let graph = GraphConfig { rows: 64, cache: DType::F32, ..GraphConfig::default() };
            let window = Window::from(vec![example(1, 20), example(2, 37)]);
            let measured = Gradients::new(&model, graph).unwrap();
            let measured = { measured }.of(&window, 50.0, &parameters, &()).unwrap();
            let pairs = measured.grads.into_iter().filter(|(name, _)| name.starts_with("0:"));
            (measured.loss, pairs.collect::<BTreeMap<_, _>>())
        };
        let (loss, alone) = gradients(cpu(), &[]);
        for beside in
            [&["blk.0.attn_norm.weight"][..], &["token_embd.weight", "output_norm.weight"]]
        {
            let (other_loss, tracked) = gradients(cpu(), beside);
            assert_eq!(loss.to_bits(), other_loss.to_bits(), "{arch}, beside {beside:?}");
            assert!(alone == tracked, "{arch}, beside {beside:?}");
        }
        let (_, true_ones) = gradients(Arc::new(reference::Reference), &[]);
        assert_eq!(alone.len(), true_ones.len());
        for (name, grad) in &alone {
            let expected: Vec<f64> = true_ones[name].iter().map(|&g| f64::from(g)).collect();
            assert!(expected.iter().any(|g| *g != 0.0), "{arch}, {name}");
            let error = relative_l2(grad, &expected);
            assert!(error < 2e-5, "{arch}, {name}: {error:e}");
        }
    }
}

/// Settings that do not fit are planned again from the same adapter, which is there once.
#[test]
fn a_run_that_is_only_planned_gives_back_what_it_started_from() {
    let model = toy("planned", "llama", TensorType::Q8_0, cpu());
    let targets = select_targets(&model, &["attn_q".into()]).unwrap();
    let ranks = targets.iter().map(|target| (target.as_str(), 2));
    let adapter = Adapter::fresh(&model, ranks, 4.0, 1).unwrap();
    let config = TrainConfig { targets, rank: 2, alpha: 4.0, ..TrainConfig::default() };
    let values =
        |adapter: &Adapter| adapter.tensors.values().map(|p| p.a.as_ptr()).collect::<Vec<_>>();
    let (at, same) = (values(&adapter), adapter.clone());
    let optimizer = Optimizer::new(config.method, config.weight_decay);
    let start = Start { from: Some((adapter, optimizer.clone())), fallback: None };
    let mut trainer = Trainer::start(&model, config.clone(), start).unwrap();
    trainer.load(vec![example(1, 30)], Vec::new()).unwrap();
    let (adapter, kept) = trainer.into_start().from.unwrap();
    assert!(values(&adapter) == at && adapter == same && kept == optimizer);
    assert!(Trainer::new(&model, config).unwrap().into_start().from.is_none());
}
