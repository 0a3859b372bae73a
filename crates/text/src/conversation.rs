//! Conversations as tokens, to be answered and to be trained on.

use std::ops::Range;

use serde_json::Value;

use crate::template::Prepared;
use crate::{ChatTemplate, Content, Encode, Error, Message, Tokenizer};

mod effort;
mod said;

pub use effort::Effort;
pub use said::{check_said, left_out};

use said::Written;

/// A conversation to train on.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// What the template makes of it.
    pub text: String,
    /// The tokens of the whole conversation.
    pub ids: Vec<u32>,
    /// For each token the weight of the loss of predicting it: that of its message where it
    /// belongs to what the assistant says or ends its turn, else 0.
    pub weights: Vec<f32>,
    /// The turns that are trained on, in order.
    pub turns: Vec<Turn>,
}

/// A turn that is trained on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Index of the message.
    pub message: usize,
    /// Its tokens.
    pub tokens: Range<usize>,
}

/// The tokens of a rendered prompt. There is no other way in which a prompt is encoded: to be
/// answered in a chat, to be completed as text that someone rendered, or to be trained on.
///
/// # Errors
/// The text is too long.
pub fn encode_prompt(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Error> {
    tokenizer.encode(text, Encode::PROMPT)
}

/// The tokens of a conversation that the assistant is to go on.
///
/// # Errors
/// The template fails or refuses the conversation.
pub fn encode_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[Value],
) -> Result<Vec<u32>, Error> {
    encode_prompt(tokenizer, &template.render(messages, tools, true)?)
}

/// The tokens of a whole conversation, and which of them are trained on.
///
/// The conversation is rendered and tokenized once, as when it is served. A token is trained on
/// if it begins inside the span of a message for which [`Message::is_trained`] holds.
///
/// Where the template is *prefix stable*, which is to say that it does not rewrite what it wrote
/// before, the span of a message runs from the end of what comes before it, rendered with a
/// generation prompt, to the end of its own turn. Where it is not (many leave out the reasoning
/// of earlier turns), the span is what changes in the whole rendering when the content of the
/// message does, with the end of the turn. If that is not one piece of the content between texts
/// that stay as they are, the message is refused. So is one of which the template renders nothing,
/// or whose tool calls it leaves out.
///
/// Each message that is trained on takes renderings of all before it, which `effort` bounds.
///
/// # Errors
/// The template fails; a turn cannot be found or is not rendered; no token of it is trained on; or
/// the effort is at its end.
pub fn conversation(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[Value],
    effort: &Effort<'_>,
) -> Result<Conversation, Error> {
    let prepared = Prepared::new(messages, tools)?;
    let full = effort.render(template, &prepared, messages.len(), false)?;
    let rendering = Rendering { template, messages, prepared, full: &full, effort };
    let written = Written::new(template, messages, tools, &full, effort);
    let mut spans = Vec::new();
    let mut end = 0;
    for (index, message) in messages.iter().enumerate().filter(|(_, m)| m.is_trained()) {
        effort.check()?;
        let span = rendering.span(index)?;
        if span.start < end {
            return Err(unclear(index, "writes this turn before the one that comes first"));
        }
        written.check(index, span.clone())?;
        end = span.end;
        spans.push((index, message.weight, span));
    }
    if spans.is_empty() {
        return Err(Error::Conversation {
            what: "it has no message of role \"assistant\" with \"train\" left on".into(),
        });
    }
    let pieces = tokenizer.encode_pieces(&full, Encode::PROMPT)?;
    let mut weights = vec![0.0; pieces.len()];
    let mut turns = Vec::with_capacity(spans.len());
    let mut next = 0;
    for (message, weight, span) in spans {
        let rest = pieces.get(next..).unwrap_or_default();
        let first = next + rest.partition_point(|p| (p.start as usize) < span.start);
        let last = next + rest.partition_point(|p| (p.start as usize) < span.end);
        let Some(weights) = weights.get_mut(first..last).filter(|w| !w.is_empty()) else {
            let what = "no token begins inside what the assistant says, as the chat template has \
                        nothing between that and what is before; use another template";
            return Err(Error::Turn { index: message, what: what.into() });
        };
        weights.fill(weight);
        turns.push(Turn { message, tokens: first..last });
        next = last;
    }
    let ids = pieces.into_iter().map(|piece| piece.id).collect();
    Ok(Conversation { text: full, ids, weights, turns })
}

