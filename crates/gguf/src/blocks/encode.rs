//! From f32 to blocks: for each format the scales, minimums and codes whose values come closest
//! to the given ones, in the sum of squares.
//!
//! How a scale is found is the search that the field uses (as described for k-quants in
//! llama.cpp's pull request 1684): several guesses of what code the greatest value becomes, for
//! each the codes, and for the codes the scale and minimum of least squares, in closed form; the
//! best guess is then improved in turns of codes and scales. Unlike ggml's, ours weighs all
//! values alike, looks at what the rounded scales that are stored really give, and takes the
//! neighbours of a rounded sub-scale where they fit better.
//!
//! Nothing here is ever infinite: NaN counts as 0, and what is beyond the largest f16 scale
//! becomes the largest value there is.

use half::f16;

/// The values of a group as they are searched: finite and bounded.
type Group<const N: usize> = [f32; N];

/// The largest scale that can be stored.
const MOST: f32 = 65504.0;

/// The largest sub-scale and sub-minimum of Q4_K and Q5_K.
const MOST_SUB: f32 = 63.0;

/// To the nearest integer, ties to even, for |x| up to 2^22. (`f32::round` is a call into the C
/// library on processors before SSE 4.1, and is not vectorized.)
fn nearest(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT) - SHIFT
}

/// As it is stored and read again.
fn stored(x: f32) -> f32 {
    f16::from_f32(x.clamp(-MOST, MOST)).to_f32()
}

/// Without NaN, and within the format's range.
fn bounded<const N: usize>(x: &[f32; N], limit: f32) -> Group<N> {
    x.map(|x| if x.is_nan() { 0.0 } else { x.clamp(-limit, limit) })
}

/// What a value's code is, of the codes from `low` to `high`; 0 is a code of every format.
fn code(x: f32, inverse: f32, low: f32, high: f32) -> f32 {
    let x = x * inverse;
    let x = if x < low { low } else { x };
    nearest(if x > high { high } else { x })
}

/// How many values are looked at together, in vectors.
const LANES: usize = 8;

/// Adds products to lanes.
fn add(to: &mut [f32; LANES], x: &[f32; LANES], y: &[f32; LANES]) {
    for ((to, x), y) in to.iter_mut().zip(x).zip(y) {
        *to += x * y;
    }
}

