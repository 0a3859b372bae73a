//! Functions of vectors: one arithmetic for all families.

use super::Simd;

/// `e^a`, within about 1 ulp: 0 at -inf, inf above 88.73, NaN at NaN, subnormal results
/// kept. Range reduction by `n ln 2` and the degree-6 polynomial of Cephes' `expf`.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, a: S::F32) -> S::F32 {
    // The bounds come first: `min` and `max` give their second operand at NaN.
    let x = s.min(s.splat(89.0), s.max(s.splat(-104.0), a));
    let n = s.round_half_even(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first of 9 bits, so that the product is exact without FMA.
    let r = s.fnma(n, s.splat(0.693_359_4), x);
    let r = s.fnma(n, s.splat(-2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    p = s.fma(p, r, s.splat(1.398_199_9e-3));
    p = s.fma(p, r, s.splat(8.333_452e-3));
    p = s.fma(p, r, s.splat(4.166_579_6e-2));
    p = s.fma(p, r, s.splat(1.666_666_5e-1));
    p = s.fma(p, r, s.splat(5.000_000_1e-1));
    let e = s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0));
    s.times_power_of_two(e, n)
}

/// `a 2^n` for whole `n` in -150 ..= 128 and normal `a` near 1, rounded once: in two factors, as
/// 2^n may be no normal number.
#[inline(always)]
pub(super) fn times_power_of_two<S: Simd>(s: S, a: S::F32, n: S::F32) -> S::F32 {
    let n = s.to_i32(n);
    let half = s.i32_shr::<1>(n);
    let low = exp2_int(s, half);
    let high = exp2_int(s, s.i32_sub(n, half));
    s.mul(s.mul(a, low), high)
}

/// `2^n` for `n` in -126 ..= 127.
#[inline(always)]
fn exp2_int<S: Simd>(s: S, n: S::I32) -> S::F32 {
    s.from_bits(s.i32_shl::<23>(s.i32_add(n, s.i32_splat(127))))
}

/// Natural logarithm within about 1 ulp: -inf at 0, NaN below. The polynomial of FreeBSD's
/// `e_logf.c`.
#[inline(always)]
pub(super) fn log<S: Simd>(s: S, a: S::F32) -> S::F32 {
    let tiny = s.lt(a, s.splat(f32::MIN_POSITIVE));
    let x = s.select(tiny, s.mul(a, s.splat(33_554_432.0)), a); // 2^25
    let shift = s.select(tiny, s.splat(25.0), s.zero());
    // x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt 2).
    let root = s.i32_splat(0x3f35_04f3);
    let bits = s.i32_sub(s.bits(x), root);
    let k = s.sub(s.to_f32(s.i32_shr::<23>(bits)), shift);
    let mantissa = s.i32_and(bits, s.i32_splat(0x007f_ffff));
    let f = s.sub(s.from_bits(s.i32_add(mantissa, root)), s.splat(1.0));
    let t = s.div(f, s.add(s.splat(2.0), f));
    let z = s.mul(t, t);
    let w = s.mul(z, z);
    let even = s.mul(w, s.fma(w, s.splat(0.242_790_79), s.splat(0.400_009_72)));
    let odd = s.mul(z, s.fma(w, s.splat(0.284_987_87), s.splat(0.666_666_6)));
    let half_square = s.mul(s.splat(0.5), s.mul(f, f));
    let tail = s.mul(t, s.add(half_square, s.add(even, odd)));
    let tail = s.fma(k, s.splat(9.058_000_6e-6), tail);
    let value = s.add(s.sub(tail, half_square), f);
    let value = s.fma(k, s.splat(6.931_381_2e-1), value);
    // Specials: 0, below 0, and inf or NaN as they are.
    let value = s.select(s.eq(a, s.zero()), s.splat(f32::NEG_INFINITY), value);
    let value = s.select(s.lt(a, s.zero()), s.splat(f32::NAN), value);
    let finite = s.lt(a, s.splat(f32::INFINITY));
    s.select(finite, value, a)
}

/// `e^a - 1` after Kahan: with `u = e^a`, `(u - 1) a / ln u` undoes the rounding of `u`.
#[inline(always)]
pub(super) fn expm1<S: Simd>(s: S, a: S::F32) -> S::F32 {
    let one = s.splat(1.0);
    let u = s.exp(a);
    let less = s.sub(u, one);
    let near = s.div(s.mul(less, a), s.log(u));
    // Where u is 1, a is tiny and is the result; far out the subtraction loses nothing.
    let near = s.select(s.eq(u, one), a, near);
    s.select(s.lt(s.abs(a), s.splat(2.0)), near, less)
}

/// `ln(1 + a)` after Kahan: with `u = 1 + a`, `ln u * a / (u - 1)` undoes the rounding of `u`.
#[inline(always)]
pub(super) fn log1p<S: Simd>(s: S, a: S::F32) -> S::F32 {
    let one = s.splat(1.0);
    let u = s.add(one, a);
    let log = s.log(u);
    let near = s.div(s.mul(log, a), s.sub(u, one));
    let near = s.select(s.eq(u, one), a, near);
    s.select(s.lt(s.abs(a), s.splat(8.0)), near, log)
}

/// Hyperbolic tangent within about 2 ulp: an odd polynomial (Cephes' `tanhf`) where
/// `|a| < 0.625`, else `1 - 2 / (e^(2|a|) + 1)`.
#[inline(always)]
pub(super) fn tanh<S: Simd>(s: S, a: S::F32) -> S::F32 {
    let z = s.mul(a, a);
    let mut p = s.splat(-5.704_988_7e-3);
    p = s.fma(p, z, s.splat(2.063_908_8e-2));
    p = s.fma(p, z, s.splat(-5.373_971_6e-2));
    p = s.fma(p, z, s.splat(1.333_144_2e-1));
    p = s.fma(p, z, s.splat(-3.333_328_2e-1));
    let near = s.fma(s.mul(p, z), a, a);
    let x = s.abs(a);
    let e = s.exp(s.add(x, x));
    let one = s.splat(1.0);
    let far = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    s.select(s.lt(x, s.splat(0.625)), near, s.copysign(far, a))
}

/// `1 / (1 + e^-a)`, accurate in both tails.
#[inline(always)]
pub(super) fn sigmoid<S: Simd>(s: S, a: S::F32) -> S::F32 {
    let e = s.exp(s.neg(s.abs(a)));
    let one = s.splat(1.0);
    let numerator = s.select(s.lt(a, s.zero()), e, one);
    s.div(numerator, s.add(one, e))
}

/// To the nearest integer, ties away from zero, for |a| < 2^22.
#[inline(always)]
pub(super) fn round_half_away<S: Simd>(s: S, a: S::F32) -> S::F32 {
    let even = s.round_half_even(a);
    let half = s.splat(0.5);
    let tie = s.eq(s.abs(s.sub(a, even)), half);
    s.select(tie, s.add(a, s.copysign(half, a)), even)
}
