//! Attention against the same thing written in elementary ops, differentiated and evaluated in
//! f64, with a `[tokens, tokens]` matrix and every mask spelled out; and the faults that others
//! have had.

use graph::{AttentionAttrs, DType, Graph, NodeId, Op, Real, Unary, vjp};
use reference::{Leaves, Mode, Value, eval};

use super::KEYS;
use crate::Cpu;
use crate::testing::{Case, Random, devices, shape, to_floats};

/// What a check is about.
#[derive(Clone, Copy)]
struct Setup {
    attrs: AttentionAttrs,
    heads: usize,
    key_heads: usize,
    width: usize,
    value_width: usize,
    /// Lengths of the packed sequences.
    seqs: &'static [usize],
    /// ALiBi's slopes, as ggml's formula gives them by hand.
    slopes: &'static [f64],
}

const PLAIN: Setup = Setup {
    attrs: AttentionAttrs {
        scale: Real::new(0.25),
        window: None,
        chunk: None,
        softcap: None,
        alibi: None,
        sinks: false,
        prefix: false,
    },
    heads: 8,
    key_heads: 2,
    width: 16,
    value_width: 24,
    seqs: &[33, 33, 33, 33],
    slopes: &[],
};

/// A largest bias, and a cap that f32 has exactly.
const EIGHT: Real = Real::new(8.0);
const CAP: Real = Real::new(1.5);

/// Operands of a setup.
struct Data {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sinks: Vec<f32>,
    dout: Vec<f32>,
}

impl Setup {
    fn rows(&self) -> usize {
        self.seqs.iter().sum()
    }

    fn data(&self, seed: u64) -> Data {
        let mut random = Random(seed);
        let rows = self.rows();
        let mut part = |n: usize| random.floats(n).iter().map(|x| x * 2.0).collect::<Vec<_>>();
        Data {
            q: part(rows * self.heads * self.width),
            k: part(rows * self.key_heads * self.width),
            v: part(rows * self.key_heads * self.value_width),
            sinks: part(self.heads),
            dout: part(rows * self.heads * self.value_width),
        }
    }

    /// The output, then the gradients of q, k, v and, if there are any, sinks.
    fn run(&self, cpu: &Cpu, data: &Data) -> Vec<Vec<f32>> {
        let mut case = Case::new();
        let t = self.rows();
        let q = case.floats("q", &[t, self.heads, self.width], &data.q);
        let k = case.floats("k", &[t, self.key_heads, self.width], &data.k);
        let v = case.floats("v", &[t, self.key_heads, self.value_width], &data.v);
        let dout = case.floats("dout", &[t, self.heads, self.value_width], &data.dout);
        let mut entries = Vec::new();
        let mut first = 0;
        for &len in self.seqs {
            entries.extend([first as i32, len as i32, 0]);
            first += len;
        }
        let seqs = case.ints("seqs", &[self.seqs.len(), 3], &entries);
        let (mut args, mut wrt) = (vec![q, k, v, seqs], vec![q, k, v]);
        if self.attrs.sinks {
            let sinks = case.floats("sinks", &[self.heads], &data.sinks);
            args.push(sinks);
            wrt.push(sinks);
        }
        let y = case.graph.push(Op::Attention(self.attrs), &args, "y").unwrap();
        let back = vjp(&case.graph, &[(y, dout)], &wrt).unwrap();
        let outputs: Vec<NodeId> = std::iter::once(y).chain(back.grads).collect();
        case.graph = back.graph;
        let out = case.run(cpu, &outputs).unwrap();
        out.iter().map(|bytes| to_floats(bytes)).collect()
    }

