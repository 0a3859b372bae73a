//! `gradus inspect`.

use std::collections::BTreeMap;

use gguf::{Array, Gguf, Value};
use graph::Recompute;
use model::{Adapter, Cache, Model};
use serde_json::json;
use train::{Gradients, GraphConfig, Parameters};

use crate::error::Result;
use crate::options::{BATCH, CONTEXT, CacheType, DeviceArgs, check_context, engine_config};
use crate::output::{bytes, count, json, line};

/// Show what is in a model file, what it takes to run, and what of it can be trained
///
/// Memory is exact: weights as they are packed, the cache, and the arena of each graph, which
/// is planned before it is run.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus inspect smollm2-135m-instruct
  gradus inspect model.gguf --ctx 8192 --cache-type q8_0
  gradus inspect model.gguf --tensors
  gradus inspect model.gguf --json")]
pub struct Args {
    /// A GGUF file, or a name of the catalogue (`gradus pull --list`)
    #[arg(value_name = "MODEL", default_value = hub::DEFAULT_MODEL)]
    model: String,

    #[command(flatten)]
    device: DeviceArgs,

    /// Positions of the cache [default: the model's context, at most 4096]
    #[arg(short, long, value_name = "N")]
    ctx: Option<usize>,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Rank of the adapter whose training is planned
    #[arg(long, value_name = "R", default_value_t = 8)]
    rank: usize,

    /// Rows of the window of that training
    #[arg(long, value_name = "ROWS", default_value_t = 512)]
    window: usize,

