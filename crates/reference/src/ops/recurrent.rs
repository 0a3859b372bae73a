//! Recurrences over packed sequences: short convolution, selective scan, gated delta rule.
//! Backward passes keep every state of the forward pass.

use graph::{Fault, GatedDeltaAttrs, KeyHeads, Shape, SsmConvOperand, SsmConvStateOperand};

use super::{Floats, Ints, Operands, Out};

/// The rows of one sequence.
#[derive(Copy, Clone)]
struct Sequence {
    /// Its row in `seqs` and in the states.
    number: usize,
    first: usize,
    rows: usize,
}

/// Reads `seqs` and checks it.
fn sequences(operands: Operands<'_>, seqs: Ints<'_>, total: usize) -> Result<Vec<Sequence>, Fault> {
    let mut taken = vec![false; total];
    let mut all = Vec::new();
    for (number, entry) in seqs.data.chunks_exact(3).enumerate() {
        let place = |i: usize, what: &str| {
            usize::try_from(entry[i])
                .map_err(|_| operands.outside(format!("sequence {number}: {what} {}", entry[i])))
        };
        let (first, rows) = (place(0, "first row")?, place(1, "row count")?);
        if rows > 0 && first + rows > total {
            let end = first + rows;
            return Err(operands.outside(format!(
                "sequence {number}: rows {first}..{end} are outside of 0..{total}"
            )));
        }
        for (row, taken) in taken.iter_mut().enumerate().skip(first).take(rows) {
            if std::mem::replace(taken, true) {
                let message = format!("sequence {number}: row {row} is another sequence's");
                return Err(operands.outside(message));
            }
        }
        all.push(Sequence { number, first, rows });
    }
    Ok(all)
}

/// Where input `m` of a sequence is: its `W-1` earlier inputs, then its rows.
enum Place {
    /// Row of the states `[S, W-1, C]`.
    State(usize),
    /// Row of `x`.
    Row(usize),
}

fn input(s: Sequence, taps: usize, m: usize) -> Place {
    match m.checked_sub(taps - 1) {
        None => Place::State(s.number * (taps - 1) + m),
        Some(p) => Place::Row(s.first + p),
    }
}

pub(super) fn conv(operands: Operands<'_>, shape: Shape) -> Out {
    let (x, w, state) = (operands.floats(0)?, operands.floats(1)?, operands.floats(2)?);
    let (channels, taps) = (w.dim(0), w.dim(1));
    let mut out = operands.zeros(shape)?;
    for s in sequences(operands, operands.ints(3)?, x.dim(0))? {
        for p in 0..s.rows {
            for j in 0..taps {
                let z = match input(s, taps, p + j) {
                    Place::State(row) => state.row(row),
                    Place::Row(row) => x.row(row),
                };
                for c in 0..channels {
                    out[(s.first + p) * channels + c] += w.row(c)[j] * z[c];
                }
            }
        }
    }
    operands.made(shape, out)
}

pub(super) fn conv_back(operands: Operands<'_>, wrt: SsmConvOperand, shape: Shape) -> Out {
    let (x, w, state) = (operands.floats(0)?, operands.floats(1)?, operands.floats(2)?);
    let dy = operands.floats(4)?;
    let (channels, taps) = (w.dim(0), w.dim(1));
    let mut out = operands.zeros(shape)?;
    for s in sequences(operands, operands.ints(3)?, x.dim(0))? {
        for p in 0..s.rows {
            for j in 0..taps {
                let place = input(s, taps, p + j);
                for c in 0..channels {
                    let dy = dy.row(s.first + p)[c];
                    match (wrt, &place) {
                        (SsmConvOperand::X, Place::Row(row))
                        | (SsmConvOperand::State, Place::State(row)) => {
                            out[row * channels + c] += w.row(c)[j] * dy;
                        }
                        (SsmConvOperand::Weight, Place::Row(row)) => {
                            out[c * taps + j] += x.row(*row)[c] * dy;
                        }
                        (SsmConvOperand::Weight, Place::State(row)) => {
                            out[c * taps + j] += state.row(*row)[c] * dy;
                        }
                        (SsmConvOperand::X | SsmConvOperand::State, _) => {}
                    }
                }
            }
        }
    }
    operands.made(shape, out)
}

