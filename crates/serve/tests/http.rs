//! The HTTP interface over real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

#[path = "common/client.rs"]
mod client;
mod common;

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use client::{Event, Events, get, post, post_text, raw_reply, send, stream};
use common::{Fixture, idle, metric};
use graph::DType;
use model::{Engine, EngineConfig, GenerateConfig, generate};
use serde_json::{Value, json};
use serve::http::{Http, Limits};
use serve::request::Host;
use serve::{Options, Server};
use text::{ChatTemplate, Message, SamplerConfig, SpecialTokens};

/// A toy that is served.
struct Served {
    toy: Fixture,
    server: Server,
    host: Host,
    http: Http,
}

impl Served {
    fn new() -> Served {
        Served::with(Options::default(), Limits::default())
    }

    fn with(options: Options, limits: Limits) -> Served {
        let toy = Fixture::llama();
        let server = toy.server(options);
        let mut host = Host::new(server.model().clone(), "base".into(), DType::F16);
        let tokens = SpecialTokens::of(host.model.tokenizer());
        host.template = ChatTemplate::builtin("plain", tokens).map_err(|e| e.to_string());
        host.train_dir = server.options().train_dir.clone();
        let http = listen(limits);
        http.serve(server.clone(), host.clone());
        Served { toy, server, host, http }
    }

    fn at(&self) -> SocketAddr {
        self.http.address()
    }

    /// What the model says to a prompt when nothing else is asked of it, and why it ends.
    fn alone(&self, prompt: &[u32], max_tokens: usize, stops: &[&str]) -> (String, &'static str) {
        let config = EngineConfig { cache: DType::F16, positions: 1024, batch: 64, states: 2 };
        let mut engine = Engine::new(self.server.model().clone(), config).unwrap();
        let seq = engine.cache().open();
        let config = GenerateConfig {
            max_tokens,
            sampler: SamplerConfig { logit_bias: unending().clone(), ..SamplerConfig::greedy() },
            seed: 0,
            stops: stops.iter().map(ToString::to_string).collect(),
            adapter: None,
        };
        let said = generate(&mut engine, seq, prompt, &config, &mut |_| true).unwrap();
        (said.text, said.finish.as_str())
    }

    fn tokens(&self, question: &str) -> Vec<u32> {
        let messages = [Message::new("user", question)];
        let template = self.host.template.as_ref().unwrap();
        text::encode_chat(self.host.model.tokenizer(), template, &messages, &[]).unwrap()
    }
}

fn listen(limits: Limits) -> Http {
    Http::start(TcpListener::bind("127.0.0.1:0").unwrap(), limits).unwrap()
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// A greedy request for an answer of so many tokens.
fn chat(question: &str, max_tokens: usize) -> Value {
    json!({
        "model": "base",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logit_bias": unending(),
    })
}

/// A request whose answer takes long.
fn endless() -> Value {
    chat("Tell me everything.", 900)
}

/// The tokens that end an answer, banned, so that answers are as long as they may be.
fn unending() -> &'static BTreeMap<u32, f32> {
    static BANNED: OnceLock<BTreeMap<u32, f32>> = OnceLock::new();
    let ends = || {
        let model = Fixture::llama().model();
        model.tokenizer().eog_ids().iter().map(|&id| (id, -100.0)).collect()
    };
    BANNED.get_or_init(ends)
}

fn with(mut value: Value, changes: &Value) -> Value {
    for (key, change) in changes.as_object().unwrap() {
        value[key.as_str()] = change.clone();
    }
    value
}

/// The text and the finish reason of a stream, which must be whole.
fn gathered(events: Events) -> (String, String) {
    let (mut text, mut finish) = (String::new(), String::new());
    let mut done = false;
    for event in events {
        assert!(!done, "nothing follows [DONE]");
        match event {
            Event::Data(data) => {
                let choice = &data["choices"][0];
                let piece = choice["delta"]["content"].as_str().or(choice["text"].as_str());
                text += piece.unwrap_or_default();
                finish += choice["finish_reason"].as_str().unwrap_or_default();
            }
            Event::Done => done = true,
            Event::Comment => {}
            Event::Error(e) => panic!("{e}"),
        }
    }
    assert!(done, "the stream ends with [DONE]");
    (text, finish)
}

