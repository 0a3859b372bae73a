//! Messages as people write them: OpenAI's shape, field by field.

use serde_json::{Map, Value};
use text::{Content, Message};

use crate::fields::{Fields, missing, unknown, wrong};
use crate::{Bad, Reason};

type Result<T> = std::result::Result<T, Bad>;

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;
/// Most tools of a conversation.
const MAX_TOOLS: usize = 1024;
/// Most that a message may weigh.
const MAX_WEIGHT: f32 = 1e6;

/// What messages are for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// To be answered: `train` and `weight` mean nothing.
    Serve,
    /// To be trained on, where they say so themselves or say nothing.
    Train,
    /// Context of what is trained on, unless they say otherwise.
    Context,
}

/// The tools that a template is told of: objects, as they are.
///
/// # Errors
/// Names the field that is no list of objects.
pub fn tools(fields: &mut Fields) -> Result<Vec<Value>> {
    let path = fields.path("tools");
    let tools = fields.list("tools", MAX_TOOLS)?.unwrap_or_default();
    match tools.iter().position(|tool| !tool.is_object()) {
        Some(i) => {
            let odd = tools.get(i).unwrap_or(&Value::Null);
            Err(wrong(&format!("{path}[{i}]"), odd, "an object that describes a function"))
        }
        None => Ok(tools),
    }
}

/// The messages at `path`, at least one.
///
/// # Errors
/// Names the message and the field.
pub fn messages(path: &str, list: Vec<Value>, purpose: Purpose) -> Result<Vec<Message>> {
    check_count(path, list.len())?;
    let message = |(i, value): (usize, Value)| message(&format!("{path}[{i}]"), value, purpose);
    list.into_iter().enumerate().map(message).collect()
}

pub(crate) fn check_count(path: &str, count: usize) -> Result<()> {
    if count == 0 {
        let what = format!("`{path}` is empty; expected at least one message");
        return Err(Bad::field(Reason::Empty, path, what));
    }
    if count > MAX_MESSAGES {
        let what = format!("`{path}` has {count}; expected at most {MAX_MESSAGES}");
        return Err(Bad::field(Reason::BadValue, path, what));
    }
    Ok(())
}

fn message(path: &str, value: Value, purpose: Purpose) -> Result<Message> {
    let mut fields = Fields::inner(path, value, true)?;
    let role = fields.string("role")?.filter(|role| !role.is_empty());
    let role = role.ok_or_else(|| missing(&fields.path("role"), "who speaks"))?;
    finish(path, role, "content", fields, purpose)
}

/// The rest of a message whose role is known, its text in the field `said`.
pub(crate) fn finish(
    path: &str,
    role: String,
    said: &'static str,
    mut fields: Fields,
    purpose: Purpose,
) -> Result<Message> {
    let at = fields.path(said);
    let content = match fields.value(said) {
        None => None,
        Some(Value::String(text)) => Some(Content::Text(text)),
        Some(Value::Array(parts)) => Some(Content::Parts(parts_of(&at, parts)?)),
        Some(other) => return Err(wrong(&at, &other, "a string or a list of parts")),
    };
    let (train, weight) = switches(&mut fields, &role, purpose)?;
    let mut other = fields.rest();
    // What is null is not there.
    other.retain(|_, value| !value.is_null());
    if purpose != Purpose::Serve {
        let known = ["role", said, "train", "weight", "tool_calls", "tool_call_id"];
        let slip = |key: &&String| {
            !known.contains(&key.as_str()) && crate::fields::near(key, &known).is_some()
        };
        if let Some(odd) = other.keys().find(slip) {
            return Err(unknown(&format!("{path}.{odd}"), odd, &known));
        }
        check_calls(path, &other)?;
        if role != "assistant" && crate::fields::near(&role, &["assistant"]).is_some() {
            let bad = wrong(&format!("{path}.role"), &Value::String(role), "\"assistant\"");
            return Err(Bad { reason: Reason::BadValue, ..bad });
        }
    }
    let message = Message { role, content, train, weight, other };
    // What is no text is refused here, where its place is known.
    match message.text(0) {
        Ok(text) => {
            let calls = message.other.get("tool_calls").and_then(Value::as_array);
            let says = text.is_some_and(|t| !t.trim().is_empty())
                || calls.is_some_and(|calls| !calls.is_empty());
            if purpose != Purpose::Serve && message.is_trained() && !says {
                let what = format!(
                    "`{at}` is empty, and would teach to say nothing; leave the message out, or \
                     set its `train` to false"
                );
                return Err(Bad::field(Reason::Empty, at, what));
            }
            Ok(message)
        }
        Err(text::Error::Message { what, .. }) => {
            Err(Bad::field(Reason::WrongType, at.as_str(), format!("`{at}`: {what}")))
        }
        Err(other) => Err(Bad::field(Reason::WrongType, at.as_str(), format!("`{at}`: {other}"))),
    }
}

