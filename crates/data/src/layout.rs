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
    /// OpenAI's: `messages`, and `tools`.
    Messages,
    /// `conversations` of `from` and `value`, with `system` and `tools`.
    ShareGpt,
    /// `instruction`, `input`, `output`, and `system`.
    Alpaca,
    /// `prompt` and `completion`: texts, or lists of messages; with `tools`.
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

    /// The fields that a row has in it, those that it must have first.
    fn fields(self) -> (&'static [&'static str], &'static [&'static str]) {
        match self {
            Layout::Messages => (&["messages"], &["tools"]),
            Layout::ShareGpt => (&["conversations"], &["system", "tools"]),
            Layout::Alpaca => (&["instruction", "output"], &["input", "system"]),
            Layout::Prompt => (&["prompt", "completion"], &["tools"]),
            Layout::Text => (&["text"], &[]),
        }
    }

    /// Whether rows of some layout must have a field of this name.
    pub(crate) fn is_field(name: &str) -> bool {
        Layout::ALL.iter().any(|l| l.fields().0.contains(&name))
    }

    fn knows(self, field: &str) -> bool {
        let (must, may) = self.fields();
        must.contains(&field) || may.contains(&field)
    }

    /// The layout of a row.
    ///
    /// # Errors
    /// No layout has its fields, or several have.
    pub fn detect(row: &Map<String, Value>) -> Result<Layout> {
        let fits = |layout: &Layout| layout.fields().0.iter().all(|f| row.contains_key(*f));
        let found: Vec<Layout> = Layout::ALL.into_iter().filter(fits).collect();
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
                  `completion`, or `text`";
    if row.is_empty() {
        return Bad::row(Reason::Empty, format!("it has no fields; {wanted}"));
    }
    let must: Vec<&str> = Layout::ALL.iter().flat_map(|l| l.fields().0).copied().collect();
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
        match reading.strict {
            true => check(&row, layout)?,
            false => columns(&mut row, layout, reading, ignored)?,
        }
        // A message says what is null by leaving it out; a row of a request must not.
        let mut fields = Fields::new(row, !reading.strict);
        let content = match layout {
            Layout::Messages => {
                let tools = tools(&mut fields)?;
                let list = list(&mut fields, "messages")?;
                Content::Chat { messages: messages("messages", list, Purpose::Train)?, tools }
            }
            Layout::ShareGpt => sharegpt(&mut fields)?,
            Layout::Alpaca => alpaca(&mut fields)?,
            Layout::Prompt => prompt(&mut fields)?,
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
    row.retain(|_, v| !v.is_null() && v.as_str() != Some(""));
    for field in ["messages", "conversations", "tools"] {
        if let Some(Value::String(json)) = row.get(field) {
            let value = parse_json(json.as_bytes()).map_err(|(e, _)| {
                let what = format!("`{field}` is a text that is no JSON: {e}");
                Bad::field(Reason::WrongType, field, what)
            })?;
            row.insert(field.into(), value);
        }
    }
    Ok(())
}

/// Refuses what a layout does not know.
fn check(row: &Map<String, Value>, layout: Layout) -> Result<()> {
    let (must, may) = layout.fields();
    let known: Vec<&str> = must.iter().chain(may).copied().collect();
    match row.keys().find(|k| !layout.knows(k)) {
        Some(odd) => Err(unknown(odd, odd, &known)),
        None => Ok(()),
    }
}

/// Takes columns out of a row that mean nothing for training.
fn columns(
    row: &mut Map<String, Value>,
    layout: Layout,
    reading: Reading,
    ignored: &mut BTreeSet<String>,
) -> Result<()> {
    let (must, may) = layout.fields();
    let known: Vec<&str> = must.iter().chain(may).copied().collect();
    let odd: Vec<String> = row.keys().filter(|k| !layout.knows(k)).cloned().collect();
    for name in odd {
        let elsewhere = Layout::ALL.into_iter().find(|l| l.fields().0.contains(&name.as_str()));
        let means = MEANINGFUL.contains(&name.as_str()) || near(&name, &known).is_some();
        match elsewhere {
            _ if means => return Err(unknown(&name, &name, &known)),
            Some(other) if !reading.chosen => {
                let what = format!(
                    "`{name}` belongs to layout {other}, the other fields to {layout}; choose one \
                     with `--layout`"
                );
                return Err(Bad::field(Reason::UnknownField, name, what));
            }
            _ => {
                row.shift_remove(&name);
                // Rows may have names of their own; what is listed is bounded.
                if ignored.len() < 64 {
                    ignored.insert(name);
                }
            }
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

fn sharegpt(fields: &mut Fields) -> Result<Content> {
    let tools = tools(fields)?;
    let system = fields.string("system")?.filter(|s| !s.is_empty());
    let list = list(fields, "conversations")?;
    check_count("conversations", list.len())?;
    let mut said: Vec<Message> = system.into_iter().map(|s| Message::new("system", s)).collect();
    for (i, value) in list.into_iter().enumerate() {
        let path = format!("conversations[{i}]");
        if value.get("role").is_some() && value.get("from").is_none() {
            let what = format!(
                "`{path}` has a `role`, not a `from`: these are messages; call the field \
                 `messages` instead of `conversations`"
            );
            return Err(Bad::field(Reason::MissingField, path, what));
        }
        let mut inner = Fields::inner(&path, value, true)?;
        let at = inner.path("from");
        let from = inner.string("from")?.ok_or_else(|| missing(&at, "who speaks"))?;
        let role = match from.as_str() {
            "human" | "user" => "user",
            "gpt" | "assistant" | "chatgpt" | "model" | "bot" => "assistant",
            "system" => "system",
            "tool" | "observation" => "tool",
            _ => {
                let expected = "human, gpt, system or tool";
                return Err(Bad {
                    reason: Reason::BadValue,
                    ..wrong(&at, &Value::String(from), expected)
                });
            }
        };
        if i == 0 && role == "system" && !said.is_empty() {
            let what = "`system` and a first turn of the system exclude each other; leave one out";
            return Err(Bad::field(Reason::BadValue, "system", what));
        }
        said.push(finish(&path, role.into(), "value", inner, Purpose::Train)?);
    }
    Ok(Content::Chat { messages: said, tools })
}

fn alpaca(fields: &mut Fields) -> Result<Content> {
    let system = fields.string("system")?.filter(|s| !s.is_empty());
    let mut instruction = text(fields, "instruction")?;
    filled("instruction", &instruction)?;
    let input = fields.string("input")?.unwrap_or_default();
    let output = text(fields, "output")?;
    filled("output", &output)?;
    if !input.trim().is_empty() {
        instruction = format!("{instruction}\n\n{input}");
    }
    let mut messages: Vec<Message> =
        system.map(|s| Message::new("system", s)).into_iter().collect();
    messages.push(Message::new("user", instruction));
    messages.push(Message::new("assistant", output));
    Ok(Content::Chat { messages, tools: Vec::new() })
}

fn prompt(fields: &mut Fields) -> Result<Content> {
    let tools = tools(fields)?;
    let messages = match (fields.value("prompt"), fields.value("completion")) {
        (Some(Value::Array(prompt)), Some(Value::Array(completion))) => {
            let mut all = messages("prompt", prompt, Purpose::Context)?;
            all.extend(messages("completion", completion, Purpose::Train)?);
            all
        }
        (Some(Value::String(prompt)), Some(Value::String(completion))) => {
            filled("completion", &completion)?;
            vec![Message::new("user", prompt), Message::new("assistant", completion)]
        }
        (None, _) => return Err(missing("prompt", "a text, or a list of messages")),
        (_, None) => return Err(missing("completion", "a text, or a list of messages")),
        (Some(Value::String(_)), Some(other)) => {
            return Err(wrong("completion", &other, "a string, as `prompt` is"));
        }
        (Some(Value::Array(_)), Some(other)) => {
            return Err(wrong("completion", &other, "a list of messages, as `prompt` is"));
        }
        (Some(other), _) => return Err(wrong("prompt", &other, "a string or a list of messages")),
    };
    Ok(Content::Chat { messages, tools })
}
