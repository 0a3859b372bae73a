//! A run's folder, filled from what the run tells.

use std::path::{Path, PathBuf};

use runs::{
    DataFile, End, Evaluation, Machine, ModelFile, Planned, RunFolder, RunInfo, State, Step,
};
use train::{Checkpoints, Event};

use super::session::{Ran, Ready, Watch};
use super::{Args, Data};
use crate::error::{Error, Result};
use crate::output::note;

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

    /// Keep no record of the run
    #[arg(long, conflicts_with_all = ["run", "run_dir"])]
    pub no_record: bool,
}

/// The record of a run, if there is one.
pub struct Recorder {
    folder: Option<RunFolder>,
    step: u64,
    early: bool,
    /// When the last event came.
    before: f64,
}

impl Recorder {
    /// Makes the folder, or goes on in that of the run that is resumed.
    ///
    /// # Errors
    /// When a folder that was asked for cannot be made.
    pub fn begin(
        args: &Args,
        model: &model::Model,
        data: &Data,
        ready: &Ready<'_>,
        out: &Path,
    ) -> Result<Recorder> {
        let RecordArgs { run, run_dir, no_record } = &args.record;
        let none = Recorder { folder: None, step: 0, early: false, before: 0.0 };
        if *no_record {
            return Ok(none);
        }
        let checkpoints = args.keeping.of(out).checkpoints;
        if ready.from > 0
            && let Ok(path) = std::fs::read_to_string(checkpoints.folder().join(train::RECORD))
            && let Ok(folder) = RunFolder::resume(Path::new(path.trim()), ready.from)
        {
            return Ok(Recorder { folder: Some(folder), step: ready.from, ..none });
        }
        let root = match run_dir {
            Some(root) => root.clone(),
            None => hub::home()?.join("runs"),
        };
        let name = run.clone().unwrap_or_else(|| runs::default_name(out));
        match RunFolder::create(&root, &name, info(args, model, data, ready)) {
            Ok(mut folder) => {
                tell(folder.planned(planned(ready)));
                note(&format!("recorded in {}", folder.path().display()));
                Ok(Recorder { folder: Some(folder), ..none })
            }
            Err(e) if run.is_some() || run_dir.is_some() => Err(Error::fault(e.to_string())),
            Err(e) => {
                note(&format!("{e}; the run goes on without a record"));
                Ok(none)
            }
        }
    }

    /// Says beside the checkpoints where the record is, once there are some.
    fn point(&self, checkpoints: &Checkpoints) {
        if let Some(folder) = &self.folder {
            let path = std::path::absolute(folder.path()).unwrap_or(folder.path().to_path_buf());
            // Without it a run that goes on has a new record.
            let to = checkpoints.folder().join(train::RECORD);
            let _ = files::write(&to, path.display().to_string().as_bytes());
        }
    }

    /// Ends the record.
    pub fn end(self, ran: std::result::Result<&Ran, &Error>) {
        let Some(folder) = self.folder else { return };
        let end = match ran {
            Ok(ran) => End {
                state: match (ran.interrupted, self.early) {
                    (true, _) => State::Interrupted,
                    (false, true) => State::Stopped,
                    (false, false) => State::Done,
                },
                moved: Some((ran.outcome.moved.0 as u64, ran.outcome.moved.1 as u64)),
                peak_bytes: ran.memory.peak_anonymous(),
                ..End::default()
            },
            Err(e) => End {
                state: State::Failed,
                message: Some(match e {
                    Error::Failed { message, .. } => message.clone(),
                    other => format!("{other:?}"),
                }),
                ..End::default()
            },
        };
        tell(folder.finish(end));
    }
}

/// Said once; training goes on.
fn tell(error: Option<runs::Error>) {
    if let Some(e) = error {
        note(&format!("{e}; the run goes on without"));
    }
}

impl Watch for Recorder {
    fn event(&mut self, event: &Event, seconds: f64, memory: Option<u64>) {
        // What is measured or written between two steps is no part of the second.
        let before = std::mem::replace(&mut self.before, seconds);
        let Some(folder) = &mut self.folder else { return };
        let at = |step: u64, loss: f64| Evaluation { step, loss, accuracy: None };
        match event {
            Event::Step { step, epoch, loss, grad_norm, lr, rows } => {
                self.step = *step;
                let took = seconds - before;
                tell(folder.step(&Step {
                    step: *step,
                    epoch: *epoch,
                    loss: *loss,
                    grad_norm: *grad_norm,
                    lr: *lr,
                    tokens: *rows as u64,
                    seconds: took,
                    memory_bytes: memory,
                }));
            }
            Event::Epoch { held_out: Some(loss), .. } => {
                tell(folder.evaluation(&at(self.step, *loss)));
            }
            Event::Evaluated { step, held_out } => tell(folder.evaluation(&at(*step, *held_out))),
            Event::EarlyStop { .. } => self.early = true,
            Event::Start { .. } | Event::Epoch { .. } | Event::Checkpoint(_) => {}
        }
    }

    fn checkpoint(&mut self, checkpoints: &Checkpoints) {
        self.point(checkpoints);
    }
}

fn planned(ready: &Ready<'_>) -> Planned {
    Planned {
        steps: ready.steps,
        parameters: ready.parameters,
        memory: ready.plan.parts().iter().map(|(what, n)| (what.to_string(), *n)).collect(),
    }
}

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
        let sum = |of: &dyn Fn(&train::Example) -> usize| data.train.iter().map(of).sum::<usize>();
        let facts = [
            ("conversations", data.train.len()),
            ("held out", data.held_out.len()),
            ("tokens", sum(&|e| e.tokens.len())),
            ("trained tokens", sum(&train::Example::labelled)),
        ];
        first.facts = facts.map(|(name, n)| (name.to_string(), n as u64)).into();
    }
    RunInfo {
        gradus: env!("CARGO_PKG_VERSION").into(),
        command: "train".into(),
        settings: ready.settings().into_iter().collect(),
        model: ModelFile {
            name: args.model.model.clone(),
            file: model.path().display().to_string(),
            bytes: size(model.path()),
            sha256: None,
        },
        data: files,
        outputs: args.out.iter().chain(&args.out_model).map(|p| p.display().to_string()).collect(),
        machine: Machine {
            kernels: model.device().family().into(),
            threads: model.device().threads() as u64,
        },
    }
}
