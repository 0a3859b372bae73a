//! `run.json`: what ran, on what, and how it ended.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Context, Error, Result};

/// Name of the file in a run folder.
pub(crate) const FILE: &str = "run.json";
/// The version of what the file holds. A later one is refused; fields may come without one.
const SCHEMA: u32 = 1;
/// Bytes the file may have.
const LIMIT: u64 = 16 << 20;

/// What runs, as the command that starts it knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunInfo {
    /// Version of Gradus.
    pub gradus: String,
    /// The command, such as `train`.
    pub command: String,
    /// Its settings by name, as they came to be, defaults included.
    pub settings: BTreeMap<String, Value>,
    /// The model it trains on.
    pub model: ModelFile,
    /// The files it trains and is evaluated on.
    pub data: Vec<DataFile>,
    /// The files it writes: an adapter, a model.
    pub outputs: Vec<String>,
    /// What computes.
    pub machine: Machine,
}

/// A model's file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelFile {
    /// What people call it: its name in the catalogue, else its file's.
    pub name: String,
    /// The path.
    pub file: String,
    /// Bytes of the file.
    pub bytes: u64,
}

/// A file of training or held-out data.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataFile {
    /// What it is for, such as `train` or `eval`.
    pub role: String,
    /// The path.
    pub file: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// Numbers about it by name, such as `rows`, `tokens`, `trained tokens`.
    pub facts: BTreeMap<String, u64>,
}

/// What computes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// Family of kernels, such as `avx512`.
    pub kernels: String,
    /// Threads.
    pub threads: u64,
}

/// What was planned before the first step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Planned {
    /// Optimizer steps.
    pub steps: u64,
    /// Numbers that are trained.
    pub parameters: u64,
    /// Bytes by what for; their sum is the plan.
    pub memory: Vec<(String, u64)>,
}

impl Planned {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.memory.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }
}

/// Where a run is.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It is going on.
    #[default]
    Running,
    /// It took all its steps.
    Done,
    /// It ended itself early, such as when held-out data no longer got better.
    Stopped,
    /// Somebody ended it, or its process is gone.
    Interrupted,
    /// It broke.
    Failed,
}

impl State {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Done => "done",
            State::Stopped => "stopped",
            State::Interrupted => "interrupted",
            State::Failed => "failed",
        }
    }
}

/// How a run ended, and what it came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct End {
    /// Anything but [`State::Running`].
    pub state: State,
    /// Why, where there is more to say than the state does: an error in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// How many of the trained tensors have moved, and how many there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved: Option<(u64, u64)>,
    /// The most memory the process had, in bytes, to hold against the plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<u64>,
}

/// That a run went on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    /// When.
    pub at: Timestamp,
    /// After which step.
    pub step: u64,
}

/// All of `run.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What runs.
    #[serde(flatten)]
    pub info: RunInfo,
    /// What was planned, once it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<Planned>,
    /// When it started.
    pub started: Timestamp,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
    /// Each time it went on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resumed: Vec<Resumed>,
    /// Where it is, and how it ended.
    #[serde(flatten)]
    pub end: End,
    /// Which steps' numbers are missing, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unrecorded: Option<String>,
}

#[derive(Serialize)]
struct Versioned<'a> {
    schema: u32,
    #[serde(flatten)]
    record: &'a Record,
}

impl Record {
    pub(crate) fn new(info: RunInfo) -> Record {
        Record {
            info,
            planned: None,
            started: now(),
            ended: None,
            resumed: Vec::new(),
            end: End::default(),
            unrecorded: None,
        }
    }

    /// Reads the record of a run folder.
    ///
    /// # Errors
    /// [`Error::Io`] and, where a key is not as it should be, [`Error::Damaged`].
    pub(crate) fn read(folder: &Path) -> Result<Record> {
        let path = folder.join(FILE);
        let bytes = fs::metadata(&path).during("read", &path)?.len();
        if bytes > LIMIT {
            return Err(Error::damaged(&path, format!("{bytes} bytes, expected {LIMIT} at most")));
        }
        let bytes = fs::read(&path).during("read", &path)?;
        let value: Value = serde_json::from_slice(&bytes)
            .map_err(|e| Error::damaged(&path, format!("it is no JSON: {e}")))?;
        let schema = value.get("schema").and_then(Value::as_u64);
        match schema {
            Some(n) if n == u64::from(SCHEMA) => {}
            Some(n) if n > u64::from(SCHEMA) => {
                let reason = format!("schema {n} is of a later Gradus; this one knows {SCHEMA}");
                return Err(Error::damaged(&path, reason));
            }
            _ => return Err(Error::damaged(&path, format!("`schema`: expected {SCHEMA}"))),
        }
        // From the bytes again: so an error has its place in the file.
        serde_json::from_slice(&bytes).map_err(|e| Error::damaged(&path, e.to_string()))
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let path = folder.join(FILE);
        let versioned = Versioned { schema: SCHEMA, record: self };
        let mut bytes = serde_json::to_vec_pretty(&versioned)
            .map_err(|e| Error::damaged(&path, e.to_string()))?;
        bytes.push(b'\n');
        files::write(&path, &bytes).during("write", &path)
    }
}

/// Now, as exact as people care for.
pub(crate) fn now() -> Timestamp {
    let now = Timestamp::now();
    now.round(jiff::Unit::Millisecond).unwrap_or(now)
}

/// A point in time as people here write it: `2026-11-30 03:04`.
pub fn local_time(at: Timestamp) -> String {
    at.to_zoned_datetime(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M").to_string()
}
