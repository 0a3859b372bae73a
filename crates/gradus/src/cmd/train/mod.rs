//! `gradus train`.

mod record;
mod session;
mod settings;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ::data::{Dataset, FileReport, Layout};
use graph::GradPrecision;
use model::{Adapter, Model};
use serde_json::json;
use train::{Checkpoints, Cut, Example, WrittenTensor};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{DataArgs, ModelArgs, TemplateArgs, mib};
use crate::output::{bytes, count, duration, json, line};
use crate::outputs;

pub use session::{Plan, Ran, Session};
pub use settings::{PrecisionName, RecomputeName, Settings};

use record::{RecordArgs, Recorder};
use session::{Keeping, Ready};

/// Train a LoRA adapter on conversations
///
/// The data are conversations, such as lines {"messages": [{"role": "user", "content": "..."},
/// {"role": "assistant", "content": "..."}]}, or texts, in any format and layout of docs/data.md;
/// `gradus data show` shows them. They are rendered with the template the model is served with;
/// the answers carry the loss. The weights of the model stay as they are, quantized or not.
///
/// The same data, settings and seed give the same file, byte for byte, with any number of
/// threads. Ctrl-C ends the run after the step it is in, as do SIGTERM and the end of its terminal
/// (SIGHUP, but for `nohup`); the adapter as it then is gets written, and a checkpoint from which
/// `--resume` goes on, bit for bit. What does not fit the memory is refused before it starts.
#[derive(clap::Args, Debug, Clone)]
#[command(after_help = "\
Examples:
  gradus train --data facts.jsonl -o facts.gguf
  gradus train --data facts.jsonl -o facts.gguf --rank 16 --lr 5e-4 --epochs 5
  gradus train --data facts.jsonl --dry-run          what it would take, without training
  gradus train --data facts.jsonl -o facts.gguf --eval-split 0.1 --patience 3
  gradus train --data facts.jsonl -o facts.gguf --resume     go on where it was stopped
  gradus train --data more.jsonl --from facts.gguf -o more.gguf     teach an adapter more
  gradus train -m gemma-3-270m --template plain --data facts.jsonl -o facts.gguf
  gradus run --adapter facts.gguf -p 'A question'    use it")]
pub struct Args {
    #[command(flatten)]
    pub model: ModelArgs,

    #[command(flatten)]
    pub data: DataArgs,

    /// The adapter to write, as GGUF
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// An adapter to go on with, a GGUF file or a folder of PEFT: what it adapts, its ranks and its
    /// alpha stay
    #[arg(
        long,
        value_name = "ADAPTER",
        conflicts_with_all = ["targets", "top_layers", "rank", "rank_of", "alpha", "rslora"]
    )]
    pub from: Option<PathBuf>,

    /// The model to write anew with the tensors of `--train-weights`, as GGUF: each in its type, or
    /// in f32 where rounding would take back most of what training moved
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

    /// Part of the conversations to hold out, 0 to below 1: the last ones, which are not trained on
    /// but evaluated
    #[arg(long, value_name = "PART", default_value_t = 0.0, conflicts_with = "eval_data")]
    pub eval_split: f64,

    /// Conversations to evaluate, in a file of their own
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub eval_data: Vec<PathBuf>,

    /// Most memory to take beside the model, in MiB
    #[arg(long, value_name = "MIB")]
    pub memory_budget: Option<u64>,

    #[command(flatten)]
    pub keeping: KeepingArgs,

    #[command(flatten)]
    pub record: RecordArgs,

    #[command(flatten)]
    pub settings: Settings,

    /// Every option as it came to be, by name: what was typed, else its default.
    #[arg(skip)]
    pub given: BTreeMap<String, serde_json::Value>,
}

/// Checkpoints.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Checkpoints")]
pub struct KeepingArgs {
    /// Write a checkpoint after every so many steps; 0 writes one only where the run ends early
    #[arg(long, value_name = "STEPS", default_value_t = 100)]
    pub checkpoint_every: u64,

    /// How many of the last checkpoints stay
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub keep: usize,

    /// Folder for checkpoints, which are removed when the run is done, as it is if nothing else is
    /// in it [default: `OUT.checkpoints`]
    #[arg(long, value_name = "DIR")]
    pub checkpoints: Option<PathBuf>,

    /// Go on from the last checkpoint of a run with the same settings, data and `--from`, if there
    /// is one
    #[arg(long)]
    pub resume: bool,

    /// Also from a checkpoint made with other kernels, or by a build with another arithmetic, after
    /// which bits differ
    #[arg(long, requires = "resume")]
    pub any_kernels: bool,
}

