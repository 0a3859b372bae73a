//! Promises of the recurrences: bits that do not depend on chunks, packing, threads or layout.

use std::ops::Range;

use graph::{Code, GatedDeltaAttrs, KeyHeads, NodeId, Op, vjp};

use super::{QUICK, Sequence, Walk};
use crate::Cpu;
use crate::simd::LANES;
use crate::testing::{Case, Every, Random, assert_close, devices, to_floats};

/// What a dimension of an operand counts.
#[derive(Copy, Clone, PartialEq)]
enum By {
    Row,
    Sequence,
    Nothing,
}

/// An operand: what it is by, the rest of its shape, and where its elements are.
struct Kind {
    by: By,
    dims: Vec<usize>,
    from: f32,
    to: f32,
}

fn kind(by: By, dims: &[usize], from: f32, to: f32) -> Kind {
    Kind { by, dims: dims.to_vec(), from, to }
}

impl Kind {
    fn size(&self) -> usize {
        self.dims.iter().product()
    }
}

/// Gives the outputs and the exit states of some operands; the last are the sequences.
type Build = Box<dyn Fn(&mut Case, &[NodeId]) -> (NodeId, NodeId)>;

struct Recurrence {
    name: &'static str,
    kinds: Vec<Kind>,
    build: Build,
    /// Which operand is the entry state.
    state: usize,
    /// Elements of an output row.
    width: usize,
}

fn conv(channels: usize, taps: usize) -> Recurrence {
    Recurrence {
        name: "SsmConv",
        kinds: vec![
            kind(By::Row, &[channels], -1.0, 1.0),
            kind(By::Nothing, &[channels, taps], -1.0, 1.0),
            kind(By::Sequence, &[taps - 1, channels], -1.0, 1.0),
        ],
        build: Box::new(|c, x| {
            let [x, w, state, seqs]: [NodeId; 4] = x.try_into().unwrap();
            let y = c.graph.ssm_conv(x, w, state, seqs, "y").unwrap();
            (y, c.graph.ssm_conv_state(x, state, seqs, "exit").unwrap())
        }),
        state: 2,
        width: channels,
    }
}

fn scan(heads: usize, width: usize, groups: usize, states: usize, decays: usize) -> Recurrence {
    Recurrence {
        name: "SsmScan",
        kinds: vec![
            kind(By::Row, &[heads, width], -1.0, 1.0),
            kind(By::Row, &[heads], 0.05, 0.6),
            kind(By::Nothing, &[heads, decays], -1.5, -0.1),
            kind(By::Row, &[groups, states], -1.0, 1.0),
            kind(By::Row, &[groups, states], -1.0, 1.0),
            kind(By::Sequence, &[heads, width, states], -1.0, 1.0),
        ],
        build: Box::new(|c, x| c.graph.ssm_scan(x.try_into().unwrap(), "y").unwrap()),
        state: 5,
        width: heads * width,
    }
}

fn delta(
    key_heads: usize,
    heads: usize,
    keys: usize,
    width: usize,
    rows_decay: bool,
    sharing: KeyHeads,
) -> Recurrence {
    let most = 1.5 / (keys as f32).sqrt();
    let decays = if rows_decay { vec![heads, keys] } else { vec![heads] };
    let attrs = GatedDeltaAttrs { scale: (keys as f32).sqrt().recip().into(), key_heads: sharing };
    Recurrence {
        name: "GatedDeltaRule",
        kinds: vec![
            kind(By::Row, &[key_heads, keys], -1.0, 1.0),
            kind(By::Row, &[key_heads, keys], -most, most),
            kind(By::Row, &[heads, width], -1.0, 1.0),
            kind(By::Row, &decays, -0.8, -0.01),
            kind(By::Row, &[heads], 0.1, 0.9),
            kind(By::Sequence, &[heads, keys, width], -1.0, 1.0),
        ],
        build: Box::new(move |c, x| {
            c.graph.gated_delta_rule(attrs, x.try_into().unwrap(), "y").unwrap()
        }),
        state: 5,
        width: heads * width,
    }
}

