//! Files as rows: what format and compression a file has, and bounds on what it may cost.
//!
//! Formats are streamed, but for Parquet, whose directory is at its end: a compressed one is
//! inflated first. A row is at most [`MAX_ROW`] bytes, a file at most [`MAX_FILE`] when inflated,
//! and what inflates beyond all measure is refused as what it is.

mod csv;
mod json;
mod parquet;

use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;

use serde_json::{Map, Value};

use crate::{Bad, Error, Result};

/// Most bytes of a row.
pub const MAX_ROW: u64 = 16 << 20;
/// Most bytes of a file, inflated.
pub const MAX_FILE: u64 = 4 << 30;
/// Most rows of a file.
pub const MAX_ROWS: u64 = 10_000_000;
/// What is smaller than this is no bomb.
const BOMB_FROM: u64 = 64 << 20;
/// Text shrinks to a fifth or a tenth; data of one word repeated, to a thousandth.
const BOMB_RATIO: u64 = 200;

/// A row as it came.
pub(crate) struct Raw {
    /// Line of JSON lines, else the number of the record, both from 1.
    pub number: u64,
    /// Its fields, or why it has none.
    pub fields: std::result::Result<Map<String, Value>, Bad>,
    /// Its cells are texts, and nested values JSON in them.
    pub cells: bool,
}

/// Is handed the rows of a file; says whether it wants more.
pub(crate) type Sink<'s> = dyn FnMut(Raw) -> Result<ControlFlow<()>> + 's;

