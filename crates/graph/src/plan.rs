//! From a graph to an order of execution in which every value has its place in one arena.

use std::ops::Range;
use std::sync::Arc;

use crate::*;

/// Where an operand's storage is.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Leaf of this index in [`Plan::leaves`].
    Leaf(usize),
    /// Bytes `start .. start + len` of the arena; `start` is a multiple of 64.
    Arena {
        /// First byte.
        start: usize,
        /// Bytes.
        len: usize,
    },
}

/// One operand or result of a step.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Operand {
    /// Its storage.
    pub place: Place,
    /// Type, shape, and layout inside the storage.
    pub arg: Arg,
}

/// One op to run.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// The op; never `Leaf`, and a view op only ever as `Copy`.
    pub op: Op,
    /// The node it computes.
    pub node: NodeId,
    /// The node's name.
    pub name: Arc<str>,
    /// Operands in order.
    pub args: Vec<Operand>,
    /// The result: contiguous, in the arena.
    pub out: Operand,
}

/// A leaf a run must bind.
#[derive(Clone, PartialEq, Debug)]
pub struct LeafSlot {
    /// The node.
    pub node: NodeId,
    /// The leaf's name.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
}

/// A value that can be read after a run.
#[derive(Clone, PartialEq, Debug)]
pub struct OutputSlot {
    /// The node.
    pub node: NodeId,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
    /// Its bytes in the arena.
    pub range: Range<usize>,
}

/// A graph laid out for one device.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// What to run, in order.
    pub steps: Vec<Step>,
    /// What to bind.
    pub leaves: Vec<LeafSlot>,
    /// What to read, in the order it was asked for.
    pub outputs: Vec<OutputSlot>,
    /// The arena's size in bytes: exactly the high-water mark of a run.
    pub arena_bytes: usize,
    /// Scratch bytes per worker thread.
    pub scratch_bytes: usize,
    /// How many steps are copies the planner added for operands that a device does not read
    /// in place.
    pub copies: usize,
}

/// Plans the computation of `outputs`.
///
/// # Errors
/// `Refusal` when the device has no kernel for a node.
pub fn plan(graph: &Graph, outputs: &[NodeId], device: &dyn Device) -> Result<Plan> {
    let _ = (graph, outputs, device);
    Err(Invalid::new("unplanned").into())
}
