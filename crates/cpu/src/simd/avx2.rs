//! AVX2, FMA and F16C: two registers per vector.

use std::arch::x86_64::*;

use super::{LANES, Simd, Task};

/// The proof that the processor has AVX2, FMA and F16C.
#[derive(Copy, Clone)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// `None` when the processor lacks one of the features.
    pub(crate) fn detect() -> Option<Avx2> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Avx2(()))
    }
}

/// Lanes 0-7 and 8-15.
#[derive(Copy, Clone)]
pub(crate) struct F(pub(crate) __m256, pub(crate) __m256);

/// Lanes 0-7 and 8-15.
#[derive(Copy, Clone)]
pub(crate) struct I(pub(crate) __m256i, pub(crate) __m256i);

const HALF: usize = LANES / 2;
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// All ones in the first `n` of 8 lanes.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn mask(n: usize) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(LANES) as i32), lane)
    }
}

/// Reads the first `n` of 16 half-words; the others are 0.
///
/// # Safety
/// `from` must be valid for reads of `min(n, 16)` elements.
#[inline(always)]
unsafe fn read_u16(from: *const u16, n: usize) -> [u16; LANES] {
    let mut out = [0; LANES];
    // SAFETY: the caller's; at most 16 elements fit the array.
    unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), n.min(LANES)) };
    out
}

/// As in `avx512`: methods that are one expression of intrinsics.
macro_rules! ops {
    ($(fn $name:ident($($a:ident: $t:ty),*) $(-> $r:ty)? = $e:expr;)*) => { $(
        #[inline(always)]
        fn $name(self, $($a: $t),*) $(-> $r)? {
            // SAFETY: `self` is the proof that the processor has the instructions.
            unsafe { $e }
        }
    )* };
}

/// As `ops`, for those that follow a pointer.
macro_rules! memory {
    ($(fn $name:ident($($a:ident: $t:ty),*) $(-> $r:ty)? = $e:expr;)*) => { $(
        #[inline(always)]
        unsafe fn $name(self, $($a: $t),*) $(-> $r)? {
            // SAFETY: `self` is the proof that the processor has the instructions; the pointer
            // is the caller's to vouch for, and masked lanes are not touched.
            unsafe { $e }
        }
    )* };
}

/// Folds the upper half of 16 lanes onto the lower, down to one.
macro_rules! fold {
    ($v:expr, $wide:ident, $narrow:ident) => {{
        let v = $wide($v.0, $v.1);
        let v = $narrow(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = $narrow(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32($narrow(v, _mm_movehdup_ps(v)))
    }};
}

macro_rules! fold_i32 {
    ($v:expr, $wide:ident, $narrow:ident) => {{
        let v = $wide($v.0, $v.1);
        let v = $narrow(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = $narrow(v, _mm_shuffle_epi32::<0b1110>(v));
        _mm_cvtsi128_si32($narrow(v, _mm_shuffle_epi32::<0b01>(v)))
    }};
}

/// Eight half-words from each lane's low 16 bits.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn narrow_u16(v: I) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let low = _mm256_set1_epi32(0xffff);
        let packed = _mm256_packus_epi32(_mm256_and_si256(v.0, low), _mm256_and_si256(v.1, low));
        _mm256_permute4x64_epi64::<0b11_01_10_00>(packed)
    }
}

/// Transposes 8 x 8.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's.
    unsafe {
        let mut t = r;
        for i in [0, 4] {
            let a = _mm256_unpacklo_ps(r[i], r[i + 1]);
            let b = _mm256_unpackhi_ps(r[i], r[i + 1]);
            let c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
            let d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
            t[i] = _mm256_shuffle_ps::<0x44>(a, c);
            t[i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
            t[i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
            t[i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
        }
        let mut out = t;
        for j in 0..4 {
            out[j] = _mm256_permute2f128_ps::<0x20>(t[j], t[4 + j]);
            out[4 + j] = _mm256_permute2f128_ps::<0x31>(t[j], t[4 + j]);
        }
        out
    }
}

/// The even and the odd elements of 16.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn half_unzip(v: F) -> (__m256, __m256) {
    // SAFETY: the caller's.
    unsafe {
        let order = |v: __m256| {
            let v = _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v));
            _mm256_castpd_ps(v)
        };
        let even = _mm256_shuffle_ps::<0x88>(v.0, v.1);
        let odd = _mm256_shuffle_ps::<0xdd>(v.0, v.1);
        (order(even), order(odd))
    }
}

