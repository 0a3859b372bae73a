//! What is computed in pieces, by tiles or by ops: each piece short, and all together what one
//! gives.

use graph::{GatedDeltaAttrs, KeyHeads, NodeId, Op, Shape, vjp};

use super::{QUICK, SEGMENTS, Sequence, Walk};
use crate::Cpu;
use crate::simd::LANES;
use crate::testing::{Case, Every, Random, assert_close, devices, to_floats};

/// Elements of states that a tile may take through a round of 256 tokens: about a millisecond.
const MOST: usize = 2048;

/// A recurrence: its operands, the last the sequences, and its flat result.
struct Made {
    c: Case,
    operands: Vec<NodeId>,
    y: NodeId,
}

/// Heads, width, groups, states, decays.
type ScanShape = [usize; 5];

fn scan(rows: usize, [heads, width, groups, states, decays]: ScanShape) -> Made {
    let (mut c, mut random) = (Case::new(), Random(3));
    let mut operands: Vec<NodeId> = [
        ("x", &[rows, heads, width][..]),
        ("dt", &[rows, heads]),
        ("a", &[heads, decays]),
        ("b", &[rows, groups, states]),
        ("c", &[rows, groups, states]),
        ("state", &[2, heads, width, states]),
    ]
    .map(|(name, dims)| {
        let mut x = random.floats(dims.iter().product());
        let low = |x: &mut f32, from: f32| *x = from + 0.4 * *x;
        match name {
            "dt" => x.iter_mut().for_each(|x| low(x, 0.5)),
            "a" => x.iter_mut().for_each(|x| low(x, -0.9)),
            _ => {}
        }
        c.floats(name, dims, &x)
    })
    .into();
    operands.push(c.ints("seqs", &[2, 3], &[0, 2, 0, 2, rows as i32 - 2, 0]));
    let y = c.graph.push(Op::SsmScan, &operands, "y").unwrap();
    Made { c, operands, y }
}

/// Key heads, value heads, widths of keys and of values.
type DeltaShape = [usize; 4];

fn delta(rows: usize, [key_heads, heads, keys, width]: DeltaShape) -> Made {
    let (mut c, mut random) = (Case::new(), Random(4));
    let mut operands: Vec<NodeId> = [
        ("q", &[rows, key_heads, keys][..]),
        ("k", &[rows, key_heads, keys]),
        ("v", &[rows, heads, width]),
        ("g", &[rows, heads]),
        ("beta", &[rows, heads]),
        ("state", &[2, heads, keys, width]),
    ]
    .map(|(name, dims)| {
        let mut x = random.floats(dims.iter().product());
        let low = |x: &mut f32, from: f32| *x = from + 0.4 * *x;
        match name {
            "g" => x.iter_mut().for_each(|x| low(x, -0.5)),
            "beta" => x.iter_mut().for_each(|x| low(x, 0.5)),
            _ => x.iter_mut().for_each(|x| *x /= (keys as f32).sqrt()),
        }
        c.floats(name, dims, &x)
    })
    .into();
    operands.push(c.ints("seqs", &[2, 3], &[0, 2, 0, 2, rows as i32 - 2, 0]));
    let attrs = GatedDeltaAttrs { scale: 0.5.into(), key_heads: KeyHeads::Blocks };
    let y = c.graph.push(Op::GatedDeltaRule(attrs), &operands, "y").unwrap();
    Made { c, operands, y }
}

impl Made {
    fn shape(&self, i: usize) -> Shape {
        self.c.graph.node(self.operands[i]).shape
    }

    /// Adds the gradients of all float operands; the ids of the ops that compute them.
    fn differentiate(&mut self, random: &mut Random) -> (NodeId, Vec<NodeId>, Vec<NodeId>) {
        let dims = self.c.graph.node(self.y).shape.dims().to_vec();
        let dy = self.c.random("dy", &dims, random);
        let back = vjp(&self.c.graph, &[(self.y, dy)], &self.operands[..6]).unwrap();
        self.c.graph = back.graph;
        let ops = self.c.graph.ids().filter(|&id| {
            matches!(self.c.graph.node(id).op, Op::SsmScanBack { .. } | Op::GatedDeltaRuleBack(_))
        });
        (dy, ops.collect(), back.grads)
    }
}

