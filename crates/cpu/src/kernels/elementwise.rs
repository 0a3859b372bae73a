//! Functions of each element: binary, unary, affine, gated linear units and their gradients.

use std::ops::Range;

use graph::{Binary, Call, GluKind, GluOperand, MAX_RANK, Op, Shape, Unary};

use super::{Support, TILE_ELEMENTS, Tiles, memory};
use crate::job::Job;
use crate::simd::{LANES, Simd, Task};
use graph::{DType, Needs};

/// Operands may have any strides.
pub(super) fn supports(call: &Call<'_>) -> Support {
    for i in 0..call.args.len() {
        memory(call, i, DType::F32)?;
    }
    Ok(Needs::default())
}

fn grid(job: &Job<'_>) -> Tiles {
    Tiles::new(job.out.shape.elements(), TILE_ELEMENTS)
}

pub(super) fn tiles(job: &Job<'_>) -> usize {
    grid(job).count
}

/// The elements of a tile.
pub(super) fn range(job: &Job<'_>, tile: usize) -> Range<usize> {
    grid(job).range(tile)
}

/// The elements of a dense result in runs along which every operand has a fixed stride.
pub(super) struct Runs<const N: usize> {
    /// Elements of a run.
    pub(super) len: usize,
    /// Each operand's elements between neighbours of a run.
    pub(super) strides: [usize; N],
    /// Dimensions outside of a run, innermost first: sizes and strides.
    outer: [(usize, [usize; N]); MAX_RANK],
}

impl<const N: usize> Runs<N> {
    /// Walks a result of shape `out` along operands of these shapes and strides, aligned at the
    /// last dimension; a dimension of size 1 (or absent) stretches.
    pub(super) fn new(out: &Shape, operands: [(&Shape, &[usize; MAX_RANK]); N]) -> Runs<N> {
        let rank = out.rank();
        let mut runs = Runs { len: 1, strides: [0; N], outer: [(1, [0; N]); MAX_RANK] };
        // 0 while the run itself grows, then one more than the outer dimension that does.
        let mut level = 0;
        for i in (0..rank).rev() {
            let size = out.dim(i);
            if size == 1 {
                continue;
            }
            let strides =
                operands.map(|(shape, strides)| match (i + shape.rank()).checked_sub(rank) {
                    Some(d) if shape.dim(d) != 1 => strides[d],
                    _ => 0,
                });
            let (inner_size, inner) = match level {
                0 => (runs.len, runs.strides),
                l => runs.outer[l - 1],
            };
            let first = inner_size == 1;
            let merges = (0..N).all(|j| strides[j] == inner[j] * inner_size);
            if first {
                match level {
                    0 => (runs.len, runs.strides) = (size, strides),
                    l => runs.outer[l - 1] = (size, strides),
                }
            } else if merges {
                match level {
                    0 => runs.len *= size,
                    l => runs.outer[l - 1].0 *= size,
                }
            } else {
                level += 1;
                runs.outer[level - 1] = (size, strides);
            }
        }
        runs
    }

    /// The offsets of the operands at the start of run `i`.
    #[inline(always)]
    pub(super) fn offsets(&self, i: usize) -> [usize; N] {
        let (mut i, mut at) = (i, [0; N]);
        for (size, strides) in self.outer {
            if i == 0 {
                break;
            }
            let index = i % size;
            i /= size;
            for (a, s) in at.iter_mut().zip(strides) {
                *a += index * s;
            }
        }
        at
    }
}

/// A function of `N` elements.
trait Map<const N: usize>: Copy {
    fn apply<S: Simd>(self, s: S, x: [S::F32; N]) -> S::F32;
}

/// Applies a function to a range of a job's elements.
struct Apply<'a, F, const N: usize> {
    f: F,
    job: &'a Job<'a>,
    range: Range<usize>,
}

