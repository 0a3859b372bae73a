//! PEFT's form of an adapter: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Keys are `base_model.model.PATH.lora_A.weight` `[r, in]` and `.lora_B.weight` `[out, r]`, where
//! PATH is that of a module in transformers (see [`names`]). Experts are modules each, or, since
//! transformers 5, parameters of all of a layer: A `[E r, in]`, expert by expert, and B
//! `[out, r E]`, the experts of a rank side by side, with gate and up one parameter whose outputs
//! are those of the gate and then those of the up.
//!
//! An embedding's are `.lora_embedding_A` `[r, vocab]` and `.lora_embedding_B` `[out, r]`; beside
//! them, and beside those of the head, PEFT stores the base's own tensor, which is passed over.
//!
//! Both ways are exact: numbers are moved and never computed with, and what one form says in a
//! way that the other has no words for is refused by name.

mod config;
mod experts;
mod names;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

use graph::Code;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use self::config::{Config, Converted, Written};
use self::experts::{Half, fuse, split};
use self::names::{Family, Order, Place, family, order};
use crate::adapter::{Base, effective_alpha, scale, transposed};
use crate::describe::PairInfo;
use crate::{Adapter, Error, LoraTensor, Projection, Result};

/// Whether PEFT knows a tensor of an architecture by the name of a module such as `q_proj`.
pub(crate) fn is_called(arch: &str, target: &str, module: &str) -> bool {
    family(arch).is_ok_and(|family| family.is_called(target, module))
}

/// The configuration's file.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// The tensors' file.
const TENSORS: &str = "adapter_model.safetensors";
/// What older versions of PEFT wrote instead.
const PICKLE: &str = "adapter_model.bin";

/// The module of an embedding.
const EMBEDDING: &str = "model.embed_tokens";

/// A configuration is a few kilobytes.
const MOST_CONFIG: u64 = 1 << 20;
/// What may stand before the numbers, as safetensors bounds it.
const MOST_HEADER: u64 = 100_000_008;
/// Beyond this no file of tensors is read whose model is not known: rank 256 on all layers of a
/// model of 405 billion weights is 40 GB.
const MOST_TENSORS: u64 = 64 << 30;

/// A pair of matrices under its module's path.
struct Pair {
    path: String,
    rank: usize,
    alpha: f32,
    /// `[rows, in]`; rows are the rank, times the experts for a parameter of all.
    a: Vec<f32>,
    /// `[out, rows]`.
    b: Vec<f32>,
    width: usize,
    out: usize,
    /// It is of an embedding's names.
    is_table: bool,
}

/// Where the pairs of a target's experts are.
type Stacks = BTreeMap<String, (Order, Order, BTreeMap<usize, Pair>)>;

