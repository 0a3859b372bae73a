//! Causal attention over packed sequences and their cached prefixes.

use graph::{AttentionAttrs, AttentionOperand, Fault, Shape, alibi_slope};

use super::loss::log_sum_exp;
use super::{Floats, Ints, Operands, Out};

/// The rows of one sequence.
struct Sequence {
    /// Its row in `seqs` and `table`.
    number: usize,
    /// Its first row in `q`, `k` and `v`.
    first: usize,
    /// How many rows it has.
    rows: usize,
    /// How many positions are cached before them.
    cached: usize,
}

/// A value in pages `[P, page, H, D]`.
#[derive(Copy, Clone)]
struct Pages<'a> {
    pages: Floats<'a>,
    table: Ints<'a>,
}

/// Keys or values by sequence, position and head: first the pages', then the rows' own.
#[derive(Copy, Clone)]
struct Past<'a> {
    own: Floats<'a>,
    cached: Option<Pages<'a>>,
}

impl<'a> Past<'a> {
    /// The number of a row of the pages or, `false`, of the rows' own.
    fn place(&self, sequence: &Sequence, position: usize, head: usize) -> (bool, usize) {
        let heads = self.own.dim(1);
        match self.cached {
            Some(Pages { pages, table }) if position < sequence.cached => {
                let len = pages.dim(1);
                let page = table.row(sequence.number)[position / len] as usize;
                (true, (page * len + position % len) * heads + head)
            }
            _ => (false, (sequence.first + position - sequence.cached) * heads + head),
        }
    }

    fn at(&self, sequence: &Sequence, position: usize, head: usize) -> &'a [f64] {
        match (self.place(sequence, position, head), self.cached) {
            ((true, row), Some(cached)) => cached.pages.row(row),
            ((_, row), _) => self.own.row(row),
        }
    }
}

