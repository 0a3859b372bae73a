//! A loaded model file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use graph::{DType, Device};

use crate::{
    Architecture, EntryStates, Error, Geometry, Net, NetConfig, Projection, Result, TensorSource,
    Weights, arch,
};

/// A model: its architecture, its weights on a device, its tokenizer and chat template.
pub struct Model {
    path: PathBuf,
    arch_name: String,
    arch: Box<dyn Architecture>,
    weights: Weights,
    projections: BTreeMap<String, Projection>,
    metadata: gguf::Metadata,
    tokenizer: text::Tokenizer,
    /// The template, or why there is none.
    template: std::result::Result<text::ChatTemplate, String>,
    device: Arc<dyn Device>,
    fingerprint: u64,
}

/// Worker threads to use where nothing else is said: what the machine offers, at most 64.
pub fn thread_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(64)
}

impl Model {
    /// Loads a GGUF file: reads its hyper-parameters, packs its weights into the device's own
    /// memory, and drops the map.
    ///
    /// # Errors
    /// When the file is damaged, its architecture is not supported, a tensor is missing, of
    /// another shape, or not part of the architecture, or memory is out.
    pub fn load(path: &Path, device: Arc<dyn Device>) -> Result<Model> {
        Model::from_gguf(gguf::Gguf::open(path)?, device)
    }

    /// As [`Model::load`], from a file that is open already.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn from_gguf(file: gguf::Gguf, device: Arc<dyn Device>) -> Result<Model> {
        let path = file.path().to_path_buf();
        let (arch_name, arch) = arch::read(&file)?;
        let Tensors { names, plain, projections } = tensors(&file, arch.as_ref())?;
        let names: Vec<String> = names.into_iter().collect();
        let tokenizer = text::Tokenizer::from_metadata(file.metadata())?;
        let vocab = arch.geometry().vocab;
        if tokenizer.vocab_size() > vocab {
            return Err(Error::new(format!(
                "{}: the tokenizer has {} tokens, but `token_embd.weight` only {vocab} rows",
                path.display(),
                tokenizer.vocab_size()
            )));
        }
        let template = text::ChatTemplate::from_metadata(file.metadata(), &tokenizer)
            .map_err(|e| e.to_string());
        let weights = Weights::load(&file, &names, &plain, device.as_ref())?;
        let fingerprint = crate::fingerprint::of(&file, &weights);
        Ok(Model {
            path,
            arch_name,
            arch,
            weights,
            projections,
            metadata: file.into_metadata(),
            tokenizer,
            template,
            device,
            fingerprint,
        })
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a file written to `path` takes the place of one of the model's.
    pub fn is_at(&self, path: &Path) -> bool {
        gguf::overwrites(path, &self.path)
    }

    /// A number that files with other tensors do not have: of all names, types and shapes, and of
    /// all bytes of each.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// `general.architecture`.
    pub fn arch_name(&self) -> &str {
        &self.arch_name
    }

    /// The architecture with this file's hyper-parameters.
    pub fn arch(&self) -> &dyn Architecture {
        self.arch.as_ref()
    }

    /// Its shape.
    pub fn geometry(&self) -> &Geometry {
        self.arch.geometry()
    }

    /// Its tensors on the device.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The file's metadata.
    pub fn metadata(&self) -> &gguf::Metadata {
        &self.metadata
    }

    /// The tokenizer of the file's vocabulary.
    pub fn tokenizer(&self) -> &text::Tokenizer {
        &self.tokenizer
    }

    /// The file's chat template.
    ///
    /// # Errors
    /// When the file has none or it does not parse.
    pub fn template(&self) -> Result<&text::ChatTemplate> {
        self.template.as_ref().map_err(|why| Error::new(why.clone()))
    }

    /// The device its weights are on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The values of a float tensor, read from the file again, as f32.
    ///
    /// # Errors
    /// When there is no such tensor or it cannot be read.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let file = gguf::Gguf::open(&self.path)?;
        Ok(file.require(name)?.to_f32()?)
    }

    /// Tensors read from the file again and loaded by another device.
    ///
    /// # Errors
    /// When there is no such tensor, it cannot be read, or memory is out.
    pub fn load_on(&self, names: &[String], device: &dyn Device) -> Result<Weights> {
        if names.is_empty() {
            return Ok(Weights::default());
        }
        let is_plain = |name: &&String| self.weights.get(name).is_some_and(|w| !w.is_matrix());
        let plain: BTreeSet<String> = names.iter().filter(is_plain).cloned().collect();
        Weights::load(&gguf::Gguf::open(&self.path)?, names, &plain, device)
    }

    /// What an adapter must know of it.
    pub fn base(&self) -> crate::Base<'_> {
        crate::Base {
            arch: &self.arch_name,
            metadata: &self.metadata,
            geometry: self.arch.geometry(),
            projections: &self.projections,
            tensors: &self.weights,
        }
    }

    /// Every projection an adapter can sit on, by the name of its tensor.
    pub fn projections(&self) -> &BTreeMap<String, Projection> {
        &self.projections
    }
}

/// What an architecture does with the tensors of a model.
pub(crate) struct Tensors {
    /// All of them.
    pub(crate) names: BTreeSet<String>,
    /// Those that are plain values.
    pub(crate) plain: BTreeSet<String>,
    /// Those that rows are multiplied by.
    pub(crate) projections: BTreeMap<String, Projection>,
}

/// The tensors that an architecture asks for, found by building its graph.
pub(crate) fn needs(source: &dyn TensorSource, arch: &dyn Architecture) -> Result<Tensors> {
    let config = NetConfig {
        rows: 1,
        seqs: 1,
        logit_rows: 1,
        cache: DType::F32,
        prefix: None,
        states: EntryStates::Zero,
        adapters: Vec::new(),
        dropout: None,
        trainable: BTreeSet::new(),
    };
    let mut net = Net::new(source, &config);
    let hidden = arch.hidden(&mut net)?;
    net.logits(arch, hidden, 1, |_, _| Ok(()))?;
    let mut projections = net.projections().clone();
    if !net.has("output.weight") {
        // See `Base::projection`.
        projections.remove("token_embd.weight");
    }
    Ok(Tensors { names: net.used().clone(), plain: net.plain().clone(), projections })
}

/// As [`needs`] of a file; refuses one that has other tensors, since leaving a tensor out would
/// compute something else than the file's author meant.
pub(crate) fn tensors(file: &gguf::Gguf, arch: &dyn Architecture) -> Result<Tensors> {
    let name = file.path().display();
    let tensors = needs(file, arch).map_err(|e| match e {
        Error::Model(message) => Error::Model(format!("{name}: {message}")),
        other => other,
    })?;
    let geometry = arch.geometry();
    let drafts = |name: &str| {
        let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, _)| layer.parse::<usize>().ok());
        let draft = geometry.layers..geometry.layers + geometry.draft_layers;
        layer.is_some_and(|layer| draft.contains(&layer))
    };
    for tensor in file.tensors() {
        if !tensors.names.contains(&tensor.info.name) && !drafts(&tensor.info.name) {
            return Err(Error::new(format!(
                "{name}: tensor `{}` is not part of the architecture as Gradus knows it; running \
                 without it would give other results than the file's author meant",
                tensor.info.name
            )));
        }
    }
    Ok(tensors)
}
