//! `POST /v1/chat/completions` and `POST /v1/completions`.

use data::{Purpose, tools};
use serde_json::{Value, json};
use text::SamplerConfig;

use super::json::{Fields, body, missing, wrong};
use super::{Host, text_error};
use crate::{Ask, Error, Result};

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;

/// How the answer is wanted.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Reply {
    /// As a stream of events.
    pub stream: bool,
    /// With an event at its end that says what it took.
    pub include_usage: bool,
}

/// What both interfaces have in common.
struct Common {
    model: String,
    max_tokens: usize,
    sampler: SamplerConfig,
    seed: u64,
    stops: Vec<String>,
    reply: Reply,
}

impl Common {
    fn ask(self, tokens: Vec<u32>) -> (Ask, Reply) {
        let Common { model, max_tokens, sampler, seed, stops, reply } = self;
        (Ask { tokens, model, max_tokens, sampler, seed, stops }, reply)
    }
}

/// Reads a request for the next message of a conversation. `seed` is used where it has none.
///
/// # Errors
/// Names the field that is wrong, unknown or not supported, or the message that the template
/// refuses.
pub fn chat(bytes: &[u8], host: &Host, seed: u64) -> Result<(Ask, Reply)> {
    let mut fields = body(bytes, true)?;
    let messages = fields.list("messages", MAX_MESSAGES)?;
    let tools = tools(&mut fields)?;
    for (i, tool) in tools.iter().enumerate() {
        let strict = tool.get("function").and_then(|function| function.get("strict"));
        if let Some(strict) =
            strict.filter(|strict| !matches!(strict, Value::Null | Value::Bool(false)))
        {
            let expected = "false; that arguments fit a schema cannot be enforced";
            return Err(wrong(&format!("tools[{i}].function.strict"), strict, expected));
        }
    }
    let tools = match fields.value("tool_choice") {
        None => tools,
        Some(Value::String(choice)) if choice == "auto" => tools,
        Some(Value::String(choice)) if choice == "none" => Vec::new(),
        Some(other) => {
            let expected = "\"auto\" or \"none\"; a call of a tool cannot be enforced";
            return Err(wrong("tool_choice", &other, expected));
        }
    };
    fields.only("parallel_tool_calls", &[json!(true)])?;
    fields.only("logprobs", &[json!(false)])?;
    fields.only("top_logprobs", &[json!(0)])?;
    fields.only("response_format", &[json!({"type": "text"})])?;
    fields.only("modalities", &[json!(["text"])])?;
    let limit = fields.whole("max_completion_tokens", 1..=u64::from(u32::MAX))?;
    let common = common(&mut fields, host, limit, seed)?;
    fields.finish()?;

    let messages = messages.ok_or_else(|| missing("messages", "a list of messages"))?;
    let messages = data::messages("messages", messages, Purpose::Serve)?;
    let template = host.template("messages")?;
    let tokens = text::encode_chat(host.model.tokenizer(), template, &messages, &tools)
        .map_err(|e| text_error("messages", e))?;
    if tokens.is_empty() {
        return Err(Error::field("messages", "the template makes no text of these `messages`"));
    }
    Ok(common.ask(tokens))
}

/// Reads a request to continue a text. `seed` is used where it has none.
///
/// # Errors
/// Names the field that is wrong, unknown or not supported.
pub fn completion(bytes: &[u8], host: &Host, seed: u64) -> Result<(Ask, Reply)> {
    let mut fields = body(bytes, true)?;
    let prompt = fields.value("prompt");
    fields.only("best_of", &[json!(1)])?;
    fields.only("echo", &[json!(false)])?;
    fields.only("suffix", &[json!("")])?;
    fields.only("logprobs", &[])?;
    let common = common(&mut fields, host, None, seed)?;
    fields.finish()?;

    let tokens = prompt_tokens(prompt.ok_or_else(|| missing("prompt", "a string"))?, host)?;
    if tokens.is_empty() {
        return Err(Error::field("prompt", "`prompt` is empty; expected at least one token"));
    }
    Ok(common.ask(tokens))
}

