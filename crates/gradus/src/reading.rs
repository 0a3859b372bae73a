//! Options of the commands that read training data.

use std::path::PathBuf;
use std::str::FromStr;

use ::data::{BadRows, Dataset, FileReport, Fit, Layout, LossOn, Options};
use clap::{Args, ValueEnum};
use model::Model;
use text::{ChatTemplate, Tokenizer};

use crate::error::{Error, Result};
use crate::options::TemplateArgs;
use crate::output::{count, note};

/// Which data, and how they are read.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Data")]
pub struct DataArgs {
    /// Conversations or texts: JSON lines, JSON, CSV or Parquet, plain or as .gz or .zst; several
    /// files are read one after the other
    #[arg(short, long, value_name = "FILE", required = true, num_args = 1..)]
    pub data: Vec<PathBuf>,

    /// Rows of a window; conversations are packed into windows, and must fit one
    #[arg(long, value_name = "ROWS", default_value_t = 512)]
    pub window: usize,

    #[command(flatten)]
    pub reading: ReadingArgs,
}

/// How data are read.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Data")]
pub struct ReadingArgs {
    /// The layout of the rows [default: by their fields]
    #[arg(long, value_enum, value_name = "NAME")]
    pub layout: Option<LayoutName>,

    /// Which tokens carry loss; all of a text always do
    #[arg(long, value_enum, value_name = "WHAT", default_value = "assistant")]
    pub loss_on: LossOnName,

    /// Leave out rows that cannot be learned from, and count them
    #[arg(long)]
    pub skip_bad: bool,

    /// Shorten conversations that do not fit a window, or leave them out where that cannot be
    #[arg(long, value_enum, value_name = "HOW")]
    pub fit: Option<FitName>,

    /// Take control tokens written in texts as such, as those of templates always are
    #[arg(long)]
    pub parse_special: bool,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutName {
    /// `messages` of `role` and `content`, and `tools`
    Messages,
    /// `conversations` of `from` and `value`
    #[value(name = "sharegpt")]
    ShareGpt,
    /// `instruction`, `input` and `output`
    Alpaca,
    /// `prompt` and `completion`
    Prompt,
    /// `text`
    Text,
}

#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LossOnName {
    /// What the assistant says, and the end of its turns
    #[default]
    Assistant,
    /// Everything
    All,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum FitName {
    /// Drop the oldest exchanges, whole; the system messages stay
    Middle,
    /// Drop the oldest tokens
    Left,
}

impl ReadingArgs {
    /// As the `data` crate has it.
    pub fn options(&self, window: usize) -> Options {
        Options {
            layout: self.layout.map(|layout| match layout {
                LayoutName::Messages => Layout::Messages,
                LayoutName::ShareGpt => Layout::ShareGpt,
                LayoutName::Alpaca => Layout::Alpaca,
                LayoutName::Prompt => Layout::Prompt,
                LayoutName::Text => Layout::Text,
            }),
            loss_on: match self.loss_on {
                LossOnName::Assistant => LossOn::Assistant,
                LossOnName::All => LossOn::All,
            },
            skip_bad: self.skip_bad,
            fit: match self.fit {
                None => Fit::Refuse,
                Some(FitName::Middle) => Fit::Middle,
                Some(FitName::Left) => Fit::Left,
            },
            window: Some(window),
            parse_special: self.parse_special,
        }
    }
}

impl ReadingArgs {
    /// Refuses what is typed and has no effect on files of such layouts.
    ///
    /// # Errors
    /// Names the option.
    pub fn check(&self, files: &[FileReport]) -> Result<()> {
        let are_texts = |texts: bool| {
            let mut layouts = files.iter().filter_map(|about| about.layout);
            layouts.all(|layout| (layout == Layout::Text) == texts)
        };
        if self.fit.is_some() && are_texts(true) {
            let why = "`--fit` has no effect on texts, which are cut into windows; leave it out";
            return Err(Error::invalid(why));
        }
        if self.parse_special && are_texts(false) {
            return Err(Error::invalid(
                "`--parse-special` is about texts, but conversations are rendered by a template, \
                 whose control tokens are always parsed; leave it out",
            ));
        }
        Ok(())
    }
}

impl DataArgs {
    /// The data, rendered for a model. What became of the files is said on standard error.
    ///
    /// # Errors
    /// Names the file, the row and the reason.
    pub fn load(&self, model: &Model, template: &TemplateArgs) -> Result<Dataset> {
        let template = template.if_any(model)?;
        let template = template.as_deref().map_err(String::as_str);
        self.rendered(model.tokenizer(), template)
    }

