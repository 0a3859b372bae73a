//! `gradus train` as people have to rely on it: killed, out of disk, out of memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{Folder, facts, fails, fixture, gradus, json, ok};
use serde_json::Value;

/// A run that is killed at any moment and taken up again ends with the bytes of one that was not.
#[cfg(unix)]
#[test]
fn a_run_killed_at_any_moment_goes_on_to_the_same_bytes() {
    let folder = Folder::new("kill");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let start = |out: &str, every: &str| {
        let mut command = gradus(&["train", "-m", &model, "--data", &data, "-o", out]);
        command.args(["--template", "plain", "--window", "64", "--epochs", "300", "--json"]);
        command.args(["--checkpoint-every", every, "--eval-split", "0.3", "--resume"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null());
        command.spawn().unwrap()
    };
    let whole = folder.file("whole.gguf");
    let began = std::time::Instant::now();
    let child = start(&whole, "0").wait_with_output().unwrap();
    let took = began.elapsed();
    let steps = |out: &[u8]| -> u64 {
        serde_json::from_slice::<Value>(out).unwrap()["steps"].as_u64().unwrap()
    };
    assert!(steps(&child.stdout) >= 300, "too short to be stopped anywhere");
    let whole = std::fs::read(whole).unwrap();

    let out = folder.file("killed.gguf");
    let mut random = testkit::Random::new(7);
    let mut kills = 0;
    let said = loop {
        let mut child = start(&out, "1");
        // Twenty times, unless it comes to its end before.
        let part = random.below(1000) as f64 / 1000.0 * 0.3;
        if kills < 20 {
            std::thread::sleep(took.mul_f64(part));
        } else {
            child.wait().unwrap();
        }
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success());
            break child.wait_with_output().unwrap().stdout;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        // What is killed while it writes leaves no half adapter.
        assert!(!Path::new(&out).exists() || std::fs::read(&out).unwrap() == whole);
    };
    assert!(kills >= 4, "it was killed {kills} times only");
    let said: Value = serde_json::from_slice(&said).unwrap();
    assert!(said["resumed_from"].as_u64() > Some(0), "{said}");
    println!("{kills} kills; the last went on from step {}", said["resumed_from"]);
    assert!(std::fs::read(&out).unwrap() == whole, "after {kills} kills it ends elsewhere");
    assert!(!Path::new(&format!("{out}.checkpoints")).exists());
}

/// Checkpoints that cannot be written end the run, and the last good one goes on.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_last_checkpoint_whole() {
    let folder = Folder::new("full");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    let args = |out: &str| -> Vec<String> {
        let args = ["train", "-m", &model, "--data", &data, "-o", out, "--template", "plain"];
        let more = ["--window", "64", "--epochs", "10", "--checkpoint-every", "3", "--resume"];
        args.iter().chain(&more).map(|a| a.to_string()).collect()
    };
    let text = |args: &[String]| args.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
    let whole = folder.file("whole.gguf");
    let words = args(&whole);
    ok(&words.iter().map(String::as_str).collect::<Vec<_>>());

    // No file may grow beyond this many blocks of 1 KiB: a checkpoint is larger.
    let shell = |limit: &str| {
        let binary = env!("CARGO_BIN_EXE_gradus");
        let script = format!("trap '' XFSZ; {limit} exec {binary} {}", text(&args(&out)));
        Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).output().unwrap()
    };
    let refused = shell("ulimit -f 4;");
    let said = String::from_utf8_lossy(&refused.stderr).to_string();
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("cannot write") && said.contains("step-00000003"), "{said}");
    assert!(!Path::new(&out).exists());

    // With a good one there already: that one is as it was, and the run goes on from it.
    let mut child = Command::new("bash")
        .args(["-c", &format!("exec {} {}", env!("CARGO_BIN_EXE_gradus"), text(&args(&out)))])
        .stderr(Stdio::piped())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let first = format!("{out}.checkpoints/step-00000003.safetensors");
    while !Path::new(&first).exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let kept = |folder: &str| -> Vec<(std::ffi::OsString, Vec<u8>)> {
        let files = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
        let mut files: Vec<_> =
            files.map(|f| (f.file_name(), std::fs::read(f.path()).unwrap())).collect();
        files.retain(|f| f.0.to_string_lossy().ends_with(".safetensors"));
        files.sort();
        files
    };
    let before = kept(&format!("{out}.checkpoints"));
    assert!(!before.is_empty());
    assert_eq!(shell("ulimit -f 4;").status.code(), Some(3));
    assert!(kept(&format!("{out}.checkpoints")) == before, "a good checkpoint was harmed");

    // Data that have gone, or are others.
    std::fs::rename(&data, folder.file("gone")).unwrap();
    fails(&text(&args(&out)).split(' ').collect::<Vec<_>>(), 1, &["facts.jsonl"]);
    std::fs::write(&data, facts().replace("cat", "dog")).unwrap();
    fails(&text(&args(&out)).split(' ').collect::<Vec<_>>(), 1, &["other data"]);
    assert!(kept(&format!("{out}.checkpoints")) == before, "a good checkpoint was harmed");
    std::fs::rename(folder.file("gone"), &data).unwrap();

    assert!(shell("").status.success());
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap());
}

