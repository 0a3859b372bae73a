//! The interpreter against values worked out by hand: at least one for every op.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::slice::from_ref;

use graph::*;
use reference::{Leaves, Mode, Value, eval};

const LN2: f64 = std::f64::consts::LN_2;
const LN3: f64 = 1.0986122886681098;
const LN6: f64 = LN2 + LN3;

fn f(dims: &[usize], data: &[f64]) -> Value {
    Value::floats(Shape::new(dims).unwrap(), data.to_vec()).unwrap()
}

fn i(dims: &[usize], data: &[i32]) -> Value {
    Value::ints(Shape::new(dims).unwrap(), data.to_vec()).unwrap()
}

fn try_run(op: Op, args: &[Value], mode: Mode) -> Result<Value> {
    let mut graph = Graph::new();
    let mut leaves = Leaves::new();
    let mut ids = Vec::new();
    for (n, arg) in args.iter().enumerate() {
        let dtype = if arg.as_ints().is_some() { DType::I32 } else { DType::F32 };
        let id = graph.leaf(&format!("operand {n}"), arg.shape(), dtype)?;
        leaves.insert(id, arg.clone());
        ids.push(id);
    }
    let y = graph.push(op, &ids, "the node")?;
    Ok(eval(&graph, &leaves, &[y], mode)?.remove(0))
}

fn run(op: Op, args: &[Value]) -> Value {
    try_run(op, args, Mode::Exact).unwrap()
}

#[track_caller]
fn close(got: &Value, dims: &[usize], expected: &[f64]) {
    assert_eq!(got.shape().dims(), dims);
    for (n, (got, expected)) in got.as_floats().unwrap().iter().zip(expected).enumerate() {
        let near = (got - expected).abs() <= 1e-12 * expected.abs().max(1.0);
        assert!(near, "element {n} is {got}, expected {expected}");
    }
    assert_eq!(got.as_floats().unwrap().len(), expected.len());
}

/// Expects an index fault that names the node.
#[track_caller]
fn outside(op: Op, args: &[Value], what: &str) {
    let error = try_run(op, args, Mode::Exact).unwrap_err();
    assert_eq!(error.code(), Code::IndexOutOfRange, "{error}");
    let message = error.to_string();
    assert!(message.contains("`the node`") && message.contains(what), "{message}");
}

#[test]
fn elementwise() {
    let (a, b) = (f(&[2, 2], &[1.0, 2.0, 3.0, 4.0]), f(&[2], &[10.0, 20.0]));
    let of = |kind| run(Op::Binary(kind), &[a.clone(), b.clone()]);
    close(&of(Binary::Add), &[2, 2], &[11.0, 22.0, 13.0, 24.0]);
    close(&of(Binary::Sub), &[2, 2], &[-9.0, -18.0, -7.0, -16.0]);
    close(&of(Binary::Mul), &[2, 2], &[10.0, 40.0, 30.0, 80.0]);
    close(&of(Binary::Div), &[2, 2], &[0.1, 0.1, 0.3, 0.2]);
    let column = f(&[2, 1], &[1.0, 2.0]);
    let outer = run(Op::Binary(Binary::Mul), &[column, b]);
    close(&outer, &[2, 2], &[10.0, 20.0, 20.0, 40.0]);

    let unary = |kind, x: f64| run(Op::Unary(kind), &[f(&[1], &[x])]);
    close(&unary(Unary::Tanh, LN2), &[1], &[0.6]);
    close(&unary(Unary::Sigmoid, LN3), &[1], &[0.75]);
    close(&unary(Unary::Silu, LN3), &[1], &[0.75 * LN3]);
    close(&unary(Unary::Exp, LN6), &[1], &[6.0]);
    close(&unary(Unary::Log, 6.0), &[1], &[LN6]);
    // From a table of GELU in its tanh form.
    close(&unary(Unary::Gelu, 1.0), &[1], &[0.841_191_990_608_276_8]);
    let affine = Op::Affine { scale: 0.5.into(), bias: (-3.0).into() };
    close(&run(affine, &[f(&[2], &[2.0, 4.0])]), &[2], &[-2.0, -1.0]);
}

