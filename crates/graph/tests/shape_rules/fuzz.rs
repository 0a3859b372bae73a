//! Ops on operands that do not fit, or nearly do: an error each time, never a panic, never a
//! value that could not be addressed.

use std::collections::BTreeSet;

use gguf::TensorType;
use gradus_graph::*;

use crate::common::{Rng, any_layout};
use crate::table::table;
use crate::{number, parse};

fn random_dims(rng: &mut Rng) -> Vec<usize> {
    let huge = [1 << 23, 1 << 32, (1 << 46) - 1, 1 << 46, usize::MAX / 4, usize::MAX];
    if rng.chance(80) {
        return (0..1 + rng.below(3)).map(|_| rng.pick(&[1, 2, 2, 2, 2, 32])).collect();
    }
    (0..rng.below(8))
        .map(|_| match rng.below(12) {
            0 => 0,
            1 => rng.pick(&huge),
            2 => 32 * rng.below(10),
            n => n % 5,
        })
        .collect()
}

fn random_number(rng: &mut Rng) -> usize {
    rng.pick(&[0, 0, 1, 1, 2, 3, 4, 31, 32, 255, 1 << 46, usize::MAX - 1, usize::MAX])
}

fn random_op(rng: &mut Rng) -> Op {
    let real = |rng: &mut Rng| {
        Real::new(rng.pick(&[0.0, 1.0, -1.0, 1e-5, 1e4, f32::MAX, f32::INFINITY, f32::NAN, 1e-45]))
    };
    let dtype = |rng: &mut Rng| rng.pick(&ALL_DTYPES);
    let attrs = |rng: &mut Rng| AttentionAttrs {
        scale: if rng.chance(80) { 0.5.into() } else { real(rng) },
        window: if rng.chance(80) { None } else { Some(rng.next() as u32 % 3) },
        chunk: if rng.chance(80) { None } else { Some(rng.next() as u32 % 3) },
        softcap: if rng.chance(80) { None } else { Some(real(rng)) },
        alibi: if rng.chance(80) { None } else { Some(real(rng)) },
        sinks: rng.chance(20),
        prefix: rng.chance(40),
    };
    let delta = |rng: &mut Rng| GatedDeltaAttrs {
        scale: if rng.chance(80) { 0.5.into() } else { real(rng) },
        key_heads: rng.pick(&[KeyHeads::Blocks, KeyHeads::Cycle]),
    };
    let loss = |rng: &mut Rng| CrossEntropyAttrs {
        scale: if rng.chance(80) { 1.0.into() } else { real(rng) },
        softcap: if rng.chance(80) { None } else { Some(real(rng)) },
        weighted: rng.chance(40),
    };
    let shape = |rng: &mut Rng| loop {
        if let Ok(shape) = Shape::new(&random_dims(rng)) {
            return shape;
        }
    };
    let slots = |rng: &mut Rng| rng.pick(&[0, 1, 1, 1, 2, 2, usize::MAX / 3, usize::MAX]);
    let dim = |rng: &mut Rng| rng.pick(&[0, 0, 0, 1, 1, 2, 5, 6, 7, 8, 64, 255]);
    let kind = rng.pick(&GluKind::ALL);
    let norm = rng.pick(&NormKind::ALL);
    let soft = |rng: &mut Rng| SoftmaxAttrs {
        scale: real(rng),
        mask: rng.chance(50),
        max_bias: if rng.chance(50) { 0.0.into() } else { real(rng) },
        sinks: rng.chance(50),
    };
    match rng.below(55) {
        54 => Op::Dropout(Dropout { p: real(rng), site: 3 }),
        50 => Op::MatMulExperts { tb: rng.chance(50) },
        51 => Op::ExpertOuter { experts: random_number(rng) },
        52 => Op::LoraExperts { slots: slots(rng) },
        53 => Op::LoraExpertsBack {
            slots: slots(rng),
            wrt: rng.pick(&[LoraOperand::X, LoraOperand::A, LoraOperand::B]),
            slot: rng.pick(&[0, 1, usize::MAX]),
        },
        31 => Op::Clamp { min: real(rng), max: real(rng) },
        32 => Op::ClampBack { min: real(rng), max: real(rng) },
        33 => Op::Fill { value: real(rng), shape: shape(rng) },
        34 => Op::CumSum { dim: dim(rng), reverse: rng.chance(50) },
        35 => Op::TopK { k: random_number(rng), order: Order::Ascending },
        36 => Op::Softmax(soft(rng)),
        37 => Op::SoftmaxBack { scale: real(rng) },
        38 => Op::SoftmaxSinkBack(soft(rng)),
        39 => Op::LogSoftmax,
        40 => Op::Norm { kind: norm, eps: real(rng) },
        41 => Op::NormBack { kind: norm, eps: real(rng) },
        0 => Op::Leaf,
        1 => Op::Binary(rng.pick(&[Binary::Add, Binary::Sub, Binary::Mul, Binary::Div])),
        2 => Op::Unary(rng.pick(&Unary::ALL)),
        3 => Op::Affine { scale: real(rng), bias: real(rng) },
        4 => Op::Glu(kind),
        5 => Op::GluBack { kind, wrt: rng.pick(&[GluOperand::Gate, GluOperand::Up]) },
        6 => Op::Sum { dims: rng.next() as u8 },
        7 => Op::Broadcast { shape: shape(rng) },
        8 => Op::Reshape { shape: shape(rng) },
        9 => {
            let n = rng.below(7);
            let mut perm = rng.permutation(n);
            if rng.chance(20) {
                perm.push(dim(rng));
            }
            Op::Permute { perm }
        }
        10 => Op::Slice { dim: dim(rng), start: random_number(rng), len: random_number(rng) },
        11 => Op::Pad { dim: dim(rng), before: random_number(rng), after: random_number(rng) },
        12 => Op::Concat { dim: dim(rng) },
        13 => Op::Copy,
        14 => Op::Cast { dtype: dtype(rng) },
        15 => Op::Round { dtype: dtype(rng) },
        16 => Op::QuantizeRows,
        17 => Op::Gather,
        18 => Op::ScatterAdd { rows: random_number(rng) },
        19 => Op::RmsNorm { eps: real(rng) },
        20 => {
            let wrt = rng.pick(&[NormOperand::X, NormOperand::Weight]);
            Op::RmsNormBack { eps: real(rng), wrt }
        }
        21 => Op::RopeTable(RopeAngles {
            dims: random_number(rng),
            base: if rng.chance(80) { 1e4.into() } else { real(rng) },
            freq_scale: if rng.chance(80) { 1.0.into() } else { real(rng) },
            factors: rng.chance(30),
            yarn: None,
            sections: None,
        }),
        22 => Op::Rope { style: RopeStyle::Halves, inverse: rng.chance(50) },
        23 => Op::MatMul { ta: rng.chance(50), tb: rng.chance(50) },
        24 => Op::Lora { slots: slots(rng) },
        25 => Op::LoraBack {
            slots: slots(rng),
            wrt: rng.pick(&[LoraOperand::X, LoraOperand::A, LoraOperand::B]),
            slot: rng.pick(&[0, 1, usize::MAX]),
        },
        26 => Op::Attention(attrs(rng)),
        27 => Op::AttentionQueryBack(attrs(rng)),
        28 => Op::AttentionBack {
            attrs: attrs(rng),
            wrt: rng.pick(&[
                AttentionOperand::Own,
                AttentionOperand::Sinks,
                AttentionOperand::Pages,
            ]),
        },
        42 => Op::SsmConv,
        43 => Op::SsmConvBack {
            wrt: rng.pick(&[SsmConvOperand::X, SsmConvOperand::Weight, SsmConvOperand::State]),
        },
        44 => Op::SsmConvState,
        45 => Op::SsmConvStateBack {
            wrt: rng.pick(&[SsmConvStateOperand::X, SsmConvStateOperand::State]),
        },
        46 => Op::SsmScan,
        47 => Op::SsmScanBack { parts: rng.pick(&[0, 1, 1, 2, usize::MAX]) },
        48 => Op::GatedDeltaRule(delta(rng)),
        29 => Op::CrossEntropy(loss(rng)),
        30 => Op::CrossEntropyBack(loss(rng)),
        _ => Op::GatedDeltaRuleBack(delta(rng)),
    }
}

