//! A real vocabulary against llama.cpp, from what the repository holds.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use std::sync::OnceLock;

use text::{Encode, Tokenizer};

fn smollm2() -> &'static gguf::Gguf {
    static FILE: OnceLock<gguf::Gguf> = OnceLock::new();
    FILE.get_or_init(|| {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("smollm2.vocab.gguf");
        std::fs::write(&path, common::gunzip("smollm2.vocab.gguf.gz")).unwrap();
        gguf::Gguf::open(&path).unwrap()
    })
}

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::from_metadata(smollm2().metadata()).unwrap())
}

#[test]
fn smollm2_gives_llama_cpps_ids() {
    common::check(tokenizer(), "smollm2.tokens.jsonl.gz");
}

#[test]
fn every_pre_tokenizer_gives_llama_cpps_ids() {
    let text = String::from_utf8(common::gunzip("pre.jsonl.gz")).unwrap();
    let lines = common::lines();
    let mut seen = 0;
    for golden in common::json_lines(&text) {
        let name = golden[0].as_str().unwrap();
        let mut metadata = smollm2().metadata().clone();
        metadata.insert("tokenizer.ggml.pre", name);
        let tokenizer = Tokenizer::from_metadata(&metadata).unwrap();
        for (line, golden) in lines.iter().step_by(7).zip(golden[1].as_array().unwrap()) {
            let got = tokenizer.encode(line, Encode::TEXT).unwrap();
            assert_eq!(got, common::ids(golden), "{name}: {line:?}");
            seen += 1;
        }
    }
    assert!(seen > 4000, "{seen}");
}

#[test]
fn a_text_comes_back() {
    let tokenizer = tokenizer();
    // This vocabulary lacks tokens for some bytes that no valid text has, and for a few others.
    let mut known = [false; 256];
    for id in 0..tokenizer.vocab_size() as u32 {
        if let [byte] = tokenizer.token_bytes(id, false).unwrap() {
            known[usize::from(*byte)] = true;
        }
    }
    let mut whole = 0;
    for line in common::lines() {
        for parse_special in [false, true] {
            let options = Encode { parse_special, ..Encode::TEXT };
            let ids = tokenizer.encode(&line, options).unwrap();
            let bytes: Vec<u8> = ids
                .iter()
                .flat_map(|&id| tokenizer.token_bytes(id, true).unwrap())
                .copied()
                .collect();
            let expected: Vec<u8> = line.bytes().filter(|b| known[usize::from(*b)]).collect();
            assert_eq!(bytes, expected, "{line:?}");
            if expected.len() == line.len() {
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), line);
                whole += 1;
            }
        }
    }
    assert!(whole > 4000, "{whole}");
}
