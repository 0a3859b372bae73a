//! What is trained on, token by token, and that it is what is served.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use common::{Folder, Random, marked, renderer, smollm2, templates, testdata};
use data::{Content, Example, Fit, LossOn, Options, Reason, Renderer, Room, Window, pack};
use serde_json::json;
use text::{ChatTemplate, Message, SpecialTokens};

fn chat(list: &[(&str, &str)]) -> Content {
    let messages = list.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    Content::Chat { messages, tools: Vec::new() }
}

/// Leaves out the reasoning of all turns but the last, as Qwen3 and DeepSeek-R1 do.
fn qwen3() -> ChatTemplate {
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
        {% if m.role == 'assistant' and not loop.last %}\
        {{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}\
        <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    ChatTemplate::parse("qwen3-like", source, SpecialTokens::of(smollm2())).unwrap()
}

/// f40: per template, which tokens are trained.
#[test]
fn f40_masks_are_golden() {
    let two = chat(&[
        ("system", "Be brief."),
        ("user", "2 + 2?"),
        ("assistant", "<think>easy</think>\n4."),
        ("user", "Sure?"),
        ("assistant", "<think>hm</think>\nYes!"),
    ]);
    let mut weighted = two.clone();
    if let Content::Chat { messages, .. } = &mut weighted {
        messages[2].train = false;
        messages[4].weight = 0.5;
    }
    let mut got = String::new();
    let mut all = templates();
    all.push(("qwen3-like".into(), qwen3()));
    for (name, template) in &all {
        for (what, content, loss_on) in [
            ("two turns", &two, LossOn::Assistant),
            ("the first as context, the second of weight 0.5", &weighted, LossOn::Assistant),
            ("loss on all", &two, LossOn::All),
        ] {
            let options = Options { loss_on, ..Options::default() };
            got += &format!("== {name}: {what}\n");
            got += &match renderer(template, &options).examples(content) {
                Ok(rendered) => format!("{}\n", marked(&rendered.examples[0])),
                Err(bad) => format!("{}: {bad}\n", bad.reason),
            };
        }
    }
    let path = testdata("data/masks.txt");
    if std::env::var_os("UPDATE_MASKS").is_some() {
        std::fs::write(&path, &got).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    assert_eq!(got, golden, "UPDATE_MASKS=1 writes what is there now");
}

/// A conversation of made-up turns.
fn random_chat(random: &mut Random) -> Vec<Message> {
    const WORDS: [&str; 14] = [
        "yes",
        " ",
        "\n",
        "é",
        "😀",
        "42",
        "<|im_end|>",
        "User:",
        "the",
        ".",
        "  two",
        "</s>",
        "[x]",
        "ab",
    ];
    let mut said = |most: usize| {
        let words: String = (0..1 + random.below(most)).map(|_| WORDS[random.below(14)]).collect();
        format!("q{words}z")
    };
    let mut messages = Vec::new();
    if said(2).len() % 2 == 0 {
        messages.push(Message::new("system", said(4)));
    }
    for _ in 0..1 + said(6).len() % 3 {
        messages.push(Message::new("user", said(8)));
        messages.push(Message::new("assistant", said(8)));
    }
    messages
}

/// f45: the tokens of a conversation are those that serving makes of the same messages, for every
/// template there is; and what is trained is what the assistant says, to the end of its turn.
#[test]
fn f45_the_tokens_trained_on_are_the_tokens_served() {
    let tokenizer = smollm2();
    let mut random = Random(3);
    let mut checked = 0;
    let mut all = templates();
    all.push(("qwen3-like".into(), qwen3()));
    for (name, template) in &all {
        for _ in 0..25 {
            let messages = random_chat(&mut random);
            let content = Content::Chat { messages: messages.clone(), tools: Vec::new() };
            let options = Options::default();
            let rendered = renderer(template, &options).examples(&content).unwrap();
            let [example] = rendered.examples.as_slice() else { panic!() };
            let whole = template.render(&messages, &[], false).unwrap();
            assert_eq!(example.tokens, text::encode_prompt(tokenizer, &whole).unwrap(), "{name}");
            // Every answer is in what is trained, and nothing that others say is.
            let said = |weight: bool| {
                let ids: Vec<u32> = example
                    .tokens
                    .iter()
                    .zip(&example.weights)
                    .filter(|(_, w)| (**w != 0.0) == weight)
                    .map(|(&id, _)| id)
                    .collect();
                tokenizer.decode(&ids, true).unwrap()
            };
            let (trained, context) = (said(true), said(false));
            let mut rest = trained.as_str();
            for message in &messages {
                let text = message.text(0).unwrap().unwrap();
                if message.role == "assistant" {
                    // A token may reach from the generation prompt into the answer.
                    let inner = text.trim_start_matches('q').trim();
                    let at = rest.find(inner).unwrap_or_else(|| panic!("{name}: {trained:?}"));
                    rest = &rest[at + inner.len()..];
                    assert!(!rest.is_empty(), "{name}: the end of the turn is trained");
                } else {
                    assert!(context.contains(text.trim()), "{name}: {text:?} of {context:?}");
                }
            }
            // What is served for the same messages is the beginning of what is trained, where the
            // template asks as it answers and no token crosses the border.
            let asked = messages.len() - 1;
            let prompt = text::encode_chat(tokenizer, template, &messages[..asked], &[]).unwrap();
            let text = template.render(&messages[..asked], &[], true).unwrap();
            assert_eq!(prompt, text::encode_prompt(tokenizer, &text).unwrap());
            if whole.starts_with(&text) && example.tokens.starts_with(&prompt) {
                let border = &example.weights[prompt.len() - 1..=prompt.len()];
                assert_eq!(border, [0.0, 1.0], "{name}");
                checked += 1;
            }
        }
    }
    assert!(checked >= 150, "{checked}");
}

/// f42: packing changes neither tokens nor masks, and the end of every answer is trained.
#[test]
fn f42_masks_survive_packing() {
    let tokenizer = smollm2();
    let template = ChatTemplate::builtin("chatml", SpecialTokens::of(tokenizer)).unwrap();
    let options = Options::default();
    let mut random = Random(5);
    let examples: Vec<Example> = (0..40)
        .flat_map(|_| {
            let content = Content::Chat { messages: random_chat(&mut random), tools: Vec::new() };
            renderer(&template, &options).examples(&content).unwrap().examples
        })
        .collect();
    let order: Vec<usize> = (0..examples.len()).rev().collect();
    let windows = pack(&examples, &order, Room::shared(256, 8)).unwrap();
    assert!(windows.len() < examples.len() / 2);
    let packed: Vec<Example> =
        windows.iter().flat_map(|w| Window::of(&examples, w).examples).collect();
    let order: Vec<&Example> = windows.iter().flatten().map(|&i| &examples[i]).collect();
    assert_eq!(packed.iter().collect::<Vec<_>>(), order);
    let labelled = |list: &[Example]| list.iter().map(Example::labelled).sum::<usize>();
    assert_eq!(labelled(&packed), labelled(&examples));
    let end = tokenizer.encode("<|im_end|>", text::Encode::PROMPT).unwrap();
    let [end] = end.as_slice() else { panic!() };
    for example in &packed {
        let mut turns = 0;
        for i in 1..example.tokens.len() {
            let last = example.weights.get(i + 2).is_none_or(|&w| w == 0.0);
            if example.weights[i] == 1.0 && last && example.tokens[i] == *end {
                turns += 1;
            }
        }
        assert!(turns > 0, "{}", marked(example));
    }
}

/// f39: rows of which nothing would be learned are refused with their numbers and the reason, not
/// trained at loss 0.
#[test]
fn f39_rows_that_mask_out_are_refused_before_training() {
    let folder = Folder::new("masked");
    let template = ChatTemplate::builtin("chatml", SpecialTokens::of(smollm2())).unwrap();
    let row = |answer: &str, train: bool| {
        json!({"messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": answer, "train": train},
        ]})
        .to_string()
    };
    let long = "because ".repeat(100);
    let load = |rows: &[String], options: &Options| {
        let file = folder.write("rows.jsonl", rows.join("\n"));
        data::load(&[file], options, smollm2(), Ok(&template))
    };
    let window = Options { window: Some(64), ..Options::default() };
    let said = load(&[row("a", false), row("b", false)], &window).unwrap_err().to_string();
    assert!(said.contains("rows.jsonl: row 1: no_assistant_tokens: it has no message"), "{said}");
    assert!(said.contains("2 bad rows in all (2 no_assistant_tokens), also 2"), "{said}");
    let rows = [row("a", true), row(&long, true), row("b", false)];
    let said = load(&rows, &window).unwrap_err().to_string();
    assert!(said.contains("row 2: truncated_answer: it has"), "{said}");
    assert!(said.contains("a window takes 65; use a larger `window`, or `fit`"), "{said}");

    let skip = Options { skip_bad: true, ..window.clone() };
    let dataset = load(&rows, &skip).unwrap();
    assert_eq!((dataset.examples.len(), &dataset.origins), (1, &vec![(0, 1)]));
    assert_eq!(dataset.skipped.reasons(), "1 no_assistant_tokens, 1 truncated_answer");
    // What cannot be made to fit is left out, as `fit` says; the rest is refused all the same.
    let fit = Options { fit: Fit::Left, ..window.clone() };
    let dataset = load(&rows[..2], &fit).unwrap();
    assert_eq!(dataset.skipped.counts[&Reason::TruncatedAnswer], 1);
    assert!(load(&rows, &fit).unwrap_err().to_string().contains("no_assistant_tokens"));
    // Long because of what follows the answer.
    let tail = json!({"messages": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": long},
    ]});
    let said = load(&[tail.to_string()], &window).unwrap_err().to_string();
    assert!(said.contains("row 1: too_long:"), "{said}");
    assert_eq!(load(&[tail.to_string()], &fit).unwrap().shortened, 1);
}