impl<F: Map<N>, const N: usize> Task for Apply<'_, F, N> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let inputs: [_; N] = std::array::from_fn(|j| self.job.input(j));
        let shapes = std::array::from_fn(|j| (&inputs[j].arg.shape, &inputs[j].arg.layout.strides));
        let runs = Runs::new(&self.job.out.shape, shapes);
        let mut at = self.range.start;
        while at < self.range.end {
            let (run, from) = (at / runs.len, at % runs.len);
            let n = (runs.len - from).min(self.range.end - at);
            let starts = runs.offsets(run);
            let x: [*const f32; N] = std::array::from_fn(|j| {
                inputs[j].ptr::<f32>().wrapping_add(starts[j] + from * runs.strides[j])
            });
            let to = self.job.out::<f32>().wrapping_add(at);
            // SAFETY: elements `at .. at + n` of the result are this tile's, and those of the
            // operands are where their layouts say.
            unsafe { along(s, self.f, to, x, runs.strides, n) };
            at += n;
        }
    }
}

/// Writes `n` elements.
///
/// # Safety
/// `to` must be valid for `n` writes, each operand for `n` reads a stride apart.
#[inline(always)]
unsafe fn along<S: Simd, F: Map<N>, const N: usize>(
    s: S,
    f: F,
    to: *mut f32,
    x: [*const f32; N],
    strides: [usize; N],
    n: usize,
) {
    let mut i = 0;
    while i + LANES <= n {
        let mut v = [s.zero(); N];
        for j in 0..N {
            // SAFETY: the caller's.
            v[j] = unsafe { fetch(s, x[j].wrapping_add(i * strides[j]), strides[j], LANES) };
        }
        // SAFETY: the caller's.
        unsafe { s.store(to.add(i), f.apply(s, v)) };
        i += LANES;
    }
    if i < n {
        let mut v = [s.zero(); N];
        for j in 0..N {
            // SAFETY: the caller's.
            v[j] = unsafe { fetch(s, x[j].wrapping_add(i * strides[j]), strides[j], n - i) };
        }
        // SAFETY: the caller's.
        unsafe { s.store_first(to.add(i), f.apply(s, v), n - i) };
    }
}

/// Reads the next `n` (at most 16) elements, `stride` apart.
///
/// # Safety
/// `from` must be valid for those reads.
#[inline(always)]
unsafe fn fetch<S: Simd>(s: S, from: *const f32, stride: usize, n: usize) -> S::F32 {
    // SAFETY: the caller's.
    unsafe {
        match stride {
            1 if n == LANES => s.load(from),
            1 => s.load_first(from, n),
            0 => s.splat(*from),
            _ => {
                let mut lanes = [0.0; LANES];
                for (i, lane) in lanes.iter_mut().enumerate().take(n) {
                    *lane = *from.add(i * stride);
                }
                s.load(lanes.as_ptr())
            }
        }
    }
}

macro_rules! maps {
    ($($name:ident, $n:literal: |$s:ident, $x:pat_param| $e:expr;)*) => { $(
        #[derive(Copy, Clone)]
        struct $name;
        impl Map<$n> for $name {
            #[inline(always)]
            fn apply<S: Simd>(self, $s: S, $x: [S::F32; $n]) -> S::F32 {
                $e
            }
        }
    )* };
}

maps! {
    Add, 2: |s, [a, b]| s.add(a, b);
    Sub, 2: |s, [a, b]| s.sub(a, b);
    Mul, 2: |s, [a, b]| s.mul(a, b);
    Div, 2: |s, [a, b]| s.div(a, b);
    // Of equals the first; the machine's own would give the second.
    Min, 2: |s, [a, b]| s.select(s.lt(b, a), b, a);
    Max, 2: |s, [a, b]| s.select(s.lt(a, b), b, a);
}

/// A function of one element; chosen per vector, which costs nothing beside the function and
/// keeps one loop for all of them.
#[derive(Copy, Clone)]
struct Function(Unary);

