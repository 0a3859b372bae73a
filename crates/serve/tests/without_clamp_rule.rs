//! In a build whose clamp has no gradient rule, as in the library this engine was made to replace:
//! the job is refused by name, and the conversations go on.
//!
//! `cargo test --release -p gradus-serve --features test-without-clamp-rule --test
//! without_clamp_rule`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use std::time::Duration;

use common::*;
use gguf::TensorType;
use graph::Code;
use serve::{Ask, Options, Pacing};

#[test]
fn a_job_that_meets_the_router_is_refused_naming_the_first_layers_clamp() {
    let toy = Fixture::moe(TensorType::Q4K);
    let server = toy.server(Options::default());
    let long = |i| Ask { max_tokens: 80, ..ask(i, 30) };
    let expected: Vec<String> = (0..4).map(|i| answer(server.ask(long(i)).unwrap()).text).collect();
    let turns: Vec<_> = (0..4).map(|i| server.ask(long(i)).unwrap()).collect();
    let error = server.train(toy.job("attention", Pacing::Share(500_000))).unwrap_err();
    assert_eq!((error.code, error.status()), (Code::OpNotDifferentiable, 422));
    let refusal = error.refusal.unwrap();
    assert_eq!(refusal.op, "Clamp");
    assert!(refusal.node.starts_with("blk.0."), "{refusal}");
    for (turn, expected) in turns.into_iter().zip(expected) {
        assert_eq!(answer(turn).text, expected);
    }
    server.stop(Duration::ZERO);
}
