//! The loop: windows in, an adapter out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use graph::{Device, Stop};
use model::{Adapter, Model, Projection};

use crate::gradients::Pass;
use crate::step::{Step, Stepped, total_weight};
use crate::{
    AdamW, Error, Example, Gradients, GraphConfig, Parameters, Result, Schedule, Window, pack,
};

/// The settings of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainConfig {
    /// Base tensors to adapt; without any there is no adapter.
    pub targets: Vec<String>,
    /// Float tensors of the model that are trained themselves.
    pub weights: Vec<String>,
    /// Rank of every pair, 1 to 4096.
    pub rank: usize,
    /// The adapter's effect is multiplied by `alpha / rank`.
    pub alpha: f32,
    /// Peak learning rate, above 0 and up to 1.
    pub lr: f32,
    /// How it changes.
    pub schedule: Schedule,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Decoupled weight decay, 0 to 1.
    pub weight_decay: f32,
    /// Passes over the data, 1 to 10,000.
    pub epochs: u64,
    /// Windows per optimizer step, 1 to 1,024.
    pub accumulate: usize,
    /// Gradients are scaled down to this global norm; 0 leaves them.
    pub clip: f32,
    /// Seeds the matrices and the order of the data.
    pub seed: u64,
    /// The graph.
    pub graph: GraphConfig,
}

impl TrainConfig {
    fn check(&self) -> Result<()> {
        let wrong = |field: &str, found: String, wanted: &str| {
            Err(Error::Setting(format!("`{field}` is {found}; expected {wanted}")))
        };
        if !(self.lr > 0.0 && self.lr <= 1.0) {
            return wrong("lr", self.lr.to_string(), "a number above 0 and up to 1");
        }
        if !(0.0..=1.0).contains(&self.weight_decay) {
            return wrong("weight_decay", self.weight_decay.to_string(), "a number from 0 to 1");
        }
        if !(self.clip >= 0.0 && self.clip.is_finite()) {
            return wrong("clip", self.clip.to_string(), "0 or a positive number");
        }
        if self.epochs == 0 || self.epochs > 10_000 {
            return wrong("epochs", self.epochs.to_string(), "1 to 10,000");
        }
        if self.accumulate == 0 || self.accumulate > 1024 {
            return wrong("accumulate", self.accumulate.to_string(), "1 to 1,024");
        }
        Ok(())
    }
}

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
        /// The same of the examples held out, after it; `None` where there are none.
        held_out: Option<f64>,
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
    /// The optimizer with its moments, for a run that goes on from here.
    pub optimizer: AdamW,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Loss of the last step, in nats.
    pub last_loss: f64,
    /// Tensor pairs whose B moved away from zero, of all.
    pub moved: (usize, usize),
}

/// What a run starts from.
#[derive(Default)]
pub struct Start {
    /// An adapter to go on with, and the optimizer that moved it so far; else a fresh one is
    /// drawn from the settings.
    pub from: Option<(Adapter, AdamW)>,
    /// A device for what the model's own has no kernel for.
    pub fallback: Option<Arc<dyn Device>>,
}

/// What a trainer is at.
enum Work {
    Next,
    Step(Box<Step>),
    /// The loss of the examples held out, after an epoch: the next window, and the sum so far.
    HeldOut {
        window: usize,
        pass: Option<Pass>,
        loss: f64,
    },
    Done,
}

/// A training run over a model, which is borrowed or shared (`M`).
///
/// A run is work that can stop between any two tiles: [`Trainer::load`] it with data, then call
/// [`Trainer::advance`] until it is done, or let [`Trainer::run`] do both. What it computes does
/// not depend on where it was stopped.
pub struct Trainer<M> {
    gradients: Gradients<M>,
    parameters: Parameters,
    optimizer: AdamW,
    config: TrainConfig,
    examples: Vec<Example>,
    held_out: Vec<Window>,
    /// Per epoch, per window, indices of examples.
    epochs: Vec<Vec<Vec<usize>>>,
    steps: u64,
    first_step: u64,
    /// Epoch and window that come next.
    next: (usize, usize),
    /// Of the epoch so far: loss times weight, weight.
    epoch_loss: (f64, f64),
    last_loss: f64,
    work: Work,
    measure_first: bool,
}

impl<M: Deref<Target = Model>> Trainer<M> {
    /// Sets a run up: checks the settings, draws a fresh adapter, and differentiates and plans
    /// the graph.
    ///
    /// # Errors
    /// A setting, by field; or the refusal, before anything is allocated for the run.
    pub fn new(model: M, config: TrainConfig) -> Result<Trainer<M>> {
        Trainer::start(model, config, Start::default())
    }

