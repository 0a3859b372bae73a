//! Run folders: what a training run leaves to look at.
//!
//! Knows: what a run folder holds, and how it is shown. Must not know: how training works; what it
//! writes down it is told.
//!
//! A folder holds
//!
//! | file | what |
//! |---|---|
//! | `run.json` | what ran: settings, model, data, machine, plan; how it ended ([`Record`]) |
//! | `metrics.jsonl` | an object a line: every [`Step`], every [`Evaluation`] |
//! | `events.out.tfevents.*` | the same for TensorBoard |
//! | `loss.svg` | the loss and the learning rate over the steps |
//! | `report.html` | one page with all of it |
//! | `run.lock` | is locked while the run goes on |
//!
//! # Examples
//!
//! ```
//! use runs::{End, Evaluation, Planned, RunFolder, RunInfo, State, Step};
//!
//! # fn main() -> runs::Result<()> {
//! # let root = std::env::temp_dir().join(format!("gradus-runs-doc-{}", std::process::id()));
//! let info = RunInfo {
//!     gradus: "0.1.0".into(),
//!     command: "train".into(),
//!     settings: [("rank".to_string(), 8.into()), ("lr".to_string(), 1e-3.into())].into(),
//!     ..RunInfo::default()
//! };
//! let mut run = RunFolder::create(&root, &runs::default_name("facts.gguf".as_ref()), info)?;
//! let mut tell = |error: Option<runs::Error>| {
//!     // Said once; training goes on.
//!     error.into_iter().for_each(|e| eprintln!("{e}; the run goes on without"));
//! };
//! tell(run.planned(Planned { steps: 2, parameters: 1_000, memory: vec![("arena".into(), 1 << 20)] }));
//! for step in 1..=2 {
//!     tell(run.step(&Step {
//!         step,
//!         epoch: 1,
//!         loss: 3.0 / step as f64,
//!         grad_norm: 0.7,
//!         lr: 1e-3,
//!         tokens: 512,
//!         seconds: 2.5,
//!         memory_bytes: None,
//!     }));
//! }
//! tell(run.evaluation(&Evaluation { step: 2, loss: 1.4 }));
//! let path = run.path().to_path_buf();
//! tell(run.finish(End { state: State::Done, moved: Some((14, 14)), ..End::default() }));
//!
//! // Another process, which trains on from a checkpoint of step 1.
//! let mut run = RunFolder::resume(&path, 1)?;
//! assert_eq!(run.history().steps, 1);
//! tell(run.finish(End { state: State::Interrupted, ..End::default() }));
//!
//! let found = runs::list(&root)?;
//! assert!(found.iter().all(|listed| listed.run.is_ok()));
//! # std::fs::remove_dir_all(&root).ok();
//! # Ok(())
//! # }
//! ```
#![deny(clippy::indexing_slicing)]

mod chart;
mod compare;
mod curve;
mod error;
mod events;
mod folder;
mod history;
mod list;
mod metrics;
mod page;
mod record;

pub use compare::Comparison;
pub use curve::{Curve, Point};
pub use error::{Error, Result};
pub use folder::{RunFolder, check_name, default_name};
pub use history::History;
pub use list::{Listed, Run, find, list, read, remove, size};
pub use metrics::{Evaluation, Step};
pub use page::{comparison, plain};
pub use record::{
    DataFile, End, Machine, ModelFile, Planned, Record, Resumed, RunInfo, State, local_time,
};
