//! The paged cache of keys and values.
//!
//! Every layer has one pool of pages for keys and one for values, in host memory, in the
//! cache's dtype; a page holds [`PAGE`] positions of one sequence. A sequence owns the same
//! page numbers in every layer.

use graph::{DType, Leaf, Shape};

use crate::{Error, Geometry, PrefixShape, Result};

/// Positions per page.
pub const PAGE: usize = 32;

/// A sequence in a cache.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct SeqId(usize);

#[derive(Default)]
struct Sequence {
    pages: Vec<u32>,
    len: usize,
    live: bool,
}

struct Pool {
    /// 8-byte units, so that every element type is aligned.
    storage: Vec<u64>,
    row_bytes: usize,
}

impl Pool {
    fn new(rows: usize, row_bytes: usize) -> Result<Pool> {
        let bytes =
            rows.checked_mul(row_bytes).ok_or_else(|| Error::new("the cache's size overflows"))?;
        let units = bytes.div_ceil(8);
        let mut storage = Vec::new();
        storage.try_reserve_exact(units).map_err(|_| {
            Error::new(format!(
                "no memory for {bytes} bytes of cache; use a smaller context or cache type"
            ))
        })?;
        // Zeros are written, so the pages are taken now and not under a request.
        storage.resize(units, 0);
        Ok(Pool { storage, row_bytes })
    }

    fn bytes(&self, rows: usize) -> &[u8] {
        bytemuck::cast_slice(&self.storage).get(..rows * self.row_bytes).unwrap_or(&[])
    }

    fn rows_mut(&mut self, row: usize, rows: usize) -> &mut [u8] {
        let (start, len) = (row * self.row_bytes, rows * self.row_bytes);
        bytemuck::cast_slice_mut(&mut self.storage).get_mut(start..start + len).unwrap_or(&mut [])
    }
}

/// Keys and values of many sequences.
pub struct Cache {
    dtype: DType,
    pages: usize,
    free: Vec<u32>,
    sequences: Vec<Sequence>,
    /// Per layer: keys, values.
    layers: Vec<(Pool, Pool)>,
}

