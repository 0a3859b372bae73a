//! Values in f64 or i32, and their bytes.

use graph::{DType, INT16_GROUP, Invalid, Layout, Q8_ROWS_BLOCK, Shape};
use half::{bf16, f16};

/// The elements of a value, row-major.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Data {
    /// Any float or quantized dtype.
    Floats(Vec<f64>),
    /// i32.
    Ints(Vec<i32>),
}

/// A dense tensor of f64 or i32 elements. Quantized values are held unpacked.
#[derive(Clone, PartialEq, Debug)]
pub struct Value {
    shape: Shape,
    data: Data,
}

/// A vector of `n` copies, or an error instead of an abort when memory is out.
pub(crate) fn filled<T: Clone>(n: usize, with: T) -> Result<Vec<T>, Invalid> {
    let mut v = Vec::new();
    v.try_reserve_exact(n)
        .map_err(|_| Invalid::new(format!("no memory for a tensor of {n} elements")))?;
    v.resize(n, with);
    Ok(v)
}

fn counted(shape: &Shape, len: usize) -> Result<(), Invalid> {
    if shape.elements() == len {
        return Ok(());
    }
    Err(Invalid::new(format!("a tensor of shape {shape} was given {len} elements")))
}

impl Value {
    /// A float tensor.
    ///
    /// # Errors
    /// `Invalid` when there are not as many elements as the shape has.
    pub fn floats(shape: Shape, data: Vec<f64>) -> Result<Value, Invalid> {
        counted(&shape, data.len())?;
        Ok(Value { shape, data: Data::Floats(data) })
    }

    /// A float tensor of f32 elements.
    ///
    /// # Errors
    /// As [`Value::floats`].
    pub fn from_f32(shape: Shape, data: &[f32]) -> Result<Value, Invalid> {
        Value::floats(shape, data.iter().map(|&x| f64::from(x)).collect())
    }

    /// An integer tensor.
    ///
    /// # Errors
    /// As [`Value::floats`].
    pub fn ints(shape: Shape, data: Vec<i32>) -> Result<Value, Invalid> {
        counted(&shape, data.len())?;
        Ok(Value { shape, data: Data::Ints(data) })
    }

