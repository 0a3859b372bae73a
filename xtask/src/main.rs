//! Maintenance commands of the workspace: `cargo xtask real [--quick]`,
//! `cargo xtask seeds [FIRST-LAST]`, `cargo xtask mutants [NAME]...` and
//! `cargo xtask mutate [--again] FILE...`.
//!
//! `real` runs the tests that need the real models of the catalogue (`docs/testing.md` says what
//! they hold), and fails when a model is not on this machine; `--quick` covers the default model
//! alone, and of what the binary holds only its perplexity. `seeds` checks every gradient rule and
//! every kernel with inputs of other seeds (twenty, where none are named) than the tests take by
//! themselves. `mutants` plants the faults of
//! `mutants/`, all or those whose name contains a NAME, and fails where the tests find one not.
//! `mutate` tries every mutant that `cargo mutants` makes of some files, and more of unsafe functions
//! and of the arithmetic of vectors.

mod limited;
mod mutants;
mod mutate;
mod schemata;

use std::ffi::OsStr;
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo xtask real [--quick] | seeds [FIRST-LAST] | \
                     mutants [NAME]... | mutate [--again] FILE...";

/// The seeds of `cargo xtask seeds`.
const SEEDS: &str = "501-520";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["real"] => real(false),
        ["real", "--quick"] => real(true),
        ["seeds"] => seeds(SEEDS),
        ["seeds", which] => seeds(which),
        ["mutants", names @ ..] => mutants::run(names),
        ["mutate", "--again", files @ ..] if !files.is_empty() => mutate::run(files, true),
        ["mutate", files @ ..] if !files.is_empty() => mutate::run(files, false),
        _ => Err(USAGE.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn real(quick: bool) -> Result<(), String> {
    let all = hub::catalogue().iter().map(|entry| entry.name);
    let models: Vec<&str> = all.filter(|&name| !quick || name == hub::DEFAULT_MODEL).collect();
    for name in &models {
        hub::resolve(name).map_err(|e| format!("{e} (or `cargo run --release -- pull {name}`)"))?;
    }
    let models = models.join(",");
    // Token goldens, then what the whole binary holds.
    let tokens = ["-p", "gradus-text", "--features", "real-models", "--test", "real_vocab"];
    let which: &[&str] = if quick { &["smollm2"] } else { &[] };
    let home = hub::home().map_err(|e| e.to_string())?;
    let environment = [("GRADUS_REAL", models.as_ref()), ("GRADUS_HOME", home.as_os_str())];
    cargo(&environment, &[&tokens[..], which].concat())?;
    let ours = ["-p", "gradus", "--test", "real", "--", "--ignored", "--nocapture"];
    let which: &[&str] = if quick { &["perplexity"] } else { &["--test-threads", "1"] };
    cargo(&environment, &[&ours[..], which].concat())
}

/// Checks rules against differences, then kernels against f64, in every family of this machine.
fn seeds(seeds: &str) -> Result<(), String> {
    let environment = [("GRADUS_SEEDS", seeds.as_ref())];
    let rules = ["-p", "gradus-reference", "--lib", "--", "--ignored", "--nocapture", "seeds"];
    let kernels = ["-p", "gradus-cpu", "--test", "conformance", "--", "--nocapture"];
    let rules = cargo(&environment, &rules);
    // What fails in one is of interest beside what fails in the other.
    cargo(&environment, &kernels).and(rules)
}

/// Runs `cargo test --release` with these arguments and variables.
fn cargo(environment: &[(&str, &OsStr)], args: &[&str]) -> Result<(), String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let shown = format!("cargo test --release {}", args.join(" "));
    let set = environment.iter().map(|(name, value)| format!("{name}={} ", value.display()));
    println!("+ {}{shown}", set.collect::<String>());
    let status = Command::new(cargo)
        .args(["test", "--release"])
        .args(args)
        .envs(environment.iter().copied())
        .status()
        .map_err(|e| format!("cannot run {shown}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("{shown} failed")) }
}