/// Reads a folder.
///
/// # Errors
/// Names the file, field or tensor that is missing, wrong, or of what is not supported.
pub(crate) fn read(folder: &Path, base: &Base<'_>) -> Result<Adapter> {
    let family = family(base.arch)?;
    let (config_path, tensors_path) = (folder.join(CONFIG), folder.join(TENSORS));
    let name = tensors_path.display().to_string();
    let config = read_config(&config_path)?;
    if let Some(class) = config.class.as_deref().filter(|class| !family.classes.contains(class)) {
        return Err(Error::adapter(
            Code::AdapterArchitecture,
            format!(
                "{}: field `auto_mapping` says it is for a {class}, but the model's architecture \
                 is `{}`",
                config_path.display(),
                base.arch
            ),
        ));
    }
    let bytes = read_tensors(folder, &name, most_bytes(base, config.most_rank()))?;
    let file = parse(&bytes, &name)?;

    let mut single: BTreeMap<String, LoraTensor> = BTreeMap::new();
    let mut stacks = Stacks::new();
    let fused = |path: &str, width: usize, out: usize| match family.place(path) {
        Some(Place::Fused { layer }) => Some(experts::parameter(path, width, layer, base, out)),
        _ => None,
    };
    for pair in pairs(&name, &file, &config, &fused)? {
        let path = format!("base_model.model.{}", pair.path);
        let unknown = || {
            Error::adapter(
                Code::AdapterArchitecture,
                format!(
                    "{name}: tensors of `{path}` are of no module that adapters can be on in a \
                     model of architecture `{}`",
                    base.arch
                ),
            )
        };
        match family.place(&pair.path).ok_or_else(unknown)? {
            Place::One { target, expert, rows, cols } => {
                let of = projection(base, &target, &name, &path)?;
                if of.is_table != pair.is_table {
                    return Err(unknown());
                }
                check(&name, &path, &pair, of.width, of.out)?;
                match (expert, of.experts) {
                    (None, None) => {
                        let tensor = ordered(pair, rows, cols, base, &name)?;
                        put(&mut single, target, tensor, &name, &path)?;
                    }
                    (Some(e), Some(count)) if e < count => {
                        let stack = stacks.entry(target).or_insert((rows, cols, BTreeMap::new()));
                        if stack.2.insert(e, pair).is_some() {
                            return Err(twice(&name, &path));
                        }
                    }
                    _ => return Err(unknown()),
                }
            }
            Place::Fused { layer } => {
                for (target, tensor) in split(pair, layer, base, &name, &path)? {
                    put(&mut single, target, tensor, &name, &path)?;
                }
            }
        }
    }
    for (target, (rows, cols, experts)) in stacks {
        let tensor = stack(&target, rows, cols, experts, base, &name)?;
        put(&mut single, target.clone(), tensor, &name, &target)?;
    }
    if single.is_empty() {
        return Err(Error::new(format!("{name}: the adapter has no tensors")));
    }
    Ok(Adapter { dropout: config.dropout, ..Adapter::of(single) })
}

/// What an adapter of a rank on everything takes as a file, in f32, with the model's own tables,
/// which PEFT stores beside it.
fn most_bytes(base: &Base<'_>, rank: usize) -> u64 {
    let each = |of: &Projection| of.experts.unwrap_or(1).saturating_mul(of.width + of.out);
    let pairs = base.projections.values().map(each).fold(0, usize::saturating_add);
    let table = base.tensors.tensor("token_embd.weight").map_or(0, |(shape, _)| shape.elements());
    let numbers = pairs.saturating_mul(rank).saturating_add(table.saturating_mul(2));
    (numbers as u64).saturating_mul(4).saturating_add(MOST_HEADER)
}

fn read_tensors(folder: &Path, name: &str, most: u64) -> Result<Vec<u8>> {
    match files::read(&folder.join(TENSORS), most) {
        Ok(bytes) => Ok(bytes),
        Err(e) if e.kind() == ErrorKind::NotFound && folder.join(PICKLE).exists() => {
            Err(pickle(&folder.join(PICKLE)))
        }
        Err(e) => Err(Error::new(format!("{name}: cannot be read: {e}"))),
    }
}

fn parse<'b>(bytes: &'b [u8], name: &str) -> Result<SafeTensors<'b>> {
    SafeTensors::deserialize(bytes)
        .map_err(|e| Error::new(format!("{name}: is no safetensors file: {e}")))
}

