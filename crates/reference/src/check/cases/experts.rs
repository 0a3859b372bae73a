//! Cases of products with chosen experts, and of the router that chooses them.

use gguf::TensorType;
use graph::{DType, LoraOperand, NodeId, Op};

use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// Choices of `used` of `experts` for each row, all different; the last expert is never chosen
/// where there are enough others.
fn choose(g: &mut CaseGraph, rows: usize, used: usize, experts: usize) -> Made {
    let most = if experts > used { experts - 1 } else { experts };
    let at = |i: usize| ((i / used * 3 + i % used) % most) as i32;
    let ids: Vec<i32> = (0..rows * used).map(at).collect();
    g.ints("ids", &[rows, used], &ids)
}

/// Rows, choices of a row, experts, outputs, inputs.
const SIZES: [[usize; 5]; 7] = [
    [1, 1, 1, 4, 5],
    [1, 2, 4, 17, 8],
    [3, 2, 4, 5, 33],
    [5, 8, 8, 16, 6],
    [7, 1, 3, 33, 7],
    [120, 1, 2, 3, 4],
    [20, 3, 4, 40, 9],
];

pub fn mat_mul_experts(c: &mut Cases) {
    for tb in [true, false] {
        for [t, u, e, n, k] in SIZES {
            for own in [1, u] {
                let name = format!("tb {tb}, {t} rows {own} x {k}, {u} of {e} experts, {n} out");
                c.add(name, move |g| {
                    // Positive: gradients are sums, which must not cancel.
                    g.cotangents(Fill::POSITIVE);
                    let x = g.float("x", &[t, own, k], Fill::POSITIVE)?;
                    let dims = if tb { [e, n, k] } else { [e, k, n] };
                    let w = g.float("w", &dims, Fill::POSITIVE)?;
                    let ids = choose(g, t, u, e)?;
                    g.graph.push(Op::MatMulExperts { tb }, &[x, w, ids], "y")
                });
            }
        }
        for dtype in [DType::F16, DType::BF16] {
            c.add(format!("tb {tb}, {dtype}"), move |g| {
                let x = g.float("x", &[5, 1, 17], Fill::Signed)?;
                let w = g.float_of(
                    "w",
                    if tb { &[4, 6, 17] } else { &[4, 17, 6] },
                    dtype,
                    Fill::Signed,
                )?;
                let ids = choose(g, 5, 2, 4)?;
                g.graph.push(Op::MatMulExperts { tb }, &[x, w, ids], "y")
            });
        }
        for view in View::STRIDED {
            c.add(format!("tb {tb}, {view:?}"), move |g| {
                g.cotangents(Fill::POSITIVE);
                let x = g.viewed("x", &[5, 2, 6], view, Fill::POSITIVE)?;
                let w =
                    g.viewed("w", if tb { &[4, 7, 6] } else { &[4, 6, 7] }, view, Fill::POSITIVE)?;
                let ids = choose(g, 5, 2, 4)?;
                g.cotangent_viewed(&[5, 2, 7], view)?;
                g.graph.push(Op::MatMulExperts { tb }, &[x, w, ids], "y")
            });
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for [t, u, e, n, k] in [[1, 2, 4, 24, 32], [9, 2, 3, 33, 40], [60, 2, 3, 7, 64]] {
            c.add(format!("{t} rows, {u} of {e} {dtype} weights [{n}, {k}]"), move |g| {
                let x = g.float("x", &[t, 1, k], Fill::Signed)?;
                let w = g.weight("w", &[e, n, k], dtype)?;
                let ids = choose(g, t, u, e)?;
                g.graph.project_experts(x, w, ids)
            });
        }
    }
    for format in TensorType::ALL.into_iter().filter(|format| format.is_quantized()) {
        for [t, u, e, n] in [[1, 2, 4, 24], [9, 2, 3, 33]] {
            let dtype = DType::Block(format);
            c.add(format!("{t} rows, {u} of {e} {format} weights [{n}, 256]"), move |g| {
                let x = g.float("x", &[t, u, 256], Fill::Signed)?;
                let w = g.weight("w", &[e, n, 256], dtype)?;
                let ids = choose(g, t, u, e)?;
                g.graph.project_experts(x, w, ids)
            });
            for left in [DType::BF16, DType::Int16Rows] {
                let name = format!("{t} {left} rows before {u} of {e} {format} weights of {n}");
                c.add(name, move |g| {
                    let x = g.float_of("x", &[t, u, n], left, Fill::Signed)?;
                    let w = g.weight("w", &[e, n, 256], dtype)?;
                    let ids = choose(g, t, u, e)?;
                    let refused = g.refused();
                    g.expect_all(refused);
                    g.graph.push(Op::MatMulExperts { tb: false }, &[x, w, ids], "y")
                });
            }
        }
    }
    for used in [1, 2, 8] {
        c.add(format!("a whole router that uses {used}"), move |g| router(g, used));
    }
    for id in [-1, 4, i32::MAX] {
        c.add_outside(format!("expert {id} of 4"), move |g| {
            let x = g.float("x", &[2, 1, 6], Fill::Signed)?;
            let w = g.float("w", &[4, 5, 6], Fill::Signed)?;
            let ids = g.ints("ids", &[2, 2], &[0, 1, id, 2])?;
            g.graph.push(Op::MatMulExperts { tb: true }, &[x, w, ids], "y")
        });
    }
}

/// The router of a mixture of experts: softmax, the greatest, their shares divided by their
/// clamped sum and scaled, and the experts' results weighed by them.
fn router(g: &mut CaseGraph, used: usize) -> Made {
    // Few experts and many rows, so that every expert is chosen: the shares do not depend on the
    // logit of one that is not.
    let (t, experts, n, k) = (12, if used == 8 { 8 } else { 3 }, 5, 6);
    let (x, gate) = decided(g, t, experts, k)?;
    let w = g.float("w", &[experts, n, k], Fill::Signed)?;
    let shares = |g: &mut CaseGraph, x: NodeId| -> Result<(NodeId, NodeId), graph::Invalid> {
        let graph = &mut g.graph;
        let logits = graph.push(Op::MatMul { ta: false, tb: true }, &[x, gate], "logits")?;
        let p = graph.softmax(logits, "shares")?;
        let ids = graph.top_k(p, used, "ids")?;
        let chosen = graph.take(p, ids, "chosen")?;
        // One share divided by itself is a constant, whose gradient is zero but for rounding: of one
        // the sum is clamped.
        let least = if used == 1 { 2.0 } else { 6.1e-5 };
        let sum = graph.sum(chosen, &[1])?;
        let sum = graph.clamp(sum, least, f32::INFINITY)?;
        let shares = graph.div(chosen, sum)?;
        Ok((ids, graph.affine(shares, 1.5, 0.0)?))
    };
    let (ids, shares) = shares(g, x)?;
    let rows = g.graph.reshape(x, &[t, 1, k])?;
    let y = g.graph.project_experts(rows, w, ids)?;
    g.graph.mix_experts(y, shares)
}

/// Rows and a gate that tells experts apart in each: no small step changes who is chosen.
fn decided(
    g: &mut CaseGraph,
    rows: usize,
    experts: usize,
    k: usize,
) -> Result<(NodeId, NodeId), graph::Invalid> {
    let mut signed = |n: usize| -> Vec<f32> {
        (0..n).map(|_| (g.rng.sign() * g.rng.between(0.3, 1.7)) as f32).collect()
    };
    let gate = signed(experts * k);
    let mut x: Vec<f32> = Vec::with_capacity(rows * k);
    while x.len() < rows * k {
        let row = signed(k);
        let logit = |w: &[f32]| w.iter().zip(&row).map(|(w, x)| w * x).sum::<f32>();
        let mut logits: Vec<f32> = gate.chunks(k).map(logit).collect();
        logits.sort_by(f32::total_cmp);
        if logits.windows(2).all(|pair| pair[1] - pair[0] > 0.02) {
            x.extend(row);
        }
    }
    Ok((g.given("x", &[rows, k], &x)?, g.given("gate", &[experts, k], &gate)?))
}

pub fn expert_outer(c: &mut Cases) {
    for [t, u, e, n, k] in SIZES {
        for (left, right) in [(1, u), (u, 1), (u, u)] {
            c.add(format!("{t} rows {left} x {n}, {right} x {k}, {u} of {e}"), move |g| {
                let a = g.float("a", &[t, left, n], Fill::POSITIVE)?;
                let b = g.float("b", &[t, right, k], Fill::POSITIVE)?;
                g.expect_all(g.refused());
                let ids = choose(g, t, u, e)?;
                g.graph.push(Op::ExpertOuter { experts: e }, &[a, b, ids], "y")
            });
        }
    }
    c.add("more rows and columns than a tile has", |g| {
        let a = g.float("a", &[3, 1, 200], Fill::POSITIVE)?;
        let b = g.float("b", &[3, 1, 210], Fill::POSITIVE)?;
        g.expect_all(g.refused());
        let ids = choose(g, 3, 1, 2)?;
        g.graph.push(Op::ExpertOuter { experts: 2 }, &[a, b, ids], "y")
    });
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let a = g.viewed("a", &[5, 2, 6], view, Fill::POSITIVE)?;
            let b = g.viewed("b", &[5, 2, 7], view, Fill::POSITIVE)?;
            g.expect_all(Expected::Nothing);
            let refused = g.refused();
            if let Some(leaf) = g.graph.find_leaf("a") {
                g.expect(leaf, refused);
            }
            let ids = choose(g, 5, 2, 4)?;
            g.graph.push(Op::ExpertOuter { experts: 4 }, &[a, b, ids], "y")
        });
    }
    c.add_outside("expert 3 of 3", |g| {
        let a = g.float("a", &[2, 1, 6], Fill::Signed)?;
        let b = g.float("b", &[2, 1, 5], Fill::Signed)?;
        let ids = g.ints("ids", &[2, 2], &[0, 1, 3, 2])?;
        g.graph.push(Op::ExpertOuter { experts: 3 }, &[a, b, ids], "y")
    });
}

