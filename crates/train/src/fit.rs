//! Which settings fit the memory there is.

use std::ops::Deref;
use std::sync::Arc;

use graph::{Device, Recompute};
use model::Model;

use crate::{Example, Result, Start, TrainConfig, Trainer, Walks};

/// The smallest graph that is tried, in rows.
const LEAST: usize = 16;

/// Settings that fit, as near as possible to those that were asked for.
#[derive(Clone, PartialEq, Debug)]
pub struct Nearest {
    /// They differ in `graph.recompute`, `graph.rows` and `walks` alone.
    pub config: TrainConfig,
    /// The window is shorter than the longest example: what is longer has to be shortened.
    pub shortens: bool,
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
        let shorter = match self.shortens {
            true => ", for which examples have to be shortened",
            false => "",
        };
        format!("`recompute` with `window` {window}{chunk} would fit{shorter}")
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
    /// Most bytes to take beside the model and the data, those that threads scratch on among them.
    pub allowed: usize,
    /// Where there are checkpoints, as for [`Trainer::checkpoint_every`].
    pub checkpoint_every: Option<u64>,
    /// Says whether chunks of so many rows are allowed.
    pub may_chunk: &'a dyn Fn(usize) -> bool,
}

/// Finds the nearest settings that fit. Recomputing layers comes first, since that changes no bit;
/// then smaller windows that still hold the longest example; then chunks of a window, which leave
/// its gradient as it is; and last windows that examples have to be shortened for.
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
    let all = wanted.examples.iter().chain(&**wanted.held_out);
    let longest = all.map(Example::rows).max().unwrap_or(0);
    for (rows, walks) in candidates(config, longest, wanted.may_chunk) {
        let mut config = TrainConfig { walks, ..config.clone() };
        config.graph.recompute = Recompute::PerLayer;
        config.graph.rows = rows;
        let start = Start { from: None, fallback: wanted.fallback.cloned() };
        let mut trainer = Trainer::start(model.clone(), config.clone(), start)?;
        if let Some(every) = wanted.checkpoint_every {
            trainer.checkpoint_every(every);
        }
        let shortens = config.longest() < longest;
        let [examples, held_out] = [wanted.examples, wanted.held_out].map(|all| match shortens {
            true => all.iter().map(|example| shortened(example, rows)).collect(),
            false => all.clone(),
        });
        trainer.load(examples, held_out)?;
        let bytes = trainer.planned_bytes() + trainer.scratch_bytes();
        if bytes <= wanted.allowed {
            return Ok(Some(Nearest { config, shortens, bytes }));
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
    may_chunk: &dyn Fn(usize) -> bool,
) -> Vec<(usize, Option<Walks>)> {
    let rows = config.graph.rows;
    let halves = |from: usize| {
        let half = |&rows: &usize| (rows / 2 >= LEAST).then_some(rows / 2);
        std::iter::successors(Some(from), half)
    };
    let mut all = vec![(rows, config.walks)];
    let (whole, cut): (Vec<usize>, Vec<usize>) =
        halves(rows).skip(1).partition(|&rows| rows >= longest);
    all.extend(whole.into_iter().map(|rows| (rows, None)));
    if LEAST < longest && longest < rows && all.last().is_none_or(|last| last.0 != longest) {
        all.push((longest, None));
    }
    let window = config.walks.map_or(rows, |walks| walks.window);
    let walks = config.walks.unwrap_or(Walks { window, horizon: 0, host_budget: 0 });
    let chunks = cut.into_iter().filter(|&rows| may_chunk(rows));
    all.extend(chunks.map(|rows| (rows, Some(walks))));
    all.extend(halves(longest.min(rows)).skip(1).map(|rows| (rows, None)));
    all
}
