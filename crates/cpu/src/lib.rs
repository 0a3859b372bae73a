//! The CPU device: kernels in three families, a pool of threads, packed weights.
//!
//! *Knows*: how every op is computed on this processor, and with what arithmetic. *Must not
//! know*: what a graph is for, files, tokens, requests.
//!
//! Bits are a promise here: a kernel's result for a row depends on the row, the op and the
//! kernel family alone, never on how many rows it came with, on threads or on where a run was
//! stopped and resumed.

#![allow(unsafe_code)] // vectors and arena memory; every block says why it is sound
#![allow(clippy::needless_range_loop)] // register blocks are indexed by constants

#[cfg(target_arch = "x86_64")]
mod amx;
mod arena;
mod device;
mod dot;
mod job;
mod kernels;
mod matmul;
mod pack;
mod pool;
mod simd;
#[cfg(test)]
mod testing;

pub use device::Cpu;
pub use simd::Family;
