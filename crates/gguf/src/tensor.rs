//! Tensor types, and where a tensor lies in a file.

use crate::error::{Error, ErrorKind, shown};

/// The types that Gradus reads; numbers, block lengths and block sizes are those of ggml's
/// `ggml.h` and `ggml-common.h`.
#[derive(Copy, Clone, Eq, PartialEq, Hash, Debug)]
#[allow(missing_docs, reason = "each is named as in ggml; `name` says it")]
pub enum TensorType {
    F32,
    F16,
    BF16,
    I32,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    MXFP4,
}

/// The names of the supported types, as refusals list them.
pub(crate) const SUPPORTED: &str = "F32 F16 BF16 I32 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K \
                                    Q6_K IQ4_NL IQ4_XS MXFP4";

impl TensorType {
    /// Every supported type.
    pub const ALL: [Self; 17] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::IQ4NL,
        Self::IQ4XS,
        Self::MXFP4,
    ];

    /// ggml's number, name, elements per block and bytes per block.
    const fn facts(self) -> (u32, &'static str, usize, usize) {
        match self {
            Self::F32 => (0, "F32", 1, 4),
            Self::F16 => (1, "F16", 1, 2),
            Self::BF16 => (30, "BF16", 1, 2),
            Self::I32 => (26, "I32", 1, 4),
            Self::Q4_0 => (2, "Q4_0", 32, 18),
            Self::Q4_1 => (3, "Q4_1", 32, 20),
            Self::Q5_0 => (6, "Q5_0", 32, 22),
            Self::Q5_1 => (7, "Q5_1", 32, 24),
            Self::Q8_0 => (8, "Q8_0", 32, 34),
            Self::Q2K => (10, "Q2_K", 256, 84),
            Self::Q3K => (11, "Q3_K", 256, 110),
            Self::Q4K => (12, "Q4_K", 256, 144),
            Self::Q5K => (13, "Q5_K", 256, 176),
            Self::Q6K => (14, "Q6_K", 256, 210),
            Self::IQ4NL => (20, "IQ4_NL", 32, 18),
            Self::IQ4XS => (23, "IQ4_XS", 256, 136),
            Self::MXFP4 => (39, "MXFP4", 32, 17),
        }
    }

    /// ggml's number for the type, as it is written in files.
    pub const fn id(self) -> u32 {
        self.facts().0
    }

    /// ggml's name: `Q4_K`.
    pub const fn name(self) -> &'static str {
        self.facts().1
    }

    /// Elements per block; 1 for types that are not quantized.
    pub const fn block_len(self) -> usize {
        self.facts().2
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        self.facts().3
    }

    /// Whether elements are stored in blocks that share a scale.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of a row of `cols` elements; `None` if those are not whole blocks or too many.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        let (_, _, len, bytes) = self.facts();
        if !cols.is_multiple_of(len) {
            return None;
        }
        (cols / len).checked_mul(bytes)
    }

    /// The type with ggml's number `id`, if Gradus reads it.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.id() == id)
    }

    /// The type with ggml's name (any case), if Gradus reads it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.name().eq_ignore_ascii_case(name))
    }
}

impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// The name of a type that ggml has, or had, and Gradus does not read.
pub(crate) fn foreign_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36 => "IQ4_NL_4_4",
        37 => "IQ4_NL_4_8",
        38 => "IQ4_NL_8_8",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return None,
    })
}

/// What a tensor is called, its type and shape, and where its bytes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name: `blk.0.attn_q.weight`.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// Its dimensions, 1 to 4, outermost first: the reverse of ggml's `ne`. The last is
    /// contiguous and, for a quantized type, a multiple of the block length.
    pub shape: Vec<usize>,
    /// Index of the part of a split file.
    pub(crate) part: usize,
    /// First byte within the part.
    pub(crate) start: usize,
    /// Size in bytes.
    pub(crate) len: usize,
}

impl TensorInfo {
    /// A tensor to be written; `shape` is outermost first.
    ///
    /// # Errors
    /// The number of dimensions is not 1 to 4, a dimension is 0, the size overflows, or rows of
    /// a quantized type are not whole blocks.
    pub fn new(name: impl Into<String>, ty: TensorType, shape: &[usize]) -> Result<Self, Error> {
        let name = name.into();
        if !(1..=4).contains(&shape.len()) {
            let found = shape.len() as u64;
            return Err(ErrorKind::Dimensions { tensor: shown(&name), found }.into());
        }
        let len = byte_len(&name, ty, shape)?;
        Ok(Self { name, ty, shape: shape.to_vec(), part: 0, start: 0, len })
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        // Does not overflow: the size in bytes was checked, in elements it was checked with it.
        self.shape.iter().product()
    }

    /// Size in bytes.
    pub fn byte_len(&self) -> usize {
        self.len
    }

    /// Elements of a row: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }
}

/// The size in bytes of a tensor, with everything checked.
pub(crate) fn byte_len(name: &str, ty: TensorType, shape: &[usize]) -> Result<usize, ErrorKind> {
    let cols = shape.last().copied().unwrap_or(0);
    if !cols.is_multiple_of(ty.block_len()) {
        return Err(ErrorKind::RowLength {
            tensor: shown(name),
            ty: ty.name(),
            row: cols as u64,
            block: ty.block_len(),
        });
    }
    let limit = isize::MAX as usize;
    let product = |start: usize, dims: &[usize]| {
        dims.iter().try_fold(start, |product, &dim| {
            if dim == 0 { None } else { product.checked_mul(dim).filter(|&size| size <= limit) }
        })
    };
    let rows = shape.split_last().map_or(&[][..], |(_, rows)| rows);
    product(1, shape)
        .and_then(|_| product(ty.row_bytes(cols)?, rows))
        .filter(|&size| size <= limit)
        .ok_or_else(|| ErrorKind::Shape { tensor: shown(name), shape: format!("{shape:?}") })
}

/// A tensor in an open file.
#[derive(Copy, Clone, Debug)]
pub struct Tensor<'a> {
    /// Name, type and shape.
    pub info: &'a TensorInfo,
    /// The data: [`TensorInfo::byte_len`] bytes, little-endian, rows one after another.
    pub bytes: &'a [u8],
}

impl Tensor<'_> {
    /// All elements as f32, row-major.
    ///
    /// # Errors
    /// The type is I32, or there is no memory for them.
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        // The type is looked at first, so that nothing is allocated for one that cannot be read.
        crate::blocks::check_convertible(self.info.ty)?;
        let elements = self.info.elements();
        let mut out = Vec::new();
        out.try_reserve_exact(elements)
            .map_err(|_| ErrorKind::Memory { tensor: shown(&self.info.name), elements })?;
        out.resize(elements, 0.0);
        crate::blocks::dequantize(self.info.ty, self.bytes, &mut out)?;
        Ok(out)
    }
}
