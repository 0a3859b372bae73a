//! Which settings fit the memory there is.

use std::ops::Deref;
use std::sync::Arc;

use graph::{Device, Recompute};
use model::Model;

use crate::{Example, Result, Start, TrainConfig, Trainer, Walks};

/// The smallest graph that is tried, in rows.
const LEAST: usize = 16;

/// What data come to in windows that are shorter than they are.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Cut {
    /// Texts, which are cut into windows of any length.
    Anywhere,
    /// Conversations, of which `fit` drops what comes before their last answer, and no more.
    BeforeAnswers,
}

impl Cut {
    /// Whether a window of so many rows has room for what must stay of an example: the last of its
    /// answers, and a token before it.
    fn leaves(self, example: &Example, rows: usize) -> bool {
        if self == Cut::Anywhere {
            return true;
        }
        let end = example.weights.iter().rposition(|&w| w != 0.0).map_or(0, |last| last + 1);
        let trained = example.weights.iter().take(end).rev().take_while(|&&w| w != 0.0);
        end <= rows + 1 || trained.count() <= rows
    }

    /// What to do where nothing fits.
    pub fn none_fits(self) -> &'static str {
        match self {
            Cut::Anywhere => "no window fits: adapt fewer layers, or take a lower rank",
            Cut::BeforeAnswers => {
                "no window that holds the answers fits: adapt fewer layers, or take a lower rank"
            }
        }
    }
}

/// That a run needs more bytes beside the model than it may take, in MiB, with as many digits as
/// tell the two apart.
pub fn over_budget(needed: usize, allowed: usize) -> String {
    let mib = |bytes: usize, digits: usize| format!("{:.digits$}", bytes as f64 / (1 << 20) as f64);
    let differ = |&digits: &usize| mib(needed, digits) != mib(allowed, digits);
    let digits = (1..7).find(differ).unwrap_or(7);
    format!(
        "the run needs {} MiB beside the model, {} MiB may be taken",
        mib(needed, digits),
        mib(allowed, digits)
    )
}

/// Settings that fit, as near as possible to those that were asked for.
#[derive(Clone, PartialEq, Debug)]
pub struct Nearest {
    /// They differ in `graph.recompute`, `graph.rows` and `walks` alone.
    pub config: TrainConfig,
    /// Conversations are longer than the window: they fit it with `fit` as `left`.
    pub shortens: bool,
    /// Windows were to be walked in chunks, and are not any more.
    pub drops_chunk: bool,
    /// Bytes a run with them takes beside the model and the data, those that threads scratch on
    /// among them.
    pub bytes: usize,
}

impl Nearest {
    /// Rows of the window, and of its chunks where it is walked in such.
    pub fn window(&self) -> (usize, Option<usize>) {
        let rows = self.config.graph.rows;
        match self.config.walks {
            Some(walks) => (walks.window, Some(rows)),
            None => (rows, None),
        }
    }

    /// The change, in words: "`recompute` with `window` 256 would fit".
    pub fn in_words(&self) -> String {
        let (window, chunk) = self.window();
        let chunk = chunk.map_or(String::new(), |rows| format!(" and `chunk` {rows}"));
        let fit = if self.shortens { " and `fit` \"left\"" } else { "" };
        let without = if self.drops_chunk { ", without `chunk`" } else { "" };
        format!("`recompute` with `window` {window}{chunk}{fit} would fit{without}")
    }
}

/// What settings are looked for.
#[derive(Copy, Clone)]
pub struct Wanted<'a> {
    /// Where nodes fall back to.
    pub fallback: Option<&'a Arc<dyn Device>>,
    /// What is learned.
    pub examples: &'a Arc<[Example]>,
    /// What is only measured.
    pub held_out: &'a Arc<[Example]>,
    /// What both come to in shorter windows.
    pub cut: Cut,
    /// Most bytes to take beside the model and the data, those that threads scratch on among them.
    pub allowed: usize,
    /// Where there are checkpoints, as for [`Trainer::checkpoint_every`].
    pub checkpoint_every: Option<u64>,
    /// The shortest window that may be asked for and has so many rows.
    pub window: &'a dyn Fn(usize) -> usize,
    /// The chunks that may be asked for a window of so many rows, longest first.
    pub chunks: &'a dyn Fn(usize) -> Vec<usize>,
}

