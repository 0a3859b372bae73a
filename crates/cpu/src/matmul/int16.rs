//! `int16-rows [M, N] x blocks [N, K] -> f32 [M, K]`: gradients through quantized weights in block
//! floating point.
//!
//! The weight's elements are rounded as the rows were ([`graph::DType::Int16Rows`]), to 11 bits
//! where those have 14: each column has a power of two for every 64 of its elements. 64 products of
//! 16383 and 2048 are just below 2^31. Cotangents have the more bits since their magnitudes differ
//! more. The products of a group are added up as integers, exactly; the sum is added to the output as
//! `fma(sum * column's scale, row's scale, output)`, groups ascending, from 0. None of it depends
//! on the number of rows, on blocking or on tiles.

use std::ops::Range;

use graph::INT16_GROUP;

use super::blocks;
use super::float::{CHUNK, by_rows, scratch_floats, transpose};
use crate::dot::{Dot, Driver, Kernel};
use crate::pack::{PANEL, Panels};
use crate::simd::{LANES, Simd};

/// Bytes of a group of a row: codes and their scale.
pub(crate) const GROUP_BYTES: usize = INT16_GROUP * 2 + 4;

/// Bytes of a row of so many elements, as [`graph::DType::row_bytes`] has it.
pub(crate) fn row_bytes(elements: usize) -> usize {
    elements.div_ceil(INT16_GROUP) * GROUP_BYTES
}

/// Bytes of a panel's part of a group: a pair of codes of each column for every two rows.
const PANEL_BYTES: usize = INT16_GROUP / 2 * PANEL * 4;

/// Panels that are unpacked at a time: a unit.
const UNPACKED: usize = 2;

/// Bits of the codes of rows, and of a weight; these may be `2^WEIGHT_BITS`, too.
pub(crate) const ROW_BITS: i32 = 14;
const WEIGHT_BITS: i32 = 11;

/// The scale of groups with these largest magnitudes, as bits, and what their elements are
/// multiplied by, its inverse.
#[inline(always)]
pub(crate) fn scale<S: Simd>(s: S, largest: S::I32, bits: i32) -> (S::F32, S::F32) {
    let exponent = s.i32_and(largest, s.i32_splat(0xff << 23));
    let exponent = s.i32_max(exponent, s.i32_splat((127 - 113) << 23));
    let infinite = s.i32_gt(exponent, s.i32_splat(0xfe << 23));
    let scale = s.i32_sub(exponent, s.i32_splat((bits - 1) << 23));
    let inverse = s.i32_sub(s.i32_splat((2 * 127) << 23), scale);
    let scale = s.i32_select(infinite, s.i32_splat(0x7fc0_0000), scale);
    (s.from_bits(scale), s.from_bits(inverse))
}

/// The codes of elements of a row.
#[inline(always)]
pub(crate) fn code<S: Simd>(s: S, x: S::F32, inverse: S::F32) -> S::I32 {
    // Of NaN, `min` gives the limit.
    let most = s.splat(((1 << ROW_BITS) - 1) as f32);
    s.to_i32(s.max(s.min(s.mul(x, inverse), most), s.neg(most)))
}

/// Rows x panels of one tile: panels of 16 columns, an even number of them from an even one on.
pub(crate) struct Int16<'a> {
    pub(crate) weight: Panels<'a>,
    /// Rows of groups.
    pub(crate) x: *const u8,
    /// Bytes between rows of `x`.
    pub(crate) x_step: usize,
    pub(crate) rows: Range<usize>,
    /// The part of the reduced dimension that is added up, from a multiple of [`INT16_GROUP`] on.
    /// Where it does not begin at 0, it is added to what `out` holds.
    pub(crate) k: Range<usize>,
    pub(crate) panels: Range<usize>,
    /// `[M, K]`.
    pub(crate) out: *mut f32,
    /// Elements between rows of `out`.
    pub(crate) out_step: usize,
    /// At least [`scratch`] floats, aligned to 64 bytes.
    pub(crate) scratch: *mut f32,
}

/// Floats of scratch of a tile of so many panels.
pub(crate) fn scratch(panels: usize) -> usize {
    scratch_floats(UNPACKED) + panels * (PANEL_BYTES / 4 + PANEL)
}

impl Driver for Int16<'_> {
    type Out = ();

    fn run<S: Dot>(self, s: S) {
        let codes = self.scratch.wrapping_add(scratch_floats(UNPACKED)).cast::<u8>();
        let scales = codes.wrapping_add(self.panels.len() * PANEL_BYTES).cast::<f32>();
        let mut k = self.k.start;
        loop {
            let count = INT16_GROUP.min(self.k.end - k);
            // Panels of the weight have 16 rows; those that it does not have are zeros.
            let pairs = count.div_ceil(PANEL) * PANEL / 2;
            // SAFETY: the tile's rows and panels exist, with their elements; scratch has the
            // parts that `scratch` counts.
            unsafe {
                self.unpack(s, k, count, codes, scales);
                self.panels(s, codes, scales, k, pairs);
            }
            k += count;
            if k >= self.k.end {
                break;
            }
        }
    }
}