fn all() -> Vec<Recurrence> {
    use KeyHeads::{Blocks, Cycle};
    vec![
        conv(21, 4),
        conv(300, 3),
        scan(18, 1, 1, 16, 16),
        scan(6, 5, 3, 20, 1),
        scan(40, 1, 2, 5, 5),
        scan(4, 33, 1, 7, 1),
        delta(2, 4, 16, 32, false, Cycle),
        delta(2, 6, 9, 21, true, Blocks),
        delta(1, 1, 33, 5, false, Blocks),
        delta(3, 3, 17, 16, true, Cycle),
    ]
}

/// Values for a recurrence, and cotangents of its results.
#[derive(Clone)]
struct Values {
    rows: usize,
    seqs: Vec<[i32; 3]>,
    operands: Vec<Vec<f32>>,
    dy: Vec<f32>,
    d_exit: Vec<f32>,
}

/// What came out.
#[derive(Clone, PartialEq)]
struct Results {
    y: Vec<u32>,
    exit: Vec<u32>,
    grads: Vec<Vec<u32>>,
}

fn bits(bytes: &[u8]) -> Vec<u32> {
    to_floats(bytes).iter().map(|x| x.to_bits()).collect()
}

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|&b| f32::from_bits(b)).collect()
}

impl Values {
    fn random(r: &Recurrence, rows: usize, seqs: &[[i32; 3]], random: &mut Random) -> Values {
        let mut fill = |n: usize, from: f32, to: f32| -> Vec<f32> {
            (0..n).map(|_| from + (to - from) * (random.unit() + 1.0) / 2.0).collect()
        };
        let count = |by: By| match by {
            By::Row => rows,
            By::Sequence => seqs.len(),
            By::Nothing => 1,
        };
        let state = r.kinds[r.state].size();
        Values {
            rows,
            seqs: seqs.to_vec(),
            operands: r.kinds.iter().map(|k| fill(count(k.by) * k.size(), k.from, k.to)).collect(),
            dy: fill(rows * r.width, -1.0, 1.0),
            d_exit: fill(seqs.len() * state, -1.0, 1.0),
        }
    }

    /// Some rows as one sequence, from the state of sequence `of`.
    fn part(&self, r: &Recurrence, rows: Range<usize>, of: usize) -> Values {
        let cut = |x: &[f32], by: By, size: usize| match by {
            By::Row => x[rows.start * size..rows.end * size].to_vec(),
            By::Sequence => x[of * size..(of + 1) * size].to_vec(),
            By::Nothing => x.to_vec(),
        };
        let operands = r.kinds.iter().zip(&self.operands);
        Values {
            rows: rows.len(),
            seqs: vec![[0, rows.len() as i32, 0]],
            operands: operands.map(|(k, x)| cut(x, k.by, k.size())).collect(),
            dy: cut(&self.dy, By::Row, r.width),
            d_exit: cut(&self.d_exit, By::Sequence, r.kinds[r.state].size()),
        }
    }

    /// The graph: its outputs are `y`, the exit states and, with `grads`, all gradients.
    fn graph(&self, r: &Recurrence, grads: bool) -> (Case, Vec<NodeId>) {
        let mut c = Case::new();
        let mut nodes = Vec::new();
        for (i, (k, x)) in r.kinds.iter().zip(&self.operands).enumerate() {
            let mut dims = match k.by {
                By::Row => vec![self.rows],
                By::Sequence => vec![self.seqs.len()],
                By::Nothing => vec![],
            };
            dims.extend(&k.dims);
            nodes.push(c.floats(&format!("x{i}"), &dims, x));
        }
        nodes.push(c.ints("seqs", &[self.seqs.len(), 3], self.seqs.as_flattened()));
        let (y, exit) = (r.build)(&mut c, &nodes);
        let mut outputs = vec![y, exit];
        if grads {
            self.differentiate(&mut c, &mut outputs, &nodes[..r.kinds.len()]);
        }
        (c, outputs)
    }

    fn differentiate(&self, c: &mut Case, outputs: &mut Vec<NodeId>, wrt: &[NodeId]) {
        let dims = |c: &Case, x: NodeId| c.graph.node(x).shape.dims().to_vec();
        let (y_dims, exit_dims) = (dims(c, outputs[0]), dims(c, outputs[1]));
        let dy = c.floats("dy", &y_dims, &self.dy);
        let d_exit = c.floats("d exit", &exit_dims, &self.d_exit);
        let back = vjp(&c.graph, &[(outputs[0], dy), (outputs[1], d_exit)], wrt).unwrap();
        c.graph = back.graph;
        outputs.extend(back.grads);
    }

