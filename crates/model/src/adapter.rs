//! LoRA adapters: low-rank updates `W + scale * B A` of projections, in the GGUF layout that
//! llama.cpp's `convert_lora_to_gguf.py` writes and its loader reads.
//!
//! Keys: `general.type = adapter`, `general.architecture`, `adapter.type = lora`,
//! `adapter.lora.alpha`. Tensors: `TARGET.lora_a` `[r, in]` and `TARGET.lora_b` `[out, r]`,
//! of a stack of experts `[E, r, in]` and `[E, out, r]`, f32 (f16 and bf16 are read too), where
//! `TARGET` keeps its `.weight`; on the embedding, `token_embd.weight`, A is `[vocab, r]`, a row for
//! each token. The effective scale of a tensor is `alpha / r`, and 1 where alpha is 0. A file has one
//! alpha for all its tensors; what scales it cannot say goes into B (see [`Adapter::write`]). It may
//! say with which dropout it was trained, under a key that llama.cpp passes over,
//! `adapter.lora.dropout`. PEFT's folders are read and written too: [`Adapter::write_peft`].

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use gguf::TensorType;
use graph::Code;

use crate::{Error, Geometry, LoraShape, Model, Projection, Result, TensorSource, peft};

/// The key of [`Adapter::dropout`] in a file.
const DROPOUT: &str = "adapter.lora.dropout";

/// The greatest rank that is made, believed, and read.
pub(crate) const MOST_RANK: usize = 4096;

/// What files may say of an adapter as a whole. llama.cpp hands the task and the prefix to whoever
/// asks and does nothing with them.
const KEYS: [&str; 5] = [
    "adapter.type",
    "adapter.lora.alpha",
    DROPOUT,
    "adapter.lora.task_name",
    "adapter.lora.prompt_prefix",
];

/// An activated LoRA (aLoRA), which is applied only from where these tokens are on.
const INVOCATION: &str = "adapter.alora.invocation_tokens";

/// The pair of matrices on one projection, or a pair for each expert of a stack.
#[derive(Clone, PartialEq, Debug)]
pub struct LoraTensor {
    /// Rank.
    pub rank: usize,
    /// `[rank, in]` or `[experts, rank, in]`, of an embedding `[vocab, rank]`, row-major.
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
    /// The share of its input that was dropped in training: a note, which changes nothing that the
    /// adapter does.
    pub dropout: f32,
    /// By base tensor name, e.g. `blk.0.attn_q.weight`.
    pub tensors: BTreeMap<String, LoraTensor>,
}

/// What an adapter must know of the model it is for: no weights.
#[derive(Copy, Clone)]
pub struct Base<'a> {
    /// `general.architecture`.
    pub arch: &'a str,
    /// The file's metadata.
    pub metadata: &'a gguf::Metadata,
    /// Its shape.
    pub geometry: &'a Geometry,
    /// Every projection an adapter can sit on, by the name of its tensor.
    pub projections: &'a BTreeMap<String, Projection>,
    /// All its tensors.
    pub tensors: &'a dyn TensorSource,
}

impl Base<'_> {
    /// Whether PEFT knows a tensor by the name of a module such as `q_proj`.
    pub fn is_called(&self, target: &str, module: &str) -> bool {
        peft::is_called(self.arch, target, module)
    }

    /// The projection of a name.
    ///
    /// # Errors
    /// When there is none that an adapter can be on.
    pub fn projection(&self, target: &str) -> Result<Projection> {
        if let Some(&projection) = self.projections.get(target) {
            return Ok(projection);
        }
        let tied = self.tensors.tensor("output.weight").is_none();
        match self.tensors.tensor(target) {
            // llama.cpp looks for adapters by the name of the tensor that rows are multiplied by.
            // Where the head is the embedding's own tensor it finds the embedding's pair there, whose
            // A `[vocab, r]` it multiplies the hidden rows by: that fits none and ends the process.
            Some(_) if target == "token_embd.weight" && tied => Err(Error::new(
                "`token_embd.weight` is the model's head as well, and llama.cpp, which would take \
                 an adapter on it for one of the head, ends when it loads one; adapt the layers, or \
                 a model whose head is a tensor of its own",
            )),
            Some(_) => {
                Err(Error::new(format!("`{target}` is no projection, so no adapter applies to it")))
            }
            None if target == "output.weight" => Err(Error::new(
                "the model has no tensor `output.weight`: its head is the embedding table, and \
                 llama.cpp knows no adapter of that as a head; adapt the layers, or a model whose \
                 head is a tensor of its own",
            )),
            None => Err(Error::new(format!("the model has no tensor `{target}`"))),
        }
    }
}