impl Int16<'_> {
    /// Writes `count` rows of the weight from `k` on as codes, `[panel][pairs of rows][16 columns]`
    /// of two, and their scales, `[panel][16 columns]`.
    ///
    /// # Safety
    /// The tile's panels must exist; scratch memory must be as [`scratch`] says.
    unsafe fn unpack<S: Dot>(
        &self,
        s: S,
        k: usize,
        count: usize,
        codes: *mut u8,
        scales: *mut f32,
    ) {
        let all = self.panels.clone();
        for first in all.clone().step_by(UNPACKED) {
            let some = first..(first + UNPACKED).min(all.end);
            // SAFETY: the caller's.
            unsafe {
                transpose(s, self.weight, some.clone(), k..k + count, self.scratch);
                for (i, panel) in some.enumerate() {
                    let at = panel - all.start;
                    s.enter(Encode {
                        from: self.scratch.add(i * CHUNK * PANEL),
                        pairs: count.div_ceil(PANEL) * PANEL / 2,
                        codes: codes.add(at * PANEL_BYTES),
                        scales: scales.add(at * PANEL),
                    });
                }
            }
        }
    }

    /// Adds a group's products to the tile's outputs, or starts them.
    ///
    /// # Safety
    /// The tile's rows and panels must exist, and `codes` and `scales` hold the panels' group.
    unsafe fn panels<S: Dot>(
        &self,
        s: S,
        codes: *const u8,
        scales: *const f32,
        k: usize,
        pairs: usize,
    ) {
        let (mut done, total) = (0, self.panels.len());
        while done < total {
            let wide = match total - done {
                // Two pairs rather than three and one, which alone is short of work.
                4 => 2,
                left => left,
            }
            .min(S::FLOAT_BLOCK.1);
            let column = (self.panels.start + done) * PANEL;
            for (first, size) in blocks(self.rows.len(), S::FLOAT_BLOCK.0) {
                let row = self.rows.start + first;
                // SAFETY: the caller's.
                let block = unsafe {
                    Block {
                        x: self.x.add(row * self.x_step + k / INT16_GROUP * GROUP_BYTES),
                        x_step: self.x_step,
                        codes: codes.add(done * PANEL_BYTES),
                        scales: scales.add(done * PANEL),
                        pairs,
                        out: self.out.wrapping_add(row * self.out_step + column),
                        out_step: self.out_step,
                        add: k > 0,
                    }
                };
                match wide {
                    3 => rows::<S, 3>(s, block, size),
                    2 => rows::<S, 2>(s, block, size),
                    _ => rows::<S, 1>(s, block, size),
                }
            }
            done += wide;
        }
    }
}

/// Picks the kernel for a block of rows.
fn rows<S: Dot, const P: usize>(s: S, block: Block, size: usize) {
    if const { S::FLOAT_BLOCK.1 < P } {
        return;
    }
    by_rows!(S, s, size, |R| Multiply::<R, P>(block))
}

/// Operands of [`Multiply`].
struct Block {
    /// The group of the first row.
    x: *const u8,
    x_step: usize,
    /// Of panels [`PANEL_BYTES`] apart.
    codes: *const u8,
    scales: *const f32,
    pairs: usize,
    out: *mut f32,
    out_step: usize,
    /// Whether the outputs hold sums of the groups before.
    add: bool,
}

/// The kernel: a group of `R` rows times `P` panels. Columns of a quantized weight are whole
/// panels.
struct Multiply<const R: usize, const P: usize>(Block);

impl<S: Dot, const R: usize, const P: usize> Kernel<S> for Multiply<R, P> {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        let t = self.0;
        let mut acc = [[s.i32_splat(0); P]; R];
        // SAFETY: each of `R` rows has a group at `x`, each of `P` panels `pairs` vectors of codes
        // and one of scales, the result `R` rows of `P` panels.
        unsafe {
            for pair in 0..t.pairs {
                let mut columns = [s.i32_splat(0); P];
                for (p, v) in columns.iter_mut().enumerate() {
                    *v = s.load_quad(t.codes.add(p * PANEL_BYTES + pair * PANEL * 4));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = t.x.add(r * t.x_step + pair * 4).cast::<i32>().read();
                    for (acc, &v) in acc.iter_mut().zip(&columns) {
                        *acc = s.dot16(*acc, v, x);
                    }
                }
            }
            for (r, acc) in acc.into_iter().enumerate() {
                let row = t.x.add(r * t.x_step + INT16_GROUP * 2).cast::<f32>().read();
                for (p, acc) in acc.into_iter().enumerate() {
                    let at = t.out.add(r * t.out_step + p * PANEL);
                    let before = if t.add { s.load(at) } else { s.zero() };
                    let sum = s.mul(s.to_f32(acc), s.load(t.scales.add(p * PANEL)));
                    s.store(at, s.fma(sum, s.splat(row), before));
                }
            }
        }
    }
}

/// A group of a panel of columns, `[2 * pairs][16]` f32, as codes and scales.
struct Encode {
    from: *const f32,
    pairs: usize,
    codes: *mut u8,
    scales: *mut f32,
}

impl<S: Dot> Kernel<S> for Encode {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        // SAFETY: the caller's: there are so many vectors, and room for as many codes.
        unsafe {
            let at = |row: usize| s.load(self.from.add(row * LANES));
            let mut largest = [s.i32_splat(0); 2];
            for pair in 0..self.pairs {
                for (half, largest) in largest.iter_mut().enumerate() {
                    *largest = s.i32_max(*largest, s.bits(s.abs(at(2 * pair + half))));
                }
            }
            let (scale, inverse) = scale(s, s.i32_max(largest[0], largest[1]), WEIGHT_BITS);
            s.store(self.scales, scale);
            // Beside 1.5 * 2^23 an integer is the low bits of the mantissa.
            let code = |row: usize| s.bits(s.fma(at(row), inverse, s.splat(12_582_912.0)));
            for pair in 0..self.pairs {
                let low = s.i32_and(code(2 * pair), s.i32_splat(0xffff));
                let high = s.i32_shl::<16>(code(2 * pair + 1));
                s.store_quad(self.codes.add(pair * LANES * 4), s.i32_or(high, low));
            }
        }
    }
}
