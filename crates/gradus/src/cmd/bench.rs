//! `gradus bench`.

use std::time::Instant;

use model::{Adapter, Engine, Model, Rows, SeqId, WantLogits};
use serde_json::json;
use train::{Example, GraphConfig, Schedule, TrainConfig, Trainer, Window};

use super::train::{PrecisionName, RecomputeName};
use crate::error::{Error, Result};
use crate::memory;
use crate::options::{CacheType, ModelArgs, engine};
use crate::output::{bytes, json, line, median};
use crate::progress::{Progress, Unit};

/// Measure speed and memory
///
/// Prompt: any tokens through an empty cache, with the last one's logits. Decode: the most
/// likely token, fed back, after 16 tokens. The first repetition warms up and does not count;
/// figures are medians of the others. "First token" is the time from the start of loading to the
/// token after a prompt of 16, all of it cold.
///
/// With --train: optimizer steps of a LoRA on all projections, each over one window of
/// tokens that all carry loss; the first does not count.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus bench
  gradus bench -m gemma-3-270m -p 512 -n 128 -t 2 -r 5 --json
  gradus bench --train --rank 8 --window 512
  gradus bench --train --recompute per-layer")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// Tokens of the prompt
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    prompt: usize,

    /// Tokens to decode
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    decode: usize,

    /// Repetitions that count
    #[arg(short, long, value_name = "N", default_value_t = 5)]
    repetitions: usize,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Measure training instead
    #[arg(long)]
    train: bool,

    /// Rank of the adapter
    #[arg(long, value_name = "R", default_value_t = 8, requires = "train")]
    rank: usize,

    /// Rows of the window [default: what --prompt says]
    #[arg(long, value_name = "ROWS", requires = "train")]
    window: Option<usize>,

    /// What to compute again in the backward pass
    #[arg(long, value_enum, value_name = "WHAT", default_value = "none", requires = "train")]
    recompute: RecomputeName,

    /// What gradients pass quantized weights in
    #[arg(long, value_enum, value_name = "WHAT", default_value = "auto", requires = "train")]
    grad_precision: PrecisionName,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.repetitions == 0 {
        return Err(Error::invalid("`--repetitions` is 0; expected at least 1"));
    }
    if args.train { train(args) } else { serve(args) }
}

/// Tokens spread over a model's vocabulary.
fn tokens(model: &Model, n: usize, seed: usize) -> Vec<u32> {
    let vocab = model.geometry().vocab;
    (0..n).map(|i| ((i * 7919 + seed * 104_729 + 1000) % vocab) as u32).collect()
}

fn per_second(n: usize, since: Instant) -> f64 {
    n as f64 / since.elapsed().as_secs_f64().max(1e-9)
}

/// Tokens before decoding, and of the prompt before the first token.
const SHORT: usize = 16;

fn serve(args: &Args) -> Result<()> {
    let start = Instant::now();
    let model = args.model.load()?;
    let load_ms = start.elapsed().as_secs_f64() * 1000.0;
    let context = model.geometry().context;
    let positions = args.prompt.max(SHORT + args.decode);
    if args.prompt == 0 || args.decode == 0 || positions > context {
        return Err(Error::invalid(format!(
            "`--prompt` is {} and `--decode` {}; expected 1 to {context} and 1 to {}, as the \
             model's context allows",
            args.prompt,
            args.decode,
            context.saturating_sub(SHORT)
        )));
    }
    let (mut engine, _) = engine(&model, args.cache_type, positions, None)?;
    let prompt = tokens(&model, args.prompt, 1);
    let short = tokens(&model, SHORT, 1);
    let mut first_token_ms = 0.0;
    let (mut prompts, mut decodes) = (Vec::new(), Vec::new());
    let rounds = args.repetitions + 1;
    let mut progress = Progress::new("bench", Unit::Items, rounds as u64);
    for round in 0..rounds {
        let seq = engine.cache().open();
        let mut next = feed(&mut engine, seq, &short)?;
        if round == 0 {
            first_token_ms = start.elapsed().as_secs_f64() * 1000.0;
        }
        let at = Instant::now();
        for _ in 0..args.decode {
            next = feed(&mut engine, seq, &[next])?;
        }
        decodes.push(per_second(args.decode, at));
        engine.cache().truncate(seq, 0);
        let at = Instant::now();
        feed(&mut engine, seq, &prompt)?;
        prompts.push(per_second(args.prompt, at));
        engine.cache().close(seq);
        progress.set(round as u64 + 1, "");
    }
    drop(progress);
    let (prompts, decodes) = (counted(&prompts), counted(&decodes));
    let memory = memory::now();
    let (weights, engine_bytes) = (model.weights().bytes(), engine.bytes());
    let family = model.device().family();
    let threads = args.model.device.count()?;
    if args.json {
        return json(&json!({
            "model": args.model.model,
            "prompt_tokens": args.prompt,
            "decode_tokens": args.decode,
            "repetitions": args.repetitions,
            "cache_type": args.cache_type.name(),
            "prompt_tokens_per_s": median(prompts),
            "decode_tokens_per_s": median(decodes),
            "prompt_tokens_per_s_all": prompts,
            "decode_tokens_per_s_all": decodes,
            "first_token_ms": first_token_ms,
            "load_ms": load_ms,
            "weights_bytes": weights,
            "cache_and_arena_bytes": engine_bytes,
            "peak_rss_bytes": memory.peak,
            "anonymous_bytes": memory.anonymous,
            "family": family,
            "threads": threads,
        }));
    }
    line(&format!("prompt       {:8.1} tokens/s ({} tokens)", median(prompts), args.prompt))?;
    line(&format!("decode       {:8.1} tokens/s ({} tokens)", median(decodes), args.decode))?;
    line(&format!("load         {load_ms:8.1} ms"))?;
    line(&format!("first token  {first_token_ms:8.1} ms from the start of loading"))?;
    let (weights, engine_bytes) = (bytes(weights as u64), bytes(engine_bytes as u64));
    line(&format!(
        "memory       {weights} of weights, {engine_bytes} of cache and arena{}",
        peak(&memory)
    ))?;
    line(&format!("kernels      {family}, threads {threads}"))
}

