//! The formulas, one function per family of ops, as plain loops in f64. What each op means is
//! documented at its variant of [`graph::Op`].

mod attention;
mod elementwise;
mod indexing;
mod layout;
mod loss;
mod norm;
mod product;
mod recurrent;
mod rounding;
mod softmax;

use std::borrow::Cow;

use graph::{Code, DType, Fault, INT16_GROUP, Op, Shape};
use half::bf16;

use crate::Mode;
use crate::value::{Value, filled, int16_code, int16_scale};

type Out = Result<Value, Fault>;

/// The operands of one node, and its name for faults.
#[derive(Copy, Clone)]
pub(crate) struct Operands<'a> {
    args: &'a [&'a Value],
    dtypes: &'a [DType],
    node: &'a str,
}

/// A float operand.
#[derive(Copy, Clone)]
struct Floats<'a> {
    shape: Shape,
    data: &'a [f64],
}

/// An integer operand.
#[derive(Copy, Clone)]
struct Ints<'a> {
    shape: Shape,
    data: &'a [i32],
}

impl<'a> Floats<'a> {
    fn dim(&self, i: usize) -> usize {
        self.shape.dim(i)
    }

    /// Row `i` of the tensor seen as `rows x cols`.
    fn row(&self, i: usize) -> &'a [f64] {
        let cols = self.shape.cols();
        &self.data[i * cols..(i + 1) * cols]
    }
}

impl<'a> Ints<'a> {
    fn dim(&self, i: usize) -> usize {
        self.shape.dim(i)
    }

    fn row(&self, i: usize) -> &'a [i32] {
        let cols = self.shape.cols();
        &self.data[i * cols..(i + 1) * cols]
    }
}

impl<'a> Operands<'a> {
    fn value(&self, i: usize) -> Result<&'a Value, Fault> {
        self.args.get(i).copied().ok_or_else(|| self.broken("an operand is missing"))
    }

    fn floats(&self, i: usize) -> Result<Floats<'a>, Fault> {
        let value = self.value(i)?;
        let data = value.as_floats().ok_or_else(|| self.broken("a float operand is i32"))?;
        Ok(Floats { shape: value.shape(), data })
    }

    /// The matrices of a product: beside a left operand of bf16 or int16-rows blocks are rounded
    /// as it was.
    fn matrix(&self, i: usize) -> Result<Cow<'a, [f64]>, Fault> {
        let Floats { shape, data } = self.floats(i)?;
        match (self.dtypes.first(), self.dtypes.get(i)) {
            (Some(DType::BF16), Some(DType::Block(_))) => {
                Ok(data.iter().map(|&x| bf16::from_f32(x as f32).to_f64()).collect())
            }
            (Some(DType::Int16Rows), Some(DType::Block(_))) => {
                let (n, k) = (shape.dim(shape.rank().wrapping_sub(2)), shape.cols());
                let mut rounded = data.to_vec();
                if n * k > 0 {
                    rounded.chunks_mut(n * k).for_each(|matrix| int16_columns(matrix, k));
                }
                Ok(Cow::Owned(rounded))
            }
            _ => Ok(Cow::Borrowed(data)),
        }
    }

    fn ints(&self, i: usize) -> Result<Ints<'a>, Fault> {
        let value = self.value(i)?;
        let data = value.as_ints().ok_or_else(|| self.broken("an i32 operand is float"))?;
        Ok(Ints { shape: value.shape(), data })
    }

    fn broken(&self, message: impl Into<String>) -> Fault {
        Fault::new(Code::Internal, self.node, message)
    }

    fn outside(&self, message: String) -> Fault {
        Fault::new(Code::IndexOutOfRange, self.node, message)
    }

    /// `index` as a place in a dimension of `size` entries; `what` names it.
    fn index(&self, index: i32, size: usize, what: &str) -> Result<usize, Fault> {
        match usize::try_from(index) {
            Ok(i) if i < size => Ok(i),
            _ => Err(self.outside(format!("{what} {index} is outside of 0..{size}"))),
        }
    }

    fn zeros(&self, shape: Shape) -> Result<Vec<f64>, Fault> {
        filled(shape.elements(), 0.0)
            .map_err(|e| Fault::new(Code::OutOfMemory, self.node, e.message))
    }

    fn made(&self, shape: Shape, data: Vec<f64>) -> Out {
        Value::floats(shape, data).map_err(|e| self.broken(e.message))
    }
}

/// Rounds a matrix of `k` columns as [`DType::Int16Rows`] rounds rows, in groups down each column,
/// to codes of up to 2048.
fn int16_columns(matrix: &mut [f64], k: usize) {
    for group in matrix.chunks_mut(INT16_GROUP * k) {
        for column in 0..k {
            let values: Vec<f32> =
                group.iter().skip(column).step_by(k).map(|&x| x as f32).collect();
            let scale = int16_scale(&values, 11);
            for (to, x) in group.iter_mut().skip(column).step_by(k).zip(values) {
                *to = int16_code(x, scale, 2048.0) * f64::from(scale);
            }
        }
    }
}

