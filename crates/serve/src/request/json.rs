//! Bodies of requests: bounded JSON, read field by field, with every error naming its field.

use data::Bad;
use graph::Code;
use serde_json::{Map, Value};

pub(super) use data::{Fields, shown};

use crate::{Error, Result};

impl From<Bad> for Error {
    fn from(bad: Bad) -> Error {
        match bad.field.is_empty() {
            true => Error::new(Code::InvalidInput, bad.what),
            false => Error::field(bad.field, bad.what),
        }
    }
}

/// A body that must be an object. No field may occur twice: one of the two would be lost.
pub(super) fn parse(bytes: &[u8]) -> Result<Map<String, Value>> {
    match data::parse_json(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::new(
            Code::InvalidInput,
            format!("the body is {}; expected an object", shown(&other)),
        )),
        Err((e, Some(field))) => {
            let message = format!("the body is not usable JSON, in field `{field}`: {e}");
            Err(Error::field(field, message))
        }
        Err((e, None)) => {
            Err(Error::new(Code::InvalidInput, format!("the body is not usable JSON: {e}")))
        }
    }
}

/// The fields of a body.
pub(super) fn body(bytes: &[u8], nulls: bool) -> Result<Fields> {
    Ok(Fields::new(parse(bytes)?, nulls))
}

/// A value of the wrong type or out of range.
pub(super) fn wrong(path: &str, value: &Value, expected: &str) -> Error {
    data::wrong(path, value, expected).into()
}

/// A field that is missing.
pub(super) fn missing(path: &str, expected: &str) -> Error {
    data::missing(path, expected).into()
}