/// 1 / x, and 0 where that is no number to multiply by.
fn inverse(x: f32) -> f32 {
    let inverse = 1.0 / x;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Codes from a range, symmetric or nearly so, times one scale.
#[derive(Copy, Clone)]
struct Symmetric {
    low: f32,
    high: f32,
}

impl Symmetric {
    const Q4: Symmetric = Symmetric { low: -8.0, high: 7.0 };
    const Q5: Symmetric = Symmetric { low: -16.0, high: 15.0 };
    const Q6: Symmetric = Symmetric { low: -32.0, high: 31.0 };

    fn limit(self) -> f32 {
        -self.low * MOST
    }

    /// Σ xq and Σ qq of the codes by a scale's inverse.
    fn sums<const N: usize>(self, x: &Group<N>, inverse: f32) -> (f32, f32) {
        let (mut xq, mut qq) = ([0.0; LANES], [0.0; LANES]);
        for x in x.as_chunks().0 {
            let q = x.map(|x| code(x, inverse, self.low, self.high));
            add(&mut xq, x, &q);
            add(&mut qq, &q, &q);
        }
        (xq.iter().sum(), qq.iter().sum())
    }

    /// Σ (x - dq)² of the best codes for the scale `d`.
    fn error<const N: usize>(self, x: &Group<N>, d: f32) -> f32 {
        let inverse = inverse(d);
        let mut sum = [0.0; LANES];
        for x in x.as_chunks().0 {
            let off = x.map(|x| x - d * code(x, inverse, self.low, self.high));
            add(&mut sum, &off, &off);
        }
        sum.iter().sum()
    }

    /// The value furthest from zero.
    fn greatest<const N: usize>(x: &Group<N>) -> f32 {
        x.iter().fold(0.0f32, |m, &x| if x.abs() > m.abs() { x } else { m })
    }

    /// The stored scale that holds the values exactly, if there is one.
    fn exact<const N: usize>(self, x: &Group<N>) -> Option<f32> {
        let greatest = Symmetric::greatest(x);
        let whole = (1..=-self.low as i32).map(|k| k as f32);
        whole.flat_map(|k| [-k, k]).map(|k| stored(greatest / k)).find(|&d| {
            let inverse = inverse(d);
            x.iter().all(|&x| d * code(x, inverse, self.low, self.high) == x)
        })
    }

    /// The scale with the least error.
    fn scale<const N: usize>(self, x: &Group<N>) -> f32 {
        let greatest = Symmetric::greatest(x);
        let unit = inverse(greatest);
        if unit == 0.0 {
            return 0.0;
        }
        // What is Σxx less the error, and the scale.
        let mut best = (0.0f32, 0.0f32);
        let mut try_code = |k: f32| {
            let (xq, qq) = self.sums(x, k * unit);
            if qq > 0.0 && xq * xq > best.0 * qq {
                best = (xq * xq / qq, xq / qq);
            }
        };
        // About the greatest code, on either side of zero.
        (-9..=9).for_each(|i| try_code(self.low * (1.0 + i as f32 * 0.0125)));
        (-4..=4).for_each(|i| try_code(self.high * (1.0 + i as f32 * 0.025)));
        if self.low > -32.0 {
            // Few codes: a good scale may cut more off.
            (1..=8).for_each(|i| try_code(self.low * (1.1 + i as f32 * 0.05)));
        }
        // Turns of codes and scale, each no worse than the last.
        for _ in 0..3 {
            let (xq, qq) = self.sums(x, inverse(best.1));
            if qq > 0.0 && xq * xq > best.0 * qq {
                best = (xq * xq / qq, xq / qq);
            }
        }
        best.1
    }

    /// As [`Symmetric::scale`], as it is stored.
    fn stored_scale<const N: usize>(self, x: &Group<N>) -> f32 {
        if let Some(d) = self.exact(x) {
            return d;
        }
        let d = stored(self.scale(x));
        let mut best = (self.error(x, d), d);
        for _ in 0..2 {
            let (xq, qq) = self.sums(x, inverse(best.1));
            let again = if qq > 0.0 { stored(xq / qq) } else { best.1 };
            let error = self.error(x, again);
            if error < best.0 {
                best = (error, again);
            }
        }
        best.1
    }

    /// Codes by a stored scale, counted from `low`.
    fn codes<const N: usize>(self, x: &Group<N>, d: f32) -> [u8; N] {
        let inverse = inverse(d);
        x.map(|x| (code(x, inverse, self.low, self.high) - self.low) as u8)
    }
}

/// Codes from 0 to `top` times a scale, plus an offset.
#[derive(Copy, Clone)]
struct Line {
    top: f32,
    /// Whether the offset may be positive.
    free: bool,
}

/// Sums over a group with its codes.
struct Sums {
    x: f32,
    q: f32,
    xq: f32,
    qq: f32,
}

impl Line {
    fn sums<const N: usize>(self, x: &Group<N>, inverse: f32, offset: f32) -> Sums {
        let [mut sx, mut sq, mut xq, mut qq] = [[0.0; LANES]; 4];
        let ones = [1.0; LANES];
        for x in x.as_chunks().0 {
            let q = x.map(|x| code(x - offset, inverse, 0.0, self.top));
            add(&mut sx, x, &ones);
            add(&mut sq, &q, &ones);
            add(&mut xq, x, &q);
            add(&mut qq, &q, &q);
        }
        let [x, q, xq, qq] = [sx, sq, xq, qq].map(|lanes| lanes.iter().sum());
        Sums { x, q, xq, qq }
    }

    /// Scale and offset of least squares for codes, and Σxx less their error.
    fn solve<const N: usize>(self, sums: &Sums) -> (f32, f32, f32) {
        let n = N as f32;
        let Sums { x, q, xq, qq } = *sums;
        let det = n * qq - q * q;
        let (mut d, mut offset) = if det > 0.0 {
            ((n * xq - x * q) / det, (qq * x - q * xq) / det)
        } else {
            (0.0, x / n)
        };
        if !self.free && offset > 0.0 {
            (d, offset) = (if qq > 0.0 { xq / qq } else { 0.0 }, 0.0);
        }
        if d < 0.0 {
            (d, offset) = (0.0, if self.free { x / n } else { (x / n).min(0.0) });
        }
        let gain = if d == 0.0 {
            offset * (2.0 * x - n * offset)
        } else {
            // At the minimum the residual is at right angles to what is fitted.
            d * xq + offset * x
        };
        (d, offset, gain)
    }

    /// Σ (x - dq - offset)² of the best codes.
    fn error<const N: usize>(self, x: &Group<N>, d: f32, offset: f32) -> f32 {
        let inverse = inverse(d);
        let mut sum = [0.0; LANES];
        for x in x.as_chunks().0 {
            let off = x.map(|x| {
                let x = x - offset;
                x - d * code(x, inverse, 0.0, self.top)
            });
            add(&mut sum, &off, &off);
        }
        sum.iter().sum()
    }

    /// The least and the greatest value.
    fn ends<const N: usize>(x: &Group<N>) -> (f32, f32) {
        let fold = |from, f: fn(f32, f32) -> f32| x.iter().fold(from, |m, &x| f(m, x));
        (fold(f32::INFINITY, f32::min), fold(f32::NEG_INFINITY, f32::max))
    }

    /// The stored scale and offset that hold the values exactly, if there are some.
    fn exact<const N: usize>(self, x: &Group<N>) -> Option<(f32, f32)> {
        let (low, high) = Line::ends(x);
        for used in (1..=self.top as i32).rev() {
            let d = stored((high - low) / used as f32);
            let inverse = inverse(d);
            // All the differences must be about whole before offsets are worth a look.
            let whole = |&x: &f32| {
                let steps = (x - low) * inverse;
                (steps - nearest(steps.min(self.top))).abs() < 0.01
            };
            if !x.iter().all(whole) {
                continue;
            }
            for spare in 0..=self.top as i32 - used {
                let offset = stored(low - spare as f32 * d);
                let held = |&x: &f32| d * code(x - offset, inverse, 0.0, self.top) + offset == x;
                if x.iter().all(held) {
                    return Some((d, offset));
                }
            }
        }
        None
    }

    /// Scale and offset with the least error.
    fn fit<const N: usize>(self, x: &Group<N>) -> (f32, f32) {
        let (mut low, high) = Line::ends(x);
        if !self.free {
            low = low.min(0.0);
        }
        let unit = inverse(high - low);
        if high <= low || unit == 0.0 {
            return (0.0, low);
        }
        let mut best = ((high - low) / self.top, low, f32::NEG_INFINITY);
        let mut try_code = |k: f32| {
            let (d, offset, gain) = self.solve::<N>(&self.sums(x, k * unit, low));
            if gain > best.2 {
                best = (d, offset, gain);
            }
        };
        (0..=20).for_each(|i| try_code(self.top - 1.5 + i as f32 * 0.125));
        for _ in 0..4 {
            let sums = self.sums(x, inverse(best.0), best.1);
            let (d, offset, gain) = self.solve::<N>(&sums);
            if gain <= best.2 {
                break;
            }
            best = (d, offset, gain);
        }
        (best.0, best.1)
    }

    /// As [`Line::fit`], as it is stored.
    fn stored_fit<const N: usize>(self, x: &Group<N>) -> (f32, f32) {
        if let Some(exact) = self.exact(x) {
            return exact;
        }
        let (d, offset) = self.fit(x);
        let first = (stored(d), stored(offset));
        let (d, offset, _) = self.solve::<N>(&self.sums(x, inverse(first.0), first.1));
        let again = (stored(d), stored(offset));
        if self.error(x, again.0, again.1) < self.error(x, first.0, first.1) {
            again
        } else {
            first
        }
    }

    fn codes<const N: usize>(self, x: &Group<N>, d: f32, offset: f32) -> [u8; N] {
        let inverse = inverse(d);
        x.map(|x| code(x - offset, inverse, 0.0, self.top) as u8)
    }
}

fn put_half(out: &mut [u8; 2], x: f32) {
    *out = f16::from_f32(x).to_le_bytes();
}

/// Codes of the first half of `codes` in low halves of bytes, of the second in high ones.
fn nibbles(codes: &[u8], out: &mut [u8]) {
    let (low, high) = codes.split_at(codes.len() / 2);
    for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
        *out = (low & 15) | (high & 15) << 4;
    }
}

