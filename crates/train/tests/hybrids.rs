//! Models with recurrent layers: sequences packed into one window, or one sequence cut into
//! chunks, give the losses and gradients of each alone and whole.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gguf::TensorType;
use graph::{CrossEntropyAttrs, DType, Device, Leaf, NodeId, Op, Plan, Segment, Shape};
use model::toy::Toy;
use model::{Adapter, EntryStates, Model, Net, NetConfig, PrefixShape};
use testkit::{Random, fixture, relative_l2};
use train::{Example, Gradients, GraphConfig, Measured, Parameters, Window};

/// The oracle's models, and toys under their names in GGUF.
const FIXTURES: [&str; 2] = ["qwen3_5", "qwen3_5_moe"];
const TOYS: [&str; 2] = ["qwen35", "qwen35moe"];

fn cpu() -> Arc<dyn Device> {
    Arc::new(cpu::Cpu::new(2, None).unwrap())
}

fn load(arch: &str) -> (Model, Parameters) {
    let model = Model::load(&fixture(arch, "model.gguf"), cpu()).unwrap();
    let adapter = Adapter::read(&fixture(arch, "adapter.gguf"), &model).unwrap();
    (model, Parameters { adapter: Some(adapter), ..Parameters::default() })
}

/// A toy, which is not ill-conditioned as the oracle's model is.
fn toy(arch: &'static str, ty: TensorType) -> (Model, Parameters) {
    let file = Toy::new(arch, ty, 7).gguf().unwrap();
    let model = Model::from_gguf(gguf::Gguf::from_bytes("toy.gguf", file).unwrap(), cpu()).unwrap();
    let targets = train::select_targets(&model, &["all".to_string()]).unwrap();
    let mut adapter =
        Adapter::fresh(&model, targets.iter().map(|t| (t.as_str(), 4)), 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.02 * random.normal());
    }
    (model, Parameters { adapter: Some(adapter), ..Parameters::default() })
}

/// A random sequence whose later half carries loss.
fn example(seed: u64, n: usize) -> Example {
    let mut random = Random::new(seed);
    let tokens = (0..n).map(|_| random.below(320) as u32).collect();
    Example { tokens, weights: (0..n).map(|i| f32::from(2 * i >= n)).collect() }
}

fn measure(model: &Model, parameters: &Parameters, examples: &[&Example], rows: usize) -> Measured {
    let config = GraphConfig { rows, cache: DType::F32, ..GraphConfig::default() };
    let window = Window { examples: examples.iter().map(|&e| e.clone()).collect() };
    Gradients::new(model, config).unwrap().of(&window, 50.0, parameters, &()).unwrap()
}

fn as_f64(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// FIELD-REPORTS F38: packed samples leaked recurrent state and the window of the convolution.
#[test]
fn f38_packed_sequences_are_as_alone() {
    let fixtures = FIXTURES.map(|arch| (arch, load(arch)));
    let toys = TOYS.map(|arch| (arch, toy(arch, TensorType::Q4_0)));
    for (arch, (model, parameters)) in fixtures.into_iter().chain(toys) {
        // One is shorter than the convolution's window.
        let all = [example(1, 23), example(2, 4), example(3, 37)];
        let silent = |e: &Example| Example { weights: vec![0.0; e.tokens.len()], ..e.clone() };
        let quiet: Vec<Example> = all.iter().map(silent).collect();
        let alone: Vec<Measured> =
            all.iter().map(|e| measure(&model, &parameters, &[e], 64)).collect();
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            // Beside others that carry no loss, bit for bit the same loss.
            for (loud, alone) in alone.iter().enumerate() {
                let window = order.map(|i| if i == loud { &all[i] } else { &quiet[i] });
                let packed = measure(&model, &parameters, &window, 64);
                assert_eq!(packed.loss.to_bits(), alone.loss.to_bits(), "{arch}, {order:?}");
                compare(&packed.grads, &alone.grads, &format!("{arch}, {order:?}, {loud}"));
            }
            let packed = measure(&model, &parameters, &order.map(|i| &all[i]), 64);
            let mut sums: BTreeMap<String, Vec<f32>> = BTreeMap::new();
            for (name, grad) in order.iter().flat_map(|&i| &alone[i].grads) {
                let sum = sums.entry(name.clone()).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(a, b)| *a += b);
            }
            compare(&packed.grads, &sums, &format!("{arch}, {order:?}"));
        }
    }
}

fn compare(ours: &BTreeMap<String, Vec<f32>>, other: &BTreeMap<String, Vec<f32>>, what: &str) {
    assert_eq!(ours.len(), other.len());
    let errors = ours.iter().map(|(name, grad)| (relative_l2(grad, &as_f64(&other[name])), name));
    let worst = errors.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
    assert!(worst.0 < 1e-6, "{what}: {worst:?}");
}

/// Positions of a page, and pages.
const PAGE: usize = 16;
const PAGES: usize = 4;

