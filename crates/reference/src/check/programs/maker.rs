//! Random programs: the pool of values, and what every family needs of its operands.

use std::collections::HashMap;

use gguf::TensorType;
use graph::{DType, Graph, MAX_RANK, NodeId, Op, Shape};

use super::families;
use super::program::{Data, Program, compute_node};
use super::table::Family;
use crate::Value;
use crate::check::Rng;
use crate::check::case::random_block;

/// Elements a value has at most.
pub(super) const MOST_ELEMENTS: usize = 4096;

/// Ops a program has at most, beside the views its cotangents may be.
const MOST_OPS: usize = 40;

/// What a value's elements keep below, so that functions of functions stay tame.
const LARGEST: f64 = 4.0;

/// A program under construction. Every node's value is computed as it is made.
pub(super) struct Maker {
    pub rng: Rng,
    pub graph: Graph,
    leaves: HashMap<NodeId, Data>,
    values: Vec<Value>,
    /// Whether sizes are small: most programs are.
    small: bool,
    names: usize,
}

/// A random program of a seed.
pub(super) fn program(seed: u64, number: u64) -> Program {
    let rng = Rng::new(seed, &format!("program {number}"));
    let mut maker = Maker {
        rng,
        graph: Graph::new(),
        leaves: HashMap::new(),
        values: Vec::new(),
        small: true,
        names: 0,
    };
    maker.small = !maker.chance(4);
    // Short programs are more common: they are faster, and find as much.
    let most = if maker.chance(25) { MOST_OPS } else { 12 };
    let ops = 3 + maker.below(most - 2);
    let mut tries = 0;
    while maker.ops() < ops && tries < 8 * ops {
        tries += 1;
        let family = maker.family();
        let before = maker.graph.clone();
        if families::make(&mut maker, family).is_none() || maker.ops() > MOST_OPS {
            // Half of an op's operands may have been made.
            maker.restore(before);
        }
    }
    maker.finish()
}

