//! The story this engine was made for: a job that meets a router, beside conversations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use std::time::Duration;

use common::*;
use gguf::TensorType;
use graph::Code;
use serve::{Ask, Options, Pacing, State};
use train::select_weights;

#[test]
fn attention_before_the_router_trains_and_quantized_experts_are_refused_by_name() {
    let toy = Fixture::moe(TensorType::Q4K);
    let server = toy.server(Options::default());
    let long = |i| Ask { max_tokens: 80, ..ask(i, 30) };
    let expected: Vec<String> = (0..4).map(|i| answer(server.ask(long(i)).unwrap()).text).collect();
    let turns: Vec<_> = (0..4).map(|i| server.ask(long(i)).unwrap()).collect();
    let mut job = toy.job("attention", Pacing::Share(500_000));
    assert!(job.config.targets.iter().any(|t| t.starts_with("blk.0.")));
    server.train(job.clone()).unwrap();
    let status = wait(&server, State::Done);
    assert!(status.epochs[2].train_loss < status.epochs[0].train_loss, "{:?}", status.epochs);

    job.config.targets = Vec::new();
    job.config.weights = select_weights(&toy.model(), &["all".into()]).unwrap();
    let error = server.train(job.clone()).unwrap_err();
    assert_eq!((error.code, error.status()), (Code::OpNotDifferentiable, 422));
    job.config.weights = select_weights(&toy.model(), &["ffn_gate_exps".into()]).unwrap();
    let refusal = server.train(job).unwrap_err().refusal.unwrap();
    assert_eq!(refusal.op, "MatMulExperts");
    assert!(refusal.operand.unwrap().contains("blk.0.ffn_gate_exps.weight"));
    for (turn, expected) in turns.into_iter().zip(expected) {
        assert_eq!(answer(turn).text, expected);
    }
    server.stop(Duration::ZERO);
}

#[test]
fn every_weight_of_a_float_mixture_trains_into_a_new_file_of_the_model() {
    let toy = Fixture::moe(TensorType::F32);
    // A job reads the values from the model's file.
    let (path, model) = toy.written();
    let server = toy.server_on(model.clone(), Options::default());
    let mut job = toy.job("weights", Pacing::Never);
    job.config.targets = Vec::new();
    job.config.weights = select_weights(&model, &["all".into()]).unwrap();
    job.config.lr = 1e-3;
    let turn = server.ask(ask(1, 30)).unwrap();
    server.train(job.clone()).unwrap();
    let status = wait(&server, State::Done);
    assert!(status.epochs[2].train_loss < status.epochs[0].train_loss, "{:?}", status.epochs);
    assert_eq!((status.adapter, status.model), (None, Some(job.out.display().to_string())));
    assert_eq!(status.weights.len(), model.weights().iter().count());
    assert!(status.weights.iter().all(|w| w.file_type == w.model_type && w.moved > 0));
    let said = answer(turn).text;
    // The model that is served has not moved; the new one says something else.
    assert_eq!(answer(server.ask(ask(1, 30)).unwrap()).text, said);
    server.stop(Duration::ZERO);
    let trained = toy.load(&job.out);
    for (name, _) in model.weights().iter() {
        assert!(model.read_f32(name).unwrap() != trained.read_f32(name).unwrap(), "{name}");
    }
    let server = toy.server_on(trained, Options::default());
    assert_ne!(answer(server.ask(ask(1, 30)).unwrap()).text, said);
    server.stop(Duration::ZERO);
    assert!(path.exists());
}

/// As `gradus train` says it: a job that only a log knows about is told from its status alone.
#[test]
fn what_rounding_would_take_back_is_written_in_f32_and_said() {
    let toy = Fixture::moe(TensorType::BF16);
    let (_, model) = toy.written();
    let server = toy.server_on(model.clone(), Options::default());
    let mut job = toy.job("small", Pacing::Never);
    job.config.targets = Vec::new();
    job.config.weights = select_weights(&model, &["blk.1.".into()]).unwrap();
    job.config.lr = 1e-6;
    server.train(job).unwrap();
    let status = wait(&server, State::Done);
    server.stop(Duration::ZERO);
    let of = |ty: &str| status.weights.iter().filter(|w| w.model_type == ty).collect::<Vec<_>>();
    let rounded = of("BF16");
    assert!(!rounded.is_empty() && of("F32").len() + rounded.len() == status.weights.len());
    for w in rounded {
        assert!(w.file_type == "F32" && 2 * w.kept < w.moved, "{w:?}");
    }
    let json = serde_json::to_value(&status).unwrap();
    let first = &json["weights"][0];
    assert_eq!(
        (&first["type"], &first["name"]),
        (&"F32".into(), &status.weights[0].name.clone().into())
    );
}
