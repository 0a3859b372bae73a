//! Which targets have moved: a run that teaches some of them nothing has failed, whatever its loss.

use std::collections::BTreeMap;

use model::{Adapter, Model};

/// Per target (a pair is known by its B), whether it has moved; a stack of experts by expert.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Moved(pub(crate) BTreeMap<String, Vec<bool>>);

impl Moved {
    pub(crate) fn new(model: &Model, adapter: Option<&Adapter>, weights: &[String]) -> Moved {
        let pairs = adapter.into_iter().flat_map(|a| a.tensors.keys());
        let pair = |target: &String| {
            let experts = model.projections().get(target).and_then(|p| p.experts);
            (format!("0:{target}.lora_b"), vec![false; experts.unwrap_or(1)])
        };
        let own = |name: &String| {
            let shape = model.weights().get(name).map(|w| w.shape);
            let experts = shape.filter(|s| s.rank() == 3).map_or(1, |s| s.dim(0));
            (name.clone(), vec![false; experts])
        };
        Moved(pairs.map(pair).chain(weights.iter().map(own)).collect())
    }

    /// The values of a parameter before a step, empty once all of it has moved.
    pub(crate) fn watch(&self, name: &str, values: &[f32]) -> Vec<f32> {
        match self.0.get(name) {
            Some(parts) if parts.iter().any(|moved| !moved) => values.to_vec(),
            _ => Vec::new(),
        }
    }

    /// Compares it with what it is after the step.
    pub(crate) fn note(&mut self, name: &str, before: &[f32], values: &[f32]) {
        let Some(parts) = self.0.get_mut(name).filter(|_| !before.is_empty()) else { return };
        let len = (values.len() / parts.len().max(1)).max(1);
        for ((moved, a), b) in parts.iter_mut().zip(before.chunks(len)).zip(values.chunks(len)) {
            *moved |= a.iter().zip(b).any(|(a, b)| a.to_bits() != b.to_bits());
        }
    }

    /// Targets of which nothing has moved; experts of the others that have not; how many targets.
    pub(crate) fn summary(&self) -> (Vec<&str>, Vec<String>, usize) {
        let (mut dead, mut unrouted) = (Vec::new(), Vec::new());
        for (name, parts) in &self.0 {
            let target = name.trim_start_matches("0:").trim_end_matches(".lora_b");
            if !parts.contains(&true) {
                dead.push(target);
                continue;
            }
            let still = parts.iter().enumerate().filter(|(_, moved)| !**moved);
            unrouted.extend(still.map(|(expert, _)| format!("{target}[{expert}]")));
        }
        (dead, unrouted, self.0.len())
    }
}
