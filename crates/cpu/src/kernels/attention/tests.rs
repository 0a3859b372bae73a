use graph::{
    Arg, AttentionAttrs, AttentionOperand, Call, DType, Device, Leaf, NodeId, Op, Real, Segment,
    Unsupported, plan,
};

use super::product::{Coefficients, add_weighted, multiply};
use super::rows::{pack, packed, transpose, transposed};
use super::{Blocks, KEYS, QUERIES, most_rows, work};
use crate::Cpu;
use crate::job::MILLISECOND;
use crate::simd::{Isa, LANES, Simd, Task};
use crate::testing::{Case, Every, Random, assert_close, devices, shape, to_floats};

const CACHES: [DType; 4] =
    [DType::F32, DType::F16, DType::BF16, DType::Block(gguf::TensorType::Q8_0)];

/// One sequence: its queries, keys and values at every position, keys and values as a cache of
/// `dtype` gives them back.
struct Sequence {
    len: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

#[derive(Clone)]
struct Setup {
    heads: usize,
    key_heads: usize,
    width: usize,
    value_width: usize,
    attrs: AttentionAttrs,
    cache: DType,
    /// One for each head, if there are any.
    sinks: Vec<f32>,
}

impl Setup {
    fn attrs(&self, prefix: bool) -> AttentionAttrs {
        AttentionAttrs { prefix, ..self.attrs }
    }
}

/// Rows as stored in a cache, and as read back.
fn through(cpu: &Cpu, dtype: DType, cols: usize, x: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let mut case = Case::new();
    let x = case.floats("x", &[x.len() / cols, cols], x);
    let round = case.graph.round(x, dtype).unwrap();
    let cast = case.graph.cast(x, dtype).unwrap();
    let out = case.run(cpu, &[cast, round]).unwrap();
    (out[0].clone(), to_floats(&out[1]))
}

impl Sequence {
    fn new(setup: &Setup, len: usize, random: &mut Random) -> Sequence {
        let cpu = Cpu::new(1, Some(crate::Family::Portable)).unwrap();
        let mut part = |heads: usize, width: usize| random.floats(len * heads * width);
        let q = part(setup.heads, setup.width);
        let k = part(setup.key_heads, setup.width);
        let v = part(setup.key_heads, setup.value_width);
        let k = through(&cpu, setup.cache, setup.width, &k).1;
        let v = through(&cpu, setup.cache, setup.value_width, &v).1;
        Sequence { len, q: q.iter().map(|x| x * 3.0).collect(), k, v }
    }
}

/// A part of a sequence in one call: rows `from .. to`, positions before `from` cached.
#[derive(Copy, Clone)]
struct Part<'a> {
    seq: &'a Sequence,
    from: usize,
    to: usize,
}

