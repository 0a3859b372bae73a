//! Cases of ops that work element by element.

use graph::{Binary, GluKind, GluOperand, Op, Real, Shape, Unary};

use super::TILES;
use crate::check::{CaseGraph, Cases, Expected, Fill, View};

/// Where a function is checked: where it has a value, and its derivative is not near 0.
fn domain(f: Unary) -> Fill {
    match f {
        Unary::Tanh | Unary::Exp => Fill::Between(-2.0, 2.0),
        Unary::Sigmoid => Fill::Between(-3.0, 3.0),
        // Their minimums are at -1.28 and -0.75.
        Unary::Silu => Fill::Outside(-1.7, -0.9),
        Unary::Gelu => Fill::Outside(-1.1, -0.4),
        Unary::GeluErf | Unary::GeluQuick => Fill::Outside(-1.1, -0.4),
        Unary::Log | Unary::Log1p | Unary::Sqrt | Unary::Rsqrt => Fill::Between(0.2, 3.0),
        Unary::Expm1 | Unary::NormalCdf => Fill::Between(-2.0, 2.0),
        Unary::Softplus => Fill::Between(-3.0, 3.0),
        Unary::Sin | Unary::Cos => Fill::Between(0.2, 1.3),
        Unary::Relu => Fill::Outside(-0.3, 0.3),
        Unary::Neg | Unary::Abs | Unary::Sqr | Unary::Step | Unary::Sign => Fill::Signed,
    }
}

/// Shapes of every rank, odd widths and single rows included.
const SHAPES: [&[usize]; 8] =
    [&[], &[1], &[7], &[1, 9], &[5, 1], &[3, 5], &[2, 3, 4], &[2, 2, 3, 17]];

/// Plain and strided sources, and plain and strided cotangents: sources alone, cotangents
/// alone, both.
fn strides() -> impl Iterator<Item = (View, View)> {
    View::STRIDED
        .into_iter()
        .flat_map(|view| [(view, View::Plain), (View::Plain, view), (view, view)])
}

/// The gradient of what is repeated is a sum of cotangents: of positive ones, which do not cancel.
fn sums_of_repeated(g: &mut CaseGraph, source: View) {
    if matches!(source, View::Repeated | View::RepeatedColumns) {
        g.cotangents(Fill::POSITIVE);
    }
}

const STRIDED_SHAPES: [&[usize]; 2] = [&[4, 6], &[2, 3, 5]];

pub fn unary(c: &mut Cases, f: Unary) {
    for dims in SHAPES {
        c.add(format!("{dims:?}"), move |g| {
            let x = g.float("x", dims, domain(f))?;
            g.graph.unary(f, x)
        });
    }
    for dims in STRIDED_SHAPES {
        for (source, cotangent) in strides() {
            c.add(format!("{dims:?} {source:?}, cotangent {cotangent:?}"), move |g| {
                sums_of_repeated(g, source);
                let x = g.viewed("x", dims, source, domain(f))?;
                g.cotangent_viewed(dims, cotangent)?;
                g.graph.unary(f, x)
            });
        }
    }
    c.add("more than a tile holds", move |g| {
        let x = g.float("x", TILES, domain(f))?;
        g.graph.unary(f, x)
    });
    c.add("twice", move |g| {
        // Two uses of one value: their gradients are added.
        let x = g.float("x", &[4, 6], domain(f))?;
        let y = g.graph.unary(f, x)?;
        g.graph.mul(y, x)
    });
}

/// The lesser or the greater of two. Operands are never nearly equal: there is a kink.
pub fn extreme(c: &mut Cases, f: Binary) {
    let (left_fill, right_fill) = (Fill::Steps(0.5, 0.25, 5), Fill::Steps(0.625, 0.25, 5));
    for dims in SHAPES {
        c.add(format!("{dims:?}"), move |g| {
            let (a, b) = (g.float("a", dims, left_fill)?, g.float("b", dims, right_fill)?);
            g.graph.push(Op::Binary(f), &[a, b], "y")
        });
    }
    c.add("more than a tile holds", move |g| {
        let (a, b) = (g.float("a", TILES, left_fill)?, g.float("b", TILES, right_fill)?);
        g.graph.push(Op::Binary(f), &[a, b], "y")
    });
    for (left, right) in BROADCASTS {
        c.add(format!("{left:?} with {right:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let (a, b) = (g.float("a", left, left_fill)?, g.float("b", right, right_fill)?);
            g.graph.push(Op::Binary(f), &[a, b], "y")
        });
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let a = g.viewed("a", &[4, 6], view, left_fill)?;
            let b = g.viewed("b", &[4, 6], view, right_fill)?;
            g.cotangent_viewed(&[4, 6], view)?;
            g.graph.push(Op::Binary(f), &[a, b], "y")
        });
    }
}