    /// List every tensor, not only kinds of tensors
    #[arg(long)]
    tensors: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What serving takes.
struct Serving {
    ctx: usize,
    weights: usize,
    cache: usize,
    /// Arena bytes per graph, by its rows.
    arenas: Vec<(usize, usize)>,
}

/// What training takes, or why it is refused.
struct Training {
    targets: Vec<String>,
    parameters: usize,
    /// Arena bytes per policy of recomputation, or the refusal.
    arenas: Vec<(&'static str, std::result::Result<usize, String>)>,
}

pub fn run(args: &Args) -> Result<()> {
    let path = hub::resolve(&args.model)?;
    let file = Gguf::open(&path)?;
    let loaded = args.device.open().and_then(|device| Ok(Model::load(&path, device)?));
    let (model, refused) = match loaded {
        Ok(model) => (Some(model), None),
        Err(e) => (None, Some(message(e))),
    };
    let serving = model.as_ref().map(|m| serving(m, args)).transpose()?;
    let training = model.as_ref().map(|m| training(m, args)).transpose()?;
    if args.json {
        return json(&as_json(&file, refused, serving.as_ref(), training.as_ref()));
    }
    show_file(&file, args.tensors)?;
    match (serving, training) {
        (Some(serving), Some(training)) => show_model(args, &serving, &training),
        _ => line(&format!("\nCannot be run: {}", refused.unwrap_or_default())),
    }
}

fn message(e: crate::error::Error) -> String {
    match e {
        crate::error::Error::Failed { message, .. } => message,
        _ => String::new(),
    }
}

fn serving(model: &Model, args: &Args) -> Result<Serving> {
    let ctx = match args.ctx {
        Some(ctx) => check_context(ctx, model)?,
        None => model.geometry().context.min(CONTEXT),
    };
    let dtype = args.cache_type.dtype();
    let config = engine_config(args.cache_type, ctx);
    let cache = Cache::bytes_for(model.geometry(), dtype, ctx, config.states);
    let arena = |rows| Ok((rows, model::arena_bytes(model, &config, rows)?));
    Ok(Serving {
        ctx,
        weights: model.weights().bytes(),
        cache: cache.ok_or_else(|| {
            crate::error::Error::invalid(format!(
                "a {} cache does not fit this model's head widths; use `--cache-type f16`",
                args.cache_type.name()
            ))
        })?,
        arenas: [1, BATCH.min(ctx)].into_iter().map(arena).collect::<Result<_>>()?,
    })
}

fn training(model: &Model, args: &Args) -> Result<Training> {
    let targets = train::select_targets(model, &["all".to_string()])?;
    let adapter = Adapter::fresh(
        model,
        targets.iter().map(|t| (t.as_str(), args.rank)),
        args.rank as f32,
        0,
    )?;
    let numbers = adapter.parameters();
    let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
    let plan = |recompute| -> train::Result<usize> {
        let (rows, cache) = (args.window, args.cache_type.dtype());
        let mut gradients = Gradients::new(
            model,
            GraphConfig { rows, cache, recompute, ..GraphConfig::default() },
        )?;
        Ok(gradients.plan(&parameters)?.arena_bytes())
    };
    let arenas = [Recompute::None, Recompute::PerLayer]
        .map(|policy| (policy.name(), plan(policy).map_err(|e| e.to_string())));
    Ok(Training { targets, parameters: numbers, arenas: arenas.into() })
}

/// `blk.3.attn_q.weight` as `blk.*.attn_q.weight`.
fn kind(name: &str) -> String {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    name.split('.').map(|part| if number(part) { "*" } else { part }).collect::<Vec<_>>().join(".")
}

fn show_file(file: &Gguf, every_tensor: bool) -> Result<()> {
    line(&format!("{}: {}", file.path().display(), bytes(file.file_bytes())))?;
    line(&format!("\nMetadata, {} keys", file.metadata().len()))?;
    for (key, value) in file.metadata().iter() {
        line(&format!("  {key:<42} {}", shown(value)))?;
    }
    let tensors = file.tensors();
    line(&format!("\nTensors, {}", tensors.len()))?;
    // Equal kinds, types and shapes together, in file order of the first.
    let mut groups: Vec<(String, String, String, usize, usize)> = Vec::new();
    for tensor in tensors {
        let info = tensor.info;
        let name = if every_tensor { info.name.clone() } else { kind(&info.name) };
        let (ty, shape) = (info.ty.to_string(), format!("{:?}", info.shape));
        let same = groups.iter_mut().find(|g| g.0 == name && g.1 == ty && g.2 == shape);
        match same {
            Some(group) => {
                group.3 += 1;
                group.4 += info.byte_len();
            }
            None => groups.push((name, ty, shape, 1, info.byte_len())),
        }
    }
    let width = groups.iter().map(|g| g.0.len()).max().unwrap_or(0);
    for (name, ty, shape, n, size) in groups {
        let times = if n > 1 { format!("x{n}") } else { String::new() };
        let size = bytes(size as u64);
        line(&format!("  {name:<width$} {times:>5}  {ty:<7} {shape:<16} {size:>10}"))?;
    }
    Ok(())
}

fn show_model(args: &Args, serving: &Serving, training: &Training) -> Result<()> {
    let size = |n: usize| bytes(n as u64);
    let Serving { ctx, weights, cache, arenas } = serving;
    let arena = arenas.iter().map(|a| a.1).max().unwrap_or(0);
    let total = weights + cache + arena;
    line(&format!("\nMemory at a context of {ctx}: {}", size(total)))?;
    line(&format!("  {:>10}  packed weights", size(*weights)))?;
    line(&format!("  {:>10}  {} cache", size(*cache), args.cache_type.name()))?;
    for (rows, n) in arenas {
        line(&format!(
            "  {:>10}  arena of the graph of {rows} rows (one arena serves all)",
            size(*n)
        ))?;
    }
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for target in &training.targets {
        *kinds.entry(kind(target)).or_default() += 1;
    }
    let kinds: Vec<String> = kinds.iter().map(|(k, n)| format!("{k} x{n}")).collect();
    line(&format!("\nCan be trained: a LoRA on {} projections", training.targets.len()))?;
    line(&format!("  {}", kinds.join(", ")))?;
    let moments = training.parameters * 5 * 4;
    line(&format!(
        "  at rank {}: {} parameters, {} with gradients and moments",
        args.rank,
        count(training.parameters as u64),
        size(moments)
    ))?;
    for (policy, arena) in &training.arenas {
        line(&match arena {
            Ok(n) => format!(
                "  {:>10}  arena for windows of {} rows, recomputing {policy}; {} in all",
                size(*n),
                args.window,
                size(n + weights + moments)
            ),
            Err(refusal) => format!("  refused, recomputing {policy}: {refusal}"),
        })?;
    }
    Ok(())
}

/// How many elements of an array are shown.
const SHOWN: usize = 4;

fn first<T>(list: &[T], show: impl Fn(&T) -> serde_json::Value) -> Vec<serde_json::Value> {
    list.iter().take(SHOWN).map(show).collect()
}

/// The first elements of an array.
fn elements(array: &Array) -> Vec<serde_json::Value> {
    match array {
        Array::U8(x) => first(x, |&v| json!(v)),
        Array::I8(x) => first(x, |&v| json!(v)),
        Array::U16(x) => first(x, |&v| json!(v)),
        Array::I16(x) => first(x, |&v| json!(v)),
        Array::U32(x) => first(x, |&v| json!(v)),
        Array::I32(x) => first(x, |&v| json!(v)),
        Array::F32(x) => first(x, |&v| json!(v)),
        Array::Bool(x) => first(x, |&v| json!(v)),
        Array::String(x) => first(x, |v| json!(v)),
        Array::U64(x) => first(x, |&v| json!(v)),
        Array::I64(x) => first(x, |&v| json!(v)),
        Array::F64(x) => first(x, |&v| json!(v)),
    }
}

fn shown(value: &Value) -> String {
    let Value::Array(array) = value else { return value.to_string() };
    let elements = elements(array);
    let more = if elements.len() < array.len() { ", ..." } else { "" };
    let elements: Vec<String> = elements.iter().map(ToString::to_string).collect();
    format!("{value}: [{}{more}]", elements.join(", "))
}

fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Array(a) => json!({ "length": a.len(), "first": elements(a) }),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
    }
}

