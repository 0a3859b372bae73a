//! `gradus runs` as its users meet it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use runs::{End, Evaluation, ModelFile, Planned, RunFolder, RunInfo, State, Step};
use serde_json::Value;

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
        let evaluation = Evaluation { step: steps, loss: 7.5, accuracy: Some(0.25) };
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
    for part in ["a  stopped", "6.0000 █▄▂▂▁▁ 1.0000", "lowest 1.0000 in step 6", "25.0 %", "rank"]
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
    assert_eq!(runs.json(&["rm", "b", "--yes"])["removed"][0], "b");
    assert!(!there("b"));
}
