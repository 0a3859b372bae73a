//! Cases of leaves, reductions and ops that move elements.

use graph::{Code, DType, Op, Shape};

use super::TILES;
use crate::check::{Cases, Expected, Fill, View};

pub fn leaf(c: &mut Cases) {
    for dims in [&[][..], &[7], &[3, 5], &[2, 3, 4]] {
        c.add(format!("{dims:?}"), move |g| g.float("x", dims, Fill::Signed));
    }
    c.add("nothing depends on it", |g| {
        let x = g.float("x", &[3, 5], Fill::Signed)?;
        let y = g.float("y", &[3, 5], Fill::Signed)?;
        g.expect(y, Expected::Refusal { code: Code::NoGradientPath, op: "Leaf" });
        Ok(x)
    });
    c.add("one of two that are used", |g| {
        let x = g.float("x", &[3, 5], Fill::Signed)?;
        let y = g.float("y", &[3, 5], Fill::Signed)?;
        g.expect(y, Expected::Nothing);
        g.graph.mul(x, y)
    });
}

pub fn sum(c: &mut Cases) {
    let sets: [(&[usize], &[&[usize]]); 5] = [
        (&[], &[&[]]),
        (&[9], &[&[], &[0]]),
        (&[4, 6], &[&[], &[0], &[1], &[0, 1]]),
        (&[2, 3, 5], &[&[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]]),
        (&[3, 2, 4, 6], &[&[1], &[2], &[0, 2], &[1, 3], &[0, 3]]),
    ];
    for (dims, sets) in sets {
        for &set in sets {
            c.add(format!("{dims:?} over {set:?}"), move |g| {
                let x = g.float("x", dims, Fill::POSITIVE)?;
                g.graph.sum(x, set)
            });
        }
    }
    for (dims, set) in [(&[1, 64][..], &[1][..]), (&[65, 3], &[0]), (&[3, 1, 300], &[2])] {
        c.add(format!("{dims:?} over {set:?}"), move |g| {
            let x = g.float("x", dims, Fill::POSITIVE)?;
            g.graph.sum(x, set)
        });
    }
    for view in View::STRIDED {
        for set in [&[0][..], &[1], &[0, 1]] {
            c.add(format!("{view:?} over {set:?}"), move |g| {
                let x = g.viewed("x", &[4, 6], view, Fill::POSITIVE)?;
                g.graph.sum(x, set)
            });
        }
    }
    for set in [&[0][..], &[1], &[0, 1], &[]] {
        c.add(format!("a mean over {set:?}"), move |g| {
            let x = g.float("x", &[4, 6], Fill::POSITIVE)?;
            g.graph.mean(x, set)
        });
    }
    c.add("of a square", |g| {
        let x = g.float("x", &[4, 6], Fill::POSITIVE)?;
        let y = g.graph.mul(x, x)?;
        g.graph.sum(y, &[1])
    });
}

pub fn cum_sum(c: &mut Cases) {
    for dims in [&[9][..], &[4, 6], &[1, 40], &[33, 3], &[2, 3, 5], &[2, 3, 4, 20], TILES] {
        for dim in 0..dims.len() {
            for reverse in [false, true] {
                c.add(format!("{dims:?} along {dim}, reverse {reverse}"), move |g| {
                    g.cotangents(Fill::POSITIVE);
                    let x = g.float("x", dims, Fill::POSITIVE)?;
                    g.graph.push(Op::CumSum { dim: dim as u8, reverse }, &[x], "y")
                });
            }
        }
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let x = g.viewed("x", &[4, 6], view, Fill::POSITIVE)?;
            g.cotangent_viewed(&[4, 6], view)?;
            g.graph.cum_sum(x, 1)
        });
    }
}

