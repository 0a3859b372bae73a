//! Plain Rust on arrays, which the compiler turns into whatever vectors the target has.

use half::f16;

use super::{LANES, Simd, Task, math};

/// Every processor.
#[derive(Copy, Clone)]
pub(crate) struct Portable;

/// 16 lanes, aligned for the compiler's vectors.
#[derive(Copy, Clone)]
#[repr(align(64))]
pub(crate) struct Lanes<T>([T; LANES]);

#[inline(always)]
fn map<T: Copy, U: Copy + Default>(a: Lanes<T>, f: impl Fn(T) -> U) -> Lanes<U> {
    let mut out = [U::default(); LANES];
    for (o, x) in out.iter_mut().zip(a.0) {
        *o = f(x);
    }
    Lanes(out)
}

#[inline(always)]
fn zip<T: Copy, U: Copy + Default>(a: Lanes<T>, b: Lanes<T>, f: impl Fn(T, T) -> U) -> Lanes<U> {
    let mut out = [U::default(); LANES];
    for ((o, x), y) in out.iter_mut().zip(a.0).zip(b.0) {
        *o = f(x, y);
    }
    Lanes(out)
}

#[inline(always)]
fn choose<T: Copy>(mask: Lanes<bool>, yes: Lanes<T>, no: Lanes<T>) -> Lanes<T> {
    let mut out = no;
    for ((o, y), m) in out.0.iter_mut().zip(yes.0).zip(mask.0) {
        *o = if m { y } else { *o };
    }
    out
}

#[inline(always)]
fn tree<T: Copy>(a: Lanes<T>, f: impl Fn(T, T) -> T) -> T {
    let mut v = a.0;
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            v[i] = f(v[i], v[i + width]);
        }
    }
    v[0]
}

/// Reads the first `n` elements; the rest is `T::default()`.
///
/// # Safety
/// `from` must be valid for reads of `min(n, 16)` elements.
#[inline(always)]
unsafe fn read<T: Copy + Default>(from: *const T, n: usize) -> Lanes<T> {
    if n >= LANES {
        // SAFETY: the caller's.
        return Lanes(unsafe { from.cast::<[T; LANES]>().read_unaligned() });
    }
    let mut out = [T::default(); LANES];
    // SAFETY: the caller's; fewer than 16 elements fit the array.
    unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), n) };
    Lanes(out)
}

/// Writes the first `n` elements.
///
/// # Safety
/// `to` must be valid for writes of `min(n, 16)` elements.
#[inline(always)]
unsafe fn write<T: Copy>(to: *mut T, v: Lanes<T>, n: usize) {
    // SAFETY: the caller's; the array has 16 elements.
    unsafe {
        if n >= LANES {
            to.cast::<[T; LANES]>().write_unaligned(v.0);
        } else {
            std::ptr::copy_nonoverlapping(v.0.as_ptr(), to, n);
        }
    }
}

/// 1.5 * 2^23: adding it to a small float leaves the rounded integer in the low bits.
const MAGIC: f32 = 12_582_912.0;

impl Simd for Portable {
    type F32 = Lanes<f32>;
    type I32 = Lanes<i32>;
    type Mask = Lanes<bool>;

    const FUSED: bool = false;
    const BLOCK: (usize, usize) = (2, 1);

