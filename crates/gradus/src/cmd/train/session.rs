//! A run from its data to its end: memory, checkpoints, what is shown meanwhile.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use graph::Recompute;
use model::{Adapter, Model};
use train::{
    Advance, Checkpoints, Event, Example, Optimizer, Outcome, Start, TrainConfig, Trainer,
};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::memory;
use crate::output::{bytes, count, note};
use crate::progress::{Progress, Unit};

/// Bytes a run takes, by what for.
#[derive(Copy, Clone, Debug, Default)]
pub struct Plan {
    /// The model's packed weights.
    pub weights: u64,
    /// Tokenizer, template, data, graphs, stacks, the allocator: what is there before anything is
    /// taken for the run, less the weights. 0 where the system does not tell.
    pub process: u64,
    /// The arena of the largest graph.
    pub arena: u64,
    /// What threads scratch on while they run it.
    pub scratch: u64,
    /// What moves, its gradient (of a window, and summed over a step), its moments, the best so
    /// far and the copy a checkpoint is written from, where there are such.
    pub parameters: u64,
}

impl Plan {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.process + self.beside()
    }

    /// What the run takes beside the model.
    pub fn beside(&self) -> u64 {
        self.arena + self.scratch + self.parameters
    }

    /// Each part with what it is.
    pub fn parts(&self) -> [(&'static str, u64); 5] {
        [
            ("packed weights", self.weights),
            ("tokenizer, data, stacks", self.process),
            ("arena", self.arena),
            ("scratch of the threads", self.scratch),
            ("adapter, gradients, moments", self.parameters),
        ]
    }
}

/// How checkpoints are kept.
pub struct Keeping {
    /// Where.
    pub checkpoints: Checkpoints,
    /// Go on from the last one.
    pub resume: bool,
    /// Also from one made with other kernels.
    pub any_kernels: bool,
}

/// A run that is to be.
pub struct Session<'a> {
    pub model: &'a Model,
    pub config: TrainConfig,
    /// An adapter to go on with.
    pub from: Option<Adapter>,
    /// Recompute layers if the run does not fit otherwise.
    pub may_recompute: bool,
    pub examples: Arc<[Example]>,
    pub held_out: Arc<[Example]>,
    /// What they come to in shorter windows.
    pub cut: train::Cut,
    /// Most bytes to take beside the model; else what there is.
    pub budget: Option<u64>,
    pub keeping: Option<Keeping>,
    /// Steps from one checkpoint to the next, 0 for one only where the run ends early; none where
    /// there are no checkpoints. Their memory is planned also where nothing is to be run.
    pub checkpoint_every: Option<u64>,
    /// Where the adapter is written as it was before a step that failed.
    pub last_good: Option<PathBuf>,
}

/// A run that is planned: nothing is allocated for it yet.
pub struct Ready<'a> {
    model: &'a Model,
    trainer: Trainer<&'a Model>,
    keeping: Option<Keeping>,
    last_good: Option<PathBuf>,
    pub plan: Plan,
    /// That it needs more than may be taken, and what would fit.
    pub over: Option<String>,
    /// The policy that fits.
    pub recompute: Recompute,
    pub parameters: u64,
    pub steps: u64,
    /// The step it goes on from.
    pub from: u64,
    conversations: usize,
    epochs: u64,
    claim: Option<files::Lock>,
}

/// What a run came to.
pub struct Ran {
    pub outcome: Outcome,
    pub plan: Plan,
    pub parameters: u64,
    pub steps_planned: u64,
    /// The step of the checkpoint it went on from; 0 where it began anew.
    pub from: u64,
    /// The first step it took, and its loss; a run that goes on may take none.
    pub first: Option<(u64, f64)>,
    /// Of what is held out, the last evaluation.
    pub held_out: Option<f64>,
    pub rows: u64,
    pub time: Duration,
    pub memory: memory::Memory,
    pub interrupted: bool,
    /// Where the run can go on, when it ended early.
    pub checkpoint: Option<PathBuf>,
    /// A checkpoint that could not be written: the run ended there, with what it had learned.
    pub unkept: Option<Error>,
    /// The folder of checkpoints is this run's until what it made is written.
    pub claim: Option<files::Lock>,
}

