//! Prefixes that a sequence takes from others give, bit for bit, what a sequence that began with
//! nothing gives; and what is kept for reuse never stands in the way of what runs.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

mod common;

use common::{adapter, assert_ends, cold, engine, feed, tokens, toy};
use model::{Cache, Engine, Error, Rows, SeqId, WantLogits};
use testkit::Random;

const ARCHITECTURES: [&str; 5] = ["llama", "gemma3", "qwen35", "qwen35moe", "qwen3moe"];

/// Opens a sequence, runs what it lacks of the tokens, and compares with a cold run's logits.
/// Gives the sequence and how many tokens it reused.
fn warm(engine: &mut Engine, tokens: &[u32], cold: &[u32], what: &str) -> (SeqId, usize) {
    let (seq, reused) = engine.open(tokens, None);
    assert!(reused < tokens.len(), "{what}: the last token must be run");
    assert_eq!(engine.cache().len(seq), reused, "{what}");
    let bits = feed(engine, seq, &tokens[reused..], None);
    assert_ends(cold, &bits, what);
    (seq, reused)
}

#[test]
fn the_same_prompt_again() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let prompt = tokens(1, 200);
        let reference = cold(&model, &prompt, None);
        let mut engine = engine(&model, 1024, 4);
        for expected in [0, 192, 192] {
            let (seq, reused) = warm(&mut engine, &prompt, &reference, arch);
            assert_eq!(reused, expected, "{arch}");
            engine.cache().close(seq);
        }
    }
}

#[test]
fn a_prompt_that_leaves_another_one() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let mut engine = engine(&model, 2048, 8);
        let first = tokens(1, 200);
        let seq = engine.open(&first, None).0;
        feed(&mut engine, seq, &first, None);
        // A recurrent model has no state where the second leaves the first, and keeps one there
        // for the third.
        let expected = if arch.starts_with("qwen35") { [0, 128] } else { [128, 128] };
        for (seed, expected) in (2..).zip(expected) {
            let mut prompt = first[..150].to_vec();
            prompt.extend(tokens(seed, 61));
            let reference = cold(&model, &prompt, None);
            let (_, reused) = warm(&mut engine, &prompt, &reference, arch);
            assert_eq!(reused, expected, "{arch}, prompt {seed}");
        }
        // The first one goes on as if nothing had happened.
        let more = tokens(9, 40);
        let reference = cold(&model, &[&first[..], &more].concat(), None);
        assert_ends(&reference, &feed(&mut engine, seq, &more, None), arch);
    }
}

#[test]
fn a_conversation_goes_on_where_its_answer_ended() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let mut all = tokens(1, 50);
        let mut engine = engine(&model, 1024, 4);
        let (seq, _) = engine.open(&all, None);
        feed(&mut engine, seq, &all, None);
        for token in tokens(2, 70) {
            feed(&mut engine, seq, &[token], None);
            all.push(token);
        }
        engine.cache().close(seq);
        all.extend(tokens(3, 45));
        let reference = cold(&model, &all, None);
        let (_, reused) = warm(&mut engine, &all, &reference, arch);
        assert_eq!(reused, 96, "{arch}");
    }
}

#[test]
fn what_runs_now_is_shared_too() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let prompt = tokens(1, 130);
        let (a, b) = (tokens(2, 40), tokens(3, 40));
        let whole = |tail: &[u32]| cold(&model, &[&prompt[..], tail].concat(), None);
        let (cold_a, cold_b) = (whole(&a), whole(&b));
        let mut engine = engine(&model, 1024, 4);
        let pages = engine.cache().free_pages();
        let (one, _) = engine.open(&prompt, None);
        feed(&mut engine, one, &prompt, None);
        let (two, reused) = engine.open(&prompt, None);
        assert_eq!(reused, 128, "{arch}");
        feed(&mut engine, two, &prompt[reused..], None);
        assert_eq!(pages - engine.cache().free_pages(), 6, "{arch}: four pages are shared");
        let n = cold_a.len() / 170;
        for i in 0..40 {
            let batch = [(one, &a), (two, &b)].map(|(seq, t)| Rows {
                seq,
                tokens: &t[i..i + 1],
                adapter: None,
                want: WantLogits::Last,
            });
            let out = engine.forward(&batch).unwrap();
            for (bits, cold) in out.iter().zip([&cold_a, &cold_b]) {
                let bits: Vec<u32> = bits.iter().map(|x| x.to_bits()).collect();
                assert_ends(&cold[..(131 + i) * n], &bits, arch);
            }
        }
        engine.cache().close(one);
        engine.cache().close(two);
        assert_eq!(engine.cache().free_pages(), pages, "{arch}");
    }
}

