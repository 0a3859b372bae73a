//! Plans: bytes, places, copies, refusals and the time they take.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

mod common;

use std::time::Instant;

use common::check::{check, peak};
use common::toy::Toy;
use common::*;
use gguf::TensorType;
use gradus_graph::*;

/// A graph of f32 leaves and the ops pushed on them.
struct Build {
    g: Graph,
    n: usize,
}

impl Build {
    fn new() -> Build {
        Build { g: Graph::new(), n: 0 }
    }

    fn leaf(&mut self, dims: &[usize]) -> NodeId {
        self.n += 1;
        self.g.leaf(&format!("x{}", self.n), shape(dims), DType::F32).unwrap()
    }

    fn op(&mut self, op: Op, args: &[NodeId]) -> NodeId {
        self.n += 1;
        self.g.push(op, args, &format!("n{}", self.n)).unwrap()
    }

    fn tanh(&mut self, x: NodeId) -> NodeId {
        self.op(Op::Unary(Unary::Tanh), &[x])
    }
}

fn planned(graph: &Graph, outputs: &[NodeId], device: &dyn Device) -> Plan {
    let made = plan(graph, outputs, device).unwrap();
    check(graph, outputs, &made);
    made
}

/// Start and length of each step's result.
fn places(plan: &Plan) -> Vec<(usize, usize)> {
    let of = |s: &Step| match s.out.place {
        Place::Arena { start, len } => (start, len),
        Place::Leaf(_) => panic!("a result in a leaf"),
    };
    plan.steps.iter().map(of).collect()
}

// ---- bytes --------------------------------------------------------------------------------

#[test]
fn a_chain_takes_two_places_in_turn() {
    let mut b = Build::new();
    let x = b.leaf(&[2, 3]);
    let mut y = x;
    for _ in 0..5 {
        y = b.op(Op::Affine { scale: 2.0.into(), bias: 1.0.into() }, &[y]);
    }
    let plan = planned(&b.g, &[y], &any_layout());
    assert_eq!(places(&plan), [(0, 24), (64, 24), (0, 24), (64, 24), (0, 24)]);
    assert_eq!(plan.arena_bytes, 64 + 24);
    assert_eq!((plan.copies, plan.leaves.len()), (0, 1));
    assert_eq!(plan.outputs[0].range, 0..24);
}

#[test]
fn values_alive_together_have_places_of_their_own() {
    let mut b = Build::new();
    let x = b.leaf(&[2, 3]);
    let y = b.tanh(x);
    let z = b.op(Op::Unary(Unary::Exp), &[y]);
    let sum = b.op(Op::Binary(Binary::Add), &[y, z]);
    let plan = planned(&b.g, &[sum], &any_layout());
    assert_eq!(places(&plan), [(0, 24), (64, 24), (128, 24)]);
    assert_eq!(plan.arena_bytes, 128 + 24);
}

#[test]
fn the_largest_value_lies_lowest_and_small_ones_fill_the_gaps() {
    let mut b = Build::new();
    let x = b.leaf(&[4]);
    let small = b.tanh(x);
    let big = b.op(Op::Broadcast { shape: shape(&[64, 4]) }, &[small]);
    let big = b.tanh(big);
    let sum = b.op(Op::Sum { dims: 1 }, &[big]);
    let last = b.op(Op::Binary(Binary::Mul), &[sum, small]);
    let plan = planned(&b.g, &[last], &any_layout());
    // small [4] lives throughout; big [64, 4] until it is summed, then `last` takes its place.
    assert_eq!(places(&plan), [(1024, 16), (0, 1024), (1088, 16), (0, 16)]);
    assert_eq!(plan.arena_bytes, 1088 + 16);
}

#[test]
fn every_dtype_takes_its_own_bytes() {
    let mut b = Build::new();
    let x = b.leaf(&[3, 64]);
    let made: Vec<(Op, usize)> = vec![
        (Op::QuantizeRows, 3 * (64 + 2 * 8)),
        (Op::Cast { dtype: DType::F16 }, 3 * 64 * 2),
        (Op::Cast { dtype: DType::BF16 }, 3 * 64 * 2),
        (Op::Cast { dtype: DType::Block(TensorType::Q8_0) }, 3 * 2 * 34),
        (Op::Unary(Unary::Exp), 3 * 64 * 4),
    ];
    for (op, bytes) in made {
        let y = b.op(op, &[x]);
        let plan = planned(&b.g, &[y], &any_layout());
        assert_eq!((plan.arena_bytes, plan.outputs[0].range.clone()), (bytes, 0..bytes));
    }
}

