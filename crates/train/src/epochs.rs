//! The order of the data, epoch by epoch: shuffled and packed anew for each, and held for one at a
//! time.

use crate::Result;

/// Puts examples, by their indices in this order, into windows.
type Pack<'a> = dyn Fn(&[usize]) -> Result<Vec<Vec<usize>>> + 'a;

/// The windows of a run's epochs, as indices of examples.
pub(crate) struct Epochs {
    seed: u64,
    examples: usize,
    /// Of each epoch.
    counts: Vec<usize>,
    random: text::sampler::Rng,
    order: Vec<usize>,
    /// Epochs that `order` has been shuffled for.
    shuffled: usize,
    /// Of the last of these, where it has been packed.
    windows: Option<Vec<Vec<usize>>>,
}

impl Epochs {
    /// So many examples, in an order that follows from a seed.
    pub(crate) fn new(seed: u64, examples: usize) -> Epochs {
        let random = text::sampler::Rng::new(seed ^ 0x6f72_6465_7200);
        let order = (0..examples).collect();
        Epochs { seed, examples, counts: Vec::new(), random, order, shuffled: 0, windows: None }
    }

    /// Takes note of the next epoch, counted from 0, and gives its windows: each packs its own
    /// order, so how many there are is known by doing it.
    ///
    /// # Errors
    /// As `pack`.
    pub(crate) fn add(&mut self, pack: &Pack<'_>) -> Result<&[Vec<usize>]> {
        let epoch = self.counts.len();
        let count = self.windows(epoch, pack)?.len();
        self.counts.push(count);
        self.windows(epoch, pack)
    }

    /// The windows of an epoch.
    ///
    /// # Errors
    /// As `pack`.
    pub(crate) fn windows(&mut self, epoch: usize, pack: &Pack<'_>) -> Result<&[Vec<usize>]> {
        if self.shuffled > epoch + 1 {
            let counts = std::mem::take(&mut self.counts);
            *self = Epochs { counts, ..Epochs::new(self.seed, self.examples) };
        }
        while self.shuffled <= epoch {
            for i in (1..self.order.len()).rev() {
                self.order.swap(i, (self.random.next_f64() * (i + 1) as f64) as usize);
            }
            self.shuffled += 1;
            self.windows = None;
        }
        let windows = match self.windows.take() {
            Some(windows) => windows,
            None => pack(&self.order)?,
        };
        Ok(self.windows.insert(windows))
    }

    /// How many windows each epoch has.
    pub(crate) fn counts(&self) -> &[usize] {
        &self.counts
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Whichever epoch is asked for after which, it is the same as when they come in order.
    #[test]
    fn an_epoch_is_the_same_in_any_order() {
        let pack = |order: &[usize]| -> Result<Vec<Vec<usize>>> {
            Ok(order.chunks(3).map(<[usize]>::to_vec).collect())
        };
        let mut epochs = Epochs::new(7, 10);
        let in_order: Vec<Vec<Vec<usize>>> =
            (0..5).map(|_| epochs.add(&pack).unwrap().to_vec()).collect();
        assert_eq!(epochs.counts(), [4; 5]);
        assert!((1..5).all(|e| in_order.first() != in_order.get(e)), "nothing is shuffled");
        for epoch in [4, 0, 3, 3, 1, 4] {
            assert_eq!(
                Some(epochs.windows(epoch, &pack).unwrap()),
                in_order.get(epoch).map(|w| &w[..])
            );
        }
        assert_eq!(epochs.counts(), [4; 5]);
    }
}
