//! The tables of faults in ARCHITECTURE.md: each test that is named after a fault has a row, and each
//! report (`F01`) of a row has a test of its name.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may panic

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Faults with the files their tests are in: `("f", 33, "serve/src/request/tests.rs")`.
type Rows = BTreeSet<(&'static str, usize, String)>;

fn crates() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The number at the beginning of a text.
fn number(text: &str) -> Option<usize> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text.get(..end)?.parse().ok()
}

/// The rows of both tables: numbers, ranges of numbers, and a file each.
fn written() -> Rows {
    let page = std::fs::read_to_string(crates().join("../ARCHITECTURE.md")).unwrap();
    let mut rows = Rows::new();
    for line in page.lines() {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let (Some(faults), Some(file)) = (cells.next(), cells.next()) else { continue };
        let list = if faults.starts_with('F') { "f" } else { "bug_" };
        let numbers = |part: &str| {
            let mut ends = part.split(" to ").map(|n| number(n.trim_start_matches('F')));
            let first = ends.next()??;
            Some(first..=ends.next().unwrap_or(Some(first))?)
        };
        let Some(all) = faults.split(", ").map(numbers).collect::<Option<Vec<_>>>() else {
            continue;
        };
        let file = file.trim_matches('`').to_string();
        rows.extend(all.into_iter().flatten().map(|n| (list, n, file.clone())));
    }
    rows
}

/// The tests that are named after a fault.
fn tested(folder: &Path, rows: &mut Rows) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tested(&path, rows);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let file = path.strip_prefix(crates()).unwrap().to_str().unwrap().replace('\\', "/");
            for line in std::fs::read_to_string(&path).unwrap().lines() {
                let Some(name) = line.trim_start().strip_prefix("fn ") else { continue };
                for list in ["f", "bug_"] {
                    let Some(rest) = name.strip_prefix(list) else { continue };
                    // `05_and_11_words`
                    for part in rest.split("_and_") {
                        let numbered = part.as_bytes().get(2) == Some(&b'_') || part.len() == 2;
                        let Some(n) = number(part).filter(|_| numbered) else { break };
                        rows.insert((list, n, file.clone()));
                    }
                }
            }
        }
    }
}

#[test]
fn every_fault_that_is_listed_has_its_test() {
    let (written, mut tested_rows) = (written(), Rows::new());
    tested(&crates(), &mut tested_rows);
    let of = |list: &str| tested_rows.iter().filter(|row| row.0 == list).count();
    assert!(of("f") > 60 && of("bug_") > 15, "{} and {}", of("f"), of("bug_"));
    // Faults of the first list are also ruled out by tests that are not named after them.
    let missing = written.difference(&tested_rows).filter(|row| row.0 == "f");
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "no test is named after {missing:?}");
    let unlisted: Vec<_> = tested_rows.difference(&written).collect();
    assert!(unlisted.is_empty(), "no row of ARCHITECTURE.md is about {unlisted:?}");
}
