//! How much work a tile of an adapter is, and what the kernels take without a copy.

use graph::{DType, LoraOperand, NodeId, Op, plan};

use crate::Cpu;
use crate::testing::{Case, Random, shape, tiles};

/// Rows, and the slots' matrices: inputs, outputs, ranks.
type Sizes<'a> = (usize, usize, usize, &'a [usize]);

fn forward((rows, k, n, ranks): Sizes<'_>) -> usize {
    let slots: Vec<[Vec<usize>; 3]> =
        ranks.iter().map(|&r| [vec![r, k], vec![n, r], vec![1]]).collect();
    let mut operands = vec![vec![rows, k], vec![rows, n], vec![rows]];
    operands.extend(slots.into_iter().flatten());
    let operands: Vec<&[usize]> = operands.iter().map(|dims| &dims[..]).collect();
    tiles(&Op::Lora { slots: ranks.len() }, &operands, &[2])
}

/// P7: a tile of pairs is about a millisecond of multiplications, and 8 pairs where so few are
/// more than that.
#[test]
fn p7_tiles_of_rows_are_as_long_as_their_matrices_allow() {
    // 64 rows are little work.
    assert_eq!(forward((200, 40, 72, &[8])), 4);
    // 2^24 / (64 * 7000) = 37 rows, of which 36 are whole groups: the highest rank counts.
    assert_eq!(forward((200, 4000, 3000, &[64, 3])), 6);
    assert_eq!(forward((200, 3000, 4000, &[3, 64])), 6);
    assert_eq!(forward((24, 4096, 4096, &[512])), 3);
    // Few rows: tiles of 512 outputs.
    assert_eq!(forward((16, 40, 1100, &[8])), 3);
    assert_eq!(forward((17, 40, 1100, &[8])), 1);
    let back = Op::LoraBack { slots: 1, wrt: LoraOperand::X, slot: 0 };
    let of_x = |rows: usize, k: usize, n: usize| {
        tiles(&back, &[&[rows, n], &[rows], &[64, k], &[n, 64], &[1]], &[1])
    };
    assert_eq!((of_x(200, 3000, 4000), of_x(16, 1100, 40)), (6, 3));
}

/// P7: sums over rows split the columns of the result, the finer the more rows there are.
#[test]
fn p7_tiles_of_sums_over_rows_are_as_wide_as_their_number_allows() {
    let of = |rows: usize, rank: usize, across: usize| {
        let op = |wrt| Op::LoraBack { slots: 1, wrt, slot: 0 };
        let a = tiles(&op(LoraOperand::A), &[&[rows, across], &[rows, rank], &[rows]], &[2]);
        let b = tiles(&op(LoraOperand::B), &[&[rows, rank], &[rows, across], &[rows]], &[2]);
        assert_eq!(a, b, "{rows} rows, rank {rank}, {across} columns");
        a
    };
    // 2^24 / (1000 * 64) = 262 columns: 256 are whole passes.
    assert_eq!(of(1000, 64, 4000), 16);
    assert_eq!(of(4, 4, 4000), 8);
    assert_eq!(of(4, 4, 100), 2);
    assert_eq!(of(4, 4, 300), 2);
    assert_eq!(of(10_000, 64, 4000), 63);
}

/// P7: where experts have two pairs or more, a tile is an expert's pairs and so many outputs that
/// what lies between is not most of the work; else it is a few pairs.
#[test]
fn p7_tiles_of_adapted_experts() {
    let (t, u, rank) = (3, 2, 4);
    let of = |experts: usize, k: usize, n: usize| {
        let (a, b) = ([experts, rank, k], [experts, n, rank]);
        let op = Op::LoraExperts { slots: 1 };
        let forward = tiles(&op, &[&[t, 1, k], &[t, u, n], &[t], &[t, u], &a, &b, &[1]], &[2, 3]);
        // The same with the two matrices' parts changed.
        let (a, b) = ([experts, rank, n], [experts, k, rank]);
        let op = Op::LoraExpertsBack { slots: 1, wrt: LoraOperand::X, slot: 0 };
        let back = tiles(&op, &[&[t, u, k], &[t], &[t, u], &a, &b, &[1]], &[1, 2]);
        assert_eq!(forward, back, "{experts} experts, {n} of {k}");
        forward
    };
    assert_eq!(of(3, 10, 1100), 3 * 3);
    assert_eq!(of(3, 600, 1100), 3 * 2);
    assert_eq!(of(4, 10, 1100), 3);
    let of = |wrt, across: &[usize]| {
        let op = Op::LoraExpertsBack { slots: 1, wrt, slot: 0 };
        tiles(&op, &[&[t, 1, 700], &[t, u, 1100], &[t], &[t, u], across, &[1]], &[2, 3])
    };
    // Columns as of every sum over rows.
    assert_eq!(of(LoraOperand::A, &[5, 1100, rank]), 5 * 2);
    assert_eq!(of(LoraOperand::B, &[5, rank, 700]), 5 * 3);
}

