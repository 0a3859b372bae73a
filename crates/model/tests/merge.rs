//! Merged models: what they answer, what of the file stays as it is, and merges that would lose
//! the adapter.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)] // helpers of tests may panic

use std::borrow::Cow;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gguf::{Gguf, TensorInfo, TensorType, Value};
use graph::{Code, DType};
use model::toy::Toy;
use model::{
    Adapter, Engine, EngineConfig, Error, MergeConfig, MergedTensor, Model, Rows, Skeleton,
    WantLogits, merge,
};
use testkit::{Golden, Random, fixture, relative_l2};

/// A file that goes with the test.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Temporary {
        let name = format!("gradus-merge-{name}-{}.gguf", std::process::id());
        Temporary(std::env::temp_dir().join(name))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn config(ty: Option<TensorType>) -> MergeConfig {
    MergeConfig { ty, force: false, name: "facts".into(), threads: 2 }
}

fn run(
    model: &Path,
    adapter: &Adapter,
    out: &Path,
    config: &MergeConfig,
) -> Result<Vec<MergedTensor>, Error> {
    merge(&Skeleton::open(model).unwrap(), adapter, out, config, &mut |_, _| {})
}

/// Logits of the oracle's first sequence.
fn logits(model: &Path, adapter: Option<&Adapter>, tokens: &[u32]) -> Vec<f32> {
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let model = Arc::new(Model::load(model, device).unwrap());
    let config = EngineConfig { cache: DType::F32, positions: 64, batch: 64, states: 2 };
    let mut engine = Engine::new(model, config).unwrap();
    let adapter = adapter.map(|a| engine.attach(Arc::new(a.clone())));
    let seq = engine.cache().open();
    let rows = Rows { seq, tokens, adapter, want: WantLogits::All };
    engine.forward(&[rows]).unwrap().remove(0)
}

fn far(a: &[f32], b: &[f32]) -> f64 {
    let b: Vec<f64> = b.iter().map(|&b| f64::from(b)).collect();
    relative_l2(a, &b)
}

#[test]
fn f19_a_merged_model_answers_as_the_adapter_does() {
    for arch in
        ["gemma3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe"]
    {
        let model = fixture(arch, "model.gguf");
        let skeleton = Skeleton::open(&model).unwrap();
        let adapter = Adapter::read_for(&fixture(arch, "adapter.gguf"), &skeleton.base()).unwrap();
        let out = Temporary::new(arch);
        let report = run(&model, &adapter, &out.0, &config(None)).unwrap();
        assert_eq!(report.len(), adapter.tensors.len());
        assert!(report.iter().all(|t| t.to == TensorType::F32 && t.lost < 0.001), "{report:?}");
        let golden = Golden::read(&fixture(arch, "golden.safetensors")).unwrap();
        let tokens = golden.get("tokens.0").unwrap();
        let tokens: Vec<u32> = tokens.iter().map(|&t| t as u32).collect();
        let merged = logits(&out.0, None, &tokens);
        let with = logits(&model, Some(&adapter), &tokens);
        let without = logits(&model, None, &tokens);
        let error = far(&merged, &with);
        assert!(error < 1e-5, "{arch}: {error:e}");
        let error = relative_l2(&merged, &golden.get("lora.logits.0").unwrap());
        assert!(error < 1e-5, "{arch}, golden: {error:e}");
        assert!(far(&merged, &without) > 0.1, "{arch}: the base model's answers");
    }
    // In eight bits: as close as eight bits are.
    let model = fixture("llama", "model.gguf");
    let skeleton = Skeleton::open(&model).unwrap();
    let adapter = Adapter::read_for(&fixture("llama", "adapter.gguf"), &skeleton.base()).unwrap();
    let out = Temporary::new("q8_0");
    let report = run(&model, &adapter, &out.0, &config(Some(TensorType::Q8_0))).unwrap();
    assert!(report.iter().all(|t| t.to == TensorType::Q8_0 && t.from == TensorType::F32));
    assert!(report.iter().all(|t| t.error < 0.1 && t.change > 0.05), "{report:?}");
    let tokens: Vec<u32> = (0..24).map(|i| i * 7 % 320).collect();
    let (merged, with) = (logits(&out.0, None, &tokens), logits(&model, Some(&adapter), &tokens));
    // Rows that meet weights of eight bits are rounded to eight bits too.
    let (error, moved) = (far(&merged, &with), far(&with, &logits(&model, None, &tokens)));
    assert!(error < 0.06 && moved > 0.5, "{error} {moved}");
}

