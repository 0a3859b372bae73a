//! The graphs that windows go through: what each computes, and what its leaves are bound to.

use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;

use graph::{DType, Device, Graph, Leaf, NodeId, Op, Placed, Position, Shape, Stop, Workspace};
use model::{Architecture, EntryStates, Model, Net, NetConfig, PrefixShape, Weights};

use super::memory::{Memory, Part};
use super::{Goal, Gradients, Masks, Parameters};
use crate::{Error, Result};

/// What a graph is for: equal kinds are one graph.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Kind {
    /// Rows that may carry loss; 0 builds no head.
    pub(super) labelled: usize,
    /// `None` for a window of sequences that begin in it; for a chunk of a longer one, the number
    /// of chunks whose keys and values it can read.
    pub(super) earlier: Option<usize>,
    /// With gradients.
    pub(super) backward: bool,
    /// Some of what adapters read is dropped.
    pub(super) dropped: bool,
}

impl Kind {
    /// What is dropped in a graph of this kind.
    pub(super) fn masks(&self, goal: Goal) -> Option<Masks> {
        match goal {
            Goal::Gradient(masks) if self.dropped => Some(masks),
            _ => None,
        }
    }
}

/// What one output of a graph is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Output {
    /// Negative log-likelihoods of the next piece of rows.
    Loss,
    /// What later chunks read: a [`Part`] by its index.
    Kept(usize),
    /// The gradient of a parameter, by its place in [`Parameters::names`].
    Gradient(usize),
    /// What is sent back to earlier chunks' [`Part`].
    Sent(usize),
    /// The experts that rows chose: those of a router, in order of the graph.
    Chosen(usize),
}

/// A graph, differentiated if need be, with its plan.
pub(super) struct Built {
    pub(super) kind: Kind,
    pub(super) placed: Placed,
    /// What a run of it costs.
    pub(super) cost: graph::Cost,
    /// What each output is.
    outputs: Vec<Output>,
    /// The names of all parameters.
    names: Vec<String>,
    /// Of each parameter that is a stack of experts, which [`Output::Chosen`] it goes by.
    routers: Vec<Option<usize>>,
}

impl Built {
    /// Where an output stands among all.
    pub(super) fn find(&self, what: Output) -> Option<usize> {
        self.outputs.iter().position(|&o| o == what)
    }
}

/// A run of a graph: its inputs, and how far it has come.
pub(super) struct Run {
    pub(super) built: usize,
    position: Position,
    pub(super) inputs: Inputs,
    /// The chunk, and whether it is the last of its walk, where there is one.
    chunk: Option<(usize, bool)>,
    /// For each leaf of the graph, which of [`bindable`] it is bound to.
    binds: Vec<usize>,
}

/// What is bound to the leaves of a graph that say which rows it computes.
pub(super) struct Inputs {
    pub(super) ints: Vec<(&'static str, Vec<i32>)>,
    /// Of the rows that may carry loss.
    pub(super) weights: Vec<f32>,
    /// How many of them do, the first.
    pub(super) loud: usize,
}

/// A part of a chunk with its nodes.
struct Link {
    part: Part,
    /// Where gradients that later chunks send back arrive.
    value: NodeId,
    /// What later chunks read.
    kept: NodeId,
}

impl<M: Deref<Target = Model>> Gradients<M> {
    fn devices(&self) -> Vec<&dyn Device> {
        let fallback = self.fallback.iter().map(|(device, _)| device.as_ref());
        std::iter::once(self.model.device().as_ref()).chain(fallback).collect()
    }

