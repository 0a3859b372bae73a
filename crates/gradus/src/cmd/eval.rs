//! `gradus eval`.

use std::path::PathBuf;
use std::sync::Arc;

use ::data::{Content, Example, Renderer, Row};
use model::{
    AdapterId, Engine, GenerateConfig, Generated, Model, Prompt, Scored, ToScore, generate_all,
};
use serde_json::{Value, json};
use text::{ChatTemplate, Message, SamplerConfig};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::options::{
    AdapterArgs, BATCH, CacheType, DataArgs, ModelArgs, RowRange, TemplateArgs, engine_config, room,
};
use crate::output::{count, json, line};
use crate::progress::{Progress, Unit};
use crate::reading::{printable, tell_rows};

/// Measure a model, and an adapter on it, on a data file
///
/// The loss is that of training: the mean over the trained tokens, by their weights, in nats.
/// Token accuracy is the part of them that is the model's first choice. With `--generate` the
/// model also answers each conversation up to its last answer, greedily: an answer matches if it
/// is the expected one word for word, and contains it if the expected one is a part of it, case,
/// white space and a full stop at the end aside.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus eval --data facts.test.jsonl
  gradus eval --data facts.test.jsonl --adapter facts.gguf
  gradus eval --data facts.test.jsonl --adapter facts.gguf --generate -n 64 --json")]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,

    #[command(flatten)]
    adapter: AdapterArgs,

    #[command(flatten)]
    data: DataArgs,

    #[command(flatten)]
    template: TemplateArgs,

    /// Have every conversation answered, and compare with the answer it has
    #[arg(long)]
    generate: bool,

    /// Most tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,

    /// Which of the rows that can be learned from to answer: `A..B`, `A..` or `A` [default: all]
    #[arg(long, value_name = "RANGE", requires = "generate")]
    rows: Option<RowRange>,

    /// What keys and values are kept in
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    cache_type: CacheType,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The base, or an adapter on it.
struct Contestant {
    name: &'static str,
    adapter: Option<AdapterId>,
    sum: Sum,
    answers: Vec<Answer>,
}

/// What scored tokens add up to.
#[derive(Default)]
struct Sum {
    loss: f64,
    weight: f64,
    right: u64,
    tokens: u64,
}

impl Sum {
    fn add(&mut self, example: &Example, scored: &[Scored]) {
        let weights = example.weights.iter().skip(1).filter(|&&w| w != 0.0);
        for (&weight, token) in weights.zip(scored) {
            self.loss -= f64::from(weight) * f64::from(token.logprob);
            self.weight += f64::from(weight);
            self.right += u64::from(token.top);
            self.tokens += 1;
        }
    }

    fn loss(&self) -> f64 {
        self.loss / self.weight
    }

    fn accuracy(&self) -> f64 {
        self.right as f64 / self.tokens as f64
    }

    fn as_json(&self) -> Value {
        json!({
            "loss": self.loss(),
            "perplexity": self.loss().exp(),
            "token_accuracy": self.accuracy(),
            "tokens": self.tokens,
            "weight": self.weight,
        })
    }
}

/// A conversation to be answered.
struct Question {
    file: PathBuf,
    row: u64,
    messages: Vec<Message>,
    tools: Vec<Value>,
    /// What is asked last, and the answer that is expected.
    asked: String,
    expected: String,
}

/// What was answered.
struct Answer {
    text: String,
    finish: &'static str,
    exact: bool,
    contains: bool,
}

impl Answer {
    fn as_json(&self) -> Value {
        json!({
            "text": self.text,
            "finish": self.finish,
            "exact": self.exact,
            "contains": self.contains,
        })
    }

    fn verdict(&self) -> &'static str {
        match (self.exact, self.contains) {
            (true, _) => "exact",
            (false, true) => "contains",
            (false, false) => "differs",
        }
    }
}

/// Rows of the data, scored and to be answered.
#[derive(Default)]
struct Material {
    examples: Vec<Example>,
    /// For each the index of its file, and the number of its row.
    origins: Vec<(usize, u64)>,
    files: Vec<PathBuf>,
    questions: Vec<Question>,
    rows: u64,
}

