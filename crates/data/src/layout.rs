//! The layouts that rows come in, told apart by their fields.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Map, Value};
use text::Message;

use crate::fields::{Fields, missing, near, unknown, wrong};
use crate::json::parse_json;
use crate::message::{Purpose, check_count, finish, messages, tools};
use crate::{Bad, Reason};

type Result<T> = std::result::Result<T, Bad>;

/// How a row says what is to be learned.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Layout {
    /// OpenAI's: `messages`, with `system` and `tools`.
    Messages,
    /// `conversations` of `from` and `value`, or of `role` and `content`, with `system` and
    /// `tools`.
    ShareGpt,
    /// `instruction`, `input`, `output`, and `system`; or Dolly's `context` and `response`.
    Alpaca,
    /// `prompt` and `completion`: texts, or lists of messages; with `system` and `tools`. Or
    /// `response` for the one, `question` with `answer` or `response` for both.
    Prompt,
    /// A `text`, all of which is learned.
    Text,
}

impl Layout {
    /// All there are, in the order in which they are looked for.
    pub const ALL: [Layout; 5] =
        [Layout::Messages, Layout::ShareGpt, Layout::Alpaca, Layout::Prompt, Layout::Text];

    /// As it is printed and typed.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Messages => "messages",
            Layout::ShareGpt => "sharegpt",
            Layout::Alpaca => "alpaca",
            Layout::Prompt => "prompt",
            Layout::Text => "text",
        }
    }

    /// The fields that a row must have in it: each a way to write it, the usual one first.
    fn forms(self) -> &'static [Form] {
        match self {
            Layout::Messages => &[&["messages"]],
            Layout::ShareGpt => &[&["conversations"]],
            Layout::Alpaca => &[&["instruction", "output"], &["instruction", "response"]],
            Layout::Prompt => &[
                &["prompt", "completion"],
                &["prompt", "response"],
                &["question", "answer"],
                &["question", "response"],
            ],
            Layout::Text => &[&["text"]],
        }
    }

    /// The usual form.
    fn usual(self) -> Form {
        self.forms().first().copied().unwrap_or_default()
    }

    /// The fields that a row may have in it beside those.
    fn optional(self, strict: bool) -> &'static [&'static str] {
        match (self, strict) {
            (Layout::Messages | Layout::Prompt, true) => &["tools"],
            (Layout::ShareGpt, true) => &["system", "tools"],
            (Layout::Alpaca, true) => &["input", "system"],
            (Layout::Messages | Layout::Prompt | Layout::ShareGpt, false) => {
                &["system", "system_prompt", "tools"]
            }
            (Layout::Alpaca, false) => &["input", "context", "system", "system_prompt"],
            (Layout::Text, _) => &[],
        }
    }

    /// Whether rows of some layout must have a field of this name.
    pub(crate) fn is_field(name: &str) -> bool {
        Layout::ALL.iter().flat_map(|l| l.forms()).any(|form| form.contains(&name))
    }

    /// Whether a field of this name means something in some layout.
    pub(crate) fn means(name: &str) -> bool {
        Layout::is_field(name)
            || MEANINGFUL.contains(&name)
            || Layout::ALL.iter().any(|l| l.optional(false).contains(&name))
    }

    /// The layout of a row. A field that says nothing (`null`, or in `cells` of a table an empty
    /// text) is not there, unless no layout has the others.
    ///
    /// # Errors
    /// No layout has its fields, or several have.
    pub fn detect(row: &Map<String, Value>, cells: bool) -> Result<Layout> {
        let fitting = |there: &dyn Fn(&&str) -> bool| -> Vec<Layout> {
            let fits = |layout: &Layout| layout.forms().iter().any(|form| form.iter().all(there));
            Layout::ALL.into_iter().filter(fits).collect()
        };
        let mut found = fitting(&|field| row.get(*field).is_some_and(|value| says(value, cells)));
        if found.is_empty() {
            found = fitting(&|field| row.contains_key(*field));
        }
        match found.as_slice() {
            [layout] => Ok(*layout),
            [] => Err(none_fits(row)),
            several => {
                let names: Vec<&str> = several.iter().map(|l| l.name()).collect();
                let what = format!(
                    "several layouts fit its fields: {}; choose one with `--layout`",
                    names.join(", ")
                );
                Err(Bad::row(Reason::UnknownLayout, what))
            }
        }
    }

    /// The form of a row. Where none fits whole it is the one of which most is there.
    ///
    /// # Errors
    /// Several fit, and the layout was not chosen.
    fn form(self, row: &Map<String, Value>, chosen: bool) -> Result<Form> {
        let mut fitting = self.forms().iter().copied().filter(|form| has(row, form));
        match (fitting.next(), fitting.next()) {
            (Some(first), Some(second)) if !chosen => {
                let only = |form: Form, other: Form| {
                    let only = form.iter().filter(|field| !other.contains(field));
                    only.map(|field| format!("`{field}`")).collect::<Vec<_>>().join(" and ")
                };
                let (first, second) = (only(first, second), only(second, first));
                let what = format!(
                    "{first} and {second} are the same to layout {self}; leave one out, or choose \
                     `--layout {self}` to read {first}"
                );
                Err(Bad::row(Reason::UnknownLayout, what))
            }
            (Some(first), _) => Ok(first),
            (None, _) => {
                let there = |form: &Form| form.iter().filter(|f| row.contains_key(**f)).count();
                // The first of those of which as much is there.
                let most = self.forms().iter().copied().rev().max_by_key(there);
                Ok(most.unwrap_or_default())
            }
        }
    }
}