impl Maker {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.rng.below(n)
    }

    pub(super) fn chance(&mut self, percent: usize) -> bool {
        self.rng.below(100) < percent
    }

    pub(super) fn pick<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        let i = self.rng.below(of.len());
        of.get(i).cloned()
    }

    /// One of two.
    pub(super) fn either<T>(&mut self, a: T, b: T) -> T {
        if self.rng.below(2) == 0 { a } else { b }
    }

    fn family(&mut self) -> Family {
        let total: usize = Family::ALL.iter().map(|f| families::weight(*f)).sum();
        let mut at = self.below(total);
        for &family in Family::ALL {
            let weight = families::weight(family);
            if at < weight {
                return family;
            }
            at -= weight;
        }
        Family::Leaf
    }

    fn ops(&self) -> usize {
        self.graph.ids().filter(|&id| !matches!(self.graph.node(id).op, Op::Leaf)).count()
    }

    fn restore(&mut self, graph: Graph) {
        self.values.truncate(graph.len());
        self.leaves.retain(|id, _| id.index() < graph.len());
        self.graph = graph;
    }

    pub(super) fn size(&mut self) -> usize {
        let sizes: &[usize] = match (self.small, self.chance(1)) {
            (_, true) => &[0],
            (true, _) => &[1, 1, 2, 2, 3, 4, 5, 7],
            (false, _) => &[1, 3, 8, 15, 16, 17, 32, 33],
        };
        self.pick(sizes).unwrap_or(1)
    }

    pub(super) fn some_dims(&mut self) -> Vec<usize> {
        let ranks: &[usize] = if self.small { &[0, 1, 2, 2, 2, 3, 3, 4, 5] } else { &[1, 2, 2, 3] };
        let rank = self.pick(ranks).unwrap_or(1);
        (0..rank).map(|_| self.size()).collect()
    }

    pub(super) fn dims(&self, id: NodeId) -> Vec<usize> {
        self.graph.node(id).shape.dims().to_vec()
    }

    pub(super) fn dtype(&self, id: NodeId) -> DType {
        self.graph.node(id).dtype
    }

    pub(super) fn value(&self, id: NodeId) -> &[f64] {
        self.values.get(id.index()).and_then(Value::as_floats).unwrap_or(&[])
    }

    fn name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}{}", self.names)
    }

    fn leaf(
        &mut self,
        dims: &[usize],
        dtype: DType,
        bytes: Vec<u8>,
        weight: bool,
    ) -> Option<NodeId> {
        let shape = Shape::new(dims).ok().filter(|s| s.elements() <= MOST_ELEMENTS)?;
        let name = self.name(if dtype == DType::I32 { "ids" } else { "x" });
        let data = Data::new(dtype, shape, bytes).ok()?;
        let id = match weight {
            true => self.graph.weight(&name, shape, dtype),
            false => self.graph.leaf(&name, shape, dtype),
        };
        let id = id.ok()?;
        self.values.push(data.value.clone());
        self.leaves.insert(id, data);
        Some(id)
    }

    /// A new leaf of f32, with elements between two numbers.
    pub(super) fn floats(&mut self, dims: &[usize], low: f64, high: f64) -> Option<NodeId> {
        self.floats_of(dims, DType::F32, low, high)
    }

    /// As [`Maker::floats`], of any float dtype or Q8_0.
    pub(super) fn floats_of(
        &mut self,
        dims: &[usize],
        dtype: DType,
        low: f64,
        high: f64,
    ) -> Option<NodeId> {
        let shape = Shape::new(dims).ok().filter(|s| s.elements() <= MOST_ELEMENTS)?;
        let data = (0..shape.elements()).map(|_| self.rng.between(low, high)).collect();
        let bytes = Value::floats(shape, data).ok()?.encode(dtype).ok()?;
        let weight = dims.len() == 2 && dtype.is_float() && self.chance(10);
        self.leaf(dims, dtype, bytes, weight)
    }

    /// A new leaf of f32.
    pub(super) fn float_leaf(&mut self, dims: &[usize]) -> Option<NodeId> {
        self.floats(dims, -1.5, 1.5)
    }

    /// A new weight of a block format.
    pub(super) fn block_weight(&mut self, rows: usize, cols: usize) -> Option<NodeId> {
        self.block_weight_of(&[rows, cols])
    }

    /// As [`Maker::block_weight`], of any rank.
    pub(super) fn block_weight_of(&mut self, dims: &[usize]) -> Option<NodeId> {
        let cols = *dims.last()?;
        use TensorType::{
            IQ4NL, IQ4XS, MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
        };
        let all = [Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4NL, MXFP4, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4XS];
        let fit: Vec<TensorType> =
            all.into_iter().filter(|t| cols > 0 && cols.is_multiple_of(t.block_len())).collect();
        let format = self.pick(&fit)?;
        let blocks = dims.iter().product::<usize>() / format.block_len();
        let bytes = (0..blocks).flat_map(|_| random_block(format, &mut self.rng)).collect();
        self.leaf(dims, DType::Block(format), bytes, true)
    }

    /// A new leaf of i32 elements.
    pub(super) fn ints(&mut self, dims: &[usize], data: Vec<i32>) -> Option<NodeId> {
        let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.leaf(dims, DType::I32, bytes, false)
    }

    /// `n` indices below `below`, some of them -1 where `missing`.
    pub(super) fn ids(&mut self, n: usize, below: usize, missing: bool) -> Option<NodeId> {
        let data = (0..n)
            .map(|_| match missing && self.chance(20) {
                true => -1,
                false => self.below(below) as i32,
            })
            .collect();
        self.ints(&[n], data)
    }

    /// Indices below `below` in a given shape, which is without elements where there are none.
    pub(super) fn ids_of(&mut self, dims: &[usize], below: usize) -> Option<NodeId> {
        let n: usize = dims.iter().product();
        if below == 0 && n > 0 {
            return None;
        }
        let data = (0..n).map(|_| self.below(below) as i32).collect();
        self.ints(dims, data)
    }

    /// A node of `op`, unless it is too large or not finite; one that is too large in value is
    /// scaled down.
    pub(super) fn push(&mut self, op: Op, args: &[NodeId]) -> Option<NodeId> {
        let name = self.name("n");
        let id = self.graph.push(op, args, &name).ok()?;
        if self.graph.node(id).shape.elements() > MOST_ELEMENTS {
            return None;
        }
        if id.index() < self.values.len() {
            return Some(id);
        }
        let mut sides = Vec::new();
        let value = compute_node(&self.graph, &self.leaves, &self.values, id, &mut sides).ok()?;
        let largest = value.as_floats().unwrap_or(&[]).iter().fold(0.0f64, |m, x| {
            // Not `max`, which drops NaN.
            if x.abs() <= m { m } else { x.abs() }
        });
        self.values.push(value);
        if !largest.is_finite() {
            return None;
        }
        if largest > LARGEST && self.dtype(id) == DType::F32 {
            let op = Op::Affine { scale: ((2.0 / largest) as f32).into(), bias: 0.0.into() };
            return self.push(op, &[id]);
        }
        Some(id)
    }

    /// Nodes of a dtype, optionally with a condition.
    fn nodes(&self, fit: impl Fn(&Maker, NodeId) -> bool) -> Vec<NodeId> {
        self.graph.ids().filter(|&id| fit(self, id)).collect()
    }

    /// A value that satisfies a condition, the later ones more often.
    pub(super) fn find(&mut self, fit: impl Fn(&Maker, NodeId) -> bool) -> Option<NodeId> {
        let fits = self.nodes(fit);
        let n = fits.len();
        let from = if self.chance(60) { n.saturating_sub(4) } else { 0 };
        let i = from + self.below(n - from);
        fits.get(i).copied()
    }

    /// Any value of f32, now and then a new leaf.
    pub(super) fn any(&mut self) -> Option<NodeId> {
        let found = match self.chance(12) {
            true => None,
            false => self.find(|m, id| m.dtype(id) == DType::F32),
        };
        match found {
            Some(id) => Some(id),
            None => {
                let dims = self.some_dims();
                self.float_leaf(&dims)
            }
        }
    }

    /// An f32 value of these dimensions: one there is, a view of one, or a new leaf.
    pub(super) fn like(&mut self, dims: &[usize]) -> Option<NodeId> {
        let n: usize = dims.iter().product();
        let kind = self.below(10);
        if kind < 4 {
            let same = |m: &Maker, id: NodeId| m.dtype(id) == DType::F32 && m.dims(id) == dims;
            if let Some(id) = self.find(same) {
                return Some(id);
            }
        }
        if kind < 7 {
            let holds = |m: &Maker, id: NodeId| {
                m.dtype(id) == DType::F32 && n > 0 && m.value(id).len() >= n
            };
            if let Some(id) = self.find(holds) {
                return self.cut(id, dims);
            }
        }
        self.float_leaf(dims)
    }

    /// The first elements of a value under another shape.
    fn cut(&mut self, id: NodeId, dims: &[usize]) -> Option<NodeId> {
        let n: usize = dims.iter().product();
        let has = self.value(id).len();
        let shape = |dims: &[usize]| Shape::new(dims).ok();
        if has > n {
            let flat = self.push(Op::Reshape { shape: shape(&[has])? }, &[id])?;
            let start = self.below(has - n + 1);
            let cut = self.push(Op::Slice { dim: 0, start, len: n }, &[flat])?;
            return self.push(Op::Reshape { shape: shape(dims)? }, &[cut]);
        }
        if self.dims(id) == dims {
            return Some(id);
        }
        self.push(Op::Reshape { shape: shape(dims)? }, &[id])
    }

    /// A value with this many dimensions: `x`, reshaped if need be.
    pub(super) fn ranked(&mut self, x: NodeId, rank: usize) -> Option<NodeId> {
        let mut dims = self.dims(x);
        if dims.len() == rank {
            return Some(x);
        }
        while dims.len() < rank {
            let i = self.below(dims.len() + 1);
            dims.insert(i, 1);
        }
        while dims.len() > rank.max(1) {
            let i = self.below(dims.len() - 1);
            dims[i] *= dims.remove(i + 1);
        }
        self.push(Op::Reshape { shape: Shape::new(&dims).ok()? }, &[x])
    }

    /// A value whose elements are all above 0.3: `x`, or a function of it.
    pub(super) fn positive(&mut self, x: NodeId) -> Option<NodeId> {
        use graph::Unary;
        if self.value(x).iter().all(|&v| v > 0.3) {
            return Some(x);
        }
        let unary = self.pick(&[Unary::Sigmoid, Unary::Sqr, Unary::Exp, Unary::Softplus])?;
        let y = self.push(Op::Unary(unary), &[x])?;
        self.push(Op::Affine { scale: 0.5.into(), bias: 0.5.into() }, &[y])
    }

    /// `MAX_RANK` or less.
    pub(super) fn has_room(&self, rank: usize) -> bool {
        rank < MAX_RANK
    }

    /// Chooses outputs and what is differentiated.
    fn finish(mut self) -> Program {
        let floats = |m: &Maker, id: NodeId| {
            let node = m.graph.node(id);
            (node.dtype.is_float() || node.dtype == DType::Q8Rows) && !matches!(node.op, Op::Leaf)
        };
        let mut cotangents = Vec::new();
        // The last value nearly always counts: it depends on the most.
        let forward = self.graph.len();
        for n in 0..1 + self.below(3) {
            let y = match n {
                0 if self.chance(80) => self.nodes(floats).last().copied(),
                _ => self.find(|m, id| id.index() < forward && floats(m, id)),
            };
            let Some(y) = y else { continue };
            if let Some(dy) = self.cotangent(y) {
                cotangents.push((y, dy));
            }
        }
        let mut program = Program {
            graph: self.graph.clone(),
            leaves: self.leaves.clone(),
            cotangents,
            wrt: Vec::new(),
        };
        // One in ten is asked for anything, and is mostly refused; the others for what an output
        // depends on, through ops that are smooth if there is a way.
        if self.chance(10) {
            program.wrt = self.wrt(|id| id.index() < forward);
            return program;
        }
        let shown = program.shown();
        let mut first = None;
        for _ in 0..16 {
            program.wrt = self.wrt(|id| shown.get(id.index()) == Some(&true));
            if program.predicted().is_none() && !program.wrt.is_empty() {
                return program;
            }
            first.get_or_insert_with(|| program.wrt.clone());
        }
        program.wrt = first.unwrap_or_default();
        program
    }

    /// A cotangent of a value: a leaf, or a view of one.
    fn cotangent(&mut self, y: NodeId) -> Option<NodeId> {
        let dims = self.dims(y);
        let shape = Shape::new(&dims).ok()?;
        match self.below(4) {
            0 if !dims.is_empty() => {
                let dim = self.below(dims.len());
                let mut wide = dims.clone();
                wide[dim] += 2;
                let x = self.float_leaf(&wide)?;
                self.push(Op::Slice { dim: dim as u8, start: 1, len: dims[dim] }, &[x])
            }
            1 if !dims.is_empty() => {
                let dim = self.below(dims.len());
                let mut thin = dims.clone();
                thin[dim] = 1;
                let x = self.float_leaf(&thin)?;
                self.push(Op::Broadcast { shape }, &[x])
            }
            2 => {
                let turned: Vec<usize> = dims.iter().rev().copied().collect();
                let x = self.float_leaf(&turned)?;
                let perm = (0..dims.len() as u8).rev().collect();
                self.push(Op::Permute { perm }, &[x])
            }
            _ => self.float_leaf(&dims),
        }
    }

    /// What to differentiate for: float leaves mostly, now and then anything.
    fn wrt(&mut self, of: impl Fn(NodeId) -> bool) -> Vec<NodeId> {
        let mut wrt = Vec::new();
        for _ in 0..1 + self.below(3) {
            let kind = self.below(20);
            let x = self.find(|m, id| {
                let node = m.graph.node(id);
                let leaf = matches!(node.op, Op::Leaf);
                of(id)
                    && match kind {
                        0..15 => leaf && node.dtype.is_float(),
                        15..18 => node.dtype.is_float(),
                        _ => true,
                    }
            });
            if let Some(x) = x.filter(|x| !wrt.contains(x)) {
                wrt.push(x);
            }
        }
        wrt
    }
}