/// Two that run the same tokens side by side end up with one copy of the full pages.
#[test]
fn equal_pages_are_held_once() {
    let model = toy("llama");
    let prompt = tokens(1, 100);
    let mut engine = engine(&model, 1024, 1);
    let pages = engine.cache().free_pages();
    for _ in 0..3 {
        let seq = engine.cache().open();
        feed(&mut engine, seq, &prompt, None);
    }
    assert_eq!(pages - engine.cache().free_pages(), 3 + 3);
}

/// FIELD-REPORTS F57: the prompt cache was reused across requests with different adapters.
#[test]
fn f57_prefixes_are_kept_by_adapter() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let (a, b) = (adapter(&model, 4, 1), adapter(&model, 4, 2));
        let prompt = tokens(1, 130);
        let mut engine = engine(&model, 2048, 8);
        let (id_a, id_b) = (engine.attach(a.clone()), engine.attach(b.clone()));
        for expected in [0, 128] {
            for (id, with) in [(None, None), (Some(id_a), Some(&a)), (Some(id_b), Some(&b))] {
                let (seq, reused) = engine.open(&prompt, id);
                assert_eq!(reused, expected, "{arch}, {id:?}");
                let bits = feed(&mut engine, seq, &prompt[reused..], id);
                assert_ends(&cold(&model, &prompt, with), &bits, arch);
                engine.cache().close(seq);
            }
        }
    }
}

/// FIELD-REPORTS F58: an adapter published anew under its name used what the old one had cached.
#[test]
fn f58_an_adapter_attached_again_reuses_nothing() {
    let model = toy("llama");
    let prompt = tokens(1, 130);
    let mut engine = engine(&model, 256, 1);
    let pages = engine.cache().free_pages();
    let mut before = None;
    for seed in [1, 1, 2] {
        let adapter = adapter(&model, 4, seed);
        let id = engine.attach(adapter.clone());
        assert_ne!(before, Some(id));
        let (seq, reused) = engine.open(&prompt, Some(id));
        assert_eq!(reused, 0);
        let bits = feed(&mut engine, seq, &prompt, Some(id));
        assert_ends(&cold(&model, &prompt, Some(&adapter)), &bits, "attached again");
        engine.cache().close(seq);
        assert!(engine.detach(id) && !engine.detach(id));
        assert_eq!(engine.open(&prompt, Some(id)).1, 0, "a detached adapter's pages are gone");
        assert_eq!(engine.cache().free_pages(), pages);
        before = Some(id);
    }
}

/// Rows of a sequence that changes its adapter are nobody's prefix.
#[test]
fn a_sequence_of_several_adapters_is_not_reused() {
    let model = toy("llama");
    let mut engine = engine(&model, 512, 1);
    let id = engine.attach(adapter(&model, 4, 1));
    let prompt = tokens(1, 130);
    let seq = engine.cache().open();
    feed(&mut engine, seq, &prompt[..70], None);
    feed(&mut engine, seq, &prompt[70..], Some(id));
    assert_eq!(engine.open(&prompt, None).1, 64);
    assert_eq!(engine.open(&prompt, Some(id)).1, 0);
    // Cut back to where it had one adapter, it is again.
    assert_eq!(engine.cache().truncate(seq, 64), 64);
    feed(&mut engine, seq, &prompt[64..], None);
    assert_eq!(engine.open(&prompt, None).1, 128);
}

#[test]
fn under_eviction() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        // Room for one prompt and a half.
        let mut engine = engine(&model, 320, 2);
        let prompts: Vec<Vec<u32>> = (1..5).map(|seed| tokens(seed, 200)).collect();
        let reference: Vec<Vec<u32>> = prompts.iter().map(|p| cold(&model, p, None)).collect();
        let (mut none, mut some) = (0, 0);
        for i in [0, 0, 1, 0, 2, 3, 3, 3, 1, 0, 0, 2] {
            let (seq, reused) = warm(&mut engine, &prompts[i], &reference[i], arch);
            if reused == 0 {
                none += 1
            } else {
                some += 1
            }
            engine.cache().close(seq);
        }
        assert!(none >= 4 && some >= 4, "{arch}: {none} ran whole, {some} reused something");
        assert_eq!(engine.free_positions(), 320, "{arch}");
    }
}