    /// The tensor whose little-endian, row-major bytes in `dtype` are given.
    ///
    /// # Errors
    /// `Invalid` when `bytes` has another length than such a tensor.
    pub fn decode(dtype: DType, shape: Shape, bytes: &[u8]) -> Result<Value, Invalid> {
        if shape.bytes(dtype) != Some(bytes.len()) {
            return Err(Invalid::new(format!(
                "a {dtype} tensor of shape {shape} was given {} bytes",
                bytes.len()
            )));
        }
        fn each<const N: usize, T>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks().0.iter().map(|&le| of(le)).collect()
        }
        let data = match dtype {
            DType::I32 => return Value::ints(shape, each(bytes, i32::from_le_bytes)),
            DType::F32 => each(bytes, |le| f64::from(f32::from_le_bytes(le))),
            DType::F16 => each(bytes, |le| f16::from_le_bytes(le).to_f64()),
            DType::BF16 => each(bytes, |le| bf16::from_le_bytes(le).to_f64()),
            DType::Q8Rows => {
                let mut data = filled(shape.elements(), 0.0)?;
                for row in 0..shape.rows() {
                    decode_q8_row(bytes, shape.cols(), row, &mut data);
                }
                data
            }
            DType::Int16Rows => {
                let mut data = filled(shape.elements(), 0.0)?;
                let row_bytes = DType::Int16Rows.row_bytes(shape.cols()).unwrap_or(0);
                if shape.cols() > 0 {
                    let rows = bytes.chunks(row_bytes).zip(data.chunks_mut(shape.cols()));
                    rows.for_each(|(bytes, row)| decode_int16_row(bytes, row));
                }
                data
            }
            DType::Block(format) => {
                let mut data = filled(shape.elements(), 0.0f32)?;
                gguf::blocks::dequantize(format, bytes, &mut data)
                    .map_err(|e| Invalid::new(e.to_string()))?;
                data.into_iter().map(f64::from).collect()
            }
        };
        Value::floats(shape, data)
    }

    /// The bytes of this tensor in `dtype`: each element is rounded to f32, then, as
    /// [`graph::Op::Cast`] and [`graph::Op::QuantizeRows`] say, to `dtype`.
    ///
    /// # Errors
    /// `Invalid` when `dtype` cannot hold it: floats as i32 or the reverse, a block format other
    /// than Q8_0, rows that are not whole blocks.
    pub fn encode(&self, dtype: DType) -> Result<Vec<u8>, Invalid> {
        let cannot = || Invalid::new(format!("no conversion of {} to {dtype}", self.shape));
        let size = self.shape.bytes(dtype).ok_or_else(cannot)?;
        let data = match (&self.data, dtype) {
            (Data::Ints(data), DType::I32) => {
                return Ok(data.iter().flat_map(|x| x.to_le_bytes()).collect());
            }
            (Data::Ints(_), _) | (_, DType::I32) => return Err(cannot()),
            (Data::Floats(data), _) => data,
        };
        let floats = || data.iter().map(|&x| x as f32);
        Ok(match dtype {
            DType::F32 => floats().flat_map(f32::to_le_bytes).collect(),
            DType::F16 => floats().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            DType::BF16 => floats().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            DType::Block(gguf::TensorType::Q8_0) => {
                let mut bytes = filled(size, 0)?;
                let floats: Vec<f32> = floats().collect();
                gguf::blocks::quantize_q8_0(&floats, &mut bytes)
                    .map_err(|e| Invalid::new(e.to_string()))?;
                bytes
            }
            DType::Q8Rows => {
                let floats: Vec<f32> = floats().collect();
                let mut bytes = Vec::new();
                let cols = self.shape.cols();
                for row in 0..self.shape.rows() {
                    encode_q8_row(&floats[row * cols..(row + 1) * cols], &mut bytes);
                }
                bytes
            }
            DType::Int16Rows => {
                let floats: Vec<f32> = floats().collect();
                let mut bytes = Vec::new();
                for row in floats.chunks(self.shape.cols().max(1)) {
                    for group in row.chunks(INT16_GROUP) {
                        let scale = int16_scale(group, 14);
                        for i in 0..INT16_GROUP {
                            let code =
                                group.get(i).map_or(0, |x| int16_code(*x, scale, 16383.0) as i16);
                            bytes.extend(code.to_le_bytes());
                        }
                        bytes.extend(scale.to_le_bytes());
                    }
                }
                bytes
            }
            DType::I32 | DType::Block(_) => return Err(cannot()),
        })
    }

    /// The shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The elements of a float tensor, row-major; `None` for integers.
    pub fn as_floats(&self) -> Option<&[f64]> {
        match &self.data {
            Data::Floats(data) => Some(data),
            Data::Ints(_) => None,
        }
    }

    /// As [`Value::as_floats`], to be changed.
    pub fn as_floats_mut(&mut self) -> Option<&mut [f64]> {
        match &mut self.data {
            Data::Floats(data) => Some(data),
            Data::Ints(_) => None,
        }
    }

    /// The elements of an integer tensor, row-major; `None` for floats.
    pub fn as_ints(&self) -> Option<&[i32]> {
        match &self.data {
            Data::Ints(data) => Some(data),
            Data::Floats(_) => None,
        }
    }

    /// The dense tensor of `shape` whose elements lie in this one's as `layout` says; `None`
    /// when it reaches beyond the end.
    pub(crate) fn strided(&self, shape: Shape, layout: &Layout) -> Option<Value> {
        let places: Vec<usize> = indices(shape)
            .map(|index| {
                let steps = index.iter().zip(&layout.strides);
                steps.fold(layout.offset, |at, (i, stride)| {
                    at.saturating_add(i.saturating_mul(*stride))
                })
            })
            .collect();
        let data = match &self.data {
            Data::Floats(data) => {
                Data::Floats(places.iter().map(|&p| data.get(p).copied()).collect::<Option<_>>()?)
            }
            Data::Ints(data) => {
                Data::Ints(places.iter().map(|&p| data.get(p).copied()).collect::<Option<_>>()?)
            }
        };
        Some(Value { shape, data })
    }

    /// The same elements under another shape.
    pub(crate) fn reshaped(&self, shape: Shape) -> Result<Value, Invalid> {
        counted(&shape, self.shape.elements())?;
        Ok(Value { shape, data: self.data.clone() })
    }
}

