//! First-fit decreasing, as work that can stop.

use crate::{Error, Example, Result};

/// What windows have room for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Room {
    /// Rows of a window that examples share.
    pub rows: usize,
    /// Rows of the longest example; one of more than `rows` has a window of its own.
    pub longest: usize,
    /// Most examples of a window.
    pub most: usize,
}

impl Room {
    /// Of windows of so many rows, where no example is longer.
    pub fn shared(rows: usize, most: usize) -> Room {
        Room { rows, longest: rows, most }
    }
}

/// What a packing does next, from one place to the next.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Stage {
    /// Windows are empty.
    Clear,
    /// Places go by length.
    Sort,
    /// Each goes into the first window with room.
    Fit,
    /// Windows follow each other as their longest examples do.
    Rank,
    /// Examples go into them in order.
    Fill,
    Done,
}

/// Examples on their way into windows, by first-fit decreasing: the longest first, equally long ones
/// in their order, each into the first window with room, those that are longer than a window each
/// into its own.
///
/// A pure function of the examples' lengths and their order, wherever it stops. The order also
/// decides how the windows follow each other (as their longest examples do there) and how the
/// examples of a window do, so a shuffled order makes shuffled windows, and not the long ones first.
///
/// All its memory is taken when it is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Packing {
    room: Room,
    /// Rows of examples, each number once, most first.
    lengths: Vec<usize>,
    /// Of each example, where that is in `lengths`.
    length_of: Vec<u32>,
    /// Of each length, how many examples are longer.
    longer: Vec<u32>,
    /// How many have windows of their own.
    long: usize,
    stage: Stage,
    at: usize,
    /// Of each length, where the next example of it goes.
    next: Vec<u32>,
    bins: Bins,
    /// How many windows there are.
    windows: usize,
    /// Of each window: the place of its longest example, how many it has, where the next goes.
    head: Vec<u32>,
    count: Vec<u32>,
    start: Vec<u32>,
    /// Of each place in the order, its window.
    window_of: Vec<u32>,
    /// How many windows are ranked, and how many examples these have.
    ranked: (usize, u32),
    /// Places by length; then examples, window by window.
    list: Vec<u32>,
    /// Where each window ends in that.
    ends: Vec<u32>,
}

fn at(list: &[u32], i: usize) -> usize {
    list.get(i).map_or(0, |&n| n as usize)
}

fn put(list: &mut [u32], i: usize, n: usize) {
    if let Some(slot) = list.get_mut(i) {
        // Of at most 2^32 examples.
        *slot = n as u32;
    }
}

impl Packing {
    /// Of examples, each with the number that an error names it by, from 0.
    ///
    /// # Errors
    /// Names the first that fits no window.
    pub fn new<'e>(
        examples: impl Iterator<Item = (usize, &'e Example)>,
        room: Room,
    ) -> Result<Packing> {
        let mut rows = Vec::new();
        for (i, example) in examples {
            let need = example.rows();
            if need == 0 || need > room.longest {
                return Err(Error::Data(format!(
                    "example {} has {} tokens; a window takes 2 to {}; use a larger window",
                    i + 1,
                    example.tokens.len(),
                    room.longest + 1
                )));
            }
            rows.push(need);
        }
        if u32::try_from(rows.len()).is_err() {
            let message = format!("{} examples; expected at most 2^32 - 1", rows.len());
            return Err(Error::Data(message));
        }
        let mut sorted = rows.clone();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let (mut lengths, mut longer): (Vec<usize>, Vec<u32>) = (Vec::new(), Vec::new());
        for (before, need) in sorted.iter().enumerate() {
            if lengths.last() != Some(need) {
                lengths.push(*need);
                longer.push(before as u32);
            }
        }
        let of = |need: &usize| lengths.partition_point(|other| other > need) as u32;
        let list = || vec![0; rows.len()];
        Ok(Packing {
            length_of: rows.iter().map(of).collect(),
            long: sorted.partition_point(|&need| need > room.rows),
            stage: Stage::Clear,
            at: 0,
            next: longer.clone(),
            bins: Bins::new(rows.len()),
            windows: 0,
            head: list(),
            count: list(),
            start: list(),
            window_of: list(),
            ranked: (0, 0),
            list: list(),
            ends: list(),
            lengths,
            longer,
            room,
        })
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        let Packing { length_of, longer, next, head, count, start, window_of, list, ends, .. } =
            self;
        let lists = [length_of, longer, next, head, count, start, window_of, list, ends];
        let numbers = lists.into_iter().map(Vec::capacity).sum::<usize>();
        (numbers + self.bins.room.capacity()) * 4 + self.lengths.capacity() * size_of::<usize>()
    }

