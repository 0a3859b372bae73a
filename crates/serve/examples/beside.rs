//! What training costs turns, and turns training: the gaps between tokens of streams with and
//! without a job beside them, and the rates of both against each alone.
//!
//! `cargo run --release -p gradus-serve --example beside -- MODEL.gguf [STREAMS] [TOKENS]`
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a measurement that may fail

use std::sync::Arc;
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
    }
}

fn examples() -> Vec<Example> {
    let tokens = (0..WINDOW as u32 + 1).map(|i| 100 + (i * 37) % 5000).collect();
    vec![Example { tokens, weights: vec![1.0; WINDOW + 1] }]
}

/// Gaps between tokens of all streams, in milliseconds, and tokens per second of all together.
fn stream(server: &Server, streams: usize, tokens: usize) -> (Vec<f64>, f64) {
    let workers: Vec<_> = (0..streams)
        .map(|i| {
            let ask = Ask {
                tokens: (0..32).map(|t| 200 + 31 * t + i as u32).collect(),
                model: server.options().name.clone(),
                max_tokens: tokens,
                sampler: text::SamplerConfig { temperature: 1.0, ..text::SamplerConfig::greedy() },
                seed: i as u64,
                stops: Vec::new(),
            };
            let mut turn = server.ask(ask).unwrap();
            std::thread::spawn(move || {
                let (mut gaps, mut last) = (Vec::new(), None);
                while let Some(said) = turn.blocking_next() {
                    if let Said::Text(_) = said {
                        let now = Instant::now();
                        if let Some(before) = last.replace(now) {
                            gaps.push((now - before).as_secs_f64() * 1e3);
                        }
                    }
                }
                gaps
            })
        })
        .collect();
    let began = Instant::now();
    let gaps: Vec<f64> = workers.into_iter().flat_map(|w| w.join().unwrap()).collect();
    let rate = gaps.len() as f64 / began.elapsed().as_secs_f64();
    (gaps, rate)
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
        examples: examples(),
        held_out: Vec::new(),
        data: DataReport::default(),
        pacing,
        memory_budget: None,
        fallback: None,
    };
    stream(&server, streams, 64);

    server.train(job(Pacing::Slowdown(100_000))).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let before = server.train_status().training_ms;
    let (rows, began) = (server.train_status().rows, Instant::now());
    std::thread::sleep(Duration::from_secs(8));
    let _ = before;
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
        // The same turns before, beside and after: the machine is not always equally fast.
        let (mut solo, first) = stream(&server, streams, tokens);
        server.train(job(Pacing::Slowdown(ppm))).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let start = server.train_status();
        let (beside, rate) = stream(&server, streams, tokens);
        let status = server.train_status();
        server.cancel().unwrap();
        while server.train_status().is_active() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (more, second) = stream(&server, streams, tokens);
        solo.extend(more);
        let solo_rate = (first + second) / 2.0;
        let (a, b) = (quantiles(&solo), quantiles(&beside));
        let busy = (status.busy_training_ms - start.busy_training_ms) as f64;
        let total = beside.iter().sum::<f64>() / streams as f64;
        println!(
            "bound {:.0} %, {streams} streams: solo p50 {:.2} ms; p50 {:.3}x p95 {:.3}x p99 {:.3}x, longest {:.1} ms (solo {:.1}); decode {:.3} + training {:.3} = {:.3}; segments p50 {:.2} p95 {:.2} ms",
            f64::from(ppm) / 1e4,
            a[0],
            b[0] / a[0],
            b[1] / a[1],
            b[2] / a[2],
            b[3],
            a[3],
            rate / solo_rate,
            busy / total,
            rate / solo_rate + busy / total,
            status.segment_ms_p50.unwrap_or(0.0),
            status.segment_ms_p95.unwrap_or(0.0),
        );
    }
    server.stop(Duration::ZERO);
}
