//! The checker of gradients and devices.
//!
//! Every op has cases ([`cases`]): small graphs around it, with what differentiating with
//! respect to each input must give, a gradient or a refusal. Two comparisons are made:
//!
//! 1. the gradient that [`graph::vjp`] builds, evaluated in f64 with rounding ops replaced by
//!    the identity, against central differences of the same interpreter ([`RULE_BOUND`]);
//! 2. values and gradients as a device computes them, from a plan, on an arena full of NaN,
//!    against the interpreter, rounding ops included ([`DEVICE_BOUND`]).
//!
//! How elements are compared is said at [`Measure::compare`]. A case that compares nothing
//! fails, and so does one in which more than 5 % of the elements are excused.

mod case;
mod cases;
mod measure;
mod programs;
mod report;
mod rng;
mod rule;
mod run;
#[cfg(test)]
mod tests;
mod wide;
mod wild;

use std::collections::HashSet;

use graph::{Code, Device, Error, GluKind, GluOperand, Graph, NodeId, Op, Result, vjp};

pub use case::{Case, CaseGraph, Cases, Expected, Fill, Input, Made, View, Wider};
pub use cases::{cases, op_names};
pub use measure::{MOST_EXCUSED, Measure, Mismatch};
pub use programs::{Placements, Programs, check_placed, check_programs};
pub use report::{Failure, Nonconforming, OpReport, Report, Tally};
pub use rng::Rng;
pub use wide::{WideReport, check_wide};
pub use wild::{Wild, wild};

use crate::{Mode, eval};
use rule::{Checked, Differentiate};

/// The largest relative error of a gradient rule against central differences.
pub const RULE_BOUND: f64 = 1e-6;

/// The largest relative error of a device against the f64 interpreter.
pub const DEVICE_BOUND: f64 = 1e-5;

/// The same for gated linear units and their gradients, which are a few roundings long.
pub const GLU_BOUND: f64 = 3e-7;

/// The bound of an op's device cases.
fn device_bound(op: &str) -> f64 {
    let glu = GluKind::ALL.into_iter().flat_map(|kind| {
        let wrt = GluOperand::Gate;
        [Op::Glu(kind).name(), Op::GluBack { kind, wrt }.name()]
    });
    if glu.into_iter().any(|name| name == op) { GLU_BOUND } else { DEVICE_BOUND }
}

/// Checks the gradient rules of all ops, or of those whose name contains `filter` (in any
/// case), and, where one is given, a device. The same seed gives the same inputs.
///
/// A filter that fits no op gives an empty report, which has not passed.
pub fn check_all(device: Option<&dyn Device>, seed: u64, filter: Option<&str>) -> Report {
    let what = Checks { rules: Some(&vjp), device, segments: false };
    check(&what, seed, filter, cases)
}

/// Checks that a device conforms: every case of every op, values and gradients, against the f64
/// interpreter; that a run's high-water mark is what the plan says; and that a run repeated in
/// the same arena, or stopped and resumed at every segment, gives the same bits. Of all ops, or
/// of those whose name contains `filter`, in any case.
///
/// # Errors
/// [`Nonconforming`] lists what failed.
pub fn conformance(
    device: &dyn Device,
    seed: u64,
    filter: Option<&str>,
) -> std::result::Result<Report, Box<Nonconforming>> {
    let what = Checks { rules: None, device: Some(device), segments: true };
    let report = check(&what, seed, filter, cases);
    if report.passed() { Ok(report) } else { Err(Box::new(Nonconforming(report))) }
}

/// What to check.
struct Checks<'a> {
    rules: Option<&'a Differentiate>,
    device: Option<&'a dyn Device>,
    /// Whether runs are also repeated, stopped and resumed.
    segments: bool,
}

fn check(
    what: &Checks<'_>,
    seed: u64,
    filter: Option<&str>,
    cases: impl Fn(&str) -> Vec<Case>,
) -> Report {
    let filter = filter.unwrap_or_default().to_lowercase();
    let chosen = op_names().filter(|op| op.to_lowercase().contains(&filter));
    let ops = chosen.map(|op| check_op(what, seed, op, &cases(op))).collect();
    let (device, family) = (what.device.map(|d| d.name()), what.device.map(|d| d.family()));
    Report { device, family, seed, ops }
}

fn check_op(what: &Checks<'_>, seed: u64, op: &'static str, cases: &[Case]) -> OpReport {
    let mut checker = Checker {
        what,
        seed,
        distinct: HashSet::new(),
        report: OpReport {
            op,
            rule: what.rules.map(|_| Tally::new(RULE_BOUND)),
            device: what.device.map(|_| Tally::new(device_bound(op))),
            refusals: 0,
            faults: 0,
            failures: Vec::new(),
        },
    };
    if let (Some(device), true, "Leaf") = (what.device, what.segments, op) {
        for (misuse, found) in run::misuse(device) {
            checker.fail(misuse, "misuse", found);
        }
    }
    if cases.is_empty() {
        checker.fail(op, "cases", "the op has no cases");
    }
    for case in cases {
        if let Err(e) = checker.case(case) {
            checker.fail(&case.name, "case", e);
        }
    }
    checker.report
}

/// Checks the cases of one op.
struct Checker<'a> {
    what: &'a Checks<'a>,
    seed: u64,
    /// Descriptions of the graphs seen, with what was differentiated.
    distinct: HashSet<String>,
    report: OpReport,
}