    /// Begins anew, for another order.
    pub fn begin(&mut self) {
        (self.stage, self.at, self.windows, self.ranked) = (Stage::Clear, 0, 0, (0, 0));
    }

    /// Goes on by so many examples, whose numbers are in `order`, the same each time; true when all
    /// are in their windows.
    pub fn advance(&mut self, order: &[u32], examples: usize) -> bool {
        let len = match self.stage {
            Stage::Clear => self.next.len().max(self.bins.room.len()),
            Stage::Sort | Stage::Fit | Stage::Rank | Stage::Fill => self.list.len(),
            Stage::Done => return true,
        };
        let to = len.min(self.at.saturating_add(examples));
        let piece = self.at..to;
        let (work, next): (fn(&mut Packing, &[u32], usize), _) = match self.stage {
            Stage::Clear => (Packing::clear, Stage::Sort),
            Stage::Sort => (Packing::sort, Stage::Fit),
            Stage::Fit => (Packing::fit, Stage::Rank),
            Stage::Rank => (Packing::rank, Stage::Fill),
            Stage::Fill | Stage::Done => (Packing::fill, Stage::Done),
        };
        piece.for_each(|i| work(self, order, i));
        self.at = to;
        if to == len {
            (self.stage, self.at) = (next, 0);
        }
        self.stage == Stage::Done
    }

    fn clear(&mut self, _: &[u32], i: usize) {
        put(&mut self.next, i, at(&self.longer, i));
        // No shared example has more rows than fit.
        put(&mut self.bins.room, i, self.room.rows.min(u32::MAX as usize));
    }

    fn sort(&mut self, order: &[u32], place: usize) {
        let length = at(&self.length_of, at(order, place));
        let next = at(&self.next, length);
        put(&mut self.list, next, place);
        put(&mut self.next, length, next + 1);
    }

    fn fit(&mut self, order: &[u32], i: usize) {
        let place = at(&self.list, i);
        let length = at(&self.length_of, at(order, place));
        let need = self.lengths.get(length).copied().unwrap_or(0);
        // The long ones come first.
        let shared = i.checked_sub(self.long).map(|_| self.bins.first(need));
        let window = shared.map_or(i, |bin| self.long + bin);
        if window == self.windows {
            self.windows += 1;
            put(&mut self.head, window, place);
            put(&mut self.count, window, 0);
        }
        let count = at(&self.count, window) + 1;
        put(&mut self.count, window, count);
        put(&mut self.window_of, place, window);
        if let Some(bin) = shared {
            self.bins.take(bin, need, count >= self.room.most);
        }
    }

    fn rank(&mut self, _: &[u32], place: usize) {
        let window = at(&self.window_of, place);
        if at(&self.head, window) == place {
            let (rank, from) = self.ranked;
            let end = from as usize + at(&self.count, window);
            put(&mut self.start, window, from as usize);
            put(&mut self.ends, rank, end);
            self.ranked = (rank + 1, end as u32);
        }
    }

    fn fill(&mut self, order: &[u32], place: usize) {
        let window = at(&self.window_of, place);
        let start = at(&self.start, window);
        put(&mut self.list, start, at(order, place));
        put(&mut self.start, window, start + 1);
    }

