//! Chat templates: from messages to the text a model was trained on.
//!
//! A template is a Jinja2 program that comes with the model, and so is not to be trusted. It is
//! parsed and run on a thread of its own, whose stack is large enough for whatever its bounded
//! source and its bounded work can nest; the work, the recursion, the time and the size of the
//! output have limits, and running into one is an error like any other.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use gguf::Metadata;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};

use crate::error::{one_line, shown};
use crate::{Error, Message, Tokenizer};

mod builtin;
mod python;

pub use builtin::BUILTIN_TEMPLATES;

const KEY: &str = "tokenizer.chat_template";
const TOOL_KEY: &str = "tokenizer.chat_template.tool_use";

/// Longest source, in bytes. The longest of the well-known ones has 17 KB.
const MAX_SOURCE: usize = 128 << 10;
/// Most operators in a source: the parser takes time quadratic in those of one expression. The
/// most in a well-known one are 1800.
const MAX_OPERATORS: usize = 6000;
/// Longest output, in bytes.
const MAX_OUTPUT: usize = 16 << 20;
/// Steps of the engine in one rendering, where 64 bytes of data cost a step too. A conversation
/// of 1000 messages takes some 100,000.
const FUEL: u64 = 1_000_000;
/// Longest that one rendering, or parsing, may take. Milliseconds are usual. The steps bound the
/// time already, but for lists that hold one another many times over: to walk those (comparing
/// them, joining them to a string) is a single step to the engine.
const MAX_TIME: Duration = Duration::from_secs(10);
/// Levels of recursion as the engine counts them, where a macro within a macro takes about five.
const MAX_RECURSION: usize = 500;
/// The stack of the thread. Data may nest once per step, and walking or dropping it takes up to
/// 480 bytes a level; the parser takes about as much per byte of source. Only what is used is
/// ever backed by memory.
const STACK: usize = if cfg!(target_pointer_width = "64") { 768 << 20 } else { 128 << 20 };

/// A chat template, ready to render.
#[derive(Clone)]
pub struct ChatTemplate {
    inner: Arc<Inner>,
    /// What `strftime_now` tells: seconds since 1970, UTC. None: the clock.
    now: Option<i64>,
}

struct Inner {
    main: Program,
    /// For conversations with tools, where the model has one.
    tools: Option<Program>,
    tokens: SpecialTokens,
}

/// One compiled source.
struct Program {
    /// File and key, for errors.
    origin: String,
    environment: Arc<Environment<'static>>,
}

/// The texts of tokens that templates write out. Empty where the model has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token`
    pub bos: String,
    /// `eos_token`
    pub eos: String,
    /// `unk_token`
    pub unknown: String,
    /// `pad_token`
    pub pad: String,
}

impl SpecialTokens {
    /// Those of a vocabulary.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let text = |id: Option<u32>| {
            id.and_then(|id| tokenizer.token_text(id).ok()).unwrap_or_default().to_owned()
        };
        Self {
            bos: text(tokenizer.bos()),
            eos: text(tokenizer.eos()),
            unknown: text(tokenizer.unknown()),
            pad: text(tokenizer.pad()),
        }
    }
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("origin", &self.inner.main.origin)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// The template of a model file, and the one for tools if it has another for these.
    ///
    /// # Errors
    /// There is none, or it does not parse: with the line.
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Self, Error> {
        let Some(source) = metadata.opt_str(KEY)? else {
            return Err(Error::Vocabulary {
                file: one_line(metadata.file()),
                key: KEY,
                what: format!(
                    "is missing, so this is a base model; expected a chat template; choose a \
                     built-in one ({})",
                    builtin::names()
                ),
            });
        };
        let origin = |key| format!("{}: key `{key}`", metadata.file());
        let tools = match metadata.opt_str(TOOL_KEY)? {
            Some(source) => Some(Program::parse(origin(TOOL_KEY), source)?),
            None => None,
        };
        let main = Program::parse(origin(KEY), source)?;
        let tokens = SpecialTokens::of(tokenizer);
        Ok(Self { inner: Arc::new(Inner { main, tools, tokens }), now: None })
    }

    /// A template from its source. `origin` says in errors where it is from.
    ///
    /// # Errors
    /// It does not parse: with the line.
    pub fn parse(origin: &str, source: &str, tokens: SpecialTokens) -> Result<Self, Error> {
        let main = Program::parse(origin.to_owned(), source)?;
        Ok(Self { inner: Arc::new(Inner { main, tools: None, tokens }), now: None })
    }

    /// A template of our own, for a base model: one of [`BUILTIN_TEMPLATES`].
    ///
    /// # Errors
    /// There is none of this name.
    pub fn builtin(name: &str, tokens: SpecialTokens) -> Result<Self, Error> {
        let Some(source) = builtin::source(name) else {
            return Err(Error::TemplateName { name: shown(name), known: builtin::names() });
        };
        Self::parse(&format!("built-in chat template `{name}`"), source, tokens)
    }

    /// The same template with its clock stopped: what is rendered to be trained on must not
    /// depend on the day. `seconds` since 1970, UTC.
    pub fn with_time(self, seconds: i64) -> Self {
        Self { now: Some(seconds), ..self }
    }

    /// The text of a conversation. `tools` are the functions that may be called, in OpenAI's
    /// shape; `add_generation_prompt` ends it where the assistant is to go on.
    ///
    /// # Errors
    /// The template fails, refuses the conversation (`raise_exception`), takes too long or gives
    /// too much; or a message has content that is not text.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let prepared = Prepared::new(messages, tools)?;
        self.render_prepared(&prepared, messages.len(), add_generation_prompt).map(|(text, _)| text)
    }

    /// As [`ChatTemplate::render`] of the first `upto` messages, with the steps that the engine
    /// took.
    pub(crate) fn render_prepared(
        &self,
        prepared: &Prepared,
        upto: usize,
        add_generation_prompt: bool,
    ) -> Result<(String, u64), Error> {
        let Prepared { parsed, unparsed, first_text, tools } = prepared;
        let render = |messages: &[Value]| {
            let input = Input {
                messages: Value::from(messages.get(..upto).unwrap_or(messages).to_vec()),
                tools: tools.clone(),
                add_generation_prompt,
                tokens: self.inner.tokens.clone(),
                now: self.now,
            };
            match &self.inner.tools {
                Some(program) if tools.is_some() => program.run(input, MAX_TIME),
                _ => self.inner.main.run(input, MAX_TIME),
            }
        };
        // Most templates take the arguments of a call as an object and write it as JSON; some
        // take the string that the interface has and join it to others, which an object is not.
        let objects = render(parsed);
        if objects.is_err() && first_text.is_some_and(|first| first < upto) {
            return render(unparsed).or(objects);
        }
        objects
    }
}

