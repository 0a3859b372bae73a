//! The loop that owns the device: batches of turns, and training segments between them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use graph::{Code, Stop};
use model::{Adapter, AdapterId, Engine, Finish, Model, Rows, SeqId, WantLogits};
use tokio::sync::mpsc::UnboundedSender;
use train::{Advance, Event, Trainer};

use crate::metrics::Counters;
use crate::pacing::{Allowance, Pacer, Receipts, Stats};
use crate::registry::Generation;
use crate::{Ask, Done, Error, Options, Result, Said};

/// What the loop is told.
pub(crate) enum Command {
    Ask(Box<Active>),
    Attach(Arc<Adapter>, Sender<AdapterId>),
    Detach(AdapterId),
    Train(Box<Run>),
    /// A flag changed; look at it.
    Wake,
    /// End when the turns have, or at this time.
    Stop(Instant),
}

/// The way to the loop.
#[derive(Clone)]
pub(crate) struct ToLoop {
    commands: Sender<Command>,
    /// Commands sent and not yet received: what ends a training segment.
    pending: Arc<AtomicUsize>,
}

impl ToLoop {
    /// A way to a loop, and its other end.
    pub(crate) fn new() -> (ToLoop, Receiver<Command>) {
        let (commands, received) = std::sync::mpsc::channel();
        (ToLoop { commands, pending: Arc::default() }, received)
    }

    /// Sends a command; false when the loop has ended.
    pub(crate) fn send(&self, command: Command) -> bool {
        self.pending.fetch_add(1, Ordering::Relaxed);
        self.commands.send(command).is_ok()
    }
}

/// Flags that handles set and the loop looks at.
#[derive(Default)]
pub(crate) struct Control {
    pub(crate) cancel: AtomicBool,
    pub(crate) pause: AtomicBool,
    /// The file that is there while a pause is asked for, of a run that outlives the process.
    pub(crate) pause_mark: OnceLock<PathBuf>,
    /// Set by the loop while a pause is in effect.
    pub(crate) paused: AtomicBool,
    /// Set by the loop when it sends a checkpoint, taken back by the owner who has written it. The
    /// run holds meanwhile: on a slow disk, copies would pile up in memory.
    pub(crate) writing: AtomicBool,
}

impl Control {
    /// Asks for a pause, or no longer; also in the process that goes on with the run.
    pub(crate) fn set_pause(&self, pause: bool) {
        self.pause.store(pause, Ordering::Relaxed);
        let Some(mark) = self.pause_mark.get() else { return };
        // What cannot be written holds for this process alone.
        let _ = match pause {
            true => std::fs::write(mark, b""),
            false => std::fs::remove_file(mark),
        };
    }

    /// Whether the run holds: paused, or until its checkpoint is written.
    fn holds(&self) -> bool {
        self.paused.load(Ordering::Relaxed) || self.writing.load(Ordering::Relaxed)
    }
}

/// What a run tells its owner; never waits.
pub(crate) enum Progress {
    /// What happened, and when.
    Event(Event, Instant),
    /// How it is paced, now and then.
    Measured(Box<(Stats, Receipts)>),
    /// The loop lets go of it: all epochs are done, it was cancelled, or it failed.
    Ended(Box<(Trainer<Arc<Model>>, End)>),
}

/// Why a run ended.
pub(crate) enum End {
    Done,
    Cancelled,
    /// The server stops.
    Stopped,
    Failed(Error),
}

/// A training run.
pub(crate) struct Run {
    pub(crate) trainer: Trainer<Arc<Model>>,
    pub(crate) control: Arc<Control>,
    pub(crate) pacer: Pacer,
    pub(crate) to_owner: Sender<Progress>,
}

/// How often a run says how it is paced.
const MEASURED: Duration = Duration::from_millis(200);

/// One of the places that turns have, running or waiting; free again when it is dropped.
pub(crate) struct Place(Arc<AtomicUsize>);

