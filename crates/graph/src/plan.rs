//! From a graph to an order of execution in which every value has its place in one arena.

use std::ops::Range;
use std::sync::Arc;

use crate::schedule::schedule;
use crate::*;

/// Where an operand's storage is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Leaf of this index in [`Plan::leaves`].
    Leaf(usize),
    /// Bytes `start .. start + len` of the arena; `start` is a multiple of 64.
    Arena {
        /// First byte.
        start: usize,
        /// Bytes.
        len: usize,
    },
}

/// One operand or result of a step.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Operand {
    /// Its storage.
    pub place: Place,
    /// Type, shape, and layout inside the storage.
    pub arg: Arg,
}

/// One op to run.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// The op; never `Leaf`, and a view op only ever as `Copy`.
    pub op: Op,
    /// The node it computes.
    pub node: NodeId,
    /// The node's name.
    pub name: Arc<str>,
    /// Operands in order.
    pub args: Vec<Operand>,
    /// The result: contiguous, in the arena. A copied reshape has its source's shape here.
    pub out: Operand,
    /// The bytes of the arena that it keeps between its tiles: [`Needs::kept`](crate::Needs).
    pub kept: Range<usize>,
}

/// A leaf a run must bind.
#[derive(Clone, PartialEq, Debug)]
pub struct LeafSlot {
    /// The node.
    pub node: NodeId,
    /// The leaf's name.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
}

/// A value that can be read after a run.
#[derive(Clone, PartialEq, Debug)]
pub struct OutputSlot {
    /// The node.
    pub node: NodeId,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
    /// Its bytes in the arena.
    pub range: Range<usize>,
}

/// A graph laid out for one device.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// What to run, in order.
    pub steps: Vec<Step>,
    /// What to bind.
    pub leaves: Vec<LeafSlot>,
    /// What to read, in the order it was asked for.
    pub outputs: Vec<OutputSlot>,
    /// The arena's size in bytes: exactly the high-water mark of a run.
    pub arena_bytes: usize,
    /// Scratch bytes per worker thread.
    pub scratch_bytes: usize,
    /// How many steps are copies the planner added for operands that a device does not read
    /// in place.
    pub copies: usize,
}

/// Bytes every value's storage is aligned to.
const ALIGN: usize = 64;

/// Plans the computation of `outputs` on one device.
///
/// Values that no output depends on are left out. Views are read in place where the device
/// accepts the layout and are copied once otherwise; an output is always a dense value of its
/// own. Gradient nodes run as soon as running them does not raise the memory in use.
///
/// # Errors
/// `Refusal` with [`Code::NoKernel`] for the first node, in graph order, that the device has no
/// kernel for.
pub fn plan(graph: &Graph, outputs: &[NodeId], device: &dyn Device) -> Result<Plan> {
    plan_part(graph, outputs, device, &|_| false).map_err(|blocked| blocked.error)
}

/// Why there is no plan, and the node it is about.
pub(crate) struct Blocked {
    pub(crate) node: Option<NodeId>,
    pub(crate) error: Error,
}

/// As [`plan()`], where the values of the nodes that are `given` come from elsewhere: they are
/// leaves to this plan.
pub(crate) fn plan_part(
    graph: &Graph,
    outputs: &[NodeId],
    device: &dyn Device,
    given: &dyn Fn(NodeId) -> bool,
) -> std::result::Result<Plan, Blocked> {
    let is_leaf = |id| matches!(graph.node(id).op, Op::Leaf) || given(id);
    let leaf: Vec<bool> = graph.ids().map(is_leaf).collect();
    let live = live(graph, outputs, &leaf).map_err(|error| Blocked { node: None, error })?;
    let views = Views::resolve(graph, leaf, &live, outputs, device)?;
    let steps = graph.ids().filter(|&id| flag(&live, id) && views.stored(graph, id));
    let steps = steps.map(|id| (id, views.reads(graph, id))).collect();
    let order = schedule(graph, steps, outputs);
    lay_out(graph, &views, &order, outputs, device)
}

