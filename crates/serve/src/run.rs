//! Training runs: bounded and refused before they start, run by the loop, published at their end.

use std::collections::BTreeSet;
use std::mem::discriminant;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use graph::{Code, Recompute};
use model::{Adapter, Model};
use train::{Cut, Event, Example, Optimizer, Outcome, Start, TrainConfig, Trainer};

use crate::engine_loop::{Command, Control, End, Progress, Run, ToLoop};
use crate::pacing::Pacer;
use crate::record::{JobRecord, Plan};
use crate::registry::Shadow;
use crate::request;
use crate::server::{Server, lock};
use crate::status::{EpochStatus, Failure, State, WeightStatus};
use crate::{Durable, Error, JobPlan, LearnJob, Learned, Pacing, Result, TrainJob, TrainStatus};

type Shared = Trainer<Arc<Model>>;

/// What a run needs to be set up, of either kind of job.
struct Setup<'j> {
    config: &'j TrainConfig,
    examples: &'j Arc<[Example]>,
    held_out: &'j Arc<[Example]>,
    cut: Cut,
    budget: Option<usize>,
    may_recompute: bool,
    measure_first: bool,
    checkpoint_every: Option<u64>,
}

impl<'j> Setup<'j> {
    fn of(job: &'j TrainJob) -> Setup<'j> {
        Setup {
            config: &job.config,
            examples: &job.examples,
            held_out: &job.held_out,
            cut: if job.data.of_text { Cut::Anywhere } else { Cut::BeforeAnswers },
            budget: job.memory_budget,
            may_recompute: job.may_recompute,
            measure_first: false,
            checkpoint_every: job.durable.as_ref().map(|d| d.every),
        }
    }
}

/// What a job starts from: the optimizer of `from`, the adapter it goes on with, begins anew.
fn start_of(job: &TrainJob, from: Option<Adapter>) -> Start {
    let TrainConfig { method, weight_decay, .. } = job.config;
    let from = from.map(|adapter| (adapter, Optimizer::new(method, weight_decay)));
    Start { from, fallback: job.fallback.clone() }
}

/// A run that holds until its checkpoint is written; it goes on when this is dropped.
struct Held<'a> {
    control: &'a Control,
    to_loop: &'a ToLoop,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.control.writing.store(false, Ordering::Relaxed);
        self.to_loop.send(Command::Wake);
    }
}

/// What a shadow goes on from: an adapter, and what moved it so far with how many steps.
struct Known {
    adapter: Arc<Adapter>,
    optimizer: Option<(Optimizer, u64)>,
}

/// Refuses settings that were asked for and differ from those that the adapter and its optimizer
/// keep: they would be without effect.
fn check_kept(job: &LearnJob, adapter: &Adapter, optimizer: Option<&Optimizer>) -> Result<()> {
    let config = &job.config;
    let pairs = || adapter.tensors.iter();
    let rank = |target: &String| config.ranks.get(target).copied().unwrap_or(config.rank);
    let targets = || config.targets.iter().collect::<BTreeSet<_>>();
    let same = |field: &str| match field {
        "targets" | "top_layers" => pairs().map(|pair| pair.0).eq(targets()),
        "rank" => pairs().all(|(name, pair)| pair.rank == rank(name)),
        "ranks" => {
            pairs().all(|(name, pair)| config.ranks.get(name).is_none_or(|&rank| rank == pair.rank))
        }
        "alpha" | "rslora" => {
            let alpha = config.effective_alpha();
            pairs().all(|(_, pair)| pair.scale == alpha / pair.rank as f32)
        }
        "optimizer" => {
            optimizer.is_none_or(|o| discriminant(&o.method) == discriminant(&config.method))
        }
        "momentum" => optimizer.is_none_or(|o| o.method == config.method),
        "weight_decay" => optimizer.is_none_or(|o| o.weight_decay == config.weight_decay),
        _ => true,
    };
    let Some(field) = job.asked.iter().find(|field| !same(field)) else { return Ok(()) };
    let of = match *field {
        "optimizer" | "momentum" | "weight_decay" => "its optimizer",
        _ => "the adapter",
    };
    let message = format!(
        "`{field}` differs from what {of} of `{}` was made with, which it keeps; leave it out, or \
         learn under another alias",
        job.alias
    );
    Err(Error::field(*field, message))
}