/// The scale of a pair: `alpha / rank`, or 1 where alpha is 0.
pub(crate) fn scale(alpha: f32, rank: usize) -> f32 {
    if alpha == 0.0 { 1.0 } else { alpha / rank as f32 }
}

/// The alpha that gives a scale at a rank. Where several do, the roundest.
pub(crate) fn effective_alpha(wanted: f32, rank: usize) -> f32 {
    let product = wanted * rank as f32;
    let near = [product.round(), product, product.next_up(), product.next_down()];
    let fits = |&alpha: &f32| alpha != 0.0 && scale(alpha, rank) == wanted;
    near.into_iter().find(fits).unwrap_or(product)
}

impl Adapter {
    /// A fresh adapter: A uniform in `±1/sqrt(in)`, of an embedding in ±1, from a seed, B zero, so
    /// that attaching it changes nothing. Tensors are drawn in the order of `targets`, each with its rank.
    ///
    /// # Errors
    /// When a target is not a projection of the model, or a rank is 0 or above 4096.
    pub fn fresh<'t>(
        model: &Model,
        targets: impl IntoIterator<Item = (&'t str, usize)>,
        alpha: f32,
        seed: u64,
    ) -> Result<Adapter> {
        let targets: Vec<(&str, usize)> = targets.into_iter().collect();
        let mut adapter = Adapter::outline(model, targets.iter().copied(), alpha)?;
        let mut random = text::sampler::Rng::new(seed);
        for (target, rank) in targets {
            let of = model.base().projection(target)?;
            // An id is one input; there are as many others as a matrix has columns.
            let inputs = if of.is_table { 1 } else { of.width };
            let bound = 1.0 / (inputs as f32).sqrt();
            let mut a = zeros(target, &of.a_shape(rank))?;
            a.iter_mut().for_each(|a| *a = ((random.next_f64() * 2.0 - 1.0) as f32) * bound);
            let b = zeros(target, &of.b_shape(rank))?;
            let pair = LoraTensor { rank, a, b, scale: scale(alpha, rank) };
            adapter.tensors.insert(target.to_string(), pair);
        }
        Ok(adapter)
    }

    /// What [`Adapter::fresh`] gives, but for its numbers: all matrices are empty. It is all that a
    /// graph must know, so that a plan takes no memory for what may be refused.
    ///
    /// # Errors
    /// As [`Adapter::fresh`].
    pub fn outline<'t>(
        model: &Model,
        targets: impl IntoIterator<Item = (&'t str, usize)>,
        alpha: f32,
    ) -> Result<Adapter> {
        if !alpha.is_finite() || alpha <= 0.0 {
            return Err(Error::new(format!("alpha is {alpha}, expected a positive number")));
        }
        let mut tensors = BTreeMap::new();
        for (target, rank) in targets {
            check_rank(target, rank)?;
            model.base().projection(target)?;
            let (a, b) = (Vec::new(), Vec::new());
            let pair = LoraTensor { rank, a, b, scale: scale(alpha, rank) };
            tensors.insert(target.to_string(), pair);
        }
        Ok(Adapter { alpha, dropout: 0.0, tensors })
    }

    /// From its pairs; its alpha is the one that most of them have.
    pub(crate) fn of(tensors: BTreeMap<String, LoraTensor>) -> Adapter {
        let mut counts: Vec<(f32, usize)> = Vec::new();
        for t in tensors.values() {
            let alpha = effective_alpha(t.scale, t.rank);
            match counts.iter_mut().find(|(known, _)| *known == alpha) {
                Some((_, n)) => *n += 1,
                None => counts.push((alpha, 1)),
            }
        }
        // The first of the most frequent.
        let alpha = counts.iter().rev().max_by_key(|(_, n)| *n).map_or(1.0, |&(alpha, _)| alpha);
        Adapter { alpha, dropout: 0.0, tensors }
    }

