//! Training of LoRA adapters: loss, gradients, optimizer, and the loop.
//!
//! Knows: what a window of training rows is, how its loss is weighted, how parameters move.
//! Must not know: HTTP, how an op is computed, or what a model's layers look like.
//!
//! The life of a step: [`pack`] of the `data` crate puts sequences into windows, [`Gradients::of`] runs the
//! model's own graph and its derivative over each window, [`AdamW`] moves the parameters.
#![deny(clippy::indexing_slicing)]

mod error;
mod gradients;
mod optimizer;
mod step;
mod trainer;
mod weights;

pub use data::{Example, Window, pack};
pub use error::{Error, Result};
pub use gradients::{Gradients, GraphConfig, Measured, Parameters, Pass, loss_of};
pub use optimizer::{AdamW, Schedule};
pub use trainer::{Advance, Event, Outcome, Start, TrainConfig, Trainer, select_targets};
pub use weights::{select_weights, write_weights};
