//! Layouts: what rows mean, and what is wrong with them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use common::{Folder, row_of, rows, said};
use data::{Layout, Options, Reason};
use serde_json::{Value, json};

fn read(value: &Value) -> (Layout, String) {
    let (content, read) = row_of(value, &Options::default()).unwrap();
    (read.files[0].layout.unwrap(), said(&content))
}

#[test]
fn rows_are_read_in_the_layout_that_their_fields_say() {
    for (value, layout, expected) in [
        (
            json!({"messages": [
                {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a", "train": false},
                {"role": "user", "content": [{"type": "text", "text": "v"}]},
                {"role": "assistant", "content": "b", "weight": 0.5, "name": null},
            ]}),
            Layout::Messages,
            "system: s | user: u | -assistant: a | user: v | assistant*0.5: b",
        ),
        (
            json!({"tools": [{"type": "function"}], "messages": [
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]},
                {"role": "tool", "content": "r", "tool_call_id": "1"},
                {"role": "assistant", "content": "a"},
            ]}),
            Layout::Messages,
            "1 tools | user: u | assistant: ~ | tool: r | assistant: a",
        ),
        (
            json!({"system": "s", "tools": [{}], "conversations": [
                {"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "weight": 0},
                {"from": "user", "value": "v"}, {"from": "assistant", "value": "b", "train": true},
                {"from": "observation", "value": "r"}, {"from": "tool", "value": "q"},
                {"from": "gpt", "value": "c", "weight": null},
            ], "id": "x"}),
            Layout::ShareGpt,
            "1 tools | system: s | user: u | assistant*0: a | user: v | assistant: b | tool: r | \
             tool: q | assistant: c",
        ),
        (
            json!({"instruction": "i", "input": "in", "output": "o", "system": ""}),
            Layout::Alpaca,
            "user: i\n\nin | assistant: o",
        ),
        (
            json!({"instruction": "i", "input": "", "output": "o", "system": "s"}),
            Layout::Alpaca,
            "system: s | user: i | assistant: o",
        ),
        (json!({"prompt": "p", "completion": "c"}), Layout::Prompt, "user: p | assistant: c"),
        (
            // What the prompt has is context, unless it says otherwise.
            json!({"prompt": [
                {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "b", "train": true},
                {"role": "assistant", "content": "d", "weight": 2},
                {"role": "user", "content": "v"},
            ], "completion": [{"role": "assistant", "content": "c"}]}),
            Layout::Prompt,
            "user: u | -assistant: a | assistant: b | assistant*2: d | user: v | assistant: c",
        ),
        (json!({"text": "t\n"}), Layout::Text, "text: t\n"),
    ] {
        assert_eq!(read(&value), (layout, expected.to_string()), "{value}");
        assert_eq!(layout.name().parse(), Ok(layout));
    }
    // Everything else about a message reaches the template.
    let value = json!({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "r",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "name": "n"}]});
    let data::Content::Chat { messages, .. } = row_of(&value, &Options::default()).unwrap().0
    else {
        panic!()
    };
    let keys: Vec<&str> = messages[0].other.keys().map(String::as_str).collect();
    assert_eq!(keys, ["reasoning_content", "tool_calls", "name"]);
}

#[track_caller]
fn refused(value: &Value, options: &Options, reason: Reason, field: &str, part: &str) {
    let data::Error::Rows(bad) = row_of(value, options).unwrap_err() else { panic!("{value}") };
    let bad = &bad.listed[0].bad;
    assert_eq!((bad.reason, bad.field.as_str()), (reason, field), "{value}: {bad}");
    assert!(bad.what.contains(part), "{value}: no {part:?} in: {bad}");
}