#[test]
fn a_full_cache_says_so_and_changes_nothing() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let mut engine = engine(&model, 256, 4);
        let prompt = tokens(1, 130);
        let reference = cold(&model, &prompt, None);
        let (one, _) = warm(&mut engine, &prompt, &reference, arch);
        let two = engine.cache().open();
        assert_eq!(engine.free_positions(), 96, "{arch}");
        assert!(engine.can_take(&[(two, 96)]) && !engine.can_take(&[(two, 97)]), "{arch}");
        assert!(engine.can_take(&[(one, 30), (two, 96)]), "{arch}: one has room in its page");
        assert!(!engine.can_take(&[(one, 31), (two, 96)]), "{arch}");
        let rows = Rows { seq: two, tokens: &prompt, adapter: None, want: WantLogits::Last };
        match engine.forward(&[rows]) {
            Err(Error::Full { needed: 5, free: 3, .. }) => {}
            other => panic!("{arch}: {other:?}"),
        }
        assert_eq!((engine.cache().len(two), engine.free_positions()), (0, 96), "{arch}");
        engine.cache().close(one);
        let other = tokens(5, 200);
        let bits = feed(&mut engine, two, &other, None);
        assert_ends(&cold(&model, &other, None), &bits, arch);
    }
}

/// What a sequence cuts off and writes anew is still what it was for those who share it.
#[test]
fn cutting_back_leaves_shared_pages_alone() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        let mut engine = engine(&model, 1024, 6);
        let prompt = tokens(1, 130);
        let (more, other) = (tokens(2, 30), tokens(3, 60));
        let (one, _) = engine.open(&prompt, None);
        feed(&mut engine, one, &prompt, None);
        let (two, _) = engine.open(&prompt, None);
        let held = engine.cache().truncate(two, 75);
        // A recurrent model goes back to where it knows its state.
        assert_eq!(held, if arch.starts_with("qwen35") { 0 } else { 75 }, "{arch}");
        let changed = [&prompt[..75], &other].concat();
        let bits = feed(&mut engine, two, &changed[held..], None);
        assert_ends(&cold(&model, &changed, None), &bits, arch);
        let reference = cold(&model, &[&prompt[..], &more].concat(), None);
        assert_ends(&reference, &feed(&mut engine, one, &more, None), arch);
        // And cut back within its own full page, in several ways.
        for len in [128, 127, 97, 96, 1, 0] {
            let held = engine.cache().truncate(one, len);
            assert!(held <= len && engine.cache().len(one) == held, "{arch}");
            let bits = feed(&mut engine, one, &prompt[held..], None);
            assert_ends(&cold(&model, &prompt, None), &bits, &format!("{arch} from {len}"));
        }
        // What it then writes differently is its own, and who begins with the old finds the old.
        let held = engine.cache().truncate(one, 100);
        feed(&mut engine, one, &[&prompt[held..100], &other].concat(), None);
        warm(&mut engine, &prompt, &cold(&model, &prompt, None), arch);
    }
}

/// With few slots for states sequences still run; one that has none is told so.
#[test]
fn slots_of_state_are_bounded() {
    let model = toy("qwen35");
    for states in 1..4 {
        let mut engine = engine(&model, 1024, states);
        let prompts: Vec<Vec<u32>> = (1..5).map(|seed| tokens(seed, 100)).collect();
        let mut open = Vec::new();
        for prompt in &prompts[..states] {
            let (seq, _) = warm(&mut engine, prompt, &cold(&model, prompt, None), "slots");
            open.push(seq);
        }
        let last = engine.open(&prompts[3], None).0;
        assert!(!engine.can_take(&[(last, 1)]), "{states} slots");
        let rows = Rows { seq: last, tokens: &[1], adapter: None, want: WantLogits::Last };
        match engine.forward(&[rows]) {
            Err(Error::Full { what, .. }) => assert!(what.contains("state"), "{what}"),
            other => panic!("{states} slots: {other:?}"),
        }
        // Those that run pass page edges, where there is no slot to keep a state in.
        for (seq, prompt) in open.iter().zip(&prompts) {
            let more = tokens(7, 60);
            let reference = cold(&model, &[&prompt[..], &more].concat(), None);
            for (i, token) in more.iter().enumerate() {
                let bits = feed(&mut engine, *seq, &[*token], None);
                let n = reference.len() / 160;
                assert_ends(&reference[..(101 + i) * n], &bits, "past a page's edge");
            }
        }
        engine.cache().close(open[0]);
        feed(&mut engine, last, &prompts[3], None);
    }
}

