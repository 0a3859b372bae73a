//! `POST /train` and `POST /learn`: settings, targets, data.

use std::collections::BTreeSet;

use data::Fit;
use graph::{GradPrecision, Recompute};
use serde_json::{Value, json};
use train::{GraphConfig, Schedule, TrainConfig, Walks};

use super::data::{BLOCK, Data, corpus, of_rows, of_text, rows};
use super::json::{Fields, body, missing, wrong};
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
}

/// Reads a training job: everything is checked that can be without the graph, then the data are
/// rendered. That may take minutes; `wanted` is asked meanwhile whether anybody still waits.
///
/// # Errors
/// Names the field, or the example and the message, and what is expected.
pub fn train(bytes: &[u8], host: &Host, wanted: &dyn Fn() -> bool) -> Result<TrainJob> {
    let folder = host.train_dir()?;
    let mut fields = body(bytes, false)?;
    let out = fields.string("out")?.ok_or_else(|| missing("out", "a name such as `notes.gguf`"))?;
    let settings = settings(&mut fields, host, true)?;
    let share = "a number from 0 to below 1";
    let val_split = fields.number("val_split", |v| (0.0..1.0).contains(&v), share)?.unwrap_or(0.1);
    let parse_special = fields.flag("parse_special")?;
    let plan = fields.flag("plan")?.unwrap_or(false);
    let every = fields.whole("checkpoint_every", 1..=1_000_000)?.unwrap_or(CHECKPOINT_EVERY);
    let text = fields.string("text")?;
    let examples = fields.list("examples", MAX_EXAMPLES)?;
    fields.finish()?;
    let path = names::file_to_write("out", folder, &out)?;
    let name = names::alias_of(&out).to_string();
    names::check_alias("out", &name, &host.name)?;
    let durable = Durable::new(folder, &name, bytes, every);

    let Settings { mut config, fit, pacing, memory_budget } = settings;
    let window = config.longest();
    let data = match corpus(text, examples)? {
        Ok(text) => {
            if fit != Fit::Refuse {
                return Err(Error::field("fit", "`fit` has no effect on `text`; leave it out"));
            }
            of_text(&text, parse_special.unwrap_or(false), host, window)?
        }
        Err(_) if parse_special == Some(false) => {
            let message = "`parse_special` is false, but `examples` are rendered by a template, \
                           whose control tokens are always parsed; leave it out";
            return Err(Error::field("parse_special", message));
        }
        Err(examples) => of_rows(&rows(examples)?, host, window, fit, wanted)?,
    };
    let Data { train: examples, held_out, report: data, .. } = data.split(val_split)?;
    shrink(&mut config, data.window);
    Ok(TrainJob {
        name,
        out: path,
        config,
        examples,
        held_out,
        data,
        pacing,
        memory_budget,
        fallback: None,
        durable: Some(durable),
        plan,
    })
}

/// Reads a request to learn examples, as [`train`] does; also says what became of the data.
///
/// # Errors
/// As [`train`].
pub fn learn(
    bytes: &[u8],
    host: &Host,
    wanted: &dyn Fn() -> bool,
) -> Result<(LearnJob, DataReport)> {
    host.train_dir()?;
    let mut fields = body(bytes, false)?;
    let alias = fields.string("alias")?.ok_or_else(|| missing("alias", "an adapter's alias"))?;
    names::check_alias("alias", &alias, &host.name)?;
    let Settings { mut config, fit, pacing, memory_budget } = settings(&mut fields, host, false)?;
    let examples = fields.list("examples", MAX_EXAMPLES)?;
    fields.finish()?;

    let Err(examples) = corpus(None, examples)? else { return Err(missing("examples", "a list")) };
    let rows = rows(examples)?;
    let data = of_rows(&rows, host, config.longest(), fit, wanted)?.split(0.0)?;
    shrink(&mut config, data.report.window);
    let job = LearnJob { alias, config, examples: data.train, pacing, memory_budget };
    Ok((job, data.report))
}

