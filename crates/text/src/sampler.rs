//! From logits to the next token.
//!
//! The chain and its order are llama.cpp's default (`common_sampler`): logit bias; penalties;
//! top-k; typical-p; top-p; min-p; temperature; draw. At temperature 0 it ends after the
//! penalties with the greatest logit. Each filter sees the distribution that the one before it
//! left, renormalized; a setting at its neutral value does nothing.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Error;

mod math;
mod rng;

use math::LaneSum;
pub use rng::Rng;

/// The settings of a [`Sampler`]. The default is llama.cpp's.
///
/// Read from a document, absent fields take their default and unknown fields are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplerConfig {
    /// Divides the logits before the draw, 0 to 100. 0 takes the most likely token (of equals
    /// the one with the lowest id) and ignores every filter.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens. 0: all.
    pub top_k: u32,
    /// Keeps the smallest set of most likely tokens whose probabilities reach this sum, 0 to 1
    /// (nucleus sampling, Holtzman et al. 2020). 1: all.
    pub top_p: f32,
    /// Keeps the tokens at least this likely relative to the most likely one, 0 to 1 (Nguyen et
    /// al. 2024). 0: all.
    pub min_p: f32,
    /// Keeps the tokens whose information is nearest to the entropy of the distribution, until
    /// their probabilities exceed this sum, 0 to 1 (locally typical sampling, Meister et al.
    /// 2023). 1: all.
    pub typical_p: f32,
    /// For tokens in the window: divides a positive logit and multiplies a negative one, above
    /// 0 and up to 100 (Keskar et al. 2019, with llama.cpp's correction for negative logits).
    /// 1: off.
    pub repeat_penalty: f32,
    /// Subtracted from the logit of each token in the window, -100 to 100. 0: off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time it is in the window, -100 to
    /// 100. 0: off.
    pub frequency_penalty: f32,
    /// The window of the three penalties: this many of the last tokens of the history, prompt
    /// included. 0 switches the penalties off.
    pub repeat_last_n: u32,
    /// Added to the logits of these tokens before anything else, in nats; `-inf` bans a token.
    pub logit_bias: BTreeMap<u32, f32>,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_last_n: 64,
            logit_bias: BTreeMap::new(),
        }
    }
}

impl SamplerConfig {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// The model's own distribution: temperature 1, no filter.
    pub fn unfiltered() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..Self::default() }
    }

    /// Checks every field against its range.
    ///
    /// # Errors
    /// Names the first field that is out of range.
    pub fn validate(&self) -> Result<(), Error> {
        let within = |field, value: f32, range: std::ops::RangeInclusive<f32>, expected| {
            // A value that is not a number is in no range.
            if range.contains(&value) {
                Ok(())
            } else {
                Err(Error::Setting { field, found: value.to_string(), expected })
            }
        };
        within("temperature", self.temperature, 0.0..=100.0, "a number from 0 to 100")?;
        within("top_p", self.top_p, 0.0..=1.0, "a number from 0 to 1")?;
        within("min_p", self.min_p, 0.0..=1.0, "a number from 0 to 1")?;
        within("typical_p", self.typical_p, 0.0..=1.0, "a number from 0 to 1")?;
        let positive = f32::MIN_POSITIVE..=100.0;
        within("repeat_penalty", self.repeat_penalty, positive, "a number above 0, at most 100")?;
        let penalty = "a number from -100 to 100";
        within("presence_penalty", self.presence_penalty, -100.0..=100.0, penalty)?;
        within("frequency_penalty", self.frequency_penalty, -100.0..=100.0, penalty)?;
        match self.logit_bias.iter().find(|(_, b)| b.is_nan() || **b == f32::INFINITY) {
            Some((id, bias)) => Err(Error::Setting {
                field: "logit_bias",
                found: format!("{bias} for token {id}"),
                expected: "finite numbers or -inf",
            }),
            None => Ok(()),
        }
    }
}

