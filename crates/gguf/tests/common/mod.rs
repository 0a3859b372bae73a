//! Helpers for tests: files built by hand, so that they can be wrong, and a temporary folder.

#![allow(dead_code, reason = "each test binary uses some")]

use std::path::{Path, PathBuf};

/// Bytes of a GGUF file, field by field.
#[derive(Clone, Default)]
pub struct Raw {
    pub bytes: Vec<u8>,
    /// Where fields of 4 and of 8 bytes begin that hold counts, lengths, types or offsets.
    pub fields: Vec<(usize, usize)>,
}

impl Raw {
    /// Magic, version 3 and the two counts.
    pub fn new(n_tensors: u64, n_keys: u64) -> Self {
        Self::version(3, n_tensors, n_keys)
    }

    pub fn version(version: u32, n_tensors: u64, n_keys: u64) -> Self {
        Self { bytes: b"GGUF".to_vec(), fields: Vec::new() }.u32(version).u64(n_tensors).u64(n_keys)
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.fields.push((self.bytes.len(), 4));
        self.bytes.extend(value.to_le_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.fields.push((self.bytes.len(), 8));
        self.bytes.extend(value.to_le_bytes());
        self
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    pub fn str(self, text: &str) -> Self {
        self.u64(text.len() as u64).raw(text.as_bytes())
    }

    pub fn key_u32(self, key: &str, value: u32) -> Self {
        self.str(key).u32(4).u32(value)
    }

    pub fn key_str(self, key: &str, value: &str) -> Self {
        self.str(key).u32(8).str(value)
    }

    /// A line of the tensor table; `ne` with the contiguous dimension first, as in the file.
    pub fn tensor(self, name: &str, ne: &[u64], ty: u32, offset: u64) -> Self {
        let with_dims = ne.iter().fold(self.str(name).u32(ne.len() as u32), |raw, &n| raw.u64(n));
        with_dims.u32(ty).u64(offset)
    }

    /// Padding to 32 bytes and `len` bytes of data.
    pub fn data(mut self, len: usize) -> Self {
        self.bytes.resize(self.bytes.len().next_multiple_of(32), 0);
        self.bytes.extend((0..len).map(|i| i as u8));
        self
    }
}

/// A folder that goes away with the value.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gradus-gguf-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// SplitMix64: a small generator whose sequence is fixed for all time.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `n`, which is at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}
