//! Runs rows of many sequences over a model: the one way logits come about.
//!
//! Rows of any mix of sequences, prompt or decode, with any adapters, go through one graph. A
//! graph is built per shape and kept with its plan; shapes are rounded up so that few are
//! needed, and the rows that pad them belong to no sequence. By the promise "one token, one
//! value" none of that changes a row's logits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use graph::{Arena, CrossEntropyAttrs, DType, Graph, Leaf, NodeId, Op, Plan, Segment, Shape};

use crate::{
    Adapter, AdapterId, Cache, EntryStates, Error, LoraShape, Model, Net, NetConfig, Result, SeqId,
    cache::PAGE,
};

/// How an engine is set up.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineConfig {
    /// Element type of the cache: f32, f16 or Q8_0.
    pub cache: DType,
    /// Positions the cache holds, over all sequences.
    pub positions: usize,
    /// Most rows of one graph.
    pub batch: usize,
    /// Slots for the state of recurrent layers, if the model has such: one per sequence that has
    /// run, the others keep states at which prefixes are reused.
    pub states: usize,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig { cache: DType::F16, positions: 4096, batch: 512, states: 8 }
    }
}

/// Which of some rows logits are wanted for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum WantLogits {
    /// None: the rows only fill the cache.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
}

/// New tokens of one sequence, at the positions after those it has.
#[derive(Copy, Clone, Debug)]
pub struct Rows<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// Its next tokens.
    pub tokens: &'a [u32],
    /// The adapter they use, if any.
    pub adapter: Option<AdapterId>,
    /// Which logits to return.
    pub want: WantLogits,
}

/// Graphs kept with their plans.
const PLANS: usize = 48;

/// Most bytes of logits one graph gives; more rows are split over several runs.
const LOGIT_BYTES: usize = 64 << 20;

/// What a leaf is bound to.
enum Bind {
    Tokens,
    Positions,
    Seqs,
    Table,
    LogitRows,
    Cache { layer: usize, values: bool },
    State(usize),
    StateSlots,
    LoraRows { slots: Vec<usize>, head: bool },
    Lora { slot: usize, target: String, part: Part },
    Weight(String),
}

enum Part {
    A,
    B,
    Scale,
}

struct Prepared {
    config: NetConfig,
    plan: Plan,
    binds: Vec<Bind>,
    used: u64,
}

/// An adapter, and what a graph must know of it.
struct Attached {
    adapter: Arc<Adapter>,
    shapes: Vec<LoraShape>,
}

/// A model with a cache, adapters, and the graphs it has run so far.
pub struct Engine {
    model: Arc<Model>,
    config: EngineConfig,
    cache: Cache,
    adapters: BTreeMap<AdapterId, Attached>,
    next_adapter: u64,
    prepared: Vec<Prepared>,
    arena: Box<dyn Arena>,
    clock: u64,
}

/// Rows of one sequence inside one run.
struct Piece<'a> {
    request: usize,
    rows: Rows<'a>,
}

