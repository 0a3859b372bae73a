//! A program and its gradients on a device, against the f64 interpreter.
//!
//! A program may amplify rounding without bound, so the tolerance is measured: the interpreter
//! runs again with every value disturbed as f32 disturbs it.

use graph::{Code, DType, Device, Error, Graph, NodeId, Op, Result, vjp};

use super::Programs;
use super::program::Program;
use super::shrink::shrink;
use super::table;
use crate::check::case::{CaseGraph, Expected, Input};
use crate::check::{Rng, run};
use crate::ops::compute;
use crate::{Mode, Value, eval};

/// Disturbed runs.
const RUNS: usize = 4;

/// What a device may be off, in largest deviations of disturbed runs.
const ALLOWED: f64 = 8.0;

/// What a value is disturbed by, relative to its size and the rms of its tensor.
const NOISE: f64 = 4.0 / (1 << 24) as f64;

/// What a program with staircases may be off besides, relative to the largest element: a code
/// of eight bits may fall to the other side.
const STAIRS: f64 = 0.03;

/// Checks a program that differentiates.
pub(super) fn check(
    device: &dyn Device,
    program: &Program,
    (seed, number): (u64, u64),
    found: &mut Programs,
) {
    let ran = |p: &Program| compare(device, p, &mut Rng::new(seed, &format!("noise {number}")));
    match ran(program) {
        Ok(None) => {}
        Ok(Some(worst)) if worst <= 1.0 => {
            found.on_device += 1;
            found.worst_on_device = found.worst_on_device.max(worst);
        }
        Ok(Some(_)) | Err(_) => {
            let fails = |p: &Program| match ran(p) {
                Ok(worst) => worst.is_some_and(|w| w.is_nan() || w > 1.0),
                Err(_) => vjp(&p.graph, &p.cotangents, &p.wrt).is_ok(),
            };
            let least = shrink(program, &fails);
            let why = match ran(&least) {
                Err(e) => e.to_string(),
                Ok(worst) => format!(
                    "the device is off by {:.1e} of what rounding explains",
                    worst.unwrap_or(0.0)
                ),
            };
            found.failures.push(format!("program {number} of seed {seed}: {why}\n{least}"));
        }
    }
}

/// The largest error of any output or gradient, relative to what rounding explains; `None` when
/// rounding moves the program across a kink.
fn compare(device: &dyn Device, program: &Program, rng: &mut Rng) -> Result<Option<f64>> {
    let back = vjp(&program.graph, &program.cotangents, &program.wrt)?;
    let mut outputs: Vec<NodeId> = program.cotangents.iter().map(|(y, _)| *y).collect();
    outputs.extend(&back.grads);
    let mut case = CaseGraph::new("", Rng::new(0, ""));
    for (id, data) in &program.leaves {
        let name = program.graph.node(*id).name.to_string();
        let (bytes, expected) = (data.bytes.clone(), Expected::Nothing);
        case.inputs.push(Input { node: *id, name, bytes, expected });
    }
    case.leaves = program.values();
    let got = match run::values(device, &case, &back.graph, &outputs) {
        // A device need not read its packed weights in every op.
        Err(Error::Refusal(refusal)) if refusal.code == Code::NoKernel && weighs(program) => {
            return Ok(None);
        }
        got => got?,
    };
    let expected = eval(&back.graph, &case.leaves, &outputs, Mode::Exact)?;

    let (_, sides) = noisy(&back.graph, program, 0.0, rng)?;
    let mut tolerance = vec![0.0f64; outputs.len()];
    for _ in 0..RUNS {
        let (values, moved) = noisy(&back.graph, program, NOISE, rng)?;
        if moved != sides {
            return Ok(None);
        }
        for ((tolerance, id), expected) in tolerance.iter_mut().zip(&outputs).zip(&expected) {
            let pairs = values[id.index()].as_floats().unwrap_or(&[]).iter();
            for (a, b) in pairs.zip(expected.as_floats().unwrap_or(&[])) {
                *tolerance = tolerance.max((a - b).abs());
            }
        }
    }
    let stairs = back.graph.ids().any(|id| {
        let op = &back.graph.node(id).op;
        matches!(op, Op::Cast { .. } | Op::Round { .. } | Op::QuantizeRows)
    });
    let mut worst = 0.0f64;
    for ((got, expected), noise) in got.iter().zip(&expected).zip(tolerance) {
        let (got, expected) = (got.as_floats().unwrap_or(&[]), expected.as_floats().unwrap_or(&[]));
        let largest = expected.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let share = if stairs { STAIRS } else { f64::from(f32::EPSILON) };
        let allowed = ALLOWED * noise + share * largest + f64::from(f32::MIN_POSITIVE);
        for (a, b) in got.iter().zip(expected) {
            let error = (a - b).abs() / allowed;
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
        }
    }
    Ok(Some(worst))
}

