//! Metadata values and their wire types.

use std::fmt;

use crate::error::shown;

/// A metadata value: one of GGUF's thirteen types.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Type 0.
    U8(u8),
    /// Type 1.
    I8(i8),
    /// Type 2.
    U16(u16),
    /// Type 3.
    I16(i16),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7, stored as a byte that is 0 or 1.
    Bool(bool),
    /// Type 8, UTF-8.
    String(String),
    /// Type 9.
    Array(Array),
    /// Type 10.
    U64(u64),
    /// Type 11.
    I64(i64),
    /// Type 12.
    F64(f64),
}

/// A metadata array; its elements have one type. Arrays of arrays are refused by the reader.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Elements of type 0.
    U8(Vec<u8>),
    /// Elements of type 1.
    I8(Vec<i8>),
    /// Elements of type 2.
    U16(Vec<u16>),
    /// Elements of type 3.
    I16(Vec<i16>),
    /// Elements of type 4.
    U32(Vec<u32>),
    /// Elements of type 5.
    I32(Vec<i32>),
    /// Elements of type 6.
    F32(Vec<f32>),
    /// Elements of type 7.
    Bool(Vec<bool>),
    /// Elements of type 8.
    String(Vec<String>),
    /// Elements of type 10.
    U64(Vec<u64>),
    /// Elements of type 11.
    I64(Vec<i64>),
    /// Elements of type 12.
    F64(Vec<f64>),
}

/// The wire number of arrays, which the reader needs by name.
pub(crate) const ARRAY: u32 = 9;

impl Value {
    /// The number GGUF gives this type.
    pub(crate) fn wire_type(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => ARRAY,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// The value as an integer, if it is of an integer type.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::I8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::U64(v) => Some(v.into()),
            Self::I64(v) => Some(v.into()),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }
}

/// Type and value in a few words, as error messages print it: `u32 7`, `string "abc"`,
/// `array of 3 f32`. One line, at most about a hundred characters.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(v) => write!(f, "u8 {v}"),
            Self::I8(v) => write!(f, "i8 {v}"),
            Self::U16(v) => write!(f, "u16 {v}"),
            Self::I16(v) => write!(f, "i16 {v}"),
            Self::U32(v) => write!(f, "u32 {v}"),
            Self::I32(v) => write!(f, "i32 {v}"),
            Self::F32(v) => write!(f, "f32 {v:?}"),
            Self::Bool(v) => write!(f, "bool {v}"),
            Self::String(v) => write!(f, "string \"{}\"", shown(v)),
            Self::Array(v) => write!(f, "array of {} {}", v.len(), v.element_type()),
            Self::U64(v) => write!(f, "u64 {v}"),
            Self::I64(v) => write!(f, "i64 {v}"),
            Self::F64(v) => write!(f, "f64 {v:?}"),
        }
    }
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::String(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F64(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of the elements' type: `u8`, `string`, ...
    pub fn element_type(&self) -> &'static str {
        self.wire().1
    }

    /// The number and the name of the elements' type.
    pub(crate) fn wire(&self) -> (u32, &'static str) {
        match self {
            Self::U8(_) => (0, "u8"),
            Self::I8(_) => (1, "i8"),
            Self::U16(_) => (2, "u16"),
            Self::I16(_) => (3, "i16"),
            Self::U32(_) => (4, "u32"),
            Self::I32(_) => (5, "i32"),
            Self::F32(_) => (6, "f32"),
            Self::Bool(_) => (7, "bool"),
            Self::String(_) => (8, "string"),
            Self::U64(_) => (10, "u64"),
            Self::I64(_) => (11, "i64"),
            Self::F64(_) => (12, "f64"),
        }
    }
}

macro_rules! from {
    ($($rust:ty => $variant:ident),* $(,)?) => {$(
        impl From<$rust> for Value {
            fn from(value: $rust) -> Self {
                Self::$variant(value)
            }
        }
        impl From<Vec<$rust>> for Value {
            fn from(values: Vec<$rust>) -> Self {
                Self::Array(Array::$variant(values))
            }
        }
    )*};
}

from! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64, bool => Bool, String => String,
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}