impl Engine {
    /// An engine over a model, with its cache.
    ///
    /// # Errors
    /// When the cache type does not fit the model, a setting is out of range, or memory is out.
    pub fn new(model: Arc<Model>, config: EngineConfig) -> Result<Engine> {
        if config.batch == 0 || config.batch > 4096 {
            return Err(Error::new(format!("batch is {}, expected 1 to 4096", config.batch)));
        }
        let cache = Cache::new(model.geometry(), config.cache, config.positions, config.states)?;
        let arena = model.device().arena(0)?;
        Ok(Engine {
            model,
            config,
            cache,
            adapters: BTreeMap::new(),
            next_adapter: 0,
            prepared: Vec::new(),
            arena,
            clock: 0,
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The cache: sequences that reuse nothing are opened here, and all are closed here.
    pub fn cache(&mut self) -> &mut Cache {
        &mut self.cache
    }

    /// Opens a sequence that is to run these tokens with an adapter. It begins with what others
    /// have left of them in the cache; the second number says how many tokens that is, always
    /// fewer than there are. The rest must be run, and by the promise "one token, one value" its
    /// logits are those of a sequence that began with nothing.
    pub fn open(&mut self, tokens: &[u32], adapter: Option<AdapterId>) -> (SeqId, usize) {
        self.cache.open_prefix(tokens, adapter)
    }

    /// Positions that sequences can still get: what is free or only kept for reuse, in whole
    /// pages.
    pub fn free_positions(&self) -> usize {
        self.cache.free_pages() * PAGE
    }

    /// True when [`Engine::forward`] has room for so many new rows of these sequences, each
    /// standing once.
    pub fn can_take(&self, wanted: &[(SeqId, usize)]) -> bool {
        self.cache.check_room(wanted).is_ok()
    }

    /// Makes an adapter usable. The same adapter attached twice is two; an id is never given
    /// again.
    pub fn attach(&mut self, adapter: Arc<Adapter>) -> AdapterId {
        let id = AdapterId(self.next_adapter);
        self.next_adapter += 1;
        let shapes = adapter.shapes();
        self.adapters.insert(id, Attached { adapter, shapes });
        id
    }

    /// Takes an adapter away, and what the cache keeps of it. False when there is none of this id.
    pub fn detach(&mut self, id: AdapterId) -> bool {
        self.cache.forget(id);
        self.adapters.remove(&id).is_some()
    }

    /// The adapter of an id.
    pub fn adapter(&self, id: AdapterId) -> Option<&Arc<Adapter>> {
        self.adapters.get(&id).map(|a| &a.adapter)
    }

    /// Bytes of the arena and the cache as they are now.
    pub fn bytes(&self) -> usize {
        self.arena.bytes() + self.cache.bytes()
    }

    /// Runs new rows of several sequences and appends them to the cache. Per entry of `batch`:
    /// the wanted logits, `[rows, vocab]`, in order.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, a sequence stands twice, an adapter is not
    /// attached, or the device fails; after a failed run the sequences keep the rows that had run
    /// whole. [`Error::Full`] when the cache has no room; nothing has run then.
    pub fn forward(&mut self, batch: &[Rows<'_>]) -> Result<Vec<Vec<f32>>> {
        let vocab = self.model.geometry().vocab;
        let mut seen = BTreeSet::new();
        for (i, rows) in batch.iter().enumerate() {
            if let Some(bad) = rows.tokens.iter().find(|&&t| t as usize >= vocab) {
                return Err(Error::new(format!(
                    "token {bad} is outside of the vocabulary of {vocab}"
                )));
            }
            if !seen.insert(rows.seq) {
                return Err(Error::new(format!("entry {i}: the sequence stands twice in a batch")));
            }
            if rows.adapter.is_some_and(|id| !self.adapters.contains_key(&id)) {
                return Err(Error::new(format!("entry {i}: the adapter is not attached")));
            }
        }
        let wanted: Vec<(SeqId, usize)> = batch.iter().map(|r| (r.seq, r.tokens.len())).collect();
        self.cache.reserve(&wanted)?;
        let most_logits = (LOGIT_BYTES / (vocab * 4)).clamp(1, self.config.batch);
        let mut out: Vec<Vec<f32>> = batch.iter().map(|_| Vec::new()).collect();
        let mut run: Vec<Piece<'_>> = Vec::new();
        let (mut rows_used, mut logits_used) = (0, 0);
        for (request, rows) in batch.iter().enumerate() {
            let mut rest = rows.tokens;
            while !rest.is_empty() {
                let mut take = rest.len().min(self.config.batch - rows_used);
                if rows.want == WantLogits::All {
                    take = take.min(most_logits - logits_used);
                }
                if take == 0 || (rows.want == WantLogits::Last && logits_used == most_logits) {
                    self.run(&run, &mut out)?;
                    run.clear();
                    (rows_used, logits_used) = (0, 0);
                    continue;
                }
                take = self.cache.until_kept(rows.seq, take);
                let Some((now, later)) = rest.split_at_checked(take) else { break };
                let want = match rows.want {
                    WantLogits::Last if !later.is_empty() => WantLogits::None,
                    want => want,
                };
                rows_used += take;
                logits_used += match want {
                    WantLogits::None => 0,
                    WantLogits::Last => 1,
                    WantLogits::All => take,
                };
                run.push(Piece { request, rows: Rows { tokens: now, want, ..*rows } });
                rest = later;
                if !rest.is_empty() {
                    // A sequence's next rows need the ones just taken in the cache.
                    self.run(&run, &mut out)?;
                    run.clear();
                    (rows_used, logits_used) = (0, 0);
                }
            }
        }
        if !run.is_empty() {
            self.run(&run, &mut out)?;
        }
        Ok(out)
    }

    fn run(&mut self, parts: &[Piece<'_>], out: &mut [Vec<f32>]) -> Result<()> {
        for part in parts {
            self.cache.ready(part.rows.seq)?;
        }
        let used = self.used_adapters(parts);
        let total: usize = parts.iter().map(|p| p.rows.tokens.len()).sum();
        let rows = bucket(total);
        let mut tokens = vec![0i32; rows];
        let mut positions = vec![0i32; rows];
        let mut slots = vec![-1i32; rows];
        let seq_count = parts.len().next_power_of_two();
        let mut seqs = vec![0i32; seq_count * 3];
        let pages = parts.iter().map(|p| self.cache.table(p.rows.seq).len()).max().unwrap_or(0);
        let pages = pages.max(1).next_power_of_two();
        let mut table = vec![0i32; seq_count * pages];
        let mut state_slots = vec![0i32; seq_count];
        let mut logit_rows = Vec::new();
        let mut first = 0usize;
        for (i, part) in parts.iter().enumerate() {
            let start = self.cache.len(part.rows.seq);
            let n = part.rows.tokens.len();
            let slot = used.iter().position(|&id| Some(id) == part.rows.adapter);
            let slot = slot.map_or(-1, |slot| slot as i32);
            put(&mut state_slots, i, self.cache.slot(part.rows.seq) as i32);
            for (j, &token) in part.rows.tokens.iter().enumerate() {
                put(&mut tokens, first + j, token as i32);
                put(&mut positions, first + j, (start + j) as i32);
                put(&mut slots, first + j, slot);
            }
            for (k, value) in [first, n, start].into_iter().enumerate() {
                put(&mut seqs, i * 3 + k, value as i32);
            }
            for (k, &page) in self.cache.table(part.rows.seq).iter().enumerate() {
                put(&mut table, i * pages + k, page as i32);
            }
            match part.rows.want {
                WantLogits::None => {}
                WantLogits::Last => logit_rows.push((first + n - 1) as i32),
                WantLogits::All => logit_rows.extend((first..first + n).map(|r| r as i32)),
            }
            first += n;
        }
        let wanted = logit_rows.len();
        if wanted > 0 {
            logit_rows.resize(bucket(wanted), 0);
        }
        let config = NetConfig {
            rows,
            seqs: seq_count,
            logit_rows: logit_rows.len(),
            cache: self.config.cache,
            prefix: Some(self.cache.prefix_shape(pages)),
            states: EntryStates::of(self.model.geometry(), seq_count, self.cache.slot_count()),
            adapters: self.shapes_of(&used),
            dropout: None,
            trainable: BTreeSet::new(),
        };
        let which = self.prepare(config)?;
        let Some(prepared) = self.prepared.get(which) else {
            return Err(Error::new("a plan went missing"));
        };
        let head_slots: Vec<i32> = logit_rows
            .iter()
            .map(|&r| usize::try_from(r).ok().and_then(|r| slots.get(r)).copied().unwrap_or(-1))
            .collect();
        let lora_rows: Vec<Vec<i32>> = prepared
            .binds
            .iter()
            .map(|bind| match bind {
                Bind::LoraRows { slots: of, head } => {
                    let all = if *head { &head_slots } else { &slots };
                    let place = |s: &i32| of.iter().position(|&o| o as i32 == *s);
                    all.iter().map(|s| place(s).map_or(-1, |p| p as i32)).collect()
                }
                _ => Vec::new(),
            })
            .collect();
        let one_slot = (seq_count == 1)
            .then(|| state_slots.first().and_then(|&slot| u32::try_from(slot).ok()))
            .flatten();
        let mut leaves = Vec::with_capacity(prepared.binds.len());
        for (bind, lora) in prepared.binds.iter().zip(&lora_rows) {
            leaves.push(match bind {
                Bind::Tokens => ints(&tokens),
                Bind::Positions => ints(&positions),
                Bind::Seqs => ints(&seqs),
                Bind::Table => ints(&table),
                Bind::LogitRows => ints(&logit_rows),
                Bind::Cache { layer, values } => self.cache.leaf(*layer, *values),
                Bind::State(state) => self.cache.state_leaf(*state, one_slot),
                Bind::StateSlots => ints(&state_slots),
                Bind::LoraRows { .. } => ints(lora),
                Bind::Lora { slot, target, part } => {
                    let id = used.get(*slot).or(used.last());
                    let attached = id.and_then(|id| self.adapters.get(id));
                    let pair = attached.and_then(|a| a.adapter.tensors.get(target));
                    let pair = pair.ok_or_else(|| {
                        Error::new(format!("adapter slot {slot} lost its tensor `{target}`"))
                    })?;
                    Leaf::Host(bytemuck::cast_slice(match part {
                        Part::A => &pair.a,
                        Part::B => &pair.b,
                        Part::Scale => std::slice::from_ref(&pair.scale),
                    }))
                }
                Bind::Weight(name) => match self.model.weights().get(name) {
                    Some(w) => w.leaf(),
                    None => return Err(Error::new(format!("tensor `{name}` is not loaded"))),
                },
            });
        }
        if self.arena.bytes() < prepared.plan.arena_bytes {
            self.arena = self.model.device().arena(prepared.plan.arena_bytes)?;
        }
        let device = self.model.device().clone();
        device.run(&prepared.plan, &leaves, self.arena.as_mut(), Segment::default(), &())?;
        drop(leaves);

        // Outputs: keys and values per layer with attention, states, then the logits.
        let mut outputs = prepared.plan.outputs.iter();
        let geometry = self.model.geometry();
        for layer in 0..geometry.attention_layers.len() {
            for values in [false, true] {
                let Some(slot) = outputs.next() else { break };
                let row_bytes = self.cache.row_bytes(layer, values);
                let mut at = slot.range.start;
                for part in parts {
                    for (row, count) in self.cache.runs(part.rows.seq, part.rows.tokens.len()) {
                        let end = at + count * row_bytes;
                        let to = self.cache.rows_mut(layer, values, row, count);
                        self.arena.read(at..end, to)?;
                        at = end;
                    }
                }
            }
        }
        for state in 0..geometry.states.len() {
            let Some(slot) = outputs.next() else { break };
            for (i, part) in parts.iter().enumerate() {
                let to = self.cache.next_state(part.rows.seq, state);
                // The exit states end the tensor.
                let at = slot.range.end - (seq_count - i) * to.len();
                self.arena.read(at..at + to.len(), to)?;
            }
        }
        if let (Some(slot), true) = (outputs.next(), wanted > 0) {
            let vocab = geometry.vocab;
            let mut at = slot.range.start;
            for part in parts {
                let n = match part.rows.want {
                    WantLogits::None => 0,
                    WantLogits::Last => 1,
                    WantLogits::All => part.rows.tokens.len(),
                };
                let Some(to) = out.get_mut(part.request).filter(|_| n > 0) else { continue };
                let have = to.len();
                to.resize(have + n * vocab, 0.0);
                let bytes = bytemuck::cast_slice_mut(to.get_mut(have..).unwrap_or(&mut []));
                self.arena.read(at..at + bytes.len(), bytes)?;
                at += bytes.len();
            }
        }
        for part in parts {
            self.cache.advance(part.rows.seq, part.rows.tokens, part.rows.adapter);
        }
        Ok(())
    }

    /// The adapters that some rows use, each once, in an order that depends on their shapes
    /// first, so that adapters of the same shapes share a graph.
    fn used_adapters(&self, parts: &[Piece<'_>]) -> Vec<AdapterId> {
        let used: BTreeSet<AdapterId> = parts.iter().filter_map(|p| p.rows.adapter).collect();
        let mut used: Vec<AdapterId> = used.into_iter().collect();
        let shapes = |id: &AdapterId| self.adapters.get(id).map(|a| &a.shapes);
        used.sort_by(|a, b| shapes(a).cmp(&shapes(b)).then(a.cmp(b)));
        used
    }

    /// The adapter slots of a graph: a power of two of them, the last one repeated, which no row
    /// uses.
    fn shapes_of(&self, used: &[AdapterId]) -> Vec<Vec<LoraShape>> {
        let mut shapes: Vec<Vec<LoraShape>> =
            used.iter().filter_map(|id| self.adapters.get(id).map(|a| a.shapes.clone())).collect();
        if let Some(last) = shapes.last().cloned() {
            shapes.resize(shapes.len().next_power_of_two(), last);
        }
        shapes
    }

    /// The model's own log-probabilities, in nats: of `labels[i]` under row `i` of `logits`
    /// (`[labels.len(), vocab]`, as [`Engine::forward`] gives them), without temperature,
    /// penalties or filters. The kernel of the training loss computes them, so these are the
    /// trainer's numbers, bit for bit.
    ///
    /// # Errors
    /// When a label is outside of the vocabulary, the logits are not one row per label, or the
    /// device fails.
    pub fn log_probs(&mut self, logits: &[f32], labels: &[u32]) -> Result<Vec<f32>> {
        let vocab = self.model.geometry().vocab;
        if let Some(bad) = labels.iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::new(format!("token {bad} is outside of the vocabulary of {vocab}")));
        }
        if logits.len() != labels.len() * vocab {
            let (n, rows) = (logits.len(), labels.len());
            return Err(Error::new(format!("{n} logits for {rows} labels of {vocab} each")));
        }
        if labels.is_empty() {
            return Ok(Vec::new());
        }
        let mut graph = Graph::new();
        let rows = graph.leaf("logits", Shape::new(&[labels.len(), vocab])?, DType::F32)?;
        let ids = graph.leaf("labels", Shape::new(&[labels.len()])?, DType::I32)?;
        let nll = graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[rows, ids], "nll")?;
        let device = self.model.device().clone();
        let plan = graph::plan(&graph, &[nll], device.as_ref())?;
        let labels: Vec<i32> = labels.iter().map(|&t| t as i32).collect();
        let bind = |slot: &graph::LeafSlot| match slot.node == rows {
            true => Leaf::Host(bytemuck::cast_slice(logits)),
            false => ints(&labels),
        };
        let leaves: Vec<Leaf<'_>> = plan.leaves.iter().map(bind).collect();
        if self.arena.bytes() < plan.arena_bytes {
            self.arena = device.arena(plan.arena_bytes)?;
        }
        device.run(&plan, &leaves, self.arena.as_mut(), Segment::default(), &())?;
        let mut values = vec![0f32; labels.len()];
        if let Some(slot) = plan.outputs.first() {
            self.arena.read(slot.range.clone(), bytemuck::cast_slice_mut(&mut values))?;
        }
        values.iter_mut().for_each(|nll| *nll = -*nll);
        Ok(values)
    }

    /// The index of the prepared graph for a configuration, building it if it is new.
    fn prepare(&mut self, config: NetConfig) -> Result<usize> {
        self.clock += 1;
        if let Some(i) = self.prepared.iter().position(|p| p.config == config) {
            if let Some(p) = self.prepared.get_mut(i) {
                p.used = self.clock;
            }
            return Ok(i);
        }
        let (plan, _) = plan_of(&self.model, &config)?;
        let binds = plan.leaves.iter().map(|leaf| bind(&leaf.name)).collect::<Result<_>>()?;
        let prepared = Prepared { config, plan, binds, used: self.clock };
        if self.prepared.len() < PLANS {
            self.prepared.push(prepared);
            return Ok(self.prepared.len() - 1);
        }
        let oldest = self.prepared.iter().enumerate().min_by_key(|(_, p)| p.used);
        let oldest = oldest.map_or(0, |(i, _)| i);
        if let Some(p) = self.prepared.get_mut(oldest) {
            *p = prepared;
        }
        Ok(oldest)
    }
}

/// The serving plan of a configuration: outputs are each layer's keys and values, the holders of
/// states, then the logits. Also the number of graph nodes.
pub(crate) fn plan_of(model: &Model, config: &NetConfig) -> Result<(Plan, usize)> {
    let mut net = Net::new(model.weights(), config);
    let hidden = model.arch().hidden(&mut net)?;
    let logits = match config.logit_rows {
        0 => None,
        n => net.logits(model.arch(), hidden, n, |_, logits| Ok(logits))?.pop(),
    };
    let mut outputs: Vec<NodeId> = net.kv.iter().flat_map(|&(k, v)| [k, v]).collect();
    outputs.extend(net.states.iter().map(|state| state.holder));
    outputs.extend(logits);
    let plan = graph::plan(&net.graph, &outputs, model.device().as_ref())?;
    Ok((plan, net.graph.len()))
}

fn bind(name: &str) -> Result<Bind> {
    let fixed = match name {
        "tokens" => Some(Bind::Tokens),
        "positions" => Some(Bind::Positions),
        "seqs" => Some(Bind::Seqs),
        "table" => Some(Bind::Table),
        "logit_rows" => Some(Bind::LogitRows),
        "state_slots" => Some(Bind::StateSlots),
        _ => None,
    };
    if let Some(bind) = fixed {
        return Ok(bind);
    }
    let odd = || Error::new(format!("a graph asks for `{name}`, which the engine does not know"));
    if let Some(rest) = name.strip_prefix("cache.") {
        let (layer, part) = rest.split_once('.').ok_or_else(odd)?;
        let layer = layer.parse().map_err(|_| odd())?;
        return Ok(Bind::Cache { layer, values: part == "v" });
    }
    if let Some(state) = name.strip_prefix("state.") {
        return Ok(Bind::State(state.parse().map_err(|_| odd())?));
    }
    if let Some(rest) = name.strip_prefix("lora_rows.") {
        let (list, head) = match rest.strip_suffix(".head") {
            Some(list) => (list, true),
            None => (rest, false),
        };
        let slots = list.split('+').map(|s| s.parse().map_err(|_| odd())).collect::<Result<_>>()?;
        return Ok(Bind::LoraRows { slots, head });
    }
    if let Some((slot, rest)) = name.split_once(':') {
        let (target, part) = rest.rsplit_once('.').ok_or_else(odd)?;
        let part = match part {
            "lora_a" => Part::A,
            "lora_b" => Part::B,
            "lora_scale" => Part::Scale,
            _ => return Err(odd()),
        };
        let slot = slot.parse().map_err(|_| odd())?;
        return Ok(Bind::Lora { slot, target: target.to_string(), part });
    }
    Ok(Bind::Weight(name.to_string()))
}

/// Rows rounded up: powers of two to 64, then multiples of 64.
pub(crate) fn bucket(rows: usize) -> usize {
    if rows <= 64 { rows.next_power_of_two() } else { rows.next_multiple_of(64) }
}

fn put(list: &mut [i32], at: usize, value: i32) {
    if let Some(slot) = list.get_mut(at) {
        *slot = value;
    }
}

fn ints(list: &[i32]) -> Leaf<'_> {
    Leaf::Host(bytemuck::cast_slice(list))
}
