//! LoRA adapters: low-rank updates `W + scale * B A` of projections, in the GGUF layout that
//! llama.cpp's `convert_lora_to_gguf.py` writes and its loader reads.
//!
//! Keys: `general.type = adapter`, `general.architecture`, `adapter.type = lora`,
//! `adapter.lora.alpha`. Tensors: `TARGET.lora_a` `[r, in]` and `TARGET.lora_b` `[out, r]`,
//! of a stack of experts `[E, r, in]` and `[E, out, r]`, f32 (f16 and bf16 are read too), where
//! `TARGET` keeps its `.weight`. The effective scale of a tensor is `alpha / r`, and 1 where alpha
//! is 0.

use std::collections::BTreeMap;
use std::path::Path;

use gguf::TensorType;

use crate::{Error, LoraShape, Model, Projection, Result};

/// The pair of matrices on one projection, or a pair for each expert of a stack.
#[derive(Clone, PartialEq, Debug)]
pub struct LoraTensor {
    /// Rank.
    pub rank: usize,
    /// `[rank, in]` or `[experts, rank, in]`, row-major.
    pub a: Vec<f32>,
    /// `[out, rank]` or `[experts, out, rank]`, row-major.
    pub b: Vec<f32>,
    /// `alpha / rank`, or 1 where alpha is 0: what `B A x` is multiplied by.
    pub scale: f32,
}

/// An adapter as an engine knows it: a number that is never given to another one.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct AdapterId(pub(crate) u64);

/// A LoRA adapter, checked against a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Adapter {
    /// `alpha` of the file.
    pub alpha: f32,
    /// By base tensor name, e.g. `blk.0.attn_q.weight`.
    pub tensors: BTreeMap<String, LoraTensor>,
}

fn scale(alpha: f32, rank: usize) -> f32 {
    if alpha == 0.0 { 1.0 } else { alpha / rank as f32 }
}

impl Adapter {
    /// A fresh adapter: A uniform in `±1/sqrt(in)` from a seed, B zero, so that attaching it
    /// changes nothing. Tensors are drawn in the order of `targets`, each with its rank.
    ///
    /// # Errors
    /// When a target is not a projection of the model, or a rank is 0 or above 4096.
    pub fn fresh<'t>(
        model: &Model,
        targets: impl IntoIterator<Item = (&'t str, usize)>,
        alpha: f32,
        seed: u64,
    ) -> Result<Adapter> {
        if !alpha.is_finite() || alpha <= 0.0 {
            return Err(Error::new(format!("alpha is {alpha}, expected a positive number")));
        }
        let mut random = text::sampler::Rng::new(seed);
        let mut tensors = BTreeMap::new();
        for (target, rank) in targets {
            if rank == 0 || rank > 4096 {
                return Err(Error::new(format!(
                    "the rank of `{target}` is {rank}, expected 1 to 4096"
                )));
            }
            let of = projection(model, target)?;
            let bound = 1.0 / (of.width as f32).sqrt();
            let mut a = zeros(target, &of.shape(rank, of.width))?;
            a.iter_mut().for_each(|a| *a = ((random.next_f64() * 2.0 - 1.0) as f32) * bound);
            let b = zeros(target, &of.shape(of.out, rank))?;
            let pair = LoraTensor { rank, a, b, scale: scale(alpha, rank) };
            tensors.insert(target.to_string(), pair);
        }
        Ok(Adapter { alpha, tensors })
    }

    /// Reads an adapter and checks it against the model it is for.
    ///
    /// # Errors
    /// When the file is no LoRA adapter, is for another architecture, has a tensor that is no
    /// pair on a projection of the model, of another shape, or not finite.
    pub fn read(path: &Path, model: &Model) -> Result<Adapter> {
        Adapter::from_gguf(&gguf::Gguf::open(path)?, model)
    }

