//! The CPU device: kernels in five families, a pool of threads, packed weights.
//!
//! *Knows*: how every op is computed on this processor, and with what arithmetic. *Must not
//! know*: what a graph is for, files, tokens, requests.
//!
//! Bits are a promise here (P5): a kernel's result for a row depends on the row, the op and the
//! kernel family alone, never on how many rows it came with, on threads or on where a run was
//! stopped and resumed. What gives this, for the author of a kernel:
//!
//! - One arithmetic per op, dtype and family, never chosen by the number of rows or threads or by
//!   what else a graph does. Instructions mix only where they give equal bits, as exact integers
//!   do. Sums of bf16 by AMX have an order of their own, so that is a family; there a single row
//!   goes through a padded tile.
//! - SIMD lanes run over outputs. The reduced dimension is one chain in ascending order, of fused
//!   multiply-adds where the family has them. No chain is split between threads; one that is cut
//!   into blocks or rounds stores its sums and goes on from them.
//! - Quantized products: each row alone, in groups along K (32, or 16 where scales are per 16); exact
//!   i32 within a group, then one f32 chain, groups ascending, a group's minimum right behind it.
//!   Gradients in int16: exact i32 within 64 elements, then one f32 chain.
//! - Where a row is reduced (norm, softmax, log-sum-exp, `A x` of an adapter): 16 fixed lanes and one
//!   tree. The sampler and the loss share it.
//! - Tails are the same vector code, masked. There is one exp and one tanh.
//! - Attention: tiles of keys are aligned to the sequence's own position 0, not to a chunk, page or
//!   packed row; cached and own keys fill one tile; tiles ascend; what a row does not see is selected
//!   away. Recurrences run token by token; experts of a row are summed in order of rank.
//! - Grids of tiles follow from shapes alone. Where tiles give parts of one sum, these are added in
//!   order of their index, whoever computed them.
//!
//! What changes the bits of any family raises [`graph::NUMERICS`].

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
