use super::*;
use crate::matmul::testing::Random;
use crate::simd::Family;

struct Dot2<const CLASS: u32> {
    acc: [i32; LANES],
    quads: [[u8; 64]; 2],
    x: [[i8; 4]; 2],
}

impl<const CLASS: u32> Driver for &Dot2<CLASS> {
    type Out = [i32; LANES];

    fn run<S: Dot>(self, s: S) -> [i32; LANES] {
        s.enter(self)
    }
}

impl<S: Dot, const CLASS: u32> Kernel<S> for &Dot2<CLASS> {
    type Out = [i32; LANES];

    #[inline(always)]
    fn run(self, s: S) -> [i32; LANES] {
        let [a, b] = self.quads;
        let [x, y] = self.x.map(|x| i32::from_le_bytes(x.map(i8::cast_unsigned)));
        // SAFETY: the arrays have 64 bytes.
        let (a, b) = unsafe { (s.load_quad(a.as_ptr()), s.load_quad(b.as_ptr())) };
        lanes(s, s.dot2(CLASS, vector(s, self.acc), a, x, b, y))
    }
}

fn check<const CLASS: u32>(codes: impl Fn(u64) -> u8, x: impl Fn(u64) -> i8) {
    let mut random = Random::new(CLASS.into());
    for _ in 0..200 {
        let dot = Dot2::<CLASS> {
            acc: std::array::from_fn(|_| random.bits() as i32 >> 8),
            quads: std::array::from_fn(|_| std::array::from_fn(|_| codes(random.bits()))),
            x: std::array::from_fn(|_| std::array::from_fn(|_| x(random.bits()))),
        };
        for isa in Family::ALL.into_iter().filter_map(Isa::of) {
            let centered = matches!(isa.family(), Family::Avx2 | Family::Avx512) && CLASS == WIDE;
            let zero = if centered { i32::from(WIDE_ZERO) } else { 0 };
            let expected: [i32; LANES] = std::array::from_fn(|lane| {
                let terms = dot.quads.iter().zip(&dot.x).flat_map(|(quad, x)| {
                    quad[lane * 4..]
                        .iter()
                        .zip(x)
                        .map(|(&w, &x)| (i32::from(w) - zero) * i32::from(x))
                });
                dot.acc[lane] + terms.sum::<i32>()
            });
            assert_eq!(drive(isa, &dot), expected, "{:?} class {CLASS}", isa.family());
        }
    }
}

#[test]
fn dots_are_exact() {
    let any = |bits: u64| (bits % 255) as i8;
    let x = move |bits: u64| if any(bits) == -128 { 127 } else { any(bits) };
    check::<NARROW>(|b| (b % 32) as u8, x);
    check::<MIDDLE>(|b| (b % 64) as u8, x);
    check::<WIDE>(|b| b as u8, x);
}

#[test]
fn dots_are_exact_at_the_ends_of_their_range() {
    let x = |bits: u64| if bits & 1 == 0 { 127 } else { -127 };
    let same = |_| -127;
    let ends = |top: u8| move |bits: u64| if bits.is_multiple_of(3) { 0 } else { top };
    check::<NARROW>(ends(31), x);
    check::<NARROW>(|_| 31, same);
    check::<MIDDLE>(ends(63), x);
    check::<MIDDLE>(|_| 63, same);
    check::<WIDE>(ends(255), x);
    check::<WIDE>(|_| 0, same);
    check::<WIDE>(|_| 0, |_| 127);
    check::<WIDE>(|_| 255, same);
}
