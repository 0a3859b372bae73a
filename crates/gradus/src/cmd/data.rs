//! `gradus data`.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::PathBuf;

use ::data::{BadRow, Dataset, Example};
use serde_json::{Value, json};
use text::{ChatTemplate, SpecialTokens, Tokenizer};

use crate::error::{Error, Result};
use crate::options::{DataArgs, ReadingArgs, RowRange, TemplateArgs};
use crate::output::{count, json, line};
use crate::reading::{left_out, printable};

/// Look at training data as the trainer sees them
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    Show(Show),
}

/// Show rows with their trained tokens marked, and how they fill windows
///
/// Every row is rendered and tokenized as it is for training. Trained tokens are in colour on a
/// terminal, else in brackets. Rows that cannot be learned from are counted with their reasons;
/// `gradus train` refuses them, or leaves them out with `--skip-bad`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  gradus data show facts.jsonl
  gradus data show facts.parquet -m gemma-3-270m --template plain --rows 1..3
  gradus data show facts.csv.gz --window 256 --fit middle --json")]
struct Show {
    /// The data: JSON lines, JSON, CSV or Parquet, plain or as .gz or .zst
    #[arg(value_name = "FILE", required = true, num_args = 1..)]
    files: Vec<PathBuf>,

    /// A GGUF file, or a name of the catalogue, whose tokenizer and template are used
    #[arg(short, long, value_name = "MODEL", default_value = hub::DEFAULT_MODEL)]
    model: String,

    #[command(flatten)]
    template: TemplateArgs,

    #[command(flatten)]
    reading: ReadingArgs,

    /// Rows of a window
    #[arg(long, value_name = "ROWS", default_value_t = 512)]
    window: usize,

    /// Which of the rows that can be learned from to show: `A..B`, `A..` or `A` [default: 1..10]
    #[arg(long, value_name = "RANGE")]
    rows: Option<RowRange>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Show(show) => show.run(),
    }
}

/// How examples fill windows.
struct Packing {
    windows: Vec<Vec<usize>>,
    /// Rows of a window, and sequences it may hold.
    rows: usize,
    most: usize,
}

impl Packing {
    /// The part of the windows' rows that is used.
    fn full(&self, examples: &[Example]) -> f64 {
        let used: usize = examples.iter().map(Example::rows).sum();
        used as f64 / (self.windows.len() * self.rows).max(1) as f64
    }

    /// How many windows hold how many sequences.
    fn sequences(&self) -> BTreeMap<usize, usize> {
        let mut counts = BTreeMap::new();
        self.windows.iter().for_each(|w| *counts.entry(w.len()).or_default() += 1);
        counts
    }
}

impl Show {
    fn run(&self) -> Result<()> {
        if self.window == 0 {
            return Err(Error::invalid("`--window` is 0; expected at least 1"));
        }
        let path = hub::resolve(&self.model)?;
        let file = gguf::Gguf::open(&path)?;
        let tokenizer = Tokenizer::from_metadata(file.metadata())?;
        let template = match &self.template.template {
            Some(name) => Ok(ChatTemplate::builtin(name, SpecialTokens::of(&tokenizer))?),
            None => {
                let template = ChatTemplate::from_metadata(file.metadata(), &tokenizer);
                template.map_err(|e| e.to_string())
            }
        };
        let (_, arch) = model::arch::read(&file)?;
        let reading = ReadingArgs { skip_bad: true, ..self.reading.clone() };
        let args = DataArgs { data: self.files.clone(), window: self.window, reading };
        let dataset = args.rendered(&tokenizer, template.as_ref().map_err(String::as_str))?;
        self.reading.check(&dataset.files)?;
        let most = train::most_sequences(arch.geometry(), self.window);
        let order: Vec<usize> = (0..dataset.examples.len()).collect();
        let room = ::data::Room::shared(self.window, most);
        let windows = ::data::pack(&dataset.examples, &order, room)?;
        let packing = Packing { windows, rows: self.window, most };
        let mut rows = dataset.origins.clone();
        rows.dedup();
        self.rows.map_or(Ok(()), |range| range.check(rows.len()))?;
        match self.json {
            true => json(&self.as_json(&dataset, &packing, &tokenizer)?),
            false => self.print(&dataset, &packing, &tokenizer),
        }
    }

