//! Promises of kernels beside attention, which has its own tests.

use graph::{
    Code, CrossEntropyAttrs, DType, GluKind, LoraOperand, NodeId, NormOperand, Op, Real,
    RopeAngles, RopeStyle,
};

use crate::Cpu;
use crate::testing::{Case, Every, Random, assert_close, devices, shape, to_floats};

/// The rows of an op's operands: `[rows, ..]` values that a call may hold any of.
struct Rows {
    rows: usize,
    widths: Vec<Vec<usize>>,
    values: Vec<Vec<f32>>,
}

impl Rows {
    fn random(rows: usize, widths: &[&[usize]], random: &mut Random) -> Rows {
        let size = |dims: &[usize]| dims.iter().product::<usize>();
        Rows {
            rows,
            widths: widths.iter().map(|w| w.to_vec()).collect(),
            values: widths.iter().map(|w| random.floats(rows * size(w))).collect(),
        }
    }

    /// Leaves with some rows.
    fn leaves(&self, case: &mut Case, rows: std::ops::Range<usize>) -> Vec<NodeId> {
        let operands = self.widths.iter().zip(&self.values).enumerate();
        operands
            .map(|(i, (widths, values))| {
                let n: usize = widths.iter().product();
                let mut dims = vec![rows.len()];
                dims.extend(widths);
                case.floats(&format!("x{i}"), &dims, &values[rows.start * n..rows.end * n])
            })
            .collect()
    }
}

/// Asserts that `op` gives each row the same bits alone, among others and in pieces.
fn p5_rows(
    what: &str,
    rows: &Rows,
    op: impl Fn(&mut Case, &[NodeId], std::ops::Range<usize>) -> NodeId,
) {
    let mut random = Random(rows.rows as u64);
    for cpu in devices() {
        let run = |range: std::ops::Range<usize>, stop: usize| -> Vec<u8> {
            let mut case = Case::new();
            let leaves = rows.leaves(&mut case, range.clone());
            let out = op(&mut case, &leaves, range);
            case.run_in_pieces(&cpu, &[out], &Every::new(stop)).unwrap().remove(0)
        };
        let whole = run(0..rows.rows, usize::MAX);
        let width = whole.len() / rows.rows;
        assert!(to_floats(&whole).iter().any(|&x| x != 0.0), "{what} is all zeros");
        for trial in 0..12 {
            let start = random.below(rows.rows);
            let len = if trial % 2 == 0 { 1 } else { 1 + random.below(rows.rows - start) };
            let part = run(start..start + len, 1 + trial % 3);
            let same = part[..] == whole[start * width..(start + len) * width];
            assert!(same, "{what} on {cpu:?}: rows {start}..{} are their own", start + len);
        }
    }
}

#[test]
fn p5_rows_stand_alone() {
    let mut random = Random(11);
    let r = &mut random;
    for n in [1, 15, 33, 576] {
        let x = Rows::random(70, &[&[n]], r);
        let w = r.floats(n);
        p5_rows("RmsNorm", &x, |c, x, _| {
            let w = c.floats("w", &[n], &w);
            c.graph.rms_norm(x[0], w, 1e-5).unwrap()
        });
        let pair = Rows::random(70, &[&[n], &[n]], r);
        p5_rows("RmsNormBack", &pair, |c, x, _| {
            let w = c.floats("w", &[n], &w);
            let op = Op::RmsNormBack { eps: Real::new(1e-5), wrt: NormOperand::X };
            c.graph.push(op, &[x[0], w, x[1]], "n").unwrap()
        });
        for kind in [GluKind::Swiglu, GluKind::Geglu] {
            p5_rows("Glu", &pair, |c, x, _| c.graph.push(Op::Glu(kind), x, "g").unwrap());
        }
        p5_rows("Sum", &x, |c, x, _| c.graph.sum(x[0], &[1]).unwrap());
        if n == 1 {
            continue; // the only label is certain
        }
        p5_rows("CrossEntropy", &x, |c, x, rows| {
            let labels: Vec<i32> = rows.map(|row| (row % n) as i32).collect();
            let labels = c.ints("labels", &[labels.len()], &labels);
            let loss = c
                .graph
                .push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[x[0], labels], "l")
                .unwrap();
            let dy = c.graph.affine(loss, 1.0, 2.0).unwrap();
            c.graph
                .push(Op::CrossEntropyBack(CrossEntropyAttrs::PLAIN), &[x[0], labels, dy], "l")
                .unwrap()
        });
    }
    let x = Rows::random(50, &[&[320]], r);
    let q8 = DType::Block(gguf::TensorType::Q8_0);
    p5_rows("QuantizeRows", &x, |c, x, _| c.graph.push(Op::QuantizeRows, x, "q").unwrap());
    p5_rows("Cast", &x, |c, x, _| c.graph.cast(x[0], q8).unwrap());
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        let x = Rows::random(40, &[&[3, 50]], r);
        p5_rows("Rope", &x, |c, x, rows| {
            let positions: Vec<i32> = rows.map(|row| row as i32 * 7).collect();
            let positions = c.ints("positions", &[positions.len()], &positions);
            let angles = RopeAngles {
                dims: 38,
                base: Real::new(1e4),
                freq_scale: Real::new(1.0),
                factors: false,
                yarn: None,
                sections: None,
            };
            let table = c.graph.push(Op::RopeTable(angles), &[positions], "t").unwrap();
            c.graph.push(Op::Rope { style, inverse: false }, &[x[0], table], "r").unwrap()
        });
    }
}

