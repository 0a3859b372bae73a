//! A case: a small graph around one op, with its inputs and what differentiating it must give.

use gguf::TensorType;
use graph::{Code, DType, Graph, Invalid, NodeId, Shape};
use half::f16;

use super::{Rng, wide, wild};
use crate::{Leaves, Value};

/// What building a node gives.
pub type Made = std::result::Result<NodeId, Invalid>;

/// What differentiating with respect to an input must give.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Expected {
    /// A gradient, equal to central differences.
    Gradient,
    /// A refusal with this code. `op` is the op it names; `None` when it concerns no op's rule.
    Refusal {
        /// The code.
        code: Code,
        /// The op that blocks the way.
        op: &'static str,
    },
    /// Nothing is asked.
    Nothing,
}

/// Where random elements are drawn from. All keep away from kinks, poles and from where a
/// derivative is zero, so that errors are relative to something.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Fill {
    /// Magnitudes in 0.3 .. 1.7 of either sign.
    Signed,
    /// Uniform between two numbers.
    Between(f64, f64),
    /// Uniform in -3 .. 3 but for a hole.
    Outside(f64, f64),
    /// One of so many numbers from a first one on, a step apart: never nearer to what lies
    /// between two of them.
    Steps(f64, f64, u32),
    /// In any order, all at least so far apart: none changes places with another.
    Apart(f64),
}

impl Fill {
    /// 0.5 .. 1.5
    pub const POSITIVE: Fill = Fill::Between(0.5, 1.5);

    pub(super) fn draw(self, n: usize, rng: &mut Rng) -> Vec<f64> {
        let mut each = |one: &dyn Fn(&mut Rng) -> f64| (0..n).map(|_| one(rng)).collect();
        match self {
            Fill::Signed => each(&|rng| rng.sign() * rng.between(0.3, 1.7)),
            Fill::Between(low, high) => each(&|rng| rng.between(low, high)),
            Fill::Steps(first, step, count) => {
                each(&|rng| first + step * (rng.next_u64() % u64::from(count.max(1))) as f64)
            }
            Fill::Outside(low, high) => each(&|rng| {
                loop {
                    let x = rng.between(-3.0, 3.0);
                    if x < low || x > high {
                        break x;
                    }
                }
            }),
            Fill::Apart(least) => {
                let mut all: Vec<f64> =
                    (0..n).map(|i| (i as f64 - n as f64 / 2.0) * least).collect();
                (1..n).rev().for_each(|i| all.swap(i, rng.below(i + 1)));
                all
            }
        }
    }
}

/// How an operand lies in its leaf: the ways a view may stride.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum View {
    /// It is the leaf.
    Plain,
    /// Columns cut out of wider rows.
    Columns,
    /// Rows cut out of the middle of more rows.
    Rows,
    /// The leaf with its dimensions reversed.
    Transposed,
    /// A transposed leaf, of which some is cut out.
    TransposedColumns,
    /// The first dimension is repeated.
    Repeated,
    /// The last dimension is repeated.
    RepeatedColumns,
}

impl View {
    /// Every view but the plain one.
    pub const STRIDED: [View; 6] = [
        View::Columns,
        View::Rows,
        View::Transposed,
        View::TransposedColumns,
        View::Repeated,
        View::RepeatedColumns,
    ];
}

/// A leaf of a case and what it holds.
#[derive(Clone, Debug)]
pub struct Input {
    /// The leaf.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Its little-endian bytes.
    pub bytes: Vec<u8>,
    /// What differentiating with respect to it must give.
    pub expected: Expected,
}

/// What leaves of random elements hold.
#[derive(Copy, Clone, PartialEq, Debug)]
pub(super) enum Draw {
    /// What their [`Fill`] says.
    Fills,
    /// Numbers far out, at zero and below the normal ones, in some leaves: see
    /// [`super::check_wide`].
    Wide,
    /// Anything, or, where it is `tame`, anything finite and small; see [`super::wild`].
    Wild {
        /// Whether all is finite and small.
        tame: bool,
    },
}

