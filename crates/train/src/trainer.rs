//! The loop: windows in, an adapter out.

use std::sync::Arc;

use graph::Device;
use model::{Adapter, Model};

use crate::{
    AdamW, Error, Example, Gradients, GraphConfig, Parameters, Result, Schedule, Window, pack,
};

/// The settings of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainConfig {
    /// Base tensors to adapt.
    pub targets: Vec<String>,
    /// Rank of every pair, 1 to 4096.
    pub rank: usize,
    /// The adapter's effect is multiplied by `alpha / rank`.
    pub alpha: f32,
    /// Peak learning rate, above 0 and up to 1.
    pub lr: f32,
    /// How it changes.
    pub schedule: Schedule,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// Decoupled weight decay, 0 to 1.
    pub weight_decay: f32,
    /// Passes over the data, 1 to 10,000.
    pub epochs: u64,
    /// Windows per optimizer step, 1 to 1,024.
    pub accumulate: usize,
    /// Gradients are scaled down to this global norm; 0 leaves them.
    pub clip: f32,
    /// Seeds the matrices and the order of the data.
    pub seed: u64,
    /// The graph.
    pub graph: GraphConfig,
}

impl TrainConfig {
    fn check(&self) -> Result<()> {
        let wrong = |field: &str, found: String, wanted: &str| {
            Err(Error::Setting(format!("`{field}` is {found}; expected {wanted}")))
        };
        if !(self.lr > 0.0 && self.lr <= 1.0) {
            return wrong("lr", self.lr.to_string(), "a number above 0 and up to 1");
        }
        if !(0.0..=1.0).contains(&self.weight_decay) {
            return wrong("weight_decay", self.weight_decay.to_string(), "a number from 0 to 1");
        }
        if !(self.clip >= 0.0 && self.clip.is_finite()) {
            return wrong("clip", self.clip.to_string(), "0 or a positive number");
        }
        if self.epochs == 0 || self.epochs > 10_000 {
            return wrong("epochs", self.epochs.to_string(), "1 to 10,000");
        }
        if self.accumulate == 0 || self.accumulate > 1024 {
            return wrong("accumulate", self.accumulate.to_string(), "1 to 1,024");
        }
        if self.targets.is_empty() {
            return wrong("targets", "empty".into(), "at least one projection");
        }
        Ok(())
    }
}

/// What a run reports as it goes.
#[derive(Clone, PartialEq, Debug)]
pub enum Event {
    /// Before the first step.
    Start {
        /// Optimizer steps to come.
        steps: u64,
        /// Numbers that move.
        parameters: usize,
        /// Bytes of the arena of the largest graph that the data need.
        arena_bytes: usize,
        /// Bytes each thread scratches on beside it.
        scratch_bytes: usize,
    },
    /// After each optimizer step.
    Step {
        /// From 1.
        step: u64,
        /// Mean loss per weight of the step's tokens, before it moved, in nats.
        loss: f64,
        /// Global norm of the gradient before clipping.
        grad_norm: f64,
        /// Learning rate it used.
        lr: f32,
        /// Rows the step read (padding not counted).
        rows: usize,
    },
}

/// How a run ended.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The adapter.
    pub adapter: Adapter,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Loss of the last step, in nats.
    pub last_loss: f64,
    /// Tensor pairs whose B moved away from zero, of all.
    pub moved: (usize, usize),
}

/// A training run over a model.
pub struct Trainer<'m> {
    gradients: Gradients<'m>,
    parameters: Parameters,
    optimizer: AdamW,
    config: TrainConfig,
}

