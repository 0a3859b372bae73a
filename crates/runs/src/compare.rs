//! Several runs beside each other.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::error::Result;
use crate::folder::METRICS;
use crate::list::Run;
use crate::metrics::{self, Line};

/// Rows of a table of losses.
const ROWS: usize = 12;

/// What several runs have in common, and what they have not.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Settings and facts that differ, each with its value in every run; `None` where a run has
    /// none of that name.
    pub differences: Vec<(String, Vec<Option<Value>>)>,
    /// The loss of every run in steps that all of them took: the first, the last, and some between.
    pub losses: Vec<(u64, Vec<f64>)>,
    /// The same of evaluations.
    pub evaluations: Vec<(u64, Vec<f64>)>,
}

impl Comparison {
    /// Compares runs.
    ///
    /// # Errors
    /// When a run's metrics can no longer be read.
    pub fn of(runs: &[Run]) -> Result<Comparison> {
        let (mut losses, mut evaluations) = (Vec::new(), Vec::new());
        for run in runs {
            let (mut steps, mut held) = (BTreeMap::new(), BTreeMap::new());
            metrics::read(&run.path.join(METRICS), &mut |line| {
                match line {
                    Line::Step(step) => steps.insert(step.step, step.loss),
                    Line::Evaluation(evaluation) => held.insert(evaluation.step, evaluation.loss),
                };
            })?;
            losses.push(steps);
            evaluations.push(held);
        }
        Ok(Comparison {
            differences: differences(runs),
            losses: common(&losses),
            evaluations: common(&evaluations),
        })
    }
}

fn facts(run: &Run) -> BTreeMap<String, Value> {
    let info = &run.record.info;
    let mut facts = info.settings.clone();
    let mut fact = |name: &str, value: Value| {
        facts.insert(name.to_string(), value);
    };
    fact("(gradus)", json!(info.gradus));
    fact("(command)", json!(info.command));
    fact("(kernels)", json!(info.machine.kernels));
    fact("(threads)", json!(info.machine.threads));
    fact("(model)", json!(info.model.name));
    fact("(model bytes)", json!(info.model.bytes));
    for data in &info.data {
        fact(&format!("({} data)", data.role), json!(data.file));
        for (name, n) in &data.facts {
            fact(&format!("({} {name})", data.role), json!(n));
        }
    }
    if let Some(planned) = &run.record.planned {
        fact("(steps)", json!(planned.steps));
        fact("(parameters)", json!(planned.parameters));
    }
    facts
}

fn differences(runs: &[Run]) -> Vec<(String, Vec<Option<Value>>)> {
    let facts: Vec<_> = runs.iter().map(facts).collect();
    let names: BTreeSet<&String> = facts.iter().flat_map(BTreeMap::keys).collect();
    let values = |name: &String| facts.iter().map(|f| f.get(name).cloned()).collect::<Vec<_>>();
    let all = names.into_iter().map(|name| (name.clone(), values(name)));
    all.filter(|(_, values)| values.windows(2).any(|w| w.first() != w.last())).collect()
}

/// The values in steps that all have: the first, the last, and some between.
fn common(runs: &[BTreeMap<u64, f64>]) -> Vec<(u64, Vec<f64>)> {
    let Some((one, others)) = runs.split_first() else { return Vec::new() };
    let mut steps: Vec<u64> = one.keys().copied().collect();
    steps.retain(|step| others.iter().all(|run| run.contains_key(step)));
    let last = steps.len().saturating_sub(1);
    let rows = ROWS.min(steps.len());
    let chosen = (0..rows).filter_map(|row| steps.get(row * last / rows.saturating_sub(1).max(1)));
    let values = |step: &u64| runs.iter().filter_map(|run| run.get(step).copied()).collect();
    chosen.map(|step| (*step, values(step))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_steps_begin_with_the_first_and_end_with_the_last() {
        let run = |steps: std::ops::RangeInclusive<u64>| {
            steps.map(|step| (step, step as f64)).collect::<BTreeMap<_, _>>()
        };
        let both = common(&[run(1..=1000), run(3..=500)]);
        assert_eq!(both.len(), ROWS);
        assert_eq!(both[0], (3, vec![3.0, 3.0]));
        assert_eq!(both[ROWS - 1], (500, vec![500.0, 500.0]));
        assert!(both.windows(2).all(|w| w[0].0 < w[1].0));
        assert_eq!(common(&[run(1..=2), run(1..=9)]).len(), 2);
        assert_eq!(common(&[run(1..=1), run(1..=1)]), [(1, vec![1.0, 1.0])]);
        assert_eq!(common(&[run(1..=4), run(5..=9)]), []);
        assert_eq!(common(&[]), []);
    }
}