    fn call<T: Task>(self, task: T) -> T::Out {
        task.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes<f32> {
        Lanes([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Lanes<f32> {
        // SAFETY: the caller's.
        unsafe { read(from, LANES) }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, n: usize) -> Lanes<f32> {
        // SAFETY: the caller's.
        unsafe { read(from, n) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Lanes<f32>) {
        // SAFETY: the caller's.
        unsafe { write(to, v, LANES) }
    }
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, v: Lanes<f32>, n: usize) {
        // SAFETY: the caller's.
        unsafe { write(to, v, n) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> Lanes<f32> {
        // SAFETY: the caller's.
        unsafe { self.load_f16_first(from, LANES) }
    }
    #[inline(always)]
    unsafe fn load_f16_first(self, from: *const u16, n: usize) -> Lanes<f32> {
        // SAFETY: the caller's.
        map(unsafe { read(from, n) }, |x| f16::from_bits(x).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, v: Lanes<f32>) {
        // SAFETY: the caller's.
        unsafe { self.store_f16_first(to, v, LANES) }
    }
    #[inline(always)]
    unsafe fn store_f16_first(self, to: *mut u16, v: Lanes<f32>, n: usize) {
        // SAFETY: the caller's.
        unsafe { write(to, map(v, |x| f16::from_f32(x).to_bits()), n) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Lanes<f32> {
        // SAFETY: the caller's.
        unsafe { self.load_bf16_first(from, LANES) }
    }
    #[inline(always)]
    unsafe fn load_bf16_first(self, from: *const u16, n: usize) -> Lanes<f32> {
        // SAFETY: the caller's.
        map(unsafe { read(from, n) }, |x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    unsafe fn store_u16(self, to: *mut u16, v: Lanes<i32>) {
        // SAFETY: the caller's.
        unsafe { self.store_u16_first(to, v, LANES) }
    }
    #[inline(always)]
    unsafe fn store_u16_first(self, to: *mut u16, v: Lanes<i32>, n: usize) {
        // SAFETY: the caller's.
        unsafe { write(to, map(v, |x| x as u16), n) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> Lanes<i32> {
        // SAFETY: the caller's.
        map(unsafe { read(from, LANES) }, i32::from)
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8, v: Lanes<i32>) {
        // SAFETY: the caller's.
        unsafe { write(to, map(v, |x| x.clamp(-128, 127) as i8), LANES) }
    }

    #[inline(always)]
    fn add(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn sqrt(self, a: Lanes<f32>) -> Lanes<f32> {
        map(a, f32::sqrt)
    }
    #[inline(always)]
    fn div(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        // A fused product would call a function per lane on processors without it.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn fnma(self, a: Lanes<f32>, b: Lanes<f32>, c: Lanes<f32>) -> Lanes<f32> {
        self.sub(c, self.mul(a, b))
    }
    #[inline(always)]
    fn min(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<f32> {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn round_half_even(self, a: Lanes<f32>) -> Lanes<f32> {
        // Above 2^23 every float is an integer; below, the addition rounds.
        map(a, |x| {
            let big = 8_388_608f32.copysign(x);
            if x.abs() < 8_388_608.0 { (x + big) - big } else { x }
        })
    }
    #[inline(always)]
    fn lt(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<bool> {
        zip(a, b, |a, b| a < b)
    }
    #[inline(always)]
    fn eq(self, a: Lanes<f32>, b: Lanes<f32>) -> Lanes<bool> {
        zip(a, b, |a, b| a == b)
    }
    #[inline(always)]
    fn select(self, mask: Lanes<bool>, yes: Lanes<f32>, no: Lanes<f32>) -> Lanes<f32> {
        choose(mask, yes, no)
    }
    #[inline(always)]
    fn first(self, n: usize) -> Lanes<bool> {
        let mut out = [false; LANES];
        for (i, o) in out.iter_mut().enumerate() {
            *o = i < n;
        }
        Lanes(out)
    }
    #[inline(always)]
    fn and_not(self, a: Lanes<bool>, b: Lanes<bool>) -> Lanes<bool> {
        zip(a, b, |a, b| a & !b)
    }

    #[inline(always)]
    fn bits(self, a: Lanes<f32>) -> Lanes<i32> {
        map(a, |x| x.to_bits().cast_signed())
    }
    #[inline(always)]
    fn from_bits(self, a: Lanes<i32>) -> Lanes<f32> {
        map(a, |x| f32::from_bits(x.cast_unsigned()))
    }
    #[inline(always)]
    fn to_i32(self, a: Lanes<f32>) -> Lanes<i32> {
        map(a, |x| (x + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()).cast_signed())
    }
    #[inline(always)]
    fn to_f32(self, a: Lanes<i32>) -> Lanes<f32> {
        map(a, |x| x as f32)
    }
    #[inline(always)]
    fn i32_splat(self, x: i32) -> Lanes<i32> {
        Lanes([x; LANES])
    }
    #[inline(always)]
    fn i32_add(self, a: Lanes<i32>, b: Lanes<i32>) -> Lanes<i32> {
        zip(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn i32_sub(self, a: Lanes<i32>, b: Lanes<i32>) -> Lanes<i32> {
        zip(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn i32_and(self, a: Lanes<i32>, b: Lanes<i32>) -> Lanes<i32> {
        zip(a, b, |a, b| a & b)
    }
    #[inline(always)]
    fn i32_or(self, a: Lanes<i32>, b: Lanes<i32>) -> Lanes<i32> {
        zip(a, b, |a, b| a | b)
    }
    #[inline(always)]
    fn i32_max(self, a: Lanes<i32>, b: Lanes<i32>) -> Lanes<i32> {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn i32_shl<const N: u32>(self, a: Lanes<i32>) -> Lanes<i32> {
        map(a, |x| x << N)
    }
    #[inline(always)]
    fn i32_shr<const N: u32>(self, a: Lanes<i32>) -> Lanes<i32> {
        map(a, |x| x >> N)
    }
    #[inline(always)]
    fn i32_gt(self, a: Lanes<i32>, b: Lanes<i32>) -> Lanes<bool> {
        zip(a, b, |a, b| a > b)
    }
    #[inline(always)]
    fn i32_select(self, mask: Lanes<bool>, yes: Lanes<i32>, no: Lanes<i32>) -> Lanes<i32> {
        choose(mask, yes, no)
    }

    #[inline(always)]
    fn reduce_sum(self, a: Lanes<f32>) -> f32 {
        tree(a, |a, b| a + b)
    }
    #[inline(always)]
    fn reduce_max(self, a: Lanes<f32>) -> f32 {
        tree(a, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn i32_reduce_sum(self, a: Lanes<i32>) -> i32 {
        tree(a, i32::wrapping_add)
    }
    #[inline(always)]
    fn i32_reduce_max(self, a: Lanes<i32>) -> i32 {
        tree(a, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn transpose(self, rows: &mut [Lanes<f32>; LANES]) {
        for i in 0..LANES {
            for j in 0..i {
                let x = rows[i].0[j];
                rows[i].0[j] = rows[j].0[i];
                rows[j].0[i] = x;
            }
        }
    }

    #[inline(always)]
    fn unzip(self, a: Lanes<f32>, b: Lanes<f32>) -> (Lanes<f32>, Lanes<f32>) {
        let (mut even, mut odd) = (a, b);
        for i in 0..LANES / 2 {
            (even.0[i], odd.0[i]) = (a.0[2 * i], a.0[2 * i + 1]);
            (even.0[i + LANES / 2], odd.0[i + LANES / 2]) = (b.0[2 * i], b.0[2 * i + 1]);
        }
        (even, odd)
    }
    #[inline(always)]
    fn zip(self, even: Lanes<f32>, odd: Lanes<f32>) -> (Lanes<f32>, Lanes<f32>) {
        let (mut a, mut b) = (even, odd);
        for i in 0..LANES / 2 {
            (a.0[2 * i], a.0[2 * i + 1]) = (even.0[i], odd.0[i]);
            (b.0[2 * i], b.0[2 * i + 1]) = (even.0[i + LANES / 2], odd.0[i + LANES / 2]);
        }
        (a, b)
    }

    // The compiler unrolls these over all lanes: once is enough.
    #[inline(never)]
    fn exp(self, a: Lanes<f32>) -> Lanes<f32> {
        math::exp(self, a)
    }
    #[inline(never)]
    fn log(self, a: Lanes<f32>) -> Lanes<f32> {
        math::log(self, a)
    }
    #[inline(never)]
    fn tanh(self, a: Lanes<f32>) -> Lanes<f32> {
        math::tanh(self, a)
    }
    #[inline(never)]
    fn sigmoid(self, a: Lanes<f32>) -> Lanes<f32> {
        math::sigmoid(self, a)
    }
    #[inline(never)]
    fn round_half_away(self, a: Lanes<f32>) -> Lanes<f32> {
        math::round_half_away(self, a)
    }
}
