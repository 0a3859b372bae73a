//! `/v1/chat/completions` and `/v1/completions`: answers, whole or as a stream of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use futures_util::{FutureExt, stream};
use graph::Code;
use serde_json::{Map, Value, json};

use super::{App, Handled, reply};
use crate::request::{self, Host, Reply};
use crate::{Ask, Done, Error, Result, Said, Turn};

/// The generation of the alias that answers; 0 for the base model.
const GENERATION: HeaderName = HeaderName::from_static("x-gradus-generation");

/// Which of the two interfaces.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Kind {
    Chat,
    Text,
}

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Handled {
    answer(&app, request, Kind::Chat).await
}

pub(super) async fn text(State(app): State<Arc<App>>, request: Request) -> Handled {
    answer(&app, request, Kind::Text).await
}

/// A number that nobody can guess, and that no two requests share.
fn fresh() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    static KEYS: std::sync::OnceLock<RandomState> = std::sync::OnceLock::new();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    KEYS.get_or_init(RandomState::new).hash_one(count)
}

/// Counts a request that is being rendered or waits for it.
struct Rendering<'a>(&'a AtomicU64);

impl Drop for Rendering<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn answer(app: &Arc<App>, request: Request, kind: Kind) -> Handled {
    let served = app.served()?;
    let (body, place) = app.body(request, request::MAX_TEXT_BODY).await?;
    let (ask, reply) = {
        let options = served.server.options();
        let most = (options.queue + options.slots) as u64;
        let there = app.rendering.fetch_add(1, Ordering::Relaxed);
        let _counted = Rendering(&app.rendering);
        if there >= most {
            let message = format!("{there} requests are being read, the most there may be");
            return Err(Error::new(Code::QueueFull, message).into());
        }
        let permit = app.renderers.clone().acquire_owned().await;
        let host = served.host.clone();
        let read = move || {
            let (_place, _permit) = (place, permit);
            read(&body, &host, kind)
        };
        app.blocking(read).await??
    };
    let model = ask.model.clone();
    let turn = served.server.ask(ask).map_err(|e| match (kind, e.field.as_deref()) {
        // Whatever a prompt is made of.
        (Kind::Text, Some("messages")) => e.with_field("prompt"),
        _ => e,
    })?;
    let generation = turn.generation();
    let head = Head::new(kind, model);
    let mut response = match reply.stream {
        true => streamed(app.clone(), turn, head, reply),
        false => reply::ok(&whole(turn, &head).await?),
    };
    response.headers_mut().insert(GENERATION, HeaderValue::from(generation));
    Ok(response)
}

fn read(body: &[u8], host: &Host, kind: Kind) -> Result<(Ask, Reply)> {
    match kind {
        Kind::Chat => request::chat(body, host, fresh()),
        Kind::Text => request::completion(body, host, fresh()),
    }
}

/// What every object of an answer says about it.
struct Head {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
}

impl Head {
    fn new(kind: Kind, model: String) -> Head {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Head { kind, id: format!("{prefix}-{:016x}", fresh()), created, model }
    }

    fn object(&self, chunk: bool, choices: &Value, usage: Option<Value>) -> Value {
        let object = match (self.kind, chunk) {
            (Kind::Chat, false) => "chat.completion",
            (Kind::Chat, true) => "chat.completion.chunk",
            (Kind::Text, _) => "text_completion",
        };
        let mut said = Map::new();
        said.insert("id".into(), json!(self.id));
        said.insert("object".into(), json!(object));
        said.insert("created".into(), json!(self.created));
        said.insert("model".into(), json!(self.model));
        said.insert("choices".into(), json!(choices));
        if let Some(usage) = usage {
            said.insert("usage".into(), usage);
        }
        said.into()
    }
}

fn usage(done: &Done) -> Value {
    json!({
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    })
}

/// A turn that ended without saying so.
fn broken() -> Error {
    Error::new(Code::Stopping, "the server stopped before the answer was whole")
}

