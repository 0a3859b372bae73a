//! Training on devices that lack a kernel or break down.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may panic

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use gguf::TensorType;
use graph::{
    Arena, Call, Code, DType, Device, Fault, HostTensor, Leaf, Needs, Plan, Policy, Progress,
    Recompute, Resident, Segment, Stop, Unsupported,
};
use model::Model;
use model::toy::Toy;
use testkit::Random;
use train::{Example, GraphConfig, Schedule, Start, TrainConfig, Trainer, Walks, select_targets};

/// A processor with a shortcoming.
struct Odd {
    inner: cpu::Cpu,
    /// The ops it has no kernel for.
    lacks: Mutex<Vec<&'static str>>,
    /// Reads dense operands only.
    dense: AtomicBool,
    /// Breaks down in the middle of the next run that has gradients.
    breaks: AtomicBool,
    /// Arenas taken.
    arenas: AtomicUsize,
}

impl Odd {
    fn new() -> Arc<Odd> {
        Arc::new(Odd {
            inner: cpu::Cpu::new(2, None).unwrap(),
            lacks: Mutex::new(Vec::new()),
            dense: AtomicBool::new(false),
            breaks: AtomicBool::new(false),
            arenas: AtomicUsize::new(0),
        })
    }
}

/// Stops before a step.
struct Until(usize, AtomicUsize);

impl Stop for Until {
    fn should_stop(&self) -> bool {
        self.1.fetch_add(1, Ordering::Relaxed) >= self.0
    }
}

impl Device for Odd {
    fn name(&self) -> &'static str {
        "odd"
    }

    fn family(&self) -> &'static str {
        "test"
    }

    fn supports(&self, call: &Call<'_>) -> Result<Needs, Unsupported> {
        let name = call.op.name();
        if self.lacks.lock().unwrap().contains(&name) {
            return Err(Unsupported::Kernel(name.to_string()));
        }
        let strided = call.args.iter().position(|a| !a.is_contiguous());
        match strided.filter(|_| self.dense.load(Ordering::Relaxed) && name != "Copy") {
            Some(i) => Err(Unsupported::Layout(i)),
            None => self.inner.supports(call),
        }
    }

    fn load(&self, tensor: &HostTensor<'_>) -> Result<Arc<dyn Resident>, Fault> {
        self.inner.load(tensor)
    }

    fn arena(&self, bytes: usize) -> Result<Box<dyn Arena>, Fault> {
        self.arenas.fetch_add(1, Ordering::Relaxed);
        self.inner.arena(bytes)
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> Result<Progress, Fault> {
        let middle = plan.steps.iter().position(|s| s.op.name() == "SwigluBack");
        if let Some(at) = middle.filter(|_| self.breaks.swap(false, Ordering::Relaxed)) {
            // What ran so far has written the arena.
            self.inner.run(plan, leaves, arena, from, &Until(at, AtomicUsize::new(0)))?;
            let node = plan.steps.get(at).map_or("", |s| &*s.name);
            return Err(Fault::new(Code::Internal, node, "the device broke down"));
        }
        self.inner.run(plan, leaves, arena, from, stop)
    }
}

fn toy(device: Arc<dyn Device>) -> Model {
    toy_of("llama", device)
}

fn toy_of(arch: &str, device: Arc<dyn Device>) -> Model {
    let bytes = Toy::new(arch, TensorType::Q4_1, 3).gguf().unwrap();
    Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap(), device).unwrap()
}

