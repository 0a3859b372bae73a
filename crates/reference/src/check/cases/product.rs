//! Cases of matrix products and adapters.

use gguf::TensorType;
use graph::{DType, LoraOperand, NodeId, Op};

use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// `outer` followed by a matrix, transposed if so flagged.
fn matrix(outer: &[usize], rows: usize, cols: usize, transposed: bool) -> Vec<usize> {
    let mut dims = outer.to_vec();
    dims.extend(if transposed { [cols, rows] } else { [rows, cols] });
    dims
}

pub fn mat_mul(c: &mut Cases) {
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        for (m, k, n) in [(4, 6, 5), (1, 17, 33), (7, 1, 3), (5, 40, 8), (3, 400, 85)] {
            c.add(format!("ta {ta} tb {tb}, {m} x {k} x {n}"), move |g| {
                let a = g.float("a", &matrix(&[], m, k, ta), Fill::Signed)?;
                let b = g.float("b", &matrix(&[], k, n, tb), Fill::Signed)?;
                g.graph.push(Op::MatMul { ta, tb }, &[a, b], "y")
            });
        }
        let outer: [(&[usize], &[usize]); 6] = [
            (&[3], &[3]),
            (&[3], &[]),
            (&[], &[3]),
            (&[3], &[1]),
            (&[2, 1], &[3]),
            (&[2, 3], &[2, 3]),
        ];
        for (left, right) in outer {
            c.add(format!("ta {ta} tb {tb}, batches {left:?} and {right:?}"), move |g| {
                let a = g.float("a", &matrix(left, 4, 5, ta), Fill::Signed)?;
                let b = g.float("b", &matrix(right, 5, 3, tb), Fill::Signed)?;
                g.graph.push(Op::MatMul { ta, tb }, &[a, b], "y")
            });
        }
        for view in View::STRIDED {
            c.add(format!("ta {ta} tb {tb}, {view:?}"), move |g| {
                // Positive: where all terms of a sum are one, it may cancel everywhere.
                g.cotangents(Fill::POSITIVE);
                let a = g.viewed("a", &matrix(&[], 6, 5, ta), view, Fill::POSITIVE)?;
                let b = g.viewed("b", &matrix(&[], 5, 7, tb), view, Fill::POSITIVE)?;
                g.cotangent_viewed(&[6, 7], view)?;
                g.graph.push(Op::MatMul { ta, tb }, &[a, b], "y")
            });
        }
        for dtype in [DType::F16, DType::BF16] {
            c.add(format!("ta {ta} tb {tb}, {dtype}"), move |g| {
                let a = g.float("a", &matrix(&[], 4, 17, ta), Fill::Signed)?;
                let b = g.float_of("b", &matrix(&[], 17, 6, tb), dtype, Fill::Signed)?;
                g.graph.push(Op::MatMul { ta, tb }, &[a, b], "y")
            });
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (rows, outs, cols) in [(1, 8, 32), (5, 24, 64), (3, 33, 96), (9, 7, 40)] {
            c.add(format!("a {dtype} weight [{outs}, {cols}], {rows} rows"), move |g| {
                let x = g.float("x", &[rows, cols], Fill::Signed)?;
                let w = g.weight("w", &[outs, cols], dtype)?;
                g.graph.project(x, w)
            });
        }
        c.add(format!("rows before a {dtype} weight that is not transposed"), move |g| {
            let x = g.float("x", &[5, 24], Fill::Signed)?;
            let w = g.weight("w", &[24, 64], dtype)?;
            g.graph.push(Op::MatMul { ta: false, tb: false }, &[x, w], "y")
        });
    }
    for (rows, cols) in [(1, 1), (3, 40), (2, 128), (60, 300)] {
        let to_product = move |g: &mut CaseGraph, x| {
            let w = g.weight("w", &[cols, 64], DType::Block(TensorType::Q8_0))?;
            let refused = g.refused();
            g.expect_all(refused);
            let x = g.graph.cast(x, DType::Int16Rows)?;
            g.graph.push(Op::MatMul { ta: false, tb: false }, &[x, w], "y")
        };
        c.add(format!("f32 made int16-rows [{rows}, {cols}]"), move |g| {
            let x = g.float("x", &[rows, cols], Fill::Between(-3.0, 3.0))?;
            to_product(g, x)
        });
        if rows > 1 {
            for view in View::STRIDED {
                c.add(format!("f32 made int16-rows [{rows}, {cols}] {view:?}"), move |g| {
                    let x = g.viewed("x", &[rows, cols], view, Fill::Signed)?;
                    to_product(g, x)
                });
            }
        }
    }
    for format in TensorType::ALL.into_iter().filter(|format| format.is_quantized()) {
        let dtype = DType::Block(format);
        for (rows, outs, blocks) in [(1, 24, 1), (4, 12, 2), (7, 33, 1)] {
            c.add(format!("a {format} weight, {rows} x {outs} x {blocks}"), move |g| {
                let x = g.float("x", &[rows, 256 * blocks], Fill::Signed)?;
                let w = g.weight("w", &[outs, 256 * blocks], dtype)?;
                g.graph.project(x, w)
            });
        }
        if format.block_len() == 32 {
            c.add(format!("a {format} weight of 96 columns"), move |g| {
                let x = g.float("x", &[2, 3, 96], Fill::Signed)?;
                let w = g.weight("w", &[20, 96], dtype)?;
                g.graph.project(x, w)
            });
        }
        c.add(format!("rows before a {format} weight"), move |g| {
            let x = g.float("x", &[3, 12], Fill::Signed)?;
            let w = g.weight("w", &[12, 256], dtype)?;
            let refused = g.refused();
            g.expect_all(refused);
            g.graph.push(Op::MatMul { ta: false, tb: false }, &[x, w], "y")
        });
        let narrow = [DType::BF16, DType::Int16Rows].into_iter();
        for (left, (rows, outs, blocks)) in
            narrow.flat_map(|d| [(1, 1, 1), (3, 12, 1), (17, 133, 1), (40, 64, 2)].map(|s| (d, s)))
        {
            c.add(format!("{rows} {left} rows before a {format} weight of {outs}"), move |g| {
                let x = g.float_of("x", &[rows, outs], left, Fill::Signed)?;
                let w = g.weight("w", &[outs, 256 * blocks], dtype)?;
                let refused = g.refused();
                g.expect_all(refused);
                g.graph.push(Op::MatMul { ta: false, tb: false }, &[x, w], "y")
            });
        }
    }
}

