//! Text on its way into a model and out of it.
//!
//! *Knows*: vocabularies as GGUF files carry them ([`Tokenizer`]), chat templates
//! ([`ChatTemplate`]), how a conversation becomes tokens and which of them are trained on
//! ([`conversation`](conversation())), how logits become a token ([`Sampler`]) and tokens become
//! text ([`TextStream`]). *Must not know*: tensors and models, files beyond the metadata it is
//! handed, HTTP.
//!
//! Everything but a template is a pure function of its arguments; a template may ask the clock,
//! unless that is stopped. What comes from a file or a request is untrusted: every failure is an
//! [`Error`] of one line, the time and memory that a text costs grow with its size, and what a
//! template may cost has fixed limits.

#![deny(clippy::indexing_slicing)]

mod conversation;
mod error;
mod message;
pub mod sampler;
mod stream;
mod template;
mod tokenizer;

pub use conversation::{
    Conversation, Effort, Turn, check_said, conversation, encode_chat, encode_prompt, left_out,
};
pub use error::Error;
pub use message::{Content, Message};
pub use sampler::{Sampled, Sampler, SamplerConfig};
pub use stream::{Delta, MAX_STOP_BYTES, MAX_STOPS, TextStream};
pub use template::{BUILTIN_TEMPLATES, ChatTemplate, SpecialTokens};
pub use tokenizer::{Encode, MAX_TEXT_BYTES, Piece, Tokenizer};
