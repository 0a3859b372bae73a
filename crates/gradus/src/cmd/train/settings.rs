//! The settings of a run, as they are typed.

use clap::ValueEnum;
use graph::{GradPrecision, Recompute};
use model::Model;
use train::{GraphConfig, Method, Schedule, TrainConfig, Walks};

use crate::error::{Error, Result};
use crate::options::{CacheType, mib};

/// What decides the adapter, beside the model and the data.
#[derive(clap::Args, Debug, Clone)]
#[command(next_help_heading = "Training")]
pub struct Settings {
    /// What to adapt: `all-linear` (or `all`), `attn`, `ffn`, `experts`, `router`, `embed`, `head`,
    /// projections as GGUF or PEFT call them, such as `attn_q` or `q_proj`, a part of tensor names
    /// such as `blk.3.`, or `none`
    #[arg(long, value_name = "NAME,...", default_value = "all", value_delimiter = ',')]
    pub targets: Vec<String>,

    /// Train in the last K layers alone, and what is in no layer
    #[arg(long, value_name = "K")]
    pub top_layers: Option<usize>,

    /// The model's own float tensors to train: `all`, or a part of their names such as `norm`;
    /// with `--targets none` without an adapter
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', num_args = 1)]
    pub train_weights: Vec<String>,

    /// Rank of the adapter's matrices [default: 8]
    #[arg(long, value_name = "R")]
    pub rank: Option<usize>,

    /// Another rank for some of the targets, named as for `--targets`
    #[arg(long, value_name = "NAME=R,...", value_delimiter = ',', num_args = 1)]
    pub rank_of: Vec<String>,

    /// The adapter's effect is multiplied by alpha / rank [default: 16]
    #[arg(long, value_name = "X")]
    pub alpha: Option<f32>,

    /// Multiply it by alpha / sqrt(rank) instead
    #[arg(long)]
    pub rslora: bool,

    /// Drop this share of what the adapter reads, 0 to below 1, in training alone; drawn from the
    /// seed anew in each step
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub dropout: f32,

    /// What a gradient does
    #[arg(long, value_enum, value_name = "NAME", default_value = "adamw")]
    pub optimizer: OptimizerName,

    /// How much of earlier gradients SGD keeps, 0 to below 1
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub momentum: f32,

    /// Peak learning rate
    #[arg(long, value_name = "X", default_value_t = 1e-3)]
    pub lr: f32,

    /// How the learning rate goes on after the warm-up
    #[arg(long, value_enum, value_name = "NAME", default_value = "cosine")]
    pub schedule: ScheduleName,

    /// Steps in which the learning rate rises to its peak
    #[arg(long, value_name = "STEPS", default_value_t = 4)]
    pub warmup: u64,

    /// Passes over the data
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub epochs: u64,

    /// Windows per step
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub accumulate: usize,

    /// Scale gradients down to this norm; 0 leaves them
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub clip: f32,

    /// Decoupled weight decay
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub weight_decay: f32,

    /// Seed of the adapter's matrices, of the order of the data and of what is dropped
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Evaluate what is held out after every so many steps and after the last one; 0 evaluates
    /// after each pass over the data instead
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    pub eval_every: u64,

    /// End when so many evaluations in a row gave no new best one, with the best one's result
    #[arg(long, value_name = "N")]
    pub patience: Option<u64>,

    /// Write the result of the best evaluation, not that of the last step
    #[arg(long)]
    pub keep_best: bool,

    /// Rows of a graph: longer windows are walked in chunks of so many, with the loss and the
    /// gradient of the whole window and a fraction of its memory
    #[arg(long, value_name = "ROWS")]
    pub chunk: Option<usize>,

    /// How many positions before a chunk its attention sends gradients back to; 0 for all
    #[arg(long, value_name = "ROWS", default_value_t = 0, requires = "chunk")]
    pub walk_horizon: usize,

