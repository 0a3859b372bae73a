//! The gradients of the selective scan. A tile has a sequence and some heads of a group, whose
//! channels it takes through the tokens 16 at a time: sums over channels are chains in order, and
//! what the tiles of other heads and sequences add is a part of the result of its own.

use std::ops::Range;

use graph::Op;

use super::scan::{Channels, Operands};
use super::{Heads, Sequence, States, Walk, add_first, reduce_rows, rows_of_none, sequence, zero};
use crate::job::{Job, Scratch, padded};
use crate::simd::{LANES, Simd, Task};

/// Floats of scratch for 16 channels: the states of one segment, the gradient of the state, and the
/// gradients of the heads' `a`.
pub(super) fn buffers(rows: usize, states: usize) -> [usize; 3] {
    let state = LANES * padded(states);
    [(Walk::new(rows, state).longest(rows) + 1) * state, state, state]
}

/// Floats of the states at which segments start.
pub(super) fn kept(rows: usize, states: usize, channels: usize) -> usize {
    Walk::new(rows, LANES * padded(states)).kept() * channels * padded(states)
}

/// The heads of a tile: run `part` of a group.
fn heads(o: &Operands<'_>, parts: usize, group: usize, part: usize) -> Range<usize> {
    let of_group = o.heads / o.groups;
    let run = of_group.div_ceil(parts).max(1);
    let (start, end) = ((part * run).min(of_group), ((part + 1) * run).min(of_group));
    group * of_group + start..group * of_group + end
}

/// Sequences by groups by parts; one more for the rows of no sequence.
pub(super) fn tiles(job: &Job<'_>, parts: usize) -> usize {
    let Op::SsmScanBack { .. } = job.op else { return 0 };
    let o = Operands::new(job);
    o.sequences * o.groups * parts + 1
}

pub(super) fn run_tile(job: &Job<'_>, parts: usize, tile: usize, mut scratch: Scratch<'_>) {
    let o = Operands::new(job);
    let [states, ds, da] = buffers(o.rows, o.states).map(|n| scratch.take(n).as_mut_ptr());
    let scratch = Buffers { states, ds, da };
    let (to, starts) = (Gradients::new(job, &o, parts), job.kept());
    let (dy, d_exit) = (Heads::new(&job.input(7)), States::new(&job.input(8)));
    job.isa.run(Back { o, dy, d_exit, to, starts, parts, tile, scratch });
}

#[derive(Copy, Clone)]
struct Buffers {
    states: *mut f32,
    ds: *mut f32,
    da: *mut f32,
}

/// Where the gradients of the operands are.
#[derive(Copy, Clone)]
struct Gradients {
    x: *mut f32,
    dt: *mut f32,
    a: *mut f32,
    b: *mut f32,
    c: *mut f32,
    state: *mut f32,
}

impl Gradients {
    fn new(job: &Job<'_>, o: &Operands<'_>, parts: usize) -> Gradients {
        let x = job.out::<f32>();
        let shared = parts * o.rows * o.groups * o.states;
        let dt = x.wrapping_add(o.outputs());
        let a = dt.wrapping_add(o.rows * o.heads);
        let b = a.wrapping_add(o.sequences * o.heads * o.decays);
        let c = b.wrapping_add(shared);
        Gradients { x, dt, a, b, c, state: c.wrapping_add(shared) }
    }
}

struct Back<'a> {
    o: Operands<'a>,
    dy: Heads,
    d_exit: States,
    to: Gradients,
    /// The states at which segments start.
    starts: *mut f32,
    parts: usize,
    tile: usize,
    scratch: Buffers,
}

