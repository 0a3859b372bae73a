//! What can go wrong, each in one line.

use std::io;
use std::path::{Path, PathBuf};

/// Why a run folder could not be made, read, continued or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file or folder that the system refuses.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A name that cannot be a folder's everywhere.
    #[error(
        "`{name}` is no name for a run: {reason}; expected letters, digits, `-`, `_` and `.`, \
         such as `facts-2`"
    )]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A name that no run has.
    #[error("no run is called `{name}` in {}: {known}", root.display())]
    Missing {
        /// The name.
        name: String,
        /// Where it was looked for.
        root: PathBuf,
        /// What there is instead.
        known: String,
    },
    /// A file that does not hold what a run folder's file holds.
    #[error("{}: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        reason: String,
    },
    /// A folder that a process writes to at the moment.
    #[error("{}: the run is going on; end its process first", path.display())]
    Running {
        /// The folder.
        path: PathBuf,
    },
    /// A page that could not be made of what was recorded.
    #[error("cannot draw {}: {reason}", path.display())]
    Page {
        /// The page.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// What functions of this crate return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// True where the system has no room left.
    pub(crate) fn is_full(&self) -> bool {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, Error::Io { source, .. } if [QuotaExceeded, StorageFull].contains(&source.kind()))
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Error {
        Error::Damaged { path: path.to_path_buf(), reason: reason.into() }
    }
}

/// Adds what was tried, and on which path, to an error of the system.
pub(crate) trait Context<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T> Context<T> for io::Result<T> {
    fn during(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io { action, path: path.to_path_buf(), source })
    }
}
