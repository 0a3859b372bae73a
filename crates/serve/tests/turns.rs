//! Turns beside each other and beside training: nothing a job does changes what a turn says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use std::time::Duration;

use common::*;
use gguf::TensorType;
use graph::Code;
use model::Finish;
use model::toy::Toy;
use serve::{Ask, Options, Pacing, Server, State};

/// What every prompt of some says alone, on a server of its own.
fn alone(toy: &Fixture, asks: &[Ask]) -> Vec<Answer> {
    asks.iter()
        .map(|ask| {
            let server = toy.server(Options::default());
            toy.adapters(&server);
            let answer = answer(server.ask(ask.clone()).unwrap());
            server.stop(Duration::ZERO);
            answer
        })
        .collect()
}

/// FIELD-REPORTS F61: an adapter was wanted per request. Each turn says which, beside others of
/// other adapters and beside training.
#[test]
fn f61_turns_with_adapters_of_their_own_beside_training_say_what_each_says_alone() {
    for toy in [Fixture::llama(), Fixture::hybrid()] {
        let asks: Vec<Ask> = (0..8)
            .map(|i| Ask { model: ["base", "a", "b"][i % 3].into(), ..ask(i as u64, 20 + 9 * i) })
            .collect();
        let expected = alone(&toy, &asks);
        assert!(expected.iter().any(|a| a.text != expected[0].text), "all say the same");
        let server = toy.server(Options::default());
        toy.adapters(&server);
        let mut reuses = 0;
        for round in 0..2 {
            let job = toy.job(&format!("beside{round}"), Pacing::Share(500_000));
            server.train(job).unwrap();
            let turns: Vec<_> = asks.iter().map(|a| server.ask(a.clone()).unwrap()).collect();
            for (i, (turn, expected)) in turns.into_iter().zip(&expected).enumerate() {
                let found = answer(turn);
                assert_eq!(found.text, expected.text, "{} turn {i} round {round}", toy.name);
                assert_eq!(found.done.completion_tokens, expected.done.completion_tokens);
                // The second time, prompts of more than a page are in the cache, as far as there
                // is room for recurrent states.
                let could = round == 1 && asks[i].tokens.len() > 32;
                let reused = found.done.cached_tokens > 0;
                assert!(could || !reused, "{} turn {i}", toy.name);
                assert!(reused || !could || toy.name == "hybrid", "{} turn {i}", toy.name);
                reuses += usize::from(reused);
            }
            wait(&server, State::Done);
        }
        assert!(reuses >= 3, "{}: {reuses}", toy.name);
        let status = server.train_status();
        assert!(status.busy_segments > 0, "training never ran beside turns");
        let panics = metric(&server, "gradus_panics_total");
        assert_eq!(panics, 0.0);
        server.stop(Duration::ZERO);
    }
}

#[test]
fn what_training_writes_does_not_depend_on_turns() {
    for toy in [Fixture::llama(), Fixture::hybrid()] {
        let job = toy.job("quiet", Pacing::Never);
        let model = toy.model();
        let plain = train::Trainer::new(model.clone(), job.config.clone()).unwrap();
        let outcome = plain.run(&job.examples, &mut |_| true).unwrap();
        let file = toy.dir().join("plain.gguf");
        outcome.adapter.write(&file, &model).unwrap();
        let expected = std::fs::read(file).unwrap();

        let server = toy.server(Options::default());
        for pacing in [Pacing::Slowdown(100_000), Pacing::Never] {
            let turns: Vec<_> = (0..3).map(|i| server.ask(ask(i, 30)).unwrap()).collect();
            server.train(toy.job("quiet", pacing)).unwrap();
            turns.into_iter().for_each(|t| drop(answer(t)));
            let status = wait(&server, State::Done);
            assert_eq!(status.steps, status.steps_total);
            assert_eq!(status.epochs.len() as u64, job.config.epochs);
            assert!(status.epochs.iter().all(|e| e.eval_loss.is_none()));
            assert!(std::fs::read(&job.out).unwrap() == expected, "{}", toy.name);
        }
        assert_eq!(server.names()[1].generation, 2);
        server.stop(Duration::ZERO);
    }
}

#[test]
fn turns_set_aside_for_want_of_room_say_the_same() {
    for toy in [Fixture::llama(), Fixture::hybrid()] {
        let asks: Vec<Ask> = (0..6).map(|i| ask(i, 50)).collect();
        let expected = alone(&toy, &asks);
        // Room for two turns and a half.
        let server = toy.server(Options { positions: 256, ..Options::default() });
        let turns: Vec<_> = asks.iter().map(|a| server.ask(a.clone()).unwrap()).collect();
        for (turn, expected) in turns.into_iter().zip(&expected) {
            assert_eq!(answer(turn).text, expected.text, "{}", toy.name);
        }
        assert!(metric(&server, "gradus_turns_set_aside_total") > 0.0, "nothing was set aside");
        server.stop(Duration::ZERO);
    }
}

