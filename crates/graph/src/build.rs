//! One short constructor per op, for people who write graphs.

use crate::*;

type Made = std::result::Result<NodeId, Invalid>;

/// Constructors name their node `name`; where there is no `name`, the first operand's is used.
impl Graph {
    fn named_after(&self, id: NodeId) -> std::result::Result<std::sync::Arc<str>, Invalid> {
        Ok(self.get(id)?.name.clone())
    }

    /// `a + b`, broadcast.
    pub fn add(&mut self, a: NodeId, b: NodeId) -> Made {
        let name = self.named_after(a)?;
        self.push(Op::Binary(Binary::Add), &[a, b], &name)
    }

    /// `a - b`, broadcast.
    pub fn sub(&mut self, a: NodeId, b: NodeId) -> Made {
        let name = self.named_after(a)?;
        self.push(Op::Binary(Binary::Sub), &[a, b], &name)
    }

    /// `a * b`, broadcast.
    pub fn mul(&mut self, a: NodeId, b: NodeId) -> Made {
        let name = self.named_after(a)?;
        self.push(Op::Binary(Binary::Mul), &[a, b], &name)
    }

    /// `a / b`, broadcast.
    pub fn div(&mut self, a: NodeId, b: NodeId) -> Made {
        let name = self.named_after(a)?;
        self.push(Op::Binary(Binary::Div), &[a, b], &name)
    }

    /// An elementwise function.
    pub fn unary(&mut self, f: Unary, x: NodeId) -> Made {
        let name = self.named_after(x)?;
        self.push(Op::Unary(f), &[x], &name)
    }

    /// `scale * x + bias`.
    pub fn affine(&mut self, x: NodeId, scale: f32, bias: f32) -> Made {
        let name = self.named_after(x)?;
        self.push(Op::Affine { scale: scale.into(), bias: bias.into() }, &[x], &name)
    }

    /// The lesser of two, broadcast.
    pub fn min(&mut self, a: NodeId, b: NodeId) -> Made {
        let name = self.named_after(a)?;
        self.push(Op::Binary(Binary::Min), &[a, b], &name)
    }

    /// The greater of two, broadcast.
    pub fn max(&mut self, a: NodeId, b: NodeId) -> Made {
        let name = self.named_after(a)?;
        self.push(Op::Binary(Binary::Max), &[a, b], &name)
    }

    /// `x` kept within two bounds, either of which may be infinite.
    pub fn clamp(&mut self, x: NodeId, min: f32, max: f32) -> Made {
        let name = self.named_after(x)?;
        self.push(Op::Clamp { min: min.into(), max: max.into() }, &[x], &name)
    }

    /// A constant.
    pub fn fill(&mut self, value: f32, shape: Shape) -> Made {
        self.push(Op::Fill { value: value.into(), shape }, &[], "constant")
    }

    /// A gated linear unit over one tensor whose last dimension holds the gate, then the linear
    /// half (the other way round when `swapped`). Of an odd width the last element is in neither,
    /// and its gradient is exactly zero.
    pub fn glu_fused(&mut self, x: NodeId, kind: GluKind, swapped: bool, name: &str) -> Made {
        let shape = self.get(x)?.shape;
        let Some(last) = shape.rank().checked_sub(1) else {
            return Err(Invalid::new(format!("node `{name}`: a scalar has no halves")));
        };
        let half = shape.dim(last) / 2;
        let first = self.slice(x, last, 0, half)?;
        let second = self.slice(x, last, half, half)?;
        let (gate, up) = if swapped { (second, first) } else { (first, second) };
        self.push(Op::Glu(kind), &[gate, up], name)
    }

    /// Sum over the given dimensions, which stay with size 1.
    pub fn sum(&mut self, x: NodeId, dims: &[usize]) -> Made {
        let name = self.named_after(x)?;
        let mut set = 0u8;
        for &d in dims {
            if d >= MAX_RANK {
                return Err(Invalid::new(format!("Sum at node `{name}`: no dimension {d}")));
            }
            set |= 1 << d;
        }
        self.push(Op::Sum { dims: set }, &[x], &name)
    }

    /// Mean over the given dimensions, which stay with size 1; of no elements it is 0.
    pub fn mean(&mut self, x: NodeId, dims: &[usize]) -> Made {
        let shape = self.get(x)?.shape;
        let sum = self.sum(x, dims)?;
        let parts = shape.elements() / self.get(sum)?.shape.elements().max(1);
        self.affine(sum, 1.0 / parts.max(1) as f32, 0.0)
    }

    /// Running sums along a dimension.
    pub fn cum_sum(&mut self, x: NodeId, dim: usize) -> Made {
        let name = self.named_after(x)?;
        self.push(Op::CumSum { dim: dim.min(255) as u8, reverse: false }, &[x], &name)
    }

