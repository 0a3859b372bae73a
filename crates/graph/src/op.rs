//! The closed list of ops. Every match on [`Op`] is exhaustive: a new variant is a compile
//! error until its shape rule, gradient rule, reference and kernels exist.
//!
//! Shapes are written `[outer, ..., inner]`. `T` counts rows (tokens), `H` heads, `D` a head's
//! width, `K` the inner and `N` the outer width of a projection, `V` the vocabulary, `S`
//! sequences. "f" marks a float operand (f32 unless said), "i" an i32 operand.

use crate::{DType, Shape};

/// A finite real attribute of an op, comparable and hashable by its bits.
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
pub struct Real(u32);

impl Real {
    /// Wraps a value.
    pub const fn new(value: f32) -> Real {
        Real(value.to_bits())
    }

    /// The value.
    pub const fn get(self) -> f32 {
        f32::from_bits(self.0)
    }
}

impl From<f32> for Real {
    fn from(value: f32) -> Real {
        Real::new(value)
    }
}

impl std::fmt::Debug for Real {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.get())
    }
}

/// An elementwise op of two operands, broadcast as numpy does: shapes are aligned at the last
/// dimension, a dimension of size 1 (or absent) stretches.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Binary {
    /// `a + b`
    Add,
    /// `a - b`
    Sub,
    /// `a * b`
    Mul,
    /// `a / b`
    Div,
    /// The lesser; where both are equal, `a` (which then has the gradient)
    Min,
    /// The greater; where both are equal, `a` (which then has the gradient)
    Max,
}

impl Binary {
    /// All of them.
    pub const ALL: [Binary; 6] =
        [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Min, Binary::Max];
}

/// An elementwise function of one operand.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Unary {
    /// `tanh x`
    Tanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// `x * sigmoid(x)`
    Silu,
    /// The tanh form of GELU: `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`
    Gelu,
    /// `e^x`
    Exp,
    /// `ln x`
    Log,
    /// `-x`
    Neg,
    /// `|x|`
    Abs,
    /// `x^2`
    Sqr,
    /// `sqrt x`
    Sqrt,
    /// `1 / sqrt x`
    Rsqrt,
    /// `e^x - 1`, accurate near 0
    Expm1,
    /// `ln(1 + x)`, accurate near 0
    Log1p,
    /// `sin x`
    Sin,
    /// `cos x`
    Cos,
    /// `max(x, 0)`; its derivative at 0 is 0
    Relu,
    /// The exact form of GELU: `x * Phi(x)`, Phi the distribution function of the normal
    GeluErf,
    /// The quick form of GELU: `x * sigmoid(1.702 x)`
    GeluQuick,
    /// `Phi(x) = (1 + erf(x / sqrt 2)) / 2`, accurate in both tails
    NormalCdf,
    /// `ln(1 + e^x)`, without overflow
    Softplus,
    /// 1 above 0, else 0. Its gradient is zero: it is flat almost everywhere
    Step,
    /// -1, 0 or 1 as x is below, at or above 0. Its gradient is zero, as that of `Step`
    Sign,
}

impl Unary {
    /// All of them.
    pub const ALL: [Unary; 22] = [
        Unary::Tanh,
        Unary::Sigmoid,
        Unary::Silu,
        Unary::Gelu,
        Unary::Exp,
        Unary::Log,
        Unary::Neg,
        Unary::Abs,
        Unary::Sqr,
        Unary::Sqrt,
        Unary::Rsqrt,
        Unary::Expm1,
        Unary::Log1p,
        Unary::Sin,
        Unary::Cos,
        Unary::Relu,
        Unary::GeluErf,
        Unary::GeluQuick,
        Unary::NormalCdf,
        Unary::Softplus,
        Unary::Step,
        Unary::Sign,
    ];
}

