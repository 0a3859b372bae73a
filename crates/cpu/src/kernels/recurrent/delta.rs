//! The gated delta rule, forward. Columns of the state do not mix: a vector holds 16 of them, a
//! product with a key or query is four chains over its elements.

use graph::{Call, DType, GatedDeltaAttrs, KeyHeads, Op};

use super::super::{Support, Tiles, dense, dense_last, memory, needs};
use super::{Heads, States, TILE_WORK, Walk, rows_of_none, sequence, sum4, zero};
use crate::job::{Job, Scratch};
use crate::simd::{LANES, Simd, Task};

/// Heads, states and cotangents with dense elements, gates of any strides, dense sequences.
pub(super) fn supports(call: &Call<'_>) -> Support {
    let q = dense_last(call, 0)?;
    dense_last(call, 1)?;
    dense_last(call, 2)?;
    if memory(call, 3, DType::F32)?.shape.rank() == 3 {
        dense_last(call, 3)?;
    }
    memory(call, 4, DType::F32)?;
    dense_last(call, 5)?;
    dense(call, 6, DType::I32)?;
    let (rows, keys) = (q.shape.dim(0), q.shape.dim(2));
    if matches!(call.op, Op::GatedDeltaRuleBack(_)) {
        dense_last(call, 7)?;
        dense_last(call, 8)?;
        let v = memory(call, 2, DType::F32)?.shape;
        let mut needs = needs(&super::delta_back::buffers(rows, keys));
        needs.kept = super::delta_back::kept(rows, keys, v.dim(1), v.dim(2)) * 4;
        return Ok(needs);
    }
    Ok(needs(&buffers(keys)))
}

/// How an op goes through its rows.
pub(super) fn walk(job: &Job<'_>, attrs: &GatedDeltaAttrs) -> Walk {
    Operands::new(job, attrs).walk()
}

/// Floats of scratch: 16 columns of the state, and a row's decays.
fn buffers(keys: usize) -> [usize; 2] {
    [keys * LANES, keys]
}

/// An op's operands.
#[derive(Copy, Clone)]
pub(super) struct Operands<'a> {
    pub(super) q: Heads,
    pub(super) k: Heads,
    pub(super) v: Heads,
    pub(super) g: Heads,
    pub(super) beta: Heads,
    pub(super) state: States,
    pub(super) seqs: &'a [i32],
    pub(super) rows: usize,
    pub(super) sequences: usize,
    pub(super) key_heads: usize,
    pub(super) heads: usize,
    /// Width of keys: rows of a state.
    pub(super) keys: usize,
    /// Width of values: columns of a state.
    pub(super) width: usize,
    /// True when each row of a state has its own decay.
    pub(super) rows_decay: bool,
    pub(super) scale: f32,
    sharing: KeyHeads,
}