pub fn run(args: &Args) -> Result<()> {
    if args.max_tokens == 0 {
        return Err(Error::invalid("`--max-tokens` is 0; expected at least 1"));
    }
    let model = args.model.load()?;
    let adapter = args.adapter.read(&model)?;
    let template = args.template.if_any(&model)?;
    let template = template.as_deref().map_err(String::as_str);
    let material = args.read(&model, template)?;
    let longest = material.examples.iter().map(|e| e.tokens.len()).max().unwrap_or(0);
    let context = model.geometry().context;
    if longest > context {
        return Err(Error::invalid(format!(
            "the longest row has {longest} tokens, the context of the model {context}; use a \
             smaller `--window`, with `--fit` or `--skip-bad`"
        )));
    }
    // Room for a batch of short rows, whose last pages are half empty.
    let answers = if args.generate { args.max_tokens.min(context) } else { 0 };
    let positions = longest.max(4 * BATCH) + answers + 64;
    let config = model::EngineConfig { states: 16, ..engine_config(args.cache_type, positions) };
    let mut engine = Engine::new(model.clone(), config)?;
    let contestant =
        |name, adapter| Contestant { name, adapter, sum: Sum::default(), answers: Vec::new() };
    let mut contestants = vec![contestant("base", None)];
    if let Some(adapter) = adapter {
        contestants.push(contestant("adapter", Some(engine.attach(Arc::new(adapter)))));
    }
    let interrupt = Interrupt::listen();
    measure(&mut engine, &material, &mut contestants, &interrupt)?;
    if let Ok(template) = template
        && args.generate
    {
        answer(args, &mut engine, template, &material, &mut contestants, &interrupt)?;
    }
    match args.json {
        true => json(&as_json(args, &material, &contestants)),
        false => print(&material, &contestants),
    }
}

impl Args {
    fn read(
        &self,
        model: &Model,
        template: std::result::Result<&ChatTemplate, &str>,
    ) -> Result<Material> {
        let options = self.data.reading.options(self.data.window);
        let renderer = Renderer::new(model.tokenizer(), template, &options);
        let files = &self.data.data;
        let mut material = Material { files: files.clone(), ..Material::default() };
        let mut texts = false;
        let read = ::data::each_rendered(files, &options, &renderer, &mut |row, rendered| {
            material.origins.extend(rendered.examples.iter().map(|_| (row.file, row.number)));
            material.examples.extend(rendered.examples);
            material.rows += 1;
            // What did not fit is not asked whole.
            let wanted = !rendered.shortened;
            let wanted =
                wanted && self.rows.is_none_or(|rows| rows.contains(material.rows as usize));
            texts |= matches!(row.content, Content::Text(_));
            if self.generate && wanted {
                material.questions.extend(question(row, files));
            }
        })?;
        tell_rows(&read.files, &read.skipped);
        self.data.reading.check(&read.files)?;
        self.rows.map_or(Ok(()), |rows| rows.check(material.rows as usize))?;
        if self.generate && material.questions.is_empty() {
            let why = if texts { "the data are texts, which ask nothing" } else { "no row does" };
            return Err(Error::invalid(format!(
                "`--generate` needs conversations with an answer of the assistant to compare \
                 with; {why}"
            )));
        }
        Ok(material)
    }
}

/// The conversation of a row up to its last trained answer.
fn question(row: Row, files: &[PathBuf]) -> Option<Question> {
    let Content::Chat { mut messages, tools } = row.content else { return None };
    let last = messages.iter().rposition(Message::is_trained)?;
    let expected = messages.get(last)?.text(last).ok()??;
    messages.truncate(last);
    let user = messages.iter().rposition(|m| m.role == "user");
    let asked = user.and_then(|i| messages.get(i)?.text(i).ok()?).unwrap_or_default();
    let file = files.get(row.file)?.clone();
    Some(Question { file, row: row.number, messages, tools, asked, expected })
}

/// Examples scored at a time.
const SCORED: usize = 32;

/// Answers made at a time.
const AT_ONCE: usize = 8;

