//! What training costs turns, and turns training: the gaps between tokens of streams with and
//! without a job beside them, and the rates of both against each alone.
//!
//! `cargo run --release -p gradus-serve --example beside -- MODEL.gguf [STREAMS] [TOKENS]`
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a measurement that may fail

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use graph::DType;
use model::Model;
use serve::{Ask, DataReport, Options, Pacing, Said, Server, TrainJob};
use train::{Example, GraphConfig, Schedule, TrainConfig, Trainer, select_targets};

const WINDOW: usize = 256;

fn config(model: &Model) -> TrainConfig {
    TrainConfig {
        targets: select_targets(model, &["attn".into()]).unwrap(),
        weights: Vec::new(),
        rank: 8,
        alpha: 16.0,
        lr: 1e-4,
        schedule: Schedule::Constant,
        warmup: 0,
        weight_decay: 0.0,
        epochs: 10_000,
        accumulate: 1,
        clip: 1.0,
        seed: 0,
        graph: GraphConfig { rows: WINDOW, cache: DType::F16, ..GraphConfig::default() },
        ..TrainConfig::default()
    }
}

fn examples() -> Vec<Example> {
    let tokens = (0..WINDOW as u32 + 1).map(|i| 100 + (i * 37) % 5000).collect();
    vec![Example { tokens, weights: vec![1.0; WINDOW + 1] }]
}

/// A gap between two tokens: its milliseconds, and whether the job ran.
type Gap = (f64, bool);

/// How long the job runs and is paused, in turn: the machine is not always equally fast.
const TURN: Duration = Duration::from_millis(400);

/// Gaps between tokens of all streams, while the job is paused and resumed in turn. What follows
/// a change closely is left out.
fn stream(server: &Server, streams: usize, tokens: usize, job: Option<&str>) -> Vec<Gap> {
    let (runs, ended) =
        (Arc::new(AtomicBool::new(job.is_some())), Arc::new(AtomicBool::new(false)));
    let toggles = job.map(|job| {
        let (server, runs, ended, job) =
            (server.clone(), runs.clone(), ended.clone(), job.to_string());
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                std::thread::sleep(TURN);
                let run = !runs.load(Ordering::Relaxed);
                let _ = if run { server.resume(&job) } else { server.pause(&job) };
                runs.store(run, Ordering::Relaxed);
            }
        })
    });
    let workers: Vec<_> = (0..streams)
        .map(|i| {
            let mut sampler =
                text::SamplerConfig { temperature: 1.0, ..text::SamplerConfig::greedy() };
            let ends = server.model().tokenizer().eog_ids().iter();
            sampler.logit_bias.extend(ends.map(|&id| (id, -100.0)));
            let ask = Ask {
                tokens: (0..32).map(|t| 200 + 31 * t + i as u32).collect(),
                model: server.options().name.clone(),
                max_tokens: tokens,
                sampler,
                seed: i as u64,
                stops: Vec::new(),
            };
            let mut turn = server.ask(ask).unwrap();
            let runs = runs.clone();
            std::thread::spawn(move || {
                let (mut gaps, mut last, mut state, mut since) = (Vec::new(), None, true, 0);
                while let Some(said) = turn.blocking_next() {
                    if let Said::Text(_) = said {
                        let now = Instant::now();
                        let run = runs.load(Ordering::Relaxed);
                        since = if run == state { since + 1 } else { 0 };
                        state = run;
                        if let Some(before) = last.replace(now)
                            && since > 3
                        {
                            gaps.push(((now - before).as_secs_f64() * 1e3, run));
                        }
                    }
                }
                gaps
            })
        })
        .collect();
    let gaps = workers.into_iter().flat_map(|w| w.join().unwrap()).collect();
    ended.store(true, Ordering::Relaxed);
    toggles.into_iter().for_each(|t| t.join().unwrap());
    gaps
}

