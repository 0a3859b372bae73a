//! A hundred bad jobs in a row, with four clients streaming: each is refused or fails with its own
//! code and message, and nothing else notices. A process of its own, since its memory is measured.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)] // tests

#[path = "common/client.rs"]
#[allow(dead_code, reason = "a part is used")]
mod client;
mod common;
#[path = "common/odd.rs"]
mod odd;

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use client::{Event, Reply, get, post_text, stream};
use common::{Fixture, metric};
use graph::DType;
use odd::Odd;
use serde_json::{Value, json};
use serve::http::{Http, Limits};
use serve::request::Host;
use serve::{Options, Server};
use text::{ChatTemplate, SpecialTokens};

/// Bytes that the jobs of a hundred after the first of each kind may add.
const MOST: usize = 1 << 20;

/// Hundreds of jobs, at most.
const HUNDREDS: usize = 4;

/// Renders, and never ends where somebody says `loop`.
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\
    {% if 'loop' in m.content %}{% for i in range(9999) %}{% for j in range(9999) %}\
    {% set x = i * j %}{% endfor %}{% endfor %}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}assistant: {% endif %}";

/// What the system says of the memory of this process.
fn memory(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(field)).unwrap();
    line.trim_matches([':', '\t', ' ']).trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Bytes of this process in memory that belong to it alone.
fn resident() -> usize {
    memory("RssAnon")
}

fn lessons(content: &str) -> Value {
    json!([{"messages": [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "That is so."},
    ]}])
}

struct Bad {
    what: &'static str,
    path: &'static str,
    body: String,
    status: u16,
    code: &'static str,
    /// Part of the message: the field, or the op or node.
    names: &'static str,
}

/// One of each kind.
fn kinds() -> Vec<Bad> {
    let job = |changes: Value| {
        let mut body = json!({
            "out": "job.gguf", "examples": lessons("Who are you?"), "targets": "all",
            "val_split": 0, "share_ppm": 500_000,
        });
        for (key, value) in changes.as_object().unwrap() {
            body[key.as_str()] = value.clone();
        }
        body.to_string()
    };
    let train = |what, changes, status, code, names| {
        let body = job(changes);
        Bad { what, path: "/train", body, status, code, names }
    };
    let raw = |what, body: &str, names| {
        let body = body.to_string();
        Bad { what, path: "/train", body, status: 400, code: "invalid_input", names }
    };
    let load = |file: &str| json!({"name": file}).to_string();
    vec![
        train("rank 0", json!({"rank": 0}), 400, "invalid_input", "rank"),
        train("rank 10^9", json!({"rank": 1_000_000_000}), 400, "invalid_input", "rank"),
        train(
            "a window beyond memory",
            json!({"window": 1024, "memory_budget_mib": 1, "examples": lessons(&"word ".repeat(150))}),
            422,
            "over_budget",
            "MiB",
        ),
        raw("NaN", "{\"out\": \"job.gguf\", \"lr\": NaN}", "lr"),
        train("no data", json!({"examples": []}), 400, "bad_data", "examples"),
        train("an unknown target", json!({"targets": "attn_x"}), 400, "invalid_input", "attn_x"),
        train("a path outside", json!({"out": "../job.gguf"}), 400, "bad_path", "out"),
        train("a link outside", json!({"out": "link.gguf"}), 400, "bad_path", "out"),
        raw("broken JSON", "{\"out\": \"job.gguf\", ", "JSON"),
        train(
            "a template that loops",
            json!({"examples": lessons("loop")}),
            400,
            "bad_data",
            "steps",
        ),
        train("an op without a kernel", json!({}), 422, "no_kernel", "SwigluBack at node `blk.1"),
        train("a device that faults", json!({}), 200, "internal", "blk.1."),
        Bad {
            what: "an adapter of another model",
            path: "/lora-adapters/load",
            body: load("foreign.gguf"),
            status: 400,
            code: "adapter_architecture",
            names: "foreign.gguf",
        },
    ]
}

/// One measures at a time.
static MEASURED: Mutex<()> = Mutex::new(());

/// An adapter to go on with is in memory once, also where its run is only planned.
#[test]
fn a_plan_takes_no_copy_of_the_adapter_it_goes_on_with() {
    let _alone = MEASURED.lock().unwrap();
    let toy = Fixture::llama();
    let server = toy.server_on(toy.model(), Options::default());
    let targets = train::select_targets(server.model(), &["ffn".into()]).unwrap();
    let of_rank = |rank| {
        let targets = targets.iter().map(|target| (target.as_str(), rank));
        model::Adapter::fresh(server.model(), targets, 16.0, 1).unwrap()
    };
    let plan = |adapter: model::Adapter| {
        let mut job = toy.job("planned", serve::Pacing::Never);
        job.config.go_on_with(&adapter);
        job.from = Some(adapter);
        server.plan(job).unwrap()
    };
    // What a plan takes by itself.
    plan(of_rank(4));
    let adapter = of_rank(2048);
    let pairs = adapter.tensors.values();
    let bytes = 4 * pairs.map(|pair| pair.a.len() + pair.b.len()).sum::<usize>();
    assert!(bytes > 32 << 20, "{bytes}");
    // The peak begins anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory("VmRSS");
    plan(adapter);
    let more = memory("VmHWM").saturating_sub(before);
    assert!(more < bytes / 2, "{more} bytes more, the adapter has {bytes}");
    server.stop(Duration::ZERO);
}

