//! Rows by index.

use std::cmp::Ordering;

use graph::{Order, Shape};

use super::{Operands, Out};
use crate::Value;

pub(super) fn gather(operands: Operands<'_>, shape: Shape) -> Out {
    let (table, ids) = (operands.floats(0)?, operands.ints(1)?);
    let mut out = operands.zeros(shape)?;
    let cols = shape.cols();
    let rows = table.dim(table.shape.rank() - 2);
    for (t, &id) in ids.data.iter().enumerate() {
        // With leading dimensions, ids of each last dimension have a table of their own.
        let own = if table.shape.rank() > 2 { t / ids.shape.cols() } else { 0 };
        let row = own * rows + operands.index(id, rows, "row id")?;
        out[t * cols..(t + 1) * cols].copy_from_slice(table.row(row));
    }
    operands.made(shape, out)
}

pub(super) fn scatter_add(operands: Operands<'_>, shape: Shape) -> Out {
    let (ids, x) = (operands.ints(0)?, operands.floats(1)?);
    let mut out = operands.zeros(shape)?;
    let cols = shape.cols();
    let rows = shape.dim(shape.rank() - 2);
    for (t, &id) in ids.data.iter().enumerate() {
        let row = t / ids.shape.cols() * rows + operands.index(id, rows, "row id")?;
        for c in 0..cols {
            out[row * cols + c] += x.row(t)[c];
        }
    }
    operands.made(shape, out)
}

pub(super) fn top_k(operands: Operands<'_>, k: usize, order: Order, shape: Shape) -> Out {
    let x = operands.floats(0)?;
    let mut out = Vec::with_capacity(shape.elements());
    for row in 0..x.shape.rows() {
        let row = x.row(row);
        let mut places: Vec<usize> = (0..row.len()).collect();
        // A stable sort: of equals the lowest index stays first.
        places.sort_by(|&a, &b| match (row[a].is_nan(), row[b].is_nan()) {
            (true, true) => Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => {
                let ascending = row[a].partial_cmp(&row[b]).unwrap_or(Ordering::Equal);
                if order == Order::Ascending { ascending } else { ascending.reverse() }
            }
        });
        out.extend(places.iter().take(k).map(|&i| i as i32));
    }
    Value::ints(shape, out).map_err(|e| operands.broken(e.message))
}
