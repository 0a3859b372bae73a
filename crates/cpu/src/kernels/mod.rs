//! Every op's kernel: what it takes, its grid of tiles, its code. Matrix products are in
//! [`crate::matmul`].
//!
//! A tile writes its own part of the result and nothing else, so tiles run in any order and on
//! any thread. The grid follows from shapes alone. Arithmetic is one per op and family: 16 lanes
//! and one tree where a row is reduced, chains in index order elsewhere.

mod attention;
mod dropout;
mod elementwise;
#[cfg(test)]
mod fences;
#[cfg(test)]
mod fuzz;
mod indexing;
mod layout;
mod lora;
mod loss;
mod norm;
#[cfg(test)]
mod prior_art;
mod quantize;
mod recurrent;
mod rope;
mod softmax;
mod sum;
#[cfg(test)]
mod tests;

use graph::{Arg, Call, DType, Needs, NormOperand, Op, Unsupported};

use crate::job::{Job, Scratch};
use crate::matmul::{self, experts};

/// What a kernel says about a call.
type Support = Result<Needs, Unsupported>;

/// A refusal in words.
fn no_kernel<T>(what: impl Into<String>) -> Result<T, Unsupported> {
    Err(Unsupported::Kernel(what.into()))
}

/// Scratch for buffers of so many floats.
fn needs(buffers: &[usize]) -> Needs {
    Needs { scratch: crate::job::scratch_bytes(buffers), kept: 0 }
}

/// Operand `i`.
fn arg<'a>(call: &Call<'a>, i: usize) -> Result<&'a Arg, Unsupported> {
    match call.args.get(i) {
        Some(arg) => Ok(arg),
        None => no_kernel(format!("{} of {} operands", call.op.name(), call.args.len())),
    }
}

/// Operand `i`, of a given type and in memory.
fn memory<'a>(call: &Call<'a>, i: usize, dtype: DType) -> Result<&'a Arg, Unsupported> {
    let arg = arg(call, i)?;
    if arg.resident {
        return no_kernel(format!("a packed weight as operand {i}"));
    }
    if arg.dtype != dtype {
        return no_kernel(format!("a {} operand {i}", arg.dtype));
    }
    Ok(arg)
}

/// Operand `i`, of a given type, dense.
fn dense<'a>(call: &Call<'a>, i: usize, dtype: DType) -> Result<&'a Arg, Unsupported> {
    let arg = memory(call, i, dtype)?;
    if arg.is_contiguous() { Ok(arg) } else { Err(Unsupported::Layout(i)) }
}

/// Operand `i`, f32 rows a fixed stride apart.
fn rows<'a>(call: &Call<'a>, i: usize) -> Result<&'a Arg, Unsupported> {
    let arg = memory(call, i, DType::F32)?;
    if arg.row_stride().is_some() { Ok(arg) } else { Err(Unsupported::Layout(i)) }
}

/// Operand `i`, f32, with a dense last dimension and any strides outside of it.
fn dense_last<'a>(call: &Call<'a>, i: usize) -> Result<&'a Arg, Unsupported> {
    let arg = memory(call, i, DType::F32)?;
    let last = arg.shape.rank().checked_sub(1).and_then(|d| arg.layout.strides.get(d));
    let ok = arg.shape.cols() <= 1 || last == Some(&1);
    if ok { Ok(arg) } else { Err(Unsupported::Layout(i)) }
}

/// The one place that knows what the kernels take.
pub(crate) fn supports(call: &Call<'_>) -> Support {
    match call.op {
        Op::Leaf | Op::Reshape { .. } | Op::Permute { .. } | Op::Slice { .. } => {
            no_kernel(format!("{}, which is not computed", call.op.name()))
        }
        Op::Binary(_)
        | Op::Unary(_)
        | Op::Affine { .. }
        | Op::Clamp { .. }
        | Op::ClampBack { .. }
        | Op::Fill { .. }
        | Op::Glu(_)
        | Op::GluBack { .. } => elementwise::supports(call),
        Op::Sum { .. } => sum::supports(call),
        Op::CumSum { .. } => sum::supports_running(call),
        Op::TopK { .. } => indexing::supports_top_k(call),
        Op::Broadcast { .. } | Op::Copy => layout::supports_copy(call),
        Op::Pad { .. } | Op::Concat { .. } => layout::supports_join(call),
        Op::Cast { .. } | Op::Round { .. } | Op::QuantizeRows => quantize::supports(call),
        Op::Gather => indexing::supports_gather(call),
        Op::ScatterAdd { .. } => indexing::supports_scatter(call),
        Op::Softmax(_) | Op::SoftmaxBack { .. } | Op::SoftmaxSinkBack(_) | Op::LogSoftmax => {
            softmax::supports(call)
        }
        Op::Norm { .. } | Op::NormBack { .. } | Op::RmsNorm { .. } | Op::RmsNormBack { .. } => {
            norm::supports(call)
        }
        Op::RopeTable(_) => rope::supports_table(call),
        Op::Rope { .. } => rope::supports(call),
        Op::MatMul { .. } => matmul::supports(call),
        Op::MatMulExperts { .. } | Op::ExpertOuter { .. } => experts::supports(call),
        Op::Dropout(_) => dropout::supports(call),
        Op::Lora { .. } | Op::LoraExperts { .. } => lora::supports_forward(call),
        Op::LoraBack { wrt, .. } | Op::LoraExpertsBack { wrt, .. } => {
            lora::supports_back(call, *wrt)
        }
        Op::Attention(_) | Op::AttentionQueryBack(_) | Op::AttentionBack { .. } => {
            attention::supports(call)
        }
        Op::SsmConv
        | Op::SsmConvBack { .. }
        | Op::SsmConvState
        | Op::SsmConvStateBack { .. }
        | Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => recurrent::supports(call),
        Op::CrossEntropy(_) | Op::CrossEntropyBack(_) => loss::supports(call),
    }
}