/// P4: the cache takes what it said, and never more.
#[test]
fn bytes_are_known_before() {
    for arch in ARCHITECTURES {
        let model = toy(arch);
        for (positions, states) in [(1, 1), (100, 3), (1000, 5)] {
            let dtype = graph::DType::F16;
            let cache = Cache::new(model.geometry(), dtype, positions, states).unwrap();
            let told = Cache::bytes_for(model.geometry(), dtype, positions, states);
            assert_eq!(Some(cache.bytes()), told, "{arch}");
        }
    }
    let hybrid = toy("qwen35");
    // One of two layers keeps keys and values; the other a window and a matrix per head.
    let bytes = |positions, states| {
        Cache::bytes_for(hybrid.geometry(), graph::DType::F32, positions, states).unwrap()
    };
    assert_eq!(bytes(64, 1) - bytes(32, 1), 32 * 2 * (2 * 64) * 4);
    assert_eq!(bytes(32, 3) - bytes(32, 2), (3 * 512 + 4 * 64 * 64) * 4);
}

/// Many sequences with and without adapters, opened, run in mixed batches, cut back and closed at
/// random in a cache that is too small for them.
#[test]
fn random_use_gives_what_cold_runs_give() {
    for arch in ["llama", "qwen35moe"] {
        let model = toy(arch);
        let adapters = [adapter(&model, 4, 1), adapter(&model, 8, 2)];
        let mut engine = engine(&model, 448, 9);
        let ids = [
            None,
            Some(engine.attach(adapters[0].clone())),
            Some(engine.attach(adapters[1].clone())),
        ];
        let mut random = Random::new(3);
        let texts = [tokens(1, 400), tokens(2, 400)];
        let mut open: Vec<(SeqId, usize, Vec<u32>)> = Vec::new();
        let (mut reused, mut full, mut compared) = (0, 0, 0);
        for _ in 0..120 {
            // A prompt is the beginning of one text, and perhaps some other tokens.
            if open.len() < 4 {
                let mut prompt = texts[random.below(2)][..1 + random.below(130)].to_vec();
                prompt.extend(tokens(random.bits(), random.below(3) * 20));
                let with = random.below(3);
                let (seq, held) = engine.open(&prompt, ids[with]);
                reused += usize::from(held > 0);
                open.push((seq, with, prompt));
            }
            if random.below(4) == 0 {
                let which = random.below(open.len());
                let (seq, _, text) = &mut open[which];
                let held = engine.cache().truncate(*seq, random.below(text.len() + 1));
                text.truncate(held + 1 + random.below(20));
            }
            let mut batch = Vec::new();
            for (seq, with, text) in &mut open {
                let held = engine.cache().len(*seq);
                if text.len() == held {
                    text.extend(tokens(random.bits(), 1 + random.below(3) * 9));
                }
                batch.push(Rows {
                    seq: *seq,
                    tokens: &text[held..],
                    adapter: ids[*with],
                    want: WantLogits::Last,
                });
            }
            match engine.forward(&batch) {
                Ok(logits) => {
                    for ((_, with, text), logits) in open.iter().zip(logits) {
                        let with = with.checked_sub(1).map(|i| &adapters[i]);
                        let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
                        assert_ends(&cold(&model, text, with), &bits, arch);
                        compared += 1;
                    }
                }
                Err(Error::Full { .. }) => {
                    full += 1;
                    let (seq, ..) = open.remove(random.below(open.len()));
                    engine.cache().close(seq);
                }
                Err(e) => panic!("{e}"),
            }
            if open.len() > 3 && random.below(2) == 0 {
                let (seq, ..) = open.remove(random.below(open.len()));
                engine.cache().close(seq);
            }
        }
        assert!(reused > 5 && full > 5 && compared > 100, "{arch}: {reused}, {full}, {compared}");
    }
}
