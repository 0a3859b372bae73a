//! Rows of keys and values wherever they are stored, and the panels that logits are taken from.

use std::ops::Range;

use gguf::TensorType;
use graph::DType;

use super::super::quantize::load_q8_0;
use super::product::Panels;
use super::{Heads, KEYS, Operands, Prefix, Sequence};
use crate::job::{Input, padded};
use crate::simd::{LANES, Simd, Task};

/// How cached rows are stored.
#[derive(Copy, Clone, PartialEq, Eq)]
pub(super) enum Storage {
    F32,
    F16,
    BF16,
    Q8_0,
}

impl Storage {
    pub(super) fn of(dtype: DType) -> Option<Storage> {
        match dtype {
            DType::F32 => Some(Storage::F32),
            DType::F16 => Some(Storage::F16),
            DType::BF16 => Some(Storage::BF16),
            DType::Block(TensorType::Q8_0) => Some(Storage::Q8_0),
            _ => None,
        }
    }
}

/// `[count, page, heads, width]`, dense.
#[derive(Copy, Clone)]
pub(super) struct Pages {
    base: *const u8,
    storage: Storage,
    /// Pages.
    pub(super) count: usize,
    /// Positions of a page.
    pub(super) page: usize,
    heads: usize,
    row_bytes: usize,
}

impl Pages {
    pub(super) fn new(input: &Input<'_>) -> Option<Pages> {
        let (dtype, shape) = (input.arg.dtype, input.arg.shape);
        let offset = input.arg.layout.offset * dtype.element_bytes().unwrap_or(0);
        Some(Pages {
            base: input.bytes().wrapping_add(offset),
            storage: Storage::of(dtype)?,
            count: shape.dim(0),
            page: shape.dim(1),
            heads: shape.dim(2),
            row_bytes: dtype.row_bytes(shape.dim(3))?,
        })
    }

    /// The bytes of a head's row in a slot of a page of a sequence.
    #[inline(always)]
    fn at(&self, prefix: &Prefix<'_>, seq: usize, at: (usize, usize), head: usize) -> *const u8 {
        let (column, slot) = at;
        let id = prefix.table[seq * prefix.columns + column] as usize;
        let row = (id * self.page + slot) * self.heads + head;
        self.base.wrapping_add(row * self.row_bytes)
    }
}

/// The rows of a tile, by key; those outside of the loaded range are null.
pub(super) type RowPointers = [*const f32; KEYS];

/// Finds keys (or values) `range` of the tile at position `base` of a sequence, as f32. Cached
/// rows of another type are converted into `converted`.
struct FindRows<'a> {
    own: Heads,
    pages: Option<(&'a Prefix<'a>, &'a Pages)>,
    seq: &'a Sequence,
    head: usize,
    base: usize,
    range: Range<usize>,
    width: usize,
    converted: &'a mut [f32],
}

impl Task for FindRows<'_> {
    type Out = RowPointers;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> RowPointers {
        let mut rows = [std::ptr::null(); KEYS];
        let (first, cached) = (self.base + self.range.start, self.seq.cached);
        let mut own = self.range.start;
        if let Some((prefix, pages)) = self.pages {
            own = cached.saturating_sub(self.base).min(self.range.end).max(own);
            let (mut column, mut slot) = (first / pages.page, first % pages.page);
            // One pointer for all rows: another borrow would end those before it.
            let converted = &mut self.converted[..own * self.width];
            let converted = converted.as_mut_ptr();
            for i in self.range.start..own {
                let bytes = pages.at(prefix, self.seq.index, (column, slot), self.head);
                let to = converted.wrapping_add(i * self.width);
                // SAFETY: `Operands` promise that the position is cached in these pages, whose
                // rows have this width.
                rows[i] = unsafe { convert(s, pages.storage, bytes, to, self.width) };
                slot += 1;
                if slot == pages.page {
                    (column, slot) = (column + 1, 0);
                }
            }
        }
        for i in own..self.range.end {
            rows[i] = self.own.at(self.seq.first + self.base + i - cached, self.head);
        }
        rows
    }
}

/// A stored row as f32: where it is, or in `to`.
///
/// # Safety
/// `bytes` must be a row of `width` elements, `to` have room for it.
#[inline(always)]
unsafe fn convert<S: Simd>(
    s: S,
    storage: Storage,
    bytes: *const u8,
    to: *mut f32,
    width: usize,
) -> *const f32 {
    // SAFETY: the caller's. Rows of Q8_0 are whole blocks of 32 elements in 34 bytes.
    unsafe {
        match storage {
            Storage::F32 => return bytes.cast(),
            Storage::F16 => {
                for i in (0..width).step_by(LANES) {
                    let v = s.load_f16_first(bytes.cast::<u16>().add(i), width - i);
                    s.store_first(to.add(i), v, width - i);
                }
            }
            Storage::BF16 => {
                for i in (0..width).step_by(LANES) {
                    let v = s.load_bf16_first(bytes.cast::<u16>().add(i), width - i);
                    s.store_first(to.add(i), v, width - i);
                }
            }
            Storage::Q8_0 => {
                for block in 0..width / 32 {
                    load_q8_0(s, bytes.add(block * 34), to.add(block * 32));
                }
            }
        }
    }
    to
}

