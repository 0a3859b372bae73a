//! One block of a quantized format, taken apart. Layouts: ggml's `ggml-common.h`.

use half::f16;

use super::{IQ4_VALUES, MAX_BLOCK, MAX_GROUPS, MXFP4_VALUES};
use crate::error::{Error, ErrorKind};
use crate::tensor::TensorType;

/// What all blocks of a quantized format have in common.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Format {
    /// Elements that share a scale: 16 or 32. The block length is a multiple.
    pub group: usize,
    /// Bits of a stored code: 2 to 8.
    pub bits: u32,
    /// What is subtracted from a stored code to give its value; 0 with a codebook.
    pub zero: u8,
    /// The values of the codes, for formats that have a table of them.
    pub codebook: Option<&'static [i8; 16]>,
    /// Whether groups have a minimum; else all minimums are +0.
    pub has_min: bool,
    /// Whether groups have an integer scale of their own; else all of them are 1.
    pub has_sub_scales: bool,
}

/// The facts of a quantized format; `None` for types that are not quantized.
pub const fn format(ty: TensorType) -> Option<Format> {
    use TensorType as T;
    let (group, bits, zero, codebook, has_min, has_sub_scales) = match ty {
        T::F32 | T::F16 | T::BF16 | T::I32 => return None,
        T::Q4_0 => (32, 4, 8, None, false, false),
        T::Q4_1 => (32, 4, 0, None, true, false),
        T::Q5_0 => (32, 5, 16, None, false, false),
        T::Q5_1 => (32, 5, 0, None, true, false),
        T::Q8_0 => (32, 8, 128, None, false, false),
        T::Q2K => (16, 2, 0, None, true, true),
        T::Q3K => (16, 3, 4, None, false, true),
        T::Q4K => (32, 4, 0, None, true, true),
        T::Q5K => (32, 5, 0, None, true, true),
        T::Q6K => (16, 6, 32, None, false, true),
        T::IQ4NL => (32, 4, 0, Some(&IQ4_VALUES), false, false),
        T::IQ4XS => (32, 4, 0, Some(&IQ4_VALUES), false, true),
        T::MXFP4 => (32, 4, 0, Some(&MXFP4_VALUES), false, false),
    };
    Some(Format { group, bits, zero, codebook, has_min, has_sub_scales })
}

/// One block, taken apart exactly. Element i, in group g = i / [`Format::group`], is
///
/// > `scales[g] * codes[i] - mins[g]`
///
/// each operation rounded to f32 (no fused multiply-add), where
///
/// > `scales[g] = d * sub_scales[g]` and `mins[g] = dmin * sub_mins[g]`
///
/// in f32 as well. That is ggml's arithmetic for every format: products with 1 and differences
/// with +0 are exact, and formats that add a minimum have it here with its sign reversed. The
/// factors are given too, for kernels that add integers over a whole block before they scale.
#[derive(Clone, Debug)]
pub struct Decoded {
    len: usize,
    groups: usize,
    quants: [u8; MAX_BLOCK],
    codes: [i8; MAX_BLOCK],
    d: f32,
    dmin: f32,
    sub_scales: [i8; MAX_GROUPS],
    sub_mins: [u8; MAX_GROUPS],
    scales: [f32; MAX_GROUPS],
    mins: [f32; MAX_GROUPS],
}

impl Default for Decoded {
    fn default() -> Self {
        Self {
            len: 0,
            groups: 0,
            quants: [0; MAX_BLOCK],
            codes: [0; MAX_BLOCK],
            d: 0.0,
            dmin: 0.0,
            sub_scales: [0; MAX_GROUPS],
            sub_mins: [0; MAX_GROUPS],
            scales: [0.0; MAX_GROUPS],
            mins: [0.0; MAX_GROUPS],
        }
    }
}

impl Decoded {
    /// Stored codes, unsigned, one per element: `codes[i]` is `quants[i] - zero`, or the
    /// codebook's value at `quants[i]`. (Q8_0 stores signed codes; here they are offset by 128.)
    pub fn quants(&self) -> &[u8] {
        self.quants.get(..self.len).unwrap_or_default()
    }

    /// Values of the codes, one per element.
    pub fn codes(&self) -> &[i8] {
        self.codes.get(..self.len).unwrap_or_default()
    }

    /// The block's scale.
    pub fn d(&self) -> f32 {
        self.d
    }

