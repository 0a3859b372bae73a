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
        (
            json!({"conversations": [
                {"role": "user", "content": "u", "from": null},
                {"role": "assistant", "content": "a", "train": false},
                {"from": "human", "value": "v"}, {"role": "gpt", "content": "b", "weight": 2},
            ]}),
            Layout::ShareGpt,
            "user: u | -assistant: a | user: v | assistant*2: b",
        ),
        (
            json!({"tools": "[{\"name\": \"f\"}]", "system": "s", "conversations": [
                {"from": "human", "value": "u"},
                {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
                {"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"},
            ]}),
            Layout::ShareGpt,
            "1 tools | system: s | user: u | assistant:  | tool: r | assistant: a",
        ),
        (
            json!({"system": "s", "messages": [{"role": "user", "content": "u"}]}),
            Layout::Messages,
            "system: s | user: u",
        ),
        (
            json!({"instruction": "i", "context": "c", "response": "r", "category": "qa"}),
            Layout::Alpaca,
            "user: i\n\nc | assistant: r",
        ),
        (
            json!({"instruction": "i", "context": "", "input": "n", "output": "o"}),
            Layout::Alpaca,
            "user: i\n\nn | assistant: o",
        ),
        (json!({"prompt": "p", "response": "r"}), Layout::Prompt, "user: p | assistant: r"),
        (json!({"question": "q", "answer": "a"}), Layout::Prompt, "user: q | assistant: a"),
        (
            json!({"id": 1, "system_prompt": "s", "question": "q", "response": "r"}),
            Layout::Prompt,
            "system: s | user: q | assistant: r",
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

/// Calls that a turn says are those of OpenAI's shape.
#[test]
fn calls_that_a_turn_says_reach_the_template() {
    let one = json!({"name": "f", "arguments": {"x": [1, "a"]}});
    let two = json!([one, {"name": "g", "arguments": "{}"}]);
    for (value, calls) in [(json!(one.to_string()), 1), (json!(two.to_string()), 2), (one, 1)] {
        let row = json!({"conversations": [
            {"from": "human", "value": "u"},
            {"from": "function_call", "value": value, "weight": 3, "thought": "t"},
        ]});
        let data::Content::Chat { messages, .. } = row_of(&row, &Options::default()).unwrap().0
        else {
            panic!()
        };
        let Value::Array(list) = &messages[1].other["tool_calls"] else { panic!() };
        assert_eq!((list.len(), messages[1].weight), (calls, 3.0));
        assert_eq!(messages[1].other["thought"], "t");
        let first = json!({"name": "f", "arguments": "{\"x\":[1,\"a\"]}"});
        assert_eq!(list[0], json!({"type": "function", "function": first}));
        assert!(calls == 1 || list[1]["function"]["arguments"] == "{}");
    }
}

/// A table may hold lists of messages as texts.
#[test]
fn cells_hold_messages() {
    let folder = Folder::new("cells");
    let prompt = "[{\"\"role\"\": \"\"user\"\", \"\"content\"\": \"\"u\"\"}]";
    let answer = prompt.replace("user", "assistant").replace("\"u\"", "\"a\"");
    let text = format!("prompt,completion\n\"{prompt}\",\"{answer}\"\n");
    let (lists, _) = rows(&[folder.write("a.csv", text)], &Options::default()).unwrap();
    assert_eq!(said(&lists[0].content), "user: u | assistant: a");
    let text = "prompt,completion\n[1],\"[{\"\"x\"\": 1}]\"\n";
    let (texts, _) = rows(&[folder.write("b.csv", text)], &Options::default()).unwrap();
    assert_eq!(said(&texts[0].content), "user: [1] | assistant: [{\"x\": 1}]");
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
        (json!({"prompt": "a", "reply": "b"}), UnknownLayout, "", "\"prompt\", \"reply\""),
        (
            json!({"prompt": "a", "completion": "b", "response": "c"}),
            UnknownLayout,
            "",
            "`completion` and `response` are the same to layout prompt; leave one out, or",
        ),
        (
            json!({"instruction": "a", "question": "b", "response": "c"}),
            UnknownLayout,
            "",
            "several layouts fit its fields: alpaca, prompt",
        ),
        (
            json!({"prompt": "a", "completion": "b", "answer": "c"}),
            UnknownField,
            "answer",
            "`answer` means something in other rows, and is not read beside `prompt`",
        ),
        (
            json!({"question": "a", "answer": "b", "context": "c"}),
            UnknownField,
            "context",
            "`--layout prompt` to pass over it",
        ),
        (json!({"text": "a", "system": "s"}), UnknownField, "system", "beside `text`"),
        (
            json!({"instruction": "a", "output": "b", "tools": [{}]}),
            UnknownField,
            "tools",
            "not read beside `instruction`, `output`",
        ),
        (json!({"question": "a", "response": ""}), Empty, "response", "`response` is empty"),
        (
            json!({"instruction": "i", "input": "a", "context": "b", "output": "o"}),
            BadValue,
            "context",
            "exclude each other",
        ),
        (
            json!({"messages": [{"role": "system", "content": "s"}], "system": "t"}),
            BadValue,
            "system",
            "exclude each other",
        ),
        (
            json!({"messages": [user()], "system": "t", "system_prompt": "u"}),
            BadValue,
            "system_prompt",
            "exclude each other",
        ),
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
        // It would not be trained on.
        (answer(json!({"role": "Assistant"})), BadValue, "messages[1].role", "\"assistant\""),
        (answer(json!({"role": "asistant"})), BadValue, "messages[1].role", "\"assistant\""),
        (answer(json!({"train": "no"})), WrongType, "messages[1].train", "true or false"),
        (answer(json!({"trian": false})), UnknownField, "messages[1].trian", "is `train` meant?"),
        (answer(json!({"weights": 1})), UnknownField, "messages[1].weights", "is `weight` meant?"),
        (
            answer(json!({"weight": -1})),
            BadValue,
            "messages[1].weight",
            "0, or a number from 1e-45 to 1000000",
        ),
        (
            answer(json!({"weight": 1e300})),
            BadValue,
            "messages[1].weight",
            "0, or a number from 1e-45 to 1000000",
        ),
        (
            answer(json!({"weight": 1e-60})),
            BadValue,
            "messages[1].weight",
            "0, or a number from 1e-45 to 1000000",
        ),
        (
            answer(json!({"weight": "1"})),
            BadValue,
            "messages[1].weight",
            "0, or a number from 1e-45 to 1000000",
        ),
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
            "human, gpt, system, function_call, observation or tool",
        ),
        (turns(json!({"value": "a"})), MissingField, "conversations[0].from", "who speaks"),
        // One of the two would go before the other, and nobody would know which.
        (
            turns(json!({"from": "human", "value": "a", "role": "assistant"})),
            BadValue,
            "conversations[0]",
            "has the fields from, value, role; expected",
        ),
        (
            turns(json!({"from": "human", "content": "a"})),
            BadValue,
            "conversations[0]",
            "has the fields from, content; expected",
        ),
        (turns(json!({"role": "bing", "content": "a"})), BadValue, "conversations[0].role", "gpt"),
        (
            turns(json!({"from": "function_call", "value": "f(x)"})),
            WrongType,
            "conversations[0].value",
            "is a text that is no JSON",
        ),
        (
            turns(json!({"from": "function_call", "value": "{\"arguments\": {}}"})),
            WrongType,
            "conversations[0].value",
            "expected JSON of `name` and `arguments`",
        ),
        (
            answer(json!({"function_call": {"name": "f"}})),
            UnknownField,
            "messages[1].function_call",
            "what `tool_calls` was before",
        ),
        (answer(json!({"tool_calls": "[]"})), WrongType, "messages[1].tool_calls", "list of calls"),
        (
            answer(json!({"tool_calls": [3]})),
            WrongType,
            "messages[1].tool_calls[0]",
            "an object that calls",
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
    // Of names that mean the same the first is read.
    let both = json!({"prompt": "p", "answer": "a", "completion": "c", "response": "r"});
    let (content, read) = row_of(&both, &options(Layout::Prompt)).unwrap();
    assert_eq!(said(&content), "user: p | assistant: c");
    let ignored: Vec<&str> = read.files[0].ignored.iter().map(String::as_str).collect();
    assert_eq!(ignored, ["answer", "response"]);
    let part = "`answer` is missing; expected a text, or a list of messages";
    let half = json!({"question": "q", "text": "t"});
    refused(&half, &options(Layout::Prompt), Reason::MissingField, "answer", part);
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
