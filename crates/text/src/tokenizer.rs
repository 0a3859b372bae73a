//! From text to token ids and back, by the vocabulary that a GGUF file carries.
//!
//! The reference is llama.cpp: for the same file, text and options the ids are the same, except
//! that BOS is never doubled (see [`Encode::add_bos`]). The time is nearly linear in the text
//! whatever it holds, and nothing recurses over it.

use gguf::Metadata;

use crate::Error;
use crate::error::shown;

mod bpe;
mod bytes;
mod pre;
mod special;
mod spm;
mod texts;
mod vocabulary;

use bpe::{Bpe, Scratch};
use pre::Pre;
use special::{Fragment, Special, Specials};
use spm::Spm;
use vocabulary::{Kind, TOKENS, Vocabulary, Writing, bad};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const MERGES: &str = "tokenizer.ggml.merges";

/// Most bytes in one text to encode.
pub const MAX_TEXT_BYTES: usize = 1 << 28;

/// How a text is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Encode {
    /// Begin with BOS if the vocabulary wants one and the text does not already begin with it:
    /// a rendered chat template often does, and a second one is never right.
    pub add_bos: bool,
    /// End with EOS if the vocabulary wants one and the text does not already end with it.
    pub add_eos: bool,
    /// Take control tokens written in the text as such (`<|im_end|>`); else they are plain text.
    /// User-defined tokens are found either way.
    pub parse_special: bool,
}

impl Encode {
    /// Plain text, nothing added.
    pub const TEXT: Self = Self { add_bos: false, add_eos: false, parse_special: false };
    /// A whole prompt, rendered by a template or written by hand: the one way in which prompts
    /// are encoded to be answered and to be trained on.
    pub const PROMPT: Self = Self { add_bos: true, add_eos: false, parse_special: true };
    /// A whole document, as for perplexity.
    pub const DOCUMENT: Self = Self { add_bos: true, add_eos: false, parse_special: false };
}

/// A token of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The token.
    pub id: u32,
    /// The byte of the text at which it begins. A token that no byte of the text stands for
    /// (BOS, the space before a first word) begins where the next one does.
    pub start: u32,
}

/// A tokenizer.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    model: Model,
    /// Control and unknown tokens, and user-defined ones.
    specials: Specials,
    /// User-defined tokens only.
    user_defined: Specials,
}

