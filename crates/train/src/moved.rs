//! Which targets have moved: a run that teaches some of them nothing has failed, whatever its loss.
//!
//! A part of a target (all of it, or one expert of a stack) has moved when a gradient that was not
//! zero moved it: what weight decay does to values proves nothing. Whether one was owed is known
//! from the forward pass alone, never from gradients: every step owes one to each part that a token
//! with loss was computed with. Of a stack those are the experts that the router chose for such
//! tokens. What only tokens without loss chose is owed nothing, since they need not reach the
//! loss: in the last layer they never do.
//!
//! The gradient of A is zero while B is, and the other way round, so a pair owes them as each
//! other's values allow.

use std::collections::BTreeMap;

use model::{Adapter, Model};
use serde_json::{Value, json};

use crate::Parameters;

/// A token with loss was computed with it.
const CHOSEN: u8 = 1;
/// B, or the tensor itself, was owed a gradient; has moved by one.
const B: [u8; 2] = [2, 4];
/// A was owed a gradient; has received one.
const A: [u8; 2] = [8, 16];
/// B, or the tensor itself, has received a gradient, whether it moved by it or not.
const FELT: u8 = 32;

/// Per target (a pair is known by its B) what is known of it, or of each of its experts.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Moved(BTreeMap<String, Vec<u8>>);

/// A parameter that is about to move.
pub(crate) struct Watched {
    target: String,
    flag: u8,
    /// Parts with a gradient, and what they are before the step.
    before: Vec<(usize, Vec<f32>)>,
}

/// What there is to say of a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Summary {
    /// Targets, experts of them as `TARGET[EXPERT]`, that were owed gradients and got none.
    pub(crate) dead: Vec<String>,
    /// Those that got some, all of which were too small to change a value.
    pub(crate) unchanged: Vec<String>,
    /// Experts of which nothing has moved since no token with loss chose them.
    pub(crate) unrouted: Vec<String>,
    /// Targets without anything dead or unchanged, and all.
    pub(crate) moved: (usize, usize),
}

/// The parts of some values.
fn parts(values: &[f32], n: usize) -> impl Iterator<Item = &[f32]> {
    values.chunks((values.len() / n.max(1)).max(1))
}

fn any(values: &[f32]) -> bool {
    values.iter().any(|v| *v != 0.0)
}

impl Moved {
    pub(crate) fn new(model: &Model, adapter: Option<&Adapter>, weights: &[String]) -> Moved {
        let experts = |target: &String| {
            let experts = model.projections().get(target).and_then(|p| p.experts);
            vec![0; experts.unwrap_or(1)]
        };
        let pairs = adapter.into_iter().flat_map(|a| a.tensors.keys());
        let pairs = pairs.map(|target| (format!("0:{target}.lora_b"), experts(target)));
        Moved(pairs.chain(weights.iter().map(|name| (name.clone(), experts(name)))).collect())
    }

    /// How many experts a parameter has, if [`Moved::watch`] needs to be told which were chosen.
    pub(crate) fn experts(&self, name: &str) -> Option<usize> {
        let (target, flag, settled) = role(name);
        if settled != flag && flag != A[1] {
            return None;
        }
        let parts = self.0.get(&target).filter(|parts| parts.len() > 1)?;
        parts.iter().any(|part| part & settled != settled).then_some(parts.len())
    }

    /// Takes note of what a step owes a parameter and what it gives. `gradient` is that of the
    /// step, and `chosen` says of each expert of a stack whether a token with loss chose it. A pair
    /// is asked about A first, before any of it has moved.
    pub(crate) fn watch(
        &mut self,
        name: &str,
        parameters: &Parameters,
        gradient: &[f32],
        chosen: Option<&[bool]>,
    ) -> Option<Watched> {
        let (target, flag, settled) = role(name);
        let state = self.0.get_mut(&target)?;
        if state.iter().all(|part| part & settled == settled) {
            return None;
        }
        let n = state.len();
        let is_chosen = |part: usize| chosen.is_none_or(|c| c.get(part).copied().unwrap_or(false));
        let is_pair = name.starts_with("0:");
        let pair = parameters.pair(name);
        let values = match (is_pair, pair, flag == A[1]) {
            (true, Some(pair), true) => {
                let both = parts(&pair.a, n).zip(parts(&pair.b, n));
                for (i, (part, (a, b))) in state.iter_mut().zip(both).enumerate() {
                    if is_chosen(i) {
                        *part |= CHOSEN | if any(b) { A[0] } else { 0 };
                        *part |= if any(a) { B[0] } else { 0 };
                    }
                }
                &pair.a
            }
            (true, Some(pair), false) => &pair.b,
            _ => {
                let chosen = state.iter_mut().enumerate().filter(|(i, _)| is_chosen(*i));
                chosen.for_each(|(_, part)| *part |= CHOSEN | B[0]);
                parameters.weights.get(name)?
            }
        };
        let mut before = Vec::new();
        let each = state.iter_mut().zip(parts(values, n).zip(parts(gradient, n))).enumerate();
        for (i, (part, (values, gradient))) in each {
            match (*part & flag == 0 && any(gradient), flag == A[1]) {
                (false, _) => {}
                // B starts from zeros, so that its first gradients may be too small to change A.
                (true, true) => *part |= flag,
                (true, false) => {
                    *part |= FELT;
                    before.push((i, values.to_vec()));
                }
            }
        }
        (!before.is_empty()).then_some(Watched { target, flag, before })
    }