impl<'a> Operands<'a> {
    pub(super) fn new(job: &Job<'a>, attrs: &GatedDeltaAttrs) -> Operands<'a> {
        let [q, k, v, g, beta, state, seqs] = [0, 1, 2, 3, 4, 5, 6].map(|i| job.input(i));
        let [rows, key_heads, keys] = [0, 1, 2].map(|i| q.arg.shape.dim(i));
        Operands {
            q: Heads::new(&q),
            k: Heads::new(&k),
            v: Heads::new(&v),
            g: Heads::new(&g),
            beta: Heads::new(&beta),
            state: States::new(&state),
            seqs: seqs.ints(),
            rows,
            sequences: seqs.arg.shape.dim(0),
            key_heads,
            heads: v.arg.shape.dim(1),
            keys,
            width: v.arg.shape.dim(2),
            rows_decay: g.arg.shape.rank() == 3,
            scale: attrs.scale.get(),
            sharing: attrs.key_heads,
        }
    }

    /// The key head that a value head reads.
    #[inline(always)]
    pub(super) fn key_head(&self, head: usize) -> usize {
        match self.sharing {
            KeyHeads::Blocks => head / (self.heads / self.key_heads).max(1),
            KeyHeads::Cycle => head % self.key_heads,
        }
    }

    pub(super) fn walk(&self) -> Walk {
        Walk::new(self.rows, self.keys * LANES)
    }

    /// Elements of all outputs, after which the exit states begin.
    pub(super) fn outputs(&self) -> usize {
        self.rows * self.heads * self.width
    }

    /// Elements before column `column` of a head's state in what is computed.
    #[inline(always)]
    pub(super) fn state_at(&self, sequence: usize, head: usize, column: usize) -> usize {
        (sequence * self.heads + head) * self.keys * self.width + column
    }

    /// Writes the decays `exp(g)` of a row and head to `to`, one per row of the state.
    ///
    /// # Safety
    /// `to` must be valid for [`Operands::keys`] writes, `row` and `head` be of the operands.
    #[inline(always)]
    pub(super) unsafe fn decays<S: Simd>(&self, s: S, row: usize, head: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            let g = self.g.at(row, head);
            let shared = s.exp(s.splat(if self.rows_decay { 0.0 } else { *g }));
            let mut i = 0;
            while i < self.keys {
                let n = self.keys - i;
                let decay = if self.rows_decay { s.exp(s.load_first(g.add(i), n)) } else { shared };
                s.store_first(to.add(i), decay, n);
                i += LANES;
            }
        }
    }

    /// Advances 16 columns of a state, from `column` on, by a row: reads `from`, writes `to`,
    /// which may be the same. Gives `v - u` and `d`.
    ///
    /// # Safety
    /// `from` and `to` must be valid for [`Operands::keys`] vectors and `decays` for as many
    /// floats; `row` and `head` must be of the operands.
    #[inline(always)]
    pub(super) unsafe fn step<S: Simd>(
        &self,
        s: S,
        (row, head, column): (usize, usize, usize),
        decays: *const f32,
        from: *const f32,
        to: *mut f32,
    ) -> (S::F32, S::F32) {
        // SAFETY: the caller's.
        unsafe {
            let k = self.k.at(row, self.key_head(head));
            let mut u = [s.zero(); 4];
            let mut i = 0;
            while i + 4 <= self.keys {
                for (r, u) in u.iter_mut().enumerate() {
                    let at = LANES * (i + r);
                    let decayed = s.mul(s.splat(*decays.add(i + r)), s.load(from.add(at)));
                    s.store(to.add(at), decayed);
                    *u = s.fma(s.splat(*k.add(i + r)), decayed, *u);
                }
                i += 4;
            }
            while i < self.keys {
                let decayed = s.mul(s.splat(*decays.add(i)), s.load(from.add(LANES * i)));
                s.store(to.add(LANES * i), decayed);
                u[0] = s.fma(s.splat(*k.add(i)), decayed, u[0]);
                i += 1;
            }
            let v = s.load_first(self.v.at(row, head).add(column), self.width - column);
            let off = s.sub(v, sum4(s, u));
            let d = s.mul(s.splat(self.beta.get(row, head)), off);
            for i in 0..self.keys {
                let to = to.add(LANES * i);
                s.store(to, s.fma(s.splat(*k.add(i)), d, s.load(to)));
            }
            (off, d)
        }
    }

    /// Reads 16 columns of a state, from `column` on.
    ///
    /// # Safety
    /// `states` must be of the operands' shape, the sequence and head be of them, and `to` valid
    /// for [`Operands::keys`] vectors.
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &self,
        s: S,
        states: States,
        (sequence, head, column): (usize, usize, usize),
        to: *mut f32,
    ) {
        let n = self.width - column;
        for i in 0..self.keys {
            let from = states.at(sequence, head, i).wrapping_add(column);
            // SAFETY: the caller's.
            unsafe { s.store(to.add(LANES * i), s.load_first(from, n)) }
        }
    }

    /// Writes them in rows of [`Operands::width`].
    ///
    /// # Safety
    /// `from` must be valid for [`Operands::keys`] vectors, `to` for the columns of all rows that
    /// there are.
    #[inline(always)]
    pub(super) unsafe fn save<S: Simd>(&self, s: S, from: *const f32, column: usize, to: *mut f32) {
        let n = self.width - column;
        for i in 0..self.keys {
            // SAFETY: the caller's.
            unsafe { s.store_first(to.add(i * self.width), s.load(from.add(LANES * i)), n) }
        }
    }

    /// Blocks of 16 columns, some per tile.
    fn blocks(&self) -> Tiles {
        let rows = self.rows.div_ceil(self.sequences.max(1));
        let work = rows.saturating_mul(self.keys).saturating_mul(LANES);
        Tiles::new(self.width.div_ceil(LANES), TILE_WORK / work.max(1))
    }
}