/// Builds a call with some parts packed beside each other, and rows of no sequence between them.
/// Leaves are poisoned wherever the kernels must not look.
fn build(cpu: &Cpu, s: &Setup, parts: &[Part<'_>], page: usize, random: &mut Random) -> Built {
    let mut case = Case::new();
    let gaps: Vec<usize> = parts.iter().map(|_| random.below(3)).collect();
    let rows = parts.iter().map(|p| p.to - p.from).sum::<usize>() + gaps.iter().sum::<usize>();
    let mut q = vec![f32::NAN; rows * s.heads * s.width];
    let mut k = vec![f32::NAN; rows * s.key_heads * s.width];
    let mut v = vec![f32::NAN; rows * s.key_heads * s.value_width];
    let mut seqs = Vec::new();
    let mut starts = Vec::new();
    let mut row = 0;
    let columns = parts.iter().map(|p| p.from.div_ceil(page)).max().unwrap_or(0) + 1;
    let pages = parts.iter().map(|p| p.from.div_ceil(page)).sum::<usize>() + 2;
    let mut free: Vec<usize> = (0..pages).collect();
    let mut table = vec![-7; parts.len() * columns];
    let mut k_pages = vec![f32::NAN; pages * page * s.key_heads * s.width];
    let mut v_pages = vec![f32::NAN; pages * page * s.key_heads * s.value_width];
    for (i, (p, gap)) in parts.iter().zip(gaps).enumerate() {
        row += gap;
        starts.push(row);
        let n = p.to - p.from;
        let copy = |to: &mut Vec<f32>, from: &[f32], width: usize| {
            to[row * width..][..n * width].copy_from_slice(&from[p.from * width..][..n * width]);
        };
        copy(&mut q, &p.seq.q, s.heads * s.width);
        copy(&mut k, &p.seq.k, s.key_heads * s.width);
        copy(&mut v, &p.seq.v, s.key_heads * s.value_width);
        seqs.extend([row as i32, n as i32, p.from as i32]);
        for column in 0..p.from.div_ceil(page) {
            let id = free.swap_remove(random.below(free.len()));
            table[i * columns + column] = id as i32;
            for slot in 0..page.min(p.from - column * page) {
                let (at, to) = (column * page + slot, id * page + slot);
                let (wk, wv) = (s.key_heads * s.width, s.key_heads * s.value_width);
                k_pages[to * wk..][..wk].copy_from_slice(&p.seq.k[at * wk..][..wk]);
                v_pages[to * wv..][..wv].copy_from_slice(&p.seq.v[at * wv..][..wv]);
            }
        }
        row += n;
    }
    // An entry without rows: nothing of it is looked at.
    seqs.extend([rows as i32 + 5, 0, 99]);
    table.extend(vec![-9; columns]);
    let count = parts.len() + 1;
    let q = case.floats("q", &[rows, s.heads, s.width], &q);
    let k = case.floats("k", &[rows, s.key_heads, s.width], &k);
    let v = case.floats("v", &[rows, s.key_heads, s.value_width], &v);
    let seqs = case.ints("seqs", &[count, 3], &seqs);
    let sinks = match s.attrs.sinks {
        true => Some(case.floats("sinks", &[s.heads], &s.sinks)),
        false => None,
    };
    let mut prefix = Vec::new();
    if s.attrs.prefix {
        let k_pages = through(cpu, s.cache, s.width, &k_pages).0;
        let v_pages = through(cpu, s.cache, s.value_width, &v_pages).0;
        prefix = vec![
            case.bytes("k_pages", s.cache, &[pages, page, s.key_heads, s.width], &k_pages),
            case.bytes("v_pages", s.cache, &[pages, page, s.key_heads, s.value_width], &v_pages),
            case.ints("table", &[count, columns], &table),
        ];
    }
    Built { case, q, k, v, seqs, sinks, prefix, starts, rows }
}

struct Built {
    case: Case,
    q: NodeId,
    k: NodeId,
    v: NodeId,
    seqs: NodeId,
    sinks: Option<NodeId>,
    prefix: Vec<NodeId>,
    starts: Vec<usize>,
    rows: usize,
}

impl Built {
    fn forward(&mut self, attrs: AttentionAttrs) -> NodeId {
        let mut args = vec![self.q, self.k, self.v, self.seqs];
        args.extend(self.sinks);
        args.extend(&self.prefix);
        self.case.graph.push(Op::Attention(attrs), &args, "attention").unwrap()
    }

    /// The gradients of queries, keys and values, and the log-sum-exps, which those of keys and
    /// values read.
    fn back(&mut self, attrs: AttentionAttrs, delta: NodeId, dout: NodeId) -> [NodeId; 4] {
        let rest = [self.sinks.as_slice(), &self.prefix].concat();
        let own = [self.q, self.k, self.v, self.seqs];
        let g = &mut self.case.graph;
        let [q, k, v] = [self.q, self.k, self.v].map(|x| g.node(x).shape.elements());
        let lses = g.node(delta).shape;
        let args = [&own[..], &[delta, dout], &rest].concat();
        let of_q = g.push(Op::AttentionQueryBack(attrs), &args, "queries").unwrap();
        let lse = g.slice(of_q, 0, q, lses.elements()).unwrap();
        let lse = g.reshape(lse, lses.dims()).unwrap();
        let args = [&own[..], &[lse, delta, dout], &rest].concat();
        let op = Op::AttentionBack { attrs, wrt: AttentionOperand::Own };
        let both = g.push(op, &args, "keys and values").unwrap();
        let parts = [(of_q, 0, q), (both, 0, k), (both, k, v)];
        let [q, k, v] = parts.map(|(all, from, n)| g.slice(all, 0, from, n).unwrap());
        [q, k, v, lse]
    }
}

fn setups() -> Vec<Setup> {
    let attrs = AttentionAttrs { prefix: true, ..AttentionAttrs::new(0.25) };
    let f32 = DType::F32;
    let plain = Setup {
        heads: 4,
        key_heads: 2,
        width: 32,
        value_width: 64,
        attrs,
        cache: f32,
        sinks: Vec::new(),
    };
    let mut all = vec![Setup {
        heads: 3,
        key_heads: 3,
        width: 20,
        value_width: 36,
        attrs: AttentionAttrs { window: Some(40), ..attrs },
        cache: f32,
        sinks: Vec::new(),
    }];
    for (i, cache) in CACHES.into_iter().enumerate() {
        all.push(Setup {
            attrs: AttentionAttrs {
                window: [None, Some(1), Some(33), Some(70)][i],
                softcap: [None, Some(Real::new(2.0)), None, Some(Real::new(5.0))][i],
                ..attrs
            },
            cache,
            key_heads: [2, 4, 1, 2][i],
            sinks: Vec::new(),
            ..plain.clone()
        });
    }
    let alibi = Some(Real::new(4.0));
    for (i, cache) in CACHES.into_iter().enumerate() {
        all.push(Setup {
            attrs: AttentionAttrs {
                window: [None, None, None, Some(20)][i],
                chunk: [None, Some(48), None, Some(27)][i],
                softcap: [None, None, Some(Real::new(3.0)), Some(Real::new(5.0))][i],
                alibi: [None, None, alibi, alibi][i],
                sinks: i != 2,
                ..attrs
            },
            cache,
            heads: [4, 4, 6, 4][i],
            key_heads: [2, 4, 2, 1][i],
            sinks: vec![0.5, -1.0, 3.0, f32::NEG_INFINITY],
            ..plain.clone()
        });
    }
    all
}

/// The result in f64, by the definition.
fn naive(s: &Setup, seq: &Sequence) -> (Vec<f64>, Vec<f64>) {
    let group = s.heads / s.key_heads;
    let (mut out, mut stats) = (Vec::new(), Vec::new());
    for i in 0..seq.len {
        for h in 0..s.heads {
            let at = |x: &[f32], width: usize, heads: usize, row: usize, head: usize| -> Vec<f64> {
                x[(row * heads + head) * width..][..width].iter().map(|&x| f64::from(x)).collect()
            };
            let q = at(&seq.q, s.width, s.heads, i, h);
            let first = s.attrs.window.map_or(0, |w| (i + 1).saturating_sub(w as usize));
            let first = s.attrs.chunk.map_or(first, |c| first.max(i / c as usize * c as usize));
            let mut weights = Vec::new();
            for j in first..=i {
                let k = at(&seq.k, s.width, s.key_heads, j, h / group);
                let dot: f64 = q.iter().zip(&k).map(|(a, b)| a * b).sum();
                let mut logit = dot * f64::from(s.attrs.scale.get());
                if let Some(cap) = s.attrs.softcap {
                    let cap = f64::from(cap.get());
                    logit = cap * (logit / cap).tanh();
                }
                if let Some(bias) = s.attrs.alibi {
                    // Of 4 heads all, of 6 the last two are between.
                    let steps = [1.0, 2.0, 3.0, 4.0, 0.5, 1.5];
                    let slope = (-f64::from(bias.get()) * steps[h] / 4.0).exp2();
                    logit -= slope * (i - j) as f64;
                }
                weights.push(logit);
            }
            let values = weights.len();
            if s.attrs.sinks {
                weights.push(f64::from(s.sinks[h]));
            }
            let max = weights.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = weights.iter().map(|w| (w - max).exp()).sum();
            stats.push(max + sum.ln());
            let mut result = vec![0.0; s.value_width];
            weights.truncate(values);
            for (j, w) in (first..=i).zip(weights) {
                let p = (w - max).exp() / sum;
                let v = at(&seq.v, s.value_width, s.key_heads, j, h / group);
                result.iter_mut().zip(v).for_each(|(r, v)| *r += p * v);
            }
            out.extend(result);
        }
    }
    (out, stats)
}

/// Devices of every arithmetic attention has: with AMX it is that of AVX-512, by the same code.
fn families() -> Vec<Cpu> {
    devices().into_iter().filter(|cpu| cpu.kernel_family() != crate::Family::Amx).collect()
}

/// P5: a row's bits are its own, whatever the prefix split, pages, packing or threads.
#[test]
fn p5_a_row_depends_on_its_prefix_alone() {
    for (seed, s) in (5..).zip(setups()) {
        let seqs = [97, 40, 64].map(|len| Sequence::new(&s, len, &mut Random(seed)));
        for cpus in families().chunks(2) {
            // The same draws in every family, so that no machine tests what others do not.
            let mut random = Random(seed + 100);
            let mut whole: Vec<Vec<f32>> = Vec::new();
            for seq in &seqs {
                let part = Part { seq, from: 0, to: seq.len };
                let mut built = build(&cpus[0], &s, &[part], 16, &mut random);
                let out = built.forward(s.attrs(true));
                let out = built.case.run(&cpus[0], &[out]).unwrap();
                let start = built.starts[0];
                let expected = naive(&s, seq).0;
                let got = to_floats(&out[0])[start * s.heads * s.value_width..][..expected.len()]
                    .to_vec();
                // Of twenty seeds the worst is 1.8e-6, in any family.
                assert_close(&got, &expected, 2e-6, "attention");
                whole.push(got);
            }
            for trial in 0..24 {
                let cpu = &cpus[trial % 2];
                let page = [1, 7, 16, 32, 64][random.below(5)];
                let count = 1 + random.below(3);
                let parts: Vec<Part<'_>> = seqs[..count]
                    .iter()
                    .map(|seq| {
                        let from = random.below(seq.len);
                        let len = match trial % 3 {
                            0 => 1,
                            _ => 1 + random.below(seq.len - from),
                        };
                        Part { seq, from, to: (from + len).min(seq.len) }
                    })
                    .collect();
                let mut built = build(cpu, &s, &parts, page, &mut random);
                let out = built.forward(s.attrs(true));
                let stop = Every::new(1 + random.below(4));
                let out = built.case.run_in_pieces(cpu, &[out], &stop).unwrap();
                let width = s.heads * s.value_width;
                let mut expected = vec![0.0; built.rows * width];
                for ((part, start), whole) in parts.iter().zip(&built.starts).zip(&whole) {
                    let n = (part.to - part.from) * width;
                    expected[start * width..][..n]
                        .copy_from_slice(&whole[part.from * width..][..n]);
                }
                for (i, (a, b)) in to_floats(&out[0]).iter().zip(&expected).enumerate() {
                    assert!(
                        a.to_bits() == b.to_bits(),
                        "{cpu:?} {} window {:?}: element {i}: {a} and {b}",
                        s.cache,
                        s.attrs.window
                    );
                }
            }
        }
    }
}

/// P5, of gradients too, where a window is far from a sequence's first position: tiles of keys
/// begin where they do for any other row.
#[test]
fn p5_rows_far_into_a_sequence_are_their_own() {
    let mut s = setups().swap_remove(1);
    (s.heads, s.key_heads, s.width, s.value_width) = (1, 1, 16, 16);
    s.attrs.window = Some(40);
    let (len, w) = (1100, s.width);
    let seq = Sequence::new(&s, len, &mut Random(8));
    let (delta, dout) = (Random(9).floats(len), Random(10).floats(len * w));
    for cpu in families() {
        let run = |from: usize, to: usize| {
            let part = Part { seq: &seq, from, to };
            let mut built = build(&cpu, &s, &[part], 16, &mut Random(11));
            let (rows, start) = (built.rows, built.starts[0]);
            let mut place = |name: &str, x: &[f32], dims: &[usize]| {
                let mut all = vec![f32::NAN; dims.iter().product()];
                let width = all.len() / rows;
                let own = &x[from * width..to * width];
                all[start * width..][..own.len()].copy_from_slice(own);
                built.case.floats(name, dims, &all)
            };
            let delta = place("delta", &delta, &[rows, 1]);
            let dout = place("dout", &dout, &[rows, 1, w]);
            let out = built.forward(s.attrs(true));
            let [dq, _, _, lse] = built.back(s.attrs(true), delta, dout);
            let all = built.case.run(&cpu, &[out, dq, lse]).unwrap();
            all.iter()
                .map(|x| {
                    let x = to_floats(x);
                    let width = x.len() / rows;
                    x[start * width..(start + to - from) * width].to_vec()
                })
                .collect::<Vec<_>>()
        };
        let whole = run(0, len);
        for from in [1023, 1061, 1070] {
            for (i, (whole, part)) in whole.iter().zip(run(from, from + 5)).enumerate() {
                let width = whole.len() / len;
                assert!(whole[from * width..][..part.len()] == part, "{cpu:?} {from} result {i}");
            }
        }
    }
}

/// P7: a tile has as many rows as a millisecond allows, and a decoding step two tiles.
#[test]
fn p7_blocks_are_cut_by_their_work() {
    // One key, which takes all of the work.
    let of = |rows, seqs, heads, work| Blocks::new(rows, seqs, heads, (1, work), MILLISECOND);
    let blocks = |rows, seqs, heads, work| {
        let b = of(rows, seqs, heads, work);
        (b.rows.per_tile, b.heads, b.count())
    };
    assert_eq!(blocks(512, 1, (8, 2), 1 << 16), (32, 4, 32));
    assert_eq!(blocks(2048, 1, (32, 2), 1 << 18), (16, 16, 256));
    // Transposing the keys has to be worth it.
    assert_eq!(blocks(2048, 1, (32, 2), 1 << 25), (8, 16, 512));
    assert_eq!(blocks(2048, 1, (36, 2), 1 << 25), (8, 18, 512));
    assert_eq!(blocks(100, 8, (8, 2), 1 << 10), (13, 4, 16));
    assert_eq!(blocks(1, 1, (8, 2), 1 << 10), (1, 4, 2));
    assert_eq!(blocks(2, 1, (1, 1), 1 << 10), (2, 1, 1));
    // A row of a head by a key of 64 elements and its value, and a gradient twice as much.
    let attrs = AttentionAttrs::new(1.0);
    assert_eq!(work(&Op::Attention(attrs), 128), 128);
    assert_eq!(work(&Op::AttentionQueryBack(attrs), 128), 256);
    let one = of(1, 1, (9, 1), 1 << 10);
    assert_eq!([0, 1].map(|i| one.tile(i)), [(0, 0..1, 0, 0..5), (0, 0..1, 0, 5..9)]);
    let many = of(70, 1, (8, 2), 1 << 10);
    let tiles: Vec<_> = (0..many.count()).map(|i| many.tile(i)).collect();
    // A key head after the other, later rows first.
    assert_eq!(tiles[0], (0, 64..70, 0, 0..4));
    assert_eq!(tiles[1], (0, 32..64, 0, 0..4));
    assert_eq!(tiles[5], (0, 0..32, 1, 4..8));
    assert_eq!(many.tile(many.count() + 1), (1, 32..64, 0, 0..4));
    // Tiles of 64 rows where there are 24 of them.
    assert_eq!(
        [(512, 3), (512, 2), (1472, 1), (1473, 1)].map(|(n, h)| most_rows(n, h)),
        [64, 32, 32, 64]
    );
    assert_eq!(blocks(512, 1, (9, 3), 1 << 16), (64, 3, 24));
    // Room for sequences that are not there cuts no more tiles than are wanted.
    assert_eq!(blocks(512, 64, (9, 3), 1 << 16), (64, 3, 24));
    assert_eq!(blocks(512, 64, (4, 1), 1 << 16), (21, 4, 25));
    assert_eq!(blocks(16, 16, (9, 3), 1 << 10), (2, 3, 24));
}

/// P7: however many keys there are, no tile takes longer; what is seen is seen in some round.
#[test]
fn p7_many_keys_come_in_rounds() {
    for (heads, width) in [((32, 8), 128), ((8, 4), 256), ((4, 1), 256), ((64, 1), 576)] {
        for keys in [1, 64, 512, 4096, 32_768, 131_072, 1 << 20] {
            for rows in [1, 16, keys] {
                let of_key = 4 * width;
                let b = Blocks::new(rows, 1, heads, (keys, of_key), MILLISECOND);
                let most = b.rows.per_tile * b.heads * b.keys.min(keys) * of_key;
                assert!(most <= 2 * MILLISECOND, "{heads:?}, {rows} rows, {keys} keys: {most}");
                assert!(b.keys.is_multiple_of(KEYS));
                assert!(b.rounds * b.keys >= keys && (b.rounds - 1) * b.keys < keys);
                // Rounds are for what fewer rows do not make short.
                assert!(b.rounds == 1 || b.rows.per_tile * b.heads <= QUERIES.max(b.group));
            }
        }
    }
    let decoding = Blocks::new(1, 1, (32, 8), (8192, 256), MILLISECOND);
    assert_eq!(decoding.rounds, 1);
}

/// Sums of random rows, some of which some results have: with however many others a result is
/// computed, its bits are those of a chain over its own sources, and it is all that is written.
struct Sums<'a> {
    from: &'a [f32],
    coefficients: &'a [f32],
    width: usize,
    /// Sources of each result.
    ranges: &'a [std::ops::Range<usize>],
    factors: &'a [f32],
    start: &'a [f32],
}

