//! Cases of normalization and rotary position embedding.

use graph::{NormKind, NormOperand, Op, RopeAngles, RopeStyle, Sections, Yarn};

use super::TILES;
use crate::check::{Cases, Expected, Fill, View};

const SHAPES: [&[usize]; 8] =
    [&[40], &[1, 48], &[5, 17], &[3, 64], &[2, 3, 16], &[2, 2, 2, 9], &[70, 9], TILES];

pub fn rms_norm(c: &mut Cases) {
    for eps in [1e-6, 1e-2] {
        for dims in SHAPES {
            c.add(format!("eps {eps} {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                let w = g.float("w", &dims[dims.len() - 1..], Fill::Signed)?;
                g.graph.rms_norm(x, w, eps)
            });
        }
    }
    c.add("rows so small that eps counts", |g| {
        let x = g.float("x", &[4, 16], Fill::Between(-0.05, 0.05))?;
        let w = g.float("w", &[16], Fill::Signed)?;
        g.graph.rms_norm(x, w, 1e-3)
    });
    for view in View::STRIDED.into_iter().filter(|view| *view != View::RepeatedColumns) {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 16], view, Fill::Signed)?;
            let w = g.float("w", &[16], Fill::Signed)?;
            g.cotangent_viewed(&[4, 16], view)?;
            g.graph.rms_norm(x, w, 1e-5)
        });
    }
}

pub fn rms_norm_back(c: &mut Cases) {
    // The weight's gradient is a sum over rows: positive terms, so that it does not cancel.
    let signs = [(NormOperand::X, Fill::Signed), (NormOperand::Weight, Fill::POSITIVE)];
    for (wrt, fill) in signs {
        for dims in SHAPES {
            c.add(format!("{wrt:?} {dims:?}"), move |g| {
                let x = g.float("x", dims, fill)?;
                let w = g.float("w", &dims[dims.len() - 1..], Fill::Signed)?;
                let dy = g.float("dy", dims, fill)?;
                let refused = g.refused();
                g.expect_all(refused);
                let eps = 1e-5.into();
                g.graph.push(Op::RmsNormBack { eps, wrt }, &[x, w, dy], "y")
            });
        }
    }
}

pub fn norm(c: &mut Cases, kind: NormKind) {
    for eps in [1e-6, 1e-2] {
        for dims in SHAPES {
            c.add(format!("eps {eps} {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                g.graph.push(Op::Norm { kind, eps: eps.into() }, &[x], "y")
            });
        }
    }
    c.add("rows so small that eps counts", move |g| {
        let x = g.float("x", &[4, 16], Fill::Between(-0.05, 0.05))?;
        g.graph.push(Op::Norm { kind, eps: 1e-3.into() }, &[x], "y")
    });
    c.add("rows of very different sizes", move |g| {
        // The first is below eps, and of L2Clamp's other kind.
        let small = g.float("small", &[1, 4], Fill::Between(5e-4, 1e-3))?;
        let large = g.float("large", &[7, 4], Fill::Signed)?;
        let x = g.graph.concat(&[small, large], 0)?;
        g.graph.push(Op::Norm { kind, eps: 1e-2.into() }, &[x], "y")
    });
    for view in View::STRIDED.into_iter().filter(|view| *view != View::RepeatedColumns) {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 16], view, Fill::Signed)?;
            g.cotangent_viewed(&[4, 16], view)?;
            g.graph.push(Op::Norm { kind, eps: 1e-5.into() }, &[x], "y")
        });
    }
    c.add("heads cut out of a fused projection", move |g| {
        let qkv = g.float("qkv", &[4, 40], Fill::Signed)?;
        let q = g.graph.slice(qkv, 1, 8, 16)?;
        let q = g.graph.reshape(q, &[4, 2, 8])?;
        g.graph.push(Op::Norm { kind, eps: 1e-5.into() }, &[q], "y")
    });
    if kind == NormKind::Layer {
        for (dims, groups) in [(&[16, 24][..], 3), (&[2, 5, 16], 2), (&[40], 5)] {
            c.add(format!("{groups} groups of {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                g.graph.group_norm(x, groups, 1e-5, "y")
            });
        }
    }
}

