//! Whether a template writes what a conversation says: what it passes over is neither served nor
//! learned, and nothing else tells.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::Value;

use crate::error::shown;
use crate::{ChatTemplate, Content, Effort, Error, Message};

/// Most fields of messages that are looked at in one conversation.
const MAX_FIELDS: usize = 16;

/// From so many bytes on, a text that occurs in a rendering is there because somebody says it: a
/// shorter one may be a part of something else.
const TELLING: usize = 12;

/// A conversation and what a template makes of it.
pub(super) struct Written<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
    tools: &'a [Value],
    /// The whole, rendered.
    full: &'a str,
    effort: &'a Effort<'a>,
    marked: OnceCell<BTreeSet<usize>>,
}

/// Checks that `full`, a conversation as the template renders it, has what the assistant says in
/// all messages that are trained on: their text or their tool calls, and of these all.
///
/// # Errors
/// [`Error::Unsaid`]; a part of the content is not text; or the effort is at its end.
pub fn check_said(
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[Value],
    full: &str,
    effort: &Effort<'_>,
) -> Result<(), Error> {
    let written = Written::new(template, messages, tools, full, effort);
    for (index, _) in messages.iter().enumerate().filter(|(_, m)| m.is_trained()) {
        effort.check()?;
        written.check(index, 0..full.len())?;
    }
    Ok(())
}

/// What of a conversation the template leaves out of `full`, its rendering: the tools, fields of
/// messages, or what some role says. Each is a name for people, on one line and short. What the
/// assistant says and is trained on is a matter of [`check_said`].
///
/// # Errors
/// The effort is at its end.
pub fn left_out(
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[Value],
    full: &str,
    effort: &Effort<'_>,
) -> Result<BTreeSet<String>, Error> {
    Written::new(template, messages, tools, full, effort).left_out()
}

/// What marks begin with.
const MARK: &str = "QzxKjV";

impl<'a> Written<'a> {
    pub(super) fn new(
        template: &'a ChatTemplate,
        messages: &'a [Message],
        tools: &'a [Value],
        full: &'a str,
        effort: &'a Effort<'a>,
    ) -> Self {
        Self { template, messages, tools, full, effort, marked: OnceCell::new() }
    }

    /// Whether the rendering is another one when the messages are changed. If the template then
    /// fails, it does look at what was changed.
    fn changes(&self, tools: &[Value], change: impl FnOnce(&mut Vec<Message>)) -> bool {
        let mut messages = self.messages.to_vec();
        change(&mut messages);
        let changed = self.effort.render_new(self.template, &messages, tools);
        changed.map_or(true, |text| text != self.full)
    }

    fn changes_one(&self, index: usize, change: impl FnOnce(&mut Message)) -> bool {
        self.changes(self.tools, |messages| {
            if let Some(message) = messages.get_mut(index) {
                change(message);
            }
        })
    }

    /// Whether the template writes what a message says, when that is a word or two: a rendering
    /// with marks in the place of all such messages tells it of all of them, where silencing one
    /// after the other takes a rendering for each.
    fn is_marked(&self, index: usize) -> bool {
        let marked = self.marked.get_or_init(|| {
            if self.full.contains(MARK) {
                return BTreeSet::new();
            }
            let mut messages = self.messages.to_vec();
            for (i, message) in messages.iter_mut().enumerate() {
                let text = message.text(i).ok().flatten();
                if text.is_some_and(|text| is_plain(&text)) {
                    message.content = Some(Content::Text(format!("{MARK}{i}w")));
                }
            }
            let text = self.effort.render_new(self.template, &messages, self.tools);
            let text = text.unwrap_or_default();
            let numbers = text.split(MARK).skip(1).map(|rest| rest.split_once('w'));
            numbers.filter_map(|number| number?.0.parse().ok()).collect()
        });
        marked.contains(&index)
    }

