//! The interpreter as a device.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use graph::*;
use reference::check::conformance;
use reference::{Leaves, Mode, Reference, Value, eval};

#[test]
fn conforms() {
    if let Err(report) = conformance(&Reference, 1, None) {
        panic!("{report}");
    }
}

/// Reads only dense operands, as simple kernels do.
struct Dense;

impl Device for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn family(&self) -> &'static str {
        "f64"
    }

    fn supports(&self, call: &Call<'_>) -> std::result::Result<Needs, Unsupported> {
        let strided = call.args.iter().position(|a| !a.is_contiguous() || a.layout.offset != 0);
        match strided {
            Some(i) if !matches!(call.op, Op::Copy) => Err(Unsupported::Layout(i)),
            _ => Reference.supports(call),
        }
    }

    fn load(
        &self,
        tensor: &HostTensor<'_>,
    ) -> std::result::Result<std::sync::Arc<dyn Resident>, Fault> {
        Reference.load(tensor)
    }

    fn arena(&self, bytes: usize) -> std::result::Result<Box<dyn Arena>, Fault> {
        Reference.arena(bytes)
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> std::result::Result<Progress, Fault> {
        for step in plan.steps.iter().filter(|step| !matches!(step.op, Op::Copy)) {
            for operand in &step.args {
                assert!(operand.arg.is_contiguous() && operand.arg.layout.offset == 0);
            }
        }
        Reference.run(plan, leaves, arena, from, stop)
    }
}

#[test]
fn a_device_that_reads_only_dense_operands_conforms() {
    if let Err(report) = conformance(&Dense, 2, None) {
        panic!("{report}");
    }
}

fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap()
}

fn bytes(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// `exp(x + x) * w`, with `w` resident.
fn program() -> (Graph, [NodeId; 2], NodeId) {
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[4]), DType::F32).unwrap();
    let w = g.weight("w", shape(&[4]), DType::F32).unwrap();
    let y = g.add(x, x).unwrap();
    let y = g.unary(Unary::Exp, y).unwrap();
    let y = g.mul(y, w).unwrap();
    (g, [x, w], y)
}

const X: [f32; 4] = [0.5, -1.0, 2.0, 0.0];
const W: [f32; 4] = [1.0, 2.0, 3.0, 4.0];

#[test]
fn runs_a_plan() {
    let (g, [x, w], y) = program();
    let plan = plan(&g, &[y], &Reference).unwrap();
    let weight = HostTensor { dtype: DType::F32, shape: shape(&[4]), bytes: &bytes(&W) };
    let resident = Reference.load(&weight).unwrap();
    assert_eq!(
        (resident.dtype(), resident.shape(), resident.bytes()),
        (DType::F32, shape(&[4]), 16)
    );
    let host = bytes(&X);
    let leaves: Vec<Leaf<'_>> = plan
        .leaves
        .iter()
        .map(|l| if l.node == x { Leaf::Host(&host) } else { Leaf::Resident(&*resident) })
        .collect();
    let mut arena = Reference.arena(plan.arena_bytes).unwrap();
    arena.poison();
    let mut out = vec![0; 16];
    arena.read(plan.outputs[0].range.clone(), &mut out).unwrap();
    let poisoned = Value::decode(DType::F32, shape(&[4]), &out).unwrap();
    assert!(poisoned.as_floats().unwrap().iter().all(|x| x.is_nan()));

    let done = Reference.run(&plan, &leaves, &mut *arena, Segment::default(), &()).unwrap();
    assert_eq!(done, Progress::Done);
    assert_eq!(arena.high_water(), plan.arena_bytes);
    arena.read(plan.outputs[0].range.clone(), &mut out).unwrap();
    let got = Value::decode(DType::F32, shape(&[4]), &out).unwrap();
    let mut values = Leaves::new();
    values.insert(x, Value::from_f32(shape(&[4]), &X).unwrap());
    values.insert(w, Value::from_f32(shape(&[4]), &W).unwrap());
    let expected = eval(&g, &values, &[y], Mode::Exact).unwrap();
    for (got, expected) in got.as_floats().unwrap().iter().zip(expected[0].as_floats().unwrap()) {
        assert_eq!(*got, f64::from(*expected as f32));
    }

    let error = arena.read(0..plan.arena_bytes + 1, &mut out).unwrap_err();
    assert_eq!(error.code, Code::Internal);
    let error = Reference.run(&plan, &leaves[..1], &mut *arena, Segment::default(), &());
    assert_eq!(error.unwrap_err().code, Code::BadBinding);
    let short = [Leaf::Host(&host[..12]), leaves[1]];
    let error = Reference.run(&plan, &short, &mut *arena, Segment::default(), &()).unwrap_err();
    assert_eq!((error.code, &*error.node), (Code::BadBinding, "x"));
}

