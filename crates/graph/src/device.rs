//! What a device is. Pure: only the contract lives here.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::{Code, DType, Fault, GradPrecision, Layout, Op, Plan, Shape};

/// One operand or result of a [`Call`].
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Arg {
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost first.
    pub shape: Shape,
    /// Where its elements lie.
    pub layout: Layout,
    /// True when it is a leaf made by [`Graph::weight`](crate::Graph::weight), bound to what
    /// [`Device::load`] returned.
    pub resident: bool,
}

impl Arg {
    /// A dense operand.
    pub fn dense(dtype: DType, shape: Shape) -> Arg {
        Arg { dtype, shape, layout: Layout::contiguous(&shape), resident: false }
    }

    /// True when the elements lie densely.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous(&self.shape)
    }

    /// See [`Layout::row_stride`].
    pub fn row_stride(&self) -> Option<usize> {
        self.layout.row_stride(&self.shape)
    }
}

/// An op with its operands' types and layouts: what a device is asked about.
#[derive(Copy, Clone, Debug)]
pub struct Call<'a> {
    /// The op; never `Leaf`, and a view op only ever as `Copy`.
    pub op: &'a Op,
    /// Operands in order.
    pub args: &'a [Arg],
    /// The result; always contiguous.
    pub out: Arg,
}

/// What a supported call needs beyond its operands and result.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct Needs {
    /// Scratch bytes per worker thread while the call runs.
    pub scratch: usize,
    /// Bytes of the arena that are the call's own until its last tile is done, be it stopped before.
    pub kept: usize,
}

/// Why a device does not run a call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unsupported {
    /// The operand of this index must be contiguous; the planner then inserts a copy.
    Layout(usize),
    /// No kernel; a short phrase says for what, e.g. "a bf16 left operand".
    Kernel(String),
}

/// A tensor in host memory: little-endian, row-major, dense.
#[derive(Copy, Clone, Debug)]
pub struct HostTensor<'a> {
    /// Element type.
    pub dtype: DType,
    /// Shape, outermost first.
    pub shape: Shape,
    /// Exactly `shape.bytes(dtype)` bytes.
    pub bytes: &'a [u8],
}

/// A weight as a device holds it, immutable once loaded.
pub trait Resident: Any + Send + Sync {
    /// Element type it was loaded with.
    fn dtype(&self) -> DType;
    /// Shape it was loaded with.
    fn shape(&self) -> Shape;
    /// Bytes the device holds for it.
    fn bytes(&self) -> usize;
    /// For the owning device to recognize its own.
    fn as_any(&self) -> &dyn Any;
}

/// What a leaf of a plan is bound to for one run.
#[derive(Copy, Clone)]
pub enum Leaf<'a> {
    /// Host memory: little-endian, row-major, dense, aligned to its element.
    Host(&'a [u8]),
    /// What [`Device::load`] of the same device returned.
    Resident(&'a dyn Resident),
}

/// A position inside a plan's execution: the next tile of a step.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Segment {
    /// Index into [`Plan::steps`].
    pub step: usize,
    /// First tile of that step which has not run.
    pub tile: usize,
}

/// How far a run came.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Every step ran; outputs may be read.
    Done,
    /// Stopped at an edge; continue with the same arena and leaves from here.
    Stopped(Segment),
}

/// Asked between tiles whether to stop.
pub trait Stop: Sync {
    /// True when the run should end at the next edge.
    fn should_stop(&self) -> bool;
}

/// Never stops.
impl Stop for () {
    fn should_stop(&self) -> bool {
        false
    }
}

/// The memory a plan's values live in, on its device.
pub trait Arena: Any + Send {
    /// Capacity in bytes.
    fn bytes(&self) -> usize;
    /// The end of the highest byte range any run has written, in bytes.
    fn high_water(&self) -> usize;
    /// Fills the whole arena with NaN patterns, so that what is not written shows.
    fn poison(&mut self);
    /// Copies a byte range to host memory.
    ///
    /// # Errors
    /// `Fault` when the range is outside of the arena or of another length than `to`.
    fn read(&self, range: Range<usize>, to: &mut [u8]) -> Result<(), Fault>;
    /// For the owning device to recognize its own.
    fn as_any_mut(&mut self) -> &mut dyn Any;
}

/// Something that runs plans.
pub trait Device: Send + Sync {
    /// `cpu`, `reference`, ...
    fn name(&self) -> &'static str;

    /// The kernel family, e.g. `avx512-vnni`; bits may differ between families.
    fn family(&self) -> &'static str;

    /// How many threads share a run: each has scratch memory of its own.
    fn threads(&self) -> usize {
        1
    }

    /// The precision that gradients pass quantized weights in fastest: what is taken where nobody
    /// chooses.
    fn grad_precision(&self) -> GradPrecision {
        GradPrecision::F32
    }

    /// The one place that knows what the kernels take.
    ///
    /// # Errors
    /// [`Unsupported`] says which operand must be contiguous, or that there is no kernel.
    fn supports(&self, call: &Call<'_>) -> Result<Needs, Unsupported>;

    /// Packs a weight into the device's own memory.
    ///
    /// # Errors
    /// `Fault` when the bytes do not fit the shape, the dtype has no packing, or memory is out.
    fn load(&self, tensor: &HostTensor<'_>) -> Result<Arc<dyn Resident>, Fault>;

    /// Bytes that an arena can be given without taking them from somebody; `None` where nothing
    /// says.
    fn available(&self) -> Option<usize> {
        None
    }

    /// Takes and touches an arena of exactly this many bytes.
    ///
    /// # Errors
    /// `Fault` with [`Code::OutOfMemory`].
    fn arena(&self, bytes: usize) -> Result<Box<dyn Arena>, Fault>;

    /// Runs a plan from a segment until it is done or `stop` says so. `leaves` are bound in
    /// the order of [`Plan::leaves`]. A stopped run continues with the same leaves and arena.
    ///
    /// # Errors
    /// `Fault` naming the node.
    fn run(
        &self,
        plan: &Plan,
        leaves: &[Leaf<'_>],
        arena: &mut dyn Arena,
        from: Segment,
        stop: &dyn Stop,
    ) -> Result<Progress, Fault>;
}

impl Fault {
    /// A leaf that is bound to the wrong thing.
    pub fn binding(node: &str, message: impl Into<String>) -> Fault {
        Fault::new(Code::BadBinding, node, message)
    }
}