/// The activation of a gated linear unit `act(gate) * up`.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum GluKind {
    /// SwiGLU: `silu(gate) * up`
    Swiglu,
    /// GEGLU: `gelu(gate) * up`, tanh form
    Geglu,
    /// GEGLU with the exact form, [`Unary::GeluErf`]
    GegluErf,
    /// GEGLU with the quick form, [`Unary::GeluQuick`]
    GegluQuick,
    /// ReGLU: `max(gate, 0) * up`
    Reglu,
    /// gpt-oss: `g * sigmoid(alpha g) * (u + 1)` with `g = min(gate, limit)` and
    /// `u = clamp(up, -limit, limit)`; a clamped value has gradient 0
    SwigluOai {
        /// Multiplies the argument of the sigmoid.
        alpha: Real,
        /// The bound, above 0, perhaps infinite.
        limit: Real,
    },
}

impl GluKind {
    /// All of them, with the constants of gpt-oss.
    pub const ALL: [GluKind; 6] = [
        GluKind::Swiglu,
        GluKind::Geglu,
        GluKind::GegluErf,
        GluKind::GegluQuick,
        GluKind::Reglu,
        GluKind::SwigluOai { alpha: Real::new(1.702), limit: Real::new(7.0) },
    ];
}

/// Which operand of a gated linear unit a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum GluOperand {
    /// The activated half.
    Gate,
    /// The linear half.
    Up,
}

/// How rotary embedding pairs the elements of a head.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum RopeStyle {
    /// Neighbours `(2i, 2i+1)` (llama.cpp's "norm").
    Interleaved,
    /// Halves `(i, i + dims/2)` (GPT-NeoX).
    Halves,
}

/// YaRN (Peng and others, 2023), as ggml has it. With the unscaled angle
/// `e = pos base^(-2i/dims) / factor_i` the angle is `(1 - m) freq_scale e + m e`, where
/// `m = ext_factor (1 - clamp((i - low) / max(0.001, high - low), 0, 1))`, and cosines and sines
/// are multiplied by `attn_factor (1 + 0.1 ln(1/freq_scale))`. `low` and `high` are
/// `dims ln(context / (2 pi beta)) / (2 ln base)` for `beta_fast` and `beta_slow`, kept within
/// `0 ..= dims - 1` on the outer sides.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Yarn {
    /// How far to extrapolate; above 0.
    pub ext_factor: Real,
    /// Multiplies cosines and sines.
    pub attn_factor: Real,
    /// Turns within the context from which on a frequency is not scaled.
    pub beta_fast: Real,
    /// Turns within the context up to which a frequency is scaled whole.
    pub beta_slow: Real,
    /// Tokens of the context before it was extended.
    pub context: u32,
    /// Whether `low` is rounded down and `high` up (all models but gpt-oss).
    pub round: bool,
}

/// Positions of several kinds (multi-section rope): each pair of elements turns by one of four.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Sections {
    /// Pairs that turn by the time, height, width and the extra position, one after another and
    /// over again.
    pub sizes: [u32; 4],
    /// Time, height and width alternate instead, each up to its size (Qwen3-VL).
    pub interleaved: bool,
}

impl Sections {
    /// Which of the four positions pair `i` turns by. The rules of ggml's `ggml_mrope_cache_init`.
    pub fn of(&self, i: usize) -> usize {
        let [t, h, w, e] = self.sizes.map(|n| n as usize);
        let at = i % (t + h + w + e).max(1);
        if self.interleaved {
            return match at % 3 {
                1 if at < 3 * h => 1,
                2 if at < 3 * w => 2,
                0 if at < 3 * t => 0,
                _ => 3,
            };
        }
        match at {
            at if at < t => 0,
            at if at < t + h => 1,
            at if at < t + h + w => 2,
            _ => 3,
        }
    }
}

/// The angles of rotary embedding: `theta_i = pos * freq_scale * base^(-2i/dims) / factor_i`.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct RopeAngles {
    /// How many leading elements of each head rotate (even).
    pub dims: usize,
    /// The frequency base.
    pub base: Real,
    /// Linear position scaling (1 / factor of the model's metadata).
    pub freq_scale: Real,
    /// True when the second operand holds `dims/2` frequency factors.
    pub factors: bool,
    /// Context extension that treats frequencies differently.
    pub yarn: Option<Yarn>,
    /// Positions of several kinds.
    pub sections: Option<Sections>,
}

