//! Adapters that anybody may have made: what is no file, what is too large, and what would be
//! applied in another way than it is meant.
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may panic

use std::fs;
use std::path::{Path, PathBuf};

use gguf::{Array, Gguf, Metadata, TensorInfo, TensorType, Value};
use graph::Code;
use model::{Adapter, Error, Skeleton, describe_adapter};
use testkit::fixture;

const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gradus-wild-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A copy of the folder that PEFT made for llama.
    fn peft(&self, name: &str) -> PathBuf {
        let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/peft/llama");
        let to = self.join(name);
        fs::create_dir_all(&to).unwrap();
        FILES.iter().for_each(|file| {
            fs::copy(Path::new(from).join(file), to.join(file)).unwrap();
        });
        to
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What reading an adapter says, with its model and without.
fn errors(path: &Path) -> [Error; 2] {
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    [Adapter::read_for(path, &base.base()).unwrap_err(), describe_adapter(path).unwrap_err()]
}

/// Calls something with a pipe that somebody waits to write to: it must not be opened.
#[cfg(unix)]
fn with_pipe(path: &Path, run: impl FnOnce()) {
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, Ordering};
    let _ = fs::remove_file(path);
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    let opened = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut pipe = fs::OpenOptions::new().write(true).open(path).unwrap();
            opened.store(true, Ordering::SeqCst);
            let _ = pipe.write_all(b"no adapter");
        });
        run();
        let early = opened.load(Ordering::SeqCst);
        drop(fs::File::open(path).unwrap());
        writer.join().unwrap();
        assert!(!early, "{} was opened", path.display());
    });
}

#[cfg(unix)]
#[test]
fn pipes_are_not_opened_wherever_an_adapter_has_a_file() {
    let folder = Folder::new("pipes");
    let alone = folder.join("alone.gguf");
    with_pipe(&alone, || {
        for error in errors(&alone) {
            assert!(error.to_string().contains("is not a regular file"), "{error}");
        }
        let error = Adapter::check_out(&alone).unwrap_err();
        assert!(error.to_string().contains("is not a regular file"), "{error}");
    });
    for (name, file) in ["config", "tensors"].into_iter().zip(FILES) {
        let path = folder.peft(name);
        with_pipe(&path.join(file), || {
            for error in errors(&path) {
                let said = error.to_string();
                assert!(said.contains(file) && said.contains("not a regular file"), "{said}");
            }
        });
    }
}

