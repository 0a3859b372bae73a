//! TensorBoard's event files.
//!
//! A file is a row of TFRecords (`tensorflow/core/lib/io/record_writer.h`): the length of the data
//! as a little-endian u64, a masked CRC-32C of those 8 bytes, the data, a masked CRC-32C of the
//! data. The data are protobuf messages `Event` (`tensorflow/core/util/event.proto`) with, of
//! their fields, `wall_time` (1, double), `step` (2, int64), `file_version` (3, string), `summary`
//! (5) and `session_log` (7); a summary has values (1) of a `tag` (1, string) and a
//! `simple_value` (2, float). So little of protobuf is written here by hand.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::error::{Context, Result};
use crate::folder::Recorded;

const PREFIX: &str = "events.out.tfevents.";
/// The format's own version, which makes readers heed restarts.
const VERSION: &str = "brain.Event:2";
/// The tag that every step has.
pub(crate) const LOSS: &str = "train/loss";
/// Bytes a record of ours may have.
const LIMIT: u64 = 1 << 16;

/// An event file that is written to.
pub(crate) struct EventFile {
    file: File,
    pub(crate) path: PathBuf,
}

fn varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A field's number and wire type: 0 varint, 1 eight bytes, 2 bytes with their length, 5 four bytes.
fn key(out: &mut Vec<u8>, field: u64, wire: u64) {
    varint(out, field << 3 | wire);
}

