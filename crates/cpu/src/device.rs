//! The device: binding, running and stopping plans.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use graph::{
    Arena, Arg, Call, Code, DType, Device, Error, Fault, GradPrecision, HostTensor, Invalid, Leaf,
    LeafSlot, Needs, Operand, Place, Plan, Progress, Resident, Segment, Step, Stop, Unsupported,
};

use crate::arena::{ALIGN, CpuArena, Memory};
use crate::job::{Input, Job, Scratch};
use crate::kernels;
use crate::pack::PackedMatrix;
use crate::pool::{Outcome, Pool, Session, message};
use crate::simd::{Family, Isa};

/// The most threads a device takes.
const MAX_THREADS: usize = 1024;

/// The environment variable that forces a family.
const FAMILY_VARIABLE: &str = "GRADUS_CPU";

/// This machine's processor: kernels of one family, and a pool of threads.
///
/// Runs of several threads take turns.
pub struct Cpu {
    isa: Isa,
    pool: Pool,
    /// One per thread of the pool; grown by the run that holds the pool's session.
    scratch: Mutex<Vec<Memory>>,
}

impl Cpu {
    /// A device of `threads` threads, the caller's among them.
    ///
    /// The kernel family is `family`, else what the environment variable `GRADUS_CPU` says
    /// (`portable`, `avx2`, `avx512` or `amx`), else the widest that the processor has.
    ///
    /// # Errors
    /// `Invalid` when the number of threads is 0 or above 1024, or when the family is unknown or
    /// not of this processor; `Fault` when a thread cannot be started.
    pub fn new(threads: usize, family: Option<Family>) -> Result<Cpu, Error> {
        let forced = match family {
            Some(_) => None,
            None => std::env::var_os(FAMILY_VARIABLE).filter(|v| !v.is_empty()),
        };
        let forced = forced.map(|v| v.to_string_lossy().into_owned());
        Cpu::with(threads, family, forced.as_deref())
    }

    fn with(threads: usize, family: Option<Family>, forced: Option<&str>) -> Result<Cpu, Error> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(Invalid::new(format!(
                "{threads} threads were asked for: between 1 and {MAX_THREADS} are possible"
            ))
            .into());
        }
        let isa = match (family, forced) {
            (Some(family), _) => Isa::of(family).ok_or_else(|| {
                let name = family.name();
                Invalid::new(format!("the processor does not have the instructions of `{name}`"))
            })?,
            (None, Some(key)) => forced_family(key)?,
            (None, None) => Isa::detect(),
        };
        let pool = Pool::new(threads).map_err(|e| {
            Fault::new(Code::OutOfMemory, "", format!("{threads} threads cannot be started: {e}"))
        })?;
        Ok(Cpu { isa, pool, scratch: Mutex::new(Vec::new()) })
    }

    /// How many threads share the work.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The family of kernels it runs.
    pub fn kernel_family(&self) -> Family {
        self.isa.family()
    }
}

fn forced_family(key: &str) -> Result<Isa, Invalid> {
    let family = Family::ALL.into_iter().find(|f| f.key() == key).ok_or_else(|| {
        Invalid::new(format!(
            "{FAMILY_VARIABLE}={key}: expected portable, avx2, avx512, vnni or amx"
        ))
    })?;
    Isa::of(family).ok_or_else(|| {
        let have: Vec<&str> =
            Family::ALL.into_iter().filter(|f| f.is_available()).map(Family::key).collect();
        Invalid::new(format!(
            "{FAMILY_VARIABLE}={key}: the processor does not have its instructions; it has those \
             of {}",
            have.join(", ")
        ))
    })
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cpu({}, {} threads)", self.family(), self.threads())
    }
}

