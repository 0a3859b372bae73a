//! Weights as the kernels read them: packed once, read in both directions.
//!
//! A weight `[N, K]` becomes `N/16` *panels* of 16 rows (outputs); lane `l` of every vector in
//! panel `p` belongs to row `16 p + l`, so that SIMD lanes run over outputs. Rows beyond `N` in
//! the last panel are zeros. A panel is one run of bytes, a multiple of 64, that begins with its
//! elements:
//!
//! - **f32, f16, bf16**: `[K][16]` elements.
//! - **block formats**: `[K/32]` *units* of 32 elements per lane. A unit is eight *quads*: 4
//!   consecutive elements of 16 lanes, one byte each, 64 bytes `[16 lanes][4 bytes]`, the shape
//!   that `vpdpbusd`, `vpmaddubsw` and NEON's `udot`/`usdot` multiply with four broadcast
//!   activations. Codes of fewer than 8 bits share bytes in bit planes of 64-byte vectors, so a
//!   unit of `b`-bit codes takes exactly `64 b` bytes:
//!
//!   | bits | planes of a unit |
//!   |---|---|
//!   | 8 | 8 vectors, quad `q` in vector `q` |
//!   | 4 | 4 vectors, quads `2v` and `2v+1` in the low and high halves of vector `v`'s bytes |
//!   | 2 | 2 vectors, quad `4v+j` in bits `2j, 2j+1` of vector `v` |
//!   | 5 | 4-bit planes, then the fifth bits: 1 vector, quad `q` in bit `q` |
//!   | 6 | 4-bit planes, then the upper two bits as 2-bit planes |
//!   | 3 | 2-bit planes, then the third bits: 1 vector, quad `q` in bit `q` |
//!
//! and ends, for block formats, with what their groups of 16 or 32 elements are multiplied by and
//! reduced by, `[..][16 lanes]`, in the format's own precision ([`Scales`]).
//!
//! Both directions read this layout. A forward product walks a panel from front to back. The
//! product with the transposed weight unpacks a panel's elements into f32, 16 x 16 at a time, and
//! transposes those in registers. [`PackedMatrix::row`] picks out one lane.
//!
//! Other instructions fit the same bytes. A unit expanded to 8-bit codes is eight rows of 64
//! bytes: half of an int8 AMX `B` tile (`K/4` rows of `16 x 4` bytes), so two units make one
//! tile when they share scales and a unit by itself a tile of 8 rows; 8-bit formats load from
//! the panel without expansion. NEON reads a quad as four 16-byte vectors of 4 lanes each. The
//! portable code reads bytes.

mod lines;
mod read;
mod write;

use std::any::Any;

use gguf::TensorType;
use graph::{Code, DType, Fault, HostTensor, Resident, Shape};

use lines::Lines;

/// Rows of a weight per panel, and lanes of a vector.
pub const PANEL: usize = 16;

/// Elements along `K` per unit of a block format.
pub const UNIT: usize = 32;

/// How the elements of a panel are stored.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Elements {
    /// `[K][16]` f32.
    F32,
    /// `[K][16]` f16.
    F16,
    /// `[K][16]` bf16.
    BF16,
    /// `[K/32]` units of codes of this many bits: 2, 3, 4, 5, 6 or 8.
    Codes(u32),
}

/// How the scales of a block format's groups are stored; minimums likewise.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Scales {
    /// Floats have none.
    None,
    /// Groups of their own: f16 `[K/32][16]`; then f16 minimums `[K/32][16]`, if any.
    Half,
    /// Exponents of MXFP4: u8 `[K/32][16]`.
    Exponent,
    /// Super-blocks of 256: f16 `[K/256][16]`; f16 factors of minimums `[K/256][16]`, if any;
    /// i8 `[K/group][16]`; u8 minimums `[K/group][16]`, if any. A group's scale or minimum is
    /// the product of both.
    Super,
}