/// A run that is differentiated and planned.
struct Prepared {
    trainer: Shared,
    recompute: bool,
    steps: u64,
    parameters: usize,
    scratch: usize,
    data: usize,
    /// Bytes that it takes beside the model, its data among them, and that it may take.
    needed: usize,
    allowed: Option<usize>,
}

impl Prepared {
    /// What its record says of that.
    fn planned(&self) -> runs::Planned {
        let parameters = self.trainer.parameter_bytes();
        let arena = self.needed.saturating_sub(parameters + self.scratch + self.data);
        let parts = [
            ("data", self.data),
            ("arena", arena),
            ("scratch of the threads", self.scratch),
            ("adapter, gradients, moments", parameters),
        ];
        runs::Planned {
            steps: self.steps,
            parameters: self.parameters as u64,
            memory: parts.map(|(part, bytes)| (part.to_string(), bytes as u64)).into(),
        }
    }

    /// The bound, where it does not fit.
    fn too_much(&self) -> Option<usize> {
        self.allowed.filter(|&allowed| self.needed > allowed)
    }
}

impl Server {
    /// Starts a training run: differentiates, plans and bounds it, takes its memory, and hands it
    /// to the loop. Blocks while it does; what is refused is refused here.
    ///
    /// # Errors
    /// When there is a run already; the refusal; or when it needs more memory than it may take,
    /// with what would fit.
    pub fn train(&self, job: TrainJob) -> Result<TrainStatus> {
        self.check_alias(&job.name)?;
        lock(&self.0.registry).room_for(&job.name)?;
        let control = self.claim(&job.name)?;
        self.start_run(job, control)?;
        Ok(self.train_status())
    }

    /// Takes the place of the one run there can be for one that is yet to be read.
    pub(crate) fn claim_for(&self, name: &str) -> Result<Arc<Control>> {
        let control = self.claim(name)?;
        let out = Some(format!("{name}.gguf"));
        *lock(&self.0.status) =
            TrainStatus { state: State::Starting, out, ..TrainStatus::default() };
        Ok(control)
    }

    /// As [`Server::train`], for a job that has its place. Gives the step it begins at.
    pub(crate) fn start_run(&self, mut job: TrainJob, control: Arc<Control>) -> Result<u64> {
        *lock(&self.0.status) = TrainStatus::starting(&job, self.0.model.geometry().layers);
        let from = job.from.take();
        let (reply, begun) = channel();
        let server = self.clone();
        self.work(move || {
            // The run moves it; a job that kept it too would hold it twice.
            let start = start_of(&job, from);
            let begun = guarded(|| server.begin(&job, start, control.clone()));
            let (progress, mut record, step) = match begun {
                Ok(begun) => begun,
                Err(e) => {
                    server.failed(&e);
                    let _ = reply.send(Err(e));
                    return;
                }
            };
            let _ = reply.send(Ok(step));
            if let Err(e) = guarded(|| server.follow(&job, &control, &progress, &mut record)) {
                // What ends since the server does has not failed: the next process goes on with it.
                let stops = e.code == Code::Stopping;
                if !stops {
                    job.durable.iter().for_each(Durable::set_aside);
                }
                let state = if stops { runs::State::Interrupted } else { runs::State::Failed };
                record.end(state, Some(e.message.clone()));
                server.failed(&e);
            }
        });
        begun.recv().unwrap_or_else(|_| Err(stopped()))
    }

    /// Has the thread of jobs do something.
    fn work(&self, what: impl FnOnce() + Send + 'static) {
        // The thread is there as long as a handle is.
        let _ = lock(&self.0.work).send(Box::new(what));
    }

