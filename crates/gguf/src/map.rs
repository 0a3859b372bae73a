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

/// Lets the system take back the memory behind `len` bytes from `start`: reading them again reads
/// the file again. Advice only; a system that does not take it keeps the pages.
pub(crate) fn release(map: &Mmap, start: usize, len: usize) {
    if start.checked_add(len).is_none_or(|end| end > map.len()) {
        return;
    }
    #[cfg(unix)]
    {
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is read-only and of a file, so that a page that is dropped comes back
        // with the file's bytes when it is next read: nothing changes for whoever holds a slice.
        let _ = unsafe { map.unchecked_advise_range(advice, start, len) };
    }
}
