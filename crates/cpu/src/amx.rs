//! AMX: eight registers of 16 rows of 64 bytes, and products of them.
//!
//! The compiler knows no AMX, so what touches a tile is assembly. A kernel configures the tiles
//! of its thread, uses them and releases them again ([`Tiles`]): no other code ever runs with
//! tiles in use, and the system saves none.

use std::arch::asm;
use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::simd::Vnni;

#[cfg(test)]
pub(crate) mod software;

/// The proof that the processor has AMX for bf16, that the system lets this process use it, and
/// that the processor has AVX-512 with bf16 conversions.
#[derive(Copy, Clone)]
pub(crate) struct Amx {
    vectors: Vnni,
    /// In this crate's tests, where the processor has VNNI alone: tiles are [`software`].
    #[cfg(test)]
    pub(crate) software: bool,
}

impl Amx {
    /// `None` when the processor lacks a feature, or the system does not give the permission.
    pub(crate) fn detect() -> Option<Amx> {
        static DETECTED: OnceLock<bool> = OnceLock::new();
        let vectors = Vnni::detect()?;
        let tiles = *DETECTED.get_or_init(|| Amx::detect_with(permitted).is_some());
        (tiles || cfg!(test)).then_some(Amx {
            vectors,
            #[cfg(test)]
            software: !tiles,
        })
    }

    /// As [`Amx::detect`], with `permission` to ask the system.
    pub(crate) fn detect_with(permission: impl Fn() -> bool) -> Option<Amx> {
        let vectors = Vnni::detect()?;
        let features = is_x86_feature_detected!("avx512bf16") && tiles_exist();
        (features && permission()).then_some(Amx {
            vectors,
            #[cfg(test)]
            software: false,
        })
    }

    /// The vectors beside the tiles.
    pub(crate) fn vectors(self) -> Vnni {
        self.vectors
    }

    /// Configures this thread's tiles until the result is dropped.
    pub(crate) fn configure(self, config: &Config) -> Tiles {
        let tiles = Tiles(self, PhantomData);
        tiles.reconfigure(config);
        tiles
    }
}

/// Whether the processor has tiles, and their products of bf16.
fn tiles_exist() -> bool {
    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    let all = BF16 | TILE;
    std::arch::x86_64::__cpuid_count(7, 0).edx & all == all
}

/// Asks Linux for the use of tiles: for this process, with all of its threads. That the system
/// knows of tiles, it says so too.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// `ARCH_REQ_XCOMP_PERM` of `asm/prctl.h`.
    const REQUEST: libc::c_long = 0x1023;
    /// `XFEATURE_XTILEDATA`.
    const TILE_DATA: libc::c_long = 18;
    // SAFETY: this call takes two numbers and touches no memory of the process.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The shapes of the tiles, as `LDTILECFG` reads them.
#[repr(C, align(64))]
pub(crate) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Tiles of so many rows of so many bytes: 1 to 16, and up to 64 in fours.
    pub(crate) const fn new(tiles: [(u8, u16); 8]) -> Config {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let mut i = 0;
        while i < 8 {
            (config.rows[i], config.row_bytes[i]) = tiles[i];
            i += 1;
        }
        config
    }
}

