//! `gradus train` as people have to rely on it: killed, out of disk, out of memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{Folder, Started, facts, fails, fixture, gradus, json, ok, text};
use serde_json::Value;

/// A run that is killed at any moment and taken up again ends with the bytes of one that was not.
#[cfg(unix)]
#[test]
fn a_run_killed_at_any_moment_goes_on_to_the_same_bytes() {
    killed_often(&fixture("llama", "model.gguf"), "300", &["--window", "64"]);
}

/// The same of windows that are walked, with what is dropped drawn anew in each step, a sum of
/// gradients begun, and the best parameters kept beside the last.
#[cfg(unix)]
#[test]
fn a_run_of_walks_killed_at_any_moment_goes_on_to_the_same_bytes() {
    let more = ["--window", "64", "--chunk", "16", "--dropout", "0.1", "--accumulate", "2"];
    let kept = ["--keep-best", "--eval-every", "7"];
    killed_often(&fixture("qwen3_5_moe", "model.gguf"), "60", &[&more[..], &kept].concat());
}

/// Twenty kills at random moments of a run.
#[cfg(unix)]
fn killed_often(model: &str, epochs: &str, settings: &[&str]) {
    let folder = Folder::new(&format!("kill-{epochs}"));
    let data = folder.write("facts.jsonl", facts());
    let start = |out: &str, every: &str| {
        let mut command = gradus(&["train", "-m", model, "--data", &data, "-o", out, "--json"]);
        command.args(["--template", "plain", "--epochs", epochs]).args(settings);
        command.args(["--checkpoint-every", every, "--eval-split", "0.3", "--resume"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null());
        command.spawn().unwrap()
    };
    let whole = folder.file("whole.gguf");
    let began = std::time::Instant::now();
    let child = start(&whole, "0").wait_with_output().unwrap();
    let took = began.elapsed();
    let said = |out: &[u8]| -> Value { serde_json::from_slice(out).unwrap() };
    let steps = said(&child.stdout)["steps"].as_u64().unwrap();
    assert!(steps >= 60, "{steps} steps are too few to be stopped anywhere");
    let whole = std::fs::read(whole).unwrap();

    let out = folder.file("killed.gguf");
    let mut random = testkit::Random::new(7);
    let (mut kills, mut between) = (0, 0);
    while kills < 20 {
        let mut child = start(&out, "1");
        // Some get a step or two further, others not to their first.
        std::thread::sleep(took.mul_f64(random.below(1000) as f64 / 1000.0 * 0.15));
        let ended = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // What is killed while it writes leaves no half adapter.
        assert!(!Path::new(&out).exists() || std::fs::read(&out).unwrap() == whole);
        match ended {
            None => kills += 1,
            // It came to its end: once more from the beginning.
            Some(status) => {
                assert!(status.success());
                std::fs::remove_file(&out).unwrap();
            }
        }
        between += usize::from(Path::new(&format!("{out}.checkpoints")).exists());
    }
    assert!(between >= 10, "{between} of 20 kills left a checkpoint");
    let child = start(&out, "1").wait_with_output().unwrap();
    let said = said(&child.stdout);
    println!("{kills} kills; the last went on from step {}", said["resumed_from"]);
    assert!(std::fs::read(&out).unwrap() == whole, "after {kills} kills it ends elsewhere");
    assert!(!Path::new(&format!("{out}.checkpoints")).exists());
}

/// What is read is never written over, nor is what no adapter is; and a folder that takes no file
/// is told before the first step.
#[test]
fn what_is_read_stays() {
    let folder = Folder::new("reads");
    let model = folder.write("model.gguf", std::fs::read(fixture("llama", "model.gguf")).unwrap());
    let data = folder.write("facts.jsonl", facts());
    let other = folder.write("notes.txt", "mine");
    let before = [&model, &data, &other].map(|file| std::fs::read(file).unwrap());
    let adapter = folder.file("a.gguf");
    let new = folder.file("new.gguf");
    let args = |more: &[&str]| -> Vec<String> {
        let args = ["train", "-m", &model, "--data", &data, "--template", "plain", "--window"];
        args.iter().chain(&["64", "--epochs", "1"]).chain(more).map(|a| a.to_string()).collect()
    };
    let refused = |more: &[&str], parts: &[&str]| {
        let args = args(more);
        fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 1, parts);
    };
    let weights = ["--targets", "none", "--train-weights", "norm"];
    for read in [&model, &data] {
        refused(&["-o", read], &[read, "is what is read"]);
        refused(&[&weights[..], &["--out-model", read]].concat(), &[read, "is what is read"]);
    }
    refused(&["-o", &adapter, "--eval-data", &other], &["notes.txt"]);
    refused(&["-o", &other, "--eval-data", &other], &[&other, "is what is read"]);
    refused(&["-o", &other], &[&other, "is there already and no adapter"]);
    let twice = ["-o", &new, "--train-weights", "norm", "--out-model", &new];
    refused(&twice, &["is to be written twice"]);
    if cfg!(target_os = "linux") {
        refused(&["-o", "/proc/a.gguf"], &["the folder takes no new file"]);
        let elsewhere = ["-o", &adapter, "--checkpoints", "/proc/kept"];
        refused(&elsewhere, &["cannot write to the folder /proc/kept"]);
    }
    let train = args(&["-o", &adapter]);
    ok(&train.iter().map(String::as_str).collect::<Vec<_>>());
    // An adapter may be written again, but not over what it is merged into or made from.
    ok(&train.iter().map(String::as_str).collect::<Vec<_>>());
    let merge = ["merge", "-m", &model, "--adapter", &adapter, "--type", "f32", "-o"];
    fails(&[&merge[..], &[&model]].concat(), 1, &["is the model itself"]);
    fails(&[&merge[..], &[&adapter]].concat(), 1, &["is what is read"]);
    let peft = folder.file("peft");
    ok(&["adapter", "convert", "-m", &model, &adapter, &peft]);
    let back = ["adapter", "convert", "-m", &model, &peft];
    fails(&[&back[..], &[&model]].concat(), 1, &["is there already and no adapter"]);
    ok(&[&back[..], &[&adapter]].concat());
    // So does the adapter that is taught more.
    let taught = std::fs::read(&adapter).unwrap();
    refused(&["-o", &adapter, "--from", &adapter], &[&adapter, "is what is read"]);
    let inside = format!("{peft}/adapter_model.safetensors");
    refused(&["-o", &inside, "--from", &peft], &[&inside, "is what is read"]);
    assert!(std::fs::read(&adapter).unwrap() == taught);
    let after = [&model, &data, &other].map(|file| std::fs::read(file).unwrap());
    assert!(before == after);
}

