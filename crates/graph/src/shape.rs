//! Shapes and layouts. Row-major, outermost dimension first.

use crate::{DType, Invalid};

/// The most dimensions a tensor may have.
pub const MAX_RANK: usize = 6;

/// The most elements a tensor may have, a size of 0 counted as 1; keeps every byte count and
/// every product of dimensions far from overflow.
const MAX_ELEMENTS: usize = 1 << 46;

/// The dimensions of a tensor, outermost first, last one contiguous.
#[derive(Copy, Clone, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; MAX_RANK],
    rank: u8,
}

impl Shape {
    /// A shape of up to [`MAX_RANK`] dimensions, whose element count fits. So do the products
    /// of any of its dimensions.
    ///
    /// # Errors
    /// `Invalid` when there are too many dimensions or too many elements.
    pub fn new(dims: &[usize]) -> Result<Shape, Invalid> {
        if dims.len() > MAX_RANK {
            return Err(Invalid::new(format!(
                "a shape of {} dimensions {dims:?}: at most {MAX_RANK} are supported",
                dims.len()
            )));
        }
        let mut count = 1usize;
        for &d in dims {
            count = match count.checked_mul(d.max(1)) {
                Some(n) if n <= MAX_ELEMENTS => n,
                _ => {
                    return Err(Invalid::new(format!(
                        "shape {dims:?} is too large: its sizes, 0 counted as 1, multiply to \
                         more than 2^46"
                    )));
                }
            };
        }
        let mut shape = Shape { dims: [1; MAX_RANK], rank: dims.len() as u8 };
        for (to, &d) in shape.dims.iter_mut().zip(dims) {
            *to = d;
        }
        Ok(shape)
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.dims.get(..self.rank as usize).unwrap_or(&[])
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// Dimension `i`, counted from the outermost; 1 when there is no such dimension.
    pub fn dim(&self, i: usize) -> usize {
        self.dims().get(i).copied().unwrap_or(1)
    }

    /// The last (contiguous) dimension; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.dims().last().copied().unwrap_or(1)
    }

    /// The product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        match self.dims().split_last() {
            Some((_, outer)) => outer.iter().product(),
            None => 1,
        }
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Bytes of a contiguous tensor of this shape, or `None` when a row is not a whole number
    /// of blocks.
    pub fn bytes(&self, dtype: DType) -> Option<usize> {
        dtype.row_bytes(self.cols())?.checked_mul(self.rows())
    }

    /// This shape with dimension `i` replaced.
    ///
    /// # Errors
    /// `Invalid` when there is no dimension `i` or the result has too many elements.
    pub fn with_dim(&self, i: usize, size: usize) -> Result<Shape, Invalid> {
        let mut dims = self.dims().to_vec();
        match dims.get_mut(i) {
            Some(d) => *d = size,
            None => return Err(Invalid::new(format!("shape {self} has no dimension {i}"))),
        }
        Shape::new(&dims)
    }

    /// The strides, in elements, of a contiguous tensor of this shape.
    pub fn strides(&self) -> [usize; MAX_RANK] {
        let mut strides = [0; MAX_RANK];
        let mut step = 1;
        for i in (0..self.rank()).rev() {
            if let Some(s) = strides.get_mut(i) {
                *s = step;
            }
            step *= self.dim(i);
        }
        strides
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[")?;
        for (i, d) in self.dims().iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{d}")?;
        }
        f.write_str("]")
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// How a value of some shape lies in its storage: an element offset and one stride per
/// dimension, in elements. Only element types have layouts other than contiguous.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// Elements between the start of the storage and the first element.
    pub offset: usize,
    /// Elements between neighbours along each dimension; 0 where the value is broadcast.
    pub strides: [usize; MAX_RANK],
}

impl Layout {
    /// The layout of a dense tensor of this shape.
    pub fn contiguous(shape: &Shape) -> Layout {
        Layout { offset: 0, strides: shape.strides() }
    }

    /// True when elements lie densely in row-major order (dimensions of size 1 do not count).
    pub fn is_contiguous(&self, shape: &Shape) -> bool {
        let dense = shape.strides();
        self.strides.iter().zip(&dense).zip(shape.dims()).all(|((a, b), &d)| d <= 1 || a == b)
    }

    /// The stride between rows when the tensor can be read as `rows x cols` with a contiguous
    /// last dimension and one common row stride; `None` otherwise. A single row has stride
    /// `cols`.
    pub fn row_stride(&self, shape: &Shape) -> Option<usize> {
        let rank = shape.rank();
        if rank == 0 {
            return Some(1);
        }
        let stride = |i: usize| self.strides.get(i).copied().unwrap_or(0);
        if shape.cols() > 1 && stride(rank - 1) != 1 {
            return None;
        }
        let mut row_stride = None;
        let mut expected = 0;
        for i in (0..rank - 1).rev() {
            let d = shape.dim(i);
            if d == 1 {
                continue;
            }
            match row_stride {
                None => {
                    row_stride = Some(stride(i));
                    expected = stride(i) * d;
                }
                Some(_) => {
                    if stride(i) != expected {
                        return None;
                    }
                    expected *= d;
                }
            }
        }
        Some(row_stride.unwrap_or(shape.cols()))
    }
}
