//! Inputs far out, at zero of either sign and below the normal numbers: values and gradients of a
//! device are finite wherever the true ones are.
//!
//! The true ones are those of the interpreter, every node's result rounded to f32, as any device
//! stores it: what overflows there is infinite, and what depends on it may be anything.

use std::collections::BTreeMap;
use std::fmt;

use graph::{Device, Graph, Invalid, NodeId, Op, Result, vjp};

use super::case::{Case, Draw};
use super::{Expected, Fill, Rng, cases, op_names, run};
use crate::eval::eval_stored;

/// What operands take in turn.
const WIDE: [f64; 24] = [
    150.0, -150.0, 1e4, -1e4, 0.0, -0.0, 1e-40, -1e-40, 1e-45, -1e-45, 1.2e-38, -1.2e-38, 1.0,
    -1.0, 0.5, -0.5, 88.7, -88.7, -104.0, 20.0, -20.0, 7.0, -7.0, 1e-6,
];

/// Numbers for a leaf that otherwise holds `fill`. Where that has one sign they have it too: steps
/// are positive, decays negative, whatever their size.
pub(super) fn numbers(fill: Fill, n: usize, rng: &mut Rng) -> Vec<f64> {
    let mut all = fill.draw(n, rng);
    let some = |rng: &mut Rng, of: &[f64]| of[rng.below(of.len())];
    match rng.below(8) {
        0 => all.iter_mut().for_each(|x| *x = some(rng, &WIDE)),
        1 => all.iter_mut().for_each(|x| *x = some(rng, &WIDE[2..4])),
        2 => all.iter_mut().for_each(|x| *x = some(rng, &WIDE[..2])),
        3 => all.iter_mut().for_each(|x| *x = some(rng, &WIDE[4..12])),
        // A few, or one, among others.
        4 | 5 => {
            for _ in 0..n.div_ceil(7).min(1 + rng.below(n)) {
                let at = rng.below(n);
                all[at] = some(rng, &WIDE);
            }
        }
        _ => {}
    }
    if let Fill::Between(low, high) = fill {
        match (low >= 0.0, high <= 0.0) {
            (true, _) => all.iter_mut().for_each(|x| *x = x.abs()),
            (_, true) => all.iter_mut().for_each(|x| *x = -x.abs()),
            _ => {}
        }
    }
    all
}

/// What [`check_wide`] found.
#[derive(Clone, Default, Debug)]
pub struct WideReport {
    /// For each op, how many elements that depend on its results were to be finite.
    pub asked: BTreeMap<&'static str, usize>,
    /// How many elements were not to be: the true ones are not.
    pub beyond: usize,
    /// Elements that are not finite, and cases that did not run.
    pub failures: Vec<String>,
}

impl fmt::Display for WideReport {
    /// A line for each op, then the failures.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (op, asked) in &self.asked {
            writeln!(f, "{op:<18} {asked:>9}")?;
        }
        writeln!(f, "not finite in f64: {}", self.beyond)?;
        self.failures.iter().try_for_each(|failure| writeln!(f, "FAILED: {failure}"))
    }
}

/// Runs the cases of all ops, or of those whose name contains `filter` in any case, and their
/// gradients, with leaves that hold numbers far out, at zero or below the normal ones. So many
/// times, each with other numbers; the same seed gives the same.
///
/// Not run are the cases of attention's gradient ops alone: the log-sum-exps there are none of
/// their operands, and weights of attention beyond 1 may be of any size. They run in the cases of
/// attention. A case of a recurrence with results that are nearly as large as f32 has numbers is
/// left out as a whole: its states, and products of them, may not fit in between.
pub fn check_wide(device: &dyn Device, seed: u64, rounds: u64, filter: Option<&str>) -> WideReport {
    let filter = filter.unwrap_or_default().to_lowercase();
    let mut report = WideReport::default();
    let alone = ["AttentionBack", "AttentionQueryBack"];
    let chosen = op_names().filter(|op| op.to_lowercase().contains(&filter));
    for op in chosen.filter(|op| !alone.contains(op)) {
        for case in cases(op).iter().filter(|case| case.fault.is_none()) {
            for round in 0..rounds {
                let found = report.failures.len();
                if let Err(e) = report.case(device, case, seed.wrapping_add(round << 32)) {
                    report.failures.push(e.to_string());
                }
                for failure in report.failures.iter_mut().skip(found) {
                    *failure = format!("{op}: {}, round {round}: {failure}", case.name);
                }
            }
        }
    }
    report
}