/// P7: at the shapes of real models a tile of a gradient is 16 columns of a state of 128, or as
/// much; and no op holds much more than what the gradients themselves take.
#[test]
fn p7_a_tile_takes_few_columns_through_a_sequence() {
    let rows = 4;
    let scans = [
        [80, 64, 1, 128, 1],
        [128, 64, 8, 128, 1],
        [256, 64, 8, 64, 1],
        [5120, 1, 1, 16, 16],
        [24, 64, 1, 256, 1],
    ];
    let made = scans.map(|s| scan(rows, s)).into_iter();
    for mut m in made.chain([[16, 32, 128, 128], [4, 12, 64, 256]].map(|d| delta(rows, d))) {
        let all: usize = (0..6).map(|i| m.shape(i).elements()).sum();
        let (_, ops, _) = m.differentiate(&mut Random(1));
        for id in ops {
            let node = m.c.graph.node(id);
            let of = |i: usize| m.c.graph.node(node.args[i]).shape;
            let state = of(5);
            let (heads, of_head) = (state.dim(1), state.elements() / state.dim(0) / state.dim(1));
            let (heads, tiles) = match node.op {
                Op::SsmScanBack { parts } => {
                    let of_group = heads / of(3).dim(1);
                    (of_group.div_ceil(parts), of(3).dim(1) * parts)
                }
                _ => (1, heads),
            };
            assert!(heads * of_head <= MOST, "{:?}: {heads} heads of {of_head}", node.op);
            assert!(tiles >= 8, "{:?}: {tiles} tiles per sequence", node.op);
            assert!(node.shape.elements() <= 2 * all, "{:?}: {} of {all}", node.op, node.shape);
        }
    }
}

/// Heads, groups and columns may all be cut, evenly or not.
#[test]
fn gradients_in_pieces_are_those_of_one_op() {
    let scans = [
        ([40, 3, 2, 1024, 1], 8),
        ([20, 3, 10, 1024, 1024], 6),
        ([20, 19, 1, 128, 1], 4),
        ([300, 1, 1, 16, 16], 1),
        ([40, 3, 4, 512, 512], 12),
        ([6, 2, 3, 4096, 1], 2),
    ];
    let deltas = [([2, 4, 8, 40], 3), ([1, 3, 5, 16], 1)];
    let made = scans.map(|(shape, n)| (scan(7, shape), n)).into_iter();
    for (mut m, expected) in made.chain(deltas.map(|(shape, n)| (delta(7, shape), n))) {
        let (dy, ops, grads) = m.differentiate(&mut Random(2));
        let outputs = m.shape(if matches!(m.c.graph.node(m.y).op, Op::SsmScan) { 0 } else { 2 });
        let state = m.shape(5);
        let g = &mut m.c.graph;
        assert_eq!(ops.len(), expected, "{:?}", g.node(ops[0]).op);
        let of_y = g.slice(dy, 0, 0, outputs.elements()).unwrap();
        let of_exit = g.slice(dy, 0, outputs.elements(), state.elements()).unwrap();
        let mut operands = m.operands.clone();
        operands.push(g.reshape(of_y, outputs.dims()).unwrap());
        operands.push(g.reshape(of_exit, state.dims()).unwrap());
        let shapes: Vec<Shape> = m.operands[..6].iter().map(|&x| g.node(x).shape).collect();
        // How often the one op has each gradient, by head or sequence, and what a copy of it is.
        let (op, times) = match g.node(m.y).op {
            Op::GatedDeltaRule(attrs) => {
                let shared = shapes[2].dim(1) / shapes[0].dim(1);
                (Op::GatedDeltaRuleBack(attrs), [shared, shared, 1, 1, 1, 1])
            }
            _ => (Op::SsmScanBack { parts: 1 }, [1, 1, state.dim(0), 1, 1, 1]),
        };
        let keys = shapes[0];
        let one = g.push(op, &operands, "one").unwrap();
        let mut outputs = grads;
        outputs.push(one);
        let cpu = Cpu::new(2, None).unwrap();
        let mut out: Vec<Vec<f32>> =
            m.c.run(&cpu, &outputs).unwrap().iter().map(|bytes| to_floats(bytes)).collect();
        let (one, mut start) = (out.pop().unwrap(), 0);
        for (i, ((got, shape), times)) in out.iter().zip(shapes).zip(times).enumerate() {
            let n = shape.elements();
            let mut sum = vec![0.0; n];
            for (j, &x) in one[start..start + n * times].iter().enumerate() {
                // The gradients of keys are by row, key head, value head.
                let inner = if i < 2 && times > 1 { keys.dim(2) } else { n };
                sum[j / (times * inner) * inner + j % inner] += f64::from(x);
            }
            start += n * times;
            assert_close(got, &sum, 1e-5, &format!("{expected} ops, operand {i}"));
        }
        assert_eq!(start, one.len());
    }
}

