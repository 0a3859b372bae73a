//! Placement: a graph over several devices.
//!
//! A node runs on the first device, which holds the weights, if that has a kernel for it, else
//! on the next that does, else the graph is refused. The nodes are cut into parts that each run
//! on one device and are each an ordinary [`Plan`]: what a part computes for another is an
//! output of the one and a leaf of the other, and crosses through host memory.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::{flag, live, no_kernel, plan_part};
use crate::*;

/// May a node run elsewhere than on the first device?
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, Default)]
pub enum Policy {
    /// Yes; [`Placed::fallbacks`] lists it and what it costs.
    #[default]
    Fallback,
    /// No: the graph is refused, naming the first such node.
    Strict,
}

/// A node that does not run on the first device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fallback {
    /// The node.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Its op; `Copy` for a view that is an output.
    pub op: &'static str,
    /// Index of the device it runs on.
    pub device: usize,
    /// Why the first device does not run it.
    pub reason: String,
    /// Bytes that cross between devices for it in a run: operands that come from another one,
    /// and its result where another one reads it.
    pub crossing: usize,
}

/// A leaf to bind: a run takes one [`Leaf`] for each, in order.
#[derive(Clone, PartialEq, Debug)]
pub struct PlacedLeaf {
    /// Index of the device that reads it. A weight must have been loaded by that device.
    pub device: usize,
    /// True for a weight, which is bound to what [`Device::load`] returned.
    pub resident: bool,
    /// The leaf.
    pub slot: LeafSlot,
}

/// What a part's leaf is bound to.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Source {
    /// Index into [`Placed::leaves`].
    Leaf(usize),
    /// Index into [`Placed::staged`].
    Staged(usize),
}

/// Consecutive steps on one device.
#[derive(Clone, PartialEq, Debug)]
struct Part {
    device: usize,
    plan: Plan,
    /// Per leaf of the plan.
    sources: Vec<Source>,
    /// Outputs of the plan that are copied to host memory when it is done: output, staged.
    stage: Vec<(usize, usize)>,
}

/// Where an output of the graph can be read after a run.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
struct At {
    part: usize,
    output: usize,
    staged: Option<usize>,
}

/// A graph laid out over devices.
#[derive(Clone, PartialEq, Debug)]
pub struct Placed {
    parts: Vec<Part>,
    /// What to bind, in order.
    pub leaves: Vec<PlacedLeaf>,
    /// Nodes that do not run on the first device, in graph order.
    pub fallbacks: Vec<Fallback>,
    outputs: Vec<At>,
    /// Bytes of each value kept in host memory between parts.
    staged: Vec<usize>,
    devices: usize,
}

/// A position inside the run of a [`Placed`] graph.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Position {
    pub(crate) part: usize,
    pub(crate) segment: Segment,
}

/// The memory of runs: an arena per device that is used, and what crosses between them.
#[derive(Default)]
pub struct Workspace {
    arenas: Vec<Option<Box<dyn Arena>>>,
    /// In 8-byte units, so that every element type is aligned.
    staged: Vec<Vec<u64>>,
}

impl Workspace {
    /// Bytes of all arenas, and the sum of the highest bytes any run has written in each.
    pub fn arena(&self) -> (usize, usize) {
        let arenas = self.arenas.iter().flatten();
        arenas.fold((0, 0), |(bytes, high), a| (bytes + a.bytes(), high + a.high_water()))
    }

    /// Copies bytes of the arena on a device to host memory.
    pub(crate) fn read(
        &self,
        device: usize,
        range: std::ops::Range<usize>,
        to: &mut [u8],
    ) -> std::result::Result<(), Fault> {
        let arena = self.arenas.get(device).and_then(Option::as_ref);
        arena.ok_or_else(|| Fault::binding("", "there is no arena to read"))?.read(range, to)
    }

    /// Fills all of it with NaN patterns, so that what is not written shows.
    pub fn poison(&mut self) {
        self.arenas.iter_mut().flatten().for_each(|arena| arena.poison());
        self.staged.iter_mut().for_each(|buffer| buffer.fill(u64::MAX));
    }
}