/// Bounds of every kind, and values on both sides of each, none near it.
const BOUNDS: [(f32, f32); 6] = [
    (-1.0, 1.0),
    (0.0, f32::INFINITY),
    (f32::NEG_INFINITY, 0.5),
    (f32::NEG_INFINITY, f32::INFINITY),
    (-0.25, -0.125),
    (1e-3, 1.5),
];
const BESIDE_BOUNDS: Fill = Fill::Steps(-2.93, 0.3, 20);

pub fn clamp(c: &mut Cases) {
    for (min, max) in BOUNDS {
        for dims in SHAPES {
            c.add(format!("{min} to {max} {dims:?}"), move |g| {
                let x = g.float("x", dims, BESIDE_BOUNDS)?;
                g.graph.clamp(x, min, max)
            });
        }
    }
    c.add("more than a tile holds", |g| {
        let x = g.float("x", TILES, BESIDE_BOUNDS)?;
        g.graph.clamp(x, -1.0, 1.0)
    });
    for (source, cotangent) in strides() {
        c.add(format!("{source:?}, cotangent {cotangent:?}"), move |g| {
            sums_of_repeated(g, source);
            let x = g.viewed("x", &[4, 6], source, BESIDE_BOUNDS)?;
            g.cotangent_viewed(&[4, 6], cotangent)?;
            g.graph.clamp(x, -1.0, 1.0)
        });
    }
}

pub fn clamp_back(c: &mut Cases) {
    for (min, max) in BOUNDS {
        for view in [View::Plain, View::Columns, View::Transposed] {
            c.add(format!("{min} to {max} {view:?}"), move |g| {
                let x = g.viewed("x", &[4, 6], view, BESIDE_BOUNDS)?;
                let dy = g.viewed("dy", &[4, 6], view, Fill::Signed)?;
                g.expect_all(g.refused());
                let (min, max) = (min.into(), max.into());
                g.graph.push(Op::ClampBack { min, max }, &[x, dy], "y")
            });
        }
    }
    c.add("more than a tile holds", |g| {
        let x = g.float("x", TILES, BESIDE_BOUNDS)?;
        let dy = g.float("dy", TILES, Fill::Signed)?;
        g.expect_all(g.refused());
        g.graph.push(Op::ClampBack { min: (-1.0).into(), max: 1.0.into() }, &[x, dy], "y")
    });
    c.add("at the bounds, which are outside", |g| {
        let x = g.given("x", &[5], &[-1.0, 1.0, 0.5, -2.0, 0.0])?;
        let dy = g.float("dy", &[5], Fill::Signed)?;
        g.expect_all(g.refused());
        g.graph.push(Op::ClampBack { min: (-1.0).into(), max: 1.0.into() }, &[x, dy], "y")
    });
}

pub fn fill(c: &mut Cases) {
    for value in [0.0, 1.0, -2.5] {
        for dims in SHAPES.into_iter().chain([TILES]) {
            c.add(format!("{value} {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                let constant = g.graph.fill(value, Shape::new(dims)?)?;
                g.graph.sub(x, constant)
            });
        }
    }
}

pub fn affine(c: &mut Cases) {
    for (scale, bias) in [(2.5, 0.0), (-0.125, 3.0), (1.0, -1.5)] {
        for dims in SHAPES {
            c.add(format!("{scale} x + {bias} {dims:?}"), move |g| {
                let x = g.float("x", dims, Fill::Signed)?;
                g.graph.affine(x, scale, bias)
            });
        }
    }
    for (source, cotangent) in strides() {
        c.add(format!("{source:?}, cotangent {cotangent:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], source, Fill::Signed)?;
            g.cotangent_viewed(&[4, 6], cotangent)?;
            g.graph.affine(x, -1.5, 0.25)
        });
    }
    c.add("more than a tile holds, which ends within a row", |g| {
        let x = g.viewed("x", &[60, 150], View::Columns, Fill::Signed)?;
        g.graph.affine(x, -1.5, 0.25)
    });
    c.add("a multiplier of 0", |g| {
        let x = g.float("x", &[3, 4], Fill::Signed)?;
        g.graph.affine(x, 0.0, 2.0)
    });
}