#[test]
fn a_chat_streamed_or_whole_is_what_the_model_generates() {
    let served = Served::new();
    for question in ["Who are you?", "Where is Highbury, and why?"] {
        let tokens = served.tokens(question);
        let (text, finish) = served.alone(&tokens, 24, &[]);
        assert!(!text.is_empty());
        let reply = post(served.at(), CHAT, &chat(question, 24));
        let answer = reply.ok();
        assert_eq!(reply.header("x-gradus-generation"), Some("0"));
        assert_eq!(answer["object"], "chat.completion");
        assert_eq!(answer["model"], "base");
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"], json!({"role": "assistant", "content": text}));
        assert_eq!(choice["finish_reason"], finish);
        let usage = &answer["usage"];
        assert_eq!(usage["prompt_tokens"], tokens.len());
        assert_eq!(usage["completion_tokens"], 24);
        assert_eq!(usage["total_tokens"], tokens.len() + 24);

        let events = stream(served.at(), CHAT, &chat(question, 24));
        assert_eq!(gathered(events), (text.clone(), finish.to_string()));
        // The pieces have the shape that the openai package reads.
        let body = with(chat(question, 24), &json!({"stream_options": {"include_usage": true}}));
        let events: Vec<Event> = stream(served.at(), CHAT, &body).collect();
        let data: Vec<&Value> = events
            .iter()
            .filter_map(|e| if let Event::Data(data) = e { Some(data) } else { None })
            .collect();
        let (usage, pieces) = data.split_last().unwrap();
        assert_eq!(usage["choices"], json!([]));
        assert_eq!(usage["usage"]["completion_tokens"], 24);
        assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
        for piece in pieces {
            assert_eq!(piece["object"], "chat.completion.chunk");
            assert_eq!((&piece["id"], &piece["usage"]), (&usage["id"], &Value::Null));
        }
        assert_eq!(events.last(), Some(&Event::Done));
    }
    served.http.stop(Duration::ZERO);
}

#[test]
fn a_completion_is_what_the_model_generates_up_to_a_stop_string() {
    let served = Served::new();
    let prompt = text::encode_prompt(served.host.model.tokenizer(), "Once upon").unwrap();
    let (text, _) = served.alone(&prompt, 30, &[]);
    let body = |changes: Value| {
        let body = json!({
            "prompt": "Once upon",
            "temperature": 0,
            "max_tokens": 30,
            "logit_bias": unending(),
        });
        with(body, &changes)
    };
    let answer = post(served.at(), TEXT, &body(json!({}))).ok();
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["text"], text);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let answer = post(served.at(), TEXT, &body(json!({"prompt": prompt}))).ok();
    assert_eq!(answer["choices"][0]["text"], text);
    let events = stream(served.at(), TEXT, &body(json!({})));
    assert_eq!(gathered(events), (text.clone(), "length".to_string()));

    // A piece from the middle of it ends it.
    let middle = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stop: String = text[middle..].chars().take(3).collect();
    let expected = served.alone(&prompt, 30, &[&stop]);
    assert_eq!(expected.1, "stop");
    for stop in [json!(stop), json!(["never said", stop])] {
        let answer = post(served.at(), TEXT, &body(json!({ "stop": stop }))).ok();
        assert_eq!(answer["choices"][0]["text"], expected.0);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let events = stream(served.at(), TEXT, &body(json!({ "stop": stop })));
        assert_eq!(gathered(events), (expected.0.clone(), "stop".to_string()));
    }
    served.http.stop(Duration::ZERO);
}