impl Checker<'_> {
    fn fail(&mut self, case: &str, check: &'static str, found: impl ToString) {
        let (case, found) = (case.to_string(), found.to_string());
        self.report.failures.push(Failure { case, check, found });
    }

    fn case(&mut self, case: &Case) -> Result<()> {
        let (mut built, output) = case.build(self.seed)?;
        if let Some(code) = case.fault {
            self.fault(case, &built, output, code);
            return Ok(());
        }
        if !contains(&built.graph, output, case.op) {
            self.fail(&case.name, "case", "its output does not depend on the op it is a case of");
        }
        let cotangent = built.cotangent_of(output)?;
        let graph = describe(&built.graph, output, cotangent);
        if self.what.rules.is_some() {
            self.rules(case, &built, output, cotangent, &graph);
        }
        if self.what.device.is_some() {
            self.device(case, &built, output, cotangent, graph)?;
        }
        Ok(())
    }

    /// Checks that running a case gives a fault, in the interpreter and on the device.
    fn fault(&mut self, case: &Case, built: &CaseGraph, output: NodeId, code: Code) {
        let outputs = [output];
        let mut ran = vec![eval(&built.graph, &built.leaves, &outputs, Mode::Exact).map(|_| ())];
        if let Some(device) = self.what.device {
            ran.push(run::run(device, built, &built.graph, &outputs));
        }
        let name = &built.graph.node(output).name;
        for ran in ran {
            match ran {
                Err(Error::Fault(fault)) if fault.code == code && *fault.node == **name => {}
                Err(e) => {
                    let found = format!("{} at `{name}` was expected, got: {e}", code.as_str());
                    self.fail(&case.name, "fault", found);
                    return;
                }
                Ok(()) => {
                    self.fail(&case.name, "fault", "it ran, where a fault was expected");
                    return;
                }
            }
        }
        self.report.faults += 1;
    }

    fn rules(
        &mut self,
        case: &Case,
        built: &CaseGraph,
        output: NodeId,
        cotangent: NodeId,
        graph: &str,
    ) {
        let Some(differentiate) = self.what.rules else { return };
        let mut rng = Rng::new(self.seed, &format!("{}/{}/ways", case.op, case.name));
        let mut asked = false;
        let mut alone = Vec::new();
        for input in built.inputs.iter().filter(|i| i.expected != Expected::Nothing) {
            asked = true;
            let name = format!("{}, wrt {}", case.name, input.name);
            let (leaf, expected) = (input.node, input.expected);
            match rule::check(built, output, cotangent, leaf, expected, differentiate, &mut rng) {
                Checked::Gradient(measure, gradient) => {
                    alone.push((leaf, gradient));
                    if let Some(found) = measure.verdict(RULE_BOUND) {
                        self.fail(&name, "rule against differences", found);
                    }
                    let new = self.distinct.insert(format!("{graph} wrt {}", leaf.index()));
                    if let Some(tally) = &mut self.report.rule {
                        tally.add(&name, &measure);
                        tally.cases += usize::from(new);
                    }
                }
                Checked::Refused => self.report.refusals += 1,
                Checked::Failed(found) => self.fail(&name, "rule against differences", found),
            }
        }
        if let Err(e) = rule::together(built, output, cotangent, &alone, differentiate) {
            self.fail(&case.name, "gradients together", e);
        }
        if !asked {
            self.fail(&case.name, "case", "it asks for no gradient and no refusal");
        }
    }

    fn device(
        &mut self,
        case: &Case,
        built: &CaseGraph,
        output: NodeId,
        cotangent: NodeId,
        graph: String,
    ) -> Result<()> {
        let Some(device) = self.what.device else { return Ok(()) };
        let inputs = built.inputs.iter();
        let wrt: Vec<NodeId> =
            inputs.filter(|i| i.expected == Expected::Gradient).map(|i| i.node).collect();
        let back = vjp(&built.graph, &[(output, cotangent)], &wrt)?;
        let mut outputs = vec![output];
        outputs.extend(back.grads);
        let bound = case.device_bound.map_or(device_bound(case.op), |wider| wider.bound);
        let ran = run::check(device, built, &back.graph, &outputs, bound, self.what.segments)?;
        if let Some(found) = ran.measure.verdict(bound) {
            self.fail(&case.name, "device against f64", found);
        }
        for (check, found) in ran.failures {
            self.fail(&case.name, check, found);
        }
        let new = self.distinct.insert(graph);
        if let Some(tally) = &mut self.report.device {
            tally.add(&case.name, &ran.measure);
            tally.cases += usize::from(new);
        }
        Ok(())
    }
}

/// True when `output` is computed by way of an op of this name.
fn contains(graph: &Graph, output: NodeId, op: &str) -> bool {
    let mut stack = vec![output];
    let mut seen = HashSet::new();
    while let Some(id) = stack.pop() {
        if cases::listed(&graph.node(id).op) == op {
            return true;
        }
        stack.extend(graph.node(id).args.iter().filter(|&&a| seen.insert(a)));
    }
    false
}

/// The ops, operands, shapes and dtypes of a case: what makes it distinct.
fn describe(graph: &Graph, output: NodeId, cotangent: NodeId) -> String {
    let mut text = format!("{} {}:", output.index(), cotangent.index());
    for id in graph.ids() {
        let node = graph.node(id);
        let args: Vec<usize> = node.args.iter().map(|a| a.index()).collect();
        text += &format!(" {:?}{args:?}{}{}", node.op, node.dtype, node.shape);
    }
    text
}