impl Place {
    /// A place, if fewer than so many are taken.
    pub(crate) fn take(taken: &Arc<AtomicUsize>, most: usize) -> Option<Place> {
        let add = |n: usize| (n < most).then_some(n + 1);
        taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Place(taken.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A turn under way.
pub(crate) struct Active {
    pub(crate) ask: Ask,
    /// Kept so that the generation stays.
    pub(crate) generation: Option<Arc<Generation>>,
    pub(crate) say: UnboundedSender<Said>,
    pub(crate) sampler: text::Sampler,
    pub(crate) stream: text::TextStream,
    /// The prompt, and what was generated.
    pub(crate) history: Vec<u32>,
    seq: Option<SeqId>,
    /// Tokens of the history that are in the cache.
    fed: usize,
    cached: usize,
    /// Order of arrival.
    pub(crate) number: u64,
    first: Option<Instant>,
    /// What training took since the first token.
    training: Duration,
    _place: Place,
}

impl Active {
    /// A turn that waits.
    ///
    /// # Errors
    /// A sampler setting or a stop string that is out of range.
    pub(crate) fn new(
        ask: Ask,
        generation: Option<Arc<Generation>>,
        say: UnboundedSender<Said>,
        place: Place,
    ) -> Result<Active> {
        Ok(Active {
            sampler: text::Sampler::new(ask.sampler.clone(), ask.seed)?,
            stream: text::TextStream::new(&ask.stops)?,
            history: ask.tokens.clone(),
            ask,
            generation,
            say,
            seq: None,
            fed: 0,
            cached: 0,
            number: 0,
            first: None,
            training: Duration::ZERO,
            _place: place,
        })
    }

    fn adapter(&self) -> Option<AdapterId> {
        self.generation.as_ref().map(|g| g.attached.id)
    }

    fn produced(&self) -> usize {
        self.history.len() - self.ask.tokens.len()
    }

    /// Tokens that the cache lacks.
    fn pending(&self) -> &[u32] {
        self.history.get(self.fed..).unwrap_or(&[])
    }

    /// Takes a sampled token; the end, if it is one.
    fn took(&mut self, id: u32, model: &Model) -> Option<Finish> {
        self.history.push(id);
        if model.tokenizer().is_eog(id) {
            return Some(Finish::Stop);
        }
        let bytes = model.tokenizer().token_bytes(id, false).unwrap_or(&[]);
        let delta = self.stream.push(bytes);
        let stopped = delta.stop.is_some();
        if !delta.text.is_empty() {
            let _ = self.say.send(Said::Text(delta.text));
        }
        if stopped {
            return Some(Finish::Stop);
        }
        let full = self.history.len() >= model.geometry().context;
        (self.produced() >= self.ask.max_tokens || full).then_some(Finish::Length)
    }

    fn end(mut self, finish: Finish) {
        let rest = self.stream.finish().text;
        if !rest.is_empty() {
            let _ = self.say.send(Said::Text(rest));
        }
        let done = Done {
            finish,
            prompt_tokens: self.ask.tokens.len(),
            cached_tokens: self.cached,
            completion_tokens: self.produced(),
        };
        let _ = self.say.send(Said::Done(done));
    }
}

/// The rows of one turn in a batch.
struct Part {
    turn: usize,
    rows: usize,
    want: WantLogits,
}

/// The loop's state.
pub(crate) struct EngineLoop {
    engine: Engine,
    options: Options,
    commands: Receiver<Command>,
    pending: Arc<AtomicUsize>,
    counters: Arc<Counters>,
    /// Turns that have a sequence in the cache.
    turns: Vec<Active>,
    /// Turns that wait: new ones behind, those set aside in front.
    queue: VecDeque<Active>,
    run: Option<Box<Run>>,
    receipts: Receipts,
    measured: Instant,
    arrivals: u64,
    stop: Option<Instant>,
}

/// Ends a segment when its time is over or something happened.
struct Slice<'a> {
    pending: &'a AtomicUsize,
    until: Option<Instant>,
}

impl Stop for Slice<'_> {
    fn should_stop(&self) -> bool {
        self.pending.load(Ordering::Relaxed) > 0
            || self.until.is_some_and(|until| Instant::now() >= until)
    }
}

impl EngineLoop {
    /// A loop over an engine, which hears what is sent by this way.
    pub(crate) fn new(
        engine: Engine,
        options: Options,
        (to, commands): (&ToLoop, Receiver<Command>),
        counters: Arc<Counters>,
    ) -> EngineLoop {
        EngineLoop {
            engine,
            options,
            commands,
            pending: to.pending.clone(),
            counters,
            turns: Vec::new(),
            queue: VecDeque::new(),
            run: None,
            receipts: Receipts::default(),
            measured: Instant::now(),
            arrivals: 0,
            stop: None,
        }
    }

