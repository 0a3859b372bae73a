use gguf::{Metadata, Value};

use super::*;

const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";

/// Metadata of a byte-level vocabulary: every byte, a few merges, a few special tokens.
fn byte_bpe_metadata() -> Metadata {
    let mut tokens: Vec<String> = (0..=255u8).map(|b| bytes::char_of(b).to_string()).collect();
    let merges = ["a b", "b c", "ab c", "Ġ a", "h e", "l l", "he ll", "hell o", "Ġ Ġ"];
    tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    let mut types = vec![1; tokens.len()];
    for (text, kind) in [
        ("<|im_start|>", 3),
        ("<|im_end|>", 3),
        ("<|endoftext|>", 3),
        ("<tool>", 4),
        ("<unused>", 5),
        ("<s>", 3),
    ] {
        tokens.push(text.into());
        types.push(kind);
    }
    let last = tokens.len() as u32 - 1;
    let mut metadata = Metadata::new();
    metadata.insert(MODEL, "gpt2");
    metadata.insert(PRE, "gpt-2");
    metadata.insert(TOKENS, tokens);
    metadata.insert(TYPES, types);
    metadata.insert(MERGES, merges.map(String::from).to_vec());
    metadata.insert("tokenizer.ggml.bos_token_id", last);
    metadata.insert("tokenizer.ggml.eos_token_id", last - 3);
    metadata
}

/// A byte-level tokenizer that adds no BOS.
pub(crate) fn byte_bpe() -> Tokenizer {
    Tokenizer::from_metadata(&byte_bpe_metadata()).unwrap()
}

/// Metadata of a SentencePiece vocabulary.
fn small_spm_metadata() -> Metadata {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
    let mut types = vec![6; tokens.len()];
    types[..3].copy_from_slice(&[2, 3, 3]);
    let mut scores = vec![0f32; tokens.len()];
    for (text, kind, score) in [
        ("▁", 1, -1.0),
        ("a", 1, -2.0),
        ("b", 1, -3.0),
        ("ab", 1, -4.0),
        ("▁a", 1, -5.0),
        ("ba", 1, -4.0),
        ("▁▁", 1, -6.0),
        ("<tool>", 4, -7.0),
        ("é", 1, -8.0),
    ] {
        tokens.push(text.into());
        types.push(kind);
        scores.push(score);
    }
    let mut metadata = Metadata::new();
    metadata.insert(MODEL, "llama");
    metadata.insert(TOKENS, tokens);
    metadata.insert(TYPES, types);
    metadata.insert(SCORES, scores);
    metadata
}

/// A SentencePiece tokenizer that adds BOS.
pub(crate) fn small_spm() -> Tokenizer {
    Tokenizer::from_metadata(&small_spm_metadata()).unwrap()
}

fn texts(tokenizer: &Tokenizer, text: &str, options: Encode) -> Vec<String> {
    let ids = tokenizer.encode(text, options).unwrap();
    ids.iter().map(|&id| tokenizer.token_text(id).unwrap().to_owned()).collect()
}

#[test]
fn merges_go_by_rank_and_from_the_left() {
    let t = byte_bpe();
    // "a b" comes before "b c", and "ab c" finishes it.
    assert_eq!(texts(&t, "abc", Encode::TEXT), ["abc"]);
    assert_eq!(texts(&t, "bcab", Encode::TEXT), ["bc", "ab"]);
    assert_eq!(texts(&t, "hello", Encode::TEXT), ["hello"]);
    assert_eq!(texts(&t, "lllll", Encode::TEXT), ["ll", "ll", "l"]);
    assert_eq!(texts(&t, "x   a", Encode::TEXT), ["x", "ĠĠ", "Ġa"]);
    assert_eq!(texts(&t, "é", Encode::TEXT), ["Ã", "©"]);
    assert_eq!(texts(&t, "", Encode::TEXT), Vec::<String>::new());
}

