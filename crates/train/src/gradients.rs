//! The gradient of a window's loss: the model's own graph, differentiated.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use graph::{
    DType, Device, Leaf, NodeId, Placed, Policy, Position, Recompute, Shape, Stop, Workspace,
};
use model::{Adapter, EntryStates, Model, Net, NetConfig, Weights};

use crate::{Error, Example, Result, Window};

/// What a gradient graph is built for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GraphConfig {
    /// Rows of a window; shorter windows are padded.
    pub rows: usize,
    /// The dtype keys and values pass through; the cache's when the adapter is served.
    pub cache: DType,
    /// What is kept for the backward pass.
    pub recompute: Recompute,
    /// What becomes of a node that the model's device has no kernel for.
    pub placement: Policy,
}

impl Default for GraphConfig {
    fn default() -> GraphConfig {
        GraphConfig {
            rows: 512,
            cache: DType::F16,
            recompute: Recompute::None,
            placement: Policy::Fallback,
        }
    }
}

/// What a gradient is taken of: an adapter's matrices, and float tensors of the model by name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Parameters {
    /// The adapter, if any.
    pub adapter: Option<Adapter>,
    /// Values of float tensors that are trained or differentiated.
    pub weights: BTreeMap<String, Vec<f32>>,
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

/// Bytes of logits computed at a time.
const PIECE_BYTES: usize = 128 << 20;

/// Most packed sequences of a window, per row.
const SEQS_PER_ROW: usize = 4;

struct Built {
    logit_rows: usize,
    /// Without gradients: the loss alone.
    forward: bool,
    placed: Placed,
    /// Its outputs: negative log-likelihoods per piece of rows, then the gradients.
    pieces: usize,
    grads: Vec<String>,
}

/// A window on its way through a graph: its inputs, and how far the run has come.
pub struct Pass {
    built: usize,
    position: Position,
    ints: Vec<(&'static str, Vec<i32>)>,
    /// For each leaf of the graph, which of [`bindable`] it is bound to.
    binds: Vec<usize>,
    /// Per row that carries loss.
    weights: Vec<f32>,
    /// Rows, padding not counted.
    rows: usize,
}

impl Pass {
    /// Rows the window has, padding not counted.
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// Builds gradient graphs for a model and runs them over windows. `M` is a model, borrowed or
/// shared.
pub struct Gradients<M> {
    model: M,
    config: GraphConfig,
    built: Vec<Built>,
    workspace: Workspace,
    /// The device that nodes fall back to, and the weights it holds for them.
    fallback: Option<(Arc<dyn Device>, Weights)>,
}

impl<M: Deref<Target = Model>> Gradients<M> {
    /// For a model.
    ///
    /// # Errors
    /// When the window is empty or longer than 2^20 rows.
    pub fn new(model: M, config: GraphConfig) -> Result<Gradients<M>> {
        if config.rows == 0 || config.rows > 1 << 20 {
            return Err(Error::Setting(format!(
                "the window is {} rows, expected 1 to 2^20",
                config.rows
            )));
        }
        let workspace = Workspace::default();
        Ok(Gradients { model, config, built: Vec::new(), workspace, fallback: None })
    }

    /// With another device for what the model's own has no kernel for. Weights that such a node
    /// reads are loaded there too, from the model's file, when its graph is first run.
    pub fn with_fallback(mut self, device: Arc<dyn Device>) -> Gradients<M> {
        self.fallback = Some((device, Weights::default()));
        self
    }

    fn devices(&self) -> Vec<&dyn Device> {
        let fallback = self.fallback.iter().map(|(device, _)| device.as_ref());
        std::iter::once(self.model.device().as_ref()).chain(fallback).collect()
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
        let geometry = self.model.geometry();
        let (rows, most) = (self.config.rows, (self.config.rows / SEQS_PER_ROW).max(1));
        // The graph has a state for each, used or not: together no larger than what the rows of a
        // feed-forward layer are.
        match geometry.states.iter().map(Shape::elements).max() {
            Some(state) if state > 0 => {
                (rows.saturating_mul(4 * geometry.width) / state).clamp(1, most)
            }
            _ => most,
        }
    }

    /// The plan for windows of which every row may carry loss: the largest there is.
    ///
    /// # Errors
    /// The refusal, when the graph cannot be differentiated or run.
    pub fn plan(&mut self, parameters: &Parameters) -> Result<&Placed> {
        self.plan_of_rows(self.config.rows, parameters)
    }