pub fn broadcast(c: &mut Cases) {
    let pairs: [(&[usize], &[usize]); 7] = [
        (&[], &[4, 6]),
        (&[6], &[4, 6]),
        (&[1, 6], &[4, 6]),
        (&[4, 1], &[4, 6]),
        (&[2, 1, 5], &[2, 3, 5]),
        (&[3, 1], &[2, 3, 5]),
        (&[1, 3, 1], &[4, 2, 3, 7]),
    ];
    for (from, to) in pairs {
        c.add(format!("{from:?} to {to:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let x = g.float("x", from, Fill::POSITIVE)?;
            g.graph.broadcast(x, Shape::new(to)?)
        });
        c.add(format!("{from:?} to {to:?}, then squared"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let x = g.float("x", from, Fill::POSITIVE)?;
            let x = g.graph.broadcast(x, Shape::new(to)?)?;
            g.graph.mul(x, x)
        });
    }
    for view in [View::Columns, View::Rows, View::Transposed, View::TransposedColumns] {
        c.add(format!("{view:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let x = g.viewed("x", &[3, 5], view, Fill::POSITIVE)?;
            g.cotangent_viewed(&[4, 3, 5], view)?;
            g.graph.broadcast(x, Shape::new(&[4, 3, 5])?)
        });
    }
}

pub fn reshape(c: &mut Cases) {
    let pairs: [(&[usize], &[usize]); 7] = [
        (&[4, 6], &[24]),
        (&[24], &[4, 6]),
        (&[4, 6], &[2, 2, 6]),
        (&[4, 6], &[4, 3, 2]),
        (&[4, 6], &[6, 4]),
        (&[2, 3, 4], &[6, 4]),
        (&[1], &[]),
    ];
    for (from, to) in pairs {
        c.add(format!("{from:?} to {to:?}"), move |g| {
            let x = g.float("x", from, Fill::Signed)?;
            g.graph.reshape(x, to)
        });
    }
    for view in View::STRIDED {
        for to in [&[2, 2, 6][..], &[4, 2, 3], &[24]] {
            c.add(format!("{view:?} [4, 6] to {to:?}"), move |g| {
                let x = g.viewed("x", &[4, 6], view, Fill::Signed)?;
                let x = g.graph.reshape(x, to)?;
                g.cotangent_viewed(to, view)?;
                g.graph.affine(x, 2.0, 0.0)
            });
        }
    }
}

pub fn permute(c: &mut Cases) {
    let three: [&[u8]; 6] =
        [&[0, 1, 2], &[0, 2, 1], &[1, 0, 2], &[1, 2, 0], &[2, 0, 1], &[2, 1, 0]];
    for perm in three {
        c.add(format!("{perm:?}"), move |g| {
            let x = g.float("x", &[2, 3, 5], Fill::Signed)?;
            g.graph.permute(x, perm)
        });
        c.add(format!("{perm:?}, then squared"), move |g| {
            let x = g.float("x", &[2, 3, 5], Fill::Signed)?;
            let x = g.graph.permute(x, perm)?;
            g.graph.mul(x, x)
        });
    }
    for (dims, perm) in [
        (&[4, 6][..], &[1, 0][..]),
        (&[2, 3, 4, 5], &[0, 2, 1, 3]),
        (&[2, 3, 4, 5], &[3, 1, 0, 2]),
        (&[2, 1, 3, 1, 2], &[4, 3, 0, 1, 2]),
    ] {
        c.add(format!("{dims:?} by {perm:?}"), move |g| {
            let x = g.float("x", dims, Fill::Signed)?;
            g.graph.permute(x, perm)
        });
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, Fill::Signed)?;
            g.cotangent_viewed(&[6, 4], view)?;
            let x = g.graph.permute(x, &[1, 0])?;
            g.graph.affine(x, 2.0, 0.0)
        });
    }
}

pub fn slice(c: &mut Cases) {
    for dims in [&[9][..], &[4, 6], &[5, 4, 6]] {
        for dim in 0..dims.len() {
            let size = dims[dim];
            for (start, len) in [(0, 2), (1, 2), (size - 2, 2), (0, size), (2, 1)] {
                c.add(format!("{start}..{} of {dim} of {dims:?}", start + len), move |g| {
                    let x = g.float("x", dims, Fill::Signed)?;
                    g.graph.slice(x, dim, start, len)
                });
            }
        }
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, Fill::Signed)?;
            g.cotangent_viewed(&[2, 6], view)?;
            let x = g.graph.slice(x, 0, 1, 2)?;
            g.graph.affine(x, 2.0, 0.0)
        });
    }
    c.add("two that overlap", |g| {
        let x = g.float("x", &[4, 6], Fill::Signed)?;
        let a = g.graph.slice(x, 1, 0, 4)?;
        let b = g.graph.slice(x, 1, 2, 4)?;
        g.graph.mul(a, b)
    });
}