/// The fifth bits of 32 codes.
fn fifths(codes: &[u8; 32]) -> [u8; 4] {
    let bits =
        codes.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4 & 1) << i);
    bits.to_le_bytes()
}

/// A block of Q4_0: d, nibbles.
pub(super) fn q4_0(x: &[f32; 32], out: &mut [u8; 18]) -> Option<()> {
    let x = bounded(x, Symmetric::Q4.limit());
    let d = Symmetric::Q4.stored_scale(&x);
    let (head, codes) = out.split_first_chunk_mut()?;
    put_half(head, d);
    nibbles(&Symmetric::Q4.codes(&x, d), codes);
    Some(())
}

/// A block of Q5_0: d, fifth bits, nibbles.
pub(super) fn q5_0(x: &[f32; 32], out: &mut [u8; 22]) -> Option<()> {
    let x = bounded(x, Symmetric::Q5.limit());
    let d = Symmetric::Q5.stored_scale(&x);
    let codes = Symmetric::Q5.codes(&x, d);
    let (head, rest) = out.split_first_chunk_mut()?;
    let (high, low) = rest.split_first_chunk_mut::<4>()?;
    put_half(head, d);
    *high = fifths(&codes);
    nibbles(&codes, low);
    Some(())
}

/// A block of Q4_1: d, offset, nibbles.
pub(super) fn q4_1(x: &[f32; 32], out: &mut [u8; 20]) -> Option<()> {
    let line = Line { top: 15.0, free: true };
    let x = bounded(x, MOST);
    let (d, offset) = line.stored_fit(&x);
    let (head, rest) = out.split_first_chunk_mut()?;
    let (second, codes) = rest.split_first_chunk_mut()?;
    put_half(head, d);
    put_half(second, offset);
    nibbles(&line.codes(&x, d, offset), codes);
    Some(())
}

