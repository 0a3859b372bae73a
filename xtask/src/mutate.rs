//! `cargo xtask mutate FILE...`: the mutants that `cargo mutants` makes of a file, and those of
//! [`schemata::more`], all in one build, of which an environment variable chooses one.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::mutants::copy;
use crate::schemata::{self, Mutant, Schemata};

/// What a compiler finds in the arithmetic of constants, though only when it makes code of it, is
/// left to the tests.
const ALLOW: &str = "#![allow(arithmetic_overflow, unconditional_panic)]\n";

/// What the mutated crates ask.
const MODULE: &str = "
#[allow(missing_docs)]
mod mutation {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    static CHOSEN: AtomicU32 = AtomicU32::new(u32::MAX);
    #[cold]
    #[inline(never)]
    fn read() -> u32 {
        let id = std::env::var(\"GRADUS_MUTANT\").map_or(0, |id| id.parse().unwrap_or(0));
        CHOSEN.store(id, Relaxed);
        id
    }
    #[inline(always)]
    pub(crate) fn on(id: u32) -> bool {
        let chosen = CHOSEN.load(Relaxed);
        id == if chosen == u32::MAX { read() } else { chosen }
    }
}
";

/// Memory that a mutant may ask for, in KiB.
const MEMORY: u32 = 8 << 20;

/// Tests of a file, in this order: the first that fails ends them.
struct Tests {
    /// What the paths of the files end in, or a part of them.
    of: &'static str,
    /// Arguments of `cargo test`, then those of the test's own after `--`.
    run: &'static [&'static str],
    /// `GRADUS_OPS`: whose cases the conformance tests run.
    ops: &'static str,
    /// Which unit tests: all, or those whose names contain one of these words.
    units: &'static str,
}

const GRAPH: &[&str] = &[
    "-p gradus-graph --lib",
    "-p gradus-graph --test vjp",
    "-p gradus-graph --test pieces",
    "-p gradus-reference --test vjp",
    "-p gradus-reference --test programs",
    "-p gradus-reference --lib -- check::tests::every_rule",
];

const KERNEL: &[&str] = &["-p gradus-cpu --test conformance", "-p gradus-cpu --lib"];

const UNITS: &[&str] = &["-p gradus-cpu --lib"];

const fn kernel(of: &'static str, ops: &'static str, units: &'static str) -> Tests {
    Tests { of, run: KERNEL, ops, units }
}

/// Those whose names are parts of others' last: these take longest.
const ELEMENTWISE: &str = "Add,Sub,Div,Glu,Gelu,Min,Max,Neg,Abs,Sqr,Sqrt,Log1p,Log,Sin,Cos,Sigmoid,\
                           Silu,Relu,Tanh,Normal,Softplus,Step,Sign,Affine,Clamp,Fill,Mul,Exp";

/// The first that fits a file is its.
const TESTS: &[Tests] = &[
    Tests { of: "crates/graph/src/", run: GRAPH, ops: "", units: "" },
    kernel("recurrent/delta", "GatedDelta", "recurrent prior_art kernels::tests fences"),
    kernel("recurrent/scan", "SsmScan", "recurrent prior_art kernels::tests fences"),
    kernel("recurrent/conv", "SsmConv", "recurrent prior_art kernels::tests fences"),
    kernel("recurrent/", "SsmConv,GatedDelta,SsmScan", "recurrent prior_art kernels::tests fences"),
    kernel("attention/", "Attention", "attention kernels::tests fences"),
    kernel("kernels/norm", "Norm", "norm prior_art kernels::tests fences"),
    kernel("kernels/softmax", "Softmax", "softmax prior_art kernels::tests fences"),
    kernel("kernels/loss", "CrossEntropy,LogSoftmax", "loss prior_art kernels::tests fences"),
    kernel(
        "kernels/indexing",
        "Gather,ScatterAdd,TopK",
        "indexing prior_art kernels::tests fences",
    ),
    kernel("kernels/lora", "Lora", "lora prior_art kernels::tests fences"),
    kernel("kernels/sum", "Sum", "sum prior_art kernels::tests fences"),
    kernel("kernels/rope", "Rope", "rope prior_art kernels::tests fences"),
    kernel("kernels/layout", "Broadcast,Copy,Pad,Concat", "layout prior_art kernels::tests fences"),
    kernel("kernels/dropout", "Dropout", "dropout prior_art kernels::tests fences"),
    kernel("kernels/elementwise", ELEMENTWISE, "elementwise prior_art kernels::tests fences"),
    // Tiles are software in unit tests, where the processor has none, and nowhere else.
    Tests { of: "matmul/tiles", run: UNITS, ops: "", units: "matmul prior_art fences" },
    kernel("matmul/experts", "Expert", "matmul prior_art kernels::tests fences"),
    kernel("matmul", "MatMul,Expert", "matmul prior_art kernels::tests fences"),
    kernel("crates/cpu/src/", "", ""),
];