/// Lays the computation of `outputs` out over devices: the first holds the weights, the others
/// are asked in order for what it has no kernel for.
///
/// # Errors
/// `Refusal` with [`Code::NoKernel`] for the first node, in graph order, that no device has a
/// kernel for, or that would fall back where the policy forbids it. `Invalid` without devices.
pub fn place(
    graph: &Graph,
    outputs: &[NodeId],
    devices: &[&dyn Device],
    policy: Policy,
) -> Result<Placed> {
    let strict = policy == Policy::Strict && devices.len() > 1;
    let devices = if strict { devices.get(..1).unwrap_or(&[]) } else { devices };
    if devices.is_empty() {
        return Err(Invalid::new("there is no device to place a graph on").into());
    }
    let leaf: Vec<bool> = graph.ids().map(|id| is_leaf(graph, id)).collect();
    let live = live(graph, outputs, &leaf)?;
    let mut placement = Placement {
        graph,
        outputs,
        devices,
        steps: graph.ids().filter(|&id| flag(&live, id)).collect(),
        home: BTreeMap::new(),
        reasons: BTreeMap::new(),
    };
    placement.steps.retain(|&id| !is_leaf(graph, id) && !graph.node(id).op.is_view());
    // A view or leaf that is an output is a copy, which has to run somewhere too.
    let copies = outputs.iter().filter(|&&o| is_leaf(graph, o) || graph.node(o).op.is_view());
    placement.steps.extend(copies);
    placement.steps.sort();
    placement.steps.dedup();
    if devices.len() > 1 {
        placement.probe()?;
    }
    loop {
        let moved = match placement.cut() {
            Ok(placed) => return Ok(placed),
            Err((node, device, error)) => placement.move_on(node, device, error),
        };
        moved.map_err(|error| match error {
            Error::Refusal(mut refusal) if strict => {
                refusal.reason.push_str(", and `strict` forbids running it on another");
                Error::Refusal(refusal)
            }
            error => error,
        })?;
    }
}

fn is_leaf(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.node(id).op, Op::Leaf)
}

/// The node whose value a view shows.
fn base(graph: &Graph, mut id: NodeId) -> NodeId {
    while let Some(&source) = graph.node(id).args.first().filter(|_| graph.node(id).op.is_view()) {
        id = source;
    }
    id
}

struct Placement<'g> {
    graph: &'g Graph,
    outputs: &'g [NodeId],
    devices: &'g [&'g dyn Device],
    /// What runs, in graph order.
    steps: Vec<NodeId>,
    /// The device of each step.
    home: BTreeMap<NodeId, usize>,
    /// Why the first device does not run a step.
    reasons: BTreeMap<NodeId, String>,
}

type Cut = std::result::Result<Placed, (Option<NodeId>, usize, Error)>;

impl<'g> Placement<'g> {
    /// Finds a home for each step by asking about dense operands: a layout that a device does not
    /// read in place is the planner's to mend.
    fn probe(&mut self) -> Result<()> {
        for id in self.steps.clone() {
            let node = self.graph.node(id);
            if is_leaf(self.graph, id) || node.op.is_view() {
                continue;
            }
            let args: Vec<Arg> = node.args.iter().map(|&a| self.dense(a)).collect();
            let call = Call { op: &node.op, args: &args, out: self.dense(id) };
            let mut refusal = None;
            let found = self.devices.iter().enumerate().find(|(_, device)| {
                let why = match device.supports(&call) {
                    Ok(_) => return true,
                    Err(Unsupported::Kernel(what)) => what,
                    Err(Unsupported::Layout(i)) => format!("operand {i} even when it is dense"),
                };
                refusal.get_or_insert((*device, why));
                false
            });
            match (found, refusal) {
                (Some((device, _)), refusal) => {
                    self.home.insert(id, device);
                    if let Some((_, why)) = refusal {
                        self.reasons.insert(id, why);
                    }
                }
                (None, Some((device, why))) => {
                    let others = self.devices.iter().skip(1).map(|d| d.name());
                    let others: Vec<&str> = others.collect();
                    let what = format!("{why}, and {} has none either", others.join(", "));
                    return Err(no_kernel(self.graph, id, &node.op, None, *device, what));
                }
                (None, None) => {}
            }
        }
        Ok(())
    }

    fn dense(&self, id: NodeId) -> Arg {
        let node = self.graph.node(id);
        let resident = self.graph.node(base(self.graph, id)).resident;
        Arg { resident, ..Arg::dense(node.dtype, node.shape) }
    }

    fn home(&self, id: NodeId) -> usize {
        match self.home.get(&id) {
            Some(&device) => device,
            // The copy of a view runs where the value is.
            None => self.home.get(&base(self.graph, id)).copied().unwrap_or(0),
        }
    }