impl Sums<'_> {
    const SOURCES: usize = 40;

    fn sources(&self) -> [*const f32; Sums::SOURCES] {
        std::array::from_fn(|i| self.from[i * self.width..].as_ptr())
    }

    /// The definition, one result and one lane at a time.
    fn expected<S: Simd>(&self, s: S) -> Vec<f32> {
        let mut all = self.start.to_vec();
        for (r, range) in self.ranges.iter().enumerate() {
            for w in 0..self.width {
                let mut sum = s.splat(all[r * self.width + w] * self.factors[r]);
                for i in range.clone() {
                    let c = s.splat(self.coefficients[r * Sums::SOURCES + i]);
                    sum = s.fma(c, s.splat(self.from[i * self.width + w]), sum);
                }
                // SAFETY: one element.
                unsafe { s.store_first(&mut all[r * self.width + w], sum, 1) };
            }
        }
        all
    }
}

impl Task for Sums<'_> {
    type Out = ();

    fn run<S: Simd>(self, s: S) {
        let (n, width) = (self.ranges.len(), self.width);
        let mut memory = vec![f32::NAN; packed(Sums::SOURCES, width) + LANES];
        let at = memory.as_ptr().align_offset(64);
        let rows: Vec<_> =
            (0..n).map(|r| self.coefficients[r * Sums::SOURCES..].as_ptr()).collect();
        let mut got = self.start.to_vec();
        got.push(f32::NAN);
        let to: Vec<_> = (0..n).map(|r| got.as_mut_ptr().wrapping_add(r * width)).collect();
        let c = Coefficients { rows: &rows, step: 1 };
        // SAFETY: there are as many rows, sources and results, of this width.
        unsafe {
            let from = pack(s, &self.sources(), 0..Sums::SOURCES, width, &mut memory[at..]);
            add_weighted(s, &to, c, from, self.ranges, Some(self.factors), width);
        }
        assert!(got.pop().is_some_and(f32::is_nan), "behind the last result");
        let expected = self.expected(s);
        for (i, (a, b)) in got.iter().zip(&expected).enumerate() {
            assert!(a.to_bits() == b.to_bits(), "{n} x {width}, {i}: {a} and {b}");
        }
    }
}