fn bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(out, field, 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// An `Event` up to its step, which a reader takes for 0 where it is absent.
fn event(wall_time: f64, step: u64) -> Vec<u8> {
    let mut out = Vec::new();
    key(&mut out, 1, 1);
    out.extend_from_slice(&wall_time.to_le_bytes());
    if step > 0 {
        key(&mut out, 2, 0);
        varint(&mut out, step);
    }
    out
}

fn opening(wall_time: f64) -> Vec<u8> {
    let mut out = event(wall_time, 0);
    bytes(&mut out, 3, VERSION.as_bytes());
    out
}

fn summary(wall_time: f64, step: u64, scalars: &[(&str, f32)]) -> Vec<u8> {
    let mut values = Vec::new();
    for (tag, scalar) in scalars {
        let mut value = Vec::new();
        bytes(&mut value, 1, tag.as_bytes());
        key(&mut value, 2, 5);
        value.extend_from_slice(&scalar.to_le_bytes());
        bytes(&mut values, 1, &value);
    }
    let mut out = event(wall_time, step);
    bytes(&mut out, 5, &values);
    out
}

/// A session that starts: what came before of `step` and later steps does not count.
fn start(wall_time: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    let mut status = Vec::new();
    key(&mut status, 1, 0);
    varint(&mut status, START);
    let mut out = event(wall_time, step);
    bytes(&mut out, 7, &status);
    out
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend_from_slice(&masked_crc(&length).to_le_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(&masked_crc(data).to_le_bytes());
    out
}

fn now() -> f64 {
    Timestamp::now().as_microsecond() as f64 / 1e6
}

impl EventFile {
    /// Begins a file in `folder`, after those that are there, for what is measured after a step.
    ///
    /// It opens with the start of a session: from the second one on readers that have already read
    /// what was cut forget it.
    pub(crate) fn create(folder: &Path, after: u64) -> Result<EventFile> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let fits = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let host: String = host.chars().filter(fits).take(64).collect();
        // Readers take the files of a folder in the order of their names.
        let mut seconds = Timestamp::now().as_second();
        for path in files(folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let there = name.strip_prefix(PREFIX).and_then(|rest| rest.split('.').next());
            let there = there.and_then(|digits| digits.parse::<i64>().ok()).unwrap_or(0);
            seconds = seconds.max(there.saturating_add(1));
        }
        let path = folder.join(format!("{PREFIX}{seconds:010}.{host}"));
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let mut events = EventFile { file: file.during("make", &path)?, path };
        let mut first = record(&opening(now()));
        first.extend(record(&start(now(), after.saturating_add(1))));
        events.put(&first).during("write", &events.path)?;
        Ok(events)
    }

    /// Adds numbers of a step.
    pub(crate) fn scalars(&mut self, step: u64, scalars: &[(&str, f32)]) -> io::Result<()> {
        self.put(&record(&summary(now(), step, scalars)))
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }
}

/// The event files of a folder in the order they were written.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).during("read", folder)? {
        let path = entry.during("read", folder)?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Cuts the event files of a folder before the first event of a step after `step`, and where a
/// record is torn or damaged. Returns which steps stay.
pub(crate) fn cut(folder: &Path, step: u64) -> Result<Recorded> {
    let mut stays = Recorded { steps: 0, last: 0 };
    for path in files(folder)? {
        let mut file = File::open(&path).map(BufReader::new).during("open", &path)?;
        let mut end = 0;
        while let Some(event) = next(&mut file).during("read", &path)? {
            if step_of(&event) > step {
                break;
            }
            if event.windows(LOSS.len()).any(|tag| tag == LOSS.as_bytes()) {
                stays = Recorded { steps: stays.steps + 1, last: step_of(&event) };
            }
            end += event.len() as u64 + 16;
        }
        let file = OpenOptions::new().write(true).open(&path).during("open", &path)?;
        file.set_len(end).and_then(|()| file.sync_all()).during("cut", &path)?;
    }
    Ok(stays)
}

/// The next record's data; `None` at the end, and where a record is not whole.
fn next(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut take = |count: usize| {
        let mut bytes = vec![0; count];
        match from.read_exact(&mut bytes) {
            Ok(()) => Ok(Some(bytes)),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
            Err(e) => Err(e),
        }
    };
    let Some(head) = take(12)? else { return Ok(None) };
    let Some((length, crc)) = head.split_first_chunk::<8>() else { return Ok(None) };
    let count = u64::from_le_bytes(*length);
    if crc != masked_crc(length).to_le_bytes() || count > LIMIT {
        return Ok(None);
    }
    // No more than LIMIT.
    let Some(data) = take(count as usize)? else { return Ok(None) };
    let Some(crc) = take(4)? else { return Ok(None) };
    Ok((crc == masked_crc(&data).to_le_bytes()).then_some(data))
}

/// The step of an event as [`event`] begins it.
fn step_of(event: &[u8]) -> u64 {
    let Some([0x10, digits @ ..]) = event.get(9..) else { return 0 };
    let mut step = 0;
    for (&byte, shift) in digits.iter().zip((0..64).step_by(7)) {
        step |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    step
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What TensorBoard's own `RecordWriter` and protobuf write of the same events
    /// (`testdata/README.md` says how).
    const GOLDEN: &[u8] = include_bytes!("../testdata/golden.tfevents");

    #[test]
    fn the_bytes_are_those_of_tensorboard() {
        let mut ours = record(&opening(1_700_000_000.25));
        let scalars = [("train/loss", 3.5), ("train/learning_rate", 0.001)];
        ours.extend(record(&summary(1_700_000_001.5, 1, &scalars)));
        ours.extend(record(&summary(1_700_000_002.75, 300, &[("train/loss", 0.0)])));
        ours.extend(record(&start(1_700_000_003.0, 301)));
        assert_eq!(ours, GOLDEN);
    }

    #[test]
    fn records_of_tensorboard_are_read_and_damage_ends_them() {
        let steps = |bytes: &[u8]| {
            let mut from = bytes;
            let next = || next(&mut from).unwrap().map(|event| step_of(&event));
            std::iter::from_fn(next).collect::<Vec<_>>()
        };
        assert_eq!(steps(GOLDEN), [0, 1, 300, 301]);
        // Cut anywhere in the last record, or with any byte of it changed, the others stay.
        let last = GOLDEN.len() - 32;
        for at in last..GOLDEN.len() {
            assert_eq!(steps(&GOLDEN[..at]), [0, 1, 300], "cut at {at}");
            let mut damaged = GOLDEN.to_vec();
            damaged[at] ^= 0x40;
            assert_eq!(steps(&damaged), [0, 1, 300], "byte {at}");
        }
        // A length that is not believed, with a sum that is right.
        let length = u64::MAX.to_le_bytes();
        let hostile = [&length[..], &masked_crc(&length).to_le_bytes(), &[0; 64]].concat();
        assert!(steps(&hostile).is_empty());
        assert_eq!(step_of(&event(1.0, u64::MAX)), u64::MAX);
    }
}