#[test]
fn a_turn_keeps_its_generation_when_another_is_published() {
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    toy.adapters(&server);
    let long = Ask { model: "a".into(), max_tokens: 150, ..ask(4, 30) };
    let before = answer(server.ask(long.clone()).unwrap());
    let mut turn = server.ask(long.clone()).unwrap();
    assert_eq!(turn.generation(), 1);
    let first = turn.blocking_next().unwrap();
    // Another adapter under the same alias, and the cache must not mistake one for the other.
    assert_eq!(server.load_adapter("a", &toy.adapter_file("b")).unwrap(), 2);
    let after = answer(server.ask(long).unwrap());
    assert_ne!(after.text, before.text);
    let mut rest = answer(turn);
    if let serve::Said::Text(text) = first {
        rest.text.insert_str(0, &text);
    }
    assert_eq!(rest.text, before.text);
    // Only what is served can be asked for.
    server.unload_adapter("a").unwrap();
    let gone = server.ask(Ask { model: "a".into(), ..ask(1, 5) }).unwrap_err();
    assert_eq!((gone.code, gone.status()), (Code::UnknownModel, 404));
    assert!(gone.message.contains("base, b"), "{gone}");
    assert_eq!(server.unload_adapter("a").unwrap_err().code, Code::UnknownModel);
    // A number is never used again.
    assert_eq!(server.load_adapter("a", &toy.adapter_file("a")).unwrap(), 3);
    server.stop(Duration::ZERO);
}

#[test]
fn two_hundred_clients_that_leave_give_everything_back() {
    let toy = Fixture::llama();
    let server = toy.server(Options { queue: 300, ..Options::default() });
    let free = || metric(&server, "gradus_cache_free_positions");
    answer(server.ask(ask(0, 10)).unwrap());
    idle(&server);
    let before = free();
    let turns: Vec<_> =
        (0..200).map(|i| server.ask(Ask { max_tokens: 10_000, ..ask(i, 40) }).unwrap()).collect();
    let workers: Vec<_> = turns
        .into_iter()
        .map(|mut turn| std::thread::spawn(move || drop(turn.blocking_next())))
        .collect();
    workers.into_iter().for_each(|w| w.join().unwrap());
    idle(&server);
    assert_eq!(free(), before);
    server.stop(Duration::ZERO);
}

/// FIELD-REPORTS F63: a prompt longer than the context, on an architecture without a shift of the
/// cache, ended the server. It is refused, what fills the context ends there, and the next turn is
/// answered, on every architecture.
#[test]
fn f63_neither_a_prompt_nor_an_answer_goes_beyond_the_context() {
    for (arch, _) in model::arch::ARCHITECTURES {
        let toy = Toy { context: 64, ..Toy::new(arch, TensorType::Q8_0, 3) };
        let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
        let cpu = std::sync::Arc::new(cpu::Cpu::new(2, None).unwrap());
        let model = std::sync::Arc::new(model::Model::from_gguf(file, cpu).unwrap());
        let context = model.geometry().context;
        assert_eq!(context, 64, "{arch}");
        let server =
            Server::start(model, Options { positions: 256, ..Options::default() }).unwrap();
        let mut sampler = text::SamplerConfig::greedy();
        let ends = server.model().tokenizer().eog_ids().iter();
        sampler.logit_bias.extend(ends.map(|&id| (id, -100.0)));
        let of = |tokens| Ask { max_tokens: 1 << 40, sampler: sampler.clone(), ..ask(1, tokens) };
        let first = answer(server.ask(of(5)).unwrap());
        assert_eq!(first.done.finish, Finish::Length, "{arch}");
        assert_eq!(first.done.completion_tokens, context - 5, "{arch}");
        for tokens in [context, context + 1, 4 * context] {
            let e = server.ask(of(tokens)).unwrap_err();
            assert_eq!((e.code, e.status()), (Code::ContextExceeded, 400), "{arch}: {e}");
        }
        let last = answer(server.ask(of(context - 1)).unwrap());
        assert_eq!((last.done.finish, last.done.completion_tokens), (Finish::Length, 1), "{arch}");
        assert_eq!(answer(server.ask(of(5)).unwrap()).text, first.text, "{arch}");
        assert_eq!(metric(&server, "gradus_panics_total"), 0.0, "{arch}");
        server.stop(Duration::ZERO);
    }
}

#[test]
fn too_many_and_too_long_are_refused() {
    let toy = Fixture::llama();
    let server = toy.server(Options { slots: 1, queue: 2, ..Options::default() });
    let mut sampler = text::SamplerConfig::greedy();
    // An answer that ended would make room.
    let ends = server.model().tokenizer().eog_ids().iter();
    sampler.logit_bias.extend(ends.map(|&id| (id, -100.0)));
    let long = |i| Ask { max_tokens: 100_000, sampler: sampler.clone(), ..ask(i, 5) };
    let mut turns = vec![server.ask(long(0)).unwrap()];
    turns[0].blocking_next();
    turns.extend([server.ask(long(1)).unwrap(), server.ask(long(2)).unwrap()]);
    let full = server.ask(long(3)).unwrap_err();
    assert_eq!((full.code, full.status()), (Code::QueueFull, 429));
    drop(turns);
    idle(&server);
    let empty = server.ask(Ask { tokens: Vec::new(), ..ask(0, 1) }).unwrap_err();
    assert_eq!(empty.code, Code::InvalidInput);
    let context = server.model().geometry().context;
    let tokens = server.ask(ask(0, context)).unwrap_err();
    assert_eq!((tokens.code, tokens.status()), (Code::ContextExceeded, 400));
    let outside = server.ask(Ask { tokens: vec![1 << 30], ..ask(0, 1) }).unwrap_err();
    assert!(outside.message.contains("outside of the vocabulary"));
    // What fits ends where the context does.
    let found = answer(server.ask(Ask { max_tokens: 1 << 40, ..ask(0, context - 3) }).unwrap());
    assert_eq!((found.done.finish, found.done.completion_tokens), (Finish::Length, 3));
    server.stop(Duration::ZERO);
    assert!(!server.is_ready());
    assert_eq!(server.ask(ask(0, 5)).unwrap_err().code, Code::Stopping);
}
