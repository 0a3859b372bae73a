use super::*;

/// Runs a function of one vector in every family of this processor.
fn each(
    inputs: &[f32],
    f: impl Fn(Isa, &[f32; LANES]) -> [f32; LANES],
    mut check: impl FnMut(Family, f32, f32),
) {
    for isa in Family::ALL.into_iter().filter_map(Isa::of) {
        for chunk in inputs.chunks(LANES) {
            let mut x = [chunk[0]; LANES];
            x[..chunk.len()].copy_from_slice(chunk);
            let y = f(isa, &x);
            for (&x, y) in x.iter().zip(y) {
                check(isa.family(), x, y);
            }
        }
    }
}

#[derive(Copy, Clone)]
enum Function {
    Exp,
    Log,
    Tanh,
    Sigmoid,
    Even,
    Away,
    Neg,
}

struct Apply<'a>(Function, &'a [f32; LANES]);

impl Task for Apply<'_> {
    type Out = [f32; LANES];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: both arrays have 16 elements.
        unsafe {
            let x = s.load(self.1.as_ptr());
            let y = match self.0 {
                Function::Exp => s.exp(x),
                Function::Log => s.log(x),
                Function::Tanh => s.tanh(x),
                Function::Sigmoid => s.sigmoid(x),
                Function::Even => s.round_half_even(x),
                Function::Away => s.round_half_away(x),
                Function::Neg => s.neg(x),
            };
            s.store(out.as_mut_ptr(), y);
        }
        out
    }
}

/// |a - b| in units of the last place of `b`, counting subnormals as they are.
fn ulps(a: f32, exact: f64) -> f64 {
    let b = exact as f32;
    if a == b || (a.is_nan() && b.is_nan()) {
        return 0.0;
    }
    let ulp = f64::from(b.abs().max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON) / 2.0;
    (f64::from(a) - exact).abs() / ulp
}

/// Floats spread over all exponents and signs, and over a range.
fn spread(range: f32) -> Vec<f32> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 32) as u32
    };
    let mut out: Vec<f32> = (0..20_000).map(|_| f32::from_bits(next())).collect();
    out.extend((0..40_000).map(|_| (next() as f32 / 2f32.powi(31) - 1.0) * range));
    out.extend([0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, -1.0, 1e-30, -1e-30]);
    out.extend([
        88.72, 88.73, 89.0, -87.33, -87.34, -103.0, -103.97, -104.0, -200.0, 0.625, -0.625,
    ]);
    out
}

fn accuracy(f: Function, exact: fn(f64) -> f64, range: f32, bound: f64) {
    let mut worst = 0.0;
    each(
        &spread(range),
        |isa, x| isa.run(Apply(f, x)),
        |family, x, y| {
            let e = ulps(y, exact(f64::from(x)));
            assert!(e <= bound, "{family:?}: f({x:e}) = {y:e}, {e} half-ulps");
            worst = e.max(worst);
        },
    );
    assert!(worst > 0.0, "nothing was compared");
}

#[test]
fn exp_is_accurate() {
    accuracy(Function::Exp, f64::exp, 105.0, 4.0);
}

#[test]
fn log_is_accurate() {
    accuracy(Function::Log, f64::ln, 10.0, 4.0);
}

#[test]
fn tanh_is_accurate() {
    accuracy(Function::Tanh, f64::tanh, 3.0, 6.0);
}

#[test]
fn sigmoid_is_accurate() {
    accuracy(Function::Sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 30.0, 6.0);
}

#[test]
fn rounding_is_exact() {
    let mut inputs: Vec<f32> = (-300..300).map(|i| i as f32 * 0.5).collect();
    inputs.extend([0.499_999_97, -0.499_999_97, 4_194_303.5, 2.499_999_8]);
    each(
        &inputs,
        |isa, x| isa.run(Apply(Function::Even, x)),
        |f, x, y| {
            assert_eq!(y, x.round_ties_even(), "{f:?} {x}");
        },
    );
    each(
        &inputs,
        |isa, x| isa.run(Apply(Function::Away, x)),
        |f, x, y| {
            assert_eq!(y, x.round(), "{f:?} {x}");
        },
    );
    each(
        &[0.0, -0.0, 1.0, -2.0],
        |isa, x| isa.run(Apply(Function::Neg, x)),
        |f, x, y| {
            assert_eq!(y.to_bits(), (-x).to_bits(), "{f:?} {x}");
        },
    );
}

/// Memory ops of the first `n` elements, for every `n`.
struct Partial<'a>(&'a [f32], &'a [u16], usize);