/// f46: what would be passed over is refused, with the name that may have been meant.
#[test]
fn f46_rows_are_refused_by_field() {
    use Reason::*;
    let user = || json!({"role": "user", "content": "u"});
    let chat = |message: Value| json!({"messages": [user(), message]});
    let answer = |changes: Value| {
        let mut message = json!({"role": "assistant", "content": "a"});
        for (key, value) in changes.as_object().unwrap() {
            message[key] = value.clone();
        }
        chat(message)
    };
    let turns = |turn: Value| json!({"conversations": [turn]});
    let cases = [
        (json!({}), Empty, "", "it has no fields; expected `messages`, `conversations`"),
        (json!({"mesages": []}), UnknownLayout, "", "is `messages` meant by \"mesages\"?"),
        (json!({"prompt": "a", "response": "b"}), UnknownLayout, "", "\"prompt\", \"response\""),
        (
            json!({"messages": [], "text": ""}),
            UnknownLayout,
            "",
            "several layouts fit its fields: messages, text",
        ),
        (json!({"messages": [], "prompt": ""}), UnknownField, "prompt", "belongs to layout prompt"),
        (json!({"messages": "a"}), WrongType, "messages", "expected a list"),
        (json!({"messages": []}), Empty, "messages", "at least one message"),
        (json!({"messages": ["a"]}), WrongType, "messages[0]", "expected an object"),
        (chat(json!({"content": "a"})), MissingField, "messages[1].role", "who speaks"),
        (chat(json!({"role": 3})), WrongType, "messages[1].role", "expected a string"),
        (
            answer(json!({"content": 3})),
            WrongType,
            "messages[1].content",
            "a string or a list of parts",
        ),
        (answer(json!({"content": [3]})), WrongType, "messages[1].content[0]", "an object with"),
        (
            answer(json!({"content": [{"type": "image_url"}]})),
            WrongType,
            "messages[1].content",
            "of type",
        ),
        (answer(json!({"train": "no"})), WrongType, "messages[1].train", "true or false"),
        (answer(json!({"trian": false})), UnknownField, "messages[1].trian", "is `train` meant?"),
        (answer(json!({"weights": 1})), UnknownField, "messages[1].weights", "is `weight` meant?"),
        (answer(json!({"weight": -1})), BadValue, "messages[1].weight", "from 0 to 1000000"),
        (answer(json!({"weight": 1e300})), BadValue, "messages[1].weight", "from 0 to 1000000"),
        (answer(json!({"weight": 1e-60})), BadValue, "messages[1].weight", "from 0 to 1000000"),
        (answer(json!({"weight": "1"})), BadValue, "messages[1].weight", "from 0 to 1000000"),
        (
            answer(json!({"weight": 1, "train": false})),
            BadValue,
            "messages[1].weight",
            "beside `train: false`",
        ),
        (answer(json!({"content": " \n"})), Empty, "messages[1].content", "teach to say nothing"),
        (answer(json!({"content": null})), Empty, "messages[1].content", "teach to say nothing"),
        (
            chat(json!({"role": "user", "content": "u", "train": true})),
            BadValue,
            "messages[1].train",
            "only what the assistant says",
        ),
        (
            chat(json!({"role": "user", "content": "u", "weight": 2})),
            BadValue,
            "messages[1].weight",
            "has no effect",
        ),
        (json!({"messages": [user()], "tools": {}}), WrongType, "tools", "a list of at most"),
        (
            json!({"messages": [user()], "tools": [3]}),
            WrongType,
            "tools[0]",
            "describes a function",
        ),
        (json!({"messages": [user()], "tools": "[]"}), WrongType, "tools", "a list of at most"),
        (json!({"messages": [user()], "tool": []}), UnknownField, "tool", "is `tools` meant?"),
        (json!({"messages": [user()], "weight": 2}), UnknownField, "weight", "unknown field"),
        (json!({"messages": [user()], "chosen": 2}), UnknownField, "chosen", "unknown field"),
        (json!({"conversations": []}), Empty, "conversations", "at least one"),
        (
            turns(json!({"from": "bing", "value": "a"})),
            BadValue,
            "conversations[0].from",
            "human, gpt, system or tool",
        ),
        (turns(json!({"value": "a"})), MissingField, "conversations[0].from", "who speaks"),
        (
            turns(json!({"role": "user", "content": "a"})),
            MissingField,
            "conversations[0]",
            "call the field `messages`",
        ),
        (turns(json!({"from": "gpt"})), Empty, "conversations[0].value", "teach to say nothing"),
        (
            json!({"system": "s", "conversations": [{"from": "system", "value": "t"}]}),
            BadValue,
            "system",
            "exclude each other",
        ),
        (json!({"instruction": "", "output": "o"}), Empty, "instruction", "is empty"),
        (json!({"instruction": "i", "output": " "}), Empty, "output", "is empty"),
        (json!({"instruction": "i", "output": 3}), WrongType, "output", "a string"),
        (
            json!({"instruction": "i", "output": "o", "inputs": ""}),
            UnknownField,
            "inputs",
            "is `input` meant?",
        ),
        (
            json!({"instruction": "i", "output": "o", "history": []}),
            UnknownField,
            "history",
            "unknown field",
        ),
        (json!({"prompt": "p", "completion": ""}), Empty, "completion", "is empty"),
        (
            json!({"prompt": "p", "completion": []}),
            WrongType,
            "completion",
            "a string, as `prompt` is",
        ),
        (json!({"prompt": [], "completion": "c"}), WrongType, "completion", "a list of messages"),
        (json!({"prompt": [], "completion": [user()]}), Empty, "prompt", "at least one message"),
        (json!({"prompt": 3, "completion": "c"}), WrongType, "prompt", "a string or a list"),
        (json!({"prompt": null, "completion": "c"}), MissingField, "prompt", "a text, or a list"),
        (json!({"text": ""}), Empty, "text", "is empty"),
        (json!({"text": ["a"]}), WrongType, "text", "a string"),
    ];
    for (value, reason, field, part) in cases {
        refused(&value, &Options::default(), reason, field, part);
    }
    let many = vec![user(); 4097];
    refused(&json!({"messages": many}), &Options::default(), BadValue, "messages", "at most 4096");
}

/// A chosen layout settles what the fields leave open, and nothing else.
#[test]
fn a_layout_can_be_chosen() {
    let options = |layout| Options { layout: Some(layout), ..Options::default() };
    let value = json!({"instruction": "i", "input": "", "output": "o", "text": "all of it"});
    let (content, read) = row_of(&value, &options(Layout::Alpaca)).unwrap();
    assert_eq!(said(&content), "user: i | assistant: o");
    assert!(read.files[0].ignored.contains("text"));
    assert_eq!(said(&row_of(&value, &options(Layout::Text)).unwrap().0), "text: all of it");
    let part = "a text, or a list of messages";
    refused(&value, &options(Layout::Prompt), Reason::MissingField, "prompt", part);
    let value = json!({"text": "a", "labels": [1]});
    refused(&value, &options(Layout::Text), Reason::UnknownField, "labels", "unknown field");
}

#[test]
fn rows_of_another_layout_than_those_before_are_refused() {
    let folder = Folder::new("mixed");
    let text = "{\"text\": \"a\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"text\": \"b\"}\n";
    let file = folder.write("a.jsonl", text);
    let said = rows(std::slice::from_ref(&file), &Options::default()).unwrap_err().to_string();
    assert!(said.contains("row 2: mixed_layouts: its layout is prompt, that of the rows before"));
    // Files have each their own.
    let other = folder.write("b.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}\n");
    let options = Options { skip_bad: true, ..Options::default() };
    let (kept, read) = rows(&[file, other], &options).unwrap();
    assert_eq!(kept.len(), 3);
    assert_eq!(read.files[1].layout, Some(Layout::Prompt));
}