/// Pairs of shapes that broadcast: either operand, at every place, with and without leading
/// dimensions.
const BROADCASTS: [(&[usize], &[usize]); 14] = [
    (&[4, 6], &[6]),
    (&[6], &[4, 6]),
    (&[4, 6], &[1, 6]),
    (&[4, 6], &[4, 1]),
    (&[4, 1], &[4, 6]),
    (&[4, 6], &[]),
    (&[], &[4, 6]),
    (&[1], &[7]),
    (&[4, 1], &[1, 6]),
    (&[2, 3, 5], &[3, 1]),
    (&[2, 3, 5], &[2, 1, 5]),
    (&[2, 1, 5], &[3, 1]),
    (&[3, 5], &[2, 4, 3, 5]),
    (&[2, 1, 3, 1], &[4, 1, 17]),
];

pub fn binary(c: &mut Cases, f: Binary) {
    for dims in SHAPES.into_iter().chain([TILES]) {
        c.add(format!("{dims:?}"), move |g| {
            let (a, b) = (g.float("a", dims, Fill::Signed)?, g.float("b", dims, Fill::Signed)?);
            g.graph.push(Op::Binary(f), &[a, b], "y")
        });
    }
    for (left, right) in BROADCASTS {
        c.add(format!("{left:?} with {right:?}"), move |g| {
            // Positive: gradients are sums, which must not cancel.
            g.cotangents(Fill::POSITIVE);
            let a = g.float("a", left, Fill::POSITIVE)?;
            let b = g.float("b", right, Fill::POSITIVE)?;
            g.graph.push(Op::Binary(f), &[a, b], "y")
        });
    }
    for dims in STRIDED_SHAPES {
        for view in View::STRIDED {
            for (a_view, b_view, cotangent) in [
                (view, View::Plain, View::Plain),
                (View::Plain, view, View::Plain),
                (View::Plain, View::Plain, view),
                (view, view, view),
            ] {
                let name = format!("{dims:?} {a_view:?} with {b_view:?}, cotangent {cotangent:?}");
                c.add(name, move |g| {
                    g.cotangents(Fill::POSITIVE);
                    let a = g.viewed("a", dims, a_view, Fill::POSITIVE)?;
                    let b = g.viewed("b", dims, b_view, Fill::POSITIVE)?;
                    g.cotangent_viewed(dims, cotangent)?;
                    g.graph.push(Op::Binary(f), &[a, b], "y")
                });
            }
        }
    }
    // `x - x` and `x / x` are constant: nothing could be compared but rounding.
    if matches!(f, Binary::Add | Binary::Mul) {
        c.add("with itself", move |g| {
            let x = g.float("x", &[4, 6], Fill::Signed)?;
            g.graph.push(Op::Binary(f), &[x, x], "y")
        });
    }
}

/// The gated unit of gpt-oss, with the limit it has there.
pub const OAI: GluKind = oai(7.0);

const fn oai(limit: f32) -> GluKind {
    GluKind::SwigluOai { alpha: Real::new(1.702), limit: Real::new(limit) }
}

/// Where a gate is checked.
fn gate_domain(kind: GluKind) -> Fill {
    domain(match kind {
        GluKind::Swiglu => Unary::Silu,
        GluKind::Geglu => Unary::Gelu,
        GluKind::GegluErf => Unary::GeluErf,
        GluKind::GegluQuick | GluKind::SwigluOai { .. } => Unary::GeluQuick,
        GluKind::Reglu => Unary::Relu,
    })
}

