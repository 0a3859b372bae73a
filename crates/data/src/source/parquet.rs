//! Parquet.
//!
//! The `parquet` crate asserts what it believes of a file and may fail on one that is damaged, and
//! a schema may nest as deep as the directory is long. So it runs on a thread of its own with a
//! large stack, behind which a panic is an error like any other; what a file says of its own size
//! is checked before anything is read.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bytes::Bytes;
use parquet::basic::Compression;
use parquet::file::reader::{ChunkReader, FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Number, Value};

use super::{Failure, MAX_FILE, MAX_ROW, MAX_ROWS, Raw, Sink};
use crate::json::{MAX_DEPTH, MAX_VALUES};
use crate::{Bad, Reason};

/// Most bytes of a file that is compressed as a whole, inflated.
pub(super) const MAX_INFLATED: u64 = 1 << 30;
/// Most bytes of the directory. A level of its schema takes at least five, and reading it some
/// hundred bytes of stack.
const MAX_FOOTER: u64 = 4 << 20;
const STACK: usize = if cfg!(target_pointer_width = "64") { 1 << 30 } else { 128 << 20 };
/// Most columns at the bottom of the schema.
const MAX_COLUMNS: usize = 1024;
/// Rows on their way from the thread.
const AHEAD: usize = 16;

/// Where the bytes are.
pub(super) enum From {
    File(File),
    Bytes(Vec<u8>),
}

type Item = Result<Result<Map<String, Value>, Bad>, String>;

/// One record a row, nested as its schema is.
pub(super) fn records(from: From, sink: &mut Sink<'_>) -> Result<(), Failure> {
    let (sender, receiver) = sync_channel(AHEAD);
    let thread = std::thread::Builder::new().name("parquet".into()).stack_size(STACK);
    let thread = thread.spawn(move || {
        // Nobody is told who has left.
        let result = match from {
            From::File(file) => checked(file).and_then(|file| read(file, &sender)),
            From::Bytes(bytes) => {
                let bytes = Bytes::from(bytes);
                footer(bytes.len() as u64, bytes.get(bytes.len().saturating_sub(8)..))
                    .and_then(|()| read(bytes, &sender))
            }
        };
        if let Err(why) = result {
            let _ = sender.send(Err(why));
        }
    })?;
    let result = hand_on(&receiver, sink);
    drop(receiver);
    match (result, thread.join()) {
        (Ok(()), Err(_)) => {
            Err(io::Error::other("is damaged in a way that its reader does not survive").into())
        }
        (result, _) => result,
    }
}

fn hand_on(receiver: &Receiver<Item>, sink: &mut Sink<'_>) -> Result<(), Failure> {
    for (number, item) in (1..).zip(receiver) {
        let fields = item.map_err(io::Error::other)?;
        if sink(Raw { number, fields, cells: true })?.is_break() {
            break;
        }
    }
    Ok(())
}

fn checked(mut file: File) -> Result<File, String> {
    let unreadable = |e: io::Error| format!("cannot be read: {e}");
    let len = file.seek(SeekFrom::End(0)).map_err(unreadable)?;
    let mut end = [0; 8];
    file.seek(SeekFrom::Start(len.saturating_sub(8))).map_err(unreadable)?;
    file.read_exact(&mut end).map_err(unreadable)?;
    footer(len, Some(&end))?;
    Ok(file)
}

/// Checks the end of a file: the length of its directory, and the mark.
fn footer(len: u64, end: Option<&[u8]>) -> Result<(), String> {
    let Some(&[a, b, c, d, b'P', b'A', b'R', b'1']) = end else {
        return Err(
            "is no whole Parquet file: it does not end with `PAR1`; it may be cut off".into()
        );
    };
    let footer = u64::from(u32::from_le_bytes([a, b, c, d]));
    if footer + 12 > len || footer > MAX_FOOTER {
        return Err(format!(
            "says that its directory has {footer} bytes; expected at most {MAX_FOOTER}, and no more \
             than the file has"
        ));
    }
    Ok(())
}

