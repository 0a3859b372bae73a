use std::path::Path;
use std::sync::{Arc, OnceLock};

use gguf::TensorType;
use graph::{Code, DType, GradPrecision, Recompute};
use model::Model;
use model::toy::Toy;
use serde_json::{Value, json};
use text::{ChatTemplate, Message, SpecialTokens};

use super::*;
use crate::{Ask, DataReport, LearnJob, Pacing, TrainJob};
use train::{Method, TrainConfig};

fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let bytes = Toy::new("llama", TensorType::Q8_0, 3).gguf().unwrap();
        let file = gguf::Gguf::from_bytes("toy.gguf", bytes).unwrap();
        Arc::new(Model::from_gguf(file, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap())
    };
    MODEL.get_or_init(load).clone()
}

fn host() -> Host {
    let mut host = Host::new(model(), "toy".into(), DType::F16);
    let tokens = SpecialTokens::of(host.model.tokenizer());
    host.template = ChatTemplate::builtin("plain", tokens).map_err(|e| e.to_string());
    host.train_dir = Some(std::env::temp_dir());
    host
}

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gradus-names-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path.canonicalize().unwrap())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn bytes(value: &Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

/// `base` with these fields set; those set to null are left out.
fn with(base: &Value, changes: &Value) -> Value {
    let mut value = base.clone();
    for (key, change) in changes.as_object().unwrap() {
        match change {
            Value::Null => drop(value.as_object_mut().unwrap().remove(key)),
            other => value[key.as_str()] = other.clone(),
        }
    }
    value
}

#[track_caller]
fn refused<T>(result: Result<T>, field: &str, part: &str) -> Error {
    let Err(e) = result else { panic!("it is not refused for `{field}`: {part}") };
    assert_eq!(e.field.as_deref(), Some(field), "{e}");
    assert!(e.message.contains(part), "no {part:?} in: {e}");
    assert!(!e.message.contains('\n'), "{e}");
    e
}

fn chat_body() -> Value {
    json!({"model": "toy", "messages": [{"role": "user", "content": "Who are you?"}]})
}

fn asked(changes: &Value) -> Result<(Ask, Reply)> {
    chat(&bytes(&with(&chat_body(), changes)), &host(), 7)
}

#[test]
fn a_chat_request_is_what_the_template_says() {
    let host = host();
    let (ask, reply) = asked(&json!({})).unwrap();
    let messages = [Message::new("user", "Who are you?")];
    let template = host.template.as_ref().unwrap();
    let ids = text::encode_chat(host.model.tokenizer(), template, &messages, &[]).unwrap();
    assert_eq!(ask.tokens, ids);
    assert_eq!((ask.model.as_str(), ask.seed, ask.max_tokens), ("toy", 7, 1024));
    assert_eq!(ask.sampler, text::SamplerConfig::default());
    assert_eq!(reply, Reply { stream: false, include_usage: false });

    let (ask, reply) = asked(&json!({
        "max_completion_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "typical_p": 0.9, "repeat_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 1,
        "repeat_last_n": 9, "logit_bias": {"3": -100}, "seed": -1, "stop": ["a", "b"], "n": 1,
        "stream": true, "stream_options": {"include_usage": true}, "user": "me",
        "tool_choice": "none", "tools": [{"type": "function"}], "parallel_tool_calls": true,
        "response_format": {"type": "text"}, "logprobs": false,
    }))
    .unwrap();
    assert_eq!((ask.max_tokens, ask.seed, ask.stops.len()), (5, u64::MAX, 2));
    assert_eq!((ask.sampler.top_k, ask.sampler.repeat_last_n), (3, 9));
    assert_eq!(ask.sampler.logit_bias.get(&3), Some(&-100.0));
    assert_eq!(reply, Reply { stream: true, include_usage: true });

    // What is null is not there.
    let body = br#"{"messages": [{"role": "user", "content": "Who are you?"}], "stop": null,
        "logprobs": null, "tools": null, "n": null, "max_tokens": null, "response_format": null}"#;
    let (nulls, _) = chat(body, &host, 7).unwrap();
    assert_eq!(nulls.tokens, ids);
}

/// f45: one way from messages to tokens, whether rendered here or by the client.
#[test]
fn f45_rendered_text_has_the_tokens_of_its_messages() {
    let host = host();
    let (ask, _) = asked(&json!({})).unwrap();
    let template = host.template.as_ref().unwrap();
    let text = template.render(&[Message::new("user", "Who are you?")], &[], true).unwrap();
    let (rendered, _) = completion(&bytes(&json!({"prompt": text})), &host, 7).unwrap();
    assert_eq!(rendered.tokens, ask.tokens);
    for prompt in [json!(ask.tokens), json!([ask.tokens]), json!([text])] {
        let (again, _) = completion(&bytes(&json!({"prompt": prompt})), &host, 7).unwrap();
        assert_eq!(again.tokens, ask.tokens);
    }
}