impl Device for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn family(&self) -> &'static str {
        self.isa.family().name()
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn grad_precision(&self) -> GradPrecision {
        match self.kernel_family() {
            Family::Amx => GradPrecision::Bf16,
            Family::Vnni => GradPrecision::Int16,
            // Multiplying integers of 16 bits takes as long as floats there.
            Family::Avx512 | Family::Avx2 | Family::Portable => GradPrecision::F32,
        }
    }

    fn supports(&self, call: &Call<'_>) -> Result<Needs, Unsupported> {
        kernels::supports(call)
    }

    fn load(&self, tensor: &HostTensor<'_>) -> Result<Arc<dyn Resident>, Fault> {
        let mut panic = None;
        let packed = PackedMatrix::pack_with(tensor, |count, run| {
            panic = self.pool.session().run(0, count, &(), &|_, i| run(i)).panic;
        });
        match panic {
            Some(what) => Err(Fault::new(Code::Internal, "", format!("packing panicked: {what}"))),
            None => Ok(Arc::new(packed?)),
        }
    }

    fn available(&self) -> Option<usize> {
        crate::arena::available()
    }

    fn arena(&self, bytes: usize) -> Result<Box<dyn Arena>, Fault> {
        Ok(Box::new(CpuArena::new(bytes)?))
    }

    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> Result<Progress, Fault> {
        let Some(arena) = arena.as_any_mut().downcast_mut::<CpuArena>() else {
            return Err(Fault::binding("", "the arena is of another device"));
        };
        if arena.bytes() < plan.arena_bytes {
            return Err(Fault::binding(
                "",
                format!(
                    "the plan takes an arena of {} bytes, this one has {}",
                    plan.arena_bytes,
                    arena.bytes()
                ),
            ));
        }
        check_leaves(plan, leaves)?;
        let session = self.pool.session();
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        grow(&mut scratch, self.pool.threads(), plan.scratch_bytes)?;
        let run = Run { isa: self.isa, plan, leaves, session: &session, scratch: &scratch, stop };
        run.steps(arena, from)
    }
}

/// Makes sure that every worker has scratch of so many bytes.
fn grow(scratch: &mut Vec<Memory>, threads: usize, bytes: usize) -> Result<(), Fault> {
    if scratch.len() == threads && scratch.iter().all(|m| m.len() >= bytes) {
        return Ok(());
    }
    scratch.clear();
    for _ in 0..threads {
        scratch.push(Memory::new(bytes).ok_or_else(|| {
            Fault::new(
                Code::OutOfMemory,
                "",
                format!("scratch of {bytes} bytes for each of {threads} threads: out of memory"),
            )
        })?);
    }
    Ok(())
}

/// Faults unless the leaves are what the plan was made for.
fn check_leaves(plan: &Plan, leaves: &[Leaf<'_>]) -> Result<(), Fault> {
    if leaves.len() != plan.leaves.len() {
        let missing = plan.leaves.get(leaves.len()).map_or("", |slot| &slot.name);
        return Err(Fault::binding(
            missing,
            format!("the plan has {} leaves, {} are bound", plan.leaves.len(), leaves.len()),
        ));
    }
    for (slot, leaf) in plan.leaves.iter().zip(leaves) {
        let LeafSlot { name, dtype, shape, .. } = slot;
        match leaf {
            Leaf::Host(bytes) => {
                if shape.bytes(*dtype) != Some(bytes.len()) {
                    let found = bytes.len();
                    return Err(Fault::binding(
                        name,
                        format!("{dtype} {shape} is bound to {found} bytes"),
                    ));
                }
                let align = element_align(*dtype);
                if !bytes.as_ptr().addr().is_multiple_of(align) {
                    return Err(Fault::binding(
                        name,
                        format!("{dtype} {shape} is bound to bytes that are not {align}-aligned"),
                    ));
                }
            }
            Leaf::Resident(weight) => {
                if weight.dtype() != *dtype || weight.shape() != *shape {
                    return Err(Fault::binding(
                        name,
                        format!(
                            "{dtype} {shape} is bound to a weight of {} {}",
                            weight.dtype(),
                            weight.shape()
                        ),
                    ));
                }
                if !weight.as_any().is::<PackedMatrix>() {
                    return Err(Fault::binding(name, "it is bound to a weight of another device"));
                }
            }
        }
    }
    Ok(())
}

/// What addresses of a dtype's elements are multiples of.
fn element_align(dtype: DType) -> usize {
    match dtype {
        DType::F32 | DType::I32 | DType::Q8Rows | DType::Int16Rows => 4,
        DType::F16 | DType::BF16 => 2,
        DType::Block(_) => 1,
    }
}

/// True when every element of `arg` lies within `bytes` bytes of storage.
fn reaches_within(arg: &Arg, bytes: usize) -> bool {
    let Some(size) = arg.dtype.element_bytes() else {
        let dense = arg.layout.offset == 0 && arg.is_contiguous();
        return dense && arg.shape.bytes(arg.dtype).is_some_and(|n| n <= bytes);
    };
    if arg.shape.elements() == 0 {
        return true;
    }
    let mut last = Some(arg.layout.offset);
    for (&d, &stride) in arg.shape.dims().iter().zip(&arg.layout.strides) {
        last = last.and_then(|at| (d - 1).checked_mul(stride)?.checked_add(at));
    }
    let end = last.and_then(|at| at.checked_add(1)?.checked_mul(size));
    end.is_some_and(|end| end <= bytes)
}

/// One call of [`Device::run`].
struct Run<'r> {
    isa: Isa,
    plan: &'r Plan,
    leaves: &'r [Leaf<'r>],
    session: &'r Session<'r>,
    scratch: &'r [Memory],
    stop: &'r dyn Stop,
}

