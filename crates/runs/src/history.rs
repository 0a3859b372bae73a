//! What the metrics of a run come to, in bounded memory.

use crate::curve::Curve;
use crate::metrics::{Evaluation, Line, Step, rate};

/// What was measured, from the first step to the last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Loss of each step.
    pub loss: Curve,
    /// Loss of each evaluation.
    pub evaluations: Curve,
    /// Learning rate of each step.
    pub lr: Curve,
    /// Number of steps.
    pub steps: u64,
    /// The first step.
    pub first: Option<Step>,
    /// The last step.
    pub last: Option<Step>,
    /// The step with the lowest loss.
    pub best: Option<Step>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// The evaluation with the lowest loss.
    pub best_evaluation: Option<Evaluation>,
    /// Tokens of all steps.
    pub tokens: u64,
    /// Seconds of all steps.
    pub seconds: f64,
    /// The most memory after a step, in bytes.
    pub peak_bytes: Option<u64>,
}

impl History {
    /// Tokens per second over all steps; 0 where there are none.
    pub fn tokens_per_s(&self) -> f64 {
        rate(self.tokens, self.seconds)
    }

    pub(crate) fn add(&mut self, line: Line) {
        match line {
            Line::Step(step) => {
                self.loss.push(step.step, step.loss);
                self.lr.push(step.step, step.lr.into());
                self.steps = self.steps.saturating_add(1);
                self.tokens = self.tokens.saturating_add(step.tokens);
                if step.seconds.is_finite() {
                    self.seconds += step.seconds;
                }
                self.peak_bytes = self.peak_bytes.max(step.memory_bytes);
                self.first.get_or_insert(step);
                self.last = Some(step);
                if step.loss.is_finite() && self.best.is_none_or(|best| step.loss < best.loss) {
                    self.best = Some(step);
                }
            }
            Line::Evaluation(evaluation) => {
                self.evaluations.push(evaluation.step, evaluation.loss);
                self.evaluation = Some(evaluation);
                let better = |best: Evaluation| evaluation.loss < best.loss;
                if evaluation.loss.is_finite() && self.best_evaluation.is_none_or(better) {
                    self.best_evaluation = Some(evaluation);
                }
            }
        }
    }
}