#[test]
fn a_weighted_sum_is_its_own_whatever_it_is_computed_with() {
    let mut random = Random(13);
    for isa in crate::testing::families().filter_map(Isa::of) {
        for width in [1, 15, 16, 20, 48, 64, 80, 100, 112, 128] {
            for n in [1, 2, 3, 5, 7, 8, 13, 24, 31] {
                let mut ranges = vec![0..0; n];
                for (r, range) in ranges.iter_mut().enumerate() {
                    let end = 1 + random.below(Sums::SOURCES);
                    // Causal ones, those of windows, of chunks that meet nowhere, and of nothing.
                    *range = match (n + width + r / 4) % 4 {
                        0 => 0..(r + 1).min(Sums::SOURCES),
                        1 => r.min(30)..(r + 8).min(Sums::SOURCES),
                        2 => random.below(end)..end,
                        _ => (r % 2) * 20..(r % 2) * 40,
                    };
                }
                // What a result does not see is poison, as it is after memory was used before.
                let mut coefficients = random.floats(n * Sums::SOURCES);
                for (r, range) in ranges.iter().enumerate() {
                    for i in (0..Sums::SOURCES).filter(|i| !range.contains(i)) {
                        coefficients[r * Sums::SOURCES + i] = f32::NAN;
                    }
                }
                let (from, start) =
                    (random.floats(Sums::SOURCES * width), random.floats(n * width));
                let (factors, ranges) = (random.floats(n), &ranges[..]);
                let (coefficients, from) = (&coefficients[..], &from[..]);
                let (factors, start) = (&factors[..], &start[..]);
                isa.run(Sums { from, coefficients, width, ranges, factors, start });
            }
        }
    }
}