fn settings(fields: &mut Fields, host: &Host, own_weights: bool) -> Result<Settings> {
    let positive = "a number above 0";
    let rank = fields.whole("rank", 1..=256)?.unwrap_or(8) as usize;
    let alpha = fields.float("alpha", |v| v > 0.0, positive)?.unwrap_or(16.0);
    let targets = fields.string("targets")?;
    let layers = host.model.geometry().layers;
    let top_layers = fields.whole("top_layers", 1..=layers as u64)?.map(|n| n as usize);
    let weights = if own_weights { fields.string("train_weights")? } else { None };
    let (targets, weights) = match (targets, weights) {
        (targets, None) => {
            let targets = targets.as_deref().unwrap_or("attn_q,attn_v");
            (select(host, targets, top_layers)?, Vec::new())
        }
        (None, Some(weights)) => (Vec::new(), select_weights(host, &weights)?),
        (Some(_), Some(_)) => {
            let message = "`train_weights` and `targets` exclude each other: an adapter and the \
                           model's own weights are two jobs";
            return Err(Error::field("train_weights", message));
        }
    };
    let window = window(fields, host)?;
    let (rows, walks) = walks(fields, window)?;
    let epochs = fields.whole("epochs", 1..=100)?.unwrap_or(1);
    let rate = "a number above 0 and up to 1";
    let lr = fields.float("lr", |v| v > 0.0 && v <= 1.0, rate)?.unwrap_or(1e-5);
    let seed = fields.whole("seed", 0..=u64::MAX)?.unwrap_or(42);
    let recompute = match fields.flag("recompute")?.unwrap_or(false) {
        true => Recompute::PerLayer,
        false => Recompute::None,
    };
    let grad_precision = match fields.string("grad_precision")?.as_deref() {
        None => GradPrecision::fastest(&**host.model.device()),
        Some("f32") => GradPrecision::F32,
        Some("bf16") => GradPrecision::Bf16,
        Some(other) => {
            let found = Value::String(other.into());
            return Err(wrong("grad_precision", &found, "\"f32\" or \"bf16\""));
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
    let from_0_to_1 = |v: f32| (0.0..=1.0).contains(&v);
    let from_0_below_1 = |v: f32| (0.0..1.0).contains(&v);
    let dropout = fields.float("dropout", from_0_below_1, "a number from 0 to below 1")?;
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
        alpha,
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
        ..TrainConfig::default()
    };
    Ok(Settings { config, fit, pacing, memory_budget })
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

/// Whether a window can be walked in chunks of so many rows.
pub(crate) fn is_chunk(rows: usize, window: usize) -> bool {
    rows >= BLOCK && rows.is_multiple_of(BLOCK) && window.is_multiple_of(rows)
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
    let mut blocks = (1..=asked.min(window) / BLOCK).rev().map(|n| n * BLOCK);
    let chunk = blocks.find(|&rows| is_chunk(rows, window)).unwrap_or(window);
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

/// Settings for data whose windows have so many rows at most.
fn shrink(config: &mut TrainConfig, window: usize) {
    match &mut config.walks {
        Some(walks) if window > config.graph.rows => walks.window = window,
        walks => {
            *walks = None;
            config.graph.rows = config.graph.rows.min(window);
        }
    }
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
fn select_weights(host: &Host, list: &str) -> Result<Vec<String>> {
    let wanted: Vec<String> =
        list.split(',').map(|t| t.trim().to_string()).filter(|t| !t.is_empty()).collect();
    if wanted.is_empty() {
        let message = "`train_weights` is empty; expected `all` or parts of tensor names";
        return Err(Error::field("train_weights", message));
    }
    train::select_weights(&host.model, &wanted)
        .map_err(|e| Error::field("train_weights", format!("`train_weights`: {e}")))
}

/// The projections `blk.LAYER.TARGET.weight` of the top layers, and the embedding and the head.
fn select(host: &Host, list: &str, top_layers: Option<usize>) -> Result<Vec<String>> {
    let layers = host.model.geometry().layers;
    let lowest = layers - top_layers.unwrap_or(layers).min(layers);
    let projections = host.model.projections();
    let parts = |name: &str| -> Option<(usize, String)> {
        let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        Some((layer.parse().ok()?, rest.strip_suffix(".weight")?.to_string()))
    };
    let all: Vec<(&String, String)> = projections
        .keys()
        .filter_map(|name| parts(name).map(|(layer, module)| (name, layer, module)))
        .filter(|(_, layer, _)| *layer >= lowest)
        .map(|(name, _, module)| (name, module))
        .collect();
    let mut chosen = BTreeSet::new();
    let wanted: Vec<&str> = list.split(',').map(str::trim).filter(|t| !t.is_empty()).collect();
    if wanted.is_empty() {
        let message = "`targets` is empty; expected names such as `attn_q,attn_v`";
        return Err(Error::field("targets", message));
    }
    for target in wanted {
        if matches!(target, "embed" | "head") {
            let hits = train::select_targets(&host.model, &[target.to_string()]);
            chosen.extend(hits.map_err(|e| Error::field("targets", format!("`targets`: {e}")))?);
            continue;
        }
        let is_hit = |module: &str| target == "all" || module == target;
        let hits: Vec<String> =
            all.iter().filter(|(_, m)| is_hit(m)).map(|(name, _)| (*name).clone()).collect();
        if hits.is_empty() {
            let modules: BTreeSet<&str> = all.iter().map(|(_, module)| module.as_str()).collect();
            let modules: Vec<&str> = modules.into_iter().collect();
            let message = format!(
                "`targets`: {} is no projection of layers {lowest} to {}; there are all, {}",
                super::json::shown(&Value::String(target.into())),
                layers.saturating_sub(1),
                modules.join(", ")
            );
            return Err(Error::field("targets", message));
        }
        chosen.extend(hits);
    }
    Ok(chosen.into_iter().collect())
}