#[test]
fn a_chat_request_is_refused_by_field() {
    let message = |m: Value| json!({"messages": [{"role": "user", "content": "x"}, m]});
    for (changes, field, part) in [
        (json!({"temprature": 1}), "temprature", "unknown field"),
        (json!({"messages": null}), "messages", "missing"),
        (json!({"messages": []}), "messages", "empty"),
        (json!({"messages": "hello"}), "messages", "expected a list"),
        (json!({"messages": ["hello"]}), "messages[0]", "expected an object"),
        (message(json!({"content": "x"})), "messages[1].role", "missing"),
        (message(json!({"role": 3})), "messages[1].role", "expected a string"),
        (message(json!({"role": "user", "content": 3})), "messages[1].content", "expected a"),
        (
            message(json!({"role": "user", "content": [{"type": "image_url"}]})),
            "messages[1].content",
            "of type \"image_url\"",
        ),
        (message(json!({"role": "user", "content": ["x"]})), "messages[1].content[0]", "object"),
        (
            message(json!({"role": "user", "content": "x", "train": true})),
            "messages[1].train",
            "training data only",
        ),
        (message(json!({"role": "pirate", "content": "x"})), "messages", "refuses"),
        (json!({"model": 3}), "model", "expected a string"),
        (json!({"max_tokens": 0}), "max_tokens", "from 1 to"),
        (json!({"max_tokens": -1}), "max_tokens", "from 1 to"),
        (json!({"max_tokens": 1.5}), "max_tokens", "from 1 to"),
        (json!({"max_tokens": 1e300}), "max_tokens", "from 1 to"),
        (json!({"max_completion_tokens": "9"}), "max_completion_tokens", "from 1 to"),
        (json!({"max_completion_tokens": 9, "max_tokens": 8}), "max_tokens", "give one"),
        (json!({"temperature": -0.1}), "temperature", "0 to 100"),
        (json!({"temperature": "hot"}), "temperature", "a number"),
        (json!({"temperature": 1e300}), "temperature", "a number"),
        (json!({"top_p": 1.1}), "top_p", "0 to 1"),
        (json!({"min_p": -1}), "min_p", "0 to 1"),
        (json!({"top_k": -1}), "top_k", "from 0 to"),
        (json!({"repeat_penalty": 0}), "repeat_penalty", "above 0"),
        (json!({"logit_bias": [1]}), "logit_bias", "expected an object"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias.x", "names no token"),
        (json!({"logit_bias": {"99999999": 1}}), "logit_bias.99999999", "names no token"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1", "-100 to 100"),
        (json!({"seed": 0.5}), "seed", "whole number"),
        (json!({"stop": 3}), "stop", "a string or a list"),
        (json!({"stop": ["a", 3]}), "stop[1]", "a string"),
        (json!({"stop": ["a", ""]}), "stop[1]", "is empty"),
        (json!({"stop": vec!["a"; 65]}), "stop[64]", "one too many"),
        (json!({"stream": "yes"}), "stream", "true or false"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", "not true"),
        (
            json!({"stream": true, "stream_options": {"usage": true}}),
            "stream_options.usage",
            "unknown field",
        ),
        (json!({"tools": {}}), "tools", "a list"),
        (json!({"tools": [3]}), "tools[0]", "an object"),
    ] {
        refused(asked(&changes), field, part);
    }
    let many = vec![json!({"role": "user", "content": "x"}); 4097];
    refused(asked(&json!({"messages": many})), "messages", "at most 4096");
    let mut bare = host();
    bare.template = Err("no key `tokenizer.chat_template`".into());
    refused(chat(&bytes(&chat_body()), &bare, 0), "messages", "tokenizer.chat_template");
}

/// FIELD-REPORTS F65: a grammar for which a build has no engine ended the process. What others can
/// and this cannot is refused by field, in both interfaces.
#[test]
fn f65_features_that_are_not_there_are_refused_by_field() {
    let completed =
        |changes: &Value| completion(&bytes(&with(&json!({"prompt": "x"}), changes)), &host(), 0);
    for (field, value) in [
        ("grammar", json!("%llguidance {}")),
        ("grammar", json!("root ::= \"yes\"")),
        ("draft_model", json!("small")),
        ("lora", json!([{"id": 0, "scale": 0.5}])),
        ("cache_prompt", json!(true)),
        ("mirostat", json!(2)),
        ("dry_multiplier", json!(0.8)),
        ("image_data", json!([])),
    ] {
        refused(asked(&json!({field: value})), field, "unknown field");
        refused(completed(&json!({field: value})), field, "unknown field");
    }
    for (field, value) in [
        ("n", json!(2)),
        ("logprobs", json!(true)),
        ("top_logprobs", json!(5)),
        ("modalities", json!(["text", "audio"])),
        ("parallel_tool_calls", json!(false)),
    ] {
        refused(asked(&json!({field: value})), field, "not supported");
    }
    for (field, value) in [
        ("n", json!(2)),
        ("best_of", json!(3)),
        ("echo", json!(true)),
        ("suffix", json!("y")),
        ("logprobs", json!(0)),
    ] {
        refused(completed(&json!({field: value})), field, "not supported");
    }
}

/// FIELD-REPORTS F69: a schema that failed to compile gave an answer that nothing constrained, or
/// ended the server. Nothing here constrains an answer, so whatever asks for that is refused: a
/// schema whether it is sound or not, a tool that must be called, arguments that must fit.
#[test]
fn f69_what_would_constrain_an_answer_is_refused() {
    let schemas = [
        json!({"type": "object"}),
        json!({"type": "string", "pattern": "(["}),
        json!({"type": "string", "format": "no-such-format", "unheardOf": 1}),
        json!({"$ref": "#"}),
        json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        json!(3),
    ];
    let formats = schemas.iter().map(
        |schema| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}),
    );
    let mut formats: Vec<Value> = formats.collect();
    formats.extend([json!({"type": "json_object"}), json!({"type": "grammar"}), json!("json")]);
    for format in formats {
        refused(asked(&json!({"response_format": format})), "response_format", "not supported");
    }
    for field in ["json_schema", "grammar", "guided_json", "guided_regex", "structured_outputs"] {
        refused(asked(&json!({field: {"$ref": "#"}})), field, "unknown field");
        let body = with(&json!({"prompt": "x"}), &json!({field: {"$ref": "#"}}));
        refused(completion(&bytes(&body), &host(), 0), field, "unknown field");
    }
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "a"}})] {
        refused(asked(&json!({"tool_choice": choice})), "tool_choice", "cannot be enforced");
    }
    let tool = |strict: Value| {
        let function = json!({"name": "a", "parameters": {"$ref": "#"}, "strict": strict});
        json!({"tools": [{"type": "function"}, {"type": "function", "function": function}]})
    };
    refused(asked(&tool(json!(true))), "tools[1].function.strict", "cannot be enforced");
    refused(asked(&tool(json!("yes"))), "tools[1].function.strict", "cannot be enforced");
    asked(&tool(json!(false))).unwrap();
    asked(&tool(Value::Null)).unwrap();
}

