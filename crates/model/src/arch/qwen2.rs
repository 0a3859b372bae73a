//! `qwen2`: Qwen 2 and 2.5. Llama with biases on q, k and v (which `linear` adds where the
//! file has them) and rotation of halves. Yang et al. 2024 (arXiv 2407.10671).

use gguf::Metadata;
use graph::RopeStyle;

use super::{Architecture, Hyper, llama};
use crate::Result;

/// Qwen 2 from `qwen2.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    llama::with_style(&Hyper::new(metadata, "qwen2"), vocab, RopeStyle::Halves)
}
