//! Checkpoints: all that a run is at between two steps, in a file that appears whole or not at all.
//!
//! The file is safetensors: `value/NAME`, `moment0/NAME`, `moment1/NAME` and `best/NAME` for each
//! parameter, and under the metadata key `gradus.checkpoint` a JSON object with everything else.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use safetensors::tensor::SafeTensors;
use serde_json::{Map, Value, json};

use crate::moved::Moved;
use crate::{Error, Example, Result};

/// The version of the files written here.
const VERSION: u64 = 4;

/// The metadata key of everything that is no tensor.
const KEY: &str = "gradus.checkpoint";

/// The file in a folder of checkpoints that its run has locked. Where it is, the folder has been
/// claimed by a run before: what is called like a checkpoint there is one.
const LOCK: &str = "gradus.lock";

/// The file in a folder of checkpoints that says where the run is recorded.
const RECORD: &str = "gradus.run";

/// Longest header of a file of tensors, in bytes, as the format has it.
const LONGEST_HEADER: u64 = 100_000_000;

/// What two runs must have in common for one to go on where the other stopped.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Identity {
    pub(crate) settings: Map<String, Value>,
    /// Of the adapter it went on with, see [`digest_start`]; a fresh one follows from the settings.
    pub(crate) start: Option<u64>,
    pub(crate) data: u64,
    pub(crate) model: u64,
    pub(crate) family: String,
    /// Of the arithmetic, see [`graph::NUMERICS`].
    pub(crate) numerics: u64,
}

/// How far a run has come.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Cursor {
    pub(crate) steps: u64,
    pub(crate) first_step: u64,
    /// Epoch and window that come next.
    pub(crate) next: (usize, usize),
    pub(crate) epoch_loss: (f64, f64),
    pub(crate) last_loss: f64,
    /// Step, loss, evaluations since.
    pub(crate) best: Option<(u64, f64, u64)>,
    /// An evaluation of the last step is due, which is not the one after an epoch.
    pub(crate) due: bool,
    pub(crate) moved: Moved,
}

/// All that a run is at between two steps: it goes on from here bit for bit.
#[derive(Clone, PartialEq, Debug)]
pub struct Snapshot {
    identity: Identity,
    cursor: Cursor,
    tensors: BTreeMap<String, Vec<f32>>,
}

/// The tensors of a snapshot, to be taken out by name.
pub(crate) struct Tensors(BTreeMap<String, Vec<f32>>);

impl Tensors {
    /// # Errors
    /// When it is missing or of another length.
    pub(crate) fn take(&mut self, part: &str, name: &str, len: usize) -> Result<Vec<f32>> {
        let name = format!("{part}/{name}");
        match self.0.remove(&name) {
            Some(values) if values.len() == len => Ok(values),
            Some(values) => Err(Error::Setting(format!(
                "the checkpoint's `{name}` has {} numbers, the run needs {len}",
                values.len()
            ))),
            None => Err(Error::Setting(format!("the checkpoint has no tensor `{name}`"))),
        }
    }
}

/// A hash of examples, of those that are held out apart, to tell other data by: FNV-1a (Fowler, Noll & Vo).
pub(crate) fn digest(parts: [&[Example]; 2]) -> u64 {
    let mut hash = model::Fnv::default();
    for examples in parts {
        hash.add(&(examples.len() as u64).to_le_bytes());
        for example in examples {
            hash.add(&(example.tokens.len() as u64).to_le_bytes());
            hash.add(bytemuck::cast_slice(&example.tokens));
            hash.add(bytemuck::cast_slice(&example.weights));
        }
    }
    hash.finish()
}

/// A hash of the adapter that a run goes on with, its scales, which no checkpoint holds, and the
/// moments that moved it so far.
pub(crate) fn digest_start(adapter: &model::Adapter, optimizer: &crate::Optimizer) -> u64 {
    let mut hash = model::Fnv::default();
    for (name, pair) in &adapter.tensors {
        hash.add(name.as_bytes());
        hash.add(&(pair.rank as u64).to_le_bytes());
        hash.add(&pair.scale.to_bits().to_le_bytes());
        hash.add(bytemuck::cast_slice(&pair.a));
        hash.add(bytemuck::cast_slice(&pair.b));
    }
    hash.add(&optimizer.steps.to_le_bytes());
    for (name, moments) in &optimizer.moments {
        hash.add(name.as_bytes());
        moments.iter().for_each(|moment| hash.add(bytemuck::cast_slice(moment)));
    }
    hash.finish()
}