fn read<R: ChunkReader + 'static>(from: R, sender: &SyncSender<Item>) -> Result<(), String> {
    let wrong = |e: parquet::errors::ParquetError| format!("is no usable Parquet file: {e}");
    let reader = SerializedFileReader::new(from).map_err(wrong)?;
    let about = reader.metadata();
    let schema = about.file_metadata().schema_descr();
    let columns = schema.num_columns();
    if columns > MAX_COLUMNS {
        return Err(format!("has {columns} columns; at most {MAX_COLUMNS} are read"));
    }
    let deepest = schema.columns().iter().map(|c| c.path().parts().len()).max().unwrap_or(0);
    if deepest > 2 * MAX_DEPTH {
        return Err(format!(
            "has a schema of {deepest} levels; at most {} are read",
            2 * MAX_DEPTH
        ));
    }
    let (mut rows, mut bytes) = (0i128, 0i128);
    for group in about.row_groups() {
        rows += i128::from(group.num_rows());
        for column in group.columns() {
            readable(column.compression())?;
            if column.uncompressed_size() < 0 {
                return Err("says that a column has less than no bytes".into());
            }
            bytes += i128::from(column.uncompressed_size());
        }
    }
    if rows > i128::from(MAX_ROWS) || bytes > i128::from(MAX_FILE) {
        return Err(format!(
            "has {rows} rows and {bytes} bytes inflated; at most {MAX_ROWS} and {MAX_FILE} are read; \
             split it"
        ));
    }
    let mut total = 0;
    for row in RowIter::from_file_into(Box::new(reader)) {
        let mut cost = Cost { bytes: MAX_ROW, values: MAX_VALUES };
        let fields = object(row.map_err(wrong)?, &mut cost);
        total += MAX_ROW - cost.bytes;
        // A cell of a dictionary costs nothing in the file, and may be there in every row.
        if total > MAX_FILE {
            return Err("has more than 4 GiB, its repeated cells counted; split it".into());
        }
        if sender.send(Ok(fields)).is_err() {
            break;
        }
    }
    Ok(())
}

/// Whether pages in a compression can be read.
fn readable(compression: Compression) -> Result<(), String> {
    let name = match compression {
        Compression::UNCOMPRESSED
        | Compression::SNAPPY
        | Compression::GZIP(_)
        | Compression::ZSTD(_)
        | Compression::LZ4
        | Compression::LZ4_RAW => return Ok(()),
        Compression::BROTLI(_) => "Brotli",
        Compression::LZO => "LZO",
    };
    Err(format!(
        "is compressed with {name}, which is not read; Snappy, gzip, Zstandard and LZ4 are: write it \
         anew with one of these, in Python with \
         `pandas.read_parquet(FROM).to_parquet(TO, compression=\"zstd\")`"
    ))
}

/// What a row may still take.
struct Cost {
    bytes: u64,
    values: usize,
}

impl Cost {
    fn take(&mut self, bytes: usize) -> Result<(), Bad> {
        let left = self.bytes.checked_sub(bytes as u64).zip(self.values.checked_sub(1));
        let Some((bytes, values)) = left else {
            return Err(Bad::row(Reason::Malformed, super::ROW_TOO_LONG));
        };
        (self.bytes, self.values) = (bytes, values);
        Ok(())
    }
}

fn object(row: Row, cost: &mut Cost) -> Result<Map<String, Value>, Bad> {
    let mut map = Map::new();
    for (name, field) in row.into_columns() {
        cost.take(name.len())?;
        let value = value(field, cost)?;
        put(&mut map, name, value)?;
    }
    Ok(map)
}

/// Adds a field; of two of one name, one would be lost.
fn put(map: &mut Map<String, Value>, name: String, value: Value) -> Result<(), Bad> {
    if map.contains_key(&name) {
        let what = format!("field `{}` occurs twice", crate::fields::short(&name));
        return Err(Bad::row(Reason::Malformed, what));
    }
    map.insert(name, value);
    Ok(())
}

fn value(field: Field, cost: &mut Cost) -> Result<Value, Bad> {
    cost.take(0)?;
    // What is no number is not taken for what is not there.
    let float = |x: f64| Number::from_f64(x).map_or_else(|| x.to_string().into(), Value::Number);
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(v) => v.into(),
        Field::Byte(v) => v.into(),
        Field::Short(v) => v.into(),
        Field::Int(v) => v.into(),
        Field::Long(v) => v.into(),
        Field::UByte(v) => v.into(),
        Field::UShort(v) => v.into(),
        Field::UInt(v) => v.into(),
        Field::ULong(v) => v.into(),
        Field::Float16(v) => float(v.into()),
        Field::Float(v) => float(v.into()),
        Field::Double(v) => float(v),
        Field::Str(text) => {
            cost.take(text.len())?;
            text.into()
        }
        // Texts of old writers are not marked as such.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => {
                cost.take(text.len())?;
                text.into()
            }
            // Not a text, and not nothing: it is refused where a text is expected.
            Err(_) => [("bytes".to_owned(), Value::from(bytes.len()))].into_iter().collect(),
        },
        Field::Group(row) => Value::Object(object(row, cost)?),
        Field::ListInternal(list) => {
            let values = list.elements().iter().cloned().map(|field| value(field, cost));
            Value::Array(values.collect::<Result<_, _>>()?)
        }
        Field::MapInternal(map) => {
            let mut object = Map::new();
            for (key, item) in map.entries() {
                let key = match key {
                    Field::Str(key) => key.clone(),
                    other => other.to_string(),
                };
                cost.take(key.len())?;
                put(&mut object, key, value(item.clone(), cost)?)?;
            }
            Value::Object(object)
        }
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => field.to_string().into(),
    })
}
