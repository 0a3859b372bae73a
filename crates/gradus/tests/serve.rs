//! `gradus serve` as its users meet it, and as the stock `openai` package drives it.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixture(file: &str) -> String {
    root().join("testdata/oracle/llama").join(file).display().to_string()
}

fn gradus(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gradus"));
    command.args(args).env("GRADUS_HOME", "/nonexistent/gradus").stdin(Stdio::null());
    command
}

/// A server that ends with the test.
struct Serving {
    child: Child,
    at: SocketAddr,
}

impl Serving {
    fn new(args: &[&str]) -> Serving {
        let model = fixture("model.gguf");
        let args = [&["serve", &model, "--port", "0", "--template", "plain", "-t", "2"], args];
        let mut child = gradus(&args.concat()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let at = line.trim().strip_prefix("listening on http://").unwrap().parse().unwrap();
        let serving = Serving { child, at };
        assert!(serving.ask("GET", "/health", "").starts_with("HTTP/1.1 200"));
        let began = Instant::now();
        while !serving.ask("GET", "/ready", "").starts_with("HTTP/1.1 200") {
            assert!(began.elapsed() < Duration::from_secs(60), "it does not get ready");
            std::thread::sleep(Duration::from_millis(5));
        }
        serving
    }

    fn open(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let mut answer = String::new();
        self.open(method, path, body).read_to_string(&mut answer).unwrap();
        answer
    }

    /// Sends a signal and gives the exit code.
    fn end(mut self, signal: &str) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn it_serves_and_ends_by_a_signal_in_the_midst_of_an_answer() {
    let adapter = format!("facts={}", fixture("adapter.gguf"));
    for signal in ["-TERM", "-INT"] {
        let serving = Serving::new(&["--adapter", &adapter, "--grace", "1"]);
        let models = serving.ask("GET", "/v1/models", "");
        assert!(models.contains("\"id\":\"model\"") && models.contains("\"id\":\"facts\""));
        let chat = r#"{"model": "facts", "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 3}"#;
        let answer = serving.ask("POST", "/v1/chat/completions", chat);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("x-gradus-generation: 1"), "{answer}");
        let off = serving.ask("POST", "/train", "{}");
        assert!(off.contains("training_off"), "{off}");
        let text = r#"{"prompt": "Once", "stream": true}"#;
        let mut stream = serving.open("POST", "/v1/completions", text);
        let mut first = [0; 64];
        stream.read_exact(&mut first).unwrap();
        assert_eq!(serving.end(signal), Some(0));
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("data: [DONE]") || rest.contains("event: error"), "{rest}");
    }
}

/// As the first command of the guide has it: the folder is not there yet.
#[test]
fn the_training_folder_is_made() {
    let dir = std::env::temp_dir().join(format!("gradus-train-dir-{}", std::process::id()));
    let folder = dir.join("adapters");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let serving = Serving::new(&["--train-dir", folder.to_str().unwrap()]);
    assert!(folder.is_dir());
    assert!(serving.ask("GET", "/train", "").contains(r#""state":"idle""#));
    drop(serving);
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn what_is_wrong_is_said_before_anything_listens() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let model = fixture("model.gguf");
    let adapter = fixture("adapter.gguf");
    for (args, part) in [
        (&["--train-dir", "/nonexistent/a"][..], "`--train-dir` /nonexistent/a: No such"),
        (&["--train-dir", &model], "is no folder"),
        (&["--adapter", "facts"], "ALIAS=FILE"),
        (&["--adapter", &format!("model={adapter}")], "name of the base model"),
        (&["--adapter", &format!("a/b={adapter}")], "no alias"),
        (&["--port", &port], "cannot listen at 127.0.0.1"),
        (&["--port", "70000"], "--port"),
        (&["--host", "nowhere"], "--host"),
        (&["-m", &model], "cannot be used with"),
    ] {
        let out = gradus(&[&["serve", &model], args].concat()).output().unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(part), "{args:?}: {said}");
        assert_eq!(out.stdout, b"", "{args:?}");
    }
    for (args, part) in [
        (&["--slots", "0"][..], "`slots` is 0"),
        (&["--adapter", "a=/nonexistent.gguf"], "/nonexistent.gguf"),
    ] {
        let all = [&["serve", &model, "--port", "0"], args].concat();
        let out = gradus(&all).output().unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains(part), "{args:?}: {said}");
    }
}

/// `GRADUS_OPENAI_PYTHON` is a Python that has the package.
#[test]
#[ignore = "needs the openai package: docs/testing.md"]
fn the_openai_package_drives_it() {
    let python = std::env::var("GRADUS_OPENAI_PYTHON").unwrap_or_else(|_| "python3".into());
    let adapter = format!("facts={}", fixture("adapter.gguf"));
    let serving = Serving::new(&["--adapter", &adapter, "--slots", "4"]);
    let script = root().join("crates/gradus/tests/openai_client.py");
    let address = format!("http://{}/v1", serving.at);
    let status = Command::new(python).arg(script).arg(address).status().unwrap();
    assert!(status.success());
    assert_eq!(serving.end("-TERM"), Some(0));
}

