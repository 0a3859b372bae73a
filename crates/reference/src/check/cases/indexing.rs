//! Cases of ops that take rows by index.

use gguf::TensorType;
use graph::{DType, Op, Order};

use super::TILES;
use crate::check::{CaseGraph, Cases, Expected, Fill, Made, View};

/// What ids look like: all different, repeated, the first and the last, one.
const IDS: [&[i32]; 5] = [&[2, 0, 4], &[1, 1, 3, 1], &[0, 4], &[4], &[4, 3, 2, 1, 0, 0, 1, 2]];

pub fn gather(c: &mut Cases) {
    c.add("more rows than a tile holds", |g| {
        g.cotangents(Fill::POSITIVE);
        let table = g.float("table", &[9, 150], Fill::POSITIVE)?;
        let ids = some_ids(g, &[60], 9)?;
        g.graph.gather(table, ids, "y")
    });
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
        for (dim, of) in [(0, "rows"), (1, "columns")] {
            c.add(format!("a {dtype} table of some {of} of another"), move |g| {
                g.cotangents(Fill::POSITIVE);
                let table = g.float_of("table", &[8, 9], dtype, Fill::POSITIVE)?;
                let table = g.graph.slice(table, dim, 2, 5)?;
                let ids = g.ints("ids", &[4], &[3, 1, 4, 1])?;
                g.graph.gather(table, ids, "y")
            });
        }
        c.add(format!("a {dtype} table with its columns as rows"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let table = g.float_of("table", &[6, 5], dtype, Fill::POSITIVE)?;
            let table = g.graph.permute(table, &[1, 0])?;
            let ids = g.ints("ids", &[4], &[3, 1, 4, 1])?;
            g.graph.gather(table, ids, "y")
        });
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
    // One table and ids of more dimensions.
    for dims in [&[2, 3][..], &[3, 1], &[1, 5], &[2, 2, 2], &[3, 1, 2]] {
        for cols in [1, 6, 17] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                c.add(format!("ids {dims:?} of one {dtype} table [5, {cols}]"), move |g| {
                    g.cotangents(Fill::POSITIVE);
                    let table = g.float_of("table", &[5, cols], dtype, Fill::POSITIVE)?;
                    let ids = some_ids(g, dims, 5)?;
                    g.graph.gather(table, ids, "y")
                });
            }
        }
    }
    // A table for every leading index: tables of 3 to 5 dimensions, ids of 2 to 4.
    for (table, ids) in BATCHED {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            c.add(format!("ids {ids:?} of {dtype} tables {table:?}"), move |g| {
                g.cotangents(Fill::POSITIVE);
                let rows = table[table.len() - 2] as i32;
                let table = g.float_of("table", table, dtype, Fill::POSITIVE)?;
                let ids = some_ids(g, ids, rows)?;
                g.graph.gather(table, ids, "y")
            });
        }
    }
    for id in [-1, 4] {
        c.add_outside(format!("id {id} of tables of 4 rows"), move |g| {
            let table = g.float("table", &[2, 4, 3], Fill::Signed)?;
            let ids = g.ints("ids", &[2, 2], &[0, 3, id, 2])?;
            g.graph.gather(table, ids, "y")
        });
    }
    for view in [View::Columns, View::Rows, View::Transposed, View::Repeated] {
        c.add(format!("tables, {view:?}"), move |g| {
            g.cotangents(Fill::POSITIVE);
            let table = g.viewed("table", &[2, 4, 3], view, Fill::POSITIVE)?;
            let ids = g.ints("ids", &[2, 3], &[0, 3, 1, 2, 2, 0])?;
            g.cotangent_viewed(&[2, 3, 3], view)?;
            g.graph.gather(table, ids, "y")
        });
    }
    for (rows, n, k) in [(1, 5, 2), (3, 8, 3), (4, 6, 6), (2, 33, 1)] {
        c.add(format!("{k} elements of each of {rows} rows of {n}"), move |g| {
            let x = g.float("x", &[rows, n], Fill::Signed)?;
            let at = some_ids(g, &[rows, k], n as i32)?;
            g.graph.take(x, at, "y")
        });
    }
    c.add("ids cut out of more", |g| {
        let table = g.float("table", &[5, 6], Fill::Signed)?;
        let ids = g.ints("ids", &[7], &[0, 3, 2, 4, 1, 0, 0])?;
        let ids = g.graph.slice(ids, 0, 1, 4)?;
        g.graph.gather(table, ids, "y")
    });
}

/// Tables, and ids that fit them.
const BATCHED: [(&[usize], &[usize]); 7] = [
    (&[2, 4, 3], &[2, 5]),
    (&[3, 2, 17], &[3, 1]),
    (&[1, 6, 1], &[1, 4]),
    (&[2, 3, 4, 5], &[2, 3, 2]),
    (&[2, 1, 5, 16], &[2, 1, 3]),
    (&[1, 2, 3, 1], &[1, 2, 7]),
    (&[2, 1, 2, 4, 3], &[2, 1, 2, 3]),
];