/// The operands of [`Op::Lora`].
struct Adapted {
    x: NodeId,
    base: NodeId,
    rows: NodeId,
    /// `A`, `B` and the scale of each slot.
    slots: Vec<[NodeId; 3]>,
}

/// Rows, inputs and outputs.
type Sizes = [usize; 3];

fn adapted(
    g: &mut CaseGraph,
    [t, k, n]: Sizes,
    ranks: &[usize],
    rows: &[i32],
    fill: Fill,
) -> std::result::Result<Adapted, graph::Invalid> {
    let x = g.float("x", &[t, k], fill)?;
    let base = g.float("base", &[t, n], fill)?;
    let rows: Vec<i32> = rows.iter().copied().cycle().take(t).collect();
    let rows = g.ints("rows", &[t], &rows)?;
    let mut slots = Vec::new();
    for (s, &rank) in ranks.iter().enumerate() {
        let a = g.float(&format!("a{s}"), &[rank, k], fill)?;
        let b = g.float(&format!("b{s}"), &[n, rank], fill)?;
        // Neither 1 nor the same: a scale that is dropped or swapped shows.
        let scale = g.given(&format!("scale{s}"), &[1], &[0.75 + 1.5 * s as f32])?;
        let refused = g.refused();
        g.expect(scale, refused);
        slots.push([a, b, scale]);
    }
    Ok(Adapted { x, base, rows, slots })
}

const SMALL: Sizes = [12, 16, 20];

/// Sizes, ranks of the slots, and the slots of rows, over and over.
const ADAPTERS: [(&str, Sizes, &[usize], &[i32]); 10] = [
    ("one slot", SMALL, &[4], &[0]),
    ("rank 1", SMALL, &[1], &[0]),
    ("ragged ranks", SMALL, &[1, 5, 3], &[0, 0, 1, 2, 2, 2, 1, 1, 0, 2, 1, 0]),
    ("rows without adapter", SMALL, &[3, 2], &[-1, 0, 1, -1, 1, 0, 0, -1, -1, 1, 0, -1]),
    ("runs of rows", SMALL, &[8, 2], &[1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, -1]),
    ("a slot without rows", SMALL, &[2, 3, 4], &[0, 0, 2, 2, -1, 2, 0, 0, 2, 0, 2, 2]),
    ("no row has an adapter", SMALL, &[3], &[-1]),
    // More ranks than a vector has, more columns than a pass, more rows of a slot than a block.
    ("many ranks", [9, 75, 70], &[21, 2], &[0, 0, 1]),
    ("many rows", [150, 80, 68], &[6], &[0, 0, 0, -1]),
    ("many outputs", [5, 7, 600], &[5, 3], &[0, 1, 1]),
];