/// Ranks of the slots of [`lora`].
const RANKS: [usize; 3] = [8, 1, 21];

/// Slots whose rows are mixed; negative ones have none.
fn slots(rows: std::ops::Range<usize>) -> Vec<i32> {
    rows.map(|row| [0, 2, -1, 2, 1, 2][row % 6]).collect()
}

#[test]
fn p5_adapters_of_other_rows_do_not_matter() {
    let mut random = Random(12);
    for (k, n) in [(40, 72), (7, 600), (600, 15)] {
        let weights: Vec<[Vec<f32>; 2]> =
            RANKS.iter().map(|r| [random.floats(r * k), random.floats(r * n)]).collect();
        let x = Rows::random(150, &[&[k], &[n]], &mut random);
        let operands = |c: &mut Case| -> Vec<NodeId> {
            let mut all = Vec::new();
            for (i, ([a, b], rank)) in weights.iter().zip(RANKS).enumerate() {
                all.push(c.floats(&format!("a{i}"), &[rank, k], a));
                all.push(c.floats(&format!("b{i}"), &[n, rank], b));
                all.push(c.floats(&format!("s{i}"), &[1], &[0.5 + i as f32]));
            }
            all
        };
        p5_rows("Lora", &x, |c, x, rows| {
            let chosen = c.ints("rows", &[rows.len()], &slots(rows));
            let mut args = vec![x[0], x[1], chosen];
            args.extend(operands(c));
            c.graph.push(Op::Lora { slots: 3 }, &args, "l").unwrap()
        });
        p5_rows("LoraBack", &x, |c, x, rows| {
            let chosen = c.ints("rows", &[rows.len()], &slots(rows));
            let mut args = vec![x[1], chosen];
            args.extend(operands(c));
            let op = Op::LoraBack { slots: 3, wrt: LoraOperand::X, slot: 0 };
            c.graph.push(op, &args, "l").unwrap()
        });
    }
}

/// As above, of the experts that rows chose: alone, where pairs are walked in order, and together,
/// where each expert's are gathered.
#[test]
fn p5_adapters_of_experts_do_not_depend_on_other_rows() {
    let mut random = Random(15);
    for (experts, used, k, n) in [(3, 2, 40, 72), (90, 3, 7, 90), (2, 2, 600, 15)] {
        let mut stack = |r: usize| [random.floats(experts * r * k), random.floats(experts * r * n)];
        let weights: Vec<[Vec<f32>; 2]> = RANKS.iter().map(|&r| stack(r)).collect();
        for own in [1, used] {
            let x = Rows::random(150, &[&[own, k], &[used, n]], &mut random);
            let operands = |c: &mut Case, rows: std::ops::Range<usize>| -> Vec<NodeId> {
                let chosen = c.ints("rows", &[rows.len()], &slots(rows.clone()));
                let at = |i: usize| ((i * 7 + i % used * 3) % experts) as i32;
                let of: Vec<i32> = rows
                    .clone()
                    .flat_map(|row| (0..used).map(move |u| at(row * used + u)))
                    .collect();
                let mut all = vec![chosen, c.ints("ids", &[rows.len(), used], &of)];
                for (i, ([a, b], rank)) in weights.iter().zip(RANKS).enumerate() {
                    all.push(c.floats(&format!("a{i}"), &[experts, rank, k], a));
                    all.push(c.floats(&format!("b{i}"), &[experts, n, rank], b));
                    all.push(c.floats(&format!("s{i}"), &[1], &[0.5 + i as f32]));
                }
                all
            };
            p5_rows("LoraExperts", &x, |c, x, rows| {
                let mut args = vec![x[0], x[1]];
                args.extend(operands(c, rows));
                c.graph.push(Op::LoraExperts { slots: 3 }, &args, "l").unwrap()
            });
            p5_rows("LoraExpertsBack", &x, |c, x, rows| {
                let mut args = vec![x[1]];
                args.extend(operands(c, rows));
                let op = Op::LoraExpertsBack { slots: 3, wrt: LoraOperand::X, slot: 0 };
                c.graph.push(op, &args, "l").unwrap()
            });
        }
    }
}

