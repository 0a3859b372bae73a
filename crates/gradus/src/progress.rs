//! Progress of long work: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{bytes, duration, note};

/// What is counted.
#[derive(Copy, Clone, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Steps, windows, cases.
    Items,
}

/// The bar that is on the terminal.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Writes something, without tearing the bar apart that may be on the terminal.
pub fn aside<T>(write: impl FnOnce() -> T) -> T {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match shown {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// One piece of work of known size. When it is dropped, the bar goes.
pub struct Progress {
    what: String,
    unit: Unit,
    total: u64,
    /// None where standard error is no terminal.
    bar: Option<ProgressBar>,
    said: Option<(Instant, u64)>,
    /// When the work was first heard of, and how much of it was done then: work that goes on where
    /// it was left has not been done in no time.
    begun: Option<(Instant, u64)>,
}

/// Between two plain lines at least this much time passes ...
const LINE_TIME: Duration = Duration::from_secs(2);
/// ... or this part of the work.
const LINES: u64 = 20;

impl Progress {
    /// Begins to report on `what`.
    pub fn new(what: &str, unit: Unit, total: u64) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        let bar = terminal.then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
            let counts = match unit {
                Unit::Bytes => "{bytes}/{total_bytes} {bytes_per_sec}",
                Unit::Items => "{pos}/{len}",
            };
            let template = format!("{{prefix}} [{{wide_bar}}] {counts} {{msg}} {{eta}} left");
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(what.to_string());
            *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.clone());
            bar
        });
        Progress { what: what.to_string(), unit, total, bar, said: None, begun: None }
    }

    /// So much is done; `message` says something about it, such as a loss.
    pub fn set(&mut self, done: u64, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(message.to_string());
            bar.set_position(done);
            if self.begun.is_none() {
                bar.reset_eta();
                self.begun = Some((Instant::now(), done));
            }
            return;
        }
        let (begun, from) = *self.begun.get_or_insert_with(|| (Instant::now(), done));
        let due = match self.said {
            None => true,
            Some((at, before)) => {
                done >= self.total
                    || at.elapsed() >= LINE_TIME
                    || done.saturating_sub(before) >= (self.total / LINES).max(1)
            }
        };
        let news = self.said.is_none_or(|(_, before)| before != done);
        if due && news {
            self.said = Some((Instant::now(), done));
            let (what, total) = (&self.what, self.total);
            let counts = match self.unit {
                Unit::Bytes => format!("{} of {}", bytes(done), bytes(total)),
                Unit::Items => format!("{done}/{total}"),
            };
            let left = left(begun.elapsed(), done.saturating_sub(from), total.saturating_sub(done));
            let left = left.map_or(String::new(), |left| format!("  {} left", duration(left)));
            note(format!("{what} {counts} {message}{left}").trim_end());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// How long the rest takes at the rate so far; `None` while there is no rate, or no rest.
fn left(elapsed: Duration, done: u64, rest: u64) -> Option<Duration> {
    let seconds = elapsed.as_secs_f64() * rest as f64 / done as f64;
    Duration::try_from_secs_f64(seconds).ok().filter(|_| done > 0 && rest > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_the_rest_at_the_rate_so_far() {
        let seconds = Duration::from_secs;
        assert_eq!(left(seconds(10), 5, 20), Some(seconds(40)));
        assert_eq!(left(seconds(10), 0, 20), None);
        assert_eq!(left(seconds(10), 5, 0), None);
        assert_eq!(left(Duration::MAX, 1, u64::MAX), None);
    }
}