    /// Runs until it is told to stop.
    pub(crate) fn run(mut self) {
        while self.receive() {
            self.drop_the_gone();
            self.admit();
            let busy = !self.turns.is_empty() || !self.queue.is_empty();
            if !self.turns.is_empty() {
                self.batch();
                self.gauges();
            }
            self.segment(busy);
        }
        self.end_run(End::Stopped);
        for turn in self.turns.drain(..).chain(self.queue.drain(..)) {
            let error = Error::new(Code::Stopping, "the server is stopping");
            let _ = turn.say.send(Said::Failed(error));
        }
    }

    /// Takes what has been sent; waits where there is nothing to do. False at the end.
    fn receive(&mut self) -> bool {
        let trains = self.run.as_ref().is_some_and(|run| !run.control.holds());
        let mut idle = self.turns.is_empty() && self.queue.is_empty() && !trains;
        loop {
            if let Some(at) = self.stop
                && (Instant::now() >= at || (self.turns.is_empty() && self.queue.is_empty()))
            {
                return false;
            }
            let command = match idle {
                false => match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => return true,
                    Err(TryRecvError::Disconnected) => return false,
                },
                true => match self.commands.recv_timeout(Duration::from_secs(1)) {
                    Ok(command) => command,
                    Err(RecvTimeoutError::Timeout) => continue,
                    Err(RecvTimeoutError::Disconnected) => return false,
                },
            };
            self.pending.fetch_sub(1, Ordering::Relaxed);
            idle = false;
            match command {
                Command::Wake => {}
                Command::Ask(mut turn) => {
                    turn.number = self.arrivals;
                    self.arrivals += 1;
                    self.queue.push_back(*turn);
                }
                Command::Attach(adapter, reply) => {
                    let _ = reply.send(self.engine.attach(adapter));
                }
                Command::Detach(id) => {
                    self.engine.detach(id);
                }
                Command::Train(run) => {
                    self.run = Some(run);
                    self.receipts = Receipts::default();
                }
                Command::Stop(at) => {
                    self.stop = Some(at);
                    self.end_run(End::Stopped);
                }
            }
        }
    }

    /// Turns whose asker has left give back their slot and pages.
    fn drop_the_gone(&mut self) {
        let (engine, counters) = (&mut self.engine, &self.counters);
        self.turns.retain(|turn| {
            let gone = turn.say.is_closed();
            if gone {
                turn.seq.iter().for_each(|&seq| engine.cache().close(seq));
                counters.cancelled.add(1);
            }
            !gone
        });
        let before = self.queue.len();
        self.queue.retain(|turn| !turn.say.is_closed());
        counters.cancelled.add((before - self.queue.len()) as u64);
        self.gauges();
    }

    fn gauges(&self) {
        self.counters.running.set(self.turns.len() as u64);
        self.counters.waiting.set(self.queue.len() as u64);
        self.counters.free_positions.set(self.engine.free_positions() as u64);
    }

    /// Gives slots to those who wait, in order, as long as the cache has room for what they have
    /// now and a little for those who run.
    fn admit(&mut self) {
        while self.turns.len() < self.options.slots
            && let Some(mut turn) = self.queue.pop_front()
        {
            let (seq, reused) = self.engine.open(&turn.history, turn.adapter());
            let mut wanted: Vec<(SeqId, usize)> =
                self.turns.iter().filter_map(|t| Some((t.seq?, t.pending().len() + 32))).collect();
            let alone = wanted.is_empty();
            wanted.push((seq, turn.history.len() - reused + 1));
            if !alone && !self.engine.can_take(&wanted) {
                self.engine.cache().close(seq);
                self.queue.push_front(turn);
                break;
            }
            (turn.seq, turn.fed) = (Some(seq), reused);
            if turn.produced() == 0 {
                turn.cached = reused;
                self.counters.prompt_tokens.add(turn.history.len() as u64);
                self.counters.cached_tokens.add(reused as u64);
            }
            self.turns.push(turn);
        }
    }

