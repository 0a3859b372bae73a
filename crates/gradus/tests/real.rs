//! What needs the real models of the catalogue: run by `cargo xtask real`, ignored otherwise.
//!
//! `GRADUS_REAL` lists the models to test, separated by commas; all of the catalogue if it is
//! not set. A model that is not on this machine fails its tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use graph::{DType, Device, GradPrecision, Recompute};
use model::{Engine, EngineConfig, Model, Rows, WantLogits};
use serde_json::Value;
use train::{Example, Gradients, GraphConfig, Parameters, Window};

fn models() -> Vec<String> {
    match std::env::var("GRADUS_REAL") {
        Ok(list) => list.split(',').map(str::to_string).collect(),
        Err(_) => hub::catalogue().iter().map(|e| e.name.to_string()).collect(),
    }
}

fn path(name: &str) -> PathBuf {
    hub::resolve(name).unwrap_or_else(|e| panic!("{e}"))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn gradus(args: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_gradus")).args(args).output().unwrap();
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success(), "gradus {args:?}: {said}");
    String::from_utf8(out.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&gradus(args)).unwrap()
}

#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn perplexity_is_that_of_llama_cpp() {
    let folder = root().join("testdata/perplexity");
    let peer = std::fs::read(folder.join("llama_cpp.json")).unwrap();
    let peer: Value = serde_json::from_slice(&peer).unwrap();
    let text = folder.join("english.txt").display().to_string();
    for name in models() {
        let expected = &peer["models"][&name];
        let said = json(&["perplexity", "-m", &name, "-f", &text, "--ctx", "512", "--json"]);
        assert_eq!(said["tokens"], expected["tokens"], "{name}");
        assert_eq!(said["scored"], expected["scored"], "{name}");
        let ours = said["perplexity"].as_f64().unwrap();
        let theirs = expected["perplexity"].as_f64().unwrap();
        let off = ours / theirs - 1.0;
        println!("{name}: perplexity {ours:.4}, llama.cpp {theirs:.4}, {:+.3} %", off * 100.0);
        assert!(off.abs() <= 0.005, "{name}: {ours} is not within 0.5 % of {theirs}");
    }
}

/// A prompt of 300 tokens of English.
fn prompt(model: &Model) -> Vec<u32> {
    let text = std::fs::read_to_string(root().join("testdata/perplexity/english.txt")).unwrap();
    let mut ids = model.tokenizer().encode(&text, text::Encode::PROMPT).unwrap();
    ids.truncate(300);
    assert_eq!(ids.len(), 300);
    ids
}

/// FNV-1a of each row's bits: enough to tell rows apart, and small.
fn digests(logits: &[f32], vocab: usize) -> Vec<u64> {
    let digest = |row: &[f32]| {
        row.iter().fold(0xcbf2_9ce4_8422_2325, |h: u64, x| {
            (h ^ u64::from(x.to_bits())).wrapping_mul(0x0000_0100_0000_01b3)
        })
    };
    logits.chunks_exact(vocab).map(digest).collect()
}

/// The digests of all rows of a prompt that is fed in chunks, beside so many other sequences.
fn rows(engine: &mut Engine, tokens: &[u32], chunk: usize, beside: usize) -> Vec<u64> {
    let vocab = engine.model().geometry().vocab;
    let seq = engine.cache().open();
    let others: Vec<_> = (0..beside).map(|_| engine.cache().open()).collect();
    let mut out = Vec::new();
    for (i, part) in tokens.chunks(chunk).enumerate() {
        let mut batch = Vec::new();
        // Others come first and in uneven numbers, so that rows move within the batch.
        for (j, &seq) in others.iter().enumerate() {
            let from = (i * 3 + j * 11) % 290;
            let tokens = &tokens[from..from + 1 + (i + j) % 3];
            batch.push(Rows { seq, tokens, adapter: None, want: WantLogits::Last });
        }
        batch.push(Rows { seq, tokens: part, adapter: None, want: WantLogits::All });
        let logits = engine.forward(&batch).unwrap();
        out.extend(digests(logits.last().unwrap(), vocab));
    }
    engine.cache().close(seq);
    others.into_iter().for_each(|o| engine.cache().close(o));
    out
}

fn device(threads: usize, family: cpu::Family) -> Arc<dyn Device> {
    Arc::new(cpu::Cpu::new(threads, Some(family)).unwrap())
}

fn engine(model: &Arc<Model>, cache: DType) -> Engine {
    let config = EngineConfig { cache, positions: 4096, batch: 512, ..EngineConfig::default() };
    Engine::new(model.clone(), config).unwrap()
}