#[test]
fn scratch_is_the_most_a_step_needs() {
    let mut b = Build::new();
    let x = b.leaf(&[2]);
    let y = b.tanh(x);
    let z = b.op(Op::Binary(Binary::Add), &[y, x]);
    let w = b.tanh(z);
    let device = TestDevice(|c: &Call<'_>| Ok(Needs { scratch: 100 * c.args.len(), kept: 0 }));
    assert_eq!(planned(&b.g, &[w], &device).scratch_bytes, 200);
    assert_eq!(planned(&b.g, &[y], &device).scratch_bytes, 100);
}

/// What a step keeps is nobody else's while it runs, and anybody's after.
#[test]
fn what_a_step_keeps_lies_beside_its_operands_and_its_result() {
    let mut b = Build::new();
    let x = b.leaf(&[16]);
    let y = b.tanh(x);
    let z = b.op(Op::Binary(Binary::Add), &[y, x]);
    let w = b.tanh(z);
    let device = TestDevice(|c: &Call<'_>| {
        let kept = if matches!(c.op, Op::Binary(_)) { 100 } else { 0 };
        Ok(Needs { scratch: 0, kept })
    });
    let plan = planned(&b.g, &[w], &device);
    assert_eq!(plan.arena_bytes, 100_usize.next_multiple_of(64) + 2 * 64);
    let [first, sum, last] = &plan.steps[..] else { panic!("{} steps", plan.steps.len()) };
    assert_eq!((first.kept.len(), sum.kept.len(), last.kept.len()), (0, 100, 0));
    for place in [sum.args[0].place, sum.out.place] {
        let Place::Arena { start, len } = place else { panic!("{place:?}") };
        assert!(start >= sum.kept.end || start + len <= sum.kept.start, "{:?}", plan.steps);
    }
    // The place is free again: nothing is larger for it.
    let Place::Arena { start, .. } = last.out.place else { panic!("no value") };
    assert_eq!(start, sum.kept.start);
}

#[test]
fn values_without_elements_are_planned() {
    let mut b = Build::new();
    let x = b.leaf(&[4, 3]);
    let none = b.op(Op::Slice { dim: 0, start: 4, len: 0 }, &[x]);
    let none = b.op(Op::Slice { dim: 1, start: 2, len: 1 }, &[none]);
    let y = b.tanh(none);
    let all = b.op(Op::Concat { dim: 0 }, &[y, y]);
    let zeros = b.op(Op::Pad { dim: 0, before: 1, after: 1 }, &[all]);
    for device in [&any_layout() as &dyn Device, &dense_only()] {
        let plan = planned(&b.g, &[none, all], device);
        assert_eq!((plan.arena_bytes, plan.steps.len()), (0, 3));
        assert_eq!(plan.steps[0].args[0].arg.layout.offset, 0, "nothing starts beyond its end");
        assert_eq!(planned(&b.g, &[zeros], device).arena_bytes, 8);
    }
}

// ---- outputs and dead nodes ---------------------------------------------------------------

#[test]
fn an_output_outlives_what_comes_after_it() {
    let mut b = Build::new();
    let x = b.leaf(&[8]);
    let early = b.tanh(x);
    let mut y = early;
    for _ in 0..6 {
        y = b.tanh(y);
    }
    let plan = planned(&b.g, &[y, early, y], &any_layout());
    assert_eq!(plan.outputs.len(), 3);
    assert_eq!(plan.outputs[0], plan.outputs[2]);
    let early = &plan.outputs[1].range;
    assert!(places(&plan)[1..].iter().all(|&(s, n)| s + n <= early.start || s >= early.end));
}

