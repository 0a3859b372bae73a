//! Parameters that hold all experts of a layer: `mlp.experts.gate_up_proj` `[E, 2 ff, in]` and
//! `mlp.experts.down_proj` `[E, in, ff]`.
//!
//! PEFT has one A for gate and up. Two of their own are one of twice the rank, in which B is two
//! blocks on the diagonal, as PEFT itself converts them; such a one is taken apart again.

use graph::Code;

use super::Pair;
use super::config::Written;
use crate::adapter::{Base, MOST_RANK, effective_alpha, scale};
use crate::{Adapter, Error, LoraTensor, Result};

/// Which of two nested modules a parameter's pair is of: PEFT wraps the first parameter inside the
/// second.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub(super) enum Half {
    /// Gate and up.
    Inner,
    /// Down.
    Outer,
}

/// A written pair: where, as what, `[rows, width, out]`, A and B.
type Fused = (Half, Written, [usize; 3], Vec<f32>, Vec<f32>);

/// The name of the parameter that a pair of this shape is of, as configurations have it: where
/// only one of the two is adapted, nothing but the shape says which.
pub(super) fn parameter(
    path: &str,
    width: usize,
    layer: usize,
    base: &Base<'_>,
    out: usize,
) -> String {
    let module = path.strip_suffix(".base_layer").unwrap_or(path);
    let down = base.projection(&target(layer, "down"));
    let is_down = down.is_ok_and(|down| (down.width, down.out) == (width, out));
    format!("{module}.{}", if is_down { "down_proj" } else { "gate_up_proj" })
}

fn target(layer: usize, kind: &str) -> String {
    format!("blk.{layer}.ffn_{kind}_exps.weight")
}

/// The pairs of a parameter's pair: of the downs, or of the gates and the ups.
pub(super) fn split(
    pair: Pair,
    layer: usize,
    base: &Base<'_>,
    file: &str,
    path: &str,
) -> Result<Vec<(String, LoraTensor)>> {
    let [gate, up, down] = ["gate", "up", "down"].map(|kind| target(layer, kind));
    let (narrow, wide) = (base.projection(&down)?, base.projection(&gate)?);
    let wrong = |what: String| {
        Err(Error::adapter(Code::AdapterShape, format!("{file}: tensors of `{path}` {what}")))
    };
    let experts = narrow.experts.unwrap_or(1);
    let rows = pair.a.len() / pair.width.max(1);
    let is_down = (pair.width, pair.out) == (narrow.width, narrow.out);
    let is_both = (pair.width, pair.out) == (wide.width, 2 * wide.out);
    if !is_down && !is_both {
        return wrong(format!(
            "are for {} inputs and {} outputs, the model's experts have {} and {} of gate and up, \
             {} and {} of down",
            pair.width,
            pair.out,
            wide.width,
            2 * wide.out,
            narrow.width,
            narrow.out
        ));
    }
    if rows != experts * pair.rank || pair.rank > MOST_RANK {
        return wrong(format!(
            "have {rows} rows, expected {experts} experts times the rank {} of the configuration",
            pair.rank
        ));
    }
    let (rank, width) = (pair.rank, pair.width);
    // B of an expert: of each output the numbers for its ranks.
    let block = |from: usize, to: usize| -> Vec<f32> {
        let mut block = Vec::with_capacity(experts * (to - from) * rank);
        for e in 0..experts {
            for row in pair.b.chunks(rows.max(1)).take(to).skip(from) {
                block.extend(row.iter().skip(e).step_by(experts));
            }
        }
        block
    };
    let tensor = |rank: usize, a: Vec<f32>, b: Vec<f32>, alpha: f32| LoraTensor {
        rank,
        a,
        b,
        scale: scale(alpha, rank),
    };
    if is_down {
        let b = block(0, pair.out);
        return Ok(vec![(down, tensor(rank, pair.a, b, pair.alpha))]);
    }
    let (for_gate, for_up) = (block(0, wide.out), block(wide.out, pair.out));
    let half = rank / 2;
    let is_zero = |b: &[f32], first: bool| {
        b.chunks(rank).all(|row| {
            let (low, high) = row.split_at_checked(half).unwrap_or_default();
            let part = if first { low } else { high };
            part.iter().all(|b| b.to_bits() == 0)
        })
    };
    let diagonal = rank.is_multiple_of(2) && is_zero(&for_gate, false) && is_zero(&for_up, true);
    if !diagonal {
        let gate_of = tensor(rank, pair.a.clone(), for_gate, pair.alpha);
        return Ok(vec![(gate, gate_of), (up, tensor(rank, pair.a, for_up, pair.alpha))]);
    }
    let part = |values: &[f32], len: usize, first: bool| -> Vec<f32> {
        let parts = values.chunks(len.max(1)).enumerate();
        parts.filter(|(i, _)| i.is_multiple_of(2) == first).flat_map(|(_, p)| p).copied().collect()
    };
    // The scale is alpha / rank: that of half the rank takes half the alpha.
    let alpha = pair.alpha / 2.0;
    let of = |first: bool, b: &[f32]| {
        tensor(half, part(&pair.a, half * width, first), part(b, half, first), alpha)
    };
    Ok(vec![(gate, of(true, &for_gate)), (up, of(false, &for_up))])
}