impl<'m> Trainer<'m> {
    /// Sets a run up: checks the settings, draws a fresh adapter, and differentiates and plans
    /// the graph.
    ///
    /// # Errors
    /// A setting, by field; or the refusal, before anything is allocated for the run.
    pub fn new(model: &'m Model, config: TrainConfig) -> Result<Trainer<'m>> {
        Trainer::with_fallback(model, config, None)
    }

    /// As [`Trainer::new`], with another device for what the model's own has no kernel for.
    ///
    /// # Errors
    /// As [`Trainer::new`].
    pub fn with_fallback(
        model: &'m Model,
        config: TrainConfig,
        fallback: Option<Arc<dyn Device>>,
    ) -> Result<Trainer<'m>> {
        config.check()?;
        let adapter =
            Adapter::fresh(model, &config.targets, config.rank, config.alpha, config.seed)?;
        let parameters = Parameters { adapter: Some(adapter), ..Parameters::default() };
        let mut gradients = Gradients::new(model, config.graph.clone())?;
        if let Some(device) = fallback {
            gradients = gradients.with_fallback(device);
        }
        gradients.plan(&parameters)?;
        let optimizer = AdamW::new(config.weight_decay);
        Ok(Trainer { gradients, parameters, optimizer, config })
    }

    /// The gradient graphs it runs.
    pub fn gradients(&self) -> &Gradients<'m> {
        &self.gradients
    }

    /// The parameters as they are.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The plan of the largest graph, which says exactly what a run takes.
    ///
    /// # Errors
    /// As [`Gradients::plan`].
    pub fn plan(&mut self) -> Result<&graph::Placed> {
        self.gradients.plan(&self.parameters)
    }

    /// One optimizer step over windows: their loss is the weighted mean over all their tokens,
    /// however they are split. Returns the loss and the gradient's norm, before the step.
    ///
    /// # Errors
    /// As [`Gradients::of`]; the parameters have not moved then.
    pub fn step(&mut self, windows: &[Window], lr: f32) -> Result<(f64, f64)> {
        let weight = |w: &Window| w.examples.iter().map(Example::weight).sum::<f64>();
        let total: f64 = windows.iter().map(weight).sum();
        let mut loss = 0.0;
        let mut sum: Vec<Vec<f32>> = Vec::new();
        let names = self.parameters.names();
        for window in windows {
            let mut part = self.gradients.of(window, total, &self.parameters, &())?;
            loss += part.loss;
            let grads = names.iter().map(|n| part.grads.remove(n).unwrap_or_default());
            if sum.is_empty() {
                sum = grads.collect();
            } else {
                for (to, from) in sum.iter_mut().zip(grads) {
                    to.iter_mut().zip(from).for_each(|(a, b)| *a += b);
                }
            }
        }
        let square = |g: &f32| f64::from(*g) * f64::from(*g);
        let norm = sum.iter().flatten().map(square).sum::<f64>().sqrt();
        if !norm.is_finite() {
            return Err(Error::Stopped(format!(
                "step {}: the gradient's norm is {norm}",
                self.optimizer.steps + 1
            )));
        }
        if self.config.clip > 0.0 {
            let factor = f64::from(self.config.clip) / (norm + 1e-6);
            if factor < 1.0 {
                sum.iter_mut().flatten().for_each(|g| *g *= factor as f32);
            }
        }
        let values = self.parameters.values_mut();
        let mut moves: Vec<(String, &mut [f32], &[f32])> =
            values.into_iter().zip(&sum).map(|((n, v), g)| (n, v, g.as_slice())).collect();
        self.optimizer.step(lr, &mut moves)?;
        Ok((loss, norm))
    }

    /// Runs all epochs. `on` hears of every step; when it returns false the run ends there, and
    /// the adapter is what it has become.
    ///
    /// # Errors
    /// As [`Trainer::step`]; and when a target has not moved at all.
    pub fn run(
        mut self,
        examples: &[Example],
        on: &mut dyn FnMut(Event) -> bool,
    ) -> Result<Outcome> {
        let mut random = text::sampler::Rng::new(self.config.seed ^ 0x6f72_6465_7200);
        let mut order: Vec<usize> = (0..examples.len()).collect();
        let rows = self.config.graph.rows;
        let most = self.gradients.most_sequences();
        let accumulate = self.config.accumulate;
        // Every epoch packs its own order, so the number of steps is known by doing it.
        let mut epochs: Vec<Vec<Vec<usize>>> = Vec::new();
        for _ in 0..self.config.epochs {
            for i in (1..order.len()).rev() {
                order.swap(i, (random.next_f64() * (i + 1) as f64) as usize);
            }
            epochs.push(pack(examples, &order, rows, most)?);
        }
        let steps: u64 = epochs.iter().map(|e| e.len().div_ceil(accumulate) as u64).sum();
        let labelled = epochs.iter().flatten().map(|window| {
            let chosen = window.iter().filter_map(|&i| examples.get(i));
            chosen.map(Example::labelled).sum::<usize>()
        });
        let labelled = labelled.max().unwrap_or(0);
        let graph = self.gradients.plan_for(labelled, &self.parameters)?;
        let (arena_bytes, scratch_bytes) = (graph.arena_bytes(), graph.scratch_bytes());
        let parameters = self.parameters.adapter.as_ref().map_or(0, Adapter::parameters);
        if !on(Event::Start { steps, parameters, arena_bytes, scratch_bytes }) {
            return self.finish(f64::NAN);
        }
        self.gradients.reserve(labelled, &self.parameters)?;
        let mut last = f64::NAN;
        for packed in epochs.iter().flat_map(|e| e.chunks(accumulate)) {
            let windows: Vec<Window> = packed.iter().map(|w| Window::of(examples, w)).collect();
            let step = self.optimizer.steps;
            let factor = self.config.schedule.factor(step, steps, self.config.warmup);
            let lr = self.config.lr * factor;
            let (loss, grad_norm) = self.step(&windows, lr)?;
            last = loss;
            let rows = windows.iter().map(Window::rows).sum();
            if !on(Event::Step { step: step + 1, loss, grad_norm, lr, rows }) {
                break;
            }
        }
        self.finish(last)
    }

    fn finish(self, last_loss: f64) -> Result<Outcome> {
        let steps = self.optimizer.steps;
        let adapter = self.parameters.adapter.unwrap_or(Adapter {
            alpha: self.config.alpha,
            tensors: std::collections::BTreeMap::new(),
        });
        let dead: Vec<&str> = adapter
            .tensors
            .iter()
            .filter(|(_, t)| t.b.iter().all(|&b| b == 0.0))
            .map(|(n, _)| n.as_str())
            .collect();
        let total = adapter.tensors.len();
        if steps > 0 && !dead.is_empty() {
            return Err(Error::Stopped(format!(
                "after {steps} steps {} of {total} targets have not moved: {}",
                dead.len(),
                dead.join(", ")
            )));
        }
        let moved = (total - dead.len(), total);
        Ok(Outcome { adapter, steps, last_loss, moved })
    }
}

