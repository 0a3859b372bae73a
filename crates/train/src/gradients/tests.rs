//! What can only be seen from inside of a walk.

use std::sync::Arc;

use gguf::TensorType;
use graph::DType;
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::Random;

use super::memory::Extent;
use super::*;

fn toy(arch: &str, layers: usize) -> Model {
    loaded(&Toy { layers, ..Toy::new(arch, TensorType::F32, 7) }, None)
}

fn loaded(toy: &Toy, family: Option<cpu::Family>) -> Model {
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    Model::from_gguf(file, Arc::new(cpu::Cpu::new(2, family).unwrap())).unwrap()
}

fn adapted(model: &Model, targets: &str) -> Parameters {
    let targets: Vec<String> = targets.split(',').map(str::to_string).collect();
    let targets = crate::select_targets(model, &targets).unwrap();
    let targets = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = Adapter::fresh(model, targets, 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    Parameters { adapter: Some(adapter), ..Parameters::default() }
}

/// 64 rows, the first of some of which carry loss.
fn window(loud: impl Fn(usize) -> bool) -> Window {
    let mut random = Random::new(1);
    let tokens = (0..65).map(|_| random.below(320) as u32).collect();
    let weights = (0..65).map(|i| f32::from(i > 0 && loud(i - 1))).collect();
    Window::from(vec![Example { tokens, weights }])
}

fn gradients(model: &Model, rows: usize, horizon: usize, budget: usize) -> Gradients<&Model> {
    let config = GraphConfig { rows, cache: DType::F32, ..GraphConfig::default() };
    let walks = Walks { window: 64, horizon, host_budget: budget };
    Gradients::new(model, config).unwrap().with_walks(walks).unwrap()
}

/// The relative error of the gradient of a walk, between whose chunks `between` is called.
fn error_of(
    model: &Model,
    parameters: &Parameters,
    rows: usize,
    between: impl Fn(&mut Memory),
) -> f64 {
    let window = window(|i| i >= 32);
    let whole = gradients(model, 64, 0, 0).of(&window, 32.0, parameters, &()).unwrap();
    let mut walked = gradients(model, rows, 0, 0);
    let mut pass =
        walked.begin(&window, 32.0, Goal::Gradient(Masks::of(0, 0)), parameters).unwrap();
    let mut sums: Vec<Vec<f32>> = whole.grads.values().map(|g| vec![0.0; g.len()]).collect();
    // In the order of the map, not of the parameters.
    let names = parameters.names();
    let mut order: Vec<usize> = (0..names.len()).collect();
    order.sort_by_key(|&i| &names[i]);
    loop {
        assert!(walked.advance(&mut pass, parameters, &()).unwrap());
        for (sum, &i) in sums.iter_mut().zip(&order) {
            let Some(len) = walked.gradient_len(&pass, i).unwrap() else { continue };
            let mut gradient = vec![0.0; len];
            walked.gradient(&pass, i, 0, &mut gradient).unwrap();
            sum.iter_mut().zip(&gradient).for_each(|(a, b)| *a += b);
        }
        if !pass.goes_on() {
            break;
        }
        between(&mut walked.memory);
    }
    assert_eq!(walked.loss(&pass).unwrap().to_bits(), whole.loss.to_bits());
    let (mut off, mut norm) = (0.0, 0.0);
    for (a, b) in sums.iter().flatten().zip(whole.grads.values().flatten()) {
        off += (f64::from(*a) - f64::from(*b)).powi(2);
        norm += f64::from(*b).powi(2);
    }
    (off / norm).sqrt()
}

/// PRIOR-ART B3: the walk that stops gradients where chunks begin gives another gradient, by far.
#[test]
fn what_is_not_sent_back_is_missed() {
    for arch in ["llama", "gemma3", "qwen3moe", "qwen35", "qwen35moe"] {
        let model = toy(arch, 2);
        let parameters = adapted(&model, "all");
        for rows in [8, 32] {
            let exact = error_of(&model, &parameters, rows, |_| {});
            let plain = error_of(&model, &parameters, rows, Memory::forget_sent);
            assert!(exact < 1e-6, "{arch}, chunks of {rows}: {exact:e}");
            assert!(plain > 1e-2, "{arch}, chunks of {rows}: {plain:e} without what is sent back");
        }
    }
}

/// Within the horizon a chunk sends what it would without one, bit for bit; and nothing beyond.
#[test]
fn a_horizon_cuts_what_is_sent_at_a_position() {
    let model = toy("llama", 2);
    let parameters = adapted(&model, "all");
    let window = window(|i| i >= 56);
    let sent = |horizon: usize| {
        let mut gradients = gradients(&model, 8, horizon, 0);
        let mut pass =
            gradients.begin(&window, 8.0, Goal::Gradient(Masks::of(0, 0)), &parameters).unwrap();
        assert!(gradients.advance(&mut pass, &parameters, &()).unwrap());
        let parts = gradients.memory.parts.len();
        let all = (0..parts).map(|p| gradients.memory.sent_mut(p).unwrap().0.to_vec());
        (all.collect::<Vec<_>>(), gradients.planned_bytes())
    };
    let (exact, bytes) = sent(0);
    assert!(exact.iter().all(|part| part.iter().all(|&x| x != 0.0)));
    for horizon in [1, 5, 8, 19, 24, 55, 56, 64] {
        let (near, fewer) = sent(horizon);
        for (near, exact) in near.iter().zip(&exact) {
            let row = exact.len() / 56;
            let from = 56usize.saturating_sub(horizon) * row;
            assert!(near[..from].iter().all(|&x| x == 0.0), "horizon {horizon}");
            assert!(near[from..] == exact[from..], "horizon {horizon}");
        }
        // What is beyond does not outlive its layer.
        assert!(horizon > 24 || fewer < bytes, "horizon {horizon}: {fewer} and {bytes}");
    }
}

/// Only what a parameter is reached by is run, and only what it moves is sent to.
#[test]
fn what_no_gradient_flows_to_is_not_run() {
    let (model, hybrid) = (toy("llama", 2), toy("qwen35", 2));
    let kinds = |model: &Model, targets: &str, loud: &dyn Fn(usize) -> bool| {
        let parameters = adapted(model, targets);
        let mut gradients = gradients(model, 8, 0, 0);
        let survey = gradients.survey(&window(loud), false, &parameters).unwrap();
        let moves = gradients.memory.parts.iter().map(|part| part.moves).collect::<Vec<_>>();
        (survey.runs(), moves)
    };
    let loud = |i: usize| (17..20).contains(&i) || i == 41;
    // After the last token with loss, in chunk 5, nothing runs.
    let (runs, moves) = kinds(&model, "all", &loud);
    assert_eq!(runs, ("11111".to_string() + "0", "111111".to_string()));
    assert_eq!(moves, [true; 4]);
    // Keys and values of the second layer alone.
    let (runs, moves) = kinds(&model, "blk.1.attn", &loud);
    assert_eq!(runs, ("111110".to_string(), "111111".to_string()));
    assert_eq!(moves, [false, false, true, true]);
    // What comes after all keys, values and states.
    for (model, parts) in [(&model, 4), (&hybrid, 4)] {
        let (runs, moves) = kinds(model, "blk.1.ffn_down", &loud);
        assert_eq!(runs, ("111110".to_string(), "001001".to_string()));
        assert_eq!(moves, vec![false; parts]);
    }
    let (runs, moves) = kinds(&hybrid, "blk.1.attn", &loud);
    assert_eq!(runs, ("111110".to_string(), "111111".to_string()));
    assert_eq!(moves, [true, true, false, false]);
}

/// Fewer states are kept the less memory there is, and no more than needed; what is taken is what
/// was said.
#[test]
fn states_are_kept_as_memory_allows() {
    let model = toy("qwen35", 2);
    let parameters = adapted(&model, "all");
    let window = window(|i| i >= 20);
    let bytes = |budget: usize| {
        let mut gradients = gradients(&model, 8, 0, budget);
        let result = gradients.of(&window, 44.0, &parameters, &())?;
        assert_eq!(gradients.memory.bytes(), gradients.memory.held());
        assert_eq!(gradients.walk_bytes(), gradients.memory.held());
        Ok::<_, Error>((gradients.memory.extent, gradients.walk_bytes(), result))
    };
    let (all, most, exact) = bytes(0).unwrap();
    assert_eq!(all, Extent { kept: 7, sent: 7, stride: 1, slots: 7 });
    let state = model.geometry().states.iter();
    let state: usize = state.map(|s| s.elements() * 4).sum();
    for (missing, stride, slots) in
        [(0, 1, 7), (1, 2, 3), (4, 2, 3), (5, 3, 2), (6, 4, 1), (7, 8, 0)]
    {
        let budget = most - missing * state;
        let (extent, bytes, result) = bytes(budget).unwrap();
        assert_eq!((extent.stride, extent.slots), (stride, slots), "{missing} states fewer");
        assert!(bytes <= budget && bytes == most - (7 - slots) * state);
        assert!(result == exact, "{missing} states fewer: other bits");
    }
    let error = bytes(most - 7 * state - 1).unwrap_err().to_string();
    assert!(error.contains("`walk_host_budget` is"), "{error}");
}

/// P4: the logits of a piece of rows are gone before those of the next are there.
#[test]
fn logits_never_exist_whole() {
    const ROWS: usize = 1536;
    // So narrow that logits are most of what there is.
    let (width, ffn, heads, kv_heads) = (32, 32, 2, 1);
    let narrow = Toy::new("llama", TensorType::F32, 7);
    let model = loaded(&Toy { layers: 1, width, ffn, heads, kv_heads, ..narrow }, None);
    let parameters = adapted(&model, "attn");
    let vocab = model.geometry().vocab;
    // Pieces, the most that are there at once, and the arena, of logits in so many rows at a time.
    let planned = |piece: Option<usize>| {
        let config = GraphConfig { rows: ROWS, cache: DType::F32, ..GraphConfig::default() };
        let mut gradients = Gradients::new(&model, config).unwrap();
        gradients.piece = piece.unwrap_or(gradients.piece);
        let piece = gradients.piece;
        let placed = gradients.plan(&parameters).unwrap();
        let (mut alive, mut most, mut losses) = (0, 0, 0);
        for step in placed.plans().flat_map(|(_, plan)| &plan.steps) {
            match step.op.name() {
                "CrossEntropyBack" => alive -= 1,
                "CrossEntropy" => losses += 1,
                _ if step.out.arg.shape.dims() == [piece, vocab] => alive += 1,
                _ => {}
            }
            most = most.max(alive);
        }
        assert_eq!(alive, 0);
        (losses, most, placed.arena_bytes())
    };
    let (losses, most, bytes) = planned(None);
    assert_eq!((losses, most), (3, 1));
    // All rows' logits would show.
    let (losses, most, whole) = planned(Some(ROWS));
    assert_eq!((losses, most), (1, 1));
    let of_piece = 512 * vocab * size_of::<f32>();
    assert!(whole - bytes >= 2 * of_piece, "{bytes} in pieces, {whole} at once");
}

/// P5: in how many pieces rows go through the head changes no bit of the loss, nor of a gradient
/// that is a sum over what all pieces sent back; those of the head's own adapter are sums of pieces.
/// P4: each takes the memory that was planned.
#[test]
fn p5_the_loss_in_pieces_of_rows_is_that_of_all() {
    let families = cpu::Family::ALL.into_iter().filter(|f| f.is_available());
    for family in families {
        for (arch, format) in [
            ("llama", TensorType::F32),
            ("llama", TensorType::F16),
            ("qwen3moe", TensorType::Q8_0),
            ("llama", TensorType::Q4_0),
            ("gemma3", TensorType::Q6K),
        ] {
            let model = loaded(&Toy { layers: 1, ..Toy::new(arch, format, 7) }, Some(family));
            let head = "output.weight";
            let has_head = model.projections().contains_key(head);
            let parameters = adapted(&model, if has_head { "all,head" } else { "all" });
            let window = window(|i| i % 3 != 1);
            let of = |piece: usize| {
                let mut gradients = gradients(&model, 64, 0, 0);
                gradients.piece = piece;
                let measured = gradients.of(&window, 43.0, &parameters, &()).unwrap();
                let (taken, high) = gradients.arena();
                assert_eq!((taken, high), (gradients.planned_bytes(), taken));
                measured
            };
            let whole = of(64);
            assert!(whole.grads.values().all(|g| g.iter().any(|&g| g != 0.0)));
            for piece in [1, 7, 16, 63] {
                let pieces = of(piece);
                let name = format!("{arch} {format:?} {family:?} by {piece}");
                assert_eq!(pieces.loss.to_bits(), whole.loss.to_bits(), "{name}");
                for ((tensor, got), expected) in pieces.grads.iter().zip(whole.grads.values()) {
                    if !tensor.contains(head) {
                        assert!(got == expected, "{name}: {tensor}");
                        continue;
                    }
                    let norm = expected.iter().map(|x| x * x).sum::<f32>().sqrt();
                    let off = got.iter().zip(expected).map(|(a, b)| (a - b).powi(2));
                    assert!(off.sum::<f32>().sqrt() <= 1e-6 * norm, "{name}: {tensor}");
                }
            }
        }
    }
}
