//! Adapters under their aliases: what is served, and what is being learned.
//!
//! What is served under an alias is an immutable *generation*. Publishing makes a new one; turns
//! in flight keep theirs, and when the last of them and the registry have let go of it, the loop
//! is told to forget its weights and what the cache kept of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use model::{Adapter, AdapterId};
use train::Optimizer;

use crate::engine_loop::{Command, ToLoop};

/// One generation of an alias.
pub(crate) struct Generation {
    pub(crate) id: AdapterId,
    /// From 1.
    pub(crate) number: u64,
    pub(crate) adapter: Arc<Adapter>,
    pub(crate) file: Option<PathBuf>,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) to_loop: ToLoop,
}

impl Drop for Generation {
    fn drop(&mut self) {
        // A loop that has ended holds no weights.
        self.to_loop.send(Command::Detach(self.id));
    }
}

/// An adapter with the optimizer that moved it, to go on from.
pub(crate) struct Shadow {
    pub(crate) adapter: Adapter,
    pub(crate) optimizer: Optimizer,
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
    /// What was learned and then served.
    pub(crate) promoted: Option<Arc<Shadow>>,
}

/// All aliases.
pub(crate) type Registry = BTreeMap<String, Alias>;

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
