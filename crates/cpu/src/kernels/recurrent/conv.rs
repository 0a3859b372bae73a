//! Short causal convolution of packed sequences, its exit state, and their gradients.

use std::ops::Range;

use graph::{Call, DType, Op, SsmConvOperand, SsmConvStateOperand};

use super::super::{Support, Tiles, dense, needs, rows};
use super::{Sequence, sequences};
use crate::job::{Input, Job, Rows, Scratch};
use crate::simd::{LANES, Simd, Task};

/// Channels of a tile.
const CHANNELS: usize = 256;

/// Rows of a tile.
const ROWS: usize = 64;

/// Where the operands of an op are.
struct Places {
    w: Option<usize>,
    state: usize,
    seqs: usize,
    dy: Option<usize>,
}

fn places(op: &Op) -> Places {
    match op {
        Op::SsmConvState => Places { w: None, state: 1, seqs: 2, dy: None },
        Op::SsmConvStateBack { .. } => Places { w: None, state: 1, seqs: 2, dy: Some(3) },
        Op::SsmConvBack { .. } => Places { w: Some(1), state: 2, seqs: 3, dy: Some(4) },
        _ => Places { w: Some(1), state: 2, seqs: 3, dy: None },
    }
}

/// Rows of `x`, states and cotangents; dense taps and sequences.
pub(super) fn supports(call: &Call<'_>) -> Support {
    let places = places(call.op);
    rows(call, 0)?;
    rows(call, places.state)?;
    dense(call, places.seqs, DType::I32)?;
    if let Some(dy) = places.dy {
        rows(call, dy)?;
    }
    match places.w {
        Some(w) => {
            let taps = dense(call, w, DType::F32)?.shape.dim(1);
            Ok(needs(&[taps * CHANNELS]))
        }
        None => Ok(needs(&[])),
    }
}

/// Tiles of rows and of channels; those of the taps' gradient take all rows.
fn grid(job: &Job<'_>) -> (Tiles, Tiles) {
    let channels = job.input(0).arg.shape.dim(1);
    match job.op {
        Op::SsmConvBack { wrt: SsmConvOperand::Weight } => {
            (Tiles::new(1, 1), Tiles::new(channels, LANES))
        }
        _ => (Tiles::new(job.out.shape.rows(), ROWS), Tiles::new(channels, CHANNELS)),
    }
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    let (rows, channels) = grid(job);
    rows.count * channels.count
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, mut scratch: Scratch<'_>) {
    let (rows, channels) = grid(job);
    let (rows, channels) =
        (rows.range(tile / channels.count), channels.range(tile % channels.count));
    let places = places(job.op);
    let x = job.input(0);
    let taps = job.input(places.state).arg.shape.dim(1) + 1;
    let o = Operands {
        x: x.rows(),
        state: job.input(places.state).rows(),
        dy: places.dy.map_or(x.rows(), |i| job.input(i).rows()),
        seqs: job.input(places.seqs).ints(),
        taps,
    };
    match job.op {
        Op::SsmConvBack { wrt: SsmConvOperand::Weight } => {
            job.isa.run(BackWeight { job, o, channels });
        }
        Op::SsmConv | Op::SsmConvBack { .. } => {
            let weights = transposed(&job.input(1), taps, &channels, &mut scratch);
            job.isa.run(Convolve { job, o, rows, channels, weights });
        }
        _ => copy(job, &o, rows, channels),
    }
}

struct Operands<'a> {
    x: Rows<f32>,
    state: Rows<f32>,
    /// `x` where there is none.
    dy: Rows<f32>,
    seqs: &'a [i32],
    taps: usize,
}

impl Operands<'_> {
    /// Input `m` of a sequence: its state, then its rows.
    #[inline(always)]
    fn input(&self, s: Sequence, m: usize) -> *const f32 {
        match m.checked_sub(self.taps - 1) {
            None => self.state.row(s.index * (self.taps - 1) + m),
            Some(p) => self.x.row(s.first + p),
        }
    }

    /// The sequence and input that a row of the states is.
    fn of_state(&self, row: usize) -> (Sequence, usize) {
        let index = row / (self.taps - 1).max(1);
        (super::sequence(self.seqs, index), row - index * (self.taps - 1))
    }

    /// The sequence and position that a row of `x` is, if it is of one.
    fn of_row(&self, row: usize) -> Option<(Sequence, usize)> {
        let mut all = sequences(self.seqs);
        all.find(|s| s.range().contains(&row)).map(|s| (s, row - s.first))
    }
}

/// Taps `[W, channels]` of some channels, [`CHANNELS`] apart.
fn transposed<'s>(
    w: &Input<'_>,
    taps: usize,
    channels: &Range<usize>,
    scratch: &mut Scratch<'s>,
) -> &'s [f32] {
    // SAFETY: `supports` asked for dense f32 taps.
    let w: &[f32] = unsafe { w.slice() };
    let to = scratch.take(taps * CHANNELS);
    for (i, of_channel) in
        w.chunks_exact(taps).skip(channels.start).take(channels.len()).enumerate()
    {
        for (j, &tap) in of_channel.iter().enumerate() {
            to[j * CHANNELS + i] = tap;
        }
    }
    to
}

