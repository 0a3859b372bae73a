//! Random graphs of the whole set of ops, with random shapes, sharing and broadcasting.

use gguf::TensorType;
use gradus_graph::*;

use super::{Rng, shape};

/// Elements a value of a random graph has at most.
const MAX_ELEMENTS: usize = 4096;

/// A random graph and what was made of it.
pub struct Random {
    pub graph: Graph,
    /// f32 values that are not leaves.
    pub values: Vec<NodeId>,
    /// Float leaves, most of them f32.
    pub leaves: Vec<NodeId>,
}

struct Maker {
    rng: Rng,
    graph: Graph,
    floats: Vec<NodeId>,
    leaves: Vec<NodeId>,
    names: usize,
}

impl Maker {
    fn name(&mut self, what: &str) -> String {
        self.names += 1;
        format!("{what}{}", self.names)
    }

    fn leaf(&mut self, dims: &[usize], dtype: DType) -> NodeId {
        let name = self.name(if dtype == DType::I32 { "ids" } else { "leaf" });
        let shape = shape(dims);
        let resident =
            matches!(dtype, DType::Block(_)) || (dtype.is_float() && self.rng.chance(30));
        let made = if resident {
            self.graph.weight(&name, shape, dtype)
        } else {
            self.graph.leaf(&name, shape, dtype)
        };
        let id = made.unwrap();
        if dtype.is_float() {
            self.leaves.push(id);
        }
        if dtype == DType::F32 {
            self.floats.push(id);
        }
        id
    }

    fn dims(&self, id: NodeId) -> Vec<usize> {
        self.graph.node(id).shape.dims().to_vec()
    }

    /// An f32 value of this shape: one there is, or a new leaf.
    fn like(&mut self, dims: &[usize]) -> NodeId {
        let fit: Vec<NodeId> =
            self.floats.iter().copied().filter(|&f| self.dims(f) == dims).collect();
        if fit.is_empty() || self.rng.chance(30) {
            self.leaf(dims, DType::F32)
        } else {
            self.rng.pick(&fit)
        }
    }

    /// A value of some rank: `x` reshaped, if need be.
    fn with_rank(&mut self, x: NodeId, rank: usize) -> NodeId {
        let mut dims = self.dims(x);
        while dims.len() < rank {
            dims.insert(self.rng.below(dims.len() + 1), 1);
        }
        while dims.len() > rank {
            let i = self.rng.below(dims.len() - 1);
            dims[i] *= dims.remove(i + 1);
        }
        self.graph.reshape(x, &dims).unwrap()
    }

