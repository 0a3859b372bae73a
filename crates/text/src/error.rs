//! One error type; its text is one line.

use std::fmt::Write as _;

/// What went wrong with a vocabulary, a template, a message or a request for a token.
///
/// Displayed as one line that says where (file and key, message, field or token), what was
/// expected and what was found. Text that comes from outside is shown escaped and shortened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A metadata key is missing or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] gguf::Error),
    /// The vocabulary of a file cannot be used.
    #[error("{file}: key `{key}` {what}")]
    Vocabulary {
        /// The file.
        file: String,
        /// The metadata key.
        key: &'static str,
        /// What is wrong with it and what was expected.
        what: String,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is out of range; the vocabulary has {size} tokens")]
    Token {
        /// The id.
        id: u32,
        /// Number of tokens.
        size: usize,
    },
    /// A text too long to tokenize.
    #[error("the text has {bytes} bytes; at most {limit} can be tokenized at once")]
    TextLength {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A chat template does not parse, fails, refuses the conversation or never ends.
    #[error("{origin}: {what}")]
    Template {
        /// File, key and, where known, line of the template.
        origin: String,
        /// What happened.
        what: String,
    },
    /// There is no built-in template of this name.
    #[error("no built-in chat template is called {name}; there are {known}")]
    TemplateName {
        /// The name asked for, quoted.
        name: String,
        /// The names there are.
        known: String,
    },
    /// A message of a conversation cannot be used.
    #[error("message {index}: {what}")]
    Message {
        /// Index from 0.
        index: usize,
        /// What is wrong with it.
        what: String,
    },
    /// What the assistant says in a message cannot be found in what the template makes of the
    /// conversation.
    #[error("message {index}: {what}")]
    Turn {
        /// Index from 0.
        index: usize,
        /// Why, and what to do.
        what: String,
    },
    /// The template leaves out what the assistant says in a message, or a part of it.
    #[error("message {index}: {what}")]
    Unsaid {
        /// Index from 0.
        index: usize,
        /// Nothing of it is rendered.
        all: bool,
        /// What is left out, and what to do.
        what: String,
    },
    /// A conversation cannot be trained on as a whole.
    #[error("the conversation cannot be trained on: {what}")]
    Conversation {
        /// Why.
        what: String,
    },
    /// A conversation takes more work than may be done for it.
    #[error("the conversation is given up: {what}")]
    Effort {
        /// Why.
        what: String,
    },
    /// A sampler setting is out of range.
    #[error("`{field}` is {found}; expected {expected}")]
    Setting {
        /// The field of [`SamplerConfig`](crate::SamplerConfig).
        field: &'static str,
        /// The value found.
        found: String,
        /// The range allowed.
        expected: &'static str,
    },
    /// Logits that no distribution can be made of, as the model gave them.
    #[error(
        "{what}; expected finite logits or -inf, and at least one finite: weights or an adapter \
         that are damaged or too large are the cause"
    )]
    Logits {
        /// Which logit, and its value.
        what: String,
    },
    /// Logits of which bias and penalties leave no distribution.
    #[error("{what} after bias and penalties; expected at least one finite logit, and none above")]
    Adjusted {
        /// Which logit, and its value.
        what: String,
    },
    /// A stop string that cannot be used.
    #[error("stop string {index} {what}")]
    Stop {
        /// Index from 0.
        index: usize,
        /// What is wrong with it.
        what: String,
    },
}

impl Error {
    /// True for what is no fault of whoever asked: numbers of the model that are not finite.
    pub fn is_not_finite(&self) -> bool {
        matches!(self, Error::Logits { .. })
    }
}

/// Text from outside as an error shows it: quoted, control characters escaped, cut at 96
/// characters.
pub(crate) fn shown(text: &str) -> String {
    let mut out = String::from("\"");
    for (i, c) in text.chars().enumerate() {
        if i == 96 {
            out.push_str("...");
            break;
        }
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}') => {
                // Writing to a string cannot fail.
                let _ = write!(out, "{}", c.escape_unicode());
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A message of several lines on one, cut at 400 characters.
pub(crate) fn one_line(text: &str) -> String {
    let mut out = String::new();
    for (i, word) in text.split(char::is_whitespace).filter(|w| !w.is_empty()).enumerate() {
        if out.chars().count() > 400 {
            out.push_str(" ...");
            break;
        }
        if i > 0 {
            out.push(' ');
        }
        out.extend(word.chars().take(400).filter(|c| !c.is_control()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_outside_stays_on_one_line_and_short() {
        assert_eq!(shown("a\"b\n"), "\"a\\\"b\\u{a}\"");
        assert_eq!(shown(&"x".repeat(200)).len(), 96 + 5);
        assert_eq!(one_line("a\n\n  b\tc"), "a b c");
        assert!(one_line(&"word ".repeat(10_000)).len() < 420);
        assert!(one_line(&"w".repeat(10_000)).len() < 420);
    }
}