/// P6: gradients that sum over rows are the same on any number of threads and in pieces.
#[test]
fn p6_sums_over_rows_do_not_depend_on_threads() {
    let mut random = Random(13);
    let (rows, k, n) = (150, 333, 700);
    let mut case = Case::new();
    let x = case.random("x", &[rows, k], &mut random);
    let dy = case.random("dy", &[rows, n], &mut random);
    let dx = case.random("dx", &[rows, k], &mut random);
    let w = case.random("w", &[k], &mut random);
    let chosen = case.ints("rows", &[rows], &slots(0..rows));
    let inner = case.random("inner", &[rows, 21], &mut random);
    let scale = case.floats("scale", &[1], &[0.7]);
    let ids: Vec<i32> = (0..rows).map(|_| random.below(40) as i32).collect();
    let ids = case.ints("ids", &[rows], &ids);
    let (a3, b3) = (case.random("a3", &[3, 9, k], &mut random), [3, n, 9]);
    let b3 = case.random("b3", &b3, &mut random);
    let choices: Vec<i32> = (0..rows * 2).map(|_| random.below(3) as i32).collect();
    let choices = case.ints("choices", &[rows, 2], &choices);
    let dy3 = case.random("dy3", &[rows, 2, n], &mut random);
    let g = &mut case.graph;
    let x3 = g.reshape(x, &[rows, 1, k]).unwrap();
    let of_experts = |wrt| Op::LoraExpertsBack { slots: 3, wrt, slot: 2 };
    let lora = |wrt| Op::LoraBack { slots: 3, wrt, slot: 2 };
    let norm = Op::RmsNormBack { eps: Real::new(1e-5), wrt: NormOperand::Weight };
    let outputs = [
        g.push(lora(LoraOperand::A), &[x, inner, chosen], "a").unwrap(),
        g.push(lora(LoraOperand::B), &[inner, dy, chosen], "b").unwrap(),
        g.push(norm, &[x, w, dx], "w").unwrap(),
        g.push(Op::ScatterAdd { rows: 40 }, &[ids, dy], "s").unwrap(),
        g.sum(dy, &[0]).unwrap(),
        g.sum(dy, &[0, 1]).unwrap(),
        g.push(of_experts(LoraOperand::A), &[x3, dy3, chosen, choices, b3, scale], "ea").unwrap(),
        g.push(of_experts(LoraOperand::B), &[x3, dy3, chosen, choices, a3, scale], "eb").unwrap(),
    ];
    for cpus in devices().chunks(2) {
        let one = case.run(&cpus[0], &outputs).unwrap();
        for (i, bytes) in one.iter().enumerate() {
            // What no tile writes is NaN.
            assert!(to_floats(bytes).iter().all(|x| x.is_finite()), "output {i} on {:?}", cpus[0]);
        }
        for stop in 1..4 {
            let two = case.run_in_pieces(&cpus[1], &outputs, &Every::new(stop)).unwrap();
            assert!(one == two, "{:?}", cpus[0]);
        }
    }
}

