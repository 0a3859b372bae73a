//! Training data: conversations, the tokens that carry loss, and windows that pack them.

use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::{Error, Result};

/// One sequence to learn from.
#[derive(Clone, PartialEq, Debug)]
pub struct Example {
    /// Its tokens, at least two.
    pub tokens: Vec<u32>,
    /// Per token, the weight of the loss of predicting it; the first token's is never used.
    pub weights: Vec<f32>,
}

impl Example {
    /// How many tokens carry loss.
    pub fn labelled(&self) -> usize {
        self.weights.iter().skip(1).filter(|&&w| w != 0.0).count()
    }

    /// The sum of the weights that count.
    pub fn weight(&self) -> f64 {
        self.weights.iter().skip(1).map(|&w| f64::from(w)).sum()
    }
}

/// Sequences that go through one graph together. They do not see each other.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Window {
    /// The sequences, one after the other.
    pub examples: Vec<Example>,
}

impl Window {
    /// The examples of these indices, as [`pack`] gives them.
    pub fn of(examples: &[Example], indices: &[usize]) -> Window {
        let chosen = indices.iter().filter_map(|&i| examples.get(i));
        Window { examples: chosen.cloned().collect() }
    }

    /// Rows they take: the last token of each is only predicted, never read.
    pub fn rows(&self) -> usize {
        self.examples.iter().map(|e| e.tokens.len().saturating_sub(1)).sum()
    }
}

/// The longest line of a data file, in bytes.
const LONGEST_LINE: u64 = 16 << 20;

/// Reads conversations, one JSON object `{"messages": [...]}` a line, and renders each with the
/// chat template the model is served with. Assistant turns carry loss.
///
/// # Errors
/// Names the file, the line and the reason: not readable, no JSON, no messages, a conversation
/// the template refuses, nothing to learn from.
pub fn read_jsonl(
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
    let weights = conversation.trained.iter().map(|&t| if t { 1.0 } else { 0.0 }).collect();
    let example = Example { tokens: conversation.ids, weights };
    if example.weight() == 0.0 {
        return Err("no token carries loss".into());
    }
    Ok(example)
}

/// Packs examples into windows of at most `rows` rows and `most` sequences, in the given order:
/// each goes into the first window that has room. Returns the examples' indices per window.
///
/// # Errors
/// Names the first example that does not fit a window alone.
pub fn pack(
    examples: &[Example],
    order: &[usize],
    rows: usize,
    most: usize,
) -> Result<Vec<Vec<usize>>> {
    let mut windows: Vec<(usize, Vec<usize>)> = Vec::new();
    for &i in order {
        let Some(example) = examples.get(i) else { continue };
        let need = example.tokens.len().saturating_sub(1);
        if need == 0 || need > rows {
            return Err(Error::Data(format!(
                "example {} has {} tokens; a window takes 2 to {}; use a larger window",
                i + 1,
                example.tokens.len(),
                rows + 1
            )));
        }
        let room = windows.iter_mut().find(|(used, w)| used + need <= rows && w.len() < most);
        match room {
            Some((used, window)) => {
                *used += need;
                window.push(i);
            }
            None => windows.push((need, vec![i])),
        }
    }
    Ok(windows.into_iter().map(|(_, w)| w).collect())
}
