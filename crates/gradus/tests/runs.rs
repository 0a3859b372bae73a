//! `gradus runs` as its users meet it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use runs::{End, Evaluation, ModelFile, Planned, RunFolder, RunInfo, State, Step};
use serde_json::Value;

use common::{Folder, facts, fails, fixture, gradus, ok};

/// A folder of runs that goes when the test ends.
struct Runs(PathBuf);

impl Runs {
    fn new(name: &str) -> Runs {
        let path = std::env::temp_dir().join(format!("gradus-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Runs(path)
    }

    /// Records a run of this rank and so many steps.
    fn add(&self, name: &str, rank: u64, steps: u64) {
        let model = ModelFile { name: "toy".into(), ..ModelFile::default() };
        let settings = [("rank".to_string(), rank.into()), ("seed".into(), 0.into())].into();
        let info = RunInfo { settings, model, ..RunInfo::default() };
        let mut run = RunFolder::create(&self.0, name, info).unwrap();
        let memory = vec![("arena".to_string(), 1 << 20)];
        assert!(run.planned(Planned { steps: 9, parameters: 5, memory }).is_none());
        for step in 1..=steps {
            let step = Step {
                step,
                epoch: 1,
                loss: 6.0 / step as f64,
                grad_norm: 1.0,
                lr: 1e-3,
                tokens: 300,
                seconds: 0.5,
                memory_bytes: None,
            };
            assert!(run.step(&step).is_none());
        }
        let evaluation = Evaluation { step: steps, loss: 7.5 };
        assert!(run.evaluation(&evaluation).is_none());
        let message = Some("a bell\u{7} and\nmore".to_string());
        assert!(run.finish(End { state: State::Stopped, message, ..End::default() }).is_none());
    }

    fn run_with(&self, args: &[&str], input: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gradus"));
        command.arg("runs").args(args).arg("--run-dir").arg(&self.0).env_remove("COLUMNS");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let out = self.run_with(args, "");
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    fn fails(&self, args: &[&str], part: &str) {
        let out = self.run_with(args, "");
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(part), "{args:?}: {said}");
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn runs_are_listed_newest_first_and_damage_fails_nothing() {
    let runs = Runs::new("runs-list");
    assert_eq!(runs.ok(&[]), "");
    assert_eq!(runs.json(&[]), Value::Array(vec![]));
    runs.add("first", 8, 3);
    std::thread::sleep(std::time::Duration::from_millis(5));
    runs.add("second", 8, 2);
    std::fs::create_dir(runs.0.join("broken")).unwrap();
    let said = runs.ok(&[]);
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 4, "{said}");
    assert!(lines[1].starts_with("second") && lines[2].starts_with("first"), "{said}");
    for part in ["stopped", "toy", "3/9", "6.0000", "2.0000", "7.5000", "600.0"] {
        assert!(lines[2].contains(part), "no {part}: {said}");
    }
    assert!(lines[3].starts_with("broken  damaged: ") && lines[3].contains("run.json"), "{said}");
    let said = runs.json(&[]);
    assert_eq!(said[1]["name"], "first");
    assert_eq!((&said[1]["best_step"], &said[1]["steps_planned"]), (&3.into(), &9.into()));
    assert_eq!((&said[2]["name"], &said[2]["state"]), (&"broken".into(), &"damaged".into()));
}

#[test]
fn a_run_is_shown_with_its_curve_and_without_control_characters() {
    let runs = Runs::new("runs-show");
    runs.fails(&["show"], "no run");
    runs.add("a", 8, 6);
    let said = runs.ok(&["show"]);
    for part in ["a  stopped", "6.0000 █▄▂▂▁▁ 1.0000", "lowest 1.0000 in step 6", "rank"]
    {
        assert!(said.contains(part), "no {part}: {said}");
    }
    assert!(said.contains("a bell\u{fffd} and\u{fffd}more"), "{said}");
    let said = runs.json(&["show", "a"]);
    assert_eq!(said["record"]["settings"]["rank"], 8);
    assert_eq!(said["summary"]["tokens"], 1800);
    runs.fails(&["show", "b"], "no run is called `b`");
    runs.fails(&["show", "../a"], "no run is called");
}

#[test]
fn runs_are_compared_on_a_page_too() {
    let runs = Runs::new("runs-compare");
    runs.add("a", 8, 6);
    runs.add("b", 16, 4);
    let page = runs.0.join("both.html");
    let said = runs.ok(&["compare", "a", "b", "--html", page.to_str().unwrap()]);
    assert!(said.contains("rank") && !said.contains("seed"), "only what differs: {said}");
    assert!(said.contains("loss in step") && said.contains("1.5000"), "{said}");
    assert!(std::fs::read_to_string(&page).unwrap().contains("<svg"));
    let said = runs.json(&["compare", "a", "b"]);
    assert_eq!(said["differences"]["rank"], serde_json::json!([8, 16]));
    assert_eq!(said["losses"][3], serde_json::json!({"step": 4, "losses": [1.5, 1.5]}));
    runs.fails(&["compare", "a"], "2");
    runs.fails(&["compare", "a", "c"], "`c`");
}

#[test]
fn removing_asks() {
    let runs = Runs::new("runs-rm");
    runs.add("a", 8, 1);
    runs.add("b", 8, 1);
    let there = |name: &str| runs.0.join(name).exists();
    for answer in ["", "n\n", "\n"] {
        let out = runs.run_with(&["rm", "a"], answer);
        assert!(out.status.success() && there("a"), "{answer:?}");
        assert!(String::from_utf8(out.stderr).unwrap().contains("files"));
    }
    runs.fails(&["rm", "a", "c", "--yes"], "`c`");
    assert!(there("a"), "nothing goes where a name is wrong");
    let out = runs.run_with(&["rm", "a", "b"], "y\nn\n");
    assert!(out.status.success() && !there("a") && there("b"));
    assert_eq!(runs.json(&["rm", "b", "b", "--yes"])["removed"], serde_json::json!(["b"]));
    assert!(!there("b"));
}

/// A run of `gradus train` whose record is looked at.
struct Train {
    folder: Folder,
    model: String,
    data: String,
    out: String,
    runs: PathBuf,
}

impl Train {
    fn new(name: &str) -> Train {
        let folder = Folder::new(name);
        let data = folder.write("facts.jsonl", facts());
        let (out, runs) = (folder.file("a.gguf"), folder.0.join("runs"));
        Train { model: fixture("llama", "model.gguf"), data, out, runs, folder }
    }

    fn command(&self, epochs: &str, more: &[&str]) -> Command {
        let mut command = gradus(&["train", "-m", &self.model, "--data", &self.data]);
        command.args(["-o", &self.out, "--template", "plain", "--window", "64", "--json"]);
        command.args(["--epochs", epochs, "--run", "r"]).args(more).arg("--run-dir");
        command.arg(&self.runs).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Stops a run between two of its steps, with a checkpoint; returns what it said.
    #[cfg(unix)]
    fn stopped(&self, more: &[&str]) -> Value {
        let mut child = self.command("4000", more).spawn().unwrap();
        let lines = || {
            let run = std::fs::read_to_string(self.runs.join("r/metrics.jsonl"));
            run.map_or(0, |text| text.lines().count())
        };
        let before = lines();
        let began = std::time::Instant::now();
        while lines() < before + 3 {
            let ended = child.try_wait().unwrap().is_some();
            if ended || began.elapsed().as_secs() > 60 {
                child.kill().unwrap();
                let said = child.wait_with_output().unwrap().stderr;
                panic!("no step is recorded in `r`: {}", String::from_utf8_lossy(&said));
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let ended = child.wait_with_output().unwrap();
        serde_json::from_slice(&ended.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&ended.stderr)))
    }

    /// What `run.json` of a folder says.
    fn record(&self, name: &str) -> Value {
        let bytes = std::fs::read(self.runs.join(name).join("run.json")).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.runs).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

#[test]
fn a_record_has_every_setting_defaults_included() {
    let train = Train::new("runs-settings");
    let run = |name: &str, more: &[&str]| {
        let more = [&["--run", name][..], more].concat();
        let mut command = train.command("1", &[]);
        let args: Vec<_> = command.get_args().map(|a| a.to_os_string()).collect();
        // `--run` may be given once.
        let args = args.into_iter().filter(|a| a != "--run" && a != "r");
        command = gradus(&[]);
        let out = command.args(args).args(more).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        train.record(name)["settings"].clone()
    };
    let settings = run("plain", &[]);
    let expected = serde_json::json!({
        "template": "plain", "eval_split": 0, "dropout": 0.0, "recompute": "none", "lr": 1e-3,
        "memory_budget": null, "top_layers": null, "from": null, "rank": 8, "epochs": 1,
        "keep_best": false, "optimizer": "adamw", "checkpoint_every": 100,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&settings[name], value, "{name}: {settings}");
    }
    for name in ["loss_on", "fit", "layout", "targets", "patience", "grad_precision", "skip_bad"] {
        assert!(settings.get(name).is_some(), "no {name}: {settings}");
    }
    // What it came to, not what was typed.
    assert!(settings["targets"].as_array().unwrap().len() > 7, "{settings}");
    run("other", &["--recompute", "per-layer", "--top-layers", "1"]);
    let runs = train.runs.to_str().unwrap();
    let args = ["runs", "compare", "plain", "other", "--run-dir", runs, "--json"];
    let differences = &common::json(&args)["differences"];
    assert_eq!(differences["recompute"], serde_json::json!(["none", "per-layer"]));
    assert_eq!(differences["top_layers"], serde_json::json!([null, 1]));
    assert!(differences.get("lr").is_none() && differences.get("run").is_none(), "{differences}");
}

#[cfg(unix)]
#[test]
fn a_run_that_goes_on_says_of_which_step_its_first_loss_is() {
    let train = Train::new("runs-first");
    let before = train.stopped(&[]);
    assert_eq!(before["first_step"], 1);
    let after = train.stopped(&["--resume"]);
    let (from, steps) = (after["resumed_from"].as_u64().unwrap(), after["steps"].as_u64().unwrap());
    assert_eq!(
        (Some(from), after["first_step"].as_u64()),
        (before["steps"].as_u64(), Some(from + 1))
    );
    assert_eq!(train.names(), ["r"]);
    let run = runs::read(&train.runs.join("r")).unwrap();
    assert_eq!((run.history.steps, run.record.unrecorded), (steps, None));
    assert_eq!(run.record.resumed[0].step, from);
}

#[cfg(unix)]
#[test]
fn a_record_that_cannot_go_on_is_followed_by_another_that_says_why() {
    let train = Train::new("runs-damaged");
    let steps = train.stopped(&[])["steps"].as_u64().unwrap();
    let metrics = train.runs.join("r/metrics.jsonl");
    let whole = std::fs::read_to_string(&metrics).unwrap();
    std::fs::write(&metrics, format!("not a line\n{whole}")).unwrap();
    let mut child = train.command("4000", &["--resume"]).spawn().unwrap();
    let second = train.runs.join("r-2/metrics.jsonl");
    while !std::fs::read_to_string(&second).is_ok_and(|text| text.contains('\n')) {
        assert!(child.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    child.kill().unwrap();
    let said = child.wait_with_output().unwrap().stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("the run's record cannot go on: ") && said.contains("line 1"), "{said}");
    let record = train.record("r-2");
    assert_eq!(record["resumed"][0]["step"], steps);
    let why = record["unrecorded"].as_str().unwrap();
    assert!(why.contains(&format!("steps up to {steps}")) && why.contains("line 1"), "{why}");
    assert_eq!(std::fs::read_to_string(&metrics).unwrap(), format!("not a line\n{whole}"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_goes_on_in_a_folder_whose_name_is_no_text() {
    use std::os::unix::ffi::OsStrExt;
    let mut train = Train::new("runs-bytes");
    train.runs = train.folder.0.join(std::ffi::OsStr::from_bytes(b"r\xffuns"));
    train.stopped(&[]);
    train.stopped(&["--resume"]);
    assert_eq!(train.names(), ["r"]);
}

/// Nothing is left of a run whose checkpoints another has, nor of one that names no folder.
#[cfg(unix)]
#[test]
fn a_run_that_does_not_begin_leaves_no_folder() {
    let train = Train::new("runs-second");
    let mut child = train.command("4000", &[]).spawn().unwrap();
    while !train.runs.join("r/run.json").exists() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let second = train.command("4000", &[]).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(said.contains("another run writes its checkpoints"), "{said}");
    assert_eq!(train.names(), ["r"]);
}

/// A record that ends where a run went on would tell of another run.
#[cfg(unix)]
#[test]
fn a_run_that_goes_on_keeps_its_record() {
    let folder = Folder::new("keeps-record");
    let (model, data) = (fixture("llama", "model.gguf"), folder.write("facts.jsonl", facts()));
    let (out, runs) = (folder.file("a.gguf"), folder.file("runs"));
    let train = ["train", "-m", &model, "--data", &data, "-o", &out, "--template", "plain"];
    let train = [&train[..], &["--window", "64", "--epochs", "2000"]].concat();
    let started =
        common::Started::at(gradus(&train).args(["--run", "first", "--run-dir", &runs]), "step ");
    assert!(started.signal("-INT"));
    assert_eq!(started.end().status.code(), Some(130));
    let goes_on = [&train[..], &["--resume", "--no-record"]].concat();
    let record = folder.file("runs/first");
    fails(&goes_on, 1, &[&record, "`--no-record` would leave it ended at step"]);
    // Nobody misses what is gone.
    std::fs::remove_dir_all(&record).unwrap();
    ok(&goes_on);
}
