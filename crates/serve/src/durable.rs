//! Jobs that outlive the process: what was asked for, and the run's checkpoints, in a folder of
//! the training folder that goes when the job ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use train::Checkpoints;

use crate::engine_loop::Control;
use crate::request::{self, Host};
use crate::run::guarded;
use crate::server::{lock, spawn};
use crate::{Error, Result, Server, TrainJob};

/// The folder of all jobs' folders, inside the training folder.
const JOBS: &str = ".jobs";

/// The folder of the run folders of jobs, inside the training folder.
const RUNS: &str = "runs";

/// The body of the request.
const REQUEST: &str = "request.json";

/// The body of the request of a job that failed.
const FAILED: &str = "failed.json";

/// How many processes have ended while they had taken the job up, and its step then.
const TRIES: &str = "tries";

/// A job that so many processes have ended with, without getting any further, is not taken up
/// again: it may be what ends them.
const MOST_TRIES: u64 = 3;

/// There while the job is to hold.
const PAUSED: &str = "paused";

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

    /// Where it is kept.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.folder.clone(), KEEP)
    }

    /// True where a job that failed was asked for in the same words.
    pub(crate) fn has_failed(&self) -> bool {
        let path = self.folder.join(FAILED);
        let as_long = std::fs::metadata(&path).is_ok_and(|file| file.len() == self.bytes());
        as_long && std::fs::read(&path).is_ok_and(|request| request == self.request)
    }

    /// Takes up such a job anew.
    ///
    /// # Errors
    /// Names the file and what the system said.
    pub(crate) fn begin_again(&self) -> Result<()> {
        for left in [TRIES, PAUSED] {
            let _ = std::fs::remove_file(self.folder.join(left));
        }
        let path = self.folder.join(REQUEST);
        std::fs::rename(self.folder.join(FAILED), &path).map_err(|e| failed(&path, &e))
    }

    /// Says of a job that failed through no fault of its own how it goes on, where there is
    /// something to go on from.
    pub(crate) fn goes_on(&self) -> Option<String> {
        let step = self.checkpoints().newest()?;
        Some(format!("the same request again goes on from the checkpoint of step {step}"))
    }

    /// Writes down what was asked for; from now on the job outlives the process.
    pub(crate) fn begin(&self) -> Result<()> {
        // What an earlier job of this name left has been replaced by this one.
        self.end();
        let path = self.folder.join(REQUEST);
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&self.folder)?;
            files::write(&path, &self.request)
        };
        write().map_err(|e| failed(&path, &e))
    }

    /// The job has failed: its last checkpoint stays, which only the same request takes up.
    pub(crate) fn set_aside(&self) {
        let _ = std::fs::rename(self.folder.join(REQUEST), self.folder.join(FAILED));
    }

    /// The process ends by itself, and not by this job.
    pub(crate) fn outlived(&self) {
        let _ = std::fs::remove_file(self.folder.join(TRIES));
    }

    /// The file that is there while the job is to hold.
    pub(crate) fn pause_mark(&self) -> PathBuf {
        self.folder.join(PAUSED)
    }

    /// The job is over.
    pub(crate) fn end(&self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn failed(path: &Path, e: &std::io::Error) -> Error {
    Error::new(graph::Code::FileFailed, format!("cannot write {}: {e}", path.display()))
}

/// Counts that a job is taken up at `step`, before anything is done for it that could end the
/// process; false when that has led nowhere too often.
fn may_try(folder: &Path, step: u64) -> bool {
    let path = folder.join(TRIES);
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let mut numbers = text.split_whitespace().filter_map(|n| n.parse::<u64>().ok());
    let tries = match (numbers.next(), numbers.next()) {
        (Some(tries), Some(at)) if at == step => tries,
        _ => 0,
    };
    if tries >= MOST_TRIES {
        return false;
    }
    let _ = std::fs::write(&path, format!("{} {step}", tries + 1));
    true
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
///
/// Its place is taken at once, so that nobody who asks for a training run meanwhile gets it; its
/// data are rendered on a thread of its own, which `say`s what became of it, so that the server can
/// answer before that.
///
/// # Errors
/// When there is no thread to be had.
pub fn take_up(server: &Server, host: &Host, say: impl Fn(TakenUp) + Send + 'static) -> Result<()> {
    let Some(dir) = host.train_dir.clone() else { return Ok(()) };
    let entries = std::fs::read_dir(dir.join(JOBS)).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.retain(|name| dir.join(JOBS).join(name).join(REQUEST).is_file());
    names.sort();
    let Some(first) = names.first() else { return Ok(()) };
    let mut place = Some(server.claim_for(first));
    let (host, server) = (host.clone(), server.clone());
    let handle = server.clone();
    let spawned = spawn("taking up", move || {
        for name in names {
            let claimed = place.take().unwrap_or_else(|| server.claim_for(&name));
            let outcome = claimed.and_then(|control| one(&server, &host, &dir, &name, control));
            say(TakenUp { name, outcome });
        }
    });
    spawned.map(|_| ()).inspect_err(|e| handle.failed(e))
}

fn one(server: &Server, host: &Host, dir: &Path, name: &str, control: Arc<Control>) -> Result<u64> {
    let folder = dir.join(JOBS).join(name);
    let mut started = false;
    let taken = counted(&folder, || {
        let job = guarded(|| read(server, host, &folder))?;
        lock(&server.0.registry).room_for(name)?;
        started = true;
        server.start_run(job, control)
    });
    // A run that has started gives its place back itself.
    taken.inspect_err(|e| {
        if !started {
            server.failed(e)
        }
    })
}

/// Does something with a job that may end the process, unless too many have ended there already
/// without the job having got any further.
fn counted<T>(folder: &Path, what: impl FnOnce() -> Result<T>) -> Result<T> {
    // By the names of files: what is in them has ended processes too.
    let step = Checkpoints::new(folder.to_path_buf(), KEEP).newest().unwrap_or(0);
    if !may_try(folder, step) {
        let message = format!(
            "{MOST_TRIES} processes ended with the job at step {step}; remove {} to forget it",
            folder.display()
        );
        return Err(Error::new(graph::Code::Internal, message));
    }
    // Who is told that it failed has outlived it.
    what().inspect_err(|_| drop(std::fs::remove_file(folder.join(TRIES))))
}

/// What was asked for, with its data.
fn read(server: &Server, host: &Host, folder: &Path) -> Result<TrainJob> {
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
    let mut job = request::train(&body, host, &|| server.is_ready())?;
    if let Some(durable) = &mut job.durable {
        durable.resume = true;
    }
    Ok(job)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// A panic stands for what ends a process: nothing is done after it.
    #[test]
    fn a_job_that_ends_its_processes_is_left_alone_from_its_first_word_on() {
        let folder = std::env::temp_dir().join(format!("gradus-tries-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let dies = || catch_unwind(AssertUnwindSafe(|| counted::<()>(&folder, || panic!("dead"))));
        // Who is told why it fails does not count, nor do those before it.
        for _ in 0..MOST_TRIES - 1 {
            assert!(dies().is_err());
        }
        for _ in 0..2 * MOST_TRIES {
            let failed = Error::new(graph::Code::RunInProgress, "later");
            let e = counted::<()>(&folder, || Err(failed.clone())).unwrap_err();
            assert_eq!(e, failed);
        }
        for _ in 0..MOST_TRIES {
            assert!(dies().is_err());
        }
        let e = counted(&folder, || Ok(())).unwrap_err();
        assert!(e.message.contains("3 processes ended with the job at step 0"), "{e}");
        // One that got further is as new.
        std::fs::write(folder.join("step-00000004.safetensors"), b"").unwrap();
        counted(&folder, || Ok(())).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