/// The inverse of [`half_unzip`].
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn half_zip(even: __m256, odd: __m256) -> F {
    // SAFETY: the caller's.
    unsafe {
        let low = _mm256_unpacklo_ps(even, odd);
        let high = _mm256_unpackhi_ps(even, odd);
        F(_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
    }
}

/// Compiles a task with the family's instructions.
#[target_feature(enable = "avx2,fma,f16c")]
fn enabled<T: Task>(simd: Avx2, task: T) -> T::Out {
    task.run(simd)
}

impl Simd for Avx2 {
    type F32 = F;
    type I32 = I;
    /// All ones or all zeros per lane.
    type Mask = F;

    const FUSED: bool = true;
    const BLOCK: (usize, usize) = (6, 1);

    fn call<T: Task>(self, task: T) -> T::Out {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { enabled(self, task) }
    }

    memory! {
        fn load(from: *const f32) -> F =
            F(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(HALF)));
        fn load_first(from: *const f32, n: usize) -> F = if n >= LANES {
            Avx2(()).load(from)
        } else {
            F(
                _mm256_maskload_ps(from, mask(n)),
                _mm256_maskload_ps(from.wrapping_add(HALF), mask(n.saturating_sub(HALF))),
            )
        };
        fn store(to: *mut f32, v: F) = {
            _mm256_storeu_ps(to, v.0);
            _mm256_storeu_ps(to.add(HALF), v.1);
        };
        fn store_first(to: *mut f32, v: F, n: usize) = if n >= LANES {
            Avx2(()).store(to, v);
        } else {
            _mm256_maskstore_ps(to, mask(n), v.0);
            _mm256_maskstore_ps(to.wrapping_add(HALF), mask(n.saturating_sub(HALF)), v.1);
        };
        fn load_f16(from: *const u16) -> F = F(
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(HALF).cast()))
        );
        fn load_f16_first(from: *const u16, n: usize) -> F =
            Avx2(()).load_f16(read_u16(from, n).as_ptr());
        fn store_f16(to: *mut u16, v: F) = {
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.0));
            _mm_storeu_si128(to.add(HALF).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v.1));
        };
        fn store_f16_first(to: *mut u16, v: F, n: usize) = {
            let mut all = [0u16; LANES];
            Avx2(()).store_f16(all.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, n.min(LANES));
        };
        fn load_bf16(from: *const u16) -> F = {
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(HALF).cast()));
            Avx2(()).from_bits(I(_mm256_slli_epi32::<16>(a), _mm256_slli_epi32::<16>(b)))
        };
        fn load_bf16_first(from: *const u16, n: usize) -> F =
            Avx2(()).load_bf16(read_u16(from, n).as_ptr());
        fn store_u16(to: *mut u16, v: I) = _mm256_storeu_si256(to.cast(), narrow_u16(v));
        fn store_u16_first(to: *mut u16, v: I, n: usize) = {
            let mut all = [0u16; LANES];
            Avx2(()).store_u16(all.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, n.min(LANES));
        };
        fn load_i8(from: *const i8) -> I = {
            let v = _mm_loadu_si128(from.cast());
            I(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(v)))
        };
        fn store_i8(to: *mut i8, v: I) = {
            let words = _mm256_packs_epi32(v.0, v.1);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(to.cast(), bytes);
        };
    }

    ops! {
        fn splat(x: f32) -> F = F(_mm256_set1_ps(x), _mm256_set1_ps(x));
        fn add(a: F, b: F) -> F = F(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1));
        fn sub(a: F, b: F) -> F = F(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1));
        fn mul(a: F, b: F) -> F = F(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1));
        fn div(a: F, b: F) -> F = F(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1));
        fn sqrt(a: F) -> F = F(_mm256_sqrt_ps(a.0), _mm256_sqrt_ps(a.1));
        fn fma(a: F, b: F, c: F) -> F =
            F(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1));
        fn fnma(a: F, b: F, c: F) -> F =
            F(_mm256_fnmadd_ps(a.0, b.0, c.0), _mm256_fnmadd_ps(a.1, b.1, c.1));
        fn min(a: F, b: F) -> F = F(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1));
        fn max(a: F, b: F) -> F = F(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1));
        fn round_half_even(a: F) -> F =
            F(_mm256_round_ps::<NEAREST>(a.0), _mm256_round_ps::<NEAREST>(a.1));
        fn lt(a: F, b: F) -> F = F(
            _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0),
            _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)
        );
        fn eq(a: F, b: F) -> F = F(
            _mm256_cmp_ps::<_CMP_EQ_OQ>(a.0, b.0),
            _mm256_cmp_ps::<_CMP_EQ_OQ>(a.1, b.1)
        );
        fn select(m: F, yes: F, no: F) -> F =
            F(_mm256_blendv_ps(no.0, yes.0, m.0), _mm256_blendv_ps(no.1, yes.1, m.1));
        fn first(n: usize) -> F = F(
            _mm256_castsi256_ps(mask(n)),
            _mm256_castsi256_ps(mask(n.saturating_sub(HALF)))
        );
        fn and_not(a: F, b: F) -> F = F(_mm256_andnot_ps(b.0, a.0), _mm256_andnot_ps(b.1, a.1));

        fn bits(a: F) -> I = I(_mm256_castps_si256(a.0), _mm256_castps_si256(a.1));
        fn from_bits(a: I) -> F = F(_mm256_castsi256_ps(a.0), _mm256_castsi256_ps(a.1));
        fn to_i32(a: F) -> I = I(_mm256_cvtps_epi32(a.0), _mm256_cvtps_epi32(a.1));
        fn to_f32(a: I) -> F = F(_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1));
        fn i32_splat(x: i32) -> I = I(_mm256_set1_epi32(x), _mm256_set1_epi32(x));
        fn i32_add(a: I, b: I) -> I = I(_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1));
        fn i32_sub(a: I, b: I) -> I = I(_mm256_sub_epi32(a.0, b.0), _mm256_sub_epi32(a.1, b.1));
        fn i32_and(a: I, b: I) -> I = I(_mm256_and_si256(a.0, b.0), _mm256_and_si256(a.1, b.1));
        fn i32_or(a: I, b: I) -> I = I(_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1));
        fn i32_max(a: I, b: I) -> I = I(_mm256_max_epi32(a.0, b.0), _mm256_max_epi32(a.1, b.1));
        fn i32_gt(a: I, b: I) -> F = Avx2(()).from_bits(
            I(_mm256_cmpgt_epi32(a.0, b.0), _mm256_cmpgt_epi32(a.1, b.1))
        );
        fn i32_select(m: F, yes: I, no: I) -> I = {
            let m = Avx2(()).bits(m);
            I(_mm256_blendv_epi8(no.0, yes.0, m.0), _mm256_blendv_epi8(no.1, yes.1, m.1))
        };

        fn reduce_sum(a: F) -> f32 = fold!(a, _mm256_add_ps, _mm_add_ps);
        fn reduce_max(a: F) -> f32 = fold!(a, _mm256_max_ps, _mm_max_ps);
        fn i32_reduce_sum(a: I) -> i32 = fold_i32!(a, _mm256_add_epi32, _mm_add_epi32);
        fn i32_reduce_max(a: I) -> i32 = fold_i32!(a, _mm256_max_epi32, _mm_max_epi32);
    }

    #[inline(always)]
    fn i32_shl<const N: u32>(self, a: I) -> I {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            I(_mm256_sll_epi32(a.0, n), _mm256_sll_epi32(a.1, n))
        }
    }
    #[inline(always)]
    fn i32_shr<const N: u32>(self, a: I) -> I {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            let n = _mm_cvtsi32_si128(N as i32);
            I(_mm256_sra_epi32(a.0, n), _mm256_sra_epi32(a.1, n))
        }
    }

    #[inline(always)]
    fn transpose(self, r: &mut [F; LANES]) {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            let take = |from: usize, high: bool| {
                std::array::from_fn(|i| if high { r[from + i].1 } else { r[from + i].0 })
            };
            let a = transpose8(take(0, false));
            let b = transpose8(take(0, true));
            let c = transpose8(take(8, false));
            let d = transpose8(take(8, true));
            for i in 0..8 {
                r[i] = F(a[i], c[i]);
                r[8 + i] = F(b[i], d[i]);
            }
        }
    }

    #[inline(always)]
    fn unzip(self, a: F, b: F) -> (F, F) {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            let (a, b) = (half_unzip(a), half_unzip(b));
            (F(a.0, b.0), F(a.1, b.1))
        }
    }

    #[inline(always)]
    fn zip(self, even: F, odd: F) -> (F, F) {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { (half_zip(even.0, odd.0), half_zip(even.1, odd.1)) }
    }
}
