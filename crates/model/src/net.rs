//! What an architecture builds its graph with.
//!
//! The same architecture function builds the served graph, the training graph and a check's
//! graph. What differs is in [`NetConfig`]: how many rows, where earlier keys and values come
//! from, which adapters apply, which weights are trained.

use std::collections::{BTreeMap, BTreeSet};

use graph::{
    AttentionAttrs, DType, Dropout, GatedDeltaAttrs, GluKind, Graph, NodeId, NormKind, Op, Real,
    RopeAngles, RopeStyle, Shape, Unary,
};

use crate::weights::TensorSource;
use crate::{Error, Result};

/// The shape of one adapter slot's tensor pair on one target.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct LoraShape {
    /// The base tensor, e.g. `blk.0.attn_q.weight`.
    pub target: String,
    /// The rank of its A and B.
    pub rank: usize,
}

/// A matrix that rows are multiplied by, a stack of them, or a table whose rows are taken by id:
/// what an adapter can sit on.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Projection {
    /// How many matrices, where rows choose among experts.
    pub experts: Option<usize>,
    /// Outputs.
    pub out: usize,
    /// Inputs; of a table, the ids it knows.
    pub width: usize,
    /// True for a table of embeddings `[width, out]`. An id stands for a column of A, so A is
    /// stored the other way round.
    pub is_table: bool,
}

impl Projection {
    /// The shape of A at a rank: `[r, in]` for each expert, or for the one matrix there is; of a
    /// table `[ids, r]`.
    pub fn a_shape(&self, rank: usize) -> Vec<usize> {
        match self.is_table {
            true => vec![self.width, rank],
            false => self.experts.into_iter().chain([rank, self.width]).collect(),
        }
    }

    /// The shape of B at a rank: `[out, r]` for each expert, or for the one matrix there is.
    pub fn b_shape(&self, rank: usize) -> Vec<usize> {
        self.experts.into_iter().chain([self.out, rank]).collect()
    }

    /// The rank of a pair whose A has this shape; 0 where no A has it.
    pub(crate) fn rank_of(&self, a: &[usize]) -> usize {
        let at = if self.is_table { 0 } else { 1 };
        a.iter().rev().nth(at).copied().unwrap_or(0)
    }
}

/// How a layer sends its rows to experts.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Experts {
    /// Experts of the layer.
    pub count: usize,
    /// How many of them a row uses.
    pub used: usize,
    /// The inner width of each.
    pub width: usize,
    /// What the shares of the chosen are multiplied by.
    pub scale: f32,
    /// The activation of each.
    pub activation: GluKind,
}

/// The shape of the paged cache a graph reads.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct PrefixShape {
    /// Pages of each layer's pool.
    pub pages: usize,
    /// Positions per page.
    pub page: usize,
    /// Page table entries per sequence.
    pub table: usize,
}

/// Where the sequences of a graph take the state of recurrent layers from.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum EntryStates {
    /// They all begin: the state is zero.
    Zero,
    /// A leaf `state.I` f32 `[S, ..]` holds one state per sequence.
    Given,
    /// A leaf `state.I` f32 `[slots, elements]` holds many, of which `state_slots` i32 `[S]` names
    /// each sequence's.
    Slots(usize),
}

impl EntryStates {
    /// Those of a graph over a cache with so many slots: one sequence's state is bound where it
    /// lies, those of several are gathered.
    pub(crate) fn of(geometry: &crate::Geometry, seqs: usize, slots: usize) -> EntryStates {
        match (geometry.states.is_empty(), seqs) {
            (true, _) => EntryStates::Zero,
            (false, 1) => EntryStates::Given,
            (false, _) => EntryStates::Slots(slots),
        }
    }
}

/// A state of a recurrent layer, of every sequence: `[S, ..]`.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct StateNodes {
    /// Before the rows.
    pub entry: NodeId,
    /// After them.
    pub exit: NodeId,
    /// A node whose last elements are the exit state: reading those saves copying a view.
    pub holder: NodeId,
}

