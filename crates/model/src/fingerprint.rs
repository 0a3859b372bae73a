//! A number to tell model files apart by.

use crate::Weights;

/// FNV-1a over 64 bits (Fowler, Noll & Vo): quick, and enough against mistakes, not against malice.
#[derive(Clone, Debug)]
pub struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// The hash of all that was added.
    pub fn finish(&self) -> u64 {
        self.0
    }
}

/// What the architecture's keys say, names, types and shapes of all tensors, and a checksum of the
/// bytes of each: a model that differs in one expert is another.
pub(crate) fn of(file: &gguf::Gguf, weights: &Weights) -> u64 {
    let mut hash = Fnv::default();
    let metadata = file.metadata();
    let arch = metadata.str("general.architecture").unwrap_or_default();
    for (key, value) in metadata.iter().filter(|(key, _)| key.starts_with(arch)) {
        hash.add(key.as_bytes());
        hash.add(format!("{value:?}").as_bytes());
    }
    for tensor in file.tensors() {
        hash.add(tensor.info.name.as_bytes());
        hash.add(tensor.info.ty.name().as_bytes());
        tensor.info.shape.iter().for_each(|&d| hash.add(&(d as u64).to_le_bytes()));
        if let Some(weight) = weights.get(&tensor.info.name) {
            hash.add(&weight.checksum().to_le_bytes());
        }
    }
    hash.finish()
}