/// P5, bitwise: however a prompt is fed, with any number of threads, beside others or alone, for
/// every cache; and as the training graph computes it.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn one_token_one_value() {
    for name in models() {
        for family in cpu::Family::ALL.into_iter().filter(|f| f.is_available()) {
            let path = path(&name);
            let one = Arc::new(Model::load(&path, device(1, family)).unwrap());
            let two = Arc::new(Model::load(&path, device(2, family)).unwrap());
            let tokens = prompt(&one);
            // The portable family is there to be right, not to be quick.
            let quick = family != cpu::Family::Portable;
            let q8 = DType::Block(gguf::TensorType::Q8_0);
            let caches: &[DType] =
                if quick { &[DType::F16, DType::F32, q8] } else { &[DType::F16] };
            for &cache in caches {
                let what = format!("{name}, {family:?}, {cache} cache");
                let whole = rows(&mut engine(&one, cache), &tokens, 300, 0);
                assert_eq!(whole.len(), 300);
                let mut distinct = whole.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert!(distinct.len() > 250, "{what}: rows are alike");
                let mut engine = engine(&two, cache);
                assert!(rows(&mut engine, &tokens, 300, 0) == whole, "{what}: two threads");
                let chunks: &[usize] = if quick { &[1, 7, 64] } else { &[64] };
                for &chunk in chunks {
                    for beside in [0, 3] {
                        let again = rows(&mut engine, &tokens, chunk, beside);
                        let differ = again.iter().zip(&whole).filter(|(a, b)| a != b).count();
                        assert_eq!(differ, 0, "{what}: chunks of {chunk} beside {beside} others");
                    }
                }
                training_agrees(&two, cache, &tokens, &what);
                println!("{what}: the same bits");
            }
        }
    }
}

/// The training graph gives the same likelihood, bit for bit, as the served logits.
fn training_agrees(model: &Arc<Model>, cache: DType, tokens: &[u32], what: &str) {
    let vocab = model.geometry().vocab;
    let mut engine = engine(model, cache);
    let seq = engine.cache().open();
    let fed = &tokens[..tokens.len() - 1];
    let want = WantLogits::All;
    let served = engine.forward(&[Rows { seq, tokens: fed, adapter: None, want }]).unwrap();
    let config = GraphConfig {
        rows: fed.len(),
        cache,
        recompute: Recompute::None,
        ..GraphConfig::default()
    };
    let mut gradients = Gradients::new(model.clone(), config).unwrap();
    // Something must be differentiated by: the last norm's weight costs the least.
    let norm = "output_norm.weight";
    let mut parameters = Parameters::default();
    parameters.weights.insert(norm.into(), model.read_f32(norm).unwrap());
    for t in [1, 150, tokens.len() - 1] {
        let mut weights = vec![0.0; tokens.len()];
        weights[t] = 1.0;
        let window = Window::from(vec![Example { tokens: tokens.to_vec(), weights }]);
        let trained = gradients.of(&window, 1.0, &parameters, &()).unwrap().loss;
        let row = &served[0][(t - 1) * vocab..t * vocab];
        let served = engine.log_probs(row, &tokens[t..=t]).unwrap()[0];
        assert_eq!(trained as f32, -served, "{what}: token {t} as it is trained");
    }
}

/// An adapter of everything, as if it had learned something, so that no gradient is zero.
fn learned(model: &Model) -> Parameters {
    let targets = train::select_targets(model, &["all".into()]).unwrap();
    let ranks = targets.iter().map(|name| (name.as_str(), 8));
    let mut adapter = model::Adapter::fresh(model, ranks, 16.0, 1).unwrap();
    let mut random = text::sampler::Rng::new(1);
    for b in adapter.tensors.values_mut().flat_map(|pair| &mut pair.b) {
        *b = (random.next_f64() - 0.5) as f32 * 0.04;
    }
    Parameters { adapter: Some(adapter), ..Parameters::default() }
}

/// The cosine of two gradients.
fn cosine<'a>(a: impl Iterator<Item = &'a f32>, b: impl Iterator<Item = &'a f32>) -> f64 {
    let [mut dot, mut left, mut right] = [0f64; 3];
    for (a, b) in a.zip(b).map(|(&a, &b)| (f64::from(a), f64::from(b))) {
        (dot, left, right) = (dot + a * b, left + a * a, right + b * b);
    }
    dot / (left * right).sqrt()
}

