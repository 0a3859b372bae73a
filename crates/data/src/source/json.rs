//! JSON lines, and JSON documents.

use std::cell::Cell;
use std::fmt;
use std::ops::ControlFlow;
use std::rc::Rc;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::{Failure, Input, MAX_ROW, ROW_TOO_LONG, Raw, Sink};
use crate::fields::shown;
use crate::json::{Budget, parse_json};
use crate::{Bad, Error, Layout, Reason};

/// One object a line; empty lines are passed over.
pub(super) fn lines(input: &mut Input, sink: &mut Sink<'_>) -> Result<(), Failure> {
    let mut line = Vec::new();
    let mut number = 0;
    while let Some(whole) = input.line(&mut line)? {
        number += 1;
        let fields = if !whole {
            Err(Bad::row(Reason::Malformed, ROW_TOO_LONG))
        } else if line.trim_ascii().is_empty() {
            continue;
        } else {
            match parse_json(&line) {
                Ok(value) => object(value),
                Err((e, None)) => {
                    Err(Bad::row(Reason::Malformed, format!("it is no usable JSON: {e}")))
                }
                Err((e, Some(field))) => {
                    let what = format!("it is no usable JSON, in field `{field}`: {e}");
                    Err(Bad::field(Reason::Malformed, field, what))
                }
            }
        };
        if sink(Raw { number, fields, cells: false })?.is_break() {
            break;
        }
    }
    Ok(())
}

fn object(value: Value) -> Result<Map<String, Value>, Bad> {
    match value {
        Value::Object(map) => Ok(map),
        other => {
            Err(Bad::row(Reason::Malformed, format!("it is {}; expected an object", shown(&other))))
        }
    }
}

/// Documents one after the other: a list of rows, an object that holds one, or a row.
pub(super) fn documents(input: &mut Input, sink: &mut Sink<'_>) -> Result<(), Failure> {
    let row = input.row.clone();
    let mut state = State { sink, row, number: 0, ended: false, failed: None };
    let mut reader = serde_json::Deserializer::from_reader(input);
    // Trailing characters are the next document.
    while !state.ended && reader.end().is_err() {
        let result = (&mut reader).deserialize_any(Document { state: &mut state });
        if let Some(e) = state.failed {
            return Err(Failure::Sink(e));
        }
        match result {
            Ok(()) => {}
            Err(_) if state.ended => {}
            Err(e) if e.is_io() => return Err(Failure::Read(e.into())),
            Err(e) => {
                let row = state.number + 1;
                let why = format!("is no usable JSON, at or after row {row}: {e}");
                return Err(Failure::Read(std::io::Error::other(why)));
            }
        }
    }
    Ok(())
}

struct State<'s, 'k> {
    sink: &'s mut Sink<'k>,
    /// Bytes that the row may still take.
    row: Rc<Cell<u64>>,
    number: u64,
    /// The sink wants no more.
    ended: bool,
    failed: Option<Error>,
}

impl State<'_, '_> {
    fn row<E: serde::de::Error>(&mut self, value: Value) -> Result<(), E> {
        self.number += 1;
        self.row.set(MAX_ROW);
        match (self.sink)(Raw { number: self.number, fields: object(value), cells: false }) {
            Ok(ControlFlow::Continue(())) => return Ok(()),
            Ok(ControlFlow::Break(())) => self.ended = true,
            Err(e) => self.failed = Some(e),
        }
        Err(E::custom("nobody wants more"))
    }
}

struct Document<'d, 's, 'k> {
    state: &'d mut State<'s, 'k>,
}