    /// What [`check_said`] does; the message's text is expected in a part of the rendering.
    pub(super) fn check(&self, index: usize, part: Range<usize>) -> Result<(), Error> {
        let Some(message) = self.messages.get(index) else { return Ok(()) };
        let text = message.text(index)?.unwrap_or_default();
        let text = text.trim();
        let calls = message.calls().map_or(0, Vec::len);
        if text.is_empty() && calls == 0 {
            return Ok(());
        }
        let written = !text.is_empty()
            && (self.full.get(part).is_some_and(|part| has(part, text))
                || is_plain(text) && self.is_marked(index)
                || self.changes_one(index, silence));
        let called = calls > 0 && self.changes_one(index, |m| drop_field(m, "tool_calls"));
        let refuse = |all, what: &str| {
            let what = format!(
                "the chat template {what}; use a template that does (`gradus data show` shows what \
                 is rendered), or set its `train` to false"
            );
            Err(Error::Unsaid { index, all, what })
        };
        match (written, called, calls) {
            (true, _, 0) => {}
            (false, _, 0) => {
                return refuse(
                    true,
                    "renders nothing of what it says, which teaches to say nothing",
                );
            }
            (false, false, _) => {
                return refuse(true, "does not render tool calls, which teaches to say nothing");
            }
            (true, false, _) => {
                return refuse(
                    false,
                    "renders its text without its tool calls, which teaches not to call",
                );
            }
            (_, true, 1) => {}
            (_, true, _) => {
                let last = |m: &mut Message| {
                    if let Some(Value::Array(calls)) = m.other.get_mut("tool_calls") {
                        calls.pop();
                    }
                };
                if !self.changes_one(index, last) {
                    let what = format!("does not render the last of its {calls} tool calls");
                    return refuse(false, &what);
                }
            }
        }
        Ok(())
    }

    fn left_out(&self) -> Result<BTreeSet<String>, Error> {
        let mut out = BTreeSet::new();
        if !self.tools.is_empty() && !self.changes(&[], |_| {}) {
            out.insert("`tools`".into());
        }
        let mut fields = BTreeSet::new();
        for (key, value) in self.messages.iter().flat_map(|m| &m.other) {
            // An id that links a result with its call says nothing by itself.
            if key != "tool_call_id" && !is_nothing(value) && fields.len() < MAX_FIELDS {
                fields.insert(key.as_str());
            }
        }
        for field in fields {
            let without = |messages: &mut Vec<Message>| {
                messages.iter_mut().for_each(|m| drop_field(m, field))
            };
            if !self.changes(self.tools, without) {
                out.insert(format!("the messages' {}", shown(field)));
            }
        }
        for (index, message) in self.messages.iter().enumerate() {
            let calls = message.calls().is_some();
            let role = match (message.is_trained(), calls) {
                // It has been checked, but for text beside calls.
                (true, false) => continue,
                (_, true) => "what is said beside tool calls".to_owned(),
                (false, false) => format!("what role {} says", shown(&message.role)),
            };
            let Ok(Some(text)) = message.text(index) else { continue };
            let text = text.trim();
            let there = text.is_empty() || out.contains(&role) || has(self.full, text);
            if there || is_plain(text) && self.is_marked(index) {
                continue;
            }
            self.effort.check()?;
            if !self.changes_one(index, silence) {
                out.insert(role);
            }
        }
        Ok(out)
    }
}

fn has(rendering: &str, text: &str) -> bool {
    text.len() >= TELLING && rendering.contains(text)
}

/// Whether a text is but a word or two, which no template takes for anything else.
fn is_plain(text: &str) -> bool {
    let text = text.trim();
    let plain = |c: char| c.is_alphanumeric() || matches!(c, ' ' | '.' | ',' | '!' | '?');
    text.len() < TELLING && text.chars().any(char::is_alphanumeric) && text.chars().all(plain)
}

fn silence(message: &mut Message) {
    message.content = Some(Content::Text(String::new()));
}

fn drop_field(message: &mut Message, field: &str) {
    message.other.retain(|key, _| key != field);
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}
