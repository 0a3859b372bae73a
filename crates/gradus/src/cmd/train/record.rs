//! The record of a run: where it is, what is known before the first step, and how it ended.

use std::path::{Path, PathBuf};

use runs::{DataFile, End, Machine, ModelFile, Planned, RunInfo, State};
use train::{Event, Recorded, all_settings};

use super::session::{Ran, Ready, Watch};
use super::{Args, Data};
use crate::error::{Error, Result};
use crate::output::note;
use crate::outputs;

/// Where what a run says of itself is kept.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Record")]
pub struct RecordArgs {
    /// Name of the run's folder [default: the time and the name of the file it writes]
    #[arg(long, value_name = "NAME")]
    pub run: Option<String>,

    /// Where run folders are [default: `runs` under GRADUS_HOME]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Keep no record of the run; one that goes on and has a record keeps it
    #[arg(long, conflicts_with_all = ["run", "run_dir"])]
    pub no_record: bool,
}

impl RecordArgs {
    /// # Errors
    /// A name that is no folder's, or a folder that takes no files.
    pub fn check(&self) -> Result<()> {
        if let Some(name) = &self.run {
            runs::check_name(name).map_err(|e| Error::invalid(e.to_string()))?;
        }
        self.run_dir.iter().try_for_each(|folder| outputs::check_folder(folder))
    }

    /// True where a record was asked for, by name or place.
    fn is_asked_for(&self) -> bool {
        self.run.is_some() || self.run_dir.is_some()
    }
}

/// The record of a run, if there is one.
pub struct Recorder(Option<train::Recorder>);

impl Recorder {
    /// Makes the folder, or goes on in that of the run that is resumed.
    ///
    /// # Errors
    /// When a folder that was asked for cannot be made, or the run has one and is to keep none.
    pub fn begin(
        args: &Args,
        model: &model::Model,
        data: &Data,
        ready: &Ready<'_>,
        out: &Path,
    ) -> Result<Recorder> {
        if args.record.no_record {
            let earlier = || args.keeping.of(out).checkpoints.record().ok().flatten();
            let there = (ready.from > 0).then(earlier).flatten().filter(|path| path.is_dir());
            return match there {
                None => Ok(Recorder(None)),
                Some(path) => Err(Error::invalid(format!(
                    "the run is recorded in {}, where `--no-record` would leave it ended at step \
                     {}; leave that out, or remove the record first",
                    path.display(),
                    ready.from
                ))),
            };
        }
        match begin(args, model, data, ready, out) {
            Ok(recorder) => Ok(Recorder(Some(recorder))),
            Err(e) if args.record.is_asked_for() => Err(e),
            Err(e) => {
                note(&format!("{}; the run goes on without a record", e.message()));
                Ok(Recorder(None))
            }
        }
    }

    /// Ends the record.
    pub fn end(self, ran: std::result::Result<&Ran, &Error>) {
        let Some(recorder) = self.0 else { return };
        let end = match ran {
            Ok(ran) => End {
                state: if ran.interrupted { State::Interrupted } else { recorder.done() },
                moved: Some((ran.outcome.moved.0 as u64, ran.outcome.moved.1 as u64)),
                peak_bytes: ran.memory.peak_anonymous(),
                ..End::default()
            },
            Err(Error::Interrupted) => End { state: State::Interrupted, ..End::default() },
            Err(e) => End { state: State::Failed, message: Some(e.message()), ..End::default() },
        };
        tell(recorder.finish(end));
    }
}

fn begin(
    args: &Args,
    model: &model::Model,
    data: &Data,
    ready: &Ready<'_>,
    out: &Path,
) -> Result<train::Recorder> {
    let root = match &args.record.run_dir {
        Some(root) => root.clone(),
        None => hub::home()?.join("runs"),
    };
    let checkpoints = args.keeping.of(out).checkpoints;
    let (recorder, told) = train::Recorder::begin(Recorded {
        root: &root,
        name: &args.record.run.clone().unwrap_or_else(|| runs::default_name(out)),
        info: info(args, model, data, ready),
        planned: planned(ready),
        checkpoints: Some(&checkpoints),
        from: (ready.from > 0).then_some(ready.from),
    })
    .map_err(|e| Error::fault(e.to_string()))?;
    told.iter().for_each(|what| note(what));
    note(&format!("recorded in {}", recorder.path().display()));
    Ok(recorder)
}

/// Said once; training goes on.
fn tell(error: Option<runs::Error>) {
    if let Some(e) = error {
        note(&format!("{e}; the run goes on without"));
    }
}

impl Watch for Recorder {
    fn event(&mut self, event: &Event, seconds: f64, memory: Option<u64>) {
        if let Some(recorder) = &mut self.0 {
            tell(recorder.event(event, seconds, memory));
        }
    }
}

fn planned(ready: &Ready<'_>) -> Planned {
    Planned {
        steps: ready.steps,
        parameters: ready.parameters,
        memory: ready.plan.parts().iter().map(|(what, n)| (what.to_string(), *n)).collect(),
    }
}

/// Options that say nothing of what runs, or that the record has elsewhere.
const ELSEWHERE: [&str; 12] = [
    "model",
    "data",
    "eval_data",
    "out",
    "out_model",
    "threads",
    "json",
    "dry_run",
    "resume",
    "run",
    "run_dir",
    "no_record",
];

fn info(args: &Args, model: &model::Model, data: &Data, ready: &Ready<'_>) -> RunInfo {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
    let file = |role: &str, path: &PathBuf| DataFile {
        role: role.into(),
        file: path.display().to_string(),
        bytes: size(path),
        ..DataFile::default()
    };
    let mut files: Vec<DataFile> = args.data.data.iter().map(|p| file("train", p)).collect();
    files.extend(args.eval_data.iter().map(|p| file("eval", p)));
    if let Some(first) = files.first_mut() {
        first.facts = data.facts();
    }
    let asked = args.given.iter().filter(|(name, _)| !ELSEWHERE.contains(&name.as_str()));
    RunInfo {
        gradus: env!("CARGO_PKG_VERSION").into(),
        command: "train".into(),
        settings: all_settings(asked.map(|(k, v)| (k.clone(), v.clone())), ready.config()),
        model: ModelFile {
            name: args.model.model.clone(),
            file: model.path().display().to_string(),
            bytes: size(model.path()),
        },
        data: files,
        outputs: args.out.iter().chain(&args.out_model).map(|p| p.display().to_string()).collect(),
        machine: Machine {
            kernels: model.device().family().into(),
            threads: model.device().threads() as u64,
        },
    }
}