/// What is in a folder, under the names that it has there, without a model to hold it against.
///
/// # Errors
/// As [`read`], as far as no model is needed.
pub(crate) fn describe(folder: &Path) -> Result<Vec<PairInfo>> {
    let name = folder.join(TENSORS).display().to_string();
    let config = read_config(&folder.join(CONFIG))?;
    let bytes = read_tensors(folder, &name, MOST_TENSORS)?;
    // What is inside another parameter is gate and up; else it may be either, and which it is
    // matters only where a configuration speaks of one alone.
    let fused = |path: &str, _: usize, _: usize| {
        let module = path.strip_suffix(".base_layer");
        let name = if module.is_some() { "gate_up_proj" } else { "down_proj" };
        let module = module.unwrap_or(path);
        module.ends_with(".mlp.experts").then(|| format!("{module}.{name}"))
    };
    let mut out = Vec::new();
    for pair in pairs(&name, &parse(&bytes, &name)?, &config, &fused)? {
        let Pair { path, rank, alpha, a, b, width, out: outputs, .. } = pair;
        let rows = a.len() / width.max(1);
        let experts = (rows != rank && rows.is_multiple_of(rank)).then(|| rows / rank);
        // The experts of a rank are side by side in B; here they are one after another.
        let b = match experts {
            None => b,
            Some(count) => {
                let of = |e: usize| {
                    b.chunks(rows).flat_map(move |row| row.iter().skip(e).step_by(count))
                };
                (0..count).flat_map(of).copied().collect()
            }
        };
        let pair = LoraTensor { rank, a, b, scale: scale(alpha, rank) };
        out.push(PairInfo::of(path, &pair, experts, width, outputs));
    }
    Ok(out)
}

/// What is said of a pickled adapter.
pub(crate) fn pickle(path: &Path) -> Error {
    Error::adapter(
        Code::AdapterPickle,
        format!(
            "{}: is a pickle of PyTorch, which could run any code and is not read; load it with \
             PEFT and save it again, as safetensors",
            path.display()
        ),
    )
}

fn read_config(path: &Path) -> Result<Config> {
    let name = path.display();
    let failed = |e: std::io::Error| match e.kind() {
        ErrorKind::NotFound => {
            Error::new(format!("{name}: there is no such file, so the folder is no PEFT adapter"))
        }
        _ => Error::new(format!("{name}: cannot be read: {e}")),
    };
    Config::parse(&name.to_string(), &files::read(path, MOST_CONFIG).map_err(failed)?)
}

/// All pairs of a file, in order of their paths, each of the rank that the configuration says.
/// `fused` gives the name of the parameter that a path, of so many inputs and outputs, is of.
fn pairs(
    file: &str,
    tensors: &SafeTensors<'_>,
    config: &Config,
    fused: &dyn Fn(&str, usize, usize) -> Option<String>,
) -> Result<Vec<Pair>> {
    let mut halves: BTreeMap<(String, bool), [Option<TensorView<'_>>; 2]> = BTreeMap::new();
    for (name, view) in tensors.iter() {
        // The base's own, which PEFT stores with adapters on them. Where the vocabulary was changed
        // A or B has another shape too, and is refused for that.
        if name.strip_suffix(".base_layer.weight").is_some_and(|path| {
            path.ends_with(".embed_tokens") || path.ends_with(".lm_head") || path == "lm_head"
        }) {
            continue;
        }
        let stray = || {
            Error::new(format!(
                "{file}: tensor `{}` is no LoRA pair; expected names that end in .lora_A.weight \
                 and .lora_B.weight",
                gguf::shown(name)
            ))
        };
        let short = name.strip_suffix(".weight");
        let is_table = short.is_none();
        let short = short.unwrap_or(name);
        let short = short.strip_suffix(".default").unwrap_or(short);
        let ends = match is_table {
            true => [".lora_embedding_A", ".lora_embedding_B"],
            false => [".lora_A", ".lora_B"],
        };
        let (path, part) = match ends.map(|end| short.strip_suffix(end)) {
            [Some(path), _] => (path, 0),
            [None, Some(path)] => (path, 1),
            [None, None] => return Err(stray()),
        };
        let path = path.strip_prefix("base_model.model.").unwrap_or(path);
        let key = (path.to_string(), is_table);
        let slot = halves.entry(key).or_default().get_mut(part).ok_or_else(stray)?;
        if slot.replace(view).is_some() {
            return Err(twice(file, path));
        }
    }
    let mut pairs = Vec::with_capacity(halves.len());
    for ((path, is_table), [a, b]) in halves {
        let full = format!("base_model.model.{path}");
        let [name_a, name_b] = match is_table {
            true => [".lora_embedding_A", ".lora_embedding_B"],
            false => [".lora_A.weight", ".lora_B.weight"],
        }
        .map(|end| format!("{full}{end}"));
        let missing =
            |name: &str| Error::new(format!("{file}: tensor `{name}` is missing beside the other"));
        let (a, b) = (a.ok_or_else(|| missing(&name_a))?, b.ok_or_else(|| missing(&name_b))?);
        let dims = |view: &TensorView<'_>, name: &str| match *view.shape() {
            [rows, cols] if rows > 0 && cols > 0 => Ok((rows, cols)),
            ref other => Err(Error::adapter(
                Code::AdapterShape,
                format!("{file}: tensor `{name}` has shape {other:?}, expected a matrix"),
            )),
        };
        let ((rows, width), (out, columns)) = (dims(&a, &name_a)?, dims(&b, &name_b)?);
        if rows != columns {
            return Err(Error::adapter(
                Code::AdapterShape,
                format!(
                    "{file}: tensor `{name_b}` has {columns} columns, expected the \
                     {rows} rows of lora_A"
                ),
            ));
        }
        let parameter = fused(&path, width, out);
        let key = parameter.as_ref().map_or_else(|| config.key(&path), String::clone);
        let (rank, alpha) = config.of(&key)?;
        if parameter.is_none() && rank != rows {
            return Err(Error::adapter(
                Code::AdapterShape,
                format!(
                    "{file}: tensor `{name_a}` has {rows} rows, but the configuration \
                     says the rank is {rank}"
                ),
            ));
        }
        let (a, b) = (floats(file, &name_a, &a)?, floats(file, &name_b, &b)?);
        pairs.push(Pair { path, rank, alpha, a, b, width, out, is_table });
    }
    Ok(pairs)
}