#[test]
fn gated_units() {
    let (gate, up, dy) = (f(&[1], &[LN3]), f(&[1], &[4.0]), f(&[1], &[10.0]));
    let glu = |kind| run(Op::Glu(kind), &[gate.clone(), up.clone()]);
    close(&glu(GluKind::Swiglu), &[1], &[3.0 * LN3]);
    let args = [gate, up, dy];
    let back = |wrt| run(Op::GluBack { kind: GluKind::Swiglu, wrt }, &args);
    close(&back(GluOperand::Up), &[1], &[7.5 * LN3]);
    // silu' = s + x s (1 - s) with s = 3/4
    close(&back(GluOperand::Gate), &[1], &[40.0 * (0.75 + LN3 * 0.75 * 0.25)]);
    let one = f(&[1], &[1.0]);
    let gelu = run(Op::Glu(GluKind::Geglu), &[one.clone(), f(&[1], &[2.0])]);
    close(&gelu, &[1], &[2.0 * 0.841_191_990_608_276_8]);
    let back = Op::GluBack { kind: GluKind::Geglu, wrt: GluOperand::Up };
    close(&run(back, &[one.clone(), one.clone(), one]), &[1], &[0.841_191_990_608_276_8]);
}

#[test]
fn layout() {
    let x = f(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let with = |op| run(op, from_ref(&x));
    close(&with(Op::Sum { dims: 1 }), &[1, 3], &[5.0, 7.0, 9.0]);
    close(&with(Op::Sum { dims: 2 }), &[2, 1], &[6.0, 15.0]);
    close(&with(Op::Sum { dims: 3 }), &[1, 1], &[21.0]);
    close(&with(Op::Permute { perm: vec![1, 0] }), &[3, 2], &[1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let shape = Shape::new(&[3, 2]).unwrap();
    close(&with(Op::Reshape { shape }), &[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    close(&with(Op::Copy), &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    close(&with(Op::Slice { dim: 1, start: 1, len: 2 }), &[2, 2], &[2.0, 3.0, 5.0, 6.0]);
    let padded = with(Op::Pad { dim: 0, before: 1, after: 1 });
    close(&padded, &[4, 3], &[0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0, 0.0]);
    let shape = Shape::new(&[2, 2, 2]).unwrap();
    let wide = run(Op::Broadcast { shape }, &[f(&[2, 1], &[1.0, 2.0])]);
    close(&wide, &[2, 2, 2], &[1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]);
    let joined = run(Op::Concat { dim: 1 }, &[x.clone(), f(&[2, 1], &[7.0, 8.0])]);
    close(&joined, &[2, 4], &[1.0, 2.0, 3.0, 7.0, 4.0, 5.0, 6.0, 8.0]);
    // Three dimensions: output dimension i is input dimension perm[i].
    let x = f(&[1, 2, 3], &[0.0, 1.0, 2.0, 10.0, 11.0, 12.0]);
    let turned = run(Op::Permute { perm: vec![2, 0, 1] }, &[x]);
    close(&turned, &[3, 1, 2], &[0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
    let ids = run(Op::Slice { dim: 0, start: 1, len: 2 }, &[i(&[3], &[7, 8, 9])]);
    assert_eq!(ids.as_ints(), Some(&[8, 9][..]));
}

#[test]
fn rounding_ops() {
    let q8 = DType::Block(gguf::TensorType::Q8_0);
    // With 127 as the largest magnitude the scale is 1.
    let mut row = vec![0.0; 32];
    row[..6].copy_from_slice(&[127.0, 0.5, 1.5, -2.5, 3.25, -0.5]);
    let x = f(&[1, 32], &row);
    let quantized = run(Op::QuantizeRows, from_ref(&x));
    close_prefix(&quantized, &[127.0, 0.0, 2.0, -2.0, 3.0, 0.0]);
    let rounded = run(Op::Round { dtype: q8 }, from_ref(&x));
    close_prefix(&rounded, &[127.0, 1.0, 2.0, -3.0, 3.0, -1.0]);
    assert_eq!(run(Op::Cast { dtype: q8 }, from_ref(&x)), rounded);
    for op in [Op::QuantizeRows, Op::Round { dtype: q8 }, Op::Cast { dtype: q8 }] {
        assert_eq!(try_run(op, from_ref(&x), Mode::Smooth).unwrap(), x);
    }

    // Halfway between neighbours goes to the even one; f64 is rounded to f32 first.
    let ulp = f64::powi(2.0, -10);
    let x = f(&[3], &[1.0 + ulp / 2.0, 1.0 + 1.5 * ulp, 1.0 + ulp / 2.0 + f64::EPSILON]);
    let expected = [1.0, 1.0 + 2.0 * ulp, 1.0];
    close(&run(Op::Round { dtype: DType::F16 }, from_ref(&x)), &[3], &expected);
    close(&run(Op::Cast { dtype: DType::F16 }, &[x]), &[3], &expected);
    let x = f(&[1], &[1.0 + f64::powi(2.0, -8)]);
    close(&run(Op::Round { dtype: DType::BF16 }, from_ref(&x)), &[1], &[1.0]);
    assert_eq!(run(Op::Round { dtype: DType::F32 }, from_ref(&x)), x);
}

#[track_caller]
fn close_prefix(got: &Value, expected: &[f64]) {
    assert_eq!(&got.as_floats().unwrap()[..expected.len()], expected);
}

#[test]
fn indexing() {
    let table = f(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let rows = run(Op::Gather, &[table.clone(), i(&[3], &[2, 0, 2])]);
    close(&rows, &[3, 2], &[5.0, 6.0, 1.0, 2.0, 5.0, 6.0]);
    let sums = run(Op::ScatterAdd { rows: 4 }, &[i(&[3], &[2, 0, 2]), table.clone()]);
    close(&sums, &[4, 2], &[3.0, 4.0, 0.0, 0.0, 6.0, 8.0, 0.0, 0.0]);
    outside(Op::Gather, &[table.clone(), i(&[1], &[3])], "row id 3 is outside of 0..3");
    outside(Op::Gather, &[table.clone(), i(&[1], &[-1])], "row id -1");
    outside(Op::ScatterAdd { rows: 2 }, &[i(&[3], &[0, 1, 2]), table], "row id 2");
}

#[test]
fn norms() {
    let (x, w) = (f(&[1, 2], &[3.0, 4.0]), f(&[2], &[10.0, 100.0]));
    let r = 1.0 / 12.5f64.sqrt();
    let eps = 0.0.into();
    let y = run(Op::RmsNorm { eps }, &[x.clone(), w.clone()]);
    close(&y, &[1, 2], &[30.0 * r, 400.0 * r]);
    let eps = 3.5.into();
    close(&run(Op::RmsNorm { eps }, &[x.clone(), w.clone()]), &[1, 2], &[7.5, 100.0]);
    // r = 1/4, mean(w dy x) = (30 + 800) / 2
    let args = [x, w, f(&[1, 2], &[1.0, 2.0])];
    let back = |wrt| run(Op::RmsNormBack { eps, wrt }, &args);
    let mean = 415.0 / 16.0;
    let expected = [(10.0 - 3.0 * mean) / 4.0, (200.0 - 4.0 * mean) / 4.0];
    close(&back(NormOperand::X), &[1, 2], &expected);
    close(&back(NormOperand::Weight), &[2], &[0.75, 2.0]);
}

#[test]
fn rope() {
    let angles = RopeAngles {
        dims: 4,
        base: 100.0.into(),
        freq_scale: 0.5.into(),
        factors: true,
        yarn: None,
        sections: None,
    };
    let args = [i(&[2], &[2, 0]), f(&[2], &[1.0, 2.0])];
    // Angles 2 / 2 and 2 / 2 / 10 / 2.
    let table = try_run(Op::RopeTable(angles), &args, Mode::Smooth).unwrap();
    let (a, b) = (1.0f64, 0.05f64);
    let expected = [a.cos(), b.cos(), a.sin(), b.sin(), 1.0, 1.0, 0.0, 0.0];
    close(&table, &[2, 4], &expected);
    let rounded = expected.map(|x| f64::from(x as f32));
    close(&run(Op::RopeTable(angles), &args), &[2, 4], &rounded);

    let x = f(&[1, 1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    let table = f(&[1, 4], &[0.6, 0.0, 0.8, 1.0]);
    let turn = |style, inverse| run(Op::Rope { style, inverse }, &[x.clone(), table.clone()]);
    let expected = [0.6 - 1.6, 0.8 + 1.2, -4.0, 3.0, 5.0];
    close(&turn(RopeStyle::Interleaved, false), &[1, 1, 5], &expected);
    let expected = [0.6 - 2.4, -4.0, 0.8 + 1.8, 2.0, 5.0];
    close(&turn(RopeStyle::Halves, false), &[1, 1, 5], &expected);
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        let there = turn(style, false);
        let back = run(Op::Rope { style, inverse: true }, &[there, table.clone()]);
        close(&back, &[1, 1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    }
}

#[test]
fn products() {
    let a = f(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let b = f(&[2, 2], &[10.0, 20.0, 30.0, 40.0]);
    let times = |ta, tb| run(Op::MatMul { ta, tb }, &[a.clone(), b.clone()]);
    close(&times(false, false), &[2, 2], &[70.0, 100.0, 150.0, 220.0]);
    close(&times(false, true), &[2, 2], &[50.0, 110.0, 110.0, 250.0]);
    close(&times(true, false), &[2, 2], &[100.0, 140.0, 140.0, 200.0]);
    close(&times(true, true), &[2, 2], &[70.0, 150.0, 100.0, 220.0]);
    // One matrix for two batches.
    let a = f(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    let y = run(Op::MatMul { ta: false, tb: false }, &[a, b]);
    close(&y, &[2, 1, 2], &[70.0, 100.0, 150.0, 220.0]);
}

#[test]
fn adapters() {
    // Slot 0 has rank 1, slot 1 rank 2; row 1 has no adapter.
    let x = f(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let base = f(&[3, 1], &[100.0, 200.0, 300.0]);
    let rows = i(&[3], &[0, -1, 1]);
    let first = [f(&[1, 2], &[1.0, 10.0]), f(&[1, 1], &[2.0]), f(&[1], &[0.5])];
    let second = [f(&[2, 2], &[1.0, 0.0, 0.0, 1.0]), f(&[1, 2], &[3.0, 4.0]), f(&[1], &[10.0])];
    let mut args = vec![x.clone(), base, rows.clone()];
    args.extend(first.iter().chain(&second).cloned());
    let lora = Op::Lora { slots: 2 };
    close(&run(lora.clone(), &args), &[3, 1], &[121.0, 200.0, 300.0 + 390.0]);
    args[2] = i(&[3], &[0, -1, 2]);
    outside(lora, &args, "adapter slot 2");

    let dy = f(&[3, 1], &[1.0, 1.0, 2.0]);
    let back = |wrt, slot| Op::LoraBack { slots: 2, wrt, slot };
    let mut args = vec![dy.clone(), rows.clone()];
    args.extend(first.iter().chain(&second).cloned());
    let dx = run(back(LoraOperand::X, 0), &args);
    close(&dx, &[3, 2], &[1.0, 10.0, 0.0, 0.0, 60.0, 80.0]);
    // Of slot 1 there is row 2 alone; scale B^T dy is [60, 80], scale A x is [50, 60].
    let inner = f(&[3, 2], &[7.0, 7.0, 7.0, 7.0, 60.0, 80.0]);
    let da = run(back(LoraOperand::A, 1), &[x, inner, rows.clone()]);
    close(&da, &[2, 2], &[300.0, 360.0, 400.0, 480.0]);
    let inner = f(&[3, 2], &[7.0, 7.0, 7.0, 7.0, 50.0, 60.0]);
    let db = run(back(LoraOperand::B, 1), &[inner, dy, rows]);
    close(&db, &[1, 2], &[100.0, 120.0]);
}

#[test]
fn adapters_of_experts() {
    // Two rows choose two of three experts each; row 1 has no adapter. Expert 1 is not chosen by
    // row 0, and expert 2 by none.
    let x = f(&[2, 1, 2], &[1.0, 2.0, 3.0, 4.0]);
    let base = f(&[2, 2, 1], &[100.0, 200.0, 300.0, 400.0]);
    let (rows, ids) = (i(&[2], &[0, -1]), i(&[2, 2], &[0, 0, 1, 0]));
    let a = f(&[3, 1, 2], &[1.0, 10.0, 5.0, 5.0, 7.0, 7.0]);
    let b = f(&[3, 1, 1], &[2.0, 3.0, 4.0]);
    let scale = f(&[1], &[0.5]);
    let lora = Op::LoraExperts { slots: 1 };
    let mut args = vec![x.clone(), base, rows.clone(), ids.clone(), a.clone(), b.clone()];
    args.push(scale.clone());
    close(&run(lora.clone(), &args), &[2, 2, 1], &[121.0, 221.0, 300.0, 400.0]);
    args[3] = i(&[2, 2], &[0, 1, 2, 3]);
    outside(lora.clone(), &args, "expert 3");
    args[3] = ids.clone();
    args[2] = i(&[2], &[1, 0]);
    outside(lora, &args, "adapter slot 1");

    let dy = f(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
    let back = |wrt| Op::LoraExpertsBack { slots: 1, wrt, slot: 0 };
    let args = [dy.clone(), rows.clone(), ids.clone(), a.clone(), b.clone(), scale.clone()];
    let dx = run(back(LoraOperand::X), &args);
    close(&dx, &[2, 2, 2], &[1.0, 10.0, 2.0, 20.0, 0.0, 0.0, 0.0, 0.0]);
    let part = |wrt, other: &Value| {
        run(back(wrt), &[&x, &dy, &rows, &ids, other, &scale].map(Clone::clone))
    };
    close(&part(LoraOperand::A, &b), &[3, 1, 2], &[3.0, 6.0, 0.0, 0.0, 0.0, 0.0]);
    close(&part(LoraOperand::B, &a), &[3, 1, 1], &[31.5, 0.0, 0.0]);
}

fn attention(window: Option<u32>, softcap: Option<f32>, prefix: bool) -> AttentionAttrs {
    let softcap = softcap.map(Into::into);
    AttentionAttrs { window, softcap, prefix, ..AttentionAttrs::new(1.0) }
}

/// One head of width 1, whose logits are 0, ln 2 and ln 3.
fn three_rows() -> [Value; 4] {
    [
        f(&[3, 1, 1], &[1.0, 1.0, 1.0]),
        f(&[3, 1, 1], &[0.0, LN2, LN3]),
        f(&[3, 1, 1], &[6.0, 3.0, 2.0]),
        i(&[1, 3], &[0, 3, 0]),
    ]
}

#[test]
fn attention_by_hand() {
    let args = three_rows();
    let y = run(Op::Attention(attention(None, None, false)), &args);
    close(&y, &[3, 1, 1], &[6.0, 4.0, 3.0]);
    let y = run(Op::Attention(attention(Some(2), None, false)), &args);
    close(&y, &[3, 1, 1], &[6.0, 4.0, 2.4]);
    let y = run(Op::Attention(attention(Some(1), None, false)), &args);
    close(&y, &[3, 1, 1], &[6.0, 3.0, 2.0]);

    // Logits 0 and 100, capped at 1: all but 0 and 1.
    let args = [
        f(&[2, 1, 1], &[1.0, 1.0]),
        f(&[2, 1, 1], &[0.0, 100.0]),
        f(&[2, 1, 1], &[1.0, 0.0]),
        i(&[1, 3], &[0, 2, 0]),
    ];
    let y = run(Op::Attention(attention(None, Some(1.0), false)), &args);
    close(&y, &[2, 1, 1], &[1.0, 1.0 / (1.0 + std::f64::consts::E)]);
}

#[test]
fn attention_of_packed_sequences_and_heads() {
    // Row 0 is nobody's; sequence 0 is rows 2 and 3, sequence 1 is row 1, sequence 2 is empty.
    let args = [
        f(&[4, 1, 1], &[1.0; 4]),
        f(&[4, 1, 1], &[9.0, 5.0, 0.0, LN2]),
        f(&[4, 1, 1], &[f64::NAN, 7.0, 6.0, 3.0]),
        i(&[3, 3], &[2, 2, 0, 1, 1, 0, 4, 0, 0]),
    ];
    let y = run(Op::Attention(attention(None, None, false)), &args);
    close(&y, &[4, 1, 1], &[0.0, 7.0, 6.0, 4.0]);
    // Heads 0 and 1 read key head 0, heads 2 and 3 key head 1; the value is wider than the key.
    let args = [
        f(&[1, 4, 1], &[1.0; 4]),
        f(&[1, 2, 1], &[1.0; 2]),
        f(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]),
        i(&[1, 3], &[0, 1, 0]),
    ];
    let y = run(Op::Attention(attention(None, None, false)), &args);
    close(&y, &[1, 4, 2], &[1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]);
}

/// The last row of [`three_rows`], its first two in pages of one position, in reverse.
fn with_prefix(seqs: &[i32], table: &[i32]) -> [Value; 7] {
    [
        f(&[1, 1, 1], &[1.0]),
        f(&[1, 1, 1], &[LN3]),
        f(&[1, 1, 1], &[2.0]),
        i(&[1, 3], seqs),
        f(&[2, 1, 1, 1], &[LN2, 0.0]),
        f(&[2, 1, 1, 1], &[3.0, 6.0]),
        i(&[1, 2], table),
    ]
}

#[test]
fn attention_with_a_prefix() {
    let args = with_prefix(&[0, 1, 2], &[1, 0]);
    let y = run(Op::Attention(attention(None, None, true)), &args);
    close(&y, &[1, 1, 1], &[3.0]);
    let y = run(Op::Attention(attention(Some(2), None, true)), &args);
    close(&y, &[1, 1, 1], &[2.4]);
    let args = with_prefix(&[0, 1, 1], &[1, -1]);
    let y = run(Op::Attention(attention(None, None, true)), &args);
    // Logits 0 and ln 3; the second entry of the table is not used.
    close(&y, &[1, 1, 1], &[3.0]);
}

#[test]
fn attention_backwards() {
    // Row 1 of two: weights 1/3 and 2/3, output 4. Row 0 sends back nothing.
    let [q, k, v, _] = three_rows();
    let first_two = |x: Value| f(&[2, 1, 1], &x.as_floats().unwrap()[..2]);
    let args = [
        first_two(q),
        first_two(k),
        first_two(v),
        i(&[1, 3], &[0, 2, 0]),
        f(&[2, 1], &[0.0, 4.0]),
        f(&[2, 1, 1], &[0.0, 1.0]),
    ];
    let attrs = attention(None, None, false);
    let back = run(Op::AttentionQueryBack(attrs), &args);
    close(&back, &[4], &[0.0, -2.0 / 3.0 * LN2, 0.0, LN3]);
    let mut args = args.to_vec();
    args.insert(4, f(&[2, 1], &[0.0, LN3]));
    let back = run(Op::AttentionBack { attrs, wrt: AttentionOperand::Own }, &args);
    close(&back, &[4], &[2.0 / 3.0, -2.0 / 3.0, 1.0 / 3.0, 2.0 / 3.0]);
}

#[test]
fn attention_refuses_bad_sequences() {
    let op = || Op::Attention(attention(None, None, true));
    // Of one without rows nothing is read, wherever it is: its row is of no sequence.
    close(&run(op(), &with_prefix(&[2, 0, 9], &[0, 7])), &[1, 1, 1], &[0.0]);
    let bad: [(&[i32], &[i32], &str); 6] = [
        (&[0, 2, 0], &[0, 0], "rows 0..2 are outside of 0..1"),
        (&[-1, 1, 0], &[0, 0], "first row -1"),
        (&[0, -1, 0], &[0, 0], "row count -1"),
        (&[0, 1, -2], &[0, 0], "cached length -2"),
        (&[0, 1, 3], &[0, 0], "3 cached positions, its pages hold 2"),
        (&[0, 1, 2], &[0, 2], "page 2 is outside of 0..2"),
    ];
    for (seqs, table, what) in bad {
        outside(op(), &with_prefix(seqs, table), what);
    }
    let mut args = three_rows();
    args[3] = i(&[2, 3], &[0, 2, 0, 1, 2, 0]);
    outside(Op::Attention(attention(None, None, false)), &args, "row 1 is another sequence's");
    args[3] = i(&[1, 3], &[0, 3, 1]);
    outside(Op::Attention(attention(None, None, false)), &args, "its pages hold 0");
    let mut back = args.to_vec();
    back.extend([f(&[3, 1], &[0.0; 3]), f(&[3, 1, 1], &[0.0; 3])]);
    outside(Op::AttentionQueryBack(attention(None, None, false)), &back, "its pages hold 0");
}

#[test]
fn cross_entropy() {
    let nan = f64::NAN;
    let logits = f(&[3, 2], &[0.0, LN3, nan, nan, 1e4, 1e4]);
    let labels = i(&[3], &[0, -1, 1]);
    let y = run(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[logits.clone(), labels.clone()]);
    close(&y, &[3], &[2.0 * LN2, 0.0, LN2]);
    let args = [logits, labels, f(&[3], &[2.0, 1.0, 0.0])];
    let back = run(Op::CrossEntropyBack(CrossEntropyAttrs::PLAIN), &args);
    close(&back, &[3, 2], &[-1.5, 1.5, 0.0, 0.0, 0.0, 0.0]);
    // A row that sends nothing back is exactly zero, whatever its logits.
    let bad = f(&[1, 2], &[nan, f64::INFINITY]);
    let back = run(
        Op::CrossEntropyBack(CrossEntropyAttrs::PLAIN),
        &[bad.clone(), i(&[1], &[0]), f(&[1], &[0.0])],
    );
    assert_eq!(back.as_floats(), Some(&[0.0, 0.0][..]));
    outside(
        Op::CrossEntropy(CrossEntropyAttrs::PLAIN),
        &[bad.clone(), i(&[1], &[2])],
        "label 2 is outside of 0..2",
    );
    outside(
        Op::CrossEntropyBack(CrossEntropyAttrs::PLAIN),
        &[bad, i(&[1], &[2]), f(&[1], &[1.0])],
        "label 2",
    );
}

#[test]
fn tensors_without_elements() {
    let none = f(&[0, 4], &[]);
    for op in [
        Op::Copy,
        Op::Unary(Unary::Exp),
        Op::Sum { dims: 2 },
        Op::Slice { dim: 1, start: 0, len: 0 },
    ] {
        assert_eq!(run(op, from_ref(&none)).as_floats(), Some(&[][..]));
    }
    close(&run(Op::Sum { dims: 1 }, from_ref(&none)), &[1, 4], &[0.0; 4]);
    let product = Op::MatMul { ta: false, tb: true };
    assert_eq!(
        run(product.clone(), &[none.clone(), f(&[3, 4], &[1.0; 12])]).shape().dims(),
        [0, 3]
    );
    close(&run(product, &[f(&[2, 0], &[]), f(&[3, 0], &[])]), &[2, 3], &[0.0; 6]);
    let eps = 1e-5.into();
    assert_eq!(
        run(Op::RmsNorm { eps }, &[none.clone(), f(&[4], &[1.0; 4])]).shape().dims(),
        [0, 4]
    );
    run(Op::RmsNorm { eps }, &[f(&[2, 0], &[]), f(&[0], &[])]);
    close(&run(Op::ScatterAdd { rows: 2 }, &[i(&[0], &[]), none]), &[2, 4], &[0.0; 8]);
    let empty = f(&[0, 1, 1], &[]);
    let args = [empty.clone(), empty.clone(), empty, i(&[0, 3], &[])];
    run(Op::Attention(attention(None, None, false)), &args);
    run(Op::QuantizeRows, &[f(&[0, 32], &[])]);
    run(Op::QuantizeRows, &[f(&[2, 0], &[])]);
}

#[test]
fn leaves_are_checked() {
    let mut graph = Graph::new();
    let shape = Shape::new(&[2]).unwrap();
    let x = graph.leaf("x", shape, DType::F32).unwrap();
    let y = graph.affine(x, 2.0, 0.0).unwrap();
    let unused = graph.leaf("unused", shape, DType::F32).unwrap();
    let mut leaves = Leaves::new();
    let mut failed = |value: Option<Value>| {
        leaves.clear();
        leaves.extend(value.map(|value| (x, value)));
        eval(&graph, &leaves, &[y], Mode::Exact)
    };
    for bad in [None, Some(f(&[3], &[1.0; 3])), Some(i(&[2], &[1, 2]))] {
        let error = failed(bad).unwrap_err();
        assert_eq!(error.code(), Code::BadBinding);
        assert!(error.to_string().contains("`x`"), "{error}");
    }
    // What nothing depends on need not be bound.
    close(&failed(Some(f(&[2], &[1.0, 2.0]))).unwrap()[0], &[2], &[2.0, 4.0]);
    let _ = unused;
}
