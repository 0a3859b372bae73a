//! Chat templates: messages to text, in the Jinja dialect that Hugging Face models ship.
//!
//! Rendered by minijinja with Python's string methods, `trim_blocks` and `lstrip_blocks` as
//! `transformers` sets them. A template is untrusted: its steps, its depth and its output are
//! bounded, and it reaches nothing but the messages it is given.

use std::fmt::Write as _;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, UndefinedBehavior};
use serde::{Deserialize, Serialize};

use crate::error::shown;
use crate::{Encode, Error, Tokenizer};

const KEY: &str = "tokenizer.chat_template";

/// Steps one rendering may take; a long conversation takes some thousands.
const FUEL: u64 = 4_000_000;
/// Nesting of macros and includes.
const DEPTH: usize = 64;
/// Most bytes of a template.
const MAX_SOURCE: usize = 1 << 20;
/// Most bytes of a rendering.
const MAX_OUTPUT: usize = 16 << 20;

/// Templates for models that come without one.
const BUILT_IN: &[(&str, &str)] = &[
    (
        "plain",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}Assistant: \
         {{ m.content }}{{ eos_token }}\n{% elif m.role == 'user' %}User: {{ m.content }}\n\
         {% else %}{{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}\
         Assistant:{% endif %}",
    ),
    (
        "chatml",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
];

/// A message of a conversation, in OpenAI's shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, ...
    pub role: String,
    /// A string, a list of parts, or nothing (an assistant turn that only calls tools).
    #[serde(default)]
    pub content: serde_json::Value,
    /// For training: whether an assistant turn is learned. Never shown to the template.
    #[serde(default = "yes", skip_serializing)]
    pub train: bool,
    /// Everything else (`tool_calls`, `name`, `tool_call_id`, ...), as the template reads it.
    #[serde(flatten)]
    pub other: serde_json::Map<String, serde_json::Value>,
}

fn yes() -> bool {
    true
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let content = serde_json::Value::String(content.into());
        Self { role: role.into(), content, train: true, other: serde_json::Map::new() }
    }

    /// As templates read it: parts that are all text are joined to one string.
    fn value(&self) -> Value {
        let mut map = serde_json::Map::new();
        map.insert("role".into(), self.role.clone().into());
        let text = |part: &serde_json::Value| {
            let is_text = part.get("type").and_then(|t| t.as_str()) == Some("text");
            part.get("text").filter(|_| is_text).and_then(|t| t.as_str()).map(str::to_owned)
        };
        let joined = self.content.as_array().filter(|parts| !parts.is_empty());
        let joined = joined.and_then(|parts| parts.iter().map(text).collect::<Option<String>>());
        map.insert("content".into(), joined.map_or_else(|| self.content.clone(), Into::into));
        for (key, value) in &self.other {
            map.insert(key.clone(), value.clone());
        }
        Value::from(Serde(map))
    }
}

