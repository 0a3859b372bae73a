//! AVX-512 F, BW, VL and DQ, with and without VNNI: one register per vector.

use std::arch::x86_64::*;

use super::{LANES, Simd, Task};

/// The proof that the processor has AVX-512 F, BW, VL and DQ, AVX2, FMA and F16C, and VNNI too
/// where that is said, which only [`Dot`](crate::dot::Dot) makes use of.
#[derive(Copy, Clone)]
pub(crate) struct Avx512<const VNNI: bool>(());

/// With VNNI.
pub(crate) type Vnni = Avx512<true>;

impl<const VNNI: bool> Avx512<VNNI> {
    /// `None` when the processor lacks one of the features.
    pub(crate) fn detect() -> Option<Avx512<VNNI>> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && (!VNNI || is_x86_feature_detected!("avx512vnni"));
        all.then_some(Avx512(()))
    }
}

/// The mask of the first `n` lanes.
#[inline(always)]
fn mask(n: usize) -> __mmask16 {
    if n >= LANES { 0xffff } else { (1u16 << n) - 1 }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Methods that are one expression of intrinsics.
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
        let v = $v;
        let v = $wide(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let v = $narrow(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = $narrow(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32($narrow(v, _mm_movehdup_ps(v)))
    }};
}

/// Compiles a task with the family's instructions: once, since floats have no use for VNNI.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn enabled<T: Task>(simd: Avx512<false>, task: T) -> T::Out {
    task.run(simd)
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type F32 = __m512;
    type I32 = __m512i;
    type Mask = __mmask16;

    const FUSED: bool = true;
    const BLOCK: (usize, usize) = (24, 4);

    fn call<T: Task>(self, task: T) -> T::Out {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { enabled(Avx512(()), task) }
    }

    memory! {
        fn load(from: *const f32) -> __m512 = _mm512_loadu_ps(from);
        fn load_first(from: *const f32, n: usize) -> __m512 =
            _mm512_maskz_loadu_ps(mask(n), from);
        fn store(to: *mut f32, v: __m512) = _mm512_storeu_ps(to, v);
        fn store_first(to: *mut f32, v: __m512, n: usize) =
            _mm512_mask_storeu_ps(to, mask(n), v);
        fn load_f16(from: *const u16) -> __m512 =
            _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
        fn load_f16_first(from: *const u16, n: usize) -> __m512 =
            _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), from.cast()));
        fn store_f16(to: *mut u16, v: __m512) =
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<NEAREST>(v));
        fn store_f16_first(to: *mut u16, v: __m512, n: usize) =
            _mm256_mask_storeu_epi16(to.cast(), mask(n), _mm512_cvtps_ph::<NEAREST>(v));
        fn load_bf16(from: *const u16) -> __m512 = _mm512_castsi512_ps(
            _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))
        );
        fn load_bf16_first(from: *const u16, n: usize) -> __m512 = _mm512_castsi512_ps(
            _mm512_slli_epi32::<16>(
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(n), from.cast()))
            )
        );
        fn store_u16(to: *mut u16, v: __m512i) =
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(v));
        fn store_u16_first(to: *mut u16, v: __m512i, n: usize) =
            _mm256_mask_storeu_epi16(to.cast(), mask(n), _mm512_cvtepi32_epi16(v));
        fn load_i8(from: *const i8) -> __m512i =
            _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()));
        fn store_i8(to: *mut i8, v: __m512i) =
            _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(v));
    }

    ops! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn sqrt(a: __m512) -> __m512 = _mm512_sqrt_ps(a);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn fnma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fnmadd_ps(a, b, c);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn times_power_of_two(a: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(a, n);
        fn round_half_even(a: __m512) -> __m512 = _mm512_roundscale_ps::<NEAREST>(a);
        fn lt(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b);
        fn eq(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b);
        fn select(m: __mmask16, yes: __m512, no: __m512) -> __m512 =
            _mm512_mask_blend_ps(m, no, yes);

        fn bits(a: __m512) -> __m512i = _mm512_castps_si512(a);
        fn from_bits(a: __m512i) -> __m512 = _mm512_castsi512_ps(a);
        fn to_i32(a: __m512) -> __m512i = _mm512_cvtps_epi32(a);
        fn to_f32(a: __m512i) -> __m512 = _mm512_cvtepi32_ps(a);
        fn i32_splat(x: i32) -> __m512i = _mm512_set1_epi32(x);
        fn i32_add(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        fn i32_sub(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        fn i32_and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        fn i32_or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        fn i32_max(a: __m512i, b: __m512i) -> __m512i = _mm512_max_epi32(a, b);
        fn i32_gt(a: __m512i, b: __m512i) -> __mmask16 = _mm512_cmpgt_epi32_mask(a, b);
        fn i32_select(m: __mmask16, yes: __m512i, no: __m512i) -> __m512i =
            _mm512_mask_blend_epi32(m, no, yes);

        fn reduce_sum(a: __m512) -> f32 = fold!(a, _mm256_add_ps, _mm_add_ps);
        fn reduce_max(a: __m512) -> f32 = fold!(a, _mm256_max_ps, _mm_max_ps);
        fn i32_reduce_sum(a: __m512i) -> i32 = _mm512_reduce_add_epi32(a);
        fn i32_reduce_max(a: __m512i) -> i32 = _mm512_reduce_max_epi32(a);
    }

    #[inline(always)]
    fn first(self, n: usize) -> __mmask16 {
        mask(n)
    }
    #[inline(always)]
    fn and_not(self, a: __mmask16, b: __mmask16) -> __mmask16 {
        a & !b
    }
    #[inline(always)]
    fn i32_shl<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { _mm512_slli_epi32::<N>(a) }
    }
    #[inline(always)]
    fn i32_shr<const N: u32>(self, a: __m512i) -> __m512i {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { _mm512_srai_epi32::<N>(a) }
    }

    #[inline(always)]
    fn transpose(self, r: &mut [__m512; LANES]) {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            // Within 128-bit lanes: 4 x 4 blocks.
            let mut t = *r;
            for i in (0..16).step_by(4) {
                let a = _mm512_unpacklo_ps(r[i], r[i + 1]);
                let b = _mm512_unpackhi_ps(r[i], r[i + 1]);
                let c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
                let d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
                t[i] = _mm512_shuffle_ps::<0x44>(a, c);
                t[i + 1] = _mm512_shuffle_ps::<0xee>(a, c);
                t[i + 2] = _mm512_shuffle_ps::<0x44>(b, d);
                t[i + 3] = _mm512_shuffle_ps::<0xee>(b, d);
            }
            // t[4g + j], lane q = rows 4g.., column 4q + j. Then the 4 x 4 matrix of lanes.
            for j in 0..4 {
                let (a, b, c, d) = (t[j], t[4 + j], t[8 + j], t[12 + j]);
                let ab = _mm512_shuffle_f32x4::<0x44>(a, b);
                let ab_high = _mm512_shuffle_f32x4::<0xee>(a, b);
                let cd = _mm512_shuffle_f32x4::<0x44>(c, d);
                let cd_high = _mm512_shuffle_f32x4::<0xee>(c, d);
                r[j] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
                r[4 + j] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
                r[8 + j] = _mm512_shuffle_f32x4::<0x88>(ab_high, cd_high);
                r[12 + j] = _mm512_shuffle_f32x4::<0xdd>(ab_high, cd_high);
            }
        }
    }

    #[inline(always)]
    fn unzip(self, a: __m512, b: __m512) -> (__m512, __m512) {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        }
    }

    #[inline(always)]
    fn zip(self, even: __m512, odd: __m512) -> (__m512, __m512) {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
            (_mm512_permutex2var_ps(even, low, odd), _mm512_permutex2var_ps(even, high, odd))
        }
    }
}