/// Dot products of rows with some of a tile's keys.
struct Dots<'a> {
    keys: &'a [f32],
    rows: &'a [f32],
    width: usize,
    seen: std::ops::Range<usize>,
}

impl Task for Dots<'_> {
    type Out = ();

    fn run<S: Simd>(self, s: S) {
        let (width, n) = (self.width, self.rows.len() / self.width);
        let at = |i: usize| self.keys[i * width..].as_ptr();
        let keys: [_; KEYS] = std::array::from_fn(|i| match self.seen.contains(&i) {
            true => at(i),
            false => std::ptr::null(),
        });
        let mut memory = vec![f32::NAN; transposed(KEYS, width) + LANES];
        let start = memory.as_ptr().align_offset(64);
        let vectors = self.seen.start / LANES..self.seen.end.div_ceil(LANES);
        let mut got = vec![0.5; n * KEYS];
        let to: Vec<_> = (0..n)
            .map(|r| got.as_mut_ptr().wrapping_add(r * KEYS + vectors.start * LANES))
            .collect();
        let rows: Vec<_> = (0..n).map(|r| self.rows[r * width..].as_ptr()).collect();
        // SAFETY: there are as many rows and keys, of this width, and results of a tile each.
        unsafe {
            let panels = transpose(s, &keys, self.seen.clone(), width, &mut memory[start..]);
            multiply(s, &to, &rows, panels.skip(vectors.start), width, vectors.len());
        }
        for (i, got) in got.iter().enumerate() {
            let (r, key) = (i / KEYS, i % KEYS);
            if !(vectors.start * LANES..vectors.end * LANES).contains(&key) {
                assert!(*got == 0.5, "a vector of keys that are not seen");
                continue;
            }
            let mut sum = s.zero();
            for d in 0..width {
                let key = if self.seen.contains(&key) { self.keys[key * width + d] } else { 0.0 };
                sum = s.fma(s.splat(self.rows[r * width + d]), s.splat(key), sum);
            }
            let mut expected = 0.0;
            // SAFETY: one element.
            unsafe { s.store_first(&mut expected, sum, 1) };
            assert!(got.to_bits() == expected.to_bits(), "{n} rows of {width}, key {key}");
        }
    }
}

