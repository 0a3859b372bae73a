//! Training data of a request: from its fields to examples that fit a window.

use std::collections::BTreeSet;

use data::{Content, Example, Fit, Layout, LossOn, Reading, Reason, Rendered, Renderer};
use graph::Code;
use serde_json::Value;
use text::Encode;

use super::json::{missing, wrong};
use super::{Host, text_error};
use crate::{DataReport, Error, Result};

/// Windows come in multiples of this many rows.
pub(super) const BLOCK: usize = 256;

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

fn unwanted() -> Error {
    Error::new(Code::Stopping, "nobody waits for the answer any more")
}

/// What a row is, where it is in the request.
pub(super) struct Row {
    path: String,
    content: Content,
}

/// The conversations of `examples`: `{"prompt", "completion"}` or `{"messages"}`, either with
/// `"tools"`. A field that means nothing is refused.
pub(super) fn rows(list: Vec<Value>) -> Result<Vec<Row>> {
    let row = |(i, value): (usize, Value)| {
        let path = format!("examples[{i}]");
        let Value::Object(fields) = value else { return Err(wrong(&path, &value, "an object")) };
        let layout = match fields.keys().map(String::as_str).collect::<Vec<_>>() {
            keys if keys.contains(&"messages") => Layout::Messages,
            keys if keys.contains(&"prompt") || keys.contains(&"completion") => Layout::Prompt,
            _ => {
                let expected = "either `prompt` and `completion`, or `messages`";
                let message = format!("`{path}` is not an example; expected {expected}");
                return Err(Error::field(path, message));
            }
        };
        let reading = Reading { strict: true, ..Reading::default() };
        match Content::read(fields, layout, reading, &mut BTreeSet::new()) {
            Ok(content) => Ok(Row { path, content }),
            Err(e) => Err(Error::field(format!("{path}.{}", e.field), format!("`{path}`: {e}"))),
        }
    };
    list.into_iter().enumerate().map(row).collect()
}

impl Row {
    /// The row in a window; `None` where it could not be made to fit.
    fn fit(&self, renderer: &Renderer<'_>, wanted: &dyn Fn() -> bool) -> Result<Option<Rendered>> {
        match renderer.examples_while(&self.content, wanted) {
            Ok(rendered) => Ok(Some(rendered)),
            Err(_) if !wanted() => Err(unwanted()),
            Err(e) => {
                let unfit = matches!(e.reason, Reason::TruncatedAnswer | Reason::TooLong);
                if unfit && renderer.fit != Fit::Refuse {
                    return Ok(None);
                }
                let path = match e.field.as_str() {
                    "" if unfit => self.path.clone(),
                    "" => format!("{}.messages", self.path),
                    field => format!("{}.{field}", self.path),
                };
                Err(bad(path, format!("`{}`: {e}", self.path)))
            }
        }
    }
}

/// Conversations as examples in windows of at most `window` rows. `wanted` is asked before each
/// message whether anybody still waits for them.
pub(super) fn of_rows(
    rows: &[Row],
    host: &Host,
    window: usize,
    fit: Fit,
    wanted: &dyn Fn() -> bool,
) -> Result<Data> {
    let mut report =
        DataReport { window_asked: window, examples: rows.len(), ..DataReport::default() };
    let renderer = Renderer {
        tokenizer: host.model.tokenizer(),
        template: host.template.as_ref().map_err(String::as_str),
        loss_on: LossOn::Assistant,
        fit,
        window: Some(window),
        parse_special: true,
    };
    let mut examples = Vec::new();
    for row in rows {
        if !wanted() {
            return Err(unwanted());
        }
        match row.fit(&renderer, wanted)? {
            None => report.skipped += 1,
            Some(rendered) => {
                report.truncated += usize::from(rendered.shortened);
                data::count_left_out(&mut report.not_rendered, rendered.left_out);
                examples.extend(rendered.examples);
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
    let report = DataReport {
        window_asked: window,
        window,
        examples: train.len(),
        of_text: true,
        ..DataReport::default()
    };
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
    /// Holds the last examples back: what is left is the first [`data::kept`].
    pub(super) fn split(mut self, share: f64) -> Result<Data> {
        let n = self.train.len();
        let kept = data::kept(n, share);
        if kept == 0 {
            let message = format!(
                "`val_split` is {share}, which leaves none of {n} examples to train on; use a \
                 smaller one, such as 0"
            );
            return Err(Error::field("val_split", message));
        }
        self.held_out = self.train.split_off(kept);
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
