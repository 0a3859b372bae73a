//! Memory of exactly the bytes a plan asks for, aligned to cache lines.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;

use graph::{Arena, Code, Fault};
use memmap2::MmapMut;

/// Alignment of an arena and of every value in it.
pub(crate) const ALIGN: usize = 64;

/// The smallest page: touching one byte in each makes an allocation real.
const PAGE: usize = 4096;

/// Allocations below this are not held against what the system says it has.
const CHECKED: usize = 64 << 20;

/// Bytes that the system can give without taking them from somebody, where it says so: what the
/// machine has available, or what is left of the control group's limit where that is less.
/// Touching more would not fail: it would end a process, perhaps this one.
pub(crate) fn available() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| field(&text, "MemAvailable:"));
    let number = |path: &str| read(path)?.trim().parse::<usize>().ok();
    let group = || {
        let limit = number("/sys/fs/cgroup/memory.max")?;
        Some(limit.saturating_sub(number("/sys/fs/cgroup/memory.current")?))
    };
    machine.into_iter().chain(group()).min()
}

/// A field of `/proc/meminfo`, in bytes.
fn field(meminfo: &str, name: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Asks for pages of megabytes where the memory has room for them: with small ones, reading a
/// large weight or value at many places is mostly looking up where they are.
pub(crate) fn prefer_huge_pages(map: &MmapMut) {
    #[cfg(target_os = "linux")]
    // A system that has none goes on with small ones.
    let _ = map.advise(memmap2::Advice::HugePage);
    #[cfg(not(target_os = "linux"))]
    let _ = map;
}

/// Zeroed memory aligned to [`ALIGN`], given back to the system when dropped: mapped, since an
/// allocator would keep what one thread took and another gives back.
pub(crate) struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    /// Owns what `start` points to.
    _map: Option<MmapMut>,
}

// SAFETY: it owns its memory, like a `Box<[u8]>`.
unsafe impl Send for Memory {}
// SAFETY: shared references only give out the pointer.
unsafe impl Sync for Memory {}

impl Memory {
    /// Takes and touches `bytes` bytes; `None` when the system has no such memory.
    pub(crate) fn new(bytes: usize) -> Option<Memory> {
        if bytes == 0 {
            let start = NonNull::new(std::ptr::without_provenance_mut(ALIGN))?;
            return Some(Memory { start, bytes, _map: None });
        }
        if bytes >= CHECKED && available().is_some_and(|have| bytes > have) {
            return None;
        }
        let (mut map, offset) = mapped(bytes)?;
        let start = NonNull::new(map.as_mut_ptr().wrapping_add(offset))?;
        prefer_huge_pages(&map);
        for at in (0..bytes).step_by(PAGE) {
            // SAFETY: inside of the map. Volatile, because the byte is 0 already and the point is
            // that the page is taken now, not while a plan runs.
            unsafe { start.as_ptr().add(at).write_volatile(0) };
        }
        Some(Memory { start, bytes, _map: Some(map) })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

/// A map with room for so many bytes, and where they begin in it: at a multiple of [`ALIGN`], as
/// a map itself does.
fn mapped(bytes: usize) -> Option<(MmapMut, usize)> {
    // In tests nothing is behind them.
    #[cfg(test)]
    if let Some(fenced) = crate::testing::fenced(bytes.next_multiple_of(ALIGN)) {
        return Some(fenced);
    }
    Some((MmapMut::map_anon(bytes).ok()?, 0))
}

/// The arena of the CPU device.
pub(crate) struct CpuArena {
    memory: Memory,
    high_water: usize,
}

impl CpuArena {
    pub(crate) fn new(bytes: usize) -> Result<CpuArena, Fault> {
        match Memory::new(bytes) {
            Some(memory) => Ok(CpuArena { memory, high_water: 0 }),
            None => Err(Fault::new(
                Code::OutOfMemory,
                "",
                format!("an arena of {bytes} bytes was asked for: the system has no such memory"),
            )),
        }
    }

    /// Notes that bytes up to `end` are written.
    pub(crate) fn wrote(&mut self, end: usize) {
        self.high_water = self.high_water.max(end);
    }

    /// What the bytes outside of some ranges are; 0 in place of theirs.
    #[cfg(test)]
    pub(crate) fn outside(&self, ranges: &[Range<usize>]) -> Vec<u8> {
        // SAFETY: the arena's own bytes, which nobody writes while it is borrowed.
        let all = unsafe { std::slice::from_raw_parts(self.memory.ptr(), self.memory.len()) };
        let mut all = all.to_vec();
        ranges.iter().for_each(|range| all[range.clone()].fill(0));
        all
    }

    /// The first byte.
    pub(crate) fn ptr(&mut self) -> *mut u8 {
        self.memory.ptr()
    }
}

impl Arena for CpuArena {
    fn bytes(&self) -> usize {
        self.memory.len()
    }

    fn high_water(&self) -> usize {
        self.high_water
    }

    fn poison(&mut self) {
        // All ones is a NaN in f32, f16 and bf16.
        // SAFETY: the arena's own bytes, which `&mut self` makes exclusive.
        unsafe { self.memory.ptr().write_bytes(0xff, self.memory.len()) };
    }

    fn read(&self, range: Range<usize>, to: &mut [u8]) -> Result<(), Fault> {
        let bytes = self.memory.len();
        let fits = range.start <= range.end && range.end <= bytes;
        if !fits || range.end - range.start != to.len() {
            return Err(Fault::new(
                Code::Internal,
                "",
                format!(
                    "bytes {}..{} of an arena of {bytes} were read into {} bytes",
                    range.start,
                    range.end,
                    to.len()
                ),
            ));
        }
        // SAFETY: the range is inside of the arena, and `to` is as long.
        unsafe {
            let from = self.memory.ptr().add(range.start);
            std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
        }
        Ok(())
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_has_exactly_its_bytes() {
        for bytes in [0, 1, 63, 64, 10_000] {
            let mut arena = CpuArena::new(bytes).unwrap();
            assert_eq!(arena.bytes(), bytes);
            assert_eq!(arena.high_water(), 0);
            if bytes > 0 {
                assert_eq!(arena.ptr() as usize % ALIGN, 0);
            }
            arena.poison();
            let mut all = vec![0; bytes];
            arena.read(0..bytes, &mut all).unwrap();
            assert!(all.iter().all(|&b| b == 0xff));
            let (start, end) = (1, 0);
            for bad in [0..bytes + 1, bytes + 1..bytes + 1, start..end] {
                assert!(arena.read(bad, &mut []).is_err());
            }
            arena.wrote(bytes);
            assert_eq!(arena.high_water(), bytes);
        }
    }

    #[test]
    fn too_much_memory_is_a_fault() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let total = field(&meminfo, "MemTotal:").unwrap_or(1 << 60);
        for bytes in [total, 1 << 60, usize::MAX] {
            let Err(fault) = CpuArena::new(bytes) else { panic!("{bytes} bytes were found") };
            assert_eq!(fault.code, Code::OutOfMemory);
        }
    }
}
