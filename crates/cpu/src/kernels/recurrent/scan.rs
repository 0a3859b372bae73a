//! Selective scan, forward. Channels (a head's elements, all heads in a row) do not mix; a
//! channel's state is a row, whose product with `c` is 16 lanes and one tree.

use graph::{Call, DType, Op};

use super::super::{Support, Tiles, dense, dense_last, memory, needs};
use super::{Heads, States, TILE_WORK, Walk, reduce_rows, rows_of_none, sequence, zero};
use crate::job::{Job, Scratch, padded};
use crate::simd::{LANES, Simd, Task};

/// Heads, states and cotangents with dense elements, steps of any strides; dense decays and
/// sequences.
pub(super) fn supports(call: &Call<'_>) -> Support {
    let x = dense_last(call, 0)?;
    memory(call, 1, DType::F32)?;
    dense(call, 2, DType::F32)?;
    let states = dense_last(call, 3)?.shape.dim(2);
    dense_last(call, 4)?;
    dense_last(call, 5)?;
    dense(call, 6, DType::I32)?;
    if matches!(call.op, Op::SsmScanBack { .. }) {
        dense_last(call, 7)?;
        dense_last(call, 8)?;
        let (rows, channels) = (x.shape.dim(0), x.shape.dim(1) * x.shape.dim(2));
        let mut needs = needs(&super::scan_back::buffers(rows, states));
        needs.kept = super::scan_back::kept(rows, states, channels) * 4;
        return Ok(needs);
    }
    Ok(needs(&buffers(states)))
}

/// How an op goes through its rows.
pub(super) fn walk(job: &Job<'_>) -> Walk {
    Operands::new(job).walk()
}

/// Floats of scratch: the states of 16 channels.
fn buffers(states: usize) -> [usize; 1] {
    [LANES * padded(states)]
}

/// Up to 16 channels that a tile takes through the tokens at once.
pub(super) struct Channels {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) heads: [usize; LANES],
    groups: [usize; LANES],
    /// Their places in their heads.
    places: [usize; LANES],
}

/// `dt` and `x` of channels at one row.
pub(super) struct Gates {
    pub(super) dt: [f32; LANES],
    pub(super) x: [f32; LANES],
}

impl Channels {
    pub(super) fn new(o: &Operands<'_>, first: usize, end: usize) -> Channels {
        let count = end.saturating_sub(first).min(LANES);
        let (mut heads, mut groups, mut places) = ([0; LANES], [0; LANES], [0; LANES]);
        for r in 0..count {
            heads[r] = (first + r) / o.width;
            groups[r] = heads[r] / (o.heads / o.groups).max(1);
            places[r] = (first + r) % o.width;
        }
        Channels { first, count, heads, groups, places }
    }

    /// Channel `r` of a row of a tensor of heads.
    #[inline(always)]
    pub(super) fn at(&self, x: Heads, row: usize, r: usize) -> *const f32 {
        x.at(row, self.heads[r]).wrapping_add(self.places[r])
    }

    /// The group that the channels of one group are of.
    pub(super) fn group(&self) -> usize {
        self.groups[0]
    }

    /// # Safety
    /// `row` must be of the operands.
    #[inline(always)]
    pub(super) unsafe fn gates(&self, o: &Operands<'_>, row: usize) -> Gates {
        let (mut dt, mut x) = ([0.0; LANES], [0.0; LANES]);
        for r in 0..self.count {
            // SAFETY: the caller's; the channels are of the operands.
            unsafe {
                dt[r] = o.dt.get(row, self.heads[r]);
                x[r] = *self.at(o.x, row, r);
            }
        }
        Gates { dt, x }
    }
}