/// The cache's format is ggml's, bit for bit.
#[test]
fn q8_0_equals_the_format_crate() {
    let mut random = Random(14);
    let mut values: Vec<f32> = random.floats(32 * 64);
    for (i, block) in values.chunks_mut(32).enumerate() {
        let scale = 10f32.powi(i as i32 % 60 - 40);
        block.iter_mut().for_each(|x| *x *= scale);
    }
    values[..32].fill(0.0);
    values[32..64].fill(-0.0);
    // Halves: codes that lie between two integers exactly.
    for (i, x) in values[64..96].iter_mut().enumerate() {
        *x = if i == 0 { 127.0 } else { i as f32 - 15.5 };
    }
    let mut expected = vec![0; values.len() / 32 * 34];
    gguf::blocks::quantize_q8_0(&values, &mut expected).unwrap();
    let mut decoded = vec![0.0; values.len()];
    gguf::blocks::dequantize(gguf::TensorType::Q8_0, &expected, &mut decoded).unwrap();
    let q8 = DType::Block(gguf::TensorType::Q8_0);
    for cpu in devices() {
        let mut case = Case::new();
        let x = case.floats("x", &[64, 32], &values);
        let (cast, round) = (case.graph.cast(x, q8).unwrap(), case.graph.round(x, q8).unwrap());
        let out = case.run(&cpu, &[cast, round]).unwrap();
        assert!(out[0] == expected, "{cpu:?}");
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&to_floats(&out[1])), bits(&decoded), "{cpu:?}");
    }
}

/// Rows may be cut out of wider ones, whose gradients they are, and nothing is copied.
#[test]
fn rows_are_read_where_they_lie() {
    let (cpu, mut random) = (Cpu::new(1, None).unwrap(), Random(16));
    let mut case = Case::new();
    let wide = case.random("wide", &[5, 9], &mut random);
    let ids = case.ints("ids", &[4], &[3, 1, 4, 1]);
    let table = case.graph.slice(wide, 1, 2, 6).unwrap();
    let rows = case.graph.slice(table, 0, 0, 4).unwrap();
    let ops: [(Op, &[NodeId]); 4] = [
        (Op::Gather, &[table, ids]),
        (Op::ScatterAdd { rows: 5 }, &[ids, rows]),
        (Op::TopK { k: 2, order: graph::Order::Descending }, &[table]),
        (Op::LogSoftmax, &[table]),
    ];
    for (op, args) in ops {
        let y = case.graph.push(op.clone(), args, "y").unwrap();
        assert_eq!(graph::plan(&case.graph, &[y], &cpu).unwrap().steps.len(), 1, "{op:?}");
    }
}

/// A number that is not finite shows in what depends on it.
#[test]
fn nan_is_not_quantized_away() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = vec![0.5; 64];
        values[40] = bad;
        for cpu in devices() {
            let mut case = Case::new();
            let x = case.floats("x", &[1, 64], &values);
            let q8 = DType::Block(gguf::TensorType::Q8_0);
            let round = case.graph.round(x, q8).unwrap();
            let rows = case.graph.push(Op::QuantizeRows, &[x], "q").unwrap();
            let out = case.run(&cpu, &[round, rows]).unwrap();
            let round = to_floats(&out[0]);
            assert!(round[..32].iter().all(|x| x.is_finite()));
            assert!(round[32..].iter().any(|x| !x.is_finite()));
            let scales = to_floats(&out[1][64..72]);
            assert!(scales[0].is_finite() && !scales[1].is_finite());
        }
    }
}

#[test]
fn indices_out_of_range_are_faults() {
    let cpu = Cpu::new(2, None).unwrap();
    let fault = |build: &dyn Fn(&mut Case) -> NodeId, what: &str| {
        let mut case = Case::new();
        let out = build(&mut case);
        let fault = case.run(&cpu, &[out]).map(|_| ()).unwrap_err();
        assert_eq!((fault.code, &*fault.node), (Code::IndexOutOfRange, "node"));
        assert!(fault.message.contains(what), "{}", fault.message);
    };
    for bad in [-1, 5, i32::MIN, i32::MAX] {
        let text = bad.to_string();
        fault(
            &|c| {
                let table = c.floats("table", &[5, 4], &[0.0; 20]);
                let ids = c.ints("ids", &[2], &[4, bad]);
                c.graph.gather(table, ids, "node").unwrap()
            },
            &text,
        );
        fault(
            &|c| {
                let x = c.floats("x", &[2, 4], &[0.0; 8]);
                let ids = c.ints("ids", &[2], &[0, bad]);
                c.graph.push(Op::ScatterAdd { rows: 5 }, &[ids, x], "node").unwrap()
            },
            &text,
        );
    }
    for bad in [2, i32::MAX] {
        let text = bad.to_string();
        fault(
            &|c| {
                let x = c.floats("x", &[2, 2], &[0.0; 4]);
                let labels = c.ints("labels", &[2], &[-1, bad]);
                c.graph
                    .push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[x, labels], "node")
                    .unwrap()
            },
            &text,
        );
        fault(
            &|c| {
                let x = c.floats("x", &[2, 2], &[0.0; 4]);
                let rows = c.ints("rows", &[2], &[-1, bad]);
                let one = c.floats("one", &[1], &[1.0]);
                let args = [x, x, rows, x, x, one, x, x, one];
                c.graph.push(Op::Lora { slots: 2 }, &args, "node").unwrap()
            },
            &text,
        );
    }
}

