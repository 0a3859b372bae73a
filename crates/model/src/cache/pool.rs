//! Storage of a cache, and who holds what of it.

use crate::{Error, Result};

/// Equal rows of bytes in host memory.
pub(super) struct Pool {
    /// 8-byte units, so that every element type is aligned.
    storage: Vec<u64>,
    pub(super) row_bytes: usize,
}

/// Bytes a pool takes.
pub(super) fn pool_bytes(rows: usize, row_bytes: usize) -> Option<usize> {
    rows.checked_mul(row_bytes)?.checked_next_multiple_of(8)
}

impl Pool {
    pub(super) fn new(rows: usize, row_bytes: usize) -> Result<Pool> {
        let bytes =
            pool_bytes(rows, row_bytes).ok_or_else(|| Error::new("the cache's size overflows"))?;
        let mut storage = Vec::new();
        storage.try_reserve_exact(bytes / 8).map_err(|_| {
            Error::new(format!(
                "no memory for {bytes} bytes of cache; use a smaller context or cache type"
            ))
        })?;
        // Zeros are written, so the pages are taken now and not under a request.
        storage.resize(bytes / 8, 0);
        Ok(Pool { storage, row_bytes })
    }

    /// What it takes, in bytes.
    pub(super) fn size(&self) -> usize {
        self.storage.len() * 8
    }

    pub(super) fn rows(&self, row: usize, rows: usize) -> &[u8] {
        let (start, len) = (row * self.row_bytes, rows * self.row_bytes);
        bytemuck::cast_slice(&self.storage).get(start..start + len).unwrap_or(&[])
    }

    pub(super) fn rows_mut(&mut self, row: usize, rows: usize) -> &mut [u8] {
        let (start, len) = (row * self.row_bytes, rows * self.row_bytes);
        bytemuck::cast_slice_mut(&mut self.storage).get_mut(start..start + len).unwrap_or(&mut [])
    }

    /// Copies rows within the pool.
    pub(super) fn copy(&mut self, from: usize, to: usize, rows: usize) {
        let (from, to, len) = (from * self.row_bytes, to * self.row_bytes, rows * self.row_bytes);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.storage);
        if from + len <= bytes.len() && to + len <= bytes.len() {
            bytes.copy_within(from..from + len, to);
        }
    }
}

/// Numbered places: each is free, held by so many sequences, or kept for reuse, or both.
pub(super) struct Places {
    users: Vec<u32>,
    kept: Vec<bool>,
    free: Vec<u32>,
    /// Kept, and held by no sequence.
    idle: usize,
}

impl Places {
    pub(super) fn new(count: u32) -> Places {
        let n = count as usize;
        Places {
            users: vec![0; n],
            kept: vec![false; n],
            free: (0..count).rev().collect(),
            idle: 0,
        }
    }

    /// Places a sequence can get: the free ones, and those that only reuse keeps.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle
    }

    /// How many sequences hold a place.
    pub(super) fn users(&self, place: u32) -> u32 {
        self.users.get(place as usize).copied().unwrap_or(0)
    }

    fn is_kept(&self, place: u32) -> bool {
        self.kept.get(place as usize).copied().unwrap_or(false)
    }

    /// True when only reuse keeps it.
    pub(super) fn is_idle(&self, place: u32) -> bool {
        self.is_kept(place) && self.users(place) == 0
    }

    /// True when its holder may not write to it.
    pub(super) fn is_shared(&self, place: u32) -> bool {
        self.is_kept(place) || self.users(place) > 1
    }

    /// A free place, for one sequence.
    pub(super) fn take(&mut self) -> Option<u32> {
        let place = self.free.pop()?;
        self.share(place);
        Some(place)
    }

    /// One more sequence holds it.
    pub(super) fn share(&mut self, place: u32) {
        if self.is_idle(place) {
            self.idle -= 1;
        }
        if let Some(n) = self.users.get_mut(place as usize) {
            *n += 1;
        }
    }

    /// One sequence less holds it.
    pub(super) fn release(&mut self, place: u32) {
        match self.users.get_mut(place as usize) {
            Some(n) if *n > 0 => *n -= 1,
            _ => return,
        }
        if self.users(place) == 0 {
            if self.is_kept(place) {
                self.idle += 1;
            } else {
                self.free.push(place);
            }
        }
    }

    /// Kept for reuse from now on; a sequence must hold it.
    pub(super) fn keep(&mut self, place: u32) {
        if let Some(kept) = self.kept.get_mut(place as usize) {
            *kept = true;
        }
    }

    /// No longer kept for reuse.
    pub(super) fn forget(&mut self, place: u32) {
        if !self.is_kept(place) {
            return;
        }
        if self.is_idle(place) {
            self.idle -= 1;
            self.free.push(place);
        }
        if let Some(kept) = self.kept.get_mut(place as usize) {
            *kept = false;
        }
    }
}