    /// A device could not be planned for: what it could not run goes to the next one.
    fn move_on(&mut self, node: Option<NodeId>, device: usize, error: Error) -> Result<()> {
        let Some(node) = node else { return Err(error) };
        let mut movers = vec![node];
        // A view that is an output is copied for itself, and that copy goes first.
        let is_step = self.steps.contains(&node) && self.home(node) == device;
        if self.graph.node(node).op.is_view() && !is_step {
            // No step of the graph, but a copy for the steps there that read the view.
            let reads = |id: NodeId| {
                let args = self.graph.node(id).args.iter();
                args.copied().any(|a| views(self.graph, a).any(|v| v == node))
            };
            let there = self.steps.iter().copied().filter(|&s| self.home(s) == device);
            movers = there.filter(|&s| reads(s)).collect();
        }
        // Each round takes a step off a device, so there is an end.
        movers.retain(|&mover| self.home(mover) == device);
        if movers.is_empty() || device + 1 >= self.devices.len() {
            return Err(error);
        }
        for mover in movers {
            self.home.insert(mover, device + 1);
            self.reasons.entry(mover).or_insert_with(|| error.to_string());
        }
        Ok(())
    }

    /// Cuts the steps into parts and plans each.
    fn cut(&self) -> Cut {
        let graph = self.graph;
        // The part of a step: as early as what it reads allows, where reading what another device
        // computed means a later part.
        let mut part_of: BTreeMap<NodeId, (usize, usize)> = BTreeMap::new();
        let mut parts: BTreeSet<(usize, usize)> = BTreeSet::new();
        let mut readers: BTreeMap<NodeId, BTreeSet<(usize, usize)>> = BTreeMap::new();
        for &id in &self.steps {
            let device = self.home(id);
            let mut level = 0;
            let reads: Vec<NodeId> = self.reads(id);
            for read in &reads {
                if let Some(&(l, d)) = part_of.get(read) {
                    level = level.max(if d == device { l } else { l + 1 });
                }
            }
            part_of.insert(id, (level, device));
            parts.insert((level, device));
            for read in reads {
                readers.entry(read).or_default().insert((level, device));
            }
        }
        let mut placed = Placed {
            parts: Vec::new(),
            leaves: Vec::new(),
            fallbacks: self.fallbacks(&part_of, &readers),
            outputs: Vec::new(),
            staged: Vec::new(),
            devices: self.devices.len(),
        };
        let several = parts.len() > 1;
        let mut staged_at: BTreeMap<NodeId, usize> = BTreeMap::new();
        let mut leaf_at: BTreeMap<(NodeId, usize), usize> = BTreeMap::new();
        let mut found: BTreeMap<NodeId, At> = BTreeMap::new();
        for &part in &parts {
            let mut wanted: Vec<NodeId> = Vec::new();
            for &id in self.steps.iter().filter(|s| part_of.get(s) == Some(&part)) {
                let crosses = readers.get(&id).is_some_and(|r| r.iter().any(|&r| r != part));
                if crosses || self.outputs.contains(&id) {
                    wanted.push(id);
                }
            }
            let given = |id: NodeId| {
                !graph.node(id).op.is_view() && part_of.get(&id).is_some_and(|&p| p != part)
            };
            let device = part.1;
            let Some(on) = self.devices.get(device) else { continue };
            let plan = plan_part(graph, &wanted, *on, &given)
                .map_err(|blocked| (blocked.node, device, blocked.error))?;
            let sources = plan.leaves.iter().map(|slot| match staged_at.get(&slot.node) {
                Some(&staged) => Source::Staged(staged),
                None => Source::Leaf(*leaf_at.entry((slot.node, device)).or_insert_with(|| {
                    let resident = graph.node(slot.node).resident;
                    placed.leaves.push(PlacedLeaf { device, resident, slot: slot.clone() });
                    placed.leaves.len() - 1
                })),
            });
            let sources = sources.collect();
            let mut stage = Vec::new();
            for (output, slot) in plan.outputs.iter().enumerate() {
                let staged = several.then(|| {
                    placed.staged.push(slot.range.len());
                    let staged = placed.staged.len() - 1;
                    stage.push((output, staged));
                    staged_at.insert(slot.node, staged);
                    staged
                });
                found.insert(slot.node, At { part: placed.parts.len(), output, staged });
            }
            placed.parts.push(Part { device, plan, sources, stage });
        }
        for out in self.outputs {
            match found.get(out) {
                Some(&at) => placed.outputs.push(at),
                None => {
                    let error = Invalid::new("an output was placed nowhere").into();
                    return Err((None, 0, error));
                }
            }
        }
        Ok(placed)
    }