/// Sizes of nothing run, and give nothing or zeros.
#[test]
fn empty_operands_are_sums_of_nothing() {
    for cpu in devices() {
        let mut case = Case::new();
        let x = case.floats("x", &[0, 32], &[]);
        let w = case.floats("w", &[32], &[1.0; 32]);
        let ids = case.ints("ids", &[0], &[]);
        let inner = case.floats("inner", &[0, 2], &[]);
        let g = &mut case.graph;
        let lora = |wrt| Op::LoraBack { slots: 1, wrt, slot: 0 };
        let norm = Op::RmsNormBack { eps: Real::new(1e-5), wrt: NormOperand::Weight };
        let outputs = [
            g.rms_norm(x, w, 1e-5).unwrap(),
            g.push(Op::QuantizeRows, &[x], "q").unwrap(),
            g.push(Op::ScatterAdd { rows: 3 }, &[ids, x], "s").unwrap(),
            g.sum(x, &[0]).unwrap(),
            g.sum(x, &[0, 1]).unwrap(),
            g.push(norm, &[x, w, x], "n").unwrap(),
            g.push(lora(LoraOperand::A), &[x, inner, ids], "a").unwrap(),
            g.push(lora(LoraOperand::B), &[inner, x, ids], "b").unwrap(),
            g.push(Op::Pad { dim: 0, before: 1, after: 1 }, &[x], "p").unwrap(),
            g.concat(&[x, x], 1).unwrap(),
        ];
        let sizes = [0, 0, 96, 32, 1, 32, 64, 64, 64, 0];
        let out = case.run(&cpu, &outputs).unwrap();
        for (i, (bytes, size)) in out.iter().zip(sizes).enumerate() {
            let values = to_floats(bytes);
            assert!(values.len() == size && values.iter().all(|&x| x == 0.0), "output {i}");
        }
    }
}

/// P7: tiles of simple ops hold about 8,192 elements, and a quarter where each takes an
/// exponential: few microseconds, whatever the shape. A stop is asked for after each.
#[test]
fn p7_tiles_hold_a_few_thousand_elements() {
    use graph::{NormKind, Order, SoftmaxAttrs, Unary};

    let plain = CrossEntropyAttrs { weighted: false, softcap: None, scale: 1.0.into() };
    let back = |wrt| Op::RmsNormBack { eps: 1e-5.into(), wrt };
    let norm = Op::Norm { kind: NormKind::Layer, eps: 1e-5.into() };
    let norm_back = Op::NormBack { kind: NormKind::Layer, eps: 1e-5.into() };
    let angles = RopeAngles {
        dims: 76,
        base: Real::new(1e4),
        freq_scale: Real::new(1.0),
        factors: false,
        yarn: None,
        sections: None,
    };
    let (x, labels) = (&[512, 200][..], &[512][..]);
    let ops: [(Op, &[&[usize]], usize); 20] = [
        (Op::Unary(Unary::Neg), &[x], 13),
        (Op::Softmax(SoftmaxAttrs::PLAIN), &[x], 52),
        (Op::LogSoftmax, &[x], 52),
        (Op::SoftmaxBack { scale: 1.0.into() }, &[x, x], 13),
        (norm, &[x], 13),
        (norm_back, &[x, x], 13),
        (back(NormOperand::X), &[x, &[200], x], 13),
        (Op::CrossEntropy(plain), &[x, labels], 13),
        (Op::CrossEntropyBack(plain), &[x, labels, labels], 13),
        (Op::Sum { dims: 0b10 }, &[x], 13),
        // Vectors of 64 results.
        (Op::Sum { dims: 0b01 }, &[x], 4),
        (Op::Sum { dims: 0b101 }, &[&[64, 50, 40]], 17),
        (Op::CumSum { dim: 1, reverse: false }, &[x], 13),
        (Op::CumSum { dim: 0, reverse: false }, &[x], 13),
        (Op::Copy, &[x], 13),
        (Op::Gather, &[x, labels], 13),
        // Of 300 rows; each tile looks at all ids.
        (Op::ScatterAdd { rows: 300 }, &[labels, x], 8),
        (Op::RopeTable(angles), &[labels], 16),
        (Op::Rope { style: RopeStyle::Halves, inverse: true }, &[&[512, 2, 100], &[512, 76]], 13),
        // An element is compared some times.
        (Op::TopK { k: 2, order: Order::Descending }, &[x], 103),
    ];
    let cpu = Cpu::new(1, None).unwrap();
    for (op, operands, expected) in ops {
        let mut case = Case::new();
        let ids = usize::from(!matches!(op, Op::ScatterAdd { .. } | Op::RopeTable(_)));
        let integer = |i: usize| i == ids && operands[i] == labels;
        let args: Vec<NodeId> = (0..operands.len())
            .map(|i| match integer(i) {
                true => case.ints(&format!("x{i}"), operands[i], &[3; 512]),
                false => case.random(&format!("x{i}"), operands[i], &mut Random(i as u64)),
            })
            .collect();
        let name = op.name();
        let y = case.graph.push(op, &args, "y").unwrap();
        let asked = Every::new(usize::MAX);
        case.run_in_pieces(&cpu, &[y], &asked).unwrap();
        assert_eq!(asked.0.into_inner(), expected, "tiles of {name}");
    }
}

