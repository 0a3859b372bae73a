//! Which arithmetic it is that gives a run its bits.

/// The version of the arithmetic that a training run comes to its bits by, in all kernel families
/// and everything above them.
///
/// **Raise it by 1 in every change after which a run of the same settings, data, model and seed may
/// write another adapter in any family**: another order of sums, another rounding or another
/// function in a kernel, other tiles of a sum that is split, another gradient rule or architecture's
/// graph, another optimizer, dropout, order of data, packing or fresh adapter. A checkpoint is of
/// one version and is gone on from in no other, unless that is asked for. (`train/tests/numerics.rs`
/// fails where bits changed and this did not.)
pub const NUMERICS: u64 = 1;