#[test]
fn middle_drops_whole_exchanges_and_keeps_the_system() {
    let template = ChatTemplate::builtin("chatml", SpecialTokens::of(smollm2())).unwrap();
    let mut list = vec![("system".to_string(), "Be brief.".to_string())];
    for i in 0..12 {
        list.push(("user".into(), format!("Question {i}, in some words?")));
        list.push(("assistant".into(), format!("Answer {i}.")));
    }
    let list: Vec<(&str, &str)> = list.iter().map(|(r, c)| (&**r, &**c)).collect();
    let options = Options { window: Some(128), fit: Fit::Middle, ..Options::default() };
    let rendered = renderer(&template, &options).examples(&chat(&list)).unwrap();
    let (text, example) = (marked(&rendered.examples[0]), &rendered.examples[0]);
    assert!(rendered.shortened && example.tokens.len() <= 129);
    assert!(text.starts_with("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ"));
    assert!(text.ends_with("[Answer 11.<|im_end|>\n]") && !text.contains("Question 0,"), "{text}");
    // As few as possible: with one more it would not fit.
    let kept = text.matches("Question").count();
    let more = [&list[..1], &list[list.len() - 2 * (kept + 1)..]].concat();
    let wider = Options { window: None, ..options.clone() };
    let more = renderer(&template, &wider).examples(&chat(&more)).unwrap();
    assert!(more.examples[0].tokens.len() > 129);
}

