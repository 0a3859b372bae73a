//! Gradients that pass quantized weights in bf16 or int16: where they point, and what they leave
//! alone.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use cpu::{Cpu, Family};
use gguf::TensorType;
use graph::GradPrecision::{Bf16, F32, Int16};
use graph::{DType, GradPrecision, Recompute};
use model::toy::Toy;
use model::{Adapter, Model};
use testkit::Random;
use train::{
    Example, Gradients, GraphConfig, Measured, Parameters, Rates, TrainConfig, Trainer, Window,
    select_targets,
};

fn toy(arch: &'static str, ty: TensorType, family: Family, threads: usize) -> Model {
    let device = Arc::new(Cpu::new(threads, Some(family)).unwrap());
    let bytes = Toy::new(arch, ty, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn families() -> impl Iterator<Item = Family> {
    Family::ALL.into_iter().filter(|f| f.is_available())
}

/// The gradient of an adapter on everything that has learned something.
fn measure(model: &Model, precision: GradPrecision, recompute: Recompute) -> Measured {
    let targets = select_targets(model, &["all".into()]).unwrap();
    let of_rank = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = Adapter::fresh(model, of_rank, 8.0, 1).unwrap();
    let mut random = Random::new(9);
    for b in adapter.tensors.values_mut().flat_map(|pair| &mut pair.b) {
        *b = 0.05 * random.normal();
    }
    let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
    let tokens: Vec<u32> = (0..49).map(|_| random.below(320) as u32).collect();
    let weights = vec![1.0; tokens.len()];
    let window = Window::from(vec![Example { tokens, weights }]);
    let config = GraphConfig {
        rows: 48,
        cache: DType::F32,
        recompute,
        grad_precision: precision,
        ..GraphConfig::default()
    };
    Gradients::new(model, config).unwrap().of(&window, 48.0, &parameters, &()).unwrap()
}

/// All gradients as one vector.
fn flat(measured: &Measured) -> Vec<f64> {
    measured.grads.values().flatten().map(|&g| f64::from(g)).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn gradients_in_bf16_point_where_those_of_f32_do() {
    // Measured: 1.8e-5.
    rounded_gradients_point_where_exact_ones_do(Bf16, 1e-4);
}

#[test]
fn gradients_in_int16_point_where_those_of_f32_do() {
    // Measured: 1.5e-6.
    rounded_gradients_point_where_exact_ones_do(Int16, 1e-5);
}

fn rounded_gradients_point_where_exact_ones_do(precision: GradPrecision, most: f64) {
    let formats = TensorType::ALL.into_iter().filter(|ty| ty.is_quantized());
    let mut worst = 1.0f64;
    for (i, ty) in formats.enumerate() {
        for arch in ["llama", "gemma3", "qwen35", "qwen3moe"] {
            // Every family takes every format once, the widest all architectures too.
            for (j, family) in families().enumerate() {
                if family != families().last().unwrap() && (i + j) % 4 != 0 && arch != "llama" {
                    continue;
                }
                let model = toy(arch, ty, family, 2);
                let exact = measure(&model, F32, Recompute::None);
                let rounded = measure(&model, precision, Recompute::None);
                assert_eq!(exact.loss, rounded.loss, "{arch} {ty} {family:?}: the loss moved");
                let (exact, rounded) = (flat(&exact), flat(&rounded));
                let off = 1.0 - cosine(&exact, &rounded);
                worst = worst.min(1.0 - off);
                assert!(off < most, "{arch} {ty} {family:?}: 1 - cosine = {off:e}");
                assert!(exact != rounded, "{arch} {ty} {family:?}: nothing was rounded");
            }
        }
    }
    println!("{precision:?}: the worst cosine is 1 - {:e}", 1.0 - worst);
}

#[test]
fn gradients_through_float_weights_stay_f32() {
    for ty in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        for family in families() {
            let model = toy("llama", ty, family, 2);
            let all = GradPrecision::ALL.map(|p| measure(&model, p, Recompute::None).grads);
            assert!(all.iter().all(|same| *same == all[0]), "{ty} {family:?}");
        }
    }
}

#[test]
fn threads_and_recomputation_do_not_change_rounded_gradients() {
    for (arch, of) in ["gemma3", "qwen35moe"].into_iter().flat_map(|a| [(a, Bf16), (a, Int16)]) {
        for family in families() {
            let one = toy(arch, TensorType::Q5K, family, 1);
            let two = toy(arch, TensorType::Q5K, family, 2);
            let whole = measure(&one, of, Recompute::None);
            assert_eq!(whole.grads, measure(&two, of, Recompute::None).grads, "{family:?}");
            assert_eq!(whole.grads, measure(&two, of, Recompute::PerLayer).grads, "{family:?}");
        }
    }
}

/// Which family a run was made with is part of what it is: AMX adds up in an order of its own.
#[test]
fn amx_is_a_family_of_its_own_in_bf16_alone() {
    let (amx, vnni) = (Family::Amx, Family::Vnni);
    if !amx.is_available() {
        return;
    }
    assert_ne!(amx.name(), vnni.name());
    let of = |family, p| measure(&toy("llama", TensorType::Q4_1, family, 2), p, Recompute::None);
    assert_eq!(of(amx, F32).grads, of(vnni, F32).grads);
    assert_ne!(of(amx, Bf16).grads, of(vnni, Bf16).grads);
}

/// With made-up rates: the time a run takes is told at that of the precision it asks for.
#[test]
fn time_is_told_at_the_rate_of_the_precision_that_is_asked_for() {
    let model = toy("llama", TensorType::Q8_0, Family::Portable, 1);
    let far = 1e30;
    let rates = Rates { float: far, block: far, bf16: 2.0, int16: 8.0, functions: far, bytes: far };
    let of = |grad_precision: GradPrecision| {
        let config = TrainConfig {
            targets: select_targets(&model, &["all".into()]).unwrap(),
            graph: GraphConfig { rows: 32, grad_precision, ..GraphConfig::default() },
            ..TrainConfig::default()
        };
        let mut trainer = Trainer::new(&model, config).unwrap();
        let example = Example { tokens: (1..30).collect(), weights: vec![1.0; 29] };
        trainer.load(vec![example], Vec::new()).unwrap();
        let cost = trainer.cost().unwrap();
        (cost, rates.seconds(&cost))
    };
    let ((float, least), (bf16, half), (int16, eighth)) = (of(F32), of(Bf16), of(Int16));
    let products = bf16.bf16;
    assert!(products > 1e5, "{products}");
    assert_eq!((float.bf16, float.int16, bf16.int16, int16.bf16), (0.0, 0.0, 0.0, 0.0));
    assert_eq!((int16.int16, float.float - bf16.float), (products, products));
    assert!(least < 1e-9, "{least}");
    assert!((half * 2.0 / products - 1.0).abs() < 1e-9, "{half} for {products}");
    assert!((eighth * 8.0 / products - 1.0).abs() < 1e-9, "{eighth} for {products}");
}