/// The graph of a chunk: its losses, keys, values and exit states, and the gradients by the
/// adapter, the cached keys and values, and the entry states.
struct Chunk {
    plan: Plan,
    /// Outputs after the losses: keys and values, then states.
    kept: Vec<Shape>,
    /// The names behind the gradients of the adapter.
    names: Vec<String>,
}

fn chunk(model: &Model, parameters: &Parameters, rows: usize) -> Chunk {
    let config = NetConfig {
        rows,
        seqs: 1,
        logit_rows: rows,
        cache: DType::F32,
        prefix: Some(PrefixShape { pages: PAGES, page: PAGE, table: PAGES }),
        states: EntryStates::Given,
        adapters: parameters.adapter.iter().map(Adapter::shapes).collect(),
        trainable: BTreeSet::new(),
    };
    let mut net = Net::new(model.weights(), &config);
    let hidden = model.arch().hidden(&mut net).unwrap();
    let logits = net.logits(model.arch(), hidden, rows).unwrap()[0];
    let attention = net.kv.len();
    let kept: Vec<NodeId> = net.kv.iter().flat_map(|&(k, v)| [k, v]).collect();
    let kept: Vec<NodeId> = kept.into_iter().chain(net.states.iter().map(|s| s.exit)).collect();
    let entries: Vec<NodeId> = net.states.iter().map(|s| s.entry).collect();
    let mut graph = net.graph;
    let line = Shape::new(&[rows]).unwrap();
    let labels = graph.leaf("labels", line, DType::I32).unwrap();
    let weights = graph.leaf("loss_weights", line, DType::F32).unwrap();
    let op = Op::CrossEntropy(CrossEntropyAttrs::PLAIN);
    let nll = graph.push(op, &[logits, labels], "loss").unwrap();
    let mut cotangents = vec![(nll, weights)];
    for (i, &node) in kept.iter().enumerate() {
        let shape = graph.node(node).shape;
        cotangents.push((node, graph.leaf(&format!("seed.{i}"), shape, DType::F32).unwrap()));
    }
    let names = parameters.names();
    let mut wrt: Vec<NodeId> = names.iter().map(|n| graph.find_leaf(n).unwrap()).collect();
    for layer in 0..attention {
        for part in ["k", "v"] {
            wrt.push(graph.find_leaf(&format!("cache.{layer}.{part}")).unwrap());
        }
    }
    wrt.extend(entries);
    let backward = graph::vjp(&graph, &cotangents, &wrt).unwrap();
    let shapes = kept.iter().map(|&node| graph.node(node).shape).collect();
    let outputs = [&[nll], &kept[..], &backward.grads].concat();
    let plan = graph::plan(&backward.graph, &outputs, model.device().as_ref()).unwrap();
    Chunk { plan, kept: shapes, names }
}