impl Task for Back<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (o, to) = (&self.o, self.to);
        let per_row = o.groups * o.states;
        let tiles = o.sequences * o.groups * self.parts;
        let (round, tile) = (self.tile / (tiles + 1), self.tile % (tiles + 1));
        if tile == tiles {
            if round > 0 {
                return;
            }
            // SAFETY: gradients of rows of no sequence are this tile's.
            return rows_of_none(o.seqs, o.rows, |rows| unsafe {
                zero(to.x.add(rows.start * o.channels()), rows.len() * o.channels());
                zero(to.dt.add(rows.start * o.heads), rows.len() * o.heads);
                for part in 0..self.parts {
                    let start = (part * o.rows + rows.start) * per_row;
                    zero(to.b.add(start), rows.len() * per_row);
                    zero(to.c.add(start), rows.len() * per_row);
                }
            });
        }
        let (place, part) = (tile / self.parts, tile % self.parts);
        let (sequence, group) = (sequence(o.seqs, place / o.groups), place % o.groups);
        let heads = heads(o, self.parts, group, part);
        let channels = heads.start * o.width..heads.end * o.width;
        let blocks = channels.clone().step_by(LANES).map(|i| Channels::new(o, i, channels.end));
        let shared = (part * o.rows * o.groups + group) * o.states;
        let walk = o.walk();
        if round == 0 {
            let decays = (sequence.index * o.heads + heads.start) * o.decays;
            // SAFETY: the sequence's gradients of these heads are this tile's.
            unsafe { zero(to.a.add(decays), heads.len() * o.decays) };
        }
        if round < walk.rounds_before() {
            let tokens = walk.tokens_before(round, sequence);
            for channels in blocks.filter(|_| !tokens.is_empty()) {
                // SAFETY: the states of these heads with which the sequence's segments start are
                // this tile's. Scratch is as large as `buffers` says.
                unsafe { self.advance(s, sequence, &channels, tokens.clone()) };
            }
            return;
        }
        let Some((segments, last)) = walk.segments(round, sequence) else { return };
        let rows = segments.start * walk.length..(segments.end * walk.length).min(sequence.rows);
        let from = match last {
            true => self.d_exit,
            false => States::dense(to.state, o.heads, o.width, o.states),
        };
        // SAFETY: the sequence's gradients of these heads, and this part of its gradients of
        // the group, are this tile's. Scratch is as large as `buffers` says.
        unsafe {
            for row in rows.map(|p| sequence.first + p) {
                zero(to.b.add(shared + row * per_row), o.states);
                zero(to.c.add(shared + row * per_row), o.states);
                zero(to.dt.add(row * o.heads + heads.start), heads.len());
            }
            for channels in blocks {
                self.channels(s, sequence, &channels, shared, segments.clone(), from);
            }
        }
    }
}

