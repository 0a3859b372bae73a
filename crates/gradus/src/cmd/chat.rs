//! `gradus chat`.

use std::io::{BufRead, IsTerminal, Read};

use model::{AdapterId, Engine, SeqId, generate};
use text::Message;

use super::run::speed;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{
    AdapterArgs, CONTEXT, CacheType, ModelArgs, SamplerArgs, TemplateArgs, check_context, engine,
    room,
};
use crate::output::{note, note_raw, print};

/// Hold a conversation
///
/// One line is one turn; /reset begins anew, /quit or the end of input ends. What was said stays
/// in the cache, so a turn costs only its own tokens. Ctrl-C ends an answer; at the prompt it
/// ends the conversation.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus chat
  gradus chat --system 'Answer in one sentence.' --temp 0.3
  gradus chat -m qwen2.5-coder-0.5b-instruct --adapter style.gguf")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    /// A system message at the beginning
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,

    #[command(flatten)]
    adapter: AdapterArgs,

    #[command(flatten)]
    template: TemplateArgs,

    /// Positions of the cache [default: the model's context, at most 4096]
    #[arg(short, long, value_name = "N")]
    ctx: Option<usize>,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    #[command(flatten)]
    sampler: SamplerArgs,
}

/// The longest turn, in bytes.
const LONGEST_LINE: u64 = 1 << 20;

pub fn run(args: &Args) -> Result<()> {
    let model = args.model.load()?;
    let template = args.template.of(&model)?;
    let ctx = match args.ctx {
        Some(ctx) => check_context(ctx, &model)?,
        None => model.geometry().context.min(CONTEXT),
    };
    let adapter = args.adapter.read(&model)?;
    let (mut engine, adapter) = engine(&model, args.cache_type, ctx, adapter)?;
    let config = args.sampler.config(adapter);
    let begin = || -> Vec<Message> {
        args.system.iter().map(|system| Message::new("system", system)).collect()
    };
    let mut seq = engine.cache().open();
    let mut messages = begin();
    let interrupt = Interrupt::listen();
    let terminal = std::io::stdin().is_terminal();
    if terminal {
        note("/reset begins anew, /quit ends");
    }
    loop {
        interrupt.forget();
        interrupt.set_idle(true);
        let said = read_line(terminal)?;
        interrupt.set_idle(false);
        let Some(said) = said else { return Ok(()) };
        match said.trim() {
            "" => continue,
            "/quit" | "/exit" => return Ok(()),
            "/reset" => {
                messages = begin();
                note("the conversation begins anew");
                continue;
            }
            command if command.starts_with('/') => {
                note(&format!("there is no command {command}; there are /reset and /quit"));
                continue;
            }
            said => messages.push(Message::new("user", said)),
        }
        let ids = text::encode_chat(model.tokenizer(), &template, &messages, &[])?;
        if ids.len() > ctx {
            messages.pop();
            note(&format!(
                "this turn makes {} tokens, the cache holds {ctx}; /reset begins anew",
                ids.len()
            ));
            continue;
        }
        let new;
        (seq, new) = keep(&mut engine, seq, &ids, adapter);
        let fed = ids.get(new..).unwrap_or(&ids);
        let mut config = config.clone();
        config.max_tokens = room(config.max_tokens, ctx, ids.len())?;
        let mut closed = Ok(());
        let answer = generate(&mut engine, seq, fed, &config, &mut |text| {
            closed = print(text);
            closed.is_ok() && !interrupt.asked()
        });
        closed?;
        let answer = answer?;
        print("\n")?;
        if terminal {
            note(&speed(&answer, fed.len()));
        }
        messages.push(Message::new("assistant", &answer.text));
    }
}

/// A sequence that holds as much of `ids` as can be had, and how many of them need not be fed:
/// never all, since the last one's logits are wanted. That is the old one cut back to what it has
/// in common with them, or what the cache keeps: a recurrent model cannot go back anywhere.
fn keep(
    engine: &mut Engine,
    seq: SeqId,
    ids: &[u32],
    adapter: Option<AdapterId>,
) -> (SeqId, usize) {
    let held = engine.cache().tokens(seq);
    let common = held.iter().zip(ids).take_while(|(a, b)| a == b).count();
    let common = engine.cache().truncate(seq, common.min(ids.len().saturating_sub(1)));
    let (fresh, reused) = engine.open(ids, adapter);
    let (seq, kept, other) =
        if reused >= common { (fresh, reused, seq) } else { (seq, common, fresh) };
    engine.cache().close(other);
    (seq, kept)
}

/// The next line, or `None` at the end of input.
fn read_line(terminal: bool) -> Result<Option<String>> {
    if terminal {
        note_raw("> ");
    }
    let mut line = Vec::new();
    let mut input = std::io::stdin().lock().take(LONGEST_LINE);
    let read = input
        .read_until(b'\n', &mut line)
        .map_err(|e| Error::invalid(format!("cannot read standard input: {e}")))?;
    if read == 0 {
        if terminal {
            note("");
        }
        return Ok(None);
    }
    if read as u64 == LONGEST_LINE {
        return Err(Error::invalid(format!("a line is longer than {LONGEST_LINE} bytes")));
    }
    String::from_utf8(line)
        .map(Some)
        .map_err(|_| Error::invalid("standard input is not UTF-8 text"))
}