/// A block of Q5_1: d, offset, fifth bits, nibbles.
pub(super) fn q5_1(x: &[f32; 32], out: &mut [u8; 24]) -> Option<()> {
    let line = Line { top: 31.0, free: true };
    let x = bounded(x, MOST);
    let (d, offset) = line.stored_fit(&x);
    let codes = line.codes(&x, d, offset);
    let (head, rest) = out.split_first_chunk_mut()?;
    let (second, rest) = rest.split_first_chunk_mut()?;
    let (high, low) = rest.split_first_chunk_mut::<4>()?;
    put_half(head, d);
    put_half(second, offset);
    *high = fifths(&codes);
    nibbles(&codes, low);
    Some(())
}

/// What Q4_K and Q5_K store of a block, beside its codes.
struct Pairs {
    d: f32,
    dmin: f32,
    scales: [u8; 8],
    mins: [u8; 8],
}

/// The scales, minimums and codes of a block of Q4_K (`top` 15) or Q5_K (31).
fn pairs(x: &[f32; 256], top: f32) -> (Pairs, [[u8; 32]; 8]) {
    let line = Line { top, free: false };
    let x = bounded(x, MOST * MOST_SUB);
    let groups = x.as_chunks::<32>().0;
    let mut fits = [(0.0f32, 0.0f32); 8];
    for (fit, group) in fits.iter_mut().zip(groups) {
        *fit = line.fit(group);
    }
    let most = fits.iter().fold((0.0f32, 0.0f32), |m, f| (m.0.max(f.0), m.1.max(-f.1)));
    let (d, dmin) = (stored(most.0 / MOST_SUB), stored(most.1 / MOST_SUB));
    let mut out = Pairs { d, dmin, scales: [0; 8], mins: [0; 8] };
    let mut codes = [[0; 32]; 8];
    let places = out.scales.iter_mut().zip(&mut out.mins).zip(&mut codes);
    for (((scale, min), codes), (group, fit)) in places.zip(groups.iter().zip(fits)) {
        let near = |x: f32| nearest(x.clamp(0.0, MOST_SUB));
        let (s, m) = (near(fit.0 * inverse(d)), near(-fit.1 * inverse(dmin)));
        let mut best = (f32::INFINITY, 0.0, 0.0);
        for ds in [0.0, -1.0, 1.0] {
            for dm in [0.0, -1.0, 1.0] {
                let (s, m) = (s + ds, m + dm);
                let inside = 0.0..=MOST_SUB;
                if !inside.contains(&s) || !inside.contains(&m) {
                    continue;
                }
                let error = line.error(group, d * s, -(dmin * m));
                if error < best.0 {
                    best = (error, s, m);
                }
            }
        }
        (*scale, *min) = (best.1 as u8, best.2 as u8);
        *codes = line.codes(group, d * best.1, -(dmin * best.2));
    }
    (out, codes)
}

