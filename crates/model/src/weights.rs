//! The weights of a model as a device holds them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use graph::{DType, Device, HostTensor, Leaf, Resident, Shape};

use crate::{Error, Result};

/// One tensor of a model, loaded.
pub struct Weight {
    /// Shape, outermost first.
    pub shape: Shape,
    /// Element type in the graph.
    pub dtype: DType,
    storage: Storage,
    /// CRC-32C of the bytes in the file.
    checksum: u32,
}

enum Storage {
    /// Vectors and taps: norms, biases, frequency factors, short convolutions.
    Host(Vec<f32>),
    /// Matrices, packed by the device.
    Resident(Arc<dyn Resident>),
}

impl Weight {
    /// CRC-32C of its bytes in the file that it was loaded from.
    pub(crate) fn checksum(&self) -> u32 {
        self.checksum
    }

    /// What the tensor's leaf is bound to.
    pub fn leaf(&self) -> Leaf<'_> {
        match &self.storage {
            Storage::Host(values) => Leaf::Host(bytemuck::cast_slice(values)),
            Storage::Resident(weight) => Leaf::Resident(weight.as_ref()),
        }
    }

    /// True for a matrix that rows are multiplied by; others are plain f32 values.
    pub fn is_matrix(&self) -> bool {
        matches!(self.storage, Storage::Resident(_))
    }

    /// Bytes of memory it takes.
    pub fn bytes(&self) -> usize {
        match &self.storage {
            Storage::Host(values) => values.len() * 4,
            Storage::Resident(weight) => weight.bytes(),
        }
    }
}

/// What a graph may ask for: the names, shapes and dtypes of a model's tensors.
pub trait TensorSource {
    /// Shape and graph dtype of a tensor, if there is one of that name.
    fn tensor(&self, name: &str) -> Option<(Shape, DType)>;

    /// As [`TensorSource::tensor`], for a graph that needs the tensor and needs it of this shape.
    fn needed(&self, name: &str, dims: &[usize]) -> Option<(Shape, DType)> {
        let _ = dims;
        self.tensor(name)
    }
}

/// All tensors of a model, by name.
#[derive(Default)]
pub struct Weights {
    tensors: BTreeMap<String, Weight>,
}

impl TensorSource for Weights {
    fn tensor(&self, name: &str) -> Option<(Shape, DType)> {
        self.tensors.get(name).map(|w| (w.shape, w.dtype))
    }
}

/// The tensors of a file that is not loaded yet.
impl TensorSource for gguf::Gguf {
    fn tensor(&self, name: &str) -> Option<(Shape, DType)> {
        let info = gguf::Gguf::tensor(self, name)?.info;
        let shape = Shape::new(&info.shape).ok()?;
        Some((shape, if shape.rank() == 1 { DType::F32 } else { info.ty.into() }))
    }
}

impl Weights {
    /// Loads the named tensors: those of `plain` as f32 in host memory, the others, matrices,
    /// packed by the device, several at a time.
    ///
    /// # Errors
    /// When a tensor is missing, cannot be read, or does not fit in memory.
    pub fn load(
        file: &gguf::Gguf,
        names: &[String],
        plain: &BTreeSet<String>,
        device: &dyn Device,
    ) -> Result<Weights> {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let workers = crate::thread_count().min(names.len()).max(1);
        let work = || -> Result<Vec<(String, Weight)>> {
            let mut out = Vec::new();
            loop {
                let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let Some(name) = names.get(i) else { return Ok(out) };
                out.push((name.clone(), load_one(file, name, plain.contains(name), device)?));
            }
        };
        let mut tensors = BTreeMap::new();
        std::thread::scope(|scope| -> Result<()> {
            let handles: Vec<_> = (1..workers).map(|_| scope.spawn(work)).collect();
            tensors.extend(work()?);
            for handle in handles {
                let part = handle.join().map_err(|_| Error::new("a loading thread stopped"))?;
                tensors.extend(part?);
            }
            Ok(())
        })?;
        Ok(Weights { tensors })
    }

    /// Adds tensors, replacing those of the same name.
    pub fn extend(&mut self, other: Weights) {
        self.tensors.extend(other.tensors);
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Weight> {
        self.tensors.get(name)
    }

    /// Names and tensors, in order of name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Weight)> {
        self.tensors.iter().map(|(n, w)| (n.as_str(), w))
    }

    /// Bytes of memory all of them take.
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(Weight::bytes).sum()
    }
}

fn load_one(file: &gguf::Gguf, name: &str, plain: bool, device: &dyn Device) -> Result<Weight> {
    let tensor = file.require(name)?;
    let shape = Shape::new(&tensor.info.shape)?;
    // Here, where its bytes are about to be read anyway, by several threads.
    let checksum = crc32c::crc32c(tensor.bytes);
    if plain {
        let storage = Storage::Host(tensor.to_f32()?);
        return Ok(Weight { shape, dtype: DType::F32, storage, checksum });
    }
    let dtype = DType::from(tensor.info.ty);
    let host = HostTensor { dtype, shape, bytes: tensor.bytes };
    let storage = Storage::Resident(device.load(&host)?);
    // Or the peak would hold the file beside the packed weights.
    file.release(name);
    Ok(Weight { shape, dtype, storage, checksum })
}