pub(super) fn conv_state(operands: Operands<'_>, shape: Shape) -> Out {
    let (x, state) = (operands.floats(0)?, operands.floats(1)?);
    let (taps, channels) = (state.dim(1) + 1, x.dim(1));
    let mut out = operands.zeros(shape)?;
    for s in sequences(operands, operands.ints(2)?, x.dim(0))? {
        for i in 0..taps - 1 {
            let z = match input(s, taps, s.rows + i) {
                Place::State(row) => state.row(row),
                Place::Row(row) => x.row(row),
            };
            let to = (s.number * (taps - 1) + i) * channels;
            out[to..to + channels].copy_from_slice(z);
        }
    }
    operands.made(shape, out)
}

pub(super) fn conv_state_back(
    operands: Operands<'_>,
    wrt: SsmConvStateOperand,
    shape: Shape,
) -> Out {
    let (x, state, dy) = (operands.floats(0)?, operands.floats(1)?, operands.floats(3)?);
    let (taps, channels) = (state.dim(1) + 1, x.dim(1));
    let mut out = operands.zeros(shape)?;
    for s in sequences(operands, operands.ints(2)?, x.dim(0))? {
        for i in 0..taps - 1 {
            let from = dy.row(s.number * (taps - 1) + i);
            match (wrt, input(s, taps, s.rows + i)) {
                (SsmConvStateOperand::X, Place::Row(row))
                | (SsmConvStateOperand::State, Place::State(row)) => {
                    out[row * channels..(row + 1) * channels].copy_from_slice(from);
                }
                _ => {}
            }
        }
    }
    operands.made(shape, out)
}

/// The operands of a selective scan.
struct Scan<'a> {
    x: Floats<'a>,
    dt: Floats<'a>,
    a: Floats<'a>,
    b: Floats<'a>,
    c: Floats<'a>,
    state: Floats<'a>,
    sequences: Vec<Sequence>,
}

impl<'a> Scan<'a> {
    fn new(operands: Operands<'a>) -> Result<Scan<'a>, Fault> {
        let x = operands.floats(0)?;
        Ok(Scan {
            x,
            dt: operands.floats(1)?,
            a: operands.floats(2)?,
            b: operands.floats(3)?,
            c: operands.floats(4)?,
            state: operands.floats(5)?,
            sequences: sequences(operands, operands.ints(6)?, x.dim(0))?,
        })
    }

    /// Heads, their width, the states' width, groups.
    fn sizes(&self) -> (usize, usize, usize, usize) {
        (self.x.dim(1), self.x.dim(2), self.b.dim(2), self.b.dim(1))
    }

    /// Where `a[h, n]` is.
    fn a_at(&self, h: usize, n: usize) -> usize {
        match self.a.dim(1) {
            1 => h,
            width => h * width + n,
        }
    }

    /// `exp(dt a)` of a row, a head and a place in the state.
    fn decay(&self, row: usize, h: usize, n: usize) -> f64 {
        (self.dt.row(row)[h] * self.a.data[self.a_at(h, n)]).exp()
    }

    /// `s[d, n]` of one head after a row.
    fn step(&self, row: usize, h: usize, before: &[f64]) -> Vec<f64> {
        let (heads, width, n, groups) = self.sizes();
        let (x, b) = (self.x.row(row * heads + h), self.b.row(row * groups + h / (heads / groups)));
        let dt = self.dt.row(row)[h];
        (0..width * n)
            .map(|i| self.decay(row, h, i % n) * before[i] + dt * x[i / n] * b[i % n])
            .collect()
    }

    /// The entry state of one head, `[d, n]`.
    fn entry(&self, s: Sequence, h: usize) -> &'a [f64] {
        let (heads, width, n, _) = self.sizes();
        let start = (s.number * heads + h) * width * n;
        &self.state.data[start..start + width * n]
    }
}

pub(super) fn scan(operands: Operands<'_>, shape: Shape) -> Out {
    let scan = Scan::new(operands)?;
    let (heads, width, n, groups) = scan.sizes();
    let mut out = operands.zeros(shape)?;
    let (y, exit) = out.split_at_mut(scan.x.data.len());
    for &s in &scan.sequences {
        for h in 0..heads {
            let mut state = scan.entry(s, h).to_vec();
            for row in s.first..s.first + s.rows {
                state = scan.step(row, h, &state);
                let c = scan.c.row(row * groups + h / (heads / groups));
                for (i, s) in state.iter().enumerate() {
                    y[(row * heads + h) * width + i / n] += s * c[i % n];
                }
            }
            let to = (s.number * heads + h) * width * n;
            exit[to..to + width * n].copy_from_slice(&state);
        }
    }
    operands.made(shape, out)
}

