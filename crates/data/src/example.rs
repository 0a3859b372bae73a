//! Weighted sequences, and the windows they share.

use std::cmp::Reverse;

use crate::{Error, Result};

/// One sequence to learn from.
#[derive(Clone, PartialEq, Debug)]
pub struct Example {
    /// Its tokens, at least two.
    pub tokens: Vec<u32>,
    /// Per token, the weight of the loss of predicting it; the first token's is never used.
    pub weights: Vec<f32>,
}

impl Example {
    /// How many tokens carry loss.
    pub fn labelled(&self) -> usize {
        self.weights.iter().skip(1).filter(|&&w| w != 0.0).count()
    }

    /// The sum of the weights that count.
    pub fn weight(&self) -> f64 {
        self.weights.iter().skip(1).map(|&w| f64::from(w)).sum()
    }

    /// Rows it takes: the last token is only predicted, never read.
    pub fn rows(&self) -> usize {
        self.tokens.len().saturating_sub(1)
    }
}

/// How many of `n` examples are trained on where the last ones, this share of all, are held out:
/// `floor(n (1 - share))`.
pub fn kept(n: usize, share: f64) -> usize {
    // A product such as 10 * 0.2 may fall just short of a whole number.
    let kept = ((n as f64 * (1.0 - share)) + 1e-9).floor() as usize;
    kept.min(n)
}

/// Sequences that go through one graph together. They do not see each other.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Window {
    /// The sequences, one after the other.
    pub examples: Vec<Example>,
    /// The number of each among all there are: what is drawn at random for its rows follows from
    /// it, and not from the window it is in.
    pub numbers: Vec<u32>,
}

impl From<Vec<Example>> for Window {
    /// These sequences, numbered from 0.
    fn from(examples: Vec<Example>) -> Window {
        let numbers = (0..examples.len()).map(number).collect();
        Window { examples, numbers }
    }
}

fn number(index: usize) -> u32 {
    // Of more examples than that some share their numbers, which are of different steps.
    index as u32
}

impl Window {
    /// The examples of these indices, as [`pack`] gives them.
    pub fn of(examples: &[Example], indices: &[usize]) -> Window {
        let chosen = indices.iter().filter_map(|&i| Some((examples.get(i)?.clone(), number(i))));
        let (examples, numbers) = chosen.unzip();
        Window { examples, numbers }
    }

    /// Rows they take: the last token of each is only predicted, never read.
    pub fn rows(&self) -> usize {
        self.examples.iter().map(Example::rows).sum()
    }
}

/// Packs the examples of `order` into windows of at most `rows` rows and `most` sequences, by
/// first-fit decreasing: the longest first, equally long ones as `order` has them, each into the
/// first window with room. Returns the examples' indices per window.
///
/// A pure function of what it is given. `order` also decides how the windows follow each other
/// (as their longest examples do there) and how the examples of a window do, so a shuffled order
/// makes shuffled windows, and not the long ones first.
///
/// # Errors
/// Names the first example that does not fit a window alone.
pub fn pack(
    examples: &[Example],
    order: &[usize],
    rows: usize,
    most: usize,
) -> Result<Vec<Vec<usize>>> {
    let mut items = Vec::with_capacity(order.len());
    for (place, &i) in order.iter().enumerate() {
        let Some(example) = examples.get(i) else { continue };
        let need = example.rows();
        if need == 0 || need > rows {
            return Err(Error::Data(format!(
                "example {} has {} tokens; a window takes 2 to {}; use a larger window",
                i + 1,
                example.tokens.len(),
                rows + 1
            )));
        }
        items.push((need, place, i));
    }
    items.sort_by_key(|&(need, place, _)| (Reverse(need), place));
    let mut bins = Bins::new(items.len(), rows);
    let mut windows: Vec<Vec<(usize, usize)>> = Vec::new();
    for (need, place, i) in items {
        let bin = bins.first(need);
        if bin == windows.len() {
            windows.push(Vec::new());
        }
        let Some(window) = windows.get_mut(bin) else { continue };
        window.push((place, i));
        bins.take(bin, need, window.len() >= most);
    }
    windows.sort_by_key(|window| window.first().copied());
    let in_order = |mut window: Vec<(usize, usize)>| {
        window.sort_unstable();
        window.into_iter().map(|(_, i)| i).collect()
    };
    Ok(windows.into_iter().map(in_order).collect())
}