/// A prompt: a text, tokens, or a list of one of these.
fn prompt_tokens(prompt: Value, host: &Host) -> Result<Vec<u32>> {
    let expected = "a string, or a list of token ids";
    let prompt = match prompt {
        Value::Array(mut list) if list.iter().any(|v| v.is_string() || v.is_array()) => {
            if list.len() > 1 {
                let message = format!("`prompt` is a list of {}; expected one prompt", list.len());
                return Err(Error::field("prompt", message));
            }
            list.pop().unwrap_or_default()
        }
        other => other,
    };
    match prompt {
        Value::String(text) => {
            text::encode_prompt(host.model.tokenizer(), &text).map_err(|e| text_error("prompt", e))
        }
        Value::Array(ids) => {
            let vocab = host.model.geometry().vocab;
            let id = |(i, value): (usize, &Value)| match value.as_u64() {
                Some(id) if id < vocab as u64 => Ok(id as u32),
                _ => {
                    let expected = format!("a token id below {vocab}");
                    Err(wrong(&format!("prompt[{i}]"), value, &expected))
                }
            };
            ids.iter().enumerate().map(id).collect()
        }
        other => Err(wrong("prompt", &other, expected)),
    }
}

fn common(fields: &mut Fields, host: &Host, limit: Option<u64>, seed: u64) -> Result<Common> {
    let model = fields.string("model")?.unwrap_or_else(|| host.name.clone());
    let other = fields.whole("max_tokens", 1..=u64::from(u32::MAX))?;
    if let (Some(a), Some(b)) = (limit, other)
        && a != b
    {
        let message = format!("`max_completion_tokens` is {a} and `max_tokens` is {b}; give one");
        return Err(Error::field("max_tokens", message));
    }
    let max_tokens = limit.or(other).map_or(host.model.geometry().context, |n| n as usize);
    let sampler = sampler(fields, host)?;
    let seed = match fields.value("seed") {
        None => seed,
        Some(value) => match value.as_u64().or(value.as_i64().map(|n| n as u64)) {
            Some(seed) => seed,
            None => return Err(wrong("seed", &value, "a whole number")),
        },
    };
    let stops = stops(fields)?;
    fields.only("n", &[json!(1)])?;
    // Says who asks; changes nothing.
    fields.string("user")?;
    let stream = fields.flag("stream")?.unwrap_or(false);
    let mut include_usage = false;
    if let Some(options) = fields.value("stream_options") {
        if !stream {
            let message = "`stream_options` is there, but `stream` is not true";
            return Err(Error::field("stream_options", message));
        }
        let mut options = Fields::inner("stream_options", options, true)?;
        include_usage = options.flag("include_usage")?.unwrap_or(false);
        options.finish()?;
    }
    let reply = Reply { stream, include_usage };
    Ok(Common { model, max_tokens, sampler, seed, stops, reply })
}

fn sampler(fields: &mut Fields, host: &Host) -> Result<SamplerConfig> {
    let mut config = SamplerConfig::default();
    for (field, to) in [
        ("temperature", &mut config.temperature),
        ("top_p", &mut config.top_p),
        ("min_p", &mut config.min_p),
        ("typical_p", &mut config.typical_p),
        ("repeat_penalty", &mut config.repeat_penalty),
        ("presence_penalty", &mut config.presence_penalty),
        ("frequency_penalty", &mut config.frequency_penalty),
    ] {
        if let Some(value) = fields.float(field, |_| true, "a number")? {
            *to = value;
        }
    }
    for (field, to) in [("top_k", &mut config.top_k), ("repeat_last_n", &mut config.repeat_last_n)]
    {
        if let Some(value) = fields.whole(field, 0..=u64::from(u32::MAX))? {
            *to = value as u32;
        }
    }
    if let Some(bias) = fields.value("logit_bias") {
        let Value::Object(bias) = bias else {
            return Err(wrong("logit_bias", &bias, "an object from token ids to numbers"));
        };
        let vocab = host.model.geometry().vocab;
        for (key, value) in bias {
            let path = format!("logit_bias.{key}");
            let id = key.parse().ok().filter(|&id| (id as usize) < vocab);
            let Some(id) = id else {
                let message = format!("`{path}` names no token; expected an id below {vocab}");
                return Err(Error::field(path, message));
            };
            match value.as_f64().filter(|b| (-100.0..=100.0).contains(b)) {
                Some(value) => config.logit_bias.insert(id, value as f32),
                None => return Err(wrong(&path, &value, "a number from -100 to 100")),
            };
        }
    }
    config.validate().map_err(|e| text_error("", e))?;
    Ok(config)
}

fn stops(fields: &mut Fields) -> Result<Vec<String>> {
    let list = match fields.value("stop") {
        None => return Ok(Vec::new()),
        Some(text @ Value::String(_)) => vec![text],
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong("stop", &other, "a string or a list of strings")),
    };
    let mut stops = Vec::new();
    for (i, stop) in list.into_iter().enumerate() {
        match stop {
            Value::String(stop) => stops.push(stop),
            other => return Err(wrong(&format!("stop[{i}]"), &other, "a string")),
        }
    }
    text::TextStream::new(&stops).map_err(|e| text_error("stop", e))?;
    Ok(stops)
}
