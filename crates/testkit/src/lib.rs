//! What tests share: golden files, random numbers and error measures.
//!
//! Knows: file formats. Must not know: graphs, devices or models.

mod golden;

pub use golden::{Golden, fixture, relative_l2};

/// Toys of every kind of model, by architecture and number of experts.
pub const TOYS: [(&str, usize); 8] = [
    ("gemma3", 0),
    ("llama", 0),
    ("llama", 8),
    ("qwen2", 0),
    ("qwen3", 0),
    ("qwen35", 0),
    ("qwen35moe", 8),
    ("qwen3moe", 8),
];

/// A seeded generator (SplitMix64): the same numbers everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Roughly normal with mean 0 and standard deviation 1: the sum of 12 uniforms.
    pub fn normal(&mut self) -> f32 {
        let unit = |r: &mut Random| (r.bits() >> 40) as f32 / (1u64 << 24) as f32;
        (0..12).map(|_| unit(self)).sum::<f32>() - 6.0
    }
}