#[test]
fn the_first_of_equal_merges_counts() {
    let mut metadata = byte_bpe_metadata();
    let mut merges = metadata.strings(MERGES).unwrap().to_vec();
    merges.push("a b".into());
    metadata.insert(MERGES, merges);
    let t = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(texts(&t, "abc", Encode::TEXT), ["abc"]);
}

#[test]
fn scores_decide_and_then_the_left() {
    let t = small_spm();
    let plain = |text: &str| texts(&t, text, Encode::TEXT);
    // "ab" and "ba" have one score.
    assert_eq!(plain("aba"), ["▁", "ab", "a"]);
    assert_eq!(plain("baba"), ["▁", "ba", "ba"]);
    assert_eq!(plain("a"), ["▁a"]);
    // No token: bytes.
    assert_eq!(plain("aü"), ["▁a", "<0xC3>", "<0xBC>"]);
    assert_eq!(plain("é"), ["▁", "é"]);
    // The first text and the one after each special token get a space.
    let special = Encode { parse_special: true, ..Encode::TEXT };
    assert_eq!(texts(&t, "a<s>a", special), ["▁a", "<s>", "▁a"]);
    assert_eq!(texts(&t, "a<tool>a", Encode::TEXT), ["▁a", "<tool>", "▁a"]);
    let mut metadata = small_spm_metadata();
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    let t = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(texts(&t, "a a", Encode::TEXT), ["a", "▁a"]);
    assert_eq!(t.decode(&t.encode(" a", Encode::TEXT).unwrap(), false).unwrap(), " a");
}

#[test]
fn special_tokens_are_parsed_on_request() {
    let t = byte_bpe();
    let text = "<|im_end|><tool>";
    let parsed = Encode { parse_special: true, ..Encode::TEXT };
    assert_eq!(texts(&t, text, parsed), ["<|im_end|>", "<tool>"]);
    let plain = texts(&t, text, Encode::TEXT);
    assert_eq!((plain.len(), plain.last().unwrap().as_str()), (11, "<tool>"));
    // An unused token is neither found nor rendered.
    assert!(texts(&t, "<unused>", parsed).len() > 1);
    let id = t.id_of("<unused>").unwrap();
    assert_eq!(t.token_bytes(id, true).unwrap(), b"");
    // Control tokens render on request.
    let id = t.id_of("<|im_end|>").unwrap();
    assert!(t.is_control(id) && t.is_eog(id));
    assert_eq!(t.token_bytes(id, false).unwrap(), b"");
    assert_eq!(t.token_bytes(id, true).unwrap(), b"<|im_end|>");
    assert!(!t.is_control(t.id_of("<tool>").unwrap()));
}

#[test]
fn f45_bos_and_eos_are_added_once() {
    let t = small_spm();
    assert_eq!(texts(&t, "a", Encode::PROMPT), ["<s>", "▁a"]);
    assert_eq!(texts(&t, "<s>a", Encode::PROMPT), ["<s>", "▁a"]);
    assert_eq!(texts(&t, "", Encode::PROMPT), ["<s>"]);
    // A BOS that is part of the text is kept as text.
    assert_eq!(texts(&t, "<s>", Encode::DOCUMENT).len(), 5);
    let mut metadata = small_spm_metadata();
    metadata.insert("tokenizer.ggml.add_bos_token", Value::Bool(false));
    metadata.insert("tokenizer.ggml.add_eos_token", Value::Bool(true));
    let t = Tokenizer::from_metadata(&metadata).unwrap();
    let both = Encode { add_bos: true, add_eos: true, parse_special: true };
    assert_eq!(texts(&t, "a", both), ["▁a", "</s>"]);
    assert_eq!(texts(&t, "a</s>", both), ["▁a", "</s>"]);
    assert_eq!(texts(&t, "a", Encode::PROMPT), ["▁a"]);
}

