//! From a file's rows to panels.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use gguf::TensorType;
use gguf::blocks::{Decoded, MAX_BLOCK, decode};
use graph::{Code, DType, Fault};
use half::f16;

use super::lines::Lines;
use super::{Elements, Geometry, PANEL, Scales, UNIT};

/// Panels that one call of `for_each`'s function packs.
const CHUNK: usize = 4;

/// Packs all rows of `bytes`, which have the length that `g`, their number and `dtype` say.
pub fn pack(
    g: &Geometry,
    experts: usize,
    dtype: DType,
    bytes: &[u8],
    lines: &mut Lines,
    for_each: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
) -> Result<(), Fault> {
    if g.panel_bytes == 0 || g.panels == 0 || experts == 0 {
        return Ok(());
    }
    // Each chunk is taken out of its slot by whoever packs it, so that none is packed twice.
    let chunks: Vec<Mutex<Option<&mut [u8]>>> =
        lines.bytes_mut().chunks_mut(g.panel_bytes * CHUNK).map(|c| Mutex::new(Some(c))).collect();
    let done = AtomicUsize::new(0);
    for_each(chunks.len(), &|i| {
        let slot = chunks.get(i).and_then(|c| c.lock().ok()?.take());
        for (j, panel) in slot.into_iter().flat_map(|c| c.chunks_mut(g.panel_bytes)).enumerate() {
            if pack_panel(g, dtype, bytes, i * CHUNK + j, panel).is_some() {
                done.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    match done.into_inner() {
        n if n == g.panels * experts => Ok(()),
        n => Err(Fault::new(
            Code::Internal,
            "",
            format!("{n} of {} panels of a {dtype} weight were packed", g.panels * experts),
        )),
    }
}

/// Packs the rows of one panel, counted through all matrices. `None` does not occur: lengths were checked.
fn pack_panel(
    g: &Geometry,
    dtype: DType,
    bytes: &[u8],
    panel: usize,
    out: &mut [u8],
) -> Option<()> {
    let row_bytes = dtype.row_bytes(g.k)?;
    let (expert, panel) = (panel / g.panels, panel % g.panels);
    let count = PANEL.min(g.n.checked_sub(panel * PANEL)?);
    let first = expert * g.n + panel * PANEL;
    let rows = bytes.get(first * row_bytes..(first + count) * row_bytes)?;
    match (g.elements, dtype) {
        (Elements::F32, _) => interleave::<4>(rows, row_bytes, out),
        (Elements::F16 | Elements::BF16, _) => interleave::<2>(rows, row_bytes, out),
        (Elements::Codes(_), DType::Block(ty)) => pack_blocks(g, ty, rows, row_bytes, out)?,
        (Elements::Codes(_), _) => return None,
    }
    Some(())
}

/// `[count][K]` elements of `S` bytes to `[K][16]`.
fn interleave<const S: usize>(rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    let mut lanes = [&[][..]; PANEL];
    for (lane, row) in lanes.iter_mut().zip(rows.chunks_exact(row_bytes.max(1))) {
        *lane = row.as_chunks::<S>().0;
    }
    for (k, to) in out.as_chunks_mut::<S>().0.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
        for (to, lane) in to.iter_mut().zip(&lanes) {
            if let Some(from) = lane.get(k) {
                *to = *from;
            }
        }
    }
}

/// The four bytes of each lane.
type Quad = [u32; PANEL];

/// The codes of one block of 16 rows, and the sections of a panel they go to.
fn pack_blocks(
    g: &Geometry,
    ty: TensorType,
    rows: &[u8],
    row_bytes: usize,
    out: &mut [u8],
) -> Option<()> {
    let (len, block_bytes) = (ty.block_len(), ty.block_bytes());
    let unit_bytes = 64 * g.bits() as usize;
    let mut decoded = Decoded::default();
    let mut quads = [[0; PANEL]; MAX_BLOCK / 4];
    for b in 0..g.k / len {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let block = row.get(b * block_bytes..(b + 1) * block_bytes)?;
            let mut put = |q: usize, codes: u32| {
                if let Some(to) = quads.get_mut(q).and_then(|quad: &mut Quad| quad.get_mut(lane)) {
                    *to = codes;
                }
            };
            match g.scales {
                Scales::None => {}
                Scales::Half => {
                    let rest = pack_half_scales(g, b * PANEL + lane, block, out)?;
                    short_block(g.bits(), rest, put)?;
                }
                Scales::Exponent => {
                    let (&exponent, rest) = block.split_first()?;
                    *out.get_mut(g.scales_at + b * PANEL + lane)? = exponent;
                    short_block(g.bits(), rest, put)?;
                }
                Scales::Super => {
                    decode(ty, block, &mut decoded).ok()?;
                    pack_super_scales(g, b, lane, &decoded, out)?;
                    for (q, &codes) in decoded.quants().as_chunks::<4>().0.iter().enumerate() {
                        put(q, u32::from_le_bytes(codes));
                    }
                }
            }
        }
        let at = b * (len / UNIT) * unit_bytes;
        let units = out.get_mut(at..at + len / UNIT * unit_bytes)?.chunks_exact_mut(unit_bytes);
        for (out, quads) in units.zip(quads.as_chunks::<8>().0) {
            pack_unit(g.bits(), quads, out);
        }
    }
    Some(())
}

/// Copies the f16 scale, and minimum, that a block of 32 begins with to element `at` of their
/// sections; returns the rest of the block. A format's minimum is added, a panel's subtracted.
fn pack_half_scales<'a>(
    g: &Geometry,
    at: usize,
    block: &'a [u8],
    out: &mut [u8],
) -> Option<&'a [u8]> {
    let (scale, mut rest) = block.split_first_chunk::<2>()?;
    let to = g.scales_at + at * 2;
    out.get_mut(to..to + 2)?.copy_from_slice(scale);
    if g.has_min {
        let &[low, high] = rest.first_chunk()?;
        rest = rest.get(2..)?;
        let to = g.mins_at + at * 2;
        out.get_mut(to..to + 2)?.copy_from_slice(&[low, high ^ 0x80]);
    }
    Some(rest)
}

