//! Answers made together are those made one by one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

mod common;

use std::sync::Arc;

use common::{adapter, engine, tokens, toy};
use model::{AdapterId, Engine, Finish, GenerateConfig, Generated, Model, Prompt};
use model::{generate, generate_all};
use text::SamplerConfig;

const ARCHITECTURES: [&str; 4] = ["llama", "gemma3", "qwen35moe", "qwen3moe"];

/// Prompts of many lengths, greedy and sampled ones, of the base and of an adapter; one of them
/// asks for no token, one for a single one.
fn prompts(adapter: AdapterId) -> Vec<Prompt> {
    let prompt = |i: usize| Prompt {
        tokens: tokens(i as u64, 1 + 17 * i % 60),
        config: GenerateConfig {
            max_tokens: [20, 0, 45, 1, 9][i % 5],
            sampler: if i.is_multiple_of(2) {
                SamplerConfig::greedy()
            } else {
                SamplerConfig::default()
            },
            seed: i as u64,
            stops: Vec::new(),
            adapter: i.is_multiple_of(3).then_some(adapter),
        },
    };
    (0..11).map(prompt).collect()
}

fn warm(model: &Arc<Model>, positions: usize) -> (Engine, AdapterId) {
    let mut engine = engine(model, positions, 6);
    let id = engine.attach(adapter(model, 4, 3));
    (engine, id)
}

/// All but the times.
fn essence(answer: &Generated) -> (String, Vec<u32>, Vec<u32>, Finish) {
    let bits = answer.logprobs.iter().map(|p| p.to_bits()).collect();
    (answer.text.clone(), answer.tokens.clone(), bits, answer.finish)
}

#[test]
fn answers_made_together_are_those_made_one_by_one() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let (mut one, id) = warm(&model, 256);
        let prompts = prompts(id);
        let alone: Vec<_> = prompts
            .iter()
            .map(|Prompt { tokens, config }| {
                let seq = one.cache().open();
                let answer = generate(&mut one, seq, tokens, config, &mut |_| true).unwrap();
                one.cache().close(seq);
                essence(&answer)
            })
            .collect();
        assert!(alone.iter().filter(|a| a.1.len() > 5).count() > 4, "{arch}: {alone:?}");
        // Room for all, for some, and for one.
        for (positions, at_once) in [(2048, 4), (2048, 100), (256, 4), (128, 4), (2048, 0)] {
            let (mut engine, _) = warm(&model, positions);
            let free = engine.free_positions();
            let mut together: Vec<Option<_>> = vec![None; prompts.len()];
            let mut on_answer = |i: usize, answer| {
                assert!(together[i].replace(essence(&answer)).is_none(), "{arch}: {i} comes twice");
            };
            generate_all(&mut engine, &prompts, at_once, &mut || true, &mut on_answer).unwrap();
            for (i, (alone, together)) in alone.iter().zip(together).enumerate() {
                assert_eq!(Some(alone), together.as_ref(), "{arch}, {positions}, {at_once}: {i}");
            }
            assert_eq!(engine.free_positions(), free, "{arch}: pages are held");
        }
    }
}

#[test]
fn as_many_run_at_a_time_as_are_asked_for() {
    let model = toy("llama");
    for (positions, at_once, rounds) in [(4096, 4, 2 * 10), (4096, 8, 10), (64, 8, 8 * 10)] {
        let (mut engine, _) = warm(&model, positions);
        let config = GenerateConfig {
            max_tokens: 10,
            // No end of a turn comes by itself.
            sampler: SamplerConfig {
                logit_bias: model.tokenizer().eog_ids().iter().map(|&id| (id, -1e9)).collect(),
                ..SamplerConfig::greedy()
            },
            seed: 0,
            stops: Vec::new(),
            adapter: None,
        };
        let prompts: Vec<Prompt> =
            (0..8).map(|i| Prompt { tokens: tokens(i, 50), config: config.clone() }).collect();
        let (mut asked, mut answers) = (0, 0);
        let mut go_on = || {
            asked += 1;
            true
        };
        generate_all(&mut engine, &prompts, at_once, &mut go_on, &mut |_, _| answers += 1).unwrap();
        assert_eq!((asked, answers), (rounds, 8), "{positions} positions, {at_once} at once");
    }
}

#[test]
fn answers_that_are_given_up_or_fail_leave_nothing_behind() {
    let model = toy("qwen35moe");
    let (mut engine, id) = warm(&model, 2048);
    let free = engine.free_positions();
    let mut rounds = 0;
    let mut go_on = || {
        rounds += 1;
        rounds < 4
    };
    let mut answers = Vec::new();
    generate_all(&mut engine, &prompts(id), 8, &mut go_on, &mut |i, _| answers.push(i)).unwrap();
    assert_eq!(answers, [1, 3, 6, 8], "those of no and of one token alone were whole");
    assert_eq!(engine.free_positions(), free);

    let mut prompts = prompts(id);
    prompts[5].tokens.clear();
    let error = generate_all(&mut engine, &prompts, 2, &mut || true, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("the prompt is empty"), "{error}");
    assert_eq!(engine.free_positions(), free);
}
