//! A device's values against the f64 interpreter, and the promises every device keeps.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use graph::{
    Arena, Code, DType, Device, Error, Fault, Graph, HostTensor, Invalid, Leaf, NodeId, Plan,
    Progress, Resident, Result, Segment, Shape, Stop, plan,
};

use super::case::CaseGraph;
use super::measure::Measure;
use crate::{Mode, Value, eval};

/// Host bytes at an address that suits any element.
pub(super) struct Aligned {
    buffer: Vec<u8>,
    start: usize,
    len: usize,
}

/// The alignment of what is bound to leaves, in bytes.
const ALIGN: usize = 64;

impl Aligned {
    pub(super) fn new(bytes: &[u8]) -> Aligned {
        let mut buffer = vec![0; bytes.len() + ALIGN];
        // `align_offset` may give up; then any address must do.
        let start = match buffer.as_ptr().align_offset(ALIGN) {
            start if start <= ALIGN => start,
            _ => 0,
        };
        buffer[start..start + bytes.len()].copy_from_slice(bytes);
        Aligned { buffer, start, len: bytes.len() }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.start + self.len]
    }
}

/// What a leaf of a plan is bound to.
enum Held {
    Host(Aligned),
    Resident(Arc<dyn Resident>),
}

/// Stops at the question of a given number, counted from 0, and at all later ones.
struct StopAt {
    asked: AtomicUsize,
    number: usize,
}

impl Stop for StopAt {
    fn should_stop(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) >= self.number
    }
}

/// A plan with its leaves bound.
struct Prepared<'d> {
    device: &'d dyn Device,
    plan: Plan,
    held: Vec<Held>,
}

impl<'d> Prepared<'d> {
    fn new(
        device: &'d dyn Device,
        case: &CaseGraph,
        graph: &Graph,
        outputs: &[NodeId],
    ) -> Result<Prepared<'d>> {
        let plan = plan(graph, outputs, device)?;
        let mut held = Vec::with_capacity(plan.leaves.len());
        for slot in &plan.leaves {
            let input = case.inputs.iter().find(|i| i.node == slot.node);
            let input = input.ok_or_else(|| Invalid::new("a leaf that is no input of the case"))?;
            let (dtype, shape) = (slot.dtype, slot.shape);
            held.push(match graph.node(slot.node).resident {
                true => {
                    let bytes = input.bytes.as_slice();
                    Held::Resident(device.load(&HostTensor { dtype, shape, bytes })?)
                }
                false => Held::Host(Aligned::new(&input.bytes)),
            });
        }
        Ok(Prepared { device, plan, held })
    }

    fn arena(&self) -> Result<Box<dyn Arena>> {
        let mut arena = self.device.arena(self.plan.arena_bytes)?;
        arena.poison();
        Ok(arena)
    }

    fn run(&self, arena: &mut dyn Arena, from: Segment, stop: &dyn Stop) -> Result<Progress> {
        let leaves: Vec<Leaf<'_>> = self
            .held
            .iter()
            .map(|held| match held {
                Held::Host(bytes) => Leaf::Host(bytes.bytes()),
                Held::Resident(resident) => Leaf::Resident(&**resident),
            })
            .collect();
        Ok(self.device.run(&self.plan, &leaves, arena, from, stop)?)
    }

    fn outputs(&self, arena: &dyn Arena) -> Result<Vec<Vec<u8>>> {
        let mut all = Vec::with_capacity(self.plan.outputs.len());
        for slot in &self.plan.outputs {
            let mut bytes = vec![0; slot.range.len()];
            arena.read(slot.range.clone(), &mut bytes)?;
            all.push(bytes);
        }
        Ok(all)
    }
}