/// Halves of a number of rows, and theirs, down to the smallest graph that is tried.
pub fn halves(rows: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(rows / 2), |rows| Some(rows / 2)).take_while(|&rows| rows >= LEAST)
}

/// Finds the nearest settings that fit. Recomputing layers comes first, since that changes no bit;
/// then smaller windows that still hold the longest example; then chunks of a window, which leave
/// its gradient as it is; and last windows that examples have to be shortened for, as far as what
/// they teach has room there.
///
/// Each is set up as the run would be, with its data, so that what is named does fit.
///
/// # Errors
/// The refusal, where the run is refused at any size.
pub fn nearest<M: Deref<Target = Model> + Clone>(
    model: &M,
    config: &TrainConfig,
    wanted: &Wanted<'_>,
) -> Result<Option<Nearest>> {
    let all = || wanted.examples.iter().chain(&**wanted.held_out);
    let longest = all().map(Example::rows).max().unwrap_or(0);
    let walked = config.walks.is_some();
    for (rows, walks) in candidates(config, longest, wanted) {
        let mut config = TrainConfig { walks, ..config.clone() };
        config.graph.recompute = Recompute::PerLayer;
        config.graph.rows = rows;
        let is_shorter = config.longest() < longest;
        if is_shorter && !all().all(|example| wanted.cut.leaves(example, rows)) {
            continue;
        }
        let start = Start { from: None, fallback: wanted.fallback.cloned() };
        let mut trainer = Trainer::start(model.clone(), config.clone(), start)?;
        if let Some(every) = wanted.checkpoint_every {
            trainer.checkpoint_every(every);
        }
        let [examples, held_out] = [wanted.examples, wanted.held_out].map(|all| match is_shorter {
            true => all.iter().map(|example| shortened(example, rows)).collect(),
            false => all.clone(),
        });
        trainer.load(examples, held_out)?;
        let bytes = trainer.planned_bytes() + trainer.scratch_bytes();
        if bytes <= wanted.allowed {
            let shortens = is_shorter && wanted.cut == Cut::BeforeAnswers;
            let drops_chunk = walked && walks.is_none();
            return Ok(Some(Nearest { config, shortens, drops_chunk, bytes }));
        }
    }
    Ok(None)
}

/// An example of so many rows at most, all of which carry loss: more than any of its pieces needs.
fn shortened(example: &Example, rows: usize) -> Example {
    let tokens: Vec<u32> = example.tokens.iter().take(rows + 1).copied().collect();
    Example { weights: vec![1.0; tokens.len()], tokens }
}

/// Rows of a graph and the walk, from what was asked for on.
fn candidates(
    config: &TrainConfig,
    longest: usize,
    wanted: &Wanted<'_>,
) -> Vec<(usize, Option<Walks>)> {
    let rows = config.graph.rows;
    // Those that may be asked for, none longer than the one before it.
    let windows = |of: &mut dyn Iterator<Item = usize>| {
        let mut windows: Vec<usize> = of.map(wanted.window).collect();
        windows.dedup();
        windows
    };
    let mut all = vec![(rows, config.walks)];
    let least = (longest > LEAST).then_some(longest);
    let whole = windows(&mut halves(rows).filter(|&rows| rows > longest).chain(least));
    let whole = whole.into_iter().filter(|&n| n < rows);
    all.extend(whole.map(|rows| (rows, None)));
    let window = config.longest();
    let walks = config.walks.unwrap_or(Walks { window, horizon: 0, host_budget: 0 });
    let chunks = (wanted.chunks)(window).into_iter().filter(|&n| n < rows.min(longest));
    all.extend(chunks.map(|rows| (rows, Some(walks))));
    let shortest = longest.min(rows);
    let cut = windows(&mut halves(shortest)).into_iter().filter(|&n| n < shortest);
    all.extend(cut.map(|rows| (rows, None)));
    all
}