fn quantiles(gaps: &[f64]) -> [f64; 4] {
    let mut sorted = gaps.to_vec();
    sorted.sort_by(f64::total_cmp);
    [0.5, 0.95, 0.99, 1.0].map(|q| sorted[((sorted.len() - 1) as f64 * q) as usize])
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize, default: usize| args.get(i).map_or(default, |a| a.parse().unwrap());
    let (streams, tokens) = (number(2, 1), number(3, 400));
    let device = Arc::new(cpu::Cpu::new(model::thread_count(), None).unwrap());
    let model = Arc::new(Model::load(args[1].as_ref(), device).unwrap());

    // Training alone, as `gradus train` runs it.
    let mut trainer = Trainer::new(model.clone(), config(&model)).unwrap();
    trainer.load(examples(), Vec::new()).unwrap();
    trainer.reserve().unwrap();
    let step = |trainer: &mut Trainer<Arc<Model>>| {
        let began = Instant::now();
        while !matches!(
            trainer.advance(&()).unwrap(),
            train::Advance::Event(train::Event::Step { .. })
        ) {}
        began.elapsed().as_secs_f64()
    };
    step(&mut trainer);
    let mut alone: Vec<f64> = (0..5).map(|_| step(&mut trainer)).collect();
    alone.sort_by(f64::total_cmp);
    let alone = WINDOW as f64 / alone[2];
    drop(trainer);

    let server = Server::start(model.clone(), Options::default()).unwrap();
    let job = |pacing| TrainJob {
        name: "bench".into(),
        out: std::env::temp_dir().join("gradus-beside.gguf"),
        config: config(&model),
        examples: examples().into(),
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
    };
    stream(&server, streams, 64, None);

    server.train(job(Pacing::Slowdown(100_000))).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let (rows, began) = (server.train_status().rows, Instant::now());
    std::thread::sleep(Duration::from_secs(8));
    let quiet = (server.train_status().rows - rows) as f64 / began.elapsed().as_secs_f64();
    println!(
        "training: {alone:.0} tokens/s alone, {quiet:.0} ({:.3}x) as a job without turns",
        quiet / alone
    );
    server.cancel().unwrap();
    while server.train_status().is_active() {
        std::thread::sleep(Duration::from_millis(5));
    }

    for ppm in [20_000, 100_000, 250_000, 500_000] {
        server.train(job(Pacing::Slowdown(ppm))).unwrap();
        let gaps = stream(&server, streams, tokens, Some("bench"));
        let status = server.train_status();
        server.cancel().unwrap();
        while server.train_status().is_active() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let of =
            |run: bool| -> Vec<f64> { gaps.iter().filter(|g| g.1 == run).map(|g| g.0).collect() };
        let (solo, beside) = (of(false), of(true));
        let mean = |gaps: &[f64]| gaps.iter().sum::<f64>() / gaps.len() as f64;
        let (a, b) = (quantiles(&solo), quantiles(&beside));
        let decode = mean(&solo) / mean(&beside);
        // Of the time that gaps beside the job took.
        let share = f64::from(status.slowdown_ppm_realized.unwrap_or(0)) / 1e6;
        let busy = status.busy_training_ms as f64;
        let training = busy / (beside.iter().sum::<f64>() / streams as f64 * 1.03);
        println!(
            "bound {:.0} %, {streams} streams, {} gaps: p50 {:.2} ms; p50 {:.3}x p95 {:.3}x p99 {:.3}x, longest {:.1} ms (without {:.1}); decode {decode:.3} + training {training:.3} = {:.3} (recent {share:.3}); segments p50 {:.2} p95 {:.2} ms",
            f64::from(ppm) / 1e4,
            gaps.len(),
            a[0],
            b[0] / a[0],
            b[1] / a[1],
            b[2] / a[2],
            b[3],
            a[3],
            decode + training,
            status.segment_ms_p50.unwrap_or(0.0),
            status.segment_ms_p95.unwrap_or(0.0),
        );
    }
    server.stop(Duration::ZERO);
}