/// A parsed chat template.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    /// Where it is from, as errors name it.
    origin: String,
    bos: String,
    eos: String,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("origin", &self.origin).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// The template of a file.
    ///
    /// # Errors
    /// The file has none, or it does not parse.
    pub fn from_metadata(metadata: &gguf::Metadata) -> Result<Self, Error> {
        let source = metadata.str(KEY)?;
        let tokens = metadata.opt_strings("tokenizer.ggml.tokens")?;
        let token = |key: &str| -> Result<String, Error> {
            let id = metadata.opt_u32(key)?;
            let text = id.zip(tokens).and_then(|(id, tokens)| tokens.get(id as usize));
            Ok(text.cloned().unwrap_or_default())
        };
        let bos = token("tokenizer.ggml.bos_token_id")?;
        let eos = token("tokenizer.ggml.eos_token_id")?;
        Self::parse(source, format!("{}: key `{KEY}`", metadata.file()), bos, eos)
    }

    /// A template that comes with the program, for a model that has none: `plain` or `chatml`.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn built_in(name: &str, tokenizer: &Tokenizer) -> Result<Self, Error> {
        let Some((_, source)) = BUILT_IN.iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = BUILT_IN.iter().map(|(n, _)| *n).collect();
            return Err(Error::TemplateName { name: shown(name), known: known.join(", ") });
        };
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id).ok()).unwrap_or("");
        let (bos, eos) = (text(tokenizer.bos()).to_owned(), text(tokenizer.eos()).to_owned());
        Self::parse(source, format!("built-in template `{name}`"), bos, eos)
    }

    /// A template from its source; `bos` and `eos` are the texts of those tokens.
    ///
    /// # Errors
    /// It is longer than 1 MiB or does not parse.
    pub fn parse(source: &str, origin: String, bos: String, eos: String) -> Result<Self, Error> {
        if source.len() > MAX_SOURCE {
            let what = format!("has {} bytes; at most {MAX_SOURCE} are allowed", source.len());
            return Err(Error::Template { origin, what });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| problem(&origin, &e))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(DEPTH);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        let source = without_generation_tags(source);
        environment.add_template_owned("chat", source).map_err(|e| problem(&origin, &e))?;
        Ok(Self { environment: Arc::new(environment), origin, bos, eos })
    }

    /// The text of a conversation. `tools` is the list the template offers to the model;
    /// `add_generation_prompt` ends the text where the assistant's answer begins.
    ///
    /// # Errors
    /// The template refuses the conversation, fails, does not end, or its text is too long.
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let messages: Vec<Value> = messages.iter().map(Message::value).collect();
        let context = minijinja::context! {
            messages => messages,
            tools => tools.map(|t| Value::from(Serde(t))),
            add_generation_prompt => add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let template =
            self.environment.get_template("chat").map_err(|e| problem(&self.origin, &e))?;
        let mut out = Bounded(Vec::new());
        template.render_captured_to(context, &mut out).map_err(|e| problem(&self.origin, &e))?;
        String::from_utf8(out.0).map_err(|_| Error::Template {
            origin: self.origin.clone(),
            what: "gives text that is not UTF-8".into(),
        })
    }
}

/// The tokens of a conversation that is to be answered.
///
/// # Errors
/// As [`ChatTemplate::render`] and [`Tokenizer::encode`].
pub fn prompt(
    messages: &[Message],
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, Error> {
    tokenizer.encode(&template.render(messages, None, true)?, Encode::PROMPT)
}

/// The tokens of a conversation to learn from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The tokens: those of the whole rendering, encoded as [`prompt`] encodes.
    pub ids: Vec<u32>,
    /// Per token, whether it is part of what an assistant turn says, its end included.
    pub trained: Vec<bool>,
}

/// Renders and encodes a conversation once, as a whole, and finds the tokens of its assistant
/// turns: those that begin after the generation prompt of the turn, up to the token that ends it.
///
/// # Errors
/// As [`prompt`]; and when the template changes earlier text as messages are added, so that a
/// turn cannot be found in the whole, or no assistant turn is to be learned.
pub fn conversation(
    messages: &[Message],
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
) -> Result<Conversation, Error> {
    let full = template.render(messages, None, false)?;
    let mut spans = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if message.role != "assistant" || !message.train {
            continue;
        }
        let part = |n: usize, prompt: bool| {
            template.render(messages.get(..n).unwrap_or(&[]), None, prompt)
        };
        let (before, upto) = (part(index, true)?, part(index + 1, false)?);
        if !full.starts_with(&upto) || !upto.starts_with(&before) || before.len() >= upto.len() {
            let what = "the chat template renders this turn differently once the conversation goes \
                        on, so its tokens cannot be told; send it as a conversation that ends here";
            return Err(Error::Message { index, what: what.into() });
        }
        spans.push(before.len()..upto.len());
    }
    if spans.is_empty() {
        let what = "it has no assistant turn to learn".into();
        return Err(Error::Conversation { what });
    }
    let pieces = tokenizer.encode_pieces(&full, Encode::PROMPT)?;
    let mut trained: Vec<bool> = pieces.iter().map(|_| false).collect();
    for span in spans {
        let inside: Vec<usize> = pieces
            .iter()
            .enumerate()
            .filter(|(_, piece)| span.contains(&(piece.start as usize)))
            .map(|(i, _)| i)
            .collect();
        // What a template writes after the token that ends the turn is never generated.
        let ends = |i: &&usize| pieces.get(**i).is_some_and(|p| tokenizer.is_eog(p.id));
        let last = inside.iter().rev().find(ends).or(inside.last()).copied();
        for i in inside {
            if let Some(flag) = trained.get_mut(i).filter(|_| Some(i) <= last) {
                *flag = true;
            }
        }
    }
    if !trained.iter().any(|&t| t) {
        let what = "no token belongs to an assistant turn".into();
        return Err(Error::Conversation { what });
    }
    Ok(Conversation { ids: pieces.iter().map(|p| p.id).collect(), trained })
}