#[test]
fn a_completion_request_is_refused_by_field() {
    for (body, field, part) in [
        (json!({}), "prompt", "missing"),
        (json!({"prompt": 3}), "prompt", "a string, or"),
        (json!({"prompt": []}), "prompt", "empty"),
        (json!({"prompt": ["a", "b"]}), "prompt", "expected one"),
        (json!({"prompt": [1, 99_999_999]}), "prompt[1]", "a token id below"),
        (json!({"prompt": [-1]}), "prompt[0]", "a token id below"),
        (json!({"prompt": "x", "messages": []}), "messages", "unknown field"),
        (json!({"prompt": "x", "max_completion_tokens": 3}), "max_completion_tokens", "unknown"),
    ] {
        refused(completion(&bytes(&body), &host(), 0), field, part);
    }
}

#[test]
fn a_body_is_bounded_and_says_where_it_is_broken() {
    let host = host();
    let said = |body: &[u8]| {
        let e = train(body, &host, &|| true).err().unwrap();
        assert_eq!(e.code, Code::InvalidInput);
        (e.field, e.message)
    };
    for (body, part) in [
        (&b""[..], "EOF"),
        (b"{", "EOF"),
        (b"[]", "a list of 0; expected an object"),
        (b"3", "3; expected an object"),
        (b"{} {}", "trailing"),
        (b"\xff", "expected value"),
    ] {
        let (field, message) = said(body);
        assert_eq!(field, None, "{message}");
        assert!(message.contains(part), "{message}");
    }
    for (body, field, part) in [
        (&b"{\"lr\": NaN}"[..], "lr", "column 8"),
        (b"{\"lr\": 1e999}", "lr", "number out of range"),
        (b"{\"rank\": 8, \"rank\": 9}", "rank", "occurs twice"),
        (b"{\"examples\": [{\"prompt\": 1, \"prompt\": 2}]}", "examples", "`prompt` occurs twice"),
        (b"{\"text\": \"\xff\"}", "text", "invalid unicode"),
    ] {
        let (found, message) = said(body);
        assert_eq!(found.as_deref(), Some(field), "{message}");
        assert!(message.contains(part), "{message}");
    }
    for open in ["[", "{\"x\":"] {
        let (field, message) = said(format!("{{\"examples\": {}", open.repeat(100_000)).as_bytes());
        assert_eq!(field.as_deref(), Some("examples"));
        assert!(message.contains("nests deeper than 32"), "{message}");
    }
    let many = format!("{{\"examples\": [{}0]}}", "0,".repeat(::data::MAX_VALUES));
    assert!(said(many.as_bytes()).1.contains("more than 1048576 values"));
}

fn train_body() -> Value {
    json!({
        "out": "notes.gguf",
        "val_split": 0,
        "examples": [{"prompt": "Who?", "completion": "Emma."}],
    })
}

fn trained(changes: &Value) -> Result<TrainJob> {
    train(&bytes(&with(&train_body(), changes)), &host(), &|| true)
}

#[test]
fn a_training_job_has_the_defaults_and_takes_every_field() {
    let job = trained(&json!({})).unwrap();
    assert_eq!(job.name, "notes");
    assert_eq!(job.out, std::env::temp_dir().canonicalize().unwrap().join("notes.gguf"));
    let TrainConfig { rank, alpha, epochs, lr, seed, targets, graph, .. } = job.config;
    assert_eq!((rank, alpha, epochs, lr, seed), (8, 16.0, 1, 1e-5, 42));
    let expected = ["blk.0.attn_q", "blk.0.attn_v", "blk.1.attn_q", "blk.1.attn_v"];
    assert_eq!(targets, expected.map(|t| format!("{t}.weight")));
    assert_eq!((graph.rows, graph.cache, graph.recompute), (256, DType::F16, Recompute::None));
    assert_eq!((job.pacing, job.memory_budget), (DEFAULT_PACING, None));

    let job = trained(&json!({
        "rank": 256, "alpha": 0.5, "targets": " ffn_up, attn_output ,", "top_layers": 1,
        "window": 512, "chunk": 512, "epochs": 100, "lr": 1, "seed": 7,
        "fit": "left", "memory_budget_mib": 1.5, "share_ppm": 1_000_000, "yield": true,
        "exact": false, "walk_horizon": 0, "walk_host_budget_mib": 0, "recompute": true,
        "grad_precision": "bf16",
    }))
    .unwrap();
    assert_eq!(job.config.targets, ["blk.1.attn_output.weight", "blk.1.ffn_up.weight"]);
    assert_eq!((job.config.rank, job.config.epochs, job.config.seed), (256, 100, 7));
    assert_eq!(job.config.graph.recompute, Recompute::PerLayer);
    assert_eq!(job.config.graph.grad_precision, GradPrecision::Bf16);
    assert_eq!((job.pacing, job.memory_budget), (Pacing::Share(1_000_000), Some(3 << 19)));
    // The window shrinks to what the data need.
    assert_eq!((job.data.window_asked, job.data.window, job.config.graph.rows), (512, 256, 256));
    let job = trained(&json!({
        "targets": "q_proj, ffn", "ranks": {"attn_q": 2, "ffn_up": 3}, "rank": 5,
        "optimizer": "sgd", "momentum": 0.5,
    }))
    .unwrap();
    let ranks: Vec<(&str, usize)> = job.config.ranks().collect();
    assert_eq!(ranks[..2], [("blk.0.attn_q.weight", 2), ("blk.0.ffn_down.weight", 5)]);
    assert_eq!((ranks.len(), job.config.method), (8, Method::Sgd { momentum: 0.5 }));
    let may = |changes: Value| trained(&changes).unwrap().may_recompute;
    assert_eq!((may(json!({})), may(json!({"recompute": false}))), (true, false));
    let pacing = |changes: Value| trained(&changes).unwrap().pacing;
    assert_eq!(pacing(json!({"max_slowdown_ppm": 999_999})), Pacing::Slowdown(999_999));
    assert_eq!(pacing(json!({"yield": false})), Pacing::Never);
}

