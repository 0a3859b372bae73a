//! What the tests share.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)] // helpers of tests

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use data::{Content, Error, Example, Options, Read, Renderer, Row};
use serde_json::Value;
use text::{ChatTemplate, SpecialTokens, Tokenizer};

pub fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata").join(name)
}

/// A folder that goes when the test ends.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("gradus-data-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// All rows of files.
pub fn rows(files: &[PathBuf], options: &Options) -> Result<(Vec<Row>, Read), Error> {
    let mut rows = Vec::new();
    let read = data::each(files, options, &mut |row| {
        rows.push(row);
        Ok(())
    })?;
    Ok((rows, read))
}

/// The one row of a value, as JSON lines have it.
pub fn row_of(value: &Value, options: &Options) -> Result<(Content, Read), Error> {
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let folder = Folder::new(&format!("row-{count}"));
    let (mut rows, read) = rows(&[folder.write("row.jsonl", value.to_string())], options)?;
    Ok((rows.pop().unwrap().content, read))
}

/// What a conversation says, with `-` for what is not trained and a weight that is not 1.
pub fn said(content: &Content) -> String {
    let Content::Chat { messages, tools } = content else {
        let Content::Text(text) = content else { panic!() };
        return format!("text: {text}");
    };
    let each = messages.iter().enumerate().map(|(i, m)| {
        let text = m.text(i).unwrap().unwrap_or("~".into());
        let train = if m.role == "assistant" && !m.train { "-" } else { "" };
        let weight = if m.weight == 1.0 { String::new() } else { format!("*{}", m.weight) };
        format!("{train}{}{weight}: {text}", m.role)
    });
    let tools = if tools.is_empty() { String::new() } else { format!("{} tools | ", tools.len()) };
    tools + &each.collect::<Vec<_>>().join(" | ")
}

pub fn smollm2() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let file = std::fs::File::open(testdata("text/smollm2.vocab.gguf.gz")).unwrap();
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
        let file = gguf::Gguf::from_bytes("smollm2.vocab.gguf", bytes).unwrap();
        Tokenizer::from_metadata(file.metadata()).unwrap()
    })
}

/// The templates that the repository has, and one that leaves out earlier reasoning.
pub fn templates() -> Vec<(String, ChatTemplate)> {
    let tokens = SpecialTokens::of(smollm2());
    let mut all: Vec<(String, ChatTemplate)> = text::BUILTIN_TEMPLATES
        .iter()
        .map(|name| (name.to_string(), ChatTemplate::builtin(name, tokens.clone()).unwrap()))
        .collect();
    let mut files: Vec<PathBuf> = std::fs::read_dir(testdata("text/templates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    for path in files {
        let name = path.file_name().unwrap().to_string_lossy().to_string();
        let source = std::fs::read_to_string(&path).unwrap();
        all.push((name.clone(), ChatTemplate::parse(&name, &source, tokens.clone()).unwrap()));
    }
    assert!(all.len() >= 7);
    all
}

pub fn renderer<'a>(template: &'a ChatTemplate, options: &Options) -> Renderer<'a> {
    Renderer::new(smollm2(), Ok(template), options)
}

/// The text of an example, trained tokens in brackets.
pub fn marked(example: &Example) -> String {
    let mut out = String::new();
    let mut before = 0.0;
    for (i, (&id, &weight)) in example.tokens.iter().zip(&example.weights).enumerate() {
        let weight = if i == 0 { 0.0 } else { weight };
        if weight != before {
            let close = if before != 0.0 { "]" } else { "" };
            let open = if weight != 0.0 { "[" } else { "" };
            let times =
                if weight == 0.0 || weight == 1.0 { "".into() } else { format!("{weight}x ") };
            out += &format!("{close}{open}{times}");
        }
        before = weight;
        out += &String::from_utf8_lossy(smollm2().token_bytes(id, true).unwrap());
    }
    if before != 0.0 {
        out.push(']');
    }
    out
}

/// Numbers that are always the same.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        ((self.0 >> 33) as usize) % n.max(1)
    }
}
