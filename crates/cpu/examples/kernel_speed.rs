//! How long the kernels beside matrix products take, at the shapes of a small model.
//!
//! `cargo run --release -p gradus-cpu --example kernel_speed [THREADS [FAMILY [FILTER]]]`
//!
//! Each line is one op: the best time of a plan of 4 such steps, divided by 4, and the mean of what
//! the calling thread spent on it.

use std::time::Instant;

use cpu::{Cpu, Family};
use graph::*;

/// Steps of a plan; each reads the one before where its shape allows.
const STEPS: usize = 4;

type Build<'a> = dyn Fn(&mut Graph, usize) -> std::result::Result<NodeId, Invalid> + 'a;

/// Times a plan of several steps on small random numbers.
fn time(cpu: &Cpu, what: &str, build: &Build<'_>) -> Result<()> {
    let mut graph = Graph::new();
    let mut outputs = Vec::new();
    for i in 0..STEPS {
        outputs.push(build(&mut graph, i)?);
    }
    let plan = plan(&graph, &outputs, cpu)?;
    let host: Vec<Vec<u8>> = plan
        .leaves
        .iter()
        .map(|slot| {
            let words = slot.shape.bytes(slot.dtype).unwrap_or(0).div_ceil(4);
            let value = |i: usize| match (slot.dtype, &*slot.name) {
                (DType::F32, _) => ((i * 7919 % 1000) as f32 / 1000.0 - 0.5).to_bits(),
                (DType::I32, "seqs") => [0, slot_rows(&plan), cached(&plan)][i % 3] as u32,
                (DType::I32, "table") => i as u32,
                (DType::I32, _) => 0,
                _ => 0x2c00_2c00, // 1/16 twice in f16
            };
            (0..words).flat_map(|i| value(i).to_le_bytes()).collect()
        })
        .collect();
    let leaves: Vec<Leaf<'_>> = plan
        .leaves
        .iter()
        .zip(&host)
        .map(|(slot, bytes)| {
            // The allocator gives blocks of this size more than an element's alignment.
            let len = slot.shape.bytes(slot.dtype).unwrap_or(0);
            Leaf::Host(bytes.get(..len).unwrap_or(&[]))
        })
        .collect();
    let mut arena = cpu.arena(plan.arena_bytes)?;
    let run = |arena: &mut dyn Arena| cpu.run(&plan, &leaves, arena, Segment::default(), &());
    run(&mut *arena)?;
    let (start, cpu_start, mut runs) = (Instant::now(), cpu_time(), 0);
    let mut best = f64::INFINITY;
    while start.elapsed().as_millis() < 400 {
        let once = Instant::now();
        run(&mut *arena)?;
        best = best.min(once.elapsed().as_secs_f64() / STEPS as f64);
        runs += STEPS;
    }
    let mean = cpu_time().zip(cpu_start).map_or(f64::NAN, |(a, b)| (a - b) / runs as f64);
    println!("{what:<44} {:>10.2} us, {:>10.2} of this thread", best * 1e6, mean * 1e6);
    Ok(())
}

/// Seconds this thread has run, where the system says so: on a busy machine worth more than what
/// a clock says.
fn cpu_time() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok().map(|ns: f64| ns / 1e9)
}

fn slot_rows(plan: &Plan) -> usize {
    plan.leaves.iter().find(|s| &*s.name == "q").map_or(0, |s| s.shape.dim(0))
}

fn cached(plan: &Plan) -> usize {
    let pages = plan.leaves.iter().find(|s| &*s.name == "k_pages");
    pages.map_or(0, |s| s.shape.dim(0) * s.shape.dim(1))
}

fn attention(
    g: &mut Graph,
    rows: usize,
    (heads, key_heads, width): (usize, usize, usize),
    cached: usize,
    i: usize,
) -> std::result::Result<Vec<NodeId>, Invalid> {
    let f16 = DType::F16;
    let q = g.leaf("q", Shape::new(&[rows, heads, width])?, DType::F32)?;
    let q = g.affine(q, 1.0, i as f32)?;
    let k = g.leaf("k", Shape::new(&[rows, key_heads, width])?, DType::F32)?;
    let v = g.leaf("v", Shape::new(&[rows, key_heads, width])?, DType::F32)?;
    let seqs = g.leaf("seqs", Shape::new(&[1, 3])?, DType::I32)?;
    let pages = Shape::new(&[cached / 32, 32, key_heads, width])?;
    let k_pages = g.leaf("k_pages", pages, f16)?;
    let v_pages = g.leaf("v_pages", pages, f16)?;
    let table = g.leaf("table", Shape::new(&[1, cached / 32])?, DType::I32)?;
    Ok(vec![q, k, v, seqs, k_pages, v_pages, table])
}

