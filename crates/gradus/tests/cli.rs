//! The binary as its users meet it, on tiny models and without a network.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{
    Folder, Started, check_failure, facts, fails, fixture, gradus, json, ok, root, run,
    run_with_input, text,
};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

const COMMANDS: [&str; 19] = [
    "demo",
    "pull",
    "run",
    "chat",
    "serve",
    "train",
    "plan",
    "eval",
    "data",
    "adapter",
    "merge",
    "runs",
    "inspect",
    "tokenize",
    "perplexity",
    "bench",
    "check-grads",
    "dump",
    "make-toy",
];
const ARCHITECTURES: [&str; 8] =
    ["llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3", "qwen3_5", "qwen3_5_moe"];

/// An array of a safetensors file as f64.
fn array(file: &SafeTensors<'_>, name: &str) -> Option<(Vec<usize>, Vec<f64>)> {
    let view = file.tensor(name).ok()?;
    let data = view.data();
    let values = match view.dtype() {
        Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
        Dtype::F64 => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        _ => return None,
    };
    Some((view.shape().to_vec(), values))
}

/// Compares every array of `found` with the golden one: relative L2 at most 1e-4.
fn compare(found: &str, golden: &str, golden_name: impl Fn(&str) -> String) -> usize {
    let (found, golden) = (std::fs::read(found).unwrap(), std::fs::read(golden).unwrap());
    let found = SafeTensors::deserialize(&found).unwrap();
    let golden = SafeTensors::deserialize(&golden).unwrap();
    for name in found.names() {
        let (shape, values) = array(&found, name).unwrap();
        let wanted = golden_name(name);
        let (golden_shape, expected) =
            array(&golden, &wanted).unwrap_or_else(|| panic!("{wanted} is not golden"));
        assert_eq!(shape, golden_shape, "{name}");
        let norm: f64 = expected.iter().map(|e| e * e).sum::<f64>().sqrt();
        let off: f64 = values.iter().zip(&expected).map(|(v, e)| (v - e) * (v - e)).sum();
        let off = off.sqrt() / norm;
        assert!(off <= 1e-4, "{name}: relative L2 error {off:.2e}");
    }
    found.len()
}

#[test]
fn logits_are_golden() {
    let folder = Folder::new("logits");
    for arch in ARCHITECTURES {
        let (model, golden) = (fixture(arch, "model.gguf"), fixture(arch, "golden.safetensors"));
        let out = folder.file("o.safetensors");
        ok(&["dump", "logits", "-m", &model, "--tokens", &golden, "--out", &out, "-t", "2"]);
        assert_eq!(compare(&out, &golden, str::to_string), 2, "{arch}");

        let adapter = fixture(arch, "adapter.gguf");
        ok(&[
            "dump",
            "logits",
            "-m",
            &model,
            "--adapter",
            &adapter,
            "--tokens",
            &golden,
            "--out",
            &out,
        ]);
        assert_eq!(compare(&out, &golden, |n| format!("lora.{n}")), 2, "{arch}");
    }
}

#[test]
fn adapter_gradients_are_golden() {
    let folder = Folder::new("grads");
    for arch in ARCHITECTURES {
        let (model, golden) = (fixture(arch, "model.gguf"), fixture(arch, "golden.safetensors"));
        let adapter = fixture(arch, "adapter.gguf");
        let meta: Value =
            serde_json::from_slice(&std::fs::read(fixture(arch, "meta.json")).unwrap()).unwrap();
        let targets = meta["lora"]["targets"].as_array().unwrap().len();
        for extra in [None, Some("--recompute")] {
            let out = folder.file("g.safetensors");
            let mut args = vec!["dump", "grads", "-m", &model, "--adapter", &adapter];
            args.extend(["--tokens", &golden, "--out", &out]);
            args.extend(extra);
            ok(&args);
            let name = |n: &str| if n == "loss" { "lora.loss".into() } else { n.to_string() };
            assert_eq!(compare(&out, &golden, name), 2 * targets + 1, "{arch} {extra:?}");
        }
    }
}

#[test]
fn base_gradients_are_golden() {
    let folder = Folder::new("wrt");
    for arch in ARCHITECTURES {
        let (model, golden) = (fixture(arch, "model.gguf"), fixture(arch, "golden.safetensors"));
        let meta: Value =
            serde_json::from_slice(&std::fs::read(fixture(arch, "meta.json")).unwrap()).unwrap();
        let names: Vec<&str> = meta["base_grad_tensors"]
            .as_array()
            .unwrap()
            .iter()
            .map(|n| n.as_str().unwrap())
            .collect();
        let out = folder.file("g.safetensors");
        let wrt = names.join(",");
        ok(&["dump", "grads", "-m", &model, "--wrt", &wrt, "--tokens", &golden, "-o", &out]);
        assert_eq!(compare(&out, &golden, str::to_string), names.len() + 1, "{arch}");
    }
}