    /// The block's scale of minimums; +0 for formats without. For Q4_1 and Q5_1, whose blocks
    /// store an offset to add, its negative.
    pub fn dmin(&self) -> f32 {
        self.dmin
    }

    /// Integer scales, one per group; 1 for formats without.
    pub fn sub_scales(&self) -> &[i8] {
        self.sub_scales.get(..self.groups).unwrap_or_default()
    }

    /// Integer minimums, one per group; 0 for formats without, 1 for Q4_1 and Q5_1.
    pub fn sub_mins(&self) -> &[u8] {
        self.sub_mins.get(..self.groups).unwrap_or_default()
    }

    /// Scales, one per group: `d * sub_scales[g]`.
    pub fn scales(&self) -> &[f32] {
        self.scales.get(..self.groups).unwrap_or_default()
    }

    /// Minimums, one per group: `dmin * sub_mins[g]`.
    pub fn mins(&self) -> &[f32] {
        self.mins.get(..self.groups).unwrap_or_default()
    }

    /// The elements as f32; `out` has the block's length (elements beyond it are left alone).
    pub fn values(&self, out: &mut [f32]) {
        let group = self.len.checked_div(self.groups).unwrap_or(0).max(1);
        let groups = out.chunks_mut(group).zip(self.codes().chunks(group));
        for ((out, codes), (scale, min)) in groups.zip(self.scales().iter().zip(self.mins())) {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(code) - min;
            }
        }
    }
}

/// Takes apart one block of a quantized format; `block` has its exact length.
///
/// # Errors
/// The type is not quantized, or `block` is not one block.
pub fn decode(ty: TensorType, block: &[u8], out: &mut Decoded) -> Result<(), Error> {
    let Some(format) = format(ty) else {
        let (what, expected) = ("taken apart into blocks", "a quantized type");
        return Err(ErrorKind::Conversion { ty: ty.name(), what, expected }.into());
    };
    super::check_lengths(ty, block.len(), ty.block_len())?;
    out.len = ty.block_len();
    out.groups = out.len / format.group;
    out.dmin = 0.0;
    out.sub_scales = [1; MAX_GROUPS];
    out.sub_mins = [0; MAX_GROUPS];
    // The length is right, so no layout runs out of bytes and `None` does not occur.
    read(ty, block, out).ok_or(ErrorKind::BlockLength {
        ty: ty.name(),
        bytes: block.len(),
        elements: ty.block_len(),
        block_bytes: ty.block_bytes(),
        block_len: ty.block_len(),
    })?;

    let codes = out.codes.iter_mut().zip(&out.quants).take(out.len);
    match format.codebook {
        Some(values) => {
            for (code, &quant) in codes {
                *code = values.get(usize::from(quant)).copied().unwrap_or(0);
            }
        }
        None => {
            for (code, &quant) in codes {
                *code = quant.wrapping_sub(format.zero).cast_signed();
            }
        }
    }
    for (scale, &sub) in out.scales.iter_mut().zip(&out.sub_scales) {
        *scale = out.d * f32::from(sub);
    }
    for (min, &sub) in out.mins.iter_mut().zip(&out.sub_mins) {
        *min = out.dmin * f32::from(sub);
    }
    Ok(())
}