impl<'r> Run<'r> {
    fn steps(&self, arena: &mut CpuArena, from: Segment) -> Result<Progress, Fault> {
        let count = self.plan.steps.len();
        if from.step > count {
            return Err(Fault::binding("", format!("a plan of {count} steps runs from {from:?}")));
        }
        let mut inputs = Vec::new();
        for (index, step) in self.plan.steps.iter().enumerate().skip(from.step) {
            let begin = if index == from.step { from.tile } else { 0 };
            let fault = |message: &str| Fault::new(Code::Internal, &*step.name, message);
            inputs.clear();
            for operand in &step.args {
                inputs.push(self.bind(arena, operand).map_err(fault)?);
            }
            let own = own(arena, step).map_err(fault)?;
            let [to, kept] = own.clone().map(|bytes| arena.ptr().wrapping_add(bytes.start));
            // SAFETY: `own` has found both places in the arena, and apart from each other and from
            // the operands.
            let job = unsafe { Job::new(&step.op, &inputs, step.out.arg, to, kept, self.isa) };
            kernels::check(&job)
                .map_err(|what| Fault::new(Code::IndexOutOfRange, &*step.name, what))?;
            if step.out.arg.shape.elements() == 0 {
                continue;
            }
            arena.wrote(own[0].end.max(own[1].end));
            let round = kernels::tiles(&job);
            let tiles = round * kernels::rounds(&job);
            if begin >= tiles {
                continue;
            }
            #[cfg(test)]
            let others = {
                if begin == 0 {
                    // What no round has left shows.
                    // SAFETY: nobody has the arena, of which this is a part.
                    unsafe { kept.write_bytes(0xff, own[1].len()) };
                }
                arena.outside(&own)
            };
            let mut at = begin;
            while at < tiles {
                let end = (at / round + 1) * round;
                let Outcome { left, panic } = self.tiles(&job, at..end);
                #[cfg(test)]
                assert!(arena.outside(&own) == others, "{}: writes beyond", step.op.name());
                if let Some(what) = panic {
                    return Err(fault(&format!("{} panicked: {what}", step.op.name())));
                }
                at = end - left;
                if left > 0 || at < tiles && self.stop.should_stop() {
                    return Ok(Progress::Stopped(Segment { step: index, tile: at }));
                }
            }
            if index + 1 < count && self.stop.should_stop() {
                return Ok(Progress::Stopped(Segment { step: index + 1, tile: 0 }));
            }
        }
        Ok(Progress::Done)
    }

    /// Runs some tiles of a job, all of one round.
    fn tiles(&self, job: &Job<'_>, tiles: Range<usize>) -> Outcome {
        #[cfg(test)]
        let round = kernels::tiles(job);
        #[cfg(test)]
        let parts = crate::job::parts::Parts::new(job, tiles.start, round, self.scratch.len());
        #[cfg(test)]
        let first = tiles.start / round * round;
        let run = |worker: usize, tile: usize| {
            let memory = self.scratch.get(worker);
            // SAFETY: each worker runs one tile at a time and only with its own memory, which is
            // initialized and aligned to 64 bytes. The run holds the scratch's lock.
            // Other plans may have needed more.
            let scratch = memory.map_or(&mut [][..], |m| unsafe {
                let n = m.len().min(self.plan.scratch_bytes) / 4;
                std::slice::from_raw_parts_mut(m.ptr().cast::<f32>(), n)
            });
            // In tests one thread takes the tiles from the last on, so that one that needs another,
            // or undoes what another did, differs from those of two.
            #[cfg(test)]
            let tile = if self.scratch.len() == 1 { 2 * first + round - 1 - tile } else { tile };
            #[cfg(test)]
            let before = parts.before();
            kernels::run_tile(job, tile, Scratch::new(scratch));
            #[cfg(test)]
            {
                parts.after(before);
                crate::job::guards::check();
            }
        };
        if tiles.len() > 1 {
            return self.session.run(tiles.start, tiles.end, self.stop, &run);
        }
        // Not worth waking anyone. The stop is asked by the caller, between steps.
        match catch_unwind(AssertUnwindSafe(|| run(0, tiles.start))) {
            Ok(()) => Outcome { left: 0, panic: None },
            Err(payload) => Outcome { left: 0, panic: Some(message(&*payload)) },
        }
    }