/// A tensor's numbers, all of them finite.
fn floats(file: &str, name: &str, view: &TensorView<'_>) -> Result<Vec<f32>> {
    let data = view.data();
    let values: Vec<f32> = match view.dtype() {
        Dtype::F32 => data.as_chunks().0.iter().map(|&le| f32::from_le_bytes(le)).collect(),
        Dtype::F16 => {
            data.as_chunks().0.iter().map(|&le| f16::from_le_bytes(le).to_f32()).collect()
        }
        Dtype::BF16 => {
            data.as_chunks().0.iter().map(|&le| bf16::from_le_bytes(le).to_f32()).collect()
        }
        other => {
            return Err(Error::new(format!(
                "{file}: tensor `{name}` is {other:?}, expected F32, F16 or BF16"
            )));
        }
    };
    match values.iter().position(|v| !v.is_finite()) {
        None => Ok(values),
        Some(i) => Err(Error::new(format!(
            "{file}: tensor `{name}` has a value that is not finite at index {i}"
        ))),
    }
}

fn projection(base: &Base<'_>, target: &str, file: &str, path: &str) -> Result<Projection> {
    base.projection(target).map_err(|e| {
        Error::adapter(
            Code::AdapterArchitecture,
            format!("{file}: tensors of `{path}` cannot be on this model: {e}"),
        )
    })
}

fn check(file: &str, path: &str, pair: &Pair, width: usize, out: usize) -> Result<()> {
    if (pair.width, pair.out) == (width, out) {
        return Ok(());
    }
    let (part, found, wanted) = match pair.width == width {
        true => ("lora_B", [pair.out, pair.rank], [out, pair.rank]),
        false => ("lora_A", [pair.rank, pair.width], [pair.rank, width]),
    };
    Err(Error::adapter(
        Code::AdapterShape,
        format!(
            "{file}: tensor `{path}.{part}.weight` has shape {found:?}, the model needs {wanted:?}"
        ),
    ))
}

