//! What a graph has to compute and to move: enough to tell how long it takes on a machine whose
//! rates are known.

use crate::{DType, LoraOperand, Op, Placed, Plan, Step};

/// Operations of a graph, or of a part.
#[derive(Copy, Clone, PartialEq, Debug, Default)]
pub struct Cost {
    /// Multiplications with an addition, of floats.
    pub float: f64,
    /// The same of 8-bit blocks.
    pub block: f64,
    /// Bytes that are read and written by everything that is no product.
    pub bytes: f64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Cost) {
        self.float += other.float;
        self.block += other.block;
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
    // An 8-bit left operand makes a product one of blocks.
    let product = |n: f64| match step.args.first().map(|a| a.arg.dtype) {
        Some(DType::F32 | DType::F16 | DType::BF16) | None => float(n),
        Some(_) => Cost { block: n, ..Cost::default() },
    };
    // A and B of the slots lie after the operands that all have.
    let pairs = |first: usize| -> f64 {
        let slots = step.args.len().saturating_sub(first) / 3;
        let pair = |s: usize| elements(first + 3 * s) + elements(first + 3 * s + 1);
        (0..slots).map(pair).fold(0.0, f64::max)
    };
    let half_square = |heads: f64, width: f64| dim(0, 0) * dim(0, 0) / 2.0 * heads * width;
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
        Op::Attention(_) => float(2.0 * half_square(dim(0, 1), dim(0, 2))),
        Op::AttentionQueryBack(_) => float(3.0 * half_square(dim(0, 1), dim(0, 2))),
        Op::AttentionBack { .. } => float(4.0 * half_square(dim(0, 1), dim(0, 2))),
        Op::SsmScan
        | Op::SsmScanBack { .. }
        | Op::GatedDeltaRule(_)
        | Op::GatedDeltaRuleBack(_) => {
            // Each row passes over the state, which is the last part of the result.
            let state = step.args.last().map_or(0.0, |a| a.arg.shape.elements() as f64);
            float(4.0 * dim(0, 0) * state)
        }
        _ => {
            let bytes = |arg: &crate::Arg| arg.shape.bytes(arg.dtype).unwrap_or(0) as f64;
            let read: f64 = step.args.iter().map(|a| bytes(&a.arg)).sum();
            Cost { bytes: read + bytes(&step.out.arg), ..Cost::default() }
        }
    }
}