/// Fields that make a row one of a layout.
type Form = &'static [&'static str];

fn has(row: &Map<String, Value>, form: Form) -> bool {
    form.iter().all(|field| row.get(*field).is_some_and(|value| says(value, false)))
}

/// Whether a field is there for what it holds: neither `null` nor an empty cell.
fn says(value: &Value, cell: bool) -> bool {
    !(value.is_null() || cell && value.as_str() == Some(""))
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Layout {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Layout, String> {
        Layout::ALL.into_iter().find(|l| l.name() == name).ok_or_else(|| {
            let names = Layout::ALL.map(Layout::name);
            format!("there is no layout `{name}`; expected one of {}", names.join(", "))
        })
    }
}

fn none_fits(row: &Map<String, Value>) -> Bad {
    let wanted = "expected `messages`, `conversations`, `instruction` and `output`, `prompt` and \
                  `completion`, `question` and `answer`, or `text`";
    if row.is_empty() {
        return Bad::row(Reason::Empty, format!("it has no fields; {wanted}"));
    }
    let forms = Layout::ALL.iter().flat_map(|l| l.forms());
    let must: Vec<&str> = forms.flat_map(|form| form.iter()).copied().collect();
    let slip = row.keys().find_map(|k| near(k, &must).filter(|near| near != k).map(|n| (k, n)));
    let meant = match slip {
        Some((key, near)) => format!("is `{near}` meant by {}? ", quoted(key)),
        None => String::new(),
    };
    let names: Vec<String> = row.keys().take(8).map(|k| quoted(k)).collect();
    let more = if row.len() > names.len() { ", ..." } else { "" };
    let what = format!("no layout has its fields {}{more}; {meant}{wanted}", names.join(", "));
    Bad::row(Reason::UnknownLayout, what)
}

/// A name from outside, as an error shows it.
fn quoted(name: &str) -> String {
    crate::fields::shown(&Value::String(name.into()))
}

/// What a row holds.
#[derive(Clone, PartialEq, Debug)]
pub enum Content {
    /// A conversation, rendered by a template.
    Chat {
        /// Its messages, at least one.
        messages: Vec<Message>,
        /// The tools that its template is told of.
        tools: Vec<Value>,
    },
    /// A text, as it is.
    Text(String),
}

/// How strictly rows are read.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Reading {
    /// Cells are texts: what has structure is JSON inside them, and what is null or empty is not
    /// there.
    pub cells: bool,
    /// The layout was chosen, not detected: fields of other layouts are columns like any other.
    pub chosen: bool,
    /// No field may be left over, not even one without meaning for training.
    pub strict: bool,
}

/// Fields that mean something elsewhere, so that passing over them would learn something else than
/// was meant.
const MEANINGFUL: &[&str] = &[
    "audio",
    "chosen",
    "completion_mask",
    "documents",
    "functions",
    "history",
    "images",
    "label",
    "labels",
    "loss",
    "mask",
    "rejected",
    "train",
    "videos",
    "weight",
    "weights",
];