/// What a weight's panels look like.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Rows: outputs.
    pub n: usize,
    /// Elements of a row.
    pub k: usize,
    /// `n / 16`, rounded up.
    pub panels: usize,
    /// How elements are stored.
    pub elements: Elements,
    /// How scales are stored.
    pub scales: Scales,
    /// Elements that share a scale: 16 or 32; 0 for floats.
    pub group: usize,
    /// What is subtracted from a stored code to give its value, where there is no table.
    pub zero: u8,
    /// The values of 4-bit codes, for formats that have a table of them.
    pub table: Option<&'static [i8; 16]>,
    /// Whether groups have a minimum.
    pub has_min: bool,
    /// Where in a panel, in bytes, the scales begin (f16, or the exponents).
    pub scales_at: usize,
    /// Where the f16 minimums begin, or their factors.
    pub mins_at: usize,
    /// Where a super-block's integer scales begin.
    pub sub_scales_at: usize,
    /// Where its integer minimums begin.
    pub sub_mins_at: usize,
    /// Bytes of a panel.
    pub panel_bytes: usize,
}

impl Geometry {
    /// The panels of a `[n, k]` weight; `None` when the type has no packing, rows are not whole
    /// blocks, or the size overflows.
    pub fn new(dtype: DType, n: usize, k: usize) -> Option<Geometry> {
        let mut g = Geometry {
            n,
            k,
            panels: n.div_ceil(PANEL),
            elements: Elements::F32,
            scales: Scales::None,
            group: 0,
            zero: 0,
            table: None,
            has_min: false,
            scales_at: 0,
            mins_at: 0,
            sub_scales_at: 0,
            sub_mins_at: 0,
            panel_bytes: 0,
        };
        // Far from overflow: no matrix of a valid shape comes near.
        if n.checked_mul(k)? > 1 << 46 || n > 1 << 46 || k > 1 << 40 {
            return None;
        }
        let ty = match dtype {
            DType::F32 => {
                g.panel_bytes = k * PANEL * 4;
                return Some(g);
            }
            DType::F16 | DType::BF16 => {
                let f16 = dtype == DType::F16;
                g.elements = if f16 { Elements::F16 } else { Elements::BF16 };
                g.panel_bytes = (k * PANEL * 2).next_multiple_of(64);
                return Some(g);
            }
            DType::Block(ty) => ty,
            DType::I32 | DType::Q8Rows | DType::Int16Rows => return None,
        };
        let format = gguf::blocks::format(ty)?;
        if !k.is_multiple_of(ty.block_len()) || !ty.block_len().is_multiple_of(UNIT) {
            return None;
        }
        g.elements = Elements::Codes(format.bits);
        g.group = format.group;
        g.zero = format.zero;
        g.table = format.codebook;
        g.has_min = format.has_min;
        g.scales = match ty {
            TensorType::MXFP4 => Scales::Exponent,
            _ if format.has_sub_scales => Scales::Super,
            _ => Scales::Half,
        };
        let min = usize::from(format.has_min);
        let halves = |count: usize| (count * PANEL * 2).next_multiple_of(64);
        let bytes = |count: usize| (count * PANEL).next_multiple_of(64);
        let groups = k / format.group;
        g.scales_at = k / UNIT * 64 * format.bits as usize;
        match g.scales {
            Scales::None => {}
            Scales::Half => {
                g.mins_at = g.scales_at + halves(groups);
                g.panel_bytes = g.mins_at + halves(groups) * min;
            }
            Scales::Exponent => g.panel_bytes = g.scales_at + bytes(groups),
            Scales::Super => {
                let supers = k / ty.block_len();
                g.mins_at = g.scales_at + halves(supers);
                g.sub_scales_at = g.mins_at + halves(supers) * min;
                g.sub_mins_at = g.sub_scales_at + bytes(groups);
                g.panel_bytes = g.sub_mins_at + bytes(groups) * min;
            }
        }
        Some(g)
    }

    /// Bits of a code; 0 for floats.
    pub fn bits(&self) -> u32 {
        match self.elements {
            Elements::Codes(bits) => bits,
            _ => 0,
        }
    }

    /// Elements per super-block scale ([`Scales::Super`]).
    pub const SUPER: usize = 256;
}

/// One matrix of a packed weight.
#[derive(Copy, Clone)]
pub struct Panels<'a> {
    geometry: &'a Geometry,
    bytes: &'a [u8],
}

