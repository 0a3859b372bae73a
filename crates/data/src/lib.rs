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

mod bad;
mod error;
mod example;
mod fields;
mod json;
mod layout;
mod load;
mod message;
mod pack;
mod render;
mod source;

pub use bad::{Bad, Reason};
pub use error::{BadRow, BadRows, Error, Result, Stopped};
pub use example::{Example, Window, kept};
pub use fields::{Fields, missing, shown, wrong};
pub use json::{MAX_DEPTH, MAX_VALUES, parse_json};
pub use layout::{Content, Layout, Reading};
pub use load::{
    Dataset, FileReport, Options, Read, Row, count_left_out, each, each_rendered, load,
};
pub use message::{Purpose, messages, tools};
pub use pack::{Packing, Room, pack};
pub use render::{Fit, LossOn, Rendered, Renderer};
pub use source::{MAX_FILE, MAX_ROW, MAX_ROWS};