    /// The same, in f64, of elementary ops.
    fn naive(&self, data: &Data) -> Vec<Vec<f64>> {
        let (mut g, mut leaves) = (Graph::new(), Leaves::new());
        let (t, h, hkv) = (self.rows(), self.heads, self.key_heads);
        let (group, d, dv) = (h / hkv, self.width, self.value_width);
        let mut leaf = |g: &mut Graph, name: &str, dims: &[usize], data: Vec<f64>| {
            let node = g.leaf(name, shape(dims), DType::F32).unwrap();
            leaves.insert(node, Value::floats(shape(dims), data).unwrap());
            node
        };
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let q = leaf(&mut g, "q", &[t, h, d], wide(&data.q));
        let k = leaf(&mut g, "k", &[t, hkv, d], wide(&data.k));
        let v = leaf(&mut g, "v", &[t, hkv, dv], wide(&data.v));
        let dout = leaf(&mut g, "dout", &[t, h, dv], wide(&data.dout));
        // Who sees whom, and how far they are apart.
        let (mut seen, mut bias) = (vec![0.0; t * t], vec![0.0; h * t * t]);
        let mut first = 0;
        for &len in self.seqs {
            for i in 0..len {
                for j in 0..=i {
                    let near = self.attrs.window.is_none_or(|w| i - j < w as usize);
                    let same = self.attrs.chunk.is_none_or(|c| i / c as usize == j / c as usize);
                    let at = (first + i) * t + first + j;
                    seen[at] = f64::from(u8::from(near && same));
                    for (head, slope) in self.slopes.iter().enumerate() {
                        bias[head * t * t + at] = -slope * (i - j) as f64;
                    }
                }
            }
            first += len;
        }
        let seen = leaf(&mut g, "seen", &[t, t], seen);
        let bias = leaf(&mut g, "bias", &[hkv, group, t, t], bias);
        let sinks = leaf(&mut g, "sinks", &[h], wide(&data.sinks));

        let heads = |g: &mut Graph, x: NodeId, n: usize, w: usize, groups: usize| {
            let x = g.permute(x, &[1, 0, 2]).unwrap();
            g.reshape(x, &[n / groups, groups, t, w]).unwrap()
        };
        let (qh, kh) = (heads(&mut g, q, h, d, group), heads(&mut g, k, hkv, d, 1));
        let vh = heads(&mut g, v, hkv, dv, 1);
        let op = Op::MatMul { ta: false, tb: true };
        let mut z = g.push(op, &[qh, kh], "logits").unwrap();
        z = g.affine(z, self.attrs.scale.get(), 0.0).unwrap();
        if let Some(cap) = self.attrs.softcap {
            let cap = leaf(&mut g, "cap", &[1], vec![f64::from(cap.get())]);
            z = g.div(z, cap).unwrap();
            z = g.unary(Unary::Tanh, z).unwrap();
            z = g.mul(z, cap).unwrap();
        }
        z = g.add(z, bias).unwrap();
        let e = g.unary(Unary::Exp, z).unwrap();
        let e = g.mul(e, seen).unwrap();
        let mut sum = g.sum(e, &[3]).unwrap();
        if self.attrs.sinks {
            let sink = g.unary(Unary::Exp, sinks).unwrap();
            let sink = g.reshape(sink, &[hkv, group, 1, 1]).unwrap();
            sum = g.add(sum, sink).unwrap();
        }
        let p = g.div(e, sum).unwrap();
        let y = g.push(Op::MatMul { ta: false, tb: false }, &[p, vh], "y").unwrap();
        let y = g.reshape(y, &[h, t, dv]).unwrap();
        let y = g.permute(y, &[1, 0, 2]).unwrap();
        let mut wrt = vec![q, k, v];
        wrt.extend(self.attrs.sinks.then_some(sinks));
        let back = vjp(&g, &[(y, dout)], &wrt).unwrap();
        let outputs: Vec<NodeId> = std::iter::once(y).chain(back.grads).collect();
        let values = eval(&back.graph, &leaves, &outputs, Mode::Smooth).unwrap();
        values.iter().map(|v| v.as_floats().unwrap().to_vec()).collect()
    }

