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

    /// Refuses moments kept under the names of parameters of another length: those of another
    /// adapter, or of another rank.
    ///
    /// # Errors
    /// Names the first such parameter and both lengths.
    pub fn resume<'a>(&self, parameters: impl Iterator<Item = (&'a str, usize)>) -> Result<()> {
        for (name, len) in parameters {
            let Some((m, v)) = self.moments.get(name) else { continue };
            if m.len() != len || v.len() != len {
                return Err(Error::Setting(format!(
                    "the optimizer's moments of `{name}` have {} and {} numbers, the parameter has \
                     {len}: they are of another adapter",
                    m.len(),
                    v.len()
                )));
            }
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// After a step on parameters `a` and `b` of these lengths.
    fn stepped(a: usize, b: usize) -> AdamW {
        let mut optimizer = AdamW::new(0.1);
        let (mut a, mut b) = (vec![1.0; a], vec![1.0; b]);
        let (da, db) = (vec![0.5; a.len()], vec![0.5; b.len()]);
        let parameters = &mut [("a".to_string(), &mut a[..], &da[..]), ("b".into(), &mut b, &db)];
        optimizer.step(0.1, parameters).unwrap();
        optimizer
    }

    /// PRIOR-ART C3: moments were kept by a node's number, so that with another topology one
    /// tensor had another's, silently.
    #[test]
    fn bug_03_moments_are_their_parameters_own() {
        let alone = |gradients: &[f32]| -> f32 {
            let (mut optimizer, mut p) = (AdamW::new(0.0), [1.0]);
            for (i, &g) in gradients.iter().enumerate() {
                // The bias correction counts steps, also those of others.
                optimizer.steps = [0, 1, 2][i];
                optimizer.step(0.1, &mut [("p".into(), &mut p, &[g])]).unwrap();
            }
            p[0]
        };
        let (mut optimizer, mut a, mut b) = (AdamW::new(0.0), [1.0], [1.0]);
        for (i, (ga, gb)) in [(0.5, -2.0), (-0.25, 3.0), (0.125, 1.0)].into_iter().enumerate() {
            // Another order every time.
            let (first, second) =
                (("a".to_string(), &mut a, [ga]), ("b".to_string(), &mut b, [gb]));
            let (first, second) = if i == 1 { (second, first) } else { (first, second) };
            let parameters = &mut [
                (first.0, &mut first.1[..], &first.2[..]),
                (second.0, &mut second.1[..], &second.2[..]),
            ];
            optimizer.step(0.1, parameters).unwrap();
        }
        assert_eq!((a[0], b[0]), (alone(&[0.5, -0.25, 0.125]), alone(&[-2.0, 3.0, 1.0])));
    }

    #[test]
    fn moments_of_another_length_are_refused_by_name() {
        let optimizer = stepped(3, 4);
        optimizer.resume([("a", 3), ("b", 4), ("new", 7)].into_iter()).unwrap();
        let e = optimizer.resume([("a", 3), ("b", 8)].into_iter()).unwrap_err();
        assert_eq!(
            e.to_string(),
            "the optimizer's moments of `b` have 4 and 4 numbers, the parameter has 8: they are of \
             another adapter"
        );
        assert!(matches!(e, Error::Setting(_)));
    }

    /// Nothing moves where one gradient or the moments of one parameter do not fit.
    #[test]
    fn a_step_that_does_not_fit_moves_nothing() {
        for (db, b, kept) in [(3, 4, 4), (4, 4, 5), (5, 4, 4)] {
            let mut optimizer = stepped(3, kept);
            let before = optimizer.clone();
            let (mut pa, mut pb) = (vec![1.0; 3], vec![2.0; b]);
            let (ga, gb) = (vec![0.5; 3], vec![0.5; db]);
            let parameters =
                &mut [("a".to_string(), &mut pa[..], &ga[..]), ("b".into(), &mut pb, &gb)];
            let e = optimizer.step(0.1, parameters).unwrap_err();
            assert_eq!(
                e.to_string(),
                format!("parameter `b` has {b} numbers, its gradient {db}, its moments {kept}",)
            );
            assert!(optimizer == before && pa == [1.0; 3] && pb == vec![2.0; b]);
        }
    }
}
