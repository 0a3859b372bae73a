//! Gradients of recurrences that several ops compute: how the work is cut, and what is copied.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use std::ops::Range;

use common::shape;
use gradus_graph::*;

/// Elements of the states that a tile of a scan takes through a sequence; a quarter with decays
/// for each.
const TILE: usize = 2048;

/// Tiles per sequence that an op of a scan has at least, if there are as many.
const TILES: usize = 16;

/// `[4, ..]` leaves, the sequences, and the gradient ops of all float operands of `op`.
fn differentiated(op: Op, operands: [&[usize]; 6]) -> (Graph, Vec<NodeId>) {
    let mut g = Graph::new();
    let leaf = |g: &mut Graph, name: String, dims, dtype| g.leaf(&name, dims, dtype).unwrap();
    let mut args: Vec<NodeId> = (0..)
        .zip(operands)
        .map(|(i, dims)| leaf(&mut g, format!("x{i}"), shape(dims), DType::F32))
        .collect();
    args.push(leaf(&mut g, "seqs".into(), shape(&[2, 3]), DType::I32));
    let y = g.push(op, &args, "y").unwrap();
    let dims = g.node(y).shape;
    let dy = leaf(&mut g, "dy".into(), dims, DType::F32);
    let g = vjp(&g, &[(y, dy)], &args[..6]).unwrap().graph;
    let back = g.ids().filter(|&id| is_back(&g, id)).collect();
    (g, back)
}

/// Heads, width, groups, states, decays.
fn scan([heads, width, groups, states, decays]: [usize; 5]) -> (Graph, Vec<NodeId>) {
    let of_groups = [4, groups, states];
    let state = [2, heads, width, states];
    let dims = [&[4, heads, width][..], &[4, heads], &[heads, decays], &of_groups, &of_groups];
    let [x, dt, a, b, c] = dims;
    differentiated(Op::SsmScan, [x, dt, a, b, c, &state])
}

fn delta(heads: usize, keys: usize, width: usize) -> (Graph, Vec<NodeId>) {
    let attrs = GatedDeltaAttrs { scale: 0.5.into(), key_heads: KeyHeads::Blocks };
    let (of_keys, of_values, of_heads) = ([4, heads, keys], [4, heads, width], [4, heads]);
    let state = [2, heads, keys, width];
    let dims: [&[usize]; 6] = [&of_keys, &of_keys, &of_values, &of_heads, &of_heads, &state];
    differentiated(Op::GatedDeltaRule(attrs), dims)
}

fn is_back(g: &Graph, id: NodeId) -> bool {
    matches!(g.node(id).op, Op::SsmScanBack { .. } | Op::GatedDeltaRuleBack(_))
}

/// What a view is of.
fn base(g: &Graph, mut id: NodeId) -> NodeId {
    while g.node(id).op.is_view() {
        id = g.node(id).args[0];
    }
    id
}

/// What of a dimension of a leaf an operand is, of which views have cut some.
fn taken(g: &Graph, mut id: NodeId, dim: usize) -> Range<usize> {
    let mut taken = 0..g.node(id).shape.dim(dim);
    while let Op::Slice { dim: of, start, .. } = g.node(id).op {
        if usize::from(of) == dim {
            taken = taken.start + start..taken.end + start;
        }
        id = g.node(id).args[0];
    }
    taken
}

/// A scan's shape, and how many gradient ops it has.
const SCANS: [([usize; 5], usize); 12] = [
    ([80, 64, 1, 128, 1], 16),
    ([128, 64, 8, 128, 1], 16),
    ([256, 64, 8, 64, 1], 4),
    ([5120, 1, 1, 16, 16], 1),
    ([300, 1, 1, 16, 16], 1),
    ([40, 3, 2, 1024, 1], 8),
    ([20, 3, 10, 1024, 1024], 6),
    ([20, 19, 1, 128, 1], 4),
    ([40, 3, 4, 512, 512], 12),
    ([6, 2, 3, 4096, 1], 2),
    ([40, 1, 1, 2048, 1], 3),
    ([64, 1, 8, 2048, 1], 4),
];

