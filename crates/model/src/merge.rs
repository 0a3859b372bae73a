//! Merging an adapter into the weights of a model's file: `W + scale * B A`, stored again.
//!
//! A quantized tensor has steps, and a change of less than half a step is mostly rounded away:
//! the merged model is then the base model. So every tensor's change is measured against the
//! steps it is stored in, and a merge that would lose an adapter is refused.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Mutex;

use gguf::blocks::{self, Decoded};
use gguf::{Metadata, Tensor, TensorInfo, TensorType, Value, Writer};
use graph::{Code, Refusal};

use crate::adapter::transposed;
use crate::{Adapter, Error, LoraTensor, Projection, Result, Skeleton};

/// How to merge.
#[derive(Clone, Debug)]
pub struct MergeConfig {
    /// What changed tensors are stored as; `None` keeps the type of each.
    pub ty: Option<TensorType>,
    /// Merge although most of a tensor's change is lost.
    pub force: bool,
    /// What the adapter is called, for the metadata; empty says nothing.
    pub name: String,
    /// Threads; the file is the same with any number.
    pub threads: usize,
}

/// What a merge did to one tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct MergedTensor {
    /// Its name.
    pub name: String,
    /// Its type before.
    pub from: TensorType,
    /// Its type after.
    pub to: TensorType,
    /// Root mean square of the change over that of the weights.
    pub change: f64,
    /// Root mean square of what is stored less what it should be, over that of the change.
    pub error: f64,
    /// The share of the entries to be changed whose change is less than half a step of the type
    /// as they are stored, or whose group is stored as one value that is not theirs.
    pub lost: f64,
}

/// More of a tensor's entries than this must change by half a step.
const MOST_LOST: f64 = 0.5;

/// Types that are proposed where one loses an adapter, the smallest first.
const FINER: [TensorType; 5] =
    [TensorType::Q5_1, TensorType::Q6K, TensorType::Q8_0, TensorType::F16, TensorType::F32];

/// Rows that are done at a time; sums are the same with any number of threads.
const ROWS: usize = 32;

/// Sums over some rows.
#[derive(Copy, Clone, Default)]
struct Sums {
    weights: f64,
    change: f64,
    error: f64,
    changed: u64,
    lost: u64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.weights += other.weights;
        self.change += other.change;
        self.error += other.error;
        self.changed += other.changed;
        self.lost += other.lost;
    }

    fn lost(&self) -> f64 {
        self.lost as f64 / self.changed.max(1) as f64
    }

    fn of(&self, info: &TensorInfo, to: TensorType) -> MergedTensor {
        let ratio = |a: f64, b: f64| if b > 0.0 { (a / b).sqrt() } else { 0.0 };
        MergedTensor {
            name: info.name.clone(),
            from: info.ty,
            to,
            change: ratio(self.change, self.weights),
            error: ratio(self.error, self.change),
            lost: self.lost(),
        }
    }
}

/// Writes a copy of a model's file with an adapter in its weights, tensor by tensor: no more than
/// one is in memory. From the first tensor on that would lose its change nothing more is written,
/// and what was is removed: the rest is measured, for one refusal that names what keeps all. Everything else is copied byte for byte, but for keys that say where the
/// model comes from (`general.finetune`, `general.base_model.*`). `done` is told how many of how
/// many bytes of the result are written.
///
/// Sums are f64, weights f32. Rows that the adapter does not change keep their bytes.
///
/// # Errors
/// When a tensor cannot be stored in its type, or not in finite numbers, when most of a tensor's
/// change would be lost (a refusal, code `merge_erases`), or the file cannot be written.
pub fn merge(
    model: &Skeleton,
    adapter: &Adapter,
    out: &Path,
    config: &MergeConfig,
    done: &mut dyn FnMut(u64, u64),
) -> Result<Vec<MergedTensor>> {
    let file = model.file();
    let base = model.base();
    for target in adapter.tensors.keys() {
        base.projection(target)?;
    }
    if gguf::overwrites(out, file.path()) {
        return Err(Error::new(format!(
            "{} is the model itself; choose another file for the merged one",
            out.display()
        )));
    }
    let mut infos = Vec::new();
    for tensor in file.tensors() {
        let info = tensor.info;
        infos.push(match adapter.tensors.contains_key(&info.name) {
            false => info.clone(),
            true => TensorInfo::new(&info.name, stored_as(info, config)?, &info.shape)?,
        });
    }
    let lengths: Vec<u64> = infos.iter().map(|info| info.byte_len() as u64).collect();
    let total = lengths.iter().sum();
    let types: Vec<TensorType> = infos.iter().map(|info| info.ty).collect();
    let mut writer = Some(Writer::create(out, &metadata(file.metadata(), config), infos)?);
    let mut report = Vec::new();
    let mut erased: Vec<(&str, f64)> = Vec::new();
    let mut written = 0u64;
    done(0, total);
    for ((tensor, ty), bytes) in file.tensors().zip(types).zip(lengths) {
        let name = &tensor.info.name;
        match adapter.tensors.get(name) {
            None => {
                if let Some(writer) = &mut writer {
                    writer.tensor(tensor.bytes)?;
                }
            }
            Some(lora) => {
                let lora = rows_of(base.projection(name)?, lora);
                let (bytes, sums) = Job { tensor, lora: &lora, ty }.run(config.threads)?;
                if sums.lost() > MOST_LOST && !config.force {
                    erased.push((name, sums.lost()));
                    writer = None;
                }
                if let Some(writer) = &mut writer {
                    writer.tensor(&bytes)?;
                }
                report.push(sums.of(tensor.info, ty));
            }
        }
        written += bytes;
        done(written, total);
        file.release(name);
    }
    match writer {
        Some(writer) => writer.finish()?,
        None => {
            erased.sort_by(|a, b| b.1.total_cmp(&a.1));
            let keeps = keeps_all(model, adapter, config, &report, &erased)?;
            return Err(graph::Error::from(refusal(&erased, report.len(), keeps)).into());
        }
    }
    done(total, total);
    Ok(report)
}