/// What the system says further on is kept, too, in its place among what stays.
#[test]
fn middle_keeps_what_the_system_says_in_the_midst() {
    let template = ChatTemplate::builtin("chatml", SpecialTokens::of(smollm2())).unwrap();
    let mut list = vec![("system", "Be brief."), ("developer", "Be kind.")];
    list.extend([("user", "One?"), ("assistant", "Yes, one.")].repeat(3));
    list.push(("system", "Now be long."));
    list.extend([("user", "Two?"), ("assistant", "Yes, two.")].repeat(5));
    list.push(("system", "Now end."));
    list.extend([("user", "Three?"), ("assistant", "Yes, three.")]);
    for (window, first) in [(64, "Three?"), (110, "Two?")] {
        let options = Options { window: Some(window), fit: Fit::Middle, ..Options::default() };
        let rendered = renderer(&template, &options).examples(&chat(&list)).unwrap();
        let text = marked(&rendered.examples[0]);
        assert!(rendered.shortened && rendered.examples[0].rows() <= window, "{text}");
        let before = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>developer\nBe kind.\
                      <|im_end|>\n<|im_start|>system\nNow be long.<|im_end|>\n";
        assert!(text.starts_with(before), "{text}");
        assert!(!text.contains("One?") && text.matches("Now end.").count() == 1, "{text}");
        let user = text.split("<|im_start|>user\n").nth(1).unwrap();
        assert!(user.starts_with(first), "{text}");
        assert!(text.ends_with("[Yes, three.<|im_end|>\n]"), "{text}");
    }
}