    fn op(&mut self, x: NodeId) -> std::result::Result<NodeId, Invalid> {
        let dims = self.dims(x);
        let rank = dims.len();
        let name = self.name("n");
        let one = |op: Op, g: &mut Graph, name: &str| g.push(op, &[x], name);
        match self.rng.below(23) {
            0 | 1 => {
                let op = Op::Binary(self.rng.pick(&[
                    Binary::Add,
                    Binary::Sub,
                    Binary::Mul,
                    Binary::Div,
                ]));
                // The other operand lacks some of the dimensions.
                let mut other = dims[self.rng.below(rank + 1)..].to_vec();
                for d in &mut other {
                    if self.rng.chance(25) {
                        *d = 1;
                    }
                }
                let y = self.like(&other);
                let args = if self.rng.chance(50) { [x, y] } else { [y, x] };
                self.graph.push(op, &args, &name)
            }
            2 => {
                use Unary::*;
                let f = self.rng.pick(&[Tanh, Sigmoid, Silu, Gelu, Exp, Log]);
                one(Op::Unary(f), &mut self.graph, &name)
            }
            3 => self.graph.affine(x, 0.5, 1.0),
            4 => {
                let kind = self.rng.pick(&[GluKind::Swiglu, GluKind::Geglu]);
                let up = self.like(&dims);
                self.graph.push(Op::Glu(kind), &[x, up], &name)
            }
            5 => {
                let set = self.rng.below(1 << rank) as u8;
                one(Op::Sum { dims: set }, &mut self.graph, &name)
            }
            6 => {
                let mut wide = dims;
                for d in &mut wide {
                    if *d == 1 && self.rng.chance(70) {
                        *d = 1 + self.rng.below(4);
                    }
                }
                if wide.len() < MAX_RANK && self.rng.chance(50) {
                    wide.insert(0, 1 + self.rng.below(3));
                }
                one(Op::Broadcast { shape: Shape::new(&wide)? }, &mut self.graph, &name)
            }
            7 | 8 => {
                let mut to = dims;
                for _ in 0..3 {
                    let i = self.rng.below(to.len());
                    if self.rng.chance(50) && to.len() > 1 && i + 1 < to.len() {
                        to[i] *= to.remove(i + 1);
                    } else if to.len() < MAX_RANK && i < to.len() {
                        let factors: Vec<usize> =
                            (1..=to[i]).filter(|f| to[i].is_multiple_of(*f)).collect();
                        if !factors.is_empty() {
                            let f = self.rng.pick(&factors);
                            to[i] /= f;
                            to.insert(i, f);
                        }
                    }
                }
                one(Op::Reshape { shape: Shape::new(&to)? }, &mut self.graph, &name)
            }
            9 | 10 => {
                let perm = self.rng.permutation(rank);
                one(Op::Permute { perm }, &mut self.graph, &name)
            }
            11 | 12 if rank > 0 => {
                let dim = self.rng.below(rank);
                let start = self.rng.below(dims[dim] + 1);
                let len = self.rng.below(dims[dim] - start + 1);
                let len = if len == 0 && self.rng.chance(80) { dims[dim] - start } else { len };
                one(Op::Slice { dim: dim as u8, start, len }, &mut self.graph, &name)
            }
            13 if rank > 0 => {
                let (before, after) = (self.rng.below(3), self.rng.below(3));
                let dim = self.rng.below(rank) as u8;
                one(Op::Pad { dim, before, after }, &mut self.graph, &name)
            }
            14 if rank > 0 => {
                let dim = self.rng.below(rank);
                let mut other = dims;
                other[dim] = self.rng.below(3);
                let y = self.like(&other);
                let xs = if self.rng.chance(50) { vec![x, y] } else { vec![y, x, x] };
                self.graph.push(Op::Concat { dim: dim as u8 }, &xs, &name)
            }
            15 => {
                let half = self.rng.pick(&[DType::F16, DType::BF16]);
                match self.rng.below(3) {
                    0 => one(Op::Copy, &mut self.graph, &name),
                    1 => one(Op::Round { dtype: half }, &mut self.graph, &name),
                    _ => {
                        let low = one(Op::Cast { dtype: half }, &mut self.graph, &name)?;
                        let low = self.graph.permute(low, &self.rng.permutation(rank))?;
                        self.graph.push(Op::Cast { dtype: DType::F32 }, &[low], &name)
                    }
                }
            }
            16 => {
                let t = self.rng.below(5);
                let ids = self.leaf(&[t], DType::I32);
                let x = self.with_rank(x, 2);
                if self.rng.chance(50) {
                    return self.graph.gather(x, ids, &name);
                }
                let rows = self.dims(x)[0];
                let ids = self.leaf(&[rows], DType::I32);
                let rows = 1 + self.rng.below(6);
                self.graph.push(Op::ScatterAdd { rows }, &[ids, x], &name)
            }
            17 => {
                let cols = self.graph.node(x).shape.cols();
                let w = self.like(&[cols]);
                self.graph.push(Op::RmsNorm { eps: 1e-5.into() }, &[x, w], &name)
            }
            18 => {
                let x = self.with_rank(x, 3);
                let (t, d) = (self.dims(x)[0], self.dims(x)[2]);
                let dims = d / 2 * 2;
                let style = self.rng.pick(&[RopeStyle::Halves, RopeStyle::Interleaved]);
                let pos = self.leaf(&[t], DType::I32);
                let angles = RopeAngles {
                    dims,
                    base: 1e4.into(),
                    freq_scale: 1.0.into(),
                    factors: false,
                    yarn: None,
                    sections: None,
                };
                let table = self.graph.push(Op::RopeTable(angles), &[pos], &name)?;
                self.graph.push(Op::Rope { style, inverse: false }, &[x, table], &name)
            }
            19 => self.product(x, &name),
            20 => self.lora(x, &name),
            21 => self.attention(x, &name),
            22 => {
                let x = self.with_rank(x, 2);
                let labels = self.leaf(&[self.dims(x)[0]], DType::I32);
                self.graph.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[x, labels], &name)
            }
            _ => self.graph.add(x, x),
        }
    }

    fn product(&mut self, x: NodeId, name: &str) -> std::result::Result<NodeId, Invalid> {
        let x = if self.graph.node(x).shape.rank() < 2 { self.with_rank(x, 2) } else { x };
        let dims = self.dims(x);
        let (m, k) = (dims[dims.len() - 2], dims[dims.len() - 1]);
        let n = 1 + self.rng.below(6);
        if k.is_multiple_of(32) && self.rng.chance(80) {
            let w = self.leaf(&[n, k], DType::Block(TensorType::Q4_0));
            return self.graph.project(x, w);
        }
        let (ta, tb) = (self.rng.chance(40), self.rng.chance(50));
        let inner = if ta { m } else { k };
        let mut other = dims[..dims.len() - 2].to_vec();
        other.drain(..self.rng.below(other.len() + 1));
        other.iter_mut().for_each(|d| *d = if self.rng.chance(40) { 1 } else { *d });
        other.extend(if tb { [n, inner] } else { [inner, n] });
        if self.rng.chance(30) {
            let b = self.leaf(&other, DType::F16);
            return self.graph.push(Op::MatMul { ta, tb }, &[x, b], name);
        }
        let b = self.like(&other);
        self.graph.push(Op::MatMul { ta, tb }, &[x, b], name)
    }

    fn lora(&mut self, x: NodeId, name: &str) -> std::result::Result<NodeId, Invalid> {
        let x = self.with_rank(x, 2);
        let (t, k) = (self.dims(x)[0], self.dims(x)[1]);
        let (n, slots) = (1 + self.rng.below(4), 1 + self.rng.below(2));
        let mut args = vec![x, self.like(&[t, n]), self.leaf(&[t], DType::I32)];
        for _ in 0..slots {
            let r = 1 + self.rng.below(3);
            args.extend([self.like(&[r, k]), self.like(&[n, r])]);
            let scale = self.name("scale");
            args.push(self.graph.leaf(&scale, shape(&[1]), DType::F32)?);
        }
        self.graph.push(Op::Lora { slots }, &args, name)
    }

    fn attention(&mut self, x: NodeId, name: &str) -> std::result::Result<NodeId, Invalid> {
        let q = self.with_rank(x, 3);
        let dims = self.dims(q);
        let (t, hq, d) = (dims[0], dims[1], dims[2]);
        let heads: Vec<usize> = (1..=hq).filter(|h| hq.is_multiple_of(*h)).collect();
        let (hkv, dv) = (if heads.is_empty() { 1 } else { self.rng.pick(&heads) }, 3);
        let (k, v) = (self.like(&[t, hkv, d]), self.like(&[t, hkv, dv]));
        let seqs = self.leaf(&[2, 3], DType::I32);
        let mut args = vec![q, k, v, seqs];
        let sinks = self.rng.chance(30);
        if sinks {
            args.push(self.like(&[hq]));
        }
        let prefix = self.rng.chance(50);
        if prefix {
            let dtype = self.rng.pick(&[DType::F16, DType::BF16]);
            args.extend([self.leaf(&[2, 4, hkv, d], dtype), self.leaf(&[2, 4, hkv, dv], dtype)]);
            args.push(self.leaf(&[2, 2], DType::I32));
        }
        let attrs = AttentionAttrs { sinks, prefix, ..AttentionAttrs::new(0.5) };
        self.graph.push(Op::Attention(attrs), &args, name)
    }
}

