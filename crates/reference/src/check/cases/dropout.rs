//! Cases of the op that draws numbers.

use graph::{Dropout, Op};

use super::TILES;
use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// The two numbers of each of so many rows: some small, one with the highest bit.
fn rows(g: &mut CaseGraph, count: usize) -> Made {
    let number = |i: usize| match i {
        3 => i32::MIN,
        5 => -7,
        i => (i * i) as i32,
    };
    let all: Vec<i32> = (0..count).flat_map(|i| [number(i), 3 * i as i32]).collect();
    g.ints("rows", &[count, 2], &all)
}

fn dropped(g: &mut CaseGraph, x: graph::NodeId, p: f32, site: u32) -> Made {
    let count = g.graph.node(x).shape.dim(0);
    let rows = rows(g, count)?;
    let key = g.ints("key", &[2], &[-1_234_567, 89])?;
    g.graph.push(Op::Dropout(Dropout { p: p.into(), site }), &[x, rows, key], "y")
}

pub fn dropout(c: &mut Cases) {
    // One vector of a row: less than a group of 64 columns, one, some and a rest.
    for cols in [1, 15, 16, 17, 40, 64, 65, 130, 200] {
        for (p, site) in [(0.4, 0), (0.1, 7), (if cols == 1 { 0.3 } else { 0.8 }, u32::MAX)] {
            c.add(format!("p {p} of [6, {cols}], site {site}"), move |g| {
                let x = g.float("x", &[6, cols], Fill::Signed)?;
                dropped(g, x, p, site)
            });
        }
    }
    c.add("more rows than a tile holds", |g| {
        let x = g.float("x", TILES, Fill::Signed)?;
        dropped(g, x, 0.4, 3)
    });
    for p in [0.0, 1e-7, 0.95] {
        c.add(format!("p {p}"), move |g| {
            let x = g.float("x", &[12, 70], Fill::Signed)?;
            dropped(g, x, p, 1)
        });
    }
    // Several vectors of a row: what the experts it chose read.
    for dims in [&[4, 1, 33][..], &[4, 3, 70], &[2, 2, 3, 20], &[3, 1, 1]] {
        c.add(format!("vectors {dims:?}"), move |g| {
            let x = g.float("x", dims, Fill::Signed)?;
            dropped(g, x, 0.3, 2)
        });
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[5, 37], view, Fill::Signed)?;
            g.cotangent_viewed(&[5, 37], view)?;
            dropped(g, x, 0.4, 3)
        });
    }
    c.add("rows cut out of more", |g| {
        let x = g.float("x", &[3, 50], Fill::Signed)?;
        let all = rows(g, 8)?;
        let some = g.graph.slice(all, 0, 4, 3)?;
        let key = g.ints("key", &[2], &[5, 6])?;
        g.graph.push(Op::Dropout(Dropout { p: 0.5.into(), site: 4 }), &[x, some, key], "y")
    });
    c.add("before an adapter", |g| {
        let x = g.float("x", &[6, 40], Fill::Signed)?;
        let base = g.float("base", &[6, 20], Fill::Signed)?;
        let kept = dropped(g, x, 0.25, 9)?;
        let slots = g.ints("slots", &[6], &[0, 0, -1, 0, 0, -1])?;
        g.expect(slots, Expected::Nothing);
        let a = g.float("a", &[3, 40], Fill::Signed)?;
        let b = g.float("b", &[20, 3], Fill::Signed)?;
        let scale = g.given("scale", &[1], &[1.5])?;
        g.expect(scale, Expected::Nothing);
        g.graph.push(Op::Lora { slots: 1 }, &[kept, base, slots, a, b, scale], "z")
    });
}
