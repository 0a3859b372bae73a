//! Tiles in software, for tests on processors that have none: what Intel's manual says of the
//! instructions of [`super::Tiles`] (volume 2, `TDPBF16PS`, `VCVTNE2PS2BF16`), and no byte of
//! memory more is touched.

use std::cell::RefCell;

use super::Config;

/// Bytes of a row, and rows of a tile.
const ROW: usize = 64;
const ROWS: usize = 16;

/// Eight tiles with their shapes.
struct State {
    shapes: [(usize, usize); 8],
    rows: [[[u8; ROW]; ROWS]; 8],
}

thread_local! {
    static STATE: RefCell<Option<Box<State>>> = const { RefCell::new(None) };
}

/// `LDTILECFG`.
pub(super) fn configure(config: &Config) {
    let shape = |i: usize| (usize::from(config.rows[i]), usize::from(config.row_bytes[i]));
    let shapes = std::array::from_fn(shape);
    let fits = |&(rows, bytes): &(usize, usize)| rows <= ROWS && bytes <= ROW;
    assert!(config.palette == 1 && shapes.iter().all(fits), "a general protection fault");
    let state = State { shapes, rows: [[[0; ROW]; ROWS]; 8] };
    STATE.set(Some(Box::new(state)));
}

/// `TILERELEASE`.
pub(super) fn release() {
    STATE.set(None);
}

/// Whether tiles are configured.
pub(super) fn in_use() -> bool {
    STATE.with_borrow(Option::is_some)
}

/// One or two blocks of rows times 32 columns, with the tiles and in the order of
/// [`super::Tiles::bf16_2x2`].
///
/// # Safety
/// As there.
pub(super) unsafe fn bf16(
    c: &[*mut f32],
    c_stride: usize,
    a: &[*const u8],
    a_stride: usize,
    b: *const u8,
    (steps, first): (usize, bool),
) {
    assert!(steps > 0 && c.len() == a.len());
    STATE.with_borrow_mut(|state| {
        let state = state.as_mut().expect("tiles are configured: an undefined instruction");
        // SAFETY: the caller's.
        unsafe {
            for (block, c) in c.iter().enumerate() {
                for half in 0..2 {
                    match first {
                        true => state.zero(block * 2 + half),
                        false => state.load(block * 2 + half, c.add(half * 16).cast(), c_stride),
                    }
                }
            }
            for step in 0..steps {
                for half in 0..2 {
                    state.load(6 + half, b.add(step * 2048 + half * 1024), 64);
                }
                for (block, a) in a.iter().enumerate() {
                    state.load(4 + block, a.add(step * 64), a_stride);
                    for half in 0..2 {
                        state.multiply(block * 2 + half, 4 + block, 6 + half);
                    }
                }
            }
            for (block, c) in c.iter().enumerate() {
                for half in 0..2 {
                    state.store(block * 2 + half, c.add(half * 16).cast(), c_stride);
                }
            }
        }
    });
}

impl State {
    fn zero(&mut self, tile: usize) {
        self.rows[tile] = [[0; ROW]; ROWS];
    }

    unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
        self.zero(tile);
        let (rows, bytes) = self.shapes[tile];
        for (i, row) in self.rows[tile].iter_mut().take(rows).enumerate() {
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(from.add(i * stride), row.as_mut_ptr(), bytes) };
        }
    }

    unsafe fn store(&self, tile: usize, to: *mut u8, stride: usize) {
        let (rows, bytes) = self.shapes[tile];
        for (i, row) in self.rows[tile].iter().take(rows).enumerate() {
            // SAFETY: the caller's.
            unsafe { std::ptr::copy_nonoverlapping(row.as_ptr(), to.add(i * stride), bytes) };
        }
    }

    /// `TDPBF16PS`.
    fn multiply(&mut self, c: usize, a: usize, b: usize) {
        let ((m, n), (a_rows, k), (b_rows, b_bytes)) =
            (self.shapes[c], self.shapes[a], self.shapes[b]);
        let fits = m == a_rows && n == b_bytes && k / 4 == b_rows;
        assert!(fits, "an undefined instruction: tiles of these shapes have no product");
        for row in 0..m {
            for column in 0..n / 4 {
                let mut chains = [0.0; 2];
                for pair in 0..k / 4 {
                    for (odd, chain) in chains.iter_mut().enumerate() {
                        let x = bf16_at(&self.rows[a][row], pair * 2 + odd);
                        let y = bf16_at(&self.rows[b][pair], column * 2 + odd);
                        *chain = flushed(x.mul_add(y, *chain));
                    }
                }
                let at = &mut self.rows[c][row][column * 4..][..4];
                let sum = flushed(f32::from_le_bytes(at.try_into().expect("four bytes")));
                let sum = flushed(sum + flushed(chains[0] + chains[1]));
                at.copy_from_slice(&sum.to_le_bytes());
            }
        }
    }
}

fn bf16_at(row: &[u8; ROW], i: usize) -> f32 {
    flushed(half::bf16::from_le_bytes([row[i * 2], row[i * 2 + 1]]).to_f32())
}

/// Subnormal numbers count as 0.
fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// `VCVTNE2PS2BF16`.
pub(crate) fn to_bf16(high: [f32; 16], low: [f32; 16]) -> [u16; 32] {
    let all = |i: usize| if i < 16 { low[i] } else { high[i - 16] };
    std::array::from_fn(|i| half::bf16::from_f32(flushed(all(i))).to_bits())
}