/// The smallest type in which no changed tensor loses its change, and that all of them can be
/// stored in. Those that lost most are tried first.
fn keeps_all(
    model: &Skeleton,
    adapter: &Adapter,
    config: &MergeConfig,
    report: &[MergedTensor],
    erased: &[(&str, f64)],
) -> Result<Option<TensorType>> {
    let (file, base) = (model.file(), model.base());
    let lost = |name: &str| erased.iter().position(|(erased, _)| *erased == name);
    let mut changed: Vec<&MergedTensor> = report.iter().collect();
    changed.sort_by_key(|t| lost(&t.name).unwrap_or(erased.len()));
    let keeps = |ty: TensorType| -> Result<bool> {
        for t in &changed {
            let tensor = file.require(&t.name)?;
            let (new, old) =
                (ty.block_bytes() * t.to.block_len(), t.to.block_bytes() * ty.block_len());
            let hopeless = lost(&t.name).is_some() && (new < old || ty == t.to);
            if hopeless || !tensor.info.cols().is_multiple_of(ty.block_len()) {
                return Ok(false);
            }
            let Some(lora) = adapter.tensors.get(&t.name) else { continue };
            let lora = rows_of(base.projection(&t.name)?, lora);
            let run = Job { tensor, lora: &lora, ty }.run(config.threads);
            file.release(&t.name);
            // Numbers that it cannot hold are another reason to go on to the next.
            if !run.is_ok_and(|(_, sums)| sums.lost() <= MOST_LOST) {
                return Ok(false);
            }
        }
        Ok(true)
    };
    for ty in FINER {
        if keeps(ty)? {
            return Ok(Some(ty));
        }
    }
    Ok(None)
}

/// A pair as one on a matrix whose rows are the tensor's: of a table, a row of its A, times B.
fn rows_of(of: Projection, lora: &LoraTensor) -> Cow<'_, LoraTensor> {
    match of.is_table {
        false => Cow::Borrowed(lora),
        true => {
            let a = transposed(&lora.b, lora.rank);
            Cow::Owned(LoraTensor { a, b: lora.a.clone(), ..*lora })
        }
    }
}

/// What a changed tensor is stored as.
fn stored_as(info: &TensorInfo, config: &MergeConfig) -> Result<TensorType> {
    let ty = config.ty.unwrap_or(info.ty);
    if !blocks::QUANTIZABLE.contains(&ty) {
        return Err(Error::new(format!(
            "tensor `{}` is {ty}, which is not made here; choose another with `--type`, such as \
             q8_0 or f16",
            info.name
        )));
    }
    if !info.cols().is_multiple_of(ty.block_len()) {
        return Err(Error::new(format!(
            "tensor `{}` has rows of {} elements, which are no whole blocks of {} of {ty}; choose \
             another `--type`, such as {}",
            info.name,
            info.cols(),
            ty.block_len(),
            if info.cols().is_multiple_of(TensorType::Q8_0.block_len()) { "q8_0" } else { "f16" }
        )));
    }
    Ok(ty)
}