/// FIELD-REPORTS F33: the loss of GRPO was 0 and its gradient NaN in groups of equal rewards. What is
/// learned here is what examples say; a loss of preferences or rewards, and data for one, are refused
/// by name, and not trained on as if they were examples.
#[test]
fn f33_losses_of_preferences_and_rewards_are_refused_by_name() {
    trained(&json!({"loss": "sft"})).unwrap();
    for loss in ["grpo", "dpo", "orpo", "kto", "ppo", "GRPO"] {
        let said = format!("`loss` is \"{loss}\"");
        refused(trained(&json!({"loss": loss})), "loss", &said);
        refused(trained(&json!({"loss": loss})), "loss", "answers as they are given");
        let body = json!({"alias": "a", "examples": train_body()["examples"], "loss": loss});
        refused(learn(&bytes(&body), &host(), &|_| None, &|| true), "loss", &said);
    }
    refused(trained(&json!({"loss": 3})), "loss", "expected a string");
    for field in ["beta", "num_generations", "reward_funcs", "ref_model"] {
        refused(trained(&json!({field: 2})), field, "unknown field");
    }
    for row in [
        json!({"prompt": "Who?", "chosen": "Emma.", "rejected": "Otto."}),
        json!({"prompt": "Who?", "completion": "Emma.", "rejected": "Otto."}),
        json!({"prompt": "Who?", "completion": "Emma.", "label": true}),
        json!({"prompt": "Who?", "completion": "Emma.", "reward": 1.0}),
        json!({"prompt": "Who?", "completions": ["Emma.", "Otto."], "rewards": [1.0, 1.0]}),
    ] {
        let e = trained(&json!({"examples": [row]})).err().unwrap();
        let named = ["chosen", "rejected", "label", "reward", "completions", "rewards"];
        let said = |field: &&str| e.message.contains(&format!("unknown field \"{field}\""));
        assert!(named.iter().any(said), "{e}");
    }
}

/// A job writes over an adapter, never over the model that is served or another file.
#[test]
fn what_a_job_writes_takes_the_place_of_nothing_but_an_adapter() {
    let folder = Folder::new("out");
    let file = folder.0.join("base.gguf");
    std::fs::write(&file, Toy::new("llama", TensorType::F32, 3).gguf().unwrap()).unwrap();
    std::fs::write(folder.0.join("text.gguf"), "mine").unwrap();
    let served = Model::load(&file, Arc::new(cpu::Cpu::new(1, None).unwrap())).unwrap();
    // Under another name than its file's.
    let mut host = Host { model: Arc::new(served), ..host() };
    host.train_dir = Some(folder.0.clone());
    let out = |name: &str, changes: Value| {
        let body = with(&with(&train_body(), &json!({ "out": name })), &changes);
        train(&bytes(&body), &host, &|| true).map(|job| job.out).map_err(|e| (e.field, e.message))
    };
    for changes in [json!({}), json!({"train_weights": "norm"})] {
        let (field, message) = out("base.gguf", changes).unwrap_err();
        assert_eq!(field.as_deref(), Some("out"));
        assert!(message.contains("the model that is served"), "{message}");
    }
    let (field, message) = out("text.gguf", json!({})).unwrap_err();
    assert_eq!(field.as_deref(), Some("out"));
    assert!(message.contains("is there already and no adapter"), "{message}");
    let new = out("adapter.gguf", json!({})).unwrap();
    let targets = ["blk.0.attn_q.weight"].into_iter().map(|target| (target, 2));
    model::Adapter::fresh(&host.model, targets, 4.0, 1).unwrap().write(&new, &host.model).unwrap();
    assert_eq!(out("adapter.gguf", json!({})).unwrap(), new);
    assert_eq!(std::fs::read(folder.0.join("text.gguf")).unwrap(), b"mine");
}

