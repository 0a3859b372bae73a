//! What can be wrong with data.

/// Why data cannot be used: one line that names the file, the row and the reason.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// A file, or what it holds.
    #[error("{0}")]
    Data(String),
}

/// The result of anything in this crate.
pub type Result<T> = std::result::Result<T, Error>;