/// Reads `seqs` and checks it and the page table.
fn sequences(
    operands: Operands<'_>,
    seqs: Ints<'_>,
    total: usize,
    pages: &[Pages<'_>],
) -> Result<Vec<Sequence>, Fault> {
    let mut taken = vec![false; total];
    let mut all = Vec::new();
    for (number, entry) in seqs.data.chunks_exact(3).enumerate() {
        let place = |i: usize, what: &str| {
            usize::try_from(entry[i])
                .map_err(|_| operands.outside(format!("sequence {number}: {what} {}", entry[i])))
        };
        let (first, rows, cached) =
            (place(0, "first row")?, place(1, "row count")?, place(2, "cached length")?);
        if rows == 0 {
            // Nothing is read of it.
            all.push(Sequence { number, first, rows, cached: 0 });
            continue;
        }
        if first + rows > total {
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
        let room = pages.first().map_or(0, |p| p.table.shape.dim(1).saturating_mul(p.pages.dim(1)));
        if cached > room {
            return Err(operands.outside(format!(
                "sequence {number}: {cached} cached positions, its pages hold {room}"
            )));
        }
        for pages in pages {
            for &page in &pages.table.row(number)[..cached.div_ceil(pages.pages.dim(1))] {
                operands.index(page, pages.pages.dim(0), "page")?;
            }
        }
        all.push(Sequence { number, first, rows, cached });
    }
    Ok(all)
}

/// What the logits depend on.
struct Logits<'a> {
    attrs: &'a AttentionAttrs,
    q: Floats<'a>,
    k: Past<'a>,
    sinks: Option<Floats<'a>>,
    sequences: Vec<Sequence>,
}

/// One query: a row of a sequence and a head.
struct Query<'a> {
    sequence: &'a Sequence,
    /// Row in `q`.
    row: usize,
    head: usize,
    /// Its position in the sequence.
    position: usize,
    /// The key head it reads.
    key_head: usize,
    /// The positions it sees.
    sees: std::ops::Range<usize>,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

impl<'a> Logits<'a> {
    fn queries(&self) -> impl Iterator<Item = Query<'_>> {
        let (heads, key_heads) = (self.q.dim(1), self.k.own.dim(1));
        let rows = self.sequences.iter().flat_map(|s| (0..s.rows).map(move |r| (s, r)));
        rows.flat_map(move |(sequence, r)| {
            let position = sequence.cached + r;
            let window = self.attrs.window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
            let chunk = self.attrs.chunk.map_or(0, |c| position / c as usize * c as usize);
            let sees = window.max(chunk)..position + 1;
            (0..heads).map(move |head| Query {
                sequence,
                row: sequence.first + r,
                head,
                position,
                key_head: head * key_heads / heads,
                sees: sees.clone(),
            })
        })
    }

    fn q(&self, query: &Query<'_>) -> &'a [f64] {
        self.q.row(query.row * self.q.dim(1) + query.head)
    }

    /// The logit that is a query's sink.
    fn sink(&self, query: &Query<'_>) -> Option<f64> {
        self.sinks.map(|sinks| sinks.data[query.head])
    }

    /// The logit of a query and a position, and its derivative by `scale * q . k`.
    fn logit(&self, query: &Query<'_>, position: usize) -> (f64, f64) {
        let k = self.k.at(query.sequence, position, query.key_head);
        let logit = f64::from(self.attrs.scale.get()) * dot(self.q(query), k);
        let (logit, slope) = match self.attrs.softcap {
            None => (logit, 1.0),
            Some(cap) => {
                let cap = f64::from(cap.get());
                let t = (logit / cap).tanh();
                (cap * t, 1.0 - t * t)
            }
        };
        let bias = self.attrs.alibi.filter(|bias| bias.get() > 0.0).map_or(0.0, |bias| {
            let distance = (query.position - position) as f64;
            -f64::from(alibi_slope(bias.get(), query.head, self.q.dim(1))) * distance
        });
        (logit + bias, slope)
    }

    /// The logits of all positions that a query sees.
    fn of(&self, query: &Query<'_>) -> Vec<f64> {
        query.sees.clone().map(|position| self.logit(query, position).0).collect()
    }

    /// The log-sum-exp of a query's logits and its sink.
    fn log_sum_exp(&self, query: &Query<'_>, logits: &[f64]) -> f64 {
        let all: Vec<f64> = logits.iter().copied().chain(self.sink(query)).collect();
        log_sum_exp(&all)
    }
}

/// The sinks, the first operand after the first `n`, when there are any, and where the operands
/// after them begin.
fn sinks<'a>(
    operands: Operands<'a>,
    attrs: &AttentionAttrs,
    n: usize,
) -> Result<(Option<Floats<'a>>, usize), Fault> {
    match attrs.sinks {
        true => Ok((Some(operands.floats(n)?), n + 1)),
        false => Ok((None, n)),
    }
}

/// The cached operand at `at`, with the table at `table`, when there is a prefix.
fn pages<'a>(
    operands: Operands<'a>,
    attrs: &AttentionAttrs,
    at: usize,
    table: usize,
) -> Result<Option<Pages<'a>>, Fault> {
    match attrs.prefix {
        true => Ok(Some(Pages { pages: operands.floats(at)?, table: operands.ints(table)? })),
        false => Ok(None),
    }
}

/// The operands of attention, the first of its sinks and pages being operand `rest`.
fn read<'a>(
    operands: Operands<'a>,
    attrs: &'a AttentionAttrs,
    rest: usize,
) -> Result<(Logits<'a>, Past<'a>), Fault> {
    let (q, own) = (operands.floats(0)?, operands.floats(1)?);
    let (sinks, rest) = sinks(operands, attrs, rest)?;
    let k = Past { own, cached: pages(operands, attrs, rest, rest + 2)? };
    let v = Past { own: operands.floats(2)?, cached: pages(operands, attrs, rest + 1, rest + 2)? };
    let all: Vec<Pages<'_>> = k.cached.into_iter().chain(v.cached).collect();
    let sequences = sequences(operands, operands.ints(3)?, q.dim(0), &all)?;
    Ok((Logits { attrs, q, k, sinks, sequences }, v))
}