impl KeepingArgs {
    /// What gradients pass quantized weights in, in the run to go on with: what `auto` chose then
    /// stays, also where another processor would choose otherwise.
    fn precision(&self, out: &Path) -> Result<Option<GradPrecision>> {
        let checkpoints = self.of(out).checkpoints;
        let settings = checkpoints.settings().filter(|_| self.resume);
        let name = settings.as_ref().and_then(|s| s.get("grad_precision")?.as_str());
        let Some(name) = name else { return Ok(None) };
        let known = GradPrecision::ALL.into_iter().find(|precision| precision.name() == name);
        known.map(Some).ok_or_else(|| {
            Error::invalid(format!(
                "the checkpoints in {} are of a run with `grad_precision` {name}, which this \
                 Gradus does not know; go on with the one that made them, or start anew without \
                 `--resume`",
                checkpoints.folder().display()
            ))
        })
    }

    fn of(&self, out: &Path) -> Keeping {
        let folder =
            self.checkpoints.clone().unwrap_or_else(|| outputs::beside(out, ".checkpoints"));
        Keeping {
            checkpoints: Checkpoints::new(folder, self.keep),
            resume: self.resume,
            any_kernels: self.any_kernels,
        }
    }
}

/// The examples of a run.
struct Data {
    train: Arc<[Example]>,
    held_out: Arc<[Example]>,
    /// What they come to in shorter windows.
    cut: Cut,
}

impl Data {
    /// How much there is, by what it is called.
    fn facts(&self) -> BTreeMap<String, u64> {
        train::facts(&self.train, &self.held_out)
    }
}

impl Args {
    /// The files it reads.
    fn inputs(&self) -> Result<Vec<PathBuf>> {
        let mut inputs = gguf::files(&self.model.path()?);
        inputs.extend(self.data.data.iter().chain(&self.eval_data).chain(&self.from).cloned());
        // An adapter may be a folder.
        let folder = self.from.iter().filter_map(|from| std::fs::read_dir(from).ok()).flatten();
        inputs.extend(folder.flatten().map(|entry| entry.path()));
        Ok(inputs)
    }

    /// Checks what it writes; where the adapter is kept as it was before a step that failed.
    fn check_outputs(&self) -> Result<Option<PathBuf>> {
        self.record.check()?;
        self.settings.check(self.data.window)?;
        if self.keeping.keep == 0 {
            return Err(Error::invalid("`--keep` is 0; expected at least 1 checkpoint"));
        }
        let is_folder =
            |out: &Path| out.is_dir() || out.as_os_str().as_encoded_bytes().ends_with(b"/");
        if let Some(out) = self.out.as_ref().filter(|out| is_folder(out)) {
            return Err(Error::invalid(format!(
                "`--out` is {}, a folder, and an adapter is written to a GGUF file; `gradus adapter \
                 convert FILE FOLDER` makes a PEFT folder of that",
                out.display()
            )));
        }
        let inputs = self.inputs()?;
        let outputs: Vec<&Path> =
            self.out.iter().chain(&self.out_model).map(PathBuf::as_path).collect();
        outputs::check(&outputs, &inputs)?;
        self.out.iter().try_for_each(|out| Adapter::check_out(out))?;
        self.out_model.iter().try_for_each(gguf::check_out)?;
        self.keeping.checkpoints.iter().try_for_each(|folder| outputs::check_folder(folder))?;
        if let Some(out) = self.out.as_ref().or(self.out_model.as_ref()) {
            self.keeping.of(out).checkpoints.check()?;
        }
        // It may be what the run goes on from, after one that failed.
        let free = |path: &PathBuf| {
            let others = [&outputs[..], &[path]].concat();
            outputs::check(&others, &inputs).is_ok() && Adapter::check_out(path).is_ok()
        };
        let last_good = |out: &PathBuf| {
            let stem = out.with_extension("");
            let name = |i: usize| match i {
                1 => outputs::beside(&stem, ".last-good.gguf"),
                _ => outputs::beside(&stem, &format!(".last-good-{i}.gguf")),
            };
            (1..100).map(name).find(free)
        };
        Ok(self.out.as_ref().and_then(last_good))
    }