/// The codes of the formats with blocks of 32, four at a time: what [`decode`] gives, without
/// its cost per block.
fn short_block(bits: u32, codes: &[u8], mut put: impl FnMut(usize, u32)) -> Option<()> {
    const LOW: u32 = 0x0f0f_0f0f;
    let (high, codes) = match bits {
        5 => {
            let (high, rest) = codes.split_first_chunk()?;
            (u32::from_le_bytes(*high), rest)
        }
        _ => (0, codes),
    };
    // Bit i of the four lowest to bit 4 of byte i.
    let fifth = |bits: u32| ((bits & 15).wrapping_mul(0x0020_4081) & 0x0101_0101) << 4;
    for (q, &bytes) in codes.as_chunks::<4>().0.iter().enumerate() {
        let word = u32::from_le_bytes(bytes);
        if bits == 8 {
            put(q, word ^ 0x8080_8080);
        } else {
            put(q, word & LOW | fifth(high >> (4 * q)));
            put(q + 4, word >> 4 & LOW | fifth(high >> (4 * q + 16)));
        }
    }
    Some(())
}

/// The scales of a super-block.
fn pack_super_scales(
    g: &Geometry,
    block: usize,
    lane: usize,
    decoded: &Decoded,
    out: &mut [u8],
) -> Option<()> {
    let half = |out: &mut [u8], at: usize, x: f32| {
        let at = at + (block * PANEL + lane) * 2;
        out.get_mut(at..at + 2)?.copy_from_slice(&f16::from_f32(x).to_le_bytes());
        Some(())
    };
    let groups = decoded.sub_scales().len();
    let at = block * groups * PANEL + lane;
    half(out, g.scales_at, decoded.d())?;
    for (i, &scale) in decoded.sub_scales().iter().enumerate() {
        *out.get_mut(g.sub_scales_at + at + i * PANEL)? = scale.cast_unsigned();
    }
    if g.has_min {
        half(out, g.mins_at, decoded.dmin())?;
        for (i, &min) in decoded.sub_mins().iter().enumerate() {
            *out.get_mut(g.sub_mins_at + at + i * PANEL)? = min;
        }
    }
    Some(())
}

/// Puts the eight quads of a unit into their bit planes.
fn pack_unit(bits: u32, quads: &[Quad; 8], out: &mut [u8]) {
    let mut out = out.as_chunks_mut::<64>().0.iter_mut();
    let mut put = |quad: &Quad| {
        if let Some(to) = out.next() {
            for (to, word) in to.as_chunks_mut::<4>().0.iter_mut().zip(quad) {
                *to = word.to_le_bytes();
            }
        }
    };
    // Bits `from ..` of the codes of consecutive quads, `width` each, side by side in bytes.
    let mut plane = |from: u32, width: u32| {
        let mask = 0x0101_0101 * ((1u32 << width) - 1);
        for quads in quads.chunks((8 / width) as usize) {
            let mut vector = [0; PANEL];
            for (quad, shift) in quads.iter().zip((0..).step_by(width as usize)) {
                for (to, word) in vector.iter_mut().zip(quad) {
                    *to |= ((word >> from) & mask) << shift;
                }
            }
            put(&vector);
        }
    };
    match bits {
        2 => plane(0, 2),
        3 => {
            plane(0, 2);
            plane(2, 1);
        }
        4 => plane(0, 4),
        5 => {
            plane(0, 4);
            plane(4, 1);
        }
        6 => {
            plane(0, 4);
            plane(4, 2);
        }
        _ => quads.iter().for_each(put),
    }
}