fn twice(file: &str, path: &str) -> Error {
    Error::new(format!("{file}: tensors of `{path}` are there twice, under several names"))
}

fn put(
    to: &mut BTreeMap<String, LoraTensor>,
    target: String,
    tensor: LoraTensor,
    file: &str,
    path: &str,
) -> Result<()> {
    match to.insert(target, tensor) {
        None => Ok(()),
        Some(_) => Err(twice(file, path)),
    }
}

/// Rows of `width` numbers, the i-th from the `order[i]`-th.
fn gather(values: &[f32], width: usize, order: &[usize]) -> Vec<f32> {
    let row = |&i: &usize| values.get(i * width..(i + 1) * width).unwrap_or_default();
    order.iter().flat_map(row).copied().collect()
}

/// The inverse of an order.
fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (i, &at) in order.iter().enumerate() {
        if let Some(slot) = inverse.get_mut(at) {
            *slot = i;
        }
    }
    inverse
}

/// As [`gather`] of columns.
fn gather_columns(values: &[f32], order: &[usize]) -> Vec<f32> {
    let rows = values.chunks(order.len().max(1));
    rows.flat_map(|row| order.iter().map(|&i| row.get(i).copied().unwrap_or(0.0))).collect()
}

/// A pair with its rows and columns as GGUF has them.
fn ordered(
    pair: Pair,
    rows: Order,
    cols: Order,
    base: &Base<'_>,
    file: &str,
) -> Result<LoraTensor> {
    let Pair { path, rank, alpha, mut a, mut b, width, out, is_table } = pair;
    let named = |e: Error| Error::new(format!("{file}: tensors of `{path}`: {e}"));
    if let Some(order) = order(rows, out, base).map_err(named)? {
        b = gather(&b, rank, &order);
    }
    if let Some(order) = order(cols, width, base).map_err(named)? {
        a = gather_columns(&a, &order);
    }
    if is_table {
        a = transposed(&a, width);
    }
    Ok(LoraTensor { rank, a, b, scale: scale(alpha, rank) })
}

/// The pairs of all experts as one.
fn stack(
    target: &str,
    rows: Order,
    cols: Order,
    experts: BTreeMap<usize, Pair>,
    base: &Base<'_>,
    file: &str,
) -> Result<LoraTensor> {
    let count = base.projection(target)?.experts.unwrap_or(1);
    let wanted = experts.values().next().map(|p| (p.rank, p.alpha));
    if let Some(missing) = (0..count).find(|e| !experts.contains_key(e)) {
        return Err(Error::new(format!(
            "{file}: expert {missing} of `{target}` has no tensors, but others have; GGUF has \
             room for all or none"
        )));
    }
    let mut out: Option<LoraTensor> = None;
    for (e, pair) in experts {
        if wanted != Some((pair.rank, pair.alpha)) {
            return Err(Error::new(format!(
                "{file}: expert {e} of `{target}` has another rank or alpha than expert 0; GGUF \
                 has one for all"
            )));
        }
        let next = ordered(pair, rows, cols, base, file)?;
        match &mut out {
            None => out = Some(next),
            Some(out) => {
                out.a.extend_from_slice(&next.a);
                out.b.extend_from_slice(&next.b);
            }
        }
    }
    out.ok_or_else(|| Error::new(format!("{file}: `{target}` has no tensors")))
}

