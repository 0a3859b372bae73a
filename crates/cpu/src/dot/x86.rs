//! `vpdpbusd` with VNNI, `vpmaddubsw` without.

use std::arch::x86_64::*;

use super::{Dot, Kernel, MIDDLE, WIDE, WIDE_ZERO};
use crate::simd::{Avx2, Avx512, Vnni};

#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<K: Kernel<Avx2>>(simd: Avx2, kernel: K) -> K::Out {
    kernel.run(simd)
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn with_avx512<K: Kernel<Avx512<false>>>(simd: Avx512<false>, kernel: K) -> K::Out {
    kernel.run(simd)
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn with_vnni<K: Kernel<Vnni>>(simd: Vnni, kernel: K) -> K::Out {
    kernel.run(simd)
}

/// `_mm512_dpwssd_epi32`, of which LLVM makes two instructions for the sake of a latency that does
/// not matter here.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
fn dpwssd(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: it reads and writes registers alone.
    unsafe {
        std::arch::asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl Dot for Vnni {
    const FLOAT_BLOCK: (usize, usize) = (8, 3);
    const INT_BLOCK: (usize, usize) = (6, 2);
    const CLASSES: bool = false;
    const PLANES: bool = true;

    #[inline(always)]
    fn enter<K: Kernel<Self>>(self, kernel: K) -> K::Out {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { with_vnni(self, kernel) }
    }

    #[inline(always)]
    fn lookup(self, table: __m512i, quad: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_shuffle_epi8(table, quad) }
    }

    #[inline(always)]
    fn dot2(self, _: u32, acc: __m512i, a: __m512i, x: i32, b: __m512i, y: i32) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let acc = _mm512_dpbusd_epi32(acc, a, _mm512_set1_epi32(x));
            _mm512_dpbusd_epi32(acc, b, _mm512_set1_epi32(y))
        }
    }

    #[inline(always)]
    fn dot16(self, acc: __m512i, a: __m512i, x: i32) -> __m512i {
        // SAFETY: as above.
        unsafe { dpwssd(acc, a, _mm512_set1_epi32(x)) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch has no effect on memory and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// Products of unsigned and signed bytes, added in pairs in 16 bits. Saturation does not occur:
/// a pair is at most 2 * 63 * 127 in the lower classes, and 2 * 128 * 127 in the class `WIDE`,
/// whose codes are signed here: their magnitude times the activation with their sign.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn pairs(class: u32, codes: __m256i, x: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if class == WIDE {
            let codes = _mm256_xor_si256(codes, _mm256_set1_epi8(WIDE_ZERO.cast_signed()));
            _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
        } else {
            _mm256_maddubs_epi16(codes, x)
        }
    }
}

/// One half of [`Dot::dot2`].
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn dot2_avx2(
    class: u32,
    acc: __m256i,
    a: __m256i,
    x: __m256i,
    b: __m256i,
    y: __m256i,
) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let (a, b) = (pairs(class, a, x), pairs(class, b, y));
        let ones = _mm256_set1_epi16(1);
        if class <= MIDDLE {
            // 4 * 63 * 127 still fits.
            let both = _mm256_add_epi16(a, b);
            _mm256_add_epi32(acc, _mm256_madd_epi16(both, ones))
        } else {
            let acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, ones));
            _mm256_add_epi32(acc, _mm256_madd_epi16(b, ones))
        }
    }
}

impl Dot for Avx2 {
    const FLOAT_BLOCK: (usize, usize) = (6, 1);
    const INT_BLOCK: (usize, usize) = (2, 1);
    const CLASSES: bool = true;
    const PLANES: bool = true;

    #[inline(always)]
    fn enter<K: Kernel<Self>>(self, kernel: K) -> K::Out {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { with_avx2(self, kernel) }
    }

    #[inline(always)]
    fn lookup(self, table: Self::I32, quad: Self::I32) -> Self::I32 {
        let mut out = quad;
        // SAFETY: as above.
        unsafe {
            out.0 = _mm256_shuffle_epi8(table.0, quad.0);
            out.1 = _mm256_shuffle_epi8(table.1, quad.1);
        }
        out
    }

    #[inline(always)]
    fn dot2(
        self,
        class: u32,
        acc: Self::I32,
        a: Self::I32,
        x: i32,
        b: Self::I32,
        y: i32,
    ) -> Self::I32 {
        let mut out = acc;
        // SAFETY: as above.
        unsafe {
            let (x, y) = (_mm256_set1_epi32(x), _mm256_set1_epi32(y));
            out.0 = dot2_avx2(class, acc.0, a.0, x, b.0, y);
            out.1 = dot2_avx2(class, acc.1, a.1, x, b.1, y);
        }
        out
    }

    #[inline(always)]
    fn dot16(self, acc: Self::I32, a: Self::I32, x: i32) -> Self::I32 {
        let mut out = acc;
        // SAFETY: as above.
        unsafe {
            let x = _mm256_set1_epi32(x);
            out.0 = _mm256_add_epi32(acc.0, _mm256_madd_epi16(a.0, x));
            out.1 = _mm256_add_epi32(acc.1, _mm256_madd_epi16(a.1, x));
        }
        out
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch has no effect on memory and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// As [`pairs`], of 64 bytes. There is no `vpsignb` of as many: what is below zero is subtracted.
///
/// # Safety
/// Needs AVX-512 BW.
#[inline(always)]
unsafe fn wide_pairs(class: u32, codes: __m512i, x: __m512i) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        if class == WIDE {
            let codes = _mm512_xor_si512(codes, _mm512_set1_epi8(WIDE_ZERO.cast_signed()));
            let below = _mm512_movepi8_mask(codes);
            let x = _mm512_mask_sub_epi8(x, below, _mm512_setzero_si512(), x);
            _mm512_maddubs_epi16(_mm512_abs_epi8(codes), x)
        } else {
            _mm512_maddubs_epi16(codes, x)
        }
    }
}

impl Dot for Avx512<false> {
    const FLOAT_BLOCK: (usize, usize) = Vnni::FLOAT_BLOCK;
    const INT_BLOCK: (usize, usize) = Vnni::INT_BLOCK;
    const CLASSES: bool = true;
    const PLANES: bool = true;

    #[inline(always)]
    fn enter<K: Kernel<Self>>(self, kernel: K) -> K::Out {
        // SAFETY: `self` is the proof that the processor has the instructions.
        unsafe { with_avx512(self, kernel) }
    }

    #[inline(always)]
    fn lookup(self, table: __m512i, quad: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_shuffle_epi8(table, quad) }
    }

    #[inline(always)]
    fn dot2(self, class: u32, acc: __m512i, a: __m512i, x: i32, b: __m512i, y: i32) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let a = wide_pairs(class, a, _mm512_set1_epi32(x));
            let b = wide_pairs(class, b, _mm512_set1_epi32(y));
            let ones = _mm512_set1_epi16(1);
            if class <= MIDDLE {
                // As in `dot2_avx2`.
                _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_add_epi16(a, b), ones))
            } else {
                let acc = _mm512_add_epi32(acc, _mm512_madd_epi16(a, ones));
                _mm512_add_epi32(acc, _mm512_madd_epi16(b, ones))
            }
        }
    }

    #[inline(always)]
    fn dot16(self, acc: __m512i, a: __m512i, x: i32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi32(acc, _mm512_madd_epi16(a, _mm512_set1_epi32(x))) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch has no effect on memory and faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