    /// Sets a run up, begins its record, and hands it to the loop; also gives the step it begins at.
    fn begin(
        &self,
        job: &TrainJob,
        start: Start,
        control: Arc<Control>,
    ) -> Result<(Receiver<Progress>, JobRecord, u64)> {
        let prepared = self.set_up(&Setup::of(job), start)?;
        let planned = prepared.planned();
        let Prepared { mut trainer, steps, .. } = prepared;
        let mut again = false;
        if let Some(durable) = &job.durable {
            again = !durable.resume && durable.has_failed();
            if (durable.resume || again)
                && let Some((snapshot, _)) = durable.checkpoints().last()?
            {
                let restored = trainer.restore(snapshot, false).map_err(Error::from);
                restored.map_err(|e| if again { kept(durable, e) } else { e })?;
            }
            match (durable.resume, again) {
                (true, _) => {}
                (false, true) => durable.begin_again()?,
                (false, false) => durable.begin()?,
            }
            let mark = durable.pause_mark();
            // A pause outlives the process too; one that was asked for meanwhile has no mark yet.
            let slot = lock(&self.0.control);
            let pause = control.pause.load(Ordering::Relaxed) || durable.resume && mark.exists();
            let _ = control.pause_mark.set(mark);
            if pause {
                control.set_pause(true);
            }
            drop(slot);
        }
        let step = trainer.steps();
        let goes_on = again || job.durable.as_ref().is_some_and(|durable| durable.resume);
        let plan = Plan { config: trainer.config(), planned, from: goes_on.then_some(step) };
        let mut record = JobRecord::begin(self, job, plan);
        {
            let mut status = lock(&self.0.status);
            status.graph_mib = trainer.planned_bytes() as f64 / f64::from(1 << 20);
            (status.steps, status.steps_total) = (step, steps);
            status.state = State::Running;
        }
        match self.hand_over(trainer, control, job.pacing) {
            Ok(progress) => Ok((progress, record, step)),
            Err(e) => {
                // Whoever asked is told that it has not begun.
                match &job.durable {
                    Some(durable) if again => durable.set_aside(),
                    Some(durable) if !durable.resume => durable.end(),
                    _ => {}
                }
                record.end(runs::State::Failed, Some(e.message.clone()));
                Err(e)
            }
        }
    }

    /// The training run, or the last one.
    pub fn train_status(&self) -> TrainStatus {
        let mut status = lock(&self.0.status).clone();
        if let Some((_, control)) = &*lock(&self.0.control)
            && status.is_active()
        {
            status.cancel_requested = control.cancel.load(Ordering::Relaxed);
            status.paused = control.paused.load(Ordering::Relaxed);
            status.pause_requested = control.pause.load(Ordering::Relaxed) && !status.paused;
            let busy = self.0.counters.running.get() > 0;
            status.waiting_for_serving = busy && status.state == State::Running && !status.paused;
        }
        status
    }

    /// Ends the run at its next edge. Nothing is written.
    ///
    /// # Errors
    /// When there is none.
    pub fn cancel(&self) -> Result<TrainStatus> {
        self.controlled(None, |control| control.cancel.store(true, Ordering::Relaxed))
    }

    /// Holds the run of this file name at its next edge; it keeps its memory.
    ///
    /// # Errors
    /// When there is none, or it has another name.
    pub fn pause(&self, out: &str) -> Result<TrainStatus> {
        self.controlled(Some(out), |control| control.set_pause(true))
    }

    /// Lets the run of this file name go on.
    ///
    /// # Errors
    /// As [`Server::pause`].
    pub fn resume(&self, out: &str) -> Result<TrainStatus> {
        self.controlled(Some(out), |control| control.set_pause(false))
    }

    fn controlled(&self, out: Option<&str>, set: impl FnOnce(&Control)) -> Result<TrainStatus> {
        {
            let control = lock(&self.0.control);
            let Some((name, control)) = &*control else {
                return Err(Error::new(Code::NotRunning, "there is no training run"));
            };
            let asked = out.map(|out| out.strip_suffix(".gguf").unwrap_or(out));
            if asked.is_some_and(|asked| asked != name) {
                let message = format!("the run that is there writes `{name}.gguf`");
                let error = Error::new(Code::NotRunning, message);
                return Err(Error { field: Some("out".into()), ..error });
            }
            set(control);
        }
        self.0.to_loop.send(Command::Wake);
        Ok(self.train_status())
    }

    /// Teaches the shadow of an alias; what is served does not move. Blocks until it is done.
    ///
    /// # Errors
    /// As [`Server::train`]; the shadow is what it was then.
    pub fn learn(&self, job: LearnJob) -> Result<Learned> {
        self.check_alias(&job.alias)?;
        lock(&self.0.registry).room_for(&job.alias)?;
        let control = self.claim(&job.alias)?;
        let (reply, learned) = channel();
        let server = self.clone();
        self.work(move || {
            let _ = reply.send(guarded(|| server.learned(job, control)));
        });
        let learned = learned.recv().unwrap_or_else(|_| Err(stopped()));
        *lock(&self.0.control) = None;
        match &learned {
            Ok(_) => self.0.counters.jobs_done.add(1),
            Err(_) => self.0.counters.jobs_failed.add(1),
        }
        learned
    }