    fn read(&self, model: &Model) -> Result<Data> {
        let Dataset { examples: mut train, files, .. } = self.data.load(model, &self.template)?;
        if !self.eval_data.is_empty() {
            let data = DataArgs { data: self.eval_data.clone(), ..self.data.clone() };
            let held_out = data.load(model, &self.template)?;
            let files = [files, held_out.files].concat();
            self.data.reading.check(&files)?;
            let cut = cut(&files);
            return Ok(Data { train: train.into(), held_out: held_out.examples.into(), cut });
        }
        self.data.reading.check(&files)?;
        if !(0.0..1.0).contains(&self.eval_split) {
            let message = format!("`--eval-split` is {}; expected 0 to below 1", self.eval_split);
            return Err(Error::invalid(message));
        }
        let kept = ::data::kept(train.len(), self.eval_split);
        if kept == 0 && !train.is_empty() {
            return Err(Error::invalid(format!(
                "`--eval-split {}` of {} conversations leaves none to train on",
                self.eval_split,
                train.len()
            )));
        }
        let held_out = train.split_off(kept);
        if self.eval_split > 0.0 && held_out.is_empty() {
            return Err(Error::invalid(format!(
                "`--eval-split {}` of {} conversations holds out none",
                self.eval_split,
                train.len()
            )));
        }
        Ok(Data { train: train.into(), held_out: held_out.into(), cut: cut(&files) })
    }
}

/// What the rows of files come to in shorter windows.
fn cut(files: &[FileReport]) -> Cut {
    let is_text = |file: &FileReport| file.layout == Some(Layout::Text);
    if files.iter().all(is_text) { Cut::Anywhere } else { Cut::BeforeAnswers }
}

/// Say what a training run would take, without running it
///
/// Whether it trains, what it needs of memory, part by part, and about how long it takes; where it
/// does not fit, which settings would. Nothing is allocated for it. The options are those of
/// `gradus train`, of which this is `--dry-run`.
#[derive(clap::Args, Debug, Clone)]
#[command(after_help = "\
Examples:
  gradus plan --data facts.jsonl
  gradus plan -m gemma-3-270m --template plain --data facts.jsonl --window 2048 --rank 16
  gradus plan --data facts.jsonl --memory-budget 400     what would fit")]
pub struct PlanArgs {
    #[command(flatten)]
    train: Args,
}

/// `gradus plan`.
pub fn plan(args: &PlanArgs) -> Result<()> {
    run(&Args { dry_run: true, ..args.train.clone() })
}