fn unclear(index: usize, what: &str) -> Error {
    Error::Turn {
        index,
        what: format!(
            "the chat template {what}, so what the assistant says cannot be found in it; split the \
             conversation so that this message is its last, or use another template"
        ),
    }
}

/// A conversation that is searched for what the assistant says.
struct Rendering<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
    prepared: Prepared,
    /// The whole, rendered.
    full: &'a str,
    effort: &'a Effort<'a>,
}

/// Contents that differ in their first and their last byte, and are words to any template.
const MARKS: [&str; 2] = ["aQzxKjVwa", "bQzxKjVwb"];

impl Rendering<'_> {
    fn render(&self, upto: usize, generate: bool) -> Result<String, Error> {
        self.effort.render(self.template, &self.prepared, upto, generate)
    }

    /// The bytes of a message's turn.
    fn span(&self, index: usize) -> Result<Range<usize>, Error> {
        // A template may refuse a part of what it takes whole: then nothing is known of the part.
        let until = self.render(index + 1, false);
        let before = self.render(index, true);
        let what = match (&until, &before) {
            (Ok(until), _) if !self.full.starts_with(until) => {
                "changes this turn when others follow"
            }
            (Ok(until), Ok(before)) if !until.starts_with(before) => {
                "writes this turn differently from how it asks for it"
            }
            (Ok(until), Ok(before)) if before.len() == until.len() => "leaves this turn out",
            (Ok(until), Ok(before)) => return Ok(before.len()..until.len()),
            (Err(_), _) | (_, Err(_)) => "refuses the conversation up to this turn",
        };
        match self.located(index) {
            Some(span) => Ok(span),
            None => Err(match (until, before) {
                (Err(e), _) | (_, Err(e)) => e,
                _ => unclear(index, what),
            }),
        }
    }

    /// The bytes of a message's turn, found by changing its content.
    fn located(&self, index: usize) -> Option<Range<usize>> {
        let content = self.messages.get(index)?.text(index).ok()?.unwrap_or_default();
        if MARKS.iter().any(|mark| self.full.contains(mark)) {
            return None;
        }
        let (before, after) = self.around(index, self.messages.len())?;
        let (_, end_of_turn) = self.around(index, index + 1)?;
        let said = self.full.strip_prefix(&*before)?.strip_suffix(&*after)?;
        if !content.contains(said) || !after.starts_with(&*end_of_turn) {
            return None;
        }
        // Something of what was said must be there, unless nothing was.
        if said.is_empty() && !content.trim().is_empty() {
            return None;
        }
        let end = before.len() + said.len() + end_of_turn.len();
        (end > before.len()).then_some(before.len()..end)
    }

    /// What the template writes before and after the content of a message, in the conversation of
    /// the first `upto`; none where the content is not written once, as it is.
    fn around(&self, index: usize, upto: usize) -> Option<(String, String)> {
        let mut message = self.messages.get(index)?.clone();
        let mut marked = |mark: &str| {
            message.content = Some(Content::Text(mark.to_owned()));
            let prepared = self.prepared.with(index, &message).ok()?;
            let text = self.effort.render(self.template, &prepared, upto, false).ok()?;
            let (before, after) = text.split_once(mark)?;
            (!after.contains(mark)).then(|| (before.to_owned(), after.to_owned()))
        };
        let [first, second] = MARKS.map(&mut marked);
        first.filter(|first| second.as_ref() == Some(first))
    }
}

#[cfg(test)]
mod tests;
