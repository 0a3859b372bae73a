//! Which settings fit the memory there is.

use std::ops::Deref;
use std::sync::Arc;

use graph::{Device, Recompute};
use model::Model;

use crate::{Result, Start, TrainConfig, Trainer};

/// Settings that fit, as near as possible to those that were asked for.
#[derive(Clone, PartialEq, Debug)]
pub struct Nearest {
    /// They differ in `graph.recompute` and `graph.rows` alone.
    pub config: TrainConfig,
    /// The window is shorter than the longest example: what is longer has to be shortened.
    pub shortens: bool,
    /// Bytes a run with them takes beside the model, at most.
    pub bytes: usize,
}

impl Nearest {
    /// The change, in words: "`recompute` with `window` 256 would fit".
    pub fn in_words(&self) -> String {
        let rows = self.config.graph.rows;
        let shorter = match self.shortens {
            true => ", for which examples have to be shortened",
            false => "",
        };
        format!("`recompute` with `window` {rows} would fit{shorter}")
    }
}

/// Finds the nearest settings that take at most `allowed` bytes beside the model: recomputing
/// layers first, since that changes no bit, then in smaller windows. `longest` is the rows of the
/// longest example.
///
/// # Errors
/// The refusal, where the run is refused at any size.
pub fn nearest<M: Deref<Target = Model> + Clone>(
    model: &M,
    config: &TrainConfig,
    fallback: Option<&Arc<dyn Device>>,
    longest: usize,
    allowed: usize,
) -> Result<Option<Nearest>> {
    let mut config = config.clone();
    config.graph.recompute = Recompute::PerLayer;
    loop {
        let start = Start { from: None, fallback: fallback.cloned() };
        let bytes = Trainer::start(model.clone(), config.clone(), start)?.planned_bytes();
        let rows = config.graph.rows;
        if bytes <= allowed {
            return Ok(Some(Nearest { config, shortens: rows < longest, bytes }));
        }
        if rows <= 16 {
            return Ok(None);
        }
        // Not below the longest example before that one has been tried.
        let half = (rows / 2).max(16);
        config.graph.rows = match half < longest && longest < rows {
            true => longest,
            false => half,
        };
    }
}
