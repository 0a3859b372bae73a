//! The server: one loop that owns the device, and the interfaces to it.
//!
//! Knows: turns, their batches and their pacing against training, adapters under their aliases
//! and generations, training jobs, HTTP. Must not know: how a model or a gradient is computed.
//!
//! The life of a request: a handler renders and tokenizes it off the loop and hands it over with
//! [`Server::ask`]; the loop opens a sequence, takes prompt chunks and then one row a turn of it
//! into its batches, samples, and sends text as soon as it is certain; dropping the [`Turn`] ends
//! it at the next batch. The life of a job: [`Server::train`] differentiates, plans and bounds it
//! before anything is taken, the loop runs it between batches, in segments that end when there is
//! something to serve, and its adapter is published as a new generation of its alias.
#![deny(clippy::indexing_slicing)]

mod durable;
mod engine_loop;
mod error;
pub mod http;
mod job;
mod metrics;
mod pacing;
mod record;
mod registry;
pub mod request;
mod run;
mod server;
mod status;
mod turn;

pub use durable::{Durable, TakenUp, take_up};
pub use error::{Error, Result};
pub use job::{DataReport, JobPlan, LearnJob, Learned, Pacing, TrainJob};
pub use metrics::{Metric, MetricKind};
pub use registry::{MOST_ALIASES, Served};
pub use server::{Options, Server};
pub use status::{EpochStatus, Failure, State, TrainStatus, WeightStatus};
pub use turn::{Ask, Done, Said, Turn};