/// A step that is not finite ends the run; the adapter of the last checkpoint before what led to it
/// is kept, and trained on.
#[test]
fn the_last_good_adapter_is_kept_and_trained_on() {
    let folder = Folder::new("last-good");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    let train = |more: &[&str]| -> Vec<String> {
        let args = ["train", "-m", &model, "--data", &data, "--template", "plain", "--window"];
        args.iter().chain(&["256", "--no-record"]).chain(more).map(|a| a.to_string()).collect()
    };
    let last_good = folder.file("a.last-good.gguf");
    let wild = ["-o", &out, "--lr", "1", "--clip", "0", "--warmup", "0", "--alpha", "256"];
    let wild = [&wild[..], &["--rank", "3", "--targets", "attn", "--epochs", "100"]].concat();
    let parts = ["step ", " at `", "is in ", &last_good, "`--from` trains on from it"];
    let step = |every: &str| -> [u64; 2] {
        let args = train(&[&wild[..], &["--checkpoint-every", every]].concat());
        let said = fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 3, &parts);
        let after = |word: &str| said.split_once(word).unwrap().1.to_string();
        let number = |text: String| {
            let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap()
        };
        [number(after("error: step ")), number(after("as it was after step "))]
    };
    // Without one, what the last whole step came to.
    let [failed, kept] = step("0");
    assert_eq!(kept, failed - 1);
    assert_eq!(step("1"), [failed, failed - 2]);
    assert!(!Path::new(&out).exists());
    let show = json(&["adapter", "show", &last_good, "--json"]);
    assert_eq!(show["targets"][0]["rank"], 3);

    // A run that goes on from it and fails too leaves it as it is.
    let good = std::fs::read(&last_good).unwrap();
    let again = ["-o", &out, "--from", &last_good, "--lr", "1", "--clip", "0", "--warmup", "0"];
    let again = train(&[&again[..], &["--epochs", "100", "--checkpoint-every", "0"]].concat());
    let second = folder.file("a.last-good-2.gguf");
    fails(&again.iter().map(String::as_str).collect::<Vec<_>>(), 3, &["is in ", &second]);
    assert!(std::fs::read(&last_good).unwrap() == good);
    ok(&["adapter", "show", &second]);

    // What it adapts stays.
    let calm = ["-o", &out, "--from", &last_good, "--lr", "1e-5", "--epochs", "1", "--json"];
    let said = json(&train(&calm).iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(said["targets"], show["targets"].as_array().unwrap().len());
    let more = json(&["adapter", "show", &out, "--json"]);
    assert_eq!(more["targets"][0]["rank"], 3);
    assert_eq!(more["targets"][0]["alpha"], 256.0);
    let other = train(&["-o", &out, "--from", &last_good, "--rank", "4"]);
    fails(&other.iter().map(String::as_str).collect::<Vec<_>>(), 1, &["--from", "--rank"]);
}

