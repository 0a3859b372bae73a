//! What a GGUF file says about its tokens, and what llama.cpp reads into it.

use gguf::Metadata;

use super::texts::{Strings, Texts};
use super::{bytes, spm};
use crate::Error;
use crate::error::{one_line, shown};

/// Flags of a token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind(u8);

impl Kind {
    pub(super) const NORMAL: Self = Self(1);
    pub(super) const UNKNOWN: Self = Self(2);
    /// Never rendered unless asked for; found in a text only where special tokens are parsed.
    pub(super) const CONTROL: Self = Self(4);
    /// Found in any text before anything else.
    pub(super) const USER_DEFINED: Self = Self(8);
    pub(super) const BYTE: Self = Self(16);
    /// Neither rendered nor found.
    pub(super) const UNUSED: Self = Self(32);

    /// From `tokenizer.ggml.token_type`; what is not in the list counts as unused, as in
    /// llama.cpp.
    fn from_type(number: i32) -> Self {
        match number {
            1 => Self::NORMAL,
            2 => Self::UNKNOWN,
            3 => Self::CONTROL,
            4 => Self::USER_DEFINED,
            6 => Self::BYTE,
            _ => Self::UNUSED,
        }
    }

    /// Whether any flag is common to both.
    pub(super) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";

/// Texts, kinds and special tokens.
pub(super) struct Vocabulary {
    pub(super) texts: Texts,
    pub(super) kinds: Vec<Kind>,
    /// What each token renders as.
    pub(super) pieces: Strings,
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    pub(super) unknown: Option<u32>,
    pub(super) pad: Option<u32>,
    /// Ascending.
    pub(super) eog: Vec<u32>,
    pub(super) add_bos: bool,
    pub(super) add_eos: bool,
}

/// How texts are written in a vocabulary.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Writing {
    /// GPT-2's alphabet.
    Bytes,
    /// Text with U+2581 for spaces, and tokens `<0x00>` to `<0xFF>`.
    Spaces,
}

/// Texts that end a turn wherever they are tokens, the likelier names of the end-of-turn token
/// first. llama.cpp: `special_eog_ids`.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "</s>",
    "<|eom_id|>",
    "[EOS]",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "[e~[",
];
/// How many of them, from the start, may be the end-of-turn token.
const END_OF_TURN: usize = 11;

/// Names of the tokens around a hole to be filled, by role; llama.cpp makes them control tokens.
/// Those of the last three end a generation too.
const FILL_IN_THE_MIDDLE: &[(&[&str], &[&str])] = &[
    (
        &["tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id"],
        &[
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<｜fim▁begin｜>",
            "<PRE>",
            "▁<PRE>",
            "<|code_prefix|>",
            "<|prefix|>",
        ],
    ),
    (
        &["tokenizer.ggml.fim_suf_token_id", "tokenizer.ggml.suffix_token_id"],
        &[
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<｜fim▁hole｜>",
            "<SUF>",
            "▁<SUF>",
            "<|code_suffix|>",
            "<|suffix|>",
        ],
    ),
    (
        &["tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id"],
        &[
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<｜fim▁end｜>",
            "<MID>",
            "▁<MID>",
            "<|code_middle|>",
            "<|middle|>",
        ],
    ),
    (
        &["tokenizer.ggml.fim_pad_token_id"],
        &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    ),
    (
        &["tokenizer.ggml.fim_rep_token_id"],
        &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    ),
    (&["tokenizer.ggml.fim_sep_token_id"], &["<|file_sep|>"]),
];
/// Index of the first role that ends a generation.
const FILL_ENDS: usize = 3;

pub(super) fn bad(metadata: &Metadata, key: &'static str, what: impl Into<String>) -> Error {
    Error::Vocabulary { file: one_line(metadata.file()), key, what: what.into() }
}