/// P7, and that a tile is worth claiming: products with experts have a tile for some panels of an
/// expert, or of a row where rows are few; gradients of experts one for a block of each.
#[test]
fn p7_products_with_experts_are_cut_by_their_work() {
    let cpu = Cpu::new(1, None).unwrap();
    let count = |t: usize, u: usize, dims: [usize; 3], dtype: Option<DType>| {
        let (mut case, [experts, n, k]) = (Case::new(), dims);
        let x = case.floats("x", &[t, 1, k], &vec![1.0; t * k]);
        let w = match dtype {
            Some(dtype) => {
                let bytes = vec![0; shape(&dims).bytes(dtype).unwrap()];
                case.weight("w", dtype, &dims, &bytes)
            }
            None => case.floats("w", &dims, &vec![1.0; experts * n * k]),
        };
        let ids: Vec<i32> = (0..t * u).map(|i| (i % experts) as i32).collect();
        let ids = case.ints("ids", &[t, u], &ids);
        let y = case.graph.push(Op::MatMulExperts { tb: true }, &[x, w, ids], "y").unwrap();
        let asked = Every::new(usize::MAX);
        case.run_in_pieces(&cpu, &[y], &asked).unwrap();
        asked.0.into_inner()
    };
    let half = Some(DType::F16);
    // Rows alone: 2 of 7 parts; in company, one more of them: 4 experts.
    assert_eq!(count(1, 2, [4, 512, 1024], half), 14);
    assert_eq!(count(7, 1, [4, 512, 1024], half), 49);
    assert_eq!(count(8, 1, [4, 512, 1024], half), 4);
    // About ten rows an expert, and a hundred, of which a round takes 48; between rounds it is asked
    // once more.
    assert_eq!(count(20, 1, [4, 256, 2048], half), 8);
    assert_eq!(count(200, 1, [2, 512, 512], half), 3 * 8 + 2);
    // In memory: pairs of panels, and not more than a tile packs.
    assert_eq!(count(200, 1, [2, 640, 600], None), 3 * 8 + 2);
    assert_eq!(count(200, 1, [2, 512, 300], None), 3 * 6 + 2);

    let mut case = Case::new();
    let a = case.floats("a", &[3, 1, 500], &[1.0; 1500]);
    let b = case.floats("b", &[3, 1, 400], &[1.0; 1200]);
    let ids = case.ints("ids", &[3, 1], &[0, 1, 1]);
    let y = case.graph.push(Op::ExpertOuter { experts: 2 }, &[a, b, ids], "y").unwrap();
    let asked = Every::new(usize::MAX);
    case.run_in_pieces(&cpu, &[y], &asked).unwrap();
    assert_eq!(asked.0.into_inner(), 18);
}