/// A token, and how likely it was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub id: u32,
    /// Its log-probability under the distribution it was drawn from (after bias, penalties,
    /// filters and temperature), in nats: finite, at most 0, and 0 at temperature 0, where the
    /// choice is certain. A trainer that needs the probability a token was sampled with needs
    /// this one; the model's own comes from the device that computed the logits.
    pub logprob: f32,
}

#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// The exponential of the logit, once there is no further filter.
    weight: f32,
}

impl Candidate {
    fn new(id: u32, logit: f32) -> Self {
        Self { id, logit, weight: 0.0 }
    }
}

/// More likely first, of equals the lower id: a total order, so that what a filter keeps does
/// not depend on how it searched.
fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Draws tokens from logits.
///
/// The draw is a function of the configuration, the seed, the number of draws before it, the
/// logits and the history; nothing else. It does not depend on how the filters were computed.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    rng: Rng,
    // Kept between calls for their storage only.
    logits: Vec<f32>,
    window: Vec<u32>,
    candidates: Vec<Candidate>,
}

impl std::fmt::Debug for Candidate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.id, self.logit)
    }
}

impl Sampler {
    /// A sampler at draw 0 of `seed`.
    ///
    /// # Errors
    /// A field of `config` is out of range.
    pub fn new(config: SamplerConfig, seed: u64) -> Result<Self, Error> {
        config.validate()?;
        Ok(Self {
            config,
            rng: Rng::new(seed),
            logits: Vec::new(),
            window: Vec::new(),
            candidates: Vec::new(),
        })
    }

    /// The settings.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// Draws made so far, and so the random number that the next one uses.
    pub fn draws(&self) -> u64 {
        self.rng.drawn
    }

    /// Goes on as after `draws` draws: for a generation that was set aside.
    pub fn set_draws(&mut self, draws: u64) {
        self.rng.drawn = draws;
    }