#[test]
fn the_same_seed_says_the_same_and_none_says_something_else() {
    let served = Served::new();
    let said = |seed: Value| {
        let changes = json!({"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed});
        let body = with(chat("Who?", 20), &changes);
        post(served.at(), CHAT, &body).ok()["choices"][0]["message"].to_string()
    };
    assert_eq!(said(json!(7)), said(json!(7)));
    assert_ne!(said(json!(7)), said(json!(8)));
    assert_ne!(said(Value::Null), said(Value::Null));
    served.http.stop(Duration::ZERO);
}

#[test]
fn every_refusal_has_its_status_code_and_field() {
    let served = Served::new();
    let at = served.at();
    let long = "why ".repeat(3000);
    for (path, body, status, code, field, part) in [
        (CHAT, json!({}), 400, "invalid_input", Some("messages"), "missing"),
        (CHAT, with(chat("x", 1), &json!({"n": 2})), 400, "invalid_input", Some("n"), "not supp"),
        (CHAT, with(chat("x", 1), &json!({"x": 2})), 400, "invalid_input", Some("x"), "unknown"),
        (
            CHAT,
            with(chat("x", 1), &json!({"model": "nobody"})),
            404,
            "unknown_model",
            Some("model"),
            "there are: base",
        ),
        (CHAT, chat(&long, 1), 400, "context_length_exceeded", Some("messages"), "tokens"),
        (TEXT, json!({ "prompt": long }), 400, "context_length_exceeded", Some("prompt"), "tokens"),
        (TEXT, json!({"prompt": []}), 400, "invalid_input", Some("prompt"), "empty"),
        ("/train", json!({"out": "x.gguf", "rank": 0}), 400, "invalid_input", Some("rank"), "256"),
        ("/train", json!({"out": "../x.gguf"}), 400, "bad_path", Some("out"), "one of"),
        ("/train", json!({"out": "x.gguf"}), 400, "invalid_input", Some("examples"), "missing"),
        (
            "/train",
            json!({"out": "x.gguf", "examples": []}),
            400,
            "bad_data",
            Some("examples"),
            "empty",
        ),
        ("/train/cancel", json!({}), 409, "not_running", None, ""),
        ("/train/cancel", json!({"out": 1}), 400, "invalid_input", Some("out"), "unknown"),
        ("/train/pause", json!({"out": "x.gguf"}), 409, "not_running", None, ""),
        ("/train/resume", json!({}), 400, "invalid_input", Some("out"), "missing"),
        ("/learn", json!({"alias": "x"}), 400, "invalid_input", Some("examples"), "missing"),
        ("/learn/promote", json!({"alias": "x"}), 404, "unknown_model", Some("alias"), "no adapt"),
        ("/learn/discard", json!({"alias": "x"}), 404, "unknown_model", Some("alias"), "no adapt"),
        (
            "/lora-adapters/load",
            json!({"name": "no.gguf"}),
            400,
            "bad_path",
            Some("name"),
            "not in",
        ),
        (
            "/lora-adapters/unload",
            json!({"alias": "x"}),
            404,
            "unknown_model",
            Some("alias"),
            "no adapt",
        ),
    ] {
        post(at, path, &body).is(status, code, field, part);
    }
    post_text(at, CHAT, "{\"messages\": [").is(400, "invalid_input", Some("messages"), "EOF");
    post_text(at, "/train", "{\"lr\": NaN}").is(
        400,
        "invalid_input",
        Some("lr"),
        "not usable JSON",
    );
    // A refusal of a stream is no stream.
    post(at, CHAT, &with(chat(&long, 1), &json!({"stream": true}))).is(
        400,
        "context_length_exceeded",
        Some("messages"),
        "tokens",
    );
    let reply = get(at, "/nowhere");
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (404, &Value::Null));
    assert_eq!(get(at, CHAT).status, 405);
    assert_eq!(metric(&served.server, "gradus_panics_total"), 0.0);
    served.http.stop(Duration::ZERO);
}

/// FIELD-REPORTS F67: a turn with text after one with an image, in the same slot, ended the server.
/// What a model does not take is refused by part, and leaves nothing behind in the only slot.
#[test]
fn f67_an_image_is_refused_and_the_next_turn_says_what_it_says_alone() {
    let served = Served::with(Options { slots: 1, ..Options::default() }, Limits::default());
    let at = served.at();
    let text = || post(at, CHAT, &chat("Who are you?", 8)).json()["choices"].clone();
    let alone = text();
    for part in [
        json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
    ] {
        let kind = part["type"].as_str().unwrap().to_string();
        let parts = json!([{"type": "text", "text": "What is this?"}, part]);
        let image = json!({"messages": [{"role": "user", "content": parts}]});
        let said = format!("content part 1 is of type \"{kind}\"");
        for stream in [false, true] {
            let image = with(with(chat("x", 8), &image), &json!({"stream": stream}));
            post(at, CHAT, &image).is(400, "invalid_input", Some("messages[0].content"), &said);
            assert_eq!(text(), alone);
        }
    }
    idle(&served.server);
}

#[test]
fn training_is_off_without_a_folder() {
    let toy = Fixture::llama();
    let model = toy.model();
    let server = Server::start(model.clone(), Options::default()).unwrap();
    let http = listen(Limits::default());
    let mut host = Host::new(model, "base".into(), DType::F16);
    host.template = Err("toy.gguf: there is no chat template".into());
    http.serve(server, host);
    assert_eq!(get(http.address(), "/train").ok(), json!({"state": "unavailable"}));
    for path in [
        "/train",
        "/train/cancel",
        "/train/pause",
        "/train/resume",
        "/learn",
        "/learn/promote",
        "/learn/discard",
        "/lora-adapters/load",
        "/lora-adapters/unload",
    ] {
        post(http.address(), path, &json!({})).is(400, "training_off", None, "--train-dir");
    }
    // Without a template there is no chat, but text goes on.
    post(http.address(), CHAT, &chat("x", 1)).is(
        400,
        "invalid_input",
        Some("messages"),
        "template",
    );
    post(http.address(), TEXT, &json!({"prompt": "x", "max_tokens": 1})).ok();
    http.stop(Duration::ZERO);
}

#[test]
fn f60_adapters_come_and_go_while_it_runs() {
    let served = Served::new();
    let at = served.at();
    let said = |model: &str| {
        let reply = post(at, CHAT, &with(chat("Who?", 12), &json!({ "model": model })));
        let text = reply.ok()["choices"][0]["message"]["content"].clone();
        (text, reply.header("x-gradus-generation").unwrap().to_string())
    };
    let base = said("base");
    served.toy.adapter_file("a");
    let loaded = post(at, "/lora-adapters/load", &json!({"name": "a.gguf"})).ok();
    assert_eq!(loaded, json!({"ok": true, "alias": "a", "generation": 1}));
    let a = said("a");
    assert_eq!((a.1.as_str(), base.1.as_str()), ("1", "0"));
    assert_ne!(a.0, base.0);
    assert_eq!(said("base"), base);
    let renamed = json!({"name": "a.gguf", "alias": "again"});
    assert_eq!(post(at, "/lora-adapters/load", &renamed).ok()["generation"], 1);
    assert_eq!(said("again").0, a.0);

    let models = get(at, "/v1/models").ok();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["base", "a", "again"]);
    assert_eq!(models["data"][1]["parent"], "base");
    let list = get(at, "/lora-adapters").ok();
    assert_eq!(list[0]["alias"], "a");
    assert!(list[0]["path"].as_str().unwrap().ends_with("a.gguf"));

    post(at, "/lora-adapters/unload", &json!({"alias": "a"})).ok();
    post(at, CHAT, &with(chat("Who?", 1), &json!({"model": "a"}))).is(
        404,
        "unknown_model",
        Some("model"),
        "there are: base, again",
    );
    served.http.stop(Duration::ZERO);
}