/// P7: of an expert that most rows chose each round takes some. Wherever it is stopped, a row's
/// product is what it is alone, and the gradient of an expert the sum over the rows that chose it.
#[test]
fn p7_rows_that_chose_one_expert_come_in_rounds() {
    let (rows, experts, n, k) = (200, 3, 40, 700);
    let mut random = Random(18);
    let (x, w) = (random.floats(rows * k), random.floats(experts * n * k));
    let dy = random.floats(rows * n);
    // Few rows chose the first, none the last.
    let ids: Vec<i32> = (0..rows).map(|i| i32::from(i % 20 > 0)).collect();
    let run = |cpu: &Cpu, range: std::ops::Range<usize>, every: usize| {
        let (mut case, t) = (Case::new(), range.len());
        let part = case.floats("x", &[t, 1, k], &x[range.start * k..range.end * k]);
        let of_y = case.floats("dy", &[t, 1, n], &dy[range.start * n..range.end * n]);
        let w = case.floats("w", &[experts, n, k], &w);
        let ids = case.ints("ids", &[t, 1], &ids[range]);
        let op = Op::MatMulExperts { tb: true };
        let y = case.graph.push(op, &[part, w, ids], "y").unwrap();
        let op = Op::ExpertOuter { experts };
        let dw = case.graph.push(op, &[of_y, part, ids], "dw").unwrap();
        let asked = Every::new(every);
        let out = case.run_in_pieces(cpu, &[y, dw], &asked).unwrap();
        let [y, dw] = [0, 1].map(|i| to_floats(&out[i]));
        (y, dw, asked.0.into_inner())
    };
    let mut sums = vec![0.0; experts * n * k];
    for i in 0..rows {
        for (at, sum) in sums[ids[i] as usize * n * k..][..n * k].iter_mut().enumerate() {
            *sum += f64::from(dy[i * n + at / k]) * f64::from(x[i * k + at % k]);
        }
    }
    for cpu in devices() {
        let (y, dw, asked) = run(&cpu, 0..rows, usize::MAX);
        let (_, _, few) = run(&cpu, 0..48, usize::MAX);
        assert!(asked > 2 * few, "{asked} and {few} tiles");
        // Measured: 3.4e-6, a chain of 190.
        assert_close(&dw, &sums, 6e-6, &format!("{cpu:?}"));
        for every in [1, 7] {
            let (same, of_w, _) = run(&cpu, 0..rows, every);
            assert!(same == y && of_w == dw, "{cpu:?}: every {every}");
        }
        for i in [0, 1, 60, 120, 199] {
            let (alone, ..) = run(&cpu, i..i + 1, usize::MAX);
            assert!(alone == y[i * n..(i + 1) * n], "{cpu:?}: row {i}");
        }
    }
}

/// Columns of an expert that take several tiles, the last of them with few, whether rows are alone
/// or in company, and weights packed or in memory.
#[test]
fn products_with_experts_of_several_tiles_match_f64() {
    let (experts, n, k) = (2, 90, 8192);
    let mut random = Random(16);
    let w = random.floats(experts * n * k);
    let bytes: Vec<u8> = w.iter().flat_map(|x| x.to_le_bytes()).collect();
    for t in [3, 5] {
        let x = random.floats(t * k);
        let ids: Vec<i32> = (0..t).map(|i| i as i32 % 2).collect();
        let row = |i: usize, j: usize| -> f64 {
            let w = &w[(i % 2 * n + j) * k..][..k];
            w.iter().zip(&x[i * k..]).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
        };
        let expected: Vec<f64> = (0..t * n).map(|i| row(i / n, i % n)).collect();
        for cpu in devices() {
            for packed in [false, true] {
                let mut case = Case::new();
                let rows = case.floats("x", &[t, 1, k], &x);
                let w = match packed {
                    true => case.weight("w", DType::F32, &[experts, n, k], &bytes),
                    false => case.floats("w", &[experts, n, k], &w),
                };
                let ids = case.ints("ids", &[t, 1], &ids);
                let op = Op::MatMulExperts { tb: true };
                let y = case.graph.push(op, &[rows, w, ids], "y").unwrap();
                let got = to_floats(&case.run(&cpu, &[y]).unwrap()[0]);
                let what = format!("{cpu:?}, {t} rows, packed {packed}");
                // Measured: 4.6e-6, a chain of 8,192.
                assert_close(&got, &expected, 8e-6, &what);
            }
        }
    }
}