impl Task for Partial<'_> {
    type Out = [Vec<f32>; 6];
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [Vec<f32>; 6] {
        let Partial(x, h, n) = self;
        let mut out = [const { [7.0f32; 18] }; 3];
        let mut bits = [const { [7u16; 18] }; 3];
        // SAFETY: the inputs hold `n` elements, the outputs 18.
        unsafe {
            s.store_first(out[0].as_mut_ptr(), s.load_first(x.as_ptr(), n), n);
            s.store(out[1].as_mut_ptr(), s.load_f16_first(h.as_ptr(), n));
            s.store(out[2].as_mut_ptr(), s.load_bf16_first(h.as_ptr(), n));
            let v = s.load_first(x.as_ptr(), n);
            s.store_f16_first(bits[0].as_mut_ptr(), v, n);
            s.store_u16_first(bits[1].as_mut_ptr(), s.to_bf16_bits(v), n);
            s.store_u16_first(bits[2].as_mut_ptr(), s.i32_splat(0x1_0003), n);
        }
        let [a, b, c] = out.map(|o| o.to_vec());
        let [d, e, f] = bits.map(|o| o.iter().map(|&b| f32::from(b)).collect());
        [a, b, c, d, e, f]
    }
}

#[test]
fn partial_memory_ops_touch_only_their_lanes() {
    let values: Vec<f32> = (0..16).map(|i| (i as f32 - 7.3) * 1.37e3).collect();
    let halves: Vec<u16> = values.iter().map(|&v| half::f16::from_f32(v).to_bits()).collect();
    for isa in Family::ALL.into_iter().filter_map(Isa::of) {
        for n in 0..=16 {
            // Exactly sized, so that a sanitizer or a page edge would catch an over-read.
            let (x, h) = (values[..n].to_vec(), halves[..n].to_vec());
            let got = isa.run(Partial(&x, &h, n));
            for i in 0..18 {
                let inside = i < n;
                let lane = |v: f32| {
                    if inside {
                        v
                    } else if i < 16 {
                        0.0
                    } else {
                        7.0
                    }
                };
                let kept = |v: f32| if inside { v } else { 7.0 };
                let (v, h) = if inside { (x[i], h[i]) } else { (0.0, 0) };
                assert_eq!(got[0][i], kept(v));
                assert_eq!(got[1][i], lane(half::f16::from_bits(h).to_f32()));
                assert_eq!(got[2][i], lane(half::bf16::from_bits(h).to_f32()));
                assert_eq!(got[3][i], kept(f32::from(h)));
                assert_eq!(got[4][i], kept(f32::from(half::bf16::from_f32(v).to_bits())));
                assert_eq!(got[5][i], kept(3.0));
            }
        }
    }
}

struct Narrow<'a>(&'a [f32; LANES]);

impl Task for Narrow<'_> {
    type Out = ([u16; LANES], [u16; LANES]);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Out {
        let mut out = ([0; LANES], [0; LANES]);
        // SAFETY: all arrays have 16 elements.
        unsafe {
            let x = s.load(self.0.as_ptr());
            s.store_f16(out.0.as_mut_ptr(), x);
            s.store_u16(out.1.as_mut_ptr(), s.to_bf16_bits(x));
        }
        out
    }
}

#[test]
fn narrow_floats_equal_half() {
    let inputs = spread(70_000.0);
    for isa in Family::ALL.into_iter().filter_map(Isa::of) {
        for x in inputs.as_chunks().0 {
            let (h, b) = isa.run(Narrow(x));
            for i in 0..LANES {
                let (eh, eb) = (half::f16::from_f32(x[i]), half::bf16::from_f32(x[i]));
                if x[i].is_nan() {
                    assert!(half::f16::from_bits(h[i]).is_nan());
                    assert!(half::bf16::from_bits(b[i]).is_nan());
                } else {
                    assert_eq!(h[i], eh.to_bits(), "{} as f16", x[i]);
                    assert_eq!(b[i], eb.to_bits(), "{} as bf16", x[i]);
                }
            }
        }
    }
}

struct Lanewise<'a>(&'a [f32; 256], &'a [i8; LANES]);

struct LanewiseOut {
    transposed: [f32; 256],
    sum: f32,
    max: f32,
    int_sum: i32,
    int_max: i32,
    stored: [i8; LANES],
    between: [f32; LANES],
    unzipped: [f32; 32],
    zipped: [f32; 32],
}