    /// The steps whose values a step reads.
    fn reads(&self, id: NodeId) -> Vec<NodeId> {
        let node = self.graph.node(id);
        let mut reads: Vec<NodeId> = match node.op.is_view() {
            true => vec![base(self.graph, id)],
            false => node.args.iter().map(|&a| base(self.graph, a)).collect(),
        };
        reads.retain(|&r| !is_leaf(self.graph, r));
        reads.sort();
        reads.dedup();
        reads
    }

    fn fallbacks(
        &self,
        part_of: &BTreeMap<NodeId, (usize, usize)>,
        readers: &BTreeMap<NodeId, BTreeSet<(usize, usize)>>,
    ) -> Vec<Fallback> {
        let bytes = |id: NodeId| {
            let node = self.graph.node(id);
            node.shape.bytes(node.dtype).unwrap_or(0)
        };
        let mut list = Vec::new();
        for &id in &self.steps {
            let device = self.home(id);
            let Some(reason) = self.reasons.get(&id).filter(|_| device != 0) else { continue };
            let foreign = |r: &NodeId| part_of.get(r).is_some_and(|p| p.1 != device);
            let mut crossing: usize = self.reads(id).into_iter().filter(foreign).map(bytes).sum();
            if readers.get(&id).is_some_and(|r| r.iter().any(|p| p.1 != device)) {
                crossing += bytes(id);
            }
            let node = self.graph.node(id);
            list.push(Fallback {
                node: id,
                name: node.name.to_string(),
                op: if node.op.is_view() { Op::Copy.name() } else { node.op.name() },
                device,
                reason: reason.clone(),
                crossing,
            });
        }
        list
    }
}

/// A node and the views it is a view of.
fn views(graph: &Graph, id: NodeId) -> impl Iterator<Item = NodeId> {
    std::iter::successors(Some(id), |&id| {
        graph.node(id).args.first().copied().filter(|_| graph.node(id).op.is_view())
    })
}

impl Placed {
    /// Bytes of the arenas: on each device the largest part's.
    pub fn arena_bytes(&self) -> usize {
        (0..self.devices).map(|d| self.arena_bytes_on(d)).sum()
    }

    /// Bytes of the arena on one device.
    pub fn arena_bytes_on(&self, device: usize) -> usize {
        let on = self.parts.iter().filter(|p| p.device == device);
        on.map(|p| p.plan.arena_bytes).max().unwrap_or(0)
    }

    /// Bytes of host memory for what crosses between devices.
    pub fn staged_bytes(&self) -> usize {
        self.staged.iter().map(|b| b.next_multiple_of(8)).sum()
    }

    /// Scratch bytes per worker thread, at most.
    pub fn scratch_bytes(&self) -> usize {
        self.parts.iter().map(|p| p.plan.scratch_bytes).max().unwrap_or(0)
    }

    /// The plans of the parts in the order they run, each with the index of its device.
    pub fn plans(&self) -> impl Iterator<Item = (usize, &Plan)> {
        self.parts.iter().map(|p| (p.device, &p.plan))
    }

    /// The outputs, in the order they were asked for.
    pub fn outputs(&self) -> impl Iterator<Item = &OutputSlot> {
        let slot = |at: &At| self.parts.get(at.part)?.plan.outputs.get(at.output);
        self.outputs.iter().filter_map(slot)
    }

    /// Takes the memory of runs that is not there yet; what is there and large enough stays.
    ///
    /// # Errors
    /// `Fault` with [`Code::OutOfMemory`].
    pub fn reserve(
        &self,
        devices: &[&dyn Device],
        workspace: &mut Workspace,
    ) -> std::result::Result<(), Fault> {
        workspace.arenas.resize_with(self.devices.max(workspace.arenas.len()), || None);
        for (i, (slot, device)) in workspace.arenas.iter_mut().zip(devices).enumerate() {
            let bytes = self.arena_bytes_on(i);
            let used = self.parts.iter().any(|p| p.device == i);
            if used && slot.as_ref().is_none_or(|arena| arena.bytes() < bytes) {
                // Freed first, so that the peak never holds both.
                *slot = None;
                *slot = Some(device.arena(bytes)?);
            }
        }
        workspace.staged.resize_with(self.staged.len().max(workspace.staged.len()), Vec::new);
        for (buffer, bytes) in workspace.staged.iter_mut().zip(&self.staged) {
            let units = bytes.div_ceil(8);
            if buffer.len() < units {
                buffer.try_reserve_exact(units - buffer.len()).map_err(|_| {
                    let what = format!("{bytes} bytes that cross between devices");
                    Fault::new(Code::OutOfMemory, "", what)
                })?;
                buffer.resize(units, 0);
            }
        }
        Ok(())
    }

