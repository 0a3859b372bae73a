//! Training data: from conversations or a text to examples that fit a window.

use graph::Code;
use serde_json::Value;
use text::{Conversation, Encode, Message};
use train::Example;

use super::chat::{messages, tools};
use super::json::{Fields, missing, wrong};
use super::{Host, text_error};
use crate::{DataReport, Error, Result};

/// Windows come in multiples of this many rows.
pub(super) const BLOCK: usize = 256;

/// What becomes of a conversation that is longer than a window.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Fit {
    /// The request is refused.
    Refuse,
    /// The oldest exchanges are dropped; the system messages stay.
    Middle,
    /// The tokens before the last that fit are dropped.
    Left,
}

/// A conversation to train on, where it is in the request.
pub(super) struct Row {
    path: String,
    messages: Vec<Message>,
    tools: Vec<Value>,
}

/// Data ready to be trained on.
#[derive(Debug, PartialEq)]
pub(super) struct Data {
    pub(super) train: Vec<Example>,
    pub(super) held_out: Vec<Example>,
    pub(super) report: DataReport,
    /// Of windows of a text: the token of the text that each begins with.
    starts: Vec<usize>,
}

fn bad(field: impl Into<String>, message: impl Into<String>) -> Error {
    Error::new(Code::BadData, message).with_field(field)
}

/// The conversations of `examples`: `{"prompt", "completion"}` or `{"messages"}`, either with
/// `"tools"`.
pub(super) fn rows(list: Vec<Value>) -> Result<Vec<Row>> {
    let row = |(i, value): (usize, Value)| {
        let path = format!("examples[{i}]");
        let mut fields = Fields::inner(&path, value, false)?;
        let prompt = fields.string("prompt")?;
        let completion = fields.string("completion")?;
        let list = match fields.value("messages") {
            None => None,
            Some(Value::Array(list)) => Some(list),
            Some(other) => return Err(wrong(&fields.path("messages"), &other, "a list")),
        };
        let tools = tools(&mut fields)?;
        let at = fields.path("messages");
        fields.finish()?;
        let messages = match (prompt, completion, list) {
            (Some(prompt), Some(completion), None) => {
                vec![Message::new("user", prompt), Message::new("assistant", completion)]
            }
            (None, None, Some(list)) => messages(&at, list, true)?,
            _ => {
                let expected = "either `prompt` and `completion`, or `messages`";
                let message = format!("`{path}` is not an example; expected {expected}");
                return Err(Error::field(path, message));
            }
        };
        Ok(Row { path, messages, tools })
    };
    list.into_iter().enumerate().map(row).collect()
}

impl Row {
    fn render(&self, host: &Host, messages: &[Message]) -> Result<Conversation> {
        let template = host.template("examples")?;
        text::conversation(host.model.tokenizer(), template, messages, &self.tools).map_err(|e| {
            let e = text_error(&format!("{}.messages", self.path), e);
            Error { code: Code::BadData, ..e }
        })
    }

    /// The conversation in at most `capacity` tokens, and whether that took shortening; `None`
    /// where it could not be made to fit.
    fn fit(&self, host: &Host, capacity: usize, fit: Fit) -> Result<Option<(Example, bool)>> {
        let whole = self.render(host, &self.messages)?;
        if whole.ids.len() <= capacity {
            return Ok(Some((example(whole), false)));
        }
        match fit {
            Fit::Refuse => Err(bad(
                &self.path,
                format!(
                    "`{}` has {} tokens, a window takes {capacity}; use a larger `window`, or \
                     `fit`",
                    self.path,
                    whole.ids.len()
                ),
            )),
            Fit::Left => {
                let tokenizer = host.model.tokenizer();
                let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
                Ok(left(whole, capacity, bos).map(|example| (example, true)))
            }
            Fit::Middle => Ok(self.middle(host, capacity)?.map(|example| (example, true))),
        }
    }