    /// How many windows there are, when it is done.
    pub fn len(&self) -> usize {
        self.windows
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.windows == 0
    }

    /// The examples of a window, when it is done.
    pub fn window(&self, i: usize) -> Option<Vec<usize>> {
        let ends = self.ends.get(..self.windows)?;
        let start = i.checked_sub(1).map_or(0, |before| at(ends, before));
        let examples = self.list.get(start..*ends.get(i)? as usize)?;
        Some(examples.iter().map(|&i| i as usize).collect())
    }
}

/// Packs the examples of `order` into windows, as [`Packing`] does. Returns the examples' indices
/// per window.
///
/// # Errors
/// Names the first example that fits no window.
pub fn pack(examples: &[Example], order: &[usize], room: Room) -> Result<Vec<Vec<usize>>> {
    let chosen: Vec<(usize, &Example)> =
        order.iter().filter_map(|&i| Some((i, examples.get(i)?))).collect();
    let mut packing = Packing::new(chosen.iter().copied(), room)?;
    // The places of those in `chosen`.
    let places: Vec<u32> = (0..chosen.len()).map(|place| place as u32).collect();
    while !packing.advance(&places, usize::MAX) {}
    let number = |place: usize| chosen.get(place).map(|&(i, _)| i);
    let windows = (0..packing.len()).filter_map(|i| packing.window(i));
    Ok(windows.map(|window| window.into_iter().filter_map(number).collect()).collect())
}

/// The room of windows, as a tree of maxima: the first with enough is found in `log n`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Bins {
    leaves: usize,
    /// Node `k` has the children `2k` and `2k + 1`; leaves begin at `leaves`.
    room: Vec<u32>,
}

impl Bins {
    /// As many windows as there are examples: one that has never been taken is the first with room
    /// sooner or later.
    fn new(count: usize) -> Bins {
        let leaves = count.next_power_of_two();
        Bins { leaves, room: vec![0; 2 * leaves] }
    }

