//! Training a model's own float tensors, beside an adapter or without one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use gguf::{Gguf, Tensor, TensorInfo, TensorType, Writer};
use model::Model;

use crate::targets::check_named;
use crate::{Error, Result};

/// The tensors that a list of patterns names: `all` of them, or part of a name such as `norm` or
/// `blk.3.`. Quantized ones are named too: training them is refused, not skipped.
///
/// # Errors
/// A pattern that matches nothing, or that is empty.
pub fn select_weights(model: &Model, patterns: &[String]) -> Result<Vec<String>> {
    let mut chosen = std::collections::BTreeSet::new();
    for pattern in patterns {
        check_named("the weights to train", pattern)?;
        let names = model.weights().iter().map(|(name, _)| name);
        let hits = names.filter(|name| pattern == "all" || name.contains(pattern.as_str()));
        let before = chosen.len();
        let mut any = false;
        for name in hits {
            any = true;
            chosen.insert(name.to_string());
        }
        if !any && chosen.len() == before {
            return Err(Error::Setting(format!(
                "`{pattern}` is part of no tensor's name; `gradus inspect --tensors` lists them"
            )));
        }
    }
    Ok(chosen.into_iter().collect())
}

/// What became of a trained tensor in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WrittenTensor {
    /// Its name.
    pub name: String,
    /// Its type in the model.
    pub from: TensorType,
    /// Its type in the file.
    pub to: TensorType,
    /// Entries that training has moved, in f32.
    pub moved: u64,
    /// Those of them that are others than before when they are rounded to the tensor's own type.
    pub kept: u64,
}

/// Writes a model's file anew with other values for some of its float tensors, each rounded to
/// nearest in its own type. A step of training may be less than half a step of that type: where
/// rounding takes most of a tensor's moved entries back to what they were, the tensor is written in
/// f32 instead. One file is written, whole or not at all, also of a split model.
///
/// # Errors
/// When `path` is a file of the model itself, the model's file cannot be read again, a tensor is missing, quantized or of another size,
/// or the file cannot be written.
pub fn write_weights(
    path: &Path,
    model: &Model,
    weights: &BTreeMap<String, Vec<f32>>,
) -> Result<Vec<WrittenTensor>> {
    if model.is_at(path) {
        return Err(Error::Setting(format!(
            "{} is the model itself; choose another file for the trained one",
            path.display()
        )));
    }
    let file = |e: gguf::Error| Error::Model(model::Error::File(e));
    let source = Gguf::open(model.path()).map_err(file)?;
    if let Some(name) = weights.keys().find(|name| source.tensor(name).is_none()) {
        return Err(Error::Setting(format!("{}: no tensor `{name}`", model.path().display())));
    }
    let (mut infos, mut written) = (Vec::new(), Vec::new());
    for tensor in source.tensors() {
        let mut info = tensor.info.clone();
        if let Some(values) = weights.get(&info.name) {
            let became = became(&tensor, values)?;
            info = TensorInfo::new(&info.name, became.to, &info.shape).map_err(file)?;
            written.push(became);
        }
        infos.push(info);
    }
    let types: Vec<TensorType> = infos.iter().map(|info| info.ty).collect();
    let mut writer = Writer::create(path, &source.metadata().whole(), infos).map_err(file)?;
    for (tensor, ty) in source.tensors().zip(types) {
        let bytes: Cow<'_, [u8]> = match weights.get(&tensor.info.name) {
            None => tensor.bytes.into(),
            Some(values) => stored(ty, values)?.into(),
        };
        writer.tensor(&bytes).map_err(file)?;
    }
    writer.finish().map_err(file)?;
    Ok(written)
}

/// Values in a float type.
fn stored(ty: TensorType, values: &[f32]) -> Result<Vec<u8>> {
    let mut bytes = vec![0; ty.row_bytes(values.len()).unwrap_or(0)];
    gguf::blocks::quantize(ty, values, &mut bytes)
        .map_err(|e| Error::Model(model::Error::File(e)))?;
    Ok(bytes)
}

/// What becomes of a tensor that takes other values.
fn became(tensor: &Tensor<'_>, values: &[f32]) -> Result<WrittenTensor> {
    let (info, ty) = (tensor.info, tensor.info.ty);
    let float = matches!(ty, TensorType::F32 | TensorType::F16 | TensorType::BF16);
    if !float || values.len() != info.elements() {
        return Err(Error::Setting(format!(
            "tensor `{}` is {} {:?} and cannot take {} floats",
            info.name,
            ty.name(),
            info.shape,
            values.len()
        )));
    }
    let mut before = vec![0.0; values.len()];
    gguf::blocks::dequantize(ty, tensor.bytes, &mut before)
        .map_err(|e| Error::Model(model::Error::File(e)))?;
    let size = ty.block_bytes();
    let rounded = stored(ty, values)?;
    let entries = tensor.bytes.chunks(size).zip(rounded.chunks(size));
    let (mut moved, mut kept) = (0, 0);
    for ((before, after), (old, new)) in before.iter().zip(values).zip(entries) {
        moved += u64::from(before != after);
        kept += u64::from(before != after && old != new);
    }
    let to = if 2 * kept < moved { TensorType::F32 } else { ty };
    Ok(WrittenTensor { name: info.name.clone(), from: ty, to, moved, kept })
}