/// Writes a folder, which may be there already. While the files are replaced, there is no
/// configuration, so that the folder is the old adapter, the new one, or visibly none.
///
/// # Errors
/// When PEFT has no name for a target, or a file cannot be written.
pub(crate) fn write(adapter: &Adapter, folder: &Path, base: &Base<'_>) -> Result<()> {
    let family = family(base.arch)?;
    let mut modules = Vec::new();
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    let mut parameter_layers: BTreeSet<usize> = BTreeSet::new();
    for (target, t) in &adapter.tensors {
        let of = base.projection(target)?;
        let alpha = f64::from(effective_alpha(t.scale, t.rank));
        if target == "output.weight" {
            let written = Written { path: "lm_head".into(), parameter: false, rank: t.rank, alpha };
            modules.push(written);
            add(&mut tensors, "lm_head", t.rank, &of, t.a.clone(), t.b.clone());
            continue;
        }
        if of.is_table {
            let path = EMBEDDING.to_string();
            modules.push(Written { path, parameter: false, rank: t.rank, alpha });
            let name = |part: &str| format!("base_model.model.{EMBEDDING}.lora_embedding_{part}");
            let a = transposed(&t.a, t.rank);
            tensors.insert(name("A"), (vec![t.rank, of.width], a));
            tensors.insert(name("B"), (vec![of.out, t.rank], t.b.clone()));
            continue;
        }
        let (layer, module) = family.module(target).ok_or_else(|| {
            Error::new(format!(
                "PEFT has no name for `{target}` of architecture `{}`, so the adapter cannot be \
                 written as a PEFT folder",
                base.arch
            ))
        })?;
        let (rows, cols) = (order(module.rows, of.out, base)?, order(module.cols, of.width, base)?);
        let (rows, cols) = (rows.map(|o| inverse(&o)), cols.map(|o| inverse(&o)));
        let there = |a: &[f32], b: &[f32]| {
            let a = cols.as_ref().map_or_else(|| a.to_vec(), |order| gather_columns(a, order));
            let b = rows.as_ref().map_or_else(|| b.to_vec(), |order| gather(b, t.rank, order));
            (a, b)
        };
        let Some(count) = of.experts else {
            let path = format!("model.layers.{layer}.{}", module.path);
            let (a, b) = there(&t.a, &t.b);
            // Since transformers 5 a router is no linear layer.
            let parameter = family.fused && module.tensor == "ffn_gate_inp";
            let listed = if parameter { format!("{path}.weight") } else { path.clone() };
            modules.push(Written { path: listed, parameter, rank: t.rank, alpha });
            add(&mut tensors, &path, t.rank, &of, a, b);
            continue;
        };
        if family.fused {
            if parameter_layers.insert(layer) {
                for (half, written, rows, a, b) in fuse(adapter, layer, base)? {
                    let path = match half {
                        Half::Inner => format!("model.layers.{layer}.mlp.experts.base_layer"),
                        Half::Outer => format!("model.layers.{layer}.mlp.experts"),
                    };
                    modules.push(written);
                    insert(&mut tensors, &path, rows, a, b);
                }
            }
            continue;
        }
        let (a_len, b_len) = (t.rank * of.width, t.rank * of.out);
        for e in 0..count {
            let path =
                format!("model.layers.{layer}.{}", module.path.replace("{}", &e.to_string()));
            let a = t.a.get(e * a_len..(e + 1) * a_len).unwrap_or_default();
            let b = t.b.get(e * b_len..(e + 1) * b_len).unwrap_or_default();
            let (a, b) = there(a, b);
            modules.push(Written { path: path.clone(), parameter: false, rank: t.rank, alpha });
            add(&mut tensors, &path, t.rank, &of, a, b);
        }
    }
    let everywhere = |written: &Written| is_everywhere(written, adapter, base, family);
    let name = base.metadata.opt_str("general.name")?.unwrap_or(base.arch);
    let converted = converted(adapter, family);
    let config = config::text(name, adapter.dropout, &modules, &converted, &everywhere)?;

    let views: Vec<(&String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, (shape, values))| {
            let bytes = bytemuck::cast_slice(values);
            Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(unwritable)?))
        })
        .collect::<Result<_>>()?;
    // As `save_file` of the Python package, which PEFT calls.
    let note = [("format".to_string(), "pt".to_string())].into();
    let data = safetensors::serialize(views, Some(note)).map_err(unwritable)?;
    replace(folder, &data, &config)
}