    /// What each turn contributes: its newest token, or a piece of its prompt while there is
    /// room for prompts in the batch.
    fn parts(&self) -> Vec<Part> {
        // Prompt and decode rows together fill a chunk, so that graphs are not padded.
        let decodes = self.turns.iter().filter(|t| t.pending().len() == 1).count();
        let mut room = self.options.prompt_chunk.saturating_sub(decodes).max(16);
        let mut parts = Vec::new();
        for (i, turn) in self.turns.iter().enumerate() {
            let pending = turn.pending().len();
            let rows = if pending == 1 { 1 } else { pending.min(room) };
            if rows == 0 {
                continue;
            }
            if pending > 1 {
                room -= rows;
            }
            let want = if rows == pending { WantLogits::Last } else { WantLogits::None };
            parts.push(Part { turn: i, rows, want });
        }
        parts
    }

    /// One batch: as many turns as the cache has room for. The youngest is set aside where it has
    /// not, and computed again later.
    fn batch(&mut self) {
        let mut parts = self.parts();
        loop {
            let wanted: Vec<(SeqId, usize)> =
                parts.iter().filter_map(|p| Some((self.turns.get(p.turn)?.seq?, p.rows))).collect();
            if self.engine.can_take(&wanted) {
                break;
            }
            let youngest =
                (0..self.turns.len()).max_by_key(|&i| self.turns.get(i).map(|t| t.number));
            let Some(youngest) = youngest else { return };
            let mut turn = self.turns.remove(youngest);
            if let Some(seq) = turn.seq.take() {
                self.engine.cache().close(seq);
            }
            turn.fed = 0;
            if self.turns.is_empty() {
                self.counters.failed.add(1);
                let most = self.engine.free_positions();
                let message = format!(
                    "the turn has {} tokens and the cache holds {most}; start the server with a \
                     larger context",
                    turn.history.len()
                );
                let _ = turn.say.send(Said::Failed(Error::new(Code::ContextExceeded, message)));
                return;
            }
            self.counters.set_aside.add(1);
            self.queue.push_front(turn);
            parts = self.parts();
        }
        let began = Instant::now();
        let logits = match self.forward(&parts) {
            Ok(logits) => logits.into_iter().map(Ok).collect(),
            Err(e) if parts.len() == 1 => vec![Err(e)],
            Err(_) => self.one_by_one(&parts),
        };
        let mut ended: Vec<(usize, Result<Finish>)> = Vec::new();
        let mut tokens = 0;
        let model = self.engine.model().clone();
        for (part, logits) in parts.iter().zip(logits) {
            let Some(turn) = self.turns.get_mut(part.turn) else { continue };
            let logits = match logits {
                Ok(logits) => logits,
                Err(e) => {
                    ended.push((part.turn, Err(e)));
                    continue;
                }
            };
            turn.fed += part.rows;
            if part.want == WantLogits::None {
                continue;
            }
            match turn.sampler.sample(&logits, &turn.history) {
                Ok(sampled) => {
                    tokens += 1;
                    turn.first.get_or_insert_with(Instant::now);
                    if let Some(finish) = turn.took(sampled.id, &model) {
                        ended.push((part.turn, Ok(finish)));
                    }
                }
                Err(e) => {
                    let mut e = Error::from(e);
                    if e.code == Code::NonFinite {
                        e.message = format!("`{}`: {}", turn.ask.model, e.message);
                    }
                    ended.push((part.turn, Err(e)));
                }
            }
        }
        for (i, how) in ended.into_iter().rev() {
            self.end_turn(i, how);
        }
        let took = began.elapsed();
        self.counters.batches.add(1);
        self.counters.batch_micros.add(took.as_micros() as u64);
        self.counters.tokens.add(tokens as u64);
        if let Some(run) = &mut self.run {
            run.pacer.served(took, tokens, Instant::now());
        }
    }

    fn end_turn(&mut self, index: usize, how: Result<Finish>) {
        let turn = self.turns.remove(index);
        turn.seq.iter().for_each(|&seq| self.engine.cache().close(seq));
        match how {
            Ok(finish) => {
                self.counters.finished.add(1);
                if let Some(first) = turn.first {
                    let steps = turn.produced().saturating_sub(1);
                    self.receipts.turn(steps, first.elapsed(), turn.training);
                }
                turn.end(finish);
            }
            Err(e) => {
                self.counters.failed.add(1);
                let _ = turn.say.send(Said::Failed(e));
            }
        }
    }