    /// Compares all outputs and gradients, in every family and at 1 and 2 threads.
    fn check(&self, what: &str, bound: f64) {
        let data = self.data(3);
        let expected = self.naive(&data);
        let mut by_threads: Vec<Vec<Vec<f32>>> = Vec::new();
        for cpu in devices() {
            let got = self.run(&cpu, &data);
            assert_eq!(got.len(), expected.len());
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let rms = expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64;
                assert!(rms > 1e-6, "{what}: output {i} is all zeros");
                for (got, expected) in got.iter().zip(expected) {
                    let error = (f64::from(*got) - expected).abs();
                    assert!(
                        error <= bound * (rms.sqrt() + expected.abs()),
                        "{what}, {cpu:?}, output {i}: {got}, naive attention has {expected}"
                    );
                }
            }
            by_threads.push(got);
        }
        for pair in by_threads.chunks(2) {
            assert!(pair[0] == pair[1], "{what}: threads change bits");
        }
    }
}

/// "ggml_flash_attn_ext() not yet supported" in finetune: the backward pass of tiles against
/// naive attention, on 4 x 33 tokens, 4 query heads for each key head, a window of 8.
#[test]
fn f05_flash_attention_differentiates() {
    let attrs = AttentionAttrs { window: Some(8), ..PLAIN.attrs };
    Setup { attrs, ..PLAIN }.check("a window of 8", 1e-5);
    Setup { attrs, seqs: &[KEYS + 1, 2 * KEYS + 2], ..PLAIN }.check("as much, longer", 1e-5);
}

/// `ne2 == ne02`: a change for grouped queries broke the backward pass of all others.
#[test]
fn f07_any_number_of_key_heads_differentiates() {
    for key_heads in [8, 2, 1] {
        Setup { key_heads, ..PLAIN }.check(&format!("8 heads on {key_heads}"), 1e-5);
    }
}

#[test]
fn every_attribute_is_what_naive_attention_has() {
    // ggml's slopes for a largest bias of 8: of 8 heads, and of 12, where 4 are in between.
    let of_8: &[f64] = &[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625];
    let of_12: &[f64] = &[
        0.5,
        0.25,
        0.125,
        0.0625,
        0.03125,
        0.015625,
        0.0078125,
        0.00390625,
        std::f64::consts::FRAC_1_SQRT_2,
        std::f64::consts::FRAC_1_SQRT_2 / 2.0,
        std::f64::consts::FRAC_1_SQRT_2 / 4.0,
        std::f64::consts::FRAC_1_SQRT_2 / 8.0,
    ];
    let plain = PLAIN.attrs;
    let (softcap, alibi) = (Some(CAP), Some(EIGHT));
    // One key more than two tiles of them, one key, one less than a tile, and a tile.
    let long = Setup { seqs: &[2 * KEYS + 1, 1, KEYS - 1, KEYS], ..PLAIN };
    let all =
        AttentionAttrs { window: Some(9), chunk: Some(16), softcap, alibi, sinks: true, ..plain };
    let far = AttentionAttrs { window: Some(KEYS as u32 + 9), chunk: Some(100), ..all };
    for (what, attrs, heads, slopes) in [
        ("a cap", AttentionAttrs { softcap, ..plain }, 8, &[][..]),
        ("chunks of 8", AttentionAttrs { chunk: Some(8), ..plain }, 8, &[]),
        ("chunks of 33", AttentionAttrs { chunk: Some(33), ..plain }, 8, &[]),
        ("chunks of 100", AttentionAttrs { chunk: Some(100), ..plain }, 8, &[]),
        ("a window over tiles", AttentionAttrs { window: Some(70), ..plain }, 8, &[]),
        ("sinks", AttentionAttrs { sinks: true, ..plain }, 8, &[]),
        ("biases", AttentionAttrs { alibi, ..plain }, 8, of_8),
        ("biases of 12 heads", AttentionAttrs { alibi, ..plain }, 12, of_12),
        ("everything", all, 12, of_12),
        ("everything over tiles", far, 12, of_12),
    ] {
        Setup { attrs, heads, slopes, ..long }.check(what, 1e-5);
    }
}

