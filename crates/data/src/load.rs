//! From files to a data set.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use text::{ChatTemplate, Tokenizer};

use crate::error::{BadRow, BadRows, Stopped};
use crate::layout::{Content, Layout, Reading};
use crate::render::{Fit, LossOn, Rendered, Renderer};
use crate::{Bad, Error, Example, Reason, Result, source};

/// How data are read.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Options {
    /// The layout of all rows; else each file's is detected.
    pub layout: Option<Layout>,
    /// Which tokens carry loss.
    pub loss_on: LossOn,
    /// Rows that cannot be learned from are left out and counted, not refused.
    pub skip_bad: bool,
    /// What becomes of conversations that are too long.
    pub fit: Fit,
    /// Rows of the windows that examples have to fit.
    pub window: Option<usize>,
    /// Whether control tokens written in texts are taken as such; those that a template writes
    /// always are.
    pub parse_special: bool,
}

/// A row of a file, and what it holds.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Index of its file.
    pub file: usize,
    /// Line of JSON lines, else the number of the record; from 1.
    pub number: u64,
    /// What it holds.
    pub content: Content,
}

/// What became of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileReport {
    /// The file.
    pub file: PathBuf,
    /// The layout of its rows; none where all are bad.
    pub layout: Option<Layout>,
    /// How many rows it has.
    pub rows: u64,
    /// Columns that mean nothing for training, the first 64.
    pub ignored: BTreeSet<String>,
    /// What the template leaves out of its rows, and in how many, the first 64: its tools, a field
    /// of its messages, what a role says.
    pub left_out: BTreeMap<String, u64>,
}

/// Counts in how many rows a template leaves something out, for the first 64 of such things.
pub fn count_left_out(counts: &mut BTreeMap<String, u64>, names: BTreeSet<String>) {
    for name in names {
        if counts.len() < 64 || counts.contains_key(&name) {
            *counts.entry(name).or_default() += 1;
        }
    }
}

/// Data ready to be trained on.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Dataset {
    /// The sequences, in the order of the files and their rows.
    pub examples: Vec<Example>,
    /// For each the index of its file, and the number of its row.
    pub origins: Vec<(usize, u64)>,
    /// What became of each file.
    pub files: Vec<FileReport>,
    /// Rows that were shortened to fit a window.
    pub shortened: u64,
    /// Rows that were left out.
    pub skipped: BadRows,
}

/// Reads data files, and renders each row with the tokenizer and the template that the model is
/// served with.
///
/// # Errors
/// Names the file, the row and the reason. A conversation that cannot be made to fit with
/// [`Options::fit`] is left out in any case.
pub fn load(
    files: &[PathBuf],
    options: &Options,
    tokenizer: &Tokenizer,
    template: std::result::Result<&ChatTemplate, &str>,
) -> Result<Dataset> {
    let renderer = Renderer::new(tokenizer, template, options);
    let (mut examples, mut origins, mut shortened) = (Vec::new(), Vec::new(), 0);
    let read = each_rendered(files, options, &renderer, &mut |row, rendered| {
        shortened += u64::from(rendered.shortened);
        origins.extend(rendered.examples.iter().map(|_| (row.file, row.number)));
        examples.extend(rendered.examples);
    })?;
    Ok(Dataset { examples, origins, files: read.files, shortened, skipped: read.skipped })
}

/// As [`each`], with what becomes of the rows that are good.
///
/// # Errors
/// As [`load`].
pub fn each_rendered(
    files: &[PathBuf],
    options: &Options,
    renderer: &Renderer<'_>,
    take: &mut dyn FnMut(Row, Rendered),
) -> Result<Read> {
    let mut left_out = Vec::new();
    let mut read = each(files, options, &mut |row| {
        let mut rendered = renderer.examples(&row.content)?;
        let names = std::mem::take(&mut rendered.left_out);
        if !names.is_empty() {
            left_out.push((row.file, names));
        }
        take(row, rendered);
        Ok(())
    })?;
    for (file, names) in left_out {
        if let Some(about) = read.files.get_mut(file) {
            count_left_out(&mut about.left_out, names);
        }
    }
    Ok(read)
}

