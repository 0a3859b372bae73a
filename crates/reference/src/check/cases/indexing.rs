//! Cases of ops that take rows by index.

use gguf::TensorType;
use graph::{DType, Op};

use crate::check::{CaseGraph, Cases, Fill, View};

/// What ids look like: all different, repeated, the first and the last, one.
const IDS: [&[i32]; 5] = [&[2, 0, 4], &[1, 1, 3, 1], &[0, 4], &[4], &[4, 3, 2, 1, 0, 0, 1, 2]];

pub fn gather(c: &mut Cases) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for ids in IDS {
            for cols in [1, 6, 33] {
                c.add(format!("rows {ids:?} of a {dtype} table [5, {cols}]"), move |g| {
                    let table = g.float_of("table", &[5, cols], dtype, Fill::POSITIVE)?;
                    g.cotangents(Fill::POSITIVE);
                    let ids = g.ints("ids", &[ids.len()], ids)?;
                    g.graph.gather(table, ids, "y")
                });
            }
        }
        c.add(format!("a {dtype} weight"), move |g| {
            let table = g.weight("table", &[5, 12], dtype)?;
            let ids = g.ints("ids", &[4], &[3, 1, 4, 1])?;
            g.graph.gather(table, ids, "y")
        });
    }
    for format in TensorType::ALL.into_iter().filter(|format| format.is_quantized()) {
        for ids in IDS {
            c.add(format!("rows {ids:?} of a {format} table"), move |g| {
                let table = g.weight("table", &[5, 256], DType::Block(format))?;
                let ids = g.ints("ids", &[ids.len()], ids)?;
                g.graph.gather(table, ids, "y")
            });
        }
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let table = g.viewed("table", &[5, 6], view, Fill::POSITIVE)?;
            let ids = g.ints("ids", &[4], &[3, 1, 4, 1])?;
            g.cotangent_viewed(&[4, 6], view)?;
            g.graph.gather(table, ids, "y")
        });
    }
    for id in [-1, 5, i32::MIN, i32::MAX] {
        c.add_outside(format!("id {id} of 5 rows"), move |g| {
            let table = g.float("table", &[5, 6], Fill::Signed)?;
            let ids = g.ints("ids", &[3], &[0, id, 2])?;
            g.graph.gather(table, ids, "y")
        });
        c.add_outside(format!("id {id} of a weight of 5 rows"), move |g| {
            let table = g.weight("table", &[5, 32], DType::Block(TensorType::Q8_0))?;
            let ids = g.ints("ids", &[3], &[0, id, 2])?;
            g.graph.gather(table, ids, "y")
        });
    }
    c.add("ids cut out of more", |g| {
        let table = g.float("table", &[5, 6], Fill::Signed)?;
        let ids = g.ints("ids", &[7], &[0, 3, 2, 4, 1, 0, 0])?;
        let ids = g.graph.slice(ids, 0, 1, 4)?;
        g.graph.gather(table, ids, "y")
    });
}

pub fn scatter_add(c: &mut Cases) {
    let scatter = |g: &mut CaseGraph, rows: usize, ids: &[i32], cols: usize| {
        g.cotangents(Fill::POSITIVE);
        let x = g.float("x", &[ids.len(), cols], Fill::POSITIVE)?;
        let ids = g.ints("ids", &[ids.len()], ids)?;
        g.graph.push(Op::ScatterAdd { rows }, &[ids, x], "y")
    };
    for ids in IDS {
        for rows in [5, 8, 19] {
            for cols in [1, 6, 33] {
                c.add(format!("{ids:?} into [{rows}, {cols}]"), move |g| {
                    scatter(g, rows, ids, cols)
                });
            }
        }
    }
    for id in [-1, 5, i32::MIN, i32::MAX] {
        c.add_outside(format!("id {id} of 5 rows"), move |g| scatter(g, 5, &[0, id, 2], 6));
    }
    for view in View::STRIDED {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, Fill::POSITIVE)?;
            let ids = g.ints("ids", &[4], &[3, 1, 4, 1])?;
            g.cotangent_viewed(&[5, 6], view)?;
            g.graph.push(Op::ScatterAdd { rows: 5 }, &[ids, x], "y")
        });
    }
}
