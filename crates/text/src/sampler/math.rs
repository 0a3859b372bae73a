//! Softmax arithmetic in one fixed order.
//!
//! A sum over a vocabulary runs in 16 lanes: element `i` is added to lane `i mod 16`, in
//! ascending order, and the lanes are then added as a tree: lane `i` and lane `i + 8`, then
//! `+ 4`, `+ 2`, `+ 1`. Elements that contribute zero can be left out without changing a bit,
//! so a sum over a few tokens that survived a filter equals the sum over the whole vocabulary
//! with the others at `-inf`.

/// Lanes of a sum.
const LANES: usize = 16;

/// A sum in the fixed order.
#[derive(Clone, Copy)]
pub(crate) struct LaneSum([f32; LANES]);

impl LaneSum {
    pub(crate) fn new() -> Self {
        Self([0.0; LANES])
    }

    /// Adds element `index`; to be called with ascending indices.
    #[inline]
    pub(crate) fn add(&mut self, index: u32, value: f32) {
        if let Some(lane) = self.0.get_mut(index as usize % LANES) {
            *lane += value;
        }
    }

    pub(crate) fn total(self) -> f32 {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = self.0;
        let [a, b, c, d, e, f, g, h] = [a + i, b + j, c + k, d + l, e + m, f + n, g + o, h + p];
        let [a, b, c, d] = [a + e, b + f, c + g, d + h];
        let [a, b] = [a + c, b + d];
        a + b
    }
}

/// The exponential of `x`, within 2 units in the last place, and 0 below -87 (where the result
/// leaves the normal numbers). The same bits on every machine: only additions, multiplications
/// and a shift, after Cody and Waite, "Software Manual for the Elementary Functions" (1980),
/// chapter 6; the polynomial is that of the Cephes library's `expf`.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.000_001e-1;
    let y = p * (r * r) + r + 1.0;
    // The low bits of `shifted` are n; moved into the exponent they make 2^n.
    let scale = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    let y = y * scale;
    if x < -87.0 { 0.0 } else { y }
}

/// The greatest of numbers that are none of them not a number; `-inf` for none.
#[inline]
pub(crate) fn max(values: &[f32]) -> f32 {
    // In lanes, which the order does not show in.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in values.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// The natural logarithm of a sum, rounded once from the f64 result.
#[inline]
pub(crate) fn ln(x: f32) -> f32 {
    f64::from(x).ln() as f32
}

/// `ln(sum(exp(logits)))` over `[vocabulary]` logits, in nats, with the greatest logit
/// subtracted first, in the fixed order of 16 lanes (see the module). `-inf` for no logits or
/// none above `-inf`; not a number where a logit is not a number or is `+inf`. What the sampler
/// sums over its candidates is held to this.
#[cfg(test)]
pub(crate) fn log_sum_exp(logits: &[f32]) -> f32 {
    if logits.iter().fold(false, |any, x| any | x.is_nan()) {
        return f32::NAN;
    }
    let max = max(logits);
    if max == f32::NEG_INFINITY {
        return max;
    }
    let mut sum = LaneSum::new();
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in sum.0.iter_mut().zip(chunk) {
            *lane += exp(x - max);
        }
    }
    for (lane, &x) in sum.0.iter_mut().zip(rest) {
        *lane += exp(x - max);
    }
    max + ln(sum.total())
}

/// The model's own log-probability of token `id`, in nats: `logits[id] - log_sum_exp(logits)`,
/// without temperature, penalties or filters. At most 0; `None` if `id` is out of range.
#[cfg(test)]
pub(crate) fn log_prob(logits: &[f32], id: u32) -> Option<f32> {
    let logit = *logits.get(id as usize)?;
    Some((logit - log_sum_exp(logits)).min(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::rng::Rng;

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        let mut x = -87.0f32;
        while x < 88.0 {
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1) - exact as f32);
            worst = worst.max((f64::from(exp(x)) - exact).abs() / ulp);
            x += 0.000_37;
        }
        assert!(worst < 2.0, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-87.5), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn log_sum_exp_agrees_with_f64_and_keeps_its_order() {
        let mut rng = Rng::new(3);
        for len in [1usize, 2, 15, 16, 17, 1000, 49_152] {
            let logits: Vec<f32> = (0..len).map(|_| (rng.next_f64() as f32 - 0.5) * 40.0).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let exact: f64 =
                logits.iter().map(|&x| f64::from(x - max).exp()).sum::<f64>().ln() + f64::from(max);
            let got = log_sum_exp(&logits);
            assert!((f64::from(got) - exact).abs() < 4e-6, "{len}: {got} {exact}");

            // The order, spelled out.
            let mut lanes = [0f32; 16];
            for (i, &x) in logits.iter().enumerate() {
                lanes[i % 16] += exp(x - max);
            }
            for step in [8, 4, 2, 1] {
                for i in 0..step {
                    lanes[i] += lanes[i + step];
                }
            }
            assert_eq!(got.to_bits(), (max + ln(lanes[0])).to_bits());

            // Elements at -inf do not count.
            let mut padded = logits.clone();
            padded.extend([f32::NEG_INFINITY; 37]);
            assert_eq!(log_sum_exp(&padded).to_bits(), got.to_bits());
        }
    }

    #[test]
    fn lanes_are_added_as_the_tree_says() {
        // The order shows: 1 is lost beside 2^24 unless it meets another 1 first.
        let sum = |of: &[(u32, f32)]| {
            let mut sum = LaneSum::new();
            of.iter().for_each(|&(i, x)| sum.add(i, x));
            sum.total()
        };
        let big = 16_777_216.0;
        for step in [8, 4, 2] {
            assert_eq!(sum(&[(0, big), (15, 1.0), (15 - step, 1.0)]), big + 2.0, "{step}");
        }
        assert_eq!(sum(&[(0, big), (8, 1.0), (4, 1.0)]), big);
        assert_eq!(sum(&[(3, big), (19, 1.0), (35, 1.0)]), big);
        assert_eq!(sum(&[(3, 1.0), (19, 1.0), (35, big)]), big + 2.0);
    }

    #[test]
    fn edges() {
        assert_eq!(log_sum_exp(&[]), f32::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 3]), f32::NEG_INFINITY);
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_nan());
        assert!(log_sum_exp(&[0.0, f32::INFINITY]).is_nan());
        assert_eq!(log_sum_exp(&[f32::MAX, f32::MIN]), f32::MAX);
        assert_eq!(log_prob(&[0.0, 0.0], 1), Some(-std::f32::consts::LN_2));
        assert_eq!(log_prob(&[0.0], 1), None);
        // A near-certain token: at most 0 and finite.
        assert_eq!(log_prob(&[60.0, -60.0], 0), Some(0.0));
    }
}