const ALL_DTYPES: [DType; 9] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::I32,
    DType::Q8Rows,
    DType::Int16Rows,
    DType::Block(TensorType::Q8_0),
    DType::Block(TensorType::Q4_0),
    DType::Block(TensorType::Q6K),
];

/// A node whose value could not be addressed would break every device.
fn sound(node: &Node) {
    let dims = node.shape.dims();
    assert!(dims.len() <= MAX_RANK);
    let mut all = 1usize;
    for &d in dims {
        all = all.checked_mul(d.max(1)).expect("sizes overflow");
    }
    assert!(all <= 1 << 46);
    assert!(node.shape.bytes(node.dtype).is_some(), "{} {}", node.dtype, node.shape);
    assert!(node.shape.strides().iter().all(|&s| s <= 1 << 46));
}

/// Operands of the table, each moved a little: what is just right, and what just is not.
#[test]
fn ops_on_operands_that_nearly_fit_never_panic() {
    let cases = table();
    let (mut taken, mut refused) = (0, 0);
    for round in 0..6 {
        let mut rng = Rng(round << 32);
        for case in &cases {
            for (operands, _) in case.taken.iter().chain(&case.refused) {
                let mut g = Graph::new();
                let mut args = Vec::new();
                let texts = operands.split(';').map(str::trim).filter(|t| !t.is_empty());
                for (i, text) in texts.enumerate() {
                    let (mut dtype, shape) = parse(text);
                    let mut dims = shape.dims().to_vec();
                    if rng.chance(15) {
                        dtype = rng.pick(&ALL_DTYPES);
                    }
                    match rng.below(10) {
                        0 if !dims.is_empty() => {
                            let d = rng.below(dims.len());
                            dims[d] = random_number(&mut rng);
                        }
                        1 => dims.insert(rng.below(dims.len() + 1), 1),
                        2 => drop(dims.pop()),
                        _ => {}
                    }
                    let Ok(shape) = Shape::new(&dims) else { continue };
                    args.extend(g.leaf(&format!("x{i}"), shape, dtype));
                }
                if rng.chance(10) {
                    args.pop();
                } else if let (true, Some(&x)) = (rng.chance(10), args.first()) {
                    args.push(x);
                }
                match g.push(case.op.clone(), &args, "n") {
                    Ok(id) => {
                        sound(g.node(id));
                        taken += 1;
                    }
                    Err(e) => {
                        assert!(e.message.starts_with(case.op.name()), "{e}");
                        assert!(!e.message.contains('\n'));
                        refused += 1;
                    }
                }
            }
        }
    }
    println!("{taken} taken, {refused} refused");
    assert!(taken > 300 && refused > 1000);
}