/// What checking a device on one graph found.
pub struct Ran {
    /// Outputs against the f64 interpreter.
    pub measure: Measure,
    /// What else is wrong, with the name of the check.
    pub failures: Vec<(&'static str, String)>,
}

/// Runs `outputs` of a graph on a NaN-poisoned arena and compares them with the interpreter.
/// With `segments`, also checks that the arena's high-water mark is the plan's size, that a
/// second run gives the same bits, and that a run that stops and resumes at every edge does.
pub fn check(
    device: &dyn Device,
    case: &CaseGraph,
    graph: &Graph,
    outputs: &[NodeId],
    bound: f64,
    segments: bool,
) -> Result<Ran> {
    let prepared = Prepared::new(device, case, graph, outputs)?;
    let mut failures = Vec::new();
    let mut arena = prepared.arena()?;
    if prepared.run(&mut *arena, Segment::default(), &())? != Progress::Done {
        failures.push(("run", "stopped without being told to".to_string()));
    }
    let bytes = prepared.outputs(&*arena)?;

    let expected = eval(graph, &case.leaves, outputs, Mode::Exact)?;
    let mut measure = Measure::default();
    for ((slot, bytes), expected) in prepared.plan.outputs.iter().zip(&bytes).zip(&expected) {
        let got = Value::decode(slot.dtype, slot.shape, bytes)?;
        match (got.as_floats(), expected.as_floats()) {
            (Some(got), Some(expected)) => measure.compare(got, expected, bound),
            _ => measure.uneven |= got != *expected,
        }
    }

    if segments {
        let (mark, size) = (arena.high_water(), prepared.plan.arena_bytes);
        if mark != size {
            let found = format!("the arena's high-water mark is {mark}, the plan says {size}");
            failures.push(("memory", found));
        }
        // The same arena again, as it was left: nothing may depend on what it holds.
        prepared.run(&mut *arena, Segment::default(), &())?;
        if prepared.outputs(&*arena)? != bytes {
            failures.push(("again", "a second run gives other bits".into()));
        }
        match resumed(&prepared) {
            Ok(again) if again == bytes => {}
            Ok(_) => failures.push(("resume", "a stopped and resumed run gives other bits".into())),
            Err(e) => failures.push(("resume", e.to_string())),
        }
    }
    Ok(Ran { measure, failures })
}

/// Runs `outputs` of a graph, for the error it gives.
pub fn run(device: &dyn Device, case: &CaseGraph, graph: &Graph, outputs: &[NodeId]) -> Result<()> {
    let prepared = Prepared::new(device, case, graph, outputs)?;
    let mut arena = prepared.arena()?;
    prepared.run(&mut *arena, Segment::default(), &()).map(|_| ())
}

/// The values of `outputs` as a device computes them on a NaN-poisoned arena.
pub fn values(
    device: &dyn Device,
    case: &CaseGraph,
    graph: &Graph,
    outputs: &[NodeId],
) -> Result<Vec<Value>> {
    let prepared = Prepared::new(device, case, graph, outputs)?;
    let mut arena = prepared.arena()?;
    prepared.run(&mut *arena, Segment::default(), &())?;
    let bytes = prepared.outputs(&*arena)?;
    let slots = prepared.plan.outputs.iter().zip(&bytes);
    slots.map(|(slot, bytes)| Ok(Value::decode(slot.dtype, slot.shape, bytes)?)).collect()
}

/// Runs a small plan with bad bindings and lists what did not give a fault with the right code:
/// what was wrong, and what happened.
pub fn misuse(device: &dyn Device) -> Vec<(&'static str, String)> {
    let mut failures = Vec::new();
    if let Err(e) = misused(device, &mut failures) {
        failures.push(("preparing", e.to_string()));
    }
    failures
}

fn misused(device: &dyn Device, failures: &mut Vec<(&'static str, String)>) -> Result<()> {
    let mut graph = Graph::new();
    let x = graph.leaf("x", Shape::new(&[2, 32])?, DType::F32)?;
    let w = graph.weight("w", Shape::new(&[4, 32])?, DType::F32)?;
    let y = graph.project(x, w)?;
    let y = graph.unary(graph::Unary::Tanh, y)?;
    let plan = plan(&graph, &[y], device)?;

    let zeros = Aligned::new(&[0; 4 * 32 * 4]);
    let rows = |n: usize| Leaf::Host(&zeros.bytes()[..n * 32 * 4]);
    let load = |rows: usize, dtype: DType, len: usize| {
        let shape = Shape::new(&[rows, 32])?;
        let bytes = &zeros.bytes()[..len];
        Ok::<_, Error>(device.load(&HostTensor { dtype, shape, bytes })?)
    };
    let weight = load(4, DType::F32, 4 * 32 * 4)?;
    let smaller = load(2, DType::F32, 2 * 32 * 4)?;
    let narrower = load(4, DType::F16, 4 * 32 * 2)?;
    fn bind<'l>(plan: &Plan, x: NodeId, x_leaf: Leaf<'l>, w_leaf: Leaf<'l>) -> Vec<Leaf<'l>> {
        plan.leaves.iter().map(|slot| if slot.node == x { x_leaf } else { w_leaf }).collect()
    }
    let shape = Shape::new(&[4, 32])?;
    let foreign = Foreign(shape);
    let start = Segment::default();
    let beyond = Segment { step: plan.steps.len() + 1, tile: 0 };
    let mut arena = device.arena(plan.arena_bytes)?;
    let mut small = device.arena(plan.arena_bytes.saturating_sub(1))?;
    let good = || bind(&plan, x, rows(2), Leaf::Resident(&*weight));

    let mut check = |what: &'static str,
                     leaves: Vec<Leaf<'_>>,
                     arena: &mut dyn Arena,
                     from,
                     code: Option<Code>| {
        match (device.run(&plan, &leaves, arena, from, &()), code) {
            (Ok(_), _) => failures.push((what, "no fault".into())),
            (Err(fault), Some(code)) if fault.code != code => {
                failures.push((what, format!("{} was expected, got: {fault}", code.as_str())));
            }
            (Err(_), _) => {}
        }
    };
    let binding = Some(Code::BadBinding);
    let w = Leaf::Resident(&*weight);
    let bad = [
        ("a leaf that is too short", bind(&plan, x, rows(1), w)),
        ("a leaf that is too long", bind(&plan, x, rows(3), w)),
        ("a leaf that is not bound", vec![rows(2)]),
        ("a weight of another shape", bind(&plan, x, rows(2), Leaf::Resident(&*smaller))),
        ("a weight of another dtype", bind(&plan, x, rows(2), Leaf::Resident(&*narrower))),
        ("a weight of another device", bind(&plan, x, rows(2), Leaf::Resident(&foreign))),
    ];
    for (what, leaves) in bad {
        check(what, leaves, &mut *arena, start, binding);
    }
    check("an arena of another device", good(), &mut Foreign(shape), start, None);
    check("an arena that is too small", good(), &mut *small, start, None);
    check("a start beyond the plan", good(), &mut *arena, beyond, None);
    if load(4, DType::F32, 4 * 32 * 4 - 1).is_ok() {
        failures.push(("a weight that is too short", "it was loaded".into()));
    }
    // None of this may have hurt the device.
    device.run(&plan, &good(), &mut *arena, start, &())?;
    Ok(())
}

/// A weight and an arena that no device knows.
struct Foreign(Shape);

impl Resident for Foreign {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn shape(&self) -> Shape {
        self.0
    }

    fn bytes(&self) -> usize {
        512
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Arena for Foreign {
    fn bytes(&self) -> usize {
        1 << 20
    }

    fn high_water(&self) -> usize {
        0
    }

    fn poison(&mut self) {}

    fn read(&self, _: Range<usize>, _: &mut [u8]) -> std::result::Result<(), Fault> {
        Err(Fault::binding("", "this arena holds nothing"))
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Runs a plan, stopping at every edge.
fn resumed(prepared: &Prepared<'_>) -> Result<Vec<Vec<u8>>> {
    let mut arena = prepared.arena()?;
    let mut from = Segment::default();
    let mut number = 0;
    loop {
        // A device that asks before its first tile makes no progress when stopped at once: it is
        // stopped at the next question then.
        let stop = StopAt { asked: AtomicUsize::new(0), number };
        match prepared.run(&mut *arena, from, &stop)? {
            Progress::Done => return prepared.outputs(&*arena),
            Progress::Stopped(at) if at > from => (from, number) = (at, 0),
            Progress::Stopped(at) if at == from && number < MOST_QUESTIONS => number += 1,
            Progress::Stopped(at) => {
                let message = format!("stopped at {at:?}, having started at {from:?}");
                return Err(Invalid::new(message).into());
            }
        }
    }
}

/// How often a device may ask whether to stop before it makes progress.
const MOST_QUESTIONS: usize = 1024;