/// What cannot be written at the end is written elsewhere.
#[cfg(unix)]
#[test]
fn an_adapter_whose_folder_went_away_is_written_elsewhere() {
    let folder = Folder::new("away");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let place = folder.file("place");
    std::fs::create_dir(&place).unwrap();
    let (out, kept) = (format!("{place}/a.gguf"), folder.file("kept"));
    let mut command = gradus(&["train", "-m", &model, "--data", &data, "-o", &out, "--window"]);
    command.args(["64", "--template", "plain", "--epochs", "200", "--checkpoints", &kept]);
    command.args(["--checkpoint-every", "1"]).env("TMPDIR", folder.file(""));
    command.stderr(Stdio::piped()).stdout(Stdio::null()).stdin(Stdio::null());
    let mut child = command.spawn().unwrap();
    while !Path::new(&kept).exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    std::fs::rename(&place, folder.file("moved")).unwrap();
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && said.contains("cannot"), "{said}");
    let (_, rest) = said.split_once("the adapter is in ").expect("another place");
    let instead = rest.split_once(" instead").unwrap().0;
    ok(&["adapter", "show", instead]);
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

/// Where no checkpoint can be written, what was learned is: every so many steps, and where the run is
/// stopped.
#[cfg(unix)]
#[test]
fn what_was_learned_is_written_where_no_checkpoint_can_be() {
    let folder = Folder::new("unkept");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let (whole, runs) = (folder.file("whole.gguf"), folder.file("runs"));
    let args = |out: &str, more: &str| {
        format!(
            "train -m {model} --data {data} -o {out} --template plain --window 64 --run-dir {runs} \
             --train-weights norm --out-model {out}.model {more}"
        )
    };
    let rank = "--rank 1024 --targets blk.0.attn_q";
    ok(&args(&whole, &format!("{rank} --epochs 1")).split(' ').collect::<Vec<_>>());
    // Files may be as large as what is written at the end; a checkpoint has the moments too.
    let largest = [whole.clone(), format!("{whole}.model")]
        .map(|file| std::fs::metadata(file).unwrap().len())
        .into_iter()
        .max();
    let blocks = largest.unwrap().div_ceil(1024);
    let shell = |args: &str| {
        let binary = env!("CARGO_BIN_EXE_gradus");
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec {binary} {args}");
        let mut command = Command::new("bash");
        command.args(["-c", &script]).env("GRADUS_HOME", folder.file("home"));
        command
    };
    let check = |out: &str, name: &str, output: std::process::Output| {
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        let error = said.lines().last().unwrap();
        assert!(error.starts_with("error: cannot write ") && error.contains("/step-"), "{said}");
        assert!(error.contains("there is no checkpoint to go on from"), "{said}");
        for (what, file) in [("adapter", out.to_string()), ("model", format!("{out}.model"))] {
            let parts = [format!("the {what} as it is after step "), format!(" is in {file}")];
            assert!(parts.iter().all(|part| error.contains(part)), "{said}");
            assert!(Path::new(&file).exists());
        }
        ok(&["adapter", "show", out]);
        let run = std::fs::read(Path::new(&runs).join(name).join("run.json")).unwrap();
        let run: Value = serde_json::from_slice(&run).unwrap();
        assert_eq!(run["state"], "failed");
    };
    let out = folder.file("every.gguf");
    let every = format!("{rank} --epochs 10 --checkpoint-every 3 --run every");
    check(&out, "every", shell(&args(&out, &every)).output().unwrap());
    let out = folder.file("stopped.gguf");
    let stopped = format!("{rank} --epochs 10000 --checkpoint-every 0 --run stopped");
    let started = Started::at(&mut shell(&args(&out, &stopped)), "step ");
    assert!(started.signal("-INT"));
    check(&out, "stopped", started.end());
}