pub fn norm_back(c: &mut Cases, kind: NormKind) {
    for eps in [1e-6, 1.0] {
        for dims in SHAPES {
            c.add(format!("eps {eps} {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                let dy = g.float("dy", dims, Fill::Signed)?;
                g.expect_all(g.refused());
                g.graph.push(Op::NormBack { kind, eps: eps.into() }, &[x, dy], "y")
            });
        }
    }
    if kind == NormKind::L2Clamp {
        c.add("a row as long as eps", move |g| {
            let x = g.given("x", &[1, 2], &[3.0, 4.0])?;
            let dy = g.float("dy", &[1, 2], Fill::Signed)?;
            g.expect_all(g.refused());
            g.graph.push(Op::NormBack { kind, eps: 5.0.into() }, &[x, dy], "y")
        });
    }
    for zeros in [1, 16, 40] {
        if kind != NormKind::Layer {
            c.add(format!("a row of {zeros} zeros"), move |g| {
                let x = g.given("x", &[1, zeros], &vec![0.0; zeros])?;
                let dy = g.float("dy", &[1, zeros], Fill::Signed)?;
                g.expect_all(g.refused());
                g.graph.push(Op::NormBack { kind, eps: 1e-6.into() }, &[x, dy], "y")
            });
        }
    }
}

/// Angles of a base that is large enough to be like a model's.
fn angles(dims: usize, freq_scale: f32, factors: bool) -> RopeAngles {
    RopeAngles {
        dims,
        base: 10_000.0.into(),
        freq_scale: freq_scale.into(),
        factors,
        yarn: None,
        sections: None,
    }
}

const POSITIONS: [i32; 8] = [0, 1, 2, 3, 17, 511, 5, 100];

pub fn rope_table(c: &mut Cases) {
    c.add("factors cut out of a matrix", |g| {
        let pos = g.ints("pos", &[8], &POSITIONS)?;
        let all = g.float("factors", &[4, 2], Fill::POSITIVE)?;
        let refused = g.refused();
        g.expect(all, refused);
        let factors = g.graph.slice(all, 1, 1, 1)?;
        let factors = g.graph.reshape(factors, &[4])?;
        g.graph.push(Op::RopeTable(angles(8, 1.0, true)), &[pos, factors], "y")
    });
    c.add("more positions than a tile holds", |g| {
        let pos = g.ints("pos", &[60], &std::array::from_fn::<i32, 60, _>(|t| t as i32))?;
        g.graph.push(Op::RopeTable(angles(8, 1.0, false)), &[pos], "y")
    });
    for dims in [2, 8, 64] {
        for freq_scale in [1.0, 0.25] {
            for factors in [false, true] {
                let with = if factors { "with" } else { "without" };
                c.add(format!("{dims} times {freq_scale} {with} factors"), move |g| {
                    let pos = g.ints("pos", &[8], &POSITIONS)?;
                    let mut args = vec![pos];
                    if factors {
                        let factors = g.float("factors", &[dims / 2], Fill::POSITIVE)?;
                        let refused = g.refused();
                        g.expect(factors, refused);
                        args.push(factors);
                    }
                    g.graph.push(Op::RopeTable(angles(dims, freq_scale, factors)), &args, "y")
                });
            }
        }
    }
    rope_variants(c);
}

/// YaRN as models have it: stretched four times, with frequencies on both sides of the ramp. Where
/// the ramp is not rounded, no frequency is left quite as it was.
fn yarn(round: bool) -> Yarn {
    Yarn {
        ext_factor: f32::into(if round { 1.0 } else { 0.75 }),
        attn_factor: 1.25.into(),
        beta_fast: 32.0.into(),
        beta_slow: 1.0.into(),
        context: 512,
        round,
    }
}