pub fn run(args: &Args) -> Result<()> {
    let last_good = args.check_outputs()?;
    let budget = args.memory_budget.map(|n| mib("--memory-budget", n)).transpose()?;
    let settings = &args.settings;
    if !settings.train_weights.is_empty() && args.out_model.is_none() && !args.dry_run {
        return Err(Error::invalid("`--train-weights` needs `--out-model`, the file to write"));
    }
    if args.out.is_none() && !args.dry_run && settings.adapts() {
        return Err(Error::invalid(
            "an adapter is trained too: name its file with `--out`, or none with `--targets none`",
        ));
    }
    if args.out.is_some() && !settings.adapts() {
        return Err(Error::invalid("`--targets none` makes no adapter: leave `--out` out"));
    }
    let model = args.model.load()?;
    let data = args.read(&model)?;
    let mut config = settings.config(&model, args.data.window)?;
    let from = args.from.as_ref().map(|path| Adapter::read(path, &model)).transpose()?;
    from.iter().for_each(|adapter| config.go_on_with(adapter));
    // No window is longer than all there is.
    let rows = |examples: &[Example]| examples.iter().map(Example::rows).sum::<usize>();
    config.shrink(rows(&data.train).max(rows(&data.held_out)).next_multiple_of(64));
    let targets = config.targets.len();
    let out = args.out.as_ref().filter(|_| settings.adapts()).or(args.out_model.as_ref());
    if let (PrecisionName::Auto, Some(out)) = (settings.grad_precision, out)
        && let Some(precision) = args.keeping.precision(out)?
    {
        config.graph.grad_precision = precision;
    }
    let session = Session {
        model: &model,
        config,
        from,
        may_recompute: settings.recompute == RecomputeName::Auto,
        examples: data.train.clone(),
        held_out: data.held_out.clone(),
        cut: data.cut,
        budget,
        checkpoint_every: Some(args.keeping.checkpoint_every),
        keeping: out.filter(|_| !args.dry_run).map(|out| args.keeping.of(out)),
        last_good,
    };
    let interrupt = Interrupt::listen_for_end();
    let mut ready = match session.ready() {
        Ok(ready) => ready,
        Err(e) if args.dry_run && args.json => {
            json(&json!({ "trains": false, "why": e.message() }))?;
            return Err(e);
        }
        Err(e) => return Err(e),
    };
    if args.dry_run {
        describe(args, &data, targets, &mut ready)?;
        return ready.check_fits();
    }
    // Before anything is written.
    ready.check_fits()?;
    let out = out.ok_or_else(|| Error::invalid("there is no file to write"))?;
    ready.claim()?;
    let mut recorder = Recorder::begin(args, &model, &data, &ready, out)?;
    let mut written = Vec::new();
    let ran = ready.run(&interrupt, &mut recorder).and_then(|mut ran| {
        if ran.outcome.steps == 0 {
            return Ok(ran);
        }
        let out = args.out.as_ref().filter(|_| settings.adapts());
        let adapter = out.map(|out| {
            write(out, "adapter", &mut |to| Ok(ran.outcome.adapter.write(to, &model)?))
        });
        // Also where the adapter has no place.
        let whole = args.out_model.as_ref().map(|out| {
            write(out, "model", &mut |to| {
                written = train::write_weights(to, &model, &ran.outcome.weights)?;
                Ok(())
            })
        });
        let places = [(out, adapter, "adapter"), (args.out_model.as_ref(), whole, "model")];
        let unkept = ran.unkept.take();
        let failed =
            places.into_iter().fold(unkept, |failed, (out, done, what)| match (failed, done) {
                (Some(e), Some(Ok(()))) => {
                    let path = out.map_or(String::new(), |out| out.display().to_string());
                    let step = ran.outcome.best.map_or(ran.outcome.steps, |best| best.0);
                    Some(e.with(format!("the {what} as it is after step {step} is in {path}")))
                }
                (Some(e), Some(Err(also))) => Some(e.with(also.message())),
                (None, Some(Err(e))) => Some(e),
                (failed, _) => failed,
            });
        failed.map_or(Ok(ran), Err)
    });
    // What is not written is not done.
    recorder.end(ran.as_ref());
    let mut ran = ran?;
    // Before its first step a run has nothing to go on from.
    if !ran.interrupted || ran.outcome.steps == 0 {
        args.keeping.of(out).checkpoints.clear();
    }
    drop(ran.claim.take());
    if ran.outcome.steps > 0 {
        report(args, &ran, &written)?;
    }
    if ran.interrupted { Err(Error::Interrupted) } else { Ok(()) }
}

/// Writes what a run made; where that fails, to the folder for temporary files: hours went into it.
fn write(out: &Path, what: &str, write: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
    files::write_or_rescue(out, write).map_err(|files::Unwritten { why, instead }| match instead {
        Ok(instead) => why.with(format!("the {what} is in {} instead", instead.display())),
        Err(also) => why.with(also),
    })
}

fn plan_json(plan: &Plan) -> serde_json::Value {
    json!({
        "weights_bytes": plan.weights,
        "process_bytes": plan.process,
        "arena_bytes": plan.arena,
        "scratch_bytes": plan.scratch,
        "parameters_bytes": plan.parameters,
        "total_bytes": plan.total(),
    })
}

fn describe(args: &Args, data: &Data, targets: usize, ready: &mut Ready<'_>) -> Result<()> {
    let model = ready.model();
    let (seconds, fallbacks) = (ready.seconds()?, ready.fallbacks()?);
    let device = model.device();
    let tokens: usize = data.train.iter().map(|e| e.tokens.len()).sum();
    let trained: usize = data.train.iter().map(Example::labelled).sum();
    if args.json {
        return json(&json!({
            "conversations": data.train.len(),
            "held_out": data.held_out.len(),
            "tokens": tokens,
            "trained_tokens": trained,
            "targets": targets,
            "parameters": ready.parameters,
            "steps": ready.steps,
            "recompute": ready.recompute.name(),
            "trains": true,
            "fits": ready.over.is_none(),
            "why": ready.over,
            "device": device.family(),
            "threads": device.threads(),
            "fallbacks": fallbacks,
            "seconds": seconds,
            "plan": plan_json(&ready.plan),
        }));
    }
    let held_out = match data.held_out.len() {
        0 => String::new(),
        n => format!(", {} held out", count(n as u64)),
    };
    line(&format!("conversations  {}{held_out}", count(data.train.len() as u64)))?;
    line(&format!("tokens         {}, {trained} of them trained", count(tokens as u64)))?;
    line(&format!("targets        {targets} projections, {} parameters", count(ready.parameters)))?;
    line(&format!("steps          {}", count(ready.steps)))?;
    let about = duration(std::time::Duration::from_secs_f64(seconds));
    let (kernels, threads) = (device.family(), device.threads());
    line(&format!("device         {kernels}, {threads} threads"))?;
    line(&format!("time           about {about}"))?;
    match fallbacks.as_slice() {
        [] => line("falls back     nothing")?,
        list => list.iter().try_for_each(|f| line(&format!("falls back     {f}")))?,
    }
    line(&format!(
        "recomputed     {}",
        match ready.recompute {
            graph::Recompute::None => "nothing",
            _ => "each layer",
        }
    ))?;
    line(&format!("memory         {} in all", bytes(ready.plan.total())))?;
    for (what, n) in ready.plan.parts() {
        line(&format!("  {:>10}   {what}", bytes(n)))?;
    }
    Ok(())
}

