//! Conversion between element types, and quantization of rows.

use std::ops::Range;

use gguf::TensorType;
use graph::{Call, DType, INT16_GROUP, Needs, Op, Unsupported};
use half::f16;

use super::{Support, arg, no_kernel, row_tiles};
use crate::job::Job;
use crate::matmul::int16;
use crate::simd::{LANES, Simd, Task};

/// Elements of a block of Q8_0 and of q8-rows.
const BLOCK: usize = 32;
/// Bytes of a Q8_0 block: an f16 scale, then codes.
const Q8_0_BYTES: usize = 34;

const Q8_0: DType = DType::Block(TensorType::Q8_0);

/// Rows of any stride.
pub(super) fn supports(call: &Call<'_>) -> Support {
    let x = arg(call, 0)?;
    if x.resident {
        return no_kernel("a packed weight as operand 0");
    }
    let ok = match (call.op, x.dtype, call.out.dtype) {
        (Op::Cast { .. }, DType::F32, DType::F16 | DType::BF16 | DType::Int16Rows | Q8_0) => true,
        (Op::Cast { .. }, DType::F16 | DType::BF16, DType::F32) => true,
        (Op::Round { dtype }, DType::F32, _) => dtype.is_float() || *dtype == Q8_0,
        (Op::QuantizeRows, DType::F32, DType::Q8Rows) => true,
        _ => false,
    };
    if !ok {
        return no_kernel(format!("a conversion from {} to {}", x.dtype, call.out.dtype));
    }
    match x.row_stride() {
        Some(_) => Ok(Needs::default()),
        None => Err(Unsupported::Layout(0)),
    }
}

pub(super) fn run_tile(job: &Job<'_>, tile: usize) {
    let rows = row_tiles(job).range(tile);
    job.isa.run(Convert { job, rows });
}

struct Convert<'a> {
    job: &'a Job<'a>,
    rows: Range<usize>,
}

impl Task for Convert<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.job.out.shape.cols();
        let input = self.job.input(0);
        for row in self.rows {
            let x = input.rows::<f32>().row(row);
            let to = self.job.out_row::<f32>(row);
            // SAFETY: row `row` of the result is this tile's, and the operand's row is as long;
            // rows of blocks are whole blocks.
            unsafe {
                match self.job.op {
                    Op::Round { dtype } => round(s, *dtype, x, to, n),
                    Op::QuantizeRows => {
                        let row_bytes = n + n / BLOCK * 8;
                        quantize_row(s, x, self.job.out::<u8>().add(row * row_bytes), n);
                    }
                    Op::Cast { dtype: DType::F32 } => {
                        let x = input.rows::<u16>().row(row);
                        widen(s, input.arg.dtype, x, to, n);
                    }
                    Op::Cast { dtype: DType::Int16Rows } => {
                        int16_row(s, x, self.job.out::<u8>().add(row * int16::row_bytes(n)), n);
                    }
                    Op::Cast { dtype: Q8_0 } => {
                        let bytes = self.job.out::<u8>().add(row * (n / BLOCK * Q8_0_BYTES));
                        for b in 0..n / BLOCK {
                            q8_0_block(s, x.add(b * BLOCK), bytes.add(b * Q8_0_BYTES));
                        }
                    }
                    Op::Cast { dtype } => narrow(s, *dtype, x, self.job.out_row::<u16>(row), n),
                    _ => {}
                }
            }
        }
    }
}

/// f32 to f16 or bf16.
///
/// # Safety
/// The pointers must be valid for `n` elements.
#[inline(always)]
unsafe fn narrow<S: Simd>(s: S, dtype: DType, x: *const f32, to: *mut u16, n: usize) {
    for i in (0..n).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe {
            let v = s.load_first(x.add(i), n - i);
            if dtype == DType::F16 {
                s.store_f16_first(to.add(i), v, n - i);
            } else {
                s.store_u16_first(to.add(i), s.to_bf16_bits(v), n - i);
            }
        }
    }
}

/// f16 or bf16 to f32.
///
/// # Safety
/// The pointers must be valid for `n` elements.
#[inline(always)]
unsafe fn widen<S: Simd>(s: S, dtype: DType, x: *const u16, to: *mut f32, n: usize) {
    for i in (0..n).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe {
            let v = if dtype == DType::F16 {
                s.load_f16_first(x.add(i), n - i)
            } else {
                s.load_bf16_first(x.add(i), n - i)
            };
            s.store_first(to.add(i), v, n - i);
        }
    }
}

/// There and back.
///
/// # Safety
/// The pointers must be valid for `n` elements; whole blocks for Q8_0.
#[inline(always)]
unsafe fn round<S: Simd>(s: S, dtype: DType, x: *const f32, to: *mut f32, n: usize) {
    // SAFETY: the caller's.
    unsafe {
        match dtype {
            Q8_0 => {
                for i in (0..n).step_by(BLOCK) {
                    let mut block = [0u8; Q8_0_BYTES];
                    q8_0_block(s, x.add(i), block.as_mut_ptr());
                    load_q8_0(s, block.as_ptr(), to.add(i));
                }
            }
            DType::F16 | DType::BF16 => {
                for i in (0..n).step_by(LANES) {
                    let (m, mut half) = ((n - i).min(LANES), [0u16; LANES]);
                    narrow(s, dtype, x.add(i), half.as_mut_ptr(), m);
                    widen(s, dtype, half.as_ptr(), to.add(i), m);
                }
            }
            _ => std::ptr::copy_nonoverlapping(x, to, n),
        }
    }
}

