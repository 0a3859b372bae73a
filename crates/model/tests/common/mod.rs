//! What tests of engines share.
#![allow(dead_code)] // not every test uses everything

use std::sync::Arc;

use gguf::TensorType;
use graph::DType;
use model::toy::Toy;
use model::{Adapter, AdapterId, Engine, EngineConfig, Model, Rows, SeqId, WantLogits};
use testkit::Random;

/// A toy of 2 layers.
pub fn toy(arch: &'static str) -> Arc<Model> {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let spec = Toy::new(arch, TensorType::Q4_0, 7);
    let file = gguf::Gguf::from_bytes("toy.gguf", spec.gguf().unwrap()).unwrap();
    Arc::new(Model::from_gguf(file, device).unwrap())
}

/// An engine with so many positions and states.
pub fn engine(model: &Arc<Model>, positions: usize, states: usize) -> Engine {
    let config = EngineConfig { cache: DType::F16, positions, batch: 128, states };
    Engine::new(model.clone(), config).unwrap()
}

/// Random tokens of the toys' vocabulary.
pub fn tokens(seed: u64, n: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.below(320) as u32).collect()
}

/// An adapter on every projection, and on embedding and head where those are two tensors, whose B
/// is not zero.
pub fn adapter(model: &Model, rank: usize, seed: u64) -> Arc<Adapter> {
    let targets: Vec<String> = model.projections().keys().cloned().collect();
    let mut adapter =
        Adapter::fresh(model, targets.iter().map(|t| (t.as_str(), rank)), 2.0 * rank as f32, seed)
            .unwrap();
    let mut random = Random::new(seed);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    Arc::new(adapter)
}

/// The bits of the logits of new rows.
pub fn feed(
    engine: &mut Engine,
    seq: SeqId,
    tokens: &[u32],
    adapter: Option<AdapterId>,
) -> Vec<u32> {
    let rows = Rows { seq, tokens, adapter, want: WantLogits::All };
    engine.forward(&[rows]).unwrap()[0].iter().map(|x| x.to_bits()).collect()
}

/// The bits of all logits of some tokens, run at once in an engine of their own.
pub fn cold(model: &Arc<Model>, tokens: &[u32], with: Option<&Arc<Adapter>>) -> Vec<u32> {
    let mut engine = engine(model, tokens.len().max(32), 1);
    let adapter = with.map(|adapter| engine.attach(adapter.clone()));
    let seq = engine.cache().open();
    let bits = feed(&mut engine, seq, tokens, adapter);
    assert!(bits.iter().any(|&b| f32::from_bits(b) != 0.0), "all logits are zero");
    assert!(bits.iter().all(|&b| f32::from_bits(b).is_finite()), "not finite");
    bits
}

/// Fails unless `part` is how `whole` ends.
pub fn assert_ends(whole: &[u32], part: &[u32], what: &str) {
    assert!(!part.is_empty() && part.len() <= whole.len(), "{what}: nothing was compared");
    let end = &whole[whole.len() - part.len()..];
    let different = end.iter().zip(part).filter(|(a, b)| a != b).count();
    assert_eq!(different, 0, "{what}: {different} of {} differ", part.len());
}
