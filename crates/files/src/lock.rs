//! Locks between processes.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

/// A lock between processes, until it is dropped. To close its file would not end it while a
/// process that was being started at that moment still has a copy of it. The file itself stays:
/// deleting it would let two processes lock two files of one name.
#[derive(Debug)]
pub struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // A file system without locks refuses this too.
        let _ = self.0.unlock();
    }
}

impl Lock {
    /// Takes the lock of a file, which is made where it is not there; `None` while another has it.
    /// On a file system without locks it is always had.
    ///
    /// # Errors
    /// When the file cannot be made or opened.
    pub fn take(path: &Path) -> io::Result<Option<Lock>> {
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        Ok(Lock::of(file))
    }

    /// As [`Lock::take`], of an open file.
    pub(crate) fn of(file: File) -> Option<Lock> {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => None,
            Ok(()) | Err(TryLockError::Error(_)) => Some(Lock(file)),
        }
    }

    /// The file.
    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    /// Whether somebody has the lock of a file, now.
    pub fn is_taken(path: &Path) -> bool {
        let Ok(file) = File::open(path) else { return false };
        match file.try_lock_shared() {
            Ok(()) => {
                drop(Lock(file));
                false
            }
            Err(e) => matches!(e, TryLockError::WouldBlock),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The file's copy stands for that of a process which is just being started.
    #[test]
    fn a_lock_ends_while_a_copy_of_its_file_lives() {
        let folder = crate::replace::tests::folder("lock");
        let path = folder.join("lock");
        assert!(!Lock::is_taken(&path));
        let held = Lock::take(&path).unwrap().unwrap();
        let copy = held.0.try_clone().unwrap();
        assert!(Lock::is_taken(&path) && Lock::take(&path).unwrap().is_none());
        drop(held);
        assert!(!Lock::is_taken(&path), "a dropped lock is held by a copy of its file");
        assert!(Lock::take(&path).unwrap().is_some());
        drop(copy);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
