//! What tells models apart.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::borrow::Cow;
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType};
use model::Model;
use model::toy::Toy;

fn fingerprint(bytes: Vec<u8>) -> u64 {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    Model::from_gguf(Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap().fingerprint()
}

/// Also a merge that changes one expert in the middle of its stack makes another model.
#[test]
fn models_that_differ_in_one_number_have_other_fingerprints() {
    let toy = Toy::new("qwen3moe", TensorType::F32, 3);
    let file = Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let original = fingerprint(toy.gguf().unwrap());
    assert_eq!(fingerprint(toy.gguf().unwrap()), original);
    let mut seen = vec![original];
    for changed in ["blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight", "output_norm.weight"] {
        let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = file
            .tensors()
            .map(|t| {
                let mut bytes = t.bytes.to_vec();
                if t.info.name == changed {
                    let at = bytes.len() / 3;
                    bytes[at - at % 4] ^= 1;
                }
                (t.info.clone(), Cow::Owned(bytes))
            })
            .collect();
        seen.push(fingerprint(gguf::encode(file.metadata(), tensors).unwrap()));
    }
    let all = seen.len();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), all);
}
