//! What `GET /train` says.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::pacing::{Receipts, Stats};
use crate::{Error, Pacing, TrainJob};

/// The state of the training run.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// There was none yet.
    #[default]
    Idle,
    /// It is being differentiated, planned and given its memory.
    Starting,
    /// It runs, or is paused.
    Running,
    /// Its adapter is written and published.
    Done,
    /// It was cancelled; nothing was written.
    Cancelled,
    /// It failed; nothing was written.
    Error,
}

/// One pass over the data.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct EpochStatus {
    /// From 1.
    pub epoch: u64,
    /// Mean loss of its trained tokens, each before its step, in nats.
    pub train_loss: f64,
    /// Mean loss of the held-out tokens after it; `None` where there are none.
    pub eval_loss: Option<f64>,
    /// Seconds it took, waiting and serving included.
    pub seconds: f64,
    /// Rows trained per second of it.
    pub train_tok_s: f64,
}

/// Why a run failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Failure {
    /// The stable code.
    pub code: &'static str,
    /// One line.
    pub message: String,
    /// Op, node, operand and device, where a graph was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub op: Option<String>,
    /// The node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The operand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operand: Option<String>,
    /// The device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

impl From<&Error> for Failure {
    fn from(e: &Error) -> Failure {
        let refusal = e.refusal.as_deref();
        Failure {
            code: e.code.as_str(),
            message: e.message.clone(),
            op: refusal.map(|r| r.op.clone()),
            node: refusal.map(|r| r.node.clone()),
            operand: refusal.and_then(|r| r.operand.clone()),
            device: refusal.and_then(|r| r.device.clone()),
        }
    }
}

/// One of the model's own tensors that were trained, as it is in the new file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct WeightStatus {
    /// Its name.
    pub name: String,
    /// Its type in the model.
    pub model_type: &'static str,
    /// Its type in the file: f32 where rounding to the model's would take back most of what
    /// training moved.
    #[serde(rename = "type")]
    pub file_type: &'static str,
    /// Entries that training has moved.
    pub moved: u64,
    /// Those of them that are others than before when they are rounded to the model's type.
    pub kept: u64,
}

impl From<train::WrittenTensor> for WeightStatus {
    fn from(tensor: train::WrittenTensor) -> WeightStatus {
        let train::WrittenTensor { name, from, to, moved, kept } = tensor;
        WeightStatus { name, model_type: from.name(), file_type: to.name(), moved, kept }
    }
}

/// Everything that is known of the training run, while it runs and after.
///
/// Times are in milliseconds, rates in tokens per second. A *window* is a packed window of the
/// data, one forward and backward pass.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct TrainStatus {
    /// Where it stands.
    pub state: State,
    /// The file it writes, in the training folder.
    pub out: Option<String>,
    /// It holds at an edge until it is resumed.
    pub paused: bool,
    /// A pause was asked for and has not taken effect.
    pub pause_requested: bool,
    /// A cancellation was asked for.
    pub cancel_requested: bool,
    /// It has work but leaves the device to turns.
    pub waiting_for_serving: bool,
    /// The share it takes beside turns, in millionths; 0 where it is paced otherwise.
    pub share_ppm: u32,
    /// The bound on the slowdown of turns, in millionths; 0 where it is paced otherwise.
    pub max_slowdown_ppm: u32,
    /// Optimizer steps taken, and to take.
    pub steps: u64,
    /// Steps of the whole run.
    pub steps_total: u64,
    /// Loss of the last step, in nats.
    pub loss: Option<f64>,
    /// Rows trained, padding not counted.
    pub rows: u64,
    /// Per pass over the data.
    pub epochs: Vec<EpochStatus>,
    /// Rows of a window.
    pub window: usize,
    /// Rows of a window as it was asked for.
    pub window_asked: usize,
    /// Examples of the request.
    pub examples: usize,
    /// Examples shortened to fit.
    pub examples_truncated: usize,
    /// Examples left out because they do not fit.
    pub examples_skipped: usize,
    /// What the chat template leaves out, and in how many examples.
    pub not_rendered: BTreeMap<String, u64>,
    /// Tokens of what is trained on.
    pub train_tokens: usize,
    /// Of these, tokens that carry loss.
    pub trainable_tokens: usize,
    /// Tokens that carry loss of what is held out.
    pub eval_trainable_tokens: usize,
    /// Layers of the model.
    pub n_layer: usize,
    /// Layers that are adapted.
    pub layers_adapted: usize,
    /// Memory of the graphs and the optimizer beside the model, in MiB.
    pub graph_mib: f64,
    /// Time in segments.
    pub training_ms: u64,
    /// Of it, time in which turns waited.
    pub busy_training_ms: u64,
    /// Time in batches of turns since the run began.
    pub serving_ms: u64,
    /// Segments between batches.
    pub segments: u64,
    /// Of these, those for which turns waited.
    pub busy_segments: u64,
    /// Length of the segments for which turns waited: median and 95th percentile.
    pub segment_ms_p50: Option<f32>,
    /// See `segment_ms_p50`.
    pub segment_ms_p95: Option<f32>,
    /// Tokens decoded per second of batches alone, lately.
    pub decode_tps_alone: Option<f64>,
    /// Tokens decoded per second with the segments between batches, lately.
    pub decode_tps_beside: Option<f64>,
    /// By how much turns are slowed down, lately, in millionths.
    pub slowdown_ppm_realized: Option<u32>,
    /// Turns that ended without having waited for training.
    pub turns_clean: u64,
    /// Turns that ended having waited.
    pub turns_overlapped: u64,
    /// Tokens per second of a clean turn.
    pub turn_tps_clean: Option<f64>,
    /// Slowdown of turns that waited: median, 95th percentile and most, in millionths.
    pub turn_slowdown_ppm_p50: Option<u32>,
    /// See `turn_slowdown_ppm_p50`.
    pub turn_slowdown_ppm_p95: Option<u32>,
    /// See `turn_slowdown_ppm_p50`.
    pub turn_slowdown_ppm_max: Option<u32>,
    /// Targets that have moved, of all, at the end.
    pub moved: Option<(usize, usize)>,
    /// Experts that have not, since no token with loss chose them, at the end.
    pub unrouted: Vec<String>,
    /// The adapter's file, at the end.
    pub adapter: Option<String>,
    /// The model's new file, at the end of a run that trained its own weights. It is not served.
    pub model: Option<String>,
    /// Its tensors that were trained.
    pub weights: Vec<WeightStatus>,
    /// The alias it is served under, and its generation, at the end.
    pub alias: Option<String>,
    /// See `alias`.
    pub generation: Option<u64>,
    /// The folder of its record.
    pub record: Option<String>,
    /// What of it could not be recorded, and why.
    pub unrecorded: Option<String>,
    /// Why it failed.
    pub error: Option<Failure>,
}