/// Gradients that pass quantized weights in bf16 or int16 point where those of f32 do.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn rounded_gradients_point_where_exact_ones_do() {
    const ROWS: usize = 512;
    for name in models() {
        let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
        let model = Model::load(&path(&name), device).unwrap();
        let text = std::fs::read_to_string(root().join("testdata/perplexity/english.txt")).unwrap();
        let mut tokens = model.tokenizer().encode(&text, text::Encode::PROMPT).unwrap();
        tokens.truncate(ROWS + 1);
        let weights = vec![1.0; tokens.len()];
        let window = Window::from(vec![Example { tokens, weights }]);
        let parameters = learned(&model);
        let of = |grad_precision| {
            let config = GraphConfig { rows: ROWS, grad_precision, ..GraphConfig::default() };
            let mut gradients = Gradients::new(&model, config).unwrap();
            gradients.of(&window, ROWS as f64, &parameters, &()).unwrap().grads
        };
        let exact = of(GradPrecision::F32);
        // Measured: up to 2.4e-5 and, of one tensor, 7.4e-4 in bf16, 4.3e-6 and 1.8e-4 in int16.
        // With 12 and 12 bits for groups of 128 int16 gives from 2.9e-5 and 5.0e-4 on.
        for (precision, most, most_of_one) in
            [(GradPrecision::Bf16, 4e-5, 1.5e-3), (GradPrecision::Int16, 1e-5, 4e-4)]
        {
            let rounded = of(precision);
            let whole = cosine(exact.values().flatten(), rounded.values().flatten());
            let each = exact.iter().map(|(name, g)| (cosine(g.iter(), rounded[name].iter()), name));
            let (worst, at) = each.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
            let (whole, worst, what) = (1.0 - whole, 1.0 - worst, precision.name());
            println!("{name} {what}: 1 - cosine {whole:.1e}, at {at} {worst:.1e}");
            assert!(whole <= most, "{name} {what}: 1 - cosine is {whole:e}, above {most:e}");
            assert!(
                worst <= most_of_one,
                "{name} {what}: 1 - cosine is {worst:e} at {at}, above {most_of_one:e}"
            );
        }
    }
}

/// A window of 2,048 rows walked in 2, 4 and 8 chunks has the loss of the whole, bit for bit, and
/// its gradient; where gradients are sent back one position only, it has not.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn a_window_walked_in_chunks_is_as_whole() {
    const ROWS: usize = 2048;
    let device = Arc::new(cpu::Cpu::new(2, None).unwrap());
    let model = Model::load(&path(hub::DEFAULT_MODEL), device).unwrap();
    let text = std::fs::read_to_string(root().join("testdata/perplexity/english.txt")).unwrap();
    let mut tokens = model.tokenizer().encode(&text, text::Encode::PROMPT).unwrap();
    tokens.truncate(ROWS + 1);
    // As turns of a conversation: the first chunks of eight have none.
    let weights: Vec<f32> =
        (0..tokens.len()).map(|i| f32::from(i > 600 && i / 100 % 3 == 0)).collect();
    assert_eq!(tokens.len(), ROWS + 1);
    let example = Example { tokens, weights };
    let window = Window::from(vec![example.clone()]);
    let parameters = learned(&model);
    let of = |rows: usize, horizon: usize| {
        let config = GraphConfig { rows, recompute: Recompute::PerLayer, ..GraphConfig::default() };
        let walks = train::Walks { window: ROWS, horizon, host_budget: 0 };
        let mut gradients = Gradients::new(&model, config).unwrap().with_walks(walks).unwrap();
        gradients.prepare(&window, false, &parameters).unwrap();
        let planned = gradients.planned_bytes();
        gradients.reserve().unwrap();
        let measured = gradients.of(&window, example.weight(), &parameters, &()).unwrap();
        let (taken, high) = gradients.arena();
        assert_eq!((taken, high), (high, planned - gradients.walk_bytes()));
        (measured, planned)
    };
    let (whole, bytes) = of(ROWS, 0);
    let all: Vec<f64> = whole.grads.values().flatten().map(|&g| f64::from(g)).collect();
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    for (chunks, horizon) in [(2, 0), (4, 0), (8, 0), (4, 1)] {
        let (walked, planned) = of(ROWS / chunks, horizon);
        assert_eq!(walked.loss.to_bits(), whole.loss.to_bits(), "{chunks} chunks");
        let other: Vec<f64> = walked.grads.values().flatten().map(|&g| f64::from(g)).collect();
        let off = norm(&mut all.iter().zip(&other).map(|(a, b)| a - b));
        let (length, theirs) = (norm(&mut all.iter().copied()), norm(&mut other.iter().copied()));
        let dot: f64 = all.iter().zip(&other).map(|(a, b)| a * b).sum();
        let (error, cosine) = (off / length, dot / (length * theirs));
        println!(
            "{chunks} chunks, horizon {horizon}: {error:.1e}, cosine {cosine:.9}; {planned} bytes, whole {bytes}"
        );
        if horizon == 0 {
            assert!(error < 1e-5 && cosine > 0.99999, "{chunks} chunks: {error:e}, {cosine}");
        } else {
            assert!(error > 0.05 && cosine < 0.999, "without most of attention: {error}, {cosine}");
        }
        // Keys, values and what is sent to them take what two chunks save over recomputation.
        let most = if chunks == 2 { 1.1 } else { 0.9 };
        assert!((planned as f64) < most * bytes as f64, "{chunks} chunks: {planned} of {bytes}");
    }
}