impl Map<1> for Function {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [x]: [S::F32; 1]) -> S::F32 {
        let (zero, one) = (s.zero(), s.splat(1.0));
        match self.0 {
            Unary::Tanh => s.tanh(x),
            Unary::Sigmoid => s.sigmoid(x),
            Unary::Silu => s.mul(x, s.sigmoid(x)),
            Unary::Gelu => gelu(s, x),
            Unary::Exp => s.exp(x),
            Unary::Log => s.log(x),
            Unary::Neg => s.neg(x),
            Unary::Abs => s.abs(x),
            Unary::Sqr => s.mul(x, x),
            Unary::Sqrt => s.sqrt(x),
            Unary::Rsqrt => s.div(one, s.sqrt(x)),
            Unary::Expm1 => s.expm1(x),
            Unary::Log1p => s.log1p(x),
            Unary::Sin => s.lane_by_lane(x, f64::sin),
            Unary::Cos => s.lane_by_lane(x, f64::cos),
            Unary::Relu => s.select(s.lt(zero, x), x, zero),
            Unary::GeluErf => s.mul(x, s.lane_by_lane(x, normal_cdf)),
            Unary::GeluQuick => s.mul(x, s.sigmoid(s.mul(x, s.splat(QUICK)))),
            Unary::NormalCdf => s.lane_by_lane(x, normal_cdf),
            // The part above 0 exactly, and what is left without overflow.
            Unary::Softplus => {
                let tail = s.log1p(s.exp(s.neg(s.abs(x))));
                s.add(s.select(s.lt(zero, x), x, zero), tail)
            }
            Unary::Step => s.select(s.lt(zero, x), one, zero),
            Unary::Sign => {
                let sign = s.select(s.lt(x, zero), s.splat(-1.0), zero);
                s.select(s.lt(zero, x), one, sign)
            }
        }
    }
}

/// A gated linear unit and its gradients, chosen per vector like [`Function`].
#[derive(Copy, Clone)]
struct Glu(GluKind);
#[derive(Copy, Clone)]
struct GluUp(GluKind);
#[derive(Copy, Clone)]
struct GluGate(GluKind);

impl Map<2> for Glu {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [gate, up]: [S::F32; 2]) -> S::F32 {
        s.mul(activation(s, self.0, gate), linear(s, self.0, up))
    }
}

impl Map<3> for GluUp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [gate, up, dy]: [S::F32; 3]) -> S::F32 {
        let dx = s.mul(dy, activation(s, self.0, gate));
        match self.0 {
            GluKind::SwigluOai { limit, .. } => {
                s.select(s.lt(s.abs(up), s.splat(limit.get())), dx, s.zero())
            }
            _ => dx,
        }
    }
}

impl Map<3> for GluGate {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [gate, up, dy]: [S::F32; 3]) -> S::F32 {
        let dy = s.mul(dy, linear(s, self.0, up));
        match self.0 {
            GluKind::Swiglu => s.mul(dy, swish_slope(s, s.splat(1.0), gate)),
            GluKind::Geglu => s.mul(dy, gelu_slope(s, gate)),
            GluKind::GegluErf => s.mul(dy, s.lane_by_lane(gate, gelu_erf_slope)),
            GluKind::GegluQuick => s.mul(dy, swish_slope(s, s.splat(QUICK), gate)),
            GluKind::Reglu => s.select(s.lt(s.zero(), gate), dy, s.zero()),
            GluKind::SwigluOai { alpha, limit } => {
                let dx = s.mul(dy, swish_slope(s, s.splat(alpha.get()), gate));
                s.select(s.lt(gate, s.splat(limit.get())), dx, s.zero())
            }
        }
    }
}