fn with_adapter(g: &mut CaseGraph, sizes: Sizes, ranks: &[usize], rows: &[i32]) -> Made {
    let of = adapted(g, sizes, ranks, rows, Fill::Signed)?;
    let mut args = vec![of.x, of.base, of.rows];
    args.extend(of.slots.iter().flatten());
    g.graph.push(Op::Lora { slots: ranks.len() }, &args, "y")
}

pub fn lora(c: &mut Cases) {
    for (name, sizes, ranks, rows) in ADAPTERS {
        c.add(name, move |g| with_adapter(g, sizes, ranks, rows));
    }
    for slot in [2, i32::MAX] {
        c.add_outside(format!("slot {slot} of 2"), move |g| {
            with_adapter(g, SMALL, &[3, 2], &[0, 0, 0, 0, 0, slot, 0, 0, 0, 0, 0, 0])
        });
    }
    for (view, name) in [(View::Columns, "columns"), (View::Transposed, "transposed")] {
        c.add(format!("x and base in {name}"), move |g| {
            let x = g.viewed("x", &[6, 16], view, Fill::Signed)?;
            let base = g.viewed("base", &[6, 20], view, Fill::Signed)?;
            let rows = g.ints("rows", &[6], &[0, -1, 0, 0, -1, 0])?;
            let a = g.float("a", &[3, 16], Fill::Signed)?;
            let b = g.float("b", &[20, 3], Fill::Signed)?;
            let scale = g.given("scale", &[1], &[-1.25])?;
            g.expect(scale, Expected::Nothing);
            g.cotangent_viewed(&[6, 20], view)?;
            g.graph.push(Op::Lora { slots: 1 }, &[x, base, rows, a, b, scale], "y")
        });
    }
    c.add("after a Q8_0 projection", |g| {
        let x = g.float("x", &[5, 64], Fill::Signed)?;
        let w = g.weight("w", &[24, 64], DType::Block(TensorType::Q8_0))?;
        g.expect(w, Expected::Nothing);
        let base = g.graph.project(x, w)?;
        let rows = g.ints("rows", &[5], &[0, 0, -1, 0, 0])?;
        let a = g.float("a", &[4, 64], Fill::Signed)?;
        let b = g.float("b", &[24, 4], Fill::Signed)?;
        let scale = g.given("scale", &[1], &[0.5])?;
        let refused = g.refused();
        g.expect(scale, refused);
        g.graph.push(Op::Lora { slots: 1 }, &[x, base, rows, a, b, scale], "y")
    });
}

pub fn lora_back(c: &mut Cases) {
    for (name, sizes @ [t, _, n], ranks, rows) in ADAPTERS {
        for wrt in [LoraOperand::X, LoraOperand::A, LoraOperand::B] {
            for slot in 0..if wrt == LoraOperand::X { 1 } else { ranks.len() } {
                c.add(format!("{wrt:?} of slot {slot}, {name}"), move |g| {
                    // Few elements, each a sum of many terms that must not cancel.
                    let of = adapted(g, sizes, ranks, rows, Fill::POSITIVE)?;
                    let dy = g.float("dy", &[t, n], Fill::POSITIVE)?;
                    g.expect_all(Expected::Nothing);
                    let refused = g.refused();
                    if wrt != LoraOperand::A {
                        g.expect(dy, refused);
                    }
                    g.expect(of.rows, refused);
                    let inner = g.float("inner", &[t, ranks[slot]], Fill::POSITIVE)?;
                    g.expect(
                        inner,
                        if wrt == LoraOperand::X { Expected::Nothing } else { refused },
                    );
                    let args = match wrt {
                        LoraOperand::X => {
                            let mut args = vec![dy, of.rows];
                            args.extend(of.slots.iter().flatten());
                            args
                        }
                        LoraOperand::A => vec![of.x, inner, of.rows],
                        LoraOperand::B => vec![inner, dy, of.rows],
                    };
                    g.graph.push(Op::LoraBack { slots: ranks.len(), wrt, slot }, &args, "y")
                });
            }
        }
    }
}