    /// Most memory that walks keep keys, values and states in, in MiB; 0 for no bound
    #[arg(long, value_name = "MIB", default_value_t = 0, requires = "chunk")]
    pub walk_host_budget: u64,

    /// What to compute again in the backward pass instead of keeping it; changes no bit. `auto`
    /// takes what fits the memory there is
    #[arg(long, value_enum, value_name = "WHAT", default_value = "auto")]
    pub recompute: RecomputeName,

    /// What gradients pass quantized weights in; sums are at least f32 in any case. `auto` takes
    /// bf16 where the processor has AMX, and int16 where it has AVX-512 VNNI alone; a run that goes
    /// on keeps what it began with
    #[arg(long, value_enum, value_name = "WHAT", default_value = "auto")]
    pub grad_precision: PrecisionName,

    /// What keys and values pass through: that of the cache the adapter will be used with
    #[arg(long, value_enum, value_name = "TYPE", default_value = "f16")]
    pub cache_type: CacheType,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// AdamW, with moments decaying by 0.9 and 0.999
    Adamw,
    /// Stochastic gradient descent
    Sgd,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleName {
    /// The same throughout
    Constant,
    /// A line down to 0
    Linear,
    /// Half a cosine, down to 0
    Cosine,
    /// The same, then a line down to 0 over the last fifth
    Wsd,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeName {
    /// Nothing if that fits the memory, else each layer
    Auto,
    /// Nothing: fastest
    None,
    /// Each layer: a fraction of the memory, a third more work
    PerLayer,
}

impl RecomputeName {
    pub fn policy(self) -> Recompute {
        match self {
            RecomputeName::Auto | RecomputeName::None => Recompute::None,
            RecomputeName::PerLayer => Recompute::PerLayer,
        }
    }
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrecisionName {
    /// What is fastest on this processor
    Auto,
    /// f32
    F32,
    /// bf16: gradients within a cosine of 0.9999 of those of f32
    Bf16,
    /// int16: integers with a scale for each 64 elements, closer to f32 than bf16
    Int16,
}

impl PrecisionName {
    pub fn of(self, model: &Model) -> GradPrecision {
        match self {
            PrecisionName::Auto => model.device().grad_precision(),
            PrecisionName::F32 => GradPrecision::F32,
            PrecisionName::Bf16 => GradPrecision::Bf16,
            PrecisionName::Int16 => GradPrecision::Int16,
        }
    }
}

/// A command line with nothing but settings.
#[derive(clap::Parser)]
struct Alone {
    #[command(flatten)]
    settings: Settings,
}

impl Settings {
    /// The settings where nothing is typed.
    ///
    /// # Errors
    /// None that can happen: every default is a valid argument.
    pub fn standard() -> Result<Settings> {
        let alone = <Alone as clap::Parser>::try_parse_from(["gradus"]);
        alone.map(|a| a.settings).map_err(|e| Error::fault(e.to_string()))
    }

    /// True unless no adapter is asked for.
    pub fn adapts(&self) -> bool {
        self.targets != ["none"]
    }

    /// Refuses what is typed and would be without effect.
    ///
    /// # Errors
    /// Names the option.
    pub fn check(&self, window: usize) -> Result<()> {
        let of_adapter = [
            ("--rank", self.rank.is_some()),
            ("--rank-of", !self.rank_of.is_empty()),
            ("--alpha", self.alpha.is_some()),
            ("--rslora", self.rslora),
        ];
        if let (Some((option, _)), false) = (of_adapter.iter().find(|o| o.1), self.adapts()) {
            return Err(Error::invalid(format!(
                "`{option}` is an adapter's, and `--targets none` trains none; leave one of them out"
            )));
        }
        let of_walks = [
            ("--walk-horizon", self.walk_horizon > 0),
            ("--walk-host-budget", self.walk_host_budget > 0),
        ];
        let is_walked = self.chunk.is_some_and(|chunk| chunk < window);
        if let (Some((option, _)), false) = (of_walks.iter().find(|o| o.1), is_walked) {
            return Err(Error::invalid(format!(
                "`{option}` is set, but a window of {window} rows is one graph; expected a \
                 `--chunk` that is smaller than `--window`"
            )));
        }
        Ok(())
    }

    /// The tensors that patterns name, in the layers that are adapted.
    fn select(&self, model: &Model, patterns: &[String]) -> Result<Vec<String>> {
        self.in_top_layers(model, train::select_targets(model, patterns)?)
    }

    fn in_top_layers(&self, model: &Model, names: Vec<String>) -> Result<Vec<String>> {
        Ok(match self.top_layers {
            Some(k) if !names.is_empty() => train::top_layers(model, names, k)?,
            _ => names,
        })
    }

    /// The trainer's settings, for a model and windows of so many rows.
    ///
    /// # Errors
    /// When a target matches no projection, or settings exclude each other; see also
    /// [`Settings::check`].
    pub fn config(&self, model: &Model, window: usize) -> Result<TrainConfig> {
        let targets = match self.adapts() {
            true => self.select(model, &self.targets)?,
            false => Vec::new(),
        };
        // What is more than can be counted is no bound.
        let host_budget = usize::try_from(mib("--walk-host-budget", self.walk_host_budget)?);
        let host_budget = host_budget.unwrap_or(usize::MAX);
        let mut config = TrainConfig {
            targets,
            weights: self
                .in_top_layers(model, train::select_weights(model, &self.train_weights)?)?,
            rank: self.rank.unwrap_or(8),
            alpha: self.alpha.unwrap_or(16.0),
            rslora: self.rslora,
            method: match self.optimizer {
                OptimizerName::Sgd => Method::Sgd { momentum: self.momentum },
                OptimizerName::Adamw if self.momentum != 0.0 => {
                    return Err(Error::invalid("`--momentum` needs `--optimizer sgd`"));
                }
                OptimizerName::Adamw => Method::default(),
            },
            lr: self.lr,
            schedule: match self.schedule {
                ScheduleName::Constant => Schedule::Constant,
                ScheduleName::Linear => Schedule::Linear,
                ScheduleName::Cosine => Schedule::Cosine,
                ScheduleName::Wsd => Schedule::Wsd,
            },
            warmup: self.warmup,
            weight_decay: self.weight_decay,
            epochs: self.epochs,
            accumulate: self.accumulate,
            clip: self.clip,
            seed: self.seed,
            eval_every: self.eval_every,
            patience: self.patience,
            keep_best: self.keep_best,
            walks: self.chunk.filter(|&chunk| chunk < window).map(|_| Walks {
                window,
                horizon: self.walk_horizon,
                host_budget,
            }),
            graph: GraphConfig {
                rows: self.chunk.map_or(window, |chunk| chunk.min(window)),
                cache: self.cache_type.dtype(),
                recompute: self.recompute.policy(),
                grad_precision: self.grad_precision.of(model),
                dropout: self.dropout.into(),
                ..GraphConfig::default()
            },
            ..TrainConfig::default()
        };
        for given in &self.rank_of {
            let parts = given.split_once('=').filter(|(pattern, _)| !pattern.trim().is_empty());
            let parts = parts.and_then(|(pattern, rank)| Some((pattern, rank.parse().ok()?)));
            let Some((pattern, rank)) = parts else {
                let message = format!("`--rank-of {given}`: expected NAME=RANK, such as ffn=4");
                return Err(Error::invalid(message));
            };
            // Of what is adapted: `ffn=4` beside `--targets blk.3.` is about that layer.
            let mut names = self.select(model, &[pattern.to_string()])?;
            names.retain(|name| config.targets.contains(name));
            if names.is_empty() {
                let message = format!("`--rank-of {given}` names none of the targets");
                return Err(Error::invalid(message));
            }
            config.ranks.extend(names.into_iter().map(|name| (name, rank)));
        }
        Ok(config)
    }
}
