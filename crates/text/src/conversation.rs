//! Conversations as tokens, to be answered and to be trained on.

use crate::{ChatTemplate, Encode, Error, Message, Tokenizer};

/// A conversation to train on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// The tokens of the whole conversation.
    pub ids: Vec<u32>,
    /// For each token whether it is trained on, that is, predicted: it belongs to what the
    /// assistant says or ends its turn.
    pub trained: Vec<bool>,
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
    tools: &[serde_json::Value],
) -> Result<Vec<u32>, Error> {
    encode_prompt(tokenizer, &template.render(messages, tools, true)?)
}

/// The tokens of a whole conversation, and which of them are trained on.
///
/// The conversation is rendered and tokenized once, as when it is served. The span of an
/// assistant's message runs from the end of what comes before it, rendered with a generation
/// prompt, to the end of its own turn; a token is trained on if it begins inside a span of a
/// message whose `train` is true. All this needs a *prefix stable* template, one that does not
/// rewrite what it wrote before; where a message shows that it is not, the conversation is
/// refused.
///
/// # Errors
/// The template fails, or is not prefix stable at an assistant's message; or no token is trained
/// on.
pub fn conversation(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
    tools: &[serde_json::Value],
) -> Result<Conversation, Error> {
    let full = template.render(messages, tools, false)?;
    let mut spans = Vec::new();
    let assistants = messages.iter().enumerate().filter(|(_, m)| m.role == "assistant" && m.train);
    for (index, _) in assistants {
        let before = template.render(messages.get(..index).unwrap_or_default(), tools, true)?;
        let until = template.render(messages.get(..=index).unwrap_or_default(), tools, false)?;
        let refuse = |what: &str| {
            Err(Error::Message {
                index,
                what: format!(
                    "the chat template {what}, so what the assistant says cannot be found in it; \
                     split the conversation so that this message is its last, or use another \
                     template"
                ),
            })
        };
        if !full.starts_with(&until) {
            return refuse("changes this turn when others follow");
        }
        if !until.starts_with(&before) {
            return refuse("writes this turn differently from how it asks for it");
        }
        if before.len() == until.len() {
            return refuse("leaves this turn out");
        }
        spans.push(before.len()..until.len());
    }
    if spans.is_empty() {
        return Err(Error::Conversation {
            what: "it has no message of role \"assistant\" with \"train\" left on".into(),
        });
    }
    let pieces = tokenizer.encode_pieces(&full, Encode::PROMPT)?;
    let mut spans = spans.into_iter().peekable();
    let mut trained = Vec::with_capacity(pieces.len());
    for piece in &pieces {
        let start = piece.start as usize;
        while spans.next_if(|span| span.end <= start).is_some() {}
        trained.push(spans.peek().is_some_and(|span| span.contains(&start)));
    }
    if !trained.contains(&true) {
        return Err(Error::Conversation {
            what: "no token begins inside what the assistant says".into(),
        });
    }
    let ids = pieces.into_iter().map(|piece| piece.id).collect();
    Ok(Conversation { ids, trained })
}

#[cfg(test)]
mod tests;
