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
use std::ops::Range;

use model::{Adapter, Model};
use serde_json::{Value, json};

use crate::Parameters;
use crate::piece::{self, At};

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

/// The parts, of `n`, that a piece of a list of `len` numbers touches, each with its numbers there.
fn touched(
    len: usize,
    n: usize,
    piece: Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let size = (len / n.max(1)).max(1);
    let parts = piece.start / size..n.min(piece.end.div_ceil(size));
    parts.map(move |i| (i, piece.start.max(i * size)..piece.end.min((i + 1) * size)))
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

    /// How many experts a parameter has, if [`Moved::owe`] needs to be told which were chosen.
    pub(crate) fn experts(&self, name: &str) -> Option<usize> {
        let (target, flag, settled) = role(name);
        if settled != flag && flag != A[1] {
            return None;
        }
        let parts = self.0.get(&target).filter(|parts| parts.len() > 1)?;
        parts.iter().any(|part| part & settled != settled).then_some(parts.len())
    }

    /// What is known of the parts of a parameter's target, where there is more to be found out: of
    /// each, the flag that says the parameter has moved it.
    fn open(&mut self, name: &str) -> Option<(&mut Vec<u8>, u8)> {
        let (target, flag, settled) = role(name);
        let state = self.0.get_mut(&target)?;
        (!state.iter().all(|part| part & settled == settled)).then_some((state, flag))
    }

    /// Takes note of what a step owes a parameter, as a piece of the values from `from` on tells it;
    /// returns where the next piece begins that may tell more. `chosen` says of each expert of a
    /// stack whether a token with loss chose it. A pair is asked about A first, before any of it has
    /// moved.
    pub(crate) fn owe(
        &mut self,
        name: &str,
        parameters: &Parameters,
        chosen: Option<&[bool]>,
        from: usize,
    ) -> Option<usize> {
        let (state, flag) = self.open(name)?;
        let n = state.len();
        let is_chosen = |part: usize| chosen.is_none_or(|c| c.get(part).copied().unwrap_or(false));
        if !name.starts_with("0:") {
            let chosen = state.iter_mut().enumerate().filter(|(i, _)| is_chosen(*i));
            chosen.for_each(|(_, part)| *part |= CHOSEN | B[0]);
            return None;
        }
        let pair = parameters.pair(name).filter(|_| flag == A[1])?;
        let (at, mut ends) = (At { list: 0, from }, true);
        for (values, owed) in [(&pair.a, B[0]), (&pair.b, A[0])] {
            let piece = at.piece(values.len());
            ends &= piece.end == values.len();
            for (i, range) in touched(values.len(), n, piece) {
                if let Some(part) = state.get_mut(i).filter(|_| is_chosen(i)) {
                    let owes = *part & owed != 0 || any(values.get(range).unwrap_or(&[]));
                    *part |= CHOSEN | if owes { owed } else { 0 };
                }
            }
        }
        let both = A[0] | B[0];
        let is_known = |(i, part): (usize, &u8)| !is_chosen(i) || part & both == both;
        let ends = ends || state.iter().enumerate().all(is_known);
        (!ends).then_some(from + piece::NUMBERS)
    }

    /// Takes note of what a step gives a parameter of `len` numbers: a piece of the gradient from
    /// `from` on. True where it is to be seen whether the values move by it, see [`Moved::note`].
    pub(crate) fn feel(
        &mut self,
        name: &str,
        (from, len): (usize, usize),
        gradient: &[f32],
    ) -> bool {
        let Some((state, flag)) = self.open(name) else { return false };
        let n = state.len();
        let mut is_to_move = false;
        for (i, range) in touched(len, n, from..from + gradient.len()) {
            let of = gradient.get(range.start - from..range.end - from).unwrap_or(&[]);
            let Some(part) = state.get_mut(i).filter(|part| **part & flag == 0 && any(of)) else {
                continue;
            };
            match flag == A[1] {
                // B starts from zeros, so that its first gradients may be too small to change A.
                true => *part |= flag,
                false => {
                    *part |= FELT;
                    is_to_move = true;
                }
            }
        }
        is_to_move
    }

    /// Compares a piece of a parameter with what it was before the step moved it by `gradient`.
    pub(crate) fn note(
        &mut self,
        name: &str,
        (from, len): (usize, usize),
        gradient: &[f32],
        before: &[f32],
        now: &[f32],
    ) {
        let Some((state, flag)) = self.open(name) else { return };
        let n = state.len();
        let all = gradient.iter().zip(before.iter().zip(now));
        let moved: Vec<bool> =
            all.map(|(g, (a, b))| *g != 0.0 && a.to_bits() != b.to_bits()).collect();
        for (i, range) in touched(len, n, from..from + moved.len()) {
            let of = moved.get(range.start - from..range.end - from).unwrap_or(&[]);
            if let Some(part) = state.get_mut(i).filter(|_| of.contains(&true)) {
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
            assert_eq!(moved.owe(name, parameters, Some(&chosen), 0), None);
            let is_to_move = moved.feel(name, (0, 2), &gradient);
            let values = parameters.value_mut(name).unwrap();
            let before = values.to_vec();
            values.iter_mut().zip(gradient).for_each(|(v, g)| *v -= 0.5 * g);
            if is_to_move {
                moved.note(name, (0, 2), &gradient, &before, values);
            }
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

    /// Three experts of which each lies in two pieces, which share one: what is found out of each
    /// does not depend on where pieces begin.
    #[test]
    fn what_moves_is_found_out_piece_by_piece() {
        let size = 2 * piece::NUMBERS / 3;
        let (len, mut random) = (3 * size, testkit::Random::new(3));
        for _ in 0..200 {
            // Of a few numbers that are not zero, far from each other.
            let mut list = || {
                let mut list = vec![0.0f32; len];
                (0..random.below(4)).for_each(|_| list[random.below(len)] = 1.0);
                list
            };
            let (a, b, gradient) = (list(), list(), [list(), list()]);
            let of = |list: &[f32], i: usize| any(&list[i * size..(i + 1) * size]);
            let (mut whole, mut parameters) = pair([0.0; 2], [0.0; 2]);
            whole.0.insert(NAMES[1].into(), vec![0; 3]);
            let tensor = LoraTensor { a: a.clone(), b: b.clone(), rank: 1, scale: 1.0 };
            parameters.adapter.as_mut().unwrap().tensors.insert("t".into(), tensor);
            for (name, gradient) in NAMES.into_iter().zip(&gradient) {
                let mut from = Some(0);
                while let Some(at) = from {
                    from = whole.owe(name, &parameters, Some(&[true, true, false]), at);
                }
                let values = parameters.value_mut(name).unwrap();
                let mut at = At::start(0);
                while at.list == 0 {
                    let (range, place) = (at.piece(len), (at.from, len));
                    let (values, gradient) = (&mut values[range.clone()], &gradient[range]);
                    let (to_move, before) = (whole.feel(name, place, gradient), values.to_vec());
                    values.iter_mut().zip(gradient).for_each(|(v, g)| *v -= 0.5 * g);
                    if to_move {
                        whole.note(name, place, gradient, &before, values);
                    }
                    at = at.after(len);
                }
            }
            for i in 0..3 {
                let if_so = |so: bool, flag: u8| if so { flag } else { 0 };
                let chosen = i < 2;
                let expected = if_so(chosen, CHOSEN)
                    | if_so(chosen && of(&b, i), A[0])
                    | if_so(chosen && of(&a, i), B[0])
                    | if_so(of(&gradient[0], i), A[1])
                    | if_so(of(&gradient[1], i), B[1] | FELT);
                assert_eq!(whole.0[NAMES[1]][i], expected, "expert {i}");
            }
        }
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