#[inline(always)]
fn activation<S: Simd>(s: S, kind: GluKind, x: S::F32) -> S::F32 {
    match kind {
        GluKind::Swiglu => s.mul(x, s.sigmoid(x)),
        GluKind::Geglu => gelu(s, x),
        GluKind::GegluErf => s.mul(x, s.lane_by_lane(x, normal_cdf)),
        GluKind::GegluQuick => s.mul(x, s.sigmoid(s.mul(x, s.splat(QUICK)))),
        GluKind::Reglu => s.select(s.lt(s.zero(), x), x, s.zero()),
        GluKind::SwigluOai { alpha, limit } => {
            let x = s.min(s.splat(limit.get()), x);
            s.mul(x, s.sigmoid(s.mul(x, s.splat(alpha.get()))))
        }
    }
}

/// What the linear half multiplies by.
#[inline(always)]
fn linear<S: Simd>(s: S, kind: GluKind, up: S::F32) -> S::F32 {
    match kind {
        GluKind::SwigluOai { limit, .. } => {
            let limit = limit.get();
            let kept = s.min(s.splat(limit), s.max(s.splat(-limit), up));
            s.add(kept, s.splat(1.0))
        }
        _ => up,
    }
}

#[derive(Copy, Clone)]
struct Clamp {
    min: f32,
    max: f32,
}

impl Map<1> for Clamp {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [x]: [S::F32; 1]) -> S::F32 {
        s.min(s.splat(self.max), s.max(s.splat(self.min), x))
    }
}

#[derive(Copy, Clone)]
struct ClampBack {
    min: f32,
    max: f32,
}

impl Map<2> for ClampBack {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [x, dy]: [S::F32; 2]) -> S::F32 {
        let below = s.select(s.lt(x, s.splat(self.max)), dy, s.zero());
        s.select(s.lt(s.splat(self.min), x), below, s.zero())
    }
}

#[derive(Copy, Clone)]
struct Affine {
    scale: f32,
    bias: f32,
}

impl Map<1> for Affine {
    #[inline(always)]
    fn apply<S: Simd>(self, s: S, [x]: [S::F32; 1]) -> S::F32 {
        s.fma(s.splat(self.scale), x, s.splat(self.bias))
    }
}

/// Of the quick form of GELU.
const QUICK: f32 = 1.702;

/// `sigmoid(x)` and `sigmoid(-x)`, which is 1 less that without its cancellation.
#[inline(always)]
fn sigmoids<S: Simd>(s: S, x: S::F32) -> (S::F32, S::F32) {
    let one = s.splat(1.0);
    let e = s.exp(s.neg(s.abs(x)));
    let whole = s.add(one, e);
    let (small, large) = (s.div(e, whole), s.div(one, whole));
    let below = s.lt(x, s.zero());
    (s.select(below, small, large), s.select(below, large, small))
}

/// The derivative of `x sigmoid(c x)`: `p (1 + c x q)` with `p = sigmoid(c x)`, `q = 1 - p`.
#[inline(always)]
fn swish_slope<S: Simd>(s: S, c: S::F32, x: S::F32) -> S::F32 {
    let x = s.mul(c, x);
    let (p, q) = sigmoids(s, x);
    s.mul(p, s.fma(x, q, s.splat(1.0)))
}

