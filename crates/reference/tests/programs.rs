//! Random programs of all ops differentiate, or are refused, as predicted.
//!
//! `GRADUS_PROGRAMS=N` checks N programs instead of 20,000, `GRADUS_SEED=S` others than those of
//! seed 1.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use reference::Reference;
use reference::check::check_programs;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn programs_differentiate_or_are_refused_as_predicted() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (count, seed) = (number("GRADUS_PROGRAMS", 20_000), number("GRADUS_SEED", 1));
    let report = check_programs(Some((&Reference, 50)), seed, 0..count, threads);
    println!("{report}");
    assert!(report.passed(), "{report}");
    assert!(report.on_device > 0 || count < 1000);
}
