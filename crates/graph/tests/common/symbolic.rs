//! Symbolic runs: every element is a 64-bit symbol made of the op and all of its operands, so
//! that one wrong or stale element changes every symbol computed from it. Layout ops move
//! symbols and are written here without strides.

use std::collections::HashMap;

use gradus_graph::*;

use super::{hash, mix};

/// What stands at a byte of an arena that nothing has written.
const POISON: u64 = 0xdead_dead_dead_dead;

/// Symbols of a value: one per element, or one per byte for block formats and q8-rows.
type Value = Vec<u64>;

fn units(shape: &Shape, dtype: DType) -> usize {
    match dtype.element_bytes() {
        Some(_) => shape.elements(),
        None => shape.bytes(dtype).unwrap(),
    }
}

fn leaf(name: &str, shape: &Shape, dtype: DType) -> Value {
    let seed = hash(name);
    (0..units(shape, dtype)).map(|i| mix(seed ^ mix(i as u64))).collect()
}

fn compute(op: &Op, args: &[Value], units: usize) -> Value {
    let mut digest = hash(&format!("{op:?}"));
    for arg in args {
        digest = arg.iter().fold(mix(digest ^ arg.len() as u64), |h, &v| mix(h ^ v));
    }
    (0..units).map(|i| mix(digest ^ mix(i as u64))).collect()
}

/// Every index of a shape, in row-major order.
pub fn indices(shape: &Shape) -> impl Iterator<Item = Vec<usize>> + use<> {
    let dims = shape.dims().to_vec();
    (0..shape.elements()).map(move |mut flat| {
        let mut index = vec![0; dims.len()];
        for (i, &d) in dims.iter().enumerate().rev() {
            index[i] = flat % d;
            flat /= d;
        }
        index
    })
}

fn flat(index: &[usize], shape: &Shape) -> usize {
    index.iter().zip(shape.dims()).fold(0, |at, (&i, &d)| at * d + i)
}

/// A layout op by its definition, element by element.
fn relabel(op: &Op, x: &Value, from: &Shape, to: &Shape) -> Option<Value> {
    let source = |index: Vec<usize>| -> Option<usize> {
        let mut at = vec![0; from.rank()];
        match op {
            Op::Permute { perm } => {
                for (i, &p) in perm.iter().enumerate() {
                    at[usize::from(p)] = index[i];
                }
            }
            Op::Slice { dim, start, .. } => {
                at = index;
                at[usize::from(*dim)] += start;
            }
            Op::Broadcast { .. } => {
                let lead = to.rank() - from.rank();
                for (i, a) in at.iter_mut().enumerate() {
                    *a = if from.dim(i) == 1 { 0 } else { index[i + lead] };
                }
            }
            _ => return None,
        }
        Some(flat(&at, from))
    };
    match op {
        Op::Reshape { .. } | Op::Copy => Some(x.clone()),
        Op::Permute { .. } | Op::Slice { .. } | Op::Broadcast { .. } => {
            indices(to).map(|i| Some(x[source(i)?])).collect()
        }
        _ => None,
    }
}

/// The symbols of some nodes, straight from the graph.
pub fn evaluate(graph: &Graph, of: &[NodeId]) -> Vec<Value> {
    let mut live = vec![false; graph.len()];
    for id in of {
        live[id.index()] = true;
    }
    for id in graph.ids().rev() {
        if live[id.index()] {
            graph.node(id).args.iter().for_each(|a| live[a.index()] = true);
        }
    }
    let mut values: Vec<Value> = vec![Vec::new(); graph.len()];
    for id in graph.ids().filter(|id| live[id.index()]) {
        let node = graph.node(id);
        values[id.index()] = if matches!(node.op, Op::Leaf) {
            leaf(&node.name, &node.shape, node.dtype)
        } else {
            let args: Vec<Value> = node.args.iter().map(|a| values[a.index()].clone()).collect();
            let from = graph.node(node.args[0]).shape;
            relabel(&node.op, &args[0], &from, &node.shape)
                .unwrap_or_else(|| compute(&node.op, &args, units(&node.shape, node.dtype)))
        };
    }
    of.iter().map(|id| values[id.index()].clone()).collect()
}

