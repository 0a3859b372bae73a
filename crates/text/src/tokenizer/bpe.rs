//! Byte-pair encoding by ranked merges, as GPT-2 and its followers use it.
//!
//! Within a word the pair with the lowest rank is merged first, of equals the leftmost, until no
//! pair is in the list (Sennrich et al. 2016). A heap finds it, so that the time grows as
//! `n log n` in the length of a word.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::pre::Pre;
use super::texts::Texts;
use super::{Piece, bytes};

/// Merges and what they act on. A symbol is a token, or a string that is none: numbers from the
/// size of the vocabulary on are those of `extra`.
pub(super) struct Bpe {
    pub(super) pre: Pre,
    pub(super) ignore_merges: bool,
    /// By pair of symbols: the rank, and the symbol they become.
    merges: HashMap<(u32, u32), (u32, u32)>,
    /// The symbol of each of the 256 bytes.
    alphabet: Vec<u32>,
    /// Strings that merges mention and bytes that are not tokens.
    extra: Texts,
}

/// Why merges cannot be used.
pub(super) struct BadMerge {
    pub(super) index: usize,
    pub(super) what: &'static str,
}

#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    start: u32,
    /// 0 once it is merged into the one before.
    len: u32,
    previous: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

/// A pair that may be merged, ordered by rank and then from left to right.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    rank: u32,
    left: u32,
    right: u32,
    /// Bytes of both: if they have more by now, the pair is out of date.
    len: u32,
    merged: u32,
}

/// Storage that one call of `encode` uses for all its words.
#[derive(Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    pairs: BinaryHeap<Reverse<Pair>>,
    text: String,
}

impl Bpe {
    /// `merges` are lines `left right` in order of rank, in GPT-2's alphabet.
    pub(super) fn new(
        vocabulary: &Texts,
        merges: &[String],
        pre: Pre,
        ignore_merges: bool,
    ) -> Result<Self, BadMerge> {
        let mut bpe = Self {
            pre,
            ignore_merges,
            merges: HashMap::with_capacity(merges.len()),
            alphabet: Vec::with_capacity(256),
            extra: Texts::new(),
        };
        let too_long = |index| BadMerge { index, what: "makes the list longer than 4 GiB" };
        let mut merged = Vec::new();
        for (index, line) in merges.iter().enumerate() {
            // The left part may itself begin with a space, as llama.cpp reads it.
            let cut = line.as_bytes().iter().skip(1).position(|&b| b == b' ').map(|at| at + 1);
            let (Some((left, right)), Ok(rank)) =
                (cut.and_then(|at| line.split_at_checked(at)), u32::try_from(index))
            else {
                return Err(BadMerge { index, what: "is not two symbols with a space between" });
            };
            let right = right.get(1..).unwrap_or("");
            merged.clear();
            merged.extend_from_slice(left.as_bytes());
            merged.extend_from_slice(right.as_bytes());
            let mut symbol = |text| bpe.symbol(vocabulary, text).ok_or_else(|| too_long(index));
            let pair = (symbol(left.as_bytes())?, symbol(right.as_bytes())?);
            let result = symbol(&merged)?;
            bpe.merges.entry(pair).or_insert((rank, result));
        }
        for byte in 0..=255u8 {
            let mut buffer = [0; 4];
            let text = bytes::char_of(byte).encode_utf8(&mut buffer);
            let symbol = bpe.symbol(vocabulary, text.as_bytes()).ok_or_else(|| too_long(0))?;
            bpe.alphabet.push(symbol);
        }
        Ok(bpe)
    }

    fn symbol(&mut self, vocabulary: &Texts, text: &[u8]) -> Option<u32> {
        if let Some(id) = vocabulary.find(text) {
            return Some(id);
        }
        let (extra, _) = self.extra.insert(text)?;
        u32::try_from(vocabulary.strings().len()).ok()?.checked_add(extra).filter(|&s| s != NONE)
    }

    /// Appends the tokens of `word`, which begins at byte `offset` of the text.
    pub(super) fn encode(
        &self,
        vocabulary: &Texts,
        offset: u32,
        word: &str,
        scratch: &mut Scratch,
        out: &mut Vec<Piece>,
    ) {
        if self.ignore_merges {
            scratch.text.clear();
            scratch.text.extend(word.bytes().map(bytes::char_of));
            if let Some(id) = vocabulary.find(scratch.text.as_bytes()) {
                out.push(Piece { id, start: offset });
                return;
            }
        }
        let Scratch { symbols, pairs, .. } = scratch;
        symbols.clear();
        let count = word.len() as u32;
        symbols.extend(word.bytes().zip(0..).map(|(byte, at)| Symbol {
            id: self.alphabet.get(usize::from(byte)).copied().unwrap_or(NONE),
            start: at,
            len: 1,
            previous: at.checked_sub(1).unwrap_or(NONE),
            next: if at + 1 < count { at + 1 } else { NONE },
        }));
        for left in 1..count {
            self.consider(symbols, pairs, left - 1, left);
        }
        while let Some(Reverse(pair)) = pairs.pop() {
            let (Some(&left), Some(&right)) =
                (symbols.get(pair.left as usize), symbols.get(pair.right as usize))
            else {
                continue;
            };
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue;
            }
            if let Some(left) = symbols.get_mut(pair.left as usize) {
                left.id = pair.merged;
                left.len = pair.len;
                left.next = right.next;
            }
            if let Some(right) = symbols.get_mut(pair.right as usize) {
                right.len = 0;
            }
            if let Some(after) = symbols.get_mut(right.next as usize) {
                after.previous = pair.left;
            }
            self.consider(symbols, pairs, left.previous, pair.left);
            self.consider(symbols, pairs, pair.left, right.next);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            self.emit(vocabulary, symbol.id, offset + symbol.start, out);
        }
    }

    fn consider(
        &self,
        symbols: &[Symbol],
        pairs: &mut BinaryHeap<Reverse<Pair>>,
        left: u32,
        right: u32,
    ) {
        let (Some(a), Some(b)) = (symbols.get(left as usize), symbols.get(right as usize)) else {
            return;
        };
        if let Some(&(rank, merged)) = self.merges.get(&(a.id, b.id)) {
            pairs.push(Reverse(Pair { rank, left, right, len: a.len + b.len, merged }));
        }
    }

    /// A token, or the bytes of a symbol that is none. A byte that is no token either is left
    /// out, as llama.cpp does.
    fn emit(&self, vocabulary: &Texts, symbol: u32, start: u32, out: &mut Vec<Piece>) {
        let size = vocabulary.strings().len() as u32;
        let Some(extra) = symbol.checked_sub(size) else {
            out.push(Piece { id: symbol, start });
            return;
        };
        let text = self.extra.strings().get(extra).unwrap_or_default();
        let alphabet = |c| self.alphabet.get(usize::from(bytes::byte_of(c)?));
        let chars = std::str::from_utf8(text).unwrap_or_default().chars();
        for (id, at) in chars.map(alphabet).zip(start..) {
            if let Some(&id) = id.filter(|&&id| id < size) {
                out.push(Piece { id, start: at });
            }
        }
    }
}
