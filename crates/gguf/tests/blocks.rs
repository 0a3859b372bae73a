//! The block formats, bit by bit against the `gguf` package from PyPI
//! (`testdata/gguf/make_blocks.py`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test's helpers are tests"
)]

use gguf::blocks::{self, Decoded};
use gguf::{Array, Gguf, TensorType, Value};

fn fixture() -> Gguf {
    Gguf::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/gguf/blocks.gguf")).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn f32s(gguf: &Gguf, name: &str) -> Vec<f32> {
    let tensor = gguf.require(name).unwrap();
    assert_eq!(tensor.info.ty, TensorType::F32);
    tensor.to_f32().unwrap()
}

#[test]
fn every_format_equals_the_gguf_package_in_every_bit() {
    let gguf = fixture();
    for ty in TensorType::ALL {
        if matches!(ty, TensorType::F32 | TensorType::I32) {
            continue;
        }
        let tensor = gguf.require(ty.name()).unwrap();
        assert_eq!(tensor.info.ty, ty);
        let expected = f32s(&gguf, &format!("{ty}.f32"));
        assert!(expected.len() >= 24 * ty.block_len() && expected.iter().any(|&x| x != 0.0));
        let found = tensor.to_f32().unwrap();
        assert_eq!(bits(&found), bits(&expected), "{ty}");
    }
}

/// [`Decoded`] promises relations between its fields; each is looked at on its own.
#[test]
fn decoded_fields_agree_with_each_other() {
    let gguf = fixture();
    let mut decoded = Decoded::default();
    for ty in TensorType::ALL {
        let Some(format) = blocks::format(ty) else {
            assert!(!ty.is_quantized());
            continue;
        };
        let tensor = gguf.require(ty.name()).unwrap();
        let expected = f32s(&gguf, &format!("{ty}.f32"));
        let (mut lowest, mut highest) = (u8::MAX, 0);
        let blocks = tensor.bytes.chunks(ty.block_bytes());
        for (block, expected) in blocks.zip(expected.chunks(ty.block_len())) {
            blocks::decode(ty, block, &mut decoded).unwrap();
            let groups = ty.block_len() / format.group;
            assert_eq!(decoded.codes().len(), ty.block_len());
            assert_eq!(decoded.scales().len(), groups);
            for g in 0..groups {
                let (sub, min) = (decoded.sub_scales()[g], decoded.sub_mins()[g]);
                let scale = decoded.d() * f32::from(sub);
                assert_eq!(decoded.scales()[g].to_bits(), scale.to_bits());
                let m = decoded.dmin() * f32::from(min);
                assert_eq!(decoded.mins()[g].to_bits(), m.to_bits());
                assert!(format.has_sub_scales || sub == 1);
                assert!(format.has_min || decoded.mins()[g].to_bits() == 0);
            }
            for (i, expected) in expected.iter().enumerate() {
                let (quant, code) = (decoded.quants()[i], decoded.codes()[i]);
                let of_quant = match format.codebook {
                    Some(values) => i32::from(values[usize::from(quant)]),
                    None => i32::from(quant) - i32::from(format.zero),
                };
                assert_eq!(i32::from(code), of_quant);
                let g = i / format.group;
                let value = decoded.scales()[g] * f32::from(code) - decoded.mins()[g];
                assert_eq!(value.to_bits(), expected.to_bits(), "{ty} element {i}");
                (lowest, highest) = (lowest.min(quant), highest.max(quant));
            }
        }
        let most = ((1_u32 << format.bits) - 1) as u8;
        assert_eq!((lowest, highest), (0, most), "{ty} uses all its codes");
    }
}

#[test]
fn conversions_to_q8_0_f16_and_bf16_equal_the_gguf_package() {
    let gguf = fixture();
    let input = f32s(&gguf, "to.input");
    let cases = [
        ("to.input", TensorType::F32),
        ("to.Q8_0", TensorType::Q8_0),
        ("to.F16", TensorType::F16),
        ("to.BF16", TensorType::BF16),
    ];
    for (name, ty) in cases {
        let expected = gguf.require(name).unwrap();
        assert_eq!(expected.info.ty, ty);
        let mut found = vec![0xAA; expected.bytes.len()];
        blocks::quantize(ty, &input, &mut found).unwrap();
        assert!(found == expected.bytes, "{name}");
    }
}

