//! The cases of every op, as data. One file per family, in the order of [`graph::Op`].

mod attention;
mod elementwise;
mod indexing;
mod layout;
mod loss;
mod norm;
mod product;
mod rounding;

use graph::{Binary, GluKind, Op, Unary};

use super::case::{Case, Cases};

/// Makes the list of ops with their cases, and a match that does not compile when a variant of
/// [`Op`] is missing from it.
macro_rules! ops {
    ($($pattern:pat => $name:literal, $cases:expr;)*) => {
        /// The name under which an op is in the list below; every op is there.
        pub(super) fn listed(op: &Op) -> &'static str {
            match op { $($pattern => $name,)* }
        }

        const OPS: &[(&str, fn(&mut Cases))] = &[$(($name, $cases),)*];
    };
}

ops! {
    Op::Leaf => "Leaf", layout::leaf;
    Op::Binary(Binary::Add) => "Add", |c| elementwise::binary(c, Binary::Add);
    Op::Binary(Binary::Sub) => "Sub", |c| elementwise::binary(c, Binary::Sub);
    Op::Binary(Binary::Mul) => "Mul", |c| elementwise::binary(c, Binary::Mul);
    Op::Binary(Binary::Div) => "Div", |c| elementwise::binary(c, Binary::Div);
    Op::Unary(Unary::Tanh) => "Tanh", |c| elementwise::unary(c, Unary::Tanh);
    Op::Unary(Unary::Sigmoid) => "Sigmoid", |c| elementwise::unary(c, Unary::Sigmoid);
    Op::Unary(Unary::Silu) => "Silu", |c| elementwise::unary(c, Unary::Silu);
    Op::Unary(Unary::Gelu) => "Gelu", |c| elementwise::unary(c, Unary::Gelu);
    Op::Unary(Unary::Exp) => "Exp", |c| elementwise::unary(c, Unary::Exp);
    Op::Unary(Unary::Log) => "Log", |c| elementwise::unary(c, Unary::Log);
    Op::Affine { .. } => "Affine", elementwise::affine;
    Op::Glu(GluKind::Swiglu) => "Swiglu", |c| elementwise::glu(c, GluKind::Swiglu);
    Op::Glu(GluKind::Geglu) => "Geglu", |c| elementwise::glu(c, GluKind::Geglu);
    Op::GluBack { kind: GluKind::Swiglu, .. } => "SwigluBack",
        |c| elementwise::glu_back(c, GluKind::Swiglu);
    Op::GluBack { kind: GluKind::Geglu, .. } => "GegluBack",
        |c| elementwise::glu_back(c, GluKind::Geglu);
    Op::Sum { .. } => "Sum", layout::sum;
    Op::Broadcast { .. } => "Broadcast", layout::broadcast;
    Op::Reshape { .. } => "Reshape", layout::reshape;
    Op::Permute { .. } => "Permute", layout::permute;
    Op::Slice { .. } => "Slice", layout::slice;
    Op::Pad { .. } => "Pad", layout::pad;
    Op::Concat { .. } => "Concat", layout::concat;
    Op::Copy => "Copy", layout::copy;
    Op::Cast { .. } => "Cast", rounding::cast;
    Op::Round { .. } => "Round", rounding::round;
    Op::QuantizeRows => "QuantizeRows", rounding::quantize_rows;
    Op::Gather => "Gather", indexing::gather;
    Op::ScatterAdd { .. } => "ScatterAdd", indexing::scatter_add;
    Op::RmsNorm { .. } => "RmsNorm", norm::rms_norm;
    Op::RmsNormBack { .. } => "RmsNormBack", norm::rms_norm_back;
    Op::RopeTable(_) => "RopeTable", norm::rope_table;
    Op::Rope { .. } => "Rope", norm::rope;
    Op::MatMul { .. } => "MatMul", product::mat_mul;
    Op::Lora { .. } => "Lora", product::lora;
    Op::LoraBack { .. } => "LoraBack", product::lora_back;
    Op::Attention(_) => "Attention", attention::attention;
    Op::AttentionStats(_) => "AttentionStats", attention::stats;
    Op::AttentionBack { .. } => "AttentionBack", attention::back;
    Op::CrossEntropy => "CrossEntropy", loss::cross_entropy;
    Op::CrossEntropyBack => "CrossEntropyBack", loss::cross_entropy_back;
}

/// The names of all ops, in the order of [`Op`].
pub fn op_names() -> impl Iterator<Item = &'static str> {
    OPS.iter().map(|(name, _)| *name)
}

/// The cases of the op of this name; none when there is no such op.
pub fn cases(op: &str) -> Vec<Case> {
    let mut list = Vec::new();
    for (name, add) in OPS.iter().filter(|(name, _)| *name == op) {
        let mut cases = Cases::new(name);
        add(&mut cases);
        list.extend(cases.into_list());
    }
    list
}
