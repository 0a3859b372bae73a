//! How long training can keep a request waiting: the longest segment of every op and its
//! gradients, at the shapes of real models.
//!
//! `cargo run --release -p gradus-cpu --example segments [FILTER [FAMILY]]`
//!
//! A plan is run on one thread with a stop that is always set, so each run is one segment: a tile
//! of a step. Each line is an op: its steps' segments, the longest of them, and all together, as
//! the time that this thread has run; of each segment the shortest of some passes, as others may
//! use the machine.

use std::collections::BTreeMap;

use cpu::{Cpu, Family};
use graph::*;

type Made = std::result::Result<NodeId, Invalid>;
type Build<'a> = dyn Fn(&mut Graph) -> std::result::Result<(NodeId, Vec<NodeId>), Invalid> + 'a;

/// Always asks to stop.
struct Now;

impl Stop for Now {
    fn should_stop(&self) -> bool {
        true
    }
}

/// How often a plan is run.
const PASSES: usize = 3;

/// Milliseconds this thread has run.
fn thread_time() -> f64 {
    // Linux counts what a thread has run when it gives way.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let ns = text.split(' ').next().and_then(|t| t.parse::<f64>().ok());
    ns.unwrap_or(f64::NAN) / 1e6
}

/// Small numbers, and indices that are in range, by the leaf's name.
fn value(slot: &LeafSlot, rows: usize, i: usize) -> u32 {
    let noise = (i * 7919 % 1000) as f32 / 1000.0 - 0.5;
    match (slot.dtype, &*slot.name) {
        (DType::F32, "g" | "a") => (noise - 0.6).to_bits(),
        (DType::F32, "k") => (noise / 5.0).to_bits(),
        (DType::F32, "beta" | "dt") => (noise + 0.6).to_bits(),
        (DType::F32, _) => noise.to_bits(),
        (DType::I32, "seqs") => [0, rows, 0][i % 3] as u32,
        (DType::I32, "experts") => (i * 37 % 128) as u32,
        (DType::I32, "ids") => (i * 7919 % 30_000) as u32,
        (DType::I32, _) => 0,
        _ => 0x2c00_2c00, // 1/16 twice in f16
    }
}

/// Prints the longest segments of an op and of its gradients.
fn measure(cpu: &Cpu, what: &str, rows: usize, build: &Build<'_>) -> Result<()> {
    let mut graph = Graph::new();
    let (y, wrt) = build(&mut graph)?;
    let shape = graph.node(y).shape;
    let dy = graph.leaf("dy", shape, DType::F32)?;
    let back = vjp(&graph, &[(y, dy)], &wrt)?;
    let mut outputs = vec![y];
    outputs.extend(&back.grads);
    // As training does without further ado.
    let (graph, outputs) = grad_precision(back.graph, outputs, cpu.grad_precision())?;
    let plan = plan(&graph, &outputs, cpu)?;
    let host: Vec<Vec<u8>> = plan
        .leaves
        .iter()
        .map(|slot| {
            let words = slot.shape.bytes(slot.dtype).unwrap_or(0).div_ceil(4);
            (0..words).flat_map(|i| value(slot, rows, i).to_le_bytes()).collect()
        })
        .collect();
    let loaded: Vec<_> = plan
        .leaves
        .iter()
        .zip(&host)
        .map(|(slot, bytes)| match graph.node(slot.node).resident {
            true => {
                let tensor = HostTensor { dtype: slot.dtype, shape: slot.shape, bytes };
                cpu.load(&tensor).map(Some)
            }
            false => Ok(None),
        })
        .collect::<std::result::Result<_, _>>()?;
    let leaves: Vec<Leaf<'_>> = plan
        .leaves
        .iter()
        .zip(host.iter().zip(&loaded))
        .map(|(slot, (bytes, weight))| match weight {
            Some(weight) => Leaf::Resident(&**weight),
            None => Leaf::Host(&bytes[..slot.shape.bytes(slot.dtype).unwrap_or(0)]),
        })
        .collect();
    let mut arena = cpu.arena(plan.arena_bytes)?;
    let mut segments: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    for _ in 0..PASSES {
        let mut from = Segment::default();
        loop {
            let start = thread_time();
            let progress = cpu.run(&plan, &leaves, &mut *arena, from, &Now)?;
            let time = thread_time() - start;
            let best = segments.entry((from.step, from.tile)).or_insert(f64::INFINITY);
            *best = best.min(time);
            match progress {
                Progress::Stopped(at) => from = at,
                Progress::Done => break,
            }
        }
    }
    let mut ops: BTreeMap<String, (usize, f64, f64)> = BTreeMap::new();
    for ((step, _), time) in segments {
        let op = plan.steps.get(step).map_or("nothing", |s| s.op.name());
        let (count, longest, all) = ops.entry(op.into()).or_default();
        (*count, *longest, *all) = (*count + 1, longest.max(time), *all + time);
    }
    println!("{what}: {:.0} MB", plan.arena_bytes as f64 / 1e6);
    for (op, (count, longest, all)) in ops {
        println!("    {op:<22} {count:>7} segments {:>9.3} ms {:>9.1} ms all", longest, all);
    }
    Ok(())
}