impl TrainStatus {
    /// A run that is being prepared.
    pub(crate) fn starting(job: &TrainJob, layers: usize) -> TrainStatus {
        let layer = |target: &String| {
            target.strip_prefix("blk.").and_then(|t| t.split('.').next()).map(str::to_string)
        };
        let adapted: std::collections::BTreeSet<String> =
            job.config.targets.iter().filter_map(layer).collect();
        let (share_ppm, max_slowdown_ppm) = match job.pacing {
            Pacing::Share(ppm) => (ppm, 0),
            Pacing::Slowdown(ppm) => (0, ppm),
            Pacing::Never => (0, 0),
        };
        TrainStatus {
            state: State::Starting,
            out: job.out.file_name().map(|n| n.to_string_lossy().into_owned()),
            share_ppm,
            max_slowdown_ppm,
            window: job.data.window,
            window_asked: job.data.window_asked,
            examples: job.data.examples,
            examples_truncated: job.data.truncated,
            examples_skipped: job.data.skipped,
            not_rendered: job.data.not_rendered.clone(),
            train_tokens: job.data.train_tokens,
            trainable_tokens: job.data.trainable_tokens,
            eval_trainable_tokens: job.data.eval_trainable_tokens,
            n_layer: layers,
            layers_adapted: adapted.len(),
            ..TrainStatus::default()
        }
    }

    /// True while a run is there.
    pub fn is_active(&self) -> bool {
        matches!(self.state, State::Starting | State::Running)
    }

    pub(crate) fn measured(&mut self, stats: &Stats, receipts: &Receipts) {
        let ms = |d: Duration| d.as_millis() as u64;
        self.training_ms = ms(stats.training);
        self.busy_training_ms = ms(stats.busy_training);
        self.serving_ms = ms(stats.serving);
        self.segments = stats.segments;
        self.busy_segments = stats.busy_segments;
        self.segment_ms_p50 = stats.quantile(0.5);
        self.segment_ms_p95 = stats.quantile(0.95);
        self.decode_tps_alone = stats.rates().map(|r| r.0);
        self.decode_tps_beside = stats.rates().map(|r| r.1);
        self.slowdown_ppm_realized = stats.slowdown_ppm();
        self.turns_clean = receipts.clean;
        self.turns_overlapped = receipts.overlapped;
        self.turn_tps_clean = receipts.clean_rate();
        self.turn_slowdown_ppm_p50 = receipts.quantile_ppm(0.5);
        self.turn_slowdown_ppm_p95 = receipts.quantile_ppm(0.95);
        self.turn_slowdown_ppm_max = receipts.most_ppm();
    }
}
