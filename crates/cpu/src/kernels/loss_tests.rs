//! Losses: the faults that others have had, and the loss fused with the output projection.

use graph::{
    CrossEntropyAttrs, DType, Graph, HostTensor, Leaf, NodeId, Op, Projected, Recompute, Segment,
    plan, recompute, vjp,
};

use crate::Cpu;
use crate::testing::{Case, Random, devices, shape, to_floats};

const PLAIN: CrossEntropyAttrs = CrossEntropyAttrs::PLAIN;
const WEIGHTED: CrossEntropyAttrs = CrossEntropyAttrs { weighted: true, ..PLAIN };

/// Losses and the gradient of logits.
fn run(
    cpu: &Cpu,
    attrs: CrossEntropyAttrs,
    (logits, vocab): (&[f32], usize),
    labels: &[i32],
    (dy, weights): (&[f32], &[f32]),
) -> [Vec<f32>; 2] {
    let mut case = Case::new();
    let rows = labels.len();
    let logits = case.floats("logits", &[rows, vocab], logits);
    let labels = case.ints("labels", &[rows], labels);
    let dy = case.floats("dy", &[rows], dy);
    let mut args = vec![logits, labels];
    if attrs.weighted {
        args.push(case.floats("weights", &[rows], weights));
    }
    let y = case.graph.push(Op::CrossEntropy(attrs), &args, "y").unwrap();
    let back = vjp(&case.graph, &[(y, dy)], &[logits]).unwrap();
    case.graph = back.graph;
    let out = case.run(cpu, &[y, back.grads[0]]).unwrap();
    [to_floats(&out[0]), to_floats(&out[1])]
}

/// Saturated logits in a masked row once made the whole loss NaN by way of 0 * NaN; stray values
/// in padding did by way of weights of 0. Such rows are written as zeros and never read.
#[test]
fn bugs_15_and_16_rows_that_do_not_count_poison_nothing() {
    let (rows, vocab) = (6, 21);
    let mut clean = Random(1).floats(rows * vocab);
    let labels = [3, -1, 5, 20, -100, 0];
    let weights = [0.5, 2.0, 0.0, 1.0, 1.0, -0.0];
    let dy = [1.0, 1.0, 1.0, 0.25, 1.0, 1.0];
    for attrs in [WEIGHTED, CrossEntropyAttrs { softcap: Some(5.0.into()), ..WEIGHTED }] {
        for cpu in devices() {
            let expected = run(&cpu, attrs, (&clean, vocab), &labels, (&dy, &weights));
            for junk in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
                let (mut logits, mut stray) = (clean.clone(), dy);
                for row in [1, 2, 4, 5] {
                    logits[row * vocab..][..vocab].fill(junk);
                    stray[row] = junk;
                }
                let got = run(&cpu, attrs, (&logits, vocab), &labels, (&stray, &weights));
                assert!(got == expected, "{junk} in rows that do not count shows");
                for row in [1, 2, 4, 5] {
                    assert_eq!(got[0][row].to_bits(), 0);
                    assert!(got[1][row * vocab..][..vocab].iter().all(|x| x.to_bits() == 0));
                }
                assert!(got[0][0] > 0.0 && got[0][3] > 0.0);
            }
        }
    }
    // A cotangent of 0 does what a weight of 0 does.
    clean[..vocab].fill(f32::NAN);
    for cpu in devices() {
        let got = run(&cpu, PLAIN, (&clean, vocab), &labels, (&[0.0; 6], &[]));
        assert!(got[1].iter().all(|x| x.to_bits() == 0));
    }
}