impl RopeAngles {
    /// Plain angles of `dims` elements.
    pub fn plain(dims: usize, base: f32) -> RopeAngles {
        RopeAngles {
            dims,
            base: base.into(),
            freq_scale: 1.0.into(),
            factors: false,
            yarn: None,
            sections: None,
        }
    }
}

/// The attributes of causal attention over the rows of packed sequences and, optionally, their
/// cached prefixes.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct AttentionAttrs {
    /// Multiplies `q . k` (usually `1/sqrt(D)`).
    pub scale: Real,
    /// Sliding window: query `i` sees key `j` only if `i - j < window`. `None` sees all.
    pub window: Option<u32>,
    /// Chunked attention: query `i` sees key `j` only if `j >= i / chunk * chunk`. `None` sees
    /// all.
    pub chunk: Option<u32>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub softcap: Option<Real>,
    /// ALiBi's largest bias (ggml's `max_bias`): `-slope_h * (i - j)` is added to the (capped)
    /// logit of query `i` and key `j`, with the slopes of [`alibi_slope`]. 0 adds
    /// nothing.
    pub alibi: Option<Real>,
    /// True when an operand holds a sink for each query head: a logit that joins the softmax'
    /// denominator and has no value.
    pub sinks: bool,
    /// True when the operands end in `k_pages, v_pages, table`.
    pub prefix: bool,
}

impl AttentionAttrs {
    /// Causal attention and nothing else.
    pub fn new(scale: f32) -> AttentionAttrs {
        AttentionAttrs {
            scale: scale.into(),
            window: None,
            chunk: None,
            softcap: None,
            alibi: None,
            sinks: false,
            prefix: false,
        }
    }

    /// The first position that a query at `position` sees.
    pub fn first_seen(&self, position: usize) -> usize {
        let window = self.window.map_or(0, |w| (position + 1).saturating_sub(w as usize));
        let chunk = self.chunk.map_or(0, |c| position - position % (c.max(1) as usize));
        window.max(chunk)
    }

    /// One past the last position whose query sees the key at `position`.
    pub fn last_seeing(&self, position: usize) -> usize {
        let window = self.window.map_or(usize::MAX, |w| position.saturating_add(w as usize));
        let chunk = self.chunk.map_or(usize::MAX, |c| {
            let c = c.max(1) as usize;
            (position / c + 1).saturating_mul(c)
        });
        window.min(chunk)
    }
}

/// Which operand of attention a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum AttentionOperand {
    /// The queries `[T, Hq, D]`.
    Q,
    /// The rows' own keys `[T, Hkv, D]`.
    K,
    /// The rows' own values `[T, Hkv, Dv]`.
    V,
    /// The sinks `[Hq]`.
    Sinks,
    /// The cached keys `[P, page, Hkv, D]`.
    KPages,
    /// The cached values `[P, page, Hkv, Dv]`.
    VPages,
}

/// How logits become losses: `z = softcap(scale * logit)`.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct CrossEntropyAttrs {
    /// Multiplies the logits (1 for most models).
    pub scale: Real,
    /// Scaled logits `u` become `cap * tanh(u / cap)`.
    pub softcap: Option<Real>,
    /// True when the last operand holds a weight for each row.
    pub weighted: bool,
}

impl CrossEntropyAttrs {
    /// No scale, no cap, no weights.
    pub const PLAIN: CrossEntropyAttrs =
        CrossEntropyAttrs { scale: Real(1.0f32.to_bits()), softcap: None, weighted: false };
}

/// Which operand of [`Op::RmsNorm`] a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum NormOperand {
    /// The normalized rows.
    X,
    /// The weight.
    Weight,
}

/// What [`Op::Norm`] does to each row of the last dimension.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum NormKind {
    /// Layer normalization without weights: `(x - mean) / sqrt(var + eps)`, `var` the mean
    /// square of `x - mean`.
    Layer,
    /// `x / max(|x|, eps)`; where `|x| <= eps` the divisor is a constant.
    L2Clamp,
    /// `x / sqrt(sum x^2 + eps)`
    L2Add,
}

