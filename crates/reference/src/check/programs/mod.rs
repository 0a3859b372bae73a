//! Random programs: graphs of 3 to 40 ops of every kind, with random shapes, sharing,
//! broadcasting and views, differentiated for anything.
//!
//! Whether a program differentiates, and what a refusal names, is predicted from a table of its
//! own; what differentiates is compared with central differences along a random direction. A
//! failure is reported as the shortest program that still fails.

mod device;
mod differences;
mod families;
mod maker;
mod placed;
mod program;
mod shrink;
mod table;
#[cfg(test)]
mod tests;

pub use placed::{Placements, check_placed};

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use graph::{Device, vjp};
use serde::Serialize;

use super::Rng;
use super::rule::Differentiate;
use differences::Verdict;
use program::Program;
use table::Family;

/// The least share of programs that differentiate.
const LEAST_DIFFERENTIABLE: f64 = 0.8;

/// The largest share of programs about which differences tell nothing, and of those whose
/// gradient is zero.
const MOST_UNCLEAR: f64 = 0.02;
const MOST_ZERO: f64 = 0.1;

/// Failures that each thread makes as short as they get.
const MOST_SHORTENED: usize = 12;

/// What checking programs found.
#[derive(Clone, PartialEq, Default, Debug, Serialize)]
pub struct Programs {
    /// Programs checked.
    pub programs: usize,
    /// Those with a gradient.
    pub differentiable: usize,
    /// Those refused, as predicted, by code.
    pub refused: BTreeMap<&'static str, usize>,
    /// Gradients that are zero, as are the differences.
    pub zero: usize,
    /// Programs at a kink, or so curved that differences tell nothing.
    pub unclear: usize,
    /// Elements of all gradients.
    pub elements: usize,
    /// The largest error relative to the sum of what is summed along the direction.
    pub worst: f64,
    /// Programs also run on a device, with the largest error relative to the tolerance.
    pub on_device: usize,
    /// The largest error on a device, relative to what rounding explains.
    pub worst_on_device: f64,
    /// How often each op was in a program.
    pub ops: BTreeMap<&'static str, usize>,
    #[serde(skip)]
    families: HashSet<Family>,
    /// Programs that failed: the number, what was found, and the shortest program that fails.
    pub failures: Vec<String>,
}

impl Programs {
    /// True when nothing failed, and programs are as they are meant to be.
    pub fn passed(&self) -> bool {
        self.failures.is_empty() && self.drift().is_none()
    }

    /// In which way the programs are not what they are meant to be; of a few programs, none.
    fn drift(&self) -> Option<String> {
        let share = |n: usize| n as f64 / self.programs.max(1) as f64;
        if self.programs == 0 {
            return Some("no program was checked".into());
        }
        if self.programs < 1000 {
            return None;
        }
        if let Some(family) = Family::ALL.iter().find(|f| !self.families.contains(f)) {
            return Some(format!("no op of the family {family:?} was made"));
        }
        if share(self.differentiable) < LEAST_DIFFERENTIABLE {
            return Some(format!("{} programs differentiate: too few", self.differentiable));
        }
        if share(self.unclear) > MOST_UNCLEAR {
            return Some(format!("of {} programs differences tell nothing", self.unclear));
        }
        if share(self.zero) > MOST_ZERO {
            return Some(format!("{} gradients are zero: too many", self.zero));
        }
        None
    }

    /// Adds another part of the programs.
    pub fn add(&mut self, other: Programs) {
        self.programs += other.programs;
        self.differentiable += other.differentiable;
        self.zero += other.zero;
        self.unclear += other.unclear;
        self.elements += other.elements;
        self.worst = self.worst.max(other.worst);
        self.on_device += other.on_device;
        self.worst_on_device = self.worst_on_device.max(other.worst_on_device);
        for (code, n) in other.refused {
            *self.refused.entry(code).or_default() += n;
        }
        for (op, n) in other.ops {
            *self.ops.entry(op).or_default() += n;
        }
        self.families.extend(other.families);
        self.failures.extend(other.failures);
    }
}

impl fmt::Display for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Programs { programs, differentiable, zero, unclear, elements, worst, .. } = self;
        writeln!(
            f,
            "{programs} programs: {differentiable} differentiate ({elements} elements, worst error \
             {worst:.1e}, {zero} zero, {unclear} unclear)"
        )?;
        for (code, n) in &self.refused {
            writeln!(f, "refused as predicted: {n} {code}")?;
        }
        if self.on_device > 0 {
            let (n, worst) = (self.on_device, self.worst_on_device);
            writeln!(f, "on the device: {n}, worst error {worst:.1e} of what rounding explains")?;
        }
        if let Some(drift) = self.drift() {
            writeln!(f, "FAILED: {drift}")?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED: {failure}")?;
        }
        Ok(())
    }
}

/// Checks the programs of these numbers and a seed, on `threads` threads; one in so many of them
/// also on a device, where one is given. The same seed and number give the same program.
pub fn check_programs(
    device: Option<(&dyn Device, u64)>,
    seed: u64,
    numbers: std::ops::Range<u64>,
    threads: usize,
) -> Programs {
    let threads = threads.clamp(1, 64) as u64;
    let mut all = Programs::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|t| {
                let numbers = numbers.clone().filter(move |n| n % threads == t);
                scope.spawn(move || check_some(device, seed, numbers, &vjp))
            })
            .collect();
        for worker in workers {
            match worker.join() {
                Ok(part) => all.add(part),
                Err(_) => all.failures.push("a program panicked".into()),
            }
        }
    });
    all
}

fn check_some(
    device: Option<(&dyn Device, u64)>,
    seed: u64,
    numbers: impl Iterator<Item = u64>,
    differentiate: &Differentiate,
) -> Programs {
    let mut found = Programs::default();
    for number in numbers {
        let program = maker::program(seed, number);
        found.programs += 1;
        for id in program.graph.ids() {
            let op = &program.graph.node(id).op;
            *found.ops.entry(op.name()).or_default() += 1;
            found.families.insert(table::family(op));
        }
        if program.cotangents.is_empty() || program.wrt.is_empty() {
            found.unclear += 1;
            continue;
        }
        let directions = || Rng::new(seed, &format!("direction {number}"));
        match differences::check(&program, differentiate, &mut directions()) {
            Verdict::Refused(code) => *found.refused.entry(code.as_str()).or_default() += 1,
            Verdict::Agrees { error, elements, zero } => {
                found.differentiable += 1;
                found.elements += elements;
                found.zero += usize::from(zero);
                found.worst = found.worst.max(error);
            }
            Verdict::Unclear => {
                found.differentiable += 1;
                found.unclear += 1;
            }
            // Many fail for one reason: some are enough to find it.
            Verdict::Failed(why) if found.failures.len() >= MOST_SHORTENED => {
                found.failures.push(format!("program {number} of seed {seed}: {why}"));
            }
            Verdict::Failed(why) => {
                let fails = |p: &Program| {
                    let verdict = differences::check(p, differentiate, &mut directions());
                    matches!(verdict, Verdict::Failed(_))
                };
                let least = shrink::shrink(&program, &fails);
                let now = differences::check(&least, differentiate, &mut directions());
                let now = if let Verdict::Failed(now) = now { now } else { why };
                found.failures.push(format!("program {number} of seed {seed}: {now}\n{least}"));
            }
        }
        if let Some((device, _)) = device.filter(|(_, share)| number % (*share).max(1) == 0)
            && program.predicted().is_none()
        {
            device::check(device, &program, (seed, number), &mut found);
        }
    }
    found
}