pub(super) fn scan_back(operands: Operands<'_>, parts: usize, shape: Shape) -> Out {
    let scan = Scan::new(operands)?;
    let (dy, d_exit) = (operands.floats(7)?.data, operands.floats(8)?.data);
    let (heads, width, n, groups) = scan.sizes();
    let group = heads / groups;
    let run = group.div_ceil(parts).max(1);
    let mut out = operands.zeros(shape)?;
    let (dx, rest) = out.split_at_mut(scan.x.data.len());
    let (ddt, rest) = rest.split_at_mut(scan.dt.data.len());
    let (da, rest) = rest.split_at_mut(scan.state.dim(0) * scan.a.data.len());
    let (db, rest) = rest.split_at_mut(parts * scan.b.data.len());
    let (dc, d_entry) = rest.split_at_mut(parts * scan.c.data.len());
    for &s in &scan.sequences {
        for h in 0..heads {
            let mut states = vec![scan.entry(s, h).to_vec()];
            for row in s.first..s.first + s.rows {
                let next = scan.step(row, h, &states[states.len() - 1]);
                states.push(next);
            }
            let at = (s.number * heads + h) * width * n;
            let mut ds = d_exit[at..at + width * n].to_vec();
            for p in (0..s.rows).rev() {
                let row = s.first + p;
                let in_group = row * groups + h / group;
                let (x, dt) = (scan.x.row(row * heads + h), scan.dt.row(row)[h]);
                let (b, c) = (scan.b.row(in_group), scan.c.row(in_group));
                let part = (h % group / run * scan.x.dim(0) * groups + in_group) * n;
                for i in 0..width * n {
                    let (d, n) = (i / n, i % n);
                    let dy = dy[(row * heads + h) * width + d];
                    ds[i] += dy * c[n];
                    dc[part + n] += dy * states[p + 1][i];
                    db[part + n] += ds[i] * dt * x[d];
                    dx[(row * heads + h) * width + d] += dt * ds[i] * b[n];
                    let decay = scan.decay(row, h, n);
                    let e = ds[i] * decay * states[p][i];
                    let a = scan.a_at(h, n);
                    da[s.number * scan.a.data.len() + a] += e * dt;
                    ddt[row * heads + h] += e * scan.a.data[a] + ds[i] * b[n] * x[d];
                    ds[i] *= decay;
                }
            }
            d_entry[at..at + width * n].copy_from_slice(&ds);
        }
    }
    operands.made(shape, out)
}

/// The operands of a gated delta rule.
struct Delta<'a> {
    attrs: &'a GatedDeltaAttrs,
    q: Floats<'a>,
    k: Floats<'a>,
    v: Floats<'a>,
    g: Floats<'a>,
    beta: Floats<'a>,
    state: Floats<'a>,
    sequences: Vec<Sequence>,
}

/// What happens to the state of one head at one row.
struct Step {
    /// `S'`, after the decay.
    decayed: Vec<f64>,
    /// `v - u`
    off: Vec<f64>,
    /// `S`, after the update.
    after: Vec<f64>,
}

impl<'a> Delta<'a> {
    fn new(operands: Operands<'a>, attrs: &'a GatedDeltaAttrs) -> Result<Delta<'a>, Fault> {
        let q = operands.floats(0)?;
        Ok(Delta {
            attrs,
            q,
            k: operands.floats(1)?,
            v: operands.floats(2)?,
            g: operands.floats(3)?,
            beta: operands.floats(4)?,
            state: operands.floats(5)?,
            sequences: sequences(operands, operands.ints(6)?, q.dim(0))?,
        })
    }

    /// Value heads, and the widths of keys and values.
    fn sizes(&self) -> (usize, usize, usize) {
        (self.v.dim(1), self.q.dim(2), self.v.dim(2))
    }

    /// The row of `q` and `k` that a value head reads.
    fn key_row(&self, row: usize, h: usize) -> usize {
        let (heads, key_heads) = (self.v.dim(1), self.q.dim(1));
        row * key_heads
            + match self.attrs.key_heads {
                KeyHeads::Blocks => h / (heads / key_heads),
                KeyHeads::Cycle => h % key_heads,
            }
    }

    /// Where the log decay of a row of the state is in `g`.
    fn g_at(&self, row: usize, h: usize, i: usize) -> usize {
        let at = row * self.v.dim(1) + h;
        if self.g.shape.rank() == 3 { at * self.q.dim(2) + i } else { at }
    }

    fn decay(&self, row: usize, h: usize, i: usize) -> f64 {
        self.g.data[self.g_at(row, h, i)].exp()
    }

    fn step(&self, row: usize, h: usize, before: &[f64]) -> Step {
        let (heads, _, width) = self.sizes();
        let (k, v) = (self.k.row(self.key_row(row, h)), self.v.row(row * heads + h));
        let beta = self.beta.row(row)[h];
        let decayed: Vec<f64> =
            before.iter().enumerate().map(|(at, s)| self.decay(row, h, at / width) * s).collect();
        let mut off = v.to_vec();
        for (at, s) in decayed.iter().enumerate() {
            off[at % width] -= s * k[at / width];
        }
        let after = decayed
            .iter()
            .enumerate()
            .map(|(at, s)| s + k[at / width] * beta * off[at % width])
            .collect();
        Step { decayed, off, after }
    }

    fn entry(&self, s: Sequence, h: usize) -> &'a [f64] {
        let (heads, keys, width) = self.sizes();
        let start = (s.number * heads + h) * keys * width;
        &self.state.data[start..start + keys * width]
    }
}