fn leaf(g: &mut Graph, name: &str, dims: &[usize]) -> Made {
    g.leaf(name, Shape::new(dims)?, DType::F32)
}

fn ints(g: &mut Graph, name: &str, dims: &[usize]) -> Made {
    g.leaf(name, Shape::new(dims)?, DType::I32)
}

/// `(key heads, value heads, keys, values)`.
type DeltaShape = (usize, usize, usize, usize);

fn delta(
    g: &mut Graph,
    rows: usize,
    shape: DeltaShape,
    rows_decay: bool,
) -> std::result::Result<(NodeId, Vec<NodeId>), Invalid> {
    let (key_heads, heads, keys, width) = shape;
    let attrs = GatedDeltaAttrs { scale: 0.1.into(), key_heads: KeyHeads::Cycle };
    let decays = if rows_decay { vec![rows, heads, keys] } else { vec![rows, heads] };
    let mut args = vec![
        leaf(g, "q", &[rows, key_heads, keys])?,
        leaf(g, "k", &[rows, key_heads, keys])?,
        leaf(g, "v", &[rows, heads, width])?,
        leaf(g, "g", &decays)?,
        leaf(g, "beta", &[rows, heads])?,
        leaf(g, "state", &[1, heads, keys, width])?,
    ];
    let wrt = args.clone();
    args.push(ints(g, "seqs", &[1, 3])?);
    Ok((g.push(Op::GatedDeltaRule(attrs), &args, "y")?, wrt))
}

/// `(heads, width, groups, states, decays)`.
type ScanShape = (usize, usize, usize, usize, usize);

