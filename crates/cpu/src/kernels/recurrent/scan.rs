//! Selective scan, forward. Channels (a head's elements, all heads in a row) do not mix; a
//! channel's state is a row, whose product with `c` is 16 lanes and one tree.

use graph::{Call, DType, Op};

use super::super::{Support, Tiles, dense, dense_last, memory, needs};
use super::{Heads, TILE_WORK, reduce_rows, rows_of_none, sequence, zero};
use crate::job::{Job, Scratch, padded};
use crate::simd::{LANES, Simd, Task};

/// Heads with dense elements, steps of any strides; dense decays, states, sequences and
/// cotangents.
pub(super) fn supports(call: &Call<'_>) -> Support {
    let x = dense_last(call, 0)?;
    memory(call, 1, DType::F32)?;
    dense(call, 2, DType::F32)?;
    let states = dense_last(call, 3)?.shape.dim(2);
    dense_last(call, 4)?;
    dense(call, 5, DType::F32)?;
    dense(call, 6, DType::I32)?;
    if matches!(call.op, Op::SsmScanBack { .. }) {
        dense(call, 7, DType::F32)?;
        return Ok(needs(&super::scan_back::buffers(x.shape.dim(0), states)));
    }
    Ok(needs(&buffers(states)))
}

/// Floats of scratch: the states of 16 channels, and a head's decays.
fn buffers(states: usize) -> [usize; 2] {
    [LANES * padded(states), padded(states)]
}

/// An op's operands.
#[derive(Copy, Clone)]
pub(super) struct Operands<'a> {
    pub(super) x: Heads,
    pub(super) dt: Heads,
    pub(super) a: *const f32,
    pub(super) b: Heads,
    pub(super) c: Heads,
    pub(super) state: *const f32,
    pub(super) seqs: &'a [i32],
    pub(super) rows: usize,
    pub(super) sequences: usize,
    pub(super) heads: usize,
    /// Elements of a head.
    pub(super) width: usize,
    pub(super) groups: usize,
    /// Elements of a channel's state.
    pub(super) states: usize,
    /// Decays of a head: 1 or as many as states.
    pub(super) decays: usize,
}

impl<'a> Operands<'a> {
    pub(super) fn new(job: &Job<'a>) -> Operands<'a> {
        let [x, dt, a, b, c, state, seqs] = [0, 1, 2, 3, 4, 5, 6].map(|i| job.input(i));
        let [rows, heads, width] = [0, 1, 2].map(|i| x.arg.shape.dim(i));
        Operands {
            x: Heads::new(&x),
            dt: Heads::new(&dt),
            a: a.ptr(),
            b: Heads::new(&b),
            c: Heads::new(&c),
            state: state.ptr(),
            seqs: seqs.ints(),
            rows,
            sequences: seqs.arg.shape.dim(0),
            heads,
            width,
            groups: b.arg.shape.dim(1),
            states: b.arg.shape.dim(2),
            decays: a.arg.shape.dim(1),
        }
    }

    pub(super) fn channels(&self) -> usize {
        self.heads * self.width
    }

    /// Elements of all outputs, after which the exit states begin.
    pub(super) fn outputs(&self) -> usize {
        self.rows * self.channels()
    }

    /// The group of a head.
    #[inline(always)]
    pub(super) fn group(&self, head: usize) -> usize {
        head / (self.heads / self.groups).max(1)
    }

    /// Floats between the states of two channels in scratch.
    #[inline(always)]
    pub(super) fn stride(&self) -> usize {
        padded(self.states)
    }

    /// Elements before the state of a channel.
    #[inline(always)]
    pub(super) fn state_at(&self, sequence: usize, channel: usize) -> usize {
        (sequence * self.channels() + channel) * self.states
    }

    /// Decay exponents of a head from state `n` on.
    ///
    /// # Safety
    /// `head` and `n` must be of the operands.
    #[inline(always)]
    pub(super) unsafe fn a<S: Simd>(&self, s: S, head: usize, n: usize) -> S::F32 {
        // SAFETY: the caller's.
        unsafe {
            match self.decays {
                1 => s.splat(*self.a.add(head)),
                decays => s.load_first(self.a.add(head * decays + n), decays - n),
            }
        }
    }

    /// Writes the decays `exp(dt a)` of a row and head to `to`.
    ///
    /// # Safety
    /// `to` must be valid for [`Operands::stride`] writes, `row` and `head` be of the operands.
    #[inline(always)]
    pub(super) unsafe fn decay<S: Simd>(&self, s: S, row: usize, head: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            let dt = s.splat(self.dt.get(row, head));
            if self.decays == 1 {
                let decay = s.exp(s.mul(dt, self.a(s, head, 0)));
                for n in (0..self.states).step_by(LANES) {
                    s.store(to.add(n), decay);
                }
            } else {
                for n in (0..self.states).step_by(LANES) {
                    s.store(to.add(n), s.exp(s.mul(dt, self.a(s, head, n))));
                }
            }
        }
    }

