//! Every kernel family against the f64 interpreter, by the suite that all devices pass.

use cpu::{Cpu, Family};
use graph::Device;

/// `GRADUS_OPS=NAME,NAME` runs the cases of ops whose name contains one of these alone.
#[test]
fn every_family_conforms_at_any_thread_count() {
    let ops = std::env::var("GRADUS_OPS").unwrap_or_default();
    for family in Family::ALL.into_iter().filter(|f| f.is_available()) {
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
