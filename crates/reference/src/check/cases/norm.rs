//! Cases of normalization and rotary position embedding.

use graph::{NormOperand, Op, RopeAngles, RopeStyle};

use crate::check::{Cases, Expected, Fill, View};

const SHAPES: [&[usize]; 6] = [&[40], &[1, 48], &[5, 17], &[3, 64], &[2, 3, 16], &[2, 2, 2, 9]];

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

/// Angles of a base that is large enough to be like a model's.
fn angles(dims: usize, freq_scale: f32, factors: bool) -> RopeAngles {
    RopeAngles { dims, base: 10_000.0.into(), freq_scale: freq_scale.into(), factors }
}

const POSITIONS: [i32; 8] = [0, 1, 2, 3, 17, 511, 5, 100];

pub fn rope_table(c: &mut Cases) {
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
}

pub fn rope(c: &mut Cases) {
    for style in [RopeStyle::Interleaved, RopeStyle::Halves] {
        for inverse in [false, true] {
            for (heads, width, dims) in [(1, 8, 8), (3, 8, 4), (2, 16, 16), (2, 10, 6), (4, 64, 64)]
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