    fn learned(&self, mut job: LearnJob, control: Arc<Control>) -> Result<Learned> {
        let (from, served) = self.learned_so_far(&job.alias);
        let mut steps_before = 0;
        let from = match from {
            Some(known) => {
                let adapter = known.adapter;
                check_kept(&job, &adapter, known.optimizer.as_ref().map(|o| &o.0))?;
                job.config.go_on_with(&adapter);
                let fresh = || Optimizer::new(job.config.method, job.config.weight_decay);
                let (optimizer, steps) = known.optimizer.unwrap_or_else(|| (fresh(), 0));
                (job.config.method, job.config.weight_decay) =
                    (optimizer.method, optimizer.weight_decay);
                steps_before = steps;
                Some((Arc::unwrap_or_clone(adapter), optimizer))
            }
            None => None,
        };
        let setup = Setup {
            config: &job.config,
            examples: &job.examples,
            held_out: &job.examples,
            cut: Cut::BeforeAnswers,
            budget: job.memory_budget,
            may_recompute: job.may_recompute,
            measure_first: true,
            checkpoint_every: None,
        };
        let Prepared { trainer, .. } = self.set_up(&setup, Start { from, fallback: None })?;
        let progress = self.hand_over(trainer, control, job.pacing)?;
        let (mut before, mut after) = (f64::NAN, f64::NAN);
        while let Ok(news) = progress.recv() {
            match news {
                Progress::Event(Event::Epoch { epoch, held_out: Some(loss), .. }, _) => {
                    if epoch == 0 {
                        before = loss;
                    }
                    after = loss;
                }
                Progress::Event(..) | Progress::Measured(_) => {}
                Progress::Ended(ended) => {
                    let (trainer, end) = *ended;
                    let outcome = finished(trainer, end)?;
                    let Outcome { adapter, optimizer, steps, best, .. } = outcome;
                    let adapter = Arc::new(adapter);
                    // Of what is kept, not of what was seen last.
                    let total_steps = steps_before + best.map_or(steps, |best| best.0);
                    let after = best.map_or(after, |best| best.1);
                    let shadow = Shadow { adapter, optimizer, steps: total_steps };
                    lock(&self.0.registry).learned(&job.alias, shadow);
                    return Ok(Learned {
                        steps,
                        total_steps,
                        loss_before: before,
                        loss_after: after,
                        served_generation: served,
                    });
                }
            }
        }
        Err(stopped())
    }

    /// The targets of the adapter that learning goes on with under an alias; `None` where there is
    /// nothing yet.
    pub fn targets_of(&self, alias: &str) -> Option<Vec<String>> {
        let (known, _) = self.learned_so_far(alias);
        known.map(|known| known.adapter.tensors.keys().cloned().collect())
    }

    /// What a shadow goes on from, and the generation served.
    fn learned_so_far(&self, alias: &str) -> (Option<Known>, u64) {
        let registry = lock(&self.0.registry);
        let Some(entry) = registry.get(alias) else { return (None, 0) };
        let number = entry.served.as_ref().map_or(0, |g| g.number);
        let promoted = entry.promoted.as_ref().filter(|(as_number, _)| *as_number == number);
        let from = match (entry.shadow.as_ref().or(promoted.map(|p| &p.1)), &entry.served) {
            (Some(shadow), _) => Some(Known {
                adapter: shadow.adapter.clone(),
                optimizer: Some((shadow.optimizer.clone(), shadow.steps)),
            }),
            (None, Some(g)) => Some(Known { adapter: g.attached.adapter.clone(), optimizer: None }),
            (None, None) => None,
        };
        (from, number)
    }

    /// Serves what was learned for an alias as its next generation. Learning goes on from there.
    ///
    /// # Errors
    /// When nothing was learned for it, or learning is under way.
    pub fn promote(&self, alias: &str) -> Result<u64> {
        self.check_idle(alias)?;
        let shadow = self.alias(alias, |entry| entry.shadow.clone());
        let shadow = shadow.ok_or_else(|| self.unknown(alias))?.ok_or_else(|| nothing(alias))?;
        let number = self.publish(alias, shadow.adapter.clone(), None)?;
        self.alias(alias, |entry| {
            // What was learned meanwhile stays.
            entry.shadow.take_if(|now| Arc::ptr_eq(now, &shadow));
            entry.promoted = Some((number, shadow));
        });
        Ok(number)
    }

