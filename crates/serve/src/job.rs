//! Training jobs, validated and rendered, as the loop takes them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use graph::Device;
use model::Adapter;
use train::{Example, TrainConfig};

use crate::Durable;

/// How training and serving share the device while there is something to serve.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Pacing {
    /// Training takes this share of the time, in millionths: 1 to 1,000,000.
    Share(u32),
    /// Turns are slowed down by at most this, in millionths: 1 to 999,999.
    Slowdown(u32),
    /// Training does not wait for turns.
    Never,
}

/// What became of the data of a job.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DataReport {
    /// Rows of a window, as it was asked for.
    pub window_asked: usize,
    /// Rows of a window, after it was fitted to the data.
    pub window: usize,
    /// Examples of the request, or pieces of its text.
    pub examples: usize,
    /// They are pieces of a text.
    pub of_text: bool,
    /// Examples shortened to fit.
    pub truncated: usize,
    /// Examples left out because they could not be made to fit.
    pub skipped: usize,
    /// What the chat template leaves out, and in how many examples: its tools, a field of its
    /// messages, what a role says.
    pub not_rendered: BTreeMap<String, u64>,
    /// Tokens of what is trained on.
    pub train_tokens: usize,
    /// Of these, tokens that carry loss.
    pub trainable_tokens: usize,
    /// Tokens that carry loss of what is held out.
    pub eval_trainable_tokens: usize,
}

/// A job: everything checked that can be without the graph.
#[derive(Clone)]
pub struct TrainJob {
    /// The job's name and the alias its adapter is published under: the file name without
    /// `.gguf`.
    pub name: String,
    /// The file, inside the training folder: an adapter, or, where the model's own weights are
    /// trained, the model anew.
    pub out: PathBuf,
    /// The settings.
    pub config: TrainConfig,
    /// What is learned.
    pub examples: Arc<[Example]>,
    /// What is only measured, after each epoch.
    pub held_out: Arc<[Example]>,
    /// What became of the data.
    pub data: DataReport,
    /// How it shares the device.
    pub pacing: Pacing,
    /// Most bytes it may add; what the machine has free where there is no bound.
    pub memory_budget: Option<usize>,
    /// Layers are computed again in the backward pass where that makes it fit.
    pub may_recompute: bool,
    /// An adapter to go on with.
    pub from: Option<Adapter>,
    /// A device for what the model's own has no kernel for.
    pub fallback: Option<Arc<dyn Device>>,
    /// Where the job is kept, so that it outlives the process.
    pub durable: Option<Durable>,
    /// What the request set, by name, for the job's record.
    pub asked: BTreeMap<String, serde_json::Value>,
    /// Nothing is to be run, only said what it would take.
    pub plan: bool,
}

/// What a job would take.
#[derive(Clone, PartialEq, Debug)]
pub struct JobPlan {
    /// Optimizer steps.
    pub steps: u64,
    /// Numbers that move.
    pub parameters: usize,
    /// Bytes of the arena of the largest graph, and what crosses between devices.
    pub arena_bytes: usize,
    /// Bytes of what moves, its gradients, its moments.
    pub parameter_bytes: usize,
    /// Bytes that threads scratch on.
    pub scratch_bytes: usize,
    /// Bytes of its examples, which are there already.
    pub data_bytes: usize,
    /// Layers are computed again in the backward pass.
    pub recompute: bool,
    /// The kernels it runs on, and those of what it falls back to.
    pub devices: Vec<String>,
    /// Seconds that it takes with nothing beside it, where the device's rates are known.
    pub seconds: Option<f64>,
    /// Bytes that may be taken, where there is a bound.
    pub allowed_bytes: Option<usize>,
    /// Nodes that the model's device has no kernel for, and why.
    pub fallbacks: Vec<String>,
    /// Settings that would fit, where these do not.
    pub instead: Option<String>,
}

/// Examples for the shadow of an alias.
#[derive(Clone)]
pub struct LearnJob {
    /// The alias. One that is not there yet starts from a fresh adapter.
    pub alias: String,
    /// The settings; those of the adapter and its optimizer are theirs, where they are there.
    pub config: TrainConfig,
    /// Which of these were asked for, by field: where they differ from those that the adapter or
    /// its optimizer keeps, the job is refused.
    pub asked: Vec<&'static str>,
    /// What is learned.
    pub examples: Arc<[Example]>,
    /// How it shares the device.
    pub pacing: Pacing,
    /// As of [`TrainJob`].
    pub memory_budget: Option<usize>,
    /// As of [`TrainJob`].
    pub may_recompute: bool,
}

/// What a [`LearnJob`] came to.
#[derive(Clone, PartialEq, Debug)]
pub struct Learned {
    /// Optimizer steps taken by this call.
    pub steps: u64,
    /// Optimizer steps of the shadow in all.
    pub total_steps: u64,
    /// Mean loss of the examples under the shadow before, in nats.
    pub loss_before: f64,
    /// The same afterwards.
    pub loss_after: f64,
    /// The generation that is served meanwhile; 0 where nothing is served under the alias.
    pub served_generation: u64,
}
