//! Zeroed memory in cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use memmap2::MmapMut;

use crate::arena::prefer_huge_pages;

/// The alignment, in bytes: a cache line and a 512-bit vector.
const LINE: usize = 64;

/// From this size on memory is mapped, in large pages where there are any.
const MAPPED: usize = 4 << 20;

/// A fixed number of bytes, zero at first, aligned to 64. Pages are taken from the system when
/// they are first written, so by the threads that pack.
pub struct Lines {
    start: NonNull<u8>,
    len: usize,
    /// Owns what `start` points to, if it is mapped.
    map: Option<MmapMut>,
}

// SAFETY: `Lines` owns its memory, as a `Box<[u8]>` does.
unsafe impl Send for Lines {}
// SAFETY: shared access only reads.
unsafe impl Sync for Lines {}

impl Lines {
    /// `len` zeros; `None` when the system has no such memory.
    pub fn zeroed(len: usize) -> Option<Lines> {
        if len == 0 {
            return Some(Lines { start: NonNull::dangling(), len, map: None });
        }
        // In tests nothing is behind them.
        #[cfg(test)]
        if let Some((mut map, offset)) = crate::testing::fenced(len.next_multiple_of(LINE)) {
            let start = NonNull::new(map.as_mut_ptr().wrapping_add(offset))?;
            return Some(Lines { start, len, map: Some(map) });
        }
        if len >= MAPPED {
            // A map begins at a page.
            let mut map = MmapMut::map_anon(len).ok()?;
            prefer_huge_pages(&map);
            let start = NonNull::new(map.as_mut_ptr())?;
            return Some(Lines { start, len, map: Some(map) });
        }
        let layout = Layout::from_size_align(len, LINE).ok()?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Lines { start, len, map: None })
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
        if self.map.is_some() {
            return;
        }
        if let (1.., Ok(layout)) = (self.len, Layout::from_size_align(self.len, LINE)) {
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr(), layout) }
        }
    }
}
