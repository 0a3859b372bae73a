//! Attention over packed sequences and their cached prefixes, forward and backward.
//!
//! Keys are visited in tiles of [`KEYS`] positions, aligned to the sequence's own position 0,
//! ascending; cached and own keys fill one tile alike. Within a tile, logits have lanes over keys
//! and are a chain over the head's width; results have lanes over the head's width and are a
//! chain over the keys (or, for the gradients of keys and values, over the query rows). What a
//! row does not see is selected away, and a tile that it sees nothing of leaves it untouched, so
//! a row's bits do not depend on the rows beside it or on where its keys are stored.

#[cfg(test)]
mod against_naive;
mod back;
mod forward;
mod product;
mod queries;
mod rows;
mod softmax;
#[cfg(test)]
mod tests;

use std::ops::Range;

use graph::{AttentionAttrs, AttentionOperand, Call, DType, Op, Unsupported};

use self::queries::CHUNK;
use self::rows::Pages;
use self::softmax::Running;
use super::{Support, Tiles, dense, dense_last, memory, needs};
use crate::job::{Input, Job, MILLISECOND, Scratch};
use crate::simd::LANES;

/// Keys of a tile, which the logits of a row are taken together of: four vectors.
const KEYS: usize = 64;

/// The fewest tiles of [`KEYS`] rows that these are made of.
const MANY_TILES: usize = 24;

/// The most rows of a tile, be it of queries, for all of which keys are transposed once, or of keys
/// whose gradients it gives: half as many where there would be few tiles, since those of the last
/// queries and the first keys take the longest.
fn most_rows(rows: usize, key_heads: usize) -> usize {
    let tiles = rows.div_ceil(KEYS) * key_heads;
    if tiles < MANY_TILES { KEYS / 2 } else { KEYS }
}

/// The fewest rows times heads of a tile of many that make transposing its keys worth it.
const QUERIES: usize = 128;

/// Multiplications of a tile that should not be exceeded. In unit tests so few that small cases take
/// several rounds.
const TILE_WORK: usize = if cfg!(test) { 1 << 14 } else { MILLISECOND };

/// The operand that says where sequences are, after queries, keys and values.
const SEQS: usize = 3;

/// Where the operands of an op are.
#[derive(Copy, Clone)]
struct Places {
    sinks: Option<usize>,
    /// The first of the prefix' operands.
    prefix: Option<usize>,
    /// Past the last of a gradient's own operands.
    rest: usize,
}

fn attrs(op: &Op) -> Option<(&AttentionAttrs, Places)> {
    let (attrs, rest) = match op {
        Op::Attention(attrs) => (attrs, SEQS + 1),
        Op::AttentionQueryBack(attrs) => (attrs, SEQS + 3),
        Op::AttentionBack { attrs, .. } => (attrs, SEQS + 4),
        _ => return None,
    };
    let sinks = attrs.sinks.then_some(rest);
    let prefix = attrs.prefix.then_some(rest + usize::from(attrs.sinks));
    Some((attrs, Places { sinks, prefix, rest }))
}

/// Heads of any strides with dense elements; dense indices, statistics and pages.
pub(super) fn supports(call: &Call<'_>) -> Support {
    let Some((_, places)) = attrs(call.op) else { return super::no_kernel("no attention") };
    let (q, k) = (dense_last(call, 0)?, dense_last(call, 1)?);
    let width = q.shape.dim(2);
    let values = dense_last(call, 2)?.shape.dim(2);
    let seqs = dense(call, SEQS, DType::I32)?;
    if places.rest > SEQS + 1 {
        // The sums of rows, then the cotangent.
        for i in SEQS + 1..places.rest - 1 {
            dense(call, i, DType::F32)?;
        }
        dense_last(call, places.rest - 1)?;
    }
    if let Some(at) = places.sinks {
        dense(call, at, DType::F32)?;
    }
    let (mut converted, mut cached) = (0, 0);
    if let Some(at) = places.prefix {
        for i in at..at + 2 {
            let dtype = super::arg(call, i)?.dtype;
            let pages = memory(call, i, dtype)?;
            if !pages.is_contiguous() {
                return Err(Unsupported::Layout(i));
            }
            if rows::Storage::of(dtype).is_none() {
                return super::no_kernel(format!("pages of {dtype}"));
            }
        }
        let table = dense(call, at + 2, DType::I32)?;
        converted = KEYS;
        cached = table.shape.cols().saturating_mul(call.args[at].shape.dim(1));
    }
    let (rows, heads) = (q.shape.dim(0), (q.shape.dim(1), k.shape.dim(1)));
    let keys = (rows.saturating_add(cached), work(call.op, width + values));
    let blocks = Blocks::new(rows, seqs.shape.dim(0), heads, keys, TILE_WORK);
    let mut needs = needs(&buffers(&blocks, width, values, converted));
    if !matches!(call.op, Op::AttentionBack { .. }) && blocks.rounds > 1 {
        needs.kept = rows * heads.0 * Running::KEPT * 4;
    }
    Ok(needs)
}

