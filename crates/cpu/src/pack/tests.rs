use super::*;
use crate::matmul::testing::{WEIGHTS, dequantized, random_weight};

fn packed(dtype: DType, n: usize, k: usize, bytes: &[u8]) -> PackedMatrix {
    let shape = Shape::new(&[n, k]).unwrap();
    PackedMatrix::pack(&HostTensor { dtype, shape, bytes }).unwrap()
}

#[test]
fn rows_are_what_dequantize_gives() {
    for dtype in WEIGHTS {
        for (n, k) in [(16, 256), (1, 512), (37, 768)] {
            let bytes = random_weight(dtype, n, k, (n * k) as u64);
            let values = dequantized(dtype, &bytes, n * k);
            let matrix = packed(dtype, n, k, &bytes);
            for (i, expected) in values.chunks(k).enumerate() {
                let mut row = vec![f32::NAN; k];
                matrix.row(i, &mut row);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&row), bits(expected), "{dtype} row {i} of [{n}, {k}]");
            }
        }
    }
}

#[test]
fn rows_of_one_block_and_odd_floats() {
    for dtype in WEIGHTS {
        let k = match dtype {
            DType::Block(ty) => ty.block_len(),
            _ => 7,
        };
        let bytes = random_weight(dtype, 17, k, 5);
        let values = dequantized(dtype, &bytes, 17 * k);
        let matrix = packed(dtype, 17, k, &bytes);
        let mut row = vec![f32::NAN; k];
        matrix.row(16, &mut row);
        assert_eq!(row, values[16 * k..], "{dtype}");
    }
}

#[test]
fn extreme_scales_survive() {
    // Every exponent of MXFP4, and f16 scales of every size.
    let mut bytes = random_weight(DType::Block(TensorType::MXFP4), 256, 32, 1);
    for (e, block) in bytes.chunks_mut(17).enumerate() {
        block[0] = e as u8;
    }
    let dtype = DType::Block(TensorType::MXFP4);
    let matrix = packed(dtype, 256, 32, &bytes);
    let values = dequantized(dtype, &bytes, 256 * 32);
    let mut row = [0.0; 32];
    for e in 0..256 {
        matrix.row(e, &mut row);
        assert_eq!(row, values[e * 32..][..32], "exponent {e}");
    }
    let dtype = DType::Block(TensorType::Q4_1);
    let mut bytes = random_weight(dtype, 4096, 32, 1);
    for (e, block) in bytes.chunks_mut(20).enumerate() {
        let bits = (e * 16) as u16;
        block[..2].copy_from_slice(&bits.to_le_bytes());
        block[2..4].copy_from_slice(&(!bits).to_le_bytes());
    }
    let matrix = packed(dtype, 4096, 32, &bytes);
    let values = dequantized(dtype, &bytes, 4096 * 32);
    for e in 0..4096 {
        matrix.row(e, &mut row);
        for (a, b) in row.iter().zip(&values[e * 32..]) {
            assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "scale {e}: {a} {b}");
        }
    }
}

#[test]
fn sizes_are_exact() {
    let cases = [
        (TensorType::Q4_0, 16 * (128 + 16)),
        (TensorType::Q8_0, 16 * (256 + 16)),
        (TensorType::Q4K, 16 * (128 + 4 + 16)),
        (TensorType::Q6K, 16 * (192 + 2 + 16)),
        (TensorType::Q2K, 16 * (64 + 4 + 32)),
    ];
    for (ty, expected) in cases {
        // Two super-blocks, so that no section is padded.
        let bytes = random_weight(DType::Block(ty), 17, 512, 2);
        let matrix = packed(DType::Block(ty), 17, 512, &bytes);
        assert_eq!(Resident::bytes(&matrix), 2 * 2 * expected, "{ty}");
        assert_eq!(matrix.all_panels().as_ptr().align_offset(64), 0);
    }
}

#[test]
fn threads_pack_the_same_bytes() {
    let dtype = DType::Block(TensorType::Q5K);
    let bytes = random_weight(dtype, 200, 256, 3);
    let tensor = HostTensor { dtype, shape: Shape::new(&[200, 256]).unwrap(), bytes: &bytes };
    let parallel = PackedMatrix::pack_with(&tensor, |count, run| {
        std::thread::scope(|s| {
            s.spawn(move || (0..count).step_by(2).for_each(run));
            (1..count).step_by(2).for_each(run);
        });
    })
    .unwrap();
    assert_eq!(parallel.all_panels(), PackedMatrix::pack(&tensor).unwrap().all_panels());
}

#[test]
fn what_cannot_be_packed_is_a_fault() {
    let q4 = DType::Block(TensorType::Q4_0);
    let tensor = |dtype, dims: &[usize], bytes| HostTensor {
        dtype,
        shape: Shape::new(dims).unwrap(),
        bytes,
    };
    let bytes = [0; 36];
    for bad in [
        tensor(q4, &[2, 32], &bytes[..35]),
        tensor(q4, &[36], &bytes),
        tensor(DType::I32, &[3, 3], &bytes),
        tensor(DType::F32, &[1 << 40, 1], &bytes),
    ] {
        assert_eq!(PackedMatrix::pack(&bad).unwrap_err().code, Code::BadBinding);
    }
    // Numbers left out or given twice are noticed, not trusted.
    let fine = tensor(q4, &[2, 32], &bytes);
    let fault = PackedMatrix::pack_with(&fine, |_, _| {}).unwrap_err();
    assert_eq!(fault.code, Code::Internal);
    assert!(PackedMatrix::pack_with(&fine, |_, run| (run(0), run(0), run(9)).0).is_ok());
    assert!(PackedMatrix::pack(&tensor(q4, &[0, 32], &[])).is_ok());
}