fn run() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().and_then(|a| a.parse().ok()).unwrap_or(1);
    let family = args.next().and_then(|a| Family::ALL.into_iter().find(|f| f.key() == a));
    let filter = args.next().unwrap_or_default();
    let cpu = Cpu::new(threads, family)?;
    println!("{cpu:?}");
    let leaf =
        |g: &mut Graph, name: &str, dims: &[usize]| g.leaf(name, Shape::new(dims)?, DType::F32);
    let time = |what: &str, build: &Build<'_>| match what.contains(&filter) {
        true => time(&cpu, what, build),
        false => Ok(()),
    };
    for rows in [1, 512] {
        time(&format!("Add [{rows}, 576]"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 576])?;
            let y = leaf(g, &format!("y{i}"), &[rows, 576])?;
            g.add(x, y)
        })?;
        time(&format!("Swiglu [{rows}, 1536]"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 1536])?;
            let y = leaf(g, &format!("y{i}"), &[rows, 1536])?;
            g.push(Op::Glu(GluKind::Swiglu), &[x, y], "glu")
        })?;
        time(&format!("Geglu slices of [{rows}, 4096]"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 4096])?;
            let (a, b) = (g.slice(x, 1, 0, 2048)?, g.slice(x, 1, 2048, 2048)?);
            g.push(Op::Glu(GluKind::Geglu), &[a, b], "glu")
        })?;
        time(&format!("RmsNorm [{rows}, 576]"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 576])?;
            let w = leaf(g, "w", &[576])?;
            g.rms_norm(x, w, 1e-5)
        })?;
        time(&format!("QuantizeRows [{rows}, 1536]"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 1536])?;
            g.push(Op::QuantizeRows, &[x], "quantize")
        })?;
        for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
            time(&format!("Rope {style:?} [{rows}, 9, 64]"), &|g, i| {
                let x = leaf(g, &format!("x{i}"), &[rows, 9, 64])?;
                let table = leaf(g, "table", &[rows, 64])?;
                g.push(Op::Rope { style, inverse: false }, &[x, table], "rope")
            })?;
        }
        time(&format!("Round f16 [{rows}, 192]"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 192])?;
            g.round(x, DType::F16)
        })?;
        time(&format!("Lora r 8 [{rows}, 576] -> 1536"), &|g, i| {
            let x = leaf(g, &format!("x{i}"), &[rows, 576])?;
            let base = leaf(g, "base", &[rows, 1536])?;
            let slots = g.leaf("slots", Shape::new(&[rows])?, DType::I32)?;
            let (a, b) = (leaf(g, "a", &[8, 576])?, leaf(g, "b", &[1536, 8])?);
            let scale = leaf(g, "scale", &[1])?;
            g.push(Op::Lora { slots: 1 }, &[x, base, slots, a, b, scale], "lora")
        })?;
        for wrt in [LoraOperand::X, LoraOperand::A, LoraOperand::B] {
            time(&format!("LoraBack {wrt:?} r 8 [{rows}, 576] -> 1536"), &|g, i| {
                let x = leaf(g, "x", &[rows, 576])?;
                let dy = leaf(g, &format!("dy{i}"), &[rows, 1536])?;
                let slots = g.leaf("slots", Shape::new(&[rows])?, DType::I32)?;
                let (a, b) = (leaf(g, "a", &[8, 576])?, leaf(g, "b", &[1536, 8])?);
                let scale = leaf(g, "scale", &[1])?;
                let inner = leaf(g, "inner", &[rows, 8])?;
                let args = match wrt {
                    LoraOperand::X => vec![dy, slots, a, b, scale],
                    LoraOperand::A => vec![x, inner, slots],
                    LoraOperand::B => vec![inner, dy, slots],
                };
                g.push(Op::LoraBack { slots: 1, wrt, slot: 0 }, &args, "lora")
            })?;
        }
        time(&format!("CrossEntropy [{rows}, 49152]"), &|g, i| {
            let x = leaf(g, "x", &[rows, 49152])?;
            let x = if rows == 1 { leaf(g, &format!("x{i}"), &[1, 49152])? } else { x };
            let labels = g.leaf(&format!("l{i}"), Shape::new(&[rows])?, DType::I32)?;
            g.push(Op::CrossEntropy(CrossEntropyAttrs::PLAIN), &[x, labels], "loss")
        })?;
        for (name, shape) in [("SmolLM2", (9, 3, 64)), ("Gemma", (4, 1, 256))] {
            for cached in [32, 512, 4096] {
                let attrs = AttentionAttrs { prefix: true, ..AttentionAttrs::new(0.125) };
                time(&format!("Attention {name} {rows} rows, {cached} cached"), &|g, i| {
                    let args = attention(g, rows, shape, cached, i)?;
                    g.push(Op::Attention(attrs), &args, "attention")
                })?;
            }
            time(&format!("Attention {name} {rows} rows and its gradients"), &|g, i| {
                let args = attention(g, rows, shape, 0, i)?;
                let args = args.get(..4).unwrap_or_default();
                let y = g.push(Op::Attention(AttentionAttrs::new(0.125)), args, "attention")?;
                let wrt = args.get(..3).unwrap_or_default();
                let back = vjp(g, &[(y, y)], wrt).map_err(|e| Invalid::new(e.to_string()))?;
                *g = back.graph;
                let mut all = g.sum(y, &[0, 1, 2])?;
                for grad in back.grads {
                    let sum = g.sum(grad, &[0, 1, 2])?;
                    all = g.add(all, sum)?;
                }
                Ok(all)
            })?;
        }
    }
    Ok(())
}

fn main() {
    if let Err(e) = run() {
        eprintln!("{e}");
        std::process::exit(1);
    }
}