    /// The same without the model.
    ///
    /// # Errors
    /// As [`DataArgs::load`].
    pub fn rendered(
        &self,
        tokenizer: &Tokenizer,
        template: std::result::Result<&ChatTemplate, &str>,
    ) -> Result<Dataset> {
        let options = self.reading.options(self.window);
        let dataset = ::data::load(&self.data, &options, tokenizer, template)?;
        tell_rows(&dataset.files, &dataset.skipped);
        if dataset.shortened > 0 {
            let shortened = count(dataset.shortened);
            note(&format!("{shortened} rows were shortened to fit a window"));
        }
        Ok(dataset)
    }
}

/// Rows left out that are shown.
const SHOWN: usize = 5;

/// Says what became of files: layouts, columns that mean nothing, rows left out.
pub fn tell_rows(files: &[FileReport], skipped: &BadRows) {
    for about in files {
        let layout = about.layout.map_or("none", Layout::name);
        let rows = count(about.rows);
        let file = printable(&about.file.display().to_string());
        let mut said = format!("{file}: {rows} rows, layout: {layout}");
        if !about.ignored.is_empty() {
            let names: Vec<String> = about.ignored.iter().map(|n| printable(n)).collect();
            said += &format!("; columns without meaning here: {}", names.join(", "));
        }
        note(&said);
        if let Some(said) = left_out(about) {
            note(&format!("warning: {file}: {said}"));
        }
    }
    if skipped.total() > 0 {
        note(&format!("left out {} rows: {}", count(skipped.total()), skipped.reasons()));
        for row in skipped.listed.iter().take(SHOWN) {
            note(&format!("  {}", printable(&row.to_string())));
        }
        if skipped.total() > SHOWN as u64 {
            note("  ...");
        }
    }
}

/// What the chat template leaves out of a file, in words, if anything.
pub fn left_out(about: &FileReport) -> Option<String> {
    let each = about.left_out.iter();
    let each = each.map(|(what, rows)| format!("{} ({} rows)", printable(what), count(*rows)));
    let each: Vec<String> = each.collect();
    (!each.is_empty()).then(|| {
        format!(
            "the chat template renders nothing of {}; the model will not see it, unless another \
             template has it",
            each.join(", ")
        )
    })
}

/// Text from outside for a terminal: control characters are written out.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' => "\\n".to_string(),
            '\t' => "\\t".to_string(),
            '\r' => "\\r".to_string(),
            c if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202e}') => {
                c.escape_unicode().to_string()
            }
            c => c.to_string(),
        })
        .collect()
}

/// Rows of a file by their place, from 1: `A..B`, both included; `A..`, `..B`, or one.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct RowRange {
    first: usize,
    last: usize,
}

impl RowRange {
    /// The first so many.
    pub fn first(count: usize) -> RowRange {
        RowRange { first: 1, last: count }
    }

    /// Whether any of so many rows is one of them.
    ///
    /// # Errors
    /// None is.
    pub fn check(&self, rows: usize) -> Result<()> {
        match self.first <= rows {
            true => Ok(()),
            false => Err(Error::invalid(format!(
                "`--rows` begins at {}, which is past the last of {} rows that can be learned from",
                self.first,
                count(rows as u64)
            ))),
        }
    }

    /// Whether a row, counted from 1, is one of them.
    pub fn contains(&self, row: usize) -> bool {
        (self.first..=self.last).contains(&row)
    }
}

impl FromStr for RowRange {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<RowRange, String> {
        let wrong = || format!("`{text}` is no range of rows, such as 3..7, 3.. or 3");
        let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&n| n > 0);
        let (first, last) = match text.split_once("..") {
            None => (number(text), number(text)),
            Some((first, last)) => (
                if first.trim().is_empty() { Some(1) } else { number(first) },
                if last.trim().is_empty() { Some(usize::MAX) } else { number(last) },
            ),
        };
        match first.zip(last) {
            Some((first, last)) if first <= last => Ok(RowRange { first, last }),
            _ => Err(wrong()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_rows() {
        let of = |text: &str| text.parse::<RowRange>();
        assert_eq!(of("3..7"), Ok(RowRange { first: 3, last: 7 }));
        assert_eq!(of("3"), Ok(RowRange { first: 3, last: 3 }));
        assert_eq!(of("3.."), Ok(RowRange { first: 3, last: usize::MAX }));
        assert_eq!(of("..2"), Ok(RowRange::first(2)));
        for bad in ["0..3", "7..3", "x", "", "1...3", "-1"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_printed_drives_no_terminal() {
        assert_eq!(printable("a\x1b[31m\n\u{9b}b\u{202e}"), "a\\u{1b}[31m\\n\\u{9b}b\\u{202e}");
    }
}
