//! Bodies of requests: JSON whose size, depth and number of values are bounded, read field by
//! field, with every error naming its field.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::RangeInclusive;

use graph::Code;
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, de};
use serde_json::{Map, Number, Value};

use crate::{Error, Result};

/// Deepest nesting of a body.
pub(crate) const MAX_DEPTH: usize = 32;
/// Most values in a body: in memory each takes up to some 100 bytes, in a body as few as two.
pub(crate) const MAX_VALUES: usize = 1 << 20;

/// A body that must be an object. No field may occur twice: one of the two would be lost.
pub(super) fn parse(bytes: &[u8]) -> Result<Map<String, Value>> {
    let state = State { left: Cell::new(MAX_VALUES), field: RefCell::new(None) };
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = Seed { depth: 0, state: &state }.deserialize(&mut reader);
    match value.and_then(|value| reader.end().map(|()| value)) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(Error::new(
            Code::InvalidInput,
            format!("the body is {}; expected an object", shown(&other)),
        )),
        Err(e) => Err(match state.field.take() {
            Some(field) => {
                let message = format!("the body is not usable JSON, in field `{field}`: {e}");
                Error::field(field, message)
            }
            None => Error::new(Code::InvalidInput, format!("the body is not usable JSON: {e}")),
        }),
    }
}

/// What is known while a body is read.
struct State {
    /// Values it may still have.
    left: Cell<usize>,
    /// The field of the body being read.
    field: RefCell<Option<String>>,
}

#[derive(Clone, Copy)]
struct Seed<'s> {
    depth: usize,
    state: &'s State,
}

impl Seed<'_> {
    fn deeper<E: de::Error>(self) -> std::result::Result<Self, E> {
        if self.depth >= MAX_DEPTH {
            return Err(E::custom(format!("it nests deeper than {MAX_DEPTH}")));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<Value, D::Error> {
        let Some(left) = self.state.left.get().checked_sub(1) else {
            return Err(D::Error::custom(format!("it has more than {MAX_VALUES} values")));
        };
        self.state.left.set(left);
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> std::result::Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("a number is not finite"))
    }

    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> std::result::Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> std::result::Result<Value, A::Error> {
        let seed = self.deeper()?;
        let mut list = Vec::new();
        while let Some(value) = from.next_element_seed(seed)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> std::result::Result<Value, A::Error> {
        let seed = self.deeper()?;
        let mut map = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            if self.depth == 0 {
                *self.state.field.borrow_mut() = Some(key.clone());
            }
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("field `{key}` occurs twice")));
            }
            let value = from.next_value_seed(seed)?;
            map.insert(key, value);
            if self.depth == 0 {
                *self.state.field.borrow_mut() = None;
            }
        }
        Ok(Value::Object(map))
    }
}

/// A value as an error shows it: on one line, and short.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = match value {
        Value::Array(list) => return format!("a list of {}", list.len()),
        Value::Object(_) => return "an object".into(),
        Value::String(text) => Value::String(text.chars().take(LONGEST + 1).collect()).to_string(),
        other => other.to_string(),
    };
    match text.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}...", text.get(..at).unwrap_or_default()),
        None => text,
    }
}

/// The fields of an object, taken one by one; what is left in the end is unknown.
pub(super) struct Fields {
    /// Where the object is: empty, or `examples[3].`.
    at: String,
    map: Map<String, Value>,
    /// `null` is as good as absent: in OpenAI's interface.
    nulls: bool,
    known: Vec<&'static str>,
}

impl Fields {
    /// Of a body.
    pub(super) fn body(bytes: &[u8], nulls: bool) -> Result<Fields> {
        Ok(Fields { at: String::new(), map: parse(bytes)?, nulls, known: Vec::new() })
    }

    /// Of an object inside a body, at `path`.
    pub(super) fn inner(path: &str, value: Value, nulls: bool) -> Result<Fields> {
        match value {
            Value::Object(map) => {
                Ok(Fields { at: format!("{path}."), map, nulls, known: Vec::new() })
            }
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// A field's name with where it is.
    pub(super) fn path(&self, field: &str) -> String {
        format!("{}{field}", self.at)
    }

    /// A field as it came.
    pub(super) fn value(&mut self, field: &'static str) -> Option<Value> {
        self.known.push(field);
        self.map.remove(field).filter(|v| !(self.nulls && v.is_null()))
    }

    /// A string.
    pub(super) fn string(&mut self, field: &'static str) -> Result<Option<String>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.path(field), &other, "a string")),
        }
    }

    /// True or false.
    pub(super) fn flag(&mut self, field: &'static str) -> Result<Option<bool>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(&self.path(field), &other, "true or false")),
        }
    }

    /// A whole number within a range.
    pub(super) fn whole(
        &mut self,
        field: &'static str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_u64() {
            Some(n) if range.contains(&n) => Ok(Some(n)),
            _ => {
                let expected = format!("a whole number from {} to {}", range.start(), range.end());
                Err(wrong(&self.path(field), &value, &expected))
            }
        }
    }

    /// A number that passes a check.
    pub(super) fn number(
        &mut self,
        field: &'static str,
        check: impl Fn(f64) -> bool,
        expected: &str,
    ) -> Result<Option<f64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(n) if check(n) => Ok(Some(n)),
            _ => Err(wrong(&self.path(field), &value, expected)),
        }
    }

    /// A number that, as 32 bits, is finite and passes a check.
    pub(super) fn float(
        &mut self,
        field: &'static str,
        check: impl Fn(f32) -> bool,
        expected: &str,
    ) -> Result<Option<f32>> {
        let check = |n: f64| (n as f32).is_finite() && check(n as f32);
        Ok(self.number(field, check, expected)?.map(|n| n as f32))
    }

    /// A list of at most so many.
    pub(super) fn list(&mut self, field: &'static str, most: usize) -> Result<Option<Vec<Value>>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Array(list)) if list.len() <= most => Ok(Some(list)),
            Some(other) => {
                Err(wrong(&self.path(field), &other, &format!("a list of at most {most}")))
            }
        }
    }

    /// Refuses a field of the interface that does nothing here, unless it says what happens
    /// anyway.
    pub(super) fn only(&mut self, field: &'static str, neutral: &[Value]) -> Result<()> {
        match self.value(field) {
            Some(value) if !neutral.contains(&value) => {
                let few: Vec<String> = neutral.iter().map(shown).collect();
                let alternative = match few.is_empty() {
                    true => String::new(),
                    false => format!(", or set it to {}", few.join(" or ")),
                };
                Err(Error::field(
                    self.path(field),
                    format!(
                        "`{}` is {}, which is not supported; leave it out{alternative}",
                        self.path(field),
                        shown(&value)
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Everything not taken so far, in order.
    pub(super) fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses what is left.
    pub(super) fn finish(self) -> Result<()> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(odd) => {
                let path = self.path(odd);
                let message = format!(
                    "unknown field {}; expected one of {}",
                    shown(&Value::String(path.clone())),
                    self.known.join(", ")
                );
                Err(Error::field(path, message))
            }
        }
    }
}

/// A value of the wrong type or out of range.
pub(super) fn wrong(path: &str, value: &Value, expected: &str) -> Error {
    Error::field(path, format!("`{path}` is {}; expected {expected}", shown(value)))
}

/// A field that is missing.
pub(super) fn missing(path: &str, expected: &str) -> Error {
    Error::field(path, format!("`{path}` is missing; expected {expected}"))
}
