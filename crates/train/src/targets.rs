//! What a run trains, by the names people give it.

use std::collections::BTreeSet;

use model::{Model, Projection};

use crate::{Error, Result};

/// Whether a projection, by its tensor's name, is meant.
type IsMeant<'a> = dyn Fn(&str, &Projection) -> bool + 'a;

/// A name for projections, and which they are.
type Kind = (&'static str, fn(&str, &Projection) -> bool);

/// Patterns of targets that are no part of a tensor's name.
const KINDS: [Kind; 8] = [
    ("all", |name, _| name.starts_with("blk.")),
    ("all-linear", |name, _| name.starts_with("blk.")),
    ("attn", |name, _| name.contains(".attn_")),
    ("ffn", |name, _| name.contains(".ffn_")),
    ("experts", |_, projection| projection.experts.is_some()),
    ("router", |name, _| name.contains(".ffn_gate_inp.")),
    ("embed", |_, projection| projection.is_table),
    ("head", |name, _| name == "output.weight"),
];

/// The part of a layer's tensor that says what it is: `attn_q` of `blk.3.attn_q.weight`.
fn kind_of(name: &str) -> Option<&str> {
    name.strip_prefix("blk.")?.split_once('.')?.1.strip_suffix(".weight")
}

/// Checks a name for some of `what`: one that is empty would be a part of every name.
///
/// # Errors
/// It is empty.
pub(crate) fn check_named(what: &str, pattern: &str) -> Result<()> {
    match pattern.trim().is_empty() {
        true => Err(Error::Setting(format!(
            "there is an empty name among {what}; expected a name, and no comma too many"
        ))),
        false => Ok(()),
    }
}

/// The projections that a list of names stands for, each the first of these that there is: `all` (or
/// `all-linear`) for every projection inside a layer, `attn` or `ffn` for those halves, `experts` for
/// the stacks of routed experts, `router` for what chooses among them, `embed` for the embedding of
/// tokens and `head` for the projection to the vocabulary where those are two tensors; what GGUF
/// calls a projection, such as `attn_q`; what PEFT calls it, such as `q_proj`; or part of tensor
/// names such as `attn_` or `blk.3.`.
///
/// # Errors
/// A name that stands for nothing, with the candidates; or that is empty.
pub fn select_targets(model: &Model, patterns: &[String]) -> Result<Vec<String>> {
    let projections: Vec<(&String, &Projection)> = model.projections().iter().collect();
    let base = model.base();
    let mut chosen = BTreeSet::new();
    for pattern in patterns {
        check_named("the targets", pattern)?;
        let hits = |is_hit: &IsMeant<'_>| -> Vec<&String> {
            let hits = projections.iter().filter(|(name, projection)| is_hit(name, projection));
            hits.map(|(name, _)| *name).collect()
        };
        let matches = match KINDS.iter().find(|(kind, _)| kind == pattern) {
            Some((_, of_kind)) => hits(of_kind),
            None => {
                let readings: [&IsMeant<'_>; 3] = [
                    &|name, _| kind_of(name) == Some(pattern),
                    &|name, _| base.is_called(name, pattern),
                    &|name, _| name.contains(pattern.as_str()),
                ];
                let mut found = readings.iter().map(|reading| hits(reading));
                found.find(|found| !found.is_empty()).unwrap_or_default()
            }
        };
        if matches.is_empty() {
            let tensor = match pattern.as_str() {
                "embed" => Some("token_embd.weight"),
                "head" => Some("output.weight"),
                _ => None,
            };
            if let Some(Err(why)) = tensor.map(|tensor| model.base().projection(tensor)) {
                return Err(Error::Setting(format!("target `{pattern}`: {why}")));
            }
            let of_model = |(_, of_kind): &&Kind| {
                projections.iter().any(|(name, projection)| of_kind(name, projection))
            };
            let names: BTreeSet<&str> =
                projections.iter().filter_map(|(name, _)| kind_of(name)).collect();
            let candidates = KINDS.iter().filter(of_model).map(|k| k.0).chain(names);
            return Err(Error::Setting(format!(
                "target `{pattern}` is no projection; candidates: {}",
                candidates.collect::<Vec<_>>().join(", ")
            )));
        }
        chosen.extend(matches.into_iter().cloned());
    }
    Ok(chosen.into_iter().collect())
}

/// Those of some targets that are in the last `k` layers, and those that are in none.
///
/// # Errors
/// When `k` is 0 or more than the model has layers, or nothing is left.
pub fn top_layers(model: &Model, targets: Vec<String>, k: usize) -> Result<Vec<String>> {
    let layers = model.geometry().layers;
    if k == 0 || k > layers {
        return Err(Error::Setting(format!("`top_layers` is {k}; expected 1 to {layers}")));
    }
    let layer = |name: &String| name.strip_prefix("blk.")?.split('.').next()?.parse().ok();
    let is_top = |name: &String| layer(name).is_none_or(|layer: usize| layer >= layers - k);
    let left: Vec<String> = targets.into_iter().filter(is_top).collect();
    match left.is_empty() {
        true => Err(Error::Setting(format!("no target is in the last {k} layers"))),
        false => Ok(left),
    }
}