/// A writer that refuses to grow past [`MAX_OUTPUT`].
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(std::io::Error::other("the text grows past 16 MiB"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn problem(origin: &str, error: &minijinja::Error) -> Error {
    let mut what = match error.kind() {
        ErrorKind::OutOfFuel => format!("does not end within {FUEL} steps"),
        ErrorKind::WriteFailure => "gives more than 16 MiB of text".to_owned(),
        kind => match error.detail() {
            Some(detail) => format!("{kind}: {}", shown(detail)),
            None => kind.to_string(),
        },
    };
    if let Some(line) = error.line() {
        let _ = write!(what, " (line {line})");
    }
    Error::Template { origin: origin.to_owned(), what }
}

/// `transformers` marks the assistant's part with `{% generation %}`, a tag that only its own
/// masks need. It becomes a condition that always holds, which keeps its whitespace control.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        out.push_str(before);
        let Some((inside, after)) = tag.split_once("%}") else {
            out.push_str("{%");
            rest = tag;
            continue;
        };
        let name = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let replaced = match name {
            "generation" => inside.replace("generation", "if true"),
            "endgeneration" => inside.replace("endgeneration", "endif"),
            _ => inside.to_owned(),
        };
        let _ = write!(out, "{{%{replaced}%}}");
        rest = after;
    }
    out.push_str(rest);
    out
}

fn raise_exception(message: String) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The time now, in UTC, by the common `strftime` directives.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    strftime(format, now.map_or(0, |d| d.as_secs()))
}

fn strftime(format: &str, seconds: u64) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] =
        ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Civil date from days since 1970 (Howard Hinnant, "chrono-compatible low-level date
    // algorithms").
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let m = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * m + 2) / 5 + 1;
    let month = if m < 10 { m + 3 } else { m - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or("");
    let day_name = DAYS.get((days % 7) as usize).copied().unwrap_or("");
    let short = |name: &str| name.chars().take(3).collect::<String>();
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let _ = match chars.next() {
            Some('Y') => write!(out, "{year}"),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('B') => write!(out, "{month_name}"),
            Some('b') => write!(out, "{}", short(month_name)),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", short(day_name)),
            Some('H') => write!(out, "{:02}", rest / 3600),
            Some('M') => write!(out, "{:02}", rest / 60 % 60),
            Some('S') => write!(out, "{:02}", rest % 60),
            Some('%') => write!(out, "%"),
            other => {
                let other = other.map(String::from).unwrap_or_default();
                let what = format!("strftime_now knows no directive %{other}");
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, what));
            }
        };
    }
    Ok(out)
}

/// `json.dumps` of Python: `", "` and `": "` between items, text not escaped to ASCII.
fn to_json(value: Value, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _: Option<bool> = kwargs.get("ensure_ascii")?;
    let _: Option<bool> = kwargs.get("sort_keys")?;
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(&value)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let mut out = String::new();
    dump(&json, indent.map(|n| n.min(16)), 0, &mut out)
        .map_err(|_| minijinja::Error::from(ErrorKind::BadSerialization))?;
    Ok(Value::from_safe_string(out))
}

