//! The ggml block formats: what the bytes of a tensor mean.
//!
//! Every quantized format is taken apart into the same integers and scales by [`decode`]; the
//! f32 values are then one formula for all of them ([`Decoded`]). [`dequantize`] applies it and
//! equals ggml's `dequantize_row_*` (`ggml-quants.c`) in every bit.

mod decode;
mod encode;

use half::{bf16, f16};

pub use decode::{Decoded, Format, decode, format};

use crate::error::{Error, ErrorKind};
use crate::tensor::TensorType;

/// The longest block of any format, in elements.
pub const MAX_BLOCK: usize = 256;

/// The most groups a block has.
pub const MAX_GROUPS: usize = 16;

/// The values of the codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
pub const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of the codes of MXFP4, doubled (`kvalues_mxfp4`); its scale is halved.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Fails for types whose elements are not numbers to compute with.
pub(crate) fn check_convertible(ty: TensorType) -> Result<(), ErrorKind> {
    match ty {
        TensorType::I32 => Err(ErrorKind::Conversion {
            ty: ty.name(),
            what: "read as f32",
            expected: "a floating-point or quantized type",
        }),
        _ => Ok(()),
    }
}

/// Fails unless `bytes` and `elements` are the same whole number of blocks.
fn check_lengths(ty: TensorType, bytes: usize, elements: usize) -> Result<(), ErrorKind> {
    if ty.row_bytes(elements) == Some(bytes) {
        return Ok(());
    }
    Err(ErrorKind::BlockLength {
        ty: ty.name(),
        bytes,
        elements,
        block_bytes: ty.block_bytes(),
        block_len: ty.block_len(),
    })
}

/// Elements of any type but I32 as f32; `bytes` are whole blocks, `out` as many elements.
///
/// # Errors
/// The lengths do not match, or the type is I32.
pub fn dequantize(ty: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    check_convertible(ty)?;
    check_lengths(ty, bytes.len(), out.len())?;
    match ty {
        TensorType::F32 => fill(out, bytes, f32::from_le_bytes),
        TensorType::F16 => fill(out, bytes, |le| f16::from_le_bytes(le).to_f32()),
        TensorType::BF16 => fill(out, bytes, |le| bf16::from_le_bytes(le).to_f32()),
        _ => {
            let mut decoded = Decoded::default();
            let blocks = bytes.chunks_exact(ty.block_bytes());
            for (block, out) in blocks.zip(out.chunks_exact_mut(ty.block_len())) {
                decode(ty, block, &mut decoded)?;
                decoded.values(out);
            }
        }
    }
    Ok(())
}

fn fill<const N: usize>(out: &mut [f32], bytes: &[u8], value: impl Fn([u8; N]) -> f32) {
    for (out, &le) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = value(le);
    }
}

/// The types that [`quantize`] makes.
pub const QUANTIZABLE: [TensorType; 11] = [
    TensorType::F32,
    TensorType::F16,
    TensorType::BF16,
    TensorType::Q4_0,
    TensorType::Q4_1,
    TensorType::Q5_0,
    TensorType::Q5_1,
    TensorType::Q8_0,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

/// Stores f32 values as one of the types of [`QUANTIZABLE`]; `out` is the whole blocks they take.
///
/// Floats are rounded to nearest even and may become infinite. Blocks never hold anything that is
/// not finite: values beyond their range become the nearest there is, and NaN becomes 0 (but for
/// Q8_0, which is ggml's to the bit).
///
/// # Errors
/// The lengths do not match, or the type is another.
pub fn quantize(ty: TensorType, values: &[f32], out: &mut [u8]) -> Result<(), Error> {
    use TensorType as T;
    match ty {
        T::F32 => {
            check_lengths(ty, out.len(), values.len())?;
            for (out, x) in out.as_chunks_mut().0.iter_mut().zip(values) {
                *out = x.to_le_bytes();
            }
            Ok(())
        }
        T::F16 => quantize_f16(values, out),
        T::BF16 => quantize_bf16(values, out),
        T::Q8_0 => quantize_q8_0(values, out),
        T::Q4_0 => blocks(ty, values, out, encode::q4_0),
        T::Q4_1 => blocks(ty, values, out, encode::q4_1),
        T::Q5_0 => blocks(ty, values, out, encode::q5_0),
        T::Q5_1 => blocks(ty, values, out, encode::q5_1),
        T::Q4K => blocks(ty, values, out, encode::q4_k),
        T::Q5K => blocks(ty, values, out, encode::q5_k),
        T::Q6K => blocks(ty, values, out, encode::q6_k),
        T::I32 | T::Q2K | T::Q3K | T::IQ4NL | T::IQ4XS | T::MXFP4 => {
            let expected = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K";
            let what = "made from f32";
            Err(ErrorKind::Conversion { ty: ty.name(), what, expected }.into())
        }
    }
}

/// Makes blocks of `L` values and `B` bytes, one after another.
fn blocks<const L: usize, const B: usize>(
    ty: TensorType,
    values: &[f32],
    out: &mut [u8],
    encode: fn(&[f32; L], &mut [u8; B]) -> Option<()>,
) -> Result<(), Error> {
    check_lengths(ty, out.len(), values.len())?;
    let (values, out) = (values.as_chunks().0, out.as_chunks_mut().0);
    // The lengths of a format are its encoder's, so `None` does not occur.
    values.iter().zip(out).try_for_each(|(values, out)| encode(values, out)).ok_or_else(|| {
        ErrorKind::BlockLength {
            ty: ty.name(),
            bytes: B,
            elements: L,
            block_bytes: ty.block_bytes(),
            block_len: ty.block_len(),
        }
        .into()
    })
}

/// Quantizes to Q8_0, as ggml's `quantize_row_q8_0_ref` does: per 32 elements d = max|x| / 127,
/// stored as f16, and codes round(x / d) with the unrounded d, halves away from zero.
///
/// # Errors
/// `values` are not whole blocks of 32, or `out` is not 34 bytes for each.
pub fn quantize_q8_0(values: &[f32], out: &mut [u8]) -> Result<(), Error> {
    check_lengths(TensorType::Q8_0, out.len(), values.len())?;
    let (values, _) = values.as_chunks::<32>();
    let (out, _) = out.as_chunks_mut::<34>();
    for (values, out) in values.iter().zip(out) {
        let largest = values.iter().fold(0.0_f32, |m, x| if m > x.abs() { m } else { x.abs() });
        let d = largest / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        let (scale, codes) = out.split_at_mut(2);
        scale.copy_from_slice(&f16::from_f32(d).to_le_bytes());
        for (code, x) in codes.iter_mut().zip(values) {
            *code = ((x * inverse).round() as i8).cast_unsigned();
        }
    }
    Ok(())
}

/// Rounds to F16, to nearest even; `out` has 2 bytes for each value.
///
/// # Errors
/// The lengths do not match.
pub fn quantize_f16(values: &[f32], out: &mut [u8]) -> Result<(), Error> {
    check_lengths(TensorType::F16, out.len(), values.len())?;
    for (out, &x) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *out = f16::from_f32(x).to_le_bytes();
    }
    Ok(())
}

/// Rounds to BF16, to nearest even; `out` has 2 bytes for each value.
///
/// # Errors
/// The lengths do not match.
pub fn quantize_bf16(values: &[f32], out: &mut [u8]) -> Result<(), Error> {
    check_lengths(TensorType::BF16, out.len(), values.len())?;
    for (out, &x) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *out = bf16::from_f32(x).to_le_bytes();
    }
    Ok(())
}
