//! The f64 interpreter of every op, and the checker of gradients and devices.
//!
//! *Knows*: the formula of every [`graph::Op`], written as plain loops in f64, and what makes
//! a gradient right. *Must not know*: any kernel, thread or file. It is slow and obviously
//! right: no blocking, no fusing, no cleverness.
//!
//! - [`eval`] computes nodes of a graph; [`Mode`] says whether rounding ops round.
//! - [`Reference`] runs plans like any other [`graph::Device`], and finds planning mistakes:
//!   an operand that was overwritten or never written is a fault here.
//! - [`check`] holds the cases of every op, the gradient checker and the suite of conformance
//!   that every device passes.

pub mod check;
mod device;
mod eval;
mod ops;
mod value;

pub use device::Reference;
pub use eval::{Leaves, Mode, eval};
pub use value::Value;