/// A block that ggml's own arithmetic leaves undefined must not hurt.
#[test]
fn q8_0_of_extreme_values_does_not_panic() {
    for x in [f32::NAN, f32::INFINITY, f32::MAX, f32::MIN_POSITIVE, f32::from_bits(1)] {
        let mut values = [0.0; 32];
        values[3] = x;
        values[4] = -x;
        let mut out = [0; 34];
        blocks::quantize_q8_0(&values, &mut out).unwrap();
    }
}

#[test]
fn reads_every_value_type_that_another_writer_wrote() {
    let gguf = fixture();
    let meta = gguf.metadata();
    let expected: [(&str, Value); 24] = [
        ("value.u8", 200_u8.into()),
        ("value.i8", (-100_i8).into()),
        ("value.u16", 60000_u16.into()),
        ("value.i16", (-30000_i16).into()),
        ("value.u32", 4_000_000_000_u32.into()),
        ("value.i32", (-2_000_000_000).into()),
        ("value.f32", 0.1_f32.into()),
        ("value.bool", true.into()),
        ("value.string", "naïve 猫 🦀".into()),
        ("value.u64", ((1_u64 << 63) + 1).into()),
        ("value.i64", (-(1_i64 << 62) - 1).into()),
        ("value.f64", 0.1_f64.into()),
        ("array.u8", vec![0_u8, 1, 255].into()),
        ("array.i8", vec![-128_i8, 127].into()),
        ("array.u16", vec![65535_u16, 1].into()),
        ("array.i16", vec![-32768_i16].into()),
        ("array.u32", vec![u32::MAX, 7].into()),
        ("array.i32", vec![i32::MIN, 5].into()),
        ("array.f32", vec![1.5_f32, -0.25].into()),
        ("array.bool", vec![true, false, true].into()),
        ("array.string", vec![String::new(), "a".into(), "é\n".into()].into()),
        ("array.u64", vec![u64::MAX].into()),
        ("array.i64", vec![i64::MIN].into()),
        ("array.f64", vec![0.1_f64, -2.5].into()),
    ];
    for (key, value) in &expected {
        assert_eq!(meta.get(key), Some(value), "{key}");
    }
    let keys: Vec<&str> = meta.iter().map(|(key, _)| key).collect();
    assert_eq!(keys[0], "general.architecture");
    assert_eq!(keys[1..], expected.map(|(key, _)| key), "in file order");
    assert!(matches!(meta.get("array.f64"), Some(Value::Array(Array::F64(_)))));
    assert_eq!(gguf.require("Q4_K").unwrap().info.shape, [24, 256]);
}

#[test]
fn shapes_are_outermost_first() {
    let gguf =
        Gguf::open(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/gguf/small.gguf")).unwrap();
    assert_eq!(gguf.tensors().len(), TensorType::ALL.len());
    let cases: [(TensorType, &[usize], usize, usize, usize); 4] = [
        (TensorType::I32, &[1, 2, 1, 3], 2, 3, 24),
        (TensorType::F16, &[2, 3, 4], 6, 4, 48),
        (TensorType::Q6K, &[1, 256], 1, 256, 210),
        (TensorType::F32, &[5], 1, 5, 20),
    ];
    for (ty, shape, rows, cols, bytes) in cases {
        let tensor = gguf.tensor(ty.name()).unwrap();
        assert_eq!((tensor.info.ty, tensor.info.shape.as_slice()), (ty, shape));
        assert_eq!((tensor.info.rows(), tensor.info.cols()), (rows, cols));
        assert_eq!((tensor.info.elements(), tensor.bytes.len()), (rows * cols, bytes));
        assert_eq!(ty.row_bytes(cols), Some(bytes / rows));
    }
    assert!(gguf.tensor("absent").is_none());
}
