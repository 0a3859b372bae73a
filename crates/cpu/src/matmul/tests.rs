use gguf::TensorType;
use graph::{HostTensor, Layout, Shape};

use super::testing::{Random, WEIGHTS, dequantized, random_weight};
use super::*;
use crate::pack::PackedMatrix;
use crate::simd::{Family, Isa};

fn families() -> impl Iterator<Item = Isa> {
    crate::testing::families().filter_map(Isa::of)
}

fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap()
}

fn pack(dtype: DType, n: usize, k: usize, bytes: &[u8]) -> PackedMatrix {
    PackedMatrix::pack(&HostTensor { dtype, shape: shape(&[n, k]), bytes }).unwrap()
}

/// Memory at a multiple of 64 bytes.
#[derive(Clone)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read through pointers")] [u8; 64]);

/// An operand.
#[derive(Copy, Clone)]
enum Data<'a> {
    Memory(&'a [u8]),
    Packed(&'a PackedMatrix),
}

fn bytes<T: Copy>(x: &[T]) -> &[u8] {
    // SAFETY: plain numbers have no padding.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), std::mem::size_of_val(x)) }
}

/// Runs a product on every tile, of a round the last tile first, in memory and scratch full of NaN.
fn multiply(isa: Isa, op: Op, a: (Arg, Data<'_>), b: (Arg, Data<'_>), out: &[usize]) -> Vec<f32> {
    let args = [a.0, b.0];
    let out = Arg::dense(DType::F32, shape(out));
    let needs = supports(&Call { op: &op, args: &args, out }).unwrap();
    let inputs = [a, b].map(|(arg, data)| match data {
        // SAFETY: tests give as many bytes as the layout reaches.
        Data::Memory(bytes) => unsafe { Input::memory(arg, bytes.as_ptr()) },
        Data::Packed(matrix) => Input::packed(arg, matrix),
    });
    let count = out.shape.elements();
    let mut result = vec![Line([0xff; 64]); (count * 4).div_ceil(64) + 1];
    let to = result.as_mut_ptr().cast::<u8>();
    // SAFETY: `to` has room for the result; products keep nothing.
    let job = unsafe { Job::new(&op, &inputs, out, to, std::ptr::null_mut(), isa) };
    let round = tiles(&job);
    for tile in (0..rounds(&job)).flat_map(|i| (i * round..(i + 1) * round).rev()) {
        let mut scratch = vec![Line([0xff; 64]); needs.scratch.div_ceil(64) + 1];
        // SAFETY: lines are plain bytes at a multiple of 64.
        let floats = unsafe {
            std::slice::from_raw_parts_mut(scratch.as_mut_ptr().cast(), needs.scratch.div_ceil(4))
        };
        run_tile(&job, tile, Scratch::new(floats));
        crate::job::guards::check();
    }
    // SAFETY: as above.
    let all =
        unsafe { std::slice::from_raw_parts(result.as_ptr().cast::<f32>(), result.len() * 16) };
    assert!(all[count..].iter().all(|x| x.to_bits() == u32::MAX), "written beyond the result");
    all[..count].to_vec()
}

/// Rows as `QuantizeRows` gives them, and the values that they stand for.
fn quantize(x: &[f32], k: usize) -> (Vec<u8>, Vec<f64>) {
    let (mut out, mut values) = (Vec::new(), Vec::new());
    for row in x.chunks(k) {
        let (mut scales, mut sums) = (Vec::new(), Vec::new());
        for block in row.chunks(32) {
            let scale = block.iter().fold(0f32, |m, x| m.max(x.abs())) / 127.0;
            let codes = block
                .iter()
                .map(|x| if scale == 0.0 { 0 } else { (x / scale).round_ties_even() as i8 });
            sums.push(codes.clone().map(i32::from).sum::<i32>());
            values.extend(codes.clone().map(|c| f64::from(c) * f64::from(scale)));
            out.extend(codes.map(|c| c as u8));
            scales.push(scale);
        }
        out.extend(bytes(&scales));
        out.extend(bytes(&sums));
    }
    (out, values)
}

fn blocks_only() -> impl Iterator<Item = (DType, usize)> {
    WEIGHTS.into_iter().filter_map(|dtype| match dtype {
        DType::Block(ty) => Some((dtype, ty.block_len())),
        _ => None,
    })
}

const NT: Op = Op::MatMul { ta: false, tb: true };
const NN: Op = Op::MatMul { ta: false, tb: false };

fn resident(w: &PackedMatrix) -> (Arg, Data<'_>) {
    let (dtype, n, k) = (graph::Resident::dtype(w), w.geometry().n, w.geometry().k);
    let mut arg = Arg::dense(dtype, shape(&[n, k]));
    arg.resident = true;
    (arg, Data::Packed(w))
}

fn quantized_product(isa: Isa, w: &PackedMatrix, x: &[u8], m: usize) -> Vec<f32> {
    let (n, k) = (w.geometry().n, w.geometry().k);
    let a = Arg::dense(DType::Q8Rows, shape(&[m, k]));
    multiply(isa, NT, (a, Data::Memory(x)), resident(w), &[m, n])
}

fn memory<T: Copy>(dtype: DType, dims: &[usize], x: &[T]) -> (Arg, Data<'static>) {
    // Tests keep the memory as long as the operand.
    let data = bytes(x);
    // SAFETY: see above.
    let data = unsafe { std::slice::from_raw_parts(data.as_ptr(), data.len()) };
    (Arg::dense(dtype, shape(dims)), Data::Memory(data))
}

/// The largest |difference| over the sum of the terms' magnitudes, of `[m, n]` results.
fn error(got: &[f32], n: usize, k: usize, term: impl Fn(usize, usize, usize) -> (f64, f64)) -> f64 {
    let mut worst = 0.0;
    for (i, &x) in got.iter().enumerate() {
        let (mut sum, mut size) = (0.0, 1e-30);
        for j in 0..k {
            let (a, b) = term(i / n, i % n, j);
            sum += a * b;
            size += (a * b).abs();
        }
        let error = (f64::from(x) - sum).abs() / size;
        assert!(error.is_finite(), "{x} at row {} column {}", i / n, i % n);
        worst = f64::max(worst, error);
    }
    worst
}

#[test]
fn quantized_products_match_f64() {
    for (dtype, block) in blocks_only() {
        for (m, n, k) in [(1, 48, 512), (3, 37, 3 * block), (7, 16, block), (30, 33, 256)] {
            let weight = random_weight(dtype, n, k, (m + k) as u64);
            let w = pack(dtype, n, k, &weight);
            let values = dequantized(dtype, &weight, n * k);
            let (x, a) = quantize(&Random::new(k as u64).floats(m * k), k);
            for isa in families() {
                let got = quantized_product(isa, &w, &x, m);
                let worst =
                    error(&got, n, k, |i, j, l| (a[i * k + l], f64::from(values[j * k + l])));
                // Measured: 5.6e-8.
                assert!(worst < 2e-7, "{dtype} {:?} [{m}, {n}, {k}]: {worst:e}", isa.family());
            }
        }
    }
}

#[test]
fn integer_sums_are_exact() {
    // Scales of 1 and 32 elements: the result is the integer sum itself, on every family.
    let dtype = DType::Block(TensorType::Q8_0);
    let one = half::f16::from_f32(1.0).to_le_bytes();
    let mut random = Random::new(7);
    let weight: Vec<u8> = (0..64)
        .flat_map(|i| {
            let mut block = one.to_vec();
            // Every extreme, -128 too.
            block.extend((0..32).map(|_| match i {
                0 => 128,
                1 => 127,
                2 => 129,
                _ => random.bits() as u8,
            }));
            block
        })
        .collect();
    let w = pack(dtype, 64, 32, &weight);
    for extreme in [true, false] {
        let codes: Vec<i8> = (0..9 * 32)
            .map(|i| if extreme { [127, -127][i / 32 % 2] } else { (random.bits() % 255) as i8 })
            .map(|c| if c == -128 { 0 } else { c })
            .collect();
        let mut x = Vec::new();
        for row in codes.chunks(32) {
            x.extend(bytes(row));
            x.extend(1f32.to_le_bytes());
            x.extend(row.iter().map(|&c| i32::from(c)).sum::<i32>().to_le_bytes());
        }
        for isa in families() {
            for (i, got) in quantized_product(isa, &w, &x, 9).into_iter().enumerate() {
                let (row, col) = (i / 64, i % 64);
                let sum: i32 = codes[row * 32..][..32]
                    .iter()
                    .zip(&weight[col * 34 + 2..])
                    .map(|(&x, &w)| i32::from(x) * i32::from(w.cast_signed()))
                    .sum();
                assert_eq!(got, sum as f32, "{:?} row {row} column {col}", isa.family());
            }
        }
    }
}

#[test]
fn a_quantized_row_has_one_value() {
    for (dtype, block) in blocks_only() {
        let (n, k) = (83, block.max(96).next_multiple_of(block));
        let w = pack(dtype, n, k, &random_weight(dtype, n, k, 9));
        let (x, _) = quantize(&Random::new(11).floats(64 * k), k);
        let row_bytes = x.len() / 64;
        for isa in families() {
            let alone: Vec<f32> =
                x.chunks(row_bytes).flat_map(|row| quantized_product(isa, &w, row, 1)).collect();
            for m in [2, 3, 4, 5, 7, 8, 13, 64] {
                for (i, rows) in x.chunks_exact(m * row_bytes).enumerate() {
                    let got = quantized_product(isa, &w, rows, m);
                    let expected = &alone[i * m * n..][..m * n];
                    let same = got.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{dtype} {:?} rows {m} x {i}", isa.family());
                }
            }
        }
    }
}

#[test]
fn tiles_do_not_change_bits() {
    let dtype = DType::Block(TensorType::Q4K);
    let (m, n, k) = (29, 150, 256);
    let w = pack(dtype, n, k, &random_weight(dtype, n, k, 1));
    let (x, _) = quantize(&Random::new(2).floats(m * k), k);
    for isa in families() {
        let whole = quantized_product(isa, &w, &x, m);
        for (rows, panels) in [(1, 1), (5, 3), (29, 2), (8, 10), (2, 7)] {
            let mut out = vec![f32::NAN; m * n];
            let mut scratch = vec![Line([0xff; 64]); quantized::scratch(w.geometry(), m) / 64 + 1];
            for row in (0..m).step_by(rows) {
                for panel in (0..n.div_ceil(PANEL)).step_by(panels) {
                    let tile = quantized::Forward {
                        weight: w.panels(),
                        x: x.as_ptr(),
                        rows: row..(row + rows).min(m),
                        panels: panel..(panel + panels).min(n.div_ceil(PANEL)),
                        out: out.as_mut_ptr(),
                        out_step: n,
                        scratch: scratch.as_mut_ptr().cast(),
                    };
                    drive(isa, tile);
                }
            }
            assert_eq!(out, whole, "{:?} tiles {rows} x {panels}", isa.family());
        }
    }
}

#[test]
fn gradients_through_packed_weights_match_f64() {
    for dtype in WEIGHTS {
        let block = if let DType::Block(ty) = dtype { ty.block_len() } else { 1 };
        for (m, n, k) in [(1, 16, 256), (19, 37, 512), (100, 200, block), (8, 1, 3 * block)] {
            let weight = random_weight(dtype, n, k, 4);
            let w = pack(dtype, n, k, &weight);
            let values = dequantized(dtype, &weight, n * k);
            let dy = Random::new(6).floats(m * n);
            for isa in families() {
                let a = memory(DType::F32, &[m, n], &dy);
                let got = multiply(isa, NN, a, resident(&w), &[m, k]);
                let worst = error(&got, k, n, |i, j, l| {
                    (f64::from(dy[i * n + l]), f64::from(values[l * k + j]))
                });
                // Measured: 3.5e-7.
                assert!(worst < 1e-6, "{dtype} {:?} [{m}, {n}, {k}]: {worst:e}", isa.family());
                // Alone, and with the weight in memory, the same bits.
                let last = memory(DType::F32, &[1, n], &dy[(m - 1) * n..]);
                let alone = multiply(isa, NN, last, resident(&w), &[1, k]);
                assert_eq!(alone, got[(m - 1) * k..], "{dtype} {:?}", isa.family());
                let floats = memory(DType::F32, &[n, k], &values);
                assert_eq!(multiply(isa, NN, a, floats, &[m, k]), got, "{dtype}");
            }
        }
    }
}

/// Sums of many elements are added up in rounds: the bits of a row alone, which has one.
#[test]
fn rounds_do_not_change_bits() {
    let (m, n, k) = (100, 12_010, 448);
    for dtype in [DType::Block(TensorType::Q8_0), DType::Block(TensorType::Q4K), DType::F16] {
        let k = if dtype == DType::Block(TensorType::Q4K) { 512 } else { k };
        let weight = random_weight(dtype, n, k, 21);
        let (w, values) = (pack(dtype, n, k, &weight), dequantized(dtype, &weight, n * k));
        let dy = Random::new(22).floats(m * n);
        let rounded: Vec<_> = dy.iter().map(|&x| half::bf16::from_f32(x)).collect();
        let out = Arg::dense(DType::F32, shape(&[m, k]));
        let kinds = [(memory(DType::F32, &[m, n], &dy), resident(&w), Kind::Transposed)];
        let floats = (memory(DType::F32, &[m, n], &dy), memory(DType::F32, &[n, k], &values));
        let kinds = kinds.into_iter().chain([(floats.0, floats.1, Kind::Memory)]);
        let narrow = (memory(DType::BF16, &[m, n], &rounded), resident(&w), Kind::Bf16);
        let kinds = kinds.chain((dtype != DType::F16).then_some(narrow));
        let groups = int16_rows(&dy, n);
        let integer = (memory(DType::Int16Rows, &[m, n], &groups), resident(&w), Kind::Int16);
        let kinds = kinds.chain((dtype != DType::F16).then_some(integer));
        for (a, b, kind) in kinds {
            let isa = Isa::Portable(crate::simd::Portable);
            let rounds = if kind == Kind::Int16 { 2 } else { 7 };
            assert_eq!(grid_of(isa, kind, &a.0, &b.0, &out, false).rounds(), rounds);
            // AMX adds up in steps of its own, in one round.
            for isa in families().filter(|isa| (kind, isa.family()) != (Kind::Bf16, Family::Amx)) {
                let got = multiply(isa, NN, a, b, &[m, k]);
                for row in [0, 57, m - 1] {
                    let one = match kind {
                        Kind::Bf16 => memory(DType::BF16, &[1, n], &rounded[row * n..]),
                        Kind::Int16 => {
                            let from = row * n.div_ceil(INT16_GROUP) * (int16::GROUP_BYTES / 4);
                            memory(DType::Int16Rows, &[1, n], &groups[from..])
                        }
                        _ => memory(DType::F32, &[1, n], &dy[row * n..]),
                    };
                    let alone = multiply(isa, NN, one, b, &[1, k]);
                    assert!(alone == got[row * k..][..k], "{dtype} {kind:?} {:?}", isa.family());
                }
            }
        }
    }
}

/// Stopped after any tile of any round, resumed there, with one thread or two.
#[test]
fn rounds_may_be_stopped_anywhere() {
    let (m, n, k) = (100, 12_000, 448);
    let dtype = DType::Block(TensorType::Q8_0);
    let mut case = crate::testing::Case::new();
    let w = case.weight("w", dtype, &[n, k], &random_weight(dtype, n, k, 31));
    let dy = case.floats("dy", &[m, n], &Random::new(32).floats(m * n));
    let y = case.graph.push(NN, &[dy, w], "y").unwrap();
    for family in crate::testing::families().filter(|f| *f != Family::Portable) {
        let of = |threads, stop: &dyn graph::Stop| {
            let cpu = crate::Cpu::new(threads, Some(family)).unwrap();
            case.run_in_pieces(&cpu, &[y], stop).unwrap()
        };
        let whole = of(1, &());
        assert!(of(2, &()) == whole, "{family:?}");
        for (threads, every) in [(1, 1), (2, 1), (2, 3)] {
            let stop = crate::testing::Every::new(every);
            assert!(of(threads, &stop) == whole, "{family:?}: {threads} threads, every {every}");
        }
    }
}

/// Two tiles of columns, of which the last is half a panel, at the end of the weight.
#[test]
fn the_last_columns_of_packed_floats_are_the_last_that_are_read() {
    let (m, n, k) = (2, 720, 40);
    let dy = Random::new(13).floats(m * n);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let weight = random_weight(dtype, n, k, 14);
        let w = pack(dtype, n, k, &weight);
        for isa in families() {
            let a = memory(DType::F32, &[m, n], &dy);
            let out = Arg::dense(DType::F32, shape(&[m, k]));
            let grid = grid(Kind::Transposed, &a.0, &resident(&w).0, &out, false);
            assert_eq!(grid.panel_tiles(), 2);
            let got = multiply(isa, NN, a, resident(&w), &[m, k]);
            let expected = multiply(isa, NN, a, memory(dtype, &[n, k], &weight), &[m, k]);
            assert_eq!(got, expected, "{dtype} {:?}", isa.family());
        }
    }
}