    /// Reads an adapter, a GGUF file or a folder of PEFT, and checks it against the model it is
    /// for.
    ///
    /// # Errors
    /// When it is no LoRA adapter, is for another architecture, has a tensor that is no pair on a
    /// projection of the model, of another shape, or not finite.
    pub fn read(path: &Path, model: &Model) -> Result<Adapter> {
        Adapter::read_for(path, &model.base())
    }

    /// As [`Adapter::read`], for a model that need not be loaded.
    ///
    /// # Errors
    /// As [`Adapter::read`].
    pub fn read_for(path: &Path, base: &Base<'_>) -> Result<Adapter> {
        if path.is_dir() {
            return peft::read(path, base);
        }
        refuse_other_files(path)?;
        Adapter::from_file(&gguf::Gguf::open(path)?, base)
    }

    /// As [`Adapter::read`], from an open file.
    ///
    /// # Errors
    /// As [`Adapter::read`].
    pub fn from_gguf(file: &gguf::Gguf, model: &Model) -> Result<Adapter> {
        Adapter::from_file(file, &model.base())
    }

    fn from_file(file: &gguf::Gguf, base: &Base<'_>) -> Result<Adapter> {
        let name = file.path().display().to_string();
        let metadata = file.metadata();
        for (key, wanted) in [
            ("general.type", "adapter"),
            ("adapter.type", "lora"),
            ("general.architecture", base.arch),
        ] {
            let found = metadata.str(key)?;
            if found != wanted {
                let found = gguf::shown(found);
                let message = format!("{name}: key `{key}` is `{found}`, expected `{wanted}`");
                return Err(match key {
                    "general.architecture" => Error::adapter(Code::AdapterArchitecture, message),
                    _ => Error::new(message),
                });
            }
        }
        let alpha = alpha(metadata)?;
        let dropout = match metadata.get(DROPOUT) {
            None => 0.0,
            Some(_) => metadata.f32(DROPOUT)?,
        };
        if !(0.0..=1.0).contains(&dropout) {
            let message = format!("{name}: key `{DROPOUT}` is {dropout}, expected 0 to 1");
            return Err(Error::new(message));
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
            let of = base
                .projection(target)
                .map_err(|e| Error::new(format!("{name}: tensor `{full}`: {e}")))?;
            let rank = of.rank_of(&tensor.info.shape);
            let b = file.require(&format!("{target}.lora_b"))?;
            let shapes = [of.a_shape(rank), of.b_shape(rank)];
            for (info, wanted) in [tensor.info, b.info].into_iter().zip(shapes) {
                if info.shape != wanted {
                    return Err(Error::adapter(
                        Code::AdapterShape,
                        format!(
                            "{name}: tensor `{}` has shape {:?}, expected {wanted:?} for `{target}`",
                            info.name, info.shape
                        ),
                    ));
                }
                if !matches!(info.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
                    return Err(Error::new(format!(
                        "{name}: tensor `{}` is {}, expected F32, F16 or BF16",
                        info.name,
                        info.ty.name()
                    )));
                }
            }
            check_rank(target, rank).map_err(|e| Error::new(format!("{name}: {e}")))?;
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
        Ok(Adapter { alpha, dropout, tensors })
    }

    /// Whether an adapter may be written to a file: what is there is an adapter itself, an empty
    /// file, or nothing.
    ///
    /// # Errors
    /// When there is something of another kind, such as a model, data or a device.
    pub fn check_out(path: &Path) -> Result<()> {
        let is_gguf = match gguf::check_out(path) {
            Err(e) if matches!(e.kind(), gguf::ErrorKind::Occupied) => false,
            looked => looked.map(|()| true)?,
        };
        let is_adapter =
            |file: gguf::Gguf| file.metadata().str("general.type").is_ok_and(|ty| ty == "adapter");
        let is_free = || std::fs::metadata(path).map_or(true, |found| found.len() == 0);
        match is_gguf && (is_free() || gguf::Gguf::open(path).is_ok_and(is_adapter)) {
            true => Ok(()),
            false => Err(Error::new(format!(
                "{}: is there already and no adapter; choose another file, or remove it first",
                path.display()
            ))),
        }
    }

    /// Writes the adapter, atomically, as llama.cpp reads it.
    ///
    /// The file has one alpha, that of most tensors. Of a tensor whose scale is another, B is
    /// stored times what it is more than `alpha / rank`: exactly where that is a power of two,
    /// else rounded (see [`Adapter::rounded`]).
    ///
    /// # Errors
    /// As [`Adapter::check_out`]; when a tensor is no projection of the model, or the file cannot
    /// be written.
    pub fn write(&self, path: &Path, model: &Model) -> Result<()> {
        self.write_for(path, &model.base())
    }

    /// As [`Adapter::write`], for a model that need not be loaded.
    ///
    /// # Errors
    /// As [`Adapter::write`].
    pub fn write_for(&self, path: &Path, base: &Base<'_>) -> Result<()> {
        Adapter::check_out(path)?;
        let alpha = self.file_alpha();
        let mut metadata = gguf::Metadata::new();
        metadata.insert("general.architecture", base.arch);
        metadata.insert("general.type", "adapter");
        metadata.insert("adapter.type", "lora");
        metadata.insert("adapter.lora.alpha", alpha);
        if self.dropout != 0.0 {
            metadata.insert(DROPOUT, self.dropout);
        }
        let mut parts: Vec<(String, Vec<usize>, Cow<'_, [f32]>)> = Vec::new();
        for (target, t) in &self.tensors {
            let of = base.projection(target)?;
            let b: Cow<'_, [f32]> = match t.factor(alpha) {
                None => Cow::Borrowed(&t.b),
                Some(f) => t.b.iter().map(|&b| (f64::from(b) * f) as f32).collect(),
            };
            if let Some(i) = b.iter().position(|b| !b.is_finite()) {
                return Err(Error::new(format!(
                    "`{target}.lora_b` has a value at index {i} that is not finite, or not with \
                     the scale {} in it",
                    t.scale
                )));
            }
            let (a_shape, b_shape) = (of.a_shape(t.rank), of.b_shape(t.rank));
            parts.push((format!("{target}.lora_a"), a_shape, Cow::Borrowed(&t.a)));
            parts.push((format!("{target}.lora_b"), b_shape, b));
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

    /// Writes the adapter as a folder that PEFT and what reads its adapters can load. The folder
    /// may be there; its two files are replaced.
    ///
    /// # Errors
    /// When PEFT has no name for a target, or a file cannot be written.
    pub fn write_peft(&self, folder: &Path, base: &Base<'_>) -> Result<()> {
        peft::write(self, folder, base)
    }

    /// The one alpha of a GGUF file: the adapter's, unless more tensors have another.
    fn file_alpha(&self) -> f32 {
        let fits = |alpha: f32| self.tensors.values().filter(|t| t.factor(alpha).is_none()).count();
        let mut best = (fits(self.alpha), self.alpha);
        for t in self.tensors.values() {
            let alpha = effective_alpha(t.scale, t.rank);
            if fits(alpha) > best.0 {
                best = (fits(alpha), alpha);
            }
        }
        best.1
    }

    /// The targets whose scale a GGUF file cannot say and whose B it therefore holds rounded, by
    /// at most 2^-24 of each number: their scale differs from that of the others by a factor that
    /// is no power of two.
    pub fn rounded(&self) -> Vec<&str> {
        let alpha = self.file_alpha();
        let exact = |f: f64| f.abs().log2().fract() == 0.0;
        let off = self.tensors.iter().filter(|(_, t)| t.factor(alpha).is_some_and(|f| !exact(f)));
        off.map(|(target, _)| target.as_str()).collect()
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

/// The alpha of an adapter's file, all of whose words about itself are known: one that is not may
/// change what A and B mean.
pub(crate) fn alpha(metadata: &gguf::Metadata) -> Result<f32> {
    let name = metadata.file();
    let mut keys = metadata.iter().map(|(key, _)| key);
    if let Some(key) = keys.find(|key| key.starts_with("adapter.") && !KEYS.contains(key)) {
        return Err(Error::new(match key {
            INVOCATION => format!(
                "{name}: key `{key}` is there: this is an activated LoRA, which is applied from \
                 where these tokens are on; only plain LoRA is supported"
            ),
            _ => format!(
                "{name}: key `{}` is not known, and may change what the adapter's numbers mean; \
                 expected no more than {}",
                gguf::shown(key),
                KEYS.join(", ")
            ),
        }));
    }
    match metadata.f32("adapter.lora.alpha")? {
        alpha if alpha.is_finite() => Ok(alpha),
        alpha => Err(Error::new(format!(
            "{name}: key `adapter.lora.alpha` is {alpha}, expected a finite number"
        ))),
    }
}

/// # Errors
/// When no adapter has this rank.
pub(crate) fn check_rank(of: &str, rank: usize) -> Result<()> {
    match rank {
        1..=MOST_RANK => Ok(()),
        _ => {
            let of = gguf::shown(of);
            Err(Error::new(format!("the rank of `{of}` is {rank}, expected 1 to {MOST_RANK}")))
        }
    }
}

fn stray(file: &str, tensor: &str) -> Error {
    let tensor = gguf::shown(tensor);
    Error::new(format!(
        "{file}: tensor `{tensor}` is no LoRA pair; expected names that end in .lora_a and .lora_b"
    ))
}

impl LoraTensor {
    /// What B is to be multiplied by so that the scale is `alpha / rank`; `None` where it is.
    fn factor(&self, alpha: f32) -> Option<f64> {
        let of_file = scale(alpha, self.rank);
        (of_file != self.scale).then(|| f64::from(self.scale) / f64::from(of_file))
    }
}

/// Says what a file is that is taken for an adapter and is no GGUF file.
pub(crate) fn refuse_other_files(path: &Path) -> Result<()> {
    let mut head = [0u8; 9];
    // What cannot be read, and how, says whoever opens it next.
    let Ok(len) = files::open(path).and_then(|file| {
        let mut bytes = Vec::new();
        file.take(head.len() as u64).read_to_end(&mut bytes)?;
        head.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
        Ok(bytes.len())
    }) else {
        return Ok(());
    };
    let name = path.display();
    match head {
        // A zip archive, or the first opcode of a pickle.
        [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => Err(peft::pickle(path)),
        [.., b'{'] if len == head.len() => Err(Error::adapter(
            Code::AdapterSafetensors,
            format!(
                "{name}: is a safetensors file alone, which does not say the adapter's scale; give \
                 the folder in which it lies beside {}",
                peft::CONFIG
            ),
        )),
        _ if path.file_name().is_some_and(|file| file == peft::CONFIG) => Err(Error::new(format!(
            "{name}: is the configuration of a PEFT adapter; give the folder in which it lies"
        ))),
        _ => Ok(()),
    }
}

/// A matrix of so many columns, its rows as columns.
pub(crate) fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|j| values.iter().skip(j).step_by(cols.max(1))).copied().collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever alpha and rank a scale comes from, a file's alpha gives it again.
    #[test]
    fn every_scale_has_an_alpha() {
        for rank in 1..=4096usize {
            for alpha in [1.0f64, 8.0, 16.0, 24.0, 0.1, 1e-3, 7.7, 1000.0, 1e9] {
                for alpha in [alpha, -alpha, alpha * (rank as f64).sqrt()] {
                    let wanted = scale(alpha as f32, rank);
                    let found = effective_alpha(wanted, rank);
                    assert_eq!(scale(found, rank), wanted, "alpha {alpha}, rank {rank}");
                    if alpha == alpha.trunc() && alpha.abs() < 1e6 {
                        assert_eq!(f64::from(found), alpha, "rank {rank}");
                    }
                }
            }
        }
    }
}