/// Floats of scratch that one tile uses: keys and values transposed, cached keys and values
/// converted, coefficients (of two products), running maxima and sums of 16 lanes. All
/// kernels use the same.
fn buffers(blocks: &Blocks, width: usize, values: usize, converted: usize) -> [usize; 9] {
    let queries = blocks.rows.per_tile * blocks.heads;
    [
        rows::transposed(KEYS, width),
        rows::transposed(KEYS, values),
        rows::packed(KEYS.max(back::BATCH), width),
        rows::packed(KEYS.max(back::BATCH), values),
        converted * width,
        converted * values,
        2 * CHUNK.max(back::BATCH) * KEYS,
        queries,
        queries * LANES,
    ]
}

/// The scratch of one tile, in the order of [`buffers`].
struct Buffers<'a> {
    keys: &'a mut [f32],
    values: &'a mut [f32],
    packed_keys: &'a mut [f32],
    packed_values: &'a mut [f32],
    cached_keys: &'a mut [f32],
    cached_values: &'a mut [f32],
    coefficients: &'a mut [f32],
    running: Running<'a>,
}

impl<'a> Buffers<'a> {
    fn take(operands: &Operands<'_>, mut scratch: Scratch<'a>) -> Buffers<'a> {
        let converted = if operands.prefix.is_some() { KEYS } else { 0 };
        let sizes = buffers(&operands.blocks, operands.width, operands.value_width, converted);
        let [
            keys,
            values,
            packed_keys,
            packed_values,
            cached_keys,
            cached_values,
            coefficients,
            maxima,
            sums,
        ] = sizes.map(|n| scratch.take(n));
        let running = Running { maxima, sums };
        Buffers {
            keys,
            values,
            packed_keys,
            packed_values,
            cached_keys,
            cached_values,
            coefficients,
            running,
        }
    }
}

/// A grid of tiles of query rows and heads that share a key head.
struct Blocks {
    rows: Tiles,
    /// Query heads of a tile.
    heads: usize,
    /// Query heads that share a key head.
    group: usize,
    key_heads: usize,
    /// Rounds, and the positions that each takes of every sequence: a multiple of [`KEYS`].
    rounds: usize,
    keys: usize,
}

impl Blocks {
    /// Blocks of rows no longer than what a sequence has on average, unless that gives more than
    /// [`MANY_TILES`], as there may be room for sequences that are not there; and of no more than
    /// `tile_work` when a row of a head sees up to so many keys, each of which takes so many
    /// multiplications; in rounds where the fewest rows take more. Where that gives a single tile,
    /// two that split the heads.
    fn new(
        rows: usize,
        seqs: usize,
        heads: (usize, usize),
        (keys, of_key): (usize, usize),
        tile_work: usize,
    ) -> Blocks {
        let (heads, key_heads) = heads;
        let (group, work) = (heads / key_heads.max(1), keys.saturating_mul(of_key));
        let quick = tile_work / work.saturating_mul(group).max(1);
        let most = quick.max(QUERIES.div_ceil(group.max(1))).min(most_rows(rows, key_heads));
        let enough = rows.saturating_mul(key_heads) / MANY_TILES;
        let rows = Tiles::new(rows, rows.div_ceil(seqs.max(1)).max(enough).clamp(1, most));
        let heads = if rows.count * key_heads == 1 { group.div_ceil(2) } else { group };
        let heads = heads.max(1);
        let of_tile = work.saturating_mul(rows.per_tile * heads);
        let in_round = keys.div_ceil(of_tile.div_ceil(tile_work).max(1));
        let in_round = in_round.max(1).checked_next_multiple_of(KEYS).unwrap_or(keys);
        let rounds = keys.div_ceil(in_round).max(1);
        Blocks { rows, heads, group, key_heads, rounds, keys: in_round }
    }

    /// Tiles that one key head's query heads are split into.
    fn parts(&self) -> usize {
        self.group.div_ceil(self.heads)
    }

    fn count(&self) -> usize {
        self.rows.count * self.key_heads * self.parts()
    }

    /// The round, the rows, the key head and the query heads of a tile. The tiles of a key head, which
    /// read the same keys, come together; later rows see more keys and come first.
    fn tile(&self, tile: usize) -> (usize, Range<usize>, usize, Range<usize>) {
        let (round, tile) = (tile / self.count().max(1), tile % self.count().max(1));
        let per_head = self.rows.count * self.parts();
        let (key_head, block) = (tile / per_head, tile % per_head / self.parts());
        let (rows, part) = (self.rows.range(self.rows.count - 1 - block), tile % self.parts());
        let first = key_head * self.group;
        let heads = first + part * self.heads..first + ((part + 1) * self.heads).min(self.group);
        (round, rows, key_head, heads)
    }
}

