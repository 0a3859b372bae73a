//! Adapters in PEFT's form: folders that PEFT itself made (`testdata/peft/make_peft.py`), both
//! ways exactly, and what is refused.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use gguf::{Gguf, TensorInfo, TensorType};
use graph::Code;
use model::{Adapter, Error, LoraTensor, Skeleton};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use testkit::fixture;

const ARCHITECTURES: [&str; 8] =
    ["gemma3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"];

const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

fn made_by_peft(arch: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../testdata/peft")).join(arch)
}

fn skeleton(arch: &str) -> Skeleton {
    Skeleton::open(&fixture(arch, "model.gguf")).unwrap()
}

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gradus-peft-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Bit for bit, scales too.
fn assert_same(a: &Adapter, b: &Adapter, what: &str) {
    assert!(a.tensors.keys().eq(b.tensors.keys()), "{what}: other targets");
    for ((target, a), b) in a.tensors.iter().zip(b.tensors.values()) {
        assert_eq!((a.rank, a.scale.to_bits()), (b.rank, b.scale.to_bits()), "{what}: {target}");
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&a.a) == bits(&b.a), "{what}: A of {target}");
        assert!(bits(&a.b) == bits(&b.b), "{what}: B of {target}");
    }
}

/// The oracle's adapters, in llama.cpp's form and in PEFT's, are the same adapters: names, orders
/// of rows and columns, stacks and scales (rank-stabilized for llama, by patterns for gemma3).
#[test]
fn f51_what_peft_saved_is_what_the_gguf_holds() {
    for arch in ["llama", "gemma3", "mixtral", "qwen3_5_moe"] {
        let base = skeleton(arch);
        let of_gguf = Adapter::read_for(&fixture(arch, "adapter.gguf"), &base.base()).unwrap();
        let of_peft = Adapter::read_for(&made_by_peft(arch), &base.base()).unwrap();
        assert_same(&of_gguf, &of_peft, arch);
        assert_eq!((of_peft.alpha, of_peft.rounded().len()), (12.0, 0), "{arch}");
        assert!(of_peft.tensors.values().all(|t| t.scale == 3.0));
    }
}

#[test]
fn f49_gguf_to_peft_and_back_is_byte_equal() {
    let folder = Folder::new("gguf");
    for arch in ARCHITECTURES {
        let base = skeleton(arch);
        let adapter = Adapter::read_for(&fixture(arch, "adapter.gguf"), &base.base()).unwrap();
        let (first, peft) = (folder.join("first.gguf"), folder.join(arch));
        let second = folder.join("second.gguf");
        adapter.write_for(&first, &base.base()).unwrap();
        adapter.write_peft(&peft, &base.base()).unwrap();
        let again = Adapter::read_for(&peft, &base.base()).unwrap();
        assert_same(&adapter, &again, arch);
        again.write_for(&second, &base.base()).unwrap();
        assert!(fs::read(&first).unwrap() == fs::read(&second).unwrap(), "{arch}");
        // And nothing but pairs is in it.
        for tensor in Gguf::open(&second).unwrap().tensors() {
            let name = &tensor.info.name;
            assert!(name.ends_with(".lora_a") || name.ends_with(".lora_b"), "{name}");
        }
        let mut names: Vec<_> =
            fs::read_dir(&peft).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, FILES, "{arch}: nothing else is left");
    }
}

#[test]
fn f49_peft_to_gguf_and_back_is_byte_equal() {
    let folder = Folder::new("peft");
    for arch in ARCHITECTURES {
        let base = skeleton(arch);
        let (gguf, again) = (folder.join("a.gguf"), folder.join("again"));
        // The tensors of a folder that PEFT made. Mixtral's experts are written under the names
        // that they always had, not as parameters.
        if matches!(arch, "llama" | "gemma3" | "qwen3_5_moe") {
            let of_peft = made_by_peft(arch);
            let adapter = Adapter::read_for(&of_peft, &base.base()).unwrap();
            adapter.write_for(&gguf, &base.base()).unwrap();
            let adapter = Adapter::read_for(&gguf, &base.base()).unwrap();
            adapter.write_peft(&again, &base.base()).unwrap();
            let tensors = |folder: &Path| fs::read(folder.join(FILES[1])).unwrap();
            assert!(tensors(&of_peft) == tensors(&again), "{arch}");
        }
        // Both files of one of ours.
        let ours = folder.join(arch);
        let adapter = Adapter::read_for(&fixture(arch, "adapter.gguf"), &base.base()).unwrap();
        adapter.write_peft(&ours, &base.base()).unwrap();
        Adapter::read_for(&ours, &base.base()).unwrap().write_for(&gguf, &base.base()).unwrap();
        let adapter = Adapter::read_for(&gguf, &base.base()).unwrap();
        adapter.write_peft(&again, &base.base()).unwrap();
        for file in FILES {
            let bytes = |folder: &Path| fs::read(folder.join(file)).unwrap();
            assert!(bytes(&ours) == bytes(&again), "{arch}: {file}");
        }
    }
}

