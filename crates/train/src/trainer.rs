//! The loop: windows in, an adapter out.

mod snapshots;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

use graph::{Device, Stop};
use model::{Adapter, Model};

use crate::checkpoint::{Snapshot, digest, digest_start};
use crate::epochs::Epochs;
use crate::held_out::{Held, HeldOut};
use crate::moved::{Moved, Summary};
use crate::piece::{self, At};
use crate::step::{Step, Stepped, Windows};
use crate::{
    Error, Example, Gradients, Masks, Optimizer, Parameters, Result, Room, TrainConfig, Window,
    pack,
};

/// What a run reports as it goes.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// Before the first step.
    Start {
        /// Optimizer steps to come.
        steps: u64,
        /// Numbers that move.
        parameters: usize,
        /// Bytes of the arena of the largest graph that the data need.
        arena_bytes: usize,
        /// Bytes each thread scratches on beside it.
        scratch_bytes: usize,
    },
    /// After each optimizer step.
    Step {
        /// From 1.
        step: u64,
        /// The pass over the data it is of, from 1.
        epoch: u64,
        /// Mean loss per weight of the step's tokens, before it moved, in nats.
        loss: f64,
        /// Global norm of the gradient before clipping.
        grad_norm: f64,
        /// Learning rate it used.
        lr: f32,
        /// Rows the step read (padding not counted).
        rows: usize,
    },
    /// After each pass over the data.
    Epoch {
        /// From 1; 0 is before the first step, see [`Trainer::measure_first`].
        epoch: u64,
        /// Mean loss per weight of its tokens, each before its step, in nats.
        loss: f64,
        /// The same of the examples held out, after it; `None` where there are none, and where an
        /// evaluation is not due ([`TrainConfig::eval_every`]).
        held_out: Option<f64>,
    },
    /// Between two steps of a pass over the data, see [`TrainConfig::eval_every`].
    Evaluated {
        /// The step before.
        step: u64,
        /// Mean loss per weight of the examples held out, in nats.
        held_out: f64,
    },
    /// Every so many steps, see [`Trainer::checkpoint_every`]: what the run is at, to be written.
    Checkpoint(Box<Snapshot>),
    /// The evaluations got no better, see [`TrainConfig::patience`]: the run ends here.
    EarlyStop {
        /// The step whose evaluation was the best.
        best: u64,
        /// Its loss.
        held_out: f64,
    },
}

/// What [`Trainer::advance`] came to.
#[derive(Clone, PartialEq, Debug)]
pub enum Advance {
    /// It was stopped; call again.
    Stopped,
    /// Something to report; call again.
    Event(Event),
    /// All epochs are done.
    Done,
}

/// How a run ended.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The adapter; without tensors where there were no targets.
    pub adapter: Adapter,
    /// The model's own tensors that were trained, by name.
    pub weights: BTreeMap<String, Vec<f32>>,
    /// The optimizer with its moments, for a run that goes on from here; as before its first step
    /// where the result is not that of the last one.
    pub optimizer: Optimizer,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Loss of the last step, in nats.
    pub last_loss: f64,
    /// Targets (pairs by their B, and own tensors) that have moved, of all.
    pub moved: (usize, usize),
    /// Experts of targets that have moved which themselves have not, since no token with loss chose
    /// them: `TARGET[EXPERT]`.
    pub unrouted: Vec<String>,
    /// The step the result is of, and its evaluation, where the best one is kept.
    pub best: Option<(u64, f64)>,
}

/// What a run starts from.
#[derive(Default)]
pub struct Start {
    /// An adapter to go on with, and the optimizer that moved it so far; else a fresh one is
    /// drawn from the settings.
    pub from: Option<(Adapter, Optimizer)>,
    /// A device for what the model's own has no kernel for.
    pub fallback: Option<Arc<dyn Device>>,
}

/// What a trainer is at.
enum Work {
    Next,
    Step(Box<Step>),
    HeldOut(Box<HeldOut>),
    /// The last window is run forward once more: no step and no evaluation sees what the last step
    /// came to.
    Proof(Box<HeldOut>),
    /// A snapshot, and what it comes to next.
    Snapshot(Box<Snapshot>, At),
    /// The best parameters so far are copied.
    Keep(Box<Keep>),
    EarlyStop,
    Done,
}

