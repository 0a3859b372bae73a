//! Where a training step's time goes: every op of the gradient graph of a model file, by the
//! shapes it runs at.
//!
//! ```text
//! cargo run --release -p gradus-train --example profile -- MODEL.gguf [RANK [WINDOW [THREADS]]]
//! ```
//!
//! `GRADUS_CPU` picks the kernel family, as everywhere; gradients pass quantized weights in the
//! precision that is fastest there.
//!
//! LoRA on all projections; one window of tokens that all carry loss. A device between the
//! trainer and the processor runs a plan step by step and adds up what each took: with one
//! thread the time that this thread has run, as others may use the machine, with more the time
//! that passed. Of each step the shortest of some passes.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use cpu::Cpu;
use graph::{
    Arena, Call, Device, Fault, GradPrecision, HostTensor, Leaf, Needs, Plan, Progress, Resident,
    Segment, Stop, Unsupported,
};
use model::Model;
use train::{Example, GraphConfig, TrainConfig, Trainer, Window};

/// Passes that are measured, after one more.
const PASSES: usize = 4;

/// Runs plans step by step on a processor, noting times.
struct Timed {
    cpu: Cpu,
    /// Of each step of the plan that ran last: what it is, and the shortest time in seconds.
    steps: Mutex<Vec<(String, f64)>>,
}

impl Timed {
    fn now(&self, since: Instant) -> f64 {
        if self.cpu.threads() > 1 {
            return since.elapsed().as_secs_f64();
        }
        // Linux counts what a thread has run when it gives way.
        std::thread::yield_now();
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let ns = text.split(' ').next().and_then(|t| t.parse::<f64>().ok());
        ns.map_or_else(|| since.elapsed().as_secs_f64(), |ns| ns / 1e9)
    }
}

/// An op with its shapes.
fn title(step: &graph::Step) -> String {
    let args: Vec<String> =
        step.args.iter().take(3).map(|a| format!("{}{}", a.arg.dtype, a.arg.shape)).collect();
    format!("{:<16} {} -> {}", step.op.name(), args.join(" "), step.out.arg.shape)
}

impl Device for Timed {
    fn name(&self) -> &'static str {
        self.cpu.name()
    }

    fn family(&self) -> &'static str {
        self.cpu.family()
    }

    fn grad_precision(&self) -> GradPrecision {
        self.cpu.grad_precision()
    }

    fn supports(&self, call: &Call<'_>) -> Result<Needs, Unsupported> {
        self.cpu.supports(call)
    }

    fn load(&self, tensor: &HostTensor<'_>) -> Result<Arc<dyn Resident>, Fault> {
        self.cpu.load(tensor)
    }

    fn arena(&self, bytes: usize) -> Result<Box<dyn Arena>, Fault> {
        self.cpu.arena(bytes)
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        _: Segment,
        _: &dyn Stop,
    ) -> Result<Progress, Fault> {
        let mut part = plan.clone();
        part.steps.clear();
        let mut steps = self.steps.lock().map_err(|e| Fault::binding("", e.to_string()))?;
        if steps.len() != plan.steps.len() {
            *steps = plan.steps.iter().map(|s| (title(s), f64::INFINITY)).collect();
        }
        let clock = Instant::now();
        for (i, (step, (_, best))) in plan.steps.iter().zip(steps.iter_mut()).enumerate() {
            let from = Segment { step: i, tile: 0 };
            // What a run takes that has nothing to do.
            let start = self.now(clock);
            self.cpu.run(&part, leaves, arena, from, &())?;
            let between = self.now(clock);
            part.steps.push(step.clone());
            self.cpu.run(&part, leaves, arena, from, &())?;
            let took = self.now(clock) - between - (between - start);
            *best = best.min(took.max(0.0));
        }
        Ok(Progress::Done)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, or: usize| args.get(i).map_or(Ok(or), |a| a.parse());
    let path = args.first().ok_or("a model file is needed")?;
    let (rank, window, threads) = (number(1, 8)?, number(2, 512)?, number(3, 1)?);
    let timed = Arc::new(Timed { cpu: Cpu::new(threads, None)?, steps: Mutex::default() });
    let model = Model::load(path.as_ref(), timed.clone())?;
    let config = TrainConfig {
        targets: train::select_targets(&model, &["all".to_string()])?,
        rank,
        graph: GraphConfig {
            rows: window,
            grad_precision: timed.grad_precision(),
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    };
    let vocab = model.geometry().vocab;
    let tokens: Vec<u32> = (0..=window).map(|i| ((i * 7919 + 1000) % vocab) as u32).collect();
    let windows = [Window::from(vec![Example { weights: vec![1.0; tokens.len()], tokens }])];
    let mut trainer = Trainer::new(&model, config)?;
    let (clock, mut whole) = (Instant::now(), f64::INFINITY);
    for _ in 0..=PASSES {
        let start = timed.now(clock);
        trainer.step(&windows, 1e-4)?;
        whole = whole.min(timed.now(clock) - start);
    }
    let steps = timed.steps.lock().map_err(|e| e.to_string())?;
    let mut by_title: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
    for (title, took) in steps.iter() {
        let (count, sum) = by_title.entry(title).or_default();
        (*count, *sum) = (*count + 1, *sum + took);
    }
    let mut lines: Vec<_> = by_title.into_iter().collect();
    lines.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let total: f64 = lines.iter().map(|l| l.1.1).sum();
    println!("{} {threads} threads, rank {rank}, window {window}", timed.family());
    for (title, (count, sum)) in lines {
        println!("{:>8.2} ms {:>5.1} % {count:>5} x {title}", sum * 1e3, sum / total * 100.0);
    }
    println!(
        "{:>8.2} ms in ops ({:.0} tokens/s); the step with timing and the optimizer {:.2} ms",
        total * 1e3,
        window as f64 / total,
        whole * 1e3
    );
    Ok(())
}
