//! Inputs far out, at zero of either sign and below the normal numbers: values and gradients are
//! finite wherever the true ones are, in every kernel family.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use cpu::{Cpu, Family};
use graph::*;
use reference::check::{check_wide, op_names};
use reference::{Leaves, Mode, Value, eval};

/// What every operand takes in turn.
const WIDE: [f32; 24] = [
    150.0, -150.0, 1e4, -1e4, 0.0, -0.0, 1e-40, -1e-40, 1e-45, -1e-45, 1.2e-38, -1.2e-38, 1.0,
    -1.0, 0.5, -0.5, 88.7, -88.7, -104.0, 20.0, -20.0, 7.0, -7.0, 1e-6,
];

struct Case {
    name: String,
    graph: Graph,
    leaves: Vec<(NodeId, Vec<f32>)>,
    output: NodeId,
    /// What the true value is where f64 gives NaN: nothing is asked there.
    undefined: bool,
}

fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap()
}

/// A case of leaves that hold these elements, and an output.
fn case(
    name: impl Into<String>,
    operands: &[(&[usize], Vec<f32>)],
    build: impl FnOnce(&mut Graph, &[NodeId]) -> std::result::Result<NodeId, Invalid>,
) -> Case {
    let mut graph = Graph::new();
    let mut leaves = Vec::new();
    for (i, (dims, data)) in operands.iter().enumerate() {
        let id = graph.leaf(&format!("x{i}"), shape(dims), DType::F32).unwrap();
        leaves.push((id, data.clone()));
    }
    let ids: Vec<NodeId> = leaves.iter().map(|l| l.0).collect();
    let output = build(&mut graph, &ids).unwrap();
    Case { name: name.into(), graph, leaves, output, undefined: false }
}

fn cases() -> Vec<Case> {
    let n = WIDE.len();
    let row: &[usize] = &[n];
    let pair: &[usize] = &[n, n];
    let one = || WIDE.to_vec();
    // All pairs: the first operand changes with the row, the second with the column.
    let rows = || (0..n * n).map(|i| WIDE[i / n]).collect::<Vec<f32>>();
    let columns = || (0..n * n).map(|i| WIDE[i % n]).collect::<Vec<f32>>();
    let mut all = Vec::new();
    for f in Unary::ALL {
        let mut c = case(format!("{f:?}"), &[(row, one())], |g, x| g.unary(f, x[0]));
        c.undefined = matches!(f, Unary::Log | Unary::Log1p | Unary::Sqrt | Unary::Rsqrt);
        all.push(c);
    }
    for f in Binary::ALL {
        let operands = [(pair, rows()), (pair, columns())];
        let mut c = case(format!("{f:?}"), &operands, |g, x| g.push(Op::Binary(f), x, "y"));
        c.undefined = f == Binary::Div;
        all.push(c);
    }
    all.push(case("Affine", &[(row, one())], |g, x| g.affine(x[0], -3.0, 2.0)));
    for (min, max) in [(-1.0, 1.0), (0.0, f32::INFINITY), (f32::NEG_INFINITY, 1e-40)] {
        let name = format!("Clamp {min} {max}");
        all.push(case(name, &[(row, one())], |g, x| g.clamp(x[0], min, max)));
    }
    for kind in GluKind::ALL {
        let operands = [(pair, rows()), (pair, columns())];
        all.push(case(format!("{kind:?}"), &operands, |g, x| g.push(Op::Glu(kind), x, "y")));
    }
    // Rows of one number beside others, of small numbers, of large ones, of zeros.
    let width = 19;
    let some: Vec<Vec<f32>> = vec![
        (0..width).map(|i| WIDE[i]).collect(),
        (0..width).map(|i| WIDE[(5 * i + 3) % n]).collect(),
        vec![0.0; width],
        vec![-0.0; width],
        vec![1e-40; width],
        (0..width).map(|i| if i % 2 == 0 { 1e4 } else { -1e4 }).collect(),
        vec![-1e4; width],
        vec![150.0; width],
        (0..width).map(|i| if i == 7 { 1e4 } else { 1e-45 }).collect(),
        (0..width).map(|i| if i == 7 { -150.0 } else { 0.0 }).collect(),
    ];
    let dims: &[usize] = &[1, some.len(), width];
    let wide: Vec<f32> = some.concat();
    for eps in [1e-5, 1e-12] {
        let eps = Real::new(eps);
        for kind in NormKind::ALL {
            all.push(case(format!("{kind:?} {eps:?}"), &[(dims, wide.clone())], |g, x| {
                g.push(Op::Norm { kind, eps }, x, "y")
            }));
        }
        let weight: &[usize] = &[width];
        let operands = [(dims, wide.clone()), (weight, WIDE[..width].to_vec())];
        all.push(case(format!("RmsNorm {eps:?}"), &operands, |g, x| {
            g.push(Op::RmsNorm { eps }, x, "y")
        }));
    }
    for scale in [1.0, 0.125] {
        let attrs = SoftmaxAttrs { scale: scale.into(), ..SoftmaxAttrs::PLAIN };
        all.push(case(format!("Softmax {scale}"), &[(dims, wide.clone())], |g, x| {
            g.push(Op::Softmax(attrs), x, "y")
        }));
        for sink in [0.0, 1e4, -1e4] {
            let attrs = SoftmaxAttrs { mask: true, sinks: true, max_bias: 8.0.into(), ..attrs };
            let one: &[usize] = &[1];
            let operands = [(dims, wide.clone()), (dims, wide.clone()), (one, vec![sink])];
            let mut c = case(format!("Softmax {scale}, sink {sink}"), &operands, |g, x| {
                g.push(Op::Softmax(attrs), x, "y")
            });
            // The mask has no gradient.
            c.leaves.swap(1, 2);
            all.push(c);
        }
    }
    all.push(case("LogSoftmax", &[(dims, wide.clone())], |g, x| g.push(Op::LogSoftmax, x, "y")));
    all.push(case("CumSum", &[(dims, wide.clone())], |g, x| g.cum_sum(x[0], 2)));
    all.push(case("Sum", &[(dims, wide)], |g, x| g.sum(x[0], &[2])));
    all
}

