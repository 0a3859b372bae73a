//! A model file without its weights in memory: what reading and converting adapters, and merging
//! them, takes.

use std::collections::BTreeMap;
use std::path::Path;

use crate::{Architecture, Base, Projection, Result, arch, model};

/// An open model file whose architecture is known and whose tensors are where they are.
pub struct Skeleton {
    file: gguf::Gguf,
    arch_name: String,
    arch: Box<dyn Architecture>,
    projections: BTreeMap<String, Projection>,
}

impl Skeleton {
    /// Opens a file.
    ///
    /// # Errors
    /// When it is damaged, its architecture is not supported, or a tensor is missing, of another
    /// shape, or not part of the architecture.
    pub fn open(path: &Path) -> Result<Skeleton> {
        Skeleton::from_gguf(gguf::Gguf::open(path)?)
    }

    /// As [`Skeleton::open`], of a file that is open already.
    ///
    /// # Errors
    /// As [`Skeleton::open`].
    pub fn from_gguf(file: gguf::Gguf) -> Result<Skeleton> {
        let (arch_name, arch) = arch::read(&file)?;
        let projections = model::tensors(&file, arch.as_ref())?.projections;
        Ok(Skeleton { file, arch_name, arch, projections })
    }

    /// The file.
    pub fn file(&self) -> &gguf::Gguf {
        &self.file
    }

    /// What an adapter must know of it.
    pub fn base(&self) -> Base<'_> {
        Base {
            arch: &self.arch_name,
            metadata: self.file.metadata(),
            geometry: self.arch.geometry(),
            projections: &self.projections,
            tensors: &self.file,
        }
    }
}