    /// The indices of the `k` greatest of each row, the greatest first: i32 `[.., k]`.
    pub fn top_k(&mut self, x: NodeId, k: usize, name: &str) -> Made {
        self.push(Op::TopK { k, order: Order::Descending }, &[x], name)
    }

    /// The elements of each row at the given places: `(x [.., n], i at [.., k]) -> [.., k]`.
    pub fn take(&mut self, x: NodeId, at: NodeId, name: &str) -> Made {
        let (from, to) = (self.get(x)?.shape, self.get(at)?.shape);
        let (rows, cols) = (from.rows(), from.cols());
        if from.rank() != to.rank() || to.rows() != rows || from.rank() == 0 {
            return Err(Invalid::new(format!("node `{name}`: no elements {to} of rows {from}")));
        }
        let x = self.reshape(x, &[rows, cols, 1])?;
        let at = self.reshape(at, &[rows, to.cols()])?;
        let taken = self.gather(x, at, name)?;
        self.reshape(taken, to.dims())
    }

    /// The greatest of each row, `[.., 1]`; the gradient goes to its place, of equals the first.
    pub fn row_max(&mut self, x: NodeId, name: &str) -> Made {
        let at = self.top_k(x, 1, name)?;
        self.take(x, at, name)
    }

    /// The plain softmax along the last dimension.
    pub fn softmax(&mut self, x: NodeId, name: &str) -> Made {
        self.push(Op::Softmax(SoftmaxAttrs::PLAIN), &[x], name)
    }

    /// Layer normalization of each of `groups` equal parts of the last dimension.
    pub fn group_norm(&mut self, x: NodeId, groups: usize, eps: f32, name: &str) -> Made {
        let shape = self.get(x)?.shape;
        if groups == 0 || shape.rank() == 0 || !shape.cols().is_multiple_of(groups) {
            return Err(Invalid::new(format!("node `{name}`: {groups} groups of {shape}")));
        }
        let mut dims = shape.dims().to_vec();
        dims.pop();
        dims.extend([groups, shape.cols() / groups]);
        let parts = self.reshape(x, &dims)?;
        let y = self.push(Op::Norm { kind: NormKind::Layer, eps: eps.into() }, &[parts], name)?;
        self.reshape(y, shape.dims())
    }

    /// Repeats dimensions of size 1 up to `shape`.
    pub fn broadcast(&mut self, x: NodeId, shape: Shape) -> Made {
        if self.get(x)?.shape == shape {
            return Ok(x);
        }
        let name = self.named_after(x)?;
        self.push(Op::Broadcast { shape }, &[x], &name)
    }

    /// The same elements under another shape.
    pub fn reshape(&mut self, x: NodeId, dims: &[usize]) -> Made {
        let shape = Shape::new(dims)?;
        if self.get(x)?.shape == shape {
            return Ok(x);
        }
        let name = self.named_after(x)?;
        self.push(Op::Reshape { shape }, &[x], &name)
    }

    /// Reorders dimensions: output dimension `i` is input dimension `perm[i]`.
    pub fn permute(&mut self, x: NodeId, perm: &[u8]) -> Made {
        let name = self.named_after(x)?;
        self.push(Op::Permute { perm: perm.to_vec() }, &[x], &name)
    }

    /// `len` entries of dimension `dim` from `start`.
    pub fn slice(&mut self, x: NodeId, dim: usize, start: usize, len: usize) -> Made {
        let name = self.named_after(x)?;
        self.push(Op::Slice { dim: dim.min(255) as u8, start, len }, &[x], &name)
    }

    /// Joins along `dim`.
    pub fn concat(&mut self, xs: &[NodeId], dim: usize) -> Made {
        let name = match xs.first() {
            Some(&x) => self.named_after(x)?,
            None => return Err(Invalid::new("Concat of nothing")),
        };
        if let &[x] = xs {
            return Ok(x);
        }
        self.push(Op::Concat { dim: dim.min(255) as u8 }, xs, &name)
    }

    /// Converts to another float type or Q8_0.
    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Made {
        if self.get(x)?.dtype == dtype {
            return Ok(x);
        }
        let name = self.named_after(x)?;
        self.push(Op::Cast { dtype }, &[x], &name)
    }

    /// Passes values through `dtype` and back; the identity for f32.
    pub fn round(&mut self, x: NodeId, dtype: DType) -> Made {
        let name = self.named_after(x)?;
        if dtype == DType::F32 {
            return Ok(x);
        }
        self.push(Op::Round { dtype }, &[x], &name)
    }

    /// Rows of a table by id.
    pub fn gather(&mut self, table: NodeId, ids: NodeId, name: &str) -> Made {
        self.push(Op::Gather, &[table, ids], name)
    }

