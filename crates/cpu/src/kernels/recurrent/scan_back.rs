//! The gradients of the selective scan. A tile has a sequence and some heads of a group, whose
//! channels it takes through the tokens 16 at a time: sums over channels are chains in order, and
//! what the tiles of other heads and sequences add is a part of the result of its own.

use std::ops::Range;

use graph::Op;

use super::scan::Operands;
use super::{Sequence, add_first, reduce_rows, rows_of_none, segments, sequence, zero};
use crate::job::{Job, Scratch, padded};
use crate::simd::{LANES, Simd, Task};

/// Floats of scratch for 16 channels: the states of one segment, those at the segments' starts,
/// the gradient of the state, a head's decays, and the gradients of the heads' `a`.
pub(super) fn buffers(rows: usize, states: usize) -> [usize; 5] {
    let ((length, count), state) = (segments(rows), LANES * padded(states));
    [(length + 1) * state, count * state, state, padded(states), state]
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
    let [states, starts, ds, decays, da] =
        buffers(o.rows, o.states).map(|n| scratch.take(n).as_mut_ptr());
    let scratch = Buffers { states, starts, ds, decays, da };
    let to = Gradients::new(job, &o, parts);
    job.isa.run(Back { o, dy: job.input(7).ptr(), to, parts, tile, scratch });
}

#[derive(Copy, Clone)]
struct Buffers {
    states: *mut f32,
    starts: *mut f32,
    ds: *mut f32,
    decays: *mut f32,
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
    /// Of the outputs, then of the exit states.
    dy: *const f32,
    to: Gradients,
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
        if self.tile == o.sequences * o.groups * self.parts {
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
        let (place, part) = (self.tile / self.parts, self.tile % self.parts);
        let (sequence, group) = (sequence(o.seqs, place / o.groups), place % o.groups);
        let heads = heads(o, self.parts, group, part);
        let channels = heads.start * o.width..heads.end * o.width;
        let shared = (part * o.rows * o.groups + group) * o.states;
        // SAFETY: the sequence's gradients of these heads, and this part of its gradients of
        // the group, are this tile's. Scratch is as large as `buffers` says.
        unsafe {
            for row in sequence.range() {
                zero(to.b.add(shared + row * per_row), o.states);
                zero(to.c.add(shared + row * per_row), o.states);
                zero(to.dt.add(row * o.heads + heads.start), heads.len());
            }
            let decays = (sequence.index * o.heads + heads.start) * o.decays;
            zero(to.a.add(decays), heads.len() * o.decays);
            for first in channels.clone().step_by(LANES) {
                let block = first..(first + LANES).min(channels.end);
                self.channels(s, sequence, block, shared);
            }
        }
    }
}

