//! The gradients of the gated delta rule. A tile has a sequence and a value head, and takes 16
//! columns of its state at a time through the tokens: sums over columns are chains in that order.

use std::ops::Range;

use graph::{GatedDeltaAttrs, Op};

use super::delta::Operands;
use super::{
    Heads, Sequence, States, Walk, add_first, reduce_rows, rows_of_none, sequence, sum4, zero,
};
use crate::job::{Job, Scratch};
use crate::simd::{LANES, Simd, Task};

/// Floats of scratch for 16 columns: the states of one segment, the gradient of the state, a row's
/// decays, and `v - u` and `d` of a segment's rows.
pub(super) fn buffers(rows: usize, keys: usize) -> [usize; 4] {
    let state = keys * LANES;
    let length = Walk::new(rows, state).longest(rows);
    [(length + 1) * state, state, keys, 2 * length * LANES]
}

/// Floats of the states at which segments start, of all columns in 16s.
pub(super) fn kept(rows: usize, keys: usize, heads: usize, width: usize) -> usize {
    let state = keys * LANES;
    Walk::new(rows, state).kept() * heads * width.div_ceil(LANES) * state
}

/// Sequences by value heads; one more for the rows of no sequence.
pub(super) fn tiles(job: &Job<'_>) -> usize {
    let Op::GatedDeltaRuleBack(attrs) = job.op else { return 0 };
    let o = Operands::new(job, attrs);
    o.sequences * o.heads + 1
}

pub(super) fn run_tile(
    job: &Job<'_>,
    attrs: &GatedDeltaAttrs,
    tile: usize,
    mut scratch: Scratch<'_>,
) {
    let o = Operands::new(job, attrs);
    let [states, ds, decays, updates] =
        buffers(o.rows, o.keys).map(|n| scratch.take(n).as_mut_ptr());
    let scratch = Buffers { states, ds, decays, updates };
    let (dy, d_exit) = (Heads::new(&job.input(7)), States::new(&job.input(8)));
    let (to, starts) = (Gradients::new(job, &o), job.kept());
    job.isa.run(Back { o, dy, d_exit, to, starts, tile, scratch });
}

#[derive(Copy, Clone)]
struct Buffers {
    states: *mut f32,
    ds: *mut f32,
    decays: *mut f32,
    updates: *mut f32,
}

/// Where the gradients of the operands are.
#[derive(Copy, Clone)]
struct Gradients {
    q: *mut f32,
    k: *mut f32,
    v: *mut f32,
    g: *mut f32,
    beta: *mut f32,
    state: *mut f32,
}

impl Gradients {
    fn new(job: &Job<'_>, o: &Operands<'_>) -> Gradients {
        let q = job.out::<f32>();
        let size = |i: usize| job.input(i).arg.shape.elements();
        let per_head = o.rows * o.heads * o.keys;
        let k = q.wrapping_add(per_head);
        let v = k.wrapping_add(per_head);
        let g = v.wrapping_add(o.outputs());
        let beta = g.wrapping_add(size(3));
        Gradients { q, k, v, g, beta, state: beta.wrapping_add(size(4)) }
    }
}

struct Back<'a> {
    o: Operands<'a>,
    dy: Heads,
    d_exit: States,
    to: Gradients,
    /// The states at which segments start.
    starts: *mut f32,
    tile: usize,
    scratch: Buffers,
}