    /// Compares a parameter with what it is after the step.
    pub(crate) fn note(&mut self, watched: Option<Watched>, values: &[f32]) {
        let Some(Watched { target, flag, before }) = watched else { return };
        let Some(state) = self.0.get_mut(&target) else { return };
        let all: Vec<&[f32]> = parts(values, state.len()).collect();
        for (i, before) in before {
            let now = all.get(i).copied().unwrap_or(&[]);
            let changed = before.iter().zip(now).any(|(a, b)| a.to_bits() != b.to_bits());
            if let Some(part) = state.get_mut(i).filter(|_| changed) {
                *part |= flag;
            }
        }
    }

    pub(crate) fn summary(&self) -> Summary {
        let mut summary = Summary { moved: (0, self.0.len()), ..Summary::default() };
        for (name, parts) in &self.0 {
            let target = name.trim_start_matches("0:").trim_end_matches(".lora_b");
            let still = |part: u8| part & (A[1] | B[1]) == 0;
            let before = summary.dead.len() + summary.unchanged.len();
            let Summary { dead, unchanged, unrouted, .. } = &mut summary;
            let mut lifeless = |part: u8, name: String| match part & FELT != 0 {
                true => unchanged.push(name),
                false => dead.push(name),
            };
            if parts.iter().all(|&part| still(part)) {
                lifeless(parts.iter().fold(0, |all, part| all | part), target.to_string());
                continue;
            }
            for (i, &part) in parts.iter().enumerate() {
                let expert = if parts.len() > 1 { format!("[{i}]") } else { String::new() };
                let lacks = |[owed, got]: [u8; 2]| part & owed != 0 && part & got == 0;
                match (part & CHOSEN != 0, still(part)) {
                    (false, true) => unrouted.push(format!("{target}{expert}")),
                    (true, true) => lifeless(part, format!("{target}{expert}")),
                    (_, false) => {
                        if lacks(A) {
                            lifeless(0, format!("{target}{expert}.lora_a"));
                        }
                        if lacks(B) {
                            lifeless(part, format!("{target}{expert}.lora_b"));
                        }
                    }
                }
            }
            let after = summary.dead.len() + summary.unchanged.len();
            summary.moved.0 += usize::from(after == before);
        }
        summary
    }

    pub(crate) fn to_json(&self) -> Value {
        json!(self.0)
    }

    /// What [`Moved::to_json`] gave.
    pub(crate) fn parse(value: &Value) -> Option<Moved> {
        let part = |part: &Value| u8::try_from(part.as_u64()?).ok();
        let of = |(name, list): (&String, &Value)| {
            let list = list.as_array()?.iter().map(part).collect::<Option<Vec<u8>>>()?;
            Some((name.clone(), list))
        };
        value.as_object()?.iter().map(of).collect::<Option<_>>().map(Moved)
    }
}

/// The target that a parameter is of, the flag that says it has moved, and those of a part of which
/// nothing more is to be found out.
fn role(name: &str) -> (String, u8, u8) {
    match (name.starts_with("0:"), name.strip_suffix(".lora_a")) {
        (true, Some(target)) => (format!("{target}.lora_b"), A[1], A[1] | B[1]),
        (true, None) => (name.to_string(), B[1], A[1] | B[1]),
        (false, _) => (name.to_string(), B[1], B[1]),
    }
}

#[cfg(test)]
mod tests {
    use model::LoraTensor;

    use super::*;

    const NAMES: [&str; 2] = ["0:t.lora_a", "0:t.lora_b"];

