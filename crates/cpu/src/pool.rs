//! Threads that share the tiles of one job at a time.
//!
//! A job is a number of tiles, fixed by shapes alone. The caller and the workers claim tiles in
//! order from one counter; whoever is out of tiles spins briefly, then parks. A stop request is
//! looked at after every tile: claiming ends there, claimed tiles are finished, and what is left
//! is a suffix of the job. A tile that panics ends the job with a message.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use graph::Stop;

/// How long a thread without work spins before it parks: longer than the steps of a small model
/// are apart, shorter than what a wake-up costs many times over.
const SPIN: Duration = Duration::from_micros(40);

/// How many times a thread looks for work between two looks at the clock.
const LOOKS: usize = 32;

/// Keeps counters that different threads write on cache lines of their own.
#[repr(align(128))]
struct Line<T>(T);

/// What the threads run: a tile, by the worker of this number.
type Run<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The current job. Its references live as long as a tile of it is claimed and unfinished.
#[derive(Copy, Clone)]
struct Current {
    run: *const Run<'static>,
    stop: *const (dyn Stop + 'static),
    /// One past the last tile.
    end: usize,
}

struct Shared {
    /// Written by the caller while no tile is claimed or claimable.
    current: UnsafeCell<Option<Current>>,
    /// Tiles that nobody has claimed; a claim takes one off.
    unclaimed: Line<AtomicUsize>,
    /// Tiles that have run.
    finished: Line<AtomicUsize>,
    /// Tiles given up because of a stop or a panic.
    left: AtomicUsize,
    parked: Vec<Line<AtomicBool>>,
    caller_parked: AtomicBool,
    caller: Mutex<Option<Thread>>,
    panic: Mutex<Option<String>>,
    shutdown: AtomicBool,
}

// SAFETY: `current` is written only by the thread that holds the session, and only while
// `unclaimed` is 0 and every claimed tile is finished; others read it only between claiming a
// tile and finishing it. Both edges are ordered by `unclaimed` and `finished`.
unsafe impl Sync for Shared {}
// SAFETY: as above; what `current` points to is `Sync`.
unsafe impl Send for Shared {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Claims a tile: how many were unclaimed, this one included.
    fn claim(&self) -> Option<usize> {
        let mut n = self.unclaimed.0.load(Ordering::Acquire);
        while n > 0 {
            let claim = self.unclaimed.0.compare_exchange_weak(
                n,
                n - 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            match claim {
                Ok(_) => return Some(n),
                Err(now) => n = now,
            }
        }
        None
    }

    /// Gives up what is unclaimed.
    fn halt(&self) {
        let rest = self.unclaimed.0.swap(0, Ordering::AcqRel);
        if rest > 0 {
            self.left.store(rest, Ordering::Release);
        }
    }

    /// Claims and runs tiles until none are left.
    fn work(&self, worker: usize) {
        while let Some(n) = self.claim() {
            // SAFETY: this thread has claimed a tile and not finished it, so `current` is set
            // and is not written.
            if let Some(job) = unsafe { *self.current.get() } {
                // SAFETY: as above, so what they point to is alive.
                let (run, stop) = unsafe { (&*job.run, &*job.stop) };
                let tile = || {
                    run(worker, job.end - n);
                    stop.should_stop()
                };
                match catch_unwind(AssertUnwindSafe(tile)) {
                    Ok(false) => {}
                    Ok(true) => self.halt(),
                    Err(payload) => {
                        lock(&self.panic).get_or_insert(message(&*payload));
                        self.halt();
                    }
                }
            }
            self.finished.0.fetch_add(1, Ordering::SeqCst);
            if self.caller_parked.load(Ordering::SeqCst)
                && let Some(caller) = &*lock(&self.caller)
            {
                caller.unpark();
            }
        }
    }

    fn run_worker(&self, worker: usize, parked: &AtomicBool) {
        let idle = || {
            self.unclaimed.0.load(Ordering::SeqCst) == 0 && !self.shutdown.load(Ordering::SeqCst)
        };
        while !self.shutdown.load(Ordering::Acquire) {
            self.work(worker);
            if spin_while(idle) {
                parked.store(true, Ordering::SeqCst);
                while idle() {
                    std::thread::park();
                }
                parked.store(false, Ordering::SeqCst);
            }
        }
    }
}

/// Spins while `waiting`, for a short time; true when that time was not enough.
fn spin_while(waiting: impl Fn() -> bool) -> bool {
    let mut start = None;
    loop {
        for _ in 0..LOOKS {
            if !waiting() {
                return false;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
            return true;
        }
    }
}

/// The text of a panic.
pub(crate) fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_string()
}

/// How a job ended.
pub(crate) struct Outcome {
    /// Tiles that did not run: the last ones of the job.
    pub(crate) left: usize,
    /// The message of the first tile that panicked.
    pub(crate) panic: Option<String>,
}

/// The threads of one device.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    session: Mutex<()>,
}

impl Pool {
    /// Starts `threads - 1` workers; the caller of a job is the remaining one.
    pub(crate) fn new(threads: usize) -> std::io::Result<Pool> {
        let count = threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            current: UnsafeCell::new(None),
            unclaimed: Line(AtomicUsize::new(0)),
            finished: Line(AtomicUsize::new(0)),
            left: AtomicUsize::new(0),
            parked: (0..count).map(|_| Line(AtomicBool::new(false))).collect(),
            caller_parked: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
            shutdown: AtomicBool::new(false),
        });
        // Dropped, and so shut down, when a thread cannot be started.
        let mut pool = Pool { shared, workers: Vec::new(), session: Mutex::new(()) };
        for worker in 0..count {
            let shared = pool.shared.clone();
            let run = move || {
                if let Some(parked) = shared.parked.get(worker) {
                    shared.run_worker(worker + 1, &parked.0);
                }
            };
            let name = format!("gradus-cpu-{}", worker + 1);
            pool.workers.push(std::thread::Builder::new().name(name).spawn(run)?);
        }
        Ok(pool)
    }

    /// Threads that share a job, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Waits until no other thread runs jobs, then runs jobs for this one.
    pub(crate) fn session(&self) -> Session<'_> {
        let guard = lock(&self.session);
        *lock(&self.shared.caller) = Some(std::thread::current());
        Session { pool: self, _guard: guard }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches what its tiles throw; there is nobody to tell of anything else.
            let _ = worker.join();
        }
    }
}