/// The model's own, in one file, and where it comes from.
fn metadata(of: &Metadata, config: &MergeConfig) -> Metadata {
    // What most tensors are is another type then, and readers look for themselves.
    let kept = |key: &str| config.ty.is_none() || key != "general.file_type";
    let mut metadata = of.whole().filtered(kept);
    let adapter = config.name.as_str();
    if adapter.is_empty() {
        return metadata;
    }
    if let Some(Value::String(name)) = of.get("general.name")
        && !of.contains("general.base_model.count")
    {
        metadata.insert("general.base_model.count", Value::U32(1));
        metadata.insert("general.base_model.0.name", name.as_str());
    }
    metadata.insert("general.finetune", adapter);
    metadata
}

/// `erased`: names and shares lost, the worst first; of so many changed tensors.
fn refusal(erased: &[(&str, f64)], of: usize, keeps: Option<TensorType>) -> Refusal {
    let advice = match keeps {
        Some(ty) => format!("`--type {}` keeps all of it", ty.name().to_lowercase()),
        None => "no type keeps all of it: the adapter changes next to nothing".to_string(),
    };
    let (name, lost) = erased.first().copied().unwrap_or_default();
    Refusal {
        code: Code::MergeErases,
        op: String::new(),
        node: String::new(),
        operand: None,
        device: None,
        reason: format!(
            "merging would lose the adapter in {} of {of} tensors: of `{name}`, {:.0} % of the \
             entries change by less than half a step of its type; {advice}, `--force` merges \
             anyway, and the adapter itself loses nothing",
            erased.len(),
            100.0 * lost
        ),
    }
}

/// One tensor to be merged.
#[derive(Copy, Clone)]
struct Job<'a> {
    tensor: Tensor<'a>,
    lora: &'a LoraTensor,
    ty: TensorType,
}

