//! `gradus adapter` and `gradus merge` as their users meet them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

mod common;

use std::path::Path;

use common::{Folder, fails, ok, root};
use serde_json::Value;

fn testdata(path: &str) -> String {
    root().join("testdata").join(path).display().to_string()
}

fn json(args: &[&str]) -> Value {
    common::json(&[args, &["--json"]].concat())
}

#[test]
fn adapters_are_converted_shown_and_used_in_either_form() {
    let folder = Folder::new("adapter");
    let (model, gguf) =
        (testdata("oracle/llama/model.gguf"), testdata("oracle/llama/adapter.gguf"));
    let (peft, first, second) =
        (folder.file("peft"), folder.file("first.gguf"), folder.file("second.gguf"));
    let convert = |from: &str, to: &str| json(&["adapter", "convert", from, to, "-m", &model]);
    // What PEFT made, as a file, as a folder of ours, as a file again.
    let said = convert(&testdata("peft/llama"), &first);
    assert_eq!((said["form"].as_str(), said["targets"].as_u64()), (Some("GGUF"), Some(21)));
    assert_eq!(said["rounded"], Value::Array(Vec::new()));
    assert_eq!(convert(&first, &peft)["form"], "PEFT");
    convert(&peft, &second);
    assert!(std::fs::read(&first).unwrap() == std::fs::read(&second).unwrap());
    convert(&first, &peft); // over what is there

    let shown = |path: &str| json(&["adapter", "show", path]);
    let (of_file, of_folder, of_oracle) = (shown(&first), shown(&peft), shown(&gguf));
    assert_eq!(of_file["targets"], of_oracle["targets"]);
    assert_eq!(
        (of_file["form"].as_str(), of_folder["form"].as_str()),
        (Some("GGUF"), Some("PEFT"))
    );
    assert_eq!(of_file["parameters"], of_folder["parameters"]);
    let find = |info: &Value, name: &str| {
        let all = info["targets"].as_array().unwrap();
        all.iter().find(|t| t["target"] == name).unwrap().clone()
    };
    let (a, b) = (
        find(&of_file, "blk.1.attn_q.weight"),
        find(&of_folder, "model.layers.1.self_attn.q_proj"),
    );
    for key in ["rank", "alpha", "scale", "inputs", "outputs"] {
        assert_eq!(a[key], b[key], "{key}");
    }
    assert_eq!((a["rank"].as_u64(), a["scale"].as_f64()), (Some(4), Some(3.0)));
    let norms = (a["norm"].as_f64().unwrap(), b["norm"].as_f64().unwrap());
    assert!((norms.0 / norms.1 - 1.0).abs() < 1e-12 && norms.0 > 0.1, "{norms:?}");
    let table = ok(&["adapter", "show", &first]);
    assert!(table.contains("21 targets") && table.contains("blk.1.attn_q.weight"), "{table}");
    // Experts as parameters have the norm that they have as stacks.
    let experts =
        (shown(&testdata("oracle/qwen3_5_moe/adapter.gguf")), shown(&testdata("peft/qwen3_5_moe")));
    let down = find(&experts.0, "blk.0.ffn_down_exps.weight");
    let also = find(&experts.1, "model.layers.0.mlp.experts");
    assert_eq!((&down["experts"], &down["rank"]), (&also["experts"], &also["rank"]));
    let norms = (down["norm"].as_f64().unwrap(), also["norm"].as_f64().unwrap());
    assert!((norms.0 / norms.1 - 1.0).abs() < 1e-12, "{norms:?}");

    let answer = |adapter: &str| {
        let args = ["run", "-m", &model, "--raw", "-p", "the quick", "-n", "8", "--temp", "0"];
        json(&[&args[..], &["--adapter", adapter]].concat())["tokens"].clone()
    };
    assert_eq!(answer(&first), answer(&peft));

    let bad = |from: &str, to: &str, parts: &[&str]| {
        fails(&["adapter", "convert", from, to, "-m", &model], 1, parts);
    };
    bad(&peft, &folder.file("out"), &["ends in .gguf"]);
    bad(&first, &folder.file("out.gguf"), &["does not end in .gguf"]);
    bad(&testdata("peft/llama/adapter_model.safetensors"), &folder.file("o"), &["folder"]);
    bad(&testdata("oracle/qwen2/adapter.gguf"), &folder.file("o"), &["general.architecture"]);
    bad(&folder.file("absent"), &folder.file("o"), &["absent"]);
    fails(&["adapter", "show", &model], 1, &["no adapter", "gradus inspect"]);
}

#[test]
fn merging_says_what_it_loses() {
    let folder = Folder::new("merge");
    let (toy, adapter) = (folder.file("toy.gguf"), folder.file("a.gguf"));
    ok(&["make-toy", "llama", "--format", "q4_0", "--out", &toy, "--ctx", "64"]);
    let data = folder.file("d.jsonl");
    let line =
        r#"{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"yes"}]}"#;
    std::fs::write(&data, format!("{line}\n")).unwrap();
    let train = ["train", "-m", &toy, "--data", &data, "-o", &adapter, "--epochs", "1"];
    ok(&[&train[..], &["--rank", "2", "--targets", "attn_q", "--lr", "1e-4"]].concat());
    let out = folder.file("merged.gguf");
    let merge = ["merge", "-m", &toy, "--adapter", &adapter, "-o", &out];
    // One small step of training is nothing in four bits.
    fails(&merge, 2, &["attn_q.weight", "half a step", "`--type ", "`--force`"]);
    assert!(!Path::new(&out).exists());
    let said = json(&[&merge[..], &["--type", "f32"]].concat());
    let tensors = said["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 2);
    assert!(tensors.iter().all(|t| t["from"] == "Q4_0" && t["to"] == "F32"), "{said}");
    assert!(tensors.iter().all(|t| t["lost"].as_f64().unwrap() < 0.5), "{said}");
    ok(&["run", "-m", &out, "-p", "hello", "-n", "2"]);
    let table = ok(&[&merge[..], &["--force"]].concat());
    assert!(table.contains("below half step") && table.contains("blk.0.attn_q.weight"), "{table}");
    fails(&[&merge[..], &["--type", "q3_k"]].concat(), 1, &["--type", "q3_k", "q4_k"]);
    let over = ["merge", "-m", &toy, "--adapter", &adapter, "-o", &toy, "--type", "f16"];
    fails(&over, 1, &["is the model itself"]);
}
