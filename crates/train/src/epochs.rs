//! The order of the data, epoch by epoch: shuffled and packed anew for each, and held for one at a
//! time.

use data::{Packing, Room};

use crate::{Example, Result, piece};

/// What comes next.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Stage {
    /// The order of the first epoch is yet to be shuffled, and written from this place on.
    Start(usize),
    /// The next epoch's is shuffled, from its end to this place.
    Shuffle(usize),
    /// That of the last one it was shuffled for is packed.
    Pack,
}

/// The windows of a run's epochs, as indices of examples.
pub(crate) struct Epochs {
    seed: u64,
    /// Of each epoch.
    counts: Vec<usize>,
    random: text::sampler::Rng,
    order: Vec<u32>,
    /// Epochs that `order` has been shuffled for.
    shuffled: usize,
    packing: Packing,
    stage: Stage,
}

impl Epochs {
    /// Of these examples, in an order that follows from a seed.
    ///
    /// # Errors
    /// Names the first that fits no window.
    pub(crate) fn new(seed: u64, examples: &[Example], room: Room) -> Result<Epochs> {
        Ok(Epochs {
            seed,
            counts: Vec::new(),
            random: random(seed),
            order: vec![0; examples.len()],
            shuffled: 0,
            packing: Packing::new(examples.iter().enumerate(), room)?,
            stage: Stage::Start(0),
        })
    }

    /// Takes note of the next epoch, counted from 0, whose windows are there then: each packs its
    /// own order, so how many there are is known by doing it.
    pub(crate) fn add(&mut self) {
        while !self.advance(self.counts.len()) {}
        self.counts.push(self.packing.len());
    }

    /// Goes on by a piece towards the windows of an epoch; true when they are there.
    pub(crate) fn advance(&mut self, epoch: usize) -> bool {
        let begun = self.shuffled + usize::from(matches!(self.stage, Stage::Shuffle(_)));
        if begun > epoch + 1 {
            (self.random, self.shuffled, self.stage) = (random(self.seed), 0, Stage::Start(0));
        }
        let all = self.order.len();
        self.stage = match self.stage {
            Stage::Start(from) => {
                let to = all.min(from + piece::EXAMPLES);
                let piece = self.order.get_mut(from..to).unwrap_or(&mut []);
                piece.iter_mut().zip(from as u32..).for_each(|(place, i)| *place = i);
                if to < all { Stage::Start(to) } else { Stage::Shuffle(all) }
            }
            Stage::Shuffle(from) => {
                let to = from.saturating_sub(piece::EXAMPLES);
                for i in (to.max(1)..from).rev() {
                    let other = (self.random.next_f64() * (i + 1) as f64) as usize;
                    self.order.swap(i, other.min(i));
                }
                match to {
                    0 => {
                        self.shuffled += 1;
                        self.packing.begin();
                        Stage::Pack
                    }
                    _ => Stage::Shuffle(to),
                }
            }
            Stage::Pack if self.shuffled <= epoch => Stage::Shuffle(all),
            Stage::Pack => return self.packing.advance(&self.order, piece::EXAMPLES),
        };
        false
    }

    /// How many windows the epoch has that is there.
    pub(crate) fn len(&self) -> usize {
        self.packing.len()
    }

    /// A window of it.
    pub(crate) fn window(&self, i: usize) -> Option<Vec<usize>> {
        self.packing.window(i)
    }

    /// How many windows each epoch has.
    pub(crate) fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// Bytes it holds for the examples.
    pub(crate) fn bytes(&self) -> usize {
        self.packing.bytes() + self.order.capacity() * size_of::<u32>()
    }
}

fn random(seed: u64) -> text::sampler::Rng {
    text::sampler::Rng::new(seed ^ 0x6f72_6465_7200)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn examples(n: usize) -> Vec<Example> {
        let example =
            |i: usize| Example { tokens: vec![0; 2 + i % 5], weights: vec![1.0; 2 + i % 5] };
        (0..n).map(example).collect()
    }

    fn windows(epochs: &Epochs) -> Vec<Vec<usize>> {
        (0..epochs.len()).map(|i| epochs.window(i).unwrap()).collect()
    }

    /// Whichever epoch is asked for after which, and wherever that stops, it is the same as when
    /// they come in order: as one shuffle after the other, each packed, has them.
    #[test]
    fn an_epoch_is_the_same_in_any_order() {
        let (examples, room) = (examples(11), Room::shared(6, 3));
        let mut epochs = Epochs::new(7, &examples, room).unwrap();
        let (mut rng, mut order) = (random(7), (0..11).collect::<Vec<usize>>());
        let mut in_order = Vec::new();
        for _ in 0..5 {
            epochs.add();
            for i in (1..11).rev() {
                order.swap(i, (rng.next_f64() * (i + 1) as f64) as usize);
            }
            let plainly = data::pack(&examples, &order, room).unwrap();
            assert_eq!(windows(&epochs), plainly);
            in_order.push(plainly);
        }
        let counts: Vec<usize> = in_order.iter().map(Vec::len).collect();
        assert_eq!(epochs.counts(), counts);
        assert!((1..5).all(|e| in_order.first() != in_order.get(e)), "nothing is shuffled");
        // Some are left before they are there.
        for pieces in 0..60 {
            for epoch in [4, 0, 3, 3, 1, 4, 2] {
                let mut left = pieces;
                while left > 0 && !epochs.advance(epoch) {
                    left -= 1;
                }
            }
            let epoch = pieces % 5;
            while !epochs.advance(epoch) {}
            assert_eq!(Some(&windows(&epochs)), in_order.get(epoch));
        }
        assert_eq!(epochs.counts(), counts);
    }

    #[test]
    fn there_may_be_one_example_or_none() {
        for n in [0, 1] {
            let mut epochs = Epochs::new(7, &examples(n), Room::shared(6, 3)).unwrap();
            (0..3).for_each(|_| epochs.add());
            assert_eq!(epochs.counts(), [n; 3]);
        }
    }
}
