//! Stops at every edge. Pieces are small here, so that the tensors of a toy have several.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf::TensorType;
use graph::Stop;
use model::toy::Toy;
use testkit::Random;

use super::*;
use crate::{GraphConfig, select_targets};

/// Says yes after so many times.
struct After(AtomicUsize);

impl Stop for After {
    fn should_stop(&self) -> bool {
        let less = |left: usize| left.checked_sub(1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err()
    }
}

fn examples(seed: u64, lengths: &[usize]) -> Vec<Example> {
    let mut random = Random::new(seed);
    let mut tokens = |n: usize| (0..n).map(|_| random.below(320) as u32).collect();
    let of = |&n: &usize| Example { tokens: tokens(n), weights: vec![1.0; n] };
    lengths.iter().map(of).collect()
}

fn run<M: Deref<Target = Model>>(mut trainer: Trainer<M>) -> (Vec<Event>, Outcome) {
    let mut events = Vec::new();
    loop {
        match trainer.advance(&()).unwrap() {
            Advance::Event(event) => events.push(event),
            Advance::Stopped => {}
            Advance::Done => return (events, trainer.finish().unwrap()),
        }
    }
}

/// What is written down there is of one step, from which a run goes on bit for bit, as does the one
/// that was stopped.
#[test]
fn a_run_can_stop_at_every_piece_of_every_tensor() {
    let toy = Toy { layers: 1, ..Toy::new("llama", TensorType::Q8_0, 3) };
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let model = Model::from_gguf(file, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap();
    let config = TrainConfig {
        targets: select_targets(&model, &["attn_q".into()]).unwrap(),
        rank: 4,
        lr: 1e-2,
        weight_decay: 0.01,
        clip: 0.5,
        epochs: 2,
        accumulate: 2,
        eval_every: 1,
        keep_best: true,
        graph: GraphConfig { rows: 8, ..GraphConfig::default() },
        ..TrainConfig::default()
    };
    let fresh = || {
        let mut trainer = Trainer::new(&model, config.clone()).unwrap();
        trainer.load(examples(5, &[9, 8, 7]), examples(7, &[5])).unwrap();
        trainer.checkpoint_every(1);
        trainer
    };
    let pieces: usize = fresh().lengths.iter().map(|len| len.div_ceil(piece::NUMBERS)).sum();
    assert!(pieces >= 6, "{pieces}");
    let (events, whole) = run(fresh());
    assert_eq!(whole.steps, 4);
    let mut halfway = 0;
    for n in 0.. {
        let (mut trainer, stop, mut before) = (fresh(), After(AtomicUsize::new(n)), Vec::new());
        let ended = loop {
            match trainer.advance(&stop).unwrap() {
                Advance::Event(event) => before.push(event),
                Advance::Stopped => break false,
                Advance::Done => break true,
            }
        };
        if ended {
            // Each is collected three times, looked at for the norm, moved, kept and copied twice.
            assert!(n > 11 * pieces, "{n} edges");
            break;
        }
        halfway += usize::from(trainer.is_halfway() || matches!(trainer.work, Work::Keep(_)));
        let snapshot = trainer.snapshot().unwrap();
        let mut resumed = fresh();
        resumed.restore(snapshot, false).unwrap();
        assert!(run(resumed).1 == whole, "edge {n}: going on from there ends elsewhere");
        let (later, outcome) = run(trainer);
        assert!(outcome == whole, "edge {n}: the run that was stopped ends elsewhere");
        assert!([before, later].concat() == events, "edge {n}: other events");
    }
    assert!(halfway > 4 * pieces, "{halfway} edges within moves and copies");
}

/// Says yes always.
struct AtOnce;

impl Stop for AtOnce {
    fn should_stop(&self) -> bool {
        true
    }
}

/// What a run does between two steps, it does in pieces: it shuffles and packs an epoch of many
/// short examples a few at a time, also before its first step, and copies none of a step's windows
/// before its turn.
#[test]
fn p7_an_epoch_begins_in_pieces() {
    let toy = Toy { layers: 1, ..Toy::new("llama", TensorType::Q8_0, 3) };
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let model = Model::from_gguf(file, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap();
    let config = TrainConfig {
        targets: select_targets(&model, &["attn_q".into()]).unwrap(),
        epochs: 2,
        accumulate: 1024,
        graph: GraphConfig { rows: 8, ..GraphConfig::default() },
        ..TrainConfig::default()
    };
    let lengths: Vec<usize> = (0..400).map(|i| 2 + i % 3).collect();
    let mut trainer = Trainer::new(&model, config).unwrap();
    trainer.load(examples(5, &lengths), Vec::new()).unwrap();
    for epoch in 0..2 {
        let mut pieces = 0;
        while !matches!(&trainer.work, Work::Step(_)) {
            // That of the first says nothing.
            pieces += usize::from(trainer.advance(&AtOnce).unwrap() == Advance::Stopped);
        }
        // Each is shuffled, sorted, put into a window, and into its place in that.
        let few = 5 * lengths.len() / piece::EXAMPLES;
        assert!(pieces > few, "epoch {epoch}: {pieces} pieces, expected more than {few}");
        let windows = trainer.epochs.len();
        for _ in 0..windows {
            assert!(trainer.advance(&AtOnce).unwrap() == Advance::Stopped);
            let Work::Step(step) = &trainer.work else { panic!("epoch {epoch}: no step") };
            assert!(!step.is_begun(), "epoch {epoch}: a window ran before all were weighed");
        }
        while !matches!(trainer.advance(&()).unwrap(), Advance::Event(Event::Epoch { .. })) {}
    }
    assert!(trainer.advance(&()).unwrap() == Advance::Done);
}