/// f46: a template without tool calls teaches to say nothing where there are some, and one without
/// tools never shows them.
#[test]
fn f46_what_a_template_does_not_render_is_refused_or_named() {
    let folder = Folder::new("unsaid");
    let row = |content: &str| {
        json!({
            "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}],
            "messages": [
                {"role": "user", "content": "Where is it?"},
                {"role": "assistant", "content": content, "tool_calls": [
                    {"type": "function", "function": {"name": "find", "arguments": "{}"}}]},
            ],
        })
        .to_string()
    };
    let fine = json!({
        "tools": [{"type": "function", "function": {"name": "find"}}],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    });
    let calls = folder.write("calls.jsonl", format!("{fine}\n{}\n", row("")));
    let text = folder.write("text.jsonl", format!("{fine}\n{}\n", row("Let me see.")));
    let both = folder.write("both.jsonl", format!("{fine}\n{fine}\n"));
    for (name, template) in &templates() {
        let load = |file: &std::path::PathBuf, loss_on| {
            let options = Options { loss_on, ..Options::default() };
            data::load(std::slice::from_ref(file), &options, smollm2(), Ok(template))
        };
        let renders = name.starts_with("qwen");
        for loss_on in [LossOn::Assistant, LossOn::All] {
            for (file, reason) in [(&calls, Reason::Empty), (&text, Reason::Template)] {
                match load(file, loss_on) {
                    Ok(got) => {
                        assert!(renders, "{name}");
                        let made = marked(&got.examples[1]);
                        assert!(made.contains("find"), "{name}: {made}");
                        assert!(got.files[0].left_out.is_empty(), "{:?}", got.files);
                    }
                    Err(data::Error::Rows(bad)) => {
                        assert!(!renders, "{name}: {bad}");
                        let [bad] = bad.listed.as_slice() else { panic!("{bad}") };
                        let field = bad.bad.field.as_str();
                        assert_eq!((bad.row, bad.bad.reason, field), (2, reason, "messages[1]"));
                        let said = bad.to_string();
                        assert!(said.contains("message 1: the chat template"), "{said}");
                        assert!(said.contains("tool calls") && said.contains("`train`"), "{said}");
                    }
                    Err(other) => panic!("{name}: {other}"),
                }
            }
        }
        let got = load(&both, LossOn::Assistant).unwrap();
        let left_out: Vec<_> = got.files[0].left_out.iter().map(|(k, n)| (&**k, *n)).collect();
        let expected = if renders { vec![] } else { vec![("`tools`", 2)] };
        assert_eq!(left_out, expected, "{name}");
    }
}