/// A run that is stopped before all that it trains has moved is stopped, not failed.
#[cfg(unix)]
#[test]
fn a_run_interrupted_in_its_warm_up_is_interrupted() {
    let folder = Folder::new("warm-up");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let (out, runs) = (folder.file("m.gguf"), folder.file("runs"));
    let args = |epochs: &str, warmup: &str, more: &[&str]| {
        let mut command = gradus(&["train", "-m", &model, "--data", &data, "--out-model", &out]);
        command.args(["--targets", "none", "--train-weights", "norm", "--epochs", epochs]);
        command.args(["--warmup", warmup, "--template", "plain", "--window", "64"]).args(more);
        command
    };
    // Too small a step to change a value.
    let mut command = args("10000", "100000000", &["--run-dir", &runs, "--run", "early"]);
    let started = Started::at(&mut command, "step ");
    assert!(started.signal("-INT"));
    let output = started.end();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    assert!(said.contains("`--resume` goes on from ") && said.contains(&out), "{said}");
    assert!(Path::new(&out).exists());
    let run = std::fs::read(Path::new(&runs).join("early/run.json")).unwrap();
    let run: Value = serde_json::from_slice(&run).unwrap();
    assert_eq!((&run["state"], &run["message"]), (&"interrupted".into(), &Value::Null), "{run}");
    assert_eq!(run["moved"][0], 0, "{run}");
    // At its end a run is judged.
    let ended = args("3", "100000000", &["--no-record"]).output().unwrap();
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(3), "{said}");
    assert!(said.contains("have not moved"), "{said}");
}