impl NormKind {
    /// All of them.
    pub const ALL: [NormKind; 3] = [NormKind::Layer, NormKind::L2Clamp, NormKind::L2Add];
}

/// The attributes of [`Op::Softmax`].
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct SoftmaxAttrs {
    /// Multiplies `x`.
    pub scale: Real,
    /// True when an operand holds what is added to the logits.
    pub mask: bool,
    /// ALiBi: the mask is multiplied by a slope per head, `2^(-max_bias h/n)` with the exceptions
    /// of ggml where the number of heads is no power of two; 0 multiplies by 1.
    pub max_bias: Real,
    /// True when the last operand holds a logit per head that joins the sum and nothing else.
    pub sinks: bool,
}

impl SoftmaxAttrs {
    /// The plain softmax.
    pub const PLAIN: SoftmaxAttrs =
        SoftmaxAttrs { scale: Real::new(1.0), mask: false, max_bias: Real::new(0.0), sinks: false };
}

/// The slope of ALiBi for one of `heads` heads, as ggml has it: with `n` the greatest power of
/// two not above `heads`, `2^(-max_bias (h+1) / n)` for `h < n`, and
/// `2^(-max_bias/2 (2 (h-n) + 1) / n)` for the rest; 1 when `max_bias` is 0.
pub fn alibi_slope(max_bias: f32, head: usize, heads: usize) -> f32 {
    if max_bias == 0.0 || heads == 0 {
        return 1.0;
    }
    let n = 1usize << heads.ilog2();
    let (step, times) = match head.checked_sub(n) {
        None => (f64::from(max_bias), head + 1),
        Some(over) => (f64::from(max_bias) / 2.0, 2 * over + 1),
    };
    (-step * times as f64 / n as f64).exp2() as f32
}

/// In which order [`Op::TopK`] lists elements.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// The least first.
    Ascending,
    /// The greatest first.
    Descending,
}

/// Which operand of [`Op::Lora`] a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum LoraOperand {
    /// The rows `[T, K]`.
    X,
    /// `A` of one slot `[r, K]`.
    A,
    /// `B` of one slot `[N, r]`.
    B,
}

/// Which operand of [`Op::SsmConv`] a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum SsmConvOperand {
    /// The rows `[T, C]`.
    X,
    /// The taps `[C, W]`.
    Weight,
    /// The entry state `[S, W-1, C]`.
    State,
}

/// Which operand of [`Op::SsmConvState`] a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum SsmConvStateOperand {
    /// The rows `[T, C]`.
    X,
    /// The entry state `[S, W-1, C]`.
    State,
}

/// Which key head a value head reads where there are fewer key heads.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum KeyHeads {
    /// Value head `h` reads key head `h / (Hv / Hk)`: each key head serves neighbours, as
    /// transformers repeats them and llama.cpp does for `qwen3next`.
    Blocks,
    /// Value head `h` reads key head `h % Hk`: ggml's `gated_delta_net`, whose converter has
    /// put the value heads of `qwen35` into that order.
    Cycle,
}