/// The right to run jobs on a pool.
pub(crate) struct Session<'p> {
    pool: &'p Pool,
    _guard: MutexGuard<'p, ()>,
}

impl Session<'_> {
    /// Runs tiles `begin .. end`, each once, by worker 0 (this thread) or another below
    /// [`Pool::threads`], until all have run or `stop`, asked after every tile, says so.
    pub(crate) fn run(&self, begin: usize, end: usize, stop: &dyn Stop, run: &Run<'_>) -> Outcome {
        let shared = &*self.pool.shared;
        let tiles = end.saturating_sub(begin);
        // SAFETY: only the lifetimes change. They end after this function returns, and before
        // that no tile is claimable and all claimed ones are finished.
        let current = unsafe {
            Current {
                run: std::mem::transmute::<*const Run<'_>, *const Run<'static>>(run),
                stop: std::mem::transmute::<*const dyn Stop, *const (dyn Stop + 'static)>(stop),
                end,
            }
        };
        shared.left.store(0, Ordering::Relaxed);
        shared.finished.0.store(0, Ordering::Relaxed);
        // SAFETY: the session is this thread's, and its last job has no unfinished tile.
        unsafe { *shared.current.get() = Some(current) };
        shared.unclaimed.0.store(tiles, Ordering::SeqCst);
        self.wake(tiles.saturating_sub(1));
        shared.work(0);
        let waiting = || {
            let left = shared.left.load(Ordering::Acquire);
            shared.finished.0.load(Ordering::SeqCst) + left < tiles
        };
        if spin_while(waiting) {
            shared.caller_parked.store(true, Ordering::SeqCst);
            while waiting() {
                std::thread::park();
            }
            shared.caller_parked.store(false, Ordering::SeqCst);
        }
        let left = shared.left.load(Ordering::Acquire);
        Outcome { left, panic: lock(&shared.panic).take() }
    }

    /// Wakes parked workers until `wanted` are awake.
    fn wake(&self, mut wanted: usize) {
        for (worker, parked) in self.pool.workers.iter().zip(&self.pool.shared.parked) {
            if wanted == 0 {
                return;
            }
            wanted -= 1;
            if parked.0.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn counts(n: usize) -> Vec<AtomicU32> {
        (0..n).map(|_| AtomicU32::new(0)).collect()
    }

    #[test]
    fn every_tile_runs_once() {
        for threads in 1..5 {
            let pool = Pool::new(threads).unwrap();
            let session = pool.session();
            for round in 0..500 {
                let (begin, end) = (round % 7, round % 7 + round % 23);
                let ran = counts(end);
                let outcome = session.run(begin, end, &(), &|worker, tile| {
                    assert!(worker < threads);
                    ran[tile].fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(outcome.left, 0);
                for (tile, n) in ran.iter().enumerate() {
                    assert_eq!(n.load(Ordering::Relaxed), u32::from(tile >= begin));
                }
                if round % 100 == 0 {
                    std::thread::sleep(SPIN * 5); // so that workers park
                }
            }
        }
    }

    /// Says stop from the `n`th question on.
    struct After(AtomicUsize, usize);

    impl Stop for After {
        fn should_stop(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) + 1 >= self.1
        }
    }

    #[test]
    fn a_stop_leaves_a_suffix() {
        for threads in 1..4 {
            let pool = Pool::new(threads).unwrap();
            let session = pool.session();
            for after in 1..60 {
                let ran = counts(50);
                let stop = After(AtomicUsize::new(0), after);
                let outcome = session.run(0, 50, &stop, &|_, tile| {
                    ran[tile].fetch_add(1, Ordering::Relaxed);
                });
                let done = 50 - outcome.left;
                for (tile, n) in ran.iter().enumerate() {
                    assert_eq!(n.load(Ordering::Relaxed), u32::from(tile < done));
                }
                if threads == 1 {
                    assert_eq!(done, after.min(50));
                }
                assert!(done >= after.min(50) && done < after + threads);
            }
        }
    }

    #[test]
    fn a_panic_is_a_message_and_the_pool_lives_on() {
        for threads in 1..4 {
            let pool = Pool::new(threads).unwrap();
            for _ in 0..20 {
                let outcome = pool.session().run(0, 40, &(), &|_, tile| {
                    assert!(tile != 17, "tile seventeen");
                });
                assert_eq!(outcome.panic.as_deref(), Some("tile seventeen"));
                let outcome = pool.session().run(0, 40, &(), &|_, _| ());
                assert!(outcome.panic.is_none() && outcome.left == 0);
            }
        }
    }

    #[test]
    fn sessions_of_several_threads_take_turns() {
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.session().run(0, 10, &(), &|_, _| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 2000);
    }
}