/// A run that does not fit says what would, and that does.
#[test]
fn a_run_that_does_not_fit_names_settings_that_do() {
    let folder = Folder::new("fit");
    let model = fixture("llama", "model.gguf");
    // Together more than the longest window.
    let many = (0..60).map(|i| facts().replace("the cat", &format!("the cat {i}")) + "\n");
    let data = folder.write("facts.jsonl", many.collect::<String>());
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
    // The plan says the same, part by part.
    let mut planned = big.clone();
    planned.extend(["--dry-run", "--json"]);
    let ended = gradus(&planned).output().unwrap();
    let plan: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!(
        (ended.status.code(), &plan["trains"], &plan["fits"]),
        (Some(2), &true.into(), &false.into())
    );
    assert!(plan["why"].as_str().unwrap().contains(nearest), "{plan}");
    assert!(plan["plan"]["arena_bytes"].as_u64() > Some(8 << 20), "{plan}");
    // So it does of what is refused.
    let quantized = folder.file("quantized.gguf");
    ok(&["make-toy", "llama", "--format", "q4_0", "-o", &quantized]);
    let refused = ["train", "-m", &quantized, "--data", &data, "--template", "plain", "--json"];
    let weights = ["--targets", "none", "--train-weights", "all", "--dry-run"];
    let refused = [&refused[..], &weights].concat();
    let ended = gradus(&refused).output().unwrap();
    let plan: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert_eq!((ended.status.code(), &plan["trains"]), (Some(2), &false.into()));
    assert!(plan["why"].as_str().unwrap().contains("quantized weight"), "{plan}");
    // What is longer than the window that fits is walked in chunks, not cut.
    let hybrid = folder.file("hybrid.gguf");
    ok(&["make-toy", "qwen35", "-o", &hybrid]);
    let long =
        folder.write("long.txt.jsonl", format!("{{\"text\": \"{}\"}}\n", "word ".repeat(240)));
    let args = |extra: &[&str]| -> Vec<String> {
        let args = ["train", "-m", &hybrid, "--data", &long, "-o", &out];
        args.iter().chain(extra).map(|a| a.to_string()).collect()
    };
    let budget = ["--memory-budget", "12", "--epochs", "1"];
    let big = args(&[&["--window", "2048"][..], &budget].concat());
    let big: Vec<&str> = big.iter().map(String::as_str).collect();
    let said = fails(&big, 2, &["--recompute per-layer --window 960 --chunk "]);
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
    // Also where a shorter window is all that fits: conversations are shortened, texts cut, and
    // answers stay whole.
    let chat = |prompt: usize, answer: usize| {
        let words = |n: usize| "word ".repeat(n);
        serde_json::json!({ "prompt": words(prompt), "completion": words(answer) }).to_string()
    };
    let texts = serde_json::json!({ "text": "word ".repeat(60) }).to_string();
    let rows: [(&str, String); 4] = [
        (" --fit left", [chat(40, 2), chat(60, 3), chat(2, 1)].join("\n")),
        ("none", [chat(40, 2), chat(2, 45), chat(50, 1)].join("\n")),
        ("none", [chat(40, 2), chat(50, 1), chat(1, 45)].join("\n")),
        ("", [texts.clone(), texts.clone(), texts].join("\n")),
    ];
    for (expected, rows) in rows {
        let data = folder.write("rows.jsonl", rows);
        let args = |extra: &[&str]| -> Vec<String> {
            let args = ["train", "-m", &hybrid, "--data", &data, "--template", "plain", "-o", &out];
            let same = ["--epochs", "1", "--rank", "1", "--eval-split", "0.3"];
            let same = [&same[..], &["--targets", "attn_q", "--no-record"]].concat();
            args.iter().chain(&same).chain(extra).map(|a| a.to_string()).collect()
        };
        let mut seen = 0;
        for budget in ["1", "2", "3"] {
            let mut args = args(&["--memory-budget", budget]);
            let big = [&args[..], &["--window".into(), "512".into()]].concat();
            let ended =
                gradus(&big.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            if ended.status.success() {
                continue;
            }
            match said.split('`').find(|part| part.starts_with("--recompute")) {
                Some(nearest) => {
                    seen +=
                        usize::from(!nearest.contains("--chunk") && nearest.ends_with(expected));
                    args.extend(nearest.split(' ').map(String::from));
                    ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
                }
                None => {
                    assert!(said.contains("no window"), "{said}");
                    seen += usize::from(expected == "none" && said.contains("holds the answers"));
                }
            }
        }
        println!("`{expected}`: {seen}");
        assert!(seen > 0, "no budget gave `{expected}`");
    }
    // No window is longer than all that there is.
    let few = folder.write("few.jsonl", facts());
    let planned = |window: &str| {
        let args = ["train", "-m", &model, "--data", &few, "--template", "plain", "--window"];
        json(&[&args[..], &[window, "--dry-run", "--json"]].concat())["plan"]["arena_bytes"].clone()
    };
    assert_eq!(planned("2048"), planned("128"));
    // By itself it recomputes where that is enough.
    let plan = |extra: &[&str]| {
        let args = [&["--window", "256", "--dry-run", "--json"], extra].concat();
        json(&run(&args).iter().map(String::as_str).collect::<Vec<_>>())
    };
    let free = plan(&[]);
    assert_eq!(free["recompute"], "none");
    let needs = |plan: &Value| {
        let parts = ["arena_bytes", "scratch_bytes", "parameters_bytes"];
        parts.iter().map(|p| plan["plan"][p].as_u64().unwrap()).sum::<u64>()
    };
    let tight = (needs(&free) - 1) >> 20;
    let recomputed = plan(&["--memory-budget", &tight.to_string()]);
    assert_eq!(recomputed["recompute"], "per-layer");
    assert!(needs(&recomputed) <= tight << 20);
}

/// A run that begins anew leaves the checkpoints of an earlier one where they can be found, and keeps
/// its own; two runs do not share a folder.
#[cfg(unix)]
#[test]
fn checkpoints_of_two_runs_are_kept_apart() {
    let folder = Folder::new("apart");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    let kept = format!("{out}.checkpoints");
    let start = |seed: &str, more: &[&str]| {
        let mut command = gradus(&["train", "-m", &model, "--data", &data, "-o", &out, "--seed"]);
        command
            .args([seed, "--template", "plain", "--window", "64", "--epochs", "4000"])
            .args(more);
        command.args(["--checkpoint-every", "5", "--no-record"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).stdin(Stdio::null());
        command.spawn().unwrap()
    };
    let steps = |folder: &str| -> Vec<u64> {
        let files = std::fs::read_dir(folder).into_iter().flatten();
        let name = |f: std::io::Result<std::fs::DirEntry>| f.unwrap().file_name();
        let step = |name: std::ffi::OsString| {
            name.to_str()?.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok()
        };
        files.map(name).filter_map(step).collect()
    };
    let until = |reached: u64| {
        while steps(&kept).iter().max() < Some(&reached) {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    };
    let mut child = start("1", &[]);
    until(60);
    // Another in the same folder.
    let second = start("2", &[]).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        !second.status.success() && said.contains("another run writes its checkpoints"),
        "{said}"
    );
    child.kill().unwrap();
    child.wait().unwrap();
    let earlier = steps(&kept);
    assert!(earlier.iter().all(|&step| step >= 55), "{earlier:?}");

    let mut child = start("2", &[]);
    while !steps(&kept).iter().any(|step| *step < 55) {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    child.kill().unwrap();
    let said = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let old = format!("{kept}.old");
    assert!(said.contains(&old), "{said}");
    let mut left = steps(&old);
    left.sort();
    let mut earlier = earlier;
    earlier.sort();
    assert_eq!(left, earlier);
    // Its own go on.
    let goes_on = ["--resume", "--epochs", "4000"];
    let mut child = start("2", &goes_on[..1]);
    let from = *steps(&kept).iter().max().unwrap();
    until(from + 5);
    child.kill().unwrap();
    let said = child.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&said.stderr).contains("going on from step"));
}

/// A folder of checkpoints may have other things in it, which stay.
#[test]
fn what_else_is_in_a_folder_of_checkpoints_stays() {
    let folder = Folder::new("shared-folder");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let names = ["run", "lock", ".tmpABC", "notes.txt"];
    names.iter().for_each(|name| drop(folder.write(name, name)));
    let out = folder.file("a.gguf");
    let train = ["train", "-m", &model, "--data", &data, "-o", &out, "--template", "plain"];
    let here = ["--window", "64", "--checkpoint-every", "1", "--checkpoints", "."];
    let args = [&train[..], &here].concat();
    let ended = gradus(&args).current_dir(folder.file("")).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let mut left: Vec<_> =
        std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".tmpABC", "a.gguf", "facts.jsonl", "lock", "notes.txt", "run"]);
    for name in names {
        assert_eq!(std::fs::read_to_string(folder.file(name)).unwrap(), name);
    }
    // What is called like a checkpoint of ours is not taken for one.
    let foreign = folder.write("step-00000001.safetensors", "theirs");
    let ended = gradus(&args).current_dir(folder.file("")).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("is called like a checkpoint and is none"), "{said}");
    assert_eq!(std::fs::read_to_string(foreign).unwrap(), "theirs");
}

