//! `POST /train` and `POST /learn`: settings, targets, data.

use std::collections::BTreeMap;
use std::path::Path;

use data::Fit;
use graph::{GradPrecision, Recompute};
use model::Adapter;
use serde_json::{Map, Value, json};
use train::{GraphConfig, Method, Schedule, TrainConfig, Walks};

use super::data::{BLOCK, Data, corpus, of_rows, of_text, rows};
use super::json::{Fields, body, missing, parse, wrong};
use super::{Host, names};
use crate::{DataReport, Durable, Error, LearnJob, Pacing, Result, TrainJob};

/// How a job that says nothing about it shares the device: it slows turns down by at most a tenth.
pub const DEFAULT_PACING: Pacing = Pacing::Slowdown(100_000);

/// Steps from one checkpoint to the next where a job says nothing about it.
const CHECKPOINT_EVERY: u64 = 50;

/// Most examples of a request.
const MAX_EXAMPLES: usize = 100_000;

/// The settings that jobs of both kinds have, checked against the model.
struct Settings {
    config: TrainConfig,
    fit: Fit,
    pacing: Pacing,
    memory_budget: Option<usize>,
    may_recompute: bool,
}

/// Reads a training job: everything is checked that can be without the graph, then the data are
/// rendered. That may take minutes; `wanted` is asked meanwhile whether anybody still waits.
///
/// # Errors
/// Names the field, or the example and the message, and what is expected.
pub fn train(bytes: &[u8], host: &Host, wanted: &dyn Fn() -> bool) -> Result<TrainJob> {
    let folder = host.train_dir()?;
    let request = parse(bytes)?;
    let asked = asked(&request);
    let mut fields = Fields::new(request, false);
    let out = fields.string("out")?.ok_or_else(|| missing("out", "a name such as `notes.gguf`"))?;
    const OF_ADAPTER: [&str; 7] =
        ["targets", "top_layers", "train_weights", "rank", "ranks", "alpha", "rslora"];
    let adapts = OF_ADAPTER.into_iter().find(|field| fields.has(field));
    let scales = ["rank", "ranks", "alpha", "rslora"].into_iter().find(|field| fields.has(field));
    if let (Some(field), true) = (scales, fields.has("train_weights")) {
        let message = format!("`{field}` is an adapter's, and `train_weights` trains none");
        return Err(Error::field(field, message));
    }
    let settings = settings(&mut fields, host, None)?;
    let share = "a number from 0 to below 1";
    let val_split = fields.number("val_split", |v| (0.0..1.0).contains(&v), share)?.unwrap_or(0.1);
    let parse_special = fields.flag("parse_special")?;
    let plan = fields.flag("plan")?.unwrap_or(false);
    let every = fields.whole("checkpoint_every", 1..=1_000_000)?.unwrap_or(CHECKPOINT_EVERY);
    let from = fields.string("from")?;
    if let Some(field) = from.as_ref().and(adapts) {
        let message = format!("`{field}` and `from` exclude each other: an adapter keeps its own");
        return Err(Error::field(field, message));
    }
    let text = fields.string("text")?;
    let examples = fields.list("examples", MAX_EXAMPLES)?;
    fields.finish()?;
    let path = names::file_to_write("out", folder, &out)?;
    let name = names::alias_of(&out).to_string();
    names::check_alias("out", &name, &host.name)?;
    if host.model.is_at(&path) {
        let message = format!("`out` is {out}, the model that is served; choose another name");
        return Err(Error::field("out", message));
    }
    if settings.config.weights.is_empty() {
        Adapter::check_out(&path).map_err(|e| Error::from(e).with_field("out"))?;
    }
    let durable = Durable::new(folder, &name, bytes, every);

    let Settings { mut config, fit, pacing, memory_budget, may_recompute } = settings;
    let from = match from {
        Some(name) => {
            let read = names::adapter_to_read("from", folder, &name)?;
            check_kept(&read, &out, &path)?;
            let adapter = Adapter::read(&read, &host.model);
            Some(adapter.map_err(|e| Error::from(e).with_field("from"))?)
        }
        None => None,
    };
    from.iter().for_each(|adapter| config.go_on_with(adapter));
    let evaluated = [
        ("patience", config.patience.is_some()),
        ("keep_best", config.keep_best),
        ("eval_every", config.eval_every > 0),
    ];
    if let Some((field, _)) = evaluated.iter().find(|(_, set)| *set && val_split == 0.0) {
        let message = format!(
            "`{field}` is set, but with a `val_split` of 0 nothing is held out to evaluate"
        );
        return Err(Error::field(*field, message));
    }
    let window = config.longest();
    let data = match corpus(text, examples)? {
        Ok(text) => {
            if fit != Fit::Refuse {
                return Err(Error::field("fit", "`fit` has no effect on `text`; leave it out"));
            }
            of_text(&text, parse_special.unwrap_or(false), host, window)?
        }
        Err(_) if parse_special.is_some() => {
            let message = "`parse_special` is about `text`, but `examples` are rendered by a \
                           template, whose control tokens are always parsed; leave it out";
            return Err(Error::field("parse_special", message));
        }
        Err(examples) => of_rows(&rows(examples)?, host, window, fit, wanted)?,
    };
    let Data { train: examples, held_out, report: data, .. } = data.split(val_split)?;
    config.shrink(data.window);
    Ok(TrainJob {
        name,
        out: path,
        config,
        examples: examples.into(),
        held_out: held_out.into(),
        data,
        pacing,
        memory_budget,
        may_recompute,
        from,
        fallback: None,
        durable: Some(durable),
        asked,
        plan,
    })
}

