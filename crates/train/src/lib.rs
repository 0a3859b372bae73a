//! Training of LoRA adapters: loss, gradients, optimizer, and the loop.
//!
//! Knows: what a window of training rows is, how its loss is weighted, how parameters move, what of
//! a run is recorded.
//! Must not know: HTTP, how an op is computed, or what a model's layers look like.
//!
//! The life of a step: [`data::Packing`] puts sequences into windows, [`Gradients::of`]
//! runs the model's own graph and its derivative over each window, [`Optimizer`] moves the
//! parameters.
#![deny(clippy::indexing_slicing)]

mod checkpoint;
mod config;
mod epochs;
mod error;
mod estimate;
mod fit;
mod gradients;
mod held_out;
mod moved;
mod optimizer;
mod parameters;
mod piece;
mod record;
mod step;
mod targets;
mod trainer;
mod weights;

pub use checkpoint::{Checkpoints, Snapshot};
pub use config::TrainConfig;
pub use data::{Example, Packing, Room, Window, pack};
pub use error::{Error, Result};
pub use estimate::Rates;
pub use fit::{Cut, Nearest, Wanted, halves, nearest, over_budget};
pub use gradients::{
    Goal, Gradients, GraphConfig, Masks, Measured, Pass, Walks, loss_of, most_sequences,
};
pub use optimizer::{Method, Optimizer, Schedule};
pub use parameters::Parameters;
pub use record::{Recorded, Recorder, all_settings, facts};
pub use targets::{select_targets, top_layers};
pub use trainer::{Advance, Event, Outcome, Start, Trainer};
pub use weights::{WrittenTensor, select_weights, write_weights};
