//! What a run of the checker found.

use std::fmt;

use serde::Serialize;

use super::measure::Measure;

/// What one kind of comparison over all cases of an op came to.
#[derive(Clone, PartialEq, Default, Debug, Serialize)]
pub struct Tally {
    /// Distinct cases: they differ in an op, a shape, a dtype or what is differentiated.
    pub cases: usize,
    /// Elements compared.
    pub elements: usize,
    /// The largest relative error of an element that was not excused.
    pub worst: f64,
    /// The bound on it.
    pub bound: f64,
    /// Elements that agree only to the bound times the rms of their tensor.
    pub excused: usize,
    /// Cases in which every compared element is zero on both sides, by name.
    pub zeros: Vec<String>,
}

impl Tally {
    pub(super) fn new(bound: f64) -> Tally {
        Tally { bound, ..Tally::default() }
    }

    pub(super) fn add(&mut self, case: &str, measure: &Measure) {
        self.elements += measure.compared;
        self.worst = self.worst.max(measure.worst);
        self.excused += measure.excused;
        if measure.compared > 0 && measure.nonzero == 0 {
            self.zeros.push(case.into());
        }
    }
}

/// A case that failed.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Failure {
    /// The case and, where it is about one input, that input.
    pub case: String,
    /// What was compared with what.
    pub check: &'static str,
    /// What was found, in one line.
    pub found: String,
}

/// What was found about one op.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct OpReport {
    /// The op.
    pub op: &'static str,
    /// Its gradient rule against central differences of the f64 interpreter; one case for each
    /// input that has a gradient. Absent where the rules were not checked.
    pub rule: Option<Tally>,
    /// The device's values and gradients against the f64 interpreter; one case for each graph.
    /// Absent where no device was checked.
    pub device: Option<Tally>,
    /// Inputs with respect to which differentiation was refused, as expected.
    pub refusals: usize,
    /// Graphs with bad indices that were stopped by a fault, as expected.
    pub faults: usize,
    /// Cases that failed.
    pub failures: Vec<Failure>,
}

/// What a run of the checker found.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The device, where one was checked.
    pub device: Option<&'static str>,
    /// Its kernel family.
    pub family: Option<&'static str>,
    /// The seed of all inputs.
    pub seed: u64,
    /// One entry for each op.
    pub ops: Vec<OpReport>,
}

impl Report {
    /// True when nothing failed and something was checked.
    pub fn passed(&self) -> bool {
        !self.ops.is_empty() && self.ops.iter().all(|op| op.failures.is_empty())
    }
}

impl fmt::Display for Report {
    /// A table with one or two rows per op, then the cases that compared zeros, then the
    /// failures. "Refused" counts inputs without a gradient, and, against f64, faults; "zeros"
    /// cases that compare zeros alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header =
            ["op", "against", "cases", "refused", "elements", "worst", "bound", "excused", "zeros"];
        let [op, against, cases, refused, elements, worst, bound, excused, zeros] = header;
        writeln!(
            f,
            "{op:<18} {against:<12} {cases:>6} {refused:>8} {elements:>9} {worst:>8} {bound:>6} \
             {excused:>8} {zeros:>5}"
        )?;
        for op in &self.ops {
            let rows = [("differences", &op.rule), ("f64", &op.device)];
            for (against, tally) in rows {
                let Some(t) = tally else { continue };
                let refused = if against == "differences" { op.refusals } else { op.faults };
                writeln!(
                    f,
                    "{:<18} {against:<12} {:>6} {refused:>8} {:>9} {:>8.1e} {:>6.0e} {:>8} \
                     {:>5}",
                    op.op,
                    t.cases,
                    t.elements,
                    t.worst,
                    t.bound,
                    t.excused,
                    t.zeros.len()
                )?;
            }
        }
        for op in &self.ops {
            for tally in op.rule.iter().chain(&op.device) {
                for case in &tally.zeros {
                    writeln!(f, "zeros: {}: {case}", op.op)?;
                }
            }
        }
        for op in &self.ops {
            for failure in &op.failures {
                let Failure { case, check, found } = failure;
                writeln!(f, "FAILED: {}: {case}: {check}: {found}", op.op)?;
            }
        }
        Ok(())
    }
}

/// A device that does not conform; what failed is in the report.
#[derive(Clone, PartialEq, Debug)]
pub struct Nonconforming(pub Report);

impl fmt::Display for Nonconforming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Nonconforming {}
