//! P5, across serving and training: the loss a job sees of a token is, bit for bit, what the
//! engine that serves the same adapter says of it, however its prompt was fed.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::sync::Arc;

use gguf::TensorType;
use graph::DType;
use model::toy::Toy;
use model::{Adapter, Engine, EngineConfig, Model, Rows, WantLogits};
use testkit::Random;
use text::{Sampler, SamplerConfig};
use train::{
    Example, Gradients, GraphConfig, Parameters, TrainConfig, Trainer, Window, select_targets,
};

const ARCHITECTURES: [&str; 4] = ["llama", "gemma3", "qwen35", "qwen35moe"];
const TOKENS: usize = 60;

fn toy(arch: &'static str, threads: usize) -> Arc<Model> {
    let device = Arc::new(cpu::Cpu::new(threads, None).unwrap());
    let file = Toy::new(arch, TensorType::Q4_0, 7).gguf().unwrap();
    let file = gguf::Gguf::from_bytes("toy.gguf", file).unwrap();
    Arc::new(Model::from_gguf(file, device).unwrap())
}

fn adapter(model: &Model) -> Adapter {
    let targets = select_targets(model, &["all".to_string()]).unwrap();
    let mut adapter =
        Adapter::fresh(model, targets.iter().map(|t| (t.as_str(), 4)), 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    adapter
}

/// The negative log-likelihood of every token but the first, fed in chunks.
fn served(model: &Arc<Model>, adapter: &Adapter, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let config = EngineConfig { cache: DType::F16, positions: 64, batch: 64, states: 2 };
    let mut engine = Engine::new(model.clone(), config).unwrap();
    let id = engine.attach(Arc::new(adapter.clone()));
    let seq = engine.cache().open();
    let mut nll = Vec::new();
    let fed = &tokens[..tokens.len() - 1];
    for (part, labels) in fed.chunks(chunk).zip(tokens[1..].chunks(chunk)) {
        let rows = Rows { seq, tokens: part, adapter: Some(id), want: WantLogits::All };
        let logits = engine.forward(&[rows]).unwrap().pop().unwrap();
        nll.extend(engine.log_probs(&logits, labels).unwrap().into_iter().map(|x| -x));
    }
    nll
}

#[test]
fn what_is_trained_is_what_is_served() {
    for arch in ARCHITECTURES {
        let (one, two) = (toy(arch, 1), toy(arch, 2));
        let adapter = adapter(&one);
        let mut random = Random::new(5);
        let tokens: Vec<u32> = (0..TOKENS).map(|_| random.below(320) as u32).collect();
        let other = Example { tokens: tokens[..3].to_vec(), weights: vec![0.0; 3] };
        let parameters = Parameters { adapter: Some(adapter.clone()), ..Parameters::default() };
        let config = GraphConfig { rows: 64, cache: DType::F16, ..GraphConfig::default() };
        let mut gradients = Gradients::new(two.as_ref(), config).unwrap();
        let chunks = [1, 7, TOKENS].map(|chunk| served(&one, &adapter, &tokens, chunk));
        for at in [1, 2, 3, 31, 32, 33, TOKENS - 1] {
            // One token carries all of the loss, in a window that another sequence begins.
            let mut weights = vec![0.0; TOKENS];
            weights[at] = 1.0;
            let example = Example { tokens: tokens.clone(), weights };
            let window = Window::from(vec![other.clone(), example]);
            let trained = gradients.of(&window, 1.0, &parameters, &()).unwrap().loss;
            for nll in &chunks {
                assert_eq!(f64::from(nll[at - 1]).to_bits(), trained.to_bits(), "{arch}, {at}");
            }
        }
    }
}

/// FIELD-REPORTS F35: the sampler's log-probabilities left its temperature out, so that the ratio of
/// the trainer's to them was 2 at T = 0.6. What is told of a token that was drawn is what the trainer
/// measures: bit for bit where nothing is asked of the sampler, and under a temperature, filters and
/// penalties what the trainer's kernel makes of the logits after these.
#[test]
fn f35_the_samplers_log_probabilities_are_the_trainers() {
    let model = toy("llama", 2);
    let adapter = adapter(&model);
    let parameters = Parameters { adapter: Some(adapter.clone()), ..Parameters::default() };
    let config = GraphConfig { rows: 64, cache: DType::F16, ..GraphConfig::default() };
    let mut gradients = Gradients::new(model.as_ref(), config).unwrap();
    let config = EngineConfig { cache: DType::F16, positions: 256, batch: 64, states: 2 };
    let mut engine = Engine::new(model.clone(), config).unwrap();
    let id = engine.attach(Arc::new(adapter));
    let plain = SamplerConfig::unfiltered();
    for config in [
        plain.clone(),
        SamplerConfig { temperature: 0.6, ..plain.clone() },
        SamplerConfig { temperature: 1.7, top_p: 0.8, ..plain.clone() },
        SamplerConfig { top_k: 20, min_p: 0.02, typical_p: 0.9, ..plain.clone() },
        SamplerConfig { repeat_penalty: 1.4, presence_penalty: 0.3, ..plain.clone() },
        SamplerConfig {
            temperature: 0.6,
            top_p: 0.9,
            repeat_penalty: 1.2,
            frequency_penalty: 0.2,
            logit_bias: [(7, 2.5)].into(),
            ..plain.clone()
        },
    ] {
        let mut sampler = Sampler::new(config.clone(), 3).unwrap();
        let mut tokens: Vec<u32> = vec![11, 5, 11, 300, 42];
        let seq = engine.cache().open();
        let mut fed = 0;
        for _ in 0..12 {
            let rows =
                Rows { seq, tokens: &tokens[fed..], adapter: Some(id), want: WantLogits::Last };
            let logits = engine.forward(&[rows]).unwrap().pop().unwrap();
            fed = tokens.len();
            let drawn = sampler.sample(&logits, &tokens).unwrap();
            let may = sampler.distribution(&logits, &tokens).unwrap();
            let adjusted = adjusted(&config, &logits, &tokens, &may);
            let kernel = engine.log_probs(&adjusted, &[drawn.id]).unwrap()[0];
            assert!((drawn.logprob - kernel).abs() < 1e-4, "{drawn:?}, {kernel} of {config:?}");
            tokens.push(drawn.id);
            if config == plain {
                let mut weights = vec![0.0; tokens.len()];
                weights[fed] = 1.0;
                let window = Window::from(vec![Example { tokens: tokens.clone(), weights }]);
                let loss = gradients.of(&window, 1.0, &parameters, &()).unwrap().loss;
                assert_eq!(loss.to_bits(), f64::from(-drawn.logprob).to_bits(), "{drawn:?}");
            }
        }
        engine.cache().close(seq);
    }
}

/// Logits as a sampler's settings leave them: penalties by the tokens before, the temperature, and
/// of the tokens those alone that may be drawn.
fn adjusted(
    config: &SamplerConfig,
    logits: &[f32],
    before: &[u32],
    may: &[text::Sampled],
) -> Vec<f32> {
    let one = |(id, &logit): (usize, &f32)| {
        let id = id as u32;
        if !may.iter().any(|token| token.id == id) {
            return -1e30;
        }
        let mut logit = logit + config.logit_bias.get(&id).copied().unwrap_or(0.0);
        let count = before.iter().filter(|&&token| token == id).count() as f32;
        if count > 0.0 {
            let by = config.repeat_penalty;
            logit = if logit > 0.0 { logit / by } else { logit * by };
            logit -= count * config.frequency_penalty + config.presence_penalty;
        }
        logit / config.temperature
    };
    logits.iter().enumerate().map(one).collect()
}

/// FIELD-REPORTS F22: an adapter that was loaded again did nothing. What was trained, written and
/// read by another process gives the same logits, bit for bit, and others than the base model.
#[test]
fn f22_an_adapter_that_is_saved_and_loaded_gives_the_same_logits() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("f22");
    std::fs::create_dir_all(&folder).unwrap();
    for arch in ARCHITECTURES {
        let base = folder.join(format!("{arch}-base.gguf"));
        Toy::new(arch, TensorType::Q4_0, 7).write(&base).unwrap();
        let load = || {
            let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
            Arc::new(Model::load(&base, device).unwrap())
        };
        let mut random = Random::new(5);
        let tokens: Vec<u32> = (0..TOKENS).map(|_| random.below(320) as u32).collect();
        let logits = |model: &Arc<Model>, adapter: Option<Adapter>| {
            let config = EngineConfig { cache: DType::F16, positions: 64, batch: 64, states: 2 };
            let mut engine = Engine::new(model.clone(), config).unwrap();
            let adapter = adapter.map(|adapter| engine.attach(Arc::new(adapter)));
            let seq = engine.cache().open();
            let rows = Rows { seq, tokens: &tokens, adapter, want: WantLogits::All };
            let logits = engine.forward(&[rows]).unwrap().remove(0);
            logits.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()
        };
        let model = load();
        let config = TrainConfig {
            targets: select_targets(&model, &["all".into()]).unwrap(),
            rank: 4,
            // No power of two, whose scale would be exact anyhow.
            alpha: 11.0,
            epochs: 3,
            lr: 3e-3,
            graph: GraphConfig { rows: 64, ..GraphConfig::default() },
            ..TrainConfig::default()
        };
        let example = Example { tokens: tokens.clone(), weights: vec![1.0; TOKENS] };
        let trained = Trainer::new(&*model, config).unwrap().run(&[example], &mut |_| true);
        let trained = trained.unwrap().adapter;
        let (gguf, peft) = (folder.join(format!("{arch}.gguf")), folder.join(arch));
        trained.write(&gguf, &model).unwrap();
        let _ = std::fs::remove_dir_all(&peft);
        trained.write_peft(&peft, &model.base()).unwrap();
        let before = logits(&model, Some(trained));
        assert!(before != logits(&model, None), "{arch}: the adapter does nothing");
        for path in [&gguf, &peft] {
            let model = load();
            let again = Adapter::read(path, &model).unwrap();
            assert!(logits(&model, Some(again)) == before, "{}", path.display());
        }
    }
}
