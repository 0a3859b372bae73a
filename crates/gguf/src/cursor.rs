//! A bounded reader over the bytes of a file.

use std::fmt::Arguments;

use crate::error::ErrorKind;

/// A position in a file. Every read is checked against the bytes that are left.
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Offset from the beginning of the file.
    pub(crate) fn position(&self) -> usize {
        self.at
    }

    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: u64, what: Arguments<'_>) -> Result<&'a [u8], ErrorKind> {
        let rest = self.rest();
        match usize::try_from(len).ok().and_then(|len| rest.get(..len)) {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(ErrorKind::Truncated {
                what: what.to_string(),
                at: self.at as u64,
                needed: len,
                left: rest.len() as u64,
            }),
        }
    }

    fn array<const N: usize>(&mut self, what: Arguments<'_>) -> Result<[u8; N], ErrorKind> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self, what: Arguments<'_>) -> Result<u8, ErrorKind> {
        self.array(what).map(u8::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, what: Arguments<'_>) -> Result<u32, ErrorKind> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: Arguments<'_>) -> Result<u64, ErrorKind> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// `count` as a length to allocate for, once the rest of the file is known to be able to
    /// hold that many items of at least `min_bytes` each.
    pub(crate) fn bounded(
        &self,
        count: u64,
        min_bytes: u64,
        what: Arguments<'_>,
    ) -> Result<usize, ErrorKind> {
        let needed = u128::from(count) * u128::from(min_bytes);
        let left = self.rest().len() as u64;
        match usize::try_from(count) {
            Ok(length) if needed <= u128::from(left) => Ok(length),
            _ => Err(ErrorKind::Count { what: what.to_string(), count, needed, left }),
        }
    }

    /// A string: a u64 length and that many bytes of UTF-8.
    pub(crate) fn string(&mut self, what: Arguments<'_>) -> Result<&'a str, ErrorKind> {
        let len = self.u64(format_args!("the length of {what}"))?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes)
            .map_err(|error| ErrorKind::Utf8 { what: what.to_string(), at: error.valid_up_to() })
    }
}