    /// Runs a batch; a panic is an error like any other.
    fn forward(&mut self, parts: &[Part]) -> Result<Vec<Vec<f32>>> {
        let EngineLoop { engine, turns, .. } = self;
        let rows: Vec<Rows<'_>> = parts
            .iter()
            .filter_map(|part| {
                let turn = turns.get(part.turn)?;
                let tokens = turn.pending().get(..part.rows)?;
                Some(Rows { seq: turn.seq?, tokens, adapter: turn.adapter(), want: part.want })
            })
            .collect();
        match catch_unwind(AssertUnwindSafe(|| engine.forward(&rows))) {
            Ok(logits) => Ok(logits?),
            Err(_) => {
                self.counters.panics.add(1);
                Err(Error::new(Code::Internal, "the engine panicked; this is a bug in Gradus"))
            }
        }
    }

    /// After a batch failed: each turn alone, from its beginning, so that the one that is to blame
    /// fails alone. What a failed run left in the cache is not used.
    fn one_by_one(&mut self, parts: &[Part]) -> Vec<Result<Vec<f32>>> {
        self.counters.reruns.add(1);
        let mut all = Vec::new();
        for part in parts {
            let Some(turn) = self.turns.get_mut(part.turn) else { continue };
            if let Some(seq) = turn.seq.take() {
                self.engine.cache().close(seq);
            }
            let seq = self.engine.cache().open();
            let rows = turn.fed + part.rows;
            (turn.seq, turn.fed) = (Some(seq), 0);
            let alone = Part { turn: part.turn, rows, want: part.want };
            let logits = self.forward(&[alone]).map(|mut l| l.pop().unwrap_or_default());
            if let Some(turn) = self.turns.get_mut(part.turn) {
                // The caller counts the part's own rows.
                turn.fed = rows - part.rows;
            }
            all.push(logits);
        }
        all
    }

    /// Trains for a while, if there is a run and it may.
    fn segment(&mut self, busy: bool) {
        let Some(run) = &mut self.run else { return };
        if run.control.cancel.load(Ordering::Relaxed) {
            return self.end_run(End::Cancelled);
        }
        let pause = run.control.pause.load(Ordering::Relaxed);
        run.control.paused.store(pause, Ordering::Relaxed);
        if run.control.holds() {
            return;
        }
        let now = Instant::now();
        let until = match run.pacer.allowance(busy) {
            Allowance::Wait => return,
            Allowance::Open => None,
            Allowance::For(time) => Some(now + time),
        };
        let slice = Slice { pending: &self.pending, until };
        let trainer = &mut run.trainer;
        let advanced = catch_unwind(AssertUnwindSafe(|| trainer.advance(&slice)));
        let took = now.elapsed();
        run.pacer.trained(took, busy, Instant::now());
        self.counters.training_micros.add(took.as_micros() as u64);
        for turn in self.turns.iter_mut().filter(|t| t.first.is_some()) {
            turn.training += took;
        }
        let end = match advanced {
            Ok(Ok(Advance::Stopped)) => None,
            Ok(Ok(Advance::Event(event))) => {
                match event {
                    Event::Step { .. } => self.counters.steps.add(1),
                    Event::Checkpoint(_) => run.control.writing.store(true, Ordering::Relaxed),
                    _ => {}
                }
                let _ = run.to_owner.send(Progress::Event(event, Instant::now()));
                None
            }
            Ok(Ok(Advance::Done)) => Some(End::Done),
            Ok(Err(e)) => Some(End::Failed(e.into())),
            Err(_) => {
                self.counters.panics.add(1);
                let message = "training panicked; this is a bug in Gradus";
                Some(End::Failed(Error::new(Code::Internal, message)))
            }
        };
        if self.measured.elapsed() >= MEASURED || end.is_some() {
            self.measured = Instant::now();
            let measured = Box::new((run.pacer.stats.clone(), self.receipts.clone()));
            let _ = run.to_owner.send(Progress::Measured(measured));
        }
        if let Some(end) = end {
            self.end_run(end);
        }
    }

    /// Lets go of the run; its owner gives back its memory.
    fn end_run(&mut self, end: End) {
        if let Some(run) = self.run.take() {
            let Run { trainer, to_owner, .. } = *run;
            let _ = to_owner.send(Progress::Ended(Box::new((trainer, end))));
        }
    }
}
