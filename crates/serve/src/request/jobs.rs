//! `POST /train` and `POST /learn`: settings, targets, data.

use std::collections::BTreeSet;

use graph::{GradPrecision, Recompute};
use serde_json::{Value, json};
use train::{GraphConfig, Schedule, TrainConfig};

use super::data::{BLOCK, Data, Fit, corpus, of_rows, of_text, rows};
use super::json::{Fields, missing, wrong};
use super::{Host, names};
use crate::{DataReport, Error, LearnJob, Pacing, Result, TrainJob};

/// How a job that says nothing about it shares the device: it slows turns down by at most a tenth.
pub const DEFAULT_PACING: Pacing = Pacing::Slowdown(100_000);

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
    let mut fields = Fields::body(bytes, false)?;
    let out = fields.string("out")?.ok_or_else(|| missing("out", "a name such as `notes.gguf`"))?;
    let settings = settings(&mut fields, host, true)?;
    let share = "a number from 0 to below 1";
    let val_split = fields.number("val_split", |v| (0.0..1.0).contains(&v), share)?.unwrap_or(0.1);
    let parse_special = fields.flag("parse_special")?;
    let text = fields.string("text")?;
    let examples = fields.list("examples", MAX_EXAMPLES)?;
    fields.finish()?;
    let path = names::file_to_write("out", folder, &out)?;
    let name = names::alias_of(&out).to_string();
    names::check_alias("out", &name, &host.name)?;

    let Settings { mut config, fit, pacing, memory_budget } = settings;
    let window = config.graph.rows;
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
    config.graph.rows = data.window;
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
    let mut fields = Fields::body(bytes, false)?;
    let alias = fields.string("alias")?.ok_or_else(|| missing("alias", "an adapter's alias"))?;
    names::check_alias("alias", &alias, &host.name)?;
    let Settings { mut config, fit, pacing, memory_budget } = settings(&mut fields, host, false)?;
    let examples = fields.list("examples", MAX_EXAMPLES)?;
    fields.finish()?;

    let Err(examples) = corpus(None, examples)? else { return Err(missing("examples", "a list")) };
    let rows = rows(examples)?;
    let data = of_rows(&rows, host, config.graph.rows, fit, wanted)?.split(0.0)?;
    config.graph.rows = data.report.window;
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
    chunk(fields, window)?;
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
    fields.only("exact", &[json!(false)])?;
    fields.only("walk_horizon", &[json!(0)])?;
    fields.only("walk_host_budget_mib", &[json!(0)])?;
    let graph = GraphConfig {
        rows: window,
        cache: host.cache,
        recompute,
        grad_precision,
        ..GraphConfig::default()
    };
    let config = TrainConfig {
        targets,
        weights,
        rank,
        alpha,
        lr,
        schedule: Schedule::Constant,
        warmup: 0,
        weight_decay: 0.0,
        epochs,
        accumulate: 1,
        clip: 0.0,
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

/// A window is one graph, so that no gradient is cut off inside it.
fn chunk(fields: &mut Fields, window: usize) -> Result<()> {
    let Some(asked) = fields.value("chunk") else { return Ok(()) };
    match asked.as_u64() {
        Some(n) if n >= BLOCK as u64 && n.is_multiple_of(BLOCK as u64) => {
            if n >= window as u64 {
                return Ok(());
            }
            let message = format!(
                "`chunk` is {n}, which is less than `window` ({window}): a window in several \
                 chunks is not supported; leave it out"
            );
            Err(Error::field("chunk", message))
        }
        _ => Err(wrong("chunk", &asked, &format!("a multiple of {BLOCK}, at least {BLOCK}"))),
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

/// The projections `blk.LAYER.TARGET.weight` of the top layers.
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