/// The parameters' pairs of a layer's experts.
pub(super) fn fuse(adapter: &Adapter, layer: usize, base: &Base<'_>) -> Result<Vec<Fused>> {
    let find = |kind: &str| adapter.tensors.get(&target(layer, kind));
    let written = |name: &str, rank: usize, alpha: f64| Written {
        path: format!("model.layers.{layer}.mlp.experts.{name}"),
        parameter: true,
        rank,
        alpha,
    };
    let mut out = Vec::new();
    match (find("gate"), find("up")) {
        (None, None) => {}
        (Some(gate), Some(up)) if (gate.rank, gate.scale) == (up.rank, up.scale) => {
            let of = base.projection(&target(layer, "gate"))?;
            let experts = of.experts.unwrap_or(1);
            let shared = gate.a == up.a;
            let rank = if shared { gate.rank } else { 2 * gate.rank };
            if rank > MOST_RANK {
                return Err(Error::new(format!(
                    "gate and up of the experts of layer {layer} have rank {}; PEFT has one \
                     parameter for both, of rank {rank}, more than {MOST_RANK}",
                    gate.rank
                )));
            }
            let len = gate.rank * of.width;
            let a = match shared {
                true => gate.a.clone(),
                false => {
                    let both = gate.a.chunks(len).zip(up.a.chunks(len));
                    both.flat_map(|(gate, up)| gate.iter().chain(up)).copied().collect()
                }
            };
            // Of each output, rank by rank, the experts; zeros where it is not of this half.
            let mut b = Vec::with_capacity(2 * of.out * rank * experts);
            for (half, t) in [gate, up].into_iter().enumerate() {
                for o in 0..of.out {
                    for r in 0..rank {
                        let mine = if shared { Some(r) } else { r.checked_sub(half * t.rank) };
                        let mine = mine.filter(|&r| r < t.rank);
                        b.extend((0..experts).map(|e| {
                            let at = |r: usize| t.b.get((e * of.out + o) * t.rank + r).copied();
                            mine.and_then(at).unwrap_or(0.0)
                        }));
                    }
                }
            }
            let alpha = f64::from(gate.scale) * rank as f64;
            let alpha = match shared {
                true => f64::from(effective_alpha(gate.scale, rank)),
                false => alpha_of(gate, 2.0, alpha),
            };
            let dims = [experts * rank, of.width, 2 * of.out];
            out.push((Half::Inner, written("gate_up_proj", rank, alpha), dims, a, b));
        }
        _ => {
            return Err(Error::new(format!(
                "gate and up of the experts of layer {layer} have not both an adapter of one rank \
                 and scale; PEFT has one parameter for both, so the adapter cannot be written as \
                 a PEFT folder"
            )));
        }
    }
    if let Some(down) = find("down") {
        let of = base.projection(&target(layer, "down"))?;
        let experts = of.experts.unwrap_or(1);
        let mut b = Vec::with_capacity(down.b.len());
        for o in 0..of.out {
            for r in 0..down.rank {
                b.extend(
                    (0..experts).map(|e| {
                        down.b.get((e * of.out + o) * down.rank + r).copied().unwrap_or(0.0)
                    }),
                );
            }
        }
        let alpha = f64::from(effective_alpha(down.scale, down.rank));
        let dims = [experts * down.rank, of.width, of.out];
        // Alone, it is not nested.
        let place = written("down_proj", down.rank, alpha);
        out.push((Half::Outer, place, dims, down.a.clone(), b));
    }
    if let [(half, ..)] = out.as_mut_slice() {
        *half = Half::Outer;
    }
    Ok(out)
}

/// The alpha of a pair whose rank grows by a factor that is a power of two.
fn alpha_of(t: &LoraTensor, factor: f64, otherwise: f64) -> f64 {
    let alpha = f64::from(effective_alpha(t.scale, t.rank)) * factor;
    if alpha.is_finite() { alpha } else { otherwise }
}
