//! Metadata: keys and values in file order, with typed access.

use std::borrow::Cow;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, shown};
use crate::value::{Array, Value};

/// The keys and values of a file, in order.
///
/// The typed getters say in their error which file and key they are about, what was expected
/// and what was found. Those that begin with `opt_` give `None` for an absent key; a key that is
/// there and of another type is an error all the same.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: Arc<str>,
    entries: Vec<(String, Value)>,
    /// Positions in `entries`, sorted by key.
    sorted: Vec<u32>,
}

impl Default for Metadata {
    fn default() -> Self {
        Self::new()
    }
}

/// Two are equal if they hold the same entries in the same order, whatever their files.
impl PartialEq for Metadata {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident, $opt:ident -> $ty:ty, $expected:literal, $convert:expr;)*) => {$(
        #[allow(clippy::needless_lifetimes, reason = "some types use it")]
        $(#[$doc])*
        ///
        /// # Errors
        /// The key is absent or of another type.
        pub fn $name<'a>(&'a self, key: &str) -> Result<$ty, Error> {
            self.$opt(key)?.ok_or_else(|| self.missing(key, $expected))
        }

        #[allow(clippy::needless_lifetimes, reason = "some types use it")]
        #[doc = concat!("As [`Self::", stringify!($name), "`]; `None` where the key is absent.")]
        ///
        /// # Errors
        /// The key is of another type.
        pub fn $opt<'a>(&'a self, key: &str) -> Result<Option<$ty>, Error> {
            let convert: fn(&'a Value) -> Option<$ty> = $convert;
            match self.get(key) {
                None => Ok(None),
                Some(value) => match convert(value) {
                    Some(converted) => Ok(Some(converted)),
                    None => Err(self.wrong(key, $expected, value)),
                },
            }
        }
    )*};
}

impl Metadata {
    /// Metadata without entries, for a writer.
    pub fn new() -> Self {
        Self { file: "new metadata".into(), entries: Vec::new(), sorted: Vec::new() }
    }

    /// From entries as they were read.
    ///
    /// # Errors
    /// A key occurs twice.
    pub(crate) fn from_entries(file: &str, entries: Vec<(String, Value)>) -> Result<Self, Error> {
        let sorted = crate::parse::sorted_unique(&entries, |(key, _)| key)
            .map_err(|key| Error::new(file, ErrorKind::DuplicateKey { key: shown(&key) }))?;
        Ok(Self { file: file.into(), entries, sorted })
    }

    fn position(&self, key: &str) -> Result<usize, usize> {
        self.sorted.binary_search_by(|&i| {
            self.entries.get(i as usize).map_or("", |(k, _)| k.as_str()).cmp(key)
        })
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let entry = *self.sorted.get(self.position(key).ok()?)?;
        self.entries.get(entry as usize).map(|(_, value)| value)
    }

    /// Whether there is such a key.
    pub fn contains(&self, key: &str) -> bool {
        self.position(key).is_ok()
    }

    /// Keys and values, in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sets a key: in its place if it is there, else at the end. Returns the value it had.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        match self.position(&key) {
            Ok(at) => {
                let entry = self.sorted.get(at).map(|&i| i as usize)?;
                let slot = self.entries.get_mut(entry)?;
                Some(std::mem::replace(&mut slot.1, value))
            }
            Err(at) => {
                self.sorted.insert(at, self.entries.len() as u32);
                self.entries.push((key, value));
                None
            }
        }
    }

    /// All of it but for the keys that make a file a part of a split model: what a copy in one
    /// file has.
    pub fn whole(&self) -> Self {
        self.filtered(|key| !key.starts_with("split."))
    }

    /// A copy with some of the keys.
    pub fn filtered(&self, keep: impl Fn(&str) -> bool) -> Self {
        let mut some = Self::new();
        for (key, value) in self.iter().filter(|(key, _)| keep(key)) {
            some.insert(key, value.clone());
        }
        some
    }

    /// The file these entries are from, as error messages name it.
    pub fn file(&self) -> &str {
        &self.file
    }

    fn missing(&self, key: &str, expected: &'static str) -> Error {
        Error::new(&self.file, ErrorKind::MissingKey { key: shown(key), expected })
    }

    fn wrong(&self, key: &str, expected: &'static str, found: &Value) -> Error {
        let kind = ErrorKind::WrongType { key: shown(key), expected, found: found.to_string() };
        Error::new(&self.file, kind)
    }

    getters! {
        /// A string.
        str, opt_str -> &'a str, "a string", |v| match v {
            Value::String(s) => Some(s),
            _ => None,
        };
        /// An integer of any type whose value fits.
        u32, opt_u32 -> u32, "an unsigned 32-bit integer", |v| v.as_integer()?.try_into().ok();
        /// An integer of any type whose value fits.
        u64, opt_u64 -> u64, "an unsigned 64-bit integer", |v| v.as_integer()?.try_into().ok();
        /// An integer of any type whose value fits.
        i64, opt_i64 -> i64, "a signed 64-bit integer", |v| v.as_integer()?.try_into().ok();
        /// An f32, or an f64 rounded to f32.
        f32, opt_f32 -> f32, "a floating-point number", |v| match *v {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        };
        /// A bool.
        bool, opt_bool -> bool, "a bool", |v| match *v {
            Value::Bool(x) => Some(x),
            _ => None,
        };
        /// An array of strings.
        strings, opt_strings -> &'a [String], "an array of strings", |v| match v {
            Value::Array(Array::String(x)) => Some(x),
            _ => None,
        };
        /// An array of f32.
        f32s, opt_f32s -> &'a [f32], "an array of f32", |v| match v {
            Value::Array(Array::F32(x)) => Some(x),
            _ => None,
        };
        /// An array of bools.
        bools, opt_bools -> &'a [bool], "an array of bools", |v| match v {
            Value::Array(Array::Bool(x)) => Some(x),
            _ => None,
        };
        /// An array of i32, or of u32 that all fit.
        i32s, opt_i32s -> Cow<'a, [i32]>, "an array of 32-bit integers", |v| match v {
            Value::Array(Array::I32(x)) => Some(Cow::Borrowed(x.as_slice())),
            Value::Array(Array::U32(x)) => {
                x.iter().map(|&x| i32::try_from(x).ok()).collect::<Option<Vec<_>>>().map(Cow::Owned)
            }
            _ => None,
        };
        /// An array of u32, or of i32 that are all non-negative.
        u32s, opt_u32s -> Cow<'a, [u32]>, "an array of unsigned 32-bit integers", |v| match v {
            Value::Array(Array::U32(x)) => Some(Cow::Borrowed(x.as_slice())),
            Value::Array(Array::I32(x)) => {
                x.iter().map(|&x| u32::try_from(x).ok()).collect::<Option<Vec<_>>>().map(Cow::Owned)
            }
            _ => None,
        };
    }
}