impl Snapshot {
    pub(crate) fn new(identity: Identity, cursor: Cursor) -> Snapshot {
        Snapshot { identity, cursor, tensors: BTreeMap::new() }
    }

    /// Adds the next piece of a parameter's values, a moment or the best values (`part`), of `len`
    /// numbers in all.
    pub(crate) fn add(&mut self, part: &str, name: &str, piece: &[f32], len: usize) {
        let tensor = self.tensors.entry(format!("{part}/{name}"));
        tensor.or_insert_with(|| Vec::with_capacity(len)).extend_from_slice(piece);
    }

    /// Adds a moment, which it takes.
    pub(crate) fn give(&mut self, moment: usize, name: &str, values: Vec<f32>) {
        self.tensors.insert(format!("moment{moment}/{name}"), values);
    }

    /// Optimizer steps of the run before it.
    pub fn steps(&self) -> u64 {
        self.cursor.steps - self.cursor.first_step.min(self.cursor.steps)
    }

    /// The kernel family it was made with.
    pub fn family(&self) -> &str {
        &self.identity.family
    }

    /// What it holds, if it is of the run that asks; with `any_bits` also if it came to its bits by
    /// other kernels or another arithmetic.
    pub(crate) fn of(self, run: &Identity, any_bits: bool) -> Result<(Cursor, Tensors)> {
        let Identity { settings, start, data, model, family, numerics } = &self.identity;
        let differs = |what: &str| {
            Err(Error::Setting(format!(
                "the checkpoint is of {what}; give the same, or start anew without it"
            )))
        };
        if *model != run.model {
            return differs("another model");
        }
        // What others are settings of comes first.
        let first = "optimizer".to_string();
        let names = std::iter::once(&first).chain(settings.keys()).chain(run.settings.keys());
        for name in names {
            let (then, now) = (settings.get(name), run.settings.get(name));
            if then != now {
                let shown = |v: Option<&Value>| v.map_or("unset".into(), ToString::to_string);
                return differs(&format!(
                    "a run with `{name}` {}, this one has {}",
                    shown(then),
                    shown(now)
                ));
            }
        }
        match (start, run.start) {
            (Some(_), None) => {
                return differs("a run that went on with an adapter (`from`), this one has none");
            }
            (None, Some(_)) => {
                return differs(
                    "a run without an adapter to go on with, this one has one (`from`)",
                );
            }
            (Some(then), Some(now)) if *then != now => {
                return differs("a run that went on with another adapter (`from`)");
            }
            _ => {}
        }
        if *data != run.data {
            return differs("other data");
        }
        if *family != run.family && !any_bits {
            return differs(&format!(
                "a run with `{family}` kernels, these are `{}`, whose results differ in their last \
                 bits",
                run.family
            ));
        }
        if *numerics != run.numerics && !any_bits {
            return Err(Error::Setting(format!(
                "the checkpoint is of a run by a build whose arithmetic has the number {numerics}, \
                 that of this one has {}, and results differ in their last bits; go on with that \
                 build, or start anew without it",
                run.numerics
            )));
        }
        Ok((self.cursor, Tensors(self.tensors)))
    }

    fn header(&self) -> Value {
        let Identity { settings, start, data, model, family, numerics } = &self.identity;
        let Cursor { steps, first_step, next, epoch_loss, last_loss, best, due, moved } =
            &self.cursor;
        // Floats by their bits: a decimal need not come back the same.
        let bits = |v: f64| v.to_bits();
        json!({
            "version": VERSION,
            "settings": settings,
            "start": start,
            "data": data,
            "model": model,
            "family": family,
            "numerics": numerics,
            "steps": steps,
            "first_step": first_step,
            "next": [next.0, next.1],
            "epoch_loss": [bits(epoch_loss.0), bits(epoch_loss.1)],
            "last_loss": bits(*last_loss),
            "best": best.map(|(step, loss, since)| [step, bits(loss), since]),
            "due": due,
            "moved": moved.to_json(),
        })
    }

