//! From what a row holds to examples that fit a window.

use std::collections::BTreeSet;

use text::{ChatTemplate, Conversation, Effort, Encode, Message, Tokenizer};

use crate::{Bad, Content, Example, Options, Reason};

type Result<T> = std::result::Result<T, Bad>;

/// Which tokens of a conversation carry loss. All of a text do.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum LossOn {
    /// What the assistant says, with the end of its turns.
    #[default]
    Assistant,
    /// Everything.
    All,
}

/// What becomes of a conversation that is longer than a window.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub enum Fit {
    /// It is refused.
    #[default]
    Refuse,
    /// The oldest exchanges are dropped, whole; the system messages stay.
    Middle,
    /// The tokens before the last that fit are dropped, BOS excepted.
    Left,
}

/// How a row becomes tokens: with the tokenizer and the template it is served with.
#[derive(Copy, Clone, Debug)]
pub struct Renderer<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The chat template, or why there is none.
    pub template: std::result::Result<&'a ChatTemplate, &'a str>,
    /// Which tokens carry loss.
    pub loss_on: LossOn,
    /// What becomes of what is too long.
    pub fit: Fit,
    /// Rows of a window, one fewer than the tokens it takes.
    pub window: Option<usize>,
    /// Whether control tokens written in a text are taken as such.
    pub parse_special: bool,
}

/// What became of a row.
#[derive(Clone, PartialEq, Debug)]
pub struct Rendered {
    /// One for a conversation; for a text, as many as windows it takes.
    pub examples: Vec<Example>,
    /// Something was dropped to make it fit.
    pub shortened: bool,
    /// What of a conversation the template leaves out, in words: its tools, a field of its
    /// messages, what a role says.
    pub left_out: BTreeSet<String>,
}

impl<'a> Renderer<'a> {
    /// As data are read.
    pub fn new(
        tokenizer: &'a Tokenizer,
        template: std::result::Result<&'a ChatTemplate, &'a str>,
        options: &Options,
    ) -> Renderer<'a> {
        let &Options { loss_on, fit, window, parse_special, .. } = options;
        Renderer { tokenizer, template, loss_on, fit, window, parse_special }
    }

    /// The examples of a row: at least one, each with at least one token that carries loss.
    ///
    /// # Errors
    /// Says why there are none. Where it is for a message, the field is `messages[I]`.
    pub fn examples(&self, content: &Content) -> Result<Rendered> {
        self.examples_while(content, &|| true)
    }

    /// As [`Renderer::examples`], which may take seconds; `wanted` is asked before each message
    /// whether anybody still waits.
    ///
    /// # Errors
    /// As [`Renderer::examples`]; or nobody waits.
    pub fn examples_while(&self, content: &Content, wanted: &dyn Fn() -> bool) -> Result<Rendered> {
        match content {
            Content::Text(text) => Ok(Rendered {
                examples: self.text(text)?,
                shortened: false,
                left_out: BTreeSet::new(),
            }),
            Content::Chat { messages, tools } => {
                let effort = Effort::new(wanted);
                Chat { renderer: self, messages, tools, effort: &effort }.fit()
            }
        }
    }

    /// Tokens that an example may have.
    fn capacity(&self) -> usize {
        self.window.map_or(usize::MAX, |rows| rows.saturating_add(1))
    }

    /// A text in pieces of a window each, in which every token but the first is predicted once.
    fn text(&self, text: &str) -> Result<Vec<Example>> {
        let options = Encode { add_bos: true, add_eos: false, parse_special: self.parse_special };
        let tokens = self
            .tokenizer
            .encode(text, options)
            .map_err(|e| Bad::field(Reason::TooLong, "text", e.to_string()))?;
        if tokens.len() < 2 {
            let what = format!("`text` has {} tokens; expected at least 2", tokens.len());
            return Err(Bad::field(Reason::Empty, "text", what));
        }
        let rows = self.capacity().saturating_sub(1).max(1);
        let starts = (0..tokens.len() - 1).step_by(rows);
        let piece = |start: usize| {
            let end = start.saturating_add(rows + 1).min(tokens.len());
            let tokens = tokens.get(start..end).unwrap_or_default().to_vec();
            Example { weights: vec![1.0; tokens.len()], tokens }
        };
        Ok(starts.map(piece).collect())
    }
}

/// A conversation on its way.
struct Chat<'a> {
    renderer: &'a Renderer<'a>,
    messages: &'a [Message],
    tools: &'a [serde_json::Value],
    /// For all that is done to make it fit.
    effort: &'a Effort<'a>,
}