/// Sizes with every kind of rest: rows and outputs of no whole tile, one output, one row.
const ODD: [(usize, usize, usize); 6] =
    [(1, 16, 256), (19, 37, 512), (100, 200, 256), (8, 1, 768), (33, 96, 256), (70, 607, 256)];

#[test]
fn gradients_in_bf16_match_f64() {
    for (dtype, _) in blocks_only() {
        for (m, n, k) in ODD {
            let weight = random_weight(dtype, n, k, 4);
            let w = pack(dtype, n, k, &weight);
            let rounded = |x: &f32| half::bf16::from_f32(*x);
            let values: Vec<_> = dequantized(dtype, &weight, n * k).iter().map(rounded).collect();
            let dy: Vec<_> = Random::new(6).floats(m * n).iter().map(rounded).collect();
            for isa in families() {
                let a = memory(DType::BF16, &[m, n], &dy);
                let got = multiply(isa, NN, a, resident(&w), &[m, k]);
                let worst = error(&got, k, n, |i, j, l| {
                    (dy[i * n + l].to_f64(), values[l * k + j].to_f64())
                });
                // Measured: 3.4e-7.
                assert!(worst < 1e-6, "{dtype} {:?} [{m}, {n}, {k}]: {worst:e}", isa.family());
                // Alone and in company the same bits.
                for row in [0, m / 2, m - 1] {
                    let one = memory(DType::BF16, &[1, n], &dy[row * n..]);
                    let alone = multiply(isa, NN, one, resident(&w), &[1, k]);
                    assert_eq!(alone, got[row * k..][..k], "{dtype} {:?}", isa.family());
                }
            }
        }
    }
}

