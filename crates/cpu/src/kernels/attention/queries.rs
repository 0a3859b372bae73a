//! Which queries a tile has, and which keys they see. A query is a head of a row.

use std::ops::Range;

use super::{KEYS, Operands, Sequence};
use crate::simd::LANES;

/// The most queries that are multiplied with a tile of keys at once.
pub(super) const CHUNK: usize = 48;

/// The queries of a tile that are of one sequence: heads of a row side by side, rows ascending.
pub(super) struct Queries<'a> {
    o: &'a Operands<'a>,
    pub(super) seq: Sequence,
    rows: Range<usize>,
    heads: Range<usize>,
}

impl<'a> Queries<'a> {
    /// Those of the sequence's rows in a range.
    pub(super) fn new(
        o: &'a Operands<'a>,
        seq: Sequence,
        rows: &Range<usize>,
        heads: &Range<usize>,
    ) -> Queries<'a> {
        let rows = rows.start.max(seq.first)..rows.end.min(seq.first + seq.rows);
        Queries { o, seq, rows, heads: heads.clone() }
    }

    pub(super) fn count(&self) -> usize {
        self.rows.len() * self.heads.len()
    }

    /// The row and the head of a query.
    pub(super) fn at(&self, i: usize) -> (usize, usize) {
        (self.rows.start + i / self.heads.len(), self.heads.start + i % self.heads.len())
    }

    /// Queries of all rows before one of these.
    pub(super) fn number(&self, i: usize) -> usize {
        let (row, head) = self.at(i);
        row * self.o.heads + head
    }

    /// The first and the last position that some query sees.
    fn positions(&self) -> (usize, usize) {
        let first = self.seq.position(self.rows.start);
        (self.o.first_seen(first), first + self.rows.len() - 1)
    }

    /// The positions at which tiles of keys begin that some query sees in a round, ascending.
    pub(super) fn bases(&self, round: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, last) = self.positions();
        let keys = self.o.blocks.keys;
        let start = (first / KEYS * KEYS).max(round.saturating_mul(keys));
        (start..(last + 1).min((round + 1).saturating_mul(keys))).step_by(KEYS)
    }

    /// The keys of the tile at position `base` from the first that is seen to the last.
    pub(super) fn keys(&self, base: usize) -> Range<usize> {
        let (first, last) = self.positions();
        first.max(base) - base..(last + 1 - base).min(KEYS)
    }

    /// The queries that see keys of the tile at `base`: rows before its first key do not, nor do
    /// those whose window has passed its last.
    pub(super) fn seeing(&self, base: usize) -> Range<usize> {
        let first = self.seq.position(self.rows.start);
        let start = base.saturating_sub(first).min(self.rows.len());
        let end = self.o.last_seeing(base + KEYS - 1).saturating_sub(first).min(self.rows.len());
        start * self.heads.len()..end.max(start) * self.heads.len()
    }

    /// Up to [`CHUNK`] of them from query `start` on, before `end`, and what they see of the tile
    /// at `base`.
    pub(super) fn chunk(&self, start: usize, end: usize, base: usize) -> Chunk {
        let n = (end - start).min(CHUNK);
        let mut chunk = Chunk {
            first: start,
            n,
            queries: [(0, 0); CHUNK],
            positions: [0; CHUNK],
            seen: std::array::from_fn(|_| 0..0),
            vectors: 0..0,
        };
        let (mut row, mut head) = self.at(start);
        let (mut first, mut last) = (KEYS, 0);
        let mut r = 0;
        while r < n {
            let position = self.seq.position(row);
            let seen = self.o.first_seen(position).max(base) - base;
            let seen = seen..(position + 1 - base).min(KEYS);
            first = seen.start.min(first);
            last = seen.end.max(last);
            while head < self.heads.end && r < n {
                chunk.queries[r] = (row, head);
                chunk.positions[r] = position;
                chunk.seen[r] = seen.clone();
                (head, r) = (head + 1, r + 1);
            }
            (row, head) = (row + 1, self.heads.start);
        }
        chunk.vectors = first / LANES..last.div_ceil(LANES);
        chunk
    }
}

/// Queries, and what they see of a tile of keys.
pub(super) struct Chunk {
    /// The number of the first of them.
    pub(super) first: usize,
    pub(super) n: usize,
    /// A row and a head each.
    pub(super) queries: [(usize, usize); CHUNK],
    /// Positions of the rows.
    pub(super) positions: [usize; CHUNK],
    /// Keys of the tile.
    pub(super) seen: [Range<usize>; CHUNK],
    /// Vectors of the tile's keys that hold all of them.
    pub(super) vectors: Range<usize>,
}