/// Reads stored codes, `d`, `dmin` and the integer scales; the rest of `out` holds defaults.
fn read(ty: TensorType, block: &[u8], out: &mut Decoded) -> Option<()> {
    use TensorType as T;
    match ty {
        T::F32 | T::F16 | T::BF16 | T::I32 => return None,
        // d, codes of elements 0-15 in low and 16-31 in high halves of bytes.
        T::Q4_0 | T::IQ4NL => {
            let (d, codes) = take_half(block)?;
            out.d = d;
            nibbles(codes, out.quants.get_mut(..32)?)?;
        }
        T::Q4_1 => {
            let (d, rest) = take_half(block)?;
            let (offset, codes) = take_half(rest)?;
            (out.d, out.dmin, out.sub_mins) = (d, -offset, [1; MAX_GROUPS]);
            nibbles(codes, out.quants.get_mut(..32)?)?;
        }
        // As Q4, with the fifth bits of elements 0-31 in a u32.
        T::Q5_0 => {
            let (d, rest) = take_half(block)?;
            out.d = d;
            fives(rest, out.quants.get_mut(..32)?)?;
        }
        T::Q5_1 => {
            let (d, rest) = take_half(block)?;
            let (offset, rest) = take_half(rest)?;
            (out.d, out.dmin, out.sub_mins) = (d, -offset, [1; MAX_GROUPS]);
            fives(rest, out.quants.get_mut(..32)?)?;
        }
        T::Q8_0 => {
            let (d, codes) = take_half(block)?;
            out.d = d;
            for (quant, code) in out.quants.iter_mut().zip(codes) {
                *quant = code.wrapping_add(128);
            }
        }
        T::Q2K => q2_k(block, out)?,
        T::Q3K => q3_k(block, out)?,
        T::Q4K => {
            let (d, rest) = take_half(block)?;
            let (dmin, rest) = take_half(rest)?;
            let (packed, codes) = rest.split_first_chunk::<12>()?;
            (out.d, out.dmin) = (d, dmin);
            six_bit_pairs(packed, out);
            // 64 elements for every 32 bytes.
            for (bytes, quants) in codes.chunks(32).zip(out.quants.chunks_mut(64)) {
                nibbles(bytes, quants)?;
            }
        }
        T::Q5K => {
            let (d, rest) = take_half(block)?;
            let (dmin, rest) = take_half(rest)?;
            let (packed, rest) = rest.split_first_chunk::<12>()?;
            let (high, codes) = rest.split_first_chunk::<32>()?;
            (out.d, out.dmin) = (d, dmin);
            six_bit_pairs(packed, out);
            for (bytes, quants) in codes.chunks(32).zip(out.quants.chunks_mut(64)) {
                nibbles(bytes, quants)?;
            }
            // Bit g of byte l is the fifth bit of element l of group g.
            for (g, quants) in out.quants.chunks_mut(32).enumerate() {
                for (quant, bits) in quants.iter_mut().zip(high) {
                    *quant |= ((bits >> g) & 1) << 4;
                }
            }
        }
        T::Q6K => q6_k(block, out)?,
        T::IQ4XS => iq4_xs(block, out)?,
        T::MXFP4 => {
            let (&exponent, codes) = block.split_first()?;
            out.d = half_e8m0(exponent);
            nibbles(codes, out.quants.get_mut(..32)?)?;
        }
    }
    Some(())
}

/// An f16 from the front.
fn take_half(bytes: &[u8]) -> Option<(f32, &[u8])> {
    let (le, rest) = bytes.split_first_chunk()?;
    Some((f16::from_le_bytes(*le).to_f32(), rest))
}