#[test]
fn a_training_job_is_refused_by_field() {
    for (changes, field, part) in [
        (json!({"top_layer": 1}), "top_layer", "unknown field"),
        (json!({"out": null}), "out", "missing"),
        (json!({"out": 3}), "out", "a string"),
        (json!({"out": "../notes.gguf"}), "out", "contains one of"),
        (json!({"out": "toy.gguf"}), "out", "the base model"),
        (json!({"out": "my notes.gguf"}), "out", "is no alias"),
        (json!({"rank": 0}), "rank", "from 1 to 256"),
        (json!({"rank": 257}), "rank", "from 1 to 256"),
        (json!({"rank": 1_000_000_000}), "rank", "from 1 to 256"),
        (json!({"rank": "8"}), "rank", "from 1 to 256"),
        (json!({"rank": 8.5}), "rank", "from 1 to 256"),
        (json!({"alpha": 0}), "alpha", "above 0"),
        (json!({"alpha": 1e39}), "alpha", "above 0"),
        (json!({"alpha": 1e-60}), "alpha", "above 0"),
        (json!({"targets": ["attn_q"]}), "targets", "a string"),
        (json!({"targets": " , "}), "targets", "empty"),
        (json!({"targets": "attn_q,attn_x"}), "targets", "candidates: all, all-linear, attn, ffn,"),
        (json!({"targets": "attn", "ranks": {"attn_x": 2}}), "ranks", "is no projection"),
        (json!({"ranks": {"attn_q": 0}}), "ranks", "from 1 to 256"),
        (json!({"targets": "attn_q", "ranks": {"ffn": 4}}), "ranks", "none of the targets"),
        (json!({"patience": 2, "val_split": 0}), "patience", "`val_split` of 0"),
        (json!({"keep_best": true, "val_split": 0}), "keep_best", "`val_split` of 0"),
        (json!({"eval_every": 2, "val_split": 0.0}), "eval_every", "`val_split` of 0"),
        (json!({"parse_special": true}), "parse_special", "is about `text`"),
        (json!({"train_weights": "norm", "rank": 4}), "rank", "trains none"),
        (json!({"ranks": [8]}), "ranks", "an object"),
        (json!({"optimizer": "adam"}), "optimizer", "\"adamw\" or \"sgd\""),
        (json!({"momentum": 0.9}), "momentum", "expected `optimizer` to be \"sgd\""),
        (json!({"optimizer": "sgd", "momentum": 1}), "momentum", "from 0 to below 1"),
        (json!({"from": "other.gguf"}), "from", "other.gguf"),
        (json!({"from": "other.gguf", "rank": 8}), "rank", "exclude each other"),
        (json!({"top_layers": 0}), "top_layers", "from 1 to 2"),
        (json!({"top_layers": 3}), "top_layers", "from 1 to 2"),
        (json!({"window": 0}), "window", "from 256 to 1024"),
        (json!({"window": 300}), "window", "a multiple of 256"),
        (json!({"window": 1280}), "window", "from 256 to 1024"),
        (json!({"window": "256"}), "window", "a multiple of 256"),
        (json!({"chunk": 100}), "chunk", "a multiple of 256"),
        (json!({"window": 512, "chunk": 256, "exact": false}), "exact", "gradient of the whole"),
        (json!({"window": 512, "chunk": 512, "walk_horizon": 7}), "walk_horizon", "one graph"),
        (json!({"epochs": 0}), "epochs", "from 1 to 100"),
        (json!({"epochs": 101}), "epochs", "from 1 to 100"),
        (json!({"lr": 0}), "lr", "above 0 and up to 1"),
        (json!({"lr": 1.1}), "lr", "above 0 and up to 1"),
        (json!({"lr": 1e-60}), "lr", "above 0 and up to 1"),
        (json!({"lr": "NaN"}), "lr", "above 0 and up to 1"),
        (json!({"val_split": 1}), "val_split", "from 0 to below 1"),
        (json!({"val_split": -0.1}), "val_split", "from 0 to below 1"),
        (json!({"val_split": 0.1}), "val_split", "none of 1 examples"),
        (json!({"seed": -1}), "seed", "a whole number"),
        (json!({"parse_special": false}), "parse_special", "always parsed"),
        (json!({"parse_special": 1}), "parse_special", "true or false"),
        (json!({"fit": "right"}), "fit", "\"middle\" or \"left\""),
        (json!({"memory_budget_mib": 0.5}), "memory_budget_mib", "from 1"),
        (json!({"share_ppm": 0}), "share_ppm", "from 1 to 1000000"),
        (json!({"share_ppm": 1_000_001}), "share_ppm", "from 1 to 1000000"),
        (json!({"max_slowdown_ppm": 1_000_000}), "max_slowdown_ppm", "from 1 to 999999"),
        (json!({"share_ppm": 1, "max_slowdown_ppm": 1}), "max_slowdown_ppm", "`share_ppm`"),
        (json!({"share_ppm": 1, "yield": false}), "share_ppm", "`yield: false`"),
        (json!({"yield": "false"}), "yield", "true or false"),
        (json!({"recompute": 1}), "recompute", "true or false"),
        (json!({"exact": 1}), "exact", "true or false"),
        (json!({"walk_horizon": 7}), "walk_horizon", "one graph"),
        (json!({"walk_host_budget_mib": 7}), "walk_host_budget_mib", "one graph"),
        (json!({"schedule": "steep"}), "schedule", "cosine"),
        (json!({"warmup": -1}), "warmup", "0"),
        (json!({"weight_decay": 2}), "weight_decay", "from 0 to 1"),
        (json!({"accumulate": 0}), "accumulate", "1"),
        (json!({"clip": -1}), "clip", "positive"),
        (json!({"patience": 0}), "patience", "1"),
        (json!({"checkpoint_every": 0}), "checkpoint_every", "1"),
        (json!({"rslora": 1}), "rslora", "true or false"),
        (json!({"dropout": 1}), "dropout", "from 0 to below 1"),
        (json!({"dropout": -0.1}), "dropout", "from 0 to below 1"),
        (json!({"dropout": "NaN"}), "dropout", "from 0 to below 1"),
        (json!({"dropout": 0.1, "train_weights": "norm"}), "dropout", "exclude each other"),
        (json!({"plan": "yes"}), "plan", "true or false"),
        (json!({"grad_precision": "f16"}), "grad_precision", "\"f32\", \"bf16\" or \"int16\""),
        (json!({"text": "x"}), "text", "exclude each other"),
        (json!({"examples": null}), "examples", "missing"),
        (json!({"examples": []}), "examples", "empty"),
        (json!({"examples": null, "text": ""}), "text", "empty"),
        (json!({"examples": null, "text": "x", "fit": "left"}), "fit", "no effect"),
        (json!({"examples": null, "text": "x"}), "text", "fewer than two windows"),
        (json!({"examples": [3]}), "examples[0]", "an object"),
        (json!({"examples": [{"input": "x"}]}), "examples[0]", "expected either"),
        (json!({"examples": [{"prompt": "x"}]}), "examples[0].completion", "missing"),
        (json!({"examples": [{"prompt": "x", "completion": 3}]}), "examples[0].completion", "str"),
        (json!({"examples": [{"prompt": "x", "completin": "y"}]}), "examples[0].completin", "unk"),
    ] {
        refused(trained(&changes), field, part);
    }
    let example = |e: Value| json!({"examples": [{"prompt": "a", "completion": "b"}, e]});
    let says = |role: &str| json!({"role": role, "content": "x"});
    for (e, field, part) in [
        (json!({"messages": []}), "examples[1].messages", "empty"),
        (json!({"messages": [says("user")]}), "examples[1].messages", "no message of role"),
        (
            json!({"messages": [{"role": "assistant", "content": "x", "train": "no"}]}),
            "examples[1].messages[0].train",
            "true or false",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "x", "train": false}]}),
            "examples[1].messages",
            "no message of role",
        ),
        (json!({"messages": [says("pirate")]}), "examples[1].messages", ""),
        (json!({"messages": [says("user")], "tools": 3}), "examples[1].tools", "a list"),
    ] {
        refused(trained(&example(e)), field, part);
    }
    let mut off = host();
    off.train_dir = None;
    assert_eq!(train(b"{", &off, &|| true).err().unwrap().code, Code::TrainingOff);
    assert_eq!(learn(b"{", &off, &|_| None, &|| true).err().unwrap().code, Code::TrainingOff);
}

