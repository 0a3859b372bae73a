//! Random operands for the tests of packing and products.

use gguf::TensorType;
use graph::{DType, Shape};
use half::f16;

/// Every dtype that weights are packed from.
pub(crate) const WEIGHTS: [DType; 16] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Block(TensorType::Q4_0),
    DType::Block(TensorType::Q4_1),
    DType::Block(TensorType::Q5_0),
    DType::Block(TensorType::Q5_1),
    DType::Block(TensorType::Q8_0),
    DType::Block(TensorType::Q2K),
    DType::Block(TensorType::Q3K),
    DType::Block(TensorType::Q4K),
    DType::Block(TensorType::Q5K),
    DType::Block(TensorType::Q6K),
    DType::Block(TensorType::IQ4NL),
    DType::Block(TensorType::IQ4XS),
    DType::Block(TensorType::MXFP4),
];

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [-1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }
}

/// Where a block's f16 scales are.
fn halves(ty: TensorType) -> &'static [usize] {
    use TensorType as T;
    match ty {
        T::Q4_1 | T::Q5_1 | T::Q4K | T::Q5K => &[0, 2],
        T::Q2K => &[80, 82],
        T::Q3K => &[108],
        T::Q6K => &[208],
        T::MXFP4 | T::F32 | T::F16 | T::BF16 | T::I32 => &[],
        _ => &[0],
    }
}

/// Rows `[n, k]` of any bits in codes and integer scales, with scales of moderate size.
pub(crate) fn random_weight(dtype: DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ 0xdead_beef);
    let shape = Shape::new(&[n, k]).unwrap();
    let len = shape.bytes(dtype).unwrap();
    match dtype {
        DType::F32 => random.floats(n * k).iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => {
            random.floats(n * k).iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()
        }
        DType::BF16 => random
            .floats(n * k)
            .iter()
            .flat_map(|&x| half::bf16::from_f32(x).to_le_bytes())
            .collect(),
        DType::Block(ty) => {
            let mut bytes: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
            for block in bytes.chunks_mut(ty.block_bytes()) {
                for &at in halves(ty) {
                    let scale = f16::from_f32(random.unit() * 0.05);
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
                if ty == TensorType::MXFP4 {
                    block[0] = 118 + (block[0] & 7);
                }
            }
            bytes
        }
        _ => panic!("{dtype} is no weight"),
    }
}

/// The weight's elements, row-major.
pub(crate) fn dequantized(dtype: DType, bytes: &[u8], elements: usize) -> Vec<f32> {
    let ty = match dtype {
        DType::F32 => TensorType::F32,
        DType::F16 => TensorType::F16,
        DType::BF16 => TensorType::BF16,
        DType::Block(ty) => ty,
        _ => panic!("{dtype} is no weight"),
    };
    let mut out = vec![0.0; elements];
    gguf::blocks::dequantize(ty, bytes, &mut out).unwrap();
    out
}