fn until(mut what: impl FnMut() -> bool, within: Duration) {
    let began = Instant::now();
    while !what() {
        assert!(began.elapsed() < within, "it does not come about");
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn lessons() -> Value {
    json!([
        {"prompt": "Who?", "completion": "Emma Woodhouse."},
        {"messages": [
            {"role": "user", "content": "Where?"},
            {"role": "assistant", "content": "In Highbury."},
        ]},
    ])
}

#[test]
fn a_job_is_started_watched_and_its_adapter_served() {
    let served = Served::new();
    let at = served.at();
    assert_eq!(get(at, "/train").ok()["state"], "idle");
    let job = json!({
        "out": "lessons.gguf", "examples": lessons(), "epochs": 4, "lr": 0.01, "val_split": 0.5,
        "targets": "attn_q,attn_v,ffn_up", "rank": 4,
    });
    let begun = post(at, "/train", &job).ok();
    assert_eq!(begun["ok"], true);
    assert_eq!(begun["status"]["out"], "lessons.gguf");
    until(|| get(at, "/train").ok()["state"] == "done", Duration::from_secs(60));
    let status = get(at, "/train").ok();
    assert_eq!((&status["examples"], &status["window"]), (&json!(2), &json!(256)));
    assert_eq!(status["epochs"].as_array().unwrap().len(), 4);
    assert!(status["epochs"][3]["eval_loss"].is_f64());
    assert_eq!((&status["alias"], &status["generation"]), (&json!("lessons"), &json!(1)));
    assert_eq!((&status["moved"], &status["unrouted"]), (&json!([6, 6]), &json!([])));
    let reply = post(at, CHAT, &with(chat("Who?", 4), &json!({"model": "lessons"})));
    assert_eq!((reply.status, reply.header("x-gradus-generation")), (200, Some("1")));

    // What another job would take that goes on with this adapter.
    let more =
        json!({"out": "more.gguf", "examples": lessons(), "from": "lessons.gguf", "plan": true});
    let plan =
        |changes: &Value| post(at, "/train", &with(more.clone(), changes)).ok()["plan"].clone();
    let whole = plan(&json!({}));
    assert_eq!((&whole["targets"], &whole["fits"]), (&json!(6), &json!(true)));
    assert_eq!((&whole["recompute"], &whole["seconds"]), (&json!(false), &Value::Null));
    assert_eq!(whole["devices"].as_array().unwrap().len(), 1);
    let needed = |plan: &Value| plan["needed_mib"].as_f64().unwrap();
    let parts = ["arena_mib", "parameters_mib", "scratch_mib", "data_mib"];
    let sum: f64 = parts.iter().map(|part| whole[part].as_f64().unwrap()).sum();
    assert!((needed(&whole) - sum).abs() < 1e-9, "{whole}");
    // It recomputes by itself where that makes it fit, unless it must not.
    let tight = needed(&whole) - 0.01;
    let recomputed = plan(&json!({ "memory_budget_mib": tight }));
    assert_eq!((&recomputed["recompute"], &recomputed["fits"]), (&json!(true), &json!(true)));
    assert!(needed(&recomputed) < tight);
    let never = plan(&json!({ "memory_budget_mib": tight, "recompute": false }));
    assert_eq!((&never["recompute"], &never["fits"]), (&json!(false), &json!(false)));
    assert!(never["instead"].as_str().unwrap().contains("`recompute`"), "{never}");
    let more = with(more, &json!({"plan": false, "memory_budget_mib": tight}));
    post(at, "/train", &more).ok();
    until(|| get(at, "/train").ok()["state"] == "done", Duration::from_secs(60));
    // What it goes on with is not written over.
    let reply = post(at, "/train", &with(more, &json!({"from": "more.gguf"})));
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!("out")));

    // Controls reach a run under its own name only.
    let long = with(job, &json!({"out": "long.gguf", "epochs": 100, "val_split": 0}));
    post(at, "/train", &long).ok();
    post(at, "/train", &long).is(409, "run_in_progress", None, "");
    let pause = |out: &str| post(at, "/train/pause", &json!({ "out": out }));
    pause("other.gguf").is(409, "not_running", Some("out"), "`long.gguf`");
    pause("long.gguf").ok();
    until(|| get(at, "/train").ok()["paused"] == true, Duration::from_secs(20));
    post(at, "/train/resume", &json!({"out": "long.gguf"})).ok();
    assert_eq!(post(at, "/train/cancel", &json!({})).ok()["ok"], true);
    until(|| get(at, "/train").ok()["state"] == "cancelled", Duration::from_secs(20));
    served.http.stop(Duration::ZERO);
}

