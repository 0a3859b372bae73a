//! Adapters under their aliases: what is served, and what is being learned.
//!
//! What is served under an alias is an immutable *generation*. Publishing makes a new one; turns
//! in flight keep theirs, and when the last of them and the registry have let go of it, the loop
//! is told to forget its weights and what the cache kept of it. Generations of equal content, under
//! whatever aliases, share both.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use graph::Code;
use model::{Adapter, AdapterId};
use train::Optimizer;

use crate::engine_loop::{Command, ToLoop};
use crate::{Error, Result};

/// Aliases that there may be. Clients make them, so their number has to have an end.
pub const MOST_ALIASES: usize = 256;

/// An adapter that the loop knows, until nobody holds this any more.
pub(crate) struct Attached {
    pub(crate) id: AdapterId,
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) to_loop: ToLoop,
}

impl Drop for Attached {
    fn drop(&mut self) {
        // A loop that has ended holds no weights.
        self.to_loop.send(Command::Detach(self.id));
    }
}

/// One generation of an alias.
pub(crate) struct Generation {
    /// From 1.
    pub(crate) number: u64,
    pub(crate) attached: Arc<Attached>,
    pub(crate) file: Option<PathBuf>,
    /// Seconds since 1970.
    pub(crate) created: u64,
}

/// An adapter with the optimizer that moved it, to go on from.
pub(crate) struct Shadow {
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) optimizer: Optimizer,
    /// Optimizer steps it is of.
    pub(crate) steps: u64,
}

/// An alias.
#[derive(Default)]
pub(crate) struct Alias {
    /// What is served under it, if anything is yet.
    pub(crate) served: Option<Arc<Generation>>,
    /// Generations there were so far.
    pub(crate) count: u64,
    /// What was learned and is not served yet.
    pub(crate) shadow: Option<Arc<Shadow>>,
    /// What was learned and then served, by the generation that it was served as: another that is
    /// served since knows nothing of it.
    pub(crate) promoted: Option<(u64, Arc<Shadow>)>,
}

/// All aliases that something is served under or learned for.
#[derive(Default)]
pub(crate) struct Registry {
    aliases: BTreeMap<String, Alias>,
    /// Aliases that are gone had no generation of a greater number. New ones count on from here, so
    /// that no number is used twice.
    used: u64,
}

impl Registry {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &Alias)> {
        self.aliases.iter()
    }

    pub(crate) fn get(&self, alias: &str) -> Option<&Alias> {
        self.aliases.get(alias)
    }

    /// Changes an alias that is there, and forgets it if nothing is left of it.
    pub(crate) fn with<T>(&mut self, alias: &str, with: impl FnOnce(&mut Alias) -> T) -> Option<T> {
        let entry = self.aliases.get_mut(alias)?;
        let out = with(entry);
        if entry.served.is_none() && entry.shadow.is_none() {
            self.used = self.used.max(entry.count);
            self.aliases.remove(alias);
        }
        Some(out)
    }

    /// Whether an alias is there or may be made.
    ///
    /// # Errors
    /// With the numbers, when there are too many.
    pub(crate) fn room_for(&self, alias: &str) -> Result<()> {
        let count = self.aliases.len();
        if count < MOST_ALIASES || self.aliases.contains_key(alias) {
            return Ok(());
        }
        let message = format!(
            "there are {count} adapters, the most there may be ({MOST_ALIASES}), and none of the \
             alias `{alias}`; unload another first"
        );
        Err(Error::new(Code::OverBudget, message).with_field("alias"))
    }

    /// An alias, made if it is not there: who takes up the work for one asks [`Registry::room_for`]
    /// before that.
    fn entry(&mut self, alias: &str) -> &mut Alias {
        let count = self.used;
        self.aliases.entry(alias.to_string()).or_insert_with(|| Alias { count, ..Alias::default() })
    }

    /// Serves an adapter as the next generation of an alias: its number, and the one before it.
    pub(crate) fn publish(
        &mut self,
        alias: &str,
        attached: Arc<Attached>,
        file: Option<PathBuf>,
        created: u64,
    ) -> (u64, Option<Arc<Generation>>) {
        let entry = self.entry(alias);
        entry.count += 1;
        let number = entry.count;
        let generation = Generation { number, attached, file, created };
        (number, entry.served.replace(Arc::new(generation)))
    }

    /// Keeps what was learned for an alias.
    pub(crate) fn learned(&mut self, alias: &str, shadow: Shadow) {
        self.entry(alias).shadow = Some(Arc::new(shadow));
    }

    /// What is attached and served, each once.
    pub(crate) fn attached(&self) -> Vec<Arc<Attached>> {
        let all = self.aliases.values().filter_map(|alias| alias.served.as_ref());
        let by_id: BTreeMap<_, _> = all.map(|g| (g.attached.id, g.attached.clone())).collect();
        by_id.into_values().collect()
    }
}

/// Whether two adapters are the same, bit for bit.
pub(crate) fn same(a: &Adapter, b: &Adapter) -> bool {
    let bits = |a: &[f32], b: &[f32]| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
    };
    let numbers = |adapter: &Adapter| [adapter.alpha, adapter.dropout];
    bits(&numbers(a), &numbers(b))
        && a.tensors.keys().eq(b.tensors.keys())
        && a.tensors.values().zip(b.tensors.values()).all(|(a, b)| {
            a.rank == b.rank && bits(&[a.scale], &[b.scale]) && bits(&a.a, &b.a) && bits(&a.b, &b.b)
        })
}

/// A model that can be asked for by name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Served {
    /// Its name: the base model's, or an alias.
    pub name: String,
    /// The generation that is served, from 1; 0 for the base model.
    pub generation: u64,
    /// When it was loaded or published, in seconds since 1970.
    pub created: u64,
    /// The adapter's file, if it has one.
    pub file: Option<PathBuf>,
    /// Optimizer steps of what is learned for it and not yet promoted.
    pub shadow_steps: Option<u64>,
}