fn unwritable(e: safetensors::SafeTensorError) -> Error {
    Error::new(format!("the adapter cannot be written as safetensors: {e}"))
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn add(to: &mut Tensors, path: &str, rank: usize, of: &Projection, a: Vec<f32>, b: Vec<f32>) {
    insert(to, path, [rank, of.width, of.out], a, b);
}

/// A pair `[rows, width]` and `[out, rows]`.
fn insert(to: &mut Tensors, path: &str, dims: [usize; 3], a: Vec<f32>, b: Vec<f32>) {
    let [rows, width, out] = dims;
    to.insert(format!("base_model.model.{path}.lora_A.weight"), (vec![rows, width], a));
    to.insert(format!("base_model.model.{path}.lora_B.weight"), (vec![out, rows], b));
}

/// What PEFT makes of an adapter's routers and of its experts, where they are written as modules.
fn converted(adapter: &Adapter, family: &Family) -> Vec<Converted> {
    if family.fused {
        return Vec::new();
    }
    let mut out = Vec::new();
    for (target, t) in &adapter.tensors {
        let Some((layer, module)) = family.module(target) else { continue };
        let (name, modules) = match module.tensor {
            "ffn_gate_inp" => ("gate.weight", 1),
            "ffn_down_exps" => ("experts.down_proj", 1),
            // With the up of the same rank and scale; PEFT takes no others.
            "ffn_gate_exps" => ("experts.gate_up_proj", 2),
            _ => continue,
        };
        let path = format!("model.layers.{layer}.mlp.{name}");
        let alpha = f64::from(effective_alpha(t.scale, t.rank)) * modules as f64;
        let parameter = Written { path, parameter: true, rank: t.rank * modules, alpha };
        out.push(Converted { parameter, modules: modules as f64 });
    }
    out
}

/// Whether every module of the model whose path ends like this one's has an adapter, so that the
/// end alone can stand for all.
fn is_everywhere(written: &Written, adapter: &Adapter, base: &Base<'_>, family: &Family) -> bool {
    if written.path == "lm_head" || written.path == EMBEDDING {
        return true;
    }
    let leaf = |path: &str| path.rsplit('.').next().unwrap_or_default().to_string();
    let wanted = match written.parameter {
        // The parameters stand for their tensors.
        true if written.path.ends_with(".mlp.gate.weight") => "gate".to_string(),
        true => return fused_everywhere(adapter, base),
        false => leaf(&written.path),
    };
    base.projections.keys().all(|target| {
        let same = family.module(target).is_some_and(|(_, m)| leaf(m.path) == wanted);
        !same || adapter.tensors.contains_key(target)
    })
}

fn fused_everywhere(adapter: &Adapter, base: &Base<'_>) -> bool {
    let routed = base.projections.iter().filter(|(_, of)| of.experts.is_some());
    routed.into_iter().all(|(target, _)| adapter.tensors.contains_key(target))
}

fn replace(folder: &Path, data: &[u8], config: &[u8]) -> Result<()> {
    let written = (|| {
        fs::create_dir_all(folder)?;
        let begin = |file: &str, bytes: &[u8]| {
            let mut out = files::Replacement::create(&folder.join(file))?;
            out.write_all(bytes).map(|()| out)
        };
        let (data, config) = (begin(TENSORS, data)?, begin(CONFIG, config)?);
        match fs::remove_file(folder.join(CONFIG)) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        data.commit()?;
        config.commit()
    })();
    written.map_err(|e: std::io::Error| {
        let advice = files::advice(e.kind());
        let message = format!("{}: the adapter cannot be written: {e}; {advice}", folder.display());
        match e.kind() {
            // There is something that is no file.
            ErrorKind::InvalidInput => Error::new(message),
            _ => Error::adapter(Code::FileFailed, message),
        }
    })
}
