//! Jobs that outlive the process: what is kept of them when a server stops, and how the next one
//! takes them up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::*;
use graph::{Code, DType};
use serde_json::json;
use serve::request::{self, Host};
use serve::{Options, Pacing, Server, State, TakenUp};
use text::{ChatTemplate, SpecialTokens};

fn host(server: &Server) -> Host {
    let mut host = Host::new(server.model().clone(), "base".into(), DType::F16);
    let tokens = SpecialTokens::of(host.model.tokenizer());
    host.template = ChatTemplate::builtin("plain", tokens).map_err(|e| e.to_string());
    host.train_dir = server.options().train_dir.clone();
    host
}

/// Starts a job of so many passes over its data.
fn start(server: &Server, name: &str, epochs: u64) {
    let examples: Vec<_> =
        (0..6).map(|i| json!({"prompt": format!("{i}?"), "completion": "yes"})).collect();
    let body = json!({
        "out": format!("{name}.gguf"), "examples": examples, "epochs": epochs, "lr": 0.001,
        "val_split": 0, "checkpoint_every": 5, "yield": false,
    });
    let job = request::train(body.to_string().as_bytes(), &host(server), &|| true).unwrap();
    server.train(job).unwrap();
}

fn take_up(server: &Server) -> Receiver<TakenUp> {
    let (say, said) = channel();
    serve::take_up(server, &host(server), move |job| say.send(job).unwrap()).unwrap();
    said
}

/// Pauses a job that has taken a few steps, and says how many.
fn pause(server: &Server, name: &str) -> u64 {
    let until = |what: &dyn Fn() -> bool| {
        while !what() {
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    until(&|| server.train_status().steps > 7);
    server.pause(name).unwrap();
    until(&|| server.train_status().paused);
    server.train_status().steps
}

#[test]
fn a_pause_and_a_job_whose_last_words_are_lost_outlive_the_process() {
    let toy = Fixture::llama();
    const EPOCHS: u64 = 60;
    let server = toy.server(Options::default());
    start(&server, "whole", EPOCHS);
    wait(&server, State::Done);
    start(&server, "k", EPOCHS);
    let steps = pause(&server, "k");
    // Where its last checkpoint would be, something else is in the way.
    let folder = toy.dir().join(".jobs/k");
    let in_the_way: PathBuf = folder.join(format!("step-{steps:08}.safetensors"));
    let blocked = !in_the_way.exists();
    if blocked {
        std::fs::create_dir_all(in_the_way.join("x")).unwrap();
    }
    server.stop(Duration::ZERO);
    let there = |name: &str| folder.join(name).exists();
    assert!(there("request.json") && !there("failed.json"));
    if blocked {
        let status = server.train_status();
        let failure = status.error.unwrap();
        assert_eq!(status.state, State::Error);
        assert!(failure.message.ends_with("goes on from its last checkpoint"), "{failure:?}");
        std::fs::remove_dir_all(&in_the_way).unwrap();
    }

    let server = toy.server(Options::default());
    let said = take_up(&server);
    // Nobody else gets its place, also while it is read.
    let e = server.train(toy.job("other", Pacing::Never)).unwrap_err();
    assert_eq!(e.code, Code::RunInProgress);
    let from = said.recv().unwrap().outcome.unwrap();
    assert!(from > 0 && from <= steps && (from < steps || !blocked), "{from} of {steps}");
    while !server.train_status().paused {
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(server.train_status().steps, from);
    // Stopped once more, it still holds.
    server.stop(Duration::ZERO);
    assert!(!there("tries"), "no process has ended by it");
    let server = toy.server(Options::default());
    assert_eq!(take_up(&server).recv().unwrap().outcome.unwrap(), from);
    while !server.train_status().paused {
        std::thread::sleep(Duration::from_millis(2));
    }
    server.resume("k").unwrap();
    wait(&server, State::Done);
    let file = |name: &str| std::fs::read(toy.dir().join(name)).unwrap();
    assert!(file("k.gguf") == file("whole.gguf"));
    assert!(!folder.exists());
    server.stop(Duration::ZERO);
}

#[test]
fn a_job_that_cannot_be_read_leaves_its_place_to_others() {
    let toy = Fixture::llama();
    let folder = toy.dir().join(".jobs/odd");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("request.json"), b"{").unwrap();
    let server = toy.server(Options::default());
    for _ in 0..5 {
        let taken = take_up(&server).recv().unwrap();
        assert_eq!((taken.name.as_str(), taken.outcome.unwrap_err().code), {
            ("odd", Code::InvalidInput)
        });
        assert_eq!(server.train_status().state, State::Error);
    }
    assert!(folder.join("request.json").exists());
    server.train(toy.job("next", Pacing::Never)).unwrap();
    wait(&server, State::Done);
    std::fs::remove_dir_all(&folder).unwrap();
    server.stop(Duration::ZERO);
}
