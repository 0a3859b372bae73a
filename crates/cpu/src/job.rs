//! A step with its operands bound to memory: what a kernel is given.

use graph::{Arg, Op};

use crate::pack::PackedMatrix;
use crate::simd::Isa;

/// Multiplications of floats in about a millisecond, on one thread of a processor with AVX-512: what a
/// tile should not exceed.
pub(crate) const MILLISECOND: usize = 1 << 26;

/// Where an operand's elements are.
#[derive(Copy, Clone)]
enum Source<'a> {
    /// The start of the storage that the operand's layout refers to. What the layout reaches has
    /// been found to be inside of it.
    Memory(*const u8),
    Packed(&'a PackedMatrix),
}

/// An operand of a running step.
#[derive(Copy, Clone)]
pub(crate) struct Input<'a> {
    /// Its type, shape and layout.
    pub(crate) arg: Arg,
    source: Source<'a>,
}

impl<'a> Input<'a> {
    /// An operand in memory.
    ///
    /// # Safety
    /// Every element that the layout reaches from `base` must stay readable and unwritten for
    /// `'a`, and be aligned to its type.
    pub(crate) unsafe fn memory(arg: Arg, base: *const u8) -> Input<'a> {
        Input { arg, source: Source::Memory(base) }
    }

    /// A weight that the device has packed.
    pub(crate) fn packed(arg: Arg, matrix: &'a PackedMatrix) -> Input<'a> {
        Input { arg, source: Source::Packed(matrix) }
    }

    /// The packed weight, if it is one.
    pub(crate) fn matrix(&self) -> Option<&'a PackedMatrix> {
        match self.source {
            Source::Packed(matrix) => Some(matrix),
            Source::Memory(_) => None,
        }
    }

    /// The first byte of the storage, for block formats and q8-rows (always dense); null for a
    /// packed weight, which no kernel reads this way.
    pub(crate) fn bytes(&self) -> *const u8 {
        match self.source {
            Source::Memory(base) => base,
            Source::Packed(_) => std::ptr::null(),
        }
    }

    /// The first element, of element types.
    pub(crate) fn ptr<T>(&self) -> *const T {
        self.bytes().cast::<T>().wrapping_add(self.arg.layout.offset)
    }

    /// Elements between neighbours along dimension `i`; 0 when there is no such dimension.
    pub(crate) fn stride(&self, i: usize) -> usize {
        self.arg.layout.strides.get(i).copied().unwrap_or(0)
    }

    /// The operand as rows of contiguous elements.
    pub(crate) fn rows<T>(&self) -> Rows<T> {
        Rows { ptr: self.ptr(), stride: self.arg.row_stride().unwrap_or(0) }
    }

    /// The elements of a dense i32 operand.
    pub(crate) fn ints(&self) -> &'a [i32] {
        // SAFETY: kernels take indices as dense operands only; `memory` promised the rest.
        unsafe { self.slice() }
    }

    /// The elements of a dense operand.
    ///
    /// # Safety
    /// The operand must be dense and of an element type of the size of `T`.
    pub(crate) unsafe fn slice<T>(&self) -> &'a [T] {
        match self.source {
            // SAFETY: the caller's, and `memory` promised that the elements are there.
            Source::Memory(_) => unsafe {
                std::slice::from_raw_parts(self.ptr(), self.arg.shape.elements())
            },
            Source::Packed(_) => &[],
        }
    }
}

/// Rows of contiguous elements, a fixed number of elements apart.
#[derive(Copy, Clone)]
pub(crate) struct Rows<T> {
    ptr: *const T,
    stride: usize,
}

impl<T> Rows<T> {
    /// The first element of row `i`.
    #[inline(always)]
    pub(crate) fn row(self, i: usize) -> *const T {
        self.ptr.wrapping_add(i * self.stride)
    }
}