#[test]
fn dot_products_are_chains_whatever_they_are_computed_with() {
    let mut random = Random(14);
    for isa in crate::testing::families().filter_map(Isa::of) {
        for width in [1, 16, 20, 64] {
            for n in [1, 2, 3, 5, 7, 8, 13, 25] {
                for seen in [0..KEYS, 0..16, 0..33, 20..30, 17..KEYS] {
                    let (keys, rows) = (random.floats(KEYS * width), random.floats(n * width));
                    isa.run(Dots { keys: &keys, rows: &rows, width, seen });
                }
            }
        }
    }
}

/// Gradients of keys and values take the queries in rounds of some rows: wherever these end within
/// a sequence, the bits are those of one alone, which is in other rounds.
#[test]
fn rounds_of_rows_change_no_gradient() {
    let (heads, width, rows) = (4, 24, 150);
    let attrs = AttentionAttrs { window: Some(140), ..AttentionAttrs::new(0.2) };
    let op = Op::AttentionBack { attrs, wrt: AttentionOperand::Own };
    for cpu in families() {
        let run = |before: usize, every: usize| {
            let (mut case, mut random) = (Case::new(), Random(12));
            let all = before + rows;
            let mut of = |name: &str, dims: &[usize]| {
                let n: usize = dims.iter().product();
                // The rows before are others, those of the sequence the same.
                let own = random.floats(rows * n);
                let floats = [vec![0.3; before * n], own].concat();
                case.floats(name, &[&[all], dims].concat(), &floats)
            };
            let args = [
                of("q", &[heads, width]),
                of("k", &[1, width]),
                of("v", &[1, width]),
                of("lse", &[heads]),
                of("delta", &[heads]),
                of("dout", &[heads, width]),
            ];
            let [q, k, v, lse, delta, dout] = args;
            let seqs = [0, before as i32, 0, before as i32, rows as i32, 0];
            let seqs = case.ints("seqs", &[2, 3], &seqs);
            let both =
                case.graph.push(op.clone(), &[q, k, v, seqs, lse, delta, dout], "y").unwrap();
            let asked = Every::new(every);
            let out = to_floats(&case.run_in_pieces(&cpu, &[both], &asked).unwrap()[0]);
            assert!(asked.0.into_inner() > 2 * all.div_ceil(KEYS), "several rounds");
            let of = |start: usize| out[(start + before) * width..(start + all) * width].to_vec();
            [of(0), of(all)]
        };
        let alone = run(0, usize::MAX);
        assert!(alone.iter().all(|g| g.chunks(width).all(|row| row.iter().any(|&x| x != 0.0))));
        for (before, every) in [(1, usize::MAX), (30, 1), (77, 3)] {
            assert!(run(before, every) == alone, "{cpu:?}: {before} rows before");
        }
    }
}