/// What became of the rows of files.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Read {
    /// What became of each file.
    pub files: Vec<FileReport>,
    /// Rows that were left out.
    pub skipped: BadRows,
}

/// Bad rows after which the rest is not looked at where they are refused anyway.
const ENOUGH: u64 = 1000;

/// Hands on every row of files. What is done with one may find it bad, too.
///
/// # Errors
/// As [`load`].
pub fn each(
    files: &[PathBuf],
    options: &Options,
    take: &mut dyn FnMut(Row) -> std::result::Result<(), Bad>,
) -> Result<Read> {
    let (mut read, mut good) = (Read::default(), 0u64);
    // Of the bad ones, those that only do not fit.
    let mut unfit = 0u64;
    for (index, file) in files.iter().enumerate() {
        let mut about = FileReport {
            file: file.clone(),
            layout: None,
            rows: 0,
            ignored: BTreeSet::new(),
            left_out: BTreeMap::new(),
        };
        let mut sink = |raw: source::Raw| {
            about.rows += 1;
            let reading =
                Reading { cells: raw.cells, chosen: options.layout.is_some(), strict: false };
            let number = raw.number;
            let result = raw.fields.and_then(|fields| {
                let layout = match (options.layout, about.layout) {
                    (Some(layout), _) => layout,
                    (None, before) => agreed(Layout::detect(&fields, raw.cells), before)?,
                };
                about.layout = Some(layout);
                let content = Content::read(fields, layout, reading, &mut about.ignored)?;
                take(Row { file: index, number, content }).map_err(|bad| named(bad, layout))
            });
            match result {
                Ok(()) => good += 1,
                Err(bad) => {
                    let fits_not = matches!(bad.reason, Reason::TruncatedAnswer | Reason::TooLong);
                    unfit += u64::from(options.fit != Fit::Refuse && fits_not);
                    read.skipped.add(BadRow { file: name(file), row: number, bad });
                }
            }
            let refused = !options.skip_bad && read.skipped.total() - unfit >= ENOUGH;
            if refused {
                read.skipped.stopped = Some(Stopped::After(number));
            }
            Ok(if refused { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        source::read(file, &mut sink)?;
        if about.rows == 0 {
            return Err(Error::file(file, "has no rows"));
        }
        read.files.push(about);
        if !options.skip_bad && read.skipped.total() > unfit {
            let after = files.len() - index - 1;
            if after > 0 && read.skipped.stopped.is_none() {
                read.skipped.stopped = Some(Stopped::Files(after));
            }
            return Err(Error::Rows(read.skipped));
        }
    }
    if good == 0 {
        return Err(Error::Data(match read.skipped.listed.first() {
            Some(first) => format!(
                "none of {} rows can be learned from ({}); the first: {first}",
                read.skipped.total(),
                read.skipped.reasons()
            ),
            None => "there are no data files; expected at least one".into(),
        }));
    }
    Ok(read)
}

/// A row's layout is that of the rows before it.
fn agreed(
    found: std::result::Result<Layout, Bad>,
    before: Option<Layout>,
) -> std::result::Result<Layout, Bad> {
    match (found, before) {
        (Ok(found), Some(before)) if found != before => {
            let what = format!(
                "its layout is {found}, that of the rows before it {before}; make them files of \
                 their own, or choose one with `--layout`"
            );
            Err(Bad::row(Reason::MixedLayouts, what))
        }
        (found, _) => found,
    }
}

/// A fault of a message, which only the layout that has messages has in a field of this name.
fn named(bad: Bad, layout: Layout) -> Bad {
    match layout {
        Layout::Messages | Layout::Text => bad,
        _ => Bad { field: String::new(), ..bad },
    }
}

fn name(file: &Path) -> String {
    file.display().to_string()
}
