//! The gradient of a window's loss: the model's own graph, differentiated; or, for a window longer
//! than a graph, those of its chunks.

mod graphs;
mod masks;
mod memory;
#[cfg(test)]
mod tests;
mod walk;

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

use graph::{
    DType, Device, GradPrecision, Placed, Policy, Real, Recompute, Shape, Stop, Workspace,
};
use model::{Model, Weights};

use self::graphs::{Built, Inputs, Kind, Run};
pub use self::masks::Masks;
use self::memory::Memory;
use self::walk::Walk;
use crate::{Error, Example, Parameters, Result, Room, Window};

/// What a gradient graph is built for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GraphConfig {
    /// Rows of a graph; shorter windows are padded, longer ones are walked (see [`Walks`]).
    pub rows: usize,
    /// The dtype keys and values pass through; the cache's when the adapter is served.
    pub cache: DType,
    /// What is kept for the backward pass.
    pub recompute: Recompute,
    /// The precision that gradients pass quantized weights with.
    pub grad_precision: GradPrecision,
    /// What becomes of a node that the model's device has no kernel for.
    pub placement: Policy,
    /// The share of what adapters read that is dropped, at least 0 and below 1; the rest is
    /// multiplied by `1 / (1 - dropout)`, as PEFT does. An embedding's adapter reads ids, of which
    /// nothing is dropped.
    pub dropout: Real,
}

/// What a window is run for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Goal {
    /// Its loss, with nothing dropped.
    Loss,
    /// Its loss and its gradient.
    Gradient(Masks),
}

impl Goal {
    fn is_loss(self) -> bool {
        self == Goal::Loss
    }
}

impl Default for GraphConfig {
    fn default() -> GraphConfig {
        GraphConfig {
            rows: 512,
            cache: DType::F16,
            recompute: Recompute::None,
            grad_precision: GradPrecision::F32,
            placement: Policy::Fallback,
            dropout: Real::new(0.0),
        }
    }
}

/// How windows longer than a graph are walked, chunk by chunk, each as long as a graph.
///
/// The loss, bit for bit, and the gradient are those of the whole window.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Walks {
    /// Rows of the longest window.
    pub window: usize,
    /// Positions before a chunk that its attention sends gradients back to; 0 for all of them.
    /// Attention sees all positions in any case, and the gradients of recurrent states are exact.
    pub horizon: usize,
    /// Bytes of host memory that walks may take; 0 for no bound. States of recurrent layers are
    /// kept more rarely, and computed again, where that is needed to stay below.
    pub host_budget: usize,
}

/// A loss and its gradient.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Measured {
    /// The weighted sum of the tokens' negative log-likelihoods, in nats, divided by the total
    /// weight that was asked for.
    pub loss: f64,
    /// By leaf name (`0:TENSOR.lora_a`, `0:TENSOR.lora_b`, `TENSOR`), in that order.
    pub grads: BTreeMap<String, Vec<f32>>,
}

/// Bytes of the logits that are there at a time, and of their gradients.
const PIECE_BYTES: usize = 128 << 20;

/// Most packed sequences of a window, per row.
const SEQS_PER_ROW: usize = 4;

/// Most sequences that a window of so many rows may hold, for a model.
pub fn most_sequences(geometry: &model::Geometry, rows: usize) -> usize {
    let most = (rows / SEQS_PER_ROW).max(1);
    // The graph has a state for each, used or not: together no larger than what the rows of a
    // feed-forward layer are.
    match geometry.states.iter().map(Shape::elements).max() {
        Some(state) if state > 0 => {
            (rows.saturating_mul(4 * geometry.width) / state).clamp(1, most)
        }
        _ => most,
    }
}

/// The longest window, in rows.
const LONGEST: usize = 1 << 20;

/// A window on its way through its graphs: their inputs, and how far the run has come.
pub struct Pass {
    course: Course,
    /// Rows, padding not counted.
    rows: usize,
}

