//! What a run trains, by the names people give it.

use std::collections::BTreeSet;

use model::{Model, Projection};

use crate::{Error, Result};

/// A name for projections, and which they are.
type Kind = (&'static str, fn(&str, &Projection) -> bool);

/// Patterns of targets that are no part of a tensor's name.
const KINDS: [Kind; 5] = [
    ("all", |_, _| true),
    ("attn", |name, _| name.contains(".attn_")),
    ("ffn", |name, _| name.contains(".ffn_")),
    ("experts", |_, projection| projection.experts.is_some()),
    ("router", |name, _| name.contains(".ffn_gate_inp.")),
];

/// The projections that a list of patterns names: `all` for every projection inside a layer,
/// `attn` or `ffn` for those halves, `experts` for the stacks of routed experts, `router` for what
/// chooses among them, or part of a tensor name such as `attn_q` or `blk.3.`.
///
/// # Errors
/// A pattern that matches nothing, with the candidates.
pub fn select_targets(model: &Model, patterns: &[String]) -> Result<Vec<String>> {
    let projections: Vec<(&String, &Projection)> =
        model.projections().iter().filter(|(name, _)| name.starts_with("blk.")).collect();
    let mut chosen = BTreeSet::new();
    for pattern in patterns {
        let kind = KINDS.iter().find(|(kind, _)| kind == pattern);
        let hit = |(name, projection): &(&String, &Projection)| match kind {
            Some((_, of_kind)) => of_kind(name, projection),
            None => name.contains(pattern.as_str()),
        };
        let matches: Vec<&String> = projections.iter().copied().filter(hit).map(|p| p.0).collect();
        if matches.is_empty() {
            let of_model = |(_, of_kind): &&Kind| {
                projections.iter().any(|(name, projection)| of_kind(name, projection))
            };
            let names: BTreeSet<&str> =
                projections.iter().filter_map(|(n, _)| n.split('.').nth(2)).collect();
            let candidates = KINDS.iter().filter(of_model).map(|k| k.0).chain(names);
            return Err(Error::Setting(format!(
                "target `{pattern}` matches no projection; candidates: {}",
                candidates.collect::<Vec<_>>().join(", ")
            )));
        }
        chosen.extend(matches.into_iter().cloned());
    }
    Ok(chosen.into_iter().collect())
}
