//! `gradus perplexity`.

use std::path::PathBuf;

use serde_json::json;

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{AdapterArgs, CacheType, ModelArgs, check_context, engine, read_text};
use crate::output::{json, line};
use crate::progress::{Progress, Unit};

/// How well a model predicts a text
///
/// Measured as llama.cpp's llama-perplexity does: windows of `--ctx` tokens without overlap,
/// each beginning with BOS where the vocabulary adds one; the second half of each is scored.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus perplexity -f book.txt
  gradus perplexity -f book.txt --adapter facts.gguf --ctx 1024 --json")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The text, UTF-8
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,

    #[command(flatten)]
    adapter: AdapterArgs,

    /// Tokens per window
    #[arg(short, long, value_name = "N", default_value_t = 512)]
    ctx: usize,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    let document = read_text(&args.file)?;
    let model = args.model.load()?;
    let ctx = check_context(args.ctx, &model)?;
    let tokenizer = model.tokenizer();
    let tokens = tokenizer.encode(&document, text::Encode::DOCUMENT)?;
    let adapter = args.adapter.read(&model)?;
    let (mut engine, adapter) = engine(&model, args.cache_type, ctx, adapter)?;
    let interrupt = Interrupt::listen();
    let mut progress = Progress::new("window", Unit::Items, (tokens.len() / ctx) as u64);
    let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    let result =
        model::perplexity(&mut engine, &tokens, ctx, bos, adapter, &mut |done, _, so_far| {
            progress.set(done as u64, &format!("perplexity {so_far:.4}"));
            !interrupt.asked()
        });
    drop(progress);
    let result = result?;
    if interrupt.asked() {
        return Err(Error::Interrupted);
    }
    if args.json {
        return json(&json!({
            "perplexity": result.perplexity,
            "nll": result.nll,
            "nll_error": result.error,
            "context": ctx,
            "tokens": tokens.len(),
            "windows": result.windows,
            "scored": result.scored,
            "cache_type": args.cache_type.name(),
        }));
    }
    line(&format!(
        "perplexity {:.4} +- {:.4}: {} windows of {ctx} tokens, {} tokens scored",
        result.perplexity,
        result.perplexity * result.error,
        result.windows,
        result.scored
    ))
}
