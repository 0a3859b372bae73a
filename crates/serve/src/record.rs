//! The record of a job: a run folder in the training folder, as `gradus train` leaves one.
//!
//! It is written by the thread that follows the job, so that the loop never waits for it, and
//! nothing about it fails a job: what could not be recorded is in the job's status.

use std::time::Instant;

use runs::{DataFile, End, Machine, ModelFile, Planned, RunInfo};
use train::{Event, Recorded, Recorder, TrainConfig, all_settings};

use crate::server::{Server, lock};
use crate::{Durable, TrainJob};

/// What a job comes to before its first step.
pub(crate) struct Plan<'a> {
    pub(crate) config: &'a TrainConfig,
    pub(crate) planned: Planned,
    /// The step it goes on from, unless it begins.
    pub(crate) from: Option<u64>,
}

/// The record of a job, if it has one that is not ended.
pub(crate) struct JobRecord {
    recorder: Option<Recorder>,
    began: Instant,
    server: Server,
}

impl JobRecord {
    /// Begins the record of a job that is kept in the training folder, or goes on with it.
    pub(crate) fn begin(server: &Server, job: &TrainJob, plan: Plan<'_>) -> JobRecord {
        let began = Instant::now();
        let mut record = JobRecord { recorder: None, began, server: server.clone() };
        let Some(durable) = &job.durable else { return record };
        let begun = Recorder::begin(Recorded {
            root: &durable.runs,
            name: &runs::default_name(&job.out),
            info: info(server, job, durable, plan.config),
            planned: plan.planned,
            checkpoints: Some(&durable.checkpoints()),
            from: plan.from,
        });
        match begun {
            Ok((recorder, told)) => {
                let path = recorder.path().display().to_string();
                lock(&server.0.status).record = Some(path);
                record.tell(told.into_iter().next());
                record.recorder = Some(recorder);
            }
            Err(e) => record.tell(Some(e.to_string())),
        }
        record
    }

    /// Notes what the run reported.
    pub(crate) fn event(&mut self, event: &Event, at: Instant) {
        let Some(recorder) = &mut self.recorder else { return };
        let seconds = at.saturating_duration_since(self.began).as_secs_f64();
        // The memory of a server is not its job's.
        let unsaid = recorder.event(event, seconds, None);
        self.tell(unsaid.map(|e| e.to_string()));
    }

    /// Ends the record; what comes after is not noted.
    pub(crate) fn end(&mut self, state: runs::State, message: Option<String>) {
        self.end_with(|_| End { state, message, ..End::default() });
    }

    /// Ends the record of a run that came to its end.
    pub(crate) fn done(&mut self, moved: (usize, usize)) {
        let moved = Some((moved.0 as u64, moved.1 as u64));
        self.end_with(|recorder| End { state: recorder.done(), moved, ..End::default() });
    }

    fn end_with(&mut self, end: impl FnOnce(&Recorder) -> End) {
        let Some(recorder) = self.recorder.take() else { return };
        let end = end(&recorder);
        let unsaid = recorder.finish(end);
        self.tell(unsaid.map(|e| e.to_string()));
    }

    fn tell(&self, what: Option<String>) {
        if let Some(what) = what {
            lock(&self.server.0.status).unrecorded.get_or_insert(what);
        }
    }
}

fn info(server: &Server, job: &TrainJob, durable: &Durable, config: &TrainConfig) -> RunInfo {
    let model = &server.0.model;
    let bytes = std::fs::metadata(model.path()).map_or(0, |m| m.len());
    let data = DataFile {
        role: "train".into(),
        file: "the request".into(),
        bytes: durable.bytes(),
        facts: train::facts(&job.examples, &job.held_out),
    };
    RunInfo {
        gradus: env!("CARGO_PKG_VERSION").into(),
        command: "POST /train".into(),
        settings: all_settings(job.asked.clone(), config),
        model: ModelFile {
            name: server.0.options.name.clone(),
            file: model.path().display().to_string(),
            bytes,
        },
        data: vec![data],
        outputs: vec![job.out.display().to_string()],
        machine: Machine {
            kernels: model.device().family().into(),
            threads: model.device().threads() as u64,
        },
    }
}