impl Ran {
    pub fn tokens_per_second(&self) -> f64 {
        self.rows as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

/// Hears of a run as it goes.
pub trait Watch {
    /// Something happened; `memory` is what the process takes now.
    fn event(&mut self, event: &Event, seconds: f64, memory: Option<u64>) {
        let _ = (event, seconds, memory);
    }
}

impl Watch for () {}

impl<'a> Session<'a> {
    /// Differentiates, plans and bounds the run.
    ///
    /// # Errors
    /// A setting, or the refusal.
    pub fn ready(self) -> Result<Ready<'a>> {
        memory::reset_peak();
        let weights = self.model.weights().bytes() as u64;
        let there = self.model.device().available().map(|n| n as u64);
        let allowed = self.budget.into_iter().chain(there).min();
        let mut config = self.config;
        let fresh = Optimizer::new(config.method, config.weight_decay);
        let from = self.from.map(|adapter| (adapter, fresh));
        let mut start = Start { from, fallback: None };
        loop {
            let mut trainer = Trainer::start(self.model, config.clone(), start)?;
            if let Some(every) = self.checkpoint_every {
                trainer.checkpoint_every(every);
            }
            if !self.held_out.is_empty() {
                trainer.measure_first();
            }
            let loaded = trainer.load(self.examples.clone(), self.held_out.clone())?;
            let Event::Start { steps, parameters, .. } = loaded else {
                return Err(Error::fault("a run began with something else"));
            };
            let of_parameters = trainer.parameter_bytes() as u64;
            // With the data and the graphs, and before anything is taken for running them; an
            // adapter to go on from is there already, and counted with its gradients.
            let values = trainer.held_bytes() as u64;
            let process = memory::now().anonymous.map_or(0, |n| n.saturating_sub(weights + values));
            let plan = Plan {
                weights,
                process,
                arena: (trainer.planned_bytes() as u64).saturating_sub(of_parameters),
                scratch: trainer.scratch_bytes() as u64,
                parameters: of_parameters,
            };
            let mut over = None;
            if let Some(allowed) = allowed.filter(|&allowed| plan.beside() > allowed) {
                if self.may_recompute && config.graph.recompute == Recompute::None {
                    config.graph.recompute = Recompute::PerLayer;
                    start = trainer.into_start();
                    continue;
                }
                let wanted = train::Wanted {
                    fallback: None,
                    examples: &self.examples,
                    held_out: &self.held_out,
                    cut: self.cut,
                    allowed: allowed as usize,
                    checkpoint_every: self.checkpoint_every,
                    window: &|rows| rows,
                    chunks: &|window| train::halves(window).collect(),
                };
                let fits = match train::nearest(&self.model, &config, &wanted)? {
                    Some(nearest) => typed(&nearest),
                    None => self.cut.none_fits().to_string(),
                };
                let why = train::over_budget(plan.beside() as usize, allowed as usize);
                over = Some(format!("{why}; {fits}"));
            }
            let mut from = 0;
            // Of what does not fit nothing is read.
            if let (None, Some(Keeping { checkpoints, resume: true, any_kernels, .. })) =
                (&over, &self.keeping)
            {
                match checkpoints.last()? {
                    None => note(&format!(
                        "there is no checkpoint in {}: the run starts anew",
                        checkpoints.folder().display()
                    )),
                    Some((snapshot, path)) => {
                        from = snapshot.steps();
                        trainer
                            .restore(snapshot, *any_kernels)
                            .map_err(|e| Error::invalid(format!("{}: {e}", path.display())))?;
                        note(&format!("going on from step {from}, {}", path.display()));
                    }
                }
            }
            return Ok(Ready {
                model: self.model,
                trainer,
                keeping: self.keeping,
                last_good: self.last_good,
                plan,
                over,
                recompute: config.graph.recompute,
                parameters: parameters as u64,
                steps,
                from,
                conversations: self.examples.len(),
                epochs: config.epochs,
                claim: None,
            });
        }
    }
}

/// Settings that fit, as they are typed.
fn typed(nearest: &train::Nearest) -> String {
    let (window, chunk) = nearest.window();
    let chunk = chunk.map_or(String::new(), |rows| format!(" --chunk {rows}"));
    let fit = if nearest.shortens { " --fit left" } else { "" };
    let without = if nearest.drops_chunk { ", without `--chunk`" } else { "" };
    format!("`--recompute per-layer --window {window}{chunk}{fit}` would fit{without}")
}

impl<'a> Ready<'a> {
    /// Seconds that the steps to come take on this machine, as far as what their graphs cost and
    /// rates measured now tell.
    ///
    /// # Errors
    /// When the device cannot be measured.
    pub fn seconds(&mut self) -> Result<f64> {
        let rates = train::Rates::measure(self.model.device().as_ref())?;
        Ok(rates.seconds(&self.trainer.cost()?))
    }

