//! Adapters on the embedding and on the head: what they compute, how files hold them, and why one
//! tensor that is both has none.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // helpers of tests may panic

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf::{Gguf, TensorType};
use graph::DType;
use model::toy::Toy;
use model::{
    Adapter, Engine, EngineConfig, MergeConfig, Model, Rows, Skeleton, WantLogits,
    describe_adapter, merge,
};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use testkit::{Random, relative_l2};

const EMBED: &str = "token_embd.weight";
const HEAD: &str = "output.weight";

/// A folder that goes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("gradus-embedding-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn toy(folder: &Folder, arch: &str, ty: TensorType) -> (PathBuf, Arc<Model>) {
    let path = folder.join(&format!("{arch}.gguf"));
    Toy::new(arch, ty, 3).write(&path).unwrap();
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let model = Arc::new(Model::load(&path, device).unwrap());
    (path, model)
}

fn adapter(model: &Model, targets: &[(&str, usize)]) -> Adapter {
    let mut adapter = Adapter::fresh(model, targets.iter().copied(), 8.0, 1).unwrap();
    let mut random = Random::new(1);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.1 * random.normal());
    }
    adapter
}

fn logits(model: &Arc<Model>, adapter: Option<&Adapter>, tokens: &[u32]) -> Vec<f32> {
    let config = EngineConfig { cache: DType::F32, positions: 64, batch: 64, states: 2 };
    let mut engine = Engine::new(model.clone(), config).unwrap();
    let adapter = adapter.map(|a| engine.attach(Arc::new(a.clone())));
    let seq = engine.cache().open();
    let rows = Rows { seq, tokens, adapter, want: WantLogits::All };
    engine.forward(&[rows]).unwrap().remove(0)
}

fn far(a: &[f32], b: &[f32]) -> f64 {
    relative_l2(a, &b.iter().map(|&b| f64::from(b)).collect::<Vec<_>>())
}

fn tokens() -> Vec<u32> {
    (0..24).map(|i| i * 7 % 320).collect()
}

/// `E[id] + scale B A[id]`, and the head's `W x + scale B A x`: in f64 by hand, in a merged file, and
/// as an adapter.
#[test]
fn a_merged_model_answers_as_the_adapter_does() {
    let folder = Folder::new("merged");
    for arch in ["qwen3moe", "qwen35moe"] {
        let (path, model) = toy(&folder, arch, TensorType::F32);
        let base = logits(&model, None, &tokens());
        for targets in
            [&[(EMBED, 4)][..], &[(HEAD, 3)], &[(EMBED, 4), (HEAD, 3), ("blk.1.attn_q.weight", 2)]]
        {
            let adapter = adapter(&model, targets);
            let out = folder.join("merged.gguf");
            let config = MergeConfig { ty: None, force: false, name: "x".into(), threads: 2 };
            let skeleton = Skeleton::open(&path).unwrap();
            merge(&skeleton, &adapter, &out, &config, &mut |_, _| {}).unwrap();
            if let Some(pair) = adapter.tensors.get(EMBED) {
                let read = |path: &Path| {
                    Gguf::open(path).unwrap().require(EMBED).unwrap().to_f32().unwrap()
                };
                let (before, after) = (read(&path), read(&out));
                let (vocab, rank) = (pair.a.len() / pair.rank, pair.rank);
                let width = before.len() / vocab;
                let mut worst = 0.0f64;
                for id in 0..vocab {
                    for j in 0..width {
                        let change: f64 = (0..rank)
                            .map(|r| {
                                f64::from(pair.a[id * rank + r]) * f64::from(pair.b[j * rank + r])
                            })
                            .sum();
                        let at = id * width + j;
                        let wanted = f64::from(before[at]) + f64::from(pair.scale) * change;
                        worst = worst.max((f64::from(after[at]) - wanted).abs());
                    }
                }
                assert!(worst < 1e-6, "{arch}: {worst:e}");
            }
            let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
            let merged = Arc::new(Model::load(&out, device).unwrap());
            let with = logits(&model, Some(&adapter), &tokens());
            let error = far(&with, &logits(&merged, None, &tokens()));
            assert!(error < 1e-5, "{arch}, {targets:?}: {error:e}");
            assert!(far(&with, &base) > 0.02, "{arch}, {targets:?}: no effect");
        }
    }
}