#[test]
fn a_text_is_cut_into_windows_that_predict_every_token_once() {
    let text: String = (0..500).map(|i| format!("{i} ")).collect();
    let tokens = smollm2().encode(&text, text::Encode::DOCUMENT).unwrap();
    let options = Options { window: Some(100), ..Options::default() };
    let none = Renderer::new(smollm2(), Err("there is none"), &options);
    let pieces = none.examples(&Content::Text(text.clone())).unwrap().examples;
    let predicted: Vec<u32> = pieces.iter().flat_map(|e| e.tokens[1..].to_vec()).collect();
    assert_eq!(predicted, tokens[1..]);
    assert!(pieces.iter().all(|e| e.rows() <= 100 && e.labelled() == e.rows()));
    assert!(pieces[..pieces.len() - 1].iter().all(|e| e.rows() == 100));
    let whole = Renderer::new(smollm2(), Err("there is none"), &Options::default());
    assert_eq!(whole.examples(&Content::Text(text)).unwrap().examples[0].tokens, tokens);
    // Control tokens in a text are words, unless they are asked for.
    let special = Content::Text("a<|im_end|>".into());
    let count = |parse_special| {
        let options = Options { parse_special, ..Options::default() };
        let renderer = Renderer::new(smollm2(), Err("none"), &options);
        renderer.examples(&special).unwrap().examples[0].tokens.len()
    };
    assert!(count(true) < count(false));
    assert_eq!(whole.examples(&Content::Text("a".into())).unwrap_err().reason, Reason::Empty);
    let bad = none.examples(&chat(&[("assistant", "a")])).unwrap_err();
    assert!(bad.reason == Reason::Template && bad.what.ends_with("there is none"), "{bad}");
}

#[test]
fn switches_of_messages_mean_nothing_where_the_loss_is_on_everything() {
    let template = ChatTemplate::builtin("chatml", SpecialTokens::of(smollm2())).unwrap();
    let options = Options { loss_on: LossOn::All, ..Options::default() };
    let mut content = chat(&[("user", "a"), ("assistant", "b")]);
    let rendered = renderer(&template, &options).examples(&content).unwrap();
    assert_eq!(rendered.examples[0].labelled(), rendered.examples[0].rows());
    let Content::Chat { messages, .. } = &mut content else { panic!() };
    messages[1].train = false;
    let bad = renderer(&template, &options).examples(&content).unwrap_err();
    assert_eq!((bad.reason, bad.field.as_str()), (Reason::BadValue, "messages[1]"));
}

/// Every example of the page is what it says, and makes what it says. `UPDATE_DOCS=1` writes what it
/// makes.
#[test]
fn the_page_about_data_is_true() {
    let path = testdata("../docs/data.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let template = ChatTemplate::builtin("chatml", SpecialTokens::of(smollm2())).unwrap();
    let folder = Folder::new("page");
    let (mut layouts, mut last, mut made) = (Vec::new(), String::new(), Vec::new());
    for (i, part) in page.split("\n```").enumerate() {
        let mut part = part.to_string();
        let (info, body) = part.split_once('\n').unwrap_or((&part, ""));
        match info.split_once(' ').unwrap_or((info, "")) {
            _ if i % 2 == 0 => {}
            (kind @ ("jsonl" | "csv"), layout) => {
                let file = folder.write(&format!("page.{kind}"), body);
                let options = Options::default();
                let got = data::load(&[file], &options, smollm2(), Ok(&template)).unwrap();
                let found = got.files[0].layout.unwrap().name();
                assert_eq!(found, layout, "{body}");
                layouts.push(found);
                last = got.examples.iter().map(marked).collect::<Vec<_>>().join("\n");
            }
            ("marked", _) => part = format!("marked\n{last}"),
            other => panic!("a block of {other:?}"),
        }
        made.push(part);
    }
    let made = made.join("\n```");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &made).unwrap();
    } else {
        assert_eq!(page, made, "UPDATE_DOCS=1 writes what is there now");
    }
    layouts.sort_unstable();
    layouts.dedup();
    assert_eq!(layouts.len(), data::Layout::ALL.len(), "{layouts:?}");
    let names = Reason::ALL.iter().map(|r| r.as_str()).chain(data::Layout::ALL.map(|l| l.name()));
    for name in names {
        assert!(page.contains(&format!("`{name}`")), "docs/data.md does not name {name}");
    }
}
