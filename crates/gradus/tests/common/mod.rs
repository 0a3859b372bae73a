//! What tests of the binary share.
#![allow(dead_code)] // not every test uses all of it

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use serde_json::Value;

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn fixture(arch: &str, file: &str) -> String {
    root().join("testdata/oracle").join(arch).join(file).display().to_string()
}

/// A folder that goes when the test ends.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gradus-cli-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.join(name), contents).unwrap();
        self.file(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn gradus(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gradus"));
    // Nothing of this machine's own set-up counts, and no model is to be found.
    command.args(args).env_remove("GRADUS_INDEX_URL").env_remove("COLUMNS");
    command.env("GRADUS_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("home"));
    command
}

pub fn run(args: &[&str]) -> Output {
    gradus(args).stdin(Stdio::null()).output().unwrap()
}

pub fn run_with_input(args: &[&str], input: &str) -> Output {
    let mut command = gradus(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output of a run that must succeed.
pub fn ok(args: &[&str]) -> String {
    let out = run(args);
    assert!(out.status.success(), "gradus {args:?}: {}", text(&out.stderr));
    text(&out.stdout)
}

pub fn json(args: &[&str]) -> Value {
    let out = ok(args);
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("gradus {args:?}: {e}: {out}"))
}

/// A run that must fail with this exit code and one line that has all these parts.
pub fn fails(args: &[&str], code: i32, parts: &[&str]) -> String {
    let out = run(args);
    check_failure(&out, args, code, parts);
    text(&out.stderr)
}

pub fn check_failure(out: &Output, args: &[&str], code: i32, parts: &[&str]) {
    let said = text(&out.stderr);
    assert_eq!(out.status.code(), Some(code), "gradus {args:?}: {said}");
    let errors: Vec<&str> = said.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "gradus {args:?} must fail with one line: {said}");
    assert!(said.trim_end().ends_with(errors[0]), "the error comes last: {said}");
    for part in parts {
        assert!(errors[0].contains(part), "gradus {args:?}: no `{part}` in: {said}");
    }
}

/// A process that has said on standard error that it is where it is wanted.
pub struct Started {
    child: Child,
    said: BufReader<ChildStderr>,
}

impl Started {
    /// Starts it, and waits for a line that begins so: `step `, of a run, after its first step.
    pub fn at(command: &mut Command, line: &str) -> Started {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap());
        let mut all = String::new();
        while !all.lines().last().is_some_and(|last| last.starts_with(line)) {
            assert!(said.read_line(&mut all).unwrap() > 0, "it ended early: {all}");
        }
        Started { child, said }
    }

    /// Sends it a signal, such as `-INT`; true if it was still there.
    pub fn signal(&self, signal: &str) -> bool {
        let id = self.child.id().to_string();
        Command::new("kill").args([signal, &id]).status().unwrap().success()
    }

    /// Waits for its end; what it said after that line is standard error.
    pub fn end(self) -> Output {
        let Started { child, mut said } = self;
        let rest = std::thread::spawn(move || {
            let mut rest = Vec::new();
            said.read_to_end(&mut rest).map(|_| rest)
        });
        let output = child.wait_with_output().unwrap();
        Output { stderr: rest.join().unwrap().unwrap(), ..output }
    }
}

/// A few conversations.
pub fn facts() -> String {
    let line = |q: &str, a: &str| {
        serde_json::json!({ "messages": [
            { "role": "user", "content": q },
            { "role": "assistant", "content": a },
        ] })
        .to_string()
    };
    [line("the cat?", "on the mat"), line("the dog?", "in the fog"), line("you?", "me")].join("\n")
}