#[test]
fn tokens_may_come_as_json() {
    let folder = Folder::new("json");
    let (model, golden) = (fixture("llama", "model.gguf"), fixture("llama", "golden.safetensors"));
    let meta: Value =
        serde_json::from_slice(&std::fs::read(fixture("llama", "meta.json")).unwrap()).unwrap();
    let tokens = folder.write("tokens.json", meta["token_ids"].to_string());
    let out = folder.file("o.safetensors");
    ok(&["dump", "logits", "-m", &model, "--tokens", &tokens, "--out", &out]);
    assert_eq!(compare(&out, &golden, str::to_string), 2);

    let both: Vec<Value> = (0..2)
        .map(|i| serde_json::json!({ "tokens": meta["token_ids"][i], "labels": meta["labels"][i] }))
        .collect();
    let tokens = folder.write("labelled.json", Value::from(both).to_string());
    let wrt = "output_norm.weight";
    ok(&["dump", "grads", "-m", &model, "--wrt", wrt, "--tokens", &tokens, "--out", &out]);
    assert_eq!(compare(&out, &golden, str::to_string), 2);
}

#[test]
fn wrong_input_is_one_line_and_exit_code_1() {
    let folder = Folder::new("wrong");
    let model = fixture("llama", "model.gguf");
    let golden = fixture("llama", "golden.safetensors");
    let cut = folder.write("cut.gguf", &std::fs::read(&model).unwrap()[..5000]);
    let empty = folder.write("empty.gguf", "");
    let out = folder.file("o.safetensors");
    let m = model.as_str();

    fails(&["run", "-m", "no-such-model", "-p", "x"], 1, &["no-such-model", "smollm2"]);
    fails(&["run", "-m", "gemma-3-270m", "-p", "x"], 1, &["gradus pull gemma-3-270m"]);
    fails(&["run", "-m", "missing.gguf", "-p", "x"], 1, &["missing.gguf"]);
    fails(&["run", "-m", &cut, "-p", "x"], 1, &["cut.gguf", "cut or damaged"]);
    fails(&["inspect", &cut], 1, &["cut.gguf"]);
    fails(&["inspect", &empty], 1, &["empty.gguf"]);
    fails(&["tokenize", "-m", &golden, "x"], 1, &["golden.safetensors", "not a GGUF file"]);
    fails(&["run", "-m", m, "-p", "x", "--raw", "--temp", "-1"], 1, &["temperature", "-1"]);
    fails(&["run", "-m", m, "-p", "x", "--raw", "--temp", "1000"], 1, &["temperature", "0 to 100"]);
    // This vocabulary adds no BOS, so nothing is nothing.
    let qwen = fixture("qwen2", "model.gguf");
    fails(&["run", "-m", &qwen, "-p", "", "--raw"], 1, &["empty"]);
    fails(&["run", "-m", m, "-p", "x", "--raw", "--ctx", "100000"], 1, &["--ctx", "256"]);
    fails(&["run", "-m", m, "-p", "x", "--raw", "-t", "0"], 1, &["--threads", "0"]);
    fails(&["run", "-m", m, "-p", "x", "--raw", "--adapter", m], 1, &["general.type"]);
    fails(&["run", "-m", m, "-p", "x", "--logit-bias", "a=b"], 1, &["--logit-bias", "ID=X"]);
    fails(&["run", "-m", m, "-p", "x", "--frobnicate"], 1, &["--frobnicate"]);
    fails(&["train", "-m", m], 1, &["--data"]);
    fails(&["frobnicate"], 1, &["frobnicate"]);
    fails(&["pull", "no-such-model"], 1, &["no-such-model"]);
    fails(&["tokenize", "-m", m, "--ids-to-text", "7 x"], 1, &["`x` is no token id"]);
    fails(&["tokenize", "-m", m, "--ids-to-text", "999999"], 1, &["999999"]);
    fails(&["check-grads", "--op", "nothing"], 1, &["nothing", "MatMul"]);
    fails(&["bench", "-m", m, "-p", "1000"], 1, &["256"]);

    let dump = |tokens: &str, parts: &[&str]| {
        fails(&["dump", "logits", "-m", m, "--tokens", tokens, "-o", &out], 1, parts);
    };
    dump("missing.json", &["missing.json"]);
    dump(m, &["model.gguf", "safetensors"]);
    dump(&folder.write("t.json", "[[1, 99999]]"), &["99999"]);
    dump(&folder.write("t.json", "[[1, -1]]"), &["t.json", "-1"]);
    dump(&folder.write("t.json", "[[1], []]"), &["t.json", "entry 1"]);
    let tokens = folder.write("t.json", "[[1, 2]]");
    let grads = |extra: &[&str], parts: &[&str]| {
        let mut args = vec!["dump", "grads", "-m", m, "--tokens", &tokens, "-o", &out];
        args.extend(extra);
        fails(&args, 1, parts);
    };
    grads(&[], &["--adapter", "--wrt"]);
    grads(&["--wrt", "output_norm.weight"], &["labels"]);
    assert!(!Path::new(&out).exists(), "a failed dump left a file");

    let data = folder.write("d.jsonl", "{\"messages\": [{\"content\": \"x\"}]}\n");
    let train = |data: &str, extra: &[&str], parts: &[&str]| {
        let adapter = folder.file("a.gguf");
        let mut args = vec!["train", "-m", m, "--data", data, "-o", &adapter];
        if !extra.contains(&"--template") {
            args.extend(["--template", "plain"]);
        }
        args.extend(extra);
        fails(&args, 1, parts);
        assert!(!Path::new(&adapter).exists(), "a failed training left a file");
    };
    train(&data, &[], &["d.jsonl", "row 1", "role"]);
    train("missing.jsonl", &[], &["missing.jsonl"]);
    let data = folder.write("d.jsonl", facts());
    train(&data, &["--targets", "nothing"], &["nothing", "attn"]);
    train(&data, &["--rank", "0"], &["rank"]);
    train(&data, &["--lr", "7"], &["lr"]);
    train(&data, &["--window", "4"], &["window"]);
    train(&data, &["--template", "no-such"], &["no-such"]);
}