/// A backward pass was once wrong by a factor wherever a weight was not 1, which differences of
/// quantized models hid. Against f64 differences of the definition.
#[test]
fn bug_32_weights_that_are_not_1() {
    let (rows, vocab) = (5, 13);
    let logits: Vec<f32> = Random(2).floats(rows * vocab).iter().map(|x| x * 4.0).collect();
    let labels = [0, 12, 5, -1, 7];
    let weights = [0.25f32, 3.0, -1.5, 2.0, 0.875];
    let dy = [1.0, 0.5, -2.0, 1.0, 0.75];
    for (scale, cap) in [(1.0f32, None), (0.5, Some(2.5f32)), (1.0, Some(30.0))] {
        let softcap = cap.map(Into::into);
        let attrs = CrossEntropyAttrs { scale: scale.into(), softcap, ..WEIGHTED };
        let total = |logits: &[f64]| -> f64 {
            let rows = logits.chunks(vocab).zip(labels).zip(weights).zip(dy);
            rows.filter(|(((_, label), _), _)| *label >= 0)
                .map(|(((row, label), weight), dy)| {
                    let z: Vec<f64> = row
                        .iter()
                        .map(|x| {
                            let u = x * f64::from(scale);
                            cap.map_or(u, |c| f64::from(c) * (u / f64::from(c)).tanh())
                        })
                        .collect();
                    let sum: f64 = z.iter().map(|z| z.exp()).sum();
                    f64::from(dy) * f64::from(weight) * (sum.ln() - z[label as usize])
                })
                .sum()
        };
        let wide: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
        for cpu in devices() {
            let [losses, grad] = run(&cpu, attrs, (&logits, vocab), &labels, (&dy, &weights));
            let sum: f64 = losses.iter().zip(dy).map(|(l, d)| f64::from(*l) * f64::from(d)).sum();
            assert!((sum - total(&wide)).abs() <= 1e-5 * sum.abs());
            for i in 0..rows * vocab {
                let moved = |h: f64| {
                    let mut x = wide.clone();
                    x[i] += h;
                    total(&x)
                };
                let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let error = (f64::from(grad[i]) - expected).abs();
                assert!(error <= 2e-6 * (1.0 + expected.abs()), "{i}: {} and {expected}", grad[i]);
            }
        }
    }
}

/// A scale of 1 and weights of 1 change no bit of what the loss was without them.
#[test]
fn neutral_attributes_change_no_bit() {
    let (rows, vocab) = (7, 37);
    let logits: Vec<f32> = Random(3).floats(rows * vocab).iter().map(|x| x * 8.0).collect();
    let labels = [3, 36, -1, 0, 20, 11, 5];
    let dy = Random(4).floats(rows);
    for cpu in devices() {
        let plain = run(&cpu, PLAIN, (&logits, vocab), &labels, (&dy, &[]));
        let ones = run(&cpu, WEIGHTED, (&logits, vocab), &labels, (&dy, &[1.0; 7]));
        assert!(plain == ones);
        for (attrs, same) in [
            (CrossEntropyAttrs { scale: 0.5.into(), ..PLAIN }, false),
            (CrossEntropyAttrs { softcap: Some(9.0.into()), ..PLAIN }, false),
            (CrossEntropyAttrs { scale: 1.0.into(), ..PLAIN }, true),
        ] {
            let other = run(&cpu, attrs, (&logits, vocab), &labels, (&dy, &[]));
            assert!((plain == other) == same);
        }
    }
}

/// The output head of a check of the fused loss.
#[derive(Clone, Copy, Debug)]
struct Head {
    dtype: DType,
    lora: bool,
}

const K: usize = 64;
const VOCAB: usize = 96;
const ROWS: usize = 21;

