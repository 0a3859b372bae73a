//! Files that appear whole or not at all, and locks that end with the process that holds them.
//!
//! *Knows*: the file system. *Must not know*: what is in a file.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a file beside `path`, flushes it to the disk and gives it the name, which outlasts a loss
/// of power.
///
/// The file beside it is always called the same, so that what a killed process left is written
/// over: one process at a time may write to a path.
///
/// # Errors
/// What the system refuses; `path` is as it was then.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_with(path, |temporary| {
        let mut file = File::create(temporary)?;
        file.write_all(bytes)?;
        file.sync_all()
    })
}

/// As [`write`], where `write` makes and flushes the file that it is given the path of.
///
/// # Errors
/// As [`write`].
pub fn write_with(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path);
    let written = write(&temporary)
        .and_then(|()| fs::rename(&temporary, path))
        .and_then(|()| sync_folder(folder_of(path)));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// What [`write()`] calls the file beside `path`.
pub fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp");
    path.with_file_name(name)
}

/// The folder that a file is in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes renames in a folder outlast a loss of power, where the system lets a folder be opened.
///
/// # Errors
/// What the system refuses.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => File::open(folder)?.sync_all(),
        false => Ok(()),
    }
}

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
        Ok(match file.try_lock() {
            Err(TryLockError::WouldBlock) => None,
            Ok(()) | Err(TryLockError::Error(_)) => Some(Lock(file)),
        })
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

    fn folder(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("gradus-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_file_appears_whole_or_stays_as_it_was() {
        let folder = folder("write");
        let path = folder.join("a.txt");
        write(&path, b"one").unwrap();
        // What a killed process left is written over.
        fs::write(temporary(&path), "half of something long").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let failed = write_with(&path, |temporary| {
            fs::write(temporary, "three")?;
            Err(io::Error::other("the disk is full"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "the disk is full");
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "something is left beside it");
        fs::remove_dir_all(&folder).unwrap();
    }

    /// The file's copy stands for that of a process which is just being started.
    #[test]
    fn a_lock_ends_while_a_copy_of_its_file_lives() {
        let folder = folder("lock");
        let path = folder.join("lock");
        assert!(!Lock::is_taken(&path));
        let held = Lock::take(&path).unwrap().unwrap();
        let copy = held.0.try_clone().unwrap();
        assert!(Lock::is_taken(&path) && Lock::take(&path).unwrap().is_none());
        drop(held);
        assert!(!Lock::is_taken(&path), "a dropped lock is held by a copy of its file");
        assert!(Lock::take(&path).unwrap().is_some());
        drop(copy);
        fs::remove_dir_all(&folder).unwrap();
    }
}