/// The distribution function of the normal.
fn normal_cdf(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

/// `Phi(x) + x Phi'(x)`
fn gelu_erf_slope(x: f64) -> f64 {
    // 1 / sqrt(2 pi)
    const PEAK: f64 = 0.398_942_280_401_432_7;
    normal_cdf(x) + x * PEAK * (-0.5 * x * x).exp()
}

/// `2 sqrt(2/pi)` and 0.044715 times that: `2 u = x (c + d x^2)`.
const GELU_LINEAR: f32 = 1.595_769;
const GELU_CUBIC: f32 = 0.071_354_82;

/// `sigmoid(2 u)` for the `u` of GELU, which is `(1 + tanh u) / 2` without its cancellation, and
/// 1 less that. Away from 0 the argument's rounding would be the largest error, so it is carried
/// along.
#[inline(always)]
fn gelu_gates<S: Simd>(s: S, x: S::F32) -> (S::F32, S::F32) {
    if const { !S::FUSED } {
        let gate = |x| s.lane_by_lane(x, |x| 1.0 / (1.0 + (-gelu_argument(x)).exp()));
        return (gate(x), gate(s.neg(x)));
    }
    let (linear, cubic) = (s.splat(GELU_LINEAR), s.splat(GELU_CUBIC));
    let square = s.mul(x, x);
    let inner = s.fma(square, cubic, linear);
    let lost = s.fma(square, cubic, s.sub(linear, inner));
    let lost = s.fma(s.fma(x, x, s.neg(square)), cubic, lost);
    let argument = s.mul(x, inner);
    let lost = s.fma(x, lost, s.fma(x, inner, s.neg(argument)));
    let (p, q) = sigmoids(s, argument);
    // Far out the argument may have overflowed, and there is nothing to correct.
    let spread = s.mul(p, q);
    let lost = s.select(s.eq(spread, s.zero()), s.zero(), s.mul(spread, lost));
    (s.add(p, lost), s.sub(q, lost))
}

/// The argument in f64.
fn gelu_argument(x: f64) -> f64 {
    1.595_769_121_605_730_8 * x * (1.0 + 0.044_715 * x * x)
}

#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    s.mul(x, gelu_gates(s, x).0)
}

/// `p (1 + q x (2 u)')` with `p = sigmoid(2 u)`, `q = 1 - p`.
#[inline(always)]
fn gelu_slope<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let (p, q) = gelu_gates(s, x);
    let inner = s.fma(s.mul(x, x), s.splat(3.0 * GELU_CUBIC), s.splat(GELU_LINEAR));
    let slope = s.mul(p, s.fma(q, s.mul(x, inner), s.splat(1.0)));
    // Far out, where the slope is that of a line, the product may have overflowed.
    s.select(s.eq(s.mul(p, q), s.zero()), p, slope)
}

fn apply<F: Map<N>, const N: usize>(job: &Job<'_>, f: F, tile: usize) {
    job.isa.run(Apply { f, job, range: range(job, tile) });
}