    /// Advances the states of up to 16 channels by a row: reads `from`, writes `to`, which may
    /// be the same. With `y`, gives the outputs, a lane per channel; else zeros.
    ///
    /// # Safety
    /// `from` and `to` must be valid for the states of the channels, `decays` for one head's;
    /// the row and channels must be of the operands.
    #[inline(always)]
    pub(super) unsafe fn step<S: Simd>(
        &self,
        s: S,
        row: usize,
        channels: std::ops::Range<usize>,
        decays: *mut f32,
        (from, to): (*const f32, *mut f32),
        y: bool,
    ) -> S::F32 {
        let mut products = [s.zero(); LANES];
        let mut last = usize::MAX;
        for (r, channel) in channels.enumerate() {
            let head = channel / self.width;
            let group = self.group(head);
            // SAFETY: the caller's.
            unsafe {
                if head != last {
                    self.decay(s, row, head, decays);
                    last = head;
                }
                let x = *self.x.at(row, head).add(channel - head * self.width);
                let x = s.splat(self.dt.get(row, head) * x);
                let (b, c) = (self.b.at(row, group), self.c.at(row, group));
                let mut sum = s.zero();
                for n in (0..self.states).step_by(LANES) {
                    let at = r * self.stride() + n;
                    let decayed = s.mul(s.load(decays.add(n)), s.load(from.add(at)));
                    let state = s.fma(x, s.load_first(b.add(n), self.states - n), decayed);
                    s.store(to.add(at), state);
                    if y {
                        sum = s.fma(state, s.load_first(c.add(n), self.states - n), sum);
                    }
                }
                if let Some(product) = products.get_mut(r) {
                    *product = sum;
                }
            }
        }
        if y { reduce_rows(s, &mut products) } else { s.zero() }
    }

    /// Copies the states of channels from rows without gaps.
    ///
    /// # Safety
    /// `from` must be valid for the channels' states, `to` for as many of
    /// [`Operands::stride`].
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &self,
        s: S,
        from: *const f32,
        channels: usize,
        to: *mut f32,
    ) {
        for r in 0..channels {
            for n in (0..self.states).step_by(LANES) {
                // SAFETY: the caller's.
                unsafe {
                    let v = s.load_first(from.add(r * self.states + n), self.states - n);
                    s.store(to.add(r * self.stride() + n), v);
                }
            }
        }
    }

    /// The inverse of [`Operands::load`].
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub(super) unsafe fn save<S: Simd>(
        &self,
        s: S,
        from: *const f32,
        channels: usize,
        to: *mut f32,
    ) {
        for r in 0..channels {
            for n in (0..self.states).step_by(LANES) {
                // SAFETY: the caller's.
                unsafe {
                    let v = s.load(from.add(r * self.stride() + n));
                    s.store_first(to.add(r * self.states + n), v, self.states - n);
                }
            }
        }
    }

    /// Blocks of 16 channels, some per tile.
    fn blocks(&self) -> Tiles {
        let rows = self.rows.div_ceil(self.sequences.max(1));
        let work = rows.saturating_mul(self.states).saturating_mul(LANES);
        Tiles::new(self.channels().div_ceil(LANES), TILE_WORK / work.max(1))
    }
}

/// Sequences by blocks of channels; one more for the rows of no sequence.
pub(super) fn tiles(job: &Job<'_>) -> usize {
    let o = Operands::new(job);
    o.sequences * o.blocks().count + 1
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, mut scratch: Scratch<'_>) {
    let o = Operands::new(job);
    let [state, decays] = buffers(o.states).map(|n| scratch.take(n));
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
        let (blocks, all) = (o.blocks(), o.channels());
        if self.tile == o.sequences * blocks.count {
            // SAFETY: outputs of rows of no sequence are this tile's.
            return rows_of_none(o.seqs, o.rows, |rows| unsafe {
                zero(y.add(rows.start * all), rows.len() * all);
            });
        }
        let (state, decays) = (self.state.as_mut_ptr(), self.decays.as_mut_ptr());
        let sequence = sequence(o.seqs, self.tile / blocks.count);
        for first in blocks.range(self.tile % blocks.count).map(|block| block * LANES) {
            let channels = first..(first + LANES).min(all);
            let at = o.state_at(sequence.index, first);
            // SAFETY: these channels of the sequence's outputs and exit state are this tile's.
            // Scratch is as large as `buffers` says; the sequence's rows have been checked.
            unsafe {
                o.load(s, o.state.add(at), channels.len(), state);
                for row in sequence.range() {
                    let out = o.step(s, row, channels.clone(), decays, (state, state), true);
                    s.store_first(y.add(row * all + first), out, channels.len());
                }
                o.save(s, state, channels.len(), y.add(o.outputs() + at));
            }
        }
    }
}