/// Rows that chose experts, and adapters of these.
#[derive(Copy, Clone)]
struct Adapted {
    /// Rows, choices of a row, experts, outputs, inputs.
    sizes: [usize; 5],
    /// Vectors of `x` for each row.
    own: usize,
    ranks: &'static [usize],
    /// Slots of the rows, over and over.
    slots: &'static [i32],
}

/// Operands of adapted experts.
struct Operands {
    x: NodeId,
    /// `base` or `dy`.
    y: NodeId,
    rows: NodeId,
    ids: NodeId,
    /// `A`, `B` and the scale of each slot.
    slots: Vec<[NodeId; 3]>,
}

impl Adapted {
    const MIXED: Adapted =
        Adapted { sizes: [9, 2, 4, 7, 6], own: 1, ranks: &[1, 5, 3], slots: &[0, 2, -1, 1, 2] };

    fn all() -> Vec<(String, Adapted)> {
        let mut list = Vec::new();
        for sizes @ [t, u, e, n, k] in SIZES.into_iter().chain([[150, 1, 2, 5, 20]]) {
            for own in [1, u].into_iter().take(if u == 1 { 1 } else { 2 }) {
                let name = format!("{t} rows {own} x {k}, {u} of {e} experts, {n} out");
                list.push((name, Adapted { sizes, own, ranks: &[3], slots: &[0] }));
            }
        }
        let (mixed, pair): (_, &[usize]) = (Adapted::MIXED, &[2, 4]);
        list.extend([
            ("ragged ranks".into(), mixed),
            ("a row for each choice".into(), Adapted { own: 2, ..mixed }),
            ("many ranks".into(), Adapted { ranks: &[21], slots: &[0, -1], ..mixed }),
            ("a slot without rows".into(), Adapted { ranks: pair, slots: &[1, 1, -1], ..mixed }),
            ("no row has an adapter".into(), Adapted { ranks: &[3], slots: &[-1], ..mixed }),
            ("wide".into(), Adapted { sizes: [3, 2, 3, 600, 40], ranks: pair, ..mixed_slots() }),
            ("deep".into(), Adapted { sizes: [4, 2, 3, 20, 600], ranks: pair, ..mixed_slots() }),
            ("many experts".into(), Adapted { sizes: [5, 3, 40, 8, 9], ..mixed }),
            ("many rows".into(), Adapted { sizes: [90, 2, 3, 18, 9], own: 2, ..mixed }),
        ]);
        list
    }