async fn whole(mut turn: Turn, head: &Head) -> Result<Value> {
    let mut text = String::new();
    let done = loop {
        match turn.next().await {
            Some(Said::Text(piece)) => text.push_str(&piece),
            Some(Said::Done(done)) => break done,
            Some(Said::Failed(e)) => return Err(e),
            None => return Err(broken()),
        }
    };
    let finish = done.finish.as_str();
    let choice = match head.kind {
        Kind::Chat => json!({
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish,
            "logprobs": null,
        }),
        Kind::Text => {
            json!({"index": 0, "text": text, "finish_reason": finish, "logprobs": null})
        }
    };
    Ok(head.object(false, &json!([choice]), Some(usage(&done))))
}

/// An answer on its way to the client. Dropping it ends its turn.
struct Stream {
    app: Arc<App>,
    turn: Turn,
    head: Head,
    include_usage: bool,
    /// Events that are due.
    due: VecDeque<String>,
    ended: bool,
}

fn streamed(app: Arc<App>, turn: Turn, head: Head, reply: Reply) -> Response {
    let include_usage = reply.include_usage;
    let due = VecDeque::new();
    let mut stream = Stream { app, turn, head, include_usage, due, ended: false };
    if stream.head.kind == Kind::Chat {
        stream.chunk(Some(json!({"role": "assistant", "content": ""})), None);
    }
    let events = stream::unfold(stream, |mut stream| async move {
        let event = match AssertUnwindSafe(stream.next()).catch_unwind().await {
            Ok(event) => event?,
            Err(_) => {
                let e = stream.app.panicked();
                stream.due.clear();
                stream.fail(&e);
                stream.due.pop_front()?
            }
        };
        Some((Ok::<_, Infallible>(event), stream))
    });
    let mut response =
        reply::body(StatusCode::OK, "text/event-stream; charset=utf-8", Body::from_stream(events));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that gather an answer before they pass it on should not.
    let buffering = HeaderName::from_static("x-accel-buffering");
    response.headers_mut().insert(buffering, HeaderValue::from_static("no"));
    response
}

impl Stream {
    /// What is to be sent next.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(event) = self.due.pop_front() {
                return Some(event);
            }
            if self.ended {
                return None;
            }
            let keep_alive: Duration = self.app.limits.keep_alive;
            match tokio::time::timeout(keep_alive, self.turn.next()).await {
                Err(_) => return Some(": still here\n\n".into()),
                Ok(Some(Said::Text(text))) => self.chunk(Some(json!(text)), None),
                Ok(Some(Said::Done(done))) => self.end(&done),
                Ok(Some(Said::Failed(e))) => self.fail(&e),
                Ok(None) => self.fail(&broken()),
            }
        }
    }

    fn event(&mut self, value: &Value) {
        // JSON has no line ends in it.
        self.due.push_back(format!("data: {value}\n\n"));
    }

    /// A piece of the answer: its text, or for a chat the object that begins it.
    fn chunk(&mut self, piece: Option<Value>, finish: Option<&str>) {
        let choice = match self.head.kind {
            Kind::Chat => {
                let delta = match piece {
                    Some(Value::String(text)) => json!({ "content": text }),
                    Some(object) => object,
                    None => json!({}),
                };
                json!({"index": 0, "delta": delta, "finish_reason": finish, "logprobs": null})
            }
            Kind::Text => {
                let text = piece.unwrap_or_else(|| json!(""));
                json!({"index": 0, "text": text, "finish_reason": finish, "logprobs": null})
            }
        };
        let usage = self.include_usage.then_some(Value::Null);
        let object = self.head.object(true, &json!([choice]), usage);
        self.event(&object);
    }

    fn end(&mut self, done: &Done) {
        self.chunk(None, Some(done.finish.as_str()));
        if self.include_usage {
            let object = self.head.object(true, &json!([]), Some(usage(done)));
            self.event(&object);
        }
        self.due.push_back("data: [DONE]\n\n".into());
        self.ended = true;
    }

    fn fail(&mut self, e: &Error) {
        self.due.push_back(format!("event: error\ndata: {}\n\n", reply::error_value(e)));
        self.ended = true;
    }
}