/// Half of 2^(e - 127), as ggml's `ggml_e8m0_to_fp32_half`: 0 and 1 give subnormal numbers, and
/// 255 is not a NaN.
fn half_e8m0(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

/// Low halves of `bytes` to the first half of `out`, high halves to the second.
fn nibbles(bytes: &[u8], out: &mut [u8]) -> Option<()> {
    let (low, high) = out.split_at_mut_checked(bytes.len())?;
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
    Some(())
}

/// The codes of Q5_0 and Q5_1.
fn fives(bytes: &[u8], out: &mut [u8]) -> Option<()> {
    let (high, codes) = bytes.split_first_chunk()?;
    nibbles(codes, out)?;
    let high = u32::from_le_bytes(*high);
    for (i, quant) in out.iter_mut().enumerate() {
        *quant |= (((high >> i) & 1) << 4) as u8;
    }
    Some(())
}

/// Two bits per element: 128 elements for every 32 bytes, 32 of them for each pair of bits.
fn pairs(bytes: &[u8], out: &mut [u8]) {
    for (bytes, out) in bytes.chunks(32).zip(out.chunks_mut(128)) {
        for (j, out) in out.chunks_mut(32).enumerate() {
            for (quant, byte) in out.iter_mut().zip(bytes) {
                *quant = (byte >> (2 * j)) & 3;
            }
        }
    }
}

/// The 6-bit scales and minimums of Q4_K and Q5_K (`get_scale_min_k4`): four of each in the low
/// bits of bytes 0-3 and 4-7; of the others, four bits in bytes 8-11 and the two high bits in
/// those of bytes 0-3 and 4-7.
fn six_bit_pairs(packed: &[u8; 12], out: &mut Decoded) {
    let [a @ .., _, _, _, _] = packed;
    let (a, b) = a.split_at(4);
    let (_, c) = packed.split_at(8);
    let bytes = a.iter().zip(b).zip(c);
    let (scales, mins) = (&mut out.sub_scales, &mut out.sub_mins);
    for (j, ((a, b), c)) in bytes.enumerate() {
        for (at, scale, min) in
            [(j, a & 63, b & 63), (j + 4, c & 15 | a >> 6 << 4, c >> 4 | b >> 6 << 4)]
        {
            if let (Some(s), Some(m)) = (scales.get_mut(at), mins.get_mut(at)) {
                (*s, *m) = (scale.cast_signed(), min);
            }
        }
    }
}

/// Q2_K: 16 bytes of scale (low) and minimum (high), 64 of codes, d, dmin.
fn q2_k(block: &[u8], out: &mut Decoded) -> Option<()> {
    let (sub, rest) = block.split_first_chunk::<16>()?;
    let (codes, rest) = rest.split_first_chunk::<64>()?;
    let (d, rest) = take_half(rest)?;
    let (dmin, _) = take_half(rest)?;
    (out.d, out.dmin) = (d, dmin);
    for ((byte, scale), min) in sub.iter().zip(&mut out.sub_scales).zip(&mut out.sub_mins) {
        (*scale, *min) = ((byte & 15).cast_signed(), byte >> 4);
    }
    pairs(codes, &mut out.quants);
    Some(())
}

/// Q3_K: 32 bytes of third bits, 64 of two-bit codes, 12 of scales, d.
fn q3_k(block: &[u8], out: &mut Decoded) -> Option<()> {
    let (high, rest) = block.split_first_chunk::<32>()?;
    let (codes, rest) = rest.split_first_chunk::<64>()?;
    let (packed, rest) = rest.split_first_chunk::<12>()?;
    (out.d, _) = take_half(rest)?;
    pairs(codes, &mut out.quants);
    // Bit j of byte l is the third bit of element l of the j-th 32 elements.
    for (j, quants) in out.quants.chunks_mut(32).enumerate() {
        for (quant, bits) in quants.iter_mut().zip(high) {
            *quant |= ((bits >> j) & 1) << 2;
        }
    }
    // Scales are 6 bits less 32: low four of 0-7 and 8-15 in halves of bytes 0-7, high two of
    // i in bits 2 (i / 4) of byte 8 + i % 4.
    let (low, high) = packed.split_at(8);
    let low = low.iter().map(|b| b & 15).chain(low.iter().map(|b| b >> 4));
    let high = (0..4).flat_map(|j| high.iter().map(move |b| (b >> (2 * j)) & 3));
    for ((low, high), scale) in low.zip(high).zip(&mut out.sub_scales) {
        *scale = (low | high << 4).cast_signed() - 32;
    }
    Some(())
}

/// Q6_K: 128 bytes of low four bits, 64 of high two, 16 signed scales, d.
fn q6_k(block: &[u8], out: &mut Decoded) -> Option<()> {
    let (low, rest) = block.split_first_chunk::<128>()?;
    let (high, rest) = rest.split_first_chunk::<64>()?;
    let (sub, rest) = rest.split_first_chunk::<16>()?;
    (out.d, _) = take_half(rest)?;
    let halves = low.chunks(64).zip(high.chunks(32));
    for ((low, high), quants) in halves.zip(out.quants.chunks_mut(128)) {
        nibbles(low, quants)?;
        for (j, quants) in quants.chunks_mut(32).enumerate() {
            for (quant, bits) in quants.iter_mut().zip(high) {
                *quant |= ((bits >> (2 * j)) & 3) << 4;
            }
        }
    }
    for (scale, byte) in out.sub_scales.iter_mut().zip(sub) {
        *scale = byte.cast_signed();
    }
    Some(())
}

/// IQ4_XS: d, high two bits of 8 scales in a u16, their low four in 4 bytes, 128 bytes of codes.
fn iq4_xs(block: &[u8], out: &mut Decoded) -> Option<()> {
    let (d, rest) = take_half(block)?;
    let (high, rest) = rest.split_first_chunk()?;
    let (low, codes) = rest.split_first_chunk::<4>()?;
    out.d = d;
    let high = u16::from_le_bytes(*high);
    let low = low.iter().flat_map(|b| [b & 15, b >> 4]);
    for (i, (low, scale)) in low.zip(&mut out.sub_scales).enumerate() {
        let high = ((high >> (2 * i)) & 3) as u8;
        *scale = (low | high << 4).cast_signed() - 32;
    }
    for (bytes, quants) in codes.chunks(16).zip(out.quants.chunks_mut(32)) {
        nibbles(bytes, quants)?;
    }
    Some(())
}