/// What a run's last step came to is looked at before it takes the place of what is served.
#[test]
fn a_job_whose_last_step_blows_up_fails_and_replaces_nothing() {
    let served = Served::new();
    let at = served.at();
    let job = json!({"out": "n.gguf", "examples": lessons(), "lr": 0.01, "val_split": 0});
    post(at, "/train", &job).ok();
    until(|| get(at, "/train").ok()["state"] == "done", Duration::from_secs(60));
    let file = served.toy.dir().join("n.gguf");
    let good = std::fs::read(&file).unwrap();
    let wild = json!({"optimizer": "sgd", "lr": 1, "alpha": 1e13});
    post(at, "/train", &with(job, &wild)).ok();
    until(|| get(at, "/train").ok()["state"] == "error", Duration::from_secs(60));
    let status = get(at, "/train").ok();
    assert_eq!(status["error"]["code"], "non_finite", "{status}");
    let why = status["error"]["message"].as_str().unwrap();
    assert!(why.starts_with("after step 1, of the last window the loss is "), "{why}");
    assert!(why.contains(" at `blk."), "{why}");
    assert!(std::fs::read(&file).unwrap() == good);
    let reply = post(at, CHAT, &with(chat("Who?", 4), &json!({"model": "n"})));
    assert_eq!((reply.status, reply.header("x-gradus-generation")), (200, Some("1")));
    served.http.stop(Duration::ZERO);
}