impl Content {
    /// What a row holds, read in a layout. The names of columns that mean nothing for training are
    /// added to `ignored`.
    ///
    /// # Errors
    /// Names the field.
    pub fn read(
        row: Map<String, Value>,
        layout: Layout,
        reading: Reading,
        ignored: &mut BTreeSet<String>,
    ) -> Result<Content> {
        let mut row = row;
        if reading.cells {
            opened(&mut row)?;
        }
        let form = match reading.strict {
            true => layout.usual(),
            false => layout.form(&row, reading.chosen)?,
        };
        let known = [form, layout.optional(reading.strict)].concat();
        match reading.strict {
            true => check(&row, &known)?,
            false => columns(&mut row, layout, &known, reading, ignored)?,
        }
        // A message says what is null by leaving it out; a row of a request must not.
        let mut fields = Fields::new(row, !reading.strict);
        let content = match layout {
            Layout::Messages => {
                let (system, tools) = (system(&mut fields)?, tools(&mut fields)?);
                let list = list(&mut fields, "messages")?;
                let messages = messages("messages", list, Purpose::Train)?;
                Content::Chat { messages: after(system, messages)?, tools }
            }
            Layout::ShareGpt => sharegpt(&mut fields)?,
            Layout::Alpaca => alpaca(&mut fields, form)?,
            Layout::Prompt => prompt(&mut fields, form)?,
            Layout::Text => {
                let text = text(&mut fields, "text")?;
                filled("text", &text)?;
                Content::Text(text)
            }
        };
        fields.finish()?;
        Ok(content)
    }
}

/// Cells of a table made what they stand for.
fn opened(row: &mut Map<String, Value>) -> Result<()> {
    row.retain(|_, value| says(value, true));
    for field in ["messages", "conversations", "tools"] {
        if let Some(Value::String(json)) = row.get(field) {
            let value = inside(field, json)?;
            row.insert(field.into(), value);
        }
    }
    // A text may be anything, but for a list of messages, which nobody writes to be learned so.
    for field in ["prompt", "completion"] {
        let text = row.get(field).and_then(Value::as_str).unwrap_or_default();
        if !text.trim_start().starts_with('[') {
            continue;
        }
        let messages = |list: &Vec<Value>| {
            !list.is_empty() && list.iter().all(|v| v.get("role").is_some_and(Value::is_string))
        };
        if let Ok(Value::Array(list)) = parse_json(text.as_bytes())
            && messages(&list)
        {
            row.insert(field.into(), Value::Array(list));
        }
    }
    Ok(())
}

/// The JSON in a text.
fn inside(path: &str, text: &str) -> Result<Value> {
    parse_json(text.as_bytes()).map_err(|(e, _)| {
        let what = format!("`{path}` is a text that is no JSON: {e}");
        Bad::field(Reason::WrongType, path, what)
    })
}

/// Refuses what a layout does not know.
fn check(row: &Map<String, Value>, known: &[&str]) -> Result<()> {
    match row.keys().find(|k| !known.contains(&k.as_str())) {
        Some(odd) => Err(unknown(odd, odd, known)),
        None => Ok(()),
    }
}

/// Takes columns out of a row that mean nothing for training.
fn columns(
    row: &mut Map<String, Value>,
    layout: Layout,
    known: &[&str],
    reading: Reading,
    ignored: &mut BTreeSet<String>,
) -> Result<()> {
    let odd: Vec<String> = row.keys().filter(|k| !known.contains(&k.as_str())).cloned().collect();
    for name in odd {
        let value = row.shift_remove(&name).unwrap_or_default();
        let elsewhere = Layout::ALL.into_iter().find(|l| l.usual().contains(&name.as_str()));
        let says = match &value {
            Value::Null => continue,
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            _ => true,
        };
        if MEANINGFUL.contains(&name.as_str()) || near(&name, known).is_some() {
            return Err(unknown(&name, &name, known));
        }
        match elsewhere {
            _ if reading.chosen => {}
            Some(other) if other != layout => {
                let what = format!(
                    "`{name}` belongs to layout {other}, the other fields to {layout}; choose one \
                     with `--layout`"
                );
                return Err(Bad::field(Reason::UnknownField, name, what));
            }
            _ if says && Layout::means(&name) => {
                let what = format!(
                    "`{name}` means something in other rows, and is not read beside {}; leave it \
                     out, or choose `--layout {layout}` to pass over it",
                    known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ")
                );
                return Err(Bad::field(Reason::UnknownField, name, what));
            }
            _ => {}
        }
        // Rows may have names of their own; what is listed is bounded.
        if ignored.len() < 64 {
            ignored.insert(name);
        }
    }
    Ok(())
}

