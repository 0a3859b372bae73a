//! AdamW and learning-rate schedules.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// How the learning rate changes over a run.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Schedule {
    /// The same throughout, after the warm-up.
    Constant,
    /// Half a cosine from the peak to 0.
    Cosine,
}

impl Schedule {
    /// The factor on the learning rate at `step` (from 0) of `steps`: linear to 1 over the
    /// first `warmup` steps, reached on the last of them.
    pub fn factor(self, step: u64, steps: u64, warmup: u64) -> f32 {
        if step < warmup {
            return (step + 1) as f32 / warmup as f32;
        }
        match self {
            Schedule::Constant => 1.0,
            Schedule::Cosine => {
                let rest = steps.saturating_sub(warmup).max(1) as f64;
                let done = (step - warmup) as f64 / rest;
                (0.5 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos())) as f32
            }
        }
    }
}

/// AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): with `g` the gradient,
/// `p *= 1 - lr wd; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
/// p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)`. State is kept by parameter name.
#[derive(Clone, PartialEq, Debug)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Steps taken.
    pub steps: u64,
    moments: BTreeMap<String, (Vec<f32>, Vec<f32>)>,
}

impl Default for AdamW {
    fn default() -> AdamW {
        let moments = BTreeMap::new();
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0, steps: 0, moments }
    }
}

impl AdamW {
    /// Before the first step, with a weight decay.
    pub fn new(weight_decay: f32) -> AdamW {
        AdamW { weight_decay, ..AdamW::default() }
    }

    /// Moves every parameter by its gradient.
    ///
    /// # Errors
    /// When a gradient has another length than its parameter or than the moments kept under
    /// its name; nothing has moved then.
    pub fn step(&mut self, lr: f32, parameters: &mut [(String, &mut [f32], &[f32])]) -> Result<()> {
        for (name, p, g) in parameters.iter() {
            self.check(name, p.len(), g.len())?;
        }
        self.steps += 1;
        for (name, p, g) in parameters.iter_mut() {
            self.update(lr, name, p, g)?;
        }
        Ok(())
    }

    /// Refuses a gradient or kept moments of another length than their parameter.
    ///
    /// # Errors
    /// Names the parameter and the three lengths.
    pub fn check(&self, name: &str, parameter: usize, gradient: usize) -> Result<()> {
        let kept = self.moments.get(name).map_or(parameter, |(m, _)| m.len());
        match parameter == gradient && kept == parameter {
            true => Ok(()),
            false => Err(Error::Stopped(format!(
                "parameter `{name}` has {parameter} numbers, its gradient {gradient}, its moments \
                 {kept}"
            ))),
        }
    }

    /// Moves one parameter by its gradient, as part of step [`AdamW::steps`], which the caller has
    /// counted.
    ///
    /// # Errors
    /// As [`AdamW::check`]; it has not moved then.
    pub fn update(&mut self, lr: f32, name: &str, p: &mut [f32], g: &[f32]) -> Result<()> {
        self.check(name, p.len(), g.len())?;
        let t = self.steps.clamp(1, i32::MAX as u64) as i32;
        let c1 = 1.0 / (1.0 - f64::from(self.beta1).powi(t)) as f32;
        let c2 = 1.0 / (1.0 - f64::from(self.beta2).powi(t)) as f32;
        let (b1, b2, eps) = (self.beta1, self.beta2, self.eps);
        let shrink = 1.0 - lr * self.weight_decay;
        let zeros = || (vec![0.0; g.len()], vec![0.0; g.len()]);
        let (m, v) = self.moments.entry(name.to_string()).or_insert_with(zeros);
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            *m = b1 * *m + (1.0 - b1) * g;
            *v = b2 * *v + (1.0 - b2) * g * g;
            *p = *p * shrink - lr * (*m * c1) / ((*v * c2).sqrt() + eps);
        }
        Ok(())
    }
}
