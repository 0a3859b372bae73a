//! The settings of a run.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::{Error, GraphConfig, Method, Result, Schedule, Walks};

/// The settings of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct TrainConfig {
    /// Base tensors to adapt; without any there is no adapter.
    pub targets: Vec<String>,
    /// Float tensors of the model that are trained themselves.
    pub weights: Vec<String>,
    /// Rank of every pair, 1 to 4096.
    pub rank: usize,
    /// Those of `targets` whose pair has another rank.
    pub ranks: BTreeMap<String, usize>,
    /// The adapter's effect is multiplied by `alpha / rank`.
    pub alpha: f32,
    /// The adapter's effect is multiplied by `alpha / sqrt(rank)` instead (Kalajdzievski 2023,
    /// arXiv 2312.03732). A GGUF adapter has one alpha, so all ranks must be equal then.
    pub rslora: bool,
    /// What gradients do.
    pub method: Method,
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
    /// What is held out is evaluated after every so many steps and after the last one, and nowhere
    /// else; 0 evaluates after each epoch.
    pub eval_every: u64,
    /// The run ends after so many evaluations in a row without a new best one; the result is the
    /// best one's then.
    pub patience: Option<u64>,
    /// The result is that of the best evaluation, not of the last step.
    pub keep_best: bool,
    /// Windows longer than a graph, if there may be such.
    pub walks: Option<Walks>,
    /// The graph.
    pub graph: GraphConfig,
}

impl Default for TrainConfig {
    fn default() -> TrainConfig {
        TrainConfig {
            targets: Vec::new(),
            weights: Vec::new(),
            rank: 8,
            ranks: BTreeMap::new(),
            alpha: 16.0,
            rslora: false,
            method: Method::default(),
            lr: 1e-3,
            schedule: Schedule::Constant,
            warmup: 0,
            weight_decay: 0.0,
            epochs: 1,
            accumulate: 1,
            clip: 0.0,
            seed: 0,
            eval_every: 0,
            patience: None,
            keep_best: false,
            walks: None,
            graph: GraphConfig::default(),
        }
    }
}

fn wrong<T>(field: &str, found: impl std::fmt::Display, wanted: &str) -> Result<T> {
    Err(Error::Setting(format!("`{field}` is {found}; expected {wanted}")))
}

impl TrainConfig {
    /// Checks all that can be without a model.
    ///
    /// # Errors
    /// Names the setting and what is expected of it.
    pub fn check(&self) -> Result<()> {
        self.method.check()?;
        if !(self.lr > 0.0 && self.lr <= 1.0) {
            return wrong("lr", self.lr, "a number above 0 and up to 1");
        }
        if !(0.0..=1.0).contains(&self.weight_decay) {
            return wrong("weight_decay", self.weight_decay, "a number from 0 to 1");
        }
        if !(self.clip >= 0.0 && self.clip.is_finite()) {
            return wrong("clip", self.clip, "0 or a positive number");
        }
        if self.epochs == 0 || self.epochs > 10_000 {
            return wrong("epochs", self.epochs, "1 to 10,000");
        }
        if self.accumulate == 0 || self.accumulate > 1024 {
            return wrong("accumulate", self.accumulate, "1 to 1,024");
        }
        if self.patience == Some(0) {
            return wrong("patience", 0, "at least 1 evaluation");
        }
        let dropout = self.graph.dropout.get();
        if !(0.0..1.0).contains(&dropout) {
            return wrong("dropout", dropout, "a number from 0 to below 1");
        }
        if let Some(name) = self.ranks.keys().find(|name| !self.targets.contains(name)) {
            return wrong("ranks", format!("about `{name}`"), "tensors of `targets` alone");
        }
        if self.rslora && self.ranks.values().any(|&rank| rank != self.rank) {
            let expected = "one rank for all targets: the file of an adapter has one alpha, and \
                            the square roots of two ranks need two";
            return wrong("rslora", "set", expected);
        }
        Ok(())
    }