/// `[rows, heads, width]` with dense elements.
#[derive(Copy, Clone)]
struct Heads {
    ptr: *const f32,
    row: usize,
    head: usize,
}

impl Heads {
    fn new(input: &Input<'_>) -> Heads {
        Heads { ptr: input.ptr(), row: input.stride(0), head: input.stride(1) }
    }

    #[inline(always)]
    fn at(self, row: usize, head: usize) -> *const f32 {
        self.ptr.wrapping_add(row * self.row + head * self.head)
    }
}

/// The cached part of sequences.
struct Prefix<'a> {
    keys: Pages,
    values: Pages,
    /// `[S, columns]` page numbers.
    table: &'a [i32],
    columns: usize,
}

/// Rows `first .. first + rows` of the operands, at positions `cached ..`.
#[derive(Copy, Clone)]
struct Sequence {
    /// Its row in the page table.
    index: usize,
    first: usize,
    rows: usize,
    cached: usize,
}

impl Sequence {
    #[inline(always)]
    fn position(&self, row: usize) -> usize {
        self.cached + row - self.first
    }
}

/// Multiplications that a row of a head takes with a key and a value of so many elements in all.
fn work(op: &Op, elements: usize) -> usize {
    // A gradient takes the logits again, and one or two products more.
    let products = if matches!(op, Op::Attention(_)) { 1 } else { 2 };
    elements.saturating_mul(products)
}

/// An op's operands.
struct Operands<'a> {
    attrs: AttentionAttrs,
    q: Heads,
    k: Heads,
    v: Heads,
    seqs: &'a [i32],
    /// A logit for each query head.
    sinks: Option<&'a [f32]>,
    prefix: Option<Prefix<'a>>,
    rows: usize,
    heads: usize,
    key_heads: usize,
    width: usize,
    value_width: usize,
    blocks: Blocks,
}

impl<'a> Operands<'a> {
    fn new(job: &Job<'a>) -> Option<Operands<'a>> {
        let (attrs, places) = attrs(job.op)?;
        let (q, k, v) = (job.input(0), job.input(1), job.input(2));
        let [rows, heads, width] = [0, 1, 2].map(|i| q.arg.shape.dim(i));
        let key_heads = k.arg.shape.dim(1);
        let value_width = v.arg.shape.dim(2);
        let seqs = job.input(SEQS);
        let prefix = places.prefix.and_then(|at| {
            let table = job.input(at + 2);
            Some(Prefix {
                keys: Pages::new(&job.input(at))?,
                values: Pages::new(&job.input(at + 1))?,
                table: table.ints(),
                columns: table.arg.shape.cols(),
            })
        });
        let cached = prefix.as_ref().map_or(0, |p| p.columns.saturating_mul(p.keys.page));
        let keys = (rows.saturating_add(cached), work(job.op, width + value_width));
        Some(Operands {
            attrs: *attrs,
            q: Heads::new(&q),
            k: Heads::new(&k),
            v: Heads::new(&v),
            seqs: seqs.ints(),
            // SAFETY: `supports` asked for a dense f32 operand.
            sinks: places.sinks.map(|i| unsafe { job.input(i).slice::<f32>() }),
            prefix,
            rows,
            heads,
            key_heads,
            width,
            value_width,
            blocks: Blocks::new(rows, seqs.arg.shape.dim(0), (heads, key_heads), keys, TILE_WORK),
        })
    }

    /// The sequences that have rows in a range. Their numbers have been checked.
    fn sequences(&self, range: Range<usize>) -> impl Iterator<Item = Sequence> + '_ {
        let entries = self.seqs.chunks_exact(3).enumerate();
        let all = entries.map(|(index, s)| Sequence {
            index,
            first: s[0] as usize,
            rows: s[1] as usize,
            cached: s[2] as usize,
        });
        all.filter(move |s| s.rows > 0 && s.first < range.end && s.first + s.rows > range.start)
    }

    /// The first position that a row at `position` sees.
    #[inline(always)]
    fn first_seen(&self, position: usize) -> usize {
        self.attrs.first_seen(position)
    }

    /// Keys of a tile of their gradients: fewer where a row sees not many more, as all keys of a
    /// tile are multiplied with all rows that see some of them.
    fn gradient_keys(&self) -> usize {
        let all = self.attrs.window.into_iter().chain(self.attrs.chunk);
        let near = all.min().is_some_and(|n| (n as usize) < 8 * KEYS);
        if near { KEYS / 2 } else { most_rows(self.rows, self.key_heads) }
    }