/// The scale of a group of int16-rows, or of a weight beside it.
fn int16_scale(group: impl Iterator<Item = f32>, bits: i32) -> f32 {
    let largest = group.fold(0f32, |m, x| if x.abs() > m || x.is_nan() { x.abs() } else { m });
    match largest {
        m if !m.is_finite() => f32::NAN,
        m => 2f32.powi(((f64::from(m).to_bits() >> 52) as i32 - 1023).max(-113) + 1 - bits),
    }
}

/// The codes and scales of int16-rows of `n` elements.
fn int16_codes(x: &[f32], n: usize) -> (Vec<i16>, Vec<f32>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for group in x.chunks(n).flat_map(|row| row.chunks(INT16_GROUP)) {
        let scale = int16_scale(group.iter().copied(), 14);
        scales.push(scale);
        let code = |x: &f32| (x / scale).round_ties_even().clamp(-16383.0, 16383.0) as i16;
        codes.extend(group.iter().map(code).chain([0; INT16_GROUP]).take(INT16_GROUP));
    }
    (codes, scales)
}

/// Their bytes, four at a time.
fn int16_rows(x: &[f32], n: usize) -> Vec<u32> {
    let (codes, scales) = int16_codes(x, n);
    let mut rows = Vec::new();
    for (codes, scale) in codes.chunks(INT16_GROUP).zip(scales) {
        let pair = |p: &[i16]| u32::from(p[0] as u16) | u32::from(p[1] as u16) << 16;
        rows.extend(codes.chunks(2).map(pair).chain([scale.to_bits()]));
    }
    rows
}