/// Logits far apart give weights that no sum of f32 shows: they are 0, and neither they nor their
/// products with small cotangents are subnormal.
#[test]
fn weights_next_to_nothing_are_nothing() {
    let mut s = setups().swap_remove(1);
    (s.heads, s.key_heads, s.width, s.value_width) = (2, 1, 16, 16);
    (s.attrs.scale, s.attrs.window) = (Real::new(1.0), None);
    let mut seq = Sequence::new(&s, 150, &mut Random(15));
    for x in &mut seq.q {
        *x *= 15.0;
    }
    let dout: Vec<f32> = Random(16).floats(150 * 2 * 16).iter().map(|x| x * 1e-8).collect();
    for cpu in families() {
        let part = Part { seq: &seq, from: 0, to: 150 };
        let mut built = build(&cpu, &s, &[part], 16, &mut Random(17));
        let (rows, start) = (built.rows, built.starts[0]);
        let mut all = vec![0.0; rows * 32];
        all[start * 32..][..dout.len()].copy_from_slice(&dout);
        let out = built.forward(s.attrs(true));
        let delta = built.case.floats("delta", &[rows, 2], &vec![0.0; rows * 2]);
        let dout = built.case.floats("dout", &[rows, 2, 16], &all);
        let [q, k, v, _] = built.back(s.attrs(true), delta, dout);
        let results = built.case.run(&cpu, &[out, q, k, v]).unwrap();
        for (i, result) in results.iter().enumerate() {
            let all = to_floats(result);
            let subnormal = all.iter().filter(|x| x.is_subnormal()).count();
            assert_eq!(subnormal, 0, "{cpu:?}, result {i}");
            assert!(all.iter().any(|&x| x != 0.0));
        }
        // As keys of which no row takes notice show, there are such weights.
        let dv = to_floats(&results[3]);
        assert!(dv[start * 16..][..150 * 16].chunks(16).any(|key| key.iter().all(|&x| x == 0.0)));
    }
}

/// Without pages, the rows of a sequence are all there is; bits are the same.
#[test]
fn sequences_without_pages_are_the_same() {
    let mut random = Random(6);
    let s = &setups()[1];
    let seq = Sequence::new(s, 50, &mut random);
    for cpu in families() {
        let part = Part { seq: &seq, from: 0, to: 50 };
        let mut paged = build(&cpu, s, &[part], 16, &mut Random(1));
        let out = paged.forward(s.attrs(true));
        let a = paged.case.run(&cpu, &[out]).unwrap();
        let bare = Setup { attrs: s.attrs(false), ..s.clone() };
        let mut built = build(&cpu, &bare, &[part], 16, &mut Random(1));
        let out = built.forward(bare.attrs);
        assert!(a == built.case.run(&cpu, &[out]).unwrap());
    }
}

/// Central differences in f64 of `sum(dout * out)` along random directions.
#[test]
fn gradients_are_those_of_the_definition() {
    let mut random = Random(7);
    for mut s in setups() {
        s.cache = DType::F32; // the definition differentiates what is stored
        let seq = Sequence::new(&s, 70, &mut random);
        let cached = 20;
        let part = Part { seq: &seq, from: cached, to: 70 };
        let dout = random.floats(70 * s.heads * s.value_width);
        let loss = |seq: &Sequence| -> f64 {
            let skip = cached * s.heads * s.value_width;
            let out = naive(&s, seq).0;
            out.iter().zip(&dout).skip(skip).map(|(o, d)| o * f64::from(*d)).sum()
        };
        let (out, stats) = naive(&s, &seq);
        let mut by_family = Vec::new();
        let drawn = random.next();
        for cpu in families() {
            // The same draws in every family.
            let mut random = Random(drawn);
            let mut built = build(&cpu, &s, &[part], 16, &mut Random(2));
            let (rows, start) = (built.rows, built.starts[0]);
            // The gradient's other operands, poisoned on rows of no sequence.
            let place = |x: &dyn Fn(usize) -> f32, width: usize| -> Vec<f32> {
                let inside = start * width..(start + 50) * width;
                let at = |i: usize| x(i - start * width + cached * width);
                (0..rows * width)
                    .map(|i| if inside.contains(&i) { at(i) } else { f32::NAN })
                    .collect()
            };
            let delta = |i: usize| -> f32 {
                let w = s.value_width;
                let pairs = out[i * w..][..w].iter().zip(&dout[i * w..][..w]);
                pairs.map(|(o, d)| o * f64::from(*d)).sum::<f64>() as f32
            };
            let delta = place(&delta, s.heads);
            let given = place(&|i| dout[i], s.heads * s.value_width);
            let case = &mut built.case;
            let delta = case.floats("delta", &[rows, s.heads], &delta);
            let dout = case.floats("dout", &[rows, s.heads, s.value_width], &given);
            let nodes = built.back(s.attrs(true), delta, dout);
            let bytes = built.case.run(&cpu, &nodes).unwrap();
            let pieces = built.case.run_in_pieces(&cpu, &nodes, &Every::new(2)).unwrap();
            assert!(bytes == pieces);
            by_family.push(bytes.clone());
            let mut grads: Vec<Vec<f32>> = bytes.iter().map(|b| to_floats(b)).collect();
            let lse = grads.pop().unwrap();
            let (inside, expected) = (start * s.heads, &stats[cached * s.heads..]);
            assert_close(&lse[inside..][..expected.len()], expected, 2e-6, "log-sum-exp");
            assert!(lse[..inside].iter().all(|&l| l == 0.0), "of rows of no sequence");
            for (wrt, grad) in grads.iter().enumerate() {
                let width = grad.len() / rows;
                let (before, rest) = grad.split_at(start * width);
                let (own, after) = rest.split_at(50 * width);
                assert!(before.iter().chain(after).all(|&g| g == 0.0));
                for _ in 0..4 {
                    let direction = random.floats(own.len());
                    let moved = |sign: f64| {
                        let eps = sign / 1024.0;
                        let mut seq = Sequence {
                            len: 70,
                            q: seq.q.clone(),
                            k: seq.k.clone(),
                            v: seq.v.clone(),
                        };
                        let x = [&mut seq.q, &mut seq.k, &mut seq.v].into_iter().nth(wrt).unwrap();
                        for (x, d) in x[cached * width..].iter_mut().zip(&direction) {
                            *x += (eps * f64::from(*d)) as f32;
                        }
                        loss(&seq)
                    };
                    let slope = (moved(1.0) - moved(-1.0)) * 512.0;
                    let pairs = own.iter().zip(&direction);
                    let dot: f64 = pairs.map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
                    let norm: f64 = own.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                    assert!(
                        (slope - dot).abs() <= 2e-3 * norm + 1e-5,
                        "{cpu:?} operand {wrt} window {:?}: {slope} and {dot}",
                        s.attrs.window
                    );
                }
            }
        }
        for pair in by_family.chunks(2) {
            assert!(pair[0] == pair[1], "threads change bits");
        }
    }
}