/// A conversation as the engine takes it, to be rendered often.
#[derive(Clone)]
pub(crate) struct Prepared {
    /// The messages, with arguments of calls as objects.
    parsed: Vec<Value>,
    /// The same with arguments as they came; empty where they are the same.
    unparsed: Vec<Value>,
    /// The first message whose arguments are text.
    first_text: Option<usize>,
    tools: Option<Value>,
}

impl Prepared {
    /// # Errors
    /// A message has content that is not text.
    pub(crate) fn new(messages: &[Message], tools: &[serde_json::Value]) -> Result<Self, Error> {
        let first_text = messages.iter().position(Message::has_string_arguments);
        let all = |parse: bool| -> Result<Vec<Value>, Error> {
            let messages = messages.iter().enumerate();
            messages.map(|(i, message)| of_message(message, i, parse)).collect()
        };
        let unparsed = if first_text.is_some() { all(false)? } else { Vec::new() };
        let tools = (!tools.is_empty()).then(|| Value::from(Serde(tools.to_vec())));
        Ok(Self { parsed: all(true)?, unparsed, first_text, tools })
    }

    /// With another content of one message.
    ///
    /// # Errors
    /// As [`Prepared::new`].
    pub(crate) fn with(&self, index: usize, message: &Message) -> Result<Self, Error> {
        let mut other = self.clone();
        for (list, parse) in [(&mut other.parsed, true), (&mut other.unparsed, false)] {
            if let Some(place) = list.get_mut(index) {
                *place = of_message(message, index, parse)?;
            }
        }
        Ok(other)
    }
}

fn of_message(message: &Message, index: usize, parse_arguments: bool) -> Result<Value, Error> {
    message.to_template(index, parse_arguments).map(|message| Value::from(Serde(message)))
}

impl Program {
    fn parse(origin: String, source: &str) -> Result<Self, Error> {
        let origin = one_line(&origin);
        let refuse = |what| Err(Error::Template { origin: origin.clone(), what });
        if source.len() > MAX_SOURCE {
            let bytes = source.len();
            return refuse(format!("has {bytes} bytes; expected at most {MAX_SOURCE}"));
        }
        let operators = operators(source);
        if operators > MAX_OPERATORS {
            return refuse(format!("has {operators} operators; expected at most {MAX_OPERATORS}"));
        }
        let source = without_generation_tags(source);
        let place = origin.clone();
        let environment = apart(&origin, MAX_TIME, move || {
            let mut environment = environment();
            match environment.add_template_owned(NAME, source) {
                Ok(()) => Ok(Arc::new(environment)),
                Err(error) => Err(template_error(&place, &error)),
            }
        })?;
        Ok(Self { origin, environment })
    }