    /// The index of the graph of a kind, which is built if it is new.
    pub(super) fn build(&mut self, kind: Kind, parameters: &Parameters) -> Result<usize> {
        if let Some(i) = self.built.iter().position(|b| b.kind == kind) {
            return Ok(i);
        }
        let net_config = self.net_config(kind, parameters);
        let names = parameters.names();
        let model: &Model = &self.model;
        let mut net = Net::new(model.weights(), &net_config);
        let hidden = model.arch().hidden(&mut net)?;
        let losses = match kind.labelled {
            0 => Vec::new(),
            _ => losses(&mut net, model.arch(), hidden, self.piece)?,
        };
        let links = match kind.earlier {
            Some(_) => links(&net, &names)?,
            None => Vec::new(),
        };
        let mut graph = net.graph;
        let mut outputs: Vec<(Output, NodeId)> = Vec::new();
        outputs.extend(losses.iter().map(|l| (Output::Loss, l.0)));
        let mut routers = Vec::new();
        if kind.backward && kind.labelled > 0 {
            let ids;
            (ids, routers) = choices(&graph, &names);
            outputs.extend(ids.into_iter().enumerate().map(|(i, ids)| (Output::Chosen(i), ids)));
        }
        if kind.backward {
            let more = self.differentiate(&mut graph, kind, &losses, &links, &names)?;
            outputs.extend(more);
        } else {
            let kept = links.iter().enumerate().map(|(p, link)| (Output::Kept(p), link.kept));
            outputs.extend(kept);
        }
        let mut nodes: Vec<NodeId> = outputs.iter().map(|o| o.1).collect();
        if kind.backward {
            let precision = self.config.grad_precision;
            (graph, nodes) = graph::grad_precision(graph, nodes, precision)?;
            (graph, nodes) = graph::recompute(&graph, &nodes, self.config.recompute)?;
        }
        let placed = graph::place(&graph, &nodes, &self.devices(), self.config.placement)?;
        if self.memory.parts.is_empty() {
            self.memory.parts = links.into_iter().map(|link| link.part).collect();
        }
        let outputs = outputs.into_iter().map(|o| o.0).collect();
        let cost = placed.cost();
        self.built.push(Built { kind, placed, cost, outputs, names, routers });
        Ok(self.built.len() - 1)
    }

    fn net_config(&self, kind: Kind, parameters: &Parameters) -> NetConfig {
        let rows = self.config.rows;
        let earlier = kind.earlier.filter(|&n| n > 0);
        NetConfig {
            rows,
            seqs: if kind.earlier.is_some() { 1 } else { self.most_sequences() },
            logit_rows: kind.labelled,
            cache: self.config.cache,
            // A page is a chunk.
            prefix: earlier.map(|pages| PrefixShape { pages, page: rows, table: pages }),
            states: if earlier.is_some() { EntryStates::Given } else { EntryStates::Zero },
            adapters: parameters.adapter.iter().map(|a| a.shapes()).collect(),
            dropout: kind.dropped.then_some(self.config.dropout),
            trainable: parameters.weights.keys().cloned().collect::<BTreeSet<_>>(),
        }
    }

    /// Adds the gradients to a graph: of the parameters, and of what a chunk reads of earlier
    /// ones. A chunk without loss depends on fewer parameters; the gradients of the others are
    /// zero and no outputs.
    fn differentiate(
        &self,
        graph: &mut Graph,
        kind: Kind,
        losses: &[(NodeId, NodeId)],
        links: &[Link],
        names: &[String],
    ) -> Result<Vec<(Output, NodeId)>> {
        let mut cotangents = losses.to_vec();
        for Link { part, value, .. } in links.iter().filter(|l| l.part.moves) {
            let shape = graph.node(*value).shape;
            cotangents.push((*value, graph.leaf(&part.seed, shape, DType::F32)?));
        }
        let reached = reached(graph, &cotangents);
        let is_reached = |leaf: &NodeId| flag(&reached, *leaf);
        let mut of: Vec<(Output, NodeId)> = Vec::new();
        for (i, name) in names.iter().enumerate() {
            match graph.find_leaf(name) {
                Some(leaf) if kind.labelled > 0 || is_reached(&leaf) => {
                    of.push((Output::Gradient(i), leaf));
                }
                None if kind.labelled > 0 => {
                    let tensor = name.trim_start_matches("0:");
                    let message = format!("the model's graph has no tensor `{tensor}` to train");
                    return Err(Error::Setting(message));
                }
                _ => {}
            }
        }
        let earlier = kind.earlier.unwrap_or(0);
        for (p, link) in links.iter().enumerate().filter(|l| l.1.part.moves && earlier > 0) {
            let leaf = graph.find_leaf(&link.part.name).filter(is_reached);
            of.extend(leaf.map(|leaf| (Output::Sent(p), leaf)));
        }
        let wrt: Vec<NodeId> = of.iter().map(|o| o.1).collect();
        let backward = graph::vjp(graph, &cotangents, &wrt).map_err(|e| {
            let cut = of.iter().find(|(_, leaf)| !flag(&reached, *leaf));
            match (cut, e) {
                (Some(&(Output::Gradient(i), leaf)), graph::Error::Refusal(mut refusal))
                    if matches!(
                        graph::vjp(graph, &cotangents, &[leaf]),
                        Err(graph::Error::Refusal(of_leaf)) if of_leaf == refusal
                    ) =>
                {
                    let name = names.get(i).map_or("", |name| tensor_of(name));
                    let why =
                        format!("; nothing else of the loss depends on `{name}`: leave it out");
                    refusal.reason += &why;
                    graph::Error::Refusal(refusal)
                }
                (_, e) => e,
            }
        })?;
        *graph = backward.graph;
        let within = self.within_horizon(earlier);
        let mut outputs = Vec::new();
        for ((what, _), grad) in of.into_iter().zip(backward.grads) {
            let is_state = |p: usize| links.get(p).is_some_and(|l| l.part.is_state);
            let grad = match what {
                Output::Sent(p) if within < earlier && !is_state(p) => {
                    // Only what is within the horizon outlives the layer.
                    let pages = graph.node(grad).shape;
                    let pages = [earlier, pages.elements() / earlier.max(1)];
                    let all = graph.reshape(grad, &pages)?;
                    let ids = graph.leaf("horizon", Shape::new(&[within])?, DType::I32)?;
                    let near = graph.gather(all, ids, "horizon")?;
                    graph.set_pass(all, graph::Pass::Backward);
                    graph.set_pass(near, graph::Pass::Backward);
                    near
                }
                _ => grad,
            };
            outputs.push((what, grad));
        }
        Ok(outputs)
    }

