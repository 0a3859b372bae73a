//! `qwen3`: the dense models of Qwen 3 (arXiv 2505.09388). Llama with rotation of halves, whose
//! heads of q and k are normalized before they are rotated.

use gguf::Metadata;
use graph::RopeStyle;

use super::llama::{Llama, Variant};
use super::{Architecture, Hyper};
use crate::Result;

/// How it differs from Llama.
pub(super) const QWEN3: Variant = Variant { style: RopeStyle::Halves, norm_heads: true };

/// Qwen 3 from `qwen3.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    Ok(Box::new(Llama::dense(&Hyper::new(metadata, "qwen3"), vocab, QWEN3)?))
}
