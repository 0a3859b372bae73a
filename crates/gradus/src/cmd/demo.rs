//! `gradus demo`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::{Adapter, Engine, GenerateConfig, Generated, Model, generate};
use serde_json::Value;
use text::{ChatTemplate, Message, SamplerConfig};

use super::pull::fetch;
use super::train::{RecomputeName, Session, Settings, summary};
use crate::data::write_file;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{CacheType, DeviceArgs, TemplateArgs, engine};
use crate::output::{duration, line, print};

/// Teach a small model something new, from nothing
///
/// Fetches a model if it is not here, asks it about a machine that does not exist, trains a LoRA
/// adapter on 48 questions and answers about that machine, and asks again. Takes a few minutes
/// on two cores. Shows what everything costs and how to go on; leaves no run folder.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus demo
  gradus demo --moe
  gradus demo --model qwen2.5-coder-0.5b-instruct --out demo-qwen")]
pub struct Args {
    /// Instead, serve a random mixture of experts with delta nets, train it meanwhile, have it
    /// refuse what cannot be trained, and promote what it learned; fetches nothing
    #[arg(long, conflicts_with_all = ["model", "template", "recompute"])]
    moe: bool,

    /// A GGUF file, or a name of the catalogue, which is fetched if it is not here
    #[arg(short, long, value_name = "MODEL", default_value = hub::DEFAULT_MODEL)]
    model: String,

    #[command(flatten)]
    device: DeviceArgs,

    /// Folder for the data and the adapter [default: `demo` under GRADUS_HOME]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    #[command(flatten)]
    template: TemplateArgs,

    /// What to compute again in the backward pass instead of keeping it; changes no bit
    #[arg(long, value_enum, value_name = "WHAT", default_value = "auto")]
    recompute: RecomputeName,
}

const TRAIN: &str = include_str!("../../../../data/halden.train.jsonl");
const TEST: &str = include_str!("../../../../data/halden.test.jsonl");

/// Shown before and after, out of the questions of the test.
const SHOWN: usize = 4;

/// Rows of a window.
const WINDOW: usize = 128;

/// How the demo trains, chosen by trying: many small steps answer more of the questions that were
/// not trained on than few large ones, at the same cost.
fn settings(recompute: RecomputeName) -> Result<Settings> {
    Ok(Settings { lr: 2e-3, epochs: 6, recompute, ..Settings::standard()? })
}

/// A question and its answer.
struct Fact {
    question: String,
    answer: String,
}

pub fn run(args: &Args) -> Result<()> {
    if args.moe {
        let out = folder(args)?;
        return super::demo_moe::run(&out, TRAIN, args.device.open()?);
    }
    let start = Instant::now();
    let facts = facts(TEST)?;
    let path = match hub::find(&args.model) {
        Some(_) => fetch(&args.model)?,
        None => hub::resolve(&args.model)?,
    };
    let out = folder(args)?;
    let data = out.join("halden.train.jsonl");
    write_file(&data, TRAIN.as_bytes())?;

    let fetched = start.elapsed();
    let at = Instant::now();
    let model = Arc::new(Model::load(&path, args.device.open()?)?);
    let template = args.template.of(&model)?;
    line(&format!("{}, ready after {}\n", path.display(), duration(at.elapsed())))?;

    line("== Before: the model cannot know the Halden 7, which does not exist")?;
    let (_, before) = examine(&model, &template, None, facts.get(..SHOWN).unwrap_or(&facts))?;
    line("\n== Training a LoRA adapter on 48 questions and answers")?;
    let files = std::slice::from_ref(&data);
    let read = ::data::Options { window: Some(WINDOW), ..Default::default() };
    let examples = ::data::load(files, &read, model.tokenizer(), Ok(&template))?.examples;
    let interrupt = Interrupt::listen();
    let session = Session {
        model: &model,
        config: settings(args.recompute)?.config(&model, WINDOW)?,
        from: None,
        may_recompute: args.recompute == RecomputeName::Auto,
        examples: examples.into(),
        held_out: Arc::new([]),
        cut: train::Cut::BeforeAnswers,
        budget: None,
        keeping: None,
        checkpoint_every: None,
        last_good: None,
    };
    let ran = session.ready()?.run(&interrupt, &mut ())?;
    if ran.interrupted {
        return Err(Error::Interrupted);
    }
    summary(&ran)?;
    let file = out.join("halden.gguf");
    ran.outcome.adapter.write(&file, &model)?;

    line("\n== After: questions it was not trained on, with the adapter as it is in the file")?;
    let adapter = Adapter::read(&file, &model)?;
    let (right, after) = examine(&model, &template, Some(adapter), &facts)?;
    line(&format!("{right} of {} answered word for word", facts.len()))?;

    line("\n== What it took")?;
    let (moved, total) = ran.outcome.moved;
    line(&format!("kernels   {}", model.device().family()))?;
    line(&format!(
        "decoding  {:.0} tokens/s, {:.0} with the adapter",
        before.per_second(),
        after.per_second()
    ))?;
    line(&format!("time      {} in all", duration(start.elapsed() - fetched)))?;
    line(&format!("adapter   {}: {moved} of {total} targets moved", file.display()))?;
    line("\nGo on with:")?;
    let name = quoted(&args.model);
    let file = quoted(&file.display().to_string());
    line(&format!("  gradus run -m {name} --adapter {file} -p 'Who builds the Halden 7?'"))?;
    line(&format!("  gradus chat -m {name} --adapter {file}"))?;
    let data = quoted(&data.display().to_string());
    let same = "--window 128 --epochs 6 --lr 2e-3";
    line(&format!("  gradus train -m {name} --data {data} -o my.gguf {same}"))?;
    if right * 2 < facts.len() {
        return Err(Error::fault(format!(
            "only {right} of {} answers are right; the adapter did not learn",
            facts.len()
        )));
    }
    Ok(())
}