/// P7: a tile takes as many blocks of 16 columns, or channels, through the tokens of a round as are
/// quick, and one where a sequence is long; and gradients as many tokens as that.
#[test]
fn p7_a_tile_takes_one_block_through_a_few_tokens() {
    let cpu = Cpu::new(1, None).unwrap();
    let asked = |made: &Made, y: NodeId| {
        let asked = Every::new(usize::MAX);
        made.c.run_in_pieces(&cpu, &[y], &asked).unwrap();
        asked.0.into_inner()
    };
    let heads_blocks_and_rounds = [
        (delta(8, [1, 2, 16, 70]), 2, 1, 1),
        (delta(16, [1, 2, 128, 70]), 2, 3, 2),
        (delta(64, [1, 2, 128, 70]), 2, 5, 8),
        (scan(8, [6, 11, 1, 16, 1]), 1, 1, 1),
        (scan(16, [6, 11, 1, 128, 1]), 1, 3, 2),
        (scan(64, [6, 11, 1, 128, 1]), 1, 5, 8),
    ];
    for (made, heads, blocks, rounds) in heads_blocks_and_rounds {
        // Of two sequences; and one for rows of none. Between rounds it is asked once more.
        let tiles = 2 * heads * blocks + 1;
        let op = &made.c.graph.node(made.y).op;
        assert_eq!(asked(&made, made.y), rounds * tiles + rounds - 1, "{op:?}");
    }
    // At the shapes of real models a round is 512 tokens forward, and 256 backward.
    let walk = Walk::in_segments(2048, 128 * LANES, QUICK);
    assert_eq!((walk.rounds_forward(), walk.rounds_before(), walk.rounds()), (4, 4, 12));
    let most = SEGMENTS.map(|n| n * walk.length);
    assert_eq!(most, [512, 256]);
    for rows in [1, 512, 100_000] {
        let walk = Walk::in_segments(rows, 128 * LANES, QUICK);
        let sequence = Sequence { index: 0, first: 0, rows };
        let forward = (0..walk.rounds_forward()).map(|r| walk.tokens(r, sequence).len());
        assert!(forward.max() <= Some(most[0]));
        let back = (walk.rounds_before()..walk.rounds()).filter_map(|r| walk.segments(r, sequence));
        assert!(back.map(|(s, _)| s.len() * walk.length).max() <= Some(most[1]));
    }
}

/// Columns do not mix, nor do heads: each alone, in one tile, has the bits it has among others in
/// several.
#[test]
fn results_in_tiles_are_those_of_one_tile() {
    for cpu in devices() {
        for (mut m, dim, parts) in
            [(delta(64, [1, 3, 128, 70]), 2, 70), (scan(64, [6, 11, 1, 128, 1]), 1, 6)]
        {
            let op = m.c.graph.node(m.y).op.clone();
            let step = parts / 6;
            let dims = m.shape(0).dims().to_vec();
            let outputs = if dim == 2 { m.shape(2) } else { m.shape(0) };
            let states = m.shape(5);
            let of_state = if dim == 2 { 3 } else { 1 };
            let mut wanted = vec![m.y];
            for at in (0..parts).step_by(step) {
                let n = step.min(parts - at);
                // Values and columns of the state; or inputs, steps, decays and heads of it.
                let cut: &[(usize, usize)] =
                    if dim == 2 { &[(2, 2), (5, 3)] } else { &[(0, 1), (1, 1), (2, 0), (5, 1)] };
                let mut operands = m.operands.clone();
                for &(operand, dim) in cut {
                    let x = m.c.graph.slice(operands[operand], dim, at, n).unwrap();
                    operands[operand] = x;
                }
                wanted.push(m.c.graph.push(op.clone(), &operands, "part").unwrap());
            }
            let out: Vec<Vec<u32>> =
                m.c.run(&cpu, &wanted).unwrap().iter().map(|b| bits(b)).collect();
            let mut start = vec![0; out.len()];
            for (shape, dim) in [(outputs, dim), (states, of_state)] {
                let inner: usize = shape.dims()[dim + 1..].iter().product();
                for _ in 0..shape.dims()[..dim].iter().product::<usize>() {
                    for i in 1..out.len() {
                        let n = step.min(parts - (i - 1) * step) * inner;
                        let (whole, part) = (&out[0][start[0]..][..n], &out[i][start[i]..][..n]);
                        assert_eq!(whole, part, "{op:?} of {dims:?}, part {i}");
                        (start[0], start[i]) = (start[0] + n, start[i] + n);
                    }
                }
            }
            assert!(out.iter().zip(start).all(|(out, end)| out.len() == end));
        }
    }
}

fn bits(bytes: &[u8]) -> Vec<u32> {
    to_floats(bytes).iter().map(|x| x.to_bits()).collect()
}
