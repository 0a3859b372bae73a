//! Files that hold layers for multi-token prediction after the model's own.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value};
use graph::DType;
use model::{Engine, EngineConfig, Model, Rows, WantLogits};
use testkit::fixture;

/// The fixture with a tail as llama.cpp's converter writes it: a layer of attention, and what feeds
/// it; `extra` is one more tensor.
fn with_tail(arch: &str, flags: bool, extra: Option<&str>) -> model::Result<Model> {
    let file = Gguf::open(fixture(arch, "model.gguf")).unwrap();
    let key =
        |name: &str| format!("{}.{name}", file.metadata().str("general.architecture").unwrap());
    let mut metadata = Metadata::new();
    let old = key("attention.recurrent_layers");
    for (name, value) in file.metadata().iter().filter(|(name, _)| *name != old) {
        metadata.insert(name, value.clone());
    }
    metadata.insert(key("block_count"), Value::U32(5));
    metadata.insert(key("nextn_predict_layers"), Value::U32(1));
    if flags {
        let recurrent = vec![true, true, true, false, false];
        metadata.insert(old, Value::Array(Array::Bool(recurrent)));
    }
    let mut tensors: Vec<_> =
        file.tensors().map(|t| (t.info.clone(), t.bytes.to_vec().into())).collect();
    for tensor in file.tensors().filter(|t| t.info.name.starts_with("blk.3.")) {
        let name = tensor.info.name.replace("blk.3.", "blk.4.");
        let info = TensorInfo::new(name, tensor.info.ty, &tensor.info.shape).unwrap();
        tensors.push((info, tensor.bytes.to_vec().into()));
    }
    let more = ["nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.shared_head_norm.weight"];
    for name in more.iter().map(|name| format!("blk.4.{name}")).chain(extra.map(String::from)) {
        let info = TensorInfo::new(name, TensorType::F32, &[32]).unwrap();
        tensors.push((info, vec![0x7f; 128].into()));
    }
    let bytes = gguf::encode(&metadata, tensors).unwrap();
    Model::from_gguf(
        Gguf::from_bytes("m.gguf", bytes).unwrap(),
        Arc::new(cpu::Cpu::new(1, None).unwrap()),
    )
}

fn logits(model: Model) -> Vec<u32> {
    let config = EngineConfig { cache: DType::F32, positions: 64, batch: 64, states: 2 };
    let mut engine = Engine::new(Arc::new(model), config).unwrap();
    let seq = engine.cache().open();
    let rows = Rows { seq, tokens: &[5, 9, 77, 3, 12], adapter: None, want: WantLogits::All };
    let logits = engine.forward(&[rows]).unwrap();
    logits[0].iter().map(|x| x.to_bits()).collect()
}

#[test]
fn layers_that_draft_are_left_alone() {
    for arch in ["qwen3_5", "qwen3_5_moe"] {
        let device = Arc::new(cpu::Cpu::new(1, None).unwrap());
        let plain = logits(Model::load(&fixture(arch, "model.gguf"), device).unwrap());
        for flags in [false, true] {
            let model = with_tail(arch, flags, None).unwrap();
            assert_eq!((model.geometry().layers, model.geometry().draft_layers), (4, 1));
            assert!(model.weights().get("blk.4.attn_q.weight").is_none(), "{arch}: it is loaded");
            assert!(model.weights().get("blk.3.attn_q.weight").is_some());
            assert!(logits(model) == plain, "{arch}, flags {flags}: other logits");
        }
        for stray in ["blk.5.attn_q.weight", "blk.3.nextn.eh_proj.weight", "nextn.weight"] {
            let error = with_tail(arch, false, Some(stray)).err().unwrap().to_string();
            assert!(error.contains(stray) && error.contains("not part"), "{error}");
        }
    }
}
