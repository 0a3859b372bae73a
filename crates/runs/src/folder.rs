//! The folder of a run that is going on.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use files::Lock;

use crate::chart::{Series, loss_chart};
use crate::error::{Context, Error, Result};
use crate::events::{self, EventFile};
use crate::history::History;
use crate::metrics::{self, Evaluation, Line, Step};
use crate::page;
use crate::record::{self, End, Planned, Record, Resumed, RunInfo, State};

pub(crate) const METRICS: &str = "metrics.jsonl";
const CHART: &str = "loss.svg";
const REPORT: &str = "report.html";
const LOCK: &str = "run.lock";

/// How often the curve and the report are written anew while a run goes on ...
const REFRESH: Duration = Duration::from_secs(20);
/// ... unless that takes more than this part of the time.
const PART: u32 = 200;
/// Bytes a run's name may have: a number is added to it, and file systems allow some 255.
const NAME: usize = 120;

/// A run folder that is written to.
///
/// What is measured is appended at once, a line a step, so that it is there whatever ends the
/// process; the curve and the report follow now and then. A folder that can no longer be written
/// does not concern the run: the first error is given back, once, and the recording of what
/// failed ends. While the value lives, the folder is known to others as a run that goes on.
pub struct RunFolder {
    path: PathBuf,
    record: Record,
    history: History,
    /// Both `None` once they could not be written.
    metrics: Option<File>,
    events: Option<EventFile>,
    refreshed: Instant,
    refresh: Duration,
    /// An error has been given back.
    said: bool,
    /// Held until the value is dropped.
    _lock: Lock,
}

/// The default name of a run that writes the file `out`: the time, and what the file is called.
///
/// ```
/// let name = runs::default_name("adapters/facts.gguf".as_ref());
/// assert!(name.starts_with("20") && name.ends_with("-facts"), "{name}");
/// ```
pub fn default_name(out: &Path) -> String {
    let stem = out.file_stem().unwrap_or_default().to_string_lossy();
    let fits = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let stem: String = stem.chars().map(fits).take(NAME / 2).collect();
    let time = jiff::ZonedDateTime::now().strftime("%Y-%m-%d-%H%M%S");
    format!("{time}-{stem}").trim_end_matches(['-', '.']).to_string()
}

/// Checks that a name is that of a folder, in any file system.
///
/// # Errors
/// [`Error::Name`].
pub fn check_name(name: &str) -> Result<()> {
    let refused = |reason| Err(Error::Name { name: name.to_string(), reason });
    if name.is_empty() {
        return refused("it is empty");
    }
    if name.len() > NAME {
        return refused("it has more than 120 bytes");
    }
    if name.chars().any(|c| c.is_control() || r#"/\<>:"|?*"#.contains(c)) {
        return refused("it has a character that folders cannot have everywhere");
    }
    if name.starts_with(['.', '-', ' ']) || name.ends_with(['.', ' ']) {
        return refused("it begins with `.`, `-` or a space, or ends with `.` or a space");
    }
    Ok(())
}

