//! What a command can fail with: one line and an exit code.

use std::fmt::Display;
use std::io;
use std::path::Path;

/// Why a command ended early.
#[derive(Debug)]
pub enum Error {
    /// One line for people, and the exit code.
    Failed { message: String, code: u8 },
    /// Whoever read our standard output has stopped reading: an end, not a failure.
    Closed,
    /// Ctrl-C.
    Interrupted,
}

/// Exit code where the input is wrong.
pub const INVALID: u8 = 1;
/// Exit code where something broke while running.
pub const FAULT: u8 = 3;
/// Exit code after Ctrl-C, as shells give it: 128 + SIGINT.
pub const INTERRUPTED: u8 = 130;

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Wrong input: says what, where, and what is expected.
    pub fn invalid(message: impl Into<String>) -> Error {
        Error::Failed { message: message.into(), code: INVALID }
    }

    /// Something broke.
    pub fn fault(message: impl Into<String>) -> Error {
        Error::Failed { message: message.into(), code: FAULT }
    }

    /// A run that does not fit the memory it may take.
    pub fn over_budget(message: impl Into<String>) -> Error {
        let code = graph::Code::OverBudget.exit_code();
        Error::Failed { message: message.into(), code }
    }

    /// The same with more to say, on the same line.
    pub fn with(self, more: impl Display) -> Error {
        match self {
            Error::Failed { message, code } => {
                Error::Failed { message: format!("{message}; {more}"), code }
            }
            other => other,
        }
    }

    /// What it says.
    pub fn message(&self) -> String {
        match self {
            Error::Failed { message, .. } => message.clone(),
            Error::Closed => "nobody reads the output".into(),
            Error::Interrupted => "interrupted".into(),
        }
    }

    /// An input file that cannot be read.
    pub fn reading(path: &Path, why: impl Display) -> Error {
        Error::invalid(format!("cannot read {}: {why}", path.display()))
    }

    /// An output file that cannot be written.
    pub fn writing(path: &Path, why: impl Display) -> Error {
        Error::fault(format!("cannot write {}: {why}", path.display()))
    }

    /// Standard output that cannot be written.
    pub fn stdout(why: io::Error) -> Error {
        match why.kind() {
            io::ErrorKind::BrokenPipe => Error::Closed,
            _ => Error::fault(format!("cannot write standard output: {why}")),
        }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message())
    }
}

impl From<model::Error> for Error {
    fn from(e: model::Error) -> Error {
        Error::Failed { code: e.exit_code(), message: e.to_string() }
    }
}

impl From<data::Error> for Error {
    fn from(e: data::Error) -> Error {
        Error::invalid(e.to_string())
    }
}

impl From<train::Error> for Error {
    fn from(e: train::Error) -> Error {
        Error::Failed { code: e.exit_code(), message: e.to_string() }
    }
}

impl From<runs::Error> for Error {
    fn from(e: runs::Error) -> Error {
        match e {
            runs::Error::Io { .. } | runs::Error::Page { .. } => Error::fault(e.to_string()),
            _ => Error::invalid(e.to_string()),
        }
    }
}

impl From<graph::Error> for Error {
    fn from(e: graph::Error) -> Error {
        Error::Failed { code: e.code().exit_code(), message: e.to_string() }
    }
}

impl From<graph::Fault> for Error {
    fn from(e: graph::Fault) -> Error {
        graph::Error::from(e).into()
    }
}

impl From<text::Error> for Error {
    fn from(e: text::Error) -> Error {
        model::Error::from(e).into()
    }
}

impl From<gguf::Error> for Error {
    fn from(e: gguf::Error) -> Error {
        model::Error::from(e).into()
    }
}

impl From<hub::Error> for Error {
    fn from(e: hub::Error) -> Error {
        match e {
            hub::Error::Io { .. } => Error::fault(e.to_string()),
            _ => Error::invalid(e.to_string()),
        }
    }
}