/// f46: no field of a job is passed over, at any depth.
#[test]
fn f46_unknown_fields_are_refused() {
    refused(trained(&json!({"mask": true})), "mask", "unknown field");
    let examples = json!([{"prompt": "x", "completion": "y", "weight": 2}]);
    refused(trained(&json!({"examples": examples})), "examples[0].weight", "unknown field");
    let body = bytes(&json!({"alias": "a", "val_split": 0.1, "examples": []}));
    refused(learn(&body, &host(), &|_| None, &|| true), "val_split", "unknown field");
}

/// Every number is looked at before any example is rendered: a template that never ends is not
/// reached.
#[test]
fn numbers_come_before_rendering() {
    let mut host = host();
    let tokens = SpecialTokens::of(host.model.tokenizer());
    let forever = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}\
                   {% endfor %}";
    host.template = ChatTemplate::parse("loop", forever, tokens).map_err(|e| e.to_string());
    let body = bytes(&with(&train_body(), &json!({"rank": 0})));
    refused(train(&body, &host, &|| true), "rank", "from 1 to 256");
    refused(train(&bytes(&train_body()), &host, &|| true), "examples[0].messages", "may never end");
    refused(chat(&bytes(&chat_body()), &host, 0), "messages", "may never end");
}

#[test]
fn data_that_nobody_waits_for_are_not_rendered() {
    let examples = vec![json!({"prompt": "Who?", "completion": "Emma."}); 10];
    let body = bytes(&with(&train_body(), &json!({ "examples": examples })));
    let asked = std::cell::Cell::new(0);
    let wanted = || {
        asked.set(asked.get() + 1);
        asked.get() < 4
    };
    assert_eq!(train(&body, &host(), &wanted).err().unwrap().code, Code::Stopping);
    // Once more to tell why the rendering ended; whoever went on would ask for each message.
    assert!(asked.get() <= 5, "{}", asked.get());
}

#[test]
fn examples_have_the_tokens_that_are_served() {
    let host = host();
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Emma.", "train": false},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Highbury."},
    ]);
    let job = trained(&json!({"examples": [{"messages": messages}]})).unwrap();
    let [example] = &*job.examples else { panic!() };
    let asked: Vec<Value> = messages.as_array().unwrap()[..4]
        .iter()
        .map(|m| json!({"role": m["role"], "content": m["content"]}))
        .collect();
    let (ask, _) = chat(&bytes(&json!({"messages": asked})), &host, 0).unwrap();
    let prompt = ask.tokens.len();
    assert_eq!(example.tokens[..prompt], ask.tokens);
    assert!(example.weights[..prompt].iter().all(|&w| w == 0.0));
    assert!(example.weights[prompt] == 1.0 && example.labelled() > 1);
    let trained: Vec<u32> = example
        .tokens
        .iter()
        .zip(&example.weights)
        .filter(|(_, w)| **w != 0.0)
        .map(|(&t, _)| t)
        .collect();
    let text = host.model.tokenizer().decode(&trained, true).unwrap();
    assert!(text.contains("Highbury.") && !text.contains("Emma"), "{text}");
}

/// A conversation of exchanges with some tens of tokens each.
fn long(exchanges: usize, words: usize) -> Value {
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    for i in 0..exchanges {
        messages.push(json!({"role": "user", "content": format!("{i}? {}", "why ".repeat(words))}));
        messages.push(json!({"role": "assistant", "content": format!("Because {i}.")}));
    }
    json!({"messages": messages})
}

#[test]
fn what_the_template_leaves_out_of_examples_is_counted() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let with_tools = json!({"prompt": "a", "completion": "b", "tools": tools});
    let job = trained(&json!({"examples": [with_tools, {"prompt": "a", "completion": "b"}]}));
    let counted = job.unwrap().data.not_rendered;
    assert_eq!(counted.into_iter().collect::<Vec<_>>(), [("`tools`".to_string(), 1)]);
}

