//! Rows by index.

use graph::Shape;

use super::{Operands, Out};

pub(super) fn gather(operands: Operands<'_>, shape: Shape) -> Out {
    let (table, ids) = (operands.floats(0)?, operands.ints(1)?);
    let mut out = operands.zeros(shape)?;
    let cols = shape.cols();
    for (t, &id) in ids.data.iter().enumerate() {
        let row = operands.index(id, table.dim(0), "row id")?;
        out[t * cols..(t + 1) * cols].copy_from_slice(table.row(row));
    }
    operands.made(shape, out)
}

pub(super) fn scatter_add(operands: Operands<'_>, shape: Shape) -> Out {
    let (ids, x) = (operands.ints(0)?, operands.floats(1)?);
    let mut out = operands.zeros(shape)?;
    let cols = shape.cols();
    for (t, &id) in ids.data.iter().enumerate() {
        let row = operands.index(id, shape.dim(0), "row id")?;
        for c in 0..cols {
            out[row * cols + c] += x.row(t)[c];
        }
    }
    operands.made(shape, out)
}