impl Task for Back<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (o, to) = (&self.o, self.to);
        let gates = if o.rows_decay { o.keys } else { 1 };
        let tiles = o.sequences * o.heads;
        let (round, tile) = (self.tile / (tiles + 1), self.tile % (tiles + 1));
        if tile == tiles {
            if round > 0 {
                return;
            }
            let widths = [
                (to.q, o.heads * o.keys),
                (to.k, o.heads * o.keys),
                (to.v, o.heads * o.width),
                (to.g, o.heads * gates),
                (to.beta, o.heads),
            ];
            // SAFETY: gradients of rows of no sequence are this tile's.
            return rows_of_none(o.seqs, o.rows, |rows| unsafe {
                for (to, width) in widths {
                    zero(to.add(rows.start * width), rows.len() * width);
                }
            });
        }
        let (sequence, head) = (sequence(o.seqs, tile / o.heads), tile % o.heads);
        let walk = o.walk();
        if round < walk.rounds_before() {
            let tokens = walk.tokens_before(round, sequence);
            for column in (0..o.width).step_by(LANES).filter(|_| !tokens.is_empty()) {
                // SAFETY: the states of the sequence's segments of this head are this tile's;
                // scratch is as large as `buffers` says.
                unsafe { self.advance(s, sequence, (head, column), tokens.clone()) };
            }
            return;
        }
        let Some((segments, last)) = walk.segments(round, sequence) else { return };
        let rows = segments.start * walk.length..(segments.end * walk.length).min(sequence.rows);
        // SAFETY: the sequence's gradients of this head are this tile's; scratch is as large as
        // `buffers` says.
        unsafe {
            for row in rows.map(|p| sequence.first + p) {
                let at = row * o.heads + head;
                zero(to.q.add(at * o.keys), o.keys);
                zero(to.k.add(at * o.keys), o.keys);
                zero(to.g.add(at * gates), gates);
                *to.beta.add(at) = 0.0;
            }
            for column in (0..o.width).step_by(LANES) {
                let from = match last {
                    true => self.d_exit,
                    false => States::dense(to.state, o.heads, o.keys, o.width),
                };
                self.columns(s, sequence, (head, column), segments.clone(), from);
            }
        }
    }
}

