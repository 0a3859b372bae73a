//! Optimizers and learning-rate schedules.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// How the learning rate changes over a run, after a linear warm-up.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Schedule {
    /// The same throughout.
    Constant,
    /// A line from the peak to 0.
    Linear,
    /// Half a cosine from the peak to 0.
    Cosine,
    /// Warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395): the peak, and over the last
    /// fifth of the steps a line to 0.
    Wsd,
}

impl Schedule {
    /// The name that settings and checkpoints carry.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::Constant => "constant",
            Schedule::Linear => "linear",
            Schedule::Cosine => "cosine",
            Schedule::Wsd => "wsd",
        }
    }

    /// The factor on the learning rate at `step` (from 0) of `steps`: linear to 1 over the
    /// first `warmup` steps, reached on the last of them.
    pub fn factor(self, step: u64, steps: u64, warmup: u64) -> f32 {
        if step < warmup {
            return (step + 1) as f32 / warmup as f32;
        }
        let falling = match self {
            Schedule::Wsd => (steps / 5).clamp(1, steps.saturating_sub(warmup).max(1)),
            _ => steps.saturating_sub(warmup).max(1),
        };
        let before = steps.saturating_sub(falling).max(warmup);
        let done = (step.saturating_sub(before) as f64 / falling as f64).min(1.0);
        match self {
            Schedule::Constant => 1.0,
            Schedule::Linear | Schedule::Wsd => (1.0 - done) as f32,
            Schedule::Cosine => (0.5 * (1.0 + (std::f64::consts::PI * done).cos())) as f32,
        }
    }
}

/// What a gradient does to its parameter. `p` is the parameter, `g` its gradient, `lr` the
/// learning rate; both first shrink `p` by `1 - lr weight_decay`.
#[derive(Copy, Clone, PartialEq, Debug)]
pub enum Method {
    /// AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101):
    /// `m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
    /// p -= lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)`.
    AdamW {
        /// Decay of the first moment, 0 to below 1.
        beta1: f32,
        /// Decay of the second moment, 0 to below 1.
        beta2: f32,
        /// Added to the root of the second moment, above 0.
        eps: f32,
    },
    /// Stochastic gradient descent (Polyak 1964): `m = momentum m + g; p -= lr m`; without
    /// momentum nothing is kept.
    Sgd {
        /// Decay of what earlier gradients left, 0 to below 1.
        momentum: f32,
    },
}

impl Default for Method {
    /// AdamW as everybody sets it.
    fn default() -> Method {
        Method::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    }
}

impl Method {
    /// The name that settings and checkpoints carry.
    pub fn name(self) -> &'static str {
        match self {
            Method::AdamW { .. } => "adamw",
            Method::Sgd { .. } => "sgd",
        }
    }

    /// Its own settings by name.
    pub(crate) fn settings(self) -> Vec<(&'static str, f32)> {
        match self {
            Method::AdamW { beta1, beta2, eps } => {
                vec![("beta1", beta1), ("beta2", beta2), ("eps", eps)]
            }
            Method::Sgd { momentum } => vec![("momentum", momentum)],
        }
    }

    /// Numbers it keeps for each that moves.
    pub fn moments(self) -> usize {
        match self {
            Method::AdamW { .. } => 2,
            Method::Sgd { momentum } => usize::from(momentum != 0.0),
        }
    }

    /// # Errors
    /// Names the setting out of its range.
    pub(crate) fn check(self) -> Result<()> {
        let (settings, eps) = match self {
            Method::AdamW { beta1, beta2, eps } => ([("beta1", beta1), ("beta2", beta2)], eps),
            Method::Sgd { momentum } => ([("momentum", momentum); 2], 1.0),
        };
        for (field, value) in settings {
            if !(0.0..1.0).contains(&value) {
                let message = format!("`{field}` is {value}; expected a number from 0 to below 1");
                return Err(Error::Setting(message));
            }
        }
        match eps > 0.0 && eps.is_finite() {
            true => Ok(()),
            false => Err(Error::Setting(format!("`eps` is {eps}; expected a number above 0"))),
        }
    }
}

/// A method, the steps it has taken, and what it keeps of them, by parameter name.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Optimizer {
    /// What a gradient does.
    pub method: Method,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Steps taken.
    pub steps: u64,
    /// By parameter: as many lists as [`Method::moments`] says.
    pub(crate) moments: BTreeMap<String, Vec<Vec<f32>>>,
}

impl Optimizer {
    /// Before the first step.
    pub fn new(method: Method, weight_decay: f32) -> Optimizer {
        Optimizer { method, weight_decay, ..Optimizer::default() }
    }

    /// Moves every parameter by its gradient.
    ///
    /// # Errors
    /// When a gradient has another length than its parameter or than the moments kept under
    /// its name; nothing has moved then. Or when a number is not finite any more.
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

    /// The length of the moments kept for a parameter, if it has moved before.
    fn kept(&self, name: &str) -> Option<usize> {
        self.moments.get(name).and_then(|m| m.first()).map(Vec::len)
    }

