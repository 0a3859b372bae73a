//! From panels back to numbers, one lane at a time.

use half::{bf16, f16};

use super::{Elements, Geometry, PANEL, Scales, UNIT};

/// One row as f32.
pub fn row(g: &Geometry, panel: &[u8], lane: usize, out: &mut [f32]) {
    let out = match out.get_mut(..g.k) {
        Some(out) => out,
        None => out,
    };
    match g.elements {
        Elements::F32 => pick(panel, lane, out, f32::from_le_bytes),
        Elements::F16 => pick(panel, lane, out, |le| f16::from_le_bytes(le).to_f32()),
        Elements::BF16 => pick(panel, lane, out, |le| bf16::from_le_bytes(le).to_f32()),
        Elements::Codes(bits) => {
            let unit_bytes = 64 * bits as usize;
            let units = panel.chunks_exact(unit_bytes).zip(out.chunks_mut(UNIT));
            for (u, (unit, out)) in units.enumerate() {
                let codes = codes(bits, unit, lane);
                let groups = out.chunks_mut(g.group).zip(codes.chunks(g.group));
                for (i, (out, codes)) in groups.enumerate() {
                    let group = u * (UNIT / g.group) + i;
                    let (scale, min) = scale(g, panel, group, lane);
                    for (out, &code) in out.iter_mut().zip(codes) {
                        let value = match g.table {
                            Some(table) => table.get(usize::from(code)).copied().unwrap_or(0),
                            None => code.wrapping_sub(g.zero).cast_signed(),
                        };
                        *out = scale * f32::from(value) - min;
                    }
                }
            }
        }
    }
}

/// Every 16th element.
fn pick<const S: usize>(
    panel: &[u8],
    lane: usize,
    out: &mut [f32],
    value: impl Fn([u8; S]) -> f32,
) {
    let elements = panel.as_chunks::<S>().0.iter().skip(lane).step_by(PANEL);
    for (out, &le) in out.iter_mut().zip(elements) {
        *out = value(le);
    }
}

/// The stored codes of one lane of a unit.
fn codes(bits: u32, unit: &[u8], lane: usize) -> [u8; UNIT] {
    let mut codes = [0; UNIT];
    let mut vectors = unit.as_chunks::<64>().0.iter();
    let mut plane = |into: u32, width: u32| {
        let per_vector = (8 / width) as usize;
        for codes in codes.chunks_mut(4 * per_vector) {
            let bytes = vectors.next().and_then(|v| v.as_chunks::<4>().0.get(lane));
            for (codes, shift) in codes.chunks_mut(4).zip((0..).step_by(width as usize)) {
                for (code, byte) in codes.iter_mut().zip(bytes.into_iter().flatten()) {
                    *code |= ((byte >> shift) & (0xff >> (8 - width))) << into;
                }
            }
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
        _ => plane(0, 8),
    }
    codes
}

/// Scale and minimum of one lane of a group; the minimum is +0 where the format has none.
pub fn scale(g: &Geometry, panel: &[u8], group: usize, lane: usize) -> (f32, f32) {
    let byte = |at: usize, row: usize| panel.get(at + row * PANEL + lane).copied().unwrap_or(0);
    let half = |at: usize, row: usize| {
        let at = at + (row * PANEL + lane) * 2;
        let le = panel.get(at..).and_then(|b| b.first_chunk::<2>()).copied().unwrap_or_default();
        f16::from_le_bytes(le).to_f32()
    };
    match g.scales {
        Scales::None => (1.0, 0.0),
        Scales::Half => {
            (half(g.scales_at, group), if g.has_min { half(g.mins_at, group) } else { 0.0 })
        }
        Scales::Exponent => (half_e8m0(byte(g.scales_at, group)), 0.0),
        Scales::Super => {
            let block = group * g.group / Geometry::SUPER;
            let sub = f32::from(byte(g.sub_scales_at, group).cast_signed());
            let min = if g.has_min {
                half(g.mins_at, block) * f32::from(byte(g.sub_mins_at, group))
            } else {
                0.0
            };
            (half(g.scales_at, block) * sub, min)
        }
    }
}

/// Half of `2^(e - 127)`, as ggml's `ggml_e8m0_to_fp32_half`: 0 and 1 give subnormal numbers,
/// and 255 is not a NaN.
pub fn half_e8m0(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}