/// Which nodes the outputs depend on, up to the leaves.
pub(crate) fn live(graph: &Graph, outputs: &[NodeId], leaf: &[bool]) -> Result<Vec<bool>> {
    let mut live = vec![false; graph.len()];
    for out in outputs {
        match live.get_mut(out.index()) {
            Some(flag) => *flag = true,
            None => return Err(Invalid::new("an output is not of this graph").into()),
        }
    }
    for id in graph.ids().rev() {
        if flag(&live, id) && !flag(leaf, id) {
            for a in &graph.node(id).args {
                if let Some(flag) = live.get_mut(a.index()) {
                    *flag = true;
                }
            }
        }
    }
    Ok(live)
}

pub(crate) fn flag(flags: &[bool], id: NodeId) -> bool {
    flags.get(id.index()).copied().unwrap_or(false)
}

/// Where the elements of each node are: in which node's storage, and how.
struct Views {
    /// Leaves, and what comes from elsewhere.
    leaf: Vec<bool>,
    /// Per node: the node whose storage holds it, and its layout there.
    at: Vec<(NodeId, Layout)>,
    /// View nodes, and leaves that are outputs: they get storage of their own, filled by a copy.
    copied: Vec<bool>,
}

impl Views {
    /// Asks the device about every node in turn; copies the views it does not read in place.
    fn resolve(
        graph: &Graph,
        leaf: Vec<bool>,
        live: &[bool],
        outputs: &[NodeId],
        device: &dyn Device,
    ) -> std::result::Result<Views, Blocked> {
        let n = graph.len();
        let mut views = Views { leaf, at: Vec::with_capacity(n), copied: vec![false; n] };
        for &out in outputs {
            if graph.node(out).op.is_view() || views.is_leaf(out) {
                views.copy(out);
            }
        }
        // A copy changes what the nodes after it read, so they are visited again. Each step
        // back marks one more copy, so the loop ends.
        let ids: Vec<NodeId> = graph.ids().collect();
        while let Some(&id) = ids.get(views.at.len()) {
            let visited = views.visit(graph, live, id, device);
            if let Some(copy) = visited.map_err(|error| Blocked { node: Some(id), error })? {
                views.copy(copy);
                views.at.truncate(copy.index());
            }
        }
        Ok(views)
    }

    fn is_leaf(&self, id: NodeId) -> bool {
        flag(&self.leaf, id)
    }

    fn copy(&mut self, id: NodeId) {
        if let Some(copied) = self.copied.get_mut(id.index()) {
            *copied = true;
        }
    }

    /// Places one node, or says which view must be copied first.
    fn visit(
        &mut self,
        graph: &Graph,
        live: &[bool],
        id: NodeId,
        device: &dyn Device,
    ) -> Result<Option<NodeId>> {
        let node = graph.node(id);
        let stored = self.stored(graph, id);
        if let Some(&source) = node.args.first()
            && node.op.is_view()
            && !self.is_leaf(id)
            && !stored
            && flag(live, id)
        {
            let (base, layout) = self.of(graph, source);
            // Strides say nothing about how a device packs a weight.
            let packed = graph.node(base);
            let same = node.shape == packed.shape && !matches!(node.op, Op::Permute { .. });
            if packed.resident && !same {
                return Ok(Some(id));
            }
            let Some(layout) = view(&node.op, &layout, &graph.node(source).shape) else {
                return Ok(Some(id));
            };
            self.at.push((base, layout));
            return Ok(None);
        }
        self.at.push((id, Layout::contiguous(&node.shape)));
        if !stored || !flag(live, id) {
            return Ok(None);
        }
        let (op, args, out) = self.call(graph, id);
        match device.supports(&Call { op, args: &args, out }) {
            Ok(_) => Ok(None),
            Err(Unsupported::Kernel(what)) => Err(no_kernel(graph, id, op, None, device, what)),
            Err(Unsupported::Layout(i)) => {
                let is_view = |a: NodeId| {
                    graph.node(a).op.is_view() && !self.is_leaf(a) && !flag(&self.copied, a)
                };
                match node.args.get(i) {
                    Some(&a) if is_view(a) && !node.op.is_view() => Ok(Some(a)),
                    _ => {
                        let what = "a layout that no copy can mend".to_string();
                        Err(no_kernel(graph, id, op, Some(i), device, what))
                    }
                }
            }
        }
    }