/// A run that does not fit says what would, and that does.
#[test]
fn a_run_that_does_not_fit_names_settings_that_do() {
    let folder = Folder::new("fit");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    let run = |extra: &[&str]| -> Vec<String> {
        let args = ["train", "-m", &model, "--data", &data, "-o", &out, "--template", "plain"];
        args.iter().chain(extra).map(|a| a.to_string()).collect()
    };
    let big = run(&["--window", "2048", "--memory-budget", "8", "--epochs", "1"]);
    let big: Vec<&str> = big.iter().map(String::as_str).collect();
    let said = fails(&big, 2, &["the run needs", "may be taken", "--recompute per-layer --window"]);
    assert!(!Path::new(&out).exists());
    let nearest = said.split('`').find(|part| part.starts_with("--recompute")).unwrap();
    let mut fitting = run(&["--memory-budget", "8", "--epochs", "1"]);
    fitting.extend(nearest.split(' ').map(String::from));
    ok(&fitting.iter().map(String::as_str).collect::<Vec<_>>());
    // What is longer than the window that fits is walked in chunks, not cut.
    let hybrid = folder.file("hybrid.gguf");
    ok(&["make-toy", "qwen35", "-o", &hybrid]);
    let long =
        folder.write("long.txt.jsonl", format!("{{\"text\": \"{}\"}}\n", "word ".repeat(400)));
    let args = |extra: &[&str]| -> Vec<String> {
        let args = ["train", "-m", &hybrid, "--data", &long, "-o", &out];
        args.iter().chain(extra).map(|a| a.to_string()).collect()
    };
    let budget = ["--memory-budget", "16", "--epochs", "1"];
    let big = args(&[&["--window", "2048"][..], &budget].concat());
    let big: Vec<&str> = big.iter().map(String::as_str).collect();
    let said = fails(&big, 2, &["--recompute per-layer --window 2048 --chunk "]);
    let nearest = said.split('`').find(|part| part.starts_with("--recompute")).unwrap();
    let mut fitting = args(&budget);
    fitting.extend(nearest.split(' ').map(String::from));
    ok(&fitting.iter().map(String::as_str).collect::<Vec<_>>());
    // Also beside the copy that checkpoints are written from.
    let mut named = 0;
    for budget in ["4", "5", "6", "7", "8", "9", "10"] {
        let wide = ["--rank", "64", "--checkpoint-every", "1", "--epochs", "1"];
        let mut args = run(&[&wide[..], &["--memory-budget", budget]].concat());
        let big = [&args[..], &["--window".into(), "2048".into()]].concat();
        let out = gradus(&big.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        if let Some(nearest) = said.split('`').find(|part| part.starts_with("--recompute")) {
            args.extend(nearest.split(' ').map(String::from));
            ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
            named += 1;
        }
    }
    assert!(named >= 4, "{named} budgets had settings that fit");
    // By itself it recomputes where that is enough.
    let plan = |extra: &[&str]| {
        let args = [&["--window", "256", "--dry-run", "--json"], extra].concat();
        json(&run(&args).iter().map(String::as_str).collect::<Vec<_>>())
    };
    let free = plan(&[]);
    assert_eq!(free["recompute"], "None");
    let needs = |plan: &Value| {
        let parts = ["arena_bytes", "scratch_bytes", "parameters_bytes"];
        parts.iter().map(|p| plan["plan"][p].as_u64().unwrap()).sum::<u64>()
    };
    let tight = (needs(&free) - 1) >> 20;
    let recomputed = plan(&["--memory-budget", &tight.to_string()]);
    assert_eq!(recomputed["recompute"], "PerLayer");
    assert!(needs(&recomputed) <= tight << 20);
}