fn as_json(
    file: &Gguf,
    refused: Option<String>,
    serving: Option<&Serving>,
    training: Option<&Training>,
) -> serde_json::Value {
    let metadata: serde_json::Map<String, serde_json::Value> =
        file.metadata().iter().map(|(k, v)| (k.to_string(), value_json(v))).collect();
    let tensors: Vec<_> = file
        .tensors()
        .map(|t| {
            json!({
                "name": t.info.name,
                "type": t.info.ty.name(),
                "shape": t.info.shape,
                "bytes": t.info.byte_len(),
            })
        })
        .collect();
    let serving = serving.map(|s| {
        let arenas: Vec<_> =
            s.arenas.iter().map(|(rows, n)| json!({ "rows": rows, "bytes": n })).collect();
        json!({
            "context": s.ctx,
            "weights_bytes": s.weights,
            "cache_bytes": s.cache,
            "arenas": arenas,
        })
    });
    let training = training.map(|t| {
        let arenas: Vec<_> = t
            .arenas
            .iter()
            .map(|(policy, arena)| match arena {
                Ok(n) => json!({ "recompute": policy, "bytes": n }),
                Err(refusal) => json!({ "recompute": policy, "refused": refusal }),
            })
            .collect();
        json!({ "targets": t.targets, "parameters": t.parameters, "arenas": arenas })
    });
    json!({
        "file": file.path().display().to_string(),
        "bytes": file.file_bytes(),
        "metadata": metadata,
        "tensors": tensors,
        "refused": refused,
        "memory": serving,
        "training": training,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_tensors() {
        assert_eq!(kind("blk.12.attn_q.weight"), "blk.*.attn_q.weight");
        assert_eq!(kind("output.weight"), "output.weight");
    }

    #[test]
    fn arrays_are_abbreviated() {
        let many = Value::Array(Array::U32((0..9).collect()));
        assert!(shown(&many).ends_with(": [0, 1, 2, 3, ...]"), "{}", shown(&many));
        let few = Value::Array(Array::String(vec!["a".into()]));
        assert!(shown(&few).ends_with(": [\"a\"]"), "{}", shown(&few));
    }
}
