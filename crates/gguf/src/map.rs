//! The memory map: the one place in this crate with `unsafe`.
//!
//! A map is only as good as the file behind it. If another process shortens the file while it
//! is mapped, reading past the new end is a `SIGBUS`, which no code of ours can turn into a
//! value; if another process rewrites it, the bytes change under the reader. Parsing is safe
//! against any *content* (every byte is checked when it is used), and for the rest the rule is:
//! weights are copied out of the map, into memory of our own, before anything is served, and
//! the map is dropped.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::Mmap;

/// Maps a regular file read-only.
///
/// # Errors
/// What the operating system reports, also for an empty file.
pub(crate) fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is private to this crate and read-only, and all its bytes are valid `u8`s
    // whatever they hold. That the file is not shortened or rewritten meanwhile cannot be
    // guaranteed by any program; the module's documentation says what we do about it.
    unsafe { Mmap::map(file) }
}
