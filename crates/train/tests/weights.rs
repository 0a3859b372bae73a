//! A model's own tensors, trained: every one of a float model, none of a quantized one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // helpers of tests may panic

use std::path::PathBuf;
use std::sync::Arc;

use gguf::TensorType;
use graph::{Code, DType};
use model::Model;
use model::toy::Toy;
use testkit::{Random, fixture};
use train::{
    Example, GraphConfig, Schedule, TrainConfig, Trainer, select_targets, select_weights,
    write_weights,
};

fn examples() -> Vec<Example> {
    let mut random = Random::new(5);
    let mut example = |n: usize| Example {
        tokens: (0..n).map(|_| random.below(300) as u32).collect(),
        weights: vec![1.0; n],
    };
    [19, 33, 50, 12].into_iter().map(&mut example).collect()
}

fn config(model: &Model, targets: &[&str], weights: &[&str]) -> TrainConfig {
    let owned = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
    TrainConfig {
        targets: select_targets(model, &owned(targets)).unwrap(),
        weights: select_weights(model, &owned(weights)).unwrap(),
        rank: 4,
        alpha: 8.0,
        lr: 1e-3,
        schedule: Schedule::Constant,
        warmup: 0,
        weight_decay: 0.0,
        epochs: 3,
        accumulate: 1,
        clip: 1.0,
        seed: 3,
        graph: GraphConfig { rows: 64, cache: DType::F32, ..GraphConfig::default() },
        ..TrainConfig::default()
    }
}

fn cpu() -> Arc<cpu::Cpu> {
    Arc::new(cpu::Cpu::new(2, None).unwrap())
}

/// The file a fixture or toy would be, and the model loaded from it.
fn written(name: &str, bytes: &[u8]) -> (PathBuf, Model) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.gguf"));
    std::fs::write(&path, bytes).unwrap();
    let model = Model::load(&path, cpu()).unwrap();
    (path, model)
}

fn losses(model: &Model, config: TrainConfig) -> (train::Outcome, Vec<f64>) {
    let mut losses = Vec::new();
    let outcome = Trainer::new(model, config).unwrap().run(&examples(), &mut |event| {
        if let train::Event::Epoch { loss, .. } = event {
            losses.push(loss);
        }
        true
    });
    (outcome.unwrap(), losses)
}

#[test]
fn every_weight_of_a_float_model_trains_and_the_file_it_makes_is_that_model() {
    let fixtures = ["llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"];
    let read = |arch: &str| std::fs::read(fixture(arch, "model.gguf")).unwrap();
    let mut all: Vec<(String, Vec<u8>)> =
        fixtures.iter().map(|arch| (arch.to_string(), read(arch))).collect();
    for ty in [TensorType::F16, TensorType::BF16] {
        all.push((format!("llama {ty}"), Toy::new("llama", ty, 3).gguf().unwrap()));
    }
    for (name, bytes) in all {
        let (_, model) = written(&name, &bytes);
        let (outcome, losses) = losses(&model, config(&model, &[], &["all"]));
        assert!(losses[2] < losses[0], "{name}: {losses:?}");
        assert!(outcome.adapter.tensors.is_empty());
        for (tensor, weight) in model.weights().iter() {
            let before = model.read_f32(tensor).unwrap();
            let after = &outcome.weights[tensor];
            assert_eq!(weight.shape.elements(), after.len());
            // Frequency factors are told no gradient; everything else moves.
            assert!(before != *after, "{name}: `{tensor}` has not moved");
        }
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name} trained.gguf"));
        write_weights(&path, &model, &outcome.weights).unwrap();
        let trained = Model::load(&path, cpu()).unwrap();
        for (tensor, _) in model.weights().iter() {
            let (read, kept) = (trained.read_f32(tensor).unwrap(), &outcome.weights[tensor]);
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() / 128.0 + 1e-6;
            assert!(read.iter().zip(kept).all(close), "{name}: `{tensor}`");
        }
        // What it learned it keeps: the loss begins where the other's ended.
        let (_, again) = self::losses(&trained, config(&trained, &[], &["all"]));
        assert!(again[0] < losses[1], "{name}: {losses:?}, then {again:?}");
    }
}

