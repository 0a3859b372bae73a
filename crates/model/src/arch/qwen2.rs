//! `qwen2`: Qwen 2 and 2.5. Llama with biases on q, k and v (which `linear` adds where the
//! file has them) and rotation of halves. Yang et al. 2024 (arXiv 2407.10671).

use gguf::Metadata;
use graph::RopeStyle;

use super::llama::{Llama, Variant};
use super::{Architecture, Hyper};
use crate::Result;

/// Qwen 2 from `qwen2.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    let variant = Variant { style: RopeStyle::Halves, norm_heads: false };
    Ok(Box::new(Llama::dense(&Hyper::new(metadata, "qwen2"), vocab, variant)?))
}