    /// The model it adapts.
    pub fn model(&self) -> &'a Model {
        self.model
    }

    /// What falls back to another device, in words.
    ///
    /// # Errors
    /// None that is left: the plan is there.
    pub fn fallbacks(&mut self) -> Result<Vec<String>> {
        let of = |f: &graph::Fallback| format!("{} `{}`: {}", f.op, f.name, f.reason);
        Ok(self.trainer.plan()?.fallbacks.iter().map(of).collect())
    }

    /// # Errors
    /// That it does not fit, with the nearest settings that do.
    pub fn check_fits(&self) -> Result<()> {
        self.over.as_ref().map_or(Ok(()), |why| Err(Error::over_budget(why)))
    }

    /// The settings.
    pub fn config(&self) -> &TrainConfig {
        self.trainer.config()
    }

    /// Takes the folder of checkpoints for this run, before anything is written for it.
    ///
    /// # Errors
    /// When another run has it, or it cannot be made.
    pub fn claim(&mut self) -> Result<()> {
        let Some(Keeping { checkpoints, .. }) = &self.keeping else { return Ok(()) };
        if self.claim.is_some() {
            return Ok(());
        }
        let (lock, old) = checkpoints.claim(self.from > 0)?;
        if let Some(old) = old {
            note(&format!(
                "there are checkpoints of an earlier run; they are in {} now",
                old.display()
            ));
        }
        self.claim = Some(lock);
        Ok(())
    }

