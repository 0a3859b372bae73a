//! Hyper-parameters of hybrids that cannot be are refused by file and key, before anything is
//! allocated for them.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may panic

use std::sync::Arc;

use gguf::{Array, Gguf, Metadata, Value};
use model::Model;
use testkit::fixture;

/// Loads a fixture with one key changed, or without it: what the error says.
fn error(arch: &str, key: &str, value: Option<Value>) -> String {
    let file = Gguf::open(fixture(arch, "model.gguf")).unwrap();
    let mut metadata = Metadata::new();
    for (name, old) in file.metadata().iter().filter(|(name, _)| *name != key) {
        metadata.insert(name, old.clone());
    }
    if let Some(value) = value {
        metadata.insert(key, value);
    }
    let tensors = file.tensors().map(|t| (t.info.clone(), t.bytes.to_vec().into()));
    let tensors: Vec<_> = tensors.collect();
    let bytes = gguf::encode(&metadata, tensors).unwrap();
    let file = Gguf::from_bytes("m.gguf", bytes).unwrap();
    match Model::from_gguf(file, Arc::new(reference::Reference)) {
        Ok(_) => panic!("{key} was accepted"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn hyper_parameters_are_refused_by_file_and_key() {
    let u32s = |list: &[u32]| list.iter().map(|&n| Some(Value::U32(n))).collect::<Vec<_>>();
    let huge = u32s(&[0, 1 << 24, u32::MAX]);
    let mut cases: Vec<(&str, &str, Vec<Option<Value>>)> = Vec::new();
    for key in ["inner_size", "state_size", "group_count", "time_step_rank", "conv_kernel"] {
        let key: &str = format!("qwen35.ssm.{key}").leak();
        cases.push(("qwen3_5", key, [vec![None], huge.clone()].concat()));
    }
    cases.push(("qwen3_5", "qwen35.ssm.conv_kernel", u32s(&[1, 65])));
    cases.push(("qwen3_5", "qwen35.ssm.group_count", u32s(&[3, 8])));
    cases.push(("qwen3_5", "qwen35.ssm.time_step_rank", u32s(&[3])));
    cases.push(("qwen3_5", "qwen35.attention.value_length", u32s(&[1, 16])));
    cases.push(("qwen3_5", "qwen35.nextn_predict_layers", u32s(&[4, 5, u32::MAX])));
    cases.push(("qwen3_5", "qwen35.expert_count", u32s(&[4])));
    let flags = "qwen35.attention.recurrent_layers";
    let list = |n| Some(Value::Array(Array::Bool(vec![true; n])));
    cases.push(("qwen3_5", flags, vec![list(0), list(3), list(5), Some(Value::U32(4))]));
    for key in ["expert_count", "expert_used_count", "expert_shared_feed_forward_length"] {
        let key: &str = format!("qwen35moe.{key}").leak();
        cases.push(("qwen3_5_moe", key, [vec![None], u32s(&[0, u32::MAX])].concat()));
    }
    for (arch, key, values) in cases {
        for value in values {
            let what = format!("{value:?}");
            let error = error(arch, key, value);
            // A number that could be is refused by the tensor that is of another shape.
            let named = error.contains(key) || error.contains("tensor `blk.");
            assert!(error.contains("m.gguf") && named, "{key} {what}: {error}");
            assert!(!error.contains('\n') && error.len() < 300, "{key} {what}: {error}");
        }
    }
    // All layers recurrent: the fixture's last one lacks a delta net.
    let error = error("qwen3_5", flags, list(4));
    assert!(error.contains("blk.3.attn_qkv.weight"), "{error}");
}
