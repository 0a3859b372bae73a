//! Text on its way into a model and out of it: vocabularies, chat templates, sampling and
//! streaming.
#![deny(clippy::indexing_slicing)]

mod conversation;
mod error;
mod message;
pub mod sampler;
mod stream;
mod template;
mod tokenizer;

pub use conversation::{Conversation, conversation, encode_chat, encode_prompt};
pub use error::Error;
pub use message::{Content, Message};
pub use sampler::{Sampled, Sampler, SamplerConfig};
pub use stream::{Delta, MAX_STOP_BYTES, MAX_STOPS, TextStream};
pub use template::{BUILTIN_TEMPLATES, ChatTemplate, SpecialTokens};
pub use tokenizer::{Encode, MAX_TEXT_BYTES, Piece, Tokenizer};
