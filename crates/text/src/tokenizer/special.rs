//! Tokens that are found in a text before anything else.

use aho_corasick::{AhoCorasick, Input, MatchKind};

/// A stretch of a text: still text, or a token.
pub(super) enum Fragment {
    Text { start: usize, end: usize },
    Token { id: u32, start: usize },
}

/// Finds special tokens as llama.cpp does (`tokenizer_st_partition`): longer ones first through
/// the whole text, then the next shorter in what is left of it.
pub(super) struct Specials {
    /// Descending by length.
    by_length: Vec<Class>,
}

/// The tokens of one length.
struct Class {
    search: AhoCorasick,
    tokens: Vec<Special>,
}

#[derive(Clone, Copy)]
pub(super) struct Special {
    pub(super) id: u32,
    /// White space that follows is dropped.
    pub(super) strip_right: bool,
}

impl Specials {
    /// From tokens with their texts; the error is the search's.
    pub(super) fn new(mut tokens: Vec<(Special, &[u8])>) -> Result<Self, String> {
        tokens.retain(|(_, text)| !text.is_empty());
        tokens.sort_by_key(|(_, text)| std::cmp::Reverse(text.len()));
        let mut by_length = Vec::new();
        for class in tokens.chunk_by(|a, b| a.1.len() == b.1.len()) {
            let search = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostFirst)
                .build(class.iter().map(|(_, text)| text))
                .map_err(|e| e.to_string())?;
            by_length.push(Class { search, tokens: class.iter().map(|(t, _)| *t).collect() });
        }
        Ok(Self { by_length })
    }

    pub(super) fn partition(&self, text: &str) -> Vec<Fragment> {
        let mut fragments = Vec::new();
        if !text.is_empty() {
            fragments.push(Fragment::Text { start: 0, end: text.len() });
        }
        for class in &self.by_length {
            if !fragments.iter().any(|fragment| class.next(text, fragment).is_some()) {
                continue;
            }
            let mut after = Vec::with_capacity(fragments.len() + 2);
            for mut fragment in fragments {
                while let Some((special, found)) = class.next(text, &fragment) {
                    let Fragment::Text { start, end } = fragment else { break };
                    if start < found.start {
                        after.push(Fragment::Text { start, end: found.start });
                    }
                    after.push(Fragment::Token { id: special.id, start: found.start });
                    let mut rest = found.end;
                    if special.strip_right {
                        let tail = text.as_bytes().get(rest..end).unwrap_or_default();
                        rest += tail.iter().take_while(|b| matches!(b, b' ' | 9..=13)).count();
                    }
                    fragment = Fragment::Text { start: rest, end };
                }
                if !matches!(fragment, Fragment::Text { start, end } if start == end) {
                    after.push(fragment);
                }
            }
            fragments = after;
        }
        fragments
    }
}

impl Class {
    /// The first token of this class in a fragment of text.
    fn next(&self, text: &str, fragment: &Fragment) -> Option<(Special, std::ops::Range<usize>)> {
        let Fragment::Text { start, end } = *fragment else { return None };
        let found = self.search.find(Input::new(text).span(start..end))?;
        Some((*self.tokens.get(found.pattern().as_usize())?, found.range()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(tokens: &[(&str, bool)], text: &str) -> Vec<String> {
        let tokens = tokens
            .iter()
            .zip(0..)
            .map(|((text, strip_right), id)| {
                (Special { id, strip_right: *strip_right }, text.as_bytes())
            })
            .collect();
        let show = |fragment| match fragment {
            Fragment::Text { start, end } => text[start..end].to_owned(),
            Fragment::Token { id, start } => format!("{id}@{start}"),
        };
        Specials::new(tokens).unwrap().partition(text).into_iter().map(show).collect()
    }

    #[test]
    fn longer_tokens_go_first_wherever_they_are() {
        let tokens = [("<a>", false), ("><b", false), ("<a><b>", false)];
        assert_eq!(parts(&tokens, "x<a><b>y"), ["x", "2@1", "y"]);
        assert_eq!(parts(&tokens, "<a><b"), ["0@0", "<b"]);
        assert_eq!(parts(&tokens, ""), Vec::<String>::new());
        assert_eq!(parts(&tokens, "<a>"), ["0@0"]);
        assert_eq!(parts(&[("", false)], "x"), ["x"]);
    }

    #[test]
    fn white_space_after_a_token_is_dropped_where_the_model_wants_it() {
        assert_eq!(parts(&[("<e>", true)], "a <e> \n b<e> "), ["a ", "0@2", "b", "0@9"]);
        assert_eq!(parts(&[("<e>", false)], "<e> "), ["0@0", " "]);
    }
}