/// The 32 values of a Q8_0 block.
///
/// # Safety
/// `block` must be valid for 34 reads, `to` for 32 writes.
#[inline(always)]
pub(super) unsafe fn load_q8_0<S: Simd>(s: S, block: *const u8, to: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let scale = s.splat(f16::from_le_bytes([*block, *block.add(1)]).to_f32());
        for i in [0, LANES] {
            let codes = s.to_f32(s.load_i8(block.add(2 + i).cast()));
            s.store(to.add(i), s.mul(scale, codes));
        }
    }
}

/// The largest magnitude of two vectors; NaN if there is one.
#[inline(always)]
fn largest<S: Simd>(s: S, a: S::F32, b: S::F32) -> f32 {
    // As integers, the bits of magnitudes are in the order of the numbers, NaN above all.
    let bits = s.i32_max(s.bits(s.abs(a)), s.bits(s.abs(b)));
    f32::from_bits(s.i32_reduce_max(bits).cast_unsigned())
}

/// Quantizes 32 values as ggml's `quantize_row_q8_0_ref`: `d = amax / 127`, codes
/// `round(x * (1 / d))`, halves away from zero, with the d that is not rounded to f16. Where a
/// value is NaN, ours makes the scale NaN too.
///
/// # Safety
/// `x` must be valid for 32 reads, `block` for 34 writes.
#[inline(always)]
unsafe fn q8_0_block<S: Simd>(s: S, x: *const f32, block: *mut u8) {
    s.call(Q8Block { x, block });
}

/// See [`q8_0_block`].
struct Q8Block {
    x: *const f32,
    block: *mut u8,
}

impl Task for Q8Block {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Q8Block { x, block } = self;
        // SAFETY: `q8_0_block`'s caller's.
        unsafe {
            let (a, b) = (s.load(x), s.load(x.add(LANES)));
            let d = largest(s, a, b) / 127.0;
            let inverse = s.splat(if d == 0.0 { 0.0 } else { 1.0 / d });
            let scale = f16::from_f32(d).to_le_bytes();
            block.cast::<[u8; 2]>().write_unaligned(scale);
            for (i, v) in [(0, a), (LANES, b)] {
                let q = s.round_half_away(s.mul(v, inverse));
                // As a cast in Rust: NaN gives 0, the rest saturates.
                let q = s.select(s.eq(q, q), q, s.zero());
                let q = s.max(s.min(q, s.splat(127.0)), s.splat(-128.0));
                s.store_i8(block.add(2 + i).cast(), s.to_i32(q));
            }
        }
    }
}

/// One row of int16-rows.
///
/// # Safety
/// `x` must be valid for `n` reads, `to` for writes of as many groups as that fills; it is aligned
/// to 4 bytes.
#[inline(always)]
unsafe fn int16_row<S: Simd>(s: S, x: *const f32, to: *mut u8, n: usize) {
    for (group, first) in (0..n).step_by(INT16_GROUP).enumerate() {
        // SAFETY: the caller's. Vectors beyond the row's end are not read.
        unsafe {
            let to = to.add(group * int16::GROUP_BYTES);
            let mut values = [s.zero(); INT16_GROUP / LANES];
            let mut largest = s.i32_splat(0);
            for (i, v) in values.iter_mut().enumerate() {
                let at = first + i * LANES;
                if at < n {
                    *v = s.load_first(x.add(at), n - at);
                }
                // As integers, the bits of magnitudes are in the order of the numbers.
                largest = s.i32_max(largest, s.bits(s.abs(*v)));
            }
            let largest = s.i32_splat(s.i32_reduce_max(largest));
            let (scale, inverse) = int16::scale(s, largest, int16::ROW_BITS);
            for (i, v) in values.into_iter().enumerate() {
                s.store_u16(to.cast::<u16>().add(i * LANES), int16::code(s, v, inverse));
            }
            s.store_first(to.add(INT16_GROUP * 2).cast(), scale, 1);
        }
    }
}

/// One row of q8-rows: `n` codes, then scales, then sums of codes.
///
/// # Safety
/// `x` must be valid for `n` reads, `to` for `n + n / 32 * 8` writes; `n` is whole blocks.
#[inline(always)]
unsafe fn quantize_row<S: Simd>(s: S, x: *const f32, to: *mut u8, n: usize) {
    // SAFETY: the caller's. `n` is a multiple of 32, so scales and sums are aligned.
    unsafe {
        let scales = to.add(n).cast::<f32>();
        let sums = to.add(n + n / BLOCK * 4).cast::<i32>();
        for block in 0..n / BLOCK {
            let x = x.add(block * BLOCK);
            let (a, b) = (s.load(x), s.load(x.add(LANES)));
            let scale = largest(s, a, b) / 127.0;
            let mut codes = [s.i32_splat(0); 2];
            if scale != 0.0 {
                for (code, v) in codes.iter_mut().zip([a, b]) {
                    let q = s.round_half_even(s.div(v, s.splat(scale)));
                    // NaN becomes 127; its block's scale is NaN.
                    let q = s.max(s.min(q, s.splat(127.0)), s.splat(-127.0));
                    *code = s.to_i32(q);
                }
            }
            s.store_i8(to.add(block * BLOCK).cast(), codes[0]);
            s.store_i8(to.add(block * BLOCK + LANES).cast(), codes[1]);
            *scales.add(block) = scale;
            *sums.add(block) = s.i32_reduce_sum(s.i32_add(codes[0], codes[1]));
        }
    }
}