/// An op's operands.
#[derive(Copy, Clone)]
pub(super) struct Operands<'a> {
    pub(super) x: Heads,
    pub(super) dt: Heads,
    pub(super) a: *const f32,
    pub(super) b: Heads,
    pub(super) c: Heads,
    pub(super) state: States,
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
            state: States::new(&state),
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

    pub(super) fn walk(&self) -> Walk {
        Walk::new(self.rows, LANES * self.stride())
    }

    /// Channels of all heads.
    pub(super) fn channels(&self) -> usize {
        self.heads * self.width
    }

    /// Elements of all outputs, after which the exit states begin.
    pub(super) fn outputs(&self) -> usize {
        self.rows * self.channels()
    }

    /// Floats between the states of two channels in scratch.
    #[inline(always)]
    pub(super) fn stride(&self) -> usize {
        padded(self.states)
    }

    /// Elements before the state of a channel in what is computed.
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

    /// Advances the states of up to 16 channels by a row: reads `from`, writes `to`, which may
    /// be the same. With `y`, gives the outputs, a lane per channel; else zeros.
    ///
    /// # Safety
    /// `from` and `to` must be valid for the states of the channels; the row must be of the
    /// operands.
    #[inline(always)]
    pub(super) unsafe fn step<S: Simd>(
        &self,
        s: S,
        row: usize,
        channels: &Channels,
        (from, to): (*const f32, *mut f32),
        y: bool,
    ) -> S::F32 {
        let mut products = [s.zero(); LANES];
        // SAFETY: the caller's.
        unsafe {
            let gates = channels.gates(self, row);
            for n in (0..self.states).step_by(LANES) {
                let m = self.states - n;
                let mut last = usize::MAX;
                let (mut decay, mut b, mut c) = (s.zero(), s.zero(), s.zero());
                for (r, product) in products.iter_mut().take(channels.count).enumerate() {
                    let head = channels.heads[r];
                    if head != last {
                        decay = s.exp(s.mul(s.splat(gates.dt[r]), self.a(s, head, n)));
                        b = s.load_first(self.b.at(row, channels.groups[r]).add(n), m);
                        c = s.load_first(self.c.at(row, channels.groups[r]).add(n), m);
                        last = head;
                    }
                    let at = r * self.stride() + n;
                    let decayed = s.mul(decay, s.load(from.add(at)));
                    let state = s.fma(s.splat(gates.dt[r] * gates.x[r]), b, decayed);
                    s.store(to.add(at), state);
                    if y {
                        *product = s.fma(state, c, *product);
                    }
                }
            }
        }
        if y { reduce_rows(s, &mut products) } else { s.zero() }
    }

    /// Reads the states of channels.
    ///
    /// # Safety
    /// `states` must be of the operands' shape, the sequence and channels be of them, and `to`
    /// valid for as many states of [`Operands::stride`].
    #[inline(always)]
    pub(super) unsafe fn load<S: Simd>(
        &self,
        s: S,
        states: States,
        sequence: usize,
        channels: &Channels,
        to: *mut f32,
    ) {
        for r in 0..channels.count {
            let from = states.at(sequence, channels.heads[r], channels.places[r]);
            for n in (0..self.states).step_by(LANES) {
                // SAFETY: the caller's.
                unsafe {
                    let v = s.load_first(from.add(n), self.states - n);
                    s.store(to.add(r * self.stride() + n), v);
                }
            }
        }
    }

    /// Writes them in rows without gaps.
    ///
    /// # Safety
    /// `from` must be valid for the channels' states of [`Operands::stride`], `to` for as many
    /// without gaps.
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
    let [state] = buffers(o.states).map(|n| scratch.take(n));
    job.isa.run(Forward { job, o, tile, state });
}

struct Forward<'a> {
    job: &'a Job<'a>,
    o: Operands<'a>,
    tile: usize,
    state: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (o, y) = (self.o, self.job.out::<f32>());
        let (blocks, all) = (o.blocks(), o.channels());
        let tiles = o.sequences * blocks.count;
        let (round, tile) = (self.tile / (tiles + 1), self.tile % (tiles + 1));
        if tile == tiles {
            if round > 0 {
                return;
            }
            // SAFETY: outputs of rows of no sequence are this tile's.
            return rows_of_none(o.seqs, o.rows, |rows| unsafe {
                zero(y.add(rows.start * all), rows.len() * all);
            });
        }
        let state = self.state.as_mut_ptr();
        let sequence = sequence(o.seqs, tile / blocks.count);
        let tokens = o.walk().tokens(round, sequence);
        if round > 0 && tokens.is_empty() {
            return;
        }
        let exits = y.wrapping_add(o.outputs());
        // Later rounds go on from the exit state so far.
        let entry = match round {
            0 => o.state,
            _ => States::dense(exits, o.heads, o.width, o.states),
        };
        for first in blocks.range(tile % blocks.count).map(|block| block * LANES) {
            let channels = Channels::new(&o, first, all);
            let count = channels.count;
            let at = o.state_at(sequence.index, first);
            // SAFETY: these channels of the sequence's outputs and exit state are this tile's.
            // Scratch is as large as `buffers` says; the sequence's rows have been checked.
            unsafe {
                o.load(s, entry, sequence.index, &channels, state);
                for row in tokens.clone().map(|token| sequence.first + token) {
                    let out = o.step(s, row, &channels, (state, state), true);
                    s.store_first(y.add(row * all + first), out, count);
                }
                o.save(s, state, count, exits.add(at));
            }
        }
    }
}