    /// The plan for windows of which up to `labelled` rows carry loss.
    ///
    /// # Errors
    /// As [`Gradients::plan`].
    pub fn plan_for(&mut self, labelled: usize, parameters: &Parameters) -> Result<&Placed> {
        self.plan_of_rows(bucket(labelled), parameters)
    }

    fn plan_of_rows(&mut self, logit_rows: usize, parameters: &Parameters) -> Result<&Placed> {
        let i = self.build(logit_rows, false, parameters)?;
        match self.built.get(i) {
            Some(built) => Ok(&built.placed),
            None => Err(Error::Stopped("a plan went missing".into())),
        }
    }

    /// Builds the graph for windows of which `labelled` rows carry loss, or only its loss where
    /// `forward`, so that no step has to.
    ///
    /// # Errors
    /// As [`Gradients::plan`].
    pub fn prepare(
        &mut self,
        labelled: usize,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<()> {
        self.build(bucket(labelled), forward, parameters).map(|_| ())
    }

    /// Bytes of memory that runs of all graphs built so far take.
    pub fn planned_bytes(&self) -> usize {
        let bytes = |b: &Built| b.placed.arena_bytes() + b.placed.staged_bytes();
        self.built.iter().map(bytes).max().unwrap_or(0)
    }

    /// Takes the memory for all graphs built so far now, so that a run never has to and never
    /// holds a smaller arena beside a larger one.
    ///
    /// # Errors
    /// When memory is out, or a weight cannot be loaded by the device a node falls back to.
    pub fn reserve(&mut self) -> Result<()> {
        let mut largest: Vec<usize> = (0..self.built.len()).collect();
        let bytes = |i: &usize| self.built.get(*i).map_or(0, |b| b.placed.arena_bytes());
        largest.sort_by_key(|i| std::cmp::Reverse(bytes(i)));
        largest.into_iter().try_for_each(|i| self.take(i))
    }

    /// Takes the memory for a built graph, and loads the weights it reads elsewhere.
    fn take(&mut self, built: usize) -> Result<()> {
        let Some(Built { placed, .. }) = self.built.get(built) else {
            return Err(Error::Stopped("a plan went missing".into()));
        };
        let mut workspace = std::mem::take(&mut self.workspace);
        let reserved = placed.reserve(&self.devices(), &mut workspace);
        self.workspace = workspace;
        reserved?;
        if let Some((device, weights)) = &mut self.fallback {
            let there = |l: &&graph::PlacedLeaf| l.device == 1 && l.resident;
            let names = placed.leaves.iter().filter(there).map(|l| &*l.slot.name);
            let missing: Vec<String> =
                names.filter(|n| weights.get(n).is_none()).map(String::from).collect();
            weights.extend(self.model.load_on(&missing, device.as_ref())?);
        }
        Ok(())
    }

    /// The arena's size and the highest byte any run has written, in bytes; both 0 before the
    /// first run.
    pub fn arena(&self) -> (usize, usize) {
        self.workspace.arena()
    }

    /// The loss of a window and its gradient. `total` is the weight the loss is divided by: the
    /// window's own, or that of all windows of a step.
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
        let mut pass = self.begin(window, total, false, parameters)?;
        while !self.advance(&mut pass, parameters, stop)? {}
        let loss = self.loss(&pass)?;
        let mut grads = BTreeMap::new();
        for (i, name) in parameters.names().into_iter().enumerate() {
            let mut grad = Vec::new();
            self.gradient(&pass, i, &mut grad)?;
            grads.insert(name, grad);
        }
        Ok(Measured { loss, grads })
    }