/// The room of windows, as a tree of maxima: the first with enough is found in `log n`.
struct Bins {
    leaves: usize,
    /// Node `k` has the children `2k` and `2k + 1`; leaves begin at `leaves`.
    room: Vec<usize>,
}

impl Bins {
    /// As many empty windows as there are examples: one that has never been taken is the first
    /// with room sooner or later.
    fn new(count: usize, rows: usize) -> Bins {
        let leaves = count.next_power_of_two();
        Bins { leaves, room: vec![rows; 2 * leaves] }
    }

    fn at(&self, node: usize) -> usize {
        self.room.get(node).copied().unwrap_or(0)
    }

    fn first(&self, need: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node = 2 * node + usize::from(self.at(2 * node) < need);
        }
        node - self.leaves
    }

    fn take(&mut self, bin: usize, need: usize, full: bool) {
        let mut node = bin + self.leaves;
        let left = if full { 0 } else { self.at(node).saturating_sub(need) };
        if let Some(room) = self.room.get_mut(node) {
            *room = left;
        }
        while node > 1 {
            node /= 2;
            let most = self.at(2 * node).max(self.at(2 * node + 1));
            if let Some(room) = self.room.get_mut(node) {
                *room = most;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_rows(rows: &[usize]) -> Vec<Example> {
        let example = |&n: &usize| Example { tokens: vec![0; n + 1], weights: vec![1.0; n + 1] };
        rows.iter().map(example).collect()
    }

    #[test]
    fn the_longest_go_first_and_fill_windows() {
        let examples = of_rows(&[3, 7, 5, 2, 3]);
        // 7 + 3, 5 + 3 + 2: two windows, where the given order first-fit takes three.
        let windows = pack(&examples, &[0, 1, 2, 3, 4], 10, 8).unwrap();
        assert_eq!(windows, [vec![0, 1], vec![2, 3, 4]]);
        // Another order: another choice among equals, other windows first.
        let windows = pack(&examples, &[4, 2, 3, 1, 0], 10, 8).unwrap();
        assert_eq!(windows, [vec![2, 3, 0], vec![4, 1]]);
        // No more sequences than there may be.
        let windows = pack(&of_rows(&[1; 5]), &[0, 1, 2, 3, 4], 10, 2).unwrap();
        assert_eq!(windows, [vec![0, 1], vec![2, 3], vec![4]]);
        assert!(pack(&[], &[], 4, 4).unwrap().is_empty());
    }

    #[test]
    fn what_fits_no_window_is_named() {
        let refused = |rows: &[usize]| pack(&of_rows(rows), &[0, 1], 4, 4).unwrap_err().to_string();
        assert!(refused(&[1, 5]).contains("example 2 has 6 tokens; a window takes 2 to 5"));
        assert!(refused(&[0, 1]).contains("example 1 has 1 tokens"));
    }

    /// Against the plain search, and the bound of 11/9 optimal + 6/9 where total / rows is a lower
    /// bound of the optimum.
    #[test]
    fn every_example_is_in_one_window_and_few_windows_are_needed() {
        let mut state = 7u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
            (state >> 33) as usize % below
        };
        for round in 0..200 {
            let (rows, most) = (1 + next(64), 1 + next(9));
            let lengths: Vec<usize> = (0..next(60)).map(|_| 1 + next(rows)).collect();
            let examples = of_rows(&lengths);
            let mut order: Vec<usize> = (0..lengths.len()).collect();
            order.sort_by_key(|i| (i * 7919 + round) % 101);
            let windows = pack(&examples, &order, rows, most).unwrap();
            let mut seen: Vec<usize> = windows.iter().flatten().copied().collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
            let mut bins: Vec<(usize, usize)> = Vec::new();
            let mut sorted = order.clone();
            sorted.sort_by_key(|&i| Reverse(lengths[i]));
            for i in sorted {
                let room = |(used, n): &&mut (usize, usize)| used + lengths[i] <= rows && *n < most;
                match bins.iter_mut().find(room) {
                    Some((used, n)) => (*used, *n) = (*used + lengths[i], *n + 1),
                    None => bins.push((lengths[i], 1)),
                }
            }
            assert_eq!(windows.len(), bins.len());
            for window in &windows {
                assert!(window.len() <= most && Window::of(&examples, window).rows() <= rows);
            }
            let total: usize = lengths.iter().sum();
            if most >= lengths.len() {
                assert!(windows.len() * 9 <= 11 * total.div_ceil(rows).max(1) * 2 + 6);
            }
            assert_eq!(windows, pack(&examples, &order, rows, most).unwrap());
        }
    }
}