    fn run(&self, r: &Recurrence, cpu: &Cpu, grads: bool) -> Results {
        let (c, outputs) = self.graph(r, grads);
        let out = c.run(cpu, &outputs).unwrap();
        let all: Vec<Vec<u32>> = out.iter().map(|bytes| bits(bytes)).collect();
        Results { y: all[0].clone(), exit: all[1].clone(), grads: all[2..].to_vec() }
    }
}

const PACKED: [[i32; 3]; 5] = [[12, 6, 9], [1, 10, 0], [20, 0, 3], [19, 1, 0], [20, 17, 2]];
const ROWS: usize = 39;

/// P5: a prompt in chunks, each from the exit state of the one before, has the bits of the whole
/// one; and the gradients of the chunks in reverse, each seeded with what the next gave its entry
/// state, have the bits of the whole backward pass.
#[test]
fn p5_chunks_have_the_bits_of_the_whole() {
    let mut random = Random(1);
    for r in all() {
        let rows = 45;
        let whole = Values::random(&r, rows, &[[0, rows as i32, 0]], &mut random);
        for cpu in devices() {
            let expected = whole.run(&r, &cpu, true);
            assert!(floats(&expected.y).iter().all(|x| x.is_finite() && *x != 0.0), "{}", r.name);
            for cuts in [vec![0, 1, 2, 3, 45], vec![0, 16, 32, 45], vec![0, 44, 45]] {
                let mut chunks = Vec::new();
                let mut entry = whole.operands[r.state].clone();
                for cut in cuts.windows(2) {
                    let mut chunk = whole.part(&r, cut[0]..cut[1], 0);
                    chunk.operands[r.state] = entry;
                    let out = chunk.run(&r, &cpu, false);
                    assert!(out.y == expected.y[cut[0] * r.width..cut[1] * r.width], "{}", r.name);
                    entry = floats(&out.exit);
                    chunks.push((cut[0]..cut[1], chunk));
                }
                assert!(entry == floats(&expected.exit), "{} on {cpu:?}", r.name);
                let mut d_exit = whole.d_exit.clone();
                for (rows, mut chunk) in chunks.into_iter().rev() {
                    chunk.d_exit = d_exit;
                    let out = chunk.run(&r, &cpu, true);
                    for (i, k) in r.kinds.iter().enumerate().filter(|(_, k)| k.by == By::Row) {
                        let range = rows.start * k.size()..rows.end * k.size();
                        let (got, whole) = (&out.grads[i], &expected.grads[i][range]);
                        // What two ops give one operand is added, which is another order here.
                        if r.name == "SsmConv" {
                            let whole: Vec<f64> =
                                floats(whole).iter().map(|&x| f64::from(x)).collect();
                            assert_close(&floats(got), &whole, 1e-5, r.name);
                        } else {
                            assert!(got == whole, "{}: operand {i} on {cpu:?}", r.name);
                        }
                    }
                    d_exit = floats(&out.grads[r.state]);
                }
            }
        }
    }
}

/// FIELD-REPORTS F37 and F38: packed sequences leak neither state nor convolution window; each
/// has the results and gradients that it has alone, bit for bit.
#[test]
fn f38_packed_sequences_are_as_if_alone() {
    let mut random = Random(2);
    for r in all() {
        let packed = Values::random(&r, ROWS, &PACKED, &mut random);
        for cpu in devices() {
            let got = packed.run(&r, &cpu, true);
            let mut sums: Vec<Vec<f64>> = r.kinds.iter().map(|k| vec![0.0; k.size()]).collect();
            for (of, s) in PACKED.iter().enumerate() {
                let rows = s[0] as usize..(s[0] + s[1]) as usize;
                let alone = packed.part(&r, rows.clone(), of).run(&r, &cpu, true);
                let state = r.kinds[r.state].size();
                assert!(got.y[rows.start * r.width..rows.end * r.width] == alone.y, "{}", r.name);
                assert!(got.exit[of * state..(of + 1) * state] == alone.exit, "{}", r.name);
                for (i, k) in r.kinds.iter().enumerate() {
                    let range = match k.by {
                        By::Row => rows.start * k.size()..rows.end * k.size(),
                        By::Sequence => of * k.size()..(of + 1) * k.size(),
                        By::Nothing => {
                            let grads = floats(&alone.grads[i]);
                            sums[i].iter_mut().zip(grads).for_each(|(s, g)| *s += f64::from(g));
                            continue;
                        }
                    };
                    let same = got.grads[i][range] == alone.grads[i];
                    assert!(same, "{}: operand {i}, sequence {of} on {cpu:?}", r.name);
                }
            }
            for (i, k) in r.kinds.iter().enumerate().filter(|(_, k)| k.by == By::Nothing) {
                assert!(k.size() > 0);
                assert_close(&floats(&got.grads[i]), &sums[i], 1e-5, r.name);
            }
        }
    }
}