/// Checks the values of index operands: one phrase naming the first that is out of range.
pub(crate) fn check(job: &Job<'_>) -> Result<(), String> {
    match job.op {
        Op::Gather => indexing::check_gather(job),
        Op::ScatterAdd { rows } => indexing::check_scatter(job, *rows),
        Op::MatMulExperts { .. } | Op::ExpertOuter { .. } => experts::check(job),
        Op::Lora { slots }
        | Op::LoraBack { slots, .. }
        | Op::LoraExperts { slots }
        | Op::LoraExpertsBack { slots, .. } => lora::check(job, *slots),
        Op::Attention(_) | Op::AttentionQueryBack(_) | Op::AttentionBack { .. } => {
            attention::check(job)
        }
        Op::SsmConv
        | Op::SsmConvBack { .. }
        | Op::SsmConvState
        | Op::SsmConvStateBack { .. }
        | Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => recurrent::check(job),
        Op::CrossEntropy(_) | Op::CrossEntropyBack(_) => loss::check(job),
        _ => Ok(()),
    }
}

/// Rounds that a job's tiles are run in, as many tiles in each: those of a round may need what the
/// rounds before it gave. From shapes, and of experts from what was chosen.
pub(crate) fn rounds(job: &Job<'_>) -> usize {
    match job.op {
        Op::MatMul { .. } => matmul::rounds(job),
        Op::MatMulExperts { .. } | Op::ExpertOuter { .. } => experts::rounds(job),
        Op::Attention(_) | Op::AttentionQueryBack(_) | Op::AttentionBack { .. } => {
            attention::rounds(job)
        }
        Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => recurrent::rounds(job),
        _ => 1,
    }
}

/// How many tiles a round of a job has: from shapes only. A single tile runs on the caller alone.
pub(crate) fn tiles(job: &Job<'_>) -> usize {
    match job.op {
        Op::Leaf | Op::Reshape { .. } | Op::Permute { .. } | Op::Slice { .. } => 0,
        Op::Binary(_)
        | Op::Unary(_)
        | Op::Affine { .. }
        | Op::Clamp { .. }
        | Op::ClampBack { .. }
        | Op::Fill { .. }
        | Op::Glu(_)
        | Op::GluBack { .. } => elementwise::tiles(job),
        Op::Broadcast { .. } | Op::Copy | Op::Pad { .. } | Op::Concat { .. } => {
            elementwise::tiles(job)
        }
        Op::Sum { .. } => sum::tiles(job),
        Op::CumSum { dim, .. } => sum::running_tiles(job, usize::from(*dim)),
        Op::TopK { .. } => indexing::top_k_tiles(job),
        Op::Softmax(_) | Op::SoftmaxBack { .. } | Op::SoftmaxSinkBack(_) | Op::LogSoftmax => {
            softmax::tiles(job)
        }
        Op::Norm { .. } | Op::NormBack { .. } => row_tiles(job).count,
        Op::Cast { .. } | Op::Round { .. } | Op::QuantizeRows | Op::Gather => row_tiles(job).count,
        Op::ScatterAdd { .. } => indexing::scatter_tiles(job),
        Op::RmsNorm { .. } | Op::RmsNormBack { wrt: NormOperand::X, .. } => row_tiles(job).count,
        Op::RmsNormBack { wrt: NormOperand::Weight, .. } => {
            column_tiles(job.out.shape.cols()).count
        }
        Op::RopeTable(_) | Op::Rope { .. } => rope::tiles(job),
        Op::MatMul { .. } => matmul::tiles(job),
        Op::MatMulExperts { .. } | Op::ExpertOuter { .. } => experts::tiles(job),
        Op::Dropout(_) => row_tiles(job).count,
        Op::Lora { .. }
        | Op::LoraBack { .. }
        | Op::LoraExperts { .. }
        | Op::LoraExpertsBack { .. } => lora::tiles(job),
        Op::Attention(_) | Op::AttentionQueryBack(_) | Op::AttentionBack { .. } => {
            attention::tiles(job)
        }
        Op::SsmConv
        | Op::SsmConvBack { .. }
        | Op::SsmConvState
        | Op::SsmConvStateBack { .. }
        | Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => recurrent::tiles(job),
        Op::CrossEntropy(_) => loss::tiles(job),
        Op::CrossEntropyBack(_) => row_tiles(job).count,
    }
}