pub fn pad(c: &mut Cases) {
    for dims in [&[7][..], &[4, 6], &[2, 3, 5]] {
        for dim in 0..dims.len() {
            for (before, after) in [(0, 2), (3, 0), (2, 1), (0, 0)] {
                c.add(format!("{before} and {after} at {dim} of {dims:?}"), move |g| {
                    let x = g.float("x", dims, Fill::Signed)?;
                    let op = Op::Pad { dim: dim as u8, before, after };
                    g.graph.push(op, &[x], "y")
                });
            }
        }
    }
    // More than a tile holds: one ends in what is padded, one in the padding.
    for (dim, before, after) in [(1, 2, 1), (0, 0, 2)] {
        c.add(format!("{before} and {after} at {dim} of much"), move |g| {
            let x = g.float("x", &[[2, 3000], [3, 3000]][usize::from(dim)], Fill::Signed)?;
            g.graph.push(Op::Pad { dim, before, after }, &[x], "y")
        });
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, Fill::Signed)?;
            g.cotangent_viewed(&[7, 6], view)?;
            g.graph.push(Op::Pad { dim: 0, before: 2, after: 1 }, &[x], "y")
        });
    }
}

pub fn concat(c: &mut Cases) {
    for dims in [&[5][..], &[4, 6], &[2, 3, 5]] {
        for dim in 0..dims.len() {
            for sizes in [&[1, 2][..], &[3, 1, 2]] {
                c.add(format!("{sizes:?} at {dim} of {dims:?}"), move |g| {
                    let mut parts = Vec::new();
                    for (i, &size) in sizes.iter().enumerate() {
                        let mut dims = dims.to_vec();
                        dims[dim] = size;
                        parts.push(g.float(&format!("x{i}"), &dims, Fill::Signed)?);
                    }
                    g.graph.concat(&parts, dim)
                });
            }
        }
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let a = g.viewed("a", &[4, 6], view, Fill::Signed)?;
            let b = g.viewed("b", &[4, 6], view, Fill::Signed)?;
            g.cotangent_viewed(&[4, 12], view)?;
            g.graph.concat(&[a, b], 1)
        });
    }
    c.add("with itself", |g| {
        let x = g.float("x", &[4, 6], Fill::Signed)?;
        g.graph.concat(&[x, x], 0)
    });
    c.add("more than a tile holds, which ends in the second", |g| {
        let a = g.float("a", &[4, 1500], Fill::Signed)?;
        let b = g.float("b", &[4, 1600], Fill::Signed)?;
        g.graph.concat(&[a, b], 1)
    });
}

pub fn copy(c: &mut Cases) {
    for dims in [&[7][..], &[4, 6], &[2, 3, 5]] {
        for view in View::STRIDED {
            c.add(format!("{view:?} {dims:?}"), move |g| {
                let x = g.viewed("x", dims, view, Fill::Signed)?;
                g.cotangent_viewed(dims, view)?;
                g.graph.push(Op::Copy, &[x], "y")
            });
        }
    }
    // More than a tile holds, which ends within a row.
    for view in [View::Columns, View::TransposedColumns] {
        c.add(format!("{view:?} of much"), move |g| {
            let x = g.viewed("x", &[60, 150], view, Fill::Signed)?;
            g.graph.push(Op::Copy, &[x], "y")
        });
    }
    for dtype in [DType::F16, DType::BF16] {
        c.add(format!("{dtype} by columns"), move |g| {
            let x = g.float_of("x", &[4, 6], dtype, Fill::Signed)?;
            let x = g.graph.permute(x, &[1, 0])?;
            let y = g.graph.push(Op::Copy, &[x], "copy")?;
            g.graph.cast(y, DType::F32)
        });
    }
}
