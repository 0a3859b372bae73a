//! Jobs: what they are refused for, how they are controlled, and what they leave behind.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;
#[path = "common/odd.rs"]
mod odd;

use std::sync::Arc;
use std::time::Duration;

use common::*;
use graph::{Code, Policy};
use odd::Odd;
use serve::{Ask, LearnJob, Options, Pacing, Server, State, TrainJob};
use train::{Example, Method, TrainConfig};

fn broken() -> (Fixture, Arc<Odd>, Server) {
    let (toy, device) = (Fixture::llama(), Odd::new());
    let server = toy.server_on(toy.model_on(device.clone()), Options::default());
    (toy, device, server)
}

#[test]
fn a_missing_kernel_is_refused_and_named_and_falls_back_where_it_may() {
    let (toy, device, server) = broken();
    *device.lacks.lock().unwrap() = "SwigluBack";
    let error = server.train(toy.job("lacking", Pacing::Never)).unwrap_err();
    assert_eq!((error.code, error.status()), (Code::NoKernel, 422));
    let refusal = error.refusal.unwrap();
    assert_eq!(
        (refusal.op.as_str(), refusal.device.as_deref()),
        ("SwigluBack", Some("odd (test)"))
    );
    let status = server.train_status();
    let failure = status.error.unwrap();
    assert_eq!((status.state, failure.code), (State::Error, "no_kernel"));
    assert_eq!(failure.node.as_deref(), Some(refusal.node.as_str()));
    // With the processor to fall back on it trains what it would have.
    let mut job = toy.job("fallen", Pacing::Never);
    job.fallback = Some(Arc::new(cpu::Cpu::new(1, None).unwrap()));
    server.train(job.clone()).unwrap();
    wait(&server, State::Done);
    let fallen = std::fs::read(&job.out).unwrap();
    job.config.graph.placement = Policy::Strict;
    assert_eq!(server.train(job).unwrap_err().code, Code::NoKernel);
    *device.lacks.lock().unwrap() = "";
    let job = toy.job("whole", Pacing::Never);
    server.train(job.clone()).unwrap();
    wait(&server, State::Done);
    assert!(std::fs::read(&job.out).unwrap() == fallen);
    server.stop(Duration::ZERO);
}

#[test]
fn faults_and_panics_end_their_job_alone() {
    let (toy, device, server) = broken();
    let job = |name: &str| toy.job(name, Pacing::Share(500_000));
    server.train(job("before")).unwrap();
    wait(&server, State::Done);
    let file = std::fs::read(job("before").out).unwrap();
    let said = answer(server.ask(ask(1, 30)).unwrap()).text;
    for (which, code) in [(&device.faults, "internal"), (&device.panics, "internal")] {
        let turn = server.ask(Ask { max_tokens: 150, ..ask(1, 30) }).unwrap();
        *which.lock().unwrap() = "SwigluBack";
        server.train(job("broken")).unwrap();
        let status = wait(&server, State::Error);
        *which.lock().unwrap() = "";
        let failure = status.error.unwrap();
        assert_eq!(failure.code, code);
        assert!(!failure.message.contains('\n'));
        assert!(!job("broken").out.exists());
        assert!(answer(turn).text.starts_with(&said));
        // The next job is as if nothing had been.
        server.train(job("before")).unwrap();
        wait(&server, State::Done);
        assert!(std::fs::read(job("before").out).unwrap() == file);
    }
    assert_eq!(metric(&server, "gradus_panics_total"), 1.0);
    server.stop(Duration::ZERO);
}

#[test]
fn a_fault_in_a_batch_fails_its_culprit_alone() {
    let (toy, device, server) = broken();
    server.load_adapter("a", &toy.adapter_file("a")).unwrap();
    let expected = answer(server.ask(ask(3, 30)).unwrap()).text;
    let turns: Vec<_> = (0..4)
        .map(|i| {
            let model = if i == 2 { "a" } else { "base" };
            server.ask(Ask { model: model.into(), max_tokens: 150, ..ask(3, 30) }).unwrap()
        })
        .collect();
    // Only rows with an adapter need it.
    *device.faults.lock().unwrap() = "Lora";
    for (i, mut turn) in turns.into_iter().enumerate() {
        let (mut text, mut failed) = (String::new(), false);
        while let Some(said) = turn.blocking_next() {
            match said {
                serve::Said::Text(piece) => text.push_str(&piece),
                serve::Said::Done(_) => {}
                serve::Said::Failed(e) => {
                    assert_eq!(e.code, Code::Internal);
                    failed = true;
                }
            }
        }
        assert_eq!(failed, i == 2);
        assert!(i == 2 || text.starts_with(&expected));
    }
    *device.faults.lock().unwrap() = "";
    let again = Ask { model: "a".into(), ..ask(3, 30) };
    assert_ne!(answer(server.ask(again).unwrap()).text, expected);
    server.stop(Duration::ZERO);
}