/// A run that is interrupted before its first step is no failed one, and leaves nothing.
#[cfg(unix)]
#[test]
fn a_run_interrupted_before_its_first_step_is_interrupted() {
    let folder = Folder::new("early");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    // What is held out is measured first, which takes a while.
    let line = |i: usize| facts().replace("the cat", &format!("the cat {i}")) + "\n";
    let held_out = folder.write("held-out.jsonl", (0..2000).map(line).collect::<String>());
    let (out, runs) = (folder.file("a.gguf"), folder.file("runs"));
    let mut command = gradus(&["train", "-m", &model, "--data", &data, "-o", &out]);
    command.args(["--template", "plain", "--window", "64", "--eval-data", &held_out]);
    command.args(["--run", "early", "--run-dir", &runs]);
    let started = Started::at(&mut command, "training ");
    assert!(started.signal("-INT"));
    let output = started.end();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(130), 0));
    let run = std::fs::read(Path::new(&runs).join("early/run.json")).unwrap();
    let run: Value = serde_json::from_slice(&run).unwrap();
    assert_eq!((&run["state"], &run["message"]), (&"interrupted".into(), &Value::Null), "{run}");
    for left in [&out, &format!("{out}.checkpoints")] {
        assert!(!Path::new(left).exists(), "{left}");
    }
}

/// P4: what is written down of a run that is stopped before its first checkpoint takes no memory
/// beside what was planned: what else the run held is given back for it.
#[cfg(target_os = "linux")]
#[test]
fn a_run_stopped_before_its_first_checkpoint_takes_the_memory_that_was_planned() {
    let folder = Folder::new("stopped-memory");
    let mut toy = model::toy::Toy::new("llama", gguf::TensorType::F32, 3);
    (toy.width, toy.ffn) = (256, 2048);
    let model = folder.write("toy.gguf", toy.gguf().unwrap());
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    let mut command = gradus(&["train", "-m", &model, "--data", &data, "-o", &out, "--json"]);
    command.args(["--template", "plain", "--window", "64", "--epochs", "10000"]);
    command.args(["--rank", "512", "--checkpoint-every", "0", "--no-record", "-t", "1"]);
    let started = Started::at(&mut command, "step ");
    assert!(started.signal("-INT"));
    let output = started.end();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(Path::new(said["checkpoint"].as_str().unwrap()).exists());
    let bytes = |value: &Value| value.as_f64().unwrap();
    let (peak, plan) = (bytes(&said["peak_anonymous_bytes"]), bytes(&said["plan"]["total_bytes"]));
    // The least that a copy of what moves, and of its moments, would be.
    let moves = 4.0 * bytes(&said["parameters"]);
    assert!(moves > 0.1 * plan, "{moves} bytes of {plan} are too few to be seen");
    assert!(peak < 1.05 * plan, "{peak} bytes at the peak, {plan} were planned");
}

