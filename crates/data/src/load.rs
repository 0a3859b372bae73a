//! From files to examples.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use crate::{Error, Example, Result};

/// How data are read.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Options {
    /// Rows of the windows that examples have to fit.
    pub window: Option<usize>,
}

/// Data ready to be trained on.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Dataset {
    /// The sequences, in the order of the files and their rows.
    pub examples: Vec<Example>,
}

/// Reads data files, and renders each row with the chat template the model is served with.
///
/// # Errors
/// Names the file, the row and the reason.
pub fn load(
    files: &[PathBuf],
    _options: &Options,
    tokenizer: &text::Tokenizer,
    template: &text::ChatTemplate,
) -> Result<Dataset> {
    let mut examples = Vec::new();
    for file in files {
        examples.append(&mut read_jsonl(file, tokenizer, template)?);
    }
    Ok(Dataset { examples })
}

/// The longest line of a data file, in bytes.
const LONGEST_LINE: u64 = 16 << 20;

/// Reads conversations, one JSON object `{"messages": [...]}` a line, and renders each with the
/// chat template the model is served with. Assistant turns carry loss.
///
/// # Errors
/// Names the file, the line and the reason: not readable, no JSON, no messages, a conversation
/// the template refuses, nothing to learn from.
fn read_jsonl(
    path: &Path,
    tokenizer: &text::Tokenizer,
    template: &text::ChatTemplate,
) -> Result<Vec<Example>> {
    let name = path.display();
    let file = std::fs::File::open(path).map_err(|e| Error::Data(format!("{name}: {e}")))?;
    let mut reader = BufReader::new(file);
    let mut examples = Vec::new();
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let mut bounded = std::io::Read::take(&mut reader, LONGEST_LINE);
        let read = bounded
            .read_line(&mut line)
            .map_err(|e| Error::Data(format!("{name}: line {number}: {e}")))?;
        if read == 0 {
            break;
        }
        if read as u64 == LONGEST_LINE {
            return Err(Error::Data(format!(
                "{name}: line {number} is longer than {LONGEST_LINE} bytes"
            )));
        }
        if line.trim().is_empty() {
            continue;
        }
        let example = parse(&line, tokenizer, template)
            .map_err(|why| Error::Data(format!("{name}: line {number}: {why}")))?;
        examples.push(example);
    }
    if examples.is_empty() {
        return Err(Error::Data(format!(
            "{name}: no conversations; expected one JSON object a line"
        )));
    }
    Ok(examples)
}

fn parse(
    line: &str,
    tokenizer: &text::Tokenizer,
    template: &text::ChatTemplate,
) -> std::result::Result<Example, String> {
    let row: serde_json::Value = serde_json::from_str(line).map_err(|e| format!("no JSON: {e}"))?;
    let object = row.as_object().ok_or("expected an object with the field `messages`")?;
    if let Some(unknown) = object.keys().find(|k| *k != "messages") {
        return Err(format!("unknown field `{unknown}`; expected `messages`"));
    }
    let messages = object.get("messages").ok_or("the field `messages` is missing")?;
    let messages: Vec<text::Message> =
        serde_json::from_value(messages.clone()).map_err(|e| format!("field `messages`: {e}"))?;
    let conversation =
        text::conversation(tokenizer, template, &messages, &[]).map_err(|e| e.to_string())?;
    let weights = conversation.weights;
    let example = Example { tokens: conversation.ids, weights };
    if example.weight() == 0.0 {
        return Err("no token carries loss".into());
    }
    Ok(example)
}