    /// The text, and the steps it took.
    fn run(&self, input: Input, within: Duration) -> Result<(String, u64), Error> {
        let Self { origin, environment } = self;
        let (place, environment) = (origin.clone(), Arc::clone(environment));
        let (output, steps) = apart(origin, within, move || {
            let mut output = Bounded(Vec::new());
            let template = environment.get_template(NAME);
            let captured = template
                .and_then(|t| t.render_captured_to(input.into_context(), &mut output))
                .map_err(|error| template_error(&place, &error))?;
            let steps = captured.state().fuel_levels().map_or(0, |(consumed, _)| consumed);
            drop(captured);
            Ok((output.0, steps))
        })?;
        match String::from_utf8(output) {
            Ok(text) => Ok((text, steps)),
            Err(e) => Err(Error::Template { origin: origin.clone(), what: e.to_string() }),
        }
    }
}

/// What a template is rendered with.
struct Input {
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    tokens: SpecialTokens,
    now: Option<i64>,
}

impl Input {
    fn into_context(self) -> Value {
        let now = self.now;
        minijinja::context! {
            messages => self.messages,
            // Absent tools and documents are `None` there, not an empty list.
            tools => self.tools.unwrap_or(Value::from(())),
            documents => Value::from(()),
            add_generation_prompt => self.add_generation_prompt,
            bos_token => self.tokens.bos,
            eos_token => self.tokens.eos,
            unk_token => self.tokens.unknown,
            pad_token => self.tokens.pad,
            strftime_now => Value::from_function(move |format: &str| {
                python::strftime(now.unwrap_or_else(clock), format)
            }),
        }
    }
}

const NAME: &str = "chat";

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", python::to_json);
    environment.add_test("iterable", python::is_iterable);
    environment.add_function("raise_exception", |message: String| -> Result<(), _> {
        let error = minijinja::Error::new(ErrorKind::InvalidOperation, "");
        Err(error.with_source(Raised(message)))
    });
    // As Hugging Face sets up Jinja2.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    if let Ok(syntax) = syntax {
        environment.set_syntax(syntax);
    }
    environment
}

/// Does `work` on a thread of its own, with a large stack, and waits for it no longer than
/// `within`. Work that takes longer is left to its thread: it cannot be stopped from outside.
fn apart<T: Send + 'static>(
    origin: &str,
    within: Duration,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let refuse = |what| Err(Error::Template { origin: origin.to_owned(), what });
    let (sender, receiver) = mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK).spawn(
        // Nobody waits for what comes too late.
        move || drop(sender.send(work())),
    );
    if let Err(error) = thread {
        return refuse(format!("cannot be run, as there is no thread for it: {error}"));
    }
    match receiver.recv_timeout(within) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => {
            refuse(format!("does not end within {within:?}; it may never end"))
        }
        Err(RecvTimeoutError::Disconnected) => refuse("makes its engine fail".to_owned()),
    }
}

/// Seconds since 1970, UTC.
fn clock() -> i64 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// The message of `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Takes up to [`MAX_OUTPUT`] bytes.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other(format!("gives more than {} MiB", MAX_OUTPUT >> 20)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn template_error(origin: &str, error: &minijinja::Error) -> Error {
    // The innermost error knows best, and the outermost where.
    let mut what = None;
    let mut line = error.line();
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(raised) = error.downcast_ref::<Raised>() {
            what = Some(format!("refuses the conversation: {}", one_line(&raised.0)));
            break;
        }
        what = Some(match error.downcast_ref::<minijinja::Error>() {
            Some(engine) => {
                line = line.or(engine.line());
                match engine.kind() {
                    ErrorKind::OutOfFuel => {
                        format!("does not end within {FUEL} steps; it may never end")
                    }
                    kind => match engine.detail().filter(|detail| !detail.is_empty()) {
                        Some(detail) => one_line(&format!("{kind}: {detail}")),
                        None => kind.to_string(),
                    },
                }
            }
            None => one_line(&error.to_string()),
        });
        next = error.source();
    }
    let origin = match line {
        Some(line) => format!("{origin} line {line}"),
        None => origin.to_owned(),
    };
    Error::Template { origin, what: what.unwrap_or_default() }
}

/// An upper bound on the operators of any expression of a source.
fn operators(source: &str) -> usize {
    let signs = source.bytes().filter(|b| b"+-*/%~<>=!".contains(b)).count();
    let words = source.split(|c: char| !c.is_alphanumeric() && c != '_');
    signs + words.filter(|w| matches!(*w, "and" | "or" | "in" | "is" | "not" | "if")).count()
}

/// `{% generation %}` and `{% endgeneration %}`, which mark for Hugging Face what the assistant
/// says, made into a condition that always holds: nothing else about the template changes, the
/// numbers of its lines included.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let sign = |c| matches!(c, '{' | '%' | '}' | '-' | '+') || char::is_whitespace(c);
        match tag.trim_matches(sign) {
            word @ ("generation" | "endgeneration") => {
                let new = if word == "generation" { "if true" } else { "endif" };
                out.push_str(&tag.replacen(word, new, 1));
            }
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;