    /// Trains with a live loss.
    ///
    /// # Errors
    /// What went wrong in which step, and where the run as it was before can go on. A checkpoint
    /// that cannot be written is none, since what was learned is here still: see [`Ran::unkept`].
    pub fn run(mut self, interrupt: &Interrupt, watch: &mut dyn Watch) -> Result<Ran> {
        self.check_fits()?;
        self.claim()?;
        note(&format!(
            "training {} parameters on {} conversations, {} times, in {} steps; {} planned",
            count(self.parameters),
            count(self.conversations as u64),
            self.epochs,
            count(self.steps),
            bytes(self.plan.total()),
        ));
        self.trainer.reserve()?;
        let mut progress = Progress::new("step", Unit::Items, self.steps);
        let started = Instant::now();
        let (mut first, mut held_out, mut rows) = (None, None, 0u64);
        let (mut interrupted, mut unkept) = (false, None);
        // A run whose checkpoints are lost is not what was asked for.
        while !interrupted && unkept.is_none() {
            let event = match self.trainer.advance(&()) {
                Ok(Advance::Event(event)) => event,
                Ok(Advance::Stopped) => continue,
                Ok(Advance::Done) => break,
                Err(e) => return Err(self.failed(e)),
            };
            let seconds = started.elapsed().as_secs_f64();
            let memory = memory::now();
            watch.event(&event, seconds, memory.anonymous);
            match event {
                Event::Step { step, loss, rows: of_step, .. } => {
                    first = first.or(Some((step, loss)));
                    rows += of_step as u64;
                    let rate = rows as f64 / seconds.max(1e-9);
                    let mut message = format!("loss {loss:.4}  {rate:.0} tokens/s");
                    if let Some(held_out) = held_out {
                        message += &format!("  held out {held_out:.4}");
                    }
                    if let Some(anonymous) = memory.anonymous {
                        message += &format!("  {}", bytes(anonymous));
                    }
                    progress.set(step, &message);
                }
                Event::Epoch { held_out: Some(loss), .. }
                | Event::Evaluated { held_out: loss, .. } => held_out = Some(loss),
                Event::Checkpoint(snapshot) => {
                    let Some(Keeping { checkpoints, .. }) = &self.keeping else { continue };
                    unkept = checkpoints.write(&snapshot).err();
                }
                Event::EarlyStop { best, held_out } => {
                    note(&format!(
                        "no better than {held_out:.4} after step {best}: the run ends with that"
                    ));
                }
                Event::Start { .. } | Event::Epoch { .. } => {}
            }
            interrupted = interrupt.asked();
        }
        drop(progress);
        let is_good = self.trainer.check_moved().and_then(|()| self.trainer.check_finite());
        if let Err(e) = is_good {
            return Err(self.failed(e));
        }
        let mut checkpoint = None;
        if let (Some(Keeping { checkpoints, .. }), true, None) =
            (&self.keeping, interrupted && self.trainer.steps() > 0, &unkept)
        {
            match self.trainer.last_snapshot() {
                Ok(snapshot) => match checkpoints.write(&snapshot) {
                    Ok(path) => checkpoint = Some(path),
                    Err(e) => unkept = Some(e),
                },
                Err(e) => return Err(self.failed(e)),
            }
        }
        let unkept = unkept.map(|e| self.unkept(e));
        let outcome = self.trainer.finish()?;
        Ok(Ran {
            outcome,
            plan: self.plan,
            parameters: self.parameters,
            steps_planned: self.steps,
            from: self.from,
            first,
            held_out,
            rows,
            time: started.elapsed(),
            memory: memory::now(),
            interrupted,
            checkpoint,
            unkept,
            claim: self.claim.take(),
        })
    }

    /// Where the run can go on all the same.
    fn unkept(&self, e: train::Error) -> Error {
        let newest = self.keeping.as_ref().and_then(|keeping| keeping.checkpoints.newest());
        let error = Error::from(e);
        match newest {
            Some(step) => error.with(format!("`--resume` goes on from step {step}")),
            None => error.with("there is no checkpoint to go on from"),
        }
    }

    /// Keeps what there is of the run, and says where.
    fn failed(mut self, e: train::Error) -> Error {
        let not_finite = matches!(e, train::Error::NotFinite(_));
        let dead = matches!(e, train::Error::DeadAdapters(_));
        let mut error = Error::from(e);
        if self.trainer.steps() == 0 {
            return error;
        }
        let checkpoints = self.keeping.take().map(|keeping| keeping.checkpoints);
        // What is computed once more comes out the same.
        if !not_finite && !dead {
            let Some(checkpoints) = &checkpoints else { return error };
            match self.trainer.snapshot().and_then(|snapshot| checkpoints.write(&snapshot)) {
                Ok(path) => {
                    return error.with(format!("`--resume` goes on from {}", path.display()));
                }
                Err(also) => error = error.with(also),
            }
        }
        let model = self.model;
        match (self.trainer.last_good(checkpoints.as_ref(), not_finite), &self.last_good) {
            (Ok(Some((adapter, step))), Some(path)) => {
                let how = if not_finite { ", at a lower `--lr` say" } else { "" };
                match super::write(path, "adapter", &mut |to| Ok(adapter.write(to, model)?)) {
                    Ok(()) => error.with(format!(
                        "the adapter as it was after step {step} is in {}; `--from` trains on from \
                         it{how}",
                        path.display()
                    )),
                    Err(also) => error.with(also.message()),
                }
            }
            (Err(also), _) => error.with(also),
            _ => error,
        }
    }
}