    /// Drops what was learned for an alias and not promoted.
    ///
    /// # Errors
    /// When there is nothing, or learning is under way.
    pub fn discard(&self, alias: &str) -> Result<()> {
        self.check_idle(alias)?;
        let taken = self.alias(alias, |entry| entry.shadow.take());
        taken.ok_or_else(|| self.unknown(alias))?.map(|_| ()).ok_or_else(|| nothing(alias))
    }

    fn check_idle(&self, alias: &str) -> Result<()> {
        match &*lock(&self.0.control) {
            Some((name, _)) if name == alias => Err(Error::new(
                Code::RunInProgress,
                format!("`{alias}` is being trained; wait for the end or cancel it"),
            )),
            _ => Ok(()),
        }
    }

    /// Takes the place of the one run there can be.
    fn claim(&self, name: &str) -> Result<Arc<Control>> {
        if !self.is_ready() {
            return Err(Error::new(Code::Stopping, "the server is stopping"));
        }
        let mut slot = lock(&self.0.control);
        if let Some((running, _)) = &*slot {
            return Err(Error::new(
                Code::RunInProgress,
                format!("`{running}` is being trained; wait for its end or cancel it"),
            ));
        }
        let control = Arc::new(Control::default());
        *slot = Some((name.to_string(), control.clone()));
        Ok(control)
    }

    /// What a job would take; nothing is allocated for it.
    ///
    /// # Errors
    /// The refusal, or what is wrong with the data.
    pub fn plan(&self, mut job: TrainJob) -> Result<JobPlan> {
        let from = job.from.take();
        let start = start_of(&job, from);
        let setup = Setup::of(&job);
        let mut prepared = self.prepare(&setup, start)?;
        let instead = match prepared.too_much() {
            Some(allowed) => {
                let room = allowed.saturating_sub(prepared.data);
                Some(self.what_fits(&setup, job.fallback.as_ref(), room)?)
            }
            None => None,
        };
        let Prepared { trainer, recompute, steps, parameters, scratch, data, needed, allowed } =
            &mut prepared;
        let seconds = match self.0.options.rates {
            Some(rates) => Some(rates.seconds(&trainer.cost()?)),
            None => None,
        };
        let parameter_bytes = trainer.parameter_bytes();
        let fallback = |f: &graph::Fallback| format!("{} `{}`: {}", f.op, f.name, f.reason);
        let fallbacks: Vec<String> = trainer.plan()?.fallbacks.iter().map(fallback).collect();
        let other = job.fallback.as_ref().filter(|_| !fallbacks.is_empty());
        let devices = [Some(self.0.model.device()), other].into_iter().flatten();
        Ok(JobPlan {
            steps: *steps,
            parameters: *parameters,
            arena_bytes: needed.saturating_sub(parameter_bytes + *scratch + *data),
            parameter_bytes,
            scratch_bytes: *scratch,
            data_bytes: *data,
            recompute: *recompute,
            devices: devices.map(|device| device.family().to_string()).collect(),
            seconds,
            allowed_bytes: *allowed,
            fallbacks,
            instead,
        })
    }

    /// Bytes a run may take, of which its data are there already.
    fn allowed(&self, setup: &Setup<'_>, data: usize) -> Option<usize> {
        let free = self.0.model.device().available().map(|free| free.saturating_add(data));
        [setup.budget, free].into_iter().flatten().min()
    }

    /// Differentiates and plans; with recomputation where that alone makes it fit.
    fn prepare(&self, setup: &Setup<'_>, mut start: Start) -> Result<Prepared> {
        if setup.examples.is_empty() {
            return Err(Error::new(Code::BadData, "there are no examples to learn from"));
        }
        let mut config = setup.config.clone();
        loop {
            let mut trainer = Trainer::start(self.0.model.clone(), config.clone(), start)?;
            if setup.measure_first {
                trainer.measure_first();
            }
            if let Some(every) = setup.checkpoint_every {
                trainer.checkpoint_every(every);
            }
            let event = trainer.load(setup.examples.clone(), setup.held_out.clone())?;
            let Event::Start { steps, parameters, .. } = event else {
                return Err(Error::new(Code::Internal, "a run began with something else"));
            };
            let (scratch, data) = (trainer.scratch_bytes(), trainer.data_bytes());
            let needed = trainer.planned_bytes() + scratch + data;
            let allowed = self.allowed(setup, data);
            let recompute = config.graph.recompute != Recompute::None;
            let prepared =
                Prepared { trainer, recompute, steps, parameters, scratch, data, needed, allowed };
            if prepared.too_much().is_none() || recompute || !setup.may_recompute {
                return Ok(prepared);
            }
            config.graph.recompute = Recompute::PerLayer;
            start = prepared.trainer.into_start();
        }
    }