/// Options that were taken for something else.
#[test]
fn odd_options_are_refused_or_mean_what_they_say() {
    let folder = Folder::new("odd");
    let model = fixture("llama", "model.gguf");
    let ten = (0..10).map(|i| facts().lines().next().unwrap().replace("cat", &format!("cat {i}")));
    let data = folder.write("ten.jsonl", ten.collect::<Vec<_>>().join("\n"));
    let plan = ["plan", "-m", &model, "--data", &data, "--template", "plain", "--window", "64"];
    let refused = |more: &[&str], part: &str| drop(fails(&[&plan[..], more].concat(), 1, &[part]));
    refused(&["--targets", "attn_q,"], "an empty name among the targets");
    refused(&["--rank-of", "=4"], "`--rank-of =4`: expected NAME=RANK");
    let weights = ["--targets", "none", "--train-weights", "norm,"];
    refused(&weights, "an empty name among the weights");
    let most = "expected at most 17592186044415";
    refused(&["--memory-budget", "17592186044417"], most);
    refused(&["--chunk", "16", "--walk-host-budget", "17592186044417"], most);
    let planned = |more: &[&str]| json(&[&plan[..], &["--json"], more].concat());
    for (part, held_out) in [("0.8", 8), ("0.2", 2), ("0.1", 1), ("0.85", 9), ("0.9", 9)] {
        let said = planned(&["--eval-split", part]);
        assert_eq!(
            (&said["conversations"], &said["held_out"]),
            (&(10 - held_out).into(), &held_out.into())
        );
    }
    refused(&["--eval-split", "0.95"], "leaves none to train on");
    for out in [folder.file(""), folder.file("peft/")] {
        refused(&["-o", &out], "`gradus adapter convert FILE FOLDER` makes a PEFT folder of that");
    }
    // Without effect.
    let norm = ["--targets", "none", "--train-weights", "norm"];
    for (option, value) in
        [("--rank", "4"), ("--alpha", "nan"), ("--rank-of", "norm=4"), ("--rslora", "")]
    {
        let given: Vec<&str> =
            [option, value].into_iter().filter(|word| !word.is_empty()).collect();
        refused(
            &[&norm[..], &given].concat(),
            &format!("`{option}` is an adapter's, and `--targets none` trains none"),
        );
    }
    for option in ["--walk-horizon", "--walk-host-budget"] {
        for chunk in ["64", "100"] {
            let part = format!("`{option}` is set, but a window of 64 rows is one graph");
            refused(&["--chunk", chunk, option, "3"], &part);
        }
    }
    refused(&["--alpha", "nan"], "alpha is NaN, expected a positive number");
    refused(&["--keep", "0"], "`--keep` is 0; expected at least 1");
    refused(&["--parse-special"], "`--parse-special` is about texts");
    let texts = folder.write("texts.jsonl", "{\"text\": \"the cat sat on the mat\"}\n".repeat(9));
    let of_texts = ["-m", &model, "--data", &texts, "--template", "plain"];
    for command in ["plan", "eval"] {
        let fit = [&[command][..], &of_texts, &["--fit", "left"]].concat();
        fails(&fit, 1, &["`--fit` has no effect on texts"]);
        let special = ["--parse-special", "--window", "64", "--template", "plain"];
        let special = [&[command, "-m", &model, "--data", &data][..], &special].concat();
        fails(&special, 1, &["`--parse-special` is about texts"]);
    }
    // Where there are both, both have an effect.
    let both = ["plan", "-m", &model, "--data", &texts, &data, "--template", "plain"];
    ok(&[&both[..], &["--fit", "left", "--parse-special"]].concat());
    let eval = ["eval", "-m", &model, "--data", &data, "--template", "plain", "--generate"];
    let past = "`--rows` begins at 13, which is past the last of 10 rows";
    fails(&[&eval[..], &["--rows", "13..20"]].concat(), 1, &[past]);
    let show = ["data", "show", &data, "-m", &model, "--template", "plain", "--rows", "13.."];
    fails(&show, 1, &[past]);
    // A checkpoint is written from a copy of what moves; a run that is stopped before its first one
    // gives the memory of its graphs back for it.
    let parameters = |every: &str| {
        planned(&["--checkpoint-every", every])["plan"]["parameters_bytes"].as_u64().unwrap()
    };
    assert_eq!(parameters("0"), parameters("100000"));
    assert!(parameters("0") < parameters("1"));
}