fn config(model: &Model) -> TrainConfig {
    TrainConfig {
        targets: select_targets(model, &["all".into()]).unwrap(),
        weights: Vec::new(),
        rank: 4,
        alpha: 12.0,
        lr: 3e-3,
        schedule: Schedule::Cosine,
        warmup: 1,
        weight_decay: 0.0,
        epochs: 2,
        accumulate: 1,
        clip: 1.0,
        seed: 11,
        graph: GraphConfig {
            rows: 64,
            cache: DType::F16,
            recompute: Recompute::None,
            placement: Policy::Fallback,
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    }
}

/// Trains and returns the adapter's file, or the error.
fn train(model: &Model, name: &str) -> train::Result<Vec<u8>> {
    train_with(Trainer::new(model, config(model))?, model, name)
}

fn train_with(trainer: Trainer<&Model>, model: &Model, name: &str) -> train::Result<Vec<u8>> {
    let mut random = Random::new(5);
    let examples = [12, 30, 19, 8].map(|n| Example {
        tokens: (0..n).map(|_| random.below(320) as u32).collect(),
        weights: vec![1.0; n],
    });
    let outcome = trainer.run(&examples, &mut |_| true)?;
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.gguf"));
    outcome.adapter.write(&path, model).unwrap();
    Ok(std::fs::read(&path).unwrap())
}

/// FIELD-REPORTS F08: a job died before its first step for want of a kernel of the backward pass.
/// Also one that only gradients need, however well the device serves: by op, node and device,
/// before memory is taken.
#[test]
fn f08_a_missing_kernel_is_refused_by_name_before_anything_runs() {
    let device = Odd::new();
    let model = toy(device.clone());
    for (op, node) in [("Swiglu", "blk.0.ffn_gate.weight"), ("CrossEntropyBack", "loss")] {
        *device.lacks.lock().unwrap() = vec![op];
        let before = device.arenas.load(Ordering::Relaxed);
        let error = train(&model, "lacking").unwrap_err();
        assert_eq!(device.arenas.load(Ordering::Relaxed), before, "{op}: memory was taken");
        let train::Error::Model(model::Error::Graph(graph::Error::Refusal(refusal))) = error else {
            panic!("{op}: {error}");
        };
        assert_eq!((refusal.code, refusal.op.as_str()), (Code::NoKernel, op));
        assert_eq!(refusal.node, node);
        assert_eq!(refusal.device.as_deref(), Some("odd (test)"));
        assert!(!refusal.to_string().contains('\n'));
    }
    device.lacks.lock().unwrap().clear();
    assert!(train(&model, "whole").is_ok());
}

#[test]
fn a_device_that_breaks_down_stops_its_job_and_no_other() {
    let device = Odd::new();
    let model = toy(device.clone());
    let before = train(&model, "before").unwrap();
    device.breaks.store(true, Ordering::Relaxed);
    let error = train(&model, "broken").unwrap_err();
    let train::Error::Model(model::Error::Graph(graph::Error::Fault(fault))) = error else {
        panic!("{error}")
    };
    assert_eq!(fault.code, Code::Internal);
    assert!(fault.node.starts_with("blk."), "{}", fault.node);
    assert!(train(&model, "after").unwrap() == before, "a fault changed the next job");
}

/// FIELD-REPORTS F48: a model over several devices gave garbage. A kernel of the forward pass and one of the backward, the product with packed weights and its
/// transpose among them: what falls back is listed, in every layer, and the adapter is the same
/// file as where nothing does. Then without leave to fall back.
#[test]
fn f48_what_falls_back_trains_the_same_adapter_and_strict_refuses_it() {
    let device = Odd::new();
    let cpu: Arc<dyn Device> = Arc::new(cpu::Cpu::new(1, None).unwrap());
    // A file, from which the other device loads the weights it needs.
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("placed.gguf");
    std::fs::write(&path, Toy::new("llama", TensorType::Q4_1, 3).gguf().unwrap()).unwrap();
    let model = Model::load(&path, device.clone()).unwrap();
    let whole = train(&model, "whole on one").unwrap();
    // And where most examples are walked in chunks, whose keys, values and gradients cross too.
    let chunks = |mut config: TrainConfig| {
        config.graph.rows = 8;
        config.walks = Some(Walks { window: 64, horizon: 0, host_budget: 0 });
        config
    };
    let in_chunks = Trainer::new(&model, chunks(config(&model))).unwrap();
    let in_chunks = train_with(in_chunks, &model, "in chunks on one").unwrap();
    for (lacks, name) in [
        (vec!["Swiglu", "CrossEntropyBack"], "two"),
        (vec!["MatMul"], "products"),
        (vec!["Attention", "AttentionBack", "RmsNorm", "Lora"], "many"),
    ] {
        *device.lacks.lock().unwrap() = lacks.clone();
        let placed = |policy| {
            let mut config = config(&model);
            config.graph.placement = policy;
            let fallback = Some(cpu.clone());
            Trainer::start(&model, config, Start { fallback, ..Start::default() })
        };
        let mut trainer = placed(Policy::Fallback).unwrap();
        let plan = trainer.plan().unwrap();
        for op in &lacks {
            let layers = plan.fallbacks.iter().filter(|f| f.op == *op).count();
            assert!(layers >= 1, "{op}");
        }
        for fallback in &plan.fallbacks {
            assert!(lacks.contains(&fallback.op), "{fallback:?} fell back needlessly");
            assert!(fallback.crossing > 0 && fallback.reason.contains(fallback.op));
        }
        let parts: Vec<usize> = plan.plans().map(|(device, _)| device).collect();
        assert!(parts.contains(&0) && parts.contains(&1), "{parts:?}");
        assert!(train_with(trainer, &model, name).unwrap() == whole, "without {lacks:?}");
        let start = Start { fallback: Some(cpu.clone()), ..Start::default() };
        let trainer = Trainer::start(&model, chunks(config(&model)), start).unwrap();
        let again = train_with(trainer, &model, name).unwrap();
        assert!(again == in_chunks, "in chunks without {lacks:?}");

        let error = placed(Policy::Strict).err().unwrap();
        let train::Error::Model(model::Error::Graph(graph::Error::Refusal(refusal))) = error else {
            panic!("{error}");
        };
        assert_eq!((refusal.code, refusal.device.as_deref()), (Code::NoKernel, Some("odd (test)")));
        assert!(lacks.contains(&refusal.op.as_str()) && refusal.reason.contains("`strict`"));
    }
}

/// Slices of what the graph computes and their gradients are copied, not refused, and nothing
/// falls back.
#[test]
fn a_device_that_reads_dense_operands_only_trains_through_copies() {
    let device = Odd::new();
    // The gates of its attention are slices of the queries' projection.
    let model = toy_of("qwen35", device.clone());
    let in_place = train(&model, "in place").unwrap();
    device.dense.store(true, Ordering::Relaxed);
    let cpu: Arc<dyn Device> = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let mut trainer = {
        let start = Start { fallback: Some(cpu), ..Start::default() };
        Trainer::start(&model, config(&model), start).unwrap()
    };
    let plan = trainer.plan().unwrap();
    assert!(plan.fallbacks.is_empty(), "{:?}", plan.fallbacks);
    assert!(plan.plans().map(|(_, plan)| plan.copies).sum::<usize>() > 0);
    assert!(train_with(trainer, &model, "dense").unwrap() == in_place);
}