/// The folder for the files, which is made.
fn folder(args: &Args) -> Result<PathBuf> {
    let out = match &args.out {
        Some(out) => out.clone(),
        None => hub::home()?.join("demo"),
    };
    std::fs::create_dir_all(&out).map_err(|e| Error::writing(&out, e))?;
    Ok(out)
}

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:~".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_string();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn facts(lines: &str) -> Result<Vec<Fact>> {
    let fact = |line: &str| -> Option<Fact> {
        let value: Value = serde_json::from_str(line).ok()?;
        let said =
            |i: usize| value.get("messages")?.get(i)?.get("content")?.as_str().map(str::to_string);
        Some(Fact { question: said(0)?, answer: said(1)? })
    };
    let facts: Option<Vec<Fact>> = lines.lines().map(fact).collect();
    facts.ok_or_else(|| Error::fault("the bundled data are damaged"))
}

/// How fast answers came.
#[derive(Default)]
struct Speed {
    tokens: usize,
    time: Duration,
}

impl Speed {
    fn per_second(&self) -> f64 {
        self.tokens as f64 / self.time.as_secs_f64().max(1e-9)
    }
}

/// Asks questions, each in a conversation of its own; shows the first few, and counts the
/// answers that are right word for word.
fn examine(
    model: &Arc<Model>,
    template: &ChatTemplate,
    adapter: Option<Adapter>,
    facts: &[Fact],
) -> Result<(usize, Speed)> {
    let positions = model.geometry().context.min(512);
    let (mut engine, adapter) = engine(model, CacheType::F16, positions, adapter)?;
    let config = GenerateConfig {
        max_tokens: 48,
        sampler: SamplerConfig::greedy(),
        seed: 0,
        stops: Vec::new(),
        adapter,
    };
    let (mut right, mut speed) = (0, Speed::default());
    for (i, fact) in facts.iter().enumerate() {
        let show = i < SHOWN;
        if show {
            line(&format!("  Q: {}", fact.question))?;
            print("  A: ")?;
        }
        let answer = ask(&mut engine, template, &config, &fact.question, show)?;
        let good = answer.text.trim() == fact.answer;
        right += usize::from(good);
        speed.tokens += answer.tokens.len().saturating_sub(1);
        speed.time += answer.rest;
        if show {
            line(if adapter.is_none() {
                ""
            } else if good {
                "   [right]"
            } else {
                "   [wrong]"
            })?;
        }
    }
    Ok((right, speed))
}

fn ask(
    engine: &mut Engine,
    template: &ChatTemplate,
    config: &GenerateConfig,
    question: &str,
    show: bool,
) -> Result<Generated> {
    let model = engine.model().clone();
    let messages = [Message::new("user", question)];
    let ids = text::encode_chat(model.tokenizer(), template, &messages, &[])?;
    let seq = engine.cache().open();
    let mut closed = Ok(());
    let answer = generate(engine, seq, &ids, config, &mut |text| {
        if show {
            // One line, whatever the model says.
            closed = print(&text.replace(['\n', '\r'], " "));
        }
        closed.is_ok()
    });
    engine.cache().close(seq);
    closed?;
    Ok(answer?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundled_data_are_whole() {
        let (train, test) = (facts(TRAIN).unwrap(), facts(TEST).unwrap());
        assert_eq!((train.len(), test.len()), (48, 16));
        for fact in &test {
            assert!(train.iter().any(|f| f.answer == fact.answer), "{}", fact.answer);
            assert!(train.iter().all(|f| f.question != fact.question), "{}", fact.question);
        }
    }

    #[test]
    fn words_for_a_shell() {
        assert_eq!(quoted("a/b-1.gguf"), "a/b-1.gguf");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
