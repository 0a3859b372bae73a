//! Valid random blocks of every format.

use gguf::TensorType;
use text::sampler::Rng;

/// About the size of the values.
const SIZE: f32 = 0.05;

/// Roughly normal with mean 0 and standard deviation 1: the sum of 12 uniforms.
pub(super) fn normal(random: &mut Rng) -> f32 {
    (0..12).map(|_| random.next_f64()).sum::<f64>() as f32 - 6.0
}

/// Where the scales of a block are, f16, and what size they have.
struct Scales {
    at: usize,
    size: f32,
    /// Those of the minimums.
    min: Option<(usize, f32)>,
}

fn scales(ty: TensorType) -> Option<Scales> {
    let plain = |at: usize, parts: f32| Scales { at, size: SIZE / parts, min: None };
    let with_min = |at: usize, parts: f32, min_at: usize, min: f32| Scales {
        at,
        size: SIZE / parts,
        min: Some((min_at, SIZE * min)),
    };
    Some(match ty {
        TensorType::Q4_0 => plain(0, 4.6),
        TensorType::Q4_1 => with_min(0, 4.6, 2, -1.63),
        TensorType::Q5_0 => plain(0, 9.2),
        TensorType::Q5_1 => with_min(0, 9.2, 2, -1.68),
        TensorType::Q8_0 => plain(0, 74.0),
        TensorType::Q2K => with_min(80, 9.0, 82, 1.0 / 9.0),
        TensorType::Q3K => plain(108, 40.0),
        TensorType::Q4K => with_min(0, 200.0, 2, 1.0 / 30.0),
        TensorType::Q5K => with_min(0, 400.0, 2, 1.0 / 30.0),
        TensorType::Q6K => plain(208, 1300.0),
        TensorType::IQ4NL => plain(0, 70.0),
        TensorType::IQ4XS => plain(0, 1200.0),
        TensorType::F32
        | TensorType::F16
        | TensorType::BF16
        | TensorType::I32
        | TensorType::MXFP4 => return None,
    })
}

/// Blocks of `rows x cols` elements with values of about 0.05.
pub(super) fn random(ty: TensorType, rows: usize, cols: usize, random: &mut Rng) -> Vec<u8> {
    if !ty.is_quantized() {
        let values = (0..rows * cols).map(|_| SIZE * normal(random));
        return match ty {
            TensorType::F16 => values.flat_map(|v| half::f16::from_f32(v).to_le_bytes()).collect(),
            TensorType::BF16 => {
                values.flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect()
            }
            _ => values.flat_map(f32::to_le_bytes).collect(),
        };
    }
    let bytes = rows * ty.row_bytes(cols).unwrap_or(0);
    let mut out: Vec<u8> =
        (0..bytes.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes()).collect();
    out.truncate(bytes);
    let scales = scales(ty);
    for block in out.chunks_exact_mut(ty.block_bytes()) {
        let Some(Scales { at, size, min }) = &scales else {
            // MXFP4 has an exponent byte: 2^(e - 128) times codes up to 12.
            if let Some(exponent) = block.first_mut() {
                *exponent = 120 + (*exponent & 3);
            }
            continue;
        };
        let mut put = |at: usize, size: f32, jitter: f32| {
            let value = half::f16::from_f32(size * (1.0 + 0.2 * jitter));
            if let Some(place) = block.get_mut(at..at + 2) {
                place.copy_from_slice(&value.to_le_bytes());
            }
        };
        put(*at, *size, normal(random));
        if let Some((at, size)) = min {
            put(*at, *size, normal(random));
        }
    }
    out
}