/// What [`int16`] says it computes, in plain numbers.
fn int16_product(isa: Isa, dy: &[f32], values: &[f32], [m, n, k]: [usize; 3]) -> Vec<f32> {
    let (codes, scales) = int16_codes(dy, n);
    let mut out = vec![0f32; m * k];
    for (group, matrix) in values.chunks(INT16_GROUP * k).enumerate() {
        for column in 0..k {
            let values = matrix.iter().skip(column).step_by(k);
            let scale = int16_scale(values.clone().copied(), 11);
            let weight: Vec<_> = values.map(|x| (x / scale).round_ties_even() as i64).collect();
            for row in 0..m {
                let at = row * n.div_ceil(INT16_GROUP) + group;
                let left = codes[at * INT16_GROUP..].iter().map(|x| i64::from(*x));
                let sum: i64 = left.zip(&weight).map(|(x, w)| x * w).sum();
                let sum = i32::try_from(sum).unwrap() as f32 * scale;
                let out = &mut out[row * k + column];
                *out = match isa.family() {
                    Family::Portable => sum * scales[at] + *out,
                    _ => sum.mul_add(scales[at], *out),
                };
            }
        }
    }
    out
}

#[test]
fn rows_are_made_int16_as_declared() {
    let mut random = Random::new(17);
    for n in [1, 15, 128, 129, 300] {
        let mut x = random.floats(4 * n);
        // All but 2, and -2: the largest code.
        x[0] = 1.999_999_9;
        x[n / 2] = -1.999_999_9;
        x[n..2 * n].iter_mut().for_each(|x| *x *= 3e-38);
        x[2 * n..3 * n].fill(0.0);
        x[3 * n..].iter_mut().for_each(|x| *x *= f32::MAX);
        for cpu in crate::testing::devices() {
            let mut case = crate::testing::Case::new();
            let from = case.floats("x", &[4, n], &x);
            let rows = case.graph.cast(from, DType::Int16Rows).unwrap();
            let made = case.run(&cpu, &[rows]).unwrap();
            assert!(made[0] == bytes(&int16_rows(&x, n)), "{n} on {cpu:?}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[n - 1] = bad;
            for cpu in crate::testing::devices() {
                let mut case = crate::testing::Case::new();
                let from = case.floats("x", &[4, n], &x);
                let rows = case.graph.cast(from, DType::Int16Rows).unwrap();
                let made = case.run(&cpu, &[rows]).unwrap();
                let groups = made[0].chunks(int16::GROUP_BYTES).enumerate();
                for (i, group) in groups.take(n.div_ceil(INT16_GROUP)) {
                    let scale = f32::from_le_bytes(*group.last_chunk().unwrap());
                    assert_eq!(scale.is_nan(), (i + 1) * INT16_GROUP >= n, "{bad}, {n}");
                }
            }
        }
    }
}

#[test]
fn gradients_in_int16_are_what_is_declared() {
    for (dtype, _) in blocks_only() {
        for (m, n, k) in ODD {
            let weight = random_weight(dtype, n, k, 4);
            let w = pack(dtype, n, k, &weight);
            let values = dequantized(dtype, &weight, n * k);
            let dy = Random::new(6).floats(m * n);
            let rows = int16_rows(&dy, n);
            for isa in families() {
                let a = memory(DType::Int16Rows, &[m, n], &rows);
                let got = multiply(isa, NN, a, resident(&w), &[m, k]);
                let name = format!("{dtype} {:?} [{m}, {n}, {k}]", isa.family());
                assert!(got == int16_product(isa, &dy, &values, [m, n, k]), "{name}");
                let worst = error(&got, k, n, |i, j, l| {
                    (f64::from(dy[i * n + l]), f64::from(values[l * k + j]))
                });
                // Of the terms' magnitudes. Measured: 9.2e-4, in a sum of 16; hardly any of many.
                assert!(worst < 2e-3, "{name}: {worst:e}");
            }
        }
    }
}

/// A group whose products are all as large as they can be.
#[test]
fn the_largest_sum_of_a_group_fits() {
    let (n, k, dtype) = (2 * INT16_GROUP, 32, DType::Block(TensorType::Q8_0));
    for signs in [[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]] {
        // 127 * 129 / 8 is 2047.9.
        let blocks = |code: i8| {
            let scale = half::f16::from_f32(if code == 127 { 129.0 / 64.0 } else { 1.0 });
            let mut block = scale.to_le_bytes().to_vec();
            block.extend([code.cast_unsigned(); 32]);
            block
        };
        let weight: Vec<u8> = (0..n).flat_map(|_| blocks(127)).collect();
        let values = dequantized(dtype, &weight, n * k);
        assert!(values.iter().all(|x| (x / int16_scale([*x].into_iter(), 11)).round() == 2048.0));
        let w = pack(dtype, n, k, &weight);
        let dy: Vec<f32> = (0..n).map(|i| signs[i % 2] * 0.999_99).collect();
        let rows = int16_rows(&dy, n);
        for isa in families() {
            let a = memory(DType::Int16Rows, &[1, n], &rows);
            let got = multiply(isa, NN, a, resident(&w), &[1, k]);
            assert!(got == int16_product(isa, &dy, &values, [1, n, k]), "{:?}", isa.family());
        }
    }
}

/// Zeros, numbers near the ends of what f32 holds, and what is not a number.
#[test]
fn rows_of_int16_say_what_is_not_finite() {
    let (m, n, k, dtype) = (5, 300, 64, DType::Block(TensorType::Q4_1));
    let w = random_weight(dtype, n, k, 8);
    let (weight, values) = (pack(dtype, n, k, &w), dequantized(dtype, &w, n * k));
    let mut dy = Random::new(9).floats(m * n);
    dy[..n].fill(0.0);
    dy[n..2 * n].iter_mut().for_each(|x| *x *= 1e-36);
    dy[2 * n..3 * n].iter_mut().for_each(|x| *x *= 1e35);
    dy[3 * n + 200] = f32::NAN;
    dy[4 * n + 7] = f32::NEG_INFINITY;
    let rows = int16_rows(&dy, n);
    for isa in families() {
        let a = memory(DType::Int16Rows, &[m, n], &rows);
        let got = multiply(isa, NN, a, resident(&weight), &[m, k]);
        assert!(got[..k].iter().all(|x| *x == 0.0));
        assert!(got[k..2 * k].iter().any(|x| *x != 0.0));
        let declared = int16_product(isa, &dy[..3 * n], &values, [3, n, k]);
        assert!(got[..3 * k] == declared, "{:?}", isa.family());
        assert!(got[3 * k..].iter().all(|x| x.is_nan()));
    }
}

/// A weight with a scale that is not finite spoils its columns and no other.
#[test]
fn columns_of_int16_say_what_is_not_finite() {
    let (m, n, k, dtype) = (9, 300, 64, DType::Block(TensorType::Q8_0));
    for bad in [half::f16::NAN, half::f16::INFINITY, half::f16::NEG_INFINITY] {
        let mut weight = random_weight(dtype, n, k, 8);
        weight[200 * 68 + 34..][..2].copy_from_slice(&bad.to_le_bytes());
        let w = pack(dtype, n, k, &weight);
        let rows = int16_rows(&Random::new(9).floats(m * n), n);
        for isa in families() {
            let a = memory(DType::Int16Rows, &[m, n], &rows);
            let got = multiply(isa, NN, a, resident(&w), &[m, k]);
            let finite = |(i, x): (usize, &f32)| x.is_finite() == (i % k < 32);
            assert!(got.iter().enumerate().all(finite), "{bad} {:?}", isa.family());
        }
    }
}

/// What Intel's manual says that `TDPBF16PS` does, chain by chain.
#[test]
fn bf16_tiles_add_as_declared() {
    let Some(isa) = Isa::of(Family::Amx) else { return };
    let dtype = DType::Block(TensorType::Q5_0);
    let (m, n, k) = (21, 93, 64);
    let weight = random_weight(dtype, n, k, 11);
    let w = pack(dtype, n, k, &weight);
    let rounded = |x: &f32| half::bf16::from_f32(*x);
    let values: Vec<_> = dequantized(dtype, &weight, n * k).iter().map(rounded).collect();
    let dy: Vec<_> = Random::new(12).floats(m * n).iter().map(rounded).collect();
    let got = multiply(isa, NN, memory(DType::BF16, &[m, n], &dy), resident(&w), &[m, k]);
    for (i, got) in got.into_iter().enumerate() {
        let (row, column) = (i / k, i % k);
        let mut sum = 0f32;
        for step in (0..n).step_by(32) {
            let mut chains = [0f32; 2];
            for l in step..(step + 32).min(n) {
                let (a, b) = (dy[row * n + l].to_f32(), values[l * k + column].to_f32());
                chains[l % 2] = a.mul_add(b, chains[l % 2]);
            }
            sum += chains[0] + chains[1];
        }
        assert_eq!(got, sum, "row {row} column {column}");
    }
}

/// After a product no tile is in use: a thread hands on to those it starts what it uses.
#[cfg(target_arch = "x86_64")]
#[test]
fn tiles_are_released() {
    let Some(isa @ Isa::Amx(amx)) = Isa::of(Family::Amx) else { return };
    assert!(!crate::amx::in_use(amx));
    let dtype = DType::Block(TensorType::Q4_0);
    let w = pack(dtype, 40, 64, &random_weight(dtype, 40, 64, 1));
    let dy = vec![half::bf16::ONE; 20 * 40];
    multiply(isa, NN, memory(DType::BF16, &[20, 40], &dy), resident(&w), &[20, 64]);
    assert!(!crate::amx::in_use(amx));
    let one = crate::amx::Config::new([(16, 64); 8]);
    let tiles = amx.configure(&one);
    assert!(crate::amx::in_use(amx));
    drop(tiles);
    assert!(!crate::amx::in_use(amx));
}

#[test]
fn float_products_match_f64_whatever_is_transposed() {
    for (m, n, k) in [(1, 1, 1), (5, 40, 33), (9, 17, 400), (64, 96, 192), (150, 8, 193)] {
        let a = Random::new(1).floats(m * k);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let weight = random_weight(dtype, n, k, 2);
            let b = dequantized(dtype, &weight, n * k);
            for isa in families() {
                let mut results = Vec::new();
                for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                    let (a_dims, b_dims) =
                        (if ta { [k, m] } else { [m, k] }, if tb { [n, k] } else { [k, n] });
                    let left = memory(DType::F32, &a_dims, &a);
                    let right = memory(dtype, &b_dims, &weight);
                    let got = multiply(isa, Op::MatMul { ta, tb }, left, right, &[m, n]);
                    let at = |t: bool, rows: usize, cols: usize, i: usize, j: usize| {
                        if t { j * rows + i } else { i * cols + j }
                    };
                    let worst = error(&got, n, k, |i, j, l| {
                        (f64::from(a[at(ta, m, k, i, l)]), f64::from(b[at(tb, k, n, l, j)]))
                    });
                    // Measured: 2.5e-7.
                    assert!(worst < 8e-7, "{dtype} {:?} {ta} {tb}: {worst:e}", isa.family());
                    let packed = pack(dtype, b_dims[0], b_dims[1], &weight);
                    let same =
                        multiply(isa, Op::MatMul { ta, tb }, left, resident(&packed), &[m, n]);
                    assert_eq!(same, got, "{dtype} {:?} {ta} {tb} packed", isa.family());
                    results.push(got);
                }
                // A row alone.
                let last = memory(DType::F32, &[1, k], &a[(m - 1) * k..]);
                let right = memory(dtype, &[n, k], &weight);
                let alone = multiply(isa, NT, last, right, &[1, n]);
                assert_eq!(alone, results[1][(m - 1) * n..], "{dtype} {:?}", isa.family());
            }
        }
    }
}