    /// `x / rms(x) * weight` along the last dimension.
    pub fn rms_norm(&mut self, x: NodeId, weight: NodeId, eps: f32) -> Made {
        let name = self.named_after(weight)?;
        self.push(Op::RmsNorm { eps: eps.into() }, &[x, weight], &name)
    }

    /// Rows `[T, 1 or U, K]` times the experts `[E, N, K]` they chose by `ids` `[T, U]`:
    /// `[T, U, N]`. `x` is quantized to rows of 8 bits first when `w` is of a block format.
    pub fn project_experts(&mut self, x: NodeId, w: NodeId, ids: NodeId) -> Made {
        let name = self.named_after(w)?;
        let x = match self.get(w)?.dtype {
            DType::Block(_) if self.get(x)?.dtype == DType::F32 => {
                self.push(Op::QuantizeRows, &[x], &name)?
            }
            _ => x,
        };
        self.push(Op::MatMulExperts { tb: true }, &[x, w, ids], &name)
    }

    /// `sum over u of weights[t, u] y[t, u]`, in order of rank: `[T, U, N]` and `[T, U]` give
    /// `[T, N]`.
    pub fn mix_experts(&mut self, y: NodeId, weights: NodeId) -> Made {
        let (y_shape, shape) = (self.get(y)?.shape, self.get(weights)?.shape);
        let &[t, used] = shape.dims() else {
            return Err(Invalid::new(format!("the shares of experts are {shape}, not [T, U]")));
        };
        let shares = self.reshape(weights, &[t, used, 1])?;
        let shared = self.mul(y, shares)?;
        let sum = self.sum(shared, &[1])?;
        self.reshape(sum, &[t, y_shape.cols()])
    }

    /// `x . w^T`; `x` is quantized to rows of 8 bits first when `w` is of a block format.
    pub fn project(&mut self, x: NodeId, w: NodeId) -> Made {
        let name = self.named_after(w)?;
        let x = match self.get(w)?.dtype {
            DType::Block(_) if self.get(x)?.dtype == DType::F32 => {
                self.push(Op::QuantizeRows, &[x], &name)?
            }
            _ => x,
        };
        self.push(Op::MatMul { ta: false, tb: true }, &[x, w], &name)
    }

    /// Causal convolution of each channel over packed sequences: [`Op::SsmConv`].
    pub fn ssm_conv(
        &mut self,
        x: NodeId,
        w: NodeId,
        state: NodeId,
        seqs: NodeId,
        name: &str,
    ) -> Made {
        self.push(Op::SsmConv, &[x, w, state, seqs], name)
    }

    /// The state that [`Graph::ssm_conv`] leaves: [`Op::SsmConvState`].
    pub fn ssm_conv_state(&mut self, x: NodeId, state: NodeId, seqs: NodeId, name: &str) -> Made {
        self.push(Op::SsmConvState, &[x, state, seqs], name)
    }

    /// Selective scan of `x, dt, a, b, c, state, seqs`: [`Op::SsmScan`]. Gives the outputs
    /// `[T, H, D]` and the exit states `[S, H, D, N]`.
    pub fn ssm_scan(
        &mut self,
        operands: [NodeId; 7],
        name: &str,
    ) -> std::result::Result<(NodeId, NodeId), Invalid> {
        let both = self.push(Op::SsmScan, &operands, name)?;
        let [x, _, _, _, _, state, _] = operands;
        self.two_parts(both, self.get(x)?.shape, self.get(state)?.shape)
    }

    /// Gated delta rule of `q, k, v, g, beta, state, seqs`: [`Op::GatedDeltaRule`]. Gives the
    /// outputs `[T, Hv, Dv]` and the exit states `[S, Hv, Dk, Dv]`.
    pub fn gated_delta_rule(
        &mut self,
        attrs: GatedDeltaAttrs,
        operands: [NodeId; 7],
        name: &str,
    ) -> std::result::Result<(NodeId, NodeId), Invalid> {
        let both = self.push(Op::GatedDeltaRule(attrs), &operands, name)?;
        let [_, _, v, _, _, state, _] = operands;
        self.two_parts(both, self.get(v)?.shape, self.get(state)?.shape)
    }

    /// The two tensors that a flat one holds.
    pub(crate) fn two_parts(
        &mut self,
        both: NodeId,
        first: Shape,
        second: Shape,
    ) -> std::result::Result<(NodeId, NodeId), Invalid> {
        let a = self.slice(both, 0, 0, first.elements())?;
        let a = self.reshape(a, first.dims())?;
        let b = self.slice(both, 0, first.elements(), second.elements())?;
        Ok((a, self.reshape(b, second.dims())?))
    }
}