#[test]
fn a_leaf_or_a_view_as_output_is_a_value_of_its_own() {
    let mut b = Build::new();
    let x = b.leaf(&[4, 3]);
    let turned = b.op(Op::Permute { perm: vec![1, 0] }, &[x]);
    let rows = b.op(Op::Reshape { shape: shape(&[2, 6]) }, &[turned]);
    let y = b.tanh(x);
    let plan = planned(&b.g, &[x, turned, rows, y], &any_layout());
    assert_eq!((plan.copies, plan.steps.len()), (3, 4));
    // Whoever reads the leaf reads what is bound, not its copy.
    assert_eq!(plan.steps[3].args[0].place, Place::Leaf(0));
    let outputs = [x, rows];
    let plan = planned(&b.g, &outputs, &dense_only());
    assert_eq!((plan.copies, plan.steps.len()), (2, 2));
    let only = planned(&b.g, &[x], &any_layout());
    assert_eq!((only.copies, only.steps.len(), only.arena_bytes), (1, 1, 48));
}

#[test]
fn a_weight_is_bound_as_the_device_loaded_it() {
    let mut b = Build::new();
    let x = b.leaf(&[2, 32]);
    let float = b.g.weight("float", shape(&[4, 32]), DType::F16).unwrap();
    let block = b.g.weight("block", shape(&[4, 32]), DType::Block(TensorType::Q4_0)).unwrap();
    let page = b.g.leaf("page", shape(&[4, 32]), DType::Block(TensorType::Q8_0)).unwrap();
    let y = b.g.project(x, float).unwrap();
    let z = b.g.project(x, block).unwrap();
    let ids = b.g.leaf("ids", shape(&[2]), DType::I32).unwrap();
    let g = b.g.gather(page, ids, "gather").unwrap();
    let plan = planned(&b.g, &[y, z, g, float], &any_layout());
    let resident = |name: &str| {
        let step = plan.steps.iter().find(|s| &*s.name == name).unwrap();
        step.args.iter().map(|a| a.arg.resident).collect::<Vec<_>>()
    };
    assert_eq!(plan.steps.iter().filter(|s| s.op.name() == "MatMul").count(), 2);
    for step in plan.steps.iter().filter(|s| s.op.name() == "MatMul") {
        let resident: Vec<bool> = step.args.iter().map(|a| a.arg.resident).collect();
        assert_eq!(resident, [false, true], "{}", step.name);
    }
    assert_eq!(resident("gather"), [false, false]);
    let copy = plan.steps.iter().find(|s| s.op == Op::Copy).unwrap();
    assert!(copy.args[0].arg.resident && !copy.out.arg.resident);
}

/// How a device packs a weight is its own affair: a view of one is copied or refused, never read
/// by strides that mean nothing there.
#[test]
fn a_view_of_a_packed_weight_is_not_read_in_place() {
    let cut = Op::Slice { dim: 0, start: 1, len: 2 };
    let turned = Op::Permute { perm: vec![1, 0] };
    let wide = Op::Reshape { shape: shape(&[2, 8]) };
    let tall = Op::Broadcast { shape: shape(&[3, 4, 4]) };
    for op in [cut, turned, wide, tall] {
        let mut b = Build::new();
        let w = b.g.weight("w", shape(&[4, 4]), DType::F32).unwrap();
        let view = b.op(op, &[w]);
        let y = b.tanh(view);
        let plan = planned(&b.g, &[y], &any_layout());
        assert_eq!((plan.copies, plan.steps.len()), (1, 2));
        assert!(plan.steps[0].args[0].arg.resident && !plan.steps[1].args[0].arg.resident);
        let device = TestDevice(|call: &Call<'_>| match call.args {
            [x] if x.resident => Err(Unsupported::Kernel("a copy of a packed weight".into())),
            _ => Ok(Needs::default()),
        });
        let refusal = refused(&b.g, &[y], &device);
        assert_eq!((refusal.op.as_str(), refusal.node.as_str()), ("Copy", "n1"));
    }
}

