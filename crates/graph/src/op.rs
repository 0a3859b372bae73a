//! The closed list of ops. Every match on [`Op`] is exhaustive: a new variant is a compile
//! error until its shape rule, gradient rule, reference and kernels exist.
//!
//! Shapes are written `[outer, ..., inner]`. `T` counts rows (tokens), `H` heads, `D` a head's
//! width, `K` the inner and `N` the outer width of a projection, `V` the vocabulary, `S`
//! sequences. "f" marks a float operand (f32 unless said), "i" an i32 operand.

use crate::{DType, Shape};

mod attrs;
mod random;

pub use attrs::*;
pub use random::*;

/// What a node computes. Ops are pure: no aliasing, no state, no in-place writes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    /// A value bound when the graph runs: a weight, an input, a page of a cache.
    Leaf,

    // ---- elementwise -------------------------------------------------------------------
    /// `(f a, f b) -> f`: see [`Binary`].
    Binary(Binary),
    /// `(f x) -> f`: see [`Unary`].
    Unary(Unary),
    /// `(f x) -> f`: `scale * x + bias`.
    Affine {
        /// Multiplier.
        scale: Real,
        /// Addend.
        bias: Real,
    },
    /// `(f x) -> f`: `x` kept within two bounds, either of which may be infinite and then never
    /// clamps.
    Clamp {
        /// The least value.
        min: Real,
        /// The greatest value, not below `min`.
        max: Real,
    },
    /// `(f x, f dy) -> f`: gradient of [`Op::Clamp`]: `dy` where `x` is strictly within the
    /// bounds, else 0 (at a bound too).
    ClampBack {
        /// As in the forward op.
        min: Real,
        /// As in the forward op.
        max: Real,
    },
    /// `() -> f`: one value everywhere.
    Fill {
        /// The value.
        value: Real,
        /// The resulting shape.
        shape: Shape,
    },
    /// `(f gate [.., n], f up [.., n]) -> f [.., n]`: `act(gate) * up`; see [`GluKind`].
    Glu(GluKind),
    /// `(f gate, f up, f dy) -> f`: gradient of [`Op::Glu`] for one operand.
    /// `Up`: `dy * act(gate)`; `Gate`: `dy * up * act'(gate)`; with the factors of
    /// [`GluKind::SwigluOai`] where it has others.
    GluBack {
        /// The activation.
        kind: GluKind,
        /// The operand it is for.
        wrt: GluOperand,
    },

    // ---- reductions and layout ---------------------------------------------------------
    /// `(f x) -> f`: sum over the dimensions whose bit is set (bit i = dimension i); they
    /// stay, with size 1. Elements are added in row-major order, in f32.
    Sum {
        /// Bit set of dimensions.
        dims: u8,
    },
    /// `(f x) -> f`: running sums along one dimension, in f32, each element included in its own
    /// sum. Gradient: the same, the other way round.
    CumSum {
        /// The dimension.
        dim: u8,
        /// From the last element to the first.
        reverse: bool,
    },
    /// `(f x [.., n]) -> i [.., k]`: the indices of the `k` greatest (least) elements of each row,
    /// in order; of equals the lowest index first, and NaN after all numbers. With `k = n`, a
    /// sort. Indices have no gradient; the values gathered by them do.
    TopK {
        /// How many.
        k: usize,
        /// Which come first.
        order: Order,
    },
    /// `(f x) -> f`: dimensions of size 1 (or absent leading ones) are repeated up to `shape`.
    Broadcast {
        /// The resulting shape.
        shape: Shape,
    },
    /// `(x) -> same dtype`: the same elements under another shape.
    Reshape {
        /// The resulting shape; same element count.
        shape: Shape,
    },
    /// `(x) -> same dtype`: output dimension `i` is input dimension `perm[i]`.
    Permute {
        /// A permutation of the dimensions, as many entries as the rank.
        perm: Vec<u8>,
    },
    /// `(x) -> same dtype`: `len` entries of dimension `dim` from `start`.
    Slice {
        /// The dimension that is cut.
        dim: u8,
        /// First entry kept.
        start: usize,
        /// Entries kept.
        len: usize,
    },
    /// `(f x) -> f`: zeros added before and after along one dimension. Gradient of `Slice`.
    Pad {
        /// The dimension that grows.
        dim: u8,
        /// Zeros in front.
        before: usize,
        /// Zeros behind.
        after: usize,
    },
    /// `(f x0, f x1, ...) -> f`: joined along `dim`.
    Concat {
        /// The dimension that is joined.
        dim: u8,
    },
    /// `(x) -> same dtype, contiguous`: identity. The planner inserts it where a device does
    /// not read a strided operand in place.
    Copy,

    // ---- dtype -------------------------------------------------------------------------
    /// `(f32 x [.., K]) -> dtype`: conversion to f16, bf16 or Q8_0 (as ggml quantizes: scale
    /// `f16(amax/127)`, codes rounded half away from zero), what a cache stores; to
    /// [`int16-rows`](DType::Int16Rows); or from f16/bf16 to f32. Straight-through gradient; a block
    /// format has none.
    Cast {
        /// The resulting dtype.
        dtype: DType,
    },
    /// `(f32 x) -> f32`: the values that `Cast` to `dtype` and back would give.
    /// Straight-through gradient.
    Round {
        /// f32 (identity), f16, bf16 or Q8_0.
        dtype: DType,
    },
    /// `(f32 x [.., K]) -> q8-rows [.., K]`: each row in blocks of 32: `scale = amax / 127`
    /// (f32), `code = round_half_even(x / scale)`; a block of zeros has scale 0.
    /// Straight-through gradient.
    QuantizeRows,

    // ---- indexing ----------------------------------------------------------------------
    /// `(table [V, K] of any dtype, i ids [..]) -> f32 [.., K]`, or
    /// `(table [B.., V, K], i ids [B.., T]) -> f32 [B.., T, K]`, where every leading index has
    /// its own table.
    Gather,
    /// `(i ids [B.., T], f x [B.., T, K]) -> f [B.., rows, K]`: rows of `x` added up by id, in row
    /// order.
    ScatterAdd {
        /// Rows of the result.
        rows: usize,
    },

    // ---- softmax -----------------------------------------------------------------------
    /// `(f x [.., n] [, f mask, broadcast to x, last dimension n] [, f sinks [H]]) -> f [.., n]`:
    /// along the last dimension `exp(l_i - m) / (sum_j exp(l_j - m) + exp(sink - m))` with
    /// `l = scale x + slope mask`; see [`SoftmaxAttrs`]. With sinks or ALiBi `x` is
    /// `[.., H, T, n]`. A row whose logits are all -inf (and that has no sink) gives zeros.
    Softmax(SoftmaxAttrs),
    /// `(f y, f dy) -> f`: gradient of [`Op::Softmax`] for `x`, from its result:
    /// `scale y (dy - sum(y dy))`.
    SoftmaxBack {
        /// As in the forward op.
        scale: Real,
    },
    /// `(f x [, f mask], f sinks, f y, f dy) -> f [H]`: gradient of [`Op::Softmax`] for the sinks:
    /// `-sum over a head's rows of p_sink sum(y dy)`, where `p_sink` is the sink's own share.
    SoftmaxSinkBack(SoftmaxAttrs),
    /// `(f x [.., n]) -> f`: `x - ln(sum exp x)` along the last dimension.
    LogSoftmax,

    // ---- normalization and position ----------------------------------------------------
    /// `(f x [.., n], f w [n]) -> f`: `x / sqrt(mean(x^2) + eps) * w`.
    RmsNorm {
        /// Added to the mean square.
        eps: Real,
    },
    /// `(f x, f w, f dy) -> f`: gradient of [`Op::RmsNorm`]; `X`: shape of x, with
    /// `r = 1/sqrt(mean(x^2)+eps)`, `r*(w*dy - x * r^2 * mean(w*dy*x))`; `Weight`: `[n]`,
    /// `sum over rows of dy * x * r`.
    RmsNormBack {
        /// As in the forward op.
        eps: Real,
        /// The operand it is for.
        wrt: NormOperand,
    },
    /// `(f x [.., n]) -> f`: see [`NormKind`].
    Norm {
        /// Which.
        kind: NormKind,
        /// Its constant: above 0 for the L2 kinds.
        eps: Real,
    },
    /// `(f x, f dy) -> f`: gradient of [`Op::Norm`]. With `y` and the divisor `d` of the forward
    /// op: `Layer`: `(dy - mean(dy) - y mean(y dy)) / d`; `L2Add`, and `L2Clamp` where
    /// `|x| > eps`: `(dy - y sum(y dy)) / d`; `L2Clamp` elsewhere: `dy / eps`.
    NormBack {
        /// As in the forward op.
        kind: NormKind,
        /// As in the forward op.
        eps: Real,
    },
    /// `(i pos) or (i pos, f factors [dims/2]) -> f [T, dims]`: `dims/2` cosines, then `dims/2`
    /// sines, of the angles of each position; computed in f64, rounded once. `pos` is `[T]`, with
    /// sections `[T, 4]`.
    RopeTable(RopeAngles),
    /// `(f x [T, H, D], f table [T, dims]) -> f`: each head's leading `dims` elements rotated
    /// by the row's angles: `(a, b) -> (a cos - b sin, a sin + b cos)`; the rest unchanged.
    Rope {
        /// Which elements pair up.
        style: RopeStyle,
        /// Rotates backwards: the gradient of the forward rotation.
        inverse: bool,
    },

    // ---- products ----------------------------------------------------------------------
    /// `(a, b) -> f32 [.., m, n]`: `op(a) [.., m, k] . op(b) [.., k, n]`, where `op` transposes
    /// the last two dimensions if its flag is set. Leading dimensions of `a` and `b` broadcast
    /// (a rank-2 `b` is shared by all). `a` is f32, or q8-rows when `b` is of a block format
    /// and `!ta`; `b` is f32, f16, bf16 or a block format (rank 2). A projection of GGUF
    /// weights `[N, K]` has `tb = true`. Before a block format that is not transposed `a` may be
    /// bf16: then the elements of `b` are rounded to bf16 (to nearest even) too, and their
    /// products, which f32 holds exactly, are added up in f32. Or it may be int16-rows: then the
    /// columns of `b` are rounded in groups as those rows were, but with a scale of
    /// `2^(max(e, -113) - 10)` to codes of up to 2048; the products of a group are added up as
    /// integers, exactly, and the groups in f32. See [`GradPrecision`].
    ///
    /// [`GradPrecision`]: crate::GradPrecision
    MatMul {
        /// Transposes the last two dimensions of `a`.
        ta: bool,
        /// Transposes the last two dimensions of `b`.
        tb: bool,
    },
    /// `(x [T, X, K], w, i ids [T, U]) -> f32 [T, U, N]` with `X` 1 or `U`: row `t` times the
    /// experts it chose, `y[t, u] = op(w[ids[t, u]]) x[t, u]` (`x[t, 0]` where `X` is 1). As in
    /// [`Op::MatMul`], `w` is `[E, N, K]` with `tb` and `[E, K, N]` without; `x` is f32, or q8-rows
    /// with `tb` when `w` is of a block format, without it bf16 or int16-rows too, as there. An
    /// expert that is not chosen is not read.
    MatMulExperts {
        /// Transposes each expert.
        tb: bool,
    },
    /// `(f a [T, A, P], f b [T, B, Q], i ids [T, U]) -> f [E, P, Q]` with `A` and `B` 1 or `U`:
    /// per expert the sum of `a[t, u] b[t, u]^T` over the places where it was chosen, in order.
    /// Gradient of [`Op::MatMulExperts`] for the experts; exactly 0 for one that was not chosen.
    ExpertOuter {
        /// Experts of the result.
        experts: usize,
    },
    /// `(f x [T, .., K], i rows [T, 2], i key [2]) -> f`: inverted dropout (Srivastava et al. 2014):
    /// an element is 0 with probability `p`, else times `1 / (1 - p)`; what is dropped is not read.
    /// Which are dropped follows from the key, the row's two numbers, the op's site and the
    /// element's place in its row, and from nothing else; see [`Dropout`]. Linear in `x`: its
    /// gradient is the same op, with the same operands, of `dy`.
    Dropout(Dropout),
    /// `(f x [T, K], f base [T, N], i rows [T], then per slot: f A [r, K], f B [N, r],
    /// f scale [1]) -> f [T, N]`: `base + scale_s * B_s (A_s x)` for row `t` with
    /// `s = rows[t]`; rows with a negative slot are `base`. Ranks may differ.
    Lora {
        /// How many slots the operands hold.
        slots: usize,
    },
    /// Gradient of [`Op::Lora`]. `X`: `(f dy [T, N], i rows, then A, B, scale per slot) ->
    /// [T, K]`. Over the rows `t` of one slot, ascending, no others being read, `A`:
    /// `(f x [T, K], f g [T, r], i rows) -> [r, K]`: `sum_t g_t x_t^T` with
    /// `g_t = scale * B^T dy_t`; and `B`: `(f h [T, r], f dy [T, N], i rows) -> [N, r]`:
    /// `sum_t dy_t h_t^T` with `h_t = scale * A x_t`.
    LoraBack {
        /// How many slots the forward op had.
        slots: usize,
        /// The operand it is for.
        wrt: LoraOperand,
        /// The slot, for `A` and `B`; 0 for `X`.
        slot: usize,
    },
    /// `(f x [T, X, K], f base [T, U, N], i rows [T], i ids [T, U], then per slot: f A [E, r, K],
    /// f B [E, N, r], f scale [1]) -> f [T, U, N]` with `X` 1 or `U`: an adapter of the stack of
    /// experts that [`Op::MatMulExperts`] multiplies: `base[t, u] + scale_s * B_s[e] (A_s[e]
    /// x[t, u])` with `s = rows[t]` and `e = ids[t, u]` (`x[t, 0]` where `X` is 1); rows with a
    /// negative slot are `base`. Ranks may differ. An expert that is not chosen is not read.
    LoraExperts {
        /// How many slots the operands hold.
        slots: usize,
    },
    /// Gradient of [`Op::LoraExperts`]. `X`: `(f dy [T, U, N], i rows, i ids, then A, B, scale per
    /// slot) -> [T, U, K]`. `A`: `(f x, f dy, i rows, i ids, f B, f scale) -> [E, r, K]` for the
    /// given slot: per expert `sum scale * (B[e]^T dy[t, u]) x[t, u]^T` over the places where rows
    /// of the slot chose it, in order. `B`: `(f x, f dy, i rows, i ids, f A, f scale) ->
    /// [E, N, r]`: `sum scale * dy[t, u] (A[e] x[t, u])^T`. Exactly 0 for an expert that none
    /// chose.
    LoraExpertsBack {
        /// How many slots the forward op had.
        slots: usize,
        /// The operand it is for.
        wrt: LoraOperand,
        /// The slot, for `A` and `B`; 0 for `X`.
        slot: usize,
    },

    // ---- attention ---------------------------------------------------------------------
    /// `(f q [T, Hq, D], f k [T, Hkv, D], f v [T, Hkv, Dv], i seqs [S, 3] [, f sinks [Hq]]
    /// [, k_pages [P, page, Hkv, D], v_pages [P, page, Hkv, Dv], i table [S, M]]) ->
    /// f [T, Hq, Dv]`.
    ///
    /// `seqs[s] = (first, rows, cached)`: rows `first .. first + rows` are sequence `s` at
    /// positions `cached ..`; position `p < cached` is at page `table[s][p / page]`, slot
    /// `p % page`. Rows of no sequence give zeros; of a sequence of no rows nothing else is read.
    /// Query head `h` reads key head `h * Hkv / Hq`. Causal: a row sees its own and earlier
    /// positions, within the window and the chunk. A logit is `scale * q . k`, capped, then biased;
    /// the softmax' denominator also counts `exp(sink_h)`. Pages are f32, f16, bf16 or Q8_0 (blocks
    /// along the last dimension).
    Attention(AttentionAttrs),
    /// `(q, k, v, i seqs, f delta [T, Hq], f dout [T, Hq, Dv] [, sinks]
    /// [, k_pages, v_pages, table]) -> f [T*Hq*D + T*Hq]`: the gradient of `q`, then `lse`, the
    /// log-sum-exp of each row's logits and its sink, which [`Op::AttentionBack`] takes; 0 for rows
    /// of no sequence. With `p = exp(logit - lse)`, `ds = p * (dout . v - delta)` (times the cap's
    /// derivative) and `delta = sum(dout * out)`, the gradient is `scale * ds k`.
    AttentionQueryBack(AttentionAttrs),
    /// `(q, k, v, i seqs, f lse [T, Hq], f delta [T, Hq], f dout [T, Hq, Dv] [, sinks]
    /// [, k_pages, v_pages, table]) -> f`. With `p` and `ds` as in [`Op::AttentionQueryBack`]:
    /// `Own` `[k + v]` (sizes of the operands): `scale * ds^T q`, then `p^T dout`, summed over the
    /// query heads that share a key head; `Sinks` `[Hq]`:
    /// `-sum over rows of exp(sink - lse) * delta`; `Pages` `[k_pages + v_pages]`: as `Own`, added
    /// up sequence by sequence where a page is of several, 0 in slots of none; straight through
    /// where pages are not f32.
    AttentionBack {
        /// As in the forward op.
        attrs: AttentionAttrs,
        /// The operands it is for.
        wrt: AttentionOperand,
    },

    // ---- recurrences -------------------------------------------------------------------
    //
    // All take `seqs` as `Attention` does: `seqs[s] = (first, rows, _)`, the third number is
    // not read. A sequence begins from its own entry state and reads no other's rows; one of no
    // rows passes its state through. Rows of no sequence give zeros and receive none.
    /// `(f x [T, C], f w [C, W], f state [S, W-1, C], i seqs [S, 3]) -> f [T, C]`: causal
    /// convolution of each channel. With `z` the sequence's `W-1` earlier inputs (its state)
    /// followed by its rows: `y[p, c] = sum_j w[c, j] * z[p + j, c]`, `p` counted from the
    /// sequence's first row. ggml's `ssm_conv`, which takes `z` itself; no activation.
    SsmConv,
    /// `(f x, f w, f state, i seqs, f dy [T, C]) -> shape of the operand`: gradient of
    /// [`Op::SsmConv`]. With `dz[m, c] = sum_j w[c, j] * dy[m - j, c]` over the sequence's own
    /// rows: `State`: `dz[.. W-1]`; `X`: `dz[W-1 ..]`; `Weight`:
    /// `dw[c, j] = sum over rows of dy[p, c] * z[p + j, c]`, rows ascending, sequences in order.
    SsmConvBack {
        /// The operand it is for.
        wrt: SsmConvOperand,
    },
    /// `(f x [T, C], f state [S, W-1, C], i seqs [S, 3]) -> f [S, W-1, C]`: the exit state of
    /// [`Op::SsmConv`], the last `W-1` inputs of each sequence, its entry state among them.
    SsmConvState,
    /// `(f x, f state, i seqs, f dy [S, W-1, C]) -> shape of the operand`: gradient of
    /// [`Op::SsmConvState`]: each input receives what its copy in the exit state did, or 0.
    SsmConvStateBack {
        /// The operand it is for.
        wrt: SsmConvStateOperand,
    },
    /// `(f x [T, H, D], f dt [T, H], f a [H, N] or [H, 1], f b [T, G, N], f c [T, G, N],
    /// f state [S, H, D, N], i seqs [S, 3]) -> f [T*H*D + S*H*D*N]`: the outputs `[T, H, D]`,
    /// then the exit states `[S, H, D, N]`.
    ///
    /// Selective scan, token by token: `s[h, d, n] = exp(dt[h] * a[h, n]) * s[h, d, n] +
    /// dt[h] * x[h, d] * b[g, n]`, `y[h, d] = sum_n s[h, d, n] * c[g, n]`, `g = h / (H / G)`.
    /// Mamba-2 has `a [H, 1]`, one decay per head; Mamba-1 has `H` channels, `D = 1`, `G = 1`.
    /// ggml's `ssm_scan`, except that ggml applies softplus to `dt` itself: here `dt` is the
    /// step, and softplus is an op before this one.
    SsmScan,
    /// `(f x, f dt, f a, f b, f c, f state, i seqs, f dy [T, H, D], f dexit [S, H, D, N]) -> f
    /// [x + dt + S*a + parts*b + parts*c + state]` (sizes of the operands): gradients of
    /// [`Op::SsmScan`], in that order, from those of its outputs and of its exit states.
    ///
    /// With `ds` the gradient of the state, tokens descending: `ds += dy c`;
    /// `dc = sum_hd dy s`; `db = sum_hd ds dt x`; `dx = dt sum_n ds b`;
    /// `e = ds * decay * s_before`; `da = sum e dt`; `ddt = sum e a + x ds b`;
    /// `ds = decay * ds`. What several tiles add to comes in parts, still to be summed: `da` as
    /// `[S, H, N or 1]` by sequence; `db` and `dc` as `[parts, T, G, N]`, part `p` summing heads
    /// `p*r .. (p+1)*r` of each group, `r = ceil(H / G / parts)`.
    SsmScanBack {
        /// In how many parts `db` and `dc` come; 1 to `H / G`.
        parts: usize,
    },
    /// `(f q [T, Hk, Dk], f k [T, Hk, Dk], f v [T, Hv, Dv], f g [T, Hv] or [T, Hv, Dk],
    /// f beta [T, Hv], f state [S, Hv, Dk, Dv], i seqs [S, 3]) -> f [T*Hv*Dv + S*Hv*Dk*Dv]`:
    /// the outputs `[T, Hv, Dv]`, then the exit states `[S, Hv, Dk, Dv]`.
    ///
    /// Gated delta rule, token by token for each value head: `S' = exp(g) * S` (`g` the log
    /// decay, of the head or of each row of `S`), `u = S'^T k`, `d = beta * (v - u)`,
    /// `S = S' + k d^T`, `y = scale * S^T q`. Yang et al., "Gated Delta Networks" (2024); with
    /// `g [T, Hv, Dk]` Kimi Delta Attention (2025).
    GatedDeltaRule(GatedDeltaAttrs),
    /// `(f q, f k, f v, f g, f beta, f state, i seqs, f dy [T, Hv, Dv], f dexit [S, Hv, Dk, Dv])
    /// -> f [T*Hv*Dk + T*Hv*Dk + v + g + beta + state]` (sizes of the operands): gradients of
    /// [`Op::GatedDeltaRule`], in that order, from those of its outputs and of its exit states.
    ///
    /// With `dS` the gradient of the state, tokens descending: `dq = scale * S dy`;
    /// `dS += scale * q dy^T`; `dd = dS^T k`; `dv = beta dd`; `dbeta = dd . (v - u)`;
    /// `du = -beta dd`; `dk = dS d + S' du`; `dS += k du^T`; `dg = sum dS * S'` (of the head or
    /// of each row); `dS = exp(g) * dS`. `dq` and `dk` are those of each value head, still to be
    /// summed over the heads that share a key head.
    GatedDeltaRuleBack(GatedDeltaAttrs),

    // ---- loss --------------------------------------------------------------------------
    /// `(f logits [T, V], i labels [T] [, f weights [T]]) -> f [T]`:
    /// `weight * (logsumexp(z) - z[label])`, `z = softcap(scale * logits)`; exactly 0 where the
    /// label is negative or the weight is 0 (such a row's logits are never read).
    CrossEntropy(CrossEntropyAttrs),
    /// `(f logits [T, V], i labels [T], f dy [T] [, f weights [T]]) -> f [T, V]`:
    /// `dy * weight * (softmax(z) - onehot(label)) * dz/dlogit`; exactly 0 where the label is
    /// negative or `dy` or the weight is 0, even if the logits are not finite.
    CrossEntropyBack(CrossEntropyAttrs),
}