    /// Differentiates, plans, bounds; takes the memory last.
    fn set_up(&self, setup: &Setup<'_>, start: Start) -> Result<Prepared> {
        let fallback = start.fallback.clone();
        let mut prepared = self.prepare(setup, start)?;
        if let Some(allowed) = prepared.too_much() {
            let room = allowed.saturating_sub(prepared.data);
            let fits = self.what_fits(setup, fallback.as_ref(), room)?;
            let why = train::over_budget(prepared.needed, allowed);
            return Err(Error::new(Code::OverBudget, format!("{why}; {fits}")));
        }
        prepared.trainer.reserve()?;
        Ok(prepared)
    }

    /// The nearest settings that fit, in words.
    fn what_fits(
        &self,
        setup: &Setup<'_>,
        fallback: Option<&Arc<dyn graph::Device>>,
        allowed: usize,
    ) -> Result<String> {
        let wanted = train::Wanted {
            fallback,
            examples: setup.examples,
            held_out: setup.held_out,
            cut: setup.cut,
            allowed,
            checkpoint_every: setup.checkpoint_every,
            window: &request::window_of,
            chunks: &|window| request::chunks(window).collect(),
        };
        let nearest = train::nearest(&self.0.model, setup.config, &wanted)?;
        let none = || setup.cut.none_fits().to_string();
        Ok(nearest.map_or_else(none, |nearest| nearest.in_words()))
    }

    fn hand_over(
        &self,
        trainer: Shared,
        control: Arc<Control>,
        pacing: Pacing,
    ) -> Result<Receiver<Progress>> {
        let (to_owner, progress) = channel();
        let pacer = Pacer::new(pacing);
        let run = Run { trainer, control, pacer, to_owner };
        match self.0.to_loop.send(Command::Train(Box::new(run))) {
            true => Ok(progress),
            false => Err(stopped()),
        }
    }

