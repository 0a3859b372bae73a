//! JSON whose nesting and number of values are bounded, and in which no field occurs twice.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, de};
use serde_json::{Map, Number, Value};

/// Deepest nesting of a row or of the body of a request.
pub const MAX_DEPTH: usize = 32;
/// Most values in one of them: in memory each takes up to some 100 bytes, in a text as few as two.
pub const MAX_VALUES: usize = 1 << 20;

/// Reads a value. No field of an object may occur twice: one of the two would be lost.
///
/// # Errors
/// As `serde_json` says it; with the field of the outermost object in which it happened.
pub fn parse_json(bytes: &[u8]) -> Result<Value, (serde_json::Error, Option<String>)> {
    let budget = Budget::default();
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = budget.seed().deserialize(&mut reader);
    value.and_then(|value| reader.end().map(|()| value)).map_err(|e| (e, budget.field.take()))
}

/// What a value may still cost, and where reading it is.
pub(crate) struct Budget {
    left: Cell<usize>,
    /// The field of the outermost object being read.
    pub(crate) field: Cell<Option<String>>,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: Cell::new(MAX_VALUES), field: Cell::new(None) }
    }
}

impl Budget {
    /// For one value.
    pub(crate) fn seed(&self) -> Seed<'_> {
        Seed { depth: 0, budget: self }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Seed<'s> {
    depth: usize,
    budget: &'s Budget,
}

impl Seed<'_> {
    fn deeper<E: de::Error>(self) -> Result<Self, E> {
        if self.depth >= MAX_DEPTH {
            return Err(E::custom(format!("it nests deeper than {MAX_DEPTH}")));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        let Some(left) = self.budget.left.get().checked_sub(1) else {
            return Err(D::Error::custom(format!("it has more than {MAX_VALUES} values")));
        };
        self.budget.left.set(left);
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("a number is not finite"))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let seed = self.deeper()?;
        let mut list = Vec::new();
        while let Some(value) = from.next_element_seed(seed)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let seed = self.deeper()?;
        let mut map = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            if self.depth == 0 {
                self.budget.field.set(Some(key.clone()));
            }
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("field `{key}` occurs twice")));
            }
            let value = from.next_value_seed(seed)?;
            map.insert(key, value);
            if self.depth == 0 {
                self.budget.field.set(None);
            }
        }
        Ok(Value::Object(map))
    }
}