#[test]
fn random_ops_on_random_operands_never_panic() {
    let (mut taken, mut refused) = (BTreeSet::new(), 0);
    for seed in 0..400 {
        let mut rng = Rng(seed << 24);
        let mut g = Graph::new();
        let mut pool = Vec::new();
        for i in 0..12 {
            let common = [DType::F32, DType::F32, DType::F32, DType::I32];
            let usual = rng.chance(80);
            let dtype = rng.pick(if usual { &common[..] } else { &ALL_DTYPES });
            let dims = random_dims(&mut rng);
            if let Ok(shape) = Shape::new(&dims) {
                pool.extend(g.leaf(&format!("x{i}"), shape, dtype));
            }
        }
        for _ in 0..150 {
            let op = random_op(&mut rng);
            let usual = match number(&op) {
                1 | 4 | 12 | 17..=19 | 22 | 23 | 29 => 2,
                5 | 20 | 27 | 30 => 3,
                25 | 43 => 5,
                24 => 6,
                44 | 54 => 3,
                42 | 45 => 4,
                46 | 48 => 7,
                47 | 49 => 8,
                26 => rng.pick(&[4, 7]),
                28 => rng.pick(&[7, 10]),
                _ => 1,
            };
            let n = if rng.chance(90) { usual } else { rng.below(8) };
            let args: Vec<NodeId> =
                (0..n).filter(|_| !pool.is_empty()).map(|_| rng.pick(&pool)).collect();
            match g.push(op.clone(), &args, "n") {
                Ok(id) => {
                    sound(g.node(id));
                    pool.push(id);
                    taken.insert(number(&op));
                }
                Err(e) => {
                    assert!(e.message.starts_with(op.name()), "{e}");
                    refused += 1;
                }
            }
        }
        // Whatever was built can be differentiated or refused, and planned, without a panic.
        let Some(&y) = pool.last() else { continue };
        let Node { dtype, shape, .. } = *g.node(y);
        let dy = g.leaf("dy", shape, DType::F32).unwrap();
        for &wrt in pool.iter().take(6) {
            match vjp(&g, &[(y, dy)], &[wrt]) {
                Ok(back) => {
                    for id in back.graph.ids() {
                        sound(back.graph.node(id));
                    }
                    let outputs = [back.grads[0], y];
                    let plan = plan(&back.graph, &outputs, &any_layout()).unwrap();
                    assert!(plan.arena_bytes >= plan.outputs[0].range.len());
                }
                Err(Error::Invalid(_)) => assert!(matches!(dtype, DType::I32 | DType::Block(_))),
                Err(e) => assert_ne!(e.code(), Code::BrokenRule, "{e}"),
            }
        }
    }
    println!("{} ops taken, {refused} pushes refused", taken.len());
    assert!(taken.len() > 22, "{taken:?}");
}