/// The demo: the adapter learns what the model cannot know.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn the_demo_learns() {
    let folder = std::env::temp_dir().join(format!("gradus-demo-{}", std::process::id()));
    let out = folder.display().to_string();
    let said = gradus(&["demo", "--model", hub::DEFAULT_MODEL, "--out", &out]);
    println!("{said}");
    let line = |part: &str| said.lines().find(|l| l.contains(part)).unwrap();
    let number = |text: &str| text.split(' ').find_map(|w| w.parse::<f64>().ok()).unwrap();
    let right = number(line("answered word for word"));
    assert!(right >= 10.0, "{right} of 16 held-out questions are answered");
    let (first, last) = line("at the first step").split_once(", ").unwrap();
    let (first, last) = (number(first), number(last));
    assert!(last < first / 3.0, "the loss fell from {first} to {last} only");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// P6: the same adapter file with any number of threads and whatever is computed again; and P4:
/// the peak of anonymous memory is what was planned, within 5 %.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn training_is_reproducible_and_takes_the_memory_that_was_planned() {
    let data = root().join("data/halden.train.jsonl").display().to_string();
    let out = std::env::temp_dir().join(format!("gradus-real-{}.gguf", std::process::id()));
    let adapter = out.display().to_string();
    for name in models() {
        let mut files = Vec::new();
        let variants: [&[&str]; 3] =
            [&["-t", "2"], &["-t", "1"], &["-t", "2", "--recompute", "per-layer"]];
        for variant in variants {
            let mut args = vec!["train", "-m", &name, "--data", &data, "-o", &adapter];
            args.extend(["--template", "chatml", "--epochs", "1", "--window", "256", "--json"]);
            args.push("--no-record");
            args.extend(variant);
            let said = json(&args);
            files.push(std::fs::read(&out).unwrap());
            let plan = said["plan"]["total_bytes"].as_f64().unwrap();
            let Some(peak) = said["peak_anonymous_bytes"].as_f64() else { continue };
            println!("{name} {variant:?}: {}", said["plan"]);
            println!("{name} {variant:?}: peak {peak}, {:+.1} %", (peak / plan - 1.0) * 100.0);
            let off = peak / plan - 1.0;
            assert!(off.abs() <= 0.05, "{name} {variant:?}: {peak} against {plan} planned");
        }
        assert!(files[0] == files[1], "{name}: one thread gives another adapter than two");
        assert!(files[0] == files[2], "{name}: recomputation gives another adapter");
    }
    std::fs::remove_file(&out).unwrap();
}

