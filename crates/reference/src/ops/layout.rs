//! Reductions and ops that move elements.

use graph::Shape;

use super::elementwise::broadcast_offset;
use super::{Operands, Out};
use crate::Value;
use crate::value::{indices, offset};

pub(super) fn sum(operands: Operands<'_>, shape: Shape) -> Out {
    let x = operands.floats(0)?;
    let mut out = operands.zeros(shape)?;
    for (element, index) in x.data.iter().zip(indices(x.shape)) {
        // The result has size 1 along every summed dimension.
        out[broadcast_offset(shape, x.shape, &index)] += element;
    }
    operands.made(shape, out)
}

pub(super) fn cum_sum(operands: Operands<'_>, dim: usize, reverse: bool) -> Out {
    let x = operands.floats(0)?;
    let mut out = operands.zeros(x.shape)?;
    for (at, index) in indices(x.shape).enumerate() {
        let range = if reverse { index[dim]..x.dim(dim) } else { 0..index[dim] + 1 };
        for i in range {
            let mut other = index;
            other[dim] = i;
            out[at] += x.data[offset(x.shape, &other)];
        }
    }
    operands.made(x.shape, out)
}

pub(super) fn broadcast(operands: Operands<'_>, shape: Shape) -> Out {
    let x = operands.floats(0)?;
    let mut out = operands.zeros(shape)?;
    for (out, index) in out.iter_mut().zip(indices(shape)) {
        *out = x.data[broadcast_offset(x.shape, shape, &index)];
    }
    operands.made(shape, out)
}

/// The same elements in the same order.
pub(super) fn relabel(operands: Operands<'_>, shape: Shape) -> Out {
    operands.value(0)?.reshaped(shape).map_err(|e| operands.broken(e.message))
}

/// Element `index` of the result is element `source(index)` of the operand, of any dtype.
fn pick(
    operands: Operands<'_>,
    shape: Shape,
    source: impl Fn([usize; graph::MAX_RANK]) -> [usize; graph::MAX_RANK],
) -> Out {
    let x = operands.value(0)?;
    let places = indices(shape).map(|index| offset(x.shape(), &source(index)));
    let made = match (x.as_floats(), x.as_ints()) {
        (Some(x), _) => Value::floats(shape, places.map(|at| x[at]).collect()),
        (_, Some(x)) => Value::ints(shape, places.map(|at| x[at]).collect()),
        (None, None) => return Err(operands.broken("a value has no elements")),
    };
    made.map_err(|e| operands.broken(e.message))
}

pub(super) fn permute(operands: Operands<'_>, perm: &[u8], shape: Shape) -> Out {
    pick(operands, shape, |index| {
        let mut source = [0; graph::MAX_RANK];
        for (i, &p) in perm.iter().enumerate() {
            source[usize::from(p)] = index[i];
        }
        source
    })
}

pub(super) fn slice(operands: Operands<'_>, dim: usize, start: usize, shape: Shape) -> Out {
    pick(operands, shape, |mut index| {
        index[dim] += start;
        index
    })
}

pub(super) fn pad(operands: Operands<'_>, dim: usize, before: usize, shape: Shape) -> Out {
    let x = operands.floats(0)?;
    let mut out = operands.zeros(shape)?;
    for (x, mut index) in x.data.iter().zip(indices(x.shape)) {
        index[dim] += before;
        out[offset(shape, &index)] = *x;
    }
    operands.made(shape, out)
}

pub(super) fn concat(operands: Operands<'_>, dim: usize, shape: Shape) -> Out {
    let mut out = operands.zeros(shape)?;
    let mut start = 0;
    for i in 0..operands.args.len() {
        let x = operands.floats(i)?;
        for (x, mut index) in x.data.iter().zip(indices(x.shape)) {
            index[dim] += start;
            out[offset(shape, &index)] = *x;
        }
        start += x.dim(dim);
    }
    operands.made(shape, out)
}
