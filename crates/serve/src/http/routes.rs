//! Every other route: models, state, training, adapters.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use graph::Code;
use serde_json::{Value, json};
use train::TrainConfig;

use super::reply::{self, Refused};
use super::{App, Handled, Served, caught, completions};
use crate::request::{self, MAX_TRAIN_BODY};
use crate::{DataReport, Error, JobPlan, Learned, MetricKind, Result, Server};

/// Most bytes of a body that only names something.
const SMALL_BODY: usize = 64 << 10;

pub(super) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/chat/completions", post(completions::chat))
        .route("/v1/completions", post(completions::text))
        .route("/train", get(train_status).post(train))
        .route("/train/cancel", post(cancel))
        .route("/train/pause", post(pause))
        .route("/train/resume", post(resume))
        .route("/learn", post(learn))
        .route("/learn/promote", post(promote))
        .route("/learn/discard", post(discard))
        .route("/lora-adapters", get(adapters))
        .route("/lora-adapters/load", post(load))
        .route("/lora-adapters/unload", post(unload))
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .layer(middleware::from_fn_with_state(app.clone(), count))
        .with_state(app)
}

async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    app.requests.fetch_add(1, Ordering::Relaxed);
    caught(&app, next.run(request)).await
}

async fn no_path(method: Method, uri: Uri) -> Response {
    let path: String = uri.path().chars().take(100).collect();
    reply::no_route(StatusCode::NOT_FOUND, format!("there is no {method} {path}"))
}

async fn no_method(method: Method, uri: Uri) -> Response {
    let message = format!("{} does not take {method}", uri.path());
    reply::no_route(StatusCode::METHOD_NOT_ALLOWED, message)
}

/// The process answers. Nothing is waited for.
async fn health() -> Response {
    reply::ok(&json!({"status": "ok"}))
}

/// Requests are taken.
async fn ready(State(app): State<Arc<App>>) -> Handled {
    match app.served()?.server.is_ready() {
        true => Ok(reply::ok(&json!({"status": "ready"}))),
        false => Err(Refused::Unavailable("stopping", "the server is stopping")),
    }
}

/// Prometheus' text format, version 0.0.4.
async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut text = String::new();
    let mut line = |name: &str, help: &str, kind: MetricKind, value: f64| {
        let kind = match kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
    };
    if let Some(served) = app.served.get() {
        for metric in served.server.metrics() {
            line(metric.name, metric.help, metric.kind, metric.value);
        }
    }
    for (name, help, kind, number) in [
        ("gradus_http_requests_total", "Requests begun.", MetricKind::Counter, &app.requests),
        (
            "gradus_http_connections",
            "Connections that are open.",
            MetricKind::Gauge,
            &app.connections,
        ),
        (
            "gradus_http_connections_refused_total",
            "Connections beyond the most there may be.",
            MetricKind::Counter,
            &app.refused_connections,
        ),
    ] {
        line(name, help, kind, number.load(Ordering::Relaxed) as f64);
    }
    reply::body(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
}

/// The base model, and every alias that something is served under.
async fn models(State(app): State<Arc<App>>) -> Handled {
    let served = app.served()?;
    let base = served.host.name.as_str();
    let names = served.server.names();
    let can_answer = names.iter().enumerate().filter(|(i, s)| *i == 0 || s.generation > 0);
    let data: Vec<Value> = can_answer
        .map(|(i, s)| {
            json!({
                "id": s.name,
                "object": "model",
                "created": s.created,
                "owned_by": "gradus",
                "root": base,
                "parent": if i == 0 { Value::Null } else { base.into() },
                "generation": s.generation,
            })
        })
        .collect();
    Ok(reply::ok(&json!({"object": "list", "data": data})))
}

/// Every alias: what is served under it and what was learned for it.
async fn adapters(State(app): State<Arc<App>>) -> Handled {
    let served = app.served()?;
    let adapter = |s: &crate::Served| {
        json!({
            "alias": s.name,
            "generation": s.generation,
            "created": s.created,
            "path": s.file,
            "shadow_steps": s.shadow_steps,
        })
    };
    let list: Vec<Value> = served.server.names().iter().skip(1).map(adapter).collect();
    Ok(reply::ok(&Value::Array(list)))
}

fn status_of(server: &Server) -> Value {
    // What is only numbers and text can be written.
    serde_json::to_value(server.train_status()).unwrap_or_default()
}

async fn train_status(State(app): State<Arc<App>>) -> Response {
    match app.served.get() {
        Some(served) if served.host.train_dir.is_some() => reply::ok(&status_of(&served.server)),
        _ => reply::ok(&json!({"state": "unavailable"})),
    }
}