#[test]
fn what_no_output_depends_on_is_left_out() {
    let mut b = Build::new();
    let (x, unused) = (b.leaf(&[4, 3]), b.leaf(&[5]));
    let turned = b.op(Op::Permute { perm: vec![1, 0] }, &[x]);
    // A dead reshape that no layout can express must not copy the view it reads.
    b.op(Op::Reshape { shape: shape(&[12]) }, &[turned]);
    let dead = b.tanh(unused);
    b.tanh(dead);
    let y = b.tanh(turned);
    let plan = planned(&b.g, &[y], &any_layout());
    assert_eq!((plan.steps.len(), plan.copies, plan.leaves.len()), (1, 0, 1));
    // Nor is the device asked about it.
    let fussy = TestDevice(|c: &Call<'_>| match c.out.shape.dims() {
        [5] => Err(Unsupported::Kernel("five".into())),
        _ => Ok(Needs::default()),
    });
    planned(&b.g, &[y], &fussy);
}

#[test]
fn an_output_of_another_graph_is_invalid() {
    let mut b = Build::new();
    let x = b.leaf(&[4]);
    let y = b.tanh(x);
    let e = plan(&Graph::new(), &[y], &any_layout()).unwrap_err();
    assert_eq!(
        (e.code(), e.to_string().as_str()),
        (Code::InvalidInput, "an output is not of this graph")
    );
    assert!(plan(&b.g, &[], &any_layout()).unwrap().steps.is_empty());
}

// ---- views --------------------------------------------------------------------------------

#[test]
fn views_are_read_in_place_by_their_strides() {
    let mut b = Build::new();
    let x = b.leaf(&[4, 6]);
    let x = b.tanh(x);
    let cases: Vec<(Op, usize, Vec<usize>)> = vec![
        (Op::Permute { perm: vec![1, 0] }, 0, vec![1, 6]),
        (Op::Slice { dim: 0, start: 2, len: 2 }, 12, vec![6, 1]),
        (Op::Slice { dim: 1, start: 2, len: 3 }, 2, vec![6, 1]),
        (Op::Reshape { shape: shape(&[2, 2, 3, 2]) }, 0, vec![12, 6, 2, 1]),
        (Op::Broadcast { shape: shape(&[5, 4, 6]) }, 0, vec![0, 6, 1]),
    ];
    for (op, offset, strides) in cases {
        let v = b.op(op, &[x]);
        let y = b.op(Op::Unary(Unary::Exp), &[v]);
        let plan = planned(&b.g, &[y], &any_layout());
        assert_eq!((plan.steps.len(), plan.copies), (2, 0));
        let arg = plan.steps[1].args[0].arg;
        assert_eq!(arg.shape, b.g.node(v).shape);
        assert_eq!(
            (arg.layout.offset, &arg.layout.strides[..strides.len()]),
            (offset, &strides[..])
        );
    }
}

#[test]
fn a_view_a_device_does_not_read_is_copied_once_for_all_its_readers() {
    let mut b = Build::new();
    let x = b.leaf(&[4, 6]);
    let v = b.op(Op::Permute { perm: vec![1, 0] }, &[x]);
    let half = b.op(Op::Slice { dim: 0, start: 1, len: 2 }, &[v]);
    let outs = [
        b.tanh(v),
        b.op(Op::Unary(Unary::Exp), &[v]),
        b.op(Op::Binary(Binary::Mul), &[v, v]),
        b.tanh(half),
    ];
    let plan = planned(&b.g, &outs, &dense_only());
    // The slice of the copy is dense again.
    assert_eq!((plan.copies, plan.steps.len()), (1, 5));
    assert_eq!((&plan.steps[0].op, plan.steps[0].node), (&Op::Copy, v));
    assert_eq!(plan.steps[0].args[0].arg.layout.strides[..2], [1, 6]);
    assert_eq!(planned(&b.g, &outs, &any_layout()).copies, 0);
    // A device that declines one reader's operand copies for all as well.
    let exp = TestDevice(|c: &Call<'_>| match (c.op, c.args[0].is_contiguous()) {
        (Op::Unary(Unary::Exp), false) => Err(Unsupported::Layout(0)),
        _ => Ok(Needs::default()),
    });
    let plan = planned(&b.g, &outs, &exp);
    assert_eq!(plan.copies, 1);
    assert!(plan.steps[1..].iter().all(|s| s.args.iter().all(Operand::is_in_arena)));
}

trait InArena {
    fn is_in_arena(&self) -> bool;
}

impl InArena for Operand {
    fn is_in_arena(&self) -> bool {
        matches!(self.place, Place::Arena { .. })
    }
}

