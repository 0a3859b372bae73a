//! Goldens of `testdata/text`, which `make_goldens.py` there writes.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;
use text::{Encode, Tokenizer};

pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/text").join(name)
}

pub fn gunzip(name: &str) -> Vec<u8> {
    let file = std::fs::File::open(testdata(name)).unwrap();
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

/// The JSON values of a file, one a line.
pub fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The lines that every golden is about.
pub fn lines() -> Vec<String> {
    let text = std::fs::read_to_string(testdata("lines.jsonl")).unwrap();
    json_lines(&text).iter().map(|line| line.as_str().unwrap().to_owned()).collect()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// FNV-1a, 64 bits.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

/// Compares a tokenizer with what llama.cpp said about the same vocabulary.
pub fn check(tokenizer: &Tokenizer, golden: &str) {
    let text = String::from_utf8(gunzip(golden)).unwrap();
    let golden = json_lines(&text);
    let (about, golden) = golden.split_first().unwrap();
    let number = |key: &str| about[key].as_u64().map(|n| n as u32);

    assert_eq!(tokenizer.vocab_size() as u32, number("tokens").unwrap());
    assert_eq!(tokenizer.bos(), number("bos"));
    assert_eq!(tokenizer.eos(), number("eos"));
    assert_eq!(tokenizer.adds_bos(), about["add_bos"]);
    assert_eq!(tokenizer.adds_eos(), about["add_eos"]);
    assert_eq!(tokenizer.eog_ids(), ids(&about["eog"]));
    let size = tokenizer.vocab_size() as u32;
    let control: Vec<u32> = (0..size).filter(|&id| tokenizer.is_control(id)).collect();
    let mut expected = ids(&about["control"]);
    // llama.cpp hides the unknown token as it does control tokens, and lists it apart.
    expected.extend(tokenizer.unknown().filter(|id| control.contains(id)));
    expected.sort_unstable();
    expected.dedup();
    assert_eq!(control, expected);
    for (special, expected) in [false, true].into_iter().zip(about["pieces"].as_array().unwrap()) {
        let hash = (0..size).fold(0xcbf2_9ce4_8422_2325, |hash, id| {
            let bytes = tokenizer.token_bytes(id, special).unwrap();
            fnv(fnv(hash, &(bytes.len() as u32).to_le_bytes()), bytes)
        });
        assert_eq!(format!("{hash:016x}"), *expected, "texts of tokens, special = {special}");
    }

    let lines = lines();
    assert!(lines.len() >= 2000);
    assert_eq!(lines.len(), golden.len());
    let mut with_control = 0;
    for (line, golden) in lines.iter().zip(golden) {
        for parse_special in [false, true] {
            let options = Encode { parse_special, ..Encode::TEXT };
            let golden = golden.get(usize::from(parse_special)).unwrap_or(&golden[0]);
            let pieces = tokenizer.encode_pieces(line, options).unwrap();
            let got: Vec<u32> = pieces.iter().map(|piece| piece.id).collect();
            assert_eq!(got, ids(golden), "{line:?}, parse_special = {parse_special}");
            check_places(tokenizer, line, &pieces);
        }
        with_control += usize::from(golden.as_array().unwrap().len() == 2);
    }
    assert!(with_control > 100, "{with_control}");
}

/// Each token begins where the text has what it renders.
fn check_places(tokenizer: &Tokenizer, line: &str, pieces: &[text::Piece]) {
    let mut before = 0;
    for piece in pieces {
        assert!(piece.start >= before && piece.start as usize <= line.len(), "{line:?}");
        before = piece.start;
        let rest = &line.as_bytes()[piece.start as usize..];
        let bytes = tokenizer.token_bytes(piece.id, true).unwrap();
        // A byte of a character stands at the start of that character.
        // SentencePiece's mark for a space renders as a space, wherever it came from.
        let marked = rest.starts_with("▁".as_bytes()) && bytes.starts_with(b" ");
        let same = rest.starts_with(bytes) || bytes.len() == 1 || marked;
        assert!(same, "{line:?} {piece:?} {bytes:?}");
    }
}