    fn parse(header: &Value) -> Option<(Identity, Cursor)> {
        let number = |name: &str| header.get(name)?.as_u64();
        let list = |name: &str, n: usize| -> Option<Vec<u64>> {
            let list: Option<Vec<u64>> =
                header.get(name)?.as_array()?.iter().map(Value::as_u64).collect();
            list.filter(|l| l.len() == n)
        };
        let identity = Identity {
            settings: header.get("settings")?.as_object()?.clone(),
            start: match header.get("start")? {
                Value::Null => None,
                start => Some(start.as_u64()?),
            },
            data: number("data")?,
            model: number("model")?,
            family: header.get("family")?.as_str()?.to_string(),
            numerics: number("numerics")?,
        };
        let (next, sums) = (list("next", 2)?, list("epoch_loss", 2)?);
        let best = match header.get("best")? {
            Value::Null => None,
            _ => Some(list("best", 3)?),
        };
        let at = |list: &[u64], i: usize| list.get(i).copied().unwrap_or(0);
        let float = |list: &[u64], i: usize| f64::from_bits(at(list, i));
        let cursor = Cursor {
            steps: number("steps")?,
            first_step: number("first_step")?,
            next: (usize::try_from(at(&next, 0)).ok()?, usize::try_from(at(&next, 1)).ok()?),
            epoch_loss: (float(&sums, 0), float(&sums, 1)),
            last_loss: f64::from_bits(number("last_loss")?),
            best: best.map(|b| (at(&b, 0), float(&b, 1), at(&b, 2))),
            due: header.get("due")?.as_bool()?,
            moved: Moved::parse(header.get("moved")?)?,
        };
        Some((identity, cursor))
    }

    /// Writes it to a file, which appears whole or not at all.
    ///
    /// # Errors
    /// Names the file and what the system said.
    pub fn write(&self, path: &Path) -> Result<()> {
        files::write_with(path, |out| self.write_to(out)).map_err(|e| {
            let advice = files::advice(e.kind());
            Error::File(format!("cannot write {}: {e}; {advice}", path.display()))
        })
    }

    /// Writes it as safetensors: the length of the header, the header as JSON, the numbers. The
    /// package of that name would make a copy of all, or a temporary file of its own that a killed
    /// process leaves for good.
    fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({ KEY: self.header().to_string() }));
        let mut at = 0;
        for (name, values) in &self.tensors {
            let end = at + size_of_val(values.as_slice());
            let place =
                json!({ "dtype": "F32", "shape": [values.len()], "data_offsets": [at, end] });
            header.insert(name.clone(), place);
            at = end;
        }
        let mut header = serde_json::to_vec(&header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        self.tensors.values().try_for_each(|values| out.write_all(bytemuck::cast_slice(values)))
    }

    /// Reads one.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn read(path: &Path) -> Result<Snapshot> {
        let wrong = |what: &dyn std::fmt::Display| {
            Error::File(format!("{}: no checkpoint: {what}", path.display()))
        };
        let bytes = std::fs::read(path).map_err(|e| wrong(&e))?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| wrong(&e))?;
        let header = metadata.metadata().as_ref().and_then(|m| m.get(KEY));
        let header = header.ok_or_else(|| wrong(&format!("it has no key `{KEY}`")))?;
        let header: Value = serde_json::from_str(header).map_err(|e| wrong(&e))?;
        let version = header.get("version").and_then(Value::as_u64);
        if version != Some(VERSION) {
            let shown = version.map_or("none".to_string(), |v| v.to_string());
            return Err(wrong(&format!(
                "its version is {shown}, expected {VERSION}; go on with the build that wrote it, or \
                 start anew without it"
            )));
        }
        let parsed = Snapshot::parse(&header);
        let (identity, cursor) = parsed
            .ok_or_else(|| wrong(&format!("its `{KEY}` lacks a field or has a wrong one")))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| wrong(&e))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            if view.dtype() != safetensors::Dtype::F32 {
                return Err(wrong(&format!("tensor `{name}` is {:?}, not F32", view.dtype())));
            }
            let values = view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b));
            tensors.insert(name, values.collect());
        }
        Ok(Snapshot { identity, cursor, tensors })
    }
}

/// A path as it is: where names are bytes, they need not be text.
#[cfg(unix)]
fn to_bytes(path: &Path) -> Vec<u8> {
    std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).to_vec()
}

#[cfg(unix)]
fn from_bytes(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes))
}

#[cfg(not(unix))]
fn to_bytes(path: &Path) -> Vec<u8> {
    path.to_string_lossy().into_owned().into_bytes()
}