/// What is asked for changes the result: no term is dropped on the way.
#[test]
fn every_attribute_changes_every_gradient() {
    let plain = PLAIN.attrs;
    let setup = Setup { seqs: &[40], ..PLAIN };
    let data = setup.data(4);
    let cpu = Cpu::new(1, None).unwrap();
    let without = setup.run(&cpu, &data);
    for attrs in [
        AttentionAttrs { window: Some(9), ..plain },
        AttentionAttrs { chunk: Some(16), ..plain },
        AttentionAttrs { softcap: Some(CAP), ..plain },
        AttentionAttrs { alibi: Some(EIGHT), ..plain },
        AttentionAttrs { sinks: true, ..plain },
    ] {
        let with = Setup { attrs, ..setup }.run(&cpu, &data);
        for (i, (a, b)) in without.iter().zip(&with).enumerate() {
            assert!(a != b, "output {i} does not change with {attrs:?}");
        }
    }
}

/// An assertion on `max_bias == 0` once kept models from training: such a bias is none.
#[test]
fn bug_12_a_largest_bias_of_0_is_no_bias() {
    let setup = Setup { seqs: &[40, 5], ..PLAIN };
    let zero = AttentionAttrs { alibi: Some(Real::new(0.0)), ..PLAIN.attrs };
    let data = setup.data(5);
    for cpu in devices() {
        let (a, b) = (setup.run(&cpu, &data), Setup { attrs: zero, ..setup }.run(&cpu, &data));
        assert!(a == b);
    }
}

/// Queries that were permuted and then cut by tokens once aborted three ops later.
#[test]
fn bug_25_queries_permuted_and_then_cut_are_those_cut_and_then_permuted() {
    let (rows, heads, width) = (30, 4, 16);
    let (from, len) = (7, 20);
    let random = |seed| Random(seed).floats(rows * heads * width);
    let attrs = AttentionAttrs { chunk: Some(8), ..PLAIN.attrs };
    for cpu in devices() {
        let run = |permuted_first: bool| {
            let mut case = Case::new();
            let q = case.floats("q", &[heads, rows, width], &random(1));
            let k = case.floats("k", &[len, heads, width], &random(2)[..len * heads * width]);
            let seqs = case.ints("seqs", &[1, 3], &[0, len as i32, 0]);
            let dout = case.floats("dout", &[len, heads, width], &random(3)[..len * heads * width]);
            let g = &mut case.graph;
            let cut = if permuted_first {
                let q = g.permute(q, &[1, 0, 2]).unwrap();
                g.slice(q, 0, from, len).unwrap()
            } else {
                let q = g.slice(q, 1, from, len).unwrap();
                g.permute(q, &[1, 0, 2]).unwrap()
            };
            let y = g.push(Op::Attention(attrs), &[cut, k, k, seqs], "y").unwrap();
            let back = vjp(g, &[(y, dout)], &[q, k]).unwrap();
            let outputs = [&[y][..], &back.grads].concat();
            case.graph = back.graph;
            case.run(&cpu, &outputs).unwrap()
        };
        let (a, b) = (run(true), run(false));
        assert!(a == b);
        // Rows that were cut away have a gradient of exactly 0, the others have one.
        let dq = to_floats(&a[1]);
        for (i, row) in dq.chunks(width).enumerate() {
            let inside = (from..from + len).contains(&(i % rows));
            let first = i % rows >= from && (i % rows - from) % 8 == 0;
            assert!(row.iter().all(|&x| x == 0.0) != inside || first, "row {i}");
        }
    }
}