#[test]
fn tokens_that_end_a_generation_are_collected() {
    let t = byte_bpe();
    let names: Vec<&str> = t.eog_ids().iter().map(|&id| t.token_text(id).unwrap()).collect();
    assert_eq!(names, ["<|im_end|>", "<|endoftext|>"]);
    assert_eq!(t.eot(), t.id_of("<|im_end|>"));
    assert_eq!(t.eos(), t.id_of("<|endoftext|>"));
    // gpt-oss: its channels are text, and <|end|> ends a message, not the generation.
    let mut metadata = byte_bpe_metadata();
    let mut tokens = metadata.strings(TOKENS).unwrap().to_vec();
    let names = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|fim_pad|>"];
    tokens.extend(names.map(String::from));
    let mut types = metadata.i32s(TYPES).unwrap().to_vec();
    // Control tokens by their names, whatever the file says.
    types.extend([1, 3, 4, 3, 4]);
    metadata.insert(TOKENS, tokens);
    metadata.insert(TYPES, types);
    let t = Tokenizer::from_metadata(&metadata).unwrap();
    let ends = |name: &str| t.is_eog(t.id_of(name).unwrap());
    assert!(!ends("<|end|>") && ends("<|return|>") && ends("<|call|>") && ends("<|fim_pad|>"));
    let control = |name: &str| t.is_control(t.id_of(name).unwrap());
    assert!(control("<|return|>") && control("<|call|>") && control("<|fim_pad|>"));
    assert!(!control("<|channel|>") && !control("<|end|>"));
}

#[test]
fn places_point_into_the_text() {
    for t in [byte_bpe(), small_spm()] {
        let text = "ab é<s> a";
        let pieces = t.encode_pieces(text, Encode::PROMPT).unwrap();
        let mut end = 0;
        for piece in &pieces {
            assert!(piece.start as usize >= end, "{pieces:?}");
            end = piece.start as usize;
        }
        let s = t.id_of("<s>").unwrap();
        assert!(pieces.iter().any(|p| p.id == s && p.start == text.find("<s>").unwrap() as u32));
    }
}

/// The error about metadata that `change` has spoilt: one line that names the key.
fn refused(mut metadata: Metadata, change: impl FnOnce(&mut Metadata)) -> String {
    change(&mut metadata);
    let text = Tokenizer::from_metadata(&metadata).unwrap_err().to_string();
    assert!(!text.contains('\n') && text.len() < 1000, "{text:?}");
    text
}