/// Streams one answer after the other; each must be the first, and none may stall.
fn listen(
    at: SocketAddr,
    number: usize,
    stop: Arc<AtomicBool>,
    heard: Arc<AtomicUsize>,
) -> JoinHandle<(usize, Duration)> {
    std::thread::spawn(move || {
        let body = json!({
            "model": "base", "temperature": 0, "max_tokens": 120,
            "messages": [{"role": "user", "content": format!("Question {number}?")}],
        });
        let (mut first, mut answers, mut longest) = (None::<String>, 0, Duration::ZERO);
        while !stop.load(Ordering::Relaxed) {
            let (mut text, mut done, mut last) = (String::new(), false, Instant::now());
            for event in stream(at, "/v1/chat/completions", &body) {
                longest = longest.max(last.elapsed());
                last = Instant::now();
                match event {
                    Event::Data(data) => {
                        let piece = data["choices"][0]["delta"]["content"].as_str();
                        text += piece.unwrap_or_default();
                    }
                    Event::Done => done = true,
                    Event::Comment => {}
                    Event::Error(e) => panic!("{e}"),
                }
            }
            assert!(done, "a stream was dropped");
            assert_eq!(*first.get_or_insert_with(|| text.clone()), text, "a stream changed");
            answers += 1;
            heard.fetch_add(1, Ordering::Relaxed);
        }
        (answers, longest)
    })
}

#[test]
fn a_hundred_bad_jobs_in_a_row_are_refused_by_name_and_nothing_else_notices() {
    let _alone = MEASURED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (toy, device) = (Fixture::llama(), Odd::new());
    let dir = toy.dir();
    let _ = std::fs::remove_file(dir.join("link.gguf"));
    std::os::unix::fs::symlink("/tmp/elsewhere.gguf", dir.join("link.gguf")).unwrap();
    let other = Fixture::hybrid();
    std::fs::copy(other.adapter_file("a"), dir.join("foreign.gguf")).unwrap();

    let server: Server = toy.server_on(toy.model_on(device.clone()), Options::default());
    let mut host = Host::new(server.model().clone(), "base".into(), DType::F16);
    let tokens = SpecialTokens::of(host.model.tokenizer());
    host.template = ChatTemplate::parse("test", TEMPLATE, tokens).map_err(|e| e.to_string());
    host.train_dir = server.options().train_dir.clone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let http = Http::start(listener, Limits::default()).unwrap();
    http.serve(server.clone(), host);
    let at = http.address();

    let stop = Arc::new(AtomicBool::new(false));
    let heard = Arc::new(AtomicUsize::new(0));
    let listeners: Vec<_> = (0..4).map(|i| listen(at, i, stop.clone(), heard.clone())).collect();
    // The streams' own graphs are there by then.
    while heard.load(Ordering::Relaxed) < 20 {
        assert!(!listeners.iter().any(JoinHandle::is_finished), "a stream failed");
        std::thread::sleep(Duration::from_millis(5));
    }
    let kinds = kinds();
    // Memory grows in steps that the allocator takes for its threads, not for jobs: of a few
    // hundreds of jobs one must add nothing, which no leak of 14 KB a job would survive.
    let mut grown = Vec::new();
    let mut before = 0;
    for i in 0..HUNDREDS * 100 {
        if i % 100 == 2 * kinds.len() {
            before = resident();
        }
        let bad = &kinds[i % kinds.len()];
        let broken = match bad.code {
            "no_kernel" => Some(&device.lacks),
            "internal" => Some(&device.faults),
            _ => None,
        };
        broken.iter().for_each(|b| *b.lock().unwrap() = "SwigluBack");
        let reply: Reply = post_text(at, bad.path, &bad.body);
        assert_eq!(reply.status, bad.status, "{}: {}", bad.what, reply.body);
        let (code, message) = if bad.status == 200 {
            let ended = |s: &Value| s["state"] != "running" && s["state"] != "starting";
            let status = loop {
                let status = get(at, "/train").json();
                if ended(&status) {
                    break status;
                }
                std::thread::sleep(Duration::from_millis(2));
            };
            (status["error"]["code"].clone(), status["error"]["message"].clone())
        } else {
            let error = &reply.json()["error"];
            let message = format!("{} {}", error["param"], error["message"]);
            (error["code"].clone(), json!(message))
        };
        broken.iter().for_each(|b| *b.lock().unwrap() = "");
        assert_eq!(code, bad.code, "{}: {message}", bad.what);
        assert!(message.as_str().unwrap().contains(bad.names), "{}: {message}", bad.what);
        assert_eq!(get(at, "/health").status, 200);
        if i % 100 == 99 {
            grown.push(resident().saturating_sub(before));
            if grown.last().is_some_and(|&bytes| bytes < MOST) {
                break;
            }
        }
    }
    println!("{grown:?} bytes more");
    stop.store(true, Ordering::Relaxed);
    for listener in listeners {
        let (answers, longest) = listener.join().expect("a stream failed");
        assert!(answers > 1, "{answers} answers");
        assert!(longest < Duration::from_secs(2), "a stream stalled for {longest:?}");
    }
    assert!(grown.iter().any(|&bytes| bytes < MOST), "{grown:?} bytes more");
    assert_eq!(metric(&server, "gradus_panics_total"), 0.0);
    assert_eq!(get(at, "/v1/models").json()["data"].as_array().unwrap().len(), 1);
    assert!(!dir.join("job.gguf").exists());
    http.stop(Duration::ZERO);
    server.stop(Duration::ZERO);
}