fn dump(
    json: &serde_json::Value,
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
) -> std::fmt::Result {
    let line = |out: &mut String, depth: usize| match indent {
        Some(n) => write!(out, "\n{}", " ".repeat(n * depth)),
        None => Ok(()),
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match json {
        serde_json::Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { comma } else { "" });
                line(out, depth + 1)?;
                dump(item, indent, depth + 1, out)?;
            }
            line(out, depth)?;
            out.push(']');
            Ok(())
        }
        serde_json::Value::Object(items) if !items.is_empty() => {
            out.push('{');
            for (i, (key, item)) in items.iter().enumerate() {
                out.push_str(if i > 0 { comma } else { "" });
                line(out, depth + 1)?;
                write!(out, "{}: ", serde_json::Value::String(key.clone()))?;
                dump(item, indent, depth + 1, out)?;
            }
            line(out, depth)?;
            out.push('}');
            Ok(())
        }
        other => write!(out, "{other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(source: &str) -> Result<ChatTemplate, Error> {
        ChatTemplate::parse(
            source,
            "t.gguf: key `tokenizer.chat_template`".into(),
            "<s>".into(),
            "</s>".into(),
        )
    }

    fn render(source: &str, messages: &[Message]) -> Result<String, Error> {
        parse(source)?.render(messages, None, true)
    }

    #[test]
    fn renders_as_transformers_does() {
        let chatml = "{% for message in messages %}{% if loop.first and messages[0]['role'] != \
                      'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}{{\
                      '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + \
                      '\n'}}{% endfor %}{% if add_generation_prompt %}{{ \
                      '<|im_start|>assistant\n' }}{% endif %}";
        let text = render(chatml, &[Message::new("user", "Hi")]).unwrap();
        assert_eq!(
            text,
            "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
             <|im_start|>assistant\n"
        );
        // Python's methods, trim_blocks and lstrip_blocks, tags of masks.
        let source = "{%- for m in messages %}\n  {% generation %}\n{{ m.content.strip().upper() }}\n  \
                      {%- endgeneration %}\n{% endfor %}{{ bos_token }}";
        assert_eq!(render(source, &[Message::new("user", " a ")]).unwrap(), "A<s>");
        let source = "{{ {'a': [1, 2.5, 'é\"'], 'b': none} | tojson }}|{{ [1, {'x': 2}] | tojson(indent=2) }}";
        assert_eq!(
            render(source, &[]).unwrap(),
            "{\"a\": [1, 2.5, \"é\\\"\"], \"b\": null}|[\n  1,\n  {\n    \"x\": 2\n  }\n]"
        );
    }

    #[test]
    fn parts_that_are_text_are_joined() {
        let message: Message = serde_json::from_str(
            r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"}"#,
        )
        .unwrap();
        let source = "{{ messages[0].content }}{{ messages[0].name }}{{ messages[0].train }}";
        assert_eq!(render(source, &[message]).unwrap(), "abn");
    }

    #[test]
    fn the_date_is_civil() {
        assert_eq!(strftime("%d %b %Y %A", 0).unwrap(), "01 Jan 1970 Thursday");
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S", 951_827_696).unwrap(), "2000-02-29 12:34:56");
        assert!(strftime("%Q", 0).is_err());
    }

    /// Each is one line that names the file and the key.
    #[test]
    fn bad_templates_are_errors() {
        let many = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        let long = "{% for a in range(9000) %}{{ 'x' * 9000 }}{% endfor %}";
        for (source, wanted) in [
            ("{% if %}", "(line 1)"),
            ("\n{{ raise_exception('no system role') }}", "no system role"),
            (many, "does not end"),
            (deep, "recursion"),
            (long, "16 MiB"),
            ("{{ 1 + messages }}", "(line 1)"),
        ] {
            let error = render(source, &[]).unwrap_err().to_string();
            assert!(error.starts_with("t.gguf: key `tokenizer.chat_template`: "), "{error}");
            assert!(error.contains(wanted), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