/// A graph of `n` random ops over 4 layers, the same for the same seed.
pub fn graph(seed: u64, n: usize) -> Random {
    let mut maker = Maker {
        rng: Rng(seed << 20),
        graph: Graph::new(),
        floats: Vec::new(),
        leaves: Vec::new(),
        names: 0,
    };
    for _ in 0..3 {
        let rank = maker.rng.below(4);
        let dims: Vec<usize> = (0..rank)
            .map(|_| match maker.rng.below(20) {
                0 => 0,
                1 => 32,
                d => 1 + d % 5,
            })
            .collect();
        maker.leaf(&dims, DType::F32);
    }
    let mut values = Vec::new();
    let mut tries = 0;
    while values.len() < n && tries < 20 * n {
        tries += 1;
        // Mostly what was made last, so that graphs grow deep.
        let far = maker.floats.len();
        let reach = if maker.rng.chance(60) { far.min(4) } else { far };
        let x = maker.floats[far - 1 - maker.rng.below(reach)];
        maker.graph.set_layer(Some((values.len() * 4 / n) as u32));
        if let Ok(id) = maker.op(x) {
            let node = maker.graph.node(id);
            if node.dtype == DType::F32 && node.shape.elements() <= MAX_ELEMENTS {
                maker.floats.push(id);
                values.push(id);
            }
        }
        maker.graph.set_layer(None);
    }
    Random { graph: maker.graph, values, leaves: maker.leaves }
}

/// The graph with gradients of a sum of values, where it is differentiable, and the outputs to
/// plan: the gradients and the last values.
pub fn with_gradients(seed: u64, n: usize) -> (Graph, Vec<NodeId>) {
    let mut random = graph(seed, n);
    let mut rng = Rng(seed ^ 77);
    let ends: Vec<NodeId> = random.values.iter().rev().take(3).copied().collect();
    let mut cotangents = Vec::new();
    for (i, &y) in ends.iter().enumerate() {
        let shape = random.graph.node(y).shape;
        let dy = random.graph.leaf(&format!("dy{i}"), shape, DType::F32).unwrap();
        cotangents.push((y, dy));
    }
    let mut outputs = ends;
    for _ in 0..6 {
        let wrt = [rng.pick(&random.leaves)];
        if let Ok(back) = vjp(&random.graph, &cotangents, &wrt) {
            random.graph = back.graph;
            outputs.extend(back.grads);
        }
    }
    (random.graph, outputs)
}