    /// Runs from a position until it is done, which is `None`, or `stop` says so. `leaves` are
    /// bound in the order of [`Placed::leaves`]; a stopped run continues with the same leaves and
    /// workspace.
    ///
    /// # Errors
    /// `Fault` naming the node, or when the workspace was not reserved.
    pub fn run(
        &self,
        devices: &[&dyn Device],
        leaves: &[Leaf<'_>],
        workspace: &mut Workspace,
        from: Position,
        stop: &dyn Stop,
    ) -> std::result::Result<Option<Position>, Fault> {
        let mut segment = from.segment;
        for (index, part) in self.parts.iter().enumerate().skip(from.part) {
            let small = || Fault::binding("", "the workspace was not reserved for this graph");
            let bound = part.sources.iter().zip(&part.plan.leaves).map(|(source, slot)| {
                let bytes = slot.shape.bytes(slot.dtype).unwrap_or(0);
                match *source {
                    Source::Leaf(i) => leaves.get(i).copied(),
                    Source::Staged(i) => {
                        let buffer = workspace.staged.get(i).map(|b| bytemuck::cast_slice(b));
                        buffer.and_then(|b: &[u8]| b.get(..bytes)).map(Leaf::Host)
                    }
                }
                .ok_or_else(|| Fault::binding(&slot.name, "nothing is bound to it"))
            });
            let bound = bound.collect::<std::result::Result<Vec<_>, _>>()?;
            let device = devices.get(part.device).ok_or_else(small)?;
            let arena = workspace.arenas.get_mut(part.device).and_then(Option::as_mut);
            let arena = arena.ok_or_else(small)?;
            match device.run(&part.plan, &bound, arena.as_mut(), segment, stop)? {
                Progress::Stopped(segment) => return Ok(Some(Position { part: index, segment })),
                Progress::Done => segment = Segment::default(),
            }
            for &(output, staged) in &part.stage {
                let range = part.plan.outputs.get(output).map(|o| o.range.clone());
                let (Some(range), Some(to)) = (range, workspace.staged.get_mut(staged)) else {
                    return Err(small());
                };
                let to: &mut [u8] = bytemuck::cast_slice_mut(to);
                arena.read(range.clone(), to.get_mut(..range.len()).ok_or_else(small)?)?;
            }
            if index + 1 < self.parts.len() && stop.should_stop() {
                return Ok(Some(Position { part: index + 1, segment }));
            }
        }
        Ok(None)
    }

    /// Copies an output of a finished run to host memory.
    ///
    /// # Errors
    /// `Fault` when there is no such output, or `to` is of another length.
    pub fn read(
        &self,
        workspace: &Workspace,
        output: usize,
        to: &mut [u8],
    ) -> std::result::Result<(), Fault> {
        let whole = self.outputs().nth(output).map(|slot| slot.range.len());
        if let Some(bytes) = whole.filter(|&bytes| bytes != to.len()) {
            let message = format!("{bytes} bytes are read into {}", to.len());
            return Err(Fault::binding("", message));
        }
        self.read_part(workspace, output, 0, to)
    }

    /// Copies the bytes of an output from `at` on to host memory, as many as fit in `to`: who may
    /// not be busy for long reads piece by piece.
    ///
    /// # Errors
    /// `Fault` when there is no such output, or it ends before.
    pub fn read_part(
        &self,
        workspace: &Workspace,
        output: usize,
        at: usize,
        to: &mut [u8],
    ) -> std::result::Result<(), Fault> {
        let none = || Fault::binding("", format!("the graph has no output {output} to read"));
        let place = self.outputs.get(output).ok_or_else(none)?;
        let part = self.parts.get(place.part).ok_or_else(none)?;
        let range = part.plan.outputs.get(place.output).ok_or_else(none)?.range.clone();
        let (start, len) = (at, to.len());
        let end = start.checked_add(len).filter(|&end| end <= range.len()).ok_or_else(|| {
            let message = format!("{len} bytes from {start} on are read of {}", range.len());
            Fault::binding("", message)
        })?;
        let Some(staged) = place.staged else {
            let arena = workspace.arenas.get(part.device).and_then(Option::as_ref);
            return arena.ok_or_else(none)?.read(range.start + start..range.start + end, to);
        };
        let buffer = workspace.staged.get(staged).ok_or_else(none)?;
        let bytes: &[u8] = bytemuck::cast_slice(buffer);
        to.copy_from_slice(bytes.get(start..end).ok_or_else(none)?);
        Ok(())
    }
}