    /// As [`Trainer::new`], from what there is already.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn start(model: M, config: TrainConfig, start: Start) -> Result<Trainer<M>> {
        config.check()?;
        let TrainConfig { targets, rank, alpha, seed, .. } = &config;
        let (adapter, optimizer) = match start.from {
            Some((adapter, optimizer)) => (Some(adapter), optimizer),
            None if targets.is_empty() && config.weights.is_empty() => {
                let why = "`targets` is empty; expected at least one projection or weight";
                return Err(Error::Setting(why.into()));
            }
            None if targets.is_empty() => (None, AdamW::new(config.weight_decay)),
            None => {
                let adapter = Adapter::fresh(&model, targets, *rank, *alpha, *seed)?;
                (Some(adapter), AdamW::new(config.weight_decay))
            }
        };
        // Planned before a tensor is read, so that what is refused costs nothing.
        let empty = config.weights.iter().map(|name| (name.clone(), Vec::new()));
        let mut parameters = Parameters { adapter, weights: empty.collect() };
        let mut gradients = Gradients::new(model, config.graph.clone())?;
        if let Some(device) = start.fallback {
            gradients = gradients.with_fallback(device);
        }
        let mut lengths: Vec<(String, usize)> = Vec::new();
        for name in parameters.names() {
            let len = parameters.value_mut(&name).map_or(0, |values| values.len());
            lengths.extend((len > 0).then_some((name, len)));
        }
        optimizer.resume(lengths.iter().map(|(name, len)| (name.as_str(), *len)))?;
        gradients.plan(&parameters)?;
        for (name, values) in &mut parameters.weights {
            *values = gradients.model().read_f32(name)?;
            optimizer.resume(std::iter::once((name.as_str(), values.len())))?;
        }
        Ok(Trainer {
            gradients,
            parameters,
            first_step: optimizer.steps,
            optimizer,
            config,
            examples: Vec::new(),
            held_out: Vec::new(),
            epochs: Vec::new(),
            steps: 0,
            next: (0, 0),
            epoch_loss: (0.0, 0.0),
            last_loss: f64::NAN,
            work: Work::Done,
            measure_first: false,
        })
    }

    /// The gradient graphs it runs.
    pub fn gradients(&self) -> &Gradients<M> {
        &self.gradients
    }

    /// The parameters as they are.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The plan of the largest graph, which says exactly what a run takes.
    ///
    /// # Errors
    /// As [`Gradients::plan`].
    pub fn plan(&mut self) -> Result<&graph::Placed> {
        self.gradients.plan(&self.parameters)
    }

    /// Packs the data of all epochs and builds every graph they need; no memory for runs is taken
    /// yet. `held_out` is measured after each epoch.
    ///
    /// # Errors
    /// An example that does not fit a window; the refusal.
    pub fn load(&mut self, examples: Vec<Example>, held_out: Vec<Example>) -> Result<Event> {
        let vocab = self.gradients.vocab();
        for (i, example) in examples.iter().chain(&held_out).enumerate() {
            if let Some(bad) = example.tokens.iter().find(|&&t| t as usize >= vocab) {
                let message = format!(
                    "example {}: token {bad} is outside of the vocabulary of {vocab}",
                    i + 1
                );
                return Err(Error::Data(message));
            }
        }
        let mut random = text::sampler::Rng::new(self.config.seed ^ 0x6f72_6465_7200);
        let mut order: Vec<usize> = (0..examples.len()).collect();
        let (rows, most) = (self.config.graph.rows, self.gradients.most_sequences());
        // Every epoch packs its own order, so the number of steps is known by doing it.
        self.epochs.clear();
        for _ in 0..self.config.epochs {
            for i in (1..order.len()).rev() {
                order.swap(i, (random.next_f64() * (i + 1) as f64) as usize);
            }
            self.epochs.push(pack(&examples, &order, rows, most)?);
        }
        let accumulate = self.config.accumulate;
        self.steps = self.epochs.iter().map(|e| e.len().div_ceil(accumulate) as u64).sum();
        let all: Vec<usize> = (0..held_out.len()).collect();
        let packed = pack(&held_out, &all, rows, most)?;
        self.held_out = packed.iter().map(|w| Window::of(&held_out, w)).collect();
        let labelled = |w: &Window| w.examples.iter().map(Example::labelled).sum::<usize>();
        for window in &self.held_out {
            self.gradients.prepare(labelled(window), true, &self.parameters)?;
        }
        let (mut arena_bytes, mut scratch_bytes) = (0, 0);
        for window in self.epochs.iter().flatten() {
            let labelled = labelled(&Window::of(&examples, window));
            let graph = self.gradients.plan_for(labelled, &self.parameters)?;
            arena_bytes = arena_bytes.max(graph.arena_bytes());
            scratch_bytes = scratch_bytes.max(graph.scratch_bytes());
        }
        self.examples = examples;
        self.next = (0, 0);
        self.work = match self.measure_first {
            true => Work::HeldOut { window: 0, pass: None, loss: 0.0 },
            false => Work::Next,
        };
        let parameters = self.parameters.count();
        Ok(Event::Start { steps: self.steps, parameters, arena_bytes, scratch_bytes })
    }

    /// What is held out is measured before the first step too, and reported as epoch 0.
    pub fn measure_first(&mut self) {
        self.measure_first = true;
    }

    /// Bytes that a run takes beside the model: arenas, what crosses between devices, and five
    /// numbers for each that moves (itself, its gradient twice, two moments).
    pub fn planned_bytes(&self) -> usize {
        self.gradients.planned_bytes() + self.parameters.count() * 5 * 4
    }

    /// Takes the memory of the run.
    ///
    /// # Errors
    /// When memory is out.
    pub fn reserve(&mut self) -> Result<()> {
        self.gradients.reserve()
    }

    /// Goes on until something is worth reporting, the run is done, or `stop` says so.
    ///
    /// # Errors
    /// As [`Gradients::of`]; the parameters are those of the last whole step then.
    pub fn advance(&mut self, stop: &dyn Stop) -> Result<Advance> {
        loop {
            match &mut self.work {
                Work::Done => return Ok(Advance::Done),
                Work::Next => self.work = self.following(),
                Work::Step(step) => {
                    let Trainer { gradients, parameters, optimizer, .. } = self;
                    let Some(stepped) = step.advance(gradients, parameters, optimizer, stop)?
                    else {
                        return Ok(Advance::Stopped);
                    };
                    self.work = Work::Next;
                    return Ok(Advance::Event(self.stepped(stepped)));
                }
                Work::HeldOut { window, pass, loss } => {
                    let total = total_weight(&self.held_out);
                    let Some(next) = self.held_out.get(*window) else {
                        let held_out = (!self.held_out.is_empty()).then_some(*loss);
                        let event = self.end_of_epoch(held_out);
                        return Ok(Advance::Event(event));
                    };
                    let Trainer { gradients, parameters, .. } = self;
                    if pass.is_none() {
                        *pass = Some(gradients.begin(next, total, true, parameters)?);
                    }
                    let Some(running) = pass else { continue };
                    if !gradients.advance(running, parameters, stop)? {
                        return Ok(Advance::Stopped);
                    }
                    *loss += gradients.loss(running)?;
                    *pass = None;
                    *window += 1;
                }
            }
            if stop.should_stop() {
                return Ok(Advance::Stopped);
            }
        }
    }

    /// The work that comes next.
    fn following(&mut self) -> Work {
        let (epoch, window) = self.next;
        let Some(windows) = self.epochs.get(epoch) else { return Work::Done };
        let rest = windows.get(window..).unwrap_or(&[]);
        let Some(chunk) = rest.chunks(self.config.accumulate).next() else {
            return Work::HeldOut { window: 0, pass: None, loss: 0.0 };
        };
        let windows = chunk.iter().map(|w| Window::of(&self.examples, w)).collect();
        self.next = (epoch, window + chunk.len());
        let done = self.optimizer.steps - self.first_step;
        let factor = self.config.schedule.factor(done, self.steps, self.config.warmup);
        let lr = self.config.lr * factor;
        Work::Step(Box::new(Step::new(windows, lr, self.config.clip, &self.parameters)))
    }

    fn stepped(&mut self, stepped: Stepped) -> Event {
        let Stepped { loss, norm, lr, rows, total } = stepped;
        self.last_loss = loss;
        self.epoch_loss.0 += loss * total;
        self.epoch_loss.1 += total;
        let step = self.optimizer.steps - self.first_step;
        Event::Step { step, loss, grad_norm: norm, lr, rows }
    }

    fn end_of_epoch(&mut self, held_out: Option<f64>) -> Event {
        let (loss, weight) = std::mem::take(&mut self.epoch_loss);
        let first = self.next == (0, 0);
        self.next = (self.next.0 + usize::from(!first), 0);
        self.work = Work::Next;
        Event::Epoch { epoch: self.next.0 as u64, loss: loss / weight, held_out }
    }

    /// One optimizer step over windows: their loss is the weighted mean over all their tokens,
    /// however they are split. Returns the loss and the gradient's norm, before the step.
    ///
    /// # Errors
    /// As [`Gradients::of`]; the parameters have not moved then.
    pub fn step(&mut self, windows: &[Window], lr: f32) -> Result<(f64, f64)> {
        let mut step = Step::new(windows.to_vec(), lr, self.config.clip, &self.parameters);
        let Trainer { gradients, parameters, optimizer, .. } = self;
        loop {
            if let Some(done) = step.advance(gradients, parameters, optimizer, &())? {
                return Ok((done.loss, done.norm));
            }
        }
    }

    /// Runs all epochs. `on` hears of every event; when it returns false the run ends there, and
    /// the adapter is what it has become.
    ///
    /// # Errors
    /// As [`Trainer::advance`]; and when a target has not moved at all.
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

    /// Ends the run where it is; a step that has begun to move parameters is brought to its end.
    ///
    /// # Errors
    /// When a target has not moved at all.
    pub fn finish(mut self) -> Result<Outcome> {
        let Trainer { work, gradients, parameters, optimizer, .. } = &mut self;
        if let Work::Step(step) = work
            && step.is_moving()
        {
            while step.advance(gradients, parameters, optimizer, &())?.is_none() {}
        }
        let steps = self.optimizer.steps - self.first_step;
        let adapter = self
            .parameters
            .adapter
            .unwrap_or(Adapter { alpha: self.config.alpha, tensors: BTreeMap::new() });
        let dead: Vec<&str> = adapter
            .tensors
            .iter()
            .filter(|(_, t)| t.b.iter().all(|&b| b == 0.0))
            .map(|(n, _)| n.as_str())
            .collect();
        let total = adapter.tensors.len();
        if steps > 0 && !dead.is_empty() {
            return Err(Error::Stopped(format!(
                "after {steps} steps {} of {total} targets have not moved: {}",
                dead.len(),
                dead.join(", ")
            )));
        }
        let moved = (total - dead.len(), total);
        let (optimizer, last_loss) = (self.optimizer, self.last_loss);
        let weights = self.parameters.weights;
        Ok(Outcome { adapter, weights, optimizer, steps, last_loss, moved })
    }
}