#[test]
fn a_reshape_no_stride_expresses_is_one_copy() {
    let mut b = Build::new();
    let x = b.leaf(&[4, 6]);
    let v = b.op(Op::Permute { perm: vec![1, 0] }, &[x]);
    let flat = b.op(Op::Reshape { shape: shape(&[3, 8]) }, &[v]);
    let y = b.tanh(flat);
    for outputs in [vec![y], vec![flat], vec![flat, y]] {
        for device in [&any_layout() as &dyn Device, &dense_only()] {
            let plan = planned(&b.g, &outputs, device);
            assert_eq!(plan.copies, 1);
            // The copy reads the permuted rows and fills the reshaped value.
            let copy = &plan.steps[0];
            assert_eq!((&copy.op, copy.args[0].arg.shape), (&Op::Copy, shape(&[6, 4])));
            assert_eq!(copy.node, flat);
        }
    }
}

#[test]
fn fused_projections_are_cut_in_place_or_by_one_copy_each() {
    let mut b = Build::new();
    let (rows, heads, d) = (5, 2, 4);
    let qkv = b.leaf(&[rows, 3 * heads * d]);
    let qkv = b.tanh(qkv);
    let parts: Vec<NodeId> = (0..3)
        .map(|i| {
            let part = b.op(Op::Slice { dim: 1, start: i * heads * d, len: heads * d }, &[qkv]);
            b.op(Op::Reshape { shape: shape(&[rows, heads, d]) }, &[part])
        })
        .collect();
    let seqs = b.g.leaf("seqs", shape(&[1, 3]), DType::I32).unwrap();
    let attrs = AttentionAttrs::new(0.5);
    let y = b.op(Op::Attention(attrs), &[parts[0], parts[1], parts[2], seqs]);
    let dy = b.leaf(&[rows, heads, d]);
    let back = vjp(&b.g, &[(y, dy)], &[qkv]).unwrap();
    let outputs = [y, back.grads[0]];
    assert_eq!(planned(&back.graph, &outputs, &any_layout()).copies, 0);
    assert_eq!(planned(&back.graph, &outputs, &dense_only()).copies, 3);
}

/// Random chains of views: each element is where a plain walk over the shapes puts it, and
/// what a layout says of itself holds element by element.
#[test]
fn chains_of_views_agree_with_a_plain_gather() {
    let (mut strided, mut rows_of) = (0, 0);
    for seed in 0..2000 {
        let mut rng = Rng(seed << 8);
        let mut b = Build::new();
        let rank = rng.below(5);
        let dims: Vec<usize> = (0..rank).map(|_| rng.pick(&[0, 1, 1, 2, 3, 4, 6])).collect();
        let x = b.leaf(&dims);
        let mut v = if rng.chance(50) { b.tanh(x) } else { x };
        for _ in 0..1 + rng.below(6) {
            let dims = b.g.node(v).shape.dims().to_vec();
            let op = match rng.below(4) {
                0 => Op::Permute { perm: rng.permutation(dims.len()) },
                1 if !dims.is_empty() => {
                    let dim = rng.below(dims.len());
                    let start = rng.below(dims[dim] + 1);
                    let len = rng.below(dims[dim] - start + 1);
                    Op::Slice { dim: dim as u8, start, len }
                }
                2 => {
                    let mut wide = dims.clone();
                    wide.iter_mut().for_each(|d| *d = if *d == 1 { 1 + rng.below(3) } else { *d });
                    if wide.len() < MAX_RANK && rng.chance(40) {
                        wide.insert(0, 2);
                    }
                    Op::Broadcast { shape: shape(&wide) }
                }
                _ => {
                    let mut to = dims.clone();
                    if to.len() > 1 && rng.chance(60) {
                        let i = rng.below(to.len() - 1);
                        to[i] *= to.remove(i + 1);
                    } else if to.len() < MAX_RANK {
                        let i = rng.below(to.len() + 1);
                        match to.get(i) {
                            Some(&d) if d > 0 && d.is_multiple_of(2) => {
                                to[i] = d / 2;
                                to.insert(i + rng.below(2), 2);
                            }
                            _ => to.insert(i, 1),
                        }
                    }
                    Op::Reshape { shape: shape(&to) }
                }
            };
            v = b.op(op, &[v]);
        }
        let y = b.tanh(v);
        for device in [&any_layout() as &dyn Device, &dense_only()] {
            let plan = planned(&b.g, &[y, v], device);
            for arg in plan.steps.iter().flat_map(|s| &s.args) {
                let Arg { shape, layout, .. } = arg.arg;
                let at = |index: &[usize]| -> usize {
                    layout.offset
                        + index.iter().zip(&layout.strides).map(|(i, s)| i * s).sum::<usize>()
                };
                let at: Vec<usize> = symbolic::indices(&shape).map(|i| at(&i)).collect();
                let dense = at.iter().enumerate().all(|(i, &a)| a == layout.offset + i);
                if shape.elements() > 0 {
                    assert_eq!(layout.is_contiguous(&shape), dense, "{shape} {layout:?}");
                }
                strided += usize::from(!dense);
                let cols = shape.cols();
                let holds = |stride: usize| {
                    at.iter()
                        .enumerate()
                        .all(|(i, &a)| a == layout.offset + i / cols * stride + i % cols)
                };
                match layout.row_stride(&shape) {
                    Some(stride) => assert!(holds(stride), "{shape} {layout:?} {stride}"),
                    None if shape.elements() == 0 => {}
                    None => {
                        // No other stride would do: the second row says which it would be.
                        rows_of += 1;
                        let stride = at.get(cols).map_or(cols, |a| a.wrapping_sub(layout.offset));
                        assert!(!holds(stride), "{shape} {layout:?} has rows {stride} apart");
                    }
                }
            }
        }
    }
    println!("{strided} strided operands, {rows_of} without a row stride");
    assert!(strided > 500 && rows_of > 200);
}

