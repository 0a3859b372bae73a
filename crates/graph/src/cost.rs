//! What a graph has to compute and to move: enough to tell how long it takes on a machine whose
//! rates are known.

use crate::{Arg, AttentionAttrs, DType, GluKind, LoraOperand, Op, Placed, Plan, Step};

/// Operations of a graph, or of a part.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct Cost {
    /// Multiplications with an addition, of floats.
    pub float: f64,
    /// The same of 8-bit blocks.
    pub block: f64,
    /// The same of gradients that pass blocks in bf16.
    pub bf16: f64,
    /// The same of gradients that pass blocks in 16-bit block floating point.
    pub int16: f64,
    /// Exponentials, and functions that take about as long.
    pub functions: f64,
    /// Bytes that are read and written by everything that is no product.
    pub bytes: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.float += other.float;
        self.block += other.block;
        self.bf16 += other.bf16;
        self.int16 += other.int16;
        self.functions += other.functions;
        self.bytes += other.bytes;
    }
}

impl Cost {
    /// What a plan costs.
    pub fn of(plan: &Plan) -> Cost {
        let mut cost = Cost::default();
        plan.steps.iter().for_each(|step| cost += of_step(step));
        cost
    }
}

impl Placed {
    /// What its plans cost together.
    pub fn cost(&self) -> Cost {
        let mut cost = Cost::default();
        self.plans().for_each(|(_, plan)| cost += Cost::of(plan));
        cost
    }
}

fn of_step(step: &Step) -> Cost {
    let elements = |i: usize| step.args.get(i).map_or(0.0, |a| a.arg.shape.elements() as f64);
    let dim = |i: usize, d: usize| match step.args.get(i) {
        Some(a) if d < a.arg.shape.rank() => a.arg.shape.dim(d) as f64,
        _ => 1.0,
    };
    let cols = |i: usize| step.args.get(i).map_or(1.0, |a| a.arg.shape.cols() as f64);
    let out = step.out.arg.shape.elements() as f64;
    let float = |float: f64| Cost { float, ..Cost::default() };
    // The left operand says what is multiplied: one of 8 bits, blocks.
    let product = |n: f64| match step.args.first().map(|a| a.arg.dtype) {
        Some(DType::F32 | DType::F16) | None => float(n),
        Some(DType::BF16) => Cost { bf16: n, ..Cost::default() },
        Some(DType::Int16Rows) => Cost { int16: n, ..Cost::default() },
        Some(_) => Cost { block: n, ..Cost::default() },
    };
    // A and B of the slots lie after the operands that all have.
    let pairs = |first: usize| -> f64 {
        let slots = step.args.len().saturating_sub(first) / 3;
        let pair = |s: usize| elements(first + 3 * s) + elements(first + 3 * s + 1);
        (0..slots).map(pair).fold(0.0, f64::max)
    };
    // Of each query head: products of the pairs of rows and positions that see each other, and
    // an exponential of each.
    let attention = |attrs: &AttentionAttrs, products: f64| {
        let pages = step.args.len().saturating_sub(3);
        let before = if attrs.prefix { dim(pages, 0) * dim(pages, 1) } else { 0.0 };
        let pairs = seen(attrs, before as usize, dim(0, 0) as usize) * dim(0, 1);
        let functions = pairs * if attrs.softcap.is_some() { 2.0 } else { 1.0 };
        Cost { float: products * pairs * dim(0, 2), functions, ..Cost::default() }
    };
    let bytes = |arg: &Arg| arg.shape.bytes(arg.dtype).unwrap_or(0) as f64;
    let moved = step.args.iter().map(|a| bytes(&a.arg)).sum::<f64>() + bytes(&step.out.arg);
    let functions = |functions: f64| Cost { functions, bytes: moved, ..Cost::default() };
    match &step.op {
        Op::MatMul { ta, .. } => {
            let rank = step.args.first().map_or(0, |a| a.arg.shape.rank());
            product(out * if *ta && rank >= 2 { dim(0, rank - 2) } else { cols(0) })
        }
        Op::MatMulExperts { .. } => product(out * cols(0)),
        Op::ExpertOuter { .. } => float(elements(2) * cols(0) * cols(1)),
        Op::Lora { .. } => float(dim(0, 0) * pairs(3)),
        Op::LoraBack { wrt: LoraOperand::X, .. } => float(dim(0, 0) * pairs(2)),
        Op::LoraBack { .. } => float(dim(0, 0) * out),
        // Of a stack, a row meets the experts it chose.
        Op::LoraExperts { .. } => float(elements(3) * pairs(4) / dim(4, 0)),
        Op::LoraExpertsBack { .. } => float(2.0 * elements(2) * out / dim(1, 0).max(1.0)),
        Op::Attention(attrs) => attention(attrs, 2.0),
        Op::AttentionQueryBack(attrs) => attention(attrs, 3.0),
        Op::AttentionBack { attrs, .. } => attention(attrs, 4.0),
        Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => {
            // Each row passes over the state, which is the last part of the result.
            let state = step.args.last().map_or(0.0, |a| a.arg.shape.elements() as f64);
            float(4.0 * dim(0, 0) * state)
        }
        Op::Unary(function) if function.is_transcendental() => functions(out),
        Op::Glu(kind) if *kind != GluKind::Reglu => functions(out),
        Op::GluBack { kind, .. } if *kind != GluKind::Reglu => functions(elements(0)),
        Op::Softmax(_) | Op::LogSoftmax => functions(out),
        Op::CrossEntropy(_) | Op::CrossEntropyBack(_) => functions(elements(0)),
        _ => functions(0.0),
    }
}

/// The positions that `rows` rows see, together, after `before` others.
fn seen(attrs: &AttentionAttrs, before: usize, rows: usize) -> f64 {
    let of = |p: usize| (p + 1).saturating_sub(attrs.first_seen(p)) as f64;
    (before..before.saturating_add(rows)).map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_see_what_windows_chunks_and_earlier_positions_let_them() {
        let all = AttentionAttrs::new(1.0);
        let some = |window, chunk| AttentionAttrs { window, chunk, ..all };
        for (attrs, before, rows, pairs) in [
            (all, 0, 4, 1 + 2 + 3 + 4),
            (all, 10, 2, 11 + 12),
            (some(Some(2), None), 0, 4, 1 + 2 + 2 + 2),
            (some(Some(2), None), 10, 3, 6),
            (some(None, Some(3)), 0, 5, 1 + 2 + 3 + 1 + 2),
            (all, 3, 0, 0),
        ] {
            assert_eq!(seen(&attrs, before, rows), f64::from(pairs), "{attrs:?} {before} {rows}");
        }
    }
}
