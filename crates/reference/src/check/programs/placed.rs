//! Random programs and their gradients over two devices, of which the first lacks kernels: bit
//! for bit what one device computes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use graph::{
    Arena, Call, Code, Device, Error, Fault, HostTensor, Invalid, Leaf, Needs, Placed, Plan,
    Policy, Position, Progress, Resident, Result, Segment, Stop, Unsupported, Workspace, place,
    vjp,
};

use super::maker;
use super::program::Program;
use crate::check::Rng;
use crate::check::run::Aligned;

/// A device without some of its kernels, which reads dense operands only where it is `dense`.
struct Lacking<'d> {
    device: &'d dyn Device,
    ops: BTreeSet<&'static str>,
    dense: bool,
}

type Ran<T> = std::result::Result<T, Fault>;

impl Device for Lacking<'_> {
    fn name(&self) -> &'static str {
        "lacking"
    }

    fn family(&self) -> &'static str {
        self.device.family()
    }

    fn supports(&self, call: &Call<'_>) -> std::result::Result<Needs, Unsupported> {
        if self.ops.contains(call.op.name()) {
            return Err(Unsupported::Kernel(call.op.name().into()));
        }
        let strided = call.args.iter().position(|a| !a.is_contiguous());
        match strided.filter(|_| self.dense && call.op.name() != "Copy") {
            Some(i) => Err(Unsupported::Layout(i)),
            None => self.device.supports(call),
        }
    }

    fn load(&self, tensor: &HostTensor<'_>) -> Ran<Arc<dyn Resident>> {
        self.device.load(tensor)
    }

    fn arena(&self, bytes: usize) -> Ran<Box<dyn Arena>> {
        self.device.arena(bytes)
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> Ran<Progress> {
        if let Some(step) = plan.steps.iter().find(|s| self.ops.contains(s.op.name())) {
            return Err(Fault::new(Code::Internal, &*step.name, "it ran where it cannot"));
        }
        self.device.run(plan, leaves, arena, from, stop)
    }
}

/// Stops every other time.
struct Often(AtomicUsize);

impl Stop for Often {
    fn should_stop(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) % 2 == 1
    }
}

/// All outputs of a placed program, stopped wherever it can be.
fn run(program: &Program, placed: &Placed, devices: &[&dyn Device]) -> Result<Vec<Vec<u8>>> {
    let unbound = |name: &str| Error::from(Fault::binding(name, "the program has no such leaf"));
    let mut loaded: Vec<Option<Arc<dyn Resident>>> = Vec::new();
    // Aligned for every element type.
    let mut hosts = Vec::new();
    for leaf in &placed.leaves {
        let (dtype, shape, name) = (leaf.slot.dtype, leaf.slot.shape, &*leaf.slot.name);
        let data = program.leaves.get(&leaf.slot.node).ok_or_else(|| unbound(name))?;
        let tensor = HostTensor { dtype, shape, bytes: &data.bytes };
        let device = devices.get(leaf.device).filter(|_| leaf.resident);
        loaded.push(device.map(|device| device.load(&tensor)).transpose()?);
        hosts.push(Aligned::new(&data.bytes));
    }
    let pairs = loaded.iter().zip(&hosts);
    let leaves: Vec<Leaf<'_>> = pairs
        .map(|(weight, host)| match weight {
            Some(weight) => Leaf::Resident(weight.as_ref()),
            None => Leaf::Host(host.bytes()),
        })
        .collect();
    let mut workspace = Workspace::default();
    placed.reserve(devices, &mut workspace)?;
    workspace.poison();
    let often = Often(AtomicUsize::new(0));
    let mut from = Position::default();
    while let Some(at) = placed.run(devices, &leaves, &mut workspace, from, &often)? {
        from = at;
    }
    let (planned, high) = (placed.arena_bytes(), workspace.arena().1);
    if planned != high {
        let message = format!("{planned} bytes of arena were planned, {high} were written");
        return Err(Invalid::new(message).into());
    }
    let read = |(i, slot): (usize, &graph::OutputSlot)| {
        let mut bytes = vec![0; slot.range.len()];
        placed.read(&workspace, i, &mut bytes)?;
        Ok(bytes)
    };
    placed.outputs().enumerate().map(read).collect()
}