/// Sequences by heads by blocks of columns; one more for the rows of no sequence.
pub(super) fn tiles(job: &Job<'_>) -> usize {
    let Op::GatedDeltaRule(attrs) = job.op else { return 0 };
    let o = Operands::new(job, attrs);
    o.sequences * o.heads * o.blocks().count + 1
}

pub(super) fn run_tile(
    job: &Job<'_>,
    attrs: &GatedDeltaAttrs,
    tile: usize,
    mut scratch: Scratch<'_>,
) {
    let o = Operands::new(job, attrs);
    let [state, decays] = buffers(o.keys).map(|n| scratch.take(n));
    job.isa.run(Forward { job, o, tile, state, decays });
}

struct Forward<'a> {
    job: &'a Job<'a>,
    o: Operands<'a>,
    tile: usize,
    state: &'a mut [f32],
    decays: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (o, y) = (self.o, self.job.out::<f32>());
        let blocks = o.blocks();
        let tiles = o.sequences * o.heads * blocks.count;
        let (round, tile) = (self.tile / (tiles + 1), self.tile % (tiles + 1));
        if tile == tiles {
            if round > 0 {
                return;
            }
            let row = o.heads * o.width;
            // SAFETY: outputs of rows of no sequence are this tile's.
            return rows_of_none(o.seqs, o.rows, |rows| unsafe {
                zero(y.add(rows.start * row), rows.len() * row);
            });
        }
        let (state, decays) = (self.state.as_mut_ptr(), self.decays.as_mut_ptr());
        let (place, block) = (tile / blocks.count, tile % blocks.count);
        let sequence = sequence(o.seqs, place / o.heads);
        let head = place % o.heads;
        let tokens = o.walk().tokens(round, sequence);
        if round > 0 && tokens.is_empty() {
            return;
        }
        let exits = y.wrapping_add(o.outputs());
        // Later rounds go on from the exit state so far.
        let entry = match round {
            0 => o.state,
            _ => States::dense(exits, o.heads, o.keys, o.width),
        };
        for column in blocks.range(block).map(|block| block * LANES) {
            let n = o.width - column;
            let at = o.state_at(sequence.index, head, column);
            // SAFETY: these columns of the sequence's outputs and exit state are this tile's.
            // Scratch is as large as `buffers` says; the sequence's rows have been checked.
            unsafe {
                o.load(s, entry, (sequence.index, head, column), state);
                for row in tokens.clone().map(|token| sequence.first + token) {
                    o.decays(s, row, head, decays);
                    o.step(s, (row, head, column), decays, state, state);
                    let q = o.q.at(row, o.key_head(head));
                    let mut sum = [s.zero(); 4];
                    let mut i = 0;
                    while i + 4 <= o.keys {
                        for (r, sum) in sum.iter_mut().enumerate() {
                            let v = s.load(state.add(LANES * (i + r)));
                            *sum = s.fma(s.splat(*q.add(i + r)), v, *sum);
                        }
                        i += 4;
                    }
                    while i < o.keys {
                        let v = s.load(state.add(LANES * i));
                        sum[0] = s.fma(s.splat(*q.add(i)), v, sum[0]);
                        i += 1;
                    }
                    let to = y.add((row * o.heads + head) * o.width + column);
                    s.store_first(to, s.mul(s.splat(o.scale), sum4(s, sum)), n);
                }
                o.save(s, state, column, exits.add(at));
            }
        }
    }
}