pub(super) fn forward(operands: Operands<'_>, attrs: &AttentionAttrs, shape: Shape) -> Out {
    let (logits, v) = read(operands, attrs, 4)?;
    let mut out = operands.zeros(shape)?;
    let width = shape.cols();
    for query in logits.queries() {
        let row = logits.of(&query);
        let lse = logits.log_sum_exp(&query, &row);
        let to = (query.row * logits.q.dim(1) + query.head) * width;
        for (position, logit) in query.sees.clone().zip(row) {
            let p = (logit - lse).exp();
            let v = v.at(query.sequence, position, query.key_head);
            for i in 0..width {
                out[to + i] += p * v[i];
            }
        }
    }
    operands.made(shape, out)
}

pub(super) fn query_back(operands: Operands<'_>, attrs: &AttentionAttrs, shape: Shape) -> Out {
    let (logits, v) = read(operands, attrs, 6)?;
    let (delta, dout) = (operands.floats(4)?, operands.floats(5)?);
    let scale = f64::from(attrs.scale.get());
    let mut out = operands.zeros(shape)?;
    let width = logits.q.dim(2);
    let (dq, lses) = out.split_at_mut(logits.q.data.len());
    for query in logits.queries() {
        let at = query.row * logits.q.dim(1) + query.head;
        let lse = logits.log_sum_exp(&query, &logits.of(&query));
        lses[at] = lse;
        for position in query.sees.clone() {
            let (logit, capped) = logits.logit(&query, position);
            let v = v.at(query.sequence, position, query.key_head);
            let ds = (logit - lse).exp() * (dot(dout.row(at), v) - delta.data[at]) * capped;
            let k = logits.k.at(query.sequence, position, query.key_head);
            (0..width).for_each(|i| dq[at * width + i] += scale * ds * k[i]);
        }
    }
    operands.made(shape, out)
}

pub(super) fn back(
    operands: Operands<'_>,
    attrs: &AttentionAttrs,
    wrt: AttentionOperand,
    shape: Shape,
) -> Out {
    let (logits, v) = read(operands, attrs, 7)?;
    let (lse, delta, dout) = (operands.floats(4)?, operands.floats(5)?, operands.floats(6)?);
    let scale = f64::from(attrs.scale.get());
    let mut out = operands.zeros(shape)?;
    let keys = match (wrt, logits.k.cached) {
        (AttentionOperand::Own, _) => logits.k.own.data.len(),
        (AttentionOperand::Pages, Some(cached)) => cached.pages.data.len(),
        _ => 0,
    };
    let (dk, dv) = out.split_at_mut(keys);
    let (width, wide) = (logits.q.dim(2), v.own.dim(2));
    for query in logits.queries() {
        let at = query.row * logits.q.dim(1) + query.head;
        let (q, dout) = (logits.q(&query), dout.row(at));
        if let (AttentionOperand::Sinks, Some(sink)) = (wrt, logits.sink(&query)) {
            dv[query.head] -= (sink - lse.data[at]).exp() * delta.data[at];
            continue;
        }
        for position in query.sees.clone() {
            let (cached, row) = logits.k.place(query.sequence, position, query.key_head);
            if cached != (wrt == AttentionOperand::Pages) {
                continue;
            }
            let (logit, capped) = logits.logit(&query, position);
            let p = (logit - lse.data[at]).exp();
            let v = v.at(query.sequence, position, query.key_head);
            let ds = p * (dot(dout, v) - delta.data[at]) * capped;
            (0..width).for_each(|i| dk[row * width + i] += scale * ds * q[i]);
            (0..wide).for_each(|i| dv[row * wide + i] += p * dout[i]);
        }
    }
    operands.made(shape, out)
}
