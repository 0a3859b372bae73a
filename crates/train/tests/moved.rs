//! FIELD-REPORTS F17: adapters of which parts never moved, while the loss still fell. After a job
//! every target has moved, or the job fails and names it; an expert that no token was routed to is
//! exempt, and listed.
//!
//! What is dead here is so for a reason in the model: zeros of the tensor that reads a target's
//! result let no gradient through to it.
#![allow(clippy::unwrap_used)] // helpers of tests may panic

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType};
use graph::{Code, DType};
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::Random;
use train::{
    Advance, Error, Example, GraphConfig, Method, Optimizer, Outcome, Start, TrainConfig, Trainer,
    Walks, select_targets,
};

/// A toy some of whose tensors are changed, in a file of this name, from which a run reads the
/// tensors that it trains.
fn toy(name: &str, arch: &str, change: impl Fn(&str, &mut [f32])) -> Model {
    let file = Toy::new(arch, TensorType::F32, 5).gguf().unwrap();
    let file = Gguf::from_bytes("toy.gguf", file).unwrap();
    let tensors = file.tensors().map(|tensor| {
        let mut values = tensor.to_f32().unwrap();
        change(&tensor.info.name, &mut values);
        (tensor.info.clone(), Cow::Owned(bytemuck::cast_slice(&values).to_vec()))
    });
    let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = tensors.collect();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("moved-{name}.gguf"));
    std::fs::write(&path, gguf::encode(file.metadata(), tensors).unwrap()).unwrap();
    Model::load(&path, Arc::new(cpu::Cpu::new(2, None).unwrap())).unwrap()
}

/// Nothing of the first layer's attention reaches the loss.
fn without_attention(name: &str) -> Model {
    toy(name, "llama", |name, values| {
        if name == "blk.0.attn_output.weight" {
            values.fill(0.0);
        }
    })
}

/// The same of one expert of the second layer.
fn without_expert(expert: usize) -> Model {
    toy("expert", "qwen3moe", |name, values| {
        if name == "blk.1.ffn_down_exps.weight" {
            let each = values.len() / 8;
            values.chunks_mut(each).nth(expert).unwrap().fill(0.0);
        }
    })
}

fn examples(loss: impl Fn(usize) -> bool) -> Vec<Example> {
    let mut random = Random::new(5);
    let example = |n: usize| Example {
        tokens: (0..n).map(|_| random.below(320) as u32).collect(),
        weights: (0..n).map(|i| f32::from(loss(n - 1 - i))).collect(),
    };
    [40, 31, 48].map(example).into()
}

/// Three steps of whatever is trained.
fn config() -> TrainConfig {
    TrainConfig {
        rank: 4,
        epochs: 3,
        accumulate: 3,
        graph: GraphConfig { rows: 64, cache: DType::F32, ..GraphConfig::default() },
        ..TrainConfig::default()
    }
}

fn of(model: &Model, targets: &str) -> TrainConfig {
    TrainConfig { targets: select_targets(model, &[targets.into()]).unwrap(), ..config() }
}

fn run(model: &Model, config: TrainConfig, examples: &[Example]) -> Result<Outcome, Error> {
    Trainer::new(model, config).unwrap().run(examples, &mut |_| true)
}

/// That a run failed, and of which targets.
fn check_dead(outcome: Result<Outcome, Error>, dead: &str, of: &str) {
    let error = outcome.err().unwrap();
    assert!(matches!(error, Error::DeadAdapters(_)), "{error:?}");
    assert_eq!(error.exit_code(), Code::DeadAdapters.exit_code());
    let text = error.to_string();
    assert!(text.starts_with(&format!("after 3 steps {of} targets have not moved")), "{text}");
    let named = text.split_once("reached ").unwrap().1.split_once(": leave").unwrap().0;
    assert_eq!(named, dead);
}

#[test]
fn f17_a_dead_target_ends_the_job_by_name() {
    let model = without_attention("dead");
    for method in [Method::default(), Method::Sgd { momentum: 0.0 }] {
        let config = TrainConfig { method, ..of(&model, "attn_v") };
        check_dead(run(&model, config, &examples(|_| true)), "blk.0.attn_v.weight", "1 of 2");
    }
    // With the output's own adapter on top, which moves away from zero, all of it learns.
    let outcome = run(&model, of(&model, "attn"), &examples(|_| true)).unwrap();
    assert_eq!((outcome.moved, outcome.unrouted.len()), ((8, 8), 0));
}