    fn of(&self, graph: &Graph, id: NodeId) -> (NodeId, Layout) {
        match self.at.get(id.index()) {
            Some(&(base, layout)) => (base, layout),
            None => (id, Layout::contiguous(&graph.node(id).shape)),
        }
    }

    /// What runs for a node: itself, or the copy of a view. A copied reshape is a copy of its
    /// source, whose elements are the same in the same order, so any layout will do.
    fn call<'g>(&self, graph: &'g Graph, id: NodeId) -> (&'g Op, Vec<Arg>, Arg) {
        let node = graph.node(id);
        let out = Arg::dense(node.dtype, node.shape);
        if self.is_leaf(id) {
            return (&Op::Copy, vec![Arg { resident: node.resident, ..out }], out);
        }
        let args = node.args.iter().map(|&a| {
            let (base, layout) = self.of(graph, a);
            let Node { dtype, shape, .. } = *graph.node(a);
            Arg { dtype, shape, layout, resident: graph.node(base).resident }
        });
        let mut args: Vec<Arg> = args.collect();
        let Some(source) = args.first_mut().filter(|_| node.op.is_view()) else {
            return (&node.op, args, out);
        };
        if let Op::Reshape { .. } = node.op {
            let out = Arg::dense(node.dtype, source.shape);
            return (&Op::Copy, args, out);
        }
        source.layout = view(&node.op, &source.layout, &source.shape).unwrap_or(source.layout);
        source.shape = node.shape;
        (&Op::Copy, args, out)
    }

    /// True when the node has storage in the arena.
    fn stored(&self, graph: &Graph, id: NodeId) -> bool {
        flag(&self.copied, id) || !(graph.node(id).op.is_view() || self.is_leaf(id))
    }

    /// The nodes whose arena storage a node's step reads. A leaf is read where it is bound.
    fn reads(&self, graph: &Graph, id: NodeId) -> Vec<NodeId> {
        if self.is_leaf(id) {
            return Vec::new();
        }
        let bases = graph.node(id).args.iter().map(|&a| self.of(graph, a).0);
        let mut bases: Vec<NodeId> = bases.filter(|&b| !self.is_leaf(b)).collect();
        bases.sort();
        bases.dedup();
        bases
    }
}