/// A mutant, its file and what became of it.
struct Tried<'a> {
    mutant: &'a Mutant,
    tests: &'static Tests,
}

/// Tries all mutants of some files, named by their paths or parts of them; with `again`, those
/// that survived the last time.
///
/// # Errors
/// A mutant that survived, tests that fail without one, and everything that keeps them from
/// being tried.
pub fn run(names: &[&str], again: bool) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("no workspace")?;
    let work = std::env::temp_dir().join("gradus-mutate");
    let tree = work.join("tree");
    copy(root, &tree)?;
    let last = std::fs::read_to_string(work.join("survived")).unwrap_or_default();
    let last: HashSet<&str> = last.lines().collect();

    let mut files: BTreeMap<String, Vec<Mutant>> = BTreeMap::new();
    let mut next = 1;
    for found in listed(&tree, names)? {
        let text = |key: &str| found[key].as_str().unwrap_or_default().to_string();
        let place = |key: &str| found["span"]["start"][key].as_u64().unwrap_or(0) as usize;
        let at = (place("line"), place("column"));
        let (genre, replacement) = (text("genre"), text("replacement"));
        let mutant = Mutant { id: next, name: text("name"), genre, at, replacement };
        next += 1;
        files.entry(text("file")).or_default().push(mutant);
    }
    for (file, mutants) in &mut files {
        let failed = |e: &dyn std::fmt::Display| format!("{file}: {e}");
        let source = std::fs::read_to_string(tree.join(file)).map_err(|e| failed(&e))?;
        let more = schemata::more(file, &source, next).map_err(|e| failed(&e))?;
        next += more.len() as u32;
        mutants.extend(more);
    }
    if again {
        files.values_mut().for_each(|all| all.retain(|m| last.contains(&*m.name)));
        files.retain(|_, all| !all.is_empty());
    }
    if files.is_empty() {
        return Err(format!("there are no mutants of {names:?}"));
    }
    let not_tried = rewrite(&tree, &work, &files)?;

    let mut tried = Vec::new();
    let mut ordered: Vec<(&String, &Vec<Mutant>)> = files.iter().collect();
    ordered.sort_by_key(|(file, _)| names.iter().position(|name| file.contains(name)));
    for (file, mutants) in ordered {
        let tests = TESTS.iter().find(|t| file.contains(t.of));
        let tests = tests.ok_or_else(|| format!("no tests are known of {file}"))?;
        let able = mutants.iter().filter(|m| !not_tried.contains(&m.id));
        tried.extend(able.map(|mutant| Tried { mutant, tests }));
    }
    let survived = survivors(&tree, &work, &tried)?;

    println!("\n{:<52} mutants  caught  survived  not tried", "file");
    for (file, mutants) in &files {
        let of = |ids: &HashSet<u32>| mutants.iter().filter(|m| ids.contains(&m.id)).count();
        let (alive, not) = (of(&survived), of(&not_tried));
        let caught = mutants.len() - alive - not;
        println!("{file:<52} {:>7} {caught:>7} {alive:>9} {not:>10}", mutants.len());
    }
    let names = |ids: &HashSet<u32>| -> Vec<&str> {
        let all = files.values().flatten().filter(|m| ids.contains(&m.id));
        all.map(|m| m.name.as_str()).collect()
    };
    for name in names(&not_tried) {
        println!("not tried: {name}");
    }
    let lines: String = names(&survived).iter().map(|name| format!("{name}\n")).collect();
    std::fs::write(work.join("survived"), lines).map_err(|e| e.to_string())?;
    match survived.len() {
        0 => Ok(()),
        n => Err(format!("{n} survived")),
    }
}

