//! Numbers that follow from counters: what ops draw is a function of their operands.

use crate::Real;

/// Which elements [`Op::Dropout`](crate::Op::Dropout) drops.
///
/// Element `k` of vector `u` (of the vectors `[T, .., K]` of one row, counted from 0) of row `t`
/// is dropped where the `(k / 16) % 4`-th of the four words
///
/// ```text
/// philox4x32([u * ceil(K / 64) * 16 + k / 64 * 16 + k % 16, site, rows[t][0], rows[t][1]], key)
/// ```
///
/// is below `p * 2^32`. So an element's fate does not depend on the rows beside it, nor on who
/// computes it: a graph that runs again, in another order, over other rows of the same sequence or
/// on other threads drops the same elements, without a mask that is kept.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Dropout {
    /// The share that is dropped, at least 0 and below 1.
    pub p: Real,
    /// Which of the graph's places this is: others draw other numbers for the same row.
    pub site: u32,
}

impl Dropout {
    /// Words below this are of elements that are dropped: `p * 2^32`, to the nearest.
    pub fn threshold(self) -> u32 {
        (f64::from(self.p.get()) * 4_294_967_296.0).round() as u32
    }

    /// What the others are multiplied by, in f32: `1 / (1 - p)`.
    pub fn scale(self) -> f32 {
        (1.0 / (1.0 - f64::from(self.p.get()))) as f32
    }
}

/// Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
/// numbers: as easy as 1, 2, 3" (SC 2011): four words of 32 bits from a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    for _ in 0..10 {
        let (p, q) = (u64::from(a) * 0xd251_1f53, u64::from(c) * 0xcd9e_8d57);
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k, q as u32, (p >> 32) as u32 ^ d ^ l, p as u32);
        // The key's schedule: a Weyl sequence of the golden ratio and of sqrt(3) - 1.
        k = k.wrapping_add(0x9e37_79b9);
        l = l.wrapping_add(0xbb67_ae85);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `kat_vectors` of the authors' Random123.
    #[test]
    fn philox_gives_its_authors_numbers() {
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        let of_pi = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        let of_zeros = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        let of_ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(philox4x32([0; 4], [0; 2]), of_zeros);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), of_ones);
        assert_eq!(philox4x32(pi, [0xa409_3822, 0x299f_31d0]), of_pi);
    }

    #[test]
    fn thresholds_and_scales() {
        let of = |p: f32| Dropout { p: p.into(), site: 0 };
        assert_eq!((of(0.0).threshold(), of(0.0).scale()), (0, 1.0));
        assert_eq!((of(0.5).threshold(), of(0.5).scale()), (1 << 31, 2.0));
        let most = 1.0f32.next_down();
        assert_eq!((of(most).threshold(), of(most).scale()), (u32::MAX - 255, 16_777_216.0));
    }
}
