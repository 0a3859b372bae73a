//! Objects read field by field, with every error naming its field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::{Bad, Reason};

type Result<T> = std::result::Result<T, Bad>;

/// A value as an error shows it: on one line, and short.
pub fn shown(value: &Value) -> String {
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

/// A name from outside as an error shows it without quotes: on one line, and short.
pub(crate) fn short(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(60).collect()
}

/// The fields of an object, taken one by one; what is left in the end is unknown.
pub struct Fields {
    /// Where the object is: empty, or `examples[3].`.
    at: String,
    map: Map<String, Value>,
    /// `null` is as good as absent: in OpenAI's interface.
    nulls: bool,
    known: Vec<&'static str>,
}

impl Fields {
    /// Of an outermost object. With `nulls`, `null` is as good as absent.
    pub fn new(map: Map<String, Value>, nulls: bool) -> Fields {
        Fields { at: String::new(), map, nulls, known: Vec::new() }
    }

    /// Of an object inside it, at `path`.
    ///
    /// # Errors
    /// It is no object.
    pub fn inner(path: &str, value: Value, nulls: bool) -> Result<Fields> {
        match value {
            Value::Object(map) => {
                Ok(Fields { at: format!("{path}."), map, nulls, known: Vec::new() })
            }
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// A field's name with where it is.
    pub fn path(&self, field: &str) -> String {
        format!("{}{field}", self.at)
    }

    /// Whether a field is there that has not been taken.
    pub fn has(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(|v| !(self.nulls && v.is_null()))
    }

    /// A field as it came.
    pub fn value(&mut self, field: &'static str) -> Option<Value> {
        self.known.push(field);
        self.map.shift_remove(field).filter(|v| !(self.nulls && v.is_null()))
    }

    /// A string.
    ///
    /// # Errors
    /// It is something else.
    pub fn string(&mut self, field: &'static str) -> Result<Option<String>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.path(field), &other, "a string")),
        }
    }

    /// True or false.
    ///
    /// # Errors
    /// It is something else.
    pub fn flag(&mut self, field: &'static str) -> Result<Option<bool>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong(&self.path(field), &other, "true or false")),
        }
    }

    /// A whole number within a range.
    pub fn whole(
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
    pub fn number(
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
    pub fn float(
        &mut self,
        field: &'static str,
        check: impl Fn(f32) -> bool,
        expected: &str,
    ) -> Result<Option<f32>> {
        let check = |n: f64| (n as f32).is_finite() && check(n as f32);
        Ok(self.number(field, check, expected)?.map(|n| n as f32))
    }

    /// A list of at most so many.
    pub fn list(&mut self, field: &'static str, most: usize) -> Result<Option<Vec<Value>>> {
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
    pub fn only(&mut self, field: &'static str, neutral: &[Value]) -> Result<()> {
        match self.value(field) {
            Some(value) if !neutral.contains(&value) => {
                let few: Vec<String> = neutral.iter().map(shown).collect();
                let alternative = match few.is_empty() {
                    true => String::new(),
                    false => format!(", or set it to {}", few.join(" or ")),
                };
                Err(Bad::field(
                    Reason::UnknownField,
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
    pub fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// Refuses what is left.
    ///
    /// # Errors
    /// Names the first unknown field, and the known ones.
    pub fn finish(self) -> Result<()> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(odd) => Err(unknown(&self.path(odd), odd, &self.known)),
        }
    }
}

/// A field that is not known, with the one it may be meant for.
pub(crate) fn unknown(path: &str, field: &str, known: &[&str]) -> Bad {
    let meant = match near(field, known) {
        Some(near) => format!("is `{near}` meant? expected "),
        None => "expected ".into(),
    };
    let shown = shown(&Value::String(path.into()));
    let what = format!("unknown field {shown}; {meant}one of {}", known.join(", "));
    Bad::field(Reason::UnknownField, path, what)
}

/// The known name that a name is a slip of, if any: two letters off, or in other case.
pub(crate) fn near<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    let name: Vec<char> = name.chars().take(32).flat_map(char::to_lowercase).collect();
    let slips = |known: &&&str| {
        let most = if known.len() < 6 { 1 } else { 2 };
        distance(&name, &known.chars().collect::<Vec<_>>()) <= most
    };
    known.iter().find(slips).copied()
}

/// Letters to insert, drop or change; two swapped ones count once.
fn distance(a: &[char], b: &[char]) -> usize {
    let width = b.len() + 1;
    let mut before = vec![0; width];
    let mut above: Vec<usize> = (0..width).collect();
    for (i, x) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, y) in b.iter().enumerate() {
            let at = |list: &[usize], k: usize| list.get(k).copied().unwrap_or(0);
            let mut best = (at(&above, j + 1) + 1)
                .min(at(&row, j) + 1)
                .min(at(&above, j) + usize::from(x != y));
            let swapped = i > 0 && j > 0 && a.get(i - 1) == Some(y) && b.get(j - 1) == Some(x);
            if swapped {
                best = best.min(at(&before, j - 1) + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut above, row);
    }
    above.last().copied().unwrap_or(0)
}

/// A value of the wrong type or out of range.
pub fn wrong(path: &str, value: &Value, expected: &str) -> Bad {
    let what = format!("`{path}` is {}; expected {expected}", shown(value));
    Bad::field(Reason::WrongType, path, what)
}

/// A field that is missing.
pub fn missing(path: &str, expected: &str) -> Bad {
    let what = format!("`{path}` is missing; expected {expected}");
    Bad::field(Reason::MissingField, path, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found() {
        let known = ["messages", "tools", "weight", "train"];
        for (name, meant) in [
            ("mesages", Some("messages")),
            ("Messages", Some("messages")),
            ("messgaes", Some("messages")),
            ("tool", Some("tools")),
            ("wieght", Some("weight")),
            ("trian", Some("train")),
            ("weights", Some("weight")),
            ("id", None),
            ("source", None),
            ("terrain", None),
            ("", None),
        ] {
            assert_eq!(near(name, &known), meant, "{name}");
        }
        assert_eq!(near(&"x".repeat(1 << 20), &known), None);
    }
}