#[test]
fn leading_dimensions_broadcast_and_layouts_are_read_in_place() {
    let (m, n, k) = (6, 20, 18);
    let x = Random::new(3).floats(3 * 2 * m * k);
    let y = Random::new(4).floats(3 * k * n);
    for isa in families() {
        // [3, 2, m, k] . [3, 1, k, n], and each of the six alone.
        let b = memory(DType::F32, &[3, 1, k, n], &y);
        let got = multiply(isa, NN, memory(DType::F32, &[3, 2, m, k], &x), b, &[3, 2, m, n]);
        for i in 0..6 {
            let left = memory(DType::F32, &[m, k], &x[i * m * k..][..m * k]);
            let right = memory(DType::F32, &[k, n], &y[i / 2 * k * n..][..k * n]);
            let alone = multiply(isa, NN, left, right, &[m, n]);
            assert_eq!(got[i * m * n..][..m * n], alone, "{i}");
        }
        // A rank-2 right operand is shared; a rank-2 left one too.
        let shared = memory(DType::F32, &[k, n], &y[..k * n]);
        let got = multiply(isa, NN, memory(DType::F32, &[6, m, k], &x), shared, &[6, m, n]);
        let rows = multiply(isa, NN, memory(DType::F32, &[6 * m, k], &x), shared, &[6 * m, n]);
        assert_eq!(got, rows);
        let left = memory(DType::F32, &[m, k], &x[..m * k]);
        let b = memory(DType::F32, &[3, k, n], &y);
        let got = multiply(isa, NN, left, b, &[3, m, n]);
        let alone = multiply(isa, NN, left, memory(DType::F32, &[k, n], &y[2 * k * n..]), &[m, n]);
        assert_eq!(got[2 * m * n..], alone);
        // Every second row, columns from the third on, of a wider matrix; repeated rows.
        let mut strided = memory(DType::F32, &[m, k - 3], &x);
        strided.0.layout = Layout { offset: 3, ..strided.0.layout };
        strided.0.layout.strides[0] = 2 * k;
        let dense: Vec<f32> = (0..m).flat_map(|i| x[2 * i * k + 3..][..k - 3].to_vec()).collect();
        let right = memory(DType::F32, &[k - 3, n], &y);
        let expected = multiply(isa, NN, memory(DType::F32, &[m, k - 3], &dense), right, &[m, n]);
        assert_eq!(multiply(isa, NN, strided, right, &[m, n]), expected);
        strided.0.layout.strides[0] = 0;
        let got = multiply(isa, NN, strided, right, &[m, n]);
        assert_eq!(got[..n], expected[..n]);
        assert_eq!(got[(m - 1) * n..], expected[..n]);
        // A right operand with no dense dimension.
        let mut sparse = memory(DType::F32, &[7, 5], &y);
        sparse.0.layout.strides[..2].copy_from_slice(&[3, 21]);
        let dense: Vec<f32> = (0..7)
            .flat_map(|i| (0..5).map(move |j| (i, j)))
            .map(|(i, j)| y[3 * i + 21 * j])
            .collect();
        let left = memory(DType::F32, &[4, 7], &x);
        let expected = multiply(isa, NN, left, memory(DType::F32, &[7, 5], &dense), &[4, 5]);
        assert_eq!(multiply(isa, NN, left, sparse, &[4, 5]), expected);
    }
}

