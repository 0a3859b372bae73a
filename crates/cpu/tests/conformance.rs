//! Every kernel family against the f64 interpreter, by the suite that all devices pass.

use cpu::{Cpu, Family};
use graph::Device;

/// `GRADUS_OPS=NAME,NAME` runs the cases of ops whose name contains one of these alone,
/// `GRADUS_CPU=FAMILY` those of one family.
#[test]
fn every_family_conforms_at_any_thread_count() {
    let ops = std::env::var("GRADUS_OPS").unwrap_or_default();
    let only = std::env::var("GRADUS_CPU").ok();
    let asked = |f: &Family| f.is_available() && only.as_ref().is_none_or(|only| f.key() == only);
    // The quickest first: what fails there does so soon.
    for family in Family::ALL.into_iter().rev().filter(asked) {
        for threads in [1, 2] {
            let cpu = Cpu::new(threads, Some(family)).unwrap();
            for ops in ops.split(',') {
                let report = reference::check::conformance(&cpu, 1, Some(ops));
                let report = report.unwrap_or_else(|e| {
                    panic!("{} with {threads} threads:\n{e}", cpu.family());
                });
                println!("{threads} threads\n{report}");
            }
        }
    }
}
