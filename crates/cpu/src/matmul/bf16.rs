//! `bf16 [M, N] x blocks [N, K] -> f32 [M, K]`: gradients through quantized weights.
//!
//! The elements of the weight are rounded to bf16. A product of two bf16 is exact in f32; how the
//! products of an output are added up is the family's:
//!
//! - `avx512-amx`: in steps of 32 elements of the reduced dimension, ascending. A step is what
//!   `TDPBF16PS` does: the elements at even and at odd places are two chains of fused
//!   multiply-adds from 0, and their sum is added to the output. Subnormal numbers count as 0.
//! - any other: one chain, ascending, as products of f32 ([`super::float`]).
//!
//! Neither depends on the number of rows, on blocking or on tiles.

use std::ops::Range;

use super::float::{CHUNK, Float, Right, Strided, scratch_floats, transpose};
use crate::dot::{Dot, Driver, Kernel, drive};
use crate::pack::{PANEL, Panels};
use crate::simd::{Isa, LANES};

/// Rows x panels of one tile: panels of 16 columns, an even number of them from an even one on.
pub(crate) struct Bf16<'a> {
    pub(crate) weight: Panels<'a>,
    /// Rows of bits of bf16.
    pub(crate) x: *const u16,
    /// Elements between rows of `x`, which have `weight.n` of them.
    pub(crate) x_step: usize,
    pub(crate) rows: Range<usize>,
    /// The part of the reduced dimension that is added up; on AMX all of it. Where it does not
    /// begin at 0, it is added to what `out` holds.
    pub(crate) k: Range<usize>,
    pub(crate) panels: Range<usize>,
    /// `[M, K]`.
    pub(crate) out: *mut f32,
    /// Elements between rows of `out`.
    pub(crate) out_step: usize,
    /// At least [`scratch`] floats, aligned to 64 bytes.
    pub(crate) scratch: *mut f32,
}

/// Floats of scratch of a tile of so many rows and panels, for any family.
pub(crate) fn scratch(rows: usize, panels: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    let tiles = super::tiles::bf16_scratch(rows);
    #[cfg(not(target_arch = "x86_64"))]
    let tiles = 0;
    (scratch_floats(panels) + rows * CHUNK).max(tiles)
}

impl Bf16<'_> {
    /// Runs the tile.
    pub(crate) fn run(self, isa: Isa) {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(amx) => super::tiles::bf16(amx, &self),
            isa => drive(isa, self),
        }
    }
}

impl Driver for Bf16<'_> {
    type Out = ();

    fn run<S: Dot>(self, s: S) {
        let reduced = self.k.clone();
        let wide = self.scratch.wrapping_add(scratch_floats(self.panels.len()));
        let mut k = reduced.start;
        while k < reduced.end {
            let count = CHUNK.min(reduced.end - k);
            let rows = self.rows.clone();
            let part = Float {
                // Row `rows.start`, element `k` is the first that was widened.
                a: Strided { start: wide.wrapping_sub(rows.start * CHUNK + k), row: CHUNK, col: 1 },
                b: Right::Transposed(self.weight),
                k: reduced.clone(),
                n: self.weight.geometry().k,
                rows,
                panels: self.panels.clone(),
                out: self.out,
                out_step: self.out_step,
                more: reduced.start > 0,
                near: false,
                scratch: self.scratch,
            };
            // SAFETY: the tile's rows and panels exist, with their elements; scratch has the
            // parts that `scratch` counts.
            unsafe {
                transpose(s, self.weight, self.panels.clone(), k..k + count, self.scratch);
                for panel in 0..self.panels.len() {
                    let at = self.scratch.add(panel * CHUNK * PANEL);
                    s.enter(Round { at, vectors: count });
                }
                for (i, row) in self.rows.clone().enumerate() {
                    let from = self.x.add(row * self.x_step + k);
                    s.enter(Widen { from, count, to: wide.add(i * CHUNK) });
                }
                part.panels(s, self.scratch.cast_const(), CHUNK * PANEL, k, count);
            }
            k += count;
        }
    }
}

/// Rounds f32 to what bf16 holds, in place.
struct Round {
    at: *mut f32,
    vectors: usize,
}

impl<S: Dot> Kernel<S> for Round {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        for i in 0..self.vectors {
            // SAFETY: the caller's: there are so many vectors.
            unsafe {
                let at = self.at.add(i * LANES);
                let bits = s.to_bf16_bits(s.load(at));
                s.store(at, s.from_bits(s.i32_shl::<16>(bits)));
            }
        }
    }
}

/// bf16 to f32.
struct Widen {
    from: *const u16,
    count: usize,
    to: *mut f32,
}

impl<S: Dot> Kernel<S> for Widen {
    type Out = ();

    #[inline(always)]
    fn run(self, s: S) {
        for i in (0..self.count).step_by(LANES) {
            // SAFETY: both have `count` elements, `to` room for whole vectors.
            unsafe {
                s.store(self.to.add(i), s.load_bf16_first(self.from.add(i), self.count - i));
            }
        }
    }
}