/// What a request sets: all but its data and the name of its file.
fn asked(request: &Map<String, Value>) -> BTreeMap<String, Value> {
    const ELSEWHERE: [&str; 4] = ["text", "examples", "out", "plan"];
    let set = request.iter().filter(|(name, _)| !ELSEWHERE.contains(&name.as_str()));
    set.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Checks that what `from` reads is not the file that a job writes.
fn check_kept(read: &Path, out: &str, path: &Path) -> Result<()> {
    match (read.canonicalize(), path.canonicalize()) {
        (Ok(read), Ok(path)) if read == path => {
            let message = format!("`out` is {out}, which `from` reads; choose another name");
            Err(Error::field("out", message))
        }
        _ => Ok(()),
    }
}

/// Reads a request to learn examples, as [`train`] does; also says what became of the data. `known`
/// gives the targets of what an alias has, which it keeps: they stand where none are named.
///
/// # Errors
/// As [`train`].
pub fn learn(
    bytes: &[u8],
    host: &Host,
    known: &dyn Fn(&str) -> Option<Vec<String>>,
    wanted: &dyn Fn() -> bool,
) -> Result<(LearnJob, DataReport)> {
    host.train_dir()?;
    let mut fields = body(bytes, false)?;
    let alias = fields.string("alias")?.ok_or_else(|| missing("alias", "an adapter's alias"))?;
    names::check_alias("alias", &alias, &host.name)?;
    /// What an adapter and its optimizer keep.
    const KEPT: [&str; 9] = [
        "targets",
        "top_layers",
        "rank",
        "ranks",
        "alpha",
        "rslora",
        "optimizer",
        "momentum",
        "weight_decay",
    ];
    let asked: Vec<_> = KEPT.into_iter().filter(|field| fields.has(field)).collect();
    let Settings { mut config, fit, pacing, memory_budget, may_recompute } =
        settings(&mut fields, host, Some(known(&alias)))?;
    let examples = fields.list("examples", MAX_EXAMPLES)?;
    fields.finish()?;

    let Err(examples) = corpus(None, examples)? else { return Err(missing("examples", "a list")) };
    let rows = rows(examples)?;
    let data = of_rows(&rows, host, config.longest(), fit, wanted)?.split(0.0)?;
    config.shrink(data.report.window);
    let job = LearnJob {
        alias,
        config,
        asked,
        examples: data.train.into(),
        pacing,
        memory_budget,
        may_recompute,
    };
    Ok((job, data.report))
}

/// The settings. `alias` is that of a request to learn, and the targets of what there is under it;
/// none trains weights of the model.
fn settings(
    fields: &mut Fields,
    host: &Host,
    alias: Option<Option<Vec<String>>>,
) -> Result<Settings> {
    if let Some(loss) = fields.string("loss")?.filter(|loss| loss != "sft") {
        let expected = "\"sft\": answers as they are given are learned, not preferences or rewards";
        return Err(wrong("loss", &Value::String(loss), expected));
    }
    let (positive, share) = ("a number above 0", "a number from 0 to below 1");
    let rank = fields.whole("rank", 1..=256)?.unwrap_or(8) as usize;
    let alpha = fields.float("alpha", |v| v > 0.0, positive)?.unwrap_or(16.0);
    let targets = fields.string("targets")?;
    let layers = host.model.geometry().layers;
    let top_layers = fields.whole("top_layers", 1..=layers as u64)?.map(|n| n as usize);
    let weights = if alias.is_none() { fields.string("train_weights")? } else { None };
    let (targets, weights) = match (targets, weights) {
        (None, None) => {
            let drawn = || select(host, "attn_q,attn_v", top_layers);
            (alias.flatten().map_or_else(drawn, Ok)?, Vec::new())
        }
        (Some(targets), None) => (select(host, &targets, top_layers)?, Vec::new()),
        (None, Some(weights)) => (Vec::new(), select_weights(host, &weights, top_layers)?),
        (Some(_), Some(_)) => {
            let message = "`train_weights` and `targets` exclude each other: an adapter and the \
                           model's own weights are two jobs";
            return Err(Error::field("train_weights", message));
        }
    };
    let ranks = ranks(fields, host, &targets)?;
    let window = window(fields, host)?;
    let (rows, walks) = walks(fields, window)?;
    let epochs = fields.whole("epochs", 1..=100)?.unwrap_or(1);
    let rate = "a number above 0 and up to 1";
    let lr = fields.float("lr", |v| v > 0.0 && v <= 1.0, rate)?.unwrap_or(1e-5);
    let seed = fields.whole("seed", 0..=u64::MAX)?.unwrap_or(42);
    let asked = fields.flag("recompute")?;
    let may_recompute = asked.is_none();
    let recompute = match asked {
        Some(true) => Recompute::PerLayer,
        Some(false) | None => Recompute::None,
    };
    let grad_precision = match fields.string("grad_precision")?.as_deref() {
        None => host.model.device().grad_precision(),
        Some(name) => {
            GradPrecision::ALL.into_iter().find(|p| p.name() == name).ok_or_else(|| {
                let found = Value::String(name.into());
                wrong("grad_precision", &found, "\"f32\", \"bf16\" or \"int16\"")
            })?
        }
    };
    let fit = match fields.string("fit")?.as_deref() {
        None => Fit::Refuse,
        Some("middle") => Fit::Middle,
        Some("left") => Fit::Left,
        Some(other) => {
            return Err(wrong("fit", &Value::String(other.into()), "\"middle\" or \"left\""));
        }
    };
    let memory_budget = fields
        .number("memory_budget_mib", |v| v >= 1.0, "a number from 1, in MiB")?
        .map(|mib| (mib * f64::from(1 << 20)) as usize);
    let pacing = pacing(fields)?;
    let schedule = match fields.string("schedule")?.as_deref() {
        None | Some("constant") => Schedule::Constant,
        Some("linear") => Schedule::Linear,
        Some("cosine") => Schedule::Cosine,
        Some("wsd") => Schedule::Wsd,
        Some(other) => {
            let expected = "\"constant\", \"linear\", \"cosine\" or \"wsd\"";
            return Err(wrong("schedule", &Value::String(other.into()), expected));
        }
    };
    let momentum = fields.float("momentum", |v| (0.0..1.0).contains(&v), share)?;
    let method = match (fields.string("optimizer")?.as_deref(), momentum) {
        (None | Some("adamw"), None) => Method::default(),
        (Some("sgd"), momentum) => Method::Sgd { momentum: momentum.unwrap_or(0.0) },
        (None | Some("adamw"), Some(_)) => {
            let message = "`momentum` is that of `sgd`; expected `optimizer` to be \"sgd\"";
            return Err(Error::field("momentum", message));
        }
        (Some(other), _) => {
            return Err(wrong("optimizer", &Value::String(other.into()), "\"adamw\" or \"sgd\""));
        }
    };
    let from_0_to_1 = |v: f32| (0.0..=1.0).contains(&v);
    let from_0_below_1 = |v: f32| (0.0..1.0).contains(&v);
    let dropout = fields.float("dropout", from_0_below_1, share)?;
    if targets.is_empty() && dropout.is_some_and(|p| p > 0.0) {
        let message = "`dropout` and `train_weights` exclude each other: what is dropped is what \
                       an adapter reads";
        return Err(Error::field("dropout", message));
    }
    let graph = GraphConfig {
        rows,
        cache: host.cache,
        recompute,
        grad_precision,
        dropout: dropout.unwrap_or(0.0).into(),
        ..GraphConfig::default()
    };
    let config = TrainConfig {
        targets,
        weights,
        rank,
        ranks,
        alpha,
        method,
        lr,
        rslora: fields.flag("rslora")?.unwrap_or(false),
        schedule,
        warmup: fields.whole("warmup", 0..=1_000_000)?.unwrap_or(0),
        weight_decay: fields
            .float("weight_decay", from_0_to_1, "a number from 0 to 1")?
            .unwrap_or(0.0),
        epochs,
        accumulate: fields.whole("accumulate", 1..=1024)?.unwrap_or(1) as usize,
        clip: fields.float("clip", |v| v >= 0.0, "0 or a positive number")?.unwrap_or(0.0),
        eval_every: fields.whole("eval_every", 0..=1_000_000)?.unwrap_or(0),
        patience: fields.whole("patience", 1..=1_000_000)?,
        keep_best: fields.flag("keep_best")?.unwrap_or(false),
        walks,
        seed,
        graph,
    };
    config.check()?;
    Ok(Settings { config, fit, pacing, memory_budget, may_recompute })
}

fn window(fields: &mut Fields, host: &Host) -> Result<usize> {
    let context = host.model.geometry().context as u64;
    let expected = format!("a multiple of {BLOCK} from {BLOCK} to {context}, the model's context");
    let asked = fields.value("window").unwrap_or_else(|| json!(BLOCK));
    match asked.as_u64() {
        Some(n) if n >= BLOCK as u64 && n <= context && n.is_multiple_of(BLOCK as u64) => {
            Ok(n as usize)
        }
        _ => Err(wrong("window", &asked, &expected)),
    }
}

/// The shortest window that may be asked for and has so many rows.
pub(crate) fn window_of(rows: usize) -> usize {
    rows.next_multiple_of(BLOCK).max(BLOCK)
}

/// The chunks that a window may be walked in, longest first: the multiples of [`BLOCK`] that divide
/// it.
pub(crate) fn chunks(window: usize) -> impl Iterator<Item = usize> {
    let blocks = (1..=window / BLOCK).rev().map(|n| n * BLOCK);
    blocks.filter(move |&rows| window.is_multiple_of(rows))
}

/// How a window is cut into graphs: their rows, and the walk where there are several. A chunk is
/// the largest multiple of [`BLOCK`] that divides the window and is at most what was asked for.
fn walks(fields: &mut Fields, window: usize) -> Result<(usize, Option<Walks>)> {
    let exact = fields.flag("exact")?;
    let horizon = fields.whole("walk_horizon", 0..=u64::from(u32::MAX))?;
    let budget = fields.whole("walk_host_budget_mib", 0..=1 << 32)?;
    let asked = match fields.value("chunk") {
        None => window,
        Some(asked) => match asked.as_u64() {
            Some(n) if n >= BLOCK as u64 && n.is_multiple_of(BLOCK as u64) => {
                usize::try_from(n).unwrap_or(window)
            }
            _ => {
                let expected = format!("a multiple of {BLOCK}, at least {BLOCK}");
                return Err(wrong("chunk", &asked, &expected));
            }
        },
    };
    let chunk = chunks(window).find(|&rows| rows <= asked).unwrap_or(window);
    if chunk == window {
        for (field, set) in [("walk_horizon", horizon), ("walk_host_budget_mib", budget)] {
            if set.is_some_and(|n| n > 0) {
                let message = format!(
                    "`{field}` is set, but a window of {window} rows is one graph; expected a \
                     `chunk` that is smaller than `window`"
                );
                return Err(Error::field(field, message));
            }
        }
        return Ok((window, None));
    }
    if exact == Some(false) {
        let message = format!(
            "`exact` is false, but a window in chunks of {chunk} always has the gradient of the \
             whole; leave it out"
        );
        return Err(Error::field("exact", message));
    }
    let host_budget = usize::try_from(budget.unwrap_or(0) << 20).unwrap_or(usize::MAX);
    let horizon = horizon.unwrap_or(0) as usize;
    Ok((chunk, Some(Walks { window, horizon, host_budget })))
}

fn pacing(fields: &mut Fields) -> Result<Pacing> {
    let share = fields.whole("share_ppm", 1..=1_000_000)?;
    let slowdown = fields.whole("max_slowdown_ppm", 1..=999_999)?;
    let waits = fields.flag("yield")?;
    let clash = |field: &str, with: &str| {
        let message = format!("`{field}` and {with} exclude each other; give one");
        Err(Error::field(field, message))
    };
    match (share, slowdown, waits) {
        (Some(_), Some(_), _) => clash("max_slowdown_ppm", "`share_ppm`"),
        (Some(_), None, Some(false)) => clash("share_ppm", "`yield: false`"),
        (None, Some(_), Some(false)) => clash("max_slowdown_ppm", "`yield: false`"),
        (None, None, Some(false)) => Ok(Pacing::Never),
        (Some(ppm), None, _) => Ok(Pacing::Share(ppm as u32)),
        (None, Some(ppm), _) => Ok(Pacing::Slowdown(ppm as u32)),
        (None, None, _) => Ok(DEFAULT_PACING),
    }
}

/// The tensors whose names have a part of the list in them, or `all`; whether they can be trained
/// the graph says.
fn select_weights(host: &Host, list: &str, top_layers: Option<usize>) -> Result<Vec<String>> {
    let wanted = names_of(list);
    if wanted.is_empty() {
        let message = "`train_weights` is empty; expected `all` or parts of tensor names";
        return Err(Error::field("train_weights", message));
    }
    let of_field = |e: train::Error| Error::field("train_weights", format!("`train_weights`: {e}"));
    let weights = train::select_weights(&host.model, &wanted).map_err(of_field)?;
    match top_layers {
        Some(k) => train::top_layers(&host.model, weights, k).map_err(of_field),
        None => Ok(weights),
    }
}

/// The projections that a list of names stands for, in the top layers.
fn select(host: &Host, list: &str, top_layers: Option<usize>) -> Result<Vec<String>> {
    let wanted = names_of(list);
    if wanted.is_empty() {
        let message = "`targets` is empty; expected names such as `attn_q,attn_v`";
        return Err(Error::field("targets", message));
    }
    let of_field = |e: train::Error| Error::field("targets", format!("`targets`: {e}"));
    let targets = train::select_targets(&host.model, &wanted).map_err(of_field)?;
    match top_layers {
        Some(k) => train::top_layers(&host.model, targets, k).map_err(of_field),
        None => Ok(targets),
    }
}

/// Ranks of some of the targets: `{"ffn": 4}`.
fn ranks(fields: &mut Fields, host: &Host, targets: &[String]) -> Result<BTreeMap<String, usize>> {
    let mut ranks = BTreeMap::new();
    let Some(asked) = fields.value("ranks") else { return Ok(ranks) };
    let expected = "an object of names as in `targets` and whole numbers from 1 to 256";
    for (name, rank) in asked.as_object().ok_or_else(|| wrong("ranks", &asked, expected))? {
        let rank = rank.as_u64().filter(|rank| (1..=256).contains(rank));
        let rank = rank.ok_or_else(|| wrong("ranks", &asked, expected))? as usize;
        let named = train::select_targets(&host.model, std::slice::from_ref(name));
        let named = named.map_err(|e| Error::field("ranks", format!("`ranks`: {e}")))?;
        // Of what is adapted: `ffn` beside `"targets": "blk.3."` is about that layer.
        let mut named = named.into_iter().filter(|n| targets.contains(n)).peekable();
        if named.peek().is_none() {
            let message = format!("`ranks`: `{name}` names none of the targets");
            return Err(Error::field("ranks", message));
        }
        ranks.extend(named.map(|n| (n, rank)));
    }
    Ok(ranks)
}

/// The parts of a list with commas.
fn names_of(list: &str) -> Vec<String> {
    list.split(',').map(|name| name.trim().to_string()).filter(|name| !name.is_empty()).collect()
}