fn list(fields: &mut Fields, field: &'static str) -> Result<Vec<Value>> {
    let path = fields.path(field);
    match fields.value(field) {
        Some(Value::Array(list)) => Ok(list),
        Some(other) => Err(wrong(&path, &other, "a list")),
        None => Err(missing(&path, "a list of messages")),
    }
}

fn text(fields: &mut Fields, field: &'static str) -> Result<String> {
    fields.string(field)?.ok_or_else(|| missing(field, "a text"))
}

fn filled(field: &str, text: &str) -> Result<()> {
    if text.trim().is_empty() {
        let what = format!("`{field}` is empty; expected some text");
        return Err(Bad::field(Reason::Empty, field, what));
    }
    Ok(())
}

/// What the system says beside a conversation.
fn system(fields: &mut Fields) -> Result<Option<Message>> {
    let said = |text: Option<String>| text.filter(|text| !text.is_empty());
    let (system, prompt) = (said(fields.string("system")?), said(fields.string("system_prompt")?));
    if system.is_some() && prompt.is_some() {
        let what = "`system` and `system_prompt` exclude each other; leave one out";
        return Err(Bad::field(Reason::BadValue, "system_prompt", what));
    }
    Ok(system.or(prompt).map(|text| Message::new("system", text)))
}

/// A conversation after what the system says beside it.
fn after(system: Option<Message>, mut messages: Vec<Message>) -> Result<Vec<Message>> {
    let Some(system) = system else { return Ok(messages) };
    if messages.first().is_some_and(|m| m.role == "system" || m.role == "developer") {
        let what = "`system` and a first turn of the system exclude each other; leave one out";
        return Err(Bad::field(Reason::BadValue, "system", what));
    }
    messages.insert(0, system);
    Ok(messages)
}

fn sharegpt(fields: &mut Fields) -> Result<Content> {
    // Here tools are often JSON in a text, in files of JSON too.
    let tools = match fields.value("tools") {
        Some(Value::String(text)) if text.trim().is_empty() => Value::Null,
        Some(Value::String(text)) => inside("tools", &text)?,
        other => other.unwrap_or_default(),
    };
    let tools = [("tools".to_owned(), tools)].into_iter().collect();
    let tools = self::tools(&mut Fields::new(tools, true))?;
    let system = system(fields)?;
    let list = list(fields, "conversations")?;
    check_count("conversations", list.len())?;
    let turns = list.into_iter().enumerate();
    let said = turns.map(|(i, value)| turn(&format!("conversations[{i}]"), value));
    let messages = after(system, said.collect::<Result<_>>()?)?;
    Ok(Content::Chat { messages, tools })
}

/// A turn of `from` and `value`, or of `role` and `content`.
fn turn(path: &str, value: Value) -> Result<Message> {
    let has = |field: &str| value.get(field).is_some_and(|v| !v.is_null());
    let there: Vec<&str> =
        ["from", "value", "role", "content"].into_iter().filter(|f| has(f)).collect();
    let (who, said) = match there.as_slice() {
        ["role"] | ["content"] | ["role", "content"] => ("role", "content"),
        _ if has("role") || has("content") => {
            let what = format!(
                "`{path}` has the fields {}; expected `from` and `value`, or `role` and `content`",
                there.join(", ")
            );
            return Err(Bad::field(Reason::BadValue, path, what));
        }
        _ => ("from", "value"),
    };
    let mut inner = Fields::inner(path, value, true)?;
    // What is null beside them is no field of a message.
    for other in ["from", "value", "role", "content"] {
        if other != who && other != said {
            inner.value(other);
        }
    }
    let at = inner.path(who);
    let from = inner.string(who)?.ok_or_else(|| missing(&at, "who speaks"))?;
    let role = match from.as_str() {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" | "bot" => "assistant",
        "system" => "system",
        "developer" => "developer",
        "tool" | "observation" | "function_response" | "tool_response" => "tool",
        "function_call" | "tool_call" => return calling(path, said, inner),
        _ => {
            let expected = "human, gpt, system, function_call, observation or tool";
            let bad = wrong(&at, &Value::String(from), expected);
            return Err(Bad { reason: Reason::BadValue, ..bad });
        }
    };
    finish(path, role.into(), said, inner, Purpose::Train)
}

