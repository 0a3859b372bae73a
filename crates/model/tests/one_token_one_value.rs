//! P5: the logits of a token depend on its own prefix, the cache's dtype and its adapter only.
//! Bitwise, in every kernel family, for every block format.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use gguf::TensorType;
use graph::DType;
use model::toy::Toy;
use model::{Engine, EngineConfig, Model, Rows, WantLogits};
use testkit::Random;

const FORMATS: [TensorType; 16] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q2K,
    TensorType::Q3K,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
    TensorType::IQ4NL,
    TensorType::IQ4XS,
    TensorType::MXFP4,
];

const TOKENS: usize = 300;

fn families() -> impl Iterator<Item = cpu::Family> {
    cpu::Family::ALL.into_iter().filter(|f| f.is_available())
}

fn toy(toy: &Toy, family: cpu::Family, threads: usize) -> Arc<Model> {
    let device = Arc::new(cpu::Cpu::new(threads, Some(family)).unwrap());
    let file = gguf::Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    Arc::new(Model::from_gguf(file, device).unwrap())
}

fn prompt(seed: u64, n: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.below(320) as u32).collect()
}

fn engine(model: &Arc<Model>, cache: DType) -> Engine {
    let config = EngineConfig { cache, positions: 4096, batch: 512, ..EngineConfig::default() };
    Engine::new(model.clone(), config).unwrap()
}

/// The bits of all logits of a prompt that is fed in chunks, beside other sequences.
fn logits(engine: &mut Engine, tokens: &[u32], chunk: usize, beside: &[Vec<u32>]) -> Vec<u32> {
    let seq = engine.cache().open();
    let others: Vec<_> = beside.iter().map(|_| engine.cache().open()).collect();
    let mut bits = Vec::new();
    for (i, part) in tokens.chunks(chunk).enumerate() {
        let mut batch = Vec::new();
        // Others come first and in uneven numbers, so that rows move within the batch.
        for (j, (other, tokens)) in others.iter().zip(beside).enumerate() {
            let each = 1 + (i + j) % 3;
            let from = (i * 3).min(tokens.len());
            let tokens = &tokens[from..(from + each).min(tokens.len())];
            if !tokens.is_empty() {
                batch.push(Rows { seq: *other, tokens, adapter: None, want: WantLogits::Last });
            }
        }
        batch.push(Rows { seq, tokens: part, adapter: None, want: WantLogits::All });
        let out = engine.forward(&batch).unwrap();
        bits.extend(out.last().unwrap().iter().map(|x| x.to_bits()));
    }
    engine.cache().close(seq);
    others.into_iter().for_each(|o| engine.cache().close(o));
    bits
}

fn assert_same(a: &[u32], b: &[u32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    assert!(!a.is_empty(), "{what}: nothing was compared");
    let different = a.iter().zip(b).filter(|(x, y)| x != y).count();
    let first = a.iter().zip(b).position(|(x, y)| x != y);
    assert_eq!(different, 0, "{what}: {different} of {} differ, first at {first:?}", a.len());
}

fn check(arch: &'static str, ty: TensorType, family: cpu::Family, cache: DType, chunks: &[usize]) {
    let spec = Toy::new(arch, ty, 7);
    let (one, two) = (toy(&spec, family, 1), toy(&spec, family, 2));
    let tokens = prompt(1, TOKENS);
    let beside: Vec<Vec<u32>> = (2..5).map(|s| prompt(s, 900)).collect();
    let name = format!("{arch} {} {family:?} {cache}", ty.name());
    let whole = logits(&mut engine(&one, cache), &tokens, TOKENS, &[]);
    assert!(whole.iter().any(|&b| f32::from_bits(b) != 0.0), "{name}: all logits are zero");
    assert!(whole.iter().all(|&b| f32::from_bits(b).is_finite()), "{name}: not finite");
    assert_same(
        &whole,
        &logits(&mut engine(&two, cache), &tokens, TOKENS, &[]),
        &format!("{name}: threads"),
    );
    for &chunk in chunks {
        let again = logits(&mut engine(&two, cache), &tokens, chunk, &[]);
        assert_same(&whole, &again, &format!("{name}: chunks of {chunk}"));
        let again = logits(&mut engine(&two, cache), &tokens, chunk, &beside);
        assert_same(&whole, &again, &format!("{name}: chunks of {chunk} beside others"));
    }
}

#[test]
fn in_every_format() {
    for ty in FORMATS {
        for family in families() {
            check("llama", ty, family, DType::F16, &[7, 64]);
        }
    }
}

#[test]
fn with_every_cache_and_architecture() {
    let q8 = DType::Block(TensorType::Q8_0);
    for (arch, ty) in [
        ("llama", TensorType::Q4_1),
        ("gemma3", TensorType::Q4K),
        ("qwen2", TensorType::Q5_0),
        ("qwen35", TensorType::Q6K),
        ("qwen35moe", TensorType::Q8_0),
    ] {
        for cache in [DType::F32, DType::F16, q8] {
            for family in families() {
                check(arch, ty, family, cache, &[1, 7, 64]);
            }
        }
    }
    // As llama, but for what rows are multiplied by.
    for (arch, ty) in [("qwen3", TensorType::Q3K), ("qwen3moe", TensorType::Q4K)] {
        for family in families() {
            check(arch, ty, family, DType::F16, &[1, 7, 64]);
        }
    }
}