    /// Keeps the status and the record of a run up to date, and brings it to its end. The record
    /// of one that fails is ended by the caller.
    fn follow(
        &self,
        job: &TrainJob,
        control: &Control,
        progress: &Receiver<Progress>,
        record: &mut JobRecord,
    ) -> Result<()> {
        let mut began = Instant::now();
        let mut epoch_rows = 0;
        let mut unkept = None;
        while let Ok(news) = progress.recv() {
            if let Progress::Event(event, at) = &news {
                record.event(event, *at);
            }
            match news {
                Progress::Event(Event::Start { .. }, at) => began = at,
                Progress::Event(Event::Evaluated { .. } | Event::EarlyStop { .. }, _) => {}
                Progress::Event(Event::Checkpoint(snapshot), _) => {
                    let _held = Held { control, to_loop: &self.0.to_loop };
                    let Some(durable) = &job.durable else { continue };
                    // A job whose checkpoints are lost is not what was asked for.
                    if let Err(e) = durable.checkpoints().write(&snapshot) {
                        let e = Error::from(e);
                        let again = durable.goes_on().map_or(String::new(), |so| format!("; {so}"));
                        let message = format!("{}{again}", e.message);
                        unkept = Some(Error { message, ..e });
                        let _ = self.cancel();
                    }
                }
                Progress::Event(Event::Step { step, loss, rows, .. }, _) => {
                    let mut status = lock(&self.0.status);
                    (status.steps, status.loss) = (step, Some(loss));
                    status.rows += rows as u64;
                    epoch_rows += rows;
                }
                Progress::Event(Event::Epoch { epoch, loss, held_out }, at) => {
                    let seconds = at.duration_since(began).as_secs_f64();
                    let rate = epoch_rows as f64 / seconds.max(1e-9);
                    (began, epoch_rows) = (at, 0);
                    let eval_loss = held_out;
                    lock(&self.0.status).epochs.push(EpochStatus {
                        epoch,
                        train_loss: loss,
                        eval_loss,
                        seconds,
                        train_tok_s: rate,
                    });
                }
                Progress::Measured(measured) => {
                    lock(&self.0.status).measured(&measured.0, &measured.1);
                }
                Progress::Ended(ended) => {
                    let (mut trainer, end) = *ended;
                    let durable = job.durable.as_ref();
                    if let End::Stopped = end {
                        self.put_by(job, trainer);
                        record.end(runs::State::Interrupted, Some("the server stopped".into()));
                        return Ok(());
                    }
                    if let End::Cancelled = end {
                        if let Some(e) = unkept {
                            return Err(self.keep_last_good(job, &mut trainer, e));
                        }
                        drop(trainer);
                        durable.into_iter().for_each(Durable::end);
                        record.end(runs::State::Interrupted, Some("it was cancelled".into()));
                        self.ended(|status| status.state = State::Cancelled);
                        self.0.counters.jobs_failed.add(1);
                        return Ok(());
                    }
                    let end = match (end, trainer.check_moved()) {
                        (End::Done, Err(e)) => End::Failed(e.into()),
                        (end, _) => end,
                    };
                    if let End::Failed(e) = end {
                        return Err(self.keep_last_good(job, &mut trainer, e));
                    }
                    let outcome = finished(trainer, end)?;
                    let (moved, unrouted) = (outcome.moved, outcome.unrouted.clone());
                    if job.config.targets.is_empty() {
                        let write =
                            |to: &Path| train::write_weights(to, &self.0.model, &outcome.weights);
                        let written = self.write(job, "model", write)?;
                        durable.into_iter().for_each(Durable::end);
                        record.done(moved);
                        self.ended(|status| {
                            status.state = State::Done;
                            (status.moved, status.unrouted) = (Some(moved), unrouted);
                            status.model = Some(job.out.display().to_string());
                            status.weights = written.into_iter().map(WeightStatus::from).collect();
                        });
                        self.0.counters.jobs_done.add(1);
                        return Ok(());
                    }
                    self.write(job, "adapter", |to| outcome.adapter.write(to, &self.0.model))?;
                    durable.into_iter().for_each(Durable::end);
                    // What is served is what the file says.
                    let adapter = Arc::new(Adapter::read(&job.out, &self.0.model)?);
                    let file = Some(job.out.clone());
                    let generation = self.publish(&job.name, adapter, file)?;
                    record.done(moved);
                    self.ended(|status| {
                        status.state = State::Done;
                        (status.moved, status.unrouted) = (Some(moved), unrouted);
                        status.adapter = Some(job.out.display().to_string());
                        status.alias = Some(job.name.clone());
                        status.generation = Some(generation);
                    });
                    self.0.counters.jobs_done.add(1);
                    return Ok(());
                }
            }
        }
        Err(stopped())
    }

    /// Writes what a job made; where that fails, to the folder for temporary files, which is said:
    /// hours went into it.
    fn write<T, E: std::fmt::Display>(
        &self,
        job: &TrainJob,
        what: &str,
        mut write: impl FnMut(&Path) -> std::result::Result<T, E>,
    ) -> Result<T>
    where
        Error: From<E>,
    {
        files::write_or_rescue(&job.out, &mut write).map_err(|unwritten| {
            let mut e = Error::from(unwritten.why);
            let kept = match unwritten.instead {
                Ok(instead) => {
                    // It is its place that does not take it.
                    e.code = Code::FileFailed;
                    let path = instead.display().to_string();
                    let message =
                        format!("the {what} is in {path} instead: move it to the training folder");
                    let mut status = lock(&self.0.status);
                    let slot = match what {
                        "model" => &mut status.model,
                        _ => &mut status.adapter,
                    };
                    *slot = Some(path);
                    message
                }
                Err(also) => format!("nor elsewhere: {also}"),
            };
            let again = job.durable.as_ref().and_then(Durable::goes_on);
            let again = again.map_or(String::new(), |again| format!("; {again}"));
            Error { message: format!("{}; {kept}{again}", e.message), ..e }
        })
    }