/// Rows of no sequence hold anything, their cotangents too: nothing of it reaches a gradient.
#[test]
fn bug_15_rows_of_no_sequence_poison_nothing() {
    let attrs = AttentionAttrs { sinks: true, ..PLAIN.attrs };
    let (rows, heads, width) = (12, 2, 16);
    for cpu in devices() {
        let run = |junk: f32| {
            let mut case = Case::new();
            let mut random = Random(8);
            let mut part = |name: &str| {
                let mut x = random.floats(rows * heads * width);
                x[9 * heads * width..].fill(junk);
                case.floats(name, &[rows, heads, width], &x)
            };
            let (q, k, v, dout) = (part("q"), part("k"), part("v"), part("dout"));
            let seqs = case.ints("seqs", &[1, 3], &[0, 9, 0]);
            let sinks = case.floats("sinks", &[heads], &[100.0, 0.5]);
            let y = case.graph.push(Op::Attention(attrs), &[q, k, v, seqs, sinks], "y").unwrap();
            let back = vjp(&case.graph, &[(y, dout)], &[q, k, v, sinks]).unwrap();
            let outputs = [&[y][..], &back.grads].concat();
            case.graph = back.graph;
            case.run(&cpu, &outputs).unwrap()
        };
        let clean = run(0.0);
        for junk in [f32::NAN, f32::INFINITY, 3e38] {
            assert!(clean == run(junk), "{junk} in rows of no sequence shows");
        }
        assert!(clean.iter().all(|x| to_floats(x).iter().all(|x| x.is_finite())));
    }
}

/// A window walked in two chunks: what the second sends back to the cached keys and values of the
/// first, added to the first's own, is the whole window's gradient.
#[test]
fn a_chunk_sends_back_to_the_pages_of_earlier_ones() {
    let attrs = AttentionAttrs {
        window: Some(30),
        softcap: Some(CAP),
        alibi: Some(EIGHT),
        sinks: true,
        ..PLAIN.attrs
    };
    let setup = Setup { attrs, seqs: &[50], ..PLAIN };
    let data = setup.data(6);
    let (h, hkv, d, dv) = (setup.heads, setup.key_heads, setup.width, setup.value_width);
    let (cut, page) = (29, 4);
    for cpu in devices() {
        let whole = setup.run(&cpu, &data);
        let mut parts: Vec<Vec<Vec<f32>>> = Vec::new();
        for (from, to) in [(0, cut), (cut, 50)] {
            let mut case = Case::new();
            let n = to - from;
            let at = |x: &[f32], w: usize| x[from * w..to * w].to_vec();
            let q = case.floats("q", &[n, h, d], &at(&data.q, h * d));
            let k = case.floats("k", &[n, hkv, d], &at(&data.k, hkv * d));
            let v = case.floats("v", &[n, hkv, dv], &at(&data.v, hkv * dv));
            let dout = case.floats("dout", &[n, h, dv], &at(&data.dout, h * dv));
            let seqs = case.ints("seqs", &[1, 3], &[0, n as i32, from as i32]);
            let sinks = case.floats("sinks", &[h], &data.sinks);
            // Pages in reverse, the last of them begun; what is not filled is poison.
            let pages = cut.div_ceil(page);
            let fill = |x: &[f32], w: usize| {
                let mut all = vec![f32::NAN; pages * page * w];
                for p in 0..cut {
                    let slot = (pages - 1 - p / page) * page + p % page;
                    all[slot * w..][..w].copy_from_slice(&x[p * w..][..w]);
                }
                all
            };
            let k_pages = case.floats("k_pages", &[pages, page, hkv, d], &fill(&data.k, hkv * d));
            let v_pages = case.floats("v_pages", &[pages, page, hkv, dv], &fill(&data.v, hkv * dv));
            let table: Vec<i32> = (0..pages as i32).rev().collect();
            let table = case.ints("table", &[1, pages], &table);
            let attrs = AttentionAttrs { prefix: true, ..attrs };
            let args = [q, k, v, seqs, sinks, k_pages, v_pages, table];
            let y = case.graph.push(Op::Attention(attrs), &args, "y").unwrap();
            let wrt = [q, k, v, sinks, k_pages, v_pages];
            let back = vjp(&case.graph, &[(y, dout)], &wrt).unwrap();
            let outputs = [&[y][..], &back.grads].concat();
            case.graph = back.graph;
            parts.push(case.run(&cpu, &outputs).unwrap().iter().map(|b| to_floats(b)).collect());
        }
        let [first, second] = &parts[..] else { panic!("two chunks") };
        // No one of the first chunk reads a page.
        assert!(first[5].iter().chain(&first[6]).all(|&x| x == 0.0));
        for (part, pages, w) in [(2, 5, hkv * d), (3, 6, hkv * dv)] {
            let (own, sent) = (&first[part], &second[pages]);
            let count = cut.div_ceil(page);
            for p in 0..cut {
                let slot = (count - 1 - p / page) * page + p % page;
                for i in 0..w {
                    let sum = own[p * w + i] + sent[slot * w + i];
                    let expected = whole[part][p * w + i];
                    assert!((sum - expected).abs() <= 2e-5 * (1.0 + expected.abs()));
                }
            }
            // Slots that are not filled get exactly 0.
            let begun = (cut % page) * w;
            assert!(sent[begun..page * w].iter().all(|&x| x == 0.0));
            assert!(sent[..begun].iter().any(|&x| x != 0.0));
        }
        for (i, expected) in whole[4].iter().enumerate() {
            let sum = first[4][i] + second[4][i];
            assert!((sum - expected).abs() <= 2e-5 * (1.0 + expected.abs()));
        }
        // Queries see what they saw: P5.
        let rows = [first[0].clone(), second[0].clone()].concat();
        assert!(rows == whole[0]);
    }
}

