//! The interpreter as a device.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use graph::{
    Arena, Call, Code, DType, Device, Fault, Graph, HostTensor, Leaf, Needs, Op, Operand, Place,
    Plan, Progress, Resident, Segment, Shape, Step, Stop, Unsupported,
};

use crate::ops::compute;
use crate::value::filled;
use crate::{Mode, Value};

/// Runs plans in f64, one step per segment.
///
/// Values stay in f64 beside the arena, and their rounded bytes are written into it. So a plan
/// that reads storage which was never written, or was overwritten, is a fault that names the
/// node, and so is a step whose result is not what the op's shape rule says.
#[derive(Copy, Clone, Default, Debug)]
pub struct Reference;

/// A weight, as its bytes were given.
struct Loaded {
    dtype: DType,
    shape: Shape,
    bytes: Vec<u8>,
}

impl Resident for Loaded {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The arena: rounded bytes, and the values in f64 by their first byte and length: one without
/// elements may begin where another does.
struct Values {
    bytes: Vec<u8>,
    high_water: usize,
    stored: BTreeMap<(usize, usize), Value>,
}

impl Arena for Values {
    fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn high_water(&self) -> usize {
        self.high_water
    }

    fn poison(&mut self) {
        // All ones are a NaN in every float type.
        self.bytes.fill(0xff);
        self.stored.clear();
    }