/// Appends tokens to a sequence and gives the most likely next one.
fn feed(engine: &mut Engine, seq: SeqId, tokens: &[u32]) -> Result<u32> {
    let rows = Rows { seq, tokens, adapter: None, want: WantLogits::Last };
    let logits = engine.forward(&[rows])?.pop().unwrap_or_default();
    let best = (0u32..).zip(&logits).max_by(|a, b| a.1.total_cmp(b.1));
    Ok(best.map_or(0, |(id, _)| id))
}

fn peak(memory: &memory::Memory) -> String {
    memory.peak.map_or(String::new(), |n| format!(", {} resident at the peak", bytes(n)))
}

/// The measurements that count: all but the first.
fn counted(all: &[f64]) -> &[f64] {
    all.get(1..).unwrap_or_default()
}

fn train(args: &Args) -> Result<()> {
    let model = args.model.load()?;
    let window = args.window.unwrap_or(args.prompt);
    if window == 0 || window > model.geometry().context {
        return Err(Error::invalid(format!(
            "`--window` is {}; expected 1 to {}, the model's context",
            window,
            model.geometry().context
        )));
    }
    memory::reset_peak();
    let config = TrainConfig {
        weights: Vec::new(),
        targets: train::select_targets(&model, &["all".to_string()])?,
        rank: args.rank,
        alpha: 16.0,
        lr: 1e-4,
        schedule: Schedule::Constant,
        warmup: 0,
        weight_decay: 0.0,
        epochs: 1,
        accumulate: 1,
        clip: 1.0,
        seed: 0,
        graph: GraphConfig {
            rows: window,
            cache: args.cache_type.dtype(),
            recompute: args.recompute.policy(),
            grad_precision: args.grad_precision.of(&model),
            ..GraphConfig::default()
        },
        ..TrainConfig::default()
    };
    let mut trainer = Trainer::new(model.clone(), config)?;
    let parameters = trainer.parameters()?.adapter.as_ref().map_or(0, Adapter::parameters);
    let mut rates = Vec::new();
    let rounds = args.repetitions + 1;
    let mut progress = Progress::new("bench", Unit::Items, rounds as u64);
    for round in 0..rounds {
        let tokens = tokens(&model, window + 1, round);
        let example = Example { weights: vec![1.0; tokens.len()], tokens };
        let windows = [Window::from(vec![example])];
        let at = Instant::now();
        let (loss, _) = trainer.step(&windows, 1e-4)?;
        rates.push(per_second(window, at));
        progress.set(round as u64 + 1, &format!("loss {loss:.4}"));
    }
    drop(progress);
    let rates = counted(&rates);
    let memory = memory::now();
    let arena = trainer.plan()?.arena_bytes();
    let weights = model.weights().bytes();
    let family = model.device().family();
    let threads = args.model.device.count()?;
    if args.json {
        return json(&json!({
            "model": args.model.model,
            "window": window,
            "rank": args.rank,
            "repetitions": args.repetitions,
            "recompute": args.recompute.policy().name(),
            "grad_precision": args.grad_precision.of(&model).name(),
            "train_tokens_per_s": median(rates),
            "train_tokens_per_s_all": rates,
            "parameters": parameters,
            "arena_bytes": arena,
            "weights_bytes": weights,
            "peak_rss_bytes": memory.peak,
            "peak_anonymous_bytes": memory.peak_anonymous(),
            "family": family,
            "threads": threads,
        }));
    }
    line(&format!("train   {:.1} tokens/s ({} rows a step)", median(rates), window))?;
    let (weights, arena) = (bytes(weights as u64), bytes(arena as u64));
    line(&format!("memory  {weights} of weights, {arena} of arena{}", peak(&memory)))?;
    line(&format!("kernels {family}, threads {threads}"))
}