/// A page of two sequences gets what both send, the first sequence's before the second's: as
/// if each had its own, added in that order, to rounding.
#[test]
fn pages_of_several_sequences_add_up() {
    let attrs = AttentionAttrs { prefix: true, ..PLAIN.attrs };
    let q8 = DType::Block(gguf::TensorType::Q8_0);
    let (rows, heads, width, page) = (10, 4, 32, 8);
    for cpu in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16, q8] {
            let mut random = Random(9);
            let x: Vec<Vec<f32>> = (0..4).map(|_| random.floats(rows * heads * width)).collect();
            let pages = random.floats(page * heads * width);
            let run = |seqs: &[i32]| {
                let mut case = Case::new();
                let of = |case: &mut Case, name: &str, i: usize| {
                    case.floats(name, &[rows, heads, width], &x[i])
                };
                let (q, k) = (of(&mut case, "q", 0), of(&mut case, "k", 1));
                let (v, dout) = (of(&mut case, "v", 2), of(&mut case, "dout", 3));
                let count = seqs.len() / 3;
                let seqs = case.ints("seqs", &[count, 3], seqs);
                let table = case.ints("table", &[count, 1], &vec![0; count]);
                let mut store = Case::new();
                let p = store.floats("p", &[page, heads, width], &pages);
                let p = store.graph.cast(p, dtype).unwrap();
                let bytes = match dtype {
                    DType::F32 => pages.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    _ => store.run(&cpu, &[p]).unwrap().remove(0),
                };
                let stored = case.bytes("pages", dtype, &[1, page, heads, width], &bytes);
                let args = [q, k, v, seqs, stored, stored, table];
                let y = case.graph.push(Op::Attention(attrs), &args, "y").unwrap();
                let back = vjp(&case.graph, &[(y, dout)], &[stored]).unwrap();
                case.graph = back.graph;
                to_floats(&case.run(&cpu, &back.grads).unwrap()[0])
            };
            let (a, b) = (run(&[1, 4, 8]), run(&[5, 3, 6]));
            let both = run(&[1, 4, 8, 5, 3, 6]);
            for ((a, b), both) in a.iter().zip(&b).zip(&both) {
                assert!((a + b - both).abs() <= 1e-5 * (1.0 + both.abs()), "{dtype}");
            }
            assert!(a.iter().zip(&both).any(|(a, both)| a != both));
            // The order is that of the sequences, not of their rows.
            if dtype == DType::F32 {
                assert!(both != run(&[5, 3, 6, 1, 4, 8]));
            }
        }
    }
}
