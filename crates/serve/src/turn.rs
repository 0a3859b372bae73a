//! A turn: one answer being generated, as its asker sees it.

use tokio::sync::mpsc::UnboundedReceiver;

use crate::Error;

/// What is asked for.
#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    /// The prompt's tokens, at least one.
    pub tokens: Vec<u32>,
    /// The base model or the alias of an adapter, as [`Server::names`](crate::Server::names) has
    /// it. The turn keeps the generation that the alias has now.
    pub model: String,
    /// Most new tokens; bounded by the context in any case.
    pub max_tokens: usize,
    /// The sampler chain.
    pub sampler: text::SamplerConfig,
    /// Seeds the sampler.
    pub seed: u64,
    /// Texts that end the answer.
    pub stops: Vec<String>,
}

/// How a turn ended.
#[derive(Clone, PartialEq, Debug)]
pub struct Done {
    /// Why.
    pub finish: model::Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, how many were in the cache already.
    pub cached_tokens: usize,
    /// Tokens generated, the one that ended it included.
    pub completion_tokens: usize,
}

/// What a turn says as it goes.
#[derive(Clone, PartialEq, Debug)]
pub enum Said {
    /// Text that will not change any more; never empty.
    Text(String),
    /// The end.
    Done(Done),
    /// The end, by an error.
    Failed(Error),
}

/// A turn under way. Dropping it ends the turn: its slot and pages are free at the next batch.
#[derive(Debug)]
pub struct Turn {
    pub(crate) said: UnboundedReceiver<Said>,
    /// The generation of the alias that answers; 0 for the base model.
    pub(crate) generation: u64,
}

impl Turn {
    /// The generation of the alias that answers, counted from 1; 0 for the base model.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What comes next; `None` after the end.
    pub async fn next(&mut self) -> Option<Said> {
        self.said.recv().await
    }

    /// As [`Turn::next`], for a thread that may wait.
    pub fn blocking_next(&mut self) -> Option<Said> {
        self.said.blocking_recv()
    }
}