    fn first(&self, need: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node = 2 * node + usize::from(at(&self.room, 2 * node) < need);
        }
        node - self.leaves
    }

    fn take(&mut self, bin: usize, need: usize, full: bool) {
        let mut node = bin + self.leaves;
        let left = if full { 0 } else { at(&self.room, node).saturating_sub(need) };
        put(&mut self.room, node, left);
        while node > 1 {
            node /= 2;
            let most = at(&self.room, 2 * node).max(at(&self.room, 2 * node + 1));
            put(&mut self.room, node, most);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;

    use super::*;
    use crate::Window;

    fn of_rows(rows: &[usize]) -> Vec<Example> {
        let example = |&n: &usize| Example { tokens: vec![0; n + 1], weights: vec![1.0; n + 1] };
        rows.iter().map(example).collect()
    }

    #[test]
    fn the_longest_go_first_and_fill_windows() {
        let examples = of_rows(&[3, 7, 5, 2, 3]);
        // 7 + 3, 5 + 3 + 2: two windows, where the given order first-fit takes three.
        let windows = pack(&examples, &[0, 1, 2, 3, 4], Room::shared(10, 8)).unwrap();
        assert_eq!(windows, [vec![0, 1], vec![2, 3, 4]]);
        // Another order: another choice among equals, other windows first.
        let windows = pack(&examples, &[4, 2, 3, 1, 0], Room::shared(10, 8)).unwrap();
        assert_eq!(windows, [vec![2, 3, 0], vec![4, 1]]);
        // No more sequences than there may be.
        let windows = pack(&of_rows(&[1; 5]), &[0, 1, 2, 3, 4], Room::shared(10, 2)).unwrap();
        assert_eq!(windows, [vec![0, 1], vec![2, 3], vec![4]]);
        assert!(pack(&[], &[], Room::shared(4, 4)).unwrap().is_empty());
        // Some of them, those too long for others alone.
        let room = Room { rows: 5, longest: 7, most: 8 };
        assert_eq!(pack(&examples, &[3, 1, 0], room).unwrap(), [vec![1], vec![3, 0]]);
    }

    #[test]
    fn what_fits_no_window_is_named() {
        let refused = |rows: &[usize]| {
            pack(&of_rows(rows), &[0, 1], Room::shared(4, 4)).unwrap_err().to_string()
        };
        assert!(refused(&[1, 5]).contains("example 2 has 6 tokens; a window takes 2 to 5"));
        assert!(refused(&[0, 1]).contains("example 1 has 1 tokens"));
    }

    /// First-fit decreasing, written down.
    fn plainly(lengths: &[usize], order: &[usize], room: Room) -> Vec<Vec<usize>> {
        let mut sorted: Vec<(usize, usize)> = order.iter().copied().enumerate().collect();
        sorted.sort_by_key(|&(place, i)| (Reverse(lengths[i]), place));
        let mut windows: Vec<Vec<(usize, usize)>> = Vec::new();
        for (place, i) in sorted {
            let fits = |window: &&mut Vec<(usize, usize)>| {
                let used: usize = window.iter().map(|&(_, i)| lengths[i]).sum();
                used + lengths[i] <= room.rows && window.len() < room.most
            };
            match windows.iter_mut().find(fits) {
                Some(window) => window.push((place, i)),
                None => windows.push(vec![(place, i)]),
            }
        }
        windows.sort_by_key(|window| window[0].0);
        windows.iter_mut().for_each(|window| window.sort_unstable());
        windows.iter().map(|window| window.iter().map(|&(_, i)| i).collect()).collect()
    }

    /// Against the plain search, and the bound of 11/9 optimal + 6/9 where total / rows is a lower
    /// bound of the optimum; in pieces of any size, and again in the memory of another order.
    #[test]
    fn wherever_it_stops_a_packing_is_first_fit_decreasing() {
        let mut state = 7u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
            (state >> 33) as usize % below
        };
        for round in 0..200 {
            let (rows, most) = (1 + next(64), 1 + next(9));
            let room = Room { rows, longest: rows + next(2) * next(20), most };
            let lengths: Vec<usize> = (0..next(60)).map(|_| 1 + next(room.longest)).collect();
            let examples = of_rows(&lengths);
            let mut packing = Packing::new(examples.iter().enumerate(), room).unwrap();
            for again in 0..2 {
                let mut order: Vec<usize> = (0..lengths.len()).collect();
                order.sort_by_key(|i| (i * 7919 + round + again) % 101);
                let windows = pack(&examples, &order, room).unwrap();
                assert_eq!(windows, plainly(&lengths, &order, room), "round {round}");
                let numbers: Vec<u32> = order.iter().map(|&i| i as u32).collect();
                let (piece, mut pieces) = (1 + next(20), 1);
                packing.begin();
                while !packing.advance(&numbers, piece) {
                    pieces += 1;
                }
                assert!(pieces >= 5 * lengths.len().div_ceil(piece));
                let stopped: Vec<Vec<usize>> =
                    (0..packing.len()).map(|i| packing.window(i).unwrap()).collect();
                assert_eq!(stopped, windows, "round {round}, {piece} at a time");
                assert!(packing.window(windows.len()).is_none());
                let mut seen: Vec<usize> = windows.iter().flatten().copied().collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..lengths.len()).collect::<Vec<_>>());
                for window in &windows {
                    let of = Window::of(&examples, window).rows();
                    assert!(window.len() <= most && of <= rows || window.len() == 1);
                }
                let total: usize = lengths.iter().sum();
                if most >= lengths.len() {
                    assert!(windows.len() * 9 <= 11 * total.div_ceil(rows).max(1) * 2 + 6);
                }
            }
        }
    }
}