impl<'a> Panels<'a> {
    /// What its panels look like.
    pub fn geometry(&self) -> &'a Geometry {
        self.geometry
    }

    /// The bytes of a panel; empty when there is no such panel.
    pub fn panel(&self, panel: usize) -> &'a [u8] {
        let size = self.geometry.panel_bytes;
        let start = panel.saturating_mul(size);
        self.bytes.get(start..start.saturating_add(size)).unwrap_or(&[])
    }
}

/// A weight `[N, K]`, or several of one size `[E, N, K]`, packed into panels. Immutable.
pub struct PackedMatrix {
    dtype: DType,
    shape: Shape,
    /// Of one matrix.
    geometry: Geometry,
    lines: Lines,
}

impl std::fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedMatrix({} {})", self.dtype, self.shape)
    }
}

impl PackedMatrix {
    /// Packs a tensor of shape `[N, K]`, on this thread.
    ///
    /// # Errors
    /// `Fault` when it is not a matrix of floats or blocks, its bytes do not fit its shape, or
    /// memory is out.
    #[cfg(test)]
    pub fn pack(tensor: &HostTensor<'_>) -> Result<PackedMatrix, Fault> {
        PackedMatrix::pack_with(tensor, |count, run| (0..count).for_each(run))
    }

    /// Packs a tensor of shape `[N, K]`; `for_each(count, run)` calls `run` with every number
    /// below `count`, each once, in any order and on any threads, and returns when all are done.
    ///
    /// # Errors
    /// As [`PackedMatrix::pack`]; also `Internal` when `for_each` left numbers out.
    pub fn pack_with(
        tensor: &HostTensor<'_>,
        for_each: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
    ) -> Result<PackedMatrix, Fault> {
        let HostTensor { dtype, shape, bytes } = *tensor;
        let (experts, n, k) = match *shape.dims() {
            [n, k] => (1, n, k),
            [experts, n, k] => (experts, n, k),
            _ => {
                let what = "it must be [N, K] or [E, N, K]";
                let message = format!("a weight of shape {shape} was given to packing: {what}");
                return Err(Fault::binding("", message));
            }
        };
        if shape.bytes(dtype) != Some(bytes.len()) {
            return Err(Fault::binding(
                "",
                format!("a {dtype} weight of shape {shape} was given as {} bytes", bytes.len()),
            ));
        }
        let Some(geometry) = Geometry::new(dtype, n, k) else {
            return Err(Fault::binding("", format!("a {dtype} weight {shape} has no packing")));
        };
        let total = geometry.panel_bytes.saturating_mul(geometry.panels).saturating_mul(experts);
        let Some(mut lines) = Lines::zeroed(total) else {
            return Err(Fault::new(
                Code::OutOfMemory,
                "",
                format!("packing a {dtype} weight {shape} takes {total} bytes: out of memory"),
            ));
        };
        write::pack(&geometry, experts, dtype, bytes, &mut lines, for_each)?;
        Ok(PackedMatrix { dtype, shape, geometry, lines })
    }

    /// What its panels look like.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// One of its matrices; of `[N, K]` there is one, number 0. One that is not there has no
    /// panels.
    pub fn expert(&self, expert: usize) -> Panels<'_> {
        let size = self.geometry.panel_bytes * self.geometry.panels;
        let start = expert.saturating_mul(size);
        let bytes = self.lines.bytes().get(start..start.saturating_add(size)).unwrap_or(&[]);
        Panels { geometry: &self.geometry, bytes }
    }

    /// The one matrix of a weight `[N, K]`.
    pub fn panels(&self) -> Panels<'_> {
        self.expert(0)
    }

    /// All panels, one after another.
    #[cfg(test)]
    pub fn all_panels(&self) -> &[u8] {
        self.lines.bytes()
    }

    /// Row `i` of the first matrix as f32, bit for bit what [`gguf::blocks::dequantize`] gives. Elements of `out`
    /// beyond `K` are left alone; a row that does not exist leaves all of `out` alone.
    pub fn row(&self, i: usize, out: &mut [f32]) {
        if i < self.geometry.n {
            read::row(&self.geometry, self.panels().panel(i / PANEL), i % PANEL, out);
        }
    }
}

impl Resident for PackedMatrix {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn bytes(&self) -> usize {
        self.lines.bytes().len()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests;
