//! What passes between a run and its owner.

use std::time::Duration;

use gguf::TensorType;
use model::toy::Toy;

use super::*;
use crate::Options;

/// A disk that is slower than the steps: one copy waits to be written, never two.
#[test]
fn a_run_holds_until_its_checkpoint_is_written() {
    let bytes = Toy::new("llama", TensorType::Q4_1, 3).gguf().unwrap();
    let file = gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap();
    let cpu = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let model = Arc::new(Model::from_gguf(file, cpu).unwrap());
    let targets = train::select_targets(&model, &["attn_q".into()]).unwrap();
    let server = Server::start(model, Options { positions: 256, ..Options::default() }).unwrap();
    let config = TrainConfig { targets, epochs: 4, ..TrainConfig::default() };
    let examples = [Example { tokens: (1..30).collect(), weights: vec![1.0; 29] }].into();
    let none = Arc::new([]) as Arc<[Example]>;
    let setup = Setup {
        config: &config,
        examples: &examples,
        held_out: &none,
        cut: Cut::BeforeAnswers,
        budget: None,
        may_recompute: false,
        measure_first: false,
        checkpoint_every: Some(1),
    };
    let control = server.claim("slow").unwrap();
    let Prepared { trainer, .. } = server.set_up(&setup, Start::default()).unwrap();
    let progress = server.hand_over(trainer, control.clone(), Pacing::Never).unwrap();
    for step in 1..=4 {
        let snapshot = progress.iter().find_map(|news| match news {
            Progress::Event(Event::Checkpoint(snapshot), _) => Some(snapshot),
            _ => None,
        });
        assert_eq!(snapshot.unwrap().steps(), step);
        let held = Held { control: &control, to_loop: &server.0.to_loop };
        std::thread::sleep(Duration::from_millis(100));
        assert!(progress.try_iter().all(|news| matches!(news, Progress::Measured(_))));
        drop(held);
    }
    let ended = progress.iter().any(|news| matches!(news, Progress::Ended(_)));
    assert!(ended, "it goes on to its end");
}

/// What is said to fit may be asked for, and fits: windows and chunks that requests have, and windows
/// that hold the answers.
#[test]
fn settings_that_are_said_to_fit_are_accepted_and_fit() {
    let mut toy = Toy::new("llama", TensorType::Q8_0, 3);
    toy.context = 2048;
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let cpu = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let model = Arc::new(Model::from_gguf(file, cpu).unwrap());
    let mut host = request::Host::new(model.clone(), "toy".into(), graph::DType::F16);
    let tokens = text::SpecialTokens::of(model.tokenizer());
    host.template = text::ChatTemplate::builtin("plain", tokens).map_err(|e| e.to_string());
    host.train_dir = Some(std::env::temp_dir());
    let server = Server::start(model, Options { positions: 256, ..Options::default() }).unwrap();
    let example = |prompt: usize, completion: usize| {
        let words = |n: usize| "abc ".repeat(n);
        serde_json::json!([{ "prompt": words(prompt), "completion": words(completion) }])
    };
    let text = "abc ".repeat(1200);
    let plan = |body: &serde_json::Value| {
        let job = request::train(body.to_string().as_bytes(), &host, &|| true)
            .unwrap_or_else(|e| panic!("{e}"));
        server.plan(job).unwrap()
    };
    let (mut chunks, mut fits, mut texts, mut none) = (0, 0, 0, 0);
    let of_prompts = [example(220, 2), example(400, 2)];
    let data = of_prompts.into_iter().chain([example(2, 220)]).map(|list| ("examples", list));
    for (field, data) in data.chain([("text", text.into())]) {
        for window in [768, 1280, 1536] {
            for budget in [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 13.0, 20.0] {
                let mut body = serde_json::json!({
                    "out": "fits.gguf", "window": window, "val_split": 0, "targets": "attn_q",
                    "memory_budget_mib": budget, "plan": true,
                });
                body[field] = data.clone();
                let read = request::train(body.to_string().as_bytes(), &host, &|| true);
                // What is longer than the window that is asked for.
                if read.is_err() {
                    continue;
                }
                let Some(instead) = plan(&body).instead else { continue };
                if !instead.contains("would fit") {
                    assert!(instead.contains("no window"), "{instead}");
                    none += 1;
                    continue;
                }
                let named = |name: &str| {
                    let (_, rest) = instead.split_once(&format!("`{name}` "))?;
                    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
                    Some(digits.parse::<usize>().unwrap())
                };
                body["recompute"] = true.into();
                body["window"] = named("window").unwrap().into();
                if let Some(chunk) = named("chunk") {
                    body["chunk"] = chunk.into();
                    chunks += 1;
                }
                if instead.contains("`fit` \"left\"") {
                    body["fit"] = "left".into();
                    fits += 1;
                }
                texts += usize::from(field == "text");
                let plan = plan(&body);
                assert_eq!(plan.instead, None, "{window} in {budget} MiB: {instead}");
            }
        }
    }
    assert!(chunks > 2 && fits > 0 && texts > 1 && none > 2, "{chunks} {fits} {texts} {none}");
    server.stop(Duration::ZERO);
}

/// Two sizes that are nearly the same are told apart.
#[test]
fn a_run_that_is_a_little_too_large_says_by_how_much() {
    for (needed, allowed, said) in [
        (2_100_000, 2_000_000, "2.0 MiB beside the model, 1.9 MiB may"),
        (2_097_152 + 20_000, 2_097_152, "2.02 MiB beside the model, 2.00 MiB may"),
        (2_097_152 + 1, 2_097_152, "2.000001 MiB beside the model, 2.000000 MiB may"),
    ] {
        let why = train::over_budget(needed, allowed);
        assert!(why.contains(said), "{why}");
    }
}
