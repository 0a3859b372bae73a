//! From bytes of tokens to pieces of text.

use crate::Error;
use crate::error::shown;

/// Most stop strings of one stream.
pub const MAX_STOPS: usize = 64;
/// Most bytes in one stop string.
pub const MAX_STOP_BYTES: usize = 1024;

/// What a [`TextStream`] lets out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    /// Text that is certain by now; to be appended to what came before.
    pub text: String,
    /// The index of the stop string that ended the stream, if one just did.
    pub stop: Option<usize>,
}

/// Turns the bytes of successive tokens into text.
///
/// A character whose bytes are spread over tokens waits until it is whole, and text that may be
/// the beginning of a stop string waits until it is known. The text let out is, over the whole
/// stream, `String::from_utf8_lossy` of all its bytes, cut before the stop string if there is
/// one, however the bytes were spread: U+FFFD stands only for bytes that no further byte could
/// complete.
///
/// Of several stop strings the one that is complete first ends the stream; of those complete at
/// the same byte, the longest.
#[derive(Clone, Debug)]
pub struct TextStream {
    /// Bytes of a character that is not whole yet: at most 3.
    partial: Vec<u8>,
    /// Text that may belong to a stop string.
    held: String,
    stops: Vec<Stop>,
    ended: bool,
}

/// A stop string, and how many of its bytes the text ends with (Knuth, Morris, Pratt 1977).
#[derive(Clone, Debug)]
struct Stop {
    bytes: Vec<u8>,
    /// For each prefix, the length of its longest proper prefix that is also its suffix.
    fallback: Vec<usize>,
    matched: usize,
}

impl Stop {
    fn new(text: &str) -> Self {
        let mut stop = Self { bytes: text.into(), fallback: Vec::new(), matched: 0 };
        let mut length = 0;
        for (i, &byte) in text.as_bytes().iter().enumerate() {
            if i > 0 {
                length = stop.longer(length, byte);
            }
            stop.fallback.push(length);
        }
        stop
    }

    /// The longest prefix that ends with `byte` and extends one of `length` bytes or a fallback
    /// of it.
    fn longer(&self, mut length: usize, byte: u8) -> usize {
        loop {
            if self.bytes.get(length) == Some(&byte) {
                return length + 1;
            }
            match length.checked_sub(1).and_then(|i| self.fallback.get(i)) {
                Some(&shorter) => length = shorter,
                None => return 0,
            }
        }
    }

    /// Goes on by a byte; whether the string is now complete.
    fn push(&mut self, byte: u8) -> bool {
        self.matched = self.longer(self.matched, byte);
        self.matched == self.bytes.len()
    }
}

impl TextStream {
    /// A stream that ends before the first of these strings.
    ///
    /// # Errors
    /// A stop string is empty or longer than [`MAX_STOP_BYTES`], or there are more than
    /// [`MAX_STOPS`].
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, Error> {
        for (index, stop) in stops.iter().map(AsRef::as_ref).enumerate() {
            let what = if index >= MAX_STOPS {
                format!("is one too many; at most {MAX_STOPS} are allowed")
            } else if stop.is_empty() {
                "is empty; expected text".to_owned()
            } else if stop.len() > MAX_STOP_BYTES {
                format!(
                    "{} has {} bytes; at most {MAX_STOP_BYTES} are allowed",
                    shown(stop),
                    stop.len()
                )
            } else {
                continue;
            };
            return Err(Error::Stop { index, what });
        }
        let stops = stops.iter().map(|stop| Stop::new(stop.as_ref())).collect();
        Ok(Self { partial: Vec::new(), held: String::new(), stops, ended: false })
    }

    /// Whether a stop string has ended the stream. Further bytes are then ignored.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// The bytes of the next token.
    pub fn push(&mut self, bytes: &[u8]) -> Delta {
        if self.ended {
            return Delta::default();
        }
        let mut text = String::new();
        let joined;
        let bytes = if self.partial.is_empty() {
            bytes
        } else {
            self.partial.extend_from_slice(bytes);
            joined = std::mem::take(&mut self.partial);
            &joined
        };
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            match chunk.invalid() {
                [] => {}
                tail if chunks.peek().is_none() && may_continue(tail) => {
                    self.partial = tail.to_vec();
                }
                _ => text.push('\u{fffd}'),
            }
        }
        self.let_out(&text)
    }

    /// The end of the stream: what was held back. An incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> Delta {
        if self.ended {
            return Delta::default();
        }
        let mut delta = Delta::default();
        if !std::mem::take(&mut self.partial).is_empty() {
            delta = self.let_out("\u{fffd}");
        }
        delta.text.push_str(&std::mem::take(&mut self.held));
        self.ended = true;
        delta
    }

    /// Appends text to what is held and lets out what cannot belong to a stop string.
    fn let_out(&mut self, text: &str) -> Delta {
        let before = self.held.len();
        self.held.push_str(text);
        let mut stop = None;
        // Matched prefixes begin with a whole character, so every cut is between characters.
        let mut certain = None;
        for (i, byte) in text.bytes().enumerate() {
            let mut longest = 0;
            for (index, candidate) in self.stops.iter_mut().enumerate() {
                if candidate.push(byte) && candidate.bytes.len() > longest {
                    longest = candidate.bytes.len();
                    stop = Some(index);
                    certain = (before + i + 1).checked_sub(longest);
                }
            }
            if stop.is_some() {
                self.ended = true;
                break;
            }
        }
        let longest_prefix = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let certain = certain.unwrap_or(self.held.len().saturating_sub(longest_prefix));
        let (out, rest) = self.held.split_at_checked(certain).unwrap_or((&self.held, ""));
        let (text, rest) = (out.to_owned(), rest.to_owned());
        self.held = if self.ended { String::new() } else { rest };
        Delta { text, stop }
    }
}

/// Whether bytes that are no character can still become one: they are then a proper prefix of
/// one, and `Utf8Chunks` gives them as its last invalid piece.
fn may_continue(tail: &[u8]) -> bool {
    std::str::from_utf8(tail).is_err_and(|e| e.error_len().is_none())
}

#[cfg(test)]
mod tests;