impl Back<'_> {
    /// Where the state of 16 columns is kept with which a segment starts that is not the first.
    #[inline(always)]
    fn start(
        &self,
        sequence: Sequence,
        segment: usize,
        (head, column): (usize, usize),
    ) -> *mut f32 {
        let (o, blocks) = (&self.o, self.o.width.div_ceil(LANES));
        let slot = o.walk().slot(sequence, segment) * o.heads + head;
        self.starts.wrapping_add((slot * blocks + column / LANES) * o.keys * LANES)
    }

    /// Advances 16 columns of a head's state by some tokens, each in the place of the state with which
    /// the next segment starts.
    ///
    /// # Safety
    /// Those places must be the tile's, and scratch large enough.
    #[inline(always)]
    unsafe fn advance<S: Simd>(
        &self,
        s: S,
        sequence: Sequence,
        (head, column): (usize, usize),
        tokens: Range<usize>,
    ) {
        let (o, b, length) = (&self.o, self.scratch, self.o.walk().length);
        for p in tokens {
            let (row, segment) = (sequence.first + p, p / length);
            let next = self.start(sequence, segment + 1, (head, column));
            // SAFETY: the caller's; a round begins with a segment.
            unsafe {
                let from = match (p % length, segment) {
                    (0, 0) => {
                        o.load(s, o.state, (sequence.index, head, column), b.states);
                        b.states
                    }
                    (0, _) => self.start(sequence, segment, (head, column)),
                    _ => next,
                };
                o.decays(s, row, head, b.decays);
                o.step(s, (row, head, column), b.decays, from, next);
            }
        }
    }

    /// Takes the gradient of 16 columns of a head's state back through some segments, from what it is
    /// after the last of them.
    ///
    /// # Safety
    /// The gradients must be the tile's, the states with which segments start be there, and scratch
    /// large enough.
    #[inline(always)]
    unsafe fn columns<S: Simd>(
        &self,
        s: S,
        sequence: Sequence,
        (head, column): (usize, usize),
        segments: Range<usize>,
        from: States,
    ) {
        let (o, b) = (&self.o, self.scratch);
        let (length, size) = (o.walk().length, o.keys * LANES);
        // SAFETY: the caller's.
        unsafe {
            o.load(s, from, (sequence.index, head, column), b.ds);
            for segment in segments.rev() {
                let first = sequence.first + segment * length;
                let rows = (sequence.rows - segment * length).min(length);
                if segment == 0 {
                    o.load(s, o.state, (sequence.index, head, column), b.states);
                } else {
                    let start = self.start(sequence, segment, (head, column));
                    std::ptr::copy_nonoverlapping(start.cast_const(), b.states, size);
                }
                for p in 0..rows {
                    o.decays(s, first + p, head, b.decays);
                    let (from, to) = (b.states.add(p * size), b.states.add((p + 1) * size));
                    let (off, d) = o.step(s, (first + p, head, column), b.decays, from, to);
                    s.store(b.updates.add(2 * p * LANES), off);
                    s.store(b.updates.add((2 * p + 1) * LANES), d);
                }
                for p in (0..rows).rev() {
                    self.descend(s, (first + p, head, column), p);
                }
            }
            let at = o.state_at(sequence.index, head, column);
            o.save(s, b.ds, column, self.to.state.add(at));
        }
    }

    /// Takes the gradient of the state back over row `p` of the segment whose states are in
    /// scratch, and adds up what it gives.
    ///
    /// # Safety
    /// As [`Back::columns`].
    #[inline(always)]
    unsafe fn descend<S: Simd>(&self, s: S, (row, head, column): (usize, usize, usize), p: usize) {
        let (o, b, to) = (&self.o, self.scratch, self.to);
        let size = o.keys * LANES;
        let key_head = o.key_head(head);
        let n = o.width - column;
        // SAFETY: the caller's.
        unsafe {
            let (before, after) = (b.states.add(p * size), b.states.add((p + 1) * size));
            let off = s.load(b.updates.add(2 * p * LANES));
            let d = s.load(b.updates.add((2 * p + 1) * LANES));
            o.decays(s, row, head, b.decays);
            let (q, k) = (o.q.at(row, key_head), o.k.at(row, key_head));
            let to_q = to.q.add((row * o.heads + head) * o.keys);
            let to_k = to.k.add((row * o.heads + head) * o.keys);
            let value = (row * o.heads + head) * o.width + column;
            let dy = s.load_first(self.dy.at(row, head).add(column), n);
            let dy = s.mul(s.splat(o.scale), dy);

            // dq = S dy; dS += q dy^T; dd = dS^T k
            let mut dd = [s.zero(); 4];
            for i in (0..o.keys).step_by(LANES) {
                let mut products = [s.zero(); LANES];
                let m = (o.keys - i).min(LANES);
                for (r, product) in products.iter_mut().take(m).enumerate() {
                    let at = LANES * (i + r);
                    *product = s.mul(s.load(after.add(at)), dy);
                    let ds = s.fma(s.splat(*q.add(i + r)), dy, s.load(b.ds.add(at)));
                    s.store(b.ds.add(at), ds);
                    dd[r % 4] = s.fma(s.splat(*k.add(i + r)), ds, dd[r % 4]);
                }
                add_first(s, to_q.add(i), reduce_rows(s, &mut products), m);
            }
            let dd = sum4(s, dd);
            let beta = s.splat(o.beta.get(row, head));
            s.store_first(to.v.add(value), s.mul(beta, dd), n);
            *to.beta.add(row * o.heads + head) += s.reduce_sum(s.mul(dd, off));
            let du = s.neg(s.mul(beta, dd));

            // dk = dS d + S' du; dS += k du^T; dg = dS * S'; dS = decay * dS
            let mut all = s.zero();
            for i in (0..o.keys).step_by(LANES) {
                let (mut of_k, mut of_g) = ([s.zero(); LANES], [s.zero(); LANES]);
                let m = (o.keys - i).min(LANES);
                for r in 0..m {
                    let at = LANES * (i + r);
                    let decay = s.splat(*b.decays.add(i + r));
                    let decayed = s.mul(decay, s.load(before.add(at)));
                    let ds = s.load(b.ds.add(at));
                    of_k[r] = s.fma(ds, d, s.mul(decayed, du));
                    let ds = s.fma(s.splat(*k.add(i + r)), du, ds);
                    of_g[r] = s.mul(ds, decayed);
                    all = s.add(all, of_g[r]);
                    s.store(b.ds.add(at), s.mul(decay, ds));
                }
                add_first(s, to_k.add(i), reduce_rows(s, &mut of_k), m);
                if o.rows_decay {
                    let to_g = to.g.add((row * o.heads + head) * o.keys + i);
                    add_first(s, to_g, reduce_rows(s, &mut of_g), m);
                }
            }
            if !o.rows_decay {
                *to.g.add(row * o.heads + head) += s.reduce_sum(all);
            }
        }
    }
}