/// Ids below `rows`, all over the place, some of them more than once.
fn some_ids(g: &mut CaseGraph, dims: &[usize], rows: i32) -> Made {
    let count: usize = dims.iter().product();
    let ids: Vec<i32> = (0..count as i32).map(|i| (i * i * 3 + i + 1) % rows).collect();
    g.ints("ids", dims, &ids)
}

/// No difference changes the order of elements.
const APART: Fill = Fill::Apart(0.1);

pub fn top_k(c: &mut Cases) {
    c.add("more rows than a tile holds", |g| {
        let x = g.float("x", TILES, APART)?;
        let at = g.graph.top_k(x, 40, "places")?;
        g.graph.take(x, at, "y")
    });
    for dims in [&[7][..], &[1, 5], &[3, 8], &[2, 3, 33], &[4, 128]] {
        let n = dims[dims.len() - 1];
        for k in [1, 2, n] {
            for order in [Order::Ascending, Order::Descending] {
                c.add(format!("the values of {k} of {dims:?}, {order:?}"), move |g| {
                    let x = g.float("x", dims, APART)?;
                    let at = g.graph.push(Op::TopK { k, order }, &[x], "places")?;
                    g.graph.take(x, at, "y")
                });
            }
        }
        c.add(format!("the maximum of {dims:?}"), move |g| {
            let x = g.float("x", dims, APART)?;
            g.graph.row_max(x, "y")
        });
    }
    // Enough of enough for those in front to be in no order before they are sorted.
    for order in [Order::Ascending, Order::Descending] {
        c.add(format!("the values of 61 of [4, 128], {order:?}"), move |g| {
            let x = g.float("x", &[4, 128], APART)?;
            let at = g.graph.push(Op::TopK { k: 61, order }, &[x], "places")?;
            g.graph.take(x, at, "y")
        });
    }
    for view in View::STRIDED.into_iter().filter(|v| *v != View::RepeatedColumns) {
        c.add(format!("{view:?}"), move |g| {
            let x = g.viewed("x", &[4, 6], view, APART)?;
            let at = g.graph.top_k(x, 2, "places")?;
            g.graph.take(x, at, "y")
        });
    }
    c.add("of equals the first, NaN last", |g| {
        let x = [1.0, 2.0, 2.0, f32::NAN, 0.0, -0.0, 1.0, f32::INFINITY];
        let x = g.given("x", &[1, 8], &x)?;
        g.expect(x, Expected::Nothing);
        let values = g.float("values", &[1, 8], Fill::Signed)?;
        let at = g.graph.top_k(x, 8, "places")?;
        g.graph.take(values, at, "y")
    });
    c.add("only its places are used", |g| {
        let x = g.float("x", &[3, 5], APART)?;
        let table = g.float("table", &[5, 4], Fill::Signed)?;
        let refused = g.refused();
        g.expect(x, refused);
        let at = g.graph.top_k(x, 2, "places")?;
        g.graph.gather(table, at, "y")
    });
}

pub fn scatter_add(c: &mut Cases) {
    let scatter = |g: &mut CaseGraph, rows: usize, ids: &[i32], cols: usize| {
        g.cotangents(Fill::POSITIVE);
        let x = g.float("x", &[ids.len(), cols], Fill::POSITIVE)?;
        let ids = g.ints("ids", &[ids.len()], ids)?;
        g.graph.push(Op::ScatterAdd { rows }, &[ids, x], "y")
    };
    c.add("more rows than a tile holds", move |g| {
        scatter(g, 60, &[59, 3, 55, 3, 0, 54, 53, 59], 150)
    });
    for ids in IDS {
        for rows in [5, 8, 19] {
            for cols in [1, 6, 33] {
                c.add(format!("{ids:?} into [{rows}, {cols}]"), move |g| {
                    scatter(g, rows, ids, cols)
                });
            }
        }
    }
    for (table, ids) in BATCHED {
        for more in [0, 3] {
            c.add(format!("ids {ids:?} into tables {table:?} and {more} rows"), move |g| {
                g.cotangents(Fill::POSITIVE);
                let rows = table[table.len() - 2];
                let mut dims = ids.to_vec();
                dims.push(table[table.len() - 1]);
                let x = g.float("x", &dims, Fill::POSITIVE)?;
                let ids = some_ids(g, ids, rows as i32)?;
                g.graph.push(Op::ScatterAdd { rows: rows + more }, &[ids, x], "y")
            });
        }
    }
    c.add_outside("id 4 of tables of 4 rows", |g| {
        let x = g.float("x", &[2, 2, 3], Fill::Signed)?;
        let ids = g.ints("ids", &[2, 2], &[0, 3, 4, 2])?;
        g.graph.push(Op::ScatterAdd { rows: 4 }, &[ids, x], "y")
    });
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