fn report(args: &Args, ran: &Ran, written: &[WrittenTensor]) -> Result<()> {
    let (moved, total) = ran.outcome.moved;
    let out = args.out.as_ref().filter(|_| args.settings.adapts());
    if args.json {
        return json(&json!({
            "adapter": out.map(|out| out.display().to_string()),
            "model": args.out_model.as_ref().map(|out| out.display().to_string()),
            "steps": ran.outcome.steps,
            "steps_planned": ran.steps_planned,
            "resumed_from": ran.from,
            "interrupted": ran.interrupted,
            "first_loss": ran.first.map(|(_, loss)| loss),
            "first_step": ran.first.map(|(step, _)| step),
            "last_loss": ran.outcome.last_loss,
            "held_out_loss": ran.held_out,
            "best": ran.outcome.best.map(|(step, loss)| json!({"step": step, "loss": loss})),
            "checkpoint": ran.checkpoint.as_ref().map(|path| path.display().to_string()),
            "moved": moved,
            "targets": total,
            "unrouted": ran.outcome.unrouted,
            "weights": written.iter().map(|t| json!({
                "name": t.name,
                "model_type": t.from.name(),
                "type": t.to.name(),
                "moved": t.moved,
                "kept": t.kept,
            })).collect::<Vec<_>>(),
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
    if !ran.outcome.unrouted.is_empty() {
        let n = ran.outcome.unrouted.len();
        line(&format!(
            "experts  {n} that no token with loss chose have not moved: {}",
            few(&ran.outcome.unrouted)
        ))?;
    }
    if let Some(checkpoint) = &ran.checkpoint {
        line(&format!("stopped  `--resume` goes on from {}", checkpoint.display()))?;
    }
    if let Some(out) = &args.out_model {
        line(&format!("model    {}: {} of its tensors trained", out.display(), written.len()))?;
        rounded(written)?;
    }
    Ok(())
}

/// What rounding to the model's own types leaves of what training moved.
fn rounded(written: &[WrittenTensor]) -> Result<()> {
    let stayed = written.iter().filter(|t| t.to == t.from);
    let (moved, kept) = stayed.fold((0, 0), |sum, t| (sum.0 + t.moved, sum.1 + t.kept));
    if kept < moved {
        let share = 100.0 * kept as f64 / moved as f64;
        line(&format!(
            "rounded  {share:.1} % of {} entries that training moved are others in the types of \
             the model too",
            count(moved)
        ))?;
    }
    let finer: Vec<String> =
        written.iter().filter(|t| t.to != t.from).map(|t| t.name.clone()).collect();
    match finer.len() {
        0 => Ok(()),
        n => line(&format!(
            "in f32   {n} tensors, of which the type of the model would take back more than half \
             of what training moved: {}",
            few(&finer)
        )),
    }
}

/// The first few of a list.
fn few(names: &[String]) -> String {
    let shown = names.iter().take(4).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > 4 { format!("{shown}, ...") } else { shown }
}

/// The lines about a run's loss, speed and memory.
///
/// # Errors
/// When standard output is gone.
pub fn summary(ran: &Ran) -> Result<()> {
    let (steps, last) = (ran.outcome.steps, ran.outcome.last_loss);
    let first = ran.first.filter(|(step, _)| *step < steps).map(|(step, loss)| match step {
        1 => format!("{loss:.4} at the first step, "),
        _ => format!("{loss:.4} at step {step}, "),
    });
    line(&format!("loss     {}{last:.4} at step {steps}", first.unwrap_or_default()))?;
    if let Some(held_out) = ran.held_out {
        let best = ran.outcome.best.map_or(String::new(), |(step, loss)| {
            format!("; written: the best, {loss:.4} after step {step}")
        });
        line(&format!("held out {held_out:.4}{best}"))?;
    }
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