// ---- refusals -----------------------------------------------------------------------------

fn refused(graph: &Graph, outputs: &[NodeId], device: &dyn Device) -> Refusal {
    match plan(graph, outputs, device) {
        Err(Error::Refusal(r)) => *r,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_missing_kernel_is_named_with_op_node_and_device() {
    let mut b = Build::new();
    let x = b.leaf(&[2, 3]);
    let y = b.tanh(x);
    let z = b.g.push(Op::Unary(Unary::Log), &[y], "blk.0.log").unwrap();
    let w = b.g.push(Op::Unary(Unary::Log), &[z], "blk.1.log").unwrap();
    let device = TestDevice(|c: &Call<'_>| match c.op {
        Op::Unary(Unary::Log) => Err(Unsupported::Kernel("Log of 6 elements".into())),
        _ => Ok(Needs::default()),
    });
    let r = refused(&b.g, &[w], &device);
    assert_eq!((r.code, r.op.as_str(), r.node.as_str()), (Code::NoKernel, "Log", "blk.0.log"));
    assert_eq!(
        r.to_string(),
        "Log at node `blk.0.log`, on paper (test): the device has no kernel for Log of 6 elements"
    );
    assert_eq!(Error::from(r).code().as_str(), "no_kernel");
    planned(&b.g, &[y], &device);
}

#[test]
fn the_first_node_without_a_kernel_is_named_copies_included() {
    let mut b = Build::new();
    let x = b.leaf(&[2, 3]);
    let v = b.g.push(Op::Permute { perm: vec![1, 0] }, &[x], "turned").unwrap();
    let y = b.tanh(v);
    let z = b.g.push(Op::Unary(Unary::Log), &[y], "log").unwrap();
    let device = TestDevice(|c: &Call<'_>| match c.op {
        Op::Unary(Unary::Log) => Err(Unsupported::Kernel("Log".into())),
        Op::Copy => Err(Unsupported::Kernel("copies".into())),
        _ if !c.args[0].is_contiguous() => Err(Unsupported::Layout(0)),
        _ => Ok(Needs::default()),
    });
    let r = refused(&b.g, &[z], &device);
    assert_eq!((r.op.as_str(), r.node.as_str()), ("Copy", "turned"));
    assert_eq!(r.reason, "the device has no kernel for copies");
}