/// What results of a recurrence may be for what is in between to be finite: a sum of products of
/// two such numbers.
const STATES: f64 = 1e18;

/// A node that is a recurrence, and, where it is a gradient, what that is the gradient of: what
/// shows how large its states are.
fn recurrences(graph: &mut Graph, id: NodeId) -> std::result::Result<Vec<NodeId>, Invalid> {
    let node = graph.node(id).clone();
    let forward = match node.op {
        Op::SsmScan | Op::GatedDeltaRule(_) => return Ok(vec![id]),
        Op::SsmScanBack { .. } => Op::SsmScan,
        Op::GatedDeltaRuleBack(attrs) => Op::GatedDeltaRule(attrs),
        _ => return Ok(Vec::new()),
    };
    // Behind the operands come cotangents of outputs and exit states.
    let operands = node.args.len().saturating_sub(2);
    Ok(vec![id, graph.push(forward, &node.args[..operands], &node.name)?])
}

impl WideReport {
    fn case(&mut self, device: &dyn Device, case: &Case, seed: u64) -> Result<()> {
        let (mut built, output) = case.build_of(seed, Draw::Wide)?;
        let cotangent = built.cotangent_of(output)?;
        let inputs = built.inputs.iter();
        let wrt: Vec<NodeId> =
            inputs.filter(|i| i.expected == Expected::Gradient).map(|i| i.node).collect();
        let back = vjp(&built.graph, &[(output, cotangent)], &wrt)?;
        let mut outputs = vec![output];
        outputs.extend(back.grads);
        let graph = &back.graph;
        let needed: Vec<Vec<NodeId>> = outputs.iter().map(|id| behind(graph, *id)).collect();
        let (mut wanted, mut all) = (outputs.clone(), graph.clone());
        for id in needed.iter().flatten() {
            wanted.extend(recurrences(&mut all, *id)?);
        }
        let truth = eval_stored(&all, &built.leaves, &wanted)?;
        let mut states = truth.iter().skip(outputs.len()).filter_map(|value| value.as_floats());
        // Written so that NaN is beyond.
        if !states.all(|states| states.iter().all(|x| x.abs() <= STATES)) {
            self.beyond += truth.iter().map(|value| value.shape().elements()).sum::<usize>();
            return Ok(());
        }
        let got = run::values(device, &built, graph, &outputs)?;
        for (i, (got, truth)) in got.iter().zip(&truth).enumerate() {
            let what = if i == 0 { "value".into() } else { format!("gradient {}", i - 1) };
            let (Some(got), Some(truth)) = (got.as_floats(), truth.as_floats()) else { continue };
            let finite = truth.iter().filter(|x| x.is_finite()).count();
            self.beyond += truth.len() - finite;
            for id in &needed[i] {
                *self.asked.entry(graph.node(*id).op.name()).or_default() += finite;
            }
            let wrong = got.iter().zip(truth).position(|(a, b)| b.is_finite() && !a.is_finite());
            if let Some(at) = wrong {
                let (a, b) = (got[at], truth[at]);
                self.failures.push(format!("{what}, element {at} is {a}, in f64 {b:e}"));
            }
        }
        Ok(())
    }
}

/// A node and all that it depends on.
fn behind(graph: &Graph, id: NodeId) -> Vec<NodeId> {
    let (mut stack, mut seen) = (vec![id], vec![false; graph.len()]);
    let mut all = Vec::new();
    while let Some(id) = stack.pop() {
        if !std::mem::replace(&mut seen[id.index()], true) {
            all.push(id);
            stack.extend(&graph.node(id).args);
        }
    }
    all
}