enum Course {
    /// Through one graph.
    Whole(Run),
    /// Chunk by chunk.
    Walk(Box<Walk>),
}

impl Pass {
    /// Rows the window has, padding not counted.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// True when the window has graphs left to run, after the gradients there are have been taken.
    pub fn goes_on(&self) -> bool {
        match &self.course {
            Course::Whole(_) => false,
            Course::Walk(walk) => walk.goes_on(),
        }
    }
}

/// Builds gradient graphs for a model and runs them over windows. `M` is a model, borrowed or
/// shared.
pub struct Gradients<M> {
    model: M,
    config: GraphConfig,
    walks: Option<Walks>,
    built: Vec<Built>,
    workspace: Workspace,
    memory: Memory,
    /// Most chunks of any walk prepared so far, and of any with gradients.
    chunks: (usize, usize),
    /// The device that nodes fall back to, and the weights it holds for them.
    fallback: Option<(Arc<dyn Device>, Weights)>,
    /// Rows whose logits are there at a time.
    piece: usize,
}

impl<M: Deref<Target = Model>> Gradients<M> {
    /// For a model.
    ///
    /// # Errors
    /// When the graph has no rows or more than 2^20, or the share that is dropped is none.
    pub fn new(model: M, config: GraphConfig) -> Result<Gradients<M>> {
        if config.rows == 0 || config.rows > LONGEST {
            return Err(Error::Setting(format!(
                "the window is {} rows, expected 1 to 2^20",
                config.rows
            )));
        }
        let dropout = config.dropout.get();
        if !(0.0..1.0).contains(&dropout) {
            return Err(Error::Setting(format!(
                "`dropout` is {dropout}; expected a number from 0 to below 1"
            )));
        }
        let row = model.geometry().vocab.max(1) * 2 * size_of::<f32>();
        Ok(Gradients {
            piece: (PIECE_BYTES / row).clamp(16, 512),
            model,
            config,
            walks: None,
            built: Vec::new(),
            workspace: Workspace::default(),
            memory: Memory::default(),
            chunks: (0, 0),
            fallback: None,
        })
    }

    /// With windows that are longer than a graph.
    ///
    /// # Errors
    /// When the window is shorter than a graph or longer than 2^20 rows.
    pub fn with_walks(mut self, walks: Walks) -> Result<Gradients<M>> {
        let rows = self.config.rows;
        if walks.window < rows || walks.window > LONGEST {
            return Err(Error::Setting(format!(
                "the window is {} rows, expected those of a chunk, {rows}, to 2^20",
                walks.window
            )));
        }
        self.walks = Some(walks);
        Ok(self)
    }

    /// With another device for what the model's own has no kernel for. Weights that such a node
    /// reads are loaded there too, from the model's file, when its graph is first run.
    pub fn with_fallback(mut self, device: Arc<dyn Device>) -> Gradients<M> {
        self.fallback = Some((device, Weights::default()));
        self
    }