/// Ranks and scales that differ from target to target.
#[test]
fn f23_scales_that_one_alpha_cannot_say() {
    let folder = Folder::new("scales");
    let base = skeleton("llama");
    let full = Adapter::read_for(&fixture("llama", "adapter.gguf"), &base.base()).unwrap();
    let set = |scale: &dyn Fn(&str) -> f32| {
        let mut adapter = full.clone();
        for (target, t) in &mut adapter.tensors {
            t.scale = scale(target);
        }
        adapter
    };
    let trip = |adapter: &Adapter| {
        let (gguf, peft) = (folder.join("a.gguf"), folder.join("a"));
        adapter.write_for(&gguf, &base.base()).unwrap();
        adapter.write_peft(&peft, &base.base()).unwrap();
        let same = Adapter::read_for(&peft, &base.base()).unwrap();
        assert_same(adapter, &same, "as a folder");
        (
            Adapter::read_for(&gguf, &base.base()).unwrap(),
            fs::read_to_string(peft.join(FILES[0])).unwrap(),
        )
    };

    // A power of two more for one: exactly, in B.
    let twice = set(&|target| if target.contains("ffn_up") { 12.0 } else { 3.0 });
    let (read, config) = trip(&twice);
    assert!(twice.rounded().is_empty());
    assert!(config.contains(r#""up_proj": 48"#), "{config}");
    for (target, t) in &twice.tensors {
        let other = &read.tensors[target];
        assert_eq!(other.scale, 3.0);
        assert_eq!(t.a, other.a);
        assert!(t.b.iter().zip(&other.b).all(|(x, y)| t.scale * x == other.scale * y), "{target}");
    }

    // No power of two: B is rounded, and whoever asks is told.
    let third = set(&|target| if target == "blk.1.attn_v.weight" { 1.0 } else { 3.0 });
    let (read, config) = trip(&third);
    assert_eq!(third.rounded(), ["blk.1.attn_v.weight"]);
    assert!(config.contains(r#""model.layers.1.self_attn.v_proj": 4"#), "{config}");
    let (t, other) = (&third.tensors["blk.1.attn_v.weight"], &read.tensors["blk.1.attn_v.weight"]);
    for (x, y) in t.b.iter().zip(&other.b) {
        let (x, y) = (f64::from(*x), 3.0 * f64::from(*y));
        assert!((x - y).abs() <= x.abs() * 2f64.powi(-23), "{x} {y}");
    }

    // Rank-stabilized: GGUF holds the effective alpha.
    let mut adapter = full.clone();
    for t in adapter.tensors.values_mut() {
        (t.rank, t.a, t.b) = (16, t.a.repeat(4), t.b.repeat(4));
    }
    let peft = folder.join("rs");
    adapter.write_peft(&peft, &base.base()).unwrap();
    let config = r#"{"peft_type":"LORA","r":16,"lora_alpha":16,"use_rslora":true}"#;
    fs::write(peft.join(FILES[0]), config).unwrap();
    let read = Adapter::read_for(&peft, &base.base()).unwrap();
    assert!(read.tensors.values().all(|t| t.scale == 4.0));
    let gguf = folder.join("rs.gguf");
    read.write_for(&gguf, &base.base()).unwrap();
    assert_eq!(Gguf::open(&gguf).unwrap().metadata().f32("adapter.lora.alpha").unwrap(), 64.0);
    assert_same(&read, &Adapter::read_for(&gguf, &base.base()).unwrap(), "rank-stabilized");
}

/// A pair of another rank, of which the first rows are the same.
fn set_rank(t: &mut LoraTensor, rank: usize) {
    let (a, b) = (t.a.clone(), t.b.clone());
    let width = |n: usize| n / t.rank;
    t.a = a.iter().cycle().take(width(a.len()) * rank).copied().collect();
    t.b = b.iter().cycle().take(width(b.len()) * rank).copied().collect();
    t.rank = rank;
}

/// A rank and a scale for each kind of target, and others in one layer: what is a module, what a
/// parameter, and what several kinds end in has to be told apart by the patterns' keys.
#[test]
fn every_kind_of_target_has_its_own_rank_and_scale_in_a_folder() {
    let folder = Folder::new("ranks");
    for arch in ARCHITECTURES {
        let base = skeleton(arch);
        let full = Adapter::read_for(&fixture(arch, "adapter.gguf"), &base.base()).unwrap();
        let kind = |target: &str| target.splitn(3, '.').nth(2).unwrap_or(target).to_string();
        let mut kinds: Vec<String> = full.tensors.keys().map(|t| kind(t)).collect();
        kinds.sort();
        kinds.dedup();
        for changed in kinds.iter().map(Some).chain([None]) {
            for (ranks, scales) in [(true, false), (false, true), (true, true)] {
                let mut adapter = full.clone();
                for (target, t) in &mut adapter.tensors {
                    // Gate and up are one parameter where experts are.
                    let name = kind(target).replace("ffn_up_exps", "ffn_gate_exps");
                    let at = match changed {
                        Some(changed) => usize::from(name == *changed),
                        None => kinds.iter().position(|k| *k == name).unwrap(),
                    };
                    let at = at + usize::from(changed.is_none() && target.contains("blk.1."));
                    if ranks {
                        set_rank(t, 1 + at);
                    }
                    t.scale = if scales { 1.0 + at as f32 } else { 3.0 };
                }
                let peft = folder.join(arch);
                adapter.write_peft(&peft, &base.base()).unwrap();
                let what = format!("{arch}, {changed:?}, ranks {ranks}, scales {scales}");
                let again = Adapter::read_for(&peft, &base.base());
                assert_same(&adapter, &again.unwrap_or_else(|e| panic!("{what}: {e}")), &what);
            }
        }
    }
}

/// A router is a parameter where experts are, and is found by its own name alone.
#[test]
fn patterns_of_routers_name_the_router() {
    let folder = Folder::new("router");
    let base = skeleton("qwen3_5_moe");
    let mut adapter =
        Adapter::read_for(&fixture("qwen3_5_moe", "adapter.gguf"), &base.base()).unwrap();
    for (target, t) in &mut adapter.tensors {
        if target.contains("ffn_gate_inp.") {
            set_rank(t, 2);
            t.scale = 5.0;
        }
    }
    adapter.write_peft(&folder.join("out"), &base.base()).unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("out").join(FILES[0])).unwrap()).unwrap();
    assert_eq!(config["rank_pattern"]["mlp.gate.weight"], 2, "{config}");
    assert_eq!(config["alpha_pattern"]["mlp.gate.weight"], 10, "{config}");
}

/// Beside transformers 5 PEFT makes parameters of the modules of routers and experts, and holds
/// patterns against their names alone; gate and up become one of twice the rank.
#[test]
fn patterns_name_what_peft_makes_of_modules_too() {
    let folder = Folder::new("converted");
    for (arch, down) in [("mixtral", "w2"), ("qwen3_moe", "down_proj")] {
        let base = skeleton(arch);
        let full = Adapter::read_for(&fixture(arch, "adapter.gguf"), &base.base()).unwrap();
        let config = |changed: &[&str]| -> serde_json::Value {
            let mut adapter = full.clone();
            for (target, t) in &mut adapter.tensors {
                if changed.iter().any(|kind| target.contains(kind)) {
                    set_rank(t, 2);
                    t.scale = 5.0;
                }
            }
            let out = folder.join(arch);
            adapter.write_peft(&out, &base.base()).unwrap();
            assert_same(&adapter, &Adapter::read_for(&out, &base.base()).unwrap(), arch);
            serde_json::from_slice(&fs::read(out.join(FILES[0])).unwrap()).unwrap()
        };
        let ranks = |changed: &[&str]| config(changed)["rank_pattern"].clone();
        assert_eq!(ranks(&[]), serde_json::json!({}), "{arch}");
        let router = serde_json::json!({"gate": 2, "mlp.gate.weight": 2});
        assert_eq!(ranks(&["ffn_gate_inp"]), router, "{arch}");
        let downs = serde_json::json!({down: 2, "mlp.experts.down_proj": 2});
        assert_eq!(ranks(&["ffn_down_exps"]), downs, "{arch}");
        // Where they are most: as usual, of which PEFT takes twice by itself.
        let most = config(&["ffn_gate_exps", "ffn_up_exps"]);
        assert_eq!(most["r"], 2, "{arch}");
        assert!(most["rank_pattern"].get("mlp.experts.gate_up_proj").is_none(), "{most}");
        // In one layer, where they are not.
        let few = config(&["blk.1.ffn_gate_exps", "blk.1.ffn_up_exps"]);
        let name = "model.layers.1.mlp.experts.gate_up_proj";
        assert_eq!((&few["r"], &few["rank_pattern"][name]), (&4.into(), &4.into()), "{few}");
    }
}

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all = file.iter().map(|(name, view)| {
        (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    });
    all.collect()
}

fn store(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A folder of PEFT's for llama whose tensors are changed, and what reading it says.
fn changed(folder: &Folder, change: impl Fn(&mut Tensors)) -> Result<Adapter, Error> {
    let at = folder.join("changed");
    fs::create_dir_all(&at).unwrap();
    let from = made_by_peft("llama");
    fs::copy(from.join(FILES[0]), at.join(FILES[0])).unwrap();
    let mut all = tensors(&from.join(FILES[1]));
    change(&mut all);
    store(&at.join(FILES[1]), &all);
    Adapter::read_for(&at, &skeleton("llama").base())
}

const A: &str = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight";
const B: &str = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";

#[test]
fn half_precision_and_other_prefixes_are_read() {
    let folder = Folder::new("dtypes");
    let half = |x: f32| (x.to_bits() >> 16) as u16;
    let adapter = changed(&folder, |all| {
        let (dtype, _, data) = all.get_mut(A).unwrap();
        *dtype = Dtype::BF16;
        let values = data.as_chunks().0.iter().map(|&le| f32::from_le_bytes(le));
        *data = values.flat_map(|x| half(x).to_le_bytes()).collect();
    });
    let exact = Adapter::read_for(&made_by_peft("llama"), &skeleton("llama").base()).unwrap();
    let target = "blk.1.attn_q.weight";
    for (x, y) in adapter.unwrap().tensors[target].a.iter().zip(&exact.tensors[target].a) {
        assert_eq!(*x, f32::from_bits(y.to_bits() & 0xffff_0000));
    }
    // The text half of a multimodal model, and names with the adapter's in them.
    let adapter = changed(&folder, |all| {
        let renamed = std::mem::take(all).into_iter().map(|(name, tensor)| {
            let name = name.replace("model.model.layers", "model.language_model.model.layers");
            (name.replace("lora_A.weight", "lora_A.default.weight"), tensor)
        });
        *all = renamed.collect();
    });
    assert_same(&adapter.unwrap(), &exact, "renamed");
}

#[test]
fn f49_what_is_wrong_is_refused_by_tensor() {
    let folder = Folder::new("wrong");
    let says = |change: &dyn Fn(&mut Tensors), words: &[&str]| {
        let error = changed(&folder, change).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{error}\nexpected: {word}");
        }
        assert!(!error.contains('\n'), "{error}");
    };
    let insert = |name: &'static str| {
        move |all: &mut Tensors| {
            all.insert(name.into(), (Dtype::F32, vec![8], vec![0; 32]));
        }
    };
    for stray in [
        "rope_freqs.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector.weight",
        "base_model.model.model.embed_tokens.lora_embedding_C",
    ] {
        says(&insert(stray), &[stray, "is no LoRA pair"]);
    }
    says(&|all| drop(all.remove(B)), &[B, "missing"]);
    says(
        &|all| all.get_mut(A).unwrap().2[40..44].copy_from_slice(&f32::NAN.to_le_bytes()),
        &[A, "not finite at index 10"],
    );
    says(
        &|all| all.get_mut(B).unwrap().2[..4].copy_from_slice(&f32::INFINITY.to_le_bytes()),
        &[B, "not finite at index 0"],
    );
    says(
        &|all| {
            let (dtype, shape, data) = all.get_mut(A).unwrap();
            (*dtype, *shape) = (Dtype::F64, vec![4, 32]);
            assert_eq!(data.len(), 4 * 32 * 8);
        },
        &[A, "F64"],
    );
    says(&|all| all.get_mut(A).unwrap().1 = vec![4, 8, 8], &[A, "[4, 8, 8]", "a matrix"]);
    says(
        &|all| {
            let tensor = all[A].clone();
            all.insert(A.replace("model.model.", "model.model.language_model."), tensor);
            let tensor = all[B].clone();
            all.insert(B.replace("model.model.", "model.model.language_model."), tensor);
        },
        &["twice"],
    );
    // Of another rank than the configuration says.
    says(
        &|all| {
            all.get_mut(A).unwrap().1 = vec![2, 64];
            all.get_mut(A).unwrap().2.truncate(2 * 64 * 4);
            all.get_mut(B).unwrap().1 = vec![64, 2];
            all.get_mut(B).unwrap().2.truncate(2 * 64 * 4);
        },
        &[A, "has 2 rows", "the rank is 4"],
    );
    says(&Tensors::clear, &["no tensors"]);
    fs::remove_file(folder.join("changed").join(FILES[0])).unwrap();
    let error = Adapter::read_for(&folder.join("changed"), &skeleton("llama").base());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("adapter_config.json: there is no such file"), "{error}");

    // An expert without tensors among others.
    let at = folder.join("experts");
    let base = skeleton("mixtral");
    let adapter = Adapter::read_for(&fixture("mixtral", "adapter.gguf"), &base.base()).unwrap();
    adapter.write_peft(&at, &base.base()).unwrap();
    let mut all = tensors(&at.join(FILES[1]));
    all.retain(|name, _| !name.contains("layers.1.block_sparse_moe.experts.3.w2"));
    store(&at.join(FILES[1]), &all);
    let error = Adapter::read_for(&at, &base.base()).unwrap_err().to_string();
    assert!(error.contains("expert 3 of `blk.1.ffn_down_exps.weight`"), "{error}");
}