/// What `auto` chose for a run stays, whatever it would choose on the machine that goes on with it.
#[cfg(unix)]
#[test]
fn a_run_that_goes_on_keeps_the_precision_it_began_with() {
    let folder = Folder::new("precision");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    let run = |family: &str, epochs: &str, more: &[&str]| {
        let mut command = gradus(&["train", "-m", &model, "--data", &data, "-o", &out]);
        command.args(["--template", "plain", "--window", "64", "--no-record"]);
        command.args(["--epochs", epochs, "--schedule", "constant", "--json"]).args(more);
        command.env("GRADUS_CPU", family);
        command
    };
    // What the portable kernels are fastest with is f32.
    let began = ["--grad-precision", "int16", "--checkpoint-every", "3"];
    let started = Started::at(&mut run("portable", "10000", &began), "step ");
    assert!(started.signal("-INT"));
    assert_eq!(started.end().status.code(), Some(130));
    let other = run("portable", "10000", &["--resume", "--grad-precision", "f32"]);
    let refused = { other }.output().unwrap();
    let said = text(&refused.stderr);
    assert!(said.contains("`grad_precision` \"int16\", this one has \"f32\""), "{said}");
    let started = Started::at(&mut run("portable", "10000", &["--resume"]), "step ");
    assert!(started.signal("-INT"));
    let ended = started.end();
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(130), "{said}");
    let said: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert!(said["resumed_from"].as_u64() > Some(0), "{said}");
}

/// Names that are no UTF-8 are names.
#[cfg(target_os = "linux")]
#[test]
fn names_that_are_no_text_are_written_to() {
    use std::os::unix::ffi::OsStrExt;
    let folder = Folder::new("bytes");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let name = std::ffi::OsStr::from_bytes(b"o\xff.gguf");
    let out = Path::new(&folder.file("")).join(name);
    let mut command = gradus(&["train", "-m", &model, "--data", &data, "--template", "plain"]);
    command.args(["--window", "64", "--epochs", "1", "--json", "-o"]).arg(&out);
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let said: Value = serde_json::from_slice(&ended.stdout).unwrap();
    assert!(said["adapter"].as_str().unwrap().ends_with("o\u{fffd}.gguf"), "{said}");
    assert!(out.exists());
    let merged = out.with_extension("merged");
    let mut command = gradus(&["merge", "-m", &model, "--force", "--json", "--adapter"]);
    assert!(command.arg(&out).arg("-o").arg(merged).output().unwrap().status.success());
}

/// A measurement that is no number is a failure, and says of what.
#[test]
fn what_cannot_be_measured_is_no_result() {
    let folder = Folder::new("not-finite");
    let path = fixture("llama", "model.gguf");
    let device = std::sync::Arc::new(cpu::Cpu::new(1, None).unwrap());
    let model = model::Model::load(Path::new(&path), device).unwrap();
    let targets = [("blk.0.ffn_down.weight", 4)];
    let mut adapter = model::Adapter::fresh(&model, targets, 8.0, 1).unwrap();
    for pair in adapter.tensors.values_mut() {
        pair.a.fill(1e30);
        pair.b.fill(1e30);
    }
    let file = folder.file("wild.gguf");
    adapter.write(Path::new(&file), &model).unwrap();
    let data = folder.write("facts.jsonl", facts());
    let text = folder.write("text.txt", "the cat sat on the mat and the dog in the fog ".repeat(9));
    for more in [&[][..], &["--json"]] {
        let eval =
            ["eval", "-m", &path, "--data", &data, "--template", "plain", "--adapter", &file];
        fails(&[&eval[..], more].concat(), 3, &["row 1 of ", "with the adapter", "not finite"]);
        let perplexity =
            ["perplexity", "-m", &path, "-f", &text, "--ctx", "32", "--adapter", &file];
        fails(&[&perplexity[..], more].concat(), 3, &["of window 1 is ", "not finite"]);
    }
}