/// What [`check_placed`] found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Placements {
    /// Programs that were compared.
    pub compared: usize,
    /// Of these, those that ran on both devices.
    pub several: usize,
    /// Bytes that crossed between devices.
    pub crossed: usize,
    /// Programs that `strict` refused.
    pub refused: usize,
    /// What went wrong.
    pub failures: Vec<String>,
}

/// Runs random programs and their gradients on the device without some kernels, chosen at random,
/// with the device itself to fall back on: the result is bit for bit the device's own, nothing
/// falls back needlessly, and what falls back is what `strict` refuses.
pub fn check_placed(device: &dyn Device, seed: u64, count: u64) -> Placements {
    let mut rng = Rng::new(seed, "placement");
    let mut found = Placements::default();
    for number in 0..count {
        if let Err(why) = check_one(device, &maker::program(seed, number), &mut rng, &mut found) {
            found.failures.push(format!("program {number} of seed {seed}: {why}"));
        }
    }
    found
}

fn check_one(
    device: &dyn Device,
    program: &Program,
    rng: &mut Rng,
    found: &mut Placements,
) -> std::result::Result<(), String> {
    let Ok(back) = vjp(&program.graph, &program.cotangents, &program.wrt) else { return Ok(()) };
    let (graph, say) = (&back.graph, |e: Error| e.to_string());
    let mut outputs: Vec<_> = program.cotangents.iter().map(|(y, _)| *y).collect();
    outputs.extend(&back.grads);
    let names: BTreeSet<&str> = graph.ids().map(|id| graph.node(id).op.name()).collect();
    let ops = names.into_iter().filter(|_| rng.below(3) == 0).collect();
    let lacking = Lacking { device, ops, dense: rng.below(2) == 0 };
    let (alone, devices): ([&dyn Device; 1], [&dyn Device; 2]) = ([device], [&lacking, device]);
    // A device need not read its packed weights in every op.
    let Ok(one) = place(graph, &outputs, &alone, Policy::Fallback) else { return Ok(()) };
    let placed = place(graph, &outputs, &devices, Policy::Fallback).map_err(say)?;
    found.compared += 1;
    found.several += usize::from(placed.plans().count() > 1);
    found.crossed += placed.fallbacks.iter().map(|f| f.crossing).sum::<usize>();
    // A step falls back too when it reads a view that the device cannot copy.
    let excused = |f: &&graph::Fallback| {
        lacking.ops.contains(f.op) || f.reason.contains("no kernel for Copy")
    };
    let needless = placed.fallbacks.iter().find(|f| !excused(f) || f.device != 1);
    if let Some(fallback) = needless {
        return Err(format!("{fallback:?} fell back needlessly"));
    }
    let (expected, got) = (run(program, &one, &alone), run(program, &placed, &devices));
    let without = &lacking.ops;
    match (expected, got) {
        (Ok(expected), Ok(got)) if expected == got => {}
        (Ok(_), Ok(_)) => return Err(format!("other values without {without:?}")),
        // Indices out of range, which random programs have.
        (Err(a), Err(b)) if a == b => {}
        (Err(e), _) | (_, Err(e)) => return Err(format!("without {without:?}: {e}")),
    }
    match place(graph, &outputs, &devices, Policy::Strict) {
        Ok(_) if placed.fallbacks.is_empty() => Ok(()),
        Ok(_) => Err("`strict` lets what falls back pass".into()),
        Err(Error::Refusal(refusal)) => {
            found.refused += 1;
            let named = placed.fallbacks.iter().any(|f| f.name == refusal.node);
            let by = refusal.device.as_deref().unwrap_or("").starts_with("lacking");
            let copy = refusal.op == "Copy";
            match refusal.code == Code::NoKernel && by && (named || copy) {
                true => Ok(()),
                false => Err(format!("`strict` refuses what does not fall back: {refusal}")),
            }
        }
        Err(e) => Err(e.to_string()),
    }
}