pub(super) fn delta(operands: Operands<'_>, attrs: &GatedDeltaAttrs, shape: Shape) -> Out {
    let delta = Delta::new(operands, attrs)?;
    let (heads, keys, width) = delta.sizes();
    let scale = f64::from(attrs.scale.get());
    let mut out = operands.zeros(shape)?;
    let (y, exit) = out.split_at_mut(delta.v.data.len());
    for &s in &delta.sequences {
        for h in 0..heads {
            let mut state = delta.entry(s, h).to_vec();
            for row in s.first..s.first + s.rows {
                state = delta.step(row, h, &state).after;
                let q = delta.q.row(delta.key_row(row, h));
                for (at, s) in state.iter().enumerate() {
                    y[(row * heads + h) * width + at % width] += scale * s * q[at / width];
                }
            }
            let to = (s.number * heads + h) * keys * width;
            exit[to..to + keys * width].copy_from_slice(&state);
        }
    }
    operands.made(shape, out)
}

pub(super) fn delta_back(operands: Operands<'_>, attrs: &GatedDeltaAttrs, shape: Shape) -> Out {
    let delta = Delta::new(operands, attrs)?;
    let (dy, d_exit) = (operands.floats(7)?.data, operands.floats(8)?.data);
    let (heads, keys, width) = delta.sizes();
    let scale = f64::from(attrs.scale.get());
    let mut out = operands.zeros(shape)?;
    let (dq, rest) = out.split_at_mut(delta.q.dim(0) * heads * keys);
    let (dk, rest) = rest.split_at_mut(delta.q.dim(0) * heads * keys);
    let (dv, rest) = rest.split_at_mut(delta.v.data.len());
    let (dg, rest) = rest.split_at_mut(delta.g.data.len());
    let (dbeta, d_entry) = rest.split_at_mut(delta.beta.data.len());
    for &s in &delta.sequences {
        for h in 0..heads {
            let mut before = vec![delta.entry(s, h).to_vec()];
            let mut steps = Vec::new();
            for row in s.first..s.first + s.rows {
                let step = delta.step(row, h, &before[before.len() - 1]);
                before.push(step.after.clone());
                steps.push(step);
            }
            let at = (s.number * heads + h) * keys * width;
            let mut ds = d_exit[at..at + keys * width].to_vec();
            for (p, step) in steps.iter().enumerate().rev() {
                let row = s.first + p;
                let key_row = delta.key_row(row, h);
                let (q, k) = (delta.q.row(key_row), delta.k.row(key_row));
                let beta = delta.beta.row(row)[h];
                let value_row = (row * heads + h) * width;
                let head_row = (row * heads + h) * keys;
                let mut dd = vec![0.0; width];
                for (at, ds) in ds.iter_mut().enumerate() {
                    let (i, j) = (at / width, at % width);
                    let dy = scale * dy[value_row + j];
                    dq[head_row + i] += step.after[at] * dy;
                    *ds += q[i] * dy;
                    dk[head_row + i] += *ds * beta * step.off[j];
                    dd[j] += *ds * k[i];
                }
                for (j, dd) in dd.iter().enumerate() {
                    dv[value_row + j] = beta * dd;
                    dbeta[row * heads + h] += dd * step.off[j];
                }
                for (at, ds) in ds.iter_mut().enumerate() {
                    let (i, j) = (at / width, at % width);
                    let du = -beta * dd[j];
                    dk[head_row + i] += step.decayed[at] * du;
                    *ds += k[i] * du;
                    dg[delta.g_at(row, h, i)] += *ds * step.decayed[at];
                    *ds *= delta.decay(row, h, i);
                }
            }
            d_entry[at..at + keys * width].copy_from_slice(&ds);
        }
    }
    operands.made(shape, out)
}
