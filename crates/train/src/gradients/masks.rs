//! What is dropped of what adapters read: a number for each optimizer step of a run.

/// What is dropped in an optimizer step: the key of [`graph::Dropout`]. With it an element's fate
/// follows from the run's seed, the step, the target, the example, the position in it and the
/// column, however examples are put into windows and windows are cut.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Masks(u64);

impl Masks {
    /// Those of a step, counted from 0, of a run with this seed: a word of SplitMix64 (Steele, Lea
    /// and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), which gives
    /// every step of a run another key.
    pub fn of(seed: u64, step: u64) -> Masks {
        // Not the numbers that the adapter's matrices and the order of the data begin from.
        let state = (seed ^ 0x0064_726f_706f_7574)
            .wrapping_add(step.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Masks(z ^ (z >> 31))
    }

    /// As a graph's leaf holds it.
    pub(super) fn key(self) -> [i32; 2] {
        [self.0 as u32 as i32, (self.0 >> 32) as u32 as i32]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The first words of SplitMix64 from 0, as its authors' `splitmix64.c` gives them.
    #[test]
    fn keys_are_words_of_splitmix() {
        let zero = 0x0064_726f_706f_7574;
        let words = [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f];
        assert_eq!([0, 1, 2].map(|step| Masks::of(zero, step).0), words);
    }

    #[test]
    fn steps_and_seeds_have_their_own_keys() {
        let all = (0..50).flat_map(|seed| (0..200).map(move |step| Masks::of(seed, step).key()));
        assert_eq!(all.collect::<BTreeSet<_>>().len(), 50 * 200);
    }
}