#[test]
fn what_cannot_be_trained_is_refused_by_name() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let with = |change: &dyn Fn(&mut TrainJob)| {
        let mut job = toy.job("bad", Pacing::Never);
        change(&mut job);
        server.train(job).unwrap_err()
    };
    type Bad<'b> = (&'b str, Code, &'b str, &'b dyn Fn(&mut TrainJob));
    let cases: [Bad<'_>; 9] = [
        ("rank 0", Code::InvalidInput, "is 0, expected 1 to 4096", &|j| j.config.rank = 0),
        ("rank 10^9", Code::InvalidInput, "1 to 4096", &|j| j.config.rank = 1_000_000_000),
        ("lr", Code::InvalidInput, "`lr`", &|j| j.config.lr = f32::NAN),
        ("target", Code::InvalidInput, "blk.0.attn_x", &|j| {
            j.config.targets = vec!["blk.0.attn_x.weight".into()];
        }),
        ("window", Code::InvalidInput, "window", &|j| j.config.graph.rows = 1 << 40),
        ("memory", Code::OverBudget, "no window", &|j| j.memory_budget = Some(1 << 20)),
        ("no data", Code::BadData, "no examples", &|j| j.examples = Arc::new([])),
        ("too long", Code::BadData, "larger window", &|j| {
            j.examples = [Example { tokens: vec![1; 400], weights: vec![1.0; 400] }].into();
        }),
        ("outside", Code::BadData, "outside of the vocabulary", &|j| {
            j.examples = [Example { tokens: vec![1 << 20; 9], weights: vec![1.0; 9] }].into();
        }),
    ];
    for (what, code, word, change) in cases {
        let error = with(change);
        assert_eq!(error.code, code, "{what}: {error}");
        assert!(error.message.contains(word), "{what}: {error}");
        assert_eq!(server.train_status().state, State::Error);
    }
    assert_eq!(server.names().len(), 1);
    server.stop(Duration::ZERO);
}

fn endless(toy: &Fixture, name: &str) -> TrainJob {
    let mut job = toy.job(name, Pacing::Share(500_000));
    job.config.epochs = 10_000;
    job
}