    fn operands(&self, g: &mut CaseGraph, y: &str, fill: Fill) -> Result<Operands, graph::Invalid> {
        let [t, u, e, n, k] = self.sizes;
        let (x, y) = (g.float("x", &[t, self.own, k], fill)?, g.float(y, &[t, u, n], fill)?);
        let of: Vec<i32> = self.slots.iter().copied().cycle().take(t).collect();
        let rows = g.ints("rows", &[t], &of)?;
        let ids = choose(g, t, u, e)?;
        let mut slots = Vec::new();
        for (s, &rank) in self.ranks.iter().enumerate() {
            let a = g.float(&format!("a{s}"), &[e, rank, k], fill)?;
            let b = g.float(&format!("b{s}"), &[e, n, rank], fill)?;
            // Neither 1 nor the same: a scale that is dropped or swapped shows.
            let scale = g.given(&format!("scale{s}"), &[1], &[0.75 + 1.5 * s as f32])?;
            let refused = g.refused();
            g.expect(scale, refused);
            slots.push([a, b, scale]);
        }
        Ok(Operands { x, y, rows, ids, slots })
    }
}

/// Two slots, and rows without one.
fn mixed_slots() -> Adapted {
    Adapted { slots: &[1, 0, -1, 0], ..Adapted::MIXED }
}