/// True when a float leaf is a weight that the device packs.
fn weighs(program: &Program) -> bool {
    let nodes = program.graph.ids().map(|id| program.graph.node(id));
    nodes.filter(|node| node.dtype.is_float()).any(|node| node.resident)
}

/// All values of a graph with every one disturbed, and what every op reads disturbed once more,
/// for the rounding inside of it; and the sides of all kinks.
fn noisy(
    graph: &Graph,
    program: &Program,
    noise: f64,
    rng: &mut Rng,
) -> Result<(Vec<Value>, Vec<i32>)> {
    let mut values: Vec<Value> = Vec::with_capacity(graph.len());
    let mut sides = Vec::new();
    for id in graph.ids() {
        let node = graph.node(id);
        if let Some(data) = program.leaves.get(&id) {
            values.push(data.value.clone());
            continue;
        }
        let mut args = Vec::with_capacity(node.args.len());
        for a in &node.args {
            let mut arg = values[a.index()].clone();
            if !moves(&node.op) {
                disturb(&mut arg, noise, 0.0, rng);
            }
            args.push(arg);
        }
        let args: Vec<&Value> = args.iter().collect();
        let out = (node.dtype, node.shape);
        let dtypes: Vec<DType> = node.args.iter().map(|&a| graph.node(a).dtype).collect();
        let mut value = compute(&node.op, &args, &dtypes, out, &node.name, Mode::Exact)?;
        table::sides(&node.op, &args, &value, &mut sides);
        disturb(&mut value, noise, inside(&node.op, &args), rng);
        values.push(value);
    }
    Ok((values, sides))
}

/// True for ops that move values and compute nothing.
fn moves(op: &Op) -> bool {
    op.is_view() || matches!(op, Op::Copy | Op::Pad { .. } | Op::Concat { .. } | Op::Gather)
}

fn rms(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// The size of what an op subtracts from one another, where its result may be smaller: the
/// gradients of norms, softmax and attention take out a part of `dy`.
fn inside(op: &Op, args: &[&Value]) -> f64 {
    let floats = |i: usize| args.get(i).and_then(|v| v.as_floats()).unwrap_or(&[]);
    let dy = args.last().and_then(|v| v.as_floats()).map_or(0.0, rms);
    match op {
        Op::NormBack { .. } | Op::RmsNormBack { .. } => {
            let cols = args.first().map_or(1, |x| x.shape().cols().max(1));
            let rows = floats(0).chunks(cols).map(rms);
            let weight = if args.len() > 2 { rms(floats(1)).max(1.0) } else { 1.0 };
            weight * dy / rows.fold(1.0, f64::min).max(LEAST_DIVISOR)
        }
        Op::SoftmaxBack { .. } | Op::SoftmaxSinkBack(_) => dy,
        // Beside what is subtracted, the slope of a saturated cap is below f32's resolution.
        Op::AttentionQueryBack(_) => rms(floats(5)) * rms(floats(2)).max(1.0),
        Op::AttentionBack { .. } => rms(floats(6)) * rms(floats(2)).max(1.0),
        _ => 0.0,
    }
}

/// What rows are divided by is not below this: the constants of norms are not.
const LEAST_DIVISOR: f64 = 0.01;

fn disturb(value: &mut Value, noise: f64, inside: f64, rng: &mut Rng) {
    let Some(x) = value.as_floats_mut().filter(|_| noise > 0.0) else { return };
    let size = rms(x) + inside;
    x.iter_mut().for_each(|x| *x += noise * rng.between(-1.0, 1.0) * (x.abs() + size));
}