/// Runs one tile.
pub(crate) fn run_tile(job: &Job<'_>, tile: usize, scratch: Scratch<'_>) {
    match job.op {
        Op::Leaf | Op::Reshape { .. } | Op::Permute { .. } | Op::Slice { .. } => {}
        Op::Binary(_)
        | Op::Unary(_)
        | Op::Affine { .. }
        | Op::Clamp { .. }
        | Op::ClampBack { .. }
        | Op::Fill { .. }
        | Op::Glu(_)
        | Op::GluBack { .. } => {
            elementwise::run_tile(job, tile);
        }
        Op::Sum { dims } => sum::run_tile(job, *dims, tile),
        Op::CumSum { dim, reverse } => sum::running_tile(job, usize::from(*dim), *reverse, tile),
        Op::TopK { k, order } => indexing::top_k_tile(job, *k, *order, tile, scratch),
        Op::Softmax(_) | Op::SoftmaxBack { .. } | Op::SoftmaxSinkBack(_) | Op::LogSoftmax => {
            softmax::run_tile(job, tile, scratch)
        }
        Op::Broadcast { .. } | Op::Copy => layout::copy_tile(job, tile),
        Op::Pad { dim, before, .. } => layout::pad_tile(job, usize::from(*dim), *before, tile),
        Op::Concat { dim } => layout::concat_tile(job, usize::from(*dim), tile),
        Op::Cast { .. } | Op::Round { .. } | Op::QuantizeRows => quantize::run_tile(job, tile),
        Op::Gather => indexing::gather_tile(job, tile),
        Op::ScatterAdd { .. } => indexing::scatter_tile(job, tile),
        Op::Norm { .. } | Op::NormBack { .. } | Op::RmsNorm { .. } | Op::RmsNormBack { .. } => {
            norm::run_tile(job, tile)
        }
        Op::RopeTable(angles) => rope::table_tile(job, angles, tile, scratch),
        Op::Rope { style, inverse } => rope::run_tile(job, *style, *inverse, tile),
        Op::MatMul { .. } => matmul::run_tile(job, tile, scratch),
        Op::MatMulExperts { .. } | Op::ExpertOuter { .. } => {
            experts::run_tile(job, tile, scratch);
        }
        Op::Dropout(dropout) => dropout::run_tile(job, *dropout, tile),
        Op::Lora { .. }
        | Op::LoraBack { .. }
        | Op::LoraExperts { .. }
        | Op::LoraExpertsBack { .. } => lora::run_tile(job, tile, scratch),
        Op::Attention(_) | Op::AttentionQueryBack(_) | Op::AttentionBack { .. } => {
            attention::run_tile(job, tile, scratch);
        }
        Op::SsmConv
        | Op::SsmConvBack { .. }
        | Op::SsmConvState
        | Op::SsmConvStateBack { .. }
        | Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => recurrent::run_tile(job, tile, scratch),
        Op::CrossEntropy(_) | Op::CrossEntropyBack(_) => loss::run_tile(job, tile),
    }
}

/// Elements that a tile of a simple kernel handles: some microseconds of work.
const TILE_ELEMENTS: usize = 8192;

/// A range cut into tiles of equal length, but for the last.
#[derive(Copy, Clone)]
struct Tiles {
    total: usize,
    per_tile: usize,
    count: usize,
}

impl Tiles {
    fn new(total: usize, per_tile: usize) -> Tiles {
        let per_tile = per_tile.max(1);
        Tiles { total, per_tile, count: total.div_ceil(per_tile) }
    }

    fn range(self, tile: usize) -> std::ops::Range<usize> {
        let start = (tile * self.per_tile).min(self.total);
        start..(start + self.per_tile).min(self.total)
    }
}

/// Rows of the result in tiles of about [`TILE_ELEMENTS`].
fn row_tiles(job: &Job<'_>) -> Tiles {
    let shape = job.out.shape;
    Tiles::new(shape.rows(), TILE_ELEMENTS / shape.cols().max(1))
}

/// Columns in tiles of a few hundred, where each tile walks all rows.
fn column_tiles(columns: usize) -> Tiles {
    Tiles::new(columns, 512.min(columns.div_ceil(2)).next_multiple_of(64))
}