    /// The examples to show, each with its index. Pieces of one text are one row.
    fn chosen<'d>(&self, dataset: &'d Dataset) -> impl Iterator<Item = (usize, &'d Example)> {
        let range = self.rows.unwrap_or(RowRange::first(10));
        let (mut place, mut before) = (0, None);
        let of_row = move |origin: &(usize, u64)| {
            if before != Some(*origin) {
                before = Some(*origin);
                place += 1;
            }
            range.contains(place)
        };
        let shown = dataset.origins.iter().map(of_row);
        dataset.examples.iter().enumerate().zip(shown).filter(|(_, shown)| *shown).map(|(e, _)| e)
    }

    fn print(&self, dataset: &Dataset, packing: &Packing, tokenizer: &Tokenizer) -> Result<()> {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let in_window = windows_of(packing, dataset.examples.len());
        for (i, example) in self.chosen(dataset) {
            let (file, row) = dataset.origins.get(i).copied().unwrap_or_default();
            let file = match dataset.files.len() {
                1 => String::new(),
                _ => self
                    .files
                    .get(file)
                    .map_or(String::new(), |f| format!("{} ", printable(&f.display().to_string()))),
            };
            let weight = match example.weight() == example.labelled() as f64 {
                true => String::new(),
                false => format!(", weight {}", example.weight()),
            };
            line(&format!(
                "{file}row {row}: {} tokens, {} trained{weight}, window {}",
                example.tokens.len(),
                example.labelled(),
                in_window.get(i).map_or(0, |w| w + 1)
            ))?;
            line(&format!("  {}", marked(example, tokenizer, colour)?))?;
        }
        self.print_summary(dataset, packing)
    }

    fn print_summary(&self, dataset: &Dataset, packing: &Packing) -> Result<()> {
        let examples = &dataset.examples;
        let lengths = lengths(examples);
        let tokens: usize = lengths.iter().sum();
        let trained: usize = examples.iter().map(Example::labelled).sum();
        line("")?;
        for about in &dataset.files {
            let layout = about.layout.map_or("none", ::data::Layout::name);
            line(&format!("layout    {layout}: {}", printable(&about.file.display().to_string())))?;
            if let Some(said) = left_out(about) {
                line(&format!("left out  {said}"))?;
            }
        }
        line(&format!("rows      {}", count(dataset.files.iter().map(|f| f.rows).sum())))?;
        line(&format!(
            "examples  {}, {} of them shortened",
            count(examples.len() as u64),
            count(dataset.shortened)
        ))?;
        line(&format!("tokens    {}, {} trained", count(tokens as u64), count(trained as u64)))?;
        let at = |part: usize| lengths.get((lengths.len().max(1) - 1) * part / 4).unwrap_or(&0);
        line(&format!("lengths   {} to {} tokens, median {}", at(0), at(4), at(2)))?;
        let held: Vec<String> =
            packing.sequences().iter().map(|(n, windows)| format!("{windows} of {n}")).collect();
        line(&format!(
            "windows   {} of {} rows, {:.1} % full; sequences: {} (at most {})",
            count(packing.windows.len() as u64),
            packing.rows,
            100.0 * packing.full(examples),
            held.join(", "),
            packing.most,
        ))?;
        let bad = &dataset.skipped;
        match bad.total() {
            0 => line("bad rows  none"),
            n => {
                line(&format!("bad rows  {}: {}", count(n), bad.reasons()))?;
                bad.listed
                    .iter()
                    .try_for_each(|row| line(&format!("  {}", printable(&row.to_string()))))
            }
        }
    }

    fn as_json(
        &self,
        dataset: &Dataset,
        packing: &Packing,
        tokenizer: &Tokenizer,
    ) -> Result<Value> {
        let in_window = windows_of(packing, dataset.examples.len());
        let mut rows = Vec::new();
        for (i, example) in self.chosen(dataset) {
            let (file, row) = dataset.origins.get(i).copied().unwrap_or_default();
            rows.push(json!({
                "file": self.files.get(file),
                "row": row,
                "length": example.tokens.len(),
                "trained": example.labelled(),
                "weight": example.weight(),
                "window": in_window.get(i),
                "marked": marked(example, tokenizer, false)?,
                "tokens": example.tokens,
                "weights": example.weights,
            }));
        }
        let about = |f: &::data::FileReport| {
            json!({
                "file": f.file,
                "layout": f.layout.map(::data::Layout::name),
                "rows": f.rows,
                "ignored_columns": f.ignored,
                "not_rendered": f.left_out,
            })
        };
        let bad = |row: &BadRow| {
            json!({
                "file": row.file,
                "row": row.row,
                "reason": row.bad.reason.as_str(),
                "field": row.bad.field,
                "what": row.bad.what,
            })
        };
        let reasons: BTreeMap<&str, u64> =
            dataset.skipped.counts.iter().map(|(r, n)| (r.as_str(), *n)).collect();
        let lengths = lengths(&dataset.examples);
        Ok(json!({
            "files": dataset.files.iter().map(about).collect::<Vec<_>>(),
            "examples": dataset.examples.len(),
            "shortened": dataset.shortened,
            "tokens": lengths.iter().sum::<usize>(),
            "trained_tokens": dataset.examples.iter().map(Example::labelled).sum::<usize>(),
            "longest": lengths.last(),
            "rows": rows,
            "packing": {
                "windows": packing.windows.len(),
                "window_rows": packing.rows,
                "most_sequences": packing.most,
                "full": packing.full(&dataset.examples),
            },
            "bad": {
                "count": dataset.skipped.total(),
                "reasons": reasons,
                "rows": dataset.skipped.listed.iter().map(bad).collect::<Vec<_>>(),
            },
        }))
    }
}