/// A graph under construction, with the values of its leaves.
pub struct CaseGraph {
    /// The graph so far.
    pub graph: Graph,
    /// The source of everything random in this case.
    pub rng: Rng,
    /// The leaves.
    pub inputs: Vec<Input>,
    /// Their values.
    pub leaves: Leaves,
    op: &'static str,
    cotangent: Option<NodeId>,
    cotangent_fill: Fill,
    pub(super) draw: Draw,
}

impl CaseGraph {
    /// An empty graph for a case of `op`.
    pub fn new(op: &'static str, rng: Rng) -> CaseGraph {
        CaseGraph {
            graph: Graph::new(),
            rng,
            inputs: Vec::new(),
            leaves: Leaves::new(),
            op,
            cotangent: None,
            cotangent_fill: Fill::Signed,
            draw: Draw::Fills,
        }
    }

    fn bind(&mut self, node: NodeId, name: &str, bytes: Vec<u8>, expected: Expected) -> Made {
        let leaf = self.graph.node(node);
        let value = Value::decode(leaf.dtype, leaf.shape, &bytes)?;
        self.leaves.insert(node, value);
        self.inputs.push(Input { node, name: name.into(), bytes, expected });
        Ok(node)
    }

    fn random(&mut self, shape: Shape, fill: Fill) -> Result<Value, Invalid> {
        let (n, rng) = (shape.elements(), &mut self.rng);
        let data = match self.draw {
            Draw::Fills => fill.draw(n, rng),
            Draw::Wide => wide::numbers(fill, n, rng),
            Draw::Wild { tame } => (0..n).map(|_| wild::number(rng, tame)).collect(),
        };
        Value::floats(shape, data)
    }

    /// An f32 leaf that has a gradient.
    ///
    /// # Errors
    /// As the graph's builder, here and below.
    pub fn float(&mut self, name: &str, dims: &[usize], fill: Fill) -> Made {
        self.float_of(name, dims, DType::F32, fill)
    }

    /// A leaf of a float dtype that has a gradient.
    ///
    /// # Errors
    /// `Invalid` when `dtype` is not f32, f16, bf16 or Q8_0 (which has none).
    pub fn float_of(&mut self, name: &str, dims: &[usize], dtype: DType, fill: Fill) -> Made {
        let shape = Shape::new(dims)?;
        let bytes = self.random(shape, fill)?.encode(dtype)?;
        let node = self.graph.leaf(name, shape, dtype)?;
        self.bind(node, name, bytes, Expected::Gradient)
    }

    /// An f32 leaf with these elements.
    ///
    /// # Errors
    /// `Invalid` when there are not as many as the shape has.
    pub fn given(&mut self, name: &str, dims: &[usize], data: &[f32]) -> Made {
        let shape = Shape::new(dims)?;
        let bytes = Value::from_f32(shape, data)?.encode(DType::F32)?;
        let node = self.graph.leaf(name, shape, DType::F32)?;
        self.bind(node, name, bytes, Expected::Gradient)
    }

    /// An integer leaf, with respect to which the case's op refuses to be differentiated.
    ///
    /// # Errors
    /// `Invalid` when there are not as many elements as the shape has.
    pub fn ints(&mut self, name: &str, dims: &[usize], data: &[i32]) -> Made {
        let shape = Shape::new(dims)?;
        let bytes = Value::ints(shape, data.to_vec())?.encode(DType::I32)?;
        let node = self.graph.leaf(name, shape, DType::I32)?;
        self.bind(node, name, bytes, self.refused())
    }

    /// A resident weight. One of a block format refuses to be differentiated, by the case's op.
    ///
    /// # Errors
    /// `Invalid` when `dtype` is i32 or q8-rows.
    pub fn weight(&mut self, name: &str, dims: &[usize], dtype: DType) -> Made {
        let shape = Shape::new(dims)?;
        let node = self.graph.weight(name, shape, dtype)?;
        match dtype {
            DType::Block(format) => {
                let bytes = self.blocks(shape, format);
                self.bind(node, name, bytes, self.refused())
            }
            _ => {
                let bytes = self.random(shape, Fill::Signed)?.encode(dtype)?;
                self.bind(node, name, bytes, Expected::Gradient)
            }
        }
    }

