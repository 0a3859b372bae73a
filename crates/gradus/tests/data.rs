//! Training data on the command line: what is shown, refused, left out and measured.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // tests

mod common;

use common::{Folder, facts, fails, fixture, gradus, json, ok, text};
use serde_json::Value;

fn model() -> String {
    fixture("llama", "model.gguf")
}

/// What is trained is marked, and what is bad is counted with its reason; nothing that a row says
/// drives the terminal.
#[test]
fn data_show_marks_what_is_trained() {
    let folder = Folder::new("show");
    let rows = format!(
        "{}\n{{\"messages\": []}}\n{}\n",
        facts(),
        r#"{"id": 7, "messages": [{"role": "user", "content": "\u001b[31m"},
            {"role": "assistant", "content": "no", "weight": 0.5}]}"#
            .replace('\n', " ")
    );
    let data = folder.write("facts.jsonl", rows);
    let args = ["data", "show", &data, "-m", &model(), "--template", "plain", "--window", "64"];
    let said = ok(&args);
    for part in [
        "row 1: ",
        "Assistant:[ on the mat",
        "row 5: ",
        "[0.5x  no",
        "\\u{1b}[31m",
        "layout    messages: ",
        "rows      5",
        "windows   ",
        "bad rows  1: 1 empty",
        "facts.jsonl: row 4: empty: `messages` is empty",
    ] {
        assert!(said.contains(part), "no {part:?} in: {said}");
    }
    assert!(!said.contains('\u{1b}'), "no colours where nobody looks");
    let two = ok(&[&args[..], &["--rows", "2..3"]].concat());
    assert!(
        two.contains("row 2: ") && two.contains("row 3: ") && !two.contains("row 1: "),
        "{two}"
    );
    fails(&[&args[..], &["--rows", "3..2"]].concat(), 1, &["is no range of rows"]);

    let said = json(&[&args[..], &["--json"]].concat());
    assert_eq!((&said["examples"], &said["files"][0]["rows"]), (&4.into(), &5.into()));
    assert_eq!(said["files"][0]["layout"], "messages");
    assert_eq!(said["files"][0]["ignored_columns"], Value::from(vec!["id"]));
    assert_eq!(said["bad"]["reasons"]["empty"], 1);
    assert_eq!((&said["bad"]["rows"][0]["row"], &said["bad"]["count"]), (&4.into(), &1.into()));
    let row = &said["rows"][3];
    assert_eq!(
        (&row["row"], row["weight"].as_f64()),
        (&5.into(), row["trained"].as_f64().map(|n| n / 2.0))
    );
    assert_eq!(row["tokens"].as_array().unwrap().len(), row["weights"].as_array().unwrap().len());
    let packing = &said["packing"];
    assert!(packing["windows"].as_u64() >= Some(1) && packing["full"].as_f64() > Some(0.0));
}

/// What the template does not render is named, once; and no file's name drives the terminal.
#[test]
fn what_is_not_rendered_is_said_once_per_file() {
    let folder = Folder::new("left-out");
    let row = r#"{"tools": [{"name": "f"}], "messages": [{"role": "user", "content": "the cat?"},
        {"role": "assistant", "content": "on the mat", "reasoning_content": "mats"}]}"#
        .replace('\n', " ");
    let data = folder.write("a\n\u{1b}[31mb.jsonl", format!("{row}\n{row}\n"));
    let other = folder.write("plain.jsonl", facts());
    let args = ["data", "show", &data, &other, "-m", &model(), "--template", "plain"];
    let run = gradus(&args).output().unwrap();
    let (said, told) = (text(&run.stdout), text(&run.stderr));
    assert!(run.status.success(), "{told}");
    let expected = "a\\n\\u{1b}[31mb.jsonl: the chat template renders nothing of `tools` (2 rows), \
                    the messages' \"reasoning_content\" (2 rows)";
    let warnings: Vec<&str> = told.lines().filter(|l| l.starts_with("warning: ")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains(expected), "{told}");
    assert!(told.contains("a\\n\\u{1b}[31mb.jsonl: 2 rows, layout: messages"), "{told}");
    for part in ["a\\n\\u{1b}[31mb.jsonl row 1: ", "layout    messages: ", "left out  the chat"] {
        assert!(said.contains(part), "no {part:?} in: {said}");
    }
    assert!(!said.contains('\u{1b}') && !told.contains('\u{1b}'), "{said}{told}");
    let said = json(&[&args[..], &["--json"]].concat());
    assert_eq!(said["files"][0]["not_rendered"]["`tools`"], 2);
    assert_eq!(said["files"][1]["not_rendered"], serde_json::json!({}));
}