/// It fails by itself where anything is not as it says.
#[test]
fn the_demo_of_a_mixture_serves_trains_refuses_and_promotes() {
    let out = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("demo-moe");
    let _ = std::fs::remove_dir_all(&out);
    let ran =
        gradus(&["demo", "--moe", "-t", "2", "--out", out.to_str().unwrap()]).output().unwrap();
    let (said, error) =
        (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}{error}");
    for part in [
        "served as `attention`, generation 1",
        "refused, 422: MatMulExperts at node `blk.0.ffn_down_exps.weight`",
        "promoted: `halden`, generation 1, is served",
        "0 panics",
    ] {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
    assert!(out.join("attention.gguf").exists() && !out.join("experts.gguf").exists());
}

/// A job whose server is killed, or stopped, goes on in the next one to the same bytes.
#[test]
fn a_job_outlives_its_server() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("outlives");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    let folder = dir.display().to_string();
    let train = |out: &str| {
        let examples: Vec<String> = (0..6)
            .map(|i| format!(r#"{{"prompt": "number {i}?", "completion": "it is {i}{i}"}}"#))
            .collect();
        let examples = examples.join(",");
        format!(
            r#"{{"out": "{out}", "examples": [{examples}], "epochs": 60, "lr": 0.01,
               "checkpoint_every": 1, "val_split": 0.2}}"#
        )
    };
    let status = |serving: &Serving| -> serde_json::Value {
        let answer = serving.ask("GET", "/train", "");
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    let wait = |serving: &Serving, until: &dyn Fn(&serde_json::Value) -> bool| {
        let began = Instant::now();
        loop {
            let status = status(serving);
            assert!(status["state"] != "error", "{status}");
            if until(&status) {
                return status;
            }
            assert!(began.elapsed() < Duration::from_secs(120), "{status}");
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let done = |status: &serde_json::Value| status["state"] == "done";
    let serving = Serving::new(&["--train-dir", &folder]);
    // What it would take, and nothing else.
    let plan = train("whole.gguf").replacen('{', r#"{"plan": true, "#, 1);
    let answer = serving.ask("POST", "/train", &plan);
    assert!(answer.contains(r#""fits":true"#) && answer.contains(r#""steps":60"#), "{answer}");
    assert!(!dir.join(".jobs").exists() && status(&serving)["state"] == "idle");
    assert!(serving.ask("POST", "/train", &train("whole.gguf")).starts_with("HTTP/1.1 200"));
    let steps = wait(&serving, &done)["steps"].as_u64().unwrap();
    assert!(steps >= 60 && std::fs::read_dir(dir.join(".jobs")).unwrap().count() == 0);
    assert!(serving.ask("POST", "/train", &train("stopped.gguf")).starts_with("HTTP/1.1 200"));
    let mut serving = serving;
    for (signal, least) in [("-KILL", 5), ("-TERM", 15), ("-KILL", 25)] {
        wait(&serving, &|s| s["steps"].as_u64() >= Some(least) || done(s));
        serving.end(signal);
        assert!(dir.join(".jobs/stopped/request.json").exists(), "it ended before {signal}");
        serving = Serving::new(&["--train-dir", &folder]);
        assert!(status(&serving)["out"].as_str().unwrap().ends_with("stopped.gguf"));
    }
    let last = wait(&serving, &done);
    assert_eq!(last["steps"].as_u64(), Some(steps));
    let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
    assert!(read("whole.gguf") == read("stopped.gguf"), "the job ends elsewhere");
    assert!(!dir.join(".jobs/stopped").exists());
    assert!(serving.ask("GET", "/v1/models", "").contains(r#""id":"stopped""#));

    // Each has one record, with every step once.
    let found = runs::list(&dir.join("runs")).unwrap();
    assert_eq!(found.len(), 2);
    for (listed, out) in found.into_iter().zip(["stopped", "whole"]) {
        assert!(listed.name.ends_with(&format!("-{out}")), "{}", listed.name);
        let run = listed.run.unwrap();
        assert_eq!(run.record.end.state, runs::State::Done, "{out}");
        assert_eq!((run.history.steps, &run.record.unrecorded), (steps, &None), "{out}");
        assert_eq!(run.record.resumed.len(), if out == "stopped" { 3 } else { 0 });
        assert_eq!(run.history.evaluation.unwrap().step, steps);
        let settings = &run.record.info.settings;
        assert_eq!((&settings["epochs"], &settings["val_split"]), (&60.into(), &0.2.into()));
        assert!(settings.get("rank").is_some() && settings.get("examples").is_none());
        assert!(run.path.join("report.html").exists());
    }
    assert!(last["record"].as_str().unwrap().ends_with("-stopped"), "{last}");
}

/// What cannot be recorded is said where the job is asked about; the job is done all the same.
#[test]
fn a_job_without_room_for_its_record_is_done_all_the_same() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unrecorded");
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("runs"), "in the way").unwrap();
    let serving = Serving::new(&["--train-dir", &dir.display().to_string()]);
    let job = r#"{"out": "a.gguf", "examples": [{"prompt": "who?", "completion": "nobody"}],
        "val_split": 0}"#;
    assert!(serving.ask("POST", "/train", job).starts_with("HTTP/1.1 200"));
    let began = Instant::now();
    loop {
        let status = serving.ask("GET", "/train", "");
        assert!(!status.contains(r#""state":"error""#), "{status}");
        assert!(began.elapsed() < Duration::from_secs(60), "{status}");
        if status.contains(r#""state":"done""#) {
            assert!(status.contains("cannot make the folder"), "{status}");
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(dir.join("a.gguf").exists());
}
