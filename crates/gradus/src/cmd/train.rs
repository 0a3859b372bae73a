//! `gradus train`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use graph::Recompute;
use model::Model;
use serde_json::json;
use train::{Event, Example, GraphConfig, Outcome, Schedule, TrainConfig, Trainer};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::memory;
use crate::options::{CacheType, DataArgs, ModelArgs, TemplateArgs};
use crate::output::{bytes, count, duration, json, line, note};
use crate::progress::{Progress, Unit};

/// Train a LoRA adapter on conversations
///
/// The data are JSON lines, one conversation each: {"messages": [{"role": "user", "content":
/// "..."}, {"role": "assistant", "content": "..."}]}, rendered with the template the model is
/// served with; the answers carry the loss. The weights of the model stay as they are, quantized
/// or not.
///
/// The same data, settings and seed give the same file, byte for byte, with any number of
/// threads. Ctrl-C ends the run after the step it is in; the adapter as it then is gets written.
#[derive(clap::Args, Debug, Clone)]
#[command(after_help = "\
Examples:
  gradus train --data facts.jsonl -o facts.gguf
  gradus train --data facts.jsonl -o facts.gguf --rank 16 --lr 5e-4 --epochs 5
  gradus train --data facts.jsonl --dry-run          what it would take, without training
  gradus train -m gemma-3-270m --template plain --data facts.jsonl -o facts.gguf
  gradus run --adapter facts.gguf -p 'A question'    use it")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub data: DataArgs,

    /// The adapter to write, as GGUF
    #[arg(short, long, value_name = "FILE", required_unless_present_any = ["dry_run", "out_model"])]
    pub out: Option<PathBuf>,

    /// The model to write anew with the tensors of `--train-weights`, as GGUF
    #[arg(long, value_name = "FILE", requires = "train_weights")]
    pub out_model: Option<PathBuf>,

    #[command(flatten)]
    pub template: TemplateArgs,

    /// Plan the run, say what it takes, and end
    #[arg(long)]
    pub dry_run: bool,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub settings: Settings,
}

/// What decides the adapter, beside the model and the data.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Training")]
pub struct Settings {
    /// What to adapt: `all`, `attn`, `ffn`, `experts`, `router`, a part of tensor names such as
    /// `attn_q` or `blk.3.`, or `none`
    #[arg(long, value_name = "NAME,...", default_value = "all", value_delimiter = ',')]
    pub targets: Vec<String>,

    /// The model's own float tensors to train: `all`, or a part of their names such as `norm`;
    /// with `--targets none` without an adapter
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', num_args = 1)]
    pub train_weights: Vec<String>,

    /// Rank of the adapter's matrices
    #[arg(long, value_name = "R", default_value_t = 8)]
    pub rank: usize,

    /// The adapter's effect is multiplied by alpha / rank
    #[arg(long, value_name = "X", default_value_t = 16.0)]
    pub alpha: f32,

    /// Peak learning rate
    #[arg(long, value_name = "X", default_value_t = 1e-3)]
    pub lr: f32,

    /// How the learning rate goes on after the warm-up
    #[arg(long, value_enum, value_name = "NAME", default_value = "cosine")]
    pub schedule: ScheduleName,

    /// Steps in which the learning rate rises to its peak
    #[arg(long, value_name = "STEPS", default_value_t = 4)]
    pub warmup: u64,

    /// Passes over the data
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub epochs: u64,

    /// Windows per step
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub accumulate: usize,

    /// Scale gradients down to this norm; 0 leaves them
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub clip: f32,

    /// Decoupled weight decay
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub weight_decay: f32,

    /// Seed of the adapter's matrices and of the order of the data
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// What to compute again in the backward pass instead of keeping it; changes no bit
    #[arg(long, value_enum, value_name = "WHAT", default_value = "none")]
    pub recompute: RecomputeName,

