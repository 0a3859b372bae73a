//! Progress of long work: a bar on a terminal, plain lines elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::{bytes, note};

/// What is counted.
#[derive(Copy, Clone, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Steps, windows, cases.
    Items,
}

/// One piece of work of known size.
pub struct Progress {
    what: String,
    unit: Unit,
    total: u64,
    /// None where standard error is no terminal.
    bar: Option<ProgressBar>,
    said: Option<(Instant, u64)>,
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
            let template = format!("{{prefix}} [{{bar:28}}] {counts} {{msg}} {{eta}} left");
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(what.to_string());
            bar
        });
        Progress { what: what.to_string(), unit, total, bar, said: None }
    }

    /// So much is done; `message` says something about it, such as a loss.
    pub fn set(&mut self, done: u64, message: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(message.to_string());
            bar.set_position(done);
            return;
        }
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
            note(format!("{what} {counts} {message}").trim_end());
        }
    }

    /// Says a line without tearing the bar apart.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    /// The work is over; the bar goes.
    pub fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