/// FIELD-REPORTS F38: padding in front, between and behind changes nothing, whatever it holds,
/// and receives exactly zero.
#[test]
fn f38_padding_is_never_read() {
    let mut random = Random(3);
    let none = |row: usize| !PACKED.iter().any(|s| (s[0]..s[0] + s[1]).contains(&(row as i32)));
    for r in all() {
        let clean = Values::random(&r, ROWS, &PACKED, &mut random);
        let mut dirty = clean.clone();
        for (k, x) in r.kinds.iter().zip(&mut dirty.operands).filter(|(k, _)| k.by == By::Row) {
            for row in (0..ROWS).filter(|&row| none(row)) {
                x[row * k.size()..(row + 1) * k.size()].fill(f32::NAN);
            }
        }
        for row in (0..ROWS).filter(|&row| none(row)) {
            dirty.dy[row * r.width..(row + 1) * r.width].fill(f32::INFINITY);
        }
        for cpu in devices() {
            let got = dirty.run(&r, &cpu, true);
            assert!(got == clean.run(&r, &cpu, true), "{} on {cpu:?}", r.name);
            for row in (0..ROWS).filter(|&row| none(row)) {
                assert!(got.y[row * r.width..(row + 1) * r.width].iter().all(|&b| b == 0));
                for (i, k) in r.kinds.iter().enumerate().filter(|(_, k)| k.by == By::Row) {
                    let grads = &got.grads[i][row * k.size()..(row + 1) * k.size()];
                    assert!(grads.iter().all(|&b| b == 0), "{}: operand {i}", r.name);
                }
            }
        }
    }
}

/// A sequence that is not finite stays by itself.
#[test]
fn f37_a_bad_sequence_does_not_spread() {
    let mut random = Random(4);
    for r in all() {
        let mut values = Values::random(&r, ROWS, &PACKED, &mut random);
        let rows = 12..18; // of sequence 0
        let size = r.kinds[0].size();
        values.operands[0][rows.start * size..rows.end * size].fill(f32::NAN);
        for cpu in devices() {
            let out = values.run(&r, &cpu, true);
            for (row, y) in floats(&out.y).chunks(r.width).enumerate() {
                let bad = y.iter().any(|y| y.is_nan());
                assert_eq!(bad, rows.contains(&row), "{}: row {row}", r.name);
            }
            let state = r.kinds[r.state].size();
            let others = &floats(&out.exit)[state..];
            assert!(others.iter().all(|x| x.is_finite()), "{}", r.name);
        }
    }
}

/// P6: any number of threads, in pieces or not.
#[test]
fn p6_results_do_not_depend_on_threads() {
    let mut random = Random(5);
    for r in all() {
        let values = Values::random(&r, ROWS, &PACKED, &mut random);
        let (c, outputs) = values.graph(&r, true);
        for cpus in devices().chunks(2) {
            let one = c.run(&cpus[0], &outputs).unwrap();
            for stop in 1..4 {
                let two = c.run_in_pieces(&cpus[1], &outputs, &Every::new(stop)).unwrap();
                assert!(one == two, "{} on {:?}", r.name, cpus[0]);
            }
        }
    }
}