    /// A leaf of blocks that is not resident. It refuses as a weight does.
    pub(super) fn block_leaf(&mut self, name: &str, dims: &[usize], format: TensorType) -> Made {
        let shape = Shape::new(dims)?;
        let node = self.graph.leaf(name, shape, DType::Block(format))?;
        let bytes = self.blocks(shape, format);
        self.bind(node, name, bytes, self.refused())
    }

    /// Random blocks: of wild graphs, any bytes.
    fn blocks(&mut self, shape: Shape, format: TensorType) -> Vec<u8> {
        let blocks = shape.elements() / format.block_len().max(1);
        match self.draw {
            Draw::Wild { tame: false } => {
                let bytes = blocks * format.block_bytes();
                (0..bytes).map(|_| self.rng.next_u64() as u8).collect()
            }
            _ => (0..blocks).flat_map(|_| random_block(format, &mut self.rng)).collect(),
        }
    }

    /// A value of shape `dims` that lies in a leaf of f32 as `view` says.
    ///
    /// # Errors
    /// As the graph's builder.
    pub fn viewed(&mut self, name: &str, dims: &[usize], view: View, fill: Fill) -> Made {
        let rank = dims.len();
        let mut wide = dims.to_vec();
        let (first, last) = (0, rank.saturating_sub(1));
        if rank == 0 || view == View::Plain {
            return self.float(name, dims, fill);
        }
        let reversed: Vec<u8> = (0..rank as u8).rev().collect();
        match view {
            View::Plain => self.float(name, dims, fill),
            View::Columns => {
                wide[last] += 5;
                let x = self.float(name, &wide, fill)?;
                self.graph.slice(x, last, 2, dims[last])
            }
            View::Rows => {
                wide[first] += 3;
                let x = self.float(name, &wide, fill)?;
                self.graph.slice(x, first, 1, dims[first])
            }
            View::Transposed => {
                wide.reverse();
                let x = self.float(name, &wide, fill)?;
                self.graph.permute(x, &reversed)
            }
            View::TransposedColumns => {
                wide[last] += 4;
                wide.reverse();
                let x = self.float(name, &wide, fill)?;
                let x = self.graph.permute(x, &reversed)?;
                self.graph.slice(x, last, 3, dims[last])
            }
            View::Repeated => {
                wide[first] = 1;
                let x = self.float(name, &wide, fill)?;
                self.graph.broadcast(x, Shape::new(dims)?)
            }
            View::RepeatedColumns => {
                wide[last] = 1;
                let x = self.float(name, &wide, fill)?;
                self.graph.broadcast(x, Shape::new(dims)?)
            }
        }
    }

    /// The refusal that differentiating with respect to an operand of the case's op must give.
    pub fn refused(&self) -> Expected {
        Expected::Refusal { code: Code::OpNotDifferentiable, op: self.op }
    }

    /// Changes what differentiating with respect to a leaf must give.
    pub fn expect(&mut self, leaf: NodeId, expected: Expected) {
        for input in self.inputs.iter_mut().filter(|i| i.node == leaf) {
            input.expected = expected;
        }
    }

    /// As [`CaseGraph::expect`], for all leaves so far.
    pub fn expect_all(&mut self, expected: Expected) {
        self.inputs.iter_mut().for_each(|i| i.expected = expected);
    }

    /// The cotangents are drawn from `fill` instead of [`Fill::Signed`]: positive ones where a
    /// gradient sums them, so that the sum does not cancel.
    pub fn cotangents(&mut self, fill: Fill) {
        self.cotangent_fill = fill;
    }

    /// The cotangent is a view.
    ///
    /// # Errors
    /// As the graph's builder.
    pub fn cotangent_viewed(&mut self, dims: &[usize], view: View) -> Result<(), Invalid> {
        let fill = self.cotangent_fill;
        let node = self.viewed("cotangent", dims, view, fill)?;
        if let Some(leaf) = self.graph.find_leaf("cotangent") {
            self.expect(leaf, Expected::Nothing);
        }
        self.cotangent = Some(node);
        Ok(())
    }

    /// The cotangent of the case's output.
    pub(super) fn cotangent_of(&mut self, output: NodeId) -> Made {
        if let Some(cotangent) = self.cotangent {
            return Ok(cotangent);
        }
        let dims = self.graph.node(output).shape.dims().to_vec();
        self.cotangent_viewed(&dims, View::Plain)?;
        self.cotangent.ok_or_else(|| Invalid::new("a case without a cotangent"))
    }
}