impl Operands<'_> {
    /// The keys of a tile.
    ///
    /// # Safety
    /// The positions must be those of rows of the sequence or of its cached prefix; `converted`
    /// must have room for a tile of rows.
    #[inline(always)]
    pub(super) unsafe fn keys<S: Simd>(
        &self,
        s: S,
        seq: &Sequence,
        head: usize,
        (base, range): (usize, Range<usize>),
        converted: &mut [f32],
    ) -> RowPointers {
        let pages = self.prefix.as_ref().map(|p| (p, &p.keys));
        let (own, width) = (self.k, self.width);
        s.call(FindRows { own, pages, seq, head, base, range, width, converted })
    }

    /// The values of a tile.
    ///
    /// # Safety
    /// As [`Operands::keys`].
    #[inline(always)]
    pub(super) unsafe fn values<S: Simd>(
        &self,
        s: S,
        seq: &Sequence,
        head: usize,
        (base, range): (usize, Range<usize>),
        converted: &mut [f32],
    ) -> RowPointers {
        let pages = self.prefix.as_ref().map(|p| (p, &p.values));
        let (own, width) = (self.v, self.value_width);
        s.call(FindRows { own, pages, seq, head, base, range, width, converted })
    }
}

/// Transposes the rows of a tile into panels of 16 of them: `d` becomes the source, the rows are
/// its lanes. Rows outside of `range`, which are not read, are 0 in panels of some that are, and
/// panels of none are not written.
///
/// # Safety
/// Rows of the range must have `width` elements.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(
    s: S,
    rows: &RowPointers,
    range: Range<usize>,
    width: usize,
    to: &mut [f32],
) -> Panels {
    s.call(Transpose { rows, range, width, to: &mut *to });
    Panels { start: to.as_ptr(), step: padded(width) * LANES }
}

/// Copies rows, those of a range, into panels of 16 columns; others are not read, nor written.
///
/// # Safety
/// Rows of the range must have `width` elements.
#[inline(always)]
pub(super) unsafe fn pack<S: Simd>(
    s: S,
    rows: &[*const f32],
    range: Range<usize>,
    width: usize,
    to: &mut [f32],
) -> Panels {
    s.call(Pack { rows, range, width, to: &mut *to });
    Panels { start: to.as_ptr(), step: rows.len() * LANES }
}

/// Floats of so many packed rows.
pub(super) fn packed(rows: usize, width: usize) -> usize {
    rows * padded(width)
}

/// See [`pack`].
struct Pack<'a> {
    rows: &'a [*const f32],
    range: Range<usize>,
    width: usize,
    to: &'a mut [f32],
}

impl Task for Pack<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let to = &mut self.to[..packed(self.rows.len(), self.width)];
        let panel = self.rows.len() * LANES;
        for i in self.range {
            let row = self.rows[i];
            for (d, to) in (0..self.width).step_by(LANES).zip(to.chunks_exact_mut(panel)) {
                let to = to[i * LANES..][..LANES].as_mut_ptr();
                // SAFETY: `pack`'s caller's; 16 of the panel's floats.
                unsafe {
                    if self.width - d >= LANES {
                        s.store(to, s.load(row.wrapping_add(d)));
                    } else {
                        s.store(to, s.load_first(row.wrapping_add(d), self.width - d));
                    }
                }
            }
        }
    }
}

/// Floats of so many transposed rows.
pub(super) fn transposed(rows: usize, width: usize) -> usize {
    rows.next_multiple_of(LANES) * padded(width)
}

/// See [`transpose`].
struct Transpose<'a> {
    rows: &'a RowPointers,
    range: Range<usize>,
    width: usize,
    to: &'a mut [f32],
}

impl Task for Transpose<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Range { start, end } = self.range;
        let panel = padded(self.width) * LANES;
        for first in (start / LANES * LANES..end).step_by(LANES) {
            let rows = &self.rows[first..first + LANES];
            let to = &mut self.to[first / LANES * panel..][..panel];
            for (d, to) in (0..self.width).step_by(LANES).zip(to.chunks_exact_mut(LANES * LANES)) {
                let mut block = [s.zero(); LANES];
                if start <= first && end >= first + LANES && self.width - d >= LANES {
                    for i in 0..LANES {
                        // SAFETY: `transpose`'s caller's; all 16 rows are in the range.
                        block[i] = unsafe { s.load(rows[i].wrapping_add(d)) };
                    }
                } else {
                    for i in 0..LANES {
                        if (start..end).contains(&(first + i)) {
                            let row = rows[i].wrapping_add(d);
                            // SAFETY: `transpose`'s caller's.
                            block[i] = unsafe { s.load_first(row, self.width - d) };
                        }
                    }
                }
                s.transpose(&mut block);
                for (i, &values) in block.iter().enumerate() {
                    // SAFETY: 16 of the chunk's 256 floats.
                    unsafe { s.store(to.as_mut_ptr().add(i * LANES), values) };
                }
            }
        }
    }
}