impl Chat<'_> {
    fn template(&self) -> Result<&ChatTemplate> {
        self.renderer.template.map_err(|why| {
            let what = format!("a conversation cannot be rendered without a template: {why}");
            Bad::row(Reason::Template, what)
        })
    }

    fn render(&self, messages: &[Message]) -> Result<Conversation> {
        let (template, tokenizer) = (self.template()?, self.renderer.tokenizer);
        let effort = self.effort;
        match self.renderer.loss_on {
            LossOn::Assistant => {
                text::conversation(tokenizer, template, messages, self.tools, effort).map_err(bad)
            }
            LossOn::All => {
                let switched = |m: &Message| m.role == "assistant" && (!m.train || m.weight != 1.0);
                if let Some(i) = messages.iter().position(switched) {
                    let what = format!(
                        "message {i} has `train` or `weight`, which mean nothing where the loss is \
                         on everything; leave them out"
                    );
                    return Err(Bad::field(Reason::BadValue, format!("messages[{i}]"), what));
                }
                let text = template.render(messages, self.tools, false).map_err(bad)?;
                text::check_said(template, messages, self.tools, &text, effort).map_err(bad)?;
                let ids = text::encode_prompt(tokenizer, &text).map_err(bad)?;
                if ids.len() < 2 {
                    let what = format!("it makes {} tokens; expected at least 2", ids.len());
                    return Err(Bad::row(Reason::Empty, what));
                }
                Ok(Conversation { weights: vec![1.0; ids.len()], text, ids, turns: Vec::new() })
            }
        }
    }

    /// The conversation in a window.
    fn fit(&self) -> Result<Rendered> {
        let capacity = self.renderer.capacity();
        let whole = self.render(self.messages)?;
        let (template, effort) = (self.template()?, self.effort);
        let left_out = text::left_out(template, self.messages, self.tools, &whole.text, effort);
        let left_out = left_out.map_err(bad)?;
        let rendered = |fitted, shortened| {
            Ok(Rendered { examples: vec![labelled(fitted)?], shortened, left_out })
        };
        let (tokens, kept) = (whole.ids.len(), whole.weights.get(capacity..));
        if tokens <= capacity {
            return rendered(whole, false);
        }
        let cut = kept.is_some_and(|rest| rest.iter().any(|&w| w != 0.0));
        let reason = if cut { Reason::TruncatedAnswer } else { Reason::TooLong };
        let fitted = match self.renderer.fit {
            Fit::Refuse => {
                let what = format!(
                    "it has {tokens} tokens, a window takes {capacity}; use a larger `window`, or \
                     `fit`"
                );
                return Err(Bad::row(reason, what));
            }
            Fit::Left => {
                let tokenizer = self.renderer.tokenizer;
                left(whole, capacity, tokenizer.bos().filter(|_| tokenizer.adds_bos()))
            }
            Fit::Middle => self.middle(capacity)?,
        };
        let what = || {
            format!(
                "it has {tokens} tokens, a window takes {capacity}, and what must stay does not \
                 fit; use a larger `window`"
            )
        };
        rendered(fitted.ok_or_else(|| Bad::row(Reason::TruncatedAnswer, what()))?, true)
    }

    /// Drops the fewest exchanges, oldest first, that make the conversation fit. What the system
    /// says among them stays.
    fn middle(&self, capacity: usize) -> Result<Option<Conversation>> {
        let cuts = cuts(self.messages);
        let without = |cut: usize| {
            let kept = self.messages.iter().enumerate();
            let kept = kept.filter(|(i, message)| *i >= cut || is_system(message));
            self.render(&kept.map(|(_, message)| message.clone()).collect::<Vec<_>>())
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
        Ok(fitting)
    }
}

fn is_system(message: &Message) -> bool {
    message.role == "system" || message.role == "developer"
}

/// Where a conversation may go on after what is dropped: at a message of the user, up to the
/// one that the last trained message answers.
fn cuts(messages: &[Message]) -> Vec<usize> {
    let is_user = |&i: &usize| messages.get(i).is_some_and(|m| m.role == "user");
    let last = messages.iter().rposition(Message::is_trained);
    let asked = last.and_then(|last| (0..last).rev().find(is_user));
    let Some(asked) = asked else { return Vec::new() };
    let head = messages.iter().take_while(|m| is_system(m)).count();
    (head + 1..=asked).filter(is_user).collect()
}