fn run(
    device: &dyn Device,
    graph: &Graph,
    outputs: &[NodeId],
    leaves: &[(NodeId, Vec<f32>)],
) -> Vec<Vec<f32>> {
    let plan = plan(graph, outputs, device).unwrap();
    let held: Vec<&Vec<f32>> = plan
        .leaves
        .iter()
        .map(|slot| &leaves.iter().find(|(id, _)| *id == slot.node).unwrap().1)
        .collect();
    let bound: Vec<Leaf<'_>> = held
        .iter()
        .map(|data| {
            let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
            Leaf::Host(aligned(&bytes))
        })
        .collect();
    let mut arena = device.arena(plan.arena_bytes).unwrap();
    arena.poison();
    device.run(&plan, &bound, &mut *arena, Segment::default(), &()).unwrap();
    let read = |slot: &OutputSlot| {
        let mut bytes = vec![0; slot.range.len()];
        arena.read(slot.range.clone(), &mut bytes).unwrap();
        bytes.as_chunks().0.iter().map(|le| f32::from_le_bytes(*le)).collect()
    };
    plan.outputs.iter().map(read).collect()
}

/// The bytes at an address that suits floats, for as long as the test runs.
fn aligned(bytes: &[u8]) -> &'static [u8] {
    let buffer: &'static mut [u8] = vec![0; bytes.len() + 64].leak();
    let start = buffer.as_ptr().align_offset(64).min(64);
    buffer[start..start + bytes.len()].copy_from_slice(bytes);
    &buffer[start..start + bytes.len()]
}

/// What is wrong with the values and gradients of a case on a device.
fn wrong(device: &dyn Device, case: &Case, cotangent: f32) -> Vec<String> {
    let mut graph = case.graph.clone();
    let of = graph.node(case.output).shape;
    let dy = graph.leaf("dy", of, DType::F32).unwrap();
    let mut leaves = case.leaves.clone();
    let data = (0..of.elements()).map(|i| if i % 3 == 0 { -cotangent } else { cotangent });
    leaves.push((dy, data.collect()));
    // A mask blocks: it is last then.
    let mut wrt: Vec<NodeId> = case.leaves.iter().map(|l| l.0).collect();
    if wrt.len() == 3 {
        wrt.pop();
    }
    let back = vjp(&graph, &[(case.output, dy)], &wrt).unwrap();
    let mut outputs = vec![case.output];
    outputs.extend(&back.grads);
    let mut values = Leaves::new();
    for (id, data) in &leaves {
        values.insert(*id, Value::from_f32(graph.node(*id).shape, data).unwrap());
    }
    let truth = eval(&back.graph, &values, &outputs, Mode::Exact).unwrap();
    let got = run(device, &back.graph, &outputs, &leaves);
    // Beyond a value that is not finite nothing is asked.
    let values = truth[0].as_floats().unwrap();
    let infinite: Vec<bool> = values.iter().map(|y| !(*y as f32).is_finite()).collect();
    let mut found = Vec::new();
    for (o, (got, truth)) in got.iter().zip(&truth).enumerate() {
        let what = if o == 0 { "value".to_string() } else { format!("gradient {}", o - 1) };
        for (i, (a, b)) in got.iter().zip(truth.as_floats().unwrap()).enumerate() {
            let operands: Vec<f32> = case.leaves.iter().map(|l| l.1[i % l.1.len()]).collect();
            if b.is_nan() && !case.undefined {
                found.push(format!("{}: {what} {i} of {operands:?} is NaN in f64", case.name));
            }
            let beyond = infinite.len() == truth.as_floats().unwrap().len() && infinite[i];
            if (*b as f32).is_finite() && !a.is_finite() && !beyond {
                found.push(format!("{}: {what} {i} of {operands:?} is {a}, is {b:e}", case.name));
            }
        }
    }
    found
}

