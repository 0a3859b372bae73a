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
    /// A file that was taken for an adapter is of another kind, or for another model; or one could
    /// not be written.
    #[error("{message}")]
    Adapter {
        /// What is wrong, as a code.
        code: graph::Code,
        /// What is wrong, and what to do.
        message: String,
    },
    /// A number that is not finite came out.
    #[error("{0}")]
    NotFinite(String),
    /// The model is of a kind Gradus does not run, or was asked for what it cannot do.
    #[error("{0}")]
    Model(String),
}

/// Messages hold names from files, which may be of any length.
const MOST_CHARS: usize = 4096;

/// A message as it may be printed: what steers a terminal is escaped, wherever a name from a file
/// brought it in.
fn printable(message: &str) -> String {
    gguf::escaped(message, MOST_CHARS)
}

impl Error {
    /// An error with a one-line message.
    pub fn new(message: impl AsRef<str>) -> Error {
        Error::Model(printable(message.as_ref()))
    }

    /// An adapter that cannot be used or written, with a code of its own.
    pub(crate) fn adapter(code: graph::Code, message: impl AsRef<str>) -> Error {
        Error::Adapter { code, message: printable(message.as_ref()) }
    }

    /// What kind of error it is: what failed in writing is no fault of the input.
    pub fn code(&self) -> graph::Code {
        match self {
            Error::Graph(e) => e.code(),
            Error::Adapter { code, .. } => *code,
            Error::Full { .. } => graph::Code::ContextExceeded,
            Error::NotFinite(_) => graph::Code::NonFinite,
            Error::Text(e) if e.is_not_finite() => graph::Code::NonFinite,
            Error::File(e) if e.is_write_failure() => graph::Code::FileFailed,
            Error::File(_) | Error::Text(_) | Error::Model(_) => graph::Code::InvalidInput,
        }
    }

    /// The exit code of a command that fails with this error.
    pub fn exit_code(&self) -> u8 {
        self.code().exit_code()
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