/// A sequence of no rows passes its state through, and its cotangent back.
#[test]
fn no_rows_pass_the_state_through() {
    let mut random = Random(6);
    for r in all() {
        for (rows, seqs) in [(0, vec![[0, 0, 0], [0, 0, 5]]), (4, vec![[4, 0, 0], [0, 4, 0]])] {
            let values = Values::random(&r, rows, &seqs, &mut random);
            for cpu in devices() {
                let out = values.run(&r, &cpu, true);
                let state = r.kinds[r.state].size();
                assert!(floats(&out.exit)[..state] == values.operands[r.state][..state]);
                assert!(floats(&out.grads[r.state])[..state] == values.d_exit[..state]);
            }
        }
    }
}

/// PRIOR-ART C6: the initial state was overwritten by the exit state before the backward pass
/// read it. Here the exit state is a value of its own, and the entry state reads the same
/// before, between and after.
#[test]
fn c6_the_entry_state_is_not_written() {
    let mut random = Random(7);
    for r in all() {
        let values = Values::random(&r, 11, &[[0, 11, 0]], &mut random);
        for cpu in devices() {
            // The entry state is computed, so that it lies in the arena beside the exit state.
            let mut c = Case::new();
            let mut nodes = Vec::new();
            for (i, (k, x)) in r.kinds.iter().zip(&values.operands).enumerate() {
                let mut dims = match k.by {
                    By::Row => vec![11],
                    By::Sequence => vec![1],
                    By::Nothing => vec![],
                };
                dims.extend(&k.dims);
                nodes.push(c.floats(&format!("x{i}"), &dims, x));
            }
            let entry = c.graph.affine(nodes[r.state], 1.0, 0.0).unwrap();
            nodes[r.state] = entry;
            nodes.push(c.ints("seqs", &[1, 3], &[0, 11, 0]));
            let (y, exit) = (r.build)(&mut c, &nodes);
            let mut outputs = vec![y, exit];
            values.differentiate(&mut c, &mut outputs, &nodes[..r.kinds.len()]);
            let after = c.graph.add(entry, exit).unwrap();
            outputs.extend([entry, after]);
            let out: Vec<Vec<u32>> =
                c.run(&cpu, &outputs).unwrap().iter().map(|bytes| bits(bytes)).collect();
            let n = out.len();
            let expected = values.run(&r, &cpu, true);
            assert!(out[1] == expected.exit && out[2..n - 2] == expected.grads, "{}", r.name);
            assert!(floats(&out[n - 2]) == values.operands[r.state], "{}", r.name);
            let sums: Vec<f32> =
                floats(&out[n - 2]).iter().zip(floats(&out[1])).map(|(a, b)| a + b).collect();
            assert_eq!(floats(&out[n - 1]), sums, "{}", r.name);
        }
    }
}

/// PRIOR-ART C8: a strided operand or cotangent was read as if dense. Here all of them are cut
/// out of something wider, or transposed.
#[test]
fn c8_strided_operands_and_cotangents_are_read_as_such() {
    let mut random = Random(8);
    for r in all() {
        let values = Values::random(&r, ROWS, &PACKED, &mut random);
        for cpu in devices() {
            let expected = values.run(&r, &cpu, true);
            for transposed in [false, true] {
                let mut c = Case::new();
                let strided = |c: &mut Case, name: &str, dims: &[usize], x: &[f32]| -> NodeId {
                    if !transposed {
                        return columns(c, name, dims, x);
                    }
                    // Rows last in memory.
                    let (rows, cols) = (dims[0], x.len() / dims[0].max(1));
                    let turned: Vec<f32> =
                        (0..x.len()).map(|i| x[i % rows * cols + i / rows]).collect();
                    let leaf = c.floats(name, &[cols, rows], &turned);
                    let back = c.graph.permute(leaf, &[1, 0]).unwrap();
                    c.graph.reshape(back, dims).unwrap()
                };
                let mut nodes = Vec::new();
                for (i, (k, x)) in r.kinds.iter().zip(&values.operands).enumerate() {
                    let mut dims = match k.by {
                        By::Row => vec![ROWS],
                        By::Sequence => vec![PACKED.len()],
                        By::Nothing => vec![],
                    };
                    dims.extend(&k.dims);
                    nodes.push(strided(&mut c, &format!("x{i}"), &dims, x));
                }
                nodes.push(c.ints("seqs", &[PACKED.len(), 3], PACKED.as_flattened()));
                let (y, exit) = (r.build)(&mut c, &nodes);
                let dims = |c: &Case, x| c.graph.node(x).shape.dims().to_vec();
                let (y_dims, exit_dims) = (dims(&c, y), dims(&c, exit));
                let dy = strided(&mut c, "dy", &y_dims, &values.dy);
                let d_exit = strided(&mut c, "d exit", &exit_dims, &values.d_exit);
                let wrt = &nodes[..r.kinds.len()];
                let back = vjp(&c.graph, &[(y, dy), (exit, d_exit)], wrt).unwrap();
                c.graph = back.graph;
                let mut outputs = vec![y, exit];
                outputs.extend(back.grads);
                let out = c.run(&cpu, &outputs).unwrap();
                let out: Vec<Vec<u32>> = out.iter().map(|bytes| bits(bytes)).collect();
                let same = out[0] == expected.y && out[1] == expected.exit;
                assert!(same && out[2..] == expected.grads, "{} on {cpu:?}", r.name);
            }
        }
    }
}