    fn read(&self, range: Range<usize>, to: &mut [u8]) -> Result<(), Fault> {
        match self.bytes.get(range.clone()) {
            Some(bytes) if bytes.len() == to.len() => {
                to.copy_from_slice(bytes);
                Ok(())
            }
            _ => {
                let message = format!(
                    "bytes {range:?} of an arena of {} read into {}",
                    self.bytes.len(),
                    to.len()
                );
                Err(Fault::new(Code::Internal, "", message))
            }
        }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl Values {
    fn write(&mut self, step: &Step, value: Value, bytes: &[u8]) -> Result<(), Fault> {
        let fault = |message: &str| Fault::new(Code::Internal, &*step.name, message);
        let Place::Arena { start, len } = step.out.place else {
            return Err(fault("a result has no place in the arena"));
        };
        let end = start.checked_add(len).filter(|_| len == bytes.len());
        let end = end.ok_or_else(|| fault("a result's place has not the result's size"))?;
        let place = self.bytes.get_mut(start..end);
        place
            .ok_or_else(|| fault("a result's place is outside of the arena"))?
            .copy_from_slice(bytes);
        self.high_water = self.high_water.max(end);
        self.stored.retain(|&(at, old), _| at >= end || at + old <= start || old == 0);
        self.stored.insert((start, len), value);
        Ok(())
    }
}

/// The leaves of one run, decoded.
struct Bound(Vec<Value>);

fn bind(plan: &Plan, leaves: &[Leaf<'_>]) -> Result<Bound, Fault> {
    if plan.leaves.len() != leaves.len() {
        let message = format!("{} leaves are bound to {}", leaves.len(), plan.leaves.len());
        return Err(Fault::binding("", message));
    }
    let mut values = Vec::with_capacity(leaves.len());
    for (slot, leaf) in plan.leaves.iter().zip(leaves) {
        let bytes = match leaf {
            Leaf::Host(bytes) => bytes,
            Leaf::Resident(resident) => match resident.as_any().downcast_ref::<Loaded>() {
                Some(loaded) if loaded.dtype == slot.dtype && loaded.shape == slot.shape => {
                    loaded.bytes.as_slice()
                }
                Some(loaded) => {
                    let message = format!(
                        "the leaf is {} {}, the weight {} {}",
                        slot.dtype, slot.shape, loaded.dtype, loaded.shape
                    );
                    return Err(Fault::binding(&slot.name, message));
                }
                None => return Err(Fault::binding(&slot.name, "a weight of another device")),
            },
        };
        let value = Value::decode(slot.dtype, slot.shape, bytes);
        values.push(value.map_err(|e| Fault::binding(&slot.name, e.message))?);
    }
    Ok(Bound(values))
}

fn operand(step: &Step, operand: &Operand, bound: &Bound, arena: &Values) -> Result<Value, Fault> {
    let fault = |message: String| Fault::new(Code::Internal, &*step.name, message);
    let source = match operand.place {
        Place::Leaf(i) => {
            bound.0.get(i).ok_or_else(|| fault(format!("the plan has no leaf {i}")))?
        }
        Place::Arena { start, len } => match arena.stored.get(&(start, len)) {
            Some(value) => value,
            None => {
                return Err(fault(format!(
                    "bytes {start}.. of {len} are read, but hold no whole value"
                )));
            }
        },
    };
    let arg = operand.arg;
    if arg.dtype.element_bytes().is_none() {
        // Block formats have no strides.
        if !arg.is_contiguous() || arg.layout.offset != 0 {
            return Err(fault(format!("a {} operand is strided", arg.dtype)));
        }
        return source.reshaped(arg.shape).map_err(|e| fault(e.message));
    }
    source
        .strided(arg.shape, &arg.layout)
        .ok_or_else(|| fault("an operand's layout reaches beyond its storage".into()))
}

/// Refuses a step whose operands and result the op's shape rule does not accept.
fn check_shapes(step: &Step) -> Result<(), Fault> {
    let mut graph = Graph::new();
    let made = (|| {
        let mut args = Vec::with_capacity(step.args.len());
        for (i, operand) in step.args.iter().enumerate() {
            args.push(graph.leaf(&i.to_string(), operand.arg.shape, operand.arg.dtype)?);
        }
        graph.push(step.op.clone(), &args, &step.name)
    })();
    let made = made.map_err(|e| Fault::new(Code::Internal, &*step.name, e.message))?;
    let (node, out) = (graph.node(made), step.out.arg);
    if node.shape != out.shape || node.dtype != out.dtype || !out.is_contiguous() {
        let message = format!(
            "the plan says {} {}, the op gives {} {}",
            out.dtype, out.shape, node.dtype, node.shape
        );
        return Err(Fault::new(Code::Internal, &*step.name, message));
    }
    Ok(())
}

fn run_step(step: &Step, bound: &Bound, arena: &mut Values) -> Result<(), Fault> {
    check_shapes(step)?;
    let mut args = Vec::with_capacity(step.args.len());
    for a in &step.args {
        args.push(operand(step, a, bound, arena)?);
    }
    let out = step.out.arg;
    let args: Vec<&Value> = args.iter().collect();
    let dtypes: Vec<DType> = step.args.iter().map(|a| a.arg.dtype).collect();
    let made = (out.dtype, out.shape);
    let value = compute(&step.op, &args, &dtypes, made, &step.name, Mode::Exact)?;
    // Codes are made from the operand: making them again from rounded values may differ.
    let rounds = matches!(step.op, Op::QuantizeRows | Op::Cast { .. });
    let source = if rounds { args.first().copied().unwrap_or(&value) } else { &value };
    let bytes =
        source.encode(out.dtype).map_err(|e| Fault::new(Code::Internal, &*step.name, e.message))?;
    arena.write(step, value, &bytes)
}

impl Device for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn family(&self) -> &'static str {
        "f64"
    }

    fn supports(&self, call: &Call<'_>) -> Result<Needs, Unsupported> {
        if matches!(call.op, Op::Leaf) || call.op.is_view() {
            return Err(Unsupported::Kernel(format!("{} as a step", call.op.name())));
        }
        Ok(Needs::default())
    }

    fn load(&self, tensor: &HostTensor<'_>) -> Result<Arc<dyn Resident>, Fault> {
        if tensor.shape.bytes(tensor.dtype) != Some(tensor.bytes.len()) {
            let message = format!(
                "a {} weight of shape {} was given {} bytes",
                tensor.dtype,
                tensor.shape,
                tensor.bytes.len()
            );
            return Err(Fault::binding("", message));
        }
        let (dtype, shape, bytes) = (tensor.dtype, tensor.shape, tensor.bytes.to_vec());
        Ok(Arc::new(Loaded { dtype, shape, bytes }))
    }

    fn arena(&self, bytes: usize) -> Result<Box<dyn Arena>, Fault> {
        let bytes = filled(bytes, 0).map_err(|e| Fault::new(Code::OutOfMemory, "", e.message))?;
        Ok(Box::new(Values { bytes, high_water: 0, stored: BTreeMap::new() }))
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> Result<Progress, Fault> {
        let arena = arena.as_any_mut().downcast_mut::<Values>();
        let arena = arena.ok_or_else(|| Fault::binding("", "an arena of another device"))?;
        if from.tile != 0 || from.step > plan.steps.len() {
            return Err(Fault::new(Code::Internal, "", format!("there is nothing at {from:?}")));
        }
        if arena.bytes.len() < plan.arena_bytes {
            let message = format!(
                "an arena of {} bytes for a plan of {}",
                arena.bytes.len(),
                plan.arena_bytes
            );
            return Err(Fault::binding("", message));
        }
        let bound = bind(plan, leaves)?;
        for (i, step) in plan.steps.iter().enumerate().skip(from.step) {
            // The first step runs in any case, so that every run makes progress.
            if i > from.step && stop.should_stop() {
                return Ok(Progress::Stopped(Segment { step: i, tile: 0 }));
            }
            run_step(step, &bound, arena)?;
        }
        Ok(Progress::Done)
    }
}
