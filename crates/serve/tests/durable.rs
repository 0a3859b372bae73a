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
use serve::{Options, Pacing, Server, State, TakenUp, TrainJob};
use text::{ChatTemplate, SpecialTokens};

fn host(server: &Server) -> Host {
    let mut host = Host::new(server.model().clone(), "base".into(), DType::F16);
    let tokens = SpecialTokens::of(host.model.tokenizer());
    host.template = ChatTemplate::builtin("plain", tokens).map_err(|e| e.to_string());
    host.train_dir = server.options().train_dir.clone();
    host
}

/// A job of so many passes over its data.
fn job(server: &Server, name: &str, epochs: u64) -> TrainJob {
    let examples: Vec<_> =
        (0..6).map(|i| json!({"prompt": format!("{i}?"), "completion": "yes"})).collect();
    let body = json!({
        "out": format!("{name}.gguf"), "examples": examples, "epochs": epochs, "lr": 0.001,
        "val_split": 0, "checkpoint_every": 5, "yield": false,
    });
    request::train(body.to_string().as_bytes(), &host(server), &|| true).unwrap()
}

fn start(server: &Server, name: &str, epochs: u64) {
    server.train(job(server, name, epochs)).unwrap();
}

fn take_up(server: &Server) -> Receiver<TakenUp> {
    let (say, said) = channel();
    serve::take_up(server, &host(server), move |job| say.send(job).unwrap()).unwrap();
    said
}

/// Starts a job and pauses it after a few steps; says how many. One that is through before it hears
/// of that is started again.
fn start_and_pause(server: &Server, name: &str, epochs: u64) -> u64 {
    loop {
        start(server, name, epochs);
        let mut asked = false;
        while server.train_status().is_active() {
            let status = server.train_status();
            if status.paused {
                return status.steps;
            }
            asked = asked || status.steps > 7 && server.pause(name).is_ok();
            std::thread::sleep(Duration::from_millis(2));
        }
        wait(server, State::Done);
    }
}

#[test]
fn a_pause_and_a_job_whose_last_words_are_lost_outlive_the_process() {
    let toy = Fixture::llama();
    const EPOCHS: u64 = 60;
    let server = toy.server(Options::default());
    start(&server, "whole", EPOCHS);
    wait(&server, State::Done);
    let steps = start_and_pause(&server, "k", EPOCHS);
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

/// Hours go into a job: what it learned is kept where it can be, and the same request goes on from
/// what there is.
#[test]
fn a_job_whose_adapter_cannot_be_written_keeps_what_it_learned() {
    let toy = Fixture::llama();
    const EPOCHS: u64 = 60;
    // Of an earlier run of this test.
    let in_the_way = toy.dir().join("k.gguf");
    let _ = std::fs::remove_dir_all(&in_the_way);
    let _ = std::fs::remove_file(&in_the_way);
    let server = toy.server(Options::default());
    start(&server, "whole", EPOCHS);
    wait(&server, State::Done);
    // Where its file would be, something else is before it gets there.
    let asked = job(&server, "k", EPOCHS);
    std::fs::create_dir_all(in_the_way.join("x")).unwrap();
    server.train(asked).unwrap();
    let status = wait(&server, State::Error);
    let (failure, path) = (status.error.unwrap(), status.adapter.unwrap());
    let steps = status.steps_total;
    let last = steps / 5 * 5;
    let said = format!(
        "; the adapter is in {path} instead: move it to the training folder; the same request again \
         goes on from the checkpoint of step {last}"
    );
    assert!(failure.message.contains("k.gguf"), "{failure:?}");
    assert!(failure.message.ends_with(&said), "{failure:?}");
    assert_eq!(failure.code, "file_failed");
    let whole = std::fs::read(toy.dir().join("whole.gguf")).unwrap();
    assert!(std::fs::read(&path).unwrap() == whole);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(server.names().len(), 2, "it is served, beside the model and `whole`");

    // It stays, also where another process is there by then, which does not take it up by itself.
    server.stop(Duration::ZERO);
    std::fs::remove_dir_all(&in_the_way).unwrap();
    let server = toy.server(Options::default());
    assert!(take_up(&server).recv().is_err());
    let began = server.train(job(&server, "k", EPOCHS)).unwrap();
    assert!(began.steps >= last, "{began:?}");
    wait(&server, State::Done);
    assert!(std::fs::read(&in_the_way).unwrap() == whole);
    assert!(!toy.dir().join(".jobs/k").exists());
    server.stop(Duration::ZERO);
}

/// Checkpoints of a job that failed are gone on with in the same words alone.
#[test]
fn another_request_of_a_name_begins_anew() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let folder = toy.dir().join(".jobs/k");
    let _ = std::fs::remove_dir_all(&folder);
    // What another job has made, whose name is like that of what a failure leaves.
    let [finished, kept, more] =
        ["", "-2", "-3"].map(|n| toy.dir().join(format!("k.last-good{n}.gguf")));
    for path in [&kept, &more] {
        let _ = std::fs::remove_file(path);
    }
    std::fs::write(&finished, "made before").unwrap();
    start_and_pause(&server, "k", 100);
    // Nor can its checkpoints be written: it ends there, with what it is at.
    for step in (10..=100).step_by(5) {
        let _ = std::fs::create_dir_all(folder.join(format!("step-{step:08}.safetensors/x")));
    }
    server.resume("k").unwrap();
    let message = wait(&server, State::Error).error.unwrap().message;
    assert!(message.contains("the same request again goes on from the checkpoint of"), "{message}");
    assert!(message.contains("the adapter as it was after step"), "{message}");
    assert!(message.contains(&kept.display().to_string()), "{message}");
    assert!(kept.is_file() && !more.exists());
    assert_eq!(std::fs::read(&finished).unwrap(), b"made before");
    assert!(folder.join("failed.json").is_file());
    server.train(job(&server, "k", 50)).unwrap();
    assert_eq!(wait(&server, State::Done).epochs.len(), 50);
    assert!(!folder.exists());
    server.stop(Duration::ZERO);
}