/// Builds a case's graph and returns its output, an f32 node.
type Build = Box<dyn Fn(&mut CaseGraph) -> Made + Send + Sync>;

/// A bound of its own, and the measured reason for it.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Wider {
    /// The bound.
    pub bound: f64,
    /// Why the usual one does not hold.
    pub reason: &'static str,
}

/// One case of an op.
pub struct Case {
    /// The op it is about, as [`graph::Op::name`] calls it; its graph contains that op.
    pub op: &'static str,
    /// What is special about it.
    pub name: String,
    /// A wider bound for devices.
    pub device_bound: Option<Wider>,
    /// The fault that running it must give, where its inputs are bad.
    pub fault: Option<Code>,
    build: Build,
}

impl Case {
    /// The case's graph with the inputs of a seed, and its output.
    ///
    /// # Errors
    /// As the graph's builder.
    pub fn build(&self, seed: u64) -> Result<(CaseGraph, NodeId), Invalid> {
        self.build_of(seed, Draw::Fills)
    }

    pub(super) fn build_of(&self, seed: u64, draw: Draw) -> Result<(CaseGraph, NodeId), Invalid> {
        let label = format!("{}/{}", self.op, self.name);
        let mut graph = CaseGraph::new(self.op, Rng::new(seed, &label));
        graph.draw = draw;
        let output = (self.build)(&mut graph)?;
        Ok((graph, output))
    }
}

/// The cases of one op.
pub struct Cases {
    op: &'static str,
    list: Vec<Case>,
}

impl Cases {
    /// No cases yet.
    pub fn new(op: &'static str) -> Cases {
        Cases { op, list: Vec::new() }
    }

    /// Adds a case; its graph must contain the op these cases are of.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        build: impl Fn(&mut CaseGraph) -> Made + Send + Sync + 'static,
    ) -> &mut Case {
        let at = self.list.len();
        self.list.push(Case {
            op: self.op,
            name: name.into(),
            device_bound: None,
            fault: None,
            build: Box::new(build),
        });
        &mut self.list[at]
    }

    /// Adds a case with an index that is outside of its tensor: running it must give a fault
    /// that says so and names the node of the op.
    pub fn add_outside(
        &mut self,
        name: impl Into<String>,
        build: impl Fn(&mut CaseGraph) -> Made + Send + Sync + 'static,
    ) {
        self.add(name, build).fault = Some(Code::IndexOutOfRange);
    }

    /// The cases.
    pub fn into_list(self) -> Vec<Case> {
        self.list
    }
}

/// The bytes of one random block: random codes, and scales of either sign that make
/// elements of about 1.
pub(super) fn random_block(format: TensorType, rng: &mut Rng) -> Vec<u8> {
    let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| rng.next_u64() as u8).collect();
    let mut scale = |at: usize, size: f64| {
        let value = f16::from_f64(rng.sign() * size * rng.between(0.5, 1.0));
        if let Some(place) = block.get_mut(at..at + 2) {
            place.copy_from_slice(&value.to_le_bytes());
        }
    };
    // Where ggml-common.h has the f16 scales of a block.
    match format {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 | TensorType::I32 => {}
        TensorType::Q4_0 | TensorType::Q5_0 => scale(0, 0.1),
        TensorType::Q8_0 | TensorType::IQ4NL => scale(0, 0.01),
        TensorType::Q4_1 | TensorType::Q5_1 => {
            scale(0, 0.1);
            scale(2, 1.0);
        }
        TensorType::Q2K => {
            scale(80, 0.05);
            scale(82, 0.05);
        }
        TensorType::Q3K => scale(108, 0.02),
        TensorType::Q4K | TensorType::Q5K => {
            scale(0, 0.003);
            scale(2, 0.01);
        }
        TensorType::Q6K => scale(208, 0.001),
        TensorType::IQ4XS => scale(0, 0.001),
        // An exponent: 2^-4 .. 2^-1 times at most 12.
        TensorType::MXFP4 => {
            if let Some(exponent) = block.first_mut() {
                *exponent = 124 + *exponent % 4;
            }
        }
    }
    block
}