impl Back<'_> {
    /// Where the states of some channels are kept with which a segment starts that is not the first.
    #[inline(always)]
    fn start(&self, sequence: Sequence, segment: usize, channels: &Channels) -> *mut f32 {
        let slot = self.o.walk().slot(sequence, segment) * self.o.channels() + channels.first;
        self.starts.wrapping_add(slot * self.o.stride())
    }

    /// Advances the states of up to 16 channels by some tokens, each in the place of those with which
    /// the next segment starts.
    ///
    /// # Safety
    /// Those places must be the tile's, and scratch large enough.
    #[inline(always)]
    unsafe fn advance<S: Simd>(
        &self,
        s: S,
        sequence: Sequence,
        channels: &Channels,
        tokens: Range<usize>,
    ) {
        let (o, b, length) = (&self.o, self.scratch, self.o.walk().length);
        for p in tokens {
            let segment = p / length;
            let next = self.start(sequence, segment + 1, channels);
            // SAFETY: the caller's; a round begins with a segment.
            unsafe {
                let from = match (p % length, segment) {
                    (0, 0) => {
                        o.load(s, o.state, sequence.index, channels, b.states);
                        b.states
                    }
                    (0, _) => self.start(sequence, segment, channels),
                    _ => next,
                };
                o.step(s, sequence.first + p, channels, (from, next), false);
            }
        }
    }

    /// Takes the gradients of the states of up to 16 channels back through some segments, from what
    /// they are after the last of them. `shared` is where the gradients of `b` and `c` of the part and
    /// group begin.
    ///
    /// # Safety
    /// The gradients must be the tile's, the states with which segments start be there, and scratch
    /// large enough.
    #[inline(always)]
    unsafe fn channels<S: Simd>(
        &self,
        s: S,
        sequence: Sequence,
        channels: &Channels,
        shared: usize,
        segments: Range<usize>,
        from: States,
    ) {
        let (o, b) = (&self.o, self.scratch);
        let (length, size) = (o.walk().length, LANES * o.stride());
        let count = channels.count;
        let heads = channels.heads[0]..channels.heads[count - 1] + 1;
        // SAFETY: the caller's; 16 channels are of no more than 16 heads.
        unsafe {
            zero(b.da, heads.len() * o.stride());
            o.load(s, from, sequence.index, channels, b.ds);
            for segment in segments.rev() {
                let first = sequence.first + segment * length;
                let rows = (sequence.rows - segment * length).min(length);
                if segment == 0 {
                    o.load(s, o.state, sequence.index, channels, b.states);
                } else {
                    let start = self.start(sequence, segment, channels).cast_const();
                    std::ptr::copy_nonoverlapping(start, b.states, count * o.stride());
                }
                for p in 0..rows {
                    let (from, to) = (b.states.add(p * size), b.states.add((p + 1) * size));
                    o.step(s, first + p, channels, (from, to), false);
                }
                for p in (0..rows).rev() {
                    self.descend(s, first + p, channels, shared, p);
                }
            }
            let at = o.state_at(sequence.index, channels.first);
            o.save(s, b.ds, count, self.to.state.add(at));
            for (i, head) in heads.enumerate() {
                let from = b.da.add(i * o.stride());
                let to = self.to.a.add((sequence.index * o.heads + head) * o.decays);
                let mut all = s.zero();
                for n in (0..o.states).step_by(LANES) {
                    all = s.add(all, s.load(from.add(n)));
                    if o.decays > 1 {
                        add_first(s, to.add(n), s.load(from.add(n)), o.states - n);
                    }
                }
                if o.decays == 1 {
                    *to += s.reduce_sum(all);
                }
            }
        }
    }

    /// Takes the gradients of the states back over row `p` of the segment whose states are in
    /// scratch, and adds up what they give.
    ///
    /// # Safety
    /// As [`Back::channels`].
    #[inline(always)]
    unsafe fn descend<S: Simd>(
        &self,
        s: S,
        row: usize,
        channels: &Channels,
        shared: usize,
        p: usize,
    ) {
        let (o, scratch, to) = (&self.o, self.scratch, self.to);
        let size = LANES * o.stride();
        let shared = shared + row * o.groups * o.states;
        let out = row * o.channels() + channels.first;
        let (mut of_x, mut of_dt) = ([s.zero(); LANES], [s.zero(); LANES]);
        // SAFETY: the caller's; there are as many lanes as channels.
        unsafe {
            let gates = channels.gates(o, row);
            let (b, c) = (o.b.at(row, channels.group()), o.c.at(row, channels.group()));
            for n in (0..o.states).step_by(LANES) {
                let m = o.states - n;
                let (b, c) = (s.load_first(b.add(n), m), s.load_first(c.add(n), m));
                let (mut db, mut dc) = (s.zero(), s.zero());
                let mut last = usize::MAX;
                let (mut a, mut decay) = (s.zero(), s.zero());
                for r in 0..channels.count {
                    let head = channels.heads[r];
                    let dt = s.splat(gates.dt[r]);
                    if head != last {
                        a = o.a(s, head, n);
                        decay = s.exp(s.mul(dt, a));
                        last = head;
                    }
                    let at = r * o.stride() + n;
                    let (before, after) = (p * size + at, (p + 1) * size + at);
                    let dy = s.splat(*channels.at(self.dy, row, r));
                    let ds = s.fma(dy, c, s.load(scratch.ds.add(at)));
                    dc = s.fma(dy, s.load(scratch.states.add(after)), dc);
                    db = s.fma(s.splat(gates.dt[r] * gates.x[r]), ds, db);
                    of_x[r] = s.fma(ds, b, of_x[r]);
                    let ds = s.mul(decay, ds);
                    let e = s.mul(ds, s.load(scratch.states.add(before)));
                    of_dt[r] = s.fma(e, a, of_dt[r]);
                    let da = scratch.da.add((head - channels.heads[0]) * o.stride() + n);
                    s.store(da, s.fma(dt, e, s.load(da)));
                    s.store(scratch.ds.add(at), ds);
                }
                add_first(s, to.b.add(shared + n), db, m);
                add_first(s, to.c.add(shared + n), dc, m);
            }
            let (mut of_x_sums, mut of_dt_sums) = ([0.0; LANES], [0.0; LANES]);
            s.store(of_x_sums.as_mut_ptr(), reduce_rows(s, &mut of_x));
            s.store(of_dt_sums.as_mut_ptr(), reduce_rows(s, &mut of_dt));
            for r in 0..channels.count {
                *to.x.add(out + r) = gates.dt[r] * of_x_sums[r];
                *to.dt.add(row * o.heads + channels.heads[r]) +=
                    of_dt_sums[r] + gates.x[r] * of_x_sums[r];
            }
        }
    }
}