#[test]
fn bad_vocabularies_are_refused_by_key() {
    let without = |metadata: Metadata, key: &str| {
        let mut rest = Metadata::new();
        for (k, v) in metadata.iter().filter(|(k, _)| *k != key) {
            rest.insert(k, v.clone());
        }
        Tokenizer::from_metadata(&rest).unwrap_err().to_string()
    };
    for key in [MODEL, TOKENS, MERGES] {
        assert!(without(byte_bpe_metadata(), key).contains(&format!("`{key}` is missing")));
    }
    assert!(without(small_spm_metadata(), SCORES).contains("scores` is missing"));

    let error = refused(byte_bpe_metadata(), |m| drop(m.insert(PRE, "nonsense")));
    assert!(error.contains("`tokenizer.ggml.pre` is \"nonsense\"; expected one of default, llama"));
    assert!(error.contains("qwen2") && error.contains("tekken"));
    let error = refused(byte_bpe_metadata(), |m| drop(m.insert(MODEL, "bert")));
    assert!(error.contains("`tokenizer.ggml.model` is \"bert\"; expected \"gpt2\""), "{error}");

    let error = refused(byte_bpe_metadata(), |m| {
        let mut tokens = m.strings(TOKENS).unwrap().to_vec();
        tokens[70] = tokens[65].clone();
        m.insert(TOKENS, tokens);
    });
    assert!(error.contains("has \"A\" twice, as tokens 65 and 70"), "{error}");
    let error = refused(byte_bpe_metadata(), |m| drop(m.insert(TOKENS, Vec::<String>::new())));
    assert!(error.contains("`tokenizer.ggml.tokens` is empty"), "{error}");
    let error = refused(byte_bpe_metadata(), |m| drop(m.insert(TYPES, vec![1i32; 7])));
    assert!(error.contains("token_type` has 7 entries; expected one for each of 271"), "{error}");
    let error = refused(byte_bpe_metadata(), |m| drop(m.insert(TYPES, "none")));
    assert!(error.contains("token_type`"), "{error}");

    for line in ["ab", "", " ", "é"] {
        let merges = vec!["a b".to_owned(), line.to_owned()];
        let error = refused(byte_bpe_metadata(), |m| drop(m.insert(MERGES, merges)));
        assert!(error.contains("as entry 1, which is not two symbols"), "{error}");
    }
    for key in ["bos", "eos", "eot", "eom", "unknown", "padding"] {
        let key = format!("tokenizer.ggml.{key}_token_id");
        let error = refused(byte_bpe_metadata(), |m| drop(m.insert(key.as_str(), 271u32)));
        assert!(error.contains(&format!("`{key}` is 271; expected a token id below 271")));
    }
    let error = refused(byte_bpe_metadata(), |m| {
        let mut rest = Metadata::new();
        let bos = "tokenizer.ggml.bos_token_id";
        m.iter().filter(|(k, _)| *k != bos).for_each(|(k, v)| drop(rest.insert(k, v.clone())));
        rest.insert("tokenizer.ggml.add_bos_token", Value::Bool(true));
        *m = rest;
    });
    assert!(error.contains("bos_token_id` is missing; expected a token id, as BOS"), "{error}");

    let error = refused(small_spm_metadata(), |m| drop(m.insert(SCORES, vec![0f32; 3])));
    assert!(error.contains("scores` has 3 entries"), "{error}");
    let error = refused(small_spm_metadata(), |m| {
        let mut scores = m.f32s(SCORES).unwrap().to_vec();
        scores[5] = f32::NAN;
        m.insert(SCORES, scores);
    });
    assert!(error.contains("scores` has no number for token 5"), "{error}");
    let error = refused(small_spm_metadata(), |m| {
        let mut tokens = m.strings(TOKENS).unwrap().to_vec();
        tokens[10] = "<0xZZ>".into();
        m.insert(TOKENS, tokens);
    });
    assert!(error.contains("has \"<0xZZ>\" as byte token 10"), "{error}");
}

#[test]
fn tokens_out_of_range_are_errors() {
    let t = byte_bpe();
    let expected = "token id 271 is out of range; the vocabulary has 271 tokens";
    assert_eq!(t.token_bytes(271, true).unwrap_err().to_string(), expected);
    assert_eq!(t.token_text(271).unwrap_err().to_string(), expected);
    assert_eq!(t.decode(&[0, 271], true).unwrap_err().to_string(), expected);
    assert!(!t.is_control(271) && !t.is_eog(u32::MAX));
}

