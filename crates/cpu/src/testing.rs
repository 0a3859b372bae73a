//! Running graphs in tests.

use std::collections::HashMap;
use std::fs::File;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use graph::{
    Arena, Arg, DType, Device, Fault, Graph, HostTensor, Leaf, NodeId, Op, Plan, Progress,
    Resident, Segment, Shape, Stop, plan,
};
use memmap2::{MmapMut, MmapOptions};

use crate::job::{Input, Job};
use crate::simd::Isa;
use crate::{Cpu, Family};

pub(crate) fn shape(dims: &[usize]) -> Shape {
    Shape::new(dims).unwrap()
}

/// Families of this processor: all, or the one that `GRADUS_CPU` says.
pub(crate) fn families() -> impl Iterator<Item = Family> {
    let only = std::env::var("GRADUS_CPU").ok();
    let asked = move |f: &Family| only.as_ref().is_none_or(|only| f.key() == only);
    Family::ALL.into_iter().filter(|f| f.is_available()).filter(asked)
}

/// Devices of every family of this processor, with 1 and 2 threads.
pub(crate) fn devices() -> Vec<Cpu> {
    families().flat_map(|f| [1, 2].map(|threads| Cpu::new(threads, Some(f)).unwrap())).collect()
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Uniform in [-1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Zeroed memory whose last byte is the last of a page behind which there is nothing: touching
/// that ends the process. `None` of large sizes, and where the system has no such pages.
pub(crate) fn fenced(bytes: usize) -> Option<(MmapMut, usize)> {
    const FILE: usize = 1 << 30;
    /// A multiple of any system's pages.
    const PAGES: usize = 1 << 16;
    static ZEROS: OnceLock<Option<File>> = OnceLock::new();
    let zeros = ZEROS.get_or_init(|| {
        // Pages beyond the end of a file can be mapped and not be touched.
        let path = std::env::temp_dir().join(format!("gradus-fence-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).ok()?;
        std::fs::remove_file(path).ok()?;
        file.set_len(FILE as u64).ok()?;
        cfg!(unix).then_some(file)
    });
    let (pages, file) = (bytes.next_multiple_of(PAGES), zeros.as_ref()?);
    let start = (FILE as u64).checked_sub(pages as u64)?;
    // SAFETY: the file has no name: nobody else writes to it. The map is a copy.
    let map = unsafe { MmapOptions::new().offset(start).len(pages + PAGES).map_copy(file) };
    Some((map.ok()?, pages - bytes))
}

/// A leaf's bytes, aligned as their elements are, and fenced.
pub(crate) struct Bytes(MmapMut, std::ops::Range<usize>);

impl Bytes {
    pub(crate) fn new(bytes: &[u8]) -> Bytes {
        let fenced = fenced(bytes.len());
        let (mut map, start) =
            fenced.unwrap_or_else(|| (MmapMut::map_anon(bytes.len().max(1)).unwrap(), 0));
        let range = start..start + bytes.len();
        map[range.clone()].copy_from_slice(bytes);
        Bytes(map, range)
    }

    pub(crate) fn get(&self) -> &[u8] {
        &self.0[self.1.clone()]
    }
}

/// A graph with values for its leaves.
#[derive(Default)]
pub(crate) struct Case {
    pub(crate) graph: Graph,
    values: HashMap<NodeId, (DType, Shape, Bytes)>,
}

impl Case {
    pub(crate) fn new() -> Case {
        Case::default()
    }

    pub(crate) fn bytes(&mut self, name: &str, dtype: DType, dims: &[usize], v: &[u8]) -> NodeId {
        let id = self.graph.leaf(name, shape(dims), dtype).unwrap();
        self.values.insert(id, (dtype, shape(dims), Bytes::new(v)));
        id
    }

    /// A leaf that is loaded and packed before it runs.
    pub(crate) fn weight(&mut self, name: &str, dtype: DType, dims: &[usize], v: &[u8]) -> NodeId {
        let id = self.graph.weight(name, shape(dims), dtype).unwrap();
        self.values.insert(id, (dtype, shape(dims), Bytes::new(v)));
        id
    }

    /// Gives a leaf of the graph its value.
    pub(crate) fn bind(&mut self, id: NodeId, bytes: &[u8]) {
        let node = self.graph.node(id);
        self.values.insert(id, (node.dtype, node.shape, Bytes::new(bytes)));
    }

    pub(crate) fn floats(&mut self, name: &str, dims: &[usize], v: &[f32]) -> NodeId {
        let bytes: Vec<u8> = v.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.bytes(name, DType::F32, dims, &bytes)
    }

    pub(crate) fn ints(&mut self, name: &str, dims: &[usize], v: &[i32]) -> NodeId {
        let bytes: Vec<u8> = v.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.bytes(name, DType::I32, dims, &bytes)
    }

    pub(crate) fn random(&mut self, name: &str, dims: &[usize], random: &mut Random) -> NodeId {
        let v = random.floats(dims.iter().product());
        self.floats(name, dims, &v)
    }

    /// Plans and runs for some outputs; their bytes.
    pub(crate) fn run(&self, cpu: &Cpu, outputs: &[NodeId]) -> Result<Vec<Vec<u8>>, Fault> {
        self.run_in_pieces(cpu, outputs, &())
    }

    /// The gradients of `y` for `wrt`, under a cotangent.
    pub(crate) fn gradients(
        &self,
        cpu: &Cpu,
        y: NodeId,
        dy: NodeId,
        wrt: &[NodeId],
    ) -> Vec<Vec<f32>> {
        let back = graph::vjp(&self.graph, &[(y, dy)], wrt).unwrap();
        let bytes = self.run_graph(&back.graph, cpu, &back.grads, &()).unwrap();
        bytes.iter().map(|bytes| to_floats(bytes)).collect()
    }

    /// As [`Case::run`], resumed until done whenever `stop` ends a run.
    pub(crate) fn run_in_pieces(
        &self,
        cpu: &Cpu,
        outputs: &[NodeId],
        stop: &dyn Stop,
    ) -> Result<Vec<Vec<u8>>, Fault> {
        self.run_graph(&self.graph, cpu, outputs, stop)
    }

    /// Runs a graph that begins with this one's nodes.
    fn run_graph(
        &self,
        graph: &Graph,
        cpu: &Cpu,
        outputs: &[NodeId],
        stop: &dyn Stop,
    ) -> Result<Vec<Vec<u8>>, Fault> {
        let plan = plan(graph, outputs, cpu).unwrap();
        let loaded: Vec<_> = plan.leaves.iter().map(|slot| self.load(cpu, slot.node)).collect();
        let leaves = plan.leaves.iter().zip(&loaded).map(|(slot, loaded)| match loaded {
            Some(weight) => Leaf::Resident(&**weight),
            None => Leaf::Host(self.values[&slot.node].2.get()),
        });
        let leaves: Vec<_> = leaves.collect();
        let mut arena = cpu.arena(plan.arena_bytes)?;
        arena.poison();
        let mut from = Segment::default();
        while let Progress::Stopped(at) = cpu.run(&plan, &leaves, &mut *arena, from, stop)? {
            assert!(at > from, "no progress from {from:?}");
            from = at;
        }
        assert_eq!(arena.high_water(), plan.arena_bytes);
        read(&plan, &*arena)
    }

    fn load(&self, cpu: &Cpu, id: NodeId) -> Option<std::sync::Arc<dyn Resident>> {
        let (dtype, shape, bytes) = &self.values[&id];
        let tensor = HostTensor { dtype: *dtype, shape: *shape, bytes: bytes.get() };
        self.graph.node(id).resident.then(|| cpu.load(&tensor).unwrap())
    }
}

/// How many tiles an op has on dense operands: integers as named, the others f32. Nothing runs, so
/// shapes may be those of real models.
pub(crate) fn tiles(op: &Op, operands: &[&[usize]], ints: &[usize]) -> usize {
    let mut graph = Graph::new();
    let leaf = |(i, dims): (usize, &&[usize])| {
        let dtype = if ints.contains(&i) { DType::I32 } else { DType::F32 };
        graph.leaf(&format!("x{i}"), shape(dims), dtype).unwrap()
    };
    let args: Vec<NodeId> = operands.iter().enumerate().map(leaf).collect();
    let y = graph.push(op.clone(), &args, "y").unwrap();
    let of = |id: NodeId| Arg::dense(graph.node(id).dtype, graph.node(id).shape);
    // SAFETY: neither operands nor result are touched: how many tiles there are follows from
    // shapes.
    let inputs: Vec<Input<'_>> =
        args.iter().map(|&id| unsafe { Input::memory(of(id), std::ptr::null()) }).collect();
    let (to, isa) = (std::ptr::null_mut(), Isa::of(Family::Portable).unwrap());
    // SAFETY: as above.
    crate::kernels::tiles(&unsafe { Job::new(op, &inputs, of(y), to, to, isa) })
}

fn read(plan: &Plan, arena: &dyn Arena) -> Result<Vec<Vec<u8>>, Fault> {
    let outputs = plan.outputs.iter().map(|slot| {
        let mut bytes = vec![0; slot.range.len()];
        arena.read(slot.range.clone(), &mut bytes)?;
        Ok(bytes)
    });
    outputs.collect()
}

pub(crate) fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

/// Says stop at every `n`th question.
pub(crate) struct Every(pub(crate) AtomicUsize, pub(crate) usize);

impl Every {
    pub(crate) fn new(n: usize) -> Every {
        Every(AtomicUsize::new(0), n)
    }
}

impl Stop for Every {
    fn should_stop(&self) -> bool {
        (self.0.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(self.1)
    }
}

/// Asserts that two tensors agree to `bound` relative to the larger's root mean square.
pub(crate) fn assert_close(got: &[f32], expected: &[f64], bound: f64, what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let rms = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len().max(1) as f64).sqrt();
    for (i, (&a, &b)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(a) - b).abs();
        assert!(error <= bound * (rms + b.abs()), "{what}: element {i} is {a}, expected {b}");
    }
}
