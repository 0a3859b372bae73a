//! Toys: every architecture has one, which loads and runs in every format.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

mod common;

use std::sync::Arc;

use gguf::TensorType;
use model::Model;
use model::arch::ARCHITECTURES;
use model::toy::Toy;

fn load(toy: &Toy) -> Arc<Model> {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    Arc::new(Model::from_gguf(file, device).unwrap())
}

#[test]
fn every_architecture_has_a_toy_in_every_format() {
    for (arch, _) in ARCHITECTURES {
        for format in TensorType::ALL.into_iter().filter(|ty| *ty != TensorType::I32) {
            let model = load(&Toy::new(arch, format, 1));
            let tokens = common::tokens(1, 20);
            common::cold(&model, &tokens, None);
            let projections = model.projections();
            assert!(projections.len() >= 14, "{arch}: {} projections", projections.len());
        }
    }
}

#[test]
fn a_toy_follows_from_its_fields() {
    let toy = Toy::new("qwen3moe", TensorType::Q5K, 1);
    assert!(toy.gguf().unwrap() == toy.gguf().unwrap());
    assert!(toy.gguf().unwrap() != Toy { seed: 2, ..toy.clone() }.gguf().unwrap());
    let other = Toy { layers: 3, experts: 5, experts_used: 5, heads: 8, context: 77, ..toy };
    let model = load(&other);
    let geometry = model.geometry();
    assert_eq!((geometry.layers, geometry.context, geometry.key_width), (3, 77, 32));
    let stack = model.projections()["blk.2.ffn_up_exps.weight"];
    assert_eq!((stack.experts, stack.out, stack.width), (Some(5), 256, 256));
}

#[test]
fn a_toy_has_a_tokenizer_and_a_chat_template() {
    let model = load(&Toy::new("llama", TensorType::Q8_0, 1));
    let text = "the \u{e9}tude, in 2024: \u{1f600}";
    let options = text::Encode { add_bos: false, add_eos: false, parse_special: false };
    let ids = model.tokenizer().encode(text, options).unwrap();
    assert!(ids.len() < text.len(), "nothing was merged");
    assert_eq!(model.tokenizer().decode(&ids, false).unwrap(), text);
    let messages = [text::Message::new("user", "hi"), text::Message::new("assistant", "ho")];
    let shown = model.template().unwrap().render(&messages, &[], false).unwrap();
    assert_eq!(shown, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n");
    // The control tokens are single ones, and the answer carries loss.
    let made = text::conversation(
        model.tokenizer(),
        model.template().unwrap(),
        &messages,
        &[],
        &text::Effort::default(),
    );
    let made = made.unwrap();
    assert_eq!(made.ids.iter().filter(|&&id| id == 2).count(), 2);
    assert!(made.weights.contains(&0.0) && made.weights.contains(&1.0));
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_field() {
    let toy = Toy::new("llama", TensorType::Q4K, 1);
    let says = |toy: &Toy, part: &str| {
        let error = toy.gguf().unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    };
    says(&Toy { width: 96, ..toy.clone() }, "`token_embd.weight` have 96 elements");
    says(&Toy { ffn: 300, ..toy.clone() }, "`blk.0.ffn_down.weight` have 300 elements");
    says(&Toy { heads: 0, ..toy.clone() }, "`heads` is 0");
    says(&Toy { heads: 3, ..toy.clone() }, "`width` is 256");
    says(&Toy { kv_heads: 3, ..toy.clone() }, "`kv_heads` is 3");
    says(&Toy { experts: 2, experts_used: 3, ..toy.clone() }, "`experts_used` is 3");
    says(&Toy { arch: "qwen2".into(), experts: 2, ..toy.clone() }, "`qwen2` has no experts");
    says(&Toy { arch: "qwen3moe".into(), ..toy.clone() }, "`qwen3moe` has experts");
    says(&Toy { arch: "gpt5".into(), ..toy }, "no toys of architecture `gpt5`");
}