/// The scale of a group of [`DType::Int16Rows`], or of a weight beside it, whose codes are below
/// `2^bits` or equal to it.
pub(crate) fn int16_scale(group: &[f32], bits: i32) -> f32 {
    if group.iter().any(|x| !x.is_finite()) {
        return f32::NAN;
    }
    let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    // In f64 the exponent of every f32 is a normal one.
    let e = ((f64::from(largest).to_bits() >> 52) as i32 - 1023).max(-113);
    2f32.powi(e + 1 - bits)
}

/// The code of an element of a group with this scale; NaN beside a scale that is.
pub(crate) fn int16_code(x: f32, scale: f32, most: f64) -> f64 {
    (f64::from(x) / f64::from(scale)).round_ties_even().clamp(-most, most)
}

fn decode_int16_row(bytes: &[u8], row: &mut [f64]) {
    let groups = bytes.chunks(INT16_GROUP * 2 + 4).zip(row.chunks_mut(INT16_GROUP));
    for (bytes, group) in groups {
        let (codes, scale) = bytes.split_at(INT16_GROUP * 2);
        let scale = scale.first_chunk().map_or(f32::NAN, |le| f32::from_le_bytes(*le));
        for (x, le) in group.iter_mut().zip(codes.as_chunks().0) {
            *x = f64::from(i16::from_le_bytes(*le)) * f64::from(scale);
        }
    }
}

/// A row of [`DType::Q8Rows`]: `cols` codes, then the scale of each block, then the sum of each
/// block's codes.
fn encode_q8_row(row: &[f32], bytes: &mut Vec<u8>) {
    let (mut codes, mut scales, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for block in row.chunks(Q8_ROWS_BLOCK) {
        let largest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let scale = largest / 127.0;
        let mut sum = 0i32;
        for x in block {
            let code = if scale == 0.0 { 0 } else { (x / scale).round_ties_even() as i8 };
            sum += i32::from(code);
            codes.push(code.cast_unsigned());
        }
        scales.extend(scale.to_le_bytes());
        sums.extend(sum.to_le_bytes());
    }
    bytes.extend(codes);
    bytes.extend(scales);
    bytes.extend(sums);
}

fn decode_q8_row(bytes: &[u8], cols: usize, row: usize, out: &mut [f64]) {
    let row_bytes = cols + cols / Q8_ROWS_BLOCK * 8;
    let bytes = &bytes[row * row_bytes..(row + 1) * row_bytes];
    for i in 0..cols {
        let at = cols + i / Q8_ROWS_BLOCK * 4;
        let le = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let code = f64::from(bytes[i].cast_signed());
        out[row * cols + i] = f64::from(f32::from_le_bytes(le)) * code;
    }
}

/// The index of every element of a shape, in row-major order; entries beyond the rank are 0.
pub(crate) fn indices(shape: Shape) -> impl Iterator<Item = [usize; graph::MAX_RANK]> {
    (0..shape.elements()).map(move |mut i| {
        let mut index = [0; graph::MAX_RANK];
        for d in (0..shape.rank()).rev() {
            index[d] = i % shape.dim(d);
            i /= shape.dim(d);
        }
        index
    })
}

/// The place of an element in a dense tensor of a shape.
pub(crate) fn offset(shape: Shape, index: &[usize]) -> usize {
    (0..shape.rank()).fold(0, |at, d| at * shape.dim(d) + index[d])
}