    /// A pair of two experts with these values of A and B, and what is known of it.
    fn pair(a: [f32; 2], b: [f32; 2]) -> (Moved, Parameters) {
        let pair = LoraTensor { a: a.into(), b: b.into(), rank: 1, scale: 1.0 };
        let adapter =
            Adapter { alpha: 1.0, dropout: 0.0, tensors: [("t".to_string(), pair)].into() };
        let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
        (Moved([(NAMES[1].to_string(), vec![0; 2])].into()), parameters)
    }

    /// A step of plain descent by these gradients.
    fn step(to: &mut (Moved, Parameters), gradients: [[f32; 2]; 2], chosen: [bool; 2]) {
        let (moved, parameters) = to;
        for (name, gradient) in NAMES.into_iter().zip(gradients) {
            let watched = moved.watch(name, parameters, &gradient, Some(&chosen));
            let values = parameters.value_mut(name).unwrap();
            values.iter_mut().zip(gradient).for_each(|(v, g)| *v -= 0.5 * g);
            moved.note(watched, values);
        }
    }

    fn dead(state: &(Moved, Parameters)) -> Vec<String> {
        let known = Moved::parse(&state.0.to_json()).unwrap();
        assert_eq!(known, state.0);
        known.summary().dead
    }

    /// A has no gradient before B has moved. From then on it is owed one.
    #[test]
    fn f17_half_a_pair_that_does_not_move_is_dead() {
        let both = [true; 2];
        let mut of = pair([1.0; 2], [0.0; 2]);
        step(&mut of, [[0.0; 2], [1.0; 2]], both);
        assert_eq!(dead(&of), [""; 0]);
        step(&mut of, [[1.0, 0.0], [1.0; 2]], both);
        assert_eq!(dead(&of), ["t[1].lora_a"]);
        assert_eq!(of.0.summary().moved, (0, 1));
        step(&mut of, [[0.0, 1.0], [0.0; 2]], both);
        assert_eq!(dead(&of), [""; 0]);
        assert_eq!(of.0.summary().moved, (1, 1));
        // The other way round.
        let mut of = pair([0.0; 2], [1.0; 2]);
        step(&mut of, [[1.0; 2], [0.0; 2]], both);
        assert_eq!(dead(&of), [""; 0]);
        step(&mut of, [[1.0; 2], [0.0, 1.0]], both);
        assert_eq!(dead(&of), ["t[0].lora_b"]);
        // Zeros on both sides never move.
        let mut of = pair([1.0, 0.0], [1.0, 0.0]);
        step(&mut of, [[1.0, 0.0]; 2], both);
        assert_eq!(dead(&of), ["t[1]"]);
    }

    /// What a gradient came to that changes no bit is no lack of gradients.
    #[test]
    fn steps_that_are_too_small_are_told_from_gradients_that_are_missing() {
        let mut of = pair([1.0; 2], [1.0, 0.0]);
        step(&mut of, [[0.0; 2], [1e-30, 0.0]], [true; 2]);
        let summary = of.0.summary();
        assert_eq!((summary.unchanged, summary.dead.len()), (vec!["t".to_string()], 0));
        step(&mut of, [[1.0; 2], [1e-30, 0.0]], [true; 2]);
        let summary = of.0.summary();
        assert_eq!(summary.unchanged, ["t[0].lora_b"]);
        assert_eq!(summary.dead, ["t[1].lora_b"]);
        assert_eq!(summary.moved, (0, 1));
    }

    #[test]
    fn f17_experts_are_owed_what_those_get_that_were_chosen() {
        let mut of = pair([1.0; 2], [0.0; 2]);
        step(&mut of, [[0.0; 2], [1.0, 0.0]], [true, false]);
        let summary = of.0.summary();
        assert_eq!((summary.dead.len(), summary.unrouted), (0, vec!["t[1]".to_string()]));
        // Chosen while its B is still zero, and not again: no gradient of A was owed.
        step(&mut of, [[1.0, 0.0], [1.0, 1.0]], [true; 2]);
        step(&mut of, [[1.0, 0.0], [1.0, 0.0]], [true, false]);
        let summary = of.0.summary();
        assert_eq!((summary.dead.len(), summary.unrouted.len()), (0, 0));
        // Chosen, and nothing came.
        let mut of = pair([1.0; 2], [0.0; 2]);
        step(&mut of, [[0.0; 2], [1.0, 0.0]], [true; 2]);
        assert_eq!(dead(&of), ["t[1]"]);
        for wrong in [json!([1]), json!({"0:t.lora_b": [256]}), json!({"0:t.lora_b": [true]})] {
            assert_eq!(Moved::parse(&wrong), None);
        }
    }
}