/// The best evaluation so far.
#[derive(Clone, Debug)]
pub(crate) struct Best {
    pub(crate) step: u64,
    pub(crate) loss: f64,
    /// Evaluations since.
    pub(crate) since: u64,
    /// The parameters then, in the order of [`Parameters::names`].
    pub(crate) values: Vec<Vec<f32>>,
}

/// An evaluation that is the best so far, told when its parameters have been copied.
struct Keep {
    best: Best,
    at: At,
    event: Event,
    whole_epoch: bool,
}

/// A training run over a model, which is borrowed or shared (`M`).
///
/// A run is work that can stop between any two tiles: [`Trainer::load`] it with data, then call
/// [`Trainer::advance`] until it is done, or let [`Trainer::run`] do both. What it computes does
/// not depend on where it was stopped.
pub struct Trainer<M> {
    gradients: Gradients<M>,
    /// Without values before [`Trainer::fill`], but those of an adapter it goes on from.
    parameters: Parameters,
    is_filled: bool,
    /// A fresh adapter is drawn.
    draws: bool,
    /// Of the parameters, in order.
    names: Vec<String>,
    /// How many numbers each has.
    lengths: Vec<usize>,
    optimizer: Optimizer,
    moved: Moved,
    config: TrainConfig,
    examples: Arc<[Example]>,
    held_out: Held,
    /// The window that proves what a run came to, where nothing is held out.
    last: Held,
    /// Whether the parameters as they are give a finite loss, where that has been seen.
    is_finite: Option<bool>,
    /// Bytes that each thread scratches on, in the graphs that the data need.
    scratch_bytes: usize,
    /// Of all examples, those held out included.
    data: u64,
    /// Of the adapter it goes on with.
    start: Option<u64>,
    epochs: Epochs,
    steps: u64,
    first_step: u64,
    /// Epoch and window that come next.
    next: (usize, usize),
    /// Of the epoch so far: loss times weight, weight.
    epoch_loss: (f64, f64),
    last_loss: f64,
    best: Option<Best>,
    work: Work,
    /// Events of work that was brought to its end for a snapshot.
    unreported: VecDeque<Event>,
    measure_first: bool,
    checkpoint_every: Option<u64>,
}

impl<M: Deref<Target = Model>> Trainer<M> {
    /// Sets a run up: checks the settings, and differentiates and plans the graph. Nothing is
    /// allocated for the run; [`Trainer::reserve`] does that.
    ///
    /// # Errors
    /// A setting, by field; or the refusal.
    pub fn new(model: M, config: TrainConfig) -> Result<Trainer<M>> {
        Trainer::start(model, config, Start::default())
    }