/// A copy of a fixture without the keys and tensors of these names, and with other texts for some
/// keys.
fn damaged(to: &str, arch: &str, without: &[&str], with: &[(&str, &str)]) -> String {
    let file = gguf::Gguf::open(fixture(arch, "model.gguf")).unwrap();
    let mut metadata = gguf::Metadata::new();
    for (key, value) in file.metadata().iter().filter(|(key, _)| !without.contains(key)) {
        metadata.insert(key, value.clone());
    }
    for (key, text) in with {
        metadata.insert(*key, (*text).to_string());
    }
    let kept = file.tensors().filter(|t| !without.contains(&t.info.name.as_str()));
    let tensors = kept.map(|t| (t.info.clone(), t.bytes.to_vec().into())).collect::<Vec<_>>();
    gguf::write(Path::new(to), &metadata, tensors).unwrap();
    to.to_string()
}

#[test]
fn models_that_are_not_whole_are_refused_by_key_and_tensor() {
    let folder = Folder::new("damaged");
    let to = folder.file("m.gguf");
    let check = |without: &[&str], with: &[(&str, &str)], flags: &[&str], parts: &[&str]| {
        let model = damaged(&to, "llama", without, with);
        let mut args = vec!["run", "-m", &model, "-p", "x"];
        args.extend(flags);
        fails(&args, 1, &[&["m.gguf"], parts].concat());
    };
    let raw: &[&str] = &["--raw"];
    check(&[], &[("general.architecture", "mamba9")], raw, &["mamba9", "llama", "qwen2", "gemma3"]);
    check(&["general.architecture"], &[], raw, &["general.architecture"]);
    for key in ["block_count", "embedding_length", "attention.head_count", "context_length"] {
        let key = format!("llama.{key}");
        check(&[&key], &[], raw, &[&key]);
        check(&[], &[(&key, "many")], raw, &[&key]);
    }
    check(&["blk.1.ffn_up.weight"], &[], raw, &["blk.1.ffn_up.weight"]);
    check(&["output_norm.weight"], &[], raw, &["output_norm.weight"]);
    for key in ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"] {
        check(&[key], &[], raw, &[key]);
    }
    let template = "tokenizer.chat_template";
    check(&[], &[(template, "{% for m in messages %}")], &[], &[template]);
    check(&[], &[(template, "{{ raise_exception('no') }}")], &[], &[template, "no"]);
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}\
                   x{% endfor %}{% endfor %}{% endfor %}";
    check(&[], &[(template, endless)], &[], &[template]);
}

