//! Pre-tokenizers: how a text is cut into words before merging.
//!
//! A GGUF file names its pre-tokenizer and nothing more; what the name means is fixed by
//! llama.cpp's table (`llama-vocab.cpp`), which this one follows pattern for pattern. The
//! patterns run on a finite automaton, so the time is linear in the text whatever it holds.

use regex_automata::Input;
use regex_automata::meta::Regex;

/// One way of cutting a text: matches and what lies between them become words.
struct Split {
    regex: Regex,
}

/// Index of the white-space pattern in a [`Split`] that has one.
const SPACES: usize = 1;

/// A pre-tokenizer: cuts applied one after the other, each to the words of the one before.
pub(super) struct Pre {
    splits: Vec<Split>,
}

/// What a name stands for.
pub(super) struct Style {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A word that is a token is taken whole, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with BOS where the file does not say.
    pub(super) add_bos: bool,
}

// In the patterns below `\s+(?!\S)|\s+` is written as the ending `|\s+$$`: no automaton has a
// look-ahead, so `Pre::split` does that one by hand.

macro_rules! contractions {
    () => {
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    };
}

/// The ending of a pattern that stands for `\s+(?!\S)|\s+`: white space, but its last character
/// belongs to what follows.
const TAIL: &str = r"|\s+$$";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$$";
const DIGIT: &str = r"\p{N}";
const NEW_LINE: &str = "[\r\n]";
const LLAMA3: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+$$"
);
const QWEN2: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+$$"
);
const QWEN35: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+$$"
);
// llama.cpp knows the case of ASCII letters only, here and in `GPT4O`; other letters count as
// both.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+$$"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]*[\p{L}--[A-Z]]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{L}--[a-z]]+[\p{L}--[A-Z]]*",
    contractions!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+$$"
);
const DEEPSEEK3: &[&str] = &[
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+$$"
    ),
];
const DEEPSEEK_LLM: &[&str] = &[
    NEW_LINE,
    // Latin, Greek, Cyrillic and the other scripts with case.
    "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\
     \u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\
     \u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\
     \u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\
     \u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\
     \u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\
     \u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}\
     -\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\
     \u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\
     \u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\
     \u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\
     \u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\
     \u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\
     \u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+",
    "\\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}\u{2018}-\u{201f}\u{3001}-\u{3002}]+",
    r"\s+\z",
    CJK_OR_HANGUL,
    r"\p{N}+",
];
// White space within the ranges does not count there.
const CJK_OR_HANGUL: &str = "[[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]--\\s]+";
const DEEPSEEK_CODER: &[&str] = &[NEW_LINE, r"\s?\p{L}+", r"\s?\p{P}+", CJK_OR_HANGUL, DIGIT];
const FALCON: &[&str] = &[r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"];
const DEFAULT: &[&str] = &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];

const STYLE: Style = Style { names: &[], patterns: &[], ignore_merges: false, add_bos: false };

/// Every name that is understood.
static STYLES: &[Style] = &[
    Style { names: &["default"], patterns: DEFAULT, ..STYLE },
    Style {
        names: &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"],
        patterns: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
    },
    Style { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], patterns: &[LLAMA3], ..STYLE },
    Style { names: &["glm4"], patterns: &[LLAMA3], ignore_merges: true, ..STYLE },
    Style {
        names: &["qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "grok-2"],
        patterns: &[QWEN2],
        ..STYLE
    },
    Style { names: &["qwen35"], patterns: &[QWEN35], ..STYLE },
    Style { names: &["tekken"], patterns: &[TEKKEN], ignore_merges: true, add_bos: true },
    Style { names: &["gpt-4o", "llama4", "minimax-m2"], patterns: &[GPT4O], ..STYLE },
    Style {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "exaone4",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "gigachat",
            "modern-bert",
        ],
        patterns: &[GPT2],
        ..STYLE
    },
    Style {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        patterns: &[DIGIT, GPT2],
        ..STYLE
    },
    Style { names: &["deepseek-v3", "hunyuan-dense"], patterns: DEEPSEEK3, ..STYLE },
    Style { names: &["deepseek-llm"], patterns: DEEPSEEK_LLM, ..STYLE },
    Style { names: &["deepseek-coder"], patterns: DEEPSEEK_CODER, ..STYLE },
    Style { names: &["falcon"], patterns: FALCON, ..STYLE },
];

/// The names that are understood, in the order of the table.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    STYLES.iter().flat_map(|style| style.names.iter().copied())
}

