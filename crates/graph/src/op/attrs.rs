//! What ops are parameterized by: kinds, constants, and which operand a gradient is for.

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
    /// True for those that take about as long as an exponential.
    pub fn is_transcendental(self) -> bool {
        use Unary::{Abs, Neg, Relu, Rsqrt, Sign, Sqr, Sqrt, Step};
        !matches!(self, Abs | Neg | Relu | Rsqrt | Sign | Sqr | Sqrt | Step)
    }

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

/// Which operands of attention, beside the queries, a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum AttentionOperand {
    /// The rows' own keys `[T, Hkv, D]` and values `[T, Hkv, Dv]`.
    Own,
    /// The sinks `[Hq]`.
    Sinks,
    /// The cached keys `[P, page, Hkv, D]` and values `[P, page, Hkv, Dv]`.
    Pages,
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

/// Which operand of [`Op::RmsNorm`](crate::Op::RmsNorm) a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum NormOperand {
    /// The normalized rows.
    X,
    /// The weight.
    Weight,
}

/// What [`Op::Norm`](crate::Op::Norm) does to each row of the last dimension.
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

/// The attributes of [`Op::Softmax`](crate::Op::Softmax).
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

/// In which order [`Op::TopK`](crate::Op::TopK) lists elements.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum Order {
    /// The least first.
    Ascending,
    /// The greatest first.
    Descending,
}

/// Which operand of [`Op::Lora`](crate::Op::Lora) or [`Op::LoraExperts`](crate::Op::LoraExperts) a
/// gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum LoraOperand {
    /// The rows `[T, K]`, or `[T, X, K]`.
    X,
    /// `A` of one slot `[r, K]`, or `[E, r, K]`.
    A,
    /// `B` of one slot `[N, r]`, or `[E, N, r]`.
    B,
}

/// Which operand of [`Op::SsmConv`](crate::Op::SsmConv) a gradient is for.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum SsmConvOperand {
    /// The rows `[T, C]`.
    X,
    /// The taps `[C, W]`.
    Weight,
    /// The entry state `[S, W-1, C]`.
    State,
}

/// Which operand of [`Op::SsmConvState`](crate::Op::SsmConvState) a gradient is for.
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

/// The attributes of [`Op::GatedDeltaRule`](crate::Op::GatedDeltaRule).
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct GatedDeltaAttrs {
    /// Multiplies what a query reads (usually `1/sqrt(Dk)`).
    pub scale: Real,
    /// Which key head a value head reads.
    pub key_heads: KeyHeads,
}