impl Task for Lanewise<'_> {
    type Out = LanewiseOut;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> LanewiseOut {
        // SAFETY: row `i` of the matrices is 16 elements at `16 i`.
        unsafe {
            let mut rows: [S::F32; LANES] =
                std::array::from_fn(|i| s.load(self.0.as_ptr().add(16 * i)));
            let (sum, max) = (s.reduce_sum(rows[3]), s.reduce_max(rows[3]));
            s.transpose(&mut rows);
            let mut transposed = [0.0; 256];
            for (i, &row) in rows.iter().enumerate() {
                s.store(transposed.as_mut_ptr().add(16 * i), row);
            }
            let ints = s.load_i8(self.1.as_ptr());
            let mut stored = [0; LANES];
            s.store_i8(stored.as_mut_ptr(), s.i32_shl::<1>(ints));
            let mut between = [0.0; LANES];
            s.store(between.as_mut_ptr(), s.select(s.between(3, 11), s.splat(1.0), s.splat(2.0)));
            let (a, b) = (s.load(self.0.as_ptr()), s.load(self.0.as_ptr().add(16)));
            let (even, odd) = s.unzip(a, b);
            let (mut unzipped, mut zipped) = ([0.0; 32], [0.0; 32]);
            s.store(unzipped.as_mut_ptr(), even);
            s.store(unzipped.as_mut_ptr().add(16), odd);
            let (a, b) = s.zip(even, odd);
            s.store(zipped.as_mut_ptr(), a);
            s.store(zipped.as_mut_ptr().add(16), b);
            LanewiseOut {
                unzipped,
                zipped,
                transposed,
                sum,
                max,
                int_sum: s.i32_reduce_sum(ints),
                int_max: s.i32_reduce_max(ints),
                stored,
                between,
            }
        }
    }
}

#[test]
fn lanes_move_and_fold_alike_in_every_family() {
    let matrix: [f32; 256] = std::array::from_fn(|i| ((i * 37 + 11) % 251) as f32 * 0.37 - 40.0);
    let ints: [i8; LANES] = std::array::from_fn(|i| (i as i8 - 8) * 13);
    let mut tree: [f32; 16] = std::array::from_fn(|i| matrix[48 + i]);
    for w in [8, 4, 2, 1] {
        for i in 0..w {
            tree[i] += tree[i + w];
        }
    }
    for isa in Family::ALL.into_iter().filter_map(Isa::of) {
        let got = isa.run(Lanewise(&matrix, &ints));
        for i in 0..256 {
            assert_eq!(got.transposed[i], matrix[(i % 16) * 16 + i / 16]);
        }
        assert_eq!(got.sum.to_bits(), tree[0].to_bits());
        assert_eq!(got.max, matrix[48..64].iter().copied().fold(f32::MIN, f32::max));
        assert_eq!(got.int_sum, ints.iter().map(|&i| i32::from(i)).sum::<i32>());
        assert_eq!(got.int_max, 7 * 13);
        assert_eq!(got.zipped, matrix[..32]);
        for i in 0..32 {
            assert_eq!(got.unzipped[i], matrix[i % 16 * 2 + i / 16]);
        }
        for i in 0..LANES {
            assert_eq!(got.stored[i], (2 * i32::from(ints[i])).clamp(-128, 127) as i8);
            assert_eq!(got.between[i], if (3..11).contains(&i) { 1.0 } else { 2.0 });
        }
    }
}

#[test]
fn families_have_names() {
    assert!(Family::Portable.is_available());
    for f in Family::ALL {
        assert!(f.name().contains(f.key()));
    }
    assert!(Isa::detect().family().is_available());
}

/// One instruction where there is one, and the same bits, down to what rounds to zero.
#[cfg(target_arch = "x86_64")]
#[test]
fn powers_of_two_are_multiplied_alike() {
    struct Scale(f32, f32);
    impl Task for Scale {
        type Out = [[f32; LANES]; 2];
        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Out {
            let (a, n) = (s.splat(self.0), s.splat(self.1));
            let mut out = [[0.0; LANES]; 2];
            // SAFETY: arrays of 16 elements.
            unsafe {
                s.store(out[0].as_mut_ptr(), s.times_power_of_two(a, n));
                s.store(out[1].as_mut_ptr(), math::times_power_of_two(s, a, n));
            }
            out
        }
    }
    for isa in Family::ALL.into_iter().filter_map(Isa::of) {
        for n in -150..=128 {
            for a in
                (0..64).map(|i| 0.7 + i as f32 * 0.011_37).chain([1.0, std::f32::consts::SQRT_2])
            {
                let [one, two] = isa.run(Scale(a, n as f32)).map(|v| v.map(f32::to_bits));
                assert_eq!(one, two, "{a} 2^{n} {:?}", isa.family());
            }
        }
        for a in [f32::NAN, f32::INFINITY] {
            let [one, two] = isa.run(Scale(a, 3.0));
            assert_eq!(one[0].is_nan(), two[0].is_nan(), "{a} {:?}", isa.family());
        }
    }
}