/// The use of this thread's tiles. Not to be sent to another.
pub(crate) struct Tiles(#[cfg_attr(not(test), allow(dead_code))] Amx, PhantomData<*const ()>);

impl Tiles {
    /// Gives the tiles other shapes, and zeros.
    pub(crate) fn reconfigure(&self, config: &Config) {
        #[cfg(test)]
        if self.0.software {
            return software::configure(config);
        }
        // SAFETY: `Amx` is the proof that the instruction exists, and every `Config` is valid.
        // The memory is read, so the compiler has written it.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                config = in(reg) std::ptr::from_ref(config),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, readonly),
            );
        }
    }

    /// Adds products of bf16 to f32: `c[i] += a[i] b` for two blocks of rows `a[i]` and 32
    /// columns. A step is 32 elements of the reduced dimension: 64 bytes of each row of `a`, and
    /// 2 x 1,024 bytes of `b`, each `[16 pairs][16 columns][2]`. `first` starts from zeros.
    ///
    /// Takes tiles 0 to 3 for `c`, 4 and 5 for `a`, 6 and 7 for `b`.
    ///
    /// # Safety
    /// Pointers and strides in bytes must reach what the configuration says. `steps` is not 0.
    pub(crate) unsafe fn bf16_2x2(
        &self,
        c: [*mut f32; 2],
        c_stride: usize,
        a: [*const u8; 2],
        a_stride: usize,
        b: *const u8,
        (steps, first): (usize, bool),
    ) {
        #[cfg(test)]
        if self.0.software {
            // SAFETY: the caller's.
            return unsafe { software::bf16(&c, c_stride, &a, a_stride, b, (steps, first)) };
        }
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "test {first:e}, {first:e}",
                "jnz 2f",
                "tileloadd tmm0, [{c0} + {cs}*1]",
                "tileloadd tmm1, [{c0} + {cs}*1 + 64]",
                "tileloadd tmm2, [{c1} + {cs}*1]",
                "tileloadd tmm3, [{c1} + {cs}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tileloadd tmm4, [{a0} + {as_}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {as_}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 64",
                "add {a1}, 64",
                "add {b}, 2048",
                "sub {steps}, 1",
                "jnz 3b",
                "tilestored [{c0} + {cs}*1], tmm0",
                "tilestored [{c0} + {cs}*1 + 64], tmm1",
                "tilestored [{c1} + {cs}*1], tmm2",
                "tilestored [{c1} + {cs}*1 + 64], tmm3",
                first = in(reg) u32::from(first),
                c0 = in(reg) c[0],
                c1 = in(reg) c[1],
                cs = in(reg) c_stride,
                a0 = inout(reg) a[0] => _,
                a1 = inout(reg) a[1] => _,
                as_ = in(reg) a_stride,
                b = inout(reg) b => _,
                line = in(reg) 64usize,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// As [`Tiles::bf16_2x2`] for one block of rows: tiles 0 and 1, 4, 6 and 7.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn bf16_1x2(
        &self,
        c: *mut f32,
        c_stride: usize,
        a: *const u8,
        a_stride: usize,
        b: *const u8,
        (steps, first): (usize, bool),
    ) {
        #[cfg(test)]
        if self.0.software {
            // SAFETY: the caller's.
            return unsafe { software::bf16(&[c], c_stride, &[a], a_stride, b, (steps, first)) };
        }
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "test {first:e}, {first:e}",
                "jnz 2f",
                "tileloadd tmm0, [{c} + {cs}*1]",
                "tileloadd tmm1, [{c} + {cs}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "3:",
                "tileloadd tmm6, [{b} + {line}*1]",
                "tileloadd tmm4, [{a} + {as_}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "add {a}, 64",
                "add {b}, 2048",
                "sub {steps}, 1",
                "jnz 3b",
                "tilestored [{c} + {cs}*1], tmm0",
                "tilestored [{c} + {cs}*1 + 64], tmm1",
                first = in(reg) u32::from(first),
                c = in(reg) c,
                cs = in(reg) c_stride,
                a = inout(reg) a => _,
                as_ = in(reg) a_stride,
                b = inout(reg) b => _,
                line = in(reg) 64usize,
                steps = inout(reg) steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }
}

/// Whether this thread's tiles are configured.
#[cfg(test)]
pub(crate) fn in_use(amx: Amx) -> bool {
    if amx.software {
        return software::in_use();
    }
    let mut config = Config::new([(0, 0); 8]);
    // SAFETY: `Amx` is the proof that the instruction exists; it writes the 64 bytes.
    unsafe {
        asm!(
            "sttilecfg [{config}]",
            config = in(reg) std::ptr::from_mut(&mut config),
            options(nostack, preserves_flags),
        );
    }
    config.palette != 0
}

impl Drop for Tiles {
    fn drop(&mut self) {
        #[cfg(test)]
        if self.0.software {
            return software::release();
        }
        // SAFETY: `Amx` is the proof that the instruction exists.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags, nomem),
            );
        }
    }
}
