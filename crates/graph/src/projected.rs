//! The loss fused with the output projection: `[tokens, vocabulary]` never exists whole.
//!
//! There is no op for it. Rows are taken a few at a time through the head and the loss, and a
//! head is whatever makes logits from rows: a product with a weight of any dtype, with or
//! without adapters. Every op involved works row by row, so the losses are, bit for bit, those
//! of all rows together; a step is as long as one of a matrix product; and each dtype, adapter
//! and device that has a product has this. Logits are transient: [`recompute()`] makes the backward
//! pass compute them again, piece by piece, instead of keeping them.

use crate::*;

/// How [`Graph::projected_cross_entropy`] turns rows into losses.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Projected {
    /// Of the loss; `weighted` follows from whether weights are given.
    pub attrs: CrossEntropyAttrs,
    /// Rows per piece; `None` takes [`Projected::rows_for`].
    pub rows: Option<usize>,
    /// Whether the backward pass computes logits again. Without, they are kept, unless the plan
    /// can differentiate each piece before the next is computed: where no loss' cotangent waits
    /// for another loss.
    pub again: bool,
}

impl Projected {
    /// No scale, no cap, the usual pieces, computed again.
    pub const PLAIN: Projected =
        Projected { attrs: CrossEntropyAttrs::PLAIN, rows: None, again: true };

    /// Rows per piece of a vocabulary: half a million logits, but no fewer rows than make use of
    /// a weight that is read from memory.
    pub fn rows_for(vocabulary: usize) -> usize {
        ((1 << 19) / vocabulary.max(1) / 32).max(1) * 32
    }
}

impl Graph {
    /// The loss of each row of `x [T, K]` against `labels [T]`, times `weights [T]` if given: the
    /// rows go through `head`, which gives logits `[rows, V]`, in pieces.
    ///
    /// The order in which gradients of the head's parameters add up follows from the pieces:
    /// from the last to the first.
    ///
    /// # Errors
    /// `Invalid` when the operands or what `head` gives do not fit.
    pub fn projected_cross_entropy(
        &mut self,
        (x, labels, weights): (NodeId, NodeId, Option<NodeId>),
        vocabulary: usize,
        how: &Projected,
        mut head: impl FnMut(&mut Graph, NodeId) -> std::result::Result<NodeId, Invalid>,
    ) -> std::result::Result<NodeId, Invalid> {
        let shape = self.get(x)?.shape;
        let (name, total) = (self.get(x)?.name.clone(), shape.dim(0));
        for (what, node) in [("labels", Some(labels)), ("weights", weights)] {
            let Some(node) = node else { continue };
            let given = self.get(node)?.shape;
            if shape.rank() != 2 || given.dims() != [total] {
                return Err(Invalid::new(format!(
                    "the loss at node `{name}`: {what} {given} and rows {shape} do not match"
                )));
            }
        }
        let piece = how.rows.unwrap_or_else(|| Projected::rows_for(vocabulary)).max(1);
        let attrs = CrossEntropyAttrs { weighted: weights.is_some(), ..how.attrs };
        let mut losses = Vec::with_capacity(total.div_ceil(piece).max(1));
        let mut start = 0;
        loop {
            let len = piece.min(total - start);
            let part = |g: &mut Graph, all: NodeId| match len == total {
                true => Ok(all),
                false => g.slice(all, 0, start, len),
            };
            let rows = part(self, x)?;
            let before = self.set_transient(how.again || self.is_transient());
            let logits = head(self, rows);
            self.set_transient(before);
            let logits = logits?;
            let given = self.get(logits)?.shape;
            if given.dims() != [len, vocabulary] {
                return Err(Invalid::new(format!(
                    "the loss at node `{name}`: the head gives {given} for {len} rows of a \
                     vocabulary of {vocabulary}"
                )));
            }
            let mut operands = vec![logits, part(self, labels)?];
            if let Some(weights) = weights {
                operands.push(part(self, weights)?);
            }
            losses.push(self.push(Op::CrossEntropy(attrs), &operands, &name)?);
            start += len;
            if start >= total {
                break;
            }
        }
        self.concat(&losses, 0)
    }
}