/// `x` as the columns 3.. of wider rows.
fn columns(c: &mut Case, name: &str, dims: &[usize], x: &[f32]) -> NodeId {
    let last = dims.len() - 1;
    let width = dims[last];
    let mut wide_dims = dims.to_vec();
    wide_dims[last] += 7;
    let mut wide = vec![f32::NAN; wide_dims.iter().product()];
    for (to, from) in wide.chunks_mut(width + 7).zip(x.chunks(width.max(1))) {
        to[3..3 + width].copy_from_slice(from);
    }
    let leaf = c.floats(name, &wide_dims, &wide);
    c.graph.slice(leaf, last, 3, width).unwrap()
}

/// The gradient of a state passes every decay on its way to the entry state: derived by hand
/// for states of one element, where forgetting one is an error of a factor.
#[test]
fn the_gradient_of_a_state_decays() {
    let attrs = GatedDeltaAttrs { scale: 1.0.into(), key_heads: KeyHeads::Cycle };
    let (g, k, beta) = ([-0.5f32, -1.5, -0.25], [0.8f32, -0.6, 1.1], [0.9f32, 0.4, 0.7]);
    let (dt, a) = ([0.5f32, 1.25, 0.75], -1.1f32);
    for cpu in devices() {
        for rows_decay in [false, true] {
            let mut c = Case::new();
            let one = |c: &mut Case, name: &str, x: &[f32]| c.floats(name, &[x.len(), 1, 1], x);
            let (q, v) = (one(&mut c, "q", &[1.0; 3]), one(&mut c, "v", &[0.3; 3]));
            let k_leaf = one(&mut c, "k", &k);
            let dims: &[usize] = if rows_decay { &[3, 1, 1] } else { &[3, 1] };
            let g_leaf = c.floats("g", dims, &g);
            let beta_leaf = c.floats("beta", &[3, 1], &beta);
            let state = c.floats("state", &[1, 1, 1, 1], &[0.7]);
            let seqs = c.ints("seqs", &[1, 3], &[0, 3, 0]);
            let operands = [q, k_leaf, v, g_leaf, beta_leaf, state, seqs];
            let (_, exit) = c.graph.gated_delta_rule(attrs, operands, "y").unwrap();
            let expected: f64 = (0..3)
                .map(|t| {
                    let (g, k, beta) = (f64::from(g[t]), f64::from(k[t]), f64::from(beta[t]));
                    g.exp() * (1.0 - beta * k * k)
                })
                .product();
            let seed = c.floats("seed", &[1, 1, 1, 1], &[1.0]);
            let back = vjp(&c.graph, &[(exit, seed)], &[state]).unwrap();
            c.graph = back.graph;
            let out = to_floats(&c.run(&cpu, &back.grads).unwrap()[0]);
            assert_close(&out, &[expected], 1e-6, "delta rule");
        }
        let mut c = Case::new();
        let x = c.floats("x", &[3, 1, 1], &[0.3, 0.2, -0.4]);
        let dt_leaf = c.floats("dt", &[3, 1], &dt);
        let a_leaf = c.floats("a", &[1, 1], &[a]);
        let state = c.floats("state", &[1, 1, 1, 1], &[0.7]);
        let seqs = c.ints("seqs", &[1, 3], &[0, 3, 0]);
        let (_, exit) = c.graph.ssm_scan([x, dt_leaf, a_leaf, x, x, state, seqs], "y").unwrap();
        let expected = (f64::from(a) * dt.iter().map(|&t| f64::from(t)).sum::<f64>()).exp();
        let seed = c.floats("seed", &[1, 1, 1, 1], &[1.0]);
        let back = vjp(&c.graph, &[(exit, seed)], &[state]).unwrap();
        c.graph = back.graph;
        let out = to_floats(&c.run(&cpu, &back.grads).unwrap()[0]);
        assert_close(&out, &[expected], 1e-6, "scan");
    }
}