/// `y[p] = sum_j w[j] z[p + j]`, or of the gradient `dz[m] = sum_j w[j] dy[m - j]`; taps
/// ascending.
struct Convolve<'a> {
    job: &'a Job<'a>,
    o: Operands<'a>,
    /// Rows of the result.
    rows: Range<usize>,
    channels: Range<usize>,
    weights: &'a [f32],
}

impl Task for Convolve<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let o = &self.o;
        let taps = o.taps;
        for row in self.rows {
            let to = self.job.out_row::<f32>(row);
            let place = match self.job.op {
                Op::SsmConvBack { wrt: SsmConvOperand::State } => Some(o.of_state(row)),
                _ => o.of_row(row),
            };
            let Some((sequence, p)) = place else {
                // SAFETY: the row's channels are this tile's.
                unsafe { super::zero(to.add(self.channels.start), self.channels.len()) };
                continue;
            };
            // Where tap `j` reads, and which taps read anything.
            let forward = matches!(self.job.op, Op::SsmConv);
            let m = match self.job.op {
                Op::SsmConvBack { wrt: SsmConvOperand::X } => p + taps - 1,
                _ => p,
            };
            let (from, end) = match forward {
                true => (0, taps),
                false => ((m + 1).saturating_sub(sequence.rows), taps.min(m + 1)),
            };
            let mut c = self.channels.start;
            while c < self.channels.end {
                let n = self.channels.end - c;
                let w = self.weights.as_ptr().wrapping_add(c - self.channels.start);
                let mut sum = s.zero();
                // SAFETY: channels from `c` on, `n` of them, are this tile's; rows of the
                // operands have them, and input `p + j` and row `m - j` are the sequence's.
                unsafe {
                    for j in from..end {
                        let z = match forward {
                            true => o.input(sequence, m + j),
                            false => o.dy.row(sequence.first + m - j),
                        };
                        let w = s.load_first(w.add(j * CHANNELS), n);
                        sum = s.fma(w, s.load_first(z.add(c), n), sum);
                    }
                    s.store_first(to.add(c), sum, n);
                }
                c += LANES;
            }
        }
    }
}

/// `dw[c, j] = sum of dy[p, c] z[p + j, c]`, sequences and rows in order.
struct BackWeight<'a> {
    job: &'a Job<'a>,
    o: Operands<'a>,
    /// No more than there are lanes.
    channels: Range<usize>,
}

impl Task for BackWeight<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let o = &self.o;
        let (c, n) = (self.channels.start, self.channels.len());
        for j in 0..o.taps {
            let mut sum = s.zero();
            for sequence in sequences(o.seqs) {
                for p in 0..sequence.rows {
                    // SAFETY: rows of the operands have these channels; input `p + j` is the
                    // sequence's.
                    unsafe {
                        let dy = s.load_first(o.dy.row(sequence.first + p).add(c), n);
                        let z = s.load_first(o.input(sequence, p + j).add(c), n);
                        sum = s.fma(dy, z, sum);
                    }
                }
            }
            let mut lanes = [0.0; LANES];
            // SAFETY: there are as many lanes. Rows of the result are channels.
            unsafe {
                s.store(lanes.as_mut_ptr(), sum);
                for (i, lane) in lanes.iter().take(n).enumerate() {
                    *self.job.out_row::<f32>(c + i).add(j) = *lane;
                }
            }
        }
    }
}

/// The exit state and its gradients: every row of the result is a copy of one, or zero.
fn copy(job: &Job<'_>, o: &Operands<'_>, rows: Range<usize>, channels: Range<usize>) {
    let kept = o.taps - 1;
    for row in rows {
        let from = match job.op {
            Op::SsmConvStateBack { wrt: SsmConvStateOperand::X } => {
                // Input `W-1 + p` is row `W-1 + p - rows` of the exit state.
                o.of_row(row).and_then(|(s, p)| Some((s, (kept + p).checked_sub(s.rows)?)))
            }
            Op::SsmConvStateBack { wrt: SsmConvStateOperand::State } => {
                let (s, m) = o.of_state(row);
                m.checked_sub(s.rows).map(|i| (s, i))
            }
            _ => {
                let (s, i) = o.of_state(row);
                Some((s, s.rows + i))
            }
        };
        let from = from.map(|(s, i)| match job.op {
            Op::SsmConvState => o.input(s, i),
            _ => o.dy.row(s.index * kept + i),
        });
        let to = job.out_row::<f32>(row).wrapping_add(channels.start);
        // SAFETY: these channels of the row are this tile's; the row that is copied has them.
        unsafe {
            match from {
                Some(from) => {
                    let from = from.wrapping_add(channels.start);
                    std::ptr::copy_nonoverlapping(from, to, channels.len());
                }
                None => super::zero(to, channels.len()),
            }
        }
    }
}