/// Losses, and the gradients of x, of the head where it has one, and of its adapter.
fn fused(cpu: &Cpu, head: Head, how: Option<Projected>) -> Vec<Vec<f32>> {
    let mut case = Case::new();
    let mut random = Random(5);
    let x = case.random("x", &[ROWS, K], &mut random);
    let w = random.floats(VOCAB * K);
    let bytes: Vec<u8> = w.iter().flat_map(|x| x.to_le_bytes()).collect();
    let f32s = || reference::Value::decode(DType::F32, shape(&[VOCAB, K]), &bytes).unwrap();
    let stored = match head.dtype {
        DType::F32 => bytes.clone(),
        // Blocks of a scale of 0.06 (f16) and random codes.
        DType::Block(gguf::TensorType::Q4_0) => (0..VOCAB * K / 32)
            .flat_map(|_| [0xae, 0x2b].into_iter().chain([(); 16].map(|()| random.next() as u8)))
            .collect(),
        dtype => f32s().encode(dtype).unwrap(),
    };
    let block = matches!(head.dtype, DType::Block(_));
    let w = match block {
        true => case.weight("head", head.dtype, &[VOCAB, K], &stored),
        false => case.bytes("head", head.dtype, &[VOCAB, K], &stored),
    };
    let labels: Vec<i32> =
        (0..ROWS).map(|t| if t == 4 { -1 } else { (t * 31 % VOCAB) as i32 }).collect();
    let labels = case.ints("labels", &[ROWS], &labels);
    let weights = random.floats(ROWS);
    let weights = case.floats("weights", &[ROWS], &weights);
    let dy = case.random("dy", &[ROWS], &mut random);
    let a = case.random("a", &[3, K], &mut random);
    let b = case.random("b", &[VOCAB, 3], &mut random);
    let scale = case.floats("scale", &[1], &[0.5]);
    let slots = case.ints("slots", &[ROWS], &[0; ROWS]);
    let mut wrt = vec![x];
    wrt.extend((!block).then_some(w));
    wrt.extend(if head.lora { vec![a, b] } else { Vec::new() });
    let mut start = 0;
    let mut logits = |g: &mut Graph, x: NodeId| {
        let base = g.project(x, w)?;
        if !head.lora {
            return Ok(base);
        }
        let len = g.node(x).shape.dim(0);
        let slots = g.slice(slots, 0, start, len)?;
        start += len;
        g.push(Op::Lora { slots: 1 }, &[x, base, slots, a, b, scale], "adapted")
    };
    let attrs = CrossEntropyAttrs { softcap: Some(6.0.into()), ..PLAIN };
    let y = match how {
        Some(how) => {
            let how = Projected { attrs, ..how };
            let of = (x, labels, Some(weights));
            case.graph.projected_cross_entropy(of, VOCAB, &how, logits).unwrap()
        }
        None => {
            let logits = logits(&mut case.graph, x).unwrap();
            let op = Op::CrossEntropy(CrossEntropyAttrs { weighted: true, ..attrs });
            case.graph.push(op, &[logits, labels, weights], "y").unwrap()
        }
    };
    let back = vjp(&case.graph, &[(y, dy)], &wrt).unwrap();
    let outputs = [&[y][..], &back.grads].concat();
    let (graph, outputs) = recompute(&back.graph, &outputs, Recompute::None).unwrap();
    // Leaves keep their order, so their values are found by name.
    case.rename(graph);
    case.run(cpu, &outputs).unwrap().iter().map(|bytes| to_floats(bytes)).collect()
}

/// P5: through the head in pieces or at once, the losses and the gradients of the rows are the
/// same bits; those of the head, sums over rows, are the same numbers.
#[test]
fn p5_the_fused_loss_is_the_product_and_then_the_loss() {
    let block = |t| DType::Block(t);
    for dtype in [
        DType::F32,
        DType::F16,
        DType::BF16,
        block(gguf::TensorType::Q8_0),
        block(gguf::TensorType::Q4_0),
    ] {
        for lora in [false, true] {
            let head = Head { dtype, lora };
            for cpu in devices() {
                let whole = fused(&cpu, head, None);
                assert!(whole.iter().all(|x| x.iter().any(|&x| x != 0.0)));
                for (rows, again) in [(1, true), (8, true), (8, false), (21, true), (64, true)] {
                    let how = Projected { attrs: PLAIN, rows: Some(rows), again };
                    let pieces = fused(&cpu, head, Some(how));
                    assert!(pieces[..1] == whole[..1], "{head:?} by {rows}: losses differ");
                    assert!(pieces[1] == whole[1], "{head:?} by {rows}: dx differs");
                    for (got, expected) in pieces.iter().zip(&whole).skip(2) {
                        let rms =
                            expected.iter().map(|x| x * x).sum::<f32>() / expected.len() as f32;
                        for (a, b) in got.iter().zip(expected) {
                            assert!((a - b).abs() <= 1e-5 * (rms.sqrt() + b.abs()));
                        }
                    }
                }
            }
        }
    }
}

/// The plan of a training step through a head: 512 rows, a vocabulary of 4096.
fn step(cpu: &Cpu, fuse: Option<Projected>, recomputed: bool) -> (graph::Plan, Graph) {
    let (t, v, k) = (512, 4096, 32);
    let mut g = Graph::new();
    let x = g.leaf("x", shape(&[t, k]), DType::F32).unwrap();
    let w = g.weight("head", shape(&[v, k]), DType::Block(gguf::TensorType::Q8_0)).unwrap();
    let labels = g.leaf("labels", shape(&[t]), DType::I32).unwrap();
    let one = g.leaf("one", shape(&[1]), DType::F32).unwrap();
    let losses = match fuse {
        Some(how) => {
            let head = |g: &mut Graph, x| g.project(x, w);
            g.projected_cross_entropy((x, labels, None), v, &how, head).unwrap()
        }
        None => {
            let logits = g.project(x, w).unwrap();
            g.push(Op::CrossEntropy(PLAIN), &[logits, labels], "y").unwrap()
        }
    };
    // As in preference losses: no row's cotangent is known before all rows' losses are.
    let sum = g.sum(losses, &[0]).unwrap();
    let square = g.mul(sum, sum).unwrap();
    let back = vjp(&g, &[(square, one)], &[x]).unwrap();
    let outputs = vec![square, back.grads[0]];
    let (g, outputs) = match recomputed {
        true => recompute(&back.graph, &outputs, Recompute::None).unwrap(),
        false => (back.graph, outputs),
    };
    (plan(&g, &outputs, cpu).unwrap(), g)
}