    /// Settings for data whose windows have so many rows at most.
    pub fn shrink(&mut self, rows: usize) {
        match &mut self.walks {
            Some(walks) if rows > self.graph.rows => walks.window = walks.window.min(rows),
            walks => {
                *walks = None;
                self.graph.rows = self.graph.rows.min(rows);
            }
        }
    }

    /// Takes over what an adapter that is trained on decides: targets, ranks and alpha.
    pub fn go_on_with(&mut self, adapter: &model::Adapter) {
        self.targets = adapter.tensors.keys().cloned().collect();
        self.rank = adapter.tensors.values().next().map_or(self.rank, |pair| pair.rank);
        let others = adapter.tensors.iter().filter(|(_, pair)| pair.rank != self.rank);
        self.ranks = others.map(|(name, pair)| (name.clone(), pair.rank)).collect();
        // Its scales stand in the pairs.
        (self.alpha, self.rslora) = (adapter.alpha, false);
    }

    /// Each target with the rank of its pair.
    pub fn ranks(&self) -> impl Iterator<Item = (&str, usize)> {
        let rank = |name: &String| self.ranks.get(name).copied().unwrap_or(self.rank);
        self.targets.iter().map(move |name| (name.as_str(), rank(name)))
    }

    /// Rows of the longest window.
    pub fn longest(&self) -> usize {
        self.walks.map_or(self.graph.rows, |walks| walks.window)
    }

    /// The alpha whose `alpha / rank` is the adapter's scale.
    pub fn effective_alpha(&self) -> f32 {
        match self.rslora {
            true => self.alpha * (self.rank as f32).sqrt(),
            false => self.alpha,
        }
    }

    /// True when the best parameters so far are kept beside the current ones.
    pub(crate) fn keeps_best(&self) -> bool {
        self.keep_best || self.patience.is_some()
    }

    /// Every setting that changes a bit of the result, by name: what a run that goes on must have
    /// in common with the one that stopped.
    pub fn settings(&self) -> Map<String, Value> {
        // By destructuring, so that a new setting cannot be forgotten.
        let TrainConfig {
            targets,
            weights,
            rank,
            ranks,
            alpha,
            rslora,
            method,
            lr,
            schedule,
            warmup,
            weight_decay,
            epochs,
            accumulate,
            clip,
            seed,
            eval_every,
            patience,
            keep_best,
            walks,
            graph,
        } = self;
        // Neither recomputation nor placement changes a bit.
        let GraphConfig { rows, cache, recompute: _, grad_precision, placement: _, dropout } =
            graph;
        // As people write it: 0.003 is not 0.003000000026077032.
        let plain = |v: f32| v.to_string().parse::<f64>().unwrap_or(f64::from(v));
        let settings = json!({
            "targets": targets,
            "weights": weights,
            "rank": rank,
            "ranks": ranks,
            "alpha": plain(*alpha),
            "rslora": rslora,
            "optimizer": method.name(),
            "lr": plain(*lr),
            "schedule": schedule.name(),
            "warmup": warmup,
            "weight_decay": plain(*weight_decay),
            "epochs": epochs,
            "accumulate": accumulate,
            "clip": plain(*clip),
            "seed": seed,
            "eval_every": eval_every,
            "patience": patience,
            "keep_best": keep_best,
            "window": walks.map_or(*rows, |w| w.window),
            "chunk": rows,
            // How much of it the host keeps changes no bit.
            "horizon": walks.map_or(0, |w| w.horizon),
            "cache": cache.name().to_lowercase(),
            "grad_precision": grad_precision.name(),
        });
        match settings {
            Value::Object(mut settings) => {
                let own = method.settings().into_iter();
                settings.extend(own.map(|(name, value)| (name.into(), json!(plain(value)))));
                // Files from before there was dropout are of runs without it.
                if dropout.get() != 0.0 {
                    settings.insert("dropout".into(), json!(plain(dropout.get())));
                }
                settings
            }
            _ => Map::new(),
        }
    }
}