/// The layout of a view of a value; `None` when strides cannot express it.
fn view(op: &Op, layout: &Layout, shape: &Shape) -> Option<Layout> {
    let stride = |i: usize| layout.strides.get(i).copied().unwrap_or(0);
    let mut strides = [0; MAX_RANK];
    let mut offset = layout.offset;
    match op {
        Op::Permute { perm } => {
            for (to, &from) in strides.iter_mut().zip(perm) {
                *to = stride(usize::from(from));
            }
        }
        Op::Slice { dim, start, len } => {
            strides = layout.strides;
            // An empty view starts where its source does, so that no offset is out of bounds.
            if *len > 0 && shape.elements() > 0 {
                offset += start * stride(usize::from(*dim));
            }
        }
        Op::Broadcast { shape: wide } => {
            let lead = wide.rank() - shape.rank();
            for (i, to) in strides.iter_mut().enumerate().take(wide.rank()).skip(lead) {
                *to = if shape.dim(i - lead) == 1 { 0 } else { stride(i - lead) };
            }
        }
        Op::Reshape { shape: to } => {
            if layout.is_contiguous(shape) {
                strides = to.strides();
            } else {
                // Match runs of dimensions with equal products; each run must be mergeable.
                let (mut i, mut j) = (0, 0);
                while i < shape.rank() || j < to.rank() {
                    let (i0, j0) = (i, j);
                    let (mut a, mut b) = (shape.dim(i), to.dim(j));
                    i += 1;
                    j += 1;
                    while a != b {
                        if a < b {
                            if i >= shape.rank() {
                                return None;
                            }
                            a *= shape.dim(i);
                            i += 1;
                        } else {
                            if j >= to.rank() {
                                return None;
                            }
                            b *= to.dim(j);
                            j += 1;
                        }
                    }
                    let run: Vec<usize> =
                        (i0..i.min(shape.rank())).filter(|&d| shape.dim(d) != 1).collect();
                    for pair in run.windows(2) {
                        if let [outer, inner] = *pair
                            && stride(outer) != stride(inner) * shape.dim(inner)
                        {
                            return None;
                        }
                    }
                    let mut step = run.last().map_or(0, |&d| stride(d));
                    for d in (j0..j.min(to.rank())).rev() {
                        if let Some(s) = strides.get_mut(d) {
                            *s = step;
                        }
                        step *= to.dim(d);
                    }
                }
            }
        }
        _ => return None,
    }
    Some(Layout { offset, strides })
}

pub(crate) fn no_kernel(
    graph: &Graph,
    id: NodeId,
    op: &Op,
    operand: Option<usize>,
    device: &dyn Device,
    what: String,
) -> Error {
    let node = graph.node(id);
    let operand = operand.and_then(|i| node.args.get(i)).map(|&a| {
        let a = graph.node(a);
        format!("`{}` ({} {})", a.name, a.dtype, a.shape)
    });
    Refusal {
        code: Code::NoKernel,
        op: op.name().into(),
        node: node.name.to_string(),
        operand,
        device: Some(format!("{} ({})", device.name(), device.family())),
        reason: format!("the device has no kernel for {what}"),
    }
    .into()
}

/// A value's storage, or what a step keeps: which steps it must survive, and how many bytes.
struct Life {
    node: NodeId,
    kept: bool,
    from: usize,
    to: usize,
    bytes: usize,
}

/// Where in the arena the values of nodes are, and what their steps keep.
struct Starts {
    values: Vec<usize>,
    kept: Vec<usize>,
}

/// Gives all that is stored a place: the largest first, each at the lowest offset where it
/// overlaps nothing that lives at the same time.
fn assign(lives: &mut [Life], n: usize) -> (Starts, usize) {
    lives.sort_by_key(|l| (std::cmp::Reverse(l.bytes), l.from, l.node, l.kept));
    let mut starts = Starts { values: vec![0; n], kept: vec![0; n] };
    let mut high = 0;
    // Placed so far, by offset.
    let mut placed: Vec<(usize, usize, usize, usize)> = Vec::with_capacity(lives.len());
    for life in lives.iter() {
        let mut at = 0;
        for &(start, end, from, to) in &placed {
            if from > life.to || to < life.from {
                continue;
            }
            if start >= at + life.bytes {
                break;
            }
            at = at.max(end.next_multiple_of(ALIGN));
        }
        let of = if life.kept { &mut starts.kept } else { &mut starts.values };
        if let Some(s) = of.get_mut(life.node.index()) {
            *s = at;
        }
        high = high.max(at + life.bytes);
        let entry = (at, at + life.bytes, life.from, life.to);
        let i = placed.partition_point(|p| p.0 <= at);
        placed.insert(i, entry);
    }
    (starts, high)
}

