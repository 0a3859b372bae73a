//! Errors as a client sees them.

use graph::{Code, Refusal};

/// Why a request was not answered: a stable code, and one line for people.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The stable code, which gives the HTTP status.
    pub code: Code,
    /// What, where, what was expected and what to do.
    pub message: String,
    /// The field of the request that is to blame, e.g. `rank` or `messages[2].role`.
    pub field: Option<String>,
    /// The op, node and operand, where a graph was refused.
    pub refusal: Option<Box<Refusal>>,
}

impl Error {
    /// An error with a code.
    pub fn new(code: Code, message: impl Into<String>) -> Error {
        Error { code, message: message.into(), field: None, refusal: None }
    }

    /// A field of a request that is wrong.
    pub fn field(field: impl Into<String>, message: impl Into<String>) -> Error {
        Error { field: Some(field.into()), ..Error::new(Code::InvalidInput, message) }
    }

    /// The same error, blamed on a field.
    pub fn with_field(self, field: impl Into<String>) -> Error {
        Error { field: Some(field.into()), ..self }
    }

    /// The HTTP status.
    pub fn status(&self) -> u16 {
        self.code.http_status()
    }
}

impl From<graph::Error> for Error {
    fn from(e: graph::Error) -> Error {
        let (code, message) = (e.code(), e.to_string());
        let refusal = if let graph::Error::Refusal(refusal) = e { Some(refusal) } else { None };
        Error { refusal, ..Error::new(code, message) }
    }
}

impl From<model::Error> for Error {
    fn from(e: model::Error) -> Error {
        match e {
            model::Error::Graph(e) => e.into(),
            e => Error::new(e.code(), e.to_string()),
        }
    }
}

impl From<text::Error> for Error {
    fn from(e: text::Error) -> Error {
        model::Error::from(e).into()
    }
}

impl From<train::Error> for Error {
    fn from(e: train::Error) -> Error {
        match e {
            train::Error::Data(message) => Error::new(Code::BadData, message),
            train::Error::File(message) => Error::new(Code::FileFailed, message),
            train::Error::Setting(message) => Error::new(Code::InvalidInput, message),
            train::Error::Stopped(message) => Error::new(Code::Internal, message),
            train::Error::DeadAdapters(message) => Error::new(Code::DeadAdapters, message),
            train::Error::NotFinite(message) => Error::new(Code::NonFinite, message),
            train::Error::Model(e) => e.into(),
        }
    }
}

/// The result of anything a client can ask for.
pub type Result<T> = std::result::Result<T, Error>;