    /// An operand in its storage.
    fn bind(&self, arena: &mut CpuArena, operand: &Operand) -> Result<Input<'r>, &'static str> {
        let arg = operand.arg;
        let (base, len) = match operand.place {
            Place::Arena { start, len } => {
                if start.checked_add(len).is_none_or(|end| end > arena.bytes()) {
                    return Err("an operand is outside of the arena");
                }
                (arena.ptr().wrapping_add(start).cast_const(), len)
            }
            Place::Leaf(slot) => match self.leaves.get(slot) {
                Some(Leaf::Host(bytes)) => (bytes.as_ptr(), bytes.len()),
                Some(Leaf::Resident(weight)) => {
                    return match weight.as_any().downcast_ref::<PackedMatrix>() {
                        Some(matrix) if arg.resident => Ok(Input::packed(arg, matrix)),
                        _ => Err("a leaf that is read as host memory is bound to a weight"),
                    };
                }
                None => return Err("an operand is a leaf that the plan does not have"),
            },
        };
        if arg.resident {
            return Err("a weight is bound to host memory: load it first");
        }
        if !reaches_within(&arg, len) {
            return Err("an operand reaches outside of its storage");
        }
        // SAFETY: the elements are inside of a leaf, whose alignment was checked and which is
        // borrowed for the run, or of a value in the arena at a multiple of 64, which no step
        // writes while it is read.
        Ok(unsafe { Input::memory(arg, base) })
    }
}

/// The bytes of the arena that are a step's own: its result's, and what it keeps.
fn own(arena: &CpuArena, step: &Step) -> Result<[Range<usize>; 2], &'static str> {
    let Place::Arena { start, len } = step.out.place else {
        return Err("a result is placed in a leaf");
    };
    let bytes = step.out.arg.shape.bytes(step.out.arg.dtype);
    let fits = bytes.is_some_and(|bytes| bytes <= len);
    let end = start.checked_add(len).filter(|_| fits).ok_or("a result has no room")?;
    let own = [start..end, step.kept.clone()];
    let whole = |r: &Range<usize>| r.start.is_multiple_of(ALIGN) && r.end <= arena.bytes();
    if !own.iter().all(whole) {
        return Err("a result is outside of the arena");
    }
    let apart = |a: &Range<usize>, b: &Range<usize>| {
        a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start
    };
    let read = step.args.iter().filter_map(|operand| match operand.place {
        Place::Arena { start, len } => Some(start..start.saturating_add(len)),
        Place::Leaf(_) => None,
    });
    let [out, kept] = &own;
    let alone = read.clone().all(|r| apart(&r, out) && apart(&r, kept)) && apart(out, kept);
    if alone { Ok(own) } else { Err("a result is placed where an operand is") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_family_is_taken_or_refused_by_name() {
        let portable = Cpu::with(1, None, Some("portable")).unwrap();
        assert_eq!((portable.name(), portable.family()), ("cpu", "portable"));
        let message = Cpu::with(1, None, Some("sse9")).unwrap_err().to_string();
        assert!(message.contains("GRADUS_CPU=sse9"), "{message}");
        for family in Family::ALL {
            match Cpu::with(1, None, Some(family.key())) {
                Ok(cpu) => assert_eq!(cpu.kernel_family(), family),
                Err(e) => assert!(e.to_string().contains("GRADUS_CPU"), "{e}"),
            }
        }
    }

    /// A system that keeps tiles to itself: the same kernels without them, and nobody complains.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn without_permission_there_is_no_amx() {
        assert!(crate::amx::Amx::detect_with(|| false).is_none());
        let (amx, widest) = (Family::Amx.is_available(), Isa::detect().family());
        assert_eq!(amx, widest == Family::Amx);
        let cpu = Cpu::new(1, None).unwrap();
        let bf16 = cpu.grad_precision() == GradPrecision::Bf16;
        assert_eq!(bf16, cpu.kernel_family() == Family::Amx);
    }

    #[test]
    fn absurd_thread_counts_are_invalid() {
        for threads in [0, MAX_THREADS + 1, usize::MAX] {
            assert_eq!(Cpu::new(threads, None).unwrap_err().code(), Code::InvalidInput);
        }
        assert_eq!(Cpu::new(3, None).unwrap().threads(), 3);
    }
}