    /// Refuses a gradient or kept moments of another length than their parameter.
    ///
    /// # Errors
    /// Names the parameter and the three lengths.
    pub fn check(&self, name: &str, parameter: usize, gradient: usize) -> Result<()> {
        let kept = self.kept(name).unwrap_or(parameter);
        match parameter == gradient && kept == parameter {
            true => Ok(()),
            false => Err(Error::Stopped(format!(
                "parameter `{name}` has {parameter} numbers, its gradient {gradient}, its moments \
                 {kept}"
            ))),
        }
    }

    /// Refuses moments kept under the names of parameters of another length (those of another
    /// adapter, or of another rank), and those of another method.
    ///
    /// # Errors
    /// Names the first such parameter and both lengths.
    pub fn resume<'a>(&self, parameters: impl Iterator<Item = (&'a str, usize)>) -> Result<()> {
        let wanted = self.method.moments();
        for (name, len) in parameters {
            let Some(moments) = self.moments.get(name) else { continue };
            let lengths: Vec<String> = moments.iter().map(|m| m.len().to_string()).collect();
            if moments.len() != wanted {
                return Err(Error::Setting(format!(
                    "the optimizer keeps {} moments of `{name}`, its method has {wanted}",
                    moments.len()
                )));
            }
            if moments.iter().any(|m| m.len() != len) {
                return Err(Error::Setting(format!(
                    "the optimizer's moments of `{name}` have {} numbers, the parameter has \
                     {len}: they are of another adapter",
                    lengths.join(" and ")
                )));
            }
        }
        Ok(())
    }

    /// Moves one parameter by its gradient, as part of step [`Optimizer::steps`], which the caller
    /// has counted.
    ///
    /// # Errors
    /// As [`Optimizer::check`]; it has not moved then. Or [`Error::NotFinite`], where it has moved
    /// to a number that is not, or a moment has: what is divided by one never moves again.
    pub fn update(&mut self, lr: f32, name: &str, p: &mut [f32], g: &[f32]) -> Result<()> {
        self.update_piece(lr, name, (0, p.len()), p, g)
    }

    /// As [`Optimizer::update`], of a piece of a parameter: its numbers from `from` on, of `len`.
    pub(crate) fn update_piece(
        &mut self,
        lr: f32,
        name: &str,
        (from, len): (usize, usize),
        p: &mut [f32],
        g: &[f32],
    ) -> Result<()> {
        // Of all of it, or of none.
        self.check(name, len, len - p.len().min(len) + g.len())?;
        let t = self.steps.clamp(1, i32::MAX as u64) as i32;
        let shrink = 1.0 - lr * self.weight_decay;
        // One by one: copies of a list would be written now, zeros are given when they are read.
        let fresh = || (0..self.method.moments()).map(|_| vec![0.0; len]).collect();
        let kept = self.moments.entry(name.to_string()).or_insert_with(fresh);
        let mut moments: Vec<&mut [f32]> = Vec::new();
        for moment in kept {
            let lost = || Error::Stopped(format!("a piece of a moment of `{name}` went missing"));
            moments.push(moment.get_mut(from..from + g.len()).ok_or_else(lost)?);
        }
        match (self.method, moments.as_mut_slice()) {
            (Method::AdamW { beta1: b1, beta2: b2, eps }, [m, v]) => {
                let c1 = 1.0 / (1.0 - f64::from(b1).powi(t)) as f32;
                let c2 = 1.0 / (1.0 - f64::from(b2).powi(t)) as f32;
                for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m.iter_mut()).zip(v.iter_mut()) {
                    *m = b1 * *m + (1.0 - b1) * g;
                    *v = b2 * *v + (1.0 - b2) * g * g;
                    *p = *p * shrink - lr * (*m * c1) / ((*v * c2).sqrt() + eps);
                }
            }
            (Method::Sgd { momentum }, [m]) => {
                for ((p, &g), m) in p.iter_mut().zip(g).zip(m.iter_mut()) {
                    *m = momentum * *m + g;
                    *p = *p * shrink - lr * *m;
                }
            }
            (Method::Sgd { .. }, []) => {
                for (p, &g) in p.iter_mut().zip(g) {
                    *p = *p * shrink - lr * g;
                }
            }
            (method, kept) => {
                return Err(Error::Stopped(format!(
                    "the optimizer keeps {} moments of `{name}`, {} has {}",
                    kept.len(),
                    method.name(),
                    method.moments()
                )));
            }
        }
        let lists = moments.iter().map(|m| (&**m, "a moment of")).chain([(&*p, "a number of")]);
        match lists.into_iter().find(|(list, _)| list.iter().any(|v| !v.is_finite())) {
            None => Ok(()),
            Some((_, of)) => Err(Error::NotFinite(format!(
                "step {}: its update leaves {of} `{name}` that is not finite",
                self.steps
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After a step on parameters `a` and `b` of these lengths.
    fn stepped(a: usize, b: usize) -> Optimizer {
        let mut optimizer = Optimizer::new(Method::default(), 0.1);
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
            let (mut optimizer, mut p) = (Optimizer::new(Method::default(), 0.0), [1.0]);
            for (i, &g) in gradients.iter().enumerate() {
                // The bias correction counts steps, also those of others.
                optimizer.steps = [0, 1, 2][i];
                optimizer.step(0.1, &mut [("p".into(), &mut p, &[g])]).unwrap();
            }
            p[0]
        };
        let (mut optimizer, mut a, mut b) = (Optimizer::new(Method::default(), 0.0), [1.0], [1.0]);
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

    /// Adam divides by what it keeps: once that is not finite, nothing would move any more, silently.
    #[test]
    fn what_is_not_finite_any_more_is_refused_by_name() {
        let mut optimizer = Optimizer::new(Method::default(), 0.0);
        optimizer.steps = 1;
        let e = optimizer.update(0.1, "a", &mut [1.0; 3], &[0.5, 1e22, 0.5]).unwrap_err();
        assert!(matches!(e, Error::NotFinite(_)));
        assert_eq!(e.to_string(), "step 1: its update leaves a moment of `a` that is not finite");
        let mut optimizer = Optimizer::new(Method::Sgd { momentum: 0.0 }, 0.0);
        let e = optimizer.update(1.0, "a", &mut [1.0, -3e38], &[0.5, 3e38]).unwrap_err();
        assert!(e.to_string().contains("leaves a number of `a` that is not finite"), "{e}");
    }

    /// Against torch 2.9's `SGD(momentum=0.9)` and plain SGD: three steps written out.
    #[test]
    fn sgd_moves_by_what_earlier_gradients_left() {
        let run = |momentum: f32| {
            let mut optimizer = Optimizer::new(Method::Sgd { momentum }, 0.0);
            let mut p = [1.0f32];
            for g in [0.5f32, -0.25, 1.0] {
                optimizer.step(0.1, &mut [("p".into(), &mut p, &[g])]).unwrap();
            }
            (p[0], optimizer.moments["p"].len())
        };
        let (plain, kept) = run(0.0);
        assert!((plain - (1.0 - 0.1 * 1.25)).abs() < 1e-7 && kept == 0);
        // m: 0.5, 0.2, 1.18.
        let (with, kept) = run(0.9);
        assert!((with - (1.0 - 0.1 * (0.5 + 0.2 + 1.18))).abs() < 1e-6 && kept == 1);
    }

    #[test]
    fn moments_of_another_method_are_refused() {
        let mut optimizer = stepped(3, 4);
        optimizer.method = Method::Sgd { momentum: 0.9 };
        let e = optimizer.resume([("a", 3)].into_iter()).unwrap_err().to_string();
        assert_eq!(e, "the optimizer keeps 2 moments of `a`, its method has 1");
        assert!(optimizer.update(0.1, "a", &mut [0.0; 3], &[0.0; 3]).is_err());
        for (method, field) in [
            (Method::Sgd { momentum: 1.0 }, "momentum"),
            (Method::AdamW { beta1: -0.1, beta2: 0.9, eps: 1e-8 }, "beta1"),
            (Method::AdamW { beta1: 0.1, beta2: f32::NAN, eps: 1e-8 }, "beta2"),
            (Method::AdamW { beta1: 0.1, beta2: 0.9, eps: 0.0 }, "eps"),
        ] {
            assert!(method.check().unwrap_err().to_string().starts_with(&format!("`{field}`")));
        }
    }

    #[test]
    fn schedules_rise_and_fall_as_they_say() {
        let all = |s: Schedule, n: u64, w: u64| -> Vec<f32> {
            (0..n).map(|i| s.factor(i, n, w)).collect()
        };
        assert_eq!(all(Schedule::Constant, 4, 2), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(all(Schedule::Linear, 6, 2), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]);
        assert_eq!(all(Schedule::Wsd, 10, 1)[..8], [1.0; 8]);
        assert_eq!(all(Schedule::Wsd, 10, 1)[8..], [1.0, 0.5]);
        let cosine = all(Schedule::Cosine, 4, 0);
        assert!(cosine[0] == 1.0 && (cosine[2] - 0.5).abs() < 1e-6, "{cosine:?}");
        for schedule in [Schedule::Constant, Schedule::Linear, Schedule::Cosine, Schedule::Wsd] {
            for (steps, warmup) in [(1, 0), (1, 5), (2, 2), (7, 3), (0, 0)] {
                for step in 0..steps + 2 {
                    let factor = schedule.factor(step, steps, warmup);
                    assert!((0.0..=1.0).contains(&factor), "{schedule:?} {step}/{steps}/{warmup}");
                    assert!(step >= steps || factor > 0.0, "{schedule:?} {step}/{steps}/{warmup}");
                }
            }
        }
    }
}