impl Back<'_> {
    /// Takes up to 16 channels through a sequence. `shared` is where the gradients of `b` and
    /// `c` of the part and group begin.
    ///
    /// # Safety
    /// The gradients must be the tile's, and scratch large enough.
    #[inline(always)]
    unsafe fn channels<S: Simd>(
        &self,
        s: S,
        sequence: Sequence,
        channels: Range<usize>,
        shared: usize,
    ) {
        let (o, b) = (&self.o, self.scratch);
        let (length, size) = (segments(o.rows).0, LANES * o.stride());
        let count = channels.len();
        let at = o.state_at(sequence.index, channels.start);
        let segments = sequence.rows.div_ceil(length);
        let heads = channels.start / o.width..(channels.end - 1) / o.width + 1;
        // SAFETY: the caller's; a sequence has no more segments than all rows have, and 16
        // channels no more than 16 heads.
        unsafe {
            zero(b.da, heads.len() * o.stride());
            o.load(s, o.state.add(at), count, b.starts);
            for p in 0..segments.saturating_sub(1) * length {
                // The state of a segment is advanced in the place of the next one's.
                let next = b.starts.add((p / length + 1) * size);
                let from = if p % length == 0 { b.starts.add(p / length * size) } else { next };
                let row = sequence.first + p;
                o.step(s, row, channels.clone(), b.decays, (from, next), false);
            }
            o.load(s, self.dy.add(o.outputs() + at), count, b.ds);
            for segment in (0..segments).rev() {
                let begin = segment * length;
                let rows = (sequence.rows - begin).min(length);
                let start = b.starts.add(segment * size).cast_const();
                std::ptr::copy_nonoverlapping(start, b.states, count * o.stride());
                for p in 0..rows {
                    let (from, to) = (b.states.add(p * size), b.states.add((p + 1) * size));
                    let row = sequence.first + begin + p;
                    o.step(s, row, channels.clone(), b.decays, (from, to), false);
                }
                for p in (0..rows).rev() {
                    self.descend(s, sequence.first + begin + p, channels.clone(), shared, p);
                }
            }
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
        channels: Range<usize>,
        shared: usize,
        p: usize,
    ) {
        let (o, scratch, to) = (&self.o, self.scratch, self.to);
        let size = LANES * o.stride();
        let first_head = channels.start / o.width;
        let shared = shared + row * o.groups * o.states;
        let (mut of_x, mut of_dt) = ([s.zero(); LANES], [s.zero(); LANES]);
        let mut last = usize::MAX;
        for (r, channel) in channels.clone().enumerate() {
            let head = channel / o.width;
            let group = o.group(head);
            // SAFETY: the caller's.
            unsafe {
                if head != last {
                    o.decay(s, row, head, scratch.decays);
                    last = head;
                }
                let dt = o.dt.get(row, head);
                let x = *o.x.at(row, head).add(channel - head * o.width);
                let dy = s.splat(*self.dy.add(row * o.channels() + channel));
                let (dt, step) = (s.splat(dt), s.splat(dt * x));
                let (b, c) = (o.b.at(row, group), o.c.at(row, group));
                let before = scratch.states.add(p * size + r * o.stride());
                let after = scratch.states.add((p + 1) * size + r * o.stride());
                let ds = scratch.ds.add(r * o.stride());
                let da = scratch.da.add((head - first_head) * o.stride());
                let (mut gives_x, mut gives_dt) = (s.zero(), s.zero());
                for n in (0..o.states).step_by(LANES) {
                    let m = o.states - n;
                    let decay = s.load(scratch.decays.add(n));
                    let v = s.fma(dy, s.load_first(c.add(n), m), s.load(ds.add(n)));
                    gives_x = s.fma(v, s.load_first(b.add(n), m), gives_x);
                    add_first(s, to.c.add(shared + n), s.mul(dy, s.load(after.add(n))), m);
                    add_first(s, to.b.add(shared + n), s.mul(step, v), m);
                    let v = s.mul(decay, v);
                    let e = s.mul(v, s.load(before.add(n)));
                    gives_dt = s.fma(e, o.a(s, head, n), gives_dt);
                    s.store(da.add(n), s.fma(dt, e, s.load(da.add(n))));
                    s.store(ds.add(n), v);
                }
                of_x[r] = gives_x;
                of_dt[r] = gives_dt;
            }
        }
        let (mut of_x_sums, mut of_dt_sums) = ([0.0; LANES], [0.0; LANES]);
        // SAFETY: there are as many lanes; the rest is the caller's.
        unsafe {
            s.store(of_x_sums.as_mut_ptr(), reduce_rows(s, &mut of_x));
            s.store(of_dt_sums.as_mut_ptr(), reduce_rows(s, &mut of_dt));
            for ((channel, of_x), of_dt) in channels.zip(of_x_sums).zip(of_dt_sums) {
                let head = channel / o.width;
                let x = *o.x.at(row, head).add(channel - head * o.width);
                *to.x.add(row * o.channels() + channel) = o.dt.get(row, head) * of_x;
                *to.dt.add(row * o.heads + head) += of_dt + x * of_x;
            }
        }
    }
}