/// The file that a split model is trained into is one, and a file like any other.
#[test]
fn a_model_in_parts_is_trained_into_one_file() {
    let bytes = Toy::new("llama", TensorType::F16, 3).gguf().unwrap();
    let whole = gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let path = |no: usize| folder.join(format!("parts-{no:05}-of-00002.gguf"));
    let tensors: Vec<gguf::Tensor<'_>> = whole.tensors().collect();
    for (no, part) in tensors.chunks(tensors.len().div_ceil(2)).enumerate() {
        let mut metadata = match no {
            0 => whole.metadata().whole(),
            _ => gguf::Metadata::new(),
        };
        metadata.insert("general.file_type", gguf::Value::U32(1));
        metadata.insert("split.no", gguf::Value::U16(no as u16));
        metadata.insert("split.count", gguf::Value::U16(2));
        metadata.insert("split.tensors.count", gguf::Value::I32(tensors.len() as i32));
        let infos = part.iter().map(|t| t.info.clone()).collect();
        let mut writer = gguf::Writer::create(path(no + 1), &metadata, infos).unwrap();
        part.iter().for_each(|t| writer.tensor(t.bytes).unwrap());
        writer.finish().unwrap();
    }
    let model = Model::load(&path(1), cpu()).unwrap();
    let (outcome, _) = losses(&model, config(&model, &[], &["norm"]));
    for part in [path(1), path(2)] {
        let error = write_weights(&part, &model, &outcome.weights).unwrap_err().to_string();
        assert!(error.contains("is the model itself"), "{error}");
    }
    let out = folder.join("parts trained.gguf");
    write_weights(&out, &model, &outcome.weights).unwrap();
    let trained = Model::load(&out, cpu()).unwrap();
    for (tensor, values) in &outcome.weights {
        assert!(trained.read_f32(tensor).unwrap() == *values, "{tensor}");
    }
    // So is the one that an adapter is merged into.
    let (outcome, _) = losses(&model, config(&model, &["attn"], &[]));
    let skeleton = model::Skeleton::open(&path(1)).unwrap();
    let config = model::MergeConfig {
        ty: Some(TensorType::F32),
        force: false,
        name: "parts".into(),
        threads: 1,
    };
    let (mut shown, mut total) = (Vec::new(), 0);
    model::merge(&skeleton, &outcome.adapter, &out, &config, &mut |done, of| {
        shown.push(done);
        total = of;
    })
    .unwrap();
    // What is told of is bytes of the result, which is of another type.
    assert!(shown.windows(2).all(|pair| pair[0] <= pair[1]), "{shown:?}");
    assert_eq!(shown[shown.len() - 2..], [total, total]);
    let merged = gguf::Gguf::open(&out).unwrap();
    assert_eq!(merged.tensors().map(|t| t.bytes.len() as u64).sum::<u64>(), total);
    assert!(!merged.metadata().contains("general.file_type"));
    Model::load(&out, cpu()).unwrap();
}

#[test]
fn norms_train_beside_an_adapter_of_a_quantized_model() {
    let bytes = Toy::new("llama", TensorType::Q4_1, 3).gguf().unwrap();
    let (_, model) = written("norms", &bytes);
    let (outcome, losses) = losses(&model, config(&model, &["attn"], &["norm"]));
    assert!(losses[2] < losses[0]);
    assert_eq!(outcome.moved.0, outcome.moved.1);
    assert_eq!(outcome.weights.len(), 5);
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("norms trained.gguf");
    write_weights(&path, &model, &outcome.weights).unwrap();
    let trained = Model::load(&path, cpu()).unwrap();
    for (tensor, values) in &outcome.weights {
        assert!(trained.read_f32(tensor).unwrap() == *values, "{tensor}");
    }
}

/// Rounded to bf16 a small step is none: what would go back to what it was is kept in f32.
#[test]
fn what_rounding_would_take_back_is_written_in_f32() {
    let bytes = Toy::new("llama", TensorType::BF16, 3).gguf().unwrap();
    let (path, model) = written("small steps", &bytes);
    let out = path.with_extension("trained.gguf");
    let train = |lr: f32, name: &str| {
        let weights = TrainConfig { lr, ..config(&model, &[], &[name]) };
        let (outcome, _) = losses(&model, weights);
        let written = write_weights(&out, &model, &outcome.weights).unwrap();
        (outcome.weights, written)
    };
    let (values, written) = train(1e-6, "attn_q");
    let trained = Model::load(&out, cpu()).unwrap();
    assert_eq!(written.len(), values.len());
    for tensor in written {
        assert_eq!((tensor.from, tensor.to), (TensorType::BF16, TensorType::F32), "{tensor:?}");
        assert!(tensor.moved > 1000 && 2 * tensor.kept < tensor.moved, "{tensor:?}");
        assert!(trained.read_f32(&tensor.name).unwrap() == values[&tensor.name], "{tensor:?}");
    }
    // Large steps are kept in the model's type, and f32 loses nothing.
    let (_, written) = train(0.1, "attn_q");
    for tensor in written {
        assert_eq!(tensor.to, TensorType::BF16, "{tensor:?}");
        assert!(2 * tensor.kept >= tensor.moved, "{tensor:?}");
    }
    let (_, written) = train(1e-6, "norm");
    assert!(written.iter().all(|t| t.to == TensorType::F32 && t.kept == t.moved && t.moved > 0));
}

#[test]
fn a_quantized_weight_is_refused_naming_op_node_and_operand() {
    let bytes = Toy::new("llama", TensorType::Q4_1, 3).gguf().unwrap();
    let (path, model) = written("quantized", &bytes);
    let error = Trainer::new(&model, config(&model, &[], &["all"])).err().unwrap();
    let train::Error::Model(model::Error::Graph(graph::Error::Refusal(refusal))) = error else {
        panic!("{error}");
    };
    assert_eq!(refusal.code, Code::OpNotDifferentiable);
    assert!(refusal.operand.as_ref().unwrap().contains("token_embd.weight"), "{refusal}");
    let odd = select_weights(&model, &["nothing".into()]).unwrap_err();
    assert!(odd.to_string().contains("`nothing`"), "{odd}");
    // Nor is it overwritten.
    let weights = [("output_norm.weight".to_string(), vec![1.0; 3])].into();
    let error =
        write_weights(&path.with_extension("trained"), &model, &weights).unwrap_err().to_string();
    assert!(error.contains("output_norm.weight") && error.contains("3 floats"), "{error}");
    assert!(std::fs::read(&path).unwrap() == bytes);
}