#[test]
fn an_example_that_is_too_long_is_fitted_as_asked() {
    let host = host();
    let fitted = |example: Value, fit: &str| {
        let fit = if fit.is_empty() { Value::Null } else { fit.into() };
        trained(&json!({"fit": fit, "examples": [example, {"prompt": "a", "completion": "b"}]}))
    };
    let text = |tokens: &[u32]| host.model.tokenizer().decode(tokens, true).unwrap();
    refused(fitted(long(40, 8), ""), "examples[0]", "use a larger `window`, or `fit`");

    let job = fitted(long(40, 8), "middle").unwrap();
    let said = text(&job.examples[0].tokens);
    assert!(job.examples[0].tokens.len() <= 257);
    assert!(said.contains("Be brief.") && said.contains("39?") && !said.contains(" 0?"), "{said}");
    assert!(said.contains("Because 38."), "as few exchanges are dropped as possible: {said}");
    let DataReport { examples, truncated, skipped, .. } = job.data;
    assert_eq!((examples, truncated, skipped), (2, 1, 0));
    // One exchange more would not have fitted.
    let kept = said.matches('?').count();
    let more: Vec<Value> = long(40, 8)["messages"]
        .as_array()
        .unwrap()
        .iter()
        .cloned()
        .enumerate()
        .filter(|(i, _)| *i == 0 || *i > 2 * (40 - kept - 1))
        .map(|(_, m)| m)
        .collect();
    refused(fitted(json!({"messages": more}), ""), "examples[0]", "tokens");

    let job = fitted(long(40, 8), "left").unwrap();
    let left = &job.examples[0];
    assert_eq!(left.tokens.len(), 257);
    let bos = host.model.tokenizer().bos().filter(|_| host.model.tokenizer().adds_bos());
    assert!(bos.is_none() || left.tokens.first() == bos.as_ref());
    assert_eq!(left.weights.last(), Some(&1.0), "what follows the last turn is dropped");
    assert!(text(&left.tokens).contains("Because 39.") && !text(&left.tokens).contains("Be brief"));

    // Neither way helps where one exchange is longer than a window.
    let job = fitted(long(1, 600), "middle").unwrap();
    assert_eq!((job.data.skipped, job.examples.len()), (1, 1));
    let mut answer = long(1, 1);
    answer["messages"][2]["content"] = "because ".repeat(600).into();
    let job = fitted(answer.clone(), "left").unwrap();
    assert_eq!((job.data.skipped, job.examples.len()), (1, 1));
    let alone = trained(&json!({"fit": "left", "examples": [answer]}));
    assert_eq!(refused(alone, "examples", "none of the 1").code, Code::BadData);
}

#[test]
fn a_text_is_covered_by_windows_and_what_is_held_out_was_not_seen() {
    let text: String = (0..2000).map(|i| format!("{i} ")).collect();
    let host = host();
    let tokens = host.model.tokenizer().encode(&text, text::Encode::DOCUMENT).unwrap();
    let job = |split: f64| {
        trained(&json!({"examples": null, "text": text, "val_split": split, "window": 512}))
            .unwrap()
    };
    let all = job(0.0);
    assert!(all.examples.iter().all(|e| e.tokens.len() == 513 && e.labelled() == 512));
    let mut seen = vec![false; tokens.len()];
    for (i, e) in all.examples.iter().enumerate() {
        let start = (i * 256).min(tokens.len() - 513);
        assert_eq!(e.tokens, tokens[start..start + 513], "window {i}");
        seen[start..start + 513].fill(true);
    }
    assert!(seen.iter().all(|&s| s), "every token is in a window");
    assert_eq!(all.data.trainable_tokens, 512 * all.examples.len());

    let split = job(0.25);
    let kept = all.examples.len() * 3 / 4;
    assert_eq!(split.examples[..], all.examples[..kept]);
    let last = (kept - 1) * 256 + 513;
    let unseen = split.held_out.iter().map(train::Example::labelled).sum::<usize>();
    assert!(unseen > 0 && unseen == split.data.eval_trainable_tokens);
    // The first window held out begins 256 tokens before the end of the last one trained on.
    let first = &split.held_out[0];
    let shared = last - kept * 256;
    assert!(first.weights[..shared].iter().all(|&w| w == 0.0), "{shared}");
    assert!(first.weights[shared..].iter().all(|&w| w == 1.0));
}

#[test]
fn split_holds_back_the_last() {
    let examples: Vec<Value> =
        (0..100).map(|i| json!({"prompt": format!("{i}?"), "completion": "yes"})).collect();
    for (split, kept) in [(0.0, 100), (0.1, 90), (0.07, 93), (0.5, 50), (0.999, 0)] {
        let job = trained(&json!({"examples": examples, "val_split": split}));
        match job {
            Ok(job) => assert_eq!((job.examples.len(), job.held_out.len()), (kept, 100 - kept)),
            Err(e) => assert!(kept == 0 && e.field.as_deref() == Some("val_split"), "{e}"),
        }
    }
}