fn measure(
    engine: &mut Engine,
    material: &Material,
    contestants: &mut [Contestant],
    interrupt: &Interrupt,
) -> Result<()> {
    let rounds = material.examples.len() * contestants.len();
    let mut progress = Progress::new("row", Unit::Items, rounds as u64);
    let mut done = 0;
    for contestant in contestants {
        let origins = material.origins.chunks(SCORED);
        for (examples, origins) in material.examples.chunks(SCORED).zip(origins) {
            if interrupt.asked() {
                return Err(Error::Interrupted);
            }
            let wanted: Vec<Vec<bool>> =
                examples.iter().map(|e| e.weights.iter().map(|&w| w != 0.0).collect()).collect();
            let items: Vec<ToScore<'_>> = examples
                .iter()
                .zip(&wanted)
                .map(|(e, wanted)| ToScore {
                    tokens: &e.tokens,
                    wanted,
                    adapter: contestant.adapter,
                })
                .collect();
            let scored = model::score(engine, &items, BATCH)?;
            for ((example, scored), &(file, row)) in examples.iter().zip(&scored).zip(origins) {
                if let Some(&odd) = scored.iter().find(|token| !token.logprob.is_finite()) {
                    let file = material.files.get(file).map(|file| file.display().to_string());
                    let with = contestant.adapter.map_or("", |_| " with the adapter");
                    let of = format!("a token of row {row} of {}{with}", file.unwrap_or_default());
                    return Err(model::not_finite(odd, &of).into());
                }
                contestant.sum.add(example, scored);
            }
            done += examples.len() as u64;
            let loss = contestant.sum.loss();
            progress.set(done, &format!("{} loss {loss:.4}", contestant.name));
        }
    }
    Ok(())
}

fn answer(
    args: &Args,
    engine: &mut Engine,
    template: &ChatTemplate,
    material: &Material,
    contestants: &mut [Contestant],
    interrupt: &Interrupt,
) -> Result<()> {
    let model = engine.model().clone();
    let context = model.geometry().context;
    let rounds = material.questions.len() * contestants.len();
    let mut progress = Progress::new("answer", Unit::Items, rounds as u64);
    let mut prompts = Vec::new();
    for question in &material.questions {
        let tokens =
            text::encode_chat(model.tokenizer(), template, &question.messages, &question.tools)?;
        let max_tokens = room(args.max_tokens, context, tokens.len())?;
        prompts.extend(contestants.iter().map(|contestant| Prompt {
            tokens: tokens.clone(),
            config: GenerateConfig {
                max_tokens,
                sampler: SamplerConfig::greedy(),
                seed: 0,
                stops: Vec::new(),
                adapter: contestant.adapter,
            },
        }));
    }
    let mut answers: Vec<Option<Generated>> = prompts.iter().map(|_| None).collect();
    let mut done = 0;
    generate_all(engine, &prompts, AT_ONCE, &mut || !interrupt.asked(), &mut |i, answer| {
        done += 1;
        progress.set(done, "");
        if let Some(place) = answers.get_mut(i) {
            *place = Some(answer);
        }
    })?;
    let mut answers = answers.into_iter();
    for question in &material.questions {
        for contestant in contestants.iter_mut() {
            // What is missing was given up when it was interrupted.
            let answer = answers.next().flatten().ok_or(Error::Interrupted)?;
            contestant.answers.push(Answer {
                exact: answer.text.trim() == question.expected.trim(),
                contains: contains(&answer.text, &question.expected),
                finish: answer.finish.as_str(),
                text: answer.text,
            });
        }
    }
    Ok(())
}

/// Whether an answer has the expected one in it; case, white space and a full stop at the end are
/// no matter.
fn contains(answer: &str, expected: &str) -> bool {
    let plain =
        |text: &str| text.split_whitespace().map(str::to_lowercase).collect::<Vec<_>>().join(" ");
    let expected = plain(expected);
    let expected = expected.trim_end_matches(['.', ' ']);
    !expected.is_empty() && plain(answer).contains(expected)
}