impl Op {
    /// The op's name in messages and tables.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Leaf => "Leaf",
            Op::Binary(Binary::Add) => "Add",
            Op::Binary(Binary::Sub) => "Sub",
            Op::Binary(Binary::Mul) => "Mul",
            Op::Binary(Binary::Div) => "Div",
            Op::Binary(Binary::Min) => "Min",
            Op::Binary(Binary::Max) => "Max",
            Op::Unary(Unary::Tanh) => "Tanh",
            Op::Unary(Unary::Sigmoid) => "Sigmoid",
            Op::Unary(Unary::Silu) => "Silu",
            Op::Unary(Unary::Gelu) => "Gelu",
            Op::Unary(Unary::Exp) => "Exp",
            Op::Unary(Unary::Log) => "Log",
            Op::Unary(Unary::Neg) => "Neg",
            Op::Unary(Unary::Abs) => "Abs",
            Op::Unary(Unary::Sqr) => "Sqr",
            Op::Unary(Unary::Sqrt) => "Sqrt",
            Op::Unary(Unary::Rsqrt) => "Rsqrt",
            Op::Unary(Unary::Expm1) => "Expm1",
            Op::Unary(Unary::Log1p) => "Log1p",
            Op::Unary(Unary::Sin) => "Sin",
            Op::Unary(Unary::Cos) => "Cos",
            Op::Unary(Unary::Relu) => "Relu",
            Op::Unary(Unary::GeluErf) => "GeluErf",
            Op::Unary(Unary::GeluQuick) => "GeluQuick",
            Op::Unary(Unary::NormalCdf) => "NormalCdf",
            Op::Unary(Unary::Softplus) => "Softplus",
            Op::Unary(Unary::Step) => "Step",
            Op::Unary(Unary::Sign) => "Sign",
            Op::Affine { .. } => "Affine",
            Op::Clamp { .. } => "Clamp",
            Op::ClampBack { .. } => "ClampBack",
            Op::Fill { .. } => "Fill",
            Op::Glu(GluKind::Swiglu) => "Swiglu",
            Op::Glu(GluKind::Geglu) => "Geglu",
            Op::Glu(GluKind::GegluErf) => "GegluErf",
            Op::Glu(GluKind::GegluQuick) => "GegluQuick",
            Op::Glu(GluKind::Reglu) => "Reglu",
            Op::Glu(GluKind::SwigluOai { .. }) => "SwigluOai",
            Op::GluBack { kind: GluKind::Swiglu, .. } => "SwigluBack",
            Op::GluBack { kind: GluKind::Geglu, .. } => "GegluBack",
            Op::GluBack { kind: GluKind::GegluErf, .. } => "GegluErfBack",
            Op::GluBack { kind: GluKind::GegluQuick, .. } => "GegluQuickBack",
            Op::GluBack { kind: GluKind::Reglu, .. } => "RegluBack",
            Op::GluBack { kind: GluKind::SwigluOai { .. }, .. } => "SwigluOaiBack",
            Op::Sum { .. } => "Sum",
            Op::CumSum { .. } => "CumSum",
            Op::TopK { .. } => "TopK",
            Op::Broadcast { .. } => "Broadcast",
            Op::Reshape { .. } => "Reshape",
            Op::Permute { .. } => "Permute",
            Op::Slice { .. } => "Slice",
            Op::Pad { .. } => "Pad",
            Op::Concat { .. } => "Concat",
            Op::Copy => "Copy",
            Op::Cast { .. } => "Cast",
            Op::Round { .. } => "Round",
            Op::QuantizeRows => "QuantizeRows",
            Op::Gather => "Gather",
            Op::ScatterAdd { .. } => "ScatterAdd",
            Op::Softmax(_) => "Softmax",
            Op::SoftmaxBack { .. } => "SoftmaxBack",
            Op::SoftmaxSinkBack(_) => "SoftmaxSinkBack",
            Op::LogSoftmax => "LogSoftmax",
            Op::Norm { kind: NormKind::Layer, .. } => "LayerNorm",
            Op::Norm { kind: NormKind::L2Clamp, .. } => "L2NormClamp",
            Op::Norm { kind: NormKind::L2Add, .. } => "L2NormAdd",
            Op::NormBack { kind: NormKind::Layer, .. } => "LayerNormBack",
            Op::NormBack { kind: NormKind::L2Clamp, .. } => "L2NormClampBack",
            Op::NormBack { kind: NormKind::L2Add, .. } => "L2NormAddBack",
            Op::RmsNorm { .. } => "RmsNorm",
            Op::RmsNormBack { .. } => "RmsNormBack",
            Op::RopeTable(_) => "RopeTable",
            Op::Rope { .. } => "Rope",
            Op::MatMul { .. } => "MatMul",
            Op::MatMulExperts { .. } => "MatMulExperts",
            Op::ExpertOuter { .. } => "ExpertOuter",
            Op::Dropout(_) => "Dropout",
            Op::Lora { .. } => "Lora",
            Op::LoraBack { .. } => "LoraBack",
            Op::LoraExperts { .. } => "LoraExperts",
            Op::LoraExpertsBack { .. } => "LoraExpertsBack",
            Op::Attention(_) => "Attention",
            Op::AttentionQueryBack(_) => "AttentionQueryBack",
            Op::AttentionBack { .. } => "AttentionBack",
            Op::SsmConv => "SsmConv",
            Op::SsmConvBack { .. } => "SsmConvBack",
            Op::SsmConvState => "SsmConvState",
            Op::SsmConvStateBack { .. } => "SsmConvStateBack",
            Op::SsmScan => "SsmScan",
            Op::SsmScanBack { .. } => "SsmScanBack",
            Op::GatedDeltaRule(_) => "GatedDeltaRule",
            Op::GatedDeltaRuleBack(_) => "GatedDeltaRuleBack",
            Op::CrossEntropy(_) => "CrossEntropy",
            Op::CrossEntropyBack(_) => "CrossEntropyBack",
        }
    }

    /// True for the ops that only relabel their operand's elements: the planner reads through
    /// them where it can.
    pub fn is_view(&self) -> bool {
        matches!(
            self,
            Op::Reshape { .. } | Op::Permute { .. } | Op::Slice { .. } | Op::Broadcast { .. }
        )
    }
}
