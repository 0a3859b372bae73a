//! The random numbers of sampling, initialization and shuffling.

/// A counter-based generator: number `k` of a seed is a function of the two alone, so that a
/// generation that was set aside goes on exactly where it was.
///
/// It is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014, as published by Vigna) started at the seed's own mix, so that the streams of
/// near seeds have nothing in common. The numbers are part of the interface: they do not change
/// between versions.
#[derive(Clone, Debug)]
pub struct Rng {
    start: u64,
    /// Numbers drawn so far.
    pub(crate) drawn: u64,
}

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Self {
        Self { start: mix(seed.wrapping_add(GAMMA)), drawn: 0 }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.drawn = self.drawn.wrapping_add(1);
        mix(self.start.wrapping_add(self.drawn.wrapping_mul(GAMMA)))
    }

    /// The next number, uniform in `[0, 1)`: the upper 53 bits over 2^53.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_splitmix64() {
        // The reference implementation's first outputs for state 0 and for 1234567.
        assert_eq!(mix(GAMMA), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(GAMMA.wrapping_mul(2)), 0x6e78_9e6a_a1b9_65f4);
        assert_eq!(mix(1_234_567u64.wrapping_add(GAMMA)), 6_457_827_717_110_365_317);
    }

    #[test]
    fn numbers_do_not_change_between_versions() {
        let mut rng = Rng::new(42);
        let first: Vec<u64> = (0..3).map(|_| rng.next_u64()).collect();
        assert_eq!(first, NUMBERS_OF_SEED_42);
    }

    const NUMBERS_OF_SEED_42: [u64; 3] =
        [6_332_618_229_526_065_668, 17_630_415_256_238_047_317, 8_971_565_426_155_258_802];

    #[test]
    fn is_uniform_and_seeds_differ() {
        let mut bins = [0u32; 16];
        let mut sum = 0.0;
        let mut rng = Rng::new(7);
        for _ in 0..160_000 {
            let x = rng.next_f64();
            assert!((0.0..1.0).contains(&x));
            sum += x;
            bins[(x * 16.0) as usize] += 1;
        }
        assert!((sum / 160_000.0 - 0.5).abs() < 0.003);
        // Chi-squared with 15 degrees of freedom: 37.7 is the 0.1 % point.
        let chi: f64 = bins.iter().map(|&n| (f64::from(n) - 1e4).powi(2) / 1e4).sum();
        assert!(chi < 37.7, "{chi}");
        let firsts: std::collections::HashSet<u64> =
            (0..10_000).map(|seed| Rng::new(seed).next_u64()).collect();
        assert_eq!(firsts.len(), 10_000);
    }
}
