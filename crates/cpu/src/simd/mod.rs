//! Sixteen virtual lanes of f32 on every kernel family, and how a kernel is instantiated for one.
//!
//! A kernel is written once, generic over [`Simd`], as `#[inline(always)]` code of a [`Task`];
//! [`Isa::run`] calls it behind a function that has the family's target features. Whatever a
//! task calls must itself be `#[inline(always)]` or small enough to be inlined, since a function
//! that is not inlined is compiled without the features; or a task again, by [`Simd::call`],
//! which is compiled once for all its callers.
//!
//! Families may differ in bits (the portable one has no fused multiply-add), one family never
//! does: every vector op is lane by lane, and sums over lanes are one fixed tree.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[allow(clippy::excessive_precision)] // coefficients as they were fitted
mod math;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{Avx512, Vnni};
pub(crate) use portable::Portable;

#[cfg(target_arch = "x86_64")]
use crate::amx::Amx;

/// Lanes of every vector, whatever the family.
pub(crate) const LANES: usize = 16;

/// A set of kernels that share their arithmetic.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Family {
    /// Plain Rust, for any processor.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ.
    Avx512,
    /// The same, and VNNI: the same bits sooner.
    Vnni,
    /// The same, and AMX: its own arithmetic where gradients pass quantized weights in bf16.
    Amx,
}

impl Family {
    /// Every family, slowest first.
    pub const ALL: [Family; 5] =
        [Family::Portable, Family::Avx2, Family::Avx512, Family::Vnni, Family::Amx];

    /// The name checkpoints and reports carry.
    pub fn name(self) -> &'static str {
        match self {
            Family::Portable => "portable",
            Family::Avx2 => "avx2",
            Family::Avx512 => "avx512",
            Family::Vnni => "avx512-vnni",
            Family::Amx => "avx512-amx",
        }
    }

    /// The value of `GRADUS_CPU` that asks for it.
    pub fn key(self) -> &'static str {
        match self {
            Family::Vnni => "vnni",
            Family::Amx => "amx",
            other => other.name(),
        }
    }

    /// True when this processor runs it.
    pub fn is_available(self) -> bool {
        Isa::of(self).is_some()
    }
}

/// The family a device runs, with the proof that the processor has its instructions.
#[derive(Copy, Clone)]
pub(crate) enum Isa {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Vnni(Vnni),
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
}

impl Isa {
    /// The widest family of this processor.
    pub(crate) fn detect() -> Isa {
        let widest = Family::ALL.into_iter().rev().find_map(Isa::of);
        widest.unwrap_or(Isa::Portable(Portable))
    }