/// What a graph is built for. Equal configurations give equal graphs.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct NetConfig {
    /// Token rows.
    pub rows: usize,
    /// Sequence descriptors.
    pub seqs: usize,
    /// Rows whose hidden state goes to the head; 0 builds no head.
    pub logit_rows: usize,
    /// The dtype keys and values pass through before attention reads them.
    pub cache: DType,
    /// The cache that holds earlier positions, if any.
    pub prefix: Option<PrefixShape>,
    /// What recurrent layers begin from.
    pub states: EntryStates,
    /// Per adapter slot, what it adapts.
    pub adapters: Vec<Vec<LoraShape>>,
    /// The share of what adapters read that is dropped, in training; the base reads all.
    pub dropout: Option<Real>,
    /// Float tensors that are host leaves, to be trained or differentiated.
    pub trainable: BTreeSet<String>,
}

/// A graph under construction. Leaves are named: `tokens` i32 [T], `positions` i32 [T],
/// `seqs` i32 [S, 3], `table` i32 [S, M], `logit_rows` i32 [L], `cache.I.k` and `.v` for
/// the I-th layer with attention, `state.I` and `state_slots` (see [`EntryStates`]),
/// `lora_rows.SLOTS` i32 [T] and `lora_rows.SLOTS.head` i32 [L] (see [`Net::lora_rows_name`]), `SLOT:TENSOR.lora_a`, `.lora_b`,
/// `.lora_scale`; with dropout `dropout_rows` i32 [T, 2], `dropout_rows.head` i32 [L, 2] and
/// `dropout_key` i32 [2], see [`Dropout`]; and the model's own tensor names.
pub struct Net<'a> {
    /// The graph so far.
    pub graph: Graph,
    /// Per layer with attention, the keys `[T, Hkv, D]` and values `[T, Hkv, Dv]` of the rows, in the cache's
    /// dtype: what the engine appends to the cache.
    pub kv: Vec<(NodeId, NodeId)>,
    /// The same as they were computed, f32: where the gradients arrive that later rows send to
    /// them, straight through the rounding.
    pub computed: Vec<(NodeId, NodeId)>,
    /// The states of recurrent layers, as [`crate::Geometry::states`] lists them.
    pub states: Vec<StateNodes>,
    config: &'a NetConfig,
    tensors: &'a dyn TensorSource,
    layer: Option<u32>,
    /// Inside the head: which of the logit rows are being computed.
    head: Option<(usize, usize)>,
    used: BTreeSet<String>,
    plain: BTreeSet<String>,
    projections: BTreeMap<String, Projection>,
    /// Targets whose input is dropped out, by the order in which they come.
    sites: BTreeMap<String, u32>,
}

/// The operands of the adapters on a projection.
struct Adapters {
    slots: usize,
    /// i32 [T]: the slot of each row among them.
    rows: NodeId,
    /// A, B and the scale of each slot.
    operands: Vec<NodeId>,
}

