//! The handle that everything outside of the loop holds.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use graph::{Code, DType};
use model::{Adapter, Engine, EngineConfig, Model};

use crate::engine_loop::{Active, Command, Control, EngineLoop, Place, ToLoop};
use crate::metrics::{Counters, Metric};
use crate::registry::{self, Alias, Attached, Generation, Registry};
use crate::request::names;
use crate::{Ask, Error, Result, Served, TrainStatus, Turn};

/// How a server is set up.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// The base model's name.
    pub name: String,
    /// Turns that run at once, 1 to 256.
    pub slots: usize,
    /// Turns that may wait, 0 to 65,536.
    pub queue: usize,
    /// Element type of the cache.
    pub cache: DType,
    /// Positions the cache holds, over all turns.
    pub positions: usize,
    /// Rows of a batch while there are prompts, 16 to 4,096: longer ones hold the other turns up.
    pub prompt_chunk: usize,
    /// The folder that jobs write to and adapters are loaded from; training is off without it.
    pub train_dir: Option<PathBuf>,
    /// How fast the device is, where plans are to say how long jobs take.
    pub rates: Option<train::Rates>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            name: "base".into(),
            slots: 8,
            queue: 64,
            cache: DType::F16,
            positions: 8192,
            prompt_chunk: 128,
            train_dir: None,
            rates: None,
        }
    }
}

/// How long a server that stops waits for the checkpoint of its job.
const LAST_WORDS: Duration = Duration::from_secs(20);

/// Bytes that reading an adapter may take for each that it has on the disk: those themselves, twice
/// as many as f32 where they are stored in 16 bits, and once more where rows are put in another order.
const READING: usize = 4;

/// Memory that adapters leave to what serving takes as it goes.
const KEPT_FREE: usize = 64 << 20;

/// What the handles share.
pub(crate) struct Shared {
    pub(crate) model: Arc<Model>,
    pub(crate) options: Options,
    pub(crate) to_loop: ToLoop,
    pub(crate) counters: Arc<Counters>,
    pub(crate) registry: Mutex<Registry>,
    /// Held while an adapter is read to be served.
    loading: Mutex<()>,
    pub(crate) status: Mutex<TrainStatus>,
    /// The controls of the run that is there, under the name it is controlled by.
    pub(crate) control: Mutex<Option<(String, Arc<Control>)>>,
    /// What the thread of jobs is to do. Jobs are set up and brought to their end on one thread:
    /// an allocator keeps memory by thread.
    pub(crate) work: Mutex<Sender<Work>>,
    stopping: AtomicBool,
    /// Turns that run or wait.
    places: Arc<AtomicUsize>,
    thread: Mutex<Option<JoinHandle<()>>>,
    started: u64,
}