/// cargo-mutants' mutants of the files whose paths contain one of `names`.
fn listed(tree: &Path, names: &[&str]) -> Result<Vec<Value>, String> {
    let mut command = cargo(tree, tree);
    command.args(["mutants", "--list", "--json", "--workspace", "-d", "."]);
    for name in names {
        command.args(["-f", &format!("**/{}*", name.trim_end_matches('*'))]);
    }
    let output = command.stderr(Stdio::inherit()).output().map_err(|e| format!("cargo: {e}"))?;
    let install = "`cargo mutants` (cargo install cargo-mutants --locked) gave no list";
    serde_json::from_slice(&output.stdout).map_err(|e| format!("{install}: {e}"))
}

fn cargo(tree: &Path, work: &Path) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(tree).env("CARGO_TARGET_DIR", work.join("target"));
    command.env("CARGO_INCREMENTAL", "1").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "64");
    // Built sooner; the tests that are run are short.
    command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
    command
}

/// Writes the mutants into the tree. What does not compile is taken out again; those mutants.
fn rewrite(
    tree: &Path,
    work: &Path,
    files: &BTreeMap<String, Vec<Mutant>>,
) -> Result<HashSet<u32>, String> {
    let failed = |path: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let mut sources = BTreeMap::new();
    let mut crates = HashSet::new();
    for file in files.keys() {
        let path = tree.join(file);
        let source = std::fs::read_to_string(&path).map_err(|e| failed(&path, &e))?;
        sources.insert(file.as_str(), source);
        let (folder, _) = file.split_once("/src/").ok_or(format!("{file} is of no crate"))?;
        crates.insert(folder);
    }
    for folder in &crates {
        let path = tree.join(folder).join("src/lib.rs");
        let text = std::fs::read_to_string(&path).map_err(|e| failed(&path, &e))?;
        std::fs::write(&path, [ALLOW, &text, MODULE].concat()).map_err(|e| failed(&path, &e))?;
    }
    let mut dropped: HashSet<u32> = HashSet::new();
    loop {
        let mut written: BTreeMap<&str, Schemata> = BTreeMap::new();
        for (&file, source) in &sources {
            let path = tree.join(file);
            let wanted = files[file].iter().filter(|m| !dropped.contains(&m.id));
            let wanted: Vec<Mutant> = wanted.cloned().collect();
            let made = schemata::write(source, &wanted).map_err(|e| failed(&path, &e))?;
            std::fs::write(&path, &made.text).map_err(|e| failed(&path, &e))?;
            dropped.extend(&made.unknown);
            written.insert(file, made);
        }
        let errors = errors(tree, work, &crates)?;
        if errors.is_empty() {
            return Ok(dropped);
        }
        let before = dropped.len();
        let mut first = String::new();
        for (message, spans) in errors {
            let blamed = spans.iter().find_map(|(file, bytes)| {
                let blamed = written.get(file.as_str())?.blamed(bytes);
                (!blamed.is_empty()).then_some(blamed)
            });
            match blamed {
                Some(ids) => dropped.extend(ids),
                None => first = message,
            }
        }
        if dropped.len() == before {
            return Err(format!("the mutated tree does not compile: {first}"));
        }
        println!("{} mutants do not compile in one text", dropped.len());
    }
}

/// An error's text, and where it may lie, the likeliest place first.
type CompilerError = (String, Vec<(String, Range<usize>)>);

fn errors(tree: &Path, work: &Path, crates: &HashSet<&str>) -> Result<Vec<CompilerError>, String> {
    let mut command = cargo(tree, work);
    command.args(["check", "--release", "--lib", "--message-format", "json", "--quiet"]);
    command.arg("--keep-going");
    for folder in crates {
        let name = folder.rsplit('/').next().unwrap_or(folder);
        command.args(["-p", &format!("gradus-{name}")]);
    }
    let output = command.stderr(Stdio::null()).output().map_err(|e| format!("cargo: {e}"))?;
    let mut errors = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
        let message = &line["message"];
        if message["level"] != "error" {
            continue;
        }
        let mut spans: Vec<&Value> = message["spans"].as_array().into_iter().flatten().collect();
        spans.sort_by_key(|s| s["is_primary"] != true);
        let place = |span: &&Value| -> Option<(String, Range<usize>)> {
            let byte = |key: &str| Some(span[key].as_u64()? as usize);
            let range = byte("byte_start")?..byte("byte_end")?;
            Some((span["file_name"].as_str()?.to_string(), range))
        };
        let text = message["rendered"].as_str().unwrap_or_default().to_string();
        let places: Vec<_> = spans.iter().filter_map(place).collect();
        // "aborting due to .." has no place.
        if !places.is_empty() {
            errors.push((text, places));
        }
    }
    match output.status.success() || !errors.is_empty() {
        true => Ok(errors),
        false => Err("cargo check fails without an error in the tree".into()),
    }
}

