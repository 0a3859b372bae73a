//! Training a model's own float tensors, beside an adapter or without one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use gguf::{Gguf, TensorType, Writer};
use model::Model;

use crate::{Error, Result};

/// The tensors that a list of patterns names: `all` of them, or part of a name such as `norm` or
/// `blk.3.`. Quantized ones are named too: training them is refused, not skipped.
///
/// # Errors
/// A pattern that matches nothing.
pub fn select_weights(model: &Model, patterns: &[String]) -> Result<Vec<String>> {
    let mut chosen = std::collections::BTreeSet::new();
    for pattern in patterns {
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

/// Writes a model's file anew with other values for some of its float tensors, each rounded to
/// nearest in its own type. One file is written, whole or not at all, also of a split model.
///
/// # Errors
/// When `path` is a file of the model itself, the model's file cannot be read again, a tensor is missing, quantized or of another size,
/// or the file cannot be written.
pub fn write_weights(
    path: &Path,
    model: &Model,
    weights: &BTreeMap<String, Vec<f32>>,
) -> Result<()> {
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
    let infos: Vec<_> = source.tensors().map(|t| t.info.clone()).collect();
    let mut writer = Writer::create(path, &source.metadata().whole(), infos).map_err(file)?;
    for tensor in source.tensors() {
        let bytes: Cow<'_, [u8]> = match weights.get(&tensor.info.name) {
            None => tensor.bytes.into(),
            Some(values) => {
                let mut bytes = vec![0; tensor.bytes.len()];
                let ty = tensor.info.ty;
                let float = matches!(ty, TensorType::F32 | TensorType::F16 | TensorType::BF16);
                if !float || values.len() != tensor.info.elements() {
                    return Err(Error::Setting(format!(
                        "tensor `{}` is {} {:?} and cannot take {} floats",
                        tensor.info.name,
                        ty.name(),
                        tensor.info.shape,
                        values.len()
                    )));
                }
                gguf::blocks::quantize(ty, values, &mut bytes).map_err(file)?;
                bytes.into()
            }
        };
        writer.tensor(&bytes).map_err(file)?;
    }
    writer.finish().map_err(file)
}
