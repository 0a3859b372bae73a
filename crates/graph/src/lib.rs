//! The intermediate representation: pure ops in SSA form, their shapes, their gradients, and
//! the plan of a graph's execution.
//!
//! Knows: what every op means, which dtypes and shapes it takes, how it differentiates or why
//! it does not, and where each value lives in an arena.
//! Must not know: files, threads, clocks, tokens, or how any device computes an op.
//!
//! - [`Op`] is the closed list of ops; the formula of each stands at its variant.
//! - [`Graph`] builds nodes and checks shapes as it goes.
//! - [`vjp`] differentiates a graph, or says by name why it cannot.
//! - [`plan()`] lays a graph out for one [`Device`]: order, views, copies, exact bytes.

mod build;
mod cost;
mod device;
mod dtype;
mod error;
mod grad;
mod node;
mod numerics;
mod op;
mod place;
mod plan;
mod precision;
mod recompute;
mod schedule;
mod search;
mod shape;
mod shape_rule;

pub use cost::Cost;
pub use device::{
    Arena, Arg, Call, Device, HostTensor, Leaf, Needs, Progress, Resident, Segment, Stop,
    Unsupported,
};
pub use dtype::{DType, INT16_GROUP, Q8_ROWS_BLOCK};
pub use error::{Code, Error, Fault, Invalid, Kind, Refusal, Result};
pub use grad::{Backward, vjp};
pub use node::{Graph, Node, NodeId, Pass};
pub use numerics::NUMERICS;
pub use op::*;
pub use place::{Fallback, Placed, PlacedLeaf, Policy, Position, Workspace, place};
pub use plan::{LeafSlot, Operand, OutputSlot, Place, Plan, Step, plan};
pub use precision::{GradPrecision, grad_precision};
pub use recompute::{Recompute, recompute};
pub use search::{Culprit, Search};
pub use shape::{Layout, MAX_RANK, Shape};
