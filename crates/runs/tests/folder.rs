//! A run folder from its making to its end, and what is left of it when things go wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

use std::fs;
use std::path::{Path, PathBuf};

use runs::{
    Comparison, DataFile, End, Error, Evaluation, Planned, RunFolder, RunInfo, State, Step,
};

/// A folder that goes when the test ends.
struct Root(PathBuf);

impl Root {
    fn new(name: &str) -> Root {
        let path = std::env::temp_dir().join(format!("gradus-runs-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Root(path)
    }

    fn create(&self, name: &str) -> RunFolder {
        RunFolder::create(&self.0, name, info()).unwrap()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn info() -> RunInfo {
    RunInfo {
        gradus: "0.1.0".into(),
        command: "train".into(),
        settings: [("rank".to_string(), 8.into()), ("lr".to_string(), 1e-3.into())].into(),
        ..RunInfo::default()
    }
}

fn step(step: u64) -> Step {
    Step {
        step,
        epoch: 1,
        loss: 4.0 / step as f64,
        grad_norm: 0.5,
        lr: 1e-3,
        tokens: 100,
        seconds: 0.5,
        memory_bytes: Some(1 << 30),
    }
}

fn evaluation(step: u64) -> Evaluation {
    Evaluation { step, loss: 5.0 / step as f64 }
}

fn fine(error: Option<Error>) {
    assert!(error.is_none(), "{}", error.unwrap());
}

fn end(state: State) -> End {
    End { state, ..End::default() }
}

/// Takes steps `from..=to`, with an evaluation after every fifth.
fn train(run: &mut RunFolder, from: u64, to: u64) {
    for n in from..=to {
        fine(run.step(&step(n)));
        if n % 5 == 0 {
            fine(run.evaluation(&evaluation(n)));
        }
    }
}

fn lines(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(String::from).collect()
}

/// `(step, tag, value)` of a folder's event files, and of restarts `(step, "start", 0)`. A small
/// reader of its own: records and messages are taken apart as their formats say, sums unchecked.
fn events(folder: &Path) -> Vec<(u64, String, f32)> {
    fn varint(from: &mut &[u8]) -> u64 {
        let mut n = 0;
        for shift in (0..64).step_by(7) {
            let byte = from[0];
            *from = &from[1..];
            n |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        n
    }
    /// Fields as `(number, varint, bytes)`.
    fn fields(mut from: &[u8]) -> Vec<(u64, u64, &[u8])> {
        let mut out = Vec::new();
        while !from.is_empty() {
            let key = varint(&mut from);
            let count = match key & 7 {
                0 => {
                    out.push((key >> 3, varint(&mut from), &[][..]));
                    continue;
                }
                1 => 8,
                2 => varint(&mut from) as usize,
                5 => 4,
                other => panic!("wire type {other}"),
            };
            let (bytes, rest) = from.split_at(count);
            out.push((key >> 3, 0, bytes));
            from = rest;
        }
        out
    }
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|path| path.to_string_lossy().contains("tfevents"));
    files.sort();
    let mut out = Vec::new();
    for file in files {
        let bytes = fs::read(file).unwrap();
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let count = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let event = fields(&rest[12..12 + count]);
            rest = &rest[16 + count..];
            let step = event.iter().find(|f| f.0 == 2).map_or(0, |f| f.1);
            for (number, _, message) in event {
                if number == 7 {
                    out.push((step, "start".into(), 0.0));
                }
                for (_, _, value) in if number == 5 { fields(message) } else { Vec::new() } {
                    let value = fields(value);
                    let tag = String::from_utf8(value[0].2.to_vec()).unwrap();
                    out.push((step, tag, f32::from_le_bytes(value[1].2.try_into().unwrap())));
                }
            }
        }
    }
    out
}

#[test]
fn a_run_leaves_what_it_measured_in_every_form() {
    let root = Root::new("whole");
    let mut run = root.create("facts");
    fine(run.planned(Planned {
        steps: 10,
        parameters: 1234,
        memory: vec![("arena".into(), 1 << 20), ("weights".into(), 3 << 20)],
    }));
    train(&mut run, 1, 10);
    let path = run.path().to_path_buf();
    assert_eq!(path, root.0.join("facts"));
    fine(run.finish(End { moved: Some((13, 14)), peak_bytes: Some(5 << 20), ..end(State::Done) }));

    let lines = lines(&path);
    assert_eq!(lines.len(), 12);
    assert_eq!(
        lines[1],
        r#"{"step":2,"epoch":1,"loss":2.0,"grad_norm":0.5,"lr":0.001,"tokens":100,"seconds":0.5,"memory_bytes":1073741824,"tokens_per_s":200.0}"#
    );
    assert_eq!(lines[5], r#"{"step":5,"eval_loss":1.0}"#);

    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(path.join("run.json")).unwrap()).unwrap();
    assert_eq!((&record["schema"], &record["state"]), (&1.into(), &"done".into()));
    assert_eq!((&record["settings"]["rank"], &record["moved"][1]), (&8.into(), &14.into()));

    let events = events(&path);
    let loss: Vec<_> = events.iter().filter(|e| e.1 == "train/loss").collect();
    assert_eq!(loss.len(), 10);
    assert_eq!((loss[3].0, loss[3].2), (4, 1.0));
    let eval: Vec<_> = events.iter().filter(|e| e.1.starts_with("eval/")).collect();
    assert_eq!(eval.len(), 2);

    let report = fs::read_to_string(path.join("report.html")).unwrap();
    for part in [
        "facts",
        "done",
        "13 of 14",
        "1.0 MiB",
        "4.0 MiB",
        "5.0 MiB",
        "200.0",
        "1234",
        "rank",
        "<svg",
        "10 of 10",
        "0.4000 in step 10",
    ] {
        assert!(report.contains(part), "no `{part}` in {report}");
    }
    assert!(fs::read_to_string(path.join("loss.svg")).unwrap().contains("held-out data"));
    let hidden = |e: fs::DirEntry| e.file_name().to_string_lossy().starts_with('.');
    assert!(!fs::read_dir(&path).unwrap().any(|e| hidden(e.unwrap())), "a temporary file is left");

    let run = runs::read(&path).unwrap();
    assert_eq!((run.record.end.state, run.history.steps), (State::Done, 10));
    assert_eq!(run.history.best.unwrap().step, 10);
    assert_eq!(run.history.evaluation.unwrap().loss, 0.5);
    assert_eq!(run.history.tokens_per_s(), 200.0);
}

#[test]
fn names_are_folders_of_their_own() {
    let root = Root::new("names");
    let paths: Vec<_> = (0..3).map(|_| root.create("a").path().to_path_buf()).collect();
    assert_eq!(paths, ["a", "a-2", "a-3"].map(|name| root.0.join(name)));
    let long = "x".repeat(121);
    for name in ["", ".", "..", "../a", "a/b", "a\\b", ".a", "-a", "a ", "a\n", "a:b", "<b>", &long]
    {
        let e = RunFolder::create(&root.0, name, info()).err().expect(name);
        assert!(matches!(e, Error::Name { .. }), "{name}: {e}");
    }
    assert_eq!(fs::read_dir(&root.0).unwrap().count(), 3);
    for out in ["/x/ü <b>.gguf", "..", "", "/", ".gguf"] {
        let name = runs::default_name(Path::new(out));
        RunFolder::create(&root.0, &name, info()).unwrap_or_else(|e| panic!("{out}: {e}"));
    }
    // Where no folder can be made, that is said before a run starts.
    fs::write(root.0.join("file"), "").unwrap();
    let e = RunFolder::create(&root.0.join("file"), "a", info()).err().unwrap().to_string();
    assert!(e.starts_with("cannot make the folder") && e.contains("file"), "{e}");
}

#[test]
fn a_run_that_goes_on_has_no_step_twice() {
    let root = Root::new("resumed");
    let mut run = root.create("a");
    train(&mut run, 1, 12);
    let path = run.path().to_path_buf();
    drop(run);
    let undisturbed = lines(&path);
    // Killed in the middle of a line and of a record.
    let torn = |name: &str, bytes: &[u8]| {
        let file = fs::read_dir(&path).unwrap().map(|e| e.unwrap().path());
        let file = file.filter(|p| p.to_string_lossy().contains(name)).max().unwrap();
        fs::write(&file, [fs::read(&file).unwrap(), bytes.to_vec()].concat()).unwrap();
    };
    torn("metrics", br#"{"step":13,"epoch":1,"lo"#);
    torn("tfevents", &[24, 0, 0, 0, 0]);
    assert_eq!(runs::read(&path).unwrap().history.steps, 12);

    for from in [12, 7, 5, 0] {
        let mut run = RunFolder::resume(&path, from).unwrap();
        assert_eq!(run.history().steps, from);
        train(&mut run, from + 1, 12);
        drop(run);
        assert_eq!(lines(&path), undisturbed, "from {from}");
        let events = events(&path);
        for tag in ["train/loss", "eval/loss"] {
            let steps: Vec<u64> = events.iter().filter(|e| e.1 == tag).map(|e| e.0).collect();
            let wanted: Vec<u64> =
                if tag == "eval/loss" { vec![5, 10] } else { (1..=12).collect() };
            assert_eq!(steps, wanted, "from {from}");
        }
        assert!(events.iter().any(|e| e.1 == "start" && e.0 == from + 1));
    }
    // The evaluation of the step it goes on from may come again.
    let mut run = RunFolder::resume(&path, 10).unwrap();
    fine(run.evaluation(&evaluation(10)));
    train(&mut run, 11, 12);
    fine(run.finish(end(State::Done)));
    assert_eq!(lines(&path), undisturbed);
    let record = runs::read(&path).unwrap().record;
    assert_eq!(record.resumed.iter().map(|r| r.step).collect::<Vec<_>>(), [12, 7, 5, 0, 10]);
    assert_eq!(record.end.state, State::Done);
}

#[test]
fn a_run_goes_on_once_and_stays_while_it_does() {
    let root = Root::new("locked");
    let run = root.create("a");
    let path = run.path().to_path_buf();
    assert_eq!(runs::read(&path).unwrap().record.end.state, State::Running);
    for e in [RunFolder::resume(&path, 0).err().unwrap(), runs::remove(&path).unwrap_err()] {
        assert!(matches!(e, Error::Running { .. }), "{e}");
    }
    // As after kill -9: nobody wrote an end.
    drop(run);
    let record = runs::read(&path).unwrap().record;
    assert_eq!(record.end.state, State::Interrupted);
    assert!(record.end.message.unwrap().contains("without a word"));
    RunFolder::resume(&path, 0).unwrap();
    runs::remove(&path).unwrap();
    assert!(!path.exists());
}

/// What `run.json` says of numbers that are missing.
fn unrecorded(folder: &Path) -> Option<String> {
    runs::read(folder).unwrap().record.unrecorded
}

/// Leaves the first `keep` lines of a folder's metrics.
fn shorten(folder: &Path, keep: usize) {
    let text: String = lines(folder)[..keep].iter().map(|line| format!("{line}\n")).collect();
    fs::write(folder.join("metrics.jsonl"), text).unwrap();
}

#[test]
fn a_run_that_goes_on_says_which_numbers_are_missing_before() {
    let root = Root::new("gap");
    let mut run = root.create("a");
    let path = run.path().to_path_buf();
    train(&mut run, 1, 4);
    drop(run);
    // As after a disk that was full from the fifth step on.
    let json = fs::read_to_string(path.join("run.json")).unwrap();
    let note = "recording ended at step 5: the disk is full";
    let noted = json.replacen('{', &format!("{{\"unrecorded\": \"{note}\","), 1);
    fs::write(path.join("run.json"), &noted).unwrap();
    let mut run = RunFolder::resume(&path, 30).unwrap();
    train(&mut run, 31, 60);
    drop(run);
    let went_on = format!("{note}; recording went on after step 30");
    assert_eq!(unrecorded(&path).as_deref(), Some(went_on.as_str()));
    // The gap stays behind it, and is said once.
    drop(RunFolder::resume(&path, 50).unwrap());
    assert_eq!(unrecorded(&path).as_deref(), Some(went_on.as_str()));
    // Before the gap everything is there, and what comes is measured again.
    drop(RunFolder::resume(&path, 4).unwrap());
    assert_eq!(unrecorded(&path), None);
    // Lines that a crash of the machine took are missed too, without a note.
    let mut run = RunFolder::resume(&path, 4).unwrap();
    train(&mut run, 5, 12);
    drop(run);
    shorten(&path, 7);
    drop(RunFolder::resume(&path, 12).unwrap());
    let missed = unrecorded(&path).unwrap();
    assert!(missed.starts_with("numbers of steps up to 12 are missing"), "{missed}");

    // Events alone.
    let mut run = root.create("b");
    let path = run.path().to_path_buf();
    train(&mut run, 1, 9);
    drop(run);
    let events = fs::read_dir(&path).unwrap().map(|e| e.unwrap().path());
    let events = events.into_iter().find(|p| p.to_string_lossy().contains("tfevents")).unwrap();
    let bytes = fs::read(&events).unwrap();
    fs::write(&events, &bytes[..bytes.len() - 400]).unwrap();
    drop(RunFolder::resume(&path, 9).unwrap());
    assert!(unrecorded(&path).is_some());

    // A record that begins in the middle says what became of what is before.
    let run = RunFolder::create_after(&root.0, "c", info(), (30, "nobody kept it")).unwrap();
    let path = run.path().to_path_buf();
    drop(run);
    let record = runs::read(&path).unwrap().record;
    assert_eq!(record.resumed[0].step, 30);
    assert!(record.unrecorded.unwrap().ends_with("nobody kept it"));
    let starts = events_of_start(&path);
    assert_eq!(starts, [31]);
}

fn events_of_start(folder: &Path) -> Vec<u64> {
    events(folder).iter().filter(|e| e.1 == "start").map(|e| e.0).collect()
}

#[test]
fn the_page_of_a_run_that_goes_on_says_so_at_once() {
    let root = Root::new("page-resumed");
    let mut run = root.create("a");
    let path = run.path().to_path_buf();
    train(&mut run, 1, 3);
    fine(run.finish(end(State::Failed)));
    let page = || fs::read_to_string(path.join("report.html")).unwrap();
    assert!(page().contains("state failed"));
    let run = RunFolder::resume(&path, 3).unwrap();
    assert!(page().contains("state running") && page().contains("after step 3"), "{}", page());
    drop(run);
}

/// The end of a run that cannot be written is told as what it is, and costs no curve, unless it is
/// room that is missing.
#[test]
fn an_end_that_cannot_be_written_is_told_and_leaves_the_curve() {
    let root = Root::new("end");
    let mut run = root.create("a");
    let path = run.path().to_path_buf();
    train(&mut run, 1, 3);
    fs::remove_file(path.join("run.json")).unwrap();
    fs::create_dir(path.join("run.json")).unwrap();
    let e = run.finish(end(State::Done)).unwrap().to_string();
    assert!(e.contains("run.json") && !e.contains("loss.svg"), "{e}");
    assert!(path.join("loss.svg").exists());
}

#[test]
fn a_page_that_cannot_be_written_is_said_once() {
    let root = Root::new("page");
    let mut run = root.create("a");
    let path = run.path().to_path_buf();
    fs::remove_file(path.join("report.html")).unwrap();
    fs::create_dir(path.join("report.html")).unwrap();
    let e = run.planned(Planned::default()).unwrap().to_string();
    assert!(e.starts_with("cannot write") && e.contains("report.html"), "{e}");
    fine(run.planned(Planned::default()));
    // What can be written still is.
    train(&mut run, 1, 3);
    fine(run.finish(end(State::Done)));
    let run = runs::read(&path).unwrap();
    assert_eq!((run.history.steps, run.record.unrecorded), (3, None), "every number is there");
    assert!(fs::read_to_string(path.join("loss.svg")).unwrap().contains("smoothed"));
}

#[test]
fn damaged_folders_are_listed_with_the_reason() {
    let root = Root::new("damaged");
    assert!(runs::list(&root.0).unwrap().is_empty(), "there need be no folder");
    for name in ["old", "new"] {
        let mut run = root.create(name);
        train(&mut run, 1, 2);
        fine(run.finish(end(State::Done)));
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let cases: [(&str, &str, &[u8], &str); 8] = [
        ("a", "run.json", b"{", "no JSON"),
        ("b", "run.json", b"{}", "`schema`: expected 1"),
        ("c", "run.json", br#"{"schema":2}"#, "later Gradus"),
        ("d", "run.json", br#"{"schema":1}"#, "started"),
        ("e", "metrics.jsonl", b"{\"step\":1,\"loss\":1}\nnot\n", "line 2 "),
        ("f", "metrics.jsonl", b"{\"step\":-1,\"loss\":1}\n", "line 1 "),
        ("g", "metrics.jsonl", &[b' '; 70_000], "longer than"),
        ("h", "run.json", b"{\"schema\":1,\n\"started\":\"noon\"}", "line 2 "),
    ];
    for (name, file, bytes, _) in cases {
        drop(root.create(name));
        fs::write(root.0.join(name).join(file), bytes).unwrap();
    }
    fs::create_dir(root.0.join("i")).unwrap();
    fs::write(root.0.join("no-folder"), "").unwrap();
    fs::create_dir(root.0.join(".hidden")).unwrap();

    let listed = runs::list(&root.0).unwrap();
    let names: Vec<&str> = listed.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, ["new", "old", "i", "h", "g", "f", "e", "d", "c", "b", "a"]);
    for (name, _, _, reason) in cases {
        let found = listed.iter().find(|l| l.name == name).unwrap();
        let e = found.run.as_ref().unwrap_err().to_string();
        assert!(e.contains(reason) && e.contains(name) && !e.contains('\n'), "{name}: {e}");
    }
    let e = runs::remove(&root.0.join("i")).unwrap_err().to_string();
    assert!(e.contains("no run's"), "{e}");
    runs::remove(&root.0.join("a")).unwrap();
    // A null is a number that JSON lacks, and a kind of line that is not known is passed over.
    let odd =
        b"{\"step\":1,\"loss\":null}\n{\"step\":1,\"mood\":3}\n{\"step\":2,\"eval_loss\":1}\n";
    fs::write(root.0.join("old/metrics.jsonl"), odd).unwrap();
    let history = runs::read(&root.0.join("old")).unwrap().history;
    assert_eq!((history.steps, history.best), (1, None));
    assert!(history.first.unwrap().loss.is_nan() && history.evaluation.is_some());
    let e = runs::find(&root.0, "../x").unwrap_err().to_string();
    assert!(e.contains("there are new, old") && e.contains("more"), "{e}");
    assert_eq!(runs::find(&root.0, "old").unwrap(), root.0.join("old"));
    assert!(runs::find(&root.0, ".").is_err() && runs::find(&root.0, "").is_err());
}

/// Names, messages, settings and answers come from anywhere; a page shows them as text, and asks
/// for nothing.
#[test]
fn nothing_on_a_page_is_markup_but_ours() {
    let root = Root::new("hostile");
    let evil = "</title></svg><script>alert(1)</script><img src=x onerror='alert(2)'>\"'&{{ 7*7 }}";
    let info = RunInfo {
        gradus: evil.into(),
        settings: [(evil.to_string(), evil.into())].into(),
        data: vec![DataFile {
            role: evil.into(),
            file: evil.into(),
            bytes: 1,
            facts: [(evil.to_string(), 1)].into(),
        }],
        outputs: vec![evil.into()],
        ..info()
    };
    for name in ["a", "b"] {
        let mut run = RunFolder::create(&root.0, name, info.clone()).unwrap();
        let memory = vec![(evil.to_string(), 1)];
        fine(run.planned(Planned { memory, steps: 1, parameters: 1 }));
        train(&mut run, 1, 6);
        fine(run.finish(End { message: Some(evil.into()), ..end(State::Failed) }));
    }
    // No name we make looks like this, but a folder can be renamed.
    let hostile = root.0.join("<svg onload=alert(3)>&");
    if cfg!(unix) {
        fs::rename(root.0.join("a"), &hostile).unwrap();
        let run = RunFolder::resume(&hostile, 3).unwrap();
        fine(run.finish(End { message: Some(evil.into()), ..end(State::Failed) }));
    }
    let found: Vec<_> = runs::list(&root.0).unwrap().into_iter().map(|l| l.run.unwrap()).collect();
    let overlay = runs::comparison(
        Path::new("x.html"),
        &found,
        &Comparison {
            differences: vec![(evil.into(), vec![Some(evil.into()), None])],
            ..Comparison::of(&found).unwrap()
        },
    );
    let mut pages = vec![overlay.unwrap()];
    for run in &found {
        pages.push(fs::read_to_string(run.path.join("report.html")).unwrap());
        pages.push(fs::read_to_string(run.path.join("loss.svg")).unwrap());
    }
    for page in pages {
        assert!(!page.contains("<script") && !page.contains("<img"), "{page}");
        assert_eq!(page.matches("<svg").count(), 1, "{page}");
        assert!(!page.contains("49}}") && !page.contains("&{{ 7*7 }}"), "{page}");
        let addresses = ["src=\"", "href", "url(h", "@import", "http://", "https://"];
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(addresses.iter().all(|a| !page.contains(a)), "{page}");
    }
}

#[test]
fn runs_are_compared_in_the_steps_that_all_took() {
    let root = Root::new("compared");
    for (name, rank, to) in [("a", 8, 20), ("b", 16, 12)] {
        let mut info = info();
        info.settings.insert("rank".into(), rank.into());
        let mut run = RunFolder::create(&root.0, name, info).unwrap();
        train(&mut run, 1, to);
        fine(run.finish(end(State::Done)));
    }
    let found = ["a", "b"].map(|name| runs::read(&root.0.join(name)).unwrap());
    let compared = Comparison::of(&found).unwrap();
    let rank = ("rank".to_string(), vec![Some(8.into()), Some(16.into())]);
    assert_eq!(compared.differences, [rank]);
    assert_eq!(compared.losses.len(), 12);
    assert_eq!(compared.losses[3], (4, vec![1.0, 1.0]));
    assert_eq!(compared.evaluations, [(5, vec![1.0; 2]), (10, vec![0.5; 2])]);
    let page = runs::comparison(Path::new("x.html"), &found, &compared).unwrap();
    assert!(page.contains("What differs") && page.contains("Held-out loss"), "{page}");
    assert_eq!(page.matches("g-smooth g-c1").count(), 3, "two curves and the legend's line");
}

/// A run of 400 steps, killed at twenty moments nobody chose and taken up each time from the last
/// whole ten steps, as from a checkpoint. In the child, which this test starts again and again,
/// the environment names the folder.
#[test]
fn twenty_kills_leave_what_an_undisturbed_run_leaves() {
    const LAST: u64 = 400;
    if let Some(path) = std::env::var_os("GRADUS_TEST_RUN") {
        let reached = runs::read(Path::new(&path)).unwrap().history.last.map_or(0, |s| s.step);
        let from = reached / 10 * 10;
        let mut run = RunFolder::resume(Path::new(&path), from).unwrap();
        for n in from + 1..=LAST {
            train(&mut run, n, n);
            std::thread::sleep(std::time::Duration::from_micros(500));
        }
        fine(run.finish(end(State::Done)));
        return;
    }
    let root = Root::new("killed");
    let mut run = root.create("undisturbed");
    train(&mut run, 1, LAST);
    let undisturbed = lines(run.path());
    let path = root.create("killed").path().to_path_buf();
    let start = || {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "twenty_kills_leave_what_an_undisturbed_run_leaves"]);
        child.env("GRADUS_TEST_RUN", &path).stdout(std::process::Stdio::null()).spawn().unwrap()
    };
    let mut states = Vec::new();
    for n in 0..20u64 {
        let mut child = start();
        std::thread::sleep(std::time::Duration::from_millis(10 + n * 37 % 50));
        child.kill().unwrap();
        child.wait().unwrap();
        states.push(runs::read(&path).unwrap().record.end.state);
    }
    assert!(start().wait().unwrap().success());
    assert_eq!(lines(&path), undisturbed);
    assert!(
        states.contains(&State::Interrupted) && !states.contains(&State::Running),
        "{states:?}"
    );
    assert_eq!(runs::read(&path).unwrap().record.end.state, State::Done);
}