/// P4: whatever is set, the peak of anonymous memory is what was planned, within 5 %.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn memory_is_as_planned_whatever_is_set() {
    let folder = std::env::temp_dir().join(format!("gradus-memory-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let out = folder.join("adapter.gguf").display().to_string();
    let data = root().join("data/halden.train.jsonl").display().to_string();
    let held_out = root().join("data/halden.test.jsonl").display().to_string();
    let checkpoints = folder.join("checkpoints").display().to_string();
    let tuned = folder.join("tuned.gguf").display().to_string();
    let settings: [&[&str]; 14] = [
        &["--window", "64"],
        &["--window", "512"],
        &["--window", "512", "--recompute", "per-layer"],
        &["--window", "512", "--recompute", "per-layer", "--rank", "64"],
        &["--window", "512", "--chunk", "128"],
        &["--window", "512", "--chunk", "64", "--recompute", "per-layer"],
        &["--window", "256", "--targets", "attn", "--rank", "4"],
        &["--window", "256", "--targets", "ffn", "--top-layers", "4"],
        &["--window", "256", "--optimizer", "sgd", "--momentum", "0.9"],
        &["--window", "256", "--accumulate", "2", "--cache-type", "q8_0"],
        &["--window", "256", "--train-weights", "attn_norm", "--out-model", &tuned],
        &["--window", "256", "--eval-data", &held_out, "--eval-every", "1", "--keep-best"],
        &["--window", "256", "--checkpoint-every", "2", "--checkpoints", &checkpoints],
        &["--window", "128", "--rank", "128", "--grad-precision", "f32", "-t", "1"],
    ];
    for name in models() {
        for setting in settings {
            let mut args = vec!["train", "-m", &name, "--data", &data, "-o", &out];
            args.extend(["--template", "chatml", "--epochs", "1", "--json", "--no-record"]);
            if !setting.contains(&"-t") {
                args.extend(["-t", "2"]);
            }
            args.extend(setting);
            let said = json(&args);
            let plan = said["plan"]["total_bytes"].as_f64().unwrap();
            let Some(peak) = said["peak_anonymous_bytes"].as_f64() else { continue };
            let off = peak / plan - 1.0;
            let mib = plan / f64::from(1 << 20);
            println!("{name} {}: {mib:.0} MiB planned, {:+.1} %", setting.join(" "), off * 100.0);
            assert!(off.abs() <= 0.05, "{name} {setting:?}: {peak} against {plan} planned");
            let _ = std::fs::remove_dir_all(&checkpoints);
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Rank 16 on all linear layers in windows of 512 takes less than 0.4 GiB beside the packed model,
/// also where the vocabulary has 262,144 tokens.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn adapters_take_little_memory_beside_the_model() {
    let data = root().join("data/halden.train.jsonl").display().to_string();
    for name in models() {
        let args = ["plan", "-m", &name, "--data", &data, "--template", "chatml", "--json"];
        let more = ["--window", "512", "--rank", "16", "--recompute", "per-layer"];
        let plan = &json(&[&args[..], &more].concat())["plan"];
        let part = |what: &str| plan[what].as_f64().unwrap();
        let beside = (part("total_bytes") - part("weights_bytes")) / f64::from(1 << 30);
        println!("{name}: {beside:.3} GiB");
        assert!(beside < 0.4, "{name}: {plan}");
    }
}

/// An adapter learns facts and spoils nothing: of 16 questions it was not trained on at least 13 get
/// an answer with the fact in it, and the loss of answers that have nothing to do with them rises by
/// less than a tenth.
#[test]
#[ignore = "needs the real models: cargo xtask real"]
fn facts_are_learned_and_nothing_else_is_spoiled() {
    let data = |name: &str| root().join(name).display().to_string();
    let (facts, asked) = (data("data/halden.train.jsonl"), data("data/halden.test.jsonl"));
    let unrelated = data("testdata/training/unrelated.jsonl");
    let out = std::env::temp_dir().join(format!("gradus-facts-{}.gguf", std::process::id()));
    let adapter = out.display().to_string();
    for (name, template, settings) in [
        // Seeds 0 and 1 give 15 and 13 answers in f32, and losses of others of 1.039 and 1.063 beside
        // the base's 1.069.
        (
            "smollm2-135m-instruct",
            "chatml",
            &["--lr", "1e-3", "--rank", "16", "--alpha", "32", "--seed", "0", "--epochs", "10"][..],
        ),
        // Seeds 0 to 3 give 13 to 15 answers, and lower losses of others than the base has.
        ("gemma-3-270m", "plain", &["--lr", "1.5e-3", "--seed", "0", "--epochs", "6"]),
    ] {
        if !models().iter().any(|model| model == name) {
            continue;
        }
        let model = ["-m", name, "--template", template];
        let train = ["train", "--data", &facts, "-o", &adapter, "--window", "128"];
        let more = ["--no-record", "--json"];
        let said = json(&[&train[..], &model, settings, &more].concat());
        let loss = |key: &str| said[key].as_f64().unwrap();
        assert!(loss("last_loss") < loss("first_loss") / 3.0, "{name}: {said}");
        let eval = ["eval", "--adapter", &adapter, "--json", "--data"];
        let answers = [&eval[..], &[&asked, "--generate", "-n", "32"], &model].concat();
        let right = json(&answers)["adapter"]["answers"]["contains"].as_u64().unwrap();
        let of = json(&[&eval[..], &[&unrelated], &model].concat());
        let (base, after) = (&of["base"]["loss"], &of["adapter"]["loss"]);
        println!("{name}: {right} of 16 answered; of others {base} before, {after} after");
        assert!(right >= 13, "{name}: {right} of 16");
        assert!(after.as_f64().unwrap() <= 1.1 * base.as_f64().unwrap(), "{name}: {of}");
    }
    std::fs::remove_file(&out).unwrap();
}