fn scan(
    g: &mut Graph,
    rows: usize,
    shape: ScanShape,
) -> std::result::Result<(NodeId, Vec<NodeId>), Invalid> {
    let (heads, width, groups, states, decays) = shape;
    let mut args = vec![
        leaf(g, "x", &[rows, heads, width])?,
        leaf(g, "dt", &[rows, heads])?,
        leaf(g, "a", &[heads, decays])?,
        leaf(g, "b", &[rows, groups, states])?,
        leaf(g, "c", &[rows, groups, states])?,
        leaf(g, "state", &[1, heads, width, states])?,
    ];
    let wrt = args.clone();
    args.push(ints(g, "seqs", &[1, 3])?);
    Ok((g.push(Op::SsmScan, &args, "y")?, wrt))
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let filter = args.next().unwrap_or_default();
    let family = args.next().and_then(|a| Family::ALL.into_iter().find(|f| f.key() == a));
    let cpu = Cpu::new(1, family)?;
    println!("{cpu:?}");
    let measure = |what: &str, rows: usize, build: &Build<'_>| match what.contains(&filter) {
        true => measure(&cpu, what, rows, build),
        false => Ok(()),
    };
    for rows in [64, 512, 2048] {
        for (decay, by_row) in [("", false), (", a decay per row", true)] {
            let what = format!("delta rule, 32 heads on 16 of 128 x 128, {rows} rows{decay}");
            measure(&what, rows, &|g| delta(g, rows, (16, 32, 128, 128), by_row))?;
        }
        let what = format!("scan, Mamba-2, 80 heads of 64, 128 states, {rows} rows");
        measure(&what, rows, &|g| scan(g, rows, (80, 64, 1, 128, 1)))?;
        let what = format!("scan, Mamba-2, 8 groups, {rows} rows");
        measure(&what, rows, &|g| scan(g, rows, (128, 64, 8, 128, 1)))?;
        let what = format!("scan, Mamba-1, 5120 channels, 16 states, {rows} rows");
        measure(&what, rows, &|g| scan(g, rows, (5120, 1, 1, 16, 16)))?;
        measure(&format!("convolution, 8192 channels, {rows} rows"), rows, &|g| {
            let (x, w) = (leaf(g, "x", &[rows, 8192])?, leaf(g, "w", &[8192, 4])?);
            let (state, seqs) = (leaf(g, "state", &[1, 3, 8192])?, ints(g, "seqs", &[1, 3])?);
            Ok((g.ssm_conv(x, w, state, seqs, "y")?, vec![x, w, state]))
        })?;
    }
    for rows in [512, 4096] {
        for (name, heads, key_heads, width) in [("8B", 32, 8, 128), ("Gemma", 8, 4, 256)] {
            for sinks in [false, true] {
                let what = format!("attention, {name}, {rows} rows, sinks {sinks}");
                measure(&what, rows, &|g| {
                    let q = leaf(g, "q", &[rows, heads, width])?;
                    let k = leaf(g, "keys", &[rows, key_heads, width])?;
                    let v = leaf(g, "v", &[rows, key_heads, width])?;
                    let mut args = vec![q, k, v, ints(g, "seqs", &[1, 3])?];
                    let mut wrt = vec![q, k, v];
                    if sinks {
                        let sinks = leaf(g, "sinks", &[heads])?;
                        args.push(sinks);
                        wrt.push(sinks);
                    }
                    let attrs = AttentionAttrs { sinks, ..AttentionAttrs::new(0.1) };
                    Ok((g.push(Op::Attention(attrs), &args, "y")?, wrt))
                })?;
            }
        }
        let what = format!("softmax with sinks, 32 heads, {rows} rows");
        measure(&what, rows, &|g| {
            let keys = rows.min(1024);
            let (x, sinks) = (leaf(g, "x", &[32, keys, keys])?, leaf(g, "sinks", &[32])?);
            let attrs = SoftmaxAttrs { sinks: true, ..SoftmaxAttrs::PLAIN };
            Ok((g.push(Op::Softmax(attrs), &[x, sinks], "y")?, vec![x, sinks]))
        })?;
    }
    for vocabulary in [49_152, 262_144] {
        measure(&format!("loss, {vocabulary} tokens, 64 rows"), 64, &|g| {
            let (x, labels) = (leaf(g, "x", &[64, vocabulary])?, ints(g, "labels", &[64])?);
            let attrs =
                CrossEntropyAttrs { softcap: Some(30.0.into()), ..CrossEntropyAttrs::PLAIN };
            Ok((g.push(Op::CrossEntropy(attrs), &[x, labels], "loss")?, vec![x]))
        })?;
        measure(&format!("log softmax, {vocabulary} tokens, 64 rows"), 64, &|g| {
            let x = leaf(g, "x", &[64, vocabulary])?;
            Ok((g.push(Op::LogSoftmax, &[x], "y")?, vec![x]))
        })?;
        measure(&format!("softmax, {vocabulary} tokens, 64 rows"), 64, &|g| {
            let x = leaf(g, "x", &[64, vocabulary])?;
            Ok((g.softmax(x, "y")?, vec![x]))
        })?;
    }
    for rows in [512, 2048] {
        measure(&format!("embedding of 32768, {rows} rows of 4096"), rows, &|g| {
            let (w, ids) = (leaf(g, "w", &[32_768, 4096])?, ints(g, "ids", &[rows])?);
            Ok((g.gather(w, ids, "y")?, vec![w]))
        })?;
        measure(&format!("norms, {rows} rows of 4096"), rows, &|g| {
            let (x, w) = (leaf(g, "x", &[rows, 4096])?, leaf(g, "w", &[4096])?);
            Ok((g.rms_norm(x, w, 1e-5)?, vec![x, w]))
        })?;
        measure(&format!("layer norm, {rows} rows of 4096"), rows, &|g| {
            let x = leaf(g, "x", &[rows, 4096])?;
            let op = Op::Norm { kind: NormKind::Layer, eps: 1e-5.into() };
            Ok((g.push(op, &[x], "y")?, vec![x]))
        })?;
        measure(&format!("broadcast product, {rows} rows of 4096"), rows, &|g| {
            let (x, w) = (leaf(g, "x", &[rows, 4096])?, leaf(g, "w", &[4096])?);
            Ok((g.mul(x, w)?, vec![x, w]))
        })?;
        measure(&format!("gelu, {rows} rows of 11008"), rows, &|g| {
            let x = leaf(g, "x", &[rows, 11_008])?;
            Ok((g.unary(Unary::GeluErf, x)?, vec![x]))
        })?;
        measure(&format!("glu, {rows} rows of 11008"), rows, &|g| {
            let (x, y) = (leaf(g, "x", &[rows, 11_008])?, leaf(g, "y", &[rows, 11_008])?);
            Ok((g.push(Op::Glu(GluKind::GegluErf), &[x, y], "glu")?, vec![x, y]))
        })?;
        for rank in [8, 64] {
            let what = format!("Lora, rank {rank}, 4096 -> 11008, {rows} rows");
            measure(&what, rows, &|g| {
                let (x, base) = (leaf(g, "x", &[rows, 4096])?, leaf(g, "base", &[rows, 11_008])?);
                let slots = ints(g, "slots", &[rows])?;
                let (a, b) = (leaf(g, "a", &[rank, 4096])?, leaf(g, "b", &[11_008, rank])?);
                let scale = leaf(g, "scale", &[1])?;
                let y = g.push(Op::Lora { slots: 1 }, &[x, base, slots, a, b, scale], "lora")?;
                Ok((y, vec![x, a, b]))
            })?;
        }
        measure(&format!("experts, 8 of 128, 2048 -> 768, {rows} rows"), rows, &|g| {
            let (x, w) = (leaf(g, "x", &[rows, 1, 2048])?, leaf(g, "w", &[128, 768, 2048])?);
            let ids = ints(g, "experts", &[rows, 8])?;
            Ok((g.push(Op::MatMulExperts { tb: true }, &[x, w, ids], "y")?, vec![x, w]))
        })?;
        measure(&format!("experts, all rows on one, 2048 -> 768, {rows} rows"), rows, &|g| {
            let (x, w) = (leaf(g, "x", &[rows, 1, 2048])?, leaf(g, "w", &[128, 768, 2048])?);
            let ids = ints(g, "one", &[rows, 1])?;
            Ok((g.push(Op::MatMulExperts { tb: true }, &[x, w, ids], "y")?, vec![x, w]))
        })?;
        for (what, ids) in [("8 of 128", "experts"), ("all rows on one", "one")] {
            let what = format!("quantized experts, {what}, 2048 -> 768, {rows} rows");
            measure(&what, rows, &|g| {
                let x = leaf(g, "x", &[rows, 1, 2048])?;
                let dtype = DType::Block(gguf::TensorType::Q4_0);
                let w = g.weight("w", Shape::new(&[128, 768, 2048])?, dtype)?;
                let ids = ints(g, ids, &[rows, if ids == "one" { 1 } else { 8 }])?;
                Ok((g.project_experts(x, w, ids)?, vec![x]))
            })?;
        }
        measure(&format!("product, 4096 -> 11008, {rows} rows"), rows, &|g| {
            let (x, w) = (leaf(g, "x", &[rows, 4096])?, leaf(g, "w", &[11_008, 4096])?);
            Ok((g.project(x, w)?, vec![x, w]))
        })?;
        measure(&format!("quantized product, 4096 -> 11008, {rows} rows"), rows, &|g| {
            let x = leaf(g, "x", &[rows, 4096])?;
            let w =
                g.weight("w", Shape::new(&[11_008, 4096])?, DType::Block(gguf::TensorType::Q4_0))?;
            Ok((g.project(x, w)?, vec![x]))
        })?;
    }
    Ok(())
}

fn main() {
    if let Err(e) = run() {
        eprintln!("{e}");
        std::process::exit(1);
    }
}