/// What decay does to values is no movement: of a tensor of the model, and of an adapter that a run
/// goes on from.
#[test]
fn f17_weight_decay_moves_nothing() {
    let model = without_attention("decayed");
    let target = "blk.0.attn_v.weight".to_string();
    let own = TrainConfig { weights: vec![target.clone()], weight_decay: 0.5, ..config() };
    let pair = TrainConfig { targets: vec![target.clone()], weights: vec![], ..own.clone() };
    let mut adapter = Adapter::fresh(&model, [(&*target, 4)], 8.0, 1).unwrap();
    adapter.tensors.get_mut(&target).unwrap().b.fill(0.01);
    for config in [own, pair] {
        let optimizer = Optimizer::new(config.method, config.weight_decay);
        let from = config.weights.is_empty().then(|| (adapter.clone(), optimizer));
        let start = Start { from, ..Start::default() };
        let mut trainer = Trainer::start(&model, config, start).unwrap();
        let before = trainer.parameters().unwrap().clone();
        trainer.load(examples(|_| true), Vec::new()).unwrap();
        while trainer.advance(&()).unwrap() != Advance::Done {}
        assert!(before != *trainer.parameters().unwrap(), "decay changes values");
        check_dead(trainer.finish(), &target, "1 of 1");
    }
}

#[test]
fn f17_a_dead_expert_that_tokens_chose_ends_the_job_by_name() {
    let all = examples(|_| true);
    let whole = toy("whole", "qwen3moe", |_, _| {});
    let outcome = run(&whole, of(&whole, "ffn_up_exps"), &all).unwrap();
    assert_eq!((outcome.moved, outcome.unrouted.len()), ((2, 2), 0), "every expert is chosen");
    let model = without_expert(3);
    let dead = "blk.1.ffn_up_exps.weight[3]";
    check_dead(run(&model, of(&model, "ffn_up_exps"), &all), dead, "1 of 2");
    // The stack itself, which decay changes.
    let weights = vec!["blk.1.ffn_up_exps.weight".to_string()];
    let own = TrainConfig { weights, weight_decay: 0.5, ..config() };
    check_dead(run(&model, own, &all), dead, "1 of 1");
    // In chunks.
    let mut chunks = of(&model, "ffn_up_exps");
    chunks.graph.rows = 16;
    chunks.walks = Some(Walks { window: 64, horizon: 0, host_budget: 0 });
    check_dead(run(&model, chunks, &all), dead, "1 of 2");
}

/// Routers of zeros choose the first two experts for every token.
#[test]
fn f17_an_expert_that_no_token_chose_is_exempt_and_listed() {
    let model = toy("unrouted", "qwen3moe", |name, values| {
        if name.contains("ffn_gate_inp") {
            values.fill(0.0);
        }
    });
    let outcome = run(&model, of(&model, "experts"), &examples(|_| true)).unwrap();
    assert_eq!(outcome.moved, (6, 6));
    let mut expected = Vec::new();
    for (layer, part) in [0, 1].into_iter().flat_map(|l| ["down", "gate", "up"].map(|p| (l, p))) {
        let of = |expert| format!("blk.{layer}.ffn_{part}_exps.weight[{expert}]");
        expected.extend((2..8).map(of));
    }
    assert_eq!(outcome.unrouted, expected);
}

/// In the last layer nothing of tokens without loss reaches the loss: experts that only those chose
/// have no gradient for a good reason.
#[test]
fn f17_an_expert_that_only_tokens_without_loss_chose_is_exempt_and_listed() {
    let model = toy("quiet", "qwen3moe", |_, _| {});
    let target = "blk.1.ffn_up_exps.weight";
    let config = TrainConfig { targets: vec![target.into()], ..config() };
    // Three tokens with loss choose two of eight experts each.
    let outcome = run(&model, config, &examples(|from_the_end| from_the_end == 0)).unwrap();
    assert_eq!(outcome.moved, (1, 1));
    assert!((2..=6).contains(&outcome.unrouted.len()), "{:?}", outcome.unrouted);
    assert!(outcome.unrouted.iter().all(|name| name.starts_with(target)));
}

/// What has moved is judged at a run's end: in the warm-up it is too early.
#[test]
fn a_run_that_is_ended_early_is_not_judged() {
    let model = without_attention("early");
    let config = || of(&model, "attn_v");
    check_dead(run(&model, config(), &examples(|_| true)), "blk.0.attn_v.weight", "1 of 2");
    let stopped = Trainer::new(&model, config())
        .unwrap()
        .run(&examples(|_| true), &mut |event| !matches!(event, train::Event::Step { step: 2, .. }))
        .unwrap();
    assert_eq!((stopped.steps, stopped.moved), (2, (1, 2)));
}