/// Value heads read the key heads that their attribute says.
#[test]
fn key_heads_are_shared_as_said() {
    // Two key heads with queries 1 and 10; four value heads with values 1, 2, 3 and 4.
    let run = |cpu: &Cpu, key_heads| {
        let attrs = GatedDeltaAttrs { scale: 1.0.into(), key_heads };
        let mut c = Case::new();
        let q = c.floats("q", &[1, 2, 1], &[1.0, 10.0]);
        let k = c.floats("k", &[1, 2, 1], &[1.0, 1.0]);
        let v = c.floats("v", &[1, 4, 1], &[1.0, 2.0, 3.0, 4.0]);
        let (g, beta) = (c.floats("g", &[1, 4], &[0.0; 4]), c.floats("beta", &[1, 4], &[1.0; 4]));
        let state = c.floats("state", &[1, 4, 1, 1], &[0.0; 4]);
        let seqs = c.ints("seqs", &[1, 3], &[0, 1, 0]);
        let (y, _) = c.graph.gated_delta_rule(attrs, [q, k, v, g, beta, state, seqs], "y").unwrap();
        to_floats(&c.run(cpu, &[y]).unwrap()[0])
    };
    for cpu in devices() {
        assert_eq!(run(&cpu, KeyHeads::Cycle), [1.0, 20.0, 3.0, 40.0]);
        assert_eq!(run(&cpu, KeyHeads::Blocks), [1.0, 2.0, 30.0, 40.0]);
    }
}

/// P4: what a backward pass keeps is little beside the gradients that it gives: a state of 16 columns
/// of a head every 64 tokens, to whose queries and keys it gives as many gradients as that has
/// elements in 8; and a thread's scratch does not grow with the rows.
#[test]
fn p4_few_states_are_kept() {
    let (keys, heads) = (128, 32);
    for rows in [1, 64, 65, 512, 4096, 100_000] {
        let walk = Walk::in_segments(rows, keys * LANES, QUICK);
        assert_eq!(walk.length, 64);
        assert!(walk.longest(rows) <= 64 && walk.longest(rows) <= rows);
        let (kept, given) = (walk.kept() * heads * keys * LANES, 2 * rows * heads * keys);
        assert!(8 * kept <= given, "{rows}: {kept} beside {given}");
    }
}

/// Every token is taken once, forward and backward, in order; states are kept in places of their own.
#[test]
fn a_walk_takes_every_token_once() {
    for (rows, elements) in [(1, 512), (7, 256), (40, 512), (100, 256), (100, 100)] {
        let walk = Walk::new(rows, elements);
        for (first, n) in [(0, rows), (rows / 3, rows / 2), (rows - 1, 1), (2, 0)] {
            let sequence = Sequence { index: 0, first, rows: n };
            let forward = (0..walk.rounds_forward()).flat_map(|r| walk.tokens(r, sequence));
            assert!(forward.eq(0..n), "{rows} rows, {n} of a sequence");
            let segments = n.div_ceil(walk.length);
            let before = (0..walk.rounds_before()).flat_map(|r| walk.tokens_before(r, sequence));
            assert!(before.eq(0..segments.saturating_sub(1) * walk.length));
            let turns: Vec<_> = (walk.rounds_before()..walk.rounds())
                .filter_map(|round| walk.segments(round, sequence))
                .collect();
            let back = turns.iter().flat_map(|(segments, _)| segments.clone().rev());
            assert!(back.eq((0..segments).rev()), "{turns:?}");
            // The first turn begins at the end of the sequence, though it have no rows.
            assert!(turns.iter().enumerate().all(|(i, (_, last))| *last == (i == 0)));
            assert!(!turns.is_empty());
        }
        // However the rows are cut into sequences.
        for cut in 0..rows {
            let [a, b] = [(0, cut), (cut, rows - cut)].map(|(first, rows)| Sequence {
                index: 0,
                first,
                rows,
            });
            let of = |s: Sequence| (1..s.rows.div_ceil(walk.length)).map(move |i| walk.slot(s, i));
            let slots: Vec<usize> = of(a).chain(of(b)).collect();
            assert!(slots.iter().all(|&slot| slot < walk.kept()), "{slots:?} of {}", walk.kept());
            assert!(slots.windows(2).all(|pair| pair[0] < pair[1]), "{slots:?}");
        }
    }
}