    /// That device, if any.
    pub(crate) fn into_fallback(self) -> Option<Arc<dyn Device>> {
        self.fallback.map(|(device, _)| device)
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// Rows of the model's embedding table: every token is below.
    pub(crate) fn vocab(&self) -> usize {
        self.model.geometry().vocab
    }

    /// Most sequences a window may hold.
    pub fn most_sequences(&self) -> usize {
        most_sequences(self.model.geometry(), self.config.rows)
    }

    /// Rows of the longest window: of one sequence, where that is longer than a graph.
    pub fn longest(&self) -> usize {
        self.walks.map_or(self.config.rows, |walks| walks.window)
    }

    /// What windows have room for: examples longer than a graph have one each.
    pub fn room(&self) -> Room {
        let (rows, longest) = (self.config.rows, self.longest());
        Room { rows, longest, most: self.most_sequences() }
    }

    /// The plan for windows of which every row may carry loss: the largest there is.
    ///
    /// # Errors
    /// The refusal, when the graph cannot be differentiated or run.
    pub fn plan(&mut self, parameters: &Parameters) -> Result<&Placed> {
        let kind = self.kind(self.config.rows, None, true, false);
        let i = self.build(kind, parameters)?;
        match self.built.get(i) {
            Some(built) => Ok(&built.placed),
            None => Err(Error::Stopped("a plan went missing".into())),
        }
    }

    /// Builds the graphs that a window needs, or only those of its loss where `forward`, so that
    /// no step has to. Returns the bytes of the arena of the largest, and those each thread
    /// scratches on beside it.
    ///
    /// # Errors
    /// The refusal; or a window that does not fit or has no token that carries loss.
    pub fn prepare(
        &mut self,
        window: &Window,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<(usize, usize)> {
        let mut largest = (0, 0);
        for kind in self.kinds(window, forward, parameters)? {
            let i = self.build(kind, parameters)?;
            let placed = self.built.get(i).map(|built| &built.placed);
            let (arena, scratch) = placed.map_or((0, 0), |p| (p.arena_bytes(), p.scratch_bytes()));
            largest = (largest.0.max(arena), largest.1.max(scratch));
        }
        Ok(largest)
    }

    /// What the graphs of a window cost, which are built if they are new; `forward` of an evaluation.
    ///
    /// # Errors
    /// As [`Gradients::prepare`].
    pub fn cost(
        &mut self,
        window: &Window,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<graph::Cost> {
        let mut cost = graph::Cost::default();
        for kind in self.kinds(window, forward, parameters)? {
            let i = self.build(kind, parameters)?;
            self.built.get(i).into_iter().for_each(|built| cost += built.cost);
        }
        Ok(cost)
    }

    /// The graphs a window goes through, in order.
    fn kinds(
        &mut self,
        window: &Window,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<Vec<Kind>> {
        match self.is_walked(window) {
            true => Ok(self.survey(window, forward, parameters)?.kinds()),
            false => {
                let labelled = self.bucket(labelled(window));
                Ok(vec![self.kind(labelled, None, !forward, forward)])
            }
        }
    }

    /// Rows that carry loss, rounded up so that few graphs serve all windows; never more than a
    /// graph has, so that the one of [`Gradients::plan`] is the largest.
    fn bucket(&self, labelled: usize) -> usize {
        labelled.max(1).next_multiple_of(64).min(self.config.rows)
    }

    /// A graph of an evaluation, which drops nothing, or of an optimizer step.
    fn kind(
        &self,
        labelled: usize,
        earlier: Option<usize>,
        backward: bool,
        evaluation: bool,
    ) -> Kind {
        let dropped = !evaluation && self.config.dropout.get() > 0.0;
        Kind { labelled, earlier, backward, dropped }
    }

    /// True for a window that goes through its graphs chunk by chunk.
    fn is_walked(&self, window: &Window) -> bool {
        self.walks.is_some() && window.rows() > self.config.rows
    }

    /// Bytes of memory that runs of all windows prepared so far take, in arenas and between them.
    pub fn planned_bytes(&self) -> usize {
        let bytes = |b: &Built| b.placed.arena_bytes() + b.placed.staged_bytes();
        self.built.iter().map(bytes).max().unwrap_or(0) + self.walk_bytes()
    }

    /// Bytes of host memory that walks of all windows prepared so far take: keys, values, their
    /// gradients and recurrent states.
    pub fn walk_bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Takes the memory for all windows prepared so far now, so that a run never has to and never
    /// holds a smaller arena beside a larger one.
    ///
    /// # Errors
    /// When memory is out, or a weight cannot be loaded by the device a node falls back to.
    pub fn reserve(&mut self) -> Result<()> {
        let mut largest: Vec<usize> = (0..self.built.len()).collect();
        let bytes = |i: &usize| self.built.get(*i).map_or(0, |b| b.placed.arena_bytes());
        largest.sort_by_key(|i| std::cmp::Reverse(bytes(i)));
        largest.into_iter().try_for_each(|i| self.take(i))?;
        self.memory.reserve()
    }

    /// Gives the memory back; what runs next takes it again.
    pub fn release(&mut self) {
        self.workspace = Workspace::default();
    }

    /// The arena's size and the highest byte any run has written, in bytes; both 0 before the
    /// first run.
    pub fn arena(&self) -> (usize, usize) {
        self.workspace.arena()
    }

    /// The loss of a window and its gradient. `total` is the weight the loss is divided by: the
    /// window's own, or that of all windows of a step. What is dropped is that of the first step
    /// of seed 0.
    ///
    /// # Errors
    /// The refusal before anything runs; a fault; or a number that is not finite, by name.
    pub fn of(
        &mut self,
        window: &Window,
        total: f64,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<Measured> {
        self.measure(window, total, Goal::Gradient(Masks::of(0, 0)), parameters, stop)
    }

    /// The loss of a window, and its gradient where that is the goal; `total` as for
    /// [`Gradients::of`].
    ///
    /// # Errors
    /// As [`Gradients::of`].
    pub fn measure(
        &mut self,
        window: &Window,
        total: f64,
        goal: Goal,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<Measured> {
        let mut pass = self.begin(window, total, goal, parameters)?;
        let names = if goal.is_loss() { Vec::new() } else { parameters.names() };
        let mut grads: BTreeMap<String, Vec<f32>> = BTreeMap::new();
        let mut grad = Vec::new();
        loop {
            while !self.advance(&mut pass, parameters, stop)? {}
            for (i, name) in names.iter().enumerate() {
                let Some(len) = self.gradient_len(&pass, i)? else { continue };
                grad.resize(len, 0.0);
                self.gradient(&pass, i, 0, &mut grad)?;
                match grads.get_mut(name) {
                    Some(sum) => sum.iter_mut().zip(&grad).for_each(|(a, b)| *a += b),
                    None => {
                        grads.insert(name.clone(), std::mem::take(&mut grad));
                    }
                }
            }
            if !pass.goes_on() {
                return Ok(Measured { loss: self.loss(&pass)?, grads });
            }
        }
    }

    /// Lays a window out as the inputs of its graphs, which are built if they are new. `total` is
    /// as for [`Gradients::of`].
    ///
    /// # Errors
    /// The refusal; or a window that does not fit, has a token outside of the vocabulary, or no
    /// token that carries loss.
    pub fn begin(
        &mut self,
        window: &Window,
        total: f64,
        goal: Goal,
        parameters: &Parameters,
    ) -> Result<Pass> {
        let vocab = self.model.geometry().vocab;
        let tokens = window.examples.iter().flat_map(|e| &e.tokens);
        if let Some(bad) = tokens.into_iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::Data(format!("token {bad} is outside of the vocabulary")));
        }
        if total.is_nan() || total <= 0.0 || labelled(window) == 0 {
            return Err(Error::Data("no token of the window carries loss".into()));
        }
        let rows = window.rows();
        if self.is_walked(window) {
            let walk = self.begin_walk(window, total, goal, parameters)?;
            return Ok(Pass { course: Course::Walk(Box::new(walk)), rows });
        }
        let (fit, most) = (self.config.rows, self.most_sequences());
        if rows > fit || window.examples.len() > most {
            return Err(Error::Data(format!(
                "a window of {rows} rows and {} sequences; at most {fit} and {most} fit",
                window.examples.len(),
            )));
        }
        let labelled = self.bucket(labelled(window));
        let kind = self.kind(labelled, None, !goal.is_loss(), goal.is_loss());
        let numbers = window.numbers.iter().copied().chain(std::iter::repeat(u32::MAX));
        let all = window.examples.iter().zip(numbers).map(|(e, number)| (e, number, 0..e.rows()));
        let inputs = lay_out(all, (fit, most, labelled), total, kind.masks(goal));
        let run = self.begin_run(kind, inputs, None, parameters)?;
        Ok(Pass { course: Course::Whole(run), rows })
    }

    /// Runs on until there are gradients to take or the window is done, which is true, or until
    /// `stop` says so. The parameters must not have moved since the pass began.
    ///
    /// # Errors
    /// A fault, naming the node; or, in a walk, the loss of a chunk that is not finite. Then
    /// [`Gradients::search`] finds what made it so.
    pub fn advance(
        &mut self,
        pass: &mut Pass,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<bool> {
        match &mut pass.course {
            Course::Whole(run) => self.advance_run(run, parameters, stop),
            Course::Walk(walk) => self.advance_walk(walk, parameters, stop),
        }
    }

    /// Goes on with the search for what made a pass give a number that is not finite: its graph
    /// runs anew, and the first op whose result is not finite is the answer. `None` when `stop`
    /// says so; the pass cannot go on after.
    ///
    /// # Errors
    /// A fault, naming the node.
    pub fn search(
        &mut self,
        pass: &Pass,
        search: &mut graph::Search,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<Option<Option<graph::Culprit>>> {
        match &pass.course {
            Course::Whole(run) => self.search_run(run, search, parameters, stop),
            Course::Walk(walk) => self.search_run(walk.run()?, search, parameters, stop),
        }
    }

    /// The loss of a pass that has come to its end.
    ///
    /// # Errors
    /// When it is not finite.
    pub fn loss(&self, pass: &Pass) -> Result<f64> {
        let loss = match &pass.course {
            Course::Whole(run) => {
                let mut nll = Vec::new();
                self.losses_of(run, &mut nll)?;
                weigh(0.0, &run.inputs.weights, &nll)
            }
            Course::Walk(walk) => walk.loss(),
        };
        check_loss(loss)
    }

    /// How many numbers the gradient of parameter `index` has, in the order of
    /// [`Parameters::names`], in a pass that has come to where gradients are to be taken. `None`
    /// where it is zero, since nothing that was run depends on the parameter.
    ///
    /// # Errors
    /// When there is no such parameter.
    pub fn gradient_len(&self, pass: &Pass, index: usize) -> Result<Option<usize>> {
        match &pass.course {
            Course::Whole(run) => self.gradient_len_of(run, index),
            Course::Walk(walk) => self.gradient_len_of(walk.run()?, index),
        }
    }

    /// That gradient from the number `from` on, as much as `to` takes.
    ///
    /// # Errors
    /// When some of it is not finite, by the parameter's name; or it ends before.
    pub fn gradient(&self, pass: &Pass, index: usize, from: usize, to: &mut [f32]) -> Result<()> {
        match &pass.course {
            Course::Whole(run) => self.gradient_of(run, index, from, to),
            Course::Walk(walk) => self.gradient_of(walk.run()?, index, from, to),
        }
    }

    /// Marks the experts of parameter `index` that rows with loss chose, in a pass that has come to
    /// where gradients are to be taken; all of a parameter that is no stack of experts. Rows without
    /// loss are not counted: what they compute need not reach the loss.
    ///
    /// # Errors
    /// When the device cannot be read.
    pub fn chosen(&self, pass: &Pass, index: usize, marks: &mut [bool]) -> Result<()> {
        match &pass.course {
            Course::Whole(run) => self.chosen_of(run, index, marks),
            Course::Walk(walk) => self.chosen_of(walk.run()?, index, marks),
        }
    }
}

/// How many tokens of a window carry loss.
fn labelled(window: &Window) -> usize {
    window.examples.iter().map(Example::labelled).sum()
}

fn check_loss(loss: f64) -> Result<f64> {
    match loss.is_finite() {
        true => Ok(loss),
        false => Err(Error::NotFinite(format!("the loss is {loss}"))),
    }
}

/// A sum and, in order, losses with their weights.
fn weigh(sum: f64, weights: &[f32], nll: &[f32]) -> f64 {
    let pairs = weights.iter().zip(nll).filter(|p| *p.0 != 0.0);
    pairs.fold(sum, |sum, (&weight, &nll)| sum + f64::from(weight) * f64::from(nll))
}

/// The inputs of a graph of so many rows, sequences and rows with loss: of each example the rows
/// of a range, whose positions come after those before it. `masks` say what is dropped of a row, by
/// the number of its example and its position.
fn lay_out<'a>(
    examples: impl Iterator<Item = (&'a Example, u32, Range<usize>)>,
    (rows, sequences, labelled): (usize, usize, usize),
    total: f64,
    masks: Option<Masks>,
) -> Inputs {
    let mut tokens = vec![0i32; rows];
    let mut positions = vec![0i32; rows];
    let mut slots = vec![-1i32; rows];
    let mut seqs = vec![0i32; sequences * 3];
    let mut drops = vec![0i32; if masks.is_some() { rows * 2 } else { 0 }];
    let (mut logit_rows, mut labels, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = 0;
    for (i, (example, number, range)) in examples.enumerate() {
        for (k, value) in [first, range.len(), range.start].into_iter().enumerate() {
            put(&mut seqs, i * 3 + k, value as i32);
        }
        let next = example.tokens.iter().zip(&example.weights).skip(1);
        let all = example.tokens.iter().zip(next).enumerate();
        for (j, (&token, (&label, &weight))) in all.skip(range.start).take(range.len()) {
            let row = first + j - range.start;
            put(&mut tokens, row, token as i32);
            put(&mut positions, row, j as i32);
            put(&mut slots, row, 0);
            put(&mut drops, row * 2, number as i32);
            put(&mut drops, row * 2 + 1, j as i32);
            if weight != 0.0 {
                logit_rows.push(row as i32);
                labels.push(label as i32);
                weights.push((f64::from(weight) / total) as f32);
            }
        }
        first += range.len();
    }
    let loud = weights.len();
    logit_rows.resize(labelled, 0);
    labels.resize(labelled, -1);
    weights.resize(labelled, 0.0);
    let head_slots = labels.iter().map(|&l| if l < 0 { -1 } else { 0 }).collect();
    let mut ints = Vec::new();
    if let Some(masks) = masks {
        let of = |&row: &i32| {
            let first = row as usize * 2;
            [first, first + 1].map(|i| drops.get(i).copied().unwrap_or(0))
        };
        ints.push(("dropout_rows.head", logit_rows.iter().flat_map(of).collect()));
        ints.push(("dropout_rows", drops));
        ints.push(("dropout_key", masks.key().to_vec()));
    }
    ints.extend([
        ("tokens", tokens),
        ("positions", positions),
        ("seqs", seqs),
        ("logit_rows", logit_rows),
        ("labels", labels),
        ("lora_rows.0", slots),
        ("lora_rows.0.head", head_slots),
    ]);
    Inputs { ints, weights, loud }
}

/// The mean loss of examples under an adapter, by the served graph's own logits.
///
/// # Errors
/// When an example does not fit the engine's cache, or the device fails.
pub fn loss_of(
    engine: &mut model::Engine,
    examples: &[Example],
    adapter: Option<model::AdapterId>,
) -> Result<f64> {
    let (mut sum, mut total) = (0.0, 0.0);
    for example in examples {
        let n = example.tokens.len().saturating_sub(1);
        let tokens = example.tokens.get(..n).unwrap_or(&[]);
        let seq = engine.cache().open();
        let rows = model::Rows { seq, tokens, adapter, want: model::WantLogits::All };
        let logits = engine.forward(&[rows]);
        engine.cache().close(seq);
        let logits = logits?.pop().unwrap_or_default();
        let labels = example.tokens.get(1..).unwrap_or(&[]);
        let weights = example.weights.iter().skip(1);
        for (logprob, &weight) in engine.log_probs(&logits, labels)?.into_iter().zip(weights) {
            if weight != 0.0 {
                sum -= f64::from(weight) * f64::from(logprob);
                total += f64::from(weight);
            }
        }
    }
    Ok(sum / total)
}

fn put(list: &mut [i32], at: usize, value: i32) {
    if let Some(slot) = list.get_mut(at) {
        *slot = value;
    }
}
