//! CSV and TSV with a line of names.

use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Read};
use std::rc::Rc;

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::{Failure, Input, MAX_ROW, Raw, Sink};
use crate::{Bad, Reason};

/// Most columns of a table.
const MAX_COLUMNS: usize = 1024;

/// One record a row, its cells named by the first.
pub(super) fn records(
    input: &mut Input,
    delimiter: u8,
    sink: &mut Sink<'_>,
) -> Result<(), Failure> {
    let row = input.row.clone();
    // The reader fills a buffer ahead of the record.
    let allowance = MAX_ROW + (16 << 10);
    let mut reader = ReaderBuilder::new()
        .delimiter(delimiter)
        .flexible(true)
        .buffer_capacity(8 << 10)
        .from_reader(Quotes::new(input, delimiter));
    let quotes = reader.get_ref().faults.clone();
    let names = reader.headers().map_err(|e| reading("has no usable line of names", e))?;
    let names: Vec<String> = names.iter().map(|name| name.trim().to_string()).collect();
    let mut seen = BTreeSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        let why = format!("names column `{}` twice", crate::fields::short(twice));
        return Err(io::Error::other(why).into());
    }
    if let Some(fault) = quotes.borrow_mut().before(reader.position().byte()) {
        return Err(io::Error::other(format!("has no usable line of names: {fault}")).into());
    }
    if names.len() > MAX_COLUMNS {
        let why = format!("has {} columns; at most {MAX_COLUMNS} are read", names.len());
        return Err(io::Error::other(why).into());
    }
    let mut record = StringRecord::new();
    let mut number = 0;
    loop {
        row.set(allowance);
        let malformed = |what: String| Err(Bad::row(Reason::Malformed, what));
        let read = reader.read_record(&mut record);
        let fault = quotes.borrow_mut().before(reader.position().byte());
        let fields = match (read, fault) {
            (Ok(false), _) => return Ok(()),
            (Ok(true), Some(fault)) => malformed(format!("in cell {}, {fault}", record.len())),
            (Ok(true), None) if record.len() != names.len() => malformed(format!(
                "it has {} cells; expected {}, as the first line has",
                record.len(),
                names.len()
            )),
            (Ok(true), None) => {
                let cells = names.iter().cloned().zip(record.iter().map(Value::from));
                Ok(cells.collect::<Map<_, _>>())
            }
            (Err(e), _) => match e.kind() {
                ErrorKind::Utf8 { err, .. } => {
                    malformed(format!("cell {} is no UTF-8", err.field() + 1))
                }
                ErrorKind::Io(e) if reader.get_ref().is_open() => {
                    let row = number + 1;
                    let why = format!("{e}; row {row} has a quote that may never be closed");
                    return Err(io::Error::other(why).into());
                }
                _ => return Err(reading("cannot be read", e)),
            },
        };
        number += 1;
        if sink(Raw { number, fields, cells: true })?.is_break() {
            return Ok(());
        }
    }
}

/// What is wrong with a quote.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Fault {
    /// It is never closed.
    Open,
    /// Something follows it that belongs to no cell.
    Inside,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fault::Open => {
                "a quote opens that is never closed, so that it takes in the rest of the file; \
                 close it, or write a quote that belongs to the text as two, in quotes"
            }
            Fault::Inside => {
                "or one before it, text follows a quote that closes the cell; write a quote that \
                 belongs to the text as two"
            }
        })
    }
}

/// Faults of quotes by the byte at which they are.
#[derive(Default)]
struct Faults(VecDeque<(u64, Fault)>);

/// Most faults that are remembered: the records of a buffer may all have some.
const MAX_FAULTS: usize = 64 << 10;

impl Faults {
    fn add(&mut self, at: u64, fault: Fault) {
        // Of the faults of a record the first is enough, and those of a long one may be many.
        if self.0.len() < MAX_FAULTS {
            self.0.push_back((at, fault));
        }
    }

    /// The worst fault before a byte; all before it are forgotten.
    fn before(&mut self, end: u64) -> Option<Fault> {
        let mut found = None;
        while let Some(&(_, fault)) = self.0.front().filter(|(at, _)| *at < end) {
            self.0.pop_front();
            found = if fault == Fault::Open { Some(fault) } else { found.or(Some(fault)) };
        }
        found
    }
}

/// Watches quotes on their way to the reader of CSV, which takes them as they come: one that is
/// never closed makes a cell of all that follows, and one that is closed too early is dropped.
struct Quotes<R> {
    from: R,
    delimiter: u8,
    at: u64,
    state: State,
    faults: Rc<RefCell<Faults>>,
}

#[derive(Copy, Clone, PartialEq, Eq)]
enum State {
    /// Where a cell begins.
    Start,
    /// In a cell without quotes.
    Bare,
    /// Between quotes; the byte at which they open.
    Quoted(u64),
    /// After a quote between quotes: it closes them, or is the first of two.
    Closing(u64),
}

impl<R> Quotes<R> {
    fn new(from: R, delimiter: u8) -> Self {
        Quotes { from, delimiter, at: 0, state: State::Start, faults: Rc::default() }
    }

    /// What has been read ends between quotes.
    fn is_open(&self) -> bool {
        matches!(self.state, State::Quoted(_))
    }

    fn see(&mut self, byte: u8) {
        let ends = byte == self.delimiter || byte == b'\n' || byte == b'\r';
        self.state = match (self.state, byte) {
            (State::Start, b'"') => State::Quoted(self.at),
            (State::Quoted(from), b'"') => State::Closing(from),
            (State::Quoted(from), _) | (State::Closing(from), b'"') => State::Quoted(from),
            (_, _) if ends => State::Start,
            (State::Closing(_), _) => {
                self.faults.borrow_mut().add(self.at, Fault::Inside);
                State::Bare
            }
            (State::Start | State::Bare, _) => State::Bare,
        };
        self.at += 1;
    }
}

impl<R: Read> Read for Quotes<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(to)?;
        to.iter().take(n).for_each(|&byte| self.see(byte));
        if let (0, false, State::Quoted(from)) = (n, to.is_empty(), self.state) {
            self.faults.borrow_mut().add(from, Fault::Open);
            self.state = State::Start;
        }
        Ok(n)
    }
}

fn reading(what: &str, e: csv::Error) -> Failure {
    let said = e.to_string();
    match e.into_kind() {
        ErrorKind::Io(e) => Failure::Read(e),
        ErrorKind::Utf8 { err, .. } => Failure::Read(io::Error::other(format!("{what}: {err}"))),
        _ => Failure::Read(io::Error::other(format!("{what}: {said}"))),
    }
}