/// A name for projections, and which they are.
type Kind = (&'static str, fn(&str, &Projection) -> bool);

/// Patterns of targets that are no part of a tensor's name.
const KINDS: [Kind; 5] = [
    ("all", |_, _| true),
    ("attn", |name, _| name.contains(".attn_")),
    ("ffn", |name, _| name.contains(".ffn_")),
    ("experts", |_, projection| projection.experts.is_some()),
    ("router", |name, _| name.contains(".ffn_gate_inp.")),
];

/// The projections that a list of patterns names: `all` for every projection inside a layer,
/// `attn` or `ffn` for those halves, `experts` for the stacks of routed experts, `router` for what
/// chooses among them, or part of a tensor name such as `attn_q` or `blk.3.`.
///
/// # Errors
/// A pattern that matches nothing, with the candidates.
pub fn select_targets(model: &Model, patterns: &[String]) -> Result<Vec<String>> {
    let projections: Vec<(&String, &Projection)> =
        model.projections().iter().filter(|(name, _)| name.starts_with("blk.")).collect();
    let mut chosen = BTreeSet::new();
    for pattern in patterns {
        let kind = KINDS.iter().find(|(kind, _)| kind == pattern);
        let hit = |(name, projection): &(&String, &Projection)| match kind {
            Some((_, of_kind)) => of_kind(name, projection),
            None => name.contains(pattern.as_str()),
        };
        let matches: Vec<&String> = projections.iter().copied().filter(hit).map(|p| p.0).collect();
        if matches.is_empty() {
            let of_model = |(_, of_kind): &&Kind| {
                projections.iter().any(|(name, projection)| of_kind(name, projection))
            };
            let names: BTreeSet<&str> =
                projections.iter().filter_map(|(n, _)| n.split('.').nth(2)).collect();
            let candidates = KINDS.iter().filter(of_model).map(|k| k.0).chain(names);
            return Err(Error::Setting(format!(
                "target `{pattern}` matches no projection; candidates: {}",
                candidates.collect::<Vec<_>>().join(", ")
            )));
        }
        chosen.extend(matches.into_iter().cloned());
    }
    Ok(chosen.into_iter().collect())
}