/// The arena: one symbol per byte, so that partly overwritten elements show.
struct Bytes(Vec<u64>);

impl Bytes {
    fn read(&self, start: usize, width: usize, what: &str) -> u64 {
        let symbol = self.0[start];
        for k in 0..width {
            let byte = self.0[start + k];
            assert_eq!(byte, symbol.wrapping_add(k as u64), "{what}: torn element at {start}");
        }
        symbol
    }

    fn write(&mut self, start: usize, width: usize, symbol: u64) {
        for k in 0..width {
            self.0[start + k] = symbol.wrapping_add(k as u64);
        }
    }
}

fn read(arena: &Bytes, leaves: &[Value], operand: &Operand, what: &str) -> Value {
    let Arg { dtype, shape, layout, .. } = operand.arg;
    let width = dtype.element_bytes().unwrap_or(1);
    let at: Vec<usize> = match dtype.element_bytes() {
        None => {
            assert!(operand.arg.is_contiguous() && layout.offset == 0, "{what}: blocks in strides");
            (0..units(&shape, dtype)).collect()
        }
        Some(_) => indices(&shape)
            .map(|index| {
                layout.offset + index.iter().zip(&layout.strides).map(|(i, s)| i * s).sum::<usize>()
            })
            .collect(),
    };
    let stored = match operand.place {
        Place::Leaf(slot) => leaves[slot].len(),
        Place::Arena { len, .. } => len / width,
    };
    assert!(layout.offset <= stored, "{what}: the offset is out of bounds");
    assert!(at.iter().all(|&i| i < stored), "{what}: an element is out of bounds");
    at.iter()
        .map(|&i| match operand.place {
            Place::Leaf(slot) => leaves[slot][i],
            Place::Arena { start, .. } => arena.read(start + i * width, width, what),
        })
        .collect()
}

/// The symbols of a plan's outputs, by running its steps on an arena of symbols.
pub fn run(plan: &Plan) -> Vec<Value> {
    let leaves: Vec<Value> = plan.leaves.iter().map(|l| leaf(&l.name, &l.shape, l.dtype)).collect();
    let mut arena = Bytes((0..plan.arena_bytes).map(|i| mix(POISON ^ i as u64)).collect());
    for step in &plan.steps {
        let args: Vec<Value> =
            step.args.iter().map(|a| read(&arena, &leaves, a, &step.name)).collect();
        let out = step.out.arg;
        assert!(out.is_contiguous() && out.layout.offset == 0, "{}: strided result", step.name);
        let value = match step.op {
            Op::Copy => {
                assert_eq!(step.args[0].arg.shape, out.shape, "{}: shapes of a copy", step.name);
                args[0].clone()
            }
            ref op => compute(op, &args, units(&out.shape, out.dtype)),
        };
        let Place::Arena { start, len } = step.out.place else { panic!("result in a leaf") };
        let width = out.dtype.element_bytes().unwrap_or(1);
        assert_eq!(len, value.len() * width, "{}: bytes of the result", step.name);
        for (i, symbol) in value.into_iter().enumerate() {
            arena.write(start + i * width, width, symbol);
        }
    }
    let outputs = plan.outputs.iter().map(|o| {
        let arg = Arg::dense(o.dtype, o.shape);
        let place = Place::Arena { start: o.range.start, len: o.range.len() };
        read(&arena, &leaves, &Operand { place, arg }, "output")
    });
    outputs.collect()
}

/// How often each op occurs among the steps.
pub fn census(plan: &Plan) -> HashMap<&'static str, usize> {
    let mut count = HashMap::new();
    for step in &plan.steps {
        *count.entry(step.op.name()).or_default() += 1;
    }
    count
}