#[test]
fn a_run_is_paused_resumed_and_cancelled() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    assert_eq!(server.train_status().state, State::Idle);
    assert_eq!(server.cancel().unwrap_err().code, Code::NotRunning);
    server.train(endless(&toy, "endless")).unwrap();
    let second = server.train(endless(&toy, "second")).unwrap_err();
    assert_eq!((second.code, second.status()), (Code::RunInProgress, 409));
    assert_eq!(server.pause("other.gguf").unwrap_err().code, Code::NotRunning);
    let until = |what: &dyn Fn(&serve::TrainStatus) -> bool| {
        let began = std::time::Instant::now();
        while !what(&server.train_status()) {
            assert!(began.elapsed() < Duration::from_secs(20), "{:?}", server.train_status());
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    until(&|s| s.steps > 2);
    server.pause("endless.gguf").unwrap();
    until(&|s| s.paused);
    let steps = server.train_status().steps;
    std::thread::sleep(Duration::from_millis(100));
    assert!(server.train_status().steps <= steps + 1, "it goes on while it is paused");
    answer(server.ask(ask(1, 20)).unwrap());
    server.resume("endless").unwrap();
    until(&|s| !s.paused && s.steps > steps + 2);
    server.pause("endless").unwrap();
    until(&|s| s.paused);
    // A paused run can be cancelled, and leaves nothing.
    server.cancel().unwrap();
    let status = wait(&server, State::Cancelled);
    assert!(status.cancel_requested && !status.paused);
    assert!(!endless(&toy, "endless").out.exists());
    assert_eq!(server.names().len(), 1);
    server.train(toy.job("next", Pacing::Never)).unwrap();
    wait(&server, State::Done);
    assert_eq!(server.names()[1].name, "next");
    // Stopping the server ends what runs.
    server.train(endless(&toy, "endless")).unwrap();
    server.stop(Duration::from_secs(1));
    wait(&server, State::Cancelled);
}

fn learn(toy: &Fixture, alias: &str) -> LearnJob {
    LearnJob {
        alias: alias.into(),
        config: toy.config(),
        asked: Vec::new(),
        examples: examples(9).into(),
        pacing: Pacing::Never,
        memory_budget: None,
        may_recompute: false,
    }
}

#[test]
fn what_is_learned_is_served_when_it_is_promoted_and_not_before() {
    for toy in [Fixture::llama(), Fixture::hybrid()] {
        let server = toy.server(Options::default());
        let asked = |model: &str| Ask { model: model.into(), ..ask(6, 30) };
        let say = |model: &str| answer(server.ask(asked(model)).unwrap()).text;
        let base = say("base");
        assert_eq!(server.promote("new").unwrap_err().code, Code::UnknownModel);
        let first = server.learn(learn(&toy, "new")).unwrap();
        assert_eq!(
            (first.steps, first.total_steps, first.served_generation),
            (first.steps, first.steps, 0)
        );
        assert!(first.steps > 0 && first.loss_after < first.loss_before, "{first:?}");
        // Not served yet, under any name.
        assert_eq!(server.ask(asked("new")).unwrap_err().code, Code::UnknownModel);
        assert_eq!(server.promote("new").unwrap(), 1);
        assert_eq!(server.promote("new").unwrap_err().code, Code::AdapterState);
        let one = say("new");
        // The second call goes on where the first ended, its moments included.
        let second = server.learn(learn(&toy, "new")).unwrap();
        assert_eq!((second.total_steps, second.served_generation), (2 * first.steps, 1));
        assert_eq!(second.loss_before, first.loss_after);
        assert!(second.loss_after < first.loss_after);
        assert_eq!(say("new"), one, "the served generation moved");
        server.discard("new").unwrap();
        assert_eq!(server.discard("new").unwrap_err().code, Code::AdapterState);
        // From what was promoted again, so it comes out the same.
        let again = server.learn(learn(&toy, "new")).unwrap();
        assert_eq!(again, second);
        assert_eq!(server.promote("new").unwrap(), 2);
        assert_eq!(say("base"), base);
        assert_eq!(server.names()[1].generation, 2);
        // A bad call leaves the shadow as it is.
        let bad =
            LearnJob { config: TrainConfig { lr: -1.0, ..toy.config() }, ..learn(&toy, "new") };
        assert_eq!(server.learn(bad).unwrap_err().code, Code::InvalidInput);
        let third = server.learn(learn(&toy, "new")).unwrap();
        assert_eq!(third.loss_before, second.loss_after);
        server.stop(Duration::ZERO);
    }
}

/// What was promoted is gone on from while it is served, and no longer.
#[test]
fn learning_goes_on_from_what_is_served() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let file = toy.adapter_file("a");
    server.load_adapter("loaded", &file).unwrap();
    let expected = server.learn(learn(&toy, "loaded")).unwrap();
    server.learn(learn(&toy, "new")).unwrap();
    server.promote("new").unwrap();
    server.load_adapter("new", &file).unwrap();
    let learned = server.learn(learn(&toy, "new")).unwrap();
    assert_eq!((learned.loss_before, learned.loss_after), {
        (expected.loss_before, expected.loss_after)
    });
    assert_eq!((learned.total_steps, learned.served_generation), (learned.steps, 2));
    // A job that writes the alias's file is as good as a load.
    server.discard("new").unwrap();
    server.train(toy.job("new", Pacing::Never)).unwrap();
    wait(&server, State::Done);
    let after_job = server.learn(learn(&toy, "new")).unwrap();
    assert_eq!((after_job.total_steps, after_job.served_generation), (after_job.steps, 3));
    assert_ne!(after_job.loss_before, learned.loss_before);
    server.stop(Duration::ZERO);
}