#[cfg(not(unix))]
fn from_bytes(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(String::from_utf8_lossy(&bytes).into_owned())
}

/// The checkpoints of a run: a folder of files `step-NNNNNNNN.safetensors`, of which the last few
/// are kept.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

impl Checkpoints {
    /// Those in a folder, which is made when the first is written; the last `keep` (at least 1)
    /// stay.
    pub fn new(folder: PathBuf, keep: usize) -> Checkpoints {
        Checkpoints { folder, keep: keep.max(1) }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Notes where the run is recorded, in the folder, which must be there.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn remember_record(&self, record: &Path) -> std::io::Result<()> {
        let path = std::path::absolute(record)?;
        files::write(&self.folder.join(RECORD), &to_bytes(&path))
    }

    /// Where the run is recorded, if that was noted.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn record(&self) -> std::io::Result<Option<PathBuf>> {
        match std::fs::read(self.folder.join(RECORD)) {
            Ok(bytes) => Ok(Some(from_bytes(bytes))),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Files by their names and their steps, first to last.
    fn files(&self) -> Vec<(u64, PathBuf)> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let named = entries.filter_map(|e| Some((step_of(&e.file_name())?, e.path())));
        let mut files: Vec<_> = named.collect();
        files.sort();
        files
    }

    /// Whether a run may use the folder, which need not be there: what is called like a checkpoint
    /// in it is one. What is called otherwise is nobody's business here, and stays.
    ///
    /// # Errors
    /// Names a file that is none.
    pub fn check(&self) -> Result<()> {
        if self.folder.join(LOCK).exists() {
            return Ok(());
        }
        match self.files().into_iter().find(|(_, path)| !is_checkpoint(path)) {
            None => Ok(()),
            Some((_, path)) => Err(Error::Setting(format!(
                "{} is called like a checkpoint and is none that can be read; choose another \
                 folder for checkpoints, or move it away",
                path.display()
            ))),
        }
    }

    /// The folder that those of an earlier run are moved to.
    fn old(&self) -> Result<Checkpoints> {
        // `.` has no name to put something behind.
        let folder = match self.folder.file_name() {
            Some(_) => self.folder.clone(),
            None => self.folder.canonicalize().map_err(|e| self.failed(e))?,
        };
        let mut old = folder.into_os_string();
        old.push(".old");
        Ok(Checkpoints::new(PathBuf::from(old), self.keep))
    }

    fn failed(&self, e: std::io::Error) -> Error {
        Error::File(format!("cannot use the folder {}: {e}", self.folder.display()))
    }

    /// Takes the folder for a run, which has it until the lock is dropped. Where the run does not
    /// go on from a checkpoint, those of an earlier one are moved to a folder of the same name with
    /// `.old` behind it, which is given back: steps of two runs are not told apart by their files.
    ///
    /// # Errors
    /// As [`Checkpoints::check`]; when another process has the folder, or it cannot be made or its
    /// files moved.
    pub fn claim(&self, goes_on: bool) -> Result<(files::Lock, Option<PathBuf>)> {
        self.check()?;
        let path = self.folder.join(LOCK);
        // A run that has just ended may have removed it again.
        let lock = loop {
            std::fs::create_dir_all(&self.folder).map_err(|e| self.failed(e))?;
            let lock = files::Lock::take(&path).map_err(|e| self.failed(e))?.ok_or_else(|| {
                Error::File(format!(
                    "another run writes its checkpoints to {}; wait for its end, or choose another \
                     folder",
                    self.folder.display()
                ))
            })?;
            if path.exists() {
                break lock;
            }
        };
        let earlier = self.files();
        if goes_on || earlier.is_empty() {
            return Ok((lock, None));
        }
        let old = self.old()?;
        old.check()?;
        old.clear();
        let moved = || -> std::io::Result<()> {
            std::fs::create_dir_all(&old.folder)?;
            File::create(old.folder.join(LOCK))?;
            for (_, from) in &earlier {
                std::fs::rename(from, old.folder.join(from.file_name().unwrap_or_default()))?;
            }
            Ok(())
        };
        moved().map_err(|e| old.failed(e))?;
        // Where the record of the earlier run is.
        let _ = std::fs::rename(self.folder.join(RECORD), old.folder.join(RECORD));
        Ok((lock, Some(old.folder)))
    }

    /// Removes what processes left that were killed while they wrote.
    fn sweep(&self) {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for entry in entries.filter(|e| is_partial(&e.file_name())) {
            let _ = std::fs::remove_file(entry.path());
        }
    }

    /// Writes a snapshot, then removes the oldest beyond those that are kept.
    ///
    /// # Errors
    /// Names the file and what the system said; earlier checkpoints are as they were.
    pub fn write(&self, snapshot: &Snapshot) -> Result<PathBuf> {
        std::fs::create_dir_all(&self.folder).map_err(|e| self.failed(e))?;
        self.sweep();
        let path = self.folder.join(format!("step-{:08}.safetensors", snapshot.steps()));
        snapshot.write(&path)?;
        let files = self.files();
        for (_, old) in files.iter().take(files.len().saturating_sub(self.keep)) {
            let _ = std::fs::remove_file(old);
        }
        Ok(path)
    }

    /// The step of the last checkpoint, by its name alone: it may be damaged.
    pub fn newest(&self) -> Option<u64> {
        self.files().last().map(|(step, _)| *step)
    }

    /// The settings of the run they are of, by name, as the last one has them whose header can be
    /// read.
    pub fn settings(&self) -> Option<Map<String, Value>> {
        let settings = |path: &Path| -> Option<Map<String, Value>> {
            let about: Value = serde_json::from_str(&about(path)?).ok()?;
            about.get("settings")?.as_object().cloned()
        };
        self.files().iter().rev().find_map(|(_, path)| settings(path))
    }

    /// The last checkpoint, if there is any, and its file. One that is damaged is passed over for
    /// the one before it.
    ///
    /// # Errors
    /// When there are some and all are damaged: the last one's fault.
    pub fn last(&self) -> Result<Option<(Snapshot, PathBuf)>> {
        let mut first_error = None;
        for (_, path) in self.files().into_iter().rev() {
            match Snapshot::read(&path) {
                Ok(snapshot) => return Ok(Some((snapshot, path))),
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        first_error.map_or(Ok(None), Err)
    }

    /// The last undamaged one of fewer than so many steps: the step after it is known to be finite
    /// where a later one was begun.
    pub fn before(&self, steps: u64) -> Option<Snapshot> {
        let earlier = self.files().into_iter().rev().filter(|(step, _)| *step < steps);
        earlier.map(|(_, path)| Snapshot::read(&path)).find_map(Result::ok)
    }

    /// Removes them all and what a run has beside them, and the folder when it is empty then.
    pub fn clear(&self) {
        self.sweep();
        for (_, path) in self.files() {
            let _ = std::fs::remove_file(path);
        }
        let _ = std::fs::remove_file(self.folder.join(RECORD));
        let _ = std::fs::remove_file(self.folder.join(LOCK));
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// The step of a checkpoint, by the name of its file.
fn step_of(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_prefix("step-")?.strip_suffix(".safetensors")?;
    let digits = Some(digits).filter(|d| d.len() >= 8 && d.bytes().all(|b| b.is_ascii_digit()));
    digits?.parse().ok()
}

/// Whether a file has the name of a checkpoint that is being written.
fn is_partial(name: &OsStr) -> bool {
    let inner = || name.to_str()?.strip_prefix('.')?.strip_suffix(".tmp");
    // The end of the checkpoint's own name may be followed by something.
    let whole = |inner: &str| inner.find(".safetensors").map(|at| at + ".safetensors".len());
    inner().is_some_and(|inner| {
        let name = whole(inner).and_then(|end| inner.get(..end));
        name.is_some_and(|name| step_of(OsStr::new(name)).is_some())
    })
}

/// Whether the header of a file says that it is a checkpoint.
fn is_checkpoint(path: &Path) -> bool {
    about(path).is_some()
}

/// What is no tensor, of a file whose header says that it is a checkpoint.
fn about(path: &Path) -> Option<String> {
    let header = || -> std::io::Result<Vec<u8>> {
        if !std::fs::metadata(path)?.is_file() {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let mut file = File::open(path)?;
        let mut len = [0; 8];
        file.read_exact(&mut len)?;
        let mut header = Vec::new();
        file.take(u64::from_le_bytes(len).min(LONGEST_HEADER)).read_to_end(&mut header)?;
        Ok(header)
    };
    let header: Value = serde_json::from_slice(&header().ok()?).ok()?;
    Some(header.get("__metadata__")?.get(KEY)?.as_str()?.to_string())
}