/// A step that runs: an op, its operands, and where its result goes.
#[derive(Copy, Clone)]
pub(crate) struct Job<'a> {
    pub(crate) op: &'a Op,
    pub(crate) inputs: &'a [Input<'a>],
    /// The result's type and shape; always dense.
    pub(crate) out: Arg,
    /// The result's bytes, at a multiple of 64.
    to: *mut u8,
    /// What `supports` asked to be kept, at a multiple of 64.
    kept: *mut u8,
    pub(crate) isa: Isa,
}

// SAFETY: a job is shared by the threads that run its tiles. Operands are only read; each tile
// writes elements of the result, and of what is kept, that no other tile of its round touches.
unsafe impl Sync for Job<'_> {}

impl<'a> Job<'a> {
    /// A job writing its result to `to`, and to `kept` what a round leaves to the next.
    ///
    /// # Safety
    /// `to` must be valid for writes of the whole result during `'a`, be aligned to 64, and not
    /// overlap the operands; so must `kept`, of the bytes that `supports` declared; `inputs` and `out` must be what the shape rule of `op` and
    /// `supports` accept.
    pub(crate) unsafe fn new(
        op: &'a Op,
        inputs: &'a [Input<'a>],
        out: Arg,
        to: *mut u8,
        kept: *mut u8,
        isa: Isa,
    ) -> Job<'a> {
        Job { op, inputs, out, to, kept, isa }
    }

    /// Operand `i`.
    #[inline(always)]
    pub(crate) fn input(&self, i: usize) -> Input<'a> {
        self.inputs[i]
    }

    /// The first element of the result.
    #[inline(always)]
    pub(crate) fn out<T>(&self) -> *mut T {
        self.to.cast()
    }

    /// The first float of what is kept from round to round. In the first it may be anything.
    #[inline(always)]
    pub(crate) fn kept(&self) -> *mut f32 {
        self.kept.cast()
    }

    /// The first element of row `i` of a result of element type.
    #[inline(always)]
    pub(crate) fn out_row<T>(&self, i: usize) -> *mut T {
        self.to.cast::<T>().wrapping_add(i * self.out.shape.cols())
    }
}

/// One worker's scratch memory, aligned to 64 bytes, of at least the bytes that `supports`
/// declared. Its contents are whatever the last tile left.
pub(crate) struct Scratch<'a>(&'a mut [f32]);

impl<'a> Scratch<'a> {
    /// Hands out memory that starts at a multiple of 64 bytes.
    pub(crate) fn new(memory: &'a mut [f32]) -> Scratch<'a> {
        Scratch(memory)
    }

    /// The next `n` floats; the next call begins at a multiple of 64 bytes again.
    pub(crate) fn take(&mut self, n: usize) -> &'a mut [f32] {
        let memory = std::mem::take(&mut self.0);
        let (taken, rest) = memory.split_at_mut(padded(n) + GUARD);
        self.0 = rest;
        let (taken, beyond) = taken.split_at_mut(n);
        #[cfg(test)]
        guards::put(taken, beyond);
        #[cfg(not(test))]
        let _ = beyond;
        taken
    }
}

/// Floats that [`Scratch::take`] uses for `n`.
pub(crate) const fn padded(n: usize) -> usize {
    n.next_multiple_of(16)
}

/// Bytes of scratch for buffers of so many floats.
pub(crate) fn scratch_bytes(buffers: &[usize]) -> usize {
    buffers.iter().map(|&n| (padded(n) + GUARD) * 4).sum()
}

/// Floats behind every buffer that nobody may write; tests see to it.
const GUARD: usize = if cfg!(test) { 64 } else { 0 };

/// Kernels write through pointers: in tests, what a tile writes beyond one of its buffers is
/// found after the tile, and what it reads of what the last tile left is NaN.
#[cfg(test)]
pub(crate) mod guards {
    use std::cell::RefCell;

    thread_local! {
        static BEYOND: RefCell<Vec<(*const f32, usize)>> = const { RefCell::new(Vec::new()) };
    }

    /// The bits of what nobody writes.
    const UNTOUCHED: u32 = 0x7fc0_5eed;