/// A test's program, its own arguments, and where it runs.
struct Program {
    path: PathBuf,
    arguments: Vec<String>,
    folder: PathBuf,
    ops: &'static str,
}

fn build(tree: &Path, work: &Path, run: &str, tests: &Tests) -> Result<Program, String> {
    let (test, own) = run.split_once(" -- ").unwrap_or((run, ""));
    let mut command = cargo(tree, work);
    command.args(["test", "--release", "--no-run", "--quiet", "--message-format", "json"]);
    command.args(test.split(' ')).stderr(Stdio::null());
    let output = command.output().map_err(|e| format!("cargo: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let made = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = made.filter(|m| m["profile"]["test"] == true).find_map(|m| {
        let manifest = PathBuf::from(m["manifest_path"].as_str()?);
        let path = PathBuf::from(m["executable"].as_str()?);
        let units = if test.ends_with("--lib") { tests.units } else { "" };
        let own = own.split_whitespace().chain(units.split_whitespace());
        let arguments = own.map(String::from).collect();
        Some(Program { path, arguments, folder: manifest.parent()?.into(), ops: tests.ops })
    });
    program.ok_or_else(|| format!("cargo test {test} does not build with mutants"))
}

/// Whether a program's tests pass with a mutant; one that is not done in time does not.
fn passes(program: &Program, mutant: u32, limit: Duration) -> Result<bool, String> {
    // A mutant may ask for more memory than there is.
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -c 0; ulimit -v {MEMORY}; exec \"$0\" \"$@\"")]);
    command.arg(&program.path).args(&program.arguments).current_dir(&program.folder);
    command.env("GRADUS_MUTANT", mutant.to_string()).env("GRADUS_OPS", program.ops);
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    if std::env::var_os("GRADUS_PROGRAMS").is_none() {
        command.env("GRADUS_PROGRAMS", "2000");
    }
    command.stdout(Stdio::null()).stderr(Stdio::null());
    crate::limited::succeeds(&mut command, limit)
}

/// Runs the tests once without a mutant, then once with each; those they did not find.
fn survivors(tree: &Path, work: &Path, tried: &[Tried<'_>]) -> Result<HashSet<u32>, String> {
    let mut programs: BTreeMap<&str, Vec<(Program, Duration)>> = BTreeMap::new();
    for tests in tried.iter().map(|t| t.tests) {
        if programs.contains_key(tests.of) {
            continue;
        }
        let mut all = Vec::new();
        for run in tests.run {
            let program = build(tree, work, run, tests)?;
            let start = Instant::now();
            if !passes(&program, 0, Duration::from_secs(900))? {
                return Err(format!("cargo test {run} fails without a mutant"));
            }
            let took = start.elapsed();
            println!(
                "{:>6.1} s without a mutant: GRADUS_OPS={} {run}",
                took.as_secs_f64(),
                tests.ops
            );
            all.push((program, took * 5 + Duration::from_secs(5)));
        }
        programs.insert(tests.of, all);
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new((HashSet::new(), Ok(()))));
    let work = || {
        while let Some(t) = tried.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut all = programs[t.tests.of].iter().zip(t.tests.run);
            let found = all.try_fold("", |found, ((program, limit), run)| {
                let passes = !found.is_empty() || passes(program, t.mutant.id, *limit)?;
                Ok::<&str, String>(if passes { found } else { run })
            });
            let mut done = match done.lock() {
                Ok(done) => done,
                Err(poisoned) => poisoned.into_inner(),
            };
            match found {
                Ok("") => {
                    println!("SURVIVED {}", t.mutant.name);
                    done.0.insert(t.mutant.id);
                }
                Ok(by) => println!("caught   {} by {by}", t.mutant.name),
                Err(e) => done.1 = Err(e),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
    let (survived, result) = done.into_inner().map_err(|e| e.to_string())?;
    result.map(|()| survived)
}
