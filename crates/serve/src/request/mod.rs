//! From the body of a request to what the server is asked for.
//!
//! Each function here takes bytes and gives an [`Ask`](crate::Ask), a
//! [`TrainJob`](crate::TrainJob) or a [`LearnJob`](crate::LearnJob), or an error that names the
//! field to blame. They touch no server, and of the file system only the training folder. A field
//! that is unknown, of the wrong type or without effect is an error; everything that is cheap to
//! check is checked before anything is rendered.

mod adapters;
mod chat;
mod data;
mod jobs;
mod json;
pub mod names;

use std::path::PathBuf;
use std::sync::Arc;

use graph::{Code, DType};
use model::Model;

use crate::{Error, Result};

pub use adapters::{alias, load_adapter, nothing, out};
pub use chat::{Reply, chat, completion};
pub use jobs::{DEFAULT_PACING, learn, train};
pub(crate) use jobs::{chunks, window_of};

/// Most bytes of the body of a request for text.
pub const MAX_TEXT_BODY: usize = 16 << 20;
/// Most bytes of the body of a training request.
pub const MAX_TRAIN_BODY: usize = 128 << 20;

/// What requests are read against.
#[derive(Clone)]
pub struct Host {
    /// The model.
    pub model: Arc<Model>,
    /// The chat template, or why there is none.
    pub template: std::result::Result<text::ChatTemplate, String>,
    /// What the base model is called.
    pub name: String,
    /// What keys and values are kept in: an adapter is trained for what it is served with.
    pub cache: DType,
    /// The folder that training writes to and adapters are loaded from; none: both are off.
    pub train_dir: Option<PathBuf>,
}

impl Host {
    /// A host for a model, with the model's own template.
    pub fn new(model: Arc<Model>, name: String, cache: DType) -> Host {
        let template = model.template().cloned().map_err(|e| e.to_string());
        Host { model, template, name, cache, train_dir: None }
    }

    fn template(&self, field: &str) -> Result<&text::ChatTemplate> {
        self.template.as_ref().map_err(|why| {
            Error::field(field, format!("`{field}` cannot be rendered without a template: {why}"))
        })
    }

    /// The training folder.
    ///
    /// # Errors
    /// There is none.
    pub fn train_dir(&self) -> Result<&PathBuf> {
        self.train_dir.as_ref().ok_or_else(|| {
            Error::new(
                Code::TrainingOff,
                "training is off; start the server with `--train-dir DIR` to allow it",
            )
        })
    }
}

/// What the text crate says about the field at `at`, which ends in `messages` or `prompt`.
fn text_error(at: &str, e: text::Error) -> Error {
    match &e {
        text::Error::Message { index, what } | text::Error::Turn { index, what } => {
            let path = format!("{at}[{index}]");
            Error::field(path.as_str(), format!("`{path}`: {what}"))
        }
        text::Error::Setting { field, .. } => Error::field(*field, e.to_string()),
        text::Error::Stop { index, .. } => Error::field(format!("stop[{index}]"), e.to_string()),
        _ => Error::field(at, format!("`{at}`: {e}")),
    }
}

#[cfg(test)]
mod tests;