#[test]
fn f54_wrong_kinds_of_file_have_codes_of_their_own() {
    let folder = Folder::new("kinds");
    let base = skeleton("llama");
    let code = |path: &Path| match Adapter::read_for(path, &base.base()).unwrap_err() {
        Error::Adapter { code, message } => {
            assert!(message.contains(path.file_name().unwrap().to_str().unwrap()), "{message}");
            code
        }
        other => panic!("{other}"),
    };
    let single = made_by_peft("llama").join(FILES[1]);
    assert_eq!(code(&single), Code::AdapterSafetensors);
    for (name, bytes) in [
        ("adapter_model.bin", &b"PK\x03\x04\x00\x00\x08\x08"[..]),
        ("old.pt", b"\x80\x02\x8a\x0al\xfc"),
    ] {
        fs::write(folder.join(name), bytes).unwrap();
        assert_eq!(code(&folder.join(name)), Code::AdapterPickle, "{name}");
    }
    // In a folder too.
    let pickled = folder.join("pickled");
    fs::create_dir_all(&pickled).unwrap();
    fs::copy(made_by_peft("llama").join(FILES[0]), pickled.join(FILES[0])).unwrap();
    fs::copy(folder.join("adapter_model.bin"), pickled.join("adapter_model.bin")).unwrap();
    let Err(Error::Adapter { code: found, .. }) = Adapter::read_for(&pickled, &base.base()) else {
        panic!("read");
    };
    assert_eq!(found, Code::AdapterPickle);

    assert_eq!(code(&fixture("qwen2", "adapter.gguf")), Code::AdapterArchitecture);
    assert_eq!(code(&made_by_peft("qwen3_5_moe")), Code::AdapterArchitecture);

    // An adapter of the same architecture, half as wide.
    let gguf = Gguf::open(fixture("llama", "adapter.gguf")).unwrap();
    let narrow: Vec<_> = gguf
        .tensors()
        .map(|tensor| {
            let [rows, cols] = tensor.info.shape[..] else { panic!("no matrix") };
            let a = tensor.info.name.ends_with("lora_a");
            let shape = if a { [rows, cols / 2] } else { [rows, cols] };
            let info = TensorInfo::new(&tensor.info.name, TensorType::F32, &shape).unwrap();
            let bytes = tensor.bytes[..info.byte_len()].to_vec();
            (info, bytes.into())
        })
        .collect();
    gguf::write(folder.join("narrow.gguf"), gguf.metadata(), narrow).unwrap();
    assert_eq!(code(&folder.join("narrow.gguf")), Code::AdapterShape);
    let narrow = changed(&folder, |all| {
        for (name, (_, shape, data)) in all.iter_mut().filter(|(name, _)| name.contains("lora_A")) {
            shape[1] /= 2;
            data.truncate(data.len() / 2);
            assert!(!name.is_empty());
        }
    });
    let Err(Error::Adapter { code: found, message }) = narrow else { panic!("read") };
    assert_eq!(found, Code::AdapterShape);
    assert!(message.contains("lora_A.weight") && message.contains("[4, 80]"), "{message}");

    let codes = [
        Code::AdapterSafetensors,
        Code::AdapterPickle,
        Code::AdapterArchitecture,
        Code::AdapterShape,
    ];
    let names: std::collections::BTreeSet<&str> = codes.iter().map(|code| code.as_str()).collect();
    assert_eq!(names.len(), 4);
    assert!(codes.iter().all(|code| code.exit_code() == 1 && code.http_status() == 400));
}