    /// The next token. `logits` are the model's, `[vocabulary]`; `history` is what the penalties
    /// look at: every token so far, prompt included, the newest last.
    ///
    /// # Errors
    /// A logit is not a number or `+inf`, none is above `-inf`, or a biased token or one of the
    /// history is outside the vocabulary. A failed call makes no draw.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<Sampled, Error> {
        self.adjust(logits, history)?;
        if self.config.temperature == 0.0 {
            let best = self.argmax()?;
            self.rng.drawn = self.rng.drawn.wrapping_add(1);
            return Ok(Sampled { id: best.id, logprob: 0.0 });
        }
        self.filter()?;
        let (best, log_total) = self.temper();
        let total: f64 = self.candidates.iter().map(|c| f64::from(c.weight)).sum();
        let target = total * self.rng.next_f64();
        let mut sum = 0.0;
        // Rounding may leave the target unreached; the most likely token stands in for it.
        let reached = self.candidates.iter().find(|candidate| {
            sum += f64::from(candidate.weight);
            sum > target
        });
        let chosen = reached.copied().unwrap_or(Candidate::new(best, 0.0));
        Ok(Sampled { id: chosen.id, logprob: (chosen.logit - log_total).min(0.0) })
    }

    /// The distribution that [`Self::sample`] would draw from: tokens in ascending order with
    /// their log-probabilities.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn distribution(&mut self, logits: &[f32], history: &[u32]) -> Result<Vec<Sampled>, Error> {
        self.adjust(logits, history)?;
        if self.config.temperature == 0.0 {
            return Ok(vec![Sampled { id: self.argmax()?.id, logprob: 0.0 }]);
        }
        self.filter()?;
        let (_, log_total) = self.temper();
        let sampled = |c: &Candidate| Sampled { id: c.id, logprob: (c.logit - log_total).min(0.0) };
        Ok(self.candidates.iter().filter(|c| c.weight > 0.0).map(sampled).collect())
    }

    /// Copies the logits, adds the bias and takes off the penalties.
    fn adjust(&mut self, logits: &[f32], history: &[u32]) -> Result<(), Error> {
        check(logits).map_err(|what| Error::Logits { what })?;
        self.logits.clear();
        // -0 becomes 0, or equals could be told apart.
        self.logits.extend(logits.iter().map(|logit| logit + 0.0));
        let size = logits.len();
        for (&id, &bias) in &self.config.logit_bias {
            *self.logits.get_mut(id as usize).ok_or(Error::Token { id, size })? += bias;
        }
        let SamplerConfig { repeat_penalty, presence_penalty, frequency_penalty, .. } = self.config;
        let last = (self.config.repeat_last_n as usize).min(history.len());
        let idle = repeat_penalty == 1.0 && presence_penalty == 0.0 && frequency_penalty == 0.0;
        if idle && self.config.logit_bias.is_empty() {
            return Ok(());
        }
        if !idle {
            self.window.clear();
            self.window.extend(history.iter().rev().take(last));
            self.window.sort_unstable();
            for run in self.window.chunk_by(|a, b| a == b) {
                let [id, ..] = *run else { continue };
                let logit = self.logits.get_mut(id as usize).ok_or(Error::Token { id, size })?;
                if *logit <= 0.0 {
                    *logit *= repeat_penalty;
                } else {
                    *logit /= repeat_penalty;
                }
                *logit -= run.len() as f32 * frequency_penalty + presence_penalty;
            }
        }
        check(&self.logits).map_err(|what| Error::Adjusted { what })
    }

    fn argmax(&self) -> Result<Candidate, Error> {
        let max = math::max(&self.logits);
        let best = self.logits.iter().zip(0..).find(|(logit, _)| **logit == max);
        match best {
            Some((&logit, id)) if logit > f32::NEG_INFINITY => Ok(Candidate::new(id, logit)),
            _ => Err(Error::Adjusted { what: "no token is left to choose from".into() }),
        }
    }

    /// Leaves the candidates that every filter keeps, in ascending order of id.
    fn filter(&mut self) -> Result<(), Error> {
        let Self { config, logits, candidates, .. } = self;
        top_k(logits, config.top_k, candidates);
        if candidates.is_empty() {
            return Err(Error::Adjusted { what: "no token is left to choose from".into() });
        }
        if config.typical_p < 1.0 {
            typical_p(candidates, config.typical_p);
        }
        if config.top_p < 1.0 {
            top_p(candidates, config.top_p);
        }
        if config.min_p > 0.0 {
            min_p(candidates, config.min_p);
        }
        Ok(())
    }

    /// Replaces the candidates' logits by `(logit - max) / temperature`. Gives the id of the
    /// first with the greatest logit, and the logarithm of the sum of their exponentials.
    fn temper(&mut self) -> (u32, f32) {
        let best = self.candidates.iter().min_by(|a, b| by_logit(a, b));
        let Candidate { id, logit: max, .. } = best.copied().unwrap_or(Candidate::new(0, 0.0));
        let mut sum = LaneSum::new();
        for candidate in &mut self.candidates {
            candidate.logit = (candidate.logit - max) / self.config.temperature;
            candidate.weight = math::exp(candidate.logit);
            sum.add(candidate.id, candidate.weight);
        }
        (id, math::ln(sum.total()))
    }
}

/// Refuses logits that no distribution can be made of, and says why.
fn check(logits: &[f32]) -> Result<(), String> {
    let bad = |x: f32| x.is_nan() || x == f32::INFINITY;
    let look = |(any, left), &x: &f32| (any | bad(x), left | (x > f32::NEG_INFINITY));
    match logits.iter().fold((false, false), look) {
        (false, true) => Ok(()),
        (false, false) => Err("no token is left to choose from".into()),
        (true, _) => {
            let first = logits.iter().enumerate().find(|(_, x)| bad(**x));
            let (index, value) = first.unwrap_or((0, &f32::NAN));
            Err(format!("logit {index} of {} is {value}", logits.len()))
        }
    }
}