fn as_json(args: &Args, material: &Material, contestants: &[Contestant]) -> Value {
    let mut out = json!({
        "rows": material.rows,
        "examples": material.examples.len(),
        "cache_type": args.cache_type.name(),
    });
    for contestant in contestants {
        out[contestant.name] = contestant.sum.as_json();
    }
    if let [base, adapter] = contestants {
        let (a, b) = (&base.sum, &adapter.sum);
        out["difference"] = json!({
            "loss": b.loss() - a.loss(),
            "perplexity": b.loss().exp() - a.loss().exp(),
            "token_accuracy": b.accuracy() - a.accuracy(),
        });
    }
    if args.generate {
        let answers = material.questions.iter().enumerate().map(|(i, q)| {
            let mut answer = json!({
                "file": q.file.display().to_string(), "row": q.row, "asked": q.asked, "expected": q.expected,
            });
            for contestant in contestants {
                if let Some(given) = contestant.answers.get(i) {
                    answer[contestant.name] = given.as_json();
                }
            }
            answer
        });
        out["answers"] = answers.collect();
        for contestant in contestants {
            let (exact, contains) = right(contestant);
            let of = contestant.answers.len();
            out[contestant.name]["answers"] =
                json!({ "count": of, "exact": exact, "contains": contains });
        }
    }
    out
}

/// How many answers are the expected one, and how many contain it.
fn right(contestant: &Contestant) -> (usize, usize) {
    let count = |of: fn(&Answer) -> bool| contestant.answers.iter().filter(|a| of(a)).count();
    (count(|a| a.exact), count(|a| a.contains))
}

fn print(material: &Material, contestants: &[Contestant]) -> Result<()> {
    for (i, question) in material.questions.iter().enumerate() {
        line(&format!("row {}: {}", question.row, printable(&question.asked)))?;
        line(&format!("  expected  {}", printable(&question.expected)))?;
        for contestant in contestants {
            if let Some(answer) = contestant.answers.get(i) {
                let (name, text) = (contestant.name, printable(answer.text.trim()));
                line(&format!("  {name:<8}  {text}  [{}]", answer.verdict()))?;
            }
        }
    }
    if !material.questions.is_empty() {
        line("")?;
    }
    let tokens = contestants.first().map_or(0, |c| c.sum.tokens);
    line(&format!("{} rows, {} tokens scored", count(material.rows), count(tokens)))?;
    let table = |name: &str, of: &dyn Fn(&Contestant) -> f64, digits: usize, unit: &str| {
        let values: Vec<f64> = contestants.iter().map(of).collect();
        let mut cells: Vec<String> =
            values.iter().map(|v| format!("{:>12}", format!("{v:.digits$}{unit}"))).collect();
        if let [base, adapter] = values.as_slice() {
            cells.push(format!("{:>12}", format!("{:+.digits$}", adapter - base)));
        }
        line(&format!("{name:<15}{}", cells.join("")))
    };
    let mut heads: Vec<String> = contestants.iter().map(|c| format!("{:>12}", c.name)).collect();
    if contestants.len() == 2 {
        heads.push(format!("{:>12}", "difference"));
    }
    line(&format!("{:<15}{}", "", heads.join("")))?;
    table("loss", &|c| c.sum.loss(), 4, "")?;
    table("perplexity", &|c| c.sum.loss().exp(), 3, "")?;
    table("token accuracy", &|c| 100.0 * c.sum.accuracy(), 1, " %")?;
    if !material.questions.is_empty() {
        table("exact", &|c| right(c).0 as f64, 0, "")?;
        table("contains", &|c| right(c).1 as f64, 0, "")?;
        line(&format!("of {} answers", material.questions.len()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_contains_what_is_expected() {
        let expected = "The Halden 7 brews at 8.5 bar.";
        assert!(contains("Well: the  Halden 7\nbrews at 8.5 BAR, I think", expected));
        assert!(contains(expected, expected));
        assert!(!contains("The Halden 7 brews at 85 bar.", expected));
        assert!(!contains("anything", " . "));
        assert!(contains("it is so", "So.") && !contains("it is so", "So!"));
    }

    #[test]
    fn weights_weigh_the_loss_and_not_the_accuracy() {
        let example = Example { tokens: vec![1, 2, 3, 4], weights: vec![9.0, 1.0, 0.0, 3.0] };
        let scored = [Scored { logprob: -1.0, top: true }, Scored { logprob: -2.0, top: false }];
        let mut sum = Sum::default();
        sum.add(&example, &scored);
        assert_eq!((sum.loss(), sum.accuracy()), (7.0 / 4.0, 0.5));
    }
}