/// A plan whose mistakes would go unnoticed on a device that only has bytes.
#[test]
fn finds_planning_mistakes() {
    let (g, [x, _], y) = program();
    let good = plan(&g, &[y], &Reference).unwrap();
    let (host, weight) = (bytes(&X), bytes(&W));
    let run = |plan: &Plan| {
        let leaf = |l: &LeafSlot| Leaf::Host(if l.node == x { &host } else { &weight });
        let leaves: Vec<Leaf<'_>> = plan.leaves.iter().map(leaf).collect();
        let mut arena = Reference.arena(plan.arena_bytes).unwrap();
        Reference.run(plan, &leaves, &mut *arena, Segment::default(), &())
    };
    assert_eq!(run(&good), Ok(Progress::Done));

    // A step that never ran.
    let mut bad = good.clone();
    bad.steps.remove(1);
    let fault = run(&bad).unwrap_err();
    assert!(fault.message.contains("hold no whole value"), "{fault}");

    // A value overwritten before it is read: the first step's result is placed onto the
    // second's, and the third reads the first's again.
    let mut bad = good.clone();
    let clobbered = bad.steps[0].out;
    bad.steps[1].out.place = Place::Arena { start: 4, len: 16 };
    bad.steps[2].args[0] = clobbered;
    bad.arena_bytes += 64;
    assert!(run(&bad).unwrap_err().message.contains("hold no whole value"));

    // A result of another shape than the op's.
    let mut bad = good.clone();
    bad.steps[0].out.arg.shape = shape(&[2, 2]);
    assert!(run(&bad).unwrap_err().message.contains("the op gives"));

    // A layout that reaches beyond its storage.
    let mut bad = good.clone();
    bad.steps[1].args[0].arg.layout.offset = 1;
    assert!(run(&bad).unwrap_err().message.contains("beyond"));

    // A place outside of the arena.
    let mut bad = good.clone();
    bad.steps[2].out.place = Place::Arena { start: bad.arena_bytes, len: 16 };
    assert!(run(&bad).unwrap_err().message.contains("outside of the arena"));
}

/// A value without elements may begin where one with elements does, and leaves it alone.
#[test]
fn a_value_without_elements_hides_no_other() {
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[4]), DType::F32).unwrap();
    let nothing = g.leaf("nothing", shape(&[0]), DType::F32).unwrap();
    let a = g.unary(Unary::Exp, x).unwrap();
    let b = g.unary(Unary::Exp, nothing).unwrap();
    let y = g.unary(Unary::Tanh, a).unwrap();
    let plan = plan(&g, &[y, b], &Reference).unwrap();
    let place = |node| plan.steps.iter().find(|s| s.node == node).unwrap().out.place;
    let starts = [a, b].map(|node| match place(node) {
        Place::Arena { start, .. } => Some(start),
        Place::Leaf(_) => None,
    });
    assert_eq!(starts, [Some(0); 2]);
    let host = bytes(&X);
    let leaf = |l: &LeafSlot| Leaf::Host(if l.node == x { &host } else { &[] });
    let leaves: Vec<Leaf<'_>> = plan.leaves.iter().map(leaf).collect();
    let mut arena = Reference.arena(plan.arena_bytes).unwrap();
    let done = Reference.run(&plan, &leaves, &mut *arena, Segment::default(), &());
    assert_eq!(done, Ok(Progress::Done));
}

/// Queries, keys and values cut out of one projection, and their gradients: planned copies on a
/// device that reads dense operands alone, in place elsewhere, and the same values.
#[test]
fn a_fused_projection_and_its_gradient_run_on_dense_operands_by_copies() {
    let (rows, heads, kv, width) = (5, 4, 2, 6);
    let wide = (heads + 2 * kv) * width;
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[rows, 8]), DType::F32).unwrap();
    let w = g.leaf("attn_qkv", shape(&[wide, 8]), DType::F32).unwrap();
    let seqs = g.leaf("seqs", shape(&[1, 3]), DType::I32).unwrap();
    let dy = g.leaf("dy", shape(&[rows, heads, width]), DType::F32).unwrap();
    let qkv = g.project(x, w).unwrap();
    let mut part = |start: usize, n: usize| {
        let cut = g.slice(qkv, 1, start * width, n * width).unwrap();
        g.reshape(cut, &[rows, n, width]).unwrap()
    };
    let (q, k, v) = (part(0, heads), part(heads, kv), part(heads + kv, kv));
    let attrs = AttentionAttrs::new(0.4);
    let y = g.push(Op::Attention(attrs), &[q, k, v, seqs], "attention").unwrap();
    let back = vjp(&g, &[(y, dy)], &[x, w]).unwrap();
    let outputs = [y, back.grads[0], back.grads[1]];

    let mut rng = reference::check::Rng::new(1, "fused");
    let mut random = |n: usize| {
        let data: Vec<f32> = (0..n).map(|_| rng.between(-1.0, 1.0) as f32).collect();
        bytes(&data)
    };
    let sequence: Vec<u8> = [0i32, rows as i32, 0].iter().flat_map(|i| i.to_le_bytes()).collect();
    let values = [
        (x, random(rows * 8)),
        (w, random(wide * 8)),
        (seqs, sequence),
        (dy, random(rows * heads * width)),
    ];
    let run = |device: &dyn Device| {
        let plan = plan(&back.graph, &outputs, device).unwrap();
        let leaf = |l: &LeafSlot| &values.iter().find(|(id, _)| *id == l.node).unwrap().1;
        let leaves: Vec<Leaf<'_>> = plan.leaves.iter().map(|l| Leaf::Host(leaf(l))).collect();
        let mut arena = device.arena(plan.arena_bytes).unwrap();
        arena.poison();
        device.run(&plan, &leaves, &mut *arena, Segment::default(), &()).unwrap();
        let read = |slot: &OutputSlot| {
            let mut bytes = vec![0; slot.range.len()];
            arena.read(slot.range.clone(), &mut bytes).unwrap();
            bytes
        };
        (plan.copies, plan.outputs.iter().map(read).collect::<Vec<_>>())
    };
    let ((none, in_place), (copies, copied)) = (run(&Reference), run(&Dense));
    // One for each of the three parts, and for the gradients of keys and values, which are cut out of
    // one value; that of queries is cut out of another from its start on.
    assert_eq!((none, copies), (0, 5));
    assert!(in_place == copied);
}