#[test]
fn symbols_that_are_no_tokens_become_their_bytes() {
    let mut metadata = byte_bpe_metadata();
    let mut tokens = metadata.strings(TOKENS).unwrap().to_vec();
    // "ab" is merged on the way to "abc", but is no token; nor is the letter "z".
    let ab = tokens.iter().position(|t| t == "ab").unwrap();
    tokens[ab] = "gone".into();
    tokens[usize::from(b'z')] = "gone too".into();
    metadata.insert(TOKENS, tokens);
    let t = Tokenizer::from_metadata(&metadata).unwrap();
    assert_eq!(texts(&t, "abc", Encode::TEXT), ["abc"]);
    let pieces = t.encode_pieces("cabz", Encode::TEXT).unwrap();
    assert_eq!(pieces.iter().map(|p| p.start).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(texts(&t, "cabz", Encode::TEXT), ["c", "a", "b"]);
}

#[test]
fn time_is_nearly_linear_in_any_text() {
    const N: usize = 1_000_000;
    for t in [byte_bpe(), small_spm()] {
        for piece in
            ["a", " ", "ab", "\n", "é", "l", "<", "<s>", "<|im_start|>", " \n", "'", "\u{3000}"]
        {
            let text = piece.repeat(N / piece.len());
            let start = std::time::Instant::now();
            let ids = t.encode(&text, Encode::PROMPT).unwrap();
            assert!(ids.len() > N / 300);
            // Well under a second; quadratic time would be hours.
            assert!(start.elapsed().as_secs() < 60, "{piece:?}: {:?}", start.elapsed());
        }
    }
    let text = "a".repeat(MAX_TEXT_BYTES + 1);
    assert_eq!(
        byte_bpe().encode(&text, Encode::TEXT).unwrap_err().to_string(),
        "the text has 268435457 bytes; at most 268435456 can be tokenized at once"
    );
}

#[test]
fn no_vocabulary_makes_it_panic() {
    let mut rng = crate::sampler::Rng::new(11);
    let mut below = move |n: u64| rng.next_u64() % n;
    let pieces =
        ["", "a", "ab", "Ġ", "▁", "<0x41>", "<0xG1>", "<s>", "é", "\u{2581}a", "a b", " ", "Ä"];
    let (mut built, mut refused) = (0, 0);
    for round in 0..3000 {
        let mut metadata = if round % 2 == 0 { byte_bpe_metadata() } else { small_spm_metadata() };
        for _ in 0..1 + below(3) {
            let mut tokens = metadata.strings(TOKENS).unwrap().to_vec();
            let mut types = metadata.i32s(TYPES).unwrap().to_vec();
            let at = below(tokens.len() as u64) as usize;
            match below(9) {
                0 => tokens[at] = pieces[below(13) as usize].repeat(1 + below(4) as usize),
                1 => {
                    let at = at % types.len();
                    types[at] = below(9) as i32 - 1;
                }
                2 => tokens.truncate(at.max(1)),
                3 => types.truncate(at.max(1)),
                4 => drop(metadata.insert("tokenizer.ggml.bos_token_id", below(300) as u32)),
                5 => drop(metadata.insert("tokenizer.ggml.unknown_token_id", below(300) as u32)),
                6 => drop(metadata.insert("general.name", "phi-3 of some kind")),
                7 => {
                    let names: Vec<&str> = pre::names().collect();
                    metadata.insert(PRE, names[below(names.len() as u64) as usize]);
                }
                _ if round % 2 == 0 => {
                    let mut merges = metadata.strings(MERGES).unwrap().to_vec();
                    let piece = |n: u64| pieces[n as usize % 13];
                    merges.push(format!("{} {}", piece(below(13)), piece(below(13))));
                    metadata.insert(MERGES, merges);
                }
                _ => {
                    let mut scores = metadata.f32s(SCORES).unwrap().to_vec();
                    let wild = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -0.0];
                    let at = below(scores.len() as u64) as usize;
                    scores[at] = wild[below(5) as usize];
                    metadata.insert(SCORES, scores);
                }
            }
            metadata.insert(TOKENS, tokens);
            metadata.insert(TYPES, types);
        }
        match Tokenizer::from_metadata(&metadata) {
            Err(error) => {
                assert!(!error.to_string().contains('\n'), "{error}");
                refused += 1;
            }
            Ok(t) => {
                built += 1;
                let text = "ab <s>▁a\u{0}é<0x41>\n hello <|im_end|> <tool> 12345ABC日本";
                for options in [Encode::TEXT, Encode::PROMPT, Encode::DOCUMENT] {
                    let ids = t.encode(text, options).unwrap();
                    t.decode(&ids, true).unwrap();
                }
            }
        }
    }
    assert!(built > 500 && refused > 500, "{built} {refused}");
}
