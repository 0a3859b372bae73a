//! What the names of targets stand for.
#![allow(clippy::unwrap_used)] // helpers of tests may panic

use std::sync::Arc;

use gguf::TensorType;
use model::Model;
use model::toy::Toy;

fn toy(arch: &'static str) -> Model {
    let device = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let bytes = Toy::new(arch, TensorType::F32, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn kinds(model: &Model, name: &str) -> Vec<String> {
    let chosen = train::select_targets(model, &[name.to_string()]).unwrap();
    let kind = |name: &String| name.split('.').nth(2).map(String::from);
    let mut kinds: Vec<String> = chosen.iter().filter_map(kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// A projection's own name is that one, whatever other names it is a part of.
#[test]
fn a_name_is_a_kind_a_projection_or_part_of_names_in_this_order() {
    let moe = toy("qwen3moe");
    for (name, expected) in [
        ("ffn_gate_exps", &["ffn_gate_exps"][..]),
        ("ffn_gate_inp", &["ffn_gate_inp"]),
        ("ffn_gate", &["ffn_gate_exps", "ffn_gate_inp"]),
        ("router", &["ffn_gate_inp"]),
        ("experts", &["ffn_down_exps", "ffn_gate_exps", "ffn_up_exps"]),
        // As PEFT calls them.
        ("gate_proj", &["ffn_gate_exps"]),
        ("gate", &["ffn_gate_inp"]),
        ("q_proj", &["attn_q"]),
        ("attn_q", &["attn_q"]),
        ("attn", &["attn_k", "attn_output", "attn_q", "attn_v"]),
    ] {
        assert_eq!(kinds(&moe, name), expected, "{name}");
    }
    let hybrid = toy("qwen35");
    assert_eq!(kinds(&hybrid, "attn_q"), ["attn_q"]);
    assert_eq!(kinds(&hybrid, "in_proj_qkv"), ["attn_qkv"]);
    assert_eq!(kinds(&hybrid, "attn_q"), kinds(&hybrid, "q_proj"));
    let of_layer = train::select_targets(&moe, &["blk.1.".into()]).unwrap();
    assert!(of_layer.len() > 4 && of_layer.iter().all(|name| name.starts_with("blk.1.")));
    let error = train::select_targets(&moe, &["k_prj".into()]).unwrap_err().to_string();
    assert!(error.starts_with("target `k_prj` is no projection; candidates: all, "), "{error}");
}

/// An empty name is a part of every name: of `attn_q,` the second would adapt everything.
#[test]
fn an_empty_name_stands_for_nothing() {
    let model = toy("llama");
    for names in [&["attn_q", ""][..], &[""], &[" "]] {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        let targets = train::select_targets(&model, &names).unwrap_err().to_string();
        assert!(targets.contains("an empty name among the targets"), "{targets}");
        let weights = train::select_weights(&model, &names).unwrap_err().to_string();
        assert!(weights.contains("an empty name among the weights"), "{weights}");
    }
}