#[test]
fn empty_products() {
    let dtype = DType::Block(TensorType::Q4_0);
    let w = pack(dtype, 20, 32, &random_weight(dtype, 20, 32, 1));
    for isa in families() {
        assert!(quantized_product(isa, &w, &[], 0).is_empty());
        let none = memory::<f32>(DType::F32, &[0, 20], &[]);
        assert!(multiply(isa, NN, none, resident(&w), &[0, 32]).is_empty());
        // A sum of nothing is 0.
        let a = memory::<f32>(DType::F32, &[3, 0], &[]);
        let b = memory::<f32>(DType::F32, &[0, 5], &[]);
        assert_eq!(multiply(isa, NN, a, b, &[3, 5]), [0.0; 15]);
        let b = memory::<f32>(DType::F32, &[0, 5], &[]);
        let packed = pack(DType::F32, 5, 0, &[]);
        assert_eq!(multiply(isa, NT, a, resident(&packed), &[3, 5]), [0.0; 15]);
        assert!(multiply(isa, NT, memory::<f32>(DType::F32, &[0, 5], &[]), b, &[0, 0]).is_empty());
    }
}

#[test]
fn what_is_not_supported_says_so() {
    let q4 = DType::Block(TensorType::Q4_0);
    let (q, f) =
        (Arg::dense(DType::Q8Rows, shape(&[2, 32])), Arg::dense(DType::F32, shape(&[2, 32])));
    let mut w = Arg::dense(q4, shape(&[8, 32]));
    let out = Arg::dense(DType::F32, shape(&[2, 8]));
    let ask = |op: &Op, a, b| supports(&Call { op, args: &[a, b], out });
    assert!(matches!(ask(&NT, q, w), Err(Unsupported::Kernel(_))));
    w.resident = true;
    assert!(ask(&NT, q, w).is_ok());
    assert!(matches!(ask(&NT, f, w), Err(Unsupported::Kernel(_))));
    let mut strided = q;
    strided.layout.strides[0] = 64;
    assert_eq!(ask(&NT, strided, w), Err(Unsupported::Layout(0)));
    let mut packed = f;
    packed.resident = true;
    assert!(matches!(ask(&NT, packed, f), Err(Unsupported::Kernel(_))));
}

