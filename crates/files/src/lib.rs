//! Files that appear whole or not at all, files that are read within bounds, and locks that end
//! with the process that holds them.
//!
//! *Knows*: the file system. *Must not know*: what is in a file.

mod lock;
mod read;
mod replace;

use std::io::ErrorKind;

pub use lock::Lock;
pub use read::{open, read};
pub use replace::{
    Replacement, Unwritten, destination, folder_of, new_file, short, sync_folder, try_folder,
    write, write_or_rescue, write_with,
};

/// What people can do about an error of the system, as the end of a sentence.
pub fn advice(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound | ErrorKind::NotADirectory => "check the path",
        ErrorKind::PermissionDenied => "check the permissions of the file and of its folder",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free some space, or choose a place on another disk"
        }
        ErrorKind::ReadOnlyFilesystem => "choose a place on a disk that can be written",
        ErrorKind::FileTooLarge => "choose a place on a disk that takes files of this size",
        ErrorKind::ResourceBusy => "wait for its end, or choose another file",
        ErrorKind::InvalidFilename => "choose another, shorter name",
        ErrorKind::OutOfMemory => "close other programs, or use a machine with more memory",
        _ => "check the path and the disk it is on",
    }
}
