//! CSV and TSV with a line of names.

use std::collections::BTreeSet;
use std::io;

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
        .from_reader(input);
    let names = reader.headers().map_err(|e| reading("has no usable line of names", e))?;
    let names: Vec<String> = names.iter().map(|name| name.trim().to_string()).collect();
    let mut seen = BTreeSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        let why = format!("names column `{}` twice", crate::fields::short(twice));
        return Err(io::Error::other(why).into());
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
        let fields = match reader.read_record(&mut record) {
            Ok(false) => return Ok(()),
            Ok(true) if record.len() != names.len() => malformed(format!(
                "it has {} cells; expected {}, as the first line has",
                record.len(),
                names.len()
            )),
            Ok(true) => {
                let cells = names.iter().cloned().zip(record.iter().map(Value::from));
                Ok(cells.collect::<Map<_, _>>())
            }
            Err(e) => match e.kind() {
                ErrorKind::Utf8 { err, .. } => {
                    malformed(format!("cell {} is no UTF-8", err.field() + 1))
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

fn reading(what: &str, e: csv::Error) -> Failure {
    match e.into_kind() {
        ErrorKind::Io(e) => Failure::Read(e),
        ErrorKind::Utf8 { err, .. } => Failure::Read(io::Error::other(format!("{what}: {err}"))),
        other => Failure::Read(io::Error::other(format!("{what}: {other:?}"))),
    }
}