/// The projections that a list of patterns names: `all` for every projection inside a layer,
/// `attn` or `ffn` for those halves, or part of a tensor name such as `attn_q` or `blk.3.`.
///
/// # Errors
/// A pattern that matches nothing, with the candidates.
pub fn select_targets(model: &Model, patterns: &[String]) -> Result<Vec<String>> {
    let projections: Vec<String> =
        model.projections().into_iter().filter(|n| n.starts_with("blk.")).collect();
    let mut chosen = std::collections::BTreeSet::new();
    for pattern in patterns {
        let hit = |name: &&String| match pattern.as_str() {
            "all" => true,
            "attn" => name.contains(".attn_"),
            "ffn" => name.contains(".ffn_"),
            part => name.contains(part),
        };
        let matches: Vec<&String> = projections.iter().filter(hit).collect();
        if matches.is_empty() {
            let kinds: std::collections::BTreeSet<&str> =
                projections.iter().filter_map(|n| n.split('.').nth(2)).collect();
            let kinds: Vec<&str> = kinds.into_iter().collect();
            return Err(Error::Setting(format!(
                "target `{pattern}` matches no projection; candidates: all, attn, ffn, {}",
                kinds.join(", ")
            )));
        }
        chosen.extend(matches.into_iter().cloned());
    }
    Ok(chosen.into_iter().collect())
}