    /// As [`Adapter::read`], from an open file.
    ///
    /// # Errors
    /// As [`Adapter::read`].
    pub fn from_gguf(file: &gguf::Gguf, model: &Model) -> Result<Adapter> {
        let name = file.path().display().to_string();
        let metadata = file.metadata();
        for (key, wanted) in [
            ("general.type", "adapter"),
            ("adapter.type", "lora"),
            ("general.architecture", model.arch_name()),
        ] {
            let found = metadata.str(key)?;
            if found != wanted {
                return Err(Error::new(format!(
                    "{name}: key `{key}` is `{found}`, expected `{wanted}`"
                )));
            }
        }
        let alpha = metadata.f32("adapter.lora.alpha")?;
        if !alpha.is_finite() {
            return Err(Error::new(format!("{name}: key `adapter.lora.alpha` is {alpha}")));
        }
        let mut tensors = BTreeMap::new();
        for tensor in file.tensors() {
            let full = &tensor.info.name;
            let Some((target, part)) = full.rsplit_once('.') else {
                return Err(stray(&name, full));
            };
            match part {
                "lora_a" => {}
                "lora_b" if file.tensor(&format!("{target}.lora_a")).is_some() => continue,
                _ => return Err(stray(&name, full)),
            }
            let of = projection(model, target)
                .map_err(|e| Error::new(format!("{name}: tensor `{full}`: {e}")))?;
            let rank = tensor.info.shape.iter().rev().nth(1).copied().unwrap_or(0);
            let b = file.require(&format!("{target}.lora_b"))?;
            let shapes = [of.shape(rank, of.width), of.shape(of.out, rank)];
            for (info, wanted) in [tensor.info, b.info].into_iter().zip(shapes) {
                if info.shape != wanted {
                    return Err(Error::new(format!(
                        "{name}: tensor `{}` has shape {:?}, expected {wanted:?} for `{target}`",
                        info.name, info.shape
                    )));
                }
                if !matches!(info.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
                    return Err(Error::new(format!(
                        "{name}: tensor `{}` is {}, expected F32, F16 or BF16",
                        info.name,
                        info.ty.name()
                    )));
                }
            }
            let pair = LoraTensor {
                rank,
                a: finite(&name, &tensor)?,
                b: finite(&name, &b)?,
                scale: scale(alpha, rank),
            };
            tensors.insert(target.to_string(), pair);
        }
        if tensors.is_empty() {
            return Err(Error::new(format!("{name}: the adapter has no tensors")));
        }
        Ok(Adapter { alpha, tensors })
    }

    /// Writes the adapter, atomically, as llama.cpp reads it.
    ///
    /// # Errors
    /// When a tensor is no projection of the model, or the file cannot be written.
    pub fn write(&self, path: &Path, model: &Model) -> Result<()> {
        let mut metadata = gguf::Metadata::new();
        metadata.insert("general.architecture", model.arch_name());
        metadata.insert("general.type", "adapter");
        metadata.insert("adapter.type", "lora");
        metadata.insert("adapter.lora.alpha", self.alpha);
        let mut parts: Vec<(String, Vec<usize>, &[f32])> = Vec::new();
        for (target, t) in &self.tensors {
            let of = projection(model, target)?;
            parts.push((format!("{target}.lora_a"), of.shape(t.rank, of.width), &t.a));
            parts.push((format!("{target}.lora_b"), of.shape(of.out, t.rank), &t.b));
        }
        let tensors = parts
            .iter()
            .map(|(name, shape, values)| {
                let info = gguf::TensorInfo::new(name, TensorType::F32, shape)?;
                Ok((info, bytemuck::cast_slice(values).into()))
            })
            .collect::<std::result::Result<Vec<_>, gguf::Error>>()?;
        Ok(gguf::write(path, &metadata, tensors)?)
    }

    /// What a graph must know of it.
    pub fn shapes(&self) -> Vec<LoraShape> {
        let shape = |(target, t): (&String, &LoraTensor)| LoraShape {
            target: target.clone(),
            rank: t.rank,
        };
        self.tensors.iter().map(shape).collect()
    }

    /// How many numbers it holds.
    pub fn parameters(&self) -> usize {
        self.tensors.values().map(|t| t.a.len() + t.b.len()).sum()
    }
}

fn stray(file: &str, tensor: &str) -> Error {
    Error::new(format!(
        "{file}: tensor `{tensor}` is no LoRA pair; expected names that end in .lora_a and .lora_b"
    ))
}

fn projection(model: &Model, target: &str) -> Result<Projection> {
    if let Some(&projection) = model.projections().get(target) {
        return Ok(projection);
    }
    match model.weights().get(target) {
        Some(_) if target == "token_embd.weight" => {
            Err(Error::new("adapters on the embedding table are not supported"))
        }
        Some(_) => {
            Err(Error::new(format!("`{target}` is no projection, so no adapter applies to it")))
        }
        None => Err(Error::new(format!("the model has no tensor `{target}`"))),
    }
}

/// Zeros of a shape; stacks of many experts may be more than there is memory.
fn zeros(target: &str, dims: &[usize]) -> Result<Vec<f32>> {
    let n = graph::Shape::new(dims)?.elements();
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(n).map_err(|_| {
        Error::new(format!("no memory for the {n} numbers of an adapter on `{target}`"))
    })?;
    zeros.resize(n, 0.0);
    Ok(zeros)
}

fn finite(file: &str, tensor: &gguf::Tensor<'_>) -> Result<Vec<f32>> {
    let values = tensor.to_f32()?;
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(i) => Err(Error::new(format!(
            "{file}: tensor `{}` has a value that is not finite at index {i}",
            tensor.info.name
        ))),
    }
}