impl Pairs {
    /// d, dmin, and the 6-bit integers as `get_scale_min_k4` reads them.
    fn put(&self, out: &mut [u8; 16]) -> Option<()> {
        let (head, rest) = out.split_first_chunk_mut()?;
        let (second, packed) = rest.split_first_chunk_mut()?;
        put_half(head, self.d);
        put_half(second, self.dmin);
        let (a, rest) = packed.split_at_mut(4);
        let (b, c) = rest.split_at_mut(4);
        let (low_scales, high_scales) = self.scales.split_at(4);
        let (low_mins, high_mins) = self.mins.split_at(4);
        let bytes = a.iter_mut().zip(b).zip(c);
        let scales = low_scales.iter().zip(high_scales);
        let mins = low_mins.iter().zip(high_mins);
        for (((a, b), c), ((s, s4), (m, m4))) in bytes.zip(scales.zip(mins)) {
            *a = s | s4 >> 4 << 6;
            *b = m | m4 >> 4 << 6;
            *c = s4 & 15 | (m4 & 15) << 4;
        }
        Some(())
    }
}

/// A block of Q4_K.
pub(super) fn q4_k(x: &[f32; 256], out: &mut [u8; 144]) -> Option<()> {
    let (pairs, codes) = pairs(x, 15.0);
    let (head, low) = out.split_first_chunk_mut::<16>()?;
    pairs.put(head)?;
    for (two, low) in codes.as_flattened().chunks(64).zip(low.chunks_mut(32)) {
        nibbles(two, low);
    }
    Some(())
}

/// A block of Q5_K.
pub(super) fn q5_k(x: &[f32; 256], out: &mut [u8; 176]) -> Option<()> {
    let (pairs, codes) = pairs(x, 31.0);
    let (head, rest) = out.split_first_chunk_mut::<16>()?;
    let (high, low) = rest.split_first_chunk_mut::<32>()?;
    pairs.put(head)?;
    *high = [0; 32];
    for (g, codes) in codes.iter().enumerate() {
        for (high, code) in high.iter_mut().zip(codes) {
            *high |= (code >> 4 & 1) << g;
        }
    }
    for (two, low) in codes.as_flattened().chunks(64).zip(low.chunks_mut(32)) {
        nibbles(two, low);
    }
    Some(())
}

/// A block of Q6_K: low bits, high bits, scales, d.
pub(super) fn q6_k(x: &[f32; 256], out: &mut [u8; 210]) -> Option<()> {
    let codes_of = Symmetric::Q6;
    let x = bounded(x, codes_of.limit() * 128.0);
    let groups = x.as_chunks::<16>().0;
    let mut fits = [0.0f32; 16];
    for (fit, group) in fits.iter_mut().zip(groups) {
        *fit = codes_of.scale(group);
    }
    let greatest = fits.iter().fold(0.0f32, |m, &d| if d.abs() > m.abs() { d } else { m });
    let d = stored(greatest / -128.0);
    let (low, rest) = out.split_first_chunk_mut::<128>()?;
    let (high, rest) = rest.split_first_chunk_mut::<64>()?;
    let (scales, half) = rest.split_first_chunk_mut::<16>()?;
    put_half(half.first_chunk_mut()?, d);
    let mut codes = [[0u8; 16]; 16];
    for (((codes, scale), group), fit) in codes.iter_mut().zip(scales).zip(groups).zip(fits) {
        let near = nearest((fit * inverse(d)).clamp(-128.0, 127.0));
        let mut best = (f32::INFINITY, 0.0);
        for s in [near, near - 1.0, near + 1.0] {
            if !(-128.0..=127.0).contains(&s) {
                continue;
            }
            let error = codes_of.error(group, d * s);
            if error < best.0 {
                best = (error, s);
            }
        }
        *scale = (best.1 as i8).cast_unsigned();
        *codes = codes_of.codes(group, d * best.1);
    }
    let halves = codes.as_flattened().chunks(128).zip(low.chunks_mut(64).zip(high.chunks_mut(32)));
    for (codes, (low, high)) in halves {
        nibbles(codes, low);
        high.fill(0);
        for (j, codes) in codes.chunks(32).enumerate() {
            for (high, code) in high.iter_mut().zip(codes) {
                *high |= (code >> 4) << (2 * j);
            }
        }
    }
    Some(())
}