/// One that waits for those it is to lie beside is copied, since all else that its op computes
/// would wait with it; nothing else is.
#[test]
fn a_part_that_waits_for_others_is_copied_and_no_other() {
    let scans = SCANS.iter().map(|&(shape, _)| scan(shape));
    let deltas = [(2, 8, 40), (3, 5, 16), (2, 4, 17)].map(|(h, k, w)| delta(h, k, w));
    let mut copies = 0;
    for (g, back) in scans.chain(deltas) {
        for id in g.ids().filter(|&id| id > back[0]) {
            match g.node(id).op {
                Op::Copy => {
                    let of = g.node(id).args[0];
                    assert!(g.node(of).op.is_view(), "{:?} is copied", g.node(of).op);
                    let mut readers = g.ids().filter(|&r| g.node(r).args.contains(&id));
                    let joined = |r: NodeId| matches!(g.node(r).op, Op::Concat { .. });
                    assert!(readers.any(joined), "a copy lies beside nothing");
                    copies += 1;
                }
                Op::Concat { .. } => {
                    let waits = g.node(id).args.iter().any(|&part| is_back(&g, base(&g, part)));
                    assert!(!waits, "all of a gradient op waits for others");
                }
                _ => {}
            }
        }
    }
    assert!(copies > 20, "{copies}");
}

#[test]
fn an_op_of_the_delta_rule_takes_sixteen_columns() {
    for (width, expected) in [(40, &[16, 16, 8][..]), (16, &[16]), (17, &[16, 1]), (3, &[3])] {
        let (g, back) = delta(2, 8, width);
        for (operand, dim) in [(2, 2), (5, 3)] {
            let of = |&id: &NodeId| g.node(g.node(id).args[operand]).shape.dim(dim);
            let taken: Vec<usize> = back.iter().map(of).collect();
            assert_eq!(taken, expected, "of {width} columns");
        }
    }
}

/// Each head's columns are taken once, with the decays, states and cotangents of that head and
/// with the `b` and `c` of its group.
#[test]
fn ops_of_a_scan_share_all_that_there_is() {
    for (shape, _) in SCANS {
        let [heads, width, groups, ..] = shape;
        let (g, back) = scan(shape);
        let mut times = vec![0; heads * width];
        for &id in &back {
            let of = |i: usize, dim| taken(&g, g.node(id).args[i], dim);
            let (own, columns, of_groups) = (of(0, 1), of(0, 2), of(3, 1));
            for (operand, dim) in [(1, 1), (2, 0), (5, 1)] {
                assert_eq!(of(operand, dim), own, "{shape:?}: operand {operand}");
            }
            assert_eq!((of(5, 2), of(4, 1)), (columns.clone(), of_groups.clone()), "{shape:?}");
            for operand in [7, 8] {
                let dims = (of(operand, 1).len(), of(operand, 2).len());
                assert_eq!(dims, (own.len(), columns.len()), "{shape:?}: operand {operand}");
            }
            for head in own {
                assert!(of_groups.contains(&(head / (heads / groups))), "{shape:?}: head {head}");
                columns.clone().for_each(|column| times[head * width + column] += 1);
            }
        }
        assert!(times.iter().all(|&n| n == 1), "{shape:?}");
    }
}

/// Tiles are as large as they may be, ops have no more of them than keeps what each adds to the
/// gradients of `b` and `c` within that of `x`, and no fewer than keep threads busy.
#[test]
fn an_op_of_a_scan_takes_some_heads_and_columns() {
    for (shape, expected) in SCANS {
        let [all_heads, width, all_groups, states, decays] = shape;
        let (g, back) = scan(shape);
        assert_eq!(back.len(), expected, "{shape:?}");
        let tile = if decays > 1 { TILE / 4 } else { TILE };
        let mut largest = 0;
        for &id in &back {
            let Op::SsmScanBack { parts } = g.node(id).op else { continue };
            let of = |i: usize, d| g.node(g.node(id).args[i]).shape.dim(d);
            let (heads, columns, groups) = (of(0, 1), of(0, 2), of(3, 1));
            let each = (heads / groups).div_ceil(parts) * columns * states;
            assert!(each <= tile.max(states), "{shape:?}: a tile takes {each} elements");
            largest = largest.max(each);
            let many = all_heads * width / (2 * states * groups);
            assert!(parts <= many.max(TILES), "{shape:?}: {parts} parts in {groups} groups");
            let enough = TILES.min(all_heads * width * states / each);
            assert!(parts * groups * back.len() >= enough, "{shape:?}: {parts} parts");
        }
        let all = all_heads / all_groups * width * states;
        assert!(2 * largest > tile.min(all), "{shape:?}: a tile takes {largest} elements");
    }
}
