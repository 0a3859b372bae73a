//! Chat templates against Python's Jinja2, set up as Hugging Face does it.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use text::{ChatTemplate, Message, SpecialTokens};

/// 2024-07-26 09:05:03, the clock of the goldens.
const NOW: i64 = 1_721_984_703;

fn source(name: &str) -> String {
    if !name.ends_with(".jinja") {
        return name.to_owned();
    }
    let ours = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/template").join(name);
    let theirs = common::testdata("templates").join(name);
    std::fs::read_to_string(theirs).or_else(|_| std::fs::read_to_string(ours)).unwrap()
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let tokens = SpecialTokens {
        bos: "<s>".into(),
        eos: "</s>".into(),
        unknown: "<unk>".into(),
        pad: String::new(),
    };
    let goldens = String::from_utf8(common::gunzip("templates.jsonl.gz")).unwrap();
    let goldens = common::json_lines(&goldens);
    let mut wrong = Vec::new();
    for golden in &goldens {
        let name = golden["source"].as_str().unwrap();
        let messages: Vec<Message> = serde_json::from_value(golden["messages"].clone()).unwrap();
        let tools = golden["tools"].as_array().unwrap();
        let generate = golden["generate"].as_bool().unwrap();
        let got = ChatTemplate::parse("golden", &source(name), tokens.clone())
            .and_then(|template| template.with_time(NOW).render(&messages, tools, generate));
        let same = match (&got, golden["text"].as_str()) {
            (Ok(got), Some(text)) => got == text,
            (Err(error), None) => !error.to_string().contains('\n'),
            _ => false,
        };
        if !same {
            wrong.push(format!("{name}\n  got  {got:?}\n  want {:?}", golden["text"]));
        }
    }
    assert!(goldens.len() > 400);
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), goldens.len(), wrong.join("\n"));
}
