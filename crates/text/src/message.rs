//! The messages of a conversation, in OpenAI's shape.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Error;
use crate::error::shown;

/// A message: `{"role": "user", "content": "..."}` and whatever else a template knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template takes.
    pub role: String,
    /// What is said; none for a message that only calls tools.
    #[serde(default)]
    pub content: Option<Content>,
    /// Whether an assistant's message is trained on; `false` keeps it as context. Not shown to
    /// the template.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub train: bool,
    /// What the loss of its tokens is multiplied by where it is trained on: finite, not negative;
    /// 0 is as good as `train` off. Not shown to the template.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub weight: f32,
    /// Everything else, as it came: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The content of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Text.
    Text(String),
    /// Parts `{"type": "text", "text": "..."}`; they are joined with line feeds.
    Parts(Vec<Map<String, Value>>),
}

fn yes() -> bool {
    true
}

fn one() -> f32 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_one(value: &f32) -> bool {
    *value == 1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_true(value: &bool) -> bool {
    *value
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Some(Content::Text(content.into())),
            train: true,
            weight: 1.0,
            other: Map::new(),
        }
    }

    /// Whether its tokens carry loss: the assistant says it, and nothing turns that off.
    pub fn is_trained(&self) -> bool {
        self.role == "assistant" && self.train && self.weight > 0.0
    }

    /// Its tool calls; none where there are none.
    pub(crate) fn calls(&self) -> Option<&Vec<Value>> {
        self.other.get("tool_calls")?.as_array().filter(|calls| !calls.is_empty())
    }

    /// The content as text; none where there is none.
    ///
    /// # Errors
    /// A part is not text. `index` is that of the message, for the error.
    pub fn text(&self, index: usize) -> Result<Option<String>, Error> {
        let parts = match &self.content {
            None => return Ok(None),
            Some(Content::Text(text)) => return Ok(Some(text.clone())),
            Some(Content::Parts(parts)) => parts,
        };
        let mut text = String::new();
        for (i, part) in parts.iter().enumerate() {
            let kind = part.get("type").and_then(Value::as_str);
            let (Some("text"), Some(Value::String(more))) = (kind, part.get("text")) else {
                let what = match kind {
                    Some(kind) if kind != "text" => format!(
                        "content part {i} is of type {}; this model takes \"text\" only",
                        shown(kind)
                    ),
                    _ => format!("content part {i} is not {{\"type\": \"text\", \"text\": ...}}"),
                };
                return Err(Error::Message { index, what });
            };
            if i > 0 {
                text.push('\n');
            }
            text.push_str(more);
        }
        Ok(Some(text))
    }

    /// As templates see it. Arguments of tool calls, which OpenAI's interface has as a string of
    /// JSON, become what the string says if `parse_arguments`.
    pub(crate) fn to_template(&self, index: usize, parse_arguments: bool) -> Result<Value, Error> {
        let mut message = Map::new();
        message.insert("role".into(), self.role.clone().into());
        message.insert("content".into(), self.text(index)?.into());
        for (key, value) in &self.other {
            let mut value = value.clone();
            if parse_arguments && key == "tool_calls" {
                for arguments in arguments(&mut value) {
                    let parsed = arguments.as_str().map(serde_json::from_str);
                    if let Some(Ok(parsed @ Value::Object(_))) = parsed {
                        *arguments = parsed;
                    }
                }
            }
            message.insert(key.clone(), value);
        }
        Ok(message.into())
    }

    /// Whether there are arguments of tool calls to parse.
    pub(crate) fn has_string_arguments(&self) -> bool {
        let calls = self.other.get("tool_calls").and_then(Value::as_array);
        calls.into_iter().flatten().any(|call| {
            let arguments = call.get("function").unwrap_or(call).get("arguments");
            arguments.is_some_and(Value::is_string)
        })
    }
}

fn arguments(calls: &mut Value) -> impl Iterator<Item = &mut Value> {
    calls.as_array_mut().into_iter().flatten().filter_map(|call| {
        let call = if call.get("function").is_some() { call.get_mut("function")? } else { call };
        call.get_mut("arguments")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_openais_shape() {
        let message: Message = serde_json::from_str(
            r#"{"role": "assistant", "content": null, "tool_calls": [{"id": "1",
                "function": {"name": "f", "arguments": "{\"x\": [1, 2]}"}}], "train": false}"#,
        )
        .unwrap();
        assert!(!message.train && message.content.is_none() && message.has_string_arguments());
        let seen = message.to_template(0, true).unwrap();
        assert_eq!(seen["content"], Value::Null);
        assert_eq!(seen["tool_calls"][0]["function"]["arguments"]["x"][1], 2);
        assert!(seen.get("train").is_none());
        let kept = message.to_template(0, false).unwrap();
        assert_eq!(kept["tool_calls"][0]["function"]["arguments"], "{\"x\": [1, 2]}");

        let parts: Message = serde_json::from_str(
            r#"{"role": "user", "content": [{"type": "text", "text": "a"},
                {"type": "text", "text": "b"}]}"#,
        )
        .unwrap();
        assert_eq!(parts.text(0).unwrap().unwrap(), "a\nb");
        let again: Message = serde_json::from_str(&serde_json::to_string(&parts).unwrap()).unwrap();
        assert_eq!(again, parts);
    }

    #[test]
    fn refuses_what_it_cannot_show() {
        let refused = |part: &str| {
            let text = format!(r#"{{"role": "user", "content": [{part}]}}"#);
            let message: Message = serde_json::from_str(&text).unwrap();
            message.text(3).unwrap_err().to_string()
        };
        assert_eq!(
            refused(r#"{"type": "image_url", "image_url": {"url": "x"}}"#),
            "message 3: content part 0 is of type \"image_url\"; this model takes \"text\" only"
        );
        assert_eq!(
            refused(r#"{"type": "text"}"#),
            "message 3: content part 0 is not {\"type\": \"text\", \"text\": ...}"
        );
        for bad in [
            r#"{"role": "user", "content": 7}"#,
            r#"{"content": "x"}"#,
            r#"{"role": "user", "content": "x", "train": "no"}"#,
        ] {
            assert!(serde_json::from_str::<Message>(bad).is_err(), "{bad}");
        }
    }
}
