//! Gradients of experts: those that no row chose get exactly zero and are not read, and the whole
//! router is differentiated.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::borrow::Cow;
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType};
use graph::DType;
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::Random;
use train::{
    Example, Gradients, GraphConfig, Measured, Parameters, TrainConfig, Trainer, Window,
    select_targets,
};

const USED: usize = 3;

fn toy() -> Toy {
    Toy { experts_used: USED, ..Toy::new("qwen3moe", TensorType::F32, 5) }
}

/// Every expert but the first, which the tied rows choose, holds NaN.
fn spoil(values: &mut [f32]) {
    let each = values.len() / toy().experts;
    values[USED * each..].fill(f32::NAN);
}

/// The toy with routers of zeros.
fn tied() -> Model {
    let file = Gguf::from_bytes("toy.gguf", toy().gguf().unwrap()).unwrap();
    let tensors = file.tensors().map(|tensor| {
        let mut values = tensor.to_f32().unwrap();
        match &tensor.info.name {
            name if name.contains("ffn_gate_inp") => values.fill(0.0),
            name if name.contains("_exps.weight") => spoil(&mut values),
            _ => {}
        }
        (tensor.info.clone(), Cow::Owned(bytemuck::cast_slice(&values).to_vec()))
    });
    let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = tensors.collect();
    let bytes = gguf::encode(file.metadata(), tensors).unwrap();
    load(bytes)
}

fn load(bytes: Vec<u8>) -> Model {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    Model::from_gguf(Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn measure(model: &Model, parameters: &Parameters) -> Measured {
    let mut random = Random::new(1);
    let tokens: Vec<u32> = (0..40).map(|_| random.below(320) as u32).collect();
    let example = Example { weights: vec![1.0; tokens.len()], tokens };
    let config = GraphConfig { rows: 64, cache: DType::F32, ..GraphConfig::default() };
    let window = Window::from(vec![example]);
    Gradients::new(model, config).unwrap().of(&window, 39.0, parameters, &()).unwrap()
}

/// The parts of a gradient of experts that were chosen, and of those that were not.
fn parts(grad: &[f32]) -> (&[f32], &[f32]) {
    grad.split_at(grad.len() / toy().experts * USED)
}

fn check(name: &str, grad: &[f32]) {
    let (chosen, others) = parts(grad);
    assert!(chosen.iter().any(|&g| g != 0.0), "{name}: no gradient");
    assert!(others.iter().all(|g| g.to_bits() == 0), "{name}: not exactly zero");
}

#[test]
fn an_expert_without_rows_is_not_read_and_gets_exactly_zero() {
    let model = tied();
    let targets = select_targets(&model, &["experts".into(), "router".into()]).unwrap();
    assert_eq!(targets.len(), 2 * 4);
    let mut adapter =
        Adapter::fresh(&model, targets.iter().map(|t| (t.as_str(), 3)), 6.0, 1).unwrap();
    let mut random = Random::new(2);
    for (target, pair) in &mut adapter.tensors {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
        if target.contains("_exps") {
            spoil(&mut pair.a);
            spoil(&mut pair.b);
        } else {
            // The router stays tied.
            pair.a.fill(0.0);
        }
    }
    let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
    let grads = measure(&model, &parameters).grads;
    assert_eq!(grads.len(), 2 * targets.len());
    for (name, grad) in grads.iter().filter(|(name, _)| name.contains("_exps")) {
        check(name, grad);
    }
    // B of the router sees no rows of a zero A; A does, through the shares of the chosen.
    assert!(grads["0:blk.0.ffn_gate_inp.weight.lora_a"].iter().any(|&g| g != 0.0));
}

#[test]
fn so_it_is_with_the_experts_themselves() {
    let model = tied();
    let names = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp"];
    let names = names.map(|n| format!("blk.1.{n}.weight"));
    let mut parameters = Parameters::default();
    let file = Gguf::from_bytes("toy.gguf", toy().gguf().unwrap()).unwrap();
    for name in &names {
        let mut values = file.require(name).unwrap().to_f32().unwrap();
        if name.contains("_exps") {
            spoil(&mut values);
        } else {
            values.fill(0.0);
        }
        parameters.weights.insert(name.clone(), values);
    }
    let grads = measure(&model, &parameters).grads;
    for name in names.iter().filter(|name| name.contains("_exps")) {
        check(name, &grads[name]);
    }
    // Shares are divided by their sum: a logit that was not chosen moves none of them.
    let router = &grads["blk.1.ffn_gate_inp.weight"];
    let (chosen, others) = parts(router);
    assert!(chosen.iter().any(|&g| g != 0.0));
    let size = |g: &[f32]| g.iter().map(|g| g.abs()).fold(0.0, f32::max);
    assert!(size(others) < 1e-6 * size(chosen), "{} of {}", size(others), size(chosen));
}

/// The one share that is chosen is divided by itself: a router learns nothing from it, whatever the
/// loss. That is known before a run begins, and changes nothing of what is served.
#[test]
fn a_router_that_chooses_one_expert_is_refused_by_name_before_the_run() {
    let toy = Toy { experts_used: 1, ..toy() };
    let model = load(toy.gguf().unwrap());
    let trainer = |targets: &str| {
        let targets = select_targets(&model, &[targets.into()]).unwrap();
        let graph = GraphConfig { rows: 16, ..GraphConfig::default() };
        Trainer::new(&model, TrainConfig { targets, graph, ..TrainConfig::default() }).map(drop)
    };
    trainer("experts").unwrap();
    for targets in ["router", "all"] {
        let why = trainer(targets).unwrap_err().to_string();
        assert_eq!(
            why,
            "TopK at node `blk.0.ffn_moe_topk`, operand 0 (`blk.0.ffn_moe_probs`, f32): the result \
             is indices: they do not change smoothly; nothing else of the loss depends on \
             `blk.0.ffn_gate_inp.weight`: leave it out"
        );
    }
}
