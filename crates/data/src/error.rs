//! What data are refused with.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use crate::{Bad, Reason};

/// Why data cannot be used: one line that names the file, the row and the reason.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// A file as a whole.
    #[error("{}: {what}", one_line(.file))]
    File {
        /// Its path.
        file: String,
        /// What is wrong with it, and what to do.
        what: String,
    },
    /// Rows that cannot be learned from.
    #[error("{0}; leave such rows out with `--skip-bad`")]
    Rows(BadRows),
    /// Nothing to learn from, or what does not fit a window.
    #[error("{0}")]
    Data(String),
}

impl Error {
    pub(crate) fn file(path: &Path, what: impl Into<String>) -> Error {
        Error::File { file: path.display().to_string(), what: what.into() }
    }
}

/// A row that cannot be learned from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadRow {
    /// Its file.
    pub file: String,
    /// Line of JSON lines, else the number of the record; from 1.
    pub row: u64,
    /// Why.
    pub bad: Bad,
}

impl fmt::Display for BadRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = one_line(&self.file);
        write!(f, "{file}: row {}: {}: {}", self.row, self.bad.reason, self.bad)
    }
}

/// Rows that cannot be learned from: how many for which reason, and the first of them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BadRows {
    /// How many for which reason.
    pub counts: BTreeMap<Reason, u64>,
    /// The first [`BadRows::LISTED`].
    pub listed: Vec<BadRow>,
    /// Where reading stopped, if it did before the end.
    pub stopped: Option<Stopped>,
}

/// What was not looked at, as it was clear already that the data are refused.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Stopped {
    /// What comes after this row.
    After(u64),
    /// So many files after the one with the bad rows.
    Files(usize),
}

impl BadRows {
    /// Most that are listed.
    pub const LISTED: usize = 50;

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    pub(crate) fn add(&mut self, row: BadRow) {
        *self.counts.entry(row.bad.reason).or_default() += 1;
        if self.listed.len() < Self::LISTED {
            self.listed.push(row);
        }
    }

    /// The reasons with their counts: `3 too_long, 1 empty`.
    pub fn reasons(&self) -> String {
        let each: Vec<String> = self.counts.iter().map(|(r, n)| format!("{n} {r}")).collect();
        each.join(", ")
    }
}

impl fmt::Display for BadRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED: usize = 8;
        let Some((first, others)) = self.listed.split_first() else { return f.write_str("none") };
        write!(f, "{first}")?;
        if others.is_empty() {
            return Ok(());
        }
        let place = |row: &BadRow| match row.file == first.file {
            true => row.row.to_string(),
            false => format!("{} of {}", row.row, one_line(&row.file)),
        };
        let places: Vec<String> = others.iter().take(NAMED).map(place).collect();
        let more = if self.total() > 1 + places.len() as u64 { ", ..." } else { "" };
        let rows = places.join(", ");
        let seen = match self.stopped {
            None => "in all".to_owned(),
            Some(Stopped::After(row)) => format!("up to row {row}, where reading stopped"),
            Some(Stopped::Files(1)) => "in this file, the one after it not read".to_owned(),
            Some(Stopped::Files(n)) => format!("in this file, {n} files after it not read"),
        };
        let (total, reasons) = (self.total(), self.reasons());
        write!(f, "; {total} bad rows {seen} ({reasons}), also {rows}{more}")
    }
}

/// A name from outside, which may have line ends and what else drives a terminal.
fn one_line(name: &str) -> String {
    let hidden = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202e}');
    let shown = |c: char| match hidden(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    name.chars().map(shown).collect()
}

/// The result of anything in this crate.
pub type Result<T> = std::result::Result<T, Error>;