/// A toy on the disk, and an adapter whose change has about this size relative to the weights.
fn toy(name: &str, arch: &str, ty: TensorType, size: f32) -> (Temporary, Adapter) {
    let file = Temporary::new(&format!("{name}-base"));
    let toy = Toy::new(arch, ty, 3);
    toy.write(&file.0).unwrap();
    let device = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let model = Model::load(&file.0, device).unwrap();
    let wanted = |name: &&String| name.contains("attn_q.") || name.contains("_exps.");
    let targets: Vec<&String> = model.projections().keys().filter(wanted).collect();
    let pairs = targets.iter().map(|t| (t.as_str(), 4));
    let mut adapter = Adapter::fresh(&model, pairs, 4.0, 1).unwrap();
    let mut random = Random::new(9);
    for (target, t) in &mut adapter.tensors {
        let weights = model.read_f32(target).unwrap();
        let rms = |x: &[f32]| (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
        let (weights, a) = (rms(&weights), rms(&t.a));
        t.b.iter_mut().for_each(|b| *b = size * weights / a / 2.0 * random.normal());
    }
    (file, adapter)
}

#[test]
fn f20_a_merge_that_would_lose_the_adapter_is_refused() {
    let (file, adapter) = toy("lost", "llama", TensorType::Q4_0, 0.02);
    let out = Temporary::new("lost");
    let Err(Error::Graph(refusal)) = run(&file.0, &adapter, &out.0, &config(None)) else {
        panic!("merged");
    };
    let text = refusal.to_string();
    assert_eq!(refusal.code(), Code::MergeErases);
    assert_eq!(refusal.code().exit_code(), 2);
    assert!(text.contains("`blk.") && text.contains("attn_q.weight`"), "{text}");
    assert!(text.contains("in 2 of 2 tensors") && text.contains("`--force`"), "{text}");
    assert!(!out.0.exists(), "nothing is left");

    // The type that it names keeps it.
    let named = text.split("`--type ").nth(1).unwrap().split('`').next().unwrap();
    let ty = TensorType::from_name(named).unwrap();
    let report = run(&file.0, &adapter, &out.0, &config(Some(ty))).unwrap();
    assert!(report.iter().all(|t| t.lost <= 0.5 && t.to == ty && t.from == TensorType::Q4_0));
    assert!(report.iter().all(|t| (0.005..0.05).contains(&t.change)), "{report:?}");

    // By force, what it warned of comes to pass: hardly a weight is another.
    let forced = MergeConfig { force: true, ..config(None) };
    let report = run(&file.0, &adapter, &out.0, &forced).unwrap();
    assert!(report.iter().all(|t| t.lost > 0.9 && t.error > 0.8), "{report:?}");

    // One that changes a lot needs no force.
    let (file, adapter) = toy("much", "llama", TensorType::Q4_0, 1.0);
    let report = run(&file.0, &adapter, &out.0, &config(None)).unwrap();
    assert!(report.iter().all(|t| t.lost < 0.5 && t.error < 0.5), "{report:?}");
    // A type of which rows are no whole blocks, and one that is not made here.
    let model = fixture("llama", "model.gguf");
    let skeleton = Skeleton::open(&model).unwrap();
    let small = Adapter::read_for(&fixture("llama", "adapter.gguf"), &skeleton.base()).unwrap();
    let error = run(&model, &small, &out.0, &config(Some(TensorType::Q4K))).unwrap_err();
    assert!(error.to_string().contains("no whole blocks of 256 of Q4_K"), "{error}");
    let (file, adapter) = toy("q3", "llama", TensorType::Q3K, 1.0);
    let error = run(&file.0, &adapter, &out.0, &config(None)).unwrap_err().to_string();
    assert!(
        error.contains("is Q3_K, which is not made here") && error.contains("--type"),
        "{error}"
    );
    // The model itself is not written over.
    let error = run(&file.0, &adapter, &file.0, &config(Some(TensorType::F16))).unwrap_err();
    assert!(error.to_string().contains("is the model itself"), "{error}");
}

/// An adapter on these tensors whose change has about this size relative to the weights.
fn small(file: &Path, targets: &[&str], size: f32) -> Adapter {
    let model = Model::load(file, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap();
    let mut adapter = Adapter::fresh(&model, targets.iter().map(|t| (*t, 4)), 4.0, 1).unwrap();
    let mut random = Random::new(9);
    for (target, t) in &mut adapter.tensors {
        let weights = model.read_f32(target).unwrap();
        let rms = |x: &[f32]| (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt();
        let (weights, a) = (rms(&weights), rms(&t.a));
        t.b.iter_mut().for_each(|b| *b = size * weights / a / 2.0 * random.normal());
    }
    adapter
}

/// The type that a refused merge names.
fn advised(file: &Path, adapter: &Adapter, out: &Path, config: &MergeConfig) -> TensorType {
    let text = run(file, adapter, out, config).unwrap_err().to_string();
    assert!(!out.exists(), "nothing is left");
    let named = text.split("`--type ").nth(1).unwrap_or_else(|| panic!("{text}"));
    TensorType::from_name(named.split('`').next().unwrap()).unwrap()
}

/// What a refusal names is for all tensors that change, as `--type` is: their rows are whole blocks
/// of it, and none loses its change by it, also none that would have kept it as it was.
#[test]
fn the_type_that_is_advised_keeps_every_changed_tensor() {
    let (file, out) = (Temporary::new("advice-base"), Temporary::new("advice"));
    let targets = ["blk.0.attn_q.weight", "blk.1.ffn_down.weight"];
    let toy = |ty| Toy { width: 288, ffn: 512, heads: 4, ..Toy::new("llama", ty, 3) };
    let of = |ty| Gguf::from_bytes("toy.gguf", toy(ty).gguf().unwrap()).unwrap();
    let (coarse, fine) = (of(TensorType::Q4_0), of(TensorType::F16));
    // Of all tensors Q4_0, and with one that is F16.
    for mixed in [false, true] {
        let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = coarse
            .tensors()
            .map(|t| match mixed && t.info.name == targets[0] {
                true => fine.require(&t.info.name).unwrap(),
                false => t,
            })
            .map(|t| (t.info.clone(), Cow::Borrowed(t.bytes)))
            .collect();
        fs::write(&file.0, gguf::encode(coarse.metadata(), tensors).unwrap()).unwrap();
        let mut types = Vec::new();
        for size in [0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.002] {
            let mut adapter = small(&file.0, &targets, size);
            // What is F16 changes by less than any block of eight bits shows.
            let factor = if mixed { 0.1 } else { 1.5 };
            let pair = adapter.tensors.get_mut(targets[0]).unwrap();
            pair.b.iter_mut().for_each(|b| *b *= factor);
            // By itself one would be kept by Q6_K, of which rows of 288 are no whole blocks.
            let down = adapter.tensors[targets[1]].clone();
            let alone = [(targets[1].to_string(), down)].into();
            let alone = Adapter { tensors: alone, ..adapter.clone() };
            types.push(advised(&file.0, &alone, &out.0, &config(None)));
            let ty = advised(&file.0, &adapter, &out.0, &config(None));
            let report = run(&file.0, &adapter, &out.0, &config(Some(ty)))
                .unwrap_or_else(|e| panic!("mixed {mixed}, {size}: {ty} was advised: {e}"));
            assert!(report.iter().all(|t| t.to == ty && t.lost <= 0.5), "{report:?}");
            fs::remove_file(&out.0).unwrap();
        }
        assert!(types.contains(&TensorType::Q6K), "{types:?}");
    }
}

/// A group beside one of weights 2000 times as large has a scale of 0 in its block: all of it is
/// stored as one value, and nothing of a change is left.
#[test]
fn a_group_that_is_stored_as_one_value_has_lost_its_change() {
    let (file, out) = (Temporary::new("zero-base"), Temporary::new("zero"));
    let target = "blk.0.attn_q.weight";
    let toy = Toy { width: 256, ..Toy::new("llama", TensorType::F32, 3) };
    let made = Gguf::from_bytes("toy.gguf", toy.gguf().unwrap()).unwrap();
    let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = made
        .tensors()
        .map(|t| {
            let mut bytes = t.bytes.to_vec();
            if t.info.name == target {
                let values = bytes.as_chunks_mut().0.iter_mut().enumerate();
                for (_, le) in values.filter(|(i, _)| i % 256 < 32) {
                    *le = (f32::from_le_bytes(*le) * 2000.0).to_le_bytes();
                }
            }
            (t.info.clone(), Cow::Owned(bytes))
        })
        .collect();
    fs::write(&file.0, gguf::encode(made.metadata(), tensors).unwrap()).unwrap();
    // Much of what the small weights are, and half a step of none of the large ones.
    let adapter = small(&file.0, &[target], 0.001);
    let ty = advised(&file.0, &adapter, &out.0, &config(Some(TensorType::Q4K)));
    assert!(ty.block_len() < 256, "{ty}");
    let forced = MergeConfig { force: true, ..config(Some(TensorType::Q4K)) };
    let report = run(&file.0, &adapter, &out.0, &forced).unwrap();
    assert!(report[0].lost > 0.8 && report[0].error > 1.0, "{report:?}");
}

#[test]
fn everything_else_of_the_file_stays_as_it_is() {
    for (arch, ty) in [("qwen3moe", TensorType::Q5K), ("llama", TensorType::Q8_0)] {
        let (file, mut adapter) = toy("rest", arch, ty, 0.5);
        // One expert that was never used.
        let stack = "blk.1.ffn_up_exps.weight";
        if let Some(t) = adapter.tensors.get_mut(stack) {
            let each = t.b.len() / 8;
            t.b[3 * each..4 * each].fill(0.0);
        }
        let out = Temporary::new("rest");
        run(&file.0, &adapter, &out.0, &config(None)).unwrap();
        let (before, after) = (Gguf::open(&file.0).unwrap(), Gguf::open(&out.0).unwrap());
        assert_eq!(before.tensors().len(), after.tensors().len());
        for (a, b) in before.tensors().zip(after.tensors()) {
            let name = &a.info.name;
            assert_eq!((name, a.info.ty, &a.info.shape), (&b.info.name, b.info.ty, &b.info.shape));
            assert_eq!(a.bytes == b.bytes, !adapter.tensors.contains_key(name), "{name}");
            if name == stack {
                let each = a.bytes.len() / 8;
                let expert = |e: usize| e * each..(e + 1) * each;
                assert!(a.bytes[expert(3)] == b.bytes[expert(3)]);
                assert!(a.bytes[expert(4)] != b.bytes[expert(4)]);
            }
        }
        let noted = ["general.base_model.count", "general.base_model.0.name", "general.finetune"];
        let kept: Vec<_> =
            after.metadata().iter().filter(|(key, _)| !noted.contains(key)).collect();
        assert!(before.metadata().iter().eq(kept), "{arch}");
        assert_eq!(after.metadata().str("general.finetune").unwrap(), "facts");
        let name = before.metadata().str("general.name").unwrap();
        assert_eq!(after.metadata().str("general.base_model.0.name").unwrap(), name);

        // The same bytes with any number of threads, and the same report.
        let again = Temporary::new("rest-again");
        let one = MergeConfig { threads: 1, ..config(None) };
        let three = MergeConfig { threads: 3, ..config(None) };
        let first = run(&file.0, &adapter, &again.0, &one).unwrap();
        assert!(fs::read(&again.0).unwrap() == fs::read(&out.0).unwrap());
        assert_eq!(first, run(&file.0, &adapter, &again.0, &three).unwrap());
    }
}

/// A weight that its type cannot hold is not stored as infinity.
#[test]
fn what_a_type_cannot_hold_is_refused() {
    let (file, mut adapter) = toy("huge", "llama", TensorType::F16, 0.5);
    let t = adapter.tensors.get_mut("blk.0.attn_q.weight").unwrap();
    t.b[0] = 1e9;
    let out = Temporary::new("huge");
    let error = run(&file.0, &adapter, &out.0, &config(None)).unwrap_err().to_string();
    assert!(
        error.contains("`blk.0.attn_q.weight` would hold") && error.contains("row 0"),
        "{error}"
    );
    assert!(!out.0.exists());
    let report = run(&file.0, &adapter, &out.0, &config(Some(TensorType::F32)));
    assert!(report.is_ok());
    fs::remove_file(&out.0).unwrap();
    // What is beyond f32 is in no type, and no other is advised; blocks would hold another value.
    let t = adapter.tensors.get_mut("blk.0.attn_q.weight").unwrap();
    t.b[0] = 1e30;
    t.a.fill(1e30);
    for ty in [TensorType::F32, TensorType::F16, TensorType::Q8_0] {
        let error = run(&file.0, &adapter, &out.0, &config(Some(ty))).unwrap_err().to_string();
        assert!(error.contains("would hold inf at row 0"), "{ty}: {error}");
        assert!(error.contains("no type can store") && !error.contains("--type"), "{ty}: {error}");
        assert!(!out.0.exists());
    }
}

/// PRIOR-ART C29: of a stack of experts the rank was read from the wrong dimension, and the merge
/// was too strong. Here neither rank, experts nor alpha are alike, and every weight of every expert
/// is compared with what it should be.
#[test]
fn bug_29_stacks_of_experts_are_merged_with_their_own_rank() {
    let (rank, experts, alpha) = (3, 8, 12.0);
    let (base, out, saved) =
        (Temporary::new("stack-base"), Temporary::new("stack"), Temporary::new("stack-adapter"));
    Toy::new("qwen3moe", TensorType::F32, 3).write(&base.0).unwrap();
    let device = Arc::new(cpu::Cpu::new(1, None).unwrap());
    let model = Model::load(&base.0, device).unwrap();
    let targets = model.projections().keys().filter(|name| name.contains("_exps."));
    let pairs = targets.map(|t| (t.as_str(), rank));
    let mut adapter = Adapter::fresh(&model, pairs, alpha, 1).unwrap();
    let mut random = Random::new(9);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.1 * random.normal());
        assert_eq!(pair.scale, 4.0);
    }
    // As people have it: read from a file.
    adapter.write(&saved.0, &model).unwrap();
    let read = Adapter::read(&saved.0, &model).unwrap();
    assert_eq!(run(&base.0, &read, &out.0, &config(None)).unwrap().len(), 6);
    let merged = Gguf::open(&out.0).unwrap();
    for (name, pair) in &adapter.tensors {
        let before = model.read_f32(name).unwrap();
        let after = merged.require(name).unwrap().to_f32().unwrap();
        let (width, rows) = (pair.a.len() / experts / rank, pair.b.len() / experts / rank);
        assert_eq!(before.len(), experts * rows * width);
        let mut expected = Vec::with_capacity(before.len());
        for e in 0..experts {
            for row in 0..rows {
                for k in 0..width {
                    let ba = (0..rank).map(|r| {
                        let a = f64::from(pair.a[(e * rank + r) * width + k]);
                        f64::from(pair.b[(e * rows + row) * rank + r]) * a
                    });
                    let w = f64::from(before[(e * rows + row) * width + k]);
                    expected.push(w + 4.0 * ba.sum::<f64>());
                }
            }
        }
        let (error, change) = (relative_l2(&after, &expected), relative_l2(&before, &expected));
        assert!(error < 1e-7 && change > 0.1, "{name}: {error:e} of a change of {change}");
    }
}

/// PRIOR-ART C30: the key that says how tensors are aligned was copied, the alignment was not, and
/// the file loaded nowhere.
#[test]
fn bug_30_a_merged_file_is_aligned_as_it_says() {
    const ALIGNMENT: usize = 64;
    // Vectors of 96 bytes: where tensors are all multiples of 64, nothing would show.
    let narrow = Toy { width: 24, ffn: 40, ..Toy::new("llama", TensorType::F16, 3) };
    let file = Gguf::from_bytes("toy.gguf", narrow.gguf().unwrap()).unwrap();
    let mut metadata = file.metadata().clone();
    metadata.insert("general.alignment", Value::U32(ALIGNMENT as u32));
    let tensors = file.tensors().map(|t| (t.info.clone(), Cow::Borrowed(t.bytes)));
    let tensors: Vec<(TensorInfo, Cow<'_, [u8]>)> = tensors.collect();
    let (aligned, out) = (Temporary::new("aligned-base"), Temporary::new("aligned"));
    fs::write(&aligned.0, gguf::encode(&metadata, tensors).unwrap()).unwrap();
    let model = Model::load(&aligned.0, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap();
    let targets = ["blk.0.attn_q.weight", "blk.1.ffn_up.weight"].map(|target| (target, 2));
    let mut adapter = Adapter::fresh(&model, targets, 4.0, 1).unwrap();
    let mut random = Random::new(9);
    for pair in adapter.tensors.values_mut() {
        pair.b.iter_mut().for_each(|b| *b = 0.1 * random.normal());
    }
    let report = run(&aligned.0, &adapter, &out.0, &config(None)).unwrap();
    assert_eq!(report.len(), adapter.tensors.len());
    let merged = Gguf::open(&out.0).unwrap();
    assert_eq!(merged.metadata().u32("general.alignment").unwrap() as usize, ALIGNMENT);
    // Where they really are.
    let bytes = fs::read(&out.0).unwrap();
    let find = |of: &[u8]| bytes.windows(of.len()).position(|w| w == of).unwrap();
    let mut at = Vec::new();
    for tensor in merged.tensors() {
        // Vectors of ones are found elsewhere.
        if tensor.bytes.chunks(4).all(|x| x == &tensor.bytes[..4]) {
            continue;
        }
        let start = find(&tensor.bytes[..tensor.bytes.len().min(256)]);
        assert_eq!(start % ALIGNMENT, 0, "{} at {start}", tensor.info.name);
        at.push(start);
    }
    assert!(at.len() > 10, "{} tensors are found", at.len());
    // And it loads.
    let tokens: Vec<u32> = (0..24).map(|i| i * 7 % 320).collect();
    let (merged, with) =
        (logits(&out.0, None, &tokens), logits(&aligned.0, Some(&adapter), &tokens));
    assert!(far(&merged, &with) < far(&merged, &logits(&aligned.0, None, &tokens)));
}

/// FIELD-REPORTS F56: merging into a base of four bits changed what the model says, without a word.
/// The merge says of every tensor what is lost, as it is; and in half precision it loses next to
/// nothing.
#[test]
fn f56_a_merge_reports_what_requantization_loses() {
    let (base, adapter) = toy("report", "llama", TensorType::Q4_0, 0.5);
    let tokens: Vec<u32> = (0..24).map(|i| i * 7 % 320).collect();
    let with = logits(&base.0, Some(&adapter), &tokens);
    let model = Gguf::open(&base.0).unwrap();
    let mut off = Vec::new();
    for (ty, most) in [(None, 0.3), (Some(TensorType::F16), 1e-2), (Some(TensorType::F32), 1e-6)] {
        let out = Temporary::new("report");
        let report = run(&base.0, &adapter, &out.0, &config(ty)).unwrap();
        assert_eq!(report.len(), adapter.tensors.len());
        let merged = Gguf::open(&out.0).unwrap();
        for t in &report {
            let pair = &adapter.tensors[&t.name];
            let before = model.require(&t.name).unwrap().to_f32().unwrap();
            let after = merged.require(&t.name).unwrap().to_f32().unwrap();
            let (rank, width) = (pair.rank, pair.a.len() / pair.rank);
            let (mut error, mut change) = (0.0, 0.0);
            for (i, (&before, &after)) in before.iter().zip(&after).enumerate() {
                let (row, k) = (i / width, i % width);
                let ba = (0..rank)
                    .map(|r| f64::from(pair.b[row * rank + r]) * f64::from(pair.a[r * width + k]));
                let delta = f64::from(pair.scale) * ba.sum::<f64>();
                change += delta * delta;
                error += (f64::from(after) - f64::from(before) - delta).powi(2);
            }
            let error = (error / change).sqrt();
            assert!((t.error - error).abs() < 1e-4 * error + 1e-7, "{t:?}: {error}");
            assert!(t.error < most && (ty.is_some() || t.error > 0.01), "{t:?}");
        }
        off.push(far(&logits(&out.0, None, &tokens), &with));
    }
    assert!(off[0] > 0.0);
    println!("logits are off by {off:?}");
}