    /// Takes the memory for a built graph, and loads the weights it reads elsewhere.
    pub(super) fn take(&mut self, built: usize) -> Result<()> {
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

    /// The run of a graph, which is built if it is new.
    pub(super) fn begin_run(
        &mut self,
        kind: Kind,
        inputs: Inputs,
        chunk: Option<(usize, bool)>,
        parameters: &Parameters,
    ) -> Result<Run> {
        let built = self.build(kind, parameters)?;
        self.take(built)?;
        let (position, binds) = (Position::default(), Vec::new());
        let mut run = Run { built, position, inputs, chunk, binds };
        run.binds = self.binds(&run, parameters)?;
        Ok(run)
    }

    /// Runs on until the end, which is true, or until `stop` says so.
    pub(super) fn advance_run(
        &mut self,
        run: &mut Run,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<bool> {
        let position = run.position;
        let on = self.bound(run, parameters, |placed, devices, leaves, workspace| {
            Ok(placed.run(devices, leaves, workspace, position, stop)?)
        })?;
        if let Some(at) = on {
            run.position = at;
        }
        Ok(on.is_none())
    }

    /// Goes on with the search for the first result of a run that is not finite; `None` when
    /// `stop` says so. The run begins anew, so that nothing of it can be read after.
    pub(super) fn search_run(
        &mut self,
        run: &Run,
        search: &mut graph::Search,
        parameters: &Parameters,
        stop: &dyn Stop,
    ) -> Result<Option<Option<graph::Culprit>>> {
        self.bound(run, parameters, |placed, devices, leaves, workspace| {
            Ok(placed.search(devices, leaves, workspace, search, stop)?)
        })
    }

    /// Does something with the graph of a run, its devices, what its leaves are bound to, and the
    /// memory.
    fn bound<T>(
        &mut self,
        run: &Run,
        parameters: &Parameters,
        act: impl FnOnce(&Placed, &[&dyn Device], &[Leaf<'_>], &mut Workspace) -> Result<T>,
    ) -> Result<T> {
        // By field, since the workspace is borrowed beside it.
        let Some(Built { kind, placed, .. }) = self.built.get(run.built) else {
            return Err(Error::Stopped("a plan went missing".into()));
        };
        let elsewhere = self.fallback.as_ref().map(|(_, weights)| weights);
        let sources = Sources { model: &self.model, elsewhere, memory: &self.memory, parameters };
        let all: Vec<Leaf<'_>> = bindable(&sources, *kind, run).map(|(_, leaf)| leaf).collect();
        let lost = || Error::Stopped("a leaf of a pass went missing".into());
        let bound = run.binds.iter().map(|&i| all.get(i).copied().ok_or_else(lost));
        let leaves = bound.collect::<Result<Vec<_>>>()?;
        let fallback = self.fallback.iter().map(|(device, _)| device.as_ref());
        let own = self.model.device().as_ref();
        let devices: Vec<&dyn Device> = std::iter::once(own).chain(fallback).collect();
        act(placed, &devices, &leaves, &mut self.workspace)
    }

    /// Adds the negative log-likelihoods of a run that has come to its end to a list, one for each
    /// row that carries loss.
    pub(super) fn losses_of(&self, run: &Run, to: &mut Vec<f32>) -> Result<()> {
        let built = self.built(run)?;
        let first = to.len();
        let pieces = built.outputs.iter().take_while(|&&o| o == Output::Loss).count();
        for (i, slot) in built.placed.outputs().enumerate().take(pieces) {
            let at = to.len();
            to.resize(at + slot.shape.elements(), 0.0);
            let piece = to.get_mut(at..).unwrap_or(&mut []);
            built.placed.read(&self.workspace, i, bytemuck::cast_slice_mut(piece))?;
        }
        to.truncate(first + run.inputs.loud);
        Ok(())
    }

    /// How many numbers the gradient of parameter `index` has by a run that has come to its end;
    /// `None` where it is zero since nothing of the run depends on the parameter.
    pub(super) fn gradient_len_of(&self, run: &Run, index: usize) -> Result<Option<usize>> {
        let built = self.built(run)?;
        let at = built.find(Output::Gradient(index));
        match at.and_then(|at| built.placed.outputs().nth(at)) {
            Some(slot) => Ok(Some(slot.shape.elements())),
            None if built.kind.labelled == 0 => Ok(None),
            None => Err(no_gradient(index)),
        }
    }

    /// That gradient from the number `from` on, as much as `to` takes.
    pub(super) fn gradient_of(
        &self,
        run: &Run,
        index: usize,
        from: usize,
        to: &mut [f32],
    ) -> Result<()> {
        let built = self.built(run)?;
        let at = built.find(Output::Gradient(index)).ok_or_else(|| no_gradient(index))?;
        let bytes = bytemuck::cast_slice_mut(to);
        built.placed.read_part(&self.workspace, at, from * size_of::<f32>(), bytes)?;
        let name = built.names.get(index).ok_or_else(|| no_gradient(index))?;
        match to.iter().all(|g| g.is_finite()) {
            true => Ok(()),
            false => Err(Error::NotFinite(format!("the gradient of `{name}` is not finite"))),
        }
    }

    /// Marks the experts of parameter `index` that rows with loss chose in a run that has come to
    /// its end; all of a parameter that is no stack of experts.
    pub(super) fn chosen_of(&self, run: &Run, index: usize, marks: &mut [bool]) -> Result<()> {
        let built = self.built(run)?;
        let logit_rows = run.inputs.ints.iter().find(|(name, _)| *name == "logit_rows");
        let loud = logit_rows.into_iter().flat_map(|(_, rows)| rows).zip(&run.inputs.weights);
        let mut loud = loud.take(run.inputs.loud).filter(|(_, weight)| **weight != 0.0).peekable();
        if loud.peek().is_none() {
            return Ok(());
        }
        let Some(router) = built.routers.get(index).copied().flatten() else {
            marks.fill(true);
            return Ok(());
        };
        let lost = || Error::Stopped("what a router chose went missing".into());
        let at = built.find(Output::Chosen(router)).ok_or_else(lost)?;
        let shape = built.placed.outputs().nth(at).ok_or_else(lost)?.shape;
        let mut ids = vec![0i32; shape.elements()];
        built.placed.read(&self.workspace, at, bytemuck::cast_slice_mut(&mut ids))?;
        for (&row, _) in loud {
            let of_row = ids.chunks(shape.cols().max(1)).nth(row as usize).ok_or_else(lost)?;
            for &id in of_row {
                *usize::try_from(id).ok().and_then(|id| marks.get_mut(id)).ok_or_else(lost)? = true;
            }
        }
        Ok(())
    }

    /// What each leaf of a run's graph is bound to, found by name once for all its segments.
    fn binds(&self, run: &Run, parameters: &Parameters) -> Result<Vec<usize>> {
        let built = self.built(run)?;
        let elsewhere = self.fallback.as_ref().map(|(_, weights)| weights);
        let sources = Sources { model: &self.model, elsewhere, memory: &self.memory, parameters };
        let mut by_name: HashMap<(String, bool), usize> = HashMap::new();
        for (i, (name, _)) in bindable(&sources, built.kind, run).enumerate() {
            let name = match name {
                Bindable::Named(name) => (name.to_string(), false),
                Bindable::Lora(target, part) => (format!("0:{target}.{part}"), false),
                Bindable::Elsewhere(name) => (name.to_string(), true),
            };
            // The first of a name: a trained weight before the model's own.
            by_name.entry(name).or_insert(i);
        }
        let bind = |leaf: &graph::PlacedLeaf| {
            let name = leaf.slot.name.to_string();
            let unbound = || Error::Stopped(format!("nothing is bound to `{}`", leaf.slot.name));
            by_name.get(&(name, leaf.device == 1 && leaf.resident)).copied().ok_or_else(unbound)
        };
        built.placed.leaves.iter().map(bind).collect()
    }

    pub(super) fn built(&self, run: &Run) -> Result<&Built> {
        self.built.get(run.built).ok_or_else(|| Error::Stopped("a plan went missing".into()))
    }
}

/// The tensor that a parameter is, or adapts.
fn tensor_of(name: &str) -> &str {
    let target = name.strip_prefix("0:").and_then(|rest| rest.rsplit_once('.'));
    target.map_or(name, |(target, _)| target)
}

fn no_gradient(index: usize) -> Error {
    Error::Stopped(format!("a pass has no gradient {index}"))
}

/// The losses of pieces of rows, each with its rows' weights.
fn losses(
    net: &mut Net<'_>,
    arch: &dyn Architecture,
    hidden: NodeId,
    piece: usize,
) -> Result<Vec<(NodeId, NodeId)>> {
    let rows = Shape::new(&[net.config().logit_rows])?;
    let labels = net.graph.leaf("labels", rows, DType::I32)?;
    let weights = net.graph.leaf("loss_weights", rows, DType::F32)?;
    let mut start = 0;
    Ok(net.logits(arch, hidden, piece, |graph, logits| {
        let len = graph.node(logits).shape.dim(0);
        let of = |g: &mut Graph, all| g.slice(all, 0, start, len);
        let (labels, weights) = (of(graph, labels)?, of(graph, weights)?);
        start += len;
        let op = Op::CrossEntropy(graph::CrossEntropyAttrs::PLAIN);
        Ok((graph.push(op, &[logits, labels], "loss")?, weights))
    })?)
}

/// The ids by which rows choose experts, without repetition, and for each parameter that is a
/// stack of experts which of them are its.
fn choices(graph: &Graph, names: &[String]) -> (Vec<NodeId>, Vec<Option<usize>>) {
    let leaf = |(i, name): (usize, &String)| Some((graph.find_leaf(name)?, i));
    let leaves: HashMap<NodeId, usize> = names.iter().enumerate().filter_map(leaf).collect();
    let (mut all, mut of) = (Vec::new(), vec![None; names.len()]);
    for node in graph.ids().map(|id| graph.node(id)) {
        let ids = match node.op {
            Op::MatMulExperts { .. } => node.args.get(2),
            Op::LoraExperts { .. } => node.args.get(3),
            _ => None,
        };
        let Some(&ids) = ids else { continue };
        for &i in node.args.iter().filter_map(|arg| leaves.get(arg)) {
            let known = all.iter().position(|&known| known == ids);
            let router = known.unwrap_or_else(|| {
                all.push(ids);
                all.len() - 1
            });
            if let Some(of) = of.get_mut(i) {
                *of = Some(router);
            }
        }
    }
    (all, of)
}

/// What later chunks read of one, in a fixed order: keys and values layer by layer, then states.
fn links(net: &Net<'_>, names: &[String]) -> Result<Vec<Link>> {
    let graph = &net.graph;
    let trained: Vec<NodeId> = names.iter().filter_map(|n| graph.find_leaf(n)).collect();
    let moving = depending(graph, &trained);
    let mut links = Vec::new();
    let mut link = |name: String, value: NodeId, kept: NodeId, is_state: bool| -> Result<()> {
        let (of, node) = (graph.node(value), graph.node(kept));
        let bytes = node.shape.bytes(node.dtype).ok_or_else(|| {
            Error::Stopped(format!("`{name}` is of {}, which has no size", node.dtype))
        })?;
        let (seed, moves) = (format!("seed.{name}"), flag(&moving, value));
        let part = Part { name, seed, is_state, elements: of.shape.elements(), bytes, moves };
        links.push(Link { part, value, kept });
        Ok(())
    };
    for (i, (values, kept)) in net.computed.iter().zip(&net.kv).enumerate() {
        link(format!("cache.{i}.k"), values.0, kept.0, false)?;
        link(format!("cache.{i}.v"), values.1, kept.1, false)?;
    }
    for (i, state) in net.states.iter().enumerate() {
        link(format!("state.{i}"), state.exit, state.exit, true)?;
    }
    Ok(links)
}

fn flag(flags: &[bool], id: NodeId) -> bool {
    flags.get(id.index()).copied().unwrap_or(false)
}

fn set(flags: &mut [bool], id: NodeId) {
    if let Some(flag) = flags.get_mut(id.index()) {
        *flag = true;
    }
}

/// True where a gradient passes from a node to its operand: as in [`graph::vjp`], indices end a
/// path.
fn follows(graph: &Graph, id: NodeId, operand: NodeId) -> bool {
    let is_index = |id: NodeId| graph.node(id).dtype == DType::I32;
    !is_index(id) || is_index(operand)
}

/// The nodes that depend on some, themselves among them.
fn depending(graph: &Graph, on: &[NodeId]) -> Vec<bool> {
    let mut flags = vec![false; graph.len()];
    on.iter().for_each(|&id| set(&mut flags, id));
    for id in graph.ids() {
        let mut args = graph.node(id).args.iter();
        if args.any(|&a| flag(&flags, a) && follows(graph, id, a)) {
            set(&mut flags, id);
        }
    }
    flags
}

/// The nodes that some with cotangents depend on, themselves among them.
fn reached(graph: &Graph, cotangents: &[(NodeId, NodeId)]) -> Vec<bool> {
    let mut flags = vec![false; graph.len()];
    cotangents.iter().for_each(|c| set(&mut flags, c.0));
    for id in graph.ids().rev() {
        if flag(&flags, id) {
            for &a in graph.node(id).args.iter().filter(|&&a| follows(graph, id, a)) {
                set(&mut flags, a);
            }
        }
    }
    flags
}

/// The name of what a leaf can be bound to.
enum Bindable<'a> {
    Named(&'a str),
    /// Target and part of the adapter.
    Lora(&'a str, &'static str),
    /// A weight that the other device holds.
    Elsewhere(&'a str),
}

/// Where what is bound to leaves comes from.
#[derive(Copy, Clone)]
struct Sources<'a> {
    model: &'a Model,
    elsewhere: Option<&'a Weights>,
    memory: &'a Memory,
    parameters: &'a Parameters,
}

/// All that leaves of a graph can be bound to, always in the same order: finding names again for
/// each segment of a few hundred microseconds would take a third of it.
fn bindable<'a>(
    sources: &Sources<'a>,
    kind: Kind,
    run: &'a Run,
) -> impl Iterator<Item = (Bindable<'a>, Leaf<'a>)> {
    let Sources { model, elsewhere, memory, parameters } = *sources;
    let floats = |values: &'a [f32]| Leaf::Host(bytemuck::cast_slice(values));
    let ints = run.inputs.ints.iter();
    let ints = ints.map(|(name, list)| (*name, Leaf::Host(bytemuck::cast_slice(list))));
    let weights = std::iter::once(("loss_weights", floats(&run.inputs.weights)));
    let chunk = run.chunk.map(|(chunk, last)| memory.leaves(chunk, last, kind));
    let inputs = ints.chain(weights).chain(chunk.into_iter().flatten());
    let inputs = inputs.map(|(name, leaf)| (Bindable::Named(name), leaf));
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
