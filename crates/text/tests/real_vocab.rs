//! The vocabularies of the catalogue's models against llama.cpp.
//!
//! Part of the real-model suite: needs `--features real-models` and the models under
//! `$GRADUS_HOME/models`, and fails where one is missing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests
#![cfg(feature = "real-models")]

mod common;

use text::Tokenizer;

fn check(file: &str, golden: &str) {
    let home = std::env::var_os("GRADUS_HOME").expect("GRADUS_HOME is not set");
    let path = std::path::Path::new(&home).join("models").join(file);
    let file = gguf::Gguf::open(&path).unwrap_or_else(|e| panic!("{e}; run `gradus pull` first"));
    common::check(&Tokenizer::from_metadata(file.metadata()).unwrap(), golden);
}

#[test]
fn smollm2_gives_llama_cpps_ids() {
    check("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2.tokens.jsonl.gz");
}

#[test]
fn gemma3_gives_llama_cpps_ids() {
    check("gemma-3-270m-q4_k_m.gguf", "gemma3.tokens.jsonl.gz");
}

#[test]
fn qwen2_5_gives_llama_cpps_ids() {
    check("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5.tokens.jsonl.gz");
}
