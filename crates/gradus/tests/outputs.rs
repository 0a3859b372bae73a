//! What commands write, over what, and with which exit code they fail.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

mod common;

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use common::{Folder, check_failure, facts, fails, fixture, ok, run, text};
use gguf::{Gguf, Metadata, TensorInfo, TensorType};

fn is_link(path: &str) -> bool {
    std::fs::symlink_metadata(path).unwrap().is_symlink()
}

#[test]
fn a_device_keeps_its_place_and_a_link_is_followed() {
    let folder = Folder::new("devices");
    let (model, adapter) = (fixture("llama", "model.gguf"), fixture("llama", "adapter.gguf"));
    let data = folder.write("d.jsonl", facts());
    let null = folder.file("null");
    symlink("/dev/null", &null).unwrap();
    let merge = ["merge", "-m", &model, "--adapter", &adapter, "--force", "-o"];
    let train = ["train", "-m", &model, "--data", &data, "--epochs", "1", "--no-record", "-o"];
    let toy = ["make-toy", "llama", "-o"];
    let tokens = folder.write("tokens.json", "[[1, 2]]");
    let dump = ["dump", "logits", "-m", &model, "--tokens", &tokens, "--out"];
    for command in [&merge[..], &train, &toy, &dump] {
        fails(&[command, &[&null]].concat(), 1, &["regular file"]);
        assert!(is_link(&null));
    }
    let link = folder.file("link.gguf");
    symlink("real.gguf", &link).unwrap();
    for _ in 0..2 {
        ok(&[&toy[..], &[&link]].concat());
        assert!(is_link(&link));
        Gguf::open(folder.file("real.gguf")).unwrap();
    }
}

#[test]
fn a_model_takes_the_place_of_no_data() {
    let folder = Folder::new("data-stays");
    let (model, adapter) = (fixture("llama", "model.gguf"), fixture("llama", "adapter.gguf"));
    let data = folder.write("d.jsonl", facts());
    for args in [
        &["merge", "-m", &model, "--adapter", &adapter, "--force", "-o", &data][..],
        &["make-toy", "llama", "-o", &data],
    ] {
        fails(args, 1, &["d.jsonl", "is there already and no GGUF file"]);
        assert_eq!(std::fs::read_to_string(&data).unwrap(), facts());
    }
    // Said before anything is done.
    let other = folder.write("other.jsonl", facts());
    let args = ["train", "-m", &model, "--data", &data, "--targets", "none", "--train-weights"];
    let args = [&args[..], &["norm", "--out-model", &other]].concat();
    fails(&args, 1, &["other.jsonl", "no GGUF file"]);
}

/// A limit of the size of files stands for a disk that is full.
#[test]
fn what_the_disk_refuses_is_exit_code_3() {
    let folder = Folder::new("full");
    let (model, adapter) = (fixture("llama", "model.gguf"), fixture("llama", "adapter.gguf"));
    let (toy, file, peft) = (folder.file("t.gguf"), folder.file("a.gguf"), folder.file("peft"));
    for args in [
        &["make-toy", "llama", "-o", &toy][..],
        &["merge", "-m", &model, "--adapter", &adapter, "--force", "-o", &toy],
        &["adapter", "convert", &adapter, &peft, "-m", &model],
        &[
            "adapter",
            "convert",
            common::root().join("testdata/peft/llama").to_str().unwrap(),
            &file,
            "-m",
            &model,
        ],
    ] {
        let limited = r#"trap '' XFSZ; ulimit -f 1; exec "$0" "$@""#;
        let mut shell = Command::new("sh");
        shell.args(["-c", limited, env!("CARGO_BIN_EXE_gradus")]).args(args);
        let out = shell.output().unwrap();
        check_failure(&out, args, 3, &["File too large", "choose a place on a disk"]);
        let left = std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().path());
        let left: Vec<_> = left.filter(|path| *path != Path::new(&peft)).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    assert_eq!(std::fs::read_dir(&peft).unwrap().count(), 0);
}

#[test]
fn names_in_an_adapter_do_not_steer_the_terminal() {
    let folder = Folder::new("steer");
    let mut metadata = Metadata::new();
    for (key, value) in [
        ("general.type", "adapter"),
        ("general.architecture", "ll\x1b[2Jama"),
        ("adapter.type", "lora"),
    ] {
        metadata.insert(key, value);
    }
    metadata.insert("adapter.lora.alpha", 1.0f32);
    let name = "blk.0\x1b]0;owned\x07\u{9b}2J\n.weight";
    let tensors = ["lora_a", "lora_b"].map(|part| {
        let shape: &[usize] = if part == "lora_a" { &[1, 2] } else { &[2, 1] };
        let info = TensorInfo::new(format!("{name}.{part}"), TensorType::F32, shape).unwrap();
        (info, vec![0; 8].into())
    });
    let path = folder.file("evil\x1b[2J.gguf");
    gguf::write(&path, &metadata, tensors).unwrap();
    let model = fixture("llama", "model.gguf");
    let steers = |text: &str| text.chars().any(|c| c.is_control() && c != '\n');
    let shown = ok(&["adapter", "show", &path]);
    assert!(!steers(&shown) && shown.lines().count() == 3, "{shown:?}");
    assert!(shown.contains("ll\\u{1b}[2Jama") && shown.contains("owned\\u{7}"), "{shown}");
    let json = ok(&["adapter", "show", &path, "--json"]);
    assert!(!steers(&json), "{json:?}");
    let parsed: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(parsed["targets"][0]["target"], name);
    for args in [
        &["inspect", &path][..],
        &["run", "-m", &model, "-p", "x", "--adapter", &path],
        &["run", "-m", &path, "-p", "x"],
        &["adapter", "convert", &path, &folder.file("out"), "-m", &model],
    ] {
        let out = run(args);
        let said = text(&out.stdout) + &text(&out.stderr);
        assert!(!steers(&said), "gradus {args:?}: {said:?}");
    }
}
