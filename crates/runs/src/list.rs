//! The runs of a folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Context, Error, Result};
use crate::folder::{METRICS, is_running};
use crate::history::History;
use crate::metrics;
use crate::record::{Record, State};

/// A run as it was found.
#[derive(Clone, Debug)]
pub struct Run {
    /// The name of its folder.
    pub name: String,
    /// Its folder.
    pub path: PathBuf,
    /// What ran and how it ended. A run whose process is gone without a word is
    /// [`State::Interrupted`].
    pub record: Record,
    /// What was measured.
    pub history: History,
}

/// A folder in the place of runs.
#[derive(Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its path.
    pub path: PathBuf,
    /// The run in it, or why it is none.
    pub run: Result<Run>,
}

/// Every run in `root`, newest first, then what cannot be read. There need be no `root`.
///
/// # Errors
/// Only when the system does not let `root` be read.
pub fn list(root: &Path) -> Result<Vec<Listed>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(root) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(found),
        entries => entries.during("read", root)?,
    };
    for entry in entries {
        let path = entry.during("read", root)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') {
            found.push(Listed { run: read(&path), name, path });
        }
    }
    let started = |listed: &Listed| listed.run.as_ref().ok().map(|run| run.record.started);
    found.sort_by(|a, b| started(b).cmp(&started(a)).then_with(|| b.name.cmp(&a.name)));
    Ok(found)
}

/// The run in a folder.
///
/// # Errors
/// [`Error::Io`] and [`Error::Damaged`].
pub fn read(path: &Path) -> Result<Run> {
    let mut record = Record::read(path)?;
    if record.end.state == State::Running && !is_running(path) {
        record.end.state = State::Interrupted;
        record.end.message = Some("its process ended without a word".into());
    }
    let mut history = History::default();
    metrics::read(&path.join(METRICS), &mut |line| history.add(line))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Run { name, path: path.to_path_buf(), record, history })
}

/// The folder called `name` in `root`.
///
/// # Errors
/// [`Error::Missing`], which says what there is.
pub fn find(root: &Path, name: &str) -> Result<PathBuf> {
    let path = root.join(name);
    let is_one_name = Path::new(name).file_name().is_some_and(|last| last == name);
    if is_one_name && path.is_dir() {
        return Ok(path);
    }
    let mut known: Vec<String> = list(root)?.into_iter().map(|listed| listed.name).collect();
    let more = known.len().saturating_sub(5);
    known.truncate(5);
    let known = match (known.is_empty(), more) {
        (true, _) => "there are none".to_string(),
        (false, 0) => format!("there are {}", known.join(", ")),
        (false, more) => format!("there are {} and {more} more", known.join(", ")),
    };
    Err(Error::Missing { name: name.to_string(), root: root.to_path_buf(), known })
}

/// Removes a run folder with all that is in it.
///
/// # Errors
/// [`Error::Running`] for a run that goes on, [`Error::Damaged`] for a folder that never was
/// a run's, and what the system refuses.
pub fn remove(path: &Path) -> Result<()> {
    if is_running(path) {
        return Err(Error::Running { path: path.to_path_buf() });
    }
    let is_ours = [crate::record::FILE, METRICS].iter().any(|file| path.join(file).exists());
    if !is_ours {
        let reason = "it has neither run.json nor metrics.jsonl, so it is no run's and stays";
        return Err(Error::damaged(path, reason));
    }
    fs::remove_dir_all(path).during("remove", path)
}

/// The number of files in a folder and those below it, and their bytes.
///
/// # Errors
/// What the system refuses.
pub fn size(path: &Path) -> Result<(u64, u64)> {
    let (mut files, mut bytes) = (0u64, 0u64);
    let mut folders = vec![path.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).during("read", &folder)? {
            let entry = entry.during("read", &folder)?;
            let meta = entry.metadata().during("read", &entry.path())?;
            if meta.is_dir() {
                folders.push(entry.path());
            } else {
                files += 1;
                bytes = bytes.saturating_add(meta.len());
            }
        }
    }
    Ok((files, bytes))
}