/// Something the thread of jobs does.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// A model being served. Cheap to clone; every method may be called from any thread.
#[derive(Clone)]
pub struct Server(pub(crate) Arc<Shared>);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn spawn(name: &str, what: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(what)
        .map_err(|e| Error::new(Code::OutOfMemory, format!("no thread for {name}: {e}")))
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

impl Server {
    /// Takes the cache and starts the loop.
    ///
    /// # Errors
    /// An option that is out of range, by name; or when memory or a thread cannot be had.
    pub fn start(model: Arc<Model>, options: Options) -> Result<Server> {
        for (field, value, least, most) in [
            ("slots", options.slots, 1, 256),
            ("queue", options.queue, 0, 65_536),
            ("prompt_chunk", options.prompt_chunk, 16, 4096),
        ] {
            if value < least || value > most {
                let message = format!("`{field}` is {value}; expected {least} to {most}");
                return Err(Error::field(field, message));
            }
        }
        let config = EngineConfig {
            cache: options.cache,
            positions: options.positions,
            batch: options.prompt_chunk.max(options.slots),
            // As many again for the states at which prefixes are reused.
            states: 2 * options.slots + 2,
        };
        let engine = Engine::new(model.clone(), config)?;
        let counters = Arc::new(Counters::default());
        let (to_loop, commands) = ToLoop::new();
        let engine_loop =
            EngineLoop::new(engine, options.clone(), (&to_loop, commands), counters.clone());
        let thread = spawn("engine", move || engine_loop.run())?;
        let (work, jobs) = std::sync::mpsc::channel::<Work>();
        // It ends with the last handle.
        spawn("jobs", move || jobs.into_iter().for_each(|work| work()))?;
        Ok(Server(Arc::new(Shared {
            model,
            options,
            to_loop,
            counters,
            registry: Mutex::default(),
            loading: Mutex::default(),
            status: Mutex::default(),
            control: Mutex::default(),
            work: Mutex::new(work),
            stopping: AtomicBool::new(false),
            places: Arc::default(),
            thread: Mutex::new(Some(thread)),
            started: now(),
        })))
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.0.model
    }

    /// How it was set up.
    pub fn options(&self) -> &Options {
        &self.0.options
    }

    /// What can be asked for: the base model first, then every alias that something is served
    /// under or learned for.
    pub fn names(&self) -> Vec<Served> {
        let mut names = vec![Served {
            name: self.0.options.name.clone(),
            generation: 0,
            created: self.0.started,
            file: None,
            shadow_steps: None,
        }];
        for (name, alias) in lock(&self.0.registry).iter() {
            let served = alias.served.as_ref();
            names.push(Served {
                name: name.clone(),
                generation: served.map_or(0, |g| g.number),
                created: served.map_or(0, |g| g.created),
                file: served.and_then(|g| g.file.clone()),
                shadow_steps: alias.shadow.as_ref().map(|s| s.steps),
            });
        }
        names
    }

    /// The generation of an alias, or none for the base model.
    fn resolve(&self, name: &str) -> Result<Option<Arc<Generation>>> {
        if name == self.0.options.name {
            return Ok(None);
        }
        let registry = lock(&self.0.registry);
        match registry.get(name).and_then(|alias| alias.served.clone()) {
            Some(generation) => Ok(Some(generation)),
            None => {
                let mut known = vec![self.0.options.name.as_str()];
                let served = registry.iter().filter(|(_, a)| a.served.is_some());
                known.extend(served.map(|(n, _)| n.as_str()));
                let message =
                    format!("there is no model `{name}`; there are: {}", known.join(", "));
                let error = Error::new(Code::UnknownModel, message);
                Err(Error { field: Some("model".into()), ..error })
            }
        }
    }

    /// Asks for an answer. Never waits.
    ///
    /// # Errors
    /// When the model is not known, the prompt does not fit the context, a setting is out of
    /// range, too many wait already, or the server is stopping.
    pub fn ask(&self, ask: Ask) -> Result<Turn> {
        if self.0.stopping.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Stopping, "the server is stopping"));
        }
        let generation = self.resolve(&ask.model)?;
        let context = self.0.model.geometry().context.min(self.0.options.positions);
        let tokens = ask.tokens.len();
        if tokens == 0 {
            return Err(Error::field(
                "messages",
                "the prompt is empty; expected at least one token",
            ));
        }
        if tokens >= context {
            let message = format!(
                "the prompt has {tokens} tokens; the context holds {context}, and the answer needs \
                 some of it"
            );
            let error = Error::new(Code::ContextExceeded, message);
            return Err(Error { field: Some("messages".into()), ..error });
        }
        let vocab = self.0.model.geometry().vocab;
        if let Some(bad) = ask.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(Error::field(
                "prompt",
                format!("token {bad} is outside of the vocabulary"),
            ));
        }
        let Options { queue, slots, .. } = self.0.options;
        let most = queue + slots;
        let place = Place::take(&self.0.places, most).ok_or_else(|| {
            let message =
                format!("{most} requests run or wait, the most there may be; try again later");
            Error::new(Code::QueueFull, message)
        })?;
        let number = generation.as_ref().map_or(0, |g| g.number);
        let (say, said) = tokio::sync::mpsc::unbounded_channel();
        let turn = Box::new(Active::new(ask, generation, say, place)?);
        match self.0.to_loop.send(Command::Ask(turn)) {
            true => Ok(Turn { said, generation: number }),
            false => Err(Error::new(Code::Stopping, "the server has stopped")),
        }
    }

    /// Makes an adapter a new generation of an alias. Turns in flight keep the one they have.
    pub(crate) fn publish(
        &self,
        alias: &str,
        adapter: Arc<Adapter>,
        file: Option<PathBuf>,
    ) -> Result<u64> {
        let attached = self.attach(adapter)?;
        Ok(self.publish_attached(alias, attached, file))
    }

    fn publish_attached(&self, alias: &str, of: Arc<Attached>, file: Option<PathBuf>) -> u64 {
        let (number, before) = lock(&self.0.registry).publish(alias, of, file, now());
        // Without the lock.
        drop(before);
        number
    }

    /// Has the loop know an adapter, unless it knows one of the same content.
    fn attach(&self, adapter: Arc<Adapter>) -> Result<Arc<Attached>> {
        let known = lock(&self.0.registry).attached();
        if let Some(same) = known.into_iter().find(|a| registry::same(&a.adapter, &adapter)) {
            return Ok(same);
        }
        let stopped = || Error::new(Code::Stopping, "the server has stopped");
        let (reply, answer) = std::sync::mpsc::channel();
        if !self.0.to_loop.send(Command::Attach(adapter.clone(), reply)) {
            return Err(stopped());
        }
        let id = answer.recv().map_err(|_| stopped())?;
        Ok(Arc::new(Attached { id, adapter, to_loop: self.0.to_loop.clone() }))
    }

    /// Reads an adapter, a file or a folder of PEFT, and serves it under an alias: what is on the
    /// disk now. Where that is what the alias serves already, it stays the same generation, so that
    /// a retry after a lost answer finds what the first try did.
    ///
    /// # Errors
    /// When the name is not allowed, there are too many aliases or too little memory, or the file is
    /// no adapter of this model.
    pub fn load_adapter(&self, alias: &str, file: &Path) -> Result<u64> {
        self.check_alias(alias)?;
        // One after another: each is held against the memory that the others have left.
        let _one = lock(&self.0.loading);
        lock(&self.0.registry).room_for(alias)?;
        self.check_memory(file)?;
        let attached = self.attach(Arc::new(Adapter::read(file, &self.0.model)?))?;
        let served = lock(&self.0.registry).get(alias).and_then(|a| a.served.clone());
        if let Some(served) = served
            && Arc::ptr_eq(&served.attached, &attached)
            && served.file.as_deref() == Some(file)
        {
            return Ok(served.number);
        }
        Ok(self.publish_attached(alias, attached, Some(file.to_path_buf())))
    }

    /// Refuses to read an adapter that would leave too little memory to serve with.
    fn check_memory(&self, file: &Path) -> Result<()> {
        let len = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
        let stored = match file.is_dir() {
            true => len(&file.join("adapter_model.safetensors")),
            false => len(file),
        };
        let stored = usize::try_from(stored).unwrap_or(usize::MAX);
        let needed = stored.saturating_mul(READING);
        match self.0.model.device().available() {
            Some(free) if needed.saturating_add(KEPT_FREE) > free => {
                let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
                let message = format!(
                    "reading an adapter of {:.1} MiB may take {:.1} MiB, but {:.1} MiB are free, of \
                     which {:.0} MiB are kept for serving; unload other adapters first",
                    mib(stored),
                    mib(needed),
                    mib(free),
                    mib(KEPT_FREE)
                );
                Err(Error::new(Code::OverBudget, message).with_field("name"))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check_alias(&self, alias: &str) -> Result<()> {
        names::check_alias("alias", alias, &self.0.options.name)
    }

    /// Serves nothing under an alias any more. Turns in flight end as they would have; what was
    /// learned for it and not promoted stays.
    ///
    /// # Errors
    /// When nothing is served under it.
    pub fn unload_adapter(&self, alias: &str) -> Result<()> {
        let taken = self.alias(alias, |entry| {
            entry.promoted = None;
            entry.served.take()
        });
        match taken.flatten() {
            Some(_) => Ok(()),
            None => Err(self.unknown(alias)),
        }
    }

    pub(crate) fn unknown(&self, alias: &str) -> Error {
        let shown: String = alias.chars().take(200).collect();
        let error = Error::new(
            Code::UnknownModel,
            format!("there is no adapter `{}`", shown.escape_debug()),
        );
        Error { field: Some("alias".into()), ..error }
    }

    /// Changes an alias that is there; it is gone if nothing is left of it.
    pub(crate) fn alias<T>(&self, alias: &str, with: impl FnOnce(&mut Alias) -> T) -> Option<T> {
        lock(&self.0.registry).with(alias, with)
    }

    /// Everything that is counted.
    pub fn metrics(&self) -> Vec<Metric> {
        self.0.counters.all()
    }

    /// Counts a panic that was caught outside of the loop.
    pub(crate) fn count_panic(&self) {
        self.0.counters.panics.add(1);
    }

    /// True while requests are taken.
    pub fn is_ready(&self) -> bool {
        !self.0.stopping.load(Ordering::Relaxed)
    }

    /// Takes no more requests, cancels training, and waits until the running turns have ended,
    /// at most this long.
    pub fn stop(&self, patience: Duration) {
        self.0.stopping.store(true, Ordering::Relaxed);
        let at = Instant::now().checked_add(patience).unwrap_or_else(Instant::now);
        self.0.to_loop.send(Command::Stop(at));
        let thread = lock(&self.0.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        // What a job is at gets written.
        let until = Instant::now() + LAST_WORDS;
        while lock(&self.0.control).is_some() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