/// Tool calls in the one shape that templates know.
fn check_calls(path: &str, other: &Map<String, Value>) -> Result<()> {
    if other.contains_key("function_call") {
        let at = format!("{path}.function_call");
        let what = format!("`{at}` is what `tool_calls` was before; write it as that");
        return Err(Bad::field(Reason::UnknownField, at, what));
    }
    let at = format!("{path}.tool_calls");
    match other.get("tool_calls") {
        None => Ok(()),
        Some(Value::Array(calls)) => match calls.iter().position(|call| !call.is_object()) {
            None => Ok(()),
            Some(i) => {
                let odd = calls.get(i).unwrap_or(&Value::Null);
                Err(wrong(&format!("{at}[{i}]"), odd, "an object that calls a function"))
            }
        },
        Some(odd) => Err(wrong(&at, odd, "a list of calls")),
    }
}

/// Whether a message is trained on, and what it weighs.
fn switches(fields: &mut Fields, role: &str, purpose: Purpose) -> Result<(bool, f32)> {
    let (at_train, at_weight) = (fields.path("train"), fields.path("weight"));
    if purpose == Purpose::Serve {
        for (at, field) in [(at_train, "train"), (at_weight, "weight")] {
            if fields.value(field).is_some() {
                let what = format!("`{at}` has a meaning in training data only; leave it out");
                return Err(Bad::field(Reason::UnknownField, at, what));
            }
        }
        return Ok((true, 1.0));
    }
    let train = fields.flag("train")?;
    // What is smaller is 0 in f32.
    let range = format!("0, or a number from 1e-45 to {MAX_WEIGHT}");
    let in_range = |w: f64| w == 0.0 || (w > 0.0 && w as f32 > 0.0 && w as f32 <= MAX_WEIGHT);
    let weight = fields.number("weight", in_range, &range).map_err(|e| match e.field {
        field if field == at_weight => Bad { reason: Reason::BadValue, field, ..e },
        field => Bad { field, ..e },
    })?;
    let clash = |at: String, why: &str| {
        let what = format!("`{at}` {why}; leave it out");
        Err(Bad::field(Reason::BadValue, at, what))
    };
    if role != "assistant" {
        if train == Some(true) {
            return clash(at_train, "is true, but only what the assistant says is trained on");
        }
        if weight.is_some_and(|w| w > 0.0) {
            return clash(at_weight, "has no effect: only what the assistant says is trained on");
        }
        return Ok((train.unwrap_or(true), 1.0));
    }
    if train == Some(false) && weight.is_some_and(|w| w > 0.0) {
        return clash(at_weight, "has no effect beside `train: false`");
    }
    let train = train.unwrap_or(purpose == Purpose::Train || weight.is_some());
    Ok((train, weight.map_or(1.0, |w| w as f32)))
}

fn parts_of(path: &str, parts: Vec<Value>) -> Result<Vec<Map<String, Value>>> {
    let part = |(i, part): (usize, Value)| match part {
        Value::Object(part) => Ok(part),
        other => Err(wrong(&format!("{path}[{i}]"), &other, "an object with the field `type`")),
    };
    parts.into_iter().enumerate().map(part).collect()
}