pub fn glu(c: &mut Cases, kind: GluKind) {
    for dims in [&[1, 1][..], &[1, 8], &[3, 5], &[4, 32], &[2, 3, 17], &[64], TILES] {
        c.add(format!("{dims:?}"), move |g| {
            let gate = g.float("gate", dims, gate_domain(kind))?;
            let up = g.float("up", dims, Fill::Signed)?;
            g.graph.push(Op::Glu(kind), &[gate, up], "y")
        });
    }
    for width in [1, 2, 3, 9, 17, 66] {
        for swapped in [false, true] {
            // Of an odd width the last element is unused: its gradient is zero, and written.
            c.add(format!("fused, {width} wide, swapped {swapped}"), move |g| {
                let both = g.float("gate and up", &[36, width], gate_domain(kind))?;
                match width {
                    1 => {
                        let rest = g.float("rest", &[36, 1], Fill::Signed)?;
                        let both = g.graph.concat(&[both, rest], 1)?;
                        g.graph.glu_fused(both, kind, swapped, "y")
                    }
                    _ => g.graph.glu_fused(both, kind, swapped, "y"),
                }
            });
        }
    }
    if let GluKind::SwigluOai { .. } = kind {
        for limit in [1.5, f32::INFINITY] {
            c.add(format!("limit {limit}"), move |g| {
                // On both sides of every bound, none near it.
                let gate = [-2.9, -1.4, -0.3, 0.2, 0.9, 1.3, 1.7, 2.6];
                let up = [-2.2, 1.2, -1.7, 1.8, 0.4, -1.3, 0.8, 1.4];
                let gate = g.given("gate", &[2, 4], &gate)?;
                let up = g.given("up", &[2, 4], &up)?;
                g.graph.push(Op::Glu(oai(limit)), &[gate, up], "y")
            });
        }
    }
    for width in [6, 33] {
        c.add(format!("halves of one tensor of {}", 2 * width), move |g| {
            let both = g.float("gate and up", &[3, 2 * width], gate_domain(kind))?;
            let gate = g.graph.slice(both, 1, 0, width)?;
            let up = g.graph.slice(both, 1, width, width)?;
            g.graph.push(Op::Glu(kind), &[gate, up], "y")
        });
    }
    for view in View::STRIDED {
        for (gate_view, up_view, cotangent) in [
            (view, View::Plain, View::Plain),
            (View::Plain, view, View::Plain),
            (View::Plain, View::Plain, view),
            (view, view, view),
        ] {
            let name = format!("{gate_view:?} with {up_view:?}, cotangent {cotangent:?}");
            c.add(name, move |g| {
                g.cotangents(Fill::POSITIVE);
                let gate = g.viewed("gate", &[4, 6], gate_view, gate_domain(kind))?;
                let up = g.viewed("up", &[4, 6], up_view, Fill::POSITIVE)?;
                g.cotangent_viewed(&[4, 6], cotangent)?;
                g.graph.push(Op::Glu(kind), &[gate, up], "y")
            });
        }
    }
}

pub fn glu_back(c: &mut Cases, kind: GluKind) {
    for wrt in [GluOperand::Gate, GluOperand::Up] {
        if let GluKind::SwigluOai { .. } = kind {
            c.add(format!("{wrt:?} at its bounds, which are outside"), move |g| {
                let gate = g.given("gate", &[5], &[1.5, 1.75, 1.0, -1.5, 0.5])?;
                let up = g.given("up", &[5], &[0.5, 1.0, 1.5, -1.5, -2.0])?;
                let dy = g.float("dy", &[5], Fill::Signed)?;
                g.expect_all(g.refused());
                g.graph.push(Op::GluBack { kind: oai(1.5), wrt }, &[gate, up, dy], "y")
            });
        }
        for dims in [&[1, 8][..], &[3, 5], &[2, 3, 17], TILES] {
            c.add(format!("{wrt:?} {dims:?}"), move |g| {
                let gate = g.float("gate", dims, gate_domain(kind))?;
                let up = g.float("up", dims, Fill::Signed)?;
                let dy = g.float("dy", dims, Fill::Signed)?;
                let refused = g.refused();
                g.expect_all(refused);
                g.graph.push(Op::GluBack { kind, wrt }, &[gate, up, dy], "y")
            });
        }
        for view in View::STRIDED {
            c.add(format!("{wrt:?} {view:?}"), move |g| {
                let gate = g.viewed("gate", &[4, 6], view, gate_domain(kind))?;
                let up = g.viewed("up", &[4, 6], view, Fill::Signed)?;
                let dy = g.viewed("dy", &[4, 6], view, Fill::Signed)?;
                g.expect_all(Expected::Nothing);
                let dx = g.refused();
                if let Some(leaf) = g.graph.find_leaf("dy") {
                    g.expect(leaf, dx);
                }
                g.graph.push(Op::GluBack { kind, wrt }, &[gate, up, dy], "y")
            });
        }
    }
}