    /// As [`Trainer::new`], from what there is already.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn start(model: M, config: TrainConfig, start: Start) -> Result<Trainer<M>> {
        config.check()?;
        let TrainConfig { targets, method, weight_decay, .. } = &config;
        let fresh = Optimizer::new(*method, *weight_decay);
        let began = start.from.as_ref().map(|(adapter, moved)| digest_start(adapter, moved));
        let draws = start.from.is_none() && !targets.is_empty();
        let (adapter, optimizer) = match start.from {
            Some((adapter, optimizer)) => {
                if (optimizer.method, optimizer.weight_decay) != (*method, *weight_decay) {
                    let of = |o: &Optimizer| {
                        let own = o.method.settings().into_iter();
                        let all = own.chain([("weight_decay", o.weight_decay)]);
                        let all = all.map(|(name, value)| format!(", `{name}` {value}"));
                        format!("{}{}", o.method.name(), all.collect::<String>())
                    };
                    return Err(Error::Setting(format!(
                        "the optimizer to go on with is {}, the settings say {}; expected the same",
                        of(&optimizer),
                        of(&fresh)
                    )));
                }
                (Some(adapter), optimizer)
            }
            None if targets.is_empty() && config.weights.is_empty() => {
                let why = "`targets` is empty; expected at least one projection or weight";
                return Err(Error::Setting(why.into()));
            }
            None if targets.is_empty() => (None, fresh),
            None => {
                let alpha = config.effective_alpha();
                (Some(Adapter::outline(&model, config.ranks(), alpha)?), fresh)
            }
        };
        let dropout = config.graph.dropout.get();
        if dropout > 0.0 && adapter.is_none() {
            let why = "expected 0 where there is no adapter whose input could be dropped";
            return Err(Error::Setting(format!("`dropout` is {dropout}; {why}")));
        }
        let adapter = adapter.map(|adapter| Adapter { dropout, ..adapter });
        let moved = Moved::new(&model, adapter.as_ref(), &config.weights);
        let empty = config.weights.iter().map(|name| (name.clone(), Vec::new()));
        let parameters = Parameters { adapter, weights: empty.collect() };
        let (names, lengths) = (parameters.names(), parameters.lengths(&model)?);
        optimizer.resume(names.iter().map(String::as_str).zip(lengths.iter().copied()))?;
        let mut gradients = Gradients::new(model, config.graph.clone())?;
        if let Some(walks) = config.walks {
            gradients = gradients.with_walks(walks)?;
        }
        if let Some(device) = start.fallback {
            gradients = gradients.with_fallback(device);
        }
        gradients.plan(&parameters)?;
        Ok(Trainer {
            gradients,
            parameters,
            is_filled: false,
            draws,
            names,
            lengths,
            first_step: optimizer.steps,
            optimizer,
            moved,
            config,
            examples: Arc::new([]),
            held_out: Held::new(Arc::new([]), Vec::new()),
            last: Held::new(Arc::new([]), Vec::new()),
            is_finite: None,
            scratch_bytes: 0,
            data: 0,
            start: began,
            epochs: Epochs::new(0, &[], Room::shared(0, 0))?,
            steps: 0,
            next: (0, 0),
            epoch_loss: (0.0, 0.0),
            last_loss: f64::NAN,
            best: None,
            work: Work::Done,
            unreported: VecDeque::new(),
            measure_first: false,
            checkpoint_every: None,
        })
    }

    /// The gradient graphs it runs.
    pub fn gradients(&self) -> &Gradients<M> {
        &self.gradients
    }

    /// What the graphs of all steps and evaluations to come cost, after [`Trainer::load`].
    ///
    /// # Errors
    /// As [`Gradients::prepare`].
    pub fn cost(&mut self) -> Result<graph::Cost> {
        let mut evaluation = graph::Cost::default();
        for window in self.held_out.windows() {
            evaluation += self.gradients.cost(&window, true, &self.parameters)?;
        }
        let mut cost = graph::Cost::default();
        if matches!(&self.work, Work::HeldOut(_)) {
            cost += evaluation;
        }
        let TrainConfig { accumulate, eval_every: every, .. } = self.config;
        let mut step = self.steps();
        let (first, next) = self.next;
        for e in first..self.epochs.counts().len() {
            while !self.epochs.advance(e) {}
            let rest = if e == first { next } else { 0 }..self.epochs.len();
            for chosen in rest.clone().filter_map(|i| self.epochs.window(i)) {
                let window = Window::of(&self.examples, &chosen);
                cost += self.gradients.cost(&window, false, &self.parameters)?;
            }
            let steps = rest.len().div_ceil(accumulate) as u64;
            // As `after_step` and `measures_epoch` have them.
            let last = e + 1 == self.epochs.counts().len();
            let due = |at: &u64| match (every, *at == steps) {
                (0, ends) => ends,
                (_, true) if last => true,
                _ => (step + at).is_multiple_of(every),
            };
            let evaluations = (1..=steps).filter(due).count();
            (0..evaluations).for_each(|_| cost += evaluation);
            step += steps;
        }
        for window in self.last.windows() {
            cost += self.gradients.cost(&window, true, &self.parameters)?;
        }
        Ok(cost)
    }

    /// What a run that has not begun started from, so that another can, with other settings.
    pub fn into_start(self) -> Start {
        let from = self.parameters.adapter.filter(|_| !self.draws);
        Start {
            from: from.map(|adapter| (adapter, self.optimizer)),
            fallback: self.gradients.into_fallback(),
        }
    }

    /// The settings.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// The parameters as they are; those that are not there yet are drawn or read.
    ///
    /// # Errors
    /// When memory is out, or a tensor of the model cannot be read again.
    pub fn parameters(&mut self) -> Result<&Parameters> {
        self.fill()?;
        Ok(&self.parameters)
    }

    /// Draws and reads the values that are not there yet: a run that is only planned, or refused,
    /// takes no memory for them.
    fn fill(&mut self) -> Result<()> {
        if self.is_filled {
            return Ok(());
        }
        let model = self.gradients.model();
        if let (true, Some(outline)) = (self.draws, &self.parameters.adapter) {
            let (alpha, seed) = (self.config.effective_alpha(), self.config.seed);
            let fresh = Adapter::fresh(model, self.config.ranks(), alpha, seed)?;
            let dropout = outline.dropout;
            self.parameters.adapter = Some(Adapter { dropout, ..fresh });
        }
        for (name, values) in &mut self.parameters.weights {
            *values = model.read_f32(name)?;
        }
        for (name, &planned) in self.names.iter().zip(&self.lengths) {
            let found = self.parameters.value_mut(name).map_or(0, |values| values.len());
            if found != planned {
                return Err(Error::Stopped(format!(
                    "parameter `{name}` has {found} numbers, {planned} were planned"
                )));
            }
        }
        self.is_filled = true;
        Ok(())
    }

    /// The plan of the largest graph, which says exactly what a run takes.
    ///
    /// # Errors
    /// As [`Gradients::plan`].
    pub fn plan(&mut self) -> Result<&graph::Placed> {
        self.gradients.plan(&self.parameters)
    }

    /// Packs the data of all epochs and builds every graph they need; no memory for runs is taken
    /// yet. `held_out` is measured as [`TrainConfig::eval_every`] says.
    ///
    /// # Errors
    /// An example that does not fit a window; the refusal.
    pub fn load(
        &mut self,
        examples: impl Into<Arc<[Example]>>,
        held_out: impl Into<Arc<[Example]>>,
    ) -> Result<Event> {
        let (examples, held_out) = (examples.into(), held_out.into());
        if examples.is_empty() {
            return Err(Error::Data("there are no examples to learn from".into()));
        }
        let vocab = self.gradients.vocab();
        let context = self.gradients.model().geometry().context;
        for (i, example) in examples.iter().chain(&*held_out).enumerate() {
            if example.rows() > context {
                return Err(Error::Data(format!(
                    "example {} has {} tokens, the context of the model {context}; use a smaller \
                     window",
                    i + 1,
                    example.tokens.len()
                )));
            }
            if let Some(bad) = example.tokens.iter().find(|&&t| t as usize >= vocab) {
                let message = format!(
                    "example {}: token {bad} is outside of the vocabulary of {vocab}",
                    i + 1
                );
                return Err(Error::Data(message));
            }
        }
        let (mut arena_bytes, mut scratch_bytes) = (0, 0);
        let mut prepare = |gradients: &mut Gradients<M>, window: &Window, forward| {
            let (arena, scratch) = gradients.prepare(window, forward, &self.parameters)?;
            (arena_bytes, scratch_bytes) = (arena_bytes.max(arena), scratch_bytes.max(scratch));
            Ok::<(), Error>(())
        };
        let all: Vec<usize> = (0..held_out.len()).collect();
        let room = self.gradients.room();
        let windows = pack(&held_out, &all, room)?;
        let held_out = Held::new(held_out, windows);
        for window in held_out.windows() {
            prepare(&mut self.gradients, &window, true)?;
        }
        let mut epochs = Epochs::new(self.config.seed, &examples, room)?;
        let mut last = Vec::new();
        for _ in 0..self.config.epochs {
            epochs.add();
            for window in (0..epochs.len()).filter_map(|i| epochs.window(i)) {
                prepare(&mut self.gradients, &Window::of(&examples, &window), false)?;
                last = window;
            }
        }
        self.last = match held_out.is_empty() {
            true => Held::last(examples.clone(), last),
            false => Held::new(Arc::new([]), Vec::new()),
        };
        for window in self.last.windows() {
            prepare(&mut self.gradients, &window, true)?;
        }
        self.scratch_bytes = scratch_bytes;
        let accumulate = self.config.accumulate;
        self.steps = epochs.counts().iter().map(|n| n.div_ceil(accumulate) as u64).sum();
        self.epochs = epochs;
        let TrainConfig { patience, keep_best, eval_every, .. } = &self.config;
        let needed = [
            ("patience", patience.is_some()),
            ("keep_best", *keep_best),
            ("eval_every", *eval_every > 0),
        ];
        if let Some((name, _)) = needed.iter().find(|(_, set)| *set && held_out.is_empty()) {
            let message = format!("`{name}` is set, but nothing is held out to evaluate");
            return Err(Error::Setting(message));
        }
        self.data = digest([&*examples, &*held_out.examples]);
        (self.examples, self.held_out) = (examples, held_out);
        self.next = (0, 0);
        self.is_finite = None;
        self.work = match self.measure_first {
            true => Work::HeldOut(Box::new(HeldOut::new(true))),
            false => Work::Next,
        };
        let parameters = self.lengths.iter().sum();
        Ok(Event::Start { steps: self.steps, parameters, arena_bytes, scratch_bytes })
    }

    /// What is held out is measured before the first step too, and reported as epoch 0.
    pub fn measure_first(&mut self) {
        self.measure_first = true;
    }

    /// Reports an [`Event::Checkpoint`] after every so many steps; with 0 there is only what
    /// [`Trainer::last_snapshot`] gives. The memory of the copies is planned.
    pub fn checkpoint_every(&mut self, steps: u64) {
        self.checkpoint_every = Some(steps);
    }

    /// Bytes that a run takes beside the model and the data: arenas, what crosses between devices,
    /// and for each number that moves itself, its gradient, its moments, the best so far where that
    /// is kept, and all but the gradient once more where checkpoints are taken; and a piece of one
    /// tensor's gradient of one window, before it is added to those of others.
    pub fn planned_bytes(&self) -> usize {
        self.gradients.planned_bytes() + self.parameter_bytes()
    }

    /// The part of [`Trainer::planned_bytes`] that depends on how many numbers move; after
    /// [`Trainer::load`], since it counts steps.
    pub fn parameter_bytes(&self) -> usize {
        let kept = 1 + self.config.method.moments() + usize::from(self.config.keeps_best());
        let all = self.lengths.iter().sum::<usize>() * 4;
        let longest = self.lengths.iter().max().copied().unwrap_or(0) * 4;
        let gradients = all + longest.min(piece::BYTES);
        let copied = match self.checkpoint_every {
            None => 0,
            Some(every) if every > 0 && every <= self.steps => all * kept,
            // One that is stopped before copies less, and gives memory back: see `last_snapshot`.
            Some(_) => {
                let copied = all * (kept - self.config.method.moments());
                copied.saturating_sub(gradients + self.gradients.planned_bytes())
            }
        };
        all * kept + gradients + copied
    }

    /// Bytes that all threads scratch on beside [`Trainer::planned_bytes`], after
    /// [`Trainer::load`].
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes * self.gradients.model().device().threads()
    }

    /// Bytes of the data of [`Trainer::load`], and of the order they are in.
    pub fn data_bytes(&self) -> usize {
        let of = |example: &Example| {
            size_of_val(&*example.tokens) + size_of_val(&*example.weights) + size_of::<Example>()
        };
        let bytes = |examples: &[Example]| examples.iter().map(of).sum::<usize>();
        let held_out = &self.held_out.examples;
        let shared = Arc::ptr_eq(held_out, &self.examples);
        let orders = self.epochs.bytes() + self.held_out.bytes() + self.last.bytes();
        bytes(&self.examples) + if shared { 0 } else { bytes(held_out) } + orders
    }

    /// Bytes of parameters whose values are there, those of an adapter it goes on from at first: a
    /// part of [`Trainer::planned_bytes`] that has been taken.
    pub fn held_bytes(&self) -> usize {
        self.parameters.held() * 4
    }

    /// Optimizer steps taken so far.
    pub fn steps(&self) -> u64 {
        self.optimizer.steps - self.first_step
    }

    /// Takes the memory of the run, and draws and reads what moves.
    ///
    /// # Errors
    /// When memory is out, or a tensor of the model cannot be read again.
    pub fn reserve(&mut self) -> Result<()> {
        self.fill()?;
        self.gradients.reserve()
    }

    /// Goes on until something is worth reporting, the run is done, or `stop` says so.
    ///
    /// # Errors
    /// As [`Gradients::of`]; the parameters are those of the last whole step then.
    pub fn advance(&mut self, stop: &dyn Stop) -> Result<Advance> {
        match self.unreported.pop_front() {
            Some(event) => Ok(Advance::Event(event)),
            None => self.go_on(stop),
        }
    }

    fn go_on(&mut self, stop: &dyn Stop) -> Result<Advance> {
        self.fill()?;
        loop {
            let measures_epoch = self.measures_epoch();
            match &mut self.work {
                Work::Done => return Ok(Advance::Done),
                Work::Next => {
                    if let Some(work) = self.following() {
                        self.work = work;
                    }
                }
                Work::Step(step) => {
                    let Trainer { gradients, parameters, optimizer, moved, .. } = self;
                    let Some(stepped) =
                        step.advance(gradients, parameters, optimizer, moved, stop)?
                    else {
                        return Ok(Advance::Stopped);
                    };
                    // In this order: what comes next may be a snapshot, which has the step in it.
                    let event = self.stepped(stepped);
                    self.work = self.after_step();
                    return Ok(Advance::Event(event));
                }
                Work::HeldOut(held_out) => {
                    let due = !held_out.whole_epoch || measures_epoch;
                    let due = due && !self.held_out.is_empty();
                    let Trainer { gradients, parameters, optimizer, held_out: held, .. } = self;
                    let steps = optimizer.steps;
                    let whole_epoch = held_out.whole_epoch;
                    let loss = match due {
                        true => held_out.advance(held, gradients, parameters, steps, stop),
                        false => Ok(Some(0.0)),
                    };
                    if due {
                        self.note_finite(&loss);
                    }
                    let Some(loss) = loss? else { return Ok(Advance::Stopped) };
                    let loss = due.then_some(loss);
                    if let Some(event) = self.evaluated(whole_epoch, loss) {
                        return Ok(Advance::Event(event));
                    }
                }
                Work::Proof(proof) => {
                    let Trainer { gradients, parameters, optimizer, last, .. } = self;
                    let steps = optimizer.steps;
                    let loss = proof.advance(last, gradients, parameters, steps, stop);
                    self.note_finite(&loss);
                    if loss?.is_none() {
                        return Ok(Advance::Stopped);
                    }
                    self.work = Work::Done;
                }
                Work::Keep(_) => {
                    if let Some(event) = self.keep() {
                        return Ok(Advance::Event(event));
                    }
                }
                Work::Snapshot(..) => {
                    if let Some(event) = self.snapshotting() {
                        return Ok(Advance::Event(event));
                    }
                }
                Work::EarlyStop => {
                    self.work = Work::Done;
                    if let Some(Best { step, loss, .. }) = &self.best {
                        let event = Event::EarlyStop { best: *step, held_out: *loss };
                        return Ok(Advance::Event(event));
                    }
                }
            }
            if stop.should_stop() {
                return Ok(Advance::Stopped);
            }
        }
    }

    /// The work that comes next; `None` after a piece of that of finding it, where an epoch begins.
    fn following(&mut self) -> Option<Work> {
        let (epoch, window) = self.next;
        if epoch >= self.epochs.counts().len() {
            return Some(match self.lacks_proof() {
                true => Work::Proof(Box::new(HeldOut::new(true))),
                false => Work::Done,
            });
        }
        if !self.epochs.advance(epoch) {
            return None;
        }
        let end = self.epochs.len().min(window + self.config.accumulate);
        let chosen: Vec<_> = (window..end).filter_map(|i| self.epochs.window(i)).collect();
        if chosen.is_empty() {
            return Some(Work::HeldOut(Box::new(HeldOut::new(true))));
        }
        let factor = self.config.schedule.factor(self.steps(), self.steps, self.config.warmup);
        let lr = self.config.lr * factor;
        let windows = Windows::Of(self.examples.clone(), chosen);
        Some(Work::Step(Box::new(self.step_of(windows, lr))))
    }

    /// True where nothing has been computed with what the run came to.
    fn lacks_proof(&self) -> bool {
        self.steps() > 0 && self.is_finite.is_none() && self.best.is_none()
    }

    /// Takes note of what a loss says of the parameters as they are.
    fn note_finite(&mut self, loss: &Result<Option<f64>>) {
        match loss {
            Ok(Some(_)) => self.is_finite = Some(true),
            Err(Error::NotFinite(_)) => self.is_finite = Some(false),
            _ => {}
        }
    }

    /// Whether what is held out is measured where the epoch at work ends: before the first step,
    /// where nothing is said about steps, at a step whose turn it is, and at the run's end.
    fn measures_epoch(&self) -> bool {
        let every = self.config.eval_every;
        let last = self.next.0 + 1 >= self.epochs.counts().len();
        every == 0 || self.steps().is_multiple_of(every) || last
    }

    /// The next step. What it drops follows from how many the optimizer has taken, those of the
    /// run it goes on from among them.
    fn step_of(&self, windows: Windows, lr: f32) -> Step {
        let masks = Masks::of(self.config.seed, self.optimizer.steps);
        Step::new(windows, masks, (lr, self.config.clip), &self.parameters)
    }

    /// The work that comes after a step that is counted and has moved all.
    fn after_step(&mut self) -> Work {
        // Only now, so that a snapshot within the step is of the one before.
        let (epoch, window) = self.next;
        let windows = self.epochs.counts().get(epoch).copied().unwrap_or(0);
        self.next.1 = (window + self.config.accumulate).min(windows);
        let every = self.config.eval_every;
        let due = every > 0 && self.steps().is_multiple_of(every) && self.next.1 < windows;
        match due && !self.held_out.is_empty() {
            true => Work::HeldOut(Box::new(HeldOut::new(false))),
            false => self.after_evaluation(),
        }
    }

    fn after_evaluation(&mut self) -> Work {
        let every = self.checkpoint_every.unwrap_or(0);
        match every > 0 && self.steps() > 0 && self.steps().is_multiple_of(every) {
            true => {
                // No evaluation is due any more: it would be what is at work.
                self.work = Work::Next;
                Work::Snapshot(Box::new(self.new_snapshot()), At::default())
            }
            false => Work::Next,
        }
    }

    fn stepped(&mut self, stepped: Stepped) -> Event {
        let Stepped { loss, norm, lr, rows, total } = stepped;
        self.last_loss = loss;
        self.is_finite = None;
        self.epoch_loss.0 += loss * total;
        self.epoch_loss.1 += total;
        let epoch = self.next.0 as u64 + 1;
        Event::Step { step: self.steps(), epoch, loss, grad_norm: norm, lr, rows }
    }

    /// Takes note of an evaluation; what there is to report, unless it is the best so far, whose
    /// parameters are copied first.
    fn evaluated(&mut self, whole_epoch: bool, held_out: Option<f64>) -> Option<Event> {
        let first = self.next == (0, 0);
        let step = self.steps();
        let event = match (whole_epoch, held_out) {
            (false, Some(held_out)) => Event::Evaluated { step, held_out },
            _ => {
                let (loss, weight) = std::mem::take(&mut self.epoch_loss);
                self.next = (self.next.0 + usize::from(!first), 0);
                Event::Epoch { epoch: self.next.0 as u64, loss: loss / weight, held_out }
            }
        };
        let counts = held_out.filter(|_| !first && self.config.keeps_best());
        let mut enough = false;
        match (counts, &mut self.best) {
            (None, _) => {}
            (Some(loss), Some(best)) if best.loss <= loss => {
                best.since += 1;
                enough = self.config.patience.is_some_and(|patience| best.since >= patience);
            }
            (Some(loss), best) => {
                // Written over in place: the memory is in the plan once.
                let mut values = best.take().map_or_else(Vec::new, |best| best.values);
                values.resize(self.names.len(), Vec::new());
                let best = Best { step, loss, since: 0, values };
                let keep = Keep { best, at: At::default(), event, whole_epoch };
                self.work = Work::Keep(Box::new(keep));
                return None;
            }
        }
        self.work = match enough {
            true => Work::EarlyStop,
            false => self.after(whole_epoch),
        };
        Some(event)
    }

    /// The work that comes after an evaluation.
    fn after(&mut self, whole_epoch: bool) -> Work {
        if whole_epoch { Work::Next } else { self.after_evaluation() }
    }

    /// Copies the next piece of the best parameters; the event when it was the last.
    fn keep(&mut self) -> Option<Event> {
        let Work::Keep(mut keep) = std::mem::replace(&mut self.work, Work::Next) else {
            return None;
        };
        let at = keep.at;
        if let (Some(name), Some(to)) = (self.names.get(at.list), keep.best.values.get_mut(at.list))
        {
            let values = self.parameters.value_mut(name).unwrap_or(&mut []);
            if to.len() != values.len() {
                *to = vec![0.0; values.len()];
            }
            let range = at.piece(values.len());
            let of = values.get(range.clone()).unwrap_or(&[]);
            to.get_mut(range).unwrap_or(&mut []).copy_from_slice(of);
            keep.at = at.after(values.len());
            self.work = Work::Keep(keep);
            return None;
        }
        let Keep { best, event, whole_epoch, .. } = *keep;
        self.best = Some(best);
        self.work = self.after(whole_epoch);
        Some(event)
    }

    /// One optimizer step over windows: their loss is the weighted mean over all their tokens,
    /// however they are split. Returns the loss and the gradient's norm, before the step.
    ///
    /// # Errors
    /// As [`Gradients::of`]; the parameters have not moved then.
    pub fn step(&mut self, windows: &[Window], lr: f32) -> Result<(f64, f64)> {
        self.fill()?;
        self.is_finite = None;
        let mut step = self.step_of(Windows::Given(windows.to_vec()), lr);
        let Trainer { gradients, parameters, optimizer, moved, .. } = self;
        loop {
            if let Some(done) = step.advance(gradients, parameters, optimizer, moved, &())? {
                return Ok((done.loss, done.norm));
            }
        }
    }

    /// Runs all epochs. `on` hears of every event; when it returns false the run ends there, and
    /// the adapter is what it has become.
    ///
    /// # Errors
    /// As [`Trainer::advance`] and [`Trainer::finish`].
    pub fn run(
        mut self,
        examples: &[Example],
        on: &mut dyn FnMut(Event) -> bool,
    ) -> Result<Outcome> {
        let start = self.load(examples.to_vec(), Vec::new())?;
        if !on(start) {
            return self.finish();
        }
        self.reserve()?;
        loop {
            match self.advance(&())? {
                Advance::Stopped => {}
                Advance::Done => return self.finish(),
                Advance::Event(event) => {
                    if !on(event) {
                        return self.finish();
                    }
                }
            }
        }
    }

    /// Whether every target has moved, and every expert of one that a token with loss chose, of a
    /// run that is at its end; before that it is too early to say, in the warm-up above all.
    ///
    /// # Errors
    /// [`Error::DeadAdapters`], which names those that have not.
    pub fn check_moved(&self) -> Result<()> {
        let (steps, summary) = (self.steps(), self.moved.summary());
        let is_over = matches!(self.work, Work::Done);
        let Summary { dead, unchanged, moved, .. } = summary;
        let mut why = Vec::new();
        if !dead.is_empty() {
            why.push(format!(
                "no gradient reached {}: leave them out, or look for zeros in the tensors of the \
                 model behind them",
                dead.join(", ")
            ));
        }
        if !unchanged.is_empty() {
            why.push(format!(
                "every step was too small to change a value of {}: raise the learning rate",
                unchanged.join(", ")
            ));
        }
        if !is_over || steps == 0 || why.is_empty() {
            return Ok(());
        }
        Err(Error::DeadAdapters(format!(
            "after {steps} steps {} of {} targets have not moved: {}",
            moved.1 - moved.0,
            moved.1,
            why.join("; ")
        )))
    }

    /// Whether what the run came to gives a finite loss, also where it ends before its time: unless
    /// that has been seen, a window is run forward. A step that has begun to move parameters is
    /// brought to its end first.
    ///
    /// # Errors
    /// [`Error::NotFinite`], which says what was not; or a fault.
    pub fn check_finite(&mut self) -> Result<()> {
        self.fill()?;
        self.settle()?;
        if !self.lacks_proof() {
            return Ok(());
        }
        let Trainer { gradients, parameters, optimizer, held_out, last, .. } = self;
        let of = if held_out.is_empty() { last } else { held_out };
        let mut proof = HeldOut::new(true);
        let loss = loop {
            let loss = proof.advance(of, gradients, parameters, optimizer.steps, &());
            if !matches!(loss, Ok(None)) {
                break loss;
            }
        };
        self.note_finite(&loss);
        loss.map(|_| ())
    }

    /// Ends the run where it is: a step that has begun to move parameters is brought to its end,
    /// and the best parameters take the place of the last where they are kept.
    ///
    /// # Errors
    /// As [`Trainer::check_moved`] and [`Trainer::check_finite`].
    pub fn finish(mut self) -> Result<Outcome> {
        self.check_finite()?;
        self.check_moved()?;
        let (steps, Summary { unrouted, moved, .. }) = (self.steps(), self.moved.summary());
        let best = self.best.as_ref().map(|b| (b.step, b.loss));
        if let Some(Best { step, values, .. }) = self.best.take() {
            // What the optimizer keeps is of the last step, and of no use beside another's values.
            if step != steps {
                let Optimizer { method, weight_decay, .. } = self.optimizer;
                self.optimizer = Optimizer::new(method, weight_decay);
            }
            for (name, kept) in self.names.iter().zip(values) {
                self.parameters.value_mut(name).unwrap_or(&mut []).copy_from_slice(&kept);
            }
        }
        let none = Adapter { alpha: self.config.alpha, dropout: 0.0, tensors: BTreeMap::new() };
        Ok(Outcome {
            adapter: self.parameters.adapter.unwrap_or(none),
            weights: self.parameters.weights,
            optimizer: self.optimizer,
            steps,
            last_loss: self.last_loss,
            moved,
            unrouted,
            best,
        })
    }
}