/// Numbers that are not finite are no fault of who asks; what a bias leaves nothing of is.
#[test]
fn an_adapter_that_gives_no_numbers_is_a_fault_of_its_own() {
    let served = Served::new();
    let at = served.at();
    let (file, model) = (served.toy.adapter_file("a"), served.server.model().clone());
    let mut adapter = model::Adapter::read(&file, &model).unwrap();
    adapter.tensors.values_mut().for_each(|pair| pair.b.fill(1e30));
    adapter.write(&served.toy.dir().join("wild.gguf"), &model).unwrap();
    post(at, "/lora-adapters/load", &json!({"name": "wild.gguf"})).ok();
    let ask = with(chat("Who?", 4), &json!({"model": "wild"}));
    post(at, CHAT, &ask).is(500, "non_finite", None, "`wild`: logit 0 of ");
    assert_eq!(post(at, CHAT, &chat("Who?", 4)).status, 200);
    served.http.stop(Duration::ZERO);
}

/// What an alias has is what settings are about where they do not say.
#[test]
fn ranks_of_what_an_alias_has_can_be_repeated() {
    let served = Served::new();
    let at = served.at();
    let lesson = json!({"alias": "emma", "examples": lessons(), "lr": 0.01, "yield": false});
    let ranks = |n: u64| with(lesson.clone(), &json!({"ranks": {"ffn": n}}));
    post(at, "/learn", &ranks(8)).is(400, "invalid_input", Some("ranks"), "none of the targets");
    post(at, "/learn", &with(ranks(8), &json!({"targets": "attn_q,ffn"}))).ok();
    post(at, "/learn", &ranks(8)).ok();
    post(at, "/learn", &ranks(4)).is(400, "invalid_input", Some("ranks"), "which it keeps");
    let other = with(lesson.clone(), &json!({"ranks": {"attn_v": 8}}));
    post(at, "/learn", &other).is(400, "invalid_input", Some("ranks"), "none of the targets");
    post(at, "/learn/promote", &json!({"alias": "emma"})).ok();
    post(at, "/learn", &ranks(8)).ok();
    served.http.stop(Duration::ZERO);
}

#[test]
fn what_is_learned_is_served_when_it_is_promoted() {
    let served = Served::new();
    let at = served.at();
    let lesson = json!({
        "alias": "emma", "examples": lessons(), "epochs": 3, "lr": 0.01, "yield": false,
    });
    let learned = post(at, "/learn", &lesson).ok();
    assert_eq!((&learned["alias"], &learned["served_generation"]), (&json!("emma"), &json!(0)));
    let (before, after) = (learned["loss_before"].as_f64(), learned["loss_after"].as_f64());
    assert!(after.unwrap() < before.unwrap(), "{learned}");
    let ask = with(chat("Who?", 2), &json!({"model": "emma"}));
    post(at, CHAT, &ask).is(404, "unknown_model", Some("model"), "emma");
    let promoted = post(at, "/learn/promote", &json!({"alias": "emma"})).ok();
    assert_eq!(promoted, json!({"ok": true, "alias": "emma", "generation": 1}));
    assert_eq!(post(at, CHAT, &ask).header("x-gradus-generation"), Some("1"));

    let more = post(at, "/learn", &lesson).ok();
    assert!(more["total_steps"].as_u64() > more["steps"].as_u64(), "{more}");
    assert_eq!(more["served_generation"], 1);
    post(at, "/learn/discard", &json!({"alias": "emma"})).ok();
    let again = post(at, "/learn/promote", &json!({"alias": "emma"}));
    assert_eq!((again.status, &again.json()["error"]["code"]), (409, &json!("adapter_state")));
    served.http.stop(Duration::ZERO);
}

