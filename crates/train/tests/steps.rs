//! What a step does to a parameter whose loss and gradient are known by hand.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType};
use graph::{DType, Stop};
use model::Model;
use model::toy::Toy;
use train::{Advance, Event, Example, GraphConfig, Method, Schedule, TrainConfig, Trainer};

const WEIGHT: &str = "output_norm.weight";
const STEPS: u64 = 6;

/// A model whose loss is `x . w`, with `w` the weight of its last norm and every `x` 2: its layers
/// add nothing, all embeddings are ones, and of the logits, `w . 1` for token 1 and `-w . 1` for all
/// others, the first has all of the probability.
fn linear(name: &str) -> Model {
    let toy = Toy { layers: 1, ..Toy::new("qwen3moe", TensorType::F32, 1) };
    let file = Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let tensors = file.tensors().map(|tensor| {
        let mut values = tensor.to_f32().unwrap();
        match tensor.info.name.as_str() {
            "blk.0.attn_output.weight" | "blk.0.ffn_down_exps.weight" => values.fill(0.0),
            "token_embd.weight" => values.fill(1.0),
            "output.weight" => {
                values.fill(-1.0);
                values[256..512].fill(1.0);
            }
            WEIGHT => values.fill(2.0),
            _ => {}
        }
        (tensor.info.clone(), Cow::Owned(bytemuck::cast_slice(&values).to_vec()))
    });
    let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = tensors.collect();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("steps-{name}.gguf"));
    std::fs::write(&path, gguf::encode(file.metadata(), tensors).unwrap()).unwrap();
    Model::load(&path, Arc::new(cpu::Cpu::new(2, None).unwrap())).unwrap()
}

struct Always;

impl Stop for Always {
    fn should_stop(&self) -> bool {
        true
    }
}

/// Trains with so many windows to a step, stopped wherever that is possible, and returns every
/// value that the weight had, in order, and the losses; with evaluations after each step or without.
fn run(name: &str, schedule: Schedule, accumulate: usize, eval_every: u64) -> (Vec<f32>, Vec<f64>) {
    let model = linear(&format!("{accumulate}-{eval_every}-{name}"));
    let config = TrainConfig {
        weights: vec![WEIGHT.to_string()],
        method: Method::Sgd { momentum: 0.0 },
        lr: 0.125,
        schedule,
        // An epoch is a step.
        epochs: STEPS,
        accumulate,
        eval_every,
        graph: GraphConfig { rows: 2, cache: DType::F32, ..GraphConfig::default() },
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(&model, config).unwrap();
    let example = Example { tokens: vec![0, 2, 3], weights: vec![0.0, 1.0, 1.0] };
    let held_out = if eval_every > 0 { vec![example.clone()] } else { Vec::new() };
    trainer.load(vec![example; accumulate], held_out).unwrap();
    let (mut values, mut losses, mut stops) = (Vec::new(), Vec::new(), 0);
    loop {
        let weight = &trainer.parameters().unwrap().weights[WEIGHT];
        assert!(weight.iter().all(|w| *w == weight[0]), "all are as one");
        if values.last() != Some(&weight[0]) {
            values.push(weight[0]);
        }
        match trainer.advance(&Always).unwrap() {
            Advance::Stopped => stops += 1,
            Advance::Event(Event::Step { loss, .. }) => losses.push(loss),
            Advance::Event(_) => {}
            Advance::Done => break,
        }
    }
    assert!(stops > 10 * accumulate, "{stops} stops");
    (values, losses)
}

/// PRIOR-ART C1: sums of one step were carried into the next, so that steps were of one, two, three
/// gradients. Each is of its own, and nothing moves inside of a period. (Here a step's loss is the
/// mean over its windows, so that two of them move as far as one.)
#[test]
fn bug_01_every_step_moves_by_its_own_gradient() {
    for accumulate in [1, 2] {
        let (values, losses) = run("c1", Schedule::Constant, accumulate, 0);
        assert_eq!((values.len() as u64, losses.len() as u64), (STEPS + 1, STEPS));
        for (i, value) in values.iter().enumerate() {
            // The norm divides by the root of 1 + its epsilon.
            let expected = 2.0 - 0.125 * 2.0 * i as f32;
            assert!((value - expected).abs() < 2e-5, "{accumulate}, step {i}: {values:?}");
        }
        for (i, loss) in losses.iter().enumerate() {
            let expected = 256.0 * 2.0 * (2.0 - 0.25 * i as f64);
            assert!((loss / expected - 1.0).abs() < 2e-5, "{accumulate}, step {i}: {losses:?}");
        }
    }
}

/// PRIOR-ART C2: an evaluation counted as a part of a period, whose step then never came.
#[test]
fn bug_02_an_evaluation_is_no_part_of_a_step() {
    for accumulate in [1, 2] {
        // Also by the rate, which falls with every step.
        let run = |eval_every| run("c2", Schedule::Linear, accumulate, eval_every);
        let (values, losses) = run(0);
        assert_eq!((values.len() as u64, losses.len() as u64), (STEPS + 1, STEPS));
        assert_eq!(run(1), (values, losses));
    }
}
