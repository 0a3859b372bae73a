//! Making blocks from floats: as close as ggml's (`testdata/gguf/make_quantize.py`), exact where
//! values are representable, finite whatever comes in.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test's helpers are tests"
)]

use gguf::blocks::{QUANTIZABLE, dequantize, quantize};
use gguf::{Gguf, TensorType};

/// Made and read again.
fn round_trip(ty: TensorType, x: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0xAA; ty.row_bytes(x.len()).unwrap()];
    quantize(ty, x, &mut bytes).unwrap();
    let mut out = vec![f32::NAN; x.len()];
    dequantize(ty, &bytes, &mut out).unwrap();
    out
}

fn error(x: &[f32], y: &[f32]) -> f64 {
    let sum = |f: &dyn Fn(f32, f32) -> f64| x.iter().zip(y).map(|(&x, &y)| f(x, y)).sum::<f64>();
    let off = sum(&|x, y| (f64::from(x) - f64::from(y)).powi(2));
    (off / sum(&|x, _| f64::from(x).powi(2))).sqrt()
}

fn blocks() -> impl Iterator<Item = TensorType> {
    QUANTIZABLE.into_iter().filter(|ty| ty.is_quantized())
}

#[test]
fn the_error_is_at_most_2_percent_above_ggmls() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/gguf/quantize.gguf");
    let fixture = Gguf::open(path).unwrap();
    let formats = fixture.metadata().strings("formats").unwrap();
    let mut seen = 0;
    for tensor in fixture.tensors() {
        let name = &tensor.info.name;
        let x = tensor.to_f32().unwrap();
        let of_ggml = fixture.metadata().f32s(&format!("ggml.{name}")).unwrap();
        for (format, &theirs) in formats.iter().zip(of_ggml) {
            let ty = TensorType::from_name(format).unwrap();
            let ours = error(&x, &round_trip(ty, &x));
            let ratio = ours / f64::from(theirs);
            println!("{name:8} {format:5} ours {ours:.4e} ggml {theirs:.4e} ratio {ratio:.4}");
            assert!(ours <= 1.02 * f64::from(theirs), "{name} {format}: {ours:e}, {theirs:e}");
            seen += 1;
        }
    }
    assert_eq!(seen, 6 * 10);
}

/// Numbers that look random, from -1 to 1.
fn numbers(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32) / (1 << 23) as f32 - 1.0
    }
}

#[test]
fn what_a_block_can_hold_is_held_exactly() {
    let mut next = numbers(1);
    for ty in [TensorType::Q4_0, TensorType::Q5_0, TensorType::Q4_1, TensorType::Q5_1] {
        let top = if matches!(ty, TensorType::Q4_0 | TensorType::Q4_1) { 16.0 } else { 32.0 };
        for case in 0..400 {
            // From all codes of a format down to a few of them; as they are stored, so with scales
            // and offsets of f16.
            let few = 1.0 / f32::from(1u8 << (case % 3));
            let d = half(next() * 0.1);
            let signed = matches!(ty, TensorType::Q4_0 | TensorType::Q5_0);
            let offset = if signed { 0.0 } else { half(next()) };
            let x: Vec<f32> = (0..32)
                .map(|_| {
                    let code = ((next() + 1.0) / 2.0 * top * few).floor().min(top - 1.0);
                    let code = if signed { code - (top / 2.0 * few).floor() } else { code };
                    d.abs() * code + offset
                })
                .collect();
            assert_eq!(round_trip(ty, &x), x, "{ty}, case {case}: scale {d:e}, offset {offset}");
        }
    }
    // Q8_0 is ggml's: exact where the greatest code is used.
    let x: Vec<f32> = (0..32).map(|i| (i as f32 * 8.0 - 121.0) * 0.25).collect();
    let x: Vec<f32> = x.iter().map(|&x| if x == 31.75 { 31.75 } else { x }).collect();
    assert!(x.contains(&31.75));
    assert_eq!(round_trip(TensorType::Q8_0, &x), x);
    for ty in [TensorType::F16, TensorType::BF16, TensorType::F32] {
        let x = [1.0, -0.5, 0.0, 65280.0, -3.0e-5 * 0.0];
        assert_eq!(round_trip(ty, &x), x);
    }
}

