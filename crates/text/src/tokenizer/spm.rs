//! SentencePiece's BPE by scores, as Llama 2 and Gemma use it.
//!
//! Any two neighbours whose text together is a token may merge; the pair with the highest score
//! goes first, of equals the leftmost (llama.cpp's `llm_tokenizer_spm`). A character that ends
//! as no token becomes its bytes.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::Piece;
use super::texts::Texts;

pub(super) struct Spm {
    /// One per token; finite, and no -0.
    pub(super) scores: Vec<f32>,
    /// The token of each of the 256 bytes.
    pub(super) bytes: Vec<Option<u32>>,
    /// Stands for a byte without a token.
    pub(super) unknown: Option<u32>,
    /// The longest token, in bytes.
    pub(super) longest: usize,
    /// A text, and what follows a special token, begins with a space that is not there.
    pub(super) add_space_prefix: bool,
}

/// A space, as vocabularies write it.
pub(super) const SPACE: char = '\u{2581}';

#[derive(Clone, Copy)]
struct Symbol {
    /// Place in the escaped text.
    start: u32,
    /// 0 once it is merged into the one before.
    len: u32,
    /// Where its first character begins in the caller's text.
    source: u32,
    previous: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;

struct Pair {
    score: f32,
    left: u32,
    right: u32,
    /// Bytes of both: if they have more by now, the pair is out of date.
    len: u32,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

impl Spm {
    /// Appends the tokens of `text`, which begins at byte `offset` of the caller's: at its start
    /// or after a special token.
    pub(super) fn encode(&self, vocabulary: &Texts, offset: u32, text: &str, out: &mut Vec<Piece>) {
        let mut escaped = String::with_capacity(text.len() + SPACE.len_utf8());
        let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len() + 1);
        let space = self.add_space_prefix.then_some((0, ' '));
        let chars = space.into_iter().chain(text.char_indices());
        for (at, c) in chars {
            let (index, start) = (symbols.len() as u32, escaped.len() as u32);
            escaped.push(if c == ' ' { SPACE } else { c });
            symbols.push(Symbol {
                start,
                len: escaped.len() as u32 - start,
                source: offset + at as u32,
                previous: index.checked_sub(1).unwrap_or(NONE),
                next: index + 1,
            });
        }
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        let escaped = escaped.as_bytes();
        let mut pairs = BinaryHeap::new();
        let consider = |symbols: &[Symbol], pairs: &mut BinaryHeap<Pair>, left: u32, right: u32| {
            let (Some(a), Some(b)) = (symbols.get(left as usize), symbols.get(right as usize))
            else {
                return;
            };
            let len = a.len + b.len;
            if len as usize > self.longest {
                return;
            }
            let both = escaped.get(a.start as usize..(a.start + len) as usize);
            let token = both.and_then(|both| vocabulary.find(both));
            if let Some(&score) = token.and_then(|id| self.scores.get(id as usize)) {
                pairs.push(Pair { score, left, right, len });
            }
        };
        for right in 1..symbols.len() as u32 {
            consider(&symbols, &mut pairs, right - 1, right);
        }
        while let Some(pair) = pairs.pop() {
            let (Some(&left), Some(&right)) =
                (symbols.get(pair.left as usize), symbols.get(pair.right as usize))
            else {
                continue;
            };
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue;
            }
            if let Some(left) = symbols.get_mut(pair.left as usize) {
                left.len = pair.len;
                left.next = right.next;
            }
            if let Some(right) = symbols.get_mut(pair.right as usize) {
                right.len = 0;
            }
            if let Some(after) = symbols.get_mut(right.next as usize) {
                after.previous = pair.left;
            }
            consider(&symbols, &mut pairs, left.previous, pair.left);
            consider(&symbols, &mut pairs, pair.left, right.next);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let range = symbol.start as usize..(symbol.start + symbol.len) as usize;
            let Some(bytes) = escaped.get(range) else { continue };
            if let Some(id) = vocabulary.find(bytes) {
                out.push(Piece { id, start: symbol.source });
                continue;
            }
            for &byte in bytes {
                let id = self.bytes.get(usize::from(byte)).copied().flatten().or(self.unknown);
                out.extend(id.map(|id| Piece { id, start: symbol.source }));
            }
        }
    }
}