/// f39, f46: what cannot be learned from stops a run before it starts, by file, row and reason.
#[test]
fn f39_bad_rows_are_refused_before_training_or_left_out() {
    let folder = Folder::new("bad-rows");
    let model = model();
    let data = folder.write(
        "facts.jsonl",
        format!("{}\n{{\"messages\": [{{\"role\": \"user\", \"content\": \"x\"}}]}}\n", facts()),
    );
    let out = folder.file("a.gguf");
    let args = ["train", "-m", &model, "--template", "plain", "--data", &data, "-o", &out];
    let expected = ["facts.jsonl: row 4: no_assistant_tokens:", "`--skip-bad`"];
    fails(&args, 1, &expected);
    assert!(!std::path::Path::new(&out).exists());
    let more = ["--skip-bad", "--dry-run", "--json"];
    let run = gradus(&[&args[..], &more].concat()).output().unwrap();
    assert!(run.status.success(), "{}", text(&run.stderr));
    let said: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(said["conversations"], 3);
    let told = text(&run.stderr);
    assert!(told.contains("4 rows, layout: messages"), "{told}");
    assert!(told.contains("left out 1 rows: 1 no_assistant_tokens"), "{told}");
    // An option that would change nothing is no option.
    fails(&[&args[..], &["--layout", "chat"]].concat(), 1, &["--layout"]);
    fails(&[&args[..], &["--layout", "text"]].concat(), 1, &["row 1: missing_field: `text`"]);
}

/// f19, f22: what was learned is in the file, and eval sees it: the loss of the base is that of
/// training's first step, the adapter says word for word what it was taught, and the base does not.
#[test]
fn f19_eval_sees_what_an_adapter_learned() {
    let folder = Folder::new("eval");
    let model = model();
    let data = folder.write("facts.jsonl", facts());
    let adapter = folder.file("facts.gguf");
    let mut train = vec!["train", "-m", &model, "--template", "plain", "--data", &data];
    train.extend(["-o", &adapter, "--window", "128", "--epochs", "400", "--rank", "16", "--json"]);
    train.extend(["--lr", "1e-2", "--run-dir"]);
    let runs = folder.file("runs");
    train.push(&runs);
    let trained = json(&train);

    let eval = ["eval", "-m", &model, "--template", "plain", "--data", &data];
    let base = json(&[&eval[..], &["--json"]].concat());
    let (loss, first) = (base["base"]["loss"].as_f64().unwrap(), trained["first_loss"].as_f64());
    assert!((loss - first.unwrap()).abs() < 1e-6 * loss, "{loss} is not {first:?}");
    assert!((base["base"]["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);
    assert!(base.get("adapter").is_none() && base.get("answers").is_none());

    let more = ["--adapter", &adapter, "--generate", "-n", "24", "--json"];
    let both = json(&[&eval[..], &more].concat());
    assert_eq!(both["base"]["loss"], base["base"]["loss"], "company changes nothing");
    let (of_base, of_adapter) = (&both["base"], &both["adapter"]);
    assert!(of_adapter["loss"].as_f64().unwrap() < 0.1 * loss, "{both}");
    assert!(of_adapter["token_accuracy"].as_f64() > Some(0.95), "{both}");
    assert_eq!(of_adapter["answers"]["exact"], 3, "{both}");
    assert_eq!(of_base["answers"]["contains"], 0, "{both}");
    assert_eq!(both["answers"][0]["expected"], "on the mat");
    assert_eq!(both["answers"][0]["adapter"]["exact"], true);
    let difference = both["difference"]["loss"].as_f64().unwrap();
    assert!((difference - (of_adapter["loss"].as_f64().unwrap() - loss)).abs() < 1e-12);

    let said =
        ok(&[&eval[..], &["--adapter", &adapter, "--generate", "-n", "24", "--rows", "2"]]
            .concat());
    for part in [
        "row 2: the dog?",
        "  expected  in the fog",
        "  adapter   in the fog  [exact]",
        "difference",
    ] {
        assert!(said.contains(part), "no {part:?} in: {said}");
    }
    assert!(!said.contains("row 1:"), "{said}");
}

#[test]
fn eval_says_what_it_cannot_do() {
    let folder = Folder::new("eval-refused");
    let model = model();
    let data = folder.write("a.jsonl", "{\"text\": \"the cat is on the mat\"}\n");
    let eval = ["eval", "-m", &model, "--data", &data];
    let said = json(&[&eval[..], &["--json"]].concat());
    assert!(said["base"]["tokens"].as_u64() > Some(3), "a text needs no template: {said}");
    fails(&[&eval[..], &["--generate"]].concat(), 1, &["the data are texts, which ask nothing"]);
    fails(&[&eval[..], &["--rows", "1"]].concat(), 1, &["--generate"]);
    fails(&[&eval[..], &["-n", "0"]].concat(), 1, &["`--max-tokens` is 0"]);
    let chats = folder.write("b.jsonl", facts());
    // No answer is longer than the context, and without answers there is no room for them.
    for most in ["100000000", "18446744073709551615"] {
        ok(&[&eval[..], &["-n", most]].concat());
        let eval = ["eval", "-m", &model, "--template", "plain", "--data", &chats, "--rows", "1"];
        ok(&[&eval[..], &["--generate", "-n", most]].concat());
        let run = ["run", "-m", &model, "--template", "plain", "-p", "the cat?", "-n", most];
        ok(&run);
    }
    let said = fails(&["eval", "-m", &model, "--data", &chats], 1, &["row 1: template:"]);
    assert!(said.contains("--template plain"), "{said}");
}