/// Tells work that goes on without its client that the client has left.
struct Gone(Arc<AtomicBool>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads a body and does what it asks for where waiting is allowed. The work can ask whether its
/// client is still there.
async fn job(
    app: &Arc<App>,
    request: Request,
    most: usize,
    work: impl FnOnce(&[u8], &Served, &dyn Fn() -> bool) -> Result<Value> + Send + 'static,
) -> Handled {
    app.served()?.host.train_dir()?;
    let permit = app.jobs.clone().try_acquire_owned().map_err(|_| {
        let message = "too many jobs are being read or learned; try again later";
        Error::new(Code::QueueFull, message)
    })?;
    let (body, place) = app.body(request, most).await?;
    let gone = Gone(Arc::new(AtomicBool::new(false)));
    let (inside, left) = (app.clone(), gone.0.clone());
    let done = app.blocking(move || {
        let (_permit, _place) = (permit, place);
        let served = inside.served.get();
        let served = served.ok_or_else(|| Error::new(Code::Internal, "there is no server"))?;
        work(&body, served, &|| !left.load(Ordering::Relaxed))
    });
    let done = done.await;
    drop(gone);
    Ok(reply::ok(&done??))
}

fn planned(config: &TrainConfig, plan: &JobPlan) -> Value {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    let JobPlan { arena_bytes, parameter_bytes, scratch_bytes, data_bytes, .. } = plan;
    json!({
        "trains": true,
        "fits": plan.instead.is_none(),
        "instead": plan.instead,
        "steps": plan.steps,
        "seconds": plan.seconds,
        "parameters": plan.parameters,
        "targets": config.targets.len(),
        "window": config.longest(),
        "chunk": config.graph.rows,
        "recompute": plan.recompute,
        "arena_mib": mib(*arena_bytes),
        "parameters_mib": mib(*parameter_bytes),
        "scratch_mib": mib(*scratch_bytes),
        "data_mib": mib(*data_bytes),
        "needed_mib": mib(arena_bytes + parameter_bytes + scratch_bytes + data_bytes),
        "allowed_mib": plan.allowed_bytes.map(mib),
        "devices": plan.devices,
        "fallbacks": plan.fallbacks,
    })
}

fn started(server: &Server) -> Value {
    json!({"ok": true, "status": status_of(server)})
}

async fn train(State(app): State<Arc<App>>, request: Request) -> Handled {
    let work = |body: &[u8], served: &Served, wanted: &dyn Fn() -> bool| {
        let job = request::train(body, &served.host, wanted)?;
        if job.plan {
            let config = job.config.clone();
            return Ok(json!({"ok": true, "plan": planned(&config, &served.server.plan(job)?)}));
        }
        served.server.train(job)?;
        Ok(started(&served.server))
    };
    job(&app, request, MAX_TRAIN_BODY, work).await
}

/// A control of the run: quick, and never turned away because jobs are being read.
async fn control(
    app: &Arc<App>,
    request: Request,
    act: impl FnOnce(&[u8], &Server) -> Result<Value>,
) -> Handled {
    let served = app.served()?;
    served.host.train_dir()?;
    let (body, _place) = app.body(request, SMALL_BODY).await?;
    Ok(reply::ok(&act(&body, &served.server)?))
}

async fn cancel(State(app): State<Arc<App>>, request: Request) -> Handled {
    control(&app, request, |body, server| {
        request::nothing(body)?;
        server.cancel()?;
        Ok(started(server))
    })
    .await
}

async fn pause(State(app): State<Arc<App>>, request: Request) -> Handled {
    control(&app, request, |body, server| {
        server.pause(&request::out(body)?)?;
        Ok(started(server))
    })
    .await
}

async fn resume(State(app): State<Arc<App>>, request: Request) -> Handled {
    control(&app, request, |body, server| {
        server.resume(&request::out(body)?)?;
        Ok(started(server))
    })
    .await
}

fn learned(alias: &str, learned: &Learned, data: &DataReport) -> Value {
    json!({
        "ok": true,
        "alias": alias,
        "steps": learned.steps,
        "total_steps": learned.total_steps,
        "loss_before": learned.loss_before,
        "loss_after": learned.loss_after,
        "served_generation": learned.served_generation,
        "window": data.window,
        "examples": data.examples,
        "examples_truncated": data.truncated,
        "examples_skipped": data.skipped,
        "not_rendered": data.not_rendered,
        "trainable_tokens": data.trainable_tokens,
    })
}

async fn learn(State(app): State<Arc<App>>, request: Request) -> Handled {
    let work = |body: &[u8], served: &Served, wanted: &dyn Fn() -> bool| {
        let known = |alias: &str| served.server.targets_of(alias);
        let (job, data) = request::learn(body, &served.host, &known, wanted)?;
        let alias = job.alias.clone();
        Ok(learned(&alias, &served.server.learn(job)?, &data))
    };
    job(&app, request, MAX_TRAIN_BODY, work).await
}

async fn promote(State(app): State<Arc<App>>, request: Request) -> Handled {
    let work = |body: &[u8], served: &Served, _: &dyn Fn() -> bool| {
        let alias = request::alias(body)?;
        let generation = served.server.promote(&alias)?;
        Ok(json!({"ok": true, "alias": alias, "generation": generation}))
    };
    job(&app, request, SMALL_BODY, work).await
}

async fn discard(State(app): State<Arc<App>>, request: Request) -> Handled {
    let work = |body: &[u8], served: &Served, _: &dyn Fn() -> bool| {
        let alias = request::alias(body)?;
        served.server.discard(&alias)?;
        Ok(json!({"ok": true, "alias": alias}))
    };
    job(&app, request, SMALL_BODY, work).await
}

async fn load(State(app): State<Arc<App>>, request: Request) -> Handled {
    let work = |body: &[u8], served: &Served, _: &dyn Fn() -> bool| {
        let (alias, file) = request::load_adapter(body, &served.host)?;
        let generation = served.server.load_adapter(&alias, &file)?;
        Ok(json!({"ok": true, "alias": alias, "generation": generation}))
    };
    job(&app, request, SMALL_BODY, work).await
}

async fn unload(State(app): State<Arc<App>>, request: Request) -> Handled {
    let work = |body: &[u8], served: &Served, _: &dyn Fn() -> bool| {
        let alias = request::alias(body)?;
        served.server.unload_adapter(&alias)?;
        Ok(json!({"ok": true, "alias": alias}))
    };
    job(&app, request, SMALL_BODY, work).await
}
