//! A toy model, its adapters and its jobs.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gguf::TensorType;
use graph::{DType, Device, Recompute};
use model::toy::Toy;
use model::{Adapter, Model};
use serve::{
    Ask, DataReport, Done, Options, Pacing, Said, Server, State, TrainJob, TrainStatus, Turn,
};
use testkit::{Random, fixture};
use train::{Example, GraphConfig, Schedule, TrainConfig, select_targets};

pub struct Fixture {
    pub name: &'static str,
    bytes: Vec<u8>,
}

impl Fixture {
    /// Quantized attention.
    pub fn llama() -> Fixture {
        let bytes = Toy::new("llama", TensorType::Q4_1, 3).gguf().unwrap();
        Fixture { name: "llama", bytes }
    }

    /// Gated delta nets, attention and eight quantized experts, all of which are used.
    pub fn moe(format: TensorType) -> Fixture {
        let mut toy = Toy::new("qwen35moe", format, 3);
        (toy.experts, toy.experts_used) = (8, 8);
        Fixture { name: "moe", bytes: toy.gguf().unwrap() }
    }

    /// Gated delta nets and attention.
    pub fn hybrid() -> Fixture {
        let bytes = std::fs::read(fixture("qwen3_5", "model.gguf")).unwrap();
        Fixture { name: "hybrid", bytes }
    }

    pub fn model_on(&self, device: Arc<dyn Device>) -> Arc<Model> {
        let file = gguf::Gguf::from_bytes("toy.gguf", self.bytes.clone()).unwrap();
        Arc::new(Model::from_gguf(file, device).unwrap())
    }

    pub fn model(&self) -> Arc<Model> {
        self.model_on(Arc::new(cpu::Cpu::new(2, None).unwrap()))
    }

    /// The model in a file, and loaded from it.
    pub fn written(&self) -> (PathBuf, Arc<Model>) {
        let path = self.dir().join("model.gguf");
        std::fs::write(&path, &self.bytes).unwrap();
        let model = self.load(&path);
        (path, model)
    }

    pub fn load(&self, path: &std::path::Path) -> Arc<Model> {
        Arc::new(Model::load(path, Arc::new(cpu::Cpu::new(2, None).unwrap())).unwrap())
    }

    /// A folder for jobs, of this test and model.
    pub fn dir(&self) -> PathBuf {
        let test = std::thread::current().name().unwrap_or("main").to_string();
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test).join(self.name);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    pub fn server_on(&self, model: Arc<Model>, options: Options) -> Server {
        let options = Options { train_dir: Some(self.dir()), cache: DType::F16, ..options };
        Server::start(model, options).unwrap()
    }

    pub fn server(&self, options: Options) -> Server {
        self.server_on(self.model(), options)
    }

    /// The file of an adapter that changes what the model says.
    pub fn adapter_file(&self, alias: &str) -> PathBuf {
        let file = self.dir().join(format!("{alias}.gguf"));
        if !file.exists() {
            let model = self.model();
            let targets = select_targets(&model, &["all".into()]).unwrap();
            let seed = alias.bytes().map(u64::from).sum();
            let mut adapter =
                Adapter::fresh(&model, targets.iter().map(|t| (t.as_str(), 4)), 8.0, seed).unwrap();
            let mut random = Random::new(seed);
            for pair in adapter.tensors.values_mut() {
                pair.b.iter_mut().for_each(|b| *b = 0.2 * random.normal());
            }
            adapter.write(&file, &model).unwrap();
        }
        file
    }

    /// Serves the adapters `a` and `b`.
    pub fn adapters(&self, server: &Server) {
        for alias in ["a", "b"] {
            server.load_adapter(alias, &self.adapter_file(alias)).unwrap();
        }
    }

    /// Settings for a few steps.
    pub fn config(&self) -> TrainConfig {
        TrainConfig {
            targets: select_targets(&self.model(), &["attn".into()]).unwrap(),
            weights: Vec::new(),
            rank: 4,
            alpha: 8.0,
            lr: 3e-3,
            schedule: Schedule::Constant,
            warmup: 0,
            weight_decay: 0.0,
            epochs: 3,
            accumulate: 1,
            clip: 1.0,
            seed: 7,
            graph: GraphConfig {
                rows: 64,
                cache: DType::F16,
                recompute: Recompute::None,
                ..GraphConfig::default()
            },
            ..TrainConfig::default()
        }
    }

    pub fn job(&self, name: &str, pacing: Pacing) -> TrainJob {
        TrainJob {
            name: name.into(),
            out: self.dir().join(format!("{name}.gguf")),
            config: self.config(),
            examples: examples(5).into(),
            held_out: Arc::new([]),
            data: DataReport::default(),
            pacing,
            memory_budget: None,
            may_recompute: false,
            from: None,
            fallback: None,
            durable: None,
            asked: Default::default(),
            plan: false,
        }
    }
}

pub fn examples(seed: u64) -> Vec<Example> {
    let mut random = Random::new(seed);
    [40, 31, 60, 22]
        .map(|n| Example {
            tokens: (0..n).map(|_| random.below(300) as u32).collect(),
            weights: vec![1.0; n],
        })
        .into()
}

/// A greedy turn after a random prompt of so many tokens.
pub fn ask(seed: u64, tokens: usize) -> Ask {
    let mut random = Random::new(100 + seed);
    Ask {
        tokens: (0..tokens).map(|_| random.below(300) as u32).collect(),
        model: "base".into(),
        max_tokens: 40,
        sampler: text::SamplerConfig::greedy(),
        seed: 0,
        stops: Vec::new(),
    }
}

pub struct Answer {
    pub text: String,
    pub done: Done,
}

/// What a turn says in all.
pub fn answer(mut turn: Turn) -> Answer {
    let mut text = String::new();
    loop {
        match turn.blocking_next() {
            Some(Said::Text(piece)) => text.push_str(&piece),
            Some(Said::Done(done)) => return Answer { text, done },
            Some(Said::Failed(e)) => panic!("{e}"),
            None => panic!("a turn without an end"),
        }
    }
}

/// Waits until the run is in a state.
pub fn wait(server: &Server, state: State) -> TrainStatus {
    let began = Instant::now();
    loop {
        let status = server.train_status();
        if status.state == state {
            return status;
        }
        assert!(status.is_active(), "{status:?}");
        assert!(began.elapsed() < Duration::from_secs(120), "{status:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub fn metric(server: &Server, name: &str) -> f64 {
    server.metrics().iter().find(|m| m.name == name).unwrap().value
}

/// Waits until nothing runs or waits; that takes less than a second.
pub fn idle(server: &Server) {
    let began = Instant::now();
    let there =
        || metric(server, "gradus_turns_running") + metric(server, "gradus_turns_waiting") > 0.0;
    while there() {
        assert!(began.elapsed() < Duration::from_secs(1), "turns go on for clients that left");
        std::thread::sleep(Duration::from_millis(2));
    }
}