    /// A given family, if the processor has it.
    pub(crate) fn of(family: Family) -> Option<Isa> {
        match family {
            Family::Portable => Some(Isa::Portable(Portable)),
            #[cfg(target_arch = "x86_64")]
            Family::Avx2 => Avx2::detect().map(Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            Family::Avx512 => Avx512::detect().map(Isa::Avx512),
            #[cfg(target_arch = "x86_64")]
            Family::Vnni => Vnni::detect().map(Isa::Vnni),
            #[cfg(target_arch = "x86_64")]
            Family::Amx => Amx::detect().map(Isa::Amx),
            #[cfg(not(target_arch = "x86_64"))]
            Family::Avx2 | Family::Avx512 | Family::Vnni | Family::Amx => None,
        }
    }

    pub(crate) fn family(self) -> Family {
        match self {
            Isa::Portable(_) => Family::Portable,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => Family::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => Family::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni(_) => Family::Vnni,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(_) => Family::Amx,
        }
    }

    /// Runs a task compiled for this family.
    pub(crate) fn run<T: Task>(self, task: T) -> T::Out {
        match self {
            Isa::Portable(simd) => simd.call(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(simd) => simd.call(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(simd) => simd.call(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Vnni(simd) => simd.call(task),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(amx) => amx.vectors().call(task),
        }
    }
}

/// Work that is compiled once per family. `run` must be `#[inline(always)]`.
///
/// What its fields say of their pointers, whoever makes one has made sure of.
pub(crate) trait Task {
    /// What it gives back.
    type Out;
    /// Does the work.
    fn run<S: Simd>(self, simd: S) -> Self::Out;
}

/// One family's vectors of [`LANES`] lanes. A value of an implementing type is the proof that
/// the processor has the instructions.
///
/// Loads and stores need no alignment. The `_first` variants touch only the first `n` elements
/// (all 16 when `n` is larger); lanes beyond are zero after a load.
///
/// # Safety
/// The pointers given to loads and stores must be valid for the elements they touch.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// 16 floats.
    type F32: Copy;
    /// 16 integers; arithmetic wraps.
    type I32: Copy;
    /// 16 truth values.
    type Mask: Copy;

    /// Whether [`Simd::fma`] rounds once.
    const FUSED: bool;

    /// How many vectors of sums a register-blocked kernel keeps, and the most of them side by side.
    const BLOCK: (usize, usize);

    /// Runs a task as a function of its own, with the family's instructions.
    fn call<T: Task>(self, task: T) -> T::Out;

    fn splat(self, x: f32) -> Self::F32;
    unsafe fn load(self, from: *const f32) -> Self::F32;
    unsafe fn load_first(self, from: *const f32, n: usize) -> Self::F32;
    unsafe fn store(self, to: *mut f32, v: Self::F32);
    unsafe fn store_first(self, to: *mut f32, v: Self::F32, n: usize);
    /// IEEE binary16 bits to f32.
    unsafe fn load_f16(self, from: *const u16) -> Self::F32;
    unsafe fn load_f16_first(self, from: *const u16, n: usize) -> Self::F32;
    /// Rounds to nearest even.
    unsafe fn store_f16(self, to: *mut u16, v: Self::F32);
    unsafe fn store_f16_first(self, to: *mut u16, v: Self::F32, n: usize);
    /// bfloat16 bits to f32.
    unsafe fn load_bf16(self, from: *const u16) -> Self::F32;
    unsafe fn load_bf16_first(self, from: *const u16, n: usize) -> Self::F32;
    /// The low 16 bits of each lane.
    unsafe fn store_u16(self, to: *mut u16, v: Self::I32);
    unsafe fn store_u16_first(self, to: *mut u16, v: Self::I32, n: usize);
    /// Signed bytes, widened.
    unsafe fn load_i8(self, from: *const i8) -> Self::I32;
    /// Signed bytes, saturated.
    unsafe fn store_i8(self, to: *mut i8, v: Self::I32);

    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn sqrt(self, a: Self::F32) -> Self::F32;
    /// `a * b + c`; the portable family rounds the product.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `c - a * b`; the portable family rounds the product.
    fn fnma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `a < b ? a : b`: `b` when either is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a > b ? a : b`: `b` when either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// To the nearest integer, ties to even; the sign of a zero result is not kept.
    fn round_half_even(self, a: Self::F32) -> Self::F32;
    fn lt(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    fn eq(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `yes` where the mask is set.
    fn select(self, mask: Self::Mask, yes: Self::F32, no: Self::F32) -> Self::F32;
    /// The first `n` lanes.
    fn first(self, n: usize) -> Self::Mask;
    /// `a` and not `b`.
    fn and_not(self, a: Self::Mask, b: Self::Mask) -> Self::Mask;

    fn bits(self, a: Self::F32) -> Self::I32;
    #[allow(clippy::wrong_self_convention)] // `self` is the proof that the instructions exist
    fn from_bits(self, a: Self::I32) -> Self::F32;
    /// The nearest integer, for |a| < 2^22; anything else gives some integer.
    fn to_i32(self, a: Self::F32) -> Self::I32;
    fn to_f32(self, a: Self::I32) -> Self::F32;
    fn i32_splat(self, x: i32) -> Self::I32;
    fn i32_add(self, a: Self::I32, b: Self::I32) -> Self::I32;
    fn i32_sub(self, a: Self::I32, b: Self::I32) -> Self::I32;
    fn i32_and(self, a: Self::I32, b: Self::I32) -> Self::I32;
    fn i32_or(self, a: Self::I32, b: Self::I32) -> Self::I32;
    fn i32_max(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a << N`
    fn i32_shl<const N: u32>(self, a: Self::I32) -> Self::I32;
    /// `a >> N`, arithmetic.
    fn i32_shr<const N: u32>(self, a: Self::I32) -> Self::I32;
    fn i32_gt(self, a: Self::I32, b: Self::I32) -> Self::Mask;
    fn i32_select(self, mask: Self::Mask, yes: Self::I32, no: Self::I32) -> Self::I32;

    /// Lane `i + 8` is added to lane `i`, then `i + 4`, `i + 2`, `i + 1`.
    fn reduce_sum(self, a: Self::F32) -> f32;
    /// The same tree with [`Simd::max`].
    fn reduce_max(self, a: Self::F32) -> f32;
    fn i32_reduce_sum(self, a: Self::I32) -> i32;
    fn i32_reduce_max(self, a: Self::I32) -> i32;
    /// Transposes a 16 x 16 matrix of rows.
    fn transpose(self, rows: &mut [Self::F32; LANES]);
    /// The even and the odd elements of the 32 in `a` and `b`.
    fn unzip(self, a: Self::F32, b: Self::F32) -> (Self::F32, Self::F32);
    /// The inverse of [`Simd::unzip`].
    fn zip(self, even: Self::F32, odd: Self::F32) -> (Self::F32, Self::F32);

    #[inline(always)]
    fn zero(self) -> Self::F32 {
        self.splat(0.0)
    }

    #[inline(always)]
    fn neg(self, a: Self::F32) -> Self::F32 {
        // Not `0 - a`: that gives +0 for +0.
        let flipped = self.i32_sub(self.bits(a), self.i32_splat(i32::MIN));
        self.from_bits(flipped)
    }

    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        self.from_bits(self.i32_and(self.bits(a), self.i32_splat(i32::MAX)))
    }

    /// The magnitude of `a` with the sign of `sign`.
    #[inline(always)]
    fn copysign(self, a: Self::F32, sign: Self::F32) -> Self::F32 {
        let magnitude = self.i32_and(self.bits(a), self.i32_splat(i32::MAX));
        let sign = self.i32_and(self.bits(sign), self.i32_splat(i32::MIN));
        self.from_bits(self.i32_or(magnitude, sign))
    }

    /// bfloat16 bits in the low half of each lane, rounded to nearest even; NaN stays NaN.
    #[inline(always)]
    fn to_bf16_bits(self, a: Self::F32) -> Self::I32 {
        let bits = self.bits(a);
        let odd = self.i32_and(self.i32_shr::<16>(bits), self.i32_splat(1));
        let rounded = self.i32_add(bits, self.i32_add(odd, self.i32_splat(0x7fff)));
        let quiet = self.i32_or(bits, self.i32_splat(0x0040_0000));
        let magnitude = self.i32_and(bits, self.i32_splat(i32::MAX));
        let nan = self.i32_gt(magnitude, self.i32_splat(0x7f80_0000));
        let chosen = self.i32_select(nan, quiet, rounded);
        self.i32_and(self.i32_shr::<16>(chosen), self.i32_splat(0xffff))
    }

    /// `a 2^n` for whole `n` in -150 ..= 128 and `a` near 1, rounded once.
    #[inline(always)]
    fn times_power_of_two(self, a: Self::F32, n: Self::F32) -> Self::F32 {
        math::times_power_of_two(self, a, n)
    }

    /// `e^a`, within about 1 ulp: 0 at -inf, inf above 88.73, NaN at NaN, subnormal results
    /// kept.
    #[inline(always)]
    fn exp(self, a: Self::F32) -> Self::F32 {
        math::exp(self, a)
    }

    /// Natural logarithm within about 1 ulp: -inf at 0, NaN below.
    #[inline(always)]
    fn log(self, a: Self::F32) -> Self::F32 {
        math::log(self, a)
    }

    /// Hyperbolic tangent within about 2 ulp, the sign and smallness of `a` kept.
    #[inline(always)]
    fn tanh(self, a: Self::F32) -> Self::F32 {
        math::tanh(self, a)
    }

    /// `1 / (1 + e^-a)`, accurate in both tails.
    #[inline(always)]
    fn sigmoid(self, a: Self::F32) -> Self::F32 {
        math::sigmoid(self, a)
    }

    /// `e^a - 1` within some ulp, near 0 too.
    #[inline(always)]
    fn expm1(self, a: Self::F32) -> Self::F32 {
        math::expm1(self, a)
    }

    /// `ln(1 + a)` within some ulp, near 0 too.
    #[inline(always)]
    fn log1p(self, a: Self::F32) -> Self::F32 {
        math::log1p(self, a)
    }

    /// Every lane by itself, in f64: for what is rare and has no vector code.
    #[inline(always)]
    fn lane_by_lane(self, a: Self::F32, f: fn(f64) -> f64) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has 16 elements.
        unsafe { self.store(lanes.as_mut_ptr(), a) };
        for lane in &mut lanes {
            *lane = f(f64::from(*lane)) as f32;
        }
        // SAFETY: as above.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// To the nearest integer, ties away from zero, for |a| < 2^22.
    #[inline(always)]
    fn round_half_away(self, a: Self::F32) -> Self::F32 {
        math::round_half_away(self, a)
    }

    /// Lanes `from .. to`.
    #[inline(always)]
    fn between(self, from: usize, to: usize) -> Self::Mask {
        self.and_not(self.first(to), self.first(from))
    }
}
