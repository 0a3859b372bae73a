//! Errors of training.

/// Anything that can go wrong with a training job.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A data file, naming file, row and reason.
    #[error("{0}")]
    Data(String),
    /// A file of a run that cannot be read or written, naming it.
    #[error("{0}")]
    File(String),
    /// A setting, naming the field and what is expected.
    #[error("{0}")]
    Setting(String),
    /// A broken assumption, naming what is missing or does not fit.
    #[error("{0}")]
    Stopped(String),
    /// Targets that no gradient moved, by name.
    #[error("{0}")]
    DeadAdapters(String),
    /// A number that is not finite, naming the step, and where it can be told the op and node
    /// that gave it first.
    #[error("{0}")]
    NotFinite(String),
    /// The model, its graph or the device.
    #[error(transparent)]
    Model(#[from] model::Error),
}

impl Error {
    /// The exit code of a command that fails with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Data(_) | Error::Setting(_) => 1,
            Error::File(_) => graph::Code::FileFailed.exit_code(),
            Error::Stopped(_) => graph::Code::Internal.exit_code(),
            Error::DeadAdapters(_) => graph::Code::DeadAdapters.exit_code(),
            Error::NotFinite(_) => graph::Code::NonFinite.exit_code(),
            Error::Model(e) => e.exit_code(),
        }
    }
}

impl From<data::Error> for Error {
    fn from(e: data::Error) -> Error {
        Error::Data(e.to_string())
    }
}

impl From<graph::Error> for Error {
    fn from(e: graph::Error) -> Error {
        Error::Model(e.into())
    }
}

impl From<graph::Invalid> for Error {
    fn from(e: graph::Invalid) -> Error {
        Error::Model(e.into())
    }
}

impl From<graph::Fault> for Error {
    fn from(e: graph::Fault) -> Error {
        Error::Model(e.into())
    }
}

impl From<text::Error> for Error {
    fn from(e: text::Error) -> Error {
        Error::Model(e.into())
    }
}

/// The result of anything in this crate.
pub type Result<T> = std::result::Result<T, Error>;