#[test]
fn a_quantized_weight_is_refused_by_name_with_exit_code_2() {
    let folder = Folder::new("refusal");
    let quantized = quantize(&fixture("llama", "model.gguf"), &folder.file("q.gguf"));
    let tokens = folder.write("t.json", r#"[{"tokens": [1, 2, 3], "labels": [-100, 2, 3]}]"#);
    let out = folder.file("g.safetensors");
    let wrt = "blk.1.ffn_up.weight";
    let args = ["dump", "grads", "-m", &quantized, "--wrt", wrt, "--tokens", &tokens, "-o", &out];
    fails(&args, 2, &["MatMul", wrt]);
    assert!(!Path::new(&out).exists());
}

/// A copy of a model whose `blk.1.ffn_up.weight` is Q8_0.
fn quantize(from: &str, to: &str) -> String {
    let file = gguf::Gguf::open(from).unwrap();
    let tensors = file
        .tensors()
        .map(|t| {
            if t.info.name != "blk.1.ffn_up.weight" {
                return (t.info.clone(), t.bytes.to_vec().into());
            }
            let ty = gguf::TensorType::Q8_0;
            let info = gguf::TensorInfo::new(&t.info.name, ty, &t.info.shape).unwrap();
            // Blocks of a scale of 0 and codes of 0: what they hold does not matter.
            let bytes = vec![0u8; info.byte_len()];
            (info, bytes.into())
        })
        .collect::<Vec<_>>();
    gguf::write(Path::new(to), file.metadata(), tensors).unwrap();
    to.to_string()
}

#[test]
fn generation_is_reproducible_and_stops() {
    let model = fixture("llama", "model.gguf");
    let base = ["run", "-m", &model, "--raw", "-p", "the quick", "-n", "12", "--json"];
    let with = |extra: &[&str]| json(&[&base, extra].concat());
    let first = with(&[]);
    assert_eq!(first["finish"], "length");
    assert_eq!(first["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(first["logprobs"].as_array().unwrap().len(), 12);
    assert_eq!(first["text"], with(&["-t", "1"])["text"], "threads change the text");
    assert_ne!(first["tokens"], with(&["--seed", "7"])["tokens"], "the seed changes nothing");

    let greedy = with(&["--temp", "0"]);
    assert_eq!(greedy["tokens"], with(&["--temp", "0", "--seed", "7"])["tokens"]);
    let whole = greedy["text"].as_str().unwrap();
    let stop: String = whole.chars().skip(2).take(2).collect();
    let stopped = with(&["--temp", "0", "--stop", &stop]);
    assert_eq!(stopped["finish"], "stop");
    assert_eq!(stopped["text"], whole.split(stop.as_str()).next().unwrap());

    // A cache that runs full ends the answer; a prompt that does not fit is refused.
    let short = with(&["--ctx", "14"]);
    assert_eq!(short["finish"], "length");
    let n = short["prompt_tokens"].as_u64().unwrap() as usize;
    assert_eq!(short["tokens"], Value::from(&first["tokens"].as_array().unwrap()[..14 - n + 1]));
    fails(&[&base[..], &["--ctx", "1"]].concat(), 1, &["--ctx"]);

    // As text, the same.
    let plain = ok(&["run", "-m", &model, "--raw", "-p", "the quick", "-n", "12", "--temp", "0"]);
    assert_eq!(plain, format!("{whole}\n"));
    let piped =
        run_with_input(&["run", "-m", &model, "--raw", "-n", "12", "--temp", "0"], "the quick");
    assert_eq!(text(&piped.stdout), plain);
}

#[test]
fn a_model_without_a_template_says_what_to_do() {
    let model = fixture("llama", "model.gguf");
    fails(&["run", "-m", &model, "-p", "x"], 1, &["template", "--template plain", "--raw"]);
    let out = ok(&["run", "-m", &model, "-p", "x", "--template", "plain", "-n", "3"]);
    assert!(out.ends_with('\n'));
}

#[test]
fn a_chat_goes_on_until_the_input_ends() {
    let model = fixture("llama", "model.gguf");
    let args = ["chat", "-m", &model, "--template", "plain", "-n", "5", "--temp", "0"];
    let first = text(&run_with_input(&args, "the cat\n").stdout);
    let out = run_with_input(&args, "the cat\n\nthe dog\n/reset\n/huh\nthe cat\n/quit\nthe end\n");
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("there is no command /huh"));
    let said = text(&out.stdout);
    assert!(said.starts_with(&first), "{said:?} does not begin with {first:?}");
    assert!(said.ends_with(&first), "{said:?} does not begin anew with {first:?}");
    assert!(said.len() > 2 * first.len(), "a turn is missing in {said:?}");
}

#[test]
fn training_gives_the_same_adapter_however_it_is_computed() {
    let folder = Folder::new("train");
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let train = |name: &str, extra: &[&str]| {
        let out = folder.file(name);
        let mut args = vec!["train", "-m", &model, "--data", &data, "-o", &out];
        args.extend(["--template", "plain", "--window", "128", "--epochs", "6", "--lr", "0.01"]);
        args.extend(["--rank", "4", "--json"]);
        args.extend(extra);
        let said = json(&args);
        (said, std::fs::read(&out).unwrap(), out)
    };
    let (said, one, adapter) = train("1.gguf", &["-t", "1"]);
    assert!(said["last_loss"].as_f64() < said["first_loss"].as_f64(), "{said}");
    assert_eq!(said["moved"], said["targets"]);
    assert_eq!(said["interrupted"], false);
    let (_, two, _) = train("2.gguf", &["-t", "2"]);
    assert!(one == two, "two threads give another file");
    let (again, recomputed, _) = train("3.gguf", &["--recompute", "per-layer"]);
    assert!(one == recomputed, "recomputation gives another file");
    let arena = |v: &Value| v["plan"]["arena_bytes"].as_u64().unwrap();
    assert!(arena(&again) < arena(&said), "recomputation takes no less memory");
    assert!(one != train("4.gguf", &["--seed", "1"]).1, "the seed changes nothing");

    // The adapter changes what is said.
    let base =
        ["run", "-m", &model, "--template", "plain", "-p", "the cat?", "--temp", "0", "--json"];
    let without = json(&base);
    let with = json(&[&base[..], &["--adapter", &adapter]].concat());
    assert_ne!(without["tokens"], with["tokens"]);

    // A plan alone trains nothing.
    let mut plan = vec!["train", "-m", &model, "--data", &data, "--template", "plain"];
    plan.extend(["--window", "128", "--epochs", "6", "--rank", "4", "--dry-run", "--json"]);
    let plan = json(&plan);
    assert_eq!(plan["steps"], said["steps"]);
    assert_eq!(plan["plan"]["arena_bytes"], said["plan"]["arena_bytes"]);
    assert_eq!(plan["conversations"], 3);
}

#[test]
fn inspection_shows_what_is_there_and_what_it_takes() {
    let model = fixture("gemma3", "model.gguf");
    let shown = json(&["inspect", &model, "--ctx", "64", "--window", "32", "--json"]);
    assert_eq!(shown["metadata"]["general.architecture"], "gemma3");
    assert_eq!(shown["metadata"]["tokenizer.ggml.tokens"]["length"], 320);
    assert_eq!(shown["memory"]["context"], 64);
    assert_eq!(shown["refused"], Value::Null);
    let arenas = shown["training"]["arenas"].as_array().unwrap();
    assert_eq!(arenas.len(), 2);
    assert!(arenas[1]["bytes"].as_u64().unwrap() < arenas[0]["bytes"].as_u64().unwrap());
    let tensors = shown["tensors"].as_array().unwrap();
    let named = |t: &&Value| t["name"] == "blk.0.attn_q.weight";
    assert_eq!(tensors.iter().find(named).unwrap()["type"], "F32");

    let out = ok(&["inspect", &model, "--ctx", "64", "--window", "32"]);
    for part in ["general.architecture", "blk.*.attn_q.weight", "packed weights", "Can be trained"]
    {
        assert!(out.contains(part), "no `{part}` in {out}");
    }
    assert!(ok(&["inspect", &model, "--tensors"]).contains("blk.5.attn_q.weight"));
}

#[test]
fn an_architecture_that_is_not_known_is_still_shown() {
    let folder = Folder::new("arch");
    let path = folder.file("other.gguf");
    let file = gguf::Gguf::open(fixture("llama", "model.gguf")).unwrap();
    let mut metadata = file.metadata().clone();
    metadata.insert("general.architecture", "other");
    let tensors: Vec<_> =
        file.tensors().map(|t| (t.info.clone(), t.bytes.to_vec().into())).collect();
    gguf::write(Path::new(&path), &metadata, tensors).unwrap();
    let shown = json(&["inspect", &path, "--json"]);
    assert!(shown["refused"].as_str().unwrap().contains("architecture `other`"), "{shown}");
    assert_eq!(shown["training"], Value::Null);
    assert!(ok(&["inspect", &path]).contains("Cannot be run"));
    fails(&["run", "-m", &path, "--raw", "-p", "x"], 1, &["other.gguf", "`other`", "llama"]);
}

#[test]
fn text_and_tokens_both_ways() {
    let model = fixture("llama", "model.gguf");
    let plain = ok(&["tokenize", "-m", &model, "the quick brown fox"]);
    let ids: Vec<u32> = plain.split_whitespace().map(|w| w.parse().unwrap()).collect();
    let said = json(&["tokenize", "-m", &model, "--json", "the quick brown fox"]);
    assert_eq!(said["ids"], serde_json::json!(ids));
    assert_eq!(said["pieces"].as_array().unwrap().len(), ids.len());
    assert_eq!(said["text"], "the quick brown fox");
    assert_eq!(ok(&["tokenize", "-m", &model, "--ids-to-text", &plain]), "the quick brown fox");
    let piped = run_with_input(&["tokenize", "-m", &model], "the quick brown fox");
    assert_eq!(text(&piped.stdout), plain);
    let wrong = gradus(&["tokenize", "-m", &model]).stdin(not_text()).output().unwrap();
    check_failure(&wrong, &["tokenize"], 1, &["standard input", "UTF-8"]);
}

fn not_text() -> std::fs::File {
    let path = std::env::temp_dir().join(format!("gradus-cli-bytes-{}", std::process::id()));
    std::fs::write(&path, b"a\xffb").unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

#[test]
fn perplexity_is_that_of_the_logits() {
    let folder = Folder::new("ppl");
    let model = fixture("qwen2", "model.gguf");
    let words = "the quick brown fox jumps over the lazy dog. ".repeat(12);
    let file = folder.write("text", &words);
    let args = ["perplexity", "-m", &model, "-f", &file, "--ctx", "32", "--cache-type", "f32"];
    let said = json(&[&args[..], &["--json"]].concat());

    // The same by hand, from the logits.
    let ids = json(&["tokenize", "-m", &model, "--bos", "--json", &words])["ids"].clone();
    let ids: Vec<usize> =
        ids.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as usize).collect();
    assert_eq!(said["tokens"], ids.len());
    let windows: Vec<&[usize]> = ids.chunks_exact(32).collect();
    assert_eq!(said["windows"], windows.len());
    let tokens = folder.write("t.json", serde_json::json!(windows).to_string());
    let out = folder.file("o.safetensors");
    ok(&["dump", "logits", "-m", &model, "--tokens", &tokens, "-o", &out]);
    let bytes = std::fs::read(&out).unwrap();
    let logits = SafeTensors::deserialize(&bytes).unwrap();
    let (mut sum, mut n) = (0.0, 0);
    for (i, window) in windows.iter().enumerate() {
        let (shape, values) = array(&logits, &format!("logits.{i}")).unwrap();
        for t in 16..31 {
            let row = &values[t * shape[1]..(t + 1) * shape[1]];
            let top = row.iter().copied().fold(f64::MIN, f64::max);
            let total: f64 = row.iter().map(|x| (x - top).exp()).sum();
            sum += top + total.ln() - row[window[t + 1]];
            n += 1;
        }
    }
    assert_eq!(said["scored"], n);
    let (nll, expected) = (said["nll"].as_f64().unwrap(), sum / f64::from(n));
    assert!((nll - expected).abs() < 1e-5, "{nll} is not {expected}");
    assert!(ok(&args).starts_with("perplexity "));

    let short = folder.write("short", "the");
    fails(&["perplexity", "-m", &model, "-f", &short], 1, &["--ctx", "256"]);
    let args = ["perplexity", "-m", &model, "-f", &short, "--ctx", "32"];
    fails(&args, 1, &["does not fill one window"]);
}

#[test]
fn benchmarks_have_their_fields() {
    let model = fixture("llama", "model.gguf");
    let args = ["bench", "-m", &model, "-p", "16", "-n", "4", "-r", "2", "-t", "2", "--json"];
    let said = json(&args);
    for field in
        ["prompt_tokens_per_s", "decode_tokens_per_s", "first_token_ms", "load_ms", "weights_bytes"]
    {
        assert!(said[field].as_f64().unwrap() > 0.0, "{field}: {said}");
    }
    assert_eq!(said["threads"], 2);
    assert!(said["family"].is_string());
    assert!(said.as_object().unwrap().contains_key("peak_rss_bytes"));

    let said = json(&[
        "bench", "--train", "-m", &model, "--window", "32", "--rank", "4", "-r", "1", "--json",
    ]);
    assert!(said["train_tokens_per_s"].as_f64().unwrap() > 0.0);
    assert!(said["arena_bytes"].as_u64().unwrap() > 0);
    assert!(ok(&["bench", "-m", &model, "-p", "8", "-n", "2", "-r", "1"]).contains("tokens/s"));
}

#[test]
fn gradients_of_an_op_can_be_checked() {
    let args = ["check-grads", "--op", "rmsnorm", "--device", "reference"];
    let said = json(&[&args[..], &["--json"]].concat());
    assert!(!said["ops"].as_array().unwrap().is_empty());
    assert!(ok(&args).contains("RmsNorm"));
    let said = json(&["check-grads", "--op", "rmsnorm", "--json"]);
    assert_eq!(said["device"], "cpu");
}

#[test]
fn random_programs_can_be_checked() {
    let args = ["check-grads", "--programs", "200", "--seed", "3"];
    assert!(ok(&args).starts_with("200 programs: "));
    let said = json(&[&args[..], &["--json"]].concat());
    assert_eq!(said["programs"], 200);
    assert!(said["differentiable"].as_u64().unwrap() > 150);
    assert!(said["failures"].as_array().unwrap().is_empty());
    fails(&["check-grads", "--programs", "1", "--op", "Add"], 1, &["--op"]);
}

#[test]
fn the_catalogue_is_listed_without_a_network() {
    let list = json(&["pull", "--list", "--json"]);
    let names: Vec<&str> =
        list.as_array().unwrap().iter().map(|e| e["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"smollm2-135m-instruct"), "{names:?}");
    assert!(list[0]["default"].as_bool().unwrap());
    let out = ok(&["pull", "--list"]);
    assert!(names.iter().all(|name| out.contains(name)));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let model = fixture("llama", "model.gguf");
    let mut command = gradus(&["inspect", &model, "--tensors"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    assert_eq!(text(&out.stderr), "");
}

#[cfg(unix)]
#[test]
fn an_interrupted_training_writes_a_whole_adapter() {
    interrupted("-INT", 1);
}

/// The system and the shell both say that the terminal has gone.
#[cfg(target_os = "linux")]
#[test]
fn a_training_whose_terminal_goes_writes_a_whole_adapter() {
    interrupted("-HUP", 3);
}

#[cfg(unix)]
fn interrupted(signal: &str, times: usize) {
    let folder = Folder::new(&format!("interrupt{signal}"));
    let model = fixture("llama", "model.gguf");
    let data = folder.write("facts.jsonl", facts());
    let out = folder.file("a.gguf");
    // The tests themselves may run where a terminal that goes away is ignored.
    let mut command = Command::new("env");
    command.args(if signal == "-HUP" { &["--default-signal=HUP"][..] } else { &[] });
    command.args([env!("CARGO_BIN_EXE_gradus"), "train", "-m", &model, "--data", &data]);
    command.args(["-o", &out, "--template", "plain", "--window", "128", "--epochs", "10000"]);
    command.args(["--json", "--run-dir", &folder.file("runs")]);
    let started = Started::at(&mut command, "step ");
    for _ in 0..times {
        // After the first there may be nobody left to tell.
        assert!(started.signal(signal) || times > 1);
    }
    let output = started.end();
    assert_eq!(output.status.code(), Some(130));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["interrupted"], true);
    assert!(result["steps"].as_u64().unwrap() < 10_000);
    ok(&["run", "-m", &model, "--raw", "-p", "the", "-n", "2", "--adapter", &out]);
    let mut left: Vec<_> =
        std::fs::read_dir(&folder.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    let whole = ["a.gguf", "a.gguf.checkpoints", "facts.jsonl", "runs"];
    assert_eq!(left, whole, "something half is left");
    assert!(result["checkpoint"].as_str().unwrap().starts_with(&format!("{out}.checkpoints/")));
}

#[cfg(unix)]
#[test]
fn a_training_under_nohup_outlives_its_terminal() {
    let folder = Folder::new("nohup");
    let data = folder.write("facts.jsonl", facts());
    let (model, out) = (fixture("llama", "model.gguf"), folder.file("a.gguf"));
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_gradus"), "train"]);
    shell.args(["-m", &model, "--data", &data, "-o", &out, "--template", "plain", "--json"]);
    shell.args(["--window", "128", "--epochs", "300", "--no-record"]);
    let started = Started::at(&mut shell, "step ");
    assert!(started.signal("-HUP"));
    let output = started.end();
    assert!(output.status.success(), "{:?}", output.status);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["interrupted"], false);
}

/// What `docs/cli.md` says of each command is its `--help`. `UPDATE_DOCS=1 cargo test -p gradus`
/// writes it anew.
#[test]
fn a_toy_of_any_architecture_runs_and_trains() {
    let folder = Folder::new("toy");
    let data = folder.write("d.jsonl", facts());
    for (arch, extra) in [("qwen3moe", &["--format", "q4_0"][..]), ("llama", &["--experts", "4"])] {
        let toy = folder.file(&format!("{arch}.gguf"));
        let args = [&["make-toy", arch, "--out", &toy], extra].concat();
        assert!(ok(&args).contains(&format!("{arch}.gguf: ")));
        let first = std::fs::read(&toy).unwrap();
        let said = json(&[&args[..], &["--json"]].concat());
        assert_eq!(said["bytes"], first.len());
        assert!(first == std::fs::read(&toy).unwrap(), "{arch}: the same options, another file");
        let inspected = json(&["inspect", &toy, "--json"]);
        let targets = inspected["training"]["targets"].to_string();
        for target in ["blk.1.ffn_down_exps.weight", "blk.0.ffn_gate_inp.weight"] {
            assert!(targets.contains(target), "{targets}");
        }
        assert!(ok(&["inspect", &toy]).contains("blk.*.ffn_gate_exps.weight x2"));
        ok(&["run", "-m", &toy, "-p", "hello", "-n", "4", "--seed", "1"]);
        let adapter = folder.file("a.gguf");
        let train = |targets: &str| {
            let args = ["train", "-m", &toy, "--data", &data, "-o", &adapter, "--json"];
            let few = ["--epochs", "1", "--rank", "2", "--targets", targets];
            json(&[&args[..], &few[..]].concat())
        };
        let said = train("experts,router,attn_q");
        assert_eq!((&said["targets"], &said["moved"]), (&10.into(), &10.into()), "{said}");
        ok(&["run", "-m", &toy, "--adapter", &adapter, "-p", "hello", "-n", "4"]);
    }
    let out = folder.file("x.gguf");
    let toy = |args: &[&str], parts: &[&str]| {
        fails(&[&["make-toy", "--out", &out], args].concat(), 1, parts);
    };
    toy(&["gpt5"], &["gpt5", "qwen3moe"]);
    toy(&["llama", "--format", "q9"], &["--format", "q9", "q4_k"]);
    toy(&["llama", "--width", "96"], &["96", "256", "Q4_K"]);
    toy(&["llama", "--width", "0"], &["width", "0"]);
    toy(&["qwen2", "--experts", "4"], &["experts", "qwen2"]);
    toy(&["qwen3moe", "--experts-used", "9"], &["experts_used", "9"]);
    toy(&["llama", "--layers", "1000", "--ffn", "204800", "--width", "65536"], &["bytes"]);
    assert!(!Path::new(&out).exists(), "a failed toy left a file");
}

#[test]
fn the_documentation_is_the_help() {
    let path = root().join("docs/cli.md");
    let before = std::fs::read_to_string(&path).unwrap();
    let marker = "<!-- Below: the output of --help, checked by a test. -->\n";
    let head = before.split(marker).next().unwrap();
    let mut wanted = format!("{head}{marker}");
    let mut section = |words: &[&str]| {
        let help = ok(&[words, &["--help"]].concat());
        let help: Vec<&str> = help.lines().map(str::trim_end).collect();
        let title = [&["gradus"], words].concat().join(" ");
        wanted += &format!("\n## {title}\n\n```text\n{}\n```\n", help.join("\n").trim_end());
    };
    section(&[]);
    for command in COMMANDS {
        section(&[command]);
    }
    section(&["adapter", "show"]);
    section(&["adapter", "convert"]);
    section(&["dump", "logits"]);
    section(&["dump", "grads"]);
    section(&["data", "show"]);
    for command in ["show", "compare", "rm"] {
        section(&["runs", command]);
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    assert!(
        before.replace("\r\n", "\n") == wanted || std::env::var_os("UPDATE_DOCS").is_some(),
        "docs/cli.md is not what --help says; UPDATE_DOCS=1 cargo test -p gradus writes it anew"
    );
}

#[test]
fn help_is_worth_reading() {
    for command in COMMANDS {
        let help = ok(&[command, "--help"]);
        assert!(help.contains(&format!("Usage: gradus {command}")), "{help}");
        for line in help.lines() {
            assert!(line.chars().count() <= 100, "`{command} --help` has a long line: {line}");
        }
    }
    let help = ok(&["--help"]);
    assert!(COMMANDS.iter().all(|command| help.contains(command)));
    assert!(ok(&["--version"]).starts_with("gradus "));
    let none = run(&[]);
    assert_eq!(none.status.code(), Some(1));
    assert!(text(&none.stdout).contains("gradus demo"));
}