fn fill_tile(job: &Job<'_>, value: f32, tile: usize) {
    let range = range(job, tile);
    let to = job.out::<f32>().wrapping_add(range.start);
    // SAFETY: the range's elements of the result are this tile's.
    unsafe { std::slice::from_raw_parts_mut(to, range.len()) }.fill(value);
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize) {
    match job.op {
        Op::Binary(Binary::Add) => apply(job, Add, tile),
        Op::Binary(Binary::Sub) => apply(job, Sub, tile),
        Op::Binary(Binary::Mul) => apply(job, Mul, tile),
        Op::Binary(Binary::Div) => apply(job, Div, tile),
        Op::Binary(Binary::Min) => apply(job, Min, tile),
        Op::Binary(Binary::Max) => apply(job, Max, tile),
        Op::Unary(f) => apply(job, Function(*f), tile),
        Op::Clamp { min, max } => apply(job, Clamp { min: min.get(), max: max.get() }, tile),
        Op::ClampBack { min, max } => {
            apply(job, ClampBack { min: min.get(), max: max.get() }, tile);
        }
        Op::Fill { value, .. } => fill_tile(job, value.get(), tile),
        Op::Affine { scale, bias } => {
            apply(job, Affine { scale: scale.get(), bias: bias.get() }, tile);
        }
        Op::Glu(kind) => apply(job, Glu(*kind), tile),
        Op::GluBack { kind, wrt: GluOperand::Up } => apply(job, GluUp(*kind), tile),
        Op::GluBack { kind, wrt: GluOperand::Gate } => apply(job, GluGate(*kind), tile),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Family, Isa};

    #[test]
    fn runs_reach_every_element() {
        let shape = |dims: &[usize]| Shape::new(dims).unwrap();
        // A permuted operand, a broadcast one and a dense one.
        let out = shape(&[2, 3, 4, 5]);
        let permuted = [60, 5, 15, 1, 0, 0];
        let (row, row_strides) = (shape(&[4, 1]), [1, 1, 0, 0, 0, 0]);
        let dense = out.strides();
        let runs = Runs::new(&out, [(&out, &permuted), (&row, &row_strides), (&out, &dense)]);
        assert_eq!(runs.len, 5);
        for at in 0..out.elements() {
            let index = [at / 60, at / 20 % 3, at / 5 % 4, at % 5];
            let offsets = runs.offsets(at / runs.len);
            let got: Vec<usize> =
                (0..3).map(|j| offsets[j] + at % runs.len * runs.strides[j]).collect();
            let expected = [index[0] * 60 + index[1] * 5 + index[2] * 15 + index[3], index[2], at];
            assert_eq!(got, expected);
        }
        let runs = Runs::new(&out, [(&out, &dense), (&out, &dense)]);
        assert_eq!((runs.len, runs.strides), (120, [1, 1]));
    }

    /// GELU's gates and its slope of some numbers.
    struct Gelu<'a>(&'a [f32]);

    impl Task for Gelu<'_> {
        type Out = [Vec<f32>; 3];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [Vec<f32>; 3] {
            let mut out = [const { Vec::new() }; 3];
            for x in self.0.chunks(LANES) {
                // SAFETY: the chunk has so many elements, the array 16.
                let x = unsafe { s.load_first(x.as_ptr(), x.len()) };
                let (p, q) = gelu_gates(s, x);
                for (out, v) in out.iter_mut().zip([p, q, gelu_slope(s, x)]) {
                    let mut lanes = [0.0; LANES];
                    // SAFETY: as above.
                    unsafe { s.store(lanes.as_mut_ptr(), v) };
                    out.extend(lanes);
                }
            }
            out.map(|mut v| {
                v.truncate(self.0.len());
                v
            })
        }
    }

    fn families() -> impl Iterator<Item = Isa> {
        Family::ALL.into_iter().filter_map(Isa::of)
    }

    /// Where a gate is small, its relative error is the argument's absolute one. Measured: 2.7 units
    /// of 2^-24 on average where products are fused, of which the coefficients' own rounding is
    /// most (4.9 where a term of what is carried along has the wrong sign), and 0.4 elsewhere.
    #[test]
    fn gates_of_gelu_are_as_exact_as_their_coefficients() {
        let x: Vec<f32> = (0..4096).map(|i| -3.0 - 2.5 * i as f32 / 4096.0).collect();
        let negated: Vec<f32> = x.iter().map(|x| -x).collect();
        for isa in families() {
            let [p, q, _] = isa.run(Gelu(&x));
            let error = |(&p, &x): (&f32, &f32)| {
                let expected = 1.0 / (1.0 + (-gelu_argument(f64::from(x))).exp());
                (f64::from(p) / expected - 1.0).abs() * f64::from(1 << 24)
            };
            let mean = p.iter().zip(&x).map(error).sum::<f64>() / x.len() as f64;
            println!("{:?}: {mean} units", isa.family());
            assert!(mean < 3.5, "{:?}: {mean} units", isa.family());
            // What is left of 1 is the gate of the other sign, to the bit.
            let [of_negated, rest, _] = isa.run(Gelu(&negated));
            assert!(p == rest && q == of_negated, "{:?}", isa.family());
        }
    }

    /// Where the argument's cube overflows, GELU is a line.
    #[test]
    fn far_out_the_slope_of_gelu_is_0_or_1() {
        let x = [1e5, 1e13, 1e20, f32::MAX, -1e5, -1e13, -1e20, f32::MIN];
        for isa in families() {
            let [_, _, slopes] = isa.run(Gelu(&x));
            assert_eq!(slopes, [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{:?}", isa.family());
        }
    }
}