/// Log-probabilities relative to these candidates: subtract the result from a logit.
fn log_total(candidates: &[Candidate]) -> f32 {
    let max = candidates.iter().fold(f32::NEG_INFINITY, |m, c| m.max(c.logit));
    let mut sum = LaneSum::new();
    for c in candidates {
        sum.add(c.id, math::exp(c.logit - max));
    }
    max + math::ln(sum.total())
}

/// The `k` greatest logits, or all above `-inf` if `k` is 0, in ascending order of id.
fn top_k(logits: &[f32], k: u32, candidates: &mut Vec<Candidate>) {
    let k = if k == 0 { usize::MAX } else { k as usize };
    candidates.clear();
    // What is not above the k-th of those seen so far is out: of equals, the earlier stay.
    let mut least = f32::NEG_INFINITY;
    let full = k.saturating_mul(2).max(256);
    for (&logit, id) in logits.iter().zip(0..) {
        if logit > least {
            candidates.push(Candidate::new(id, logit));
            if candidates.len() == full {
                least = keep_greatest(candidates, k);
            }
        }
    }
    keep_greatest(candidates, k);
    candidates.sort_unstable_by_key(|c| c.id);
}

/// Leaves the `k` greatest and gives the least of their logits.
fn keep_greatest(candidates: &mut Vec<Candidate>, k: usize) -> f32 {
    if candidates.len() <= k {
        return f32::NEG_INFINITY;
    }
    let (_, last, _) = candidates.select_nth_unstable_by(k - 1, by_logit);
    let least = last.logit;
    candidates.truncate(k);
    least
}

/// Keeps the first candidates in `order` until `enough` says that their probabilities suffice.
fn take_until(
    candidates: &mut Vec<Candidate>,
    log_total: f32,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
    enough: impl Fn(f64) -> bool,
) {
    // Sorted piece by piece: the first few hundred of a large vocabulary are nearly always
    // enough.
    let mut sum = 0.0;
    let mut kept = 0;
    let mut piece = 256;
    'pieces: while let Some(rest) = candidates.get_mut(kept..).filter(|rest| !rest.is_empty()) {
        let here =
            if piece < rest.len() { rest.select_nth_unstable_by(piece, &order).0 } else { rest };
        here.sort_unstable_by(&order);
        for candidate in here {
            kept += 1;
            sum += f64::from(math::exp(candidate.logit - log_total));
            if enough(sum) {
                break 'pieces;
            }
        }
        piece *= 8;
    }
    candidates.truncate(kept);
    candidates.sort_unstable_by_key(|c| c.id);
}

fn top_p(candidates: &mut Vec<Candidate>, p: f32) {
    let log_total = log_total(candidates);
    take_until(candidates, log_total, by_logit, |sum| sum >= f64::from(p));
}

fn typical_p(candidates: &mut Vec<Candidate>, p: f32) {
    let log_total = log_total(candidates);
    let mut entropy = LaneSum::new();
    for c in candidates.iter() {
        let log_p = c.logit - log_total;
        let p = math::exp(log_p);
        if p > 0.0 {
            entropy.add(c.id, p * -log_p);
        }
    }
    let entropy = entropy.total();
    let distance = |c: &Candidate| (log_total - c.logit - entropy).abs();
    let order =
        |a: &Candidate, b: &Candidate| distance(a).total_cmp(&distance(b)).then(a.id.cmp(&b.id));
    take_until(candidates, log_total, order, |sum| sum > f64::from(p));
}

fn min_p(candidates: &mut Vec<Candidate>, p: f32) {
    let max = candidates.iter().fold(f32::NEG_INFINITY, |m, c| m.max(c.logit));
    let least = max + math::ln(p);
    candidates.retain(|c| c.logit >= least);
}

#[cfg(test)]
mod tests;