#[test]
fn numbers_out_of_range_are_faults_that_name_them() {
    let cpu = Cpu::new(1, None).unwrap();
    let attempt = |seqs: &[i32], table: &[i32], what: &str| {
        let mut case = Case::new();
        let q = case.floats("q", &[4, 1, 32], &[0.0; 128]);
        let seqs = case.ints("seqs", &[seqs.len() / 3, 3], seqs);
        let pages = case.floats("pages", &[3, 8, 1, 32], &[0.0; 768]);
        let table = case.ints("table", &[table.len() / 2, 2], table);
        let attrs = setups()[0].attrs;
        let args = [q, q, q, seqs, pages, pages, table];
        let out = case.graph.push(Op::Attention(attrs), &args, "attn").unwrap();
        let fault = case.run(&cpu, &[out]).map(|_| ()).unwrap_err();
        assert_eq!(fault.code, graph::Code::IndexOutOfRange);
        assert_eq!(fault.node, "attn");
        assert!(fault.message.contains(what), "{}", fault.message);
    };
    attempt(&[2, 3, 0], &[0, 0], "rows 2..5");
    attempt(&[-1, 1, 0], &[0, 0], "-1");
    attempt(&[0, 1, 17], &[0, 0], "17 cached");
    attempt(&[0, 1, 16], &[0, 3], "page 3");
    attempt(&[0, 1, 1], &[-1, 0], "page -1");
    attempt(&[0, 2, 0, 1, 2, 0], &[0, 0, 0, 0], "row 1");
    attempt(&[2, 2, 0, 3, 1, 0], &[0, 0, 0, 0], "row 3");
    attempt(&[i32::MAX, i32::MAX, i32::MAX], &[0, 0], "rows");
}

#[test]
fn pages_are_dense_and_of_types_that_caches_have() {
    let op = Op::Attention(AttentionAttrs { prefix: true, ..AttentionAttrs::new(0.25) });
    let of = |dtype, dims: &[usize]| Arg::dense(dtype, shape(dims));
    let (rows, ints) = (of(DType::F32, &[4, 1, 32]), |dims: &[usize]| of(DType::I32, dims));
    let pages = of(DType::F16, &[3, 4, 1, 32]);
    let all = [rows, rows, rows, ints(&[1, 3]), pages, pages, ints(&[1, 2])];
    let ask = |args: &[Arg]| crate::kernels::supports(&Call { op: &op, args, out: rows });
    assert!(ask(&all).is_ok());
    for i in 4..7 {
        let mut strided = all;
        strided[i].layout.strides[1] *= 2;
        assert_eq!(ask(&strided), Err(Unsupported::Layout(i)));
        let mut packed = all;
        packed[i].resident = true;
        assert!(matches!(ask(&packed), Err(Unsupported::Kernel(_))), "operand {i}");
        let mut other = all;
        other[i].dtype = DType::Block(gguf::TensorType::Q4_0);
        assert!(matches!(ask(&other), Err(Unsupported::Kernel(_))), "operand {i}");
    }
}

#[test]
fn a_wrong_leaf_is_a_fault_that_names_it() {
    let cpu = Cpu::new(1, None).unwrap();
    let mut g = graph::Graph::new();
    let x = g.leaf("x", shape(&[4]), DType::F32).unwrap();
    let y = g.affine(x, 2.0, 1.0).unwrap();
    let plan = plan(&g, &[y], &cpu).unwrap();
    let mut arena = cpu.arena(plan.arena_bytes).unwrap();
    let bytes = crate::testing::Bytes::new(&[0; 32]);
    let mut run = |leaves: &[Leaf<'_>]| {
        cpu.run(&plan, leaves, &mut *arena, Segment::default(), &()).map(|_| ())
    };
    assert!(run(&[Leaf::Host(&bytes.get()[..16])]).is_ok());
    for leaves in
        [vec![Leaf::Host(&bytes.get()[..15])], vec![Leaf::Host(&bytes.get()[1..17])], vec![]]
    {
        let fault = run(&leaves).unwrap_err();
        assert_eq!((fault.code, &*fault.node), (graph::Code::BadBinding, "x"));
    }
}
