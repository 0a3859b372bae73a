//! Element types.

use gguf::TensorType;

/// The element type of a tensor.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub enum DType {
    /// IEEE binary32. Every gradient has this type.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// Signed 32-bit integers: token ids, positions, page tables. Never differentiated.
    I32,
    /// Activation rows quantized by [`crate::Op::QuantizeRows`]: per row, `K` signed codes in
    /// [-127, 127], then `K/32` f32 scales, then `K/32` i32 sums of the codes of each block.
    Q8Rows,
    /// Rows in block floating point, by [`crate::Op::Cast`]: what gradients pass quantized weights
    /// in ([`crate::GradPrecision::Int16`]). Per row, groups of 64 elements, the last filled up
    /// with zeros: 64 codes, i16 in [-16383, 16383], then their f32 scale. Where
    /// `e = floor(log2(m))` and `m` is the group's largest magnitude, the scale is
    /// `2^(max(e, -113) - 13)`; a code is `x / scale`, to nearest even. A group with an infinity or
    /// NaN has the scale NaN, and codes that say nothing.
    Int16Rows,
    /// A GGML block format; always a leaf, or a row of a cache.
    Block(TensorType),
}

/// Elements per block of [`DType::Q8Rows`].
pub const Q8_ROWS_BLOCK: usize = 32;

/// Elements per group of [`DType::Int16Rows`].
pub const INT16_GROUP: usize = 64;

impl DType {
    /// The name used in messages: `f32`, `q8-rows`, `Q4_K`.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::Q8Rows => "q8-rows",
            DType::Int16Rows => "int16-rows",
            DType::Block(t) => t.name(),
        }
    }

    /// True for f32, f16 and bf16.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16)
    }

    /// Bytes of one row of `cols` elements, or `None` when `cols` is not a whole number of
    /// blocks or the size overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            DType::F32 | DType::I32 => cols.checked_mul(4),
            DType::F16 | DType::BF16 => cols.checked_mul(2),
            DType::Q8Rows => {
                if !cols.is_multiple_of(Q8_ROWS_BLOCK) {
                    return None;
                }
                cols.checked_add((cols / Q8_ROWS_BLOCK).checked_mul(8)?)
            }
            DType::Int16Rows => cols.div_ceil(INT16_GROUP).checked_mul(INT16_GROUP * 2 + 4),
            DType::Block(t) => t.row_bytes(cols),
        }
    }

    /// Bytes of one element, for the types that have one; `None` for block formats.
    pub fn element_bytes(self) -> Option<usize> {
        match self {
            DType::F32 | DType::I32 => Some(4),
            DType::F16 | DType::BF16 => Some(2),
            DType::Q8Rows | DType::Int16Rows | DType::Block(_) => None,
        }
    }
}

impl From<TensorType> for DType {
    fn from(t: TensorType) -> DType {
        match t {
            TensorType::F32 => DType::F32,
            TensorType::F16 => DType::F16,
            TensorType::BF16 => DType::BF16,
            TensorType::I32 => DType::I32,
            t => DType::Block(t),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
