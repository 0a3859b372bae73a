//! Work on long lists in pieces, between which somebody is asked whether to stop: an embedding's
//! adapter of a high rank has tens of millions of numbers, and turns wait no longer than for some
//! milliseconds.

use std::ops::Range;

/// Bytes of a list that are copied, added or cleared at a time: a fraction of a millisecond. Few in
/// tests of this crate, so that their lists have several pieces.
pub(crate) const BYTES: usize = if cfg!(test) { 256 } else { 1 << 20 };

/// The same in numbers.
pub(crate) const NUMBERS: usize = BYTES / 4;

/// Examples that are shuffled or packed at a time, for which a few of them are looked up each.
pub(crate) const EXAMPLES: usize = if cfg!(test) { 2 } else { 4096 };

/// How far work on some lists has come.
#[derive(Copy, Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct At {
    /// The list it is at.
    pub(crate) list: usize,
    /// The number of it that comes next.
    pub(crate) from: usize,
}

impl At {
    /// At the beginning of a list.
    pub(crate) fn start(list: usize) -> At {
        At { list, from: 0 }
    }

    /// The numbers that come next of a list that has `len`.
    pub(crate) fn piece(self, len: usize) -> Range<usize> {
        let from = self.from.min(len);
        from..len.min(from + NUMBERS)
    }

    /// What comes after them: more of the list, or the next.
    pub(crate) fn after(self, len: usize) -> At {
        match self.piece(len).end {
            end if end < len => At { from: end, ..self },
            _ => At::start(self.list + 1),
        }
    }
}