    /// Drops the fewest exchanges, oldest first, that make the conversation fit.
    fn middle(&self, host: &Host, capacity: usize) -> Result<Option<Example>> {
        let cuts = cuts(&self.messages);
        let head = head(&self.messages);
        let without = |cut: usize| {
            let (before, after) = (self.messages.get(..head), self.messages.get(cut..));
            let kept = [before.unwrap_or_default(), after.unwrap_or_default()].concat();
            self.render(host, &kept)
        };
        // The more is dropped, the shorter it gets.
        let (mut fitting, mut low, mut high) = (None, 0, cuts.len());
        while low < high {
            let middle = low + (high - low) / 2;
            let Some(&cut) = cuts.get(middle) else { break };
            let shorter = without(cut)?;
            if shorter.ids.len() <= capacity {
                fitting = Some(shorter);
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Ok(fitting.map(example))
    }
}

/// How many messages at the beginning are the system's.
fn head(messages: &[Message]) -> usize {
    messages.iter().take_while(|m| m.role == "system" || m.role == "developer").count()
}

/// Where a conversation may go on after its system messages: at a message of the user, up to the
/// one that the last trained message answers.
fn cuts(messages: &[Message]) -> Vec<usize> {
    let is_user = |&i: &usize| messages.get(i).is_some_and(|m| m.role == "user");
    let last = messages.iter().rposition(|m| m.role == "assistant" && m.train);
    let asked = last.and_then(|last| (0..last).rev().find(is_user));
    let Some(asked) = asked else { return Vec::new() };
    (head(messages) + 1..=asked).filter(is_user).collect()
}

fn example(conversation: Conversation) -> Example {
    let weights = conversation.weights;
    Example { tokens: conversation.ids, weights }
}

/// The last tokens up to the last that is trained, at most `capacity`, after BOS where the
/// vocabulary has one. A turn whose beginning is cut off carries no loss; `None` where that is the
/// last one.
pub(super) fn left(
    conversation: Conversation,
    capacity: usize,
    bos: Option<u32>,
) -> Option<Example> {
    let Conversation { mut ids, mut weights, turns } = conversation;
    let end = weights.iter().rposition(|&w| w != 0.0)? + 1;
    ids.truncate(end);
    weights.truncate(end);
    let bos = bos.filter(|bos| ids.first() == Some(bos));
    if end > capacity {
        let start = end - (capacity - usize::from(bos.is_some()));
        ids.drain(..start);
        let cut = weights.drain(..start).next_back().is_some_and(|w| w != 0.0);
        // Without a token before it, the first of a turn cannot be predicted either.
        if cut || bos.is_none() {
            weights.iter_mut().take_while(|w| **w != 0.0).for_each(|w| *w = 0.0);
        }
        if let Some(bos) = bos {
            ids.insert(0, bos);
            weights.insert(0, 0.0);
        }
    }
    (*weights.last()? != 0.0).then(|| example(Conversation { ids, weights, turns }))
}

/// Conversations as examples in windows of at most `window` rows. `wanted` is asked before each
/// whether anybody still waits for them.
pub(super) fn of_rows(
    rows: &[Row],
    host: &Host,
    window: usize,
    fit: Fit,
    wanted: &dyn Fn() -> bool,
) -> Result<Data> {
    let mut report =
        DataReport { window_asked: window, examples: rows.len(), ..DataReport::default() };
    let mut examples = Vec::new();
    for row in rows {
        if !wanted() {
            return Err(Error::new(Code::Stopping, "nobody waits for the answer any more"));
        }
        match row.fit(host, window + 1, fit)? {
            None => report.skipped += 1,
            Some((example, shortened)) => {
                report.truncated += usize::from(shortened);
                examples.push(example);
            }
        }
    }
    if examples.is_empty() {
        let message = format!(
            "none of the {} `examples` can be made to fit a window of {window}; use a larger \
             `window`",
            rows.len()
        );
        return Err(bad("examples", message));
    }
    let longest = examples.iter().map(|e| e.tokens.len()).max().unwrap_or(0);
    let needed = longest.saturating_sub(1).next_multiple_of(BLOCK).max(BLOCK);
    report.window = window.min(needed);
    Ok(Data { train: examples, held_out: Vec::new(), report, starts: Vec::new() })
}

/// A text as windows of `window` rows, each half a window after the one before it, and a last one
/// that ends with the text. Every token carries loss.
pub(super) fn of_text(text: &str, parse_special: bool, host: &Host, window: usize) -> Result<Data> {
    let options = Encode { add_bos: true, add_eos: false, parse_special };
    let tokens = host.model.tokenizer().encode(text, options).map_err(|e| text_error("text", e))?;
    if tokens.len() < 2 * window {
        let message = format!(
            "`text` has {} tokens, fewer than two windows of {window}; use a smaller `window`, or \
             `examples`",
            tokens.len()
        );
        return Err(bad("text", message));
    }
    let starts = starts(tokens.len(), window);
    let train: Vec<Example> = starts
        .iter()
        .filter_map(|&start| tokens.get(start..start + window + 1))
        .map(|tokens| Example { tokens: tokens.to_vec(), weights: vec![1.0; tokens.len()] })
        .collect();
    let report =
        DataReport { window_asked: window, window, examples: train.len(), ..DataReport::default() };
    Ok(Data { train, held_out: Vec::new(), report, starts })
}

/// Where windows of a text begin.
fn starts(tokens: usize, window: usize) -> Vec<usize> {
    let last = tokens.saturating_sub(window + 1);
    let mut starts: Vec<usize> = (0..=last).step_by(window / 2).collect();
    if starts.last() != Some(&last) {
        starts.push(last);
    }
    starts
}

impl Data {
    /// Holds the last examples back: what is left is the first `floor(n (1 - share))`.
    pub(super) fn split(mut self, share: f64) -> Result<Data> {
        let n = self.train.len();
        // A product such as 100 * 0.93 may fall just short of a whole number.
        let kept = ((n as f64 * (1.0 - share)) + 1e-9).floor() as usize;
        if kept == 0 {
            let message = format!(
                "`val_split` is {share}, which leaves none of {n} examples to train on; use a \
                 smaller one, such as 0"
            );
            return Err(Error::field("val_split", message));
        }
        self.held_out = self.train.split_off(kept.min(n));
        self.forget_seen();
        let labelled = |list: &[Example]| list.iter().map(Example::labelled).sum();
        self.report.train_tokens = self.train.iter().map(|e| e.tokens.len()).sum();
        self.report.trainable_tokens = labelled(&self.train);
        self.report.eval_trainable_tokens = labelled(&self.held_out);
        Ok(self)
    }

    /// The windows of a text overlap: what those held out share with the last one that is trained
    /// on is not measured.
    fn forget_seen(&mut self) {
        let trained = self.train.len();
        let Some(last) = trained.checked_sub(1).and_then(|i| self.starts.get(i)) else { return };
        let seen = last + self.report.window + 1;
        let starts = self.starts.get(trained..).unwrap_or_default();
        for (example, &start) in self.held_out.iter_mut().zip(starts) {
            let shared = seen.saturating_sub(start);
            example.weights.iter_mut().take(shared).for_each(|w| *w = 0.0);
        }
        self.held_out.retain(|e| e.labelled() > 0);
    }
}

/// A field of the request that gives data, of which there must be one.
pub(super) fn corpus(
    text: Option<String>,
    examples: Option<Vec<Value>>,
) -> Result<std::result::Result<String, Vec<Value>>> {
    match (text, examples) {
        (Some(text), None) if !text.is_empty() => Ok(Ok(text)),
        (None, Some(list)) if !list.is_empty() => Ok(Err(list)),
        (Some(_), None) => Err(bad("text", "`text` is empty; expected some text to train on")),
        (None, Some(_)) => Err(bad("examples", "`examples` is empty; expected at least one")),
        (Some(_), Some(_)) => {
            Err(Error::field("text", "`text` and `examples` exclude each other; give one"))
        }
        (None, None) => Err(missing("examples", "`examples` or `text`")),
    }
}