/// The last tokens up to the last that is trained, at most `capacity`, after BOS where the
/// vocabulary has one. A turn whose beginning is cut off carries no loss; `None` where that is the
/// last one.
fn left(conversation: Conversation, capacity: usize, bos: Option<u32>) -> Option<Conversation> {
    let Conversation { text, mut ids, mut weights, turns } = conversation;
    let end = weights.iter().rposition(|&w| w != 0.0)? + 1;
    ids.truncate(end);
    weights.truncate(end);
    let bos = bos.filter(|bos| ids.first() == Some(bos));
    if end > capacity {
        let start = end - (capacity - usize::from(bos.is_some()));
        ids.drain(..start);
        weights.drain(..start);
        // Without a token before it, the first of a turn cannot be predicted either.
        let first = start + usize::from(bos.is_none());
        for turn in turns.iter().filter(|t| t.tokens.start < first) {
            let stays = turn.tokens.end.saturating_sub(start);
            weights.iter_mut().take(stays).for_each(|w| *w = 0.0);
        }
        if let Some(bos) = bos {
            ids.insert(0, bos);
            weights.insert(0, 0.0);
        }
    }
    let last = weights.last().is_some_and(|&w| w != 0.0);
    last.then_some(Conversation { text, ids, weights, turns: Vec::new() })
}

/// The example of a conversation: the first token is never predicted, so it cannot be all.
fn labelled(conversation: Conversation) -> Result<Example> {
    let example = Example { tokens: conversation.ids, weights: conversation.weights };
    if example.labelled() == 0 {
        return Err(Bad::row(Reason::NoAssistantTokens, "no token carries loss"));
    }
    Ok(example)
}

/// What the text crate says about a conversation.
fn bad(e: text::Error) -> Bad {
    let at = |index: usize| format!("messages[{index}]");
    match &e {
        text::Error::Turn { index, .. } => {
            Bad::field(Reason::AmbiguousTurn, at(*index), e.to_string())
        }
        text::Error::Unsaid { index, all, .. } => {
            let reason = if *all { Reason::Empty } else { Reason::Template };
            Bad::field(reason, at(*index), e.to_string())
        }
        text::Error::Message { index, .. } => {
            Bad::field(Reason::WrongType, at(*index), e.to_string())
        }
        text::Error::Conversation { what } => Bad::row(Reason::NoAssistantTokens, what.clone()),
        text::Error::TextLength { .. } | text::Error::Effort { .. } => {
            Bad::row(Reason::TooLong, e.to_string())
        }
        _ => Bad::row(Reason::Template, e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use text::Turn;

    /// f39: a turn that is cut at its front teaches to begin in the middle.
    #[test]
    fn f39_a_turn_that_is_cut_at_its_front_is_not_trained_on() {
        let conversation = |trained: &[u8]| {
            let starts =
                (0..trained.len()).filter(|&i| trained[i] == 1 && (i == 0 || trained[i - 1] == 0));
            let turn = |i: usize| {
                let end = (i..trained.len()).find(|&j| trained[j] == 0).unwrap_or(trained.len());
                Turn { message: i, tokens: i..end }
            };
            Conversation {
                text: String::new(),
                ids: (0..trained.len() as u32).collect(),
                weights: trained.iter().map(|&t| f32::from(t)).collect(),
                turns: starts.map(turn).collect(),
            }
        };
        let weights = |trained: &[u8], capacity: usize, bos: Option<u32>| {
            let left = left(conversation(trained), capacity, bos)?;
            Some((left.ids, left.weights.iter().map(|&w| w as u8).collect::<Vec<_>>()))
        };
        let turns = [0, 0, 1, 1, 1, 0, 1, 1, 0];
        // BOS is token 0.
        assert_eq!(weights(&turns, 8, Some(0)).unwrap().0, (0..8).collect::<Vec<_>>());
        let whole = weights(&turns, 7, Some(0)).unwrap();
        assert_eq!(whole, (vec![0, 2, 3, 4, 5, 6, 7], vec![0, 1, 1, 1, 0, 1, 1]));
        let cut = weights(&turns, 6, Some(0)).unwrap();
        assert_eq!(cut, (vec![0, 3, 4, 5, 6, 7], vec![0, 0, 0, 0, 1, 1]));
        // Without BOS nothing predicts the first token.
        let cut = weights(&turns, 6, None).unwrap();
        assert_eq!(cut, (vec![2, 3, 4, 5, 6, 7], vec![0, 0, 0, 0, 1, 1]));
        assert_eq!(weights(&turns, 3, Some(0)).unwrap().1, [0, 1, 1]);
        assert_eq!(weights(&turns, 2, Some(0)), None);
        assert_eq!(weights(&turns, 2, None), None);
        assert_eq!(weights(&turns, 3, None).unwrap().1, [0, 1, 1]);
        // Of two turns that touch, the second stays whole where the first is cut.
        let mut touching = conversation(&[0, 0, 1, 1, 1, 1]);
        touching.turns = vec![Turn { message: 1, tokens: 2..4 }, Turn { message: 2, tokens: 4..6 }];
        assert_eq!(left(touching, 4, Some(0)).unwrap().weights, [0.0, 0.0, 1.0, 1.0]);
    }
}
