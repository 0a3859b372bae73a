//! The cases of every op, as data. One file per family, in the order of [`graph::Op`].

mod attention;
mod dropout;
mod elementwise;
mod experts;
mod indexing;
mod layout;
mod loss;
mod norm;
mod product;
mod recurrent;
mod rounding;
mod softmax;

use graph::{Binary, GluKind, NormKind, Op, Unary};

use super::case::{Case, Cases};
use elementwise::OAI;

/// More rows and elements than a tile of a kernel takes, which ends within a row where it may.
const TILES: &[usize] = &[60, 150];

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
    Op::Binary(Binary::Min) => "Min", |c| elementwise::extreme(c, Binary::Min);
    Op::Binary(Binary::Max) => "Max", |c| elementwise::extreme(c, Binary::Max);
    Op::Unary(Unary::Tanh) => "Tanh", |c| elementwise::unary(c, Unary::Tanh);
    Op::Unary(Unary::Sigmoid) => "Sigmoid", |c| elementwise::unary(c, Unary::Sigmoid);
    Op::Unary(Unary::Silu) => "Silu", |c| elementwise::unary(c, Unary::Silu);
    Op::Unary(Unary::Gelu) => "Gelu", |c| elementwise::unary(c, Unary::Gelu);
    Op::Unary(Unary::Exp) => "Exp", |c| elementwise::unary(c, Unary::Exp);
    Op::Unary(Unary::Log) => "Log", |c| elementwise::unary(c, Unary::Log);
    Op::Unary(Unary::Neg) => "Neg", |c| elementwise::unary(c, Unary::Neg);
    Op::Unary(Unary::Abs) => "Abs", |c| elementwise::unary(c, Unary::Abs);
    Op::Unary(Unary::Sqr) => "Sqr", |c| elementwise::unary(c, Unary::Sqr);
    Op::Unary(Unary::Sqrt) => "Sqrt", |c| elementwise::unary(c, Unary::Sqrt);
    Op::Unary(Unary::Rsqrt) => "Rsqrt", |c| elementwise::unary(c, Unary::Rsqrt);
    Op::Unary(Unary::Expm1) => "Expm1", |c| elementwise::unary(c, Unary::Expm1);
    Op::Unary(Unary::Log1p) => "Log1p", |c| elementwise::unary(c, Unary::Log1p);
    Op::Unary(Unary::Sin) => "Sin", |c| elementwise::unary(c, Unary::Sin);
    Op::Unary(Unary::Cos) => "Cos", |c| elementwise::unary(c, Unary::Cos);
    Op::Unary(Unary::Relu) => "Relu", |c| elementwise::unary(c, Unary::Relu);
    Op::Unary(Unary::GeluErf) => "GeluErf", |c| elementwise::unary(c, Unary::GeluErf);
    Op::Unary(Unary::GeluQuick) => "GeluQuick", |c| elementwise::unary(c, Unary::GeluQuick);
    Op::Unary(Unary::NormalCdf) => "NormalCdf", |c| elementwise::unary(c, Unary::NormalCdf);
    Op::Unary(Unary::Softplus) => "Softplus", |c| elementwise::unary(c, Unary::Softplus);
    Op::Unary(Unary::Step) => "Step", |c| elementwise::unary(c, Unary::Step);
    Op::Unary(Unary::Sign) => "Sign", |c| elementwise::unary(c, Unary::Sign);
    Op::Affine { .. } => "Affine", elementwise::affine;
    Op::Clamp { .. } => "Clamp", elementwise::clamp;
    Op::ClampBack { .. } => "ClampBack", elementwise::clamp_back;
    Op::Fill { .. } => "Fill", elementwise::fill;
    Op::Glu(GluKind::Swiglu) => "Swiglu", |c| elementwise::glu(c, GluKind::Swiglu);
    Op::Glu(GluKind::Geglu) => "Geglu", |c| elementwise::glu(c, GluKind::Geglu);
    Op::Glu(GluKind::GegluErf) => "GegluErf", |c| elementwise::glu(c, GluKind::GegluErf);
    Op::Glu(GluKind::GegluQuick) => "GegluQuick", |c| elementwise::glu(c, GluKind::GegluQuick);
    Op::Glu(GluKind::Reglu) => "Reglu", |c| elementwise::glu(c, GluKind::Reglu);
    Op::Glu(GluKind::SwigluOai { .. }) => "SwigluOai", |c| elementwise::glu(c, OAI);
    Op::GluBack { kind: GluKind::Swiglu, .. } => "SwigluBack",
        |c| elementwise::glu_back(c, GluKind::Swiglu);
    Op::GluBack { kind: GluKind::Geglu, .. } => "GegluBack",
        |c| elementwise::glu_back(c, GluKind::Geglu);
    Op::GluBack { kind: GluKind::GegluErf, .. } => "GegluErfBack",
        |c| elementwise::glu_back(c, GluKind::GegluErf);
    Op::GluBack { kind: GluKind::GegluQuick, .. } => "GegluQuickBack",
        |c| elementwise::glu_back(c, GluKind::GegluQuick);
    Op::GluBack { kind: GluKind::Reglu, .. } => "RegluBack",
        |c| elementwise::glu_back(c, GluKind::Reglu);
    Op::GluBack { kind: GluKind::SwigluOai { .. }, .. } => "SwigluOaiBack",
        |c| elementwise::glu_back(c, OAI);
    Op::Sum { .. } => "Sum", layout::sum;
    Op::CumSum { .. } => "CumSum", layout::cum_sum;
    Op::TopK { .. } => "TopK", indexing::top_k;
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
    Op::Softmax(_) => "Softmax", softmax::softmax;
    Op::SoftmaxBack { .. } => "SoftmaxBack", softmax::softmax_back;
    Op::SoftmaxSinkBack(_) => "SoftmaxSinkBack", softmax::softmax_sink_back;
    Op::LogSoftmax => "LogSoftmax", softmax::log_softmax;
    Op::Norm { kind: NormKind::Layer, .. } => "LayerNorm", |c| norm::norm(c, NormKind::Layer);
    Op::Norm { kind: NormKind::L2Clamp, .. } => "L2NormClamp",
        |c| norm::norm(c, NormKind::L2Clamp);
    Op::Norm { kind: NormKind::L2Add, .. } => "L2NormAdd", |c| norm::norm(c, NormKind::L2Add);
    Op::NormBack { kind: NormKind::Layer, .. } => "LayerNormBack",
        |c| norm::norm_back(c, NormKind::Layer);
    Op::NormBack { kind: NormKind::L2Clamp, .. } => "L2NormClampBack",
        |c| norm::norm_back(c, NormKind::L2Clamp);
    Op::NormBack { kind: NormKind::L2Add, .. } => "L2NormAddBack",
        |c| norm::norm_back(c, NormKind::L2Add);
    Op::RmsNorm { .. } => "RmsNorm", norm::rms_norm;
    Op::RmsNormBack { .. } => "RmsNormBack", norm::rms_norm_back;
    Op::RopeTable(_) => "RopeTable", norm::rope_table;
    Op::Rope { .. } => "Rope", norm::rope;
    Op::MatMul { .. } => "MatMul", product::mat_mul;
    Op::MatMulExperts { .. } => "MatMulExperts", experts::mat_mul_experts;
    Op::ExpertOuter { .. } => "ExpertOuter", experts::expert_outer;
    Op::Dropout(_) => "Dropout", dropout::dropout;
    Op::Lora { .. } => "Lora", product::lora;
    Op::LoraBack { .. } => "LoraBack", product::lora_back;
    Op::LoraExperts { .. } => "LoraExperts", experts::lora_experts;
    Op::LoraExpertsBack { .. } => "LoraExpertsBack", experts::lora_experts_back;
    Op::Attention(_) => "Attention", attention::attention;
    Op::AttentionQueryBack(_) => "AttentionQueryBack", attention::query_back;
    Op::AttentionBack { .. } => "AttentionBack", attention::back;
    Op::SsmConv => "SsmConv", recurrent::conv;
    Op::SsmConvBack { .. } => "SsmConvBack", recurrent::conv_back;
    Op::SsmConvState => "SsmConvState", recurrent::conv_state;
    Op::SsmConvStateBack { .. } => "SsmConvStateBack", recurrent::conv_state_back;
    Op::SsmScan => "SsmScan", recurrent::scan;
    Op::SsmScanBack { .. } => "SsmScanBack", recurrent::scan_back;
    Op::GatedDeltaRule(_) => "GatedDeltaRule", recurrent::delta;
    Op::GatedDeltaRuleBack(_) => "GatedDeltaRuleBack", recurrent::delta_back;
    Op::CrossEntropy(_) => "CrossEntropy", loss::cross_entropy;
    Op::CrossEntropyBack(_) => "CrossEntropyBack", loss::cross_entropy_back;
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
