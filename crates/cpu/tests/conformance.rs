//! Every kernel family against the f64 interpreter, by the suite that all devices pass.

use cpu::{Cpu, Family};

/// `GRADUS_OPS=NAME,NAME` runs the cases of ops whose name contains one of these alone,
/// `GRADUS_CPU=FAMILY` those of one family. `GRADUS_SEEDS=FIRST-LAST` runs the cases of each of
/// these seeds instead of seed 1, with one thread and two in turn, and says of all what fails.
#[test]
fn every_family_conforms_at_any_thread_count() {
    let ops = std::env::var("GRADUS_OPS").unwrap_or_default();
    let only = std::env::var("GRADUS_CPU").ok();
    let asked = |f: &Family| f.is_available() && only.as_ref().is_none_or(|only| f.key() == only);
    let mut runs = vec![(1, 1), (1, 2)];
    if let Ok(seeds) = std::env::var("GRADUS_SEEDS") {
        let (first, last) = seeds.split_once('-').unwrap_or((&seeds, &seeds));
        let [first, last] = [first, last].map(|text| text.parse::<u64>().unwrap());
        runs = (first..=last).map(|seed| (seed, 1 + (seed % 2) as usize)).collect();
    }
    assert!(!runs.is_empty(), "GRADUS_SEEDS: the last is before the first");
    let mut failures = Vec::new();
    // The quickest first: what fails there does so soon.
    for family in Family::ALL.into_iter().rev().filter(asked) {
        for &(seed, threads) in &runs {
            let cpu = Cpu::new(threads, Some(family)).unwrap();
            for ops in ops.split(',') {
                let on = format!("{}, seed {seed}, threads {threads}", family.key());
                match reference::check::conformance(&cpu, seed, Some(ops)) {
                    Ok(report) if runs.len() > 2 => {
                        println!("{on}: {} ops conform", report.ops.len())
                    }
                    Ok(report) => println!("{on}\n{report}"),
                    Err(e) if e.0.ops.is_empty() => panic!("GRADUS_OPS: no op is called {ops}"),
                    Err(e) => {
                        let lines = e.to_string();
                        let failed = lines.lines().filter(|line| line.starts_with("FAILED"));
                        failures.extend(failed.map(|line| format!("{on}: {line}")));
                        println!("{on}\n{lines}");
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