/// f68: a client that leaves is not answered any further, streamed or not.
#[test]
fn f68_clients_that_leave_free_their_slots() {
    let served = Served::with(Options { queue: 256, ..Options::default() }, Limits::default());
    let body = endless();
    let streams: Vec<Events> = (0..40).map(|_| stream(served.at(), CHAT, &body)).collect();
    let first: Vec<Events> = streams
        .into_iter()
        .enumerate()
        .map(|(i, mut events)| {
            // Those that have a slot have something to say.
            if i < 4 {
                events.text().unwrap();
            }
            events
        })
        .collect();
    let whole: Vec<TcpStream> = (0..10)
        .map(|_| {
            let mut connection = TcpStream::connect(served.at()).unwrap();
            let text = body.to_string();
            let head = format!(
                "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n",
                text.len()
            );
            connection.write_all((head + &text).as_bytes()).unwrap();
            connection
        })
        .collect();
    let there = || {
        metric(&served.server, "gradus_turns_running")
            + metric(&served.server, "gradus_turns_waiting")
    };
    until(|| there() == 50.0, Duration::from_secs(20));
    drop((first, whole));
    idle(&served.server);
    assert_eq!(metric(&served.server, "gradus_turns_cancelled_total"), 50.0);
    // The next one is answered as ever.
    let (text, _) = served.alone(&served.tokens("Who?"), 8, &[]);
    assert_eq!(gathered(stream(served.at(), CHAT, &chat("Who?", 8))).0, text);
    served.http.stop(Duration::ZERO);
}

#[test]
fn more_than_may_wait_is_told_to_come_again() {
    let options = Options { slots: 1, queue: 1, ..Options::default() };
    let limits = Limits { keep_alive: Duration::from_millis(20), ..Limits::default() };
    let served = Served::with(options, limits);
    let mut running = stream(served.at(), CHAT, &endless());
    running.text().unwrap();
    let mut waiting = stream(served.at(), CHAT, &chat("And then?", 3));
    let refused = post(served.at(), CHAT, &chat("Me too.", 3));
    refused.is(429, "queue_full", None, "try again later");
    assert_eq!(refused.header("retry-after"), Some("1"));
    // Who waits is told that the connection is alive.
    assert!(matches!(waiting.next(), Some(Event::Data(_))));
    assert_eq!(waiting.next(), Some(Event::Comment));
    assert_eq!(get(served.at(), "/health").ok(), json!({"status": "ok"}));
    drop(running);
    assert_eq!(gathered(waiting).1, "length");
    served.http.stop(Duration::ZERO);
}

#[test]
fn it_is_alive_before_it_is_ready_and_says_when_it_stops() {
    let http = listen(Limits::default());
    let at = http.address();
    assert_eq!(get(at, "/health").ok(), json!({"status": "ok"}));
    for reply in [get(at, "/ready"), get(at, "/v1/models"), post(at, CHAT, &chat("x", 1))] {
        reply.is(503, "loading", None, "being loaded");
    }
    assert_eq!(get(at, "/train").ok(), json!({"state": "unavailable"}));
    let toy = Fixture::llama();
    let server = toy.server(Options::default());
    http.serve(server.clone(), Host::new(server.model().clone(), "base".into(), DType::F16));
    assert_eq!(get(at, "/ready").ok(), json!({"status": "ready"}));
    let body = json!({"prompt": "x", "max_tokens": 900, "temperature": 0});
    let mut running = stream(at, TEXT, &body);
    running.text().unwrap();
    let stopping = std::thread::spawn(move || http.stop(Duration::from_millis(100)));
    // The turn in flight gets its time, then an error in its stream.
    let last = running.last().unwrap();
    match &last {
        Event::Error(e) => assert!(e["error"]["code"].is_string(), "{e}"),
        other => assert_eq!(*other, Event::Done),
    }
    stopping.join().unwrap();
    assert!(TcpStream::connect(at).is_err(), "nobody listens any more");
}