pub fn lora_experts(c: &mut Cases) {
    let push = |g: &mut CaseGraph, of: &Operands| {
        let mut args = vec![of.x, of.y, of.rows, of.ids];
        args.extend(of.slots.iter().flatten());
        g.graph.push(Op::LoraExperts { slots: of.slots.len() }, &args, "y")
    };
    for (name, adapted) in Adapted::all() {
        c.add(name, move |g| {
            // Positive: gradients are sums, which must not cancel.
            g.cotangents(Fill::POSITIVE);
            let of = adapted.operands(g, "base", Fill::POSITIVE)?;
            push(g, &of)
        });
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let x = g.viewed("x", &[5, 2, 6], view, Fill::POSITIVE)?;
            let base = g.viewed("base", &[5, 2, 7], view, Fill::POSITIVE)?;
            let rows = g.ints("rows", &[5], &[0, -1, 0, 0, 0])?;
            let ids = choose(g, 5, 2, 4)?;
            let a = g.float("a", &[4, 3, 6], Fill::POSITIVE)?;
            let b = g.float("b", &[4, 7, 3], Fill::POSITIVE)?;
            let scale = g.given("scale", &[1], &[-1.25])?;
            g.expect(scale, Expected::Nothing);
            g.cotangent_viewed(&[5, 2, 7], view)?;
            g.graph.push(Op::LoraExperts { slots: 1 }, &[x, base, rows, ids, a, b, scale], "y")
        });
    }
    c.add("after Q8_0 experts", |g| {
        let x = g.float("x", &[9, 1, 64], Fill::Signed)?;
        let w = g.weight("w", &[3, 24, 64], DType::Block(TensorType::Q8_0))?;
        g.expect(w, Expected::Nothing);
        let ids = choose(g, 9, 2, 3)?;
        g.expect(ids, Expected::Nothing);
        let base = g.graph.project_experts(x, w, ids)?;
        let rows = g.ints("rows", &[9], &[0, 0, -1, 0, 0, 0, 0, -1, 0])?;
        let a = g.float("a", &[3, 4, 64], Fill::Signed)?;
        let b = g.float("b", &[3, 24, 4], Fill::Signed)?;
        let scale = g.given("scale", &[1], &[0.5])?;
        let refused = g.refused();
        g.expect(scale, refused);
        g.graph.push(Op::LoraExperts { slots: 1 }, &[x, base, rows, ids, a, b, scale], "y")
    });
    for slot in [3, i32::MAX] {
        c.add_outside(format!("slot {slot} of 3"), move |g| {
            let mut of = Adapted::MIXED.operands(g, "base", Fill::Signed)?;
            of.rows = g.ints("others", &[9], &[0, 1, slot, 0, 0, -1, 0, 2, 0])?;
            push(g, &of)
        });
    }
    for id in [-1, 4, i32::MAX] {
        c.add_outside(format!("expert {id} of 4"), move |g| {
            let mut of = Adapted::MIXED.operands(g, "base", Fill::Signed)?;
            let mut ids = [0; 18];
            ids[11] = id;
            of.ids = g.ints("others", &[9, 2], &ids)?;
            push(g, &of)
        });
    }
}

pub fn lora_experts_back(c: &mut Cases) {
    for (name, adapted) in Adapted::all() {
        for wrt in [LoraOperand::X, LoraOperand::A, LoraOperand::B] {
            for slot in 0..if wrt == LoraOperand::X { 1 } else { adapted.ranks.len() } {
                c.add(format!("{wrt:?} of slot {slot}, {name}"), move |g| {
                    let of = adapted.operands(g, "dy", Fill::POSITIVE)?;
                    g.expect_all(Expected::Nothing);
                    let refused = g.refused();
                    for operand in [of.y, of.rows, of.ids] {
                        g.expect(operand, refused);
                    }
                    let [a, b, scale] = of.slots[slot];
                    let args = match wrt {
                        LoraOperand::X => {
                            let mut args = vec![of.y, of.rows, of.ids];
                            args.extend(of.slots.iter().flatten());
                            args
                        }
                        LoraOperand::A => vec![of.x, of.y, of.rows, of.ids, b, scale],
                        LoraOperand::B => vec![of.x, of.y, of.rows, of.ids, a, scale],
                    };
                    let slots = of.slots.len();
                    g.graph.push(Op::LoraExpertsBack { slots, wrt, slot }, &args, "y")
                });
            }
        }
    }
}