/// What an adapter and its optimizer keep cannot be set anew, and is not passed over.
#[test]
fn settings_that_an_alias_keeps_are_refused_where_they_differ() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let sgd = Method::Sgd { momentum: 0.5 };
    let config = TrainConfig { method: sgd, weight_decay: 0.25, ..toy.config() };
    let with = |config: &TrainConfig, asked: &[&'static str]| LearnJob {
        config: config.clone(),
        asked: asked.to_vec(),
        ..learn(&toy, "new")
    };
    server.load_adapter("new", &toy.adapter_file("a")).unwrap();
    // A loaded adapter has no optimizer yet: it gets the one that is asked for.
    let first = server.learn(with(&config, &["optimizer", "weight_decay", "rank"])).unwrap();
    let adam = TrainConfig { method: Method::default(), ..config.clone() };
    let momentum = TrainConfig { method: Method::Sgd { momentum: 0.9 }, ..config.clone() };
    let decay = TrainConfig { weight_decay: 0.0, ..config.clone() };
    let rank = TrainConfig { rank: 5, ..config.clone() };
    let alpha = TrainConfig { alpha: 9.0, ..config.clone() };
    let layer = TrainConfig { targets: vec!["blk.0.attn_q.weight".into()], ..config.clone() };
    for (other, asked, field) in [
        (&adam, &["optimizer"][..], "optimizer"),
        (&momentum, &["optimizer", "momentum"], "momentum"),
        (&decay, &["weight_decay"], "weight_decay"),
        (&rank, &["rank"], "rank"),
        (&alpha, &["alpha"], "alpha"),
        (&layer, &["targets"], "targets"),
    ] {
        let e = server.learn(with(other, asked)).unwrap_err();
        assert_eq!((e.code, e.field.as_deref()), (Code::InvalidInput, Some(field)), "{e}");
        assert!(e.message.contains("which it keeps"), "{e}");
    }
    // What is not asked for is what is kept.
    let second = server.learn(with(&adam, &[])).unwrap();
    let again = server.learn(with(&momentum, &["optimizer", "weight_decay", "rank"])).unwrap();
    assert_eq!((second.loss_before, again.loss_before), (first.loss_after, second.loss_after));
    assert_eq!(again.total_steps, 3 * first.steps);
    // It is SGD that moved it: AdamW would have come out elsewhere.
    server.load_adapter("other", &toy.adapter_file("a")).unwrap();
    let other = server.learn(LearnJob { alias: "other".into(), ..with(&adam, &[]) }).unwrap();
    assert_eq!(other.loss_before, first.loss_before);
    assert_ne!(other.loss_after, first.loss_after);
    server.stop(Duration::ZERO);
}

#[test]
fn what_is_said_of_a_shadow_is_of_the_one_that_is_kept() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    // It gets worse before long, and ends there.
    let config = TrainConfig { patience: Some(1), lr: 1.0, epochs: 60, ..toy.config() };
    let of = |config: TrainConfig| LearnJob { config, ..learn(&toy, "new") };
    let first = server.learn(of(config)).unwrap();
    assert!(first.total_steps < first.steps, "the last step was the best: {first:?}");
    assert_eq!(server.names()[1].shadow_steps, Some(first.total_steps));
    let second = server.learn(of(TrainConfig { lr: 1e-6, ..toy.config() })).unwrap();
    assert_eq!(second.loss_before, first.loss_after);
    assert_eq!(second.total_steps, first.total_steps + second.steps);
    server.stop(Duration::ZERO);
}

/// The data are memory too.
#[test]
fn data_are_in_the_plan() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    let job = toy.job("planned", Pacing::Never);
    let numbers = |job: &TrainJob| job.examples.iter().map(|e| e.tokens.len()).sum::<usize>();
    let numbers_of_job = numbers(&job);
    let plan = server.plan(job).unwrap();
    assert!(plan.data_bytes >= 8 * numbers_of_job, "{plan:?}");
    let needed = plan.arena_bytes + plan.parameter_bytes + plan.scratch_bytes;
    let more = TrainJob {
        examples: (0..1000).flat_map(examples).collect(),
        memory_budget: Some(needed + (1 << 17)),
        ..toy.job("planned", Pacing::Never)
    };
    assert_eq!(server.plan(more.clone()).unwrap().data_bytes / 8 / numbers(&more), 1);
    assert_eq!(server.train(more).unwrap_err().code, Code::OverBudget);
    server.stop(Duration::ZERO);
}