fn lay_out(
    graph: &Graph,
    views: &Views,
    order: &[NodeId],
    outputs: &[NodeId],
    device: &dyn Device,
) -> std::result::Result<Plan, Blocked> {
    let n = graph.len();
    let mut position = vec![0; n];
    for (i, &id) in order.iter().enumerate() {
        if let Some(p) = position.get_mut(id.index()) {
            *p = i;
        }
    }
    let mut last = position.clone();
    for (i, &id) in order.iter().enumerate() {
        for b in views.reads(graph, id) {
            if let Some(l) = last.get_mut(b.index()) {
                *l = (*l).max(i);
            }
        }
    }
    for out in outputs {
        if let Some(l) = last.get_mut(out.index()) {
            *l = order.len();
        }
    }
    let get = |v: &[usize], id: NodeId| v.get(id.index()).copied().unwrap_or(0);
    let bytes = |id: NodeId| {
        let node = graph.node(id);
        node.shape.bytes(node.dtype).unwrap_or(0)
    };
    let mut lives = Vec::with_capacity(order.len());
    let mut calls = Vec::with_capacity(order.len());
    for &node in order {
        let call = views.call(graph, node);
        let (op, args, out) = &call;
        let needs = device
            .supports(&Call { op, args, out: *out })
            .map_err(|u| no_kernel(graph, node, op, None, device, format!("{u:?}")))
            .map_err(|error| Blocked { node: Some(node), error })?;
        let (from, to) = (get(&position, node), get(&last, node));
        lives.push(Life { node, kept: false, from, to, bytes: bytes(node) });
        if needs.kept > 0 {
            lives.push(Life { node, kept: true, from, to: from, bytes: needs.kept });
        }
        calls.push((call, needs));
    }
    let (starts, arena_bytes) = assign(&mut lives, n);

    let mut leaves: Vec<LeafSlot> = Vec::new();
    let mut leaf_slot = vec![None; n];
    let mut steps = Vec::with_capacity(order.len());
    let (mut scratch_bytes, mut copies) = (0, 0);
    for (&id, ((op, args, out), needs)) in order.iter().zip(calls) {
        let node = graph.node(id);
        scratch_bytes = scratch_bytes.max(needs.scratch);
        copies += usize::from(matches!(op, Op::Copy) && !matches!(node.op, Op::Copy));
        let mut operands = Vec::with_capacity(args.len());
        let sources: Vec<NodeId> = if views.is_leaf(id) { vec![id] } else { node.args.clone() };
        for (arg, source) in args.iter().zip(sources) {
            let base = views.of(graph, source).0;
            let place = if views.is_leaf(base) {
                let slot = match leaf_slot.get(base.index()).copied().flatten() {
                    Some(slot) => slot,
                    None => {
                        let leaf = graph.node(base);
                        leaves.push(LeafSlot {
                            node: base,
                            name: leaf.name.clone(),
                            dtype: leaf.dtype,
                            shape: leaf.shape,
                        });
                        let slot = leaves.len() - 1;
                        if let Some(s) = leaf_slot.get_mut(base.index()) {
                            *s = Some(slot);
                        }
                        slot
                    }
                };
                Place::Leaf(slot)
            } else {
                Place::Arena { start: get(&starts.values, base), len: bytes(base) }
            };
            operands.push(Operand { place, arg: *arg });
        }
        let kept = get(&starts.kept, id);
        steps.push(Step {
            op: op.clone(),
            node: id,
            name: node.name.clone(),
            args: operands,
            out: Operand {
                place: Place::Arena { start: get(&starts.values, id), len: bytes(id) },
                arg: out,
            },
            kept: kept..kept + needs.kept,
        });
    }
    let outputs = outputs
        .iter()
        .map(|&id| {
            let node = graph.node(id);
            let start = get(&starts.values, id);
            OutputSlot {
                node: id,
                dtype: node.dtype,
                shape: node.shape,
                range: start..start + bytes(id),
            }
        })
        .collect();
    Ok(Plan { steps, leaves, outputs, arena_bytes, scratch_bytes, copies })
}