#[test]
fn a_layout_no_copy_mends_is_refused_and_ends() {
    let mut b = Build::new();
    let x = b.leaf(&[2, 3]);
    let v = b.g.push(Op::Permute { perm: vec![1, 0] }, &[x], "turned").unwrap();
    let v = b.g.push(Op::Reshape { shape: shape(&[6]) }, &[v], "flat").unwrap();
    let y = b.g.push(Op::Unary(Unary::Tanh), &[v], "act").unwrap();
    let never = TestDevice(|_: &Call<'_>| Err(Unsupported::Layout(0)));
    let not_even_dense = TestDevice(|c: &Call<'_>| match c.op {
        Op::Copy => Ok(Needs::default()),
        _ => Err(Unsupported::Layout(0)),
    });
    let nonsense = TestDevice(|c: &Call<'_>| match c.op {
        Op::Copy => Ok(Needs::default()),
        _ => Err(Unsupported::Layout(usize::MAX)),
    });
    let r = refused(&b.g, &[y], &not_even_dense);
    assert_eq!(
        r.to_string(),
        "Tanh at node `act`, operand `flat` (f32 [6]), on paper (test): the device has no kernel \
         for a layout that no copy can mend"
    );
    let r = refused(&b.g, &[y], &never);
    assert_eq!((r.code, r.op.as_str(), r.node.as_str()), (Code::NoKernel, "Copy", "flat"));
    let r = refused(&b.g, &[y], &nonsense);
    assert_eq!((r.node.as_str(), r.operand), ("act", None));
    for seed in 0..50 {
        let random = random::graph(seed, 20);
        for device in [&never as &dyn Device, &not_even_dense, &nonsense] {
            if let Some(&y) = random.values.last() {
                match plan(&random.graph, &[y], device) {
                    Err(Error::Refusal(r)) => assert_eq!(r.code, Code::NoKernel),
                    other => assert!(other.unwrap().steps.iter().all(|s| s.op == Op::Copy)),
                }
            }
        }
    }
}

// ---- random graphs ------------------------------------------------------------------------

#[test]
fn random_graphs_compute_what_they_say() {
    let (mut differentiated, mut worst, mut total) = (0, 0.0f64, 0.0);
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..500 {
        let (graph, outputs) = random::with_gradients(seed, 4 + (seed as usize * 7) % 40);
        differentiated += usize::from(outputs.len() > 3);
        for device in [&any_layout() as &dyn Device, &dense_only(), &picky(seed)] {
            let plan = planned(&graph, &outputs, device);
            assert_eq!(plan, gradus_graph::plan(&graph, &outputs, device).unwrap());
            let ratio = plan.arena_bytes.next_multiple_of(64).max(64) as f64
                / peak(&plan, 64).max(64) as f64;
            worst = worst.max(ratio);
            total += ratio;
            seen.extend(plan.steps.iter().map(|s| s.op.name()));
        }
    }
    println!(
        "{differentiated} differentiated; arena {:.3} of the peak, at most {worst:.3}",
        total / 1500.0
    );
    assert!(differentiated > 300, "only {differentiated} graphs had gradients");
    assert_eq!(seen.len(), 36, "an op is missing in the random graphs: {seen:?}");
    assert!(total / 1500.0 < 1.02 && worst < 1.4);
}

// ---- time ---------------------------------------------------------------------------------

#[test]
fn six_thousand_nodes_plan_in_well_under_a_second() {
    let toy = Toy { layers: 62, rows: 64, width: 64, heads: 4, vocab: 512 };
    let start = Instant::now();
    let (graph, outputs) = toy.train();
    let made = start.elapsed();
    let (again, outs) = recompute(&graph, &outputs, Recompute::PerLayer).unwrap();
    assert!(graph.len() > 6000, "{}", graph.len());
    for (graph, outputs) in [(&graph, &outputs), (&again, &outs)] {
        let start = Instant::now();
        let plan = plan(graph, outputs, &dense_only()).unwrap();
        let took = start.elapsed();
        let ratio = plan.arena_bytes as f64 / peak(&plan, 64) as f64;
        println!(
            "{} nodes, {} steps: built in {made:.0?}, planned in {took:.0?}, arena {ratio:.3} of peak",
            graph.len(),
            plan.steps.len(),
        );
        let limit = if cfg!(debug_assertions) { 4.0 } else { 0.8 };
        assert!(took.as_secs_f64() < limit, "{took:?}");
    }
}