/// A device without an end, and a sparse file that is larger than any memory.
#[cfg(unix)]
#[test]
fn no_more_is_read_than_an_adapter_of_the_model_can_be() {
    let folder = Folder::new("large");
    let endless = folder.peft("endless");
    fs::remove_file(endless.join(FILES[1])).unwrap();
    std::os::unix::fs::symlink("/dev/zero", endless.join(FILES[1])).unwrap();
    for error in errors(&endless) {
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
    for (name, file) in ["config", "tensors"].into_iter().zip(FILES) {
        let path = folder.peft(name);
        let sparse = fs::OpenOptions::new().write(true).open(path.join(file)).unwrap();
        sparse.set_len(1 << 40).unwrap();
        for error in errors(&path) {
            let said = error.to_string();
            assert!(said.contains(file), "{said}");
            assert!(said.contains("has 1099511627776 bytes, expected at most"), "{said}");
        }
    }
    // Not a byte more than the model allows at the rank of the configuration.
    let path = folder.peft("header");
    let file = fs::OpenOptions::new().write(true).open(path.join(FILES[1])).unwrap();
    file.set_len(1 << 30).unwrap();
    let [error, _] = errors(&path);
    assert!(error.to_string().contains("has 1073741824 bytes, expected at most"), "{error}");
}

fn adapter(metadata: &Metadata, tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let tensors = tensors.iter().map(|(name, shape)| {
        let info = TensorInfo::new(*name, TensorType::F32, shape).unwrap();
        let bytes = vec![0; info.byte_len()];
        (info, bytes.into())
    });
    gguf::encode(metadata, tensors.collect::<Vec<_>>()).unwrap()
}

/// The metadata of llama's adapter.
fn metadata() -> Metadata {
    let file = Gguf::open(fixture("llama", "adapter.gguf")).unwrap();
    file.into_metadata().whole()
}

/// FIELD-REPORTS F49: a converted adapter had the model's `rope_freqs.weight` in it, and "unexpected
/// suffix" was all that was said. What is no pair is named, and what is expected.
#[test]
fn f49_a_gguf_with_other_tensors_is_refused_by_tensor() {
    let folder = Folder::new("stray");
    let path = folder.join("a.gguf");
    let file = Gguf::open(fixture("llama", "adapter.gguf")).unwrap();
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    assert!(Adapter::read_for(&fixture("llama", "adapter.gguf"), &base.base()).is_ok());
    for stray in [
        "rope_freqs.weight",
        "output_norm.weight",
        "blk.0.attn_q.weight",
        "blk.0.attn_q.weight.lora_magnitude_vector",
        "blk.0.attn_q.weight.lora_c",
        "blk.0.ffn_gate.weight.lora_b",
        "stray",
    ] {
        let info = TensorInfo::new(stray, TensorType::F32, &[8]).unwrap();
        let own = file.tensors().filter(|tensor| tensor.info.name != stray);
        // One half of a pair is none either.
        let own = own.filter(|tensor| {
            stray != "blk.0.ffn_gate.weight.lora_b"
                || tensor.info.name != "blk.0.ffn_gate.weight.lora_a"
        });
        let mut tensors: Vec<_> = own.map(|t| (t.info.clone(), t.bytes.into())).collect();
        tensors.push((info, vec![0; 32].into()));
        fs::write(&path, gguf::encode(&metadata(), tensors).unwrap()).unwrap();
        let error = Adapter::read_for(&path, &base.base()).unwrap_err().to_string();
        let expected = format!(
            "{}: tensor `{stray}` is no LoRA pair; expected names that end in .lora_a and .lora_b",
            path.display()
        );
        assert_eq!(error, expected);
    }
}

#[test]
fn ranks_of_gguf_files_are_bounded() {
    let folder = Folder::new("ranks");
    let path = folder.join("a.gguf");
    let (a, b) = ("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b");
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    let of = base.base().projection("blk.0.attn_q.weight").unwrap();
    let store = |rank: usize| {
        let tensors: [(&str, &[usize]); 2] = [(a, &[rank, of.width]), (b, &[of.out, rank])];
        fs::write(&path, adapter(&metadata(), &tensors)).unwrap();
    };
    store(4097);
    for error in errors(&path) {
        let said = error.to_string();
        assert!(said.contains("the rank of `blk.0.attn_q.weight"), "{said}");
        assert!(said.contains("is 4097, expected 1 to 4096"), "{said}");
    }
    // The norm, whose work grows with the rank's square, has a bound of its own.
    for (rank, has_norm) in [(1024, true), (1025, false)] {
        store(rank);
        let info = describe_adapter(&path).unwrap();
        let norms: Vec<_> = info.pairs.iter().map(|pair| pair.norm).collect();
        assert_eq!(norms, [has_norm.then_some(0.0)], "{rank}");
    }
}

#[test]
fn what_a_gguf_file_says_of_its_adapter_is_known_or_refused_by_key() {
    let folder = Folder::new("keys");
    let path = folder.join("a.gguf");
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    let file = Gguf::open(fixture("llama", "adapter.gguf")).unwrap();
    let store = |key: &str, value: Value| {
        let mut metadata = metadata();
        metadata.insert(key, value);
        let tensors = file.tensors().map(|t| (t.info.clone(), t.bytes.into()));
        fs::write(&path, gguf::encode(&metadata, tensors).unwrap()).unwrap();
    };
    store("adapter.alora.invocation_tokens", Value::Array(Array::U32(vec![1, 2])));
    for error in errors(&path) {
        let said = error.to_string();
        let expected = "key `adapter.alora.invocation_tokens` is there: this is an activated LoRA";
        assert!(said.contains(expected), "{said}");
    }
    store("adapter.lora.use_dora\x1b[2J", Value::Bool(true));
    for error in errors(&path) {
        let said = error.to_string();
        assert!(said.contains("key `adapter.lora.use_dora\\u{1b}[2J` is not known"), "{said}");
    }
    store("adapter.lora.alpha", Value::F32(f32::NAN));
    for error in errors(&path) {
        assert!(error.to_string().contains("key `adapter.lora.alpha` is NaN"), "{error}");
    }
    // llama.cpp's words for those who serve it, and those of other things.
    for key in ["adapter.lora.task_name", "adapter.lora.prompt_prefix", "general.anything"] {
        store(key, Value::String("x".into()));
        Adapter::read_for(&path, &base.base()).unwrap();
        describe_adapter(&path).unwrap();
    }
}

#[test]
fn names_from_a_file_cannot_steer_a_terminal_by_an_error() {
    let folder = Folder::new("names");
    let path = folder.join("a\x1b[2J.gguf");
    let evil = "blk.0.\x1b]0;owned\x07\u{202e}.lora_a";
    fs::write(&path, adapter(&metadata(), &[(evil, &[1, 1])])).unwrap();
    let long = "long".repeat(1 << 18);
    let peft = folder.peft("peft");
    let tensor = |name: &str| {
        let view = safetensors::tensor::TensorView::new(
            safetensors::Dtype::F32,
            vec![1, 1],
            &[0, 0, 0, 0],
        );
        let bytes = safetensors::serialize([(name, view.unwrap())], None).unwrap();
        fs::write(peft.join(FILES[1]), bytes).unwrap();
    };
    let check = |errors: [Error; 2]| {
        for error in errors {
            let said = error.to_string();
            assert!(!said.chars().any(|c| c.is_control() || c == '\u{202e}'), "{said:?}");
            assert!(said.len() < 9000, "{}", said.len());
        }
    };
    check(errors(&path));
    for name in [format!("{evil}.weight"), format!("{evil}\n.lora_A.weight"), long] {
        tensor(&name);
        check(errors(&peft));
    }
}

#[cfg(unix)]
#[test]
fn an_adapter_takes_the_place_of_no_device_and_follows_links() {
    use std::os::unix::fs::symlink;
    let folder = Folder::new("places");
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    let adapter = Adapter::read_for(&fixture("llama", "adapter.gguf"), &base.base()).unwrap();
    let (null, link) = (folder.join("null"), folder.join("link"));
    symlink("/dev/null", &null).unwrap();
    let error = adapter.write_for(&null, &base.base()).unwrap_err();
    assert!(error.to_string().contains("is not a regular file"), "{error}");
    assert_eq!(error.code(), Code::InvalidInput);
    assert!(fs::symlink_metadata(&null).unwrap().is_symlink());
    symlink("real.gguf", &link).unwrap();
    adapter.write_for(&link, &base.base()).unwrap();
    adapter.write_for(&link, &base.base()).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(Adapter::read_for(&folder.join("real.gguf"), &base.base()).unwrap() == adapter);
}

/// Where process ids repeat, as in containers, what a killed process left is in nobody's way.
#[test]
fn an_adapter_is_written_over_what_a_killed_process_left() {
    let folder = Folder::new("left");
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    let adapter = Adapter::read_for(&fixture("llama", "adapter.gguf"), &base.base()).unwrap();
    let (file, peft) = (folder.join("a.gguf"), folder.join("peft"));
    fs::create_dir(&peft).unwrap();
    let names = |of: &Path| {
        let names = fs::read_dir(of).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    fs::write(folder.join(".a.gguf.tmp"), "half").unwrap();
    FILES.iter().for_each(|name| fs::write(peft.join(format!(".{name}.tmp")), "half").unwrap());
    adapter.write_for(&file, &base.base()).unwrap();
    adapter.write_peft(&peft, &base.base()).unwrap();
    assert_eq!(names(&folder.0), ["a.gguf", "peft"]);
    assert_eq!(names(&peft), FILES);
}

#[test]
fn what_fails_in_writing_is_no_fault_of_the_input() {
    let folder = Folder::new("writing");
    let base = Skeleton::open(&fixture("llama", "model.gguf")).unwrap();
    let adapter = Adapter::read_for(&fixture("llama", "adapter.gguf"), &base.base()).unwrap();
    fs::write(folder.join("file"), "x").unwrap();
    let failed = [
        adapter.write_for(&folder.join("no/a.gguf"), &base.base()).unwrap_err(),
        adapter.write_peft(&folder.join("file/peft"), &base.base()).unwrap_err(),
    ];
    for error in failed {
        assert_eq!((error.code(), error.exit_code()), (Code::FileFailed, 3), "{error}");
    }
    for error in errors(&folder.join("no/a.gguf")) {
        assert_eq!((error.code(), error.exit_code()), (Code::InvalidInput, 1), "{error}");
    }
}