impl<'a> Net<'a> {
    /// An empty graph over these tensors.
    pub fn new(tensors: &'a dyn TensorSource, config: &'a NetConfig) -> Net<'a> {
        let (used, plain, projections) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        let (graph, kv, computed, states) = (Graph::new(), Vec::new(), Vec::new(), Vec::new());
        let (layer, head, sites) = (None, None, BTreeMap::new());
        Net {
            graph,
            kv,
            computed,
            states,
            config,
            tensors,
            layer,
            head,
            used,
            plain,
            projections,
            sites,
        }
    }

    /// What it is built for.
    pub fn config(&self) -> &NetConfig {
        self.config
    }

    /// The names of the tensors asked for so far.
    pub fn used(&self) -> &BTreeSet<String> {
        &self.used
    }

    /// Those of them that are no matrices to multiply by: their leaves are plain f32 values.
    pub fn plain(&self) -> &BTreeSet<String> {
        &self.plain
    }

    /// What rows were multiplied by so far, by the name of its tensor.
    pub fn projections(&self) -> &BTreeMap<String, Projection> {
        &self.projections
    }

    /// Nodes from here on belong to this layer.
    pub fn enter_layer(&mut self, layer: usize) {
        self.layer = u32::try_from(layer).ok();
        self.graph.set_layer(self.layer);
    }

    /// Nodes from here on belong to no layer.
    pub fn leave_layers(&mut self) {
        self.layer = None;
        self.graph.set_layer(None);
    }

    /// True when the model has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.tensor(name).is_some()
    }

    /// A tensor of the model, of exactly this shape.
    fn tensor(&mut self, name: &str, dims: &[usize]) -> Result<NodeId> {
        // A matrix of one row may be stored as a vector.
        if let [1, width] = *dims
            && self.tensors.tensor(name).is_some_and(|(shape, _)| shape.dims() == [width])
        {
            let values = self.values(name, &[width])?;
            return Ok(self.graph.reshape(values, dims)?);
        }
        let (shape, dtype) = self.find(name, dims)?;
        if shape.rank() == 1 {
            return self.plain_leaf(name, shape);
        }
        if self.config.trainable.contains(name) && dtype.is_float() {
            return Ok(self.graph.leaf(name, shape, DType::F32)?);
        }
        // A quantized tensor to be trained stays the weight it is: differentiating it is refused
        // by name.
        Ok(self.graph.weight(name, shape, dtype)?)
    }

    fn find(&mut self, name: &str, dims: &[usize]) -> Result<(Shape, DType)> {
        let (shape, dtype) = self.tensors.needed(name, dims).ok_or_else(|| {
            Error::new(format!("tensor `{name}` is missing; the architecture needs it as {dims:?}"))
        })?;
        if shape.dims() != dims {
            return Err(Error::new(format!(
                "tensor `{name}` has shape {shape}, the architecture needs {dims:?}"
            )));
        }
        self.used.insert(name.to_string());
        Ok((shape, dtype))
    }

    fn plain_leaf(&mut self, name: &str, shape: Shape) -> Result<NodeId> {
        self.plain.insert(name.to_string());
        Ok(self.graph.leaf(name, shape, DType::F32)?)
    }

    /// A tensor of the model that is no matrix to multiply by, as f32 values.
    ///
    /// # Errors
    /// When the tensor is missing or of another shape.
    pub fn values(&mut self, name: &str, dims: &[usize]) -> Result<NodeId> {
        let (shape, _) = self.find(name, dims)?;
        self.plain_leaf(name, shape)
    }

    fn input(&mut self, name: &str, dims: &[usize]) -> Result<NodeId> {
        Ok(self.graph.leaf(name, Shape::new(dims)?, DType::I32)?)
    }

    /// Rows of the embedding table `[vocab, width]` for the input tokens, plus every adapter on it:
    /// `[T, width]`.
    ///
    /// # Errors
    /// When the tensor is missing or of another shape.
    pub fn embed(&mut self, name: &str, vocab: usize, width: usize) -> Result<NodeId> {
        let target = format!("{name}.weight");
        let table = self.tensor(&target, &[vocab, width])?;
        let ids = self.input("tokens", &[self.config.rows])?;
        let of = Projection { experts: None, out: width, width: vocab, is_table: true };
        self.projections.insert(target.clone(), of);
        let mut y = self.graph.gather(table, ids, name)?;
        for (slot, rank) in self.slots_on(&target) {
            // What A makes of an id is a row of it; each slot has its own, so each is added alone.
            let [a, b, scale] = self.pair(slot, &target, rank, of)?;
            let x = self.graph.gather(a, ids, &target)?;
            let one = self.identity(rank)?;
            let rows = self.input(&Net::lora_rows_name(&[slot]), &[self.config.rows])?;
            y = self.graph.push(Op::Lora { slots: 1 }, &[x, y, rows, one, b, scale], &target)?;
        }
        Ok(y)
    }

    /// The matrix `[n, n]` that changes nothing, exactly: 1 where row and column are the same.
    fn identity(&mut self, n: usize) -> Result<NodeId> {
        let graph = &mut self.graph;
        let ones = graph.fill(1.0, Shape::new(&[n, n])?)?;
        let (row, column) = (graph.cum_sum(ones, 0)?, graph.cum_sum(ones, 1)?);
        let apart = graph.sub(row, column)?;
        let apart = graph.unary(Unary::Abs, apart)?;
        let other = graph.unary(Unary::Step, apart)?;
        Ok(graph.affine(other, -1.0, 1.0)?)
    }

    /// `x . W^T`, plus every adapter on it, plus the bias if the model has one: `[T, out]`.
    ///
    /// # Errors
    /// When the tensor is missing or of another shape.
    pub fn linear(&mut self, x: NodeId, name: &str, out: usize) -> Result<NodeId> {
        let width = self.graph.node(x).shape.cols();
        let weight_name = format!("{name}.weight");
        let w = self.tensor(&weight_name, &[out, width])?;
        let y = self.graph.project(x, w)?;
        let projection = Projection { experts: None, out, width, is_table: false };
        let y = match self.adapters(&weight_name, projection)? {
            None => y,
            Some(Adapters { slots, rows, operands }) => {
                let mut args = vec![self.dropped(x, &weight_name)?, y, rows];
                args.extend(operands);
                self.graph.push(Op::Lora { slots }, &args, &weight_name)?
            }
        };
        let bias_name = format!("{name}.bias");
        if !self.has(&bias_name) {
            return Ok(y);
        }
        let bias = self.tensor(&bias_name, &[out])?;
        Ok(self.graph.add(y, bias)?)
    }

    /// The name of the leaf that says which adapter slot of `slots` each row uses.
    pub fn lora_rows_name(slots: &[usize]) -> String {
        let list: Vec<String> = slots.iter().map(ToString::to_string).collect();
        format!("lora_rows.{}", list.join("+"))
    }

    /// The slots with a pair on a target, and its rank in each.
    fn slots_on(&self, target: &str) -> Vec<(usize, usize)> {
        let slots = self.config.adapters.iter().enumerate();
        let pair = |(slot, tensors): (usize, &Vec<LoraShape>)| {
            let of = tensors.iter().find(|t| t.target == target)?;
            Some((slot, of.rank))
        };
        slots.filter_map(pair).collect()
    }

    /// A, B and the scale of a slot's pair.
    fn pair(
        &mut self,
        slot: usize,
        target: &str,
        rank: usize,
        of: Projection,
    ) -> Result<[NodeId; 3]> {
        let mut leaf = |part: &str, dims: &[usize]| -> Result<NodeId> {
            let name = format!("{slot}:{target}.{part}");
            Ok(self.graph.leaf(&name, Shape::new(dims)?, DType::F32)?)
        };
        let a = leaf("lora_a", &of.a_shape(rank))?;
        let b = leaf("lora_b", &of.b_shape(rank))?;
        Ok([a, b, leaf("lora_scale", &[1])?])
    }

    /// The adapters on a projection, if there are any.
    fn adapters(&mut self, target: &str, of: Projection) -> Result<Option<Adapters>> {
        self.projections.insert(target.to_string(), of);
        let config = self.config;
        let mut slots = Vec::new();
        let mut operands = Vec::new();
        for (slot, rank) in self.slots_on(target) {
            slots.push(slot);
            operands.extend(self.pair(slot, target, rank, of)?);
        }
        if slots.is_empty() {
            return Ok(None);
        }
        let rows_name = Net::lora_rows_name(&slots);
        let rows = match self.head {
            None => self.input(&rows_name, &[config.rows])?,
            Some((start, len)) => {
                let all = self.input(&format!("{rows_name}.head"), &[config.logit_rows])?;
                self.graph.slice(all, 0, start, len)?
            }
        };
        Ok(Some(Adapters { slots: slots.len(), rows, operands }))
    }

    /// What the adapters on a target read: `x`, of which some is dropped in training.
    fn dropped(&mut self, x: NodeId, target: &str) -> Result<NodeId> {
        let Some(p) = self.config.dropout else { return Ok(x) };
        let rows = match self.head {
            None => self.input("dropout_rows", &[self.config.rows, 2])?,
            Some((start, len)) => {
                let all = self.input("dropout_rows.head", &[self.config.logit_rows, 2])?;
                self.graph.slice(all, 0, start, len)?
            }
        };
        let key = self.input("dropout_key", &[2])?;
        let next = u32::try_from(self.sites.len()).unwrap_or(u32::MAX);
        let site = *self.sites.entry(target.to_string()).or_insert(next);
        // Drawn again by the backward pass: every target has its own, which would be kept beside
        // what all of them read.
        let before = self.graph.set_transient(true);
        let made = self.graph.push(Op::Dropout(Dropout { p, site }), &[x, rows, key], target);
        self.graph.set_transient(before);
        Ok(made?)
    }

    /// Rows `[T, 1 or used, K]` times the experts they chose by `ids` `[T, used]`, plus every
    /// adapter on the stack, plus the experts' biases if the model has them: `[T, used, out]`.
    fn linear_experts(
        &mut self,
        x: NodeId,
        ids: NodeId,
        name: &str,
        experts: usize,
        out: usize,
    ) -> Result<NodeId> {
        let width = self.graph.node(x).shape.cols();
        let weight_name = format!("{name}.weight");
        let w = self.tensor(&weight_name, &[experts, out, width])?;
        let y = self.graph.project_experts(x, w, ids)?;
        let projection = Projection { experts: Some(experts), out, width, is_table: false };
        let y = match self.adapters(&weight_name, projection)? {
            None => y,
            Some(Adapters { slots, rows, operands }) => {
                let mut args = vec![self.dropped(x, &weight_name)?, y, rows, ids];
                args.extend(operands);
                self.graph.push(Op::LoraExperts { slots }, &args, &weight_name)?
            }
        };
        let bias_name = format!("{name}.bias");
        if !self.has(&bias_name) {
            return Ok(y);
        }
        let table = self.tensor(&bias_name, &[experts, out])?;
        let bias = self.graph.gather(table, ids, &bias_name)?;
        Ok(self.graph.add(y, bias)?)
    }

    /// The routed experts of a layer (Shazeer et al. 2017, arXiv 1701.06538) whose tensors begin
    /// with `name` (`blk.3.ffn`), over rows `[T, K]`: the softmax of the router's logits, the
    /// `used` greatest shares, divided by their sum, weigh the results of their experts, which
    /// are summed in order of rank: `[T, K]`.
    ///
    /// As llama.cpp's `build_moe_ffn`, the sum is at least 2^-14; where it is clamped, no
    /// gradient passes through it. One expert alone weighs 1, whatever its share: its router has no
    /// gradient.
    ///
    /// # Errors
    /// When a tensor is missing or of another shape.
    pub fn experts(&mut self, x: NodeId, name: &str, experts: &Experts) -> Result<NodeId> {
        const LEAST_SUM: f32 = 1.0 / 16_384.0;
        let Experts { count, used, width, scale, activation } = *experts;
        let logits = self.linear(x, &format!("{name}_gate_inp"), count)?;
        // The names of llama.cpp's nodes.
        let node = |what: &str| format!("{name}_moe_{what}");
        let graph = &mut self.graph;
        let shares = graph.softmax(logits, &node("probs"))?;
        let ids = graph.top_k(shares, used, &node("topk"))?;
        let rows = graph.node(x).shape.dim(0);
        let weights = if used == 1 && count as f32 * LEAST_SUM < 0.5 {
            // A share by itself, bit for bit. No gradient leads through it, which the graph now says
            // where a router is to be trained.
            graph.fill(scale, Shape::new(&[rows, 1])?)?
        } else {
            let chosen = graph.take(shares, ids, &node("weights"))?;
            let sum = Op::Sum { dims: 1 << 1 };
            let sum = graph.push(sum, &[chosen], &node("weights_sum"))?;
            let clamp = Op::Clamp { min: LEAST_SUM.into(), max: f32::INFINITY.into() };
            let sum = graph.push(clamp, &[sum], &node("weights_sum_clamped"))?;
            let div = Op::Binary(graph::Binary::Div);
            let weights = graph.push(div, &[chosen, sum], &node("weights_norm"))?;
            if scale == 1.0 { weights } else { graph.affine(weights, scale, 0.0)? }
        };
        let shape = graph.node(x).shape;
        let rows = graph.reshape(x, &[shape.dim(0), 1, shape.cols()])?;
        let gate = self.linear_experts(rows, ids, &format!("{name}_gate_exps"), count, width)?;
        let up = self.linear_experts(rows, ids, &format!("{name}_up_exps"), count, width)?;
        let h = self.glu(activation, gate, up)?;
        let y = self.linear_experts(h, ids, &format!("{name}_down_exps"), count, shape.cols())?;
        Ok(self.graph.mix_experts(y, weights)?)
    }

    /// The expert that every row uses (Dai et al. 2024, arXiv 2401.06066), its result gated by the
    /// sigmoid of one projection: `[T, K]`. Its tensors are `name_gate_shexp`, `name_up_shexp`,
    /// `name_down_shexp` and `name_gate_inp_shexp`.
    ///
    /// # Errors
    /// When a tensor is missing or of another shape.
    pub fn shared_expert(
        &mut self,
        x: NodeId,
        name: &str,
        width: usize,
        activation: GluKind,
    ) -> Result<NodeId> {
        let out = self.graph.node(x).shape.cols();
        let gate = self.linear(x, &format!("{name}_gate_shexp"), width)?;
        let up = self.linear(x, &format!("{name}_up_shexp"), width)?;
        let h = self.glu(activation, gate, up)?;
        let y = self.linear(h, &format!("{name}_down_shexp"), out)?;
        let share = self.linear(x, &format!("{name}_gate_inp_shexp"), 1)?;
        let share = self.unary(Unary::Sigmoid, share)?;
        self.mul(y, share)
    }

    /// RMS normalization of the last dimension with a weight of its width.
    ///
    /// # Errors
    /// When the tensor is missing or of another shape.
    pub fn rms_norm(&mut self, x: NodeId, name: &str, eps: f32) -> Result<NodeId> {
        let width = self.graph.node(x).shape.cols();
        let w = self.tensor(&format!("{name}.weight"), &[width])?;
        Ok(self.graph.rms_norm(x, w, eps)?)
    }

    /// `[T, heads * width]` as `[T, heads, width]`.
    ///
    /// # Errors
    /// When the widths do not match.
    pub fn heads(&mut self, x: NodeId, heads: usize, width: usize) -> Result<NodeId> {
        let rows = self.graph.node(x).shape.dim(0);
        Ok(self.graph.reshape(x, &[rows, heads, width])?)
    }

    /// `[T, heads, width]` as `[T, heads * width]`.
    ///
    /// # Errors
    /// When it has fewer dimensions.
    pub fn flat(&mut self, x: NodeId) -> Result<NodeId> {
        let shape = self.graph.node(x).shape;
        Ok(self.graph.reshape(x, &[shape.dim(0), shape.dim(1) * shape.dim(2)])?)
    }

    /// Rotary embedding of `[T, H, D]` by the rows' positions. `factors` names a tensor of
    /// `dims/2` frequency factors.
    ///
    /// # Errors
    /// When the widths do not match.
    pub fn rope(
        &mut self,
        x: NodeId,
        style: RopeStyle,
        angles: RopeAngles,
        factors: Option<&str>,
    ) -> Result<NodeId> {
        let positions = self.input("positions", &[self.config.rows])?;
        let mut args = vec![positions];
        if let Some(name) = factors {
            args.push(self.tensor(name, &[angles.dims / 2])?);
        }
        // One table serves all layers, so it belongs to none.
        self.graph.set_layer(None);
        let table = self.graph.push(Op::RopeTable(angles), &args, "rope");
        self.graph.set_layer(self.layer);
        let name = self.graph.node(x).name.clone();
        Ok(self.graph.push(Op::Rope { style, inverse: false }, &[x, table?], &name)?)
    }

    /// Causal attention of q `[T, Hq, D]` over the rows' own keys and values and the cached
    /// ones: `[T, Hq * Dv]`. Keys and values pass through the cache's dtype in every graph.
    ///
    /// # Errors
    /// When the widths do not match.
    pub fn attention(
        &mut self,
        q: NodeId,
        k: NodeId,
        v: NodeId,
        scale: f32,
        window: Option<u32>,
    ) -> Result<NodeId> {
        let config = self.config;
        let pool = self.kv.len();
        let k_seen = self.graph.round(k, config.cache)?;
        let v_seen = self.graph.round(v, config.cache)?;
        let k_kept = self.graph.cast(k, config.cache)?;
        let v_kept = self.graph.cast(v, config.cache)?;
        self.kv.push((k_kept, v_kept));
        self.computed.push((k, v));

        let seqs = self.input("seqs", &[config.seqs, 3])?;
        let mut args = vec![q, k_seen, v_seen, seqs];
        if let Some(prefix) = &config.prefix {
            for (part, of) in [("k", k), ("v", v)] {
                let shape = self.graph.node(of).shape;
                let dims = [prefix.pages, prefix.page, shape.dim(1), shape.dim(2)];
                let name = format!("cache.{pool}.{part}");
                args.push(self.graph.leaf(&name, Shape::new(&dims)?, config.cache)?);
            }
            args.push(self.input("table", &[config.seqs, prefix.table])?);
        }
        let prefix = config.prefix.is_some();
        let attrs = AttentionAttrs { window, prefix, ..AttentionAttrs::new(scale) };
        let name = self.name("attn");
        let out = self.graph.push(Op::Attention(attrs), &args, &name)?;
        self.flat(out)
    }

    /// The name of a part of the layer that is being built.
    fn name(&self, part: &str) -> String {
        match self.layer {
            Some(layer) => format!("blk.{layer}.{part}"),
            None => part.to_string(),
        }
    }

    /// A state as the sequences have it before the rows: `[S, dims..]`.
    fn entry_state(&mut self, dims: &[usize]) -> Result<NodeId> {
        let (config, name) = (self.config, format!("state.{}", self.states.len()));
        let elements = Shape::new(dims)?.elements();
        let all = [&[config.seqs], dims].concat();
        match config.states {
            EntryStates::Zero => Ok(self.graph.fill(0.0, Shape::new(&all)?)?),
            EntryStates::Given => Ok(self.graph.leaf(&name, Shape::new(&all)?, DType::F32)?),
            EntryStates::Slots(slots) => {
                let shape = Shape::new(&[slots, elements])?;
                let pool = self.graph.leaf(&name, shape, DType::F32)?;
                let ids = self.input("state_slots", &[config.seqs])?;
                let entry = self.graph.gather(pool, ids, &name)?;
                Ok(self.graph.reshape(entry, &all)?)
            }
        }
    }

    /// Causal convolution of each channel of x `[T, C]` with `name.weight [C, taps]`, which keeps
    /// the last `taps - 1` rows of each sequence as a state.
    ///
    /// # Errors
    /// When the tensor is missing or of another shape.
    pub fn convolution(&mut self, x: NodeId, name: &str, taps: usize) -> Result<NodeId> {
        let channels = self.graph.node(x).shape.cols();
        let name = format!("{name}.weight");
        let w = self.values(&name, &[channels, taps])?;
        let entry = self.entry_state(&[taps.saturating_sub(1), channels])?;
        let seqs = self.input("seqs", &[self.config.seqs, 3])?;
        let y = self.graph.ssm_conv(x, w, entry, seqs, &name)?;
        let exit = self.graph.ssm_conv_state(x, entry, seqs, &name)?;
        self.states.push(StateNodes { entry, exit, holder: exit });
        Ok(y)
    }

    /// The gated delta rule over q, k `[T, Hk, Dk]`, v `[T, Hv, Dv]`, the log decays g and the
    /// write strengths beta `[T, Hv]`, which keeps a matrix per head as a state: `[T, Hv, Dv]`.
    ///
    /// # Errors
    /// When the widths do not match.
    pub fn gated_delta(
        &mut self,
        attrs: GatedDeltaAttrs,
        [q, k, v, g, beta]: [NodeId; 5],
    ) -> Result<NodeId> {
        let (keys, values) = (self.graph.node(k).shape, self.graph.node(v).shape);
        let entry = self.entry_state(&[values.dim(1), keys.dim(2), values.dim(2)])?;
        let seqs = self.input("seqs", &[self.config.seqs, 3])?;
        let name = self.name("delta_net");
        let operands = [q, k, v, g, beta, entry, seqs];
        let (y, exit) = self.graph.gated_delta_rule(attrs, operands, &name)?;
        let holder = self.graph.push(Op::GatedDeltaRule(attrs), &operands, &name)?;
        self.states.push(StateNodes { entry, exit, holder });
        Ok(y)
    }

    /// `x * rsqrt(sum x^2 + eps)` along the last dimension.
    ///
    /// # Errors
    /// When `eps` is not positive.
    pub fn l2_norm(&mut self, x: NodeId, eps: f32) -> Result<NodeId> {
        let name = self.graph.node(x).name.clone();
        let op = Op::Norm { kind: NormKind::L2Add, eps: eps.into() };
        Ok(self.graph.push(op, &[x], &name)?)
    }

    /// An elementwise function.
    ///
    /// # Errors
    /// When `x` is not float.
    pub fn unary(&mut self, f: Unary, x: NodeId) -> Result<NodeId> {
        Ok(self.graph.unary(f, x)?)
    }

    /// `a * b`.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    pub fn mul(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        Ok(self.graph.mul(a, b)?)
    }

    /// `len` entries of the last dimension from `start`.
    ///
    /// # Errors
    /// When there are not so many.
    pub fn columns(&mut self, x: NodeId, start: usize, len: usize) -> Result<NodeId> {
        let last = self.graph.node(x).shape.rank().saturating_sub(1);
        Ok(self.graph.slice(x, last, start, len)?)
    }

    /// The gated feed-forward half of layer `l`: `down(act(gate(x)) * up(x))`, as wide as `x`, of
    /// inner width `inner`.
    ///
    /// # Errors
    /// When a tensor is missing or of another shape.
    pub fn feed_forward(
        &mut self,
        x: NodeId,
        l: usize,
        kind: GluKind,
        inner: usize,
    ) -> Result<NodeId> {
        let width = self.graph.node(x).shape.cols();
        let gate = self.linear(x, &format!("blk.{l}.ffn_gate"), inner)?;
        let up = self.linear(x, &format!("blk.{l}.ffn_up"), inner)?;
        let h = self.glu(kind, gate, up)?;
        self.linear(h, &format!("blk.{l}.ffn_down"), width)
    }

    /// `act(gate) * up`.
    ///
    /// # Errors
    /// When the widths differ.
    pub fn glu(&mut self, kind: GluKind, gate: NodeId, up: NodeId) -> Result<NodeId> {
        let name = self.graph.node(gate).name.clone();
        Ok(self.graph.push(Op::Glu(kind), &[gate, up], &name)?)
    }

    /// `a + b`.
    ///
    /// # Errors
    /// When the shapes do not broadcast.
    pub fn add(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        Ok(self.graph.add(a, b)?)
    }

    /// `x * scale`.
    ///
    /// # Errors
    /// When `scale` is not finite.
    pub fn scale(&mut self, x: NodeId, scale: f32) -> Result<NodeId> {
        Ok(self.graph.affine(x, scale, 0.0)?)
    }

    /// `cap * tanh(x / cap)`.
    ///
    /// # Errors
    /// When `cap` is 0 or not finite.
    pub fn softcap(&mut self, x: NodeId, cap: f32) -> Result<NodeId> {
        let x = self.graph.affine(x, 1.0 / cap, 0.0)?;
        let x = self.graph.unary(graph::Unary::Tanh, x)?;
        Ok(self.graph.affine(x, cap, 0.0)?)
    }

    /// The logits of the configured rows of `hidden [T, E]`, in pieces of at most `piece` rows,
    /// and what `of` makes of each. A loss is made there, before the logits of the next piece are:
    /// nodes run in the order they are made, and `[L, vocab]` never exists whole.
    ///
    /// # Errors
    /// As [`crate::Architecture::logits`] and `of`.
    pub fn logits<T>(
        &mut self,
        arch: &dyn crate::Architecture,
        hidden: NodeId,
        piece: usize,
        mut of: impl FnMut(&mut Graph, NodeId) -> Result<T>,
    ) -> Result<Vec<T>> {
        let total = self.config.logit_rows;
        let rows = self.input("logit_rows", &[total])?;
        let all = self.graph.gather(hidden, rows, "logit_rows")?;
        let mut pieces = Vec::new();
        let mut start = 0;
        while start < total {
            let len = piece.clamp(1, total - start);
            let x = if len == total { all } else { self.graph.slice(all, 0, start, len)? };
            self.head = Some((start, len));
            let logits = arch.logits(self, x);
            self.head = None;
            pieces.push(of(&mut self.graph, logits?)?);
            start += len;
        }
        Ok(pieces)
    }
}