#[test]
fn no_plan_of_the_fused_loss_has_all_logits() {
    let cpu = Cpu::new(1, None).unwrap();
    let whole = 512 * 4096;
    let largest =
        |plan: &graph::Plan| plan.steps.iter().map(|s| s.out.arg.shape.elements()).max().unwrap();
    let piece = Projected::rows_for(4096) * 4096;
    assert_eq!(piece, 1 << 19);
    let (fused, g) = step(&cpu, Some(Projected::PLAIN), true);
    // No value of the graph, hence no step and no place of the arena, has them.
    assert!(g.ids().all(|id| {
        let node = g.node(id);
        matches!(node.op, Op::Leaf) || node.shape.elements() <= piece
    }));
    assert_eq!(largest(&fused), piece);
    // One piece's logits and their gradient, and what belongs to rows: a quarter of a whole one.
    let bytes = fused.arena_bytes;
    assert!(bytes < 2 * 4 * piece + (1 << 19), "{bytes}");
    // The checks can fail: logits that are kept, and a loss that is not fused.
    let kept = Projected { again: false, ..Projected::PLAIN };
    let (kept, _) = step(&cpu, Some(kept), true);
    assert!(kept.arena_bytes > 4 * whole, "{}", kept.arena_bytes);
    let (forgot, _) = step(&cpu, Some(Projected::PLAIN), false);
    assert!(forgot.arena_bytes > 4 * whole, "{}", forgot.arena_bytes);
    let (plain, _) = step(&cpu, None, true);
    assert_eq!(largest(&plain), whole);
    assert!(plain.arena_bytes > 4 * whole);
}

/// The step of the last test runs, in the arena it plans.
#[test]
fn a_step_through_the_fused_loss_takes_what_its_plan_says() {
    for cpu in devices() {
        let mut sides: Vec<Vec<f32>> = Vec::new();
        for fuse in [Some(Projected::PLAIN), None] {
            let (plan, _) = step(&cpu, fuse, true);
            let mut random = Random(7);
            let floats = |n: usize, random: &mut Random| -> Vec<u8> {
                random.floats(n).iter().flat_map(|x| x.to_le_bytes()).collect()
            };
            let x = crate::testing::Bytes::new(&floats(512 * 32, &mut random));
            let w = floats(4096 * 32, &mut random);
            let w = reference::Value::decode(DType::F32, shape(&[4096, 32]), &w).unwrap();
            let q8 = DType::Block(gguf::TensorType::Q8_0);
            let w = w.encode(q8).unwrap();
            let w = HostTensor { dtype: q8, shape: shape(&[4096, 32]), bytes: &w };
            let w = graph::Device::load(&cpu, &w).unwrap();
            let labels: Vec<u8> = (0..512).flat_map(|t: i32| (t * 7).to_le_bytes()).collect();
            let labels = crate::testing::Bytes::new(&labels);
            let one = crate::testing::Bytes::new(&1f32.to_le_bytes());
            let leaves: Vec<Leaf<'_>> = plan
                .leaves
                .iter()
                .map(|slot| match &*slot.name {
                    "x" => Leaf::Host(x.get()),
                    "labels" => Leaf::Host(labels.get()),
                    "one" => Leaf::Host(one.get()),
                    _ => Leaf::Resident(&*w),
                })
                .collect();
            let mut arena = graph::Device::arena(&cpu, plan.arena_bytes).unwrap();
            arena.poison();
            let run =
                graph::Device::run(&cpu, &plan, &leaves, &mut *arena, Segment::default(), &());
            run.unwrap();
            assert_eq!(arena.high_water(), plan.arena_bytes);
            let mut all = Vec::new();
            for slot in &plan.outputs {
                let mut bytes = vec![0; slot.range.len()];
                arena.read(slot.range.clone(), &mut bytes).unwrap();
                all.extend(to_floats(&bytes));
            }
            sides.push(all);
        }
        assert!(sides[0] == sides[1], "{cpu:?}: the fused step has other bits");
    }
}
