//! `qwen3moe`: Qwen3-30B-A3B and its like (arXiv 2505.09388). Qwen 3 with experts in every layer:
//! softmax over all of them, the greatest, their shares divided by their sum.

use gguf::Metadata;

use super::llama::Llama;
use super::qwen3::QWEN3;
use super::{Architecture, Hyper};
use crate::Result;

/// Qwen 3 with experts from `qwen3moe.*` keys.
pub(super) fn read(metadata: &Metadata, vocab: usize) -> Result<Box<dyn Architecture>> {
    Ok(Box::new(Llama::sparse(&Hyper::new(metadata, "qwen3moe"), vocab, QWEN3)?))
}
