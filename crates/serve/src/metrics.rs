//! Numbers that the loop counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that threads share.
#[derive(Default)]
pub(crate) struct Number(AtomicU64);

impl Number {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether a number only grows.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum MetricKind {
    /// It only grows.
    Counter,
    /// It is what it is now.
    Gauge,
}

/// One number with its name and meaning.
#[derive(Copy, Clone, PartialEq, Debug)]
pub struct Metric {
    /// In the style of Prometheus, unit last.
    pub name: &'static str,
    /// One line.
    pub help: &'static str,
    /// Its kind.
    pub kind: MetricKind,
    /// Its value.
    pub value: f64,
}

macro_rules! counters {
    ($($field:ident = $kind:ident $name:literal / $scale:literal, $help:literal;)*) => {
        /// Everything that is counted.
        #[derive(Default)]
        pub(crate) struct Counters { $(pub(crate) $field: Number,)* }

        impl Counters {
            /// All of it, in order.
            pub(crate) fn all(&self) -> Vec<Metric> {
                vec![$(Metric {
                    name: $name,
                    help: $help,
                    kind: MetricKind::$kind,
                    value: self.$field.get() as f64 / $scale,
                },)*]
            }
        }
    };
}

counters! {
    running = Gauge "gradus_turns_running" / 1.0, "Turns that have a slot.";
    waiting = Gauge "gradus_turns_waiting" / 1.0, "Turns that wait for a slot or for room.";
    finished = Counter "gradus_turns_finished_total" / 1.0, "Turns that came to their end.";
    cancelled = Counter "gradus_turns_cancelled_total" / 1.0, "Turns whose client left.";
    failed = Counter "gradus_turns_failed_total" / 1.0, "Turns that ended with an error.";
    set_aside = Counter "gradus_turns_set_aside_total" / 1.0,
        "Turns set aside because the cache was full, to be computed again.";
    prompt_tokens = Counter "gradus_prompt_tokens_total" / 1.0, "Tokens of prompts.";
    cached_tokens = Counter "gradus_prompt_tokens_cached_total" / 1.0,
        "Tokens of prompts that were in the cache already.";
    tokens = Counter "gradus_generated_tokens_total" / 1.0, "Tokens generated.";
    batches = Counter "gradus_batches_total" / 1.0, "Batches of turns.";
    batch_micros = Counter "gradus_batch_seconds_total" / 1e6, "Time in batches of turns.";
    reruns = Counter "gradus_batches_rerun_total" / 1.0,
        "Batches that failed and were run again turn by turn.";
    free_positions = Gauge "gradus_cache_free_positions" / 1.0,
        "Positions of the cache that a turn could get.";
    steps = Counter "gradus_training_steps_total" / 1.0, "Optimizer steps.";
    training_micros = Counter "gradus_training_seconds_total" / 1e6, "Time in training segments.";
    jobs_done = Counter "gradus_training_jobs_done_total" / 1.0, "Jobs that came to their end.";
    jobs_failed = Counter "gradus_training_jobs_failed_total" / 1.0,
        "Jobs refused, failed or cancelled.";
    panics = Counter "gradus_panics_total" / 1.0,
        "Panics caught at the last belt; each is a bug.";
}