/// The numbers of tokens, ascending.
fn lengths(examples: &[Example]) -> Vec<usize> {
    let mut lengths: Vec<usize> = examples.iter().map(|e| e.tokens.len()).collect();
    lengths.sort_unstable();
    lengths
}

/// For each example the window it is in.
fn windows_of(packing: &Packing, examples: usize) -> Vec<usize> {
    let mut of = vec![0; examples];
    for (w, window) in packing.windows.iter().enumerate() {
        for &i in window {
            if let Some(of) = of.get_mut(i) {
                *of = w;
            }
        }
    }
    of
}

/// The text of an example on one line, what is trained in colour or in brackets; what weighs
/// something else than 1, with its weight.
fn marked(example: &Example, tokenizer: &Tokenizer, colour: bool) -> Result<String> {
    let mut out = String::new();
    let mut start = 0;
    // The first token is never predicted.
    let weight = |i: usize| example.weights.get(i).copied().filter(|_| i > 0).unwrap_or(0.0);
    while start < example.tokens.len() {
        let same = |i: &usize| weight(*i) == weight(start);
        let end = (start..example.tokens.len()).take_while(same).last().unwrap_or(start) + 1;
        let mut bytes = Vec::new();
        for &id in example.tokens.get(start..end).unwrap_or_default() {
            bytes.extend_from_slice(tokenizer.token_bytes(id, true)?);
        }
        let text = printable(&String::from_utf8_lossy(&bytes));
        let times = match weight(start) {
            w if w == 0.0 || w == 1.0 => String::new(),
            w => format!("{w}x "),
        };
        out += &match (weight(start) == 0.0, colour) {
            (true, _) => text,
            (false, true) => format!("\u{1b}[32m{times}{text}\u{1b}[0m"),
            (false, false) => format!("[{times}{text}]"),
        };
        start = end;
    }
    Ok(out)
}