#[test]
fn sequences_out_of_range_are_faults() {
    let bad: [(&[[i32; 3]], &str); 7] = [
        (&[[0, 3, 0], [9, 3, 0]], "sequence 1 has rows 9..12, there are 11"),
        (&[[-1, 3, 0]], "sequence 0 is [-1, 3, 0]"),
        (&[[0, -3, 0]], "sequence 0 is [0, -3, 0]"),
        (&[[i32::MAX, i32::MAX, 0]], "there are 11"),
        (&[[5, 3, 0], [0, 6, 0]], "row 5 is of sequences 1 and 0"),
        (&[[0, 6, 0], [5, 3, 0]], "row 5 is of sequences 0 and 1"),
        (&[[3, 3, 0], [5, 3, 0]], "row 5 is of sequences 0 and 1"),
    ];
    let cpu = Cpu::new(2, None).unwrap();
    for r in all() {
        for (seqs, what) in bad {
            let values = Values::random(&r, 11, seqs, &mut Random(10));
            let (c, outputs) = values.graph(&r, true);
            for output in outputs {
                let fault = c.run(&cpu, &[output]).map(|_| ()).unwrap_err();
                assert_eq!(fault.code, Code::IndexOutOfRange);
                assert!(fault.message.contains(what), "{}: {}", r.name, fault.message);
            }
        }
    }
}

/// A sequence without rows is nowhere, whatever row it says.
#[test]
fn a_sequence_without_rows_overlaps_none() {
    let seqs = [[6, 3, 0], [3, 0, 0], [0, 6, 0], [10, 0, 0]];
    let cpu = Cpu::new(2, None).unwrap();
    for r in all() {
        let values = Values::random(&r, 11, &seqs, &mut Random(12));
        let y = floats(&values.run(&r, &cpu, true).y);
        assert!(y.iter().all(|y| y.is_finite()) && y[9 * r.width..].iter().all(|&y| y == 0.0));
    }
}

/// Ops of one flat result are pushed once for all of their gradients.
#[test]
fn backward_nodes_serve_all_operands() {
    for r in all().into_iter().filter(|r| r.name != "SsmConv") {
        let values = Values::random(&r, 5, &[[0, 5, 0]], &mut Random(11));
        let (c, _) = values.graph(&r, true);
        let back = c.graph.ids().filter(|&id| {
            matches!(c.graph.node(id).op, Op::SsmScanBack { .. } | Op::GatedDeltaRuleBack(_))
        });
        // One for each 16 columns of the delta rule's values.
        let columns = if r.name == "SsmScan" { 1 } else { r.kinds[2].dims[1] };
        assert_eq!(back.count(), columns.div_ceil(16), "{}", r.name);
    }
}

/// Three tiles of rows by two of channels: what none of them writes is NaN.
#[test]
fn a_convolution_of_many_tiles_is_written_whole() {
    let (rows, channels) = (150, 300);
    let (mut c, mut random) = (Case::new(), Random(9));
    let x = c.random("x", &[rows, channels], &mut random);
    let w = c.random("w", &[channels, 4], &mut random);
    let state = c.random("state", &[1, 3, channels], &mut random);
    let seqs = c.ints("seqs", &[1, 3], &[0, rows as i32, 0]);
    let dy = c.random("dy", &[rows, channels], &mut random);
    let y = c.graph.ssm_conv(x, w, state, seqs, "y").unwrap();
    let cpu = Cpu::new(1, None).unwrap();
    let mut all = c.gradients(&cpu, y, dy, &[x, w, state]);
    all.push(to_floats(&c.run(&cpu, &[y]).unwrap()[0]));
    for (i, values) in all.iter().enumerate() {
        assert!(values.iter().all(|v| v.is_finite()), "result {i}");
    }
}
