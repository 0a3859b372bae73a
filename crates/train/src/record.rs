//! A run's folder, filled from what the run reports.

use std::collections::BTreeMap;
use std::path::Path;

use runs::{End, Error, Evaluation, Planned, RunFolder, RunInfo, State, Step};
use serde_json::{Value, json};

use crate::{Checkpoints, Event, Example, TrainConfig};

/// A run whose record begins or goes on.
pub struct Recorded<'a> {
    /// The folder of run folders.
    pub root: &'a Path,
    /// The name of a new folder, to which a number is added where it is taken.
    pub name: &'a str,
    /// What runs.
    pub info: RunInfo,
    /// What it will take.
    pub planned: Planned,
    /// The run's checkpoints, whose folder is there. They remember where the record is.
    pub checkpoints: Option<&'a Checkpoints>,
    /// The step it goes on from, unless it begins.
    pub from: Option<u64>,
}

/// The record of a run.
///
/// Nothing about it stops a run: each error is given back once, to be told.
pub struct Recorder {
    folder: RunFolder,
    step: u64,
    early: bool,
    /// Seconds since the start when the last event came.
    before: f64,
}

impl Recorder {
    /// Makes a run's folder, or goes on in the one it had. Where that cannot be, a new one says
    /// why. Also returns what is to be told of it, a line each.
    ///
    /// # Errors
    /// When no folder can be made.
    pub fn begin(run: Recorded<'_>) -> runs::Result<(Recorder, Vec<String>)> {
        let Recorded { root, name, info, planned, checkpoints, from } = run;
        let mut told = Vec::new();
        let step = from.unwrap_or(0);
        let folder = match from.map(|step| earlier(checkpoints, step)) {
            Some(Ok(folder)) => folder,
            Some(Err(why)) if step > 0 => {
                let folder = RunFolder::create_after(root, name, info, (step, &why))?;
                told.push(format!("{why}; a new record begins after step {step}"));
                folder
            }
            _ => RunFolder::create(root, name, info)?,
        };
        let mut recorder = Recorder { folder, step, early: false, before: 0.0 };
        told.extend(recorder.folder.planned(planned).map(|e| e.to_string()));
        if let Some(checkpoints) = checkpoints {
            // Without it a run that goes on has a new record, which says so.
            let _ = checkpoints.remember_record(recorder.path());
        }
        Ok((recorder, told))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Notes what a run reported, so many seconds after its start, with so many bytes of memory.
    /// Returns what could not be written, the first time.
    #[must_use = "nobody else says that the recording has ended"]
    pub fn event(
        &mut self,
        event: &Event,
        seconds: f64,
        memory_bytes: Option<u64>,
    ) -> Option<Error> {
        // What is measured or written between two steps is no part of the second.
        let took = seconds - std::mem::replace(&mut self.before, seconds);
        match *event {
            Event::Step { step, epoch, loss, grad_norm, lr, rows } => {
                self.step = step;
                self.folder.step(&Step {
                    step,
                    epoch,
                    loss,
                    grad_norm,
                    lr,
                    tokens: rows as u64,
                    seconds: took,
                    memory_bytes,
                })
            }
            Event::Epoch { held_out: Some(loss), .. } => {
                self.folder.evaluation(&Evaluation { step: self.step, loss })
            }
            Event::Evaluated { step, held_out: loss } => {
                self.folder.evaluation(&Evaluation { step, loss })
            }
            Event::EarlyStop { .. } => {
                self.early = true;
                None
            }
            Event::Start { .. } | Event::Epoch { .. } | Event::Checkpoint(_) => None,
        }
    }

    /// How a run ended that was not interrupted and did not fail.
    pub fn done(&self) -> State {
        if self.early { State::Stopped } else { State::Done }
    }

    /// Ends the record. Returns what could not be written, unless something has been told before.
    #[must_use = "nobody else says that the recording has ended"]
    pub fn finish(self, end: End) -> Option<Error> {
        self.folder.finish(end)
    }
}

/// The record that a run goes on in after a step, or why there is none.
fn earlier(checkpoints: Option<&Checkpoints>, step: u64) -> std::result::Result<RunFolder, String> {
    let unknown = "where the run was recorded before is not known";
    let Some(checkpoints) = checkpoints else { return Err(unknown.into()) };
    match checkpoints.record() {
        Ok(Some(path)) => RunFolder::resume(&path, step)
            .map_err(|e| format!("the run's record cannot go on: {e}")),
        Ok(None) => Err(unknown.into()),
        Err(e) => Err(format!("{unknown}: {}: {e}", checkpoints.folder().display())),
    }
}

/// How much data a run has, by what it is called in its record.
pub fn facts(train: &[Example], held_out: &[Example]) -> BTreeMap<String, u64> {
    let sum = |of: &dyn Fn(&Example) -> usize| train.iter().map(of).sum::<usize>();
    let facts = [
        ("conversations", train.len()),
        ("held out", held_out.len()),
        ("tokens", sum(&|example| example.tokens.len())),
        ("trained tokens", sum(&Example::labelled)),
    ];
    facts.map(|(name, n)| (name.to_string(), n as u64)).into()
}

/// Every setting of a run by name: what was asked for, and over it what decides the result and
/// how it is computed, as they came to be.
pub fn all_settings(
    asked: impl IntoIterator<Item = (String, Value)>,
    config: &TrainConfig,
) -> BTreeMap<String, Value> {
    let mut all: BTreeMap<String, Value> = asked.into_iter().collect();
    all.extend(config.settings());
    all.insert("recompute".into(), json!(config.graph.recompute.name()));
    // The one that what decides the result leaves out where it is 0.
    if config.graph.dropout.get() == 0.0 {
        all.insert("dropout".into(), json!(0.0));
    }
    all
}
