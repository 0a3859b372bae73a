//! Training data: from what people have to weighted tokens, packed into windows.
//!
//! *Knows*: the files and layouts that conversations come in, how a row becomes an [`Example`],
//! why a row cannot be learned from, and how examples share a [`Window`]. *Must not know*: tensors
//! and models, losses and optimizers, HTTP.
//!
//! A row is rendered and tokenized by the `text` crate alone, as it is to be served. What comes
//! from a file is untrusted: sizes are bounded before they are believed, and every failure names
//! the file, the row and the field.
#![deny(clippy::indexing_slicing)]

mod error;
mod example;
mod load;

pub use error::{Error, Result};
pub use example::{Example, Window, pack};
pub use load::{Dataset, Options, load};
