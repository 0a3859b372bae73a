//! How fast products are, per kernel family, weight format, rows and threads:
//!
//! ```text
//! cargo run --release -p gradus-cpu --example matmul_speed -- [FAMILY] [THREADS] [DTYPE]...
//! ```
//!
//! `FAMILY` is `portable`, `avx2`, `avx512`, `vnni`, `amx` or `all`. For each format: packing in ns per
//! element; `decode`, one row times a weight of about 128 MiB, in GB/s of packed bytes;
//! `forward`, rows times a weight of [2048, 2048], and `backward`, the product with the
//! transposed weight, in Gop/s (a multiplication and an addition are two); `bf16` is `backward`
//! with rows of bf16. Quantized products include the quantization of the rows, those of bf16
//! rows their rounding. Each figure is the best of several runs.

use std::error::Error;
use std::time::{Duration, Instant};

use cpu::{Cpu, Family};
use gguf::TensorType;
use graph::{
    DType, Device, Graph, HostTensor, Leaf, NodeId, Op, Progress, Resident, Segment, Shape, plan,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Runs of one figure go on for about this long.
const PATIENCE: Duration = Duration::from_millis(300);

const SIDE: usize = 2048;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let family = args.first().map_or("all", String::as_str);
    let threads = args.get(1).map_or(Ok(1), |t| t.parse())?;
    let formats = args.get(2..).unwrap_or_default();
    for family in Family::ALL.into_iter().filter(|f| family == "all" || f.key() == family) {
        if !family.is_available() {
            println!("{}: not on this processor", family.name());
            continue;
        }
        let cpu = Cpu::new(threads, Some(family))?;
        for dtype in TensorType::ALL.map(DType::from) {
            let chosen = formats.is_empty() || formats.iter().any(|f| f == dtype.name());
            if dtype != DType::I32 && chosen {
                measure(&cpu, dtype)?;
            }
        }
    }
    Ok(())
}

/// Prints one line.
fn measure(cpu: &Cpu, dtype: DType) -> Result<()> {
    print!("{:11} x{} {:6}", cpu.family(), cpu.threads(), dtype.name());
    let row_bytes = dtype.row_bytes(SIDE).ok_or("rows are not whole blocks")?;
    let rows = (128 << 20) / row_bytes;
    let (big, packing) = weight(cpu, dtype, rows)?;
    print!("  pack {:.2} ns", packing.as_secs_f64() * 1e9 / (rows * SIDE) as f64);
    let time = product(cpu, dtype, &*big, 1, rows, (true, false))?;
    print!("  decode {:5.1} GB/s", big.bytes() as f64 / time.as_secs_f64() / 1e9);
    drop(big);

    let (small, _) = weight(cpu, dtype, SIDE)?;
    let slow = cpu.kernel_family() == Family::Portable;
    for (name, forward, narrow) in
        [("forward", true, false), ("backward", false, false), ("bf16", false, true)]
    {
        if narrow && !matches!(dtype, DType::Block(_)) {
            continue;
        }
        print!("  {name}");
        for rows in if slow { &[1, 8][..] } else { &[1, 2, 4, 8, 32, 512] } {
            if forward || *rows >= 8 {
                let time = product(cpu, dtype, &*small, *rows, SIDE, (forward, narrow))?;
                let ops = (2 * rows * SIDE * SIDE) as f64;
                print!(" {rows}:{:.0}", ops / time.as_secs_f64() / 1e9);
            }
        }
    }
    println!();
    Ok(())
}

/// A weight `[rows, 2048]` and the time packing took.
fn weight(
    cpu: &Cpu,
    dtype: DType,
    rows: usize,
) -> Result<(std::sync::Arc<dyn Resident>, Duration)> {
    let shape = Shape::new(&[rows, SIDE])?;
    let len = shape.bytes(dtype).ok_or("rows are not whole blocks")?;
    // Bytes below 64: no float that they are part of is infinite.
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 26) as u8
    };
    let bytes: Vec<u8> = (0..len).map(|_| next()).collect();
    let start = Instant::now();
    let weight = cpu.load(&HostTensor { dtype, shape, bytes: &bytes })?;
    Ok((weight, start.elapsed()))
}

/// The best time of `x . w^T`, or of `x . w`.
fn product(
    cpu: &Cpu,
    dtype: DType,
    weight: &dyn Resident,
    m: usize,
    n: usize,
    (forward, narrow): (bool, bool),
) -> Result<Duration> {
    let mut graph = Graph::new();
    let w = graph.weight("w", Shape::new(&[n, SIDE])?, dtype)?;
    let columns = if forward { SIDE } else { n };
    let x = graph.leaf("x", Shape::new(&[m, columns])?, DType::F32)?;
    let left: NodeId = match dtype {
        DType::Block(_) if forward => graph.push(Op::QuantizeRows, &[x], "rows")?,
        _ if narrow => graph.cast(x, DType::BF16)?,
        _ => x,
    };
    let y = graph.push(Op::MatMul { ta: false, tb: forward }, &[left, w], "y")?;
    let plan = plan(&graph, &[y], cpu)?;
    let values: Vec<f32> = (0..m * columns).map(|i| (i as f32 * 0.37).sin()).collect();
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let leaves: Vec<Leaf<'_>> = plan
        .leaves
        .iter()
        .map(|slot| match &*slot.name {
            "w" => Leaf::Resident(weight),
            _ => Leaf::Host(&bytes),
        })
        .collect();
    let mut arena = cpu.arena(plan.arena_bytes)?;
    let (mut best, start) = (Duration::MAX, Instant::now());
    while best == Duration::MAX || start.elapsed() < PATIENCE {
        let begin = Instant::now();
        let done = cpu.run(&plan, &leaves, &mut *arena, Segment::default(), &())?;
        best = best.min(begin.elapsed());
        if done != Progress::Done {
            return Err("a run stopped by itself".into());
        }
    }
    Ok(best)
}