    /// What keys and values pass through: that of the cache the adapter will be used with
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    pub cache_type: CacheType,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleName {
    /// The same throughout
    Constant,
    /// Half a cosine, down to 0
    Cosine,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeName {
    /// Nothing: fastest
    None,
    /// Each layer: a fraction of the memory, a third more work
    PerLayer,
}

impl RecomputeName {
    pub fn policy(self) -> Recompute {
        match self {
            RecomputeName::None => Recompute::None,
            RecomputeName::PerLayer => Recompute::PerLayer,
        }
    }
}

impl Settings {
    /// True unless no adapter is asked for.
    pub fn adapts(&self) -> bool {
        self.targets != ["none"]
    }

    /// The trainer's settings, for a model and windows of so many rows.
    ///
    /// # Errors
    /// When a target matches no projection.
    pub fn config(&self, model: &Model, window: usize) -> Result<TrainConfig> {
        Ok(TrainConfig {
            targets: match self.adapts() {
                true => train::select_targets(model, &self.targets)?,
                false => Vec::new(),
            },
            weights: train::select_weights(model, &self.train_weights)?,
            rank: self.rank,
            alpha: self.alpha,
            lr: self.lr,
            schedule: match self.schedule {
                ScheduleName::Constant => Schedule::Constant,
                ScheduleName::Cosine => Schedule::Cosine,
            },
            warmup: self.warmup,
            weight_decay: self.weight_decay,
            epochs: self.epochs,
            accumulate: self.accumulate,
            clip: self.clip,
            seed: self.seed,
            graph: GraphConfig {
                rows: window,
                cache: self.cache_type.dtype(),
                recompute: self.recompute.policy(),
                ..GraphConfig::default()
            },
        })
    }
}

/// Bytes a run takes, by what for.
#[derive(Copy, Clone, Debug, Default)]
pub struct Plan {
    /// The model's packed weights.
    pub weights: u64,
    /// Tokenizer, template, data, stacks, the allocator: what was there before the run, less the
    /// weights. 0 where the system does not tell.
    pub process: u64,
    /// The arena of the largest graph.
    pub arena: u64,
    /// What threads scratch on while they run it.
    pub scratch: u64,
    /// The adapter, its gradient (of a window, and summed over a step) and two moments.
    pub adapter: u64,
}

impl Plan {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.process + self.arena + self.scratch + self.adapter
    }
}

/// What a run came to.
pub struct Ran {
    pub outcome: Outcome,
    pub plan: Plan,
    pub parameters: u64,
    pub steps_planned: u64,
    pub first_loss: f64,
    pub rows: u64,
    pub time: Duration,
    pub memory: memory::Memory,
    pub interrupted: bool,
}

impl Ran {
    pub fn tokens_per_second(&self) -> f64 {
        self.rows as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

/// Trains with a live loss. With `dry_run` it ends before the first step.
///
/// # Errors
/// A setting, the refusal, or what went wrong in which step.
pub fn train(
    model: &Model,
    examples: &[Example],
    config: TrainConfig,
    threads: usize,
    interrupt: &Interrupt,
    dry_run: bool,
) -> Result<Ran> {
    memory::reset_peak();
    let before = memory::now();
    let weights = model.weights().bytes() as u64;
    let mut plan = Plan {
        weights,
        process: before.anonymous.map_or(0, |n| n.saturating_sub(weights)),
        ..Plan::default()
    };
    let epochs = config.epochs;
    let trainer = Trainer::new(model, config)?;
    let (mut parameters, mut steps_planned, mut total_rows) = (0, 0, 0u64);
    let (mut first_loss, mut started) = (f64::NAN, Instant::now());
    let mut progress: Option<Progress> = None;
    let outcome = trainer.run(examples, &mut |event| {
        match event {
            Event::Start { steps, parameters: numbers, arena_bytes, scratch_bytes } => {
                (parameters, steps_planned) = (numbers as u64, steps);
                plan.arena = arena_bytes as u64;
                plan.scratch = (scratch_bytes * threads) as u64;
                // Values, the window's gradient, the step's, two moments; 4 bytes each.
                plan.adapter = parameters * 5 * 4;
                if dry_run {
                    return false;
                }
                note(&format!(
                    "training {} parameters on {} conversations, {epochs} times, in {steps} steps; \
                     {} planned",
                    count(parameters),
                    count(examples.len() as u64),
                    bytes(plan.total()),
                ));
                started = Instant::now();
                progress = Some(Progress::new("step", Unit::Items, steps));
            }
            Event::Step { step, loss, rows, .. } => {
                if step == 1 {
                    first_loss = loss;
                }
                total_rows += rows as u64;
                let rate = total_rows as f64 / started.elapsed().as_secs_f64().max(1e-9);
                if let Some(progress) = &mut progress {
                    progress.set(step, &format!("loss {loss:.4}  {rate:.0} tokens/s"));
                }
            }
            Event::Epoch { .. } => {}
        }
        !interrupt.asked()
    })?;
    if let Some(progress) = progress {
        progress.finish();
    }
    Ok(Ran {
        outcome,
        plan,
        parameters,
        steps_planned,
        first_loss,
        rows: total_rows,
        time: started.elapsed(),
        memory: memory::now(),
        interrupted: interrupt.asked(),
    })
}

pub fn run(args: &Args) -> Result<()> {
    for out in args.out.iter().chain(&args.out_model) {
        check_writable(out)?;
    }
    let settings = &args.settings;
    if !settings.train_weights.is_empty() && args.out_model.is_none() && !args.dry_run {
        return Err(Error::invalid("`--train-weights` needs `--out-model`, the file to write"));
    }
    if args.out.is_none() && !args.dry_run && settings.adapts() {
        return Err(Error::invalid(
            "an adapter is trained too: name its file with `--out`, or none with `--targets none`",
        ));
    }
    let model = args.model.load()?;
    let examples = args.data.load(&model, &args.template)?.examples;
    let config = args.settings.config(&model, args.data.window)?;
    let targets = config.targets.len();
    let threads = args.model.device.count()?;
    let interrupt = Interrupt::listen();
    let ran = train(&model, &examples, config, threads, &interrupt, args.dry_run)?;
    if args.dry_run {
        return describe(args, &examples, targets, &ran);
    }
    if ran.outcome.steps == 0 {
        return Err(Error::Interrupted);
    }
    if let Some(out) = args.out.as_ref().filter(|_| settings.adapts()) {
        ran.outcome.adapter.write(out, &model)?;
    }
    if let Some(out) = &args.out_model {
        train::write_weights(out, &model, &ran.outcome.weights)?;
    }
    report(args, &ran)?;
    if ran.interrupted { Err(Error::Interrupted) } else { Ok(()) }
}

/// Says before hours of work that their result could not be written.
fn check_writable(out: &Path) -> Result<()> {
    if out.is_dir() {
        return Err(Error::invalid(format!("{} is a folder; expected a file", out.display())));
    }
    let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        return Err(Error::invalid(format!(
            "cannot write {}: there is no folder {}",
            out.display(),
            folder.display()
        )));
    }
    Ok(())
}

fn plan_json(plan: &Plan) -> serde_json::Value {
    json!({
        "weights_bytes": plan.weights,
        "process_bytes": plan.process,
        "arena_bytes": plan.arena,
        "scratch_bytes": plan.scratch,
        "adapter_bytes": plan.adapter,
        "total_bytes": plan.total(),
    })
}

fn describe(args: &Args, examples: &[Example], targets: usize, ran: &Ran) -> Result<()> {
    let tokens: usize = examples.iter().map(|e| e.tokens.len()).sum();
    let trained: f64 = examples.iter().map(Example::weight).sum();
    if args.json {
        return json(&json!({
            "conversations": examples.len(),
            "tokens": tokens,
            "trained_tokens": trained,
            "targets": targets,
            "parameters": ran.parameters,
            "steps": ran.steps_planned,
            "plan": plan_json(&ran.plan),
        }));
    }
    let Plan { weights, process, arena, scratch, adapter } = ran.plan;
    line(&format!("conversations  {}", count(examples.len() as u64)))?;
    line(&format!("tokens         {}, {trained} of them trained", count(tokens as u64)))?;
    line(&format!("targets        {targets} projections, {} parameters", count(ran.parameters)))?;
    line(&format!("steps          {}", count(ran.steps_planned)))?;
    line(&format!("memory         {} in all", bytes(ran.plan.total())))?;
    for (what, n) in [
        ("packed weights", weights),
        ("tokenizer, data, stacks", process),
        ("arena", arena),
        ("scratch of the threads", scratch),
        ("adapter, gradients, moments", adapter),
    ] {
        line(&format!("  {:>10}   {what}", bytes(n)))?;
    }
    Ok(())
}

fn report(args: &Args, ran: &Ran) -> Result<()> {
    let (moved, total) = ran.outcome.moved;
    let out = args.out.as_ref().filter(|_| args.settings.adapts());
    if args.json {
        return json(&json!({
            "adapter": out,
            "model": args.out_model,
            "steps": ran.outcome.steps,
            "steps_planned": ran.steps_planned,
            "interrupted": ran.interrupted,
            "first_loss": ran.first_loss,
            "last_loss": ran.outcome.last_loss,
            "moved": moved,
            "targets": total,
            "parameters": ran.parameters,
            "tokens": ran.rows,
            "seconds": ran.time.as_secs_f64(),
            "train_tokens_per_s": ran.tokens_per_second(),
            "plan": plan_json(&ran.plan),
            "peak_anonymous_bytes": ran.memory.peak_anonymous(),
        }));
    }
    summary(ran)?;
    if let Some(out) = out {
        line(&format!("adapter  {}: {moved} of {total} targets moved", out.display()))?;
    }
    if let Some(out) = &args.out_model {
        let tensors = ran.outcome.weights.len();
        line(&format!("model    {}: {tensors} of its tensors trained", out.display()))?;
    }
    Ok(())
}

/// The lines about a run's loss, speed and memory.
///
/// # Errors
/// When standard output is gone.
pub fn summary(ran: &Ran) -> Result<()> {
    let steps = ran.outcome.steps;
    line(&format!(
        "loss     {:.4} at the first step, {:.4} at step {steps}",
        ran.first_loss, ran.outcome.last_loss
    ))?;
    line(&format!(
        "speed    {:.0} tokens/s: {} tokens in {}",
        ran.tokens_per_second(),
        count(ran.rows),
        duration(ran.time)
    ))?;
    let planned = bytes(ran.plan.total());
    match ran.memory.peak_anonymous() {
        Some(peak) => line(&format!("memory   {} at the peak, {planned} planned", bytes(peak))),
        None => line(&format!("memory   {planned} planned")),
    }
}
