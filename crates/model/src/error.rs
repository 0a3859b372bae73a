//! Errors of loading and running models.

/// Anything that can go wrong with a model.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is damaged, or lacks something.
    #[error(transparent)]
    File(#[from] gguf::Error),
    /// The tokenizer, template or sampler.
    #[error(transparent)]
    Text(#[from] text::Error),
    /// The graph, the plan or the device.
    #[error(transparent)]
    Graph(#[from] graph::Error),
    /// The cache has no room for now: a sequence must be closed first, or the cache be larger.
    #[error(
        "the cache is full: {needed} more {what} are needed, {free} are free; use a larger context"
    )]
    Full {
        /// What there is too little of, in the plural.
        what: &'static str,
        /// How many more it takes.
        needed: usize,
        /// How many there are.
        free: usize,
    },
    /// A file that was taken for an adapter is of another kind, or for another model.
    #[error("{message}")]
    Adapter {
        /// What is wrong, as a code.
        code: graph::Code,
        /// What is wrong, and what to do.
        message: String,
    },
    /// The model is of a kind Gradus does not run, or was asked for what it cannot do.
    #[error("{0}")]
    Model(String),
}

impl Error {
    /// An error with a one-line message.
    pub fn new(message: impl Into<String>) -> Error {
        Error::Model(message.into())
    }

    /// An adapter that cannot be used, with a code of its own.
    pub(crate) fn adapter(code: graph::Code, message: impl Into<String>) -> Error {
        Error::Adapter { code, message: message.into() }
    }

    /// The exit code of a command that fails with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Graph(e) => e.code().exit_code(),
            Error::Adapter { code, .. } => code.exit_code(),
            _ => 1,
        }
    }
}

impl From<graph::Invalid> for Error {
    fn from(e: graph::Invalid) -> Error {
        Error::Graph(e.into())
    }
}

impl From<graph::Fault> for Error {
    fn from(e: graph::Fault) -> Error {
        Error::Graph(e.into())
    }
}

/// The result of anything in this crate.
pub type Result<T> = std::result::Result<T, Error>;
