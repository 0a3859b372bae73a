//! `cargo xtask mutants`: each patch of `mutants/` is one fault, which the tests must find.
//!
//! A patch opens with two lines: `# cargo test --release ARGUMENTS`, the test that must fail, and
//! `# ` with the fault in words.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PREFIX: &str = "# cargo test --release ";

/// A test that runs longer than this counts as failed: a mutant may not end.
const LIMIT: Duration = Duration::from_secs(900);

struct Mutant {
    name: String,
    patch: PathBuf,
    /// The arguments of `cargo test --release`.
    test: Vec<String>,
    fault: String,
}

/// Applies each patch whose name contains one of `names`, or each, to a copy of the tree and runs
/// its test.
pub fn run(names: &[&str]) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no workspace")?;
    let mutants = read(&root.join("mutants"), names)?;
    if mutants.is_empty() {
        return Err(format!("no patch in mutants/ has {names:?} in its name"));
    }
    let work = std::env::temp_dir().join("gradus-mutants");
    let tree = work.join("tree");
    copy(root, &tree)?;

    let mut tests: Vec<&[String]> = mutants.iter().map(|m| m.test.as_slice()).collect();
    tests.sort();
    tests.dedup();
    for test in tests {
        println!("without a fault: cargo test --release {}", test.join(" "));
        if !build(&tree, &work, test)? || !passes(&tree, &work, test)? {
            return Err(format!("cargo test --release {} fails as it is", test.join(" ")));
        }
    }

    let mut survived = Vec::new();
    for mutant in &mutants {
        let start = Instant::now();
        apply(&tree, &mutant.patch, false)?;
        let built = build(&tree, &work, &mutant.test);
        let passed = match built {
            Ok(true) => passes(&tree, &work, &mutant.test),
            _ => Ok(false),
        };
        apply(&tree, &mutant.patch, true)?;
        let verdict = match (built?, passed?) {
            (false, _) => "NO BUILD",
            (true, true) => "SURVIVED",
            (true, false) => "killed",
        };
        let seconds = start.elapsed().as_secs();
        println!("{verdict:<9} {:<36} {seconds:>4} s  {}", mutant.name, mutant.fault);
        if verdict != "killed" {
            survived.push(mutant.name.as_str());
        }
    }
    match survived.as_slice() {
        [] => {
            println!("{} of {} killed", mutants.len(), mutants.len());
            Ok(())
        }
        names => Err(format!(
            "{} of {} are not killed: {}",
            names.len(),
            mutants.len(),
            names.join(", ")
        )),
    }
}

fn read(folder: &Path, names: &[&str]) -> Result<Vec<Mutant>, String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut mutants = Vec::new();
    for entry in entries {
        let patch = entry.map_err(|e| e.to_string())?.path();
        let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let asked = names.is_empty() || names.iter().any(|n| name.contains(n));
        if patch.extension().is_none_or(|e| e != "patch") || !asked {
            continue;
        }
        let text = std::fs::read_to_string(&patch).map_err(|e| format!("{name}: {e}"))?;
        let mut lines = text.lines();
        let test = lines.next().and_then(|line| line.strip_prefix(PREFIX));
        let test = test.ok_or_else(|| format!("{name}: its first line is not `{PREFIX}...`"))?;
        let fault = lines.next().and_then(|line| line.strip_prefix("# "));
        let fault =
            fault.ok_or_else(|| format!("{name}: its second line does not say the fault"))?;
        let test = test.split_whitespace().map(String::from).collect();
        mutants.push(Mutant { name, patch, test, fault: fault.into() });
    }
    mutants.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(mutants)
}

/// Copies what git tracks. A file that is as it was keeps its time, so that builds of a later run
/// begin where the last one ended.
pub fn copy(root: &Path, tree: &Path) -> Result<(), String> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    let listed = listed.map_err(|e| format!("cannot run git: {e}"))?;
    if !listed.status.success() {
        return Err("git ls-files failed".into());
    }
    let mut kept = std::collections::HashSet::new();
    for name in String::from_utf8_lossy(&listed.stdout).split('\0').filter(|n| !n.is_empty()) {
        let (from, to) = (root.join(name), tree.join(name));
        // Listed, but deleted.
        let Ok(bytes) = std::fs::read(&from) else { continue };
        kept.insert(to.clone());
        if std::fs::read(&to).is_ok_and(|old| old == bytes) {
            continue;
        }
        let write = || {
            std::fs::create_dir_all(to.parent().unwrap_or(tree))?;
            std::fs::write(&to, bytes)
        };
        write().map_err(|e| format!("{}: {e}", to.display()))?;
    }
    remove_others(tree, &kept)
}

/// Removes what is no longer of the tree, lest it be built.
fn remove_others(folder: &Path, kept: &std::collections::HashSet<PathBuf>) -> Result<(), String> {
    let failed = |e: std::io::Error| format!("{}: {e}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.is_dir() {
            remove_others(&path, kept)?;
        } else if !kept.contains(&path) {
            std::fs::remove_file(&path).map_err(failed)?;
        }
    }
    Ok(())
}

fn apply(tree: &Path, patch: &Path, back: bool) -> Result<(), String> {
    let mut command = Command::new("git");
    // Outside of any repository, whose index git would look into.
    command.env("GIT_CEILING_DIRECTORIES", tree.parent().unwrap_or(tree)).current_dir(tree);
    command.arg("apply").args(back.then_some("-R")).arg(patch);
    let done = command.status().map_err(|e| format!("cannot run git: {e}"))?;
    match done.success() {
        true => Ok(()),
        false => Err(format!("{} does not apply: the code has changed", patch.display())),
    }
}

fn cargo(tree: &Path, work: &Path) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(tree).args(["test", "--release", "--quiet"]);
    command.env("CARGO_TARGET_DIR", work.join("target"));
    command.env("CARGO_INCREMENTAL", "1").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "64");
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn build(tree: &Path, work: &Path, test: &[String]) -> Result<bool, String> {
    let status = cargo(tree, work).arg("--no-run").args(test).status();
    Ok(status.map_err(|e| format!("cannot run cargo: {e}"))?.success())
}

fn passes(tree: &Path, work: &Path, test: &[String]) -> Result<bool, String> {
    crate::limited::succeeds(cargo(tree, work).args(test), LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_patch_applies_to_the_code_as_it_is() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mutants = read(&root.join("mutants"), &[]).unwrap();
        assert!(mutants.len() > 80, "{} patches", mutants.len());
        for Mutant { name, patch, .. } in mutants {
            let mut git = Command::new("git");
            git.env("GIT_CEILING_DIRECTORIES", root.parent().unwrap()).current_dir(root);
            let said = git.args(["apply", "--check"]).arg(&patch).output().unwrap();
            let why = String::from_utf8_lossy(&said.stderr);
            assert!(said.status.success(), "mutants/{name}.patch: {why}");
        }
    }
}
