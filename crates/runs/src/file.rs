//! Files that appear whole or not at all.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use crate::error::{Context, Result};

/// Writes a file beside `path`, flushes it to the disk and gives it the name.
///
/// # Errors
/// What the system refuses; `path` is as it was then.
pub fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    // Always the same: a process holds the folder for itself, and what a killed one left is
    // written over by the next.
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let written = File::create(&temporary)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.during("write", path)
}
