//! Zeroed memory in cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// The alignment, in bytes: a cache line and a 512-bit vector.
const LINE: usize = 64;

/// A fixed number of bytes, zero at first, aligned to 64. Pages are taken from the system when
/// they are first written, so by the threads that pack.
pub struct Lines {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: `Lines` owns its memory, as a `Box<[u8]>` does.
unsafe impl Send for Lines {}
// SAFETY: shared access only reads.
unsafe impl Sync for Lines {}

impl Lines {
    /// `len` zeros; `None` when the system has no such memory.
    pub fn zeroed(len: usize) -> Option<Lines> {
        if len == 0 {
            return Some(Lines { start: NonNull::dangling(), len });
        }
        let layout = Layout::from_size_align(len, LINE).ok()?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Lines { start, len })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` bytes, initialized to zero; a dangling one has none.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        if let (1.., Ok(layout)) = (self.len, Layout::from_size_align(self.len, LINE)) {
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}
