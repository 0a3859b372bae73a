//! `gradus run`.

use std::io::IsTerminal;
use std::time::Duration;

use model::{Generated, Model, generate};
use serde_json::json;
use text::Message;

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{
    AdapterArgs, CacheType, ModelArgs, SamplerArgs, TemplateArgs, check_context, engine,
    read_stdin, room,
};
use crate::output::{json, note, print};

/// Answer one prompt, as it comes
///
/// The prompt is put into the model's chat template, or, with --raw, continued as it is. Without
/// -p it is read from standard input.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus run -p 'Who wrote Emma?'
  gradus run -p 'Name three rivers' --temp 0 -n 64
  gradus run --adapter facts.gguf -p 'A question'
  gradus run -m gemma-3-270m --raw -p 'The capital of France is' -n 8
  gradus run --json < prompt.txt")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// The prompt [default: standard input]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,

    /// A system message before it
    #[arg(long, value_name = "TEXT", conflicts_with = "raw", allow_hyphen_values = true)]
    system: Option<String>,

    #[command(flatten)]
    adapter: AdapterArgs,

    #[command(flatten)]
    template: TemplateArgs,

    /// Continue the prompt as it is, without a chat template
    #[arg(long, conflicts_with = "template")]
    raw: bool,

    /// Positions of the cache [default: as many as the prompt and -n need]
    #[arg(short, long, value_name = "N")]
    ctx: Option<usize>,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Print the answer as JSON, when it is whole
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    sampler: SamplerArgs,
}

pub fn run(args: &Args) -> Result<()> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => {
            if std::io::stdin().is_terminal() {
                note("reading the prompt from standard input; Ctrl-D ends it");
            }
            read_stdin()?
        }
    };
    let model = args.model.load()?;
    let ids = prompt_ids(args, &model, prompt)?;
    let positions = match args.ctx {
        Some(ctx) => check_context(ctx, &model)?,
        None => model.geometry().context.min(ids.len().saturating_add(args.sampler.max_tokens)),
    };
    let adapter = args.adapter.read(&model)?;
    let (mut engine, adapter) = engine(&model, args.cache_type, positions, adapter)?;
    let seq = engine.cache().open();
    let interrupt = Interrupt::listen();
    let mut config = args.sampler.config(adapter);
    config.max_tokens = room(config.max_tokens, positions, ids.len())?;
    let mut closed = Ok(());
    let answer = generate(&mut engine, seq, &ids, &config, &mut |text| {
        if !args.json {
            closed = print(text);
        }
        closed.is_ok() && !interrupt.asked()
    })?;
    closed?;
    if args.json {
        json(&as_json(&answer, ids.len()))?;
    } else {
        print("\n")?;
        note(&speed(&answer, ids.len()));
    }
    if interrupt.asked() { Err(Error::Interrupted) } else { Ok(()) }
}

fn prompt_ids(args: &Args, model: &Model, prompt: String) -> Result<Vec<u32>> {
    let tokenizer = model.tokenizer();
    if args.raw {
        return Ok(text::encode_prompt(tokenizer, &prompt)?);
    }
    let template = args.template.of(model)?;
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(Message::new("system", system));
    }
    messages.push(Message::new("user", prompt));
    Ok(text::encode_chat(tokenizer, &template, &messages, &[])?)
}

fn as_json(answer: &Generated, prompt_tokens: usize) -> serde_json::Value {
    json!({
        "text": answer.text,
        "finish": answer.finish.as_str(),
        "prompt_tokens": prompt_tokens,
        "tokens": answer.tokens,
        "logprobs": answer.logprobs,
        "first_token_ms": answer.first_token.as_secs_f64() * 1000.0,
        "decode_tokens_per_s": rate(answer),
    })
}

/// Tokens a second after the first.
fn rate(answer: &Generated) -> Option<f64> {
    let n = answer.tokens.len().checked_sub(1).filter(|&n| n > 0)?;
    (answer.rest > Duration::ZERO).then(|| n as f64 / answer.rest.as_secs_f64())
}

/// A line about how fast an answer came.
pub fn speed(answer: &Generated, prompt_tokens: usize) -> String {
    let first = answer.first_token.as_secs_f64() * 1000.0;
    let tokens = answer.tokens.len();
    let rate = rate(answer).map_or(String::new(), |r| format!(", {r:.0} tokens/s"));
    format!(
        "[{prompt_tokens} tokens of prompt, first token after {first:.0} ms; {tokens} tokens{rate}; \
         {}]",
        answer.finish.as_str()
    )
}
