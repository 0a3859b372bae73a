//! Jobs that outlive the process: what was asked for, and the run's checkpoints, in a folder of
//! the training folder that goes when the job ends.

use std::path::{Path, PathBuf};

use train::Checkpoints;

use crate::request::{self, Host};
use crate::{Error, Result, Server};

/// The folder of all jobs' folders, inside the training folder.
const JOBS: &str = ".jobs";

/// The folder of the run folders of jobs, inside the training folder.
const RUNS: &str = "runs";

/// The body of the request.
const REQUEST: &str = "request.json";

/// The body of the request of a job that failed.
const FAILED: &str = "failed.json";

/// How often a job was taken up, and the step it was taken up at last.
const TRIES: &str = "tries";

/// A job that was taken up so often without getting any further is not taken up again: it may be
/// what ends the process.
const MOST_TRIES: u64 = 3;

/// How many checkpoints stay.
const KEEP: usize = 2;

/// What makes a job outlive the process.
#[derive(Clone, Debug)]
pub struct Durable {
    request: Vec<u8>,
    folder: PathBuf,
    /// Where the folders of runs are, of which each job has one.
    pub(crate) runs: PathBuf,
    /// Steps from one checkpoint to the next.
    pub every: u64,
    /// Go on from the last checkpoint.
    pub(crate) resume: bool,
}

impl Durable {
    pub(crate) fn new(train_dir: &Path, name: &str, request: &[u8], every: u64) -> Durable {
        let folder = train_dir.join(JOBS).join(name);
        let runs = train_dir.join(RUNS);
        Durable { request: request.to_vec(), folder, runs, every, resume: false }
    }

    /// Bytes of the request.
    pub(crate) fn bytes(&self) -> u64 {
        self.request.len() as u64
    }

    pub(crate) fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.folder.clone(), KEEP)
    }

    /// Writes down what was asked for; from now on the job outlives the process.
    pub(crate) fn begin(&self) -> Result<()> {
        if self.resume {
            return Ok(());
        }
        // What an earlier job of this name left has been replaced by this one.
        self.end();
        let path = self.folder.join(REQUEST);
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&self.folder)?;
            files::write(&path, &self.request)
        };
        write().map_err(|e| failed(&path, &e))
    }

    /// The job has failed: its last checkpoint stays, but nobody takes it up.
    pub(crate) fn set_aside(&self) {
        let _ = std::fs::rename(self.folder.join(REQUEST), self.folder.join(FAILED));
    }

    /// The job is over.
    pub(crate) fn end(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(graph::Code::FileFailed, format!("cannot write {}: {e}", path.display()))
}

/// Counts that a job is taken up at `step`; false when that has led nowhere too often.
fn may_try(folder: &Path, step: u64) -> bool {
    let path = folder.join(TRIES);
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let mut numbers = text.split_whitespace().filter_map(|n| n.parse::<u64>().ok());
    let tries = match (numbers.next(), numbers.next()) {
        (Some(tries), Some(at)) if at == step => tries,
        _ => 0,
    };
    let _ = std::fs::write(&path, format!("{} {step}", tries.saturating_add(1)));
    tries < MOST_TRIES
}

/// What became of a job that an earlier process left behind.
#[derive(Debug)]
pub struct TakenUp {
    /// Its name.
    pub name: String,
    /// The step it goes on from, or why it does not.
    pub outcome: Result<u64>,
}

/// Takes up the job that an earlier process left behind, from its last checkpoint. There is at
/// most one, since one runs at a time; what cannot be taken up stays as it is.
pub fn take_up(server: &Server, host: &Host) -> Vec<TakenUp> {
    let Some(dir) = &host.train_dir else { return Vec::new() };
    let entries = std::fs::read_dir(dir.join(JOBS)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.retain(|name| dir.join(JOBS).join(name).join(REQUEST).is_file());
    names.sort();
    let take = |name: String| {
        let outcome = one(server, host, dir, &name);
        TakenUp { name, outcome }
    };
    names.into_iter().map(take).collect()
}

fn one(server: &Server, host: &Host, dir: &Path, name: &str) -> Result<u64> {
    let folder = dir.join(JOBS).join(name);
    let path = folder.join(REQUEST);
    let unreadable = |e: std::io::Error| {
        let message = format!("cannot read {}: {e}", path.display());
        Error::new(graph::Code::FileFailed, message)
    };
    let most = request::MAX_TRAIN_BODY as u64;
    if std::fs::metadata(&path).map_err(unreadable)?.len() > most {
        let message = format!("{} is longer than a request may be", path.display());
        return Err(Error::new(graph::Code::InvalidInput, message));
    }
    let body = std::fs::read(&path).map_err(unreadable)?;
    let mut job = request::train(&body, host, &|| true)?;
    let last = Checkpoints::new(folder.clone(), KEEP).last()?;
    let step = last.map_or(0, |(snapshot, _)| snapshot.steps());
    if !may_try(&folder, step) {
        let message = format!(
            "the job was taken up {MOST_TRIES} times at step {step} and got no further; remove {} \
             to forget it",
            folder.display()
        );
        return Err(Error::new(graph::Code::Internal, message));
    }
    if let Some(durable) = &mut job.durable {
        durable.resume = true;
    }
    server.train(job)?;
    Ok(step)
}