    /// Runs of rows, or of slots of all pages, that gradients of keys and values come in.
    fn key_blocks(&self, wrt: AttentionOperand) -> usize {
        let keys = self.gradient_keys();
        match (&self.prefix, wrt) {
            (Some(prefix), AttentionOperand::Pages) => {
                prefix.keys.count.max(prefix.values.count) * prefix.keys.page.div_ceil(keys)
            }
            _ => self.rows.div_ceil(keys),
        }
    }

    /// Rows of queries that the gradients of keys and values take in a round, which goes on where the
    /// one before it ended: as many as keep a tile short.
    fn gradient_rows(&self) -> usize {
        let of_row = self.gradient_keys() * 2 * (self.width + self.value_width);
        (TILE_WORK / of_row.saturating_mul(self.blocks.group).max(1)).max(1)
    }

    /// One past the last position whose row sees `position`.
    #[inline(always)]
    fn last_seeing(&self, position: usize) -> usize {
        self.attrs.last_seeing(position)
    }
}

/// Sequences must lie in the rows without overlapping, and their cached positions in pages.
pub(super) fn check(job: &Job<'_>) -> Result<(), String> {
    let Some(o) = Operands::new(job) else { return Ok(()) };
    let mut end = 0;
    let mut ascending = true;
    for (i, s) in o.seqs.chunks_exact(3).enumerate() {
        let [Ok(first), Ok(rows), Ok(cached)] = [s[0], s[1], s[2]].map(usize::try_from) else {
            return Err(format!("sequence {i} is {s:?}: no number may be negative"));
        };
        if rows == 0 {
            continue;
        }
        if first + rows > o.rows {
            return Err(format!(
                "sequence {i} has rows {first}..{}, there are {}",
                first + rows,
                o.rows
            ));
        }
        ascending &= first >= end;
        end = first + rows;
        let Some(prefix) = &o.prefix else {
            if cached > 0 {
                return Err(format!("sequence {i} has {cached} cached positions but no pages"));
            }
            continue;
        };
        let (page, pages) = (prefix.keys.page, prefix.pages());
        let used = cached.div_ceil(page);
        if used > prefix.columns {
            return Err(format!(
                "sequence {i} has {cached} cached positions, its {} pages of {page} hold fewer",
                prefix.columns
            ));
        }
        let table = prefix.table.iter().skip(i * prefix.columns).take(used);
        for (column, &id) in table.enumerate() {
            if !usize::try_from(id).is_ok_and(|id| id < pages) {
                return Err(format!("page {id} (sequence {i}, entry {column}) of {pages}"));
            }
        }
    }
    if ascending { Ok(()) } else { check_overlap(&o) }
}

fn check_overlap(o: &Operands<'_>) -> Result<(), String> {
    let mut seqs: Vec<Sequence> = o.sequences(0..o.rows).collect();
    seqs.sort_by_key(|s| s.first);
    for (a, b) in seqs.iter().zip(seqs.iter().skip(1)) {
        if a.first + a.rows > b.first {
            return Err(format!("row {} is of sequences {} and {}", b.first, a.index, b.index));
        }
    }
    Ok(())
}

impl Prefix<'_> {
    /// How many pages there are.
    fn pages(&self) -> usize {
        self.values.count.min(self.keys.count)
    }
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    let Some(o) = Operands::new(job) else { return 0 };
    match job.op {
        Op::AttentionBack { wrt: AttentionOperand::Sinks, .. } => o.heads.div_ceil(LANES),
        Op::AttentionBack { wrt, .. } => o.key_blocks(*wrt) * o.key_heads,
        _ => o.blocks.count(),
    }
}

/// How many rounds the tiles are run in: each takes some keys, or for the gradients of keys and values
/// the queries of some rows.
pub(super) fn rounds(job: &Job<'_>) -> usize {
    let Some(o) = Operands::new(job) else { return 1 };
    match job.op {
        Op::AttentionBack { wrt: AttentionOperand::Sinks, .. } => 1,
        Op::AttentionBack { .. } => o.rows.div_ceil(o.gradient_rows()).max(1),
        _ => o.blocks.rounds,
    }
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize, scratch: Scratch<'_>) {
    let Some(operands) = Operands::new(job) else { return };
    let buffers = Buffers::take(&operands, scratch);
    match job.op {
        Op::AttentionQueryBack(_) => {
            job.isa.run(back::BackQ { job, o: &operands, tile, buffers });
        }
        Op::AttentionBack { wrt: AttentionOperand::Sinks, .. } => {
            job.isa.run(back::BackSinks { job, o: &operands, tile });
        }
        Op::AttentionBack { wrt, .. } => {
            job.isa.run(back::BackKeys { job, o: &operands, tile, buffers, wrt: *wrt });
        }
        _ => job.isa.run(forward::Forward { job, o: &operands, tile, buffers }),
    }
}
