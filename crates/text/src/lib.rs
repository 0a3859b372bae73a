//! Text on its way into a model and out of it: vocabularies, chat templates, sampling and
//! streaming.
#![deny(clippy::indexing_slicing)]

mod error;
pub mod sampler;
mod stream;
mod template;
mod tokenizer;

pub use error::Error;
pub use sampler::{Rng, Sampled, Sampler, SamplerConfig};
pub use stream::{Delta, MAX_STOP_BYTES, MAX_STOPS, TextStream};
pub use template::{ChatTemplate, Conversation, Message, conversation, prompt};
pub use tokenizer::{Encode, MAX_TEXT_BYTES, Piece, Tokenizer};