/// A turn that says in JSON what the assistant calls, as the message with these calls.
fn calling(path: &str, said: &'static str, mut turn: Fields) -> Result<Message> {
    let at = turn.path(said);
    let expected = "JSON of `name` and `arguments`, or of a list of these";
    let value = match turn.value(said) {
        Some(Value::String(text)) => inside(&at, &text)?,
        Some(other) => other,
        None => return Err(missing(&at, expected)),
    };
    let calls = match value {
        Value::Array(calls) => calls,
        one => vec![one],
    };
    let call = |call: Value| {
        let name = call.get("name").and_then(Value::as_str);
        let arguments = match call.get("arguments").or(call.get("parameters")) {
            None | Some(Value::Null) => Some("{}".to_owned()),
            Some(Value::String(text)) => Some(text.clone()),
            // As in OpenAI's interface.
            Some(object @ Value::Object(_)) => Some(object.to_string()),
            Some(_) => None,
        };
        let fields = call.as_object().map_or(0, Map::len);
        match (name, arguments) {
            (Some(name), Some(arguments)) if fields <= 2 => Ok(serde_json::json!({
                "type": "function",
                "function": { "name": name, "arguments": arguments },
            })),
            _ => Err(wrong(&at, &call, expected)),
        }
    };
    let calls: Vec<Value> = calls.into_iter().map(call).collect::<Result<_>>()?;
    let mut message = turn.rest();
    message.insert(said.into(), "".into());
    if message.insert("tool_calls".into(), calls.into()).is_some_and(|v| !v.is_null()) {
        let what = format!("`{path}` has `tool_calls` beside those that it says; leave them out");
        return Err(Bad::field(Reason::BadValue, path, what));
    }
    let message = Fields::inner(path, Value::Object(message), true)?;
    finish(path, "assistant".into(), said, message, Purpose::Train)
}

fn alpaca(fields: &mut Fields, form: Form) -> Result<Content> {
    let system = system(fields)?;
    let answer = if form.contains(&"response") { "response" } else { "output" };
    let mut instruction = text(fields, "instruction")?;
    filled("instruction", &instruction)?;
    let mut beside = Vec::new();
    for field in ["input", "context"] {
        beside.extend(fields.string(field)?.filter(|text| !text.trim().is_empty()));
    }
    let output = text(fields, answer)?;
    filled(answer, &output)?;
    match beside.as_slice() {
        [] => {}
        [input] => instruction = format!("{instruction}\n\n{input}"),
        _ => {
            let what = "`input` and `context` exclude each other; leave one out";
            return Err(Bad::field(Reason::BadValue, "context", what));
        }
    }
    let said = vec![Message::new("user", instruction), Message::new("assistant", output)];
    Ok(Content::Chat { messages: after(system, said)?, tools: Vec::new() })
}

fn prompt(fields: &mut Fields, form: Form) -> Result<Content> {
    let &[asked, answer] = form else {
        return Err(Bad::row(Reason::UnknownLayout, "it has no prompt and completion"));
    };
    let (system, tools) = (system(fields)?, tools(fields)?);
    let messages = match (fields.value(asked), fields.value(answer)) {
        (Some(Value::Array(prompt)), Some(Value::Array(completion))) => {
            let mut all = messages(asked, prompt, Purpose::Context)?;
            all.extend(messages(answer, completion, Purpose::Train)?);
            all
        }
        (Some(Value::String(prompt)), Some(Value::String(completion))) => {
            filled(answer, &completion)?;
            vec![Message::new("user", prompt), Message::new("assistant", completion)]
        }
        (None, _) => return Err(missing(asked, "a text, or a list of messages")),
        (_, None) => return Err(missing(answer, "a text, or a list of messages")),
        (Some(Value::String(_)), Some(other)) => {
            return Err(wrong(answer, &other, &format!("a string, as `{asked}` is")));
        }
        (Some(Value::Array(_)), Some(other)) => {
            return Err(wrong(answer, &other, &format!("a list of messages, as `{asked}` is")));
        }
        (Some(other), _) => return Err(wrong(asked, &other, "a string or a list of messages")),
    };
    Ok(Content::Chat { messages: after(system, messages)?, tools })
}