#[test]
fn names_are_confined_to_the_folder() {
    let folder = Folder::new("confined");
    let outside = Folder::new("outside");
    std::fs::write(outside.0.join("other.gguf"), b"x").unwrap();
    std::fs::write(folder.0.join("there.gguf"), b"x").unwrap();
    std::fs::create_dir(folder.0.join("folder.gguf")).unwrap();
    for (name, why) in [
        ("", "6 to 200"),
        (".gguf", "6 to 200"),
        (&*format!("{}.gguf", "x".repeat(196)), "6 to 200"),
        ("notes.ggu", "end in .gguf"),
        ("notes.GGUF", "end in .gguf"),
        ("notes.gguf\0", "end in .gguf"),
        ("a\0b.gguf", "control character"),
        ("/etc/x.gguf", "one of"),
        ("a\\b.gguf", "one of"),
        ("c:x.gguf", "one of"),
        ("..x.gguf", "`..`"),
        ("x...gguf", "`..`"),
        ("folder.gguf", "no regular file"),
    ] {
        for result in [
            names::file_to_write("out", &folder.0, name),
            names::file_to_read("out", &folder.0, name),
        ] {
            assert_eq!(refused(result, "out", why).code, Code::BadPath);
        }
    }
    assert!(names::file_to_write("out", &folder.0, "new.gguf").is_ok());
    assert_eq!(
        names::file_to_read("name", &folder.0, "there.gguf").unwrap(),
        folder.0.join("there.gguf")
    );
    refused(names::file_to_read("name", &folder.0, "new.gguf"), "name", "not in the training");
    let gone = names::file_to_write("out", Path::new("/nonexistent"), "new.gguf").unwrap_err();
    assert_eq!(gone.code, Code::BadPath);

    #[cfg(unix)]
    {
        let link = |to: &Path, name: &str| {
            std::os::unix::fs::symlink(to, folder.0.join(name)).unwrap();
        };
        link(&outside.0.join("other.gguf"), "away.gguf");
        link(&outside.0.join("nothing.gguf"), "dangling.gguf");
        link(&folder.0.join("there.gguf"), "inside.gguf");
        for name in ["away.gguf", "dangling.gguf"] {
            for result in [
                names::file_to_write("out", &folder.0, name),
                names::file_to_read("out", &folder.0, name),
            ] {
                assert_eq!(refused(result, "out", "training folder").code, Code::BadPath);
            }
        }
        let inside = names::file_to_read("name", &folder.0, "inside.gguf").unwrap();
        assert_eq!(inside, folder.0.join("there.gguf"));
    }
    for (alias, ok) in [
        ("notes-1.b_c", true),
        ("a b", false),
        ("toy", false),
        ("a/b", false),
        ("", false),
        ("..", false),
    ] {
        assert_eq!(names::check_alias("alias", alias, "toy").is_ok(), ok, "{alias}");
    }
}

#[test]
fn examples_to_learn() {
    let learned = |body: Value| learn(&bytes(&body), &host(), &|_| None, &|| true);
    let example = json!([{"prompt": "Who?", "completion": "Emma."}]);
    let (job, report): (LearnJob, _) =
        learned(json!({"alias": "notes", "examples": example, "lr": 0.5})).unwrap();
    assert_eq!((job.alias.as_str(), job.config.lr, job.examples.len()), ("notes", 0.5, 1));
    assert_eq!((report.examples, report.skipped, job.config.graph.rows), (1, 0, 256));
    // What its optimizer keeps, where it is asked for, is compared field by field.
    let sgd = json!({"alias": "notes", "examples": example, "optimizer": "sgd", "momentum": 0.5});
    assert_eq!(learned(sgd).unwrap().0.asked, ["optimizer", "momentum"]);
    refused(learned(json!({"examples": example})), "alias", "missing");
    refused(learned(json!({"alias": "toy", "examples": example})), "alias", "base model");
    refused(learned(json!({"alias": "a/b", "examples": example})), "alias", "no alias");
    refused(learned(json!({"alias": "a"})), "examples", "missing");
    refused(learned(json!({"alias": "a", "text": "x"})), "text", "unknown field");
}

#[test]
fn requests_about_jobs_and_adapters() {
    let folder = Folder::new("adapters");
    std::fs::write(folder.0.join("there.gguf"), b"x").unwrap();
    let mut host = host();
    host.train_dir = Some(folder.0.clone());
    let load = |body: Value| load_adapter(&bytes(&body), &host);
    let file = folder.0.join("there.gguf");
    assert_eq!(load(json!({"name": "there.gguf"})).unwrap(), ("there".into(), file.clone()));
    let named = load(json!({"name": "there.gguf", "alias": "x"})).unwrap();
    assert_eq!(named, ("x".into(), file));
    // A folder of PEFT.
    let peft = folder.0.join("peft");
    std::fs::create_dir(&peft).unwrap();
    assert_eq!(load(json!({"name": "peft"})).unwrap(), ("peft".into(), peft.clone()));
    for name in ["absent", "../peft", "peft/", "", "there"] {
        assert!(load(json!({ "name": name })).is_err(), "{name}");
    }
    #[cfg(unix)]
    {
        let link = |to: &str, at: &str| std::os::unix::fs::symlink(to, folder.0.join(at)).unwrap();
        link("/etc", "out");
        refused(load(json!({"name": "out"})), "name", "leads out");
        link("/etc/passwd", "peft/adapter_config.json");
        refused(load(json!({"name": "peft"})), "name", "leads out");
    }
    refused(load(json!({})), "name", "missing");
    refused(load(json!({"name": "there.gguf", "id": 3})), "id", "unknown field");
    refused(load(json!({"name": "there.gguf", "alias": "toy"})), "alias", "base model");
    assert_eq!(alias(br#"{"alias": "x"}"#).unwrap(), "x");
    refused(alias(b"{}"), "alias", "missing");
    assert_eq!(out(br#"{"out": "x.gguf"}"#).unwrap(), "x.gguf");
    refused(out(br#"{"out": "x"}"#), "out", "6 to 200");
    refused(out(br#"{"out": "x.gguf", "force": 1}"#), "force", "unknown field");
    assert!(nothing(b" \n").is_ok() && nothing(b"{}").is_ok());
    refused(nothing(b"{\"out\": 1}"), "out", "unknown field");
}