/// What has no name in PEFT is refused, and the folder is not touched.
#[test]
fn gates_without_ups_have_no_name_in_peft() {
    let folder = Folder::new("nameless");
    let base = skeleton("qwen3_5_moe");
    let mut adapter =
        Adapter::read_for(&fixture("qwen3_5_moe", "adapter.gguf"), &base.base()).unwrap();
    adapter.tensors.retain(|target, _| !target.contains("blk.2.ffn_up_exps"));
    let error = adapter.write_peft(&folder.join("out"), &base.base()).unwrap_err().to_string();
    assert!(error.contains("experts of layer 2"), "{error}");
    assert!(!folder.join("out").exists());
}

/// Dropout is noted, and PEFT takes none on parameters, which experts are there: its
/// `lora.ParamWrapper` refuses a folder that says otherwise.
#[test]
fn dropout_is_noted_where_peft_takes_it() {
    let folder = Folder::new("dropout");
    for (arch, noted) in [("llama", 0.05f32), ("mixtral", 0.05), ("qwen3_5_moe", 0.0)] {
        let base = skeleton(arch);
        let plain = Adapter::read_for(&fixture(arch, "adapter.gguf"), &base.base()).unwrap();
        assert_eq!(plain.dropout, 0.0);
        let adapter = Adapter { dropout: 0.05, ..plain.clone() };
        let out = folder.join(arch);
        adapter.write_peft(&out, &base.base()).unwrap();
        let config: serde_json::Value =
            serde_json::from_slice(&fs::read(out.join("adapter_config.json")).unwrap()).unwrap();
        let written = noted.to_string().parse::<f64>().unwrap();
        assert_eq!(config["lora_dropout"], written, "{arch}");
        assert_eq!(Adapter::read_for(&out, &base.base()).unwrap().dropout, noted, "{arch}");
        // In GGUF as a key of its own, without which files are as they were.
        let files = [&plain, &adapter].map(|adapter| {
            let file = out.join("adapter.gguf");
            adapter.write_for(&file, &base.base()).unwrap();
            assert!(Adapter::read_for(&file, &base.base()).unwrap() == *adapter, "{arch}");
            Gguf::open(&file).unwrap().metadata().contains("adapter.lora.dropout")
        });
        assert_eq!(files, [false, true], "{arch}");
    }
}