/// What a name stands for.
pub(super) fn style(name: &str) -> Option<&'static Style> {
    STYLES.iter().find(|style| style.names.contains(&name))
}

impl Pre {
    /// Compiles the patterns of a style; the error is the compiler's.
    pub(super) fn new(style: &Style) -> Result<Self, String> {
        let compile = |pattern: &&str| {
            let regex = match pattern.strip_suffix(TAIL) {
                Some(body) => Regex::new_many(&[body, r"\s+"]),
                None => Regex::new(pattern),
            };
            regex.map(|regex| Split { regex }).map_err(|e| match e.syntax_error() {
                Some(syntax) => format!("{e}: {syntax}"),
                None => e.to_string(),
            })
        };
        Ok(Self { splits: style.patterns.iter().map(compile).collect::<Result<_, _>>()? })
    }

    /// Calls `word` with each word of `text` and its offset in bytes, in order.
    pub(super) fn split(&self, text: &str, word: &mut dyn FnMut(usize, &str)) {
        cut(&self.splits, 0, text, word);
    }
}

fn cut(splits: &[Split], offset: usize, text: &str, word: &mut dyn FnMut(usize, &str)) {
    let Some((split, rest)) = splits.split_first() else {
        if !text.is_empty() {
            word(offset, text);
        }
        return;
    };
    let mut piece = |from: usize, to: usize| {
        // Matches lie on character boundaries, so there is always a piece.
        if let Some(piece) = text.get(from..to).filter(|piece| !piece.is_empty()) {
            cut(rest, offset + from, piece, word);
        }
    };
    let mut at = 0;
    while let Some(found) = split.regex.search(&Input::new(text).span(at..text.len())) {
        let mut end = found.end();
        if found.pattern().as_usize() == SPACES && end < text.len() {
            // `\s+(?!\S)`: the last one is left to the word that follows, if others remain.
            let last = text.get(found.range()).and_then(|run| run.chars().next_back());
            let shorter = end - last.map_or(0, char::len_utf8);
            if shorter > found.start() {
                end = shorter;
            }
        }
        piece(at, found.start());
        piece(found.start(), end);
        if end == at {
            break;
        }
        at = end;
    }
    piece(at, text.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let pre = Pre::new(style(name).unwrap()).unwrap();
        let mut words = Vec::new();
        let mut end = 0;
        pre.split(text, &mut |at, word| {
            assert_eq!((at, &text[at..at + word.len()]), (end, word));
            end += word.len();
            words.push(word.to_owned());
        });
        assert_eq!(end, text.len(), "{name} loses text");
        words
    }

    #[test]
    fn every_style_compiles_and_loses_nothing() {
        let text =
            "Hello  World's 12345 été\u{301} 你好、世界！\r\n\n \t x  ЖЗ \u{3000}\u{85}_=+ 'LL ";
        for name in names() {
            assert!(words(name, text).len() > 10, "{name}");
        }
    }

    #[test]
    fn no_name_is_listed_twice() {
        let mut seen = std::collections::HashSet::new();
        assert!(names().all(|name| seen.insert(name)));
    }

    #[test]
    fn the_last_space_goes_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("gpt-2", "a   "), ["a", "   "]);
        assert_eq!(words("gpt-2", "a \n\nb"), ["a", " \n", "\n", "b"]);
        assert_eq!(words("qwen2", "a \n\n b"), ["a", " \n\n", " b"]);
        assert_eq!(words("qwen2", "a\u{3000}\u{3000}b"), ["a", "\u{3000}", "\u{3000}b"]);
        assert_eq!(words("smollm", "a  12"), ["a", "  ", "1", "2"]);
    }

    #[test]
    fn styles_differ_where_they_should() {
        assert_eq!(words("llama-bpe", "I'M 12345"), ["I", "'M", " ", "123", "45"]);
        assert_eq!(words("qwen2", "I'M 123"), ["I", "'M", " ", "1", "2", "3"]);
        assert_eq!(words("gpt-2", "I'M 123"), ["I", "'", "M", " 123"]);
        assert_eq!(words("gpt-4o", "HelloWorld'S"), ["Hello", "World'S"]);
        assert_eq!(words("tekken", "HTMLParser/\n"), ["HTMLParser", "/\n"]);
        assert_eq!(words("default", "12345 <a>"), ["123", "45", " ", "<", "a", ">"]);
    }
}