impl<'de> Visitor<'de> for Document<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of rows, or an object")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<(), A::Error> {
        loop {
            let budget = Budget::default();
            let Some(value) = from.next_element_seed(budget.seed())? else { return Ok(()) };
            self.state.row(value)?;
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<(), A::Error> {
        let budget = Budget::default();
        let mut row = Map::new();
        // A list that is one of rows, and others, of which one may be.
        let (mut list, mut held) = (None, Vec::<(String, Vec<Value>)>::new());
        while let Some(key) = from.next_key::<String>()? {
            let is_held = held.iter().any(|(name, _)| *name == key);
            if row.contains_key(&key) || list.as_ref() == Some(&key) || is_held {
                return Err(A::Error::custom(format!("field `{key}` occurs twice")));
            }
            if Layout::is_field(&key) || row.keys().any(|k| Layout::is_field(k)) {
                let value = from.next_value_seed(budget.seed())?;
                row.insert(key, value);
                continue;
            }
            match from.next_value_seed(Member { state: &mut *self.state, budget: &budget })? {
                Found::Value(value) => drop(row.insert(key, value)),
                Found::List(values) => held.push((key, values)),
                Found::Rows => {
                    if let Some(first) = list {
                        return Err(two(&first, &key));
                    }
                    list = Some(key);
                }
            }
        }
        let is_row = row.keys().any(|k| Layout::is_field(k));
        if list.is_none() && (is_row || held.is_empty()) {
            row.extend(held.into_iter().map(|(key, values)| (key, Value::Array(values))));
            return self.state.row(Value::Object(row));
        }
        let mut held = held.into_iter();
        let (list, values) = match (list, held.next()) {
            (Some(list), None) => (list, Vec::new()),
            (Some(list), Some((other, _))) => return Err(two(&list, &other)),
            (None, first) => first.unwrap_or_default(),
        };
        if let Some((other, _)) = held.next() {
            return Err(two(&list, &other));
        }
        if let Some(field) = row.keys().find(|k| Layout::means(k)) {
            return Err(A::Error::custom(format!(
                "it has both a list `{list}` and a field `{field}`; expected a list of rows, or a \
                 row"
            )));
        }
        values.into_iter().try_for_each(|value| self.state.row(value))
    }
}

fn two<E: serde::de::Error>(first: &str, second: &str) -> E {
    E::custom(format!("it holds two lists, `{first}` and `{second}`; expected one list of rows"))
}

/// Bytes of a list, at about, that are held back until it is known whether it is one of rows.
const HELD: u64 = 1 << 20;

/// What a member of an object is.
enum Found {
    Value(Value),
    /// A list whose first element is no row: the value of a field, or a list of rows of which the
    /// first is bad.
    List(Vec<Value>),
    /// A list of rows, which have gone to the sink.
    Rows,
}

/// Whether a value is a row of some layout, as far as its fields tell.
fn is_row(value: &Value) -> bool {
    value.as_object().is_some_and(|map| map.keys().any(|k| Layout::is_field(k)))
}

/// A member of an object: a list of rows goes to the sink, which no memory need hold.
struct Member<'d, 's, 'k, 'b> {
    state: &'d mut State<'s, 'k>,
    budget: &'b Budget,
}

impl<'de> DeserializeSeed<'de> for Member<'_, '_, '_, '_> {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Found, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Member<'_, '_, '_, '_> {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Found, E> {
        Ok(Found::Value(Value::Null))
    }

    fn visit_bool<E>(self, v: bool) -> Result<Found, E> {
        Ok(Found::Value(v.into()))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Found, E> {
        Ok(Found::Value(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Found, E> {
        Ok(Found::Value(v.into()))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Found, E> {
        Ok(Found::Value(v.into()))
    }

    fn visit_str<E>(self, v: &str) -> Result<Found, E> {
        Ok(Found::Value(v.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Found, A::Error> {
        let mut held = Vec::new();
        let before = self.state.row.get();
        loop {
            let budget = Budget::default();
            let Some(value) = from.next_element_seed(budget.seed())? else {
                return Ok(Found::List(held));
            };
            let first = held.is_empty() && is_row(&value);
            held.push(value);
            if first || before.saturating_sub(self.state.row.get()) > HELD {
                held.into_iter().try_for_each(|value| self.state.row(value))?;
                return Document { state: self.state }.visit_seq(from).map(|()| Found::Rows);
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, from: A) -> Result<Found, A::Error> {
        self.budget.seed().visit_map(from).map(Found::Value)
    }
}

/// Whether a document that begins with an object is one object a line: the first line is a whole
/// one, and no object that merely holds the list of rows.
pub(super) fn are_lines(head: &[u8]) -> bool {
    let head = head.trim_ascii_start();
    let line = head.split(|&b| b == b'\n').next().unwrap_or(head);
    match parse_json(line) {
        Ok(Value::Object(map)) => {
            map.keys().any(|k| Layout::is_field(k)) || line.len() < head.len()
        }
        _ => false,
    }
}