/// In llama.cpp's layout and in PEFT's, there and back.
#[test]
fn files_hold_them_as_others_read_them() {
    let folder = Folder::new("files");
    let (_, model) = toy(&folder, "qwen3moe", TensorType::Q8_0);
    let width = model.geometry().width;
    let adapter = Adapter {
        dropout: 0.1,
        ..adapter(&model, &[(EMBED, 4), (HEAD, 3), ("blk.0.attn_q.weight", 2)])
    };
    let file = folder.join("a.gguf");
    adapter.write(&file, &model).unwrap();
    let read = Gguf::open(&file).unwrap();
    let shape = |name: &str| read.require(name).unwrap().info.shape.clone();
    assert_eq!(shape("token_embd.weight.lora_a"), [320, 4]);
    assert_eq!(shape("token_embd.weight.lora_b"), [width, 4]);
    assert_eq!(shape("output.weight.lora_a"), [3, width]);
    assert_eq!(shape("output.weight.lora_b"), [320, 3]);
    // The scale is alpha over the rank, which llama.cpp takes to be the columns of B.
    let again = Adapter::read(&file, &model).unwrap();
    assert!(again == adapter);

    let peft = folder.join("peft");
    adapter.write_peft(&peft, &model.base()).unwrap();
    let bytes = std::fs::read(peft.join("adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let dims = |name: &str| tensors.tensor(name).unwrap().shape().to_vec();
    let embedding = "base_model.model.model.embed_tokens.lora_embedding_";
    assert_eq!(dims(&format!("{embedding}A")), [4, 320]);
    assert_eq!(dims(&format!("{embedding}B")), [width, 4]);
    let a = tensors.tensor(&format!("{embedding}A")).unwrap().data().to_vec();
    let at =
        |r: usize, id: usize| f32::from_le_bytes(a[4 * (r * 320 + id)..][..4].try_into().unwrap());
    assert_eq!(at(3, 17), adapter.tensors[EMBED].a[17 * 4 + 3]);
    let config = std::fs::read(peft.join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let modules = config["target_modules"].to_string();
    assert!(modules.contains("\"embed_tokens\"") && modules.contains("\"lm_head\""), "{modules}");
    assert_eq!(config["lora_dropout"], 0.1);
    let back = Adapter::read(&peft, &model).unwrap();
    assert!(back.tensors == adapter.tensors && back.dropout == 0.1);

    // Both are described alike.
    let norms = [&file, &peft].map(|path| {
        let info = describe_adapter(path).unwrap();
        let of =
            info.pairs.iter().find(|p| p.target == EMBED || p.target.ends_with("embed_tokens"));
        let of = of.unwrap();
        assert_eq!((of.rank, of.width, of.out), (4, 320, width));
        of.norm.unwrap()
    });
    assert!((norms[0] / norms[1] - 1.0).abs() < 1e-12, "{norms:?}");

    // PEFT stores the base's own beside them.
    let mut all: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, t)| (name.to_string(), (t.dtype(), t.shape().to_vec(), t.data().to_vec())))
        .collect();
    for (name, rows, cols) in [
        ("base_model.model.model.embed_tokens.base_layer.weight", 320, width),
        ("base_model.model.lm_head.base_layer.weight", 320, width),
    ] {
        all.insert(name.into(), (Dtype::F32, vec![rows, cols], vec![0; 4 * rows * cols]));
    }
    let write = |all: &BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>| {
        let views = all.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(peft.join("adapter_model.safetensors"), bytes).unwrap();
    };
    write(&all);
    assert!(Adapter::read(&peft, &model).unwrap().tensors == adapter.tensors);
    // Of another vocabulary, or under the names of a linear layer, it is refused by name.
    let whole = all.clone();
    let (dtype, _, data) = all[&format!("{embedding}A")].clone();
    all.insert(format!("{embedding}A"), (dtype, vec![4, 319], data[..4 * 319 * 4].to_vec()));
    write(&all);
    let e = Adapter::read(&peft, &model).unwrap_err().to_string();
    assert!(e.contains("embed_tokens") && e.contains("[4, 319]") && e.contains("[4, 320]"), "{e}");
    all = whole;
    for part in ["A", "B"] {
        let tensor = all.remove(&format!("{embedding}{part}")).unwrap();
        let name = format!("base_model.model.model.embed_tokens.lora_{part}.weight");
        all.insert(name, tensor);
    }
    write(&all);
    let e = Adapter::read(&peft, &model).unwrap_err().to_string();
    assert!(e.contains("embed_tokens") && e.contains("no module"), "{e}");
}

#[test]
fn one_tensor_that_is_both_has_none() {
    let folder = Folder::new("tied");
    let (_, untied) = toy(&folder, "qwen3moe", TensorType::Q8_0);
    let (_, tied) = toy(&folder, "llama", TensorType::Q8_0);
    for (target, words) in [
        (EMBED, "`token_embd.weight` is the model's head as well, and llama.cpp"),
        (HEAD, "the model has no tensor `output.weight`: its head is the embedding table"),
    ] {
        let e = Adapter::fresh(&tied, [(target, 4)], 8.0, 1).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
        assert!(Adapter::fresh(&untied, [(target, 4)], 8.0, 1).is_ok());
    }
}