fn half(x: f32) -> f32 {
    let mut bytes = [0; 2];
    gguf::blocks::quantize_f16(&[x], &mut bytes).unwrap();
    let mut out = [0.0];
    dequantize(TensorType::F16, &bytes, &mut out).unwrap();
    out[0]
}

/// Quantizing what was quantized changes next to nothing, for k-quants too.
#[test]
fn a_second_round_hardly_changes_anything() {
    let mut next = numbers(2);
    for ty in blocks() {
        let x: Vec<f32> = (0..8192).map(|_| (next() + next() + next()) * 0.03).collect();
        let once = round_trip(ty, &x);
        let again = error(&once, &round_trip(ty, &once));
        let first = error(&x, &once);
        println!("{ty}: {first:.3e}, then {again:.3e}");
        assert!(again < 0.25 * first, "{ty}: {first:e}, then {again:e}");
    }
}

/// No value is further off than a step of its group. (Half a step would be nearest, but the least
/// sum of squares may cut a few off.)
#[test]
fn no_value_is_far_off() {
    let mut next = numbers(3);
    for (ty, group, codes, slack) in [
        (TensorType::Q4_0, 32, 15.0, 2.0),
        (TensorType::Q4_1, 32, 15.0, 2.0),
        (TensorType::Q5_0, 32, 31.0, 2.0),
        (TensorType::Q5_1, 32, 31.0, 2.0),
        (TensorType::Q8_0, 32, 254.0, 1.1),
        (TensorType::Q4K, 32, 15.0, 2.0),
        (TensorType::Q5K, 32, 31.0, 2.0),
        (TensorType::Q6K, 16, 62.0, 2.0),
    ] {
        let x: Vec<f32> = (0..4096).map(|_| next()).collect();
        let y = round_trip(ty, &x);
        for (x, y) in x.chunks(group).zip(y.chunks(group)) {
            let most = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let half_step = most / codes;
            for (x, y) in x.iter().zip(y) {
                assert!((x - y).abs() <= half_step * slack, "{ty}: {x} became {y}, ±{half_step}");
            }
        }
    }
}

#[test]
fn whatever_comes_in_what_comes_out_is_finite() {
    let mut next = numbers(4);
    let tiny = f32::from_bits(1);
    let specials = [
        0.0,
        -0.0,
        tiny,
        -tiny,
        1e-38,
        -1e-38,
        1e-8,
        6e-8,
        -6e-8,
        65504.0,
        -65504.0,
        1e6,
        -1e6,
        1e20,
        -1e20,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    // Q8_0 is ggml's to the bit, and has its overflow.
    for ty in blocks().filter(|&ty| ty != TensorType::Q8_0) {
        assert_eq!(round_trip(ty, &[0.0; 256]), [0.0; 256], "{ty}");
        for &a in &specials {
            for &b in &specials {
                for rest in [0.0, 1.0] {
                    let mut x: Vec<f32> = (0..256).map(|_| rest * next()).collect();
                    for (i, x) in x.iter_mut().enumerate() {
                        match i % 37 {
                            3 => *x = a,
                            11 => *x = b,
                            _ => {}
                        }
                    }
                    let y = round_trip(ty, &x);
                    assert!(y.iter().all(|y| y.is_finite()), "{ty} with {a} and {b}");
                }
            }
        }
        // A constant is met, of either sign, large or small.
        for c in [1.0, -1.0, 0.001, -3000.0, 60000.0] {
            let y = round_trip(ty, &[c; 256]);
            assert!(error(&[c; 256], &y) < 0.005, "{ty} of {c}: {}", y[0]);
        }
        // What is too large becomes the largest of its sign there is.
        let mut x = [0.0; 256];
        (x[0], x[100]) = (1e30, -1e30);
        let y = round_trip(ty, &x);
        assert!(y[0] > 60_000.0 && y[100] < -60_000.0, "{ty}: {} {}", y[0], y[100]);
    }
}