enum Model {
    Bpe(Bpe),
    Spm(Spm),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// The tokenizer of a model file.
    ///
    /// # Errors
    /// A key that is needed is missing, of the wrong type or contradicts another; the kind of
    /// tokenizer or pre-tokenizer is not known.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self, Error> {
        let (vocabulary, model) = match metadata.str(MODEL)? {
            "gpt2" => {
                let name = metadata.opt_str(PRE)?.unwrap_or("default");
                let Some(style) = pre::style(name) else {
                    let known: Vec<&str> = pre::names().collect();
                    let known = known.join(", ");
                    let what = format!("is {}; expected one of {known}", shown(name));
                    return Err(bad(metadata, PRE, what));
                };
                let vocabulary =
                    Vocabulary::from_metadata(metadata, Writing::Bytes, style.add_bos)?;
                let pre = Pre::new(style).map_err(|e| bad(metadata, PRE, e))?;
                let merges = metadata.strings(MERGES)?;
                let bpe =
                    Bpe::new(&vocabulary.texts, merges, pre, style.ignore_merges).map_err(|e| {
                        let line = merges.get(e.index).map_or("", String::as_str);
                        let what =
                            format!("has {} as entry {}, which {}", shown(line), e.index, e.what);
                        bad(metadata, MERGES, what)
                    })?;
                (vocabulary, Model::Bpe(bpe))
            }
            "llama" => {
                let vocabulary = Vocabulary::from_metadata(metadata, Writing::Spaces, true)?;
                let spm = Spm {
                    scores: vocabulary::scores(metadata, vocabulary.kinds.len())?,
                    bytes: vocabulary.byte_tokens(metadata)?,
                    unknown: vocabulary.unknown,
                    longest: vocabulary.texts.strings().longest(),
                    add_space_prefix: metadata
                        .opt_bool("tokenizer.ggml.add_space_prefix")?
                        .unwrap_or(true),
                };
                (vocabulary, Model::Spm(spm))
            }
            other => {
                let what = format!(
                    "is {}; expected \"gpt2\" (byte-level BPE) or \"llama\" (SentencePiece)",
                    shown(other)
                );
                return Err(bad(metadata, MODEL, what));
            }
        };
        // The Phi-3 family drops white space after its special tokens; no key says so.
        let strip = metadata.opt_str("general.name")?.is_some_and(|name| {
            let name = name.to_lowercase();
            name.contains("phi-3") || name.contains("phi3")
        });
        let matching = |kinds: Kind| {
            let mut found = Vec::new();
            for (id, kind) in (0..).zip(&vocabulary.kinds) {
                let text = vocabulary.texts.strings().get(id).unwrap_or_default();
                // With parse_special off, llama.cpp passes over everything that is also control.
                let excluded = Kind::CONTROL.and(Kind::UNKNOWN);
                if kind.has(kinds) && (kinds.has(Kind::CONTROL) || !kind.has(excluded)) {
                    let kept: [&[u8]; 3] = [b"<unk>", b"<s>", b"<|endoftext|>"];
                    let strip_right = strip && !kept.contains(&text);
                    found.push((Special { id, strip_right }, text));
                }
            }
            Specials::new(found).map_err(|e| bad(metadata, TOKENS, e))
        };
        let specials = matching(Kind::CONTROL.and(Kind::UNKNOWN).and(Kind::USER_DEFINED))?;
        let user_defined = matching(Kind::USER_DEFINED)?;
        Ok(Self { specials, user_defined, vocabulary, model })
    }

    /// Number of tokens. A model's logits may have more columns: its embedding is often padded.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.kinds.len()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.vocabulary.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.vocabulary.eos
    }

    /// The token that ends a turn of a conversation.
    pub fn eot(&self) -> Option<u32> {
        self.vocabulary.eot
    }

    /// The token that stands for what has no other.
    pub fn unknown(&self) -> Option<u32> {
        self.vocabulary.unknown
    }

    /// The token that fills a batch.
    pub fn pad(&self) -> Option<u32> {
        self.vocabulary.pad
    }

    /// Whether a text begins with [`Self::bos`].
    pub fn adds_bos(&self) -> bool {
        self.vocabulary.add_bos
    }

    /// Whether a document ends with [`Self::eos`].
    pub fn adds_eos(&self) -> bool {
        self.vocabulary.add_eos
    }

    /// The tokens that end a generation, ascending: EOS, the end of a turn and their like, as
    /// llama.cpp collects them.
    pub fn eog_ids(&self) -> &[u32] {
        &self.vocabulary.eog
    }

    /// Whether a token ends a generation.
    pub fn is_eog(&self, id: u32) -> bool {
        self.vocabulary.eog.binary_search(&id).is_ok()
    }

    /// Whether a token is rendered only on request: a control token or the unknown one.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocabulary.kind(id).has(Kind::CONTROL.and(Kind::UNKNOWN))
    }

    /// The token whose text in the vocabulary is exactly this.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.vocabulary.texts.find(text.as_bytes())
    }

    /// A token's text as the vocabulary writes it (`Ġhello`, `▁hello`, `<|im_end|>`).
    ///
    /// # Errors
    /// There is no such token.
    pub fn token_text(&self, id: u32) -> Result<&str, Error> {
        let text = self.vocabulary.texts.strings().get(id);
        text.and_then(|text| std::str::from_utf8(text).ok()).ok_or_else(|| self.no_token(id))
    }

    /// The bytes that a token renders as; nothing for a control token unless `special`.
    ///
    /// # Errors
    /// There is no such token.
    pub fn token_bytes(&self, id: u32, special: bool) -> Result<&[u8], Error> {
        let piece = self.vocabulary.pieces.get(id).ok_or_else(|| self.no_token(id))?;
        Ok(if self.is_control(id) && !special { &[] } else { piece })
    }

    fn no_token(&self, id: u32) -> Error {
        Error::Token { id, size: self.vocab_size() }
    }

    /// The text of a whole sequence of tokens, without the space that [`Self::encode`] put
    /// before it. Bytes that are no text become U+FFFD.
    ///
    /// # Errors
    /// A token is out of range.
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String, Error> {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.token_bytes(id, special)?);
        }
        let mut text = bytes.as_slice();
        if matches!(&self.model, Model::Spm(spm) if spm.add_space_prefix) {
            text = text.strip_prefix(b" ").unwrap_or(text);
        }
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// The tokens of a text.
    ///
    /// # Errors
    /// The text is longer than [`MAX_TEXT_BYTES`].
    pub fn encode(&self, text: &str, options: Encode) -> Result<Vec<u32>, Error> {
        Ok(self.encode_pieces(text, options)?.into_iter().map(|piece| piece.id).collect())
    }

    /// The tokens of a text and where in it they begin.
    ///
    /// # Errors
    /// The text is longer than [`MAX_TEXT_BYTES`].
    pub fn encode_pieces(&self, text: &str, options: Encode) -> Result<Vec<Piece>, Error> {
        if text.len() > MAX_TEXT_BYTES {
            return Err(Error::TextLength { bytes: text.len(), limit: MAX_TEXT_BYTES });
        }
        let specials = if options.parse_special { &self.specials } else { &self.user_defined };
        let mut pieces = Vec::new();
        let mut scratch = Scratch::default();
        for fragment in specials.partition(text) {
            match fragment {
                Fragment::Token { id, start } => pieces.push(Piece { id, start: start as u32 }),
                Fragment::Text { start, end } => {
                    let part = text.get(start..end).unwrap_or_default();
                    self.encode_plain(start as u32, part, &mut scratch, &mut pieces);
                }
            }
        }
        let Vocabulary { bos, eos, add_bos, add_eos, .. } = self.vocabulary;
        if let Some(bos) = bos.filter(|_| options.add_bos && add_bos)
            && pieces.first().is_none_or(|first| first.id != bos)
        {
            pieces.insert(0, Piece { id: bos, start: 0 });
        }
        if let Some(eos) = eos.filter(|_| options.add_eos && add_eos)
            && pieces.last().is_none_or(|last| last.id != eos)
        {
            pieces.push(Piece { id: eos, start: text.len() as u32 });
        }
        Ok(pieces)
    }

    fn encode_plain(&self, offset: u32, text: &str, scratch: &mut Scratch, out: &mut Vec<Piece>) {
        let texts = &self.vocabulary.texts;
        match &self.model {
            Model::Bpe(bpe) => bpe.pre.split(text, &mut |at, word| {
                bpe.encode(texts, offset + at as u32, word, scratch, out);
            }),
            Model::Spm(spm) => spm.encode(texts, offset, text, out),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