fn rope_variants(c: &mut Cases) {
    for round in [true, false] {
        for (dims, factors) in [(64, false), (16, true)] {
            c.add(format!("YaRN, rounded {round}, {dims}, factors {factors}"), move |g| {
                let yarn = Some(yarn(round));
                let angles = RopeAngles { yarn, ..angles(dims, 0.25, factors) };
                let mut args = vec![g.ints("pos", &[8], &POSITIONS)?];
                if factors {
                    args.push(g.float("factors", &[dims / 2], Fill::POSITIVE)?);
                    g.expect_all(g.refused());
                }
                g.graph.push(Op::RopeTable(angles), &args, "y")
            });
        }
    }
    for (sizes, interleaved) in [([2, 3, 3, 0], false), ([1, 1, 1, 1], false), ([4, 2, 2, 0], true)]
    {
        for yarned in [false, true] {
            let name = format!("sections {sizes:?}, interleaved {interleaved}, YaRN {yarned}");
            c.add(name, move |g| {
                let pos: Vec<i32> = (0..12).map(|i| i * i % 11).collect();
                let pos = g.ints("pos", &[3, 4], &pos)?;
                let sections = Some(Sections { sizes, interleaved });
                let yarn = yarned.then(|| yarn(true));
                let angles = RopeAngles { sections, yarn, ..angles(16, 0.5, false) };
                g.graph.push(Op::RopeTable(angles), &[pos], "y")
            });
        }
    }
}

pub fn rope(c: &mut Cases) {
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        for inverse in [false, true] {
            // Of the last a tile holds six rows.
            for (heads, width, dims) in
                [(1, 8, 8), (3, 8, 4), (2, 16, 16), (2, 10, 6), (4, 64, 64), (20, 64, 64)]
            {
                let back = if inverse { " backwards" } else { "" };
                let name = format!("{style:?}{back}, {dims} of {width}, {heads} heads");
                c.add(name, move |g| {
                    let x = g.float("x", &[8, heads, width], Fill::Signed)?;
                    let pos = g.ints("pos", &[8], &POSITIONS)?;
                    // The table blocks the way to positions before the rotation could.
                    let code = graph::Code::OpNotDifferentiable;
                    g.expect(pos, Expected::Refusal { code, op: "RopeTable" });
                    let table =
                        g.graph.push(Op::RopeTable(angles(dims, 1.0, false)), &[pos], "table")?;
                    g.graph.push(Op::Rope { style, inverse }, &[x, table], "y")
                });
            }
        }
        c.add(format!("{style:?}, a table of its own"), move |g| {
            let x = g.float("x", &[4, 2, 6], Fill::Signed)?;
            let table = g.float("table", &[4, 4], Fill::Signed)?;
            let refused = g.refused();
            g.expect(table, refused);
            g.graph.push(Op::Rope { style, inverse: false }, &[x, table], "y")
        });
        for view in View::STRIDED {
            c.add(format!("{style:?} {view:?}"), move |g| {
                let x = g.viewed("x", &[4, 2, 6], view, Fill::Signed)?;
                let table = g.viewed("table", &[4, 4], View::Columns, Fill::Signed)?;
                if let Some(leaf) = g.graph.find_leaf("table") {
                    g.expect(leaf, Expected::Nothing);
                }
                g.cotangent_viewed(&[4, 2, 6], view)?;
                g.graph.push(Op::Rope { style, inverse: false }, &[x, table], "y")
            });
        }
        c.add(format!("{style:?}, a head cut out of a fused projection"), move |g| {
            let qkv = g.float("qkv", &[4, 24], Fill::Signed)?;
            let pos = g.ints("pos", &[4], &[3, 0, 9, 2])?;
            g.expect(pos, Expected::Nothing);
            let table = g.graph.push(Op::RopeTable(angles(6, 1.0, false)), &[pos], "table")?;
            let q = g.graph.slice(qkv, 1, 6, 12)?;
            let q = g.graph.reshape(q, &[4, 2, 6])?;
            g.graph.push(Op::Rope { style, inverse: false }, &[q, table], "y")
        });
    }
}
