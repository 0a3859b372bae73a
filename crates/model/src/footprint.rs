//! What serving takes, known before any of it is taken.

use std::collections::BTreeSet;

use crate::cache::PAGE;
use crate::engine::{bucket, plan_of};
use crate::{EngineConfig, EntryStates, Model, NetConfig, PrefixShape, Result};

/// Bytes of the arena of the graph that runs `rows` rows of one sequence, of which the last
/// wants logits, over a full cache.
///
/// # Errors
/// When the model cannot run so, as the engine would say.
pub fn arena_bytes(model: &Model, config: &EngineConfig, rows: usize) -> Result<usize> {
    let pages = config.positions.div_ceil(PAGE).max(1);
    let config = NetConfig {
        rows: bucket(rows),
        seqs: 1,
        logit_rows: 1,
        cache: config.cache,
        prefix: Some(PrefixShape { pages, page: PAGE, table: pages.next_power_of_two() }),
        states: EntryStates::of(model.geometry(), 1, config.states),
        adapters: Vec::new(),
        dropout: None,
        trainable: BTreeSet::new(),
    };
    Ok(plan_of(model, &config)?.0.arena_bytes)
}