impl Vocabulary {
    pub(super) fn from_metadata(
        metadata: &Metadata,
        writing: Writing,
        add_bos: bool,
    ) -> Result<Self, Error> {
        let (texts, kinds) = tokens(metadata)?;
        let size = kinds.len();
        let id = |key: &'static str| match metadata.opt_u32(key)? {
            Some(id) if id as usize >= size => Err(bad(
                metadata,
                key,
                format!("is {id}; expected a token id below {size}; correct the key"),
            )),
            id => Ok(id),
        };
        // SentencePiece's own numbers, which files of that kind may leave out.
        let usual =
            |usual: u32| (writing == Writing::Spaces && (usual as usize) < size).then_some(usual);
        let mut vocabulary = Self {
            bos: id(BOS)?.or(usual(1)),
            eos: id(EOS)?.or(usual(2)),
            eot: id("tokenizer.ggml.eot_token_id")?,
            unknown: id("tokenizer.ggml.unknown_token_id")?.or(usual(0)),
            pad: id("tokenizer.ggml.padding_token_id")?,
            eog: Vec::new(),
            add_bos: metadata.opt_bool("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos),
            add_eos: metadata.opt_bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false),
            pieces: Strings::default(),
            texts,
            kinds,
        };
        if vocabulary.add_bos && vocabulary.bos.is_none() {
            return Err(bad(metadata, BOS, "is missing; expected a token id, as BOS is added"));
        }
        if vocabulary.add_eos && vocabulary.eos.is_none() {
            return Err(bad(metadata, EOS, "is missing; expected a token id, as EOS is added"));
        }
        let eom = id("tokenizer.ggml.eom_token_id")?;
        let mut fill = Vec::new();
        for (role, (keys, names)) in FILL_IN_THE_MIDDLE.iter().enumerate() {
            let mut known = None;
            for key in *keys {
                known = id(key)?.or(known);
            }
            if known.is_none() {
                known = names.iter().find_map(|name| vocabulary.texts.find(name.as_bytes()));
                known.iter().for_each(|&id| vocabulary.make_control(id));
            }
            fill.extend(known.filter(|_| role >= FILL_ENDS));
        }
        vocabulary.collect_eog(eom, fill);
        vocabulary.render(metadata, writing)?;
        Ok(vocabulary)
    }

    fn make_control(&mut self, id: u32) {
        if let Some(kind) = self.kinds.get_mut(id as usize) {
            *kind = kind.and(Kind::CONTROL);
        }
    }

    fn set_kind(&mut self, id: u32, kind: Kind) {
        if let Some(slot) = self.kinds.get_mut(id as usize) {
            *slot = kind;
        }
    }

    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::UNUSED)
    }

    /// The tokens that end a generation, and the kinds that llama.cpp corrects on the way.
    fn collect_eog(&mut self, eom: Option<u32>, fill: Vec<u32>) {
        let find = |vocabulary: &Self, name: &str| vocabulary.texts.find(name.as_bytes());
        let named: Vec<(usize, u32)> = END_OF_GENERATION
            .iter()
            .enumerate()
            .filter_map(|(i, name)| Some((i, find(self, name)?)))
            .collect();
        named.iter().for_each(|&(_, id)| self.make_control(id));
        // gpt-oss writes its channels with these; they are part of the text.
        for name in ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"] {
            if let Some(id) = find(self, name) {
                self.set_kind(id, Kind::USER_DEFINED);
            }
        }
        if self.eot.is_none() {
            self.eot = named.iter().find(|(i, _)| *i < END_OF_TURN).map(|&(_, id)| id);
        }
        self.eog = named.into_iter().map(|(_, id)| id).chain(fill).collect();
        self.eog.extend([self.eos, self.eot, eom].into_iter().flatten());
        self.eog.sort_unstable();
        self.eog.dedup();
        // Where a model ends with these others, `<|end|>` and `</s>` are ordinary tokens.
        let ends = |name: &str| find(self, name).filter(|id| self.eog.contains(id));
        let calls = ends("<|call|>").or_else(|| ends("<|calls|>"));
        let channels = calls.and_then(|_| ends("<|return|>").or_else(|| ends("<|flush|>")));
        let end = channels.and_then(|_| ends("<|end|>"));
        let s = ends("<|tool_response>").and_then(|_| ends("</s>"));
        for (id, kind) in [(end, Kind::USER_DEFINED), (s, Kind::NORMAL)] {
            if let Some(id) = id {
                self.eog.retain(|&other| other != id);
                self.set_kind(id, kind);
            }
        }
    }

    /// Fills in what each token renders as.
    fn render(&mut self, metadata: &Metadata, writing: Writing) -> Result<(), Error> {
        let too_long = || bad(metadata, TOKENS, "holds more than 4 GiB of text");
        let mut piece = Vec::new();
        for (id, &kind) in self.kinds.iter().enumerate() {
            let text = self.texts.strings().get(id as u32).unwrap_or_default();
            piece.clear();
            if kind.has(Kind::CONTROL.and(Kind::UNKNOWN).and(Kind::USER_DEFINED)) {
                piece.extend_from_slice(text);
            } else if kind.has(Kind::BYTE) {
                let byte = byte(text).ok_or_else(|| {
                    let text = shown(&String::from_utf8_lossy(text));
                    bad(
                        metadata,
                        TOKENS,
                        format!("has {text} as byte token {id}; expected <0x00> to <0xFF>"),
                    )
                })?;
                piece.push(byte);
            } else if kind.has(Kind::NORMAL) {
                for c in std::str::from_utf8(text).unwrap_or_default().chars() {
                    match writing {
                        Writing::Bytes if bytes::byte_of(c).is_some() => {
                            piece.extend(bytes::byte_of(c));
                        }
                        Writing::Spaces if c == spm::SPACE => piece.push(b' '),
                        _ => piece.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
            self.pieces.push(&piece).ok_or_else(too_long)?;
        }
        Ok(())
    }

    /// The token of each byte in a vocabulary of text.
    pub(super) fn byte_tokens(&self, metadata: &Metadata) -> Result<Vec<Option<u32>>, Error> {
        let mut tokens = Vec::with_capacity(256);
        for byte in 0..=255u8 {
            let token = self
                .texts
                .find(format!("<0x{byte:02X}>").as_bytes())
                .or_else(|| self.texts.find(&[byte]));
            if token.is_none() && self.unknown.is_none() {
                return Err(bad(
                    metadata,
                    TOKENS,
                    format!("has no token <0x{byte:02X}> and no unknown token; expected either"),
                ));
            }
            tokens.push(token);
        }
        Ok(tokens)
    }
}

/// The byte of a token `<0x00>` to `<0xFF>`.
fn byte(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    let digits = std::str::from_utf8(digits).ok().filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

fn tokens(metadata: &Metadata) -> Result<(Texts, Vec<Kind>), Error> {
    let words = metadata.strings(TOKENS)?;
    if words.is_empty() {
        return Err(bad(metadata, TOKENS, "is empty; expected tokens"));
    }
    let types = metadata.opt_i32s(TYPES)?;
    if let Some(types) = &types {
        enough(metadata, TYPES, types.len(), words.len())?;
    }
    let mut texts = Texts::new();
    for (index, word) in words.iter().enumerate() {
        let substitute;
        let word = if word.is_empty() {
            // llama.cpp's name for it.
            substitute = format!("[EMPTY_{index}]");
            &substitute
        } else {
            word
        };
        match texts.insert(word.as_bytes()) {
            Some((_, true)) => {}
            Some((first, false)) => {
                let what = format!(
                    "has {} twice, as tokens {first} and {index}; expected distinct tokens",
                    shown(word)
                );
                return Err(bad(metadata, TOKENS, what));
            }
            None => return Err(bad(metadata, TOKENS, "holds more than 4 GiB of text")),
        }
    }
    let kinds = match types {
        Some(types) => types.iter().take(words.len()).map(|&t| Kind::from_type(t)).collect(),
        None => vec![Kind::NORMAL; words.len()],
    };
    Ok((texts, kinds))
}

/// The scores of a SentencePiece vocabulary.
pub(super) fn scores(metadata: &Metadata, size: usize) -> Result<Vec<f32>, Error> {
    let scores: Vec<f32> = match metadata.opt_i32s(SCORES) {
        Ok(Some(scores)) => scores.iter().map(|&score| score as f32).collect(),
        _ => metadata.f32s(SCORES)?.to_vec(),
    };
    enough(metadata, SCORES, scores.len(), size)?;
    match scores.iter().position(|score| score.is_nan()) {
        Some(id) => Err(bad(metadata, SCORES, format!("has no number for token {id}"))),
        // -0 and 0 compare as equal there, and so must here.
        None => Ok(scores.into_iter().take(size).map(|score| score + 0.0).collect()),
    }
}

fn enough(
    metadata: &Metadata,
    key: &'static str,
    found: usize,
    tokens: usize,
) -> Result<(), Error> {
    if found >= tokens {
        return Ok(());
    }
    let what = format!("has {found} entries; expected one for each of {tokens} tokens");
    Err(bad(metadata, key, what))
}