/// The attributes of [`Op::GatedDeltaRule`].
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct GatedDeltaAttrs {
    /// Multiplies what a query reads (usually `1/sqrt(Dk)`).
    pub scale: Real,
    /// Which key head a value head reads.
    pub key_heads: KeyHeads,
}

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
    /// `f16(amax/127)`, codes rounded half away from zero), or from f16/bf16 to f32. What a
    /// cache stores. Straight-through gradient between float types; a block format has none.
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
    /// weights `[N, K]` has `tb = true`.
    MatMul {
        /// Transposes the last two dimensions of `a`.
        ta: bool,
        /// Transposes the last two dimensions of `b`.
        tb: bool,
    },
    /// `(x [T, X, K], w, i ids [T, U]) -> f32 [T, U, N]` with `X` 1 or `U`: row `t` times the
    /// experts it chose, `y[t, u] = op(w[ids[t, u]]) x[t, u]` (`x[t, 0]` where `X` is 1). As in
    /// [`Op::MatMul`], `w` is `[E, N, K]` with `tb` and `[E, K, N]` without; `x` is f32, or q8-rows
    /// with `tb` when `w` is of a block format. An expert that is not chosen is not read.
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
    /// `(f x [T, K], f base [T, N], i rows [T], then per slot: f A [r, K], f B [N, r],
    /// f scale [1]) -> f [T, N]`: `base + scale_s * B_s (A_s x)` for row `t` with
    /// `s = rows[t]`; rows with a negative slot are `base`. Ranks may differ.
    Lora {
        /// How many slots the operands hold.
        slots: usize,
    },
    /// Gradient of [`Op::Lora`]. `X`: `(f dy [T, N], i rows, then A, B, scale per slot) ->
    /// [T, K]`. `A`: `(f x, f dy, i rows, f B, f scale) -> [r, K]` for the given slot:
    /// `sum_t scale * (B^T dy_t) x_t^T`. `B`: `(f x, f dy, i rows, f A, f scale) -> [N, r]`:
    /// `sum_t scale * dy_t (A x_t)^T`.
    LoraBack {
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
    /// `p % page`. Rows of no sequence give zeros. Query head `h` reads key head
    /// `h * Hkv / Hq`. Causal: a row sees its own and earlier positions, within the window and
    /// the chunk. A logit is `scale * q . k`, capped, then biased; the softmax' denominator
    /// also counts `exp(sink_h)`. Pages are f32, f16, bf16 or Q8_0 (blocks along the last
    /// dimension).
    Attention(AttentionAttrs),
    /// `(q, k, i seqs [, sinks] [, k_pages, table]) -> f [T, Hq]`: the log-sum-exp of each
    /// row's logits and its sink, 0 for rows of no sequence.
    AttentionStats(AttentionAttrs),
    /// `(q, k, v, i seqs, f lse [T, Hq], f delta [T, Hq], f dout [T, Hq, Dv] [, sinks]
    /// [, k_pages, v_pages, table]) -> f32 of the operand's shape`. With
    /// `p = exp(logit - lse)`, `ds = p * (dout . v - delta)` (times the cap's derivative),
    /// `delta = sum(dout * out)`: `Q`: `scale * ds k`; `K`: `scale * ds^T q`; `V`: `p^T dout`,
    /// summed over the query heads that share a key head; `Sinks`:
    /// `-sum over rows of exp(sink - lse) * delta`; `KPages` and `VPages`: as `K` and `V`, added
    /// up sequence by sequence where a page is of several, 0 in slots of none; straight through
    /// where pages are not f32.
    AttentionBack {
        /// As in the forward op.
        attrs: AttentionAttrs,
        /// The operand it is for.
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
    /// `(f x, f dt, f a, f b, f c, f state, i seqs, f dy as the result of SsmScan) -> f
    /// [x + dt + S*a + parts*b + parts*c + state]` (sizes of the operands): gradients of
    /// [`Op::SsmScan`], in that order.
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
    /// `(f q, f k, f v, f g, f beta, f state, i seqs, f dy as the result of GatedDeltaRule) ->
    /// f [q + k + v + g + beta + state]` (sizes of the operands): gradients of
    /// [`Op::GatedDeltaRule`], in that order.
    ///
    /// With `dS` the gradient of the state, tokens descending: `dq = scale * S dy`;
    /// `dS += scale * q dy^T`; `dd = dS^T k`; `dv = beta dd`; `dbeta = dd . (v - u)`;
    /// `du = -beta dd`; `dk = dS d + S' du`; `dS += k du^T`; `dg = sum dS * S'` (of the head or
    /// of each row); `dS = exp(g) * dS`. `dq` and `dk` sum over the value heads that share a
    /// key head.
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
            Op::Lora { .. } => "Lora",
            Op::LoraBack { .. } => "LoraBack",
            Op::Attention(_) => "Attention",
            Op::AttentionStats(_) => "AttentionStats",
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