    /// Writes the adapter of a job that failed as it was before, and says where.
    fn keep_last_good(&self, job: &TrainJob, trainer: &mut Shared, e: Error) -> Error {
        let checkpoints = job.durable.as_ref().map(Durable::checkpoints);
        let kept = match trainer.last_good(checkpoints.as_ref(), e.code == Code::NonFinite) {
            Ok(Some((adapter, step))) => {
                let Some(path) = last_good_of(&job.out) else {
                    let message = format!(
                        "{}; the adapter as it was after step {step} is not kept: {} and all names \
                         like it are taken, remove some",
                        e.message,
                        job.out.with_extension("last-good.gguf").display()
                    );
                    return Error { message, ..e };
                };
                let mut write = |to: &Path| adapter.write(to, &self.0.model);
                let is_in = |path: &Path| {
                    format!("the adapter as it was after step {step} is in {}", path.display())
                };
                match files::write_or_rescue(&path, &mut write) {
                    Ok(()) => is_in(&path),
                    Err(files::Unwritten { why, instead: Ok(path) }) => {
                        format!("{why}; {}", is_in(&path))
                    }
                    Err(files::Unwritten { why, instead: Err(_) }) => why.to_string(),
                }
            }
            Ok(None) => return e,
            Err(also) => also.to_string(),
        };
        Error { message: format!("{}; {kept}", e.message), ..e }
    }

    /// The server stops before the run's end: the next process goes on with it, from here or, where
    /// that cannot be written, from its last checkpoint.
    fn put_by(&self, job: &TrainJob, mut trainer: Shared) {
        let kept = match job.durable.as_ref().filter(|_| trainer.steps() > 0) {
            Some(durable) => {
                trainer.last_snapshot().and_then(|now| durable.checkpoints().write(&now))
            }
            None => Ok(PathBuf::new()),
        };
        job.durable.iter().for_each(Durable::outlived);
        drop(trainer);
        self.0.counters.jobs_failed.add(1);
        self.ended(|status| match kept {
            Ok(_) => status.state = State::Cancelled,
            Err(e) => {
                let e = Error::from(e);
                let message = format!("{}; the job goes on from its last checkpoint", e.message);
                status.state = State::Error;
                status.error = Some(Failure::from(&Error { message, ..e }));
            }
        });
    }

    /// The run is over: its place is free, and its status stays.
    fn ended(&self, with: impl FnOnce(&mut TrainStatus)) {
        let mut control = lock(&self.0.control);
        let mut status = lock(&self.0.status);
        if let Some((_, control)) = control.take() {
            status.cancel_requested = control.cancel.load(Ordering::Relaxed);
        }
        (status.paused, status.pause_requested) = (false, false);
        with(&mut status);
    }

    pub(crate) fn failed(&self, e: &Error) {
        self.0.counters.jobs_failed.add(1);
        self.ended(|status| {
            status.state = State::Error;
            status.error = Some(Failure::from(e));
        });
    }
}

/// Where the adapter of a failed job that writes to `out` is kept: what is there is another's, or
/// was said to be kept. `None` where all names are taken.
fn last_good_of(out: &Path) -> Option<PathBuf> {
    let mut names = (1..100).map(|i| match i {
        1 => out.with_extension("last-good.gguf"),
        _ => out.with_extension(format!("last-good-{i}.gguf")),
    });
    names.find(|path| path.symlink_metadata().is_err())
}

/// The outcome of a run that has ended.
fn finished(trainer: Shared, end: End) -> Result<Outcome> {
    match end {
        End::Done => Ok(trainer.finish()?),
        End::Cancelled => Err(Error::new(Code::NotRunning, "the run was cancelled")),
        End::Stopped => Err(stopped()),
        End::Failed(e) => Err(e),
    }
}

/// What an earlier job of the same words has left cannot be gone on with.
fn kept(durable: &Durable, e: Error) -> Error {
    let message = format!(
        "{}; a job of the same request that failed has left it, and another one takes its place: \
         change the request, or remove {}",
        e.message,
        durable.folder().display()
    );
    Error { message, ..e }
}

fn stopped() -> Error {
    Error::new(Code::Stopping, "the server has stopped")
}

fn nothing(alias: &str) -> Error {
    let message = format!("nothing has been learned for `{alias}` since it was last promoted");
    Error::new(Code::AdapterState, message)
}

/// A panic off the loop is a failure of its job alone.
pub(crate) fn guarded<T>(what: impl FnOnce() -> Result<T>) -> Result<T> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(what)).unwrap_or_else(|_| {
        Err(Error::new(Code::Internal, "the job panicked; this is a bug in Gradus"))
    })
}

#[cfg(test)]
mod tests;