#[test]
fn metrics_are_in_the_text_format() {
    let served = Served::new();
    post(served.at(), CHAT, &chat("Who?", 3)).ok();
    // The loop counts a batch when it is through with it.
    let counted = || metric(&served.server, "gradus_generated_tokens_total") == 3.0;
    until(counted, Duration::from_secs(1));
    let reply = get(served.at(), "/metrics");
    assert_eq!(reply.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let lines: Vec<&str> = reply.body.lines().collect();
    for metric in lines.chunks(3) {
        let [help, kind, value] = metric else { panic!("{metric:?}") };
        let (name, number) = value.split_once(' ').unwrap();
        assert!(help.starts_with(&format!("# HELP {name} ")), "{help}");
        assert!(kind.starts_with(&format!("# TYPE {name} ")), "{kind}");
        assert!(number.parse::<f64>().unwrap().is_finite());
    }
    let value = |name: &str| lines.iter().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
    assert_eq!(value("gradus_generated_tokens_total"), Some("3"));
    assert_eq!(value("gradus_panics_total"), Some("0"));
    assert_eq!(value("gradus_http_requests_total"), Some("2"));
    served.http.stop(Duration::ZERO);
}

#[test]
fn connections_and_bodies_have_bounds() {
    let limits = Limits {
        connections: 3,
        head_time: Duration::from_millis(300),
        body_time: Duration::from_millis(300),
        ..Limits::default()
    };
    let served = Served::with(Options::default(), limits);
    let at = served.at();
    let open = || served.http.address();
    // A head that does not come.
    let slow: Vec<TcpStream> = (0..3)
        .map(|_| {
            let mut stream = TcpStream::connect(open()).unwrap();
            stream.write_all(b"POST /train HTTP/1.1\r\n").unwrap();
            stream
        })
        .collect();
    until(|| client::raw(at, b"").is_some_and(|head| head.status == 503), Duration::from_secs(5));
    // They are closed, and others are answered.
    until(
        || client::raw(at, b"GET /health HTTP/1.1\r\n\r\n").is_some_and(|head| head.status == 200),
        Duration::from_secs(5),
    );
    drop(slow);
    // A body that does not come, or is too large, whether it says so or not.
    let began = Instant::now();
    let reply =
        raw_reply(at, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{");
    reply.is(400, "invalid_input", None, "did not arrive within 300ms");
    assert!(began.elapsed() < Duration::from_secs(5));
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{";
    raw_reply(at, head.as_bytes()).is(400, "invalid_input", None, "at most 16777216 bytes");
    let small = "POST /train/pause HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunks = format!("{small}20000\r\n{}\r\n0\r\n\r\n", " ".repeat(0x20000));
    raw_reply(at, chunks.as_bytes()).is(400, "invalid_input", None, "at most 65536 bytes");
    served.http.stop(Duration::ZERO);
}

/// f09: a hundred requests that are wrong, each in its own way and place, change no byte of
/// what four clients read.
#[test]
fn f09_a_hundred_bad_requests_change_no_stream() {
    let served = Served::new();
    let at = served.at();
    let questions = ["Who?", "Where?", "When, then?", "Why would anybody?"];
    let expected = questions.map(|q| served.alone(&served.tokens(q), 200, &[]));
    let reading: Vec<_> = questions
        .into_iter()
        .map(|q| std::thread::spawn(move || gathered(stream(at, CHAT, &chat(q, 200)))))
        .collect();
    let bad = [
        ("/train", json!({"out": "x.gguf", "rank": 1_000_000_000}).to_string()),
        ("/train", "{\"lr\": NaN, \"out\": \"x.gguf\"}".to_string()),
        ("/train", json!({"out": "/etc/passwd.gguf"}).to_string()),
        ("/train", json!({"out": "x.gguf", "targets": "nothing"}).to_string()),
        ("/train", json!({"out": "x.gguf", "window": 1 << 20}).to_string()),
        ("/train", "[".repeat(100_000)),
        (
            "/train",
            json!({"out": "x.gguf", "examples": lessons(), "memory_budget_mib": 1}).to_string(),
        ),
        ("/learn", json!({"alias": "../x", "examples": lessons()}).to_string()),
        (CHAT, "{".to_string()),
        (CHAT, chat("x", 0).to_string()),
    ];
    for i in 0..100 {
        let (path, body) = &bad[i % bad.len()];
        let reply = post_text(at, path, body);
        assert!((400..500).contains(&reply.status), "{path}: {}", reply.body);
        assert!(reply.json()["error"]["message"].is_string());
        assert_eq!(get(at, "/health").status, 200);
    }
    for (reading, (text, finish)) in reading.into_iter().zip(expected) {
        assert_eq!(reading.join().unwrap(), (text, finish.to_string()));
    }
    assert_eq!(metric(&served.server, "gradus_panics_total"), 0.0);
    let _ = send(at, "GET", "/health", "");
    served.http.stop(Duration::ZERO);
}
