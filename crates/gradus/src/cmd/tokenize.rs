//! `gradus tokenize`.

use serde_json::json;
use text::{Encode, Tokenizer};

use crate::error::{Error, Result};
use crate::options::read_stdin;
use crate::output::{json, line, print};

/// Turn text into token ids, or ids into text
///
/// Without TEXT it reads standard input, to the last byte. Plain output is the ids, separated by
/// spaces; --json adds the text that each token stands for.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus tokenize 'Hello, world'
  gradus tokenize --special --json '<|im_start|>user'
  gradus tokenize -m model.gguf < book.txt
  gradus tokenize --ids-to-text '28120 28'")]
pub struct Args {
    /// A GGUF file, or a name of the catalogue (`gradus pull --list`)
    #[arg(short, long, value_name = "MODEL", default_value = hub::DEFAULT_MODEL)]
    model: String,

    /// The text, or the ids with --ids-to-text
    #[arg(value_name = "TEXT", allow_hyphen_values = true)]
    text: Option<String>,

    /// Take control tokens written in the text as such, and render them
    #[arg(long)]
    special: bool,

    /// Begin with BOS where the vocabulary adds one to a document
    #[arg(long, conflicts_with = "ids_to_text")]
    bos: bool,

    /// The input is ids, separated by spaces or commas; print their text
    #[arg(long)]
    ids_to_text: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let input = match &args.text {
        Some(text) => text.clone(),
        None => read_stdin()?,
    };
    let path = hub::resolve(&args.model)?;
    let file = gguf::Gguf::open(&path)?;
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let ids = if args.ids_to_text {
        parse_ids(&input)?
    } else {
        let options = Encode { add_bos: args.bos, add_eos: false, parse_special: args.special };
        tokenizer.encode(&input, options)?
    };
    if args.json {
        let pieces = ids
            .iter()
            .map(|&id| Ok(String::from_utf8_lossy(tokenizer.token_bytes(id, true)?)))
            .collect::<Result<Vec<_>>>()?;
        let text = tokenizer.decode(&ids, args.special)?;
        return json(&json!({ "ids": ids, "pieces": pieces, "text": text }));
    }
    if args.ids_to_text {
        return print(&tokenizer.decode(&ids, args.special)?);
    }
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    line(&ids.join(" "))
}

fn parse_ids(input: &str) -> Result<Vec<u32>> {
    let brackets = ['[', ']'];
    input
        .split(|c: char| c.is_whitespace() || c == ',' || brackets.contains(&c))
        .filter(|word| !word.is_empty())
        .map(|word| word.parse().map_err(|_| Error::invalid(format!("`{word}` is no token id"))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_several_writings() {
        assert_eq!(parse_ids("1 2\n3").unwrap(), [1, 2, 3]);
        assert_eq!(parse_ids("[1, 2,3]\n").unwrap(), [1, 2, 3]);
        assert_eq!(parse_ids("").unwrap(), [0u32; 0]);
        assert!(parse_ids("1 x").is_err());
        assert!(parse_ids("-1").is_err());
    }
}