#[test]
fn values_and_gradients_are_finite_where_the_true_ones_are() {
    let mut found = Vec::new();
    for family in Family::ALL.into_iter().filter(|f| f.is_available()) {
        let cpu = Cpu::new(1, Some(family)).unwrap();
        for case in cases() {
            for cotangent in [1.0, 1e4, 1e-40] {
                let wrong = wrong(&cpu, &case, cotangent);
                found.extend(
                    wrong.iter().map(|w| format!("{}: dy {cotangent}: {w}", family.name())),
                );
            }
        }
    }
    let count = found.len();
    found.truncate(60);
    assert!(found.is_empty(), "{count} are not finite:\n{}", found.join("\n"));
}

/// The cases of every op with leaves that hold such numbers. `GRADUS_WIDE=N` runs each N times
/// instead of once, `GRADUS_SEED=S` with others than those of seed 1, `GRADUS_OPS=NAME` those of
/// ops whose name contains this.
#[test]
fn every_op_is_finite_where_the_true_values_are() {
    let number = |variable: &str, default: u64| {
        std::env::var(variable).map_or(default, |text| text.parse().unwrap())
    };
    let (rounds, seed) = (number("GRADUS_WIDE", 1), number("GRADUS_SEED", 1));
    let ops = std::env::var("GRADUS_OPS").ok();
    for (i, family) in Family::ALL.into_iter().filter(|f| f.is_available()).enumerate() {
        let cpu = Cpu::new(1, Some(family)).unwrap();
        // Each family has numbers of its own.
        let report = check_wide(&cpu, seed + 1_000 * i as u64, rounds, ops.as_deref());
        println!("{}\n{report}", family.name());
        let count = report.failures.len();
        let some: Vec<&str> = report.failures.iter().take(60).map(String::as_str).collect();
        assert!(count == 0, "{}: {count} fail:\n{}", family.name(), some.join("\n"));
        for op in op_names().filter(|_| ops.is_none()) {
            let asked = report.asked.get(op).copied().unwrap_or_default();
            assert!(asked > 50, "{}: {op} had {asked} elements to compare", family.name());
        }
    }
}

/// A row that counts nothing gives exactly zero, though its logits are not finite.
#[test]
fn a_row_without_weight_or_label_gives_zero() {
    let mut g = Graph::new();
    let leaf = |g: &mut Graph, name: &str, dims: &[usize], dtype| {
        g.leaf(name, shape(dims), dtype).unwrap()
    };
    let logits = leaf(&mut g, "logits", &[3, 5], DType::F32);
    let labels = leaf(&mut g, "labels", &[3], DType::I32);
    let dy = leaf(&mut g, "dy", &[3], DType::F32);
    let op = Op::CrossEntropy(CrossEntropyAttrs::PLAIN);
    let loss = g.push(op, &[logits, labels], "loss").unwrap();
    let back = vjp(&g, &[(loss, dy)], &[logits]).unwrap();
    let mut data = vec![f32::INFINITY; 5];
    data.extend([f32::NAN; 5]);
    data.extend([1.0, -2.0, 0.5, 3.0, 0.25]);
    // Labels 2, none and 3 by their bits; the first row's weight is 0.
    let bits = [2u32, u32::MAX, 3].map(f32::from_bits).to_vec();
    let leaves = [(logits, data), (labels, bits), (dy, vec![0.0, 1.0, 1.0])];
    for family in Family::ALL.into_iter().filter(|f| f.is_available()) {
        let cpu = Cpu::new(1, Some(family)).unwrap();
        let grads = run(&cpu, &back.graph, &back.grads, &leaves).remove(0);
        assert_eq!(grads[..10], [0.0; 10], "{}", family.name());
        assert!(grads[10..].iter().all(|g| g.is_finite() && *g != 0.0), "{}", family.name());
    }
}