impl Job<'_> {
    /// The stored bytes of the merged tensor, and what happened to it.
    fn run(&self, threads: usize) -> Result<(Vec<u8>, Sums)> {
        let info = self.tensor.info;
        let wrong = || Error::new(format!("tensor `{}` is not as its adapter needs it", info.name));
        let (cols, rows) = (info.cols(), info.rows());
        let row_bytes = self.ty.row_bytes(cols).ok_or_else(wrong)?;
        let size = rows.checked_mul(row_bytes).ok_or_else(wrong)?;
        let mut out = Vec::new();
        out.try_reserve_exact(size).map_err(|_| {
            Error::new(format!("no memory for the {size} bytes of tensor `{}`", info.name))
        })?;
        out.resize(size, 0);
        let work = Mutex::new(out.chunks_mut((ROWS * row_bytes).max(1)).enumerate());
        // Rows are given out in order, so the first that is wrong is found whatever the threads do.
        let one = || -> Vec<(usize, Result<Sums>)> {
            let mut scratch = Scratch::new(cols);
            let mut sums = Vec::new();
            loop {
                let next = work.lock().unwrap_or_else(|e| e.into_inner()).next();
                let Some((i, bytes)) = next else { return sums };
                let mut rows = bytes.chunks_mut(row_bytes.max(1)).enumerate();
                let sum = rows.try_fold(Sums::default(), |mut sum, (r, bytes)| {
                    sum.add(&self.row(i * ROWS + r, bytes, &mut scratch)?);
                    Ok(sum)
                });
                if sum.is_err() {
                    // Nothing more is given out.
                    work.lock().unwrap_or_else(|e| e.into_inner()).by_ref().for_each(drop);
                }
                sums.push((i, sum));
            }
        };
        let mut sums = Vec::new();
        std::thread::scope(|scope| -> Result<()> {
            let workers: Vec<_> = (1..threads.max(1)).map(|_| scope.spawn(one)).collect();
            sums.extend(one());
            for worker in workers {
                sums.extend(worker.join().map_err(|_| Error::new("a merging thread stopped"))?);
            }
            Ok(())
        })?;
        sums.sort_unstable_by_key(|(i, _)| *i);
        let mut total = Sums::default();
        for (_, sum) in sums {
            total.add(&sum?);
        }
        Ok((out, total))
    }

    /// Row `r`, counted through all experts.
    fn row(&self, r: usize, out: &mut [u8], scratch: &mut Scratch) -> Result<Sums> {
        let (info, lora) = (self.tensor.info, self.lora);
        let (cols, rank) = (info.cols(), lora.rank);
        let wrong = || Error::new(format!("tensor `{}` is not as its adapter needs it", info.name));
        let size = info.ty.row_bytes(cols).ok_or_else(wrong)?;
        let bytes = self.tensor.bytes.get(r * size..(r + 1) * size).ok_or_else(wrong)?;
        let of_expert = info.shape.iter().rev().nth(1).copied().unwrap_or(1).max(1);
        let expert = r / of_expert;
        let a_len = rank * cols;
        let a = lora.a.get(expert * a_len..(expert + 1) * a_len).ok_or_else(wrong)?;
        let b = lora.b.get(r * rank..(r + 1) * rank).ok_or_else(wrong)?;

        blocks::dequantize(info.ty, bytes, &mut scratch.weights)?;
        let weights = scratch.weights.iter().map(|&w| f64::from(w).powi(2)).sum();
        let mut sums = Sums { weights, ..Sums::default() };
        if b.iter().all(|&b| b == 0.0) && self.ty == info.ty {
            out.copy_from_slice(bytes);
            return Ok(sums);
        }
        scratch.change.fill(0.0);
        for (b, a) in b.iter().zip(a.chunks(cols.max(1))) {
            let b = f64::from(*b) * f64::from(lora.scale);
            for (change, &a) in scratch.change.iter_mut().zip(a) {
                *change += b * f64::from(a);
            }
        }
        let merged = scratch.weights.iter().zip(&scratch.change);
        scratch.merged.clear();
        scratch.merged.extend(merged.map(|(&w, &change)| (f64::from(w) + change) as f32));
        blocks::quantize(self.ty, &scratch.merged, out)?;
        blocks::dequantize(self.ty, out, &mut scratch.stored)?;
        let finite = |values: &[f32]| values.iter().position(|x| !x.is_finite());
        // Blocks hold something else instead of what is not finite.
        if let Some(i) = finite(&scratch.merged).or_else(|| finite(&scratch.stored)) {
            let at = |values: &[f32]| values.get(i).copied().unwrap_or(f32::NAN);
            let value = at(&scratch.merged);
            let why = match (value.is_finite(), at(&scratch.weights).is_finite()) {
                (true, _) => {
                    format!("which {} cannot store; choose another `--type`, such as f32", self.ty)
                }
                (false, true) => "which no type can store: the adapter changes it by more than \
                                  numbers go, which no adapter does that was trained to an end; \
                                  look at its alpha, and train it anew at a lower learning rate"
                    .to_string(),
                (false, false) => "since the model does already; fetch it again".to_string(),
            };
            return Err(Error::new(format!(
                "tensor `{}` would hold {value} at row {r}, column {i}, {why}",
                info.name
            )));
        }
        self.steps(out, scratch)?;
        let values = scratch.merged.iter().zip(&scratch.stored);
        for ((change, step), (merged, stored)) in
            scratch.change.iter().zip(&scratch.steps).zip(values)
        {
            sums.change += change * change;
            sums.error += (f64::from(*stored) - f64::from(*merged)).powi(2);
            sums.changed += u64::from(*change != 0.0);
            // Where there are no steps, a group is one value.
            let kept = match *step == 0.0 {
                true => stored == merged,
                false => change.abs() >= f64::from(*step) / 2.0,
            };
            sums.lost += u64::from(*change != 0.0 && !kept);
        }
        Ok(sums)
    }

    /// The distance of neighbouring values at each stored one.
    fn steps(&self, stored: &[u8], scratch: &mut Scratch) -> Result<()> {
        let bits = match self.ty {
            TensorType::F32 => 23,
            TensorType::F16 => 10,
            TensorType::BF16 => 7,
            _ => {
                let blocks = stored.chunks(self.ty.block_bytes());
                for (block, steps) in blocks.zip(scratch.steps.chunks_mut(self.ty.block_len())) {
                    blocks::decode(self.ty, block, &mut scratch.decoded)?;
                    let scales = scratch.decoded.scales();
                    let group = steps.len() / scales.len().max(1);
                    for (steps, scale) in steps.chunks_mut(group.max(1)).zip(scales) {
                        steps.fill(scale.abs());
                    }
                }
                return Ok(());
            }
        };
        let least = if self.ty == TensorType::F16 { -14 } else { -126 };
        for (step, value) in scratch.steps.iter_mut().zip(&scratch.stored) {
            let exponent = (value.to_bits() >> 23 & 0xff) as i32 - 127;
            *step = 2f32.powi(exponent.max(least) - bits);
        }
        Ok(())
    }
}

/// What a thread works with: one row of each.
struct Scratch {
    weights: Vec<f32>,
    change: Vec<f64>,
    merged: Vec<f32>,
    stored: Vec<f32>,
    steps: Vec<f32>,
    decoded: Decoded,
}

impl Scratch {
    fn new(cols: usize) -> Scratch {
        Scratch {
            weights: vec![0.0; cols],
            change: vec![0.0; cols],
            merged: Vec::with_capacity(cols),
            stored: vec![0.0; cols],
            steps: vec![0.0; cols],
            decoded: Decoded::default(),
        }
    }
}