/// The value of one node. `dtypes` are those of its operands, which have the shapes and kinds that
/// the op's shape rule accepted, and `out` is what it gave.
pub(crate) fn compute(
    op: &Op,
    args: &[&Value],
    dtypes: &[DType],
    out: (DType, Shape),
    node: &str,
    mode: Mode,
) -> Out {
    let operands = Operands { args, dtypes, node };
    let (dtype, shape) = out;
    match op {
        Op::Leaf => Err(operands.broken("a leaf is bound, not computed")),
        Op::Binary(kind) => elementwise::binary(operands, *kind, shape),
        Op::Unary(f) => elementwise::unary(operands, *f),
        Op::Affine { scale, bias } => elementwise::affine(operands, scale.get(), bias.get()),
        Op::Clamp { min, max } => elementwise::clamp(operands, min.get(), max.get()),
        Op::ClampBack { min, max } => elementwise::clamp_back(operands, min.get(), max.get()),
        Op::Fill { value, shape } => elementwise::fill(operands, value.get(), *shape),
        Op::Glu(kind) => elementwise::glu(operands, *kind),
        Op::GluBack { kind, wrt } => elementwise::glu_back(operands, *kind, *wrt),
        Op::Sum { .. } => layout::sum(operands, shape),
        Op::CumSum { dim, reverse } => layout::cum_sum(operands, usize::from(*dim), *reverse),
        Op::TopK { k, order } => indexing::top_k(operands, *k, *order, shape),
        Op::Broadcast { .. } => layout::broadcast(operands, shape),
        Op::Reshape { .. } | Op::Copy => layout::relabel(operands, shape),
        Op::Permute { perm } => layout::permute(operands, perm, shape),
        Op::Slice { dim, start, .. } => layout::slice(operands, usize::from(*dim), *start, shape),
        Op::Pad { dim, before, .. } => layout::pad(operands, usize::from(*dim), *before, shape),
        Op::Concat { dim } => layout::concat(operands, usize::from(*dim), shape),
        Op::Cast { .. } | Op::QuantizeRows => rounding::through(operands, dtype, mode),
        Op::Round { dtype } => rounding::through(operands, *dtype, mode),
        Op::Gather => indexing::gather(operands, shape),
        Op::ScatterAdd { .. } => indexing::scatter_add(operands, shape),
        Op::Softmax(attrs) => softmax::softmax(operands, attrs),
        Op::SoftmaxBack { scale } => softmax::softmax_back(operands, scale.get()),
        Op::SoftmaxSinkBack(attrs) => softmax::softmax_sink_back(operands, attrs, shape),
        Op::LogSoftmax => softmax::log_softmax(operands),
        Op::Norm { kind, eps } => norm::norm(operands, *kind, eps.get()),
        Op::NormBack { kind, eps } => norm::norm_back(operands, *kind, eps.get()),
        Op::RmsNorm { eps } => norm::rms_norm(operands, eps.get()),
        Op::RmsNormBack { eps, wrt } => norm::rms_norm_back(operands, eps.get(), *wrt),
        Op::RopeTable(angles) => norm::rope_table(operands, angles, shape, mode),
        Op::Rope { style, inverse } => norm::rope(operands, *style, *inverse),
        Op::MatMul { ta, tb } => product::mat_mul(operands, *ta, *tb, shape),
        Op::MatMulExperts { tb } => product::mat_mul_experts(operands, *tb, shape),
        Op::ExpertOuter { .. } => product::expert_outer(operands, shape),
        Op::Dropout(dropout) => product::dropout(operands, *dropout),
        Op::Lora { slots } => product::lora(operands, *slots),
        Op::LoraBack { slots, wrt, slot } => {
            product::lora_back(operands, *slots, *wrt, *slot, shape)
        }
        Op::LoraExperts { slots } => product::lora_experts(operands, *slots),
        Op::LoraExpertsBack { slots, wrt, slot } => {
            product::lora_experts_back(operands, *slots, *wrt, *slot, shape)
        }
        Op::Attention(attrs) => attention::forward(operands, attrs, shape),
        Op::AttentionQueryBack(attrs) => attention::query_back(operands, attrs, shape),
        Op::AttentionBack { attrs, wrt } => attention::back(operands, attrs, *wrt, shape),
        Op::SsmConv => recurrent::conv(operands, shape),
        Op::SsmConvBack { wrt } => recurrent::conv_back(operands, *wrt, shape),
        Op::SsmConvState => recurrent::conv_state(operands, shape),
        Op::SsmConvStateBack { wrt } => recurrent::conv_state_back(operands, *wrt, shape),
        Op::SsmScan => recurrent::scan(operands, shape),
        Op::SsmScanBack { parts } => recurrent::scan_back(operands, *parts, shape),
        Op::GatedDeltaRule(attrs) => recurrent::delta(operands, attrs, shape),
        Op::GatedDeltaRuleBack(attrs) => recurrent::delta_back(operands, attrs, shape),
        Op::CrossEntropy(attrs) => loss::cross_entropy(operands, attrs),
        Op::CrossEntropyBack(attrs) => loss::cross_entropy_back(operands, attrs),
    }
}