    /// Lays a window out as the inputs of its graph, which is built if it is new. `total` is as
    /// for [`Gradients::of`]; where `forward`, only the loss is computed.
    ///
    /// # Errors
    /// The refusal; or a window that does not fit, has a token outside of the vocabulary, or no
    /// token that carries loss.
    pub fn begin(
        &mut self,
        window: &Window,
        total: f64,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<Pass> {
        let vocab = self.model.geometry().vocab;
        let rows = self.config.rows;
        if window.rows() > rows || window.examples.len() > self.most_sequences() {
            return Err(Error::Data(format!(
                "a window of {} rows and {} sequences; at most {rows} and {} fit",
                window.rows(),
                window.examples.len(),
                self.most_sequences()
            )));
        }
        if total.is_nan() || total <= 0.0 {
            return Err(Error::Data("no token of the window carries loss".into()));
        }
        let mut tokens = vec![0i32; rows];
        let mut positions = vec![0i32; rows];
        let mut slots = vec![-1i32; rows];
        let mut seqs = vec![0i32; self.most_sequences() * 3];
        let (mut logit_rows, mut labels, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0usize;
        for (i, example) in window.examples.iter().enumerate() {
            let n = example.tokens.len().saturating_sub(1);
            if let Some(bad) = example.tokens.iter().find(|&&t| t as usize >= vocab) {
                return Err(Error::Data(format!("token {bad} is outside of the vocabulary")));
            }
            for (k, value) in [first, n, 0].into_iter().enumerate() {
                put(&mut seqs, i * 3 + k, value as i32);
            }
            let next = example.tokens.iter().zip(&example.weights).skip(1);
            for (j, (&token, (&label, &weight))) in example.tokens.iter().zip(next).enumerate() {
                put(&mut tokens, first + j, token as i32);
                put(&mut positions, first + j, j as i32);
                put(&mut slots, first + j, 0);
                if weight != 0.0 {
                    logit_rows.push((first + j) as i32);
                    labels.push(label as i32);
                    weights.push((f64::from(weight) / total) as f32);
                }
            }
            first += n;
        }
        let wanted = logit_rows.len();
        if wanted == 0 {
            return Err(Error::Data("no token of the window carries loss".into()));
        }
        let bucket = bucket(wanted);
        logit_rows.resize(bucket, 0);
        labels.resize(bucket, -1);
        weights.resize(bucket, 0.0);
        let head_slots: Vec<i32> = labels.iter().map(|&l| if l < 0 { -1 } else { 0 }).collect();
        let built = self.build(bucket, forward, parameters)?;
        self.take(built)?;
        let ints = vec![
            ("tokens", tokens),
            ("positions", positions),
            ("seqs", seqs),
            ("logit_rows", logit_rows),
            ("labels", labels),
            ("lora_rows.0", slots),
            ("lora_rows.0.head", head_slots),
        ];
        let position = Position::default();
        let rows = window.rows();
        let mut pass = Pass { built, position, ints, binds: Vec::new(), weights, rows };
        pass.binds = self.binds(&pass, parameters)?;
        Ok(pass)
    }

    /// Runs on until the end, which is true, or until `stop` says so. The parameters must not
    /// have moved since the pass began.
    ///
    /// # Errors
    /// A fault, naming the node.
    pub fn advance(
        &mut self,
        pass: &mut Pass,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<bool> {
        // By field, since the workspace is borrowed beside it.
        let Some(Built { placed, .. }) = self.built.get(pass.built) else {
            return Err(Error::Stopped("a plan went missing".into()));
        };
        let mut all = Vec::new();
        let elsewhere = self.fallback.as_ref().map(|(_, weights)| weights);
        all.extend(bindable(&self.model, elsewhere, pass, parameters).map(|(_, leaf)| leaf));
        let lost = || Error::Stopped("a leaf of a pass went missing".into());
        let bound = pass.binds.iter().map(|&i| all.get(i).copied().ok_or_else(lost));
        let leaves = bound.collect::<Result<Vec<_>>>()?;
        let fallback = self.fallback.iter().map(|(device, _)| device.as_ref());
        let own = self.model.device().as_ref();
        let devices: Vec<&dyn Device> = std::iter::once(own).chain(fallback).collect();
        match placed.run(&devices, &leaves, &mut self.workspace, pass.position, stop)? {
            Some(at) => {
                pass.position = at;
                Ok(false)
            }
            None => Ok(true),
        }
    }

    /// The loss of a pass that has come to its end.
    ///
    /// # Errors
    /// When it is not finite.
    pub fn loss(&self, pass: &Pass) -> Result<f64> {
        let built = self.built(pass)?;
        let mut loss = 0.0;
        let mut weights = pass.weights.iter();
        for (i, slot) in built.placed.outputs().enumerate().take(built.pieces) {
            let mut nll = vec![0f32; slot.shape.elements()];
            built.placed.read(&self.workspace, i, bytemuck::cast_slice_mut(&mut nll))?;
            for (value, &weight) in nll.into_iter().zip(&mut weights) {
                if weight != 0.0 {
                    loss += f64::from(weight) * f64::from(value);
                }
            }
        }
        match loss.is_finite() {
            true => Ok(loss),
            false => Err(Error::Stopped(format!("the loss is {loss}, at node `loss`"))),
        }
    }

    /// The gradient of parameter `index`, in the order of [`Parameters::names`], of a pass that
    /// has come to its end.
    ///
    /// # Errors
    /// When it is not finite, by name.
    pub fn gradient(&self, pass: &Pass, index: usize, to: &mut Vec<f32>) -> Result<()> {
        let built = self.built(pass)?;
        let missing = || Error::Stopped(format!("a pass has no gradient {index}"));
        let slot = built.placed.outputs().nth(built.pieces + index).ok_or_else(missing)?;
        let name = built.grads.get(index).ok_or_else(missing)?;
        to.clear();
        to.resize(slot.shape.elements(), 0.0);
        let bytes = bytemuck::cast_slice_mut(to);
        built.placed.read(&self.workspace, built.pieces + index, bytes)?;
        match to.iter().all(|g| g.is_finite()) {
            true => Ok(()),
            false => Err(Error::Stopped(format!("the gradient of `{name}` is not finite"))),
        }
    }

    /// What each leaf of a pass's graph is bound to, found by name once for all its segments.
    fn binds(&self, pass: &Pass, parameters: &Parameters) -> Result<Vec<usize>> {
        let elsewhere = self.fallback.as_ref().map(|(_, weights)| weights);
        let mut by_name: HashMap<(String, bool), usize> = HashMap::new();
        for (i, (name, _)) in bindable(&self.model, elsewhere, pass, parameters).enumerate() {
            let name = match name {
                Bindable::Named(name) => (name.to_string(), false),
                Bindable::Lora(target, part) => (format!("0:{target}.{part}"), false),
                Bindable::Elsewhere(name) => (name.to_string(), true),
            };
            // The first of a name: a trained weight before the model's own.
            by_name.entry(name).or_insert(i);
        }
        let placed = &self.built(pass)?.placed;
        let bind = |leaf: &graph::PlacedLeaf| {
            let name = leaf.slot.name.to_string();
            let unbound = || Error::Stopped(format!("nothing is bound to `{}`", leaf.slot.name));
            by_name.get(&(name, leaf.device == 1 && leaf.resident)).copied().ok_or_else(unbound)
        };
        placed.leaves.iter().map(bind).collect()
    }

    fn built(&self, pass: &Pass) -> Result<&Built> {
        self.built.get(pass.built).ok_or_else(|| Error::Stopped("a plan went missing".into()))
    }

    /// The index of the built graph for so many loss rows.
    fn build(
        &mut self,
        logit_rows: usize,
        forward: bool,
        parameters: &Parameters,
    ) -> Result<usize> {
        let same = |b: &Built| (b.logit_rows, b.forward) == (logit_rows, forward);
        if let Some(i) = self.built.iter().position(same) {
            return Ok(i);
        }
        let net_config = NetConfig {
            rows: self.config.rows,
            seqs: self.most_sequences(),
            logit_rows,
            cache: self.config.cache,
            prefix: None,
            states: EntryStates::Zero,
            adapters: parameters.adapter.iter().map(|a| a.shapes()).collect(),
            trainable: parameters.weights.keys().cloned().collect::<BTreeSet<_>>(),
        };
        let model: &Model = &self.model;
        let vocab = model.geometry().vocab;
        let piece = (PIECE_BYTES / (vocab * 8)).clamp(16, 512);
        let mut net = Net::new(model.weights(), &net_config);
        let hidden = model.arch().hidden(&mut net)?;
        let logits = net.logits(model.arch(), hidden, piece)?;
        let mut graph = net.graph;
        let rows = Shape::new(&[logit_rows])?;
        let labels = graph.leaf("labels", rows, DType::I32)?;
        let weights = graph.leaf("loss_weights", rows, DType::F32)?;
        let mut losses: Vec<(NodeId, NodeId)> = Vec::new();
        let mut start = 0;
        for logits in logits {
            let len = graph.node(logits).shape.dim(0);
            let of = |g: &mut graph::Graph, all| g.slice(all, 0, start, len);
            let (labels, weights) = (of(&mut graph, labels)?, of(&mut graph, weights)?);
            let nll = graph.push(
                graph::Op::CrossEntropy(graph::CrossEntropyAttrs::PLAIN),
                &[logits, labels],
                "loss",
            )?;
            losses.push((nll, weights));
            start += len;
        }
        let mut outputs: Vec<NodeId> = losses.iter().map(|l| l.0).collect();
        let names = if forward { Vec::new() } else { parameters.names() };
        if !forward {
            let mut wrt = Vec::with_capacity(names.len());
            for name in &names {
                wrt.push(graph.find_leaf(name).ok_or_else(|| {
                    let tensor = name.trim_start_matches("0:");
                    Error::Setting(format!("the model's graph has no tensor `{tensor}` to train"))
                })?);
            }
            let backward = graph::vjp(&graph, &losses, &wrt)?;
            outputs.extend(&backward.grads);
            (graph, outputs) = graph::recompute(&backward.graph, &outputs, self.config.recompute)?;
        }
        let placed = graph::place(&graph, &outputs, &self.devices(), self.config.placement)?;
        let pieces = losses.len();
        self.built.push(Built { logit_rows, forward, placed, pieces, grads: names });
        Ok(self.built.len() - 1)
    }
}

/// The name of what a leaf can be bound to.
enum Bindable<'a> {
    Named(&'a str),
    /// Target and part of the adapter.
    Lora(&'a str, &'static str),
    /// A weight that the other device holds.
    Elsewhere(&'a str),
}

/// All that leaves of a graph can be bound to, always in the same order: finding names again for
/// each segment of a few hundred microseconds would take a third of it.
fn bindable<'a>(
    model: &'a Model,
    elsewhere: Option<&'a Weights>,
    pass: &'a Pass,
    parameters: &'a Parameters,
) -> impl Iterator<Item = (Bindable<'a>, Leaf<'a>)> {
    let floats = |values: &'a [f32]| Leaf::Host(bytemuck::cast_slice(values));
    let ints = pass.ints.iter();
    let ints = ints.map(|(name, list)| (*name, Leaf::Host(bytemuck::cast_slice(list))));
    let weights = std::iter::once(("loss_weights", floats(&pass.weights)));
    let inputs = ints.chain(weights).map(|(name, leaf)| (Bindable::Named(name), leaf));
    let pairs = parameters.adapter.iter().flat_map(|a| &a.tensors);
    let adapter = pairs.flat_map(move |(target, pair)| {
        let scale = std::slice::from_ref(&pair.scale);
        let parts = [("lora_a", pair.a.as_slice()), ("lora_b", &pair.b), ("lora_scale", scale)];
        parts.map(|(part, values)| (Bindable::Lora(target, part), floats(values)))
    });
    let trained = parameters.weights.iter();
    let trained = trained.map(move |(name, values)| (Bindable::Named(name), floats(values)));
    let own = model.weights().iter().map(|(name, w)| (Bindable::Named(name), w.leaf()));
    let elsewhere = elsewhere.into_iter().flat_map(Weights::iter);
    let elsewhere = elsewhere.map(|(name, w)| (Bindable::Elsewhere(name), w.leaf()));
    inputs.chain(adapter).chain(trained).chain(own).chain(elsewhere)
}

impl Parameters {
    /// How many numbers move.
    pub fn count(&self) -> usize {
        let adapter = self.adapter.as_ref().map_or(0, Adapter::parameters);
        adapter + self.weights.values().map(Vec::len).sum::<usize>()
    }

    /// The leaf names of everything a gradient is taken of, in order.
    pub fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for target in self.adapter.iter().flat_map(|a| a.tensors.keys()) {
            names.push(format!("0:{target}.lora_a"));
            names.push(format!("0:{target}.lora_b"));
        }
        names.extend(self.weights.keys().cloned());
        names
    }

    /// The values of one of [`Parameters::names`], to be moved.
    pub fn value_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        let Some(rest) = name.strip_prefix("0:") else {
            return self.weights.get_mut(name).map(Vec::as_mut_slice);
        };
        let (target, part) = rest.rsplit_once('.')?;
        let pair = self.adapter.as_mut()?.tensors.get_mut(target)?;
        match part {
            "lora_a" => Some(&mut pair.a),
            "lora_b" => Some(&mut pair.b),
            _ => None,
        }
    }
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

/// Rows that carry loss, rounded up so that few graphs serve all windows.
fn bucket(labelled: usize) -> usize {
    labelled.max(1).next_multiple_of(64)
}

fn put(list: &mut [i32], at: usize, value: i32) {
    if let Some(slot) = list.get_mut(at) {
        *slot = value;
    }
}
