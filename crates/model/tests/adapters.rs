//! Adapters come and go beside each other and the base model.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

mod common;

use common::{adapter, assert_ends, cold, engine, feed, tokens, toy};
use model::{Rows, WantLogits};

/// FIELD-REPORTS F59: one stream's adapter changed another stream. Here each has, bit for bit,
/// what it has alone, whatever runs beside it and in whatever order adapters were attached.
#[test]
fn f59_an_adapter_beside_others_is_as_alone() {
    for arch in ["llama", "qwen35", "qwen3moe", "qwen35moe"] {
        let model = toy(arch);
        let adapters = [(4, 1), (16, 2), (4, 3)].map(|(rank, seed)| adapter(&model, rank, seed));
        let prompts: Vec<Vec<u32>> = (1..6).map(|seed| tokens(seed, 45)).collect();
        // By prompt: none, each adapter, and the first one again.
        let uses = [None, Some(0), Some(1), Some(2), Some(0)];
        let alone: Vec<Vec<u32>> = prompts
            .iter()
            .zip(uses)
            .map(|(prompt, with)| cold(&model, prompt, with.map(|i| &adapters[i])))
            .collect();
        assert_ne!(alone[0], cold(&model, &prompts[0], Some(&adapters[0])), "{arch}: no effect");
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let mut engine = engine(&model, 1024, 8);
            let mut ids = [None; 3];
            for i in order {
                ids[i] = Some(engine.attach(adapters[i].clone()));
            }
            let seqs: Vec<_> = prompts.iter().map(|_| engine.cache().open()).collect();
            let mut got = vec![Vec::new(); prompts.len()];
            // A prompt, then rows one by one; who takes part changes.
            for (round, range) in [0..30, 30..31, 31..32, 32..40, 40..45].into_iter().enumerate() {
                let out: Vec<usize> = if round == 2 { vec![3, 1] } else { vec![0, 1, 2, 3, 4] };
                let others: Vec<usize> = (0..5).filter(|i| !out.contains(i)).collect();
                for part in [out, others] {
                    let rows = part.iter().map(|&i| Rows {
                        seq: seqs[i],
                        tokens: &prompts[i][range.clone()],
                        adapter: uses[i].and_then(|i| ids[i]),
                        want: WantLogits::All,
                    });
                    let rows: Vec<_> = rows.collect();
                    let logits = engine.forward(&rows).unwrap();
                    for (&i, logits) in part.iter().zip(logits) {
                        got[i].extend(logits.iter().map(|x| x.to_bits()));
                    }
                }
            }
            for (i, (alone, got)) in alone.iter().zip(&got).enumerate() {
                assert_eq!(alone.len(), got.len());
                assert_ends(alone, got, &format!("{arch}, order {order:?}, prompt {i}"));
            }
        }
    }
}

#[test]
fn fifty_attached_adapters_cost_a_base_request_nothing() {
    let model = toy("llama");
    let prompt = tokens(1, 100);
    let run = |attached: usize| {
        let mut engine = engine(&model, 256, 1);
        let one = adapter(&model, 8, 1);
        let ids: Vec<_> = (0..attached).map(|_| engine.attach(one.clone())).collect();
        let seq = engine.cache().open();
        let base = feed(&mut engine, seq, &prompt, None);
        let bytes = engine.bytes();
        // Beside one adapter, the others cost nothing either.
        let with = engine.attach(one);
        let seq = engine.cache().open();
        feed(&mut engine, seq, &prompt, Some(with));
        (base, bytes, engine.bytes(), ids.len())
    };
    let (none, fifty) = (run(0), run(50));
    assert_eq!((none.0, none.1, none.2), (fifty.0, fifty.1, fifty.2));
    assert_eq!(fifty.3, 50);
}

#[test]
fn a_detached_adapter_is_refused_and_its_id_not_used_again() {
    let model = toy("llama");
    let mut engine = engine(&model, 256, 1);
    let first = engine.attach(adapter(&model, 4, 1));
    let seq = engine.cache().open();
    let rows = |adapter| Rows { seq, tokens: &[1, 2], adapter, want: WantLogits::Last };
    engine.forward(&[rows(Some(first))]).unwrap();
    assert!(engine.detach(first));
    let again = engine.attach(adapter(&model, 4, 1));
    assert_ne!(first, again);
    let refused = engine.forward(&[rows(Some(first))]).unwrap_err().to_string();
    assert!(refused.contains("not attached"), "{refused}");
    assert_eq!(engine.cache().len(seq), 2);
    assert!(engine.adapter(first).is_none() && engine.adapter(again).is_some());
}