/// Vectors of pairs may lie in any order, and rows of `x` apart: neither is copied.
#[test]
fn vectors_are_read_where_they_lie() {
    let (cpu, mut random) = (Cpu::new(1, None).unwrap(), Random(21));
    let mut case = Case::new();
    let x = case.random("x", &[2, 5, 6], &mut random);
    let base = case.random("base", &[2, 5, 7], &mut random);
    let wide = case.random("wide", &[5, 9], &mut random);
    let rows = case.ints("rows", &[5], &[0; 5]);
    let ids = case.ints("ids", &[5, 2], &[0, 1, 1, 0, 2, 2, 0, 1, 2, 1]);
    let a3 = case.random("a3", &[3, 4, 6], &mut random);
    let b3 = case.random("b3", &[3, 7, 4], &mut random);
    let a = case.random("a", &[4, 6], &mut random);
    let b = case.random("b", &[7, 4], &mut random);
    let scale = case.floats("scale", &[1], &[0.5]);
    let g = &mut case.graph;
    let [x, base] = [x, base].map(|x| g.permute(x, &[1, 0, 2]).unwrap());
    let cut = g.slice(wide, 1, 2, 6).unwrap();
    let other = g.slice(wide, 1, 1, 7).unwrap();
    let back = |wrt| Op::LoraExpertsBack { slots: 1, wrt, slot: 0 };
    let ops: [(Op, &[NodeId]); 5] = [
        (Op::LoraExperts { slots: 1 }, &[x, base, rows, ids, a3, b3, scale]),
        (back(LoraOperand::X), &[base, rows, ids, a3, b3, scale]),
        (back(LoraOperand::A), &[x, base, rows, ids, b3, scale]),
        (back(LoraOperand::B), &[x, base, rows, ids, a3, scale]),
        (Op::Lora { slots: 1 }, &[cut, other, rows, a, b, scale]),
    ];
    for (op, args) in ops {
        let y = g.push(op.clone(), args, "y").unwrap();
        assert_eq!(plan(g, &[y], &cpu).unwrap().steps.len(), 1, "{op:?}");
    }
}

/// What has been packed is no operand of an adapter: neither its matrices nor its scale.
#[test]
fn packed_operands_are_refused() {
    let cpu = Cpu::new(1, None).unwrap();
    for packed in 0..3 {
        let mut case = Case::new();
        let mut leaf = |i: usize, dims: &[usize]| match i == packed {
            true => case.graph.weight(&format!("x{i}"), shape(dims), DType::F32),
            false => case.graph.leaf(&format!("x{i}"), shape(dims), DType::F32),
        };
        let (other, scale) = (leaf(0, &[3, 7, 4]).unwrap(), leaf(1, &[1]).unwrap());
        let x = leaf(2, &[5, 1, 6]).unwrap();
        let dy = leaf(3, &[5, 2, 7]).unwrap();
        let rows = case.ints("rows", &[5], &[0; 5]);
        let ids = case.ints("ids", &[5, 2], &[0; 10]);
        let op = Op::LoraExpertsBack { slots: 1, wrt: LoraOperand::A, slot: 0 };
        let y = case.graph.push(op, &[x, dy, rows, ids, other, scale], "y").unwrap();
        let refused = plan(&case.graph, &[y], &cpu).map(|_| ()).unwrap_err();
        assert!(refused.to_string().contains("packed"), "{refused}");
    }
}
