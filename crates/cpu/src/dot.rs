//! Integer dot products of bytes on every family, and how a product's kernel enters a family.
//!
//! A *quad* is a vector of 16 lanes of 4 bytes, seen as [`Simd::I32`]: per lane, four
//! consecutive codes of one output. It is multiplied with four activations, the same for all
//! lanes. Sums are exact on every family, so families agree in the integers.

#[cfg(target_arch = "x86_64")]
mod x86;

use crate::simd::{Isa, LANES, Portable, Simd};

/// The widest code in a quad, which decides what instructions are exact: at most 31.
pub(crate) const NARROW: u32 = 5;
/// Codes of at most 63.
pub(crate) const MIDDLE: u32 = 6;
/// Codes of at most 255, of which [`WIDE_ZERO`] stands for 0.
pub(crate) const WIDE: u32 = 8;
/// The code that stands for 0 in quads of the class [`WIDE`].
pub(crate) const WIDE_ZERO: u8 = 128;

/// Work that is compiled once per family that has a use for it.
///
/// What its fields say of their pointers, whoever makes one has made sure of.
pub(crate) trait Kernel<S> {
    /// What it gives back.
    type Out;
    /// Does the work. Must be `#[inline(always)]`.
    fn run(self, simd: S) -> Self::Out;
}

/// Work around kernels, written for every family; itself compiled without a family's
/// instructions.
///
/// What its fields say of their pointers, whoever makes one has made sure of.
pub(crate) trait Driver {
    /// What it gives back.
    type Out;
    /// Does the work.
    fn run<S: Dot>(self, simd: S) -> Self::Out;
}

/// Runs a driver with the family of `isa`.
pub(crate) fn drive<D: Driver>(isa: Isa, driver: D) -> D::Out {
    match isa {
        Isa::Portable(simd) => driver.run(simd),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(simd) => driver.run(simd),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(simd) => driver.run(simd),
        #[cfg(target_arch = "x86_64")]
        Isa::Vnni(simd) => driver.run(simd),
        #[cfg(target_arch = "x86_64")]
        Isa::Amx(amx) => driver.run(amx.vectors()),
    }
}

/// Byte operations of a family.
///
/// # Safety
/// The pointers given must be valid for the bytes they touch.
pub(crate) trait Dot: Simd {
    /// Rows and panels that a float product accumulates in registers.
    const FLOAT_BLOCK: (usize, usize);
    /// Rows and panels that an integer product accumulates in registers.
    const INT_BLOCK: (usize, usize);
    /// Whether [`Dot::dot2`] does something of its own for each class; if so, in class [`WIDE`]
    /// it multiplies with `code - 128` instead of `code`.
    const CLASSES: bool;
    /// Whether kernels for few rows read bit planes; else codes are expanded to bytes first.
    const PLANES: bool;

    /// Runs a kernel compiled for this family.
    fn enter<K: Kernel<Self>>(self, kernel: K) -> K::Out;

    /// The table's byte for each byte of a quad, all below 16. The table is a quad whose 16-byte
    /// lanes are the same.
    fn lookup(self, table: Self::I32, quad: Self::I32) -> Self::I32;

    /// `acc + a . x + b . y` per lane: `a` and `b` are quads of codes of `class`, a constant
    /// of the caller's; `x` and `y` are four signed bytes each, none of them -128.
    fn dot2(
        self,
        class: u32,
        acc: Self::I32,
        a: Self::I32,
        x: i32,
        b: Self::I32,
        y: i32,
    ) -> Self::I32;

    /// `acc + a0 x0 + a1 x1` per lane, of signed integers of 16 bits: the low half of `a` and `x` is
    /// the first. The sum must fit.
    fn dot16(self, acc: Self::I32, a: Self::I32, x: i32) -> Self::I32;

    /// Asks for the cache line at this address, which need not be valid.
    fn prefetch(self, at: *const u8);

    /// Reads 64 bytes.
    #[inline(always)]
    unsafe fn load_quad(self, from: *const u8) -> Self::I32 {
        // SAFETY: the caller's.
        self.bits(unsafe { self.load(from.cast()) })
    }

    /// Writes 64 bytes.
    #[inline(always)]
    unsafe fn store_quad(self, to: *mut u8, quad: Self::I32) {
        // SAFETY: the caller's.
        unsafe { self.store(to.cast(), self.from_bits(quad)) }
    }
}

/// What the sum of the activations is multiplied with and subtracted, so that a sum over codes
/// becomes one over `code - zero`.
pub(crate) const fn offset<S: Dot>(class: u32, zero: u8) -> i32 {
    if class == WIDE && S::CLASSES { 0 } else { zero as i32 }
}

/// The lanes of a vector.
#[inline(always)]
fn lanes<S: Simd>(s: S, v: S::I32) -> [i32; LANES] {
    let mut out = [0; LANES];
    // SAFETY: the array has 16 elements of the same size.
    unsafe { s.store(out.as_mut_ptr().cast(), s.from_bits(v)) };
    out
}

/// A vector of lanes.
#[inline(always)]
fn vector<S: Simd>(s: S, lanes: [i32; LANES]) -> S::I32 {
    // SAFETY: the array has 16 elements of the same size.
    s.bits(unsafe { s.load(lanes.as_ptr().cast()) })
}

impl Dot for Portable {
    const FLOAT_BLOCK: (usize, usize) = (2, 1);
    const INT_BLOCK: (usize, usize) = (2, 1);
    const CLASSES: bool = false;
    const PLANES: bool = false;

    // One copy of each kernel is enough.
    #[inline(never)]
    fn enter<K: Kernel<Self>>(self, kernel: K) -> K::Out {
        kernel.run(self)
    }

    #[inline(always)]
    fn lookup(self, table: Self::I32, quad: Self::I32) -> Self::I32 {
        let table = lanes(self, table);
        let byte = |i: u8| table[usize::from(i / 4) % 4].to_le_bytes()[usize::from(i % 4)];
        vector(self, lanes(self, quad).map(|w| i32::from_le_bytes(w.to_le_bytes().map(byte))))
    }

    #[inline(always)]
    fn dot2(self, _: u32, acc: Self::I32, a: Self::I32, x: i32, b: Self::I32, y: i32) -> Self::I32 {
        let mut sums = lanes(self, acc);
        for (quad, x) in [(lanes(self, a), x), (lanes(self, b), y)] {
            let x = x.to_le_bytes().map(|x| i32::from(x.cast_signed()));
            for (sum, w) in sums.iter_mut().zip(quad) {
                let w = w.to_le_bytes().map(i32::from);
                *sum += w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3];
            }
        }
        vector(self, sums)
    }

    #[inline(always)]
    fn dot16(self, acc: Self::I32, a: Self::I32, x: i32) -> Self::I32 {
        let halves = |v: i32| [v << 16 >> 16, v >> 16];
        let (mut sums, [x, y]) = (lanes(self, acc), halves(x));
        for (sum, [a, b]) in sums.iter_mut().zip(lanes(self, a).map(halves)) {
            // What is not finite has any code.
            *sum = sum.wrapping_add((a * x).wrapping_add(b * y));
        }
        vector(self, sums)
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}

#[cfg(test)]
mod tests;