    pub(super) fn put(buffer: &mut [f32], beyond: &mut [f32]) {
        buffer.fill(f32::NAN);
        beyond.fill(f32::from_bits(UNTOUCHED));
        BEYOND.with_borrow_mut(|all| all.push((beyond.as_ptr(), beyond.len())));
    }

    /// Panics where this thread's tile wrote beyond a buffer.
    pub(crate) fn check() {
        for (start, n) in BEYOND.take() {
            // SAFETY: the worker's scratch, which is as it was when the tile began.
            let beyond = unsafe { std::slice::from_raw_parts(start, n) };
            let written = beyond.iter().position(|x| x.to_bits() != UNTOUCHED);
            assert_eq!(written, None, "a kernel wrote beyond its scratch");
        }
    }
}

/// A tile writes its own part of the result: in tests, where one thread runs them all, what two of
/// them write is found, even where they write the same.
#[cfg(test)]
pub(crate) mod parts {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::Job;

    thread_local! {
        static TILES: RefCell<BTreeMap<&'static str, Most>> = const { RefCell::new(BTreeMap::new()) };
    }

    /// The most that a step of an op had.
    #[derive(Copy, Clone, Default)]
    pub(crate) struct Most {
        /// Tiles of a round.
        pub(crate) tiles: usize,
        pub(crate) rounds: usize,
    }

    /// What the steps of this thread's runs had.
    pub(crate) fn most_tiles() -> BTreeMap<&'static str, Most> {
        TILES.with_borrow(Clone::clone)
    }

    /// Bytes that may be looked at in all: results of many tiles are long.
    const MOST: usize = 64 << 20;

    /// Where the tiles so far wrote.
    pub(crate) struct Parts {
        to: *mut u8,
        written: Option<Mutex<Vec<bool>>>,
        name: &'static str,
    }

    // SAFETY: only one thread looks at the result.
    unsafe impl Sync for Parts {}

    /// A job's result.
    ///
    /// # Safety
    /// No tile may run meanwhile, and the result have so many bytes.
    unsafe fn result<'a>(to: *mut u8, bytes: usize) -> &'a mut [u8] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(to, bytes) }
    }

    impl Parts {
        pub(crate) fn new(job: &Job<'_>, begin: usize, tiles: usize, threads: usize) -> Parts {
            let bytes = job.out.shape.bytes(job.out.dtype).unwrap_or(0);
            TILES.with_borrow_mut(|all| {
                let most = all.entry(job.op.name()).or_default();
                most.tiles = most.tiles.max(tiles);
                most.rounds = most.rounds.max(begin / tiles.max(1) + 1);
            });
            // Later rounds add to what the first one wrote.
            let looks =
                threads == 1 && tiles > 1 && begin < tiles && tiles.saturating_mul(bytes) <= MOST;
            let written = looks.then(|| Mutex::new(vec![false; bytes]));
            let parts = Parts { to: job.to, written, name: job.op.name() };
            if begin == 0 {
                // What no tile writes shows, whatever was there before.
                // SAFETY: no tile runs yet.
                unsafe { result(parts.to, bytes) }.fill(0xff);
            }
            parts
        }

        /// What the tiles before wrote, which is taken out of the result.
        pub(crate) fn before(&self) -> Vec<u8> {
            let Some(written) = &self.written else { return Vec::new() };
            // SAFETY: there is one thread, which runs the next tile after this.
            let result = unsafe { result(self.to, written.lock().unwrap().len()) };
            let before = result.to_vec();
            result.fill(0xff);
            before
        }

        /// Puts it back where the tile wrote nothing. Panics where it wrote over it.
        pub(crate) fn after(&self, before: Vec<u8>) {
            let Some(written) = &self.written else { return };
            let mut written = written.lock().unwrap();
            // SAFETY: there is one thread, whose tile is done.
            let result = unsafe { result(self.to, before.len()) };
            for ((to, was), written) in result.iter_mut().zip(before).zip(written.iter_mut()) {
                if *to == 0xff {
                    *to = was;
                    continue;
                }
                assert!(!*written, "{}: two tiles write the same part of the result", self.name);
                *written = true;
            }
        }
    }
}