impl Cache {
    /// A cache for `positions` positions in all (rounded up to whole pages).
    ///
    /// # Errors
    /// When the head widths are not whole blocks of `dtype`, or memory is out.
    pub fn new(geometry: &Geometry, dtype: DType, positions: usize) -> Result<Cache> {
        let pages = positions.div_ceil(PAGE).max(1);
        let too_many = || Error::new(format!("a cache of {positions} positions is too large"));
        let rows = pages.checked_mul(PAGE).ok_or_else(too_many)?;
        let last =
            u32::try_from(pages).ok().filter(|&p| p < i32::MAX as u32).ok_or_else(too_many)?;
        let row = |width: usize| {
            let shape = Shape::new(&[geometry.kv_heads, width])?;
            shape.bytes(dtype).ok_or_else(|| {
                Error::new(format!(
                    "a {dtype} cache needs head widths in whole blocks, and this model's is \
                     {width}; use an f16 cache"
                ))
            })
        };
        let (k, v) = (row(geometry.key_width)?, row(geometry.value_width)?);
        let layers = (0..geometry.layers)
            .map(|_| Ok((Pool::new(rows, k)?, Pool::new(rows, v)?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(Cache { dtype, pages, free: (0..last).rev().collect(), sequences: Vec::new(), layers })
    }

    /// Bytes a cache of this many positions takes.
    pub fn bytes_for(geometry: &Geometry, dtype: DType, positions: usize) -> Option<usize> {
        let rows = positions.div_ceil(PAGE).max(1).checked_mul(PAGE)?;
        let k = Shape::new(&[geometry.kv_heads, geometry.key_width]).ok()?.bytes(dtype)?;
        let v = Shape::new(&[geometry.kv_heads, geometry.value_width]).ok()?.bytes(dtype)?;
        rows.checked_mul(k.checked_add(v)?)?.checked_mul(geometry.layers)
    }

    /// Element type of the pages.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of all pools.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|(k, v)| (k.storage.len() + v.storage.len()) * 8).sum()
    }

    /// Pages that no sequence owns.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// What a graph must know of it, for sequences of up to `table` pages.
    pub fn prefix_shape(&self, table: usize) -> PrefixShape {
        PrefixShape { pages: self.pages, page: PAGE, table }
    }

    /// A new, empty sequence.
    pub fn open(&mut self) -> SeqId {
        let free = self.sequences.iter().position(|s| !s.live);
        let i = free.unwrap_or_else(|| {
            self.sequences.push(Sequence::default());
            self.sequences.len() - 1
        });
        if let Some(s) = self.sequences.get_mut(i) {
            s.live = true;
        }
        SeqId(i)
    }

    /// Forgets a sequence; its pages are free again.
    pub fn close(&mut self, id: SeqId) {
        self.truncate(id, 0);
        if let Some(s) = self.sequences.get_mut(id.0) {
            s.live = false;
        }
    }

    /// Positions a sequence holds.
    pub fn len(&self, id: SeqId) -> usize {
        self.sequences.get(id.0).map_or(0, |s| s.len)
    }

    /// True when a sequence holds nothing.
    pub fn is_empty(&self, id: SeqId) -> bool {
        self.len(id) == 0
    }

    /// Drops every position from `len` on.
    pub fn truncate(&mut self, id: SeqId, len: usize) {
        let Some(s) = self.sequences.get_mut(id.0) else { return };
        s.len = s.len.min(len);
        let keep = s.len.div_ceil(PAGE);
        while s.pages.len() > keep {
            self.free.extend(s.pages.pop());
        }
    }

    /// The pages of a sequence, in order.
    pub(crate) fn table(&self, id: SeqId) -> &[u32] {
        self.sequences.get(id.0).map_or(&[], |s| &s.pages)
    }

    /// Takes pages for `rows` more positions of a sequence.
    ///
    /// # Errors
    /// When there are not enough free pages; nothing is taken then.
    pub(crate) fn reserve(&mut self, id: SeqId, rows: usize) -> Result<()> {
        let Some(s) = self.sequences.get_mut(id.0).filter(|s| s.live) else {
            return Err(Error::new("the sequence is not open in this cache"));
        };
        let missing = (s.len + rows).div_ceil(PAGE).saturating_sub(s.pages.len());
        if missing > self.free.len() {
            return Err(Error::new(format!(
                "the cache is full: {missing} more pages of {PAGE} positions are needed, {} are \
                 free; use a larger context",
                self.free.len()
            )));
        }
        let from = self.free.len() - missing;
        s.pages.extend(self.free.drain(from..).rev());
        Ok(())
    }

    /// Where `rows` new positions of a sequence go: `(first pool row, count)` in order.
    pub(crate) fn runs(&self, id: SeqId, rows: usize) -> Vec<(usize, usize)> {
        let Some(s) = self.sequences.get(id.0) else { return Vec::new() };
        let mut runs = Vec::new();
        let (mut at, end) = (s.len, s.len + rows);
        while at < end {
            let Some(&page) = s.pages.get(at / PAGE) else { break };
            let count = (PAGE - at % PAGE).min(end - at);
            runs.push((page as usize * PAGE + at % PAGE, count));
            at += count;
        }
        runs
    }

    /// The pool rows of a layer, to be written; `values` picks the value pool.
    pub(crate) fn rows_mut(
        &mut self,
        layer: usize,
        values: bool,
        row: usize,
        rows: usize,
    ) -> &mut [u8] {
        match self.layers.get_mut(layer) {
            Some((_, v)) if values => v.rows_mut(row, rows),
            Some((k, _)) => k.rows_mut(row, rows),
            None => &mut [],
        }
    }

    /// Bytes of one position in a layer's key or value pool.
    pub(crate) fn row_bytes(&self, layer: usize, values: bool) -> usize {
        let pools = self.layers.get(layer);
        pools.map_or(0, |(k, v)| if values { v.row_bytes } else { k.row_bytes })
    }

    /// Counts `rows` positions, whose rows have been written, to a sequence.
    pub(crate) fn advance(&mut self, id: SeqId, rows: usize) {
        if let Some(s) = self.sequences.get_mut(id.0) {
            s.len += rows;
        }
    }

    /// What a cache leaf of a graph is bound to.
    pub(crate) fn leaf(&self, layer: usize, values: bool) -> Leaf<'_> {
        let rows = self.pages * PAGE;
        let bytes = self.layers.get(layer).map(|(k, v)| if values { v } else { k }.bytes(rows));
        Leaf::Host(bytes.unwrap_or(&[]))
    }
}