/// Takes the lock of a run folder. A look at it ([`is_running`]) holds it for a moment, which is
/// waited for.
fn lock(folder: &Path) -> Result<Lock> {
    let path = folder.join(LOCK);
    for _ in 0..20 {
        if let Some(lock) = Lock::take(&path).during("open", &path)? {
            return Ok(lock);
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(Error::Running { path: folder.to_path_buf() })
}

/// What a file of numbers has of a run.
#[derive(Copy, Clone)]
pub(crate) struct Recorded {
    /// How many steps.
    pub(crate) steps: u64,
    /// The last of them; 0 where there are none.
    pub(crate) last: u64,
}

/// The note that numbers are missing of a run that goes on after `step`, whose files have so much
/// of the steps before; `note` is what it was until now.
fn unrecorded(note: Option<String>, files: [Recorded; 2], step: u64) -> Option<String> {
    if files.iter().all(|file| file.steps >= step) {
        // What was lost came later, and is measured again.
        return None;
    }
    let note = note.unwrap_or_else(|| format!("numbers of steps up to {step} are missing"));
    // The files end before it: now they go on.
    let ends = files.iter().any(|file| file.last < step);
    Some(if ends { format!("{note}; recording went on after step {step}") } else { note })
}

/// True while a process has the folder as a [`RunFolder`].
pub(crate) fn is_running(folder: &Path) -> bool {
    Lock::is_taken(&folder.join(LOCK))
}

impl RunFolder {
    /// Makes the folder `name` in `root`, or `name-2` and so on where that is taken.
    ///
    /// # Errors
    /// A name that is no folder's, and what the system refuses: a run that cannot be recorded is
    /// best known before it starts.
    pub fn create(root: &Path, name: &str, info: RunInfo) -> Result<RunFolder> {
        RunFolder::make(root, name, Record::new(info), 0)
    }

    /// As [`RunFolder::create`], for a run that goes on after a step and has no record that could:
    /// `why` says what became of it.
    ///
    /// # Errors
    /// As [`RunFolder::create`].
    pub fn create_after(
        root: &Path,
        name: &str,
        info: RunInfo,
        (step, why): (u64, &str),
    ) -> Result<RunFolder> {
        let mut record = Record::new(info);
        record.resumed.push(Resumed { at: record::now(), step });
        record.unrecorded = Some(format!("steps up to {step} are not in this record: {why}"));
        RunFolder::make(root, name, record, step)
    }

    fn make(root: &Path, name: &str, record: Record, after: u64) -> Result<RunFolder> {
        check_name(name)?;
        fs::create_dir_all(root).during("make the folder", root)?;
        let mut path = root.join(name);
        for number in 2.. {
            match fs::create_dir(&path) {
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                    path = root.join(format!("{name}-{number}"));
                }
                made => {
                    made.during("make the folder", &path)?;
                    break;
                }
            }
        }
        let lock = lock(&path)?;
        record.write(&path)?;
        let mut folder = RunFolder::open(path, record, History::default(), after, lock)?;
        folder.pages()?;
        Ok(folder)
    }

    /// Goes on with a run after a step: what it measured of later steps is cut. Where numbers of
    /// earlier ones are missing, the record goes on saying so.
    ///
    /// # Errors
    /// [`Error::Running`] while another process writes to the folder, [`Error::Damaged`] where a
    /// file of it cannot be read, and what the system refuses.
    pub fn resume(path: &Path, step: u64) -> Result<RunFolder> {
        let mut record = Record::read(path)?;
        let lock = lock(path)?;
        let mut history = History::default();
        let metrics = path.join(METRICS);
        if metrics.exists() {
            metrics::cut(&metrics, step, &mut |line| history.add(line))?;
        }
        let metrics = Recorded { steps: history.steps, last: history.last.map_or(0, |l| l.step) };
        record.unrecorded =
            unrecorded(record.unrecorded, [metrics, events::cut(path, step)?], step);
        record.ended = None;
        record.end = End::default();
        record.resumed.push(Resumed { at: record::now(), step });
        record.write(path)?;
        let mut folder = RunFolder::open(path.to_path_buf(), record, history, step, lock)?;
        // A page that cannot be written is no reason to leave the folder, and is said with the next.
        let _ = folder.pages();
        Ok(folder)
    }

    fn open(
        path: PathBuf,
        record: Record,
        history: History,
        after: u64,
        lock: Lock,
    ) -> Result<RunFolder> {
        let metrics = path.join(METRICS);
        Ok(RunFolder {
            metrics: Some(metrics::append(&metrics).during("open", &metrics)?),
            events: Some(EventFile::create(&path, after)?),
            path,
            record,
            history,
            refreshed: Instant::now(),
            refresh: REFRESH,
            said: false,
            _lock: lock,
        })
    }

    /// The folder. What else belongs to the run may be kept in it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What has been measured so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Notes what is planned. Returns an error as [`RunFolder::step`] does.
    #[must_use = "nobody else says that the recording has ended"]
    pub fn planned(&mut self, planned: Planned) -> Option<Error> {
        self.record.planned = Some(planned);
        let written = self.record.write(&self.path).and_then(|()| self.pages());
        self.say(written)
    }

    /// Notes a step.
    ///
    /// Returns what could not be written, the first time, for somebody to be told; the run goes on
    /// as if nothing had been.
    #[must_use = "nobody else says that the recording has ended"]
    pub fn step(&mut self, step: &Step) -> Option<Error> {
        let mut tags = vec![
            (events::LOSS, step.loss as f32),
            ("train/grad_norm", step.grad_norm as f32),
            ("train/learning_rate", step.lr),
            ("train/epoch", step.epoch as f32),
            ("speed/tokens_per_s", step.tokens_per_s() as f32),
        ];
        tags.extend(step.memory_bytes.map(|bytes| ("memory/bytes", bytes as f32)));
        self.add(Line::Step(*step), step.step, &tags)
    }

    /// Notes an evaluation; one of a step that has one already is the same again and passed over.
    /// Returns an error as [`RunFolder::step`] does.
    #[must_use = "nobody else says that the recording has ended"]
    pub fn evaluation(&mut self, evaluation: &Evaluation) -> Option<Error> {
        if self.history.evaluation.is_some_and(|last| last.step == evaluation.step) {
            return None;
        }
        let tags = [("eval/loss", evaluation.loss as f32)];
        self.add(Line::Evaluation(*evaluation), evaluation.step, &tags)
    }

    /// Notes the end, and lets go of the folder. Returns an error as [`RunFolder::step`] does.
    #[must_use = "nobody else says that the recording has ended"]
    pub fn finish(mut self, end: End) -> Option<Error> {
        self.record.end = end;
        self.record.ended = Some(record::now());
        let mut written = self.record.write(&self.path);
        // On a full disk the curve, which can be drawn again, makes room for how it ended.
        if written.as_ref().is_err_and(Error::is_full)
            && fs::remove_file(self.path.join(CHART)).is_ok()
        {
            written = self.record.write(&self.path);
        }
        let written = written.and_then(|()| self.pages());
        self.say(written)
    }

    fn add(&mut self, line: Line, step: u64, tags: &[(&str, f32)]) -> Option<Error> {
        self.history.add(line);
        let mut written = Ok(());
        if let Some(file) = &mut self.metrics {
            let put = line.bytes().map_err(std::io::Error::from).and_then(|b| file.write_all(&b));
            if put.is_err() {
                self.metrics = None;
            }
            written = put.during("write", &self.path.join(METRICS));
        }
        if let Some(events) = &mut self.events {
            let put = events.scalars(step, tags).during("write", &events.path);
            if put.is_err() {
                self.events = None;
            }
            written = written.and(put);
        }
        if let Err(e) = &written {
            let ended = format!("recording ended at step {step}: {e}");
            let note = self.record.unrecorded.take();
            self.record.unrecorded = Some(note.map_or(ended.clone(), |n| format!("{n}; {ended}")));
            // At once, since the process may come to no end; where that fails too, at its end.
            let _ = self.record.write(&self.path);
        }
        if self.refreshed.elapsed() >= self.refresh {
            written = written.and(self.pages());
        }
        self.say(written)
    }

    /// Writes the curve and the report.
    fn pages(&mut self) -> Result<()> {
        let begun = Instant::now();
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let chart = loss_chart(&[Series { name: &name, history: &self.history }]);
        let again = (self.record.end.state == State::Running).then_some(self.refresh);
        let report = page::report(&self.path, &self.record, &self.history, again);
        let write = |name: &str, text: &str| -> Result<()> {
            let path = self.path.join(name);
            files::write(&path, text.as_bytes()).during("write", &path)
        };
        let chart = write(CHART, &chart);
        let report = report.and_then(|html| write(REPORT, &html));
        self.refresh = (begun.elapsed() * PART).max(REFRESH);
        self.refreshed = Instant::now();
        chart.and(report)
    }

    fn say(&mut self, written: Result<()>) -> Option<Error> {
        let error = written.err().filter(|_| !self.said);
        self.said |= error.is_some();
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Step {
        Step {
            step,
            epoch: 1,
            loss: 1.0,
            grad_norm: 1.0,
            lr: 0.1,
            tokens: 1,
            seconds: 1.0,
            memory_bytes: None,
        }
    }

    /// One failed write of a page loses no number.
    #[test]
    fn a_page_that_fails_between_two_steps_is_not_noted_as_missing_numbers() {
        let root = std::env::temp_dir().join(format!("gradus-runs-mid-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let mut run = RunFolder::create(&root, "mid", RunInfo::default()).unwrap();
        let chart = root.join("mid").join(CHART);
        fs::remove_file(&chart).unwrap();
        fs::create_dir(&chart).unwrap();
        run.refresh = Duration::ZERO;
        assert!(run.step(&step(1)).unwrap().to_string().contains(CHART));
        assert!(run.step(&step(2)).is_none());
        assert!(run.finish(End { state: State::Done, ..End::default() }).is_none());
        assert_eq!(Record::read(&root.join("mid")).unwrap().unrecorded, None);
        fs::remove_dir_all(&root).unwrap();
    }

    /// A disk that fills while a run goes on: one error, the run's numbers are still known, and
    /// the record says from where they were not written.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_said_once_and_the_run_goes_on() {
        let root = std::env::temp_dir().join(format!("gradus-runs-full-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let mut run = RunFolder::create(&root, "full", RunInfo::default()).unwrap();
        assert!(run.step(&step(1)).is_none());
        let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        run.metrics = Some(full());
        let said = run.step(&step(2)).unwrap().to_string();
        assert!(said.contains("metrics.jsonl") && said.contains("space"), "{said}");
        // Nothing follows half a line; the events are another file and go on.
        assert!(run.metrics.is_none() && run.events.is_some());
        assert!(run.step(&step(3)).is_none());
        assert_eq!(run.history().steps, 3);
        // It is there already, should the process come to no end.
        assert!(Record::read(&root.join("full")).unwrap().unrecorded.is_some());
        assert!(run.finish(End { state: State::Done, ..End::default() }).is_none());
        let record = Record::read(&root.join("full")).unwrap();
        let unrecorded = record.unrecorded.unwrap();
        assert!(unrecorded.starts_with("recording ended at step 2: "), "{unrecorded}");
        assert_eq!(record.end.state, State::Done);
        fs::remove_dir_all(&root).unwrap();
    }
}