/// Runs a chunk of a sequence that begins at position `start`: its outputs.
fn run(
    model: &Model,
    parameters: &Parameters,
    chunk: &Chunk,
    (example, start, rows): (&Example, usize, usize),
    // Pages of every layer's keys and values, then entry states; and what is sent back to keys,
    // values and exit states.
    (held, seeds): (&[Vec<f32>], &[Vec<f32>]),
) -> Vec<Vec<f32>> {
    let ints = |values: Vec<usize>| values.into_iter().map(|x| x as i32).collect::<Vec<i32>>();
    let at = |i: usize| example.tokens[start + i] as usize;
    let lists: BTreeMap<&str, Vec<i32>> = [
        ("tokens", ints((0..rows).map(at).collect())),
        ("positions", ints((start..start + rows).collect())),
        ("labels", ints((1..=rows).map(at).collect())),
        ("logit_rows", ints((0..rows).collect())),
        ("seqs", ints(vec![0, rows, start])),
        ("table", ints((0..PAGES).collect())),
        ("lora_rows.0", vec![0; rows]),
        ("lora_rows.0.head", vec![0; rows]),
    ]
    .into();
    let weights: Vec<f32> = (1..=rows).map(|i| example.weights[start + i] / 50.0).collect();
    let pages = chunk.kept.iter().filter(|s| s.dim(0) == rows && s.rank() == 3).count();
    let adapter = parameters.adapter.as_ref().unwrap();
    let leaves: Vec<Leaf<'_>> = chunk
        .plan
        .leaves
        .iter()
        .map(|slot| {
            let name: &str = &slot.name;
            let number = |prefix: &str| name.strip_prefix(prefix).map(str::to_string);
            let floats = if name == "loss_weights" {
                &weights
            } else if let Some(i) = number("seed.") {
                &seeds[i.parse::<usize>().unwrap()]
            } else if let Some(i) = number("state.") {
                &held[pages + i.parse::<usize>().unwrap()]
            } else if let Some(rest) = number("cache.") {
                let (layer, part) = rest.split_once('.').unwrap();
                &held[2 * layer.parse::<usize>().unwrap() + usize::from(part == "v")]
            } else if let Some(rest) = name.strip_prefix("0:") {
                let (target, part) = rest.rsplit_once('.').unwrap();
                let pair = &adapter.tensors[target];
                match part {
                    "lora_a" => &pair.a,
                    "lora_b" => &pair.b,
                    _ => return Leaf::Host(bytemuck::bytes_of(&pair.scale)),
                }
            } else if let Some(list) = lists.get(name) {
                return Leaf::Host(bytemuck::cast_slice(list));
            } else {
                return model.weights().get(name).unwrap().leaf();
            };
            Leaf::Host(bytemuck::cast_slice(floats))
        })
        .collect();
    let device = model.device();
    let mut arena = device.arena(chunk.plan.arena_bytes).unwrap();
    arena.poison();
    device.run(&chunk.plan, &leaves, arena.as_mut(), Segment::default(), &()).unwrap();
    let read = |slot: &graph::OutputSlot| {
        let mut values = vec![0f32; slot.shape.elements()];
        arena.read(slot.range.clone(), bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    };
    chunk.plan.outputs.iter().map(read).collect()
}

/// The exact walk: forward through the chunks, then back, each chunk seeded with what later ones
/// sent to its keys, values and exit states.
fn walk(model: &Model, parameters: &Parameters, example: &Example, length: usize) -> Measured {
    let total = example.tokens.len() - 1;
    let starts: Vec<usize> = (0..total).step_by(length).collect();
    let of = |start: usize| (start, length.min(total - start));
    let chunks: Vec<Chunk> = starts.iter().map(|&s| chunk(model, parameters, of(s).1)).collect();
    let first = &chunks[0].kept;
    let is_page = |s: &Shape| s.rank() == 3 && s.dim(0) == of(0).1;
    let pages = first.iter().take_while(|s| is_page(s)).count();
    let size = |i: usize| match i < pages {
        true => PAGES * PAGE * first[i].elements() / first[i].dim(0),
        false => first[i].elements(),
    };
    let zeros = || (0..first.len()).map(|i| vec![0f32; size(i)]).collect::<Vec<_>>();
    let place = |i: usize, start: usize, rows: usize| {
        let row = first[i].elements() / first[i].dim(0);
        start * row..(start + rows) * row
    };

    // Forward: what each chunk begins from.
    let mut held = vec![zeros()];
    let mut loss = 0.0;
    for (&start, chunk) in starts.iter().zip(&chunks) {
        let (start, rows) = of(start);
        let none: Vec<Vec<f32>> = chunk.kept.iter().map(|s| vec![0.0; s.elements()]).collect();
        let now = held.last().unwrap().clone();
        let out = run(model, parameters, chunk, (example, start, rows), (&now, &none));
        for (i, nll) in out[0].iter().enumerate() {
            let weight = (f64::from(example.weights[start + 1 + i]) / 50.0) as f32;
            if weight != 0.0 {
                loss += f64::from(weight) * f64::from(*nll);
            }
        }
        let mut next = now;
        for i in 0..first.len() {
            if i < pages {
                next[i][place(i, start, rows)].copy_from_slice(&out[1 + i]);
            } else {
                next[i].clone_from(&out[1 + i]);
            }
        }
        held.push(next);
    }

    // Back: what is sent to every position's keys and values, and to the state before a chunk.
    let mut sent = zeros();
    let mut grads: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for ((&start, chunk), held) in starts.iter().zip(&chunks).zip(&held).rev() {
        let (start, rows) = of(start);
        let seeds: Vec<Vec<f32>> =
            (0..first.len())
                .map(|i| {
                    if i < pages {
                        sent[i][place(i, start, rows)].to_vec()
                    } else {
                        sent[i].clone()
                    }
                })
                .collect();
        let out = run(model, parameters, chunk, (example, start, rows), (held, &seeds));
        let mut out = out.into_iter().skip(1 + first.len());
        for name in &chunk.names {
            let grad = out.next().unwrap();
            let sum = grads.entry(name.clone()).or_insert_with(|| vec![0.0; grad.len()]);
            sum.iter_mut().zip(grad).for_each(|(a, b)| *a += b);
        }
        for (i, grad) in out.enumerate() {
            if i < pages {
                sent[i].iter_mut().zip(grad).for_each(|(a, b)| *a += b);
            } else {
                sent[i] = grad;
            }
        }
    }
    Measured { loss, grads }
}

#[test]
fn a_sequence_in_chunks_is_as_whole() {
    let example = example(1, 62);
    let check = |model: &Model, parameters: &Parameters, what: &str, grads: bool| {
        let whole = measure(model, parameters, &[&example], 64);
        for length in [61, 32, 16, 7] {
            let walked = walk(model, parameters, &example, length);
            let what = format!("{what}, chunks of {length}");
            assert_eq!(walked.loss.to_bits(), whole.loss.to_bits(), "{what}");
            if grads {
                compare(&walked.grads, &whole.grads, &what);
            }
        }
    };
    for arch in TOYS {
        for ty in [TensorType::F32, TensorType::Q4_0] {
            let (model, parameters) = toy(arch, ty);
            check(&model, &parameters, arch, true);
        }
    }
    for arch in FIXTURES {
        // The order of sums alone moves this model's gradients by 1e-6.
        let (model, parameters) = load(arch);
        check(&model, &parameters, arch, false);
    }
}