#[test]
fn gradients_of_experts_take_floats_in_memory() {
    let op = Op::ExpertOuter { experts: 3 };
    let floats = Arg::dense(DType::F32, shape(&[4, 1, 8]));
    let ids = Arg::dense(DType::I32, shape(&[4, 1]));
    let out = Arg::dense(DType::F32, shape(&[3, 8, 8]));
    let ask = |a, b| experts::supports(&Call { op: &op, args: &[a, b, ids], out });
    assert!(ask(floats, floats).is_ok());
    let mut packed = floats;
    packed.resident = true;
    for other in [packed, Arg::dense(DType::F16, floats.shape)] {
        assert!(matches!(ask(other, floats), Err(Unsupported::Kernel(_))));
        assert!(matches!(ask(floats, other), Err(Unsupported::Kernel(_))));
    }
}

/// What a tile unpacks stays in the second-level cache.
#[test]
fn panels_are_unpacked_into_little_memory() {
    assert_eq!(float::scratch_floats(1) * 4, 12_928);
    assert_eq!(float::scratch_floats(float::TILE_PANELS) * 4, 152_064);
}

#[test]
fn tiles_are_small_and_many() {
    for (m, n, k) in [
        (1, 576, 576),
        (1, 49152, 576),
        (512, 576, 1536),
        (512, 1536, 576),
        (512, 49152, 576),
        (2048, 8192, 28672),
        (300, 262_144, 640),
    ] {
        let q = |resident, dtype, dims: [usize; 2]| {
            let mut arg = Arg::dense(dtype, shape(&dims));
            arg.resident = resident;
            arg
        };
        let w = q(true, DType::Block(TensorType::Q4_0), [n, k]);
        for (kind, a, out) in [
            (Kind::Quantized, q(false, DType::Q8Rows, [m, k]), [m, n]),
            (Kind::Transposed, q(false, DType::F32, [m, n]), [m, k]),
        ] {
            let out = q(false, DType::F32, out);
            let grid = grid(kind, &a, &w, &out, false);
            let work = grid.rows * grid.panels * PANEL * grid.depth;
            assert!(work <= 4 * MOST || grid.rows <= 24, "{kind:?} {grid:?}: {work}");
            assert!(grid.tiles() >= 4, "{kind:?} {grid:?}: {}", grid.tiles());
        }
        let (a, out) = (q(false, DType::Int16Rows, [m, n]), q(false, DType::F32, [m, k]));
        let grid = int16_grid(&a, &w, &out);
        let work = grid.rows * grid.panels * PANEL * grid.depth;
        assert!(work <= 3 * MOST_INT16 / 2, "{grid:?}: {work}");
        assert!(grid.tiles() >= 4, "{grid:?}: {}", grid.tiles());
        let (a, out) = (q(false, DType::BF16, [m, n]), q(false, DType::F32, [m, k]));
        let grid = bf16_grid(&a, &w, &out);
        let work = grid.rows * grid.panels * PANEL * grid.k;
        assert!(work <= 2 * MOST_BF16 || grid.rows <= 64, "{grid:?}: {work}");
        assert!(grid.tiles() >= 4, "{grid:?}: {}", grid.tiles());
    }
}
