//! Many short byte strings, numbered, with a way back from a string to its number.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Strings end to end in one allocation. String `i` ends at `ends[i]`.
#[derive(Default)]
pub(super) struct Strings {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Strings {
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Appends a string; `None` if all of them together would exceed 4 GiB.
    pub(super) fn push(&mut self, text: &[u8]) -> Option<()> {
        let end = self.bytes.len().checked_add(text.len())?;
        self.ends.push(u32::try_from(end).ok()?);
        self.bytes.extend_from_slice(text);
        Some(())
    }

    pub(super) fn get(&self, index: u32) -> Option<&[u8]> {
        let index = index as usize;
        let end = *self.ends.get(index)? as usize;
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)? as usize,
            None => 0,
        };
        self.bytes.get(start..end)
    }

    /// The longest, in bytes.
    pub(super) fn longest(&self) -> usize {
        (0..self.len() as u32).filter_map(|i| self.get(i)).map(<[u8]>::len).max().unwrap_or(0)
    }
}

/// Distinct strings and a hash table over them (open addressing, half full at most, keyed at
/// random so that no file can make its own worst case).
pub(super) struct Texts {
    strings: Strings,
    /// Indices of strings, or [`EMPTY`]. A power of two of them.
    slots: Vec<u32>,
    hasher: RandomState,
}

const EMPTY: u32 = u32::MAX;

impl Texts {
    pub(super) fn new() -> Self {
        Self { strings: Strings::default(), slots: vec![EMPTY; 16], hasher: RandomState::new() }
    }

    pub(super) fn strings(&self) -> &Strings {
        &self.strings
    }

    /// The slots to look at for a string, in order.
    fn probe(&self, text: &[u8]) -> impl Iterator<Item = usize> + use<> {
        let mask = self.slots.len() - 1;
        let start = self.hasher.hash_one(text) as usize;
        (0..=mask).map(move |step| start.wrapping_add(step) & mask)
    }

    /// The number of a string.
    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        for slot in self.probe(text) {
            match *self.slots.get(slot)? {
                EMPTY => return None,
                index if self.strings.get(index) == Some(text) => return Some(index),
                _ => {}
            }
        }
        None
    }

    /// The number of a string, and whether it is new, in which case it is appended. `None` if
    /// all of them together would exceed 4 GiB.
    pub(super) fn insert(&mut self, text: &[u8]) -> Option<(u32, bool)> {
        if let Some(index) = self.find(text) {
            return Some((index, false));
        }
        if (self.strings.len() + 1) * 2 > self.slots.len() {
            self.grow();
        }
        let index = u32::try_from(self.strings.len()).ok()?;
        self.strings.push(text)?;
        self.place(index);
        Some((index, true))
    }

    fn place(&mut self, index: u32) {
        let Some(text) = self.strings.get(index) else { return };
        for slot in self.probe(text) {
            if let Some(slot) = self.slots.get_mut(slot).filter(|slot| **slot == EMPTY) {
                *slot = index;
                return;
            }
        }
    }

    fn grow(&mut self) {
        self.slots = vec![EMPTY; self.slots.len() * 2];
        for index in 0..self.strings.len() as u32 {
            self.place(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_found_again() {
        let mut texts = Texts::new();
        for i in 0..5000u32 {
            assert_eq!(texts.insert(format!("t{i}").as_bytes()), Some((i, true)));
        }
        assert_eq!(texts.insert(b"t17"), Some((17, false)));
        for i in 0..5000u32 {
            let text = format!("t{i}");
            assert_eq!(texts.find(text.as_bytes()), Some(i));
            assert_eq!(texts.strings().get(i), Some(text.as_bytes()));
        }
        assert_eq!(texts.find(b"t5000"), None);
        assert_eq!(texts.find(b""), None);
        assert_eq!(texts.strings().get(5000), None);
        assert_eq!(texts.strings().longest(), 5);
    }
}