/// Reads the rows of a file. A row that cannot be read is handed on as such where the next can be
/// found.
///
/// # Errors
/// Names the file and what is wrong with it; or what the sink says.
pub(crate) fn read(path: &Path, sink: &mut Sink<'_>) -> Result<()> {
    let wrong = |why: String| Error::file(path, why);
    let file = File::open(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    let about = file.metadata().map_err(|e| wrong(format!("cannot be read: {e}")))?;
    if about.is_dir() {
        return Err(wrong("is a folder; expected a file".into()));
    }
    let mut rows = 0;
    let mut counting = |raw: Raw| {
        rows += 1;
        if rows > MAX_ROWS {
            return Err(wrong(format!("has more than {MAX_ROWS} rows; split it")));
        }
        sink(raw)
    };
    let (mut input, packed) = Input::open(file).map_err(|e| wrong(e.to_string()))?;
    let head = input.head().map_err(|e| wrong(e.to_string()))?;
    let format = Format::of(path, &head);
    let result = match format {
        None => Err(Failure::Read(io::Error::other(
            "is empty, or neither JSON lines, JSON, CSV nor Parquet as far as its name and its \
             first bytes tell; expected a name such as `data.jsonl`, `.json`, `.csv` or `.parquet`",
        ))),
        Some(Format::Lines) => json::lines(&mut input, &mut counting),
        Some(Format::Json) => json::documents(&mut input, &mut counting),
        Some(Format::Csv(delimiter)) => csv::records(&mut input, delimiter, &mut counting),
        Some(Format::Parquet) if packed => {
            let mut bytes = Vec::new();
            let read = input.take(parquet::MAX_INFLATED + 1).read_to_end(&mut bytes);
            match read {
                Err(e) => Err(Failure::Read(e)),
                Ok(n) if n as u64 > parquet::MAX_INFLATED => Err(Failure::Read(io::Error::other(
                    "is a Parquet file of more than 1 GiB in another compression; inflate it first",
                ))),
                Ok(_) => parquet::records(parquet::From::Bytes(bytes), &mut counting),
            }
        }
        Some(Format::Parquet) => {
            let file = File::open(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
            parquet::records(parquet::From::File(file), &mut counting)
        }
    };
    match result {
        Ok(()) => Ok(()),
        Err(Failure::Read(e)) => Err(wrong(e.to_string())),
        Err(Failure::Sink(e)) => Err(e),
    }
}

/// Why reading ended early.
pub(crate) enum Failure {
    /// The file; the text goes on after its name.
    Read(io::Error),
    /// Whoever takes the rows.
    Sink(Error),
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Failure {
        Failure::Read(e)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Failure {
        Failure::Sink(e)
    }
}

#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Format {
    Lines,
    Json,
    Csv(u8),
    Parquet,
}

impl Format {
    /// Told by the first bytes where these are clear, else by the name.
    fn of(path: &Path, head: &[u8]) -> Option<Format> {
        let name = path.file_name()?.to_string_lossy().to_lowercase();
        let name = [".gz", ".zst"].iter().find_map(|s| name.strip_suffix(s)).unwrap_or(&name);
        let ends = |ends: &[&str]| ends.iter().any(|end| name.ends_with(end));
        if head.starts_with(b"PAR1") {
            return Some(Format::Parquet);
        }
        let first = head.iter().find(|b| !b.is_ascii_whitespace());
        match first {
            None => None,
            _ if ends(&[".jsonl", ".ndjson"]) => Some(Format::Lines),
            _ if ends(&[".csv"]) => Some(Format::Csv(b',')),
            _ if ends(&[".tsv"]) => Some(Format::Csv(b'\t')),
            Some(b'[') => Some(Format::Json),
            Some(b'{') if json::are_lines(head) => Some(Format::Lines),
            Some(b'{') => Some(Format::Json),
            _ => None,
        }
    }
}

/// A file's bytes, inflated, with bounds.
pub(crate) struct Input {
    from: BufReader<Box<dyn Read>>,
    /// Bytes that may still come before the row is too long.
    row: Rc<Cell<u64>>,
}

const ROW_TOO_LONG: &str = "it is longer than 16 MiB, the most a row may have";

impl Input {
    /// Also says whether the file is compressed.
    fn open(file: File) -> io::Result<(Input, bool)> {
        let taken = Rc::new(Cell::new(0));
        let mut file = BufReader::new(Counted { from: file, taken: taken.clone() });
        let head = file.fill_buf()?;
        let gzip = head.starts_with(&[0x1f, 0x8b]);
        let zstd = head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
        let inflated: Box<dyn Read> = if gzip {
            Box::new(Measured::new(flate2::bufread::MultiGzDecoder::new(file), taken))
        } else if zstd {
            Box::new(Measured::new(zstd::stream::read::Decoder::with_buffer(file)?, taken))
        } else {
            Box::new(Measured { ratio: None, ..Measured::new(file, taken) })
        };
        let mut from = BufReader::with_capacity(64 << 10, inflated);
        if from.fill_buf()?.starts_with(b"\xef\xbb\xbf") {
            from.consume(3);
        }
        Ok((Input { from, row: Rc::new(Cell::new(MAX_ROW)) }, gzip || zstd))
    }

    /// The next bytes, which stay where they are.
    fn head(&mut self) -> io::Result<Vec<u8>> {
        Ok(self.from.fill_buf()?.to_vec())
    }

    /// The next line without its end, in `line`; whether there was one, and whether it was short
    /// enough to be kept.
    pub(crate) fn line(&mut self, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
        line.clear();
        let mut bounded = (&mut self.from).take(MAX_ROW + 1);
        if bounded.read_until(b'\n', line)? == 0 {
            return Ok(None);
        }
        if line.last() == Some(&b'\n') {
            line.pop();
            return Ok(Some(true));
        }
        if line.len() as u64 <= MAX_ROW {
            return Ok(Some(true));
        }
        line.clear();
        // What is left of it is passed over.
        loop {
            let buffer = self.from.fill_buf()?;
            if buffer.is_empty() {
                return Ok(Some(false));
            }
            let end = buffer.iter().position(|&b| b == b'\n');
            let used = end.map_or(buffer.len(), |at| at + 1);
            self.from.consume(used);
            if end.is_some() {
                return Ok(Some(false));
            }
        }
    }
}

impl Read for Input {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(to)?;
        match self.row.get().checked_sub(n as u64) {
            Some(left) => self.row.set(left),
            None => return Err(io::Error::other(format!("has a row too long: {ROW_TOO_LONG}"))),
        }
        Ok(n)
    }
}

/// Counts what is read.
struct Counted<R> {
    from: R,
    taken: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(to)?;
        self.taken.set(self.taken.get() + n as u64);
        Ok(n)
    }
}

/// Bounds what is inflated.
struct Measured<R> {
    from: R,
    taken: Rc<Cell<u64>>,
    given: u64,
    /// Most bytes out for each byte in.
    ratio: Option<u64>,
}

impl<R> Measured<R> {
    fn new(from: R, taken: Rc<Cell<u64>>) -> Self {
        Measured { from, taken, given: 0, ratio: Some(BOMB_RATIO) }
    }
}

impl<R: Read> Read for Measured<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(to).map_err(|e| match self.ratio {
            Some(_) => io::Error::other(format!("cannot be inflated: {e}")),
            None => e,
        })?;
        self.given += n as u64;
        if self.given > MAX_FILE {
            return Err(io::Error::other("has more than 4 GiB; split it"));
        }
        let most = self.ratio.map(|ratio| self.taken.get().saturating_mul(ratio));
        if self.given > BOMB_FROM && most.is_some_and(|most| self.given > most) {
            let why = format!(
                "is a decompression bomb: {} bytes have become more than {}; inflate it first if \
                 that is what it holds",
                self.taken.get(),
                self.given
            );
            return Err(io::Error::other(why));
        }
        Ok(n)
    }
}
