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

/// Packs all rows of `bytes`, which have the length that `g` and `dtype` say.
pub fn pack(
    g: &Geometry,
    dtype: DType,
    bytes: &[u8],
    lines: &mut Lines,
    for_each: impl FnOnce(usize, &(dyn Fn(usize) + Sync)),
) -> Result<(), Fault> {
    if g.panel_bytes == 0 || g.panels == 0 {
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
        n if n == g.panels => Ok(()),
        n => Err(Fault::new(
            Code::Internal,
            "",
            format!("{n} of {} panels of a {dtype} weight were packed", g.panels),
        )),
    }
}

/// Packs the rows of one panel. `None` does not occur: lengths were checked.
fn pack_panel(
    g: &Geometry,
    dtype: DType,
    bytes: &[u8],
    panel: usize,
    out: &mut [u8],
) -> Option<()> {
    let row_bytes = dtype.row_bytes(g.k)?;
    let first = panel * PANEL;
    let count = PANEL.min(g.n.checked_sub(first)?);
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
    let out = out.as_chunks_mut::<S>().0;
    for (lane, row) in rows.chunks_exact(row_bytes.max(1)).enumerate() {
        for (to, from) in out.iter_mut().skip(lane).step_by(PANEL).zip(row.as_chunks::<S>().0) {
            *to = *from;
        }
    }
}

/// The codes of one block of 16 rows, and the sections of a panel they go to.
fn pack_blocks(
    g: &Geometry,
    ty: TensorType,
    rows: &[u8],
    row_bytes: usize,
    out: &mut [u8],
) -> Option<()> {
    let (len, block_bytes) = (ty.block_len(), ty.block_bytes());
    let groups = len / g.group;
    let unit_bytes = 64 * g.bits() as usize;
    let mut decoded = Decoded::default();
    let mut stage = [[0u8; MAX_BLOCK]; PANEL];
    for b in 0..g.k / len {
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let block = row.get(b * block_bytes..(b + 1) * block_bytes)?;
            decode(ty, block, &mut decoded).ok()?;
            stage.get_mut(lane)?.get_mut(..len)?.copy_from_slice(decoded.quants());
            let half = |out: &mut [u8], at: usize, row: usize, x: f32| {
                let at = at + (row * PANEL + lane) * 2;
                out.get_mut(at..at + 2)?.copy_from_slice(&f16::from_f32(x).to_le_bytes());
                Some(())
            };
            match g.scales {
                Scales::None => {}
                // One group per block.
                Scales::Half => {
                    half(out, g.scales_at, b, decoded.d())?;
                    if g.has_min {
                        half(out, g.mins_at, b, decoded.dmin())?;
                    }
                }
                Scales::Exponent => {
                    *out.get_mut(g.scales_at + b * PANEL + lane)? = *block.first()?;
                }
                Scales::Super => {
                    half(out, g.scales_at, b, decoded.d())?;
                    let at = b * groups * PANEL + lane;
                    for (i, &s) in decoded.sub_scales().iter().enumerate() {
                        *out.get_mut(g.sub_scales_at + at + i * PANEL)? = s.cast_unsigned();
                    }
                    if g.has_min {
                        half(out, g.mins_at, b, decoded.dmin())?;
                        for (i, &m) in decoded.sub_mins().iter().enumerate() {
                            *out.get_mut(g.sub_mins_at + at + i * PANEL)? = m;
                        }
                    }
                }
            }
        }
        for u in 0..len / UNIT {
            let at = (b * (len / UNIT) + u) * unit_bytes;
            pack_unit(g.bits(), &stage, u * UNIT, out.get_mut(at..at + unit_bytes)?);
        }
    }
    Some(())
}

/// One vector: the four bytes of each lane.
type Quad = [u32; PANEL];

/// Puts the codes `at .. at + 32` of 16 lanes into their bit planes.
fn pack_unit(bits: u32, stage: &[[u8; MAX_BLOCK]; PANEL], at: usize, out: &mut [u8]) {
    let mut quads = [[0u32; PANEL]; 8];
    for (lane, codes) in stage.iter().enumerate() {
        let codes = codes.get(at..).unwrap_or_default().as_chunks::<4>().0;
        for (quad, &bytes) in quads.iter_mut().zip(codes) {
            if let Some(to) = quad.get_mut(lane) {
                *to = u32::from_le_bytes(bytes);
            }
        }
    }
    let mut out = out.as_chunks_mut::<64>().0.iter_mut();
    let mut put = |quad: Quad| {
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
            put(vector);
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
        _ => quads.into_iter().for_each(put),
    }
}
